"""A server's whole tree is seen and ended, daemons included; one that fails is reported in its own words."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.peers.peer import Launch, PeerFailed
from benchmarks.peers.processes import free_port, reason, running

pytestmark = pytest.mark.live

SERVER = """
import http.server, os, signal, subprocess, sys, time
sleeper = "import os, time; os.setsid(); time.sleep(60)"
if sys.argv[2] == "fork":
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", sleeper])
        os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN if sys.argv[2] == "deaf" else signal.default_int_handler)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def launch(*arguments: str, program: str = SERVER) -> Launch:
    port = free_port()
    return Launch((sys.executable, "-c", program, str(port), *arguments), {}, port, "/")


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()]


def test_what_left_the_tree_is_measured_and_ended_too(tmp_path: Path) -> None:
    with running(launch("fork"), tmp_path / "words.txt") as server:
        pids = server.tree.pids()
        used = server.tree.used()
    assert len(pids) == used.processes == 2
    assert used.memory_bytes > 2**20
    assert alive(pids) == []


def test_a_server_that_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.processes.STOP_S", 0.2)
    with running(launch("deaf"), tmp_path / "words.txt") as server:
        pids = server.tree.pids()
    assert pids
    assert alive(pids) == []


def test_one_that_ends_says_why(tmp_path: Path) -> None:
    failing = launch(program="raise ValueError('no such model')")
    with pytest.raises(PeerFailed, match="ended with 1: ValueError: no such model"), running(failing, tmp_path / "w"):
        pytest.fail("it did not start")


def test_the_reason_is_the_last_error_rather_than_the_last_word(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("starting\nOSError: address in use\nshutting down\n")
    assert reason(words) == "OSError: address in use"
    words.write_text("")
    assert reason(words) == "it said nothing"
