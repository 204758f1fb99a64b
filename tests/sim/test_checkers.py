"""Every invariant is broken on purpose, and the checkers find it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sloop.actions import (
    AcquireNode,
    Action,
    Assigned,
    Decided,
    End,
    ReleaseNode,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    VersionState,
)
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.graph import Each
from sloop.app.load import load_application
from sloop.events import (
    WOKE,
    BatchFailed,
    Deployed,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    WorkerLost,
    WorkerReady,
)
from sloop.policies.drop import Age, Never
from sloop.policies.order import Edf
from sloop.profile.profile import Profile, Quadratic
from sloop.runlog import Record
from sloop.sim import Checkers, Violation, World, simulate
from sloop.sim.checkers import FIRST_KEY, CheckedNode, CheckedReplica, CheckerState, Rules
from sloop.vocabulary import (
    BatchId,
    Device,
    Group,
    Node,
    NodeState,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    StagePlan,
    Visit,
    WorkerId,
)
from tests.sim.scene import Broken, Tamper, graph_world, once, records_of, world


def feed(checkers: Checkers, records: Sequence[tuple[int, Record]]) -> None:
    for now_ns, record in records:
        checkers.append(now_ns, record)


def busy() -> World:
    """Two replicas in overload by turns: some requests are late, the queue is seldom empty."""
    system = {"name": "static", "replicas": 2, "batch_max": 4, "order": "fifo", "drop": "never"}
    return world(system=system, trace={"kind": "poisson", "rate": 300}, slo_ms=25)


def start(**changes: object) -> Tamper:
    return once(StartBatch, lambda action: [replace(action, **changes)])


def times(order: Action, count: int) -> list[Action]:
    assert isinstance(order, StartWorker)
    return [replace(order, worker=WorkerId(100 * order.worker + number)) for number in range(count)]


MUTATIONS: dict[str, tuple[Tamper, str]] = {
    "an end is said twice": (once(End, lambda end: [end, end]), "not open"),
    "an end is not said": (once(End, lambda end: []), "is not answered"),
    "another request is ended": (once(End, lambda end: [replace(end, request=RequestId(10**6))]), "not open"),
    "late is called served": (
        lambda action: [replace(action, outcome=Outcome.SERVED) if isinstance(action, End) else action],
        "served, after its deadline",
    ),
    "served is called late": (once(End, lambda end: [replace(end, outcome=Outcome.LATE)], after=1), "late, before"),
    "an answer is called a rejection": (
        once(End, lambda end: [replace(end, outcome=Outcome.REJECTED)]),
        "after it finished every stage",
    ),
    "a batch is sent twice": (once(StartBatch, lambda order: [order, order]), "batch 19 after batch 19"),
    "a busy replica is used": (
        once(StartBatch, lambda order: [order, replace(order, batch=BatchId(10**6))]),
        "still runs",
    ),
    "a batch is empty": (start(requests=()), "a batch of 0 where"),
    "a batch names another stage": (start(stage="other"), "serves stage only"),
    "a request is in a batch twice": (
        once(StartBatch, lambda order: [replace(order, requests=(order.requests[0], order.requests[0]))]),
        "does not wait",
    ),
    "a batch is larger than planned": (start(requests=tuple(RequestId(id) for id in range(5))), "allows up to 4"),
    "a replica that does not exist is used": (start(replica=ReplicaId(77)), "does not exist"),
    "a replica is stopped and used": (
        once(StartBatch, lambda order: [StopWorker(order.replica, "no reason"), order]),
        "not ready or drains",
    ),
    "a replica is stopped twice": (
        once(StartBatch, lambda order: [StopWorker(order.replica, "one"), StopWorker(order.replica, "two"), order]),
        "ordered to stop twice",
    ),
    "cores are given out twice": (
        once(StartWorker, lambda order: times(order, 20), after=1),
        "has 16 cores and gives",
    ),
    "a replica grows beyond its node": (
        once(StartBatch, lambda order: [ResizeWorker(order.replica, 40.0), order]),
        "has 16 cores and gives",
    ),
    "a replica is left without cores": (
        once(StartBatch, lambda order: [ResizeWorker(order.replica, 0.0), order]),
        "without cores",
    ),
    "a replica is on hardware that its node is not": (
        once(StartWorker, lambda order: [replace(order, spec=replace(order.spec, slot=Slot(1.0, "gpu")))], after=1),
        "is of kind custom, not gpu",
    ),
    "a replica is on a device that its node does not have": (
        once(StartWorker, lambda order: [replace(order, spec=replace(order.spec, device="gpu0"))], after=1),
        "has no device gpu0",
    ),
    "a replica is of a stage that nobody deployed": (
        once(StartWorker, lambda order: [replace(order, spec=replace(order.spec, stage="other"))], after=1),
        "of no application version",
    ),
    "a node that is always there is acquired": (
        once(StartBatch, lambda order: [AcquireNode("custom-0"), order]),
        "cannot be acquired",
    ),
    "a node that is always there is released": (
        once(StartBatch, lambda order: [ReleaseNode("custom-0"), order]),
        "not there, or not on demand",
    ),
    "a version that serves has retired": (
        once(StartBatch, lambda order: [Rollout("scene", "1", VersionState.RETIRED, 0.0, "why"), order]),
        "version 1 of 'scene' was serving",
    ),
    "a replica is on no node": (
        once(StartWorker, lambda order: [replace(order, spec=replace(order.spec, node="moon"))], after=1),
        "no node 'moon'",
    ),
}


def test_the_unbroken_core_passes() -> None:
    simulate(busy())


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_core_is_caught(name: str) -> None:
    tamper, complaint = MUTATIONS[name]
    played = busy()
    with pytest.raises(Violation, match=complaint):
        simulate(played, core=Broken(played.setup().core(), tamper))


def test_requests_that_are_forgotten_in_the_queue_are_missed_at_the_end() -> None:
    played = busy()
    forgetful = Broken(played.setup().core(), lambda action: [] if isinstance(action, StartBatch) else [action])
    with pytest.raises(Violation, match="never ended; request 0 waits at"):
        simulate(played, core=forgetful, patience_ns=10**9)


@dataclass(frozen=True)
class OwnEdf:
    """Earliest deadline first, written by a user: no subclass of the one that is shipped, and no registered name."""

    def key(self, visit: Visit) -> int:
        return 2 * visit.deadline_ns


@pytest.mark.parametrize("order", [Edf(), OwnEdf()])
def test_a_queue_out_of_its_policy_s_order_is_caught(order: Edf | OwnEdf) -> None:
    system = {"name": "static", "order": "fifo", "batch_max": 1}
    played = world(system=system, trace={"kind": "poisson", "rate": 300}, slos_ns=(10**8, 10**9))
    rules = Rules(played.application, order)
    checkers = Checkers([rules], played.application.cluster, origin="make it again")
    with pytest.raises(Violation, match="overtook a visit that the order policy puts first") as caught:
        feed(checkers, records_of(played))
    assert str(caught.value).endswith("reproduce with: make it again")


OWN_EDF = """
from dataclasses import replace
from sloop.systems import build_system
from tests.sim.test_checkers import OwnEdf

STATIC = build_system("static", {"batch_max": 1, "drop": "never"})
SYSTEM = replace(STATIC, name="mine", policies=replace(STATIC.policies, order=OwnEdf()))
"""


@pytest.mark.parametrize("wrong", ["edf", "fifo"])
def test_a_run_is_checked_against_the_order_of_its_own_policy_whatever_its_class(tmp_path: Path, wrong: str) -> None:
    """A core that serves in another order than the policy's is found out, be the policy shipped or a user's own."""

    def ordered(system: dict[str, Any]) -> World:
        return world(system=system, trace={"kind": "poisson", "rate": 100}, slos_ns=(10**8, 10**9))

    def shipped(order: str) -> World:
        return ordered({"name": "static", "batch_max": 1, "drop": "never", "order": order})

    (tmp_path / "mine.py").write_text(OWN_EDF)
    right = shipped("fifo") if wrong == "edf" else ordered({"name": str(tmp_path / "mine.py")})
    simulate(right)
    with pytest.raises(Violation, match="overtook a visit that the order policy puts first"):
        simulate(right, core=shipped(wrong).setup().core())


PROFILE = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "max_batch": 2, "max_cores": 1}
APPLICATION = load_application(
    {
        "name": "chain",
        "slo_ms": 100,
        "stages": [
            {"name": "first", "profile": PROFILE},
            {"name": "second", "after": ["first"], "profile": PROFILE},
        ],
        "system": "static",
        "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 4, "memory_bytes": 1}]},
    }
)


def check(records: Sequence[tuple[int, Record]]) -> None:
    feed(Checkers([Rules(APPLICATION)], APPLICATION.cluster), records)


def test_time_must_not_go_back() -> None:
    with pytest.raises(Violation, match="time goes back from 5 ns"):
        check([(5, WorkerReady(ReplicaId(0))), (4, WorkerReady(ReplicaId(0)))])


def test_actions_belong_to_the_instant_of_their_event() -> None:
    with pytest.raises(Violation, match="another instant"):
        check([(5, WorkerReady(ReplicaId(0))), (6, End(RequestId(0), Outcome.SERVED))])


def test_a_request_arrives_once_and_not_before_it_was_sent() -> None:
    request = Request(RequestId(0), 1, 2, 100)
    with pytest.raises(Violation, match="arrived twice"):
        check([(2, request), (3, request)])
    with pytest.raises(Violation, match="before it was sent"):
        check([(2, Request(RequestId(0), 3, 2, 100))])


def test_an_answer_needs_every_stage() -> None:
    with pytest.raises(Violation, match="served before it finished every stage"):
        check([(2, Request(RequestId(0), 1, 2, 100)), (2, End(RequestId(0), Outcome.SERVED))])


def test_only_newcomers_are_rejected_and_what_a_model_has_refused() -> None:
    request, end = Request(RequestId(0), 1, 2, 100), End(RequestId(0), Outcome.REJECTED)
    with pytest.raises(Violation, match="not on arrival"):
        check([(2, request), (3, WorkerReady(ReplicaId(0))), (3, end)])
    failed = BatchFailed(BatchId(0), ReplicaId(0), "no cat")
    with pytest.raises(Violation, match="not on arrival, not by its model"):
        check([(2, request), (3, failed), (3, end)])
    check([(2, request), (3, replace(failed, is_refusal=True)), (3, end)])


def test_a_request_that_waits_for_a_start_is_rejected_until_the_application_is_awake() -> None:
    rules = [Rules(dataclasses.replace(APPLICATION, rest_after_s=1.0, wake_s=1.0), order=Edf())]
    request, end = Request(RequestId(0), 1, 2, 100), End(RequestId(0), Outcome.REJECTED)
    woke, awake = (2 * 10**9, WOKE), (2 * 10**9, Decided("awake", "ready", application="chain"))
    feed(Checkers(rules, APPLICATION.cluster), [(2, request), woke, (2 * 10**9, end)])
    with pytest.raises(Violation, match="not for lack of a start"):
        feed(Checkers(rules, APPLICATION.cluster), [(2, request), woke, awake, (2 * 10**9, end)])
    early = Request(RequestId(1), 1, 3, 90)
    checkers = Checkers(rules, APPLICATION.cluster)
    feed(checkers, [(2, request), (3, WOKE), (3, Decided("awake", "ready", application="chain")), (4, early)])
    assert [checkers._state.requests[RequestId(id)].patient_ns for id in (0, 1)] == [2 + 10**9, 0]


def test_requests_wait_for_a_start_only_while_no_replicas_are_planned() -> None:
    waking = Decided("waking", "no replicas", application="chain")
    with pytest.raises(Violation, match="are to wait for a start, and replicas are planned"):
        check([(0, WOKE), (0, Decided("plan", "why", plan=plan_of(1.0))), (0, waking)])


def test_a_request_that_neither_waits_nor_runs_is_not_dropped() -> None:
    """The model has refused its tensors: it fails."""
    begin: tuple[Step, ...] = (
        (WOKE, Decided("plan", "why", plan=plan_of(1.0)), in_room("first")),
        (WorkerReady(ReplicaId(0)),),
        (Request(RequestId(0), 0, 0, 100), StartBatch(BatchId(0), ReplicaId(0), "first", (RequestId(0),))),
    )
    refused = Finished(BatchId(0), ReplicaId(0), 1, faults=(0,))
    rules = [Rules(dataclasses.replace(APPLICATION, stages=APPLICATION.stages[:1]))]
    with pytest.raises(Violation, match="dropped while it neither waited nor ran"):
        follow(Checkers(rules, APPLICATION.cluster), *begin, (refused, End(RequestId(0), Outcome.DROPPED)))


def test_events_of_batches_that_do_not_run_are_ignored() -> None:
    check([(1, Finished(BatchId(3), ReplicaId(9), 10))])


def test_a_batch_is_no_larger_than_the_model_takes_even_if_the_plan_says_so() -> None:
    spec = ReplicaSpec("first", "first", Slot(1.0, "custom"), "custom-0")
    plan = Plan((StagePlan("first", (Group(spec, 1),), batch_max=5),), why="too much")
    ids = tuple(RequestId(number) for number in range(3))
    records: list[tuple[int, Record]] = [
        (0, WOKE),
        (0, Decided("plan", "too much", plan=plan)),
        (0, StartWorker(ReplicaId(0), spec)),
        (1, WorkerReady(ReplicaId(0))),
        *((2, Request(id, 2, 2, 100)) for id in ids),
        (2, StartBatch(BatchId(0), ReplicaId(0), "first", ids)),
    ]
    with pytest.raises(Violation, match="a batch of 3 where first takes up to 2"):
        check(records)


def parts() -> World:
    """Requests fall into three parts, which meet."""
    stages: dict[str, dict[str, Any]] = {"a": {}, "b": {"after": "a", "each": {}}, "c": {"after": "b", "join": True}}
    return graph_world(stages, truth={"fan_out": {"b": 3}})


def each_parts(change: Tamper) -> Tamper:
    """Tampers with one batch of parts."""
    seen = 0

    def tamper(action: Any) -> Sequence[Action]:
        nonlocal seen
        of_parts = isinstance(action, StartBatch) and bool(action.parts)
        seen += of_parts
        return change(action) if of_parts and seen == 20 else [action]

    return tamper


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda order: [replace(order, parts=order.parts[:-1])], "parts of [0-9]+ requests"),
        (
            lambda order: [replace(order, parts=tuple(part + 3 for part in order.parts))],
            "part [345], does not wait at b",
        ),
        (
            lambda order: [
                replace(order, parts=(0,) * len(order.parts), requests=order.requests[:1] * len(order.parts))
            ],
            "part 0, does not wait at b",
        ),
        (lambda order: [replace(order, parts=())], "part 0, does not wait at b"),
    ],
)
def test_a_part_that_does_not_wait_is_not_run(change: Tamper, complaint: str) -> None:
    simulate(parts())
    played = parts()
    with pytest.raises(Violation, match=complaint):
        simulate(played, core=Broken(played.setup().core(), each_parts(change)))


def test_an_answer_needs_every_part() -> None:
    played, ended = parts(), set[RequestId]()

    def hasty(action: Any) -> Sequence[Action]:
        if isinstance(action, End):
            return [] if action.request in ended else [action]
        if isinstance(action, StartBatch) and action.stage == "b" and not ended:
            ended.add(action.requests[0])
            return [action, End(action.requests[0], Outcome.SERVED)]
        return [action]

    with pytest.raises(Violation, match="served before it finished every stage"):
        simulate(played, core=Broken(played.setup().core(), hasty))


def with_paths() -> World:
    stages: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {"after": ["a", "b"]}}
    paths = [{"stages": ["a", "c"], "slo_ms": 500}, {"stages": ["b", "c"], "slo_ms": 20}]
    return graph_world(stages, paths=paths, system={"name": "static", "replicas": 2, "cores": 1.0, "drop": "never"})


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [(Outcome.LATE, Outcome.SERVED, "served, after its deadline"), (Outcome.SERVED, Outcome.LATE, "late, before")],
)
def test_the_deadline_of_its_path_decides_what_is_late(old: Outcome, new: Outcome, complaint: str) -> None:
    played = with_paths()
    simulate(played)

    def wrong(action: Any) -> Sequence[Action]:
        return [replace(action, outcome=new) if isinstance(action, End) and action.outcome is old else action]

    with pytest.raises(Violation, match=complaint):
        simulate(played, core=Broken(played.setup().core(), wrong))


def plan_of(cores: float, count: int = 1) -> Plan:
    """So many replicas of the first stage."""
    group = Group(ReplicaSpec("first", "first", Slot(cores, "custom")), count)
    return Plan((StagePlan("first", (group,), batch_max=1),), "the test says so")


SHORT = Decided("shortage", "no node has room", stage="first")


def test_who_waits_where_there_is_no_room_is_excused_unless_the_drop_rule_had_given_up() -> None:
    request = Request(RequestId(0), 0, 0, 100)
    plan = Decided("plan", "more than there is", plan=plan_of(99.0))

    def left_at(now_ns: int, drop: Age | Never) -> None:
        checkers = Checkers([Rules(APPLICATION, is_hopeless=drop.is_hopeless)], APPLICATION.cluster)
        feed(checkers, [(0, request), (0, plan), (0, SHORT), (now_ns, WOKE)])
        checkers.finish()

    left_at(10**9, Never())
    left_at(200, Age(limit=2))
    with pytest.raises(Violation, match=r"waits at \[\('first', 0\)\], and the drop policy has given it up"):
        left_at(300, Age(limit=2))


def test_room_that_has_come_ends_the_excuse_of_a_shortage() -> None:
    """All cores were given out, to a replica that is gone."""
    other = Request(RequestId(0), 0, 0, 100)
    begin: tuple[Step, ...] = ((WOKE, Decided("plan", "why", plan=plan_of(4.0)), in_room("second"), SHORT), (other,))
    follow(Checkers([Rules(APPLICATION)], APPLICATION.cluster), *begin).finish()
    with pytest.raises(Violation, match=r"request 0 waits at \[\('first', 0\)\]"):
        follow(Checkers([Rules(APPLICATION)], APPLICATION.cluster), *begin, (GONE,)).finish()


DIAMOND = Application(
    "diamond",
    100.0,
    (
        Stage("a", (Variant("v"),)),
        Stage("b", (Variant("v"),), ("a",)),
        Stage("c", (Variant("v"),), ("a",)),
        Stage("d", (Variant("v"),), ("b", "c")),
    ),
    SystemChoice("static"),
)
R0 = RequestId(0)


def state_of(application: Application, order: Edf | None = None) -> CheckerState:
    """The checkers' state with this application, and one node."""
    state = CheckerState([Node("n", "custom", 4.0, 100)])
    state.deploy(Rules(application, order))
    return state


def arrive(state: CheckerState, now_ns: int, request: Request) -> None:
    (version,) = state.versions.values()
    state.arrive(now_ns, request, version)


def run(state: CheckerState, id: int, stage: str, parts: tuple[int, ...] = (0,), *counts: tuple[int, ...]) -> bool:
    """These parts of request 0 pass a stage in one batch; whether the request has finished every stage."""
    return bool(state.pass_on(0, loaded(state, id, stage, parts), Finished(BatchId(id), ReplicaId(id), 1, counts)))


def loaded(state: CheckerState, id: int, stage: str, parts: tuple[int, ...] = (0,)) -> CheckedReplica:
    """A new replica that runs these parts of request 0."""
    state.start(ReplicaId(id), ReplicaSpec(stage, "v", Slot(1.0), "n"))
    replica, entry = state.replicas[ReplicaId(id)], state.requests[R0]
    replica.batch = BatchId(id)
    replica.visits = [(entry, entry.waiting.pop((stage, part))[1]) for part in parts]
    return replica


def test_a_request_enters_a_stage_when_all_before_it_are_done() -> None:
    state = state_of(DIAMOND)
    arrive(state, 0, Request(R0, 0, 0, 100))
    assert not run(state, 1, "a")
    assert sorted(state.requests[R0].waiting) == [("b", 0), ("c", 0)]
    assert not run(state, 2, "c")
    assert sorted(state.requests[R0].waiting) == [("b", 0)]
    assert not run(state, 3, "b")
    assert sorted(state.requests[R0].waiting) == [("d", 0)]
    assert run(state, 4, "d")


@pytest.mark.parametrize(("has_died", "expected"), [(False, (5, 100, 0)), (True, (5, FIRST_KEY, 1))])
def test_a_lost_replica_puts_its_batch_back(has_died: bool, expected: tuple[int, int, int]) -> None:
    state = state_of(DIAMOND, Edf())
    arrive(state, 0, Request(R0, 0, 0, 100))
    loaded(state, 0, "a")
    state.step = 5
    state.forget(ReplicaId(0), has_died=has_died)
    ((step, visit, key),) = state.requests[R0].waiting.values()
    assert (step, key, visit.attempts) == expected
    assert not state.replicas
    assert not state.nodes["n"].replicas


def test_the_smallest_key_is_that_of_a_visit_that_still_waits() -> None:
    state = state_of(DIAMOND, Edf())
    for step, (id, deadline_ns) in enumerate([(0, 50), (1, 20), (2, 30), (3, 10)]):
        state.step = step
        arrive(state, 0, Request(RequestId(id), 0, 0, deadline_ns))
    waiting = state.waiting["a"]
    assert waiting.smallest(state.requests, 4) == 10
    assert waiting.smallest(state.requests, 3) == 20, "request 3 came in this very step"
    del state.requests[RequestId(1)]
    assert waiting.smallest(state.requests, 3) == 30
    state.requests.clear()
    assert waiting.smallest(state.requests, 9) is None


GPU = Device("gpu0", "T4", 1_000, clients_max=2)
USED = {
    ("a", "v", "custom"): Profile(latency_ms=Quadratic(0, 1, 1), max_batch=1, max_cores=4, memory_bytes=30),
    ("a", "g", "custom"): Profile(
        latency_ms=Quadratic(0, 1, 1), max_batch=1, max_cores=4, accelerator="T4", device_memory_bytes=400
    ),
}


def replica(cores: float = 1.0, variant: str = "v", device: str | None = None, share: float = 1.0) -> CheckedReplica:
    slot = Slot(cores, "custom", "T4" if device else "", share)
    return CheckedReplica(ReplicaSpec("a", variant, slot, "n", device))


def excess(*replicas: CheckedReplica) -> str:
    node = CheckedNode(Node("n", "custom", 4.0, 100, devices=(GPU,)))
    node.replicas = {ReplicaId(id): each for id, each in enumerate(replicas)}
    return node.excess(USED)


def test_what_does_not_fit_on_a_node_is_named() -> None:
    assert excess(replica(2.0), replica(2.0)) == ""
    assert excess(replica(2.0), replica(2.5)) == "n has 4 cores and gives out 4.5"
    assert excess(*[replica()] * 4) == "n has 100 bytes and gives out 120"


def test_what_does_not_fit_on_a_device_is_named() -> None:
    assert excess(replica(0.5, "g", "gpu0", 0.4)) == ""
    assert excess(*[replica(0.5, "g", "gpu0", 0.6)] * 2) == "n gives out 1.2 of device gpu0"
    assert excess(*[replica(0.5, "g", "gpu0", 0.0)] * 2) == ""
    assert excess(*[replica(0.5, "v", "gpu0", 0.0)] * 3) == "gpu0 of n takes 2 clients and has 3"
    big = {key: replace(profile, accelerator="T4", device_memory_bytes=600) for key, profile in USED.items()}
    node = CheckedNode(Node("n", "custom", 4.0, 100, devices=(GPU,)))
    node.replicas = {ReplicaId(id): replica(0.5, "g", "gpu0", 0.0) for id in range(2)}
    assert node.excess(big) == "gpu0 of n has 1000 bytes and gives out 1200"


def test_where_a_replica_must_not_start_is_named() -> None:
    node = CheckedNode(Node("n", "custom", 4.0, 100, devices=(GPU,)))
    assert node.misfit(replica().spec) == node.misfit(replica(device="gpu0").spec) == ""
    assert node.misfit(ReplicaSpec("a", "v", Slot(1.0, "other"), "n")) == "n is of kind custom, not other"
    assert node.misfit(replica(device="gpu1").spec) == "n has no device gpu1"
    wants = ReplicaSpec("a", "v", Slot(1.0, "custom", "V100"), "n", "gpu0")
    assert node.misfit(wants) == "it needs accelerator 'V100' and gets 'T4'"
    assert node.misfit(replace(wants, device=None)) == "it needs accelerator 'V100' and gets 'none'"
    node.state = NodeState.LOST
    assert node.misfit(replica().spec) == "n is lost, not ready"


def test_a_resize_under_way_takes_the_larger_number_of_cores() -> None:
    growing = replica(1.0)
    growing.wanted_cores = 5.0
    assert excess(growing) == "n has 4 cores and gives out 5"


PARTS = Application(
    "parts",
    100.0,
    (
        Stage("a", (Variant("v"),)),
        Stage("b", (Variant("v"),), ("a",), each=Each("a")),
        Stage("c", (Variant("v"),), ("a", "b"), join=True),
    ),
    SystemChoice("static"),
)


def test_parts_wait_and_run_independently() -> None:
    state = state_of(PARTS)
    arrive(state, 0, Request(R0, 0, 0, 100))
    assert not run(state, 1, "a", (0,), (3, 1))
    assert sorted(state.requests[R0].waiting) == [("b", 0), ("b", 1), ("b", 2)]
    assert not run(state, 2, "b", (0, 2))
    assert sorted(state.requests[R0].waiting) == [("b", 1)]
    assert not run(state, 3, "b", (1,))
    assert sorted(state.requests[R0].waiting) == [("c", 0)]
    assert run(state, 4, "c", (0,))
    assert state.requests[R0].is_done


def test_a_request_that_sends_nothing_on_is_done() -> None:
    state = state_of(PARTS)
    arrive(state, 0, Request(R0, 0, 0, 100))
    assert run(state, 1, "a", (0,), (0, 0))


def test_parts_of_a_lost_replica_wait_again_as_the_parts_they_were() -> None:
    state = state_of(PARTS)
    arrive(state, 0, Request(R0, 0, 0, 100))
    run(state, 1, "a", (0,), (2, 1))
    replica = loaded(state, 2, "b", (1, 0))
    state.forget(ReplicaId(2), has_died=False)
    assert sorted(state.requests[R0].waiting) == [("b", 0), ("b", 1)]
    assert not replica.visits


Step = tuple[Record, ...]
"""An event and the actions that answer it."""


def follow(checkers: Checkers, *steps: Step) -> Checkers:
    """Show the checkers these steps, one in each nanosecond."""
    for now_ns, step in enumerate(steps):
        for record in step:
            checkers.append(now_ns, record)
    return checkers


# Nodes that come and go

RENTED = Node("rented", "custom", 4.0, 10, on_demand=True)
GONE = WorkerLost(ReplicaId(0), "why")


def in_room(stage: str, node: str = "custom-0", id: int = 0) -> StartWorker:
    return StartWorker(ReplicaId(id), ReplicaSpec(stage, "first", Slot(1.0, "custom"), node))


START, ACQUIRE, RELEASE = in_room("first", "rented"), AcquireNode("rented"), ReleaseNode("rented")
ACQUIRED: tuple[Step, ...] = ((WOKE, ACQUIRE), (NodeReady(RENTED),))


def rented(*steps: Step) -> Checkers:
    return follow(Checkers([Rules(APPLICATION)], [RENTED]), *steps)


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        (((WOKE, START),), "rented is released, not ready"),
        (((WOKE, ACQUIRE, START),), "rented is acquiring, not ready"),
        ((*ACQUIRED, (NodeLost("rented", "why"), START)), "rented is lost, not ready"),
        ((*ACQUIRED, (WOKE, RELEASE, START)), "rented is releasing, not ready"),
        (((WOKE, ACQUIRE, ACQUIRE),), "the node is acquiring"),
        ((*ACQUIRED, (WOKE, ACQUIRE)), "the node is ready"),
        ((*ACQUIRED, (WOKE, START, RELEASE)), r"still holds replicas \[0\]"),
        (((WOKE, RELEASE),), "not there, or not on demand"),
        (((WOKE, AcquireNode("moon")),), "cannot be acquired"),
    ],
)
def test_nodes_are_used_while_they_are_ready_and_released_empty(steps: tuple[Step, ...], complaint: str) -> None:
    with pytest.raises(Violation, match=complaint):
        rented(*steps)


def test_a_node_is_charged_once_from_its_order_until_it_is_gone() -> None:
    given_back = (*ACQUIRED, (WOKE, START), (GONE,), (WOKE, RELEASE), (NodeReleased("rented"),))
    assert rented(*given_back).charged_ns == {"rented": 5}
    again = (*given_back, (NodeReleased("rented"),), *ACQUIRED, (NodeReady(RENTED),))
    assert rented(*again).charged_ns == {"rented": 5 + 2}
    assert rented((WOKE, ACQUIRE), (NodeLost("rented", "none left"),), (WOKE,)).charged_ns == {"rented": 1}


# Several applications, and versions


def short(name: str, version: str = "1") -> Application:
    """An application of one stage, `first`."""
    (stage, *_) = APPLICATION.stages
    own = Application(name, 100.0, (stage,), APPLICATION.system, APPLICATION.cluster)
    return own.qualified(version)


def several(*steps: Step) -> Checkers:
    """Applications `a` and `b`; `a@2` may be deployed."""
    rules = [Rules(short("a")), Rules(short("b"))]
    return follow(Checkers(rules, APPLICATION.cluster, later=[Rules(short("a", "2"))]), *steps)


def sent(id: int, application: str = "a", version: str = "") -> Request:
    return Request(RequestId(id), 0, 0, 1_000, (), application, version)


def planned(stage: str) -> Decided:
    group = Group(ReplicaSpec(stage, "first", Slot(1.0, "custom")), 1)
    return Decided("plan", "one", plan=Plan((StagePlan(stage, (group,), batch_max=2),), "one"))


def rollout(version: str, state: VersionState, share: float = 1.0) -> Rollout:
    return Rollout("a", version, state, share, "why")


def batch_of(stage: str, *ids: int, batch: int = 0, replica: int = 0) -> StartBatch:
    return StartBatch(BatchId(batch), ReplicaId(replica), stage, tuple(map(RequestId, ids)))


SERVING_B: tuple[Step, ...] = ((WOKE, planned("b/first"), in_room("b/first")), (WorkerReady(ReplicaId(0)),))
DEPLOYED: tuple[Step, ...] = ((Deployed("a", "2", {}), rollout("2", VersionState.STARTING, 0.0)),)
CANARY: tuple[Step, ...] = (*DEPLOYED, (WOKE, rollout("2", VersionState.CANARY, 0.1)))
RETIRED: tuple[Step, ...] = (
    *DEPLOYED,
    (WOKE, rollout("2", VersionState.SERVING), rollout("1", VersionState.RETIRING, 0.0)),
    (WOKE, rollout("1", VersionState.RETIRED, 0.0)),
)


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        (((*SERVING_B, (sent(0), batch_of("b/first", 0)))), "request 0, part 0, does not wait at b/first"),
        (((sent(0, "c"),), (WOKE,)), "request 0 for 'c' is given to no version"),
        (((sent(0), Assigned(RequestId(0), "b")),), "is assigned that has not just arrived"),
        ((*CANARY, (sent(0), Assigned(RequestId(0), "b"))), "for 'a' is given to 'b'"),
        ((*CANARY, (sent(0, version="1"), Assigned(RequestId(0), "a@2"))), "'a@2' is canary and gets a request"),
        ((*DEPLOYED, (sent(0), Assigned(RequestId(0), "a@2"))), "'a@2' is starting and gets a request"),
        ((*CANARY, (sent(0),), (WOKE,)), "request 0 for 'a' is given to no version"),
        ((*CANARY, (sent(0), Assigned(RequestId(1), "a"))), "is assigned that has not just arrived"),
        ((*RETIRED, (WOKE, in_room("a/first"))), "of no application version"),
        (((sent(0),), *RETIRED), r"retires that has open requests \[0\]"),
        (((WOKE, in_room("a/first")), *RETIRED), r"retires that has replicas \[0\]"),
        (((WOKE, rollout("1", VersionState.RETIRED, 0.0)),), "version 1 of 'a' was serving"),
        (((WOKE, rollout("7", VersionState.SERVING)),), "no such version"),
        (((Deployed("c", "1", {}),),), "nobody has declared c"),
    ],
)  # fmt: skip
def test_a_request_is_served_by_a_version_of_its_application_that_serves(
    steps: tuple[Step, ...], complaint: str
) -> None:
    with pytest.raises(Violation, match=complaint):
        several(*steps)


def test_a_version_replaces_another_and_no_request_is_lost() -> None:
    checkers = several(
        (WOKE, planned("a/first"), in_room("a/first")),
        (WorkerReady(ReplicaId(0)),),
        (sent(0), batch_of("a/first", 0)),
        *DEPLOYED,
        (WOKE, planned("a@2/first"), in_room("a@2/first", id=1)),
        (WorkerReady(ReplicaId(1)),),
        (WOKE, rollout("2", VersionState.SERVING), rollout("1", VersionState.RETIRING, 0.0)),
        (sent(1), Assigned(RequestId(1), "a@2"), batch_of("a@2/first", 1, batch=1, replica=1)),
        (Finished(BatchId(0), ReplicaId(0), 1), End(RequestId(0), Outcome.SERVED)),
        (Finished(BatchId(1), ReplicaId(1), 1), End(RequestId(1), Outcome.SERVED)),
        (WOKE, StopWorker(ReplicaId(0), "it retires")),
        (WorkerLost(ReplicaId(0), "gone"),),
        (WOKE, rollout("1", VersionState.RETIRED, 0.0)),
        (sent(2),),
        (sent(3, "b"), End(RequestId(3), Outcome.REJECTED)),
        (sent(4, "c"), End(RequestId(4), Outcome.REJECTED)),
        (WOKE, batch_of("a@2/first", 2, batch=2, replica=1)),
        (Finished(BatchId(2), ReplicaId(1), 1), End(RequestId(2), Outcome.SERVED)),
    )  # fmt: skip
    checkers.finish()


def test_the_batches_of_a_group_are_as_large_as_the_group_allows() -> None:
    small, large = Slot(1.0, "custom"), Slot(2.0, "custom")
    groups = (Group(ReplicaSpec("first", "first", small), 1, 1), Group(ReplicaSpec("first", "first", large), 1))
    plan = Plan((StagePlan("first", groups, batch_max=2),), "two groups")
    starts = [
        StartWorker(ReplicaId(id), ReplicaSpec("first", "first", slot, "custom-0"))
        for id, slot in enumerate((small, large))
    ]
    begin: list[Step] = [(WOKE, Decided("plan", "two", plan=plan), *starts)]
    begin += [(WorkerReady(ReplicaId(id)),) for id in range(2)]
    requests: list[Step] = [(Request(RequestId(id), 0, 0, 100),) for id in range(2)]

    def run(replica: int) -> None:
        order = StartBatch(BatchId(0), ReplicaId(replica), "first", (RequestId(0), RequestId(1)))
        follow(Checkers([Rules(APPLICATION)], APPLICATION.cluster), *begin, *requests, (WOKE, order))

    run(1)
    with pytest.raises(Violation, match="a batch of 2 where the plan allows up to 1"):
        run(0)


def test_a_plan_ends_the_excuse_that_there_is_none() -> None:
    steps = ((Request(RequestId(0), 0, 0, 100),), (WOKE, Decided("planner", "why", application="chain")))
    follow(Checkers([Rules(APPLICATION)], APPLICATION.cluster), *steps).finish()
    for plan in (plan_of(1.0), plan_of(1.0, count=0)):
        with pytest.raises(Violation, match="1 requests never ended"):
            follow(
                Checkers([Rules(APPLICATION)], APPLICATION.cluster), *steps, (WOKE, Decided("plan", "why", plan=plan))
            ).finish()


@pytest.mark.parametrize("why", ["no policy could plan", "the plan has no replica"])
def test_who_waits_for_a_plan_that_cannot_be_made_is_excused(why: str) -> None:
    request = Request(RequestId(0), 0, 0, 100)
    nothing = Plan((StagePlan("first", (), batch_max=1),), "no cores are left", feasible=False)
    note = Decided("planner", why, application="chain") if "policy" in why else Decided("plan", why, plan=nothing)
    checkers = Checkers([Rules(APPLICATION)], APPLICATION.cluster)
    follow(checkers, (request,), (WOKE, note)).finish()
    with pytest.raises(Violation, match="1 requests never ended"):
        follow(Checkers([Rules(APPLICATION)], APPLICATION.cluster), (request,), (WOKE,)).finish()
