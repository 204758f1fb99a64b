"""The settings suit the machine and its profile, and the files are ones that sloop reads."""

from itertools import pairwise
from pathlib import Path

import pytest

from sloop.app.load import load_application, load_scenario
from sloop.demo import run as module
from sloop.demo.run import (
    CREST,
    DemoSettings,
    choose_cores,
    measured_rps,
    overloaded_cores,
    scenario_of,
    settings_for,
    squeezenet,
    systems_of,
    throughput_rps,
    wave,
    write_files,
)
from sloop.errors import MachineError
from sloop.profile.model import read_signature
from sloop.profile.profile import Amdahl, Profile, Sample, path_beside, save_profile
from sloop.sim.world import World
from sloop.systems.setup import set_up

PROFILE = Profile(latency_ms=Amdahl(10.0, 0.0, 0.0, 1.0), max_batch=4, max_cores=1.75)


def test_the_files_it_leaves_are_ones_that_sloop_reads(tmp_path: Path) -> None:
    model = tmp_path / "squeezenet.onnx"
    model.write_bytes(b"")
    save_profile(PROFILE, path_beside(model))
    settings = settings_for(PROFILE, (0.25, 0.5, 1.0, 1.75), duration_s=10, seed=1)
    scenario = write_files(tmp_path, settings, model)
    assert sum(World.from_scenario(scenario).trace.counts_per_s()) == sum(settings.counts)
    for choice in scenario.systems:
        application = load_application(tmp_path / f"{choice.name}.yaml")
        assert application.system.parameters == choice.parameters
        assert set_up(application).application.cluster == scenario.application.cluster


QUARTERS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def profile(*, gamma: float = 10.0, delta: float = 0.0) -> Profile:
    """`gamma` ms per request and core, `delta` ms per request whatever the cores."""
    samples = tuple(Sample(1, cores, gamma / cores + delta, 1.2 * (gamma / cores + delta), 50) for cores in QUARTERS)
    return Profile(latency_ms=Amdahl(gamma, 0.0, delta, 0.0), max_batch=4, max_cores=1.5, samples=samples)


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


def test_half_the_cores_cannot_bear_the_crest_and_all_can() -> None:
    settings = settings_for(profile(), QUARTERS, duration_s=40, seed=1)
    assert settings.static_cores == 0.75
    assert measured_rps(profile(), 0.75) < max(settings.counts) < throughput_rps(profile(), 1.5)


def test_a_flat_profile_still_gives_static_too_little() -> None:
    """Where more than a quarter of a core gains next to nothing, `static` gets the smallest count."""
    flat = profile(gamma=0.1, delta=20.0)
    assert overloaded_cores(flat, QUARTERS, CREST * throughput_rps(flat, 1.5)) == 0.25


def test_a_wave_swings_smoothly_between_trough_and_crest() -> None:
    counts = wave(10, 100, 40)
    assert (min(counts), max(counts), len(counts)) == (10, 100, 40)
    assert max(abs(after - before) for before, after in pairwise(counts)) <= 15
    assert min(wave(0, 1, 40)) == 1


def test_the_scenario_is_one_that_sloop_reads() -> None:
    settings: DemoSettings = settings_for(profile(), QUARTERS, duration_s=40, seed=3)
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
