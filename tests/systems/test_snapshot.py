"""A core that is restored from a snapshot decides as the core would have that was saved."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sloop.actions import StartBatch, StartWorker
from sloop.app.load import load_application
from sloop.core import Core
from sloop.core.views import Belief
from sloop.errors import InputError
from sloop.events import WOKE, WorkerCompleted, WorkerReady
from sloop.runlog import MemoryLog
from sloop.sim import simulate
from sloop.systems.setup import Setup, build, set_up
from sloop.systems.snapshot import Snapshot, SnapshotError, restore, save, save_memories
from sloop.testing.restoring import fresh_run, restored_run, restores, through_json
from sloop.units import ms, s
from sloop.vocabulary import Slot
from tests.sim.scene import in_parts, world


def test_pipelines_are_in_a_snapshot() -> None:
    world, log = in_parts(), MemoryLog()
    simulate(world, [log], check_first=0)
    kinds = [type(record) for _, record in log]
    for kind in (WorkerReady, WorkerCompleted):  # while parts start, and while they get the other layers
        place = next(place for place, (_, each) in enumerate(log) if isinstance(each, StartWorker) and each.part)
        place = kinds.index(kind, place)
        assert restores(world, (place + 1) / len(kinds))


def test_pieces_of_requests_and_lanes_of_sizes_are_in_a_snapshot() -> None:
    trace = {"kind": "poisson", "rate": 40, "rows": [1, 10], "sizes": [16, 512]}
    made = world(trace=trace, system={"name": "static", "replicas": 2, "cores": 1.0}, max_batch=4)
    log = MemoryLog()
    simulate(made, [log], check_first=0)
    pieces = [place for place, (_, each) in enumerate(log) if isinstance(each, StartBatch) and each.pieces]
    assert len(pieces) > 20
    for place in pieces[1:20:6]:
        assert restores(made, (place + 1) / len(log.records))


# What is refused

ONE = {
    "name": "one",
    "slo_ms": 900,
    "stages": [{"name": "a", "profile": "ResNet-T"}],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
    "system": "hpa",
}

OWN = """
from dataclasses import dataclass, field, replace
from sloop.core.protocols import Scale
from sloop.policies import targets
from sloop.systems import build_system
from sloop.vocabulary import Plan

class Own:
    pass

@dataclass(frozen=True, slots=True)
class Slow(Scale):
    period_ns: int = 10**9
    step: int = 1

    def plan(self, now_ns, view, memory):
        calls, *past = memory or (0,)
        calls += self.step
        (stage,) = view.stages
        belief = targets.belief_of(stage)
        replicas = targets.equal_replicas(stage, belief, count=calls, cores=1.0, batch_max=1)
        return Plan((replicas,), "more"), (calls, *past, STATE)

static = build_system("static")
SYSTEM = replace(static, name="slow", policies=replace(static.policies, scale=Slow()))
"""


def own_system(folder: Path, state: str) -> Setup:
    path = folder / "own.py"
    path.write_text(OWN.replace("STATE", state))
    return set_up(load_application(ONE | {"system": {"name": str(path), "step": 2}}))


def test_what_policies_of_users_remember_is_saved_if_it_is_plain(tmp_path: Path) -> None:
    setup = own_system(tmp_path, "(now_ns, (1.5, None), frozenset('a'), float('inf'), -2**70)")
    run = fresh_run(setup)
    for second in range(3):
        run[0].handle(s(second), WOKE)
        assert run[0].plan_input is not None
        run[0].handle(s(second), run[0].planner.plan(run[0].plan_input))
    core, _ = restored_run(run, setup, s(2), [])
    calls, *past = core.planner.memories["one"]
    assert calls == 6
    assert past == [(s(second), (1.5, None), frozenset("a"), float("inf"), -(2**70)) for second in range(3)]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("__import__('fractions').Fraction(1)", r"\[1\] is a fractions:Fraction"),
        ("lambda: 1", r"\[1\] is the function"),
        ("__import__('threading').Lock()", r"\[1\] is a _thread:lock"),
        ("__import__('fractions').Fraction", r"\[1\] is or has class"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_path(tmp_path: Path, state: str, says: str) -> None:
    core = own_system(tmp_path, state).core()
    core.handle(0, WOKE)
    assert core.plan_input is not None
    core.handle(0, core.planner.plan(core.plan_input))
    with pytest.raises(SnapshotError, match=says):
        save(core, 0)


def test_objects_of_classes_beside_a_policy_are_saved(tmp_path: Path) -> None:
    setup = own_system(tmp_path, "(Own, Own())")
    run = fresh_run(setup)
    run[0].handle(0, WOKE)
    assert run[0].plan_input is not None
    run[0].handle(0, run[0].planner.plan(run[0].plan_input))
    core, _ = restored_run(run, setup, 0, [])
    _, (kind, made) = core.planner.memories["one"]
    assert kind is sys.modules[type(setup.applications[0].system.policies.scale).__module__].Own
    assert type(made) is kind


def test_a_core_that_waits_for_a_plan_is_not_saved(tmp_path: Path) -> None:
    core = own_system(tmp_path, "1").core()
    core.handle(0, WOKE)
    with pytest.raises(SnapshotError, match="a plan is being made"):
        save(core, 0)


def test_the_policies_of_a_planner_process_take_the_place_of_the_cores(tmp_path: Path) -> None:
    setup, beside = own_system(tmp_path, "1"), own_system(tmp_path, "1")
    core, planner = setup.core(), beside.core().planner
    core.handle(0, WOKE)
    assert core.plan_input is not None
    core.handle(0, planner.plan(core.plan_input))
    assert not core.planner.memories
    core.planner.adopt({"one": (1, 0)})  # as if it had planned within its loop before
    state = through_json(save_memories(beside.parts(), planner.memories))
    core, _ = restore(through_json(save(core, 0, planner=state)), own_system(tmp_path, "1").parts(), build)
    assert core.planner.memories == {"one": (2, 1)}


def snapshot() -> Snapshot:
    core = set_up(load_application(ONE)).core()
    core.handle(0, WOKE)
    return through_json(save(core, 0))


def test_a_snapshot_runs_no_code_and_makes_only_objects_of_sloop() -> None:
    good = snapshot()
    parts = set_up(load_application(ONE)).parts()
    for tree, says in [
        (["fn", "os:system"], "os:system is not something"),
        (["m", ["fn", "os:system"], "x"], "os:system is not something"),
        (["e", "subprocess:Popen", "true"], "subprocess:Popen is not something"),
        (["e", "sloop.core.planner:Planner", "true"], "sloop.core.planner:Planner is not something"),
        (["o", len(good.classes), "true"], "is not a class that a snapshot may have"),
        (["x", "other/graph"], "refers to 'other/graph'"),
        (["k", "builtins:eval"], "builtins:eval is not something"),
        (["?"], "cannot be read"),
        (["@", 7], "cannot be read"),
    ]:
        bad = msgspec.structs.replace(good, core=["l", tree], classes=[*good.classes, ("subprocess:Popen", ["args"])])
        with pytest.raises(InputError, match=says):
            restore(bad, parts, build)


def test_a_snapshot_of_other_classes_is_refused() -> None:
    good = snapshot()
    classes = [
        (name, ["unknown", *names[1:]] if name.endswith(":BatchLimits") else names) for name, names in good.classes
    ]
    with pytest.raises(InputError, match=r"cannot be read: .*BatchLimits has no field 'unknown'") as caught:
        restore(msgspec.structs.replace(good, classes=classes), set_up(load_application(ONE)).parts(), build)
    assert "release of sloop that wrote it" in caught.value.help


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float64(0.1),
        np.zeros((0, 2)),
        float("-inf"),
        b"\x00\xff",
        frozenset({1, "a"}),
        {("a", 1): [1, [2, {}]]},
    ],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    setup = set_up(load_application(ONE))
    (parts,) = setup.parts()
    (theirs,) = set_up(load_application(ONE)).parts()
    core = Core([parts], setup.deployment.cluster, build)
    found = through_json(save_memories([parts], {"one": (value, value)}))
    core, _ = restore(through_json(save(core, 0, planner=found)), [theirs], build)
    back = core.planner.memories["one"]
    assert type(back[0]) is type(value)
    assert np.array_equal(back[0], value) if isinstance(value, np.ndarray) else back[0] == value
    if isinstance(value, dict | np.ndarray):
        assert back[0] is back[1], "shared objects stay shared"


def test_what_was_learnt_about_sizes_comes_back_and_is_learnt_on() -> None:
    (own,), (theirs,) = (set_up(load_application(ONE)).parts() for _ in range(2))
    beliefs = [next(iter(each.beliefs.values())) for each in (own, theirs)]

    def observe(belief: Belief, count: int) -> None:
        for number in range(count):
            size = (16, 100, 400)[number % 3]
            belief.at(size).observe(1 + number % 5, Slot(1.0), ms(5 + (1 + number % 5) * size / 10))

    observe(beliefs[0], 500)
    restore(through_json(save(Core([own], (), build), 0)), [theirs], build)
    for _ in range(2):
        costs_ns = [[belief.at(size).costs_ns(Slot(1.0)) for size in (0, 16, 50, 100, 400)] for belief in beliefs]
        assert costs_ns[0] == costs_ns[1]
        for belief in beliefs:
            observe(belief, 200)
