"""What a run came to, live or simulated, counted the same way over the same seconds.

Promises rows that may be set side by side: time begins with the schedule, cores count from then until it ends, and what
a live server did before its first request or after its last is left out. Knows the log, not the server or simulator.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct, structs

from sloop.report.metrics import Metrics, fold
from sloop.report.rows import RunRow
from sloop.runlog import Record, read_log
from sloop.systems.replay import rebuild
from sloop.vocabulary import Request


class Outcome(Struct, frozen=True):
    """A run's figures, and the fold for plots."""

    row: RunRow
    metrics: Metrics


def began_ns(log: Path, *, first_ns: int) -> int:
    """When the schedule began, on the log's clock, if its first request was sent `first_ns` later; 0 without any."""
    sent_ns = (record.sent_ns for _, record in read_log(log) if isinstance(record, Request))
    return max(0, next(sent_ns, first_ns) - first_ns)


def read_outcome(log: Path, *, first_ns: int, duration_s: int, assumed: Iterable[str] = ()) -> Outcome:
    """Count the run in a log whose first request was sent `first_ns` after its schedule began."""
    recorded = read_log(log)
    setup = rebuild(recorded.header)
    application = setup.application
    metrics = Metrics(nodes=application.cluster, beliefs=setup.beliefs, start_ns=0, graph=application.graph)
    fold(rebased(recorded, first_ns=first_ns), metrics)
    row = metrics.row(system=recorded.header.system, seed=recorded.header.seed, assumed=assumed)
    cores = [second.cores for second in metrics.seconds()[:duration_s]]
    row = structs.replace(row, core_seconds=sum(cores), goodput_rps=row.served / duration_s)
    return Outcome(row, metrics)


def rebased(records: Iterable[tuple[int, Record]], *, first_ns: int) -> Iterator[tuple[int, Record]]:
    """Records with the schedule's beginning as 0 and what came before it moved there: replicas, plans."""
    held: list[tuple[int, Record]] = []
    zero_ns: int | None = None
    for now_ns, record in records:
        if zero_ns is None:
            if not isinstance(record, Request):
                held.append((now_ns, record))
                continue
            zero_ns = record.sent_ns - first_ns
            yield from ((0, earlier) for _, earlier in held)
        if isinstance(record, Request):
            record = moved(record, zero_ns)  # noqa: PLW2901  # the same request on another clock
        yield max(0, now_ns - zero_ns), record


def moved(request: Request, zero_ns: int) -> Request:
    """The request on a clock that began `zero_ns` later."""
    return structs.replace(
        request,
        sent_ns=request.sent_ns - zero_ns,
        arrived_ns=request.arrived_ns - zero_ns,
        deadline_ns=request.deadline_ns - zero_ns,
    )
