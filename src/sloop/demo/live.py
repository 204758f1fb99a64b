"""One live run: a server in a process of its own, the load generator in another, and the log the server leaves.

Promises that the server is gone when this returns or raises. Must not know what the figures are for.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
from msgspec import Struct

from sloop.errors import MachineError
from sloop.load import LoadPlan, LoadResult, ProgressReport, run_load
from sloop.workload import Link, Trace

READY_S: Final = 60.0
STOP_S: Final = 40.0
LAST_WORDS: Final = 400


class Where(Struct, frozen=True):
    """What a server says of itself when it listens, or why it does not."""

    application: str = ""
    http: str = ""
    log: str = ""
    error: str = ""
    help: str = ""


class Sending(Struct, frozen=True):
    """What to send to it."""

    trace: Trace
    link: Link | None
    payload_bytes: int
    slo_ms: float
    seed: int


def observe(
    app: Path, state: Path, sending: Sending, *, tell: Callable[[ProgressReport], None] = lambda told: None
) -> tuple[LoadResult, Path]:
    """Serve the application file `app`, send it the load; returns what the clients saw and the server's event log."""
    with serving(app, state) as where:
        plan = LoadPlan(
            url=where.http,
            model=where.application,
            arrivals=sending.trace,
            slo_ms=sending.slo_ms,
            seed=sending.seed,
            link=sending.link,
            payload_bytes=sending.payload_bytes,
        )
        result = run_load(plan, progress=tell)
    return result, Path(where.log)


@contextmanager
def serving(app: Path, state: Path) -> Iterator[Where]:
    """A server of its own for `app`, ready to infer; stopped on the way out. MachineError where it does not start."""
    command = [sys.executable, "-m", "sloop", "serve", str(app), "--state", str(state), "--json"]
    state.mkdir(parents=True, exist_ok=True)
    words = state / "server.txt"
    with words.open("wb") as errors:
        process = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"], stdout=subprocess.PIPE, stderr=errors
        )
    try:
        yield _listening(process, words)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _listening(process: "subprocess.Popen[bytes]", words: Path) -> Where:
    """Where the server is, once it would take an inference."""
    assert process.stdout is not None
    said = process.stdout.readline()
    where = msgspec.json.decode(said, type=Where) if said else Where(error="it said nothing")
    if where.error:
        raise MachineError(f"the server did not start: {where.error}", help=where.help or f"see {words}")
    until_s = monotonic() + READY_S
    while process.poll() is None and monotonic() < until_s:
        if is_ready(where.http):
            return where
        sleep(0.1)
    last = words.read_text(errors="replace").strip()[-LAST_WORDS:]
    raise MachineError(f"the server did not become ready: {last or 'no word'}", help=f"see {words}")


def is_ready(url: str) -> bool:
    """Whether the server at `url` would take an inference now."""
    try:
        with urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            status: Any = answer.status
            return bool(status == 200)
    except (URLError, OSError):  # 503 while it warms up is an URLError too
        return False
