"""Wait for a full batch, for a fixed time."""

from collections.abc import Callable

import pytest

from sloop.core.protocols import Take
from sloop.errors import InputError
from sloop.policies.batch.timeout import Timeout
from sloop.units import ms
from sloop.vocabulary import Visit

COSTS_NS = range(17)


def test_a_full_batch_starts_at_once(visit: Callable[..., Visit]) -> None:
    queue = [visit(number) for number in range(9)]
    assert Timeout(size=4).decide(0, queue, 16, COSTS_NS) == Take(count=4)
    assert Timeout().decide(0, queue, 8, COSTS_NS) == Take(count=8)
    assert Timeout(size=12).decide(0, queue, 8, COSTS_NS) == Take(count=8)


def test_the_wait_counts_from_the_oldest_arrival_wherever_it_stands(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, arrived_ms=7, deadline_ms=50), visit(2, arrived_ms=2, deadline_ms=900)]
    policy = Timeout(size=4, wait_ns=ms(10))
    assert policy.decide(ms(8), queue, 16, COSTS_NS) == Take(count=0, wait_until_ns=ms(12))
    assert policy.decide(ms(12), queue, 16, COSTS_NS) == Take(count=2)


@pytest.mark.parametrize("parameters", [{"size": -1}, {"wait_ns": -1}])
def test_refuses_negative_parameters(parameters: dict[str, int]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Timeout(**parameters)
