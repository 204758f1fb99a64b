"""`sloop serve`: starts core, driver and backend in one process and one event loop, and with them edges, planner and
workers, and stops them again.

A port, state folder or model that is not available is reported before anything starts. SIGTERM leaves load balancers a
moment to see that the server is not ready any more; then, or on SIGINT, it drains within a bounded time and stops all
workers. Everything that was started is stopped on every way out.
"""

import asyncio
import errno
import fcntl
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import structs

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.limits import ServerLimits
from sloop.core.planner import plans_beside
from sloop.errors import InputError, MachineError
from sloop.events import Deployed
from sloop.machine import capacity, hardware_name
from sloop.memory import return_large_memory
from sloop.profile.measure import PROFILES
from sloop.runlog import older_log
from sloop.runlog.segments import FOLDER
from sloop.serve.cluster.agents import AgentBackend, NodeMemory, NodeSettings
from sloop.serve.control.checks import warnings_of
from sloop.serve.control.cutting import starts_parts
from sloop.serve.control.deployer import Deployer
from sloop.serve.control.loading import LOADED, LeftOut, begun, versions_of
from sloop.serve.control.memory import VersionMemory
from sloop.serve.control.orders import ControlSocket
from sloop.serve.control.repository import ModelRepository
from sloop.serve.control.servables import COPIES, Models
from sloop.serve.control.versions import offer_of, threads_of, wirings_of
from sloop.serve.copies import ExaminedModels
from sloop.serve.cpu_quota import detect
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.listener import Tls, raise_descriptor_limit
from sloop.serve.edge.process import GARBAGE_MIN, EdgeSettings
from sloop.serve.edge.service import ADMIN, Keys
from sloop.serve.edges import Edges, EdgeSockets, open_sockets
from sloop.serve.gpus import AssignedGpus, opened_gpus
from sloop.serve.insight import Insight
from sloop.serve.journal import Journal, LogLimits, Observed
from sloop.serve.metrics import Metrics
from sloop.serve.network import HolderTable
from sloop.serve.node.node import LiveNode
from sloop.serve.node.spares import usual_spares_max
from sloop.serve.planner import PlannerProcess
from sloop.serve.private import NOBODY, make_private
from sloop.serve.protocols import Backend
from sloop.serve.simulations import SimulationProcesses
from sloop.serve.spans import SpanProcess, SpanSettings
from sloop.serve.stderr import lines_dropped, reopen_outputs
from sloop.shared_memory import Arenas
from sloop.systems.replay import header_of
from sloop.systems.setup import ApplicationSetup, Setup, build, definition_of
from sloop.text import listed

LOCK: Final = "lock"
NODES: Final = "nodes"
"""The file, in a state folder, of what a server leaves to the next one (`sloop.serve.cluster.agents.NodeMemory`)."""

_log: Final = logging.getLogger("sloop.server")


@contextmanager
def locked(folder: Path, log_group: int = NOBODY) -> Iterator[Path]:
    """Lock `folder` for this server, creating it if necessary. Raises `MachineError` if another server holds it. Others
    than its user may not enter it, except a group that may read the logs.

    The kernel releases the lock when the process ends, however that happens.
    """
    prepare(folder, log_group)
    try:
        (folder / LOCK).touch(0o600)
        file = (folder / LOCK).open("ab+", buffering=0)  # a buffer would be written again, and fail again, at the close
    except OSError as error:
        raise unusable(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "unknown"
            raise MachineError(
                f"{folder}: another server (process {holder}) uses this state folder",
                help="stop it, or give this server another folder with --state",
            ) from error
        try:
            if file.seek(0, os.SEEK_END):
                file.truncate(0)
            file.write(b"%d\n" % os.getpid())
        except OSError as error:
            raise unusable(folder, error) from error
        yield folder


def prepare(folder: Path, log_group: int = NOBODY) -> None:
    """Make a state folder, or close one to others (`make_private`). Raises `MachineError` if there can be none."""
    try:
        make_private(folder, FOLDER, log_group)
    except OSError as error:
        raise unusable(folder, error) from error


def check_usable(settings: "Settings", deployment: Deployment) -> Path:
    """The state folder. MachineError if it, something in it, or an access log could not be written, or if a port is in
    use. To be called before anything is measured or started."""
    with opened(settings, 1):
        pass
    if settings.access_log:
        AccessLog.check(settings.access_log, settings.log_group)
    with locked(settings.folder_of(deployment), settings.log_group) as folder:
        for inner in [folder / name for name in (FOLDER, COPIES, PROFILES)]:
            if inner.exists() and not os.access(inner, os.W_OK | os.X_OK):
                raise unusable(inner, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return folder


def unusable(folder: Path, error: OSError) -> MachineError:
    """The error for a state folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free some space, or name a folder on another disk with --state"
    else:
        fix = "name a folder that you may write, with --state"
    return MachineError(f"{folder}: the state folder cannot be used: {error.strerror}", help=fix)


SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
LOOK_READY_S: Final = 0.1
NOT_READY_S: Final = 10.0
"""A server that is not ready after this time says why, and again each time when twice as much time has passed."""
STOPPED_EARLY: Final = "stopping before the start is over"
FLUSH_S: Final = 1.0
SWITCH_S: Final = 0.0005
"""How long a thread, such as the one that writes the log, may keep the interpreter from the event loop. Python's
default is 5 ms."""
GRACE_S: Final = 3.0
"""HAProxy, as configured in `deploy/`, notices within 2 s that a server is not ready. Kubernetes takes an ending pod
out of its Services whether it is ready or not, which usually reaches all nodes within a second."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a deployment is served. Port 0 selects a free port."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int | None = 8001
    """None: no gRPC."""
    api_key: str = ""
    """A key that clients may send; empty for none."""
    api_key_file: Path | None = None
    """Keys that clients may send, one per line; read again when the file changes, and on SIGHUP. See `Keys`."""
    tls: Tls | None = None
    cors_origin: str = ""
    """The origin whose pages in a browser may use the server, `*` for all, empty for none."""
    state_folder: Path | None = None
    """The folder of lock, control socket and event log; None: `.sloop/NAME` in the working directory, with the name of
    the deployment."""
    access_log: str = ""
    """The file of the access log, `-` for stdout; empty for none."""
    log_group: int = NOBODY
    """The number of a group that may read event log and access log."""
    spans: SpanSettings | None = None
    """Where OpenTelemetry spans of requests are sent; None for nowhere."""
    repository: Path | None = None
    """The folder whose application files clients may load; None if they may not load or end models."""
    grace_s: float = GRACE_S
    """How long the server goes on serving after SIGTERM, as one that is not ready."""
    nodes: NodeSettings | None = None
    """How the machines of the cluster are reached; None if this machine is all there is."""

    edges: int | None = None
    """Processes that accept connections of HTTP and parse requests. None: those of the deployment, or else one."""
    answers: str = ""
    """The module of the process that simulates for systems that ask (`sloop.serve.simulations`); empty for none."""

    def edges_of(self, deployment: Deployment) -> int:
        """How many edges there are for HTTP."""
        return self.edges or deployment.edges or 1

    def edge(self, deployment: Deployment) -> EdgeSettings:
        """What all edges together may hold, and how they speak with clients."""
        return EdgeSettings(
            deployment.limits,
            self.cors_origin,
            self.tls,
            self.api_key,
            self.api_key_file,
            has_repository=self.repository is not None,
            access_log=self.access_log,
            log_group=self.log_group,
        )

    def folder_of(self, deployment: Deployment) -> Path:
        """The state folder of a server for this deployment."""
        return self.state_folder or Path(".sloop") / deployment.name


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server."""

    host: str
    http_port: int
    grpc_port: int | None
    driver: Driver
    backend: Backend
    planner: PlannerProcess
    metrics: Metrics
    insight: Insight
    journal: Journal | None
    folder: Path
    """The state folder, with the control socket."""
    edges: Edges
    deployment: Deployment
    """What it began with."""


def serve(
    declared: Application | Deployment,
    settings: Settings = Settings(),
    *,
    choice: SystemChoice | None = None,
    on_start: Callable[[Serving], None] = lambda _: None,
    left_out: LeftOut = LOADED,
    examined: ExaminedModels | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; after SIGTERM, first serve for `grace_s` more. `on_start` is called
    when the ports are open. A server whose core has failed ends at once, so that whoever supervises it can start
    another.

    Raises `InputError` for an application that cannot be served, and `MachineError` for what the machine does not
    allow. Of several applications, those whose models cannot be loaded are left out and tried again, as long as there
    is another one; `left_out` has those that are left out already, by name, and `examined` what was examined a moment
    ago.
    """
    deployment = declared if isinstance(declared, Deployment) else Deployment.of(declared)
    memory = VersionMemory(settings.folder_of(deployment), deployment, choice)
    memory.read(left_out)
    setup, models, refused = begun(deployment, choice, memory, examined)
    left_out = {name: each for name, each in left_out.items() if name not in memory.restored.versions} | refused

    async def main() -> None:
        orders, loop = StopOrders(settings.grace_s), asyncio.get_running_loop()

        async def run() -> None:
            async with serving(setup, models, settings, left_out, memory) as server:
                orders.begin(server.insight.withdraw)
                signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(reload, server))
                on_start(server)
                watching = asyncio.create_task(server.driver.crashed.wait())
                watching.add_done_callback(lambda _: orders.drain_requested.set())
                telling = asyncio.create_task(tell_when_ready(server.insight))
                await orders.drain_requested.wait()
                watching.cancel()
                telling.cancel()
                has_failed, backend = server.driver.crash is not None, server.backend
                if has_failed and isinstance(backend, AgentBackend):
                    await backend.leave()
            signal.signal(signal.SIGHUP, _ignore)
            if server.driver.crash is not None:
                what = f"the core has failed: {server.driver.crash!r}"
                raise MachineError(what, help="a bug of sloop: report the traceback above, with the event log")

        await orders.obey(run())

    signal.signal(signal.SIGHUP, _ignore)
    sys.setswitchinterval(SWITCH_S)
    return_large_memory()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])
    uvloop.run(main())


async def tell_when_ready(insight: Insight, said_after_s: float = NOT_READY_S) -> None:
    """Write a line when the server is ready for the first time; until then, why it is not, from time to time."""
    began_s = time.monotonic()
    while why := (found := insight.server_readiness()).why:
        if time.monotonic() - began_s >= said_after_s:
            _log.warning("not ready after %g s: %s", said_after_s, why)
            said_after_s *= 2
        await asyncio.sleep(LOOK_READY_S)
    without = f", without {listed(sorted(found.models))}" if found.models else ""
    _log.info("ready after %.1f s%s", time.monotonic() - began_s, without)
    for name, each in sorted(found.models.items()):
        _log.warning("%s is not ready: %s", name, each.why)


def reload(server: Serving) -> None:
    """What SIGHUP asks for: keys and certificates are read again, and logs go on in new files."""
    server.edges.reload()
    if server.journal is not None:
        server.journal.reopen()
    reopen_outputs()


def _ignore(*_: object) -> None:
    """For SIGHUP, which may come at any time, also before and after there is something to reload. A handler, because
    processes would inherit that the signal is ignored."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Before a server starts, which may take long if models are fetched and measured, SIGTERM ends the process in
    order, also where it is the first one of a container: that one gets no signal for which it has no handler."""

    stopped = SystemExit(0)

    def stop(*_: object) -> None:
        _log.warning(STOPPED_EARLY)
        raise stopped

    signal.signal(signal.SIGHUP, _ignore)
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except SystemExit as error:
        if error is stopped:  # what was begun has been ended
            os._exit(0)  # a library that is being loaded may have threads, with which the interpreter's end is a crash
        raise
    finally:
        signal.signal(signal.SIGTERM, former)


class StopOrders:
    """What signals ask of a server. SIGTERM: withdraw readiness, and drain when `grace_s` have passed.
    SIGINT, or a second signal before that: drain now. A further one ends the process. Create it in the running event
    loop."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._withdraw: Callable[[], None] | None = None
        """Withdraws readiness; None until there is something to withdraw."""
        self._running: asyncio.Task[None] | None = None
        self._is_leaving = False
        self.drain_requested = asyncio.Event()

    def begin(self, withdraw: Callable[[], None]) -> None:
        """It has started: from now on, it goes on for a while when it is told to stop."""
        self._withdraw = withdraw

    async def obey(self, run: Coroutine[Any, Any, None]) -> None:
        """Run it until it ends; before it has started, any signal cancels it."""
        self._running = asyncio.create_task(run)
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self._stop, number)
        try:
            await self._running
        except asyncio.CancelledError:
            if self._withdraw is not None or not self.drain_requested.is_set():
                raise

    def _stop(self, number: int) -> None:
        if self._withdraw is None:
            self._drain(STOPPED_EARLY)
            assert self._running is not None
            self._running.cancel()  # it may wait for other machines
        elif number == signal.SIGTERM and self._grace_s and not self._is_leaving:
            _log.warning("serving for %g s more (--grace-s), as not ready; a second signal skips that", self._grace_s)
            self._is_leaving = True
            self._withdraw()
            self._loop.call_later(self._grace_s, self._drain)
        else:
            self._drain()

    def _drain(self, what: str = "draining") -> None:
        if self.drain_requested.is_set():
            return
        _log.warning("%s; a further signal stops it at once", what)
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)
        if os.getpid() == 1:  # of a container: it gets no signal for which it has no handler
            signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
        self.drain_requested.set()


@asynccontextmanager
async def serving(
    setup: Setup, models: Models, settings: Settings, left_out: LeftOut = LOADED, memory: VersionMemory | None = None
) -> AsyncIterator[Serving]:
    """A running server, drained when the context ends. `models` are by (stage, variant); `left_out` is tried again."""
    deployment, versions = setup.deployment, versions_of(setup, models)
    raise_descriptor_limit()
    check(setup, models, settings, Keys(settings.api_key, settings.api_key_file))
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(locked(settings.folder_of(deployment), settings.log_group))
        here = nullcontext((deployment, None)) if settings.nodes is not None else opened_gpus(deployment, folder)
        deployment, gpus = stack.enter_context(here)
        followed = settings.nodes is not None and settings.nodes.port
        node_memory = NodeMemory(folder / NODES if followed else None)
        setup = replace(setup, deployment=deployment, first_worker=node_memory.first_worker)
        sockets = stack.enter_context(opened(settings, settings.edges_of(deployment)))
        planner = planner_of(setup)
        stack.push_async_callback(planner.close)
        core = setup.core()
        metrics = Metrics(
            setup.parts(),
            lambda: edges.counts(),  # noqa: PLW0108  # they come later
            turns=lambda: driver.turns,
            lost=lambda: {"events": 0 if journal is None else journal.lost_records, "stderr": lines_dropped()},
            edges=lambda: edges.serving(),  # noqa: PLW0108  # likewise
            edges_lost=lambda: edges.deaths,
            spares=lambda: backend.spare_processes(),  # noqa: PLW0108  # likewise
            joining=lambda model, version: driver.joining(model, version),  # noqa: PLW0108  # likewise
            nodes=deployment.cluster,
            build=build,
        )
        insight = Insight(
            core,
            metrics,
            deployment=deployment.name,
            system=setup.applications[0].system,
            clock=lambda: driver.now_ns,
            answered_rows=lambda model, version: driver.answered_rows(model, version),  # noqa: PLW0108  # likewise
            failure=lambda: "" if driver.crash is None else f"the core failed: {driver.crash!r}",
            edges=lambda: edges.serving_edges(),  # noqa: PLW0108  # likewise
        )
        journal = open_journal(setup, folder, deployment.limits, Observed(core, metrics.state, planner.save))
        recorders = [each for each in (metrics.state, journal) if each is not None]
        arenas = Arenas()
        holders = HolderTable()
        backend = backend_of(setup, models, versions, arenas, settings, node_memory, holders, gpus)
        stack.push_async_callback(backend.close)
        driver = Driver(core, backend, versions, planner=planner, explains=core, recorders=recorders, free=arenas.free)
        stack.enter_context(written(journal, deployment.name, driver, settings, lambda: edges.taken_ns()))  # noqa: PLW0108
        bounds = settings.edge(deployment)
        if settings.nodes is not None:
            bounds = structs.replace(bounds, token=node_memory.token, node_tls=settings.nodes.tls)
        edges = Edges(driver, insight.ask, arenas, bounds, sockets, folder, holders=holders)
        offer_all(edges, deployment, versions, insight)
        memory = memory or VersionMemory(folder, deployment)
        stack.push_async_callback(memory.written)
        deployer = Deployer(deployment, core, driver, backend, planner, edges, insight, memory)
        stack.enter_context(deployer.keeping(models, left_out))
        insight.repository = repository = ModelRepository(deployer, settings.repository)
        stack.push_async_callback(edges.close)
        await start(driver, edges, backend)
        stack.push_async_callback(driver.drain, deployment.limits.drain_s, edges.delivered)
        stack.callback(edges.drain)
        stack.push_async_callback(repository.close)
        control = ControlSocket(deployer.handle)
        control.start(folder)
        stack.push_async_callback(control.close)
        yield Serving(
            *(settings.host, *sockets.ports, driver, backend, planner, metrics, insight, journal, folder, edges),
            deployment,
        )


async def start(driver: Driver, edges: Edges, backend: Backend) -> None:
    """Let the core begin when the edges accept connections and the nodes are there."""
    driver.wait()
    await edges.start()
    await backend.open()
    driver.start()


def offer_all(edges: Edges, deployment: Deployment, versions: Sequence[ServedVersion], insight: Insight) -> None:
    """Tell the edges of the applications with which a server begins."""
    for application, served in zip(deployment.applications, versions, strict=True):
        edges.offer(offer_of(application, [served], insight.versions(application.name)))


@contextmanager
def opened(settings: Settings, edges: int) -> Iterator[EdgeSockets]:
    """The listening sockets of all edges, which are closed when the context ends."""
    sockets = open_sockets(settings.host, settings.http_port, settings.grpc_port, edges)
    try:
        yield sockets
    finally:
        sockets.close()


def backend_of(
    setup: Setup,
    models: Models,
    versions: Sequence[ServedVersion],
    arenas: Arenas,
    settings: Settings,
    memory: NodeMemory,
    holders: HolderTable,
    gpus: AssignedGpus | None = None,
) -> Backend:
    """The backend of a deployment: its models and stages, on the nodes of its cluster."""
    wirings = {stage: wiring for served in versions for stage, wiring in wirings_of(served).items()}
    threads = max(threads_of(each) for each in setup.applications)
    cluster, nodes = setup.deployment.cluster, settings.nodes
    if nodes is not None:
        from sloop.serve.cluster.ray import RayNodes  # noqa: PLC0415  # only who asks for Ray needs it

        return AgentBackend(
            *(models, wirings, RayNodes(nodes.ray_address, nodes.tls)),
            arenas=arenas,
            nodes=cluster,
            port=nodes.port,
            pid=os.getpid(),
            memory=memory,
            tls=nodes.tls,
            threads_prepared=threads,
            holders=holders,
        )
    quotas, spares = detect(), setup.deployment.limits.spare_workers
    _log.info("cores of replicas are limited by %s", quotas.why)
    return LiveNode(
        *(models, wirings, quotas.actuator),
        arenas=arenas,
        nodes=cluster,
        gpus=gpus,
        threads_prepared=threads,
        spares_max=usual_spares_max() if spares is None else spares,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`. A host name other than localhost counts as public."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def planner_of(setup: Setup) -> PlannerProcess:
    """The planner process of the deployment. It is started only if the core will ask it for plans."""
    planner = PlannerProcess(asyncio.get_running_loop())
    for each in setup.applications:
        application = each.application
        planner.add(application.key, Deployed(application.name, application.version, definition_of(each)))
    if plans_beside([each.slowest for each in setup.parts()]):
        planner.start()
    return planner


def check_cores(deployment: Deployment) -> None:
    """Raise `MachineError` if the deployment's cluster has more cores than this machine."""
    claimed, machine = sum(node.cores for node in deployment.cluster), capacity()
    if claimed > machine.cores:
        limits = f" ({machine.cores_limit})" if machine.cores_limit else ""
        raise MachineError(
            f"the cluster has {claimed:g} cores, this machine {machine.cores:g}{limits}",
            help="serve it with `cluster: {nodes: [{hardware: local, count: 1}]}`; other clusters can be simulated",
        )


def check_repository(folder: Path | None, keys: Keys) -> None:
    """InputError for a model repository that cannot be used; warn if clients cannot use it."""
    if folder is None:
        return
    if not folder.is_dir():
        raise InputError("the model repository is no folder", where=str(folder), help="name one with --repository")
    if not keys.is_required:
        what = "whoever may load models may run code as the server's user, so clients need a key"
        raise InputError(what, where="--repository", help=f"give a file with a line NAME KEY {ADMIN} by --api-key-file")
    if not keys.has_admin:
        what = "no client can load or unload models of --repository: no key has the role"
        _log.warning("%s %s; write NAME KEY %s into the file of --api-key-file", what, ADMIN, ADMIN)


def open_journal(setup: Setup, folder: Path, limits: ServerLimits, observed: Observed) -> Journal | None:
    """The event log of this run in a state folder; None if the limits leave it out. A log that cannot be written is a
    `MachineError`, unless agents wait for this server to take the place of one that has died: it then has none."""
    if not limits.log_bytes:
        return None
    kept = LogLimits(limits.log_bytes, 3600 * limits.log_age_h, limits.log_sample)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    header = header_of(setup, origin="live", date=date, machine=hardware_name())
    try:
        older = older_log(folder / FOLDER)
        if older:
            _log.warning("%s; a new log begins beside them", older)
        return Journal(folder / FOLDER, header, kept, observed)
    except MachineError as error:
        if not NodeMemory(folder / NODES).nodes:
            raise
        _log.error("%s; an earlier server has died, so this one serves without a log", error.what)
        return None


@contextmanager
def written(
    journal: Journal | None, name: str, driver: Driver, settings: Settings, taken_ns: Callable[[], int]
) -> Iterator[None]:
    """Write the log of deployment `name`, if there is one, until the context ends. Spans of its requests are sent, and
    systems may have them simulated. `taken_ns` is the processor time that the edges have taken."""
    if journal is None:
        yield
        return
    driver.simulations = simulations = SimulationProcesses(settings.answers, journal.path)
    exporter = SpanProcess(settings.spans)
    exporter.start(journal.path, journal.run, name, time.time_ns() - driver.now_ns)
    flushing = asyncio.create_task(flush_for_ever(journal, taken_ns))
    try:
        yield
    finally:
        simulations.close()
        flushing.cancel()
        journal.close()
        exporter.close()


def check(setup: Setup, models: Models, settings: Settings, keys: Keys) -> None:
    """Raise an error for what cannot be served as it is wanted; warn of what will be served badly."""
    limits = setup.deployment.limits
    if settings.nodes is None:
        check_cores(setup.deployment)
    elif settings.nodes.tls is not None:
        settings.nodes.tls.server_context()
    if settings.nodes is not None and limits.spare_workers is not None:
        what = "`limits: {spare_workers: …}` is for replicas on this machine"
        raise InputError(what, where=setup.deployment.file, help="leave it out: agents have one for each core")
    for each in setup.applications:
        check_nodes(each, has_agents=settings.nodes is not None)
    check_repository(settings.repository, keys)
    if not (keys.is_required or is_loopback(settings.host)):
        _log.warning("listening on %s without an API key: everybody who can connect is served", settings.host)
    if settings.tls is not None:
        settings.tls.context()
    check_usable(settings, setup.deployment)
    if settings.spans is not None:
        settings.spans.check()
        if not limits.log_bytes:
            what = "spans are read from the event log, which is off"
            raise InputError(what, where="--otlp", help="give `limits: {log_bytes: …}` more than 0")
    for each in setup.applications:
        for line in warnings_of(each, models):
            _log.warning("%s", line)


def check_nodes(setup: ApplicationSetup, *, has_agents: bool) -> None:
    """InputError for a system that does what is done on other nodes only: those of agents, or this machine."""
    where = setup.application.system.declared.where
    if not has_agents and setup.system.policies.provision.brings_weights and not starts_parts(setup):
        raise InputError(
            "its `provision` policy orders transfers between nodes, and this server has one machine",
            where=where,
            help="serve with --backend ray, or write `provision: as_placed`",
        )


async def flush_for_ever(journal: Journal, taken_ns: Callable[[], int]) -> None:
    """Write the event log to disk every second, which bounds what a crash can lose."""
    while True:
        await asyncio.sleep(FLUSH_S)
        journal.flush(time.process_time_ns() + taken_ns())
