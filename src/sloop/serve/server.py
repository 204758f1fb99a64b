"""`sloop serve`: core, driver, backend and gateway put together in one process and one event loop, and their life.

Promises that what cannot be had (a port, the state folder, a model) is refused before anything is started, that SIGTERM
and SIGINT drain within a bound and leave with all workers gone, and that whatever was begun is undone on every way out.
Takes no decision and answers no request.
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
from sloop.app.foreign import foreign_profiles
from sloop.errors import InputError, MachineError
from sloop.profile.examine import examine
from sloop.runlog import FileLog, Header, Record
from sloop.serve.backends.local import LocalBackend
from sloop.serve.cpu_quota import capacity_cores, detect
from sloop.serve.dataflow import wire
from sloop.serve.driver import Driver
from sloop.serve.gateway.http import ALL_BYTES_MAX, Bodies, HttpServer
from sloop.serve.gateway.inputs import Intake
from sloop.serve.gateway.insight import Insight
from sloop.serve.gateway.metrics import Metrics
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.rpc import Rpc
from sloop.serve.gateway.service import Service
from sloop.serve.protocols import Servable
from sloop.systems.replay import header_of
from sloop.systems.setup import Setup, set_up

# == folder: The server's folder on disk: one server at a time, and the event log, bounded.
#
# Promises that a second server on the same folder is refused with the first one's process id, and that the log never
# grows beyond its bound or takes the server down. The lock is the kernel's: it goes with the process, however that ends.


LOCK: Final = "lock"
EVENTS: Final = "events.jsonl"
EARLIER: Final = "events.previous.jsonl"

_log_folder: Final = logging.getLogger("sloop.server")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold `folder`, which is made if need be, for this server alone. Raises `MachineError`."""
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
                help="stop it, or give this server a folder of its own with --state",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield folder


class Journal:
    """The event log on disk, the previous run's kept beside it. Stops recording at `bytes_max` rather than fill a disk.

    `flush` is to be called about every second: it is what a crash can cost.
    """

    def __init__(self, folder: Path, header: Header, *, bytes_max: int) -> None:
        self.path = folder / EVENTS
        self._bytes_max = bytes_max
        with contextlib.suppress(OSError):
            self.path.replace(folder / EARLIER)
        self._file: FileLog | None = FileLog(self.path, header)

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Take the events and actions of one instant."""
        if self._file is not None:
            try:
                self._file.extend(now_ns, records)
            except MachineError as error:
                self._stop(str(error))

    def flush(self) -> None:
        """Write what is held back, and look how much there is."""
        if self._file is None:
            return
        try:
            self._file.flush()
            size = self.path.stat().st_size
        except (MachineError, OSError) as error:
            self._stop(str(error))
            return
        if size > self._bytes_max:
            self._stop(f"{self.path} has reached its bound of {self._bytes_max} bytes")

    def close(self) -> None:
        """Write what is held back; closing twice does no harm."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _stop(self, why: str) -> None:
        _log_folder.warning("serving goes on, its event log does not: %s", why)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(MachineError):
                file.close()


FLUSH_S: Final = 1.0
SWITCH_S: Final = 0.0005
"""How long a thread that wants the interpreter waits for the one that has it. Granian's thread hands requests over to
the event loop's; at Python's own 5 ms the same server took half as many requests at 64 connections."""
GARBAGE_MIN: Final = 50_000
"""Objects made and not freed before Python looks for cycles among them. Requests leave none behind: at Python's own
700, with everything imported looked through again and again, the search took a third of a request's time."""
ROWS_MAX: Final = 2**31 - 1
"""A dimension's bound, for models whose first one does not count rows."""
LEAVE_S: Final = 1.0
"""After the drain, how long clients have to take their last answers."""

_log: Final = logging.getLogger("sloop.server")


@dataclass(frozen=True, slots=True)
class Settings:
    """How an application is served. Port 0 asks for a free one."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    api_key: str = ""
    body_bytes_max: int = 64 * 2**20
    bodies_bytes_max: int = ALL_BYTES_MAX
    """Bytes of all requests inside together, at least those of one."""
    requests_max: int = 16_384
    """Requests inside at once; beyond that, connections wait unread."""
    state_folder: Path | None = None
    """Lock and event log; `.sloop/NAME` here where None."""
    log_bytes_max: int = 2**30
    """Where the event log stops; 0 keeps none."""
    drain_s: float = 30.0
    """How long a server that is told to stop goes on with what it has."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs."""

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
    """Serve until SIGTERM or SIGINT, then drain. `on_start` is told once the ports are open.

    Raises `InputError` for an application that cannot be served, `MachineError` for what this machine refuses.
    """
    setup = set_up(application, choice)
    models = servables_of(application)

    async def main() -> None:
        told_to_stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            _log.warning("stopping; a second signal stops at once")
            loop.remove_signal_handler(number)
            told_to_stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        async with serving(setup, models, settings) as server:
            on_start(server)
            await told_to_stop.wait()

    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])
    uvloop.run(main())


@asynccontextmanager
async def serving(
    setup: Setup, models: Mapping[tuple[str, str], Servable], settings: Settings
) -> AsyncIterator[Serving]:
    """A running server; leaving the context drains it. `models` by (stage, variant)."""
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
        bodies = Bodies(settings.body_bytes_max, max(settings.bodies_bytes_max, settings.body_bytes_max))
        metrics = Metrics(application, bodies)
        insight = Insight(core, application=application.name, system=setup.system.name, clock=lambda: driver.now_ns)
        journal = open_journal(setup, folder, settings.log_bytes_max)
        if journal is not None:
            stack.callback(journal.close)
        recorders = (metrics, insight) if journal is None else (metrics, insight, journal)
        backend = LocalBackend(models, detect().actuator, threads_prepared=threads_of(setup))
        stack.push_async_callback(backend.close)
        driver = Driver(core, backend, wiring, slo_ns=application.slo_ns, recorders=recorders)
        service = Service(
            model=application.name,
            slo_ns=application.slo_ns,
            intake=Intake(wiring.signature),
            submitter=driver,
            unready=lambda: insight.unready() if driver.crash is None else f"the core has failed: {driver.crash!r}",
            metrics=metrics.exposition,
            state=insight.state,
            decisions=insight.decisions,
            api_key=settings.api_key,
        )
        if not (settings.api_key or is_loopback(settings.host)):
            _log.warning("%s is open to others and no API key is set: whoever reaches it is served", settings.host)
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
    """Whether only this machine can connect to `host`; a name is believed to be another's unless it is localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def servables_of(application: Application) -> dict[tuple[str, str], Servable]:
    """Every variant's model with its signature, read from its file. Raises `InputError` for one without a model."""
    found: dict[tuple[str, str], Servable] = {}
    for index, stage in enumerate(application.stages):
        for variant in stage.variants:
            if variant.model is None:
                raise InputError(
                    f"variant {variant.name!r} of stage {stage.name!r} has no model",
                    where=application.locate(f"stages[{index}]"),
                    help="a variant with only a profile can be planned and simulated; to serve it, add `model: FILE`",
                )
            found[stage.name, variant.name] = Servable(variant.model, *examine(Path(variant.model)))
    return found


def rows_max(setup: Setup, models: Mapping[tuple[str, str], Servable]) -> int:
    """The most rows of one request: as many as the smallest batch believed in, of models that count rows at all."""
    limit = ROWS_MAX
    for key, belief in setup.beliefs.items():
        found = models[key].obstacle
        if not found:
            limit = min(limit, belief.batch_max)
        elif belief.batch_max > 1:
            each = "each request gets a pass of its own, for which its profile promises too much; measure --batches 1"
            _log.warning("%s: %s: %s", models[key].model, found, each)
    return limit


def check_cores(setup: Setup) -> None:
    """Refuse a cluster that claims more cores than this machine has: its plans would be wishes."""
    claimed, there = sum(node.cores for node in setup.application.cluster), capacity_cores()
    if claimed > there:
        raise MachineError(
            f"the application's cluster has {claimed:g} cores, this machine {there:g}",
            help="serve it with `cluster: {nodes: [{hardware: local, count: 1}]}`; other clusters can be simulated",
        )


def threads_of(setup: Setup) -> int:
    """Thread counts worth preparing for resizes: those a replica may come to have."""
    return round(min(capacity_cores(), max(belief.cores_max for belief in setup.beliefs.values())))


def open_journal(setup: Setup, folder: Path, bytes_max: int) -> Journal | None:
    """The event log of this run, if one is wanted."""
    if not bytes_max:
        return None
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Journal(folder, header_of(setup, origin="live", date=date), bytes_max=bytes_max)


async def flush_for_ever(journal: Journal) -> None:
    """Keep what a crash can cost to about a second."""
    while True:
        await asyncio.sleep(FLUSH_S)
        journal.flush()
