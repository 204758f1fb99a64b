"""Visits: what is declared at first, what was measured after a while, and what was long ago forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import Each, Graph, Step, When
from sloop.core.flows import HALF_LIFE_NS, PRIOR, Flows
from sloop.vocabulary import Path

KINDS = Graph(
    (
        Step("a"),
        Step("b", ("a",), (When("a", "kind", (1,), 0.5),)),
        Step("c", ("a",), (When("a", "kind", (2,)),)),
        Step("d", ("b", "c")),
    )
)
PARTS = Graph((Step("a"), Step("b", ("a",), each=Each("a", mean=2.0)), Step("c", ("b",), join=True)))


def test_before_anything_was_seen_what_was_declared_counts() -> None:
    assert Flows(KINDS).visits() == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})
    assert Flows(PARTS).visits() == {"a": 1, "b": 2, "c": 1}


def test_what_was_declared_counts_as_much_as_a_few_requests() -> None:
    flows = Flows(KINDS)
    for _ in range(round(PRIOR)):
        flows.passed("a", (1, 0))
    assert flows.visits() == pytest.approx({"a": 1, "b": 0.75, "c": 0.25, "d": 1})
    for _ in range(100 * round(PRIOR)):
        flows.passed("a", (1, 0))
    assert flows.visits()["b"] == pytest.approx(1, abs=0.01)


def test_parts_are_counted() -> None:
    flows = Flows(PARTS)
    for count in (0, 4, 8) * 500:
        flows.passed("a", (count,))
    assert flows.visits() == pytest.approx({"a": 1, "b": 4, "c": 1}, rel=0.02)


def test_what_is_dropped_on_its_way_does_not_make_later_stages_less_wanted() -> None:
    flows = Flows(KINDS)
    for _ in range(1_000):
        flows.begin(())
    for _ in range(10):
        flows.passed("a", (0, 1))
    assert flows.visits()["d"] == pytest.approx(1)


def test_an_empty_answer_takes_every_edge_once() -> None:
    flows = Flows(PARTS)
    for _ in range(10_000):
        flows.passed("a", ())
    assert flows.visits()["b"] == pytest.approx(1, abs=0.01)


def test_what_was_seen_fades_by_half_a_minute_after_minute() -> None:
    flows, once = Flows(KINDS), Flows(KINDS)
    for _ in range(400):
        flows.passed("a", (1, 0))
    for _ in range(100):
        once.passed("a", (1, 0))
    flows.age(HALF_LIFE_NS // 2)
    flows.age(2 * HALF_LIFE_NS)
    assert flows.visits() == pytest.approx(once.visits())
    flows.age(60 * HALF_LIFE_NS)
    assert flows.visits() == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})


def test_where_requests_begin_is_measured() -> None:
    steps = (Step("a"), Step("b"), Step("c", ("a", "b")))
    ways = (Path(("a", "c"), 1, 0.5), Path(("b", "c"), 1, 0.5))
    flows = Flows(Graph(steps, ways, 1))
    assert flows.visits() == pytest.approx({"a": 0.5, "b": 0.5, "c": 1})
    for _ in range(5_000):
        flows.begin(("a",))
        flows.passed("a", ())
    assert flows.visits() == pytest.approx({"a": 1, "b": 0, "c": 1}, abs=0.01)
    for _ in range(100_000):
        flows.begin(())
    assert flows.visits()["b"] == pytest.approx(0.95, abs=0.01), "none named: all entered"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=50))
def test_a_share_lies_between_what_was_declared_and_what_was_seen(seen: list[tuple[int, int]]) -> None:
    flows = Flows(KINDS)
    for ways in seen:
        flows.passed("a", ways)
    visits = flows.visits()
    for at, name in enumerate("bc"):
        measured = sum(ways[at] for ways in seen) / len(seen) if seen else 0.5
        assert min(0.5, measured) - 1e-9 <= visits[name] <= max(0.5, measured) + 1e-9
