"""Rates of whole seconds from counts of short intervals, and the recurrent network against arithmetic by hand."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lstm_training import untrained
from sloop.errors import InputError
from sloop.solvers.forecasting import LstmNetwork, decoded, outputs, peaks_of, seconds_rps
from sloop.units import ms, s

counts_of = st.lists(st.integers(0, 50), max_size=60)


@given(counts_of, st.sampled_from([1, 2, 5, 10]))
def test_the_newest_seconds_by_brute_force(counts: list[int], width: int) -> None:
    found = seconds_rps(counts, s(1) // width)
    newest_first = []
    left = list(counts)
    while len(left) >= width:
        newest_first.append(float(sum(left.pop() for _ in range(width))))
    assert found == (newest_first[::-1] or ([sum(counts) * width / len(counts)] if counts else []))


def test_intervals_that_do_not_divide_a_second() -> None:
    assert seconds_rps([3, 3, 3, 6, 6, 6], ms(300)) == pytest.approx([10, 20])
    assert seconds_rps([30, 60], s(2)) == [15, 30]


@given(counts_of, st.integers(1, 12))
def test_peaks_end_with_the_newest(counts: list[int], bin_s: int) -> None:
    found = peaks_of([float(count) for count in counts], bin_s)
    assert len(found) == len(counts) // bin_s
    for back, peak in enumerate(reversed(found)):
        end = len(counts) - back * bin_s
        assert peak == max(counts[end - bin_s : end])


def small(bins: int = 4, units: int = 3, seed: int = 0) -> LstmNetwork:
    return untrained(bins, 1, 1, units, Random(seed).random)


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
    assert outputs(flat, np.array([[0.25, 1.0]]))[0] == pytest.approx(hidden * dense + offset, rel=1e-12)
    network = LstmNetwork(2, 1, 1, flat)
    assert network.units == 1
    assert network.forecast([10, 40]) == pytest.approx(40 * math.exp(hidden * dense + offset), rel=1e-5)


@given(st.lists(st.integers(1, 10**6), min_size=4, max_size=4), st.integers(1, 1000))
def test_a_forecast_has_the_scale_of_what_was_seen(peaks: list[int], factor: int) -> None:
    network = small()
    once = network.forecast(peaks)
    assert network.forecast([factor * peak for peak in peaks]) == pytest.approx(factor * once, rel=1e-4)
    assert max(peaks) / 21 < once < max(peaks) * 21


def test_nothing_seen_is_nothing_foreseen() -> None:
    assert small().forecast([0, 0, 0, 0]) == 0


def test_text_and_back() -> None:
    network = small()
    text = network.encoded()
    again = decoded("\n".join(text[at : at + 40] for at in range(0, len(text), 40)))
    assert (again.bins, again.bin_s, again.horizon_s) == (4, 1, 1)
    assert again.flat == pytest.approx(network.flat, rel=1e-6)
    assert again.encoded() == text


@pytest.mark.parametrize("text", ["", "ipa", "1:2:3:AAAA", "4:1:1:", "0:1:1:" + small().encoded()[6:], "1:2:3:ä"])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="no weights"):
        decoded(text)
