"""Each order gets one answer, whichever backend has it and however far its replica is: one test of the backend of this
machine and of agents. `tests.dst.test_orders` goes through every order in every phase."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol, cast

import pytest

from sloop.actions import ResizeWorker, StartWorker, StopWorker
from sloop.events import Event, Finished, WorkerProgressed, WorkerReady, WorkerResized, WorkerStopped
from sloop.serve.cluster import agent as module
from sloop.serve.cluster.agent import Agent
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.cpu_quota import detect
from sloop.serve.network import BlockClient
from sloop.serve.node.models import NodeModels
from sloop.serve.node.node import LiveNode, WorkerPhase
from sloop.serve.protocols import Servable
from sloop.shared_memory import Arenas
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Slot
from tests.joining import JoiningNodes, Memory
from tests.serve.rig import run_of, until, wirings_of
from tests.serve.test_local_backend import BYTES, Ear
from tests.serve.test_network import HOST, TOKEN

pytestmark = pytest.mark.live
A: Final = ReplicaId(0)
MODEL: Final = "fake:sleep:0:0"
MOMENTS: Final = ("ordered", "spawned", "ready")
"""While its model is being fetched, while its process starts, while it serves."""


class Rig(Protocol):
    """A backend with one replica, and what it has answered."""

    events: list[Event]

    def start(self, cores: float) -> None: ...

    def resize(self, cores: float) -> None: ...

    def stop(self) -> None: ...

    async def reach(self, moment: str) -> None:
        """Let its start go on until then."""

    async def settle(self) -> None:
        """Wait until nothing is under way."""


class Held:
    """Something that a test holds up."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.is_over = False

    def do(self, work: Callable[[], None]) -> None:
        if self.is_over:
            work()
        else:
            self.waiting.append(work)

    def go_on(self) -> None:
        self.is_over = True
        while self.waiting:
            self.waiting.pop(0)()


class HeldCache:
    """As much of a `WeightsCache` as an agent uses. A model comes into it when a test wants."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.models = SimpleNamespace(models=list)

    async def fetch(self, *_: object, **__: object) -> Path:
        came = asyncio.Event()
        self._held.do(came.set)
        await came.wait()
        return Path(MODEL)

    def release(self, *_: object) -> None: ...

    async def close(self) -> None: ...


class RealRig:
    def __init__(self, backend: LiveNode | AgentBackend, fetching: Held) -> None:
        self._backend, self._fetching = backend, fetching
        self._ear = Ear()
        self.events = self._ear.events
        backend.attach(self._ear)

    def start(self, cores: float) -> None:
        self._backend.order(StartWorker(A, ReplicaSpec("stage", "echo", Slot(cores), "one")))

    def resize(self, cores: float) -> None:
        self._backend.order(ResizeWorker(A, cores))

    def stop(self) -> None:
        self._backend.order(StopWorker(A, ""))

    async def reach(self, moment: str) -> None:
        if moment == "ordered":
            await self._ear.hear(WorkerProgressed)
        elif moment == "spawned":
            self._fetching.go_on()
            await until(lambda: WorkerProgressed(A, "spawning") in self.events)
        elif moment == "ready":
            await self._ear.hear(WorkerReady)

    async def settle(self) -> None:
        self._fetching.go_on()
        await self._ear.hear(WorkerReady, WorkerStopped)
        await asyncio.sleep(0.1)  # an answer that is one too many has come by then


@asynccontextmanager
async def here() -> AsyncIterator[Rig]:
    servables = {("stage", "echo"): Servable(MODEL, BYTES)}
    node = Node("one", "local", 1, 1 << 30)
    backend = LiveNode(servables, wirings_of(servables), detect().actuator, nodes=[node])
    try:
        yield RealRig(backend, Held())
    finally:
        await backend.close()


@asynccontextmanager
async def elsewhere() -> AsyncIterator[Rig]:
    servables = {("stage", "echo"): Servable("/not/here", BYTES, source="http://store/m.bin")}
    fetching, arenas = Held(), Arenas()
    backend = AgentBackend(
        *(servables, wirings_of(servables), JoiningNodes()),
        arenas=arenas,
        nodes=[Node("one", "local", 1, 1 << 30, on_demand=True)],
        pid=os.getpid(),
        memory=Memory(),
    )
    rig = RealRig(backend, fetching)
    await backend.open()
    agent = Agent((HOST, backend.port), "one", TOKEN, make_cache=lambda: cast(Any, HeldCache(fetching)))
    serving = asyncio.create_task(agent.serve())
    await until(lambda: backend._has_joined("one"))
    try:
        yield rig
    finally:
        await backend.close()
        await asyncio.wait_for(serving, 20)
        arenas.close()


Made = Callable[[], AbstractAsyncContextManager[Rig]]


@pytest.fixture(params=[here, elsewhere], ids=lambda made: made.__name__)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(module.AgentHost, "machine", staticmethod(lambda: "another machine"))
    found: Made = request.param
    return found


Orders = dict[str, list[float]]
ORDERS: Final[Sequence[Orders]] = [
    *({moment: [0.5]} for moment in MOMENTS),
    *({moment: [0.5, 1.0, 0.25]} for moment in MOMENTS),
    {moment: [0.25 * at, 0.25 * (4 - at)] for at, moment in enumerate(MOMENTS, 1)},
]


@pytest.mark.parametrize("orders", ORDERS, ids="-".join)
async def test_each_resize_is_answered_once_and_the_last_one_counts(made: Made, orders: Orders) -> None:
    async with made() as rig:
        rig.start(0.75)
        for moment in MOMENTS:
            await rig.reach(moment)
            for cores in orders.get(moment, ()):
                rig.resize(cores)
            await asyncio.sleep(0.05)  # so that orders arrive before the replica's start goes on
        await rig.settle()
        answers = [each.cores for each in rig.events if isinstance(each, WorkerResized)]
        wanted = [cores for moment in MOMENTS for cores in orders.get(moment, ())]
        assert len(answers) == len(wanted)
        assert answers[-1] == wanted[-1]


@pytest.mark.parametrize("at", MOMENTS)
async def test_a_replica_that_stops_answers_no_resize_afterwards(made: Made, at: str) -> None:
    async with made() as rig:
        rig.start(0.75)
        for moment in MOMENTS[: MOMENTS.index(at) + 1]:
            await rig.reach(moment)
        rig.resize(0.5)
        rig.stop()
        await rig.settle()
        kinds = [type(each) for each in rig.events if isinstance(each, WorkerResized | WorkerStopped)]
        assert kinds.count(WorkerStopped) == 1
        assert kinds.count(WorkerResized) <= 1, "its end answers the order too"
        assert kinds[-1] is WorkerStopped


async def test_a_worker_is_in_one_state_from_its_order_to_its_end() -> None:
    fetching, ear = Held(), Ear()
    models = NodeModels("one", lambda: cast(Any, HeldCache(fetching)))
    models.connect(BlockClient(TOKEN), (HOST, 1))
    servables = {("stage", "echo"): Servable("/not/here", BYTES, source="http://store/m.bin")}
    node = LiveNode(servables, wirings_of(servables), detect().actuator, models=models)
    node.attach(ear)
    node.order(StartWorker(A, ReplicaSpec("stage", "echo", Slot(1.0), "one")))
    worker, seen = node.workers[A], list[WorkerPhase]()

    async def reach(phase: WorkerPhase) -> None:
        await until(lambda: worker.phase is phase)
        seen.append(worker.phase)

    await reach(WorkerPhase.FETCHING)
    fetching.go_on()
    await ear.hear(WorkerReady)
    await reach(WorkerPhase.READY)
    node.run(BatchId(1), A, run_of([[Tensor("UINT8", (1, 1), b"x")]]))
    await reach(WorkerPhase.BUSY)
    await ear.hear(Finished)
    await reach(WorkerPhase.READY)
    node.order(StopWorker(A, ""))
    await reach(WorkerPhase.STOPPING)
    node.order(StopWorker(A, ""))
    node.order(ResizeWorker(A, 0.5))
    await ear.hear(WorkerStopped)
    assert not node.workers
    assert sum(isinstance(event, WorkerStopped) for event in ear.events) == 1
    steps = [event.step for event in ear.events if isinstance(event, WorkerProgressed)]
    assert steps == ["fetching", "spawning", "loading", "warming"]
    await node.close()
