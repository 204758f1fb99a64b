"""What happened to each request, as the sending process writes it down: fixed-size records in a file.

Promises that the sender spends well under a microsecond on a record and no memory that grows. Times are ns from the
start of the run. The reading side gets a numpy array with named fields.
"""

import struct
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray


class Ending(IntEnum):
    """How a request ended as the client saw it."""

    ANSWERED = 0
    TIMEOUT = 1
    DISCONNECTED = 2
    """The connection closed before the answer was complete."""
    UNREACHABLE = 3
    """No connection could be made."""
    BROKEN = 4
    """The answer was not HTTP, or a 200 without outputs."""
    OVERFLOW = 5
    """All connections allowed were busy when it was due."""


LAYOUT: Final = struct.Struct("<qqqhbb4x")
DTYPE: Final = np.dtype(
    {
        "names": ["number", "sent_ns", "done_ns", "status", "ending", "slo_met"],
        "formats": ["<i8", "<i8", "<i8", "<i2", "<i1", "<i1"],
        "offsets": [0, 8, 16, 24, 26, 27],
        "itemsize": LAYOUT.size,
    }
)
"""`number` is the request's place in the schedule; `slo_met` is 1, 0, or -1 where the server did not say."""

BUFFER_BYTES: Final = LAYOUT.size * 4_096


class RecordWriter:
    """Appends records to a file by the bufferful."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffer = bytearray(BUFFER_BYTES)
        self._used = 0
        self.written = 0

    def write(self, number: int, sent_ns: int, done_ns: int, status: int, ending: int, slo_met: int) -> None:
        LAYOUT.pack_into(self._buffer, self._used, number, sent_ns, done_ns, status, ending, slo_met)
        self._used += LAYOUT.size
        self.written += 1
        if self._used == BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        self._file.write(memoryview(self._buffer)[: self._used])
        self._used = 0


def read_records(path: Path) -> NDArray[Any]:
    """The records of a finished run, in the order they ended."""
    return np.fromfile(path, dtype=DTYPE)
