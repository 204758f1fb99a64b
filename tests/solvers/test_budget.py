"""The dynamic program over slots: the cheapest there is, against trying everything."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers.budget import Budgets, Options, Segment, cheapest_chain, cheapest_tree, is_exact

SMALL = settings(max_examples=150, deadline=None)


def make(*pairs: tuple[int, int]) -> Options:
    """Options from (key, slots)."""
    return Options(np.array([key for key, _ in pairs]), np.array([slots for _, slots in pairs]))


def cost(options: Sequence[Options], choice: Sequence[int]) -> int:
    return sum(int(option.keys[index]) for option, index in zip(options, choice, strict=True))


def holds(options: Sequence[Options], segments: Sequence[Segment], choice: Sequence[int]) -> bool:
    return all(
        sum(int(options[stage].slots[choice[stage]]) for stage in segment.stages) <= segment.slots
        for segment in segments
    )


def cheapest(options: Sequence[Options], segments: Sequence[Segment]) -> int | None:
    """By trying every choice."""
    every = product(*(range(len(option.keys)) for option in options))
    return min((cost(options, choice) for choice in every if holds(options, segments, choice)), default=None)


options_of_a_stage = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4).map(
    lambda pairs: make(*pairs)
)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Options], list[Segment]]:
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
def forests(draw: st.DrawFn) -> tuple[list[Options], list[Segment]]:
    """A tree whose segments may start and end anywhere on a way down."""
    options, whole = draw(trees())
    parts = []
    for segment in whole:
        first = draw(st.integers(0, len(segment.stages) - 1))
        last = draw(st.integers(first, len(segment.stages) - 1))
        parts.append(Segment(segment.stages[first : last + 1], draw(st.integers(0, 40))))
    return options, whole + parts


@SMALL
@given(st.lists(options_of_a_stage, min_size=1, max_size=4), st.integers(-1, 40))
def test_a_chain_is_as_cheap_as_can_be(options: list[Options], slots: int) -> None:
    segment = Segment(tuple(range(len(options))), slots)
    choice = cheapest_chain(options, slots)
    assert (None if choice is None else cost(options, choice)) == cheapest(options, [segment])
    assert choice is None or holds(options, [segment], choice)


@SMALL
@given(trees())
def test_a_tree_is_as_cheap_as_can_be(tree: tuple[list[Options], list[Segment]]) -> None:
    choice = cheapest_tree(*tree)
    assert (None if choice is None else cost(tree[0], choice)) == cheapest(*tree)
    assert choice is None or holds(*tree, choice)


@SMALL
@given(trees())
def test_the_tightest_budget_for_all_is_sound(tree: tuple[list[Options], list[Segment]]) -> None:
    literal, exact = cheapest_tree(*tree, "paper"), cheapest(*tree)
    if literal is not None:
        assert holds(*tree, literal)
        assert exact is not None
        assert cost(tree[0], literal) >= exact


@SMALL
@given(forests(), st.sampled_from(["tree", "paper"]))
def test_segments_anywhere_are_kept(forest: tuple[list[Options], list[Segment]], budgets: Budgets) -> None:
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


def test_a_segment_from_half_way_down_is_told_on_the_clock_of_the_loosest() -> None:
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
    assert cheapest_chain([twice, twice], 14) == [1, 2]
    assert cheapest_chain([twice, twice], 10) == [2, 2]


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
