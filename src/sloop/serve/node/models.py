"""Brings models to the machine of an agent: from stores, from other agents, and from the path that all machines share.

They are fetched into a cache of the machine (`sloop.serve.weights.cache`), when a worker starts that needs one, or when
the core orders a transfer, for which workers then wait. Of a model that the deciding process has cut, its blocks are
fetched one by one, from agents that have them or else from the deciding process.
"""

import asyncio
import logging
import os
from asyncio import Task
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from msgspec import structs

from sloop.actions import CancelTransfer, StartWorker, Transfer
from sloop.errors import InputError, MachineError, SloopError
from sloop.events import TransferFailed, Transferred
from sloop.serve.copies import IN_CACHE, ModelCopy, collect, take
from sloop.serve.network import BlockClient, Endpoint
from sloop.serve.protocols import CutModel, Servable
from sloop.serve.transport import ProtocolError
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.peers import PeerStore, ServedStore
from sloop.serve.weights.sources import ModelSource, Store
from sloop.vocabulary import TransferId, Worker

REFUSED_S: Final = 1.0
"""After which it is reported that a transfer has failed: the core may order another one at once, from a store that
refuses at once."""
RECEPTIONS_MAX: Final = 1_000
"""How many ordered transfers are remembered, because workers may be ordered to wait for one that has just ended."""

T = TypeVar("T")
Peers = Mapping[str, Sequence[Endpoint]]
"""By source, the agents that have it or are fetching it, in the order in which to ask them."""
NO_PEERS: Final[Peers] = MappingProxyType({})
_log: Final = logging.getLogger("sloop.agent")


class HeldModel:
    """What a worker uses of the models on this machine, until it is released."""

    def __init__(self) -> None:
        self.files: list[tuple[WeightsCache, Path]] = []
        """The fetched model, or the blocks of it, each with the cache that has it."""
        self.receptions: list[_Reception] = []
        """The transfers that have brought them."""
        self.copy: ModelCopy | None = None
        """The private copy of the model; None if the model was fetched."""


class _Reception:
    """Weights that the deciding process has ordered to this machine."""

    def __init__(self, order: Transfer, ended: "asyncio.Future[str]") -> None:
        self.order = order
        self.sources: list[ModelSource] = []
        self.ended = ended
        """Ends with the reason why they were not received; empty if they were."""
        self.cache: WeightsCache | None = None
        """The cache that has them; a separate one if they are not kept."""
        self.task: Task[None] | None = None
        self.users = 0
        """Workers that wait for them, or use them."""


class NodeModels:
    """The models of the node `name`. Create it inside the running event loop; `connect` it before it is used."""

    def __init__(self, name: str, make_cache: Callable[[], WeightsCache]) -> None:
        self._name, self._make_cache = name, make_cache
        self.is_beside = False
        """Whether the deciding process is on this machine, with its files."""
        self._loop = asyncio.get_running_loop()
        self._cache: WeightsCache | None = None
        """The cache of fetched models; made when the first one is fetched."""
        self._apart: list[WeightsCache] = []
        """The caches of weights that are not kept."""
        self._receptions: dict[TransferId, _Reception] = {}
        """Weights that the present deciding process has ordered."""
        self._tasks: set[Task[None]] = set()
        self._copying, self._making = asyncio.Lock(), asyncio.Lock()

    def connect(self, blocks: BlockClient, joined: Endpoint) -> None:
        """The deciding process is at `joined` from now on."""
        self._blocks, self._joined = blocks, joined
        self._receptions.clear()  # they end without being told

    @property
    def caches(self) -> list[WeightsCache]:
        """All caches of fetched models."""
        return [*([] if self._cache is None else [self._cache]), *self._apart]

    async def close(self) -> None:
        """Cancel what is being fetched, and delete what is not kept."""
        for running in self._tasks:
            running.cancel()
        if self._cache is not None:
            await self._cache.close()
        for apart in list(self._apart):
            await apart.remove()

    # Models of workers

    def bring(
        self, order: StartWorker, servable: Servable, peers: Peers, held: HeldModel, on_fetch: Callable[[], None]
    ) -> Coroutine[Any, Any, Servable] | None:
        """What brings the model of a worker, or its part of the model, and returns it as it is here; None if it is here
        already. `on_fetch` is called when it begins to be fetched. Raises `MachineError` if it cannot be had; the
        coroutine raises this too, and `InputError`."""
        comes = servable.source or servable.cut is not None
        if comes and (order.transfer is not None or not self.is_beside):
            used = self._used(order.transfer, held)
            return self._fetched(order, servable, peers, held, used, on_fetch)
        if servable.digest and (not self.is_beside or _is_missing(servable.model)):
            return self._copied(servable, held)
        if servable.cut is None and _is_missing(servable.model):
            raise MachineError(_not_here(servable.model))
        return None

    def bring_others(
        self, cut: CutModel, part: Worker, transfer: TransferId | None, held: HeldModel
    ) -> Coroutine[Any, Any, dict[int, str]]:
        """What brings the layers that a part has not; it returns their files by position, but for those that are where
        the deciding process has them."""
        return self._others(cut, part, transfer, held, self._used(transfer, held))

    def release(self, held: HeldModel) -> None:
        """A worker has ended: let its model be deleted from the caches."""
        for cache, model in held.files:
            cache.release(model)
        if held.copy is not None:
            held.copy.close()
        for reception in held.receptions:
            reception.users -= 1
            if not reception.users and reception.ended.done():
                self._leave(reception)

    def _used(self, transfer: TransferId | None, held: HeldModel) -> _Reception | None:
        """A transfer whose weights a worker uses from now on; None if there is no such transfer."""
        found = self._receptions.get(transfer) if transfer is not None else None
        if found is not None:
            found.users += 1
            held.receptions.append(found)
        return found

    async def _fetched(
        self,
        order: StartWorker,
        servable: Servable,
        peers: Peers,
        held: HeldModel,
        reception: _Reception | None,
        on_fetch: Callable[[], None],
    ) -> Servable:
        on_fetch()
        cache = await self._cache_with(order.transfer, reception)
        if servable.cut is not None:
            layers = order.part.layers if order.part is not None else range(len(servable.cut.blocks))
            files = await self._blocks_of(servable.cut, layers, peers, cache, held)
            return structs.replace(servable, cut=_placed(servable.cut, files))
        source = ModelSource.of(servable.source)
        model = await cache.fetch(source, pin=True, nearer=self._nearer(source, peers.get(servable.source, ())))
        held.files.append((cache, model))
        return structs.replace(servable, model=str(await self._prepared(model, servable.changes, model.parent)))

    async def _copied(self, servable: Servable, held: HeldModel) -> Servable:
        """Copy a model from the path that all machines share. The copy must have the content that the deciding process
        has examined."""
        copy = held.copy = await self._taken(Path(servable.original), servable.digest)
        copy.compare(servable.digest)
        return structs.replace(servable, model=str(await self._prepared(copy.path, servable.changes, copy.folder)))

    async def _others(
        self, cut: CutModel, part: Worker, transfer: TransferId | None, held: HeldModel, reception: _Reception | None
    ) -> dict[int, str]:
        if transfer is None and self.is_beside:
            return {}
        cache = await self._cache_with(transfer, reception)
        return await self._blocks_of(cut, part.span.others.positions(len(cut.blocks)), {}, cache, held)

    async def _blocks_of(
        self, cut: CutModel, places: Iterable[int], peers: Peers, cache: WeightsCache, held: HeldModel
    ) -> dict[int, str]:
        """Fetch these blocks; returns their files by position."""

        async def bring(place: int) -> tuple[int, str]:
            text = cut.blocks[place].source
            source = ModelSource.of(text)
            nearer = self._nearer(source, peers.get(text, ()), is_block=True)
            file = await cache.fetch(source, pin=True, nearer=nearer)
            held.files.append((cache, file))
            return place, str(file)

        return dict(await _all(map(bring, places)))

    async def _taken(self, original: Path, expected: str) -> ModelCopy:
        """A private copy of a model, in the cache. Copies of which no worker is left are deleted."""
        folder = (await self._shared_cache()).models.folder / IN_CACHE
        async with self._copying:  # the second worker finds the copy of the first one
            taking = self._loop.run_in_executor(None, _take, original, folder, expected)
            try:
                copy = await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(_close_copy)
                raise
            await self._loop.run_in_executor(None, collect, folder)
        return copy

    async def _prepared(self, model: Path, changes: Sequence[str], folder: Path) -> Path:
        """The file to open for a model: its own, or a copy with these changes in `folder`."""
        if not changes:
            return model
        from sloop.profile.examine import changed_copy  # noqa: PLC0415  # few models need it

        async with self._copying:  # the second worker finds the copy of the first one
            return await self._loop.run_in_executor(None, changed_copy, model, changes, folder)

    async def _cache_with(self, transfer: TransferId | None, reception: _Reception | None) -> WeightsCache:
        """Wait for a transfer, and return the cache with its weights; without a transfer, the shared cache.
        MachineError if the transfer has failed."""
        if transfer is None:
            return await self._shared_cache()
        # Fetching from this cache then takes no time.
        why = "nothing was ordered" if reception is None else await asyncio.shield(reception.ended)
        if why:
            raise MachineError(f"its weights do not come: {why}")
        if reception is None or reception.cache is None:
            raise MachineError("its weights were deleted with the replicas that they were for")
        return reception.cache

    async def _shared_cache(self) -> WeightsCache:
        """The cache of this machine, which is made in a thread: what is left there of another process is deleted."""
        async with self._making:
            if self._cache is None:
                self._cache = await self._loop.run_in_executor(None, self._make_cache)
        return self._cache

    def _nearer(
        self, source: ModelSource, peers: Sequence[Endpoint], *, is_block: bool = False
    ) -> Callable[[Store], Store]:
        """A function that puts other agents before the store of a model; the store of a block is the deciding
        process."""
        token, context = self._blocks.token, self._blocks.context

        def nearer(store: Store) -> Store:
            if is_block:
                store = ServedStore(source, self._joined, token=token, context=context)
            return PeerStore(source, store, peers, token=token, context=context) if peers else store

        return nearer

    # Transfers

    def receive(
        self, order: Transfer, peers: Peers, report: Callable[[Transferred | TransferFailed], None], *, are_blocks: bool
    ) -> None:
        """Bring the sources that `peers` names, and report that they have come."""
        if order.transfer in self._receptions:
            raise ProtocolError(f"transfer {order.transfer} is ordered twice")
        for transfer in list(self._receptions)[:-RECEPTIONS_MAX]:
            if self._receptions[transfer].ended.done():
                del self._receptions[transfer]
        made = self._receptions[order.transfer] = _Reception(order, self._loop.create_future())
        made.task = self._do(self._receive(made, peers, report, are_blocks=are_blocks))

    async def _receive(
        self,
        made: _Reception,
        peers: Peers,
        report: Callable[[Transferred | TransferFailed], None],
        *,
        are_blocks: bool,
    ) -> None:
        """Fetch ordered weights and report the result. Workers that wait for them then start."""
        order, why = made.order, ""
        try:
            made.sources = [ModelSource.of(text) for text in peers]
            pairs = zip(made.sources, peers.values(), strict=True)
            nearer = [self._nearer(source, nearest, is_block=are_blocks) for source, nearest in pairs]
            cache = made.cache = await self._shared_cache()
            if not order.is_kept:
                cache = made.cache = await self._loop.run_in_executor(None, cache.apart)
                self._apart.append(cache)
            await _all(cache.fetch(of, nearer=before) for of, before in zip(made.sources, nearer, strict=True))
        except Exception as error:
            why = why_not(error, "a model")
            if made.cache is not None and not isinstance(error, InputError):  # else nothing is left
                for source in made.sources:
                    await made.cache.discard(source)
            await asyncio.sleep(REFUSED_S)
        if self._receptions.get(order.transfer) is made:
            name = self._name
            report(TransferFailed(order.transfer, name, why) if why else Transferred(order.transfer, name))
        made.ended.set_result(why)
        if not made.users:
            self._leave(made)

    def cancel(self, order: CancelTransfer) -> None:
        """Cancel a transfer: delete the bytes that have arrived, and report nothing."""
        made = self._receptions.get(order.transfer)
        if made is None or made.task is None or made.ended.done():
            return  # its report is under way
        made.task.cancel()
        made.ended.set_result("it was given up")
        if made.order.is_kept and made.cache is not None:
            self._do(self._discard_all(made, made.task))
        self._leave(made)

    def evict(self, sources: Iterable[str]) -> None:
        """Delete the files of these models when no worker uses them."""
        for text in sources:
            self._do(self._evict(ModelSource.of(text)))

    def _leave(self, made: _Reception) -> None:
        """Nobody uses the weights of a transfer any more: delete them unless they are kept."""
        if not made.order.is_kept and made.cache is not None:
            self._do(self._remove(made.cache))
            made.cache = None

    async def _remove(self, cache: WeightsCache) -> None:
        await cache.remove()
        self._apart.remove(cache)

    async def _discard_all(self, made: _Reception, ended: Task[None]) -> None:
        """Delete the files of a cancelled transfer."""
        await asyncio.wait([ended])
        for source in made.sources:
            if made.cache is not None:
                await made.cache.discard(source)

    async def _evict(self, source: ModelSource) -> None:
        try:
            await (await self._shared_cache()).evict(source)
        except (MachineError, OSError) as error:
            _log.warning("%s cannot be deleted: %s", source, error)

    def _do(self, work: Coroutine[Any, Any, None]) -> Task[None]:
        running = asyncio.create_task(work)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        return running


def why_not(error: BaseException, of: str) -> str:
    """Why something cannot be fetched, in one line."""
    if isinstance(error, SloopError):
        return error.what
    _log.error("%s cannot be fetched", of, exc_info=error)
    return f"{of} cannot be fetched: {error}"


def _placed(cut: CutModel, files: Mapping[int, str]) -> CutModel:
    """A model in blocks, with these files for some of them."""
    blocks = [structs.replace(each, file=files.get(at, each.file)) for at, each in enumerate(cut.blocks)]
    return structs.replace(cut, blocks=tuple(blocks))


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, once all have ended. Raises the error of the first that has failed."""
    results = await asyncio.gather(*works, return_exceptions=True)
    failed = next((each for each in results if isinstance(each, BaseException)), None)
    if failed is not None:
        raise failed
    return [each for each in results if not isinstance(each, BaseException)]


def _take(original: Path, folder: Path, expected: str) -> ModelCopy:
    """`take`, with an error that says what to do on this machine."""
    try:
        return take(original, folder, expected)
    except InputError as error:
        if _is_missing(str(original)):
            raise InputError(_not_here(str(original))) from error
        raise


def _not_here(model: str) -> str:
    return f"{model} is not on this node: put it where all nodes can read it under this path, or name it by URL"


def _close_copy(taken: "asyncio.Future[ModelCopy]") -> None:
    """Close a copy that nobody waits for any more."""
    if not taken.cancelled() and taken.exception() is None:
        taken.result().close()


def _is_missing(model: str) -> bool:
    """Whether a model is a file that is not there."""
    return not model.startswith("fake:") and not os.path.exists(model)  # also where it may not be read
