"""Visits: what is declared at first, what was measured after a while, and what was long ago forgotten."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import Each, Graph, GraphStage, When
from sloop.core.graph_estimates import HALF_LIFE_NS, PRIOR, RUN, EdgeHistory, VisitRates, remaining_times
from sloop.vocabulary import Path

KINDS = Graph(
    (
        GraphStage("a"),
        GraphStage("b", ("a",), (When("a", "kind", (1,), 0.5),)),
        GraphStage("c", ("a",), (When("a", "kind", (2,)),)),
        GraphStage("d", ("b", "c")),
    )
)
PARTS = Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", mean=2.0)), GraphStage("c", ("b",), join=True)))


def test_before_anything_was_seen_what_was_declared_counts() -> None:
    assert VisitRates(KINDS).visits() == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})
    assert VisitRates(PARTS).visits() == {"a": 1, "b": 2, "c": 1}


def test_what_was_declared_counts_as_much_as_a_few_requests() -> None:
    flows = VisitRates(KINDS)
    for _ in range(round(PRIOR)):
        flows.finish("a", (1, 0))
    assert flows.visits() == pytest.approx({"a": 1, "b": 0.75, "c": 0.25, "d": 1})
    for _ in range(100 * round(PRIOR)):
        flows.finish("a", (1, 0))
    assert flows.visits()["b"] == pytest.approx(1, abs=0.01)


def test_parts_are_counted() -> None:
    flows = VisitRates(PARTS)
    for count in (0, 4, 8) * 500:
        flows.finish("a", (count,))
    assert flows.visits() == pytest.approx({"a": 1, "b": 4, "c": 1}, rel=0.02)


def test_what_is_dropped_on_its_way_does_not_make_later_stages_less_wanted() -> None:
    flows = VisitRates(KINDS)
    for _ in range(1_000):
        flows.begin(())
    for _ in range(10):
        flows.finish("a", (0, 1))
    assert flows.visits()["d"] == pytest.approx(1)


def test_an_empty_answer_takes_every_edge_once() -> None:
    flows = VisitRates(PARTS)
    for _ in range(10_000):
        flows.finish("a", ())
    assert flows.visits()["b"] == pytest.approx(1, abs=0.01)


def test_what_was_seen_fades_by_half_a_minute_after_minute() -> None:
    flows, once = VisitRates(KINDS), VisitRates(KINDS)
    for _ in range(400):
        flows.finish("a", (1, 0))
    for _ in range(100):
        once.finish("a", (1, 0))
    flows.age(HALF_LIFE_NS // 2)
    flows.age(2 * HALF_LIFE_NS)
    assert flows.visits() == pytest.approx(once.visits())
    flows.age(60 * HALF_LIFE_NS)
    assert flows.visits() == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})


def test_where_requests_begin_is_measured() -> None:
    steps = (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b")))
    ways = (Path(("a", "c"), 1, 0.5), Path(("b", "c"), 1, 0.5))
    flows = VisitRates(Graph(steps, ways, 1))
    assert flows.visits() == pytest.approx({"a": 0.5, "b": 0.5, "c": 1})
    for _ in range(5_000):
        flows.begin(("a",))
        flows.finish("a", ())
    assert flows.visits() == pytest.approx({"a": 1, "b": 0, "c": 1}, abs=0.01)
    for _ in range(100_000):
        flows.begin(())
    assert flows.visits()["b"] == pytest.approx(0.95, abs=0.01), "none named: all entered"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=50))
def test_a_share_lies_between_what_was_declared_and_what_was_seen(seen: list[tuple[int, int]]) -> None:
    flows = VisitRates(KINDS)
    for ways in seen:
        flows.finish("a", ways)
    visits = flows.visits()
    for at, name in enumerate("bc"):
        measured = sum(ways[at] for ways in seen) / len(seen) if seen else 0.5
        assert min(0.5, measured) - 1e-9 <= visits[name] <= max(0.5, measured) + 1e-9


# == test_ahead: What is ahead of a request: a lower bound on every way it can go, and all of it where there is but one.


def rests(graph: Graph, runs: EdgeHistory | None = None, /, **alone_ns: int) -> dict[str, int]:
    """Alone; full batches take ten times as long everywhere."""
    found = remaining_times(graph, {name: (alone_ns[name], 10 * alone_ns[name]) for name in graph.stages}, runs)
    assert all(full == 10 * alone for alone, full in found.values())
    return {name: alone for name, (alone, _) in found.items()}


def branch(name: str, value: int, share: float | None = None) -> GraphStage:
    return GraphStage(name, ("a",), (When("a", "kind", (value,), share),))


def test_of_stages_that_are_all_visited_the_longest_way_counts() -> None:
    diamond = Graph((GraphStage("a"), GraphStage("b", ("a",)), GraphStage("c", ("a",)), GraphStage("d", ("b", "c"))))
    assert rests(diamond, a=1, b=2, c=30, d=400) == {"a": 430, "b": 400, "c": 400, "d": 0}


def test_of_alternatives_the_quickest_counts() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1, 0.3), branch("c", 2, 0.7), GraphStage("d", ("c",))))
    assert rests(graph, a=1, b=70, c=20, d=40) == {"a": 60, "b": 0, "c": 40, "d": 0}


def test_branches_of_which_nothing_is_told_may_all_be_left_out() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1), branch("c", 2)))
    assert rests(graph, a=1, b=70, c=20)["a"] == 0
    covering = Graph((GraphStage("a"), branch("b", 0), GraphStage("c", ("a",), (When("a", "kind"),))))
    assert rests(covering, a=1, b=70, c=20)["a"] == 20, "0, or not"


def test_what_may_be_left_out_counts_for_nothing() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1, 0.5), branch("c", 2, 0.3), GraphStage("d", ("a",))))
    assert rests(graph, a=1, b=70, c=20, d=4)["a"] == 4
    lone = Graph((GraphStage("a"), branch("b", 1, 0.9)))
    assert rests(lone, a=1, b=70)["a"] == 0


PARTED = Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", mean=1.5)), GraphStage("c", ("b",), join=True)))


def test_parts_count_once_all_of_late_had_some() -> None:
    runs = EdgeHistory(PARTED)

    def first() -> int:
        return rests(PARTED, runs, a=1, b=20, c=300)["a"]

    assert rests(PARTED, a=1, b=20, c=300)["a"] == 0, "a mean says nothing of the least"
    for _ in range(RUN - 1):
        runs.finish("a", (5,))
    assert first() == 0
    runs.finish("a", (1,))
    assert first() == 320
    runs.finish("a", (0,))
    assert first() == 0
    for _ in range(RUN):
        runs.finish("a", ())
        runs.finish("b", ())
    assert first() == 320


def test_several_parts_are_believed_in_until_there_are_none() -> None:
    several = Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", mean=4.0))))
    assert rests(several, a=1, b=20)["a"] == 20
    runs = EdgeHistory(several)
    runs.finish("a", (2,))
    assert rests(several, runs, a=1, b=20)["a"] == 20
    runs.finish("a", (0,))
    runs.finish("a", (4,))
    assert rests(several, runs, a=1, b=20)["a"] == 0
    some = Graph((GraphStage("a"), GraphStage("b", ("a",), (When("a", "kind"),), each=Each("a", mean=4.0))))
    assert rests(some, a=1, b=20)["a"] == 0, "of which all may be left out"


def test_a_branch_counts_once_all_of_late_took_it_and_the_quickest_if_all_took_one() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1), branch("c", 2), GraphStage("d", ("a",))))

    def first(*ways: tuple[int, ...]) -> int:
        runs = EdgeHistory(graph)
        for _ in range(RUN):
            for way in ways:
                runs.finish("a", way)
        return rests(graph, runs, a=1, b=70, c=20, d=4)["a"]

    assert first((1, 0, 1)) == 70
    assert first((1, 0, 1), (0, 1, 1)) == 20
    assert first((1, 0, 1), (0, 0, 1)) == 4


def test_of_declared_paths_the_quickest_through_a_stage_counts() -> None:
    steps = (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b")), GraphStage("d", ("c",)))
    ways = (Path(("a", "c", "d"), 1), Path(("b", "c"), 1), Path(("b", "c", "d"), 1))
    assert rests(Graph(steps, ways), a=1, b=20, c=300, d=4000) == {"a": 4300, "b": 300, "c": 0, "d": 0}


@given(st.integers(0, 2**32))
def test_no_request_needs_less_than_is_ahead_of_it(seed: int) -> None:
    random = Random(seed)
    names = [f"s{number}" for number in range(random.randint(1, 7))]
    steps: list[GraphStage] = []
    for at, name in enumerate(names):
        after = tuple(random.sample(names[:at], min(at, random.randint(0, 2))))
        when = tuple(
            When(other, "kind", random.choice(((0,), (1,), (2,), ()))) for other in after if random.random() < 0.6
        )
        steps.append(GraphStage(name, after, when))
    graph = Graph(steps)
    least_ns = {name: random.randint(1, 100) for name in names}
    remaining_ns = {
        name: alone for name, (alone, _) in remaining_times(graph, {n: (t, t) for n, t in least_ns.items()}).items()
    }
    longest_ns: dict[str, int] = {}
    for name in reversed(names):
        kind, whens = random.randint(0, 3), [edge.when for edge in graph.edges[name]]
        holds = [when is None or (kind in when.values if when.values else kind != 0) for when in whens]
        taken = [edge.target for edge, taken in zip(graph.edges[name], holds, strict=True) if taken]
        longest_ns[name] = max((least_ns[target] + longest_ns[target] for target in taken), default=0)
        assert remaining_ns[name] <= longest_ns[name]
        if not any(whens) and all(remaining_ns[target] == longest_ns[target] for target in taken):
            assert remaining_ns[name] == longest_ns[name]
