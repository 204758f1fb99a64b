"""Wait for a fuller batch while the tightest visit can afford it."""

from collections.abc import Callable

import pytest

from sloop.core.protocols import Take
from sloop.errors import InputError
from sloop.policies.batch.slack import Slack
from sloop.units import ms
from sloop.vocabulary import Visit

COSTS_NS = [0, *(ms(10 + n) for n in range(1, 9))]


def test_waits_until_a_full_batch_would_just_make_it(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, deadline_ms=500), visit(2, deadline_ms=100)]
    start_by_ns = ms(100 - 18 - 20)
    assert Slack().decide(0, queue, 8, COSTS_NS) == Take(count=0, wait_until_ns=start_by_ns)
    assert Slack().decide(start_by_ns, queue, 8, COSTS_NS) == Take(count=2)
    assert Slack(guard_ns=0).decide(start_by_ns, queue, 8, COSTS_NS) == Take(count=0, wait_until_ns=ms(82))


def test_the_rest_of_the_way_is_not_waited_away(visit: Callable[..., Visit]) -> None:
    queue = [visit(1, deadline_ms=100)]
    assert Slack().decide(0, queue, 8, COSTS_NS, 0, ms(30)) == Take(count=0, wait_until_ns=ms(100 - 30 - 18 - 20))


def test_a_full_batch_starts_at_once(visit: Callable[..., Visit]) -> None:
    assert Slack().decide(0, [visit(number) for number in range(9)], 8, COSTS_NS) == Take(count=8)


def test_refuses_a_negative_guard() -> None:
    with pytest.raises(InputError, match="guard_ms = -1 is out of range"):
        Slack(guard_ns=ms(-1))
