"""A pipeline of more stages than cores, at a rate far below what the cores carry, under every system."""

from typing import Any

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.sim.scenarios import run_scenario

ALONE_MS = {"page": 215.8, "line": 46.45, "orient": 104.6, "flip": 76.75, "labels": 13.45}
AFTER: dict[str, str | list[str]] = {"orient": "page", "flip": "line", "labels": ["orient", "flip"]}
"""Page layout of a newcomer's OCR: two chains that meet. All work of a request takes 0.46 s on one core."""


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


@pytest.mark.parametrize("system", [None, SystemChoice("mixed"), SystemChoice("harbor")], ids=str)
def test_a_pipeline_of_more_stages_than_cores_is_served(system: SystemChoice | None) -> None:
    """Also by systems that say that they have no plan for all of it."""
    in_time, requests = served(system)
    assert in_time >= 0.95 * requests > 50
