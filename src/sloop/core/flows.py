"""How often requests visit each stage of a graph: what was declared at first, then more and more what was measured.

Counted for each edge by itself, so that requests dropped on their way do not make the stages behind seem less wanted.
What was seen loses half its weight every minute; what was declared always weighs as much as a few requests.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from sloop.app.graph import Graph
from sloop.units import s

HALF_LIFE_NS: Final = s(60)
PRIOR: Final = 20.0
"""Passages that a declared share counts for."""


class Flows:
    """Counts of what passed along the edges of one graph."""

    __slots__ = ("_aged_ns", "_believed", "_edges", "_graph", "_passed", "_sent")

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._believed = graph.shares()
        self._edges = {name: tuple((name, edge.target) for edge in edges) for name, edges in graph.edges.items()}
        self._edges[""] = tuple(("", name) for name in graph.entries)
        self._passed = dict.fromkeys(self._edges, 0.0)
        """Per stage, the visits that ended well; "" counts requests."""
        self._sent = dict.fromkeys(self._believed, 0.0)
        """Per edge, the visits that followed."""
        self._aged_ns = 0

    def begin(self, enters: Sequence[str]) -> None:
        """A request comes, and begins at some entries, all if none are named."""
        self.passed("", [int(not enters or name in enters) for name in self._graph.entries])

    def passed(self, stage: str, edge_counts: Sequence[int]) -> None:
        """A visit is over, and sends so many on along each edge; along each one if empty."""
        self._passed[stage] += 1.0
        edges, sent = self._edges[stage], self._sent
        for edge, count in zip(edges, edge_counts or (1,) * len(edges), strict=True):
            if count:
                sent[edge] += count

    def age(self, now_ns: int) -> None:
        """Let what was counted fade."""
        kept = 0.5 ** ((now_ns - self._aged_ns) / HALF_LIFE_NS)
        self._aged_ns = now_ns
        self._passed = {stage: count * kept for stage, count in self._passed.items()}
        self._sent = {edge: count * kept for edge, count in self._sent.items()}

    def visits(self) -> Mapping[str, float]:
        """Mean number of visits a request makes to each stage."""
        shares = {
            edge: (PRIOR * believed + self._sent[edge]) / (PRIOR + self._passed[edge[0]])
            for edge, believed in self._believed.items()
        }
        return self._graph.visits(shares)
