"""Biscale's trials are values, its horizontal rival follows the artefact's rule, rows follow from results."""

from array import array
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from sloop.actions import StartWorker, StopWorker
from sloop.events import WorkerReady, WorkerResized
from sloop.policies.batch import Full
from sloop.policies.drop import Age, Never, PredictiveDrop
from sloop.policies.forecast import MovingMax, OracleForecast
from sloop.policies.scale.vertical import Vertical
from sloop.units import s
from sloop.vocabulary import ReplicaId, ReplicaSpec, Slot
from sloop_systems.biscale.experiments import offline
from sloop_systems.biscale.experiments.results import EXPERIMENTS, NAMES, SEEDS_B, Found, simulated_rows, wanted
from sloop_systems.biscale.experiments.runs import (
    AUDIO,
    MOTIVATION,
    NLP,
    PIPELINES,
    VIDEO,
    BiscaleResult,
    BiscaleTrial,
    CoresInService,
    HorizontalRival,
    excerpt_of,
    policies_of,
    world_of,
)
from sloop_systems.biscale.policy import Biscale
from sloop_systems.comparison import reproduce, twitter
from sloop_systems.comparison.harness import Results
from sloop_systems.comparison.rows import Row
from sloop_systems.comparison.twitter import Excerpt
from tests.sloop_systems.biscale.test_policy import Scene

SHORT = BiscaleTrial(pipeline="video", seconds=30)
LEVEL = {"biscale": 0.1, "fa2": 3.0, "vertical": 41.0, "fa2_kit": 20.0}


def made_up(trial: BiscaleTrial) -> BiscaleResult:
    """As good as its kind, a little worse with every seed and looser drop rule; larger at the jump, settled at 85 s."""
    worse = 0.01 * trial.seed + {"predictive": 0, "age": 1, "age3": 2, "never": 3}[trial.drop]
    cores = [4.0] * trial.seconds
    for second in range(58, min(85, trial.seconds)):
        cores[second] = 30.0
    for second in range(85, min(520, trial.seconds)):
        cores[second] = 15.0
    flat = (1.0,) * trial.seconds
    return BiscaleResult(
        violations=LEVEL[trial.kind] + worse,
        cores=sum(cores) / len(cores),
        violations_by_second=flat,
        cores_by_second=tuple(cores),
        single_by_second=tuple(float(not 58 <= second < 85) for second in range(trial.seconds)),
        worst_by_second=flat,
    )


def results_of(*, quick: bool) -> Found:
    trials = [structs.replace(trial, seed=seed) for trial, seeds in wanted(quick=quick) for seed in range(seeds)]
    return Results({trial: made_up(trial) for trial in trials})


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    """Of a full reproduction, by experiment and metric."""
    return {(row.experiment, row.metric): row for row in simulated_rows(results_of(quick=False), quick=False)}


@pytest.mark.parametrize("quick", [True, False])
def test_from_end_to_end(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BiscaleTrial, "play", made_up)
    monkeypatch.setattr(twitter, "held_out", lambda data: twitter.biscale("video", data))
    monkeypatch.setattr(offline, "_threads", list)
    seen: list[float] = []
    found = reproduce("biscale", quick=quick, data=tmp_path, processes=1, progress=lambda share, _: seen.append(share))
    assert seen[-1] == 1.0
    experiments = {row.experiment for row in found.rows}
    assert {"programs", "E1 video", "E2 audio", "E3 nlp", "E6 dropping", "bound A", "bound C"} <= experiments
    assert ("bound B" in experiments) is not quick
    assert all("synthetic trace" in row.note for row in found.rows if row.experiment.startswith(("E1", "bound")))
    assert any(line.startswith("requests: assumed") for line in found.assumed)
    assert not quick or "violations" in found.page(made=datetime.now(UTC))  # drawing takes a second, once is enough
    names = ["evaluation", "over-time-video", "over-time-audio", "over-time-nlp", "motivation", "dropping"]
    assert [figure.name for figure in found.figures] == names
    assert all(len(series.x) == len(series.y) > 0 for f in found.figures for p in f.panels for series in p.series)


def test_rows_of_the_evaluation(rows: dict[tuple[str, str], Row]) -> None:
    assert rows["E1 video", "violations of Biscale"].verdict == "fitted"
    assert rows["E1 video", "violations of FA2"].ours == pytest.approx(3.02)
    assert rows["E1 video", "violations of FA2"].verdict == "shape"  # 3.02 is not 2.4 ± 0.24, but the order is right
    assert rows["E2 audio", "violations of Biscale"].verdict == "within-bound"
    assert rows["bound B", "video: violations of FA2 / Biscale"].ours == pytest.approx(3.095 / 0.195)
    assert (
        rows["bound B", "video: violations of Biscale"].note == f"our bound of the mean of {SEEDS_B} runs: at most 0.5"
    )
    assert rows["bound B2", "audio: cores compared with the reference now"].verdict == "off"  # made up to be equal
    assert rows["bound B3", "nlp 1.3 times slower, 12 s to start: violations of fa2"].verdict == "off"
    assert all(row.verdict == "within-bound" for (name, _), row in rows.items() if name == "bound A")


def test_rows_of_the_course_and_of_what_it_depends_on(rows: dict[tuple[str, str], Row]) -> None:
    assert rows["bound C", "video: second in which all replicas have one core again, median"].ours == 85
    assert rows["bound C", "video: seeds whose cores rise 1.5 times within 3 s of the jump"].ours == 100
    assert rows["bound C", "video: time from the jump until FA2's cores have risen 1.5 times"].verdict == "off"
    assert rows["bound C", "video: cores on the plateau compared with the peak"].ours == 50
    assert rows["bound D", "fa2: smallest increase of violations from 1 × to 3 × to never"].ours == pytest.approx(1)
    assert rows["E6 dropping", "violations in the first 100 s, vertical, never"].verdict == "within-bound"
    assert rows["bound E", "growth with the time to start, FA2's / Biscale's"].verdict == "off"  # none depends on it
    assert rows["bound G", "nlp: change of violations, last10 instead of the oracle"].ours == 0


def test_quick_needs_less_and_claims_less() -> None:
    found = simulated_rows(results_of(quick=True), quick=True)
    first = {*EXPERIMENTS.values(), "independent simulation", "bound A"}
    assert {row.experiment for row in found} == first | {
        "E1 course",
        "bound C",
        "bound D",
        "E6 dropping",
        "E0 motivation",
    }
    assert len([row for row in found if row.experiment == "bound A"]) == 2 * len(NAMES)
    assert {row.verdict for row in found} == {"shape", "off"}, "one seed proves nothing"


# What needs no simulation.


def test_all_that_is_derived_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "ROUNDS", 1)  # how long the passes of the threads take is not exact
    found = offline.offline_rows(None)
    programs = [row for row in found if row.experiment == "programs"]
    assert {row.verdict for row in programs} == {"derived"}
    assert [row.ours for row in programs] == [12, 12, 12, 12, 24, 17, 8]
    assert {row.experiment for row in found} <= {"programs", "decision time", "E5 threads"}


def test_what_a_predictor_has_to_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_threads", list)
    counts = array("q", ([10] * 10 + [20] * 10) * 5)
    row = offline.offline_rows(Excerpt("days", counts, "assumed: a square wave"))[-1]
    assert 50 <= row.ours <= 100
    assert row.verdict == "shape", "worse than the network, but not the derived figure"
    assert "a square wave" in row.note


def test_without_a_second_core_threads_have_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "usable_cpus", lambda: [0])
    assert offline._threads() == []
    monkeypatch.setattr(offline, "usable_cpus", lambda: [0, 1])
    monkeypatch.setattr(offline, "SQUEEZENET", Path("nowhere.onnx"))
    assert offline._threads() == []


def test_a_verdict_on_threads_follows_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="the model is among onnx's test data")
    monkeypatch.setattr(offline, "usable_cpus", lambda: [0, 1])
    times_ms = {"one": 100.0, "two within": 60.0, "two between": 98.0}
    monkeypatch.setattr(offline, "_fastest_passes", lambda path: (times_ms, 1.9))
    within, between = offline._threads()
    assert (within.ours, within.verdict) == (40.0, "within-bound")
    assert within.note.endswith("two threads used 1.9 cores")
    assert (round(between.ours, 9), between.verdict) == (2.0, "within-bound")


def test_threads_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="the model is among onnx's test data")
    monkeypatch.setattr(offline, "ROUNDS", 1)
    monkeypatch.setattr(offline, "usable_cpus", lambda: [0, 1])
    assert [row.experiment for row in offline._threads()] == ["E5 threads"] * 2


# The published pipelines.


def test_latencies_alone_on_one_core_and_on_eight() -> None:
    published = {
        "detect": (176.3, 41.3),
        "classify": (70.5, 23.1),
        "transcribe": (320.9, 128.6),
        "sentiment": (70.7, 16.6),
        "identify": (104.5, 38.7),
        "translate": (376.8, 122.1),
        "summarise": (370.1, 140.1),
    }
    found = {
        name: (form.latency_ms(1, 1), form.latency_ms(1, 8))
        for pipeline in PIPELINES.values()
        for name, form in pipeline.models
    }
    assert found.keys() == published.keys()
    for name, expected in published.items():
        assert found[name] == pytest.approx(expected, abs=0.051)


def test_profiles_keep_their_source() -> None:
    assert all(p.origin == "fitted" and p.source for one in (VIDEO, AUDIO, NLP) for p in one.profiles.values())
    assert VIDEO.profiles["detect"].load_s == 5.5


def test_the_motivating_model_is_as_fast_as_theirs() -> None:
    (_, form), *_ = MOTIVATION.models
    assert 1000 / form.latency_ms(1, 1) == pytest.approx(26, abs=0.1)
    assert 1000 / form.latency_ms(1, 8) == pytest.approx(126, abs=4)


# Trials.


def test_the_same_trial_has_the_same_result() -> None:
    result = SHORT.play()
    assert result == SHORT.play()
    assert result != structs.replace(SHORT, seed=1).play()
    assert len(result.violations_by_second) == len(result.cores_by_second) == 30
    assert result.cores_by_second[0] == pytest.approx(2)


def test_the_world_is_the_trials() -> None:
    world = world_of(structs.replace(SHORT, multiplier=1.3, cold_s=12.0))
    assert (world.truth.profile_error, world.truth.cold_start.start_s, world.truth.resize_ms) == (1.3, 12.0, 100.0)
    assert world_of(SHORT).truth.cold_start.start_s == 5.5
    assert [stage.after for stage in world.application.stages] == [(), ("detect",)]
    assert world.trace.times_ns() is not None


def test_policies_are_the_trials() -> None:
    policies = policies_of(SHORT)
    assert isinstance(policies.forecast, OracleForecast)
    assert policies.drop == PredictiveDrop(batch="full", strict=True)
    assert policies.scale == Biscale(
        cores_max=8, batch_max=8, settle=5, shrink=False, blocking=True, whole=True, initial_batch=4
    )
    shipped = policies_of(structs.replace(SHORT, shipped=True, predictor="last10"))
    assert (shipped.batch, shipped.forecast) == (Full(patience=1.0), MovingMax())
    vertical = policies_of(structs.replace(SHORT, kind="vertical", drop="age3"))
    assert isinstance(vertical.scale, Vertical)
    assert vertical.drop == Age(limit=3)
    assert policies_of(structs.replace(SHORT, drop="never")).drop == Never()


@pytest.mark.parametrize("kind", ["fa2", "vertical", "fa2_kit"])
def test_rivals_can_be_played(kind: str) -> None:
    if kind == "fa2_kit":
        pytest.importorskip("sloop_systems.fa2")
    result = msgspec.convert({"pipeline": "video", "seconds": 30, "kind": kind}, BiscaleTrial).play()
    assert 0 <= result.violations <= 100


def test_motivating_workloads() -> None:
    assert list(excerpt_of("burst", "").counts) == [20] * 30 + [120] * 5 + [20] * 25
    assert sum(excerpt_of("plateau", "").counts) == 400 + 4800


def test_cores_in_service_from_ready_to_the_order_to_stop() -> None:
    sink = CoresInService(4)
    one, two = ReplicaId(1), ReplicaId(2)
    for at_s, record in (
        (0, StartWorker(one, ReplicaSpec("a", "v", Slot(1.0)))),
        (0, WorkerReady(one)),
        (0.5, StartWorker(two, ReplicaSpec("a", "v", Slot(2.0)))),
        (1, WorkerReady(two)),
        (1.5, WorkerResized(one, 3.0)),
        (2, WorkerResized(two, 1.0)),
        (3, StopWorker(one, "no use")),
        (9, StopWorker(two, "no use")),
    ):
        sink.append(s(at_s), record)
    sink.finish()
    assert sink.cores == [1.0, 4.0, 4.0, 1.0]
    assert sink.single == [1.0, 0.0, 0.0, 1.0]


# The horizontal rival: up at once, down late, nothing while replicas start.


def scene_of(settle: int = 2) -> Scene:
    scene = Scene(HorizontalRival(batch_max=8, settle=settle, initial_batch=4))  # type: ignore[arg-type]  # any scaler does
    scene.step(0)
    scene.ready()
    return scene


def test_it_begins_with_one_replica_and_the_artefacts_batch() -> None:
    scene = scene_of()
    assert (scene.groups, scene.batches) == ([[(1, 1)], [(1, 1)]], [4, 4])


def test_growth_at_once_and_its_batches_when_it_is_ready() -> None:
    scene = scene_of()
    scene.step(40)
    assert scene.groups == [[(8, 1)], [(3, 1)]]
    assert scene.batches == [4, 4]
    assert scene.step(60) is None, "nothing is decided while replicas start"
    scene.ready()
    scene.step(40)
    assert scene.batches == [1, 1]


def test_shrinkage_after_decisions_that_agree() -> None:
    scene = scene_of(settle=3)
    scene.step(40)
    scene.ready()
    scene.step(40)
    assert [scene.step(5) for _ in range(3)] == [None] * 3
    scene.step(5)
    assert scene.groups == [[(1, 1)], [(1, 1)]]
