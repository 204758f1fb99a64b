"""iGniter's plan: golden plans of its public coefficients, the split of heavy models, and what every plan keeps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop_systems.colocation.igniter import (
    IgniterContents,
    IgniterWorkload,
    batch_for,
    igniter_predictions,
    least_share,
    plan,
    split,
    with_one_more,
)
from sloop_systems.colocation.published import IGNITER_V100 as GPU
from sloop_systems.colocation.published import IGNITER_V100_MODELS

Case = Sequence[tuple[str, float, float]]
"""Model, deadline in ms, requests per second."""


def workload(name: str, slo_ms: float, rate_rps: float) -> IgniterWorkload:
    return IgniterWorkload(name, IGNITER_V100_MODELS[name], rate_rps, slo_ms)


def planned(case: Case, *, check_new: bool = True) -> list[IgniterContents]:
    return plan(GPU, [workload(*each) for each in case], check_new=check_new)


@pytest.mark.parametrize("check_new", [True, False])
@pytest.mark.parametrize(
    ("case", "expected", "latencies_ms", "clocks_mhz"),
    [
        (
            [("alexnet", 15, 500), ("resnet50", 40, 400), ("vgg19", 60, 200)],
            [[("vgg19", 6, 37.5), ("resnet50", 8, 30.0), ("alexnet", 4, 10.0)]],
            [[28.73, 18.91, 6.92]],
            [1523.67],
        ),
        (
            [("vgg19", 40, 200), ("ssd", 25, 150)],
            [[("ssd", 2, 60.0), ("vgg19", 4, 37.5)]],
            [[12.28, 19.80]],
            [1530],
        ),
        (
            [("alexnet", 200, 500), ("resnet50", 200, 500), ("vgg19", 200, 500)],
            [[("vgg19", 49, 85.0)], [("resnet50", 49, 30.0), ("alexnet", 49, 5.0)]],
            [[97.89], [98.44, 96.89]],
            [1488.46, 1530],
        ),
    ],
)
def test_the_plans_of_the_public_coefficients(
    case: Case,
    expected: list[list[tuple[str, int, float]]],
    latencies_ms: list[list[float]],
    clocks_mhz: list[float],
    check_new: bool,
) -> None:
    found = planned(case, check_new=check_new)
    assert [[(each.workload.name, each.batch, each.share) for each in own] for own in found] == expected
    for own, expected_ms, clock_mhz in zip(found, latencies_ms, clocks_mhz, strict=True):
        residents = [each.resident for each in own]
        assert GPU.mhz(
            GPU.idle_w + sum(each.model.power_w(each.batch, each.share) for each in residents)
        ) == pytest.approx(clock_mhz, abs=0.005)
        predicted_ms = [each.latency_ms for each in igniter_predictions(GPU, residents)]
        assert predicted_ms == pytest.approx(expected_ms, abs=0.005)


def test_the_batch_is_what_arrives_in_half_of_the_deadline() -> None:
    assert batch_for(GPU, workload("alexnet", 200, 500), 500) == 49
    assert batch_for(GPU, workload("alexnet", 200, 0.001), 0.001) == 1


@pytest.mark.parametrize(
    ("case", "first", "expected"),
    [
        (("vgg19", 30, 600), (9, 110.0), [(7, 100.0, 486), (2, 27.5, 114)]),
        (("ssd", 60, 700), (20, 257.5), [(9, 100.0, 298), (9, 100.0, 298), (4, 37.5, 104)]),
    ],
)
def test_a_heavy_model_gets_gpus_of_its_own(
    case: tuple[str, float, float], first: tuple[int, float], expected: list[tuple[int, float, float]]
) -> None:
    heavy = workload(*case)
    batch = batch_for(GPU, heavy, heavy.rate_rps)
    assert (batch, least_share(GPU, heavy, batch, heavy.rate_rps)) == first
    assert [(each.batch, each.share, each.rate_rps) for each in split(GPU, heavy)] == expected
    assert [each.is_alone for own in plan(GPU, [heavy]) for each in own] == [False] + [True] * (len(expected) - 1)


def test_a_model_that_is_too_slow_is_refused_with_its_name() -> None:
    with pytest.raises(InputError, match="ssd takes longer than 2 ms, half of its deadline, on a whole GPU"):
        planned([("alexnet", 100, 100), ("ssd", 4, 100)])


def test_a_model_without_requests_has_no_replica() -> None:
    assert planned([("alexnet", 100, 0)]) == []


cases = st.lists(
    st.tuples(st.sampled_from(sorted(IGNITER_V100_MODELS)), st.integers(30, 400), st.integers(1, 2000)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(cases)
def test_every_plan_carries_its_rates_in_time_within_the_gpus(case: Case) -> None:
    found = planned(case)
    for own in found:
        assert sum(each.share for each in own) <= 100
        assert all(each.share % GPU.share_unit == 0 for each in own)
        if sum(each.share for each in own) < 100:
            late = [
                each.workload.name
                for each, predicted in zip(own, igniter_predictions(GPU, [each.resident for each in own]), strict=True)
                if predicted.latency_ms > each.workload.limit_ms and not each.is_alone
            ]
            assert not late
    assert math.fsum(each.rate_rps for own in found for each in own) == pytest.approx(sum(rate for _, _, rate in case))


@settings(max_examples=60)
@given(cases, st.sampled_from([1, 8, 32]))
def test_workers_that_take_only_small_batches_carry_their_rates_too(case: Case, batch_max: int) -> None:
    """The published batch is what arrives in half of the deadline. A share that suffices for it does not carry the rate
    with a smaller one."""
    workloads = [replace(workload(*each), batch_max=batch_max) for each in case]
    try:
        found = plan(GPU, workloads)
    except InputError:
        return  # a batch is too slow even alone
    for own in found:
        predictions = igniter_predictions(GPU, [each.resident for each in own])
        for each, predicted in zip(own, predictions, strict=True):
            assert each.batch <= batch_max
            if sum(other.share for other in own) < 100:
                assert predicted.served_rps >= each.rate_rps * (1 - 1e-9)


@settings(max_examples=60)
@given(cases)
def test_no_gpu_that_was_open_needs_less_more_share_than_the_chosen_one(case: Case) -> None:
    """Replays the plan: each replica went to the first GPU with the least additional share."""
    workloads = [workload(*each) for each in case]
    rest = [each for own in workloads for each in split(GPU, own) if not each.is_alone]
    shared: list[IgniterContents] = []
    for replica in sorted(rest, key=lambda each: -each.share):
        tried = [with_one_more(GPU, own, replica) for own in shared]
        more = [
            (sum(e.share for e in after) - sum(e.share for e in before), at)
            for at, (before, after) in enumerate(zip(shared, tried, strict=True))
            if after is not None
        ]
        if more:
            at = min(more)[1]
            shared[at] = tried[at] or ()
        else:
            alone = with_one_more(GPU, (), replica)
            assert alone is not None or least_share(GPU, replica.workload, replica.batch, replica.rate_rps) > 50
            shared.append(alone or (replica,))
    found = [own for own in plan(GPU, workloads) if not own[0].is_alone]
    assert [[(e.workload.name, e.batch) for e in own] for own in found] == [
        [(e.workload.name, e.batch) for e in own] for own in shared
    ]
