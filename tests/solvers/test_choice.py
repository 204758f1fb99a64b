"""The integer program: the cheapest there is, against trying everything; what it says when it gives up."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers import highs
from sloop.solvers.budget import Options, Segment
from sloop.solvers.choice import GAVE_UP, NOTHING, Found, chains_of, cheapest, holds, improved
from sloop.solvers.highs import Solution


def make(*pairs: tuple[int, int]) -> Options:
    """Options from (key, slots)."""
    return Options(np.array([key for key, _ in pairs]), np.array([slots for _, slots in pairs]))


def cost(options: Sequence[Options], indices: Sequence[int]) -> int:
    return sum(int(option.keys[index]) for option, index in zip(options, indices, strict=True))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Options], list[Segment]]:
    """Up to five stages and chains over any of them."""
    pairs = st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 12)), min_size=1, max_size=4)
    options = [make(*own) for own in draw(st.lists(pairs, min_size=1, max_size=5))]
    chain = st.sets(st.integers(0, len(options) - 1), min_size=1).map(lambda chosen: tuple(sorted(chosen)))
    return options, draw(st.lists(st.builds(Segment, chain, st.integers(0, 40)), max_size=5))


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_as_cheap_as_can_be(mesh: tuple[list[Options], list[Segment]]) -> None:
    options, segments = mesh
    chains = chains_of(segments, len(options))
    every = product(*(range(len(option.keys)) for option in options))
    best = min((cost(options, indices) for indices in every if holds(options, chains, indices)), default=None)
    found = cheapest(options, segments)
    assert found.proven
    if best is None:
        assert found == NOTHING
    else:
        assert found.indices is not None
        assert holds(options, chains, found.indices)
        assert cost(options, found.indices) == best


def answering(monkeypatch: pytest.MonkeyPatch, values: Sequence[float] | None, *, proven: bool) -> None:
    """The solver's answer from now on, whatever it is asked."""
    solution = Solution(None if values is None else np.array(values), proven, 0.0)
    monkeypatch.setattr(highs, "minimise", lambda *_, **__: solution)


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_improved_until_no_single_change_saves_anything(mesh: tuple[list[Options], list[Segment]]) -> None:
    options, segments = mesh
    chains = chains_of(segments, len(options))
    quickest = [int(option.slots.argmin()) for option in options]
    if not holds(options, chains, quickest):
        return
    better = improved(options, chains, quickest)
    assert holds(options, chains, better)
    for stage, option in enumerate(options):
        for index in range(len(option.keys)):
            changed = [*better[:stage], index, *better[stage + 1 :]]
            assert not holds(options, chains, changed) or cost(options, changed) >= cost(options, better)


def test_the_largest_saving_comes_first() -> None:
    options = [make((5, 1), (3, 4)), make((9, 1), (1, 4))]
    assert improved(options, chains_of([Segment((0, 1), 5)], 2), [0, 0]) == [0, 1]
    assert improved(options, chains_of([Segment((0, 1), 8)], 2), [0, 0]) == [1, 1]


def test_giving_up_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    options, segments = [make((2, 1), (1, 3))], [Segment((0,), 5)]
    answering(monkeypatch, None, proven=False)
    assert cheapest(options, segments) == GAVE_UP
    answering(monkeypatch, [1.0, 0.0], proven=False)
    assert cheapest(options, segments) == Found((0,), proven=False)


def test_an_answer_that_does_not_hold_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [make((2, 1), (1, 3)), make((2, 1), (1, 3))]
    answering(monkeypatch, [0.0, 1.0, 0.0, 1.0], proven=True)
    assert cheapest(options, [Segment((0, 1), 5)]) == GAVE_UP


def test_it_is_limited_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def solver(*_: object, nodes_max: int, **__: object) -> Solution:
        asked.append(nodes_max)
        return Solution(None, proven=False, bound=0.0)

    monkeypatch.setattr(highs, "minimise", solver)
    cheapest([make((1, 1))], [Segment((0,), 1)], nodes_max=7)
    assert asked == [7]


def test_a_stage_that_fits_nowhere_needs_no_solver() -> None:
    assert cheapest([make((1, 9))], [Segment((0,), 8)]) == NOTHING
