"""Cold starts on hosts: what is counted in a log, how it is judged, and the padded model. Hosts are not needed."""

from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest
from msgspec import structs

from benchmarks.cold_starts import (
    CORES,
    LEADS_S,
    SIMULATED,
    SYSTEMS,
    ColdStart,
    Compared,
    Scene,
    SystemResult,
    cuts_of,
    figure_of,
    foreseen,
    order,
    ratios,
    simulated,
    starts_in,
    text_of,
)
from benchmarks.models import padded, small
from sloop.actions import StartWorker
from sloop.app.load import load_application
from sloop.events import WorkerCompleted, WorkerLost, WorkerProgressed, WorkerReady
from sloop.profile.onnx_cut import cut_model
from sloop.profile.profile import Profile, Quadratic, Startup, path_beside, save_profile
from sloop.serve.control.checks import check_live
from sloop.systems.setup import set_up
from sloop.units import s
from sloop.vocabulary import ReplicaId, ReplicaSpec, Request, RequestId, Slot, WorkerId, parts_at


def started(number: int) -> StartWorker:
    return StartWorker(ReplicaId(number), ReplicaSpec("only", "m", Slot(1)))


REQUEST = Request(RequestId(1), 0, 0, s(1))


def test_starts_after_the_first_request_are_counted_with_their_steps() -> None:
    records = [
        (s(0), started(1)),
        (s(1), WorkerReady(ReplicaId(1))),  # before the first request
        (s(2), REQUEST),
        (s(3), started(2)),
        (s(3), started(3)),
        (s(4), WorkerProgressed(ReplicaId(2), "fetching")),
        (s(4), WorkerProgressed(ReplicaId(3), "fetching")),
        (s(5), WorkerLost(ReplicaId(3), "its weights do not come")),
        (s(6), WorkerProgressed(ReplicaId(2), "loading")),
        (s(8), WorkerReady(ReplicaId(2))),
        (s(8), WorkerReady(ReplicaId(2))),  # again, after a batch
        (s(9), started(4)),
        (s(9), WorkerProgressed(ReplicaId(4), "loading")),
        (s(10), WorkerReady(ReplicaId(4))),
        (s(11), started(5)),
    ]
    found = starts_in(records)
    assert found == (ColdStart(5.0, {"fetching": 2.0, "loading": 2.0}), ColdStart(1.0, {"loading": 1.0}))
    assert [each.rest_s for each in found] == [3.0, 1.0]
    assert SystemResult(found, 1.0, 1.0).start_s == 3.0


def test_parts_of_a_model_are_ready_together_and_those_left_of_a_pipeline_when_they_are_whole() -> None:
    def part(number: int, place: int, pipeline: int) -> StartWorker:
        alone = started(number)
        spec = structs.replace(alone.spec, shape=parts_at((0, 2, 4)))
        return structs.replace(alone, spec=spec, pipeline=WorkerId(pipeline), place=place)

    records = [
        (s(0), REQUEST),
        (s(1), part(1, 0, 0)),
        (s(1), part(2, 1, 0)),
        (s(1), WorkerProgressed(ReplicaId(1), "fetching")),
        (s(2), WorkerReady(ReplicaId(1))),
        (s(4), WorkerReady(ReplicaId(2))),
        (s(5), WorkerCompleted(ReplicaId(1))),
        (s(6), part(3, 0, 1)),
        (s(6), part(4, 1, 1)),
        (s(7), WorkerReady(ReplicaId(3))),
        (s(8), WorkerLost(ReplicaId(4), "it died")),
        (s(10), WorkerCompleted(ReplicaId(3))),
    ]
    assert starts_in(records) == (ColdStart(3.0, {"fetching": 1.0}), ColdStart(3.0), ColdStart(4.0))


def run_of(start_s: float, mean_ms: float) -> SystemResult:
    return SystemResult((ColdStart(start_s, {"fetching": start_s / 2}),), mean_ms, 0.9)


def test_the_order_and_the_ratios() -> None:
    found = {
        label: Compared(
            run_of(3.0 - place, 300 - place),
            run_of(3.0, 300),
            run_of(3.6 - place, 300 - place),
            run_of(3.3 - place, 320 - place),
        )
        for place, label in enumerate(SYSTEMS)
    } | {"gpu-faas": Compared(None, run_of(2.0, 200), None, None)}
    said = order(found)
    assert "mean cold start, live: yes" in said
    assert "mean latency, simulated, measured: yes" in said
    assert "mean cold start, simulated, profile: **no**" in said, "all are equal"
    rows = {str(row[0]): row[1:] for row in ratios(found)}
    assert set(rows) == set(SYSTEMS)
    assert rows["baseline"] == pytest.approx((1.0, 1.2, 1.1, 1.0, 1.0, 320 / 300, False, True))
    assert rows["locality + chain"][-1] is False, "30 % longer"
    figure = figure_of(found)
    assert [len(series.x) for series in figure.panels[0].series] == [3, 4, 3, 3]
    assert figure.panels[0].series[1].x == (0, 1, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    return padded(small(folder, "squeezenet", 64), folder / "padded.onnx", 4_000_000)


def test_a_padded_model_is_larger_and_answers_the_same(model: Path) -> None:
    bare = model.with_name("squeezenet-64.onnx")
    assert 3_990_000 < model.stat().st_size - bare.stat().st_size < 4_010_000
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(str(each), options) for each in (bare, model)]
    values = np.random.default_rng(1).random((2, 3, 64, 64), np.float32)
    (name,) = [port.name for port in sessions[0].get_inputs()]
    outputs = [session.run(None, {name: values})[0] for session in sessions]
    np.testing.assert_array_equal(*outputs)
    assert [port.name for port in sessions[0].get_outputs()] == [port.name for port in sessions[1].get_outputs()]


def test_padding_may_be_spread_over_the_layers_between_which_a_model_is_cut(model: Path, tmp_path: Path) -> None:
    bare = model.with_name("squeezenet-64.onnx")
    spread = padded(bare, tmp_path / "spread.onnx", 4_000_000, places=4)
    assert 3_990_000 < spread.stat().st_size - bare.stat().st_size < 4_010_000
    cuts = cuts_of(spread)
    pieces = cut_model(spread, cuts, tmp_path)
    assert [piece.param_bytes > 900_000 for piece in pieces] == [True] * 4
    values = np.random.default_rng(1).random((2, 3, 64, 64), np.float32)
    sessions = [onnxruntime.InferenceSession(str(each)) for each in (bare, spread)]
    first, second = (session.run(None, {session.get_inputs()[0].name: values})[0] for session in sessions)
    np.testing.assert_allclose(first, second, rtol=1e-5)


@pytest.fixture
def scene(model: Path) -> Scene:
    """A burst of four times the usual rate, and weights that take 2 s on the store's link."""
    save_profile(
        Profile(
            latency_ms=Quadratic(0, 0, 100),
            max_batch=1,
            max_cores=1,
            load_s=0.5,
            startup=Startup(0.2, 0.2, 0.1),
            weights_bytes=30_000_000,
            hardware="assumed",
            origin="assumed",
            source="a test",
            date="2026-11-23",
        ),
        path_beside(model),
    )
    trace: dict[str, object] = {"kind": "square", "rate": 10, "burst_rate": 55, "period_s": 40, "burst_s": 20}
    return Scene(model.parent, model, "", 800, trace, 80, 1)


def test_simulated_systems_have_the_published_order(scene: Scene) -> None:
    found = {label: simulated(scene, label, 120.0) for label in (*SIMULATED, *SYSTEMS)}
    runs = [found[label] for label in SYSTEMS]
    assert min(len(run.starts) for run in runs) >= 5
    for values in ([run.start_s for run in runs], [run.mean_ms for run in runs]):
        assert values == sorted(values, reverse=True)
        assert len(set(values)) == len(values)
    assert runs[0].start_s > found["atoll"].start_s > runs[1].start_s
    slow, slower = (simulated(scene, "locality + chain", 120.0, start_s=start_s) for start_s in (0.5, 1.5))
    assert slower.start_s == pytest.approx(slow.start_s + 1.0, rel=0.2)
    assert runs[2].start_s < slow.start_s, "a worker that waits saves the start of a process"
    page = text_of(
        scene_with_repeats(scene), {label: Compared(run, run, run, run) for label, run in found.items()}, 120
    )
    assert page.count("**no**") == 0


def test_what_is_foreseen_is_the_mean_over_the_phases_of_the_planning_period(scene: Scene) -> None:
    every = foreseen(scene, "locality", 120.0)
    one, other = (simulated(scene, "locality", 120.0, lead_ns=s(lead_s)) for lead_s in (9.0, 10.5))
    assert every.runs == len(LEADS_S)
    assert one.mean_ms != other.mean_ms
    assert all(each in every.starts for each in (*one.starts, *other.starts))
    assert SystemResult.of([one, other]).mean_ms == pytest.approx((one.mean_ms + other.mean_ms) / 2)
    assert SystemResult.of([one, other]).start_s == pytest.approx(
        (len(one.starts) * one.start_s + len(other.starts) * other.start_s) / (len(one.starts) + len(other.starts))
    )


def scene_with_repeats(scene: Scene) -> Scene:
    return Scene(
        scene.folder, scene.model, "", 800, {**scene.trace, "repeat": 2, "thin": 0.1}, scene.duration_s, scene.seed
    )


def test_servers_can_run_what_is_measured_live(scene: Scene) -> None:
    for name, provision in SYSTEMS.values():
        (setup,) = set_up(load_application(scene.application(name, provision, {}))).applications
        check_live(setup)
        assert setup.system.policies.scale.cores == CORES  # type: ignore[attr-defined]
