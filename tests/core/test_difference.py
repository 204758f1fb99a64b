"""`diff` compares the replicas of a stage with its plan: what is kept, resized, started, stopped, and held back."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.difference import Difference, fullest_nodes_first
from sloop.core.difference import diff as diff_with_rates
from sloop.core.views import ReplicaView
from sloop.vocabulary import Group, Life, ReplicaId, ReplicaSpec, Slot, StagePlan, Worker


def replica(id: int, life: Life = Life.READY, cores: float = 1, variant: str = "a", node: str = "n0") -> ReplicaView:
    return ReplicaView(ReplicaId(id), ReplicaSpec("s", variant, Slot(cores)), life, 0, 0, node)


def plan(
    count: int, cores: float = 1, variant: str = "a", *, node: str | None = None, in_place: bool = True
) -> StagePlan:
    return StagePlan("s", (Group(ReplicaSpec("s", variant, Slot(cores), node), count),), 1, in_place)


def diff(replicas: Sequence[ReplicaView], target: StagePlan) -> Difference:
    """Rates of one visit per second for each core, of two for variant `b`."""
    by_id = {replica.id: rate_rps(replica.spec) for replica in replicas}
    return diff_with_rates(replicas, target, by_id.__getitem__, rate_rps)


def rate_rps(spec: ReplicaSpec) -> float:
    return spec.cores * (2 if spec.variant == "b" else 1)


def test_a_stage_that_matches_its_plan_needs_nothing() -> None:
    change = diff([replica(0), replica(1)], plan(2))
    assert change == Difference((), (), (), (), (), (), ())


def test_a_replica_that_only_differs_in_cores_is_resized() -> None:
    assert diff([replica(0)], plan(1, cores=3)).grow == ((ReplicaId(0), 3),)


def test_without_resizing_in_place_the_old_replica_is_held_until_the_new_one_is_ready() -> None:
    change = diff([replica(0)], plan(1, cores=3, in_place=False))
    assert (change.grow, len(change.start), change.stop, change.hold) == ((), 1, (), (ReplicaId(0),))
    ready = diff([replica(0), replica(1, cores=3)], plan(1, cores=3, in_place=False))
    assert (ready.start, ready.stop, ready.hold) == ((), (ReplicaId(0),), ())


def test_another_variant_replaces_only_when_ready() -> None:
    starting = diff([replica(0), replica(1, Life.STARTING, variant="b")], plan(1, variant="b"))
    assert (starting.start, starting.stop, starting.hold) == ((), (), (ReplicaId(0),))


def test_starting_replicas_go_first_and_the_newest_of_them_first() -> None:
    replicas = [replica(0), replica(1, Life.STARTING), replica(2, Life.STARTING), replica(3)]
    assert diff(replicas, plan(2)).stop == (ReplicaId(2), ReplicaId(1))
    assert diff(replicas, plan(1)).stop == (ReplicaId(2), ReplicaId(1), ReplicaId(3))


def test_specs_that_name_a_node_come_before_those_that_name_none() -> None:
    """One more replica, and a shadow or nothing new for the one that is there: whichever comes first in the plan."""
    own, shadow = ReplicaSpec("s", "a", Slot(1)), Worker(2.0, (0,))
    for there in (structs.replace(own, node="n0"), structs.replace(own, node="n0", shape=(shadow,))):
        groups = [Group(there, 1), Group(own, 1)]
        for order in (groups, groups[::-1]):
            change = diff([replica(0)], StagePlan("s", tuple(order), 1, False))
            assert change.start == (own,)
            assert change.attach == (((ReplicaId(0), shadow),) if there.shadow else ())
            assert not change.stop
            assert not change.hold


def test_a_named_node_is_part_of_the_target() -> None:
    change = diff([replica(0, node="n0"), replica(1, node="n1")], plan(1, node="n1"))
    assert change.stop == (ReplicaId(0),)


lives = st.sampled_from([Life.READY, Life.STARTING])
replicas = st.lists(st.tuples(lives, st.sampled_from([1.0, 2.0]), st.sampled_from("ab")), max_size=8)


@given(replicas, st.integers(0, 6), st.sampled_from([1.0, 2.0]), st.booleans())
def test_ready_capacity_never_falls_below_the_target_or_what_there_was(
    given_replicas: list[tuple[Life, float, str]], count: int, cores: float, in_place: bool
) -> None:
    now = [replica(id, life, c, variant) for id, (life, c, variant) in enumerate(given_replicas)]
    target = plan(count, cores, in_place=in_place)
    change = diff(now, target)
    ready = {r.id: rate_rps(r.spec) for r in now if r.life is Life.READY}
    smaller = {id: cores * (2 if now[id].spec.variant == "b" else 1) for id, cores in change.shrink if id in ready}
    left_rps = sum((ready | smaller)[id] for id in ready if id not in change.stop)
    wanted_rps = sum(rate_rps(group.spec) * group.count for group in target.groups)
    assert left_rps >= min(sum(ready.values()), wanted_rps)
    resized = [id for id, _ in (*change.grow, *change.shrink, *change.hold_shrink)]
    touched = [*change.stop, *change.hold, *resized]
    assert len(touched) == len(set(touched))
    assert len(now) - len(change.stop) - len(change.hold) + len(change.start) == count


def test_a_replica_keeps_its_cores_until_enough_others_are_ready() -> None:
    target = plan(4)
    change = diff([replica(0, cores=4)], target)
    assert (change.shrink, change.hold_shrink, len(change.start)) == ((), ((ReplicaId(0), 1),), 3)
    others = [replica(id) for id in (1, 2, 3)]
    assert diff([replica(0, cores=4), *others], target).shrink == ((ReplicaId(0), 1),)


def test_a_replica_shrinks_at_once_where_the_plan_needs_less() -> None:
    assert diff([replica(0, cores=4)], plan(1, cores=2)).shrink == ((ReplicaId(0), 2),)


def test_two_slow_replicas_are_held_for_one_of_the_same_rate() -> None:
    change = diff([replica(0), replica(1), replica(2, Life.STARTING, variant="b")], plan(1, variant="b"))
    assert (change.stop, change.hold) == ((), (ReplicaId(1), ReplicaId(0)))


def test_of_equal_replicas_those_on_the_fullest_nodes_stay() -> None:
    """Flashpoint specification, section 2.14: starting ones stop first, then idle ones, then those on nodes with the
    fewest, so that nodes with the weights keep room for more."""
    on = {0: "few", 1: "many", 2: "many", 3: "many", 4: "two", 5: "two"}
    replicas = [replica(id, node=node) for id, node in on.items()] + [replica(6, Life.STARTING, node="many")]
    replicas[4] = structs.replace(replicas[4], running=1)
    for left, stopped in ((6, [6]), (5, [6, 0]), (4, [6, 0, 5]), (2, [6, 0, 5, 3, 2]), (1, [6, 0, 5, 3, 2, 1])):
        found = diff_with_rates(replicas, plan(left), lambda id: 1.0, rate_rps, (), fullest_nodes_first(replicas))
        assert list(found.stop) == stopped, "never more than there are too many"
        assert not found.hold


def test_a_replica_that_gets_a_cap_is_another_one() -> None:
    slot = Slot(1, is_capped=False)
    open_plan = StagePlan("s", (Group(ReplicaSpec("s", "a", slot), 1),), 1)
    change = diff([replica(0)], open_plan)
    assert [spec.slot for spec in change.start] == [slot]
    assert change.grow == ()
    assert change.hold == (ReplicaId(0),)
    more = StagePlan("s", (Group(ReplicaSpec("s", "a", structs.replace(slot, cores=2)), 1),), 1)
    there = [ReplicaView(ReplicaId(0), ReplicaSpec("s", "a", slot), Life.READY, 0, 0, "n0")]
    assert diff(there, more).grow == ((ReplicaId(0), 2),)
