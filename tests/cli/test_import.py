"""`sloop import`, and the other commands with what it reads: Triton model repositories, folders and URLs."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from click.testing import CliRunner, Result

from sloop.app.application import Deployment
from sloop.cli import main
from sloop.cli import serve as serving
from sloop.profile.profile import Profile, Quadratic, path_beside, save_profile
from tests.serve.bad_store import BadStore, Served

ENSEMBLE = """\
platform: "ensemble"
input [ { name: "numbers" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "result" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "sums" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "first" input_map { key: "x" value: "numbers" } output_map { key: "y" value: "sums" } },
  { model_name: "second" input_map { key: "x" value: "sums" } output_map { key: "y" value: "result" } }
] }
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def add(repository: Path, name: str, model: Path, config: str = "") -> Path:
    path = repository / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    shutil.copy(model, path)
    save_profile(Profile(latency_ms=Quadratic(alpha=0, beta=0.1, gamma=1), max_batch=4, max_cores=1), path_beside(path))
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return path


@pytest.fixture
def repository(tmp_path: Path, model: Path) -> Path:
    """An ensemble, its two models, and a model in Python."""
    folder = tmp_path / "models"
    add(folder, "first", model, "max_batch_size: 4\n")
    add(folder, "second", model)
    (folder / "sum" / "1").mkdir(parents=True)
    (folder / "sum" / "config.pbtxt").write_text(ENSEMBLE)
    (folder / "other" / "1").mkdir(parents=True)
    (folder / "other" / "config.pbtxt").write_text('backend: "python"\n')
    return folder


@contextmanager
def served(*arguments: object, folder: Path) -> Iterator[dict[str, Any]]:
    """A server, which runs in `folder`, and where it listens."""
    options = ["--http-port", "0", "--grpc-port", "0", "--json"]
    command = [sys.executable, "-m", "sloop", "serve", *map(str, arguments), *options]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


def answer_of(where: dict[str, Any], name: str, input: str) -> dict[str, Any]:
    """The outputs for one row of ones, by name."""
    tensor = {"name": input, "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}
    body = json.dumps({"inputs": [tensor], "parameters": {"x-slo-ms": 60000}}).encode()
    with urlopen(Request(f"{where['http']}/v2/models/{name}/infer", body)) as answer:
        return {each["name"]: each["data"] for each in json.loads(answer.read())["outputs"]}


@pytest.mark.live
def test_an_imported_ensemble_answers(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "sum.yaml"
    result = run("import", repository, "-o", out, "--slo-ms", 2000)
    assert result.exit_code == 0, result.output
    with served(out, folder=tmp_path) as where:
        assert where["slo_ms"] == {"sum": 2000}
        assert answer_of(where, "sum", "numbers") == {"result": [16, 16, 16, 16], "sums": [4, 4, 4, 4]}


def test_what_is_not_taken_is_said_and_written(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "app.yaml"
    result = run("import", repository, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert (value["file"], value["applications"]) == (str(out), ["sum"])
    assert result.stderr.splitlines() == value["notes"]
    assert any(f"{repository}/other/config.pbtxt:1: backend: models of python" in note for note in value["notes"])
    text = out.read_text()
    assert all(f"# {note}\n" in text for note in value["notes"])
    assert yaml.safe_load(text)["stages"][1] == {
        **{"name": "second", "model": "./models/second/1/model.onnx"},
        **{"after": ["first"], "inputs": {"x": "first.y"}},
    }
    assert run("check", out, "--rate", 1).exit_code == 0


def test_several_models_become_a_deployment(repository: Path, tmp_path: Path, model: Path) -> None:
    add(repository, "alone", model, 'output { name: "y" label_filename: "labels.txt" }')
    (repository / "alone" / "labels.txt").write_text("a\nb\nc\nd\n")
    out = tmp_path / "below" / "all.yaml"
    out.parent.mkdir()
    assert run("import", repository, "-o", out).exit_code == 0
    document = yaml.safe_load(out.read_text())
    assert document["name"] == "models"
    assert [each["name"] for each in document["applications"]] == ["sum", "alone"]
    assert document["applications"][1]["labels"] == {"y": "../models/alone/labels.txt"}
    assert document["applications"][1]["stages"][0]["model"] == "../models/alone/1/model.onnx"
    assert run("plan", out, "--rate", 1).exit_code == 0


def test_configurations_are_compared_with_their_models(tmp_path: Path, model: Path) -> None:
    config = """\
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: 5 }
output { name: "z" data_type: TYPE_FP32 dims: 4 }
"""
    add(tmp_path / "models", "tiny", model, config)
    result = run("import", tmp_path / "models", "-o", tmp_path / "app.yaml")
    assert result.exit_code == 0
    for said in (
        "config.pbtxt:2: input.data_type: the model has FP32, which holds",
        "config.pbtxt:2: input.dims: [-1, 5] with the batch; the model has [-1, 4], which holds",
        "config.pbtxt:3: output.name: the model has no output of this name; it has y",
    ):
        assert said in result.stderr


def test_what_cannot_be_imported(tmp_path: Path, repository: Path) -> None:
    result = run("import", repository / "other", "-o", tmp_path / "app.yaml")
    assert (result.exit_code, result.stdout) == (
        1,
        f"no model in {repository / 'other'} can be served; nothing was written\n",
    )
    assert not (tmp_path / "app.yaml").exists()
    for wrong in (tmp_path / "none", repository / "first" / "1"):
        result = run("import", wrong)
        assert result.exit_code == 1
        assert "not a Triton model repository" in result.stderr
    (tmp_path / "app.yaml").write_text("mine")
    result = run("import", repository, "-o", tmp_path / "app.yaml")
    assert result.exit_code == 1
    assert "help: remove it, or name another file with -o" in result.stderr
    assert (tmp_path / "app.yaml").read_text() == "mine"


def test_serve_reads_a_repository_itself(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Deployment] = []
    monkeypatch.setattr(serving, "serve_until_stopped", lambda deployment, *_, **__: seen.append(deployment))
    monkeypatch.chdir(tmp_path)
    for folder in (repository, repository / "sum"):
        result = run("serve", folder)
        assert result.exit_code == 0, result.output
        (application,) = seen.pop().applications
        assert [stage.name for stage in application.stages] == ["first", "second"]
        assert application.slo_ms == 50
        assert (
            "its deadline is 50 ms (5 × 2.2 ms, the planned time of one request in 2 stages, but at least"
            in result.stderr
        )
    assert run("serve", repository, "--slo-ms", 300).exit_code == 0
    assert seen.pop().applications[0].slo_ms == 300
    assert run("serve", repository / "first").exit_code == 0
    (application,) = seen.pop().applications
    assert (application.name, application.limits.rows) == ("first", 4)
    result = run("serve", repository / "other")
    assert result.exit_code == 1
    assert "no model in it can be served" in result.stderr
    (repository / "app.yaml").write_text("name: mine\n")
    result = run("serve", repository)
    assert "the key 'slo_ms' is missing" in result.stderr, "an application file comes first"


@pytest.mark.live
def test_serve_takes_the_url_of_a_model(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOOP_MODELS_CACHE", str(tmp_path / "cache"))
    with BadStore() as store:
        store.files["/tiny.onnx"] = Served(model.read_bytes())
        url = f"{store.url}/tiny.onnx"
        result = run("check", url)
        assert result.exit_code == 1
        assert f"{url}: this model is not on this machine" in result.stderr
        result = run("serve", f"{store.url}/none.onnx")
        assert result.exit_code == 1
        assert "/none.onnx: the store has no such file: 404" in result.stderr
        with served(url, folder=tmp_path) as where:
            assert where["applications"] == ["tiny"]
            assert answer_of(where, "tiny", "x") == {"y": [4, 4, 4, 4]}
        assert store.sent_bytes["/tiny.onnx"] == len(model.read_bytes())
    assert run("check", url, "--rate", 1).exit_code == 0
