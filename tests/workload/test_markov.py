import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.units import s
from sloop.workload.generate import Kind, generated
from sloop.workload.markov import Map, Mmpp, OnOff, stationary
from sloop.workload.stats import statistics

PUBLISHED_LIKE = Map(((-10.82, 0.0), (0.0, -16.66)), ((0.63, 10.19), (0.68, 15.98)))


@settings(max_examples=50, deadline=None)
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
        (PUBLISHED_LIKE, PUBLISHED_LIKE.rate_rps()),
    ],
)
def test_long_run_rate(kind: Kind, rate: float) -> None:
    assert statistics(generated(kind, seed=5, duration_ns=s(6_000))).mean_rps == pytest.approx(rate, rel=0.05)


def test_mmpp_is_burstier_than_poisson_and_remembers() -> None:
    """Index of dispersion and autocorrelation of counts against the closed form of the two-state MMPP."""
    found = statistics(generated(Mmpp((10.0, 100.0), (5.0, 5.0)), seed=1, duration_ns=s(20_000)))
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
