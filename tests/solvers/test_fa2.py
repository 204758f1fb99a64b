"""FA2: exact on trees, sound on graphs, the specification's totals to the unit."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.reproduce.fa2.application import CPU, GPU, Hardware, problem
from sloop.solvers import choice, fa2
from sloop.solvers.fa2 import Answer, Choice, GaveUp, Mode, Shortfall, Stage, choices_of, keeps, solve, squeezed
from sloop.solvers.graph import Ties, Way

some = settings(max_examples=60, deadline=None)


@st.composite
def latencies(draw: st.DrawFn, batch_max: int = 8) -> tuple[float, ...]:
    """d(b) as the specification draws it (§7.2): d(1) in ms, ρ and κ of it fixed and quadratic."""
    alone, rho, kappa = draw(st.floats(20, 400)), draw(st.floats(0.2, 0.6)), draw(st.floats(0, 0.01))
    return tuple(alone * (kappa * b * b + (1 - rho - kappa) * b + rho) for b in range(1, batch_max + 1))


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Stage], list[Way]]:
    """Two to seven stages below one root, a path and a deadline for each leaf."""
    parents = [draw(st.integers(0, stage - 1)) for stage in range(1, draw(st.integers(2, 7)))]
    costs = [draw(latencies(16)) for _ in range(len(parents) + 1)]
    ways = []
    for leaf in sorted(set(range(len(costs))) - set(parents)):
        chain = [leaf]
        while chain[-1]:
            chain.append(parents[chain[-1] - 1])
        slo_ms = draw(st.floats(1.0, 6.0)) * sum(costs[stage][0] for stage in chain)
        ways.append((tuple(reversed(chain)), slo_ms, draw(st.floats(0.5, 5))))
    rates = [sum(rate for chain, _, rate in ways if stage in chain) for stage in range(len(costs))]
    stages = [Stage(f"s{at}", rate, own) for at, (rate, own) in enumerate(zip(rates, costs, strict=True))]
    return stages, [Way(chain, slo_ms) for chain, slo_ms, _ in ways]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Stage], list[Way]]:
    """Paths over any of four to eight stages, each with five times the time it needs alone."""
    costs = draw(st.lists(latencies(), min_size=4, max_size=8))
    chain = st.sets(st.integers(0, len(costs) - 1), min_size=2, max_size=5).map(lambda chosen: tuple(sorted(chosen)))
    chains = draw(st.lists(chain, min_size=2, max_size=5, unique=True))
    used = sorted({stage for own in chains for stage in own})
    rates = {own: draw(st.floats(0.5, 5)) for own in chains}
    stages = [Stage(f"s{at}", sum(rates[own] for own in chains if at in own), costs[at]) for at in used]
    return stages, [Way(tuple(used.index(s) for s in own), 5 * sum(costs[s][0] for s in own)) for own in chains]


def total(answer: Answer | Shortfall | GaveUp) -> tuple[int, int] | None:
    return (answer.replicas, answer.batches) if isinstance(answer, Answer) else None


@settings(max_examples=300, deadline=None)
@given(trees())
def test_on_trees_it_is_the_integer_program(tree: tuple[list[Stage], list[Way]]) -> None:
    found, exact = solve(*tree, fallback=False, slot_ms=1.0), solve(*tree, mode="milp", slot_ms=1.0)
    if isinstance(exact, Answer) and exact.method == "milp":
        assert total(found) == total(exact)
        assert isinstance(found, Answer)
        assert found.proven
        assert keeps(found.choices, tree[1])
    else:  # not in whole milliseconds
        assert not isinstance(found, Answer)


@settings(max_examples=25, deadline=None)
@given(trees())
def test_on_small_trees_it_is_what_trying_everything_gives(tree: tuple[list[Stage], list[Way]]) -> None:
    stages, ways = tree
    small = [Stage(stage.name, stage.rate_rps, stage.latency_ms[:3]) for stage in stages]

    def is_kept(chosen: tuple[Choice, ...]) -> bool:
        return all(sum(math.ceil(chosen[s].total_ms - 1e-6) for s in way.stages) <= int(way.slo_ms) for way in ways)

    every = (chosen for chosen in product(*map(choices_of, small)) if is_kept(chosen))
    best = min(((sum(c.replicas for c in own), sum(c.batch for c in own)) for own in every), default=None)
    assert total(solve(small, ways, slot_ms=1.0, fallback=False)) == best


@settings(max_examples=1000, deadline=None)
@given(latencies(16), st.floats(0.1, 50), st.floats(0.5, 8))
def test_one_stage_is_what_trying_everything_gives(own: tuple[float, ...], rate_rps: float, factor: float) -> None:
    slo_ms = factor * own[0]
    fitting = [
        (max(1, math.ceil(rate_rps * d / (1000 * b) - 1e-9)), b)
        for b, d in enumerate(own, start=1)
        if math.ceil(d + 1000 * (b - 1) / rate_rps - 1e-6) <= int(slo_ms + 1e-6)
    ]
    found = solve([Stage("s", rate_rps, own)], [Way((0,), slo_ms)], slot_ms=1.0, fallback=False)
    assert total(found) == min(fitting, default=None)


@some
@given(meshes(), st.sampled_from(["tree", "paper"]), st.sampled_from(["first", "loosest", "best"]))
def test_on_graphs_it_is_sound(mesh: tuple[list[Stage], list[Way]], mode: Mode, ties: Ties) -> None:
    stages, ways = mesh
    found, exact = solve(stages, ways, mode=mode, ties=ties), solve(stages, ways, mode="milp")
    assert isinstance(found, Answer), "one at a time holds, so something does"
    assert isinstance(exact, Answer)
    assert keeps(found.choices, ways)
    assert all(
        stage.rate_rps <= c.replicas * 1000 * c.batch / c.latency_ms * (1 + 1e-9)
        for stage, c in zip(stages, found.choices, strict=True)
    )
    assert (found.replicas, found.batches) >= (exact.replicas, exact.batches)
    better = solve(stages, ways, mode=mode, ties=ties, polish=True)
    assert isinstance(better, Answer)
    assert keeps(better.choices, ways)
    assert (better.replicas, better.batches) <= (found.replicas, found.batches)


THREE = (6, 12, 18, 24, 27, 30, 36, 42, 48, 54, 60)
SIX = (6, 8, 12, 18, 24, 27)
SLICES = (6, 8, 10, 12, 18, 24, 27, 30, 36, 42, 48, 54, 60)
SLICES_BEST = (10, 10, 11, 11, 12, 13, 13, 15, 15, 17, 19, 21, 23)


@pytest.mark.parametrize(
    ("hardware", "paths", "rates", "mode", "ties", "totals"),
    [
        (CPU, 3, THREE, "milp", "best", (7, 10, 12, 15, 17, 17, 20, 23, 26, 28, 32)),
        (CPU, 3, THREE, "tree", "best", (7, 10, 12, 15, 17, 17, 20, 23, 26, 28, 32)),
        (CPU, 3, THREE, "paper", "best", (7, 10, 12, 15, 17, 17, 20, 23, 26, 28, 32)),
        (CPU, 6, SIX, "milp", "best", (16, 19, 24, 32, 42, 46)),
        (CPU, 6, SIX, "tree", "loosest", (16, 19, 24, 32, 42, 46)),
        (CPU, 6, SIX, "paper", "first", (17, 20, 25, 35, 45, 50)),
        (CPU, 6, SIX, "paper", "loosest", (17, 20, 25, 35, 45, 50)),
        (CPU, 6, SIX, "paper", "best", (17, 20, 25, 35, 45, 50)),
        (GPU, 6, SLICES, "milp", "best", SLICES_BEST),
        (GPU, 6, SLICES, "tree", "loosest", (10, 10, 11, 11, 12, 13, 14, 15, 15, 18, 19, 21, 23)),
        (GPU, 6, SLICES, "tree", "best", (10, 10, 11, 11, 12, 13, 13, 15, 15, 18, 19, 21, 23)),
        (GPU, 6, SLICES, "paper", "first", (10, 10, 11, 11, 13, 13, 14, 15, 17, 19, 21, 22, 23)),
        (GPU, 6, SLICES, "paper", "loosest", (10, 10, 11, 11, 13, 13, 14, 15, 16, 19, 20, 22, 23)),
        (GPU, 6, SLICES, "paper", "best", (10, 10, 11, 11, 12, 13, 14, 15, 16, 19, 20, 22, 23)),
    ],
)
def test_totals_of_the_specification(
    hardware: Hardware, paths: int, rates: tuple[int, ...], mode: Mode, ties: Ties, totals: tuple[int, ...]
) -> None:
    """§7.2-5, every number."""
    for rate_rps, expected in zip(rates, totals, strict=True):
        given = problem(hardware, paths, rate_rps)
        answer = solve(given.stages, given.ways, mode=mode, ties=ties, fallback=False)
        assert isinstance(answer, Answer)
        assert answer.replicas == expected, f"{rate_rps} requests/s"


def test_the_optimum_at_every_rate_of_the_three_paths() -> None:
    for rate_rps in range(6, 61, 6):
        given = problem(CPU, 3, rate_rps)
        assert total(solve(given.stages, given.ways)) == total(solve(given.stages, given.ways, mode="milp"))


def test_a_rate_of_zero_is_one_replica_each() -> None:
    given = problem(CPU, 6, 0)
    for mode in ("tree", "paper", "milp"):
        answer = solve(given.stages, given.ways, mode=mode)
        assert isinstance(answer, Answer)
        assert {(own.batch, own.replicas, own.wait_ms) for own in answer.choices} == {(1, 1, 0.0)}


def test_a_deadline_below_the_time_alone_says_who_is_slow() -> None:
    answer = solve([Stage("a", 1, (30.0, 50.0)), Stage("b", 1, (80.0, 99.0))], [Way((0, 1), 100.0), Way((0,), 40.0)])
    assert answer == Shortfall(Way((0, 1), 100.0), 110.0, 1)


def test_a_deadline_as_long_as_the_time_alone_holds() -> None:
    """Although rounding up to slots would not let it."""
    answer = solve([Stage("a", 1, (33.33,)), Stage("b", 1, (66.67,))], [Way((0, 1), 100.0)], slot_ms=1.0)
    assert isinstance(answer, Answer)
    assert answer.method == "quickest"
    assert answer.replicas == 2


def test_a_path_that_starts_half_way_down_is_no_tree() -> None:
    """The published AUTT → SUMR → TCLS and SUMR → QUAN, with a deadline for the second of its own."""
    own = [50.0, 50.0, 300.0, 20.0]
    rates = [20.0, 20.0, 60.0, 20.0]
    batches = [0.004 * b * b + 0.646 * b + 0.35 for b in range(1, 17)]
    stages = [
        Stage(f"s{place}", rate, tuple(alone * d for d in batches))
        for place, (alone, rate) in enumerate(zip(own, rates, strict=True))
    ]
    ways = [Way((0, 1, 2), 6000.0), Way((1, 3), 400.0)]
    answer, optimum = solve(stages, ways), solve(stages, ways, mode="milp")
    assert isinstance(answer, Answer)
    assert isinstance(optimum, Answer)
    assert not answer.proven
    assert answer.replicas == optimum.replicas == 16


def test_when_cuts_leave_nothing_the_integer_program_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [Stage("a", 1, (90.0,)), Stage("b", 1, (10.0,)), Stage("c", 1, (10.0,), 1)]
    ways = [Way((0, 2), 101.0), Way((1, 2), 21.0)]
    answer = solve(stages, ways)
    assert isinstance(answer, Answer)
    monkeypatch.setattr(fa2, "_by_forest", lambda *_: None)
    answer = solve(stages, ways)
    assert isinstance(answer, Answer)
    assert answer.method == "milp"
    assert answer.proven
    monkeypatch.setattr(choice, "cheapest", lambda *_, **__: choice.GAVE_UP)
    assert solve(stages, ways, nodes_max=5) == GaveUp(5)


def test_slots_follow_the_deadlines() -> None:
    assert fa2.slot_ms_of([Way((0,), 3000.0), Way((0,), 25_710.0)]) == 1.0
    assert fa2.slot_ms_of([Way((0,), 20.0)]) == 0.02
    assert fa2.slot_ms_of([Way((0,), 3_276_800.0)]) == 100.0


def test_parts_of_a_request_come_at_once() -> None:
    """Ten parts, one at a time: ten turns with one replica, fewer with more; a batch of ten need not wait."""
    stage = Stage("crops", 10.0, (20.0, 24.0, 28.0, 32.0, 36.0, 40.0, 44.0, 48.0, 52.0, 56.0), parts=10)
    alone = [own for own in choices_of(stage) if own.batch == 1]
    assert [(own.replicas, own.turns) for own in alone] == [(2, 5), (3, 4), (4, 3), (5, 2), (10, 1)]
    whole = next(own for own in choices_of(stage) if own.batch == 10)
    assert (whole.replicas, whole.wait_ms, whole.total_ms) == (1, 0.0, 56.0)
    tight = solve([stage], [Way((0,), 45.0)])
    assert isinstance(tight, Answer)
    assert tight.choices[0].replicas == 2
    assert tight.choices[0].total_ms <= 45.0


def test_what_does_not_fit_is_squeezed() -> None:
    given = problem(CPU, 3, 60)
    for most in (31, 20, 10):
        squeezed_to = squeezed(given.stages, given.ways, most)
        assert squeezed_to is not None
        answer, share = squeezed_to
        assert answer.replicas <= most
        assert 0 < share < 1
        assert keeps(answer.choices, given.ways)
    assert squeezed(given.stages, given.ways, 3) is None, "seven stages need seven"


def test_a_millionth_that_fits_is_found() -> None:
    given = problem(CPU, 3, 60_000_000)
    squeezed_to = squeezed(given.stages, given.ways, 10)
    assert squeezed_to is not None
    assert squeezed_to[0].replicas <= 10
    assert 60_000_000 * squeezed_to[1] > 3, "what ten replicas carry"


def test_the_path_that_binds() -> None:
    given = problem(CPU, 3, 30)
    answer = solve(given.stages, given.ways)
    assert isinstance(answer, Answer)
    binding = answer.binding(given.ways)
    left = [way.slo_ms - answer.way_ms(way) for way in given.ways]
    assert binding.slo_ms - answer.way_ms(binding) == min(left) >= 0
