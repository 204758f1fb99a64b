"""Give up what is older than n times its SLO."""

from collections.abc import Callable

import pytest

from sloop.errors import InputError
from sloop.policies.drop.age import Age
from sloop.units import ms
from sloop.vocabulary import Request, RequestId, Visit


def test_age_counts_from_sending_and_the_limit_itself_is_young_enough(visit: Callable[..., Visit]) -> None:
    late_comer = visit(sent_ms=100, arrived_ms=250, deadline_ms=300)  # SLO 200 ms
    assert not Age().is_hopeless(ms(300), late_comer, ms(50))
    assert Age().is_hopeless(ms(300) + 1, late_comer, ms(50))
    assert not Age(limit=3).is_hopeless(ms(700), late_comer, ms(50))
    assert Age(limit=3).is_hopeless(ms(701), late_comer, ms(50))


def test_refuses_a_limit_of_nothing() -> None:
    with pytest.raises(InputError, match="limit = 0 is out of range"):
        Age(limit=0)


def test_the_budget_is_that_of_the_path_it_is_on() -> None:
    request = Request(RequestId(1), 0, 0, ms(100))
    visit = Visit(request, "stage", 0, ms(40))
    assert not Age().is_hopeless(ms(40), visit, 0)
    assert Age().is_hopeless(ms(41), visit, 0)
