"""Pictures of six digits, damaged, with the digits they show.

Promises that one seed draws the same pictures, and that the digits of the two halves are never the same handwriting:
what a model learns from and what it is measured on stay apart. Knows nothing of models. Source of the handwriting: the
1,797 digits of 8 × 8 pixels that ship in scikit-learn (`load_digits`; E. Alpaydin and C. Kaynak, 1998).
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

CELL: Final = 28
"""Pixels of a digit's square, either way."""
PLACES: Final = 6
"""Digits in a picture, side by side."""
WIDTH: Final = CELL * PLACES
LEARNED: Final = 1257
"""Of the 1,797 handwritten digits; the other 540 are held out."""

NOISE: Final = 0.22
"""Standard deviation of a pixel's noise, where ink on paper is 1."""
PAPER: Final = 64
"""A picture's level where there is no ink, of 255."""
INK: Final = 96
"""How many levels full ink adds."""

Pixels = NDArray[np.float32]
Levels = NDArray[np.uint8]
Labels = NDArray[np.int64]


class Handwriting(NamedTuple):
    """Digits of 8 × 8 pixels from 0 (paper) to 1 (ink), and which they are."""

    images: Pixels
    labels: Labels


class Pictures(NamedTuple):
    """`clean` as drawn, 0 to 1, and `damaged` as a camera gives them: both [n, 28, 168]; `labels` is [n, 6]."""

    clean: Pixels
    damaged: Levels
    labels: Labels


def halves(seed: int = 0) -> tuple[Handwriting, Handwriting]:
    """What is learned from, and what is held out."""
    digits: Any = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = (digits.images / 16).astype(np.float32)[order], digits.target.astype(np.int64)[order]
    return Handwriting(images[:LEARNED], labels[:LEARNED]), Handwriting(images[LEARNED:], labels[LEARNED:])


def learned(count: int, seed: int) -> Pictures:
    """Pictures to learn from."""
    return draw(halves()[0], count, seed)


def held_out(count: int, seed: int) -> Pictures:
    """Pictures of handwriting that no model has learned from."""
    return draw(halves()[1], count, seed)


def draw(hand: Handwriting, count: int, seed: int) -> Pictures:
    """So many pictures of digits drawn at random from `hand`."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(hand.labels), count * PLACES)
    clean = joined(_posed(hand.images[chosen], rng))
    return Pictures(clean, _damaged(clean, rng), hand.labels[chosen].reshape(count, PLACES))


def joined(cells: Pixels) -> Pixels:
    """Squares [n × 6, 28, 28] as pictures [n, 28, 168]."""
    return cells.reshape(-1, PLACES, CELL, CELL).transpose(0, 2, 1, 3).reshape(-1, CELL, WIDTH)


def cells_of(pictures: Pixels) -> Pixels:
    """Pictures [n, 28, 168] as squares [n × 6, 28, 28]."""
    return pictures.reshape(-1, CELL, PLACES, CELL).transpose(0, 2, 1, 3).reshape(-1, CELL, CELL)


def _posed(images: Pixels, rng: np.random.Generator) -> Pixels:
    """Each digit enlarged about three times, a little turned and out of the middle."""
    count = len(images)
    angle = np.deg2rad(rng.uniform(-6, 6, (count, 1, 1)))
    size, away = rng.uniform(2.7, 3.0, (count, 1, 1)), rng.uniform(-1, 1, (2, count, 1, 1))
    rows, columns = np.mgrid[:CELL, :CELL] - (CELL - 1) / 2
    y, x = rows - away[0], columns - away[1]
    down = (np.cos(angle) * y + np.sin(angle) * x) / size + 3.5
    across = (np.cos(angle) * x - np.sin(angle) * y) / size + 3.5
    which = np.broadcast_to(np.arange(count, dtype=float)[:, None, None], down.shape)
    return np.asarray(ndimage.map_coordinates(images, [which, down, across], order=1, mode="constant"), np.float32)


def _damaged(clean: Pixels, rng: np.random.Generator) -> Levels:
    """Faded, under uneven light, and noisy."""
    count = len(clean)
    ink, light = rng.uniform(0.7, 1.0, (count, 1, 1)), rng.uniform(0, 0.2, (count, 1, 1))
    seen = clean * ink + light + NOISE * rng.standard_normal(clean.shape)
    return np.clip(np.rint(PAPER + INK * seen), 0, 255).astype(np.uint8)
