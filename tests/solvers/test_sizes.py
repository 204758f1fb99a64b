"""Sizes of given numbers of replicas: exhaustive search on random chains, and what every answer promises."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.profile.profile import Amdahl
from sloop.solvers.sizes import SizeChoice, SizedStage, SizeProblem, Throughput, chain_problem

Pairs = list[tuple[int, int]]


def model(form: Amdahl, batch_max: int, cores_max: int, visits: float = 1.0) -> SizedStage:
    latency_ms = [[max(1.0, form.latency_ms(b, c)) for b in range(1, batch_max + 1)] for c in range(1, cores_max + 1)]
    return SizedStage(np.array(latency_ms), visits)


def pairs_v(found: Sequence[SizeChoice] | None) -> Pairs | None:
    return [(choice.cores, choice.batch) for choice in found] if found else None


def total(found: Sequence[SizeChoice]) -> int:
    return sum(choice.replicas * choice.cores for choice in found)


coefficients = st.builds(
    Amdahl, st.floats(1, 200), st.floats(0, 100), st.floats(0, 60), st.floats(0, 60)
)  # gamma, epsilon, delta, eta


@st.composite
def programs(draw: st.DrawFn, stages_max: int = 3) -> SizeProblem:
    batch_max, cores_max = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    forms = draw(st.lists(coefficients, min_size=1, max_size=stages_max))
    visits = draw(st.sampled_from([1.0, 0.25, 3.0]))
    throughput: Throughput = draw(st.sampled_from(["pure", "with_queue"]))
    models = [model(form, batch_max, cores_max, visits if place else 1.0) for place, form in enumerate(forms)]
    return chain_problem(models, draw(st.integers(50, 1500)), throughput=throughput)


rates = st.integers(1, 80)


def h_of(program: SizeProblem, latency_ms: float, batch: int, rate_rps: float) -> float:
    wait_ms = 1000 * (batch - 1) / rate_rps
    if program.throughput == "pure":
        return 1000 * batch / latency_ms
    h = math.floor(1000 * batch / (math.floor(latency_ms) + math.floor(wait_ms)))
    return min(h, 1000 * batch / latency_ms)


def exhaustive(
    program: SizeProblem, rate_rps: int, cores: Sequence[int], replicas: Sequence[int] | None
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


def cost_of(program: SizeProblem, found: Sequence[SizeChoice] | None, rate_rps: int) -> list[int] | None:
    if found is None:
        return None
    rates_rps = [rate_rps * one.visits for one in program.stages]
    slots = [
        math.ceil(choice.latency_ms) + math.ceil(1000 * (choice.batch - 1) / rate)
        for choice, rate in zip(found, rates_rps, strict=True)
    ]
    return [total(found), sum(choice.batch for choice in found), sum(slots)]


def assert_serves(program: SizeProblem, found: Sequence[SizeChoice], rate_rps: float) -> None:
    """The answer is in time and keeps up."""
    assert sum(choice.latency_ms + choice.wait_ms for choice in found) <= program.segments[0].slots
    for choice, one in zip(found, program.stages, strict=True):
        assert choice.throughput_rps <= 1000 * choice.batch / choice.latency_ms
        assert choice.replicas * choice.throughput_rps >= rate_rps * one.visits * (1 - 1e-9)


def looser(program: SizeProblem, further_ms: int) -> list[tuple[SizeProblem, SizeProblem]]:
    """Pairs of problems: the second has more time, larger batches or more cores."""
    slo_ms = program.segments[0].slots

    def cut(batches: int, cores: int) -> SizeProblem:
        models = [SizedStage(one.latency_ms[:cores, :batches], one.visits) for one in program.stages]
        return chain_problem(models, slo_ms, throughput=program.throughput)

    cores, batches = program.stages[0].latency_ms.shape
    longer = chain_problem(program.stages, slo_ms + further_ms, throughput=program.throughput)
    return [(program, longer), (cut(max(1, batches - 1), cores), program), (cut(batches, 1), program)]


@settings(max_examples=40)
@given(programs(), rates, st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_the_program_is_exhaustive_search(program: SizeProblem, rate_rps: int, replicas: list[int]) -> None:
    counts, cores_max = replicas[: len(program.stages)], program.stages[0].latency_ms.shape[0]
    best = exhaustive(program, rate_rps, range(1, cores_max + 1), counts)
    assert cost_of(program, program.vertical(rate_rps, counts), rate_rps) == best


@settings(max_examples=40)
@given(programs(), rates, st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_answers_are_in_time_and_carry_the_rate(program: SizeProblem, rate_rps: int, replicas: list[int]) -> None:
    found = program.vertical(rate_rps, replicas[: len(program.stages)])
    if found is not None:
        assert_serves(program, found, rate_rps)


@settings(max_examples=40)
@given(programs(), rates, st.integers(1, 300), st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_more_time_more_batches_or_more_cores_never_cost_more(
    program: SizeProblem, rate_rps: int, further_ms: int, replicas: list[int]
) -> None:
    counts = replicas[: len(program.stages)]
    for less, more in looser(program, further_ms):
        found, better = less.vertical(rate_rps, counts), more.vertical(rate_rps, counts)
        assert found is None or (better is not None and total(better) <= total(found))
    if program.vertical(rate_rps, counts):
        assert program.vertical(rate_rps, [count + 1 for count in counts])


@settings(max_examples=40)
@given(programs(), st.integers(2, 80), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_a_split_ends_at_a_boundary_and_makes_up_the_rest(
    program: SizeProblem, rate_rps: int, replicas: list[int]
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


def test_no_more_than_there_is() -> None:
    assert chain_problem([model(Amdahl(100, 0, 0, 0), 1, 8)], 200, cores_total=3).vertical(40, [1]) is None


def test_whole_milliseconds_promise_no_more_than_a_replica_does() -> None:
    """25.05 ms cut to 25 would be 40 requests/s, of which one replica serves 39.92."""
    program = chain_problem([model(Amdahl(0, 0, 0, 25.05), 1, 1)], 100)
    assert program.vertical(40, [1]) is None
    assert program.vertical(39.9, [1]) is not None


def test_split_of_what_cannot_be_in_time_is_nothing() -> None:
    assert chain_problem([model(Amdahl(0, 0, 0, 500), 4, 8)], 400).split(5, [3]) is None


@pytest.mark.parametrize("rate_rps", [2, 24, 25, 40, 62, 1000])
def test_a_split_asks_few_programs(rate_rps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decision costs, in programs solved."""
    forms = (Amdahl(148.8, 5.4, 37.5, -15.5), Amdahl(34.7, 19.5, 2.1, 14.3))
    program = chain_problem([model(form, 8, 8) for form in forms], 780)
    asked, solve = [0], SizeProblem.solve

    def counting(self: SizeProblem, offered: Any) -> Any:
        asked[0] += 1
        return solve(self, offered)

    monkeypatch.setattr(SizeProblem, "solve", counting)
    assert program.split(rate_rps, (1, 1)) is not None
    assert asked[0] <= math.ceil(math.log2(rate_rps)) + 3
