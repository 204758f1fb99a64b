"""The second stage: a restored picture in, its six digits out.

Promises models that differ in how many features they see. A digit's square is compared with so many small patterns at
every place (a convolution), the likeness is averaged over nine overlapping parts of the square, and a linear map tells
the digit. Patterns are patches of the pictures learned from, whitened; only the linear map is learned. They learn from
pictures as drawn, with a little blur and noise: the better the first stage restores, the more it is what they know.
Method: A. Coates, H. Lee and A. Y. Ng, "An analysis of single-layer networks in unsupervised feature learning",
AISTATS 2011.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto
from scipy import ndimage

from examples.digits.graph import Chain
from examples.digits.pictures import CELL, PLACES, WIDTH, Labels, Pictures, Pixels, cells_of

WINDOW: Final = 7
PARTS, PART, STEP = 3, 8, 7
"""Parts of a square either way, their size and distance, in the places where a pattern fits (22 either way)."""
THRESHOLD: Final = 0.5
"""A likeness below this counts as none."""
PATCHES: Final = 20_000
LENGTH_MIN: Final = 2.0
"""Of a whitened patch; what is shorter is paper."""
WHITEN: Final = 0.01
RIDGE: Final = 3e-4
DIGITS: Final = 10
CHUNK: Final = 50


class Size(NamedTuple):
    """How a reader looks and learns."""

    patterns: int
    squares: int
    """Digits to learn from."""


SIZES: Final = {"small": Size(20, 10_000), "medium": Size(64, 10_000), "large": Size(512, 8_000)}


class Patterns(NamedTuple):
    """What squares are compared with: `weights` [49, n] and `biases` [n] of likenesses."""

    weights: NDArray[np.float32]
    biases: NDArray[np.float32]


def train(size: Size, pictures: Pictures, seed: int) -> ModelProto:
    """Learn to tell digits; the model as ONNX."""
    rng = np.random.default_rng(seed)
    squares = cells_of(_blurred(pictures.clean, rng))[: size.squares]
    patterns = _patterns(squares, size.patterns, rng)
    weights, biases = _ridge(_features(squares, patterns), pictures.labels.ravel()[: size.squares])
    return _graph(patterns, weights, biases)


def _blurred(clean: Pixels, rng: np.random.Generator) -> Pixels:
    """As a restorer might leave them: noise of up to a fifth, and everything blurred by up to a pixel."""
    widths, noise = rng.uniform(0.1, 1.1, len(clean)), rng.uniform(0, 0.2, (len(clean), 1, 1))
    noisy = clean + noise * rng.standard_normal(clean.shape)
    return np.stack(
        [ndimage.gaussian_filter(one, width) for one, width in zip(noisy, widths, strict=True)], dtype=np.float32
    )


def _patterns(squares: Pixels, count: int, rng: np.random.Generator) -> Patterns:
    """Patches chosen at random, whitened and of length one."""
    places = CELL - WINDOW + 1
    views = np.lib.stride_tricks.sliding_window_view(squares, (WINDOW, WINDOW), axis=(1, 2))
    chosen = (rng.integers(0, len(squares), PATCHES), *rng.integers(0, places, (2, PATCHES)))
    patches = views[chosen].reshape(PATCHES, -1).astype(np.float64)
    middle = patches.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(patches.T))
    whitener = (vectors / np.sqrt(values + WHITEN)) @ vectors.T
    whitened = (patches - middle) @ whitener
    lengths = np.linalg.norm(whitened, axis=1)
    inked = lengths > LENGTH_MIN
    kept = (whitened[inked] / lengths[inked, None])[:count]
    weights = whitener @ kept.T
    return Patterns(weights.astype(np.float32), (-middle @ weights - THRESHOLD).astype(np.float32))


def _features(squares: Pixels, patterns: Patterns) -> NDArray[np.float32]:
    """The likeness to each pattern in each part, [n, patterns × 9], in the order in which ONNX flattens them."""
    found: list[NDArray[np.float32]] = []
    for first in range(0, len(squares), CHUNK):
        some = squares[first : first + CHUNK]
        views = np.lib.stride_tricks.sliding_window_view(some, (WINDOW, WINDOW), axis=(1, 2))
        likeness = np.maximum(views.reshape(*views.shape[:3], -1) @ patterns.weights + patterns.biases, 0)
        starts = range(0, PARTS * STEP, STEP)
        parts = [likeness[:, y : y + PART, x : x + PART].mean(axis=(1, 2)) for y in starts for x in starts]
        found.append(np.stack(parts, axis=2).reshape(len(some), -1))
    return np.concatenate(found)


def _ridge(features: NDArray[np.float32], labels: Labels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The linear map to ±1 for each digit, by regularised least squares."""
    wanted = 2 * np.eye(DIGITS, dtype=np.float32)[labels] - 1
    middle, level = features.mean(axis=0), wanted.mean(axis=0)
    centred = features - middle
    gram = centred.T @ centred
    gram[np.diag_indices_from(gram)] += RIDGE * float((centred**2).mean()) * len(centred)
    weights = np.linalg.solve(gram, centred.T @ (wanted - level))
    return weights, level - middle @ weights


def _graph(patterns: Patterns, weights: NDArray[np.float32], biases: NDArray[np.float32]) -> ModelProto:
    chain = Chain("restored", TensorProto.FLOAT, (CELL, WIDTH))
    chain.add("Reshape", chain.sizes(0, CELL, PLACES, CELL)).add("Transpose", perm=[0, 2, 1, 3])
    chain.add("Reshape", chain.sizes(-1, 1, CELL, CELL))
    kernel = patterns.weights.T.reshape(-1, 1, WINDOW, WINDOW)
    chain.add("Conv", chain.weights(kernel), chain.weights(patterns.biases)).add("Relu")
    chain.add("AveragePool", kernel_shape=[PART, PART], strides=[STEP, STEP]).add("Flatten")
    chain.add("Gemm", chain.weights(weights), chain.weights(biases)).add("ArgMax", axis=1, keepdims=0)
    return chain.add("Reshape", chain.sizes(-1, PLACES)).model("digits", TensorProto.INT64, (PLACES,))
