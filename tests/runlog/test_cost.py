"""Allocated cores and money of replicas and of whole nodes, against the same integrals by hand."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.runlog.cost import HELD_STATES, CostAccount, NodeAccount, NodeRow
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Device, Node, NodeState, ReplicaId, ReplicaSpec, Slot
from tests.counting import calls_of

SPEC = ReplicaSpec("s", "v", Slot(2.0, "x"), node="n")
NODE = Node("n", "x", cores=8.0, memory_bytes=0, usd_per_h=3600.0)
GPU = Node("gpu", "a100", 8, 0, devices=(Device("cuda:0", "a100", 0), Device("cuda:1", "a100", 0)), usd_per_h=4.0)


def core_s(account: CostAccount) -> float:
    return account.total_microcore_ns / 1e6 / NS_PER_S


def test_cores_and_dollars_are_integrals_over_time() -> None:
    account = CostAccount({"n": NODE})
    account.allocate(0, ReplicaId(1), SPEC, 2.0)
    account.allocate(s(10), ReplicaId(1), SPEC, 4.0)
    account.release(s(15), ReplicaId(1))
    account.charge(s(100))
    assert core_s(account) == 2 * 10 + 4 * 5
    assert account.usd == 40 / 8  # a dollar a second for eight cores
    assert (account.cores, account.microcores) == (0, {"s": 0})


def test_stages_are_accounted_one_by_one() -> None:
    account = CostAccount({"n": NODE})
    account.allocate(0, ReplicaId(1), SPEC, 2.0)
    account.allocate(s(1), ReplicaId(2), ReplicaSpec("t", "v", Slot(0.5, "y"), "n"), 0.5)
    account.charge(s(3))
    assert account.microcore_ns == {"s": 6_000_000 * NS_PER_S, "t": 1_000_000 * NS_PER_S}
    assert account.hardware_microcores == {"x": 2_000_000, "y": 500_000}
    assert account.hardware_microcore_ns == {"x": 6_000_000 * NS_PER_S, "y": 1_000_000 * NS_PER_S}


def test_an_order_for_fewer_cores_frees_none_yet() -> None:
    account = CostAccount()
    account.allocate(0, ReplicaId(1), SPEC, 2.0)
    account.grow(0, ReplicaId(1), 1.0)
    assert account.cores == 2.0
    account.grow(0, ReplicaId(1), 3.0)
    account.grow(0, ReplicaId(9), 3.0)
    assert account.cores == 3.0


@pytest.mark.parametrize(
    ("spec", "usd_per_h"),
    [
        (ReplicaSpec("a", "v", Slot(2.0), "gpu"), 1.0),
        (ReplicaSpec("a", "v", Slot(2.0, share=0.5), "gpu", "cuda:0"), 4.0 * 0.25),
        (ReplicaSpec("a", "v", Slot(2.0), "gpu", "cuda:0"), 2.0),
        (ReplicaSpec("a", "v", Slot(2.0, share=0.0), "gpu", "cuda:0"), 1.0),
        (ReplicaSpec("a", "v", Slot(2.0), "elsewhere"), 0.0),
    ],
)
def test_a_replica_pays_the_larger_of_its_shares(spec: ReplicaSpec, usd_per_h: float) -> None:
    account = CostAccount({"gpu": GPU})
    account.allocate(0, ReplicaId(0), spec, spec.cores)
    account.release(s(3600), ReplicaId(0))
    assert account.usd == pytest.approx(usd_per_h)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 1.0, 2.0])),
        max_size=40,
    )
)
def test_many_changes_leave_no_rounding_error(changes: list[tuple[int, int, float]]) -> None:
    account, now_ns, by_hand = CostAccount({"n": NODE}), 0, 0.0
    cores: dict[int, float] = {}
    for passed_ns, replica, size in changes:
        now_ns += passed_ns
        by_hand += passed_ns / NS_PER_S * sum(cores.values())
        if size:
            cores[replica] = size
            account.allocate(now_ns, ReplicaId(replica), SPEC, size)
        else:
            cores.pop(replica, None)
            account.release(now_ns, ReplicaId(replica))
    for replica in cores:
        account.release(now_ns, ReplicaId(replica))
    assert account.cores == 0.0  # exactly: cores are summed as integers
    assert abs(core_s(account) - by_hand) < 1e-3


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 8.0)), max_size=30))
def test_the_price_is_the_exact_sum_of_the_replicas_prices(changes: list[tuple[int, float]]) -> None:
    prices: dict[int, float] = {}
    account = CostAccount({"n": structs.replace(NODE, usd_per_h=0.1)})
    for replica, cores in changes:
        account.allocate(0, ReplicaId(replica), SPEC, cores)
        prices[replica] = 0.1 * min(1.0, cores / 8)
    account.charge(s(3600))
    assert account.usd == math.fsum(prices.values()) * s(3600) / NS_PER_S / 3600


def test_a_start_costs_the_same_among_many_replicas() -> None:
    def start(replicas: int) -> Counter[str]:
        account = CostAccount({"n": NODE})
        for replica in range(replicas):
            account.allocate(0, ReplicaId(replica), SPEC, 1.0)
        return calls_of(lambda: account.allocate(0, ReplicaId(replicas), SPEC, 1.0))

    assert start(400) == start(4)


# Whole nodes

ALWAYS = Node("always", "small", 4, 0, usd_per_h=3600.0)
ON_DEMAND = [Node(f"demand-{n}", "big", 8, 0, usd_per_h=7200.0, on_demand=True) for n in range(2)]


def test_nodes_cost_money_from_the_order_to_acquire_them_until_they_are_released_or_lost() -> None:
    account = NodeAccount([ALWAYS, *ON_DEMAND])
    account.begin(s(100))
    account.change(s(110), "demand-0", NodeState.ACQUIRING)
    account.ready(s(115), ON_DEMAND[0])
    account.change(s(115), "demand-1", NodeState.ACQUIRING)
    account.change(s(118), "demand-1", NodeState.LOST)
    account.change(s(120), "always", NodeState.LOST)
    account.change(s(130), "demand-0", NodeState.RELEASING)
    account.change(s(131), "demand-0", NodeState.RELEASED)
    account.ready(s(140), ALWAYS)
    account.charge(s(150))
    assert account.rows() == [NodeRow("small", 30.0, 30.0, 1), NodeRow("big", 24.0, 48.0, 2)]
    assert account.usd == 78.0
    assert list(account.steps) == [
        *((s(100), "small", 1), (s(100), "big", 0)),
        *((s(110), "big", 1), (s(115), "big", 2), (s(118), "big", 1)),
        *((s(120), "small", 0), (s(131), "big", 0), (s(140), "small", 1)),
    ]


def test_a_node_that_joins_is_charged_from_then_on_and_unknown_ones_are_ignored() -> None:
    account = NodeAccount()
    account.begin(0)
    account.change(s(1), "nobody", NodeState.ACQUIRING)
    account.ready(s(5), ALWAYS)
    account.charge(s(8))
    assert (account.usd, account.nodes["always"]) == (3.0, ALWAYS)


def test_kinds_of_which_no_node_was_held_have_no_row() -> None:
    account = NodeAccount(ON_DEMAND)
    account.begin(0)
    account.charge(s(10))
    assert (account.rows(), account.usd) == ([], 0.0)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 2), st.sampled_from([*NodeState])), max_size=40),
    st.integers(0, 10**10),
)
def test_held_time_against_a_plain_count(changes: list[tuple[int, int, NodeState]], rest_ns: int) -> None:
    nodes = [ALWAYS, *ON_DEMAND]
    account, now_ns = NodeAccount(nodes), 7
    account.begin(now_ns)
    states = {node.name: NodeState.RELEASED if node.on_demand else NodeState.READY for node in nodes}
    held_ns, most = dict.fromkeys(states, 0), {"small": 1, "big": 0}
    for passed_ns, number, state in [*changes, (rest_ns, 0, NodeState.LOST)]:
        now_ns += passed_ns
        for name in held_ns:
            held_ns[name] += passed_ns * (states[name] in HELD_STATES)
        states[nodes[number].name] = state
        account.change(now_ns, nodes[number].name, state)
        for kind, so_far in list(most.items()):
            held = sum(node.hardware == kind and states[node.name] in HELD_STATES for node in nodes)
            most[kind] = max(so_far, held)
    assert {name: record.held_ns for name, record in account.records.items()} == held_ns
    assert {row.hardware: row.most for row in account.rows()} == {kind: count for kind, count in most.items() if count}
    assert account.usd == pytest.approx(sum(held_ns[node.name] * node.usd_per_h for node in nodes) / 3600 / NS_PER_S)
