"""A request's progress through a graph, against a model that is worked out anew after every visit."""

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import Each, Edge, Graph, GraphStage, When
from sloop.app.progress import RequestProgress
from sloop.units import ms
from sloop.vocabulary import Path, Request, RequestId

Visited = tuple[str, int]


@st.composite
def graphs(draw: st.DrawFn, most: int = 7) -> Graph:
    """Any valid graph: each stage comes after some of the stages before it."""
    steps: list[GraphStage] = []
    scopes: dict[str, str] = {}
    for number in range(draw(st.integers(1, most))):
        name = f"s{number}"
        after = tuple(sorted(draw(st.sets(st.sampled_from(sorted(scopes)), max_size=3)))) if scopes else ()
        found = {scopes[other] for other in after}
        in_parts, mixed = bool(found - {""}), len(found) > 1
        each = len(after) == 1 and not in_parts and draw(st.booleans())
        join = in_parts and (mixed or draw(st.booleans()))
        scopes[name] = name if each else "" if join or not after else found.pop()
        entry = not scopes[name] and draw(st.booleans())
        steps.append(GraphStage(name, after, (), Each(after[0]) if each else None, join, entry))
    return Graph(steps)


def decide(graph: Graph, stage: str, random: Random) -> tuple[int, ...]:
    """Random edge counts: 0 or 1 for a plain edge, up to 3 parts for a fan-out."""
    return tuple(random.choice((0, 1, 2, 3) if edge.kind == "each" else (0, 1, 1)) for edge in graph.edges[stage])


class Model:
    """The model: which visits happen, worked out from the edge counts of those that have ended."""

    def __init__(self, graph: Graph, enters: Sequence[str], ended: Mapping[Visited, Sequence[int]]) -> None:
        self.graph, self.ended = graph, ended
        self.is_in: dict[Visited, bool] = {}
        """Whether a visit happens, as far as that is decided."""
        self.parts: dict[str, int] = {}
        for name, step in graph.stages.items():
            scope = graph.scopes[name]
            if step.each is not None:
                count = self.sent(step.after[0], 0, name)
                if count is not None:
                    self.parts[name] = count
                    self.is_in |= {(name, part): True for part in range(count)}
                continue
            for part in range(self.parts.get(scope, 0) if scope else 1):
                counts = [self.sent(*source, name) for source in self.before(step, part)]
                if name in graph.entries:
                    counts.append(int(not enters or name in enters))
                if None not in counts:
                    self.is_in[name, part] = any(counts)

    def before(self, step: GraphStage, part: int) -> list[Visited]:
        """The visits whose outputs decide; an unknown one where the number of parts is not known yet."""
        found: list[Visited] = []
        for source in step.after:
            scope = self.graph.scopes[source]
            if scope == self.graph.scopes[step.name]:
                found.append((source, part))
            else:
                found += (
                    [(source, each) for each in range(self.parts[scope])] if scope in self.parts else [(source, -1)]
                )
        return found

    def sent(self, source: str, part: int, target: str) -> int | None:
        """How many items are sent along an edge; None while that is undecided."""
        happens = self.is_in.get((source, part))
        if not happens:
            return None if happens is None else 0
        counts = self.ended.get((source, part))
        return None if counts is None else counts[[edge.target for edge in self.graph.edges[source]].index(target)]

    def entered(self) -> set[Visited]:
        return {visit for visit, happens in self.is_in.items() if happens}


def request_in(graph: Graph, enters: Sequence[str] = ()) -> RequestProgress:
    """A request with the application's own SLO of 80 ms, sent at 10 ms."""
    return RequestProgress(graph, Request(RequestId(1), ms(10), ms(10), ms(90), tuple(enters)))


@given(graphs(), st.integers(0, 2**32), st.booleans())
def test_visits_are_entered_as_soon_as_outputs_decide_and_never_twice(graph: Graph, seed: int, named: bool) -> None:
    random = Random(seed)
    enters = random.sample(graph.entries, random.randint(1, len(graph.entries))) if named else []
    progress, ended = request_in(graph, enters), dict[Visited, Sequence[int]]()
    entered = progress.begin()
    under_way = list(entered)
    while True:
        assert len(entered) == len(set(entered)), "no stage is entered twice for the same part"
        assert set(entered) == Model(graph, enters, ended).entered(), "neither before it is known, nor after"
        assert progress.open_visits == len(under_way)
        if not under_way:
            break
        stage, part = under_way.pop(random.randrange(len(under_way)))
        ended[stage, part] = decide(graph, stage, random)
        new = progress.finish(stage, part, ended[stage, part])
        entered, under_way = entered + new, under_way + new
    settled = Model(graph, enters, ended)
    parts = sum(settled.parts[scope] if scope else 1 for scope in graph.scopes.values())
    assert len(settled.is_in) == parts, "nothing is left open"
    assert progress.visited == {name: count for name in graph.stages if (count := _visits(entered, name))}


def _visits(entered: Sequence[Visited], name: str) -> int:
    return sum(stage == name for stage, _ in entered)


@given(graphs(), st.integers(0, 2**32))
def test_the_order_in_which_visits_end_does_not_matter(graph: Graph, seed: int) -> None:
    def visits(order: Random) -> set[Visited]:
        progress = request_in(graph)
        under_way = progress.begin()
        entered = set(under_way)
        while under_way:
            stage, part = under_way.pop(order.randrange(len(under_way)))
            new = progress.finish(stage, part, decide(graph, stage, Random(f"{seed}/{stage}/{part}")))
            under_way += new
            entered.update(new)
        assert not progress.open_visits
        return entered

    assert visits(Random(1)) == visits(Random(2))


@given(graphs())
def test_without_edge_counts_every_edge_is_taken_once(graph: Graph) -> None:
    progress = request_in(graph)
    under_way = progress.begin()
    entered = list(under_way)
    while under_way:
        new = progress.finish(*under_way.pop(0))
        under_way, entered = under_way + new, entered + new
    assert sorted(entered) == sorted((name, 0) for name in graph.stages)


PARTS = Graph(
    (
        GraphStage("find"),
        GraphStage("read", ("find",), each=Each("find")),
        GraphStage("check", ("read",), when=(When("read"),)),
        GraphStage("tell", ("check",), join=True),
    )
)


def test_a_join_waits_for_all_parts_even_those_left_out() -> None:
    progress = request_in(PARTS)
    assert progress.begin() == [("find", 0)]
    assert progress.finish("find", 0, (3,)) == [("read", 0), ("read", 1), ("read", 2)]
    assert progress.finish("read", 1, (0,)) == []
    assert progress.finish("read", 2, (1,)) == [("check", 2)]
    assert progress.finish("check", 2) == []
    assert progress.open_visits == 1
    assert progress.finish("read", 0, (0,)) == [("tell", 0)]
    assert progress.finish("tell", 0) == []
    assert (progress.open_visits, progress.visited) == (0, {"find": 1, "read": 3, "check": 1, "tell": 1})


@pytest.mark.parametrize("outputs", [(0,), (2, 0, 0)])
def test_a_request_ends_when_no_visit_is_open(outputs: tuple[int, ...]) -> None:
    count, *takes = outputs
    progress = request_in(PARTS)
    progress.begin()
    parts = progress.finish("find", 0, (count,))
    for (stage, part), take in zip(parts, takes, strict=True):
        assert progress.open_visits
        assert progress.finish(stage, part, (take,)) == []
    assert progress.open_visits == 0


def test_a_fan_out_without_parts_does_not_delay_a_join() -> None:
    steps = (
        GraphStage("find"),
        GraphStage("read", ("find",), each=Each("find")),
        GraphStage("tell", ("find", "read"), join=True),
    )
    progress = request_in(Graph(steps))
    progress.begin()
    assert progress.finish("find", 0, (0, 1)) == [("tell", 0)]


def test_a_thousand_parts_join_once() -> None:
    steps = (
        GraphStage("find"),
        GraphStage("read", ("find",), each=Each("find")),
        GraphStage("tell", ("read",), join=True),
    )
    progress = request_in(Graph(steps))
    progress.begin()
    parts = progress.finish("find", 0, (1_000,))
    assert [progress.finish(*visit) for visit in parts] == [[]] * 999 + [[("tell", 0)]]


def test_one_count_for_each_edge_is_required() -> None:
    progress = request_in(PARTS)
    progress.begin()
    with pytest.raises(ValueError, match="argument"):
        progress.finish("find", 0, (1, 1))


PATHS = Graph(
    (GraphStage("a"), GraphStage("b"), GraphStage("c", ("a", "b")), GraphStage("d", ("c",))),
    (Path(("a", "c", "d"), ms(100), 0.5), Path(("b", "c"), ms(40), 0.25), Path(("b", "c", "d"), ms(60), 0.25)),
    slo_ns=ms(80),
)


def deadlines_ms(progress: RequestProgress) -> tuple[float, float]:
    """The deadline while it is open, and if it ended now."""
    return progress.deadline_ns() / ms(1), progress.deadline_ns(ended=True) / ms(1)


def test_the_deadline_is_that_of_the_loosest_possible_path() -> None:
    progress = request_in(PATHS, ("b",))
    assert deadlines_ms(progress)[0] == 110
    assert progress.begin() == [("b", 0)]
    assert deadlines_ms(progress)[0] == 70, "b → c → d still may be"
    progress.finish("b", 0)
    assert deadlines_ms(progress) == (70, 50), "it has been on b → c alone"
    progress.finish("c", 0, (0,))
    assert deadlines_ms(progress)[1] == 50
    assert progress.open_visits == 0


def test_a_path_that_begins_at_another_entry_does_not_loosen_the_deadline() -> None:
    stages = (GraphStage("detect"), GraphStage("read", ("detect",), entry=True))
    paths = (Path(("detect", "read"), ms(600)), Path(("read",), ms(300)))
    for enters, slo_ms in ((("detect",), 600), (("read",), 300)):
        progress = RequestProgress(Graph(stages, paths, ms(600)), Request(RequestId(1), 0, 0, ms(600), enters))
        progress.begin()
        assert progress.deadline_ns() == ms(slo_ms)


def test_a_request_s_own_budget_is_scaled_like_the_path_s() -> None:
    progress = RequestProgress(PATHS, Request(RequestId(1), 0, 0, ms(40), ("a",)))
    progress.begin()
    assert progress.deadline_ns() == ms(50)


def test_on_several_paths_at_once_the_application_s_deadline_counts() -> None:
    progress = request_in(PATHS)
    progress.begin()
    assert deadlines_ms(progress)[0] == 90


def test_paths_without_deadlines_of_their_own_change_nothing() -> None:
    graph = Graph((GraphStage("a"), GraphStage("b", ("a",))), (Path(("a", "b"), ms(80)),), slo_ns=ms(80))
    assert not graph.has_deadlines
    assert deadlines_ms(request_in(graph)) == (90, 90)


def test_edges_have_a_kind() -> None:
    kinds = {(edge.source, edge.target): edge.kind for edges in PARTS.edges.values() for edge in edges}
    assert kinds == {("find", "read"): "each", ("read", "check"): "one", ("check", "tell"): "join"}
    assert PARTS.edges["read"] == (Edge("read", "check", "one", When("read")),)


def test_more_parts_than_an_edge_allows_lead_nowhere_and_leave_the_visit_open() -> None:
    progress = request_in(
        Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", most=3)), GraphStage("c", ("a",))))
    )
    progress.begin()
    assert (progress.finish("a", 0, (4, 1)), progress.open_visits, progress.visited) == ([], 1, {"a": 1})
    assert progress.fault
    sound = request_in(
        Graph((GraphStage("a"), GraphStage("b", ("a",), each=Each("a", most=3)), GraphStage("c", ("a",))))
    )
    sound.begin()
    assert len(sound.finish("a", 0, (3, 1))) == 4
    assert not sound.fault
