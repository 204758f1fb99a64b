"""What the server's own processes took, from its log."""

import pytest

from sloop.runlog import ProcessorTime
from sloop.runlog.processes import ProcessorUse
from sloop.units import ms, s
from sloop.vocabulary import Request, RequestId


def test_only_what_lies_between_two_records_counts() -> None:
    """A server has taken a second to start, and an edge that dies takes what is known of it along."""
    use = ProcessorUse()
    for at_s, taken_ms, requests in ((1, 1_000, 5), (2, 1_010, 20), (3, 400, 10), (4, 420, 10)):
        for number in range(requests):
            use.append(s(at_s) - 1, Request(RequestId(100 * at_s + number), 0, 0, 1))
        use.append(s(at_s), ProcessorTime(ms(taken_ms)))
    use.append(s(9), Request(RequestId(0), 0, 0, 1))
    assert use.request_us == pytest.approx(30_000 / 40)
    assert use.rate_rps == pytest.approx(40 / 3)
    assert use.cores == pytest.approx(0.01)


def test_a_log_that_says_nothing() -> None:
    use = ProcessorUse()
    use.append(0, Request(RequestId(0), 0, 0, 1))
    use.append(1, ProcessorTime(5))
    assert (use.request_us, use.rate_rps, use.cores) == (None, 0, 0)
