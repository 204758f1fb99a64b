"""Usher's plan: models with complementary needs form groups; each group in turn gets the replicas and batches that
serve most.

Models whose needs for computing and for memory complement each other form a group. Each model has candidates: a batch,
and 1 to 6 times the replicas that carry its rate with the largest batch in time. Of all combinations of a group's
candidates, each is placed on the devices by a heuristic, and the one that serves most is kept.

Source: Usher (Shubha et al., OSDI 2024) as Elvinger's thesis restates it (ETH Zurich, MSc thesis 505, 2024, section 5),
for a fixed cluster. Where both leave a choice open, a docstring here says what was chosen.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from sloop.api import ROUNDING, InputError
from sloop.api.solvers import WHOLE_DEVICE, BatchOption, Content, Resident
from sloop_systems.colocation.milp import Colocation, SharedModel, goodput

GROUP_SIZE: Final = 4
GROUPING_BATCH: Final = 16
"""The batch whose needs stand for a model when groups are formed; the source does not say which."""
MULTIPLES: Final = range(1, 7)
HEAVY: Final = 1.2
"""A model is heavy in computing or memory if it needs this many times as much of it as of the other."""
MEMORY, COMPUTE, NEUTRAL = range(3)
EXACT_MAX: Final = 16
"""Up to this many groups are matched exactly, more are matched greedily, because the exact search takes 2ⁿ steps."""
COMBINATIONS_MAX: Final = 100_000
"""The most combinations of candidates of a group; beyond, the largest multiples of replicas are left out."""


_RANK: Final = attrgetter("rank")


def needs_of(model: SharedModel) -> tuple[int, int]:
    """The needs for computing and memory that stand for a model: those of a batch of 16, or of the nearest to it."""
    nearest = min(model.options, key=lambda option: (abs(option.batch - GROUPING_BATCH), option.batch))
    return nearest.compute, nearest.memory


def grouped(models: Sequence[SharedModel], size: int = GROUP_SIZE) -> tuple[tuple[int, ...], ...]:
    """Groups of at most `size` models (a power of two), as indices: in each of log₂(size) rounds, groups are matched in
    pairs with the least sum of distances |Σ computing - Σ memory|; of an odd number one stays as it is.

    Among equal sums the first matching in the order of the models. Larger groups come first, then by name; the source
    leaves the order open.
    """
    needs = [needs_of(model) for model in models]
    groups: list[tuple[int, ...]] = [(at,) for at in range(len(models))]
    for _ in range(int(math.log2(max(1, size)))):
        if len(groups) < 2:
            break

        def distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
            return abs(sum(needs[at][0] - needs[at][1] for at in (*one, *other)))

        weights = [[distance(one, other) for other in groups] for one in groups]
        pairs = matching(weights)
        paired = {at for pair in pairs for at in pair}
        groups = [tuple(sorted(groups[one] + groups[other])) for one, other in pairs] + [
            group for at, group in enumerate(groups) if at not in paired
        ]
    return tuple(sorted(groups, key=lambda group: (-len(group), sorted(models[at].name for at in group))))


def matching(weights: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The pairs of a complete graph with the least total weight, of as many nodes as possible; of equal ones the first:
    node 0 with the lowest partner, and so on, and a node without a partner only if there is none better."""
    count = len(weights)
    if count > EXACT_MAX:
        return _greedy_matching(weights)
    best: dict[tuple[int, ...], tuple[int, int]] = {}  # the nodes left → (weight, partner of the first; -1 for none)

    def solve(left: tuple[int, ...]) -> int:
        if len(left) < 2:
            return 0
        found = best.get(left)
        if found is None:
            first, rest = left[0], left[1:]
            options = [
                (weights[first][other] + solve(tuple(at for at in rest if at != other)), place, other)
                for place, other in enumerate(rest)
            ]
            if len(left) % 2:
                options.append((solve(rest), len(rest), -1))
            weight, _, partner = min(options)
            best[left] = found = weight, partner
        return found[0]

    left = tuple(range(count))
    solve(left)
    pairs: list[tuple[int, int]] = []
    while len(left) >= 2:
        partner = best[left][1]
        if partner >= 0:
            pairs.append((left[0], partner))
        left = tuple(at for at in left[1:] if at != partner)
    return pairs


def _greedy_matching(weights: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The pairs with the least weight, one after the other."""
    left, pairs = set(range(len(weights))), []
    for _, one, other in sorted(
        (weights[one][other], one, other) for one, other in itertools.combinations(range(len(weights)), 2)
    ):
        if one in left and other in left:
            pairs.append((one, other))
            left -= {one, other}
    return pairs


@dataclass(frozen=True, slots=True)
class UsherCandidate:
    """A batch of a model, with a number of replicas."""

    model: int
    option: BatchOption
    replicas: int
    served_rps: float
    """Of all replicas, at most the model's rate."""

    least: int
    """How many replicas serve as much as all of them."""
    rank: tuple[int, int]
    """What it is heavy in, and its needs, negative: where it comes in the order of placement."""

    @property
    def gains_rps(self) -> list[float]:
        """By replica, the requests per second that it adds."""
        whole = [self.option.rate_rps] * (self.least - 1)
        return [*whole, self.served_rps - sum(whole)]


def candidates(models: Sequence[SharedModel], at: int, devices: int, multiples: int) -> list[UsherCandidate]:
    """The candidates of a model by ascending replicas, then batch: multiples of the replicas that carry its rate with
    the largest batch in time, up to the number of devices. None if even the first multiple is above: such a model is
    not served (the reading of the thesis)."""
    model = models[at]
    in_time = model.in_time
    if not in_time or model.rate_rps <= 0 or in_time[-1].rate_rps <= 0:
        return []
    enough = math.ceil(model.rate_rps / in_time[-1].rate_rps - ROUNDING)
    return [
        _candidate(model, at, option, multiple * enough)
        for multiple in MULTIPLES[:multiples]
        if multiple * enough <= devices
        for option in in_time
        if option.rate_rps > 0
    ]


def _candidate(model: SharedModel, at: int, option: BatchOption, replicas: int) -> UsherCandidate:
    served_rps = min(model.rate_rps, replicas * option.rate_rps)
    compute, memory = option.compute, option.memory
    heavy = COMPUTE if compute >= HEAVY * memory else MEMORY if memory >= HEAVY * compute else NEUTRAL
    rank = heavy, -(compute + memory)
    return UsherCandidate(at, option, replicas, served_rps, math.ceil(served_rps / option.rate_rps - ROUNDING), rank)


@dataclass(frozen=True, slots=True)
class _Device:
    """What is on a device, and what is free of it."""

    content: Content = ()
    compute: int = WHOLE_DEVICE
    memory: int = WHOLE_DEVICE
    group: int = -1
    """The last group that was placed here."""

    def added(self, resident: Resident, group: int) -> "_Device":
        """The device with one replica more."""
        option = resident[1]
        return _Device((*self.content, resident), self.compute - option.compute, self.memory - option.memory, group)


def plan(
    models: Sequence[SharedModel],
    devices: int,
    *,
    groups: Sequence[Sequence[int]] | None = None,
    size: int = GROUP_SIZE,
) -> Colocation:
    """Usher's placement on at most `devices` equal devices. `groups`, as indices in order of placement, replaces the
    grouping. InputError if they do not have each model once."""
    chosen = grouped(models, size) if groups is None else tuple(tuple(group) for group in groups)
    if sorted(at for group in chosen for at in group) != list(range(len(models))):
        raise InputError("the groups do not have each model exactly once", help="name every model in one group")
    state = (_Device(),) * devices
    for number, group in enumerate(chosen):
        state = _best_of_group(models, group, state, number)
    contents = tuple(tuple(sorted(each.content, key=lambda own: own[0])) for each in state if each.content)
    return Colocation(contents, goodput(models, contents), proven=False)


@dataclass(frozen=True, slots=True)
class _UsherRoom:
    """The room on all devices together, from which a quick upper bound of what a combination serves is computed."""

    compute: int
    large: int
    """How many devices have room for a need of more than half a device."""
    are_empty: bool
    """Whether all of these are empty."""

    @classmethod
    def of(cls, state: Sequence[_Device]) -> "_UsherRoom":
        roomy = [each for each in state if 2 * each.compute > WHOLE_DEVICE]
        return cls(sum(each.compute for each in state), len(roomy), not any(each.content for each in roomy))

    def bound_rps(self, combination: Sequence[UsherCandidate]) -> float:
        """An upper bound of what the combination serves. It assumes that replicas can be divided among devices, except
        that each large need takes a device of its own."""
        large = [each for each in combination if 2 * each.option.compute > WHOLE_DEVICE]
        if self.are_empty and len(large) == len(combination):
            return self._served_rps(combination)
        bound_rps = sum([each.served_rps for each in combination])
        if sum([each.least * each.option.compute for each in combination]) > self.compute:
            filled_rps, left = 0.0, float(self.compute)
            for each in sorted(combination, key=lambda each: each.option.compute / each.option.rate_rps):
                per_rps = each.option.compute / each.option.rate_rps
                own_rps = each.served_rps if per_rps * each.served_rps <= left else left / per_rps
                filled_rps += own_rps
                left -= own_rps * per_rps
            bound_rps = filled_rps
        if sum([each.least for each in large]) > self.large:
            gains = sorted([gain for each in large for gain in each.gains_rps], reverse=True)
            small_rps = sum([each.served_rps for each in combination if 2 * each.option.compute <= WHOLE_DEVICE])
            bound_rps = min(bound_rps, small_rps + sum(gains[: self.large]))
        return bound_rps

    def _served_rps(self, combination: Sequence[UsherCandidate]) -> float:
        """What the combination serves if each replica has a device of its own, one model after the other."""
        served_rps, left = 0.0, self.large
        for each in _in_order(combination):
            count = min(each.replicas, left)
            left -= count
            served_rps += min(each.served_rps, count * each.option.rate_rps)
        return served_rps


def _least_devices(combination: Sequence[UsherCandidate]) -> int:
    """At most as many devices as it takes to serve as much as all candidates can: two replicas of a model are on two
    devices, and so are two large needs."""
    large = sum([each.least for each in combination if 2 * each.option.compute > WHOLE_DEVICE])
    return max(large, *[each.least for each in combination])


def _best_of_group(
    models: Sequence[SharedModel], group: Sequence[int], state: tuple[_Device, ...], number: int
) -> tuple[_Device, ...]:
    """The devices with the best combination of a group: most goodput, then fewest devices, then the first one, with
    models by name and candidates by replicas, then batch (the source does not say)."""
    by_name = sorted(group, key=lambda at: models[at].name)
    free = _UsherRoom.of(state)
    for multiples in range(len(MULTIPLES), 0, -1):
        choices = [own for at in by_name if (own := candidates(models, at, len(state), multiples))]
        if math.prod(map(len, choices)) <= COMBINATIONS_MAX:
            break
    best, best_rps, fewest = _PlacedCombination(), 0.0, 0
    if not choices:
        return state
    for combination in itertools.product(*choices):
        bound_rps = free.bound_rps(combination)
        if bound_rps < best_rps - ROUNDING:
            continue
        if bound_rps <= best_rps + ROUNDING and _least_devices(combination) >= fewest:
            continue
        placed = _placed(models, combination, state, number)
        is_better = placed.served_rps > best_rps + ROUNDING
        if is_better or (placed.served_rps > best_rps - ROUNDING and placed.used < fewest):
            best, best_rps, fewest = placed, placed.served_rps, placed.used
    devices = list(state)
    for place, resident in best.replicas:
        devices[place] = devices[place].added(resident, number)
    return tuple(devices)


@dataclass(frozen=True, slots=True)
class _PlacedCombination:
    """Where the replicas of a combination find room, what they serve together, and how many devices are in use."""

    replicas: Sequence[tuple[int, Resident]] = ()
    served_rps: float = 0.0
    used: int = 0


def _placed(
    models: Sequence[SharedModel], combination: Sequence[UsherCandidate], state: tuple[_Device, ...], number: int
) -> _PlacedCombination:
    """Place the replicas of a combination, as far as they find room.

    A device that the group uses already comes before one of another group, and an empty one last; among these the one
    with the least room, then the first. This is called tens of thousands of times, and so uses plain lists.
    """
    compute, memory = [each.compute for each in state], [each.memory for each in state]
    classes = [0 if each.group == number else 1 if each.content else 2 for each in state]
    replicas: list[tuple[int, Resident]] = []
    served_rps = 0.0
    for candidate in _in_order(combination):
        option, count = candidate.option, 0
        resident = (candidate.model, option)
        needed, wanted = option.compute, option.memory
        # No device gets two replicas of a model, so that one choice by rank is the same as one after the other ...
        room = [
            (classes[place], compute[place] + memory[place], place)
            for place in range(len(state))
            if needed <= compute[place] and wanted <= memory[place]
        ]
        room.sort()  # ... because a replica changes only the rank of the device that it is on.
        for _, _, place in room[: candidate.replicas]:
            compute[place] -= needed
            memory[place] -= wanted
            classes[place] = 0
            replicas.append((place, resident))
            count += 1
        served_rps += min(models[candidate.model].rate_rps, count * option.rate_rps)
    return _PlacedCombination(replicas, served_rps, sum(each < 2 for each in classes))


def _in_order(combination: Sequence[UsherCandidate]) -> Sequence[UsherCandidate]:
    """Models heavy in memory and in computing alternate, by descending needs; then the neutral ones."""
    ordered = sorted(combination, key=_RANK)
    if ordered[0].rank[0] > MEMORY:
        return ordered
    memory, compute, neutral = (
        [each for each in ordered if each.rank[0] == kind] for kind in (MEMORY, COMPUTE, NEUTRAL)
    )
    pairs = itertools.zip_longest(memory, compute)
    return [*(each for pair in pairs for each in pair if each is not None), *neutral]
