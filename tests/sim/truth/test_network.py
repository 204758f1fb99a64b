from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.sim.truth.network import Network, Semantics
from sloop.units import ms, s
from sloop.workload import Link

LINK = Link("test", [1000.0, 100.0, 2000.0], "assumed: test")
"""Bytes per ms in three successive seconds."""
KB = 100_000


def network(semantics: Semantics = "delay") -> Network:
    return Network(1, slos_ns=(s(1),), payloads_bytes=(KB,), link=LINK, semantics=semantics)


def test_without_a_link_requests_arrive_when_they_are_sent() -> None:
    [(at_ns, request)] = Network(1, slos_ns=(ms(200),)).deliver([ms(7)])
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, s(6)), max_size=50).map(sorted))
def test_arrivals_come_in_order_and_none_is_lost(sent_ns: list[int]) -> None:
    arrivals = list(network().deliver(sent_ns))
    assert all(before[0] <= after[0] for before, after in pairwise(arrivals))
    assert sorted(request.sent_ns for _, request in arrivals) == sent_ns
    assert all(request.arrived_ns == at_ns for at_ns, request in arrivals)


def test_payloads_and_deadlines_are_drawn_evenly_and_independently() -> None:
    mixed = Network(1, slos_ns=(ms(100), ms(200)), payloads_bytes=(KB, 2 * KB), link=LINK, semantics="attach")
    seen = Counter((request.slo_ns, request.elapsed_ns) for _, request in mixed.deliver([0] * 4_000))
    assert len(seen) == 4
    assert all(900 < count < 1_100 for count in seen.values())
