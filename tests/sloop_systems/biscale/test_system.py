"""The Biscale system: published parameters; and its state machine at work, in the simulator, through one step."""

from typing import Any

import pytest

from sloop.actions import Decided, End, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.events import WorkerReady, WorkerResized
from sloop.policies.batch import Full
from sloop.policies.drop import PredictiveDrop
from sloop.runlog import MemoryLog, Record
from sloop.sim import World, simulate
from sloop.systems import build_system
from sloop.units import s
from sloop.vocabulary import Outcome
from sloop_systems.biscale.policy import Biscale
from tests.sim.test_few_cores import served

FORMS = {
    "detect": {"form": "amdahl", "gamma": 148.8, "epsilon": 5.4, "delta": 37.5, "eta": -15.5},
    "classify": {"form": "amdahl", "gamma": 34.7, "epsilon": 19.5, "delta": 2.1, "eta": 14.3},
}
START_S = 5.5


def test_published_parameters() -> None:
    policies = build_system("biscale").policies
    assert policies.scale == Biscale(throughput="with_queue", reference="max10", stable="ge", settle=5)
    assert (policies.batch, policies.drop) == (Full(patience=1.0), PredictiveDrop(batch="full"))


def test_the_artefacts_ways_are_parameters() -> None:
    written = {"shrink": False, "blocking": True, "whole": True, "reference": "now", "settle": 10, "drop": "age"}
    scale = build_system("biscale", written).policies.scale
    assert scale == Biscale(shrink=False, blocking=True, whole=True, reference="now", settle=10)


def test_the_published_predictor_is_one_line_away() -> None:
    lstm = pytest.importorskip("sloop_systems.ipa.lstm", reason="the network is in IPA's folder")
    forecast = {"name": "lstm", "weights": "biscale"}
    assert build_system("biscale", {"forecast": forecast}).policies.forecast == lstm.Lstm(weights="biscale")


def run(system: dict[str, Any], *, cores: float = 64, seed: int = 1) -> list[tuple[int, Record]]:
    """10 requests per second for 30 s, then 40 for 50, then 10 again; two stages, 780 ms."""
    stages = [
        {"name": name, "after": after, "profile": {"latency_ms": form, "max_batch": 8, "max_cores": 8}}
        for (name, form), after in zip(FORMS.items(), ([], ["detect"]), strict=True)
    ]
    scenario = load_scenario(
        {
            "name": "video",
            "slo_ms": 780,
            "stages": stages,
            "system": system,
            "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": cores, "memory_bytes": 10**9}]},
            "trace": {"kind": "square", "burst_rate": 10, "rate": 40, "period_s": 80, "burst_s": 30},
            "duration_s": 110,
            "seed": seed,
            "truth": {"cold_start": {"start_s": START_S}, "service": {"ratio": 1.0, "cv": 0.05}},
        }
    )
    log = MemoryLog()
    simulate(World.from_scenario(scenario), [log])
    return log.records


@pytest.fixture(name="records", scope="module")
def records_fixture() -> list[tuple[int, Record]]:
    return run({"name": "biscale"})


def violations(records: list[tuple[int, Record]]) -> float:
    ends = [record for _, record in records if isinstance(record, End)]
    return sum(end.outcome is not Outcome.SERVED for end in ends) / len(ends)


def test_the_surge_is_met_in_place_then_by_small_replicas(records: list[tuple[int, Record]]) -> None:
    at = {kind: [now for now, record in records if isinstance(record, kind)] for kind in (ResizeWorker, StartWorker)}
    grown_ns = min(now for now in at[ResizeWorker] if now >= s(30))
    assert grown_ns <= s(33), "within 3 s of the jump"
    effect_ns = min(now for now, record in records if isinstance(record, WorkerResized) and now >= grown_ns)
    assert effect_ns - grown_ns <= s(0.2)
    plans = [(now, record.why) for now, record in records if isinstance(record, Decided) and record.kind == "plan"]
    kinds = [
        next((word for word in ("carry", "small replicas start", "small replicas are ready") if word in why), "")
        for now, why in plans
        if s(30) <= now < s(80)
    ]
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds) if kind}
    assert sorted(first, key=first.__getitem__) == ["carry", "small replicas start", "small replicas are ready"]


def test_nothing_shrinks_before_the_small_ones_are_ready(records: list[tuple[int, Record]]) -> None:
    reasons = [(now, record.why) for now, record in records if isinstance(record, Decided) and now > s(30)]
    ready = next(now for now, why in reasons if "small replicas are ready" in why)
    start = max(now for now, why in reasons if "small replicas start" in why and now < ready)
    cores: dict[int, tuple[str, float]] = {}
    growing = {r.spec.stage for now, r in records if isinstance(r, StartWorker) and start <= now < ready}
    for now, record in records:
        if isinstance(record, StartWorker):
            cores[record.worker] = record.spec.stage, record.spec.cores
        elif isinstance(record, ResizeWorker):
            stage, before = cores[record.worker]
            assert not (start <= now < ready and stage in growing and record.cores < before)
            cores[record.worker] = stage, record.cores
        elif isinstance(record, StopWorker):
            assert not start <= now < ready
    started = {r.worker for now, r in records if isinstance(r, StartWorker) and start <= now < ready}
    made_ready = {r.worker for now, r in records if isinstance(r, WorkerReady) and now <= ready}
    assert started
    assert started <= made_ready


def test_in_the_end_every_replica_has_one_core_and_few_remain(records: list[tuple[int, Record]]) -> None:
    cores: dict[int, float] = {}
    for _, record in records:
        if isinstance(record, StartWorker):
            cores[record.worker] = record.spec.cores
        elif isinstance(record, ResizeWorker):
            cores[record.worker] = record.cores
        elif isinstance(record, StopWorker):
            del cores[record.worker]
    assert set(cores.values()) == {1.0}
    assert len(cores) <= 6


def test_fewer_violations_than_without_either_half(records: list[tuple[int, Record]]) -> None:
    assert violations(records) < 0.02
    assert violations(run({"name": "vertical-only", "cores_max": 8})) > 10 * violations(records)


def test_every_request_ends_once_on_a_cluster_without_room_to_spare() -> None:
    records = run({"name": "biscale", "cores_max": 8}, cores=12)
    ends = [record.request for _, record in records if isinstance(record, End)]
    assert len(ends) == len(set(ends))
    assert any(isinstance(record, StartBatch) for _, record in records)
    assert violations(records) < 0.15


def test_the_same_seed_gives_the_same_run(records: list[tuple[int, Record]]) -> None:
    assert run({"name": "biscale"}) == records


def test_a_pipeline_of_more_stages_than_cores_is_served_in_quarters_of_cores() -> None:
    in_time, requests = served(SystemChoice("biscale", {"unit": 0.25}))
    assert in_time >= 0.95 * requests > 50
