"""What the server's own processes took, from its log."""

from collections.abc import Sequence

import pytest

from sloop.runlog import ProcessorTime
from sloop.runlog.processes import ProcessorUse
from sloop.units import ms, s
from sloop.vocabulary import Request, RequestId


def use_of(seconds: Sequence[tuple[int, int]]) -> ProcessorUse:
    """Seconds with so many requests, at the end of which so many ms have been taken since the start."""
    use = ProcessorUse()
    for at_s, (requests, taken_ms) in enumerate(seconds):
        for number in range(requests):
            use.append(s(at_s), Request(RequestId(1000 * at_s + number), 0, 0, 1))
        use.append(s(at_s) + 1, ProcessorTime(ms(taken_ms)))
    return use


def test_what_is_taken_without_requests_is_not_theirs() -> None:
    """A second takes 25 ms and a request 2. The start of the server, before the first record, does not count."""
    use = use_of([(7, 1_000), (20, 1_065), (0, 1_090), (10, 1_135)])
    assert use.request_us == pytest.approx(2_000)
    assert use.rate_rps == pytest.approx(10)
    assert use.cores == pytest.approx(0.02)


def test_seconds_that_are_all_alike_do_not_say_what_is_taken_without_requests() -> None:
    assert use_of([(10, 100), (10, 150), (10, 200)]).request_us == pytest.approx(5_000)


def test_of_an_edge_that_dies_nothing_is_known() -> None:
    use = use_of([(0, 1_000), (20, 1_065), (30, 400), (0, 425)])
    assert use.request_us == pytest.approx(2_000)


def test_a_log_that_says_nothing() -> None:
    use = use_of([(3, 5)])
    assert (use.request_us, use.rate_rps, use.cores) == (None, 0, 0)
