from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.profile.profile import START_S_ASSUMED, Profile, Quadratic, Startup
from sloop.sim.truth.cold_start import (
    WARM_NS,
    AcquisitionSampler,
    ColdStartSampler,
    ResizeSampler,
    SpareWorkers,
)
from sloop.units import ms, s
from sloop.vocabulary import ReplicaSpec, Slot

A = ReplicaSpec("only", "a", Slot(1.0, "slow"))


def profile(load_s: float) -> Profile:
    return Profile(latency_ms=Quadratic(0, 10, 5), max_batch=2, max_cores=2, load_s=load_s)


def test_a_warm_world_has_its_first_replicas_at_once_and_no_others() -> None:
    start = ColdStartSampler(1, {}, start_s=10)
    assert start.draw_ns(0, A) == start.draw_ns(WARM_NS - 1, A) == 0
    assert start.draw_ns(WARM_NS, A) == s(10)
    assert ColdStartSampler(1, {}, start_s=10, warm=False).draw_ns(0, A) == s(10)


def test_jitter_spreads_starts_evenly_about_the_mean() -> None:
    start = ColdStartSampler(1, {}, start_s=10, jitter=0.2)
    drawn = [start.draw_ns(s(1), A) for _ in range(1_000)]
    assert s(8) <= min(drawn) < s(8.1)
    assert s(11.9) < max(drawn) <= s(12)
    assert abs(sum(drawn) / len(drawn) - s(10)) < s(0.1)


def test_a_start_takes_what_the_profile_of_the_variant_on_its_hardware_says_unless_the_scenario_declares_it() -> None:
    quick, other = ReplicaSpec("only", "a", Slot(1.0, "quick")), ReplicaSpec("only", "b", Slot(1.0, "slow"))
    profiles = {
        ("only", "a", "slow"): profile(2.5),
        ("only", "a", "quick"): profile(0.5),
        ("only", "b", "slow"): profile(0.75),
    }
    start = ColdStartSampler(1, profiles)
    assert [start.draw_ns(s(1), spec) for spec in (A, quick, other)] == [s(2.5), s(0.5), s(0.75)]
    declared = ColdStartSampler(1, profiles, start_s=7)
    assert declared.draw_ns(s(1), A) == s(7)
    assert ColdStartSampler(1, profiles, start_s=0).draw_ns(s(1), A) == 0, "declared as none"


def test_a_start_neither_measured_nor_declared_is_assumed() -> None:
    assert ColdStartSampler(1, {("only", "a", "slow"): profile(0.0)}).draw_ns(s(1), A) == s(START_S_ASSUMED)


def test_the_steps_of_a_start_are_in_proportion_to_the_parts_in_the_profile() -> None:
    parts = structs.replace(profile(4.0), startup=Startup(1.0, 2.0, 1.0))
    start = ColdStartSampler(1, {("only", "a", "slow"): parts})
    assert start.steps(A, s(4)) == [("spawning", s(1)), ("loading", s(2)), ("warming", s(1))]
    assert start.steps(A, s(8)) == [("spawning", s(2)), ("loading", s(4)), ("warming", s(2))]
    assert sum(length_ns for _, length_ns in start.steps(A, 9_999_999)) == 9_999_999
    other = ReplicaSpec("only", "b", Slot(1.0, "slow"))
    assert start.steps(other, s(4)) == [("loading", s(4))]
    nothing = ColdStartSampler(1, {("only", "a", "slow"): structs.replace(parts, startup=Startup(0.0, 0.0, 0.0))})
    assert nothing.steps(A, s(4)) == [("loading", s(4))]


def test_the_process_is_the_part_of_a_start_that_the_profile_says() -> None:
    parts = structs.replace(profile(4.0), startup=Startup(1.0, 2.0, 1.0))
    start = ColdStartSampler(1, {("only", "a", "slow"): parts})
    assert [start.process_ns(A, s(seconds)) for seconds in (0, 4, 8)] == [0, s(1), s(2)]
    assert start.process_ns(ReplicaSpec("only", "b", Slot(1.0, "slow")), s(4)) == 0, "nobody knows"


@given(
    count=st.integers(0, 3),
    spare_s=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from("xy"))),
)
def test_a_worker_is_taken_if_one_of_its_node_is_there(count: int, spare_s: int, steps: list[tuple[int, str]]) -> None:
    """Compared with a list of the times at which each is there."""
    spares, now_s = SpareWorkers(count, spare_s), 0
    ready_s = {node: [0] * count for node in "xy"}
    for after_s, node in steps:
        now_s += after_s
        there = [at_s for at_s in ready_s[node] if at_s <= now_s]
        assert spares.take(s(now_s), node) == bool(there)
        if there:
            ready_s[node].remove(there[0])
            ready_s[node].append(now_s + spare_s)


def test_a_node_takes_as_long_as_its_kind() -> None:
    acquisition = AcquisitionSampler(1, {"slow": 60.0, "quick": 5.0})
    assert [acquisition.draw_ns(s(1), kind) for kind in ("slow", "quick")] == [s(60), s(5)]
    assert acquisition.draw_ns(0, "slow") == 0, "in a warm world it is there from the start"
    assert AcquisitionSampler(1, {"slow": 60.0}, warm=False).draw_ns(0, "slow") == s(60)
    uneven = AcquisitionSampler(1, {"slow": 60.0}, jitter=0.5)
    drawn = [uneven.draw_ns(s(1), "slow") for _ in range(100)]
    assert s(30) <= min(drawn) < s(35)
    assert s(85) < max(drawn) <= s(90)


def test_the_delay_is_the_one_declared_unless_it_is_noisy() -> None:
    assert ResizeSampler(1, delay_ns=ms(50)).draw_ns() == ms(50)
    noisy = ResizeSampler(1, delay_ns=ms(50), cv=0.2)
    assert len({noisy.draw_ns() for _ in range(50)}) > 10


def test_a_batch_in_flight_keeps_its_speed_by_default() -> None:
    assert not ResizeSampler(1).rescales
    assert ResizeSampler(1, in_flight="rescale").rescales
