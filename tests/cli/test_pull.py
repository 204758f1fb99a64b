"""Models that applications name by URL: `sloop pull` fetches them, `sloop serve` too, the other commands find them."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner, Result

from sloop.cli import main
from sloop.serve.weights.folder import ModelFolder, usual_folder
from sloop.serve.weights.sources import ModelSource
from tests.serve.bad_store import BadStore, Served, SigningStore

pytestmark = pytest.mark.live
APPLICATION = """\
name: far
slo_ms: 1000
stages:
  - name: only
    model: {url}
    profile: {{latency_ms: {{form: quadratic, alpha: 0, beta: 0.1, gamma: 1}}, max_batch: 4}}
system: static
cluster: {{nodes: [{{hardware: c5.4xlarge, count: 2}}]}}
"""


@pytest.fixture
def store(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BadStore]:
    monkeypatch.setenv("SLOOP_MODELS_CACHE", str(tmp_path / "cache"))
    with BadStore() as made:
        made.files["/tiny.onnx"] = Served(model.read_bytes())
        yield made


@pytest.fixture
def far(tmp_path: Path, store: BadStore) -> Path:
    """An application whose model is in the store."""
    path = tmp_path / "far.yaml"
    path.write_text(APPLICATION.format(url=f"{store.url}/tiny.onnx"))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_what_was_pulled_is_found_by_other_commands(far: Path, store: BadStore, model: Path) -> None:
    for command in (["check", far], ["plan", far, "--rate", "5"]):
        result = run(*command)
        assert result.exit_code == 1
        assert "stages[0].model: this model is not on this machine" in result.stderr
        assert "help: fetch it with `sloop pull`" in result.stderr
    assert not usual_folder().exists()
    result = run("pull", far, "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["models"]
    assert row["source"] == f"{store.url}/tiny.onnx"
    assert Path(row["path"]).read_bytes() == model.read_bytes()
    assert Path(row["path"]).is_relative_to(usual_folder())
    for command in (["check", far], ["plan", far, "--rate", "5"]):
        assert run(*command).exit_code == 0
    checked = json.loads(run("check", far, "--json").stdout)
    assert checked["stages"][0]["variants"][0]["model"] == row["path"]
    assert store.sent_bytes["/tiny.onnx"] == len(model.read_bytes())


def test_objects_of_s3(far: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://models/tiny.onnx"
    far.write_text(APPLICATION.format(url=url))
    with SigningStore() as objects:
        objects.files["/models/tiny.onnx"] = Served(model.read_bytes())
        for name, value in objects.environment(AWS_REGION="us-east-1").items():
            monkeypatch.setenv(name, value)
        result = run("pull", far)
        assert result.exit_code == 1
        assert "s3://models/tiny.onnx.sha256: the store refuses it: 400" in result.stderr
        assert "help: set AWS_REGION=eu-test-1" in result.stderr
        monkeypatch.setenv("AWS_REGION", objects.REGION)
        result = run("pull", far, "--json")
        assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["models"]
    assert row["source"] == url
    assert Path(row["path"]).read_bytes() == model.read_bytes()
    assert run("check", far).exit_code == 0


def test_deployments_scenarios_and_variants(far: Path, store: BadStore, model: Path, tmp_path: Path) -> None:
    store.files["/two.onnx"] = Served(model.read_bytes())
    inline = APPLICATION.format(url=f"{store.url}/two.onnx").replace("far", "near")
    variants = inline.replace("    model:", "    variants:\n    - name: small\n      model:").replace(
        "    profile", "      profile"
    )
    indented = "\n".join(f"    {line}" for line in variants.splitlines() if not line.startswith(("system", "cluster")))
    deployment = tmp_path / "both.yaml"
    deployment.write_text(f"name: both\napplications:\n  - far.yaml\n  -\n{indented}\nsystem: static\n")
    result = run("pull", deployment, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["models"]) == 2
    assert run("check", deployment, far.with_name("missing.yaml")).exit_code == 1
    result = run("check", deployment)
    assert result.exit_code == 0, result.stderr
    far.write_text(far.read_text() + "trace: {kind: poisson, rate: 5}\nduration_s: 5\n")
    assert run("simulate", far).exit_code == 0


def test_urls_on_the_command_line(store: BadStore, model: Path) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    result = run("pull", f"{store.url}/tiny.onnx#sha256={digest}")
    assert result.exit_code == 0, result.stderr
    assert f"{store.url}/tiny.onnx" in result.stdout
    result = run("pull", model)
    assert "nothing to fetch" in result.stdout


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("{store}/none.onnx", "/none.onnx: the store has no such file: 404"),
        ("{store}/tiny.txt", "far.yaml:5: stages[0].model: 'tiny.txt' is no name of a model"),
        ("{store}/tiny.py", "far.yaml:5: stages[0].model: 'tiny.py' is Python code"),
        ("ftp://store/tiny.onnx", "far.yaml:5: stages[0].model: ftp://store/tiny.onnx: 'ftp://' is no kind of store"),
        ("https://me:secret@/tiny.onnx", "far.yaml:5: stages[0].model: https:///tiny.onnx: a URL without a valid host"),
    ],
)
def test_models_that_cannot_be_fetched(far: Path, store: BadStore, url: str, says: str) -> None:
    far.write_text(APPLICATION.format(url=url.format(store=store.url)))
    for command in ("pull", "serve"):
        result = run(command, far)
        assert result.exit_code == 1
        assert says in result.stderr
        assert "help: " in result.stderr
        assert "secret" not in result.stderr


def test_tokens_and_room(far: Path, store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.files["/tiny.onnx"].token = "Bearer letmein"
    assert "give a token for its host" in run("pull", far).stderr
    for command in ("pull", "deploy"):
        assert "in the environment as SLOOP_MODELS_TOKENS" in run(command, far, "--models-tokens", "tokens").stderr
    (tmp_path / "tokens").write_text("127.0.0.1 letmein\n")
    monkeypatch.setenv("SLOOP_MODELS_TOKENS", str(tmp_path / "tokens"))
    monkeypatch.setenv("SLOOP_MODELS_BYTES", "10")
    assert "may have 10" in run("pull", far).stderr
    monkeypatch.delenv("SLOOP_MODELS_BYTES")
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("SLOOP_MODELS_CACHE", str(elsewhere))
    result = run("pull", far)
    assert result.exit_code == 0, result.stderr
    assert str(elsewhere) in result.stdout.replace("\n", "")


def test_the_usual_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLOOP_MODELS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usual_folder() == tmp_path / ".cache" / "sloop" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert usual_folder() == Path("/var/cache/me/sloop/models")


def test_a_server_fetches_its_models_and_keeps_them(far: Path, store: BadStore) -> None:
    far.write_text("".join(line for line in far.read_text().splitlines(keepends=True) if "cluster" not in line))
    command = [sys.executable, "-m", "sloop", "serve", str(far), "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=far.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        with urlopen(f"{json.loads(line)['http']}/v2/models/far") as answer:
            assert json.loads(answer.read())["inputs"][0]["name"] == "x"
        shelf = ModelFolder(usual_folder(), 10**9)
        copy = shelf.copy_of(ModelSource.of(f"{store.url}/tiny.onnx"))
        assert copy is not None
        assert shelf._evictable(Path()) == []
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    (row,) = shelf._evictable(Path())
    assert row.folder == copy.folder
    os.close(row.lock)
