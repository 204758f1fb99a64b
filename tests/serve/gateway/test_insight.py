"""State, decisions and readiness, read from the run state of a small scene."""

import json
from typing import Any

from sloop.actions import Decided, End
from sloop.events import WOKE, Draining, Event, ReplicaReady
from sloop.runlog.fold import RunState
from sloop.serve.gateway.insight import Insight
from sloop.units import ms, s
from sloop.vocabulary import Outcome, Plan, ReplicaId, RequestId
from tests.core.scene import Scene, plan_of, request


class Observed:
    """A scene with a run state that hears what its core is told and answers."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.scene = Scene(plan)
        self.run = RunState(self.scene.core.state.graph, decisions_kept=10)
        self.insight = Insight(self.scene.core, self.run, application="scene", system="static", clock=lambda: s(2))

    def act(self, at_ms: float, *events: Event) -> None:
        for event in events:
            self.run.append(ms(at_ms), event)
            self.run.extend(ms(at_ms), self.scene.act(at_ms, event))


def test_shows_queues_replicas_and_plan() -> None:
    server = Observed(plan_of(count=2))
    server.act(0, WOKE)
    server.act(500, ReplicaReady(ReplicaId(0)))
    server.act(1000, request(1, at_ms=1000), request(2, at_ms=1000))
    state: Any = json.loads(server.insight.state())
    assert (state["application"], state["system"], state["now_s"], state["slo_ms"]) == ("scene", "static", 2.0, 1000.0)
    assert (state["plan"]["why"], state["draining"]) == ("the test says so", False)
    (stage,) = state["stages"]
    assert (stage["queued"], stage["running"], stage["batch_max"], stage["after"]) == (1, 1, 4, [])
    assert {"rate_rps", "utilisation"} < stage.keys()
    first, second = stage["replicas"]
    assert (first["life"], first["for_s"], first["running"], first["cores"]) == ("ready", 1.5, 1, 1.0)
    assert (first["cores_wanted"], first["batches"], first["variant"]) == (1.0, 1, "a")
    assert (second["life"], second["running"]) == ("starting", 0)


def test_says_what_keeps_it_from_being_ready() -> None:
    server = Observed(plan_of(count=1))
    assert server.insight.unready() == "there is no plan yet"
    server.act(0, WOKE)
    assert server.insight.unready() == "no replica of stage 'only' is ready (1 starting)"
    server.act(0, ReplicaReady(ReplicaId(0)))
    assert server.insight.unready() == ""
    server.act(1, Draining())
    assert server.insight.unready() == "the server is shutting down"


def test_a_plan_for_no_replicas_is_ready_as_it_is() -> None:
    server = Observed(plan_of(count=0))
    server.act(0, WOKE)
    assert server.insight.unready() == ""


def test_keeps_the_last_decisions_with_their_reasons() -> None:
    server = Observed()
    for number in range(3):
        server.run.append(ms(number), Decided("plan", f"reason {number}", "only"))
        server.run.append(ms(number), End(RequestId(number), Outcome.SERVED))
    found = json.loads(server.insight.decisions(2))
    assert found["total"] == 3
    assert [(d["at_s"], d["kind"], d["why"]) for d in found["decisions"]] == [
        (0.001, "plan", "reason 1"),
        (0.002, "plan", "reason 2"),
    ]
