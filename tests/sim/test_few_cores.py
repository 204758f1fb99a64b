"""A pipeline of more stages than cores, at a rate far below what the cores carry, under every system."""

from typing import Any

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.sim.scenarios import run_scenario
from sloop.systems.catalogue import SYSTEMS

ALONE_MS = {"page": 215.8, "line": 46.45, "orient": 104.6, "flip": 76.75, "labels": 13.45}
AFTER: dict[str, str | list[str]] = {"orient": "page", "flip": "line", "labels": ["orient", "flip"]}
"""Page layout of a newcomer's OCR: two chains that meet. All work of a request takes 0.46 s on one core."""
SINGLE = {"sponge", "fa2_single", "paldia", "asyfunc", "offline_batch", "by_capacity"}
"""Scaling policies for a single model."""


def served(system: SystemChoice | None) -> tuple[int, int]:
    """How many requests are served in time on two cores, and how many come, about 60."""

    def stage(name: str) -> dict[str, Any]:
        table = {"form": "table", "table": {1: {1: ALONE_MS[name]}}}
        profile = {"latency_ms": table, "max_batch": 1, "load_s": 2}
        return {"name": name, "profile": profile} | ({"after": AFTER[name]} if name in AFTER else {})

    declared = {
        "name": "pages",
        "slo_ms": 1000,
        "stages": list(map(stage, ALONE_MS)),
        "cluster": {"nodes": [{"hardware": "custom", "cores": 2}]},
        "trace": {"kind": "poisson", "rate": 1},
        "duration_s": 60,
        "seed": 3,
    }
    if system is not None:
        declared["system"] = {"name": system.name} | dict(system.parameters)
    scenario = load_scenario(declared)
    row = run_scenario(scenario, scenario.systems[0]).row
    return row.served, row.requests


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_a_pipeline_of_more_stages_than_cores_is_served_or_refused(name: str) -> None:
    if SYSTEMS[name].slots["scale"]["name"] in SINGLE:
        with pytest.raises(InputError, match="serves one model, and the application has 5 stages"):
            served(SystemChoice(name))
        return
    in_time, requests = served(SystemChoice(name))
    assert in_time >= 0.95 * requests > 50


@pytest.mark.parametrize("system", [None, SystemChoice("biscale", {"unit": 0.25})], ids=["default", "units"])
def test_so_it_is_by_default_and_with_small_units(system: SystemChoice | None) -> None:
    in_time, requests = served(system)
    assert in_time >= 0.95 * requests > 50
