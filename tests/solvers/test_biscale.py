"""Biscale's programs: the specification's vectors, exhaustive search on random chains, what every answer promises."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.profile.profile import Amdahl
from sloop.solvers.biscale import BiscaleChoice, BiscaleProblem, BiscaleStage, Throughput, chain
from sloop.solvers.budget import Segment
from sloop_systems.biscale.experiments.runs import PIPELINES

Pairs = list[tuple[int, int]]


def model(form: Amdahl, batch_max: int, cores_max: int, visits: float = 1.0) -> BiscaleStage:
    latency_ms = [[max(1.0, form.latency_ms(b, c)) for b in range(1, batch_max + 1)] for c in range(1, cores_max + 1)]
    return BiscaleStage(np.array(latency_ms), visits)


def published(name: str, throughput: Throughput, cores_max: int = 8) -> BiscaleProblem:
    pipeline = PIPELINES[name]
    models = [model(form, pipeline.batch_max, cores_max) for _, form in pipeline.models]
    return chain(models, pipeline.slo_ms, throughput=throughput)


def pairs_h(found: Sequence[BiscaleChoice] | None) -> Pairs | None:
    return [(choice.replicas, choice.batch) for choice in found] if found else None


def pairs_v(found: Sequence[BiscaleChoice] | None) -> Pairs | None:
    return [(choice.cores, choice.batch) for choice in found] if found else None


def total(found: Sequence[BiscaleChoice]) -> int:
    return sum(choice.replicas * choice.cores for choice in found)


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
    found = program.horizontal(rate_rps)
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
    found = published(name, "with_queue").horizontal(rate_rps)
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
    costs = [[total(p.horizontal(r) or ()) for r in rates] for p, rates in ((video, (73, 74)), (audio, (7, 8, 22, 23)))]
    assert costs == [[20, 19], [4, 3, 7, 6]]


coefficients = st.builds(
    Amdahl, st.floats(1, 200), st.floats(0, 100), st.floats(0, 60), st.floats(0, 60)
)  # gamma, epsilon, delta, eta


@st.composite
def programs(draw: st.DrawFn, stages_max: int = 3) -> BiscaleProblem:
    batch_max, cores_max = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    forms = draw(st.lists(coefficients, min_size=1, max_size=stages_max))
    visits = draw(st.sampled_from([1.0, 0.25, 3.0]))
    throughput: Throughput = draw(st.sampled_from(["pure", "with_queue"]))
    models = [model(form, batch_max, cores_max, visits if place else 1.0) for place, form in enumerate(forms)]
    return chain(models, draw(st.integers(50, 1500)), throughput=throughput)


rates = st.integers(1, 80)


def h_of(program: BiscaleProblem, latency_ms: float, batch: int, rate_rps: float) -> float:
    wait_ms = 1000 * (batch - 1) / rate_rps
    if program.throughput == "pure":
        return 1000 * batch / latency_ms
    h = math.floor(1000 * batch / (math.floor(latency_ms) + math.floor(wait_ms)))
    return min(h, 1000 * batch / latency_ms)


def exhaustive(
    program: BiscaleProblem, rate_rps: int, cores: Sequence[int], replicas: Sequence[int] | None
) -> list[int] | None:
    """(cores, Σ batches, Σ ms) of the best of all combinations, adding up all of them; `replicas` None: as needed."""
    sums = np.zeros((3, 1), dtype=np.int64)
    for place, one in enumerate(program.stages):
        rate, columns = rate_rps * one.visits, []
        for c, b in itertools.product(cores, range(1, one.latency_ms.shape[1] + 1)):
            latency_ms = float(one.latency_ms[c - 1, b - 1])
            h = h_of(program, latency_ms, b, rate)
            if h > 0 and (replicas is None or replicas[place] * h >= rate):
                n = math.ceil(rate / h) if replicas is None else replicas[place]
                columns.append((n * c, b, math.ceil(latency_ms) + math.ceil(1000 * (b - 1) / rate)))
        options = np.array(columns, dtype=np.int64).reshape(-1, 3).T
        sums = (sums[:, :, None] + options[:, None, :]).reshape(3, -1)
        sums = sums[:, sums[2] <= program.segments[0].slots]
    order = np.lexsort(sums[::-1])
    return [int(value) for value in sums[:, order[0]]] if len(order) else None


def cost_of(program: BiscaleProblem, found: Sequence[BiscaleChoice] | None, rate_rps: int) -> list[int] | None:
    if found is None:
        return None
    rates_rps = [rate_rps * one.visits for one in program.stages]
    slots = [
        math.ceil(choice.latency_ms) + math.ceil(1000 * (choice.batch - 1) / rate)
        for choice, rate in zip(found, rates_rps, strict=True)
    ]
    return [total(found), sum(choice.batch for choice in found), sum(slots)]


@settings(max_examples=40)
@given(programs(), rates, st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_both_programs_are_exhaustive_search(program: BiscaleProblem, rate_rps: int, replicas: list[int]) -> None:
    stages, cores_max = len(program.stages), program.stages[0].latency_ms.shape[0]
    by_size = (exhaustive(program, rate_rps, [cores], None) for cores in range(1, cores_max + 1))
    least = next((best for best in by_size if best is not None), None)
    assert cost_of(program, program.horizontal(rate_rps), rate_rps) == least
    best = exhaustive(program, rate_rps, range(1, cores_max + 1), replicas[:stages])
    assert cost_of(program, program.vertical(rate_rps, replicas[:stages]), rate_rps) == best


@settings(max_examples=40)
@given(programs(), rates, st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_answers_are_in_time_and_carry_the_rate(program: BiscaleProblem, rate_rps: int, replicas: list[int]) -> None:
    counts = replicas[: len(program.stages)]
    for found in (program.horizontal(rate_rps), program.vertical(rate_rps, counts)):
        if found is not None:
            assert sum(choice.latency_ms + choice.wait_ms for choice in found) <= program.segments[0].slots
            for choice, one in zip(found, program.stages, strict=True):
                assert choice.throughput_rps <= 1000 * choice.batch / choice.latency_ms
                assert choice.replicas * choice.throughput_rps >= rate_rps * one.visits * (1 - 1e-9)
            assert program.carries(rate_rps, [(choice.replicas, choice.cores) for choice in found])


@settings(max_examples=40)
@given(programs(), rates, st.integers(1, 300), st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_more_time_more_batches_or_more_cores_never_cost_more(
    program: BiscaleProblem, rate_rps: int, further_ms: int, replicas: list[int]
) -> None:
    counts = replicas[: len(program.stages)]
    slo_ms = program.segments[0].slots

    def cut(batches: int, cores: int) -> BiscaleProblem:
        models = [BiscaleStage(one.latency_ms[:cores, :batches], one.visits) for one in program.stages]
        return chain(models, slo_ms, throughput=program.throughput)

    cores, batches = program.stages[0].latency_ms.shape
    looser = chain(program.stages, slo_ms + further_ms, throughput=program.throughput)
    for less, more in ((program, looser), (cut(max(1, batches - 1), cores), program), (cut(batches, 1), program)):
        found, better = less.horizontal(rate_rps), more.horizontal(rate_rps)
        assert found is None or better is not None
        if found and better and found[0].cores == better[0].cores:  # else the smaller were taken, not the cheaper
            assert total(better) <= total(found)
        found, better = less.vertical(rate_rps, counts), more.vertical(rate_rps, counts)
        assert found is None or (better is not None and total(better) <= total(found))
    if program.vertical(rate_rps, counts):
        assert program.vertical(rate_rps, [count + 1 for count in counts])


@settings(max_examples=40)
@given(programs(), st.integers(2, 80), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_a_split_ends_at_a_boundary_and_makes_up_the_rest(
    program: BiscaleProblem, rate_rps: int, replicas: list[int]
) -> None:
    counts = replicas[: len(program.stages)]
    found = program.split(rate_rps, counts)
    if found is None:
        assert program.vertical(1, counts) is None
        return
    assert program.vertical(found.carried_rps, counts) == found.choices
    if found.carried_rps < rate_rps:
        assert program.vertical(found.carried_rps + 1, counts) is None
    for choice, extra, one in zip(found.choices, found.extra, program.stages, strict=True):
        assert (choice.replicas + extra) * choice.throughput_rps >= rate_rps * one.visits * (1 - 1e-9)


@settings(max_examples=30)
@given(st.lists(coefficients, min_size=3, max_size=3), rates, st.integers(50, 900), st.integers(50, 900))
def test_a_fork_keeps_both_its_ends_in_time(forms: list[Amdahl], rate_rps: int, left_ms: int, right_ms: int) -> None:
    """One stage, then two beside each other: exhaustive search over all batches."""
    models = tuple(model(form, 4, 1) for form in forms)
    program = BiscaleProblem(models, (Segment((0, 1), left_ms), Segment((0, 2), right_ms)))
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
    found = program.horizontal(rate_rps)
    assert (best[:2] if best else None) == ((total(found), sum(c.batch for c in found)) if found else None)


def test_a_stage_visited_three_times_is_sized_for_three_times_the_rate() -> None:
    form = Amdahl(35, 10, 5, 5)
    thrice = chain([model(form, 8, 8, visits=3.0)], 300).horizontal(10)
    assert thrice == chain([model(form, 8, 8)], 300).horizontal(30)


def test_larger_replicas_where_those_of_one_unit_are_too_slow() -> None:
    program = chain([model(Amdahl(400, 0, 0, 0), 1, 8)], 150)
    found = program.horizontal(10)
    assert found is not None
    assert [(choice.replicas, choice.cores) for choice in found] == [(2, 3)]
    assert chain([model(Amdahl(400, 0, 0, 0), 1, 2)], 150).horizontal(10) is None


def test_a_stage_that_has_no_use_for_more_cores_holds_up_nobody() -> None:
    found = chain([model(Amdahl(0, 0, 0, 40), 1, 1), model(Amdahl(400, 0, 0, 0), 1, 8)], 150).horizontal(2)
    assert found is not None
    assert [(choice.replicas, choice.cores) for choice in found] == [(1, 1), (1, 4)]


def test_no_more_than_there_is() -> None:
    form = Amdahl(100, 0, 0, 0)
    assert total(chain([model(form, 1, 8)], 200, cores_total=2).horizontal(20) or ()) == 2
    assert chain([model(form, 1, 8)], 200, cores_total=1).horizontal(20) is None
    assert chain([model(form, 1, 8)], 200, cores_total=3).vertical(40, [1]) is None


def test_whole_milliseconds_promise_no_more_than_a_replica_does() -> None:
    """25.05 ms cut to 25 would be 40 requests/s, of which one replica serves 39.92."""
    program = chain([model(Amdahl(0, 0, 0, 25.05), 1, 1)], 100)
    assert pairs_h(program.horizontal(40)) == [(2, 1)]
    assert program.vertical(40, [1]) is None
    assert pairs_h(program.horizontal(39.9)) == [(1, 1)]


def test_sizes_that_cost_more_than_the_cheapest_carry_the_rate_too() -> None:
    models = [model(Amdahl(100, 0, 0, 0), 1, 4), model(Amdahl(100, 0, 0, 0), 1, 4)]
    program = chain(models, 100)
    assert pairs_v(program.vertical(3, [1, 1])) != [(3, 1), (3, 1)]
    assert program.carries(3, [(1, 3), (1, 3)])
    assert program.carries(3, [(1, 9), (1, 9)]), "more units than the profile knows are as quick as its most"
    assert not program.carries(3, [(1, 1), (1, 1)]), "too slow"
    assert not program.carries(60, [(1, 3), (1, 3)]), "too many"


def test_no_requests_need_one_unit() -> None:
    program = published("video", "with_queue")
    assert pairs_h(program.horizontal(0)) == [(1, 1), (1, 1)]
    assert pairs_v(program.vertical(0, (1, 1))) == [(1, 1), (1, 1)]


def test_split_of_what_cannot_be_in_time_is_nothing() -> None:
    assert chain([model(Amdahl(0, 0, 0, 500), 4, 8)], 400).split(5, [3]) is None


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
        found += chain([model(form, 8, 8) for form in forms], 1000).horizontal(10) is not None
    assert found > 25


@pytest.mark.parametrize("rate_rps", [2, 24, 25, 40, 62, 1000])
def test_a_split_asks_few_programs(rate_rps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Specification 7.4: what a decision costs, in programs solved."""
    program, asked, solve = published("video", "with_queue"), [0], BiscaleProblem._solve

    def counting(self: BiscaleProblem, offered: Any) -> Any:
        asked[0] += 1
        return solve(self, offered)

    monkeypatch.setattr(BiscaleProblem, "_solve", counting)
    assert program.split(rate_rps, (1, 1)) is not None
    assert asked[0] <= math.ceil(math.log2(rate_rps)) + 3
