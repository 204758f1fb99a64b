"""The process behind the page: it follows the log of a server and answers browsers (`sloop.page`).

    python -m sloop.page.process LISTENING OUTPUT PARENT < SETUP

LISTENING is the descriptor of a listening socket, OUTPUT of a pipe with a copy of what the server writes to stderr. The
process ends with the server. What it cannot do, it says on the page; it never makes the
server wait.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from sloop.app.application import SystemChoice
from sloop.errors import InputError, SloopError
from sloop.page.files import asset, index
from sloop.page.listener import PageListener, Sessions
from sloop.page.picture import KEPT, Picture
from sloop.page.questions import ANSWER_CPU_S_MAX, Asked, PageQuestion, ShadowSystemSetup, ShadowSystemState
from sloop.page.start import PageSetup
from sloop.runlog import Header, read_log
from sloop.runlog.follow import BEHIND_NS, LogFollower
from sloop.runlog.segments import has_room, segments_in
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import Keys
from sloop.serve.processes import be_nice, begin, said_by, set_name
from sloop.serve.stderr import log_directly
from sloop.systems.replay import beginning_of
from sloop.units import NS_PER_S

TICK_S: Final = 1.0
"""Between two events of a viewer."""
READ_S: Final = 0.25
"""Between two looks into the log."""
HISTORY_BYTES: Final = 64 * 2**20
"""Of a run that is going on when this process starts, so much of the log is read."""
TROUBLE_S_MAX: Final = 60.0
"""Between two looks into a log that cannot be read."""
UNHEARD_S: Final = 2.0
"""A server that has not answered for this long is shown as hanging."""
LINES_MAX: Final = 1_000
LINE_CHARS: Final = 2_000
OUTPUT_BYTES: Final = 2**16
"""How many lines of the server's output are kept, how much of each, and how much is read at a time."""
SHADOW_LINE_BYTES: Final = 2**20
ANSWERS_MAX: Final = 2
"""Questions that are answered at the same time."""
ANSWER_S_MAX: Final = 90.0
TRIES_MAX: Final = 8
"""Requests that are tried at the same time; further ones wait."""
TRY_S_MAX: Final = 30.0
TRY_BYTES_MAX: Final = 4 * 2**20
"""Of the answer to a request that is tried."""


_log: Final = logging.getLogger("sloop.page")


class ServerPage:
    """The page of one server."""

    def __init__(self, setup: PageSetup) -> None:
        self._setup, self._folder = setup, Path(setup.folder)
        file = Path(setup.api_key_file) if setup.api_key_file else None
        keys = Keys(setup.api_key, file, must_read=False)  # the file may have been damaged since the server began
        sessions = Sessions(keys.accepts, is_required=keys.is_required)
        self.listener = PageListener(self._answer, self._first, sessions, setup.hosts, setup.limits)
        self._follower: LogFollower | None = None
        self._picture: Picture | None = None
        self._answering = 0
        self._tries = ThreadPoolExecutor(TRIES_MAX, "try")
        """Threads of their own: a slow model does not keep the page from asking whether the server is there."""
        self._heard_s = time.monotonic()
        self._trouble = ""
        """Why the page does not go on, although the server may."""
        self._shadows: dict[str, msgspec.Raw] = {}
        """By label, what each shadow said last."""
        self._lines, self._fresh_lines, self._rest = deque[str](maxlen=LINES_MAX), list[str](), b""
        """The last lines that the server wrote to stderr, those that no viewer knows yet, and the beginning of the
        next."""

    async def run(self, listening: socket.socket, output: int) -> None:
        """Serve until this process is ended."""
        os.set_blocking(output, False)
        asyncio.get_running_loop().add_reader(output, self._read_output, output)
        self.listener.start(listening)
        work = (self._follow(), self._tell(), self._listen(), *map(self._shadow, range(len(self._setup.shadows))))
        await asyncio.gather(*work)

    # The log

    async def _follow(self) -> None:
        """Read the log as it grows. Whatever is wrong with it, the page goes on, and begins anew ever more rarely."""
        pause_s = READ_S
        while True:
            try:
                if self._read():
                    await asyncio.sleep(0)
                    continue
                self._trouble, pause_s = self._outage, READ_S
            except Exception as error:  # other programs may have changed, cut, moved or deleted it
                why = error.what if isinstance(error, SloopError) else f"{type(error).__name__}: {error}"
                if why not in self._trouble:
                    _log.warning("the page cannot read the event log: %s", why)
                self._trouble = f"The event log cannot be read: {why}"
                self._begin_anew()
                pause_s = min(2 * pause_s, TROUBLE_S_MAX)
            await asyncio.sleep(pause_s)

    def _read(self) -> bool:
        """Take up new records; whether there were any."""
        if self._picture is None or self._follower is None:
            self._begin()
        assert self._follower is not None
        assert self._picture is not None
        records = self._follower.read()
        header = self._follower.header
        if header is not None and header.lost is not None and header.segment != self._picture.segment:
            self._begin_anew()  # what is missing may have changed anything: begin from the snapshot
            return True
        for now_ns, record in records:
            self._picture.append(now_ns, record)
        if not records:
            self._picture.reach(time.monotonic_ns() - self._setup.zero_ns - BEHIND_NS)
        return bool(records)

    @property
    def _outage(self) -> str:
        """Why the server cannot write its log, so that the page shows nothing new; empty if it can."""
        if has_room(self._folder):
            return ""
        return "The server cannot write its event log: the disk is full. Nothing newer is shown until it has room."

    def _begin_anew(self) -> None:
        """Forget what was read."""
        if self._follower is not None:
            self._follower.close()
        self._picture = self._follower = None

    def _begin(self) -> None:
        """Begin with the oldest segment that is not too much to read."""
        setup = self._setup
        segments = [segment for segment in segments_in(self._folder) if segment.run == setup.run]
        if not segments:
            raise InputError("the log of this server is no longer there", where=setup.folder)
        chosen, size = segments[-1], 0
        for segment in reversed(segments):
            size += segment.path.stat().st_size * (8 if segment.path.suffix == ".gz" else 1)
            header: Header = read_log(segment.path).header
            if size > HISTORY_BYTES and chosen is not segment:
                break
            if header.segment == 1 or header.has_snapshot:
                chosen = segment
            if header.lost is not None:
                break
        log = read_log(chosen.path)
        fold, where = beginning_of(log, KEPT).fold, {"server": setup.server, "log": setup.folder}
        self._picture = Picture(log.header, fold, setup.zero_unix_ns / NS_PER_S, where)
        self._follower = LogFollower(self._folder, setup.run, chosen.number)

    def _read_output(self, output: int) -> None:
        """Take up lines that the server has written to stderr."""
        *lines, self._rest = (self._rest + os.read(output, OUTPUT_BYTES)).split(b"\n")
        self._rest = self._rest[-OUTPUT_BYTES:]
        fresh = [line[:LINE_CHARS].decode("utf-8", "replace") for line in lines]
        self._lines.extend(fresh)
        self._fresh_lines = [*self._fresh_lines, *fresh][-LINES_MAX:]

    # Viewers

    def _first(self) -> bytes:
        picture = self._picture.whole() if self._picture is not None else {}
        return self._event("whole", picture, list(self._lines))

    async def _tell(self) -> None:
        """Tell all viewers what has changed, once a second; of a picture that has begun since, all of it."""
        known = self._picture
        while True:
            await asyncio.sleep(TICK_S)
            changes = self._picture.changes() if self._picture is not None else {}
            lines, self._fresh_lines = self._fresh_lines, []
            is_known, known = self._picture is known, self._picture
            self.listener.tell(self._event("changes", changes, lines) if is_known else self._first())

    def _event(self, kind: str, picture: dict[str, Any], lines: Sequence[str]) -> bytes:
        unheard_s = time.monotonic() - self._heard_s
        health = {"unheard_s": round(unheard_s, 1) if unheard_s > UNHEARD_S else 0, "trouble": self._trouble}
        event = {"kind": kind, "health": health, "picture": picture, "lines": lines, "shadows": self._shadows}
        return msgspec.json.encode(event)

    async def _listen(self) -> None:
        """Ask the server each second whether it is there. It answers while it is not ready, too."""
        while True:
            try:
                await asyncio.to_thread(self._call, "GET", "/v2/health/ready", b"", "", timeout_s=UNHEARD_S)
            except (ssl.SSLError, ConnectionResetError):  # it is there, and asks for the certificate of a client
                self._heard_s = time.monotonic()
            except (OSError, HTTPException):
                pass
            else:
                self._heard_s = time.monotonic()
            await asyncio.sleep(TICK_S)

    async def _shadow(self, place: int) -> None:
        """Keep what a shadow system says, until its process ends; what it has said last stays."""
        name, parameters = self._setup.shadows[place]
        label = SystemChoice(name, parameters).text
        setup = ShadowSystemSetup(self._setup.folder, self._setup.run, self._setup.zero_ns, name, parameters)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "sloop.page.shadow_system", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=SHADOW_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(setup))
        process.stdin.close()
        why = ""
        try:
            while line := await process.stdout.readline():
                self._shadows[label] = msgspec.Raw(line.rstrip())
        except ValueError:
            process.kill()
            why = f"it said more than {SHADOW_LINE_BYTES} bytes at once"
        code = await process.wait()
        if why or b'"error"' not in bytes(self._shadows.get(label, b"")):
            why = why or f"its process ended with {code}"
            self._shadows[label] = msgspec.Raw(msgspec.json.encode(ShadowSystemState(0.0, error=why)))

    # Answers

    async def _answer(self, exchange: Exchange, key: str) -> None:
        """See `sloop.page.listener.Answer`."""
        path = exchange.path
        if exchange.method == "POST":
            await self._answer_post(exchange, key)
        elif path == "/":
            page = index()
            policy = (("content-security-policy", page.policy),)
            exchange.reply(200, page.html, content_type="text/html; charset=utf-8", headers=policy)
        elif path == "/metrics" or path.startswith("/v2/models/"):
            await self._pass_on(exchange, key)
        elif (file := asset(path.removeprefix("/static/"))) is not None:
            exchange.reply(200, file[0], content_type=file[1])
        else:
            raise _missing(path)

    async def _answer_post(self, exchange: Exchange, key: str) -> None:
        """Answer a question, or try a request."""
        path = exchange.path
        if path == "/ask":
            exchange.reply(200, await self._asked(exchange.body))
        elif path.startswith("/v2/models/") and path.endswith("/infer"):
            await self._pass_on(exchange, key)
        else:
            raise _missing(path)

    async def _asked(self, body: bytes | bytearray) -> bytes:
        """Let a process of its own answer a question."""
        try:
            question = msgspec.json.decode(body, type=PageQuestion)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"this is no question: {error}") from error
        if self._answering >= ANSWERS_MAX:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "other questions are being answered", "ask again in a moment")
        self._answering += 1
        try:
            asked = msgspec.json.encode(Asked(self._setup.folder, question))
            said, status = await said_by("sloop.page.answers", asked, ANSWER_S_MAX)
        except TimeoutError as error:
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, f"there is no answer after {ANSWER_S_MAX:g} s") from error
        finally:
            self._answering -= 1
        why = f"its process ended with {status}: it failed, or needed more than {ANSWER_CPU_S_MAX} s"
        return said or msgspec.json.encode({"error": why})

    async def _pass_on(self, exchange: Exchange, key: str) -> None:
        """Let the server answer."""
        try:
            call = partial(self._call, exchange.method, quote(exchange.path), exchange.body, key, timeout_s=TRY_S_MAX)
            status, kind, said = await asyncio.get_running_loop().run_in_executor(self._tries, call)
        except (OSError, HTTPException) as error:
            raise Refusal(HTTPStatus.BAD_GATEWAY, f"the server does not answer: {error}") from error
        exchange.reply(status, said, content_type=kind)

    def _call(
        self, method: str, path: str, body: bytes | bytearray, key: str, *, timeout_s: float
    ) -> tuple[int, str, bytes]:
        """Ask the server; its status, content type and answer."""
        where = urlsplit(self._setup.server)
        assert where.hostname is not None
        if where.scheme == "https":
            # The server is on this machine, and is known by the port that it opened.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: HTTPConnection = HTTPSConnection(where.hostname, where.port, timeout=timeout_s, context=context)
        else:
            connection = HTTPConnection(where.hostname, where.port, timeout=timeout_s)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("content-type", "text/plain"), answer.read(TRY_BYTES_MAX)


def _missing(path: str) -> Refusal:
    return Refusal(HTTPStatus.NOT_FOUND, f"there is nothing at {path}")


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process."""
    listening, output, parent = map(int, arguments)
    begin(parent, [listening, output])
    set_name("sloop page")
    log_directly()
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=PageSetup)
    be_nice(5)  # people wait longer than requests
    asyncio.run(ServerPage(setup).run(socket.socket(fileno=listening), output))


if __name__ == "__main__":
    main(sys.argv[1:])
