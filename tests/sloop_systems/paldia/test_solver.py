"""PALDIA's arithmetic: the published cases, the corrected equation against brute force, and what it promises."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.profile.interference import (
    BandwidthLaw,
    CountLaw,
    DeviceDemand,
    Interference,
    ProcessorSharing,
    ScalabilityLaw,
)
from sloop.units import WIDE_ROUNDING, s
from sloop.vocabulary import CLIENTS_MAX
from sloop_systems.paldia.solver import (
    DelayedTermination,
    DeviceModel,
    HardwareOffer,
    HardwareRule,
    Sharing,
    batches_of,
    best_split,
    choose_hardware,
    count_mismatch,
    executed_ms,
    rounds_ms,
    t_max_ms,
    workers_needed,
)
from tests.sim.test_cluster import play_until
from tests.sim.truth.test_sharing import LAW, begin, cluster_of, ends_of, profile


def proportional(solo_ms: float, batch: int, bandwidth: float, alpha: float, most: int = CLIENTS_MAX) -> DeviceModel:
    """A model whose batches take time in proportion to their size, as in the specification's vectors."""
    latencies_ms = tuple(solo_ms * size / batch for size in range(batch + 1))
    return DeviceModel(latencies_ms, BandwidthLaw(alpha), DeviceDemand(bandwidth=bandwidth), most)


def closed_form(solo_ms: float, batch: int, f: float, alpha: float, count: int, most: float) -> tuple[float, int]:
    """k* and y* as the specification derives them; for α = 0 all run together."""
    if alpha == 0 or f == 0:
        k = count / batch
    elif f * (1 + alpha) < 1:
        k = (1 - (1 - alpha) * f) / (2 * alpha * f * f)
    else:
        k = 1 / f
    k = min(max(k, min(1, count / batch)), count / batch, most)
    return k, round(count - k * batch)


VECTORS = [
    # Solo, BS, FBR, α, N, T all queued, T all together, T literal, k*, y, T
    (50, 128, 0.50, 0.45, 575, 224.61, 175.28, 112.30, 3.222, 163, 166.21),
    (80, 64, 0.65, 0.50, 225, 281.25, 300.28, 182.81, 1.598, 123, 238.11),
    (50, 128, 0.45, 0.60, 700, 273.44, 230.91, 123.05, 3.374, 268, 204.26),
    (56, 64, 0.62, 0.35, 450, 393.75, 531.16, 244.12, 2.219, 308, 356.66),
    (50, 128, 0.80, 0.60, 575, 224.61, 459.33, 179.69, 1.250, 415, 212.11),
]
Vector = tuple[float, int, float, float, int, float, float, float, float, int, float]


@pytest.mark.parametrize("vector", VECTORS)
def test_the_vectors_of_the_specification(vector: Vector) -> None:
    solo_ms, batch, f, alpha, count, queued_ms, together_ms, literal_ms, k, y, best_ms = vector
    model, literal = proportional(solo_ms, batch, f, alpha), proportional(solo_ms, batch, f, 0.0)
    assert best_split(model, count, "queue").t_max_ms == pytest.approx(queued_ms, abs=0.005)
    assert best_split(model, count, "together") == pytest.approx((0, together_ms), abs=0.005)
    assert best_split(literal, count) == pytest.approx((0, literal_ms), abs=0.005)
    assert best_split(model, count) == pytest.approx((y, best_ms), abs=0.005)
    k_best, y_best = closed_form(solo_ms, batch, f, alpha, count, math.inf)
    assert (k_best, y_best) == pytest.approx((k, y), abs=0.0005)
    assert abs((count - y) / batch - k_best) <= 1 / batch


EXECUTED = [
    # those that run, those that wait, T with the serial lane, work-conserving, residents, T with so many residents
    ([128, 128, 128, 28], [128, 35], 157.88, 149.38, 2, 124.6),
    ([64, 38], [64, 59], 236.34, 191.66, 2, 199.6),
    ([128, 128, 128, 48], [128, 128, 12], 193.07, 170.59, 3, 136.0),
    ([64, 64, 14], [64, 64, 64, 64, 52], 347.37, 308.06, 2, 281.8),
    ([128, 32], [128, 128, 128, 31], 212.11, 215.40, 1, 224.6),
]


@pytest.mark.parametrize(("vector", "executed"), list(zip(VECTORS, EXECUTED, strict=True)))
def test_what_the_vectors_take_when_they_are_executed(
    vector: Vector, executed: tuple[list[int], list[int], float, float, int, float]
) -> None:
    solo_ms, batch, f, alpha, count, *_, y, best_ms = vector
    running, queued, serial_ms, conserving_ms, residents, fixed_ms = executed
    model = proportional(solo_ms, batch, f, alpha)
    assert (batches_of(count - y, batch), batches_of(y, batch)) == (running, queued)
    assert executed_ms(model, running, queued, 0) == pytest.approx(serial_ms, abs=0.005)
    assert serial_ms <= best_ms + 0.01
    assert executed_ms(model, running, queued, len(running)) == pytest.approx(conserving_ms, abs=0.005)
    assert executed_ms(model, [], batches_of(count, batch), residents) == pytest.approx(fixed_ms, abs=0.05)


models = st.builds(
    proportional,
    st.floats(1, 300),
    st.integers(1, 40),
    st.floats(0, 1),
    st.one_of(st.just(0.0), st.floats(0.05, 2)),
    st.integers(1, 20),
)


@given(models, st.integers(0, 300))
def test_no_split_ends_earlier(model: DeviceModel, count: int) -> None:
    found = best_split(model, count)
    if count <= model.batch:
        assert found == (0, model.latencies_ms[count])
        return
    best_ms, best = math.inf, -1
    for y in range(count - model.batch + 1):  # as the specification writes the search
        k = (count - y) / model.batch
        load = k * model.largest.bandwidth
        slowdown = max(1.0, load) * (1 + model.law.alpha * max(0.0, load - 1))  # type: ignore[attr-defined]
        t = model.solo_ms * y / model.batch + model.solo_ms * slowdown
        if k <= model.together_max:
            best_ms = min(best_ms, t)
            best = y if t <= best_ms + WIDE_ROUNDING else best
    assert found.t_max_ms == pytest.approx(best_ms, rel=1e-9, abs=2 * WIDE_ROUNDING)
    [end_ms] = t_max_ms(model, count, np.array([found.queued]))
    assert end_ms == found.t_max_ms
    assert (count - found.queued) / model.batch <= model.together_max
    assert found.queued >= best - 1 or found.t_max_ms < best_ms - WIDE_ROUNDING / 2


@given(
    st.floats(1, 300), st.integers(1, 128), st.floats(0.05, 1), st.floats(0.05, 2), st.integers(1, 1000),
    st.integers(1, 48),
)  # fmt: skip
def test_the_closed_form_agrees(solo_ms: float, batch: int, f: float, alpha: float, count: int, most: int) -> None:
    assume(count > batch)
    model = proportional(solo_ms, batch, f, alpha, most)
    found, (k, y) = best_split(model, count), closed_form(solo_ms, batch, f, alpha, count, most)
    near = [at for at in (y - 1, y, y + 1) if 0 <= at <= count - batch and (count - at) / batch <= most]
    assert found.t_max_ms == pytest.approx(t_max_ms(model, count, np.array(near)).min(), abs=1e-5)
    if abs(f * (1 + alpha) - 1) > 1e-3:  # elsewhere all k from 1/f on are nearly as good
        assert abs((count - found.queued) / batch - k) <= 1 / batch + 1e-6


@given(st.floats(1, 300), st.integers(1, 64), st.floats(0.01, 0.999), st.integers(1, 600))
def test_as_printed_queueing_never_pays(solo_ms: float, batch: int, f: float, count: int) -> None:
    assume(count * f / batch > 1)
    assume(solo_ms / batch * (1 - f) > 1e-3)
    literal = proportional(solo_ms, batch, f, 0.0, most=1000)
    assert best_split(literal, count).queued == 0
    assert best_split(literal, count) == best_split(literal, count, "together")


@given(models, st.integers(1, 300))
def test_the_baselines_are_the_ends_of_the_search(model: DeviceModel, count: int) -> None:
    together, queue, hybrid = (best_split(model, count, sharing) for sharing in ("together", "queue", "hybrid"))
    assert hybrid.t_max_ms <= min(together.t_max_ms, queue.t_max_ms) + WIDE_ROUNDING
    assert workers_needed(model, count, queue) == 1
    assert workers_needed(model, count, together) == min(math.ceil(count / model.batch), model.together_max)
    assert workers_needed(model, count, hybrid) == len(batches_of(count - hybrid.queued, model.batch))
    assert workers_needed(model, 0, best_split(model, 0)) == 0


def test_a_measured_table_may_have_its_optimum_inside() -> None:
    model = DeviceModel(tuple(10.0 * size for size in range(11)), CountLaw((1.0, 1.1, 1.3, 3.0)))
    assert best_split(model, 60) == pytest.approx((30, 300 + 130))
    assert best_split(DeviceModel(model.latencies_ms, CountLaw((1.0,))), 60) == (0, 100.0)
    assert best_split(DeviceModel(model.latencies_ms, ProcessorSharing("batches")), 60) == (50, 600.0)


def test_a_search_looks_at_a_bounded_number_of_splits() -> None:
    model = proportional(50, 128, 0.5, 0.45, 12)
    looked = []

    class Counting(BandwidthLaw, frozen=True):
        def among_equals(self, own, counts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            looked.append(len(counts))
            return super().among_equals(own, counts)

    law = Counting(0.45)
    found = best_split(DeviceModel(model.latencies_ms, law, DeviceDemand(bandwidth=0.5), 12), 10_000_000)
    assert looked == [11 * 128 + 1]
    assert found.queued == best_split(model, 10_000_000).queued
    assert (10_000_000 - found.queued) / 128 == pytest.approx(3.222, abs=1 / 128)


# Execution


sizes = st.lists(st.integers(1, 8), max_size=5)


def stepwise(model: DeviceModel, running: Sequence[int], queued: Sequence[int], most: int, step_ms: float) -> float:
    """Small steps of time, as an independent reference."""
    active = [[model.solo_ms * size / model.batch, size] for size in running]
    waiting, now_ms = list(queued), 0.0
    while active or waiting:
        while waiting and ((most == 0 and not active) or (most > 0 and len(active) < most)):
            size = waiting.pop(0)
            active.append([model.solo_ms * size / model.batch, size])
        load = sum(model.largest.bandwidth * size / model.batch for _, size in active)
        factor = max(1.0, load) * (1 + model.law.alpha * max(0.0, load - 1))  # type: ignore[attr-defined]
        for each in active:
            each[0] -= step_ms / factor
        active = [each for each in active if each[0] > 1e-9]
        now_ms += step_ms
    return now_ms


@given(sizes, sizes, st.integers(0, 4), st.floats(0.1, 1), st.floats(0, 1))
@settings(max_examples=40)
def test_executed_splits_against_small_steps(
    running: list[int], queued: list[int], most: int, f: float, alpha: float
) -> None:
    model = proportional(40, 8, f, alpha)
    exact_ms = executed_ms(model, running, queued, most)
    count = len(running) + len(queued)
    assert exact_ms == pytest.approx(stepwise(model, running, queued, most, 0.02), abs=0.03 * (count + 1))


@given(models, st.integers(1, 300))
def test_t_max_bounds_the_serial_lane(model: DeviceModel, count: int) -> None:
    split = best_split(model, count)
    running, queued = batches_of(count - split.queued, model.batch), batches_of(split.queued, model.batch)
    assert executed_ms(model, running, queued, 0) <= split.t_max_ms * (1 + 1e-9) + 1e-6


@given(st.integers(0, 500), st.integers(1, 64), st.booleans())
def test_batches_of_a_group(count: int, batch: int, even: bool) -> None:
    sizes = batches_of(count, batch, even=even)
    assert sum(sizes) == count
    assert len(sizes) == math.ceil(count / batch)
    assert all(0 < size <= batch for size in sizes)
    assert not even or not sizes or max(sizes) - min(sizes) <= 1


any_law: st.SearchStrategy[Interference] = st.one_of(
    st.builds(ScalabilityLaw, st.floats(0, 1.5), st.floats(0, 0.3)),
    st.lists(st.floats(0, 2), max_size=7).map(lambda steps: CountLaw(tuple(accumulate(steps, initial=1.0)))),
)


@given(any_law, st.integers(1, 12), st.integers(1, 8))
def test_equal_batches_run_in_rounds(law: Interference, batches: int, residents: int) -> None:
    model = DeviceModel(tuple(5.0 * size for size in range(5)), law)
    [end_ms] = rounds_ms(model, 4 * batches, np.array([residents]))
    assert end_ms == pytest.approx(executed_ms(model, [], [4] * batches, residents), rel=1e-6)


@given(any_law, st.integers(1, 60), st.integers(1, 8))
def test_no_other_number_of_residents_ends_earlier(law: Interference, count: int, most: int) -> None:
    model = DeviceModel(tuple(5.0 * size for size in range(5)), law, together_max=most)
    found = best_split(model, count, "resident")
    if count <= model.batch:
        assert found == (0, model.latencies_ms[count])
        return
    residents = len(batches_of(count - found.queued, model.batch))
    assert residents <= most
    ends_ms = {each: float(rounds_ms(model, count, np.array([each]))[0]) for each in range(1, most + 1)}
    least_ms = min(ends_ms.values())
    assert found.t_max_ms == pytest.approx(least_ms, abs=2 * WIDE_ROUNDING)
    assert residents <= min(each for each, end_ms in ends_ms.items() if end_ms <= least_ms)
    if count % model.batch == 0:
        running, queued = batches_of(count - found.queued, model.batch), batches_of(found.queued, model.batch)
        assert executed_ms(model, running, queued, len(running)) == pytest.approx(found.t_max_ms, rel=1e-6)


def test_a_batch_more_than_workers_is_better_shared_evenly() -> None:
    """Six together and one alone take 4.8 + 1 times as long as one; four and then three 3.2 + 2.4."""
    model = DeviceModel((0.0, 10.0), CountLaw((1.0, 1.6, 2.4, 3.2, 4.0, 4.8)), together_max=6)
    assert best_split(model, 7, "together").t_max_ms == pytest.approx(48 + 10)
    assert best_split(model, 7, "resident") == pytest.approx((3, 32 + 24))
    assert executed_ms(model, [1] * 4, [1] * 3, 4) == pytest.approx(56)
    assert best_split(model, 7, "hybrid").queued == 1, "Eq. 1 lets the queue wait for all"


@given(models, st.integers(1, 300), st.floats(0, 1), st.sampled_from(["hybrid", "resident"]))
def test_a_split_is_made_only_for_what_it_gains(
    model: DeviceModel, count: int, gain_min: float, sharing: Sharing
) -> None:
    best, found = best_split(model, count, sharing), best_split(model, count, sharing, gain_min=gain_min)
    if count <= model.batch:
        assert found == best
        return
    ends = best_split(model, count, "together").queued, best_split(model, count, "queue").queued
    residents = np.array([max(1, math.ceil((count - queued) / model.batch)) for queued in ends])
    if sharing == "resident":
        pure_ms = float(rounds_ms(model, count, residents).min())
    else:
        pure_ms = float(t_max_ms(model, count, np.array(ends)).min())
    if found.queued not in ends:
        assert found == best
        assert found.t_max_ms <= (1 - gain_min) * pure_ms + WIDE_ROUNDING
    elif best.queued not in ends:
        assert best.t_max_ms > (1 - gain_min) * pure_ms
        assert found.t_max_ms == pytest.approx(pure_ms, abs=2 * WIDE_ROUNDING)


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    bandwidth=st.floats(0.05, 1.0),
    law=st.sampled_from([LAW, BandwidthLaw(0.0), CountLaw((1.0, 1.5, 2.5)), ProcessorSharing("bandwidth")]),
)
def test_batches_that_begin_together_end_when_the_solver_says(
    sizes: list[int], bandwidth: float, law: BandwidthLaw
) -> None:
    own = profile(bandwidth=bandwidth)
    assert own.sharing is not None
    cluster = cluster_of(len(sizes), own=structs.replace(own, sharing=structs.replace(own.sharing, law=law)))
    for number, size in enumerate(sizes):
        begin(cluster, 0, number, size)
    told = ends_of(play_until(cluster, s(100)))
    assert sorted(id for _, id in told) == list(range(len(sizes)))
    model = DeviceModel(tuple(8.0 * n for n in range(9)), law, DeviceDemand(bandwidth=bandwidth))
    assert max(at_ms for at_ms, _ in told) == pytest.approx(executed_ms(model, sizes, [], 0), abs=1e-5)


# Hardware


RATIOS = {"M60": (1.0, 160), "K80": (0.85, 240), "V100": (0.25, 900)}
PRICES = {"m4": 0.20, "c6i.2x": 0.34, "c6i.4x": 0.68, "M60": 0.75, "K80": 0.90, "V100": 3.06}


def offers(solo_ms: float, batch: int, f: float, alpha: float, c4: float, count: int) -> list[HardwareOffer]:
    """The six kinds in the calibration of the specification, section 3.4."""
    found = []
    for name, part in {"m4": 5.0, "c6i.2x": 2.0, "c6i.4x": 1.0}.items():
        each_ms = 200.0 * part / c4
        found.append(HardwareOffer(name, PRICES[name], each_ms * count, each_ms, is_gpu=False))
    for name, (ratio, gb_per_s) in RATIOS.items():
        solo = solo_ms * ratio
        latencies_ms = (0.0, *(solo * (0.03 + 0.97 * size / batch) for size in range(1, batch + 1)))
        bandwidth = min(1.0, f * 160 / gb_per_s / ratio)  # the same bytes in another time, of another bandwidth
        model = DeviceModel(latencies_ms, BandwidthLaw(alpha), DeviceDemand(bandwidth=bandwidth))
        split = best_split(model, count)
        found.append(HardwareOffer(name, PRICES[name], split.t_max_ms, model.per_request_ms, is_gpu=True))
    return found


def chosen(given_offers: Sequence[HardwareOffer], choice: HardwareRule = "slo_first") -> str:
    return choose_hardware(given_offers, choice, cpu_limit_ms=0.5 * 200, gpu_limit_ms=0.75 * 200, tolerance_ms=50).name


THRESHOLDS = [
    ((75, 64, 0.60, 0.50, 40), "slo_first", (1, 5, 11, 21, 172, 236)),
    ((75, 64, 0.60, 0.50, 40), "tolerance", (1, 5, 11, 21, 57, 143)),
    ((48, 64, 0.56, 0.35, 60), "slo_first", (1, 7, 16, 31, 259, 357)),
    ((48, 64, 0.56, 0.35, 60), "tolerance", (1, 7, 16, 31, 138, 209)),
    ((80, 128, 0.62, 0.60, 70), "slo_first", (1, 8, 18, 36, 319, 429)),
    ((90, 64, 0.64, 0.50, 25), "slo_first", (1, 3, 7, 13, 143, 197)),
    ((165, 8, 0.88, 0.60, 1), "slo_first", (0, 0, 0, 1, 8, 13)),
]


@pytest.mark.parametrize(("calibration", "choice", "firsts"), THRESHOLDS)
def test_the_first_load_at_which_each_kind_is_chosen(
    calibration: tuple[float, int, float, float, float], choice: HardwareRule, firsts: tuple[int, ...]
) -> None:
    found: dict[str, int] = {}
    for count in range(1, 480):
        found.setdefault(chosen(offers(*calibration, count), choice), count)
    assert found == {name: first for name, first in zip(PRICES, firsts, strict=True) if first}


@given(st.sampled_from([row for row, *_ in THRESHOLDS]), st.integers(1, 700))
@settings(max_examples=60)
def test_more_requests_never_mean_cheaper_hardware(
    calibration: tuple[float, int, float, float, float], count: int
) -> None:
    assert PRICES[chosen(offers(*calibration, count))] <= PRICES[chosen(offers(*calibration, count + 1))]


offer = st.builds(
    HardwareOffer,
    st.text("abc", min_size=1, max_size=2),
    st.floats(0, 3),
    st.floats(0, 300),
    st.floats(0.1, 9),
    st.booleans(),
)


@given(st.lists(offer, min_size=1, max_size=6), st.sampled_from(["slo_first", "tolerance", "fastest"]))
def test_hardware_choice_is_that_of_the_published_scan(all_offers: list[HardwareOffer], choice: HardwareRule) -> None:
    found = choose_hardware(all_offers, choice, cpu_limit_ms=100, gpu_limit_ms=150, tolerance_ms=50)
    best_gpu = min(all_offers, key=lambda each: (not each.is_gpu, each.per_request_ms, each.name))
    recorded = []
    for each in sorted(all_offers, key=lambda each: (each.usd_per_h, each.t_max_ms, each.name)):
        if each.t_max_ms <= (150 if each.is_gpu else 100):
            recorded.append(each)
            if not each.is_gpu:
                break
    if choice == "fastest" or not recorded:
        assert found == best_gpu
    elif choice == "slo_first" or not recorded[0].is_gpu:
        assert found == recorded[0]
    else:
        gpus = [each for each in recorded if each.is_gpu]
        quickest_ms = min(each.t_max_ms for each in gpus)
        assert found == next(each for each in gpus if each.t_max_ms <= quickest_ms + 50)


def switches(sequence: str, limit: int = 3) -> str:
    """What is in use after each decision, beginning with A; a switch is over at once."""
    present, count, found = "A", 0, ""
    for each in sequence:
        count, now = count_mismatch(count, is_present=each == present, is_pending=False, limit=limit)
        present = each if now else present
        found += present
    return found


def test_hardware_is_switched_with_the_fourth_mismatch_in_a_row() -> None:
    assert switches("ABBBB") == "AAAAB"
    assert switches("ABBABBA") == "AAAAAAA"
    assert switches("ABCBC") == "AAAAC"
    assert switches("BBB", limit=2) == "AAB"
    assert switches("BB", limit=0) == "BB"


def test_nothing_is_counted_while_a_switch_is_under_way() -> None:
    assert count_mismatch(2, is_present=False, is_pending=True, limit=3) == (2, False)
    assert count_mismatch(2, is_present=True, is_pending=True, limit=3) == (0, False)


# Delayed termination


def test_a_worker_ends_after_a_keep_alive_without_a_peak() -> None:
    keeper = DelayedTermination(600)
    kept = []
    for now, wanted in ((0, 4), (1, 1), (600, 1), (600, 4), (601, 2), (1200, 1), (1201, 1), (1800, 1)):  # 600: a peak
        keeper = keeper.keep(now, wanted)
        kept.append(keeper.count)
    assert kept == [4, 4, 4, 4, 4, 4, 2, 1]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=1, max_size=40), st.integers(1, 12))
def test_what_is_kept_is_the_most_that_was_wanted_within_the_keep_alive(
    steps: list[tuple[int, int]], keep_alive: int
) -> None:
    keeper, now = DelayedTermination(keep_alive), 0
    wants: list[tuple[int, int]] = []
    """(until when, how many)."""
    for passed, wanted in steps:
        now += passed
        if wants:
            wants[-1] = (now, wants[-1][1])
        wants.append((now, wanted))
        recent = [count for until, count in wants[:-1] if until > now - keep_alive]
        keeper = keeper.keep(now, wanted)
        assert keeper.count == max([*recent, wanted])
