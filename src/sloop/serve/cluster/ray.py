"""Ray provides the nodes of a deployment, and supervises the agent on each.

What speaks with Ray is a process of its own (`python -m sloop.serve.cluster.ray`), which `RayNodes` starts and tells
what is wanted: Ray's client has threads and memory of its own, and ends the process that it is in when the head of the
cluster is away for long. No request and no report of an agent passes through it, so serving goes on without it.

The cluster file says how many nodes there are and how large they are. For each there is an actor of Ray, which takes
the cores and accelerators of the whole node from Ray, and keeps the process of its agent. Ray chooses the machine,
gives these resources to nobody else, and asks its autoscaler for a machine where it has none. How the cores of a node
are divided among replicas is the core's decision, of which Ray hears nothing. When an agent or its machine has ended,
the node gets another actor. The actors are detached: they outlive this process, which finds them again by their names,
and end by themselves after their agent.
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
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from msgspec import Struct

from sloop.errors import MachineError
from sloop.serve.messages import Close
from sloop.serve.network import Endpoint, NodeTls
from sloop.serve.processes import begin, kill, spawn
from sloop.serve.stderr import log_directly
from sloop.serve.transport import RecordLink, socket_pair
from sloop.vocabulary import Node

NAMESPACE: Final = "sloop"
POLL_S: Final = 1.0
"""How often Ray is asked which nodes there are."""
OPEN_S_MAX: Final = 60.0
"""In which Ray must have been joined, or started."""
REACH_S_MAX: Final = 5.0
"""In which what listens at the cluster's address must accept a connection."""
ROOM_S: Final = 3.0
"""After which it is told that Ray has no room for a node; Ray goes on looking."""
RESTART_S: Final = 2.0
"""Before the process that speaks with Ray is started again."""
CALLS_MAX: Final = 16
"""Calls of Ray's client at the same time, which block."""
LINGER_S: Final = 30.0
"""An actor whose agent has ended stays so long, to say so."""

_log: Final = logging.getLogger("sloop.ray")
T = TypeVar("T")


# To the process that speaks with Ray


class Want(Struct, frozen=True, array_like=True, tag=True):
    """Have an agent on each of these nodes, and on no others."""

    nodes: list[Node]
    join: Endpoint
    token: bytes
    tls: list[str] = []  # msgspec creates a new list for each instance
    """Paths of certificate, key and authority on every node; none: connections are not encrypted."""


ToRay = Want | Close


# From it


class Joined(Struct, frozen=True, array_like=True):
    """The cluster was joined; this machine has this address in it."""

    host: str = ""
    """Empty if it cannot be joined."""
    what: str = ""
    help: str = ""
    """Why not, and what to do."""


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
        self._wanted: Want | None = None
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

    def want(self, nodes: Iterable[Node], join: Endpoint, token: bytes) -> None:
        """See `NodeProvider`."""
        self._wanted = Want(list(nodes), join, token, self._tls)
        self._send(self._wanted)

    async def close(self) -> None:
        """See `NodeProvider`."""
        self._is_closing = True
        self._send(Close())
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
            self._link = RecordLink(self._loop, ours, Joined, {Joined: self._on_joined}, self._on_end)
            arguments = (theirs.fileno(), os.getpid(), self._address)
            self._process = spawn("sloop.serve.cluster.ray", arguments, [theirs.fileno()])

    def _send(self, record: ToRay) -> None:
        if self._link is not None:
            self._link.send(record)

    def _on_joined(self, record: Joined) -> None:
        if record.host:
            if not self._joined.done():
                self._joined.set_result(record.host)
            else:
                _log.warning("Ray was joined again")
            self._is_away = False
        elif not self._joined.done():
            self._joined.set_exception(MachineError(record.what, help=record.help))
        elif not self._is_away:
            _log.error("Ray cannot be joined again: %s; trying every few seconds", record.what)
            self._is_away = True

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
            if self._wanted is not None:
                self._send(self._wanted)


# The process that speaks with Ray


class AgentKeeper:
    """An actor of Ray: keeps the process of an agent on the node where it runs."""

    def __init__(self, join: Endpoint, name: str, tls: Sequence[str], token: bytes) -> None:
        self._host = str(importlib.import_module("ray").util.get_node_ip_address())
        arguments = (os.getpid(), *join, name, self._host, *tls)
        self._process = spawn("sloop.serve.cluster.agent", arguments, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin:
            self._process.stdin.write(token)
        threading.Thread(target=self._end_later, daemon=True).start()

    def host(self) -> str:
        """The address of the machine where it runs."""
        return self._host

    def wait(self) -> int:
        """The exit status of the agent, when it has ended."""
        return self._process.wait()

    def _end_later(self) -> None:
        """End after the agent: who started this actor may have gone."""
        self._process.wait()
        threading.Event().wait(LINGER_S)
        os._exit(0)


class _Kept(Struct):
    """A node that is wanted, and its actor."""

    node: Node
    actor: Any
    host: Any
    """Ray's reference to the address of the machine on which the actor has started."""
    ended: Any
    """Ray's reference to the end of the agent."""
    asked_s: float
    """When Ray was asked for the actor (`time.monotonic`)."""
    is_logged: bool = False
    """Whether the log says where it has started, or that it waits for room."""


class RayProcess:
    """Does with Ray what `RayNodes` says, in the cluster at `address`: `auto` for the one that runs on this machine,
    empty to start one. Each call of Ray's client blocks, so it has a thread of its own."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls = ThreadPoolExecutor(CALLS_MAX, "ray")
        self.ended = asyncio.Event()
        acts: dict[type, Callable[[Any], None]] = {
            Want: self._on_want,
            Close: lambda _: self._spawn(self._close()),
        }
        self._link = RecordLink(self._loop, sock, ToRay, acts, lambda _: self.ended.set())
        self._ray: Any = None
        self._ray_node = ""
        """The id of the node of Ray through which this process has joined."""
        self._want: Want | None = None
        self._kept: dict[str, _Kept] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._spawn(self._join(address))

    def _on_want(self, record: Want) -> None:
        self._want = record

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
            self._link.send(Joined(what=error.what, help=error.help))
            self._link.flush()
            self.ended.set()
            return
        self._link.send(Joined(host))
        while not self._is_closing:
            try:
                if not await self._call(self._supervise):
                    _log.error("Ray's node on this machine has died")
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
        """Have an agent on each wanted node. False if the node of Ray through which this process has joined is dead: a
        head with a store has been started again, and takes the process for dead."""
        want = self._want
        if want is None:
            return True
        if not any(each["NodeID"] == self._ray_node and each["Alive"] for each in self._ray.nodes()):
            return False
        wanted = {node.name: node for node in want.nodes}
        for name, kept in list(self._kept.items()):
            if name not in wanted or self._has_ended(kept):
                self._drop(name)
            elif not kept.is_logged:
                self._tell(kept)
        for name, node in wanted.items():
            if name not in self._kept:
                self._kept[name] = self._keep(node, want)
        return True

    def _keep(self, node: Node, want: Want) -> _Kept:
        """Ask Ray for the actor of a node; it may be there already."""
        run = hashlib.sha256(want.token).hexdigest()[:12]
        actor = (
            self._ray.remote(AgentKeeper)
            .options(
                name=f"agent-{run}-{node.name}",
                get_if_exists=True,
                lifetime="detached",
                num_cpus=node.cores,
                num_gpus=len(node.devices),
                max_restarts=0,
                max_concurrency=4,
            )
            .remote(want.join, node.name, want.tls, want.token)
        )
        return _Kept(node, actor, actor.host.remote(), actor.wait.remote(), time.monotonic())

    def _tell(self, kept: _Kept) -> None:
        """Say once where an agent starts, or that Ray has no room for it yet."""
        if self._ray.wait([kept.host], timeout=0)[0]:
            kept.is_logged = True
            _log.info("the agent of %s starts on Ray's node %s", kept.node.name, self._ray.get(kept.host))
        elif time.monotonic() - kept.asked_s > ROOM_S:
            kept.is_logged = True
            gpus = f", {len(kept.node.devices)} GPU" if kept.node.devices else ""
            what = "no node of Ray has %g CPU%s left for %s; waiting for another node"
            _log.warning(what, kept.node.cores, gpus, kept.node.name)

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

    async def _close(self) -> None:
        self._is_closing = True
        if self._ray is not None:
            with contextlib.suppress(Exception):
                await self._call(self._closed)
        self.ended.set()

    def _closed(self) -> None:
        for name in list(self._kept):
            self._drop(name)
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


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process that speaks with Ray."""
    fd, parent, address = int(arguments[0]), int(arguments[1]), arguments[2]
    begin(parent, (fd,))
    log_directly()

    async def serve() -> None:
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        await RayProcess(sock, address).ended.wait()

    asyncio.run(serve())
    os._exit(0)  # Ray's threads would be waited for


if __name__ == "__main__":
    # As a module of this name, so that Ray's nodes import the class of the actor instead of being sent it.
    importlib.import_module("sloop.serve.cluster.ray").main(sys.argv[1:])
