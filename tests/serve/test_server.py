"""The whole server: real models in worker processes behind both protocols, its life from start to SIGTERM."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Self

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from benchmarks.frames import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, encode, frame
from sloop.app.limits import ServerLimits
from sloop.app.load import load_application, load_deployment
from sloop.errors import InputError, MachineError
from sloop.machine import hardware_name
from sloop.runlog import Header, read_log
from sloop.runlog.fold import DeploymentState
from sloop.runlog.segments import FOLDER, segments_in
from sloop.serve.cluster.agents import NodeMemory
from sloop.serve.control.loading import UnloadedModel, loadable, within
from sloop.serve.control.servables import COPIES, Models
from sloop.serve.edge.grpc.schema import SERVICE
from sloop.serve.journal import Observed
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.serve.server import (
    NODES,
    Serving,
    Settings,
    StopOrders,
    is_loopback,
    locked,
    open_journal,
    reload,
    serve,
    serving,
)
from sloop.systems.replay import beginning_of, rebuild, replay_log
from sloop.systems.setup import Setup, set_up
from sloop.tensor import Port, Signature
from sloop.vocabulary import Request
from tests.onnx_graphs import save_model
from tests.serve.edge.fakes import LoopThread
from tests.serve.rig import limited

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    http_client: ModuleType = pytest.importorskip("tritonclient.http")
    grpc_client: ModuleType = pytest.importorskip("tritonclient.grpc")

pytestmark = pytest.mark.live

ECHO = Signature((Port("x", "FP32", (-1, 4)),), (Port("x", "FP32", (-1, 4)),))
PROFILE = {
    "latency_ms": {"form": "amdahl", "gamma": 0.1, "epsilon": 0.5, "delta": 0, "eta": 0.2},
    "max_batch": 16,
    "max_cores": 1,
    "load_s": 0.5,
    "memory_bytes": 10_000_000,
}


def document(*models: Path, slo_ms: float = 5000, replicas: int = 1) -> dict[str, object]:
    """A chain of models, each in a stage of its own."""
    names = [f"s{place}" for place in range(len(models))]
    stages = [
        {
            "name": name,
            "after": names[:place][-1:],
            "variants": [{"name": "v", "model": str(model), "profile": PROFILE}],
        }
        for place, (name, model) in enumerate(zip(names, models, strict=True))
    ]
    system = {"name": "static", "replicas": replicas, "cores": 0.5}
    cluster = {"nodes": [{"hardware": "local", "count": 1}]}
    return {"name": "demo", "slo_ms": slo_ms, "stages": stages, "system": system, "cluster": cluster}


class Running:
    """A server in this process, on a loop in a thread."""

    def __init__(
        self,
        thread: LoopThread,
        folder: Path,
        *described: Mapping[str, object],
        model: str = "",
        limits: Mapping[str, Any] = MappingProxyType({}),
        settings: Mapping[str, Any] = MappingProxyType({}),
        opened: tuple[Setup, Models, Mapping[str, UnloadedModel]] | None = None,
    ) -> None:
        setup, models, left_out = opened or loadable(set_up(load_deployment(described)), folder)
        self.thread, self.folder = thread, folder
        setup = limited(setup, **{"drain_s": 5, **limits})
        wanted = Settings(http_port=0, grpc_port=0, state_folder=folder, **settings)
        if model:
            models = {key: Servable(model, ECHO) for key in models}
        self.context = serving(setup, models, wanted, left_out)
        self.server: Serving = thread.call(self.context.__aenter__())

    def __enter__(self) -> Self:
        """It is ready."""
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=20)
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        self.retry_after = response.getheader("retry-after")
        return response.status, text

    def wait_until_ready(self) -> None:
        wait_until_ready(self.server.http_port)

    def close(self) -> None:
        self.thread.call(self.context.__aexit__(None, None, None))


def wait_until_ready(port: int) -> None:
    for _ in range(1000):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/v2/health/ready")
        status = connection.getresponse().status
        connection.close()
        if status == 200:
            return
        time.sleep(0.02)
    pytest.fail("the server did not become ready in 20 s")


@pytest.fixture(scope="module")
def running(thread: LoopThread, tmp_path_factory: pytest.TempPathFactory, mlp: Path, tail: Path) -> Iterator[Running]:
    with Running(thread, tmp_path_factory.mktemp("state"), document(mlp, tail)) as running:
        yield running


def answer_of(x: Any, mlp: Path, tail: Path) -> Any:
    """ONNX Runtime's own."""
    (y,) = ort.InferenceSession(mlp).run(None, {"x": x})
    (z,) = ort.InferenceSession(tail).run(None, {"y": y})
    return z


@pytest.mark.parametrize("protocol", ["http", "http json", "grpc"])
def test_the_official_client_gets_onnx_runtimes_own_answer(
    running: Running, mlp: Path, tail: Path, protocol: str
) -> None:
    module = grpc_client if protocol == "grpc" else http_client
    port = running.server.grpc_port if protocol == "grpc" else running.server.http_port
    client = module.InferenceServerClient(f"127.0.0.1:{port}")
    for rows in (1, 3, 16):
        x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        tensor = module.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x, **({"binary_data": False} if protocol == "http json" else {}))
        wanted = [module.InferRequestedOutput("z", **({"binary_data": False} if protocol == "http json" else {}))]
        got = client.infer("demo", [tensor], outputs=wanted).as_numpy("z")
        np.testing.assert_allclose(got, answer_of(x, mlp, tail), rtol=1e-6)
    client.close()


def test_many_at_once_each_get_their_own_answer(running: Running, mlp: Path, tail: Path) -> None:
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        client = http_client.InferenceServerClient(f"127.0.0.1:{running.server.http_port}")
        for turn in range(10):
            x = np.full((1 + number % 3, 4), number + turn / 10, np.float32)
            tensor = http_client.InferInput("x", x.shape, "FP32")
            tensor.set_data_from_numpy(x)
            answers[number * 100 + turn] = (x, client.infer("demo", [tensor]).as_numpy("z"))
        client.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(answers) == 120
    for x, z in answers.values():
        np.testing.assert_allclose(z, answer_of(x, mlp, tail), rtol=1e-5)


def test_metrics_state_and_decisions_tell_of_it(running: Running) -> None:
    status, _ = running.ask("POST", "/v2/models/demo/infer", infer_body(1))
    assert status == 200
    _, metrics = running.ask("GET", "/metrics")
    served = running.server.metrics.ended().total()
    assert f'sloop_requests_total{{model="demo",outcome="served"}} {served:.1f}' in metrics.decode()
    state = json.loads(running.ask("GET", "/v2/sloop/state")[1])
    (application,) = state["applications"]
    assert [stage["name"] for stage in application["stages"]] == ["s0", "s1"]
    edge, of_grpc = state["edges"]
    assert (edge["name"], edge["ready"], edge["open"]) == ("edge 0", True, 0)
    assert edge["address"] == f"127.0.0.1:{running.server.http_port}"
    assert edge["since_s"] < state["now_s"]
    assert of_grpc["grpc_address"] == f"127.0.0.1:{running.server.grpc_port}"
    decisions = json.loads(running.ask("GET", "/v2/sloop/decisions?limit=1")[1])
    assert len(decisions["decisions"]) == 1
    assert decisions["decisions"][0]["why"]


def test_statistics_count_rows_requests_and_batches(running: Running) -> None:
    clients = [
        module.InferenceServerClient(f"127.0.0.1:{port}")
        for module, port in ((http_client, running.server.http_port), (grpc_client, running.server.grpc_port))
    ]

    def counts() -> list[tuple[int, ...]]:
        """Inferences, requests and batches, as each client is told."""
        found = []
        for client in clients:
            options = {"as_json": True} if client is clients[1] else {}
            (stats,) = client.get_inference_statistics("demo", **options)["model_stats"]
            success = stats["inference_stats"].get("success", {})  # JSON of protobuf leaves out what is 0
            numbers = stats.get("inference_count", 0), success.get("count", 0), stats.get("execution_count", 0)
            found.append(tuple(map(int, numbers)))
        return found

    before = counts()
    for client, module, rows in zip(clients, (http_client, grpc_client), (3, 5), strict=True):
        tensor = module.InferInput("x", (rows, 4), "FP32")
        tensor.set_data_from_numpy(np.zeros((rows, 4), np.float32))
        client.infer("demo", [tensor])
    for (inferences, requests, batches), now in zip(before, counts(), strict=True):
        assert now == (inferences + 8, requests + 2, batches + 4), "of two stages"
    for client in clients:
        client.close()


def infer_body(rows: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": [0.5] * (4 * rows)}]}


def test_a_budget_that_cannot_be_met_is_a_504_and_too_many_rows_a_400(running: Running) -> None:
    status, text = running.ask("POST", "/v2/models/demo/infer", infer_body(1), {"x-slo-ms": "10", "x-elapsed-ms": "50"})
    assert status == 504, text
    status, text = running.ask("POST", "/v2/models/demo/infer", infer_body(1025))
    assert status == 400
    assert b"1025 rows" in text


def test_a_deployments_limit_of_bytes_holds_for_all_its_models(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    described = [document(mlp) | {"name": name} for name in ("one", "two")]
    for each in described:
        del each["cluster"]
    shop = {"name": "shop", "applications": described, "limits": {"bytes": 1000, "requests": 50}}
    with Running(thread, tmp_path, shop) as running:
        assert running.ask("POST", "/v2/models/two/infer", infer_body(1))[0] == 200
        status, text = running.ask("POST", "/v2/models/two/infer", infer_body(100))
        assert (status, b"the limit is 1000" in text) == (413, True), text
    assert_replays(tmp_path)


def test_segments_of_a_live_server_replay_and_have_the_clients_names(
    thread: LoopThread, tmp_path: Path, mlp: Path
) -> None:
    wanted = {"access_log": str(tmp_path / "access.jsonl")}
    described = document(mlp) | {"system": "hpa"}
    running = Running(thread, tmp_path, described, settings=wanted, limits={"log_bytes": 2**20})
    journal = running.server.journal
    assert journal is not None
    running.wait_until_ready()
    for round in range(30):
        for number in range(30):
            named = {"x-request-id": f"{round}-{number}"}
            assert running.ask("POST", "/v2/models/demo/infer", infer_body(1), named)[0] == 200
        if journal.segment > 1:
            break
        thread.loop.call_soon_threadsafe(journal.flush)
    running.ask("POST", "/v2/models/demo/infer", infer_body(1), {"x-request-id": "last"})
    running.close()
    segments = [read_log(segment.path) for segment in segments_in(tmp_path / "log")]
    assert [log.header.segment for log in segments][:2] == [1, 2]
    assert segments[1].header.has_snapshot
    for log in segments[1:]:
        assert replay_log(log, beginning_of(log).core, definitions=log.header.definitions).difference is None
    assert_replays(tmp_path)
    names = [record.client_id for _, record in read_log(tmp_path) if isinstance(record, Request)]
    assert names[:2] == ["0-0", "0-1"]
    noted = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in noted if row["path"].endswith("/infer")] == names


@pytest.mark.parametrize("edges", [0, 1])
def test_logs_go_on_in_new_files_when_programs_that_rotate_them_ask(
    thread: LoopThread, tmp_path: Path, mlp: Path, edges: int
) -> None:
    file, moved = tmp_path / "access.jsonl", tmp_path / "moved"
    running = Running(thread, tmp_path, document(mlp), settings={"access_log": str(file), "edges": edges})
    journal = running.server.journal
    assert journal is not None
    running.wait_until_ready()
    file.rename(moved)
    thread.loop.call_soon_threadsafe(reload, running.server)
    until_s = time.monotonic() + 20
    while not (file.exists() and journal.segment == 2):
        assert time.monotonic() < until_s, "neither has begun anew"
        time.sleep(0.01)
    for number in range(3):
        assert running.ask("POST", "/v2/models/demo/infer", infer_body(1), {"x-request-id": f"r{number}"})[0] == 200
    running.close()
    noted = [json.loads(line) for path in (moved, file) for line in path.read_text().splitlines()]
    assert [row["request_id"] for row in noted if row["path"].endswith("/infer")] == ["r0", "r1", "r2"]
    assert "/infer" not in moved.read_text()
    first, second = (read_log(segment.path) for segment in segments_in(tmp_path / "log"))
    assert not any(isinstance(record, Request) for _, record in first)
    assert sum(isinstance(record, Request) for _, record in second) == 3
    assert_replays(tmp_path)


def test_the_log_on_disk_replays(running: Running) -> None:
    journal = running.server.journal
    assert journal is not None
    running.thread.loop.call_soon_threadsafe(journal.flush)
    running.ask("GET", "/v2/health/live")
    header = read_log(journal.path).header
    assert (header.origin, header.machine) == ("live", hardware_name())
    assert_replays(journal.path)


def test_nobody_else_may_enter_the_state_folder_or_what_is_in_it(running: Running) -> None:
    found = [running.folder, *running.folder.iterdir(), *(running.folder / "log").iterdir()]
    assert {each.name for each in found} >= {"log", "models", "lock", "control"}
    folders = [each for each in found if each.is_dir()]
    assert {each.stat().st_mode & 0o077 for each in folders} == {0}
    assert {each.stat().st_mode & 0o777 for each in found if each.is_file()} == {0o600}


def assert_replays(path: Path) -> None:
    """A fresh core, told what on_event, decides what was decided."""
    log = read_log(path)
    replayed = replay_log(log, rebuild(log.header).core(), definitions=log.header.definitions)
    assert replayed.difference is None
    assert replayed.actions > 0


def test_a_second_server_finds_folder_and_ports_taken(
    running: Running, thread: LoopThread, tmp_path: Path, mlp: Path
) -> None:
    with pytest.raises(MachineError, match="uses this state folder"):
        Running(thread, running.folder, document(mlp))
    setup = set_up(load_application(document(mlp)))
    for taken in ("http_port", "grpc_port"):
        ports = {"http_port": 0, "grpc_port": 0} | {taken: getattr(running.server, taken)}
        settings = Settings(state_folder=tmp_path, **ports)
        context = serving(setup, loadable(setup, tmp_path)[1], settings)
        with pytest.raises(MachineError, match=rf"port {ports[taken]} on 127\.0\.0\.1 is in use"):
            thread.call(context.__aenter__())
    assert running.ask("GET", "/v2/health/live")[0] == 200


def test_a_killed_worker_costs_no_request(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    with Running(thread, tmp_path, document(mlp)) as running:
        statuses: list[int] = []

        def ask() -> None:
            statuses.extend(running.ask("POST", "/v2/models/demo/infer", infer_body(1))[0] for _ in range(30))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        replica = json.loads(running.ask("GET", "/v2/sloop/state")[1])["applications"][0]["stages"][0]["replicas"][0][
            "id"
        ]
        backend = running.server.backend
        assert isinstance(backend, LiveNode)
        pid = backend.pid(replica)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for each in threads:
            each.join(60)
    assert statuses == [200] * 120


def test_requests_whose_rows_would_mix_are_never_joined(thread: LoopThread, tmp_path: Path) -> None:
    graph = "(float[length, 4] x) => (float[length, 4] y) { y = Softmax<axis = 0>(x) }"
    path = save_model(tmp_path / "sequence.onnx", graph)
    with Running(thread, tmp_path / "state", document(path)) as running:
        answers: list[tuple[int, Any]] = []

        def ask(length: int) -> None:
            for _ in range(20):
                status, text = running.ask("POST", "/v2/models/demo/infer", infer_body(length))
                answers.append((length, json.loads(text)["outputs"][0]["data"] if status == 200 else text))

        lengths = (1, 1, 1, 3, 40)  # the last is longer than the largest batch
        threads = [threading.Thread(target=ask, args=(length,)) for length in lengths]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
    assert len(answers) == 100
    for length, answer in answers:
        x = np.full((length, 4), 0.5, np.float32)
        (expected,) = ort.InferenceSession(path).run(None, {"x": x})
        np.testing.assert_allclose(np.reshape(answer, (length, 4)), expected, rtol=1e-5)


@pytest.mark.parametrize(("drain_s", "sleep_ms", "status"), [(20, 4000, 200), (0.2, 60_000, 500)])
def test_while_it_drains_it_finishes_what_is_here_refuses_what_comes_and_says_so(
    thread: LoopThread, tmp_path: Path, mlp: Path, drain_s: float, sleep_ms: int, status: int
) -> None:
    running = Running(
        thread, tmp_path, document(mlp, slo_ms=100_000), model=f"fake:sleep:{sleep_ms}:0", limits={"drain_s": drain_s}
    )
    running.wait_until_ready()
    answers: list[tuple[int, bytes]] = []
    asking = threading.Thread(
        target=lambda: answers.append(running.ask("POST", "/v2/models/demo/infer", infer_body(1)))
    )
    asking.start()
    while not json.loads(running.ask("GET", "/v2/sloop/state")[1])["applications"][0]["stages"][0]["running"]:
        time.sleep(0.01)
    closing = threading.Thread(target=running.close)
    closing.start()
    if status == 200:
        while running.ask("GET", "/v2/health/ready")[0] != 503:
            time.sleep(0.01)
        refused, text = running.ask("POST", "/v2/models/demo/infer", infer_body(1))
        assert (refused, running.retry_after) == (503, "1")
        assert b"shutting down" in text
    asking.join(20)
    closing.join(20)
    assert not closing.is_alive()
    assert answers[0][0] == status, answers


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("box", False)]
)
def test_knows_which_addresses_others_can_reach(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_what_cannot_be_served_is_refused_before_anything_starts(mlp: Path, tmp_path: Path) -> None:
    planned = document(mlp)
    planned["stages"] = [{"name": "s0", "variants": [{"name": "v", "profile": PROFILE}]}]
    with pytest.raises(InputError, match="variant 'v' of stage 's0' has no model"):
        serve(load_application(planned), Settings(state_folder=tmp_path))
    large = document(mlp) | {"cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": 4000}]}}
    with pytest.raises(MachineError, match="the cluster has 4000 cores"):
        serve(load_application(large), Settings(state_folder=tmp_path))
    assert {each.name for each in tmp_path.iterdir()} <= {COPIES}


SCRIPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from sloop.app.limits import ServerLimits
from sloop.app.load import load_deployment
from sloop.serve.server import Settings, serve
described, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
settings = Settings(http_port=0, grpc_port=0, state_folder=folder, grace_s=0)
limits = ServerLimits(drain_s=10, spare_workers=0)
deployment = replace(load_deployment(described), limits=limits)
serve(deployment, settings, on_start=lambda server: print(server.http_port, server.grpc_port, flush=True))
"""


@contextlib.contextmanager
def started(
    folder: Path, model: Path, *, script: str = SCRIPT, stderr: int | None = None
) -> Iterator[tuple["subprocess.Popen[str]", int, int]]:
    """A ready server in a process of its own, which is killed if it is still there at the end; with its ports for HTTP
    and for gRPC."""
    command = [sys.executable, "-c", script, json.dumps(document(model)), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            port, grpc_port = map(int, process.stdout.readline().split())
            wait_until_ready(port)
            yield process, port, grpc_port
        finally:
            process.kill()


def obeyed(grace_s: float, *signals: signal.Signals, begins: bool = True) -> list[str]:
    """What a server does that gets these signals, the first as soon as it has started and each other one when the one
    before has had an effect."""
    said: list[str] = []

    async def main() -> None:
        orders, withdrawn = StopOrders(grace_s), asyncio.Event()

        def withdraw() -> None:
            said.append("withdrawn")
            withdrawn.set()

        async def run() -> None:
            if begins:
                orders.begin(withdraw)
            os.kill(os.getpid(), signals[0])
            for number in signals[1:]:
                await withdrawn.wait()
                os.kill(os.getpid(), number)
            await orders.drain_requested.wait()
            if not begins:
                await asyncio.Event().wait()  # for agents that never come
            said.append("drained")

        await orders.obey(run())

    asyncio.run(main())
    return said


LONG_S = 10_000
TERM, INT = signal.SIGTERM, signal.SIGINT


def test_readiness_is_withdrawn_before_the_drain_and_ctrl_c_or_a_second_signal_does_not_wait() -> None:
    assert obeyed(0.01, TERM) == ["withdrawn", "drained"]
    assert obeyed(LONG_S, TERM, TERM) == ["withdrawn", "drained"]
    assert obeyed(LONG_S, TERM, INT) == ["withdrawn", "drained"]
    assert obeyed(LONG_S, INT) == obeyed(0, TERM) == ["drained"]
    assert obeyed(LONG_S, TERM, begins=False) == obeyed(LONG_S, INT, begins=False) == []


@pytest.mark.parametrize("edges", [0, 1])
def test_after_sigterm_it_serves_on_as_not_ready(tmp_path: Path, mlp: Path, edges: int) -> None:
    """On connections that are open and on new ones, until another signal comes or the time has passed."""
    script = SCRIPT.replace("grace_s=0", f"grace_s={LONG_S}, edges={edges}")
    with started(tmp_path, mlp, script=script) as (process, port, grpc_port), contextlib.ExitStack() as stack:
        client = stack.enter_context(grpc_client.InferenceServerClient(f"127.0.0.1:{grpc_port}"))
        assert client.is_server_ready()
        kept = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)))

        def status(path: str, body: object = None, *, on: http.client.HTTPConnection | None = None) -> int:
            connection = on or http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            answer.read()
            if on is None:
                connection.close()
            return answer.status

        assert status("/v2/health/live", on=kept) == 200
        process.send_signal(signal.SIGTERM)
        while status("/v2/health/ready") == 200:
            time.sleep(0.01)
        assert status("/v2/models/demo/ready") == status("/v2/health/ready", on=kept) == 503
        while client.is_server_ready():  # the edge of gRPC asks anew after a tenth of a second
            time.sleep(0.01)
        assert [client.is_model_ready("demo"), client.is_server_live()] == [False, True]
        paths = "/v2/health/live", "/v2/models/demo", "/metrics"
        for connection in (kept, None, kept):
            assert {status(path, on=connection) for path in paths} == {200}
            assert status("/v2/models/demo/infer", infer_body(2), on=connection) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, "long before the time has passed"
    assert_replays(tmp_path)


def test_sigterm_ends_whatever_clients_do(tmp_path: Path, mlp: Path) -> None:
    """Half a head, half a body, nothing, and an answer that nobody takes."""
    script = SCRIPT.replace("drain_s=10", "drain_s=1")
    head = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\n"
    page = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
    with started(tmp_path, mlp, script=script) as (process, port, _), contextlib.ExitStack() as wires:
        for sent in (b"", head, head + b"content-length: 100\r\n\r\n{", page * 2000):
            wire = wires.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            wire.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                wire.send(sent)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_server_whose_core_fails_answers_and_ends(tmp_path: Path, mlp: Path) -> None:
    """Whoever supervises it starts another one."""
    broken = """
from sloop.core import Core
from sloop.vocabulary import Request
handle = Core.handle
def fail(self, now_ns, event, *rest):
    assert not isinstance(event, Request), "a bug"
    return handle(self, now_ns, event, *rest)
Core.handle = fail
"""
    with started(tmp_path, mlp, script=broken + SCRIPT, stderr=subprocess.PIPE) as (process, port, _):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            connection.request("POST", "/v2/models/demo/infer", json.dumps(infer_body(2)))
            answer = connection.getresponse()
            assert answer.status == 500
            assert b"core has failed" in answer.read()
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "the core has failed: AssertionError('a bug')" in said


def test_sigterm_finishes_what_is_here_and_leaves_with_all_workers(tmp_path: Path, mlp: Path) -> None:
    with started(tmp_path, mlp) as (process, port, _):
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(20)]
        for connection in connections:
            connection.request("POST", "/v2/models/demo/infer", json.dumps(infer_body(2)))
        process.send_signal(signal.SIGTERM)
        answers = [connection.getresponse() for connection in connections]
        assert {answer.status for answer in answers} <= {200, 503}  # here already, or refused for the drain
        for answer, connection in zip(answers, connections, strict=True):
            answer.read()
            connection.close()
        assert process.wait(20) == 0
    assert_replays(tmp_path)
    found = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in found.splitlines() if "sloop.serve.worker" in line and f" {process.pid} " in line]


def test_a_server_that_is_killed_leaves_no_worker_behind(tmp_path: Path, mlp: Path) -> None:
    """Neither one that serves nor one that waits for a model."""
    script = SCRIPT.replace("spare_workers=0", "spare_workers=1")
    with started(tmp_path, mlp, script=script) as (process, port, _):
        until_s = time.monotonic() + 60
        while 'sloop_spare_workers{node="local"} 1.0' not in metrics_at(port):
            assert time.monotonic() < until_s, "no worker waits"
            time.sleep(0.05)
        found = subprocess.run(["ps", "-eo", "ppid,pid,args"], capture_output=True, text=True, check=True).stdout
        children = [line.split()[1] for line in found.splitlines() if line.split()[0] == str(process.pid)]
        workers = [pid for pid in children if "sloop.serve.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(workers) == 2
        process.kill()
        process.wait(10)
        until_s = time.monotonic() + 20
        while any(map(is_running, workers)) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not any(map(is_running, workers))


def metrics_at(port: int) -> str:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def is_running(pid: str) -> bool:
    """Whether a process is there, and more than a name that its new parent has not taken."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_clients_that_send_half_a_request_do_not_delay_the_end(tmp_path: Path, mlp: Path) -> None:
    with started(tmp_path, mlp) as (process, port, grpc_port), contextlib.ExitStack() as stack:
        fields = ((":method", "POST"), (":path", f"/{SERVICE}/ModelInfer"), ("content-type", "application/grpc"))
        begun = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, encode(*fields))
        half = begun + frame(DATA, 0, 1, b"\0" + (50_000).to_bytes(4, "big") + bytes(10_000))
        web = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n{"
        for to, sent in ((grpc_port, b""), (grpc_port, PREFACE), (grpc_port, begun), (grpc_port, half), (port, web)):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", to), timeout=20))
            client.sendall(sent)
        client.sendall(b" ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(9) == 0, "the drain may take 10 s, but nothing is open that could be finished"


HEADER = Header(origin="live", name="demo", system="static", definitions={})


def test_a_second_server_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "deep" / "state") as folder,
        pytest.raises(MachineError, match=rf"process {os.getpid()}\) uses this state folder") as caught,
        locked(folder),
    ):
        pass
    assert "--state" in caught.value.help
    with locked(folder):  # free again
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(MachineError, match="file/state: the state folder cannot be used"),
        locked(tmp_path / "file/state"),
    ):
        pass


def test_a_full_disk_at_the_start_is_an_error_with_help(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")
    with pytest.raises(MachineError, match="cannot be used: No space left on device") as caught, locked(tmp_path):
        pass
    assert caught.value.help == "free some space, or name a folder on another disk with --state"


def test_a_log_that_cannot_be_written_keeps_no_server_from_taking_the_place_of_one_that_has_died(
    tmp_path: Path, mlp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup = set_up(load_application(document(mlp)))
    core, nodes = setup.core(), NodeMemory(tmp_path / NODES)
    observed = Observed(core, DeploymentState(setup.parts()))
    (tmp_path / FOLDER).touch()  # where the folder of the log belongs
    nodes.write([])
    with pytest.raises(MachineError, match="the event log cannot be written"):
        open_journal(setup, tmp_path, ServerLimits(), observed)
    nodes.write(["local-0"])
    assert open_journal(setup, tmp_path, ServerLimits(), observed) is None
    assert "serves without a log" in caplog.text


MIXING = """
class Model:
    inputs = {"x": ("FP32", (-1, 4))}; outputs = {"y": ("FP32", (-1, 4))}
    def __init__(self, threads): pass
    def run(self, x):
        import time; time.sleep(0.05)
        return x - x.min()
"""


def test_a_difference_that_real_requests_show_ends_joining(
    thread: LoopThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its user says that rows may be joined, and wants a share of the requests to be run again."""
    (tmp_path / "mixing.py").write_text(MIXING)
    described: dict[str, Any] = {**document(tmp_path / "mixing.py"), "verify": 1}
    described["stages"][0]["variants"][0]["joins_rows"] = True
    with Running(thread, tmp_path / "state", described) as running:

        def joining() -> str:
            config = json.loads(running.ask("GET", "/v2/models/demo/config")[1])
            return str(config["parameters"]["joins_rows"]["string_value"])

        assert joining() == "yes: the user says so (`joins_rows: true`)"
        assert "sloop_joins_rows{" in str(running.ask("GET", "/metrics")[1])

        def send(value: float) -> list[float]:
            body = infer_body(1)
            body["inputs"][0]["data"] = [value, value, value, value + 1]
            status, text = running.ask("POST", "/v2/models/demo/infer", body)
            assert status == 200, text
            found: list[float] = json.loads(text)["outputs"][0]["data"]
            return found

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(send, [0, 10, 20, 30, 40, 50, 60, 70]))
        assert any(answer != [0, 0, 0, 1] for answer in answers), "requests were joined, as declared"
        for _ in range(100):
            if joining().startswith("no: output 'y' of a request beside"):
                break
            time.sleep(0.05)
        assert "differs from its output alone" in joining()
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(send, range(0, 80, 10))) == [[0, 0, 0, 1]] * 8
    assert "from now on each request runs alone" in caplog.text
    del described["stages"][0]["variants"][0]["joins_rows"]
    (servable,) = loadable(set_up(load_deployment([described])), tmp_path / "state")[1].values()
    assert "differs from its output alone" in servable.obstacle, "also in later servers"


def two_models(tmp_path: Path) -> tuple[Setup, Path]:
    """Two applications of a Python model each; `bad` cannot be made as long as the file `broken` is there."""
    broken = tmp_path / "broken"
    described = []
    for name, body in (
        ("good", "pass"),
        ("bad", f"assert not __import__('os').path.exists({str(broken)!r}), 'broken'"),
    ):
        (tmp_path / f"{name}.py").write_text(SLEEPY.replace("pass  # init", body))
        described.append(document(tmp_path / f"{name}.py") | {"name": name})
    broken.touch()
    return set_up(load_deployment(described)), broken


SLEEPY = """
class Model:
    inputs, outputs = {"x": ("FP32", (-1, 1))}, {"y": ("FP32", (-1, 1))}
    def __init__(self, threads):
        pass  # init
    def run(self, x):
        return x
"""


def test_a_model_that_cannot_be_loaded_at_the_start_is_left_out_and_tried_again(
    thread: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sloop.serve.control.deployer.RETRY_S_MIN", 0.1)
    setup, broken = two_models(tmp_path)
    kept, models, left_out = loadable(setup, tmp_path / "state")
    assert [each.application.name for each in kept.applications] == ["good"]
    assert "broken" in left_out["bad"].why
    with Running(thread, tmp_path / "state", opened=(kept, models, left_out)) as running:
        status, text = running.ask("GET", "/v2/health/ready")
        assert status == 200
        assert "it cannot be loaded" in json.loads(text)["not_ready"]["bad"]["why"]
        assert running.ask("GET", "/v2/models/bad/ready")[0] == 503
        broken.unlink()
        for _ in range(600):
            if running.ask("GET", "/v2/models/bad/ready")[0] == 200:
                break
            time.sleep(0.1)
        assert json.loads(running.ask("GET", "/v2/health/ready")[1]) == {"ready": True}
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [3]}]}
        status, text = running.ask("POST", "/v2/models/bad/infer", body)
        assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [3])


def test_a_model_that_hangs_when_it_is_loaded_is_left_to_later_attempts() -> None:
    released = threading.Event()
    with pytest.raises(MachineError, match=r"it takes more than 0\.1 s to load"):
        within(0.1, lambda: released.wait(30))
    released.set()
    assert within(30, lambda: 7) == 7
    with pytest.raises(InputError, match="no file"):
        within(None, lambda: raise_error(InputError("no file")))


def raise_error(error: Exception) -> None:
    raise error


def test_where_no_model_can_be_loaded_there_is_no_server(tmp_path: Path) -> None:
    setup, _ = two_models(tmp_path)
    only = replace(setup, applications=setup.applications[1:])
    with pytest.raises(InputError, match="broken"):
        loadable(only, tmp_path / "state")
