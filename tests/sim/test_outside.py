from itertools import pairwise

from msgspec.structs import replace

from sloop.events import Cancelled, Woke
from sloop.sim.outside import later, outside
from sloop.sim.truth.failure import Failure, Faults
from sloop.units import ms, s
from sloop.vocabulary import Request, RequestId

ARRIVALS = [
    (ms(10 * number), Request(RequestId(number), ms(10 * number), ms(10 * number), s(9))) for number in range(100)
]


def test_a_world_without_such_faults_has_arrivals_only() -> None:
    assert list(outside(iter(ARRIVALS), Failure(1), s(1))) == ARRIVALS


def test_later_is_the_same_later() -> None:
    moved = list(later(iter(ARRIVALS), s(2)))
    assert [(at_ns - s(2), request.id, request.slo_ns) for at_ns, request in moved] == [
        (at_ns, request.id, request.slo_ns) for at_ns, request in ARRIVALS
    ]
    assert all(at_ns == request.arrived_ns and request.sent_ns >= s(2) for at_ns, request in moved)


def test_later_requests_begin_where_they_did() -> None:
    arrivals = [(at_ns, replace(request, enters=("b",))) for at_ns, request in ARRIVALS]
    assert {request.enters for _, request in later(iter(arrivals), s(2))} == {("b",)}


def test_clients_leave_after_they_came_and_time_does_not_go_back() -> None:
    failure = Failure(1, Faults(cancelled=0.5, stray_wake_rps=20.0))
    events = list(outside(iter(ARRIVALS), failure, s(1)))
    assert all(before[0] <= after[0] for before, after in pairwise(events))
    left = {event.request: at_ns for at_ns, event in events if isinstance(event, Cancelled)}
    assert 30 < len(left) < 70
    assert all(at_ns >= ms(10 * id) for id, at_ns in left.items())
    stray_ns = [at_ns for at_ns, event in events if isinstance(event, Woke)]
    assert 5 < len(stray_ns) < 50
    assert max(stray_ns) < s(1)
    assert [event for _, event in events if isinstance(event, Request)] == [request for _, request in ARRIVALS]


def test_one_kind_of_fault_does_not_move_another() -> None:
    def leaving(faults: Faults) -> list[int]:
        events = outside(iter(ARRIVALS), Failure(1, faults), s(1))
        return [at_ns for at_ns, event in events if isinstance(event, Cancelled)]

    assert leaving(Faults(cancelled=0.2)) == leaving(Faults(cancelled=0.2, stray_wake_rps=50.0))
