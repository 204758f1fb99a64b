"""Order policies: keys, and what earliest deadline first means for batches."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.queue import Queue
from sloop.policies.order import Edf, Fifo
from sloop.vocabulary import Request, RequestId, Visit


def test_earlier_arrival_at_the_stage_comes_first(visit: Callable[..., Visit]) -> None:
    urgent_but_late, patient = visit(deadline_ms=10, arrived_ms=5), visit(deadline_ms=900, arrived_ms=4)
    assert Fifo().key(patient) < Fifo().key(urgent_but_late)


# edf


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 16))
def test_no_batch_leaves_an_earlier_deadline_behind(deadlines_ns: list[int], batch: int) -> None:
    queue = Queue("only", Edf())
    for number, deadline_ns in enumerate(deadlines_ns):
        request = Request(RequestId(number), 0, number, deadline_ns)
        queue.push(number, Visit(request, "stage", number, deadline_ns))
    taken: list[Visit] = []
    while queue.visits:
        now = queue.take(batch)
        assert all(took.deadline_ns <= left.deadline_ns for took in now for left in queue.visits)
        taken += now
    expected = sorted(range(len(deadlines_ns)), key=lambda number: (deadlines_ns[number], number))
    assert [visit.request.id for visit in taken] == expected
