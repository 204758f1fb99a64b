"""Runs load plans: prepares the requests, starts a sending process for each plan, and evaluates its records.

The sending processes have always ended when `run_load` or `run_loads` returns or raises.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError, MachineError
from sloop.load.plan import (
    BODIES_BYTES_MAX,
    REQUESTS_MAX,
    Body,
    Delivery,
    Encoding,
    JsonTensor,
    LoadPlan,
    default_port,
    encoded,
    fetch_metadata,
    from_array,
    from_json,
    made_up,
    model_path,
    preferred_encoding,
    split_url,
)
from sloop.load.results import LoadResult, join, read_records, summarise, write_jsonl
from sloop.load.sender import RECORDS, Orders, ProgressReport, write_orders
from sloop.load.sent import SentWorks
from sloop.units import ms, s, to_s
from sloop.workload import Link, Trace, Work
from sloop.workload.trace import first_works

GRACE_S = 30.0
"""How long after its schedule and the last timeout the sending process is killed as stuck."""

METADATA_TIMEOUT_S = 10.0

TOGETHER_S: Final = 3.0
"""How long several sending processes have to get ready before their common start."""

STDERR = "stderr.txt"
LINE_END = "\n"

ProgressCall = Callable[[ProgressReport], None]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A plan with its request bodies and its schedule."""

    plan: LoadPlan
    bodies: list[Body]
    schedule: NDArray[np.int64]
    sent: SentWorks | None = None
    """In the order of the schedule; None if every request brings the same."""
    places: NDArray[np.int32] | None = None
    """Of each request's body, in this order; None: in turn."""


def run_load(plan: LoadPlan, *, progress: ProgressCall | None = None) -> LoadResult:
    """Send the load and return the result. Blocks until the last request has ended; calls `progress` every second."""
    return _run(_prepared(plan), progress=progress)


def run_loads(plans: Sequence[LoadPlan]) -> list[LoadResult]:
    """Send several loads at the same time, each from a process of its own. All schedules start at one instant."""
    prepared = [_prepared(plan) for plan in plans]
    start_ns = time.monotonic_ns() + s(TOGETHER_S)
    with ThreadPoolExecutor(len(plans)) as threads:
        return list(threads.map(lambda each: _run(each, start_ns=start_ns), prepared))


def _prepared(plan: LoadPlan) -> _Prepared:
    sent = SentWorks.of(first_works(plan.arrivals, REQUESTS_MAX))
    bodies = prepare_bodies(plan, sent.works)
    places = sent.bodies(len(bodies) // len(sent.works))
    lengths = np.array([len(body.content) for body in bodies])
    carried: int | NDArray[np.int64] = int(lengths[0])
    if plan.payload_bytes is not None:
        carried = plan.payload_bytes
    elif len(places):
        carried = lengths[places]
    schedule = schedule_of(plan.arrivals, plan.link, carried, plan.delivery)
    if not len(places):
        return _Prepared(plan, bodies, schedule)
    order = schedule[:, 2]
    return _Prepared(plan, bodies, schedule, sent.ordered(order), places[order])


def _run(prepared: _Prepared, *, start_ns: int = 0, progress: ProgressCall | None = None) -> LoadResult:
    """Send one load from a process of its own. Its schedule starts at `start_ns` of `time.monotonic_ns`, or as soon as
    it is ready."""
    plan, bodies, schedule = prepared.plan, prepared.bodies, prepared.schedule
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sloop-load-") as name:
        folder = Path(name)
        write_orders(folder, orders_of(plan, bodies, start_ns=start_ns), bodies, schedule, prepared.places)
        report = _send(folder, limit_s=to_s(int(schedule[-1, 0])) + plan.timeout_s + GRACE_S, progress=progress)
        measured = join(read_records(folder / RECORDS), schedule)
    wall_s = time.monotonic() - begun_s
    slo_ns = ms(plan.slo_ms)
    if plan.records is not None:
        write_jsonl(measured, plan.records, slo_ns=slo_ns, sent=prepared.sent)
    return summarise(
        measured,
        slo_ns=slo_ns,
        duration_s=to_s(plan.arrivals.duration_ns),
        connections=report.connections,
        wall_s=round(wall_s, 3),
        cpu_s=report.cpu_s,
        sent=prepared.sent,
    )


def prepare_bodies(plan: LoadPlan, works: Sequence[Work] = (Work(),)) -> list[Body]:
    """The request bodies, built from the server's model metadata unless the user gives a complete body; equally many
    for each of `works`."""
    if plan.input_file is not None and tuple(works) != (Work(),):
        what = "its tensors have rows and sizes of their own, which the trace cannot change"
        raise InputError(what, where=str(plan.input_file), help="leave out the file, or the trace's rows and sizes")
    if plan.input_file is not None and plan.input_file.suffix.lower() == ".json":
        return [from_json(plan.input_file)]
    url = split_url(plan.url)
    timeout_s = min(plan.timeout_s, METADATA_TIMEOUT_S)
    metadata = fetch_metadata(url, plan.model, timeout_s=timeout_s, version=plan.version, api_key=plan.api_key)
    where = f"{plan.url} {plan.model}"
    encoding = plan.encoding
    if encoding == Encoding.AUTO:
        encoding = preferred_encoding(url, timeout_s=timeout_s, api_key=plan.api_key)
    inputs: Iterable[list[JsonTensor]]
    if plan.input_file is None:
        inputs = made_up(metadata, plan.shapes, works, seed=plan.seed, where=where)
    elif plan.input_file.suffix.lower() == ".npy":
        inputs = [from_array(plan.input_file, metadata, where=where)]
    else:
        raise InputError(
            f"{plan.input_file.name} is neither a .npy nor a .json file", where="input_file", help="give one of these"
        )
    bodies: list[Body] = []
    total = 0
    for tensors in inputs:
        bodies.append(encoded(tensors, encoding, where=where))
        total += len(bodies[-1].content)
        if total > BODIES_BYTES_MAX:
            what = f"the bodies of {len(works):,} different requests have over {BODIES_BYTES_MAX:,} bytes together"
            raise InputError(what, where=where, help="draw sizes from fewer numbers: {kind: choice, values: […]}")
    return bodies


def schedule_of(
    trace: Trace, link: Link | None, payload_bytes: int | NDArray[np.int64], delivery: Delivery
) -> NDArray[np.int64]:
    """Due time and elapsed time of each request in ns, and its place in the trace, as three columns sorted by due time.
    `payload_bytes` are those of each request, or of all.

    A request that is sent at t over a link reaches the server at t + elapsed with DELAY; with ATTACH it reaches the
    server at t, as if it had been sent earlier. In both cases its deadline is `due - elapsed + slo`.
    """
    times: list[NDArray[np.int64]] = []
    count = 0
    for block in trace.blocks():
        times.append(np.array(block, dtype=np.int64))
        count += len(block)
        if count > REQUESTS_MAX:
            raise InputError(f"over {REQUESTS_MAX:,} requests", where=trace.name, help="shorten the trace or thin it")
    if count == 0:
        raise InputError("the trace has no arrivals", where=trace.name, help="choose another window, or a higher rate")
    due = np.concatenate(times)
    if link is None:
        return np.stack([due, np.zeros_like(due), np.arange(count)], axis=1)
    carried = np.broadcast_to(payload_bytes, (count,)).tolist()
    elapsed = np.fromiter(map(link.transfer_ns, due.tolist(), carried), np.int64, count)
    if delivery == Delivery.DELAY:
        due = due + elapsed
    order = np.argsort(due, kind="stable")
    return np.stack([due[order], elapsed[order], order], axis=1)


def orders_of(plan: LoadPlan, bodies: list[Body], *, start_ns: int = 0) -> Orders:
    """The orders for the sending process; `start_ns` as in `Orders`."""
    url = split_url(plan.url)
    host = url.hostname or ""
    return Orders(
        host=host,
        port=url.port or default_port(url),
        tls=url.scheme == "https",
        path=f"{model_path(url, plan.model, plan.version)}/infer",
        authority=url.netloc.rpartition("@")[2],
        slo_ms=plan.slo_ms,
        json_bytes=tuple(body.json_bytes for body in bodies),
        connections_max=plan.connections_max,
        warm_connections=plan.warm_connections,
        timeout_ns=s(plan.timeout_s),
        cpus=plan.cpus,
        start_ns=start_ns,
        api_key=plan.api_key,
    )


def _send(folder: Path, *, limit_s: float, progress: ProgressCall | None) -> ProgressReport:
    """Run the sending process to its end and return its last report."""
    last = ProgressReport()
    with _sender(folder) as (process, output):
        watchdog = threading.Timer(limit_s, process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            for line in output:
                last = msgspec.json.decode(line, type=ProgressReport)
                if progress is not None:
                    progress(last)
            code = process.wait()
        finally:
            watchdog.cancel()
    errors = (folder / STDERR).read_text(errors="replace").strip()
    if last.error:
        raise MachineError(last.error, help="choose others")
    if code != 0 or not last.finished or "Traceback" in errors:
        raise MachineError(
            f"the sending process ended with exit code {code}: {errors.rpartition(LINE_END)[2] or 'no error message'}",
            help="check whether memory, disk space or time ran out",
        )
    return last


@contextmanager
def _sender(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The sending process and its standard output; the process is killed at the end of the block.

    It has a session of its own: Linux divides CPU time between sessions (`autogroup`), and in that of a server its
    priority would take the server's time.
    """
    command = [sys.executable, "-m", "sloop.load", str(folder)]
    with (folder / STDERR).open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    assert process.stdout is not None, "stdout is a pipe"
    try:
        yield process, process.stdout
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
