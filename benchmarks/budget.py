"""CPU time of a small request: per step in edge and deciding process, then per thread of a whole server.

    python -m benchmarks.budget [--seconds 5]
    python -m benchmarks.budget --bound-only     # only what one CPU can decide for, printed and not published

The steps are those of tests/serve/path.py: the real edge, driver, core and log between a connection and a backend
that take no time, with 32 requests at once. The threads are those of `sloop serve` with 64 connections.

What one CPU can decide for: the deciding process, pinned to one CPU, takes the recorded frames of several edges and of
several workers, and encodes what it tells them; only the sockets are left out.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

import uvloop

from benchmarks import http_servers
from benchmarks.notebook import arguments, children, publish, say, table, workspace
from benchmarks.peers.models import mlp
from sloop.actions import End, StartBatch
from sloop.events import Finished
from sloop.runlog import Record
from sloop.serve.blocks import BlockReader, write_block
from sloop.serve.edge.inputs import read, write
from sloop.serve.messages import FromEdge, RequestEnded, decoder, encode
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId
from tests.serve.path import ANSWER, BODY, Deciding, Way

TOGETHER = 32
ROUNDS = 300
TRIES = 7
CONNECTIONS = 64
EDGES, REPLICAS = (1, 4, 16), (8, 64, 512)
BATCH = 8
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def timed(act: Callable[[], object]) -> float:
    """CPU time per request in µs, the best of several tries; `act` handles `TOGETHER` requests."""
    best = float("inf")
    for _ in range(TRIES):
        begun = time.process_time_ns()
        for _ in range(ROUNDS):
            act()
        best = min(best, (time.process_time_ns() - begun) / (ROUNDS * TOGETHER * 1e3))
    return best


async def timed_walk(walk: Callable[[], Awaitable[object]]) -> float:
    """The same for a coroutine."""
    best = float("inf")
    for _ in range(TRIES):
        begun = time.process_time_ns()
        for _ in range(ROUNDS):
            await walk()
        best = min(best, (time.process_time_ns() - begun) / (ROUNDS * TOGETHER * 1e3))
    return best


async def steps(folder: Path) -> list[tuple[str, str, float]]:
    """Each step of a request, the process that does it, and its CPU time in µs."""
    way = Way(folder)
    await way.warm_up()
    whole = await timed_walk(lambda: way.walk(TOGETHER))
    ingress = await timed_walk(lambda: way.walk(TOGETHER, at_once=True))
    frame = way.recorded(TOGETHER, first=1)
    deciding = await timed_walk(lambda: way.decide([frame], TOGETHER))
    wanted = read(BODY, None, way.validator)
    tensors, output = list(wanted.tensors.values()), Tensor("FP32", (1, ANSWER), bytes(4 * ANSWER))
    answer = write_block([output], None)
    now_ns = way.driver.now_ns
    records = [Request(RequestId(n), now_ns, now_ns, now_ns + 10**9) for n in range(TOGETHER)]
    ends = [End(RequestId(n), Outcome.SERVED) for n in range(TOGETHER)]
    logged: list[Record] = [*records, StartBatch(BatchId(0), ReplicaId(0), "only", tuple(r.id for r in records)), *ends]
    read_block = BlockReader({}).tensors
    told = [RequestEnded(n, Outcome.SERVED, "1", [answer]) for n in range(TOGETHER)]

    def decide() -> None:
        nonlocal now_ns
        now_ns += 1
        for place, request in enumerate(records):
            actions = way.core.handle(now_ns, request, place < TOGETHER - 1)
        for action in actions:
            if isinstance(action, StartBatch):
                way.core.handle(now_ns, Finished(action.batch, action.replica, 1))

    def record() -> None:
        for recorder in way.recorders:
            recorder.extend([(now_ns, each) for each in logged])

    read_frame = decoder(list[FromEdge]).decode
    edge = [
        ("the head, the body, the answer's head", ingress),
        ("JSON to checked tensors", timed(lambda: [read(BODY, None, way.validator) for _ in range(TOGETHER)])),
        (
            "tensors to a block, a block to tensors",
            timed(lambda: [(write_block(tensors, None), read_block(answer)) for _ in range(TOGETHER)]),
        ),
        ("tensors to JSON", timed(lambda: [write("path", "1", wanted.form, {"y": output}) for _ in range(TOGETHER)])),
    ]
    core = [
        ("records out of a frame and into one", timed(lambda: (read_frame(frame), encode(told)))),
        ("the core: admission, order, batch, route, end", timed(decide)),
        ("event log and metrics", timed(record)),
    ]
    own = whole - deciding
    rows = [("edge", name, cost) for name, cost in edge]
    rows += [
        ("edge", "handing over between these", own - sum(cost for _, cost in edge)),
        ("edge", "**together**", own),
        *(("deciding", name, cost) for name, cost in core),
        ("deciding", "handing over between these", deciding - sum(cost for _, cost in core)),
        ("deciding", "**together**, from recorded frames", deciding),
    ]
    await way.close()
    return rows


async def bound_us(folder: Path, edges: int, replicas: int, batch_max: int) -> float:
    """CPU time of the deciding process for one request, in µs, if `TOGETHER` come at a time, spread over the edges, and
    batches have up to `batch_max` requests."""
    deciding = Deciding(folder, edges=edges, replicas=replicas, batch_max=batch_max)
    await deciding.warm_up()
    each = TOGETHER // edges
    frames = [deciding.recorded(each, first=1 + edge * each) for edge in range(edges)]
    try:
        return await timed_walk(lambda: deciding.decide(frames, TOGETHER))
    finally:
        await deciding.close()


def bounds(folder: Path) -> list[tuple[object, ...]]:
    """By numbers of edges and replicas: CPU time of a request in µs and requests per second of one CPU, with batches of
    one request and of up to `BATCH`."""
    rows: list[tuple[object, ...]] = []
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    try:
        for edges in EDGES:
            for replicas in REPLICAS:
                say(f"{edges} edges, {replicas} replicas")
                (folder / f"{edges}-{replicas}").mkdir()
                found = [
                    uvloop.run(bound_us(folder / f"{edges}-{replicas}", edges, replicas, most)) for most in (1, BATCH)
                ]
                rows.append((edges, replicas, found[0], round(1e6 / found[0]), found[1], round(1e6 / found[1])))
    finally:
        os.sched_setaffinity(0, cpus)
    return rows


def bound_table(folder: Path) -> str:
    """What one CPU can decide for, as a table with its meaning."""
    columns = ("edges", "replicas", "µs, batches of 1", "requests/s", f"µs, batches of {BATCH}", "requests/s")
    return (
        "The deciding process alone on one CPU: it decodes the recorded frames of so many edges, together "
        f"{TOGETHER} requests in a turn of its loop, decides, encodes orders for workers, decodes reports, logs "
        "and counts, and encodes the answers; sockets are left out:\n\n" + table(columns, bounds(folder))
    )


def threads(model: Path, folder: Path, seconds: float) -> tuple[float, list[tuple[str, float, float]]]:
    """Answers per second of a whole server, and µs per request of each thread, in user mode and in the kernel."""
    sloop = [str(Path(sys.executable).with_name("sloop"))]
    subprocess.run([*sloop, "profile", str(model)], check=True, capture_output=True)
    app = folder / "app.yaml"
    app.write_text(f"name: mlp\nslo_ms: 1000\nstages: [{{name: mlp, model: {model}}}]\nsystem: static\n")
    command = [
        *sloop,
        "serve",
        str(app),
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--json",
        "--state",
        str(folder / "s"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(json.loads(server.stdout.readline())["http"].rpartition(":")[2])
            ask(port, 2.0)
            pids = [server.pid, *(pid for pid, _ in children(server.pid))]
            before = spent(pids)
            answers = ask(port, seconds)
            after = spent(pids)
            names = {key: name_of(key, server.pid) for key in after}
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)
    rows: dict[str, tuple[float, float]] = {}
    for key, (user_s, kernel_s) in after.items():
        user_0, kernel_0 = before.get(key, (0.0, 0.0))
        user, kernel = rows.get(names[key], (0.0, 0.0))
        rows[names[key]] = (user + (user_s - user_0) / answers * 1e6, kernel + (kernel_s - kernel_0) / answers * 1e6)
    return answers / seconds, [(name, *cost) for name, cost in rows.items() if sum(cost) >= 0.3]


def ask(port: int, seconds: float) -> int:
    """Send requests in a closed loop; the number of answers."""
    head = f"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n\r\n"
    request = head.encode() + BODY

    class Client(asyncio.Protocol):
        """Sends the next request when the answer is here; small ones come in one piece."""

        answers = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            self.transport.write(request)

        def data_received(self, data: bytes) -> None:
            assert data.startswith(b"HTTP/1.1 200"), data
            Client.answers += 1
            self.transport.write(request)

    async def main() -> int:
        for _ in range(CONNECTIONS):
            await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
        await asyncio.sleep(seconds)
        return Client.answers

    return uvloop.run(main())


def spent(pids: list[int]) -> dict[tuple[int, int], tuple[float, float]]:
    """CPU seconds by process and thread, in user mode and in the kernel."""
    found = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[pid, int(task.name)] = (int(fields[11]) * TICK_S, int(fields[12]) * TICK_S)
    return found


def name_of(key: tuple[int, int], server: int) -> str:
    """A thread's name for people."""
    pid, thread = key
    if pid == server:
        return "the deciding process" if thread == pid else "its other threads"
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"sloop.serve.edge.process" in command:
            return "the edge"
    return "the worker"


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=5.0, quick=2.0)
    parser.add_argument("--bound-only", action="store_true", help="only print what one CPU can decide for")
    options = parser.parse_args()
    if options.bound_only:
        with workspace(options.keep) as folder:
            sys.stdout.write(bound_table(folder) + "\n")
        return
    with workspace(options.keep) as folder:
        say("the steps")
        (folder / "state").mkdir(exist_ok=True)
        parts = uvloop.run(steps(folder / "state"))
        say("a bare parser")
        _, bare_us = http_servers.measure("bare httptools", options.seconds)
        say("the threads")
        rps, rows = threads(mlp(folder).path, folder, options.seconds)
        say("what one CPU can decide for")
        bound = bound_table(folder)
    deciding_us = next(cost for where, name, cost in parts if where == "deciding" and name.startswith("**"))
    text = (
        "A JSON request of 16 numbers to a small model, µs of CPU each. Step by step, connection and worker taking no "
        f"time, {TOGETHER} requests at a time, with one core otherwise idle; between an edge and the deciding process "
        "no frames here, but for what the deciding process takes from and tells to recorded ones:\n\n"
        + table(("process", "step", "µs"), parts)
        + f"\n\nThe deciding process takes {deciding_us / bare_us:.2f} times what a bare `httptools` answer takes here "
        f"({bare_us:.1f} µs, sockets included; `benchmarks/http_servers.py`).\n\n"
        + f"Thread by thread in a whole server that gave {rps:,.0f} answers/s at {CONNECTIONS} connections, two "
        "cores shared with the client (a busy neighbour makes the same instructions dearer):\n\n"
        + table(("thread", "user µs", "kernel µs"), rows)
        + f"\n\n{bound}"
    )
    publish("budget", "What a request costs", text, write=not options.no_write)


if __name__ == "__main__":
    main()
