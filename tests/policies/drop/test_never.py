"""Give nothing up."""

from collections.abc import Callable

from sloop.policies.drop.never import Never
from sloop.units import ms
from sloop.vocabulary import Visit


def test_however_late(visit: Callable[..., Visit]) -> None:
    assert not Never().is_hopeless(ms(10_000), visit(deadline_ms=1), ms(50))
