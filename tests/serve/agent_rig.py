"""The deciding process's side and real agents over loopback, each as if it were on a machine of its own."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from sloop.actions import Transfer
from sloop.events import NodeLost, NodeReady
from sloop.serve.cluster import agent as module
from sloop.serve.cluster.agent import Agent
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.protocols import Servable
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.sources import Patience
from sloop.shared_memory import Arenas
from sloop.vocabulary import ModelWeights, Node, ReplicaId, TransferId
from tests.joining import JoiningNodes, Memory
from tests.serve.rig import until, wirings_of
from tests.serve.test_local_backend import Ear
from tests.serve.test_network import HOST, TOKEN

QUICK = Patience(connect_s=2, stall_s=10, least_bytes_s=1000, tries=2, pause_s=0.001, hang_s=20)
ONE, TWO, THREE = ("one", "two", "three")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents are on other machines than the deciding process, and than each other."""
    monkeypatch.setattr(module.AgentHost, "machine", staticmethod(lambda: "another machine"))
    monkeypatch.setattr(module, "RETRY_S", 0.05)


class AgentRig:
    """A backend and what it reports, and agents with their caches below `folder`."""

    def __init__(self, folder: Path, servables: Mapping[tuple[str, str], Servable], ear: Ear, cores: float) -> None:
        self.folder, self._ear = folder, ear
        self.arenas = Arenas()
        self.backend = AgentBackend(
            *(servables, wirings_of(servables), JoiningNodes()),
            arenas=self.arenas,
            nodes=[Node(name, "local", cores, 1 << 40, on_demand=True) for name in (ONE, TWO, THREE)],
            pid=os.getpid(),
            memory=Memory(),
        )
        self.backend.attach(ear)
        self.agents: dict[str, Agent] = {}
        self.budget_bytes, self.patience = 10**9, QUICK
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._last = -1

    async def __aenter__(self) -> Self:
        await self.backend.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._serving.values():
            task.cancel()
        for task in self._serving.values():
            with suppress(asyncio.CancelledError):
                await task
        await self.backend.close()
        self.arenas.close()

    def said(self, *kinds: type) -> list[Any]:
        return [event for event in self._ear.events if isinstance(event, kinds)]

    async def join(self, *names: str) -> None:
        for name in names:
            count = len(self.said(NodeReady))
            make_cache = lambda name=name: WeightsCache(self.folder / name, self.budget_bytes, patience=self.patience)  # noqa: E731
            self.agents[name] = own = Agent((HOST, self.backend.port), name, TOKEN, make_cache=make_cache)
            self._serving[name] = asyncio.create_task(own.serve())
            await until(lambda count=count: len(self.said(NodeReady)) > count)  # type: ignore[misc]

    async def die(self, name: str) -> None:
        """The agent ends, and its node is lost."""
        count, serving = len(self.said(NodeLost)), self._serving.pop(name)
        serving.cancel()
        await until(lambda: len(self.said(NodeLost)) > count and serving.done())  # it may have died before

    def transfer(
        self,
        weights: ModelWeights,
        source: str,
        receivers: tuple[str, ...],
        *,
        is_kept: bool = True,
        completes: Sequence[ReplicaId] = (),
    ) -> TransferId:
        self._last += 1
        self.backend.order(Transfer(TransferId(self._last), weights, source, receivers, is_kept, tuple(completes)))
        return TransferId(self._last)
