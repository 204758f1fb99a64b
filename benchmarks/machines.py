"""What it costs that workers are on another machine: requests with a worker beside the edge, and over a network.

    python -m benchmarks.machines [--rounds 3] [--mbit-s 200]

Two hosts are built out of network namespaces on this machine (`tests/hosts.py`; needs root), and share its cores. The
first has server and client. The worker runs beside the server as its child (local), beside it under an agent, or under
an agent on the other host; the three take turns. All requests are sent in a closed loop: small ones, and tensors of
600 kB over a link that `--mbit-s` limits, where the link's time is what the tensor alone would take.
"""

import asyncio
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final
from urllib.request import urlopen

import numpy as np
from msgspec import Struct

from benchmarks.notebook import arguments, publish, say, table, workspace
from benchmarks.peers.models import mlp, pool
from sloop.demo.run import dump_yaml
from tests.hosts import Host, Hosts

PLACES: Final = ("local", "agent beside", "agent on the other host")
TOKEN: Final = "0123456789abcdef0123456789abcdef"
PORT: Final = 8000
JOIN: Final = 9400
START_S_MAX: Final = 120
CONNECTIONS: Final = {"small": 32, "large": 4}
SLOOP: Final = [sys.executable, "-m", "sloop"]


class Result(Struct):
    """What a closed loop of some seconds gave."""

    answers: int
    seconds: float
    latencies_ms: list[float]
    wrong: int

    @property
    def rps(self) -> float:
        """Answers per second."""
        return self.answers / self.seconds


# The client, a process on the first host


async def ask(name: str, connections: int, seconds: float) -> Result:
    """Send requests to the application in a closed loop."""
    large = name == "large"
    shape = [1, 3, 224, 224] if large else [1, 16]
    values = np.full(shape, 0.5, "<f4")
    described: dict[str, object] = {"name": "image" if large else "x", "datatype": "FP32", "shape": shape}
    described |= {"parameters": {"binary_data_size": values.nbytes}} if large else {"data": values.ravel().tolist()}
    head = json.dumps({"inputs": [described]}).encode()
    body = head + values.tobytes() if large else head
    lines = [f"POST /v2/models/{name}/infer HTTP/1.1", "host: here", f"content-length: {len(body)}"]
    lines += [f"inference-header-content-length: {len(head)}"] if large else []
    request = "\r\n".join([*lines, "", ""]).encode() + body
    latencies_ms: list[float] = []
    wrong = 0
    begun_s = time.perf_counter()

    async def one() -> None:
        nonlocal wrong
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=2**20)
        while time.perf_counter() < begun_s + seconds:
            sent_s = time.perf_counter()
            writer.write(request)
            answered = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in answered.lower().split(b"\r\n")[1:-2])
            await reader.readexactly(int(fields[b"content-length"]))
            wrong += not answered.startswith(b"HTTP/1.1 200")
            latencies_ms.append((time.perf_counter() - sent_s) * 1e3)
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return Result(len(latencies_ms), time.perf_counter() - begun_s, latencies_ms, wrong)


# The server


@contextmanager
def serving(hosts: Hosts, folder: Path, app: Path, place: str) -> Iterator[None]:
    """A server on the first host, whose worker is at this place."""
    server, other = hosts[0], hosts[1]
    token = folder / "token"
    token.write_text(TOKEN)
    join = f"{server.address}:{JOIN}"
    command = [*SLOOP, "serve", str(app), "--http-port", str(PORT), "--state", str(folder / f"state-{app.stem}")]
    agents = ["--backend", "agents", "--address", join, "--token-file", str(token)]
    started = [
        server.run(
            [*command, *([] if place == "local" else agents)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    ]
    if place != "local":
        agent = [*SLOOP, "agent", "--join", join, "--name", "local-0", "--token-file", str(token)]
        started.append(
            (server if place == "agent beside" else other).run(
                agent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    try:
        _until_ready(server)
        yield
    finally:
        started[0].terminate()
        for process in started:
            process.wait(30)


def _until_ready(server: Host) -> None:
    until_s = time.monotonic() + START_S_MAX

    def is_ready() -> bool:
        with urlopen(f"http://127.0.0.1:{PORT}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)

    while time.monotonic() < until_s:
        try:
            if server.within(is_ready):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError("the server is not ready")


def measured(server: Host, name: str, connections: int, seconds: float) -> Result:
    """A closed loop from a process on the first host."""
    command = [sys.executable, "-m", "benchmarks.machines", "--client", name, str(connections), str(seconds)]
    return Result(**json.loads(server.output(command, timeout_s=seconds + 60)))


def run(folder: Path, given: Namespace) -> dict[tuple[str, str, int], list[Result]]:
    """Results by kind of request, place and number of connections, one for each round."""
    found: dict[tuple[str, str, int], list[Result]] = {}
    models = {"small": mlp(folder).path, "large": pool(folder).path}
    for name, model in models.items():
        app = folder / f"{name}.yaml"
        dump_yaml(
            app,
            {
                "name": name,
                "slo_ms": 5000,
                "stages": [{"name": name, "model": str(model)}],
                "system": {"name": "static", "replicas": 1, "cores": 1},
                "cluster": {"nodes": [{"hardware": "local", "count": 1}]},
            },
        )
        with Hosts(2, given.mbit_s * 1e6 if name == "large" else None) as hosts:
            for number in range(given.rounds):
                for place in PLACES:
                    with serving(hosts, folder, app, place):
                        measured(hosts[0], name, CONNECTIONS[name], 1.0)
                        for connections in (1, CONNECTIONS[name]):
                            result = measured(hosts[0], name, connections, given.seconds)
                            say(f"{name}, {place}, {connections} connections, round {number}: {result.rps:,.0f}/s")
                            found.setdefault((name, place, connections), []).append(result)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        result = asyncio.run(ask(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
        fields = {"answers": result.answers, "seconds": result.seconds, "wrong": result.wrong}
        print(json.dumps({**fields, "latencies_ms": result.latencies_ms}))  # noqa: T201
        return
    parser = arguments(__doc__, seconds=6, quick=2)
    parser.add_argument("--rounds", type=int, default=3, help="how often each place is measured (default 3)")
    parser.add_argument("--mbit-s", type=float, default=200.0, help="of the link, for large tensors (default 200)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        found = run(folder, given)
    link_ms = 3 * 224 * 224 * 4 * 8 / given.mbit_s / 1e3
    rows: dict[str, list[tuple[object, ...]]] = {"small": [], "large": []}
    for (name, place, connections), results in found.items():
        rate = median(each.rps for each in results)
        base = median(each.rps for each in found[name, "local", connections])
        p50 = median(median(each.latencies_ms) for each in results)
        last: object = rate / base
        if name == "large":
            last = 1e3 / rate / link_ms if place == PLACES[-1] else None
        rows[name].append((place, connections, rate, p50, last, sum(each.wrong for each in results)))
    columns = ("worker", "connections", "answers/s", "p50 ms")
    text = "\n\n".join(
        [
            f"Medians of {given.rounds} rounds of {given.seconds:g} s; the places take turns. The worker has one core.",
            "Small requests (16 numbers, JSON):",
            table((*columns, "over local", "wrong"), rows["small"]),
            f"Tensors of 600 kB (binary); at {given.mbit_s:g} Mbit/s, the link takes {link_ms:.1f} ms for one:",
            table((*columns, "time for each over the link's", "wrong"), rows["large"]),
        ]
    )
    publish("machines", "Workers on other machines", text, write=not given.no_write)


if __name__ == "__main__":
    main()
