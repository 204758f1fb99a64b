"""State, decisions and readiness, read from the run state of a small scene with one application or several."""

import asyncio
import json
import logging
import time
from typing import Any

import pytest

from sloop.actions import Decided, End, StartBatch
from sloop.core.protocols import Policies
from sloop.events import (
    WOKE,
    Deployed,
    Draining,
    Event,
    Finished,
    Promoted,
    Removed,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.serve import server as module
from sloop.serve.insight import Insight
from sloop.serve.metrics import Metrics
from sloop.serve.protocols import ModelState, Readiness, ServerReadiness
from sloop.systems.system import System
from sloop.units import GIB, ms, s
from sloop.vocabulary import (
    BatchId,
    Canary,
    Device,
    Group,
    Node,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    RequestId,
    Slot,
    StagePlan,
)
from tests.core.scene import Acting, Deployment, Scene, graph, plan_of, request


class Observed:
    """A scene with a run state that receives the core's events and actions."""

    def __init__(self, scene: Acting) -> None:
        self.scene = scene
        self.core = core = scene.core
        parts = [application.parts for application in core.state.applications.values()]
        nodes = [view.node for view in core.state.ledger.views()]
        self.metrics = Metrics(parts, nodes=nodes, build=core.build)
        self.run = self.metrics.state
        self.failure, self.now_ns = "", s(2)
        policies: Policies = parts[0].policies
        self.insight = Insight(
            core,
            self.metrics,
            deployment="scene",
            system=System("static", "baseline", "", policies),
            clock=lambda: self.now_ns,
            answered_rows=lambda model, version: 17,
            failure=lambda: self.failure,
        )

    def act(self, at_ms: float, *events: Event) -> None:
        for event in events:
            self.run.append(ms(at_ms), event)
            self.run.extend([(ms(at_ms), action) for action in self.scene.act(at_ms, event)])

    def make_ready(self, at_ms: float) -> None:
        """Let all replicas become ready."""
        for replica in list(self.core.state.replicas):
            self.act(at_ms, WorkerReady(replica))

    @property
    def page(self) -> Any:
        return json.loads(self.insight.state())

    def states(self, *models: str) -> list[ModelState | None]:
        found = [self.insight.readiness(model) for model in models]
        return [readiness.state if readiness else None for readiness in found]


def served(scene: Acting) -> Observed:
    """All replicas of the first plan are ready."""
    server = Observed(scene)
    server.act(0, WOKE)
    server.make_ready(0)
    return server


def of_one(plan: Plan | None = None) -> Observed:
    return Observed(Scene(plan))


# Readiness


def test_says_what_keeps_it_from_being_ready() -> None:
    server = of_one(plan_of(count=1))
    assert server.insight.server_readiness().why == "there is no plan yet"
    server.act(0, WOKE)
    assert server.insight.server_readiness().why == "no replica of stage 'only' is ready (1 starting)"
    server.act(0, WorkerReady(ReplicaId(0)))
    assert server.insight.server_readiness().why == ""
    server.act(1, Draining())
    assert server.insight.server_readiness().why == "the server is shutting down"
    server.failure = "the core failed: KeyError(1)"
    assert server.insight.server_readiness().why == "the core failed: KeyError(1)"
    assert server.insight.readiness("") == Readiness(ModelState.STOPPING, "the core failed: KeyError(1)")


async def test_the_log_says_why_it_is_not_ready_and_when_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, said = of_one(plan_of(count=1)), asyncio.Event()
    monkeypatch.setattr(module, "LOOK_READY_S", 0.001)
    caplog.handler.addFilter(lambda _: said.set() or True)  # type: ignore[func-returns-value]  # it only listens
    with caplog.at_level(logging.INFO, "sloop.server"):
        telling = asyncio.create_task(module.tell_when_ready(server.insight, 0.001))
        await asyncio.wait_for(said.wait(), 30)
        server.act(0, WOKE)
        server.make_ready(0)
        await telling
    assert "not ready after 0.001 s: there is no plan yet" in caplog.text
    assert caplog.messages[-1].startswith("ready after ")


def test_a_plan_for_no_replicas_rests_until_requests_wait() -> None:
    server = of_one(plan_of(count=0))
    server.act(0, WOKE)
    assert server.insight.server_readiness().why == ""
    assert server.states("") == [ModelState.RESTING]
    server.act(1, request(1, at_ms=1))
    assert server.insight.server_readiness().why == "no replicas are planned: the test says so"
    assert server.states("") == [ModelState.WAITING]


def test_the_server_is_ready_if_every_model_is_ready_or_rests() -> None:
    server = Observed(Deployment({"busy": 1, "resting": 0, "slow": 1}))
    server.act(0, WOKE)
    server.act(0, WorkerReady(ReplicaId(0)))
    assert server.states("busy", "resting", "slow") == [ModelState.READY, ModelState.RESTING, ModelState.STARTING]
    assert server.insight.server_readiness().why == "model 'slow': no replica of stage 'only' is ready (1 starting)"
    server.act(1, WorkerReady(ReplicaId(1)))
    assert server.insight.server_readiness() == ServerReadiness()


def lose(server: Observed, model: str, at_ms: float, error: str = "it exited with 3") -> None:
    """The newest replica of a model dies."""
    id = max(id for id, replica in server.core.state.replicas.items() if replica.stage.name == f"{model}/only")
    server.act(at_ms, WorkerLost(id, error))
    server.now_ns = ms(at_ms)


def test_a_model_that_cannot_start_does_not_hold_back_the_others() -> None:
    server = Observed(Deployment({"good": 1, "bad": 1}))
    server.act(0, WOKE)
    server.act(0, WorkerReady(ReplicaId(0)))
    assert server.insight.server_readiness().why, "it may yet be ready"
    lose(server, "bad", 1)
    why = "no replica of stage 'only' can start: it exited with 3; another attempt runs"
    assert server.insight.server_readiness() == ServerReadiness(models={"bad": Readiness(ModelState.FAILING, why)})
    lose(server, "bad", 2)
    why = "no replica of stage 'only' can start: it exited with 3; next attempt in 1 s"
    assert server.insight.readiness("bad") == Readiness(ModelState.FAILING, why)
    assert server.states("good") == [ModelState.READY]
    server.act(2_000, WOKE)
    server.make_ready(2_000)
    assert server.insight.server_readiness() == ServerReadiness()


def test_a_model_that_dies_later_or_comes_later_does_not_hide_the_others() -> None:
    server = served(Deployment({"good": 1, "bad": 1}))
    assert server.insight.server_readiness() == ServerReadiness()
    lose(server, "bad", 1, "it was killed")
    ready = server.insight.server_readiness()
    assert (ready.why, list(ready.models)) == ("", ["bad"])
    assert "is ready: it was killed; another attempt runs" in ready.models["bad"].why
    server.act(2, Deployed("new", "1", {}))
    server.act(1_000, WOKE)
    assert list(server.insight.server_readiness().models) == ["bad", "new"]
    assert server.insight.server_readiness().why == ""
    lose(server, "good", 1_001)
    assert server.insight.server_readiness().why.startswith("model 'good': no replica"), "nothing answers"


def test_a_start_that_does_not_end_is_not_waited_for() -> None:
    server = Observed(Deployment({"good": 1, "slow": 1}))
    server.act(0, WOKE)
    server.act(0, WorkerReady(ReplicaId(0)))
    for now_s, is_ready in ((14, False), (16, True)):  # 5 s are usual
        server.now_ns = s(now_s)
        assert (server.insight.server_readiness().why == "") is is_ready
    assert server.insight.readiness("slow") == Readiness(
        ModelState.FAILING, "no replica of stage 'only' is ready (1 starting for 16 s, where 5 s are usual)"
    )


def test_a_model_without_room_says_so() -> None:
    server = of_one(plan_of(count=1, cores=8))
    server.act(0, WOKE)
    why = "no replica of stage 'only' can start: no node has room for a replica of a with 8 cores: at most 4 cores of "
    why += "a node are free"
    assert server.insight.readiness("") == Readiness(ModelState.FAILING, why)
    assert server.insight.server_readiness().why == why, "nothing answers"


def test_every_stage_that_cannot_serve_is_named_with_its_reason() -> None:
    each = [StagePlan(name, (Group(ReplicaSpec(name, "a", Slot(1.0)), 1),), batch_max=1) for name in "abc"]
    server = Observed(Scene(Plan(tuple(each), "one of each"), application=graph(a={}, b={}, c={})))
    server.act(0, WOKE)
    for replica in (ReplicaId(0), ReplicaId(1), ReplicaId(2)):
        server.act(1, WorkerLost(replica, f"error {replica}"))
    found = server.insight.readiness("")
    assert found is not None
    assert found.state is ModelState.FAILING
    assert all(f"stage {name!r}" in found.why for name in "abc"), found.why


def test_a_stage_for_which_nothing_is_planned_is_told_if_the_plan_is_not_feasible() -> None:
    for feasible in (True, False):
        first = StagePlan("a", (Group(ReplicaSpec("a", "a", Slot(1.0)), 1),), batch_max=1)
        plan = Plan((first, StagePlan("b", (), batch_max=1)), "too little memory", feasible=feasible)
        server = Observed(Scene(plan, application=graph(a={}, b={})))
        server.act(0, WOKE)
        server.make_ready(1)
        wanted = Readiness(ModelState.WAITING, "no replicas are planned of b: too little memory")
        assert server.insight.readiness("") == (Readiness(ModelState.READY) if feasible else wanted)


def test_a_model_that_was_refused_at_the_start_is_told() -> None:
    server = of_one(plan_of(count=1))
    server.act(0, WOKE)
    server.insight.refused = {"bad": Readiness(ModelState.FAILING, "it cannot be read")}
    assert server.insight.server_readiness().why.startswith("model '': no replica")
    server.make_ready(0)
    assert server.insight.server_readiness() == ServerReadiness(models=dict(server.insight.refused))


def test_several_models_that_are_not_ready_are_counted() -> None:
    server = Observed(Deployment({"a": 1, "b": 1, "c": 1}))
    server.act(0, WOKE)
    why = "model 'a': no replica of stage 'only' is ready (1 starting) (and 2 more models)"
    assert server.insight.server_readiness().why == why


def test_a_model_without_cores_waits_for_them() -> None:
    server = Observed(Deployment({"a": 4, "b": 4}, cores=0.001, weights={"a": 1000}))
    server.act(0, WOKE)
    readiness = server.insight.readiness("b")
    assert readiness is not None
    assert (readiness.state, readiness.is_ready) == (ModelState.WAITING, False)
    assert "the other applications need all cores" in readiness.why


def test_a_model_rests_when_its_requests_stop() -> None:
    server = served(Deployment({"a": 1, "b": 1}, rest_after_s=5))
    for second in range(1, 7):
        server.act(1000 * second, request(second, at_ms=1000 * second, application="a"))
    assert server.states("a", "b") == [ModelState.READY, ModelState.RESTING]
    assert server.insight.server_readiness().why == ""


def test_a_model_that_wakes_is_ready_unless_it_cannot_start() -> None:
    server = Observed(Deployment({"a": 1}, rest_after_s=1, wake_s=30))
    server.act(0, WOKE)
    assert server.states("a") == [ModelState.STARTING], "a server that starts waits for it"
    server.make_ready(0)
    server.act(1000, WOKE)
    server.act(1500, WorkerStopped(ReplicaId(0)))
    assert server.states("a") == [ModelState.RESTING]
    server.act(2000, request(1, application="a", at_ms=2000, slo_ms=10))
    assert server.states("a") == [ModelState.WAKING]
    assert server.insight.server_readiness() == ServerReadiness()
    lose(server, "a", 2500)
    assert server.states("a") == [ModelState.FAILING]
    server.make_ready(3000)
    assert server.states("a") == [ModelState.READY]


# Versions


def test_versions_serve_in_the_order_of_their_shares() -> None:
    server = served(Deployment({"a": 1, "b": 1}))
    assert (server.insight.versions("a"), server.insight.versions("none")) == (["1"], [])
    server.act(1, Deployed("a", "2", {}, Canary(share=0.25)))
    assert server.insight.versions("a") == ["1"], "the new version has no ready replica"
    assert server.insight.readiness("a", "2") == Readiness(ModelState.STARTING, "there is no plan yet")
    server.act(1000, WOKE)
    server.make_ready(1000)
    server.act(2000, WOKE)
    assert server.insight.versions("a") == ["1", "2"]
    assert {row["version"]: row["share"] for row in server.page["applications"] if row["name"] == "a"} == {
        "1": 0.75,
        "2": 0.25,
    }
    server.act(2001, Promoted("a", "2"))
    server.act(3000, WOKE)
    server.make_ready(3000)
    server.act(4000, WOKE)
    assert server.insight.versions("a") == ["2"]
    assert server.insight.readiness("a", "1") is None, "it gets no requests"
    assert server.insight.readiness("a", "3") is None


def test_a_removed_model_has_no_versions() -> None:
    server = served(Deployment({"a": 1, "b": 1}))
    server.act(1, Removed("a"))
    assert server.insight.versions("a") == []
    assert server.insight.readiness("a") is None
    assert server.insight.server_readiness().why == ""


# Pages


def test_shows_queues_replicas_and_plan() -> None:
    server = of_one(plan_of(count=2))
    server.act(0, WOKE)
    server.act(500, WorkerReady(ReplicaId(0)))
    server.act(1000, request(1, at_ms=1000), request(2, at_ms=1000))
    page = server.page
    assert (page["deployment"], page["system"], page["now_s"]) == ("scene", "static", 2.0)
    assert (page["divide"], page["draining"]) == ({"name": "max_min", "idle": "leave"}, False)
    (application,) = page["applications"]
    assert (application["slo_ms"], application["version"], application["rollout"]) == (1000.0, "1", "serving")
    assert (application["plan"]["why"], application["open"]) == ("the test says so", 2)
    assert application["cores_planned"] == {"": 2.0}
    (stage,) = application["stages"]
    assert (stage["queued"], stage["running"], stage["batch_max"], stage["after"]) == (1, 1, 4, [])
    assert {"rate_rps", "utilisation"} < stage.keys()
    first, second = stage["replicas"]
    assert (first["life"], first["for_s"], first["running"], first["cores"]) == ("ready", 1.5, 1, 1.0)
    assert (first["cores_wanted"], first["batches"], first["variant"]) == (1.0, 1, "a")
    assert (first["node"], first["device"]) == ("n0", None)
    assert (second["life"], second["running"]) == ("starting", 0)


def test_shows_one_model_of_several() -> None:
    server = Observed(Deployment({"a": 1, "b": 2}, weights={"b": 3}))
    server.act(0, WOKE)
    assert [row["name"] for row in server.page["applications"]] == ["a", "b"]
    (row,) = json.loads(server.insight.state("b"))["applications"]
    assert (row["name"], row["weight"], row["cores_planned"], row["state"]) == ("b", 3.0, {"": 2.0}, "starting")
    (stage,) = row["stages"]
    assert stage["name"] == "only", "as the application's file calls it"
    assert [replica["cores"] for replica in stage["replicas"]] == [2.0]


def test_shows_no_version_that_has_ended() -> None:
    server = served(Deployment({"a": 1, "b": 1}))
    server.act(1, Deployed("a", "2", {}))
    for second in range(1, 6):
        server.act(1000 * second, WOKE)
        server.make_ready(1000 * second)
    for replica in list(server.run.versions["a"].run.replicas):
        server.act(6000, WorkerStopped(replica))
    server.act(7000, WOKE)
    assert "a" not in server.core.state.applications
    assert [(row["name"], row["version"]) for row in server.page["applications"]] == [("b", "1"), ("a", "2")]
    (row,) = json.loads(server.insight.state("a"))["applications"]
    assert row["version"] == "2"


def test_shows_no_removed_model() -> None:
    server = served(Deployment({"a": 1, "b": 1}))
    server.act(1, Removed("a"))
    for replica in list(server.run.versions["a"].run.replicas):
        server.act(1000, WorkerStopped(replica))
    server.act(2000, WOKE)
    assert [row["name"] for row in server.page["applications"]] == ["b"]
    assert json.loads(server.insight.state("a"))["applications"] == []


def test_shows_nodes_with_their_free_room() -> None:
    device = Device("gpu0", "T4", 16 * GIB, clients_max=2)
    far = Node("far", "g4dn", cores=8, memory_bytes=4 * GIB, devices=(device,), usd_per_h=0.5, on_demand=True)
    server = Observed(Deployment({"a": 1, "b": 2}, nodes=[far]))
    server.act(0, WOKE)
    near, other = server.page["nodes"]
    assert (near["name"], near["cores"], near["free_cores"], near["state"]) == ("n0", 4.0, 1.0, "ready")
    assert (other["hardware"], other["state"], other["usd_per_h"]) == ("g4dn", "released", 0.5)
    assert other["devices"] == [
        {
            "name": "gpu0",
            "kind": "T4",
            "free_share": 1.0,
            "memory_bytes": 16 * GIB,
            "free_memory_bytes": 16 * GIB,
            "clients_max": 2,
            "free_clients": 2,
        }
    ]


def test_keeps_the_last_decisions_with_their_reasons() -> None:
    server = of_one()
    for number in range(3):
        server.run.append(ms(number), Decided("plan", f"reason {number}", "only"))
        server.run.append(ms(number), End(RequestId(number), Outcome.SERVED))
    found = json.loads(server.insight.decisions(2))
    assert found["total"] == 3
    assert [(d["at_s"], d["kind"], d["why"]) for d in found["decisions"]] == [
        (0.001, "plan", "reason 1"),
        (0.002, "plan", "reason 2"),
    ]


@pytest.mark.parametrize(("model", "kinds"), [("a", {"plan", "rollout"}), ("b", {"plan"})])
def test_decisions_are_those_of_one_model(model: str, kinds: set[str]) -> None:
    server = served(Deployment({"a": 1, "b": 1}))
    server.act(1, Deployed("a", "2", {}))
    server.act(1000, WOKE)
    found = json.loads(server.insight.decisions(100, model))
    assert {row["application"] for row in found["decisions"]} == {model}
    assert {row["kind"] for row in found["decisions"]} == kinds
    assert found["total"] == len(found["decisions"])
    last = found["decisions"][-1]
    assert last.get("version", "1") == ("2" if model == "a" else "1")
    everything = json.loads(server.insight.decisions(100))
    assert everything["total"] > found["total"]
    (only,) = json.loads(server.insight.decisions(1, model))["decisions"]
    assert only == last


def test_statistics_count_what_requests_and_batches_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of 8 rows run together, in two passes, and a third alone; a fourth is dropped."""
    monkeypatch.setattr(time, "time_ns", lambda: s(1000))  # the server's clock says 2 s
    server = of_one(plan_of(count=1))
    assert json.loads(server.insight.statistics())["model_stats"][0]["last_inference"] == 0
    server.act(0, WOKE)
    server.make_ready(0)
    run = server.run
    for number, sent_ms in ((1, 10), (2, 12), (3, 13), (4, 14)):
        run.append(ms(sent_ms), request(number, at_ms=sent_ms))
    (one,) = server.core.state.replicas
    for batch, requests, rows, passes, began_ms, ended_ms in ((1, (1, 2), 16, 2, 15, 25), (2, (3,), 0, 1, 25, 31)):
        ids = tuple(map(RequestId, requests))
        run.append(ms(began_ms), StartBatch(BatchId(batch), one, "only", ids, together=rows))
        run.append(ms(ended_ms), Finished(BatchId(batch), one, ms(1), passes=passes))
        for id in ids:
            run.append(ms(ended_ms), End(id, Outcome.SERVED if batch == 1 else Outcome.LATE))
    run.append(ms(50), End(RequestId(4), Outcome.DROPPED))
    (found,) = json.loads(server.insight.statistics())["model_stats"]
    stats = found["inference_stats"]
    assert (found["name"], found["version"]) == ("", "1")
    assert (found["inference_count"], found["execution_count"]) == (17, 3)
    assert stats["success"] == {"count": 3, "ns": ms(15 + 13 + 18)}
    assert stats["fail"] == {"count": 1, "ns": ms(36)}
    assert stats["queue"] == {"count": 3, "ns": ms(5 + 3 + 12)}
    assert stats["compute_infer"] == {"count": 3, "ns": ms(2 * 10 + 6)}
    sizes = [(each["batch_size"], each["compute_infer"]) for each in found["batch_stats"]]
    assert sizes == [(1, {"count": 1, "ns": ms(6)}), (16, {"count": 1, "ns": ms(10)})]
    assert found["last_inference"] == 998_050
    assert json.loads(server.insight.statistics())["model_stats"] == [found]
    assert json.loads(server.insight.statistics("other"))["model_stats"] == []
    assert json.loads(server.insight.statistics("", "2"))["model_stats"] == []
