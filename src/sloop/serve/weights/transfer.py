"""One transfer: brings a model with all its files from a store into the folder of the cache, and verifies it.

Files of weights beside an ONNX model belong to it and are fetched with it.

A cached model has a version for each file: the SHA-256 that the user or a manifest (`model.onnx.sha256`, as `sha256sum`
writes it) gives, otherwise what the store reports: ETag, Last-Modified with the length, or the time of the last change.
So one small request tells whether a file is still current; with `#sha256=`, a model without further files needs no
request. A digest of the content would be known only after the transfer. If the store reports no version, the file is
fetched again each time. If the store cannot be reached, the copy that was used last is taken, with a warning.

An interrupted transfer continues at the same byte if the store has the same version and sends ranges. It fails after
`Patience.tries` tries without progress.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, TypeVar

from sloop.errors import InputError, MachineError, SloopError
from sloop.onnx_file import external_files
from sloop.serve.weights.folder import (
    FILES,
    CachedModel,
    EntryRecord,
    FileRecord,
    ModelFolder,
    Partial,
    TransferState,
    disk_full,
    files_in,
    size_of_entry,
)
from sloop.serve.weights.sources import (
    CHUNK_BYTES,
    NAME_BYTES_MAX,
    Download,
    InterruptedTransferError,
    ModelSource,
    Store,
    StoredFile,
    StoreError,
    Watch,
    checksum_in,
    is_strong,
)
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
"""The least time between two reports of the progress."""
FILES_MAX: Final = 10_000
"""The most files of one model: large models are exported with a file for each tensor."""

Progress = Callable[[int, int | None], None]
"""Called with the number of bytes received so far, and with that of all files known so far (None: unknown)."""
T = TypeVar("T")
_log: Final = logging.getLogger("sloop.weights")


class ModelTransfer:
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
            found = size_of_entry(self._folder.folder / f"{self._name}-{self._key}.part")
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
                raise disk_full(self._folder.folder, f"{self._source} was being fetched") from error
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
        for path in files_in(self._part / FILES):
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
