"""Which way up: strips in, the same strips out with those turned round that stood on their heads."""

from typing import ClassVar, Final

import numpy as np
import pictures
import weights
from PIL import Image
from strips import HEIGHT, WIDTH, Array, normalised, turned

SEEN: Final = 192
"""Columns that the network sees; longer lines are squeezed into them."""
SURE: Final = 0.9
"""A strip is turned where the network is surer than this that it stands on its head."""


class Model:
    """Any number of strips to a pass."""

    inputs: ClassVar = {"strips": ("UINT8", (-1, HEIGHT, WIDTH, 3)), "widths": ("INT32", (-1,))}
    outputs: ClassVar = {"upright": ("UINT8", (-1, HEIGHT, WIDTH, 3))}
    joins_rows = True
    software = weights.SOFTWARE

    def __init__(self, threads: int) -> None:
        self._session = weights.session(weights.ORIENTATION, threads)
        self._input = self._session.get_inputs()[0].name

    def run(self, strips: Array, widths: Array) -> Array:
        """The strips upright, in the same order."""
        if not len(strips):
            return strips
        seen = np.stack([_seen(strip, width) for strip, width in zip(strips, widths, strict=True)])
        sure = self._session.run(None, {self._input: normalised(seen)})[0][:, 1]
        lines = zip(strips, widths, sure > SURE, strict=True)
        return np.stack([turned(strip, width) if is_turned else strip for strip, width, is_turned in lines])

    def example(self, rows: int) -> tuple[Array, Array]:
        """So many lines, some of them on their heads."""
        return pictures.strips(rows)


def _seen(strip: Array, width: int) -> Array:
    if width <= SEEN:
        return strip[:, :SEEN]
    return np.asarray(Image.fromarray(strip[:, :width]).resize((SEEN, HEIGHT), Image.Resampling.BILINEAR))
