"""The server's folder on disk: one server at a time, and the event log, bounded.

Promises that a second server on the same folder is refused with the first one's process id, and that the log never
grows beyond its bound or takes the server down. The lock is the kernel's: it goes with the process, however that ends.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sloop.errors import MachineError
from sloop.runlog import FileLog, Header, Record

LOCK: Final = "lock"
EVENTS: Final = "events.jsonl"
EARLIER: Final = "events.previous.jsonl"

_log: Final = logging.getLogger("sloop.server")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold `folder`, which is made if need be, for this server alone. Raises `MachineError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise MachineError(
            f"{folder}: the state folder cannot be used: {error.strerror}",
            help="name a folder that you may write, with --state",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise MachineError(
                f"{folder}: another server (process {holder}) uses this state folder",
                help="stop it, or give this server a folder of its own with --state",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield folder


class Journal:
    """The event log on disk, the previous run's kept beside it. Stops recording at `bytes_max` rather than fill a disk.

    `flush` is to be called about every second: it is what a crash can cost.
    """

    def __init__(self, folder: Path, header: Header, *, bytes_max: int) -> None:
        self.path = folder / EVENTS
        self._bytes_max = bytes_max
        with contextlib.suppress(OSError):
            self.path.replace(folder / EARLIER)
        self._file: FileLog | None = FileLog(self.path, header)

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Take the events and actions of one instant."""
        if self._file is not None:
            try:
                self._file.extend(now_ns, records)
            except MachineError as error:
                self._stop(str(error))

    def flush(self) -> None:
        """Write what is held back, and look how much there is."""
        if self._file is None:
            return
        try:
            self._file.flush()
            size = self.path.stat().st_size
        except (MachineError, OSError) as error:
            self._stop(str(error))
            return
        if size > self._bytes_max:
            self._stop(f"{self.path} has reached its bound of {self._bytes_max} bytes")

    def close(self) -> None:
        """Write what is held back; closing twice does no harm."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _stop(self, why: str) -> None:
        _log.warning("serving goes on, its event log does not: %s", why)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(MachineError):
                file.close()
