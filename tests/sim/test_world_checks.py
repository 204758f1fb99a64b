"""A user's own policy in random worlds: what a mistake in it looks like, and that there is none in sloop's own."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sloop.app.load import load_deployment
from sloop.errors import InputError
from sloop.sim.world_checks import WorldsReport, check_in_worlds
from sloop.sim.worlds import world_around

POLICY = """
from dataclasses import dataclass, replace

from sloop.core.protocols import Scale
from sloop.policies import targets
from sloop.systems import SYSTEMS
from sloop.systems.system import System
from sloop.vocabulary import Plan

SEEN = []

@dataclass(frozen=True, slots=True)
class Own(Scale):
    is_quick = True
    period_ns: int = 1_000_000_000

    def plan(self, now_ns, view, memory):
        view = targets.on_one_kind(view)
        stages = []
        for stage in view.stages:
            belief, count = targets.belief_of(stage), 2
            FAULT
            stages.append(targets.equal_replicas(stage, belief, count=count, cores=1.0, batch_max=4))
        return Plan(tuple(stages), why="two of each"), None

SYSTEM = System("own", "system", "a test", replace(SYSTEMS["static"].policies, scale=Own()))
"""
APP = """
name: street
slo_ms: 600
stages:
  - {name: detect, profile: YOLOv5s-S}
  - {name: classify, profile: ResNet-T, after: detect}
system: SYSTEM
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
"""
LINE = 22
"""That of the fault."""
Checks = Callable[..., WorldsReport]


@pytest.fixture
def checked(tmp_path: Path) -> Checks:
    def check(fault: str = "pass", seeds: Iterable[int] = range(12), *, is_quick: bool = True) -> WorldsReport:
        (tmp_path / "own.py").write_text(
            POLICY.replace("FAULT", fault).replace("is_quick = True", f"is_quick = {is_quick}")
        )
        (tmp_path / "app.yaml").write_text(APP.replace("SYSTEM", "./own.py"))
        return check_in_worlds(load_deployment([tmp_path / "app.yaml"]), {"street": 8.0}, seeds)

    return check


def test_a_policy_without_a_mistake_passes_and_the_requests_are_counted(checked: Checks) -> None:
    found = checked()
    assert (found.worlds, found.refused, found.failures) == (12, 0, ())
    ends = found.served + found.late + found.dropped + found.rejected + found.failed + found.unanswered
    assert ends == found.requests > 200
    assert min(found.served, found.late + found.dropped) > 0, "some worlds are cruel"
    assert found == checked(), "a seed is a world"


def test_an_exception_in_a_rare_state_names_its_line_and_its_world(checked: Checks) -> None:
    """A stage has no replica when all have died, or a version is new."""
    rare = "if 0 < now_ns < 6e11: count = 1 + max(1 for each in stage.replicas)"
    (failure,) = checked(rare, range(20)).failures
    assert 0 < failure.worlds < 20
    assert failure.what.startswith("ValueError: max()")
    assert failure.what.endswith(f"(own.py:{LINE})")
    assert f'own.py", line {LINE}, in plan' in failure.detail
    (again,) = checked(rare, [failure.seed]).failures
    assert (again.worlds, again.what) == (1, failure.what)


def test_what_outlives_a_run_is_found_by_its_replay(checked: Checks) -> None:
    (failure,) = checked("SEEN.append(now_ns); count += len(SEEN) // 2 % 5", range(4)).failures
    assert failure.worlds >= 3
    assert "the replay differs at" in failure.what
    assert "a policy answers otherwise to the same arguments" in failure.what
    assert failure.detail.splitlines()[0].startswith("recorded: ")


def test_a_plan_that_cannot_be_used_is_a_mistake(checked: Checks) -> None:
    (failure,) = checked("if 3e9 < now_ns < 6e11: continue", range(6)).failures
    assert failure.what.startswith("the plan leaves out stage ")
    assert failure.worlds >= 3


def test_a_policy_beside_the_event_loop_is_looked_at_as_well(checked: Checks) -> None:
    (failure,) = checked("if 3e9 < now_ns < 6e11: count //= 0", range(6), is_quick=False).failures
    assert failure.what == f"ZeroDivisionError: integer division or modulo by zero (own.py:{LINE})"


def test_a_system_that_serves_nothing_of_this_is_refused(tmp_path: Path) -> None:
    app = tmp_path / "app.yaml"
    app.write_text(APP.replace("SYSTEM", "headstart"))
    with pytest.raises(InputError, match=r"scale policy .* serves one model, and the application has 2 stages"):
        check_in_worlds(load_deployment([app]), {"street": 8.0}, range(3))


def test_worlds_around_an_application_differ_in_what_they_draw(tmp_path: Path) -> None:
    app = tmp_path / "app.yaml"
    app.write_text(APP.replace("SYSTEM", "static"))
    deployment = load_deployment([app])
    worlds = [world_around(deployment, {"street": 8.0}, seed) for seed in range(60)]
    assert all(world.deployment.applications == deployment.applications for world in worlds)
    assert {world.faults.crash_mtbf_s for world in worlds} == {0.0, 3.0}
    assert {bool(world.changes) for world in worlds} == {True, False}
    assert {world.truth.network is None for world in worlds} == {True, False}
    rates = [sum(world.trace.counts_per_s()) * 1e9 / world.duration_ns / 8 for world in worlds]
    assert min(rates) < 0.2
    assert max(rates) > 2.5
    names = {change.deploy.name for world in worlds for change in world.changes if change.deploy is not None}
    assert names == {"street"}, "no application that nobody declared"
