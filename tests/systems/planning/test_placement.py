"""Where replicas go, what has no room and why, and which nodes that takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.ledger import Ledger, Reservation, cores_by_hardware
from sloop.core.protocols import Place
from sloop.core.views import Site
from sloop.profile.estimate import Estimate
from sloop.systems.planning.placement import PlanShortfall
from sloop.systems.registry import build
from sloop.systems.setup import Setup
from sloop.vocabulary import Device, Group, Node, Plan, ReplicaId, ReplicaSpec, Slot, StagePlan
from tests.systems.planning.scene import nodes, only, placed, setup, stage, steady_plan


def first_shortfall(cluster: dict[str, Any], **system: Any) -> PlanShortfall | None:
    made = setup(stage("a"), cluster=cluster, system={"name": "static", **system})
    return next(iter(placed(made, steady_plan(made, 1)).rooms["x"].shortfalls), None)


def test_everything_has_room() -> None:
    made = setup(stage("a"), stage("b", "a"), system={"name": "static", "replicas": 2})
    plan = steady_plan(made, 1)
    assert cores_by_hardware(plan) == {"custom": 4}
    found = placed(made, plan)
    assert (found.rooms["x"].shortfalls, [node.name for node in found.nodes]) == ([], ["custom-0"])
    assert [(each.group.spec.stage, each.node, each.count) for each in found.rooms["x"].placed] == [
        ("a", "custom-0", 2),
        ("b", "custom-0", 2),
    ]
    spec = plan.stages[0].groups[0].spec
    assert found.full(spec, made.beliefs["a", "a", "custom"]) is None


@pytest.mark.parametrize(
    ("cluster", "system", "said", "by"),
    [
        (nodes(4, 1), {"cores": 8}, "1 of 1 replica of a/a with 8 cores: the largest node has 4 cores, 4 too few", 4),
        (nodes(4, 1, 10), {}, "each needs 9.31e-07 GiB of memory, and the largest node has 9.31e-09", 990),
        (
            nodes(4, 2),
            {"replicas": 11},
            "3 of 11 replicas of a/a with 1 core: the plan needs 11 cores, and the cluster has 8: 3",
            3,
        ),
        (nodes(4, 2), {"replicas": 3, "cores": 2.5}, "at most 1.5 cores of a node are free", 0),
    ],
)
def test_what_has_no_room_says_why(cluster: dict[str, Any], system: dict[str, Any], said: str, by: float) -> None:
    found = first_shortfall(cluster, **system)
    assert found is not None
    assert said in found.why
    assert abs(found.needs - found.has) == pytest.approx(by)
    assert found.stage == "a"


@dataclass(frozen=True)
class Third(Place):
    """Chooses the node called custom-2."""

    def choose(self, now_ns: int, spec: ReplicaSpec, sites: Sequence[Site]) -> int:
        return [site.node.node.name for site in sites].index("custom-2")


def under(made: Setup, place: Any) -> Setup:
    """The same setup with another place policy."""
    system = only(made).system
    system = replace(system, policies=replace(system.policies, place=place))
    return replace(made, applications=(replace(only(made), system=system),))


def test_a_place_policy_may_choose_by_name() -> None:
    made = setup(stage("a"), cluster=nodes(4, 4), system="static")
    found = placed(under(made, Third()), steady_plan(made, 1))
    assert (found.rooms["x"].shortfalls, [node.name for node in found.nodes]) == ([], ["custom-2"])


def test_a_large_cluster_is_shown_once_for_each_state() -> None:
    """As in a run: of 500 equal nodes a policy that ignores names sees at most an empty one and one partly used."""
    seen: list[int] = []

    @dataclass(frozen=True)
    class Counting(Place):
        ignores_names: ClassVar[bool] = True

        def choose(self, now_ns: int, spec: ReplicaSpec, sites: Sequence[Site]) -> int:
            seen.append(len(sites))
            return 0

    made = setup(stage("a"), cluster=nodes(2, 500), system={"name": "static", "replicas": 900})
    found = placed(under(made, Counting()), steady_plan(made, 1))
    assert (found.rooms["x"].shortfalls, len(found.nodes)) == ([], 450)
    assert max(seen) == 2


# Accelerators

T4 = Device("gpu", "T4", 100, clients_max=3)


def on_devices(
    *devices: Device, share: float = 0.5, takes: int = 10, count: int = 1, cores: float = 0.1, **spec: Any
) -> list[tuple[str, str]]:
    """Kinds and reasons of what lacks room for `count` replicas that use a T4, on a node of four cores."""
    made = setup(stage("a"), cluster=nodes(4, 1))
    belief = made.beliefs["a", "a", "custom"]
    belief = Estimate(
        type(belief.profile)(
            latency_ms=belief.profile.latency_ms,
            max_batch=4,
            max_cores=4,
            accelerator="T4",
            device_memory_bytes=takes,
        ),
        variant="a",
        hardware="custom",
    )
    node = Node("custom-0", "custom", 4.0, 1000, devices)
    application = replace(made.application, cluster=(node,))
    made = replace(
        made,
        deployment=replace(made.deployment, cluster=(node,)),
        applications=(replace(only(made), application=application, beliefs={("a", "a", "custom"): belief}),),
    )
    slot = Slot(cores, "custom", "T4", share)
    plan = Plan((StagePlan("a", (Group(ReplicaSpec("a", "a", slot, **spec), count),), 1),), "")
    return [(each.kind, each.why.partition(": ")[2]) for each in placed(made, plan).rooms["x"].shortfalls]


def test_devices_have_shares_memory_and_clients() -> None:
    assert on_devices(T4, count=2) == []
    assert on_devices(T4, count=3) == [("device", "at most 0 of a T4 is free, and each needs 0.5")]
    assert on_devices(T4, T4, count=4) != []  # two devices of one name are one
    assert on_devices(T4, replace_name(T4, "other"), count=4) == []
    assert on_devices(T4, share=0.0, takes=50, count=3) == [
        ("device", "no T4 has 4.66e-08 GiB of memory free and the share that each needs")
    ]
    assert on_devices(T4, share=0.0, takes=0, count=4) == [
        ("device", "no T4 on a node with enough free cores takes another client")
    ]


def replace_name(device: Device, name: str) -> Device:
    return Device(name, device.kind, device.memory_bytes, device.clients_max)


def test_devices_that_could_never_hold_a_replica() -> None:
    assert on_devices() == [("device", "no node of hardware 'custom' has a device 'T4'")]
    assert on_devices(T4, takes=101) == [
        ("device", "each needs 9.41e-08 GiB of the memory of a T4, which has 9.31e-08")
    ]
    assert on_devices(T4, cores=5) == [("cores", "the largest node has 4 cores, 1 too few")]
    assert on_devices(T4, node="rack") == [("hardware", "no node is called 'rack'")]


# Nodes on demand


def test_nodes_on_demand_are_rented_in_order_when_others_are_full() -> None:
    cluster = {"nodes": [{"hardware": "custom", "cores": 4, "memory_bytes": 9000, "count": 1, "most": 4}]}
    made = setup(stage("a"), cluster=cluster, system={"name": "static", "replicas": 7})
    found = placed(made, steady_plan(made, 1))
    assert [(node.name, node.on_demand) for node in found.nodes] == [("custom-0", False), ("custom-1", True)]
    assert found.rooms["x"].shortfalls == []
    plan = steady_plan(setup(stage("a"), cluster=cluster, system={"name": "static", "replicas": 17}), 1)
    assert "the plan needs 17 cores, and the cluster has 16" in placed(made, plan).rooms["x"].shortfalls[0].why


def test_room_for_another_plan_leaves_the_placement_as_it_is() -> None:
    cluster = {"nodes": [{"hardware": "custom", "cores": 2, "memory_bytes": 9000, "count": 1, "most": 3}]}
    made = setup(stage("a"), cluster=cluster, system={"name": "static", "replicas": 3})
    found = placed(made, steady_plan(made, 1))
    before = [node.name for node in found.nodes]
    larger = steady_plan(setup(stage("a"), cluster=cluster, system={"name": "static", "replicas": 7}), 1)
    assert len(found.room_for("x", larger).shortfalls) == 1
    assert len(found.room_for("x", larger).placed) == 3
    assert [node.name for node in found.nodes] == before
    assert found.room_for("x", steady_plan(made, 1)) is found.rooms["x"]


def test_an_empty_node_on_demand_is_given_back() -> None:
    """If it stayed, the second of two replicas would be spread to it."""
    cluster = {"nodes": [{"hardware": "custom", "cores": 2, "memory_bytes": 9000, "count": 1, "most": 2}]}

    def of(replicas: int) -> Setup:
        return setup(stage("a"), cluster=cluster, system={"name": "static", "replicas": replicas, "place": "spread"})

    found = placed(of(1), steady_plan(of(1), 1))
    for replicas, expected in ((3, {"custom-0", "custom-1"}), (2, {"custom-0"})):
        room = found.room_for("x", steady_plan(of(replicas), 1))
        assert {each.node for each in room.placed} == expected


# Equal nodes

GPU = (Device("gpu", "T4", 100),)
KINDS = st.sampled_from([("c", 4.0, 100, ()), ("g", 4.0, 100, GPU), ("c", 2.0, 100, ()), ("c", 4.0, 50, ())])


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=9))
    return [Node(f"n{place}", *kind) for place, kind in enumerate(kinds)]


def belief_with(memory_bytes: int) -> Estimate:
    made = setup(stage("a")).beliefs["a", "a", "custom"]
    profile = type(made.profile)(
        latency_ms=made.profile.latency_ms, max_batch=1, max_cores=1, memory_bytes=memory_bytes
    )
    return Estimate(profile, variant="a", hardware="c")


BELIEFS = {memory_bytes: belief_with(memory_bytes) for memory_bytes in (0, 30)}


@pytest.mark.parametrize("name", ["best_fit", "spread"])
@settings(max_examples=100)
@given(cluster=clusters(), data=st.data())
def test_replicas_go_where_they_would_if_all_nodes_were_shown(name: str, cluster: list[Node], data: Any) -> None:
    policy: Any = build("place", name, {})
    ledger = Ledger(cluster)
    ids: list[ReplicaId] = []

    def chosen(found: list[Site]) -> tuple[str, str | None] | None:
        if not found:
            return None
        site = found[policy.choose(0, spec, found)]
        return site.node.node.name, site.device.device.name if site.device else None

    for number in range(data.draw(st.integers(1, 20))):
        accelerator = data.draw(st.sampled_from(["", "", "T4"]))
        cores = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
        spec = ReplicaSpec("a", "a", Slot(cores, "g" if accelerator else "", accelerator, 0.4))
        belief = BELIEFS[data.draw(st.sampled_from([0, 30]))]
        wanted = chosen(ledger.sites(spec, belief))
        assert chosen(ledger.sites(spec, belief, one_of_equal=True)) == wanted
        node, device = wanted or ("n0", None)
        if ledger.reserve(ReplicaId(number), Reservation.of(spec, belief, node, device)):
            ids.append(ReplicaId(number))
        if ids and data.draw(st.integers(0, 3)) == 0:
            ledger.release(ids.pop(data.draw(st.integers(0, len(ids) - 1))))
