"""The edges of a server, as the deciding process sees them: their sockets, their processes, what they send and are
told, and their blocks.

The deciding process opens the listening sockets before anything starts, and edges inherit them, so that a port that is
taken is an error at the start. Each edge has its own socket, those for HTTP of the same port (SO_REUSEPORT) if there
are several: the kernel then spreads connections evenly, where edges that accept from one socket would leave most of
them to whoever wakes first. One more edge is for gRPC, if that is wanted. The deciding process keeps all sockets open:
connections that wait when an edge dies wait for its successor instead of being reset.

An edge that dies loses its connections and nothing else: its requests are cancelled, its blocks are freed when no batch
reads them, and another one starts, at once if the last one lived for a while and later each time if it did not. One
that hangs (`sloop.serve.heartbeat`) is killed, because the kernel would go on giving it its part of the connections.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct, structs

from sloop.app.limits import Limits
from sloop.errors import MachineError
from sloop.events import Draining
from sloop.machine import cpu_ns_of
from sloop.serve.blocks import ARENA_BYTES, Block
from sloop.serve.driver import Driver
from sloop.serve.edge.listener import listen
from sloop.serve.edge.process import LAST_READ_S, LEAVE_S, EdgeSettings
from sloop.serve.heartbeat import LOOK_S, Silence, process_state
from sloop.serve.messages import (
    Ask,
    Cancel,
    Close,
    EdgeCounts,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    ReloadFiles,
    Report,
    RequestEnded,
    Submit,
    ToEdge,
    Topic,
)
from sloop.serve.network import FETCH_S_MAX, HolderTable, machine
from sloop.serve.processes import kill, spawn
from sloop.serve.protocols import PageSource
from sloop.serve.transport import CLOSED, ProtocolError, RecordLink, socket_pair
from sloop.shared_memory import Address, Arenas
from sloop.text import counted, host_and_port
from sloop.units import to_s
from sloop.vocabulary import RequestId

START_S_MAX: Final = 60.0
"""Seconds in which the edges must accept connections when the server starts."""
CLOSE_S_MAX: Final = LAST_READ_S + LEAVE_S + 1.5
"""Seconds after which an edge that was told to end is killed."""
NEVER_READY: Final = f"it has hung: it did not accept connections within {START_S_MAX:g} s"
NUMBER_KEPT_S = 60.0
"""How long the process number of a killed edge stays taken: whoever stopped it, such as a debugger, may still send it a
signal, and must not hit another process."""
PAUSE_S: Final = 0.1
"""Before an edge is replaced that has died soon after its start; twice as long after each further one."""
PAUSE_S_MAX: Final = 5.0
PROVEN_S: Final = 30.0
"""An edge that lived so long is replaced at once."""
REAP_S: Final = 0.002
DELIVERY_LOOK_S: Final = 0.01
"""How often to check whether the last answers have reached their edges."""
STDOUT: Final = "-"
L = TypeVar("L", bound=Limits)

_log: Final = logging.getLogger("sloop.edges")


class EdgeSockets(Struct, frozen=True):
    """The listening sockets of the edges."""

    http: Sequence[socket.socket]
    """One for each edge for HTTP."""
    grpc: socket.socket | None = None
    """Of the edge for gRPC; None if there is none."""

    @property
    def ports(self) -> tuple[int, int | None]:
        """For HTTP and for gRPC."""
        grpc = None if self.grpc is None else int(self.grpc.getsockname()[1])
        return int(self.http[0].getsockname()[1]), grpc

    @property
    def all(self) -> Sequence[socket.socket]:
        """All of them, that for gRPC last."""
        return self.http if self.grpc is None else (*self.http, self.grpc)

    def close(self) -> None:
        """Close all."""
        for sock in self.all:
            sock.close()


def open_sockets(host: str, http_port: int, grpc_port: int | None, edges: int) -> EdgeSockets:
    """The listening sockets of so many edges for HTTP, and of one for gRPC unless its port is None. Port 0 selects a
    free one. Raises `MachineError` for a port that is taken, also by another server that would share it."""
    with ExitStack() as stack:
        first = stack.enter_context(listen(host, http_port))
        own = [first]
        if edges > 1:
            chosen = int(first.getsockname()[1])
            first.close()  # it has shown that nobody else is there
            own = [stack.enter_context(listen(host, chosen, is_shared=True)) for _ in range(edges)]
        grpc = None if grpc_port is None else stack.enter_context(listen(host, grpc_port))
        stack.pop_all()  # all are open: they stay so
    return EdgeSockets(own, grpc)


class EdgePort:
    """The deciding process' end of one edge (`sloop.serve.protocols.EdgeClient`). `send` passes records on."""

    def __init__(self, driver: Driver, page_of: PageSource, arenas: Arenas, send: Callable[[ToEdge], None]) -> None:
        self._driver, self._page_of, self._arenas = driver, page_of, arenas
        self.tell = send
        """Passes a record to the edge."""
        self.arena = arenas.make(ARENA_BYTES, lambda block: send(Free(block)))
        """The edge's own, into which it writes the tensors of its requests."""
        self.requests: dict[int, RequestId] = {}
        self._answered: set[Address] = set()
        """Blocks of answers that the edge has not released."""
        self._is_lost = self.is_heard = False
        """`is_heard`: whether it has said anything since that was last looked at."""
        self.acts: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Free: self._release,
            Ask: self._ask,
        }
        """What is done with each record of the edge. Raises `ProtocolError` for a record that a working edge does not
        send."""

    @property
    def is_fetching(self) -> bool:
        """Whether the edge has not yet got all answers that are in the memory of agents."""
        return any(block.holder for block in self._answered)

    def on_end(self, ended: RequestEnded) -> None:
        """See `sloop.serve.protocols.EdgeClient`."""
        self.requests.pop(ended.number, None)
        for each in ended.blocks:
            if type(each) is not bytes:
                self._hand_over(each.values() if isinstance(each, dict) else (each,))
        if not self._is_lost:
            self.tell(ended)

    def lose(self) -> None:
        """The edge has died: its requests are cancelled, and its answers are needed no longer."""
        self._is_lost = True
        requests, self.requests = self.requests, {}
        for request in requests.values():
            self._driver.cancel(request)
        answered, self._answered = self._answered, set()
        for block in answered:
            self._arenas.free(block)
        self._arenas.abandon(self.arena)

    def _hand_over(self, blocks: Iterable[Block | None]) -> None:
        for block in blocks:
            if isinstance(block, Address):
                if self._is_lost:
                    self._arenas.free(block)
                else:
                    self._answered.add(block)

    def _submit(self, record: Submit) -> None:
        block = record.block
        if isinstance(block, Address):
            if block.arena != self.arena.number:
                raise ProtocolError(f"{block} is not in the arena of this edge")
            self._arenas.hold(block)
        self._driver.submit(
            block,
            self,
            record.number,
            application=record.application,
            version=record.version,
            slo_ns=record.slo_ns,
            elapsed_ns=record.elapsed_ns,
            began_ns=record.began_ns,
            request_id=record.request_id,
            trace=record.trace,
            rows=record.rows,
            outputs=record.outputs,
            size=record.size,
            shape=record.shape,
            is_whole=record.is_whole,
        )

    def _cancel(self, record: Cancel) -> None:
        request = self.requests.pop(record.number, None)
        if request is not None:
            self._driver.cancel(request)

    def _release(self, record: Free) -> None:
        if record.block not in self._answered:
            raise ProtocolError(f"{record.block} was not handed to this edge")
        self._answered.remove(record.block)
        self._arenas.free(record.block)

    def _ask(self, record: Ask[Topic]) -> None:
        def answer(body: bytes) -> None:
            if not self._is_lost:
                self.tell(Page(record.number, body))

        self._page_of(record, answer)


class ServingEdge(Struct, frozen=True):
    """An edge, as the state page shows it."""

    name: str
    address: str
    """Where clients connect by HTTP; empty for the edge for gRPC."""
    grpc_address: str
    """Where they connect by gRPC; empty for the others."""
    pid: int
    ready: bool
    """Whether it accepts connections."""
    since_s: float
    """When it was started, in seconds since the server began."""
    open: int
    """Requests that have not ended."""


class EdgeSlot:
    """One of the edges: its socket, and the process that serves on it now. `settings` are its own."""

    def __init__(self, name: str, sock: socket.socket, settings: EdgeSettings) -> None:
        self.name, self.socket, self.settings = name, sock, settings
        self.port: EdgePort | None = None
        self.link: RecordLink | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.started_s = 0.0
        self.since_ns = time.monotonic_ns()
        """When the process was started that serves now."""
        self.deaths = 0
        """Of edges that died soon after their start, one after another."""
        self.counts = EdgeCounts()
        self.silence = Silence()

    @property
    def is_grpc(self) -> bool:
        """Whether it is for gRPC."""
        return self.settings.socket_folder is not None

    @property
    def pid(self) -> int | None:
        """The process that serves now."""
        return self.process.pid if self.process is not None else None

    def as_serving(self, zero_ns: int) -> ServingEdge:
        """The edge, for a server that began at `zero_ns`."""
        address = host_and_port(*self.socket.getsockname()[:2])
        both = ("", address) if self.is_grpc else (address, "")
        count = len(self.port.requests) if self.port is not None else 0
        since_s = to_s(self.since_ns - zero_ns)
        return ServingEdge(self.name, *both, self.pid or 0, self.is_ready, since_s, count)


class Edges:
    """All edges of a server, as many as there are `sockets`. `settings` are those of all for HTTP together, and of the
    one for gRPC. `holders` has the agents, which hold arenas with answers. Create it inside the running event loop."""

    def __init__(  # what an edge stands between
        self,
        driver: Driver,
        page_of: PageSource,
        arenas: Arenas,
        settings: EdgeSettings,
        sockets: EdgeSockets,
        folder: Path,
        *,
        holders: HolderTable | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._driver, self._page_of, self._arenas = driver, page_of, arenas
        self._table = holders or HolderTable()
        self._table.on_change.append(lambda: self._tell(self._holders()))
        self._loop = loop or asyncio.get_running_loop()
        self._count = count = len(sockets.http)
        limits = settings.limits
        whole = replace(limits, requests=limits.requests_max, bytes=limits.bodies_bytes_max)
        shared = structs.replace(settings, limits=_share(whole, count))
        self.slots = [EdgeSlot(f"edge {number}", sock, shared) for number, sock in enumerate(sockets.http)]
        if sockets.grpc is not None:
            self.slots.append(EdgeSlot("gRPC edge", sockets.grpc, structs.replace(settings, socket_folder=folder)))
        self.models: dict[str, OfferModel] = {}
        self.deaths = 0
        """Edges that have died."""
        self._killed: list[subprocess.Popen[bytes]] = []
        """Those that hung; their numbers may still be taken."""
        self._past = EdgeCounts()
        """What edges have counted that have ended."""
        self._is_closing = False
        self._changed = asyncio.Event()

    # What they offer

    def offer(self, model: OfferModel) -> None:
        """Offer a model, or tell what has changed about it."""
        self.models[model.name] = model
        for slot in self.slots:
            if slot.port is not None:
                slot.port.tell(self._shared(model, slot))

    def withdraw(self, name: str) -> None:
        """Offer a model no longer. Its open requests are finished."""
        model = self.models.pop(name, None)
        if model is not None:
            self._tell(structs.replace(model, answers={}))

    def reload(self) -> None:
        """Let all read their keys and certificates again, and open their access logs anew."""
        self._tell(ReloadFiles())

    def counts(self) -> EdgeCounts:
        """What all edges have counted, and what they hold."""
        total = self._past
        for slot in self.slots:
            total = total.plus(slot.counts)
        return total

    def serving(self) -> int:
        """How many edges accept connections."""
        return sum(slot.is_ready for slot in self.slots)

    def taken_ns(self) -> int:
        """The processor time that those that run have taken."""
        return sum(cpu_ns_of(slot.pid) for slot in self.slots if slot.pid is not None)

    def serving_edges(self) -> list[ServingEdge]:
        """All edges, as the state page shows them."""
        return [slot.as_serving(self._driver.zero_ns) for slot in self.slots]

    # Their life

    async def start(self) -> None:
        """Start all; returns when they accept connections. Raises `MachineError` if one does not."""
        for slot in self.slots:
            self._start(slot)
        self._look_later()
        try:
            async with asyncio.timeout(START_S_MAX):
                while not all(slot.is_ready for slot in self.slots):
                    if self.deaths:
                        raise MachineError("an edge has ended at its start", help="see the messages above")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            what = f"an edge did not start within {START_S_MAX:g} s"
            raise MachineError(what, help="see the messages above; is the machine busy?") from error

    def drain(self) -> None:
        """The server finishes open requests: edges close idle connections."""
        self._tell(Report(Draining()))

    async def delivered(self) -> None:
        """Wait until all edges have the answers that are in the memory of agents, or cannot get them any more."""
        until_s = self._loop.time() + FETCH_S_MAX
        while self._loop.time() < until_s and self._are_fetching():  # noqa: ASYNC110  # blocks have no event
            await asyncio.sleep(DELIVERY_LOOK_S)

    def _are_fetching(self) -> bool:
        return any(slot.port is not None and slot.port.is_fetching for slot in self.slots)

    async def close(self) -> None:
        """End all within a bounded time."""
        self._is_closing = True
        for slot in self.slots:
            slot.socket.close()
            if slot.link is not None:
                slot.link.send(Close())
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._until_ended()
        for slot in self.slots:
            if slot.process is not None:
                kill(slot.process.pid)
        await self._until_ended()
        for process in self._killed:
            process.poll()

    async def _until_ended(self) -> None:
        while any(slot.process is not None for slot in self.slots):
            self._changed.clear()
            await self._changed.wait()

    def _tell(self, record: ToEdge) -> None:
        for slot in self.slots:
            if slot.port is not None:
                slot.port.tell(record)

    def _holders(self) -> Holders:
        """The agents, which hold arenas with answers."""
        return Holders(self._table.on(machine()), self._table.endpoints())

    def _shared(self, model: OfferModel, slot: EdgeSlot) -> OfferModel:
        """The model as one edge offers it: with its share of the limits, which hold for HTTP and for gRPC."""
        count, limits = 1 if slot.is_grpc else self._count, model.limits
        if count == 1 or not (limits.requests or limits.bytes):
            return model
        return structs.replace(model, limits=_share(limits, count))

    def _start(self, slot: EdgeSlot) -> None:
        if self._is_closing:
            return
        slot.started_s, slot.since_ns = self._loop.time(), time.monotonic_ns()
        try:
            self._spawn(slot)
        except OSError as error:
            _log.error("%s cannot be started: %s", slot.name, error)
            self._replace(slot)
            return
        assert slot.port is not None
        slot.port.tell(self._holders())
        for model in self.models.values():
            slot.port.tell(self._shared(model, slot))

    def _spawn(self, slot: EdgeSlot) -> None:
        ours, theirs = socket_pair()
        link = RecordLink(
            self._loop,
            ours,
            FromEdge,
            {},
            lambda why: self._on_end(slot, why),
            lambda began_ns: self._on_frame(slot, port, began_ns),
        )
        port = EdgePort(self._driver, self._page_of, self._arenas, link.send)
        link.acts = {**port.acts, EdgeCounts: partial(setattr, slot, "counts")}
        settings = structs.replace(slot.settings, arena=port.arena.number)
        fds = (theirs.fileno(), slot.socket.fileno(), port.arena.fd)
        arguments = (*fds, os.getpid())
        output = 1 if settings.access_log == STDOUT else None
        try:
            with theirs:
                process = spawn("sloop.serve.edge.process", arguments, fds, stdin=subprocess.PIPE, stdout=output)
        except OSError:
            link.close()
            port.lose()
            raise
        assert process.stdin is not None
        with suppress(OSError), process.stdin:  # it has died already: the link says so
            process.stdin.write(settings.encode())
        slot.process, slot.link, slot.port, slot.counts = process, link, port, EdgeCounts()
        slot.silence.end()

    def _on_frame(self, slot: EdgeSlot, port: EdgePort, began_ns: int) -> None:
        """An edge has sent something, which it does when it accepts connections, and then every `HEARTBEAT_S`."""
        self._driver.turns.note(began_ns)
        port.is_heard = True
        if not slot.is_ready and slot.port is port:
            slot.is_ready = True
            self._changed.set()

    def _look_later(self) -> None:
        self._loop.call_later(LOOK_S, self._look, self._loop.time())

    def _look(self, last_s: float) -> None:
        """Kill the edges that hang; each then ends as one that has died."""
        if self._is_closing:
            return
        self._look_later()
        now_s = self._loop.time()
        for slot in self.slots:
            port, process, link = slot.port, slot.process, slot.link
            if port is None or process is None or link is None:
                continue
            why = ""
            if not slot.is_ready:
                why = NEVER_READY if now_s - slot.started_s > START_S_MAX else ""
            elif port.is_heard:
                port.is_heard = False
                slot.silence.end()
            else:
                slot.silence.grow(now_s - last_s, process_state(process.pid))
                why = slot.silence.why
            if why:
                link.close()
                self._on_end(slot, why)

    def _on_end(self, slot: EdgeSlot, why: str) -> None:
        """The socket of an edge has closed."""
        port, slot.port, slot.link = slot.port, None, None
        slot.is_ready = False
        assert port is not None
        lost = counted(len(port.requests), "request")
        if slot.counts.connections:
            lost += f" and {counted(slot.counts.connections, 'connection')}"
        port.lose()
        self._past, slot.counts = self._past.plus(slot.counts.ended()), EdgeCounts()
        self._reap(slot, why, lost, checks=0)

    def _reap(self, slot: EdgeSlot, why: str, lost: str, checks: int) -> None:
        """Wait for the end of a process, which has time to exit by itself if it has closed its socket."""
        process = slot.process
        assert process is not None
        if not _has_ended(process):
            if why != CLOSED or checks > (CLOSE_S_MAX / REAP_S if self._is_closing else 5):
                kill(process.pid)
            self._loop.call_later(REAP_S, self._reap, slot, why, lost, checks + 1)
            return
        slot.process = None
        if why != CLOSED and not self._is_closing:
            self._killed.append(process)
            self._loop.call_later(NUMBER_KEPT_S, process.poll)
        else:
            process.poll()
        if not self._is_closing:
            self.deaths += 1
            _log.error("%s has died (%s); %s lost", slot.name, _ending(why, process), lost)
            self._replace(slot)
        self._changed.set()

    def _replace(self, slot: EdgeSlot) -> None:
        """Start another edge in the place of one that has died."""
        if self._loop.time() - slot.started_s >= PROVEN_S:
            slot.deaths = 0
        pause_s = min(PAUSE_S_MAX, PAUSE_S * 2 ** (slot.deaths - 1)) if slot.deaths else 0.0
        slot.deaths += 1
        self._loop.call_later(pause_s, self._start, slot)


def _share(limits: L, count: int) -> L:
    """One edge's share of the limits that hold for all edges together; 0 is none."""
    return replace(limits, requests=-(-limits.requests // count), bytes=-(-limits.bytes // count))


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it has ended; if so, its number stays taken until somebody polls it."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ending(why: str, process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    if why != CLOSED:
        return why
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with {code}"
