"""A bound on the queue and a computed Retry-After."""

from collections.abc import Callable

import pytest

from sloop.errors import InputError
from sloop.policies.admit.bounded import Bounded
from sloop.units import ms, s
from sloop.vocabulary import Visit


def test_the_bound_and_the_answer(visit: Callable[..., Visit]) -> None:
    policy, request = Bounded(queue_max=10), visit().request
    assert policy.retry_after_ns(0, request, 9, s(3)) == 0
    assert policy.retry_after_ns(0, request, 10, s(3)) == s(3)
    assert policy.retry_after_ns(0, request, 10, 0) == ms(1), "0 would let it in"


def test_refuses_a_queue_of_nothing() -> None:
    with pytest.raises(InputError, match="queue_max = 0"):
        Bounded(queue_max=0)
