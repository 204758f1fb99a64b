"""The event log: the product of a run, live or simulated (law 7). Every number and every answer is a fold over it.

Promises that what is appended is read back equal and in order, that a file names what is needed to understand and to
replay it (its `Header`), and that a log cut short by a crash is read up to the cut. Knows no clock: instants and the
date are given. A file is JSON lines: the header, then one `[now_ns, record]` a line, records tagged by `type`.
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

VERSION: Final = 1
"""Of the file's format; raised when an old reader would misread a new file."""

RECORDS_PER_WRITE: Final = 1024
"""How many records a `FileLog` holds back at most: what a crash can cost, and what one write is worth."""

EVENTS: Final = get_args(Event)
ACTIONS: Final = get_args(Action)

Record = Event | Action


class Header(Struct, frozen=True, kw_only=True):
    """What a run was: enough to say where its numbers come from, and to build the same core again for a replay."""

    origin: str
    """`live` or `sim`."""
    application: dict[str, Any]
    """The application as it was declared, defaults filled in."""
    system: str
    parameters: dict[str, Any] = {}  # msgspec copies the empty dict for each instance
    """The system's parameters that differ from its published ones."""
    profiles: dict[str, Any] = {}
    """Per `stage/variant`, what was believed of its speed, each with its provenance."""
    seed: int | None = None
    """Of the simulated world; None for a live run."""
    software: dict[str, str] = {}
    """Versions of what ran: sloop, Python, the runtime."""
    date: str = ""
    """When the run began, as its caller says it (ISO 8601)."""


class Sink(Protocol):
    """Whatever wants to be told what happens: a log, a fold, or several of them."""

    def append(self, now_ns: int, record: Record) -> None:
        """Take one event or action; instants never decrease."""
        ...


class Recorder(Protocol):
    """Whatever wants to be told of a live run, an instant at a time."""

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Take the events and actions of one instant, in order; instants increase from call to call."""
        ...


class MemoryLog:
    """A log in memory: `records` is the list, in order."""

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
    """Hands every record to several sinks, in the order given."""

    def __init__(self, *sinks: Sink) -> None:
        self._appends = tuple(sink.append for sink in sinks)

    def append(self, now_ns: int, record: Record) -> None:
        for append in self._appends:
            append(now_ns, record)


class FileLog:
    """A log on disk, replacing what was there; holds back about `RECORDS_PER_WRITE` records at most until `flush`.

    Raises MachineError where the file cannot be written.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._held: list[tuple[int, Record]] = []
        try:
            self._file: BinaryIO = path.open("wb", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        self._write(self._encoder.encode({"sloop_log": VERSION} | msgspec.to_builtins(header)) + b"\n")

    def append(self, now_ns: int, record: Record) -> None:
        self.extend(now_ns, (record,))

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        self._held += [(now_ns, record) for record in records]
        if len(self._held) >= RECORDS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Hand what is held back to the operating system."""
        if self._held:
            lines = self._encoder.encode_lines(self._held)
            self._held.clear()
            self._write(lines)

    def close(self) -> None:
        """Flush and close; closing twice does no harm."""
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
            raise MachineError(f"{self.path}: the event log is closed", help="what was appended since then is lost")
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.close()  # what follows would leave a gap
            raise _unwritable(self.path, error) from error


class RecordedLog:
    """A log read from a file: `header`, and an iterator over its records that reads as it goes (any number of times).

    `cut` says after an iteration where the file stopped in the middle of a record, and is empty if it did not.
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
                        self.cut = f"{self.path}:{number}: the last record is cut; read up to the one before"
                        return
                    raise InputError(
                        f"not a record of a log: {error}: {_shown(line)}",
                        where=f"{self.path}:{number}",
                        help="the file was changed or damaged; cut it before this line to read what precedes it",
                    ) from error
                if now_ns < last_ns:
                    raise InputError(
                        f"time goes back from {last_ns} to {now_ns} ns",
                        where=f"{self.path}:{number}",
                        help="a log holds one run in order; do not join or sort logs",
                    )
                last_ns = now_ns
                yield now_ns, record


def read_log(path: Path) -> RecordedLog:
    """The log in `path`. Raises InputError naming file and line where it cannot be read or is no log of ours."""
    with _open(path) as file:
        line = file.readline()
    where = f"{path}:1"
    if not line.endswith(b"\n"):
        raise InputError(
            "the header is missing or cut", where=where, help="the run ended before it began; run it again"
        )
    try:
        first = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_log(where, line) from error
    if not isinstance(first, dict) or "sloop_log" not in first:
        raise _no_log(where, line)
    version = first.pop("sloop_log")
    if version != VERSION:
        raise InputError(
            f"log format {version!r} is unknown; this sloop reads format {VERSION}",
            where=where,
            help="read it with the sloop that wrote it, or record the run again",
        )
    try:
        return RecordedLog(path, msgspec.convert(first, Header))
    except msgspec.ValidationError as error:
        raise InputError(f"the header is damaged: {error}", where=where, help="record the run again") from error


def _open(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, path.open("rb"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), help="name an event log") from error


def _no_log(where: str, line: bytes) -> InputError:
    return InputError(
        f"not an event log: it begins with {_shown(line)}",
        where=where,
        help="event logs are written by `sloop simulate --log FILE`, and by `sloop serve` into its state folder",
    )


def _unwritable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{path}: the event log cannot be written: {error.strerror}",
        help="name a file in a folder that exists, may be written and has room",
    )


def _shown(line: bytes) -> str:
    text = line[:60].decode(errors="replace").rstrip("\n")
    return repr(text if len(line) <= 60 else text + "…")
