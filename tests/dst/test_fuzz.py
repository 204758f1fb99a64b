"""Random worlds under all checkers, what random worlds are, and the command that plays them.

`make fuzz` plays on for as long as one likes; the worlds here are quick enough for every run.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sloop.actions import (
    AcquireNode,
    Action,
    AdoptWorker,
    Assigned,
    End,
    ReleaseNode,
    Rollout,
    StartBatch,
    StartWorker,
)
from sloop.core.control import ControlPath
from sloop.core.controlled import ControlledApplication, PlanProgress
from sloop.errors import InputError
from sloop.events import Deployed, Finished, NodeLost, NodeReady, Planned, Promoted, Removed, WorkerCompleted
from sloop.runlog import MemoryLog
from sloop.runlog.fold import DeploymentState
from sloop.runlog.requests import RequestRecord
from sloop.runlog.run import RunState
from sloop.sim import simulate
from sloop.sim import worlds as random_worlds
from sloop.sim.checkers import Violation
from sloop.sim.world import World
from sloop.sim.worlds import BRANCHING, CHOICES, FAULTS, GRAPHS, NAMES, fitting, play
from sloop.systems import SYSTEMS
from sloop.systems.registry import POLICIES
from sloop.units import s
from sloop.vocabulary import Request, StagePlan
from tests.dst import fuzz
from tests.dst.agents import OpenRequests
from tests.dst.fuzz import DecidingProcesses, random_deployment, random_succession, random_world
from tests.sim.scene import world

FAILED_ONCE = {
    71: "a batch took a request that had ended on another branch, behind visits its policy skipped",
}
"""Seeds under `static` that broke the core once, and what the mistake was."""
WITHOUT_A_WORD = "a node that could be acquired hid that the one that the plan named had no room"
DEPLOYMENTS_FAILED_ONCE = {
    ("harbor", 339): WITHOUT_A_WORD,
    ("harbor", 393): WITHOUT_A_WORD,
    ("mixed", 11): "replicas that share an accelerator were offered without cores, where others had all of its node",
}
"""The same of deployments, with their systems."""


@pytest.mark.parametrize("system", SYSTEMS.own)
def test_every_request_ends_once_whoever_decides(system: str) -> None:
    """In the smaller of the first two worlds that the system can serve; `make fuzz` plays others."""
    first = 100 + 4 * list(SYSTEMS.own).index(system)
    made = (fitting(random_succession, seed, system) for seed in range(first, first + 100))
    found = list(islice((world for world in made if world is not None), 2))
    assert found, f"{system} is hardly played"
    fuzz.play_successors(min(found, key=lambda world: len(list(world.trace.times_ns()))))


def test_a_batch_that_nobody_gives_up_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message of its end is lost, and the core looks neither for stalled batches nor at silent workers."""

    def look_away(self: ControlPath, now_ns: int, out: list[Action]) -> None:
        self._watch_ns = now_ns + s(1)

    monkeypatch.setattr(ControlPath, "_watch_batches", look_away)
    monkeypatch.setattr(ControlPath, "silent", lambda *_: None)
    with pytest.raises(Violation, match=r"request \d+ still runs in batch \d+"):
        play(random_world(13))
    assert fuzz.main(["--first", "13", "--system", "static"]) == 1
    assert capsys.readouterr().err.endswith("reproduce with: python -m tests.dst.fuzz --seed 13 --system static\n")


def played_successors(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[MemoryLog]:
    """The logs of all deciding processes of a world."""
    made: list[DecidingProcesses] = []
    begin = DecidingProcesses.__init__

    def remember(self: DecidingProcesses, world: World, opened: OpenRequests) -> None:
        made.append(self)
        begin(self, world, opened)

    monkeypatch.setattr(DecidingProcesses, "__init__", remember)
    fuzz.play_successors(random_succession(seed))
    return made[0].logs


def test_another_deciding_process_adopts_replicas_and_gets_the_requests_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: Counter[str] = Counter()
    for seed in range(6):
        first, *later = played_successors(monkeypatch, seed)
        asked = {record.id for _, record in first if isinstance(record, Request)}
        ended = [record.request for log in (first, *later) for _, record in log if isinstance(record, End)]
        assert len(ended) == len(set(ended)), "once"
        found["deaths"] += len(later)
        for log in later:
            found["adopted"] += sum(isinstance(record, AdoptWorker) for _, record in log)
            found["again"] += sum(isinstance(record, Request) and record.id in asked for _, record in log)
    assert found["deaths"] >= 6, found
    assert found["adopted"] > 6, found
    assert found["again"] > 6, found


def test_a_stage_that_is_given_up_for_lack_of_room_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shortage is an excuse only as long as there is no room."""
    advance = ControlPath._advance

    def gives_up(
        self: ControlPath, now_ns: int, application: ControlledApplication, target: StagePlan, *rest: Any
    ) -> PlanProgress:
        if any(name == target.stage for name, *_ in application.reported):
            return PlanProgress.NO_ROOM
        return advance(self, now_ns, application, target, *rest)

    monkeypatch.setattr(ControlPath, "_advance", gives_up)
    with pytest.raises(Violation, match="requests never ended"):
        play(random_world(47))


def test_a_core_that_forgets_what_was_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlPath, "_adopt", lambda *_: None)
    with pytest.raises(Violation, match=r"neither adopted nor stopped[\s\S]*--seed 1 --system static --successors"):
        fuzz.play_successors(random_succession(1))


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_worlds_that_failed_once_hold_now(seed: int) -> None:
    simulate(random_world(seed))


@pytest.mark.parametrize(("system", "seed"), DEPLOYMENTS_FAILED_ONCE)
def test_deployments_that_failed_once_hold_now(system: str, seed: int) -> None:
    play(random_deployment(seed, system))


@cache
def worlds() -> list[World]:
    """Those of the first seeds."""
    return [random_world(seed) for seed in range(300)]


def test_a_seed_is_a_world() -> None:
    again, first = random_world(5), worlds()[5]
    assert msgspec.json.encode(again.application) == msgspec.json.encode(first.application)
    assert (again.faults, again.truth, again.errors) == (first.faults, first.truth, first.errors)
    assert list(again.trace.times_ns()) == list(first.trace.times_ns())


def test_each_kind_of_fault_is_on_in_one_world_out_of_four() -> None:
    calm = Counter[str]()
    for played in worlds():
        calm.update(kind for kind in FAULTS if getattr(played.faults, kind))
    assert all(45 <= calm[kind] <= 105 for kind in FAULTS), calm


def test_worlds_are_of_every_shape() -> None:
    sizes = {*map(len, GRAPHS), *map(len, BRANCHING)}
    assert {len(played.application.stages) for played in worlds()} == sizes
    assert {played.truth.network is None for played in worlds()} == {True, False}
    assert min(min(played.errors.values()) for played in worlds()) == 0.25
    assert max(max(played.errors.values()) for played in worlds()) == 4.0


def test_worlds_are_small_enough_to_play_many() -> None:
    assert max(sum(1 for _ in played.trace.times_ns()) for played in worlds()[:50]) < 4_000


def test_what_can_be_drawn_exists() -> None:
    assert all(set(names) <= POLICIES[verb].keys() for verb, names in CHOICES.items())


def test_worlds_branch_fan_out_join_and_have_paths() -> None:
    found = Counter[str]()
    for played in worlds():
        graph = played.application.graph
        edges = [edge for away in graph.edges.values() for edge in away]
        found["alone"] += len(graph.stages) == 1
        found["plain"] += len(graph.stages) > 1 and graph.is_plain
        found.update({edge.kind for edge in edges})
        found["when"] += any(edge.when for edge in edges)
        found["when, of parts"] += any(edge.when and edge.kind == "each" for edge in edges)
        found["paths"] += bool(graph.declared_paths)
        found["deadlines"] += graph.has_deadlines
        found["other parts than believed"] += bool(played.truth.fan_out)
        assert played.truth.fan_out.keys() <= {name for name, step in graph.stages.items() if step.each}
    assert all(found[kind] >= 60 for kind in ("alone", "plain", "one", "each", "when")), found
    assert all(found[kind] >= 20 for kind in ("join", "when, of parts", "paths", "deadlines")), found
    assert found["other parts than believed"] >= 15, found


def test_in_some_worlds_requests_are_split_into_no_one_many_and_too_many_parts() -> None:
    found = Counter[str]()
    for seed in range(35):
        played = worlds()[seed]
        if played.application.graph.is_plain:
            continue
        simulate(played, [log := MemoryLog()], check_first=0)
        for _, record in log.records:
            if isinstance(record, StartBatch) and record.parts:
                found["a part"] += 1
                found["parts of one request together"] += len(set(record.requests)) < len(record.requests)
                found["parts of two requests together"] += len(set(record.requests)) > 1
            elif isinstance(record, Finished):
                found["a branch not taken"] += any(0 in counts for counts in record.edge_counts)
                found["several parts"] += any(count > 1 for counts in record.edge_counts for count in counts)
            elif isinstance(record, End):
                found[record.outcome] += 1
                found["too many parts"] += "which takes at most" in record.why
    assert min(found.values()) >= 100, found
    assert len(found) >= 10, found


def test_in_some_worlds_models_start_in_parts() -> None:
    found = Counter[str]()
    for seed in (10, 31, 89, 95):
        simulate(random_worlds.random_world(seed, "kpa"), [log := MemoryLog()], check_first=0)
        for _, record in log.records:
            found["a part"] += isinstance(record, StartWorker) and record.part is not None
            found["a part that got the other layers"] += isinstance(record, WorkerCompleted)
    assert min(found.values()) >= 20, found


def fingerprint(of: World) -> tuple[object, ...]:
    traces = [(name, clients.begins_ns, list(clients.trace.times_ns())) for name, clients in of.clients.items()]
    return traces, of.errors, of.faults, of.truth, msgspec.json.encode([*of.applications, *of.changes])


def test_a_seed_is_a_deployment() -> None:
    assert fingerprint(random_deployment(9)) == fingerprint(random_deployment(9))


def test_an_application_that_is_deployed_at_the_end_has_no_requests() -> None:
    world = random_deployment(805_491, "hpa")
    assert "green-new" in {change.deploy.name for change in world.changes if change.deploy}
    assert "green-new" not in world.clients


def test_deployments_are_of_every_shape() -> None:
    found = Counter[str]()
    for seed in range(200):
        made = random_deployment(seed)
        nodes, applications = made.deployment.cluster, made.deployment.applications
        found[f"{len(applications)} applications"] += 1
        found[f"{len({node.hardware for node in nodes})} kinds"] += 1
        found["node on demand"] += any(node.on_demand for node in nodes)
        found["slow plans"] += made.truth.plan_ms > 1_000
        profiles = made.profiles.values()
        found["accelerator"] += any(profile.accelerator for profile in profiles)
        found["model without accelerator on a kind that has one"] += any(
            not profile.accelerator for (_, _, kind), profile in made.profiles.items() if kind == "gpus"
        )
        found["rest"] += any(each.rest_after_s for each in applications)
        found["nodes fail"] += made.faults.node_mtbf_s > 0
        for change in made.changes:
            found["canary"] += change.canary is not None
            found["slow version"] += change.profile_error > 1
            found["new application"] += change.deploy is not None and change.deploy.name not in NAMES
            found["promoted"] += bool(change.promote)
            found["removed"] += bool(change.remove)
    assert min(found[f"{count} applications"] for count in (1, 2, 3, 4)) >= 20, found
    assert min(found[f"{count} kinds"] for count in (1, 2)) >= 40, found
    assert all(count >= 15 for count in found.values()), found


def test_in_deployments_happens_what_is_to_be_tested() -> None:
    found = Counter[str]()
    for played in (random_deployment(seed, "hpa") for seed in range(40)):
        simulate(played, [log := MemoryLog()], check_first=0, patience_ns=10**11)
        for _, record in log.records:
            found[type(record).__name__] += 1
            if isinstance(record, Rollout):
                found[record.state] += 1
            elif isinstance(record, StartWorker):
                found["on a device"] += record.spec.device is not None
    expected = [AcquireNode, ReleaseNode, NodeLost, NodeReady, Planned, Deployed, Promoted, Removed, Assigned]
    assert all(found[kind.__name__] for kind in expected), found
    assert all(found[state] for state in ("starting", "canary", "serving", "retiring", "retired")), found
    assert found["on a device"] > 20, found


def test_one_world_by_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--seed", "1", "--system", "static"]) == 0
    assert capsys.readouterr().err.startswith("3 worlds with "), "a plain one, a deployment, one with successors"
    assert fuzz.main(["--seed", "1", "--system", "static", "--successors"]) == 0
    assert capsys.readouterr().err.startswith("1 worlds with ")
    assert fuzz.main(["--seed", "1", "--system", "static", "--deployment"]) == 0
    assert capsys.readouterr().err.startswith("1 worlds with ")


def test_it_goes_on_until_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--seconds", "0.01", "--first", "3", "--system", "static"]) == 0
    assert "every invariant held" in capsys.readouterr().err


def forgets_times(monkeypatch: pytest.MonkeyPatch) -> World:
    """Requests that are not answered have no times."""
    miss = RunState._miss

    def broken(self: RunState, end: End, request: RequestRecord, latency_ns: int) -> None:
        miss(self, end, request, latency_ns)
        self.missed_ns[end.outcome].pop()

    monkeypatch.setattr(RunState, "_miss", broken)
    return random_world(0)


def measures_from_arrival(monkeypatch: pytest.MonkeyPatch) -> World:
    """Latencies are without the network, in applications of several stages."""
    arrive = RunState._arrive
    monkeypatch.setattr(
        RunState, "_arrive", lambda self, now_ns, request: arrive(self, now_ns, replace(request, sent_ns=now_ns))
    )
    return random_world(1)


def mistakes_the_version(monkeypatch: pytest.MonkeyPatch) -> World:
    """All requests of an application count at its first version."""
    assign = DeploymentState._assign

    def broken(self: DeploymentState, now_ns: int, assigned: Assigned) -> None:
        assign(self, now_ns, replace(assigned, application=next(iter(self.versions))))

    monkeypatch.setattr(DeploymentState, "_assign", broken)
    return random_deployment(2)


@pytest.mark.parametrize("plant", [forgets_times, measures_from_arrival, mistakes_the_version])
def test_a_fold_that_counts_requests_wrongly_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Violation, match=r"requests have ended as .*, the checkers say"):
        play(plant(monkeypatch))


def test_a_run_without_a_world_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it look for ever: worlds that do not fit take time as well."""

    def refused(seed: int, system: str) -> World:
        raise InputError("the system serves one model", help="")

    monkeypatch.setattr(fuzz, "random_world", refused)
    monkeypatch.setattr(fuzz, "random_deployment", refused)
    monkeypatch.setattr(fuzz, "random_succession", refused)
    assert fuzz.main(["--seconds", "0.01", "--system", "static"]) == 1
    assert capsys.readouterr().err.startswith("no world was played")


def test_a_run_that_a_world_refuses_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system has accepted its applications before."""

    def refuse(world: World) -> None:
        raise InputError("this is of no use", help="")

    monkeypatch.setattr(fuzz, "play", refuse)
    assert fuzz.main(["--seed", "7", "--system", "static"]) == 1
    assert "this is of no use" in capsys.readouterr().err


def test_a_failure_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(world: object) -> None:
        raise Violation("a replica runs two batches")

    monkeypatch.setattr(fuzz, "play", broken)
    assert fuzz.main(["--seed", "7", "--system", "static"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Violation: a replica runs two batches\n")
    assert said.endswith("reproduce with: python -m tests.dst.fuzz --seed 7 --system static\n")


FAILING = """
from dataclasses import dataclass, field, replace
from sloop.core.protocols import Scale
from sloop.systems import build_system
from sloop.units import s

STATIC = build_system("static")

@dataclass(frozen=True)
class Twice(Scale):
    period_ns: int = s(1)

    def plan(self, now_ns, view, memory):
        plans = (memory or 0) + 1
        if plans > 2:
            raise ZeroDivisionError("two plans are enough")
        return STATIC.policies.scale.plan(now_ns, view, None)[0], plans

SYSTEM = replace(STATIC, name="mine", policies=replace(STATIC.policies, scale=Twice()))
"""


def test_a_policy_that_fails_is_found(tmp_path: Path) -> None:
    """Not by the checkers, which accept it of a user's own policy."""
    (tmp_path / "mine.py").write_text(FAILING)
    played = world(system={"name": str(tmp_path / "mine.py")})
    assert simulate(played).open == 0
    with pytest.raises(Violation, match="no new plan: ZeroDivisionError: two plans are enough"):
        play(played)
