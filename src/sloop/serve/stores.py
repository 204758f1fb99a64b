"""Reads model files from stores: web servers and object stores over HTTP, and folders that several machines see.

A `ModelSource` names a model: `https://host/path/model.onnx`, `http://…`, `s3://bucket/key/model.onnx`, `file:///path`
or a path in a shared folder, each possibly with `#sha256=HEX`. A `Store` reads the files of one scheme; a store of
another kind is one more class in `STORES`.

Reading blocks, in a thread of its own, with the standard library only. A `Watch` ends it from outside, and when the
store is too slow. Lengths are checked in both directions: too few bytes, and too many. Proxies are not used. Must not
know what happens to the bytes: `sloop.serve.weights` keeps them.
"""

import contextlib
import hashlib
import http.client
import io
import os
import re
import socket
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from sloop.app.document import SCHEME
from sloop.errors import InputError, MachineError
from sloop.serve.aws import KEY_ID, REGIONS, SECRET, TOKEN, AwsAccount
from sloop.text import counted, host_and_port, quoted, shortened

CHUNK_BYTES: Final = 1 << 20
POLL_S: Final = 0.1
"""How often a blocked thread looks whether it was stopped, and a waiting one for a lock."""
REDIRECTS_MAX: Final = 5
NAME_BYTES_MAX: Final = 200
LATE_VALIDATOR_S: Final = 60
"""Last-Modified proves that a file is the same only if it was this old when it was read: the date has whole seconds."""

DIGEST: Final = re.compile(r"[0-9a-f]{64}")
BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
REFUSAL_BYTES_MAX: Final = 4096
"""What is read of an answer that says why a store refuses."""


class InterruptedTransferError(Exception):
    """A transfer broke off in a way that another try may repair; `error` is for the user if none does."""

    def __init__(self, what: str, help: str) -> None:
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
    """A body that brings less, over four times `stall_s`, is given up too."""
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
        """The source that `text` names; a relative path starts at `folder`. InputError if it names none."""
        scheme = SCHEME.match(text)
        location, mark, fragment = text.partition("#" if scheme else "#sha256=")
        digest = fragment.removeprefix("sha256=") if scheme else fragment
        if mark and ((scheme and digest == fragment) or not DIGEST.fullmatch(digest.lower())):
            what = f"its fragment {quoted(fragment)} is no SHA-256 in 64 hexadecimal digits"
            raise InputError(what, where=_label(location), help="end the URL with #sha256=…, or remove the '#'")
        kind = scheme[1].lower() if scheme else "file"
        if kind in ("http", "https", "s3"):
            address, user = _http_location(location)
            if kind == "s3":
                _check_s3(address, user)
            return cls(address, digest.lower(), user)
        if kind != "file":
            what = f"{quoted(f'{kind}://')} is no kind of store that sloop can read"
            raise InputError(what, where=_label(location), help="give an https:, http:, s3: or file: URL, or a path")
        path = _file_path(location) if scheme else (folder or Path()) / location
        return cls(str(_model_in(path)), digest.lower())

    @property
    def key(self) -> str:
        """What tells this location from others, in names of files."""
        return hashlib.sha256(self.location.encode()).hexdigest()[:16]

    @property
    def scheme(self) -> str:
        """`http`, `https`, `s3` or `file`; the key of `STORES`."""
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
        return _label(self.location)

    __str__ = __repr__


@dataclass(frozen=True, slots=True, repr=False)
class StoredFile:
    """One file in a store."""

    location: str
    user: str = ""
    name: str = ""
    """Its path in the folder of its model."""

    def __repr__(self) -> str:
        return _label(self.location)

    __str__ = __repr__


def _label(location: str) -> str:
    """A location without user, password and the values of its query, such as a signature."""
    if not SCHEME.match(location):
        return location
    head, _, rest = location.partition("://")
    place = rest.partition("#")[0]
    place, mark, _ = place.partition("?")
    host, slash, path = place.partition("/")
    return shortened(f"{head}://{host.rpartition('@')[2]}{slash}{path}{'?…' if mark else ''}", 300)


def _http_location(text: str) -> tuple[str, str]:
    """The URL without user, and the user."""
    where, advice = _label(text), "write for example https://models.example.org/resnet.onnx"
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
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._")
    arguments = quote(parts.query, safe="/?%:@!$&'()*+,;=~-._")
    return urlunsplit((parts.scheme.lower(), place, path, arguments, "")), unquote(user)


def _check_s3(location: str, user: str) -> None:
    """InputError for what names no object of a bucket."""
    parts, where = urlsplit(location), _label(location)
    if user:
        help = f"remove them from the URL, and set {KEY_ID} and {SECRET} in the environment"
        raise InputError("an s3: URL with credentials", where=where, help=help)
    if not BUCKET.fullmatch(parts.netloc) or parts.query:
        what = "an s3: URL that names no bucket" if not parts.query else "an s3: URL with a '?'"
        help = (
            "write s3://BUCKET/KEY, with special characters of the key as %3F; the host of a store is AWS_ENDPOINT_URL"
        )
        raise InputError(what, where=where, help=help)


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
    """What the thread of a transfer asks while it waits: whether somebody still waits for the file, and whether the
    store is too slow. Other threads may call `stop` and read `silent_s`."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._stopped = threading.Event()
        self._asked_s: float | None = None  # since when the operating system has been asked for something
        self._last_byte_s = self._window_s = time.monotonic()
        self._window_bytes = 0
        self._in_body = False

    def stop(self) -> None:
        """End the transfer soon."""
        self._stopped.set()

    def check(self) -> None:
        """StoppedTransferError if the transfer was stopped."""
        if self._stopped.is_set():
            raise StoppedTransferError

    def sleep(self, seconds: float) -> None:
        """Wait; StoppedTransferError at once if the transfer is stopped."""
        if self._stopped.wait(seconds):
            raise StoppedTransferError

    @property
    def silent_s(self) -> float:
        """How long the operating system has not answered."""
        asked_s = self._asked_s
        return 0.0 if asked_s is None else time.monotonic() - asked_s

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """The block asks the operating system for something that may never come."""
        self.check()
        self._asked_s = time.monotonic()
        try:
            yield
        finally:
            self._asked_s = None

    def begin(self, *, in_body: bool) -> None:
        """The head or the body of an answer comes next."""
        self._last_byte_s = self._window_s = time.monotonic()
        self._window_bytes, self._in_body = 0, in_body

    def received(self, count: int) -> None:
        """Bytes have come from a connection, or none for the moment. InterruptedTransferError if that is too slow."""
        self.check()
        now_s, stall_s = time.monotonic(), self.patience.stall_s
        self._asked_s = None if self._asked_s is None else now_s
        self._window_bytes += count
        if count:
            self._last_byte_s = now_s
        elif now_s - self._last_byte_s > stall_s:
            raise InterruptedTransferError(f"no byte has come for {stall_s:g} s", "check the store and the network")
        window_s = now_s - self._window_s
        if not self._in_body and window_s > 4 * stall_s:
            what = f"the head of its answer takes more than {4 * stall_s:g} s"
            raise InterruptedTransferError(what, "check the store and the network")
        if self._in_body and window_s > 4 * stall_s:
            if self._window_bytes < self.patience.least_bytes_s * window_s:
                what = f"only {counted(self._window_bytes, 'byte')} came in {window_s:.3g} s"
                raise InterruptedTransferError(what, "check the store and the network")
            self._window_s, self._window_bytes = now_s, 0


class Download(Protocol):
    """A file that is being read."""

    start: int
    """The position of the first byte that comes: the one that was asked for, or 0."""
    total_bytes: int | None
    """Of the whole file; None if the store does not tell."""
    version: str
    """What tells this version of the file from others; empty if the store does not tell."""
    is_resumable: bool
    """Whether equal versions prove equal content, so that the rest can be read later."""
    has_end: bool
    """Whether a broken connection can be told from the end of the file."""
    is_copy: bool
    """Whether it comes from another machine's copy instead of the store."""
    sha256: str
    """Of the whole file, as the store says; empty if it does not."""

    def read(self) -> bytes:
        """The next bytes; none at the end, which may come before or after `total_bytes`."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """Reads files. All calls block. They raise InputError for what another try cannot repair, and
    InterruptedTransferError for the rest."""

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        """Begin to read the file; from `start`, if it still has this version."""
        ...

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        """The present version of the file; `known` is one that was found before."""
        ...


class FolderStore:
    """Files in a folder that several machines see."""

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> "FolderDownload":
        with watch.asking(), _folder_errors(file):
            opened = open(file.location, "rb", buffering=0)  # noqa: SIM115  # closed by its Download
            try:
                return FolderDownload(file, opened, watch, start, version)
            except BaseException:
                opened.close()
                raise

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


class FolderDownload:
    """A file in a folder; a `Download`."""

    is_resumable = True
    has_end = True
    is_copy = False
    sha256 = ""

    def __init__(self, file: StoredFile, opened: io.FileIO, watch: Watch, start: int, version: str) -> None:
        self._file, self._opened, self._watch = file, opened, watch
        found = os.fstat(opened.fileno())
        self.version = _version_of(found)
        self.total_bytes: int | None = found.st_size
        self.start = start if version == self.version and start <= found.st_size else 0
        opened.seek(self.start)

    def read(self) -> bytes:
        with self._watch.asking(), _folder_errors(self._file):
            chunk = self._opened.read(CHUNK_BYTES)
            if not chunk and _version_of(os.fstat(self._opened.fileno())) != self.version:
                what = f"{self._file}: it is being written"
                raise InterruptedTransferError(what, "fetch it when it is complete; write it elsewhere and rename it")
            return chunk

    def close(self) -> None:
        self._opened.close()


# HTTP


class HttpStore:
    """Files of web servers and object stores.

    `token_file` has lines `HOST TOKEN` or `HOST NAME: VALUE` (`HOST:PORT` for a port of its own): what to send to that
    host as a bearer token or as another header, only with TLS or to this machine. It is read at each request.
    """

    def __init__(self, *, token_file: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._token_file = token_file
        self._tls = tls

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> "HttpDownload":
        wanted = {}
        if start and version:
            wanted = {"Range": f"bytes={start}-", "If-Range": version.partition(" ")[2].partition(" +")[0]}
        with watch.asking():
            answer = self._answer(file, watch, wanted)
            etag = answer.head.get("ETag", "").strip()
            is_changed = answer.status == 206 and version.startswith("etag ") and etag and version != f"etag {etag}"
            if wanted and (answer.status in (304, 416) or is_changed):
                answer.close()
                answer, start = self._answer(file, watch, {}), 0
            try:
                return HttpDownload(file, answer, watch, start, version)
            except BaseException:
                answer.close()
                raise

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        kind, _, value = known.partition(" ")
        value = value.partition(" +")[0]
        headers = {"etag": {"If-None-Match": value}, "modified": {"If-Modified-Since": value}}.get(kind, {})
        headers = {**headers, "Range": "bytes=0-0"}  # a new version is not read here
        with watch.asking():
            answer = self._answer(file, watch, headers)
            with contextlib.closing(answer):
                return known if answer.status == 304 else _http_version(answer.head)

    def _answer(self, file: StoredFile, watch: Watch, headers: Mapping[str, str]) -> "_Answer":
        """The answer to a GET, after redirects: 200, 206, 304 or 416. StoreError for any other."""
        begin = self._url_of(file)
        location, user = begin, file.user
        for _ in range(REDIRECTS_MAX + 1):
            answer = self._ask(file, urlsplit(location), user, watch, headers)
            target = answer.head.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not target:
                break
            answer.close()
            location, user = _redirected(file, location, target, user)
        else:
            what = f"it redirects more than {REDIRECTS_MAX} times"
            raise StoreError(what, where=str(file), help="give the last address", status=302)
        if answer.status in (200, 206) or (answer.status in (304, 416) and headers):
            return answer
        with contextlib.closing(answer):
            raise self._refused(file, answer, "" if location == begin else _label(location))

    def _url_of(self, file: StoredFile) -> str:
        """Where a file is to be asked for."""
        return file.location

    def _refused(self, file: StoredFile, answer: "_Answer", redirected: str) -> Exception:
        """The error for a status that is no success; `redirected` is where the last request went, if elsewhere."""
        return _refused(file, answer, redirected)

    def _ask(
        self, file: StoredFile, url: SplitResult, user: str, watch: Watch, headers: Mapping[str, str]
    ) -> "_Answer":
        """Send a request and receive the head of the answer."""
        every = {"Host": url.netloc, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
        every |= {**self._authorization(url, user), **headers}
        try:
            wire = _Wire(self._connected(url, watch), watch)
        except InterruptedTransferError as interrupted:
            raise InterruptedTransferError(f"{file}: {interrupted}", interrupted.error.help) from None
        try:
            with _http_errors(file):
                connection = http.client.HTTPConnection(str(url.hostname), url.port or 80)
                connection.sock = cast(socket.socket, wire)
                target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                connection.request("GET", target, headers=every)
                watch.begin(in_body=False)
                response = connection.getresponse()
            watch.begin(in_body=True)
            return _Answer(wire, response)
        except BaseException:
            wire.shut()
            raise

    def _connected(self, url: SplitResult, watch: Watch) -> socket.socket:
        host, port = str(url.hostname), url.port or (443 if url.scheme == "https" else 80)
        place, advice = host_and_port(host, port), "check the URL, and that the store can be reached from this machine"
        try:
            sock = socket.create_connection((host, port), timeout=watch.patience.connect_s)
        except (socket.gaierror, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a valid name"
            raise InterruptedTransferError(f"the host {host!r} is not known: {reason}", advice) from error
        except TimeoutError as error:
            what = f"{place} does not answer within {watch.patience.connect_s:g} s"
            raise InterruptedTransferError(what, advice) from error
        except OSError as error:
            what = f"no connection to {place}: {error.strerror or error}"
            raise InterruptedTransferError(what, advice) from error
        if url.scheme != "https":
            return sock
        try:
            self._tls = self._tls or ssl.create_default_context()
            return self._tls.wrap_socket(sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            what = f"the certificate of {place} is not accepted: {error.verify_message}"
            advice = "check the URL, or name the file of its authority in SSL_CERT_FILE"
            raise MachineError(what, help=advice) from error
        except ssl.SSLError as error:
            sock.close()
            what = f"no TLS with {place}: {error.reason or error}"
            raise MachineError(what, help="check the port, and whether it is an http: URL") from error
        except (OSError, ValueError) as error:
            sock.close()
            raise InterruptedTransferError(f"no TLS with {place}: {error}", advice) from error

    def _authorization(self, url: SplitResult, user: str) -> dict[str, str]:
        if user:
            return {"Authorization": f"Basic {b64encode(user.encode()).decode()}"}
        if self._token_file is None:
            return {}
        host, tokens = url.hostname or "", self._tokens()
        place = f"[{host}]" if ":" in host else host
        port = url.port or (443 if url.scheme == "https" else 80)
        found = tokens.get(f"{place}:{port}") or tokens.get(place) or tokens.get(host) or {}
        for name, value in found.items():
            if url.scheme != "https" and url.hostname not in ("localhost", "127.0.0.1", "::1"):
                what = f"the token for {url.hostname} would be sent without TLS"
                raise InputError(what, where=str(self._token_file), help="use an https: URL")
            return {name: value}
        return {}

    def _tokens(self) -> dict[str, dict[str, str]]:
        """By host in lower case, with a port or without, the header that is sent to it."""
        found: dict[str, dict[str, str]] = {}
        assert self._token_file is not None
        try:
            lines = self._token_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
            raise InputError(f"cannot read it: {reason}", where=str(self._token_file), help="check the path") from None
        for place, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            host, _, rest = line.partition(" ")
            header = re.fullmatch(r"([A-Za-z0-9-]+):\s*([\x21-\x7e][\x20-\x7e]*)", rest.strip())
            if header is None and not re.fullmatch(r"[\x21-\x7e]+", rest.strip()):
                advice = "write HOST TOKEN or HOST NAME: VALUE"
                raise InputError("no host with a token", where=f"{self._token_file}:{place}", help=advice)
            found[host.lower()] = {header[1]: header[2]} if header else {"Authorization": f"Bearer {rest.strip()}"}
        return found


def _redirected(file: StoredFile, location: str, target: str, user: str) -> tuple[str, str]:
    """Where a redirect leads, and the user to send there."""
    advice = "give the last address, with https"
    try:
        before, after = urlsplit(location), urlsplit(urljoin(location, target))
        is_valid = bool(after.hostname) and after.port != 0 and not re.search(r"[\x00-\x20\x7f]", target)
    except ValueError:
        is_valid = False
    if not is_valid or after.scheme not in ("http", "https"):
        raise StoreError("it redirects to what is no web address", where=str(file), help=advice, status=302)
    if before.scheme == "https" and after.scheme == "http":
        what = f"it redirects to {_label(after.geturl())}, without TLS"
        raise StoreError(what, where=str(file), help=advice, status=302)
    is_same = (before.scheme, before.hostname, before.port) == (after.scheme, after.hostname, after.port)
    place = after.netloc.rpartition("@")[2]
    path, arguments = (quote(part, safe="/?%:@!$&'()*+,;=~-._") for part in (after.path, after.query))
    return urlunsplit((after.scheme, place, path, arguments, "")), user if is_same else ""


def _refused(file: StoredFile, answer: "_Answer", redirected: str) -> Exception:
    """The error for a status that is no success."""
    status, host = answer.status, urlsplit(redirected or file.location).hostname
    said = f"{status} {shortened(answer.reason)}".strip()
    place = f" (redirected to {redirected})" if redirected else ""
    if status in (401, 403):
        advice = f"give a token for {host} in the token file, or check the user's rights there"
        return StoreError(
            f"the store does not permit to read it{place}: {said}", where=str(file), help=advice, status=status
        )
    if status in (404, 410):
        what = f"the store has no such file{place}: {said}"
        return StoreError(what, where=str(file), help="check the URL", status=status)
    if status in (408, 425, 429) or status >= 500:
        return InterruptedTransferError(
            f"{file}: the store answers {said}{place}", "try again later, or ask who runs the store"
        )
    return StoreError(f"the store answers {said}{place}", where=str(file), help="check the URL", status=status)


@contextlib.contextmanager
def _http_errors(file: StoredFile) -> Iterator[None]:
    """Errors of a connection as those of a transfer, with the name of the file."""
    advice = "check the store and the network"
    try:
        yield
    except InterruptedTransferError as error:
        raise InterruptedTransferError(f"{file}: {error}", error.error.help) from None
    except (http.client.RemoteDisconnected, http.client.IncompleteRead):
        raise InterruptedTransferError(f"{file}: the store closed the connection before the end", advice) from None
    except http.client.HTTPException as error:
        what = f"the answer is not HTTP ({type(error).__name__})"
        raise StoreError(
            what, where=str(file), help="check host and port, and whether it needs https", status=502
        ) from None
    except OSError as error:
        what = f"{file}: the connection broke: {error.strerror or error}"
        raise InterruptedTransferError(what, advice) from None


class _Wire:
    """A socket as `http.client` uses it, whose reads ask the `Watch`. Only `shut` closes it."""

    def __init__(self, sock: socket.socket, watch: Watch) -> None:
        self._sock = sock
        self._watch = watch
        self._reader = _WireReader(sock, watch)
        sock.settimeout(POLL_S)

    def end(self) -> None:
        """Nothing more is expected: from now on, silence is the end."""
        self._reader.is_at_end = True

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._watch.patience.stall_s)
        self._sock.sendall(data)
        self._sock.settimeout(POLL_S)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self._reader, 64 << 10)

    def close(self) -> None:
        """Called by `http.client` before the body is read."""

    def shut(self) -> None:
        self._sock.close()


class _WireReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, watch: Watch) -> None:
        super().__init__()
        self._sock, self._watch = sock, watch
        self.is_at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  # as in its base
        while True:
            try:
                count = self._sock.recv_into(buffer)
            except TimeoutError:
                if self.is_at_end:
                    return 0
                self._watch.received(0)
                continue
            self._watch.received(count)
            return count


class _Answer:
    """The head of an answer, and its body."""

    def __init__(self, wire: _Wire, response: http.client.HTTPResponse) -> None:
        self.wire, self.response = wire, response
        self.status, self.reason, self.head = response.status, response.reason, response.headers

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.response.close()
        self.wire.shut()


def _http_version(head: Message) -> str:
    """`etag "…"` or `modified DATE +LENGTH`; empty if the store tells neither."""
    etag, modified = head.get("ETag", ""), head.get("Last-Modified", "")
    if etag:
        return f"etag {etag.strip()}"
    length = head.get("Content-Range", head.get("Content-Length", "")).rpartition("/")[2]
    return f"modified {modified.strip()} +{length}" if modified else ""


def _is_strong(head: Message) -> bool:
    """Whether the version proves that two contents are equal (RFC 9110, 8.8)."""
    if "ETag" in head:
        return not head["ETag"].strip().startswith("W/")
    try:
        age = parsedate_to_datetime(head["Date"]) - parsedate_to_datetime(head["Last-Modified"])
    except (KeyError, ValueError, TypeError):
        return False
    return age.total_seconds() >= LATE_VALIDATOR_S


class HttpDownload:
    """A file that comes over HTTP; a `Download`."""

    is_copy = False

    def __init__(self, file: StoredFile, answer: _Answer, watch: Watch, start: int, version: str) -> None:
        self._file, self._answer, self._watch = file, answer, watch
        head = answer.head
        encoding = head.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            what = f"the store sends it compressed ({quoted(encoding)}), although that was not asked for"
            advice = "let the store send it as it is, without Content-Encoding"
            raise StoreError(what, where=str(file), help=advice, status=502)
        if head.get_content_type() == "text/html":
            what = "the store answers with a web page instead of the file"
            raise StoreError(what, where=str(file), help="check the URL, and whether it needs a token", status=404)
        length = head.get("Content-Length")
        announced = int(length) if length and re.fullmatch(r"[0-9]{1,18}", length) else None
        if (length is not None and announced is None) or len(set(head.get_all("Content-Length", []))) > 1:
            what = f"the store announces {quoted(length)} bytes"
            raise StoreError(what, where=str(file), help="ask who runs the store", status=502)
        self._is_chunked = bool(answer.response.chunked)
        self.start, self.total_bytes = 0, None if self._is_chunked else announced
        self.version, self.is_resumable = _http_version(head), _is_strong(head)
        self.sha256 = _s3_digest(head) if answer.status == 200 else ""  # of a range it is that of a part
        if answer.status == 206:
            self._resume(start, version, announced)
        self.has_end = self._is_chunked or self.total_bytes is not None
        answer.response.length = None  # read to the end of the connection, so that too many bytes are noticed
        self._left = None if self.total_bytes is None else self.total_bytes - self.start

    def _resume(self, start: int, version: str, announced: int | None) -> None:
        """The store sends a range: check that it is the one that was asked for."""
        given = self._answer.head.get("Content-Range", "")
        found = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", given)
        if (
            not start
            or found is None
            or int(found[1]) != start
            or found[3] == "*"
            or int(found[2]) + 1 != int(found[3])
        ):
            what = f"the store sends a range that was not asked for: {quoted(given)}"
            raise StoreError(what, where=str(self._file), help="ask who runs the store", status=502)
        total = int(found[3])
        if announced is not None and announced != total - start and not self._is_chunked:
            what = f"the store announces {announced:,} bytes for a range of {total - start:,}"
            raise StoreError(what, where=str(self._file), help="ask who runs the store", status=502)
        self.start, self.total_bytes, self.version, self.is_resumable = start, total, version, True

    def read(self) -> bytes:
        with self._watch.asking(), _http_errors(self._file):
            if self._left == 0 and not self._is_chunked:
                return self._beyond()
            chunk = self._answer.response.read1(min(CHUNK_BYTES, self._left or CHUNK_BYTES))
            if self._left is not None:
                self._left = max(0, self._left - len(chunk))
            return chunk

    def _beyond(self) -> bytes:
        """What comes after the last byte: usually nothing."""
        self._answer.wire.end()
        with contextlib.suppress(OSError):
            return self._answer.response.read1(1)
        return b""

    def close(self) -> None:
        self._answer.close()


# S3


class S3Store(HttpStore):
    """Objects of S3 and of stores that are compatible with it, as the environment of this process says
    (`AwsAccount.of`), which is read at each request."""

    def __init__(self, *, environment: Mapping[str, str] = os.environ, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls=tls)
        self._environment = environment

    def _url_of(self, file: StoredFile) -> str:
        parts = urlsplit(file.location)
        return AwsAccount.of(self._environment).url(parts.netloc, parts.path[1:])

    def _authorization(self, url: SplitResult, user: str) -> dict[str, str]:
        account = AwsAccount.of(self._environment)
        if not account.may_sign(url):
            return {}
        return account.signed(url, datetime.now(UTC), {"x-amz-checksum-mode": "ENABLED"})

    def _refused(self, file: StoredFile, answer: "_Answer", redirected: str) -> Exception:
        """The error with the code that the store gives in the body of its answer, and what to do about it."""
        raw, head = b"", answer.head
        with contextlib.suppress(OSError, http.client.HTTPException, InterruptedTransferError):
            raw = answer.response.read(REFUSAL_BYTES_MAX)
        found: dict[str, str] = dict(re.findall(r"<(Code|Region)>([\x21-\x7e]{1,200}?)</", raw.decode("latin-1")))
        code, status = found.get("Code", ""), answer.status
        region = head.get("x-amz-bucket-region") or found.get("Region", "")
        if not code and status not in (301, 307, 400, 401, 403):
            return _refused(file, answer, redirected)
        account = AwsAccount.of(self._environment)
        if status in (408, 425, 429) or status >= 500:
            what = f"{file}: the store answers {status} {shortened(code)}"
            return InterruptedTransferError(what, "try again later, or ask who runs the store")
        what = f"the store refuses it: {f'{status} {shortened(code)}'.strip()}"
        if region and region != account.region and status in (301, 307, 400):
            what += f"; the bucket is in region {quoted(region)}, not {quoted(account.region)}"
            advice = f"set {REGIONS[0]}={shortened(region)}"
        elif not account.key_id and status in (401, 403):
            advice = f"set {KEY_ID} and {SECRET} in the environment of this process, or let everybody read the object"
        else:
            advice = S3_ADVICE.get(code, S3_ADVICE[""])
        return StoreError(what, where=str(file), help=advice, status=status)


S3_ADVICE: Final[Mapping[str, str]] = {
    "": "check the URL, AWS_ENDPOINT_URL and AWS_REGION",
    "AccessDenied": "let this key read the object (s3:GetObject), and check the URL: without s3:ListBucket, a store "
    "answers the same for an object that is not there",
    "ExpiredToken": f"the session has ended: set {KEY_ID}, {SECRET} and {TOKEN} of a new one",
    "InvalidAccessKeyId": f"check {KEY_ID}, and AWS_ENDPOINT_URL: the store does not know this key",
    "InvalidToken": f"check {TOKEN}; it belongs to its {KEY_ID}",
    "NoSuchBucket": "check the bucket in the URL, and AWS_ENDPOINT_URL",
    "NoSuchKey": "check the URL: s3://BUCKET/KEY",
    "RequestTimeTooSkewed": "set the clock of this machine: it differs from the store's by more than 15 minutes",
    "SignatureDoesNotMatch": f"check {SECRET}: it does not belong to the key in {KEY_ID}",
}
"""What to do, by the code of an error of S3; "" for any other."""


def _s3_digest(head: Message) -> str:
    """The SHA-256 of an object in hexadecimal digits, if S3 has that of the whole; empty if it does not say."""
    given = head.get("x-amz-checksum-sha256", "").strip()
    if "-" in given or head.get("x-amz-checksum-type", "FULL_OBJECT") != "FULL_OBJECT":
        return ""  # the checksum of the checksums of its parts
    try:
        raw = b64decode(given, validate=True)
    except ValueError:
        return ""
    return raw.hex() if len(raw) == hashlib.sha256().digest_size else ""


STORES: Final[Mapping[str, Callable[[], Store]]] = {
    "file": FolderStore,
    "http": HttpStore,
    "https": HttpStore,
    "s3": S3Store,
}
"""By scheme, how its store is made."""
