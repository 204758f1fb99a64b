"""How often the models read a held-out picture right: every pair of variants, and each variant by itself.

Promises figures in per cent of whole pictures, all six digits right. A reader's accuracy is that on pictures as drawn.
A restorer's is the share of what the best reader reads right of pictures as drawn that it still reads right of restored
ones. By definition their product is what the best reader reads after any restorer; for the other readers it is an
assumption (that errors are independent: IPA's pipeline accuracy, PAS), and `Measured.apart` says how far it is off.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from examples.digits.pictures import Labels, Pictures, held_out

MODELS: Final = Path(__file__).parent / "models"
TABLE: Final = MODELS / "accuracy.json"
RESTORERS: Final = ("small", "medium", "large")
READERS: Final = ("small", "medium", "large")
PICTURES: Final = 2000
SEED: Final = 7
CHUNK: Final = 50
FORMAT: Final = "%.1f"


class Measured(msgspec.Struct, frozen=True):
    """Accuracies in per cent, by variant and by pair of variants (restorer, then reader)."""

    pictures: int
    restore: dict[str, float]
    read: dict[str, float]
    both: dict[str, dict[str, float]]

    def product(self, restorer: str, reader: str) -> float:
        """What the product of the stages' accuracies says of a pair."""
        return self.restore[restorer] * self.read[reader] / 100

    def apart(self) -> float:
        """The most that the product is off, in points."""
        return max(abs(self.product(a, b) - self.both[a][b]) for a in self.restore for b in self.read)


def path_of(stage: str, variant: str) -> Path:
    """Where a model is kept."""
    return MODELS / f"{stage}-{variant}.onnx"


def measure(pictures: Pictures | None = None) -> Measured:
    """Run every pair of the models in the folder on held-out pictures."""
    shown = pictures or held_out(PICTURES, SEED)
    best = READERS[-1]
    restored = {name: run(path_of("restore", name), shown.damaged) for name in RESTORERS}
    read = {name: right(run(path_of("read", name), shown.clean), shown.labels) for name in READERS}
    both = {a: {b: right(run(path_of("read", b), restored[a]), shown.labels) for b in READERS} for a in RESTORERS}
    restore = {name: 100 * pair[best] / read[best] for name, pair in both.items()}
    return Measured(len(shown.labels), _rounded(restore), _rounded(read), {a: _rounded(both[a]) for a in both})


def run(model: Path, rows: NDArray[Any]) -> NDArray[Any]:
    """What a model gives for these rows."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    found = [session.run(None, {name: rows[at : at + CHUNK]})[0] for at in range(0, len(rows), CHUNK)]
    return np.concatenate(found)


def right(answers: NDArray[Any], labels: Labels) -> float:
    """Per cent of pictures of which every digit is right."""
    return float(100 * np.mean(np.all(answers == labels, axis=1)))


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(FORMAT % figure) for name, figure in figures.items()}
