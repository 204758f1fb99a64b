"""A small web server that keeps model files as badly as a test wants: slow, with wrong lengths, or breaking off; and
one that sends them only if URLs are signed."""

import hashlib
import hmac
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Self
from urllib.parse import parse_qsl, quote


@dataclass
class Served:
    """A file, and what is wrong with how it is served."""

    content: bytes = b""
    etag: str | None = None
    """By default the digest of the content; empty: none."""
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    ranges: bool = True
    announced: int | None = None
    """The Content-Length, if it is not the right one; -1: none."""
    chunked: bool = False
    drops: list[int] = field(default_factory=list)
    """For each of the next requests: the bytes of the body after which the connection is reset."""
    stalls: int | None = None
    """The bytes of the body after which nothing comes any more."""
    hold: threading.Event | None = None
    """The second half of the body waits for it."""
    drip_s: float = 0.0
    """The pause after each byte."""
    beyond: bytes = b""
    """What follows the body."""
    keeps_open: bool = False
    token: str = ""
    raw: bytes | None = None
    """The whole answer."""

    @property
    def version(self) -> str:
        return f'"{hashlib.md5(self.content).hexdigest()}"' if self.etag is None else self.etag


class BadStore:
    """Serves `files` by path, one thread for each connection, and remembers the requests."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.sent_bytes: dict[str, int] = {}
        self._ends = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._listener.close()

    def asked(self, path: str) -> list[dict[str, str]]:
        """The headers of the requests for a path, with any query."""
        return [headers for found, headers in self.requests if path in (found, found.partition("?")[0])]

    def _accept(self) -> None:
        while not self._ends.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head and (chunk := connection.recv(65536)):
                    head += chunk
                lines = head.decode("latin-1").split("\r\n")
                path = lines[0].split(" ")[1]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                self.requests.append((path, headers))
                own = path if path in self.files else path.partition("?")[0]
                nothing = Served(b"nothing here", status=404, headers={"Content-Type": "text/plain"})
                headers["method"], headers["target"] = lines[0].split(" ")[0], path
                self._answer(connection, own, self.files.get(own) or nothing, headers)
            except (OSError, IndexError):
                return

    def _answer(self, connection: socket.socket, path: str, file: Served, headers: Mapping[str, str]) -> None:
        if file.raw is not None:
            connection.sendall(file.raw)
            return
        status, body, start, given = file.status, file.content, 0, dict(file.headers)
        if file.token and headers.get("authorization") != file.token:
            status, body = 401, b""
        if file.version:
            given.setdefault("ETag", file.version)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if status == 200 and headers.get("if-none-match") == file.version != "":
            status, body = 304, b""
        elif status == 200 and asked and file.ranges and headers.get("if-range", file.version) == file.version:
            status, start = 206, int(asked[1])
            end = int(asked[2]) + 1 if asked[2] else len(body)
            given["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
            if start >= len(body):
                status, given["Content-Range"] = 416, f"bytes */{len(body)}"
            body = body[start:end]
        if file.chunked:
            given["Transfer-Encoding"] = "chunked"
        elif file.announced != -1:
            given["Content-Length"] = str(
                len(body) + (0 if file.announced is None else file.announced - len(file.content))
            )
        lines = [f"HTTP/1.1 {status} Said So", *(f"{name}: {value}" for name, value in given.items())]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        if headers["method"] != "HEAD":
            self._send_body(connection, path, file, body)

    def _send_body(self, connection: socket.socket, path: str, file: Served, body: bytes) -> None:
        end = file.drops.pop(0) if file.drops else len(body) + 1
        if file.stalls is not None:
            end = file.stalls
        step = 1 if file.drip_s else 64 << 10
        half = len(body) // 2 if file.hold is not None else -1
        place = 0
        while place < min(end, len(body)):
            if place <= half < place + step or place == half:
                step_now = half - place
                if step_now == 0 and file.hold is not None:
                    file.hold.wait(20)
                    half, step_now = -1, step
            else:
                step_now = step
            piece = body[place : min(place + step_now, end)]
            self.sent_bytes[path] = self.sent_bytes.get(path, 0) + len(piece)  # before the client can have read it
            if file.chunked:
                connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            else:
                connection.sendall(piece)
            place += len(piece)
            if file.drip_s and self._ends.wait(file.drip_s):
                return
        if file.stalls is not None:
            self._ends.wait(20)
        elif end <= len(body):
            return
        if file.chunked:
            connection.sendall(b"0\r\n\r\n")
        connection.sendall(file.beyond)
        if file.keeps_open:
            self._ends.wait(20)


class SigningStore(BadStore):
    """An object store: refuses requests as S3 does unless their URLs are signed by `KEY_ID`, for this region, at about
    this time. It computes signatures on its own, from what has arrived (AWS, Signature Version 4, query parameters)."""

    KEY_ID, SECRET, REGION = "AKIDTEST", "a/secret+of=the test", "eu-test-1"
    MAY_BE_LATE_S = 900

    def __init__(self) -> None:
        super().__init__()
        self.public: set[str] = set()
        """Paths that everybody may read."""
        self.token = ""
        """Of the session, if it is one."""

    def environment(self, **others: str) -> dict[str, str]:
        """What tells a client of this store."""
        found = {"AWS_ACCESS_KEY_ID": self.KEY_ID, "AWS_SECRET_ACCESS_KEY": self.SECRET, "AWS_REGION": self.REGION}
        return {**found, "AWS_ENDPOINT_URL": self.url, **others}

    def _answer(self, connection: socket.socket, path: str, file: Served, headers: Mapping[str, str]) -> None:
        code = self._refusal(path, headers)
        if not code and file.status == 404:
            code = "NoSuchKey"
        if not code:
            super()._answer(connection, path, file, headers)
            return
        status = {"NoSuchKey": 404, "AuthorizationQueryParametersError": 400, "InvalidToken": 400}.get(code, 403)
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Region>{self.REGION}</Region></Error>".encode()
        head = f"HTTP/1.1 {status} No\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)

    def _refusal(self, path: str, headers: Mapping[str, str]) -> str:
        """The code of the error; empty if the request is right."""
        given = dict(parse_qsl(headers["target"].partition("?")[2]))
        if "X-Amz-Signature" not in given:
            return "" if path in self.public else "AccessDenied"
        signature, stamp = given.pop("X-Amz-Signature"), given["X-Amz-Date"]
        key_id, day, region, *_ = given["X-Amz-Credential"].split("/")
        sent = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        late_s = abs((datetime.now(UTC) - sent).total_seconds())
        wrong = {
            "InvalidAccessKeyId": key_id != self.KEY_ID,
            "AuthorizationQueryParametersError": region != self.REGION,
            "RequestTimeTooSkewed": late_s > self.MAY_BE_LATE_S or not stamp.startswith(day),
            "InvalidToken": given.get("X-Amz-Security-Token", "") != self.token,
            "AccessDenied": any(name.startswith("x-amz-") for name in headers),  # they would have to be signed too
        }
        if code := next((code for code, is_wrong in wrong.items() if is_wrong), ""):
            return code
        query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(given.items()))
        request = "\n".join(["GET", path, query, f"host:{headers['host']}", "", "host", "UNSIGNED-PAYLOAD"])
        key = ("AWS4" + self.SECRET).encode()
        for part in (day, region, "s3", "aws4_request"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        scope = f"{day}/{region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        right = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        return "" if hmac.compare_digest(right, signature) else "SignatureDoesNotMatch"
