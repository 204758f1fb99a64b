"""Models that are small enough for two cores: published architectures on small images, and plain stacks of layers.

The published ones are test data of the `onnx` package. Their weights are constants, which does not change durations.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sloop.profile.examine import free_batch

INSIDE = Path(onnx.__file__).parent / "backend/test/data/light"


def small(folder: Path, name: str, pixels: int) -> Path:
    """Write the model `name` to `folder`, for images of `pixels` × `pixels` and any batch size.

    Works for models whose last pooling is global: `squeezenet`, `densenet121`.
    """
    target = folder / f"{name}-{pixels}.onnx"
    free_batch(INSIDE / f"light_{name}.onnx", target)
    model = onnx.load(str(target))
    for port in model.graph.input:
        dims = port.type.tensor_type.shape.dim
        if len(dims) == 4 and dims[0].dim_param:
            dims[2].dim_value = dims[3].dim_value = pixels
    onnx.save(model, str(target))
    return target


def convolutions(folder: Path, *, channels: int, layers: int, pixels: int) -> Path:
    """A plain stack of 3 × 3 convolutions over square images, then a mean and ten scores, for any batch size."""
    random = np.random.default_rng(channels * layers)
    nodes, weights, depth, last = [], [], 3, "x"
    for layer in range(layers):
        weight = random.standard_normal((channels, depth, 3, 3)).astype(np.float32) * (2 / (9 * depth)) ** 0.5
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        depth, last = channels, f"r{layer}"
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["pool"]))
    nodes.append(helper.make_node("Flatten", ["pool"], ["flat"]))
    weights.append(numpy_helper.from_array(random.standard_normal((channels, 10)).astype(np.float32), "scores"))
    nodes.append(helper.make_node("MatMul", ["flat", "scores"], ["y"]))
    return _saved(folder / f"convolutions-{channels}-{layers}-{pixels}.onnx", nodes, weights, [3, pixels, pixels])


def perceptron(folder: Path, *, width: int, layers: int) -> Path:
    """Dense layers of one width, then ten scores, for any batch size."""
    random = np.random.default_rng(width * layers)
    sizes = [width] * layers + [10]
    nodes, weights, last = [], [], "x"
    for layer, size in enumerate(sizes):
        weight = random.standard_normal((width, size)).astype(np.float32) * (2 / width) ** 0.5
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu" if layer < layers else "Identity", [f"m{layer}"], [f"r{layer}"]))
        last = f"r{layer}"
    nodes[-1].output[0] = "y"
    return _saved(folder / f"perceptron-{width}-{layers}.onnx", nodes, weights, [width])


def _saved(path: Path, nodes: list[Any], weights: list[Any], row: list[int]) -> Path:
    ports = [helper.make_tensor_value_info(name, 1, ["n", *shape]) for name, shape in (("x", row), ("y", [10]))]
    graph = helper.make_graph(nodes, path.stem, ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path
