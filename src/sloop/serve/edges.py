"""The edges of a server, as the deciding process sees them: their sockets, their processes, what they send and are
told, and their blocks.

The deciding process opens the listening sockets before anything starts, and edges inherit them, so that a port that is
taken is an error at the start. Each edge has its own pair of sockets, of the same ports (SO_REUSEPORT) if there are
several: the kernel then spreads connections evenly, where edges that accept from one socket would leave most of them to
whoever wakes first. The deciding process keeps all of them open: connections that wait when an edge dies wait for its
successor instead of being reset.

An edge that dies loses its connections and nothing else: its requests are cancelled, its blocks are freed when no batch
reads them, and another one starts, at once if the last one lived for a while and later each time if it did not. One
that hangs (`sloop.serve.heartbeat`) is killed, because the kernel would go on giving it its part of the connections.

Edges on other machines (`sloop.serve.edge.joining`) come by themselves, over the network. The same records flow, but
their blocks stay where they are, their clocks are others, and what they say is believed only if it can be true. When
the connection of one ends, its requests are cancelled; an edge that lives on connects again and submits them again.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from msgspec import Struct, structs

from sloop import __version__
from sloop.errors import MachineError
from sloop.serve.blocks import ARENA_BYTES, Block, FarBlocks
from sloop.serve.driver import Driver
from sloop.serve.edge.listener import listen
from sloop.serve.edge.process import LAST_READ_S, LEAVE_S, EdgeServer, EdgeSettings
from sloop.serve.heartbeat import LOOK_S, Silence, process_state
from sloop.serve.messages import (
    Ask,
    Cancel,
    CloseEdge,
    DrainEdge,
    EdgeClock,
    EdgeCounts,
    EdgeEnds,
    EdgeHello,
    EdgeReady,
    EdgeSetup,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    Release,
    ReloadFiles,
    RequestEnded,
    Submit,
    ToEdge,
    WithdrawModel,
)
from sloop.serve.network import FETCH_S_MAX, RECORDS_BYTES_MAX, SILENT_S, ArenaHolder, HolderTable, NetworkLink, machine
from sloop.serve.processes import kill, spawn
from sloop.serve.protocols import Pages
from sloop.serve.transport import CLOSED, ProtocolError, RecordLink, socket_pair
from sloop.shared_memory import Address, Arena, Arenas
from sloop.text import counted, host_and_port
from sloop.units import NS_PER_S, to_s
from sloop.vocabulary import Outcome, RequestId

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
HELLO_S_MAX: Final = 5.0
"""In which an edge of another machine must introduce itself."""
LEAVE_S_MAX: Final = 5.0
"""In which one that is sent away must close its connection."""
CLOCK_WINDOW_NS: Final = 30 * NS_PER_S
"""Over which the clock of another machine is compared with this one's. Two of them drift apart by some 1 ms meanwhile;
a link that is congested for so long makes requests seem younger than they are."""
TIME_NS_MAX: Final = 3_600 * NS_PER_S
"""No request has begun longer ago, and no deadline is later."""
ROWS_MAX: Final = 1 << 31
TEXT_CHARS_MAX: Final = 4096
"""Of a version, a request id and a trace."""

_log: Final = logging.getLogger("sloop.edges")

Ports = tuple[socket.socket, socket.socket]
"""The listening sockets of one edge, for HTTP and gRPC."""


def open_ports(host: str, http_port: int, grpc_port: int, edges: int) -> list[Ports]:
    """The listening sockets of all edges. Port 0 selects a free one. Raises `MachineError` for a port that is taken,
    also by another server that would share it."""
    with ExitStack() as stack:
        both: list[list[socket.socket]] = []
        for port in (http_port, grpc_port):
            first = stack.enter_context(listen(host, port))
            own = [first]
            if edges > 1:
                chosen = int(first.getsockname()[1])
                first.close()  # it has shown that nobody else is there
                own = [stack.enter_context(listen(host, chosen, is_shared=True)) for _ in range(edges)]
            both.append(own)
        stack.pop_all()  # all are open: they stay so
    return list(zip(*both, strict=True))


class EdgePort:
    """The deciding process' end of one edge (`sloop.serve.protocols.EdgeClient`). `send` passes records on."""

    def __init__(
        self, driver: Driver, pages: Pages, arenas: Arenas, send: Callable[[ToEdge], None], *, is_far: bool = False
    ) -> None:
        self._driver, self._pages, self._arenas = driver, pages, arenas
        self.tell = send
        """Passes a record to the edge."""
        self.arena = None if is_far else arenas.make(ARENA_BYTES, lambda block: send(Free(block)))
        """The edge's own, into which it writes the tensors of its requests. One that `is_far` has it on its machine."""
        self.requests: dict[int, RequestId] = {}
        self._answered: set[Address] = set()
        """Blocks of answers that the edge has not released."""
        self._is_lost = self.is_heard = False
        """`is_heard`: whether it has said that it lives since that was last looked at."""
        self._acts: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Release: self._release,
            Ask: self._ask,
            EdgeClock: self._hear,
        }

    @property
    def is_fetching(self) -> bool:
        """Whether the edge has not yet got all answers that are in the memory of agents."""
        return any(block.holder for block in self._answered)

    def on_record(self, record: FromEdge) -> None:
        """Do what the edge says. Raises `ProtocolError` if it is impossible."""
        self._acts[type(record)](record)

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
        self._free_answers()
        if self.arena is not None:
            self._arenas.abandon(self.arena)

    def _free_answers(self) -> None:
        answered, self._answered = self._answered, set()
        for block in answered:
            self._arenas.free(block)

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
            self._hold(block)
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
        )

    def _hold(self, block: Address) -> None:
        if self.arena is None or block.arena != self.arena.number:
            raise ProtocolError(f"{block} is not in the arena of this edge")
        self._arenas.hold(block)

    def _cancel(self, record: Cancel) -> None:
        request = self.requests.pop(record.number, None)
        if request is not None:
            self._driver.cancel(request)

    def _release(self, record: Release) -> None:
        if record.block not in self._answered:
            raise ProtocolError(f"{record.block} was not handed to this edge")
        self._answered.remove(record.block)
        self._arenas.free(record.block)

    def _hear(self, _record: EdgeClock) -> None:
        self.is_heard = True

    def _ask(self, record: Ask) -> None:
        def answer(body: bytes) -> None:
            if not self._is_lost:
                self.tell(Page(record.number, body))

        self._pages.ask(record.question, answer)


class FarClock:
    """Translates times of another machine's clock into times of this one. A translated time is never too early; it is
    too late by the network delay of the fastest record within `CLOCK_WINDOW_NS`."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[int, int]] = deque()
        """When records arrived, and that time minus the time in the record. Both rise: the first gap is the least."""

    def note(self, sent_ns: int, came_ns: int) -> None:
        """A record with the time `sent_ns` of the other clock has arrived at `came_ns` of this one."""
        gaps, gap_ns = self._gaps, came_ns - sent_ns
        while gaps and gaps[-1][1] >= gap_ns:
            gaps.pop()
        gaps.append((came_ns, gap_ns))
        while gaps[0][0] < came_ns - CLOCK_WINDOW_NS:
            gaps.popleft()

    def here_ns(self, there_ns: int, now_ns: int) -> int:
        """The time here for `there_ns`, not in the future, and at most `TIME_NS_MAX` ago."""
        return max(now_ns - TIME_NS_MAX, min(there_ns + self._gaps[0][1], now_ns))


class FarPort(EdgePort):
    """The deciding process' end of an edge on another machine, which is called `holder`. It may have `requests_max`
    requests over HTTP and as many over gRPC."""

    def __init__(
        self,
        driver: Driver,
        pages: Pages,
        arenas: Arenas,
        send: Callable[[ToEdge], None],
        *,
        holder: int,
        requests_max: int,
        clock: FarClock,
    ) -> None:
        super().__init__(driver, pages, arenas, send, is_far=True)
        self.holder, self._requests_max, self._clock = holder, 2 * requests_max, clock
        self._blocks = FarBlocks(holder, lambda block: send(Free(block)))
        self._last = 0
        """The number of its last request."""
        arenas.add_holder(holder, self._blocks.free)

    def lose(self) -> None:
        super().lose()
        self._arenas.remove_holder(self.holder)

    def _free_answers(self) -> None:
        """Later: the edge may still fetch them, until it notices too that the connection has ended."""
        asyncio.get_running_loop().call_later(2 * SILENT_S, super()._free_answers)

    def _submit(self, record: Submit) -> None:
        if record.number <= self._last:
            raise ProtocolError(f"request {record.number} after request {self._last}")
        slo_ns, elapsed_ns = record.slo_ns, record.elapsed_ns
        if not (0 <= elapsed_ns <= TIME_NS_MAX and (slo_ns is None or 0 < slo_ns <= TIME_NS_MAX)):
            raise ProtocolError(f"request {record.number} has {slo_ns} ns, of which {elapsed_ns} have passed")
        if not 0 < record.rows <= ROWS_MAX:
            raise ProtocolError(f"request {record.number} has {record.rows} rows")
        if max(map(len, (record.version, record.request_id, record.trace))) > TEXT_CHARS_MAX:
            raise ProtocolError(f"request {record.number} has a text of more than {TEXT_CHARS_MAX} characters")
        self._last = record.number
        if len(self.requests) >= self._requests_max:
            self._refuse(record)
            return
        began_ns = self._clock.here_ns(record.began_ns, time.monotonic_ns())
        # What began before this process did, at an edge that has lost another one, keeps its age.
        before_ns = max(0, self._driver.zero_ns - began_ns)
        super()._submit(structs.replace(record, began_ns=began_ns + before_ns, elapsed_ns=elapsed_ns + before_ns))

    def _refuse(self, record: Submit) -> None:
        """It has as many requests as it may have: it has kept more from a server with other bounds."""
        if isinstance(record.block, Address):
            self._hold(record.block)
            self._arenas.free(record.block)
        why = f"this edge has {self._requests_max} open requests, as many as the server accepts"
        self.tell(RequestEnded(record.number, Outcome.REJECTED, record.version, [], why, NS_PER_S))

    def _hold(self, block: Address) -> None:
        self._blocks.hold(block)


class ServingEdge(Struct, frozen=True):
    """An edge, as the state page shows it."""

    name: str
    """Of one elsewhere, the name of its machine and its process id; it stays when it connects again."""
    where: str
    """`server`, or `elsewhere` if it was started by `sloop edge`."""
    address: str
    """Where clients connect by HTTP, as this server sees it."""
    grpc_address: str
    pid: int
    ready: bool
    """Whether it accepts connections."""
    since_s: float
    """When it was started, or has connected, in seconds since the server began."""
    open: int
    """Requests that have not ended."""


class FarEdge:
    """An edge on another machine, from its connection on. `edges` admits it when it has introduced itself."""

    def __init__(self, edges: "Edges", loop: AbstractEventLoop, link: NetworkLink, note: Callable[[int], None]) -> None:
        self._edges, self.peer = edges, link.peer
        self.since_ns = time.monotonic_ns()
        self.hello: EdgeHello | None = None
        self.clock = FarClock()
        self.port: FarPort | None = None
        """Once it is admitted, and until it is lost."""
        self.counts = EdgeCounts()
        self.is_ready = self.is_leaving = False
        link.allow(RECORDS_BYTES_MAX)
        self.records = RecordLink(loop, link, FromEdge, self._on_record, self._on_end, note)
        self._timer = loop.call_later(HELLO_S_MAX, self.records.close)
        link.keep_alive()

    def as_serving(self, zero_ns: int) -> ServingEdge | None:
        """The edge, for a server that began at `zero_ns`; None before it is admitted."""
        if self.hello is None or self.port is None:
            return None
        name = f"{self.hello.host or self.peer}/{self.hello.pid}"
        web, grpc = (host_and_port(self.peer, port) for port in self.hello.ports)
        since_s, count = to_s(self.since_ns - zero_ns), len(self.port.requests)
        return ServingEdge(name, "elsewhere", web, grpc, self.hello.pid, self.is_ready, since_s, count)

    @property
    def name(self) -> str:
        """What the log calls it."""
        return f"the edge at {self.peer} (process {self.hello.pid if self.hello is not None else 'unknown'})"

    def _on_record(self, record: FromEdge) -> None:
        kind = type(record)
        if isinstance(record, EdgeHello):
            if self.hello is not None:
                raise ProtocolError("an edge introduces itself twice")
            self._timer.cancel()
            self.hello = record
            self.clock.note(record.sent_ns, time.monotonic_ns())
            self._edges.admit(self)
        elif self.hello is None:
            raise ProtocolError("an edge speaks before it has introduced itself")
        elif self.port is None:
            return  # it was sent away, and is to end
        elif isinstance(record, EdgeClock):
            self.clock.note(record.sent_ns, time.monotonic_ns())
        elif isinstance(record, EdgeCounts):
            self.counts = record
        elif kind is EdgeReady:
            self.is_ready = True
        elif kind is EdgeEnds:
            self.is_leaving = True
        else:
            self.port.on_record(record)

    def _on_end(self, why: str) -> None:
        self._timer.cancel()
        self._edges.lose(self, why)


class EdgeSlot:
    """One of the edges: its sockets, and the process that serves on them now."""

    def __init__(self, number: int, ports: Ports) -> None:
        self.number, self.ports = number, ports
        self.port: EdgePort | None = None
        self.link: RecordLink | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.server: EdgeServer | None = None
        """The edge itself, if it shares this process."""
        self.is_ready = False
        self.started_s = 0.0
        self.since_ns = time.monotonic_ns()
        """When the process was started that serves now."""
        self.deaths = 0
        """Of edges that died soon after their start, one after another."""
        self.counts = EdgeCounts()
        self.silence = Silence()

    @property
    def pid(self) -> int | None:
        """The process that serves now."""
        return self.process.pid if self.process is not None else None

    def as_serving(self, zero_ns: int) -> ServingEdge:
        """The edge, for a server that began at `zero_ns`."""
        web, grpc = (host_and_port(*sock.getsockname()[:2]) for sock in self.ports)
        count = len(self.port.requests) if self.port is not None else 0
        pid = self.pid or (os.getpid() if self.server is not None else 0)
        since_s = to_s(self.since_ns - zero_ns)
        return ServingEdge(f"edge {self.number}", "server", web, grpc, pid, self.is_ready, since_s, count)


class Edges:
    """All edges of a server: its own, as many as `ports` has pairs of sockets, and those of other machines. With
    `is_within`, the only own one shares this process. `settings` are those of all own ones together. `holders` has all
    who hold arenas on other machines. Create it inside the running event loop."""

    def __init__(  # what an edge stands between
        self,
        driver: Driver,
        pages: Pages,
        arenas: Arenas,
        settings: EdgeSettings,
        ports: Sequence[Ports],
        *,
        is_within: bool = False,
        holders: HolderTable | None = None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._driver, self._pages, self._arenas = driver, pages, arenas
        self._table = holders or HolderTable()
        self._table.on_change.append(self._tell_holders)
        self._loop = loop or asyncio.get_running_loop()
        count = len(ports)
        all_bytes = max(1, settings.bodies_bytes_max // count)
        self._settings = structs.replace(
            settings,
            bodies_bytes_max=all_bytes,
            body_bytes_max=min(settings.body_bytes_max, all_bytes),
            requests_max=_share(settings.requests_max, count),
        )
        self._is_within = is_within
        self.slots = [EdgeSlot(number, own) for number, own in enumerate(ports)]
        self.far: list[FarEdge] = []
        """Edges of other machines that are connected."""
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
        self._tell(self._shared(model))

    def _share_again(self) -> None:
        """There are more or fewer edges: tell all their shares of the limits of models."""
        for model in self.models.values():
            if model.limits.requests or model.limits.bytes:
                self._tell(self._shared(model))

    def withdraw(self, name: str) -> None:
        """Offer a model no longer. Its open requests are finished."""
        if self.models.pop(name, None) is not None:
            self._tell(WithdrawModel(name))

    def reload(self) -> None:
        """Let all read their keys and certificates again, and open their access logs anew."""
        self._tell(ReloadFiles())

    def counts(self) -> EdgeCounts:
        """What all edges have counted, and what they hold."""
        total = self._past
        for slot in self.slots:
            total = total.plus(slot.server.counts() if slot.server is not None else slot.counts)
        for far in self.far:
            total = total.plus(far.counts)
        return total

    def serving(self) -> dict[str, int]:
        """How many edges accept connections: of this machine, and elsewhere."""
        return {"server": sum(slot.is_ready for slot in self.slots), "elsewhere": sum(far.is_ready for far in self.far)}

    def serving_edges(self) -> list[ServingEdge]:
        """All edges: first the own ones, then those elsewhere in the order in which they have connected."""
        own = [slot.as_serving(self._driver.zero_ns) for slot in self.slots]
        return [*own, *(each for far in self.far if (each := far.as_serving(self._driver.zero_ns)) is not None)]

    # Those of other machines

    def accept(self, link: NetworkLink) -> None:
        """A process has connected that knows the token, and says that it is an edge."""
        FarEdge(self, self._loop, link, self._driver.turns.note)

    def admit(self, far: FarEdge) -> None:
        """An edge of another machine has introduced itself."""
        hello = far.hello
        assert hello is not None
        why = self._objection(hello)
        if why:
            _log.error("%s is sent away: %s", far.name, why)
            far.records.send(CloseEdge(why))
            self._loop.call_later(LEAVE_S_MAX, far.records.close)
            return
        for old in [each for each in self.far if each.hello is not None and _is_same(each.hello, hello)]:
            old.records.close()
            self.lose(old, "it has connected again")
        number, bounds = self._table.number(), self._settings
        far.port = FarPort(
            *(self._driver, self._pages, self._arenas, far.records.send),
            holder=number,
            requests_max=bounds.requests_max,
            clock=far.clock,
        )
        self.far.append(far)
        setup = EdgeSetup(
            *(number, bool(bounds.api_key or bounds.api_key_file), bounds.has_repository),
            *(bounds.body_bytes_max, bounds.bodies_bytes_max, bounds.json_bytes_max, bounds.requests_max),
            [self._shared(model) for model in self.models.values()],
        )
        far.records.send(setup)
        _log.warning("%s has connected; it sends blocks at %s", far.name, host_and_port(*hello.endpoint))
        self._share_again()
        self._table.add(ArenaHolder(number, hello.machine, hello.pid, hello.endpoint, is_edge=True))

    def lose(self, far: FarEdge, why: str) -> None:
        """The connection to an edge of another machine has ended."""
        port, far.port = far.port, None
        if port is None:
            return
        self.far.remove(far)
        lost = len(port.requests)
        port.lose()
        self._past = self._past.plus(far.counts.ended())
        self._table.remove(port.holder)
        self._share_again()
        if far.is_leaving or self._is_closing:
            _log.warning("%s has left", far.name)
        else:
            self.deaths += 1
            _log.error("%s is lost: %s; %s cancelled", far.name, why, counted(lost, "request"))
        self._changed.set()

    def _objection(self, hello: EdgeHello) -> str:
        """Why an edge of another machine cannot serve; empty if it can."""
        if hello.version != __version__:
            return f"it runs sloop {hello.version[:100]}, this server {__version__}"
        host, port = hello.endpoint
        if not (0 < len(host) <= 255 and 0 < port < 65536):
            return f"it sends blocks at {host[:255]!r}:{port}, which is no address"
        if len(hello.host) > 255 or not all(0 <= each < 65536 for each in hello.ports):
            return f"it serves at the ports {hello.ports} of {hello.host[:255]!r}, which is no address"
        return "the server stops" if self._is_closing else ""

    # Their life

    async def start(self) -> None:
        """Start all; returns when they accept connections. Raises `MachineError` if one does not."""
        for slot in self.slots:
            self._start(slot)
        if not self._is_within:
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
        self._tell(DrainEdge())

    async def delivered(self) -> None:
        """Wait until all edges have the answers that are in the memory of agents, or cannot get them any more."""
        until_s = self._loop.time() + FETCH_S_MAX
        while self._loop.time() < until_s and self._are_fetching():  # noqa: ASYNC110  # blocks have no event
            await asyncio.sleep(DELIVERY_LOOK_S)

    def _are_fetching(self) -> bool:
        ports = [*(slot.port for slot in self.slots), *(far.port for far in self.far)]
        return any(port is not None and port.is_fetching for port in ports)

    def leave(self) -> None:
        """Another server is to take the place of this one: leave the edges of other machines, which wait for it."""
        for far in list(self.far):
            far.records.flush()
            far.records.close()
            self.lose(far, "the server's core has failed")

    async def close(self) -> None:
        """End all within a bounded time."""
        self._is_closing = True
        for far in self.far:
            far.records.send(CloseEdge())
        if self._is_within:
            await asyncio.gather(*(slot.server.close() for slot in self.slots if slot.server is not None))
        for slot in () if self._is_within else self.slots:
            for sock in slot.ports:
                sock.close()
            if slot.link is not None:
                slot.link.send(CloseEdge())
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._until_ended()
        for far in list(self.far):
            far.records.close()
            self.lose(far, "it did not end in time")
        for slot in self.slots:
            if slot.process is not None:
                kill(slot.process.pid)
        await self._until_ended()
        for process in self._killed:
            process.poll()

    async def _until_ended(self) -> None:
        while self.far or any(slot.process is not None for slot in self.slots):
            self._changed.clear()
            await self._changed.wait()

    def _tell(self, record: ToEdge) -> None:
        for slot in self.slots:
            if slot.port is not None:
                slot.port.tell(record)
        for far in self.far:
            far.records.send(record)

    def _tell_holders(self) -> None:
        """Let all know who holds the arenas of answers."""
        here = self._holders_on(machine())
        for slot in self.slots:
            if slot.port is not None:
                slot.port.tell(here)
        for far in self.far:
            assert far.hello is not None
            far.records.send(self._holders_on(far.hello.machine))

    def _holders_on(self, place: str) -> Holders:
        """The same, as edges of one machine must know it."""
        return Holders(self._table.on(place, edges=False), self._table.endpoints())

    def _shared(self, model: OfferModel) -> OfferModel:
        """The model as one edge offers it: with its share of the limits."""
        count, limits = len(self.slots) + len(self.far), model.limits
        if count == 1 or not (limits.requests or limits.bytes):
            return model
        shared = replace(limits, requests=_share(limits.requests, count), bytes=_share(limits.bytes, count))
        return structs.replace(model, limits=shared)

    def _start(self, slot: EdgeSlot) -> None:
        if self._is_closing:
            return
        slot.started_s, slot.since_ns = self._loop.time(), time.monotonic_ns()
        if self._is_within:
            self._start_within(slot)
        else:
            try:
                self._spawn(slot)
            except OSError as error:
                _log.error("edge %d cannot be started: %s", slot.number, error)
                self._replace(slot)
                return
        assert slot.port is not None
        slot.port.tell(self._holders_on(machine()))
        for model in self.models.values():
            slot.port.tell(self._shared(model))

    def _start_within(self, slot: EdgeSlot) -> None:
        slot.port, slot.server = edge_within(self._driver, self._pages, self._arenas, self._settings)
        slot.server.start(*slot.ports)
        slot.is_ready = True

    def _spawn(self, slot: EdgeSlot) -> None:
        ours, theirs = socket_pair()
        link = RecordLink(
            self._loop,
            ours,
            FromEdge,
            lambda record: self._on_record(slot, port, record),
            lambda why: self._on_end(slot, why),
            self._driver.turns.note,
        )
        port = EdgePort(self._driver, self._pages, self._arenas, link.send)
        arena = port.arena
        settings = structs.replace(self._settings, arena=arena.number if arena is not None else 0)
        fds = [theirs.fileno(), *(sock.fileno() for sock in slot.ports), *([arena.fd] if arena is not None else [])]
        arguments = (*fds[:3], arena.fd if arena is not None else -1, os.getpid())
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

    def _on_record(self, slot: EdgeSlot, port: EdgePort, record: FromEdge) -> None:
        if type(record) is EdgeCounts:
            slot.counts = record
        elif type(record) is EdgeReady:
            slot.is_ready = True
            self._changed.set()
        else:
            port.on_record(record)

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
            _log.error("edge %d has died (%s); %s lost", slot.number, _ending(why, process), lost)
            self._replace(slot)
        self._changed.set()

    def _replace(self, slot: EdgeSlot) -> None:
        """Start another edge in the place of one that has died."""
        if self._loop.time() - slot.started_s >= PROVEN_S:
            slot.deaths = 0
        pause_s = min(PAUSE_S_MAX, PAUSE_S * 2 ** (slot.deaths - 1)) if slot.deaths else 0.0
        slot.deaths += 1
        self._loop.call_later(pause_s, self._start, slot)


def edge_within(driver: Driver, pages: Pages, arenas: Arenas, settings: EdgeSettings) -> tuple[EdgePort, EdgeServer]:
    """An edge in this process, which has not started, and its port: the same code as that of a process of its own,
    without frames."""

    def tell(record: ToEdge) -> None:
        server.on_record(record)

    port = EdgePort(driver, pages, arenas, tell)
    arena = Arena(port.arena.number, port.arena.fd) if port.arena is not None else None
    server = EdgeServer(settings, port.on_record, arena, os.getpid())
    return port, server


def _is_same(one: EdgeHello, other: EdgeHello) -> bool:
    return (one.machine, one.pid) == (other.machine, other.pid)


def _share(limit: int, count: int) -> int:
    """One edge's share of a limit; 0 is none."""
    return -(-limit // count)


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
