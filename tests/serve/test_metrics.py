"""The exposition of a log by hand, and beside the summary of random worlds with faults.

What is counted, and when, is decided by the fold behind it, whose tests are in `tests/runlog`.
"""

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from msgspec import Struct, structs
from prometheus_client.parser import text_string_to_metric_families

from sloop.actions import (
    AcquireNode,
    Assigned,
    Decided,
    End,
    Piece,
    RequestPlan,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    VersionState,
)
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.graph import Graph
from sloop.core.views import Belief
from sloop.events import (
    BatchFailed,
    Cancelled,
    Deployed,
    Finished,
    NodeReady,
    Planned,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
)
from sloop.runlog import Record
from sloop.runlog.summary import RunSummary
from sloop.serve.driver import Turns
from sloop.serve.messages import EdgeCounts
from sloop.serve.metrics import RECORDS_MAX, SAMPLES_MAX, Metrics
from sloop.serve.protocols import SpareProcesses
from sloop.sim import simulate
from sloop.sim.worlds import random_world
from sloop.units import ms, s
from sloop.vocabulary import BatchId, Node, Outcome, ReplicaId, ReplicaSpec, RequestId, Slot
from tests.core.scene import request

Scraped = dict[tuple[str, tuple[str, ...]], float]

ONE = Application("demo", 200, (Stage("only", (Variant("v"),)),), SystemChoice("static"))


class Version(Struct):
    """A version of an application, as the fold reads it."""

    graph: Graph
    name: str = "demo"
    version: str = "1"
    beliefs: dict[tuple[str, str, str], Belief] = {}  # msgspec copies it

    @property
    def key(self) -> str:
        return self.name if self.version == "1" else f"{self.name}@{self.version}"


def metrics_of(application: Application) -> Metrics:
    return Metrics([Version(application.graph)])


def scrape(metrics: Metrics) -> Scraped:
    """Every sample, by name and label values in the order of the labels' names; without model, version and hardware."""
    return {
        (name, tuple(value for key, value in labels if key not in ("model", "version", "hardware"))): value
        for name, labels, value in samples(metrics)
    }


def samples(metrics: Metrics) -> list[tuple[str, list[tuple[str, str]], float]]:
    """Name, sorted labels and value of every sample."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    return [
        (sample.name, sorted(sample.labels.items()), sample.value) for family in families for sample in family.samples
    ]


def rows(metrics: Metrics, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of a name that are not 0, by the values of these labels."""
    found = [(dict(pairs), value) for each, pairs, value in samples(metrics) if each == name]
    return {tuple(pairs[label] for label in labels): value for pairs, value in found if value}


def told(application: Application, *records: tuple[float, Record]) -> Scraped:
    metrics = metrics_of(application)
    for at_ms, record in records:
        metrics.state.append(ms(at_ms), record)
    return scrape(metrics)


def start(replica: int, stage: str = "only", cores: float = 2) -> StartWorker:
    return StartWorker(ReplicaId(replica), ReplicaSpec(stage, "v", Slot(cores)))


def batch(number: int, replica: int, *requests: int, stage: str = "only") -> StartBatch:
    return StartBatch(BatchId(number), ReplicaId(replica), stage, tuple(map(RequestId, requests)))


def finished(number: int, replica: int, service_ms: float = 1) -> Finished:
    return Finished(BatchId(number), ReplicaId(replica), ms(service_ms))


def test_follows_a_request_from_queue_to_answer() -> None:
    seen = told(
        ONE,
        (0, start(0)),
        (0, WorkerReady(ReplicaId(0))),
        (10, request(1, at_ms=10, elapsed_ms=5)),
        (12, request(2, at_ms=12)),
        (14, batch(0, 0, 1, 2)),
        (30, finished(0, 0, service_ms=15)),
        (30, End(RequestId(1), Outcome.SERVED)),
        (30, End(RequestId(2), Outcome.LATE, "late")),
        (31, request(3, at_ms=31)),
        (32, request(4, at_ms=32)),
        (33, batch(1, 0, 3)),
    )
    assert seen["sloop_requests_total", ("served",)] == seen["sloop_requests_total", ("late",)] == 1
    assert seen["sloop_attainment_ratio", ()] == 0.5
    assert seen["sloop_requests_open", ()] == 2
    assert seen["sloop_queue_length", ("only",)] == 1
    assert seen["sloop_queue_wait_seconds_count", ("only",)] == 3
    assert seen["sloop_queue_wait_seconds_sum", ("only",)] == pytest.approx(0.004 + 0.002 + 0.002)
    assert seen["sloop_queue_wait_seconds_bucket", ("0.0025", "only")] == 2
    assert seen["sloop_batch_size_sum", ("only", "v")] == 3
    assert seen["sloop_service_time_seconds_sum", ("only", "v")] == pytest.approx(0.015)
    assert seen["sloop_request_duration_seconds_sum", ("served",)] == pytest.approx(0.025)
    assert seen["sloop_cores_allocated", ("only",)] == seen["sloop_cores_in_use", ("only",)] == 2
    assert seen["sloop_core_seconds_total", ("only",)] == pytest.approx(2 * 0.033)


def test_rows_passes_and_padding_of_batches_are_counted_over_all_core_counts() -> None:
    seen = told(
        ONE,
        (0, start(0)),
        (0, WorkerReady(ReplicaId(0))),
        (1, structs.replace(batch(0, 0, 1, 2), together=12, size=64)),
        (2, structs.replace(finished(0, 0), passes=2, elements=500, padded=30)),
        (3, WorkerResized(ReplicaId(0), 4)),
        (4, batch(1, 0, 3)),
        (5, structs.replace(finished(1, 0), elements=50)),
    )
    key = "only", "v"
    assert (seen["sloop_batch_size_sum", key], seen["sloop_batch_size_count", key]) == (13, 2)
    assert seen["sloop_passes_total", key] == 3
    assert (seen["sloop_row_elements_total", key], seen["sloop_padding_elements_total", key]) == (550, 30)


def test_a_cold_start_is_told_step_by_step() -> None:
    seen = told(
        ONE,
        (0, start(0)),
        (1, WorkerProgressed(ReplicaId(0), "spawning")),
        (100, WorkerProgressed(ReplicaId(0), "loading")),
        (400, WorkerReady(ReplicaId(0))),
        (500, ResizeWorker(ReplicaId(0), 4)),
        (505, WorkerResized(ReplicaId(0), 4)),
        (600, start(1)),
        (650, StopWorker(ReplicaId(0), "why")),
    )
    steps = {
        step: seen["sloop_cold_start_seconds_sum", ("only", step, "v")] for step in ("spawning", "loading", "total")
    }
    assert steps == pytest.approx({"spawning": 0.099, "loading": 0.3, "total": 0.4})
    assert seen["sloop_resize_seconds_sum", ("only",)] == pytest.approx(0.005)
    assert seen["sloop_cores_allocated", ("only",)] == 6
    assert [seen["sloop_replicas", (life, "only", "v")] for life in ("starting", "ready", "draining")] == [1, 0, 1]
    assert seen["sloop_core_seconds_total", ("only",)] == pytest.approx(2 * 0.5 + 4 * 0.15 + 2 * 0.05)


def test_a_request_in_pieces_waits_once_until_its_first_rows_begin() -> None:
    pieces = [structs.replace(batch(at, 0, 1), together=4, pieces=(Piece(4 * at, 4, 8),)) for at in range(2)]
    seen = told(
        ONE,
        (0, start(0)),
        (0, WorkerReady(ReplicaId(0))),
        (10, request(1, at_ms=10)),
        (12, pieces[0]),
        (30, finished(0, 0)),
        (30, pieces[1]),
        (50, finished(1, 0)),
        (50, End(RequestId(1), Outcome.SERVED)),
    )
    assert seen["sloop_queue_wait_seconds_count", ("only",)] == 1
    assert seen["sloop_queue_wait_seconds_sum", ("only",)] == pytest.approx(0.002)
    assert seen["sloop_batch_size_sum", ("only", "v")] == 8


@pytest.mark.parametrize("seed", [1, 4, 9])
def test_no_figure_is_counted_twice(seed: int) -> None:
    """What `/metrics` shows of a run is what its summary, and so tables and pages, say of it."""
    world = random_world(seed)
    metrics, summary = metrics_of(world.application), RunSummary(world.application.graph)
    simulate(world, [metrics.state, summary])
    seen, row = scrape(metrics), summary.row(system="any", seed=seed)
    assert {outcome: seen["sloop_requests_total", (outcome.value,)] for outcome in Outcome} == {
        outcome: getattr(row, outcome.value) for outcome in Outcome
    }
    assert seen["sloop_attainment_ratio", ()] == pytest.approx(row.attainment)
    for stage in row.stages:
        wait_s, count = (seen.get((f"sloop_queue_wait_seconds_{k}", (stage.stage,)), 0.0) for k in ("sum", "count"))
        assert count == stage.visits
        assert wait_s == pytest.approx(1e-3 * (stage.mean_wait_ms or 0.0) * stage.visits)
        assert seen["sloop_drops_total", (stage.stage,)] == stage.dropped
        sizes = {
            kind: sum(
                value
                for (name, at), value in seen.items()
                if name == f"sloop_batch_size_{kind}" and at[0] == stage.stage
            )
            for kind in ("count", "sum")
        }
        assert sizes == {"count": stage.batches, "sum": pytest.approx((stage.mean_batch or 0.0) * stage.batches)}
    core_s = sum(value for (name, _), value in seen.items() if name == "sloop_core_seconds_total")
    assert core_s == pytest.approx(row.core_seconds)


def test_nothing_has_been_missed_before_the_first_end() -> None:
    assert scrape(metrics_of(ONE))["sloop_attainment_ratio", ()] == 1


def test_samples_are_sorted_into_histograms_before_they_become_many() -> None:
    metrics = metrics_of(ONE)
    metrics.state.append(0, start(0))
    for id in range(SAMPLES_MAX + 100):
        metrics.state.append(ms(id), request(id, at_ms=id))
        metrics.state.append(ms(id), batch(id, 0, id))
        metrics.state.append(ms(id), finished(id, 0))
        metrics.state.append(ms(id), End(RequestId(id), Outcome.SERVED))
    run = metrics.state.records[0].run
    assert len(run.served_ns) < SAMPLES_MAX
    assert len(run.seconds) == 1
    seen = scrape(metrics)
    assert seen["sloop_requests_total", ("served",)] == SAMPLES_MAX + 100
    assert seen["sloop_request_duration_seconds_bucket", ("0.0005", "served")] == SAMPLES_MAX + 100
    assert seen["sloop_service_time_seconds_count", ("only", "v")] == SAMPLES_MAX + 100
    assert scrape(metrics) == seen, "a scrape changes nothing"


# Several models


def several(*names: str, slo_ms: Mapping[str, float] = MappingProxyType({})) -> Metrics:
    """Metrics of models of one stage each, `NAME/only`, to which version 2 can be deployed. `slo_ms` has the deadlines
    of models, and those of deployed versions as NAME@VERSION; 200 ms otherwise."""

    def version(name: str, number: str, _: object) -> Version:
        key, stages = Version(ONE.graph, name, number).key, (Variant("v"),)
        graph = Application(name, slo_ms.get(key, 200), (Stage(f"{key}/only", stages),), SystemChoice("static")).graph
        return Version(graph, name, number)

    nodes = [Node("n0", "c5", 4, 100, usd_per_h=1.8), Node("n1", "c5", 4, 100, usd_per_h=1.8, on_demand=True)]
    return Metrics([version(name, "1", {}) for name in names], nodes=nodes, build=version)


def served(metrics: Metrics, id: int, model: str, *, at_ms: float, outcome: Outcome = Outcome.SERVED) -> None:
    """A request that is served 10 ms later."""
    metrics.state.append(ms(at_ms), request(id, at_ms=at_ms, application=model))
    metrics.state.append(ms(at_ms + 10), End(RequestId(id), outcome))


def durations(metrics: Metrics, model: str) -> dict[float, float]:
    """For each bound, the requests of a model that took at most so many seconds, whatever became of them."""
    found: dict[float, float] = {}
    for name, pairs, value in samples(metrics):
        labels = dict(pairs)
        if name == "sloop_request_duration_seconds_bucket" and labels["model"] == model:
            found[float(labels["le"])] = found.get(float(labels["le"]), 0.0) + value
    return found


def test_the_buckets_of_each_model_contain_its_deadline_and_go_to_five_minutes() -> None:
    metrics = several("quick", "slow", "usual", slo_ms={"quick": 150, "slow": 400_000, "usual": 1000})
    for id, model, took_ms, outcome in (
        (1, "quick", 110, Outcome.SERVED),
        (2, "quick", 150, Outcome.SERVED),
        (3, "quick", 151, Outcome.LATE),
        (4, "slow", 399_000, Outcome.SERVED),
        (5, "slow", 401_000, Outcome.DROPPED),
        (6, "usual", 10, Outcome.SERVED),
    ):
        metrics.state.append(ms(0), request(id, at_ms=0, application=model))
        metrics.state.append(ms(took_ms), End(RequestId(id), outcome))
    quick, slow, usual = (durations(metrics, model) for model in ("quick", "slow", "usual"))
    assert [quick[bound] for bound in (0.1, 0.15, 0.25, float("inf"))] == [0, 2, 3, 3]
    assert [slow[bound] for bound in (300, 400, float("inf"))] == [0, 1, 2]
    assert quick.keys() - usual.keys() == {0.15}
    assert slow.keys() - usual.keys() == {400}
    assert max(bound for bound in usual if bound != float("inf")) == 300
    assert len({*map(round, (1e9 * bound for bound in usual if bound < 1e3))}) == len(usual) - 1, "none is there twice"


def test_a_version_with_another_deadline_adds_a_bucket_and_no_count_falls() -> None:
    metrics = several("a", slo_ms={"a": 150, "a@2": 120})
    state = metrics.state

    def end(id: int, at_ms: float, took_ms: float) -> None:
        state.append(ms(at_ms), request(id, at_ms=at_ms, application="a"))
        state.append(ms(at_ms + took_ms), End(RequestId(id), Outcome.SERVED))

    end(1, 0, 110)
    end(2, 200, 140)
    before = durations(metrics, "a")
    assert (before[0.1], before[0.15]) == (0, 2)
    state.append(ms(1000), Deployed("a", "2", {}))
    state.append(ms(1000), Rollout("a", "2", VersionState.SERVING, 1.0, "it is ready"))
    state.append(ms(1000), Rollout("a", "1", VersionState.RETIRED, 0.0, "replaced"))
    divided = durations(metrics, "a")
    assert divided == {**before, 0.12: 0}, "which of the two took longer is not known any more"
    end(3, 2000, 110)
    end(4, 3000, 140)
    after = durations(metrics, "a")
    assert {bound: after[bound] - divided[bound] for bound in (0.1, 0.12, 0.15, 0.25)} == {
        0.1: 0,
        0.12: 1,
        0.15: 2,
        0.25: 2,
    }
    state.append(ms(5000), Rollout("a", "2", VersionState.RETIRED, 0.0, "it was removed"))
    assert durations(metrics, "a") == {}
    assert not metrics._durations._own


def test_every_family_about_an_application_names_it() -> None:
    metrics = several("a", "b")
    metrics.state.append(0, start(0, "a/only"))
    metrics.state.append(0, WorkerReady(ReplicaId(0)))
    served(metrics, 1, "a", at_ms=1)
    served(metrics, 2, "b", at_ms=2, outcome=Outcome.LATE)
    metrics.state.append(ms(20), request(3, at_ms=20, application="b"))
    assert rows(metrics, "sloop_requests_total", "model", "outcome") == {("a", "served"): 1, ("b", "late"): 1}
    assert rows(metrics, "sloop_attainment_ratio", "model") == {("a",): 1}
    assert rows(metrics, "sloop_requests_open", "model") == {("b",): 1}
    assert rows(metrics, "sloop_replicas", "model", "version", "stage", "life") == {("a", "1", "only", "ready"): 1}
    assert metrics.ended() == {Outcome.SERVED: 1, Outcome.LATE: 1}
    assert metrics.ended("b") == {Outcome.LATE: 1}
    about_all = {
        *("sloop_plan_duration_seconds_bucket", "sloop_plan_duration_seconds_count", "sloop_plan_duration_seconds_sum"),
        *("sloop_nodes", "sloop_node_seconds_total", "sloop_node_usd_total"),
        *("sloop_body_bytes", "sloop_bodies_refused_total", "sloop_answer_bytes", "sloop_longest_turn_seconds"),
        *("sloop_turn_seconds_bucket", "sloop_turn_seconds_count", "sloop_turn_seconds_sum"),
        *("sloop_connections", "sloop_connections_refused_total", "sloop_connections_expired_total"),
        *("sloop_edges", "sloop_edges_lost_total"),
        *("sloop_key_requests_total", "sloop_key_refused_total", "sloop_log_lost_total"),
    }
    for name, labels, _ in samples(metrics):
        assert (name in about_all) != ("model" in dict(labels)), name


def test_the_counters_of_a_model_do_not_fall_when_a_version_ends() -> None:
    metrics = several("a", "b")
    state = metrics.state
    served(metrics, 1, "a", at_ms=1)
    state.append(ms(20), Deployed("a", "2", {}))
    state.append(ms(20), Rollout("a", "2", VersionState.STARTING, 0.0, "deployed"))
    state.append(ms(30), Rollout("a", "2", VersionState.CANARY, 0.25, "it is ready"))
    state.append(ms(31), request(2, at_ms=31, application="a"))
    state.append(ms(31), Assigned(RequestId(2), "a@2"))
    state.append(ms(40), End(RequestId(2), Outcome.LATE))
    assert rows(metrics, "sloop_version_share", "model", "version") == {
        ("a", "1"): 0.75,
        ("a", "2"): 0.25,
        ("b", "1"): 1,
    }
    assert rows(metrics, "sloop_version_requests_total", "version", "outcome") == {("1", "served"): 1, ("2", "late"): 1}
    states = rows(metrics, "sloop_version_state", "model", "version", "state")
    assert states.keys() == {("a", "1", "serving"), ("a", "2", "canary"), ("b", "1", "serving")}
    for version, last in (("2", VersionState.SERVING), ("1", VersionState.RETIRED)):
        state.append(ms(50), Rollout("a", version, last, float(version == "2"), "promoted"))
    assert rows(metrics, "sloop_version_requests_total", "version", "outcome") == {("2", "late"): 1}
    assert rows(metrics, "sloop_requests_total", "model", "outcome") == {("a", "served"): 1, ("a", "late"): 1}
    assert rows(metrics, "sloop_request_duration_seconds_count", "model", "outcome").keys() == {
        ("a", "served"),
        ("a", "late"),
    }
    assert rows(metrics, "sloop_rollouts_total", "model", "state")["a", "serving"] == 1
    assert {record.key for record in state.records} == {"a@2", "b"}
    state.append(ms(60), Rollout("a", "2", VersionState.RETIRED, 0.0, "it was removed"))
    assert rows(metrics, "sloop_requests_total", "model", "outcome") == {}
    of_versions = [
        labels["model"] for labels in (dict(pairs) for _, pairs, _ in samples(metrics)) if "version" in labels
    ]
    assert set(of_versions) == {"b"}, "a model that is gone has no rows"


def test_versions_that_have_ended_are_forgotten_without_a_scrape() -> None:
    metrics = several("a")
    state = metrics.state
    for number in range(2, 2 * RECORDS_MAX):
        at_ns = s(number)
        state.append(at_ns, Deployed("a", str(number), {}))
        state.append(at_ns, Rollout("a", str(number), VersionState.STARTING, 0.0, "deployed"))
        state.append(at_ns, Rollout("a", str(number), VersionState.SERVING, 1.0, "it is ready"))
        state.append(at_ns, Rollout("a", str(number - 1), VersionState.RETIRED, 0.0, "replaced"))
        served(metrics, number, "a", at_ms=1000 * number + 1)
    assert len(state.records) <= RECORDS_MAX + 1
    assert rows(metrics, "sloop_requests_total", "outcome") == {("served",): 2 * RECORDS_MAX - 2}
    assert len(state.records) == 1


def test_nodes_and_plans_are_counted_for_the_cluster() -> None:
    metrics = several("a")
    state = metrics.state
    state.append(0, request(1, application="a"))
    state.append(s(10), AcquireNode("n1"))
    state.append(s(20), NodeReady(Node("n1", "c5", 4, 100, usd_per_h=1.8, on_demand=True)))
    state.append(s(20), RequestPlan(1))
    state.append(s(20) + ms(300), Planned(1, {}, {"a": "ValueError: no"}))
    state.append(s(20) + ms(300), Decided("planner", "no new plan: ValueError: no", application="a"))
    state.append(s(20) + ms(300), Decided("node", "n1 is needed"))
    state.append(s(30), End(RequestId(1), Outcome.SERVED))
    assert rows(metrics, "sloop_nodes", "hardware", "state") == {("c5", "ready"): 2}
    assert rows(metrics, "sloop_node_seconds_total", "hardware") == {("c5",): pytest.approx(50)}
    assert rows(metrics, "sloop_node_usd_total", "hardware") == {("c5",): pytest.approx(50 * 1.8 / 3600)}
    assert rows(metrics, "sloop_plan_duration_seconds_sum") == {(): pytest.approx(0.3)}
    assert rows(metrics, "sloop_decisions_total", "model", "kind") == {("a", "planner"): 1, ("", "node"): 1}


def test_limits_of_models_are_shown_where_there_are_any() -> None:
    counts = EdgeCounts()
    metrics = Metrics([Version(ONE.graph)], lambda: counts)
    assert rows(metrics, "sloop_bodies_refused_total", "bound") == {}
    first = EdgeCounts(held_bytes=7, connections=2, refused={"each": 1}, models={"demo": (7, {"bytes": 3})})
    counts = first.ended().plus(first)
    assert rows(metrics, "sloop_bodies_refused_total", "bound") == {("each",): 2}
    assert rows(metrics, "sloop_body_bytes") == {(): 7}, "an edge that has ended holds nothing"
    assert rows(metrics, "sloop_connections") == {(): 2}
    assert rows(metrics, "sloop_model_body_bytes", "model") == {("demo",): 7}
    assert rows(metrics, "sloop_model_refused_total", "model", "bound") == {("demo", "bytes"): 6}


def test_requests_by_key_and_what_the_logs_have_lost() -> None:
    counts = EdgeCounts(keys={"": 1, "robot": 5}, keys_refused={"wrong": 2}, lines_dropped=3)
    both = counts.plus(EdgeCounts(keys={"robot": 1}, lines_dropped=1)).plus(counts.ended())
    metrics = Metrics(
        [Version(ONE.graph)],
        lambda: both,
        lost=lambda: {"events": 7, "stderr": 9},
        edges=lambda: 3,
        edges_lost=lambda: 2,
    )
    assert rows(metrics, "sloop_edges") == {(): 3}
    assert rows(metrics, "sloop_key_requests_total", "key") == {("",): 2, ("robot",): 11}
    assert rows(metrics, "sloop_key_refused_total", "reason") == {("wrong",): 4}
    assert rows(metrics, "sloop_log_lost_total", "log") == {("events",): 7, ("access",): 7, ("stderr",): 9}
    assert rows(metrics, "sloop_edges_lost_total") == {(): 2}


def test_workers_that_wait_for_a_model_are_shown_with_their_memory() -> None:
    metrics = Metrics((), spares=lambda: {"one": SpareProcesses(2, 70), "two": SpareProcesses()})
    assert rows(metrics, "sloop_spare_workers", "node") == {("one",): 2}
    assert rows(metrics, "sloop_spare_worker_bytes", "node") == {("one",): 70}


def test_tries_that_come_to_nothing_are_counted() -> None:
    seen = told(
        ONE,
        (0, start(0)),
        (0, WorkerReady(ReplicaId(0))),
        *((1, request(id, at_ms=1)) for id in (1, 2, 3)),
        (2, batch(0, 0, 1, 2)),
        (3, BatchFailed(BatchId(0), ReplicaId(0), "the model raised ValueError")),
        (4, batch(1, 0, 1)),
        (5, finished(1, 0)),
        (5, End(RequestId(1), Outcome.SERVED)),
        (6, batch(2, 0, 2, 3)),
        (7, Cancelled(RequestId(3))),
        (7, End(RequestId(3), Outcome.DROPPED)),
        (8, WorkerLost(ReplicaId(0), "killed")),
    )
    assert seen["sloop_request_tries_failed_total", ("raised", "only", "v")] == 2
    assert seen["sloop_request_tries_failed_total", ("worker", "only", "v")] == 1
    assert seen["sloop_replicas_lost_total", ("only", "v")] == 1


@pytest.mark.parametrize("value", ['quo"te', "back\\slash", "new\nline", "plain"])
def test_label_values_survive_the_text_format(value: str) -> None:
    assert rows(Metrics([Version(ONE.graph, value)]), "sloop_version_share", "model") == {(value,): 1}


def test_families_have_the_types_of_the_text_format_and_no_samples_of_openmetrics() -> None:
    metrics = several("a")
    metrics.state.append(0, start(0, "a/only"))
    metrics.state.append(ms(5), WorkerReady(ReplicaId(0)))
    served(metrics, 1, "a", at_ms=10)
    text = metrics.exposition().decode()
    assert "_created" not in text
    assert "# TYPE sloop_requests_total counter\n" in text
    assert "# TYPE sloop_requests_open gauge\n" in text
    assert "# TYPE sloop_request_duration_seconds histogram\n" in text


def test_turns_of_the_event_loop_are_a_histogram() -> None:
    turns = Turns()
    turns.counts[0], turns.counts[3], turns.counts[-1] = 5, 2, 1
    turns.total_ns, turns.longest_ns = ms(1500), ms(1400)
    metrics = Metrics((), turns=lambda: turns)
    found = rows(metrics, "sloop_turn_seconds_bucket", "le")
    assert found["0.0001",] == found["0.0005",] == 5
    assert found["0.001",] == found["0.1",] == 7
    assert found["+Inf",] == 8
    assert rows(metrics, "sloop_turn_seconds_sum") == {(): 1.5}
    assert rows(metrics, "sloop_longest_turn_seconds") == {}, "it is 0 after the first scrape"
