"""Ways: which edges of the graph a request really takes, and into how many parts it falls.

What a branch decides and how many rows an output has lies in the requests, not in the machines: it is drawn from the
request's number, and so is the same whatever system serves it. Alternatives told apart by one output exclude each
other. Where the application declares paths, a request is on one of them, begins where that begins, and takes its edges
alone. Parts are Poisson around the believed mean, at most as many as allowed, unless the scenario says how many; an
output has one number of rows for all who take it apart, the first of them has the say. Which parts meet a condition is
drawn for each part and edge by itself.
Must not know beliefs: the shares it reads are the application's own, or the scenario's.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Final

from msgspec import structs

from sloop.actions import StartBatch
from sloop.app.graph import Each, Edge, Graph
from sloop.sim.truth.network import Arrival
from sloop.streams import stream
from sloop.vocabulary import Path, RequestId

Went = Mapping[str, Mapping[tuple[int, int], tuple[int, ...]]]
"""Per stage, by request and part: how many parts took each edge away from it in some run."""

Taken = tuple[tuple[int, ...], ...]
"""Per request of a batch, per edge: how many parts take it."""

DIGITS: Final = 12
"""To so many decimals probabilities are alike on every machine."""
ROUNDING: Final = 1e-12
"""Shares that are meant to sum up to 1 do so but for this."""


class Ways:
    """The world's branches, drawn from streams `path/…` and `ways/…`.

    `fan_out` says for stages with `each` how many parts there are, each of the numbers being equally likely; `shares`
    for stages with `when` how many really take them: what is left goes to the alternatives it does not name, and to
    none, as the application has it. From stages that `recorded` knows, requests go as the one of their number did
    there, or if there was none, as any of them.
    """

    def __init__(
        self,
        seed: int,
        graph: Graph,
        *,
        fan_out: Mapping[str, Sequence[int]] | None = None,
        shares: Mapping[str, float] | None = None,
        recorded: Went | None = None,
    ) -> None:
        self._seed = seed
        self._graph = graph
        self._chances = _chances(graph, shares or {})
        self._counts = dict(fan_out or {})
        self._recorded = recorded or {}
        self._seen = {stage: list(went.values()) for stage, went in self._recorded.items()}
        self._tables = {step.name: _poisson(step.each) for step in graph.steps.values() if step.each is not None}
        self._bounds = list(accumulate(path.share for path in graph.declared_paths))
        self._deciding = {
            name: edges
            for name, edges in graph.edges.items()
            if graph.declared_paths or any(edge.when is not None or edge.kind == "each" for edge in edges)
        }
        """Stages after which requests part."""

    def __bool__(self) -> bool:
        """Whether there is anything to decide."""
        return bool(self._deciding)

    def entering(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
        """The same arrivals, each beginning where its path does."""
        if not self._graph.declared_paths:
            yield from arrivals
            return
        for at_ns, request in arrivals:
            yield at_ns, structs.replace(request, enters=self._path(request.id).stages[:1])

    def taken(self, order: StartBatch) -> Taken:
        """What the requests of a batch do when it is done; empty where all take every edge."""
        edges = self._deciding.get(order.stage)
        if not edges:
            return ()
        return tuple(self._of(order.stage, edges, request, part) for request, part in order.visits)

    def _of(self, stage: str, edges: Sequence[Edge], request: RequestId, part: int) -> tuple[int, ...]:
        random = stream(self._seed, f"ways/{stage}/{request}/{part}")
        if stage in self._seen:
            return self._recorded[stage].get((request, part)) or random.choice(self._seen[stage])
        steps = set(pairwise(self._path(request).stages)) if self._graph.declared_paths else None
        chances: dict[str, float] = {}
        decided: dict[object, bool] = {}
        rows: dict[str, int] = {}
        counts = []
        for edge in edges:
            if steps is not None:
                there = (stage, edge.target) in steps
                counts.append(self._parts(edge, random, rows) if there and edge.kind == "each" else int(there))
            elif edge.when is None:
                counts.append(self._parts(edge, random, rows) if edge.kind == "each" else 1)
            elif edge.kind == "each":
                share = self._chances[edge]
                counts.append(sum(random.random() < share for _ in range(self._parts(edge, random, rows))))
            else:
                output, share = edge.when.output, self._chances[edge]
                if edge.condition not in decided:
                    chance = chances[output] if output in chances else random.random()
                    decided[edge.condition] = 0.0 <= chance < share
                    chances[output] = chance - share  # below 0 once one of the alternatives is taken
                counts.append(int(decided[edge.condition]))
        return tuple(counts)

    def _parts(self, edge: Edge, random: Random, rows: dict[str, int]) -> int:
        """How many rows an edge with `each` has; `rows` are those of outputs seen before."""
        each, likely = self._graph.steps[edge.target].each, self._counts.get(edge.target)
        assert each is not None
        if each.output in rows:
            return rows[each.output]
        count = random.choice(likely) if likely else bisect_right(self._tables[edge.target], random.random())
        if each.output:
            rows[each.output] = count
        return count

    def _path(self, request: RequestId) -> Path:
        at = stream(self._seed, f"path/{request}").random() * self._bounds[-1]
        return self._graph.declared_paths[min(bisect_right(self._bounds, at), len(self._bounds) - 1)]


def _chances(graph: Graph, told: Mapping[str, float]) -> dict[Edge, float]:
    """For edges with a condition, how many of those that could take them do. Told shares go before the application's;
    alternatives of which nothing is told keep their proportions, among each other and to taking none. Where the
    application has left nothing for them, they share what is left evenly."""
    chances: dict[Edge, float] = {}
    for edges in graph.edges.values():
        for edge in (edge for edge in edges if edge.when is not None):
            rivals = [rival for rival in edges if rival.when and edge.when and rival.when.output == edge.when.output]
            named = {rival.condition: told[rival.target] for rival in rivals if rival.target in told}
            believed = {rival.condition: graph.likelihood(rival) for rival in rivals}
            left, was_left = 1.0 - sum(named.values()), 1.0 - sum(believed[condition] for condition in named)
            share = (
                believed[edge.condition] / was_left if was_left > ROUNDING else 1 / (len(believed) - len(named) or 1)
            )
            chances[edge] = named.get(edge.condition, max(0.0, share * left))
    return chances


def _poisson(each: Each) -> list[float]:
    """The chances of at most 0, 1, 2, … parts, all but the last, of those there may be: from the likeliest number on,
    each chance follows from its neighbour's."""
    likeliest = min(int(each.mean), each.most)
    fewer = accumulate(range(likeliest, 0, -1), lambda chance, parts: chance * parts / each.mean, initial=1.0)
    more = accumulate(
        range(likeliest + 1, each.most + 1), lambda chance, parts: chance * each.mean / parts, initial=1.0
    )
    chances = [*reversed(list(fewer)), *list(more)[1:]]
    total = sum(chances)
    return [round(chance / total, DIGITS) for chance in accumulate(chances)][:-1]
