"""Quantisation-aware training of small networks for a fabric, in NumPy.

A network of 115 thousand weights trains on ten thousand rows in minutes without a framework, which would be a thousand
times the size of the network. `fit` trains with floats first. Then it trains with weights and activations rounded as a
switch rounds them, so that the integer network loses little accuracy (gradients pass straight through the
rounding).

Settings: binary cross-entropy, Adam at 1e-3 (halved after two epochs without gain on the rows that decide when to end),
batches of 256 or a 32nd of the rows, at most 30 epochs, an early end after 5 without gain, then 5 epochs of quantised
training at a tenth of the rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from sloop.api import InputError
from sloop_systems.netnn.network import (
    BITS,
    WEIGHT_MAX,
    Convolution,
    Dense,
    FloatNetwork,
    InputRange,
    Layer,
    Network,
)
from sloop_systems.netnn.quantiser import quantise

Floats = NDArray[np.float32]
RATE: Final = 1e-3
BATCH_MAX: Final = 256
BATCH_MIN: Final = 16
HALVE_AFTER: Final = 2
"""Epochs without gain after which the rate is halved, and after as many again."""
STEPS: Final = 32
"""Of an epoch, at least: few rows go in smaller batches."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A 1-D network with one logit: convolutions, each with ReLU and max pooling, then dense layers with ReLU."""

    inputs: int
    filters: tuple[int, ...]
    dense: tuple[int, ...]
    kernel: int = 5
    pool: int = 5
    same: bool = False
    """Whether convolutions pad their input, so that it stays as long: for inputs too short for two of them."""

    def made(self, seed: int) -> FloatNetwork:
        """The network with random weights (He)."""
        random = RandomState(seed)
        around = self.kernel // 2 if self.same else 0
        layers: list[Layer] = []
        length, channels = self.inputs, 1
        for number, count in enumerate(self.filters, 1):
            weights = random.standard_normal((count, self.kernel, 1, channels)) * np.sqrt(2 / (self.kernel * channels))
            padding = (around, 0, around, 0)
            layer = Convolution(f"conv{number}", weights, np.zeros(count), pool=(self.pool, 1), padding=padding)
            length, _, channels = layer.output_shape((length, 1, channels))
            layers.append(layer)
        inputs = length * channels
        for number, count in enumerate((*self.dense, 1), 1):
            layers.append(
                Dense(f"dense{number}", random.standard_normal((count, inputs)) * np.sqrt(2 / inputs), np.zeros(count))
            )
            inputs = count
        return FloatNetwork((self.inputs, 1, 1), tuple(layers))


FLOW_MODEL: Final = Architecture(814, (32, 64), (50, 100))
"""The published network for flows."""
PACKET_MODEL: Final = Architecture(544, (32,), (50, 100))
"""The published network for single packets."""


class TrainingSchedule(NamedTuple):
    """The length of training."""

    epochs: int = 30
    """At most, before rounding."""
    quantised_epochs: int = 5
    patience: int = 5
    """Epochs without gain on the rows that decide, after which it ends."""


class LabelledRows(NamedTuple):
    """Rows of integers 0..255, and for each whether it is malicious."""

    rows: NDArray[Any]
    labels: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained network, and how it was trained."""

    network: FloatNetwork
    """After quantised training its weights are whole multiples of powers of two."""
    shifts: tuple[int, ...]
    """What the sums of each layer but the last are shifted by on a switch."""
    inputs: InputRange
    epochs: int
    validation: float
    """The share of the validation rows that it classifies rightly, with rounding if it was trained with it."""
    floats: FloatNetwork
    """The network before quantised training."""

    def integers(self) -> Network:
        """The network that switches execute."""
        return quantise(self.network, inputs=self.inputs, shifts=self.shifts)


def fit(
    architecture: Architecture,
    train: LabelledRows,
    early: LabelledRows,
    *,
    seed: int = 0,
    schedule: TrainingSchedule = TrainingSchedule(),  # noqa: B008  # a tuple
    inputs: InputRange = BITS,
) -> Trained:
    """Train on the rows of `train`; `early` decides when to end.

    InputError if there is only one class, or no rows in `early`.
    """
    if len(np.unique(train.labels)) < 2 or not len(early.labels):
        raise InputError("training needs rows of both classes, and rows to validate with", help="give more flows")
    scale = np.float32(2.0**-inputs.exponent)
    given, wanted = train.rows.astype(np.uint8), train.labels.astype(np.float32)
    held, held_labels = early.rows.astype(np.uint8), early.labels.astype(bool)
    trainer = _Trainer(architecture.made(seed), seed, scale)
    best, best_loss, since, done = trainer.copy(), np.inf, 0, 0
    for epoch in range(schedule.epochs):
        trainer.epoch(given, wanted)
        loss, right = trainer.judge(held, held_labels)
        done += 1
        if loss < best_loss - 1e-4:
            best, best_loss, since = trainer.copy(), loss, 0
        else:
            since += 1
            trainer.rate *= 1.0 if since % HALVE_AFTER else 0.5
        if since >= schedule.patience or epoch == schedule.epochs - 1:
            break
    trainer.restore(best)
    before = trainer.network()
    trainer.calibrate(given[RandomState(seed).permutation(len(given))[:1024]], inputs.exponent)
    if schedule.quantised_epochs:
        trainer.quantises, trainer.rate = True, RATE / 10
        best, best_loss = trainer.copy(), trainer.judge(held, held_labels)[0]
        for _ in range(schedule.quantised_epochs):
            trainer.epoch(given, wanted)
            loss, right = trainer.judge(held, held_labels)
            done += 1
            if loss < best_loss:
                best, best_loss = trainer.copy(), loss
        trainer.restore(best)
    right = trainer.judge(held, held_labels)[1]
    return Trained(trainer.network(), trainer.final_shifts(), inputs, done, right, before)


@dataclass
class _Weights:
    """A layer's weights as a matrix (outputs × inputs), its bias, and Adam's moments of both."""

    weights: Floats
    bias: Floats
    moments: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moments = self.moments or [np.zeros_like(each) for each in (self.weights, self.bias) for _ in range(2)]


class _Trainer:
    """Forward and backward passes, and the optimiser's state."""

    def __init__(self, network: FloatNetwork, seed: int, scale: np.float32) -> None:
        self.rate = RATE
        self.quantises = False
        self.shifts: tuple[int, ...] = ()
        self._exponents: list[tuple[int, int, int]] = []
        self._network = network
        self._scale = scale
        self._random = RandomState(seed + 1)
        self._steps = 0
        self._layers = [
            _Weights(layer.matrix.astype(np.float32), layer.bias.astype(np.float32)) for layer in network.layers
        ]

    def copy(self) -> list[tuple[Floats, Floats]]:
        """All weights and biases."""
        return [(layer.weights.copy(), layer.bias.copy()) for layer in self._layers]

    def restore(self, saved: list[tuple[Floats, Floats]]) -> None:
        """Go back to these weights and biases."""
        for layer, (weights, bias) in zip(self._layers, saved, strict=True):
            layer.weights, layer.bias = weights.copy(), bias.copy()

    def network(self) -> FloatNetwork:
        """The network with the present weights, rounded if it is trained so."""
        layers: list[Layer] = []
        for place, old in enumerate(self._network.layers):
            weights, bias = (each.astype(np.float64) for each in self._rounded(place))
            layers.append(replace(old, weights=weights.reshape(old.weights.shape), bias=bias))
        return replace(self._network, layers=tuple(layers))

    def epoch(self, rows: NDArray[np.uint8], labels: Floats) -> None:
        """One pass over all rows in random order."""
        order = self._random.permutation(len(rows))
        batch = min(BATCH_MAX, max(BATCH_MIN, len(rows) // STEPS))
        for start in range(0, len(rows), batch):
            chosen = order[start : start + batch]
            self._step(rows[chosen], labels[chosen])

    def judge(self, rows: NDArray[np.uint8], labels: NDArray[np.bool_]) -> tuple[float, float]:
        """Mean cross-entropy, and the share of rows that are classified rightly."""
        logits = np.concatenate(
            [self._forward(rows[at : at + BATCH_MAX])[-1][:, 0] for at in range(0, len(rows), BATCH_MAX)]
        )
        signed = np.where(labels, logits, -logits).astype(np.float64)
        return float(np.logaddexp(0, -signed).mean()), float(((logits >= 0) == labels).mean())

    # What a switch rounds.

    def calibrate(self, rows: NDArray[np.uint8], exponent: int) -> None:
        """Fix the powers of two of weights and activations, by the present weights and what they give for `rows`."""
        outputs = self._forward(rows)[1:]
        before, self._exponents = exponent, []
        for place, layer in enumerate(self._layers):
            largest = float(np.abs(layer.weights).max())
            weights = int(np.floor(np.log2(WEIGHT_MAX / largest))) if largest else 0
            peak = float(outputs[place].max(initial=0.0))
            after = min(int(np.floor(np.log2(WEIGHT_MAX / peak))) if peak > 0 else 30, weights + before)
            self._exponents.append((weights, before, after))
            before = after
        *inner, (weights, before, _) = self._exponents
        self._exponents[-1] = (weights, before, weights + before)
        self.shifts = (*(w + b - a for w, b, a in inner), 0)

    def final_shifts(self) -> tuple[int, ...]:
        """The shifts of all layers but the last, after the quantiser has scaled the weights to the full range. If
        training has made weights smaller, the quantiser scales them by more than training did, and the shift
        compensates."""
        found = []
        for place, shift in enumerate(self.shifts[:-1]):
            largest = float(np.abs(self._rounded(place)[0]).max()) * 2.0 ** self._exponents[place][0]
            found.append(shift + (int(np.floor(np.log2(WEIGHT_MAX / largest))) if largest else 0))
        return tuple(found)

    def _rounded(self, place: int) -> tuple[Floats, Floats]:
        """Weights and biases as a switch has them, as floats."""
        layer = self._layers[place]
        if not self.quantises:
            return layer.weights, layer.bias
        weights, before, _ = self._exponents[place]
        unit, bias_unit = np.float32(2.0**weights), np.float32(2.0 ** (weights + before))
        rounded: Floats = np.clip(np.rint(layer.weights * unit), -WEIGHT_MAX, WEIGHT_MAX) / unit
        return rounded, np.rint(layer.bias * bias_unit) / bias_unit

    def _activated(self, place: int, sums: Floats) -> Floats:
        """ReLU, and the rounding of a switch."""
        active: Floats = np.maximum(sums, 0)
        if not self.quantises:
            return active
        unit = np.float32(2.0 ** self._exponents[place][2])
        active = np.floor(active * unit + np.float32(0.5 if self.shifts[place] else 0))
        return np.asarray(np.minimum(active, WEIGHT_MAX) / unit)

    # Passes.

    def _forward(self, rows: NDArray[np.uint8], kept: list[Any] | None = None) -> list[Floats]:
        """The inputs, and the output of each layer, n × positions × channels; the last are the logits."""
        current = rows.astype(np.float32)[:, :, None] * self._scale
        outputs = [current]
        for place, described in enumerate(self._network.layers):
            weights, bias = self._rounded(place)
            columns = _columns(described, current)
            # One matrix: NumPy multiplies a stack of matrices one by one.
            sums = (columns.reshape(-1, columns.shape[-1]) @ weights.T).reshape(*columns.shape[:-1], -1)
            sums += bias
            winners = None
            if isinstance(described, Convolution):
                sums, winners = _pooled(sums, described.pool[0])
            is_last = place == len(self._layers) - 1
            current = sums if is_last else self._activated(place, sums)
            if kept is not None:
                kept.append((columns, winners, sums))
            outputs.append(current)
        return outputs

    def _step(self, rows: NDArray[np.uint8], labels: Floats) -> None:
        kept: list[Any] = []
        outputs = self._forward(rows, kept)
        logits = outputs[-1][:, 0]
        gradient = ((1 / (1 + np.exp(-logits)) - labels) / len(rows)).astype(np.float32)[:, None]
        self._steps += 1
        for place in reversed(range(len(self._layers))):
            described, (columns, winners, sums) = self._network.layers[place], kept[place]
            if place < len(self._layers) - 1:
                gradient = gradient.reshape(sums.shape) * (sums > 0)
                if self.quantises:  # what saturates does not move
                    gradient = gradient * (sums * np.float32(2.0 ** self._exponents[place][2]) <= WEIGHT_MAX)
            if isinstance(described, Convolution):
                gradient = _unpooled(gradient, winners, columns.shape[1], described.pool[0])
            flat, inputs = gradient.reshape(-1, gradient.shape[-1]), columns.reshape(-1, columns.shape[-1])
            weights, _ = self._rounded(place)
            found = (flat.T @ inputs, flat.sum(axis=0))
            if place:
                gradient = _spread_back(described, gradient @ weights, outputs[place].shape)
            self._adam(self._layers[place], found)

    def _adam(self, layer: _Weights, gradients: Sequence[Floats]) -> None:
        for at, (value, gradient) in enumerate(zip((layer.weights, layer.bias), gradients, strict=True)):
            first, second = layer.moments[2 * at], layer.moments[2 * at + 1]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient * gradient - second)
            mean, square = first / (1 - 0.9**self._steps), second / (1 - 0.999**self._steps)
            np.subtract(value, np.float32(self.rate) * mean / (np.sqrt(square) + np.float32(1e-8)), out=value)


def _columns(layer: Layer, inputs: Floats) -> Floats:
    """The inputs of every window, n × windows × (tap, channel); of a dense layer, n × inputs."""
    if isinstance(layer, Dense):
        return inputs.reshape(len(inputs), -1)
    above, below, taps = layer.padding[0], layer.padding[2], layer.weights.shape[1]
    padded = np.pad(inputs, ((0, 0), (above, below), (0, 0))) if above or below else inputs
    windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=1)  # n × windows × channels × taps
    return np.ascontiguousarray(windows.transpose(0, 1, 3, 2)).reshape(len(inputs), windows.shape[1], -1)


def _pooled(sums: Floats, pool: int) -> tuple[Floats, NDArray[np.uint8]]:
    """The largest of each pooling cell, and which of its windows that is, the first of equal ones."""
    windows = [sums[:, place : sums.shape[1] // pool * pool : pool] for place in range(pool)]
    largest = windows[0].copy()
    winners = np.zeros(largest.shape, np.uint8)
    for place, window in enumerate(windows[1:], 1):
        np.copyto(winners, np.uint8(place), where=window > largest)
        np.maximum(largest, window, out=largest)
    return largest, winners


def _unpooled(gradient: Floats, winners: NDArray[np.uint8], windows: int, pool: int) -> Floats:
    """The gradient of each window: that of its pooling cell where it was the largest, else 0."""
    count, cells, filters = gradient.shape
    found = np.zeros((count, windows, filters), np.float32)
    for place in range(pool):
        np.multiply(gradient, winners == place, out=found[:, place : cells * pool : pool])
    return found


def _spread_back(layer: Layer, gradient: Floats, shape: tuple[int, ...]) -> Floats:
    """The gradient of a layer's inputs from that of its columns."""
    if isinstance(layer, Dense):
        return gradient.reshape(shape)
    above, below, taps = layer.padding[0], layer.padding[2], layer.weights.shape[1]
    windows = gradient.shape[1]
    per_tap = gradient.reshape(len(gradient), windows, taps, -1)
    found = np.zeros((shape[0], shape[1] + above + below, shape[2]), np.float32)
    for tap in range(taps):
        found[:, tap : tap + windows] += per_tap[:, :, tap]
    return found[:, above : above + shape[1]]
