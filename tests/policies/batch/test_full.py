"""Full batches: when it goes, until when it waits, and that for ever is for ever."""

from collections.abc import Callable

import pytest

from sloop.core.protocols import Take
from sloop.errors import InputError
from sloop.policies.batch.full import Full
from sloop.units import FOREVER_NS, ms
from sloop.vocabulary import Visit

COSTS_NS = [0, ms(10), ms(15), ms(20), ms(25)]
MakeVisit = Callable[..., Visit]


def test_a_full_batch_goes_at_once(visit: MakeVisit) -> None:
    queue = [visit(number) for number in range(6)]
    assert Full().decide(0, queue, 4, COSTS_NS, ms(50)) == Take(4)
    assert Full(forever=True).decide(0, queue, 4, COSTS_NS, ms(50)) == Take(4)


def test_it_waits_as_long_as_the_plan_counts_on_times_its_patience(visit: MakeVisit) -> None:
    queue = [visit(arrived_ms=100), visit(arrived_ms=120)]
    assert Full().decide(ms(130), queue, 4, COSTS_NS, ms(50)) == Take(0, wait_until_ns=ms(200))
    assert Full(patience=1.0).decide(ms(130), queue, 4, COSTS_NS, ms(50)) == Take(0, wait_until_ns=ms(150))
    assert Full().decide(ms(200), queue, 4, COSTS_NS, ms(50)) == Take(2)


def test_the_wait_counts_from_the_oldest_wherever_it_stands(visit: MakeVisit) -> None:
    queue = [visit(1, arrived_ms=7, deadline_ms=500), visit(2, arrived_ms=2, deadline_ms=900)]
    assert Full(patience=1).decide(ms(8), queue, 4, COSTS_NS, ms(10)) == Take(0, wait_until_ns=ms(12))
    assert Full(patience=1).decide(ms(12), queue, 4, COSTS_NS, ms(10)) == Take(2)


def test_the_rest_of_the_way_is_not_waited_away(visit: MakeVisit) -> None:
    queue = [visit(arrived_ms=100, deadline_ms=180)]
    assert Full().decide(ms(110), queue, 4, COSTS_NS, ms(50), ms(30)) == Take(0, wait_until_ns=ms(125))


def test_it_does_not_wait_past_what_the_tightest_can_afford(visit: MakeVisit) -> None:
    queue = [visit(arrived_ms=100, deadline_ms=180)]
    assert Full().decide(ms(130), queue, 4, COSTS_NS, ms(50)) == Take(0, wait_until_ns=ms(155))
    assert Full().decide(ms(155), queue, 4, COSTS_NS, ms(50)) == Take(1)
    assert Full().decide(ms(999), queue, 4, COSTS_NS, ms(9_999)) == Take(1), "too late anyway"


def test_without_a_plans_word_nobody_waits(visit: MakeVisit) -> None:
    assert Full().decide(ms(1), [visit()], 4, COSTS_NS) == Take(1)


def test_for_ever(visit: MakeVisit) -> None:
    take = Full(forever=True).decide(ms(5_000), [visit(deadline_ms=10)], 4, COSTS_NS, ms(50))
    assert take == Take(0, wait_until_ns=FOREVER_NS)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="patience = -1 is out of range"):
        Full(patience=-1)
