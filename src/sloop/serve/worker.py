"""The worker: one process, one replica. Reads batches from its socket, runs the model, writes the answers.

`python -m sloop.serve.worker FD PARENT MODEL THREADS PREPARED`, started by a backend; never by hand. Promises that
it never outlives the server (Linux: parent death signal, otherwise the socket's end), that each batch is answered once,
that its input memory is reused, and that on a malformed frame it dies with a message rather than guess.
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
from math import prod
from typing import Final

import numpy as np

from sloop.serve.frames import Head, Kind, Piece, ProtocolError, pack_table, unpack_table
from sloop.serve.runtimes import THREAD_COUNTS_MAX, Array, Runtime, open_runtime
from sloop.serve.transport import Channel
from sloop.tensor import NUMPY_TYPES, bytes_of

STEPS: Final = ("spawning", "fetching", "loading", "warming")
"""Steps of a cold start; a STEP frame's subject is an index into this."""

ALIGNMENT: Final = 64
"""A cache line: tensors begin at multiples of it, as vector instructions like it."""
MILLIONTHS: Final = 1_000_000
PR_SET_PDEATHSIG: Final = 1
DATATYPE_OF: Final = {dtype: name for name, dtype in NUMPY_TYPES.items()}


class Desk:
    """The memory batches are received into: grown to the largest batch seen, then reused."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def lay_out(self, pieces: Sequence[Piece]) -> list[Array]:
        """An array for each piece, none overlapping; valid until the next call."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.size_bytes // ALIGNMENT) * ALIGNMENT
        if end + ALIGNMENT > len(self._memory):
            self._memory = np.empty(end + ALIGNMENT, np.uint8)
        base = -self._memory.ctypes.data % ALIGNMENT
        return [
            np.frombuffer(self._memory, NUMPY_TYPES[piece.datatype], prod(piece.shape), base + start).reshape(
                piece.shape
            )
            for piece, start in zip(pieces, starts, strict=True)
        ]


class Worker:
    """Serves one model over one socket until it is told to stop or the server is gone."""

    def __init__(self, channel: Channel, model: str, threads: int, prepared: int = 0) -> None:
        self._channel, self._model = channel, model
        self._threads, self._prepared = threads, prepared
        self._duty = 1.0
        self._desk = Desk()
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def serve(self) -> None:
        """Start cold, then answer frames; returns when the server says stop or goes away."""
        self._channel.send(Kind.STEP, STEPS.index("loading"))
        try:
            runtime = open_runtime(self._model)
            runtime.load(self._threads)
            self._channel.send(Kind.STEP, STEPS.index("warming"))
            runtime.warm(self._threads)
        except Exception as error:
            self._channel.send(Kind.REFUSED, payload=[f"{type(error).__name__}: {error}".encode()])
            raise
        threading.Thread(target=self._prepare, args=(runtime,), daemon=True).start()
        if self._prepared <= THREAD_COUNTS_MAX:  # more would push each other out before they are used
            for threads in range(1, self._prepared + 1):
                self._wanted.put(threads)
        self._channel.send(Kind.READY)
        while (received := self._channel.receive_head()) is not None:
            head, table = received
            if head.kind is Kind.RUN:
                self._run(runtime, head, table)
            elif head.kind is Kind.RESIZE:
                self._resize(head)
            elif head.kind is Kind.STOP:
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
        self._channel.send(Kind.RESIZED, head.subject)

    def _run(self, runtime: Runtime, head: Head, table: bytes) -> None:
        passes = unpack_table(table, head.payload_bytes)
        width = len(passes[0]) if passes else 0
        inputs = self._desk.lay_out([piece for row in passes for piece in row])
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
            self._channel.send(Kind.FAILED, head.subject, payload=[f"{type(error).__name__}: {error}".encode()])
            return
        if self._duty < 1:
            time.sleep((time.monotonic_ns() - started_ns) / 1e9 * (1 / self._duty - 1))
        service_ns = time.monotonic_ns() - started_ns
        payload = [bytes_of(array) for row in rows for array in row]
        self._channel.send(Kind.DONE, head.subject, service_ns, pack_table(described), payload)


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
    fd, parent, model, threads, prepared = arguments
    die_with(int(parent))
    for number in (signal.SIGTERM, signal.SIGINT):  # a service manager sends them to all processes: the server drains
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(int(fd), False)
    with socket.socket(fileno=int(fd)) as sock, contextlib.suppress(ConnectionError):  # the server has gone: so do we
        Worker(Channel(sock), model, int(threads), int(prepared)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # a session still being made in the background would turn the interpreter's own way out into an abort
