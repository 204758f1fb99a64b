"""The process that measures: `python -m sloop.profile.stopwatch` loads one model, runs batches and says how long.

Promises to do nothing before it is told to go, so that the parent can confine it first, and to time only the forward
pass. Speaks JSON lines: an `Assignment` in; `ready`, one `Sample` per batch, then `Done` or `Refused` out.
"""

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.errors import InputError
from sloop.profile.model import input_shapes, open_session, signature_of, synthesise
from sloop.profile.profile import Sample
from sloop.units import NS_PER_MS, NS_PER_S

WARM_MIN: Final = 3
WARM_SHARE: Final = 0.2
"""Of a cell's time that may go into warming up."""
RUNS_MIN, RUNS_MAX = 7, 2000
READY: Final = b"ready\n"


class Assignment(Struct, frozen=True):
    """What to measure in this process."""

    model: str
    threads: int
    cores: float
    batches: tuple[int, ...]
    shapes: dict[str, tuple[int, ...]]
    seconds: float
    """Time for each batch size."""


class Done(Struct, frozen=True, tag="done"):
    """The end of the measurement, with what loading took."""

    load_ms: float
    memory_bytes: int


class Refused(Struct, frozen=True, tag="refused"):
    """The model cannot be measured like this, for a reason the user can mend."""

    what: str
    help: str


class Measured(Struct, frozen=True, tag="measured"):
    """One cell."""

    sample: Sample


Message = Measured | Done | Refused


def percentile(ordered: list[int], percent: int) -> int:
    """Nearest-rank percentile of ascending values."""
    return ordered[(percent * len(ordered) + 99) // 100 - 1]


def main() -> None:
    """Wait for the assignment, measure, report."""
    out = sys.stdout.buffer
    out.write(READY)
    out.flush()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    assignment = msgspec.json.decode(line, type=Assignment)
    try:
        for message in measure_all(assignment):
            out.write(msgspec.json.encode(message) + b"\n")
            out.flush()
    except InputError as error:
        out.write(msgspec.json.encode(Refused(error.what, error.help)) + b"\n")
        out.flush()


def measure_all(assignment: Assignment) -> Iterator[Message]:
    """Each batch size in turn, then what loading took."""
    path = Path(assignment.model)
    before_bytes = resident_bytes()
    start_ns = perf_counter_ns()
    session = open_session(path, assignment.threads)
    load_ms = (perf_counter_ns() - start_ns) / NS_PER_MS
    signature = signature_of(session, path)
    for batch in assignment.batches:
        shapes = input_shapes(signature, batch, assignment.shapes, where="")
        inputs = synthesise(signature, shapes)
        try:
            durations_ns = time_runs(session, inputs, int(assignment.seconds * NS_PER_S))
        except Exception as error:  # ONNX Runtime's exceptions share no base; the model refuses this batch
            reason = str(error).splitlines()[0][:300]
            raise InputError(f"a batch of {batch} fails: {reason}", help="measure smaller batches") from error
        ordered = sorted(durations_ns)
        p50_ms, p99_ms = percentile(ordered, 50) / NS_PER_MS, percentile(ordered, 99) / NS_PER_MS
        yield Measured(Sample(batch, assignment.cores, p50_ms, p99_ms, len(ordered)))
    yield Done(load_ms, max(0, resident_bytes() - before_bytes))


def time_runs(session: Any, inputs: Mapping[str, object], budget_ns: int) -> list[int]:  # noqa: ANN401
    """Durations of runs that follow each other within the budget, after warm-up; at least `RUNS_MIN` of them."""
    start_ns = perf_counter_ns()
    warmed = 0
    while warmed < WARM_MIN or (warmed < 50 and perf_counter_ns() - start_ns < WARM_SHARE * budget_ns):
        session.run(None, inputs)
        warmed += 1
        if perf_counter_ns() - start_ns > budget_ns:
            break
    durations_ns: list[int] = []
    start_ns = perf_counter_ns()
    end_ns = start_ns
    while len(durations_ns) < RUNS_MIN or (len(durations_ns) < RUNS_MAX and end_ns - start_ns < budget_ns):
        begin_ns = perf_counter_ns()
        session.run(None, inputs)
        end_ns = perf_counter_ns()
        durations_ns.append(end_ns - begin_ns)
    return durations_ns


def resident_bytes() -> int:
    """Memory this process holds now; where the system does not say, the most it ever held."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # no /proc
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
