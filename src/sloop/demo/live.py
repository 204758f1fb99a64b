"""One live run: a server and the load generator in separate processes, and the figures from the log.

The server has stopped when `serving` returns or raises. Figures of live and simulated runs are comparable: time starts
with the schedule, cores are counted until it ends, and the server's activity before the first and after the last
request is left out.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
from msgspec import Struct, structs

from sloop.errors import MachineError
from sloop.load import LoadPlan, LoadResult, ProgressReport, run_load
from sloop.runlog import read_log
from sloop.runlog.summary import RunRow, RunSummary, on_schedule_clock
from sloop.systems.replay import rebuild
from sloop.vocabulary import Request
from sloop.workload import Link, Trace

READY_S: Final = 60.0
STOP_S: Final = 40.0
STDERR_CHARS: Final = 400
"""Characters of the server's output that an error quotes."""


class ServerReport(Struct, frozen=True):
    """The JSON line that a server prints when it listens or fails to start."""

    application: str = ""
    """Name of the deployment, which is that of its only application."""
    http: str = ""
    grpc: str = ""
    log: str = ""
    page: str = ""
    error: str = ""
    help: str = ""


class ClientLoad(Struct, frozen=True):
    """The requests to send."""

    trace: Trace
    link: Link | None
    payload_bytes: int
    slo_ms: float
    seed: int


def serve_and_load(
    app: Path, state: Path, load: ClientLoad, *, progress: Callable[[ProgressReport], None] = lambda now: None
) -> tuple[LoadResult, Path]:
    """Serve the application file `app` and send it the load. Returns the clients' result and the server's event log."""
    with serving(app, state) as report:
        plan = LoadPlan(
            url=report.http,
            model=report.application,
            arrivals=load.trace,
            slo_ms=load.slo_ms,
            seed=load.seed,
            link=load.link,
            payload_bytes=load.payload_bytes,
        )
        result = run_load(plan, progress=progress)
    return result, Path(report.log)


@contextmanager
def serving(app: Path, state: Path, *options: str) -> Iterator[ServerReport]:
    """A server for the application or deployment file `app` that is ready to infer, stopped at the end. MachineError if
    it does not start."""
    command = [sys.executable, "-m", "sloop", "serve", str(app), "--state", str(state), "--json", *options]
    state.mkdir(parents=True, exist_ok=True)
    stderr = state / "server.txt"
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"], stdout=subprocess.PIPE, stderr=file
        )
    try:
        yield _listening(process, stderr)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _listening(process: "subprocess.Popen[bytes]", stderr: Path) -> ServerReport:
    """The server's report, once it accepts inferences."""
    assert process.stdout is not None
    line = process.stdout.readline()
    report = msgspec.json.decode(line, type=ServerReport) if line else ServerReport(error=_death(process, stderr))
    if report.error:
        raise MachineError(f"the server did not start: {report.error}", help=report.help or f"see {stderr}")
    until_s = monotonic() + READY_S
    while process.poll() is None and monotonic() < until_s:
        if is_ready(report.http):
            return report
        sleep(0.1)
    if process.poll() is not None:
        raise MachineError(f"the server did not become ready: {_death(process, stderr)}", help=f"see {stderr}")
    last = _last_words(stderr) or "it printed nothing"
    raise MachineError(f"the server did not become ready in {READY_S:g} s: {last}", help=f"see {stderr}")


def _last_words(stderr: Path) -> str:
    """The end of the server's output on stderr."""
    return stderr.read_text(errors="replace").strip()[-STDERR_CHARS:]


def _death(process: "subprocess.Popen[bytes]", stderr: Path) -> str:
    """How a server ended that has closed its stdout: its exit status, and the end of its output on stderr."""
    try:
        code = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return f"it closed its output but did not exit within {STOP_S:g} s"
    ended = f"it was killed by signal {signal.Signals(-code).name}" if code < 0 else f"it exited with status {code}"
    last = _last_words(stderr)
    return f"{ended}: {last}" if last else f"{ended} and printed nothing"


def is_ready(url: str) -> bool:
    """Whether the server at `url` accepts inferences now."""
    try:
        with urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            status: Any = answer.status
            return bool(status == 200)
    except (URLError, OSError):  # 503 while it warms up is an URLError too
        return False


# Figures of a live or simulated run from its log, computed the same way and over the same seconds.


class CountedRun(Struct, frozen=True):
    """A run's figures, and the fold that plots read."""

    row: RunRow
    summary: RunSummary


def schedule_start_ns(log: Path, *, first_ns: int) -> int:
    """When the schedule started, on the log's clock: `first_ns` before its first request was sent.

    0 if the log has no request.
    """
    sent_ns = (record.sent_ns for _, record in read_log(log) if isinstance(record, Request))
    return max(0, next(sent_ns, first_ns) - first_ns)


def count_run(log: Path, *, first_ns: int, duration_s: int, assumed: Iterable[str] = ()) -> CountedRun:
    """Count the run in a log whose first request was sent `first_ns` after its schedule started."""
    recorded = read_log(log)
    setup = rebuild(recorded.header)
    summary = RunSummary(setup.parts(), nodes=setup.deployment.cluster, start_ns=0)
    summary.fold(on_schedule_clock(recorded, first_ns=first_ns))
    row = summary.row(system=recorded.header.system, seed=recorded.header.seed, assumed=assumed)
    cores = [second.cores for second in summary.seconds()[:duration_s]]
    row = structs.replace(row, core_seconds=sum(cores), goodput_rps=row.served / duration_s)
    return CountedRun(row, summary)
