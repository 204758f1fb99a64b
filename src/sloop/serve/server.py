"""`sloop serve`: starts core, driver, backend and gateway in one process and one event loop, and stops them again.

A port, state folder or model that is not available is reported before anything starts. SIGTERM and SIGINT drain the
server within a bounded time and stop all workers. Everything that was started is stopped on every way out.
"""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import uvloop

from sloop.app.application import Application, SystemChoice
from sloop.app.hardware import foreign_profiles
from sloop.errors import InputError, MachineError
from sloop.profile.examine import examine
from sloop.runlog import FileLog, Header, Record
from sloop.serve.backends.local import LocalBackend
from sloop.serve.cpu_quota import capacity_cores, detect
from sloop.serve.dataflow import wire
from sloop.serve.driver import Driver
from sloop.serve.gateway.http import ALL_BYTES_MAX, BodyMemory, HttpServer
from sloop.serve.gateway.inputs import InputValidator
from sloop.serve.gateway.insight import Insight
from sloop.serve.gateway.metrics import Metrics
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.rpc import Rpc
from sloop.serve.gateway.service import InferenceService
from sloop.serve.protocols import Servable
from sloop.systems.replay import header_of
from sloop.systems.setup import Setup, set_up

LOCK: Final = "lock"
EVENTS: Final = "events.jsonl"
EARLIER: Final = "events.previous.jsonl"

_log: Final = logging.getLogger("sloop.server")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Lock `folder` for this server, creating it if necessary. Raises `MachineError` if another server holds it.

    The kernel releases the lock when the process ends, however that happens.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise MachineError(
            f"{folder}: the state folder cannot be used: {error.strerror}",
            help="name a folder that you may write, with --state",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise MachineError(
                f"{folder}: another server (process {holder}) uses this state folder",
                help="stop it, or give this server another folder with --state",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield folder


class Journal:
    """The event log on disk; the log of the previous run is kept in the same folder. Recording stops at `bytes_max`.

    Call `flush` about every second: a crash loses what was not flushed. A log that cannot be written never stops the
    server.
    """

    def __init__(self, folder: Path, header: Header, *, bytes_max: int) -> None:
        self.path = folder / EVENTS
        self._bytes_max = bytes_max
        with contextlib.suppress(OSError):
            self.path.replace(folder / EARLIER)
        self._file: FileLog | None = FileLog(self.path, header)

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Append the events and actions of one instant."""
        if self._file is not None:
            try:
                self._file.extend(now_ns, records)
            except MachineError as error:
                self._stop(str(error))

    def flush(self) -> None:
        """Write buffered records, and stop recording if the file has reached its limit."""
        if self._file is None:
            return
        try:
            self._file.flush()
            size = self.path.stat().st_size
        except (MachineError, OSError) as error:
            self._stop(str(error))
            return
        if size > self._bytes_max:
            self._stop(f"{self.path} has reached its limit of {self._bytes_max} bytes")

    def close(self) -> None:
        """Write buffered records and close the file. May be called repeatedly."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _stop(self, why: str) -> None:
        _log.warning("the event log has stopped, the server continues: %s", why)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(MachineError):
                file.close()


FLUSH_S: Final = 1.0
SWITCH_S: Final = 0.0005
"""How long a thread waits for the interpreter lock. Granian's thread passes requests to the event loop's thread; with
Python's default of 5 ms, the server handled half as many requests at 64 connections."""
GARBAGE_MIN: Final = 50_000
"""Allocations before Python searches for cyclic garbage. Requests create none; with Python's default of 700, the search
took a third of a request's time."""
ROWS_MAX: Final = 2**31 - 1
"""The largest dimension, for models whose first dimension is not the number of rows."""
LEAVE_S: Final = 1.0
"""How long clients have to receive their last answers after the drain."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an application is served. Port 0 selects a free port."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    api_key: str = ""
    body_bytes_max: int = 64 * 2**20
    bodies_bytes_max: int = ALL_BYTES_MAX
    """Bytes of all open requests together; at least `body_bytes_max`."""
    requests_max: int = 16_384
    """Open requests at the same time; further connections wait unread."""
    state_folder: Path | None = None
    """The folder of lock and event log; None: `.sloop/NAME` in the working directory."""
    log_bytes_max: int = 2**30
    """The size at which the event log stops; 0: no event log."""
    drain_s: float = 30.0
    """How long the server finishes open requests after SIGTERM."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server."""

    host: str
    http_port: int
    grpc_port: int
    driver: Driver
    backend: LocalBackend
    metrics: Metrics
    insight: Insight
    journal: Journal | None


def serve(
    application: Application,
    settings: Settings = Settings(),
    *,
    choice: SystemChoice | None = None,
    on_start: Callable[[Serving], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `on_start` is called when the ports are open.

    Raises `InputError` for an application that cannot be served, and `MachineError` for what the machine does not
    allow.
    """
    setup = set_up(application, choice)
    models = servables_of(application)

    async def main() -> None:
        stop_requested = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            _log.warning("draining; a second signal stops the server at once")
            loop.remove_signal_handler(number)
            stop_requested.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        async with serving(setup, models, settings) as server:
            on_start(server)
            await stop_requested.wait()

    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])
    uvloop.run(main())


@asynccontextmanager
async def serving(
    setup: Setup, models: Mapping[tuple[str, str], Servable], settings: Settings
) -> AsyncIterator[Serving]:
    """A running server, which is drained when the context ends. `models` maps (stage, variant) to its model."""
    application = setup.application
    if "live" not in setup.system.runs:
        raise InputError(
            f"system {setup.system.name!r} runs in the simulator only",
            where=application.locate(application.system.path),
            help="`sloop systems` shows which ones run live",
        )
    wiring = wire(
        application.graph,
        {key: model.signature for key, model in models.items()},
        rows_max=rows_max(setup, models),
        where=application.file,
    )
    check_cores(setup)
    for line in foreign_profiles(application):
        _log.warning("%s", line)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(locked(settings.state_folder or Path(".sloop") / application.name))
        core = setup.core()
        bodies = BodyMemory(settings.body_bytes_max, max(settings.bodies_bytes_max, settings.body_bytes_max))
        metrics = Metrics(application, bodies)
        insight = Insight(
            core,
            metrics.state,
            application=application.name,
            system=setup.system.name,
            clock=lambda: driver.now_ns,
        )
        journal = open_journal(setup, folder, settings.log_bytes_max)
        if journal is not None:
            stack.callback(journal.close)
        recorders = (metrics.state,) if journal is None else (metrics.state, journal)
        limits = detect()
        _log.info("cores of replicas are limited by %s", limits.why)
        backend = LocalBackend(models, limits.actuator, threads_prepared=threads_of(setup))
        stack.push_async_callback(backend.close)
        driver = Driver(core, backend, wiring, slo_ns=application.slo_ns, recorders=recorders)
        service = InferenceService(
            model=application.name,
            slo_ns=application.slo_ns,
            validator=InputValidator(wiring.signature),
            submitter=driver,
            unready=lambda: insight.unready() if driver.crash is None else f"the core failed: {driver.crash!r}",
            metrics=metrics.exposition,
            state=insight.state,
            decisions=insight.decisions,
            api_key=settings.api_key,
        )
        if not (settings.api_key or is_loopback(settings.host)):
            _log.warning("listening on %s without an API key: everybody who can connect is served", settings.host)
        listener = HttpServer(Rest(service).answer, bodies=bodies, requests_max=settings.requests_max)
        http_port = await listener.start(settings.host, settings.http_port)
        stack.push_async_callback(listener.close)
        rpc = Rpc(service, bodies=bodies, requests_max=settings.requests_max)
        grpc_port = await rpc.start(settings.host, settings.grpc_port)
        stack.push_async_callback(rpc.close, LEAVE_S)
        if journal is not None:
            flushing = asyncio.create_task(flush_for_ever(journal))
            stack.callback(flushing.cancel)
        driver.start()
        stack.push_async_callback(driver.drain, settings.drain_s)
        yield Serving(settings.host, http_port, grpc_port, driver, backend, metrics, insight, journal)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. A host name other than localhost counts as public."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def servables_of(application: Application) -> dict[tuple[str, str], Servable]:
    """The model and signature of every variant, read from its file. Raises `InputError` for a variant without a
    model."""
    found: dict[tuple[str, str], Servable] = {}
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if variant.model is None:
                raise InputError(
                    f"variant {variant.name!r} of stage {stage.name!r} has no model",
                    where=application.locate(f"stages[{index}]"),
                    help="add `model: FILE` to serve it; a variant with only a profile can be planned and simulated",
                )
            found[stage.name, variant.name] = Servable(variant.model, *examine(Path(variant.model)))
    return found


def rows_max(setup: Setup, models: Mapping[tuple[str, str], Servable]) -> int:
    """The most rows of one request: the smallest `max_batch` of all models that have a batch dimension."""
    limit = ROWS_MAX
    for key, belief in setup.beliefs.items():
        found = models[key].obstacle
        if not found:
            limit = min(limit, belief.batch_max)
        elif belief.batch_max > 1:
            advice = "each request runs alone, but the profile has larger batches; measure it with --batches 1"
            _log.warning("%s: %s: %s", models[key].model, found, advice)
    return limit


def check_cores(setup: Setup) -> None:
    """Raise `MachineError` if the application's cluster has more cores than this machine."""
    claimed, there = sum(node.cores for node in setup.application.cluster), capacity_cores()
    if claimed > there:
        raise MachineError(
            f"the application's cluster has {claimed:g} cores, this machine {there:g}",
            help="serve it with `cluster: {nodes: [{hardware: local, count: 1}]}`; other clusters can be simulated",
        )


def threads_of(setup: Setup) -> int:
    """The largest thread count that a replica can be resized to."""
    return round(min(capacity_cores(), max(belief.cores_max for belief in setup.beliefs.values())))


def open_journal(setup: Setup, folder: Path, bytes_max: int) -> Journal | None:
    """The event log of this run, or None if `bytes_max` is 0."""
    if not bytes_max:
        return None
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Journal(folder, header_of(setup, origin="live", date=date), bytes_max=bytes_max)


async def flush_for_ever(journal: Journal) -> None:
    """Write the event log to disk every second, which bounds what a crash can lose."""
    while True:
        await asyncio.sleep(FLUSH_S)
        journal.flush()
