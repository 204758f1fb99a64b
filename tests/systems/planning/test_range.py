"""The range of a predicted latency: how it would be at the speeds that the passes of the profiles showed."""

from dataclasses import replace

import pytest
from msgspec import structs

from sloop.profile.estimate import Estimate
from sloop.profile.passes import speed_range
from sloop.profile.profile import Pass, sample_of
from sloop.systems.planning import explain_plan
from sloop.systems.setup import Setup
from tests.systems.planning.scene import only, setup, stage

MS = 1_000_000


def in_passes(made: Setup, *speeds: float) -> Setup:
    passes = tuple(
        Pass(date=str(day), samples=(sample_of(1, 1.0, [round(10 * speed * MS)] * 50),))
        for day, speed in enumerate(speeds)
    )
    beliefs = {
        key: Estimate(structs.replace(belief.profile, passes=passes), variant=belief.variant, hardware=belief.hardware)
        for key, belief in made.beliefs.items()
    }
    return replace(made, applications=(replace(only(made), beliefs=beliefs),))


def test_a_prediction_from_several_passes_has_a_range() -> None:
    made = in_passes(setup(stage("a"), stage("b", "a")), 0.97, 1.0, 1.03)
    report = explain_plan(made, 5)
    assert report.predicted_ms_low is not None
    assert report.predicted_ms_high is not None
    assert report.predicted_ms_low < report.predicted_ms < report.predicted_ms_high
    found = speed_range(next(iter(made.beliefs.values())).profile)
    assert found is not None
    assert report.predicted_ms_high == pytest.approx(report.predicted_ms * found.slow, rel=0.02)


def test_a_prediction_from_one_pass_has_none() -> None:
    for made in (setup(stage("a")), in_passes(setup(stage("a")), 1.0)):
        report = explain_plan(made, 5)
        assert report.predicted_ms_low is report.predicted_ms_high is None
        advised = any("`sloop profile MODEL --passes 3`" in note for note in report.notes)
        assert advised is any(belief.profile.passes for belief in only(made).beliefs.values())
