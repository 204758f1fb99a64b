"""Trials are values, and their outcomes depend on nothing else."""

import msgspec
import pytest
from msgspec import structs

from sloop.policies.batch.full import Full
from sloop.policies.drop.age import Age
from sloop.policies.drop.never import Never
from sloop.policies.drop.predictive import Predictive
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.forecast.oracle import Oracle
from sloop.policies.scale.biscale import Biscale
from sloop.policies.scale.vertical import Vertical
from sloop.reproduce.biscale.trials import Results, Trial, excerpt_of, play, policies_of, seeded, world_of

SHORT = Trial(pipeline="video", seconds=30)


def test_the_same_trial_has_the_same_outcome() -> None:
    outcome = play(SHORT)
    assert outcome == play(SHORT)
    assert outcome != play(structs.replace(SHORT, seed=1))
    assert len(outcome.by_second) == len(outcome.cores_by_second) == 30
    assert outcome.cores_by_second[0] == 2


def test_the_world_is_the_trials() -> None:
    world = world_of(structs.replace(SHORT, multiplier=1.3, cold_s=12.0))
    assert (world.truth.profile_error, world.truth.cold_start.start_s, world.truth.resize_ms) == (1.3, 12.0, 100.0)
    assert world_of(SHORT).truth.cold_start.start_s == 5.5
    assert [stage.after for stage in world.application.stages] == [(), ("detect",)]
    assert world.trace.times_ns() is not None


def test_policies_are_the_trials() -> None:
    policies = policies_of(SHORT)
    assert isinstance(policies.forecast, Oracle)
    assert policies.drop == Predictive(batch="full")
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
    outcome = play(msgspec.convert({"pipeline": "video", "seconds": 30, "kind": kind}, Trial))
    assert 0 <= outcome.violations <= 100


def test_motivating_workloads() -> None:
    assert list(excerpt_of("burst", "").counts) == [20] * 30 + [120] * 5 + [20] * 25
    assert sum(excerpt_of("plateau", "").counts) == 400 + 4800


def test_results_by_seed() -> None:
    ready = seeded([(SHORT, 2), (SHORT, 3)], "somewhere")
    assert [trial.seed for trial in ready] == [0, 1, 2]
    outcome = play(SHORT)
    results = Results({trial: structs.replace(outcome, violations=float(trial.seed)) for trial in ready})
    assert results.violations(SHORT) == [0, 1, 2]
    assert results.violations(SHORT, 2) == [0, 1]
    assert results.cores(SHORT) == [outcome.cores] * 3
