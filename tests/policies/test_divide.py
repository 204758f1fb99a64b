"""Divide policies: the cores of each application when they want more than there are."""

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Claimant, CoreDemand
from sloop.policies.attainment import attained, services_of
from sloop.policies.divide import ASKS, LEAST, SIZES, MaxMin, Priority, Proportional, Worth
from sloop.systems.registry import POLICIES, build
from sloop.testing.views import make_stage, make_view
from sloop.vocabulary import Group, Plan, ReplicaSpec, Slot, StagePlan

laws = settings(max_examples=200)


def divided(policy: Any, total: float, demands: Sequence[CoreDemand]) -> list[float]:
    """The cores of each share."""
    return [share.cores for share in policy.cores(0, total, demands)]


def claimant(
    key: str,
    cores: float,
    weight: float = 1.0,
    *,
    rate_rps: float = 20.0,
    unit: float = 0.25,
    present: float = 0.0,
    slo_ms: float = 1000,
    asked: list[float] | None = None,
) -> Claimant:
    """An application of one model, which plans as many replicas of `unit` cores as there are cores for."""

    def plan(most: float) -> Plan:
        if asked is not None:
            asked.append(most)
        group = Group(ReplicaSpec("stage", "v", Slot(unit, "local")), int(min(most, cores) / unit + 1e-9))
        return Plan((StagePlan("stage", (group,), 4),), "")

    stage = make_stage(slo_ms=slo_ms)
    alone, had = plan(cores), plan(present)
    if asked is not None:
        asked.clear()
    view = make_view(stage, rates={"stage": rate_rps}, plan=had)
    return Claimant(key, "local", cores, weight, view=view, alone=alone, plan=plan)


def demands_of(*pairs: tuple[float, float]) -> list[Claimant]:
    return [claimant(f"a{index}", cores, weight) for index, (cores, weight) in enumerate(pairs)]


@st.composite
def overloads(draw: st.DrawFn) -> tuple[float, list[Claimant]]:
    """Cores, and demands that exceed them together."""
    pair = st.tuples(st.integers(0, 400).map(lambda n: n / 4), st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 7.0]))
    demands = demands_of(*draw(st.lists(pair, min_size=1, max_size=12)))
    return draw(st.floats(0, 1)) * sum(demand.cores for demand in demands), demands


@pytest.mark.parametrize("name", POLICIES["divide"].own)
@laws
@given(given_=overloads())
def test_all_cores_are_used_and_nobody_gets_more_than_it_wants(name: str, given_: tuple[float, list[Claimant]]) -> None:
    total, demands = given_
    policy: Any = build("divide", name)
    cores = divided(policy, total, demands)
    assert sum(cores) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert all(0 <= own <= demand.cores for own, demand in zip(cores, demands, strict=True))
    assert cores == divided(policy, total, list(demands))


@pytest.mark.parametrize("name", POLICIES["divide"].own)
@laws
@given(given_=overloads(), seed=st.randoms(use_true_random=False))
def test_the_order_of_applications_does_not_matter(name: str, given_: tuple[float, list[Claimant]], seed: Any) -> None:
    total, demands = given_
    policy: Any = build("divide", name)
    cores = dict(zip((demand.key for demand in demands), divided(policy, total, demands), strict=True))
    seed.shuffle(demands)
    again = divided(policy, total, demands)
    assert again == pytest.approx([cores[demand.key] for demand in demands], rel=1e-9, abs=1e-9)


def by_bisection(total: float, wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """min(wanted, level × weight), with the level at which the total is used."""
    low, high = 0.0, max(cores / weight for cores, weight in zip(wanted, weights, strict=True)) + 1
    for _ in range(200):
        level = (low + high) / 2
        used = sum(min(cores, level * weight) for cores, weight in zip(wanted, weights, strict=True))
        low, high = (low, level) if used > total else (level, high)
    return [min(cores, low * weight) for cores, weight in zip(wanted, weights, strict=True)]


@laws
@given(given_=overloads())
def test_max_min_is_the_fairest(given_: tuple[float, list[Claimant]]) -> None:
    total, demands = given_
    cores = divided(MaxMin(), total, demands)
    wanted, weights = [demand.cores for demand in demands], [demand.weight for demand in demands]
    assert cores == pytest.approx(by_bisection(total, wanted, weights), abs=1e-6)
    for own, demand in zip(cores, demands, strict=True):
        if own < demand.cores - 1e-9:  # to give it more, one would have to take from those with no larger share
            assert all(
                other / each.weight <= own / demand.weight + 1e-9 for other, each in zip(cores, demands, strict=True)
            )


@pytest.mark.parametrize(
    ("policy", "total", "pairs", "expected"),
    [
        (MaxMin(), 10, [(2, 1), (6, 1), (9, 1)], [2, 4, 4]),
        (MaxMin(), 12, [(20, 1), (20, 2)], [4, 8]),
        (MaxMin(), 12, [(20, 1), (5, 2)], [7, 5]),
        (Proportional(), 10, [(5, 1), (15, 1)], [2.5, 7.5]),
        (Proportional(), 10, [(10, 1), (10, 3)], [2.5, 7.5]),
        (Proportional(), 10, [(10, 1), (4, 9)], [6, 4]),
        (Priority(), 10, [(8, 1), (6, 2)], [4, 6]),
        (Priority(), 10, [(8, 1), (2, 1), (4, 3)], [4, 2, 4]),
        (Priority(), 4, [(8, 1), (6, 2)], [0, 4]),
    ],
)
def test_examples(policy: Any, total: float, pairs: list[tuple[float, float]], expected: list[float]) -> None:
    assert divided(policy, total, demands_of(*pairs)) == pytest.approx(expected)


@laws
@given(given_=overloads())
def test_equal_weights_get_the_same_part_of_what_they_want(given_: tuple[float, list[Claimant]]) -> None:
    total, demands = given_
    equal = demands_of(*((demand.cores, 3.0) for demand in demands))
    wanted = sum(demand.cores for demand in equal)
    if wanted:
        cores = divided(Proportional(), total, equal)
        assert cores == pytest.approx([demand.cores * total / wanted for demand in equal], abs=1e-9)


@laws
@given(given_=overloads())
def test_priority_gives_nothing_to_others_before_the_highest_have_all(
    given_: tuple[float, list[Claimant]],
) -> None:
    total, demands = given_
    cores = divided(Priority(), total, demands)
    unmet = [demand.weight for own, demand in zip(cores, demands, strict=True) if own < demand.cores - 1e-9]
    for own, demand in zip(cores, demands, strict=True):
        assert own <= 1e-9 or demand.weight >= max(unmet, default=0.0)


# Worth


def value(each: Claimant, cores: float, fairness: float) -> float:
    """What the docstring of `Worth` says that an application gains with so many cores."""
    x = attained(services_of(each.plan(cores), each.view), each.view) + LEAST  # type: ignore[arg-type]
    power = 1 - fairness
    u = math.pow(x, power) / power if power else math.log(x)
    return math.pow(each.weight, max(1.0, fairness)) * each.view.forecast_rps * u


@st.composite
def rivals(draw: st.DrawFn) -> tuple[int, list[Claimant]]:
    """Up to three applications with replicas of one core, and fewer cores than they want."""
    own = st.tuples(
        st.integers(1, 6), st.sampled_from([1.0, 2.0]), st.floats(3, 60), st.sampled_from([300.0, 500.0, 1000.0])
    )
    claimants = [
        claimant(f"a{index}", cores, weight, rate_rps=rate_rps, slo_ms=slo_ms, unit=1.0)
        for index, (cores, weight, rate_rps, slo_ms) in enumerate(draw(st.lists(own, min_size=2, max_size=3)))
    ]
    wanted = round(sum(each.cores for each in claimants))
    return draw(st.integers(len(claimants), max(len(claimants), wanted - 1))), claimants


@laws
@given(given_=rivals(), fairness=st.sampled_from([2.0, 4.0, 16.0]))
def test_no_other_division_of_whole_cores_is_worth_more(given_: tuple[int, list[Claimant]], fairness: float) -> None:
    """Where gains are concave; and elsewhere, as much less as one step gains at most."""
    total, claimants = given_
    found = divided(Worth(fairness=fairness), total, claimants)
    curves = [[value(each, cores, fairness) for cores in range(int(each.cores) + 1)] for each in claimants]
    best = max(
        sum(curve[cores] for curve, cores in zip(curves, division, strict=True))
        for division in product(*(range(len(curve)) for curve in curves))
        if sum(division) <= total
    )
    own = sum(curve[int(cores + 1e-9)] for curve, cores in zip(curves, found, strict=True))
    steps = [[later - earlier for earlier, later in pairwise(curve)] for curve in curves]
    if all(later <= earlier * (1 + 1e-9) for each in steps for earlier, later in pairwise(each)):
        assert own == pytest.approx(best)
    else:
        assert own >= best - max(max(each) for each in steps) * (1 + 1e-9)


def test_the_one_that_gains_most_gets_the_core() -> None:
    """At 300 ms neither can answer with half a core what it can with a whole one."""
    rivals = [claimant("rare", 2, rate_rps=2, unit=1.0), claimant("busy", 4, rate_rps=60, unit=1.0)]
    assert divided(Worth(), 4, rivals) == [1, 3]
    assert divided(MaxMin(), 4, rivals) == [2, 2]


def test_twice_the_weight_is_twice_the_fraction_in_time() -> None:
    rivals = [claimant(key, 8, weight, rate_rps=400) for key, weight in (("x", 1.0), ("y", 2.0))]
    few, many = divided(Worth(), 6, rivals)
    assert many == pytest.approx(2 * few, abs=0.5)


def test_nothing_moves_for_equal_worth() -> None:
    for present in ((2.0, 1.0), (1.0, 2.0)):
        rivals = [
            claimant(key, 3, rate_rps=60, unit=1.0, present=cores) for key, cores in zip("xy", present, strict=True)
        ]
        assert divided(Worth(), 3, rivals) == list(present)


def test_a_small_change_of_the_traffic_moves_nothing() -> None:
    for rates in ((60.0, 58.0), (58.0, 60.0)):
        rivals = [
            claimant(key, 3, rate_rps=rate_rps, unit=1.0, present=cores)
            for key, rate_rps, cores in zip("xy", rates, (2.0, 1.0), strict=True)
        ]
        assert divided(Worth(), 3, rivals) == [2.0, 1.0]


def test_nobody_of_equal_weight_gets_nothing() -> None:
    rivals = [claimant("busy", 9, rate_rps=500), claimant("rare", 1, rate_rps=0.0)]
    assert min(divided(Worth(fairness=0.0), 2, rivals)) > 0


def test_half_a_core_goes_to_the_one_that_can_use_it() -> None:
    """One has replicas of a whole core, the other of a quarter."""
    rivals = [claimant("whole", 3, rate_rps=150, unit=1.0), claimant("parts", 2, rate_rps=5)]
    assert divided(Worth(), 2.5, rivals) == [1.0, 1.5]


def test_few_plans_are_asked_for_and_none_of_many_applications() -> None:
    for count, most in ((1, SIZES + 4), (4, SIZES + 4), (20, 4), (ASKS + 1, 0)):
        asked: list[list[float]] = [[] for _ in range(count)]
        rivals = [claimant(f"a{index}", 8, rate_rps=60 + index, asked=own) for index, own in enumerate(asked)]
        shares = Worth().cores(0, 4 * count, rivals)
        assert all(len(own) <= most for own in asked)
        assert all(own for own in asked) == (most > 0)
        assert sum(share.cores for share in shares) == pytest.approx(4 * count)


def test_it_says_nothing_of_less_than_a_thousandth() -> None:
    rivals = [claimant("x", 4, rate_rps=5, unit=1.0), claimant("y", 4, rate_rps=5, unit=1.0)]
    assert all("e-" not in share.why for share in Worth().cores(0, 6 + 1e-7, rivals))


def test_it_says_what_a_core_more_or_less_would_change() -> None:
    rivals = [claimant("x", 4, rate_rps=30, unit=1.0), claimant("y", 4, rate_rps=30, unit=1.0)]
    share, _ = Worth().cores(0, 4, rivals)
    plans = [plan for cores in (1, 2, 3) if (plan := rivals[0].plan(cores)) is not None]
    at = [100 * attained(services_of(plan, rivals[0].view), rivals[0].view) for plan in plans]
    assert share.cores == 2
    assert share.why.startswith(f"worth: {at[1]:.1f}% of 30 requests/s expected in time")
    assert f"{at[1] - at[0]:.1f} points less with 1 core less" in share.why
    assert f"{at[2] - at[1]:.1f} points ({0.3 * (at[2] - at[1]):.4g} requests/s) more with 1 core more" in share.why
