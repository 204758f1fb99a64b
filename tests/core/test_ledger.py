import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.core.ledger import MICRO, Ledger, Reservation, millicores
from sloop.vocabulary import Node, ReplicaId

NODE = Node("n0", "x", cores=2, memory_bytes=100, devices=("gpu0",))


def reservation(cores: float, memory: int = 0, share: float = 0) -> Reservation:
    return Reservation("n0", millicores(cores), memory, "gpu0" if share else "", round(share * MICRO))


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
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
def test_what_is_given_back_is_what_was_taken(steps: list[tuple[int, float]]) -> None:
    ledger = Ledger([NODE])
    for id, cores in steps:
        replica = ReplicaId(id)
        if replica in ledger.holdings:
            ledger.release(replica)
        else:
            ledger.reserve(replica, reservation(cores))
        held = sum(h.millicores for h in ledger.holdings.values())
        assert held <= 2000
        assert ledger.views()[0].free_cores == (2000 - held) / 1000
    for id in list(ledger.holdings):
        ledger.release(id)
    assert ledger.views()[0].free_cores == 2
