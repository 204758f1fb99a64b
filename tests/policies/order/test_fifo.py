"""First in, first out."""

from collections.abc import Callable

from sloop.policies.order.fifo import Fifo
from sloop.vocabulary import Visit


def test_earlier_arrival_at_the_stage_comes_first(visit: Callable[..., Visit]) -> None:
    urgent_but_late, patient = visit(deadline_ms=10, arrived_ms=5), visit(deadline_ms=900, arrived_ms=4)
    assert Fifo().key(patient) < Fifo().key(urgent_but_late)
