"""Flashpoint's systems: published parameters, plans, random worlds."""

from dataclasses import replace
from typing import Any

import pytest

from sloop.core.protocols import AsPlaced
from sloop.policies.scale.kubernetes import Hpa
from sloop.systems import build_system
from sloop.systems.planning.steady import steady_plans
from sloop.units import s
from sloop_systems.flashpoint import _POLICIES
from sloop_systems.flashpoint.policy import AtollRate, Flashpoint, SageMaker, TorchServe
from tests.dst.fuzz import random_world
from tests.sim.scene import provisioned, records_of
from tests.sim.test_world import cold_starts_s
from tests.systems.planning.scene import setup, stage

ATOLL = AtollRate(factor=1.0, window_ns=s(60), period_ns=s(15), batch_max=1)
PUBLISHED: dict[str, tuple[Any, Any]] = {
    "atoll-rate": (ATOLL, AsPlaced()),
    "torchserve": (TorchServe(target_ns=s(7), window_ns=s(60), period_ns=s(15)), AsPlaced()),
    "openwhisk": (Hpa(target=0.6, stabilisation_ns=0, period_ns=s(15), batch_max=1), AsPlaced()),
    "sagemaker": (SageMaker(safety=0.5, window_ns=s(60), period_ns=s(60)), AsPlaced()),
    "flashpoint": (ATOLL, Flashpoint(locality=True, multicast=True, source="nearest", join=True)),
    "gpu-faas": (ATOLL, Flashpoint(locality=True, multicast=False, source="store", join=False)),
    "atoll": (ATOLL, Flashpoint(locality=True, multicast=False, source="store", join=False)),
    "baseline": (ATOLL, Flashpoint(locality=False, multicast=False)),
}
"""Scale and provision policy (section 5.1); the figures stand here although most are defaults, because they are
published."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters(name: str) -> None:
    scale, provision = PUBLISHED[name]
    system = build_system(name)
    assert system.policies == replace(_POLICIES, scale=scale, provision=provision)
    assert system.kind == ("system" if name == "flashpoint" else "baseline")


def test_a_policy_that_keeps_no_plan_shows_its_largest() -> None:
    """A replica of 10 ms serves 100 requests/s. TorchServe's autoscaler adds four while requests wait, which then wait
    no longer, and removes all but one."""
    steady = steady_plans(setup(stage("a"), system="torchserve").applications, {"x": 150})
    assert steady.plans["x"].stages[0].groups[0].count == 5
    assert "goes to and fro between 1 replica with 1 core and 5 replicas with 5 cores" in steady.cut_short["x"]


def test_fuzz_draws_the_provision_policy() -> None:
    worlds = [random_world(seed) for seed in range(100)]
    chosen = [world.applications[0].system.parameters.get("provision") for world in worlds]
    names = [each["name"] for each in chosen if isinstance(each, dict)]
    assert min(names.count(name) for name in ("flashpoint", "cheapest_start")) >= 5


def test_cold_starts_take_what_the_level_of_their_source_says() -> None:
    """Section 1.3: T5 takes 15.344 s from files, 27.501 s from another node and 56.771 s from the store, where nothing
    else is on the network."""
    found = {round(taken_s, 3) for taken_s in cold_starts_s(records_of(provisioned(name="flashpoint")))}
    assert {15.344, 27.501} <= found
    alone = cold_starts_s(records_of(provisioned(name="flashpoint", locality=False)))
    assert {round(taken_s, 3) for taken_s in alone} == {56.771}, "one chain from the store for each decision"
    baseline = cold_starts_s(records_of(provisioned(name="flashpoint", locality=False, multicast=False)))
    assert max(baseline) > 2 * 41.427 + 15.344 > min(baseline) == pytest.approx(56.771, rel=1e-4), (
        "they share the store's link"
    )
