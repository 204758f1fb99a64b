"""Simulated runs in which another system begins to decide: nothing is lost, and the log says all of it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sloop.actions import Assigned, Decided, End, StopWorker
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.events import SystemChanged
from sloop.runlog import FileLog, MemoryLog, read_log
from sloop.runlog.fold import DeploymentState
from sloop.sim import World, simulate
from sloop.sim.scenarios import run_systems
from sloop.sim.traffic import recorded_traffic
from sloop.systems.replay import header_of, replay_log
from sloop.systems.setup import build
from sloop.testing.restoring import restores
from sloop.units import s
from sloop.vocabulary import Outcome, Request
from tests.sim.scene import application, several

SLOW_STARTS = {"cold_start": {"start_s": 0.4, "warm": True}}


def changing(before: Any, *after: object) -> World:
    """An application whose system changes at 2 s, and then every second."""
    changes = [{"at_s": 2 + place, "system": system} for place, system in enumerate(after)]
    return several(("a",), changes=changes, system=before, rates={"a": 60.0}, duration_s=6.0, truth=SLOW_STARTS)


@pytest.mark.parametrize(
    "systems",
    [
        ("static", "elastic"),
        ("elastic", {"name": "static", "replicas": 2}),
        ({"name": "hpa", "order": "edf"}, {"name": "mixed", "cores": 1}),
        ("kpa", {"name": "elastic", "order": "fifo", "drop": "never"}, "kpa"),
        ("early-drop", "hpa", {"name": "elastic", "period_ms": 200}),
    ],
    ids=str,
)
def test_every_request_ends_once_and_the_run_replays_and_is_restored(systems: tuple[object, ...]) -> None:
    world, log = changing(*systems), MemoryLog()
    world.check()
    totals = simulate(world, [log])  # under all checks
    orders = [record for _, record in log if isinstance(record, SystemChanged)]
    told = [record.why for _, record in log if isinstance(record, Decided) and record.kind == "system"]
    assert len(orders) == len(told) == len(systems) - 1
    requests = {record.id for _, record in log if isinstance(record, Request)}
    ended = Counter(record.request for _, record in log if isinstance(record, End))
    assert totals.open == 0
    assert ended == dict.fromkeys(requests, 1)
    outcomes = Counter(record.outcome for _, record in log if isinstance(record, End))
    assert outcomes[Outcome.SERVED] > 0.9 * len(requests), outcomes
    replayed = replay_log(
        log.records, world.setup().core(), definitions=header_of(world.setup(), origin="sim").definitions
    )
    assert replayed.difference is None
    for fraction in (0.2, 0.5, 0.9):
        assert restores(world, fraction)


def test_no_replica_is_stopped_for_the_change_itself() -> None:
    """Both systems want the same replica."""
    world, log = changing("static", {"name": "static", "order": "fifo", "batch": "timeout"}), MemoryLog()
    simulate(world, [log])
    assert not [record for now_ns, record in log if isinstance(record, StopWorker) and now_ns < s(6)]


def test_the_fold_and_the_traffic_of_the_log_know_the_system_that_decides(tmp_path: Path) -> None:
    world = changing("static", {"name": "hpa", "target": 0.6})
    setup, path = world.setup(), tmp_path / "log.jsonl"
    fold = DeploymentState(setup.parts(), nodes=setup.deployment.cluster, build=build)
    with FileLog(path, header_of(setup, origin="sim")) as log:
        simulate(world, [log, fold])
    (record,) = fold.records
    assert record.definition is not None
    assert record.definition["system"]["name"] == "hpa"
    traffic = recorded_traffic(path)
    (system,) = traffic.scenario.systems
    assert traffic.scenario.deployment.application.system.parameters == {"target": 0.6}
    (run,) = run_systems(traffic.scenario, [system], check_first=0)
    (definition,) = run.header.definitions.values()
    assert definition["system"]["parameters"] == {"target": 0.6}, "as it ran"
    assert replay_log(read_log(path), setup.core()).difference is None


def test_all_versions_of_an_application_change_and_no_other_application() -> None:
    changes = [
        {"at_s": 1, "deploy": application("a"), "canary": {"share": 0.5}},
        {"at_s": 3, "system": "elastic", "application": "a"},
    ]
    world, log = several(("a", "b"), changes=changes, truth=SLOW_STARTS), MemoryLog()
    simulate(world, [log])
    told = [record.application for _, record in log if isinstance(record, Decided) and record.kind == "system"]
    assert told == ["a", "a@2"]
    assigned = Counter(record.application for now_ns, record in log if isinstance(record, Assigned) and now_ns > s(3.2))
    assert assigned["a"] > 5
    assert assigned["a@2"] > 5


def scenario(*changes: dict[str, Any], names: tuple[str, ...] = ("a",)) -> dict[str, Any]:
    return {
        "name": "several",
        "applications": [application(name) for name in names],
        "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 16, "memory_bytes": 10**9}]},
        "traces": {name: {"kind": "poisson", "rate": 5} for name in names},
        "changes": list(changes),
    }


@pytest.mark.parametrize(
    ("change", "names", "what"),
    [
        ({"at_s": 1, "system": "hpa"}, ("a", "b"), "a change of 'system' needs 'application'"),
        ({"at_s": 1, "system": "hpa", "application": "c"}, ("a", "b"), "no application 'c' is deployed at 1 s"),
        ({"at_s": 1, "remove": "a", "application": "a"}, ("a",), "'application' is only for 'system'"),
        ({"at_s": 1, "remove": "a", "system": "hpa"}, ("a",), "one of 'deploy', 'promote', 'remove' and 'system'"),
    ],
)
def test_a_change_that_means_nothing_is_refused(change: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    with pytest.raises(InputError, match=what):
        load_scenario(scenario(change, names=names))


@pytest.mark.parametrize(
    ("system", "what"),
    [
        ("hpaa", "unknown system 'hpaa'"),
        ({"name": "hpa", "targett": 1}, "targett"),
        ({"name": "static", "cores": 99}, "99 cores"),
        ("headstart", "cannot take over from 'elastic': its `provision` policy brings weights to nodes in another way"),
    ],
)
def test_a_system_that_cannot_take_over_is_refused_before_the_run(system: object, what: str) -> None:
    world = World.from_scenario(load_scenario(scenario({"at_s": 1, "system": system})))
    with pytest.raises(InputError, match=what):
        world.check()
