"""Generated traces: rates, gaps, curves and Markovian processes, against what theory says of them."""

import tracemalloc
from itertools import chain
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.units import NS_PER_S, s
from sloop.workload.generate import (
    KINDS,
    ArrivalProcess,
    Burst,
    Diurnal,
    Equal,
    Gamma,
    Map,
    Mmpp,
    OnOff,
    Poisson,
    Ramp,
    RateCurve,
    Spread,
    Square,
    Step,
    Uniform,
    counts_at,
    generated,
    kind_of,
    scaled_counts,
    spread_counts,
    stationary,
)
from sloop.workload.trace import statistics

SAMPLES: dict[str, ArrivalProcess] = {
    "poisson": Poisson(50.5),
    "equal": Equal(50.5),
    "uniform": Uniform(50.5),
    "burst": Burst(50.5),
    "gamma": Gamma(50.5, 3.0),
    "mmpp": Mmpp((10.0, 200.0), (3.0, 1.0)),
    "map": Map(((-12.0, 2.0), (0.0, -100.0)), ((10.0, 0.0), (5.0, 95.0))),
    "onoff": OnOff(100.0, 1.0, 2.0),
    "step": Step((10.0, 100.0), 2.0),
    "ramp": Ramp(0.0, 100.0, 5.0),
    "diurnal": Diurnal(50.0, 1.0, 4.0),
    "square": Square(5.0, 100.0, 3.0, 0.5),
}


PINNED: dict[str, list[int]] = {
    "poisson": [4879949, 27948221, 41215770],
    "uniform": [26516252, 34777352, 55788165],
    "burst": [1343707, 1769824, 2870236],
    "gamma": [289, 403653, 1271030],
    "mmpp": [112736879, 213426646, 265521503],
    "map": [97078979, 183784057, 228643517],
    "step": [24643743, 141138518, 208139639],
    "diurnal": [554295842, 618662846, 627157751],
}


def test_every_kind_is_sampled_here() -> None:
    assert SAMPLES.keys() == KINDS.keys()
    assert all(type(SAMPLES[word]) is kind for word, kind in KINDS.items())


@pytest.mark.parametrize("word", KINDS)
def test_sorted_inside_and_the_same_on_every_walk(word: str) -> None:
    trace = generated(SAMPLES[word], seed=3, duration_ns=s(7.3))
    times_ns = list(trace.times_ns())
    assert times_ns == sorted(times_ns) == list(trace.times_ns())
    assert 0 <= times_ns[0] <= times_ns[-1] < s(7.3)
    assert len(times_ns) == sum(trace.counts_per_s())


@pytest.mark.parametrize("word", sorted(KINDS.keys() - {"equal"}))
def test_another_seed_gives_other_arrivals(word: str) -> None:
    one, two = (list(generated(SAMPLES[word], seed=seed, duration_ns=s(5)).times_ns()) for seed in (1, 2))
    assert one != two


@pytest.mark.parametrize("word", sorted(KINDS.keys() - {"uniform", "burst"}))
def test_a_longer_trace_begins_with_the_shorter_one(word: str) -> None:
    short, long = (list(generated(SAMPLES[word], seed=1, duration_ns=s(length)).times_ns()) for length in (3, 6))
    assert [at_ns for at_ns in long if at_ns < s(3)] == short


def test_the_bytes_of_a_seed_are_pinned() -> None:
    """Law 6: these offsets are the same on any machine and Python."""
    assert [list(generated(SAMPLES[word], seed=42, duration_ns=s(9)).times_ns())[:3] for word in PINNED] == list(
        PINNED.values()
    )


@pytest.mark.parametrize(
    ("kind", "dispersion", "gap_cv"),
    [(Poisson(100.0), 1.0, 1.0), (Equal(100.0), 0.0, 0.0), (Gamma(100.0, 4.0), 16.0, 4.0)],
)
def test_means_and_burstiness_are_those_of_theory(kind: ArrivalProcess, dispersion: float, gap_cv: float) -> None:
    found = statistics(generated(kind, seed=0, duration_ns=s(3_000)))
    assert found.mean_rps == pytest.approx(100.0, rel=0.03)
    assert found.gap_cv == pytest.approx(gap_cv, rel=0.02)
    assert found.dispersion == pytest.approx(dispersion, rel=0.15)  # in the limit; a second is 100 gaps long


def test_uniform_is_exact_in_every_second() -> None:
    assert set(generated(Uniform(20.0), seed=0, duration_ns=s(30)).counts_per_s()) == {20}


@settings(max_examples=50)
@given(st.floats(0.01, 500), st.integers(1, 5 * NS_PER_S))
def test_equal_is_equal_to_the_nanosecond(rate: float, duration_ns: int) -> None:
    times_ns = list(generated(Equal(rate), seed=0, duration_ns=duration_ns).times_ns())
    assert times_ns == [round(place * NS_PER_S / rate) for place in range(len(times_ns))]
    assert round(len(times_ns) * NS_PER_S / rate) >= duration_ns


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("poison", {}, "unknown kind of trace 'poison'\nhelp: did you mean 'poisson'?"),
        (7, {}, "trace.kind: must be the name of a kind of trace, not 7"),
        ("poisson", {}, "the key 'rate' is missing"),
        ("poisson", {"rat": 5}, "unknown key 'rat'\nhelp: did you mean 'rate'?"),
        ("poisson", {"rate": "fast"}, "trace.rate: must be a number of at least 0 and at most 10,000,000, not 'fast'"),
        ("poisson", {"rate": True}, "trace.rate: must be a number of at least 0 and at most 10,000,000, not true"),
        ("poisson", {"rate": -1}, "trace.rate: must be a number of at least 0 and at most 10,000,000, not -1"),
        (
            "poisson",
            {"rate": float("nan")},
            "trace.rate: must be a number of at least 0 and at most 10,000,000, not nan",
        ),
        ("equal", {"rate": 0}, "trace.rate: must be a number above 0 and at most 10,000,000, not 0"),
        ("step", {"rates": [], "each_s": 1}, "trace.rates: must be a list that is not empty"),
        (
            "step",
            {"rates": [1, "x"], "each_s": 1},
            "trace.rates[1]: must be a number of at least 0 and at most 10,000,000, not 'x'",
        ),
        ("square", {"rate": 1, "burst_rate": 2, "period_s": 1, "burst_s": 2}, "trace: burst_s 2 is longer"),
        ("mmpp", {"rates": [1], "mean_s": [1]}, "trace: 1 rates and 1 mean_s"),
        ("map", {"d0": [[-1]], "d1": [[1, 2]]}, "trace: d1 is not a 1 by 1 matrix"),
        ("map", {"d0": [[-1.0]], "d1": [[2.0]]}, "trace: row 1 of d0 + d1 sums to 1, not 0"),
    ],
)
def test_what_is_wrong_is_said(name: object, values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        kind_of({"kind": name, **values})
    assert message in str(caught.value)


@pytest.mark.parametrize("word", ["poisson", "burst", "mmpp", "diurnal", "gamma"])
def test_a_walk_keeps_only_its_busiest_second_in_memory(word: str) -> None:
    trace = generated(SAMPLES[word], seed=1, duration_ns=s(1_200))
    tracemalloc.start()
    try:
        count = sum(1 for _ in trace.times_ns())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count > 50_000
    assert peak_bytes < 200_000  # all at once would be some 40 bytes for each arrival


RATES = st.floats(0, 1_000)
SPANS = st.floats(0.01, 50)
CURVES = st.one_of(
    st.builds(Step, st.lists(RATES, min_size=1, max_size=5).map(tuple), SPANS),
    st.builds(Ramp, RATES, RATES, SPANS),
    st.builds(Diurnal, RATES, st.floats(0, 1), SPANS, SPANS),
    st.builds(
        lambda low, high, period, share: Square(low, high, period, period * share),
        RATES,
        RATES,
        SPANS,
        st.floats(0.01, 1),
    ),
)


@settings(max_examples=300)
@given(CURVES, st.integers(0, 100), st.floats(0, 1))
def test_no_rate_of_a_second_is_above_its_peak(curve: RateCurve, second: int, into_s: float) -> None:
    assert curve.rate_rps(second + into_s) <= curve.peak_rps(second) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Step((100.0, 300.0), 2.0), [100, 100, 300, 300, 300, 300]),
        (Ramp(0.0, 400.0, 4.0), [50, 150, 250, 350, 400, 400]),
        (Square(100.0, 500.0, 3.0, 1.0), [500, 100, 100, 500, 100, 100]),
        (Diurnal(200.0, 1.0, 2.0), [200, 200, 200, 200, 200, 200]),
    ],
)
def test_counts_follow_the_curve(kind: ArrivalProcess, expected: list[int]) -> None:
    totals = [0] * 6
    for seed in range(40):
        for second, count in enumerate(generated(kind, seed=seed, duration_ns=s(6)).counts_per_s()):
            totals[second] += count
    assert [total / 40 for total in totals] == pytest.approx(expected, rel=0.1)


def test_night_is_at_the_start_and_noon_half_a_period_later() -> None:
    curve = Diurnal(100.0, 0.4, 86_400.0)
    assert curve.rate_rps(0) == pytest.approx(60)
    assert curve.rate_rps(43_200) == pytest.approx(140)
    assert Diurnal(100.0, 0.4, 86_400.0, 43_200.0).rate_rps(0) == pytest.approx(140)


PUBLISHED_LIKE = Map(((-10.82, 0.0), (0.0, -16.66)), ((0.63, 10.19), (0.68, 15.98)))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 10)), min_size=2, max_size=5))
def test_stationary_distribution_solves_its_equations(states: list[tuple[float, float]]) -> None:
    process = Mmpp(tuple(rate for rate, _ in states), tuple(mean for _, mean in states)).as_map()
    shares = np.array(stationary(process))
    generator = np.array(process.d0) + np.array(process.d1)
    assert shares.sum() == pytest.approx(1)
    assert shares @ generator == pytest.approx(np.zeros(len(states)), abs=1e-9)
    # All others are equally likely next, so the time in a state is proportional to its mean alone.
    assert shares == pytest.approx(np.array([mean for _, mean in states]) / sum(mean for _, mean in states))


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        (Mmpp((10.0, 100.0), (3.0, 1.0)), 32.5),
        (OnOff(90.0, 1.0, 2.0), 30.0),
        (PUBLISHED_LIKE, 16.29),
    ],
)
def test_long_run_rate(kind: ArrivalProcess, rate: float) -> None:
    assert statistics(generated(kind, seed=5, duration_ns=s(6_000))).mean_rps == pytest.approx(rate, rel=0.05)


def test_mmpp_is_burstier_than_poisson_and_remembers() -> None:
    """Index of dispersion and autocorrelation of counts against the closed form of the two-state MMPP."""
    found = statistics(generated(Mmpp((10.0, 100.0), (5.0, 5.0)), seed=1, duration_ns=s(8_000)))
    # Var N(1 s) = m + 2 (45²) (T/k − (1 − e^{−kT})/k²) with k = 0.4: 55 + 2·2025·(2.5 − 2.0605); divided by the mean.
    assert found.dispersion == pytest.approx((55 + 2 * 2025 * (2.5 - (1 - np.exp(-0.4)) / 0.16)) / 55, rel=0.05)
    assert found.acf[1] > 0.6
    assert abs(found.acf[60]) < 0.1


def test_a_state_without_return_is_refused() -> None:
    with pytest.raises(InputError, match="state 2 never leads back"):
        Map(((-2.0, 1.0), (0.0, -5.0)), ((1.0, 0.0), (0.0, 5.0)))


def test_negative_rates_are_refused() -> None:
    with pytest.raises(InputError, match="row 1 has a negative rate"):
        Map(((-2.0, -1.0), (1.0, -5.0)), ((3.0, 0.0), (0.0, 4.0)))


COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=10)
EXACT = [Spread.UNIFORM, Spread.EQUAL, Spread.BURST]


@settings(max_examples=50)
@given(COUNTS, st.sampled_from(list(Spread)), st.floats(0.1, 5_000))
def test_sorted_within_the_trace_and_repeatable(counts: list[int], spread: Spread, mean_ms: float) -> None:
    duration_ns = len(counts) * NS_PER_S - 1
    one, two = (
        list(chain.from_iterable(spread_counts(counts, spread, Random(1), mean_ms=mean_ms, duration_ns=duration_ns)))
        for _ in range(2)
    )
    assert one == two == sorted(one)
    assert all(0 <= at_ns < duration_ns for at_ns in one)


@pytest.mark.parametrize("spread", EXACT)
def test_exact_spreads_keep_each_second_s_count(spread: Spread) -> None:
    counts = [3, 0, 20, 1]
    blocks = spread_counts(counts, spread, Random(0), mean_ms=5, duration_ns=4 * NS_PER_S)
    assert [len(block) for block in blocks] == counts


def test_equal_starts_on_the_second() -> None:
    blocks = spread_counts([2, 4], Spread.EQUAL, Random(0), duration_ns=2 * NS_PER_S)
    quarter = NS_PER_S // 4
    assert list(blocks) == [[0, 2 * quarter], [NS_PER_S + place * quarter for place in range(4)]]


def test_a_burst_reaches_into_later_seconds_in_order() -> None:
    blocks = list(spread_counts([50, 0, 0, 50], Spread.BURST, Random(0), mean_ms=2_000, duration_ns=4 * NS_PER_S))
    assert len(blocks[1]) > 0
    for second, block in enumerate(blocks):
        assert block == sorted(block)
        assert all(at_ns // NS_PER_S == second for at_ns in block)


def test_burst_offsets_have_the_published_mean() -> None:
    """Sponge specification 4.1: 20 offsets of mean 50 ms, so a second's requests are in within about 180 ms."""
    blocks = list(spread_counts([20] * 2_000, Spread.BURST, Random(0), mean_ms=50, duration_ns=2_000 * NS_PER_S))
    offsets_ms = [at_ns % NS_PER_S / 1e6 for block in blocks for at_ns in block]
    last_ms = [block[-1] % NS_PER_S / 1e6 for block in blocks]
    assert sum(offsets_ms) / len(offsets_ms) == pytest.approx(50, rel=0.02)
    assert sum(last_ms) / len(last_ms) == pytest.approx(180, rel=0.02)  # 50 ms times the 20th harmonic number


def test_early_arrivals_fill_two_thirds_of_their_second() -> None:
    """IPA specification 2.13: gaps of mean 1/(1.5 n), so that the last of n comes after two thirds of a second."""
    blocks = list(spread_counts([200] * 500, Spread.EARLY, Random(0), duration_ns=500 * NS_PER_S))
    assert [len(block) for block in blocks] == [200] * 500
    last_s = [block[-1] % NS_PER_S / NS_PER_S for block in blocks]
    assert sum(last_s) / len(last_s) == pytest.approx(2 / 3, rel=0.02)


@settings(max_examples=50)
@given(COUNTS, st.floats(0.01, 10))
def test_scaling_counts_loses_less_than_one_request(counts: list[int], factor: float) -> None:
    scaled = list(scaled_counts(counts, factor))
    for until in range(len(counts) + 1):
        assert -1e-6 < sum(counts[:until]) * factor - sum(scaled[:until]) < 1 + 1e-6


def test_a_fractional_rate_alternates() -> None:
    assert list(counts_at(2.5, 4 * NS_PER_S)) == [2, 3, 2, 3]
    assert list(counts_at(0.25, 4 * NS_PER_S)) == [0, 0, 0, 1]
