"""What it says: strips in, one text per strip out.

The network gives for each of 40 columns how likely each sign is; a sign that lasts over several columns counts once and
blanks fall out: greedy decoding of CTC (Graves et al., "Connectionist Temporal Classification: Labelling Unsegmented
Sequence Data with Recurrent Neural Networks", ICML 2006, section 3.2).
"""

from typing import ClassVar, Final

import numpy as np
import pictures
import weights
from strips import HEIGHT, WIDTH, Array, normalised

TEXT_BYTES: Final = 64
"""Of a line's UTF-8; the rest of the row is zeros."""
BLANK: Final = 0


class Model:
    """Any number of strips to a pass."""

    inputs: ClassVar = {"upright": ("UINT8", (-1, HEIGHT, WIDTH, 3))}
    outputs: ClassVar = {"line": ("UINT8", (-1, TEXT_BYTES))}
    joins_rows = True
    software = weights.SOFTWARE

    def __init__(self, threads: int) -> None:
        self._session = weights.session(weights.RECOGNITION, threads)
        self._input = self._session.get_inputs()[0].name
        signs = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._signs = ["", *signs, " "]

    def run(self, upright: Array) -> Array:
        """Texts as rows of bytes, (n, 64), in the same order."""
        rows = np.zeros((len(upright), TEXT_BYTES), np.uint8)
        if not len(upright):
            return rows
        best = self._session.run(None, {self._input: normalised(upright)})[0].argmax(axis=2)
        for row, signs in zip(rows, best, strict=True):
            text = self.decode(signs).encode()[:TEXT_BYTES]
            row[: len(text)] = np.frombuffer(text, np.uint8)
        return rows

    def decode(self, signs: Array) -> str:
        """The text of a row of signs, each the likeliest of its column."""
        begins = np.append(True, signs[1:] != signs[:-1])
        return "".join(self._signs[sign] for sign in signs[begins & (signs != BLANK)])

    def example(self, rows: int) -> Array:
        """So many lines."""
        return pictures.strips(rows)[0]
