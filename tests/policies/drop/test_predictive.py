"""Give up what could not be in time even alone."""

from collections.abc import Callable

import pytest

from sloop.errors import InputError
from sloop.policies.drop.predictive import Predictive
from sloop.units import ms
from sloop.vocabulary import Visit


def test_finishing_at_the_deadline_is_in_time(visit: Callable[..., Visit]) -> None:
    waiting = visit(deadline_ms=100)
    assert not Predictive().is_hopeless(ms(60), waiting, ms(40))
    assert Predictive().is_hopeless(ms(60) + 1, waiting, ms(40))
    assert not Predictive(trust=0.5).is_hopeless(ms(80), waiting, ms(40))


def test_refuses_negative_trust() -> None:
    with pytest.raises(InputError, match="trust"):
        Predictive(trust=-0.1)
