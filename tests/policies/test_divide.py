"""Divide policies: the cores of each application when they want more than there are."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import CoreDemand
from sloop.policies.divide import MaxMin, Priority, Proportional
from sloop.systems.registry import POLICIES, build

laws = settings(max_examples=200)


def divided(policy: Any, total: float, demands: Sequence[CoreDemand]) -> list[float]:
    """The cores of each share."""
    return [share.cores for share in policy.cores(0, total, demands)]


def demands_of(*pairs: tuple[float, float]) -> list[CoreDemand]:
    return [CoreDemand(f"a{index}", "local", cores, weight) for index, (cores, weight) in enumerate(pairs)]


@st.composite
def overloads(draw: st.DrawFn) -> tuple[float, list[CoreDemand]]:
    """Cores, and demands that exceed them together."""
    pair = st.tuples(st.integers(0, 400).map(lambda n: n / 4), st.sampled_from([0.1, 0.5, 1.0, 1.0, 2.0, 7.0]))
    demands = demands_of(*draw(st.lists(pair, min_size=1, max_size=12)))
    return draw(st.floats(0, 1)) * sum(demand.cores for demand in demands), demands


@pytest.mark.parametrize("name", POLICIES["divide"])
@laws
@given(given_=overloads())
def test_all_cores_are_used_and_nobody_gets_more_than_it_wants(
    name: str, given_: tuple[float, list[CoreDemand]]
) -> None:
    total, demands = given_
    policy: Any = build("divide", name)
    cores = divided(policy, total, demands)
    assert sum(cores) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert all(0 <= own <= demand.cores for own, demand in zip(cores, demands, strict=True))
    assert cores == divided(policy, total, list(demands))


@pytest.mark.parametrize("name", POLICIES["divide"])
@laws
@given(given_=overloads(), seed=st.randoms(use_true_random=False))
def test_the_order_of_applications_does_not_matter(
    name: str, given_: tuple[float, list[CoreDemand]], seed: Any
) -> None:
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
def test_max_min_is_the_fairest(given_: tuple[float, list[CoreDemand]]) -> None:
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
def test_equal_weights_get_the_same_part_of_what_they_want(given_: tuple[float, list[CoreDemand]]) -> None:
    total, demands = given_
    equal = demands_of(*((demand.cores, 3.0) for demand in demands))
    wanted = sum(demand.cores for demand in equal)
    if wanted:
        cores = divided(Proportional(), total, equal)
        assert cores == pytest.approx([demand.cores * total / wanted for demand in equal], abs=1e-9)


@laws
@given(given_=overloads())
def test_priority_gives_nothing_to_others_before_the_highest_have_all(
    given_: tuple[float, list[CoreDemand]],
) -> None:
    total, demands = given_
    cores = divided(Priority(), total, demands)
    unmet = [demand.weight for own, demand in zip(cores, demands, strict=True) if own < demand.cores - 1e-9]
    for own, demand in zip(cores, demands, strict=True):
        assert own <= 1e-9 or demand.weight >= max(unmet, default=0.0)
