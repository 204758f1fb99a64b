"""Models with operators of a library: examined, measured and served by processes that load it."""

import json
import sys
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from sloop.app.load import load_application
from sloop.cli import main
from sloop.errors import InputError
from sloop.profile import operators
from sloop.profile.examine import Declared, examine
from sloop.profile.operators import EXTENSIONS, library_of
from sloop.profile.profile import load_profile, path_beside

HAS_EXTENSIONS = "onnxruntime-extensions is not installed here"


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    """Text in capitals, which ONNX Runtime alone cannot make of it."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.STRING, ["n"]) for name in "xy")
    node = helper.make_node("StringUpper", ["x"], ["y"], domain="ai.onnx.contrib")
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    graph = helper.make_graph([node], "upper", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=9), str(tmp_path / "upper.onnx"))
    return tmp_path / "upper.onnx"


def test_without_the_library_the_error_says_what_to_name(upper: Path) -> None:
    with pytest.raises(InputError, match=r"an operator that ONNX Runtime .* does not have") as caught:
        examine(upper)
    assert "`operators:` of the stage" in caught.value.help


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, operators.MODULE, None)
    with pytest.raises(InputError, match="the package onnxruntime-extensions is not installed") as caught:
        library_of(EXTENSIONS)
    assert caught.value.help == "pip install onnxruntime-extensions"
    with pytest.raises(InputError, match=r"none\.so: there is no such library of operators"):
        library_of(str(tmp_path / "none.so"))


def test_a_file_that_is_no_library_is_refused_by_name(upper: Path, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(InputError, match=r"text\.so: ONNX Runtime cannot load this library of operators"):
        examine(upper, declared=Declared(operators=(str(tmp_path / "text.so"),)))


def test_a_stage_names_libraries_beside_its_file(upper: Path, tmp_path: Path) -> None:
    (tmp_path / "own.so").write_bytes(b"")
    stage = {"name": "s", "model": "upper.onnx", "operators": [EXTENSIONS, "own.so"]}
    (tmp_path / "app.yaml").write_text(json.dumps({"name": "a", "slo_ms": 100, "stages": [stage]}))
    (read,) = load_application(tmp_path / "app.yaml").stages
    assert read.variants[0].operators == (EXTENSIONS, str(tmp_path / "own.so"))
    stage["operators"] = "none.so"
    (tmp_path / "app.yaml").write_text(json.dumps({"name": "a", "slo_ms": 100, "stages": [stage]}))
    with pytest.raises(InputError, match=r"stages\[0\]\.operators: .*none\.so"):
        load_application(tmp_path / "app.yaml")


def test_a_model_is_examined_and_measured_with_its_library(upper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, which stands for a server, loads no code of a user."""
    pytest.importorskip(operators.MODULE, reason=HAS_EXTENSIONS)
    monkeypatch.setattr(operators, "_in_use", {})
    known = examine(upper, declared=Declared(operators=(EXTENSIONS,)))
    assert [port.datatype for port in known.signature.inputs] == ["BYTES"]
    assert operators.in_use() == ()
    options = ["--cores", "1", "--seconds", "0.01", "--passes", "1", "--alone", "--batches", "1"]
    result = CliRunner().invoke(main, ["profile", str(upper), "--operators", EXTENSIONS, *options])
    assert result.exit_code == 0, result.stderr
    assert f"{EXTENSIONS} " in load_profile(path_beside(upper)).software
