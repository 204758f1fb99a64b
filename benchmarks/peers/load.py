"""Load on one server: closed loops by `wrk`, if it is installed, and closed and open loops by our own sender.

Only answers with status 200 count. The sender is that of `sloop.load`, with the request head of each peer, in its own
process (`sender`). The arrival times of an open loop are the same for all servers.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks.peers.environments import last_line
from benchmarks.peers.peer import Ask, PeerFailed
from sloop.load import Encoding, LoadPlan
from sloop.load.connections import RequestHead
from sloop.load.plan import model_path, split_url
from sloop.load.results import LoadResult, Measured, join, read_records, summarise
from sloop.load.run import prepare_bodies
from sloop.load.sender import RECORDS, SCHEDULE
from sloop.units import ms, s
from sloop.workload import trace_from

TIMEOUT_S: Final = 2.0
"""For one request: far beyond every deadline here."""
GRACE_S: Final = 30.0
BODY: Final = "body.bin"
ORDERS: Final = "orders.json"

WRK_SCRIPT: Final = """\
wrk.method = "POST"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
{fields}
done = function(summary, latency, requests)
  local lost = summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout
  io.write(string.format('\\n{{"requests":%d,"wrong":%d,"lost":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d}}\\n',
    summary.requests, summary.errors.status, lost, summary.duration,
    latency:percentile(50), latency:percentile(99)))
end
"""


class Closed(Struct, frozen=True):
    """A closed loop's result."""

    rps: float
    """Of answers with status 200."""
    p50_ms: float
    p99_ms: float
    answers: int
    """As many, all in all."""
    wrong: int
    """Answers with another status, and requests without one."""


class SenderOptions(Struct, frozen=True):
    """The parameters of `sender`, in addition to the body and the schedule."""

    port: int
    head: str
    """All of a request's head."""
    connections: int
    """Of a closed loop, or kept warm in an open one."""
    end_ns: int
    """Of a closed loop; 0 for an open one, which follows the schedule."""
    timeout_ns: int


class _Wrk(Struct, frozen=True):
    """The output of the wrk script."""

    requests: int
    wrong: int
    lost: int
    duration_us: int
    p50_us: int
    p99_us: int


def client() -> str:
    """The name of the program that sends closed loops here."""
    if shutil.which("wrk"):
        return "`wrk -t1`"
    return "our own client (`wrk` is not installed: your system's package `wrk`)"


def closed(port: int, ask: Ask, connections: int, seconds: float) -> Closed:
    """A closed loop: each connection sends the next request when it has its answer."""
    with tempfile.TemporaryDirectory(prefix="peers-load-") as name:
        folder = Path(name)
        if shutil.which("wrk"):
            return _by_wrk(folder, port, ask, connections, seconds)
        orders = SenderOptions(port, head_of(port, ask), connections, s(seconds), s(TIMEOUT_S))
        result = _sent(folder, orders, ask.body, None, slo_ms=1e3 * TIMEOUT_S, seconds=seconds)
    answers = result.ok + result.late
    return Closed(answers / seconds, result.p50_ms or 0.0, result.p99_ms or 0.0, answers, result.sent - answers)


def closed_at_sloop(  # a request has as many parts
    url: str, model: str, connections: int, seconds: float, *, slo_ms: float, api_key: str = ""
) -> LoadResult:
    """A closed loop of our own sender on a server of sloop, with made-up inputs as JSON."""
    arrivals = trace_from({"kind": "poisson", "rate": 1}, seed=0, duration_s=1.0, folder=Path())
    plan = LoadPlan(url, model, arrivals, slo_ms, encoding=Encoding.JSON, api_key=api_key)
    (body, *_), parts = prepare_bodies(plan), split_url(url)
    head = RequestHead(
        path=f"{model_path(parts, model)}/infer",
        host=parts.netloc,
        slo_ms=slo_ms,
        content_bytes=len(body.content),
        json_bytes=body.json_bytes,
        api_key=api_key,
    )
    with tempfile.TemporaryDirectory(prefix="closed-load-") as name:
        orders = SenderOptions(parts.port or 80, head.render(0).decode(), connections, s(seconds), s(TIMEOUT_S))
        return _sent(Path(name), orders, body.content, None, slo_ms=slo_ms, seconds=seconds)


def open_loop(port: int, ask: Ask, due_ns: NDArray[np.int64], *, slo_ms: float, seconds: float) -> LoadResult:
    """An open loop: one request at each instant; goodput is that of `seconds`."""
    with tempfile.TemporaryDirectory(prefix="peers-load-") as name:
        orders = SenderOptions(port, head_of(port, ask), 16, 0, s(TIMEOUT_S))
        schedule = np.stack([due_ns, np.zeros_like(due_ns)], axis=1)
        return _sent(Path(name), orders, ask.body, schedule, slo_ms=slo_ms, seconds=seconds)


def head_of(port: int, ask: Ask) -> str:
    """The complete head of a request."""
    fields = {"host": f"127.0.0.1:{port}", "content-length": str(len(ask.body)), **ask.fields}
    lines = [f"POST {ask.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines) + "\r\n\r\n"


def _by_wrk(folder: Path, port: int, ask: Ask, connections: int, seconds: float) -> Closed:
    body, script = folder / BODY, folder / "ask.lua"
    body.write_bytes(ask.body)
    fields = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in ask.fields.items())
    script.write_text(WRK_SCRIPT.format(body=body, fields=fields))
    url = f"http://127.0.0.1:{port}{ask.path}"
    flags = (
        "-t1",
        f"-c{connections}",
        f"-d{round(seconds)}s",
        f"--timeout={TIMEOUT_S:g}s",
        "--latency",
        "-s",
        str(script),
    )
    done = subprocess.run(("wrk", *flags, url), capture_output=True, text=True, timeout=seconds + GRACE_S, check=False)
    if done.returncode:
        raise PeerFailed(f"wrk: {last_line(done.stderr) or last_line(done.stdout)}")
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=_Wrk)
    answers = found.requests - found.wrong
    return Closed(
        answers / found.duration_us * 1e6, found.p50_us / 1e3, found.p99_us / 1e3, answers, found.wrong + found.lost
    )


def _sent(
    folder: Path,
    orders: SenderOptions,
    body: bytes,
    schedule: NDArray[np.int64] | None,
    *,
    slo_ms: float,
    seconds: float,
) -> LoadResult:
    """Start the sender, wait until it ends, and evaluate its records."""
    (folder / BODY).write_bytes(body)
    (folder / ORDERS).write_bytes(msgspec.json.encode(orders))
    if schedule is not None:
        schedule.tofile(folder / SCHEDULE)
    command = (sys.executable, "-m", "benchmarks.peers.sender", str(folder))
    limit_s = seconds + TIMEOUT_S + GRACE_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise PeerFailed(f"the sender: {last_line(done.stderr)}")
    records = read_records(folder / RECORDS)
    measured = _due_when_sent(records) if schedule is None else join(records, schedule)
    return summarise(measured, slo_ns=ms(slo_ms), duration_s=seconds, connections=orders.connections, wall_s=seconds)


def _due_when_sent(records: NDArray[np.void]) -> Measured:
    """Records of a closed loop, in which a request is due when it is sent."""
    ordered = records[np.argsort(records["sent_ns"], kind="stable")]
    fields = {name: ordered[name] for name in ("sent_ns", "done_ns", "status", "ending", "slo_met")}
    return Measured(due_ns=ordered["sent_ns"], elapsed_ns=np.zeros(len(ordered), dtype=np.int64), **fields)
