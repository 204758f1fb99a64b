"""Refuse what the queue would make late."""

from collections.abc import Callable

import pytest

from sloop.errors import InputError
from sloop.policies.admit.predictive import Predictive
from sloop.units import ms
from sloop.vocabulary import Visit


def test_admits_what_can_make_it_and_names_the_excess(visit: Callable[..., Visit]) -> None:
    request = visit(deadline_ms=100).request
    assert Predictive().retry_after_ns(ms(20), request, 5, ms(80)) == 0
    assert Predictive().retry_after_ns(ms(20), request, 5, ms(95)) == ms(15)
    assert Predictive(reserve_ns=ms(10)).retry_after_ns(ms(20), request, 5, ms(80)) == ms(10)


def test_trusts_the_believed_drain_time_as_far_as_it_is_told(visit: Callable[..., Visit]) -> None:
    request = visit(deadline_ms=100).request
    assert Predictive(trust=0.5).retry_after_ns(ms(20), request, 5, ms(160)) == 0
    assert Predictive(trust=0.5).retry_after_ns(ms(20), request, 5, ms(180)) == ms(10)
    with pytest.raises(InputError, match="trust"):
        Predictive(trust=0)


def test_an_empty_queue_admits_everything(visit: Callable[..., Visit]) -> None:
    assert Predictive(reserve_ns=ms(500)).retry_after_ns(0, visit(deadline_ms=1).request, 0, 0) == 0


def test_refuses_a_negative_reserve() -> None:
    with pytest.raises(InputError, match="reserve_ms"):
        Predictive(reserve_ns=-1)
