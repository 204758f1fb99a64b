"""AO-MILP and WSM-MILP: the contents of devices that serve most together.

`most_goodput` chooses how many devices have which content (`sloop.solvers.contents`), such that most requests per
second are served. The two programs differ in the metric of computing: the peak of achieved occupancy, or SM use
weighted with time. Devices of one kind are interchangeable, so the program counts contents and not devices; as printed,
with a variable for each model, batch and device, it has the same optima and takes many times as long.

Source: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505, 2024),
sections 5 and 6, with its printed constraints corrected.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sloop.api import ROUNDING
from sloop.api.solvers import CONTENTS_MAX, WHOLE_DEVICE, BatchOption, Content, Resident, highs, possible_contents

NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes, as in `sloop.solvers.budget`."""
SMALL: Final = 1e-4
"""What a replica with a batch of b costs in the objective, times 1 + b/128, so that among equal placements the one with
fewer replicas and smaller batches is chosen. Twice this times models and devices stays below the 0.01 requests/s to
which rates are known, and the step from a batch of 4 to 8 is above the absolute gap of HiGHS, 1e-6."""
SMALL_BATCH: Final = 128.0
SMALL_DEVICE: Final = 0.02
"""What a device costs, as a part of what a replica costs: less than a larger batch, so that ties go to the fewest
devices. Without it HiGHS breaks them, in each version otherwise."""


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A model with its rate, its deadline and its batch sizes, ascending."""

    name: str
    rate_rps: float
    slo_ms: float
    options: tuple[BatchOption, ...]

    @property
    def in_time(self) -> tuple[BatchOption, ...]:
        """The batches whose inference alone takes at most the deadline, and which fit on a device."""
        return tuple(
            option
            for option in self.options
            if option.latency_ms <= self.slo_ms + ROUNDING and max(option.compute, option.memory) <= WHOLE_DEVICE
        )


@dataclass(frozen=True, slots=True)
class Colocation:
    """The contents of the devices in use, and how many requests of each model they are expected to serve."""

    contents: tuple[Content, ...]
    served_rps: tuple[float, ...]
    proven: bool = True
    """Whether no placement serves more."""

    @property
    def total_rps(self) -> float:
        """The estimated goodput."""
        return math.fsum(self.served_rps)


def goodput(models: Sequence[SharedModel], contents: Sequence[Content]) -> tuple[float, ...]:
    """The planner's estimate for each model: what its replicas serve, at most its rate. It ignores waiting time."""
    served = [0.0] * len(models)
    for content in contents:
        for at, option in content:
            served[at] += option.rate_rps
    return tuple(min(model.rate_rps, own) for model, own in zip(models, served, strict=True))


def most_goodput(
    models: Sequence[SharedModel],
    devices: int,
    *,
    replicas_max: int = 0,
    small: float = SMALL,
    nodes_max: int = NODES_MAX,
) -> Colocation:
    """The contents of at most `devices` equal devices with the most goodput; each model has one batch size everywhere,
    and at most one replica on a device. `replicas_max` limits the replicas of a model (0: one on each device).

    With `small` 0, any of the best placements; below 0, the one with the largest batches.
    """
    options = [model.in_time if model.rate_rps > 0 else () for model in models]
    if small > 0:
        options = [_undominated(own, model.rate_rps) for model, own in zip(models, options, strict=True)]
    contents = possible_contents(options)
    if not contents or devices < 1:
        return Colocation((), (0.0,) * len(models))
    batches = [(at, option) for at, own in enumerate(options) for option in own]
    choice = {resident: len(contents) + place for place, resident in enumerate(batches)}
    served = {at: len(contents) + len(batches) + at for at in range(len(models))}
    limit = min(devices, replicas_max or devices)
    device = abs(small) * SMALL_DEVICE
    costs = [device + sum(small * (1 + option.batch / SMALL_BATCH) for _, option in content) for content in contents]
    costs += [0.0] * len(batches) + [-model.rate_rps for model in models]
    most = [float(devices)] * len(contents) + [1.0] * (len(batches) + len(models))
    rows = list(_rows(models, contents, choice, served, devices, limit))
    integers = len(contents) + len(batches)
    found = highs.minimise(costs, rows, integers=integers, nodes_max=nodes_max, most=most, presolve=False)
    if found.values is None:  # nothing but the node limit can be the reason: no device in use is feasible
        return Colocation((), (0.0,) * len(models), proven=False)
    counts = [round(value) for value in found.values[: len(contents)]]
    chosen = tuple(content for content, count in zip(contents, counts, strict=True) for _ in range(count))
    return Colocation(chosen, goodput(models, chosen), found.proven and len(contents) < CONTENTS_MAX)


def _undominated(options: Sequence[BatchOption], rate_rps: float) -> tuple[BatchOption, ...]:
    """The batches without those for which a smaller one needs no more and serves as much of the rate with any number of
    replicas: no best placement has them, and the contents with them would take the places of others."""
    return tuple(
        each
        for each in options
        if not any(
            other.batch < each.batch
            and other.compute <= each.compute
            and other.memory <= each.memory
            and other.rate_rps >= min(each.rate_rps, rate_rps)
            for other in options
        )
    )


def _rows(
    models: Sequence[SharedModel],
    contents: Sequence[Content],
    choice: Mapping[Resident, int],
    served: Mapping[int, int],
    devices: int,
    limit: int,
) -> Iterator[highs.Row]:
    """The constraints: enough devices; one batch for each model; and replicas that serve it.

    A model with a batch needs at most as many replicas as carry its rate, because a content without one of its models
    is a content too. This bound, tighter than the number of devices, saves most of the search.
    """
    yield dict.fromkeys(range(len(contents)), 1.0), -math.inf, float(devices)
    with_resident: dict[Resident, list[int]] = {}
    for column, content in enumerate(contents):
        for resident in content:
            with_resident.setdefault(resident, []).append(column)
    for resident, columns in with_resident.items():
        at, option = resident
        enough = math.ceil(models[at].rate_rps / option.rate_rps - ROUNDING) if option.rate_rps > 0 else 0
        row = dict.fromkeys(columns, 1.0)
        yield row | {choice[resident]: -float(min(limit, enough))}, -math.inf, 0.0
    for at in range(len(models)):
        own = {resident: column for resident, column in choice.items() if resident[0] == at}
        if own:
            yield dict.fromkeys(own.values(), 1.0), -math.inf, 1.0
        row = {served[at]: 1.0}  # the part of the rate that is served, so that coefficients are near 1
        for resident in own:
            row |= dict.fromkeys(with_resident.get(resident, ()), -resident[1].rate_rps / models[at].rate_rps)
        yield row, -math.inf, 0.0


# Routing


def planned_rates(models: Sequence[SharedModel], contents: Sequence[Content]) -> list[tuple[float, ...]]:
    """By device and replica on it, the requests per second that the replica is to serve: the model's rate, divided in
    proportion to what its replicas serve at most. These are the weights of smooth weighted round robin."""
    capacity = [0.0] * len(models)
    for content in contents:
        for at, option in content:
            capacity[at] += option.rate_rps
    return [
        tuple(models[at].rate_rps * option.rate_rps / capacity[at] if capacity[at] else 0.0 for at, option in content)
        for content in contents
    ]


def mean_batch(batch: int, rate_rps: float, wait_ms: float, *, timer: bool = True) -> float:
    """The mean size of a batch that is built from Poisson arrivals until it is full or `wait_ms` after its first
    request: the mean of min(b, 1 + Poisson(λW)). Without a `timer`, the time is checked only when a request arrives, so
    the first one after `wait_ms` joins the batch too: min(b, 2 + Poisson(λW)). At most `batch` ≥ 1."""
    first, mean = 1 if timer else 2, rate_rps * wait_ms / 1000.0
    if batch <= first or mean <= 0:
        return float(min(batch, first))
    log_mean = math.log(mean)
    missing = (
        (batch - first - more) * math.exp(more * log_mean - mean - math.lgamma(more + 1))
        for more in range(batch - first)
    )
    return batch - math.fsum(missing)


SHARES_ARE_LIMITS: Final[Mapping[str, bool]] = {
    "igniter": True,
    "usher": True,
    "usher-wao": True,
    "ao-milp": False,
    "wsm-milp": False,
}
"""Whether a worker's share of its device is a limit (MPS), by the placement, as the thesis evaluates it. iGniter plans
shares; Usher's are the compute that is needed."""
