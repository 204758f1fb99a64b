"""Small ONNX models, made on the spot."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


def write_mlp(
    path: Path, rows: int | str, *, names: tuple[str, str] = ("x", "y"), width: int = 4, inner: int = 32
) -> Path:
    """out[rows, 3] = relu(in[rows, width] · A) · B, with weights drawn from a fixed seed."""
    chance, (given, answer) = np.random.default_rng(7), names
    weights = [
        numpy_helper.from_array(chance.normal(size=shape).astype(np.float32), name)
        for name, shape in (("a", (width, inner)), ("b", (inner, 3)))
    ]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [given, "a"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "b"], [answer]),
        ],
        "mlp",
        [helper.make_tensor_value_info(given, TensorProto.FLOAT, [rows, width])],
        [helper.make_tensor_value_info(answer, TensorProto.FLOAT, [rows, 3])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an open first dimension."""
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp.onnx", "rows")


@pytest.fixture(scope="session")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes what the first one gives."""
    return write_mlp(tmp_path_factory.mktemp("models") / "tail.onnx", "rows", names=("y", "z"), width=3)


@pytest.fixture(scope="session")
def mlp_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model for one row only."""
    return write_mlp(tmp_path_factory.mktemp("models") / "mlp1.onnx", 1)
