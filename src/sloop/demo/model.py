"""A real image model without a download: SqueezeNet from the `onnx` package's own test data, its batch freed."""

import importlib.util
from pathlib import Path
from typing import Final

from sloop.errors import MachineError
from sloop.profile.examine import free_batch

INSIDE: Final = Path("backend/test/data/light/light_squeezenet.onnx")
"""The architecture is the published one; its weights are constants, which costs the same time."""


def squeezenet(folder: Path) -> Path:
    """The model's path in `folder`, made on first use. MachineError where `onnx` is not installed or lacks it."""
    target = folder / "squeezenet.onnx"
    if target.is_file():
        return target
    found = importlib.util.find_spec("onnx")
    source = Path(found.origin).parent / INSIDE if found and found.origin else None
    if source is None or not source.is_file():
        raise MachineError(
            "the demonstration's model comes with the onnx package, which is not here",
            help="pip install 'sloop-serve[demo]'",
        )
    free_batch(source, target)
    return target
