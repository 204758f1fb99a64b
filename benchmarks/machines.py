"""What it costs that workers are on another machine, whether requests meet their deadlines there as well, and how long
models take to get there.

    python -m benchmarks.machines [--rounds 3] [--mbit-s 200] [--parts cost attainment transfers cold-starts …]

Hosts are built out of network namespaces on this machine (`tests/hosts.py`; needs root), and share its cores.

**Cost.** The first host has server and client. The worker runs beside the server as its child (local), beside it under
an agent, or under an agent on another host; the three take turns. All requests are sent in a closed loop: small ones,
and tensors of 600 kB over a link that `--mbit-s` limits, where the link's time is what the tensor alone would take.

**Attainment.** One application with one system and one trace is served by the local backend, and by Ray on three hosts,
in turn, and simulated. The rate is one at which the simulator foresees that 85 to 98 % of the requests are in time, of
a model that is large enough for the machine to have cores left, with small inputs. The speed of the machine varies, so
one pass of the profile is measured before each pair of runs, and all passes together are simulated. What the model
takes is also simulated as the local runs recorded it, which leaves only the errors of the simulator itself.

**Transfers.** Six hosts with links of 400 Mbit/s: the deciding process's side of agents (`AgentBackend`) with a store,
and an agent on each other host, with a cache in memory. A model of 50 MiB comes from one agent to four others: along a
chain; in four transfers of their own, which share the link of the source; and along a chain whose second receiver is
killed halfway. Times run from the order to the last report, and the three take turns. The ideal time is that of the
model's bytes on one link, without the 4 to 5 % that headers of packets take.

**Cold starts.** Six hosts: a server, a store, and four nodes whose links are limited. Systems that bring weights to
nodes in different ways serve the same excerpt of a trace, one after the other, and are simulated
(`benchmarks.cold_starts`).

**Starts in parts.** The same for a model whose weights are spread over its layers: the fastest of these systems, whose
replicas start whole, and the same with replicas that start as parts of one model.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.request import urlopen

import numpy as np
import uvloop
import yaml
from msgspec import Struct, structs

from benchmarks.models import small
from benchmarks.notebook import arguments, publish, say, table, workspace
from benchmarks.peers.models import mlp, pool
from sloop.actions import Evict, Transfer
from sloop.demo.live import count_run
from sloop.demo.run import dump_yaml
from sloop.events import Event, NodeLost, NodeReady, TransferFailed, Transferred
from sloop.profile.passes import in_service_samples
from sloop.profile.profile import Pass, load_profile, path_beside, save_profile
from sloop.runlog.summary import RunRow
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.protocols import Servable
from sloop.shared_memory import Arenas
from sloop.tensor import Signature
from sloop.vocabulary import STORE, ModelWeights, Node, TransferId
from tests import joining
from tests.hosts import Host, Hosts, Process, RayCluster

PLACES: Final = ("local", "agent beside", "agent on the other host")
PORT: Final = 8000
JOIN: Final = 9400
START_S_MAX: Final = 120
CONNECTIONS: Final = {"small": 32, "large": 4}
SLOOP: Final = [sys.executable, "-m", "sloop"]
JOINING: Final = [sys.executable, joining.__file__]
ATTAINED: Final = 0.92
"""The attainment that the simulator is to foresee."""
PIXELS: Final = 64
CORES: Final = 0.3
"""Of each of two replicas: Ray's processes on three hosts need the rest of a small machine."""
DEADLINES: Final = 1.8
"""The deadline is so many times a batch of one on these cores. Nearer to saturation, with a longer deadline, 3 % of the
machine's speed change attainment by more than 2 points."""
PASS: Final = ("--cores", CORES, "--batches", "1,2,4", "--seconds", 1)
MODEL_BYTES: Final = 50 << 20
LINK_BITS_S: Final = 400e6
IDEAL_S: Final = 8 * MODEL_BYTES / LINK_BITS_S
STORE_PORT: Final = 8081
RECEIVERS: Final = ("node-2", "node-3", "node-4", "node-5")
SOURCE: Final = "node-1"
KILLED: Final = 3
"""The host of the receiver that is killed, the second of the chain."""
LONG: Final = 5
"""The rate is found by simulating so many times the length of a run."""


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
    options = ["serve", str(app), "--http-port", str(PORT), "--state", str(folder / f"state-{app.stem}")]
    agents = ["--backend", "ray", "--address", server.address, "--agents-port", str(JOIN)]
    command = [*SLOOP, *options] if place == "local" else [*JOINING, *options, *agents]
    started = [server.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
    if place != "local":
        agent = [*JOINING, "agent", server.address, str(JOIN), "local-0"]
        started.append(
            (server if place == "agent beside" else other).run(
                agent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )
    try:
        _until_ready(server)
        yield
    finally:
        started[0].send_signal(signal.SIGINT)
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


# Attainment


def sloop(*words: object) -> dict[str, Any]:
    """What a command prints as JSON."""
    done = subprocess.run([*SLOOP, *map(str, words), "--json"], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def scenario_of(folder: Path, model: Path, slo_ms: int, rate_rps: float, seconds: float) -> Path:
    """Two replicas, one on each of two nodes, and Poisson arrivals."""
    path = folder / "attainment.yaml"
    dump_yaml(
        path,
        {
            "name": "same",
            "slo_ms": slo_ms,
            "stages": [{"name": "classify", "model": str(model)}],
            "system": {"name": "static", "replicas": 2, "cores": CORES},
            "cluster": {"nodes": [{"hardware": "local", "count": 2, "cores": CORES}]},
            "trace": {"kind": "poisson", "rate": round(rate_rps, 1)},
            "duration_s": seconds,
        },
    )
    return path


def found_scenario(folder: Path, seconds: float) -> Path:
    """A scenario at whose rate the simulator foresees about nine of ten in time."""
    model = small(folder, "densenet121", PIXELS)
    say("profiling the model")
    profile = sloop("profile", model, *PASS, "--passes", 2)
    slo_ms = round(DEADLINES * min(each["p50_ms"] for each in profile["samples"] if each["batch"] == 1))
    low, high = 1.0, 2000.0
    for _ in range(12):
        rate = (low * high) ** 0.5
        scenario = scenario_of(folder, model, slo_ms, rate, LONG * seconds)
        if sloop("simulate", scenario)["runs"][0]["attainment"] > ATTAINED:
            low = rate
        else:
            high = rate
    return scenario_of(folder, model, slo_ms, low, seconds)


def one_more_pass(model: Path, passes: list[Pass]) -> None:
    """Measure the model once more, and write a profile of all passes."""
    file = path_beside(model)
    profile = load_profile(file)
    again = file.with_name("again.json")
    sloop("profile", model, *PASS, "--passes", 1, "--out", again)
    passes += load_profile(again).passes
    samples = in_service_samples(passes, profile.latency_ms)
    save_profile(structs.replace(profile, passes=tuple(passes), samples=samples), file)


class ServedRun(Struct, frozen=True):
    """A run, counted by the server and by its clients."""

    counted: RunRow
    of_clients: float
    log: Path


def served(host: Host, scenario: Path, options: Sequence[str], env: Mapping[str, str], seed: int) -> ServedRun:
    """Serve the scenario on a host, send its requests, and count what was in time."""
    state = scenario.parent / f"state-{'ray' if options else 'local'}-{seed}"
    command = [*SLOOP, "serve", str(scenario), "--http-port", str(PORT), "--state", str(state), *options]
    with (scenario.parent / "server.txt").open("w") as words:
        server = host.run(command, env=env, stdout=subprocess.DEVNULL, stderr=words)
        try:
            _until_ready(host)
            declared = yaml.safe_load(scenario.read_text())
            load = [*SLOOP, "load", f"http://127.0.0.1:{PORT}", "--trace", str(scenario)]
            load += ["--slo-ms", str(declared["slo_ms"]), "--seed", str(seed), "--json"]
            seen = json.loads(host.output(load, timeout_s=600))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    log = state / "log"
    counted = count_run(log, first_ns=0, duration_s=round(declared["duration_s"])).row
    return ServedRun(counted, seen["attainment"], log)


def attainment(folder: Path, given: Namespace) -> str:
    """The table of one application on the local backend, on Ray, and simulated."""
    scenario = found_scenario(folder, given.trace_s)
    declared = yaml.safe_load(scenario.read_text())
    model = Path(declared["stages"][0]["model"])
    passes = list(load_profile(path_beside(model)).passes)
    with Hosts(3) as hosts, RayCluster(hosts) as ray:
        kinds: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
            "local": ((), {}),
            "Ray, three hosts": (("--backend", "ray", "--address", ray.address), ray.env),
        }
        found: dict[str, list[ServedRun]] = {kind: [] for kind in kinds}
        for number in range(given.runs):
            one_more_pass(model, passes)
            for kind, (options, env) in kinds.items():
                run = served(hosts[0], scenario, options, env, number)
                say(f"{kind}, run {number}: {run.counted.attainment:.1%}, of clients {run.of_clients:.1%}")
                found[kind].append(run)
    rows = [_row(kind, [(run.counted.attainment, run.counted.p99_ms) for run in found[kind]]) for kind in kinds]
    clients = [f"{kind} {100 * median(run.of_clients for run in runs):.3g} %" for kind, runs in found.items()]
    seeds = range(given.runs)
    simulated = [sloop("simulate", scenario, "--seed", seed)["runs"][0] for seed in seeds]
    recorded = [
        sloop("simulate", scenario, "--seed", seed, "--recorded", run.log)["runs"][0]
        for seed, run in zip(seeds, found["local"], strict=True)
    ]
    rows.append(_row("simulated", [(run["attainment"], run["p99_ms"]) for run in simulated]))
    rows.append(
        _row("simulated, durations of the local runs", [(run["attainment"], run["p99_ms"]) for run in recorded])
    )
    about = (
        f"DenseNet-121 for {PIXELS} × {PIXELS} pixels on two replicas of {CORES} cores, {declared['trace']['rate']:g} "
        f"requests/s for {given.trace_s:g} s, deadline {declared['slo_ms']} ms; {given.runs} runs of each, in turn; "
        f"the same arrivals in each round; a profile of {sum(one.in_service for one in passes)} passes. Figures are of "
        f"the servers' logs. Of the clients' requests were in time (median): {', '.join(clients)}."
    )
    return f"{about}\n\n{table(('', 'in time, %: median', 'least', 'most', 'p99 ms'), rows)}"


def _row(kind: str, runs: Sequence[tuple[float, float | None]]) -> tuple[object, ...]:
    """The medians of some runs, each with its attainment and 99th percentile."""
    values = [100 * attained for attained, _ in runs]
    return kind, median(values), min(values), max(values), median(p99 or 0.0 for _, p99 in runs)


# Transfers


class Reports:
    """What agents report of transfers (`BackendListener`), and which nodes are there."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self.open: set[tuple[int, str]] = set()
        """Transfers under way, with their receivers."""
        self.failed: list[str] = []
        self.changed = asyncio.Event()

    def on_event(self, event: Event) -> None:
        if isinstance(event, NodeReady):
            self.nodes.add(event.node.name)
        elif isinstance(event, NodeLost):
            self.nodes.discard(event.node)
            self.open = {each for each in self.open if each[1] != event.node}
        elif isinstance(event, Transferred | TransferFailed):
            self.open.discard((event.transfer, event.node))
            if isinstance(event, TransferFailed):
                self.failed.append(f"{event.node}: {event.error}")
        self.changed.set()

    def on_finished(self, *_: object) -> None:
        raise AssertionError("nothing runs")

    on_failed = on_finished

    async def until_over(self) -> None:
        """Wait for the end of all transfers."""
        while self.open:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 120)
        if self.failed:
            raise RuntimeError(self.failed[0])

    async def until_there(self, name: str) -> None:
        """Wait for a node."""
        while name not in self.nodes:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)


async def order_transfers(address: str, url: str) -> None:
    """The deciding process's side, on the first host: does what lines of stdin say, and answers each with the seconds
    that it took."""
    weights = ModelWeights("model", MODEL_BYTES)
    servables = {("stage", "model"): Servable("model.bin", Signature((), ()), source=url, weights=(weights,))}
    nodes = [Node(name, "local", 0.1, 1 << 40) for name in (SOURCE, *RECEIVERS)]
    arenas, reports, last = Arenas(), Reports(), 0
    backend = AgentBackend(
        *(servables, {}, joining.JoiningNodes(address)),
        arenas=arenas,
        nodes=nodes,
        port=JOIN,
        pid=os.getpid(),
        memory=joining.Memory(),
    )
    await backend.open()
    reports.nodes = {node.name for node in nodes}
    backend.attach(reports)

    def begin(source: str, *receivers: str) -> None:
        nonlocal last
        backend.order(Transfer(TransferId(last), weights, source, receivers))
        reports.open |= {(last, name) for name in receivers}
        last += 1

    try:
        while kind := (await asyncio.to_thread(sys.stdin.readline)).strip():
            for name in RECEIVERS if kind != "store" else ():
                await reports.until_there(name)
                backend.order(Evict(name, weights))
            await asyncio.sleep(0.5)  # the kernel frees the memory of what was deleted
            begun_s = time.monotonic()
            if kind == "store":
                begin(STORE, SOURCE)
            elif kind == "unicast":
                for name in RECEIVERS:
                    begin(SOURCE, name)
            else:
                begin(SOURCE, *RECEIVERS)
            await reports.until_over()
            print(time.monotonic() - begun_s, flush=True)  # noqa: T201
    finally:
        await backend.close()
        arenas.close()


def agent_on(host: Host, address: str, folder: Path, name: str) -> Process:
    """An agent with a cache in its host's memory."""
    argv, env = [*JOINING, "agent", address, str(JOIN), name], {"SLOOP_MODELS_CACHE": "/dev/shm/models"}
    with (folder / f"{name}.log").open("ab") as log:
        return host.run(argv, env=env, stdout=log, stderr=log)


def sent_bytes(host: Host) -> int:
    """What has left a host, but for what it has sent to itself."""
    lines = [line.split() for line in host.output(["cat", "/proc/net/dev"]).splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo:")


def check_copies(hosts: Sequence[Host], wanted: str) -> None:
    """Each of these hosts has the model, and nothing of another transfer."""
    for host in hosts:
        found = host.output(["sh", "-c", "cd /dev/shm/models && sha256sum */files/*"]).split()
        if found[::2] != [wanted]:
            raise RuntimeError(f"{host.name} has {found}, wanted one file of {wanted}")


def transfers(folder: Path, given: Namespace) -> str:
    """The table of chains, of transfers that share a link, and of a chain with a receiver that is killed."""
    content = random.Random(given.seed).randbytes(MODEL_BYTES)
    wanted = hashlib.sha256(content).hexdigest()
    (folder / "model.bin").write_bytes(content)
    took_s: dict[str, list[float]] = {kind: [] for kind in ("chain", "unicast", "killed")}
    sent: dict[str, list[float]] = {kind: [] for kind in took_s}
    with Hosts(2 + len(RECEIVERS), LINK_BITS_S) as hosts:
        address = hosts[0].address
        store = ["-m", "http.server", str(STORE_PORT), "--directory", str(folder)]
        hosts[0].run([sys.executable, *store], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        names = (SOURCE, *RECEIVERS)
        for name, host in zip(names, list(hosts)[1:], strict=True):
            agent_on(host, address, folder, name)
        url = f"http://{address}:{STORE_PORT}/model.bin#sha256={wanted}"
        argv = [sys.executable, "-m", "benchmarks.machines", "--transfers", address, url]
        ordering = hosts[0].run(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        def begin(kind: str) -> None:
            assert ordering.stdin is not None
            ordering.stdin.write(f"{kind}\n".encode())
            ordering.stdin.flush()

        def seconds() -> float:
            assert ordering.stdout is not None
            return float(ordering.stdout.readline())

        begin("store")
        seconds()
        for number in range(given.rounds):
            for kind, times in took_s.items():
                before = [sent_bytes(host) for host in hosts]
                begin("chain" if kind == "killed" else kind)
                if kind == "killed":
                    time.sleep(0.5 + IDEAL_S / 2)
                    hosts[KILLED].kill()
                times.append(seconds())
                sent[kind].append(sum(map(sent_bytes, hosts)) - sum(before))
                lost = hosts[KILLED] if kind == "killed" else None
                check_copies([host for host in list(hosts)[2:] if host is not lost], wanted)
                if kind == "killed":
                    agent_on(hosts[KILLED], address, folder, names[KILLED - 1])
                say(f"{kind}, round {number}: {times[-1] / IDEAL_S:.2f} of the ideal time")
        ordering.terminate()
    chain, unicast, killed = (median(times) for times in took_s.values())
    what = {"chain": "a chain", "unicast": "four transfers", "killed": "a chain whose second receiver is killed"}
    rows = [
        (what[kind], median(times), min(times) / IDEAL_S, median(times) / IDEAL_S, median(sent[kind]) / MODEL_BYTES)
        for kind, times in took_s.items()
    ]
    columns = ("50 MiB to four hosts", "s", "over the ideal: least", "median", "copies sent in all")
    return (
        f"{given.rounds} rounds, in turn; 400 Mbit/s for each host, so that one copy takes {IDEAL_S:.3f} s. After each "
        f"round the SHA-256 of every copy was compared.\n\n{table(columns, rows)}\n\n"
        f"Chain over the ideal time: {chain / IDEAL_S:.2f} (wanted: at most 1.15). Four transfers over the chain: "
        f"{unicast / chain:.2f} (wanted: at least 3.5). With a receiver killed halfway, over the chain: "
        f"{killed / chain:.2f} (wanted: at most 2)."
    )


def main() -> None:
    if sys.argv[1:2] == ["--transfers"]:
        uvloop.run(order_transfers(*sys.argv[2:]))
        return
    if sys.argv[1:2] == ["--client"]:
        result = asyncio.run(ask(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
        fields = {"answers": result.answers, "seconds": result.seconds, "wrong": result.wrong}
        print(json.dumps({**fields, "latencies_ms": result.latencies_ms}))  # noqa: T201
        return
    parser = arguments(__doc__, seconds=6, quick=2)
    parser.add_argument("--rounds", type=int, default=3, help="how often each place is measured (default 3)")
    parser.add_argument("--mbit-s", type=float, default=200.0, help="of the link, for large tensors (default 200)")
    parts = ["cost", "attainment", "transfers", "cold-starts", "starts-in-parts"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to measure (default: all)")
    parser.add_argument("--bursts", type=int, default=2, help="of each run of cold starts, 40 s each (default 2)")
    parser.add_argument("--cold-model", default="densenet121", help="starts cold; see benchmarks.models.small")
    parser.add_argument("--runs", type=int, default=5, help="of each backend, for the attainment (default 5)")
    parser.add_argument("--trace-s", type=float, default=20.0, help="seconds of each of these (default 20)")
    given = parser.parse_args()
    write = not given.no_write
    with workspace(given.keep) as folder:
        if "cost" in given.parts:
            publish("machines", "Workers on other machines", cost_text(run(folder, given), given), write=write)
        if "attainment" in given.parts:
            publish("machines-attainment", "Deadlines on other machines", attainment(folder, given), write=write)
        if "transfers" in given.parts:
            publish(
                "machines-transfers", "Models on their way to other machines", transfers(folder, given), write=write
            )
        if "cold-starts" in given.parts:
            from benchmarks.cold_starts import cold_starts  # noqa: PLC0415  # it uses this module

            publish("machines-cold-starts", "Cold starts on hosts", *cold_starts(folder, given), write=write)
        if "starts-in-parts" in given.parts:
            from benchmarks.cold_starts import starts_in_parts  # noqa: PLC0415  # it uses this module

            name, title = "machines-starts-in-parts", "Cold starts in parts, on hosts"
            publish(name, title, *starts_in_parts(folder, given), write=write)


def cost_text(found: Mapping[tuple[str, str, int], list[Result]], given: Namespace) -> str:
    """The tables of what distance costs."""
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
    return "\n\n".join(
        [
            f"Medians of {given.rounds} rounds of {given.seconds:g} s; the places take turns. The worker has one core.",
            "Small requests (16 numbers, JSON):",
            table((*columns, "over local", "wrong"), rows["small"]),
            f"Tensors of 600 kB (binary); at {given.mbit_s:g} Mbit/s, the link takes {link_ms:.1f} ms for one:",
            table((*columns, "time for each over the link's", "wrong"), rows["large"]),
        ]
    )


if __name__ == "__main__":
    main()
