"""The recurrent network against arithmetic by hand, and the rates that it expects of known arrivals."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lstm_training import untrained
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.testing.views import make_arrivals
from sloop.units import ms
from sloop_systems.ipa.lstm import SHIPPED, Lstm, LstmNetwork, _network, decoded, outputs, peaks_of


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 12))
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


BUSIEST = LstmNetwork(3, 2, 4, np.zeros(4 + 9 + 1))
"""One unit without weights: the factor on the busiest of three bins of two seconds is always one."""


def test_it_asks_the_network_for_its_bins() -> None:
    policy = Lstm(weights=BUSIEST.encoded(), margin=0.5)
    assert policy.demand_rps(0, make_arrivals(99, 1, 2, 3, 4, 8, 6)) == 12, "the 99 is older than three bins"
    tenths = [count for each in (99, 1, 2, 3, 4, 8, 6) for count in (each, *[0] * 9)]
    assert policy.demand_rps(0, make_arrivals(*tenths, bucket_ns=ms(100))) == 12


def test_before_it_has_seen_enough_it_expects_the_busiest_second_again() -> None:
    assert Lstm().demand_rps(0, make_arrivals(9, 40, *[10] * 117)) == 40
    assert Lstm(margin=0.2).demand_rps(0, make_arrivals(10)) == 12
    assert Lstm().demand_rps(0, make_arrivals()) == 0


@pytest.mark.parametrize("weights", SHIPPED)
def test_what_ships_foresees_a_level_near_itself(weights: str) -> None:
    level = [18, 21, 20, 22, 19, 20, 21, 19] * 20
    foreseen = Lstm(weights=weights).demand_rps(0, make_arrivals(*level))
    assert 19 < foreseen < 25
    tenfold = Lstm(weights=weights).demand_rps(0, make_arrivals(*[10 * count for count in level]))
    assert tenfold == pytest.approx(10 * foreseen, rel=1e-4)


def test_what_ships_is_what_was_published() -> None:
    ipa, biscale = (_network(weights) for weights in SHIPPED)
    assert (ipa.bins, ipa.bin_s, ipa.horizon_s, ipa.units) == (12, 10, 20, 25)
    assert (biscale.bins, biscale.bin_s, biscale.horizon_s, biscale.units) == (6, 10, 10, 25)


@pytest.mark.parametrize(
    ("key", "value"), [("weights", "ipaa"), ("weights", "1:2:3:" + "A" * 99), ("margin", -1.0), ("margin", 1e308)]
)
def test_refuses_what_cannot_be(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        check_ranges(Lstm(**{key: value}))  # type: ignore[arg-type]  # one of its own keys


def test_no_weights_give_more_than_a_float_holds() -> None:
    wild = LstmNetwork(2, 1, 1, np.resize([3e38, -3e38, 1e-38], 4 + 9 + 1)).encoded()
    for counts in ((10**7,) * 3, (0, 10**7, 0), ()):
        demand_rps = Lstm(weights=wild).demand_rps(0, make_arrivals(*counts))
        assert 0 <= demand_rps <= 21 * 10**7
