"""What the sending process is told, and what it tells: files in one folder and lines of JSON.

Promises that the sender needs nothing but this folder: no trace, no metadata, no numpy. `orders.json` holds `Orders`,
`schedule.bin` pairs of int64 (due, elapsed) in ns, `body-K.bin` the bodies; `records.bin` comes back. On its standard
output the sender writes one `Told` a line.
"""

import mmap
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.load.payload import Body

SCHEDULE: Final = "schedule.bin"
RECORDS: Final = "records.bin"
ORDERS: Final = "orders.json"


class Closed(msgspec.Struct, frozen=True):
    """A closed loop instead of a schedule."""

    connections: int
    warmup_ns: int
    end_ns: int


class Orders(msgspec.Struct, frozen=True):
    """One run, as the sender sees it."""

    host: str
    port: int
    tls: bool
    path: str
    authority: str
    """The `host` field of requests."""
    slo_ms: float
    json_bytes: tuple[int, ...]
    """Length of the JSON part of each body."""
    connections_max: int
    warm_connections: int
    timeout_ns: int
    cpus: tuple[int, ...]
    closed: Closed | None = None


class Told(msgspec.Struct, frozen=True):
    """The sender's progress, or at last its end; `error` if it could not go on."""

    at_s: float = 0.0
    sent: int = 0
    ended: int = 0
    connections: int = 0
    finished: bool = False
    error: str = ""


def write_orders(folder: Path, orders: Orders, bodies: list[Body], schedule: NDArray[np.int64] | None) -> None:
    """Leave everything for the sender in `folder`; `schedule` has two columns, due and elapsed, sorted by due."""
    (folder / ORDERS).write_bytes(msgspec.json.encode(orders))
    for place, body in enumerate(bodies):
        (folder / f"body-{place}.bin").write_bytes(body.content)
    if schedule is not None:
        schedule.tofile(folder / SCHEDULE)


def read_orders(folder: Path) -> tuple[Orders, list[bytes]]:
    """The orders and the bodies."""
    orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
    return orders, [(folder / f"body-{place}.bin").read_bytes() for place in range(len(orders.json_bytes))]


def open_schedule(folder: Path) -> "memoryview[int]":
    """The schedule, mapped rather than read, so that ten million requests cost no memory of their own."""
    path = folder / SCHEDULE
    if path.stat().st_size == 0:
        return memoryview(b"").cast("q")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")
