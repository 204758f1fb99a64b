"""Bursts at an idle model: the default system uses idle cores, others leave them idle until their next plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sloop.actions import Decided
from sloop.app.load import load_scenario
from sloop.runlog import read_log
from sloop.sim.scenarios import run_scenario
from sloop.units import s
from sloop.vocabulary import Plan

BURSTS_S = (5.3, 15.6, 25.9)
SIZE = 64
SCALES = {1: {1: 14.0, 2: 8.0}, 16: {1: 224.0, 2: 128.0}}
"""A row takes as long in a batch as alone, and half as long on two cores."""
LEAVES = {"name": "elastic", "divide": {"name": "max_min", "idle": "leave"}}
ALONE = {1: {1: 14.0, 2: 13.6}, 16: {1: 56.0, 2: 54.4}}
"""A batch of 16 takes as long as four rows, and more cores gain nothing."""


def served(
    folder: Path,
    table: Mapping[int, Mapping[int, float]] = SCALES,
    nodes: tuple[dict[str, Any], ...] = ({"cores": 2},),
    stages: int = 1,
    **keys: Any,  # of the scenario's file
) -> tuple[int, Plan]:
    """How many requests of three bursts are served in time, and the plan that the last of them finds."""
    times = "".join(f"{start + number * 3e-4}\n" for start in BURSTS_S for number in range(SIZE))
    (folder / "times.csv").write_text(f"time_s\n{times}")
    profile = {"latency_ms": {"form": "table", "table": table}, "max_batch": 16, "load_s": 1}
    named = [{"name": name, "profile": profile} for name in "abcde"[:stages]]
    for each, before in zip(named[1:], named, strict=False):
        each["after"] = before["name"]
    scenario = load_scenario(
        {
            "name": "x",
            "slo_ms": 600,
            "stages": named,
            "cluster": {"nodes": [{"hardware": "custom"} | each for each in nodes]},
            "trace": {"file": str(folder / "times.csv"), "column": "time_s", "format": "timestamps"},
            "duration_s": 30,
        }
        | keys
    )
    run = run_scenario(scenario, scenario.systems[0], log=folder / "run.jsonl")
    records = [record for at_ns, record in read_log(folder / "run.jsonl") if at_ns < s(BURSTS_S[-1])]
    plans = [each.plan for each in records if isinstance(each, Decided) and each.plan is not None]
    return run.row.served, plans[-1]


def are_reserved(plan: Plan) -> bool:
    """Whether the cores of all replicas are only reserved."""
    return not any(group.spec.slot.is_capped for target in plan.stages for group in target.groups)


def test_a_burst_uses_all_cores_under_the_default_and_one_if_it_leaves_idle_ones(tmp_path: Path) -> None:
    told, plan = served(tmp_path, system=LEAVES)
    assert not are_reserved(plan)
    default, plan = served(tmp_path)
    assert are_reserved(plan)
    assert plan.stages[0].groups[0].spec.cores == 1, "what it reserves is what the rate needs"
    size = plan.stages[0].batch_max
    on_reserved, on_all = 14 * size, 8 * size  # as in `SCALES`
    assert (
        f"replicas use all 2: a batch of {size} takes {on_reserved} ms on its reserved core, and {on_all} ms on all"
        in plan.why
    )
    assert told < 0.9 * default
    assert default == len(BURSTS_S) * SIZE


def test_batches_of_an_idle_model_suit_a_burst(tmp_path: Path) -> None:
    """Each batch of one takes 14 ms; 64 of them take longer than the deadline, four of 16 take 224 ms."""
    told, plan = served(tmp_path, ALONE, system=LEAVES)
    assert plan.stages[0].batch_max == 1
    default, plan = served(tmp_path, ALONE)
    assert not are_reserved(plan), "more cores gain too little"
    assert 8 < plan.stages[0].batch_max <= 16
    assert told < 0.9 * default
    assert default == len(BURSTS_S) * SIZE


def test_a_pipeline_uses_idle_cores_too(tmp_path: Path) -> None:
    told, _ = served(tmp_path, stages=2, nodes=({"cores": 4},), system=LEAVES)
    default, plan = served(tmp_path, stages=2, nodes=({"cores": 4},))
    assert are_reserved(plan)
    assert told <= default


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(({"cores": 2, "count": 2},), id="several nodes"),
        pytest.param(({"cores": 2, "count": 1, "most": 2},), id="on demand"),
        pytest.param(({"cores": 1},), id="measured on more cores"),
    ],
)
def test_cores_that_cost_something_are_not_used(nodes: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    _, plan = served(tmp_path, nodes=nodes)
    assert not are_reserved(plan)


def test_any_system_may_use_idle_cores(tmp_path: Path) -> None:
    published, plan = served(tmp_path, system="static")
    assert not are_reserved(plan)
    told, plan = served(tmp_path, system={"name": "static", "divide": {"name": "priority", "idle": "use"}})
    assert are_reserved(plan)
    assert published < 0.9 * told
