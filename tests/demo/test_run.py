"""The settings suit the machine and its profile, and the files are ones that sloop reads."""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from sloop.app.load import load_application, load_scenario
from sloop.app.scenario import Scenario
from sloop.demo import run as module
from sloop.demo.run import (
    IN_TIME_MAX,
    IN_TIME_MIN,
    RATE_RPS_MAX,
    Demonstration,
    DemoSettings,
    candidates,
    choose_cores,
    fitted,
    foreseen,
    measured_rps,
    scenario_of,
    squeezenet,
    systems_of,
    wave,
)
from sloop.errors import MachineError
from sloop.profile.model import read_signature
from sloop.profile.profile import LatencyTable, Profile, Sample, path_beside, save_profile
from sloop.sim.world import World
from sloop.systems.setup import set_up

pytest.importorskip("sloop_systems.sponge", reason="the demonstration shows Sponge")

QUARTERS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def profile(cores: tuple[float, ...] = QUARTERS, *, scale: float = 1.0, serial: float = 0.0) -> Profile:
    """A row takes 20 ms × `scale` of one core; the part `serial` of this is as long on any number of cores. Durations
    vary from 0.9 to 1.3 times as much."""

    def sample(batch: int, count: float) -> Sample:
        once_ms = scale * (1 + 20 * batch * (serial + (1 - serial) / count))
        likely_ms = tuple(once_ms * (0.9 + 0.4 * (place / 63) ** 3) for place in range(64))
        return Sample(batch, count, likely_ms[32], likely_ms[-1], 64, likely_ms)

    samples = tuple(sample(batch, count) for count in cores for batch in (1, 2, 4))
    table = {batch: {s.cores: s.p99_ms for s in samples if s.batch == batch} for batch in (1, 2, 4)}
    return Profile(
        latency_ms=LatencyTable(table), max_batch=4, max_cores=cores[-1], samples=samples, load_s=0.5, origin="measured"
    )


def fit(folder: Path, made: Profile, cores: tuple[float, ...]) -> tuple[DemoSettings, Scenario]:
    model = folder / "squeezenet.onnx"
    model.write_bytes(b"")
    save_profile(made, path_beside(model))
    return fitted(folder, model, made, cores, duration_s=40, seed=1)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(
    ("cores", "serial"), [(QUARTERS, 0.0), (QUARTERS, 0.5), ((1.0, 2.0), 0.0), ((1.0, 2.0), 0.2), ((0.25, 0.5), 0.2)]
)
def test_the_load_tells_the_systems_apart_on_slow_and_fast_machines(
    cores: tuple[float, ...], serial: float, scale: float, tmp_path: Path
) -> None:
    settings, scenario = fit(tmp_path, profile(cores, scale=scale, serial=serial), cores)
    assert settings.static_cores < cores[-1]
    static, sponge = (foreseen(scenario, choice, 1.0) for choice in scenario.systems)
    assert static <= IN_TIME_MAX
    assert sponge >= IN_TIME_MIN


def test_the_files_it_leaves_are_ones_that_sloop_reads(tmp_path: Path) -> None:
    settings, scenario = fit(tmp_path, profile(), QUARTERS)
    assert sum(World.from_scenario(scenario).trace.counts_per_s()) == sum(settings.counts)
    for choice in scenario.systems:
        application = load_application(tmp_path / f"{choice.name}.yaml")
        assert application.system.parameters == choice.parameters
        assert set_up(application).application.cluster == scenario.application.cluster


@pytest.mark.parametrize(
    ("cores", "serial", "why"),
    [
        ((1.0,), 0.0, "a replica cannot grow here: it can have only 1 core"),
        ((1.0, 2.0), 0.95, "2 cores do only 1.0 times as much as 1"),
        ((1.0, 2.0), 0.6, "2 cores do only 1.2 times as much as 1, and at best the simulator gives sponge"),
    ],
)
def test_a_machine_on_which_cores_make_no_difference_is_told_why(
    cores: tuple[float, ...], serial: float, why: str, tmp_path: Path
) -> None:
    with pytest.raises(MachineError, match="nothing else runs") as raised:
        fit(tmp_path, profile(cores, serial=serial), cores)
    assert why in raised.value.what


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_count", lambda: 2)
    monkeypatch.setattr(module, "getloadavg", lambda: (17.2, 1.0, 1.0))
    assert module.elsewhere().endswith("; 17 processes want its 2 cores now")
    monkeypatch.setattr(module, "getloadavg", lambda: (3.0, 9.0, 9.0))
    assert module.elsewhere().endswith("more cores")


def test_settings_follow_the_profile() -> None:
    """A machine that is three times as fast gets three times the requests, up to what the load generator can send."""
    slow, fast, fastest = (
        next(candidates(profile(scale=scale), QUARTERS, duration_s=40, seed=1)) for scale in (1.0, 1 / 3, 0.01)
    )
    assert [each.static_cores for each in slow] == [0.75, 0.5, 0.25]
    assert max(fast[0].counts) == pytest.approx(3 * max(slow[0].counts), abs=3)
    assert max(slow[0].counts) < measured_rps(profile(), 1.5)
    assert max(fastest[0].counts) == RATE_RPS_MAX


def test_runs_without_a_difference_say_so_instead(demonstration: Demonstration) -> None:
    said = demonstration.why_inconclusive
    assert "These runs do not compare the systems" in said
    assert "static answered 100.0 % in time" in said
    static, sponge = demonstration.runs
    worse = structs.replace(static, clients=structs.replace(static.clients, attainment=0.8))
    assert structs.replace(demonstration, runs=(worse, sponge)).why_inconclusive == ""
    assert structs.replace(demonstration, runs=(sponge, worse)).why_inconclusive


def test_quarters_up_to_what_the_load_generator_leaves() -> None:
    assert choose_cores(2, fractions=True) == QUARTERS
    assert choose_cores(64, fractions=True) == QUARTERS
    assert choose_cores(1, fractions=True) == (0.25, 0.5)
    assert choose_cores(0.5, fractions=True) == (0.25,)
    assert choose_cores(0.2, fractions=True) == choose_cores(0.2, fractions=False) == (0.2,)
    assert choose_cores(1.5, fractions=False) == (1.0,)


def test_whole_cores_where_the_machine_gives_no_fractions() -> None:
    assert choose_cores(2, fractions=False) == (1.0, 2.0)
    assert choose_cores(1, fractions=False) == (1.0,)


def test_a_wave_swings_smoothly_between_trough_and_crest() -> None:
    counts = wave(10, 100, 40)
    assert (min(counts), max(counts), len(counts)) == (10, 100, 40)
    assert max(abs(after - before) for before, after in pairwise(counts)) <= 15
    assert min(wave(0, 1, 40)) == 1


def test_the_scenario_is_one_that_sloop_reads() -> None:
    settings = next(candidates(profile(), QUARTERS, duration_s=40, seed=3))[0]
    declared = scenario_of(settings, "unused", "unused")
    stages = [{"name": "classify", "profile": "ResNet-T"}]
    scenario = load_scenario(declared | {"stages": stages, "trace": {"kind": "poisson", "rate": 1}})
    assert [choice.name for choice in scenario.systems] == ["static", "sponge"]
    assert scenario.application.cluster[0].cores == 1.5
    assert scenario.truth.network is not None
    assert scenario.systems[1].parameters["cores"] == list(QUARTERS)
    assert systems_of(settings)[0] == {"name": "static", "cores": 0.75}


def test_a_real_model_whose_batch_is_free(tmp_path: Path) -> None:
    path = squeezenet(tmp_path)
    signature = read_signature(path)
    assert signature.inputs[0].shape == (-1, 3, 224, 224)
    assert signature.fixed_batch is None
    written_ns = path.stat().st_mtime_ns
    assert squeezenet(tmp_path).stat().st_mtime_ns == written_ns  # made once


def test_without_the_package_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SQUEEZENET", Path("nowhere.onnx"))
    with pytest.raises(MachineError, match="onnx package") as raised:
        squeezenet(tmp_path)
    assert raised.value.help == "pip install onnx"
