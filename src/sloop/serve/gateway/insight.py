"""What `/v2/sloop/state` and `/v2/sloop/decisions` show: the core's state as it is, and the last notes on why.

Reads the core, never changes it. Instants are seconds since the server began; JSON for people and scripts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from sloop.actions import Decided
from sloop.core import Core
from sloop.core.state import Replica, Stage
from sloop.runlog import Record
from sloop.units import NS_PER_S, to_s

DECISIONS_KEPT: Final = 10_000


class Insight:
    """A recorder that keeps the last decisions, and a view of the core. `clock` gives the core's own time in ns."""

    def __init__(self, core: Core, *, application: str, system: str, clock: Callable[[], int]) -> None:
        self._core, self._application, self._system, self._clock = core, application, system, clock
        self._decisions: deque[tuple[int, Decided]] = deque(maxlen=DECISIONS_KEPT)
        self._count = 0

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Keep the decisions among them."""
        for record in records:
            if type(record) is Decided:
                self._count += 1
                self._decisions.append((now_ns, record))

    def decisions(self, limit: int) -> bytes:
        """The last `limit` decisions, oldest first, and how many there were in all."""
        last = list(self._decisions)[-limit:]
        told = [{"at_s": to_s(now_ns)} | msgspec.to_builtins(decided) for now_ns, decided in last]
        for decision in told:
            decision.pop("type")
        return msgspec.json.encode({"total": self._count, "decisions": told})

    def state(self) -> bytes:
        """Stages with queues and replicas, the plan in force, and what is free on each node."""
        core, now_ns = self._core, self._clock()
        state = core.state
        plan = core.plan
        return msgspec.json.encode(
            {
                "application": self._application,
                "system": self._system,
                "now_s": to_s(now_ns),
                "draining": state.draining,
                "slo_ms": state.slo_ns / 1e6,
                "plan": plan and msgspec.to_builtins(plan),
                "stages": [stage_of(stage, now_ns, state.slo_ns) for stage in state.stages.values()],
            }
        )

    def unready(self) -> str:
        """Empty when every stage that is meant to have replicas has one that is ready; otherwise what is missing."""
        state, plan = self._core.state, self._core.plan
        if state.draining:
            return "the server is shutting down"
        if plan is None:
            return "there is no plan yet"
        for target in plan.stages:
            stage = state.stages[target.stage]
            if not stage.ready and any(group.count > 0 for group in target.groups):
                return f"no replica of stage {stage.name!r} is ready ({len(stage.replicas)} on the way)"
        return ""


def stage_of(stage: Stage, now_ns: int, slo_ns: int) -> dict[str, Any]:
    """One stage for JSON."""
    view = stage.view(now_ns, slo_ns)
    return {
        "name": stage.name,
        "after": list(stage.after),
        "queued": len(view.queue),
        "running": view.running,
        "rate_rps": view.rate_rps(10 * NS_PER_S),
        "utilisation": view.utilisation(10 * NS_PER_S),
        "batch_max": stage.limit,
        "replicas": [replica_of(replica, now_ns) for replica in stage.replicas.values()],
    }


def replica_of(replica: Replica, now_ns: int) -> dict[str, Any]:
    """One replica for JSON, with the cores it has and those it was last asked to have."""
    view = replica.view()
    return {
        "id": replica.id,
        "variant": view.spec.variant,
        "node": view.spec.node,
        "life": view.life.value,
        "for_s": to_s(now_ns - view.since_ns),
        "cores": replica.cores,
        "cores_wanted": replica.target_cores,
        "running": view.running,
        "batches": replica.batches,
    }
