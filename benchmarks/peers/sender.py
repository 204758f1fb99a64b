"""The sending process: the open loop of `sloop.load` with a peer's request head, and a closed loop. `load` starts it
with a folder."""

import asyncio
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from benchmarks.peers.load import BODY, ORDERS, SenderOptions
from sloop.load.connections import Outgoing, RequestHead, Response, Server
from sloop.load.results import Ending, RecordWriter
from sloop.load.sender import (
    NICENESS,
    RECORDS,
    Alarm,
    SendingRun,
    SendProgress,
    Target,
    allowed_connections,
    open_schedule,
    send_open,
)

CONNECTIONS_MAX = 4_096
RETRY_S = 0.1
"""Before a server that cannot be reached is tried again."""


class FixedHead(RequestHead):
    """The same head for all requests."""

    __slots__ = ("_whole",)

    def __init__(self, whole: str) -> None:
        self._whole = whole.encode("ascii")

    def render(self, elapsed_ns: int) -> bytes:
        return self._whole


class ClosedLoop(SendingRun):
    """Each connection sends its next request when it has received an answer."""

    def __init__(self, target: Target, records: RecordWriter, *, connections: int, end_ns: int) -> None:
        super().__init__(target, records, _quiet)
        self._width, self._end_ns = connections, end_ns
        self._timer = Alarm(asyncio.get_running_loop(), self.finished.set)

    async def run(self) -> None:
        """Send until `end_ns`."""
        await self.warm(self._width)
        self._timer.set(self.start_ns + self._end_ns)
        for _ in range(self._width):
            self._send_next()
        try:
            await self.watch()
        finally:
            self._timer.close()
            self.connections.close()

    def _send_next(self) -> None:
        outgoing = self.outgoing(self.progress.sent, 0)
        self.progress.sent += 1
        self.connections.send(outgoing)

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Response | None) -> None:
        """Record an answer within the time, and send the next request."""
        if self.finished.is_set():
            return  # the run ended before the answer; not the server's fault
        super().report(outgoing, done_ns, ending, answer)
        pause_s = RETRY_S if ending == Ending.UNREACHABLE else 0.0
        asyncio.get_running_loop().call_later(pause_s, self._send_next)


async def send_closed(target: Target, records: RecordWriter, *, connections: int, end_ns: int) -> None:
    """Keep `connections` requests in flight from 0 to `end_ns`."""
    await ClosedLoop(target, records, connections=connections, end_ns=end_ns).run()


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
            uvloop.run(send_closed(target, records, connections=orders.connections, end_ns=orders.end_ns))
        else:
            uvloop.run(send_open(target, open_schedule(folder), records, _quiet))
        records.flush()


def _quiet(progress: SendProgress) -> None:
    """Ignore progress."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
