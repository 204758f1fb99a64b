"""The state of a deployment: records reach the version that they are about. By hand, and against cores at random."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import (
    AcquireNode,
    Action,
    Decided,
    End,
    ReleaseNode,
    RequestPlan,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    VersionState,
)
from sloop.app.graph import Graph, GraphStage
from sloop.events import (
    WOKE,
    Cancelled,
    Deployed,
    Draining,
    Event,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    Planned,
    Promoted,
    Removed,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.runlog.fold import DeploymentState
from sloop.runlog.run import Kept
from sloop.runlog.versions import OnlyGraph, VersionRecord
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import (
    Canary,
    Group,
    Life,
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
)
from tests.core.scene import Deployment
from tests.counting import calls_of
from tests.runlog.story import STORY, Parts, Rows, Told, asks, finishes, goes_to, rolls, runs, starts


def state_of(*names: str, **options: Any) -> DeploymentState:
    return DeploymentState([Parts(name) for name in names], build=Parts, **{"start_ns": 0} | options)


def fold(state: DeploymentState, *rows: Told) -> DeploymentState:
    """Append records at these milliseconds."""
    for at_ms, record in rows:
        state.append(ms(at_ms), record)
    return state


def arrivals(state: DeploymentState) -> dict[str, int]:
    return {record.key: sum(second.arrivals for second in record.run.seconds) for record in state.records}


def test_each_application_has_its_own_requests_replicas_and_batches() -> None:
    state = fold(
        state_of("a", "b"),
        *(starts(0, 0, "a"), starts(0, 1, "b"), (5, WorkerReady(ReplicaId(0))), (5, WorkerReady(ReplicaId(1)))),
        *(asks(1, 10, "a"), asks(2, 10, "b"), asks(3, 12, "b"), runs(12, 0, 0, "a", 1)),
    )
    a, b = (state.versions[name].run for name in "ab")
    assert (a.waiting, b.waiting) == (0, 2)
    assert (list(a.replicas), list(b.replicas)) == ([0], [1])
    assert (state.run_of_replica(ReplicaId(1)), state.run_of_request(RequestId(2))) == (b, b)
    fold(state, runs(20, 1, 1, "b", 2, 3), *finishes(30, 0, 0, 1), *finishes(45, 1, 1, 2, 3))
    assert (list(a.served_ns), list(b.served_ns)) == ([ms(20)], [ms(35), ms(33)])
    assert (list(a.stages["a/only"].waits_ns), list(b.stages["b/only"].waits_ns)) == ([ms(2)], [ms(10), ms(8)])
    assert state.run_of_request(RequestId(2)) is None
    fold(state, (50, StopWorker(ReplicaId(1), "idle")), (60, WorkerStopped(ReplicaId(1))), (60, WOKE))
    assert (b.replicas, state.run_of_replica(ReplicaId(1))) == ({}, None)
    state.advance()
    assert (a.cost.total_microcore_ns, b.cost.total_microcore_ns) == (2_000_000 * ms(60), 2_000_000 * ms(60))


def test_all_versions_share_the_start_of_the_run() -> None:
    state = fold(state_of("a", "b", start_ns=None), asks(1, 1_500, "a"), asks(2, 4_000, "b"))
    state.advance()
    assert [record.run.start_ns for record in state.records] == [ms(1_500)] * 2
    assert [[second.start_s for second in record.run.seconds] for record in state.records] == [[0, 1, 2]] * 2
    assert [[second.arrivals for second in record.run.seconds] for record in state.records] == [[1, 0, 0], [0, 0, 1]]


def test_one_version_after_the_other() -> None:
    """Version 2 gets a tenth of the requests, then all; version 1 ends."""
    state = fold(state_of("a"), starts(0, 0, "a"), asks(1, 10, "a"), runs(10, 0, 0, "a", 1))
    assert state.only is state.versions["a"].run
    fold(
        state,
        (1_000, Deployed("a", "2", {}, Canary(share=0.1))),
        rolls(1_000, "2", VersionState.STARTING, 0.0, "deployed"),
        *finishes(1_010, 0, 0, 1),
        *(asks(2, 1_020, "a"), goes_to(1_020, 2, "a"), starts(1_020, 1, "a@2")),
        rolls(1_500, "2", VersionState.CANARY, 0.1, "it is ready"),
    )
    first, second = state.records
    assert (first.key, second.key, second.version) == ("a", "a@2", "2")
    assert (first.state, first.share, second.state, second.share) == (
        *(VersionState.SERVING, 0.9),
        *(VersionState.CANARY, 0.1),
    )
    fold(state, asks(3, 1_600, "a"))
    assert state.run_of_request(RequestId(3)) is None, "nobody has said yet"
    fold(state, goes_to(1_600, 3, "a@2"), runs(1_600, 1, 1, "a@2", 3))
    assert (first.run.waiting, second.run.waiting, list(second.run.open)) == (1, 0, [3])
    fold(
        state,
        *finishes(1_650, 1, 1, 3),
        rolls(2_000, "2", VersionState.SERVING, 1.0, "promoted"),
        rolls(2_000, "1", VersionState.RETIRING, 0.0, "version 2 serves all requests"),
        *(runs(2_000, 2, 0, "a", 2), *finishes(2_100, 2, 0, 2), (2_100, WorkerStopped(ReplicaId(0)))),
        rolls(3_000, "1", VersionState.RETIRED, 0.0, "version 2 serves all requests"),
        asks(4, 4_000, "a"),
    )
    assert (first.has_ended, first.why, second.share) == (True, "version 2 serves all requests", 1.0)
    assert (first.run.now_ns, second.run.begun_ns, second.run.now_ns) == (s(3), s(1), s(4))
    assert not first.run.replicas, "the end of one that began while there was only one version is told its run"
    assert (list(first.run.served_ns), list(second.run.served_ns)) == ([ms(1_000), ms(1_080)], [ms(50)])
    assert arrivals(state) == {"a": 2, "a@2": 2}
    assert [second.start_s for second in second.run.seconds] == [1, 2, 3, 4]
    assert state.rollouts["a", VersionState.RETIRED] == 1
    assert state.decisions == {("a", "rollout"): 5}
    state.forget(first)
    assert ([record.key for record in state.records], list(state.versions)) == (["a@2"], ["a@2"])


def test_a_request_of_the_instant_in_which_a_version_ends_goes_to_the_one_that_is_left() -> None:
    """The core forgets the old version before it takes the request, and so does not assign it."""
    state = fold(
        state_of("a"),
        (0, Deployed("a", "2", {})),
        rolls(0, "2", VersionState.STARTING, 0.0),
        rolls(10, "2", VersionState.SERVING, 1.0),
        rolls(10, "1", VersionState.RETIRING, 0.0),
        asks(1, 20, "a"),
        rolls(20, "1", VersionState.RETIRED, 0.0),
        *(starts(20, 0, "a@2"), runs(20, 0, 0, "a@2", 1), *finishes(30, 0, 0, 1)),
    )
    assert arrivals(state) == {"a": 0, "a@2": 1}
    assert list(state.versions["a@2"].run.stages["a@2/only"].waits_ns) == [0]


def test_requests_that_no_version_serves_count_at_the_newest_version() -> None:
    refused = [(5, End(RequestId(id), Outcome.REJECTED, "it is not served")) for id in (1, 2, 3)]
    state = fold(
        state_of("a", "b"),
        (0, Deployed("a", "2", {})),
        rolls(0, "2", VersionState.STARTING, 0.0),
        *(asks(1, 4, "a", version="7"), refused[0]),
        rolls(4, "1", VersionState.RETIRED, 0.0),
        rolls(4, "2", VersionState.RETIRED, 0.0),
        *(asks(2, 4, "a"), refused[1], asks(3, 4, "nobody"), refused[2]),
    )
    assert [sum(s.rejected for s in run.seconds) for run in state.runs] == [0, 0, 2, 1]
    assert state.unserved is state.runs[-1]
    assert all(not run.open for run in state.runs)


def test_an_application_may_come_back() -> None:
    state = fold(
        state_of("a", "b"),
        asks(1, 1, "b"),
        (2, Removed("b")),
        (2, End(RequestId(1), Outcome.DROPPED, "removed")),
        (2, Rollout("b", "1", VersionState.RETIRED, 0.0, "removed")),
        (5_000, Deployed("b", "1", {})),
        (5_000, Rollout("b", "1", VersionState.SERVING, 1.0, "deployed: the first version")),
        asks(2, 5_001, "b"),
    )
    assert [(record.key, record.state) for record in state.records] == [
        *(("a", VersionState.SERVING), ("b", VersionState.RETIRED), ("b", VersionState.SERVING)),
    ]
    assert state.versions["b"] is state.records[2]
    assert [len(record.run.open) for record in state.records] == [0, 0, 1]
    assert list(state.applications) == ["a", "b"]


def test_a_definition_that_the_core_refuses_adds_nothing() -> None:
    def fails(name: str, version: str, definition: Mapping[str, Any]) -> Parts:
        raise AssertionError

    state = DeploymentState([Parts("a")], build=fails, start_ns=0)
    fold(state, (0, Deployed("a", "2", {})), rolls(0, "2", VersionState.RETIRED, 0.0, "its definition is not valid"))
    assert [record.key for record in state.records] == ["a"]
    assert state.rollouts["a", VersionState.RETIRED] == 1


def test_a_fold_that_cannot_learn_versions_says_so() -> None:
    state = DeploymentState([Parts("a")], start_ns=0)
    fold(state, (0, Deployed("a", "2", {})))
    with pytest.raises(AssertionError, match="give it `build`"):
        fold(state, rolls(0, "2", VersionState.STARTING, 0.0))


def test_records_of_the_instant_in_which_a_second_version_comes_are_routed() -> None:
    state = state_of("a")
    rollout = rolls(0, "2", VersionState.STARTING, 0.0)[1]
    told = [starts(0, 4, "a")[1], Deployed("a", "2", {}), rollout, starts(0, 5, "a@2")[1]]
    state.extend([(0, record) for record in told])
    assert [list(record.run.replicas) for record in state.records] == [[4], [5]]


PLAN = Plan((StagePlan("a/only", (Group(ReplicaSpec("a/only", "v", Slot(1.0)), 1),), 1),), "one is enough")


def test_decisions_are_counted_by_version_and_kept_for_all() -> None:
    state = fold(
        state_of("a", "b", kept=Kept(decisions=3)),
        (0, Decided("plan", PLAN.why, plan=PLAN, application="a")),
        (1, Decided("planner", "no new plan: ValueError: x", application="b")),
        (2, Decided("node", "1 more of x")),
        (3, Decided("shortage", "no room", "a/only", application="a")),
        (4, Draining()),
    )
    assert state.decisions == {("a", "plan"): 1, ("b", "planner"): 1, ("", "node"): 1, ("a", "shortage"): 1}
    assert [getattr(decided, "kind", "") for _, decided in state.last_decisions] == ["planner", "node", "shortage"]
    assert (state.versions["a"].run.plan, state.versions["b"].run.plan) == (PLAN, None)
    assert state.versions["b"].planner_error == "no new plan: ValueError: x"
    assert state.draining


def test_the_only_application_gets_decisions_of_any_name() -> None:
    """A fold of only a graph does not know the application's name."""
    state = DeploymentState([OnlyGraph(Parts("a").graph)], start_ns=0)
    fold(state, (0, Decided("plan", PLAN.why, plan=PLAN, application="a")), (0, Decided("node", "1 more")))
    assert (state.only.plan, state.decisions) == (PLAN, {("", "plan"): 1, ("", "node"): 1})


def test_times_of_planning() -> None:
    asked, answered = (RequestPlan(1), RequestPlan(2)), (Planned(1, {}), Planned(2, {}))
    plans = [(10, asked[0]), (15, answered[0]), (20, asked[1]), (25, answered[0]), (29, answered[1])]
    assert list(fold(state_of("a"), *plans, (30, answered[1])).plan_ns) == [ms(5), ms(9)]


NODE = Node("n-fast", "fast", 4, 0, usd_per_h=3600.0)
RENTED = Node("n1", "y", 4, 0, usd_per_h=7200.0, on_demand=True)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
@pytest.mark.parametrize("start_ns", [0, None])
def test_nodes_are_charged_while_they_are_held(names: tuple[str, ...], start_ns: int | None) -> None:
    state = fold(
        state_of(*names, nodes=[NODE, RENTED], start_ns=start_ns),
        (0, WOKE),
        starts(0, 0, "a"),
        (1_000, AcquireNode("n1")),
        (3_000, NodeReady(RENTED)),
        (4_000, NodeLost("n-fast", "it burns")),
        (5_000, ReleaseNode("n1")),
        (6_000, NodeReleased("n1")),
        (7_000, WOKE),
    )
    state.advance()
    assert (state.nodes.records["n-fast"].state, state.nodes.records["n-fast"].since_ns) == (NodeState.LOST, s(4))
    assert [(row.hardware, row.held_s, row.usd, row.most) for row in state.nodes.rows()] == [
        *(("fast", 4.0, 4.0, 1), ("y", 5.0, 10.0, 1)),
    ]
    assert state.records[0].run.cost.usd == 7 * 2 / 4, "the replica's share of a node that nobody reported lost with it"


def test_a_replica_on_a_node_that_has_joined_pays_its_price() -> None:
    joined = Node("n-fast", "fast", 4, 0, usd_per_h=3600.0)
    state = fold(state_of("a"), (0, NodeReady(joined)), starts(0, 0, "a"), (2_000, WOKE))
    state.advance()
    assert (state.only.cost.usd, state.nodes.usd) == (1.0, 2.0)


def test_cores_by_kind_of_hardware_second_by_second() -> None:
    other = StartWorker(ReplicaId(1), ReplicaSpec("a/only", "v", Slot(1.0, "slow")))
    state = fold(state_of("a"), starts(0, 0, "a"), (1_500, other), (3_000, WOKE))
    state.only.close_seconds()
    first, second, third, last = state.only.seconds
    assert (first.hardware_microcore_ns, last.microcore_ns) == ((), 0)
    assert second.hardware_microcore_ns == (2_000_000 * NS_PER_S, 500_000 * NS_PER_S)
    assert third.hardware_microcore_ns == (2_000_000 * NS_PER_S, 1_000_000 * NS_PER_S)


def test_dormant_applications_cost_nothing() -> None:
    """Of 200 applications only one has requests: the others are not touched, second after second."""
    seen = list[VersionRecord]()
    state = state_of(*(f"m{n}" for n in range(200)), kept=Kept(seconds=60), on_second=seen.append)
    state.append(0, WOKE)

    def busy(seconds: int) -> None:
        for at_s in range(seconds):
            state.append(s(at_s), asks(at_s, 1_000 * at_s, "m7")[1])

    calls = calls_of(lambda: busy(50)).total()
    assert calls < 50 * 30
    assert {record.key for record in seen} == {"m7"}
    assert len(state.versions["m3"].run.seconds) == 1
    state.advance()
    assert len(state.versions["m3"].run.seconds) == 50


def test_a_single_application_takes_its_records_directly() -> None:
    """As the guard of one `RunState` in test_fold: nothing is added for a deployment of one."""
    rows: Rows = [row for row in STORY if row[0] <= ms(180)]
    parts = [OnlyGraph(Graph([GraphStage("classify")]))]

    def calls(append: Any) -> dict[str, int]:
        """Calls of the deployment's own methods."""

        def play() -> None:
            for now_ns, record in rows:
                append(now_ns, record)

        return {name: n for name, n in calls_of(play).items() if name.startswith("DeploymentState.")}

    fixed, open_ended, extended = (DeploymentState(parts, start_ns=0, build=build) for build in (None, Parts, Parts))
    rare = {"DeploymentState._decide": 1, "DeploymentState.version_for": 1, "DeploymentState._note": 1}
    assert fixed.append == fixed.only.append
    assert calls(fixed.append) == rare
    assert calls(open_ended.append) == rare | {"DeploymentState._append_any": len(rows)}
    by_instant = calls(lambda now_ns, record: extended.extend([(now_ns, record)]))
    assert by_instant == rare | {"DeploymentState.extend": len(rows)}


# Against a core


class Player:
    """Plays a random run on a core with two applications, their canaries and redeployments, and folds it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.scene = Deployment({"a": 1.0, "b": 1.0}, cores=8)
        self.state = DeploymentState(
            [Parts("a"), Parts("b")], nodes=[self.scene.node], build=Parts, start_ns=0, kept=Kept(decisions=1000)
        )
        self.now_ns = 0
        self.requests = 0
        self.versions = Counter(a=1, b=1)
        self.running: dict[ReplicaId, StartBatch] = {}
        self.starting = list[ReplicaId]()
        self.stopping = list[ReplicaId]()
        self.went_to: dict[RequestId, str] = {}
        self.ends: dict[RequestId, End] = {}

    def tell(self, event: Event) -> None:
        actions = self.scene.core.handle(self.now_ns, event)
        self.scene._replace_scripts()
        self.state.append(self.now_ns, event)
        for action in actions:
            self.state.append(self.now_ns, action)
            self.obey(action)

    def obey(self, action: Action) -> None:
        if isinstance(action, StartBatch):
            self.running[action.replica] = action
            self.went_to |= dict.fromkeys(action.requests, action.stage.rpartition("/")[0])
        elif isinstance(action, StartWorker):
            self.starting.append(action.worker)
        elif isinstance(action, StopWorker):
            self.running.pop(action.worker, None)
            self.stopping.append(action.worker)
        elif isinstance(action, End):
            assert action.request not in self.ends
            self.ends[action.request] = action

    def step(self) -> None:
        chance = self.chance
        self.now_ns += chance.choice([0, 0, ms(1), ms(7), ms(40), ms(300)])
        if self.now_ns >= self.scene.core.wake_ns:
            self.tell(WOKE)
        name = chance.choice("ab")
        kind = chance.random()
        if kind < 0.45:
            self.requests += 1
            id, now_ns, version = RequestId(self.requests), self.now_ns, chance.choice(["", "", "", "2", "9"])
            self.tell(Request(id, now_ns, now_ns, now_ns + ms(200), (), name, version))
        elif kind < 0.7 and self.running:
            replica = chance.choice(sorted(self.running))
            self.tell(Finished(self.running.pop(replica).batch, replica, 1))
        elif kind < 0.8 and self.starting:
            self.tell(WorkerReady(self.starting.pop(0)))
        elif kind < 0.86 and self.stopping:
            self.tell(WorkerStopped(self.stopping.pop(0)))
        elif kind < 0.88 and self.running:
            replica = chance.choice(sorted(self.running))
            del self.running[replica]
            self.tell(WorkerLost(replica, "killed"))
        elif kind < 0.91 and self.requests:
            self.tell(Cancelled(RequestId(chance.randint(1, self.requests))))
        elif kind < 0.95:
            self.versions[name] += 1
            canary = chance.choice([None, Canary(share=0.4, requests_min=5, promote_after_s=1)])
            broken = chance.random() < 0.2
            self.tell(Deployed(name, str(self.versions[name]), {"cores": 1.0, "broken": broken}, canary))
        elif kind < 0.97:
            self.tell(Promoted(name, str(self.versions[name])))
        elif kind < 0.975:
            self.tell(Removed(name, str(chance.randint(1, self.versions[name]))))

    def check(self) -> None:
        core, state = self.scene.core, self.state
        present = {record.key: record for record in state.records if not record.has_ended}
        assert present.keys() == core.state.applications.keys()
        for key, application in core.state.applications.items():
            (stage,) = application.all_stages
            run = present[key].run
            assert run.waiting == len(stage.queue.visits), key
            assert set(run.replicas) == set(stage.pool.replicas), key
            assert run.count(Life.READY) == sum(r.life is Life.READY for r in stage.pool.replicas.values())
            assert run.plan == core.plan_of(key)
        for name in "ab":
            for version in core.versions(name):
                assert present[version.application.key].state is version.state
            shares = [each.share for each in present.values() if each.application == name]
            assert sum(shares) <= 1 + 1e-9, "no two versions get all requests"


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_the_fold_of_several_versions_agrees_with_the_core(seed: int) -> None:
    player = Player(seed)
    player.tell(WOKE)
    for _ in range(250):
        player.step()
        player.check()
    state = player.state
    assert sum(arrivals(state).values()) == player.requests
    by_key = Counter[str]()
    for record in state.records:
        by_key[record.key] += len(record.run.served_ns) + len(record.run.late_ns)
    answered = [id for id, end in player.ends.items() if end.outcome in (Outcome.SERVED, Outcome.LATE)]
    assert +by_key == Counter(player.went_to[id] for id in answered)
    outcomes = Counter(end.outcome for end in player.ends.values())
    for outcome in (Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED):
        assert sum(len(record.run.missed_ns[outcome]) for record in state.records) == outcomes[outcome]
