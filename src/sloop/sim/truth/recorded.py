"""Truth from a recorded run: how long its batches took, which branches its requests took, how late they arrived.

A live server's log is the best calibration for the machine it ran on. Durations are the run's own for every batch size
and core count that ran often enough (`sloop.runlog.durations`); other cells stay as the profile has them. Policies
still believe their own profiles.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from sloop.actions import StartBatch
from sloop.events import Finished
from sloop.runlog import Record
from sloop.runlog.durations import ANY_GRAPH, Durations, durations_of
from sloop.runlog.fold import RunState
from sloop.sim.truth.branches import RecordedBranches
from sloop.sim.truth.network import Delay
from sloop.vocabulary import BatchId, Request


class RecordedRun(Struct, frozen=True):
    """What was true in a run that a simulated one is to resemble. Empty parts leave the scenario's truth in place."""

    durations_ns: Durations = {}  # msgspec makes a new one for each
    branches: RecordedBranches = {}
    delays: tuple[Delay, ...] = ()
    """Per request, in order of sending."""


NOT_RECORDED: Final = RecordedRun()


def recorded_run(records: Iterable[tuple[int, Record]]) -> RecordedRun:
    """What a log tells of the truth, in one pass."""
    state = RunState(ANY_GRAPH)
    branches: dict[str, dict[tuple[int, int], tuple[int, ...]]] = defaultdict(dict)
    requests: list[tuple[int, Delay]] = []
    started: dict[BatchId, StartBatch] = {}
    for now_ns, record in records:
        state.append(now_ns, record)
        if isinstance(record, Request):
            requests.append((record.sent_ns, (record.arrived_ns - record.sent_ns, now_ns - record.sent_ns)))
        elif isinstance(record, StartBatch):
            started[record.batch] = record
        elif isinstance(record, Finished):
            batch = started.pop(record.batch, None)
            if batch is not None and record.edge_counts:
                branches[batch.stage] |= dict(record.continuing(batch.visits))
    delays = tuple(delay for _, delay in sorted(requests))
    return RecordedRun(durations_of(state), dict(branches), delays)
