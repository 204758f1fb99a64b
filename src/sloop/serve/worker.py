"""The worker: one process, one replica. Reads batches from its socket, runs the model, writes the answers.

`python -m sloop.serve.worker FD PARENT MODEL THREADS PREPARED SHARED`, started by a backend; never by hand. Promises
that it never outlives the server (Linux: parent death signal, otherwise the socket's end), that each batch is answered
once, that its input memory is reused, and that on a malformed frame it dies with a message rather than guess.
Threads equal what the last resize asked, from the next batch on; sessions for other thread counts are made in the
background, and until one is ready batches run on the nearest. Where cores are withheld by no one else (a fall-back
actuator), the duty cycle withholds them here: after computing for t it rests for t·(1/duty − 1).
"""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from sloop.serve.runtimes import THREAD_COUNTS_MAX, Array, Runtime, open_runtime
from sloop.serve.transport import Channel, FrameKind, Head, Piece, ProtocolError, pack_table, unpack_table
from sloop.shared_memory import ALIGNMENT, SharedMemory, places
from sloop.tensor import NUMPY_TYPES, arrays_at, bytes_of

STEPS: Final = ("spawning", "fetching", "loading", "warming")
"""Steps of a cold start; a STEP frame's subject is an index into this."""

MILLIONTHS: Final = 1_000_000
PR_SET_PDEATHSIG: Final = 1
DATATYPE_OF: Final = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class Desk:
    """Where a batch's tensors lie: in memory of its own, grown to the largest batch seen and reused, or in that which
    is shared with the server."""

    def __init__(self, shared: SharedMemory | None = None) -> None:
        self._memory = np.empty(0, np.uint8)
        self._shared = shared

    def lay_out(self, pieces: Sequence[Piece]) -> list[Array]:
        """An array to be filled for each piece, none overlapping; valid until the next call."""
        starts, size = places(piece.size_bytes for piece in pieces)
        if size + ALIGNMENT > len(self._memory):
            self._memory = np.empty(size + ALIGNMENT, np.uint8)
        base = -self._memory.ctypes.data % ALIGNMENT
        return _arrays(self._memory.data[base:], pieces, starts)

    def found(self, pieces: Sequence[Piece], size: int) -> list[Array]:
        """The arrays that the server has laid out in `size` bytes of shared memory; valid until it is answered."""
        starts, told = places(piece.size_bytes for piece in pieces)
        if self._shared is None or told != size:
            raise ProtocolError(f"a table describes {told} B of shared memory; the frame says {size}")
        try:
            return _arrays(self._shared.seen(size), pieces, starts)
        except ValueError as error:
            raise ProtocolError(str(error)) from error


def _arrays(memory: memoryview, pieces: Sequence[Piece], starts: Sequence[int]) -> list[Array]:
    return arrays_at(memory, [(NUMPY_TYPES[piece.datatype], piece.shape) for piece in pieces], starts)


class Worker:
    """Serves one model over one socket until it is told to stop or the server is gone."""

    def __init__(
        self, channel: Channel, model: str, threads: int, prepared: int = 0, shared: SharedMemory | None = None
    ) -> None:
        self._channel, self._model = channel, model
        self._threads, self._prepared = threads, prepared
        self._duty = 1.0
        self._desk = Desk(shared)
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve(self) -> None:
        """Start cold, then answer frames; returns when the server says stop or goes away."""
        self._channel.send(FrameKind.STEP, STEPS.index("loading"))
        try:
            runtime = open_runtime(self._model)
            runtime.load(self._threads)
            self._channel.send(FrameKind.STEP, STEPS.index("warming"))
            runtime.warm(self._threads)
        except Exception as error:
            self._channel.send(FrameKind.REFUSED, payload=[f"{type(error).__name__}: {error}".encode()])
            raise
        threading.Thread(target=self._prepare, args=(runtime,), daemon=True).start()
        if self._prepared <= THREAD_COUNTS_MAX:  # more would push each other out before they are used
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
        """Background: make what is wanted ready, one thread count after the other."""
        while True:
            threads = self._wanted.get()
            try:
                if runtime.load(threads):
                    runtime.warm(threads)
            except Exception as error:  # the replica serves on with the threads it has
                sys.stderr.write(f"sloop worker {os.getpid()}: cannot prepare {threads} threads: {error}\n")

    def _resize(self, head: Head) -> None:
        if not (0 < head.subject <= 4096 and 0 < head.value <= MILLIONTHS):
            raise ProtocolError(f"a resize asks for {head.subject} threads and {head.value} millionths")
        self._threads, self._duty = head.subject, head.value / MILLIONTHS
        self._wanted.put(head.subject)
        self._channel.send(FrameKind.RESIZED, head.subject)

    def _run(self, runtime: Runtime, head: Head, table: bytes) -> None:
        is_shared = head.value != 0
        passes = unpack_table(table, None if is_shared else head.payload_bytes)
        width = len(passes[0]) if passes else 0
        pieces = [piece for row in passes for piece in row]
        if is_shared:
            inputs = self._desk.found(pieces, head.value)
        else:
            inputs = self._desk.lay_out(pieces)
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
        except Exception as error:  # whatever a model raises concerns this batch only
            self._channel.send(FrameKind.FAILED, head.subject, payload=[f"{type(error).__name__}: {error}".encode()])
            return
        if self._duty < 1:
            time.sleep((time.monotonic_ns() - started_ns) / 1e9 * (1 / self._duty - 1))
        service_ns = time.monotonic_ns() - started_ns
        payload = [bytes_of(array) for row in rows for array in row]
        self._channel.send(FrameKind.DONE, head.subject, service_ns, pack_table(described), payload)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the server dies; the race with an earlier death is closed by the check.

    Elsewhere than on Linux the end of the socket has to do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def main(arguments: Sequence[str]) -> None:
    """Entry of the process: see the module's text for its arguments."""
    fd, parent, model, threads, prepared, memory = arguments
    die_with(int(parent))
    for number in (signal.SIGTERM, signal.SIGINT):  # a service manager sends them to all processes: the server drains
        signal.signal(number, signal.SIG_IGN)
    for inherited in (int(fd), int(memory)):
        if inherited >= 0:
            os.set_inheritable(inherited, False)
    shared = SharedMemory(int(memory)) if int(memory) >= 0 else None
    with socket.socket(fileno=int(fd)) as sock, contextlib.suppress(ConnectionError):  # the server has gone: so do we
        Worker(Channel(sock), model, int(threads), int(prepared), shared).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # a session still being made in the background would turn the interpreter's own way out into an abort
