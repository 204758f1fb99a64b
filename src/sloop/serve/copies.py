"""Private copies of model files: a version serves the bytes that were examined, whatever happens to the user's files.

A user may overwrite, replace or delete a file while it is served, and workers open it many times: for each replica, and
for each thread count of a replica. So whoever examines a model first copies its files (`take`), also weights in other
files and modules beside a Python file, and all workers of this machine open the copy. On file systems with reflinks a
copy takes no space. It is never a hard link, because `cp` overwrites the inode that both names share.

**The folder** of copies, in a state folder or in the cache of models, has an entry for each content:

    NAME-DIGEST/files/         the files, named as in the model's own folder; changed copies and blocks are beside them
    NAME-DIGEST/used           each user of the entry holds a shared lock on it; the kernel releases those of the dead
    NAME-DIGEST/sources.json   where the files were, for Python files (`sloop.user_code`), and their digests
    NAME-DIGEST/alone          why its requests must not share forward passes, if that was found while it was served
    NAME-DIGEST-changed/       only the changed copies, of a model whose files could not be copied
    NAME-DIGEST.RANDOM.part/   an entry that is being made

If no copy can be made, for example for lack of room, workers open the user's file itself, and check first that it has
the bytes that were examined. They read it into memory, with the weights in other files, because files that are mapped
could still change.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, Self

import msgspec
from msgspec import Struct, structs

from sloop.app.application import Variant
from sloop.cuda import CudaDevice
from sloop.errors import InputError, MachineError, SloopError
from sloop.onnx_file import external_names
from sloop.profile.examine import Declared, ExaminedModel, examine
from sloop.profile.model import ModelBytes, OnnxSession, Session, is_python, open_model, open_session
from sloop.profile.profile import Joining, beside, digest, digest_of_all, files_of_weights, joining_in
from sloop.serve.protocols import ExaminedFile
from sloop.serve.weights.folder import FILES, USED, ModelPins, locked_file, source_of, sync, usual_folder
from sloop.text import listed
from sloop.user_code import SOURCES, modules_beside

IN_CACHE: Final = "copies"
"""The folder of private copies, in a cache of models."""
ALONE: Final = "alone"
ONNX: Final = ".onnx"
ENDING, GONE = ".part", ".gone"
TRIES: Final = 3
"""How often copying is tried if the model changes meanwhile."""
FICLONE: Final = 0x40049409
"""Linux's request to make a file share the blocks of another one."""
MARGIN_BYTES: Final = 64 << 20
"""A copy leaves this much room on its disk, or as much as its own size if that is less."""
CHUNK_BYTES: Final = 1 << 20
NAME_BYTES_MAX: Final = 100
"""The most bytes of a model's name in the name of its entry."""
DIGITS: Final = 16
"""Hexadecimal digits of the digest in the name of an entry. Files are compared by all digits."""
LEFT_S: Final = 3600
"""What is no entry and was not touched for this long is left from a process that has died, or an earlier sloop."""
BEGAN_S: Final = time.time()
"""Copies that were taken since then, by this process or another, are not deleted to make room."""
WATCH_S: Final = 3.0
"""How often the user's files are looked at."""
NICE: Final = 19
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

_log: Final = logging.getLogger("sloop.copies")


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """The files of a model as they are examined and opened."""

    path: Path
    """What is opened: the copy, or the user's own file where there is no room for one."""
    original: Path
    """What the user has named."""
    digest: str
    """The digest of all its files. For an ONNX model it is the one in its profile (`digest_of_model`)."""
    files: tuple[ExaminedFile, ...]
    """The user's files that it was made from; empty for files of sloop's own caches."""
    folder: Path
    """Where changed copies and blocks of it are written."""
    lock: int = -1
    """A descriptor that keeps the entry until it is closed; -1 if there is none."""
    why_not: str = ""
    """Why the user's own file is opened; empty if it is not."""

    @property
    def model_digest(self) -> str:
        """The digest that profiles have; for a Python model it is that of its own file alone."""
        return digest(self.path) if is_python(self.path) else self.digest

    @contextlib.contextmanager
    def examined(self) -> Iterator[None]:
        """The model is examined within the block: errors name the user's file instead of the copy. InputError if what
        is examined may have changed meanwhile."""
        try:
            yield
        except SloopError as error:
            if self.path == self.original:
                raise
            raise _renamed(error, self.path, self.original) from error
        if self.why_not:
            check_digest(self.path, self.digest)

    @property
    def difference(self) -> str:
        """What differed for requests that shared a forward pass of this model (`note_difference`); empty if nothing
        did."""
        if self.lock < 0:
            return ""
        try:
            return (self.folder.parent / ALONE).read_text(errors="replace")
        except OSError:
            return ""

    def compare(self, expected: str) -> None:
        """InputError if its content is not what was examined elsewhere."""
        _compare(self.original, self.digest, expected)

    def close(self) -> None:
        """The entry may be deleted unless others use it."""
        if self.lock >= 0:
            os.close(self.lock)


def has_changed(copy: ModelCopy) -> bool:
    """Whether the folder of this copy has one of the same file with another content that nobody uses: an earlier run of
    the server has served that."""
    if copy.lock < 0:
        return False
    store, name = copy.folder.parent.parent, copy.original.name
    for entry in store.glob("*/" + SOURCES):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            known = msgspec.json.decode(entry.read_bytes(), type=_Entry)
            if known.paths.get(name) != str(copy.original) or known.digest == copy.digest:
                continue
            lock = locked_file(entry.with_name(USED), exclusive=True, make=False)
            if lock is not None:
                os.close(lock)
                return True
    return False


def note_difference(opened: Path, why: str) -> None:
    """Keep for later servers why requests for a model must not share forward passes. `opened` is what workers open; if
    that is no copy, or the disk is full, the next server has to find it again."""
    entry = opened.parent.parent
    if (entry / USED).exists():
        with contextlib.suppress(OSError):
            (entry / ALONE).write_text(why)


def _renamed(error: SloopError, copy: Path, original: Path) -> SloopError:
    """The error with the names of the user's files: the model, and those beside it."""
    folders = f"{copy.parent}{os.sep}", f"{original.absolute().parent}{os.sep}"
    what, help_text = (text.replace(str(copy), str(original)).replace(*folders) for text in (error.what, error.help))
    if not isinstance(error, InputError):
        return MachineError(what, help=help_text)
    where = error.where.replace(str(copy), str(original))
    return InputError(what.removeprefix(f"{where}: "), where=where, help=help_text)


@contextlib.contextmanager
def private_copy(model: Path, folder: Path | None = None) -> Iterator[ModelCopy]:
    """A copy of a model that exists while the block runs, to be examined or measured. With `folder` it stays there, for
    others to use. Errors as for `take`, and from within the block as for `ModelCopy.examined`."""
    place = folder or usual_folder() / IN_CACHE
    copy = take(model, place)
    try:
        with copy.examined():
            yield copy
    finally:
        copy.close()
        if folder is None:
            collect(place)


class ExaminedModels:
    """Models that are examined while a server starts: each once, in copies that stay below a folder."""

    def __init__(self, copies: Path) -> None:
        self._copies = copies
        self._found: dict[tuple[object, ...], ExaminedModel] = {}

    def examined(self, own: ModelCopy, shapes: Mapping[str, tuple[int, ...]], declared: Declared) -> ExaminedModel:
        """What is known of a copy, with these sizes of open dimensions. InputError for a model that cannot be
        served."""
        asked = own.path, own.digest, frozenset(shapes.items()), structs.replace(declared, known=None)
        found = self._found.get(asked)
        # What requests that shared a pass have shown outweighs every examination.
        if own.difference or found is None or not Path(found.file).exists():
            found = examine(own.path, shapes, folder=own.folder, declared=declared)
        if not own.difference:
            self._found[asked] = found
        return found

    def of(self, model: Path, declared: Declared) -> ExaminedModel:
        """What is known of a model without sizes. Errors as for `examined`."""
        with private_copy(model, self._copies) as own:
            return self.examined(own, {}, declared)


# Contents


@dataclass(frozen=True, slots=True)
class _Content:
    """The files of a model, its own first, with their states and their digests, by name; both are empty for a file that
    is not there."""

    files: Mapping[str, Path]
    states: Mapping[str, str]
    sums: Mapping[str, str]
    digest: str

    def examined(self) -> tuple[ExaminedFile, ...]:
        """The files, to be compared with later."""
        return tuple(ExaminedFile(str(file), self.states[name], self.sums[name]) for name, file in self.files.items())


def _content_of(model: Path) -> _Content:
    """Read all files of a model. OSError if its own cannot be read."""
    is_code = is_python(model)
    others = modules_beside(model) if is_code else files_of_weights(model)
    files = {model.name: model, **others}
    states = {name: _state(file) for name, file in files.items()}
    own = digest(model)
    sums = {name: digest(file) if file.is_file() else "" for name, file in others.items()}
    whole = digest_of_all(own, sums)
    if is_code:  # it finds its data by where it is
        whole = hashlib.sha256(f"{model} {whole}".encode()).hexdigest()
    return _Content(files, states, {model.name: own, **sums}, whole)


def _state(file: Path) -> str:
    """Size, time of the last change and inode of a file; empty if it is not there."""
    try:
        known = file.stat()
    except OSError:
        return ""
    return f"{known.st_size} {known.st_mtime_ns} {known.st_ino} {known.st_dev}"


def check_digest(model: Path, expected: str) -> None:
    """InputError if the content of a model without a private copy is not what was examined."""
    try:
        found = _content_of(model).digest
    except OSError:
        found = ""
    _compare(model, found, expected)


def _compare(model: Path, found: str, expected: str) -> None:
    if found != expected:
        now = f"has the digest {found[:DIGITS]}…" if found else "cannot be read"
        what = f"it {now}, and what was examined had {expected[:DIGITS]}…: it has changed since"
        fix = "deploy it with `sloop deploy`, or restore the file; with disk space for a copy this would not happen"
        raise InputError(what, where=str(model), help=fix)


def open_checked(model: Path, threads: int, expected: str, device: CudaDevice | None = None) -> Session:
    """Open a user's own file, as `open_model` does. InputError if its content is not what was examined.

    All of an ONNX model is read into memory, checked and opened there.
    """
    if model.suffix != ONNX:
        check_digest(model, expected)
        return open_model(model, threads, device=device)
    try:
        own = model.read_bytes()
        others = {name: beside(model, name).read_bytes() for name in external_names(own, str(model))}
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}", where=str(error.filename)) from error
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in others.items()}
    _compare(model, digest_of_all(hashlib.sha256(own).hexdigest(), sums), expected)
    opened = open_session(model, threads, device=device, content=ModelBytes(own, others))
    opened._model_bytes = None  # ONNX Runtime keeps them for a fall-back to another provider, and the weights once more
    return OnnxSession(model, threads, opened=opened, device=device)


# Making copies


class _NoCopyError(Exception):
    """A copy cannot be made; the text says why."""

    def __init__(self, text: str, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_full = is_full


class _Entry(Struct, frozen=True):
    """What `sources.json` says of an entry."""

    digest: str
    paths: dict[str, str]
    """By name, the user's files; the model's own first."""
    sums: dict[str, str]


def take(model: Path, folder: Path, expected: str = "") -> ModelCopy:
    """Copy the files of a model into `folder`, unless the copy is there already or they are in a cache of sloop's own.
    A copy with the `expected` digest is used whatever has happened to the user's files.

    If they cannot be copied, the result names the user's own file. InputError if they cannot be read, or change each
    time that they are copied.
    """
    original = model.absolute()
    if expected and (lock := _kept(_entry(folder, original, expected), expected)) is not None:
        place = _entry(folder, original, expected) / FILES
        return ModelCopy(place / original.name, original, expected, (), place, lock)
    for _ in range(TRIES):
        try:
            found = _content_of(original)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and original.exists():
                continue  # it is being replaced
            raise _unreadable(original, error) from error
        if source_of(original) and os.access(original.parent, os.W_OK):
            return ModelCopy(original, original, found.digest, (), original.parent)
        entry = _entry(folder, original, found.digest)
        place = entry / FILES
        try:
            lock = _kept(entry, found.digest)
            if lock is None:
                lock = _made(entry, found)
        except _NoCopyError as error:
            if error.is_full and collect(folder, BEGAN_S):
                continue
            entry = entry.with_name(f"{entry.name}-changed")
            lock, place = _place_without(entry), entry / FILES
            return ModelCopy(original, original, found.digest, found.examined(), place, lock, str(error))
        if lock is not None:
            return ModelCopy(place / original.name, original, found.digest, found.examined(), place, lock)
    raise InputError("it changes while it is copied", where=str(original), help="try again when it has been written")


def _entry(folder: Path, model: Path, known: str) -> Path:
    name = os.fsencode(model.name)[:NAME_BYTES_MAX].decode(errors="ignore")
    return folder.absolute() / f"{name}-{known[:DIGITS]}"


def _unreadable(model: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError("there is no such file", where=str(model), help="give the path of a model")
    file = error.filename or model
    return InputError(f"{file} cannot be read: {error.strerror}", where=str(model), help="check its permissions")


def _kept(entry: Path, known: str) -> int | None:
    """A lock on the entry with the content of this digest; None if it is missing or damaged."""
    try:
        lock = locked_file(entry / USED, exclusive=False, make=False)
    except OSError:  # making one will fail too, and say why
        lock = None
    if lock is None:
        return None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        record = msgspec.json.decode((entry / SOURCES).read_bytes(), type=_Entry)
        files = {name: entry / FILES / name for name in record.sums}
        if record.digest == known and all(_digest(file) == record.sums[name] for name, file in files.items()):
            os.utime(lock)  # it is used now
            return lock
    os.close(lock)
    return None


def _digest(file: Path) -> str:
    return digest(file) if file.is_file() else ""


def _made(entry: Path, content: _Content) -> int | None:
    """Make the entry, and return a lock on it; None if the files have changed meanwhile. _NoCopyError if they cannot be
    copied."""
    part = None
    try:
        entry.parent.mkdir(0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=ENDING, dir=entry.parent))
        lock = locked_file(part / USED, exclusive=False)
        assert lock is not None, "nobody else knows this folder"
        try:
            if not _fill(part, content):
                os.close(lock)
                return None
            for _ in range(TRIES):
                with contextlib.suppress(OSError):
                    part.rename(entry)
                    sync(entry.parent)
                    return lock
                kept = _kept(entry, content.digest)
                if kept is not None:  # another process was quicker
                    os.close(lock)
                    return kept
                _remove(entry)  # it is damaged
            raise OSError(errno.EBUSY, "another process makes it again and again")
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        is_full = error.errno in NO_ROOM
        what = "there is no room for a copy of it in" if is_full else f"it cannot be copied ({error.strerror}) to"
        raise _NoCopyError(f"{what} {entry.parent}", is_full=is_full) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _fill(part: Path, content: _Content) -> bool:
    """Copy the files. Returns whether the copies have the expected digests. _NoCopyError if they cannot be copied."""
    for name, file in content.files.items():
        if not content.sums[name]:
            continue  # whoever opens the model will say that it is missing
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise _NoCopyError(f"its weights in {name} lie outside of its folder, so that it cannot be copied")
        target = part / FILES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            given = file.open("rb")
        except OSError:
            return False
        with given, target.open("xb") as made:
            _copy(given, made)
            made.flush()
            os.fsync(made.fileno())
            os.fchmod(made.fileno(), 0o400)  # whoever may not read the user's file may not read the copy
        if digest(target) != content.sums[name]:
            return False
    paths = {name: str(file) for name, file in content.files.items() if content.sums[name]}
    (part / SOURCES).write_bytes(msgspec.json.encode(_Entry(content.digest, paths, dict(content.sums))))
    return True


def _copy(given: BinaryIO, made: BinaryIO) -> None:
    """Copy a file, as a reflink if possible. OSError (ENOSPC) also if too little room would be left."""
    with contextlib.suppress(OSError):  # another file system, or one without reflinks
        fcntl.ioctl(made.fileno(), FICLONE, given.fileno())
        return
    size_bytes = os.fstat(given.fileno()).st_size
    disk = os.fstatvfs(made.fileno())
    if disk.f_bavail * disk.f_frsize < size_bytes + min(size_bytes, MARGIN_BYTES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    shutil.copyfileobj(given, made, CHUNK_BYTES)


def _place_without(entry: Path) -> int:
    """A lock on an entry for changed copies of a model without a copy; -1 if there is no room even for that."""
    try:
        (entry / FILES).mkdir(parents=True, exist_ok=True)
        lock = locked_file(entry / USED, exclusive=False)
    except OSError:
        lock = None
    return -1 if lock is None else lock


def _remove(entry: Path) -> None:
    """Delete a folder or file of the store. If that is interrupted, the rest counts as no entry."""
    gone = entry.with_name(f"{entry.name}.{time.time_ns()}{GONE}")
    with contextlib.suppress(OSError):
        entry.rename(gone)
        if gone.is_dir():
            shutil.rmtree(gone, ignore_errors=True)
        else:
            gone.unlink()


def collect(folder: Path, before_s: float = inf) -> bool:
    """Delete the copies in a folder that nobody uses and that were last taken before `before_s` (Unix time), and what
    dead processes have left there. Returns whether anything was deleted."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return False
    has_found = False
    for entry in entries:
        try:
            is_entry = (entry / USED).exists()
            changed_s = (entry / USED if is_entry else entry).stat().st_mtime
            if changed_s >= (before_s if is_entry else time.time() - LEFT_S):
                continue
            lock = locked_file(entry / USED, exclusive=True, make=False) if is_entry else None
        except OSError:
            continue
        if lock is not None or not is_entry:
            _remove(entry)
            has_found = True
        if lock is not None:
            os.close(lock)
    return has_found


# The files of versions


class VersionFiles:
    """Keeps the copies that the versions of a server use, deletes others, and watches the users' files, in a thread of
    its own, because a file system may hang."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pins = ModelPins()
        self._watched: dict[str, tuple[str, dict[str, _Watched]]] = {}
        """By the key of a version, what it is called and the files that its models were made from, by path."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._checks = 0
        """Versions that are being checked, whose copies nobody holds for a moment."""
        self._has_left = True
        """Whether there may be copies that nobody uses."""
        self._thread = threading.Thread(target=self._run, name="sloop-files", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def add(self, key: str, called: str, models: Mapping[str, tuple[ExaminedFile, ...]]) -> None:
        """A version uses these models: for each file that is opened, the user's files that it was made from. Warnings
        name the version as `called`."""
        self._pins.add(key, map(Path, models))
        with self._lock:
            watched = {
                each.path: _Watched.of(each, is_opened=model == files[0].path)
                for model, files in models.items()
                for each in files
            }
            self._watched[key] = called, watched

    def drop(self, key: str) -> None:
        """A version has ended."""
        self._pins.drop(key)
        with self._lock:
            self._watched.pop(key, None)
            self._has_left = True

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Delete nothing while the block checks a version, which is added at its end."""
        self._checks += 1
        try:
            yield
        finally:
            self._checks -= 1
            self._has_left = True

    def close(self) -> None:
        """The server has stopped."""
        self._ended.set()
        self._pins.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of this thread alone; hashing takes a core
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with contextlib.suppress(Exception):
                if self._has_left and not self._checks:
                    self._has_left = False
                    collect(self._folder)
            if self._ended.wait(WATCH_S):
                return
            for line in self.changes():
                _log.warning("%s", line)

    def changes(self) -> list[str]:
        """A warning for each file that has changed since the last call. Reads these files again."""
        with self._lock:
            watched = [(called, each) for called, files in self._watched.values() for each in files.values()]
        changed: dict[tuple[str, str], list[str]] = {}
        for called, each in watched:
            if (now := each.change()) is not None:
                changed.setdefault((each.examined.path, now), []).append(called)
        return [
            f"{path} {now}; {listed(versions)} {'goes' if len(versions) == 1 else 'go'} on with what was examined; "
            "to serve the change, run `sloop deploy`"
            for (path, now), versions in changed.items()
        ]


@dataclass(slots=True)
class _Watched:
    """A file of a user, as it was when it was last looked at."""

    examined: ExaminedFile
    is_opened: bool
    """Whether workers open it themselves, because it has no copy."""
    known: str
    """Its state when its content was last read."""
    sha256: str
    """Of that content."""
    seen: str
    """Its state at the last call of `change`."""

    @classmethod
    def of(cls, examined: ExaminedFile, *, is_opened: bool) -> Self:
        """The file as it was examined."""
        return cls(examined, is_opened, examined.state, examined.sha256, examined.state)

    def change(self) -> str | None:
        """How it has changed since the last call; None if its content is as it was then, or as it was examined. A
        changed file is read only when two calls have found the same state: writing a large file takes a while."""
        path = Path(self.examined.path)
        before, self.seen = self.seen, _state(path)
        if self.seen == self.known or self.seen != before:
            return None
        try:
            found = digest(path)
        except OSError:
            found = ""
        was, self.known, self.sha256 = self.sha256, self.seen, found
        if found in (was, self.examined.sha256):
            return None
        what = "has changed" if found else "is gone, or cannot be read"
        return f"{what}; it has no copy, so no worker that starts now can open it" if self.is_opened else what


# What is known of a model before it is opened


def unprofiled(variant: Variant) -> Declared:
    """What the user says about a model."""
    return Declared(variant.joins_rows, variant.batch, operators=variant.operators, pad=tuple(variant.pad.items()))


def declared_of(variant: Variant, copy: ModelCopy) -> Declared:
    """What the user says about a model, and what its profiles know."""
    different = copy.difference
    known = Joining(different) if different else _examined_before(variant, copy.model_digest)
    return structs.replace(unprofiled(variant), known=known)


def _examined_before(variant: Variant, model_digest: str) -> Joining | None:
    """What one of the variant's profiles says about joining requests for the model with this digest; None if none
    does."""
    files = variant.files.values()
    return next((found for file in files if (found := joining_in(Path(file), model_digest)) is not None), None)
