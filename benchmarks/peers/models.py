"""The models that all servers serve: a small MLP, a pooling of an image, and two published architectures."""

from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.models import small
from benchmarks.peers.peer import Model
from sloop.profile.model import read_signature

OPSET: Final = 17
IR_VERSION: Final = 8
WIDTHS: Final = (16, 64, 8)
IMAGE: Final = (3, 224, 224)


def mlp(folder: Path) -> Model:
    """16 → 64 → 8: a forward pass takes microseconds, so that the server dominates."""
    chance = np.random.default_rng(0)
    wide, narrow = (chance.standard_normal(pair).astype(np.float32) for pair in (WIDTHS[:2], WIDTHS[1:]))
    nodes = [
        helper.make_node("MatMul", ["x", "wide"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("MatMul", ["positive", "narrow"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTHS[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTHS[-1]])],
        [numpy_helper.from_array(wide, "wide"), numpy_helper.from_array(narrow, "narrow")],
    )
    return _saved(graph, folder / "mlp.onnx")


def pool(folder: Path) -> Model:
    """The mean of each colour of a 224 × 224 image: 600 kB of input, twelve bytes of output."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["image"], ["mean"], axes=[2, 3], keepdims=0)],
        "pool",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", *IMAGE])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", IMAGE[0]])],
    )
    return _saved(graph, folder / "pool.onnx")


def image_model(folder: Path, name: str, pixels: int) -> Model:
    """SqueezeNet or ResNet-50 for images of `pixels` × `pixels`; a last pooling of fixed size is replaced by a global
    one."""
    path = small(folder, name, pixels)
    model = onnx.load(str(path))
    last = next((node for node in reversed(model.graph.node) if "Pool" in node.op_type), None)
    if last is not None and last.op_type == "AveragePool":
        last.op_type = "GlobalAveragePool"
        del last.attribute[:]
        onnx.save(model, str(path))
    return described(path)


def _saved(graph: onnx.GraphProto, path: Path) -> Model:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return described(path)


def described(path: Path) -> Model:
    signature = read_signature(path)
    (given,), (answer,) = signature.inputs, signature.outputs
    return Model(path, given.name, answer.name, given.shape[1:], answer.shape[1:])
