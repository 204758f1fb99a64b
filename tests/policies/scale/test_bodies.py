"""Bodies by the mean rate, shadows and bodies by the rate of the last second; against the rules of AsyFunc's
specification, sections 2.7, 2.8 and 7.4, on its worked example (2.12)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Bucket, ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.policies.scale.bodies import Bodies
from sloop.profile.estimate import Estimate
from sloop.solvers.bodies import capacity_rps
from sloop.units import ms, s
from sloop.vocabulary import ALONE, Group, Life, Node, Plan, ReplicaId, ReplicaSpec, Slot, Worker
from tests.asked import next_plan
from tests.profile.test_blocks import PROFILE

SLO_NS, CAPACITIES = ms(99), (0.0, 10.101, 20.202, 30.303, 40.404)
PERIOD_NS = ms(500)


def body(id: int, cores: float, node: str = "n0", shadow: Worker | None = None, **other: object) -> ReplicaView:
    spec = ReplicaSpec("m", "a", Slot(cores, "cpu"), shape=ALONE if shadow is None else (shadow,))
    own: dict[str, object] = {
        "life": Life.READY,
        "since_ns": 0,
        "running": 0,
        "node": node,
        "shape": spec.shape,
    } | other
    return ReplicaView(ReplicaId(id), spec, **own | other)  # type: ignore[arg-type]


def view(
    replicas: Sequence[ReplicaView], rate_rps: float, burst_rps: float, *, cores: float = 16.0, nodes: int = 1
) -> ClusterView:
    used = {f"n{at}": 0.0 for at in range(nodes)}
    for each in replicas:
        used[each.node] += each.spec.cores + (each.spec.shadow.cores if each.spec.shadow else 0)
    buckets = [Bucket(at * PERIOD_NS, arrivals=round(burst_rps / 2)) for at in range(2)]
    stage = StageView(
        name="m",
        slo_ns=SLO_NS,
        after=(),
        beliefs={("a", "cpu"): Estimate(PROFILE, variant="a", hardware="cpu")},
        replicas=tuple(replicas),
        queue=(),
        running=0,
        buckets=buckets,
        bucket_ns=PERIOD_NS,
    )
    return ClusterView(
        stages=(stage,),
        nodes=tuple(NodeView(Node(name, "cpu", cores, 1 << 40), cores - own, 1 << 40) for name, own in used.items()),
        plan=None,
        demand_rps={"m": rate_rps},
        ingress=Traffic(buckets=buckets, bucket_ns=PERIOD_NS),
        forecast_rps=rate_rps,
        paths=(),
    )


def policy(**options: object) -> Bodies:
    """As published; the model is worth 64 cores."""
    published: dict[str, object] = {"gamma": 1.0, "bursts": "shadows", "counts_shadows": True}
    example: dict[str, object] = {"cores_max": 4, "batch_max": 4, "memory_cores": 64.0}
    return Bodies(**(published | example | options))  # type: ignore[arg-type]


def groups_of(plan: Plan | None) -> tuple[Group, ...]:
    assert plan is not None
    return plan.stages[0].groups


def sizes(plan: Plan | None) -> list[tuple[float, int]]:
    return [(group.spec.cores, group.count) for group in groups_of(plan)]


@pytest.mark.parametrize(
    ("weight", "rate", "cores", "count"),
    [
        (64, 10, 1, 2),
        (64, 20, 1, 3),
        (64, 40, 4, 2),
        (64, 60, 4, 2),
        (64, 100, 4, 4),
        (64, 200, 4, 7),
        (4, 10, 4, 1),
        (4, 20, 4, 1),
    ],
)
def test_bodies_started_from_none(weight: float, rate: float, cores: int, count: int) -> None:
    plan = next_plan(policy(memory_cores=weight), 0, view([], rate, 0, cores=64))
    assert sizes(plan) == [(cores, count)]
    assert plan is not None
    assert plan.feasible


def test_bodies_change_only_outside_of_the_band_and_once_in_a_period() -> None:
    """Two bodies of 4 cores: 80.8 rps; β of it is 48.5, α of it is 64.6."""
    two = [body(0, 4, "n0"), body(1, 4, "n1")]
    for rate, left in ((64, 2), (49, 2), (48, 2), (33, 2), (32, 1), (1, 1)):
        assert sum(count for _, count in sizes(next_plan(policy(), 0, view(two, rate, 0, nodes=2)))) == left, rate
    own = policy()
    next_plan(own, 0, view(two, 64, 0, nodes=2))
    assert sum(count for _, count in sizes(next_plan(own, s(9.5), view(two, 500, 0, nodes=2)))) == 2
    assert sum(count for _, count in sizes(next_plan(own, s(10), view(two, 70, 0, nodes=2)))) == 3


@pytest.mark.parametrize(("counts", "bodies"), [(True, 1), (False, 2)])
def test_the_mean_rate_may_rest_on_shadows(counts: bool, bodies: int) -> None:
    """A pair of two cores and four carries 50.8 rps, its body alone 20.2: of 30 rps, α leaves no room for it alone."""
    pair = body(0, 2, shadow=Worker(4.0, (0, 1)))
    plan = next_plan(policy(counts_shadows=counts), 0, view([pair], 30, 30, cores=64))
    assert sum(count for _, count in sizes(plan)) == bodies


def test_bodies_are_adapted_to_the_first_second() -> None:
    """Not only after ten seconds, in which shadows would have to do."""
    own = policy()
    assert sizes(next_plan(own, 0, view([], 0, 0))) == [(1, 1)]
    assert sizes(next_plan(own, s(1), view([body(0, 1)], 60, 0, cores=64)))[-1] == (4, 2), "10.1 + 2 × 40.4 rps"
    three = [body(0, 1), body(1, 4), body(2, 4)]
    assert sum(count for _, count in sizes(next_plan(own, s(10.5), view(three, 500, 0, cores=64)))) == 3


def test_lost_bodies_stay_in_the_plan_until_bodies_are_adapted() -> None:
    """Their node may be gone: a plan of those that are left would have none for ten seconds, or forever less."""
    own = policy()
    assert sizes(next_plan(own, 0, view([], 100, 0, cores=64))) == [(4, 4)]
    two = [body(0, 4), body(1, 4)]
    plan = next_plan(own, s(0.5), view(two, 100, 0, cores=64))
    assert [(group.spec.node, group.count) for group in groups_of(plan)] == [("n0", 2), (None, 2)]
    assert plan is not None
    assert plan.feasible
    assert "2 bodies are missing" in plan.why
    plan = next_plan(own, s(1), view([], 100, 0, cores=4))
    assert sizes(plan) == [(4, 1)]
    assert plan is not None
    assert not plan.feasible
    assert sizes(next_plan(own, s(1.5), view([], 100, 0, cores=64))) == [(4, 4)], "those without room are not forgotten"
    assert sizes(next_plan(own, s(11), view([body(0, 4)], 10, 0, cores=64))) == [(4, 1)], "the rate needs no more"


def test_the_rate_to_plan_for_before_any_request() -> None:
    unseen = view([], 0, 0, cores=64)
    unseen = replace(unseen, stages=(replace(unseen.stages[0], buckets=[]),))
    assert sizes(next_plan(policy(initial_rps=100), 0, unseen)) == [(4, 4)]
    assert sizes(next_plan(policy(initial_rps=100), 0, view([], 0, 0, cores=64))) == [(1, 1)], (
        "requests could have come"
    )


def test_a_body_that_starts_counts_for_the_mean_rate() -> None:
    starting = [body(0, 4), body(1, 4, life=Life.STARTING)]
    assert sum(count for _, count in sizes(next_plan(policy(), 0, view(starting, 64, 0)))) == 2


def test_a_smaller_body_where_no_node_has_room_and_no_plan_beyond_it() -> None:
    plan = next_plan(policy(), 0, view([], 40, 0, cores=3))
    assert sizes(plan) == [(3, 1)]
    assert plan is not None
    assert not plan.feasible


@pytest.mark.parametrize("slo_ms", [1, 30])
def test_late_answers_instead_of_none_where_no_body_that_fits_keeps_the_slo(slo_ms: int) -> None:
    """With four cores a request takes 27 ms, with three cores 35 ms. One body, whatever the rate."""
    tight = view([], 40, 0, cores=3)
    tight = replace(tight, stages=(replace(tight.stages[0], slo_ns=ms(slo_ms)),))
    plan = next_plan(policy(), 0, tight)
    assert sizes(plan) == [(3, 1)]
    assert plan is not None
    assert not plan.feasible
    assert ("no body of up to 4 cores keeps the SLO of 1 ms" in plan.why) == (slo_ms == 1)
    full, own = replace(tight, nodes=(replace(tight.nodes[0], free_cores=0.5),)), policy()
    for at_s in (0, 0.5, 11, 11.5):
        plan = next_plan(own, s(at_s), full)
        assert not groups_of(plan)
        assert plan is not None
        assert not plan.feasible
        assert "no node has a core left for a body" in plan.why


def test_never_below_one_body() -> None:
    assert sizes(next_plan(policy(), 0, view([body(0, 4)], 0, 0))) == [(4, 1)]


def test_a_burst_gets_the_shadow_of_the_worked_example() -> None:
    """A 2-core body carries 20.2 rps; {1} adds 13.09 rps, {1, 2} 26.66."""
    for burst, blocks in ((20, None), (30, (0,)), (40, (0, 1)), (400, (0, 1))):
        (group,) = groups_of(next_plan(policy(), 0, view([body(0, 2)], 12, burst)))
        assert (group.spec.shadow and group.spec.shadow.layers) == blocks
        if blocks:
            assert group.spec.shadow == Worker(4.0, blocks)
            assert group.spec.node == "n0", "on the node of its body"


@pytest.mark.parametrize(
    ("changes", "cores", "others"),
    [
        ({"shadows": False}, 16, {}),
        ({"shadows_per_node": 0}, 16, {}),
        ({}, 2.5, {}),
        ({}, 16, {"life": Life.STARTING}),
        ({}, 16, {"shadow": Worker(4.0, (0, 1)), "shape": ALONE}),
    ],
)
def test_when_no_shadow_is_started(changes: dict[str, object], cores: float, others: dict[str, object]) -> None:
    replica = body(0, 2, **others)  # type: ignore[arg-type]
    (group, *_) = groups_of(next_plan(policy(**changes), 0, view([replica], 12, 400, cores=cores)))
    assert group.spec.shadow == replica.spec.shadow


def test_one_shadow_for_each_node_and_larger_bodies_first() -> None:
    three = [body(0, 2, "n0"), body(1, 3, "n0"), body(2, 2, "n1")]
    found = groups_of(next_plan(policy(), 0, view(three, 50, 500, nodes=2)))
    assert {(group.spec.node, group.spec.cores, group.spec.shadow is not None) for group in found} == {
        ("n0", 2, False),
        ("n0", 3, True),
        ("n1", 2, True),
    }


def test_shadows_go_at_the_second_tick_below_what_the_bodies_carry() -> None:
    own, pair = policy(), [body(0, 2, shadow=Worker(4.0, (0, 1)))]
    assert groups_of(next_plan(own, 0, view(pair, 12, 17)))[0].spec.shadow is not None
    assert groups_of(next_plan(own, PERIOD_NS, view(pair, 12, 19)))[0].spec.shadow is not None, "0.9 × 20.2 = 18.2"
    assert groups_of(next_plan(own, 2 * PERIOD_NS, view(pair, 12, 17)))[0].spec.shadow is not None
    assert groups_of(next_plan(own, 3 * PERIOD_NS, view(pair, 12, 17)))[0].spec.shadow is None


def test_a_shadow_that_loads_counts_as_chosen_so_that_no_other_is_started() -> None:
    own, two = policy(), [body(0, 2, "n0"), body(1, 2, "n1")]
    first = groups_of(next_plan(own, 0, view(two, 25, 60, nodes=2)))
    assert [group.spec.shadow is not None for group in first].count(True) == 1
    loading = [body(0, 2, "n0", Worker(4.0, (0, 1)), shape=ALONE), two[1]]
    second = groups_of(next_plan(own, PERIOD_NS, view(loading, 25, 60, nodes=2)))
    assert [group.spec.shadow is not None for group in second].count(True) == 1


# Bursts met by what is cheapest (ours)


def cheapest(**options: object) -> Bodies:
    return policy(counts_shadows=False, bursts="cheapest", **options)


def starting_in(taken_s: float, shown: ClusterView) -> ClusterView:
    """The same view with a body that takes so many seconds to start."""
    (stage,) = shown.stages
    return replace(shown, stages=(replace(stage, starts_ns={("a", "cpu"): s(taken_s)}),))


def test_the_cheapest_shadow_has_no_more_cores_than_it_needs() -> None:
    """A body of 2 cores carries 20.2 rps; with 4 cores a shadow adds 13.09 or 26.66."""
    (group,) = groups_of(next_plan(cheapest(), 0, view([body(0, 2)], 12, 22)))
    assert group.spec.shadow is not None
    assert group.spec.shadow.cores < 4, "not all that are left"
    (group,) = groups_of(next_plan(cheapest(), 0, view([body(0, 2)], 12, 20)))
    assert group.spec.shadow is None


def test_a_body_is_started_where_no_shadow_has_room_or_memory_is_worth_little() -> None:
    crowded = next_plan(cheapest(shadows_per_node=0), 0, view([body(0, 2)], 12, 40))
    assert sum(group.count for group in groups_of(crowded)) > 1
    assert all(group.spec.shadow is None for group in groups_of(crowded))
    worthless = next_plan(cheapest(memory_cores=1e-6), 0, view([body(0, 2)], 12, 400, cores=64.0))
    assert sum(group.count for group in groups_of(worthless)) > 1
    assert next_plan(policy(), 0, view([body(0, 2)], 12, 400, cores=64.0)).stages[0].groups[0].count == 1


def test_a_body_that_takes_no_time_to_start_needs_no_shadow_beside_it() -> None:
    """One burst, where a body would take none of the ten seconds, and where it would take nine."""
    shadows = {}
    for taken_s in (0.0, 9.0):
        groups = groups_of(next_plan(cheapest(memory_cores=0.5), 0, starting_in(taken_s, view([body(0, 2)], 12, 60))))
        shadows[taken_s] = sum(group.count for group in groups if group.spec.shadow)
    assert shadows == {0.0: 0, 9.0: 1}
    assert cheapest().asks_for_starts
    assert not policy().asks_for_starts


def test_a_body_is_started_once_the_burst_has_lasted_as_long_as_its_start() -> None:
    """A node with no room for shadows, and a body that takes two seconds to start."""
    own = cheapest(shadows_per_node=0)
    slow, quiet = (starting_in(2, view([body(0, 2)], 12, burst, cores=64.0)) for burst in (40, 12))
    asked = [(0, slow), (s(1.5), slow), (s(2), quiet), (s(2.5), slow), (s(4), slow), (s(4.5), slow), (s(8), slow)]
    counts = [sum(group.count for group in groups_of(next_plan(own, now_ns, shown))) for now_ns, shown in asked]
    assert counts[:5] == [1] * 5, "the second burst begins anew"
    assert counts[5] > 1
    assert counts[6] > 1


def test_a_body_that_takes_longer_than_a_period_to_start_is_started_too() -> None:
    own = cheapest(shadows_per_node=0)
    slow = starting_in(30, view([body(0, 2)], 12, 40, cores=64.0))
    counts = {at: sum(group.count for group in groups_of(next_plan(own, s(at), slow))) for at in (0, 29, 30)}
    assert counts[0] == counts[29] == 1
    assert counts[30] > 1


def test_shadows_are_started_before_the_capacity_is_reached_and_bodies_after() -> None:
    """A body carries 20.2 requests/s, 14.1 at 70 %."""
    met = {}
    for burst in (13, 17, 24):
        shown = starting_in(0, view([body(0, 2)], 12, burst, cores=64.0))
        with_shadows, without = (
            groups_of(next_plan(cheapest(gamma=0.7, shadows_per_node=n), 0, shown)) for n in (1, 0)
        )
        met[burst] = any(group.spec.shadow for group in with_shadows), sum(group.count for group in without) > 1
    assert met == {13: (False, False), 17: (True, False), 24: (True, True)}


def test_a_shadow_may_have_all_cores_that_its_node_has_left() -> None:
    plan = next_plan(cheapest(cores_max=16), 0, starting_in(9, view([body(0, 2)], 12, 60, cores=2.0 + 3)))
    assert [group.spec.shadow.cores for group in groups_of(plan) if group.spec.shadow] == [3.0]


def test_the_cheapest_shadow_keeps_nearly_as_many_from_waiting_as_any() -> None:
    chosen = []
    for burst in (24, 30, 36, 46, 60):
        gains_rps = {}
        for room in (1, 2, 4, 8, 16):
            plan = next_plan(cheapest(cores_max=16), 0, starting_in(9, view([body(0, 2)], 12, burst, cores=2.0 + room)))
            group = next(group for group in groups_of(plan) if group.spec.node)
            if group.spec.shadow is not None:
                gains_rps[room] = min(burst, group.rate_rps) - CAPACITIES[2]
                assert group.spec.shadow.cores <= room
        assert gains_rps[16] >= 0.89 * max(gains_rps.values()), (burst, gains_rps)
        assert group.spec.shadow is not None
        chosen.append(group.spec.shadow.cores)
    assert chosen[0] < chosen[-1]


def test_bodies_that_start_count_so_that_no_others_are_started() -> None:
    own = cheapest(shadows_per_node=0)
    first = groups_of(next_plan(own, 0, view([body(0, 2)], 12, 30, cores=64.0)))
    count = sum(group.count for group in first)
    assert count > 1
    (fresh,) = {group.spec.cores for group in first if not group.spec.node}
    starting = [body(at, fresh, life=Life.STARTING) for at in range(1, count)]
    again = groups_of(next_plan(own, PERIOD_NS, view([body(0, 2), *starting], 12, 30, cores=64.0)))
    assert sum(group.count for group in again) == count


def test_shadows_carry_a_burst_until_bodies_that_start_are_there() -> None:
    replicas = [body(0, 2), body(1, 4, "n1", life=Life.STARTING)]
    shadows = {}
    for taken_s in (9.0, 0.001):
        groups = groups_of(next_plan(cheapest(), 0, starting_in(taken_s, view(replicas, 40, 40, nodes=2))))
        assert sum(group.count for group in groups) == 2, "no third one: the two carry 60 rps"
        shadows[taken_s] = sum(group.count for group in groups if group.spec.shadow)
    assert shadows == {9.0: 1, 0.001: 0}, "none that would not have loaded by then"


def test_each_shadow_ends_as_soon_as_the_others_carry_the_rate() -> None:
    pairs = [body(at, 2, f"n{at}", Worker(4.0, (0, 1))) for at in range(2)]
    kept = {burst: next_plan(cheapest(), 0, view(pairs, 24, burst, nodes=2)) for burst in (80, 50, 30)}
    shadows = {burst: sum(g.count for g in groups_of(plan) if g.spec.shadow) for burst, plan in kept.items()}
    assert shadows == {80: 2, 50: 1, 30: 0}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from((1, 2, 3, 4)), st.booleans(), st.booleans()), max_size=4),
    st.integers(0, 300),
    st.integers(0, 300),
    st.sampled_from(("literal", "printed", "demand")),
)
def test_laws_of_a_plan(there: list[tuple[int, bool, bool]], rate: int, burst: int, objective: str) -> None:
    """Checks 1 and 2 of section 7.4."""
    replicas = [
        body(
            at,
            cores,
            f"n{at}",
            Worker(4.0, (0, 1)) if has_shadow and ready else None,
            life=Life.READY if ready else Life.STARTING,
        )
        for at, (cores, ready, has_shadow) in enumerate(there)
    ]
    before = view(replicas, rate, burst, nodes=5)
    plan = next_plan(policy(objective=objective), 0, before)
    assert plan is not None
    groups = groups_of(plan)
    belief = Estimate(PROFILE, variant="a", hardware="cpu")

    def alone_rps(cores: float) -> float:
        return capacity_rps([each / 1e6 for each in belief.costs_ns(Slot(cores, "cpu"))], SLO_NS / 1e6)

    assert sum(group.count for group in groups) >= 1
    assert not plan.feasible or rate <= 0.8 * sum(group.rate_rps for group in groups) + 1e-6
    present = {(each.node, each.spec.cores) for each in replicas}
    for group in groups:
        spec = group.spec
        assert spec.node is None or (spec.node, spec.cores) in present
        assert 1 <= spec.cores <= 4
        assert group.batch_max >= 1
        if spec.shadow is not None and spec.shape not in {each.shape for each in replicas}:
            assert spec.shadow.layers in ((0,), (0, 1)), "the first of the order"
            node = next(each for each in before.nodes if each.node.name == spec.node)
            assert spec.shadow.cores <= node.free_cores
            pair = belief.of((spec.shadow,)).costs_ns(Slot(spec.cores, "cpu"))
            assert capacity_rps([each / 1e6 for each in pair], SLO_NS / 1e6) > alone_rps(spec.cores)
