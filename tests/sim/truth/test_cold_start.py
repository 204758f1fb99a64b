from sloop.sim.truth.cold_start import ColdStart
from sloop.units import s


def test_a_warm_world_has_its_first_replicas_at_once_and_no_others() -> None:
    start = ColdStart(1, start_ns=s(10))
    assert start.draw_ns(0) == 0
    assert start.draw_ns(1) == s(10)
    assert ColdStart(1, start_ns=s(10), warm=False).draw_ns(0) == s(10)


def test_jitter_spreads_starts_evenly_about_the_mean() -> None:
    start = ColdStart(1, start_ns=s(10), jitter=0.2)
    drawn = [start.draw_ns(1) for _ in range(1_000)]
    assert s(8) <= min(drawn) < s(8.1)
    assert s(11.9) < max(drawn) <= s(12)
    assert abs(sum(drawn) / len(drawn) - s(10)) < s(0.1)
