"""The checkers' own idea of a request's walk through a graph: it agrees with `app.progress`, and finds its mistakes."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.graph import Edge, Graph
from sloop.app.progress import Entered, RequestProgress
from sloop.sim import Violation, worlds
from sloop.sim.walk import DeclaredStages, Walk
from sloop.sim.worlds import random_world
from sloop.units import ms
from sloop.vocabulary import Path, Request, RequestId
from tests.app.test_progress import decide, graphs


@st.composite
def graphs_with_paths(draw: st.DrawFn) -> Graph:
    """The same, perhaps with deadlines of paths."""
    graph = draw(graphs())
    chains = [path.stages for path in graph.paths]
    chosen = draw(st.lists(st.sampled_from(chains), max_size=3, unique=True))
    paths = [Path(chain, draw(st.sampled_from((ms(40), ms(80), ms(100))))) for chain in chosen]
    return Graph(tuple(graph.stages.values()), paths, slo_ns=ms(80))


@given(graphs_with_paths(), st.integers(0, 2**32), st.booleans())
def test_the_checkers_and_the_core_walk_alike(graph: Graph, seed: int, named: bool) -> None:
    random = Random(seed)
    enters = random.sample(graph.entries, random.randint(1, len(graph.entries))) if named else ()
    request = Request(RequestId(1), ms(10), ms(10), ms(90), tuple(enters))
    progress, walk = RequestProgress(graph, request), Walk(DeclaredStages(graph), request)
    under_way, begun = progress.begin(), walk.begin()
    while True:
        assert sorted(begun) == sorted(under_way)
        for ended in (False, True):
            assert walk.deadline_ns(ended=ended) == progress.deadline_ns(ended=ended)
        assert (walk.open_visits, walk.visited) == (progress.open_visits, set(progress.visited))
        if not under_way:
            break
        stage, part = under_way.pop(random.randrange(len(under_way)))
        begun.remove((stage, part))
        counts = decide(graph, stage, random) if random.random() < 0.9 else ()
        under_way += progress.finish(stage, part, counts)
        begun += walk.finish(stage, part, counts)


# Mistakes in what core and fold share

follow = RequestProgress._follow


def enters_after_the_first_predecessor(
    self: RequestProgress, stage: str, part: int, count: int, entered: Entered
) -> None:
    if count and (stage, part) not in entered and stage not in self.visited:
        self.open_visits += 1
        self.visited[stage] = 1
        entered.append((stage, part))


def joins_at_the_first_part(self: RequestProgress, edge: Edge, part: int, count: int, entered: Entered) -> None:
    if edge.kind != "join":
        follow(self, edge, part, count, entered)
    elif edge not in self._joining:
        self._joining[edge] = 1, count
        self._send(edge.target, 0, count, entered)


def takes_every_branch(self: RequestProgress, edge: Edge, part: int, count: int, entered: Entered) -> None:
    follow(self, edge, part, count if edge.kind == "each" else 1, entered)


def begins_at_all_entries(self: RequestProgress) -> Entered:
    entered: Entered = []
    for name in self._graph.entries:
        self._send(name, 0, 1, entered)
    return entered


MISTAKES: dict[str, tuple[type, str, Callable[..., object], int]] = {
    "a stage does not wait for all before it": (RequestProgress, "_send", enters_after_the_first_predecessor, 4),
    "parts do not wait for each other where they join": (RequestProgress, "_follow", joins_at_the_first_part, 10),
    "requests without parts do not go on": (RequestProgress, "_skip_scope", lambda *_: None, 40),
    "a request takes every branch": (RequestProgress, "_follow", takes_every_branch, 8),
    "a request begins at all entries": (RequestProgress, "begin", begins_at_all_entries, 6),
    "a request has more parts than allowed": (Graph, "fault", lambda *_: "", 12),
    "paths have no deadlines of their own": (
        RequestProgress,
        "deadline_ns",
        lambda self, ended=False: self.request.deadline_ns,
        55,
    ),
}
"""What is replaced by what, and the seed of a world where that shows."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_on_the_way_through_a_graph_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, seed = MISTAKES[mistake]
    worlds.play(random_world(seed))
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Violation, match=r"does not wait|finished every stage|its deadline|overtook"):
        worlds.play(random_world(seed))
