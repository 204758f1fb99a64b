"""Model files in a cache on this machine: fetched once for all callers, verified, within a budget of bytes.

`sloop.serve.weights.folder` has the state, and `sloop.serve.weights.transfer` brings the files, in threads. Must not
depend on the driver or on workers.
"""

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from sloop.errors import InputError, MachineError
from sloop.serve.weights.folder import (
    APART,
    ENTRY_NAME,
    OWNER,
    CachedModel,
    Clock,
    ModelFolder,
    disk_full,
    locked_file,
    usual_folder,
)
from sloop.serve.weights.sources import (
    FolderStore,
    ModelSource,
    Patience,
    Store,
    Watch,
)
from sloop.serve.weights.transfer import ModelTransfer, Progress
from sloop.serve.weights.web import WebStore

BYTES_VARIABLE: Final = "SLOOP_MODELS_BYTES"
TOKENS_VARIABLE: Final = "SLOOP_MODELS_TOKENS"
"""Variables of the environment, as `MODELS_VARIABLE`, for commands without the options."""
MODELS_BYTES: Final = 32 << 30
"""The budget of the cache unless another one is given."""

T = TypeVar("T")


class _SharedTransfer:
    """A transfer that several callers wait for."""

    def __init__(self, key: ModelSource, watch: Watch, loop: asyncio.AbstractEventLoop) -> None:
        self.key, self.watch = key, watch
        self.ended: asyncio.Future[CachedModel] = loop.create_future()
        self.callers = self.pins = 0
        self.listeners: list[Progress] = []


class WeightsCache:
    """Model files on this machine, at most `budget_bytes` of them; the least recently used ones are deleted first.

    Belongs to one event loop, which it never blocks for a transfer. `transfers_max` models are fetched at the same
    time; others wait. `stores` replaces the usual ones by scheme, such as a `WebStore` with tokens.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        *,
        stores: Mapping[str, Store] | None = None,
        patience: Patience | None = None,
        transfers_max: int = 4,
        clock: Clock = time.time_ns,
        within: ModelFolder | None = None,
    ) -> None:
        """MachineError if the folder cannot be made. `within`: the folder whose budget it shares."""
        self.models = ModelFolder(folder, budget_bytes, clock, within)
        self.models.prepare()
        web = WebStore()
        self._stores: dict[str, Store] = {"file": FolderStore(), "http": web, "https": web, **(stores or {})}
        self._patience = patience or Patience()
        self._slots = asyncio.Semaphore(transfers_max)
        self._shared: dict[ModelSource, _SharedTransfer] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._deletions: dict[asyncio.Task[Any], str] = {}
        """Those that are under way, with the keys of their locations."""
        self._pins: dict[Path, list[int]] = {}
        self._unwanted: set[Path] = set()
        """Models that are to be deleted when nobody uses them any more."""
        self._owner: int | None = None
        """A lock on a cache whose models nobody shares."""

    def apart(self) -> "WeightsCache":
        """A new cache within this one and its budget, for models that nobody else uses. `remove` deletes it; if this
        process dies, the next process that uses this folder does. Blocks for the disk; MachineError if it cannot be
        made."""
        try:
            folder = Path(tempfile.mkdtemp(prefix=APART, dir=self.models.folder))
            owner = locked_file(folder / OWNER, exclusive=True)
        except OSError as error:
            raise disk_full(self.models.folder, error.strerror or str(error)) from error
        models, patience = self.models, self._patience
        made = WeightsCache(folder, models.budget_bytes, stores=self._stores, patience=patience, within=models)
        made._owner = owner
        return made

    async def remove(self) -> None:
        """Stop all transfers of a cache that is `apart`, and delete it."""
        await self.close()
        await self._delete("", partial(shutil.rmtree, self.models.folder, ignore_errors=True))
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    async def evict(self, source: ModelSource) -> None:
        """Delete the files of this source; files in use are deleted when nobody uses them any more."""

        def work() -> list[Path]:
            models = self.models.models(source.key)
            return [
                model.folder
                for model in models
                if source.sha256 in ("", model.record.files[0].sha256) and not self.models.evict(model.folder)
            ]

        await self.discard(source)
        for folder in await self._delete(source.key, work):
            self._unwanted.add(folder)
            if folder not in self._pins:  # it has been released meanwhile, or another process uses it
                await self._delete(source.key, partial(self.models.evict, folder))

    async def discard(self, source: ModelSource) -> None:
        """Delete the files of interrupted transfers of this source."""
        if not self.is_fetching(source.key):
            await self._delete(source.key, partial(self.models.discard_all, source.key))

    def _delete(self, key: str, work: Callable[[], T]) -> "asyncio.Task[T]":
        """Delete files of a location in a thread, because a disk may take seconds, and another process may hold the
        lock for as long. A transfer that begins meanwhile waits: it must not find what is about to go."""
        loop = asyncio.get_running_loop()

        async def delete() -> T:
            return await loop.run_in_executor(None, work)

        deleting = loop.create_task(delete())
        self._deletions[deleting] = key
        deleting.add_done_callback(self._deletions.pop)
        return deleting

    async def fetch(
        self,
        source: ModelSource,
        progress: Progress | None = None,
        *,
        pin: bool = False,
        nearer: Callable[[Store], Store] = lambda store: store,
    ) -> Path:
        """The path of the model's own file on this machine, with its other files beside it.

        Callers that fetch the same source at the same time share one transfer, which ends early only if all of them are
        cancelled. With `pin` the model stays until `release`; without, it may be deleted when the next one needs room.
        `nearer`, of which the first caller's counts, may put other machines before the store
        (`sloop.serve.weights.peers`).

        InputError if the source is wrong: no such file, no permission, another checksum, an answer that violates HTTP.
        MachineError if the store cannot be reached, is too slow or breaks off, or if there is no room.
        """
        shared = self._shared.get(source) or self._begin(source, nearer)
        shared.callers += 1
        shared.pins += pin
        if progress is not None:
            shared.listeners.append(progress)
        try:
            model = await asyncio.shield(shared.ended)
        except asyncio.CancelledError:
            if pin and shared.ended.done() and not shared.ended.cancelled() and shared.ended.exception() is None:
                self.release(shared.ended.result().path)
            shared.pins -= pin
            if shared.callers == 1:
                self._abandon(shared)
            raise
        finally:
            shared.callers -= 1
            if progress is not None:
                shared.listeners.remove(progress)
        return model.path

    def is_fetching(self, key: str) -> bool:
        """Whether a model of this location is being fetched."""
        return any(source.key == key for source in self._shared)

    def acquire(self, path: Path) -> None:
        """Keep the model of a fetched file until `release`. InputError if it was deleted."""
        folder = self._model_of(path)
        lock = self.models.pin(folder)
        if lock is None:
            raise InputError("it is no longer in the cache of models", where=str(path), help="fetch it again")
        self._unwanted.discard(folder)
        self._pins.setdefault(folder, []).append(lock)

    def release(self, path: Path) -> None:
        """End one `acquire` of the same file, or one `fetch` with `pin`. An evicted model is deleted in the
        background."""
        folder = self._model_of(path)
        self.models.note_use(folder)
        os.close(self._pins[folder].pop())
        if not self._pins[folder]:
            del self._pins[folder]
            if folder in self._unwanted:
                self._unwanted.discard(folder)
                match = ENTRY_NAME.fullmatch(folder.name)
                self._delete(match["key"] if match else "", partial(self.models.evict, folder))

    async def close(self) -> None:
        """Stop all transfers, whose callers are cancelled, and release all models."""
        for shared in list(self._shared.values()):
            self._abandon(shared)
        while running := [*self._running, *self._deletions]:
            await asyncio.wait(running)
        for locks in self._pins.values():
            for lock in locks:
                os.close(lock)
        self._pins.clear()

    def _model_of(self, path: Path) -> Path:
        """The folder in the cache to which a file belongs."""
        try:
            return self.models.folder / path.relative_to(self.models.folder).parts[0]
        except (ValueError, IndexError):
            advice = f"give a path below {str(self.models.folder)!r}"
            raise InputError("it is not in the cache of models", where=str(path), help=advice) from None

    def _begin(self, source: ModelSource, nearer: Callable[[Store], Store]) -> _SharedTransfer:
        shared = _SharedTransfer(source, Watch(self._patience), asyncio.get_running_loop())
        self._shared[source] = shared
        running = asyncio.create_task(self._run(shared, nearer(self._store(source.scheme))))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return shared

    def _store(self, scheme: str) -> Store:
        if scheme not in self._stores:
            from sloop.serve.weights.objects import CloudStore, SignedStore  # noqa: PLC0415  # an extra

            self._stores[scheme] = SignedStore() if scheme == "s3" else CloudStore()
        return self._stores[scheme]

    def _abandon(self, shared: _SharedTransfer) -> None:
        shared.watch.stop()
        shared.ended.cancel()
        self._forget(shared)

    def _forget(self, shared: _SharedTransfer) -> None:
        if self._shared.get(shared.key) is shared:
            del self._shared[shared.key]

    async def _run(self, shared: _SharedTransfer, store: Store) -> None:
        """Run the transfer in a thread. The thread may never end, because a shared folder whose server cannot be
        reached blocks it. So it is a daemon thread, and is abandoned when it is silent for too long."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[tuple[CachedModel, int] | BaseException] = loop.create_future()

        def report(done_bytes: int, total_bytes: int | None) -> None:
            _call(loop, lambda: [listen(done_bytes, total_bytes) for listen in list(shared.listeners)])

        transfer = ModelTransfer(shared.key, self.models, store, shared.watch, report)
        async with self._slots:
            while deletions := [each for each, key in self._deletions.items() if key == shared.key.key]:
                await asyncio.wait(deletions)
            if shared.ended.done():
                return
            name = f"sloop-fetch-{shared.key.name}"
            threading.Thread(target=_work, args=(transfer, loop, over), name=name, daemon=True).start()
            while not over.done():
                await asyncio.wait([over], timeout=min(1.0, self._patience.hang_s / 4))
                shared.watch.look()
                if shared.watch.silent_s > (1.0 if shared.ended.done() else self._patience.hang_s):
                    break
        self._forget(shared)
        if over.done():
            self._finish(shared, over.result())
            return
        shared.watch.stop()
        over.add_done_callback(_unlock)
        what = f"{shared.key}: the operating system has not answered for {self._patience.hang_s:g} s"
        self._finish(shared, MachineError(what, help="check the shared folder, or name resolution, on this machine"))

    def _finish(self, shared: _SharedTransfer, result: tuple[CachedModel, int] | BaseException) -> None:
        """Pass the result on to all callers."""
        if isinstance(result, BaseException):
            if not shared.ended.done():
                shared.ended.set_exception(result)
            return
        model, lock = result
        if not shared.ended.done():
            shared.ended.set_result(model)
            for _ in range(shared.pins):
                self.acquire(model.path)
        os.close(lock)


def _work(transfer: ModelTransfer, loop: asyncio.AbstractEventLoop, over: "asyncio.Future[Any]") -> None:
    """The thread of a transfer."""
    result: tuple[CachedModel, int] | BaseException
    try:
        result = transfer.run()
    except BaseException as error:  # passed on
        result = error

    def land() -> None:
        over.set_result(result)

    if not _call(loop, land) and isinstance(result, tuple):
        os.close(result[1])


def _unlock(over: "asyncio.Future[Any]") -> None:
    """Nobody waits for this result any more."""
    if not over.cancelled() and isinstance(over.result(), tuple):
        os.close(over.result()[1])


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """Call a function in the event loop; False if it has been closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True


def usual_cache() -> WeightsCache:
    """The cache of models at URLs, as the environment says, or by default. InputError for a number of bytes there that
    is none."""
    given = os.environ.get(BYTES_VARIABLE) or str(MODELS_BYTES)
    if not (given.isascii() and given.isdecimal() and int(given)):
        raise InputError(f"{given!r} is no number of bytes", where=BYTES_VARIABLE, help="write digits only")
    tokens = os.environ.get(TOKENS_VARIABLE)
    web = WebStore(token_file=Path(tokens) if tokens else None)
    return WeightsCache(usual_folder(), int(given), stores={"http": web, "https": web})
