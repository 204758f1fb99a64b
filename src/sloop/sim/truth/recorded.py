"""Truth from a recorded run: batch durations, branches of requests, and arrival delays.

The log of a live server is the best calibration for its machine. Every cell (batch size and core count) with enough
batches uses the recorded durations (`sloop.runlog.durations`); other cells use the profile. Policies still use their
profiles as beliefs.

The requests of a log of several applications are numbered for each application in the order of their ids, as the
simulator numbers them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from sloop.actions import StartBatch
from sloop.events import Finished
from sloop.runlog import Record
from sloop.runlog.durations import BatchFold, Durations
from sloop.sim.truth.branches import RecordedBranches
from sloop.sim.truth.network import Delay
from sloop.vocabulary import BatchId, Node, Request


class RecordedRun(Struct, frozen=True):
    """The truth of a recorded run, to be repeated in a simulation. Empty fields leave the scenario's truth in place."""

    durations_ns: dict[int, Durations] = {}  # msgspec copies the empty dict for each instance
    """By class of sizes; 0 is that of rows of one size."""
    branches: RecordedBranches = {}
    delays: dict[str, tuple[Delay, ...]] = {}
    """By application, delays per request, in order of sending."""


NOT_RECORDED: Final = RecordedRun()


def recorded_run(
    records: Iterable[tuple[int, Record]],
    names: Sequence[str] = ("",),
    nodes: Sequence[Node] = (),
    sizes: Iterable[int] = (),
) -> RecordedRun:
    """Read the truth from a log, in one pass. `names` are the applications of its deployment; if there is only one, its
    requests need not name it. `nodes` are those of its header, `sizes` the classes of sizes of its batches."""
    folds = {size: BatchFold(nodes, size=size) for size in {0, *sizes}}
    branches: dict[str, dict[tuple[int, int], tuple[int, ...]]] = defaultdict(dict)
    requests: dict[str, list[tuple[int, Delay]]] = defaultdict(list)
    ids: dict[str, list[int]] = defaultdict(list)
    started: dict[BatchId, StartBatch] = {}
    for now_ns, record in records:
        for fold in folds.values():
            fold.append(now_ns, record)
        if isinstance(record, Request):
            delay = record.arrived_ns - record.sent_ns, now_ns - record.sent_ns
            requests[record.application or names[0]].append((record.sent_ns, delay))
            ids[record.application].append(record.id)
        elif isinstance(record, StartBatch):
            started[record.batch] = record
        elif isinstance(record, Finished):
            batch = started.pop(record.batch, None)
            if batch is not None and record.edge_counts:
                branches[batch.stage] |= dict(record.continuing(batch.visits))
    if len(names) > 1:
        numbers = {id: number for own in ids.values() for number, id in enumerate(sorted(own))}
        for stage, taken in branches.items():
            branches[stage] = {(numbers.get(id, id), part): counts for (id, part), counts in taken.items()}
    delays = {name: tuple(delay for _, delay in sorted(own)) for name, own in requests.items()}
    return RecordedRun({size: fold.durations() for size, fold in folds.items()}, dict(branches), delays)
