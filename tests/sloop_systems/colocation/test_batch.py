"""The router without a timer: only an arrival looks at the time."""

import math
from collections import Counter
from itertools import accumulate
from random import Random

import pytest

from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.protocols import BatchDecision
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.testing.views import make_visit
from sloop.units import ms
from sloop.vocabulary import Visit
from sloop_systems.colocation.batch import Untimed

COSTS_NS = range(17)


def test_only_an_arrival_looks_at_the_time() -> None:
    policy = Untimed(wait_ns=ms(10))
    queue = [make_visit(1, arrived_ms=2), make_visit(2, arrived_ms=7)]
    assert policy.decide(ms(7), AssumedQueue(queue), AssumedDevice(4, COSTS_NS)).count == 0
    assert policy.decide(ms(13), AssumedQueue(queue), AssumedDevice(4, COSTS_NS)) == BatchDecision(
        wait_until_ns=ms(102)
    )
    queue.append(make_visit(3, arrived_ms=40))
    assert policy.decide(ms(40), AssumedQueue(queue), AssumedDevice(4, COSTS_NS)) == BatchDecision(3), (
        "the one that looks leaves with the others"
    )
    assert policy.decide(ms(102), AssumedQueue(queue[:2]), AssumedDevice(4, COSTS_NS)) == BatchDecision(2), (
        "no other came"
    )
    assert policy.decide(ms(8), AssumedQueue(queue * 2), AssumedDevice(4, COSTS_NS)) == BatchDecision(4), "full"


def test_sizes_of_batches_follow_poissons_law() -> None:
    """min(b, 2 + Poisson(λW)), as the one that looks leaves with them."""
    random, wait_ms, rate, limit = Random(7), 10.0, 0.3, 6
    policy = Untimed(wait_ns=ms(wait_ms))
    sizes, queue = Counter[int](), list[Visit]()
    for number, at_ms in enumerate(accumulate(random.expovariate(rate) for _ in range(20_000))):
        queue.append(make_visit(number, arrived_ms=at_ms))
        if policy.decide(ms(at_ms), AssumedQueue(queue), AssumedDevice(limit, COSTS_NS)).count:
            sizes[len(queue)] += 1
            queue = []
    mean, total = wait_ms * rate, sum(sizes.values())
    expected = {k + 2: math.exp(-mean) * mean**k / math.factorial(k) for k in range(limit - 2)}
    expected[limit] = 1 - sum(expected.values())
    assert {size: sizes[size] / total for size in expected} == pytest.approx(expected, abs=0.02)


def test_refuses_a_negative_wait() -> None:
    with pytest.raises(InputError, match="wait_ms"):
        check_ranges(Untimed(wait_ns=-1))
