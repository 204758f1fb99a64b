import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.units import s
from sloop.workload.curves import Curve, Diurnal, Ramp, Square, Step
from sloop.workload.generate import Kind, generated

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


@settings(max_examples=300, deadline=None)
@given(CURVES, st.integers(0, 100), st.floats(0, 1))
def test_no_rate_of_a_second_is_above_its_peak(curve: Curve, second: int, into_s: float) -> None:
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
def test_counts_follow_the_curve(kind: Kind, expected: list[int]) -> None:
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
