"""Core, driver and real worker processes together, disturbed on purpose: every request is answered exactly once."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from sloop.actions import End, ResizeWorker, StartWorker
from sloop.app.load import load_application
from sloop.events import WorkerLost, WorkerReady, WorkerResized
from sloop.profile.model import read_signature
from sloop.runlog import MemoryLog
from sloop.serve.control.versions import wirings_of
from sloop.serve.cpu_quota import detect
from sloop.serve.dataflow import Wiring, wire
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import RequestResult, Servable
from sloop.serve.server import planner_of
from sloop.shared_memory import Arenas
from sloop.systems.replay import replay_log
from sloop.systems.setup import Setup, set_up
from sloop.tensor import Port, Signature, Tensor
from sloop.units import ms
from sloop.vocabulary import Outcome, ReplicaId
from tests.serve.rig import sink_before

pytestmark = pytest.mark.live
ECHO = Signature((Port("x", "UINT8", (-1, -1)),), (Port("x", "UINT8", (-1, -1)),))
TWO_CORES = {"nodes": [{"hardware": "local", "count": 1, "cores": 2}]}


def setup_of(
    system: Mapping[str, object],
    stages: Mapping[str, Sequence[str]] | None = None,
    cluster: Mapping[str, object] = TWO_CORES,
    **more: object,
) -> Setup:
    """An application of stages, by name with those before them, each believed to take 2 ms and 1 ms per request; `more`
    is further in their profile."""
    profile = {"latency_ms": {"form": "amdahl", "gamma": 1, "epsilon": 1, "delta": 0, "eta": 1}}
    bounds = {"max_batch": 8, "max_cores": 2, "load_s": 1, "memory_bytes": 1_000_000, **more}
    described = [
        {"name": name, "after": list(after), "variants": [{"name": "v", "profile": profile | bounds}]}
        for name, after in (stages or {"only": ()}).items()
    ]
    named = {"name": "live", "slo_ms": 1000, "stages": described, "system": system, "cluster": cluster}
    return set_up(load_application(named))


@dataclass
class Live:
    """A running server without its edges, and all answers so far by the order of asking."""

    driver: Driver
    backend: LiveNode
    log: MemoryLog
    answers: dict[int, list[RequestResult]]
    sink: EdgeSink
    arenas: Arenas

    def ask(self, tensor: Tensor, elapsed_ns: int = 0) -> None:
        answers: list[RequestResult] = []
        self.answers[len(self.answers)] = answers
        self.sink.submit({"x": tensor}, application="live", elapsed_ns=elapsed_ns, on_end=answers.append)

    async def until(self, kind: type, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while sum(isinstance(record, kind) for _, record in self.log) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def all_answered(self) -> None:
        async with asyncio.timeout(20):
            while self.driver.open_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def pids(self) -> list[int]:
        started = [record.worker for _, record in self.log if isinstance(record, StartWorker)]
        return [pid for replica in started if (pid := self.backend.pid(replica))]


@asynccontextmanager
async def serving(setup: Setup, *models: Servable) -> AsyncIterator[Live]:
    """The application with a model for each of its stages, in order."""
    stages = setup.application.order
    servables = {(stage.name, "v"): model for stage, model in zip(stages, models, strict=True)}
    signatures = {key: model.signature for key, model in servables.items()}
    async with live_driver(setup, servables, wire(setup.application.graph, signatures)) as live:
        yield live


@asynccontextmanager
async def live_driver(
    setup: Setup, servables: Mapping[tuple[str, str], Servable], wiring: Wiring
) -> AsyncIterator[Live]:
    """Core, driver, planner and workers, and no edge."""
    served, arenas, log = ServedVersion("live", "live", "1", setup.application.slo_ns, wiring), Arenas(), MemoryLog()
    backend = LiveNode(
        servables,
        wirings_of(served),
        detect().actuator,
        arenas=arenas,
        nodes=setup.deployment.cluster,
        threads_prepared=2,
    )
    planner = planner_of(setup)
    driver = Driver(setup.core(), backend, [served], planner=planner, recorders=[log], free=arenas.free)
    driver.start()
    try:
        yield Live(driver, backend, log, {}, sink_before(driver, served, arenas), arenas)
    finally:
        await driver.close()
    assert driver.crash is None, driver.crash


def onnx_model(path: Path) -> Servable:
    return Servable(str(path), read_signature(path))


def text(content: bytes) -> Tensor:
    return Tensor("UINT8", (1, len(content)), content)


def check_each_ended_once(live: Live) -> Counter[Outcome]:
    """Every request has one answer and one end in the log, and the two agree."""
    assert [number for number, ends in live.answers.items() if len(ends) != 1] == []
    ends = Counter(record.request for _, record in live.log if isinstance(record, End))
    assert ends == Counter(range(1, len(live.answers) + 1))
    return Counter(ends[0].outcome for ends in live.answers.values())


async def test_workers_killed_at_random_under_load_lose_nothing() -> None:
    setup = setup_of({"name": "static", "replicas": 2, "cores": 0.5, "drop": "never"})
    chance = Random(5)
    async with serving(setup, Servable("fake:sleep:4:0.5", ECHO)) as live:
        await live.until(WorkerReady, 2)
        kills = 0
        for number in range(800):
            live.ask(text(b"%d" % number))
            if number % 100 == 50 and (pids := live.pids()):
                os.kill(chance.choice(pids), chance.choice([signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV]))
                kills += 1
            await asyncio.sleep(0.005 * chance.random())
        await live.all_answered()
        outcomes = check_each_ended_once(live)
        assert kills >= 5
        assert sum(isinstance(record, WorkerLost) for _, record in live.log) == kills
        assert outcomes[Outcome.SERVED] + outcomes[Outcome.LATE] >= 700, outcomes
        for number, [ended] in live.answers.items():
            if ended.outcome in (Outcome.SERVED, Outcome.LATE):
                assert bytes(ended.outputs["x"].data) == b"%d" % number
        await live.until(WorkerReady, 3)
        replayed = replay_log(list(live.log), set_up(setup.application).core())
        assert replayed.difference is None


async def test_a_request_that_kills_every_worker_fails_and_the_others_are_served() -> None:
    setup = setup_of({"name": "static", "replicas": 1, "cores": 1, "drop": "never"})
    async with serving(setup, Servable("fake:sleep:30:0", ECHO)) as live:
        for round_ in (1, 2):
            await live.until(WorkerReady, round_)
            if round_ == 1:
                live.ask(text(b"poison"))
            await asyncio.sleep(0.01)
            os.kill(live.pids()[0], signal.SIGKILL)
        await live.all_answered()
        live.ask(text(b"sound"))
        await live.all_answered()
        [[poison], [sound]] = live.answers.values()
        assert poison.outcome is Outcome.FAILED
        assert "killed by SIGKILL" in poison.why
        assert bytes(sound.outputs["x"].data) == b"sound"
        check_each_ended_once(live)


async def test_a_pipeline_answers_what_its_models_compute_one_after_the_other(mlp: Path, tail: Path) -> None:
    setup = setup_of({"name": "static", "replicas": 1, "cores": 1}, {"head": [], "tail": ["head"]})
    async with serving(setup, onnx_model(mlp), onnx_model(tail)) as live:
        await live.until(WorkerReady, 2)
        xs = np.random.default_rng(3).normal(size=(40, 1, 4)).astype(np.float32)
        for x in xs:
            live.ask(Tensor("FP32", (1, 4), x.tobytes()))
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 40}
        sessions = [ort.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (mlp, tail)]
        for x, [ended] in zip(xs, live.answers.values(), strict=True):
            [hidden] = sessions[0].run(None, {"x": x})
            [expected] = sessions[1].run(None, {"y": hidden})
            got = np.frombuffer(ended.outputs["z"].data, np.float32)
            np.testing.assert_allclose(got, expected[0], rtol=1e-4)


async def test_one_replica_is_resized_in_place_and_loses_nothing() -> None:
    window = {"name": "last", "window_ms": 50}
    system = {"name": "vertical-only", "unit": 0.25, "cores_max": 8, "period_ms": 50, "forecast": window}
    setup = setup_of(system)
    async with serving(setup, Servable("fake:sleep:1:1", ECHO)) as live:
        await live.until(WorkerReady)
        [pid] = live.pids()
        for _ in range(4):
            for _ in range(200):  # believed to take a quarter of a core longer than is left of their budget
                live.ask(text(b"x"), elapsed_ns=ms(500))
            await live.all_answered()
            await asyncio.sleep(0.15)  # nothing to do: it shrinks
        check_each_ended_once(live)
        orders = sum(isinstance(record, ResizeWorker) for _, record in live.log)
        assert orders >= 2
        await live.until(WorkerResized, orders)
        assert live.pids() == [pid]
        assert live.backend.pid(ReplicaId(2)) is None


async def test_draining_serves_what_is_here_and_refuses_what_comes() -> None:
    setup = setup_of({"name": "static", "replicas": 1, "cores": 1, "batch_max": 2})
    async with serving(setup, Servable("fake:sleep:20:0", ECHO)) as live:
        await live.until(WorkerReady)
        for number in range(9):
            live.ask(text(b"%d" % number))
        pids = live.pids()
        draining = asyncio.ensure_future(live.driver.drain(10))
        await asyncio.sleep(0)
        live.ask(text(b"too late"))
        await draining
        assert check_each_ended_once(live) == {Outcome.SERVED: 9, Outcome.REJECTED: 1}
        assert not set(map(str, pids)) & set(os.listdir("/proc"))
