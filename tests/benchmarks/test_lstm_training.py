"""Training of the recurrent network: windows, the gradient against differences, and that it learns what it can."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lstm_training import LstmTraining, TrainingEpoch, loss_gradient, train, untrained, windows
from sloop.errors import InputError
from sloop_systems.ipa.lstm import LstmNetwork, normalised, outputs


def chance(seed: int = 0) -> Callable[[], float]:
    return Random(seed).random


def silent(epoch: TrainingEpoch) -> None:
    """For those who do not look."""


def small(bins: int = 4, units: int = 3, seed: int = 0) -> LstmNetwork:
    return untrained(bins, 1, 1, units, Random(seed).random)


def waves(count: int) -> list[int]:
    """A square wave: what comes next can be read off what came last."""
    return [40 if second // 6 % 2 else 10 for second in range(count)]


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 6), st.integers(1, 7))
def test_the_gradient_is_that_of_differences(seed: int, bins: int, units: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    flat = small(bins, units, seed).flat + 0.3 * rng.standard_normal(4 * units * units + 9 * units + 1)
    series, targets = rng.random((rows, bins)), rng.standard_normal(rows) * 3
    loss, gradient = loss_gradient(flat, series, targets)
    assert loss == pytest.approx(float(np.abs(outputs(flat, series) - targets).mean()))
    errors = np.abs(outputs(flat, series) - targets)
    if errors.min() < 1e-4:
        return  # where the absolute value has a corner, differences have no limit
    for place in range(len(flat)):
        change = np.zeros_like(flat)
        change[place] = 1e-6
        above, below = (float(np.abs(outputs(flat + d, series) - targets).mean()) for d in (change, -change))
        assert gradient[place] == pytest.approx((above - below) / 2e-6, abs=1e-7)


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_windows_by_brute_force(counts: list[int], bins: int, bin_s: int, horizon_s: int) -> None:
    expected = []
    for start in range(0, len(counts) - bins * bin_s - horizon_s + 1, 3):
        seen = [max(counts[start + at * bin_s : start + (at + 1) * bin_s]) for at in range(bins)]
        came = max(counts[start + bins * bin_s :][:horizon_s])
        if max(seen) > 0 and came > 0:
            expected.append((seen, came))
    peaks, ahead = windows(counts, bins=bins, bin_s=bin_s, horizon_s=horizon_s, stride_s=3)
    assert peaks.shape == (len(expected), bins)
    assert [(row.tolist(), came) for row, came in zip(peaks, ahead.tolist(), strict=True)] == expected


def test_training_learns_a_wave_that_persistence_cannot() -> None:
    peaks, ahead = windows(waves(900), bins=7, bin_s=1, horizon_s=1, stride_s=1)
    said: list[TrainingEpoch] = []
    how = LstmTraining(units=6, epochs=30, batch=32, step=0.03)
    draw = chance()
    network = train(untrained(7, 1, 1, 6, draw), peaks, ahead, how, said.append, draw)
    assert [epoch.number for epoch in said] == list(range(1, 31))
    assert said[-1].trained < 0.25 * said[0].trained
    for at in range(0, 20):
        seen = [float(count) for count in waves(60)[at : at + 7]]
        assert network.forecast(seen) == pytest.approx(waves(60)[at + 7], rel=0.15)


def test_what_did_best_on_what_was_held_back_is_kept() -> None:
    peaks, ahead = windows(waves(300), bins=4, bin_s=1, horizon_s=1, stride_s=1)
    said: list[TrainingEpoch] = []
    network = train(small(), peaks, ahead, LstmTraining(units=3, epochs=6, step=0.2), said.append, chance())
    assert said[-1].number == 6
    series, scale = normalised(peaks)
    kept = round(len(series) * 6 / 7)
    error = np.abs(outputs(network.flat, series[kept:]) - np.log(ahead / scale)[kept:]).mean()
    assert error == min(epoch.held_back for epoch in said)
    assert [epoch for epoch in said if epoch.best][-1].held_back == error


def test_equal_draws_train_equal_weights() -> None:
    peaks, ahead = windows(waves(200), bins=4, bin_s=1, horizon_s=1, stride_s=1)
    how = LstmTraining(units=3, epochs=2)
    one, again, other = (train(small(), peaks, ahead, how, silent, chance(seed)).flat for seed in (1, 1, 2))
    assert one.tolist() == again.tolist() != other.tolist()


def test_too_little_to_train_on() -> None:
    peaks, ahead = windows([5] * 5, bins=4, bin_s=1, horizon_s=1, stride_s=1)
    with pytest.raises(InputError, match="1 windows are too few"):
        train(small(), peaks, ahead, LstmTraining(), silent, chance())
