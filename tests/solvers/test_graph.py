"""Cutting a graph to a forest: what must hold of every cut, and which edge goes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers.budget import CUTS_MAX, Edge, Forest, IndexedPath, Ties, forests

SMALL = settings(max_examples=50)
TIES: tuple[Ties, ...] = ("first", "loosest", "best")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[IndexedPath], list[float]]:
    """Paths through up to eight stages, each a sorted subset, and the stages' weights."""
    count = draw(st.integers(2, 8))
    chain = st.sets(st.integers(0, count - 1), min_size=1, max_size=5).map(lambda chosen: tuple(sorted(chosen)))
    paths = draw(st.lists(st.builds(IndexedPath, chain, st.integers(1, 9_000).map(float)), min_size=1, max_size=6))
    return paths, draw(st.lists(st.integers(1, 400).map(float), min_size=count, max_size=count))


def predecessors(forest: Forest) -> dict[int, set[int]]:
    before: dict[int, set[int]] = {}
    for path in forest.paths:
        for source, target in zip(path.stages, path.stages[1:], strict=False):
            before.setdefault(target, set()).add(source)
    return before


@SMALL
@given(graphs(), st.sampled_from(TIES))
def test_no_stage_comes_directly_after_two_and_none_is_lost(
    graph: tuple[list[IndexedPath], list[float]], ties: Ties
) -> None:
    paths, weights = graph
    found = forests(paths, weights, ties)
    assert 1 <= len(found) <= (CUTS_MAX if ties == "best" else 1)
    for forest in found:
        assert all(len(sources) == 1 for sources in predecessors(forest).values())
        assert {s for path in forest.paths for s in path.stages} == {s for path in paths for s in path.stages}


@SMALL
@given(graphs(), st.sampled_from(TIES), st.data())
def test_what_keeps_the_segments_keeps_the_paths(
    graph: tuple[list[IndexedPath], list[float]], ties: Ties, data: st.DataObject
) -> None:
    paths, weights = graph
    for forest in forests(paths, weights, ties):
        times = {s: data.draw(st.floats(0, 2_000), label=f"stage {s}") for s in {s for w in paths for s in w.stages}}
        ratio = min(path.slo_ms / max(1e-9, sum(times[s] for s in path.stages)) for path in forest.paths)
        kept = {stage: own * ratio for stage, own in times.items()}
        assert all(sum(kept[s] for s in path.stages) <= path.slo_ms * (1 + 1e-9) for path in paths)


def one_after_the_other(
    paths: list[IndexedPath], weights: list[float]
) -> dict[frozenset[Edge], dict[tuple[int, ...], float]]:
    """As published: while a stage comes directly after several, the edge that the fewest paths share is cut, each in
    turn where several are equal."""
    done: dict[frozenset[Edge], dict[tuple[int, ...], float]] = {}

    def follow(parts: list[IndexedPath], cut: frozenset[Edge]) -> None:
        before = {
            t: {s for part in parts for s, u in pairwise(part.stages) if u == t} for path in paths for t in path.stages
        }
        meeting = [stage for stage, sources in before.items() if len(sources) > 1]
        if not meeting:
            done[cut] = {
                part.stages: min(other.slo_ms for other in parts if other.stages == part.stages) for part in parts
            }
            return
        edges = [(source, min(meeting)) for source in before[min(meeting)]]
        shared = {edge: sum(edge in pairwise(part.stages) for part in parts) for edge in edges}
        for edge in edges:
            if shared[edge] == min(shared.values()):
                follow([half for part in parts for half in halves(part, edge)], cut | {edge})

    def halves(part: IndexedPath, edge: Edge) -> list[IndexedPath]:
        if edge not in pairwise(part.stages):
            return [part]
        at = part.stages.index(edge[1])
        share = sum(weights[s] for s in part.stages[:at]) / sum(weights[s] for s in part.stages)
        return [
            IndexedPath(part.stages[:at], share * part.slo_ms),
            IndexedPath(part.stages[at:], (1 - share) * part.slo_ms),
        ]

    follow(paths, frozenset())
    return done


@SMALL
@given(graphs())
def test_all_cuts_are_found_that_cutting_edge_by_edge_leads_to(graph: tuple[list[IndexedPath], list[float]]) -> None:
    paths, weights = graph
    wanted = one_after_the_other(paths, weights)
    found = {
        frozenset(one.cut): {path.stages: path.slo_ms for path in one.paths}
        for one in forests(paths, weights, most=999)
    }
    assert found == {cut: pytest.approx(parts) for cut, parts in wanted.items()}


def test_many_that_meet_at_one_stage_are_no_more_work_than_cuts() -> None:
    paths = [IndexedPath((0, stage, 41), 1000.0 + stage) for stage in range(1, 41)]
    found = forests(paths, [1.0] * 42)
    assert len(found) == CUTS_MAX
    assert (1, 41) not in found[0].cut, "the tightest stays whole"
    assert [len(one.cut) for one in forests(paths, [1.0] * 42, most=2)] == [39, 39]


@SMALL
@given(graphs())
def test_the_parts_of_a_deadline_add_up(graph: tuple[list[IndexedPath], list[float]]) -> None:
    """A single path cut once gives two segments, whose deadlines are as its weights."""
    paths, weights = graph
    for forest in forests(paths[:1], weights):
        assert sum(path.slo_ms for path in forest.paths) == pytest.approx(paths[0].slo_ms)
    long, short = IndexedPath((0, 2), 900.0), IndexedPath((1, 2), 300.0)
    (forest,) = forests([long, short], [100.0, 1.0, 200.0], "loosest")
    assert forest.cut == ((0, 2),)
    shares = {path.stages: path.slo_ms for path in forest.paths}
    assert shares[0,] == pytest.approx(300)
    assert shares[2,] == pytest.approx(600)
    assert shares[1, 2] == 300


def test_the_least_shared_edge_is_cut_whatever_the_ties() -> None:
    paths = [IndexedPath((0, 2, 3), 900.0), IndexedPath((0, 2, 4), 900.0), IndexedPath((1, 2, 3), 100.0)]
    for ties in TIES:
        assert [forest.cut for forest in forests(paths, [1.0] * 5, ties)] == [((1, 2),)]


def test_ties() -> None:
    paths = [IndexedPath((0, 3), 100.0), IndexedPath((1, 3), 300.0), IndexedPath((2, 3), 200.0)]
    weights = [1.0] * 4
    assert [forest.cut for forest in forests(paths, weights, "first")] == [((0, 3), (1, 3))]
    assert [forest.cut for forest in forests(paths, weights, "loosest")] == [((1, 3), (2, 3))]
    cuts = [set(forest.cut) for forest in forests(paths, weights)]
    assert cuts[0] == {(1, 3), (2, 3)}, "the loosest comes first"
    assert len(cuts) == 3


def test_a_forest_stays_as_it_is() -> None:
    paths = [IndexedPath((0, 1), 100.0), IndexedPath((0, 2), 300.0), IndexedPath((3,), 1.0)]
    assert forests(paths, [1.0] * 4) == [Forest(tuple(paths))]


def test_of_equal_chains_the_tightest_counts() -> None:
    (forest,) = forests([IndexedPath((0, 1), 100.0), IndexedPath((0, 1), 80.0)], [1.0, 1.0])
    assert forest.paths == (IndexedPath((0, 1), 80.0),)


def test_stages_without_weight_share_evenly() -> None:
    (forest,) = forests([IndexedPath((0, 2), 100.0), IndexedPath((1, 2), 80.0)], [0.0, 0.0, 0.0], "loosest")
    assert IndexedPath((0,), 50.0) in forest.paths


def test_a_deadline_in_slots() -> None:
    assert IndexedPath((0,), 389.99999999).slots() == 390
    assert IndexedPath((0,), 389.9).slots() == 389
    assert IndexedPath((0,), 20.0).slots(0.02) == 1000
