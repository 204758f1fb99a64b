"""The folder of a cache of models: what is there, who uses it, and how room is made.

It has all the state, so that it survives the process and several processes can share it:

    locks/all                  locked while room is made or a model is added
    locks/KEY                  locked by the process that fetches the models of one location
    NAME-KEY.part/             a transfer: the bytes received so far, and `state.json`; a later transfer resumes it
    NAME-KEY-VERSION/files/    a complete model, made by renaming; `entry.json` lists its files
    NAME-KEY-VERSION/used      its time is that of the last use; each user of the model holds a shared lock on it
    apart-RANDOM/              a folder like this one with models for one owner, who holds a lock on `owner`

Locks are `flock`, which the kernel releases when a process dies. Folders on tmpfs, such as /dev/shm, are memory.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.errors import MachineError
from sloop.serve.weights.sources import (
    ModelSource,
)

ENTRY_NAME: Final = re.compile(r".*-(?P<key>[0-9a-f]{16})-[0-9a-f]{16}")
PART_NAME: Final = re.compile(r".*-(?P<key>[0-9a-f]{16})\.part")
MODELS_VARIABLE: Final = "SLOOP_MODELS_CACHE"
FILES, USED, ENTRY, STATE, GONE = "files", "used", "entry.json", "state.json", ".gone"
APART, OWNER = "apart-", "owner"
APART_NAME: Final = re.compile(f"{APART}.*")

Clock = Callable[[], int]
_log: Final = logging.getLogger("sloop.weights")


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
            help_text = f"name a folder that you may write, with the environment variable {MODELS_VARIABLE}"
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
        missing = size_bytes - sum(file.stat().st_size for file in files_in(part / FILES))
        disk = os.statvfs(self.folder)
        if missing > disk.f_bavail * disk.f_frsize:
            raise disk_full(self.folder, f"{what} needs {missing:,} bytes more")

    def commit(self, part: Path, record: EntryRecord, key: str, name: str) -> tuple[CachedModel, int]:
        """Make the files of a transfer a model; returns it with a lock that protects it, as `pin` does."""
        for folder in {part / FILES, *(file.parent for file in files_in(part / FILES))}:
            sync(folder)
        _write(part / ENTRY, msgspec.json.encode(record))
        (part / USED).touch()
        self.note_use(part)
        sync(part)
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
        sync(self.folder)
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
        used = self.used_bytes() - (size_of_part(part) if part.exists() else 0)
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
                rows.append(_Evictable(_used_ns(folder), folder, size_of_entry(folder), lock))
        for folder in _folders(self.folder, PART_NAME):
            match = PART_NAME.fullmatch(folder.name)
            lock = self.lock_of(match["key"]) if match and folder != part else None
            if lock is not None:
                rows.append(_Evictable(0, folder, size_of_part(folder), lock))
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
    return sum(map(size_of_entry, _folders(folder, ENTRY_NAME))) + sum(map(size_of_part, _folders(folder, PART_NAME)))


def _used_ns(folder: Path) -> int:
    try:
        return (folder / USED).stat().st_mtime_ns
    except OSError:
        return 0


def files_in(folder: Path) -> list[Path]:
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]


def size_of_entry(folder: Path) -> int:
    total = 0
    for file in files_in(folder / FILES):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def size_of_part(folder: Path) -> int:
    try:
        reserved = msgspec.json.decode((folder / STATE).read_bytes(), type=TransferState).reserved_bytes
    except (OSError, msgspec.DecodeError):
        reserved = 0
    return max(reserved, size_of_entry(folder))


def _write(path: Path, content: bytes, *, is_lasting: bool = True) -> None:
    """Replace a file as a whole."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        if is_lasting:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)


def sync(folder: Path) -> None:
    """Write the names in a folder to the disk (fsync)."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_full(folder: Path, why: str) -> MachineError:
    advice = "free space, or keep the cache of models in another folder"
    return MachineError(f"no space left on the disk of {str(folder)!r}: {why}", help=advice)
