"""What fits on a node, and that reservations free exactly what they took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.core.ledger import Ledger, Reservation, fits
from sloop.core.views import NodeView
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

NODE = Node("n0", "x", cores=2, memory_bytes=100, devices=("gpu0",))


def reservation(cores: float, memory: int = 0, share: float = 0) -> Reservation:
    return Reservation.of(ReplicaSpec("s", "v", cores, "n0", "gpu0" if share else "", share), memory, "n0")


def test_a_reservation_that_does_not_fit_reserves_nothing() -> None:
    ledger = Ledger([NODE])
    assert ledger.reserve(ReplicaId(0), reservation(1.5, 60, 0.7))
    for refused in (reservation(0.6), reservation(0.1, 41), reservation(0.1, 0, 0.4)):
        assert not ledger.reserve(ReplicaId(1), refused)
    view = ledger.views()[0]
    assert (view.free_cores, view.free_memory_bytes) == (0.5, 40)
    assert view.free_share["gpu0"] == pytest.approx(0.3)


def test_growing_needs_room_and_never_shrinks() -> None:
    ledger = Ledger([NODE])
    ledger.reserve(ReplicaId(0), reservation(1.5))
    assert ledger.grow(ReplicaId(0), 1.0)
    assert ledger.views()[0].free_cores == 0.5
    assert ledger.grow(ReplicaId(0), 2.0)
    assert not ledger.grow(ReplicaId(0), 2.5)
    assert ledger.resize(ReplicaId(0), 0.25)
    assert ledger.views()[0].free_cores == 1.75


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.01, 2)), max_size=60))
def test_released_reservations_free_exactly_what_they_took(steps: list[tuple[int, float]]) -> None:
    ledger = Ledger([NODE])
    for id, cores in steps:
        replica = ReplicaId(id)
        if replica in ledger.reservations:
            ledger.release(replica)
        else:
            ledger.reserve(replica, reservation(cores))
        held = sum(h.millicores for h in ledger.reservations.values())
        assert held <= 2000
        assert ledger.views()[0].free_cores == (2000 - held) / 1000
    for id in list(ledger.reservations):
        ledger.release(id)
    assert ledger.views()[0].free_cores == 2


PARTLY_FREE = NodeView(NODE, 0.1 + 0.2, 100, {"gpu0": 0.5})


@pytest.mark.parametrize(
    ("spec", "memory_bytes", "expected"),
    [
        (ReplicaSpec("s", "v", 0.3), 100, True),
        (ReplicaSpec("s", "v", 0.31), 0, False),
        (ReplicaSpec("s", "v", 0.3), 101, False),
        (ReplicaSpec("s", "v", 0.1, device="gpu0", share=0.5), 0, True),
        (ReplicaSpec("s", "v", 0.1, device="gpu0", share=0.6), 0, False),
        (ReplicaSpec("s", "v", 0.1, device="tpu", share=0.1), 0, False),
    ],
)
def test_cores_memory_and_share_must_all_fit(spec: ReplicaSpec, memory_bytes: int, expected: bool) -> None:
    assert fits(spec, memory_bytes, PARTLY_FREE) is expected


@given(st.lists(st.floats(0.001, 1), max_size=8), st.floats(0.001, 1), st.floats(0, 1))
def test_a_policy_and_the_ledger_agree_on_what_fits(taken: list[float], cores: float, share: float) -> None:
    ledger = Ledger([NODE])
    for id, size in enumerate(taken):
        ledger.reserve(ReplicaId(id), reservation(size, 10, 0.1))
    spec = ReplicaSpec("s", "v", cores, device="gpu0", share=share)
    assert fits(spec, 30, ledger.views()[0]) is ledger.has_room(Reservation.of(spec, 30, "n0"))
