"""A strip: one line of text cut out of a picture, 48 high and 320 wide, what the three networks have in common.

A shorter line is filled up on its right with mid-grey, which is 0 to a network, so that strips of all requests have one
shape and share a batch.
"""

from typing import Any, Final

import numpy as np
from PIL import Image

HEIGHT: Final = 48
WIDTH: Final = 320
GREY: Final = 128

Array = np.ndarray[Any, np.dtype[Any]]
Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels of the picture."""


def cut(picture: Array, box: Box) -> tuple[Array, int]:
    """What lies inside the box of a picture (height, width, 3) as a strip (48, 320, 3), and how wide it is there.

    A line too long for a strip is squeezed into it.
    """
    left, top, right, bottom = box
    part = Image.fromarray(picture[top:bottom, left:right])
    width = min(WIDTH, max(1, round(part.width * HEIGHT / part.height)))
    strip = np.full((HEIGHT, WIDTH, 3), GREY, np.uint8)
    strip[:, :width] = part.resize((width, HEIGHT), Image.Resampling.BILINEAR)
    return strip, width


def stacked(found: list[tuple[Array, int]]) -> tuple[Array, Array]:
    """Strips (n, 48, 320, 3) and their widths (n,)."""
    strips = np.empty((len(found), HEIGHT, WIDTH, 3), np.uint8)
    for place, (strip, _) in enumerate(found):
        strips[place] = strip
    return strips, np.array([width for _, width in found], np.int32)


def turned(strip: Array, width: int) -> Array:
    """The strip with its text turned by 180°, still at its left."""
    result = strip.copy()
    result[:, :width] = strip[::-1, :width][:, ::-1]
    return result


def normalised(pixels: Array) -> Array:
    """What a network takes, (n, 3, height, width) within -1 to 1, of pixels (n, height, width, 3)."""
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), np.float32) / 127.5 - 1
