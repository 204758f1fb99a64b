"""An edge's way to the deciding process: requests, questions, and the blocks of both directions.

`EdgeSink` writes the tensors of a request into one block and sends records; when a request has ended it reads the
answer from the blocks that the record names. Nothing here waits: every answer comes by a callback.
"""

import asyncio
import time
import weakref
from asyncio import Task
from collections.abc import Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import numpy as np
from msgspec import structs

from sloop.serve.blocks import Block, BlockReader, layout_for, tensors_in, write_block
from sloop.serve.dataflow import Assembler, GivenBlocks, addresses_in
from sloop.serve.edge.refusal import Refusal
from sloop.serve.messages import (
    Ask,
    Cancel,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    RequestEnded,
    Submit,
    Topic,
)
from sloop.serve.network import BlockClient, NodeTls
from sloop.serve.protocols import RequestResult
from sloop.serve.transport import ProtocolError
from sloop.shared_memory import Address, Arena, ArenaFull
from sloop.tensor import MISSING, Tensor, open_places_of, size_and_shape
from sloop.vocabulary import Outcome, RequestId

ANSWERED: Final = (Outcome.SERVED, Outcome.LATE)
NOTHING: Final[Mapping[str, Tensor]] = {}
NO_SHAPE: Final[tuple[int, ...]] = ()
UNREADABLE: Final = (ProtocolError, ValueError, LookupError)
"""What the answer of an agent can bring that has died, or is broken."""
COPIED_BYTES: Final = 2**20
"""How much is copied before others of this edge get their turn: that takes some 0.2 ms, and 0.8 ms into new pages."""
READY_S: Final = 0.1
"""For how long the deciding process is not asked again whether the server is ready: anybody may ask an edge that."""


class _Borrowed(weakref.ref["np.ndarray[Any, Any]"]):
    """Notices when the last view of a block is gone."""

    __slots__ = ("block",)
    block: Address


class _Stored(dict[str, Tensor]):
    """The tensors of a request, which are in a block. The block is freed with them unless `take` is called before."""

    __slots__ = ("_arena", "_block")

    def __init__(self, tensors: Mapping[str, Tensor], block: Address, arena: Arena) -> None:
        super().__init__(tensors)
        self._block: Address | None = block
        self._arena = arena

    def take(self) -> Block:
        """The block, which the caller then frees, or lets another process free."""
        block, self._block = self._block, None
        assert block is not None, "a request was submitted twice"
        return block

    def __del__(self) -> None:
        if self._block is not None:
            self._arena.free(self._block)


class Fetched:
    """Blocks of an answer that were on other machines, or why one of them is lost."""

    def __init__(self, blocks: dict[Address, memoryview | None]) -> None:
        self.blocks = blocks
        self.lost = ""

    def reader(self, near: Callable[[Block], list[Tensor]]) -> Callable[[Block], list[Tensor]]:
        """Reads these blocks, and by `near` all others."""

        def read(block: Block) -> list[Tensor]:
            memory = self.blocks.get(block) if isinstance(block, Address) else None
            return near(block) if memory is None else tensors_in(memory)

        return read


class OfferedModel:
    """What it takes to send requests to a model and to read its answers."""

    def __init__(self, offer: OfferModel) -> None:
        self.signature, self.slo_ns = offer.signature, offer.slo_ns
        self.inputs = [port.name for port in (*offer.signature.inputs, *offer.signature.optional)]
        self.optional = [port.name for port in offer.signature.optional]
        self.outputs = [port.name for port in offer.signature.outputs]
        self.counting = next((port.name for port in offer.signature.inputs if port.counts_rows), "")
        """An input whose first dimension is the number of rows; empty if there is none."""
        ports = offer.signature.inputs
        self.open = [(ports[position].name, places) for position, places in open_places_of(ports)]
        """The inputs whose rows have open dimensions, each with these dimensions; empty if all rows are equally
        large."""
        self.answers = {version: Assembler(assembly) for version, assembly in offer.answers.items()}
        """By version."""


def _full(error: ArenaFull) -> Refusal:
    what = f"rejected: the shared memory of this edge is full ({error})"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, what, "try again in 1 s", retry_after_s=1)


class EdgeSink:
    """Submits requests to the deciding process, and asks it, by records that `send` passes on. The result of each
    request is reported exactly once.

    `arena` is the edge's own. `holder` is the deciding process.
    `token` is that of the deployment, if answers may come from other machines, and `tls` how these are checked.
    """

    def __init__(
        self,
        send: Callable[[FromEdge], None],
        arena: Arena,
        holder: int,
        token: bytes = b"",
        tls: NodeTls | None = None,
    ) -> None:
        self._send, self._arena = send, arena
        self._holder = holder
        self._holders = {0: holder}
        """The processes of this machine that hold arenas."""
        self._reader = BlockReader(self._holders)
        context = tls.client_context() if tls is not None else None
        self._elsewhere = BlockClient(token, context) if token else None
        """Fetches the blocks of other machines."""
        self._fetching: set[Task[None]] = set()
        self._offered: dict[str, OfferedModel] = {}
        self._waiting: dict[int, tuple[OfferedModel, Callable[[RequestResult], None]]] = {}
        self._asking: dict[int, Callable[[bytes], None]] = {}
        self._ready, self._ready_until_s = b"", float("-inf")
        """The last answer about `Topic.READY`, and until when it is good."""
        self._asking_ready: list[Callable[[bytes], None]] = []
        self._borrowed: dict[tuple[int, int], _Borrowed] = {}
        """By arena and offset, the blocks of answers that have not left."""
        self._copied: set[Address] = set()
        """Blocks of the answer that is being read, which are still to be released."""
        self._last = 0

    def offer(self, model: OfferModel) -> None:
        """Know a model, or what has changed about it."""
        self._offered[model.name] = OfferedModel(model)

    def withdraw(self, name: str) -> None:
        """Forget a model. Its open requests are finished."""
        self._offered.pop(name, None)

    def submit(  # noqa: PLR0913  # what a client may say about a request
        self,
        tensors: Mapping[str, Tensor],
        *,
        application: str,
        version: str = "",
        slo_ns: int | None = None,
        elapsed_ns: int = 0,
        began_ns: int | None = None,
        request_id: str = "",
        trace: str = "",
        outputs: Collection[str] = (),
        on_end: Callable[[RequestResult], None],
    ) -> RequestId:
        """Submit one request whose `tensors` match the application's signature and have the same number of rows.

        `version` asks for one version of the application; empty, the rollout decides. `slo_ns` overrides the
        application's end-to-end deadline; `elapsed_ns` of it has passed before the request arrived. `began_ns`
        (`time.monotonic_ns`, default: now) is when the request's first byte arrived, so that the time of a slow upload
        counts. `request_id` and `trace` are what the client calls it (`edge.identity`), for the log. `outputs` are
        those that it wants, all if empty; what the answer has in place of others means nothing. `on_end` is called
        once, and never after `cancel`. Raises a 503 if there is no room for the tensors.
        """
        offered = self._offered[application]
        if type(tensors) is _Stored:
            block = tensors.take()
        else:
            try:
                block = write_block([tensors[name] for name in offered.inputs], self._arena)
            except ArenaFull as error:
                raise _full(error) from None
        self._last = number = self._last + 1
        self._waiting[number] = offered, on_end
        began_ns = time.monotonic_ns() if began_ns is None else began_ns
        rows = tensors[offered.counting].shape[0] if offered.counting else 1
        size, shape = 0, NO_SHAPE
        if offered.open:
            size, shape = size_and_shape(
                [tuple([tensors[name].shape[place] for place in places]) for name, places in offered.open]
            )
        is_whole = bool(offered.optional) and any(tensors[name] is not MISSING for name in offered.optional)
        wanted: tuple[int, ...] = ()
        if outputs and len(outputs) < len(offered.outputs):
            wanted = tuple([place for place, name in enumerate(offered.outputs) if name in outputs])
        self._send(
            Submit(
                *(number, application, block, began_ns, version, slo_ns, elapsed_ns, request_id, trace),
                *(rows, wanted, size, shape, is_whole),
            )
        )
        return RequestId(number)

    async def store(self, tensors: Mapping[str, Tensor], application: str) -> Mapping[str, Tensor]:
        """Copy large tensors to where `submit` needs them; others get their turn every fraction of a millisecond. The
        result is to be submitted instead of them, once. If it is not, or this is cancelled, the copy is given up.
        Raises a 503 if there is no room for the tensors."""
        inputs, arena = [tensors[name] for name in self._offered[application].inputs], self._arena
        layout = layout_for(inputs)
        if layout.size <= COPIED_BYTES:
            return tensors
        try:
            block, memory = arena.allocate(layout.size)
        except ArenaFull as error:
            raise _full(error) from None
        stored = _Stored(tensors, block, arena)  # which frees the block if this ends early
        memory[: len(layout.table)] = layout.table
        for tensor, (start, end, _) in zip(inputs, layout.places, strict=True):
            data = memoryview(tensor.data).cast("B")
            for at in range(0, len(data), COPIED_BYTES):
                memory[start + at : min(start + at + COPIED_BYTES, end)] = data[at : at + COPIED_BYTES]
                await asyncio.sleep(0)
        return stored

    def cancel(self, request: RequestId) -> None:
        """The client has disconnected. Has no effect on a request that has ended."""
        if self._waiting.pop(request, None) is not None:
            self._send(Cancel(request))

    def ask(self, question: Ask[Topic], then: Callable[[bytes], None]) -> None:
        """Call `then` once with the answer, possibly before this call returns. Whether the server is ready is known for
        `READY_S`, to all who ask."""
        if question.about is not Topic.READY:
            self._ask(question, then)
        elif time.monotonic() < self._ready_until_s:
            then(self._ready)
        else:
            self._asking_ready.append(then)
            if len(self._asking_ready) == 1:
                self._ask(question, self._on_ready)

    def _on_ready(self, found: bytes) -> None:
        self._ready, self._ready_until_s = found, time.monotonic() + READY_S
        waiting, self._asking_ready = self._asking_ready, []
        for then in waiting:
            then(found)

    def _ask(self, question: Ask[Topic], then: Callable[[bytes], None]) -> None:
        self._last = number = self._last + 1
        self._asking[number] = then
        self._send(structs.replace(question, number=number))

    # Records of the deciding process

    def on_end(self, ended: RequestEnded, fetched: Fetched | None = None) -> None:
        """Report the end of a request. Of one that was cancelled meanwhile, the answer is released. Blocks of other
        machines are `fetched` before."""
        outcome, why, outputs = ended.outcome, ended.why, NOTHING
        if fetched is None and self._elsewhere is not None and outcome in ANSWERED and ended.number in self._waiting:
            far = [block for block in addresses_in(ended.blocks) if block.holder not in self._holders]
            if far:
                fetching = asyncio.create_task(self._bring(ended, far))
                self._fetching.add(fetching)
                fetching.add_done_callback(self._fetching.discard)
                return
        offered, report = self._waiting.pop(ended.number, (None, None))
        if outcome in ANSWERED:
            lost = fetched.lost if fetched is not None else ""
            if offered is None or lost:
                self._release(ended.blocks, fetched.blocks if fetched is not None else ())
            else:
                read = self._read if fetched is None else fetched.reader(self._read)
                try:
                    outputs = offered.answers[ended.version].outputs(offered.outputs, ended.blocks, read)
                except UNREADABLE as error:
                    # What was read is released when the error has gone, and with it the arrays that it refers to.
                    read_already = [each.block for each in self._borrowed.values()]
                    self._release(ended.blocks, [*read_already, *(fetched.blocks if fetched is not None else ())])
                    self._copied.clear()
                    lost = str(error)
                for block in self._copied:
                    self._send(Free(block))
                self._copied.clear()
            if lost:
                outcome, why = Outcome.FAILED, f"its answer was lost with the node that had it ({lost})"
        if report is not None:
            report(RequestResult(outcome, outputs, why, ended.retry_after_ns, ended.version, ended.is_refused))

    def on_free(self, record: Free) -> None:
        """Use the memory of a block again."""
        self._arena.free(record.block)

    def on_page(self, page: Page) -> None:
        """Pass on the answer to a question."""
        then = self._asking.pop(page.number, None)
        if then is not None:
            then(page.body)

    def set_holders(self, holders: Holders) -> None:
        """Know who holds the arenas of answers."""
        self._holders.clear()
        self._holders.update({0: self._holder, **holders.here})
        if self._elsewhere is not None:
            self._elsewhere.set_endpoints(holders.endpoints)

    async def _bring(self, ended: RequestEnded, far: Iterable[Address]) -> None:
        """Fetch blocks of other machines, then report the end of the request, unless it is cancelled meanwhile."""
        assert self._elsewhere is not None
        fetched = Fetched(dict.fromkeys(far))
        try:
            for block in fetched.blocks:
                fetched.blocks[block] = memoryview(bytearray(block.size))
        except MemoryError:
            fetched.lost = f"there is no memory for {block.size} B"
        else:
            fetches = [self._elsewhere.fetch(block, memory) for block, memory in fetched.blocks.items() if memory]
            lost = [each for each in await asyncio.gather(*fetches, return_exceptions=True) if each is not None]
            fetched.lost = (str(lost[0]) or repr(lost[0])) if lost else ""
        for block in fetched.blocks:
            self._send(Free(block))
        self.on_end(ended, fetched)

    def _read(self, block: Block) -> list[Tensor]:
        """The tensors of a block, which is released when they and all their views are gone. One of an agent is copied:
        when the connection between agent and deciding process has ended, the agent uses its memory again, also that
        which a slow client has not received."""
        if isinstance(block, bytes):
            return tensors_in(block)
        if block.holder:
            try:
                copy = bytes(self._reader.memory(block))
            except MemoryError as error:
                raise ProtocolError(f"there is no memory for {block.size} B") from error
            self._copied.add(block)
            return tensors_in(copy)
        array = np.frombuffer(self._reader.memory(block), np.uint8)
        borrowed = _Borrowed(array, self._on_gone)
        borrowed.block = block
        self._borrowed[block.arena, block.offset] = borrowed
        return tensors_in(array.data)

    def _on_gone(self, borrowed: "weakref.ref[Any]") -> None:
        assert isinstance(borrowed, _Borrowed)
        block = borrowed.block
        del self._borrowed[block.arena, block.offset]
        self._send(Free(block))

    def _release(self, blocks: Iterable[GivenBlocks], but: Collection[Address] = ()) -> None:
        for block in dict.fromkeys(addresses_in(blocks)):
            if block not in but:
                self._send(Free(block))
