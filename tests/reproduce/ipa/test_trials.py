"""Trials are values, and their outcomes depend on nothing else."""

from array import array

import pytest
from msgspec import structs

from sloop.actions import Decided
from sloop.core.views import Traffic
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.forecast.oracle import Oracle
from sloop.reproduce import ipa
from sloop.reproduce.ipa.pipelines import ARTEFACT
from sloop.reproduce.ipa.trials import (
    SECONDS,
    Outcome,
    Trial,
    Watch,
    Whole,
    Workload,
    margin_of,
    play,
    policies_of,
    scale_of,
    world_of,
)
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan
from tests.policies.conftest import make_arrivals

TRIAL = Trial(pipeline="video", workload="steady_low")
BOTH: tuple[Workload, ...] = ("bursty", "steady_high")
COUNTS = array("q", [6] * SECONDS)


def test_the_same_trial_has_the_same_outcome() -> None:
    found = play(TRIAL)
    assert found == play(TRIAL)
    assert len(found.cores_by_interval) == len(found.pas_by_interval) == SECONDS // 10
    assert 1.0 <= found.cores <= 4.0
    assert 31.8 < found.pas < 44.0
    assert found.violations < 5.0
    assert list(found.latencies_ms) == sorted(found.latencies_ms)


def test_the_world_is_the_trials() -> None:
    world = world_of(structs.replace(TRIAL, pipeline="nlp", start_s=24.0))
    assert world.truth.cold_start.start_s == 24.0
    assert world.truth.profile_error == 2.0
    assert [stage.after for stage in world.application.order] == [(), ("language",), ("translate",)]
    assert world.application.slo_ms == 17_610


def test_policies_differ_in_what_may_be_chosen() -> None:
    low, high, rim = (
        scale_of(structs.replace(TRIAL, policy=policy), COUNTS) for policy in ("fa2-low", "fa2-high", "rim")
    )
    assert [terms.variant for terms in low.stages.values()] == ["yolov5n", "resnet18"]
    assert [terms.variant for terms in high.stages.values()] == ["yolov5s", "resnet101"]
    assert [terms.replicas for terms in rim.stages.values()] == [3, 3]
    steady = scale_of(Trial(pipeline="audio-qa", workload="steady_low", policy="rim"), COUNTS)
    bursty = scale_of(Trial(pipeline="audio-qa", workload="bursty", policy="rim"), COUNTS)
    assert [terms.replicas for terms in steady.stages.values()] == [20, 5]
    assert (steady.beta, bursty.beta) == (0.5, 0.1)


def test_weights_and_measure_may_be_the_trials_own() -> None:
    scale = scale_of(structs.replace(TRIAL, alpha=0.125, beta=0.0, measure="pas_rank"), COUNTS)
    assert (scale.alpha, scale.beta, scale.accuracy) == (0.125, 0.0, "pas_rank")
    assert scale.initial_rps == 6.0


def test_margins_are_those_of_pipeline_and_workload() -> None:
    found = [margin_of(Trial(pipeline=p, workload=w)) for p in ("video", "nlp") for w in BOTH]
    assert found == [0.0, 0.0, 0.0, 0.2]
    assert margin_of(Trial(pipeline="audio-qa", workload="bursty")) == 0.2


def test_forecasts_are_whole_and_have_their_margin() -> None:
    seen: Traffic = make_arrivals(*[7] * 12)
    assert Whole(MovingMax(), 0.2).demand_rps(s(12), seen) == 8.0
    assert Whole(MovingMax(), 0.0).demand_rps(s(12), make_arrivals(0)) == 1.0
    forecast = policies_of(structs.replace(TRIAL, predictor="oracle")).forecast
    assert isinstance(forecast, Whole)
    assert isinstance(forecast.inner, Oracle)


def test_plans_are_accounted_for_by_interval() -> None:
    watch = Watch(ARTEFACT["video"])
    groups = [
        StagePlan(stage, (Group(ReplicaSpec(stage, variant, cores), count),), 1)
        for stage, variant, cores, count in (("detect", "yolov5m", 2.0, 3), ("classify", "resnet18", 1.0, 2))
    ]
    watch.append(0, Decided("plan", "", plan=Plan((groups[0],), "")))
    watch.append(20 * NS_PER_S, Decided("plan", "", plan=Plan(tuple(groups), "")))
    watch.finish()
    assert watch.cores[:3] == [6.0, 6.0, 8.0]
    assert watch.pas[2] == pytest.approx(100 * 0.641 * 0.6975)
    assert len(watch.cores) == SECONDS // 10


def instead(trial: Trial) -> Outcome:
    """An outcome without a run."""
    flat = (1.0,) * (SECONDS // 10)
    return Outcome(1.0, 1.0, 50.0, 1.0, 1.0, flat, flat, flat, (1.0,) * 100, 1)


def test_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipa, "play", instead)
    monkeypatch.setattr(ipa.offline, "timings", lambda: (dict.fromkeys(ipa.offline.SIZES, 1.0), {"video": 1.0}))
    quick, full = (ipa.reproduce(quick=quick, data=None, processes=1) for quick in (True, False))
    assert len(quick.rows) < len(full.rows)
    assert any("made-up" in row.note for row in quick.rows)
    assert any("requests: assumed" in line for line in quick.assumed)
    assert {figure.name for figure in full.figures} >= {"over-time-nlp", "deciding", "preferences", "forecasters"}
