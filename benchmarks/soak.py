"""A long run of mixed requests: do memory, descriptors, processes and the log stay within bounds?

    python -m benchmarks.soak [--seconds 3600] [--rate 1000]

A server with a small model gets requests at a steady rate from a process of its own: JSON and binary tensors over HTTP,
calls over gRPC, wrong requests, and clients that leave at once, in the middle of a body or before their answer. Every
answer is compared with what was asked. The server is looked at once a second, and a line is fitted through what was
seen after the first fifth: a quantity is flat unless the line rises, with 95 % confidence, by more than a hundredth an
hour.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Final

import grpc
import msgspec
import numpy as np
from msgspec import Struct
from scipy.stats import t as student

from benchmarks.attacks import aborted, begun, connection, own_memory_bytes, prefixed
from benchmarks.frames import DATA, END_STREAM, PREFACE, RST_STREAM, SETTINGS, frame
from benchmarks.models import perceptron
from benchmarks.notebook import arguments, children, publish, say, server_pid, table, workspace
from sloop.demo.live import ServerReport, serving
from sloop.demo.run import dump_yaml
from sloop.serve.edge.grpc.schema import SERVICE, message_class

WIDTH: Final = 64
WARM_SHARE: Final = 0.2
"""Of the samples at the beginning, which are left out."""
BLOCKS: Final = 20
"""The line is fitted through means of so many blocks, which depend on each other less than single samples do."""
SLOW_SHARE: Final = 0.01
"""Growth of the level in an hour that is called flat, however certain it is."""
CLIENTS: Final = 32
LATE_S: Final = 10.0
"""Clients that cannot keep up with the rate end so much later."""
FEATURES: Final = ["json", "binary", "grpc", "wrong", "unknown-model", "gone", "half", "reset"]
SHARES: Final = (45, 20, 25, 3, 3, 2, 1, 1)
"""How many of a hundred requests are of each kind."""


PROCESSES: Final = {b"serve.edge.process": "edge", b"serve.worker": "worker", b"\0serve\0": "deciding process"}
"""What the command line of a process of the server has in it."""


class Slope(Struct, frozen=True):
    """A line through samples: its slope, and half the width of its 95 % confidence interval, in units a second."""

    level: float
    """The median of the samples."""
    per_s: float
    within_per_s: float

    @property
    def is_flat(self) -> bool:
        """Whether it does not grow, as far as can be told, or so slowly that it does not matter."""
        return self.per_s <= self.within_per_s or 3600 * self.per_s <= SLOW_SHARE * self.level


def fitted(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """The line through the means of `BLOCKS` blocks of samples."""
    blocks = min(BLOCKS, len(values))
    if blocks < 3:
        return Slope(fmean(values) if values else 0.0, 0.0, float("inf"))
    x, y = (np.array([part.mean() for part in np.array_split(np.array(each), blocks)]) for each in (times_s, values))
    spread = x - x.mean()
    per_s = float(spread @ y / (spread @ spread))
    left = y - y.mean() - per_s * spread
    error = sqrt(float(left @ left) / (blocks - 2) / float(spread @ spread))
    return Slope(median(values), per_s, float(student.ppf(0.975, blocks - 2)) * error)


class Sample(Struct, frozen=True):
    """A look at the server and all its processes."""

    at_s: float
    memory_bytes: dict[str, int]
    """By process."""
    descriptors: int
    processes: int
    log_bytes: int


def family(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(each for child, _ in children(pid) for each in family(child))]


def look(pid: int, folder: Path) -> Sample:
    """A sample of the server now."""
    pids, descriptors, memory = family(pid), 0, Counter[str]()
    for each in pids:
        with contextlib.suppress(OSError):
            descriptors += len(os.listdir(f"/proc/{each}/fd"))
            command = Path(f"/proc/{each}/cmdline").read_bytes()
            name = next((name for word, name in PROCESSES.items() if word in command), "other processes")
            memory[name] += own_memory_bytes(each)
    log_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            log_bytes += path.stat().st_size
    return Sample(time.monotonic(), dict(memory), descriptors, len(pids), log_bytes)


# The clients


class Wire:
    """A client of HTTP/1.1 and one of gRPC, each with one connection that is opened again when it has been closed."""

    def __init__(self, model: str, http_port: int, grpc_port: int) -> None:
        self.model, self.http_port, self.grpc_port = model, http_port, grpc_port
        self._http: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._channel: grpc.aio.Channel | None = None
        values = np.full((1, WIDTH), 0.5, "<f4")
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH]}
        self.json = json.dumps({"inputs": [{**tensor, "data": values.ravel().tolist()}]}).encode()
        described = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": values.nbytes}}]}).encode()
        self.binary, self.binary_head = described + values.tobytes(), len(described)
        request = message_class("ModelInferRequest")(model_name=model, raw_input_contents=[values.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=[1, WIDTH])
        self.message = request.SerializeToString()

    def post(self, body: bytes, *headers: str, model: str = "") -> bytes:
        """A request for inference."""
        lines = [f"POST /v2/models/{model or self.model}/infer HTTP/1.1", "host: soak", *headers]
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body

    async def ask(self, request: bytes) -> int:
        """Send a request over HTTP; returns the status."""
        if self._http is None:
            self._http = await asyncio.open_connection("127.0.0.1", self.http_port)
        reader, writer = self._http
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
            await reader.readexactly(int(fields[b"content-length"]))
        except (OSError, EOFError):
            await self.hang_up()
            raise
        if fields.get(b"connection") == b"close":
            await self.hang_up()
        return int(head.split(b" ", 2)[1])

    async def hang_up(self) -> None:
        """Close the connection of HTTP; the next request opens another."""
        opened, self._http = self._http, None
        if opened is not None:
            await aborted(opened[1])

    async def close(self) -> None:
        """Close all connections."""
        await self.hang_up()
        if self._channel is not None:
            await self._channel.close(None)

    async def call(self) -> str:
        """Make a call over gRPC; returns its status."""
        if self._channel is None:
            options = [("grpc.use_local_subchannel_pool", 1)]
            self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}", options)
        try:
            await self._channel.unary_unary(f"/{SERVICE}/ModelInfer", bytes, bytes)(self.message)
        except grpc.aio.AioRpcError as error:
            return str(error.code().value[0])
        return "0"

    async def leave(self, sent: bytes, port: int, *, resets: bool = False) -> None:
        """Open a connection, send something, and leave without waiting for an answer."""
        async with connection(port) as (_, writer):
            if resets:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.write(sent)
            await asyncio.sleep(0.001)

    async def one(self, kind: str) -> str:
        """Make a request of this kind; returns what came of it."""
        match kind:
            case "json":
                return str(await self.ask(self.post(self.json)))
            case "binary":
                head = f"inference-header-content-length: {self.binary_head}"
                return str(await self.ask(self.post(self.binary, head)))
            case "grpc":
                return await self.call()
            case "wrong":
                return str(await self.ask(self.post(b'{"inputs": []}')))
            case "unknown-model":
                return str(await self.ask(self.post(self.json, model="nobody")))
            case "gone":
                await self.leave(self.post(self.json), self.http_port, resets=True)
            case "half":
                await self.leave(self.post(self.json)[:-100], self.http_port)
            case "reset":
                call = begun(1, "ModelInfer") + frame(DATA, END_STREAM, 1, prefixed(self.message))
                await self.leave(
                    PREFACE + frame(SETTINGS, 0, 0) + call + frame(RST_STREAM, 0, 1, bytes(4)), self.grpc_port
                )
        return "left"


EXPECTED: Final = {
    **{"json": "200", "binary": "200", "grpc": "0", "wrong": "400", "unknown-model": "404"},
    **dict.fromkeys(("gone", "half", "reset"), "left"),
}


async def send(wires: Sequence[Wire], rate_rps: float, count: int, seed: int) -> Counter[str]:
    """Make `count` requests of mixed kinds at a rate, or as many as they can in their time, each client one after the
    other; returns how many of each kind came out as expected, or otherwise as what."""
    chance, found = random.Random(seed), Counter[str]()
    kinds = chance.choices(FEATURES, SHARES, k=count)
    due_s, gap_s = asyncio.get_running_loop().time(), 1 / rate_rps
    place = 0

    async def work(wire: Wire) -> None:
        nonlocal place
        while place < count and asyncio.get_running_loop().time() < due_s + count * gap_s + LATE_S:
            mine, place = place, place + 1
            await asyncio.sleep(max(0.0, due_s + mine * gap_s - asyncio.get_running_loop().time()))
            try:
                outcome = await asyncio.wait_for(wire.one(kinds[mine]), 20)
            except (OSError, EOFError, TimeoutError) as error:
                outcome = type(error).__name__
            found[kinds[mine] if outcome == EXPECTED[kinds[mine]] else f"{kinds[mine]}: {outcome}"] += 1

    await asyncio.gather(*map(work, wires))
    for wire in wires:
        await wire.close()
    return found


def be_sender(model: str, http_port: int, grpc_port: int, rate_rps: float, count: int, seed: int) -> None:
    """Send the requests from this process, and print what came of them as JSON."""
    wires = [Wire(model, http_port, grpc_port) for _ in range(CLIENTS)]
    print(json.dumps(asyncio.run(send(wires, rate_rps, count, seed))))  # noqa: T201


def run(where: ServerReport, folder: Path, given: Namespace) -> tuple[list[Sample], Counter[str]]:
    """Send the requests, and look at the server meanwhile."""
    pid, count = server_pid(), round(given.rate * given.seconds)
    ports = [each.rpartition(":")[2] for each in (where.http, where.grpc)]
    numbers = [*ports, str(given.rate), str(count), str(given.seed)]
    command = [sys.executable, "-m", "benchmarks.soak", "--sender", where.application, *numbers]
    samples: list[Sample] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
        until_s = time.monotonic() + given.seconds + 60
        while sender.poll() is None and time.monotonic() < until_s:
            samples.append(look(pid, folder))
            time.sleep(1)
            if len(samples) % 60 == 0:
                memory = ", ".join(f"{name} {each / 2**20:.1f}" for name, each in samples[-1].memory_bytes.items())
                say(f"{len(samples)} s: MiB: {memory}; {samples[-1].descriptors} descriptors")
        sender.kill()
        assert sender.stdout is not None
        found = Counter(msgspec.json.decode(sender.stdout.read() or b"{}", type=dict[str, int]))
    return samples, found


def rows_of(samples: Sequence[Sample]) -> list[tuple[object, ...]]:
    """A row for each quantity: its level, least and most, slope an hour, and whether it is flat."""
    kept = samples[round(WARM_SHARE * len(samples)) : -1]  # in the last, the clients leave
    times_s = [sample.at_s for sample in kept]
    series = {
        "memory, MiB": [sum(sample.memory_bytes.values()) / 2**20 for sample in kept],
        **{
            f"of it {name}": [sample.memory_bytes.get(name, 0) / 2**20 for sample in kept]
            for name in sorted({name for sample in kept for name, size in sample.memory_bytes.items() if size})
        },
        "descriptors": [float(sample.descriptors) for sample in kept],
        "processes": [float(sample.processes) for sample in kept],
    }
    rows: list[tuple[object, ...]] = []
    for name, values in series.items():
        slope = fitted(times_s, values)
        growth = f"{3600 * slope.per_s:+.3g} ± {3600 * slope.within_per_s:.2g}"
        rows.append((name, slope.level, min(values), max(values), growth, slope.is_flat))
    log = [sample.log_bytes / 2**20 for sample in kept]
    rows.append(("state folder, MiB", median(log), min(log), max(log), "bounded by `log_bytes`", None))
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--sender"]:
        application, http_port, grpc_port, rate, count, seed = sys.argv[2:]
        be_sender(application, int(http_port), int(grpc_port), float(rate), int(count), int(seed))
        return
    parser = arguments(__doc__, seconds=3600, quick=60)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second (default 1000)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        model = perceptron(folder, width=WIDTH, layers=2)
        app, state = folder / "app.yaml", folder / "state"
        dump_yaml(
            app,
            {
                "name": "soak",
                "slo_ms": 1000,
                "stages": [{"name": "infer", "model": model.name}],
                "system": {"name": "static", "replicas": 1, "cores": 0.5},
            },
        )
        with serving(app, state) as where:
            begun_s = time.monotonic()
            samples, found = run(where, state, given)
            took_s = time.monotonic() - begun_s
    total, right = sum(found.values()), sum(found[kind] for kind in FEATURES)
    rows = rows_of(samples)
    is_flat = all(row[-1] is not False for row in rows)
    others = {kind: [f"{found[key]} × {key}" for key in found if key.startswith(f"{kind}: ")] for kind in FEATURES}
    outcomes = [(kind, found[kind], ", ".join(others[kind]) or "–") for kind in FEATURES]
    text = "\n\n".join(
        [
            f"{total / took_s:,.0f} requests/s for {took_s:,.0f} s ({total:,} requests, {total - right:,} with another "
            f"outcome than expected): **{'flat' if is_flat else 'not flat'}**. Growth is that of a line through the "
            f"samples after the first {100 * WARM_SHARE:g} %, an hour, with its 95 % confidence.",
            table(("", "median", "least", "most", "growth an hour", "flat"), rows),
            table(("kind", "as expected", "otherwise"), outcomes),
        ]
    )
    publish("soak", "Soak", text, write=not given.no_write)
    sys.exit(0 if is_flat else 1)


if __name__ == "__main__":
    main()
