"""Spans of requests for OpenTelemetry, exported by a process that follows the event log (`sloop.serve.otlp`).

A request is a server span whose parent is the client's (`traceparent`), with a child for each wait in a queue, each
batch, and the forward pass within it. The process reads the segments as they grow and sends spans by OTLP over HTTP, so
that the event loop does nothing for it; a collector that is slow or away costs spans, and nothing else. It ends when
the server closes its pipe, after it has read the rest.

A request whose client says whether its trace is sampled is treated so; of the others, a share is exported.
"""

import contextlib
import select
import socket
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

from sloop.actions import AdoptWorker, End, StartBatch, StartWorker
from sloop.errors import InputError
from sloop.events import BatchFailed, BatchLost, Finished, WorkerLost
from sloop.runlog import Record
from sloop.runlog.follow import LogFollower
from sloop.serve.processes import spawn
from sloop.vocabulary import ReplicaId, ReplicaSpec, Request, RequestId

PACKAGE: Final = "opentelemetry.exporter.otlp.proto.http"
INSTALL: Final = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
TRACES: Final = "/v1/traces"
"""The path of an OTLP receiver, if the URL has none."""
POLL_S: Final = 0.5
CLOSE_S_MAX: Final = 0.5
SAMPLED: Final = 0x01
OPEN_MAX: Final = 100_000
"""Requests that have not ended and are followed; those beyond are not exported."""


class SpanSettings(Struct, frozen=True):
    """Where spans are sent, and of which requests."""

    endpoint: str
    """The URL of an OTLP receiver over HTTP."""
    ratio: float = 1.0
    """The share of the requests without a trace of their own that are exported, 0 to 1."""

    def check(self) -> None:
        """InputError if spans cannot be sent."""
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).hostname:
            raise InputError(
                f"{self.endpoint!r} is not the URL of a receiver", where="--otlp", help="such as http://localhost:4318"
            )
        if find_spec("opentelemetry") is None or find_spec(PACKAGE) is None:
            what = "spans need the OpenTelemetry packages, which are not installed"
            raise InputError(what, where="--otlp", help=INSTALL)

    @property
    def url(self) -> str:
        """The endpoint with its path."""
        return self.endpoint if urlsplit(self.endpoint).path.strip("/") else self.endpoint.rstrip("/") + TRACES


class Spent(NamedTuple):
    """One interval in the life of a request."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, str | int | float]
    children: tuple["Spent", ...] = ()


class SpannedRequest(NamedTuple):
    """A request that has ended, with its intervals."""

    request: Request
    end: End
    end_ns: int
    spent: Sequence[Spent]


class _Followed(Struct):
    """A request that has not ended."""

    request: Request
    since_ns: int
    """When its last wait began."""
    spent: list[Spent]


class RequestSpans:
    """A fold over the log: the intervals of each request. `append` returns a request that has ended."""

    def __init__(self) -> None:
        self._open: dict[RequestId, _Followed] = {}
        self._running: dict[ReplicaId, tuple[int, StartBatch]] = {}
        self._specs: dict[ReplicaId, ReplicaSpec] = {}

    def append(self, now_ns: int, record: Record) -> SpannedRequest | None:
        """Add one record."""
        if isinstance(record, Request):
            if len(self._open) < OPEN_MAX:
                self._open[record.id] = _Followed(record, now_ns, [])
        elif isinstance(record, StartBatch):
            self._start(now_ns, record)
        elif isinstance(record, Finished | BatchFailed | BatchLost | WorkerLost):
            self._finish(now_ns, record)
        elif isinstance(record, StartWorker | AdoptWorker):
            self._specs[record.worker] = record.spec
        elif isinstance(record, End):
            found = self._open.pop(record.request, None)
            if found is not None:
                if now_ns > found.since_ns:
                    waits = not found.spent or found.spent[-1].name != "queue"
                    found.spent.append(Spent("queue" if waits else "batch", found.since_ns, now_ns, {}))
                return SpannedRequest(found.request, record, now_ns, found.spent)
        return None

    def _start(self, now_ns: int, batch: StartBatch) -> None:
        self._running[batch.replica] = now_ns, batch
        for request in dict.fromkeys(batch.requests):
            found = self._open.get(request)
            if found is not None:
                found.spent.append(Spent("queue", found.since_ns, now_ns, {"sloop.stage": batch.stage}))
                found.since_ns = now_ns

    def _finish(self, now_ns: int, record: Finished | BatchFailed | BatchLost | WorkerLost) -> None:
        replica = record.worker if isinstance(record, WorkerLost) else record.replica
        began_ns, batch = self._running.pop(replica, (0, None))
        spec = self._specs.get(replica)
        if isinstance(record, WorkerLost):
            self._specs.pop(replica, None)
        if batch is None:
            return
        attributes: dict[str, str | int | float] = {
            "sloop.stage": batch.stage,
            "sloop.batch": batch.batch,
            "sloop.batch_size": batch.rows,
            "sloop.replica": batch.replica,
        }
        if spec is not None:
            attributes |= {"sloop.variant": spec.variant, "sloop.cores": spec.cores}
        children: tuple[Spent, ...] = ()
        if isinstance(record, Finished):
            service_ns = min(record.service_ns, now_ns - began_ns)
            children = (Spent("service", now_ns - service_ns, now_ns, {"sloop.stage": batch.stage}),)
        else:
            attributes["sloop.error"] = record.error
        for request in dict.fromkeys(batch.requests):
            found = self._open.get(request)
            if found is not None:
                found.spent.append(Spent("batch", began_ns, now_ns, attributes, children))
                found.since_ns = now_ns


def is_wanted(request: Request, ratio: float, draw: float) -> bool:
    """Whether the spans of a request are exported: as its client says, or by chance (`draw`, 0 to 1)."""
    if request.trace:
        return bool(int(request.trace.rpartition("-")[2], 16) & SAMPLED)
    return draw < ratio


# The server's side


class SpanProcess:
    """The exporting process, which `start` starts; None for `settings` if nobody wants spans."""

    def __init__(self, settings: SpanSettings | None) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._ours: socket.socket | None = None

    def start(self, folder: Path, run: str, name: str, zero_unix_ns: int) -> None:
        """Follow the segments of a run of deployment `name`. `zero_unix_ns` is the Unix time of the log's instant 0."""
        settings = self._settings
        if settings is not None:
            theirs, self._ours = socket.socketpair()
            with theirs:
                arguments = (theirs.fileno(), folder, run, name, zero_unix_ns, settings.url, settings.ratio)
                self._process = spawn("sloop.serve.otlp", arguments, [theirs.fileno()])

    @property
    def has_ended(self) -> bool:
        """Whether no process follows the log."""
        return self._process is None or self._process.poll() is not None

    def close(self, within_s: float = CLOSE_S_MAX) -> None:
        """Let it read and send the rest of the log. Call it when the log is closed. If that takes longer than
        `within_s`, it goes on without the server, which need not wait for a collector."""
        if self._ours is not None and self._process is not None:
            self._ours.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)


# What the process reads


def records_of(folder: Path, run: str, stop: socket.socket) -> Iterator[tuple[int, Record] | None]:
    """The records of a run as they are written, until `stop` is closed and all are read. Between them None whenever
    there is nothing new."""
    with contextlib.closing(LogFollower(folder, run)) as log:
        has_ended = False
        while (records := log.read()) or not has_ended:
            yield from records
            if not records:
                yield None
                has_ended = bool(select.select([stop], [], [], POLL_S)[0])
