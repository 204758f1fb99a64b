"""One request's way through a graph: what it has passed, and what it enters next. The reading that `app.graph` words.

Promises that a stage is entered at most once for a request, or for each of its parts; that it is entered as soon as
all before it are done or known to be left out; and that `open` falls to 0 exactly when nothing is left to do, whatever
the outputs said, unless they fit no edge: then `fault` says why. Knows no time, no queue and no replica.
"""

from collections.abc import Sequence
from typing import Final

from sloop.app.graph import Edge, Graph
from sloop.vocabulary import Request

Entered = list[tuple[str, int]]
"""Stages to visit now, each with the part it is for; 0 for a stage that runs once."""

UNFIT: Final = (-1,)
"""The edge_counts of a visit that could not be run or read, because of its request's tensors: the request fails, and none of
those that shared the batch."""


class Journey:
    """A request under way. `begin` once, then `finish` for every visit that was entered, in any order."""

    __slots__ = ("_due", "_graph", "_joining", "_on", "_parts", "fault", "open", "visited")

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._due: dict[tuple[str, int], tuple[int, int]] = {}
        """Of stages told by some of those before: how many are left to tell, and what was sent so far."""
        self._joining: dict[Edge, tuple[int, int]] = {}
        """Of edges where parts meet: how many parts have come, or are known not to come, and what was sent."""
        self._parts: dict[str, int] = {}
        self._on = (1 << len(graph.declared_paths)) - 1
        """Which of the declared paths it may turn out to be on, as bits."""
        self.open = 0
        """Visits entered and not finished."""
        self.fault = ""
        """Why it cannot go on, once a visit's edge_counts have fitted no edge: its request is to fail."""
        self.visited: dict[str, int] = {}
        """How often each stage was entered."""

    def begin(self, enters: Sequence[str] = ()) -> Entered:
        """Where it begins: at the entries named, all if none are."""
        entered: Entered = []
        for name in self._graph.entries:
            self._tell(name, 0, not enters or name in enters, entered)
        return entered

    def finish(self, stage: str, part: int, edge_counts: Sequence[int] = ()) -> Entered:
        """A visit is over; `edge_counts` says how many parts take each edge away from the stage, once each if empty. Ways that
        fit no edge lead nowhere: they set `fault`, and the visit stays open."""
        entered: Entered = []
        edges = self._graph.edges[stage]
        if edge_counts and (fault := self._graph.fault(stage, edge_counts)):
            self.fault = fault
            return entered
        self.open -= 1
        for edge, count in zip(edges, edge_counts or [1] * len(edges), strict=True):
            self._take(edge, part, count, entered)
        return entered

    def deadline_ns(self, request: Request, *, ended: bool = False) -> int:
        """By when the request is to be answered: its own deadline, unless paths have theirs. Then that of the loosest
        it may be on, or once it has `ended`, was on; on none of them, or several at once, the application's own."""
        graph = self._graph
        if not graph.has_deadlines:
            return request.deadline_ns
        paths = [path for bit, path in enumerate(graph.declared_paths) if self._on >> bit & 1]
        if ended:
            paths = [path for path in paths if self.visited.keys() == set(path.stages)] or paths
        loosest_ns = max((path.slo_ns for path in paths), default=graph.slo_ns)
        return request.sent_ns + request.slo_ns * loosest_ns // graph.slo_ns

    def _take(self, edge: Edge, part: int, count: int, entered: Entered) -> None:
        """So many parts take an edge: 0 if it is left out."""
        if edge.kind == "one":
            self._tell(edge.target, part, count, entered)
        elif edge.kind == "join":
            came, sent = self._joining.get(edge, (0, 0))
            came, sent = came + 1, sent + count
            self._joining[edge] = came, sent
            if came == self._parts[self._graph.scopes[edge.source]]:
                self._tell(edge.target, 0, sent, entered)
        else:
            self._parts[edge.target] = count
            for each in range(count):
                self._tell(edge.target, each, 1, entered)
            if not count:
                self._leave_out(edge.target, entered)

    def _tell(self, stage: str, part: int, count: int, entered: Entered) -> None:
        """One more of those before a stage is done with it."""
        left, sent = self._due.pop((stage, part), (self._graph.told_by[stage], 0))
        left, sent = left - 1, sent + count
        if left:
            self._due[stage, part] = left, sent
        elif sent:
            self.open += 1
            self.visited[stage] = self.visited.get(stage, 0) + 1
            self._on &= self._graph.on[stage]
            entered.append((stage, part))
        else:
            for edge in self._graph.edges[stage]:
                self._take(edge, part, 0, entered)

    def _leave_out(self, scope: str, entered: Entered) -> None:
        """There are no parts: those who wait to join them need not."""
        for name in self._graph.inside(scope):
            for edge in self._graph.edges[name]:
                if edge.kind == "join":
                    self._tell(edge.target, 0, 0, entered)
