"""Where the text is: a picture in, one strip per line out, from top to bottom.

The network tells for every pixel how likely it lies in the kernel of a line; kernels are thresholded, scored by their
mean and grown back to whole lines by area · ratio / perimeter: Liao et al., "Real-time Scene Text Detection with
Differentiable Binarization", AAAI 2020. Lines may stand on their heads, not be tilted.
"""

from typing import ClassVar, Final

import numpy as np
import pictures
import weights
from PIL import Image
from scipy import ndimage
from strips import HEIGHT, WIDTH, Array, Box, cut, normalised, stacked

SIDE: Final = 192
"""Pixels of the picture's longer side that the network sees."""
STEP: Final = 32
"""Its sides are multiples of this."""
PIXEL_MIN, LINE_MIN = 0.3, 0.5
RATIO: Final = 1.6
LOW_MIN: Final = 3
"""Kernels lower than so many pixels are specks."""


class Model:
    """Pictures of any size, one to a pass."""

    inputs: ClassVar = {"image": ("UINT8", (1, -1, -1, 3))}
    outputs: ClassVar = {
        "strips": ("UINT8", (-1, HEIGHT, WIDTH, 3)),
        "widths": ("INT32", (-1,)),
    }
    software = weights.SOFTWARE

    def __init__(self, threads: int) -> None:
        self._session = weights.session(weights.DETECTION, threads)
        self._input = self._session.get_inputs()[0].name

    def run(self, image: Array) -> tuple[Array, Array]:
        """Strips, (n, 48, 320, 3), and how much of each is filled; none for a picture without text."""
        picture = image[0]
        seen = _seen(picture)
        likely = self._session.run(None, {self._input: normalised(seen[None])})[0][0, 0]
        return stacked([cut(picture, box) for box in boxes(likely, picture.shape[1], picture.shape[0])])

    def example(self, rows: int) -> Array:
        """A label of four lines."""
        return pictures.draw(4, lines=4).pixels[None]


def _seen(picture: Array) -> Array:
    """The picture in the size that the network sees."""
    height, width = picture.shape[:2]
    scale = SIDE / max(height, width)
    size = [max(STEP, round(side * scale / STEP) * STEP) for side in (width, height)]
    return np.asarray(Image.fromarray(picture).resize((size[0], size[1]), Image.Resampling.BILINEAR))


def boxes(likely: Array, width: int, height: int) -> list[Box]:
    """The lines, in pixels of a picture of this size, from top to bottom."""
    across, down = width / likely.shape[1], height / likely.shape[0]
    labels, _ = ndimage.label(likely > PIXEL_MIN)
    found = []
    for place in ndimage.find_objects(labels):
        rows, columns = place
        wide, high = columns.stop - columns.start, rows.stop - rows.start
        if min(wide, high) < LOW_MIN or likely[place].mean() < LINE_MIN:
            continue
        grow = wide * high * RATIO / (2 * (wide + high))
        left, right = (columns.start - grow) * across, (columns.stop + grow) * across
        top, bottom = (rows.start - grow) * down, (rows.stop + grow) * down
        found.append((max(0, round(left)), max(0, round(top)), min(width, round(right)), min(height, round(bottom))))
    return sorted(found, key=lambda box: (box[1] + box[3], box[0]))
