"""An application that needs nothing but its file, and a model that takes no time."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

APPLICATION = """\
name: demo
slo_ms: 1000
stages:
  - name: classify
    profile: ResNet-T
system: {name: static, cores: 8}
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(APPLICATION)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One matrix multiplication with an open batch."""
    weights = numpy_helper.from_array(np.ones((4, 4), dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [weights],
    )
    path = tmp_path / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path
