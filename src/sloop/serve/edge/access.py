"""The access log: a line of JSON for each answer, on request.

Lines are collected and written at once, at most four times a second, with a single call that never waits. If the disk
is full or the reader of a pipe is slow, lines are dropped and counted, and the next line that can be written says how
many. Several processes may append to one file, because each block of lines is one write.
"""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.errors import MachineError
from sloop.serve.private import NOBODY, close_log, open_log
from sloop.serve.stderr import Output
from sloop.units import NS_PER_MS

FLUSH_S: Final = 0.25
LINES_MAX: Final = 20_000
"""Lines that wait to be written; those beyond are dropped."""
PATH_CHARS_MAX: Final = 512
STDOUT: Final = "-"
_log: Final = logging.getLogger("sloop.edge")
FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class AccessLine(Struct, frozen=True, omit_defaults=True):
    """One answer."""

    time: float
    """Unix time, in seconds."""
    client: str
    """Its address."""
    protocol: str
    """`http` or `grpc`."""
    method: str
    path: str
    status: int
    """Of HTTP, or the code of gRPC."""
    ms: float
    """From the first byte of the request to the answer."""
    bytes_in: int = 0
    """Of the body."""
    bytes_out: int = 0
    request_id: str = ""
    """What the client calls the request."""


class DroppedLines(Struct, frozen=True):
    """Lines that could not be written before this one."""

    time: float
    dropped: int


class AccessLog:
    """Appends to the file at `path`, or writes to stdout if it is `-`. A new file may be read by its user and by
    `group`. MachineError if the file cannot be opened."""

    def __init__(self, path: str, group: int = NOBODY) -> None:
        self.path, self._group = path, group
        self.dropped = 0
        """Lines that were dropped, in all."""
        self._unsaid = 0
        """Those of them that the log does not mention yet."""
        self._lines: list[AccessLine] = []
        self._rest = b""
        """What is left of a block that was written in part."""
        self._timer: asyncio.TimerHandle | None = None
        self._encoder = msgspec.json.Encoder()
        self._stdout = Output(1)
        try:
            self._fd = self._open()
        except OSError as error:
            what = f"{path}: the access log cannot be written: {error.strerror}"
            raise MachineError(what, help="name a file in a folder that you may write, with --access-log") from error

    @classmethod
    def check(cls, path: str, group: int = NOBODY) -> None:
        """Errors as for the log itself. If there is a file at `path`, it is closed to others first."""
        if path != STDOUT:
            close_log(Path(path), group)
        cls(path, group).close()

    def _open(self) -> int:
        return _open_stdout() if self.path == STDOUT else open_log(self.path, FLAGS, self._group)

    def reopen(self) -> None:
        """Write to the file that has the name now, and make one if it was moved away: programs that rotate logs ask for
        that. If it cannot be opened, go on with the one before."""
        self.flush()
        if self.path == STDOUT:
            self._stdout.reopen()
        try:
            former, self._fd = self._fd, self._open()
        except OSError as error:
            _log.error(
                "%s cannot be opened anew, so the access log goes on in the old file: %s", self.path, error.strerror
            )
            return
        os.close(former)
        if self._rest:  # perhaps the end of a line whose beginning is in the file before
            self._rest = self._rest.partition(b"\n")[2]
            self._drop(1)

    def add(  # noqa: PLR0913  # the fields of a line
        self,
        protocol: str,
        client: str,
        method: str,
        path: str,
        status: int,
        *,
        began_ns: int,
        bytes_in: int = 0,
        bytes_out: int = 0,
        request_id: str = "",
    ) -> None:
        """Add a line for an answer that is given now. `began_ns` is when its request began (`time.monotonic_ns`). Call
        it in a running event loop."""
        if len(self._lines) >= LINES_MAX:
            self._drop(1)
            return
        took_ms = round((time.monotonic_ns() - began_ns) / NS_PER_MS, 3)
        self._lines.append(
            AccessLine(
                round(time.time(), 6),
                client,
                protocol,
                method,
                path[:PATH_CHARS_MAX],
                status,
                took_ms,
                bytes_in,
                bytes_out,
                request_id,
            )
        )
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what waits, as far as that is possible now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        said = [DroppedLines(round(time.time(), 6), self._unsaid)] if self._unsaid else []
        block = self._rest + self._encoder.encode_lines([*said, *lines])
        try:
            size = os.write(self._fd, block) if block else 0
        except OSError:  # full, or nobody reads
            size = 0
        if size <= len(self._rest) and lines:
            self._rest = self._rest[size:]
            self._drop(len(lines))
        else:
            self._rest = block[size:]
            self._unsaid = 0

    def close(self) -> None:
        """Write what waits and close the file."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unsaid += count


def _open_stdout() -> int:
    """Stdout, to be written to without waiting."""
    try:
        # A duplicate would share O_NONBLOCK with every program that has this pipe or terminal.
        return os.open("/proc/self/fd/1", FLAGS)
    except OSError:  # a socket, or another user's
        fd = os.dup(1)
        os.set_blocking(fd, False)
        return fd
