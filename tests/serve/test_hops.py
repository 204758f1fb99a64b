"""How many functions a start passes through, counted in a real one.

A *hop* is a function of sloop that is running when the order, or the worker's answer, is passed on: from
`Driver._execute` to the message to the worker's process, and from that process's message to `Driver.on_event`. Where it
goes over a link, the functions that run on both sides count. Those of links themselves (`LINKS`) do not, because they
carry whatever is sent, and neither do functions that have returned before it is passed on.
"""

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest

from sloop.actions import Action, StartWorker
from sloop.events import WOKE, Event, Woke, WorkerReady
from sloop.serve.cluster.agent import Agent, NodeOrder
from sloop.serve.cpu_quota import Affinity
from sloop.serve.driver import Driver
from sloop.serve.messages import Report
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Backend, StageSetup
from sloop.serve.transport import RecordLink
from sloop.units import FOREVER_NS
from tests.serve.rig import until, wirings_of
from tests.serve.test_agents import SERVABLES, A, fleet, spec
from tests.serve.test_network import HOST, TOKEN

pytestmark = pytest.mark.live
LINKS: Final = ("sloop.serve.transport", "sloop.serve.network")
HERE_MAX: Final = 8
AWAY_MAX: Final = 11


class Hops:
    """The functions that a start passes through, as `Class.function`, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []

        def watch(kind: type, name: str, is_passed_on: Any) -> None:
            real = getattr(kind, name)

            def watched(self: Any, *given: Any, **others: Any) -> Any:
                if is_passed_on(*given):
                    hops.note()
                return real(self, *given, **others)

            monkeypatch.setattr(kind, name, watched)

        def is_start(record: Any) -> bool:
            return isinstance(record, StageSetup) or (
                isinstance(record, NodeOrder) and isinstance(record.order, StartWorker)
            )

        def is_ready(record: Any) -> bool:
            return isinstance(record, Report) and isinstance(record.event, WorkerReady)

        hops = self
        for send in ("send", "tell"):
            watch(RecordLink, send, lambda record: is_start(record) or is_ready(record))
        watch(Driver, "on_event", lambda event: isinstance(event, WorkerReady))

    def note(self) -> None:
        """It is passed on: note the functions that run."""
        running: list[str] = []
        frame = sys._getframe(2)
        while frame is not None and (not running or running[-1] != "Driver._execute"):
            module = frame.f_globals.get("__name__", "")
            if module.startswith("sloop.") and module not in LINKS:
                running.append(frame.f_code.co_qualname)
            frame = frame.f_back  # type: ignore[assignment]
        self.names += reversed(running)


class Starting:
    """A core that starts a worker, and hears that it is ready."""

    wake_ns = FOREVER_NS

    def __init__(self, node: str) -> None:
        self._node = node
        self.events: list[Event] = []

    def handle(self, now_ns: int, event: Event, _more: bool) -> Sequence[Action]:
        self.events.append(event)
        return [StartWorker(A, spec(self._node))] if isinstance(event, Woke) else []


async def start(backend: Backend, node: str) -> None:
    """A worker starts on a node, as the core orders."""
    core: Any = Starting(node)
    planner: Any = SimpleNamespace(attach=lambda report: None)
    driver = Driver(core, backend, (), planner=planner)
    driver.on_event(WOKE)
    await until(lambda: WorkerReady(A) in core.events)


def shown(names: Iterable[str]) -> str:
    return " → ".join(names)


async def test_a_start_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = Hops(monkeypatch)
    node = LiveNode(SERVABLES, wirings_of(SERVABLES), Affinity(sorted(os.sched_getaffinity(0))))
    try:
        await start(node, "here")
    finally:
        await node.close()
    passed = [*hops.names, "Driver.on_event"]
    assert {"LiveNode._start", "LiveNode._on_ready"} < set(passed)
    assert len(passed) <= HERE_MAX, shown(passed)


async def test_a_start_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = Hops(monkeypatch)
    async with fleet() as here:
        agent = asyncio.create_task(Agent((HOST, here.backend.port), "one", TOKEN).serve())
        await until(lambda: here.backend._has_joined("one"))
        await start(here.backend, "one")
        agent.cancel()
        await asyncio.wait((agent,))
    passed = [*hops.names, "Driver.on_event"]
    assert {"AgentBackend._start", "LiveNode._start", "LiveNode._on_ready"} < set(passed)
    assert len(passed) <= AWAY_MAX, shown(passed)
