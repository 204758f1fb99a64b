"""Ray provides the nodes of a deployment, supervises the agent on each, and reserves what replicas need.

What speaks with Ray is a process of its own (`python -m sloop.serve.backends.ray`), which `RayNodes` starts and tells
what is wanted: Ray's client has threads and memory of its own, and ends the process that it is in when the head of the
cluster is away for long. No request and no report of an agent passes through it, so serving goes on without it.

**Nodes.** The cluster file says how many nodes there are and how large they are. Each is given a node of Ray that has
as many CPUs left; one node of Ray can hold several. What finds none is asked for from Ray's autoscaler
(`request_resources`), which is also told when less is wanted. An actor on each node, which needs no CPU, keeps the
agent's process and says when it has ended; it then gets another one. The actors are detached: they outlive this
process, which finds them again by their names, and end by themselves after their agent.

**Reservations.** A replica starts when a placement group on its node has its cores and accelerators, so that Ray gives
them to nobody else. A group cannot grow: a replica that does gets a further one first. It cannot shrink either: groups
are given back when a replica needs none of them any more.
"""

import asyncio
import contextlib
import hashlib
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from msgspec import Struct

from sloop.errors import MachineError
from sloop.serve.network import Endpoint, NodeTls
from sloop.serve.processes import begin, kill, spawn
from sloop.serve.stderr import log_directly
from sloop.serve.transport import RecordLink, socket_pair
from sloop.text import counted
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

NAMESPACE: Final = "sloop"
POLL_S: Final = 1.0
"""How often Ray is asked which nodes there are."""
OPEN_S_MAX: Final = 60.0
"""In which Ray must have been joined, or started."""
REACH_S_MAX: Final = 5.0
"""In which what listens at the cluster's address must accept a connection."""
RESERVE_S_MAX: Final = 20.0
"""In which Ray must have what a replica needs. A longer wait is reported as a failed start, which the core repeats."""
RESTART_S: Final = 2.0
"""Before the process that speaks with Ray is started again."""
CALLS_MAX: Final = 16
"""Calls of Ray's client at the same time, which block."""
PINNED: Final = 0.001
"""Of the resource `node:ADDRESS` that each node of Ray has once: it pins a placement group."""
LINGER_S: Final = 30.0
"""An actor whose agent has ended stays so long, to say so."""

_log: Final = logging.getLogger("sloop.ray")
T = TypeVar("T")


# To the process that speaks with Ray


class Join(Struct, frozen=True, array_like=True, tag=1):
    """Join a cluster: `auto` for the one that runs on this machine, empty to start one."""

    address: str


class Want(Struct, frozen=True, array_like=True, tag=2):
    """Have an agent on each of these nodes, and on no others."""

    nodes: list[Node]
    join: Endpoint
    token: bytes
    tls: list[str] = []  # msgspec creates a new list for each instance
    """Paths of certificate, key and authority on every node; none: connections are not encrypted."""


class Reserve(Struct, frozen=True, array_like=True, tag=3):
    """Reserve these resources on a node for a replica: with what it has already, not in addition."""

    replica: ReplicaId
    node: str
    resources: dict[str, float]


class Unreserve(Struct, frozen=True, array_like=True, tag=4):
    """Give back what a replica has reserved beyond these resources."""

    replica: ReplicaId
    keep: dict[str, float] = {}  # msgspec creates a new dict for each instance


class CloseRay(Struct, frozen=True, array_like=True, tag=5):
    """Give back everything and end."""


ToRay = Join | Want | Reserve | Unreserve | CloseRay


# From it


class Joined(Struct, frozen=True, array_like=True, tag=1):
    """The cluster was joined; this machine has this address in it."""

    host: str


class JoinFailed(Struct, frozen=True, array_like=True, tag=2):
    """The cluster cannot be joined."""

    what: str
    help: str


class Reserved(Struct, frozen=True, array_like=True, tag=3):
    """What a replica asked for is reserved, unless `why` says that it is not."""

    replica: ReplicaId
    resources: dict[str, float]
    why: str


FromRay = Joined | JoinFailed | Reserved


def resources_of(spec: ReplicaSpec) -> dict[str, float]:
    """What a replica needs, as Ray counts it."""
    accelerators = {"GPU": spec.slot.share} if spec.device is not None else {}
    return {"CPU": spec.cores, **accelerators}


class RayNodes:
    """A `NodeProvider`: nodes of the Ray cluster at `address`. The files of `tls` must be on each of them, under these
    paths. Create it inside the running event loop."""

    def __init__(self, address: str, tls: NodeTls | None = None) -> None:
        self._address = address
        self._tls = [str(tls.cert), str(tls.key), str(tls.ca)] if tls is not None else []
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: RecordLink | None = None
        self._joined: asyncio.Future[str] = self._loop.create_future()
        self._wanted: dict[str, Node] = {}
        self._where: tuple[Endpoint, bytes] = (("", 0), b"")
        self._waiting: dict[ReplicaId, list[tuple[dict[str, float], Callable[[str], None]]]] = {}
        self._held: dict[ReplicaId, Reserve] = {}
        self._is_away = False
        """Whether the cluster cannot be joined again, as was told."""
        self._is_closing = False

    async def host(self) -> str:
        """See `NodeProvider`. Raises `MachineError` if the cluster cannot be joined."""
        self._start()
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                return await asyncio.shield(self._joined)
        except TimeoutError as error:
            where = self._address or "a cluster of its own"
            raise MachineError(
                f"Ray ({where}) did not answer within {OPEN_S_MAX:g} s", help="look at `ray status` there"
            ) from error

    async def open(self, nodes: Iterable[Node], join: Endpoint, token: bytes) -> None:
        """See `NodeProvider`."""
        self._wanted = {node.name: node for node in nodes}
        self._where = join, token
        self._want()

    def acquire(self, node: Node, failed: Callable[[str], None]) -> None:
        """See `NodeProvider`."""
        self._wanted[node.name] = node
        self._want()

    def lost(self, node: Node) -> None:
        """See `NodeProvider`. Its agent is replaced by the process that speaks with Ray."""

    def release(self, node: Node, done: Callable[[], None]) -> None:
        """See `NodeProvider`."""
        self._wanted.pop(node.name, None)
        self._want()
        done()

    def reserve(self, replica: ReplicaId, spec: ReplicaSpec, then: Callable[[str], None]) -> None:
        """See `NodeProvider`."""
        assert spec.node is not None
        order = self._held[replica] = Reserve(replica, spec.node, resources_of(spec))
        self._waiting.setdefault(replica, []).append((order.resources, then))
        self._send(order)

    def shrunk(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        """See `NodeProvider`."""
        assert spec.node is not None
        self._held[replica] = Reserve(replica, spec.node, resources_of(spec))
        self._send(Unreserve(replica, resources_of(spec)))

    def unreserve(self, replica: ReplicaId) -> None:
        """See `NodeProvider`."""
        self._waiting.pop(replica, None)
        if self._held.pop(replica, None) is not None:
            self._send(Unreserve(replica))

    async def close(self) -> None:
        """See `NodeProvider`."""
        self._is_closing = True
        self._send(CloseRay())
        process = self._process
        for _ in range(50):
            if process is None or process.poll() is not None:
                return
            await asyncio.sleep(0.1)
        if process is not None:
            kill(process.pid)
            process.wait()

    def _start(self) -> None:
        ours, theirs = socket_pair()
        with theirs:
            self._link = RecordLink(self._loop, ours, FromRay, self._on_record, self._on_end)
            self._process = spawn("sloop.serve.backends.ray", (theirs.fileno(), os.getpid()), [theirs.fileno()])
        self._send(Join(self._address))

    def _send(self, record: ToRay) -> None:
        if self._link is not None:
            self._link.send(record)

    def _want(self) -> None:
        self._send(Want(list(self._wanted.values()), *self._where, self._tls))

    def _on_record(self, record: FromRay) -> None:
        if isinstance(record, Joined):
            if not self._joined.done():
                self._joined.set_result(record.host)
            else:
                _log.warning("Ray was joined again")
            self._is_away = False
        elif isinstance(record, JoinFailed):
            if not self._joined.done():
                self._joined.set_exception(MachineError(record.what, help=record.help))
            elif not self._is_away:
                _log.error("Ray cannot be joined again: %s; trying every few seconds", record.what)
                self._is_away = True
        else:
            waiting = self._waiting.get(record.replica, [])
            place = next((at for at, (asked, _) in enumerate(waiting) if asked == record.resources), -1)
            answered, waiting[: place + 1] = waiting[: place + 1], []
            for _, then in answered:  # those before this one were asked of a process that has ended
                then(record.why)

    def _on_end(self, why: str) -> None:
        """The process that speaks with Ray has ended. Agents and replicas go on."""
        self._link = None
        if self._process is not None:
            self._process.poll()
        if self._is_closing or (self._joined.done() and self._joined.exception() is not None):
            return
        if not self._joined.done():
            what = "the process that speaks with Ray has ended at its start"
            self._joined.set_exception(MachineError(what, help="see the messages above"))
            return
        if not self._is_away:
            _log.error("the process that speaks with Ray has ended (%s); another one starts", why)
        self._loop.call_later(RESTART_S, self._restart)

    def _restart(self) -> None:
        if not self._is_closing:
            self._start()
            self._want()
            for order in self._held.values():
                self._send(order)


# The process that speaks with Ray


class AgentKeeper:
    """An actor of Ray: keeps the process of an agent on the node where it runs."""

    def __init__(self, arguments: Sequence[object], token: bytes) -> None:
        self._process = spawn("sloop.serve.agent", (os.getpid(), *arguments), stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin:
            self._process.stdin.write(token)
        threading.Thread(target=self._end_later, daemon=True).start()

    def wait(self) -> int:
        """The exit status of the agent, when it has ended."""
        return self._process.wait()

    def _end_later(self) -> None:
        """End after the agent: who started this actor may have gone."""
        self._process.wait()
        threading.Event().wait(LINGER_S)
        os._exit(0)


class _Kept(Struct):
    """An agent that is wanted, and the node of Ray that has it."""

    node: Node
    ray_node: str
    actor: Any
    ended: Any
    """Ray's reference to the end of the agent."""


class RayProcess:
    """Does with Ray what `RayNodes` says. Each call of Ray's client blocks, so it has a thread of its own."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls = ThreadPoolExecutor(CALLS_MAX, "ray")
        self.ended = asyncio.Event()
        self._link = RecordLink(self._loop, sock, ToRay, self._on_record, lambda _: self.ended.set())
        self._ray: Any = None
        self._ray_node = ""
        """The id of the node of Ray through which this process has joined."""
        self._want: Want | None = None
        self._kept: dict[str, _Kept] = {}
        self._groups: dict[ReplicaId, list[tuple[Any, dict[str, float]]]] = {}
        self._turns: dict[ReplicaId, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._without_room: set[str] = set()
        """Nodes for which Ray has none, as was told."""
        self._asked: list[dict[str, float]] = []
        """What the autoscaler was asked for last."""

    def _on_record(self, record: ToRay) -> None:
        if isinstance(record, Join):
            self._spawn(self._join(record.address))
        elif isinstance(record, Want):
            self._want = record
        elif isinstance(record, Reserve):
            self._spawn(self._reserve(record))
        elif isinstance(record, Unreserve):
            self._spawn(self._unreserve(record))
        else:
            self._spawn(self._close())

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        running = asyncio.create_task(coroutine)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)

    async def _call(self, call: Callable[..., T], *arguments: object) -> T:
        return await self._loop.run_in_executor(self._calls, call, *arguments)

    # The cluster

    async def _join(self, address: str) -> None:
        try:
            host = await self._call(self._joined, address)
        except MachineError as error:
            self._link.send(JoinFailed(error.what, error.help))
            self._link.flush()
            self.ended.set()
            return
        self._link.send(Joined(host))
        while not self._is_closing:
            try:
                if not await self._call(self._supervise):
                    _log.error("Ray's node on this machine has died, and with it what was reserved")
                    self.ended.set()
                    return
            except Exception as error:
                if not self._is_closing:
                    _log.error("Ray does not answer: %s", str(error).strip().splitlines()[-1])
            await asyncio.sleep(POLL_S)

    def _joined(self, address: str) -> str:
        try:
            ray: Any = importlib.import_module("ray")  # an extra
        except ImportError as error:
            fix = "pip install ray, on every node of the cluster"
            raise MachineError(f"Ray is not installed: {error}", help=fix) from error
        self._ray = ray
        _check_reachable(address)
        own = {} if address else {"include_dashboard": False, "_node_ip_address": ray.util.get_node_ip_address()}
        try:
            ray.init(
                address=address or "local",
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **own,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise _unjoined(address, error) from error
        self._ray_node = ray.get_runtime_context().get_node_id()
        return str(ray.util.get_node_ip_address())

    def _supervise(self) -> bool:
        """Have an agent on each wanted node, as far as there are nodes of Ray. False if the node of Ray through which
        this process has joined is dead: a head with a store has been started again, and takes the process for dead."""
        want = self._want
        if want is None:
            return True
        alive = {each["NodeID"]: each for each in self._ray.nodes() if each["Alive"]}
        if self._ray_node not in alive:
            return False
        wanted = {node.name: node for node in want.nodes}
        for name, kept in list(self._kept.items()):
            if name not in wanted or kept.ray_node not in alive or self._has_ended(kept):
                self._drop(name)
        left = {key: dict(each["Resources"]) for key, each in alive.items()}
        for kept in self._kept.values():
            _take(left[kept.ray_node], _size_of(kept.node))
        for node in want.nodes:
            if node.name not in self._kept:
                self._place(node, want, alive, left)
        self._ask_autoscaler([_size_of(node) for node in want.nodes])
        return True

    def _place(
        self, node: Node, want: Want, alive: Mapping[str, Mapping[str, Any]], left: dict[str, dict[str, float]]
    ) -> None:
        """Start an agent on the fullest node of Ray that has room for it."""
        size = _size_of(node)
        found = [key for key, resources in left.items() if _has(resources, size)]
        if not found:
            if node.name not in self._without_room:
                self._without_room.add(node.name)
                most = max((resources.get("CPU", 0.0) for resources in left.values()), default=0.0)
                _log.warning(
                    "no node of Ray has %s left for %s, one of %s has at most %g CPU; waiting for another node",
                    *(_quantities(size), node.name, counted(len(left), "node"), most),
                )
            return
        self._without_room.discard(node.name)
        key = min(found, key=lambda each: (left[each].get("CPU", 0.0), each))
        _take(left[key], size)
        address = str(alive[key]["NodeManagerAddress"])
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(key, soft=False)
        run = hashlib.sha256(want.token).hexdigest()[:12]
        actor = (
            self._ray.remote(AgentKeeper)
            .options(
                name=f"agent-{run}-{node.name}",
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            .remote((*want.join, node.name, address, *want.tls), want.token)
        )
        self._kept[node.name] = _Kept(node, key, actor, actor.wait.remote())
        _log.info("the agent of %s starts on Ray's node %s", node.name, address)

    def _has_ended(self, kept: _Kept) -> bool:
        done, _ = self._ray.wait([kept.ended], timeout=0)
        if not done:
            return False
        try:
            _log.warning("the agent of %s has ended with %s", kept.node.name, self._ray.get(kept.ended))
        except Exception as error:  # the actor could not start, or has died
            _log.warning("the agent of %s: %s", kept.node.name, str(error).strip().splitlines()[-1])
        return True

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name)
        with contextlib.suppress(Exception):
            self._ray.kill(kept.actor)

    def _ask_autoscaler(self, sizes: list[dict[str, float]]) -> None:
        if sizes == self._asked:
            return
        autoscaler: Any = importlib.import_module("ray.autoscaler.sdk")
        bundles = [{key: _whole(quantity) for key, quantity in size.items()} for size in sizes]
        autoscaler.request_resources(bundles=bundles)
        self._asked = sizes

    # Reservations

    def _turn(self, replica: ReplicaId) -> asyncio.Lock:
        """One after the other for each replica."""
        return self._turns.setdefault(replica, asyncio.Lock())

    async def _reserve(self, order: Reserve) -> None:
        async with self._turn(order.replica):
            await self._until_kept(order.node)
            try:
                why = await self._call(self._reserved, order)
            except Exception as error:
                why = f"Ray cannot reserve it: {error}"
            self._link.send(Reserved(order.replica, order.resources, why))

    async def _until_kept(self, node: str) -> None:
        """Wait a while for the actor of a node. The agent of a server that has died may be quicker with its replicas
        than Ray is to find the actor."""
        give_up_s = self._loop.time() + RESERVE_S_MAX
        while node not in self._kept and self._loop.time() < give_up_s and not self._is_closing:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S / 4)

    def _reserved(self, order: Reserve) -> str:
        """Add a placement group for what is missing. Returns why that is not possible."""
        groups = self._groups.setdefault(order.replica, [])
        missing = {
            key: quantity - sum(size.get(key, 0.0) for _, size in groups) for key, quantity in order.resources.items()
        }
        missing = {key: round(quantity, 4) for key, quantity in missing.items() if quantity > 1e-4}
        kept = self._kept.get(order.node)
        if not missing:
            return ""
        if kept is None:
            return f"node {order.node} has no agent in Ray"
        address = next(
            (each["NodeManagerAddress"] for each in self._ray.nodes() if each["NodeID"] == kept.ray_node), ""
        )
        group = self._ray.util.placement_group([{**missing, f"node:{address}": PINNED}], strategy="STRICT_PACK")
        if group.wait(RESERVE_S_MAX):
            groups.append((group, missing))
            return ""
        self._ray.util.remove_placement_group(group)
        return f"Ray has no {_quantities(missing)} left on {order.node} ({address}): does something else run there?"

    async def _unreserve(self, order: Unreserve) -> None:
        async with self._turn(order.replica):
            with contextlib.suppress(Exception):
                await self._call(self._unreserved, order)
        if not order.keep:
            self._turns.pop(order.replica, None)

    def _unreserved(self, order: Unreserve) -> None:
        groups = self._groups.get(order.replica, [])
        for place in reversed(range(len(groups))):
            rest = [size for other, (_, size) in enumerate(groups) if other != place]
            if all(sum(size.get(key, 0.0) for size in rest) >= quantity for key, quantity in order.keep.items()):
                group, _ = groups.pop(place)
                self._ray.util.remove_placement_group(group)
        if not groups:
            self._groups.pop(order.replica, None)

    async def _close(self) -> None:
        self._is_closing = True
        if self._ray is not None:
            with contextlib.suppress(Exception):
                await self._call(self._closed)
        self.ended.set()

    def _closed(self) -> None:
        for groups in self._groups.values():
            for group, _ in groups:
                self._ray.util.remove_placement_group(group)
        for name in list(self._kept):
            self._drop(name)
        self._ask_autoscaler([])
        self._ray.shutdown()


def _unjoined(address: str, error: Exception) -> MachineError:
    """The error for a cluster that cannot be joined."""
    what = " ".join(str(error).split())
    if "ersion mismatch" in what:
        fix = "install the same versions of Ray and Python here and in the cluster"
        return MachineError(f"the Ray cluster has other versions: {what}", help=fix)
    if address:
        fix = (
            "start one there with `ray start --head`, give this server its token if it has one (RAY_AUTH_MODE=token, "
            "RAY_AUTH_TOKEN), or leave --address out to start one on this machine"
        )
        return MachineError(f"no Ray cluster can be joined at {address}: {what}", help=fix)
    return MachineError(f"Ray cannot be started on this machine: {what}", help="see Ray's logs in /tmp/ray")


def _check_reachable(address: str) -> None:
    """Raise `MachineError` if nothing listens at HOST:PORT: Ray itself would try for more than a minute. Other kinds of
    addresses are not looked at."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S_MAX).close()
    except (OSError, OverflowError) as error:
        raise _unjoined(address, error) from error


def _quantities(size: Mapping[str, float]) -> str:
    return ", ".join(f"{quantity:g} {key}" for key, quantity in size.items())


def _size_of(node: Node) -> dict[str, float]:
    """What a node of the cluster takes of a node of Ray."""
    return {"CPU": node.cores, **({"GPU": float(len(node.devices))} if node.devices else {})}


def _has(resources: Mapping[str, float], size: Mapping[str, float]) -> bool:
    return all(resources.get(key, 0.0) >= quantity for key, quantity in size.items())


def _take(resources: dict[str, float], size: Mapping[str, float]) -> None:
    for key, quantity in size.items():
        resources[key] = resources.get(key, 0.0) - quantity


def _whole(quantity: float) -> int:
    """Ray's autoscaler counts whole resources."""
    return -int(-quantity // 1)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process that speaks with Ray."""
    fd, parent = map(int, arguments)
    begin(parent, (fd,))
    log_directly()

    async def serve() -> None:
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        await RayProcess(sock).ended.wait()

    asyncio.run(serve())
    os._exit(0)  # Ray's threads would be waited for


if __name__ == "__main__":
    # As a module of this name, so that Ray's nodes import the class of the actor instead of being sent it.
    importlib.import_module("sloop.serve.backends.ray").main(sys.argv[1:])
