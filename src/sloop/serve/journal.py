"""The event log of a server on disk: segments that begin with a snapshot, of which the oldest are deleted.

Nothing that the disk does holds the event loop. Records are encoded in the loop and written by a thread. When a segment
is full, the loop forks: the child has the core as it is at this instant, and writes the next segment's header and
snapshot while the server goes on (copy on write; the loop stands still for the fork only, some milliseconds). The
thread then appends what has happened since. A process of low priority compresses the closed segment and deletes the
oldest (`sloop.serve.archive`).

If a record cannot be written, those that follow are dropped and counted until there is room again. Then a new segment
begins, whose header says what is missing. The server goes on serving.
"""

import gc
import logging
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct, structs

from sloop.actions import Assigned, End, StartBatch
from sloop.core import Core
from sloop.errors import MachineError, SloopError
from sloop.events import Finished
from sloop.runlog import (
    RECORDS_PER_WRITE,
    Header,
    Loss,
    ProcessorTime,
    Record,
    Unlogged,
    header_line,
    segments,
    snapshot_line,
)
from sloop.runlog.fold import DeploymentState
from sloop.serve.archive import NICE
from sloop.serve.private import make_log_file, make_log_folder
from sloop.serve.processes import begin_forked, fork, kill, spawn
from sloop.systems.snapshot import Snapshot, save
from sloop.units import NS_PER_S
from sloop.vocabulary import BatchId, Outcome, Request, RequestId

SEGMENTS: Final = 16
"""A segment has this part of the bytes and of the age that the log may have, so that deleting one loses little."""
SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 2**16, 2**26
SEGMENT_AGE_S_MIN: Final = 60.0
BACKLOG_BYTES_MAX: Final = 2**26
"""What may wait for the disk. Further records are dropped."""
PLANNER_S_MAX: Final = 30.0
"""How long a segment waits for the state of the planner process before it begins without a snapshot."""
RETRY_S: Final = 1.0
"""How often to look for room on a full disk."""
CLOSE_S_MAX: Final = 1.0
HELD_S_MAX: Final = 10.0
HELD_MAX: Final = 200_000
"""How long, and how many records, a log with a sample waits for the ends of requests."""

_log: Final = logging.getLogger("sloop.log")


class LogLimits(Struct, frozen=True):
    """What a server's log may take."""

    bytes_max: int = 2**30
    """Of all segments together, those of earlier runs included."""
    age_s: float = 0.0
    """Segments that ended longer ago are deleted; 0: never because of their age."""
    sample: float = 1.0
    """The fraction of the requests served in time that are logged, 0 to 1."""

    @property
    def segment_bytes(self) -> int:
        return max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES_MAX, self.bytes_max // SEGMENTS))

    @property
    def segment_age_s(self) -> float:
        """After how long a segment ends; 0: never because of its age."""
        return max(SEGMENT_AGE_S_MIN, self.age_s / SEGMENTS) if self.age_s else 0.0


class Observed(NamedTuple):
    """What a segment begins with the state of."""

    core: Core
    fold: DeploymentState
    save_policies: Callable[[Callable[[int, Snapshot | str], None]], bool] | None = None
    """Asks the planner process for the state of its policies; see `PlannerProcess.save`."""


class Chunk(NamedTuple):
    """Encoded records on their way to the disk."""

    lines: bytes
    records: int
    from_ns: int
    until_ns: int


class Opening(NamedTuple):
    """The next segment, whose beginning a child writes. `report` is read to its end: the reason if it failed."""

    path: Path
    header: Header
    child: int
    report: int


class Journal:
    """Records the events and actions of a live run in `folder`, which it creates. Call `flush` about every second: a
    crash loses what was not flushed. `observed` is what snapshots are taken of; without it, segments have none.

    MachineError if the first segment cannot be written.
    """

    def __init__(
        self, folder: Path, header: Header, limits: LogLimits | None = None, observed: Observed | None = None
    ) -> None:
        self.path = folder
        self._limits = limits = limits or LogLimits()
        self._observed = observed
        self._header = structs.replace(header, sample=limits.sample)
        self._encoder = msgspec.json.Encoder()
        self._buffer: list[tuple[int, Record]] = []
        self._sampler = _Sampler(limits.sample) if limits.sample < 1.0 else None
        self._last_ns = 0
        self._begun_s = self._due_s = time.monotonic()
        self._is_asking = self._is_cut_wanted = False
        self._archiver: subprocess.Popen[bytes] | None = None
        try:
            make_log_folder(folder)
            self.run = segments.next_run(folder, datetime.now(UTC))
            """The part of the segments' names that all segments of this run share."""
            path = segments.segment_path(folder, self.run, 1)
            make_log_file(path)
            path.write_bytes(header_line(self._header))
        except OSError as error:
            raise MachineError(
                f"{folder}: the event log cannot be written: {error.strerror}",
                help="free space, name another folder with --state, or serve with `limits: {log_bytes: 0}`",
            ) from error
        self._writer: _DiskWriter | None = _DiskWriter(path)
        self._archive()

    def extend(self, records: Sequence[tuple[int, Record]]) -> None:
        """Append the events and actions of one instant."""
        if not records:
            return
        self._last_ns = records[-1][0]
        self._buffer += records if self._sampler is None else self._sampler.take(records)
        if len(self._buffer) >= RECORDS_PER_WRITE:
            self._send()

    def flush(self, taken_ns: int | None = None) -> None:
        """Pass buffered records to the disk, and begin a new segment if it is time. Must not be called from within an
        instant of the driver. `taken_ns` is the processor time that the server's own processes have taken; it is noted
        where something has happened, in a log that has all requests."""
        writer = self._writer
        if writer is None:
            return
        if self._sampler is not None:
            self._buffer += self._sampler.flush(self._last_ns)
        elif self._buffer and taken_ns is not None:
            self._buffer.append((self._last_ns, ProcessorTime(taken_ns)))
        self._send()
        if writer.is_opening or self._is_asking:
            return
        limits, now_s = self._limits, time.monotonic()
        is_old = limits.segment_age_s > 0 and now_s - self._begun_s >= limits.segment_age_s
        is_due = is_old or self._is_cut_wanted or writer.size >= limits.segment_bytes
        if writer.has_room_again or (not writer.loss and is_due):
            self._begin_segment(now_s)

    def reopen(self) -> None:
        """Begin a new segment at the next flush: the present one is then complete for whoever takes log files away."""
        self._is_cut_wanted = True

    def close(self) -> None:
        """Write buffered records and end. May be called repeatedly."""
        writer, self._writer = self._writer, None
        if writer is not None:
            if self._sampler is not None:
                self._buffer += self._sampler.flush(None)
            self._encode(writer)
            writer.close()
        if self._archiver is not None:
            kill(self._archiver.pid)
            self._archiver.wait()

    @property
    def segment(self) -> int:
        """The number of the segment to which is written now."""
        return self._header.segment - (self._writer is not None and self._writer.is_opening)

    @property
    def lost_records(self) -> int:
        """How many records of this run could not be written."""
        return self._writer.lost_records if self._writer is not None else 0

    @property
    def lost(self) -> Loss | None:
        """What could not be written since the present segment began."""
        return self._writer.loss if self._writer is not None else None

    def _send(self) -> None:
        if self._writer is not None:
            self._encode(self._writer)

    def _encode(self, writer: "_DiskWriter") -> None:
        buffer = self._buffer
        if buffer:
            chunk = Chunk(self._encoder.encode_lines(buffer), len(buffer), buffer[0][0], buffer[-1][0])
            buffer.clear()
            writer.put(chunk)

    # Segments

    def _begin_segment(self, now_s: float) -> None:
        """Begin the next segment, with the state of the planner process if there is one."""
        if not self._is_asking:
            self._due_s = now_s + PLANNER_S_MAX
        self._is_asking = self._ask()
        if not self._is_asking:
            self._cut(None)

    def _ask(self) -> bool:
        observed = self._observed
        return observed is not None and observed.save_policies is not None and observed.save_policies(self._saved)

    def _saved(self, number: int, state: Snapshot | str) -> None:
        """The planner process has told the state of its policies after plan `number`."""
        observed = self._observed
        if self._writer is None or observed is None or not self._is_asking:
            return
        core = observed.core
        is_same = core.plan_input is None and core.plan_number == number
        why = state if isinstance(state, str) else "the planner is always at work"
        if isinstance(state, Snapshot) and is_same:
            self._is_asking = False
            self._cut(state)
        elif isinstance(state, str) or time.monotonic() >= self._due_s:
            _log.warning("the next segment of the log has no snapshot: %s", why)
            self._is_asking = False
            self._cut(None, with_snapshot=False)
        else:  # a plan has been requested since: ask again
            self._is_asking = self._ask()

    def _cut(self, planner: Snapshot | None, *, with_snapshot: bool = True) -> None:
        """Begin the next segment at the present instant."""
        writer = self._writer
        assert writer is not None
        self._send()
        self._begun_s, self._is_cut_wanted = time.monotonic(), False
        at_ns = self._last_ns + 1
        header = structs.replace(
            self._header,
            segment=self._header.segment + 1,
            from_ns=at_ns,
            definitions=self._definitions(),
            has_snapshot=with_snapshot and self._observed is not None,
        )
        self._header = header
        path = segments.segment_path(self.path, self.run, header.segment)
        try:
            writer.put(self._open(path, header, at_ns, planner))
        except OSError as error:
            _log.warning("the next segment of the log has no snapshot: %s", error)
            writer.put(Opening(path, structs.replace(header, has_snapshot=False), 0, -1))
        self._archive()

    def _definitions(self) -> dict[str, dict[str, Any]]:
        """Of the versions that are there now."""
        known = self._header.definitions
        if self._observed is None:
            return known
        found: dict[str, dict[str, Any]] = {}
        for record in self._observed.fold.records:
            definition = record.definition or known.get(record.key)
            if definition is not None:
                found[record.key] = dict(definition)
        return found

    def _open(self, path: Path, header: Header, at_ns: int, planner: Snapshot | None) -> Opening:
        """Let a child write a segment's beginning, as this process is now."""
        observed = self._observed
        if observed is None or not header.has_snapshot:
            return Opening(path, structs.replace(header, has_snapshot=False), 0, -1)
        reading, writing = os.pipe()
        server = os.getpid()
        try:
            child = fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if not child:
            _write_beginning(path, header, at_ns, observed, planner, writing, server)
        os.close(writing)
        return Opening(path, header, child, reading)

    def _archive(self) -> None:
        """Compress closed segments and delete the oldest, in a process of its own."""
        if self._archiver is not None and self._archiver.poll() is None:
            return
        active = segments.segment_path(self.path, self.run, self._header.segment)
        limits = self._limits
        # The active segment and the one that is being closed are not compressed yet.
        bytes_max = max(0, limits.bytes_max - 2 * limits.segment_bytes)
        try:
            self._archiver = spawn("sloop.serve.archive", (active, bytes_max, limits.age_s))
        except OSError as error:
            _log.warning("old segments of the log are neither compressed nor deleted: %s", error)


def _write_beginning(  # what a child knows of its parent
    path: Path, header: Header, at_ns: int, observed: Observed, planner: Snapshot | None, report: int, server: int
) -> None:
    """The whole life of a child: write header and snapshot, and say through `report` why that failed, if it did. It
    ends with the server, and keeps none of its files: the next server can lock the state folder and listen."""
    why = ""
    try:
        begin_forked(server, report)
        gc.disable()
        os.nice(NICE)
        snapshot = save(observed.core, at_ns, fold=observed.fold, planner=planner)
        content = header_line(header) + snapshot_line(msgspec.json.encode(snapshot))
        _write_whole(path, content)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}" if not isinstance(error, SloopError) else error.what
    finally:
        os.write(report, why.encode()[:4096])
        os._exit(0)


class _DiskWriter:
    """The thread that writes to the disk, and what it says to the loop."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        """Of the present segment."""
        self.loss: Loss | None = None
        """What could not be written since the present segment began."""
        self.lost_records = 0
        """How many could not be written, in all."""
        self.has_room_again = False
        """Whether there is a loss, and a new segment can be begun."""
        self.is_opening = False
        """Whether a segment is being begun."""
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._queue: queue.SimpleQueue[Chunk | Opening | None] = queue.SimpleQueue()
        self._backlog_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    # Called by the loop

    def put(self, entry: Chunk | Opening) -> None:
        """Write this, after what was put before."""
        if isinstance(entry, Opening):
            self.is_opening = True
            self._queue.put(entry)
            return
        with self._lock:
            if self._backlog_bytes + len(entry.lines) > BACKLOG_BYTES_MAX:
                is_full = True
            else:
                is_full = False
                self._backlog_bytes += len(entry.lines)
        if is_full:
            self._lose(entry, "the disk is too slow")
        else:
            self._queue.put(entry)

    def close(self) -> None:
        """Write what is left, for a bounded time."""
        self._queue.put(None)
        self._thread.join(CLOSE_S_MAX)

    # The thread

    def _run(self) -> None:
        looked_s = 0.0
        while True:
            if self.loss is not None and time.monotonic() - looked_s >= RETRY_S:
                looked_s = time.monotonic()
                self._look_for_room()
            try:
                entry = self._queue.get(timeout=RETRY_S if self.loss else None)
            except queue.Empty:
                continue
            if entry is None:
                break
            if isinstance(entry, Opening):
                self._open(entry)
            else:
                self._write(entry)
                with self._lock:
                    self._backlog_bytes -= len(entry.lines)
        os.close(self._fd)

    def _write(self, chunk: Chunk) -> None:
        if self.loss is not None and chunk.from_ns >= self.loss.from_ns:  # what was put before is written
            self._lose(chunk, "")
            return
        rest = memoryview(chunk.lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self._lose(chunk, error.strerror or str(error))
            try:
                os.ftruncate(self._fd, self.size)  # a line that is cut would hide that the segment has ended
            except OSError:
                _log.warning("%s ends in the middle of a record", self._path)
            return
        self.size += len(chunk.lines)

    def _lose(self, chunk: Chunk, why: str) -> None:
        with self._lock:
            self.lost_records += chunk.records
            before = self.loss
            if before is None:
                _log.warning("the event log has a gap from now on, the server continues: %s: %s", self._path, why)
                self.loss = Loss(chunk.records, chunk.from_ns, chunk.until_ns, why)
            else:
                self.loss = Loss(before.records + chunk.records, before.from_ns, chunk.until_ns, before.why)

    def _look_for_room(self) -> None:
        """Let the loop begin a new segment if the disk has room."""
        self.has_room_again = segments.has_room(self._path.parent)

    def _open(self, opening: Opening) -> None:
        """Go on in the next segment. If its beginning could not be written, the gap goes on."""
        why = _report_of(opening) if opening.child else ""
        header, loss = opening.header, self.loss
        try:
            if opening.child and not why and loss is None:
                size = opening.path.stat().st_size
            else:
                if why:
                    _log.warning("segment %s of the log has no snapshot: %s", header.segment, why)
                    header = structs.replace(header, has_snapshot=False)
                size = _rewrite(opening.path, structs.replace(header, lost=loss), keep=not why and bool(opening.child))
            fd = os.open(opening.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self.is_opening = self.has_room_again = False
            if loss is None:
                self._lose(Chunk(b"", 0, header.from_ns, header.from_ns), error.strerror or str(error))
            return
        os.close(self._fd)
        if loss is not None:
            _log.warning("the event log goes on in %s; %s records are lost", opening.path, loss.records)
        with self._lock:
            self._fd, self._path, self.size, self.loss = fd, opening.path, size, None
        self.is_opening = self.has_room_again = False


def _report_of(opening: Opening) -> str:
    """Wait for the child; why it failed, empty if it did not."""
    found = b""
    while part := os.read(opening.report, 4096):
        found += part
    os.close(opening.report)
    os.waitpid(opening.child, 0)
    if not found and not opening.path.exists():
        return "the process that wrote it has died"
    return found.decode(errors="replace")


def _rewrite(path: Path, header: Header, *, keep: bool) -> int:
    """Write a segment's header anew, and with `keep` the snapshot after it; returns the size."""
    rest = b""
    if keep:
        with path.open("rb") as file:
            file.readline()
            rest = file.read()
    content = header_line(header) + rest
    _write_whole(path, content)
    return len(content)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a segment, or replace it as a whole."""
    part = path.with_name(f"{path.name}{segments.PART}")
    make_log_file(part)
    part.write_bytes(content)
    part.replace(path)


class _Sampler:
    """Holds records until the requests that they are about have ended, and leaves out most of those served in time.

    The order of records stays. A batch is left out if all its requests are; everything else is kept. Requests that do
    not end within `HELD_S_MAX` are kept.
    """

    def __init__(self, sample: float) -> None:
        self._threshold = round(sample * 2**32)
        self._held: deque[tuple[int, Record]] = deque()
        self._open: dict[RequestId, str] = {}
        """Requests that have not ended, each with its application."""
        self._kept: set[RequestId] = set()
        """Those of them that have been written already."""
        self._left_out: set[RequestId] = set()
        """Requests that have ended, until their end would be written."""
        self._batches: set[BatchId] = set()
        """Batches that are left out, until their end would be written."""
        self._served: dict[str, int] = {}
        """By application, the requests left out since this was last written."""
        self._released_ns = 0

    def take(self, records: Sequence[tuple[int, Record]]) -> list[tuple[int, Record]]:
        """Add the records of one instant; returns those that can be written now."""
        self._held += records
        for _, record in records:
            if isinstance(record, Request):
                self._open[record.id] = record.application
            elif isinstance(record, Assigned):
                self._open[record.request] = record.application
            elif isinstance(record, End):
                self._end(record)
        return self._release(records[-1][0])

    def flush(self, now_ns: int | None) -> list[tuple[int, Record]]:
        """The records that can be written now, with the number of those left out; all if `now_ns` is None."""
        found = self._release(now_ns)
        found += [(self._released_ns, Unlogged(served, name)) for name, served in self._served.items()]
        self._served.clear()
        return found

    def _end(self, end: End) -> None:
        name = self._open.pop(end.request, None)
        if end.request in self._kept:
            self._kept.remove(end.request)
        elif end.outcome is Outcome.SERVED and name is not None and _mixed(end.request) >= self._threshold:
            self._left_out.add(end.request)
            self._served[name] = self._served.get(name, 0) + 1

    def _release(self, now_ns: int | None) -> list[tuple[int, Record]]:
        held, found = self._held, list[tuple[int, Record]]()
        while held:
            at_ns, record = held[0]
            requests = _requests_of(record)
            is_due = now_ns is None or len(held) > HELD_MAX or now_ns - at_ns > HELD_S_MAX * NS_PER_S
            is_open = any(request in self._open for request in requests)
            if is_open and not is_due:
                break
            held.popleft()
            self._released_ns = at_ns
            if is_open:
                self._kept.update(request for request in requests if request in self._open)
            if not self._is_left_out(record, requests):
                found.append((at_ns, record))
        return found

    def _is_left_out(self, record: Record, requests: Sequence[RequestId]) -> bool:
        if isinstance(record, Finished):
            is_left_out = record.batch in self._batches
            self._batches.discard(record.batch)
            return is_left_out
        if not requests or not self._left_out.issuperset(requests):
            return False
        if isinstance(record, StartBatch):
            self._batches.add(record.batch)
        elif isinstance(record, End):
            self._left_out.remove(record.request)
        return True


def _requests_of(record: Record) -> Sequence[RequestId]:
    """The requests that a record is about; none for one that is always kept."""
    if isinstance(record, Request):
        return (record.id,)
    if isinstance(record, StartBatch):
        return record.requests
    if isinstance(record, End | Assigned):
        return (record.request,)
    return ()


def _mixed(request: RequestId) -> int:
    """32 bits that look random, by Fibonacci hashing: every run keeps the same numbers."""
    return request * 0x9E3779B97F4A7C15 >> 32 & 0xFFFFFFFF
