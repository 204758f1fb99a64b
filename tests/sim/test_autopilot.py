"""Autopilots in simulated runs: their own simulations are real, take time, and enter as events."""

from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from sloop.actions import Decided, End, RequestSimulation
from sloop.app.load import load_scenario
from sloop.events import Simulated
from sloop.runlog import MemoryLog
from sloop.runlog.fold import DeploymentState
from sloop.sim import World, simulate
from sloop.sim.foretell import CPU_S_PER_REQUEST, TOO_LONG, OwnSimulations, foretell
from sloop.systems.replay import ServedApplications, header_of, replay_log
from sloop.systems.setup import build
from sloop.testing.restoring import restores
from sloop.units import s
from sloop.vocabulary import SIMULATION_CORES, Request
from tests.sim.scene import application, several

DEAR: dict[str, Any] = {"name": "static", "replicas": 3, "cores": 1, "order": "fifo"}
CHEAP: dict[str, Any] = {"name": "static", "replicas": 1, "cores": 1}
PILOT: dict[str, Any] = {"name": "autopilot", "among": [DEAR, CHEAP], "every_s": 60, "target": 0.9}
CHEAP_NAME = "static (replicas 1, cores 1)"


def flight(system: dict[str, Any] = PILOT, *names: str, duration_s: float = 420.0, rate: float = 2.0) -> World:
    names = names or ("a",)
    return several(names, system=system, rates=dict.fromkeys(names, rate), duration_s=duration_s)


def flown(world: World) -> MemoryLog:
    """The log of its run, under all checks."""
    log = MemoryLog()
    totals = simulate(world, [log], own=OwnSimulations(header_of(world.setup(), origin="sim")))
    assert totals.open == 0
    return log


def test_the_cheaper_system_is_taken_no_request_is_lost_and_the_run_replays() -> None:
    world = flight()
    world.check()
    log = flown(world)
    told = [(now_ns, record) for now_ns, record in log if isinstance(record, Decided) and record.kind == "overseer"]
    assert [record.choice for _, record in told][:3] == ["", "", CHEAP_NAME]
    assert "wins, 2 of 3 times in a row" in told[1][1].why
    assert all(record.why for _, record in told)
    requests = {record.id for _, record in log if isinstance(record, Request)}
    assert Counter(record.request for _, record in log if isinstance(record, End)) == dict.fromkeys(requests, 1)
    assert replay_log(log.records, world.setup().core()).difference is None
    setup = world.setup()
    fold = DeploymentState(setup.parts(), nodes=setup.deployment.cluster, build=build)
    served = ServedApplications(header_of(setup, origin="sim"))
    for now_ns, record in log:
        fold.append(now_ns, record)
        served.append(record)
    assert fold.only.replicas.keys() == {min(fold.only.replicas)}, "one of the three is left"
    assert fold.records[0].choice == CHEAP_NAME
    assert served.deciding(served.by_name["a"]).system.text == CHEAP_NAME


@pytest.mark.parametrize("fraction", [0.3, 0.62, 0.95])
def test_it_is_restored_from_a_snapshot_also_while_it_waits_for_an_answer(fraction: float) -> None:
    assert restores(flight(), fraction)


def test_the_answer_comes_after_the_time_that_a_tenth_of_a_core_takes() -> None:
    log = flown(flight())
    asked = [(now_ns, record) for now_ns, record in log if isinstance(record, RequestSimulation)]
    answers = {record.number: (now_ns, record) for now_ns, record in log if isinstance(record, Simulated)}
    assert len(asked) == len(answers) > 4
    for now_ns, record in asked:
        came_ns, answer = answers[record.number]
        sent = sum(
            isinstance(each, Request) and now_ns - s(record.asks.last_s) <= each.sent_ns <= now_ns for _, each in log
        )
        assert answer.cpu_s == pytest.approx(2 * CPU_S_PER_REQUEST * sent, rel=0.05)
        assert came_ns - now_ns == pytest.approx(s(answer.cpu_s / SIMULATION_CORES), rel=0.01)
        assert answer.requests < sent, "the first ones do not count"


def test_what_takes_longer_than_it_may_has_no_answer() -> None:
    world = flight()
    own = OwnSimulations(header_of(world.setup(), origin="sim"))
    log = MemoryLog()
    simulate(world, [log], own=own)
    (_, asked), *_ = [(now_ns, record) for now_ns, record in log if isinstance(record, RequestSimulation)]
    small = structs.replace(asked, asks=structs.replace(asked.asks, cpu_s_max=1e-4))
    _, answer = own.answer(s(420), small)
    assert (answer.error, answer.systems) == (TOO_LONG, ())


def test_without_a_simulator_it_says_so_and_the_first_system_goes_on() -> None:
    log = MemoryLog()
    simulate(flight(), [log])
    whys = {record.why for _, record in log if isinstance(record, Decided) and record.kind == "overseer"}
    assert whys == {f"nothing can be compared: a simulation cannot simulate itself here; {name_of(DEAR)} goes on"}


def name_of(system: dict[str, Any]) -> str:
    return f"{system['name']} ({', '.join(f'{key} {value}' for key, value in system.items() if key != 'name')})"


def test_of_several_applications_only_the_one_that_asks_is_under_another_system() -> None:
    names = ("a", "b")
    scenario = load_scenario(
        {
            "name": "two",
            "applications": [application(name) for name in names],
            "system": DEAR,
            "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 16, "memory_bytes": 10**9}]},
            "traces": {name: {"kind": "poisson", "rate": 2} for name in names},
            "duration_s": 400,
        }
    )
    rows, requests = foretell(scenario, "b", [DEAR, CHEAP, "headstart-"])
    assert [round(row.cores) for row in rows[:2]] == [3, 1]
    assert "unknown system 'headstart-'" in rows[2].error
    assert 350 < requests < 600, "half of the time does not count"
    log = flown(flight(PILOT, "a", "b"))
    chosen = [record.application for _, record in log if isinstance(record, Decided) and record.choice]
    assert sorted(chosen) == ["a", "b"]


@pytest.mark.parametrize(("first", "then"), [(DEAR, PILOT), (PILOT, "hpa")], ids=["to", "from"])
def test_an_order_may_give_an_application_an_autopilot_or_take_it_away(first: dict[str, Any], then: object) -> None:
    world = several(("a",), system=first, rates={"a": 2.0}, duration_s=420, changes=[{"at_s": 60, "system": then}])
    world.check()
    log = flown(world)
    kinds = [record.kind for _, record in log if isinstance(record, Decided) and record.kind in ("system", "overseer")]
    assert kinds == (["system", *["overseer"] * 5] if then is PILOT else ["system"])
    assert replay_log(log.records, world.setup().core()).difference is None
    assert restores(world, 0.8)
