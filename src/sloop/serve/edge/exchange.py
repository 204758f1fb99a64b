"""One HTTP request and its answer: what a head may be, how a body is kept and inflated, how an answer begins.

It makes the checks that RFC 9110 and 9112 require and `httptools` leaves out.
"""

import asyncio
import logging
import time
import zlib
from asyncio import Task
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from sloop.serve.edge.bodies import BodyMemory, BodyReservation
from sloop.serve.edge.identity import REQUEST_ID, TRACEPARENT, named
from sloop.serve.edge.refusal import Refusal, bad
from sloop.text import quoted

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
BINARY_HEADER: Final = "inference-header-content-length"
HEAD_BYTES_MAX: Final = 32 * 1024
LINE_BYTES_MAX: Final = 8 * 1024
LENGTH_DIGITS_MAX: Final = 15
HEAD_END: Final = b"\r\n\r\n"
KNOWN_HEADS_MAX: Final = 512
KNOWN_HEAD_BYTES_MAX: Final = 1024
KNOWN_FIELDS_MAX: Final = 32
"""Heads that need not be parsed again: how many are kept, and how large they may be."""
KEPT_METHODS: Final = frozenset(("GET", "HEAD", "POST"))
NOT_KEPT: Final = frozenset(
    (REQUEST_ID, TRACEPARENT, "content-encoding", "expect", "transfer-encoding", "upgrade", "x-elapsed-ms")
)
"""Headers of heads that are not kept: they decide how the body is received, or differ from one request to the next."""
INFLATERS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Encodings of bodies, and zlib's number for their format."""
INFLATED_BYTES: Final = 64 * 1024
"""How much is inflated at a time; others get their turn in between."""
PACKED_BYTES: Final = 16 * 1024
"""How much of it is given to zlib at a time, which copies what it has not yet inflated."""

_log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
Fields = tuple[tuple[str, str], ...]


class Respondent(Protocol):
    """The connection that a request came on."""

    address: str

    def answer(
        self, exchange: "Exchange", status: int, body: Buffer | Sequence[Buffer], content_type: str, headers: Fields
    ) -> None:
        """Send the answer of a request."""
        ...


class Exchange(Struct, eq=False):
    """One HTTP request, which must be answered once with `reply`. A struct, because it is made for each request."""

    connection: Respondent
    method: str
    headers: dict[str, str]
    """By lower-case name: `headers.get("x-slo-ms")`. The values of a repeated header are joined by commas. Requests
    with the same head share them."""
    began_ns: int
    """When the first byte of the request arrived, in `time.monotonic_ns`."""
    taken_ns: int = 0
    """When it was taken up, if it had to wait for that and is for inference."""
    path: str = ""
    query_string: str = ""
    """The parts of the URL before and after the question mark; percent-encoding in the path is decoded."""
    body: bytes | bytearray = b""
    limit_bytes: int = 0
    left_bytes: int = 0
    """The most bytes that the body may have, inflated, and how many are announced and have not arrived."""
    held_bytes: int = 0
    """The memory that is reserved for the body, in `bodies`."""
    bodies: BodyMemory | None = None
    hold: BodyReservation | None = None
    """Reserves it also from the quota of a model, if that has one."""
    inflater: "zlib._Decompress | None" = None
    """Of a compressed body, which is inflated when all of it has arrived."""
    is_open: bool = True
    is_last: bool = False
    """Whether the connection is closed after the answer."""
    awaits_continue: bool = False
    """Whether its client waits for `100 Continue` before it sends the body."""
    refusal: Refusal | None = None
    """Why it will not be served; its body is discarded."""
    request_id: str = ""
    """What the client calls the request, if that is known; see `name`."""
    on_read: Callable[[], None] | None = None
    """Called once when the body has been read, or need not be read."""
    on_gone: Callable[[], object] | None = None
    """Called if the client disconnects before the answer."""
    on_sent: Callable[[], None] | None = None
    """Called once when the answer has left, or cannot leave any more: what it was made of may be released."""

    @property
    def age_ns(self) -> int:
        """The time since the first byte arrived."""
        return time.monotonic_ns() - self.began_ns

    @property
    def address(self) -> str:
        """The client's address."""
        return self.connection.address

    def reply(
        self,
        status: int,
        body: Buffer | Sequence[Buffer],
        *,
        content_type: str = JSON,
        headers: Fields = (),
    ) -> None:
        """Answer the request. A body in several parts is sent without joining them; no part may change before
        `on_sent`. Has no effect if the client has disconnected."""
        if self.is_open:
            self.is_open = False
            self.connection.answer(self, status, body, content_type, headers)

    @property
    def name(self) -> str:
        """What the client calls the request; empty if it says nothing."""
        return self.request_id or named(self.headers.get(REQUEST_ID))

    def reply_error(self, status: int, what: str, fix: str = "", *, headers: Fields = ()) -> None:
        """Answer `{"error": …}`: what is wrong, the value, the client's name for the request, and the correction."""
        name = self.name
        self.reply(status, error_body(f"{what} (request {name})" if name else what, fix), headers=headers)

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error and the headers that its status requires."""
        headers: Fields = ()
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE or refusal.retry_after_s:
            headers = (("retry-after", str(max(1, refusal.retry_after_s))),)
        elif refusal.status == HTTPStatus.UNAUTHORIZED:
            headers = (("www-authenticate", "Bearer"),)
        self.reply_error(refusal.status, refusal.what, refusal.fix, headers=headers)

    def refuse_for(self, error: Exception) -> None:
        """Answer after an exception; one that is no `Refusal` is a bug."""
        if isinstance(error, Refusal):
            self.refuse(error)
            return
        _log.error("internal error while answering %s", self.path, exc_info=error)
        self.reply_error(500, "failed: internal error of the server", "see the server's log, and report it")

    def answer_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work` answer the request in a task of its own, which ends early if the client leaves. What it raises is
        answered."""
        answering = asyncio.get_running_loop().create_task(work)
        self.on_gone = answering.cancel
        _answering.add(answering)
        answering.add_done_callback(self._answered)

    def _answered(self, answering: Task[None]) -> None:
        _answering.discard(answering)
        error = None if answering.cancelled() else answering.exception()
        if answering.cancelled() or error is not None:
            self.on_gone = None  # it knows the task, and so the exception and all that its frames hold
        if isinstance(error, Exception):
            self.refuse_for(error)

    def receive(self, part: bytes, bodies: BodyMemory) -> None:
        """Keep a part of the body. Raises a `Refusal` if there is no room for it."""
        if not self.body:
            self._take(len(part), len(part), bodies)
            self.body = part
        else:
            self._take(len(part), len(self.body) + len(part), bodies)
            self._grow(part)

    def _grow(self, part: bytes) -> None:
        if type(self.body) is not bytearray:
            self.body = bytearray(self.body)
        self.body += part

    def _take(self, more: int, size: int, bodies: BodyMemory) -> None:
        """Take room for `more` bytes of a body, or of a compressed one, that then has `size` bytes."""
        if size > self.limit_bytes:
            raise bodies.too_large(size, self.limit_bytes, at_least=True)
        if self.hold is not None:
            self.hold.take(more)
        elif bodies.held_bytes + more > bodies.all_bytes_max:
            raise bodies.full()
        else:
            bodies.held_bytes += more
            self.bodies = bodies
        self.held_bytes += more

    def note_read(self) -> None:
        """Call `on_read`, once."""
        if self.on_read is not None:
            on_read, self.on_read = self.on_read, None
            on_read()

    def drop(self) -> None:
        """Forget the body and give back its room."""
        self.body = b""
        if self.on_read is not None:
            self.note_read()
        if self.hold is not None:
            self.hold.drop()
            self.hold = None
        elif self.bodies is not None:
            self.bodies.held_bytes -= self.held_bytes
            self.bodies = None
        self.held_bytes = 0

    async def inflate(self, inflater: "zlib._Decompress", bodies: BodyMemory) -> None:
        """Inflate the body. Raises a `Refusal` if that is too much, or not what its header says."""
        packed, self.body = self.body, b""
        for at in range(0, len(packed), PACKED_BYTES):
            left = bytes(packed[at : at + PACKED_BYTES])
            while left:
                left = self._inflate(inflater, left, bodies)
                await asyncio.sleep(0)
        if not inflater.eof:
            raise Refusal(400, "content-encoding: the compressed body ends too early", "send all of it")

    def _inflate(self, inflater: "zlib._Decompress", part: bytes, bodies: BodyMemory) -> bytes:
        """Inflate some of a part, so that a small body cannot become a large one without room. Returns what is left."""
        try:
            found = inflater.decompress(part, INFLATED_BYTES)
        except zlib.error as error:
            what = f"content-encoding: the body is not what it says ({error})"
            raise Refusal(400, what, "send gzip or deflate (zlib) as the header says") from None
        if found:
            self._take(len(found), len(self.body) + len(found), bodies)
            self._grow(found)
        if inflater.unused_data or (inflater.eof and not (part or found)):
            raise Refusal(400, "content-encoding: bytes follow the compressed body", "send one compressed body")
        return inflater.unconsumed_tail


_answering: Final[set[Task[None]]] = set()
"""The event loop knows its tasks only weakly."""


def error_body(what: str, fix: str = "") -> bytes:
    """The protocol's error object. It is a single string, because clients display that."""
    text = f"{what}; help: {fix}" if fix else what
    return msgspec.json.encode({"error": text.encode("utf-8", "backslashreplace").decode()})


STATUS_LINES: Final = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n" for each in HTTPStatus}
HEADS: Final[dict[tuple[int, str, Fields], bytes]] = {}
"""The heads of answers that are sent again and again."""
HEADS_MAX: Final = 256
BODILESS: Final = frozenset((HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED))


def head_of(status: int, content_type: str, headers: Fields) -> bytes:
    """The head of an answer, without the lines that differ from one to the next. A line break in a value, which could
    begin another answer, becomes a space."""
    found = HEADS.get((status, content_type, headers))
    if found is None:
        lines = "".join(f"{name}: {' '.join(value.split())}\r\n" for name, value in headers)
        kind = "" if status in BODILESS else f"content-type: {content_type}\r\n"
        found = f"{STATUS_LINES[status]}{kind}{lines}".encode("latin-1", "replace")
        if len(HEADS) < HEADS_MAX and len(found) < 512:
            HEADS[status, content_type, headers] = found
    return found


def check_head(exchange: Exchange, url: bytes, version: str) -> None:
    """Set the path and the query of a request. Raises a `Refusal` for a head that HTTP does not allow."""
    headers = exchange.headers
    if version not in ("1.1", "1.0"):
        raise Refusal(505, f"HTTP/{version} is not supported", "send HTTP/1.1")
    host = headers.get("host")
    if host is None and version == "1.1":
        raise Refusal(400, "the header 'host' is missing", "send it, as HTTP/1.1 requires")
    if host is not None and ", " in host:
        raise Refusal(400, "the header 'host' occurs twice", "send it once")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked":
            raise Refusal(501, f"transfer-encoding: {quoted(coding)} is not supported", "send the body chunked")
        if version == "1.0":
            raise Refusal(400, "transfer-encoding in HTTP/1.0", "send content-length, or HTTP/1.1")
    exchange.path, exchange.query_string = PATHS.get(url) or split_target(url, exchange.method)


class KnownHead(Struct, frozen=True, gc=False):
    """What was found in a head, and follows from its bytes alone. See `Exchange`."""

    method: str
    headers: dict[str, str]
    path: str
    query_string: str
    body_bytes: int
    limit_bytes: int


class KnownHeads:
    """The heads that clients send again and again, byte for byte, so that they are not parsed again.

    Only a head is kept that was accepted, whose message ends where `content-length` says, and after which the
    connection stays. Whatever depends on more than the head, such as whether a key is valid, is checked each time.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(self, data: bytes) -> KnownHead | None:
        """What is known of a request, if `data` is all of it and nothing else."""
        size = data.find(HEAD_END, 0, KNOWN_HEAD_BYTES_MAX) + len(HEAD_END)
        found = self._found.get(data[:size])
        return found if found is not None and found.body_bytes == len(data) - size else None

    def learn(self, data: bytes, exchange: Exchange) -> None:
        """Keep the head of a request. `data` is all of it and nothing else, as the parser has found."""
        headers, size = exchange.headers, data.find(HEAD_END, 0, KNOWN_HEAD_BYTES_MAX) + len(HEAD_END)
        if exchange.method not in KEPT_METHODS or len(headers) > KNOWN_FIELDS_MAX or not NOT_KEPT.isdisjoint(headers):
            return
        if exchange.refusal is not None or exchange.is_last:
            return
        body_bytes = int(headers.get("content-length", "0"))
        if size < len(HEAD_END) or body_bytes != len(data) - size:  # the parser has found its end elsewhere
            return
        if len(self._found) >= KNOWN_HEADS_MAX:
            self._found.clear()
        self._found[data[:size]] = KnownHead(
            exchange.method, headers, exchange.path, exchange.query_string, body_bytes, exchange.limit_bytes
        )


PATHS: Final[dict[bytes, tuple[str, str]]] = {}
"""Paths and queries of targets, as clients send them again and again."""
PATHS_MAX: Final = 1024


def split_target(url: bytes, method: str) -> tuple[str, str]:
    """The path and the query of a request's target. Raises a `Refusal` for what is none."""
    if len(url) > LINE_BYTES_MAX:
        raise line_too_long(len(url))
    target = url.decode("ascii", "replace")
    if not target.startswith("/"):
        target = path_of(target, method)
    if "#" in target:
        raise Refusal(400, "the request's target has a fragment", "omit what follows #")
    path, _, options = target.partition("?")
    found = unquote(path) if "%" in path else path, options
    if len(PATHS) < PATHS_MAX and len(url) < 256 and method != "OPTIONS":
        PATHS[url] = found
    return found


def path_of(target: str, method: str) -> str:
    """The path and query of a request's target that is not a path: a whole URL, as proxies send it, or `*`."""
    scheme, found, rest = target.partition("://")
    if found and scheme.lower() in ("http", "https"):
        end = min(at for at in (rest.find("/"), rest.find("?"), len(rest)) if at >= 0)
        if end == 0:
            raise Refusal(400, "the request's target has no host", "send a path")
        return rest[end:] if rest[end : end + 1] == "/" else f"/{rest[end:]}"
    if target == "*" and method == "OPTIONS":
        return target
    raise Refusal(400, f"{quoted(target)} is not a path", "send a path that begins with /")


def json_limit(headers: Mapping[str, str], bodies: BodyMemory) -> int:
    """The most bytes that a body may have: JSON is bounded more tightly than the binary tensors that may follow it."""
    declared = headers.get(BINARY_HEADER)
    if declared is None:
        return bodies.json_bytes_max
    if not (declared.isascii() and declared.isdigit() and len(declared) <= LENGTH_DIGITS_MAX):
        what = f"{quoted(declared)} is not a length"
        raise bad("Inference-Header-Content-Length", what, "send the length of the JSON in bytes")
    if int(declared) > bodies.json_bytes_max:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) <= bodies.json_bytes_max and "content-encoding" not in headers:
            what = f"{declared} exceeds the body's {length} bytes"
            raise bad("Inference-Header-Content-Length", what, "send the complete body")
        raise bodies.too_large(int(declared), bodies.json_bytes_max)
    return bodies.each_bytes_max


def accepts_gzip(accepted: str) -> bool:
    """Whether a client's `accept-encoding` names gzip, and not only to refuse it."""
    for each in accepted.lower().split(","):
        coding, _, weight = each.partition(";")
        if coding.strip() in ("gzip", "x-gzip"):
            return weight.strip().replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def malformed(error: Exception) -> Refusal:
    """The 400 for bytes that are not HTTP."""
    return Refusal(400, f"malformed HTTP ({error})", "send HTTP/1.1 as RFC 9112 describes it")


def line_too_long(size: int) -> Refusal:
    """The 414."""
    what = f"the request's target has {size} bytes or more; the limit is {LINE_BYTES_MAX}"
    return Refusal(414, what, "send parameters in the body")


def head_too_large() -> Refusal:
    """The 431."""
    what = f"the head exceeds {HEAD_BYTES_MAX} bytes"
    return Refusal(431, what, "send fewer or shorter headers")
