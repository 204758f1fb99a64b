from hypothesis import example, given
from hypothesis import strategies as st

from sloop.core.queue import Queue
from sloop.policies.order import Edf, Fifo
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


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20))
def test_what_is_removed_together_leaves_the_rest_in_order(waiting: list[tuple[int, bool]]) -> None:
    queue = Queue(Edf())
    for id, (deadline, _) in enumerate(waiting):
        queue.push(visit(id, deadline=deadline))
    goes = {id for id, (_, gone) in enumerate(waiting) if gone}
    before, seen = [v.request.id for v in queue.visits], queue.visits
    queue.remove([index for index, id in enumerate(before) if id in goes])
    assert [v.request.id for v in queue.visits] == [id for id in before if id not in goes]
    assert queue.visits is seen, "policies and the core hold on to it"
    queue.push(visit(99, deadline=3))
    deadlines = [v.deadline_ns for v in queue.visits]
    assert deadlines == sorted(deadlines), "keys went with their visits"
