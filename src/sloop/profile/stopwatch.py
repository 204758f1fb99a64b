"""The process that is measured: `python -m sloop.profile.stopwatch FD SHARED` loads a model and runs batches on demand.

Promises to do nothing before it is told to go, so that the parent can confine it first, and to take each batch's bytes
from the socket FD, large ones from the memory SHARED, and to give the outputs' bytes back, as a replica does: moving
them costs the replica's cores too. Speaks JSON lines: an `Assignment` in; `ready`, a `Cell` per batch size, then `Done`
or `Refused` out. After a `Cell` the socket first gives the inputs, which only this process can make where the model
brings an example; then it carries `RUN` and the inputs, unless they are shared, for every run, the outputs back, and
`ENOUGH` in the end. What the model prints goes to the standard error.
"""

import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import msgspec
from msgspec import Struct

from sloop.errors import InputError
from sloop.profile.examine import Refused
from sloop.profile.inputs import input_shapes
from sloop.profile.session import Array, Session, feed_for, open_model
from sloop.shared import SHARED_BYTES_MIN, SharedMemory, places
from sloop.tensor import arrays_at, bytes_of
from sloop.units import NS_PER_MS

READY: Final = b"ready\n"
RUN: Final = b"\x01"
ENOUGH: Final = b"\x00"


class Assignment(Struct, frozen=True):
    """What to measure in this process."""

    model: str
    threads: int
    cores: float
    batches: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]


class Done(Struct, frozen=True, tag="done"):
    """The end of the measurement, with what loading took on so many cores."""

    cores: float
    load_ms: float
    """Until the first pass was over; its parent adds what the process took to begin."""
    memory_bytes: int
    software: str = ""
    """What ran it, with its version."""


class Cell(Struct, frozen=True, tag="cell"):
    """A batch size is ready to be run: what its runs take and give back."""

    batch: int
    input_bytes: tuple[int, ...]
    output_bytes: int


Message = Cell | Done | Refused


def main(arguments: Sequence[str]) -> None:
    """Wait for the assignment, run what is asked, report."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    out.write(READY)
    out.flush()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    assignment = msgspec.json.decode(line, type=Assignment)
    try:
        fd, memory = map(int, arguments)
        shared = SharedMemory(memory) if memory >= 0 else None
        for message in run_all(assignment, socket.socket(fileno=fd), shared):
            out.write(msgspec.json.encode(message) + b"\n")
            out.flush()
    except InputError as error:
        out.write(msgspec.json.encode(Refused(error.what, error.where, error.help)) + b"\n")
        out.flush()


def run_all(assignment: Assignment, sock: socket.socket, shared: SharedMemory | None = None) -> Iterator[Message]:
    """Each batch size in turn, for as long as the other end of the socket wants, then what loading took."""
    path = Path(assignment.model)
    before_bytes = resident_bytes()
    start_ns = perf_counter_ns()
    session = open_model(path, assignment.threads)
    if assignment.shapes or session.example(1) is None:  # a batch that cannot be is refused before any is measured
        for batch in assignment.batches:
            input_shapes(session.signature, batch, assignment.shapes, where=str(path))
    load_ms = 0.0
    for batch in assignment.batches:
        inputs = feed_for(session, batch, assignment.shapes, where=str(path))
        try:
            outputs = session.run(inputs)
        except Exception as error:  # frameworks' exceptions share no base; the model refuses this batch
            reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise InputError(f"a batch of {batch} fails: {reason}", help="measure smaller batches") from error
        load_ms = load_ms or (perf_counter_ns() - start_ns) / NS_PER_MS
        memory = [bytes_of(array) for array in inputs.values()]
        yield Cell(batch, tuple(map(len, memory)), sum(map(len, map(bytes_of, outputs))))
        for view in memory:
            sock.sendall(view)
        run_on_demand(session, inputs, sock, shared)
    yield Done(assignment.cores, load_ms, max(0, resident_bytes() - before_bytes), session.software)


def run_on_demand(
    session: Session,
    inputs: Mapping[str, Array],
    sock: socket.socket,
    shared: SharedMemory | None,
) -> None:
    """Take inputs, run, give outputs, until it is enough."""
    memory = [bytes_of(array) for array in inputs.values()]
    if sum(map(len, memory)) < SHARED_BYTES_MIN:
        shared = None
    while sock.recv(1) == RUN:
        if shared is not None:
            inputs = found(inputs, shared)
        else:
            for view in memory:
                receive_into(sock, view)
        for output in session.run(inputs):
            sock.sendall(bytes_of(output))


def found(alike: Mapping[str, Array], shared: SharedMemory) -> dict[str, Array]:
    """Arrays of the same types and shapes, where the other side has laid them out."""
    starts, size = places(array.nbytes for array in alike.values())
    kinds = [(array.dtype, array.shape) for array in alike.values()]
    return dict(zip(alike, arrays_at(shared.seen(size), kinds, starts), strict=True))


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. ConnectionError where the other end has gone."""
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the other end closed")
        view = view[count:]


def resident_bytes() -> int:
    """Memory this process holds now; where the system does not say, the most it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no /proc
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main(sys.argv[1:])
