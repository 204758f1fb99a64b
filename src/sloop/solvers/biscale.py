"""Replicas, cores of each and batch for every stage of a graph at once: the fewest cores that serve a rate in time.

Promises the optimum of Biscale's integer program on a grid of whole milliseconds (dissertation chapter P4, Eq. P4.6):
with one size of replicas (horizontal, Alg. 4), with given counts of replicas (vertical, Alg. 3), or, where those cannot
carry the rate, for as much of it as they can and new replicas for the rest (split). The printed loops contain slips;
the readings taken are those of the specification, sections 2.4 to 2.6 and 6.1 to 6.6. Pure arithmetic in the paper's
units: ms, requests per second, and cores counted in units, which a caller makes a whole core or a part of one.

Notation as in the paper: l(b, c) latency of a batch, q(b) the wait for it to fill, h(b, c) throughput of a replica, λ
rate, n replicas. Ties in cores go to the smaller sum of batches, then to the lower latency.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sloop.solvers.budget import Options, Segment, cheapest_tree
from sloop.solvers.choice import chains_of, improved
from sloop.solvers.graph import Chains

Throughput = Literal["pure", "with_queue"]
"""h = 1000 b/l, as printed; or ⌊1000 b/(⌊l⌋ + ⌊q⌋)⌋ as in the public artefact: the wait counts as work, which leaves
head-room."""

RATE_RPS_MIN = 1e-6
"""What stands in for no requests at all: one replica of one unit, batches of one."""
SLACK = 1e-9
"""Rates are floats; this much is neither a further replica nor a further millisecond."""


@dataclass(frozen=True, slots=True)
class Model:
    """A stage as the program sees it: `latency_ms[c - 1, b - 1]` is l(b, c); each request visits it `visits` times."""

    name: str
    latency_ms: NDArray[np.float64]
    visits: float = 1.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What one stage gets: `replicas` of `cores` units each, batches of `batch`, which fill within `wait_ms`."""

    replicas: int
    cores: int
    batch: int
    latency_ms: float
    wait_ms: float
    throughput_rps: float
    """h of one replica."""


@dataclass(frozen=True, slots=True)
class Split:
    """Vertical choices for `carried_rps`, and how many further replicas of each stage the rest of the rate needs."""

    choices: tuple[Choice, ...]
    extra: tuple[int, ...]
    carried_rps: float


@dataclass(frozen=True)
class Program:
    """The stages, the chains of them that must keep a time, in slots, and the sum of all cores there are, in units.

    Biscale's own applications are one chain, see `chain`. Where stages meet or start later, segments are cut: `forests`
    are ways to cut, as `cheapest_tree` wants them, whose answers keep the segments. The cheapest is taken, and what the
    cuts have cost won back as far as changes of single stages can.
    """

    models: tuple[Model, ...]
    segments: tuple[Segment, ...]
    throughput: Throughput = "with_queue"
    cores_total: float = math.inf
    forests: tuple[tuple[Segment, ...], ...] = ()
    """None where the segments are a forest."""
    slot_ms: int = 1
    """The grid: a millisecond as published, or coarser for long deadlines; latencies are rounded up to it."""

    def horizontal(self, rate_rps: float) -> tuple[Choice, ...] | None:
        """As many replicas as the rate needs, all of one unit, or of the fewest units with which the SLO can be kept;
        of a stage that has no use for so many, its most.

        None where no size keeps it, or `cores_total` is too little.
        """
        offers = [self._offer(model, rate_rps) for model in self.models]
        most = [len(offer.latency_ms) - 1 for offer in offers]
        rows = [np.minimum(np.arange(max(most) + 1), own) for own in most]
        least = sum(offer.least_cores()[own] for offer, own in zip(offers, rows, strict=True))
        for row in np.flatnonzero(least <= self.cores_total + SLACK).tolist():
            found = self._solve([_horizontal(offer, min(row, own)) for offer, own in zip(offers, most, strict=True)])
            if found is not None:
                return found
        return None

    def vertical(self, rate_rps: float, replicas: Sequence[int]) -> tuple[Choice, ...] | None:
        """Cores and batches with which `replicas` of each stage carry the rate in time; None where none do."""
        return self._solve(
            [_vertical(self._offer(model, rate_rps), count) for model, count in zip(self.models, replicas, strict=True)]
        )

    def split(self, rate_rps: float, replicas: Sequence[int]) -> Split | None:
        """Vertical if it can be; else vertical for a whole rate below, at a boundary of what these replicas carry.

        Feasibility is not monotone in the rate, since batches fill faster at a higher one: the boundary (feasible, and
        infeasible one request per second above) is normally, not always, the highest. None where even one request per
        second is too much.
        """
        whole = self.vertical(rate_rps, replicas)
        if whole is not None:
            return Split(whole, (0,) * len(self.models), rate_rps)
        carried, carried_rps, beyond_rps = self.vertical(1, replicas), 1, math.ceil(rate_rps)
        if carried is None:
            return None
        while beyond_rps - carried_rps > 1:
            middle_rps = (carried_rps + beyond_rps) // 2
            found = self.vertical(middle_rps, replicas)
            if found is None:
                beyond_rps = middle_rps
            else:
                carried, carried_rps = found, middle_rps
        missing_rps = max(0.0, rate_rps - carried_rps)
        extra = (
            math.ceil(missing_rps * model.visits / choice.throughput_rps - SLACK)
            for model, choice in zip(self.models, carried, strict=True)
        )
        return Split(carried, tuple(extra), carried_rps)

    @cached_property
    def _chains(self) -> Chains:
        return chains_of(self.segments, len(self.models))

    def _offer(self, model: Model, rate_rps: float) -> "_Offer":
        rate_rps = max(RATE_RPS_MIN, rate_rps * model.visits)
        batches = np.arange(1, model.latency_ms.shape[1] + 1)
        wait_ms = 1000.0 * (batches - 1) / rate_rps
        if self.throughput == "pure":
            throughput_rps = 1000.0 * batches / model.latency_ms
        else:
            busy_ms = np.maximum(1.0, np.floor(model.latency_ms) + np.floor(wait_ms))
            throughput_rps = np.floor(1000.0 * batches / busy_ms)
        whole = np.ceil(model.latency_ms / self.slot_ms - SLACK) + np.ceil(wait_ms / self.slot_ms - SLACK)
        slots = whole.astype(np.int64)
        return _Offer(model.latency_ms, wait_ms, throughput_rps, slots, rate_rps)

    def _solve(self, offered: Sequence["_Offered"]) -> tuple[Choice, ...] | None:
        """The cheapest combination within the SLO: fewest cores, then smallest batches, then lowest latency."""
        if not all(len(one.slots) for one in offered):
            return None
        quickest = [int(one.slots.argmin()) for one in offered]
        if (self._chains.left([one.slots[index] for one, index in zip(offered, quickest, strict=True)]) < 0).any():
            return None  # most of what a search tries, at no cost
        if sum(int((one.replicas * one.cores).min()) for one in offered) > self.cores_total + SLACK:
            return None
        options = self._options(offered)
        answers = [cheapest_tree(options, segments) for segments in self.forests or (self.segments,)]
        if self.forests:
            # Where cuts were too cautious for any answer there is one still.
            answers = [improved(options, self._chains, answer or quickest) for answer in answers]
        found = min((self._picked(offered, answer) for answer in answers if answer), key=_worth, default=None)
        return found if found and cores_of(found) <= self.cores_total + SLACK else None

    def _options(self, offered: Sequence["_Offered"]) -> list[Options]:
        """Cores first, then batches, then slots."""
        slots = 1 + len(self.models) * max(segment.slots for segment in self.segments)
        batches = 1 + sum(model.latency_ms.shape[1] for model in self.models)
        return [
            Options((one.replicas * one.cores * batches + one.batches) * slots + one.slots, one.slots)
            for one in offered
        ]

    def _picked(self, offered: Sequence["_Offered"], indices: Sequence[int]) -> tuple[Choice, ...]:
        return tuple(one.choice(index) for one, index in zip(offered, indices, strict=True))


def cores_of(choices: Iterable[Choice]) -> int:
    """All cores together, in units."""
    return sum(choice.replicas * choice.cores for choice in choices)


def _worth(choices: Sequence[Choice]) -> tuple[int, int, float]:
    total_ms = sum(choice.latency_ms + choice.wait_ms for choice in choices)
    return cores_of(choices), sum(choice.batch for choice in choices), total_ms


def chain(
    models: Sequence[Model], slo_ms: int, *, throughput: Throughput = "with_queue", cores_total: float = math.inf
) -> Program:
    """The program of stages one after the other, all of them within `slo_ms`."""
    return Program(tuple(models), (Segment(tuple(range(len(models))), slo_ms),), throughput, cores_total)


@dataclass(frozen=True, slots=True)
class _Offer:
    """All that a stage can do at one rate. Arrays of shape (cores, batches), `wait_ms` of shape (batches,)."""

    latency_ms: NDArray[np.float64]
    wait_ms: NDArray[np.float64]
    throughput_rps: NDArray[np.float64]
    slots: NDArray[np.int64]
    rate_rps: float

    def needed(self) -> NDArray[np.float64]:
        """Replicas that carry the rate; infinite where none do. Shape (cores, batches)."""
        with np.errstate(divide="ignore"):
            needed: NDArray[np.float64] = np.ceil(self.rate_rps / self.throughput_rps - SLACK)
        return np.maximum(needed, 1.0)

    def least_cores(self) -> NDArray[np.float64]:
        """By size of replica, shape (cores,): the fewest cores that carry the rate, in time or not."""
        fewest: NDArray[np.float64] = self.needed().min(axis=1)
        return fewest * np.arange(1, len(fewest) + 1)


@dataclass(frozen=True, slots=True)
class _Offered:
    """Those of an offer's settings that carry the rate, as columns, and the replicas each needs."""

    offer: _Offer
    replicas: NDArray[np.int64]
    cores: NDArray[np.int64]
    batches: NDArray[np.int64]
    slots: NDArray[np.int64]

    def choice(self, index: int) -> Choice:
        cores, batch = int(self.cores[index]), int(self.batches[index])
        return Choice(
            replicas=int(self.replicas[index]),
            cores=cores,
            batch=batch,
            latency_ms=float(self.offer.latency_ms[cores - 1, batch - 1]),
            wait_ms=float(self.offer.wait_ms[batch - 1]),
            throughput_rps=float(self.offer.throughput_rps[cores - 1, batch - 1]),
        )


def _horizontal(offer: _Offer, row: int) -> _Offered:
    """Replicas of `row` + 1 units, as many as the rate needs."""
    needed = offer.needed()[row]
    columns = np.flatnonzero(np.isfinite(needed))
    replicas = needed[columns].astype(np.int64)
    return _Offered(offer, replicas, np.full(len(columns), row + 1), columns + 1, offer.slots[row, columns])


def _vertical(offer: _Offer, replicas: int) -> _Offered:
    """Cores and batches with which so many replicas carry the rate."""
    rows, columns = np.nonzero(replicas * offer.throughput_rps >= offer.rate_rps * (1 - SLACK))
    return _Offered(offer, np.full(len(rows), replicas), rows + 1, columns + 1, offer.slots[rows, columns])
