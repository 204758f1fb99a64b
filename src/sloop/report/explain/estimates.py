"""What the core expected at an instant of a log: how long batches take, and when a replica is free."""

from collections import Counter
from typing import Final

from sloop.actions import StartBatch
from sloop.core.rates import cost_of
from sloop.events import Finished
from sloop.runlog import Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.replicas import BatchGroup
from sloop.runlog.run import RunState
from sloop.runlog.versions import StaticEstimate
from sloop.text import counted, in_ms
from sloop.vocabulary import BatchId, Life

QUEUED: Final = "queued"
"""The step of a replica that was ordered to start and has reported none."""


class Estimator:
    """Estimated durations of batches at their start; the beliefs are updated as the core's were."""

    def __init__(self, state: DeploymentState) -> None:
        self._state = state
        self._beliefs: dict[tuple[str, str, str], StaticEstimate] = {}
        self._versions = 0
        self._running: dict[BatchId, tuple[BatchGroup, int]] = {}
        """Per batch, the slot and the shape in which it started, and its estimated duration there in ns."""
        self._finished = BatchId(-1), 0
        """The last finished batch and its estimated duration in ns."""

    def observe(self, now_ns: int, record: Record) -> None:
        """Add a record; call this before `DeploymentState.append`."""
        if not isinstance(record, StartBatch | Finished):
            return
        run = self._state.run_of_replica(record.replica)
        if run is None:
            return
        replica = run.replicas[record.replica]
        belief = self._belief(replica.group.variant_key)
        if belief is None:
            return
        if isinstance(record, StartBatch):
            group = replica.group
            own = belief.of(group.shape).at(record.size)
            self._running[record.batch] = group, cost_of(own.costs_ns(group.slot), record.rows)
        elif replica.running is not None and replica.running.batch == record.batch:
            group, expected_ns = self._running.pop(record.batch)
            self._finished = record.batch, expected_ns
            if not record.faults:
                batch = replica.running
                own = belief.of(group.shape).at(batch.size)
                own.observe(batch.rows, group.slot, now_ns - replica.running_ns, record.padded_to(batch.rows))

    def _belief(self, key: tuple[str, str, str]) -> StaticEstimate | None:
        records = self._state.records
        if self._versions != len(records):
            self._versions = len(records)
            self._beliefs = {key: belief for record in records for key, belief in record.parts.beliefs.items()}
        return self._beliefs.get(key)

    def expected_ns(self, batch: BatchId) -> int:
        """Estimated duration of a running batch or of the last finished one; 0 without an estimate."""
        finished, expected_ns = self._finished
        running = self._running.get(batch)
        return expected_ns if batch == finished else running[1] if running is not None else 0

    def compared(self, batch: BatchId, taken_ns: int) -> str:
        """`150.0 ms, 36% longer than estimated`."""
        expected_ns = self.expected_ns(batch)
        if not expected_ns:
            return in_ms(taken_ns)
        off = taken_ns / expected_ns - 1
        if abs(off) < 0.005:
            return f"{in_ms(taken_ns)}, as long as the estimated P99"
        return f"{in_ms(taken_ns)}, {abs(off):.0%} {'longer' if off > 0 else 'shorter'} than the estimated P99"

    def replicas(self, run: RunState, now_ns: int) -> str:
        """A version's replicas by life-cycle state, and the estimated remaining time of the next batch to finish."""
        parts = [f"{counted(run.count(Life.READY), 'replica')} ready"]
        if run.count(Life.STARTING):
            steps = Counter(r.step or QUEUED for r in run.replicas.values() if r.life is Life.STARTING)
            named = [f"{count} {step}" for step, count in steps.items()] if len(steps) > 1 else list(steps)
            parts.append(f"{run.count(Life.STARTING)} starting ({', '.join(named)})")
        if run.count(Life.DRAINING):
            parts.append(f"{run.count(Life.DRAINING)} {Life.DRAINING.value}")
        ends_ns = [
            replica.running_ns + expected_ns
            for replica in run.batches()
            if replica.running and (expected_ns := self.expected_ns(replica.running.batch))
        ]
        if run.batches():
            parts.append(f"{len(run.batches())} busy{_next_free(min(ends_ns) - now_ns) if ends_ns else ''}")
        return ", ".join(parts)


def _next_free(left_ns: int) -> str:
    """When the first of the busy replicas is estimated to finish its batch, `left_ns` from now."""
    if left_ns <= 0:
        return " (the next one free at any moment: its batch has run as long as estimated)"
    return f" (the next one free in an estimated {in_ms(left_ns)})"
