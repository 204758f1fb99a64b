"""FA2: exact on trees, sound on graphs, published totals to the unit; DS2, InferLine, GrandSLAm; FA2 for one model."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers import budget
from sloop.solvers.budget import IndexedPath, Ties
from sloop_systems.fa2 import solver
from sloop_systems.fa2.experiments.application import CPU, GPU, Hardware, problem
from sloop_systems.fa2.solver import (
    Fa2Choice,
    Fa2GaveUp,
    Fa2Infeasible,
    Fa2Mode,
    Fa2SingleChoice,
    Fa2Solution,
    Fa2Stage,
    ds2,
    fa2_single,
    grandslam,
    inferline,
    inferline_full,
    keeps_deadlines,
    largest_share,
    solve,
    stage_choices,
)

some = settings(max_examples=30)


@st.composite
def latencies(draw: st.DrawFn, batch_max: int = 8) -> tuple[float, ...]:
    """d(b) as the specification draws it (§7.2): d(1) in ms, ρ and κ of it fixed and quadratic."""
    alone, rho, kappa = draw(st.floats(20, 400)), draw(st.floats(0.2, 0.6)), draw(st.floats(0, 0.01))
    return tuple(alone * (kappa * b * b + (1 - rho - kappa) * b + rho) for b in range(1, batch_max + 1))


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Fa2Stage], list[IndexedPath]]:
    """Two to seven stages below one root, a path and a deadline for each leaf."""
    parents = [draw(st.integers(0, stage - 1)) for stage in range(1, draw(st.integers(2, 7)))]
    costs = [draw(latencies(16)) for _ in range(len(parents) + 1)]
    paths = []
    for leaf in sorted(set(range(len(costs))) - set(parents)):
        chain = [leaf]
        while chain[-1]:
            chain.append(parents[chain[-1] - 1])
        slo_ms = draw(st.floats(1.0, 6.0)) * sum(costs[stage][0] for stage in chain)
        paths.append((tuple(reversed(chain)), slo_ms, draw(st.floats(0.5, 5))))
    rates = [sum(rate for chain, _, rate in paths if stage in chain) for stage in range(len(costs))]
    stages = [Fa2Stage(f"s{at}", rate, own) for at, (rate, own) in enumerate(zip(rates, costs, strict=True))]
    return stages, [IndexedPath(chain, slo_ms) for chain, slo_ms, _ in paths]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Fa2Stage], list[IndexedPath]]:
    """Paths over any of four to eight stages, each with five times the time it needs alone."""
    costs = draw(st.lists(latencies(), min_size=4, max_size=8))
    chain = st.sets(st.integers(0, len(costs) - 1), min_size=2, max_size=5).map(lambda chosen: tuple(sorted(chosen)))
    chains = draw(st.lists(chain, min_size=2, max_size=5, unique=True))
    used = sorted({stage for own in chains for stage in own})
    rates = {own: draw(st.floats(0.5, 5)) for own in chains}
    stages = [Fa2Stage(f"s{at}", sum(rates[own] for own in chains if at in own), costs[at]) for at in used]
    return stages, [IndexedPath(tuple(used.index(s) for s in own), 5 * sum(costs[s][0] for s in own)) for own in chains]


def key(answer: Fa2Solution) -> tuple[int, int]:
    return answer.replicas, sum(choice.batch for choice in answer.choices)


def total(answer: Fa2Solution | Fa2Infeasible | Fa2GaveUp) -> tuple[int, int] | None:
    return key(answer) if isinstance(answer, Fa2Solution) else None


@settings(max_examples=50)
@given(trees())
def test_on_trees_it_is_the_integer_program(tree: tuple[list[Fa2Stage], list[IndexedPath]]) -> None:
    found, exact = solve(*tree, fallback=False, slot_ms=1.0), solve(*tree, mode="milp", slot_ms=1.0)
    if isinstance(exact, Fa2Solution) and exact.method == "milp":
        assert total(found) == total(exact)
        assert isinstance(found, Fa2Solution)
        assert found.proven
        assert keeps_deadlines(found.choices, tree[1])
    else:  # not in whole milliseconds
        assert not isinstance(found, Fa2Solution)


@settings(max_examples=25)
@given(trees())
def test_on_small_trees_it_is_what_trying_everything_gives(tree: tuple[list[Fa2Stage], list[IndexedPath]]) -> None:
    stages, paths = tree
    small = [Fa2Stage(stage.name, stage.rate_rps, stage.latency_ms[:3]) for stage in stages]

    def is_kept(chosen: tuple[Fa2Choice, ...]) -> bool:
        return all(sum(math.ceil(chosen[s].total_ms - 1e-6) for s in path.stages) <= int(path.slo_ms) for path in paths)

    every = (chosen for chosen in product(*map(stage_choices, small)) if is_kept(chosen))
    best = min(((sum(c.replicas for c in own), sum(c.batch for c in own)) for own in every), default=None)
    assert total(solve(small, paths, slot_ms=1.0, fallback=False)) == best


@settings(max_examples=100)
@given(latencies(16), st.floats(0.1, 50), st.floats(0.5, 8))
def test_one_stage_is_what_trying_everything_gives(own: tuple[float, ...], rate_rps: float, factor: float) -> None:
    slo_ms = factor * own[0]
    fitting = [
        (max(1, math.ceil(rate_rps * d / (1000 * b) - 1e-9)), b)
        for b, d in enumerate(own, start=1)
        if math.ceil(d + 1000 * (b - 1) / rate_rps - 1e-6) <= int(slo_ms + 1e-6)
    ]
    found = solve([Fa2Stage("s", rate_rps, own)], [IndexedPath((0,), slo_ms)], slot_ms=1.0, fallback=False)
    assert total(found) == min(fitting, default=None)


@some
@given(meshes(), st.sampled_from(["tree", "paper"]), st.sampled_from(["first", "loosest", "best"]))
def test_on_graphs_it_is_sound(mesh: tuple[list[Fa2Stage], list[IndexedPath]], mode: Fa2Mode, ties: Ties) -> None:
    stages, paths = mesh
    found, exact = solve(stages, paths, mode=mode, ties=ties), solve(stages, paths, mode="milp")
    assert isinstance(found, Fa2Solution), "one at a time holds, so something does"
    assert isinstance(exact, Fa2Solution)
    assert keeps_deadlines(found.choices, paths)
    assert all(
        stage.rate_rps <= c.replicas * 1000 * c.batch / c.latency_ms * (1 + 1e-9)
        for stage, c in zip(stages, found.choices, strict=True)
    )
    assert key(found) >= key(exact)
    better = solve(stages, paths, mode=mode, ties=ties, polish=True)
    assert isinstance(better, Fa2Solution)
    assert keeps_deadlines(better.choices, paths)
    assert key(better) <= key(found)


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
    hardware: Hardware, paths: int, rates: tuple[int, ...], mode: Fa2Mode, ties: Ties, totals: tuple[int, ...]
) -> None:
    """§7.2-5, every number."""
    for rate_rps, expected in zip(rates, totals, strict=True):
        given = problem(hardware, paths, rate_rps)
        answer = solve(given.stages, given.paths, mode=mode, ties=ties, fallback=False)
        assert isinstance(answer, Fa2Solution)
        assert answer.replicas == expected, f"{rate_rps} requests/s"


def test_the_optimum_at_every_rate_of_the_three_paths() -> None:
    for rate_rps in range(6, 61, 6):
        given = problem(CPU, 3, rate_rps)
        assert total(solve(given.stages, given.paths)) == total(solve(given.stages, given.paths, mode="milp"))


def test_a_rate_of_zero_is_one_replica_each() -> None:
    given = problem(CPU, 6, 0)
    for mode in ("tree", "paper", "milp"):
        answer = solve(given.stages, given.paths, mode=mode)
        assert isinstance(answer, Fa2Solution)
        assert {(own.batch, own.replicas, own.wait_ms) for own in answer.choices} == {(1, 1, 0.0)}


def test_a_deadline_below_the_time_alone_says_who_is_slow() -> None:
    answer = solve(
        [Fa2Stage("a", 1, (30.0, 50.0)), Fa2Stage("b", 1, (80.0, 99.0))],
        [IndexedPath((0, 1), 100.0), IndexedPath((0,), 40.0)],
    )
    assert answer == Fa2Infeasible(IndexedPath((0, 1), 100.0), 110.0, 1)


def test_a_deadline_as_long_as_the_time_alone_holds() -> None:
    """Although rounding up to slots would not let it."""
    answer = solve([Fa2Stage("a", 1, (33.33,)), Fa2Stage("b", 1, (66.67,))], [IndexedPath((0, 1), 100.0)], slot_ms=1.0)
    assert isinstance(answer, Fa2Solution)
    assert answer.method == "quickest"
    assert answer.replicas == 2


def test_a_path_that_starts_half_way_down_is_no_tree() -> None:
    """The published AUTT → SUMR → TCLS and SUMR → QUAN, with a deadline for the second of its own."""
    own = [50.0, 50.0, 300.0, 20.0]
    rates = [20.0, 20.0, 60.0, 20.0]
    batches = [0.004 * b * b + 0.646 * b + 0.35 for b in range(1, 17)]
    stages = [
        Fa2Stage(f"s{place}", rate, tuple(alone * d for d in batches))
        for place, (alone, rate) in enumerate(zip(own, rates, strict=True))
    ]
    paths = [IndexedPath((0, 1, 2), 6000.0), IndexedPath((1, 3), 400.0)]
    answer, optimum = solve(stages, paths), solve(stages, paths, mode="milp")
    assert isinstance(answer, Fa2Solution)
    assert isinstance(optimum, Fa2Solution)
    assert not answer.proven
    assert answer.replicas == optimum.replicas == 16


def test_when_cuts_leave_nothing_the_integer_program_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [Fa2Stage("a", 1, (90.0,)), Fa2Stage("b", 1, (10.0,)), Fa2Stage("c", 1, (10.0,), 1)]
    paths = [IndexedPath((0, 2), 101.0), IndexedPath((1, 2), 21.0)]
    answer = solve(stages, paths)
    assert isinstance(answer, Fa2Solution)
    monkeypatch.setattr(solver, "_by_forests", lambda *_: None)
    answer = solve(stages, paths)
    assert isinstance(answer, Fa2Solution)
    assert answer.method == "milp"
    assert answer.proven
    monkeypatch.setattr(solver, "cheapest_by_milp", lambda *_, **__: budget.GAVE_UP)
    assert solve(stages, paths, nodes_max=5) == Fa2GaveUp(5)


def test_parts_of_a_request_come_at_once() -> None:
    """Ten parts, one at a time: ten turns with one replica, fewer with more; a batch of ten need not wait."""
    stage = Fa2Stage("crops", 10.0, (20.0, 24.0, 28.0, 32.0, 36.0, 40.0, 44.0, 48.0, 52.0, 56.0), parts=10)
    alone = [own for own in stage_choices(stage) if own.batch == 1]
    assert [(own.replicas, own.turns) for own in alone] == [(2, 5), (3, 4), (4, 3), (5, 2), (10, 1)]
    whole = next(own for own in stage_choices(stage) if own.batch == 10)
    assert (whole.replicas, whole.wait_ms, whole.total_ms) == (1, 0.0, 56.0)
    tight = solve([stage], [IndexedPath((0,), 45.0)])
    assert isinstance(tight, Fa2Solution)
    assert tight.choices[0].replicas == 2
    assert tight.choices[0].total_ms <= 45.0


def test_what_does_not_fit_is_squeezed() -> None:
    given = problem(CPU, 3, 60)
    for most in (31, 20, 10):
        squeezed_to = largest_share(given.stages, given.paths, most)
        assert squeezed_to is not None
        answer, share = squeezed_to
        assert answer.replicas <= most
        assert 0 < share < 1
        assert keeps_deadlines(answer.choices, given.paths)
    assert largest_share(given.stages, given.paths, 3) is None, "seven stages need seven"


def test_a_millionth_that_fits_is_found() -> None:
    given = problem(CPU, 3, 60_000_000)
    squeezed_to = largest_share(given.stages, given.paths, 10)
    assert squeezed_to is not None
    assert squeezed_to[0].replicas <= 10
    assert 60_000_000 * squeezed_to[1] > 3, "what ten replicas carry"


def test_the_path_that_binds() -> None:
    given = problem(CPU, 3, 30)
    answer = solve(given.stages, given.paths)
    assert isinstance(answer, Fa2Solution)
    binding = solver.tightest(answer.choices, given.paths)
    left = [path.slo_ms - solver.path_ms(answer.choices, path) for path in given.paths]
    assert binding.slo_ms - solver.path_ms(answer.choices, binding) == min(left) >= 0


def replicas_of(choices: tuple[Fa2Choice, ...]) -> int:
    return sum(choice.replicas for choice in choices)


@pytest.mark.parametrize(
    ("hardware", "paths", "rates", "by_inferline", "by_ds2"),
    [
        (
            CPU,
            3,
            THREE,
            (7, 10, 15, 17, 20, 20, 24, 29, 31, 34, 37),
            (8, 11, 16, 19, 21, 23, 27, 32, 34, 38, 43),
        ),
        (CPU, 6, SIX, (16, 19, 24, 34, 42, 47), (19, 23, 30, 43, 54, 60)),
        (
            GPU,
            6,
            SLICES,
            (10, 10, 11, 11, 12, 13, 15, 16, 17, 19, 19, 23, 24),
            (11, 11, 12, 13, 15, 16, 19, 21, 23, 25, 26, 30, 33),
        ),
    ],
)
def test_totals_of_ds2_and_inferline(
    hardware: Hardware, paths: int, rates: tuple[int, ...], by_inferline: tuple[int, ...], by_ds2: tuple[int, ...]
) -> None:
    """§7.2-5, every number."""
    given = [problem(hardware, paths, rate_rps) for rate_rps in rates]
    assert tuple(replicas_of(ds2(own.stages)) for own in given) == by_ds2
    assert tuple(replicas_of(inferline(own.stages, own.paths)) for own in given) == by_inferline


def test_inferline_gives_the_time_to_the_first() -> None:
    early = Fa2Stage("early", 20.0, (50.0, 60.0, 70.0, 80.0))
    late = Fa2Stage("late", 20.0, (50.0, 60.0, 70.0, 80.0))
    chosen = inferline([early, late], [IndexedPath((0, 1), 330.0)])
    assert [own.batch for own in chosen] == [4, 1]
    assert [own.batch for own in inferline([early, late], [IndexedPath((0, 1), 5_000.0)])] == [4, 4]


def test_the_fuller_inferline_grows_where_it_saves() -> None:
    idle = Fa2Stage("idle", 1.0, (50.0, 60.0, 70.0, 80.0))
    busy = Fa2Stage("busy", 49.0, (50.0, 60.0, 70.0, 80.0))
    chosen = inferline_full([idle, busy], [IndexedPath((0, 1), 400.0)])
    assert [own.batch for own in chosen] == [1, 4]
    for rate_rps in range(6, 61, 9):
        given = problem(CPU, 6, rate_rps)
        full = inferline_full(given.stages, given.paths)
        assert keeps_deadlines(full, given.paths)
        assert replicas_of(full) <= replicas_of(ds2(given.stages))


def test_grandslam_splits_once_and_takes_anybodys_replicas() -> None:
    first = Fa2Stage("first", 10.0, (100.0, 150.0, 210.0))
    second = Fa2Stage("second", 10.0, (50.0, 80.0, 101.0))
    chosen = grandslam([first, second], [IndexedPath((0, 1), 300.0), IndexedPath((1,), 90.0)], [4, 2])
    assert [(own.batch, own.replicas) for own in chosen] == [(2, 4), (2, 2)]
    assert chosen[0].wait_ms == pytest.approx(100.0)


def test_grandslam_without_requests_or_time_takes_one() -> None:
    quiet = Fa2Stage("quiet", 0.0, (100.0, 150.0))
    slow = Fa2Stage("slow", 5.0, (100.0, 150.0))
    assert [own.batch for own in grandslam([quiet, slow], [IndexedPath((0, 1), 20.0)], [1, 1])] == [1, 1]


YOLO_1_CORE_MS = (136.0, 302.0, 468.0, 633.0, 799.0, 965.0)
"""l(b, 1) of the artefact's YOLOv5s fit."""


def replicas(remaining_ms: float) -> int | None:
    answer = fa2_single(
        YOLO_1_CORE_MS, 20.0, network_ms_max=1000.0 - remaining_ms, limit_ms=900.0, slo_ms=1000.0, replicas_max=16
    )
    return answer.replicas if answer else None


@pytest.mark.parametrize(
    ("least_ms", "most_ms", "expected"), [(917, 1000, 4), (781, 916, 5), (645, 780, 7), (509, 644, 10), (0, 508, None)]
)
def test_thresholds(least_ms: int, most_ms: int, expected: int | None) -> None:
    assert {replicas(remaining_ms) for remaining_ms in range(least_ms, most_ms + 1)} == {expected}


def test_says_how_it_gets_there() -> None:
    answer = fa2_single(YOLO_1_CORE_MS, 20.0, network_ms_max=50.0, limit_ms=900.0, slo_ms=1000.0, replicas_max=16)
    assert answer == Fa2SingleChoice(replicas=4, batch=1, latency_ms=136.0, rounds=5)


def test_larger_batches_where_they_save_replicas() -> None:
    answer = fa2_single((100.0, 110.0), 20.0, network_ms_max=0.0, limit_ms=900.0, slo_ms=1000.0, replicas_max=16)
    assert answer == Fa2SingleChoice(replicas=2, batch=2, latency_ms=110.0, rounds=5)
