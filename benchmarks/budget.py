"""CPU time of a small request: per step in the server's process, then per thread of a whole server.

    python -m benchmarks.budget [--seconds 5]

The steps are those of tests/serve/path.py: the real gateway, driver, core and log between a connection and a backend
that take no time, with 32 requests at once. The threads are those of `sloop serve` under `wrk` with 64 connections.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from benchmarks.notebook import arguments, children, publish, say, table, workspace
from benchmarks.peers.models import mlp
from sloop.actions import End, StartBatch
from sloop.events import Finished
from sloop.runlog import Record
from sloop.serve.gateway.inputs import read, write
from sloop.serve.transport import pack_batch, pack_table, unpack_outputs
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId
from tests.serve.path import ANSWER, BODY, Way

TOGETHER = 32
ROUNDS = 300
TRIES = 7
CONNECTIONS = 64
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


async def steps(folder: Path) -> list[tuple[str, float]]:
    """Each step of a request and its CPU time in µs."""
    way = Way(folder)
    await way.warm_up()
    whole = await timed_walk(lambda: way.walk(TOGETHER))
    ingress = await timed_walk(lambda: way.walk(TOGETHER, at_once=True))
    wanted = read(BODY, None, way.validator)
    requests = [list(wanted.tensors.values())] * TOGETHER
    sizes_table, payload = pack_table([[("FP32", (TOGETHER, ANSWER))]]), memoryview(bytes(4 * ANSWER * TOGETHER))
    output = {"y": Tensor("FP32", (1, ANSWER), payload[: 4 * ANSWER])}
    now_ns = way.driver.now_ns
    records = [Request(RequestId(n), now_ns, now_ns, now_ns + 10**9) for n in range(TOGETHER)]
    ends = [End(RequestId(n), Outcome.SERVED) for n in range(TOGETHER)]
    logged: list[Record] = [*records, StartBatch(BatchId(0), ReplicaId(0), "only", tuple(r.id for r in records)), *ends]

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
            recorder.extend(now_ns, logged)

    parts = [
        ("a task, the head, the body, the answer's head", ingress),
        ("JSON to checked tensors", timed(lambda: [read(BODY, None, way.validator) for _ in range(TOGETHER)])),
        ("the core: admission, order, batch, route, end", timed(decide)),
        (
            "tensors to a batch, a batch to tensors",
            timed(lambda: unpack_outputs(pack_batch(requests, batchable=True), sizes_table, payload)),
        ),
        ("event log and metrics", timed(record)),
        ("tensors to JSON", timed(lambda: [write("path", "1", wanted, output) for _ in range(TOGETHER)])),
    ]
    rest = whole - sum(cost for _, cost in parts)
    await way.close()
    return [*parts, ("handing over between these (driver, routes, one future)", rest), ("together", whole)]


def threads(model: Path, folder: Path, seconds: float) -> tuple[float, list[tuple[str, float, float]]]:
    """Answers per second of a whole server, and µs per request of each thread, in user mode and in the kernel."""
    sloop = [str(Path(sys.executable).with_name("sloop"))]
    subprocess.run([*sloop, "profile", str(model)], check=True, capture_output=True)
    app, lua = folder / "app.yaml", folder / "ask.lua"
    app.write_text(f"name: mlp\nslo_ms: 1000\nstages: [{{name: mlp, model: {model}}}]\nsystem: static\n")
    lua.write_text(f'wrk.method = "POST"\nwrk.body = [[{BODY.decode()}]]\n')
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
            url = f"{json.loads(server.stdout.readline())['http']}/v2/models/mlp/infer"
            ask(url, lua, 2.0)
            pids = [server.pid, *(pid for pid, _ in children(server.pid))]
            before = spent(pids)
            answers = ask(url, lua, seconds)
            after = spent(pids)
        finally:
            server.terminate()
            server.wait(20)
    names = {key: name_of(key, server.pid) for key in after}
    rows: dict[str, tuple[float, float]] = {}
    for key, (user_s, kernel_s) in after.items():
        user_0, kernel_0 = before.get(key, (0.0, 0.0))
        user, kernel = rows.get(names[key], (0.0, 0.0))
        rows[names[key]] = (user + (user_s - user_0) / answers * 1e6, kernel + (kernel_s - kernel_0) / answers * 1e6)
    return answers / seconds, [(name, *cost) for name, cost in rows.items() if sum(cost) >= 0.3]


def ask(url: str, lua: Path, seconds: float) -> int:
    """Send requests in a closed loop; the number of answers."""
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:.0f}", "-s", str(lua), url]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(said.partition(" requests in")[0].split()[-1])


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
    if pid != server:
        return "the worker"
    return "the event loop: everything above" if thread == pid else "Granian's threads: sockets and HTTP"


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=5.0, quick=2.0)
    options = parser.parse_args()
    with workspace(options.keep) as folder:
        say("the steps")
        (folder / "state").mkdir(exist_ok=True)
        parts = uvloop.run(steps(folder / "state"))
        say("the threads")
        rps, rows = threads(mlp(folder).path, folder, options.seconds)
    text = (
        "A JSON request of 16 numbers to a small model, µs of CPU each. Step by step in the server's process, the wire "
        f"and the worker taking no time, {TOGETHER} requests at a time, with one core otherwise idle:\n\n"
        + table(("step", "µs"), [(name, cost) for name, cost in parts])
        + f"\n\nThread by thread in a whole server that gave {rps:,.0f} answers/s at {CONNECTIONS} connections, two "
        "cores shared with the client (a busy neighbour makes the same instructions dearer):\n\n"
        + table(("thread", "user µs", "kernel µs"), rows)
    )
    publish("budget", "What a request costs", text, write=not options.no_write)


if __name__ == "__main__":
    main()
