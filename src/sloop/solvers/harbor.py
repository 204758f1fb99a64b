"""Our placement of models on shared devices: it counts waiting, transfers and interference, and the price of devices.

For each model, each kind of device, each batch and each number of replicas there is a *column* with the requests per
second that are expected to be in time (`ServingAssumptions.in_time_rps`). One integer program chooses at most one
column for each model, and contents of devices (`sloop.solvers.contents`) that hold exactly these replicas. So it
leaves models out if more requests are then served in time, takes small batches where they suffice, and uses no batch
that cannot fill in time.

- *Interference.* The caller's law gives the slowdown of each model of a content. A column assumes a level of slowdown,
  and its replicas may be only in contents that slow them down by at most this level.
- *Prices.* Nodes can be rented, each with all its devices. Of all placements whose value is within `TOLERANCE` of the
  best one, the cheapest is chosen.
- *Bounds.* The search begins with a greedy placement and ends after a number of nodes, not after a time. So there is
  always an answer, and equal problems have equal answers.

A thesis about the placement of models on GPUs asks for such a policy (Elvinger, ETH Zurich, MSc thesis 505, 2024).
Units: milliseconds, requests per second, hundredths of a percent of a device.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from sloop.errors import InputError
from sloop.solvers import highs
from sloop.solvers.contents import WHOLE_DEVICE, BatchOption, Content, Resident, possible_contents
from sloop.units import ROUNDING

PLACES: Final = (
    (0.046910077, 0.118463443),
    (0.230765345, 0.239314335),
    (0.5, 0.284444444),
    (0.769234655, 0.239314335),
    (0.953089923, 0.118463443),
)
"""Positions in a batch from its last request (0) to its first one (1), with weights: five-point Gauss-Legendre."""
SIZES_WITHIN: Final = 4.0
"""Batch sizes within this many standard deviations of the mean are considered."""
SIZES_KEPT: Final = 6
"""The most groups of sizes."""
SIZES_LEAST: Final = 1e-3
"""Batch sizes with a lower probability are left out."""
DRIFT_MIN: Final = 1e-6
"""A smaller growth of a queue counts as this much."""
FAR: Final = 8.0
"""Standard deviations beyond which the normal distribution function is computed by its asymptotic form."""
SMALL: Final = 1e-3
"""What a replica with a batch of b costs in the objective, times 1 + b/128: among equal placements, fewer replicas and
smaller batches."""
SMALL_BATCH: Final = 128.0
NODES_MAX: Final = 500
"""The most branch-and-bound nodes of one program."""
CONTENTS_MAX: Final = 1_500
"""The most contents of one kind of device in a program, those with fewer models first."""
SOLUTIONS_KEPT: Final = 256
"""Cached results: planners solve the same problem again for each of several applications, and in a replay."""
PROGRAM_MAX: Final = 6_000
"""Programs with more columns are not solved; the greedy placement is the answer."""
REPLICAS_EACH: Final = 16
"""Every number of replicas up to this one is a column; above it, each column has a tenth more than the one before."""
STEPS_MAX: Final = 2_000
"""The most steps that the greedy placement tries."""
LEVELS: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
"""The levels of slowdown that columns assume. Contents that slow a model down more are left out."""
TOLERANCE: Final = 0.005
"""The fraction of the best value by which a cheaper placement may be lower."""
NEGLIGIBLE: Final = 1e-3
"""A column that serves a smaller fraction of a model's rate is left out."""
PRICE_SCALE: Final = 1e3
"""An hourly price in the objective of the second program, in which requests per second only break ties."""
TIE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class ServingAssumptions:
    """What happens to a request besides its inference."""

    wait_ms: float = 100.0
    """The longest time that the first request of a batch waits for others."""
    slower: float = 1.0
    """The factor by which an inference takes longer while other workers are busy, because they load the host."""
    rpc_ms: float = 0.0
    """The time of a call between two processes, without its data; a request takes two calls."""
    network_ms: float = 0.0
    network_ms_per_mb: float = 0.0
    horizon_s: float = 10.0
    """The time over which an overloaded replica is judged, because its queue keeps growing."""

    def __post_init__(self) -> None:
        if min(self.wait_ms, self.rpc_ms, self.network_ms, self.network_ms_per_mb) < 0:
            raise InputError("a negative time", help="times are at least 0")
        if not (self.slower > 0 and self.horizon_s > 0):
            raise InputError("`slower` and `horizon_s` must be positive", help="1 and 10 are the usual values")

    def transfer_ms(self, size_bytes: float) -> float:
        """The time on the network of a message of this size."""
        return self.network_ms + self.network_ms_per_mb * size_bytes / 1e6

    def in_time_rps(
        self, model: "PlacedModel", kind: int, option: BatchOption, replicas: int, level: float = 1.0
    ) -> float:
        """The requests per second that replicas with this batch are expected to serve by the deadline, if neighbours
        make inferences `level` times as long.

        All requests of a model go into one batch at a time. A request waits until its batch leaves, then in the queue
        of a replica (`_share_below`), then for the inference. Its position in the batch is uniformly distributed.
        """
        rate, horizon_ms = model.rate_rps / 1000.0, 1000.0 * self.horizon_s
        batches = _batches(rate, option.batch, self.wait_ms)
        services_ms = [self.slower * level * model.latency_ms(kind, batch.size) for batch in batches]
        size = math.fsum(batch.part * batch.size for batch in batches)
        service_ms = math.fsum(batch.part * own_ms for batch, own_ms in zip(batches, services_ms, strict=True))
        squared = math.fsum(batch.part * own_ms**2 for batch, own_ms in zip(batches, services_ms, strict=True))
        load = rate * service_ms / (replicas * size)
        # A replica gets every k-th batch of b requests: gaps between its batches are sums of k * b exponential ones.
        variation = 1 / (replicas * size) + max(0.0, squared / service_ms**2 - 1)
        in_time = 0.0
        for batch, own_ms in zip(batches, services_ms, strict=True):
            outside_ms = self.transfer_ms(batch.size * model.request_bytes) + 2 * self.rpc_ms
            slack_ms = model.slo_ms - outside_ms - own_ms
            if slack_ms <= 0:
                continue
            most_ms = min(batch.build_ms, slack_ms)
            below = math.fsum(
                weight * _share_below(slack_ms - place * most_ms, load - 1, service_ms * variation, horizon_ms)
                for place, weight in PLACES
            )
            early = most_ms / batch.build_ms if batch.build_ms > most_ms else 1.0
            in_time += batch.part * batch.size * early * (1.0 - min(1.0, load) * (1.0 - below))
        return model.rate_rps * min(1.0, max(0.0, in_time / size))


class _Batches(NamedTuple):
    """Batches of a model with equal sizes and filling times."""

    part: float
    """Of all its batches."""
    size: int
    build_ms: float
    """The time from the first request until the batch leaves."""


@lru_cache(maxsize=4096)
def _batches(rate: float, most: int, wait_ms: float) -> tuple[_Batches, ...]:
    """The batches of Poisson arrivals, `rate` per millisecond, which leave with `most` requests or `wait_ms` after the
    first one. Their sizes are distributed as min(b, 1 + Poisson(λW)); neighbouring sizes are merged."""
    mean, last = rate * wait_ms, most - 1
    around = SIZES_WITHIN * math.sqrt(mean) + 1
    others = range(max(0, math.floor(mean - around)), min(last, math.ceil(mean + around)))
    parts = [_poisson(mean, count) for count in others]
    full = max(0.0, 1.0 - math.fsum(parts)) if others.stop == last else 0.0
    found, together = [], max(1, math.ceil(len(parts) / SIZES_KEPT))
    for start in range(0, len(parts), together):
        own = slice(start, start + together)
        part = math.fsum(parts[own])
        if part > SIZES_LEAST:
            size = math.fsum((1 + count) * each for count, each in zip(others[own], parts[own], strict=True)) / part
            found.append(_Batches(part, round(size), wait_ms))
    if full > SIZES_LEAST or not found:
        # The mean time until the batch is full, given that it fills within the wait.
        within = 1 - _poisson(mean, last) / full if full > 0 else 1.0
        found.append(_Batches(full or 1.0, most, min(wait_ms, last / rate * max(0.0, within))))
    total = math.fsum(batch.part for batch in found)
    return tuple(batch._replace(part=batch.part / total) for batch in found)


def _poisson(mean: float, count: int) -> float:
    """The probability of `count`."""
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean > 0 else float(count == 0)


def _share_below(limit_ms: float, growth: float, spread_ms: float, horizon_ms: float) -> float:
    """The fraction of the horizon, from an empty queue on, in which the work that waits before a replica takes less
    than `limit_ms`, which is positive.

    The waiting work is modelled as a Brownian motion that is reflected at 0, with the drift `growth` (the load minus 1)
    and the variance `spread_ms` per millisecond. It is above the limit at t with the probability that the same motion
    without reflection has reached the limit by then (Harrison, Brownian Motion and Stochastic Flow Systems, 1985, 1.9).
    So the fraction is the mean of min(first passage, horizon) / horizon. For a long horizon and a load below 1, that is
    1 minus an exponential with Kingman's mean; for an overload without variance, limit / growth / horizon. It is
    continuous at a load of 1.
    """
    growth = growth if abs(growth) > DRIFT_MIN else DRIFT_MIN
    deviation_ms = math.sqrt(spread_ms * horizon_ms)
    straight = (limit_ms - growth * horizon_ms) / deviation_ms
    mirrored = (limit_ms + growth * horizon_ms) / deviation_ms
    not_yet = _normal(straight)
    if mirrored < FAR:
        returned = math.exp((mirrored**2 - straight**2) / 2) * _normal(-mirrored)
    else:  # Mills' ratio, so that neither factor is out of range
        returned = math.exp(-(straight**2) / 2) / math.sqrt(2 * math.pi) / mirrored * (1 - 1 / mirrored**2)
    share = not_yet - returned + limit_ms / (growth * horizon_ms) * (1 - not_yet - returned)
    return min(1.0, max(0.0, share))


def _normal(x: float) -> float:
    """The standard normal distribution function."""
    return math.erfc(-x / math.sqrt(2)) / 2


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model with its rate, its deadline, and by kind of device its batch sizes, ascending; none where it cannot
    run."""

    name: str
    rate_rps: float
    slo_ms: float
    options: tuple[tuple[BatchOption, ...], ...]
    request_bytes: float = 0.0

    def latency_ms(self, kind: int, batch: int) -> float:
        """The inference time of a batch that runs alone: linear between the batch sizes, constant below the
        smallest."""
        options = self.options[kind]
        above = bisect_left(options, batch, key=lambda option: option.batch)
        if above == len(options):
            return options[-1].latency_ms * batch / options[-1].batch
        high = options[above]
        if above == 0 or high.batch == batch:
            return high.latency_ms
        low = options[above - 1]
        part = (batch - low.batch) / (high.batch - low.batch)
        return low.latency_ms + part * (high.latency_ms - low.latency_ms)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Equal devices: some that are always there, and some that can be rented."""

    name: str
    owned: int
    rentable: int = 0
    usd_per_h: float = 0.0
    """Of one rented node."""
    per_node: int = 1
    """How many devices a node has, which are rented together."""

    @property
    def most(self) -> int:
        """The most devices of this kind."""
        return self.owned + self.rentable

    def rented(self, used: int) -> int:
        """How many nodes are rented if this many devices are used."""
        return math.ceil(max(0, used - self.owned) / self.per_node)


SlowdownOf = Callable[[int, Content], Sequence[float]]
"""By kind of device and content, how many times as long each of its models takes."""


@dataclass(frozen=True, slots=True)
class PlacedColumn:
    """A number of replicas of a model with a batch size on a kind of device, each slowed down at most `level` times."""

    model: int
    kind: int
    option: BatchOption
    replicas: int
    level: float
    served_rps: float

    @property
    def size(self) -> float:
        """The fewest devices that its replicas take."""
        return self.replicas * max(self.option.compute, self.option.memory) / WHOLE_DEVICE


@dataclass(frozen=True, slots=True)
class HarborPlacement:
    """The contents of the devices in use, by kind, and what is expected of them."""

    contents: tuple[tuple[int, Content], ...]
    """Kind and content of each device."""
    served_rps: tuple[float, ...]
    """By model, the requests per second that are expected to be in time."""
    value: float
    """The objective: the served requests, minus a little for replicas and large batches."""
    usd_per_h: float
    """The price of the rented devices."""
    proven: bool = False
    """Whether no placement has a higher value and, within the tolerance, a lower price."""

    @property
    def total_rps(self) -> float:
        """The expected goodput."""
        return math.fsum(self.served_rps)


@dataclass(frozen=True, slots=True)
class HarborProblem:
    """Models, devices, and how to judge placements."""

    models: tuple[PlacedModel, ...]
    kinds: tuple[DeviceKind, ...]
    serving: ServingAssumptions = ServingAssumptions()
    slowdown: SlowdownOf | None = None
    """How much slower models are beside their neighbours; None: no slower, as long as the device meets their needs."""

    def __post_init__(self) -> None:
        for model in self.models:
            if len(model.options) != len(self.kinds):
                raise InputError(f"{model.name} has options for {len(model.options)} kinds, not {len(self.kinds)}")

    def columns(self, level_max: float = 1.0) -> Iterator[PlacedColumn]:
        """The columns to choose from. Of one model, kind, level and number of replicas, columns are left out that need
        as much of a device as another one and serve no more in time."""
        levels = [level for level in LEVELS if level <= level_max + ROUNDING]
        for at, model in enumerate(self.models):
            for number, kind in enumerate(self.kinds):
                if model.rate_rps <= 0:
                    continue
                options = [each for each in model.options[number] if max(each.compute, each.memory) <= WHOLE_DEVICE]
                for replicas in _counts(kind.most):
                    for level in levels:
                        yield from self._undominated(at, number, options, replicas, level)

    def _undominated(
        self, at: int, kind: int, options: Sequence[BatchOption], replicas: int, level: float
    ) -> Iterator[PlacedColumn]:
        model = self.models[at]
        found: list[PlacedColumn] = []
        for option in options:
            served_rps = self.serving.in_time_rps(model, kind, option, replicas, level)
            if served_rps >= NEGLIGIBLE * model.rate_rps:
                found.append(PlacedColumn(at, kind, option, replicas, level, served_rps))
        for each in found:
            if not any(
                other.served_rps >= each.served_rps
                and other.option.compute <= each.option.compute
                and other.option.memory <= each.option.memory
                and (other.option.batch < each.option.batch or other.served_rps > each.served_rps)
                for other in found
                if other is not each
            ):
                yield each

    def worth(self, column: PlacedColumn) -> float:
        """What the column adds to the objective."""
        small = SMALL * column.replicas * (1 + column.option.batch / SMALL_BATCH)
        return column.served_rps - small

    def slowdowns(self, kind: int, content: Content) -> Sequence[float]:
        """How many times as long each model of the content takes."""
        return [1.0] * len(content) if self.slowdown is None else self.slowdown(kind, content)

    def price(self, contents: Sequence[tuple[int, Content]]) -> float:
        """What the devices with these contents cost."""
        used = [kind for kind, _ in contents]
        return math.fsum(kind.usd_per_h * kind.rented(used.count(at)) for at, kind in enumerate(self.kinds))

    def evaluated(self, contents: Sequence[tuple[int, Content]]) -> HarborPlacement:
        """A placement with its value in this problem. If the replicas of a model differ, all count with the slowdown of
        the slowest and the largest batch."""
        replicas: dict[int, list[tuple[int, BatchOption, float]]] = {}
        for kind, content in contents:
            for (at, option), slower in zip(content, self.slowdowns(kind, content), strict=True):
                replicas.setdefault(at, []).append((kind, option, slower))
        columns = []
        for at, own in sorted(replicas.items()):
            kind, option, _ = max(own, key=lambda each: (self.models[at].latency_ms(each[0], each[1].batch), each[0]))
            level = max(slower for _, _, slower in own)
            served_rps = 0.0
            if self.models[at].rate_rps > 0:
                served_rps = self.serving.in_time_rps(self.models[at], kind, option, len(own), level)
            columns.append(PlacedColumn(at, kind, option, len(own), level, served_rps))
        served = {column.model: column.served_rps for column in columns}
        return HarborPlacement(
            tuple(contents),
            tuple(served.get(at, 0.0) for at in range(len(self.models))),
            math.fsum(map(self.worth, columns)),
            self.price(contents),
        )


def _counts(most: int) -> Iterator[int]:
    """The numbers of replicas to choose from."""
    count = 1
    while count <= most:
        yield count
        count += 1 if count < REPLICAS_EACH else count // 10


def place_models(problem: HarborProblem, *, nodes_max: int = NODES_MAX) -> HarborPlacement:
    """The placement with the highest value and, within the tolerance, the lowest price."""
    if problem.slowdown is None:  # otherwise equal problems cannot be recognised
        return _remembered(problem, nodes_max)
    return _found(problem, nodes_max)


@lru_cache(maxsize=SOLUTIONS_KEPT)
def _remembered(problem: HarborProblem, nodes_max: int) -> HarborPlacement:
    return _found(problem, nodes_max)


def _found(problem: HarborProblem, nodes_max: int) -> HarborPlacement:
    possible = [_contents_of(problem, kind) for kind in range(len(problem.kinds))]
    level_max = max((slower for own in possible for _, levels in own for slower in levels), default=1.0)
    columns = list(problem.columns(level_max))
    best = _greedy(problem, columns)
    program = _Program(problem, columns, possible)
    if program.size > PROGRAM_MAX:
        return best
    if best.value >= _most_possible(problem, columns) - ROUNDING:
        best = replace(best, proven=True)
    else:
        found = program.most_value(nodes_max)
        if found is not None and found.value >= best.value - ROUNDING:
            best = found
    if best.usd_per_h > 0:
        cheaper = program.cheapest(best, nodes_max)
        if cheaper is not None and cheaper.usd_per_h < best.usd_per_h - ROUNDING:
            best = cheaper if best.proven else replace(cheaper, proven=False)
    return best


def _most_possible(problem: HarborProblem, columns: Sequence[PlacedColumn]) -> float:
    """An upper bound of the value: each model has its best column."""
    best: dict[int, float] = {}
    for column in columns:
        best[column.model] = max(best.get(column.model, 0.0), problem.worth(column))
    return math.fsum(best.values())


LevelledContent = tuple[Content, tuple[float, ...]]
"""A content, and the level of slowdown of each of its models."""


def _contents_of(problem: HarborProblem, kind: int) -> list[LevelledContent]:
    """The contents that a device of this kind can have, with the slowdown of each model rounded up to a level."""
    options = [model.options[kind] if model.rate_rps > 0 else () for model in problem.models]
    found: list[LevelledContent] = []
    for content in possible_contents(options, most=CONTENTS_MAX):
        levels = [_level(slower) for slower in problem.slowdowns(kind, content)]
        if all(map(math.isfinite, levels)):
            found.append((content, tuple(levels)))
    return found


def _level(slower: float) -> float:
    return next((level for level in LEVELS if level >= slower - ROUNDING), math.inf)


class _Program:
    """The integer program. Its columns are those of models (binary), then how many devices have each content, then how
    many nodes of each kind are rented."""

    def __init__(
        self, problem: HarborProblem, columns: Sequence[PlacedColumn], possible: Sequence[Sequence[LevelledContent]]
    ) -> None:
        self._problem = problem
        self._columns = columns
        chosen = {(column.kind, column.model, column.option) for column in columns}
        self._contents = [
            (kind, content, levels)
            for kind, own in enumerate(possible)
            for content, levels in own
            if all((kind, at, option) in chosen for at, option in content)
        ]
        self._first_rented = len(columns) + len(self._contents)
        self.size = self._first_rented + len(problem.kinds)
        self._are_all = all(len(own) < CONTENTS_MAX for own in possible)

    def most_value(self, nodes_max: int) -> HarborPlacement | None:
        """The placement with the highest value."""
        costs = [-self._problem.worth(column) for column in self._columns]
        costs += [0.0] * (self.size - len(self._columns))
        return self._solved(costs, list(self._rows()), nodes_max)

    def cheapest(self, best: HarborPlacement, nodes_max: int) -> HarborPlacement | None:
        """The cheapest placement whose value is within the tolerance of the best one."""
        worths = {at: self._problem.worth(column) for at, column in enumerate(self._columns)}
        prices = self._prices()
        costs = [PRICE_SCALE * prices.get(at, 0.0) - TIE * worths.get(at, 0.0) for at in range(self.size)]
        least = best.value - TOLERANCE * abs(best.value)
        return self._solved(costs, [*self._rows(), (worths, least, math.inf)], nodes_max)

    def _prices(self) -> dict[int, float]:
        return {self._first_rented + at: kind.usd_per_h for at, kind in enumerate(self._problem.kinds)}

    def _rows(self) -> Iterator[highs.Row]:
        """The constraints: at most one column for each model; enough devices; contents that hold the replicas of the
        columns at their levels."""
        columns, kinds = self._columns, self._problem.kinds
        own: dict[int, dict[int, float]] = {}
        for at, column in enumerate(columns):
            own.setdefault(column.model, {})[at] = 1.0
        yield from ((row, -math.inf, 1.0) for row in own.values())
        for number, kind in enumerate(kinds):
            row = {len(columns) + at: 1.0 for at, (of, _, _) in enumerate(self._contents) if of == number}
            yield row | {self._first_rented + number: -float(kind.per_node)}, -math.inf, float(kind.owned)
        by_resident: dict[tuple[int, Resident], list[tuple[int, float]]] = {}
        for at, (kind_at, content, levels) in enumerate(self._contents):
            for resident, level in zip(content, levels, strict=True):
                by_resident.setdefault((kind_at, resident), []).append((len(columns) + at, level))
        wanted: dict[tuple[int, Resident], list[int]] = {}
        for at, column in enumerate(columns):
            wanted.setdefault((column.kind, (column.model, column.option)), []).append(at)
        for key, choices in wanted.items():
            held = by_resident.get(key, [])
            row = {at: 1.0 for at, _ in held} | {at: -float(columns[at].replicas) for at in choices}
            yield row, 0.0, 0.0
            for level in sorted({level for _, level in held})[1:]:
                # Replicas with this slowdown must belong to a column that assumes it.
                row = {at: 1.0 for at, slower in held if slower >= level}
                row |= {at: -float(columns[at].replicas) for at in choices if columns[at].level >= level}
                yield row, -math.inf, 0.0

    def _solved(self, costs: Sequence[float], rows: Sequence[highs.Row], nodes_max: int) -> HarborPlacement | None:
        most = [1.0] * len(self._columns)
        most += [float(self._problem.kinds[kind].most) for kind, _, _ in self._contents]
        most += [float(kind.rented(kind.most)) for kind in self._problem.kinds]
        found = highs.minimise(costs, rows, integers=self.size, nodes_max=nodes_max, most=most, presolve=False)
        if found.values is None:
            return None
        contents = [
            (kind, content)
            for value, (kind, content, _) in zip(found.values[len(self._columns) :], self._contents, strict=False)
            for _ in range(round(value))
        ]
        chosen = [column for column, value in zip(self._columns, found.values, strict=False) if value > 1 / 2]
        return _placement(self._problem, chosen, contents, proven=found.proven and self._are_all)


def _placement(
    problem: HarborProblem,
    chosen: Sequence[PlacedColumn],
    contents: Sequence[tuple[int, Content]],
    *,
    proven: bool,
) -> HarborPlacement:
    served = {column.model: column.served_rps for column in chosen}
    return HarborPlacement(
        tuple(contents),
        tuple(served.get(at, 0.0) for at in range(len(problem.models))),
        math.fsum(map(problem.worth, chosen)),
        problem.price(contents),
        proven,
    )


# The greedy placement


def _greedy(problem: HarborProblem, columns: Sequence[PlacedColumn]) -> HarborPlacement:
    """Improve one model at a time, by the step that adds the most value per further device. A step that finds no room
    is tried again when another step has made room. No device is crowded, so that models do not slow each other down."""
    room = _Room(problem)
    chosen: dict[int, PlacedColumn] = {}
    steps = [(column, problem.worth(column)) for column in columns if column.level == 1.0]
    without_room: set[int] = set()
    for _ in range(STEPS_MAX):
        best, best_gain = -1, 0.0
        for at, (column, worth) in enumerate(steps):
            before = chosen.get(column.model)
            gain = worth - (problem.worth(before) if before else 0.0)
            if gain > ROUNDING and at not in without_room:
                more = max(ROUNDING, column.size - (before.size if before else 0.0))
                if gain / more > best_gain:
                    best, best_gain = at, gain / more
        if best < 0:
            break
        column = steps[best][0]
        if room.change(column):
            chosen[column.model] = column
            without_room.clear()
        else:
            without_room.add(best)
    return _placement(problem, list(chosen.values()), room.contents(), proven=False)


class _Room:
    """Devices and what is on them while the greedy placement grows."""

    def __init__(self, problem: HarborProblem) -> None:
        self._problem = problem
        self._devices: list[tuple[int, dict[int, BatchOption]]] = []

    def contents(self) -> list[tuple[int, Content]]:
        """The devices in use."""
        return [(kind, tuple(sorted(own.items(), key=lambda each: each[0]))) for kind, own in self._devices if own]

    def change(self, after: PlacedColumn) -> bool:
        """Replace the replicas of a model, each on the fullest device with room for it. Returns False, and changes
        nothing, if there is not room for all."""
        devices = [
            (kind, {at: option for at, option in own.items() if at != after.model}) for kind, own in self._devices
        ]
        devices = [device for device in devices if device[1]]
        for _ in range(after.replicas):
            if not self._add(devices, after):
                return False
        contents = [(kind, tuple(own.items())) for kind, own in devices]
        if any(max(self._problem.slowdowns(*each), default=1.0) > 1 + ROUNDING for each in contents):
            return False
        self._devices = devices
        return True

    def _add(self, devices: list[tuple[int, dict[int, BatchOption]]], column: PlacedColumn) -> bool:
        best: tuple[int, int] | None = None
        for place, (kind, own) in enumerate(devices):
            if kind == column.kind and column.model not in own:
                compute = WHOLE_DEVICE - column.option.compute - sum(option.compute for option in own.values())
                memory = WHOLE_DEVICE - column.option.memory - sum(option.memory for option in own.values())
                if min(compute, memory) >= 0 and (best is None or compute + memory < best[0]):
                    best = compute + memory, place
        if best is not None:
            devices[best[1]][1][column.model] = column.option
            return True
        used = sum(kind == column.kind for kind, _ in devices)
        if used >= self._problem.kinds[column.kind].most:
            return False
        devices.append((column.kind, {column.model: column.option}))
        return True


# Again and again


def replaced(problem: HarborProblem, present: Sequence[tuple[int, Content]], *, gain: float) -> HarborPlacement:
    """The placement to use: the present one, unless a new one has a value that is higher by the fraction `gain`, or a
    price that is lower by it. `present` must still fit on the devices."""
    found, before = place_models(problem), problem.evaluated(present)
    is_cheaper = found.usd_per_h < before.usd_per_h * (1 - gain) - ROUNDING and found.value >= before.value * (1 - gain)
    return found if found.value > before.value + gain * abs(before.value) + ROUNDING or is_cheaper else before


def by_kind(contents: Sequence[tuple[int, Content]]) -> Mapping[int, list[Content]]:
    """The contents of each kind of device."""
    found: dict[int, list[Content]] = {}
    for kind, content in contents:
        found.setdefault(kind, []).append(content)
    return found
