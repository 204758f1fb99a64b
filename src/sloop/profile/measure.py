"""Measures a model on this machine: batch × cores, load time, memory.

Promises a `Profile` of origin `measured` whose every cell says how many runs it stands on. A run is timed from giving a
batch's bytes to a process until its outputs' bytes are back, as a server sees it. Each core count has its own process,
so that loading and memory are clean and threads start inside the cores they are given. How a process is confined is the
caller's to choose (`limit`); without it, whole cores by CPU affinity.
"""

import contextlib
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import IO, Final

import msgspec
from msgspec import structs

from sloop.errors import InputError, MachineError
from sloop.machine import hardware_name, usable_cpus
from sloop.profile.examine import Refused
from sloop.profile.fit import Point, fit_amdahl, fit_quadratic, fit_table, points_p50, points_p99
from sloop.profile.profile import Fit, Profile
from sloop.profile.sample import Sample, sample_of
from sloop.profile.stopwatch import ENOUGH, READY, RUN, Assignment, Cell, Done, Message, receive_into
from sloop.profile.store import digest
from sloop.shared import SHARED_BYTES_MIN, SharedMemory, lay_out
from sloop.units import NS_PER_MS, NS_PER_S

BATCHES: Final = (1, 2, 4, 8)
SECONDS: Final = 1.5
SILENCE_S: Final = 600.0
"""A measured process that says nothing for longer is stopped."""
WARM_MIN: Final = 3
WARM_SHARE: Final = 0.2
"""Of a cell's time that may go into warming up."""
RUNS_MIN, RUNS_MAX = 20, 2000
LAST_BYTES: Final = 4096
"""Of what a process said before it died, how much is looked at for a reason."""
SOCKET_BYTES: Final = 4 << 20
"""Asked for as send buffer, as for a replica's socket."""

Limit = Callable[[int, float], AbstractContextManager[object]]
"""`limit(pid, cores)` confines a process to so many cores for as long as the context is open."""
Progress = Callable[[int, int, Sample], None]
"""Called with cells done, cells in all, and the newest."""


def default_cores() -> tuple[float, ...]:
    """1, 2, 4, … up to all cores of this machine."""
    count = len(usable_cpus())
    return (*(float(1 << power) for power in range(count.bit_length()) if 1 << power < count), float(count))


@contextlib.contextmanager
def by_affinity(pid: int, cores: float) -> Iterator[None]:
    """Confine a process to whole cores. InputError for fractions; MachineError where the system has no affinity."""
    if cores != int(cores):
        raise InputError(
            f"{cores:g} cores need a CPU quota", help="measure whole cores, or run as a user who may set one"
        )
    if not hasattr(os, "sched_setaffinity"):
        raise MachineError("this system cannot confine a process to cores", help="measure on Linux")
    try:
        os.sched_setaffinity(pid, usable_cpus()[: int(cores)])
    except OSError as error:
        what = f"cannot confine process {pid} to {cores:g} cores: {error.strerror}"
        raise MachineError(what, help="measure as the user who runs the process") from error
    yield


def measure(
    model_path: Path,
    *,
    batches: Sequence[int] = BATCHES,
    cores: Sequence[float] | None = None,
    seconds: float = SECONDS,
    shapes: dict[str, tuple[int, ...]] | None = None,
    limit: Limit = by_affinity,
    progress: Progress = lambda done, cells, sample: None,
    percentile: str = "p99",
) -> Profile:
    """The profile of a model on this machine; takes about 1.2 × `seconds` for each batch on each core count.

    `shapes` gives one row's shape for inputs with open dimensions, unless the model brings an example; `percentile`
    (`p99`, `p50`) is what `latency_ms` will promise. InputError for a model or choice that cannot be measured,
    MachineError where the machine fails.
    """
    batches = _checked_batches(batches)
    cores = _checked_cores(default_cores() if cores is None else cores)
    samples: list[Sample] = []
    ends: list[Done] = []
    for count in cores:
        assignment = Assignment(str(model_path), ceil(count), count, batches, shapes or {})
        for found in measure_on(assignment, seconds, limit):
            if isinstance(found, Done):
                ends.append(found)
            else:
                samples.append(found)
                progress(len(samples), len(batches) * len(cores), found)
    return _profile(model_path, samples, ends, percentile)


def _checked_batches(batches: Sequence[int]) -> tuple[int, ...]:
    if not batches or min(batches) < 1:
        raise InputError(f"batches are {list(batches)}; each must be at least 1", help="for example --batches 1,2,4,8")
    return tuple(sorted(set(batches)))


def _checked_cores(cores: Sequence[float]) -> tuple[float, ...]:
    available = len(usable_cpus())
    if not cores or min(cores) <= 0:
        raise InputError(f"cores are {list(cores)}; each must be positive", help="for example --cores 1,2")
    if max(cores) > available:
        what = f"{max(cores):g} cores are asked for; this process may use {available}"
        raise InputError(what, help=f"measure up to {available}, or on a larger machine")
    return tuple(sorted({float(count) for count in cores}))


def measure_on(
    assignment: Assignment, seconds: float, limit: Limit, *, runs_min: int = RUNS_MIN
) -> Generator[Sample | Done, None, None]:
    """Everything about one core count, from a process of its own, which ends when the iterator is closed.

    MachineError where it dies or falls silent.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    shared = SharedMemory.make()
    command = [sys.executable, "-m", "sloop.profile.stopwatch", str(theirs.fileno()), str(shared.fd if shared else -1)]
    # Threads of BLAS, which numpy would start, would take the measured cores' time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipe, fds = subprocess.PIPE, (theirs.fileno(), *([shared.fd] if shared else []))
    begin_ns = perf_counter_ns()
    with (
        contextlib.closing(shared) if shared else contextlib.nullcontext(),
        ours,
        tempfile.TemporaryFile() as said,  # a pipe that nobody reads would stop a model that prints
        subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=said, env=environment, pass_fds=fds
        ) as process,
    ):
        theirs.close()
        ours.settimeout(SILENCE_S)
        try:
            if _line(process) != READY:
                raise _died(process, said, "before it began")
            start_ms = (perf_counter_ns() - begin_ns) / NS_PER_MS
            take = partial(run_cell, ours, shared, budget_ns=round(seconds * NS_PER_S), runs_min=runs_min)
            for found in _talk(process, assignment, take, limit):
                yield found if isinstance(found, Sample) else structs.replace(found, load_ms=found.load_ms + start_ms)
        except OSError as error:  # sockets and pipes close when the process dies
            raise _died(process, said, f"on {assignment.cores:g} cores") from error
        finally:
            process.kill()


def _talk(
    process: "subprocess.Popen[bytes]", assignment: Assignment, take: Callable[[Cell], list[int]], limit: Limit
) -> Iterator[Sample | Done]:
    """What the process finds, until it is done. ConnectionError where it dies."""
    assert process.stdin is not None
    decoder = msgspec.json.Decoder(Message)
    with limit(process.pid, assignment.cores):
        with contextlib.suppress(BrokenPipeError):  # it died: the line that does not come says so
            process.stdin.write(msgspec.json.encode(assignment) + b"\n")
        while line := _line(process):
            message: Message = decoder.decode(line)
            if isinstance(message, Refused):
                raise InputError(message.what, where=message.where or assignment.model, help=message.help)
            if isinstance(message, Done):
                yield message
                return
            yield sample_of(message.batch, assignment.cores, take(message))
    raise ConnectionError("it ended")


def run_cell(
    sock: socket.socket, shared: SharedMemory | None, cell: Cell, *, budget_ns: int, runs_min: int = RUNS_MIN
) -> list[int]:
    """`time_runs` with the inputs that the process says the cell is about."""
    inputs = [memoryview(bytearray(size)) for size in cell.input_bytes]
    for view in inputs:
        receive_into(sock, view)
    return time_runs(sock, shared, inputs, cell.output_bytes, budget_ns, runs_min)


def time_runs(
    sock: socket.socket,
    shared: SharedMemory | None,
    inputs: Sequence[memoryview],
    output_bytes: int,
    budget_ns: int,
    runs_min: int = RUNS_MIN,
) -> list[int]:
    """Durations in ns of runs that follow each other within the budget, after warm-up; at least `runs_min` of them.

    Inputs go the way that a replica's do: large ones through shared memory.
    """
    order, outputs = b"".join((RUN, *inputs)), memoryview(bytearray(output_bytes))
    if len(order) - len(RUN) < SHARED_BYTES_MIN:
        shared = None

    def run_ns() -> int:
        begin_ns = perf_counter_ns()
        if shared is not None:
            lay_out(shared, [[array] for array in inputs])
            sock.sendall(RUN)
        else:
            sock.sendall(order)
        receive_into(sock, outputs)
        return perf_counter_ns() - begin_ns

    start_ns = perf_counter_ns()
    warmed = 0
    while warmed < WARM_MIN or (warmed < 50 and perf_counter_ns() - start_ns < WARM_SHARE * budget_ns):
        run_ns()
        warmed += 1
        if perf_counter_ns() - start_ns > budget_ns:
            break
    runs_ns: list[int] = []
    start_ns = perf_counter_ns()
    while len(runs_ns) < runs_min or (len(runs_ns) < RUNS_MAX and perf_counter_ns() - start_ns < budget_ns):
        runs_ns.append(run_ns())
    sock.sendall(ENOUGH)
    return runs_ns


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    """The next line, empty at the end; a process that keeps silent is killed, which ends it."""
    assert process.stdout is not None
    watch = threading.Timer(SILENCE_S, process.kill)
    watch.daemon = True
    watch.start()
    try:
        return process.stdout.readline()
    finally:
        watch.cancel()


def _died(process: "subprocess.Popen[bytes]", said: IO[bytes], when: str) -> MachineError:
    process.kill()
    code = process.wait()
    said.seek(max(0, said.seek(0, os.SEEK_END) - LAST_BYTES))
    lines = said.read().decode(errors="replace").strip().splitlines()
    reason = f": {lines[-1][:300]}" if lines else ""
    help_text = "it may have run out of memory; measure smaller batches"
    return MachineError(f"the measuring process ended {when} (exit status {code}){reason}", help=help_text)


def _profile(path: Path, samples: list[Sample], ends: list[Done], percentile: str) -> Profile:
    points = points_p50(samples) if percentile == "p50" else points_p99(samples)
    fits = fit_all(points)
    return Profile(
        latency_ms=fits["table"].params,
        max_batch=max(sample.batch for sample in samples),
        max_cores=max(sample.cores for sample in samples),
        load_s=_start_ms(ends) / 1e3,
        memory_bytes=max(end.memory_bytes for end in ends),
        hardware=hardware_name(),
        origin="measured",
        source=f"sloop profile {path.name}, {percentile}",
        software=", ".join(filter(None, (ends[0].software, f"Python {platform.python_version()}", platform.system()))),
        date=datetime.now(UTC).date().isoformat(),
        model_digest=digest(path),
        samples=tuple(samples),
        fits=fits,
    )


def _start_ms(ends: Sequence[Done]) -> float:
    """The usual start; with less than a core it takes longer, but a replica has at least one while it starts."""
    whole = [end.load_ms for end in ends if end.cores >= 1]
    return median(whole or [end.load_ms for end in ends])


def fit_all(points: Sequence[Point]) -> dict[str, Fit]:
    """Every form these points suffice for: `table`, `amdahl`, and `quadratic` on 1 core (else the fewest measured)."""
    fits = {"table": fit_table(points)}
    with contextlib.suppress(ValueError):
        fits["amdahl"] = fit_amdahl(points)
    all_cores = sorted({point.cores for point in points})
    chosen = 1.0 if 1.0 in all_cores else all_cores[0]
    with contextlib.suppress(ValueError):
        fits["quadratic"] = fit_quadratic([point for point in points if point.cores == chosen])
    return fits
