"""Passes: how far they are apart, what they say together, and what service adds."""

from math import exp, log
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.profile.passes import SPEED_SD_MIN, STUDENT_T, pooled, refined, refined_by_size, speed_range
from sloop.profile.profile import (
    Amdahl,
    LatencyTable,
    Pass,
    Profile,
    Quadratic,
    Sample,
    SizeLatency,
    load_profile,
    sample_of,
    save_profile,
)

MS = 1_000_000


def sample(batch: int, cores: float, *durations_ms: float) -> Sample:
    return sample_of(batch, cores, [round(duration_ms * MS) for duration_ms in durations_ms])


def profile_of(*speeds: float) -> Profile:
    """A profile of two batch sizes on one and two cores, in one pass for each speed."""
    cells = [(1, 1.0, 10.0), (4, 1.0, 30.0), (1, 2.0, 6.0), (4, 2.0, 16.0)]
    passes = tuple(
        Pass(date=f"2026-11-2{day}", samples=tuple(sample(b, c, *[ms * speed] * 30) for b, c, ms in cells))
        for day, speed in enumerate(speeds)
    )
    pooled_samples = tuple(sample(b, c, *[ms * speed for speed in speeds for _ in range(30)]) for b, c, ms in cells)
    table = LatencyTable({1: {1.0: 10.0, 2.0: 6.0}, 4: {1.0: 30.0, 2.0: 16.0}})
    return Profile(
        latency_ms=table, max_batch=4, max_cores=2, origin="measured", source="sloop profile m.onnx, p99",
        samples=pooled_samples, passes=passes, date="2026-11-20",
    )  # fmt: skip


def test_a_single_pass_or_a_published_profile_has_no_range() -> None:
    assert speed_range(profile_of(1.0)) is None
    assert speed_range(Profile(latency_ms=Amdahl(1, 1, 1, 1), max_batch=4, max_cores=2)) is None


def test_the_range_is_the_prediction_interval_of_one_more_pass() -> None:
    found = speed_range(profile_of(0.9, 1.0, 1.1))
    assert found is not None
    assert found.passes == 3
    mean = (log(0.9) + log(1.1)) / 3
    deviation = (sum((log(speed) - mean) ** 2 for speed in (0.9, 1.0, 1.1)) / 2) ** 0.5
    assert log(found.slow) == pytest.approx(STUDENT_T[1] * deviation * (4 / 3) ** 0.5, rel=1e-3)
    assert found.fast == pytest.approx(1 / found.slow)


def test_passes_that_agree_do_not_promise_more_than_a_machine_keeps() -> None:
    found = speed_range(profile_of(1.0, 1.0, 1.0))
    assert found is not None
    assert found.slow == pytest.approx(exp(STUDENT_T[1] * SPEED_SD_MIN * (4 / 3) ** 0.5))


@settings(max_examples=25)
@given(st.lists(st.lists(st.floats(1, 50), min_size=20, max_size=40), min_size=2, max_size=4))
def test_pooling_keeps_mean_and_runs(groups: list[list[float]]) -> None:
    found = pooled([sample(2, 1.0, *group) for group in groups])
    every = [duration for group in groups for duration in group]
    assert found.n == len(every)
    assert found.mean_ms == pytest.approx(sum(every) / len(every), rel=0.03)
    assert min(every) * 0.999 <= found.p50_ms <= max(every) * 1.001


def runs(duration_ms: float, count: int = 100) -> list[int]:
    return [round(duration_ms * MS)] * count


def test_service_replaces_what_it_has_shown_and_scales_the_rest() -> None:
    before = profile_of(1.0, 1.0)
    after = refined(before, {(1, 1.0): runs(15.0)}, date="2026-11-22T10:00:00", beside="a live server")
    cells = {(s.batch, s.cores): s for s in after.samples}
    assert cells[1, 1.0].mean_ms == pytest.approx(15.0)
    assert (cells[1, 1.0].n, cells[1, 1.0].scaled) == (100, 1.0)
    assert cells[4, 1.0].mean_ms == pytest.approx(45.0)
    assert cells[4, 2.0].mean_ms == pytest.approx(24.0)
    assert {s.scaled for cell, s in cells.items() if cell != (1, 1.0)} == {1.5}
    assert after.latency_ms.latency_ms(4, 2) == pytest.approx(24.0)
    assert (len(after.passes), after.passes[-1].in_service, after.passes[-1].beside) == (3, True, "a live server")
    assert after.source == "sloop profile m.onnx, p99; refined from service, p99"
    assert after.date == "2026-11-22"


def test_each_core_count_has_its_own_ratio_and_new_batch_sizes_fill_the_grid() -> None:
    shown = {(1, 1.0): runs(20.0), (3, 1.0): runs(50.0), (1, 2.0): runs(6.6)}
    after = refined(profile_of(1.0, 1.0), shown, date="2026-11-22", beside="")
    cells = {(s.batch, s.cores): s for s in after.samples}
    assert set(cells) == {(batch, cores) for batch in (1, 3, 4) for cores in (1.0, 2.0)}
    assert cells[4, 2.0].mean_ms == pytest.approx(16 * 1.1, rel=1e-3)
    assert cells[3, 2.0].mean_ms == pytest.approx((6 + 10 * 2 / 3) * 1.1, rel=1e-3)
    assert cells[4, 1.0].mean_ms > 50


def test_refining_twice_from_one_log_is_refining_once_and_two_logs_are_pooled() -> None:
    once = refined(profile_of(1.0, 1.1), {(1, 1.0): runs(15.0)}, date="2026-11-22T10:00", beside="")
    assert refined(once, {(1, 1.0): runs(15.0)}, date="2026-11-22T10:00", beside="") == once
    twice = refined(once, {(1, 1.0): runs(17.0, 300)}, date="2026-11-23T10:00", beside="")
    assert next(s for s in twice.samples if (s.batch, s.cores) == (1, 1.0)).mean_ms == pytest.approx(16.5)
    found = speed_range(twice)
    assert found is not None
    assert found.passes == 2  # service varies by itself; how the sweeps varied no longer counts


def test_a_published_profile_can_be_refined() -> None:
    published = Profile(latency_ms=Quadratic(0, 10, 0), max_batch=4, max_cores=1, origin="published")
    after = refined(published, {(1, 1.0): runs(12.0), (2, 1.0): runs(24.0)}, date="2026-11-22", beside="")
    assert after.origin == "measured"
    assert [s.mean_ms for s in after.samples] == pytest.approx([12.0, 24.0])
    with pytest.raises(ValueError, match="no batches"):
        refined(published, {}, date="", beside="")


def test_profiles_with_passes_survive_their_file_and_old_files_are_still_read(tmp_path: Path) -> None:
    kept = refined(profile_of(0.9, 1.1), {(1, 1.0): runs(15.0)}, date="2026-11-22", beside="a live server")
    save_profile(kept, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == kept
    old = structs.replace(kept, passes=())
    save_profile(old, tmp_path / "old.json")
    text = (tmp_path / "old.json").read_text().replace('"version": 2', '"version": 1').replace('\n  "passes": [],', "")
    text = text.replace('\n  "startup": null,', "")
    (tmp_path / "old.json").write_text(text)
    assert '"passes"' not in text
    assert load_profile(tmp_path / "old.json") == old
    assert speed_range(old) is None
    examples = Path(__file__).parents[2].joinpath("examples").rglob("*.profile.json")
    assert all(load_profile(path).samples for path in examples)


def runs_of(**taken_ms: float) -> dict[int, dict[tuple[int, float], list[int]]]:
    """30 batches of 4 rows on one core of each class, which took so long."""
    return {int(size[1:]): {(4, 1.0): [round(each_ms * MS)] * 30} for size, each_ms in taken_ms.items()}


SIZES = tuple(SizeLatency(size, Quadratic(0, size / 10, 2)) for size in (10, 100, 1000))
DAY = "2026-11-22T10:00:00"


def test_service_refines_each_size_by_what_its_class_took() -> None:
    table = LatencyTable({1: {1.0: 12.0}, 4: {1.0: 42.0}})
    profile = Profile(latency_ms=table, max_batch=4, max_cores=1, sizes=(SIZES[0], SizeLatency(100, table), SIZES[2]))
    made = refined_by_size(profile, runs_of(c10=6 * 3.0, c100=42 * 1.5, c1500=2 * 602), date=DAY, beside="a server")
    assert [each.size for each in made.sizes] == [10, 100, 1000]
    assert made.latency_at(10, 4, 1) == pytest.approx(18)
    assert made.latency_at(1000, 1, 1) == pytest.approx(102 * 2), "by the ratio at 1500"
    assert made.sizes[1].latency_ms == made.latency_ms
    assert made.latency_ms.latency_ms(4, 1) == pytest.approx(42 * 1.5)
    assert made.passes[-1].in_service
    again = refined_by_size(made, runs_of(c10=99), date=DAY, beside="a server")
    assert again is made, "a log that it contains"


def test_a_profile_without_sizes_knows_those_of_service_afterwards() -> None:
    made = refined_by_size(profile_of(1.0), runs_of(c16=15, c64=45) | runs_of(c256=150), date=DAY, beside="a server")
    assert [each.size for each in made.sizes] == [16, 64, 256]
    assert made.knows_sizes
    for size, taken_ms in ((16, 15), (64, 45), (256, 150)):
        assert made.latency_at(size, 4, 1) == pytest.approx(taken_ms)
    assert made.sizes[0].latency_ms == made.latency_ms, "the commonest class; of equal ones the first"


def test_rows_of_one_known_size_are_refined_with_their_latency() -> None:
    profile = structs.replace(profile_of(1.0), sizes=(SizeLatency(64, Quadratic(0, 1, 1)),))
    made = refined(profile, {(4, 1.0): [60 * MS] * 30}, date=DAY, beside="a server")
    assert made.sizes == (SizeLatency(64, made.latency_ms),)
