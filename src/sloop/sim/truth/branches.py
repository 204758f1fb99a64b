"""Branches: the true edges that a request takes through the graph, and its true number of parts.

Both depend on the content of the request, not on the machines. They are therefore drawn from the request's number and
are the same under every system:

- Alternatives decided by one output exclude each other; edges with the same condition are taken together.
- Where the application declares paths, each request is on one of them and takes only its edges.
- The number of parts is Poisson with the believed mean, up to the allowed maximum, unless the scenario declares how
  many there are. Edges that split the same output have the same number of rows.
- Which parts meet a condition is drawn for each part and edge independently.

Must not import beliefs: the shares come from the application or the scenario.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Final

from msgspec import structs

from sloop.actions import StartBatch
from sloop.app.graph import Each, Edge, Graph, declared_name
from sloop.sim.truth.network import Arrival, Numbering
from sloop.streams import stream
from sloop.units import ROUNDING
from sloop.vocabulary import Path

RecordedBranches = Mapping[str, Mapping[tuple[int, int], tuple[int, ...]]]
"""Per stage, by the request's number and part: how many parts took each outgoing edge in a recorded run."""

EdgeCounts = tuple[tuple[int, ...], ...]
"""Per request of a batch, per outgoing edge: how many parts take the edge."""

DIGITS: Final = 12
"""Cumulative probabilities are rounded to this many decimals, so that they are the same on every machine."""


class BranchSampler:
    """The branches of one application version, drawn from the random streams `path/…` and `ways/…`.

    Streams are named by the stage names of the application's file and by the numbers of its requests (`numbering`), so
    that a request takes the same edges in every version of its application, and whatever other applications there are.

    `fan_out` gives, for stages with `each`, the possible numbers of parts, all equally likely. `shares` gives, for
    stages with `when`, the true fraction of requests that take them; the rest is divided among the other alternatives,
    including none, in proportion to the application's shares. At stages in `recorded`, a request takes the edges of the
    recorded request with the same number, or of a random one if there is none. `paths` are the positions of the
    declared paths that the requests are on, in order; without it they are drawn.
    """

    def __init__(
        self,
        seed: int,
        graph: Graph,
        *,
        fan_out: Mapping[str, Sequence[int]] | None = None,
        shares: Mapping[str, float] | None = None,
        recorded: RecordedBranches | None = None,
        numbering: Numbering | None = None,
        paths: Sequence[int] = (),
    ) -> None:
        self._seed = seed
        self._graph = graph
        self._paths = paths
        self._numbering = numbering or Numbering()
        self._shares = _true_shares(graph, shares or {})
        self._counts = dict(fan_out or {})
        self._recorded = recorded or {}
        self._recorded_counts = {stage: list(taken.values()) for stage, taken in self._recorded.items()}
        self._tables = {step.name: _poisson_table(step.each) for step in graph.stages.values() if step.each is not None}
        self._path_bounds = list(accumulate(path.share for path in graph.declared_paths))
        self._deciding = graph.edges if graph.declared_paths else graph.deciding
        """Outgoing edges of the stages at which requests take different edges."""

    def __bool__(self) -> bool:
        """Whether requests take different edges at any stage."""
        return bool(self._deciding)

    def entering(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The same arrivals; if paths are declared, each enters at the first stage of its path."""
        if not self._graph.declared_paths:
            yield from arrivals
            return
        for at_ns, request in arrivals:
            path = self._path(self._numbering.number(request.id))
            yield at_ns, structs.replace(request, enters=(declared_name(path.stages[0]),))

    def taken(self, order: StartBatch) -> EdgeCounts:
        """The edges that the requests of a finished batch take; empty if all take every edge."""
        edges = self._deciding.get(order.stage)
        if not edges:
            return ()
        number = self._numbering.number
        return tuple(self._of_visit(order.stage, edges, number(request), part) for request, part in order.visits)

    def _of_visit(self, stage: str, edges: Sequence[Edge], request: int, part: int) -> tuple[int, ...]:
        # The stream keeps its old name, because another one would change the draws of every seed.
        random = stream(self._seed, f"ways/{declared_name(stage)}/{request}/{part}")
        if stage in self._recorded_counts:
            taken = self._recorded[stage].get((request, part))
            return random.choice(self._recorded_counts[stage]) if taken is None else taken
        rows: dict[str, int] = {}
        if self._graph.declared_paths:
            on_path = set(pairwise(self._path(request).stages))
            taken_edges = [(edge, (stage, edge.target) in on_path) for edge in edges]
            return tuple(
                self._parts(edge, random, rows) if taken and edge.kind == "each" else int(taken)
                for edge, taken in taken_edges
            )
        return self._of_conditions(edges, random, rows)

    def _of_conditions(self, edges: Sequence[Edge], random: Random, rows: dict[str, int]) -> tuple[int, ...]:
        """One draw per deciding output; each alternative occupies its share of [0, 1)."""
        left: dict[str, float] = {}
        decided: dict[object, bool] = {}
        counts = []
        for edge in edges:
            if edge.when is None:
                counts.append(self._parts(edge, random, rows) if edge.kind == "each" else 1)
            elif edge.kind == "each":
                share = self._shares[edge]
                counts.append(sum(random.random() < share for _ in range(self._parts(edge, random, rows))))
            else:
                output, share = edge.when.output, self._shares[edge]
                if edge.condition not in decided:
                    draw = left[output] if output in left else random.random()
                    decided[edge.condition] = 0.0 <= draw < share
                    left[output] = draw - share  # negative once one of the alternatives is taken
                counts.append(int(decided[edge.condition]))
        return tuple(counts)

    def _parts(self, edge: Edge, random: Random, rows: dict[str, int]) -> int:
        """The number of parts of an edge with `each`. `rows` caches the number drawn for each output."""
        each, possible = self._graph.stages[edge.target].each, self._counts.get(edge.target)
        assert each is not None
        if each.output in rows:
            return rows[each.output]
        count = random.choice(possible) if possible else bisect_right(self._tables[edge.target], random.random())
        if each.output:
            rows[each.output] = count
        return count

    def _path(self, request: int) -> Path:
        if self._paths:
            return self._graph.declared_paths[self._paths[request]]
        at = stream(self._seed, f"path/{request}").random() * self._path_bounds[-1]
        return self._graph.declared_paths[min(bisect_right(self._path_bounds, at), len(self._path_bounds) - 1)]


def _true_shares(graph: Graph, declared: Mapping[str, float]) -> dict[Edge, float]:
    """For each edge with a condition, the fraction of the requests at its source that take it.

    Declared shares override the application's. Alternatives without a declared share (including none) divide the rest
    in the proportions of the application; if the application leaves them no share, they divide it evenly.
    """
    shares: dict[Edge, float] = {}
    for edges in graph.edges.values():
        for edge in (edge for edge in edges if edge.when is not None):
            rivals = [rival for rival in edges if rival.when and edge.when and rival.when.output == edge.when.output]
            named = {rival.condition: declared[rival.target] for rival in rivals if rival.target in declared}
            believed = {rival.condition: graph.probability(rival) for rival in rivals}
            left, was_left = 1.0 - sum(named.values()), 1.0 - sum(believed[condition] for condition in named)
            even = 1 / (len(believed) - len(named) or 1)
            proportion = believed[edge.condition] / was_left if was_left > ROUNDING else even
            shares[edge] = named.get(edge.condition, max(0.0, proportion * left))
    return shares


def _poisson_table(each: Each) -> list[float]:
    """The probabilities of at most 0, 1, 2, … parts, without the last, which is 1.

    Computed outwards from the most likely number, each probability from its neighbour, so that a mean of thousands
    neither underflows nor needs factorials.
    """
    likeliest = min(int(each.mean), each.most)
    fewer = accumulate(range(likeliest, 0, -1), lambda chance, parts: chance * parts / each.mean, initial=1.0)
    more = accumulate(
        range(likeliest + 1, each.most + 1), lambda chance, parts: chance * each.mean / parts, initial=1.0
    )
    chances = [*reversed(list(fewer)), *list(more)[1:]]
    total = sum(chances)
    return [round(chance / total, DIGITS) for chance in accumulate(chances)][:-1]
