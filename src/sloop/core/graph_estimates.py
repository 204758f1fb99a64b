"""Estimates about a graph, learnt from finished visits: visit rates, and the remaining time after a stage.

Both start from the application's declarations and move towards the measurements. Applications whose requests visit
every stage once need neither.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sloop.app.graph import Edge, Graph
from sloop.units import s

HALF_LIFE_NS: Final = s(60)
"""Half-life of counts: long enough to average some hundred requests, short enough to follow changes within a day."""
PRIOR: Final = 20.0
"""Weight of a declared share, in visits. It does not decay: with rare traffic the declaration remains the best
guess."""


class VisitRates:
    """How often requests visit each stage.

    It counts, per edge, the parts sent per successful visit, and multiplies these rates along the graph. Counting
    visits to a stage would be simpler and wrong under overload: dropped requests would lower the rates of later stages,
    which would get fewer replicas and drop even more.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._declared = graph.shares()
        self._edges = {name: tuple((name, edge.target) for edge in edges) for name, edges in graph.edges.items()}
        self._edges[""] = tuple(("", name) for name in graph.entries)
        self._finished = dict.fromkeys(self._edges, 0.0)
        """Per stage, the successful visits; under "" the requests."""
        self._sent = dict.fromkeys(self._declared, 0.0)
        """Per edge, the parts sent."""
        self._aged_ns = 0

    def begin(self, enters: Sequence[str]) -> None:
        """A request arrives and begins at these entry stages (`Request.enters`)."""
        names = self._graph.entries_of(enters)
        self.finish("", [int(name in names) for name in self._graph.entries])

    def finish(self, stage: str, edge_counts: Sequence[int]) -> None:
        """A visit is over and has sent these numbers of parts along the stage's edges; one along each if empty."""
        self._finished[stage] += 1.0
        edges, sent = self._edges[stage], self._sent
        for edge, count in zip(edges, edge_counts or (1,) * len(edges), strict=True):
            if count:
                sent[edge] += count

    def age(self, now_ns: int) -> None:
        """Let all counts decay by the time since the last call."""
        kept = 0.5 ** ((now_ns - self._aged_ns) / HALF_LIFE_NS)
        self._aged_ns = now_ns
        self._finished = {stage: count * kept for stage, count in self._finished.items()}
        self._sent = {edge: count * kept for edge, count in self._sent.items()}

    def visits(self) -> Mapping[str, float]:
        """Mean number of visits a request makes to each stage."""
        shares = {
            edge: (PRIOR * declared + self._sent[edge]) / (PRIOR + self._finished[edge[0]])
            for edge, declared in self._declared.items()
        }
        return self._graph.visits(shares)


LeastTimes = tuple[int, int]
"""Two durations in ns: if every stage runs batches of one, and if every stage runs the plan's full batches."""

NOTHING: LeastTimes = (0, 0)
CERTAIN_AFTER: Final = 100
"""If this many visits in a row took an edge, at least 97 % of all visits do, with 95 % confidence (rule of three:
3/n)."""
MEAN_PARTS_MIN: Final = 3.0
"""A fan-out whose declared mean is at least this counts as certain to have a part: a Poisson number with mean 3 is 0 in
5 % of cases."""


class EdgeHistory:
    """For each edge with a condition or a fan-out: how many of the latest visits in a row have taken it."""

    def __init__(self, graph: Graph) -> None:
        self._conditional = {name: [edge.when is not None for edge in edges] for name, edges in graph.deciding.items()}
        self._taken = {name: [_first_run(graph, edge) for edge in graph.edges[name]] for name in self._conditional}
        self._any_conditional = dict.fromkeys(self._conditional, 0)
        """Per stage, how many visits in a row have taken at least one of the edges with a condition."""

    def finish(self, stage: str, edge_counts: Sequence[int]) -> None:
        """A visit is over and has sent these numbers of parts along the stage's edges; one along each if empty."""
        taken = self._taken.get(stage)
        if taken is None:
            return
        any_conditional = False
        for index, count in enumerate(edge_counts or (1,) * len(taken)):
            taken[index] = taken[index] + 1 if count else 0
            any_conditional = any_conditional or (count > 0 and self._conditional[stage][index])
        self._any_conditional[stage] = self._any_conditional[stage] + 1 if any_conditional else 0

    def is_certain(self, stage: str, index: int) -> bool:
        """Whether nearly all visits take the stage's edge with this index."""
        return stage in self._taken and self._taken[stage][index] >= CERTAIN_AFTER

    def is_exhaustive(self, stage: str) -> bool:
        """Whether nearly all visits take at least one of the stage's edges with conditions."""
        return self._any_conditional.get(stage, 0) >= CERTAIN_AFTER


def _first_run(graph: Graph, edge: Edge) -> int:
    """The number of visits in a row to assume for an edge before any visit is measured."""
    each = graph.stages[edge.target].each
    has_parts = edge.kind == "each" and edge.when is None and each is not None and each.mean >= MEAN_PARTS_MIN
    return CERTAIN_AFTER if has_parts else 0


def remaining_times(
    graph: Graph, least_ns: Mapping[str, LeastTimes], history: EdgeHistory | None = None
) -> dict[str, LeastTimes]:
    """Per stage, a lower bound of the time from its end to the answer. Drop policies compare it with the slack.

    `least_ns` is the least time at each stage, `history` the measured edges, if any. The bound is the longest chain of
    edges that are certain to be taken:

    - edges without a condition, unless they fan out, since a fan-out may have no part;
    - edges of any kind that the last `CERTAIN_AFTER` visits have all taken;
    - the quickest of several alternatives, if the declarations or measurements say that one is always taken.

    All other edges count as 0: dropping a request that could be served costs more than running one that cannot. If
    paths are declared, the bound is that of the quickest path through the stage.
    """
    if graph.declared_paths:
        return _along_declared_paths(graph, least_ns)
    history = history or EdgeHistory(graph)
    remaining_ns: dict[str, LeastTimes] = {}
    for name in reversed(graph.stages):
        certain, alternatives = NOTHING, list[LeastTimes]()
        for index, edge in enumerate(graph.edges[name]):
            onward = _sum(least_ns[edge.target], remaining_ns[edge.target])
            if edge.when is not None:
                alternatives.append(onward)
            if _is_certain(history, edge, index):
                certain = _longer(certain, onward)
        if alternatives and (graph.is_exhaustive(name) or history.is_exhaustive(name)):
            quickest = min(alone for alone, _ in alternatives), min(full for _, full in alternatives)
            certain = _longer(certain, quickest)
        remaining_ns[name] = certain
    return remaining_ns


class StageBacklog(NamedTuple):
    """What waits and runs at a stage now, for `expected_times`. Times are nanoseconds, and as believed."""

    waiting: int
    """Rows in its queue that come before the visit."""
    running: int
    """Rows in its batches."""
    row_ns: int
    """By how much each waiting row lengthens the time in which all replicas together empty the queue."""
    alone_ns: int
    """The duration of a batch of one row."""
    taken_ns: LeastTimes
    """The durations of a batch as large as those that run now, and of a full one."""
    mean_ratio: float
    """The mean duration of its batches divided by the believed one (`Belief.mean_ratio`)."""

    def served_ns(self, rows: int) -> int:
        """The time in which `rows` are served. Beliefs are 99th percentiles of batches: all of them may take so long if
        one does, but n batches together exceed their mean by √n times as much as one, not by n times as much."""
        believed_ns = rows * self.row_ns
        more_ns = min(believed_ns, math.sqrt(believed_ns * self.taken_ns[1]))
        return round(self.mean_ratio * believed_ns + max(0.0, 1 - self.mean_ratio) * more_ns)

    @property
    def longer_ns(self) -> LeastTimes:
        """`taken_ns`, and more if its batches take longer than believed."""
        slower = max(1.0, self.mean_ratio)
        return round(slower * self.taken_ns[0]), round(slower * self.taken_ns[1])


def expected_times(
    graph: Graph, start: str, loads: Mapping[str, StageBacklog], history: EdgeHistory | None = None
) -> LeastTimes:
    """The expected time, in ns, from the end of the stage `start` to the answer, for a visit that begins there now:
    once with batches as large as those that run at the later stages (`loads`), once with full ones.

    As `remaining_times`, but a later stage takes the visit only after the work before it: what waits before it at this
    stage, and what waits so or runs between `start` and it. For each later stage, the time until this work is done plus
    the time from there to the answer is a candidate; the result is the longest of these and the time without any
    waiting. Stages behind edges that are not certain to be taken, and graphs with declared paths, are computed without
    waiting. Method: PARD (arXiv 2602.08747).
    """
    history = history or EdgeHistory(graph)
    remaining_ns = remaining_times(graph, {name: load.longer_ns for name, load in loads.items()}, history)
    expected_ns, rows = remaining_ns[start], {start: 0}
    if graph.declared_paths:
        return expected_ns
    for name in graph.stages:
        if name not in rows:
            continue
        if name != start:
            load = loads[name]
            begins_ns = load.served_ns(rows[name]) - loads[start].alone_ns
            onward = _sum(load.longer_ns, remaining_ns[name])
            expected_ns = _longer(expected_ns, _sum(onward, (begins_ns, begins_ns)))
        for index, edge in enumerate(graph.edges[name]):
            if _is_certain(history, edge, index):
                before = rows[name] + loads[name].running + loads[edge.target].waiting
                rows[edge.target] = max(before, rows.get(edge.target, 0))
    return expected_ns


def _is_certain(history: EdgeHistory, edge: Edge, index: int) -> bool:
    """Whether nearly all visits take the edge. `index` is its position among the edges of its stage."""
    return (edge.when is None and edge.kind != "each") or history.is_certain(edge.source, index)


def _along_declared_paths(graph: Graph, least_ns: Mapping[str, LeastTimes]) -> dict[str, LeastTimes]:
    remaining_ns: dict[str, LeastTimes] = {}
    for path in graph.declared_paths:
        onward = NOTHING
        for name in reversed(path.stages):
            alone, full = remaining_ns.get(name, onward)
            remaining_ns[name] = min(alone, onward[0]), min(full, onward[1])
            onward = _sum(least_ns[name], onward)
    return remaining_ns


def _sum(one: LeastTimes, other: LeastTimes) -> LeastTimes:
    return one[0] + other[0], one[1] + other[1]


def _longer(one: LeastTimes, other: LeastTimes) -> LeastTimes:
    return max(one[0], other[0]), max(one[1], other[1])
