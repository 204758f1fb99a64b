"""A request's progress through the graph: which visits are over, and which come next. `app.graph` has the rules.

A request, or each part of it, enters a stage at most once, as soon as all its predecessors are done or known to be
skipped; `open_visits` falls to 0 exactly when the request is done. The core and the metrics use this class, so that
they cannot disagree; the simulator's checkers have their own (`sim.walk`). Must not depend on time, queues or replicas.
"""

from collections.abc import Sequence

from sloop.app.graph import Edge, Graph
from sloop.vocabulary import Request

Entered = list[tuple[str, int]]
"""Stages to visit now, each with the index of the request's part; 0 for a stage that runs once."""


class RequestProgress:
    """The progress of one request. Call `begin` once, then `finish` for every entered visit, in any order."""

    __slots__ = (
        *("_graph", "_joining", "_parts", "_paths", "_pending", "fault", "open_visits", "request", "sizes", "visited"),
    )

    def __init__(self, graph: Graph, request: Request) -> None:
        self._graph = graph
        self.request = request
        self._pending: dict[tuple[str, int], tuple[int, int]] = {}
        """For each visit with some, but not all, predecessors done: how many are not done, and how many items came."""
        self._joining: dict[Edge, tuple[int, int]] = {}
        """For each edge where parts join: how many parts are done or skipped, and how many items they sent."""
        self._parts: dict[str, int] = {}
        """By fan-out stage, how many parts the request has there."""
        self._paths = (1 << len(graph.declared_paths)) - 1
        """The declared paths that the request may still take, as a bit set."""
        self.open_visits = 0
        """Visits entered and not finished."""
        self.fault = ""
        """Why the request must fail, once a visit has sent more items along an edge than the edge allows."""
        self.visited: dict[str, int] = {}
        """How often each stage was entered."""
        self.sizes: dict[str, dict[str, tuple[int, int]]] | None = None
        """By stage, and by each earlier one that has reported it: the rows and the size of its visits (`expect`)."""

    def expect(self, edge: Edge, rows: int, size: int) -> None:
        """A visit passes on so many rows of this size along an edge; 0 for as many as before. Where parts join, the
        rows of all add up, and with 0 rows their sizes."""
        if self.sizes is None:
            self.sizes = {}
        known = self.sizes.setdefault(edge.target, {})
        if edge.kind == "join" and edge.source in known:
            known_rows, known_size = known[edge.source]
            rows, size = known_rows + rows, max(size, known_size) if rows else size + known_size
        known[edge.source] = rows, size

    def expected(self, stage: str) -> tuple[int, int]:
        """The most rows, and the largest size, that an earlier stage has reported of this one; 0 if none has."""
        known = self.sizes.get(stage, {}).values() if self.sizes is not None else ()
        return max((rows for rows, _ in known), default=0), max((size for _, size in known), default=0)

    def begin(self) -> Entered:
        """The first visits: at the entry stages that the request names, or at all entry stages."""
        entered: Entered = []
        enters = self._graph.entries_of(self.request.enters)
        if self._graph.has_deadlines:
            paths = enumerate(self._graph.declared_paths)
            self._paths = sum(1 << bit for bit, path in paths if path.stages[0] in enters)
        for name in self._graph.entries:
            self._send(name, 0, name in enters, entered)
        return entered

    def finish(self, stage: str, part: int, edge_counts: Sequence[int] = ()) -> Entered:
        """Record that a visit is over; returns the visits that follow. `edge_counts` says how many items it sends along
        each outgoing edge; one along each if empty. If an edge does not allow that many, only `fault` is set and the
        visit stays open."""
        entered: Entered = []
        edges = self._graph.edges[stage]
        if edge_counts and (fault := self._graph.fault(stage, edge_counts)):
            self.fault = fault
            return entered
        self.open_visits -= 1
        for edge, count in zip(edges, edge_counts or [1] * len(edges), strict=True):
            self._follow(edge, part, count, entered)
        return entered

    def deadline_ns(self, *, ended: bool = False) -> int:
        """The request's deadline. If declared paths have different deadlines, it is the loosest among the paths that
        the request may still take, or, once it has `ended`, took; if it fits no path, the application's."""
        graph, request = self._graph, self.request
        if not graph.has_deadlines:
            return request.deadline_ns
        paths = [path for bit, path in enumerate(graph.declared_paths) if self._paths >> bit & 1]
        if ended:
            paths = [path for path in paths if self.visited.keys() == set(path.stages)] or paths
        loosest_ns = max((path.slo_ns for path in paths), default=graph.slo_ns)
        return request.sent_ns + request.slo_ns * loosest_ns // graph.slo_ns

    def _follow(self, edge: Edge, part: int, count: int, entered: Entered) -> None:
        """Send `count` items along an edge from a visit for `part`; 0 if the visit does not take the edge."""
        if edge.kind == "one":
            self._send(edge.target, part, count, entered)
        elif edge.kind == "join":
            came, sent = self._joining.get(edge, (0, 0))
            came, sent = came + 1, sent + count
            self._joining[edge] = came, sent
            if came == self._parts[self._graph.scopes[edge.source]]:
                self._send(edge.target, 0, sent, entered)
        else:
            self._parts[edge.target] = count
            for each in range(count):
                self._send(edge.target, each, 1, entered)
            if not count:
                self._skip_scope(edge.target, entered)

    def _send(self, stage: str, part: int, count: int, entered: Entered) -> None:
        """One predecessor of a visit is done. After the last one, enter the visit if any of them sent an item; else
        skip it, and with it the stages that only it leads to."""
        left, sent = self._pending.pop((stage, part), (self._graph.predecessors[stage], 0))
        left, sent = left - 1, sent + count
        if left:
            self._pending[stage, part] = left, sent
        elif sent:
            self.open_visits += 1
            self.visited[stage] = self.visited.get(stage, 0) + 1
            self._paths &= self._graph.paths_through[stage]
            entered.append((stage, part))
        else:
            for edge in self._graph.edges[stage]:
                self._follow(edge, part, 0, entered)

    def _skip_scope(self, scope: str, entered: Entered) -> None:
        """A fan-out stage gets no parts: let the stages that join them continue."""
        for name in self._graph.stages_in(scope):
            for edge in self._graph.edges[name]:
                if edge.kind == "join":
                    self._send(edge.target, 0, 0, entered)
