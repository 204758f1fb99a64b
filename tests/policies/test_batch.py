"""Batch policies: when a batch starts, how large it is, and until when it waits."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.protocols import Batch, BatchDecision
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.batch import LOOKAHEAD_BATCHES, Deadline, Full, Slack, Timeout, WorkConserving
from sloop.units import ms
from sloop.vocabulary import Request, RequestId, Visit


def decided(
    policy: Batch,
    now_ns: int,
    visits: Sequence[Visit],
    limit: int,
    costs_ns: Sequence[int],
    wait_ns: int = 0,
    remaining_ns: int = 0,
) -> BatchDecision:
    """The policy's answer about a replica on a device where nothing runs."""
    return policy.decide(now_ns, AssumedQueue(visits, wait_ns, remaining_ns), AssumedDevice(limit, costs_ns))


@pytest.mark.parametrize(("waiting", "limit", "count"), [(1, 8, 1), (8, 8, 8), (20, 8, 8)])
def test_takes_all_up_to_the_limit(visit: Callable[..., Visit], waiting: int, limit: int, count: int) -> None:
    queue = [visit(number) for number in range(waiting)]
    assert decided(WorkConserving(), 0, queue, limit, range(limit + 1)) == BatchDecision(count)


# timeout


COSTS_NS = range(17)


def test_a_full_batch_starts_at_once(visit: Callable[..., Visit]) -> None:
    queue = [visit(number) for number in range(9)]
    assert decided(Timeout(), 0, queue, 8, COSTS_NS) == BatchDecision(8)


def test_the_wait_counts_from_the_oldest_arrival_wherever_it_stands(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, arrived_ms=7, deadline_ms=50), visit(2, arrived_ms=2, deadline_ms=900)]
    policy = Timeout(wait_ns=ms(10))
    assert decided(policy, ms(8), queue, 16, COSTS_NS) == BatchDecision(wait_until_ns=ms(12))
    assert decided(policy, ms(12), queue, 16, COSTS_NS) == BatchDecision(2)


def test_sizes_of_batches_follow_poisson_s_law(visit: Callable[..., Visit]) -> None:
    """min(b, 1 + Poisson(λW))."""
    random, wait_ms, rate, limit = Random(7), 10.0, 0.3, 6
    policy = Timeout(wait_ns=ms(wait_ms))
    arrivals = list(accumulate(random.expovariate(rate) for _ in range(20_000)))
    sizes, queue = Counter[int](), list[Visit]()
    for number, at_ms in enumerate(arrivals):
        if queue and decided(policy, ms(at_ms), queue, limit, COSTS_NS).count:  # its time was up before
            sizes[len(queue)] += 1
            queue = []
        queue.append(visit(number, arrived_ms=at_ms))
        if decided(policy, ms(at_ms), queue, limit, COSTS_NS).count:
            sizes[len(queue)] += 1
            queue = []
    mean, total = wait_ms * rate, sum(sizes.values())
    expected = {k + 1: math.exp(-mean) * mean**k / math.factorial(k) for k in range(limit - 1)}
    expected[limit] = 1 - sum(expected.values())
    assert {size: sizes[size] / total for size in expected} == pytest.approx(expected, abs=0.02)
    assert set(sizes) <= set(expected)


def test_refuses_a_negative_wait() -> None:
    with pytest.raises(InputError, match="wait_ms must be a time of at least 0 ms, not -1 ms"):
        check_ranges(Timeout(wait_ns=ms(-1)))


# full


FULL_COSTS_NS = [0, ms(10), ms(15), ms(20), ms(25)]
MakeVisit = Callable[..., Visit]


def test_a_full_batch_goes_at_once(visit: MakeVisit) -> None:
    queue = [visit(number) for number in range(6)]
    assert decided(Full(), 0, queue, 4, FULL_COSTS_NS, ms(50)) == BatchDecision(4)


def test_it_waits_as_long_as_the_plan_counts_on_times_its_patience(visit: MakeVisit) -> None:
    queue = [visit(arrived_ms=100), visit(arrived_ms=120)]
    assert decided(Full(), ms(130), queue, 4, FULL_COSTS_NS, ms(50)) == BatchDecision(wait_until_ns=ms(200))
    assert decided(Full(patience=1.0), ms(130), queue, 4, FULL_COSTS_NS, ms(50)) == BatchDecision(wait_until_ns=ms(150))
    assert decided(Full(), ms(200), queue, 4, FULL_COSTS_NS, ms(50)) == BatchDecision(2)


def test_the_wait_counts_from_the_oldest_wherever_it_stands(visit: MakeVisit) -> None:
    queue = [visit(1, arrived_ms=7, deadline_ms=500), visit(2, arrived_ms=2, deadline_ms=900)]
    assert decided(Full(patience=1), ms(8), queue, 4, FULL_COSTS_NS, ms(10)) == BatchDecision(wait_until_ns=ms(12))
    assert decided(Full(patience=1), ms(12), queue, 4, FULL_COSTS_NS, ms(10)) == BatchDecision(2)


def test_full_leaves_time_for_the_remaining_stages(visit: MakeVisit) -> None:
    queue = [visit(arrived_ms=100, deadline_ms=180)]
    assert decided(Full(), ms(110), queue, 4, FULL_COSTS_NS, ms(50), ms(30)) == BatchDecision(wait_until_ns=ms(125))


def test_it_does_not_wait_past_what_the_tightest_can_afford(visit: MakeVisit) -> None:
    queue = [visit(arrived_ms=100, deadline_ms=180)]
    assert decided(Full(), ms(130), queue, 4, FULL_COSTS_NS, ms(50)) == BatchDecision(wait_until_ns=ms(155))
    assert decided(Full(), ms(155), queue, 4, FULL_COSTS_NS, ms(50)) == BatchDecision(1)
    assert decided(Full(), ms(999), queue, 4, FULL_COSTS_NS, ms(9_999)) == BatchDecision(1), "too late anyway"


def test_full_does_not_wait_without_a_planned_wait(visit: MakeVisit) -> None:
    assert decided(Full(), ms(1), [visit()], 4, FULL_COSTS_NS) == BatchDecision(1)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="patience must be a number of at least 0, not -1"):
        check_ranges(Full(patience=-1))


# slack


SLACK_COSTS_NS = [0, *(ms(10 + n) for n in range(1, 9))]


def test_waits_until_a_full_batch_would_just_make_it(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, deadline_ms=500), visit(2, deadline_ms=100)]
    start_by_ns = ms(100 - 18 - 20)
    assert decided(Slack(), 0, queue, 8, SLACK_COSTS_NS) == BatchDecision(wait_until_ns=start_by_ns)
    assert decided(Slack(), start_by_ns, queue, 8, SLACK_COSTS_NS) == BatchDecision(2)


def test_slack_leaves_time_for_the_remaining_stages(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, deadline_ms=100)]
    assert decided(Slack(), 0, queue, 8, SLACK_COSTS_NS, 0, ms(30)) == BatchDecision(
        wait_until_ns=ms(100 - 30 - 18 - 20)
    )


def test_slack_starts_a_full_batch_at_once(visit: Callable[..., Visit]) -> None:
    assert decided(Slack(), 0, [visit(number) for number in range(9)], 8, SLACK_COSTS_NS) == BatchDecision(8)


# deadline


DEADLINE_COSTS_NS = [0, *(ms(10 + n) for n in range(1, 33))]


def queue_of(*deadlines_ms: float) -> list[Visit]:
    requests = [Request(RequestId(n), 0, 0, ms(deadline)) for n, deadline in enumerate(deadlines_ms)]
    return [Visit(request, "stage", 0, request.deadline_ns) for request in requests]


def test_with_time_enough_it_takes_everything_up_to_the_limit() -> None:
    assert decided(Deadline(), 0, queue_of(*[500] * 5), 32, DEADLINE_COSTS_NS) == BatchDecision(5)
    assert decided(Deadline(), 0, queue_of(*[500] * 50), 32, DEADLINE_COSTS_NS) == BatchDecision(32)


def test_the_batch_is_as_large_as_the_head_affords() -> None:
    assert decided(Deadline(), 0, queue_of(14, 500, 500, 500, 500, 500), 32, DEADLINE_COSTS_NS) == BatchDecision(4)


def test_the_remaining_stages_take_their_part_of_the_slack() -> None:
    assert decided(Deadline(), 0, queue_of(24, *[500] * 5), 32, DEADLINE_COSTS_NS, 0, ms(10)) == BatchDecision(4)


def test_a_head_that_costs_nobody_else_anything_is_served() -> None:
    assert decided(Deadline(), 0, queue_of(11, 200, 200), 32, DEADLINE_COSTS_NS) == BatchDecision(1)


def test_a_head_that_would_make_many_others_late_is_passed_over() -> None:
    queue = queue_of(11, *[42] * 32)  # serving the head alone leaves 31 ms for a batch of 32 that takes 42
    assert decided(Deadline(), 0, queue, 32, DEADLINE_COSTS_NS) == BatchDecision(skip=1)


def test_a_queue_without_hope_is_dropped_as_far_as_it_looks() -> None:
    assert decided(Deadline(), ms(100), queue_of(20, 30, 110), 32, DEADLINE_COSTS_NS) == BatchDecision(skip=3)
    many = decided(Deadline(), ms(100), queue_of(*[20] * 500), 8, DEADLINE_COSTS_NS)
    assert many == BatchDecision(skip=8 * LOOKAHEAD_BATCHES)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 120), min_size=1, max_size=80), st.integers(1, 32))
def test_laws(deadlines_ms: list[int], limit: int) -> None:
    queue = queue_of(*sorted(deadlines_ms))
    before = list(queue)
    take = decided(Deadline(), 0, queue, limit, DEADLINE_COSTS_NS)
    assert queue == before, "the queue is the core's"
    assert take == decided(Deadline(), 0, queue, limit, DEADLINE_COSTS_NS), "the same question has the same answer"
    assert take.count <= limit
    assert take.skip + take.count <= len(queue)
    assert take.skip + take.count > 0, "it starts something or gives something up"
    if take.count:
        assert DEADLINE_COSTS_NS[take.count] <= queue[take.skip].deadline_ns, "whatever it starts can be in time"


def test_work_is_bounded_on_long_queues(visit: Callable[..., Visit]) -> None:
    class Counted(list[Visit]):
        reads = 0

        def __getitem__(self, index: int) -> Visit:  # type: ignore[override]  # only indexed here
            Counted.reads += 1
            return super().__getitem__(index)

    queue = Counted(visit(number, deadline_ms=11 + number / 1000) for number in range(100_000))
    decided(Deadline(), 0, queue, 32, DEADLINE_COSTS_NS)
    assert Counted.reads <= 32 * LOOKAHEAD_BATCHES + 1
