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


def test_the_way_ahead_alone_or_in_full_batches(visit: Callable[..., Visit]) -> None:
    waiting = visit(deadline_ms=100)
    assert not Predictive().is_hopeless(ms(50), waiting, ms(40), ms(60))
    assert Predictive(batch="full").is_hopeless(ms(50), waiting, ms(40), ms(60))
    assert not Predictive(batch="full").is_hopeless(ms(40), waiting, ms(40), ms(60))


def test_refuses_negative_trust() -> None:
    with pytest.raises(InputError, match="trust"):
        Predictive(trust=-0.1)
