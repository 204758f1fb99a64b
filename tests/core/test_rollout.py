"""Rollouts: a version starts beside the one that serves, takes over when it is ready, or serves a share as a canary."""

from collections.abc import Sequence
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.actions import (
    Action,
    Assigned,
    Decided,
    End,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    VersionState,
)
from sloop.core.oversight import Attainment
from sloop.core.rollout import is_worse
from sloop.events import (
    WOKE,
    Deployed,
    Draining,
    Finished,
    Planned,
    Promoted,
    Removed,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.policies.divide import Priority
from sloop.units import ms
from sloop.vocabulary import BatchId, Canary, Outcome, Plan, ReplicaId, RequestId
from tests.core.scene import Deployment, request

V2 = Deployed("x", "2", {})


def steps(actions: Sequence[Action]) -> list[tuple[str, str, float]]:
    """Version, state and share of each rollout."""
    return [(a.version, a.state.value, a.share) for a in actions if isinstance(a, Rollout)]


def serving() -> Deployment:
    scene = Deployment({"x": 1.0}, cores=8)
    scene.warm_up()
    return scene


def deploy(scene: Deployment, at_ms: float, event: Deployed = V2) -> list[ReplicaId]:
    """Deploy a version; returns the replicas that start for it."""
    actions = scene.act(at_ms, event) + scene.act(at_ms, WOKE)
    return [a.worker for a in actions if isinstance(a, StartWorker)]


def replaced(at_ms: float = 1000) -> Deployment:
    """Version 2 is ready, and serves since the second after `at_ms`."""
    scene = serving()
    for replica in deploy(scene, at_ms):
        scene.act(at_ms + 500, WorkerReady(replica))
    scene.act(at_ms + 1000, WOKE)
    return scene


def test_the_old_version_serves_until_the_new_one_is_ready() -> None:
    scene = serving()
    (replica,) = deploy(scene, 1000)
    assert steps(scene.actions) == [("2", "starting", 0.0)]
    assigned, batch = scene.act(1500, request(1, application="x", at_ms=1500))
    assert assigned == Assigned(RequestId(1), "x")
    assert isinstance(batch, StartBatch)
    assert batch.stage == "x/only"
    scene.act(1511, Finished(batch.batch, batch.replica, ms(11)))
    scene.act(1600, WorkerReady(replica))
    actions = scene.act(2000, WOKE)
    assert steps(actions) == [("2", "serving", 1.0), ("1", "retiring", 0.0)]
    (batch,) = [a for a in scene.act(2100, request(2, application="x", at_ms=2100)) if isinstance(a, StartBatch)]
    assert batch.stage == "x@2/only"


def test_the_old_version_finishes_its_requests_before_it_ends() -> None:
    scene = serving()
    (replica,) = deploy(scene, 1000)
    scene.act(1600, WorkerReady(replica))
    first, second = request(1, application="x", at_ms=1995), request(2, application="x", at_ms=1996)
    scene.act(1995, first)
    scene.act(1996, second)
    scene.act(2000, WOKE)
    assert StopWorker not in map(type, scene.actions), "its queue is not empty"
    scene.act(2006, Finished(BatchId(0), ReplicaId(0), ms(11)))
    scene.act(2017, Finished(BatchId(1), ReplicaId(0), ms(11)))
    ended = [(a.request, a.outcome) for a in scene.actions if isinstance(a, End)]
    assert ended == [(1, Outcome.SERVED), (2, Outcome.SERVED)]
    actions = scene.act(3000, WOKE)
    assert StopWorker(ReplicaId(0), "the plan has no use for it") in actions
    scene.act(3001, WorkerStopped(ReplicaId(0)))
    assert steps(scene.act(4000, WOKE)) == [("1", "retired", 0.0)]
    assert list(scene.core.state.applications) == ["x@2"]


def test_after_a_replacement_the_request_path_is_direct_again() -> None:
    scene = replaced()
    scene.act(2001, WorkerStopped(ReplicaId(0)))
    scene.act(3000, WOKE)
    assert list(scene.core.state.applications) == ["x@2"]
    assert scene.core._is_plain
    (batch,) = scene.act(4100, request(5, application="x", at_ms=4100))
    assert isinstance(batch, StartBatch)


def test_a_new_version_is_planned_for_the_traffic_of_the_old_one() -> None:
    scene = serving()
    for index in range(20):
        scene.act(10 * index + 1, request(index, application="x", at_ms=10 * index + 1))
        batch = scene.actions[-1]
        assert isinstance(batch, StartBatch)
        scene.act(10 * index + 9, Finished(batch.batch, batch.replica, ms(8)))
    scene.act(1000, WOKE)
    deploy(scene, 1000)
    assert scene.scripts["x@2"].seen[0].forecast_rps == 20
    scene.act(1500, WorkerReady(ReplicaId(1)))
    scene.act(2000, WOKE)
    scene.act(3000, WOKE)
    assert scene.scripts["x@2"].seen[-1].ingress.buckets[0].arrivals == 20, "it took over the history"


def test_a_version_that_does_not_start_is_given_up_and_the_old_one_serves_on() -> None:
    scene = serving()
    (replica,) = deploy(scene, 1000)
    at_ms, lost = 1100.0, [replica]
    while not any(step[1] == "retiring" for step in steps(scene.actions)):
        actions = scene.act(at_ms, *[WorkerLost(each, "no such file\nhelp: add it") for each in lost], WOKE)
        lost = [a.worker for a in actions if isinstance(a, StartWorker)]
        at_ms += 500
        assert at_ms < 20_000
    (given_up,) = [a for a in scene.actions if isinstance(a, Rollout) and a.state is VersionState.RETIRING]
    assert given_up.why == "its replicas were lost 3 times before one was ready: no such file"
    (batch,) = [a for a in scene.act(at_ms, request(1, application="x", at_ms=at_ms)) if isinstance(a, StartBatch)]
    assert batch.stage == "x/only"


def test_a_version_without_room_is_given_up_after_a_while() -> None:
    scene = Deployment({"x": 4.0}, cores=4)
    scene.warm_up()
    assert deploy(scene, 1000, Deployed("x", "2", {"cores": 2.0})) == []
    for second in range(2, 63):
        scene.act(1000 * second, WOKE)
    assert ("2", "retired", 0.0) in steps(scene.actions)
    (given_up,) = [a for a in scene.actions if isinstance(a, Rollout) and a.state is VersionState.RETIRING]
    assert "no node had room" in given_up.why


def test_a_new_version_gets_cores_that_quiet_applications_hold() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0}, cores=2, obeys=True)
    scene.warm_up()
    for second in range(1, 100):
        scene.act(1000 * second, WOKE)
    assert deploy(scene, 99_500) == []
    shrunk = [a for a in scene.actions if isinstance(a, ResizeWorker)]
    assert [a.cores for a in shrunk] == [0.666, 0.666]
    actions = scene.act(99_510, *[WorkerResized(a.worker, a.cores) for a in shrunk])
    assert [a.spec.cores for a in actions if isinstance(a, StartWorker)] == [0.666]


def test_a_later_version_takes_the_place_of_one_that_still_starts() -> None:
    scene = serving()
    deploy(scene, 1000)
    (third,) = deploy(scene, 1200, Deployed("x", "3", {}))
    assert ("2", "retiring", 0.0) in steps(scene.actions)
    scene.act(1500, WorkerReady(third))
    scene.act(2000, WOKE)
    assert ("3", "serving", 1.0) in steps(scene.actions)


def test_a_broken_definition_changes_nothing() -> None:
    scene = serving()
    actions = scene.act(1000, Deployed("x", "2", {"broken": True}))
    assert steps(actions) == [("2", "retired", 0.0)]
    assert isinstance(scene.act(1001, request(1, application="x", at_ms=1001))[0], StartBatch)


def test_a_new_application_is_added_beside_the_others() -> None:
    scene = serving()
    (replica,) = deploy(scene, 1000, Deployed("y", "1", {}))
    assert steps(scene.actions) == [("1", "serving", 1.0)]
    scene.act(1100, request(1, application="y", at_ms=1100))
    (batch,) = [a for a in scene.act(1200, WorkerReady(replica)) if isinstance(a, StartBatch)]
    assert batch.stage == "y/only"


# Removing


def test_a_removed_application_refuses_new_requests_and_finishes_the_others() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0})
    scene.warm_up()
    scene.act(100, request(1, application="x", at_ms=100), request(2, application="x", at_ms=100))
    actions = scene.act(101, Removed("x"), request(3, application="x", at_ms=101))
    assert [(a.request, a.outcome) for a in actions if isinstance(a, End)] == [(3, Outcome.REJECTED)]
    scene.act(111, Finished(BatchId(0), ReplicaId(0), ms(11)))
    scene.act(122, Finished(BatchId(1), ReplicaId(0), ms(11)))
    assert [(a.request, a.outcome.value) for a in scene.actions if isinstance(a, End)][1:] == [
        (1, "served"),
        (2, "served"),
    ]
    scene.act(1000, WOKE)
    scene.act(1001, WorkerStopped(ReplicaId(0)))
    scene.act(2000, WOKE)
    assert list(scene.core.state.applications) == ["y"]
    assert isinstance(scene.act(2001, request(4, application="y", at_ms=2001))[0], StartBatch)
    (end,) = scene.act(2002, request(5, application="x", at_ms=2002))
    assert isinstance(end, End)
    assert end.why == "application 'x' is not served", "the only application left does not answer for another"


def test_the_last_application_can_be_removed_and_another_added() -> None:
    scene = serving()
    scene.act(100, Removed("x"))
    scene.act(1000, WOKE)
    scene.act(1001, WorkerStopped(ReplicaId(0)))
    scene.act(2000, WOKE)
    assert scene.core.state.applications == {}
    (end,) = scene.act(2001, request(1, application="x", at_ms=2001))
    assert isinstance(end, End)
    (replica,) = deploy(scene, 3000, Deployed("z", "1", {}))
    scene.act(3001, WorkerReady(replica))
    assert isinstance(scene.act(3002, request(2, application="z", at_ms=3002))[0], StartBatch)


def test_a_server_that_drains_refuses_requests_of_versions_deployed_later() -> None:
    scene = serving()
    scene.act(100, Draining())
    deploy(scene, 200, Deployed("y", "1", {}))
    (end,) = scene.act(300, request(1, application="y", at_ms=300))
    assert isinstance(end, End)
    assert end.why == "the server is shutting down"


# Canaries


def canary(scene: Deployment, share: float = 0.25, promote_after_s: float = 0) -> None:
    """Version 2 is a canary from second 2 on."""
    for replica in deploy(scene, 1000, Deployed("x", "2", {}, Canary(share, promote_after_s))):
        scene.act(1500, WorkerReady(replica))
    scene.act(2000, WOKE)


def serve(scene: Deployment, first: int, count: int, at_ms: float, *, slow: frozenset[str] = frozenset()) -> list[str]:
    """Send requests one after another, 20 ms apart, each served in 11 ms, or in 1.2 s on the stages in `slow`; returns
    their stages."""
    stages = []
    for index in range(count):
        now_ms = at_ms + 20 * index
        actions = scene.act(now_ms, request(first + index, application="x", at_ms=now_ms, slo_ms=15))
        (batch,) = [a for a in actions if isinstance(a, StartBatch)]
        taken_ms = 18 if batch.stage in slow else 11
        scene.act(now_ms + taken_ms, Finished(batch.batch, batch.replica, ms(taken_ms)))
        stages.append(batch.stage)
    return stages


def test_a_canary_gets_its_share_evenly_spread() -> None:
    scene = serving()
    canary(scene)
    assert ("2", "canary", 0.25) in steps(scene.actions)
    stages = serve(scene, 0, 40, 2001)
    assert stages.count("x@2/only") == 10
    assert all(stages[index : index + 4].count("x@2/only") == 1 for index in range(0, 40, 4))


def test_a_canary_takes_no_more_cores_than_its_share_from_the_version_that_serves() -> None:
    scene = Deployment({"x": 1.5}, cores=1.75, obeys=True)
    scene.warm_up()
    deploy(scene, 1000, Deployed("x", "2", {"cores": 1.5}, Canary(share=0.1)))
    assert scene.planned_cores("x") == 1.5
    assert scene.planned_cores("x@2") == 0.25


def test_a_client_can_choose_its_version() -> None:
    scene = serving()
    canary(scene)
    _, batch = scene.act(2001, request(1, application="x", version="2", at_ms=2001))
    assert isinstance(batch, StartBatch)
    assert batch.stage == "x@2/only"
    (end,) = scene.act(2002, request(2, application="x", version="7", at_ms=2002))
    assert isinstance(end, End)
    assert end.why == "application 'x', version 7, is not served"


def test_a_worse_canary_is_rolled_back_and_says_why() -> None:
    scene = serving()
    canary(scene, 0.5)
    serve(scene, 0, 49, 2001, slow=frozenset({"x@2/only"}))
    scene.act(3000, WOKE)
    assert all(state == "canary" for version, state, _ in steps(scene.actions)[1:]), "too few requests to say"
    serve(scene, 50, 100, 3001, slow=frozenset({"x@2/only"}))
    actions = scene.act(5100, WOKE)
    (back,) = [a for a in actions if isinstance(a, Rollout)]
    assert (back.version, back.state) == ("2", VersionState.RETIRING)
    assert back.why.startswith("rolled back: 0.0% of ")
    assert "100.0% of" in back.why
    assert set(serve(scene, 200, 10, 5200)) == {"x/only"}


def test_a_canary_is_judged_by_its_own_deadline() -> None:
    """Its answers come after 11 ms: too late for its 10.5 ms, in time for the second of the others."""
    scene = serving()
    for replica in deploy(scene, 1000, Deployed("x", "2", {"slo_ms": 10.5}, Canary(0.5))):
        scene.act(1500, WorkerReady(replica))
    scene.act(2000, WOKE)

    def outcome(number: int, slo_ms: float) -> tuple[str, Outcome]:
        at_ms = 2000 + 20 * number
        (batch,) = [
            a
            for a in scene.act(at_ms, request(number, application="x", at_ms=at_ms, slo_ms=slo_ms))
            if isinstance(a, StartBatch | End)
        ]
        if isinstance(batch, End):
            return batch.stage, batch.outcome
        (end,) = scene.act(at_ms + 11, Finished(batch.batch, batch.replica, ms(11)))
        assert isinstance(end, End)
        return batch.stage, end.outcome

    by_default = [outcome(number, 1000) for number in range(10)]
    assert by_default.count(("x/only", Outcome.SERVED)) == by_default.count(("x@2/only", Outcome.DROPPED)) == 5
    assert {outcome(number, 999)[1] for number in range(10, 20)} == {Outcome.SERVED}, "the clients' own"


def test_a_good_canary_is_promoted_after_its_time() -> None:
    scene = serving()
    canary(scene, 0.5, promote_after_s=3)
    serve(scene, 0, 140, 2001)
    scene.act(5000, WOKE)
    scene.act(6000, WOKE)
    scene.act(7000, WOKE)
    assert ("2", "serving", 1.0) in steps(scene.actions)
    assert set(serve(scene, 200, 10, 7100)) == {"x@2/only"}


def test_a_canary_is_promoted_on_order() -> None:
    scene = serving()
    canary(scene)
    scene.act(2500, Promoted("x", "2"))
    scene.act(3000, WOKE)
    scene.act(4000, WOKE)
    assert ("2", "serving", 1.0) in steps(scene.actions)


def test_of_two_versions_that_take_over_in_the_same_tick_the_one_deployed_later_serves() -> None:
    scene = serving()
    canary(scene)
    scene.act(2100, Promoted("x", "2"))
    replicas = deploy(scene, 2200, Deployed("x", "3", {}))
    for replica in [*replicas, *(a.worker for a in scene.actions if isinstance(a, StartWorker))]:
        scene.act(2300, WorkerReady(ReplicaId(replica)))
    scene.act(3000, WOKE)
    scene.act(4000, WOKE)
    assert [v.name for v in scene.core.versions("x") if v.state is VersionState.SERVING] == ["3"]


def test_a_canary_without_another_version_serves_all() -> None:
    scene = serving()
    canary(scene)
    scene.act(2500, Removed("x", "1"))
    assert ("2", "serving", 1.0) in steps(scene.actions)
    assert set(serve(scene, 0, 5, 2600)) == {"x@2/only"}


def canaries(*shares: float) -> Deployment:
    """Version 1 serves; versions 2, 3, … are canaries with these shares from second 2, 4, … on."""
    scene = Deployment({"x": 1.0}, cores=8)
    scene.warm_up()
    for index, share in enumerate(shares):
        version, at_ms = str(index + 2), 2000.0 * index + 1000
        for replica in deploy(scene, at_ms, Deployed("x", version, {}, Canary(share))):
            scene.act(at_ms + 500, WorkerReady(replica))
        scene.act(at_ms + 1000, WOKE)
    return scene


def test_each_of_several_canaries_gets_its_share_and_the_version_that_serves_the_others() -> None:
    scene = canaries(0.1, 0.2)
    stages = serve(scene, 0, 100, 4001)
    assert [stages.count(stage) for stage in ("x/only", "x@2/only", "x@3/only")] == pytest.approx([70, 10, 20], abs=1)
    scene.act(6500, Removed("x", "3"))
    stages = serve(scene, 100, 100, 6501)
    assert [stages.count(stage) for stage in ("x/only", "x@2/only", "x@3/only")] == pytest.approx([90, 10, 0], abs=1)


def test_canaries_together_never_take_all_requests() -> None:
    scene = canaries(0.6, 0.7, 0.7)
    assert [share for _, state, share in steps(scene.actions) if state == "canary"] == pytest.approx([0.6, 0.2, 0.1])
    assert scene.core.versions("x")[0].share == pytest.approx(0.1)


@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3))
def test_shares_are_kept_within_a_request_of_each_canary(shares: list[float]) -> None:
    scene = canaries(*shares)
    wanted = {version.application.key: version.share for version in scene.core.versions("x")}
    assert sum(wanted.values()) == pytest.approx(1.0)
    count = 60
    for index in range(count):
        scene.act(9000, request(index, application="x", at_ms=9000))
    assigned = [a.application for a in scene.actions if isinstance(a, Assigned)]
    for key, share in wanted.items():
        assert abs(assigned.count(key) - share * count) <= len(shares)


def test_the_only_version_that_serves_goes_on_until_the_one_that_starts_is_ready() -> None:
    scene = serving()
    (replica,) = deploy(scene, 1000, Deployed("x", "2", {}, Canary()))
    scene.act(1100, Removed("x", "1"))
    assert set(serve(scene, 0, 10, 1101)) == {"x/only"}
    scene.act(1500, WorkerReady(replica))
    scene.act(2000, WOKE)
    assert steps(scene.actions)[1:] == [("2", "serving", 1.0), ("1", "retiring", 0.0)]
    assert set(serve(scene, 20, 10, 2101)) == {"x@2/only"}


def test_the_only_version_that_serves_stays_where_its_successor_is_given_up() -> None:
    scene = serving()
    (replica,) = deploy(scene, 1000)
    scene.act(1100, Removed("x", "1"))
    for second in range(2, 12):
        actions = scene.act(1000 * second, WorkerLost(replica, "no such file"), WOKE)
        replica = next((a.worker for a in actions if isinstance(a, StartWorker)), replica)
    assert ("2", "retired", 0.0) in steps(scene.actions)
    assert set(serve(scene, 0, 10, 20_001)) == {"x/only"}


def test_removing_a_canary_gives_its_share_back() -> None:
    scene = serving()
    canary(scene)
    scene.act(2500, Removed("x", "2"))
    assert set(serve(scene, 0, 8, 2600)) == {"x/only"}


@pytest.mark.parametrize(
    ("canary", "stable", "worse"),
    [
        (Attainment(100, 80), Attainment(900, 891), True),
        (Attainment(100, 97), Attainment(900, 891), False),
        (Attainment(49, 0), Attainment(900, 891), False),
        (Attainment(100, 0), Attainment(49, 49), False),
        (Attainment(60, 60), Attainment(60, 0), False),
    ],
)
def test_a_canary_is_worse_only_with_confidence(canary: Attainment, stable: Attainment, worse: bool) -> None:
    assert bool(is_worse(canary, stable, Canary())) is worse


@given(st.integers(50, 2000), st.integers(50, 2000), st.floats(0, 1), st.floats(0, 1))
def test_the_verdict_agrees_with_the_interval_of_agresti_and_caffo(
    n_canary: int, n_stable: int, p_canary: float, p_stable: float
) -> None:
    one, other = Attainment(n_canary, round(n_canary * p_canary)), Attainment(n_stable, round(n_stable * p_stable))
    p = [(each.served + 1) / (each.ended + 2) for each in (one, other)]
    error = sqrt(p[0] * (1 - p[0]) / (n_canary + 2) + p[1] * (1 - p[1]) / (n_stable + 2))
    assert bool(is_worse(one, other, Canary(tolerance=0.02))) is (p[1] - p[0] - 1.645 * error > 0.02)


def test_decisions_name_the_version() -> None:
    scene = replaced()
    plans = [a.application for a in scene.actions if isinstance(a, Decided) and a.kind == "plan"]
    assert plans[:2] == ["x", "x@2"]
    assert RequestId(0) not in [a.request for a in scene.actions if isinstance(a, End)]


def test_a_canary_that_serves_all_takes_over_the_history() -> None:
    scene = serving()
    canary(scene)
    serve(scene, 0, 40, 2500)  # the removal is within a second that has requests
    scene.act(3400, Removed("x", "1"))
    scene.act(4000, WOKE)
    assert ("2", "serving", 1.0) in steps(scene.actions)
    assert sum(bucket.arrivals for bucket in scene.scripts["x@2"].seen[-1].ingress.buckets) == 40


# Plans that come late, or not at all


def test_a_retiring_version_keeps_its_replicas_when_an_earlier_plan_comes_late() -> None:
    scene = Deployment({"x": 1.0}, is_quick=False)

    def answer(at_ms: float, plans: dict[str, Plan] | None = None) -> list[Action]:
        assert scene.core.plan_input is not None
        return scene.act(at_ms, Planned(scene.core.plan_input.number, plans or made))

    scene.warm_up()
    made = {"x": scene.plan("x", 1.0), "x@2": scene.plan("x@2", 1.0)}
    scene.act(500, Deployed("x", "2", {}))
    scene.act(1000, WOKE)
    started = [a.worker for a in answer(1010) if isinstance(a, StartWorker)]
    scene.act(2000, WOKE)
    scene.act(2100, *[request(id, application="x", at_ms=2100, slo_ms=1e6) for id in range(9)])
    scene.act(2200, *map(WorkerReady, started))
    scene.act(3000, WOKE)
    assert ("1", "retiring", 0.0) in steps(scene.actions)
    answer(3100, made | {"x": scene.plan("x", 0.0)})
    assert scene.planned_cores("x") == 1.0


def test_a_retiring_version_without_replicas_gets_some_for_the_requests_that_wait() -> None:
    scene = Deployment({"x": 1.0})
    scene.scripts["x"].error = ValueError("not yet")
    scene.act(0, WOKE)
    scene.act(100, request(1, application="x", at_ms=100, slo_ms=1e6))
    new = [a.worker for a in scene.act(500, Deployed("x", "2", {}), WOKE) if isinstance(a, StartWorker)]
    scene.act(600, *map(WorkerReady, new))
    scene.act(1000, WOKE)
    assert ("1", "retiring", 0.0) in steps(scene.actions)
    scene.scripts["x"].error = None
    actions = scene.act(2000, WOKE)
    assert [a.spec.stage for a in actions if isinstance(a, StartWorker)] == ["x/only"]


def test_a_version_for_which_no_cores_are_left_does_not_take_over() -> None:
    scene = Deployment({"x": 4.0, "y": 4.0}, cores=4, divide=Priority(), weights={"y": 2.0}, obeys=True)
    scene.warm_up()
    deploy(scene, 1000, Deployed("x", "2", {"cores": 4.0}))
    for second in range(2, 9):
        scene.act(1000 * second, WOKE)
    assert steps(scene.actions) == [("2", "starting", 0.0)]


def test_a_promoted_canary_waits_for_a_plan_for_all_requests() -> None:
    scene = serving()
    canary(scene)
    scene.scripts["x@2"].error = ValueError("a bug")
    scene.act(3000, Promoted("x", "2"), WOKE)
    scene.act(4000, WOKE)
    scene.act(5000, WOKE)
    assert ("2", "serving", 1.0) not in steps(scene.actions)
