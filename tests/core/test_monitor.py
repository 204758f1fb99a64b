"""Buckets hold exact integrals of counts."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sloop.core.monitor import SLACK_BUCKETS_KEPT, Monitor


@given(st.lists(st.tuples(st.integers(0, 35), st.integers(-3, 3)), max_size=40))
def test_buckets_hold_the_integral_of_a_count_over_time(changes: list[tuple[int, int]]) -> None:
    monitor = Monitor(bucket_ns=10)
    at: dict[int, int] = {}
    for now_ns, change in sorted(changes):
        monitor.roll(now_ns)
        monitor.queue(now_ns, change)
        at[now_ns] = at.get(now_ns, 0) + change
    monitor.roll(40)
    level, expected = 0, [0, 0, 0, 0]
    for instant in range(40):
        level += at.get(instant, 0)
        expected[instant // 10] += level
    assert [bucket.waiting_ns for bucket in monitor.buckets] == expected


def test_a_late_roll_closes_each_missed_bucket() -> None:
    monitor = Monitor(bucket_ns=10)
    monitor.ready(5, 2000)
    monitor.roll(31)
    assert [(b.start_ns, b.ready_core_ns) for b in monitor.buckets] == [(0, 10), (10, 20), (20, 20)]


def test_old_buckets_forget_each_request_s_slack() -> None:
    monitor = Monitor(bucket_ns=1)
    for now_ns in range(SLACK_BUCKETS_KEPT + 5):
        monitor.arrive(now_ns, now_ns)
        monitor.roll(now_ns + 1)
    kept = [bucket.slack_ns for bucket in monitor.buckets if bucket.slack_ns]
    assert len(kept) == SLACK_BUCKETS_KEPT


@given(
    st.lists(st.tuples(st.integers(0, 35), st.booleans(), st.sampled_from(["arrive", "start", "ready"])), max_size=40)
)
def test_a_monitor_that_absorbs_another_one_has_measured_what_both_have(steps: list[tuple[int, bool, str]]) -> None:
    both, one, other = monitors = Monitor(10), Monitor(10), Monitor(10)
    for now_ns, is_other, step in sorted(steps):
        for monitor in monitors:
            monitor.roll(now_ns)
        for monitor in (both, other if is_other else one):
            if step == "arrive":
                monitor.arrive(now_ns, 100)
            elif step == "start":
                monitor.start(now_ns, 1, 1000)
            else:
                monitor.ready(now_ns, 1000)
    for monitor in monitors:
        monitor.roll(37)
    one.absorb(37, other)
    for monitor in (both, one):  # everything ends, so that what the other one measures from now on does not matter
        monitor.queue(37, -monitor.waiting)
        monitor.finish(37, monitor.running, monitor.busy_millicores)
        monitor.ready(37, -monitor.ready_millicores)
        monitor.roll(40)
    assert [replace(each, slack_ns=[]) for each in one.buckets] == [replace(each, slack_ns=[]) for each in both.buckets]
