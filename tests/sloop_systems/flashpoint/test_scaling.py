"""The autoscalers that follow one measurement: Flashpoint's vectors (section 7.5, check 11), limits, bad values."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Bucket, ReplicaView, StageView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.scale.kubernetes import Hpa
from sloop.profile.profile import Profile, Quadratic
from sloop.systems import build_system
from sloop.testing.views import make_arrivals, make_belief, make_replica, make_stage, make_view
from sloop.units import NS_PER_S, interpolated_quantile, ms, s
from sloop.vocabulary import Life, Plan
from sloop_systems.flashpoint.policy import AtollRate, ReactiveScale, SageMaker, TorchServe
from tests.asked import next_plan

T5 = make_belief(Profile(latency_ms=Quadratic(0.0, 140.6, 0.0), max_batch=1, max_cores=1))
BELIEFS = {("v", "local"): T5}


def replicas(ready: int, starting: int = 0) -> tuple[ReplicaView, ...]:
    lives = [Life.READY] * ready + [Life.STARTING] * starting
    return tuple(make_replica(number, life) for number, life in enumerate(lives))


def arrivals(counts: Sequence[int], ready: int = 0) -> StageView:
    return replace(make_arrivals(*counts), beliefs=BELIEFS, replicas=replicas(ready))


def waiting(mean_s: float, ready: int, starting: int = 0, rps: int = 50) -> StageView:
    """For a minute each request has waited so long, on average."""
    buckets = [Bucket(s(t), arrivals=rps, waiting_ns=round(rps * mean_s * NS_PER_S)) for t in range(60)]
    return replace(make_stage(*buckets), beliefs=BELIEFS, replicas=replicas(ready, starting))


def count(policy: ReactiveScale | Hpa, stage: StageView, at_s: float = 60) -> int:
    plan: Plan | None = next_plan(policy, s(at_s), make_view(stage))
    assert plan is not None
    (target,) = plan.stages
    assert (target.batch_max, target.in_place) == (1, False)
    return target.groups[0].count


# Atoll's request rate


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.floats(0.5, 2), st.integers(0, 40))
def test_atoll_takes_the_quantile_of_seconds_whatever_runs(counts: list[int], factor: float, ready: int) -> None:
    expected = max(1, ceil(np.percentile(counts, 99) * 0.1406 * factor - 1e-9))
    assert count(AtollRate(factor=factor, replicas_max=1600), arrivals(counts, ready)) == expected


def test_atoll_looks_at_its_window_only() -> None:
    assert count(AtollRate(), arrivals([300] * 60 + [10] * 60)) == 2
    assert count(AtollRate(window_ns=s(120)), arrivals([300] * 60 + [10] * 60)) == 43
    assert count(AtollRate(), replace(arrivals([1, 2] * 300), bucket_ns=ms(100))) == 3, "15 requests in each second"


def test_atoll_says_what_it_saw() -> None:
    plan = next_plan(AtollRate(), s(60), make_view(arrivals([57] * 60)))
    assert plan is not None
    assert plan.why == "stage: 57 requests/s in the busiest 1% of 60 s → 9 replicas (were 1)"


# TorchServe's wait in the queue


@pytest.mark.parametrize(
    ("wait_s", "ready", "expected"),
    [(14, 4, 8), (7, 4, 4), (7.6, 4, 4), (6.4, 4, 4), (3.5, 4, 2), (0, 4, 1), (9, 4, 6)],
)
def test_torchserve_doubles_at_twice_the_target(wait_s: float, ready: int, expected: int) -> None:
    assert count(TorchServe(initial=ready), waiting(wait_s, ready)) == expected


def test_torchserve_does_not_ask_again_for_what_it_has_started() -> None:
    policy = TorchServe(initial=4)
    assert [count(policy, waiting(14, 4, starting), 60 + 15 * at) for at, starting in enumerate((0, 4, 4))] == [8, 8, 8]
    assert count(policy, waiting(8, 4, 4), 105) == 8, "above the target, it takes none away"


def test_torchserve_grows_by_four_or_twofold_in_a_period() -> None:
    policy = TorchServe()
    found = [count(policy, waiting(70, ready), 15 * at) for at, ready in enumerate((1, 5, 10, 20))]
    assert found == [5, 10, 20, 40]


def test_torchserve_waits_while_nothing_is_ready() -> None:
    assert count(TorchServe(initial=3), waiting(70, 0, 3)) == 3
    idle = replace(make_stage(Bucket(0)), beliefs=BELIEFS, replicas=replicas(3))
    assert count(TorchServe(initial=3), idle) == 1


def test_little_s_law_gives_the_mean_wait() -> None:
    """Three requests wait 1, 2 and 6 s: nine request-seconds."""
    stage = replace(make_stage(Bucket(0, arrivals=3, waiting_ns=s(9))), beliefs=BELIEFS, replicas=replicas(2))
    assert count(TorchServe(target_ns=s(1), initial=2), stage) == 6


# OpenWhisk's utilisation


@given(st.floats(0, 1), st.integers(1, 30))
def test_openwhisk_grows_by_two_thirds_at_most(utilisation: float, ready: int) -> None:
    policy = build_system("openwhisk", {"initial": ready}).policies.scale
    assert isinstance(policy, Hpa)
    core_ns = ready * NS_PER_S
    buckets = [Bucket(s(t), busy_core_ns=round(utilisation * core_ns), ready_core_ns=core_ns) for t in range(15)]
    found = count(policy, replace(make_stage(*buckets), beliefs=BELIEFS, replicas=replicas(ready)))
    assert found <= ceil(ready / 0.6)
    if abs(utilisation / 0.6 - 1) > 0.101:
        assert found == max(1, ceil(utilisation * ready / 0.6 - 1e-6))


# SageMaker's requests per replica


def test_sagemaker_plans_for_twice_the_mean_of_a_minute() -> None:
    """57 requests/s of 140.6 ms keep 8.01 replicas busy."""
    assert count(SageMaker(), arrivals([57] * 60)) == 17
    assert count(SageMaker(safety=1.0), arrivals([57] * 60)) == 9
    assert count(SageMaker(), arrivals([0] * 30 + [114] * 30, ready=50)) == 17, "the burst counts in the mean only"
    assert count(SageMaker(), arrivals([0] * 60)) == 1


# All of them


@pytest.mark.parametrize("kind", [AtollRate, TorchServe, SageMaker])
def test_begins_with_what_it_is_given_and_stays_within_its_bounds(kind: Callable[..., ReactiveScale]) -> None:
    nothing = replace(make_stage(), beliefs=BELIEFS)
    assert count(kind(), nothing, 0) == 1
    assert count(kind(initial=11), nothing, 0) == 11
    assert count(kind(initial=3, replicas_max=2, replicas_min=2), nothing, 0) == 2
    busy = replace(waiting(70, 40, rps=1000), replicas=replicas(40))
    assert count(kind(replicas_max=9, initial=9), busy) == 9
    assert count(kind(replicas_min=5), replace(make_stage(Bucket(0)), beliefs=BELIEFS, replicas=replicas(5))) == 5


def test_batches_raise_what_a_replica_serves() -> None:
    """Batches of four take 40 ms: 100 requests/s."""
    belief = make_belief(Profile(latency_ms=Quadratic(0.0, 10.0, 0.0), max_batch=4, max_cores=1))
    stage = replace(make_arrivals(*[350] * 60), beliefs={("v", "local"): belief})
    plan = next_plan(AtollRate(batch_max=4), s(60), make_view(stage))
    assert plan is not None
    assert (plan.stages[0].groups[0].count, plan.stages[0].batch_max) == (4, 4)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (AtollRate, {"factor": 0}),
        (AtollRate, {"window_ns": 0}),
        (TorchServe, {"target_ns": 0}),
        (TorchServe, {"replicas_min": 5, "replicas_max": 4}),
        (SageMaker, {"safety": 0}),
        (SageMaker, {"initial": -1}),
        (SageMaker, {"cores": 0}),
    ],
)
def test_refuses_values_out_of_range(kind: Callable[..., ReactiveScale], parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(kind(**parameters))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80), st.floats(0, 1))
def test_the_interpolated_quantile_is_numpy_s(values: list[float], share: float) -> None:
    assert interpolated_quantile(sorted(values), share) == pytest.approx(np.quantile(values, share), abs=1e-6)
