"""Requests on their edge_counts through a graph: what each stage saw of them, which routes they took, what they got.

Promises one wait for every visit that is queued, whichever branches and parts run beside it: from entering the stage,
as `app.journey` reads the graph, to the start of its batch; a visit whose replica was lost waits again. Ends other
than answers count at the stage they name, or else where the request waited, if that was one. Memory
is bounded by requests in flight and one 8-byte latency per answer. Knows no policy and no truth.

Accuracy is what requests experience: for each that is answered the product, over the stages it visited, of the mean
accuracy of the variants that computed its visits there (IPA's PAS, for one request); then the mean over requests. A
branch that few take weighs as few requests do, and many parts weigh no more than one.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from sloop.actions import End, StartBatch
from sloop.app.graph import Graph
from sloop.app.journey import Journey
from sloop.report.rows import RouteRow, StageRow
from sloop.solvers.accuracy import product
from sloop.units import NS_PER_MS, to_ms
from sloop.vocabulary import BatchId, Outcome, Request, RequestId

ANSWERED: Final = (Outcome.SERVED, Outcome.LATE)
ROUTES_MAX: Final = 100
"""Routes that are told apart; graphs with many branches have more, and what is rare is summed up."""

Key = tuple[str, int]
"""A stage and a part."""


class _StageTally(Struct):
    """Sums behind a `StageRow`."""

    visits: int = 0
    wait_sum_ns: int = 0
    wait_max_ns: int = 0
    batches: int = 0
    batched: int = 0
    batch_max: int = 0
    dropped: int = 0
    rejected: int = 0
    failed: int = 0


class _Route:
    """Answers to requests that visited the same stages."""

    __slots__ = ("latencies_ns", "served")

    def __init__(self) -> None:
        self.served = 0
        self.latencies_ns: array[int] = array("q")


class _Flight:
    """A request under way."""

    __slots__ = ("journey", "running", "scores", "waiting")

    def __init__(self, journey: Journey) -> None:
        self.journey = journey
        self.waiting: dict[Key, int] = {}
        """Since when each visit waits."""
        self.running: dict[Key, BatchId] = {}
        self.scores: dict[str, tuple[float, int]] = {}
        """Per stage, accuracies summed up and how many."""


class Visits:
    """The fold of one run's requests; `accuracies` by (stage, variant)."""

    def __init__(self, graph: Graph, accuracies: Mapping[tuple[str, str], float | None]) -> None:
        self.waiting = 0
        """Visits in a queue now."""
        self._graph = graph
        self._accuracies = accuracies
        self._flights: dict[RequestId, _Flight] = {}
        self._stages = {name: _StageTally() for name in graph.steps}
        self._routes: dict[frozenset[str], _Route] = {}
        self._score_sum, self._scored, self._unknown = 0.0, 0, not accuracies

    def begin(self, now_ns: int, request: Request) -> None:
        """It arrived."""
        self._flights[request.id] = flight = _Flight(Journey(self._graph))
        self._enter(now_ns, flight, flight.journey.begin(request.enters))

    def start(self, now_ns: int, batch: StartBatch) -> None:
        """A batch of visits begins."""
        tally = self._stages[batch.stage]
        tally.batches += 1
        tally.batched += len(batch.requests)
        tally.batch_max = max(tally.batch_max, len(batch.requests))
        for flight, key in self._visits_of(batch):
            flight.running[key] = batch.batch
            since_ns = flight.waiting.pop(key, None)
            if since_ns is not None:
                self.waiting -= 1
                tally.visits += 1
                tally.wait_sum_ns += now_ns - since_ns
                tally.wait_max_ns = max(tally.wait_max_ns, now_ns - since_ns)

    def finish(self, now_ns: int, batch: StartBatch, edge_counts: Sequence[Sequence[int]], variant: str | None) -> None:
        """A batch is done; `edge_counts` are those of the event, `variant` what computed it where that is known."""
        accuracy = self._accuracies.get((batch.stage, variant)) if variant is not None else None
        self._unknown = self._unknown or accuracy is None
        for (id, part), way in zip(batch.visits, edge_counts or ((),) * len(batch.requests), strict=True):
            flight, key = self._flights.get(id), (batch.stage, part)
            if flight is None or flight.running.pop(key, None) != batch.batch:
                continue
            if accuracy is not None:
                total, count = flight.scores.get(batch.stage, (0.0, 0))
                flight.scores[batch.stage] = total + accuracy, count + 1
            self._enter(now_ns, flight, flight.journey.finish(batch.stage, part, way))

    def lose(self, now_ns: int, batch: StartBatch) -> None:
        """A batch failed, or its replica is gone: its visits wait again until their ends are told."""
        for flight, key in self._visits_of(batch):
            if flight.running.get(key) == batch.batch:
                del flight.running[key]
                self._enter(now_ns, flight, [key])

    def end(self, end: End, latency_ns: int) -> None:
        """It ended, `latency_ns` after it was sent."""
        flight = self._flights.pop(end.request, None)
        if flight is None:
            return
        self.waiting -= len(flight.waiting)
        if end.outcome not in ANSWERED:
            self._count_end(end, flight)
            return
        stages = frozenset(flight.journey.visited)
        if stages not in self._routes and len(self._routes) >= ROUTES_MAX:
            stages = frozenset()
        route = self._routes.setdefault(stages, _Route())
        route.served += end.outcome is Outcome.SERVED
        route.latencies_ns.append(latency_ns)
        if not self._unknown:
            self._score_sum += product([total / count for total, count in flight.scores.values()])
            self._scored += 1

    @property
    def accuracy(self) -> float | None:
        """Mean over answered requests; None where nothing was, or where that of a variant which computed is unknown."""
        return None if self._unknown or not self._scored else self._score_sum / self._scored

    @property
    def wait_sum_ns(self) -> int:
        """Of all waits."""
        return sum(tally.wait_sum_ns for tally in self._stages.values())

    @property
    def wait_max_ns(self) -> int:
        """The longest."""
        return max(tally.wait_max_ns for tally in self._stages.values())

    @property
    def waits(self) -> int:
        """How many visits waited, were it for no time."""
        return sum(tally.visits for tally in self._stages.values())

    def stages(self) -> list[StageRow]:
        """One row per stage, in topological order."""
        return [
            StageRow(
                stage=name,
                visits=t.visits,
                mean_wait_ms=t.wait_sum_ns / t.visits / NS_PER_MS if t.visits else None,
                max_wait_ms=t.wait_max_ns / NS_PER_MS if t.visits else None,
                batches=t.batches,
                mean_batch=t.batched / t.batches if t.batches else None,
                max_batch=t.batch_max,
                dropped=t.dropped,
                rejected=t.rejected,
                failed=t.failed,
            )
            for name, t in self._stages.items()
        ]

    def routes(self) -> list[RouteRow]:
        """One row per set of stages that answered requests visited, the most travelled first."""
        rows = []
        for visited, route in self._routes.items():
            latencies_ns = np.frombuffer(route.latencies_ns, dtype=np.int64)
            slo_ns = next(
                (way.slo_ns for way in self._graph.declared_paths if set(way.stages) == visited), self._graph.slo_ns
            )
            rank = max(0, math.ceil(round(0.99 * len(latencies_ns), 6)) - 1)
            rows.append(
                RouteRow(
                    stages=tuple(name for name in self._graph.steps if name in visited),
                    slo_ms=to_ms(slo_ns),
                    answered=len(latencies_ns),
                    served=route.served,
                    mean_ms=float(latencies_ns.mean()) / NS_PER_MS,
                    p99_ms=int(np.partition(latencies_ns, rank)[rank]) / NS_PER_MS,
                )
            )
        return sorted(rows, key=lambda row: (-row.answered, row.stages))

    def latencies_ms(self, quantiles: Sequence[float]) -> dict[tuple[str, ...], list[float]]:
        """Per route, in the order of `routes`, the smallest latencies that these shares of answers do not exceed."""
        found = {}
        for row in self.routes():
            ordered = sorted(self._routes[frozenset(row.stages)].latencies_ns)
            ranks = [max(0, math.ceil(round(quantile * len(ordered), 6)) - 1) for quantile in quantiles]
            found[row.stages] = [ordered[rank] / NS_PER_MS for rank in ranks]
        return found

    def _enter(self, now_ns: int, flight: _Flight, entered: Sequence[Key]) -> None:
        for key in entered:
            flight.waiting[key] = now_ns
        self.waiting += len(entered)

    def _visits_of(self, batch: StartBatch) -> list[tuple[_Flight, Key]]:
        """The visits of a batch whose requests have not ended."""
        return [
            (flight, (batch.stage, part)) for id, part in batch.visits if (flight := self._flights.get(id)) is not None
        ]

    def _count_end(self, end: End, flight: _Flight) -> None:
        """At the stage it names, or where it waited."""
        waiting = {name for name, _ in flight.waiting}
        stage = end.stage or (waiting.pop() if len(waiting) == 1 else "")
        tally = self._stages.get(stage)
        if tally is None:
            return
        if end.outcome is Outcome.DROPPED:
            tally.dropped += 1
        elif end.outcome is Outcome.REJECTED:
            tally.rejected += 1
        else:
            tally.failed += 1
