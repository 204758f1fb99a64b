"""Admission policies: what is refused, and with which Retry-After."""

from collections.abc import Callable

import pytest

from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.admit import Bounded, Open, PredictiveAdmit
from sloop.units import ms, s
from sloop.vocabulary import Visit


def test_however_long_the_queue(visit: Callable[..., Visit]) -> None:
    assert Open().retry_after_ns(0, visit().request, 1_000_000, s(100)) == 0


# bounded


def test_the_bound_and_the_answer(visit: Callable[..., Visit]) -> None:
    policy, request = Bounded(queue_max=10), visit().request
    assert policy.retry_after_ns(0, request, 9, s(3)) == 0
    assert policy.retry_after_ns(0, request, 10, s(3)) == s(3)
    assert policy.retry_after_ns(0, request, 10, 0) == ms(1), "0 would let it in"


def test_refuses_a_queue_of_nothing() -> None:
    with pytest.raises(InputError, match="queue_max must be a number of at least 1, not 0"):
        check_ranges(Bounded(queue_max=0))


# predictive


def test_admits_what_can_make_it_and_names_the_excess(visit: Callable[..., Visit]) -> None:
    request = visit(deadline_ms=100).request
    assert PredictiveAdmit().retry_after_ns(ms(20), request, 5, ms(80)) == 0
    assert PredictiveAdmit().retry_after_ns(ms(20), request, 5, ms(95)) == ms(15)


def test_trusts_the_believed_drain_time_as_far_as_it_is_told(visit: Callable[..., Visit]) -> None:
    request = visit(deadline_ms=100).request
    assert PredictiveAdmit(trust=0.5).retry_after_ns(ms(20), request, 5, ms(160)) == 0
    assert PredictiveAdmit(trust=0.5).retry_after_ns(ms(20), request, 5, ms(180)) == ms(10)
    with pytest.raises(InputError, match="trust"):
        check_ranges(PredictiveAdmit(trust=0))


def test_an_empty_queue_admits_everything(visit: Callable[..., Visit]) -> None:
    assert PredictiveAdmit().retry_after_ns(0, visit(deadline_ms=1).request, 0, 0) == 0
