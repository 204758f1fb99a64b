"""The page's process beside a log that others damage, a server that is slow, and a shadow that goes wrong."""

import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.page.start import PageSetup
from sloop.runlog import FileLog
from sloop.runlog.segments import segment_path
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.systems.replay import header_of

SCENARIO = Path(__file__).parents[2] / "examples/three/bursts.yaml"
RUN = "20261130T000000000Z"
QUICK = {"TICK_S": 0.05, "TROUBLE_S_MAX": 0.1}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run of two seconds."""
    folder = tmp_path_factory.mktemp("recorded")
    world = World.from_scenario(replace(load_scenario(SCENARIO), duration_s=2.0), SystemChoice("elastic"))
    with FileLog(segment_path(folder, RUN, 1), header_of(world.setup(), origin="sim")) as log:
        simulate(world, [log], check_first=0)
    return folder


class HealthOnly(socketserver.BaseRequestHandler):
    """A server that says at once that it is healthy, and answers nothing else."""

    def handle(self) -> None:
        """Answer one request."""
        if b"/v2/health/ready" in self.request.recv(2**16):
            self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            self.request.recv(1)


class HangUp(socketserver.BaseRequestHandler):
    """A server that ends each connection, such as one that asks for the certificate of a client."""

    def handle(self) -> None:
        """Take one request."""
        self.request.recv(2**16)


@contextmanager
def page_of(
    folder: Path,
    *shadows: str,
    server_kind: type[socketserver.BaseRequestHandler] = HealthOnly,
    key_file: Path | None = None,
    **constants: float | str,
) -> Iterator[int]:
    """The port of a page beside such a server, with other values (expressions) of the module's constants."""
    assigned = "; ".join(f"process.{name} = {value}" for name, value in {**QUICK, **constants}.items())
    code = f"import sys; from sloop.page import process; {assigned}; process.main(sys.argv[1:])"
    (reading, writing), listening = os.pipe(), socket.create_server(("127.0.0.1", 0))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), server_kind) as server, listening:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        begun = time.monotonic_ns() - 10**10, time.time_ns() - 10**10
        named = tuple((name, dict[str, Any]()) for name in shadows)
        setup = PageSetup(str(folder), RUN, *begun, url, api_key_file=str(key_file or ""), shadows=named)
        fds = listening.fileno(), reading
        command = [sys.executable, "-c", code, *map(str, (*fds, os.getpid()))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds) as page:
            assert page.stdin is not None
            page.stdin.write(msgspec.json.encode(setup))
            page.stdin.close()
            try:
                yield listening.getsockname()[1]
                assert page.poll() is None
            finally:
                page.kill()
                server.shutdown()
    os.close(reading)
    os.close(writing)


def told(port: int, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first event of the page for which this holds."""
    last, until_s = "", time.monotonic() + 30
    while True:
        with urlopen(f"http://127.0.0.1:{port}/events?after={last}", timeout=30) as answer:
            said = msgspec.json.decode(answer.read())
        last = said["number"]
        for event in said["events"]:
            if holds(event):
                found: dict[str, Any] = event
                return found
        assert time.monotonic() < until_s, said


def has_trouble(text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: text in event["health"]["trouble"]


def test_a_log_that_goes_or_is_damaged_leaves_the_page_and_comes_back(tmp_path: Path, recorded: Path) -> None:
    folder, log = tmp_path / "log", segment_path(recorded, RUN, 1)
    folder.mkdir()
    damaged = [log.read_bytes()[:300], b"\xff\n", log.read_bytes() + b"[]\n", b""]
    with page_of(folder) as port:
        told(port, has_trouble("no longer there"))
        shutil.rmtree(folder)
        told(port, has_trouble("No such file"))
        folder.mkdir()
        for content in damaged:
            segment_path(folder, RUN, 1).write_bytes(content)
            told(port, has_trouble("cannot be read"))
        whole = shutil.copy(log, tmp_path / "whole")
        Path(whole).rename(segment_path(folder, RUN, 1))  # at once, as nobody reads half of a log
        told(port, lambda event: not event["health"]["trouble"])
        told(port, lambda event: event["kind"] == "whole" and event["picture"]["applications"])


def test_requests_that_are_tried_do_not_make_the_server_look_dead(recorded: Path) -> None:
    with page_of(recorded, UNHEARD_S=0.5) as port, ExitStack() as opened:
        told(port, lambda event: not event["health"]["unheard_s"])
        for _ in range(40):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            connection.sendall(b"GET /v2/models/slow HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        time.sleep(1.5)
        assert not told(port, lambda event: event["kind"] == "changes")["health"]["unheard_s"]


def test_a_server_that_lets_nobody_in_is_not_taken_for_dead(recorded: Path) -> None:
    with page_of(recorded, server_kind=HangUp, UNHEARD_S=0.5) as port:
        time.sleep(1.5)
        assert not told(port, lambda event: event["kind"] == "changes")["health"]["unheard_s"]


def test_a_shadow_that_says_too_much_ends_alone(recorded: Path) -> None:
    with page_of(recorded, "static", SHADOW_LINE_BYTES=64) as port:
        event = told(port, lambda event: "static" in event["shadows"])
        assert "more than 64 bytes" in event["shadows"]["static"]["error"]


def test_a_disk_without_room_is_said_and_the_page_goes_on_when_there_is_some(tmp_path: Path, recorded: Path) -> None:
    """The file that the disk's state is read from stands for a disk."""
    full = tmp_path / "full"
    full.touch()
    with page_of(recorded, has_room=f"lambda folder: not process.Path({str(full)!r}).exists()") as port:
        event = told(port, has_trouble("the disk is full"))
        assert event["picture"], "what was seen before stays"
        full.unlink()
        told(port, lambda event: not event["health"]["trouble"])


def test_a_key_file_that_is_damaged_locks_the_page_until_it_is_right(tmp_path: Path, recorded: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one two three four\n")
    keys.chmod(0o600)
    with page_of(recorded, key_file=keys) as port:

        def begun(key: str) -> int:
            request = Request(f"http://127.0.0.1:{port}/key", key.encode(), {"origin": f"http://127.0.0.1:{port}"})
            try:
                with urlopen(request, timeout=30) as answer:
                    return int(answer.status)
            except HTTPError as error:
                return error.code

        assert begun("two") == 401
        keys.write_text("sesame-sesame\n")
        until_s = time.monotonic() + 30
        while begun("sesame-sesame") == 401:
            assert time.monotonic() < until_s
            time.sleep(0.2)
        assert begun("sesame-sesame") == 200
        assert begun("two") == 401
