"""The first stage: a damaged picture in, the picture as it was drawn out.

Promises models that differ in how far around a pixel they look and how much they compute for it. Each tells a pixel
from the square of pixels around it: `small` is a linear filter, the others are networks with two layers between. As
convolutions they run over the whole picture. Method: plain networks on patches, H. C. Burger, C. J. Schuler and
S. Harmeling, "Image denoising: Can plain neural networks compete with BM3D?", CVPR 2012.
"""

import warnings
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto
from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
from sklearn.neural_network import MLPRegressor  # type: ignore[import-untyped]

from examples.digits.graph import Chain
from examples.digits.pictures import CELL, PAPER, WIDTH, Levels, Pictures, Pixels

LEVELS: Final = 255.0
ZERO: Final = PAPER / LEVELS
"""Taken off every pixel, so that the zeros around a picture are paper."""
BATCH: Final = 1000


class Size(NamedTuple):
    """How a restorer looks and learns."""

    window: int
    """Pixels of the square around a pixel, either way; odd."""
    layers: tuple[int, ...] = ()
    """Units between the square and the pixel; none is a linear filter."""
    samples: int = 100_000
    """Pixels to learn from."""
    rounds: int = 1
    """How often each is learned from."""


SIZES: Final = {
    "small": Size(5),
    "medium": Size(11, (32, 16), samples=200_000, rounds=8),
    "large": Size(21, (320, 48), samples=300_000, rounds=8),
}

Layers = list[tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Weights [inputs, outputs] and biases of each."""


def train(size: Size, pictures: Pictures, seed: int) -> ModelProto:
    """Learn from pixels chosen at random; the model as ONNX."""
    rng = np.random.default_rng(seed)
    seen, wanted = _samples(size, pictures, rng)
    return _graph(size.window, _network(size, seen, wanted, seed) if size.layers else _filter(seen, wanted))


def _samples(size: Size, pictures: Pictures, rng: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Squares around pixels, flattened, and those pixels as drawn."""
    margin = size.window // 2
    around = np.pad(_levelled(pictures.damaged), ((0, 0), (margin, margin), (margin, margin)))
    squares = np.lib.stride_tricks.sliding_window_view(around, (size.window, size.window), axis=(1, 2))
    place = tuple(rng.integers(0, most, size.samples) for most in pictures.clean.shape)
    return squares[place].reshape(size.samples, -1), pictures.clean[place]


def _levelled(damaged: Levels) -> Pixels:
    return damaged.astype(np.float32) / np.float32(LEVELS) - np.float32(ZERO)


def _filter(seen: Pixels, wanted: Pixels) -> Layers:
    """The best linear filter (Wiener's), by least squares."""
    with_one = np.column_stack([seen, np.ones(len(seen))]).astype(np.float64)
    best = np.linalg.lstsq(with_one, wanted, rcond=None)[0].astype(np.float32)
    return [(best[:-1, None], best[-1:])]


def _network(size: Size, seen: Pixels, wanted: Pixels, seed: int) -> Layers:
    network = MLPRegressor(
        hidden_layer_sizes=size.layers,
        batch_size=BATCH,
        max_iter=size.rounds,
        n_iter_no_change=size.rounds,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the rounds are the budget
        network.fit(seen, wanted)
    return list(zip(network.coefs_, network.intercepts_, strict=True))


def _graph(window: int, layers: Layers) -> ModelProto:
    chain = Chain("picture", TensorProto.UINT8, (CELL, WIDTH)).add("Cast", to=TensorProto.FLOAT)
    chain.add("Div", chain.number(LEVELS)).add("Sub", chain.number(ZERO)).add("Unsqueeze", chain.sizes(1))
    for number, (weights, biases) in enumerate(layers):
        across = 1 if number else window
        kernel = weights.T.reshape(weights.shape[1], -1, across, across)
        if number:
            chain.add("Relu")
        chain.add("Conv", chain.weights(kernel), chain.weights(biases), pads=[across // 2] * 4)
    chain.add("Clip", chain.number(0.0), chain.number(1.0)).add("Squeeze", chain.sizes(1))
    return chain.model("restored", TensorProto.FLOAT, (CELL, WIDTH))
