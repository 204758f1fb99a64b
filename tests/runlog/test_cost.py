"""Allocated cores and money, against the same integral by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.runlog.cost import CostAccount
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

SPEC = ReplicaSpec("s", "v", cores=2.0, node="n")
NODE = Node("n", "x", cores=8.0, memory_bytes=0, usd_per_h=3600.0)
GPU = Node("gpu", "a100", 8, 0, devices=("cuda:0", "cuda:1"), usd_per_h=4.0)


def core_s(account: CostAccount) -> float:
    return account.total_microcore_ns / 1e6 / NS_PER_S


def test_cores_and_dollars_are_integrals_over_time() -> None:
    account = CostAccount([NODE])
    account.allocate(0, ReplicaId(1), SPEC, 2.0)
    account.allocate(s(10), ReplicaId(1), SPEC, 4.0)
    account.release(s(15), ReplicaId(1))
    account.charge(s(100))
    assert core_s(account) == 2 * 10 + 4 * 5
    assert account.usd == 40 / 8  # a dollar a second for eight cores
    assert (account.cores, account.microcores) == (0, {"s": 0})


def test_stages_are_accounted_one_by_one() -> None:
    account = CostAccount([NODE])
    account.allocate(0, ReplicaId(1), SPEC, 2.0)
    account.allocate(s(1), ReplicaId(2), ReplicaSpec("t", "v", 0.5, "n"), 0.5)
    account.charge(s(3))
    assert account.microcore_ns == {"s": 6_000_000 * NS_PER_S, "t": 1_000_000 * NS_PER_S}


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
        (ReplicaSpec("a", "v", 2.0, "gpu"), 1.0),
        (ReplicaSpec("a", "v", 2.0, "gpu", "cuda:0", 0.5), 4.0 * 0.25),
        (ReplicaSpec("a", "v", 2.0, "gpu", "cuda:0", 1.0), 2.0),
        (ReplicaSpec("a", "v", 2.0, "elsewhere"), 0.0),
    ],
)
def test_a_replica_pays_the_larger_of_its_shares(spec: ReplicaSpec, usd_per_h: float) -> None:
    account = CostAccount([GPU])
    account.allocate(0, ReplicaId(0), spec, spec.cores)
    account.release(s(3600), ReplicaId(0))
    assert account.usd == pytest.approx(usd_per_h)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 1.0, 2.0])),
        max_size=40,
    )
)
def test_many_changes_leave_no_rounding_error(changes: list[tuple[int, int, float]]) -> None:
    account, now_ns, by_hand = CostAccount([NODE]), 0, 0.0
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
