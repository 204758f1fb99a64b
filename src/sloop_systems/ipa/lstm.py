"""The forecaster of IPA and Biscale: a small recurrent network (LSTM) predicts the busiest second of the near future.

Its inputs are the busiest seconds of the last bins, divided by the largest of them, and the output is a factor on it:
a network trained at one load works at any load. Training is in `benchmarks.lstm_training`.

Source: IPA (Razavi, dissertation, chapter P3): 25 units, 12 bins of 10 s, the largest of the next 20 s; Biscale
(chapter P4): 6 bins, the next 10 s. The scale-free input is not published.
"""

import math
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray

from sloop.api import InputError, OutOfRange, Range, quoted, s
from sloop.api.policies import Forecast, Traffic
from sloop.api.solvers import seconds_rps

Floats = NDArray[np.float64]

SHIPPED: Final = ("ipa", "biscale")
"""Weights in this folder. `ipa` predicts the busiest second of the next 20 s from 2 minutes of history; `biscale` that
of the next 10 s from 1 minute."""
MARGIN_MAX: Final = 1e6
"""A larger one is a typing error, and products with it could be infinite."""


def peaks_of(rates_rps: Sequence[float], bin_s: int) -> list[float]:
    """The largest of each `bin_s` rates, oldest first; an incomplete oldest bin is omitted."""
    starts = range(len(rates_rps) % bin_s, len(rates_rps), bin_s)
    return [max(rates_rps[start : start + bin_s]) for start in starts]


LOG_MAX: Final = 3.0
"""A forecast lies between 1/20 and e³ = 20 times the busiest bin: the training had no larger factors."""


@dataclass(frozen=True, slots=True)
class LstmNetwork:
    """Weights, and the bins and horizon that they were trained for.

    `flat` holds, for u units, the four gates' (in, forget, out, candidate) input weights (4u), recurrent weights (u
    rows of 4u), biases (4u), then the linear unit's weights (u) and bias (1).
    """

    bins: int
    """Bins in the input, the newest last."""
    bin_s: int
    """Seconds per bin; its value is that of its busiest second."""
    horizon_s: int
    """Seconds ahead among which the busiest is forecast."""
    flat: Floats

    @property
    def units(self) -> int:
        """u, the size of the recurrent layer, from the 4u² + 9u + 1 weights."""
        return round((math.sqrt(81 + 16 * (len(self.flat) - 1)) - 9) / 8)

    def forecast(self, peaks: Sequence[float]) -> float:
        """The busiest second to come, from the busiest seconds of the last bins, oldest first, in the same unit.

        Rounded to six digits, so that it does not depend on the machine's floating-point library.
        """
        series, scale = normalised(np.asarray([peaks], dtype=np.float64))
        factor = math.exp(min(LOG_MAX, max(-LOG_MAX, float(outputs(self.flat, series)[0]))))
        return float(f"{float(scale[0]) * factor:.6g}")

    def encoded(self) -> str:
        """The network as text, for `decoded`: `BINS:BIN_S:HORIZON_S:` and the weights in single precision."""
        text = b64encode(self.flat.astype("<f4").tobytes()).decode()
        return f"{self.bins}:{self.bin_s}:{self.horizon_s}:{text}"


def decoded(text: str) -> LstmNetwork:
    """The network that `LstmNetwork.encoded` wrote, whitespace ignored. InputError for any other text."""
    try:
        bins, bin_s, horizon_s, weights = "".join(text.split()).split(":")
        found = np.frombuffer(b64decode(weights, validate=True), dtype="<f4").astype(np.float64)
        network = LstmNetwork(int(bins), int(bin_s), int(horizon_s), found)
    except (ValueError, Base64Error):
        network = None
    if network is None or not _is_whole(network):
        help = "write what `python -m benchmarks.forecasts --train` wrote"
        raise InputError("these are no weights of a forecaster", help=help)
    return network


def _is_whole(network: LstmNetwork) -> bool:
    units = network.units
    sizes = min(network.bins, network.bin_s, network.horizon_s, units)
    return (
        sizes >= 1 and len(network.flat) == 4 * units * units + 9 * units + 1 and bool(np.isfinite(network.flat).all())
    )


def normalised(peaks: Floats) -> tuple[Floats, Floats]:
    """`peaks` of shape (n, bins) divided by the largest of each row, and these (n,); rows of zeros stay zero."""
    scale = peaks.max(axis=1)
    return peaks / np.where(scale > 0, scale, 1.0)[:, None], scale


def outputs(flat: Floats, series: Floats) -> Floats:
    """The network's outputs (n,) for `series` of shape (n, bins): the logarithm of the factor on the largest bin."""
    weights = LstmWeights(flat)
    hidden = np.zeros((len(series), weights.units))
    cell = np.zeros_like(hidden)
    for step in range(series.shape[1]):
        cell, hidden, _ = lstm_step(weights, series[:, step], cell, hidden)
    return np.asarray(hidden @ weights.dense + weights.offset)


class LstmWeights:
    """Named views into a flat vector of weights or derivatives (see `LstmNetwork.flat`)."""

    __slots__ = ("bias", "dense", "kernel", "offset", "recurrent", "units")

    def __init__(self, flat: Floats) -> None:
        self.units = units = LstmNetwork(1, 1, 1, flat).units
        gates = 4 * units
        self.kernel = flat[:gates]
        self.recurrent = flat[gates : gates * (units + 1)].reshape(units, gates)
        self.bias = flat[gates * (units + 1) : gates * (units + 2)]
        self.dense = flat[gates * (units + 2) : -1]
        self.offset = float(flat[-1])


def lstm_step(weights: LstmWeights, seen: Floats, cell: Floats, hidden: Floats) -> tuple[Floats, Floats, Floats]:
    """Cell state, hidden state and gates after one more bin with the values `seen` (n,)."""
    units = weights.units
    gates = seen[:, None] * weights.kernel + hidden @ weights.recurrent + weights.bias
    gates[:, : 3 * units] = 0.5 * np.tanh(0.5 * gates[:, : 3 * units]) + 0.5  # logistic, without overflow
    gates[:, 3 * units :] = np.tanh(gates[:, 3 * units :])
    cell = gates[:, units : 2 * units] * cell + gates[:, :units] * gates[:, 3 * units :]
    return cell, gates[:, 2 * units : 3 * units] * np.tanh(cell), gates


@cache
def _network(weights: str) -> LstmNetwork:
    """The network with these weights. OutOfRange for a text that is neither a name of `SHIPPED` nor weights.

    Reading the shipped weights is no I/O in the sense of law 1: they are a constant of the package, like its source.
    """
    if weights in SHIPPED:
        return decoded((files(__package__) / "weights" / f"{weights}.lstm").read_text(encoding="ascii"))
    try:
        return decoded(weights)
    except InputError as error:
        wrong = (
            f"must be {' or '.join(SHIPPED)}, or the text of trained weights, not {quoted(weights, 20)}: {error.what}"
        )
        raise OutOfRange("weights", wrong, error.help) from None


@dataclass(frozen=True, slots=True)
class Lstm(Forecast):
    """A small recurrent network's prediction of the busiest second of the near future, times 1 + `margin`.

    The forecaster of IPA and Biscale (section 2.8 of both specifications). `weights` is the name of weights that ship
    with it, trained on the first fortnight of the Twitter trace (docs/forecasters.md), or the text of other weights.
    Until enough seconds are measured, it predicts the busiest second so far. Fails on a sudden jump, like every
    forecast from the past, and on traffic unlike its training data.
    """

    weights: str = "ipa"
    """The name of weights that ship with it, `ipa` or `biscale`, or the text of other weights."""
    margin: Annotated[float, Range(above=-1, most=MARGIN_MAX)] = 0.0
    """Predict 1 + `margin` times as much."""

    def __post_init__(self) -> None:
        _network(self.weights)  # wrong weights are refused here

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        network = _network(self.weights)
        window = ingress.window(s(network.bins * network.bin_s))
        rates = seconds_rps([bucket.arrivals for bucket in window], ingress.bucket_ns)
        peaks = peaks_of(rates, network.bin_s)
        if len(peaks) < network.bins:
            return (1 + self.margin) * max(rates, default=0.0)
        return (1 + self.margin) * network.forecast(peaks)
