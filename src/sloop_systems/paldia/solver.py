"""PALDIA's arithmetic: which requests run together and which queue, on which hardware, in how many replicas.

PALDIA serves a model on one node at a time. Of the N present requests, it queues y, which run batch by batch, and runs
the others together, each batch in a worker of its own. Batches that run together slow each other down, and queued
requests wait: `best_split` finds the y with which the last request ends earliest, at T. The choice of hardware compares
these T with the deadline.

    T(y) = Solo · y/BS + Solo · S(k)   for k ≥ 1,   k = (N - y)/BS batches together

S is a law of interference (`sloop.profile.interference`). With the law as PALDIA prints it, S = max(1, k · FBR), T
grows with y for every FBR below 1, so that queueing never pays and PALDIA would be the same as its baseline; the
measured results need a convex law. T assumes that queued batches run one after the other when all that run together
have ended. If a queued batch starts as soon as another ends, the last one usually ends earlier (`executed_ms`).

Source: PALDIA (a framework for serverless inference on mixed CPUs and GPUs); specification, sections 2.1 (Eq. 1, as
corrected in 2.1.1), 2.3 to 2.5 and 2.7. Where the publication says nothing, the specification's defaults hold. Numbers
only: milliseconds, requests, dollars per hour. Nothing here knows views, plans or time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from typing import Final, Literal, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sloop.api import CLIENTS_MAX, ROUNDING, WIDE_ROUNDING
from sloop.api.devices import NO_SLOWDOWN, DeviceDemand, Interference

ALONE: Final = DeviceDemand()
"""The demand of a model whose demand is unknown."""

Sharing = Literal["hybrid", "together", "queue", "resident"]
"""How a device is shared: with the best split, with all batches together (MPS only), or one after the other. `resident`
is not PALDIA's: a constant number of batches run at a time, each starting when another ends, such that the last one
ends earliest."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One model on one kind of accelerator, or of CPU."""

    latencies_ms: tuple[float, ...]
    """Durations of batches that run alone: `latencies_ms[n]` of a batch of n, up to the largest, BS. The first is 0."""
    law: Interference = NO_SLOWDOWN
    """The law by which its batches slow each other down."""
    largest: DeviceDemand = ALONE
    """The demand of its largest batch on the device; the demand of memory bandwidth is FBR."""
    together_max: int = CLIENTS_MAX
    """The most batches that may run together, 1 or more."""

    @property
    def batch(self) -> int:
        """The largest batch, BS."""
        return len(self.latencies_ms) - 1

    @property
    def solo_ms(self) -> float:
        """The duration of a full batch that is alone."""
        return self.latencies_ms[-1]

    @property
    def per_request_ms(self) -> float:
        """The time per request in full batches that run alone; the shorter, the more performant is the hardware."""
        return self.solo_ms / self.batch

    def demand(self, requests: int) -> DeviceDemand:
        """The demand of a batch of this size on the device; its bandwidth is in proportion to its size."""
        part, of = requests / self.batch, self.largest
        return structs.replace(of, batch=requests, full=part * of.full, bandwidth=part * of.bandwidth)


class DeviceSplit(NamedTuple):
    """`queued` of the requests wait for the others; the last request ends after `t_max_ms`."""

    queued: int
    t_max_ms: float


def t_max_ms(model: DeviceModel, count: int, queued: NDArray[np.int64]) -> NDArray[np.float64]:
    """When the last of `count` requests ends, for each number of queued ones: Eq. 1 with the law of the model."""
    together = (count - queued) / model.batch
    factors = model.law.among_equals(model.largest, np.maximum(1.0, together))
    running_ms = model.solo_ms * np.where(together >= 1.0, factors, together)
    found: NDArray[np.float64] = model.solo_ms * queued / model.batch + running_ms
    return found


def rounds_ms(model: DeviceModel, count: int, residents: NDArray[np.int64]) -> NDArray[np.float64]:
    """When the last of `count` requests ends, for each number of batches that run at a time, if a batch starts as soon
    as another one ends. Equal batches run in rounds, and the last round has those that are left. Exact for full batches
    (`executed_ms`); an incomplete batch counts as the fraction of a batch.

    Source: PALDIA, specification 2.1.1 (b), the best fixed residency.
    """
    batches = count / model.batch
    rounds = np.floor(batches / residents + ROUNDING)
    left = np.maximum(0.0, batches - rounds * residents)
    factors = model.law.among_equals(model.largest, residents.astype(np.float64))
    last = np.where(left >= 1.0, model.law.among_equals(model.largest, np.maximum(1.0, left)), left)
    found: NDArray[np.float64] = model.solo_ms * (rounds * factors + last)
    return found


def best_split(model: DeviceModel, count: int, sharing: Sharing = "hybrid", *, gain_min: float = 0.0) -> DeviceSplit:
    """The number of queued requests with which the last one ends earliest; of equal ones the largest.

    At least one full batch runs, and at most `together_max`. Requests that fit one batch are not split. `together`
    queues only the requests that exceed `together_max`, `queue` all but one batch. With `resident` the end is computed
    by `rounds_ms`, otherwise by `t_max_ms`. A split is used only if it is predicted to end earlier than both `together`
    and `queue`, by the fraction `gain_min` of their time; otherwise the better of these two is used.
    """
    if count <= 0:
        return DeviceSplit(0, 0.0)
    if count <= model.batch:
        return DeviceSplit(0, model.latencies_ms[count])
    least = max(0, count - model.batch * max(1, model.together_max))
    most = count - model.batch
    if sharing == "together":
        most = least
    elif sharing == "queue":
        least = most
    if sharing == "resident":
        residents = np.arange(min(ceil(count / model.batch), max(1, model.together_max)), 0, -1)
        candidates, ends_ms = np.maximum(0, count - model.batch * residents), rounds_ms(model, count, residents)
    else:
        candidates = np.arange(least, most + 1)
        ends_ms = t_max_ms(model, count, candidates)
    best = int(np.flatnonzero(ends_ms <= ends_ms.min() + WIDE_ROUNDING)[-1])
    pure = -1 if ends_ms[-1] <= ends_ms[0] + WIDE_ROUNDING else 0
    if ends_ms[best] > (1.0 - gain_min) * ends_ms[pure] + WIDE_ROUNDING:
        best = pure
    return DeviceSplit(int(candidates[best]), float(ends_ms[best]))


def serial_ms(model: DeviceModel, count: int) -> float:
    """When the last of `count` requests ends if full batches run one after the other and the rest comes last. This is
    for a CPU on which the framework uses all cores for each batch."""
    full, left = divmod(max(0, count), model.batch)
    return full * model.solo_ms + model.latencies_ms[left]


def batches_of(count: int, batch: int, *, even: bool = False) -> list[int]:
    """Requests in batches of at most `batch`: full ones with the rest last or, with `even`, as few that differ by at
    most one request, so that no small batch comes last."""
    if not even:
        full, left = divmod(count, batch)
        return [batch] * full + [left] * (left > 0)
    number = ceil(count / batch)
    return [count // number + (index < count % number) for index in range(number)]


# What a split takes when it is executed


def executed_ms(model: DeviceModel, running: Sequence[int], queued: Sequence[int], most: int) -> float:
    """When the last batch ends on an idle device. `running` are the sizes of the batches that start at once, `queued`
    those of the others: each starts, in this order, as soon as fewer than `most` batches run.

    Processor sharing (specification, 3.4): a batch of b is Solo · b/BS of work, and each batch proceeds at the rate
    1/S for those that run beside it. `most` = 0: the queue waits for all that run, then runs one by one (the serial
    lane, which T bounds); otherwise it is work-conserving.
    """
    work = deque((model.solo_ms * size / model.batch, model.demand(size)) for size in queued)
    active = [(model.solo_ms * size / model.batch, model.demand(size)) for size in running]
    is_serial, now_ms = most == 0, 0.0
    while active or work:
        room = (0 if active else 1) if is_serial else most - len(active)
        while work and room > 0:
            active.append(work.popleft())
            room -= 1
        factors = [
            model.law.slowdown(own, [other for place, (_, other) in enumerate(active) if place != at])
            for at, (_, own) in enumerate(active)
        ]
        step_ms = min(left_ms * factor for (left_ms, _), factor in zip(active, factors, strict=True))
        now_ms += step_ms
        after = [(left_ms - step_ms / factor, own) for (left_ms, own), factor in zip(active, factors, strict=True)]
        active = [(left_ms, own) for left_ms, own in after if left_ms > ROUNDING]
    return now_ms


# Which hardware


class HardwareOffer(NamedTuple):
    """A kind of hardware with what it takes there until the last of the expected requests ends."""

    name: str
    usd_per_h: float
    t_max_ms: float
    per_request_ms: float
    """See `DeviceModel`."""
    is_gpu: bool


HardwareRule = Literal["slo_first", "tolerance", "isolated", "fastest"]
"""`slo_first`: the cheapest that is fast enough (PALDIA, section III). `tolerance`: the cheapest GPU that is nearly as
fast as the fastest (PALDIA, section IV). `isolated`: as `slo_first`, but with the times of a batch that runs alone,
however many batches there are (PALDIA's baselines that save cost). `fastest`: the most performant, at any price."""


def choose_hardware(
    offers: Sequence[HardwareOffer],
    choice: HardwareRule,
    *,
    cpu_limit_ms: float,
    gpu_limit_ms: float,
    tolerance_ms: float,
) -> HardwareOffer:
    """The kind of hardware to use; there must be at least one offer.

    A kind is capable if its time is at most its limit. They are looked at in the order of prices (then of times, then
    of names), up to the first capable CPU, which wins outright if no GPU is cheaper. `tolerance` chooses the cheapest
    of these GPUs whose time is within `tolerance_ms` of the shortest. Without a capable kind it is the most performant
    GPU, or the most performant CPU if there is no GPU.
    """
    best = min(offers, key=lambda each: (not each.is_gpu, each.per_request_ms, each.name))
    if choice == "fastest":
        return best
    capable = sorted(
        (each for each in offers if each.t_max_ms <= (gpu_limit_ms if each.is_gpu else cpu_limit_ms) + ROUNDING),
        key=lambda each: (each.usd_per_h, each.t_max_ms, each.name),
    )
    if not capable:
        return best
    if choice != "tolerance" or not capable[0].is_gpu:
        return capable[0]
    gpus = list(takewhile(lambda each: each.is_gpu, capable))
    shortest_ms = min(each.t_max_ms for each in gpus)
    return next(each for each in gpus if each.t_max_ms <= shortest_ms + tolerance_ms + ROUNDING)


class Mismatches(NamedTuple):
    """How often in a row something else than the present hardware was chosen, and whether to switch now."""

    in_a_row: int
    switches: bool


def count_mismatch(count: int, *, is_present: bool, is_pending: bool, limit: int) -> Mismatches:
    """One decision later (Algorithm 1 with its counter kept between calls). With the limit 3 the switch comes with the
    fourth mismatch in a row, whatever was chosen in between; while a switch is under way nothing is counted."""
    if is_present:
        return Mismatches(0, switches=False)
    if is_pending:
        return Mismatches(count, switches=False)
    if count >= limit:
        return Mismatches(0, switches=True)
    return Mismatches(count + 1, switches=False)


# How many replicas


def workers_needed(model: DeviceModel, count: int, split: DeviceSplit) -> int:
    """One worker for each batch that runs; queued batches use one of these again. 0 without requests."""
    return max(1, ceil((count - split.queued) / model.batch)) if count > 0 else 0


@dataclass(frozen=True, slots=True)
class DelayedTermination:
    """How many workers to keep: the most that were wanted at any time within the last `keep_alive_ns`.

    So a worker ends when it has been one too many for that long without interruption, and each peak begins the time
    anew (specification, 2.5).
    """

    keep_alive_ns: int
    wanted: tuple[tuple[int, int], ...] = ()
    """(instant, how many), each with fewer than the one before: the later of two that is as large hides the other."""

    @property
    def count(self) -> int:
        """How many to keep."""
        return self.wanted[0][1]

    def keep(self, now_ns: int, wanted: int) -> "DelayedTermination":
        """So many are wanted from now on."""
        recent = list(self.wanted)
        # What was wanted until now counts until now, so its time begins when something else is wanted.
        held = recent[-1][1] if recent else wanted
        while recent and recent[-1][1] <= max(held, wanted):
            recent.pop()
        if held > wanted:
            recent.append((now_ns, held))
        recent.append((now_ns, wanted))
        while recent[0][0] <= now_ns - self.keep_alive_ns and len(recent) > 1:
            del recent[0]
        return DelayedTermination(self.keep_alive_ns, tuple(recent))
