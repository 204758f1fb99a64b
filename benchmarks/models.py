"""Real models small enough for two cores: published architectures on smaller images than they were trained for.

They come with the `onnx` package's own test data; their weights are constants, which costs the same time.
"""

from pathlib import Path

import onnx

from sloop.profile.examine import free_batch

INSIDE = Path(onnx.__file__).parent / "backend/test/data/light"


def small(folder: Path, name: str, pixels: int) -> Path:
    """The model `name` (`squeezenet`, `densenet121`: those whose last pooling is global) for images of `pixels` ×
    `pixels`, its batch free, in `folder`."""
    target = folder / f"{name}-{pixels}.onnx"
    free_batch(INSIDE / f"light_{name}.onnx", target)
    model = onnx.load(str(target))
    for port in model.graph.input:
        dims = port.type.tensor_type.shape.dim
        if len(dims) == 4 and dims[0].dim_param:
            dims[2].dim_value = dims[3].dim_value = pixels
    onnx.save(model, str(target))
    return target
