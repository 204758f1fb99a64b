"""An edge on another machine than the deciding process: `sloop edge --join HOST:PORT --token-file FILE`.

It is the same `EdgeServer` as an edge that the server starts itself, and exchanges the same records with the deciding
process, over a connection between machines (`sloop.serve.network`). The bounds of requests come from the server, keys
and certificates from this machine. Tensors stay in an arena on this machine, from which agents fetch them. The edge
fetches the answers from the agents.

The connection ends when the network fails or the deciding process dies. The edge then keeps its ports, its clients'
connections and all requests that have not ended, and connects again: to the same deciding process, or to its successor,
which knows nothing of these requests. It submits them again, with their age (`FarSink`). So each request is answered
once, and only time is lost. A request whose deadline passes meanwhile is answered with 503, or with 504 if a deciding
process had received it: its model may have run.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import structs

from sloop import __version__
from sloop.errors import InputError, MachineError
from sloop.serve.agent import GIVE_UP_S, RETRY_S
from sloop.serve.blocks import ARENA_BYTES, Block, BlockReader
from sloop.serve.edge.process import COUNT_S, EdgeServer, EdgeSettings
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.sink import EdgeSink, Fetched
from sloop.serve.messages import (
    Ask,
    AskModels,
    AskReady,
    Cancel,
    CloseEdge,
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
    ReloadFiles,
    RequestEnded,
    Submit,
    ToEdge,
    WithdrawModel,
)
from sloop.serve.network import (
    BEAT_S,
    FETCH_S_MAX,
    BlockServer,
    Endpoint,
    NetworkLink,
    NodeListener,
    NodeTls,
    Purpose,
    connect,
    machine,
)
from sloop.serve.protocols import ModelState, Readiness, ServerReadiness
from sloop.serve.transport import ProtocolError, RecordLink
from sloop.shared_memory import Address, Arena, ArenaReader, Arenas, readable
from sloop.text import counted
from sloop.units import NS_PER_S
from sloop.vocabulary import Outcome

AWAY: Final = "the deciding process is away"
STOPS: Final = "this edge stops"
LOOK_S: Final = 0.05
"""How often an edge without a deciding process checks for requests whose deadline has passed."""
DOUBT_S: Final = 3 * BEAT_S
"""How long a request waits after its answer could not be fetched. If this machine was cut off, the connection to the
deciding process ends within this time too, and the request is submitted again."""
CLOCK_S: Final = 0.5
"""How often an edge says what its clock shows."""

_log: Final = logging.getLogger("sloop.edge")


class FarSink(EdgeSink):
    """An edge's connection to a deciding process on another machine, which may be unreachable for a while.

    A request is kept until it has ended. `join` begins a connection and submits all kept requests again; records of the
    connection before are ignored from then on. Agents may still read tensors on orders of that connection. So the
    memory of these tensors is not reused for another `FETCH_S_MAX`: such a read is useless, but must not return the
    data of another request.
    """

    def __init__(self, arena: Arena | None, token: bytes, tls: NodeTls | None, loop: AbstractEventLoop) -> None:
        super().__init__(self._pass_on, arena, os.getpid(), token, tls)
        self._own = {}
        self._loop = loop
        self._records: RecordLink | None = None
        """The connection; None while the deciding process is away."""
        self._submitted: dict[int, Submit] = {}
        """Requests that have not ended."""
        self._sent: set[int] = set()
        """Of these, those that a deciding process has or had."""
        self._again: set[int] = set()
        """Of these, those that an earlier deciding process had, or this one over another connection."""
        self._asked: dict[int, Ask] = {}
        self._doubtful: dict[int, TimerHandle] = {}
        """Requests whose answer could not be fetched, and the timer that ends them."""
        self._lent: dict[int, int] = {}
        """By offset, the blocks that were submitted and are not free yet, with the number of their request."""
        self._freed: set[int] = set()
        """Of these, the blocks of requests that have ended at the deciding process, but not here yet: if the connection
        ends before the answer has arrived, the request is submitted again."""
        self._former: dict[int, float] = {}
        """By offset, until when (`loop.time`) a block may be read on orders of a connection that has ended."""
        self._looking: TimerHandle | None = None
        self.leaving_why = ""
        """Why this edge is not ready, although there is a deciding process."""
        self.ended_alone = 0
        """Requests that ended here because there was no deciding process."""

    @property
    def is_away(self) -> bool:
        """Whether there is no deciding process."""
        return self._records is None

    def join(self, records: RecordLink, holder: int) -> None:
        """Use this new connection, whose deciding process has just sent its offers and calls this process `holder`."""
        self._own = {holder: os.getpid()}
        self._holders.clear()
        self._holders.update(self._own)
        self._reader = BlockReader(self._holders)
        if self._arena is not None:
            self._arena.set_holder(holder)
        self._records, self._again = records, set(self._sent)
        for number, record in list(self._submitted.items()):
            offered, report = self._waiting[number]
            now = self._offered.get(record.application)
            if now is not None and now.signature != offered.signature:
                self._end(number, "the model was replaced by one with other inputs or outputs", Outcome.FAILED)
                continue
            self._waiting[number] = now or offered, report
            self._submit_now(record)
        for question in self._asked.values():
            records.send(question)

    def lose(self) -> None:
        """The connection has ended."""
        self._records = None
        for fetching in self._fetching:
            fetching.cancel()
        for ending in self._doubtful.values():
            ending.cancel()
        self._doubtful.clear()
        until_s = self._loop.time() + FETCH_S_MAX
        for offset, number in list(self._lent.items()):
            self._former[offset] = until_s
            if number not in self._submitted:
                self._take_back(offset)
        for question in list(self._asked.values()):
            if isinstance(question.question, AskReady | AskModels):
                self._answer(question)
        self._end_late()

    def end_all(self, why: str) -> None:
        """End all requests that wait."""
        for number in list(self._submitted):
            self._end(number, why)

    # Of the edge

    def _pass_on(self, record: FromEdge) -> None:
        """Send a record to the deciding process, or keep it until there is one."""
        if isinstance(record, Submit):
            self._submitted[record.number] = record
            if isinstance(record.block, Address):
                self._lent[record.block.offset] = record.number
            if self._records is not None:
                self._submit_now(record)
            return
        if isinstance(record, Cancel):
            cancelled = self._forget(record.number)
            if self._records is None and cancelled is not None:
                self._drop(cancelled.block)
        elif isinstance(record, Ask):
            if self._records is None or (self.leaving_why and isinstance(record.question, AskReady | AskModels)):
                self._answer(record)
                return
            self._asked[record.number] = record
        if self._records is not None:
            self._records.send(record)

    def _submit_now(self, record: Submit) -> None:
        block = record.block
        assert self._records is not None
        self._sent.add(record.number)
        if isinstance(block, Address):
            self._freed.discard(block.offset)
        if isinstance(block, Address):
            assert self._arena is not None
            if block.arena != self._arena.number:  # it was written when the arena had another holder
                record = structs.replace(record, block=Address(self._arena.number, block.offset, block.size))
        self._records.send(record)

    def _answer(self, record: Ask) -> None:
        """Answer a question without the deciding process. Raises a 503 if that is not possible."""
        question, why = record.question, self.leaving_why or AWAY
        if isinstance(question, AskReady):
            body = msgspec.json.encode(ServerReadiness(why))
        elif isinstance(question, AskModels):
            names = [question.model] if question.model else list(self._offered)
            state = ModelState.STOPPING if self.leaving_why else ModelState.STARTING
            body = msgspec.json.encode({name: Readiness(state, why) for name in names})
        else:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, AWAY, "try again in 1 s", retry_after_s=1)
        self.on_page(Page(record.number, body))

    # Of the deciding process

    def on_end(self, ended: RequestEnded, fetched: Fetched | None = None) -> None:
        if fetched is not None and fetched.lost and ended.number not in self._doubtful:
            self._doubtful[ended.number] = self._loop.call_later(DOUBT_S, self.on_end, ended, fetched)
            return
        ending = self._doubtful.pop(ended.number, None)
        if ending is not None:
            ending.cancel()
        if ended.outcome is Outcome.REJECTED and ended.number in self._again and not ended.is_refused:
            # Its model may have run before.
            ended = structs.replace(ended, outcome=Outcome.DROPPED)
        try:
            super().on_end(ended, fetched)
        finally:
            if ended.number not in self._waiting:
                self._forget(ended.number)

    def on_free(self, record: Free) -> None:
        offset = record.block.offset
        if self._lent.get(offset) in self._submitted:
            self._freed.add(offset)
        else:
            self._take_back(offset)

    def on_page(self, page: Page) -> None:
        self._asked.pop(page.number, None)
        super().on_page(page)

    def set_holders(self, holders: Holders) -> None:
        """See `EdgeSink`. If the edge may not read the memory of a process on this machine, it fetches its blocks."""
        super().set_holders(Holders(readable(holders.here), holders.endpoints))

    # Requests and blocks without a deciding process

    def _end_late(self) -> None:
        """While there is no deciding process, end the requests whose deadline has passed."""
        if self._looking is not None:
            self._looking.cancel()
        if self._records is not None:
            return
        now_ns = time.monotonic_ns()
        for number, record in list(self._submitted.items()):
            slo_ns = record.slo_ns or self._waiting[number][0].slo_ns
            if record.began_ns - record.elapsed_ns + slo_ns <= now_ns:
                self._end(number, AWAY)
        self._looking = self._loop.call_later(LOOK_S, self._end_late)

    def _end(self, number: int, why: str, tried: Outcome = Outcome.DROPPED) -> None:
        """End a request that waits: as rejected if no model can have run, and otherwise as `tried`."""
        record, outcome = self._submitted[number], tried if number in self._sent else Outcome.REJECTED
        self.ended_alone += self.is_away
        self._drop(record.block)
        self.on_end(RequestEnded(number, outcome, record.version, [], why, NS_PER_S))

    def _forget(self, number: int) -> Submit | None:
        """A request has ended, or is cancelled."""
        self._sent.discard(number)
        self._again.discard(number)
        record = self._submitted.pop(number, None)
        if record is not None and isinstance(record.block, Address) and record.block.offset in self._freed:
            self._take_back(record.block.offset)
        return record

    def _drop(self, block: Block) -> None:
        """Free the tensors of a request, which nobody needs any more and no deciding process knows."""
        if isinstance(block, Address):
            self._take_back(block.offset)

    def _take_back(self, offset: int) -> None:
        """Free the memory of a block, once nobody can read it on orders of a former connection."""
        self._freed.discard(offset)
        if self._lent.pop(offset, None) is None:
            return
        left_s = self._former.pop(offset, 0.0) - self._loop.time()
        if left_s > 0:
            self._loop.call_later(left_s, self._free, offset)
        else:
            self._free(offset)

    def _free(self, offset: int) -> None:
        assert self._arena is not None
        self._arena.free(Address(self._arena.number, offset, 0))


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Where an edge finds its deciding process, and how others find the edge."""

    join: Endpoint
    token: bytes
    tls: NodeTls | None = None
    """How machines check each other."""
    host: str = ""
    """The address of this machine for agents; if empty, the one from which it connects to the server."""
    drain_s: float = 30.0
    """How long open requests may take to finish after the order to stop."""


class JoiningEdge:
    """Serves on two listening sockets, for HTTP and gRPC, for the deciding process at `given.join`. `settings` are
    those of this machine; the server's bounds replace theirs. `on_start` is called when it serves."""

    def __init__(
        self,
        given: JoinSettings,
        settings: EdgeSettings,
        ports: tuple[socket.socket, socket.socket],
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._given, self._ports, self._on_start = given, ports, on_start
        self._settings = structs.replace(settings, token=given.token, node_tls=given.tls)
        self._loop = asyncio.get_running_loop()
        self._held = Arenas().make(ARENA_BYTES, lambda _: None)
        arena = Arena(self._held.number, self._held.fd) if self._held is not None else None
        self._arena = arena
        self._sink = FarSink(arena, given.token, given.tls, self._loop)
        self._server: EdgeServer | None = None
        """None until the deciding process has sent its bounds."""
        self._records: RecordLink | None = None
        self._reader = ArenaReader({})
        self._blocks = BlockServer(self._read)
        self._is_over, self._refused = False, ""
        self._acts: Mapping[type, Callable[[Any], None]] = {}

    def _read(self, block: Address) -> memoryview:
        """The memory of a block that another machine fetches."""
        return self._reader.read(block)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until the server stops or `stop` is set, then drain. Raises `MachineError` if there is no deciding
        process for `GIVE_UP_S` or if it rejects this edge, and `InputError` if only one of them demands keys."""
        serving, stopping = self._loop.create_task(self._serve()), self._loop.create_task(stop.wait())
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._drain(serving)
                self._is_over = True
            for each in (serving, stopping):
                each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            self._sink.end_all(AWAY)
            if self._server is not None:
                await self._server.close()
            if self._records is not None:
                self._leave(self._records)

    def withdraw(self) -> None:
        """Say from now on that this edge is not ready, for it was told to stop."""
        self._sink.leaving_why = STOPS

    def reload(self) -> None:
        """Read keys and certificates of clients again, and open the access log anew."""
        if self._server is not None:
            self._acts[ReloadFiles](ReloadFiles())

    async def _drain(self, serving: "asyncio.Task[None]") -> None:
        """Finish the open requests, as long as there is a deciding process or one may still come back."""
        if self._server is None:
            return
        draining = self._loop.create_task(self._server.drain(self._given.drain_s))
        await asyncio.wait((draining, serving), return_when=asyncio.FIRST_COMPLETED)
        self._sink.end_all(STOPS)
        await draining

    def _leave(self, records: RecordLink) -> None:
        """Tell the deciding process that this edge ends by intention and has lost no request."""
        if self._server is not None:
            records.send(self._counts())
        records.send(EdgeEnds())
        records.flush()
        records.close()

    async def _serve(self) -> None:
        """Connect and serve; connect again whenever the connection is lost."""
        given = self._given
        context = given.tls.client_context() if given.tls is not None else None
        listener: NodeListener | None = None
        lost_s, is_trying = self._loop.time(), False
        try:
            while not self._is_over:
                try:
                    link = await connect(given.join, given.token, Purpose.EDGE, context=context)
                except MachineError as error:
                    if self._loop.time() - lost_s > GIVE_UP_S:
                        raise
                    if not is_trying:
                        _log.warning("%s; trying again for %g s", error.what, GIVE_UP_S)
                    is_trying = True
                    await asyncio.sleep(RETRY_S)
                    continue
                if listener is None:
                    own = given.tls.server_context() if given.tls is not None else None
                    where = given.host or link.local_host, 0
                    listener = await NodeListener.listen(where, given.token, self._blocks.accept, own)
                began_s = self._loop.time()
                why = await self._session(link, (given.host or link.local_host, listener.port))
                lost_s, is_trying = self._loop.time(), False
                if not self._is_over:
                    waiting = counted(self._sink.open_requests, "request")
                    _log.warning("the connection to the deciding process has ended: %s; %s waiting", why, waiting)
                    if lost_s - began_s < RETRY_S:  # it may be sent away for what it says
                        await asyncio.sleep(RETRY_S)
        finally:
            if listener is not None:
                await listener.close()
            self._blocks.close()
        if self._refused:
            raise MachineError(f"the deciding process sends this edge away: {self._refused}")

    async def _session(self, link: NetworkLink, endpoint: Endpoint) -> str:
        """Serve over one connection; returns why it has ended."""
        ended: asyncio.Future[str] = self._loop.create_future()

        def on_end(why: str) -> None:
            self._lose()  # at once: what is being fetched may be used again
            if not ended.done():
                ended.set_result(why)

        def on_record(record: ToEdge) -> None:
            if ended.done():
                return
            if isinstance(record, CloseEdge):
                self._is_over, self._refused = True, record.why
                ended.set_result(record.why)
            elif isinstance(record, EdgeSetup) and self._records is None:
                try:
                    self._set_up(record, records)
                except InputError as error:
                    ended.set_exception(error)
            elif self._records is None:
                raise ProtocolError(f"an edge was sent a {type(record).__name__} before its setup")
            elif type(record) in self._acts:
                self._acts[type(record)](record)
            else:
                raise ProtocolError(f"an edge that was set up was sent a {type(record).__name__}")

        records = RecordLink(self._loop, link, ToEdge, on_record, on_end)
        link.keep_alive(is_strict=True)
        web, grpc = (int(sock.getsockname()[1]) for sock in self._ports)
        who = __version__, os.getpid(), machine(), endpoint, time.monotonic_ns()
        records.send(EdgeHello(*who, host=socket.gethostname(), ports=(web, grpc)))
        try:
            return await ended
        finally:
            if not self._is_over or self._refused or self._records is None:
                records.close()
                self._lose()

    def _lose(self) -> None:
        """There is no connection."""
        self._records = None
        self._sink.lose()

    def _set_up(self, setup: EdgeSetup, records: RecordLink) -> None:
        """Take over the bounds and the offers of a deciding process. Raises `InputError`."""
        settings = structs.replace(
            self._settings,
            has_repository=setup.has_repository,
            body_bytes_max=setup.body_bytes_max,
            bodies_bytes_max=setup.bodies_bytes_max,
            json_bytes_max=setup.json_bytes_max,
            requests_max=setup.requests_max,
        )
        check_keys(settings, setup)
        is_first = self._server is None
        if self._server is None:
            self._server = EdgeServer(settings, lambda _: None, self._arena, os.getpid(), sink=self._sink)
            self._acts = self._server.acts
        self._server.set_bounds(settings)
        self._settings, self._server.web.is_draining = settings, False  # the one before may have begun to stop
        names = {model.name for model in setup.models}
        for name in [name for name in self._server.service.models if name not in names]:
            self._acts[WithdrawModel](WithdrawModel(name))
        for model in setup.models:
            self._acts[OfferModel](model)
        self._reader = ArenaReader({setup.holder: os.getpid()})
        self._records = records
        self._sink.join(records, setup.holder)
        if is_first:
            self._server.start(*self._ports)
            self._tell_clock(0.0)
            self._on_start()
        records.send(EdgeReady())

    def _counts(self) -> EdgeCounts:
        assert self._server is not None
        counts = self._server.counts()
        counts.refused["away"] = self._sink.ended_alone
        return counts

    def _tell_clock(self, since_s: float) -> None:
        """Send the time of this machine's clock, and about every `COUNT_S` the counts."""
        assert self._server is not None
        since_s += CLOCK_S
        if since_s >= COUNT_S:
            counts, since_s = self._counts(), 0.0
            if self._records is not None:
                self._records.send(counts)
        if self._records is not None:
            self._records.send(EdgeClock(time.monotonic_ns()))
        self._loop.call_later(CLOCK_S, self._tell_clock, since_s)


def check_keys(settings: EdgeSettings, setup: EdgeSetup) -> None:
    """Raise `InputError` unless this edge demands keys of clients if, and only if, the server's own edges do."""
    has_key = bool(settings.api_key or settings.api_key_file)
    if setup.needs_key and not has_key:
        what = "the server demands a key of clients, this edge has none to compare with"
        raise InputError(what, where="--api-key-file", help="give this edge the keys of its clients")
    if has_key and not setup.needs_key:
        what = "this edge demands a key of clients, the server's own edges do not"
        raise InputError(what, where="--api-key-file", help="give the server a key file too, or leave this one out")
