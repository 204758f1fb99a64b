"""One option per stage within budgets: dynamic and integer program against all combinations, and local search."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers import highs
from sloop.solvers.budget import (
    GAVE_UP,
    INFEASIBLE,
    BudgetRule,
    IndexedPath,
    KnapsackSolution,
    Segment,
    StageOptions,
    cheapest_by_milp,
    cheapest_tree,
    improved_choice,
    is_exact,
    segment_matrix,
    slot_ms_of,
    within_budgets,
)
from sloop.solvers.highs import MilpSolution

SMALL = settings(max_examples=60)


def make(*pairs: tuple[int, int]) -> StageOptions:
    """Options from (cost, slots)."""
    return StageOptions(np.array([cost for cost, _ in pairs]), np.array([slots for _, slots in pairs]))


def cost(options: Sequence[StageOptions], choice: Sequence[int]) -> int:
    return sum(int(option.costs[index]) for option, index in zip(options, choice, strict=True))


def holds(options: Sequence[StageOptions], segments: Sequence[Segment], choice: Sequence[int]) -> bool:
    return all(
        sum(int(options[stage].slots[choice[stage]]) for stage in segment.stages) <= segment.slots
        for segment in segments
    )


def cheapest(options: Sequence[StageOptions], segments: Sequence[Segment]) -> int | None:
    """By trying every choice."""
    every = product(*(range(len(option.costs)) for option in options))
    return min((cost(options, choice) for choice in every if holds(options, segments, choice)), default=None)


options_of_a_stage = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4).map(
    lambda pairs: make(*pairs)
)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[StageOptions], list[Segment]]:
    """A tree of up to six stages with a budget for each leaf."""
    parents = [draw(st.integers(0, stage - 1)) for stage in range(1, draw(st.integers(1, 6)))]
    options = draw(st.lists(options_of_a_stage, min_size=len(parents) + 1, max_size=len(parents) + 1))
    segments = []
    for leaf in set(range(len(options))) - set(parents):
        chain = [leaf]
        while chain[-1]:
            chain.append(parents[chain[-1] - 1])
        segments.append(Segment(tuple(reversed(chain)), draw(st.integers(0, 40))))
    return options, segments


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[StageOptions], list[Segment]]:
    """A tree whose segments may start and end anywhere on a path from the root."""
    options, whole = draw(trees())
    parts = []
    for segment in whole:
        first = draw(st.integers(0, len(segment.stages) - 1))
        last = draw(st.integers(first, len(segment.stages) - 1))
        parts.append(Segment(segment.stages[first : last + 1], draw(st.integers(0, 40))))
    return options, whole + parts


@SMALL
@given(st.lists(options_of_a_stage, min_size=1, max_size=4), st.integers(-1, 40))
def test_a_chain_is_as_cheap_as_can_be(options: list[StageOptions], slots: int) -> None:
    segment = Segment(tuple(range(len(options))), slots)
    choice = cheapest_tree(options, [segment])
    assert (None if choice is None else cost(options, choice)) == cheapest(options, [segment])
    assert choice is None or holds(options, [segment], choice)


@SMALL
@given(trees())
def test_a_tree_is_as_cheap_as_can_be(tree: tuple[list[StageOptions], list[Segment]]) -> None:
    choice = cheapest_tree(*tree)
    assert (None if choice is None else cost(tree[0], choice)) == cheapest(*tree)
    assert choice is None or holds(*tree, choice)


@SMALL
@given(trees())
def test_the_tightest_budget_for_all_is_sound(tree: tuple[list[StageOptions], list[Segment]]) -> None:
    literal, exact = cheapest_tree(*tree, "paper"), cheapest(*tree)
    if literal is not None:
        assert holds(*tree, literal)
        assert exact is not None
        assert cost(tree[0], literal) >= exact


@SMALL
@given(forests(), st.sampled_from(["tree", "paper"]))
def test_segments_anywhere_are_kept(forest: tuple[list[StageOptions], list[Segment]], budgets: BudgetRule) -> None:
    choice = cheapest_tree(*forest, budgets)
    if choice is not None:
        assert holds(*forest, choice)
        best = cheapest(*forest)
        assert best is not None
        assert cost(forest[0], choice) >= best
    if budgets == "tree" and is_exact(forest[1]):
        assert (None if choice is None else cost(forest[0], choice)) == cheapest(*forest)


def test_a_segment_from_half_way_down_caps_its_own_branch_alone() -> None:
    options = [make((1, 1)), make((1, 1)), make((9, 2), (1, 60)), make((9, 2), (1, 60))]
    segments = [Segment((0, 1, 2), 70), Segment((1, 3), 5)]
    assert not is_exact(segments)
    assert cheapest_tree(options, segments) == [0, 0, 1, 0]


def test_a_segment_from_half_way_down_is_counted_with_the_loosest_segment() -> None:
    """Counted from where it starts, the tight branch of the tree alone would have less than nothing left."""
    options = [make((1, 1)) for _ in range(4)]
    segments = [Segment((0, 1, 2), 100), Segment((0, 1, 3), 20), Segment((1, 3), 10)]
    assert cheapest_tree(options, segments) == [0] * 4
    assert cheapest_tree(options, [*segments[:2], Segment((1, 3), 1)]) is None


def test_where_two_lead_to_one_or_a_chain_starts_below_the_program_is_not_exact() -> None:
    assert is_exact([Segment((0, 1), 9), Segment((0, 2), 9), Segment((1,), 3)])
    assert not is_exact([Segment((0, 2), 9), Segment((1, 2), 9)])
    assert not is_exact([Segment((0, 1, 2), 9), Segment((1, 2), 9)])


def test_ties_go_to_the_lowest_index_from_the_first_stage_down() -> None:
    twice = make((3, 5), (2, 9), (2, 5), (2, 5))
    assert cheapest_tree([twice, twice], [Segment((0, 1), 14)]) == [1, 2]
    assert cheapest_tree([twice, twice], [Segment((0, 1), 10)]) == [2, 2]


def test_the_tightest_budget_squeezes_its_siblings_and_a_budget_of_ones_own_does_not() -> None:
    options = [make((1, 1)), make((5, 2), (1, 8)), make((5, 2), (1, 8))]
    segments = [Segment((0, 1), 4), Segment((0, 2), 10)]
    assert cheapest_tree(options, segments) == [0, 0, 1]
    assert cheapest_tree(options, segments, "paper") == [0, 0, 0]


def test_a_stage_that_is_a_segment_by_itself_does_not_cap_those_below() -> None:
    options = [make((1, 2)), make((1, 3)), make((5, 2), (1, 8))]
    segments = [Segment((0, 1, 2), 20), Segment((1,), 4)]
    assert cheapest_tree(options, segments) == [0, 0, 1]
    assert cheapest_tree(options, [segments[0], Segment((1,), 2)]) is None


def test_trees_beside_each_other() -> None:
    options = [make((1, 9), (2, 3)), make((1, 9), (2, 3))]
    assert cheapest_tree(options, [Segment((0,), 9), Segment((1,), 8)]) == [0, 1]
    assert cheapest_tree(options, [Segment((0,), 9), Segment((1,), 2)]) is None


def test_large_costs_do_not_run_over() -> None:
    options = [make((1 << 50, 1))] + [make((1 << 50, 1), (0, 99)) for _ in range(9)]
    segments = [Segment((0, stage), 2) for stage in range(1, 10)]
    assert cheapest_tree(options, segments) == [0] * 10
    assert cheapest_tree(options, [*segments[:-1], Segment((0, 9), 1)]) is None


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[StageOptions], list[Segment]]:
    """Up to five stages and chains over any of them."""
    pairs = st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 12)), min_size=1, max_size=4)
    options = [make(*own) for own in draw(st.lists(pairs, min_size=1, max_size=5))]
    chain = st.sets(st.integers(0, len(options) - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    return options, draw(st.lists(st.builds(Segment, chain, st.integers(0, 40)), max_size=5))


@settings(max_examples=40)
@given(meshes())
def test_as_cheap_as_can_be(mesh: tuple[list[StageOptions], list[Segment]]) -> None:
    options, segments = mesh
    chains = segment_matrix(segments, len(options))
    every = product(*(range(len(option.costs)) for option in options))
    best = min((cost(options, indices) for indices in every if within_budgets(options, chains, indices)), default=None)
    found = cheapest_by_milp(options, segments)
    assert found.proven
    if best is None:
        assert found == INFEASIBLE
    else:
        assert found.indices is not None
        assert within_budgets(options, chains, found.indices)
        assert cost(options, found.indices) == best


def answering(monkeypatch: pytest.MonkeyPatch, values: Sequence[float] | None, *, proven: bool) -> None:
    """The solver's answer from now on, whatever it is asked."""
    solution = MilpSolution(None if values is None else np.array(values), proven, 0.0)
    monkeypatch.setattr(highs, "minimise", lambda *_, **__: solution)


@settings(max_examples=40)
@given(meshes())
def test_improved_until_no_single_change_saves_anything(mesh: tuple[list[StageOptions], list[Segment]]) -> None:
    options, segments = mesh
    chains = segment_matrix(segments, len(options))
    quickest = [int(option.slots.argmin()) for option in options]
    if not within_budgets(options, chains, quickest):
        return
    better = improved_choice(options, chains, quickest)
    assert within_budgets(options, chains, better)
    for stage, option in enumerate(options):
        for index in range(len(option.costs)):
            changed = [*better[:stage], index, *better[stage + 1 :]]
            assert not within_budgets(options, chains, changed) or cost(options, changed) >= cost(options, better)


def test_the_largest_saving_comes_first() -> None:
    options = [make((5, 1), (3, 4)), make((9, 1), (1, 4))]
    assert improved_choice(options, segment_matrix([Segment((0, 1), 5)], 2), [0, 0]) == [0, 1]
    assert improved_choice(options, segment_matrix([Segment((0, 1), 8)], 2), [0, 0]) == [1, 1]


def test_giving_up_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    options, segments = [make((2, 1), (1, 3))], [Segment((0,), 5)]
    answering(monkeypatch, None, proven=False)
    assert cheapest_by_milp(options, segments) == GAVE_UP
    answering(monkeypatch, [1.0, 0.0], proven=False)
    assert cheapest_by_milp(options, segments) == KnapsackSolution((0,), proven=False)


def test_an_answer_that_does_not_hold_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [make((2, 1), (1, 3)), make((2, 1), (1, 3))]
    answering(monkeypatch, [0.0, 1.0, 0.0, 1.0], proven=True)
    assert cheapest_by_milp(options, [Segment((0, 1), 5)]) == GAVE_UP


def test_it_is_limited_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def solver(*_: object, nodes_max: int, **__: object) -> MilpSolution:
        asked.append(nodes_max)
        return MilpSolution(None, proven=False, bound=0.0)

    monkeypatch.setattr(highs, "minimise", solver)
    cheapest_by_milp([make((1, 1))], [Segment((0,), 1)], nodes_max=7)
    assert asked == [7]


def test_a_stage_that_fits_nowhere_needs_no_solver() -> None:
    assert cheapest_by_milp([make((1, 9))], [Segment((0,), 8)]) == INFEASIBLE


def test_slots_follow_the_deadlines() -> None:
    assert slot_ms_of([IndexedPath((0,), 3000.0), IndexedPath((0,), 25_710.0)]) == 1.0
    assert slot_ms_of([IndexedPath((0,), 20.0)]) == 0.02
    assert slot_ms_of([IndexedPath((0,), 3_276_800.0)]) == 100.0
