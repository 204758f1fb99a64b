"""Which constraint binds, in settings where it is plain to see."""

from typing import Any

import pytest

from sloop.systems.planning import need
from sloop.systems.planning.answer import StageNeed
from sloop.systems.planning.binding import bounds_of
from sloop.systems.planning.placed import placed
from sloop.systems.planning.predict import Outlook
from sloop.systems.planning.steady import steady_plan
from tests.systems.planning.scene import nodes, profile, setup, stage


def only(rate_rps: float, slo_ms: float = 1000, cluster: dict[str, Any] | None = None, **system: Any) -> StageNeed:
    """One stage that does 100 requests per second on a core, whatever the batch."""
    made = setup(stage("a"), slo_ms=slo_ms, cluster=cluster, system={"name": "static", "batch_max": 1} | system)
    (row,) = need(made, rate_rps).stages
    return row


def kinds(row: StageNeed) -> list[str]:
    return [bound.kind for bound in row.binds]


def test_nothing_binds_one_idle_replica() -> None:
    assert only(20).binds == ()
    assert only(0).binds == ()


def test_replicas_that_just_suffice() -> None:
    row = only(150, replicas=2)
    assert kinds(row) == ["throughput"]
    assert row.binds[0].why == "1 replica would keep up with 100 of 150 a second in batches of 1"
    assert only(90, replicas=2).binds == ()


def test_cores_that_just_suffice() -> None:
    row = only(250, cores=3)
    assert (kinds(row), row.binds[0].why) == (
        ["throughput"],
        "1 replica of 2 cores would keep up with 200 of 250 a second in batches of 1",
    )


def test_one_more_request_would_be_too_many() -> None:
    row = only(100)
    assert (kinds(row), row.binds[0].why) == (
        ["throughput"],
        "it keeps up with 100 a second; one more request makes 101",
    )


def test_the_deadline_of_the_tightest_path() -> None:
    stages = [stage("a"), stage("b", "a"), stage("c", "a", profile=profile(1))]
    made = setup(*stages, slo_ms=12, system={"name": "static", "cores": 2})
    rows = {row.stage: row for row in need(made, 5).stages}
    why = "with 1 replica of 1 core a → b would take 15 of 12 ms"
    assert {name: [(b.kind, b.why) for b in row.binds] for name, row in rows.items()} == {
        "a": [("deadline", why)],
        "b": [("deadline", why)],
        "c": [],
    }


def test_a_deadline_that_is_missed_already() -> None:
    assert [bound.why for bound in only(5, slo_ms=8).binds] == ["as it is, a request takes 10 of 8 ms"]


def test_larger_batches_that_a_deadline_forbids_or_the_plan_does_not_allow() -> None:
    made = stage("a", profile=profile(1, 9, batch=4))  # 100 a second alone, 4/13 ms = 307 in fours
    system = {"name": "static", "replicas": 2, "batch_max": 1}

    def of(slo_ms: float) -> list[tuple[str, str]]:
        (row,) = need(setup(made, slo_ms=slo_ms, system=system), 190).stages
        return [(bound.kind, bound.why) for bound in row.binds]

    throughput = ("throughput", "1 replica would keep up with 100 of 190 a second in batches of 1")
    assert of(1000) == [throughput, ("batch", "1 replica would keep up in batches of 3, and the plan allows 1")]
    assert of(20) == [throughput, ("deadline", "with 1 replica in batches of 3 a request would take 24 of 20 ms")]


@pytest.mark.parametrize(("replicas", "rate_rps"), [(2, 600), (1, 307)])
def test_the_variant_has_no_larger_batches(replicas: int, rate_rps: float) -> None:
    """With one replica less, or with one request more."""
    made = stage("a", profile=profile(1, 9, batch=4))
    (row,) = need(setup(made, system={"name": "static", "replicas": replicas}), rate_rps).stages
    assert (kinds(row), row.binds[1].why) == (
        ["throughput", "batch"],
        "a takes batches of 4 at most, and larger ones would do more",
    )


def test_a_full_cluster() -> None:
    row = only(150, cluster=nodes(cores=1.5, count=2), replicas=2)
    assert kinds(row) == ["throughput", "cores"]
    assert row.binds[1].why == "no node has room for one more of 1 core: the most that is free is 0.5"


def test_no_replicas_are_bound_by_nothing() -> None:
    assert only(10, replicas=0).binds == ()


@pytest.mark.parametrize("rate_rps", [0, 1, 40, 99, 100, 101, 350])
@pytest.mark.parametrize("system", ["static", "fa2", "biscale", "ipa", "hpa"])
def test_a_stage_bound_by_throughput_cannot_do_with_less_or_take_more(system: str, rate_rps: float) -> None:
    made = setup(stage("a"), stage("b", "a"), slo_ms=300, system=system)
    plan = steady_plan(made, rate_rps).plan
    outlook = Outlook(made, plan, rate_rps)
    for found in outlook.stages.values():
        bounds = {bound.kind for bound in bounds_of(outlook, found, placed(plan, made))}
        spare = found.rate_max_rps * (found.replicas - 1) / max(1, found.replicas) >= found.rate_rps
        cores = found.groups[0].spec.cores
        if "throughput" in bounds and found.replicas > 1:
            assert not spare or found.rate_max_rps < found.rate_rps + 1
        if found.replicas == 1 and cores <= 1:
            assert ("throughput" in bounds) == (found.rate_max_rps < found.rate_rps + 1)
