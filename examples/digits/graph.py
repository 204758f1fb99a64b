"""ONNX graphs, written node by node.

Promises files that are the same bytes for the same weights, whose first dimension is open, and whose weights are kept
in half precision and widened when the model is loaded. Knows nothing of digits.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

OPSET: Final = 17
IR_VERSION: Final = 8
"""Both old enough for the oldest ONNX Runtime we support, 1.17."""
ROWS: Final = "rows"

Weights = NDArray[np.floating[Any]]


class Chain:
    """A graph in which each node takes what the one before it gives."""

    def __init__(self, name: str, datatype: int, shape: tuple[int, ...]) -> None:
        self._inputs = [helper.make_tensor_value_info(name, datatype, [ROWS, *shape])]
        self._last = name
        self._nodes: list[Any] = []
        self._constants: list[Any] = []

    def add(self, kind: str, *more: str, **attributes: Any) -> "Chain":  # noqa: ANN401  # as ONNX has them
        """Another node on the last one's output; `more` are further inputs."""
        output = f"{kind.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, [self._last, *more], [output], **attributes))
        self._last = output
        return self

    def weights(self, values: Weights) -> str:
        """A constant in half precision; the name of its widened value."""
        name = f"weights_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(values.astype(np.float16), name))
        self._nodes.append(helper.make_node("Cast", [name], [f"{name}_wide"], to=TensorProto.FLOAT))
        return f"{name}_wide"

    def number(self, value: float) -> str:
        """A constant in full precision."""
        return self._constant(np.array(value, np.float32))

    def sizes(self, *values: int) -> str:
        """A constant shape."""
        return self._constant(np.array(values, np.int64))

    def model(self, name: str, datatype: int, shape: tuple[int, ...]) -> ModelProto:
        """The whole, its output called `name`, checked."""
        self._nodes.append(helper.make_node("Identity", [self._last], [name]))
        output = helper.make_tensor_value_info(name, datatype, [ROWS, *shape])
        graph = helper.make_graph(self._nodes, "digits", self._inputs, [output], self._constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        checker.check_model(model, full_check=True)
        return model

    def _constant(self, values: NDArray[Any]) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(values, name))
        return name


def write(model: ModelProto, path: Path) -> None:
    """The model as a file; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
