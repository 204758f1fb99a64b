"""The network against arithmetic by hand, its gradient against differences, and training that learns what it can."""

import math
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.solvers import lstm
from sloop.solvers.lstm import Epoch, Network, Training


def chance(seed: int = 0) -> Callable[[], float]:
    return Random(seed).random


def silent(epoch: Epoch) -> None:
    """For those who do not look."""


def small(bins: int = 4, units: int = 3, seed: int = 0) -> Network:
    return lstm.untrained(bins, 1, 1, units, chance(seed))


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_one_unit_by_hand() -> None:
    """Two bins through one unit, gate by gate."""
    kernel, recurrent, bias, dense, offset = (
        [0.5, -0.3, 0.8, 1.1],
        [0.2, 0.4, -0.6, 0.9],
        [0.1, 1.0, 0.0, -0.2],
        1.7,
        0.3,
    )
    flat = np.array([*kernel, *recurrent, *bias, dense, offset])
    cell = hidden = 0.0
    for seen in (0.25, 1.0):
        z = [seen * k + hidden * r + b for k, r, b in zip(kernel, recurrent, bias, strict=True)]
        cell = logistic(z[1]) * cell + logistic(z[0]) * math.tanh(z[3])
        hidden = logistic(z[2]) * math.tanh(cell)
    assert lstm.outputs(flat, np.array([[0.25, 1.0]]))[0] == pytest.approx(hidden * dense + offset, rel=1e-12)
    network = Network(2, 1, 1, flat)
    assert network.units == 1
    assert network.forecast([10, 40]) == pytest.approx(40 * math.exp(hidden * dense + offset), rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 6), st.integers(1, 7))
def test_the_gradient_is_that_of_differences(seed: int, bins: int, units: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    flat = small(bins, units, seed).flat + 0.3 * rng.standard_normal(4 * units * units + 9 * units + 1)
    series, targets = rng.random((rows, bins)), rng.standard_normal(rows) * 3
    loss, gradient = lstm.loss_gradient(flat, series, targets)
    assert loss == pytest.approx(float(np.abs(lstm.outputs(flat, series) - targets).mean()))
    errors = np.abs(lstm.outputs(flat, series) - targets)
    if errors.min() < 1e-4:
        return  # where the absolute value has a corner, differences have no limit
    for place in range(len(flat)):
        change = np.zeros_like(flat)
        change[place] = 1e-6
        above, below = (float(np.abs(lstm.outputs(flat + d, series) - targets).mean()) for d in (change, -change))
        assert gradient[place] == pytest.approx((above - below) / 2e-6, abs=1e-7)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_windows_by_brute_force(counts: list[int], bins: int, bin_s: int, horizon_s: int) -> None:
    expected = []
    for start in range(0, len(counts) - bins * bin_s - horizon_s + 1, 3):
        seen = [max(counts[start + at * bin_s : start + (at + 1) * bin_s]) for at in range(bins)]
        came = max(counts[start + bins * bin_s :][:horizon_s])
        if max(seen) > 0 and came > 0:
            expected.append((seen, came))
    peaks, ahead = lstm.windows(counts, bins=bins, bin_s=bin_s, horizon_s=horizon_s, stride_s=3)
    assert peaks.shape == (len(expected), bins)
    assert [(row.tolist(), came) for row, came in zip(peaks, ahead.tolist(), strict=True)] == expected


@given(st.lists(st.integers(1, 10**6), min_size=4, max_size=4), st.integers(1, 1000))
def test_a_forecast_has_the_scale_of_what_was_seen(peaks: list[int], factor: int) -> None:
    network = small()
    once = network.forecast(peaks)
    assert network.forecast([factor * peak for peak in peaks]) == pytest.approx(factor * once, rel=1e-4)
    assert max(peaks) / 21 < once < max(peaks) * 21


def test_nothing_seen_is_nothing_foreseen() -> None:
    assert small().forecast([0, 0, 0, 0]) == 0


def waves(count: int) -> list[int]:
    """A square wave: what comes next can be read off what came last."""
    return [40 if second // 6 % 2 else 10 for second in range(count)]


def test_training_learns_a_wave_that_persistence_cannot() -> None:
    peaks, ahead = lstm.windows(waves(900), bins=7, bin_s=1, horizon_s=1, stride_s=1)
    said: list[Epoch] = []
    how = Training(units=6, epochs=30, batch=32, step=0.03)
    draw = chance()
    network = lstm.train(lstm.untrained(7, 1, 1, 6, draw), peaks, ahead, how, said.append, draw)
    assert [epoch.number for epoch in said] == list(range(1, 31))
    assert said[-1].trained < 0.25 * said[0].trained
    for at in range(0, 20):
        seen = [float(count) for count in waves(60)[at : at + 7]]
        assert network.forecast(seen) == pytest.approx(waves(60)[at + 7], rel=0.15)


def test_what_did_best_on_what_was_held_back_is_kept() -> None:
    peaks, ahead = lstm.windows(waves(300), bins=4, bin_s=1, horizon_s=1, stride_s=1)
    said: list[Epoch] = []
    network = lstm.train(small(), peaks, ahead, Training(units=3, epochs=6, step=0.2), said.append, chance())
    assert said[-1].number == 6
    series, scale = lstm.normalised(peaks)
    kept = round(len(series) * 6 / 7)
    error = np.abs(lstm.outputs(network.flat, series[kept:]) - np.log(ahead / scale)[kept:]).mean()
    assert error == min(epoch.held_back for epoch in said)
    assert [epoch for epoch in said if epoch.best][-1].held_back == error


def test_equal_draws_train_equal_weights() -> None:
    peaks, ahead = lstm.windows(waves(200), bins=4, bin_s=1, horizon_s=1, stride_s=1)
    how = Training(units=3, epochs=2)
    one, again, other = (lstm.train(small(), peaks, ahead, how, silent, chance(seed)).flat for seed in (1, 1, 2))
    assert one.tolist() == again.tolist() != other.tolist()


def test_too_little_to_train_on() -> None:
    peaks, ahead = lstm.windows([5] * 5, bins=4, bin_s=1, horizon_s=1, stride_s=1)
    with pytest.raises(InputError, match="1 windows are too few"):
        lstm.train(small(), peaks, ahead, Training(), silent, chance())


def test_text_and_back() -> None:
    network = small()
    text = network.encoded()
    again = lstm.decoded("\n".join(text[at : at + 40] for at in range(0, len(text), 40)))
    assert (again.bins, again.bin_s, again.horizon_s) == (4, 1, 1)
    assert again.flat == pytest.approx(network.flat, rel=1e-6)
    assert again.encoded() == text


@pytest.mark.parametrize("text", ["", "ipa", "1:2:3:AAAA", "4:1:1:", "0:1:1:" + small().encoded()[6:], "1:2:3:ä"])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="no weights"):
        lstm.decoded(text)
