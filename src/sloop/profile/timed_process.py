"""The process whose forward passes are timed: `python -m sloop.profile.timed_process FD SHARED`.

Its order (`sloop.profile.measured_process`) is a `TimingOrder`. It treats each batch as a replica does: it reads the
inputs from the socket FD (large ones from the shared memory SHARED; -1 for none), runs the model, and sends the outputs
back; a replica also spends time on moving bytes.

It answers with a `BatchReady` per batch size, then a `LoadReport`. After each `BatchReady` it sends the inputs to the
parent, because only this process can make them if the model has an example. For each run the parent sends `RUN` and the
inputs (unless they are in shared memory) and receives the outputs; `STOP` ends the batch size, `LAST` the measurement.
"""

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from msgspec import Struct

from sloop.cuda import CudaDevice, used_bytes
from sloop.errors import InputError
from sloop.memory import bounded, loading, peak_bytes, resident_bytes
from sloop.profile import operators
from sloop.profile.measured_process import answer_order
from sloop.profile.model import (
    Array,
    Session,
    feed_for,
    input_shapes,
    is_python,
    open_model,
    thread_counts_kept,
)
from sloop.profile.threads import follow_cores
from sloop.profile.warming import batches_to_warm, remedy, warm_up
from sloop.shared_memory import SHARED_BYTES_MIN, SharedMemory, offsets
from sloop.tensor import arrays_at, bytes_of, elements_of
from sloop.units import NS_PER_MS
from sloop.user_code import line_in, raised_by_users, said_by

RUN: Final = b"\x01"
STOP: Final = b"\x00"
LAST: Final = b"\x02"
DONE: Final = b"\x03"
"""Follows the outputs of a run, which may be empty."""


class TimingOrder(Struct, frozen=True):
    """The model and the batch sizes to run. `shapes` gives one row's shape for inputs with open dimensions."""

    model: str
    threads: int
    cores: float
    batches: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    device: CudaDevice | None = None
    """The GPU that the process was started with, if any."""
    operators: tuple[str, ...] = ()
    """Libraries of operators that the model needs."""
    prepared: int = 0
    """The largest number of threads that a worker may have: it keeps sessions for others too, which count as its
    memory. 0: they were counted before."""
    tried: tuple[int, ...] = ()
    """Larger sizes, which are run until the parent has seen enough. A start does not warm them up."""


class BatchReady(Struct, frozen=True, tag="batch_ready"):
    """A batch size is ready to run: the bytes of each of its inputs, none for text, and of all outputs with `DONE`."""

    batch: int
    input_bytes: tuple[int, ...]
    output_bytes: int


class LoadReport(Struct, frozen=True, tag="load_report"):
    """The last message: start-up times and memory of the model on these cores."""

    cores: float
    weights_ms: float
    first_batch_ms: float
    memory_bytes: int
    """The most resident memory of the process, with sessions for other numbers of threads."""
    software: str = ""
    """Name and version of the library that ran it."""
    device_memory_bytes: int = 0
    """By how much the memory in use on the GPU has grown, with CUDA's own. The GPU must be idle otherwise."""
    process_ms: float = 0.0
    """Milliseconds from launching this process to `READY`, with its libraries; the parent fills it in."""
    resize_bytes: int = 0
    """Of the memory, what the sessions for other numbers of threads have added."""


def main(arguments: Sequence[str]) -> None:
    """Entry point: run each batch size on demand, report."""
    fd, memory = map(int, arguments)

    def answers(order: TimingOrder) -> Iterator[BatchReady | LoadReport]:
        shared = SharedMemory(memory) if memory >= 0 else None
        with bounded() if order.device is None else contextlib.nullcontext():
            yield from run_all(order, socket.socket(fileno=fd), shared)

    answer_order(TimingOrder, answers)


def run_all(
    order: TimingOrder, sock: socket.socket, shared: SharedMemory | None = None
) -> Iterator[BatchReady | LoadReport]:
    """Run each batch size until the parent sends `STOP`, or `LAST`; then report start-up times and memory."""
    path = Path(order.model)
    device = order.device
    before_on_device = used_bytes(device.uuid) if device is not None else 0
    operators.use(order.operators)
    start_ns = perf_counter_ns()
    if is_python(path):
        follow_cores(order.threads)
    before_bytes = resident_bytes()
    with loading():
        session = open_model(path, order.threads, device=device)
    kept = thread_counts_kept(resident_bytes() - before_bytes)
    weights_ms = (perf_counter_ns() - start_ns) / NS_PER_MS
    if (
        order.shapes or session.example(session.signature.fixed_batch or 1) is None
    ):  # refuse an impossible batch before any is measured
        for batch in (*order.batches, *order.tried):
            input_shapes(session.signature, batch, order.shapes, session.dimension_names, where=str(path))
    first_batch_ms = 0.0
    for batch in (*order.batches, *order.tried):
        inputs = feed_for(session, batch, order.shapes, where=str(path))
        start_ns = perf_counter_ns()
        try:
            outputs = session.run(inputs)
        except raised_by_users() as error:  # exceptions of frameworks share no base class
            what = f"a batch of {batch} fails: {said_by(error)}"
            help = "measure smaller batches" if batch > 1 and not is_python(path) else remedy(session, path)
            raise InputError(what, where=line_in(path, error), help=help) from error
        if not first_batch_ms:
            _warm_up(session, order, path)
            first_batch_ms = (perf_counter_ns() - start_ns) / NS_PER_MS
        memory = [bytes_of(array) for array in inputs.values()]
        yield BatchReady(batch, tuple(map(len, memory)), sum(map(len, map(elements_of, outputs))) + len(DONE))
        for view in memory:
            sock.sendall(view)
        if run_on_demand(session, inputs, sock, shared) == LAST:
            break
    lone_bytes = peak_bytes()
    others = [threads for threads in range(order.prepared, 0, -1) if threads != order.threads][: kept - 1]
    more = [_prepared(order, threads, path) for threads in others]
    memory_bytes = max(lone_bytes, peak_bytes())  # the kernel's counters of resident pages are not exact
    on_device = max(0, used_bytes(device.uuid) - before_on_device) if device is not None else 0
    yield LoadReport(
        *(order.cores, weights_ms, first_batch_ms, memory_bytes, session.software, on_device),
        resize_bytes=memory_bytes - lone_bytes,
    )
    del more


def _warm_up(session: Session, order: TimingOrder, path: Path, *, for_memory: bool = True) -> None:
    """Run what a worker runs beyond its first batch before it is ready: it is part of a start. What fails here fails
    again when it is measured."""
    if session.signature.fixed_batch is None:
        with contextlib.suppress(*raised_by_users()):
            sizes = batches_to_warm(order.batches)
            run = partial(feed_for, session, shapes=order.shapes, where=str(path))
            warm_up(lambda rows: session.run(run(rows)), sizes, for_memory=for_memory)


def _prepared(order: TimingOrder, threads: int, path: Path) -> Session | None:
    """A session for another number of threads, as a worker opens it for a resize; None if it cannot be opened."""
    with contextlib.suppress(*raised_by_users()):
        with loading():
            session = open_model(path, threads)
        session.run(feed_for(session, order.batches[0], order.shapes, where=str(path)))
        _warm_up(session, order, path, for_memory=False)
        return session
    return None


def run_on_demand(
    session: Session,
    inputs: Mapping[str, Array],
    sock: socket.socket,
    shared: SharedMemory | None,
) -> bytes:
    """For each `RUN`: receive inputs, run, send outputs. Returns any other order."""
    memory = [bytes_of(array) for array in inputs.values()]
    if sum(map(len, memory)) < SHARED_BYTES_MIN:
        shared = None
    while (order := sock.recv(1)) == RUN:
        if shared is not None:
            inputs = arrays_in(shared, inputs)
        else:
            for view in memory:
                receive_into(sock, view)
        for output in session.run(inputs):
            sock.sendall(elements_of(output))
        sock.sendall(DONE)
    return order


def arrays_in(shared: SharedMemory, like: Mapping[str, Array]) -> dict[str, Array]:
    """Views of the arrays in shared memory, which the parent wrote, with the types and shapes of `like`. Text, of which
    the parent has no bytes, stays as it is."""
    starts, size = offsets(len(bytes_of(array)) for array in like.values())
    memory = shared.readable(size)
    return {
        name: array if array.dtype.hasobject else arrays_at(memory, [(array.dtype, array.shape)], [start])[0]
        for (name, array), start in zip(like.items(), starts, strict=True)
    }


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from the socket. ConnectionError if the other end closed."""
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the other end closed")
        view = view[count:]


if __name__ == "__main__":
    main(sys.argv[1:])
