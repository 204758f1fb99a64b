"""HTTP/1.1 as a client needs it, without sockets: request heads out, answers in.

Promises one `Answer` for each response, however its bytes are cut, or `BrokenAnswer` for bytes that are none. Bodies
are delimited by length, by chunks or by the end of the connection (RFC 9112, section 6).
"""

from typing import Final

from msgspec import Struct

HEAD_BYTES_MAX: Final = 64 * 1024
BODY_BYTES_MAX: Final = 256 * 2**20


class BrokenAnswer(Exception):  # a thing, as in the rest of this file
    """What the server sent is not HTTP, or too much of it."""


class Answer(Struct, frozen=True, gc=False):
    """One response."""

    status: int
    body: bytes
    is_last: bool
    """The server will close the connection."""
    slo_met: bool | None
    """What the server says in `x-slo-met`, if it does."""


class RequestHead:
    """Heads of requests that differ in their time budget alone."""

    __slots__ = ("_after", "_before")

    def __init__(self, *, path: str, host: str, slo_ms: float, content_bytes: int, json_bytes: int) -> None:
        is_binary = json_bytes != content_bytes
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {host}",
            "user-agent: sloop-load",
            f"content-type: {'application/octet-stream' if is_binary else 'application/json'}",
            f"content-length: {content_bytes}",
            *([f"inference-header-content-length: {json_bytes}"] if is_binary else []),
            f"x-slo-ms: {slo_ms:.6g}",
        ]
        self._before = "\r\n".join(lines).encode("ascii")
        self._after = self._before + b"\r\n\r\n"

    def render(self, elapsed_ns: int) -> bytes:
        """The head of a request that has already been `elapsed_ns` on its way."""
        if elapsed_ns == 0:
            return self._after
        return b"%b\r\nx-elapsed-ms: %.3f\r\n\r\n" % (self._before, elapsed_ns / 1e6)


class AnswerReader:
    """Puts one response after another together from the bytes of a connection."""

    __slots__ = ("_at", "_body_start", "_buffer", "_chunks", "_fields", "_is_old", "_length", "_status")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._forget()

    def _forget(self) -> None:
        self._body_start = self._at = 0
        self._chunks: list[bytes] = []
        self._status = 0
        self._is_old = False
        self._length = 0
        self._fields: dict[bytes, bytes] = {}

    def feed(self, received: bytes) -> Answer | None:
        """Take bytes; the answer if they complete it. Bytes beyond it, which nobody asked for, are an error."""
        self._buffer += received
        while self._body_start == 0:
            if not self._read_head():
                return None
        if self._length < 0:
            self._check_room()
            return self._chunked() if self._is_chunked else None
        end = self._body_start + self._length
        if len(self._buffer) < end:
            return None
        return self._finish(bytes(self._buffer[self._body_start : end]), end)

    def close(self) -> Answer | None:
        """The connection ended: the answer whose end that marks, if there is one."""
        if self._body_start and self._length < 0 and not self._is_chunked:
            return self._finish(bytes(self._buffer[self._body_start :]), len(self._buffer))
        return None

    @property
    def _is_chunked(self) -> bool:
        return self._fields.get(b"transfer-encoding", b"").lower().endswith(b"chunked")

    def _read_head(self) -> bool:
        """Whether the head is complete; provisional 1xx heads are passed over."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise BrokenAnswer(f"no end of the head within {HEAD_BYTES_MAX} bytes")
            if not b"HTTP/1.".startswith(self._buffer[:7]):
                raise BrokenAnswer("not HTTP/1")
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        status = _status_of(lines[0])
        if 100 <= status < 200:
            del self._buffer[: end + 4]
            return bool(self._buffer) and self._read_head()
        self._status = status
        self._is_old = lines[0].startswith(b"HTTP/1.0")
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            self._fields[name.strip().lower()] = value.strip()
        self._length = self._length_of_body()
        self._body_start = self._at = end + 4
        return True

    def _length_of_body(self) -> int:
        """Bytes, or -1 where chunks or the end of the connection delimit the body."""
        if self._status in (204, 304):
            return 0
        if b"transfer-encoding" in self._fields:
            return -1
        declared = self._fields.get(b"content-length")
        if declared is None:
            return -1
        if not declared.isdigit() or len(declared) > 12 or int(declared) > BODY_BYTES_MAX:
            raise BrokenAnswer(f"content-length {declared[:20]!r}")
        return int(declared)

    def _check_room(self) -> None:
        if len(self._buffer) - self._body_start > BODY_BYTES_MAX:
            raise BrokenAnswer(f"a body of over {BODY_BYTES_MAX} bytes")

    def _chunked(self) -> Answer | None:
        """Take the chunks that have come, from where the last call stopped."""
        while True:
            line_end = self._buffer.find(b"\r\n", self._at)
            if line_end < 0:
                return None
            size = _chunk_size(bytes(self._buffer[self._at : line_end]))
            if size == 0:
                return self._trailed(line_end)
            after = line_end + 2 + size + 2
            if len(self._buffer) < after:
                return None
            self._chunks.append(bytes(self._buffer[line_end + 2 : after - 2]))
            self._at = after

    def _trailed(self, last_line: int) -> Answer | None:
        """After the last chunk there may be trailer fields, then an empty line."""
        if self._buffer[last_line : last_line + 4] == b"\r\n\r\n":
            return self._finish(b"".join(self._chunks), last_line + 4)
        end = self._buffer.find(b"\r\n\r\n", last_line)
        return None if end < 0 else self._finish(b"".join(self._chunks), end + 4)

    def _finish(self, body: bytes, end: int) -> Answer:
        if len(self._buffer) > end:
            raise BrokenAnswer("more bytes than the answer has")
        met = self._fields.get(b"x-slo-met")
        answer = Answer(self._status, body, self._closes(), None if met is None else met.lower() == b"true")
        self._buffer.clear()
        self._forget()
        return answer

    def _closes(self) -> bool:
        """Whether the server will close the connection (RFC 9112, section 9.3)."""
        options = {option.strip() for option in self._fields.get(b"connection", b"").lower().split(b",")}
        if b"close" in options or (self._length < 0 and not self._is_chunked):
            return True
        return self._is_old and b"keep-alive" not in options


def _status_of(line: bytes) -> int:
    """Of `HTTP/1.1 200 OK`."""
    code = line[9:12]
    if not line.startswith(b"HTTP/1.") or line[8:9] != b" " or not code.isdigit() or line[12:13] not in (b"", b" "):
        raise BrokenAnswer(f"status line {line[:40]!r}")
    return int(code)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) <= 8 or digits.strip(b"0123456789abcdefABCDEF"):
        raise BrokenAnswer(f"chunk size {line[:20]!r}")
    return int(digits, 16)
