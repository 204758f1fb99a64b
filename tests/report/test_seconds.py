"""Second by second, by hand; `test_metrics` counts random runs."""

from sloop.report.holdings import Holdings
from sloop.report.rows import Second
from sloop.report.seconds import BEFORE_NS, Seconds
from sloop.units import s
from sloop.vocabulary import ReplicaId, ReplicaSpec


def test_seconds_open_and_close() -> None:
    holdings = Holdings([])
    seconds = Seconds(holdings, None)
    assert (seconds.current, seconds.end_ns, seconds.rows(0, 0)) == (-1, BEFORE_NS, [])
    seconds.begin(s(7), lambda: 0)
    assert (seconds.start_ns, seconds.current, seconds.end_ns) == (s(7), 0, s(8))
    seconds.columns["arrivals"][0] += 2
    holdings.hold(s(7), ReplicaId(0), ReplicaSpec("a", "v", 2.0), 2.0)
    seconds.begin(s(9), lambda: 5)
    first, second, third = seconds.rows(s(9.5), 1)
    assert first == Second(0, 2, 0, 0, 0, 0, 0, 2.0, 5, 0.0)
    assert (second.queue, second.cores) == (5, 2.0)
    assert (third.queue, third.cores) == (1, 2.0)
