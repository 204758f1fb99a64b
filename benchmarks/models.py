"""Real models small enough for two cores: SqueezeNet on smaller images than it was trained for."""

from pathlib import Path
from typing import Final

import onnx

from sloop.demo.model import squeezenet

PIXELS: Final = 128
"""A fifth of the work of 224 × 224; its pooling is global, so that any size above 32 will do."""


def small_squeezenet(folder: Path, pixels: int = PIXELS) -> Path:
    """SqueezeNet for images of `pixels` × `pixels`, its batch free, in `folder`."""
    target = folder / f"squeezenet-{pixels}.onnx"
    model = onnx.load(str(squeezenet(folder)))
    for port in model.graph.input:
        dims = port.type.tensor_type.shape.dim
        if len(dims) == 4 and dims[0].dim_param:
            dims[2].dim_value = dims[3].dim_value = pixels
    onnx.save(model, str(target))
    return target
