"""What a server and its processes write to stderr: the log, tracebacks, what models print. Writing never
waits for a slow or absent reader.

A pipe takes 64 KiB. If nobody reads it, whoever writes to it stops; and O_NONBLOCK would hold for all programs that
share the terminal or pipe. So a thread of the deciding process writes, and what waits for it has a bound: lines beyond
it are dropped, and a line in their place says how many. Each of the other processes has a pipe of its own as its stdout
and stderr, which the deciding process always reads. So what a model prints may be dropped, but stops no worker.

What clients can cause thousands of times a second is bounded as well: beyond `REPEATS_MAX`, lines of one kind are left
out. So is what a process prints: a model that prints a line for each request would fill the disk with them.
"""

import logging
import os
import select
import selectors
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

LOG_FORMAT: Final = "%(asctime)s %(name)s %(levelname)s %(message)s"
WAITING_BYTES_MAX: Final = 2**20
"""What may wait to be written. Processes other than the deciding one may use half of it."""
CHUNK_BYTES: Final = 2**16
"""Read from a process at a time; also the longest line that is not divided."""
PAUSE_S: Final = 0.005
"""Before a process is read, so that the lines of a traceback come together, with no others between them, and a process
that prints without end costs the deciding process little."""
FLUSH_S_MAX: Final = 1.0
REPEATS_MAX: Final = 200
TRACES_MAX: Final = 5
"""Lines of one kind that are written in `REPEATS_S`; with a traceback, fewer."""
REPEATS_S: Final = 10.0
PRINTED_LINES_MAX: Final = 1_000
PRINTED_BYTES_MAX: Final = 2**20
"""Of what one process prints in `REPEATS_S`."""
LAST_BYTES: Final = 2**13
"""Of what was left out, so much is written when the process ends: it may say why."""
KINDS_MAX: Final = 256
"""Kinds that are told apart; all others count as one."""
DROPPED: Final = "%d lines were dropped here, because they were not read fast enough"

Write = Callable[[bytes], None]
_log: Final = logging.getLogger("sloop.stderr")


class StderrWriter:
    """Writes to a file descriptor in a thread. All methods may be called from any thread."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self.dropped = 0
        """Lines that were dropped, in all."""
        self.copy_fd = -1
        """A non-blocking descriptor that gets a copy of what is written, as far as it is read; -1 for none."""
        self._waiting: deque[bytes | int] = deque()
        """Lines, and the numbers of those that were dropped between them."""
        self._waiting_bytes = 0
        """Of what waits and of what is being written."""
        self._is_writing = self._is_closed = False
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        """Held from reading what a process has printed until it waits to be written."""
        self._children: selectors.BaseSelector | None = None
        threading.Thread(target=self._write_for_ever, name="stderr", daemon=True).start()

    def write(self, lines: bytes, bytes_max: int = WAITING_BYTES_MAX) -> None:
        """Write lines soon, or drop them if more than `bytes_max` would wait then."""
        with self._changed:
            if self._waiting_bytes + len(lines) > bytes_max:
                count = lines.count(b"\n")
                self.dropped += count
                last = self._waiting[-1] if self._waiting else b""
                if isinstance(last, int):
                    self._waiting[-1] = last + count
                else:
                    self._waiting.append(count)
            else:
                self._waiting.append(lines)
                self._waiting_bytes += len(lines)
            self._changed.notify_all()

    def pipe(self) -> int:
        """The writing end of a pipe for a process, whose output is passed on until the process ends. Close it when the
        process has it. Raises `OSError`."""
        reading, writing = os.pipe()
        with self._reading:
            if self._children is None:
                self._children = children = selectors.DefaultSelector()
                threading.Thread(target=self._relay_for_ever, args=(children,), name="output", daemon=True).start()
            self._children.register(reading, selectors.EVENT_READ, _Printed())
        return writing

    def flush(self, within_s: float = FLUSH_S_MAX) -> None:
        """Wait until all that processes have printed is written, but no longer than `within_s`."""
        until_s = time.monotonic() + within_s
        while self._is_printed() and time.monotonic() < until_s:
            time.sleep(PAUSE_S)
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._waiting or self._is_writing), max(0.0, until_s - time.monotonic())
            )

    def close(self) -> None:
        """Write what is left, for a bounded time, and end."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_printed(self) -> bool:
        """Whether a process has printed what is not yet read, or its end is not yet seen."""
        if self._children is None:
            return False
        poll = select.poll()
        with self._reading:
            for key in list((self._children.get_map() or {}).values()):
                poll.register(key.fd, select.POLLIN)
            return any(event & (select.POLLIN | select.POLLHUP) for _, event in poll.poll(0))

    # The thread that writes

    def _write_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                waiting = list(self._waiting)
                self._waiting.clear()
                self._is_writing = True
            size = sum(len(each) for each in waiting if isinstance(each, bytes))
            lines = b"".join(each if isinstance(each, bytes) else _notice(DROPPED, each) for each in waiting)
            if self.copy_fd >= 0:
                with suppress(OSError):  # nobody reads it now
                    os.write(self.copy_fd, lines)
            try:
                self._write_all(lines)
            except OSError:  # nobody will read it: the pipe is closed, or the disk is full
                with self._changed:
                    self.dropped += sum(each.count(b"\n") for each in waiting if isinstance(each, bytes))
            with self._changed:
                self._waiting_bytes -= size
                self._is_writing = False
                self._changed.notify_all()

    def _write_all(self, lines: bytes) -> None:
        rest = memoryview(lines)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest[:CHUNK_BYTES]) :]
            except BlockingIOError:  # another program has made the pipe or terminal non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()

    # The thread that reads

    def _relay_for_ever(self, children: selectors.BaseSelector) -> None:
        while True:
            children.select()
            time.sleep(PAUSE_S)
            with self._reading:
                for key, _ in children.select(0):
                    self._relay(children, key.fd, key.data)

    def _relay(self, children: selectors.BaseSelector, fd: int, printed: "_Printed") -> None:
        """Pass on whole lines of a process, and keep the rest."""
        found, tail = os.read(fd, CHUNK_BYTES), printed.rest
        tail += found
        end = tail.rfind(b"\n") + 1
        if not found:
            children.unregister(fd)
            os.close(fd)
            if tail:
                tail += b"\n"
            end = len(tail)
        elif len(tail) - end > CHUNK_BYTES:
            end = len(tail)
        lines = printed.bounded(bytes(tail[:end]), time.monotonic()) if end else b""
        del tail[:end]
        lines += b"" if found else printed.end()
        if lines:
            self.write(lines, WAITING_BYTES_MAX // 2)


class Output:
    """A descriptor such as stdout, which may be that of a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = _file_of(fd)

    def reopen(self) -> None:
        """If the file was moved away, let the descriptor be that of a new one of its name: programs that rotate logs
        ask for that. If it cannot be opened, go on with the one before."""
        if self._file is None:
            return
        with suppress(OSError):
            found, own = self._file.stat(), os.fstat(self._fd)
            if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino):
                return
        try:
            mode = stat.S_IMODE(os.fstat(self._fd).st_mode)
            opened = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        except OSError as error:
            _log.error(
                "%s cannot be opened anew, so what is printed goes on in the old file: %s", self._file, error.strerror
            )
            return
        os.dup2(opened, self._fd)
        os.close(opened)


class _Printed:
    """What a process prints."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The beginning of a line."""
        self._began_s = 0.0
        self._lines = self._bytes = 0
        """What may still be written until `REPEATS_S` after that."""
        self._left_out = 0
        self._last = b""

    def bounded(self, lines: bytes, now_s: float) -> bytes:
        """What is written when the process has printed these lines: they, as far as the bound allows, and how many were
        left out before."""
        said = b""
        if now_s - self._began_s >= REPEATS_S or not self._began_s:
            said, self._last = self._count(), b""
            self._began_s, self._lines, self._bytes = now_s, PRINTED_LINES_MAX, PRINTED_BYTES_MAX
        count = lines.count(b"\n")
        if count <= self._lines and len(lines) <= self._bytes:
            self._lines -= count
            self._bytes -= len(lines)
            return said + lines
        allowed = lines[: self._bytes]
        kept = allowed[: len(allowed) - len(allowed.split(b"\n", self._lines)[-1])]
        rest = lines[len(kept) :]
        self._lines = self._bytes = 0
        self._left_out += max(1, rest.count(b"\n"))
        self._last = (self._last + rest)[-LAST_BYTES:]
        return said + kept

    def end(self) -> bytes:
        """What is written when the process has ended: how many lines were left out, and the last of them."""
        whole = self._last.partition(b"\n")[2] if len(self._last) == LAST_BYTES else self._last
        return self._count() + whole

    def _count(self) -> bytes:
        what = "%d more lines that a process printed were left out; in %g s, at most %d are written"
        left_out, self._left_out = self._left_out, 0
        return _notice(what, left_out, REPEATS_S, PRINTED_LINES_MAX) if left_out else b""


class StderrLog(logging.Handler):
    """Formats records as `LOG_FORMAT` says and passes them to `write`: in `REPEATS_S`, at most `REPEATS_MAX` of one
    kind, or `TRACES_MAX` if they have a traceback, and then how many were left out. The logger and the text before its
    values are filled in make a kind."""

    def __init__(self, write: Write, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(LOG_FORMAT))
        self._write, self._clock = write, clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """By kind, when its first line was written, and how many there have been since."""
        self._left_out: dict[tuple[str, str], logging.LogRecord] = {}
        """The first that was left out of each kind."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            if self._has_room(record):
                self._write(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Say what was left out until now."""
        with self.lock or nullcontext():
            for kind in list(self._left_out):
                self._forget(kind)

    def _has_room(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        for kind in [kind for kind in self._left_out if now_s - self._kinds[kind][0] >= REPEATS_S]:
            self._forget(kind)
        kind = record.name, str(record.msg)
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._kinds = {key: own for key, own in self._kinds.items() if now_s - own[0] < REPEATS_S}
            kind = kind if len(self._kinds) < KINDS_MAX else ("", "")
        began_s, count = self._kinds.get(kind, (now_s, 0))
        if now_s - began_s >= REPEATS_S:
            began_s, count = now_s, 0
        self._kinds[kind] = began_s, count + 1
        if count < (TRACES_MAX if record.exc_info else REPEATS_MAX):
            return True
        self._left_out.setdefault(kind, record)
        return False

    def _forget(self, kind: tuple[str, str]) -> None:
        record = self._left_out.pop(kind)
        _, count = self._kinds.pop(kind)
        left_out = count - (TRACES_MAX if record.exc_info else REPEATS_MAX)
        self._write(_notice("%d more lines were left out, such as: %.200s", left_out, record.getMessage()))


def _notice(text: str, *values: object) -> bytes:
    """A line about the log itself."""
    record = logging.LogRecord("sloop.stderr", logging.WARNING, __file__, 0, text, values, None)
    return f"{_FORMATTER.format(record)}\n".encode("utf-8", "backslashreplace")


_FORMATTER: Final = logging.Formatter(LOG_FORMAT)
_writers: Final[list[StderrWriter]] = []
_outputs: Final[list[Output]] = []
"""That of this process, if it has one."""


@contextmanager
def never_waiting() -> Iterator[StderrWriter]:
    """In the deciding process: log to stderr, and pass on what the processes that it starts print, without waiting for
    who reads it. At the end, what is left is written, for a bounded time."""
    writer = StderrWriter()
    log = StderrLog(writer.write)
    logging.basicConfig(level=logging.INFO, handlers=[log])
    _writers.append(writer)
    _outputs.extend((Output(1), Output(2)))
    try:
        yield writer
    finally:
        log.flush()
        _writers.remove(writer)
        _outputs.clear()
        logging.getLogger().removeHandler(log)
        writer.close()


def log_directly(level: int = logging.INFO) -> None:
    """In a process that the deciding process has started: log to stderr, which is always read."""
    logging.basicConfig(level=level, handlers=[StderrLog(_write_now)])


def copied_output() -> int:
    """The reading end of a pipe with a copy of what this process writes to stderr from now on. What is not read in time
    is left out there. Raises `OSError`."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for writer in _writers:
        writer.copy_fd = writing
    return reading


def pipe_of_child() -> int | None:
    """The writing end of a pipe for the output of a process that is about to be started; None if it may have the stderr
    of this process. Raises `OSError`."""
    return _writers[-1].pipe() if _writers else None


def reopen_outputs() -> None:
    """See `Output.reopen`, for stdout and stderr of this process, and of those that it starts later."""
    for output in _outputs:
        output.reopen()


def lines_dropped() -> int:
    """Lines that this process has not passed on to stderr."""
    return sum(writer.dropped for writer in _writers)


def _file_of(fd: int) -> Path | None:
    """The file to which a descriptor writes; None if that is a pipe or a terminal."""
    try:
        return Path(f"/proc/self/fd/{fd}").readlink() if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None


def _write_now(lines: bytes) -> None:
    rest = memoryview(lines)
    while rest:
        rest = rest[os.write(2, rest) :]
