"""The published application: the path sums it is calibrated to, and who comes after whom."""

import pytest

from sloop.reproduce.fa2.application import CPU, GPU, ORDER, PATHS, Hardware, models, problem, profile_of


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_deadlines_are_five_times_the_time_alone(hardware: Hardware) -> None:
    alone = {name: form.latency_ms(1, 1.0) for name, form in models(hardware).items()}
    for chain, slo_ms in zip(PATHS, hardware.slos_ms, strict=True):
        assert 5 * sum(alone[name] for name in chain) == pytest.approx(slo_ms)


def test_stages_are_in_topological_order() -> None:
    for chain in PATHS:
        assert [ORDER.index(name) for name in chain] == sorted(ORDER.index(name) for name in chain)


def test_rates_divide_evenly_between_paths() -> None:
    given = problem(CPU, 6, 12)
    rates = {stage.name: stage.rate_rps for stage in given.stages}
    assert rates["OBJD"] == rates["QUAN"] == 6
    assert rates["SUMR"] == rates["AUTT"] == 4
    assert rates["TCLS"] == 2
    assert problem(CPU, 3, 12).names == ("OBJD", "ALPR", "NSFW", "FACR", "OBJR", "IMGS", "QUAN")


def test_a_b_1_system_can_just_host_27_requests() -> None:
    busy = sum(stage.rate_rps * stage.latency_ms[0] / 1000 for stage in problem(CPU, 6, 27).stages)
    assert busy == pytest.approx(55.0, abs=0.1)


def test_profiles_say_where_they_come_from() -> None:
    profile = profile_of(GPU, "SUMR")
    assert profile.origin == "fitted"
    assert profile.latency_ms.latency_ms(1, 1.0) == pytest.approx(362)
