import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from sloop.cli import main
from sloop.profile.store import load_profile


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


def test_json_has_the_promised_keys_and_the_profile_lies_beside_the_model(model: Path) -> None:
    arguments = ["profile", str(model), "--batches", "1,2", "--cores", "1", "--seconds", "0.02", "--json"]
    result = CliRunner().invoke(main, arguments)
    answer = json.loads(result.stdout)
    assert answer.keys() >= {"model", "hardware", "samples", "load_ms", "memory_bytes", "fits"}
    assert [sample["batch"] for sample in answer["samples"]] == [1, 2]
    assert answer["samples"][0].keys() >= {"batch", "cores", "p50_ms", "p99_ms", "n"}
    assert answer["fits"]["table"].keys() >= {"params", "r2", "mape"}
    kept = load_profile(model.with_name("tiny.onnx.profile.json"))
    assert kept.origin == "measured"
    assert len(kept.samples) == 2


def test_a_form_that_needs_more_cells_is_refused(model: Path) -> None:
    arguments = ["profile", str(model), "--batches", "1", "--cores", "1", "--seconds", "0.01", "--form", "amdahl"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "too few cells" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.onnx"], 1, "no such file"),
        (["nowhere.onnx", "--batches", "1,x"], 2, "1,2,4"),
        ([], 2, "MODEL"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert result.exit_code == code
    assert said in result.stderr
