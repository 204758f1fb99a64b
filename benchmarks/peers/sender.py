"""The sending process: the loops of `sloop.load` with a peer's request head. `load` starts it with a folder."""

import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from benchmarks.peers.load import BODY, ORDERS, SenderOptions
from sloop.load.connections import RequestHead, Server
from sloop.load.results import RecordWriter
from sloop.load.sender import (
    NICENESS,
    RECORDS,
    SendProgress,
    Target,
    allowed_connections,
    open_schedule,
    send_closed,
    send_open,
)

CONNECTIONS_MAX = 4_096


class FixedHead(RequestHead):
    """The same head for all requests."""

    __slots__ = ("_whole",)

    def __init__(self, whole: str) -> None:
        self._whole = whole.encode("ascii")

    def render(self, elapsed_ns: int) -> bytes:
        return self._whole


def main(folder: Path) -> None:
    """Send the load described in `folder`, and write the records there."""
    orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=SenderOptions)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    gc.freeze()
    gc.disable()
    target = Target(
        server=Server("127.0.0.1", orders.port, mark=b""),
        heads=[FixedHead(orders.head)],
        bodies=[(folder / BODY).read_bytes()],
        connections_max=allowed_connections(CONNECTIONS_MAX),
        warm_connections=orders.connections,
        timeout_ns=orders.timeout_ns,
    )
    with (folder / RECORDS).open("wb", buffering=0) as file:
        records = RecordWriter(file)
        if orders.end_ns:
            width, end_ns = orders.connections, orders.end_ns
            uvloop.run(send_closed(target, records, _quiet, connections=width, warmup_ns=0, end_ns=end_ns))
        else:
            uvloop.run(send_open(target, open_schedule(folder), records, _quiet))
        records.flush()


def _quiet(progress: SendProgress) -> None:
    """Ignore progress."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
