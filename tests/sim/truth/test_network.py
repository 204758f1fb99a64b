from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sloop.app.scenario import Delivery
from sloop.events import Cancelled, Woke
from sloop.sim.truth.failure import FaultRates, FaultSampler
from sloop.sim.truth.network import ClientNetwork, Numbering, merged, shifted, stray_wakes, with_cancellations
from sloop.units import ms, s
from sloop.vocabulary import Request, RequestId
from sloop.workload import Link, Work

LINK = Link("test", [1000.0, 100.0, 2000.0], "assumed: test")
"""Bytes per ms in three successive seconds."""
KB = 100_000


def network(semantics: Delivery = "delay") -> ClientNetwork:
    return ClientNetwork(1, slos_ns=(s(1),), payloads_bytes=(KB,), link=LINK, semantics=semantics)


def test_without_a_link_requests_arrive_when_they_are_sent() -> None:
    [(at_ns, request)] = ClientNetwork(1, slos_ns=(ms(200),)).deliver([ms(7)])
    assert (at_ns, request.sent_ns, request.arrived_ns, request.deadline_ns) == (ms(7), ms(7), ms(7), ms(207))


def test_delay_puts_off_the_arrival_and_keeps_the_deadline() -> None:
    [(at_ns, request)] = network().deliver([ms(7)])
    assert (at_ns, request.arrived_ns) == (ms(107), ms(107))
    assert (request.sent_ns, request.deadline_ns, request.elapsed_ns) == (ms(7), ms(1007), ms(100))


def test_attach_keeps_the_arrival_and_takes_from_the_budget() -> None:
    [(at_ns, request)] = network("attach").deliver([ms(7)])
    assert (at_ns, request.arrived_ns) == (ms(7), ms(7))
    assert (request.sent_ns, request.deadline_ns, request.elapsed_ns) == (ms(-93), ms(907), ms(100))


def test_a_request_sent_later_over_a_better_link_overtakes() -> None:
    arrivals = list(network().deliver([s(1.95), s(2.0)]))
    assert [request.id for _, request in arrivals] == [1, 0]
    assert [at_ns for at_ns, _ in arrivals] == [s(2.05), s(2.95)]


@settings(max_examples=50)
@given(st.lists(st.integers(0, s(6)), max_size=50).map(sorted))
def test_arrivals_come_in_order_and_none_is_lost(sent_ns: list[int]) -> None:
    arrivals = list(network().deliver(sent_ns))
    assert all(before[0] <= after[0] for before, after in pairwise(arrivals))
    assert sorted(request.sent_ns for _, request in arrivals) == sent_ns
    assert all(request.arrived_ns == at_ns for at_ns, request in arrivals)


def test_requests_bring_their_rows_and_sizes_however_they_arrive() -> None:
    works = [Work(16, 512, (16, 32)), Work(), Work(2, 8)]
    for delivered in (ClientNetwork(1, slos_ns=(s(1),)), ClientNetwork(1, slos_ns=(s(1),), application="a"), network()):
        requests = [request for _, request in delivered.deliver([0, ms(500), s(2)], iter(works))]
        assert [(each.rows, each.size, each.shape) for each in requests] == works
        assert {(each.version, each.client_id, each.trace, each.enters) for each in requests} == {("", "", "", ())}
    many = ClientNetwork(1, slos_ns=(s(1),)).deliver(range(1_000), iter(Work(rows) for rows in range(1, 1_001)))
    assert all((request.rows, request.id) == (at_ns + 1, at_ns) for at_ns, request in many)


def test_payloads_and_deadlines_are_drawn_evenly_and_independently() -> None:
    mixed = ClientNetwork(1, slos_ns=(ms(100), ms(200)), payloads_bytes=(KB, 2 * KB), link=LINK, semantics="attach")
    seen = Counter((request.slo_ns, request.elapsed_ns) for _, request in mixed.deliver([0] * 4_000))
    assert len(seen) == 4
    assert all(900 < count < 1_100 for count in seen.values())


def test_recorded_delays_come_in_order_and_then_at_random() -> None:
    delays = ((ms(1), ms(3)), (ms(2), ms(2)), (0, ms(5)))
    recorded = ClientNetwork(1, slos_ns=(s(1),), link=LINK, delays=delays)
    seen = [
        (request.arrived_ns - request.sent_ns, at_ns - request.sent_ns)
        for at_ns, request in recorded.deliver(range(0, s(10), ms(10)))
    ]
    assert tuple(seen[:3]) == delays
    assert set(seen[3:]) == set(delays)


def test_recorded_delays_keep_the_arrival_where_they_are_attached() -> None:
    recorded = ClientNetwork(1, slos_ns=(s(1),), semantics="attach", delays=((ms(80), ms(81)),))
    [(at_ns, request)] = recorded.deliver([ms(100)])
    assert (request.sent_ns, request.arrived_ns, at_ns, request.deadline_ns) == (ms(20), ms(100), ms(101), ms(1020))


ARRIVALS = [
    (ms(10 * number), Request(RequestId(number), ms(10 * number), ms(10 * number), s(9))) for number in range(100)
]


def test_a_world_without_such_faults_has_arrivals_only() -> None:
    arrivals = iter(ARRIVALS)
    assert with_cancellations(arrivals, FaultSampler(1)) is arrivals, "it costs nothing"
    assert merged([arrivals]) is arrivals


def test_later_is_the_same_later() -> None:
    moved = list(shifted(iter(ARRIVALS), s(2)))
    assert [(at_ns - s(2), request.id, request.slo_ns) for at_ns, request in moved] == [
        (at_ns, request.id, request.slo_ns) for at_ns, request in ARRIVALS
    ]
    assert all(at_ns == request.arrived_ns and request.sent_ns >= s(2) for at_ns, request in moved)


def test_later_requests_begin_where_they_did() -> None:
    arrivals = [(at_ns, replace(request, enters=("b",))) for at_ns, request in ARRIVALS]
    assert {request.enters for _, request in shifted(iter(arrivals), s(2))} == {("b",)}


def test_clients_leave_after_they_came_and_time_does_not_go_back() -> None:
    failure = FaultSampler(1, FaultRates(cancelled=0.5, stray_wake_rps=20.0))
    events = list(merged([with_cancellations(iter(ARRIVALS), failure), stray_wakes(failure, s(1))]))
    assert all(before[0] <= after[0] for before, after in pairwise(events))
    left = {event.request: at_ns for at_ns, event in events if isinstance(event, Cancelled)}
    assert 30 < len(left) < 70
    assert all(at_ns >= ms(10 * id) for id, at_ns in left.items())
    stray_ns = [at_ns for at_ns, event in events if isinstance(event, Woke)]
    assert 5 < len(stray_ns) < 50
    assert max(stray_ns) < s(1)
    assert [event for _, event in events if isinstance(event, Request)] == [request for _, request in ARRIVALS]


def test_one_kind_of_fault_does_not_move_another() -> None:
    def leaving(faults: FaultRates) -> list[int]:
        events = with_cancellations(iter(ARRIVALS), FaultSampler(1, faults))
        return [at_ns for at_ns, event in events if isinstance(event, Cancelled)]

    assert leaving(FaultRates(cancelled=0.2)) == leaving(FaultRates(cancelled=0.2, stray_wake_rps=50.0))


def test_requests_of_several_applications_have_their_own_numbers_and_unique_ids() -> None:
    networks = [
        ClientNetwork(1, slos_ns=(s(1),), application=name, numbering=Numbering(3, index))
        for index, name in enumerate(("a", "b", "c"))
    ]
    streams = [network.deliver([0, ms(1), ms(2)]) for network in networks]
    requests = [event for _, event in merged(streams) if isinstance(event, Request)]
    assert [request.id for request in requests] == list(range(9))
    assert [request.application for request in requests] == ["a", "b", "c"] * 3
    assert [Numbering(3, request.id % 3).number(request.id) for request in requests] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_requests_over_a_link_and_later_ones_carry_their_application_too() -> None:
    slow = ClientNetwork(1, slos_ns=(s(1),), payloads_bytes=(KB,), link=LINK, application="a")
    assert [request.application for _, request in shifted(slow.deliver([0, 1]), ms(1))] == ["a", "a"]


def test_events_of_one_instant_stay_in_the_order_of_their_streams() -> None:
    first, second = [(1, Woke()), (3, Woke())], [(1, ARRIVALS[0][1]), (2, ARRIVALS[1][1])]
    events = list(merged([iter(first), iter(second)]))
    assert [at_ns for at_ns, _ in events] == [1, 1, 2, 3]
    assert [type(event) for _, event in events] == [Woke, Request, Request, Woke]
