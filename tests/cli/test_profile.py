import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import main
from sloop.profile.store import load_profile


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


def test_a_model_in_python_is_measured_or_refused(tmp_path: Path) -> None:
    stage = tmp_path / "stage.py"
    ports = "inputs = {'x': ('FP32', (1, 2))}\n    outputs = {'y': ('FP32', (1, 2))}"
    stage.write_text(
        f"class Model:\n    {ports}\n    def __init__(self, threads): pass\n    def run(self, x): return x\n"
    )
    asked = ["profile", str(stage), "--cores", "1", "--seconds", "0.01", "--json"]
    result = CliRunner().invoke(main, [*asked, "--batches", "1"])
    assert [sample["batch"] for sample in json.loads(result.stdout)["samples"]] == [1]
    assert load_profile(tmp_path / "stage.py.profile.json").software.startswith("Python 3")
    assert "measure what one request needs, with --batches 1\n" in CliRunner().invoke(main, asked).stderr
    assert "is its author's" in CliRunner().invoke(main, [*asked, "--free-batch"]).stderr
