"""Biscale's programs: the specification's vectors, exhaustive search on random chains, what every answer promises."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.profile.profile import Amdahl
from sloop.solvers.budget import Segment
from sloop.solvers.sizes import SizeChoice, SizeProblem, Throughput, chain_problem
from sloop_systems.biscale.experiments.runs import PIPELINES
from sloop_systems.biscale.solver import carries, horizontal
from tests.solvers.test_sizes import (
    Pairs,
    assert_serves,
    coefficients,
    cost_of,
    exhaustive,
    h_of,
    looser,
    model,
    pairs_v,
    programs,
    rates,
    total,
)


def published(name: str, throughput: Throughput, cores_max: int = 8) -> SizeProblem:
    pipeline = PIPELINES[name]
    models = [model(form, pipeline.batch_max, cores_max) for _, form in pipeline.models]
    return chain_problem(models, pipeline.slo_ms, throughput=throughput)


def pairs_h(found: Sequence[SizeChoice] | None) -> Pairs | None:
    return [(choice.replicas, choice.batch) for choice in found] if found else None


PURE: list[tuple[str, int, Pairs, int, Pairs | None, Pairs]] = [
    ("video", 5, [(1, 1), (1, 1)], 2, [(1, 1), (1, 1)], [(2, 1), (1, 1)]),
    ("video", 10, [(2, 1), (1, 1)], 3, [(2, 1), (1, 1)], [(2, 1), (1, 3)]),
    ("video", 20, [(4, 1), (1, 3)], 5, [(6, 1), (1, 3)], [(2, 1), (2, 5)]),
    ("video", 40, [(8, 1), (2, 3)], 10, None, [(2, 1), (2, 5)]),
    ("video", 60, [(11, 1), (3, 3)], 14, None, [(3, 1), (2, 5)]),
    ("audio", 5, [(1, 3), (1, 1)], 2, [(1, 3), (1, 1)], [(2, 5), (1, 1)]),
    ("audio", 10, [(2, 3), (1, 1)], 3, [(2, 5), (1, 1)], [(2, 5), (2, 1)]),
    ("audio", 20, [(3, 5), (2, 1)], 5, None, [(3, 7), (2, 1)]),
    ("audio", 30, [(4, 7), (2, 2)], 6, None, [(4, 8), (2, 6)]),
    ("nlp", 2, [(1, 1), (1, 1), (1, 1)], 3, [(1, 1), (1, 1), (1, 1)], [(1, 1), (2, 1), (2, 1)]),
    ("nlp", 6, [(1, 1), (3, 1), (3, 1)], 7, [(1, 1), (4, 1), (4, 2)], [(1, 2), (2, 1), (2, 1)]),
    ("nlp", 12, [(1, 2), (5, 1), (5, 1)], 11, None, [(2, 2), (3, 1), (3, 1)]),
]
"""Specification 7.3: λ, H, its cores, V with one replica each, V for 2 λ with H's replicas."""


@pytest.mark.parametrize(("name", "rate_rps", "h", "cores", "v", "v_of_h"), PURE)
def test_published_models_with_the_printed_throughput(
    name: str, rate_rps: int, h: Pairs, cores: int, v: Pairs | None, v_of_h: Pairs
) -> None:
    program = published(name, "pure")
    found = horizontal(program, rate_rps)
    assert found is not None
    assert (pairs_h(found), total(found)) == (h, cores)
    assert pairs_v(program.vertical(rate_rps, [1] * len(h))) == v
    assert pairs_v(program.vertical(2 * rate_rps, [choice.replicas for choice in found])) == v_of_h


@pytest.mark.parametrize(
    ("cores_max", "name", "most"),
    [(8, "video", 24), (8, "audio", 17), (8, "nlp", 8), (16, "video", 31), (16, "audio", 19), (16, "nlp", 9)],
)
def test_what_one_replica_of_each_can_carry(cores_max: int, name: str, most: int) -> None:
    program = published(name, "pure", cores_max)
    carried = [rate for rate in range(1, 60) if program.vertical(rate, [1] * len(program.stages))]
    assert max(carried) == most


@pytest.mark.parametrize(
    ("name", "rate_rps", "h", "cores"),
    [
        ("video", 10, [(2, 1), (1, 1)], 3),
        ("video", 20, [(4, 1), (2, 1)], 6),
        ("video", 40, [(8, 1), (3, 1)], 11),
        ("video", 60, [(12, 1), (4, 2)], 16),
        ("audio", 5, [(2, 1), (1, 1)], 3),
        ("audio", 10, [(3, 3), (1, 1)], 4),
        ("audio", 20, [(4, 4), (2, 1)], 6),
        ("audio", 30, [(5, 6), (3, 1)], 8),
        ("nlp", 2, None, 3),
        ("nlp", 6, None, 7),
        ("nlp", 10, None, 12),
        ("nlp", 12, None, 14),
    ],
)
def test_horizontal_where_the_wait_counts_as_work(name: str, rate_rps: int, h: Pairs | None, cores: int) -> None:
    found = horizontal(published(name, "with_queue"), rate_rps)
    assert found is not None
    assert total(found) == cores
    assert h is None or pairs_h(found) == h


@pytest.mark.parametrize(
    ("name", "rate_rps", "carried", "choices", "extra"),
    [
        ("video", 40, 24, [(8, 1), (3, 1)], (1, 1)),
        ("video", 60, 24, [(8, 1), (3, 1)], (2, 2)),
        ("audio", 20, 7, [(6, 1), (1, 1)], (2, 1)),
        ("nlp", 12, 7, [(1, 1), (6, 1), (8, 1)], (1, 1, 1)),
    ],
)
def test_split_where_one_replica_of_each_is_not_enough(
    name: str, rate_rps: int, carried: int, choices: Pairs, extra: tuple[int, ...]
) -> None:
    found = published(name, "with_queue").split(rate_rps, [1] * len(choices))
    assert found is not None
    assert (found.carried_rps, pairs_v(found.choices), found.extra) == (carried, choices, extra)


def test_a_higher_rate_may_be_feasible_where_a_lower_one_is_not() -> None:
    """And cheaper: batches fill faster (specification 2.6 and 7.4)."""
    audio, video = published("audio", "with_queue"), published("video", "with_queue")
    assert [audio.vertical(rate, (2, 1)) is not None for rate in (18, 19, 20)] == [True, False, True]
    costs = [
        [total(horizontal(p, r) or ()) for r in rates] for p, rates in ((video, (73, 74)), (audio, (7, 8, 22, 23)))
    ]
    assert costs == [[20, 19], [4, 3, 7, 6]]


@settings(max_examples=40)
@given(programs(), rates)
def test_the_program_is_exhaustive_search(program: SizeProblem, rate_rps: int) -> None:
    by_size = (
        exhaustive(program, rate_rps, [cores], None) for cores in range(1, program.stages[0].latency_ms.shape[0] + 1)
    )
    least = next((best for best in by_size if best is not None), None)
    assert cost_of(program, horizontal(program, rate_rps), rate_rps) == least


@settings(max_examples=40)
@given(programs(), rates, st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_answers_are_in_time_and_carry_the_rate(program: SizeProblem, rate_rps: int, replicas: list[int]) -> None:
    for found in (horizontal(program, rate_rps), program.vertical(rate_rps, replicas[: len(program.stages)])):
        if found is not None:
            assert_serves(program, found, rate_rps)
            assert carries(program, rate_rps, [(choice.replicas, choice.cores) for choice in found])


@settings(max_examples=40)
@given(programs(), rates, st.integers(1, 300))
def test_more_time_more_batches_or_more_cores_never_cost_more(
    program: SizeProblem, rate_rps: int, further_ms: int
) -> None:
    for less, more in looser(program, further_ms):
        found, better = horizontal(less, rate_rps), horizontal(more, rate_rps)
        assert found is None or better is not None
        if found and better and found[0].cores == better[0].cores:  # else the smaller were taken, not the cheaper
            assert total(better) <= total(found)


@settings(max_examples=30)
@given(st.lists(coefficients, min_size=3, max_size=3), rates, st.integers(50, 900), st.integers(50, 900))
def test_a_fork_keeps_both_its_ends_in_time(forms: list[Amdahl], rate_rps: int, left_ms: int, right_ms: int) -> None:
    """One stage, then two beside each other: exhaustive search over all batches."""
    models = tuple(model(form, 4, 1) for form in forms)
    program = SizeProblem(models, (Segment((0, 1), left_ms), Segment((0, 2), right_ms)))
    best = None
    for batches in itertools.product(range(1, 5), repeat=3):
        cost, ms = 0, []
        for one, batch in zip(models, batches, strict=True):
            latency_ms = float(one.latency_ms[0, batch - 1])
            h = h_of(program, latency_ms, batch, rate_rps)
            cost += math.ceil(rate_rps / h) if h > 0 else 10**6
            ms.append(math.ceil(latency_ms) + math.ceil(1000 * (batch - 1) / rate_rps))
        if cost < 10**6 and ms[0] + ms[1] <= left_ms and ms[0] + ms[2] <= right_ms:
            key = (cost, sum(batches), sum(ms))
            best = min(best or key, key)
    found = horizontal(program, rate_rps)
    assert (best[:2] if best else None) == ((total(found), sum(c.batch for c in found)) if found else None)


def test_a_stage_visited_three_times_is_sized_for_three_times_the_rate() -> None:
    form = Amdahl(35, 10, 5, 5)
    thrice = horizontal(chain_problem([model(form, 8, 8, visits=3.0)], 300), 10)
    assert thrice == horizontal(chain_problem([model(form, 8, 8)], 300), 30)


def test_larger_replicas_where_those_of_one_unit_are_too_slow() -> None:
    program = chain_problem([model(Amdahl(400, 0, 0, 0), 1, 8)], 150)
    found = horizontal(program, 10)
    assert found is not None
    assert [(choice.replicas, choice.cores) for choice in found] == [(2, 3)]
    assert horizontal(chain_problem([model(Amdahl(400, 0, 0, 0), 1, 2)], 150), 10) is None


def test_a_stage_that_has_no_use_for_more_cores_holds_up_nobody() -> None:
    found = horizontal(chain_problem([model(Amdahl(0, 0, 0, 40), 1, 1), model(Amdahl(400, 0, 0, 0), 1, 8)], 150), 2)
    assert found is not None
    assert [(choice.replicas, choice.cores) for choice in found] == [(1, 1), (1, 4)]


def test_no_more_than_there_is() -> None:
    form = Amdahl(100, 0, 0, 0)
    assert total(horizontal(chain_problem([model(form, 1, 8)], 200, cores_total=2), 20) or ()) == 2
    assert horizontal(chain_problem([model(form, 1, 8)], 200, cores_total=1), 20) is None


def test_sizes_that_cost_more_than_the_cheapest_carry_the_rate_too() -> None:
    models = [model(Amdahl(100, 0, 0, 0), 1, 4), model(Amdahl(100, 0, 0, 0), 1, 4)]
    program = chain_problem(models, 100)
    assert pairs_v(program.vertical(3, [1, 1])) != [(3, 1), (3, 1)]
    assert carries(program, 3, [(1, 3), (1, 3)])
    assert carries(program, 3, [(1, 9), (1, 9)]), "more units than the profile knows are as quick as its most"
    assert not carries(program, 3, [(1, 1), (1, 1)]), "too slow"
    assert not carries(program, 60, [(1, 3), (1, 3)]), "too many"


def test_no_requests_need_one_unit() -> None:
    program = published("video", "with_queue")
    assert pairs_h(horizontal(program, 0)) == [(1, 1), (1, 1)]
    assert pairs_v(program.vertical(0, (1, 1))) == [(1, 1), (1, 1)]


@given(st.floats(0, 1), st.integers(1, 200))
def test_amdahl_why_small_replicas_and_why_equal_ones(parallel: float, count: int) -> None:
    """Specification 2.7: n cores as n replicas beat one of n; and an even split beats concentrating them."""

    def speedup(cores: int) -> float:
        return 1 / ((1 - parallel) + parallel / cores)

    assert count * speedup(1) >= speedup(count) - 1e-9
    assert (count + 1) * speedup(count) >= count * speedup(count + 1) - 1e-9
    assert 2 * speedup(count) >= speedup(2 * count - 1) + 1 - 1e-9


def test_programs_find_something_to_compare() -> None:
    """Guards the properties above against being about nothing: most random chains are feasible at 10 a second."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(50):
        forms = [Amdahl(*rng.uniform((1, 0, 0, 0), (200, 100, 60, 60))) for _ in range(3)]
        found += horizontal(chain_problem([model(form, 8, 8) for form in forms], 1000), 10) is not None
    assert found > 25
