"""As many as can finish in time, and which heads are passed over."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.protocols import Take
from sloop.errors import InputError
from sloop.policies.batch.deadline import LOOKAHEAD_BATCHES, Deadline
from sloop.units import ms
from sloop.vocabulary import Request, RequestId, Visit

COSTS_NS = [0, *(ms(10 + n) for n in range(1, 33))]


def queue_of(*deadlines_ms: float) -> list[Visit]:
    requests = [Request(RequestId(n), 0, 0, ms(deadline)) for n, deadline in enumerate(deadlines_ms)]
    return [Visit(request, "stage", 0, request.deadline_ns) for request in requests]


def test_with_time_enough_it_takes_everything_up_to_the_limit() -> None:
    assert Deadline().decide(0, queue_of(*[500] * 5), 32, COSTS_NS) == Take(count=5)
    assert Deadline().decide(0, queue_of(*[500] * 50), 32, COSTS_NS) == Take(count=32)


def test_the_batch_is_as_large_as_the_head_affords() -> None:
    assert Deadline().decide(0, queue_of(14, 500, 500, 500, 500, 500), 32, COSTS_NS) == Take(count=4)


def test_the_rest_of_the_way_takes_its_part_of_the_slack() -> None:
    assert Deadline().decide(0, queue_of(24, *[500] * 5), 32, COSTS_NS, 0, ms(10)) == Take(count=4)
    waiting = Deadline(wait_ns=ms(100)).decide(0, queue_of(60), 32, COSTS_NS, 0, ms(10))
    assert waiting == Take(count=0, wait_until_ns=ms(60 - 10 - 12))


def test_a_head_that_costs_nobody_else_anything_is_served() -> None:
    assert Deadline().decide(0, queue_of(11, 200, 200), 32, COSTS_NS) == Take(count=1)


def test_a_head_that_would_make_many_others_late_is_passed_over() -> None:
    queue = queue_of(11, *[42] * 32)  # serving the head alone leaves 31 ms for a batch of 32 that takes 42
    assert Deadline().decide(0, queue, 32, COSTS_NS) == Take(count=32, skip=1)


def test_a_queue_without_hope_is_dropped_as_far_as_it_looks() -> None:
    assert Deadline().decide(ms(100), queue_of(20, 30, 110), 32, COSTS_NS) == Take(count=0, skip=3)
    many = Deadline().decide(ms(100), queue_of(*[20] * 500), 8, COSTS_NS)
    assert many == Take(count=0, skip=8 * LOOKAHEAD_BATCHES)


def test_waits_for_company_only_as_long_as_the_head_can_afford() -> None:
    only = queue_of(15)
    assert Deadline(wait_ns=ms(50)).decide(0, only, 8, COSTS_NS) == Take(count=0, wait_until_ns=ms(15 - 12))
    assert Deadline(wait_ns=ms(50)).decide(ms(3), only, 8, COSTS_NS) == Take(count=1)
    assert Deadline(wait_ns=ms(2)).decide(0, only, 8, COSTS_NS) == Take(count=0, wait_until_ns=ms(2))
    assert Deadline(wait_ns=ms(50)).decide(0, queue_of(*[900] * 8), 8, COSTS_NS) == Take(count=8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 120), min_size=1, max_size=80), st.integers(1, 32))
def test_laws(deadlines_ms: list[int], limit: int) -> None:
    queue = queue_of(*sorted(deadlines_ms))
    before = list(queue)
    take = Deadline().decide(0, queue, limit, COSTS_NS)
    assert queue == before, "the queue is the core's"
    assert take == Deadline().decide(0, queue, limit, COSTS_NS), "the same question has the same answer"
    assert take.count <= limit
    assert take.skip + take.count <= len(queue)
    assert take.skip + take.count > 0, "it starts something or gives something up"
    if take.count:
        assert COSTS_NS[take.count] <= queue[take.skip].deadline_ns, "whatever it starts can be in time"


def test_work_is_bounded_on_long_queues(visit: Callable[..., Visit]) -> None:
    class Counted(list[Visit]):
        reads = 0

        def __getitem__(self, index: int) -> Visit:  # type: ignore[override]  # only indexed here
            Counted.reads += 1
            return super().__getitem__(index)

    queue = Counted(visit(number, deadline_ms=11 + number / 1000) for number in range(100_000))
    Deadline().decide(0, queue, 32, COSTS_NS)
    assert Counted.reads <= 32 * LOOKAHEAD_BATCHES + 1


def test_refuses_a_negative_wait() -> None:
    with pytest.raises(InputError, match="wait_ms"):
        Deadline(wait_ns=-ms(1))
