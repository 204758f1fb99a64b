"""The event log of a run, live or simulated: all events and actions, and the file format.

A file is JSON lines: the header, then one `[now_ns, record]` per line, where a record is an event or an action, tagged
by `type`. Records are read back equal and in order. The header has everything needed to understand and replay the run.
A log that a crash has cut short is read up to the cut. Every figure of a run is computed from these records (see
`runlog.fold`). The caller provides instants and dates.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Protocol, Self, cast, get_args

import msgspec
from msgspec import Struct

from sloop.actions import Action
from sloop.errors import InputError, MachineError
from sloop.events import Event
from sloop.text import QUOTED_CHARS_MAX, quoted
from sloop.vocabulary import Node

VERSION: Final = 3
"""Version of the file's format, raised when an old reader would misread a new file, or a new one an old file.

2: `finished` has `edge_counts` and `faults` (was `ways`, with a negative number for a fault).
3: replicas have slots (were cores); several applications, in versions; nodes come and go; records omit defaults.
"""

RECORDS_PER_WRITE: Final = 1024
"""How many records a `FileLog` buffers, which a crash loses. Unbuffered writes would cost a system call per record. A
server also flushes every second."""

EVENTS: Final = get_args(Event)
ACTIONS: Final = get_args(Action)

Record = Event | Action


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
    assumed_starts: dict[str, str] = {}
    """Per `stage/variant` (` on KIND`, if the cluster has several kinds), the cold start that the simulator assumed
    because it was neither measured nor declared."""


class Sink(Protocol):
    """Receives the records of a run one by one. Logs and folds are sinks."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one event or action; instants never decrease."""
        ...


class Recorder(Protocol):
    """Receives the records of a live run, one instant per call."""

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Add the events and actions of one instant, in order; instants increase from call to call."""
        ...


class MemoryLog:
    """A log in memory: `records` is a list, in order."""

    def __init__(self) -> None:
        self.records: list[tuple[int, Record]] = []

    def append(self, now_ns: int, record: Record) -> None:
        self.records.append((now_ns, record))

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        self.records += [(now_ns, record) for record in records]

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


class Tee:
    """Passes every record to several sinks, in the order given."""

    def __init__(self, *sinks: Sink) -> None:
        self._appends = tuple(sink.append for sink in sinks)

    def append(self, now_ns: int, record: Record) -> None:
        for append in self._appends:
            append(now_ns, record)


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
        self._write(self._encoder.encode({"sloop_log": VERSION} | msgspec.to_builtins(header)) + b"\n")

    def append(self, now_ns: int, record: Record) -> None:
        self.extend(now_ns, (record,))

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        self._buffer += [(now_ns, record) for record in records]
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
    """Reads a log from a file, record by record. It can be iterated repeatedly.

    After an iteration `cut` says where the file ended in the middle of a record; it is empty if it did not. InputError
    names the line of a record that cannot be read.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self.cut = ""

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        decode = msgspec.json.Decoder(tuple[int, Record]).decode
        last_ns = -(2**63)
        self.cut = ""
        with _open(self.path) as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                try:
                    now_ns, record = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if not line.endswith(b"\n"):
                        self.cut = f"{self.path}:{number}: the last record is cut off and was ignored"
                        return
                    raise InputError(
                        f"not a record of a log: {error}: {_quoted(line)}",
                        where=f"{self.path}:{number}",
                        help="the file was changed or damaged; delete this line and all that follow to read the rest",
                    ) from error
                if now_ns < last_ns:
                    raise InputError(
                        f"time goes back from {last_ns} to {now_ns} ns",
                        where=f"{self.path}:{number}",
                        help="a log holds the records of one run in order; do not concatenate or sort logs",
                    )
                last_ns = now_ns
                yield now_ns, record


def read_log(path: Path) -> RecordedLog:
    """Open the log in `path`. InputError, naming file and line, if it cannot be read, is not an event log, or has
    another version of the format."""
    with _open(path) as file:
        line = file.readline()
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
    if version != VERSION:
        raise _other_version(version, where)
    try:
        return RecordedLog(path, msgspec.convert(first, Header))
    except msgspec.ValidationError as error:
        raise InputError(f"the header is damaged: {error}", where=where, help="record the run again") from error


def _open(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, path.open("rb"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), help="name an event log") from error


def _other_version(version: object, where: str) -> InputError:
    if isinstance(version, int) and version < VERSION:
        help_text = (
            "logs of older versions are not converted: record the run again (a simulation with the same scenario and "
            "seed gives the same run), or read this log with the release of sloop that is named in its header"
        )
    else:
        help_text = "a newer sloop has written it: upgrade sloop to read it"
    return InputError(
        f"event log of format version {version!r}; this sloop reads version {VERSION}", where=where, help=help_text
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
