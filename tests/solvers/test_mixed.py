"""The cheapest mix of replicas and the parts of deadlines, against all answers of small problems."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers import highs, mixed
from sloop.solvers.budget import IndexedPath
from sloop.solvers.mixed import (
    TIE,
    Mix,
    MixNodes,
    MixOption,
    MixStage,
    TimedCosts,
    cheapest,
    deadline_parts,
    fits,
    largest_share,
)

laws = settings(max_examples=60)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[MixStage], list[MixNodes]]:
    """One or two stages with up to three options each, on nodes of two kinds. All numbers are multiples of 1/4, so
    that no answer depends on rounding."""
    quarters = st.integers(1, 40).map(lambda n: n / 4)
    stages = []
    for _ in range(draw(st.integers(1, 2))):
        options = tuple(
            MixOption(
                rate_rps=draw(quarters),
                cost=draw(quarters),
                most=draw(st.integers(0, 4)),
                pool=draw(st.integers(0, 1)),
                nodes=draw(st.sampled_from([0.25, 0.5, 1.0])),
            )
            for _ in range(draw(st.integers(1, 3)))
        )
        stages.append(MixStage(draw(st.integers(0, 80).map(lambda n: n / 4)), options))
    pools = [
        MixNodes(draw(st.integers(0, 4)), draw(st.integers(0, 2)), price=draw(st.integers(1, 40).map(lambda n: n / 4)))
        for _ in range(2)
    ]
    return stages, pools


ANY = [MixNodes(math.inf)]
"""Nodes without a limit."""

Counts = tuple[tuple[int, ...], ...]


def all_counts(stages: Sequence[MixStage], pools: Sequence[MixNodes]) -> Iterator[Counts]:
    """Every mix with a replica of each stage that fits."""
    own = [
        [counts for counts in itertools.product(*(range(o.most + 1) for o in stage.options)) if any(counts)]
        for stage in stages
    ]
    return (counts for counts in itertools.product(*own) if fits(stages, counts, pools))


def price_of(
    stages: Sequence[MixStage], counts: Counts, pools: Sequence[MixNodes], start: float = 0.0, tie: float = TIE
) -> float:
    """The objective: replicas on owned nodes pay their shares, and whole nodes are rented, as few as possible."""
    used, price = [0.0] * len(pools), 0.0
    for stage, own in zip(stages, counts, strict=True):
        for n, option in zip(own, stage.options, strict=True):
            used[option.pool] += n * option.nodes
            price += n * option.cost * (tie if pools[option.pool].rented else 1.0)
            price += start * max(0, n - option.present) * option.cost
    for nodes, pool in zip(used, pools, strict=True):
        if pool.rented:
            price += min(
                pool.price * (rented + max(0.0, nodes - rented))
                for rented in range(pool.rented + 1)
                if nodes - rented <= pool.owned + 1e-9
            )
    return price


def least_cost(stages: Sequence[MixStage], pools: Sequence[MixNodes], share: float = 1.0, start: float = 0.0) -> float:
    return min(
        (
            price_of(stages, counts, pools, start)
            for counts in all_counts(stages, pools)
            if all(stage.carries(own, share) for stage, own in zip(stages, counts, strict=True))
        ),
        default=math.inf,
    )


def check(mix: Mix, stages: Sequence[MixStage], pools: Sequence[MixNodes], share: float = 1.0) -> None:
    """The mix is one of all, carries the share, and its cost is right."""
    assert fits(stages, mix.counts, pools)
    for stage, own in zip(stages, mix.counts, strict=True):
        assert stage.carries(own, share)
    assert mix.cost == pytest.approx(price_of(stages, mix.counts, pools, tie=0.0))


@laws
@given(problems())
def test_no_mix_is_cheaper(problem: tuple[list[MixStage], list[MixNodes]]) -> None:
    stages, pools = problem
    best, found = least_cost(stages, pools), cheapest(stages, pools)
    if found is None:
        assert best == math.inf
        return
    check(found, stages, pools)
    assert found.proven
    assert price_of(stages, found.counts, pools) == pytest.approx(best)


@laws
@given(problems(), st.sampled_from([0.25, 0.5, 2.0]), st.data())
def test_starts_cost_extra(problem: tuple[list[MixStage], list[MixNodes]], start: float, data: st.DataObject) -> None:
    stages, pools = problem
    stages = [
        replace(stage, options=tuple(replace(o, present=data.draw(st.integers(0, 4))) for o in stage.options))
        for stage in stages
    ]
    best, found = least_cost(stages, pools, start=start), cheapest(stages, pools, start=start)
    if found is None:
        assert best == math.inf
    else:
        check(found, stages, pools)
        assert price_of(stages, found.counts, pools, start) == pytest.approx(best)
        assert found.started == pytest.approx(
            price_of(stages, found.counts, pools, 1.0) - price_of(stages, found.counts, pools)
        )


def test_what_is_there_stays_unless_another_mix_saves_more_than_its_start() -> None:
    small, large = MixOption(20.0, 0.3, 9, present=3), MixOption(100.0, 0.8, 9)
    stage = MixStage(60.0, (small, large))
    mixes = [cheapest([stage], ANY, start=start) for start in (0.0, 0.1, 0.2)]
    assert [mix.counts[0] for mix in mixes if mix] == [(0, 1), (0, 1), (3, 0)], "0.9 against 0.8 × (1 + start)"


@laws
@given(problems())
def test_in_an_overload_the_largest_share_is_carried(problem: tuple[list[MixStage], list[MixNodes]]) -> None:
    stages, pools = problem
    shares = [
        min(
            sum(n * o.rate_rps for n, o in zip(own, stage.options, strict=True)) / stage.rate_rps
            if stage.rate_rps
            else 1.0
            for stage, own in zip(stages, counts, strict=True)
        )
        for counts in all_counts(stages, pools)
    ]
    found = largest_share(stages, pools)
    if found is None:
        assert not shares
        return
    mix, share = found
    assert share == pytest.approx(min(1.0, max(shares)))
    check(mix, stages, pools, share)
    assert mix.proven
    assert price_of(stages, mix.counts, pools) == pytest.approx(least_cost(stages, pools, share))


def test_a_rest_is_carried_by_a_small_replica_of_another_kind() -> None:
    """Large replicas cost 1 for 100 requests/s, small ones 0.3 for 20: per request the large ones are cheaper."""
    options = (MixOption(100.0, 1.0, 9), MixOption(20.0, 0.3, 9))
    counts = [cheapest([MixStage(rate_rps, options)], ANY) for rate_rps in (10, 20, 55, 70, 110, 250)]
    assert [mix.counts[0] for mix in counts if mix] == [(0, 1), (0, 1), (0, 3), (1, 0), (1, 1), (2, 3)]


@st.composite
def large_problems(draw: st.DrawFn) -> tuple[MixStage, list[MixNodes]]:
    """One stage with more replicas than can be counted out, on nodes that are always there."""
    options = tuple(
        MixOption(
            rate_rps=draw(st.floats(1, 500)),
            cost=draw(st.floats(0.05, 4)),
            most=draw(st.sampled_from([2, 20, 400])),
            present=draw(st.integers(0, 5)),
            pool=draw(st.integers(0, 1)),
            nodes=draw(st.sampled_from([0.05, 0.125, 0.5])),
        )
        for _ in range(draw(st.integers(1, 6)))
    )
    always = (st.integers(1, 40).map(float) | st.just(math.inf)).map(MixNodes)
    prices = st.sampled_from([0.2, 1.0, 3.06])
    rented = st.builds(MixNodes, st.integers(0, 3).map(float), st.integers(1, 10), prices)
    return MixStage(draw(st.floats(1, 5000)), options), [draw(always), draw(always | rented)]


@laws
@given(large_problems(), st.sampled_from([0.0, 0.2]))
def test_the_search_for_one_stage_agrees_with_the_integer_program(
    problem: tuple[MixStage, list[MixNodes]], start: float
) -> None:
    stage, pools = problem

    def cost(steps_max: int) -> float:
        mixed._solved.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixed, "STEPS_MAX", steps_max)
            found = cheapest([stage], pools, start=start)
        if found is None:
            return math.inf
        check(found, [stage], pools)
        assert found.proven
        return price_of([stage], found.counts, pools, start)

    assert cost(mixed.STEPS_MAX) == pytest.approx(cost(0), rel=1e-6)


def test_one_stage_is_solved_without_the_integer_program_and_equal_programs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixed._solved.cache_clear()
    stage = MixStage(131.0, (MixOption(100.0, 8.0, 50, nodes=0.5), MixOption(16.0, 1.0, 400, nodes=0.0625)))
    solved: list[int] = []
    minimise = highs.minimise

    def counting(*args: Any, **options: Any) -> highs.MilpSolution:
        solved.append(1)
        return minimise(*args, **options)

    monkeypatch.setattr(highs, "minimise", counting)
    assert cheapest([stage], [MixNodes(25.0)]) is not None
    assert not solved
    for _ in range(3):
        assert cheapest([stage, stage], [MixNodes(25.0)]) is not None
    assert len(solved) == 1


def test_of_equally_cheap_replicas_the_fewest_run() -> None:
    stage = MixStage(40.0, (MixOption(10.0, 1.0, 50), MixOption(40.0, 4.0, 50), MixOption(20.0, 2.0, 50)))
    found = cheapest([stage], ANY)
    assert found is not None
    assert found.counts == ((0, 1, 0),)


def test_without_a_rate_the_cheapest_replica_runs() -> None:
    found = cheapest([MixStage(0.0, (MixOption(100.0, 1.0, 9), MixOption(20.0, 0.3, 9)))], ANY)
    assert found is not None
    assert found.counts == ((0, 1),)


def test_a_stage_without_options_has_no_mix() -> None:
    assert cheapest([MixStage(1.0, ())], ANY) is None
    assert largest_share([MixStage(1.0, ())], ANY) is None


def test_thousands_of_replicas() -> None:
    options = (MixOption(97.0, 1.0, 10_000), MixOption(20.0, 0.21, 10_000), MixOption(33.0, 0.35, 10_000))
    found = cheapest([MixStage(250_000.0, options)], ANY)
    assert found is not None
    assert found.proven
    assert found.cost == pytest.approx(250_000 / 97, rel=1e-3)


# Deadlines of graphs


def ways(*pairs: tuple[float, float]) -> TimedCosts:
    return TimedCosts(np.array([time for time, _ in pairs]), np.array([cost for _, cost in pairs]))


PATHS = {
    "one": [IndexedPath((0,), 60.0)],
    "chain": [IndexedPath((0, 1, 2), 90.0)],
    "fork": [IndexedPath((0, 1), 70.0), IndexedPath((0, 2), 90.0)],
    "meet": [IndexedPath((0, 2), 70.0), IndexedPath((1, 2), 90.0)],
    "diamond": [IndexedPath((0, 1, 3), 110.0), IndexedPath((0, 2, 3), 90.0)],
}


@pytest.mark.parametrize("shape", PATHS)
@laws
@given(data=st.data())
def test_parts_keep_every_path_and_suffice_for_the_cheapest_choice(shape: str, data: st.DataObject) -> None:
    paths = PATHS[shape]
    pair = st.tuples(st.integers(1, 60).map(float), st.integers(1, 50).map(float))
    count = 1 + max(stage for path in paths for stage in path.stages)
    stages = [data.draw(st.lists(pair, min_size=1, max_size=3)) for _ in range(count)]

    def costs(part: float) -> list[float]:
        """Of all choices that keep this part of each deadline."""
        return [
            sum(cost for _, cost in choice)
            for choice in itertools.product(*stages)
            if all(sum(choice[stage][0] for stage in path.stages) <= part * path.slo_ms for path in paths)
        ]

    parts = deadline_parts([ways(*own) for own in stages], paths)
    if parts is None:
        assert not costs(1.0)
        return
    for path in paths:
        assert sum(parts[stage] for stage in path.stages) <= path.slo_ms * (1 + 1e-9)
    within = [min(cost for time, cost in own if time <= part + 1e-9) for own, part in zip(stages, parts, strict=True)]
    if shape in ("one", "chain", "fork"):  # graphs whose paths do not meet are solved exactly, but for rounding up
        assert sum(within) <= min(costs(0.99), default=math.inf) + 1e-9


def test_a_stage_that_saves_most_gets_most_time() -> None:
    """Slow hardware makes the first stage much cheaper, the second hardly."""
    parts = deadline_parts([ways((10, 50), (70, 5)), ways((10, 11), (70, 10))], [IndexedPath((0, 1), 100.0)])
    assert parts == pytest.approx((87.5, 12.5))
