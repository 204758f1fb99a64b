"""A small recurrent network that foresees the busiest second of the near future, and how it is trained.

One layer of long short-term memory and one linear unit look at the busiest second of each of the last bins. Bins are
divided by the largest of them and the answer is a factor on it, so that a network which was trained at one load serves
at any other. Training is back-propagation through time with Adam on the absolute error of the factor's logarithm, which
is for small errors the symmetric percentage error that forecasts are judged by; the weights kept are those that did
best on windows held back. Chance comes from the caller, so that equal draws train equal weights.

Knows sequences of numbers, no trace and no clock. Source: IPA specification, section 2.8 (25 units, 12 bins of 10 s,
largest of the next 20 s); Biscale specification, section 2.8 (6 bins, next 10 s, scale-free inputs).
"""

import math
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError

Floats = NDArray[np.float64]

LOG_MAX: Final = 3.0
"""No forecast is further than e³ = 20 times from the busiest bin: nothing was trained beyond."""

_FIRST_DECAY, _SECOND_DECAY, _TINY = 0.9, 0.999, 1e-8
"""Adam's own constants."""


@dataclass(frozen=True, slots=True)
class Network:
    """Weights, and what they were trained to see.

    `flat` holds, for u units, the four gates' (in, forget, out, candidate) input weights (4u), recurrent weights (u
    rows of 4u), biases (4u), then the linear unit's weights (u) and bias (1).
    """

    bins: int
    """How many bins the network looks at, the newest last."""
    bin_s: int
    """Seconds of each bin; its value is the busiest of them."""
    horizon_s: int
    """How far ahead the busiest second is foreseen."""
    flat: Floats

    @property
    def units(self) -> int:
        """Of the recurrent layer: 4u² + 9u + 1 weights."""
        return round((math.sqrt(81 + 16 * (len(self.flat) - 1)) - 9) / 8)

    def forecast(self, peaks: Sequence[float]) -> float:
        """The busiest second to come, in the unit of `peaks`, which are those of the last bins, oldest first.

        Rounded to six digits, so that the last bits of a machine's arithmetic do not show.
        """
        series, scale = normalised(np.asarray([peaks], dtype=np.float64))
        factor = math.exp(min(LOG_MAX, max(-LOG_MAX, float(outputs(self.flat, series)[0]))))
        return float(f"{float(scale[0]) * factor:.6g}")

    def encoded(self) -> str:
        """As text, `BINS:BIN_S:HORIZON_S:` and the weights in single precision, which `decoded` reads."""
        text = b64encode(self.flat.astype("<f4").tobytes()).decode()
        return f"{self.bins}:{self.bin_s}:{self.horizon_s}:{text}"


def decoded(text: str) -> Network:
    """The network that `Network.encoded` wrote; blanks and line ends do not matter. InputError for anything else."""
    try:
        bins, bin_s, horizon_s, weights = "".join(text.split()).split(":")
        found = np.frombuffer(b64decode(weights, validate=True), dtype="<f4").astype(np.float64)
        network = Network(int(bins), int(bin_s), int(horizon_s), found)
    except (ValueError, Base64Error):
        network = None
    if network is None or not _is_whole(network):
        raise InputError("these are no weights of a forecaster", help="write what `sloop forecast --train` wrote")
    return network


def _is_whole(network: Network) -> bool:
    units = network.units
    sizes = min(network.bins, network.bin_s, network.horizon_s, units)
    return (
        sizes >= 1 and len(network.flat) == 4 * units * units + 9 * units + 1 and bool(np.isfinite(network.flat).all())
    )


def windows(counts: Sequence[int], *, bins: int, bin_s: int, horizon_s: int, stride_s: int) -> tuple[Floats, Floats]:
    """What there was to see and what came then: peaks of shape (n, bins), and the busiest second after them, (n,).

    `counts` are requests in each second; a window begins every `stride_s`. Windows that saw nothing at all, or that
    nothing followed, are left out.
    """
    seconds = np.asarray(counts, dtype=np.float64)
    history_s = bins * bin_s
    first = np.arange(0, len(seconds) - history_s - horizon_s + 1, stride_s)
    if not len(first):
        return np.empty((0, bins)), np.empty(0)
    bin_peaks = np.lib.stride_tricks.sliding_window_view(seconds, bin_s).max(axis=1)
    peaks = bin_peaks[first[:, None] + bin_s * np.arange(bins)]
    ahead = np.lib.stride_tricks.sliding_window_view(seconds, horizon_s).max(axis=1)[first + history_s]
    useful = (peaks.max(axis=1) > 0) & (ahead > 0)
    return peaks[useful], ahead[useful]


def normalised(peaks: Floats) -> tuple[Floats, Floats]:
    """`peaks` of shape (n, bins) each divided by its row's largest, and those (n,); a row of zeros stays one."""
    scale = peaks.max(axis=1)
    return peaks / np.where(scale > 0, scale, 1.0)[:, None], scale


def outputs(flat: Floats, series: Floats) -> Floats:
    """The network's answers (n,) to `series` of shape (n, bins): the logarithm of the factor on the largest bin."""
    weights = _Weights(flat)
    hidden = np.zeros((len(series), weights.units))
    cell = np.zeros_like(hidden)
    for step in range(series.shape[1]):
        cell, hidden, _ = _step(weights, series[:, step], cell, hidden)
    return np.asarray(hidden @ weights.dense + weights.offset)


def loss_gradient(flat: Floats, series: Floats, targets: Floats) -> tuple[float, Floats]:
    """The mean absolute error of `outputs` against `targets` (n,), and its derivative by each weight."""
    weights = _Weights(flat)
    units, count = weights.units, len(series)
    hidden = np.zeros((count, units))
    cell = np.zeros_like(hidden)
    before = []
    for step in range(series.shape[1]):
        entered = (cell, hidden)
        cell, hidden, gates = _step(weights, series[:, step], cell, hidden)
        before.append((*entered, cell, gates))
    error = hidden @ weights.dense + weights.offset - targets
    answer = np.sign(error) / count
    gradient = np.zeros_like(flat)
    into = _Weights(gradient)
    into.dense[:] = hidden.T @ answer
    gradient[-1] = answer.sum()
    d_hidden = answer[:, None] * weights.dense
    d_cell = np.zeros_like(d_hidden)
    d_gates = np.empty((count, 4 * units))
    for step in reversed(range(series.shape[1])):
        cell_before, hidden_before, cell, gates = before[step]
        enter, forget, out, candidate = (gates[:, at * units : (at + 1) * units] for at in range(4))
        squashed = np.tanh(cell)
        d_cell = d_cell + d_hidden * out * (1 - squashed * squashed)
        d_gates[:, :units] = d_cell * candidate * enter * (1 - enter)
        d_gates[:, units : 2 * units] = d_cell * cell_before * forget * (1 - forget)
        d_gates[:, 2 * units : 3 * units] = d_hidden * squashed * out * (1 - out)
        d_gates[:, 3 * units :] = d_cell * enter * (1 - candidate * candidate)
        into.kernel[:] += series[:, step] @ d_gates
        into.recurrent[:] += hidden_before.T @ d_gates
        into.bias[:] += d_gates.sum(axis=0)
        d_hidden = d_gates @ weights.recurrent.T
        d_cell = d_cell * forget
    return float(np.abs(error).mean()), gradient


@dataclass(frozen=True, slots=True)
class Epoch:
    """How far training has come: mean absolute errors of the logarithm, of what was trained on and what was not."""

    number: int
    trained: float
    held_back: float
    best: bool
    """Whether no earlier weights did better on what was held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How to train: enough for two weeks of seconds in minutes."""

    units: int = 25
    epochs: int = 20
    batch: int = 128
    step: float = 0.005
    """Adam's step at the start; it falls to nothing with the cosine of the way done."""
    held_back: float = 1 / 7
    """The last part of the windows, which decides which weights are kept."""


def train(
    network: Network,
    peaks: Floats,
    ahead: Floats,
    how: Training,
    say: Callable[[Epoch], None],
    draw: Callable[[], float],
) -> Network:
    """`network` trained further on `peaks` (n, bins) and what came `ahead` (n,), rows in the order of time.

    `say` is told after each epoch; `draw` gives numbers from [0, 1) to shuffle with. InputError for too few windows.
    """
    series, scale = normalised(peaks)
    targets = np.log(ahead / scale)
    kept = round(len(series) * (1 - how.held_back))
    if kept < 1 or kept == len(series):
        need_s = network.bins * network.bin_s + network.horizon_s
        raise InputError(
            f"{len(series)} windows are too few to train on", help=f"a window takes {need_s} s: give a longer trace"
        )
    best, least = network.flat, math.inf
    epochs = _epochs(network.flat, series[:kept], targets[:kept], how, draw)
    for number, (trained, flat) in enumerate(epochs, 1):
        held_back = float(np.abs(outputs(flat, series[kept:]) - targets[kept:]).mean())
        if held_back < least:
            best, least = flat.copy(), held_back
        say(Epoch(number, trained, held_back, held_back == least))
    return Network(network.bins, network.bin_s, network.horizon_s, best)


def untrained(bins: int, bin_s: int, horizon_s: int, units: int, draw: Callable[[], float]) -> Network:
    """A network that forgets little and knows nothing: uniform weights after Glorot, from `draw` in [0, 1)."""
    flat = np.zeros(4 * units * units + 9 * units + 1)
    into = _Weights(flat)
    for part, fans in ((into.kernel, 1 + 4 * units), (into.recurrent, 5 * units), (into.dense, units + 1)):
        bound = math.sqrt(6 / fans)
        part[...] = np.array([bound * (2 * draw() - 1) for _ in range(part.size)]).reshape(part.shape)
    into.bias[units : 2 * units] = 1.0
    return Network(bins, bin_s, horizon_s, flat)


class _Weights:
    """Views into a flat vector of weights, or of derivatives."""

    __slots__ = ("bias", "dense", "kernel", "offset", "recurrent", "units")

    def __init__(self, flat: Floats) -> None:
        self.units = units = Network(1, 1, 1, flat).units
        gates = 4 * units
        self.kernel = flat[:gates]
        self.recurrent = flat[gates : gates * (units + 1)].reshape(units, gates)
        self.bias = flat[gates * (units + 1) : gates * (units + 2)]
        self.dense = flat[gates * (units + 2) : -1]
        self.offset = float(flat[-1])


def _step(weights: _Weights, seen: Floats, cell: Floats, hidden: Floats) -> tuple[Floats, Floats, Floats]:
    """Cell, hidden state and gates after one more bin, `seen` (n,)."""
    units = weights.units
    gates = seen[:, None] * weights.kernel + hidden @ weights.recurrent + weights.bias
    gates[:, : 3 * units] = 0.5 * np.tanh(0.5 * gates[:, : 3 * units]) + 0.5  # the logistic function, never overflowing
    gates[:, 3 * units :] = np.tanh(gates[:, 3 * units :])
    cell = gates[:, units : 2 * units] * cell + gates[:, :units] * gates[:, 3 * units :]
    return cell, gates[:, 2 * units : 3 * units] * np.tanh(cell), gates


def _epochs(
    flat: Floats, series: Floats, targets: Floats, how: Training, draw: Callable[[], float]
) -> Iterator[tuple[float, Floats]]:
    """The mean loss of each epoch and the weights after it, which the next one changes; Adam over shuffled batches."""
    flat = flat.copy()
    first, second = np.zeros_like(flat), np.zeros_like(flat)
    batches = -(-len(series) // how.batch)
    done, total = 0, batches * how.epochs
    for _ in range(how.epochs):
        order = np.argsort(np.array([draw() for _ in range(len(series))]), kind="stable")
        lost = 0.0
        for start in range(0, len(series), how.batch):
            rows = order[start : start + how.batch]
            loss, gradient = loss_gradient(flat, series[rows], targets[rows])
            lost += loss * len(rows)
            done += 1
            first += (1 - _FIRST_DECAY) * (gradient - first)
            second += (1 - _SECOND_DECAY) * (gradient * gradient - second)
            step = how.step * 0.5 * (1 + math.cos(math.pi * done / total))
            unbiased = np.sqrt(second / (1 - _SECOND_DECAY**done)) + _TINY
            flat -= step * first / (1 - _FIRST_DECAY**done) / unbiased
        yield lost / len(series), flat
