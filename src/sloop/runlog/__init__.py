"""The event log of a run, live or simulated: all events and actions, and the file format.

A file is JSON lines: the header, then one `[now_ns, record]` per line, where a record is an event or an action, tagged
by `type`. Records are read back equal and in order. The header has everything needed to understand and replay the run.
A log that a crash has cut short is read up to the cut. Every figure of a run is computed from these records (see
`runlog.fold`). The caller provides instants and dates.

The log of a server is a folder of such files (`runlog.segments`), of which the oldest may have been deleted. The second
line of a segment that is not the first of its run is a snapshot of the core and the fold (`sloop.systems.snapshot`).
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Protocol, Self, get_args, runtime_checkable

import msgspec
from msgspec import Struct

from sloop import __version__
from sloop.actions import Action
from sloop.errors import InputError, MachineError
from sloop.events import Event
from sloop.runlog.segments import FOLDER, LogSegment, opened, segment_of, segments_in
from sloop.text import QUOTED_CHARS_MAX, counted, quoted
from sloop.units import to_s
from sloop.vocabulary import Node

VERSION: Final = 5
PARTIAL_VERSION: Final = 6
"""Version of the file's format, raised when an old reader would misread a new file, or a new one an old file.

2: `finished` has `edge_counts` and `faults` (was `ways`, with a negative number for a fault).
3: replicas have slots (were cores); several applications, in versions; nodes come and go; records omit defaults.
4: a file that is not a whole run from its start: it goes on from a snapshot, or has only a sample of the requests.
5 and 6 instead of 3 and 4: events and orders are about workers; a shadow has a number among the workers.
"""

_BEGIN: Final = b'{"sloop_log":'

RECORDS_PER_WRITE: Final = 1024
"""How many records a `FileLog` buffers, which a crash loses. Unbuffered writes would cost a system call per record. A
server also flushes every second."""

EVENTS: Final = get_args(Event)
ACTIONS: Final = get_args(Action)


class Unlogged(Struct, frozen=True, gc=False, tag="unlogged", omit_defaults=True):
    """Requests that were served in time since the last such record, and are not in the log because it has a sample."""

    served: int
    application: str = ""
    """Key of the version; empty if the deployment has only one application."""


class ProcessorTime(Struct, frozen=True, gc=False, tag="processor_time"):
    """The processor time that the edges and the deciding process of a server have taken since they started."""

    taken_ns: int


Record = Event | Action | Unlogged | ProcessorTime


class Loss(Struct, frozen=True):
    """Records that could not be written, between one segment and the next."""

    records: int
    from_ns: int
    until_ns: int
    """The instants of the first and of the last of them."""
    why: str


class Header(Struct, frozen=True, kw_only=True):
    """Describes the run: the origin of its numbers, and everything needed to build the same core for a replay."""

    origin: str
    """`live` or `sim`."""
    name: str
    """The deployment's name: that of its application if it has only one."""
    system: str
    """The system of the applications that declare none; `definitions` has the system and the parameters of each."""
    definitions: dict[str, dict[str, Any]] = {}  # msgspec copies the empty dict for each instance
    """By key, the applications that are there from the start, as `sloop.systems.setup` defines them: as declared, with
    the defaults filled in, the profiles with their provenance, and the system's parameters that differ from its
    published ones."""
    cluster: tuple[Node, ...] = ()
    seed: int | None = None
    """The seed of the simulated world; None for a live run."""
    software: dict[str, str] = {}
    """Versions of sloop, Python and the runtime."""
    date: str = ""
    """When the run began (ISO 8601)."""
    machine: str = ""
    """The server's processor and the cores that it may use; empty for a simulated run."""
    assumed_starts: dict[str, str] = {}
    """Per `stage/variant` (` on KIND`, if the cluster has several kinds), the cold start that the simulator assumed
    because it was neither measured nor declared."""
    first_worker: int = 0
    """The number of the first worker that the run has started."""
    segment: int = 1
    """The number of this file among those of the run. `definitions` are those of the versions at its start."""
    from_ns: int = 0
    """When the segment begins; it has all later records up to its end."""
    has_snapshot: bool = False
    """Whether the second line is a snapshot."""
    sample: float = 1.0
    """The fraction of the requests served in time that are logged; of the others, `Unlogged` has the number."""
    lost: Loss | None = None
    """What is missing between the segment before and this one."""

    @property
    def version(self) -> int:
        """The version of the format that a file with this header has."""
        return VERSION if self.segment == 1 and self.sample == 1.0 else PARTIAL_VERSION


class Sink(Protocol):
    """Receives the records of a run one by one."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one event or action; instants never decrease."""
        ...


@runtime_checkable
class Recorder(Protocol):
    """Receives many records of a run per call: those of an instant of a server, a block of a simulation, or a log.
    Logs and folds are recorders."""

    def extend(self, records: Sequence[tuple[int, Record]]) -> None:
        """Add events and actions with their instants, in order; instants never decrease."""
        ...


class MemoryLog:
    """A log in memory: `records` is a list, in order."""

    def __init__(self) -> None:
        self.records: list[tuple[int, Record]] = []

    def append(self, now_ns: int, record: Record) -> None:
        self.records.append((now_ns, record))

    def extend(self, records: Iterable[tuple[int, Record]]) -> None:
        self.records += records

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


class FileLog:
    """Writes a log to disk, replacing an existing file. Buffers at most about `RECORDS_PER_WRITE` records until
    `flush`. MachineError if the file cannot be written."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._buffer: list[tuple[int, Record]] = []
        try:
            self._file: BinaryIO = path.open("wb", buffering=0)
        except OSError as error:
            raise _write_error(path, error) from error
        self._write(header_line(header))

    def append(self, now_ns: int, record: Record) -> None:
        self.extend(((now_ns, record),))

    def extend(self, records: Iterable[tuple[int, Record]]) -> None:
        self._buffer += records
        if len(self._buffer) >= RECORDS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Write the buffered records."""
        if self._buffer:
            lines = self._encoder.encode_lines(self._buffer)
            self._buffer.clear()
            self._write(lines)

    def close(self) -> None:
        """Flush and close; closing a second time has no effect."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write(self, lines: bytes) -> None:
        if self._file.closed:
            raise MachineError(f"{self.path}: the event log is closed", help="records appended since then are lost")
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.close()  # later records would leave a gap
            raise _write_error(self.path, error) from error


class RecordedLog:
    """Reads a log from a file, or from several segments, record by record. It can be iterated repeatedly.

    After an iteration `cut` says where the file ended in the middle of a record; it is empty if it did not. InputError
    names the line of a record that cannot be read. `missing` says for which part of the run it can speak.
    """

    def __init__(self, path: Path, header: Header, files: Sequence[Path], missing: Sequence[str] = ()) -> None:
        self.path = path
        """As it was named: a file or a folder."""
        self.header = header
        """Of the first file."""
        self.files = files
        self.missing = tuple(missing)
        """What of the run is not in this log, as sentences; empty for a whole run."""
        self.cut = ""

    @property
    def is_whole(self) -> bool:
        """Whether the log begins with the run. Otherwise the state at its start is in `snapshot`."""
        return self.header.segment == 1

    @property
    def snapshot(self) -> bytes | None:
        """The snapshot with which the log begins, as JSON. None if it has none."""
        if not self.header.has_snapshot:
            return None
        where = f"{self.files[0]}:2"
        with opened(self.files[0]) as file:
            file.readline()
            line = file.readline()
        try:
            return zlib.decompress(msgspec.json.decode(line, type=_SnapshotLine).snapshot)
        except (msgspec.DecodeError, zlib.error) as error:
            raise InputError(f"the snapshot is damaged: {error}", where=where, help="name a later segment") from error

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        last_ns = -(2**63)
        self.cut = ""
        for path in self.files:
            for number, (now_ns, record) in self._records_in(path):
                if now_ns < last_ns:
                    raise InputError(
                        f"time goes back from {last_ns} to {now_ns} ns",
                        where=f"{path}:{number}",
                        help="a log holds the records of one run in order; do not concatenate or sort logs",
                    )
                last_ns = now_ns
                yield now_ns, record
            if self.cut:
                return

    def _records_in(self, path: Path) -> Iterator[tuple[int, tuple[int, Record]]]:
        """The records of one file, with the numbers of their lines."""
        decode = msgspec.json.Decoder(tuple[int, Record]).decode
        with opened(path) as file:
            first = 2 + _header_of(path, file.readline()).has_snapshot
            if first > 2:
                file.readline()
            number = first - 1
            while line := _line_of(path, file, number + 1):
                number += 1
                try:
                    found = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if not line.endswith(b"\n"):
                        self.cut = f"{path}:{number}: the last record is cut off and was ignored"
                        return
                    raise InputError(
                        f"not a record of a log: {error}: {_quoted(line)}",
                        where=f"{path}:{number}",
                        help="the file was changed or damaged; delete this line and all that follow to read the rest",
                    ) from error
                yield number, found


class _SnapshotLine(Struct, frozen=True):
    """The second line of a segment: a snapshot as JSON, compressed by zlib."""

    snapshot: bytes


def header_line(header: Header) -> bytes:
    """The first line of a file with this header."""
    fields: Mapping[str, Any] = msgspec.to_builtins(header)
    kept = {name: value for name, value in fields.items() if value != _DEFAULTS.get(name, msgspec.UNSET)}
    return msgspec.json.encode({"sloop_log": header.version} | kept) + b"\n"


def snapshot_line(snapshot: bytes) -> bytes:
    """The second line of a file whose header has `has_snapshot`. `snapshot` is JSON."""
    return msgspec.json.encode(_SnapshotLine(zlib.compress(snapshot, 1))) + b"\n"


def _segment_defaults() -> dict[str, Any]:
    whole: dict[str, Any] = msgspec.to_builtins(Header(origin="", name="", system=""))
    return {name: whole[name] for name in ("machine", "segment", "from_ns", "has_snapshot", "sample", "lost")}


_DEFAULTS: Final = _segment_defaults()
"""Fields that the header of a whole simulated run leaves out."""


def is_log(path: Path) -> bool:
    """Whether a path is a folder, or a file that begins as an event log does."""
    if path.is_dir():
        return True
    try:
        with opened(path) as file:
            return file.readline(len(_BEGIN)) == _BEGIN
    except (InputError, OSError, EOFError, zlib.error):
        return False


def read_log(path: Path) -> RecordedLog:
    """Open a log: a file, a segment, or a folder of segments. InputError, naming file and line, if it cannot be read,
    is not an event log, or has another version of the format.

    Of a folder, it reads the last run, from the first segment from which a reader can go on without a gap to the end.
    """
    if path.is_dir():
        return _read_folder(path)
    with opened(path) as file:
        header = _header_of(path, _line_of(path, file, 1))
    missing = [f"it is segment {header.segment} of a run: {_beginning(header)}"] if header.segment > 1 else []
    segment = segment_of(path)
    if segment is not None and any(each[:2] > segment[:2] and each.run == segment.run for each in _beside(path)):
        missing.append("later segments are in the same folder: name the folder to read them too")
    return RecordedLog(path, header, [path], [*missing, *_sampled(header)])


def _read_folder(path: Path) -> RecordedLog:
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    found = segments_in(folder)
    if not found:
        raise InputError(
            "there is no log in this folder",
            where=str(path),
            help="name the state folder of `sloop serve`, or an event log",
        )
    run = [segment for segment in found if segment.run == found[-1].run]
    headers = [_first_header(segment.path) for segment in run]
    if headers[-1] is None:  # the server has just begun it
        del headers[-1], run[-1]
    known = [header for header in headers if header is not None]
    if not known or len(known) < len(headers):
        raise InputError("its last segment has no header", where=str(run[0].path) if run else str(path), help=AGAIN)
    first = len(run) - 1
    while first and run[first - 1].number == run[first].number - 1 and known[first].lost is None:
        first -= 1
    whole = first
    while whole < len(run) and not (known[whole].segment == 1 or known[whole].has_snapshot):
        whole += 1
    first = whole if whole < len(run) else first
    header, missing = known[first], []
    if header.segment > 1:
        missing.append(_beginning(header))
        if first:
            missing.append(f"{counted(first, 'earlier segment')} of the run can be read by name, such as {run[0].path}")
    if run[0] is not found[0]:
        earlier = {segment.run: segment.path for segment in reversed(found) if segment.run != run[0].run}
        readable = [path for path in reversed(earlier.values()) if _is_readable(path)]
        if readable:
            missing.append(f"{counted(len(readable), 'earlier run')} can be read by name, such as {readable[0]}")
    return RecordedLog(path, header, [segment.path for segment in run[first:]], [*missing, *_sampled(header)])


AGAIN: Final = "record the run again"


def _beside(path: Path) -> list[LogSegment]:
    return segments_in(path.parent)


def _beginning(header: Header) -> str:
    """Why a log does not begin with its run."""
    since = f"the log begins {to_s(header.from_ns):,.3f} s after the start of the run"
    if header.lost is None:
        return f"{since}; what was before has been deleted, or is in earlier segments"
    lost = header.lost
    between = f"{to_s(lost.from_ns):,.3f} and {to_s(lost.until_ns):,.3f} s"
    return f"{since}; {counted(lost.records, 'record')} between {between} could not be written: {lost.why}"


def _sampled(header: Header) -> list[str]:
    if header.sample == 1.0:
        return []
    return [f"of the requests that were served in time, only {header.sample:.3%} are in the log, and all others"]


def _is_readable(path: Path) -> bool:
    """Whether a segment has a header of this format."""
    try:
        return _first_header(path) is not None
    except InputError:
        return False


def _first_header(path: Path) -> Header | None:
    """The header of a segment; None if it is cut off."""
    with opened(path) as file:
        line = _line_of(path, file, 1)
    return _header_of(path, line) if line.endswith(b"\n") else None


def _line_of(path: Path, file: BinaryIO, number: int) -> bytes:
    """The next line of a file, which may be compressed."""
    try:
        return file.readline()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        where = f"{path}:{number}"
        raise InputError(
            f"the compressed file is damaged: {error}", where=where, help="name another segment"
        ) from error


def _header_of(path: Path, line: bytes) -> Header:
    where = f"{path}:1"
    if not line.endswith(b"\n"):
        raise InputError(
            "the header is missing or cut off", where=where, help="the run stopped at its very start; run it again"
        )
    try:
        first = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_a_log(where, line) from error
    if not isinstance(first, dict) or "sloop_log" not in first:
        raise _not_a_log(where, line)
    version = first.pop("sloop_log")
    if version not in (VERSION, PARTIAL_VERSION):
        raise _other_version(version, _release_of(first), where)
    try:
        return msgspec.convert(first, Header)
    except msgspec.ValidationError as error:
        raise InputError(f"the header is damaged: {error}", where=where, help=AGAIN) from error


def older_log(folder: Path) -> str:
    """Which release reads the last log in a folder, as text; empty if this one does, if there is none, or if it is
    damaged or not for this user: a server begins a log of its own in any case."""
    last = max(segments_in(folder), default=None) if folder.is_dir() else None
    if last is None:
        return ""
    try:
        with opened(last.path) as file:
            first = msgspec.json.decode(file.readline())
    except (InputError, OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError):
        return ""
    version = first.get("sloop_log") if isinstance(first, dict) else None
    if not isinstance(version, int) or version >= VERSION:
        return ""
    return f"{last.path.name} and what is before it are logs of format {version}, which {_release_of(first)} reads"


def _release_of(header: Mapping[str, Any]) -> str:
    """The release that has written a log."""
    software = header.get("software")
    release = software.get("sloop") if isinstance(software, dict) else None
    if release == __version__:
        return f"an earlier build of sloop {release}"
    return f"sloop {release}" if release else "the release of sloop that has written it"


def _other_version(version: object, release: str, where: str) -> InputError:
    if isinstance(version, int) and version < VERSION:
        help_text = (
            "logs of older versions are not converted: record the run again (a simulation with the same scenario and "
            f"seed gives the same run), or read this log with {release}"
        )
    else:
        help_text = "a newer sloop has written it: upgrade sloop to read it"
    return InputError(
        f"event log of format version {version!r}; this sloop reads versions {VERSION} and {PARTIAL_VERSION}",
        where=where,
        help=help_text,
    )


def _not_a_log(where: str, line: bytes) -> InputError:
    return InputError(
        f"not an event log: it begins with {_quoted(line)}",
        where=where,
        help="event logs are written by `sloop simulate --log FILE`, and by `sloop serve` into its state folder",
    )


def _write_error(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path}: the event log cannot be written: {error.strerror}",
        help="name a file in an existing, writable folder with free space",
    )


def _quoted(line: bytes) -> str:
    return quoted(line[: 2 * QUOTED_CHARS_MAX].decode(errors="replace").rstrip("\n"))
