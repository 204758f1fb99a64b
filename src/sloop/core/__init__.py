"""The core: all decisions of a run. Everything in sloop revolves around `handle`: an event goes in, actions come out.

It has no clock, thread, socket, file or random number (law 1). A driver, live or simulated, calls `handle(now_ns,
event)` with non-decreasing times and carries out the actions; `wake_ns` says when to call it with `WOKE` if nothing
happens before. The same events give the same actions, always: that is what replay checks.
"""

from collections.abc import Callable, Mapping, Sequence

from sloop.actions import Action
from sloop.app.graph import Graph
from sloop.core.control import BUCKET_NS_MAX, ControlPath
from sloop.core.dispatch import DataPath
from sloop.core.protocols import Policies
from sloop.core.state import StageState, State
from sloop.core.views import Belief, StageView
from sloop.events import (
    BatchFailed,
    Cancelled,
    Draining,
    Event,
    Finished,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReady,
    ReplicaStopped,
    Resized,
    Woke,
)
from sloop.vocabulary import Node, Plan, Request

Beliefs = Mapping[tuple[str, str], Belief]
"""The latency estimate of each (stage, variant)."""


class Core:
    """All decisions for one application on one cluster.

    It takes the application's graph and beliefs, not the `Application`, which also holds model files, traces and prices
    and needs imports that the core must not have.
    """

    def __init__(self, graph: Graph, beliefs: Beliefs, policies: Policies, nodes: Sequence[Node]) -> None:
        bucket_ns = min(policies.scale.period_ns, BUCKET_NS_MAX)
        by_stage: dict[str, dict[str, Belief]] = {name: {} for name in graph.stages}
        for (name, variant), belief in beliefs.items():
            by_stage[name][variant] = belief
        stages = [
            StageState(name, stage.after, by_stage[name], policies.order, bucket_ns)
            for name, stage in graph.stages.items()
        ]
        self.state = State(stages, graph, nodes)
        self._stages = tuple(stages)
        self._data = DataPath(self.state, policies)
        self._control = ControlPath(self.state, policies, self._data)
        self._steps: dict[type, Callable[..., None]] = {
            Request: self._data.arrive,
            Finished: self._data.finish,
            BatchFailed: self._data.fail,
            Cancelled: self._data.cancel,
            ReplicaReady: self._control.ready,
            ReplicaLost: self._control.lost,
            ReplicaStopped: self._control.stopped,
            Resized: self._control.resized,
            Draining: self._data.drain,
            ReplicaProgressed: _ignore,
            Woke: _ignore,
        }
        self.wake_ns = 0

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._control.plan

    def stage_views(self) -> tuple[StageView, ...]:
        """The stages as scaling policies see them. Calls no policy, so it can be read at any time."""
        return self._control.stage_views()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return all(not s.queue.visits and not s.monitor.running for s in self._stages)

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> list[Action]:
        """Process one event at `now_ns`; returns the resulting actions, to be carried out in this order.

        `more_at_this_instant` says that the next call has another event of the same instant. Batches are then formed
        only after the last of these events, so that requests that arrive together can run together.
        """
        out: list[Action] = []
        if now_ns >= self.wake_ns:
            self._wake(now_ns, out)
        kind = type(event)
        self._steps[kind](now_ns, event, out)
        if more_at_this_instant:
            return out
        # All events of this instant are processed: dispatch, and set the next wake-up. This runs for every event, so it
        # is inlined, and comparisons replace the slower calls of min.
        wake_ns = self._control.wake_ns
        for stage in self._stages:
            queue = stage.queue
            if not queue.visits:
                continue
            if stage.pool.idle:
                wait_until_ns = self._data.dispatch(now_ns, stage, out)
                if wait_until_ns < wake_ns:  # noqa: PLR1730
                    wake_ns = wait_until_ns
            elif kind is Request and not stage.pool.replicas:
                self._control.wake(now_ns, out)
            if queue.sweep_ns < wake_ns:  # noqa: PLR1730
                wake_ns = queue.sweep_ns
        self.wake_ns = wake_ns
        return out

    def _wake(self, now_ns: int, out: list[Action]) -> None:
        """Run the control tick and the queue sweeps that are due."""
        if now_ns >= self._control.wake_ns:
            self._control.tick(now_ns, out)
        for stage in self._stages:
            if now_ns >= stage.queue.sweep_ns:
                self._data.sweep(now_ns, stage, out)


def _ignore(now_ns: int, event: Event, out: list[Action]) -> None:
    """The event itself has no effect; `handle` has already run what was due."""
