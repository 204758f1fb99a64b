"""Models that share devices: which contents a device can have, and the contents that serve most together.

A *content* is what one device holds: some models, each with one batch size, whose needs for computing and for memory
add up to at most the whole device. `most_goodput` chooses how many devices have which content, such that most requests
per second are served: AO-MILP and WSM-MILP, which differ in the metric of computing (the peak of achieved occupancy, or
SM use weighted with time). Devices of one kind are interchangeable, so the program counts contents and not devices; as
printed, with a variable for each model, batch and device, it has the same optima and takes many times as long.

Needs are integers, in hundredths of a percent of a device, so that no content depends on rounding.

Source: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505, 2024),
sections 5 and 6, with its printed constraints corrected.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError
from sloop.solvers import highs
from sloop.units import ROUNDING

WHOLE: Final = 10_000
"""A whole device, in hundredths of a percent."""
NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes, as in `sloop.solvers.budget`."""
CONTENTS_MAX: Final = 5_000
"""The most contents that a program chooses from; those with fewer models come first."""
SMALL: Final = 1e-4
"""What a replica with a batch of b costs in the objective, times 1 + b/128, so that among equal placements the one with
fewer replicas and smaller batches is chosen. Twice this times models and devices stays below the 0.01 requests/s to
which rates are known, and the step from a batch of 4 to 8 is above the absolute gap of HiGHS, 1e-6."""
SMALL_BATCH: Final = 128.0
SMALL_DEVICE: Final = 0.02
"""What a device costs, as a part of what a replica costs: less than a larger batch, so that ties go to the fewest
devices. Without it HiGHS breaks them, in each version otherwise."""


@dataclass(frozen=True, slots=True)
class BatchOption:
    """A model with one batch size on one kind of device."""

    batch: int
    latency_ms: float
    rate_rps: float
    """What one replica serves at most."""
    compute: int
    """Its need for computing, in hundredths of a percent of the device."""
    memory: int
    """Its need for memory, likewise."""

    def __post_init__(self) -> None:
        if min(self.compute, self.memory) < 0 or self.batch < 1 or not self.rate_rps >= 0:
            what = f"batch {self.batch}: {self.rate_rps} requests/s, {self.compute} and {self.memory} of a device"
            raise InputError(what, help="a batch is at least 1, and no need is negative")


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
            if option.latency_ms <= self.slo_ms + ROUNDING and max(option.compute, option.memory) <= WHOLE
        )


Resident = tuple[int, BatchOption]
"""A model, by its index, with its batch."""
Content = tuple[Resident, ...]
"""What one device holds, by ascending model."""


def hundredths(percent: float) -> int:
    """A percentage as an integer number of hundredths."""
    return round(100 * percent)


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


def needs(content: Content) -> tuple[int, int]:
    """What the content needs for computing, and of memory."""
    return sum(option.compute for _, option in content), sum(option.memory for _, option in content)


def possible_contents(
    options: Sequence[Sequence[BatchOption]], *, most: int = CONTENTS_MAX, compute_max: int = WHOLE
) -> list[Content]:
    """Every content with at least one model, those with fewer models first; at most `most`. `options` are those of each
    model. A content is extended only while it fits: into `compute_max`, and into the memory of the device."""
    found: list[Content] = []
    size: list[Content] = [()]
    while size and len(found) < most:
        longer = (
            (*content, (at, option))
            for content in size
            for at in range(content[-1][0] + 1 if content else 0, len(options))
            for option in _that_fit(content, options[at], compute_max)
        )
        size = list(itertools.islice(longer, most - len(found)))
        found += size
    return found


def _that_fit(content: Content, options: Sequence[BatchOption], compute_max: int) -> Iterator[BatchOption]:
    compute, memory = needs(content)
    return (each for each in options if each.compute + compute <= compute_max and each.memory + memory <= WHOLE)


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


@dataclass(frozen=True, slots=True)
class WorkerMode:
    """How a worker uses its device: whether its share is a limit (MPS), and whether copies overlap with computing."""

    is_limited: bool
    is_streaming: bool = True


WORKER_MODES: Final[Mapping[str, WorkerMode]] = {
    "igniter": WorkerMode(is_limited=True),
    "usher": WorkerMode(is_limited=True),
    "usher-wao": WorkerMode(is_limited=True),
    "ao-milp": WorkerMode(is_limited=False),
    "wsm-milp": WorkerMode(is_limited=False),
}
"""The modes in which the thesis evaluates the placements. iGniter plans shares; Usher's are the compute that is
needed."""


# Least change


def relabelled(new: Sequence[Sequence[str]], present: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each new content, the index of the device that gets it, chosen so that most replicas stay where they are.

    Contents are given by the names of their models, `present` with an entry for each device, empty for those without
    replicas. Devices must be interchangeable. InputError if there are more contents than devices.
    """
    if len(new) > len(present):
        raise InputError(f"{len(new)} contents for {len(present)} devices", help="place them on as many as there are")
    if not new:
        return ()
    # Of equal overlaps, a device in use comes before an empty one, and the first before later ones.
    costs = [
        [
            -float(sum(name in own for name in content)) + (0.0 if own else 1e-3) + 1e-6 * place / len(present)
            for place, own in enumerate(present)
        ]
        for content in new
    ]
    return cheapest_assignment(np.array(costs))


def cheapest_assignment(costs: NDArray[np.float64]) -> tuple[int, ...]:
    """A column of its own for each row, with the least sum of costs. There are at least as many columns as rows.

    Rows are added one by one along a shortest augmenting path in reduced costs (Jonker and Volgenant 1987; Crouse, IEEE
    Trans. Aerosp. Electron. Syst. 52, 2016).
    """
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns)  # dual variables
    column_of, row_of = np.full(rows, -1), np.full(columns, -1)
    for row in range(rows):
        length, previous = np.full(columns, np.inf), np.full(columns, -1)
        others = np.arange(columns)[::-1]  # columns that the path may still reach; the order in which SciPy breaks ties
        at, shortest = row, 0.0
        reached: list[int] = []
        while at >= 0:
            through = shortest + costs[at, others] - of_row[at] - of_column[others]
            nearer = through < length[others]
            length[others[nearer]], previous[others[nearer]] = through[nearer], at
            shortest = length[others].min()
            nearest = np.flatnonzero(length[others] == shortest)
            free = nearest[row_of[others[nearest]] < 0]
            place = free[-1] if len(free) else nearest[0]
            last = others[place]
            reached.append(last)
            others[place], others = others[-1], others[:-1]
            at = row_of[last]
        inner = reached[:-1]
        of_row[row] += shortest
        of_row[row_of[inner]] += shortest - length[inner]
        of_column[reached] -= shortest - length[reached]
        while at != row:  # each row of the path takes the column that it reached
            at = previous[last]
            row_of[last] = at
            column_of[at], last = last, column_of[at]
    return tuple(column_of.tolist())
