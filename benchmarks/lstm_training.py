"""Training of the recurrent network of the `lstm` forecaster (`sloop_systems.ipa.lstm`).

Back-propagation through time with Adam, on the absolute error of the logarithm of the forecast factor. For small errors
that is the symmetric percentage error by which forecasts are compared. The best weights on held-out windows are kept.
All random numbers come from the caller: equal numbers give equal weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sloop.errors import InputError
from sloop_systems.ipa.lstm import Floats, LstmNetwork, LstmWeights, lstm_step, normalised, outputs

_FIRST_DECAY, _SECOND_DECAY, _TINY = 0.9, 0.999, 1e-8
"""Adam's published constants."""


def windows(counts: Sequence[int], *, bins: int, bin_s: int, horizon_s: int, stride_s: int) -> tuple[Floats, Floats]:
    """Inputs and targets: the busiest second of each bin, (n, bins), and the busiest second after them, (n,).

    `counts` are requests per second; a window begins every `stride_s`. Windows without any request before or after are
    left out.
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


def loss_gradient(flat: Floats, series: Floats, targets: Floats) -> tuple[float, Floats]:
    """The mean absolute error of `outputs` against `targets` (n,), and its derivative by each weight."""
    weights = LstmWeights(flat)
    units, count = weights.units, len(series)
    hidden = np.zeros((count, units))
    cell = np.zeros_like(hidden)
    before = []
    for step in range(series.shape[1]):
        entered = (cell, hidden)
        cell, hidden, gates = lstm_step(weights, series[:, step], cell, hidden)
        before.append((*entered, cell, gates))
    error = hidden @ weights.dense + weights.offset - targets
    answer = np.sign(error) / count
    gradient = np.zeros_like(flat)
    into = LstmWeights(gradient)
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
class TrainingEpoch:
    """Mean absolute errors of the logarithm after one epoch, on the windows trained on and on those held back."""

    number: int
    trained: float
    held_back: float
    best: bool
    """Whether no earlier weights have a smaller error on the windows held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LstmTraining:
    """Parameters of training; the defaults take minutes for two weeks of seconds."""

    units: int = 25
    epochs: int = 20
    batch: int = 128
    step: float = 0.005
    """Adam's first step; it decays to 0 along a cosine."""
    held_back: float = 1 / 7
    """Fraction of the windows, the last ones, that decides which weights are kept."""


def train(
    network: LstmNetwork,
    peaks: Floats,
    ahead: Floats,
    how: LstmTraining,
    say: Callable[[TrainingEpoch], None],
    draw: Callable[[], float],
) -> LstmNetwork:
    """`network` trained further on inputs `peaks` (n, bins) and targets `ahead` (n,), rows in the order of time.

    `say` is called after each epoch; `draw` gives numbers from [0, 1) to shuffle with. InputError for too few windows.
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
        say(TrainingEpoch(number, trained, held_back, held_back == least))
    return LstmNetwork(network.bins, network.bin_s, network.horizon_s, best)


def untrained(bins: int, bin_s: int, horizon_s: int, units: int, draw: Callable[[], float]) -> LstmNetwork:
    """A network with random weights (uniform after Glorot, from `draw` in [0, 1)) and forget gates biased to 1."""
    flat = np.zeros(4 * units * units + 9 * units + 1)
    into = LstmWeights(flat)
    for part, fans in ((into.kernel, 1 + 4 * units), (into.recurrent, 5 * units), (into.dense, units + 1)):
        bound = math.sqrt(6 / fans)
        part[...] = np.array([bound * (2 * draw() - 1) for _ in range(part.size)]).reshape(part.shape)
    into.bias[units : 2 * units] = 1.0
    return LstmNetwork(bins, bin_s, horizon_s, flat)


def _epochs(
    flat: Floats, series: Floats, targets: Floats, how: LstmTraining, draw: Callable[[], float]
) -> Iterator[tuple[float, Floats]]:
    """Adam over shuffled batches: the mean loss of each epoch, and the weights after it (changed in place later)."""
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
