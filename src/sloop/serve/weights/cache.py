"""Model files in a cache on this machine: fetched once, verified, within a budget of bytes.

Files of weights beside an ONNX model belong to it and are fetched with it.

**Keys.** A cached model is a folder that is named after its location and the versions of its files. The version is the
SHA-256 that the user or a manifest (`model.onnx.sha256`, as `sha256sum` writes it) gives, otherwise what the store
reports: ETag, Last-Modified with the length, or the time of the last change. So one small request tells whether a file
is still current; with `#sha256=`, a model without further files needs no request. A digest of the content would be
known only after the transfer. If the store reports no version, the file is fetched again each time. If the store cannot
be reached, the copy that was used last is taken, with a warning.

**The folder** has all the state, so that it survives the process and several processes can share it:

    locks/all                  locked while room is made or a model is added
    locks/KEY                  locked by the process that fetches the models of one location
    NAME-KEY.part/             a transfer: the bytes received so far, and `state.json`; a later transfer resumes it
    NAME-KEY-VERSION/files/    a complete model, made by renaming; `entry.json` lists its files
    NAME-KEY-VERSION/used      its time is that of the last use; each user of the model holds a shared lock on it
    apart-RANDOM/              a folder like this one with models for one owner, who holds a lock on `owner`

Locks are `flock`, which the kernel releases when a process dies. Folders on tmpfs, such as /dev/shm, are memory.

Transfers run in threads. An interrupted transfer continues at the same byte if the store has the same version and
supports Range. It fails after `Patience.tries` tries without progress. Must not depend on the driver or on workers.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
from msgspec import Struct

from sloop.errors import InputError, MachineError, SloopError
from sloop.onnx_file import external_files
from sloop.serve.weights.sources import (
    CHUNK_BYTES,
    NAME_BYTES_MAX,
    Download,
    FolderStore,
    InterruptedTransferError,
    ModelSource,
    Patience,
    Store,
    StoredFile,
    StoreError,
    Watch,
    checksum_in,
    is_strong,
)
from sloop.serve.weights.web import WebStore
from sloop.text import quoted

POLL_S: Final = 0.1
"""How often a transfer looks whether another process has ended that of the same model."""
MANIFEST: Final = ".sha256"
MANIFEST_BYTES_MAX: Final = 1 << 20
VERSIONS_ASKED: Final = 3
"""How many cached versions of a model are compared with that of the store, beginning with the one used last."""
GROWTH_BYTES: Final = 16 << 20
"""How much room at a time is made for a file of unknown length."""
PROGRESS_BYTES: Final = 64 << 10
"""A try has made progress if it received at least this many bytes more than earlier tries."""
REPORT_S: Final = 0.05
FILES_MAX: Final = 10_000
"""The most files of one model: large models are exported with a file for each tensor."""
ENTRY_NAME: Final = re.compile(r".*-(?P<key>[0-9a-f]{16})-[0-9a-f]{16}")
PART_NAME: Final = re.compile(r".*-(?P<key>[0-9a-f]{16})\.part")
MODELS_VARIABLE: Final = "SLOOP_MODELS_CACHE"
MODELS_BYTES: Final = 32 << 30
"""The budget of the cache unless another one is given."""
FILES, USED, ENTRY, STATE, GONE = "files", "used", "entry.json", "state.json", ".gone"
APART, OWNER = "apart-", "owner"
APART_NAME: Final = re.compile(f"{APART}.*")

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes received so far, and with that of all files known so far (None: unknown)."""
Clock = Callable[[], int]
T = TypeVar("T")
_log = logging.getLogger("sloop.weights")


# The folder


class FileRecord(Struct, frozen=True):
    """A file of a model: its path in the folder of the model, and its properties when it was fetched."""

    name: str
    version: str
    size_bytes: int
    sha256: str


class EntryRecord(Struct, frozen=True):
    """What `entry.json` says of a model, the model's own file first."""

    source: str
    files: tuple[FileRecord, ...]


class Partial(Struct):
    """A file of which at least the response's head was received."""

    version: str
    size_bytes: int | None


class TransferState(Struct):
    """What `state.json` says of a transfer."""

    reserved_bytes: int = 0
    boot: str = ""
    """The boot in which it began. After a power failure the bytes written last may be missing, so a transfer is not
    resumed after another boot."""
    files: dict[str, Partial] = {}  # msgspec copies it


class CachedModel(Struct, frozen=True):
    """A complete model in the cache."""

    folder: Path
    record: EntryRecord

    @property
    def path(self) -> Path:
        """Of the model's own file."""
        return self.folder / FILES / self.record.files[0].name

    @property
    def key(self) -> str:
        """Of its location (`ModelSource.key`)."""
        match = ENTRY_NAME.fullmatch(self.folder.name)
        return match["key"] if match else ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.record.files)


class _Evictable(Struct, frozen=True):
    """A folder that can be deleted to make room, and the lock that permits it."""

    used_ns: int
    """Of what a transfer has left: 0, so that it goes first."""
    folder: Path
    size_bytes: int
    lock: int


class ModelFolder:
    """The folder of a cache: lists its models, adds models, and deletes models when there is no room.

    Every call reads the folder, so that processes can share it. Calls block while files are deleted, by this process or
    by another one. One `within` another folder shares its budget.
    """

    def __init__(
        self, folder: Path, budget_bytes: int, clock: Clock = time.time_ns, within: "ModelFolder | None" = None
    ) -> None:
        self.folder, self.budget_bytes, self._clock = folder.absolute(), budget_bytes, clock
        self._boot = _boot()
        self._whole = within or self
        """What the budget is for."""

    def prepare(self) -> None:
        """Make the folder, and finish deletions that were interrupted. MachineError if it cannot be made."""
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True, mode=0o700)
            for gone in self.folder.glob(f"*{GONE}"):  # needs no lock: whoever deletes it, too, wants nothing else
                shutil.rmtree(gone, ignore_errors=True)
            for apart in self.folder.glob(f"{APART}*"):
                lock = locked_file(apart / OWNER, exclusive=True, make=False)
                if lock is not None:  # its owner has died
                    shutil.rmtree(apart, ignore_errors=True)
                    os.close(lock)
        except OSError as error:
            what = f"the cache of models cannot be kept in {str(self.folder)!r}: {error.strerror or error}"
            help_text = (
                f"name a folder that you may write, with --models-cache or the environment variable {MODELS_VARIABLE}"
            )
            raise MachineError(what, help=help_text) from error

    # What is there

    def models(self, key: str = "") -> list[CachedModel]:
        """The complete models, those used last first; with `key`, those of one location. Damaged ones are left out."""
        rows = [row for each in _folders(self.folder, ENTRY_NAME, key) if (row := _read_model(each)) is not None]
        return sorted(rows, key=lambda row: (_used_ns(row.folder), row.folder.name), reverse=True)

    def copy_of(self, source: ModelSource) -> CachedModel | None:
        """The copy that was used last of a model, without asking the store whether it still has this version."""
        models = [row for row in self.models(source.key) if source.sha256 in ("", row.record.files[0].sha256)]
        return models[0] if models else None

    def used_bytes(self) -> int:
        """What models and transfers have, or have reserved, those that are `apart` included."""
        return sum(map(_used_bytes, (self.folder, *_folders(self.folder, APART_NAME))))

    # Use

    def pin(self, model: Path) -> int | None:
        """Protect the model of this folder until the returned descriptor is closed; None if the model was deleted."""
        lock = locked_file(model / USED, exclusive=False, make=False)
        if lock is not None:
            self.note_use(model)
        return lock

    def note_use(self, model: Path) -> None:
        """The model was used now."""
        now_ns = self._clock()
        with contextlib.suppress(OSError):
            os.utime(model / USED, ns=(now_ns, now_ns))

    # Transfers

    def lock_of(self, key: str) -> int | None:
        """A lock for fetching models of this location, held until it is closed; None if another transfer has it."""
        return locked_file(self.folder / "locks" / key, exclusive=True)

    def part(self, name: str, key: str) -> Path:
        """The folder of the transfer for a location whose lock the caller has, with the files of an interrupted one."""
        path = self.folder / f"{name}-{key}.part"
        (path / FILES).mkdir(parents=True, exist_ok=True)
        return path

    def state(self, part: Path) -> TransferState:
        """The state of a transfer, which may be new. Files without a readable state are removed."""
        try:
            state = msgspec.json.decode((part / STATE).read_bytes(), type=TransferState)
        except (OSError, msgspec.DecodeError):
            state = TransferState()
        if state.boot != self._boot:
            shutil.rmtree(part / FILES, ignore_errors=True)
            (part / FILES).mkdir()
            state = TransferState(boot=self._boot)
        return state

    def save(self, part: Path, state: TransferState) -> None:
        """Keep the state of a transfer."""
        _write(part / STATE, msgspec.json.encode(state), is_lasting=False)

    def parts(self, key: str) -> list[Path]:
        """The folders of the transfers of one location, going on or interrupted."""
        return _folders(self.folder, PART_NAME, key)

    def peek(self, part: Path) -> TransferState:
        """Of a transfer of somebody else."""
        try:
            state = msgspec.json.decode((part / STATE).read_bytes(), type=TransferState)
        except (OSError, msgspec.DecodeError):
            return TransferState()
        return state if state.boot == self._boot else TransferState()

    def reserve(self, part: Path, state: TransferState, size_bytes: int, what: str) -> None:
        """Make room for a transfer of `size_bytes` in all, by deleting the least recently used models.

        MachineError, without deleting anything, if there cannot be enough room, or if the disk is full.
        """
        with self._whole._locked():
            self._whole._make_room(part, size_bytes, what)
            state.reserved_bytes = size_bytes
            self.save(part, state)
        missing = size_bytes - sum(file.stat().st_size for file in _files_in(part / FILES))
        disk = os.statvfs(self.folder)
        if missing > disk.f_bavail * disk.f_frsize:
            raise _disk_full(self.folder, f"{what} needs {missing:,} bytes more")

    def commit(self, part: Path, record: EntryRecord, key: str, name: str) -> tuple[CachedModel, int]:
        """Make the files of a transfer a model; returns it with a lock that protects it, as `pin` does."""
        for folder in {part / FILES, *(file.parent for file in _files_in(part / FILES))}:
            _sync(folder)
        _write(part / ENTRY, msgspec.json.encode(record))
        (part / USED).touch()
        self.note_use(part)
        _sync(part)
        version = hashlib.sha256(repr([(f.name, f.version, f.sha256) for f in record.files]).encode()).hexdigest()[:16]
        folder = self.folder / f"{name}-{key}-{version}"
        with self._locked():
            if folder.exists():  # the same version, fetched again because the store does not tell versions
                lock = self.pin(folder)
                if lock is not None and _read_model(folder) is not None:
                    shutil.rmtree(part, ignore_errors=True)
                    return CachedModel(folder, record), lock
                if lock is not None:
                    os.close(lock)
                self._remove(folder)
            lock = locked_file(part / USED, exclusive=False, make=False)
            assert lock is not None, part
            part.rename(folder)
        (folder / STATE).unlink(missing_ok=True)  # not sooner: until now, peers are told by it that the files are here
        _sync(self.folder)
        return CachedModel(folder, record), lock

    def discard(self, part: Path) -> None:
        """Delete the files of a transfer."""
        shutil.rmtree(part, ignore_errors=True)

    def discard_all(self, key: str) -> None:
        """Delete the files of interrupted transfers of one location, unless a transfer of it is running."""
        lock = self.lock_of(key)
        if lock is not None:
            for part in self.parts(key):
                self.discard(part)
            os.close(lock)

    def evict(self, model: Path) -> bool:
        """Delete the model of this folder; False if somebody uses it."""
        lock = locked_file(model / USED, exclusive=True, make=False)
        if lock is None:
            return not model.exists()
        try:
            with self._locked():
                self._remove(model)
        finally:
            os.close(lock)
        return True

    # Room

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.folder / "locks" / "all", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _make_room(self, part: Path, size_bytes: int, what: str) -> None:
        budget = f"the cache of models in {str(self.folder)!r} may have {self.budget_bytes:,}"
        if size_bytes > self.budget_bytes:
            raise MachineError(f"{what} has at least {size_bytes:,} bytes; {budget}", help="give the cache more bytes")
        used = self.used_bytes() - (_size_of_part(part) if part.exists() else 0)
        if used + size_bytes <= self.budget_bytes:
            return
        rows = self._evictable(part)
        try:
            fixed = used - sum(row.size_bytes for row in rows)
            if fixed + size_bytes > self.budget_bytes:
                reason = f"{what} has at least {size_bytes:,} bytes; {budget}, of which {fixed:,} are in use"
                raise MachineError(reason, help="give the cache more bytes, or stop something that uses its models")
            for row in sorted(rows, key=lambda row: (row.used_ns, row.folder.name)):
                if used + size_bytes <= self.budget_bytes:
                    break
                self._remove(row.folder)
                used -= row.size_bytes
                _log.info("removed %s from the cache of models: %s bytes", row.folder.name, f"{row.size_bytes:,}")
        finally:
            for row in rows:
                os.close(row.lock)

    def _evictable(self, part: Path) -> list[_Evictable]:
        """The folders that may be deleted: models that nobody uses, and transfers that have ended."""
        rows = []
        for folder in _folders(self.folder, ENTRY_NAME):
            lock = locked_file(folder / USED, exclusive=True)
            if lock is not None:
                rows.append(_Evictable(_used_ns(folder), folder, _size_of_entry(folder), lock))
        for folder in _folders(self.folder, PART_NAME):
            match = PART_NAME.fullmatch(folder.name)
            lock = self.lock_of(match["key"]) if match and folder != part else None
            if lock is not None:
                rows.append(_Evictable(0, folder, _size_of_part(folder), lock))
        return rows

    def _remove(self, folder: Path) -> None:
        """Delete a folder. If the deletion is interrupted, the rest does not count as a model."""
        gone = folder.with_name(f"{folder.name}-{self._clock()}{GONE}")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _boot() -> str:
    """An identifier of this boot of the operating system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{time.time() - time.monotonic():.0f}"


def locked_file(path: Path, *, exclusive: bool, make: bool = True) -> int | None:
    """A descriptor with a lock on the file; None if somebody else has a lock, or if the file was deleted meanwhile."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def usual_folder() -> Path:
    """The folder of the cache unless another one is named: that of the environment, or one in the user's cache."""
    if given := os.environ.get(MODELS_VARIABLE):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sloop" / "models"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"sloop-{os.getuid()}" / "models"


def source_of(path: Path) -> str:
    """Where a model in the cache was fetched, with its checksum, so that others get the same; empty for another
    file."""
    model = _read_model(path.parent.parent) if path.parent.name == FILES else None
    if model is None or model.path != path:
        return ""
    return f"{model.record.source}#sha256={model.record.files[0].sha256}"


class ModelPins:
    """Keeps models in caches and private copies from being deleted while somebody uses them. Files elsewhere need no
    protection."""

    def __init__(self) -> None:
        self._locks: dict[str, list[int]] = {}

    def add(self, user: str, files: Iterable[Path]) -> None:
        """Protect the models to which these files belong, until `drop`."""
        folders = {file.parent.parent for file in files if file.parent.name == FILES}
        for folder in sorted(folders):
            lock = locked_file(folder / USED, exclusive=False, make=False)
            if lock is not None:
                self._locks.setdefault(user, []).append(lock)

    def drop(self, user: str) -> None:
        """The user with this key does not use its models any more."""
        for lock in self._locks.pop(user, ()):
            os.close(lock)

    def close(self) -> None:
        """Nobody uses any model any more."""
        for user in list(self._locks):
            self.drop(user)


def _read_model(folder: Path) -> CachedModel | None:
    """The model in a folder; None if it is not as it was when it was fetched."""
    try:
        record = msgspec.json.decode((folder / ENTRY).read_bytes(), type=EntryRecord)
        is_whole = record.files and all(
            (folder / FILES / file.name).stat().st_size == file.size_bytes for file in record.files
        )
    except (OSError, msgspec.DecodeError):
        return None
    return CachedModel(folder, record) if is_whole else None


def _folders(folder: Path, pattern: re.Pattern[str], key: str = "") -> list[Path]:
    """The folders in a cache with such names; with `key`, those of one location."""
    try:
        names = os.listdir(folder)
    except OSError:  # there is no such folder yet
        return []
    matches = [match for name in sorted(names) if (match := pattern.fullmatch(name))]
    return [folder / match[0] for match in matches if not key or match["key"] == key]


def _used_bytes(folder: Path) -> int:
    return sum(map(_size_of_entry, _folders(folder, ENTRY_NAME))) + sum(map(_size_of_part, _folders(folder, PART_NAME)))


def _used_ns(folder: Path) -> int:
    try:
        return (folder / USED).stat().st_mtime_ns
    except OSError:
        return 0


def _files_in(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def _size_of_entry(folder: Path) -> int:
    total = 0
    for file in _files_in(folder / FILES):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _size_of_part(folder: Path) -> int:
    try:
        reserved = msgspec.json.decode((folder / STATE).read_bytes(), type=TransferState).reserved_bytes
    except (OSError, msgspec.DecodeError):
        reserved = 0
    return max(reserved, _size_of_entry(folder))


def _write(path: Path, content: bytes, *, is_lasting: bool = True) -> None:
    """Replace a file as a whole."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        if is_lasting:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk (fsync)."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _disk_full(folder: Path, why: str) -> MachineError:
    advice = "free space, or keep the cache of models in another folder"
    return MachineError(f"no space left on the disk of {str(folder)!r}: {why}", help=advice)


# Transfers


class _Transfer:
    """Brings the model of a source into the folder; runs in a thread."""

    def __init__(self, source: ModelSource, folder: ModelFolder, store: Store, watch: Watch, report: Progress) -> None:
        self._source, self._folder, self._store, self._watch, self._report = source, folder, store, watch, report
        self._key = source.key
        self._name = re.sub(r"[^A-Za-z0-9._]+", "-", source.name.removesuffix(".onnx"))[:40]
        self._checksums: dict[str, str] = {source.name: source.sha256} if source.sha256 else {}
        self._has_manifest: bool | None = None
        self._part = Path()
        self._state = TransferState()
        self._before_bytes = 0  # of the files that have come already
        self._reported_s = 0.0

    def run(self) -> tuple[CachedModel, int]:
        """The model with a lock that protects it. SloopError or StoppedTransferError if it cannot be had."""
        try:
            lock = self._lock()
            try:
                return self._cached() or self._fetch()
            finally:
                os.close(lock)
        except OSError as error:
            what = f"the cache of models cannot be kept in {str(self._folder.folder)!r}: {error.strerror or error}"
            raise MachineError(what, help="check the disk, or give another folder") from error

    def _lock(self) -> int:
        """Wait until nobody else fetches from this location; MachineError if the other transfer makes no progress."""
        begin_s, size = time.monotonic(), -1
        stall_s = self._watch.patience.hang_s + 4 * self._watch.patience.stall_s
        while True:
            lock = self._folder.lock_of(self._key)
            if lock is not None:
                return lock
            found = _size_of_entry(self._folder.folder / f"{self._name}-{self._key}.part")
            if found != size:
                begin_s, size = time.monotonic(), found
            elif time.monotonic() - begin_s > stall_s:
                what = f"{self._source}: another process has been fetching it for {stall_s:g} s without progress"
                raise MachineError(what, help="look for a stopped process that uses the same cache of models")
            self._watch.sleep(POLL_S)

    def _cached(self) -> tuple[CachedModel, int] | None:
        """The model in the cache, if the store has the same version or cannot be reached."""
        digest = self._source.sha256
        models = [row for row in self._folder.models(self._key) if not digest or row.record.files[0].sha256 == digest]
        for model in models[:VERSIONS_ASKED]:
            lock = self._folder.pin(model.folder)
            if lock is None:
                continue
            try:
                if self._is_current(model):
                    return model, lock
            except (InterruptedTransferError, MachineError) as error:
                _log.warning("%s; its copy in the cache is used", error.args[0])
                return model, lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        return None

    def _is_current(self, model: CachedModel) -> bool:
        """Whether the store still has these files."""
        files = model.record.files
        if len(files) > 1 or not self._checksums:
            self._read_manifest()
        return all(map(self._is_same, files))

    def _is_same(self, file: FileRecord) -> bool:
        """Whether the store still has this file."""
        if file.name in self._checksums:
            return file.sha256 == self._checksums[file.name]
        known = file.version
        return bool(known) and self._store.version(self._source.file(file.name), self._watch, known) == known

    def _read_manifest(self) -> None:
        """Read the checksums from the manifest beside the model, if the store has one."""
        if self._has_manifest is not None:
            return
        file = self._source.file(self._source.name + MANIFEST)
        raw = b""
        try:
            with contextlib.closing(self._store.open(file, self._watch)) as download:
                for chunk in download.chunks:
                    raw += chunk
                    if len(raw) > MANIFEST_BYTES_MAX:
                        break
                is_whole = download.has_end and len(raw) == (download.total_bytes or len(raw))
        except StoreError as error:
            if error.status not in (403, 404, 410):  # object stores answer 403 for what is not there
                raise
            self._has_manifest = False
            return
        if not is_whole and len(raw) <= MANIFEST_BYTES_MAX:
            raise InterruptedTransferError(f"{file}: the connection ended too early")
        self._checksums = {**_manifest(raw, self._source.name, str(file)), **self._checksums}
        self._has_manifest = True

    def _fetch(self) -> tuple[CachedModel, int]:
        """Fetch all files. If the transfer breaks off or is stopped, the received bytes stay for the next try."""
        self._part = self._folder.folder / f"{self._name}-{self._key}.part"
        try:
            self._folder.part(self._name, self._key)
            self._state = self._folder.state(self._part)
            for _ in range(self._watch.patience.tries):
                record = self._files()
                if record is not None:
                    return self._folder.commit(self._part, record, self._key, self._name)
            what = f"{self._source}: its files change while they are fetched"
            raise MachineError(what, help="fetch it when they no longer change, or give each version a URL of its own")
        except InterruptedTransferError as interrupted:
            raise interrupted.error from interrupted
        except OSError as error:
            self._folder.discard(self._part)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _disk_full(self._folder.folder, f"{self._source} was being fetched") from error
            what = f"{self._source} cannot be kept in {str(self._folder.folder)!r}: {error.strerror or error}"
            raise MachineError(what, help="check the disk, or keep the cache in another folder") from error
        except SloopError:
            self._folder.discard(self._part)
            raise

    def _files(self) -> EntryRecord | None:
        """Fetch the model's own file and those with its weights; None if they have changed meanwhile."""
        self._before_bytes = 0
        if not self._checksums:
            self._tried(self._read_manifest)
        files = [self._bring(self._source.name)]
        names = self._weights_of(files[0])
        if names:
            self._tried(self._read_manifest)
        files += [self._bring(name) for name in names]
        if names and not all(self._tried(partial(self._is_same, file)) for file in files if file.version):
            return None
        wanted = {self._part / FILES / file.name for file in files}
        for path in _files_in(self._part / FILES):
            if path not in wanted:
                path.unlink()
        return EntryRecord(str(self._source), tuple(files))

    def _weights_of(self, own: FileRecord) -> list[str]:
        """The other files of a model, relative to its folder. InputError if one would lie elsewhere."""
        if not own.name.endswith(".onnx"):
            return []
        try:
            names = external_files(self._part / FILES / own.name)
        except InputError:
            what = "it is not an ONNX model"
            help_text = "check the URL; a store may send a page, such as one to log in, instead of the file"
            raise InputError(what, where=str(self._source), help=help_text) from None
        for name in names:
            path = PurePosixPath(name)
            is_inside = not path.is_absolute() and ".." not in path.parts and path.parts and "\\" not in name
            longest = max((len(part.encode()) for part in path.parts), default=0)
            if not is_inside or not name.isprintable() or longest > NAME_BYTES_MAX:
                what = f"its weights lie in {quoted(name)}, which is not in the folder of the model"
                raise InputError(what, where=str(self._source), help="export it again, with its weights beside it")
        if len(names) > FILES_MAX:
            what = f"its weights lie in {len(names):,} files; {FILES_MAX:,} are possible"
            raise InputError(what, where=str(self._source), help="export it again, with all weights in one file")
        return sorted({str(PurePosixPath(name)) for name in names} - {own.name})

    def _bring(self, name: str) -> FileRecord:
        """Fetch one file, except for the bytes that were received before."""
        path = self._part / FILES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        known = self._state.files.get(name)
        record = None
        if known is not None and _size(path) == known.size_bytes:
            record = self._whole(name, path, known)
        if record is None:
            record = self._tried(lambda: self._receive(name, path), lambda: _size(path))
        self._before_bytes += record.size_bytes
        return record

    def _whole(self, name: str, path: Path, known: Partial) -> FileRecord | None:
        """A file that was received completely before; None if the store has another version now."""
        with path.open("rb") as file:
            digest = self._digest(file, _size(path)).hexdigest()
        record = FileRecord(name, known.version, _size(path), digest)
        if (is_strong(known.version) or name in self._checksums) and self._tried(partial(self._is_same, record)):
            return record
        path.unlink()
        return None

    def _receive(self, name: str, path: Path) -> FileRecord:
        """Receive the rest of a file, or all of it if it has changed."""
        file, wanted = self._source.file(name), self._checksums.get(name, "")
        known, size = self._state.files.get(name), _size(path)
        start, version = 0, ""
        if known is not None and is_strong(known.version) and size != known.size_bytes:
            start, version = size, known.version
        with contextlib.closing(self._store.open(file, self._watch, start=start, version=version)) as download:
            if download.start and known is not None and known.size_bytes not in (None, download.total_bytes):
                path.unlink()
                raise InterruptedTransferError(f"{file}: its length changes", "ask who runs the store")
            if not download.has_end and not wanted:
                what = "the store does not announce its length, so a broken connection would look like its end"
                raise StoreError(what, where=str(file), help="add #sha256=… to the URL", status=502)
            if not download.start:  # before the state names the version of the file
                path.unlink(missing_ok=True)
            self._state.files[name] = Partial(download.version, download.total_bytes)
            try:
                self._reserve(download.total_bytes or 0)
            except MachineError as error:
                if not download.is_copy:
                    raise
                # It may not be true: the store has the last word.
                what = f"{error.what}, by the length that a peer says"
                raise InterruptedTransferError(what, "fetch it from the store") from error
            with path.open("r+b" if download.start else "wb") as out:
                digest = self._digest(out, download.start)
                size = self._copy(file, download, out, digest)
                out.flush()
                os.fsync(out.fileno())
            self._state.files[name] = Partial(download.version, size)
            self._folder.save(self._part, self._state)
        found, wanted = digest.hexdigest(), wanted or checksum_in(download.version)
        if found != (wanted or found):
            path.unlink()
            if download.start or download.is_copy:  # parts of two versions, or a damaged copy
                raise InterruptedTransferError(f"{file}: its parts do not fit together", "fetch it again")
            what = f"its SHA-256 is {found}, expected is {wanted}; it was removed"
            advice = "correct the checksum, or the file in the store"
            raise StoreError(what, where=str(file), help=advice, status=200)
        return FileRecord(name, download.version, size, found)

    def _copy(self, file: StoredFile, download: Download, out: BinaryIO, digest: "hashlib._Hash") -> int:
        """Append the received bytes to `out`; returns the size of the file."""
        size, total = download.start, download.total_bytes
        for chunk in download.chunks:
            size += len(chunk)
            if total is None:
                self._grow(size)
            elif size > total:
                what = f"the store sends more than the {total:,} bytes that it announces"
                if download.is_copy:
                    raise InterruptedTransferError(f"{file}: {what}")
                raise StoreError(what, where=str(file), help="ask who runs the store", status=502)
            out.write(chunk)
            digest.update(chunk)
            self._tell(size)
        self._reported_s = 0.0
        if total is not None and size < total:
            what = f"{file}: the connection ended after {size:,} of {total:,} bytes"
            raise InterruptedTransferError(what)
        self._tell(size)
        return size

    def _tell(self, size_bytes: int) -> None:
        """Report progress, but not so often that it would keep the event loop busy."""
        now_s = time.monotonic()
        if now_s - self._reported_s < REPORT_S:
            return
        self._reported_s = now_s
        sizes = [partial.size_bytes for partial in self._state.files.values()]
        known = [size for size in sizes if size is not None]
        self._report(self._before_bytes + size_bytes, sum(known) if len(known) == len(sizes) else None)

    def _digest(self, file: BinaryIO, size_bytes: int) -> "hashlib._Hash":
        """The digest of the first bytes of a file, which is then at their end."""
        digest, left = hashlib.sha256(), size_bytes
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
            self._watch.check()
        return digest

    def _reserve(self, size_bytes: int) -> None:
        """Make room for the received bytes and this much of the present file."""
        self._folder.reserve(self._part, self._state, self._before_bytes + size_bytes, str(self._source))

    def _grow(self, size_bytes: int) -> None:
        """Make room for a file of unknown length."""
        if self._before_bytes + size_bytes > self._state.reserved_bytes:
            try:
                self._reserve(size_bytes + GROWTH_BYTES)
            except MachineError:
                self._reserve(size_bytes)

    def _tried(self, action: Callable[[], T], reached: Callable[[], int] = lambda: 0) -> T:
        """The result of `action`, which is tried again when it breaks off; `reached` gives the bytes received so
        far."""
        patience, failures, furthest = self._watch.patience, 0, 0
        while True:
            try:
                return action()
            except InterruptedTransferError as interrupted:
                failures = failures + 1 if reached() < furthest + PROGRESS_BYTES else 1
                furthest = max(furthest, reached())
                if failures >= patience.tries:
                    raise
                _log.info("%s; another try", interrupted)
                self._watch.sleep(patience.pause_s * 2 ** (failures - 1))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _manifest(raw: bytes, name: str, where: str) -> dict[str, str]:
    """The checksums by name in a file that `sha256sum` has written, or in one with a single checksum. InputError if it
    is none, or does not have that of the model."""
    found: dict[str, str] = {}
    advice = f"write it with `sha256sum FILE… > {name}{MANIFEST}`, or remove it"
    lines = [line for line in raw.decode(errors="replace").splitlines() if line.strip()]
    for line in lines:
        match = re.fullmatch(r"([0-9a-fA-F]{64})(?:\s+\*?(.+?))?\s*", line)
        if match is None or len(raw) > MANIFEST_BYTES_MAX:
            raise InputError(f"not a list of SHA-256 checksums: {quoted(line)}", where=where, help=advice)
        found[str(PurePosixPath(match[2])) if match[2] else name] = match[1].lower()
    if name not in found:
        if len(lines) != 1 or PurePosixPath(next(iter(found))).name != name:
            raise InputError(f"it has no checksum of {quoted(name)}", where=where, help=advice)
        found = {name: next(iter(found.values()))}
    return found


# The cache


class _Flight:
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
        self._flights: dict[ModelSource, _Flight] = {}
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
            raise _disk_full(self.models.folder, error.strerror or str(error)) from error
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
        flight = self._flights.get(source) or self._begin(source, nearer)
        flight.callers += 1
        flight.pins += pin
        if progress is not None:
            flight.listeners.append(progress)
        try:
            model = await asyncio.shield(flight.ended)
        except asyncio.CancelledError:
            if pin and flight.ended.done() and not flight.ended.cancelled() and flight.ended.exception() is None:
                self.release(flight.ended.result().path)
            flight.pins -= pin
            if flight.callers == 1:
                self._abandon(flight)
            raise
        finally:
            flight.callers -= 1
            if progress is not None:
                flight.listeners.remove(progress)
        return model.path

    def is_fetching(self, key: str) -> bool:
        """Whether a model of this location is being fetched."""
        return any(source.key == key for source in self._flights)

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

    @contextlib.contextmanager
    def pinned(self, path: Path) -> Iterator[None]:
        """Keep the model of a fetched file while the block runs. InputError if it was deleted."""
        self.acquire(path)
        try:
            yield
        finally:
            self.release(path)

    async def close(self) -> None:
        """Stop all transfers, whose callers are cancelled, and release all models."""
        for flight in list(self._flights.values()):
            self._abandon(flight)
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

    def _begin(self, source: ModelSource, nearer: Callable[[Store], Store]) -> _Flight:
        flight = _Flight(source, Watch(self._patience), asyncio.get_running_loop())
        self._flights[source] = flight
        running = asyncio.create_task(self._fly(flight, nearer(self._store(source.scheme))))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return flight

    def _store(self, scheme: str) -> Store:
        if scheme not in self._stores:
            from sloop.serve.weights.objects import CloudStore, SignedStore  # noqa: PLC0415  # an extra

            self._stores[scheme] = SignedStore() if scheme == "s3" else CloudStore()
        return self._stores[scheme]

    def _abandon(self, flight: _Flight) -> None:
        flight.watch.stop()
        flight.ended.cancel()
        self._forget(flight)

    def _forget(self, flight: _Flight) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    async def _fly(self, flight: _Flight, store: Store) -> None:
        """Run the transfer in a thread. The thread may never end, because a shared folder whose server cannot be
        reached blocks it. So it is a daemon thread, and is abandoned when it is silent for too long."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[tuple[CachedModel, int] | BaseException] = loop.create_future()

        def report(done_bytes: int, total_bytes: int | None) -> None:
            _call(loop, lambda: [listen(done_bytes, total_bytes) for listen in list(flight.listeners)])

        transfer = _Transfer(flight.key, self.models, store, flight.watch, report)
        async with self._slots:
            while deletions := [each for each, key in self._deletions.items() if key == flight.key.key]:
                await asyncio.wait(deletions)
            if flight.ended.done():
                return
            name = f"sloop-fetch-{flight.key.name}"
            threading.Thread(target=_run, args=(transfer, loop, over), name=name, daemon=True).start()
            while not over.done():
                await asyncio.wait([over], timeout=min(1.0, self._patience.hang_s / 4))
                flight.watch.look()
                if flight.watch.silent_s > (1.0 if flight.ended.done() else self._patience.hang_s):
                    break
        self._forget(flight)
        if over.done():
            self._land(flight, over.result())
            return
        flight.watch.stop()
        over.add_done_callback(_let_go)
        what = f"{flight.key}: the operating system has not answered for {self._patience.hang_s:g} s"
        self._land(flight, MachineError(what, help="check the shared folder, or name resolution, on this machine"))

    def _land(self, flight: _Flight, result: tuple[CachedModel, int] | BaseException) -> None:
        """Pass the result on to all callers."""
        if isinstance(result, BaseException):
            if not flight.ended.done():
                flight.ended.set_exception(result)
            return
        model, lock = result
        if not flight.ended.done():
            flight.ended.set_result(model)
            for _ in range(flight.pins):
                self.acquire(model.path)
        os.close(lock)


def _run(transfer: _Transfer, loop: asyncio.AbstractEventLoop, over: "asyncio.Future[Any]") -> None:
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


def _let_go(over: "asyncio.Future[Any]") -> None:
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
