"""The stand-in for edge and clients: requests come at about the rate that was set, and are answered."""

import socket
from time import perf_counter_ns

import pytest

from sloop.profile.service_load import RATE_RPS_MAX, request_of, service_load

SECOND = 1_000_000_000


@pytest.mark.live
def test_requests_come_while_a_rate_is_set_and_something_else_is_awaited() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, service_load() as load:
        load.serve_until(perf_counter_ns() + SECOND // 20)
        assert load.answered == 0
        assert load.set_rate(200, 1000) == 200
        begin_ns = perf_counter_ns()
        while load.answered < 20 and perf_counter_ns() - begin_ns < 20 * SECOND:
            load.serve_until(perf_counter_ns() + SECOND // 20)
        assert load.answered >= 20
        theirs.sendall(b"x")
        load.wait_for(ours, 20.0)
        assert ours.recv(1) == b"x"
        with pytest.raises(TimeoutError, match="no answer within"):
            load.wait_for(ours, 0.01)


@pytest.mark.live
def test_the_stand_in_never_takes_the_machine_for_itself() -> None:
    with service_load() as load:
        assert load.set_rate(1e6, 4) == RATE_RPS_MAX
        assert load.set_rate(1e6, 10_000_000) == pytest.approx(15)


def test_a_request_declares_its_length() -> None:
    head, _, body = request_of(4000).partition(b"\r\n\r\n")
    assert int(head.rpartition(b"content-length: ")[2]) == len(body) > 4000
