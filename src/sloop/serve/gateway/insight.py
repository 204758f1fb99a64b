"""`/v2/sloop/state`, `/v2/sloop/decisions` and readiness: the run state as JSON, for people and scripts.

Instants are seconds since the server began. Traffic is the same input that the scaling policy receives, so that a
decision can be compared with its input.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from sloop.core import Core
from sloop.core.views import StageView
from sloop.runlog.fold import ReplicaRecord, RunState
from sloop.units import NS_PER_S, to_ms, to_s
from sloop.vocabulary import Life

TRAFFIC_NS: Final = 10 * NS_PER_S
"""Rates and utilisation are means over this time: long enough to read, short enough to see a burst."""


class Insight:
    """Renders the run `state` and the traffic of `core` as JSON. `clock` returns the core's time in ns."""

    def __init__(self, core: Core, state: RunState, *, application: str, system: str, clock: Callable[[], int]) -> None:
        self._core, self._run, self._clock = core, state, clock
        self._application, self._system = application, system

    def decisions(self, limit: int) -> bytes:
        """The last `limit` decisions, oldest first, and the number of all decisions."""
        last = list(self._run.last_decisions)[-limit:]
        rows = [{"at_s": to_s(now_ns)} | msgspec.to_builtins(decided) for now_ns, decided in last]
        for row in rows:
            row.pop("type")
        return msgspec.json.encode({"total": self._run.decisions.total(), "decisions": rows})

    def state(self) -> bytes:
        """The plan in force, and each stage with its queue, traffic and replicas."""
        run, now_ns = self._run, self._clock()
        return msgspec.json.encode(
            {
                "application": self._application,
                "system": self._system,
                "now_s": to_s(now_ns),
                "draining": run.draining,
                "slo_ms": to_ms(run.graph.slo_ns),
                "plan": run.plan and msgspec.to_builtins(run.plan),
                "stages": [self._stage(view, now_ns) for view in self._core.stage_views()],
            }
        )

    def _stage(self, view: StageView, now_ns: int) -> dict[str, Any]:
        run = self._run
        replicas = [replica for replica in run.replicas.values() if replica.spec.stage == view.name]
        limits = {target.stage: target.batch_max for target in run.plan.stages} if run.plan else {}
        return {
            "name": view.name,
            "after": list(view.after),
            "queued": run.queued(view.name),
            "running": sum(len(replica.running.requests) for replica in replicas if replica.running),
            "rate_rps": view.rate_rps(TRAFFIC_NS),
            "utilisation": view.utilisation(TRAFFIC_NS),
            "batch_max": limits.get(view.name, 0),
            "replicas": [_replica(replica, now_ns) for replica in replicas],
        }

    def unready(self) -> str:
        """Why the server is not ready; empty if every stage that is planned to have replicas has a ready one."""
        run = self._run
        if run.draining:
            return "the server is shutting down"
        if run.plan is None:
            return "there is no plan yet"
        for target in run.plan.stages:
            lives = [replica.life for replica in run.replicas.values() if replica.spec.stage == target.stage]
            if Life.READY not in lives and any(group.count > 0 for group in target.groups):
                return f"no replica of stage {target.stage!r} is ready ({lives.count(Life.STARTING)} starting)"
        return ""


def _replica(replica: ReplicaRecord, now_ns: int) -> dict[str, Any]:
    """One replica, with its cores in effect and as last ordered."""
    return {
        "id": replica.id,
        "variant": replica.spec.variant,
        "node": replica.spec.node,
        "life": replica.life.value,
        "for_s": to_s(now_ns - replica.since_ns),
        "cores": replica.cores,
        "cores_wanted": replica.wanted_cores,
        "running": len(replica.running.requests) if replica.running else 0,
        "batches": replica.batches,
    }
