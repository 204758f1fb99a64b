"""Servers as processes: started in their own group, measured as a tree, and stopped with everything they started.

No process that a server started survives `running`: each has a mark in its environment, and those that remove the mark
are found as children of processes seen before.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.peers.environments import last_line
from benchmarks.peers.peer import Launch, PeerFailed

MARK: Final = "PEER_RUN"
READY_S_MAX: Final = 90.0
STOP_S: Final = 10.0
TICKS: Final = os.sysconf("SC_CLK_TCK")
ERRORS: Final = ("Error", "error", "Exception", "failed")


class Usage(Struct, frozen=True):
    """A server's usage so far: CPU of its running processes, and memory as the sum of their proportional shares."""

    cpu_s: float
    memory_bytes: int
    processes: int


class Tree:
    """A server's processes, including those whose parents have ended."""

    def __init__(self, root: int, mark: str) -> None:
        self._root = root
        self._mark = f"{MARK}={mark}".encode()
        self._seen: dict[int, int] = {}
        """By pid, when it started, in clock ticks since the machine did: a pid may be given again."""

    def pids(self) -> list[int]:
        """The running processes."""
        table = dict(_processes())
        found = {pid for pid, started in self._seen.items() if pid in table and table[pid][1] == started}
        found |= {pid for pid in table if pid == self._root or (pid not in found and self._is_marked(pid))}
        while more := {pid for pid, (parent, _) in table.items() if parent in found and pid not in found}:
            found |= more
        found.discard(os.getpid())
        self._seen = {pid: table[pid][1] for pid in found if pid in table}
        return sorted(self._seen)

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def used(self) -> Usage:
        pids = self.pids()
        return Usage(sum(map(_cpu_s, pids)), sum(map(_memory_bytes, pids)), len(pids))

    def kill(self) -> None:
        """Kill until no process is left: a process may start another while it is killed."""
        for _ in range(5):
            pids = self.pids()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """The parent and start time of every process that is not a zombie, by pid."""
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{folder}/stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(folder), (int(fields[1]), int(fields[19]))


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def _memory_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class Server(Struct, frozen=True):
    """A running server."""

    port: int
    tree: Tree


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(launch: Launch, words: Path) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end. PeerFailed if it does not start.

    Its output goes to the file `words`.
    """
    mark = uuid.uuid4().hex
    variables = os.environ | dict(launch.variables) | {MARK: mark}
    with words.open("wb") as said:
        process = subprocess.Popen(
            launch.command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=words.parent,
            start_new_session=True,
        )
    tree = Tree(process.pid, mark)
    try:
        _wait_ready(process, launch, words)
        tree.pids()
        yield Server(launch.port, tree)
    finally:
        tree.pids()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        tree.kill()
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", launch: Launch, words: Path) -> None:
    until_s = time.monotonic() + READY_S_MAX
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise PeerFailed(f"ended with {process.returncode}: {reason(words)}")
        if _answers(launch):
            return
        time.sleep(0.1)
    raise PeerFailed(f"not ready within {READY_S_MAX:g} s: {reason(words)}")


def _answers(launch: Launch) -> bool:
    connection = HTTPConnection("127.0.0.1", launch.port, timeout=2)
    try:
        connection.request("GET", launch.ready)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def reason(words: Path) -> str:
    """The last line of a server's output that looks like an error, or else the last line."""
    text = words.read_text(errors="replace")
    named = [line for line in text.splitlines() if any(word in line for word in ERRORS)]
    return last_line("\n".join(named)) or last_line(text) or "it said nothing"
