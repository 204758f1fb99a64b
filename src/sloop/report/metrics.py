"""The numbers of a run, folded from its events and actions as they happen or from a log afterwards.

Promises one implementation for live and simulated runs, memory bounded by the requests in flight, one 8-byte latency
per answered request and a dozen numbers per second, and a cost per record small enough for the simulator's inner loop.
Knows no truth of a simulator: beliefs are what the policies believed, outcomes what the log says (law 2).

A request counts in the second in which it arrived, whenever it ends, so that a second's shares add up to its arrivals.
Latency is end to end, from `sent_ns` to the answer, over answered requests (served and late); a quantile is the
smallest latency that at least that share of them do not exceed. Waiting is from arrival, or from the finish of the
stage before, to the start of the batch. Told the graph of an application of several stages, it follows every visit of
branches and parts (see `visits`); otherwise a request waits in one place at a time.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sloop.actions import End, ResizeReplica, StartBatch, StartReplica
from sloop.app.graph import Graph
from sloop.core.views import Belief
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaStopped, Resized
from sloop.report.holdings import Holdings
from sloop.report.rows import RouteRow, RunRow, Second, ServiceError, StageRow
from sloop.report.seconds import COLUMNS, Seconds
from sloop.report.tallies import Tallies
from sloop.report.visits import Visits
from sloop.runlog import Record
from sloop.units import NS_PER_MS, NS_PER_S
from sloop.vocabulary import BatchId, Node, Outcome, Request, RequestId

_SERVED: Final = Outcome.SERVED
_LATE: Final = Outcome.LATE
"""Bound once: looking a member up in its enumeration costs as much as the rest of a request's end."""

Fold = Callable[[int, Any], None]


class Metrics:
    """A fold of events and actions into numbers: a `Sink`.

    `nodes` give prices; `beliefs` by (stage, variant) give the estimates to compare with outcomes, and accuracies;
    they are asked and never taught, so fresh ones stand for what the profiles say.
    `start_ns` is when the run begins, by default the instant of its first record. With `whole_nodes`, every node that
    holds a replica is paid in full. `graph` is the application's; without it nothing is said of its stages.
    """

    def __init__(
        self,
        *,
        nodes: Iterable[Node] = (),
        beliefs: Mapping[tuple[str, str], Belief] | None = None,
        start_ns: int | None = None,
        whole_nodes: bool = False,
        graph: Graph | None = None,
    ) -> None:
        self.latencies_ns: array[int] = array("q")
        self.batch_sizes: Counter[int] = Counter()
        self.cold_starts = 0
        self.last_ns = start_ns or 0
        self._holdings = Holdings(nodes, whole_nodes=whole_nodes)
        self._tallies = Tallies(beliefs or {})
        self._graph = graph
        accuracies = {key: belief.accuracy for key, belief in (beliefs or {}).items()}
        self._visits = Visits(graph, accuracies) if graph is not None and len(graph.steps) > 1 else None
        self._believes = bool(beliefs)
        self._open: dict[RequestId, tuple[int, int]] = {}
        self._returned: list[tuple[int, StartBatch]] = []
        self._waiting: dict[RequestId, int] = {}
        self._batches: dict[BatchId, StartBatch] = {}
        self._waits = 0
        self._wait_sum_ns = 0
        self._wait_max_ns = 0
        self._seconds = Seconds(self._holdings, start_ns)
        self._columns = self._seconds.columns
        (
            self._arrivals,
            self._served,
            self._late,
            self._dropped,
            self._rejected,
            self._failed,
            _,
            self._worst,
        ) = (self._columns[name] for name in COLUMNS)
        self._second = self._seconds.current
        self._second_end_ns = self._seconds.end_ns
        folds: dict[type, Fold] = {
            Request: self._arrive,
            End: self._end,
            StartBatch: self._start_batch,
            Finished: self._finish_batch,
            BatchFailed: self._fail_batch,
            StartReplica: self._start_replica,
            ResizeReplica: self._order_resize,
            Resized: self._resize,
            ReplicaStopped: self._stop_replica,
            ReplicaLost: self._stop_replica,
        }
        if self._visits is not None:
            for kind, fold_graph in self._graph_folds(self._visits).items():
                folds[kind] = _both(fold_graph, folds[kind])
        self._fold_of = folds.get

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record; instants never decrease."""
        if now_ns >= self._second_end_ns:
            self._begin_seconds(now_ns)
        self.last_ns = now_ns
        fold = self._fold_of(type(record))
        if fold is not None:
            fold(now_ns, record)

    def _graph_folds(self, visits: Visits) -> dict[type, Fold]:
        """What a graph's visits are told beforehand; applications of one stage do not pay for it."""

        def end(now_ns: int, end: End) -> None:
            sent_ns, _ = self._open.get(end.request, (now_ns, 0))
            visits.end(end, now_ns - sent_ns)

        def finish(now_ns: int, finished: Finished) -> None:
            batch = self._batches.get(finished.batch)
            if batch is not None:
                held = self._holdings.get(batch.replica)
                visits.finish(now_ns, batch, finished.edge_counts, held.spec.variant if held else None)

        def fail(now_ns: int, failed: BatchFailed) -> None:
            batch = self._batches.get(failed.batch)
            if batch is not None:
                visits.lose(now_ns, batch)

        def stop(now_ns: int, stopped: ReplicaStopped | ReplicaLost) -> None:
            for batch in self._batches.values():
                if batch.replica == stopped.replica:
                    visits.lose(now_ns, batch)

        return {
            Request: visits.begin,
            End: end,
            StartBatch: visits.start,
            Finished: finish,
            BatchFailed: fail,
            ReplicaStopped: stop,
            ReplicaLost: stop,
        }

    # Requests

    def _arrive(self, now_ns: int, request: Request) -> None:
        self._open[request.id] = (request.sent_ns, self._second)
        self._waiting[request.id] = now_ns
        self._arrivals[self._second] += 1

    def _end(self, now_ns: int, end: End) -> None:
        sent = self._open.pop(end.request, None)
        if sent is None:
            return
        self._waiting.pop(end.request, None)
        sent_ns, row = sent
        outcome = end.outcome
        if outcome is _SERVED:
            self._served[row] += 1
        elif outcome is _LATE:
            self._late[row] += 1
        else:
            self._columns[outcome.value][row] += 1
            return
        latency_ns = now_ns - sent_ns
        self.latencies_ns.append(latency_ns)
        if latency_ns > self._worst[row]:  # noqa: PLR1730  # three times as quick as max()
            self._worst[row] = latency_ns

    # Batches

    def _start_batch(self, now_ns: int, batch: StartBatch) -> None:
        if self._returned:
            self._settle()
        take = self._waiting.pop
        for request in batch.requests:
            since_ns = take(request, None)
            if since_ns is not None:
                wait_ns = now_ns - since_ns
                self._waits += 1
                self._wait_sum_ns += wait_ns
                self._wait_max_ns = max(self._wait_max_ns, wait_ns)
        self.batch_sizes[len(batch.requests)] += 1
        self._batches[batch.batch] = batch
        if self._believes:
            self._tallies.believe(now_ns, batch, self._holdings.get(batch.replica))

    def _finish_batch(self, now_ns: int, finished: Finished) -> None:
        batch = self._batches.pop(finished.batch, None)
        if batch is None:
            return
        self._returned.append((now_ns, batch))
        if self._believes:
            self._tallies.compare(now_ns, batch, self._holdings.get(batch.replica))

    def _fail_batch(self, now_ns: int, failed: BatchFailed) -> None:
        batch = self._batches.pop(failed.batch, None)
        self._tallies.forget(failed.batch)
        if batch is not None:
            self._returned.append((now_ns, batch))

    def _settle(self) -> None:
        """Requests of finished batches that have not ended wait again; most end at once, so this is left till asked."""
        for now_ns, batch in self._returned:
            for request in batch.requests:
                if request in self._open:
                    self._waiting[request] = now_ns
        self._returned.clear()

    # Replicas

    def _start_replica(self, now_ns: int, start: StartReplica) -> None:
        self.cold_starts += 1
        self._holdings.hold(now_ns, start.replica, start.spec, start.spec.cores)

    def _order_resize(self, now_ns: int, resize: ResizeReplica) -> None:
        held = self._holdings.get(resize.replica)
        if held is not None and resize.cores > held.cores:
            self._holdings.hold(now_ns, resize.replica, held.spec, resize.cores)

    def _resize(self, now_ns: int, resized: Resized) -> None:
        held = self._holdings.get(resized.replica)
        if held is not None:
            self._holdings.hold(now_ns, resized.replica, held.spec, resized.cores)

    def _stop_replica(self, now_ns: int, stopped: ReplicaStopped | ReplicaLost) -> None:
        self._holdings.release(now_ns, stopped.replica)
        for batch in [batch for batch in self._batches.values() if batch.replica == stopped.replica]:
            del self._batches[batch.batch]
            self._tallies.forget(batch.batch)
            self._returned.append((now_ns, batch))

    # Seconds

    def _begin_seconds(self, now_ns: int) -> None:
        """Close the seconds that `now_ns` has left behind and open the one it is in."""
        self._seconds.begin(now_ns, self._count_waiting)
        self._second, self._second_end_ns = self._seconds.current, self._seconds.end_ns

    def _count_waiting(self) -> int:
        if self._visits is not None:
            return self._visits.waiting
        self._settle()
        return len(self._waiting)

    # Answers

    @property
    def start_ns(self) -> int | None:
        """When the run begins; None before its first record where nobody said."""
        return self._seconds.start_ns

    @property
    def duration_s(self) -> float:
        """From the start to the last record."""
        return (self.last_ns - self._seconds.origin_ns) / NS_PER_S

    @property
    def requests(self) -> int:
        """Requests that arrived."""
        return sum(self._arrivals)

    @property
    def core_seconds(self) -> float:
        """Allocated cores over time, up to the last record."""
        self._holdings.charge(self.last_ns)
        return self._holdings.core_s

    @property
    def usd(self) -> float:
        """What the replicas' shares of their nodes cost, up to the last record."""
        self._holdings.charge(self.last_ns)
        return self._holdings.usd

    @property
    def cores_mean(self) -> float:
        """Allocated cores, mean over the run."""
        return self.core_seconds / self.duration_s if self.duration_s else 0.0

    @property
    def wait_mean_ms(self) -> float:
        """Mean time in a queue, per visit to one."""
        of = self._visits
        waits, sum_ns = (of.waits, of.wait_sum_ns) if of is not None else (self._waits, self._wait_sum_ns)
        return sum_ns / waits / NS_PER_MS if waits else 0.0

    @property
    def wait_max_ms(self) -> float:
        """Longest time in a queue."""
        return (self._wait_max_ns if self._visits is None else self._visits.wait_max_ns) / NS_PER_MS

    @property
    def batch_mean(self) -> float:
        """Mean requests per batch."""
        batches = self.batch_sizes.total()
        return sum(size * count for size, count in self.batch_sizes.items()) / batches if batches else 0.0

    @property
    def accuracy(self) -> float | None:
        """As requests experience it: the mean, over those answered, of the accuracies of what computed them, multiplied
        over the stages they visited. Without a graph, the stages' means multiplied. None where one is unknown."""
        return self._tallies.accuracy if self._visits is None else self._visits.accuracy

    def stages(self) -> list[StageRow]:
        """What each stage saw; empty where the application's graph is not known."""
        if self._visits is not None:
            return self._visits.stages()
        batches = self.batch_sizes.total()
        return [
            StageRow(
                stage=name,
                visits=self._waits,
                mean_wait_ms=self.wait_mean_ms if self._waits else None,
                max_wait_ms=self.wait_max_ms if self._waits else None,
                batches=batches,
                mean_batch=self.batch_mean if batches else None,
                max_batch=max(self.batch_sizes, default=0),
                dropped=sum(self._dropped),
                rejected=sum(self._rejected),
                failed=sum(self._failed),
            )
            for name in (self._graph.steps if self._graph is not None else ())
        ]

    def routes(self) -> list[RouteRow]:
        """Which ways requests took through an application of several stages, whose graph is known."""
        return self._visits.routes() if self._visits is not None else []

    def route_latencies_ms(self, quantiles: Sequence[float]) -> dict[tuple[str, ...], list[float]]:
        """Latencies at these quantiles for each of `routes`."""
        return self._visits.latencies_ms(quantiles) if self._visits is not None else {}

    def latency_ms(self, quantiles: Sequence[float]) -> list[float]:
        """Latencies at these quantiles (0 < q ≤ 1), in milliseconds; empty where nothing was answered."""
        count = len(self.latencies_ns)
        if not count:
            return []
        ranks = [max(0, math.ceil(round(quantile * count, 6)) - 1) for quantile in quantiles]
        values = np.partition(np.frombuffer(self.latencies_ns, dtype=np.int64), sorted(set(ranks)))
        return [int(values[rank]) / NS_PER_MS for rank in ranks]

    def service_errors(self) -> list[ServiceError]:
        """Estimate against outcome per variant, where beliefs were given."""
        return self._tallies.service_errors()

    def seconds(self) -> list[Second]:
        """The run second by second; the last one may be incomplete."""
        return self._seconds.rows(self.last_ns, self._count_waiting())

    def row(self, *, system: str, seed: int | None, wall_s: float = 0.0, assumed: Iterable[str] = ()) -> RunRow:
        """The run in one row, as of the last record. A request without an end yet counts as not served."""
        requests, served = self.requests, sum(self._served)
        answered = len(self.latencies_ns)
        p50_ms, p99_ms = self.latency_ms((0.5, 0.99)) if answered else (None, None)
        return RunRow(
            system=system,
            seed=seed,
            requests=requests,
            served=served,
            late=sum(self._late),
            dropped=sum(self._dropped),
            rejected=sum(self._rejected),
            failed=sum(self._failed),
            attainment=served / requests if requests else 1.0,
            goodput_rps=served / self.duration_s if self.duration_s else 0.0,
            mean_ms=sum(self.latencies_ns) / answered / NS_PER_MS if answered else None,
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            core_seconds=self.core_seconds,
            usd=self.usd,
            accuracy=self.accuracy,
            cold_starts=self.cold_starts,
            wall_s=wall_s,
            assumed=tuple(assumed),
            stages=tuple(self.stages()),
            routes=tuple(self.routes()),
        )


def _both(one: Fold, other: Fold) -> Fold:
    def fold(now_ns: int, record: Record) -> None:
        one(now_ns, record)
        other(now_ns, record)

    return fold


def fold(records: Iterable[tuple[int, Record]], metrics: Metrics) -> Metrics:
    """`metrics` after all of `records`; for a log that is read back."""
    for now_ns, record in records:
        metrics.append(now_ns, record)
    return metrics
