"""Where models are, and what reads their files.

A `ModelSource` names a model: `https://host/path/model.onnx`, `http://…`, `s3://bucket/key/model.onnx`, `gs://…`,
`az://…`, `file:///path` or a path in a shared folder, each possibly with `#sha256=HEX`. A `Store` reads the files of
one scheme: `FolderStore` here, others in `sloop.serve.weights.web` and `sloop.serve.weights.objects`.

Reading blocks, in a thread of its own. A `Watch` ends it from outside, and when the store is too slow. Must not know
what happens to the bytes: `sloop.serve.weights.cache` keeps them.
"""

import contextlib
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol, Self
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from sloop.app.document import SCHEME
from sloop.errors import InputError, MachineError
from sloop.text import counted, quoted, shortened

CHUNK_BYTES: Final = 1 << 20
NAME_BYTES_MAX: Final = 200
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
OBJECTS: Final = ("s3", "gs", "az")
"""The schemes of object stores, which the extra `stores` reads."""
WEAK: Final = "W/"
"""How a version begins that does not prove equal content."""
CONTENT: Final = "sha256 "
"""How a version begins that is the checksum of the content."""
SAFE: Final = "/%:@!$&'()*+,;=~-._"
"""What stays as it is in the path of a URL."""


class InterruptedTransferError(Exception):
    """A transfer broke off in a way that another try may repair; `error` is for the user if none does."""

    def __init__(self, what: str, help: str = "check the store and the network") -> None:
        super().__init__(what)
        self.error = MachineError(what, help=help)


class StoppedTransferError(Exception):
    """Nobody waits for this transfer any more."""


class StoreError(InputError):
    """The store answers, but not with the file; `status` as in HTTP."""

    def __init__(self, what: str, *, where: str, help: str, status: int) -> None:
        super().__init__(what, where=where, help=help)
        self.status = status


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a transfer may do nothing."""

    connect_s: float = 10.0
    """Seconds for each address of a host."""
    stall_s: float = 30.0
    """Seconds without a byte after which a connection is given up."""
    least_bytes_s: int = 1024
    """A connection that brings less, over four times `stall_s`, is given up too."""
    tries: int = 5
    """Tries without progress before a transfer fails."""
    pause_s: float = 0.25
    """Before the second try; each further pause is twice as long."""
    hang_s: float = 60.0
    """Seconds in which the operating system may say nothing, as with a shared folder whose server is away."""


# Sources


@dataclass(frozen=True, slots=True, repr=False)
class ModelSource:
    """Where a model is. It shows itself without the secrets that a URL may contain."""

    location: str
    """A URL without user and fragment, or an absolute path."""
    sha256: str = ""
    user: str = ""
    """`USER:PASSWORD` of the URL."""

    @classmethod
    def of(cls, text: str, folder: Path | None = None) -> Self:
        """The source that `text` names; a relative path starts at `folder`. InputError if it names none, or one that
        needs the extra `stores`, which is not installed."""
        scheme = SCHEME.match(text)
        location, mark, fragment = text.partition("#" if scheme else "#sha256=")
        digest = fragment.removeprefix("sha256=") if scheme else fragment
        if mark and ((scheme and digest == fragment) or not DIGEST.fullmatch(digest.lower())):
            what = f"its fragment {quoted(fragment)} is no SHA-256 in 64 hexadecimal digits"
            raise InputError(what, where=label(location), help="end the URL with #sha256=…, or remove the '#'")
        kind = scheme[1].lower() if scheme else "file"
        if kind in ("http", "https", *OBJECTS):
            address, user = _web_location(location)
            if kind in OBJECTS:
                _check_object(kind, address, user)
            return cls(address, digest.lower(), user)
        if kind != "file":
            what = f"{quoted(f'{kind}://')} is no kind of store that sloop can read"
            advice = "give an https:, http:, s3:, gs:, az: or file: URL, or a path"
            raise InputError(what, where=label(location), help=advice)
        path = _file_path(location) if scheme else (folder or Path()) / location
        return cls(str(_model_in(path)), digest.lower())

    @property
    def key(self) -> str:
        """What tells this location from others, in names of files."""
        return hashlib.sha256(self.location.encode()).hexdigest()[:16]

    @property
    def scheme(self) -> str:
        """Of the URL in small letters; `file` for a path."""
        scheme = SCHEME.match(self.location)
        return scheme[1].lower() if scheme else "file"

    @property
    def name(self) -> str:
        """The name of the model's own file."""
        return Path(self.location).name if self.scheme == "file" else _name_in(urlsplit(self.location).path)

    def file(self, name: str) -> "StoredFile":
        """Another file, by its path relative to the folder of the model."""
        if name == self.name:
            return StoredFile(self.location, self.user, name)
        if self.scheme == "file":
            return StoredFile(str(Path(self.location).parent / name), name=name)
        parts = urlsplit(self.location)
        path = parts.path.rpartition("/")[0] + "/" + quote(name)
        return StoredFile(urlunsplit(parts._replace(path=path)), self.user, name)

    def __repr__(self) -> str:
        return label(self.location)

    __str__ = __repr__


@dataclass(frozen=True, slots=True, repr=False)
class StoredFile:
    """One file in a store."""

    location: str
    user: str = ""
    name: str = ""
    """Its path in the folder of its model."""

    def __repr__(self) -> str:
        return label(self.location)

    __str__ = __repr__


def label(location: str) -> str:
    """A location without user, password and the values of its query, such as a signature."""
    if not SCHEME.match(location):
        return location
    head, _, rest = location.partition("://")
    place = rest.partition("#")[0]
    place, mark, _ = place.partition("?")
    host, slash, path = place.partition("/")
    return shortened(f"{head}://{host.rpartition('@')[2]}{slash}{path}{'?…' if mark else ''}", 300)


def _web_location(text: str) -> tuple[str, str]:
    """The URL without user, and the user."""
    where, advice = label(text), "write for example https://models.example.org/resnet.onnx"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, SplitResult("", "", "", "", "")
    if not host or not host.isascii() or port == 0:
        raise InputError("a URL without a valid host and port", where=where, help=advice)
    if re.search(r"[\x00-\x20\x7f]", text):
        raise InputError("a URL with a space or control character", where=where, help="write it as %20")
    name = _name_in(parts.path)
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > NAME_BYTES_MAX:
        what = f"a URL that does not end in the name of a file of at most {NAME_BYTES_MAX} bytes"
        raise InputError(what, where=where, help=advice)
    user, _, place = parts.netloc.rpartition("@")
    path, arguments = quote(parts.path, safe=SAFE), quote(parts.query, safe=SAFE + "?")
    return urlunsplit((parts.scheme.lower(), place, path, arguments, "")), unquote(user)


def _check_object(kind: str, location: str, user: str) -> None:
    """InputError for what names no object of a bucket, or if nothing here can read it."""
    parts, where = urlsplit(location), label(location)
    if user:
        advice = "remove them from the URL: they come from the environment, as docs/serving.md says"
        raise InputError(f"an {kind}: URL with credentials", where=where, help=advice)
    if not BUCKET.fullmatch(parts.netloc) or parts.query:
        what = f"an {kind}: URL that names no bucket" if not parts.query else f"an {kind}: URL with a '?'"
        advice = f"write {kind}://BUCKET/KEY, with special characters of the key as %3F"
        raise InputError(what, where=where, help=advice)
    if find_spec("obstore") is None:
        what = f"{kind}: URLs need the extra `stores`, which is not installed"
        raise InputError(what, where=where, help="run `pip install obstore` on each machine that fetches models")


def _name_in(path: str) -> str:
    return unquote(path.rpartition("/")[2])


def _file_path(location: str) -> Path:
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        what = f"it names the host {quoted(parts.netloc)}" if parts.netloc else "it has no absolute path"
        raise InputError(what, where=location, help="write file:///absolute/path/model.onnx")
    return Path(unquote(parts.path))


def _model_in(path: Path) -> Path:
    """The absolute path of a model; in a folder, that of `model.onnx` or of its only ONNX file."""
    try:
        path = path.absolute()
        if not path.is_dir():
            return path
        found = sorted(path.glob("*.onnx"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read it: {error}", where=quoted(str(path)), help="check the path") from None
    if path / "model.onnx" in found:
        return path / "model.onnx"
    if len(found) != 1:
        what = f"a folder with {counted(len(found), 'ONNX file')}, none of which is called model.onnx"
        raise InputError(what, where=str(path), help="give the path of the model's own file")
    return found[0]


# Reading


class Watch:
    """Whether somebody still waits for a file, and whether the store is too slow. The thread of a transfer notes what
    it does; other threads may call `stop` and `look`, and read `silent_s`."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._stopped = threading.Event()
        self.quiet_s = self.patience.stall_s
        """How long the connection may bring nothing."""
        self._slow = ""
        """Why the connection was cut."""
        self._asked_s: float | None = None
        """Since when the operating system has been asked for something."""
        self._window_s, self._window_bytes = time.monotonic(), 0
        self._socket: socket.socket | None = None
        """The connection, which can be cut while its thread waits for it."""

    def stop(self) -> None:
        """End the transfer soon."""
        self._stopped.set()
        self._cut()

    def look(self) -> None:
        """Cut the connection if it is too slow; to be called about once a second."""
        if self._socket is not None:
            self._slow = self._slow or self._slowness()
            if self._slow:
                self._cut()

    @property
    def silent_s(self) -> float:
        """How long the operating system has not answered."""
        asked_s = self._asked_s
        return 0.0 if asked_s is None else time.monotonic() - asked_s

    # What the thread of a transfer calls

    def check(self) -> None:
        """StoppedTransferError if the transfer was stopped, InterruptedTransferError if its connection was cut."""
        if self._stopped.is_set():
            raise StoppedTransferError
        if self._slow:
            raise InterruptedTransferError(self._slow)

    def sleep(self, seconds: float) -> None:
        """Wait; StoppedTransferError at once if the transfer is stopped."""
        if self._stopped.wait(seconds):
            raise StoppedTransferError

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """The block asks the operating system for something that may never come."""
        self._asked_s = time.monotonic()
        try:
            self.check()
            yield
        finally:
            self._asked_s = None

    def use(self, sock: socket.socket | None, quiet_s: float | None = None) -> None:
        """From now on the transfer waits for this connection, which may be quiet for `stall_s` or for less, or for
        one that cannot be cut."""
        self._socket, self._slow = sock, ""
        self.quiet_s = min(self.patience.stall_s, quiet_s or self.patience.stall_s)
        if sock is not None:
            sock.settimeout(self.quiet_s)
        self._window_s, self._window_bytes = time.monotonic(), 0
        self.check()

    def forget(self) -> None:
        """The transfer waits for its connection no more."""
        self._socket = None

    def received(self, count: int) -> None:
        """Bytes have come. InterruptedTransferError if they come too slowly."""
        self._window_bytes += count
        self._slow = self._slow or self._slowness()
        self.check()

    def _slowness(self) -> str:
        now_s, bound_s = time.monotonic(), 4 * self.patience.stall_s
        passed_s, count = now_s - self._window_s, self._window_bytes
        if passed_s <= bound_s:
            return ""
        if count < self.patience.least_bytes_s * passed_s:
            return f"only {counted(count, 'byte')} came in {passed_s:.3g} s"
        self._window_s, self._window_bytes = now_s, 0
        return ""

    def _cut(self) -> None:
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):  # it has ended already
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # that of TLS would let plain bytes through


@dataclass
class Download:
    """A file that is being read."""

    chunks: Iterator[bytes]
    """Its bytes from `start` on; they may end before or after `total_bytes`."""
    total_bytes: int | None
    """Of the whole file; None if the store does not tell."""
    version: str
    """What tells this version of the file from others; empty if the store does not tell. One that begins with `WEAK`
    does not prove equal content, so that the rest cannot be read later."""
    start: int = 0
    """The position of the first byte that comes: the one that was asked for, or 0."""
    has_end: bool = True
    """Whether a broken connection can be told from the end of the file."""
    is_copy: bool = False
    """Whether it comes from another machine's copy instead of the store."""
    close: Callable[[], None] = lambda: None


class Store(Protocol):
    """Reads files. All calls block. They raise InputError for what another try cannot repair, and
    InterruptedTransferError for the rest."""

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        """Begin to read the file; from `start`, if it still has this version."""
        ...

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        """The present version of the file; `known` is one that was found before."""
        ...


def checksum_in(version: str) -> str:
    """The SHA-256 of a whole file, if its version is that; else empty."""
    return version.removeprefix(CONTENT) if version.startswith(CONTENT) else ""


def is_strong(version: str) -> bool:
    """Whether equal versions prove equal content."""
    return bool(version) and not version.startswith(WEAK)


class FolderStore:
    """Files in a folder that several machines see."""

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        with watch.asking(), _folder_errors(file):
            opened = open(file.location, "rb", buffering=0)  # noqa: SIM115  # closed with the download
            found = os.fstat(opened.fileno())
        present = _version_of(found)
        begin = start if version == present and start <= found.st_size else 0

        def chunks() -> Iterator[bytes]:
            opened.seek(begin)
            while True:
                with watch.asking(), _folder_errors(file):
                    chunk = opened.read(CHUNK_BYTES)
                    if not chunk and _version_of(os.fstat(opened.fileno())) != present:
                        advice = "fetch it when it is complete; write it elsewhere and rename it"
                        raise InterruptedTransferError(f"{file}: it is being written", advice)
                if not chunk:
                    return
                yield chunk

        return Download(chunks(), found.st_size, present, begin, close=opened.close)

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        with watch.asking(), _folder_errors(file):
            return _version_of(os.stat(file.location))


def _version_of(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_size}"


@contextlib.contextmanager
def _folder_errors(file: StoredFile) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError("there is no such file", where=str(file), help="check the path", status=404) from None
    except IsADirectoryError:
        raise StoreError("it is a folder", where=str(file), help="give the path of a file", status=404) from None
    except PermissionError:
        advice = "let this user read it, or give another path"
        raise StoreError("this user may not read it", where=str(file), help=advice, status=403) from None
    except ValueError:
        raise StoreError("no valid path", where=quoted(str(file)), help="check the path", status=404) from None
    except OSError as error:
        what = f"{file}: cannot be read: {error.strerror or error}"
        raise InterruptedTransferError(what, "check the shared folder") from error
