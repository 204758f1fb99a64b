"""What replicas hold and cost, against the same integral by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.report.holdings import Holdings
from sloop.units import NS_PER_S
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

SPEC = ReplicaSpec("s", "v", cores=2.0, node="n")
NODE = Node("n", "x", cores=8.0, memory_bytes=0, usd_per_h=3600.0)
HOUR_NS = 3600 * NS_PER_S


def test_cores_and_dollars_are_integrals_over_time() -> None:
    held = Holdings([NODE])
    held.hold(0, ReplicaId(1), SPEC, 2.0)
    held.hold(10 * NS_PER_S, ReplicaId(1), SPEC, 4.0)
    held.release(15 * NS_PER_S, ReplicaId(1))
    held.charge(100 * NS_PER_S)
    assert held.core_s == 2 * 10 + 4 * 5
    assert held.usd == 40 / 8  # a dollar a second for eight cores
    assert held.cores == 0
    assert held.get(ReplicaId(1)) is None


def test_a_replica_pays_the_larger_of_its_shares() -> None:
    node = Node("n", "x", cores=8.0, memory_bytes=0, usd_per_h=1.0, devices=("gpu0",))
    held = Holdings([node])
    held.hold(0, ReplicaId(1), ReplicaSpec("s", "v", 2.0, node="n", device="gpu0", share=0.75), 2.0)
    held.charge(HOUR_NS)
    assert held.usd == 0.75


def test_whole_nodes_are_paid_once_and_in_full() -> None:
    held = Holdings([NODE, Node("idle", "x", cores=8.0, memory_bytes=0, usd_per_h=7.0)], whole_nodes=True)
    held.hold(0, ReplicaId(1), SPEC, 1.0)
    held.hold(0, ReplicaId(2), SPEC, 1.0)
    held.charge(NS_PER_S)
    assert held.usd == 1.0


def test_a_node_nobody_knows_costs_nothing() -> None:
    held = Holdings([])
    held.hold(0, ReplicaId(1), SPEC, 2.0)
    held.charge(NS_PER_S)
    assert (held.core_s, held.usd) == (2.0, 0.0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 1.0, 2.0])),
        max_size=40,
    )
)
def test_nothing_is_left_behind_by_many_changes(changes: list[tuple[int, int, float]]) -> None:
    held, now_ns, by_hand = Holdings([NODE]), 0, 0.0
    cores: dict[int, float] = {}
    for passed_ns, replica, size in changes:
        now_ns += passed_ns
        by_hand += passed_ns / NS_PER_S * sum(cores.values())
        if size:
            cores[replica] = size
            held.hold(now_ns, ReplicaId(replica), SPEC, size)
        else:
            cores.pop(replica, None)
            held.release(now_ns, ReplicaId(replica))
    for replica in cores:
        held.release(now_ns, ReplicaId(replica))
    assert held.cores == 0.0  # exactly: cores are summed as integers
    assert abs(held.core_s - by_hand) < 1e-3
