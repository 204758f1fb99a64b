"""Visit rates move from declared to measured shares; remaining times are lower bounds."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import Each, Graph, GraphStage, When
from sloop.core.graph_estimates import (
    CERTAIN_AFTER,
    HALF_LIFE_NS,
    PRIOR,
    EdgeHistory,
    StageBacklog,
    VisitRates,
    expected_times,
    remaining_times,
)
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


def test_visit_rates_begin_with_what_is_declared() -> None:
    assert VisitRates(KINDS).visits() == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})
    assert VisitRates(PARTS).visits() == {"a": 1, "b": 2, "c": 1}


def test_a_declared_share_weighs_as_much_as_a_few_requests() -> None:
    rates = VisitRates(KINDS)
    for _ in range(round(PRIOR)):
        rates.finish("a", (1, 0))
    assert rates.visits() == pytest.approx({"a": 1, "b": 0.75, "c": 0.25, "d": 1})
    for _ in range(100 * round(PRIOR)):
        rates.finish("a", (1, 0))
    assert rates.visits()["b"] == pytest.approx(1, abs=0.01)


def test_visit_rates_count_parts() -> None:
    rates = VisitRates(PARTS)
    for count in (0, 4, 8) * 500:
        rates.finish("a", (count,))
    assert rates.visits() == pytest.approx({"a": 1, "b": 4, "c": 1}, rel=0.02)


def test_requests_dropped_early_do_not_lower_the_rates_of_later_stages() -> None:
    rates = VisitRates(KINDS)
    for _ in range(1_000):
        rates.begin(())
    for _ in range(10):
        rates.finish("a", (0, 1))
    assert rates.visits()["d"] == pytest.approx(1)


def test_empty_edge_counts_mean_one_item_along_each_edge() -> None:
    rates = VisitRates(PARTS)
    for _ in range(10_000):
        rates.finish("a", ())
    assert rates.visits()["b"] == pytest.approx(1, abs=0.01)


def test_counts_halve_every_minute() -> None:
    rates, once = VisitRates(KINDS), VisitRates(KINDS)
    for _ in range(400):
        rates.finish("a", (1, 0))
    for _ in range(100):
        once.finish("a", (1, 0))
    rates.age(HALF_LIFE_NS // 2)
    rates.age(2 * HALF_LIFE_NS)
    assert rates.visits() == pytest.approx(once.visits())
    rates.age(60 * HALF_LIFE_NS)
    assert rates.visits() == pytest.approx({"a": 1, "b": 0.5, "c": 0.5, "d": 1})


def test_entries_are_measured() -> None:
    steps = (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b")))
    paths = (Path(("a", "c"), 1, 0.5), Path(("b", "c"), 1, 0.5))
    rates = VisitRates(Graph(steps, paths, 1))
    assert rates.visits() == pytest.approx({"a": 0.5, "b": 0.5, "c": 1})
    for _ in range(5_000):
        rates.begin(("a",))
        rates.finish("a", ())
    assert rates.visits() == pytest.approx({"a": 1, "b": 0, "c": 1}, abs=0.01)
    for _ in range(100_000):
        rates.begin(())
    assert rates.visits()["b"] == pytest.approx(0.95, abs=0.01), "none named: all entered"


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=50))
def test_an_estimated_share_lies_between_the_declared_and_the_measured_one(seen: list[tuple[int, int]]) -> None:
    rates = VisitRates(KINDS)
    for paths in seen:
        rates.finish("a", paths)
    visits = rates.visits()
    for at, name in enumerate("bc"):
        measured = sum(paths[at] for paths in seen) / len(seen) if seen else 0.5
        assert min(0.5, measured) - 1e-9 <= visits[name] <= max(0.5, measured) + 1e-9


def remaining(graph: Graph, history: EdgeHistory | None = None, /, **alone_ns: int) -> dict[str, int]:
    """Remaining times with requests alone; full batches take ten times as long everywhere."""
    found = remaining_times(graph, {name: (alone_ns[name], 10 * alone_ns[name]) for name in graph.stages}, history)
    assert all(full == 10 * alone for alone, full in found.values())
    return {name: alone for name, (alone, _) in found.items()}


def branch(name: str, value: int, share: float | None = None) -> GraphStage:
    return GraphStage(name, ("a",), (When("a", "kind", (value,), share),))


def test_of_unconditional_edges_the_longest_path_counts() -> None:
    diamond = Graph((GraphStage("a"), GraphStage("b", ("a",)), GraphStage("c", ("a",)), GraphStage("d", ("b", "c"))))
    assert remaining(diamond, a=1, b=2, c=30, d=400) == {"a": 430, "b": 400, "c": 400, "d": 0}


def test_of_alternatives_the_quickest_counts() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1, 0.3), branch("c", 2, 0.7), GraphStage("d", ("c",))))
    assert remaining(graph, a=1, b=70, c=20, d=40) == {"a": 60, "b": 0, "c": 40, "d": 0}


def test_undeclared_branches_may_all_be_left_out() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1), branch("c", 2)))
    assert remaining(graph, a=1, b=70, c=20)["a"] == 0
    covering = Graph((GraphStage("a"), branch("b", 0), GraphStage("c", ("a",), (When("a", "kind"),))))
    assert remaining(covering, a=1, b=70, c=20)["a"] == 20, "0, or not"


def test_stages_that_may_be_left_out_count_for_nothing() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1, 0.5), branch("c", 2, 0.3), GraphStage("d", ("a",))))
    assert remaining(graph, a=1, b=70, c=20, d=4)["a"] == 4
    lone = Graph((GraphStage("a"), branch("b", 1, 0.9)))
    assert remaining(lone, a=1, b=70)["a"] == 0


PARTED = Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", mean=1.5)), GraphStage("c", ("b",), join=True)))


def test_a_fan_out_counts_after_a_run_of_requests_with_parts() -> None:
    history = EdgeHistory(PARTED)

    def first() -> int:
        return remaining(PARTED, history, a=1, b=20, c=300)["a"]

    assert remaining(PARTED, a=1, b=20, c=300)["a"] == 0, "a mean says nothing of the least"
    for _ in range(CERTAIN_AFTER - 1):
        history.finish("a", (5,))
    assert first() == 0
    history.finish("a", (1,))
    assert first() == 320
    history.finish("a", (0,))
    assert first() == 0
    for _ in range(CERTAIN_AFTER):
        history.finish("a", ())
        history.finish("b", ())
    assert first() == 320


def test_a_fan_out_with_a_large_declared_mean_counts_until_a_request_has_no_part() -> None:
    several = Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", mean=4.0))))
    assert remaining(several, a=1, b=20)["a"] == 20
    history = EdgeHistory(several)
    history.finish("a", (2,))
    assert remaining(several, history, a=1, b=20)["a"] == 20
    history.finish("a", (0,))
    history.finish("a", (4,))
    assert remaining(several, history, a=1, b=20)["a"] == 0
    some = Graph((GraphStage("a"), GraphStage("b", ("a",), (When("a", "kind"),), each=Each("a", mean=4.0))))
    assert remaining(some, a=1, b=20)["a"] == 0, "of which all may be left out"


def test_a_branch_counts_after_a_run_of_requests_that_took_it() -> None:
    graph = Graph((GraphStage("a"), branch("b", 1), branch("c", 2), GraphStage("d", ("a",))))

    def first(*paths: tuple[int, ...]) -> int:
        history = EdgeHistory(graph)
        for _ in range(CERTAIN_AFTER):
            for edge_counts in paths:
                history.finish("a", edge_counts)
        return remaining(graph, history, a=1, b=70, c=20, d=4)["a"]

    assert first((1, 0, 1)) == 70
    assert first((1, 0, 1), (0, 1, 1)) == 20
    assert first((1, 0, 1), (0, 0, 1)) == 4


def test_of_declared_paths_the_quickest_through_a_stage_counts() -> None:
    steps = (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b")), GraphStage("d", ("c",)))
    paths = (Path(("a", "c", "d"), 1), Path(("b", "c"), 1), Path(("b", "c", "d"), 1))
    assert remaining(Graph(steps, paths), a=1, b=20, c=300, d=4000) == {"a": 4300, "b": 300, "c": 0, "d": 0}


def loads_of(graph: Graph, random: Random) -> dict[str, StageBacklog]:
    loads = {}
    for name in graph.stages:
        alone_ns, present_ns, full_ns = sorted(random.randint(1, 90) for _ in range(3))
        counts = random.randint(0, 9), random.randint(0, 9)
        mean_ratio = random.choice((0.4, 1.0, 2.0))
        loads[name] = StageBacklog(*counts, random.randint(0, 50), alone_ns, (present_ns, full_ns), mean_ratio)
    return loads


@given(st.integers(0, 2**32))
def test_expected_times_are_those_of_the_worst_path_behind_all_that_is_on_it(seed: int) -> None:
    """Each path alone: no stage begins with the visit before the stage before is done, and before it has served what
    waits there and what waits or runs on the way to it."""
    random = Random(seed)
    names = [f"s{number}" for number in range(random.randint(1, 6))]
    graph = Graph(
        [
            GraphStage(name, tuple(random.sample(names[:at], min(at, random.randint(0, 2)))))
            for at, name in enumerate(names)
        ]
    )
    loads = loads_of(graph, random)

    def worst_ns(name: str, ends_ns: int, rows: int, kind: int) -> int:
        found = ends_ns
        for edge in graph.edges[name]:
            load, before = loads[edge.target], rows + loads[name].running + loads[edge.target].waiting
            begins_ns = max(ends_ns, load.served_ns(before))
            found = max(found, worst_ns(edge.target, begins_ns + load.longer_ns[kind], before, kind))
        return found

    for name in names:
        own_ns = loads[name].alone_ns
        expected = tuple(worst_ns(name, own_ns, 0, kind) - own_ns for kind in (0, 1))
        assert expected_times(graph, name, loads) == expected


@given(st.integers(0, 2**32))
def test_without_work_on_the_way_expected_times_are_the_remaining_times(seed: int) -> None:
    random = Random(seed)
    for graph in (KINDS, PARTS):
        loads = loads_of(graph, random)
        idle = {name: load._replace(waiting=0, running=0) for name, load in loads.items()}
        times = remaining_times(graph, {name: load.longer_ns for name, load in loads.items()})
        for name in graph.stages:
            assert expected_times(graph, name, idle) == times[name]
            if graph is KINDS and name == "a":
                assert expected_times(graph, name, loads) == times[name], "no edge from it is certain"


def test_many_batches_are_rarely_all_as_long_as_one_may_be() -> None:
    load = StageBacklog(0, 0, row_ns=10, alone_ns=20, taken_ns=(20, 40), mean_ratio=0.5)
    assert [load.served_ns(rows) for rows in (0, 4, 16, 64)] == [0, 40, 120, 400]
    assert [load._replace(mean_ratio=mean_ratio).served_ns(16) for mean_ratio in (1.0, 2.0)] == [160, 320]


@given(st.integers(0, 2**32))
def test_remaining_times_are_lower_bounds(seed: int) -> None:
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
