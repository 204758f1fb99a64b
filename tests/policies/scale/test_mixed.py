"""The cheapest mix of replicas on all kinds of hardware: sizes, batches, rates, deadlines, and which replicas stay."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.ledger import Ledger, Reservation, sites
from sloop.core.views import Bucket, ClusterView, NodeView, StageView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.scale.mixed import Mixed, ReplicaSize
from sloop.profile.estimate import Estimate
from sloop.profile.interference import BandwidthLaw
from sloop.profile.profile import Amdahl, DeviceSharing, LatencyTable, Profile, Quadratic
from sloop.testing.views import make_belief, make_node, make_stage, make_view
from sloop.units import ms, s
from sloop.vocabulary import NodeState, Path, Plan, ReplicaId
from tests.asked import next_plan

CPU = Profile(latency_ms=LatencyTable({1: {8: 40}, 2: {8: 60}, 4: {8: 100}, 8: {8: 180}}), max_batch=8, max_cores=8)
"""At most 44 requests/s in 180 ms."""
SMALL = Profile(latency_ms=LatencyTable({1: {2: 150}, 2: {2: 250}}), max_batch=2, max_cores=2)
"""8 requests/s in 250 ms."""
GPU = Profile(latency_ms=Quadratic(0, 2, 10), max_batch=64, max_cores=4, accelerator="T4", device_memory_bytes=1 << 30)
"""464 requests/s in 138 ms."""
PRICES = {"c5.2xlarge": 0.34, "g4dn.xlarge": 0.526, "r5.large": 0.126}
CORES = {"c5.2xlarge": 8, "g4dn.xlarge": 4, "r5.large": 2}
BELIEFS = (
    make_belief(CPU, hardware="c5.2xlarge"),
    make_belief(GPU, hardware="g4dn.xlarge"),
    make_belief(SMALL, hardware="r5.large"),
)


def nodes_of(count: int = 4, *kinds: str, priced: bool = True, **changes: Any) -> list[NodeView]:
    """`count` nodes of each kind."""
    return [
        make_node(
            f"{kind}-{number}",
            hardware=kind,
            cores=CORES[kind],
            free_cores=CORES[kind],
            memory_bytes=16 << 30,
            usd_per_h=PRICES[kind] if priced else 0.0,
            devices={"gpu0": 1.0} if kind == "g4dn.xlarge" else {},
            **changes,
        )
        for kind in kinds or CORES
        for number in range(count)
    ]


NODES = nodes_of()


def stage_of(
    name: str = "stage", beliefs: Sequence[Estimate] = BELIEFS, slo_ms: float = 600, arrivals: int = 1
) -> StageView:
    return make_stage(Bucket(0, arrivals=arrivals), name=name, beliefs=beliefs, slo_ms=slo_ms)


def seen(rate_rps: float, nodes: Sequence[NodeView] = NODES, plan: Plan | None = None, **changes: Any) -> ClusterView:
    return make_view(stage_of(**changes), nodes=nodes, plan=plan, rates={"stage": rate_rps})


def exact(**changes: Any) -> Mixed:
    """Without reserves, so that numbers are easy to follow."""
    return Mixed(**{"headroom": 0.0, "margin": 1.0, "calm_ns": 0, "start": 0.0, **changes})


def planned(policy: Mixed, view: ClusterView, now_s: float = 0) -> Plan:
    plan: Plan | None = next_plan(policy, s(now_s), view)
    assert plan is not None
    return plan


def mix(plan: Plan, stage: int = 0) -> dict[str, int]:
    """Replicas by kind."""
    return {group.spec.slot.hardware: group.count for group in plan.stages[stage].groups}


# The mix


@pytest.mark.parametrize(
    ("rate_rps", "expected"),
    [
        (0, {"r5.large": 1}),
        (7, {"r5.large": 1}),
        (15, {"r5.large": 2}),
        (40, {"c5.2xlarge": 1}),
        (50, {"c5.2xlarge": 1, "r5.large": 1}),
        (60, {"g4dn.xlarge": 1}),
        (464, {"g4dn.xlarge": 1, "r5.large": 1}),
        (500, {"g4dn.xlarge": 1, "c5.2xlarge": 1}),
        (600, {"g4dn.xlarge": 2}),
    ],
)
def test_the_cheapest_mix(rate_rps: float, expected: dict[str, int]) -> None:
    plan = planned(exact(), seen(rate_rps))
    assert mix(plan) == expected
    assert plan.feasible


def test_each_group_has_its_batch_and_its_part_of_the_rate() -> None:
    plan = planned(exact(), seen(500))
    (cpu, gpu) = plan.stages[0].groups
    assert (cpu.batch_max, gpu.batch_max, plan.stages[0].batch_max) == (8, 64, 64)
    assert cpu.rate_rps + gpu.rate_rps == pytest.approx(500)
    assert gpu.rate_rps / cpu.rate_rps == pytest.approx((64 / 138) / (8 / 180))
    assert (gpu.spec.slot.accelerator, gpu.spec.cores, cpu.spec.cores) == ("T4", 4, 8)
    assert plan.why == (
        "500 requests/s with headroom → stage 1 × 8 cores of c5.2xlarge, batch 8 + 1 × 4 cores and T4 of g4dn.xlarge, "
        "batch 64: 0.866 USD/h"
    )


def test_as_many_replicas_share_an_accelerator_as_serve_most_together() -> None:
    shared = structs.replace(GPU, sharing=DeviceSharing(law=BandwidthLaw(0.5), full_batch=64, bandwidth=0.6))
    view = seen(500, nodes_of(1, "g4dn.xlarge"), beliefs=[make_belief(shared, hardware="g4dn.xlarge")])
    plan = planned(exact(), view)
    (group,) = plan.stages[0].groups
    assert (group.count, group.spec.slot.share, group.spec.cores) == (2, 0.5, 2.0)
    assert group.batch_max == 51, "two of them just do not disturb each other"
    beliefs = list(view.stages[0].beliefs.values())
    assert planned(exact(), seen(910, nodes_of(1, "g4dn.xlarge"), beliefs=beliefs)).feasible, "2 × 51 in 112 ms"
    assert not planned(exact(), seen(912, nodes_of(1, "g4dn.xlarge"), beliefs=beliefs)).feasible
    alone = structs.replace(shared, sharing=DeviceSharing(law=BandwidthLaw(0.6), full_batch=64, bandwidth=0.95))
    view = seen(460, nodes_of(1, "g4dn.xlarge"), beliefs=[make_belief(alone, hardware="g4dn.xlarge")])
    assert planned(exact(), view).stages[0].groups[0].spec.slot.share == 1.0


@settings(deadline=None, max_examples=30)
@given(
    bandwidth=st.floats(0.1, 1.0),
    alpha=st.floats(0.0, 1.0),
    batch=st.sampled_from([1, 8, 64]),
    memory=st.integers(1, 16),
)
def test_no_other_number_of_residents_serves_more(bandwidth: float, alpha: float, batch: int, memory: int) -> None:
    law = BandwidthLaw(alpha)
    sharing = DeviceSharing(law=law, full_batch=batch, bandwidth=bandwidth)
    profile = structs.replace(GPU, max_batch=batch, device_memory_bytes=(16 << 30) // memory, sharing=sharing)
    view = seen(0.1, nodes_of(1, "g4dn.xlarge"), beliefs=[make_belief(profile, hardware="g4dn.xlarge")], slo_ms=1e5)
    share = planned(exact(), view).stages[0].groups[0].spec.slot.share

    def served(count: int) -> float:
        demand = sharing.demand(batch)
        return count / law.slowdown(demand, [demand] * (count - 1))

    most = max(map(served, range(1, min(8, memory) + 1)))
    assert served(round(1 / share)) >= most * (1 - 1e-6)


def test_requests_that_come_at_once_must_be_done_in_time() -> None:
    """In 600 ms, c5.2xlarge does 3 batches of 8, and then one of 2 in the 60 ms that are left; r5.large 4 of them."""
    policy = exact(group_ns=s(1))
    assert mix(planned(policy, seen(26))) == {"c5.2xlarge": 1}
    assert mix(planned(exact(group_ns=s(1)), seen(28))) == {"c5.2xlarge": 1, "r5.large": 1}
    assert mix(planned(exact(group_ns=s(2)), seen(14))) == {"c5.2xlarge": 1, "r5.large": 1}
    assert (policy.arrivals, exact().arrivals) == ("burst", "even")


@pytest.mark.parametrize("limit_ms", [60, 100, 250, 600, 1300])
def test_what_is_done_of_a_burst(limit_ms: int) -> None:
    """As counted batch by batch."""
    belief = make_belief(CPU, hardware="c5.2xlarge")
    slot = belief.slot(8)
    size = ReplicaSize(belief, slot, 1.0, 1, 0, 0, 1.0)
    costs_ms = [cost_ns / 1e6 for cost_ns in belief.costs_ns(slot)]

    def done(batch: int) -> int:
        left_ms, count = float(limit_ms), 0
        while (most := max((n for n in range(batch + 1) if costs_ms[n] <= left_ms + 1e-6), default=0)) > 0:
            left_ms, count = left_ms - costs_ms[most], count + most
            if most < batch:
                break
        return count

    best = max((done(batch) for batch in range(1, 9) if costs_ms[batch] <= limit_ms), default=0)
    batch, served_rps = size.best_batch(limit_ms, 8, 2000.0)
    assert served_rps * 2.0 == pytest.approx(best)
    assert not best or done(batch) == best


def test_headroom_and_margin() -> None:
    assert mix(planned(exact(headroom=0.25), seen(400))) == {"g4dn.xlarge": 1, "c5.2xlarge": 1}
    tight = planned(exact(margin=0.5), seen(40))
    assert [group.batch_max for group in tight.stages[0].groups] == [6], "140 ms, twice within 300"
    assert mix(planned(exact(batch_max=4), seen(41))) == {"c5.2xlarge": 1, "r5.large": 1}


def test_without_prices_cores_count() -> None:
    nodes = nodes_of(priced=False)
    assert mix(planned(exact(), seen(40, nodes))) == {"g4dn.xlarge": 1}
    assert planned(exact(), seen(40, nodes)).why.endswith("4 cores")
    half = [*nodes_of(4, "c5.2xlarge", priced=False), *nodes_of(4, "g4dn.xlarge")]
    assert mix(planned(exact(), seen(60, half))) == {"c5.2xlarge": 2}, "machines that cost nothing come first"


def test_one_kind_only_and_kinds_that_are_named() -> None:
    assert mix(planned(exact(), seen(100, nodes_of(4, "c5.2xlarge")))) == {"c5.2xlarge": 3}
    assert mix(planned(exact(hardware=("c5.2xlarge",)), seen(100))) == {"c5.2xlarge": 3}
    assert mix(planned(exact(hardware=("r5.large", "c5.2xlarge")), seen(50))) == {"c5.2xlarge": 1, "r5.large": 1}
    unknown = make_stage(name="stage", beliefs=(make_belief(SMALL, hardware=""),), slo_ms=600)
    assert mix(planned(exact(initial_rps=15), make_view(unknown, nodes=()))) == {"": 2}


@settings(max_examples=40)
@given(
    rate_rps=st.integers(0, 1500),
    slo_ms=st.sampled_from([310, 400, 600, 2000]),
    counts=st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 9)),
)
def test_the_mix_carries_the_rate_in_time_fits_and_costs_no_more_than_any_kind_alone(
    rate_rps: int, slo_ms: int, counts: tuple[int, int, int]
) -> None:
    nodes = [node for kind, count in zip(CORES, counts, strict=True) for node in nodes_of(count, kind)]
    kinds = {node.node.hardware for node in nodes}
    plan = planned(Mixed(calm_ns=0), seen(rate_rps, nodes, slo_ms=slo_ms))
    (target,) = plan.stages
    beliefs = {belief.hardware: belief for belief in BELIEFS}
    served_rps = 0.0
    for group in target.groups:
        belief = beliefs[group.spec.slot.hardware]
        taken_ms = belief.latency_ms(group.batch_max, group.spec.slot)
        assert 2 * taken_ms <= 0.9 * slo_ms * (1 + 1e-9)
        served_rps += group.count * 1000 * group.batch_max / taken_ms
    assert_fits(plan, nodes, beliefs)
    assert plan.feasible == (not plan.saturated)
    if plan.feasible:
        assert served_rps >= 1.2 * rate_rps * (1 - 1e-5)
        alone = [
            planned(Mixed(hardware=(kind,)), seen(rate_rps, nodes, slo_ms=slo_ms))
            for kind in sorted(kinds)
            if kind != "r5.large" or slo_ms > 333
        ]
        assert cost(plan) <= min((cost(other) for other in alone if other.feasible), default=1e9) + 1e-6


def cost(plan: Plan) -> float:
    return sum(PRICES[group.spec.slot.hardware] * group.count for target in plan.stages for group in target.groups)


def assert_fits(plan: Plan, nodes: Sequence[NodeView], beliefs: dict[str, Estimate]) -> None:
    """Every replica has room on the empty nodes."""
    ledger = Ledger([node.node for node in nodes])
    specs = [group.spec for target in plan.stages for group in target.groups for _ in range(group.count)]
    for number, spec in enumerate(sorted(specs, key=lambda spec: -spec.cores)):
        belief = beliefs[spec.slot.hardware]
        site = sites(spec, belief, ledger.views())[0]
        device = site.device.device.name if site.device else None
        assert ledger.reserve(ReplicaId(number), Reservation.of(spec, belief, site.node.node.name, device))


# Sizes of replicas


def sizes(profile: Profile, rate_rps: float, **changes: Any) -> list[tuple[int, float]]:
    """(replicas, cores) on one kind of 8 cores."""
    belief = make_belief(profile, hardware="c5.2xlarge")
    plan = planned(exact(**changes), seen(rate_rps, nodes_of(4, "c5.2xlarge"), beliefs=(belief,)))
    return [(group.count, group.spec.cores) for group in plan.stages[0].groups]


def test_replicas_are_smaller_where_a_core_then_serves_more() -> None:
    amdahl = Profile(latency_ms=Amdahl(80, 0, 0, 20), max_batch=4, max_cores=8)
    assert sizes(amdahl, 9) == [(1, 1)]
    assert sizes(amdahl, 45) == [(4, 1)]
    assert sizes(amdahl, 45, cores=(8,)) == [(1, 8)]
    assert sizes(amdahl, 44, cores=(2, 0.5)) == [(2, 2)]


def test_a_table_is_not_read_below_its_fewest_cores() -> None:
    """There its latency is only pessimistic: the same throughput per core."""
    assert sizes(CPU, 1) == [(1, 8)]


def test_sizes_are_those_of_a_node() -> None:
    wide = Profile(latency_ms=LatencyTable({1: {8: 40, 16: 30}}), max_batch=1, max_cores=16)
    assert sizes(wide, 1) == [(1, 8)]


def test_replicas_of_several_sizes_fit_one_by_one() -> None:
    """Two nodes of 5 cores: the cores suffice for three replicas of 3, but only one fits on each node."""
    three = Profile(latency_ms=LatencyTable({1: {3: 100}}), max_batch=1, max_cores=3)
    nodes = [make_node(f"n{n}", cores=5, free_cores=5, memory_bytes=1 << 40) for n in range(2)]
    stages = [stage_of(name, (make_belief(three),)) for name in ("a", "b")]
    view = make_view(*stages, nodes=nodes, rates={"a": 1.0, "b": 1.0})
    assert planned(exact(), view).feasible
    full = planned(exact(), make_view(*stages, nodes=nodes, rates={"a": 11.0, "b": 1.0}))
    assert not full.feasible


# Deadlines


def test_hardware_that_is_too_slow_is_left_out() -> None:
    assert mix(planned(exact(), seen(5, slo_ms=290))) == {"c5.2xlarge": 1}
    assert mix(planned(exact(), seen(5, slo_ms=70))) == {"g4dn.xlarge": 1}


def test_where_no_batch_can_wait_for_another_requests_run_alone() -> None:
    plan = planned(exact(), seen(5, nodes_of(4, "c5.2xlarge"), slo_ms=60))
    assert plan.feasible
    assert [(group.count, group.batch_max) for group in plan.stages[0].groups] == [(1, 1)]


def test_a_deadline_that_no_hardware_keeps() -> None:
    plan = planned(exact(), seen(100, slo_ms=10))
    assert not plan.feasible
    assert mix(plan) == {"g4dn.xlarge": 2}
    assert plan.why.startswith(
        "stage takes 12 ms on the fastest hardware, 2 ms more than its 10 ms; most of it stage, 12 ms on 4 cores and "
        "T4 of g4dn.xlarge; 100 requests/s"
    )


def test_stages_of_a_graph_share_the_deadline() -> None:
    """The stage that gains most from slow hardware gets most of the time."""
    detect = stage_of("detect", slo_ms=700)
    read = stage_of("read", (make_belief(GPU, hardware="g4dn.xlarge"),), slo_ms=700)
    view = make_view(detect, read, nodes=NODES, rates={"detect": 7.0, "read": 7.0})
    plan = planned(exact(), view)
    assert (mix(plan), mix(plan, 1)) == ({"r5.large": 1}, {"g4dn.xlarge": 1})
    taken_ms = [
        2 * next(b for b in BELIEFS if b.hardware == g.spec.slot.hardware).latency_ms(g.batch_max, g.spec.slot)
        for target in plan.stages
        for g in target.groups
    ]
    assert sum(taken_ms) <= 700
    tight = planned(exact(), make_view(detect, read, nodes=NODES, rates=view.demand_rps, paths=[path_of(150)]))
    assert (mix(tight), mix(tight, 1)) == ({"c5.2xlarge": 1}, {"g4dn.xlarge": 1})
    late = planned(exact(), make_view(detect, read, nodes=NODES, rates=view.demand_rps, paths=[path_of(20)]))
    assert not late.feasible
    assert late.why.startswith("detect → read takes 24 ms on the fastest hardware, 4 ms more than its 20 ms")


def path_of(slo_ms: float) -> Path:
    return Path(("detect", "read"), ms(slo_ms))


# The cluster


def test_a_cluster_that_is_too_small_for_the_headroom_alone() -> None:
    """It carries what comes; the policy's own criterion is what fails."""
    plan = planned(Mixed(headroom=1.0), seen(2000))
    assert not plan.feasible
    assert plan.saturated == ()
    assert plan.why.endswith("all nodes together carry 52% of it, which is enough without headroom")


def test_a_cluster_that_is_too_small() -> None:
    plan = planned(exact(), seen(4000))
    assert not plan.feasible
    assert plan.saturated == ("stage",)
    assert mix(plan) == {"g4dn.xlarge": 4, "c5.2xlarge": 4, "r5.large": 4}
    assert plan.why.endswith("saturated: all nodes together carry 52% of it")
    one = nodes_of(1, "c5.2xlarge")
    both = make_view(stage_of("a"), stage_of("b"), nodes=one, rates={"a": 1.0, "b": 1.0})
    full = planned(exact(), both)
    assert not full.feasible
    assert full.why == "the nodes do not hold one replica of each of 2 stages"


def test_nodes_that_can_be_acquired_count_and_lost_ones_do_not() -> None:
    rented = nodes_of(2, "g4dn.xlarge", on_demand=True, state=NodeState.RELEASED)
    lost = nodes_of(4, "c5.2xlarge", state=NodeState.LOST)
    assert mix(planned(exact(), seen(500, [*rented, *nodes_of(1, "c5.2xlarge")]))) == {
        "g4dn.xlarge": 1,
        "c5.2xlarge": 1,
    }
    assert mix(planned(exact(), seen(500, [*rented, *lost]))) == {"g4dn.xlarge": 2}


def test_nodes_on_demand_are_paid_for_as_a_whole() -> None:
    """Three replicas of two cores cost less than one with an accelerator as shares, but not as a node of 8 cores."""
    small = Profile(latency_ms=LatencyTable({1: {2: 100}}), max_batch=1, max_cores=2)
    beliefs = (make_belief(small, hardware="c5.2xlarge"), make_belief(GPU, hardware="g4dn.xlarge"))
    always, rented = nodes_of(2, "c5.2xlarge"), nodes_of(2, "c5.2xlarge", on_demand=True)
    dear = [structs.replace(node.node, usd_per_h=0.6) for node in rented]
    rented = [dataclasses.replace(view, node=node) for view, node in zip(rented, dear, strict=True)]
    gpu = nodes_of(1, "g4dn.xlarge", on_demand=True)
    assert mix(planned(exact(), seen(30, [*always, *gpu], beliefs=beliefs))) == {"c5.2xlarge": 3}
    assert mix(planned(exact(), seen(30, [*rented, *gpu], beliefs=beliefs))) == {"g4dn.xlarge": 1}
    alone = planned(exact(), seen(30, rented, beliefs=beliefs))
    assert mix(alone) == {"c5.2xlarge": 3}
    assert alone.why.endswith(": 0.6 USD/h")


def test_a_kind_that_could_be_rented_has_a_price() -> None:
    """Without one it would seem to be the cheapest."""
    priced, free = nodes_of(1, "c5.2xlarge", on_demand=True), nodes_of(1, "g4dn.xlarge", priced=False, on_demand=True)
    with pytest.raises(InputError, match=r"mixed rents the cheapest nodes, and g4dn\.xlarge has no price"):
        next_plan(exact(), 0, seen(30, [*priced, *free]))
    assert planned(exact(hardware=("c5.2xlarge",)), seen(30, [*priced, *free])).stages
    always = nodes_of(1, "g4dn.xlarge", priced=False)
    assert mix(planned(exact(), seen(30, [*priced, *always]))) == {"g4dn.xlarge": 1}, "it is there anyway"


def test_accelerators_and_memory_limit_the_replicas_of_a_node() -> None:
    shared = [make_node("n", hardware="g4dn.xlarge", cores=64, free_cores=64, devices={"a": 1.0, "b": 1.0})]
    plan = planned(exact(), seen(5000, shared))
    assert mix(plan) == {"g4dn.xlarge": 2}
    large = Profile(latency_ms=SMALL.latency_ms, max_batch=2, max_cores=2, memory_bytes=10 << 30)
    narrow = seen(50, nodes_of(3, "r5.large"), beliefs=(make_belief(large, hardware="r5.large"),))
    assert mix(planned(exact(), narrow)) == {"r5.large": 3}


def test_without_room_for_any_replica_the_plan_stays() -> None:
    """Other applications may need all nodes of a kind, or they may be lost."""
    plan = planned(exact(), seen(500))
    left = [make_node("tiny", hardware="r5.large", cores=1, usd_per_h=1.0)]
    kept = planned(exact(), seen(500, left, plan=plan, beliefs=(make_belief(GPU, hardware="g4dn.xlarge"),)))
    assert (kept.stages, kept.feasible) == (plan.stages, False)
    assert kept.why == "no node has room for a replica of stage"
    nothing = planned(exact(), seen(1, left, beliefs=(make_belief(GPU, hardware="g4dn.xlarge"),)))
    assert (nothing.feasible, nothing.stages[0].groups) == (False, ())


# What stays


def test_nothing_new_while_nothing_changes() -> None:
    policy = exact()
    plan = planned(policy, seen(500))
    assert next_plan(policy, s(1), seen(500, plan=plan)) is None
    assert next_plan(policy, s(2), seen(700, plan=plan)) is not None


def test_replicas_are_added_to_those_there_unless_another_mix_saves_more_than_its_start() -> None:
    policy = exact(start=0.5)
    small = planned(policy, seen(15))
    assert mix(small) == {"r5.large": 2}
    grown = planned(policy, seen(20, plan=small), 1)
    assert mix(grown) == {"r5.large": 3}, "0.378 USD/h and one start; one of c5.2xlarge costs 0.34 and its start"
    assert mix(planned(exact(start=0.0), seen(20, plan=small), 1)) == {"c5.2xlarge": 1}
    assert mix(planned(policy, seen(40, plan=grown), 2)) == {"c5.2xlarge": 1}


def test_a_lower_rate_counts_when_it_has_lasted() -> None:
    policy = exact(calm_ns=s(10))
    plan = planned(policy, seen(900))
    assert mix(plan) == {"g4dn.xlarge": 2}
    for second in range(1, 10):
        assert next_plan(policy, s(second), seen(10, plan=plan)) is None
    assert mix(planned(policy, seen(10, plan=plan), 10)) == {"r5.large": 2}


def test_a_plan_that_differs_only_in_rates_is_the_same_target() -> None:
    policy = exact()
    plan = planned(policy, seen(70))
    again = planned(policy, seen(80, plan=plan), 1)
    assert again.same_target(plan)


def test_after_a_rest_it_starts_anew() -> None:
    policy = exact(start=0.5)
    plan = planned(policy, seen(900))
    rest = Plan(tuple(type(target)(target.stage, (), 1) for target in plan.stages), "rest")
    assert mix(planned(policy, seen(5, plan=rest), 100)) == {"r5.large": 1}


def test_lost_nodes_are_replaced_by_other_kinds() -> None:
    policy = exact(start=0.2)
    plan = planned(policy, seen(900))
    left = [*nodes_of(1, "g4dn.xlarge"), *nodes_of(12, "c5.2xlarge")]
    assert mix(planned(policy, seen(900, left, plan=plan), 1)) == {"g4dn.xlarge": 1, "c5.2xlarge": 10}


# Variants


def test_only_variants_that_are_at_least_as_accurate() -> None:
    def beliefs(accuracies: dict[str, float | None]) -> list[Estimate]:
        quick, slow = (Profile(latency_ms=Quadratic(0, each, 1), max_batch=8, max_cores=8) for each in (5, 50))
        return [
            make_belief(quick if name == "quick" else slow, name, "c5.2xlarge", accuracy)
            for name, accuracy in accuracies.items()
        ]

    def chosen(accuracies: dict[str, float | None], **changes: Any) -> set[str]:
        view = seen(100, nodes_of(9, "c5.2xlarge"), beliefs=beliefs(accuracies))
        return {group.spec.variant for group in planned(exact(**changes), view).stages[0].groups}

    assert chosen({"slow": 0.8, "quick": 0.7}) == {"slow"}
    assert chosen({"slow": 0.8, "quick": 0.8}) == {"quick"}
    assert chosen({"slow": 0.8, "quick": None}) == {"slow"}
    assert chosen({"slow": None, "quick": 0.9}) == {"slow"}
    assert chosen({"slow": 0.8, "quick": 0.7}, variant="quick") == {"quick"}
    with pytest.raises(InputError, match="stage stage has no variant 'huge'\nhelp: use one of slow, quick"):
        chosen({"slow": 0.8, "quick": 0.7}, variant="huge")


def test_a_variant_for_each_kind() -> None:
    """The same model, compiled for each."""
    beliefs = (
        make_belief(CPU, "onnx", "c5.2xlarge", accuracy=0.8),
        make_belief(GPU, "tensorrt", "g4dn.xlarge", accuracy=0.8),
    )
    plan = planned(exact(), seen(500, beliefs=beliefs))
    assert {group.spec.variant for group in plan.stages[0].groups} == {"onnx", "tensorrt"}


# Bad input


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match=r"no node has hardware 'c4\.large'\nhelp: the cluster has c5"):
        planned(Mixed(hardware=("c4.large",)), seen(1))
    with pytest.raises(InputError, match=r"system mixed: no core count of \(64,\) fits\nhelp: a node has 8 cores"):
        planned(Mixed(cores=(64,)), seen(1))
    only_gpu = seen(1, beliefs=(make_belief(GPU, hardware="g4dn.xlarge"),))
    with pytest.raises(
        InputError, match=r"stage stage has no profile for r5\.large\nhelp: it has one for g4dn\.xlarge"
    ):
        planned(Mixed(hardware=("r5.large",)), only_gpu)
    for wrong in ({"headroom": -1}, {"margin": 0}, {"margin": 2}, {"start": -1}, {"cores": (0,)}):
        with pytest.raises(InputError, match="must be"):
            check_ranges(Mixed(**wrong))
