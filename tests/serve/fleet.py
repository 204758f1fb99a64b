"""A server with agents on several hosts, and a client that checks every answer of it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.request import ProxyHandler, build_opener

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from sloop.serve.processes import SPARE
from tests import joining
from tests.hosts import WAIT_S, Host, Process

HTTP: Final = 8000
"""The server's port for HTTP."""
JOIN: Final = 9411
"""Where it waits for agents."""
HUNG_S: Final = 20.0
"""A request without an answer for so long hangs; no deadline or time-out of the server is longer."""
LOST: Final = "connection lost"
HUNG: Final = "hung"
CAUGHT: Final = (200, 503, 504)
"""What clients may get while replicas are lost: no connection of theirs is."""
MODEL: Final = """
import time

class Model:
    inputs = {"x": ("FP32", (-1, 4))}
    outputs = {"y": ("FP32", (-1, 4))}
    joins_rows = True

    def __init__(self, threads):
        pass

    def run(self, x):
        time.sleep(0.01)
        return 2 * x + 1

    def example(self, rows):
        import numpy
        return numpy.ones((rows, 4), numpy.float32)
"""
"""Takes so long that both replicas run a batch most of the time, and no core."""

Values = np.ndarray[Any, np.dtype[np.float32]]


def until(condition: Callable[[], Any], what: str, within_s: float = WAIT_S) -> float:
    """Waits until the condition holds; returns for how long. AssertionError if it does not."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began_s


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def running(host: Host, part: str) -> list[int]:
    """The processes of a host whose command line contains `part`."""
    return [pid for pid in host.pids() if part in command_of(pid)]


def workers(host: Host) -> list[int]:
    """The processes of a host that serve replicas, or load their models."""
    spare = [pid for pid in running(host, "sloop.serve.processes") if not name_of(pid).startswith("sloop ")]
    return [pid for pid in running(host, "sloop.serve.worker") if pid not in spare and name_of(pid) != SPARE]


def name_of(pid: int) -> str:
    """What a process calls itself."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def tell(text: str) -> None:
    """Shows a figure, with `pytest -s`."""
    sys.stdout.write(f"\n{text}\n")


def memory_files(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """The bytes of shared memory that processes hold, by device and inode of the anonymous file."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(entry).startswith("/memfd:sloop"):
                        file = entry.stat()
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return found


class Fleet:
    """A server on the first host, and agents on others, by the names of their nodes. Logs are in `folder`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        app: str,
        backend: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        spares: int = 0,
    ) -> None:
        """`backend`: options of the server about its machines, if they are not those for agents that join by
        themselves. `env` is added to the environment of all processes. `spares`: the workers that each agent starts
        ahead; tests count workers and compare them, and have none."""
        self.hosts, self.folder, self._env, self._spares = hosts, folder, env, spares
        self._backend = backend or ["--backend", "ray", "--address", self.address, "--agents-port", str(JOIN)]
        self._program = ["-m", "sloop"] if backend else [str(joining.__file__)]
        (folder / "app.yaml").write_text(app)
        self.server: Process | None = None
        self.agents: dict[str, Process] = {}
        self._get = build_opener(ProxyHandler({})).open

    @property
    def address(self) -> str:
        return self.hosts[0].address

    def start_server(
        self, backend: Sequence[str] = (), app: str = "app.yaml", env: Mapping[str, str] | None = None
    ) -> Process:
        """`backend`, `app`, `env`: others than usual, for this time."""
        arguments = [app, "--host", "0.0.0.0", "--http-port", str(HTTP), "--state", "state"]
        options = [*self._program, "serve", *arguments, *(backend or self._backend)]
        self.server = self._run(self.hosts[0], "server", options, env)
        return self.server

    def start_agent(self, name: str, host: Host) -> Process:
        where = [joining.__file__, "agent", self.address, str(JOIN), name, str(self._spares)]
        self.agents[name] = process = self._run(host, name, where)
        return process

    def _run(self, host: Host, name: str, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        with (self.folder / f"{name}.log").open("ab") as log:
            argv = [sys.executable, "-P", *arguments]
            return host.run(argv, env=env or self._env, cwd=self.folder, stdout=log, stderr=log)

    def log(self, name: str = "server") -> str:
        """What a process has written."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def page(self, path: str) -> bytes:
        with self._get(f"http://{self.address}:{HTTP}{path}", timeout=WAIT_S) as answer:
            return bytes(answer.read())

    def state(self) -> dict[str, Any]:
        """The state page; empty while there is none."""
        with contextlib.suppress(OSError):
            found: dict[str, Any] = json.loads(self.page("/v2/sloop/state"))
            return found
        return {}

    def ready(self) -> dict[int, str]:
        """The replicas that are ready, with their nodes."""
        return {each["id"]: each["node"] for _, each in self.replicas() if each["life"] == "ready"}

    def stages(self) -> list[tuple[str, str]]:
        """Stage and node of each replica that is ready."""
        return [(stage, each["node"]) for stage, each in self.replicas() if each["life"] == "ready"]

    def replicas(self) -> list[tuple[str, dict[str, Any]]]:
        """Stage and description of each replica."""
        stages = [stage for each in self.state().get("applications", ()) for stage in each["stages"]]
        return [(stage["name"], replica) for stage in stages for replica in stage["replicas"]]

    def nodes(self) -> dict[str, str]:
        """The state of each node."""
        return {each["name"]: each["state"] for each in self.state().get("nodes", ())}

    def until_ready(self, replicas: int) -> float:
        """Waits until exactly so many replicas are ready."""

        def are_ready() -> bool:
            assert self.server is not None
            assert self.server.poll() is None, f"the server has ended:\n{self.log()}"
            return len(self.ready()) == replicas

        try:
            return until(are_ready, f"{replicas} replicas ready")
        except AssertionError as error:
            logs = "".join(f"\n{name}:\n{self.log(name)}" for name in ("server", *self.agents))
            raise AssertionError(f"{error}{logs}") from None

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        families = text_string_to_metric_families(self.page("/metrics").decode())
        return sum(each.value for family in families for each in family.samples if each.name == name)

    def cold_start_s(self) -> float:
        """From the order to start a replica until it is ready, on average; 0 if none was started."""
        families = list(text_string_to_metric_families(self.page("/metrics").decode()))
        samples = [each for family in families for each in family.samples]
        spent = sum(each.value for each in samples if each.name == "sloop_cold_start_seconds_sum")
        counts = [each.value for each in samples if each.name == "sloop_cold_start_seconds_count"]
        return spent / max(counts, default=1.0)

    def stop(self) -> None:
        """Ends server and agents."""
        for process in (self.server, *self.agents.values()):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in (self.server, *self.agents.values()):
            if process is not None:
                process.wait(WAIT_S)


@dataclass
class Asked:
    """A request, and what became of it."""

    number: int
    values: Values
    sent_s: float
    ended_s: float = 0.0
    ends: list[int | str] = field(default_factory=list)
    """Statuses of its answers, or `LOST` or `HUNG`."""
    answer: Values | None = None


class _Connection(asyncio.Protocol):
    """One connection of the client, with one request at a time."""

    def __init__(self, on_end: Callable[["_Connection", int | str, bytes, int], None]) -> None:
        self._on_end = on_end
        self._buffer = b""
        self.asked: Asked | None = None
        self.transport: asyncio.Transport | None = None
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, asked: Asked, content: bytes) -> None:
        assert self.transport is not None
        self.asked = asked
        if self.is_open:
            self.transport.write(content)
        else:  # it was lost at once
            self._on_end(self, LOST, b"", 0)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        lines = head.lower().split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        length = int(fields[b"content-length"])
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        if fields.get(b"connection") == b"close":
            self.close()
        self._on_end(self, int(lines[0].split()[1]), body, int(fields.get(b"inference-header-content-length", length)))
        if self._buffer:
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self.asked is not None:
            self._on_end(self, LOST, b"", 0)

    def close(self) -> None:
        self.is_open = False
        if self.transport is not None:
            self.transport.close()


class Load:
    """Sends requests at a constant rate, from a thread of its own, while the `with` block runs, so many `together`.
    Each has values of its own and an id, by which wrong, swapped and doubled answers are noticed."""

    def __init__(
        self,
        host: str,
        model: str,
        expected: Callable[[Values], Values],
        *,
        rate_rps: float = 100,
        width: int = 4,
        together: int = 1,
    ) -> None:
        self._host, self._model, self._expected = host, model, expected
        self._rate_rps, self._width, self._together = rate_rps, width, together
        self.asked: list[Asked] = []
        self.unasked = 0
        """Answers that came where none was waited for."""
        self.swapped = 0
        """Answers with the id of another request."""
        self.bodies: Counter[str] = Counter()
        """What answers said that are not 200."""
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="load")
        self._loop: AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def go_on(self, seconds: float) -> None:
        """Let it send for so long."""
        time.sleep(seconds)

    def until_steady(self, count: int = 50, within_s: float = 30) -> None:
        """Let it send until so many requests in a row, sent from now on, were answered with 200."""
        begin = len(self.asked)

        def is_steady() -> bool:
            ended = [asked for asked in self.asked[begin:] if asked.ends]
            return len(ended) >= count and all(asked.ends == [200] for asked in ended[-count:])

        try:
            until(is_steady, f"{count} right answers in a row", within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.describe()} {self.bodies}") from None

    # What became of them, after the `with` block

    def counts(self) -> Counter[int | str]:
        return Counter(end for asked in list(self.asked) for end in asked.ends)

    def check(self, allowed: Iterable[int | str] = (200, 503, 504, 500, LOST)) -> None:
        """Every request has one end, which is allowed, and every answer is right."""
        assert (self.unasked, self.swapped) == (0, 0), "answers too many, or of other requests"
        assert [asked for asked in self.asked if len(asked.ends) != 1] == []
        assert not set(self.counts()) - set(allowed), f"{self.counts()} {self.bodies}"
        answered = [asked for asked in self.asked if asked.ends == [200]]
        assert answered
        expected = self._expected(np.stack([asked.values for asked in answered]))
        answers = np.stack([asked.answer for asked in answered if asked.answer is not None])
        np.testing.assert_allclose(answers, expected, rtol=1e-4, atol=1e-4)

    def disturbed_s(self, fault_s: float) -> float:
        """For how long after a fault some requests were sent that were not answered with 200."""
        failed = [asked.sent_s for asked in self.asked if asked.ends != [200]]
        return max(0.0, max(failed, default=fault_s) - fault_s)

    def slowest_ms(self, after_s: float = 0.0, until_s: float = float("inf")) -> float:
        """The longest answer to what was sent between these times."""
        spent = [each.ended_s - each.sent_s for each in self.asked if after_s <= each.sent_s < until_s]
        return 1e3 * max(spent, default=0.0)

    def describe(self) -> str:
        counts = sorted(self.counts().items(), key=lambda each: -each[1])
        return f"{len(self.asked)} requests: " + ", ".join(f"{count} x {end}" for end, count in counts)

    # In its thread

    async def _main(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        chance, began_s, tasks = np.random.default_rng(len(self._model)), loop.time(), set()
        while not self._stop.is_set():
            number = len(self.asked)
            values = chance.normal(size=self._width).astype(np.float32)
            values[0] = number
            asked = Asked(number, values, time.monotonic())
            self.asked.append(asked)
            task = asyncio.create_task(self._ask(asked))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if len(self.asked) % self._together:
                continue
            await asyncio.sleep(max(0.0, began_s + len(self.asked) / self._rate_rps - loop.time()))
        give_up_s = loop.time() + HUNG_S
        while loop.time() < give_up_s and not all(asked.ends for asked in self.asked):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # an answer too many would come now
        for asked in self.asked:
            if not asked.ends:
                asked.ends.append(HUNG)
        for connection in self._open:
            connection.asked = None
            connection.close()

    async def _ask(self, asked: Asked) -> None:
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
        except OSError:
            self._end(asked, LOST)
            return
        connection.send(asked, self._message(asked))

    async def _connect(self) -> _Connection:
        assert self._loop is not None
        _, made = await asyncio.wait_for(
            self._loop.create_connection(lambda: _Connection(self._on_end), self._host, HTTP), HUNG_S
        )
        self._open.add(made)
        return made

    def _message(self, asked: Asked) -> bytes:
        """The request, with its tensor in binary."""
        raw = asked.values.tobytes()
        shape, size = [1, len(asked.values)], {"binary_data_size": len(raw)}
        given = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": size}
        binary = {"binary_data_output": True}
        content = json.dumps({"id": str(asked.number), "inputs": [given], "parameters": binary}).encode()
        head = (
            f"POST /v2/models/{self._model}/infer HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Inference-Header-Content-Length: {len(content)}\r\nContent-Length: {len(content) + len(raw)}\r\n\r\n"
        )
        return head.encode() + content + raw

    def _on_end(self, connection: _Connection, end: int | str, body: bytes, header_bytes: int) -> None:
        asked, connection.asked = connection.asked, None
        if asked is None:
            self.unasked += 1
            return
        if end == 200:
            if json.loads(body[:header_bytes])["id"] != str(asked.number):
                self.swapped += 1
            asked.answer = np.frombuffer(body[header_bytes:], np.float32)
        elif end != LOST:
            self.bodies[body.decode(errors="replace")[:200]] += 1
        self._end(asked, end)
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._open.discard(connection)

    def _end(self, asked: Asked, end: int | str) -> None:
        asked.ended_s = time.monotonic()
        asked.ends.append(end)


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, number)
