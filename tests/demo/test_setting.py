from itertools import pairwise

from sloop.app.load import load_scenario
from sloop.demo.setting import (
    CREST,
    Setting,
    choose_cores,
    half_of,
    measured_rps,
    scenario_of,
    setting_of,
    systems_of,
    throughput_rps,
    wave,
)
from sloop.profile.profile import Amdahl, Profile, Sample

QUARTERS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def profile(*, gamma: float = 10.0, delta: float = 0.0) -> Profile:
    """`gamma` ms per request and core, `delta` ms per request whatever the cores."""
    samples = tuple(Sample(1, cores, gamma / cores + delta, 1.2 * (gamma / cores + delta), 50) for cores in QUARTERS)
    return Profile(latency_ms=Amdahl(gamma, 0.0, delta, 0.0), max_batch=4, max_cores=1.5, samples=samples)


def test_quarters_up_to_what_the_load_generator_leaves() -> None:
    assert choose_cores(2, fractions=True) == QUARTERS
    assert choose_cores(64, fractions=True) == QUARTERS
    assert choose_cores(1, fractions=True) == (0.25, 0.5)


def test_whole_cores_where_the_machine_gives_no_fractions() -> None:
    assert choose_cores(2, fractions=False) == (1.0, 2.0)
    assert choose_cores(1, fractions=False) == (1.0,)


def test_half_the_cores_cannot_bear_the_crest_and_all_can() -> None:
    setting = setting_of(profile(), QUARTERS, duration_s=40, seed=1)
    assert setting.half_cores == 0.75
    assert measured_rps(profile(), 0.75) < max(setting.counts) < throughput_rps(profile(), 1.5)


def test_a_flat_profile_still_gives_static_too_little() -> None:
    """Where more than a quarter of a core gains next to nothing, `static` gets the smallest count."""
    flat = profile(gamma=0.1, delta=20.0)
    assert half_of(flat, QUARTERS, CREST * throughput_rps(flat, 1.5)) == 0.25


def test_a_wave_swings_smoothly_between_trough_and_crest() -> None:
    counts = wave(10, 100, 40)
    assert (min(counts), max(counts), len(counts)) == (10, 100, 40)
    assert max(abs(after - before) for before, after in pairwise(counts)) <= 15
    assert min(wave(0, 1, 40)) == 1


def test_the_scenario_is_one_that_sloop_reads() -> None:
    setting: Setting = setting_of(profile(), QUARTERS, duration_s=40, seed=3)
    declared = scenario_of(setting, "unused", "unused")
    stages = [{"name": "classify", "profile": "ResNet-T"}]
    scenario = load_scenario(declared | {"stages": stages, "trace": {"kind": "poisson", "rate": 1}})
    assert [choice.name for choice in scenario.systems] == ["static", "sponge"]
    assert scenario.application.cluster[0].cores == 1.5
    assert scenario.truth.network is not None
    assert scenario.systems[1].parameters["cores"] == list(QUARTERS)
    assert systems_of(setting)[0] == {"name": "static", "cores": 0.75}
