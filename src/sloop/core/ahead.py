"""What is still ahead of a request when it leaves a stage: the least time to the answer, as far as is known.

A lower bound, for drop rules: the longest of the ways on that are sure, every stage on it taking its own least. Sure is
an edge that nothing decides about, and one that all who came by of late have taken; a fan-out into several parts, too,
until one comes that has none. Of branches the quickest counts, if one is always taken: because values or told shares
leave no other, or because one always was. All else may be left out, and counts for nothing. Where paths are declared,
the quickest through the stage counts.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from sloop.app.graph import Edge, Graph

Times = tuple[int, int]
"""In ns: alone at every stage, and in full batches of the plan."""

NOTHING: Times = (0, 0)
RUN: Final = 100
"""What so many in a row have done, nearly all do: 97 % with a confidence of 95 % (3/n, the rule of three)."""
SEVERAL: Final = 3.0
"""Where so many parts are believed to come on average, hardly ever none does: 5 % of a Poisson distribution."""


class Runs:
    """How many visits in a row have taken each edge, up to the last: what is measured of edges that something decides
    about."""

    __slots__ = ("_any", "_taken")

    def __init__(self, graph: Graph) -> None:
        deciding = {
            name: [edge.when is not None for edge in edges]
            for name, edges in graph.edges.items()
            if any(edge.when is not None or edge.kind == "each" for edge in edges)
        }
        self._taken = {name: [_believed(graph, edge) for edge in graph.edges[name]] for name in deciding}
        self._any = {name: (0, edges) for name, edges in deciding.items()}
        """Per stage how many in a row have taken one edge at least of those with a condition, and which these are."""

    def passed(self, stage: str, edge_counts: Sequence[int]) -> None:
        """A visit is over, and sends so many on along each edge; along each one if empty."""
        taken = self._taken.get(stage)
        if taken is None:
            return
        run, conditional = self._any[stage]
        one = False
        for place, count in enumerate(edge_counts or (1,) * len(taken)):
            taken[place] = taken[place] + 1 if count else 0
            one = one or (count > 0 and conditional[place])
        self._any[stage] = run + 1 if one else 0, conditional

    def is_sure(self, stage: str, place: int) -> bool:
        """Whether nearly all visits take the stage's edge at this place."""
        return stage in self._taken and self._taken[stage][place] >= RUN

    def is_exhaustive(self, stage: str) -> bool:
        """Whether nearly all visits take one of the stage's edges with conditions."""
        return stage in self._any and self._any[stage][0] >= RUN


def _believed(graph: Graph, edge: Edge) -> int:
    """The run to begin with."""
    each = graph.steps[edge.target].each
    several = edge.kind == "each" and edge.when is None and each is not None and each.mean >= SEVERAL
    return RUN if several else 0


def ahead(graph: Graph, least_ns: Mapping[str, Times], runs: Runs | None = None) -> dict[str, Times]:
    """Per stage the least time from leaving it to the answer; `least_ns` is what each stage takes itself, `runs` what
    was measured of edges, if anything was."""
    if graph.declared_paths:
        return _along_paths(graph, least_ns)
    runs = runs or Runs(graph)
    remaining_ns: dict[str, Times] = {}
    for name in reversed(graph.steps):
        sure, either = NOTHING, list[Times]()
        for place, edge in enumerate(graph.edges[name]):
            onward = _sum(least_ns[edge.target], remaining_ns[edge.target])
            if edge.when is not None:
                either.append(onward)
            if (edge.when is None and edge.kind != "each") or runs.is_sure(name, place):
                sure = _longer(sure, onward)
        if either and (graph.is_exhaustive(name) or runs.is_exhaustive(name)):
            sure = _longer(sure, (min(alone for alone, _ in either), min(full for _, full in either)))
        remaining_ns[name] = sure
    return remaining_ns


def _along_paths(graph: Graph, least_ns: Mapping[str, Times]) -> dict[str, Times]:
    remaining_ns: dict[str, Times] = {}
    for path in graph.declared_paths:
        onward = NOTHING
        for name in reversed(path.stages):
            alone, full = remaining_ns.get(name, onward)
            remaining_ns[name] = min(alone, onward[0]), min(full, onward[1])
            onward = _sum(least_ns[name], onward)
    return remaining_ns


def _sum(one: Times, other: Times) -> Times:
    return one[0] + other[0], one[1] + other[1]


def _longer(one: Times, other: Times) -> Times:
    return max(one[0], other[0]), max(one[1], other[1])
