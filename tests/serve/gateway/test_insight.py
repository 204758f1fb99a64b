import json
from typing import Any

from sloop.actions import Decided, End
from sloop.events import WOKE, Draining, ReplicaReady
from sloop.serve.gateway.insight import Insight
from sloop.units import ms, s
from sloop.vocabulary import Outcome, ReplicaId, RequestId
from tests.core.scene import Scene, plan_of, request


def insight_of(scene: Scene, now_ns: int = s(2)) -> Insight:
    return Insight(scene.core, application="scene", system="static", clock=lambda: now_ns)


def state_of(insight: Insight) -> Any:
    return json.loads(insight.state())


def test_shows_queues_replicas_and_plan() -> None:
    scene = Scene(plan_of(count=2))
    scene.act(0, WOKE)
    scene.act(500, ReplicaReady(ReplicaId(0)))
    scene.act(1000, request(1, at_ms=1000), request(2, at_ms=1000))
    state = state_of(insight_of(scene))
    assert (state["application"], state["system"], state["now_s"], state["slo_ms"]) == ("scene", "static", 2.0, 1000.0)
    assert state["plan"]["why"] == "the test says so"
    (stage,) = state["stages"]
    assert (stage["queued"], stage["running"]) == (1, 1)
    first, second = stage["replicas"]
    assert (first["life"], first["for_s"], first["running"], first["cores"]) == ("ready", 1.5, 1, 1.0)
    assert (second["life"], second["running"]) == ("starting", 0)


def test_says_what_keeps_it_from_being_ready() -> None:
    scene = Scene(plan_of(count=1))
    insight = insight_of(scene)
    assert insight.unready() == "there is no plan yet"
    scene.act(0, WOKE)
    assert insight.unready() == "no replica of stage 'only' is ready (1 on the way)"
    scene.act(0, ReplicaReady(ReplicaId(0)))
    assert insight.unready() == ""
    scene.act(1, Draining())
    assert insight.unready() == "the server is shutting down"


def test_a_plan_for_no_replicas_is_ready_as_it_is() -> None:
    scene = Scene(plan_of(count=0))
    scene.act(0, WOKE)
    assert insight_of(scene).unready() == ""


def test_keeps_the_last_decisions_with_their_reasons() -> None:
    insight = insight_of(Scene())
    for number in range(3):
        insight.extend(ms(number), [Decided("plan", f"reason {number}", "only")])
        insight.extend(ms(number), [End(RequestId(number), Outcome.SERVED)])
    told = json.loads(insight.decisions(2))
    assert told["total"] == 3
    assert [(d["at_s"], d["kind"], d["why"]) for d in told["decisions"]] == [
        (0.001, "plan", "reason 1"),
        (0.002, "plan", "reason 2"),
    ]
