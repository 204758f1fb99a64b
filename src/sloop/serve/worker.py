"""The worker process: it serves one replica, reading batches from its socket, running the model and sending the
outputs.

A backend starts it as `python -m sloop.serve.worker FD PARENT MODEL THREADS PREPARED SHARED`. It never outlives the
server (`processes`), answers each batch once, reuses the
memory of its inputs, and exits with a message when it receives a malformed frame.

A resize sets the thread count of the following batches. Sessions for other thread counts are opened in the background;
until one is ready, batches run on the nearest count. If the machine cannot enforce a fraction of a core, the worker
enforces it with a duty cycle: after computing for t it sleeps for t·(1/duty − 1).
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from sloop.errors import SloopError
from sloop.serve.processes import begin
from sloop.serve.runtimes import THREAD_COUNTS_MAX, Array, Runtime, open_runtime
from sloop.serve.transport import FrameKind, Head, ProcessChannel, ProtocolError, TensorLayout, pack_table, unpack_table
from sloop.shared_memory import ALIGNMENT, SharedMemory, offsets
from sloop.tensor import NUMPY_TYPES, arrays_at, bytes_of

STEPS: Final = ("spawning", "fetching", "loading", "warming")
"""The steps of a cold start. The `subject` of a STEP frame is an index into this tuple."""

MILLIONTHS: Final = 1_000_000
DATATYPE_OF: Final = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class InputMemory:
    """Memory for a batch's inputs: either memory of its own, grown to the largest batch so far, or memory that is
    shared with the server."""

    def __init__(self, shared: SharedMemory | None = None) -> None:
        self._memory = np.empty(0, np.uint8)
        self._shared = shared

    def allocate(self, layouts: Sequence[TensorLayout]) -> list[Array]:
        """One array to fill for each tensor; the arrays are valid until the next call."""
        starts, size = offsets(layout.size_bytes for layout in layouts)
        if size + ALIGNMENT > len(self._memory):
            self._memory = np.empty(size + ALIGNMENT, np.uint8)
        base = -self._memory.ctypes.data % ALIGNMENT
        return _arrays(self._memory.data[base:], layouts, starts)

    def shared(self, layouts: Sequence[TensorLayout], size: int) -> list[Array]:
        """The arrays that the server wrote into `size` bytes of shared memory; valid until the worker replies."""
        starts, described = offsets(layout.size_bytes for layout in layouts)
        if self._shared is None or described != size:
            raise ProtocolError(f"a table describes {described} B of shared memory; the frame says {size} B")
        try:
            return _arrays(self._shared.readable(size), layouts, starts)
        except ValueError as error:
            raise ProtocolError(str(error)) from error


def _arrays(memory: memoryview, layouts: Sequence[TensorLayout], starts: Sequence[int]) -> list[Array]:
    return arrays_at(memory, [(NUMPY_TYPES[layout.datatype], layout.shape) for layout in layouts], starts)


class Worker:
    """Serves one model over one socket until the server sends STOP or closes the socket."""

    def __init__(
        self, channel: ProcessChannel, model: str, threads: int, prepared: int = 0, shared: SharedMemory | None = None
    ) -> None:
        self._channel, self._model = channel, model
        self._threads, self._prepared = threads, prepared
        self._duty = 1.0
        self._memory = InputMemory(shared)
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve(self) -> None:
        """Load the model, then process frames; returns when the server sends STOP or closes the socket."""
        self._channel.send(FrameKind.STEP, STEPS.index("loading"))
        try:
            runtime = open_runtime(self._model)
            runtime.load(self._threads)
            self._channel.send(FrameKind.STEP, STEPS.index("warming"))
            runtime.warm(self._threads)
        except Exception as error:
            text = str(error) if isinstance(error, SloopError) else f"{type(error).__name__}: {error}"
            self._channel.send(FrameKind.REFUSED, payload=[text.encode()])
            raise
        threading.Thread(target=self._prepare, args=(runtime,), daemon=True).start()
        if self._prepared <= THREAD_COUNTS_MAX:  # more sessions would evict each other before they are used
            for threads in range(1, self._prepared + 1):
                self._wanted.put(threads)
        self._channel.send(FrameKind.READY)
        while (received := self._channel.receive_head()) is not None:
            head, table = received
            if head.kind is FrameKind.RUN:
                self._run(runtime, head, table)
            elif head.kind is FrameKind.RESIZE:
                self._resize(head)
            elif head.kind is FrameKind.STOP:
                return
            else:
                raise ProtocolError(f"the server sent a {head.kind.name} frame")

    def _prepare(self, runtime: Runtime) -> None:
        """In the background, open a session for each requested thread count."""
        while True:
            threads = self._wanted.get()
            try:
                if runtime.load(threads):
                    runtime.warm(threads)
            except Exception as error:  # the replica continues with the sessions it has
                sys.stderr.write(f"sloop worker {os.getpid()}: cannot prepare {threads} threads: {error}\n")

    def _resize(self, head: Head) -> None:
        if not (0 < head.subject <= 4096 and 0 < head.value <= MILLIONTHS):
            raise ProtocolError(f"a resize requests {head.subject} threads and a duty cycle of {head.value} millionths")
        self._threads, self._duty = head.subject, head.value / MILLIONTHS
        self._wanted.put(head.subject)
        self._channel.send(FrameKind.RESIZED, head.subject)

    def _run(self, runtime: Runtime, head: Head, table: bytes) -> None:
        is_shared = head.value != 0
        passes = unpack_table(table, None if is_shared else head.payload_bytes)
        width = len(passes[0]) if passes else 0
        layouts = [layout for row in passes for layout in row]
        if is_shared:
            inputs = self._memory.shared(layouts, head.value)
        else:
            inputs = self._memory.allocate(layouts)
            for array in inputs:
                self._channel.receive_into(bytes_of(array))
        started_ns = time.monotonic_ns()
        try:
            outputs = [
                runtime.run(inputs[place * width : (place + 1) * width], self._threads)[0]
                for place in range(len(passes))
            ]
            rows = [[np.asarray(array, order="C") for array in row] for row in outputs]
            described = [[(DATATYPE_OF[array.dtype], array.shape) for array in row] for row in rows]
        except Exception as error:  # an exception of the model fails this batch only
            self._channel.send(FrameKind.FAILED, head.subject, payload=[f"{type(error).__name__}: {error}".encode()])
            return
        if self._duty < 1:
            time.sleep((time.monotonic_ns() - started_ns) / 1e9 * (1 / self._duty - 1))
        service_ns = time.monotonic_ns() - started_ns
        payload = [bytes_of(array) for row in rows for array in row]
        self._channel.send(FrameKind.DONE, head.subject, service_ns, pack_table(described), payload)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process; the module docstring lists its arguments."""
    fd, parent, model, threads, prepared, memory = arguments
    begin(int(parent), (int(fd), int(memory)))
    shared = SharedMemory(int(memory)) if int(memory) >= 0 else None
    with (
        socket.socket(fileno=int(fd)) as sock,
        contextlib.suppress(ConnectionError),
    ):  # the server has closed the socket
        Worker(ProcessChannel(sock), model, int(threads), int(prepared), shared).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # a normal exit would abort while the background thread still opens a session
