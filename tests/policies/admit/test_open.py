"""Let everybody in."""

from collections.abc import Callable

from sloop.policies.admit.open import Open
from sloop.units import s
from sloop.vocabulary import Visit


def test_however_long_the_queue(visit: Callable[..., Visit]) -> None:
    assert Open().retry_after_ns(0, visit().request, 1_000_000, s(100)) == 0
