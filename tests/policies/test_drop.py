"""Drop policies: what is given up."""

from collections.abc import Callable

import pytest

from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.drop import Age, Never, PredictiveDrop
from sloop.units import ms
from sloop.vocabulary import Request, RequestId, Visit


def test_however_late(visit: Callable[..., Visit]) -> None:
    assert not Never().is_hopeless(ms(10_000), visit(deadline_ms=1), ms(50))


# age


def test_age_counts_from_sending_and_the_limit_itself_is_young_enough(visit: Callable[..., Visit]) -> None:
    late_comer = visit(sent_ms=100, arrived_ms=250, deadline_ms=300)  # SLO 200 ms
    assert not Age().is_hopeless(ms(300), late_comer, ms(50))
    assert Age().is_hopeless(ms(300) + 1, late_comer, ms(50))
    assert not Age(limit=3).is_hopeless(ms(700), late_comer, ms(50))
    assert Age(limit=3).is_hopeless(ms(701), late_comer, ms(50))


def test_refuses_a_limit_of_nothing() -> None:
    with pytest.raises(InputError, match="limit must be a number above 0, not 0"):
        check_ranges(Age(limit=0))


def test_the_budget_is_that_of_the_path_it_is_on() -> None:
    request = Request(RequestId(1), 0, 0, ms(100))
    visit = Visit(request, "stage", 0, ms(40))
    assert not Age().is_hopeless(ms(40), visit, 0)
    assert Age().is_hopeless(ms(41), visit, 0)


# predictive


def test_finishing_at_the_deadline_is_in_time(visit: Callable[..., Visit]) -> None:
    waiting = visit(deadline_ms=100)
    assert not PredictiveDrop().is_hopeless(ms(60), waiting, ms(40))
    assert PredictiveDrop().is_hopeless(ms(60) + 1, waiting, ms(40))


def test_the_way_ahead_alone_or_in_full_batches(visit: Callable[..., Visit]) -> None:
    waiting = visit(deadline_ms=100)
    assert not PredictiveDrop().is_hopeless(ms(50), waiting, ms(40), ms(60))
    assert PredictiveDrop(batch="full").is_hopeless(ms(50), waiting, ms(40), ms(60))
    assert not PredictiveDrop(batch="full").is_hopeless(ms(40), waiting, ms(40), ms(60))
