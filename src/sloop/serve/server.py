"""`sloop serve`: starts core, driver, planner, backend and gateway, all but the planner and the workers in one process
and one event loop, and stops them again.

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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import uvloop

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.core.control import plans_beside
from sloop.errors import MachineError
from sloop.runlog import FileLog, Header, Record
from sloop.serve.backends.local import LocalBackend
from sloop.serve.control import ControlSocket
from sloop.serve.cpu_quota import capacity_cores, detect
from sloop.serve.deploy import (
    Deployer,
    Models,
    check_live,
    model_of,
    rows_max,
    servables_of,
    served_version,
    threads_of,
    warnings_of,
)
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.gateway.http import ALL_BYTES_MAX, BodyMemory, HttpServer
from sloop.serve.gateway.insight import Insight
from sloop.serve.gateway.metrics import Metrics
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.rpc import Rpc
from sloop.serve.gateway.service import InferenceService
from sloop.serve.planner import Definition, PlannerProcess
from sloop.serve.protocols import Servable
from sloop.systems.replay import header_of
from sloop.systems.setup import Setup, build, definition_of, set_up

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
ALL_REQUESTS_MAX: Final = 16_384
LEAVE_S: Final = 1.0
"""How long clients have to receive their last answers after the drain."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a deployment is served. Port 0 selects a free port."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    api_key: str = ""
    body_bytes_max: int = 64 * 2**20
    bodies_bytes_max: int = 0
    """Bytes of all open requests together; 0: the deployment's limit, or else `ALL_BYTES_MAX`."""
    requests_max: int = 0
    """Open requests at the same time; further connections wait unread. 0: the deployment's limit, or else
    `ALL_REQUESTS_MAX`."""
    state_folder: Path | None = None
    """The folder of lock, control socket and event log; None: `.sloop/NAME` in the working directory, with the name of
    the deployment."""
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
    planner: PlannerProcess
    metrics: Metrics
    insight: Insight
    journal: Journal | None
    folder: Path
    """The state folder, with the control socket."""


def serve(
    declared: Application | Deployment,
    settings: Settings = Settings(),
    *,
    choice: SystemChoice | None = None,
    on_start: Callable[[Serving], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `on_start` is called when the ports are open.

    Raises `InputError` for an application that cannot be served, and `MachineError` for what the machine does not
    allow.
    """
    setup = set_up(declared, choice)
    models = models_of(setup)

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
async def serving(setup: Setup, models: Models, settings: Settings) -> AsyncIterator[Serving]:
    """A running server, which is drained when the context ends. `models` maps (stage, variant) to its model."""
    deployment, versions = setup.deployment, versions_of(setup, models)
    check_cores(deployment)
    for each in setup.applications:
        for line in warnings_of(each, models):
            _log.warning("%s", line)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(locked(settings.state_folder or Path(".sloop") / deployment.name))
        planner = planner_of(setup)
        stack.push_async_callback(planner.close)
        core = setup.core()
        bytes_max = settings.bodies_bytes_max or deployment.limits.bytes or ALL_BYTES_MAX
        requests_max = settings.requests_max or deployment.limits.requests or ALL_REQUESTS_MAX
        bodies = BodyMemory(min(settings.body_bytes_max, bytes_max), bytes_max)
        metrics = Metrics(setup.parts(), bodies, nodes=deployment.cluster, build=build)
        insight = Insight(
            core,
            metrics,
            deployment=deployment.name,
            system=setup.applications[0].system,
            clock=lambda: driver.now_ns,
            failure=lambda: "" if driver.crash is None else f"the core failed: {driver.crash!r}",
        )
        journal = open_journal(setup, folder, settings.log_bytes_max)
        if journal is not None:
            stack.callback(journal.close)
        recorders = (metrics.state,) if journal is None else (metrics.state, journal)
        limits = detect()
        _log.info("cores of replicas are limited by %s", limits.why)
        threads = max(threads_of(each.beliefs) for each in setup.applications)
        backend = LocalBackend(models, limits.actuator, nodes=deployment.cluster, threads_prepared=threads)
        stack.push_async_callback(backend.close)
        driver = Driver(core, backend, versions, planner=planner, recorders=recorders)
        service = InferenceService(driver, insight, bodies, settings.api_key)
        for application, served in zip(deployment.applications, versions, strict=True):
            service.add(model_of(application, served))
        deployer = Deployer(deployment, core, driver, backend, planner, service)
        if not (settings.api_key or is_loopback(settings.host)):
            _log.warning("listening on %s without an API key: everybody who can connect is served", settings.host)
        listener = HttpServer(Rest(service).answer, bodies=bodies, requests_max=requests_max)
        http_port = await listener.start(settings.host, settings.http_port)
        stack.push_async_callback(listener.close)
        rpc = Rpc(service, requests_max=requests_max)
        grpc_port = await rpc.start(settings.host, settings.grpc_port)
        stack.push_async_callback(rpc.close, LEAVE_S)
        if journal is not None:
            flushing = asyncio.create_task(flush_for_ever(journal))
            stack.callback(flushing.cancel)
        driver.start()
        stack.push_async_callback(driver.drain, settings.drain_s)
        control = ControlSocket(deployer.handle)
        control.start(folder)
        stack.push_async_callback(control.close)
        yield Serving(settings.host, http_port, grpc_port, driver, backend, planner, metrics, insight, journal, folder)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. A host name other than localhost counts as public."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def models_of(setup: Setup) -> dict[tuple[str, str], Servable]:
    """The models of all applications. InputError for a variant without one."""
    return {key: model for each in setup.applications for key, model in servables_of(each.application).items()}


def versions_of(setup: Setup, models: Models) -> list[ServedVersion]:
    """The applications as the driver serves them. InputError for one that cannot be served."""
    found: list[ServedVersion] = []
    for each in setup.applications:
        check_live(each)
        own = {key: model for key, model in models.items() if key[0] in each.application.by_name}
        found.append(served_version(each.application, own, rows_max(each.beliefs, own)))
    return found


def planner_of(setup: Setup) -> PlannerProcess:
    """The planner process of the deployment. It is started only if the core will ask it for plans."""
    planner = PlannerProcess(asyncio.get_running_loop())
    for each in setup.applications:
        application = each.application
        planner.add(application.key, Definition(application.name, application.version, definition_of(each)))
    if plans_beside([each.system.policies.scale for each in setup.applications]):
        planner.start()
    return planner


def check_cores(deployment: Deployment) -> None:
    """Raise `MachineError` if the deployment's cluster has more cores than this machine."""
    claimed, there = sum(node.cores for node in deployment.cluster), capacity_cores()
    if claimed > there:
        raise MachineError(
            f"the cluster has {claimed:g} cores, this machine {there:g}",
            help="serve it with `cluster: {nodes: [{hardware: local, count: 1}]}`; other clusters can be simulated",
        )


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
