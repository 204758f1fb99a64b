"""Wait for a full batch, for as long as the plan says."""

from collections.abc import Callable

import pytest

from sloop.core.seams import Take
from sloop.errors import InputError
from sloop.policies.batch.planned import Planned
from sloop.units import ms
from sloop.vocabulary import Visit

COSTS_NS = range(17)


def test_a_full_batch_starts_at_once(visit: Callable[..., Visit]) -> None:
    queue = [visit(number) for number in range(9)]
    assert Planned().decide(0, queue, 4, COSTS_NS, ms(50)) == Take(count=4)


def test_the_plans_wait_counts_from_the_oldest_arrival(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, arrived_ms=7, deadline_ms=50), visit(2, arrived_ms=2, deadline_ms=900)]
    assert Planned().decide(ms(8), queue, 16, COSTS_NS, ms(10)) == Take(count=0, wait_until_ns=ms(12))
    assert Planned().decide(ms(12), queue, 16, COSTS_NS, ms(10)) == Take(count=2)
    assert Planned(patience=2).decide(ms(12), queue, 16, COSTS_NS, ms(10)) == Take(count=0, wait_until_ns=ms(22))


def test_without_a_plans_word_nobody_waits(visit: Callable[..., Visit]) -> None:
    assert Planned().decide(ms(1), [visit(1)], 16, COSTS_NS) == Take(count=1)


def test_refuses_negative_patience() -> None:
    with pytest.raises(InputError, match="patience"):
        Planned(patience=-1)
