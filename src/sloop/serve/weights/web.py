"""Reads files of web servers over HTTP/1.1, whole or from a byte on (RFC 9110, 14), with the standard library only.

Lengths are checked in both directions: too few bytes, and too many. A file is read on only if it has a strong ETag, and
only if the answer shows the same one. Redirects never carry a user or a token to another host, and lead from https to
https only. Proxies are not used.
"""

import contextlib
import http.client
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit, urlunsplit

from sloop.errors import InputError, MachineError
from sloop.serve.weights.sources import (
    CHUNK_BYTES,
    SAFE,
    WEAK,
    Download,
    InterruptedTransferError,
    StoredFile,
    StoreError,
    Watch,
    is_strong,
    label,
)
from sloop.text import host_and_port, quoted, shortened

REDIRECTS_MAX: Final = 5
REDIRECTS: Final = (301, 302, 303, 307, 308)
INTERIM_MAX: Final = 8
BEYOND_S: Final = 0.1
"""How long to wait for bytes after the announced end, from a store that keeps the connection open."""
RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class WebStore:
    """Files of web servers.

    `token_file` has lines `HOST TOKEN` or `HOST NAME: VALUE` (`HOST:PORT` for a port of its own): what to send to that
    host as a bearer token or as another header, only with TLS or to this machine. It is read at each request.
    """

    def __init__(self, *, token_file: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._token_file, self._tls = token_file, tls

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        wanted = range_from(start, version)
        answer = self._answer(file, watch, wanted)
        if wanted and (answer.status in (304, 416) or (answer.status == 206 and version_in(answer.headers) != version)):
            answer.close()
            answer, start = self._answer(file, watch, {}), 0
        return download_of(file, answer, watch, start)

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        wanted = {"Range": "bytes=0-0"}  # a new version is not read here
        if '"' in known:
            wanted["If-None-Match"] = known
        elif known.startswith(WEAK):
            wanted["If-Modified-Since"] = known.removeprefix(WEAK).partition(" +")[0]
        with contextlib.closing(self._answer(file, watch, wanted)) as answer:
            return known if answer.status == 304 else version_in(answer.headers)

    def _answer(self, file: StoredFile, watch: Watch, headers: Mapping[str, str]) -> "Answer":
        """The answer to a GET, after redirects: 200, 206, 304 or 416. StoreError for any other."""
        with watch.asking():
            begin = location = self._url_of(file)
            user = file.user
            for _ in range(REDIRECTS_MAX + 1):
                url = urlsplit(location)
                target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                every = {**self._authorization(url, user), **headers}
                answer = ask(file, self._connected(file, url, watch), url.netloc, target, every, watch)
                leads = answer.headers.get("Location")
                if answer.status not in REDIRECTS or not leads:
                    break
                answer.close()
                location, user = _redirected(file, location, leads, user)
            else:
                what = f"it redirects more than {REDIRECTS_MAX} times"
                raise StoreError(what, where=str(file), help="give the last address", status=302)
            if answer.status in (200, 206) or (answer.status in (304, 416) and headers):
                return answer
            with contextlib.closing(answer):
                raise self._refused(file, answer, "" if location == begin else f" (redirected to {label(location)})")

    def _url_of(self, file: StoredFile) -> str:
        """Where a file is to be asked for."""
        return file.location

    def _refused(self, file: StoredFile, answer: "Answer", redirected: str) -> Exception:
        """The error for a status that is no success; `redirected` says where the last request went, if elsewhere."""
        status = answer.status
        said = f"{status} {shortened(answer.response.reason)}".strip()
        if status in (408, 425, 429) or status >= 500:
            what = f"{file}: the store answers {said}{redirected}"
            return InterruptedTransferError(what, "try again later, or ask who runs the store")
        what, advice = f"the store answers {said}{redirected}", "check the URL"
        if status in (401, 403):
            what = f"the store does not permit to read it{redirected}: {said}"
            advice = "give a token for its host in the token file, or check the user's rights there"
        elif status in (404, 410):
            what = f"the store has no such file{redirected}: {said}"
        return StoreError(what, where=str(file), help=advice, status=status)

    def _connected(self, file: StoredFile, url: SplitResult, watch: Watch) -> socket.socket:
        host, port = str(url.hostname), _port(url)
        place, advice = host_and_port(host, port), "check the URL, and that the store can be reached from this machine"
        sock = None
        try:
            sock = socket.create_connection((host, port), timeout=watch.patience.connect_s)
            if url.scheme != "https":
                return sock
            self._tls = self._tls or ssl.create_default_context()
            sock = secure = self._tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            watch.use(secure)
            secure.do_handshake()
            return secure
        except ssl.SSLCertVerificationError as error:
            watch.forget()
            secure.close()
            advice = "check the URL, or name the file of its authority in SSL_CERT_FILE"
            what = f"the certificate of {place} is not accepted: {error.verify_message}"
            raise MachineError(what, help=advice) from error
        except (OSError, ValueError) as error:
            what, why = f"no connection to {place}", getattr(error, "strerror", None) or error
            if sock is not None:
                sock.close()
                watch.check()
                what = f"no TLS with {place}"
            elif isinstance(error, socket.gaierror | UnicodeError):
                what, why = f"the host {host!r} is not known", why if isinstance(error, OSError) else "not a valid name"
            if isinstance(error, ssl.SSLError):
                raise MachineError(f"{file}: {what}: {why}", help="check the port, and whether it is http:") from error
            raise InterruptedTransferError(f"{file}: {what}: {why}", advice) from error

    def _authorization(self, url: SplitResult, user: str) -> dict[str, str]:
        if user:
            return {"Authorization": f"Basic {b64encode(user.encode()).decode()}"}
        if self._token_file is None:
            return {}
        host = url.hostname or ""
        place = f"[{host}]" if ":" in host else host
        tokens = _tokens(self._token_file)
        found = tokens.get(f"{place}:{_port(url)}") or tokens.get(place) or tokens.get(host) or {}
        if found and url.scheme != "https" and host not in ("localhost", "127.0.0.1", "::1"):
            what = f"the token for {host} would be sent without TLS"
            raise InputError(what, where=str(self._token_file), help="use an https: URL")
        return found


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _tokens(path: Path) -> dict[str, dict[str, str]]:
    """By host in lower case, with a port or without, the header that is sent to it."""
    found: dict[str, dict[str, str]] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"cannot read it: {reason}", where=str(path), help="check the path") from None
    for place, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        host, _, rest = line.partition(" ")
        header = re.fullmatch(r"([A-Za-z0-9-]+):\s*([\x21-\x7e][\x20-\x7e]*)", rest.strip())
        if header is None and not re.fullmatch(r"[\x21-\x7e]+", rest.strip()):
            advice = "write HOST TOKEN or HOST NAME: VALUE"
            raise InputError("no host with a token", where=f"{path}:{place}", help=advice)
        found[host.lower()] = {header[1]: header[2]} if header else {"Authorization": f"Bearer {rest.strip()}"}
    return found


def _redirected(file: StoredFile, location: str, leads: str, user: str) -> tuple[str, str]:
    """Where a redirect leads, and the user to send there."""
    advice = "give the last address, with https"
    try:
        before, after = urlsplit(location), urlsplit(urljoin(location, leads))
        is_valid = bool(after.hostname) and after.port != 0 and not re.search(r"[\x00-\x20\x7f]", leads)
    except ValueError:
        is_valid = False
    if not is_valid or after.scheme not in ("http", "https"):
        raise StoreError("it redirects to what is no web address", where=str(file), help=advice, status=302)
    if before.scheme == "https" and after.scheme == "http":
        what = f"it redirects to {label(after.geturl())}, without TLS"
        raise StoreError(what, where=str(file), help=advice, status=302)
    is_same = (before.scheme, before.hostname, before.port) == (after.scheme, after.hostname, after.port)
    place = after.netloc.rpartition("@")[2]
    path, arguments = quote(after.path, safe=SAFE), quote(after.query, safe=SAFE + "?")
    return urlunsplit((after.scheme, place, path, arguments, "")), user if is_same else ""


# One request and its answer, which peers use too


class Answer:
    """The head of an answer, and the connection that its body comes from."""

    def __init__(
        self, sock: socket.socket, response: http.client.HTTPResponse, watch: Watch, quiet_s: float | None
    ) -> None:
        self.response, self._socket, self._watch, self._quiet_s = response, sock, watch, quiet_s
        self.status, self.headers = response.status, response.headers

    def watch_again(self) -> None:
        """Wait for this connection after another one was used."""
        self._watch.use(self._socket, self._quiet_s)

    def close(self) -> None:
        """End the connection."""
        self._watch.forget()
        self.response.close()
        self._socket.close()

    def beyond(self) -> bytes:
        """What comes after the last byte: usually nothing."""
        self._socket.settimeout(BEYOND_S)
        with contextlib.suppress(OSError):
            return self.response.read1(1)
        return b""


class FinalResponse(http.client.HTTPResponse):
    """An answer that may come after at most `INTERIM_MAX` interim ones (100 Continue), which the standard library would
    read without end."""

    _statuses = 0

    def _read_status(self) -> tuple[str, int, str]:
        self._statuses += 1
        if self._statuses > INTERIM_MAX + 1:
            raise http.client.HTTPException(f"more than {INTERIM_MAX} interim answers")
        found: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]  # not in the stubs
        return found


def ask(
    file: StoredFile,
    sock: socket.socket,
    host: str,
    target: str,
    headers: Mapping[str, str],
    watch: Watch,
    quiet_s: float | None = None,
) -> Answer:
    """Send a GET over a connection, which then belongs to the answer, and receive the head of the answer."""
    every = {"Host": host, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close", **headers}
    try:
        watch.use(sock, quiet_s)
        with _errors(file, watch):
            connection = http.client.HTTPConnection(host)
            connection.sock, connection.response_class = sock, FinalResponse
            connection.request("GET", target, headers=every)
            return Answer(sock, connection.getresponse(), watch, quiet_s)
    except BaseException:
        watch.forget()
        sock.close()
        raise


def range_from(start: int, version: str) -> dict[str, str]:
    """The headers that ask for the rest of this version of a file; none if that cannot be told."""
    return {"Range": f"bytes={start}-", "If-Range": version} if start and is_strong(version) else {}


def version_in(headers: Message) -> str:
    """The ETag, or the Last-Modified and the length as a weak version; empty if the store tells neither."""
    etag, modified = headers.get("ETag", "").strip(), headers.get("Last-Modified", "").strip()
    if etag or not modified:
        return etag
    length = headers.get("Content-Range", headers.get("Content-Length", "")).rpartition("/")[2]
    return f"{WEAK}{modified} +{length}"


def download_of(file: StoredFile, answer: Answer, watch: Watch, start: int) -> Download:
    """The file in an answer to `range_from`, whose head is checked. StoreError if it is wrong."""
    headers, response = answer.headers, answer.response
    wrong, begin = "", 0
    encoding, lengths = headers.get("Content-Encoding", "").lower(), headers.get_all("Content-Length", [])
    if encoding not in ("", "identity"):
        wrong = f"the store sends it compressed ({quoted(encoding)}), although that was not asked for"
    elif headers.get_content_type() == "text/html":
        wrong = "the store answers with a web page instead of the file"
    elif len(set(lengths)) > 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0] if lengths else "0"):
        wrong = f"the store announces {quoted(lengths[0])} bytes"
    total = int(lengths[0]) if lengths and not wrong and not response.chunked else None
    if answer.status == 206 and not wrong:
        given = headers.get("Content-Range", "")
        found = RANGE.fullmatch(given)
        if not start or found is None or int(found[1]) != start or int(found[2]) + 1 != int(found[3]):
            wrong = f"the store sends a range that was not asked for: {quoted(given)}"
        elif total not in (None, int(found[3]) - start):
            wrong = f"the store announces {total:,} bytes for a range of {int(found[3]) - start:,}"
        else:
            begin, total = start, int(found[3])
    if wrong:
        answer.close()
        advice = "check the URL, and whether it needs a token; else ask who runs the store"
        raise StoreError(wrong, where=str(file), help=advice, status=404 if "web page" in wrong else 502)
    has_end = bool(response.chunked) or total is not None
    chunks = _chunks(file, answer, watch, None if total is None else total - begin)
    return Download(chunks, total, version_in(headers), begin, has_end=has_end, close=answer.close)


def _chunks(file: StoredFile, answer: Answer, watch: Watch, left: int | None) -> Iterator[bytes]:
    """The body of an answer, which announces so many bytes, and what comes after it."""
    response = answer.response
    if not response.chunked:
        response.length = None  # so that too many bytes are noticed
    while True:
        with watch.asking(), _errors(file, watch):
            chunk = answer.beyond() if left == 0 else response.read1(min(CHUNK_BYTES, left or CHUNK_BYTES))
            watch.received(len(chunk))
        if not chunk:
            return
        left = None if left is None else max(0, left - len(chunk))
        yield chunk


@contextlib.contextmanager
def _errors(file: StoredFile, watch: Watch) -> Iterator[None]:
    """Errors of a connection as those of a transfer, with the name of the file."""
    try:
        try:
            yield
        except (OSError, http.client.HTTPException):
            watch.check()  # a connection that was cut breaks
            raise
    except InterruptedTransferError as error:
        raise InterruptedTransferError(f"{file}: {error}", error.error.help) from None
    except (http.client.RemoteDisconnected, http.client.IncompleteRead):
        raise InterruptedTransferError(f"{file}: the store closed the connection before the end") from None
    except http.client.HTTPException as error:
        what = f"the answer is not HTTP ({type(error).__name__})"
        advice = "check host and port, and whether it needs https"
        raise StoreError(what, where=str(file), help=advice, status=502) from None
    except TimeoutError:
        what = f"{file}: no byte has come for {watch.quiet_s:g} s"
        raise InterruptedTransferError(what) from None
    except OSError as error:
        raise InterruptedTransferError(f"{file}: the connection broke: {error.strerror or error}") from None
