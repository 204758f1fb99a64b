"""The cost of a batch to a worker and back: µs in addition to the forward pass, and CPU of the deciding process.

    python -m benchmarks.transport

The model returns its input and takes no time: what remains is framing, sockets, copies in the worker, and two processes
that wake each other. Inputs of some KiB and more are in shared memory, as an edge would have written them.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

import uvloop

from benchmarks.notebook import arguments, publish, table
from sloop.actions import StartWorker
from sloop.events import Event, Finished, WorkerReady
from sloop.serve.blocks import ARENA_BYTES, Block, write_block
from sloop.serve.cpu_quota import detect
from sloop.serve.messages import Run
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import Port, Signature, Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import alone

ECHO = Signature((Port("x", "FP32", (-1, -1)),), (Port("x", "FP32", (-1, -1)),))
REPLICA = ReplicaId(0)
CASES = ((16, 1, 3000), (4096, 1, 3000), (16, 32, 3000), (602_112, 1, 500), (602_112, 8, 100))
"""Bytes of a request's tensor (602,112: an image of 224 × 224 in FP32), requests per batch, batches."""


class Round:
    """Sends a batch as soon as the one before has come back."""

    def __init__(self, backend: LiveNode, arenas: Arenas, batch: Run, count: int) -> None:
        self._backend, self._arenas, self._batch, self._count = backend, arenas, batch, count
        self._sent_ns = 0
        self.overheads_us: list[float] = []
        self.done = asyncio.Event()

    def on_event(self, event: Event) -> None:
        if isinstance(event, WorkerReady):
            self._send()

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        raise RuntimeError(failure.summary)

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        for block in blocks:
            if isinstance(block, Address):
                self._arenas.free(block)
        self.overheads_us.append((time.perf_counter_ns() - self._sent_ns) / 1e3)
        if len(self.overheads_us) == self._count:
            self.done.set()
        else:
            self._send()

    def _send(self) -> None:
        self._sent_ns = time.perf_counter_ns()
        self._backend.run(BatchId(len(self.overheads_us)), REPLICA, self._batch)


async def measure(size_bytes: int, requests: int, count: int) -> tuple[int, ...]:
    """Bytes, requests, median and P99 of a batch's time in addition to the forward pass, and the server's CPU, in
    µs."""
    arenas = Arenas()
    backend = LiveNode(
        {("s", "v"): Servable("fake:sleep:0:0", ECHO)}, {"s": alone("s", ECHO)}, detect().actuator, arenas=arenas
    )
    held = arenas.make(ARENA_BYTES, lambda _: None)
    arena = Arena(held.number, held.fd)
    blocks = [write_block([Tensor("FP32", (1, size_bytes // 4), bytes(size_bytes))], arena) for _ in range(requests)]
    echo = Round(backend, arenas, Run(requests, list(blocks)), count)
    backend.attach(echo)
    before_s = time.process_time()
    backend.order(StartWorker(REPLICA, ReplicaSpec("s", "v", Slot(1.0))))
    await echo.done.wait()
    cpu_us = (time.process_time() - before_s) / count * 1e6
    await backend.close()
    found = sorted(echo.overheads_us)
    return size_bytes, requests, round(found[count // 2]), round(found[int(count * 0.99)]), round(cpu_us)


def main() -> None:
    given = arguments(__doc__).parse_args()
    rows = [uvloop.run(measure(*case)) for case in CASES]
    columns = ("bytes of a request", "requests in the batch", "p50 µs", "p99 µs", "server's CPU, µs")
    text = "A model that echoes at once: what is left is frames, sockets and two processes waking each other.\n\n"
    publish("transport", "A batch's way to a worker and back", text + table(columns, rows), write=not given.no_write)


if __name__ == "__main__":
    main()
