"""Small ONNX models, written as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper


def onnx_model(text: str, weights: Mapping[str, np.ndarray[Any, Any]] | None = None) -> onnx.ModelProto:
    """The model of a graph as `onnx.parser` reads it, such as `(float[n, 4] x) => (float[n, 4] y) { y = Neg(x) }`, with
    its weights by name."""
    made = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in (weights or {}).items())
    return made


def save_model(path: Path, text: str, weights: Mapping[str, np.ndarray[Any, Any]] | None = None) -> Path:
    onnx.save(onnx_model(text, weights), path)
    return path
