from hypothesis import example, given
from hypothesis import strategies as st

from sloop.core.queue import Queue
from sloop.policies.order.edf import Edf
from sloop.policies.order.fifo import Fifo
from sloop.vocabulary import Request, RequestId, Visit


def visit(id: int, *, arrived: int = 0, deadline: int = 0) -> Visit:
    return Visit(Request(RequestId(id), arrived, arrived, deadline), "s", arrived, deadline)


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(0, 30))
@example([], 1)
def test_edf_takes_the_earliest_deadlines_and_ties_in_order_of_arrival(deadlines: list[int], count: int) -> None:
    queue = Queue(Edf())
    for id, deadline in enumerate(deadlines):
        queue.push(visit(id, arrived=id, deadline=deadline))
    taken = [v.request.id for v in queue.take(count)]
    expected = sorted(range(len(deadlines)), key=lambda id: (deadlines[id], id))
    assert taken == expected[:count]
    assert [v.request.id for v in queue.visits] == expected[count:]


def test_fifo_keeps_the_order_of_arrival_whatever_the_deadlines() -> None:
    queue = Queue(Fifo())
    for id, deadline in enumerate((9, 3, 5)):
        queue.push(visit(id, arrived=id, deadline=deadline))
    assert [v.request.id for v in queue.visits] == [0, 1, 2]


def test_a_removed_request_leaves_the_rest_in_order() -> None:
    queue = Queue(Edf())
    for id, deadline in enumerate((5, 1, 3)):
        queue.push(visit(id, deadline=deadline))
    assert queue.remove_request(RequestId(2)) == 1
    assert queue.remove_request(RequestId(2)) == 0
    queue.push(visit(7, deadline=4))
    assert [v.request.id for v in queue.visits] == [1, 7, 0]
    assert queue.remove_at(1).request.id == 7
