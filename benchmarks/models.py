"""Models that are small enough for two cores: published architectures on small images, and plain stacks of layers.

The published ones are test data of the `onnx` package. Their weights are constants, which does not change durations.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sloop.profile.examine import free_batch

INSIDE = Path(onnx.__file__).parent / "backend/test/data/light"
PADDING_ROWS = 1024
PADDING = re.compile(r"padding\.\d+\.zero")
"""What is added to a padded result."""
PADDED = {"Concat", "Conv", "Relu"}
"""Operators whose results may be padded."""


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


def padded(model: Path, target: Path, size_bytes: int, *, places: int = 1) -> Path:
    """Write a copy of a model to `target`, with so many bytes of random weights more, all of which are loaded; a batch
    reads one row of them at each of so many `places`, spread over the layers, and outputs stay as they are. For batches
    of at most `PADDING_ROWS`."""
    loaded = onnx.load(str(model))
    graph, random = loaded.graph, np.random.default_rng(size_bytes)
    last = next(place for place, node in enumerate(graph.node) if graph.output[0].name in node.output)
    inner = [place for place, node in enumerate(graph.node) if node.op_type in PADDED and place < last]
    wanted = [*(inner[len(inner) * number // places] for number in range(1, places)), last]
    constants: dict[str, Any] = {"padding.first": np.int64(0), "padding.none": np.float32(0)}
    nodes = []
    for place, node in enumerate(graph.node):
        nodes.append(node)
        if place in wanted:
            name, own = node.output[0], f"padding.{wanted.index(place)}"
            node.output[0] = f"{own}.given"
            constants[own] = random.random((PADDING_ROWS, size_bytes // 4 // places // PADDING_ROWS), np.float32)
            nodes += [
                helper.make_node("Shape", [f"{own}.given"], [f"{own}.shape"]),
                helper.make_node("Gather", [f"{own}.shape", "padding.first"], [f"{own}.place"]),
                helper.make_node("Gather", [own, f"{own}.place"], [f"{own}.row"]),
                helper.make_node("ReduceMax", [f"{own}.row"], [f"{own}.most"], keepdims=0),
                helper.make_node("Mul", [f"{own}.most", "padding.none"], [f"{own}.zero"]),
                helper.make_node("Add", [f"{own}.given", f"{own}.zero"], [name]),
            ]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    loaded.ir_version = max(loaded.ir_version, 4)  # before, initializers had to be inputs too
    onnx.save(loaded, str(target))
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


class _Layers:
    """Collects the layers of a network over images, whose weights are random."""

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def add(self, kind: str, reads: list[str], *shape: int, **settings: Any) -> str:  # noqa: ANN401  # of the operator
        """A layer, and its weights and bias if it has a shape; returns the name of its output and of itself."""
        name, given = f"{kind.lower()}{len(self.nodes)}", list(reads)
        if shape:
            outs = shape[1] if kind == "Gemm" else shape[0]
            scale = (2 / (int(np.prod(shape)) / outs)) ** 0.5
            for suffix, size in (("w", shape), ("b", (outs,))):
                values = self._chance.standard_normal(size, np.float32) * np.float32(scale)
                self.weights.append(numpy_helper.from_array(values, f"{name}.{suffix}"))
                given.append(f"{name}.{suffix}")
        self.nodes.append(helper.make_node(kind, given, [name], name=name, **settings))
        return name

    def convolution(self, last: str, channels: tuple[int, int], size: int = 3, step: int = 1) -> str:
        """A convolution that keeps the size of the image but for the step; batch normalisation is folded into it."""
        pads, strides = [size // 2] * 4, [step, step]
        return self.add("Conv", [last], channels[1], channels[0], size, size, pads=pads, strides=strides)

    def saved(self, path: Path, last: str) -> Path:
        """Write the network for images of 224 × 224, with 1000 scores and any batch size."""
        self.nodes[-1].output[0] = "y"
        assert last == self.nodes[-1].name
        ports = [
            helper.make_tensor_value_info(name, 1, ["n", *shape])
            for name, shape in (("x", [3, 224, 224]), ("y", [1000]))
        ]
        graph = helper.make_graph(self.nodes, path.stem, ports[:1], ports[1:], self.weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
        return path


def vgg11(folder: Path) -> Path:
    """VGG11 (Simonyan and Zisserman, ICLR 2015, configuration A) with random weights: 132.9 M of them, 507 MiB."""
    net, last, depth = _Layers(11), "x", 3
    for channels in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if channels:
            last = net.add("Relu", [net.convolution(last, (depth, channels))])
            depth = channels
        else:
            last = net.add("MaxPool", [last], kernel_shape=[2, 2], strides=[2, 2])
    last = net.add("Flatten", [last])
    last = net.add("Relu", [net.add("Gemm", [last], 512 * 7 * 7, 4096)])
    last = net.add("Relu", [net.add("Gemm", [last], 4096, 4096)])
    return net.saved(folder / "vgg11.onnx", net.add("Gemm", [last], 4096, 1000))


def resnet18(folder: Path) -> Path:
    """ResNet18 (He et al., CVPR 2016, Table 1) with random weights and folded normalisation: 11.7 M, 44.6 MiB."""
    net = _Layers(18)
    last = net.add("Relu", [net.convolution("x", (3, 64), 7, 2)])
    last, depth = net.add("MaxPool", [last], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]), 64
    for channels in (64, 64, 128, 128, 256, 256, 512, 512):
        step = 1 if channels == depth else 2
        inner = net.add("Relu", [net.convolution(last, (depth, channels), 3, step)])
        inner = net.convolution(inner, (channels, channels))
        passed = last if step == 1 else net.convolution(last, (depth, channels), 1, 2)
        last, depth = net.add("Relu", [net.add("Add", [inner, passed])]), channels
    last = net.add("Flatten", [net.add("GlobalAveragePool", [last])])
    return net.saved(folder / "resnet18.onnx", net.add("Gemm", [last], 512, 1000))


def _saved(path: Path, nodes: list[Any], weights: list[Any], row: list[int]) -> Path:
    ports = [helper.make_tensor_value_info(name, 1, ["n", *shape]) for name, shape in (("x", row), ("y", [10]))]
    graph = helper.make_graph(nodes, path.stem, ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path
