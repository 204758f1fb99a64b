"""`sloop serve` with several files, and `sloop deploy`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from sloop.app.load import load_application
from sloop.cli import deploy as deploy_module
from sloop.cli import main
from sloop.serve.control.orders import ChangeSystem, Deploy, Done, Order
from tests.cli.conftest import SERVED


@pytest.fixture
def servers(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[str]"]:
    """A server of two applications, started in the working directory."""
    monkeypatch.chdir(model.parent)
    for name in ("tiny", "other", "third"):
        (model.parent / f"{name}.yaml").write_text(SERVED.replace("name: tiny", f"name: {name}"))
    command = [sys.executable, "-m", "sloop", "serve", "tiny.yaml", "other.yaml"]
    command += ["--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def run(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["deploy", *arguments, "--json"])
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.live
def test_models_come_and_go(servers: "subprocess.Popen[str]", model: Path) -> None:
    assert servers.stdout is not None
    where = json.loads(servers.stdout.readline())
    assert where["application"] == "tiny+other"
    assert where["applications"] == ["tiny", "other"]
    assert where["state"] == ".sloop/tiny+other"
    (new,) = run("tiny.yaml")["versions"]
    assert (new["application"], new["version"], new["state"]) == ("tiny", "2", "serving")
    (new,) = run("third.yaml", "--server", where["state"])["versions"]
    assert (new["application"], new["version"]) == ("third", "1")
    (new,) = run("other.yaml", "--canary", "25%", "--version", "trial")["versions"]
    assert (new["version"], new["state"], new["share"]) == ("trial", "canary", 0.25)
    shown = CliRunner().invoke(main, ["deploy", "--list"]).stdout
    assert "missing until judged" in shown
    (gone,) = run("--remove", "other@trial")["versions"]
    assert gone["state"] in ("retiring", "retired")
    assert [(each["application"], each["version"], each["why"]) for each in run("--list")["ended"]] == [
        ("tiny", "1", "version 2 serves all requests"),
        ("other", "trial", "it was removed"),
    ]
    with urlopen(f"{where['http']}/v2/models") as answer:
        assert {each["name"] for each in json.load(answer)["models"]} == {"tiny", "other", "third"}
    shown = CliRunner().invoke(main, ["deploy", "--list"]).stdout
    assert [line.split()[:3] for line in shown.splitlines() if "serving" in line] == [
        ["tiny", "2", "serving"],
        ["other", "1", "serving"],
        ["third", "1", "serving"],
    ]
    (model.parent / "bad.yaml").write_text(SERVED.replace("slo_ms: 1000", "slo_ms: 0"))
    assert "bad.yaml:2: slo_ms" in str(run("bad.yaml", code=1)["error"])
    assert "no version of 'tiny' is a canary" in str(run("--promote", "tiny", code=1)["error"])


def test_a_system_that_a_deployment_replaces_is_named(app: Path) -> None:
    own = "".join(line for line in app.read_text().splitlines(True) if not line.startswith("system"))
    app.write_text(f"{own}system: elastic\n")
    deployment = app.with_name("deployment.yaml")
    deployment.write_text(f"name: x\napplications: [{app.name}]\nsystem: {{name: static, cores: 1}}\n")
    shown = CliRunner().invoke(main, ["check", str(deployment), "--rate", "1"]).stdout
    assert "runs under static, its deployment's system, not elastic of its file" in " ".join(shown.split())


def test_without_a_server_nothing_is_deployed(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["deploy", str(app)])
    assert result.exit_code == 1
    assert "name its state folder with --server" in result.stderr


def test_what_serve_takes_can_be_deployed(
    app: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with an application file, a model at a URL, and the folder of a Triton model, with what is not taken."""
    orders: list[Order] = []

    def sent(server: Path, order: Order, tell: object) -> Done:
        orders.append(order)
        return Done(())

    monkeypatch.setattr(deploy_module, "send", sent)
    monkeypatch.setattr(deploy_module, "find_server", lambda server: server)
    folder = tmp_path / "models" / "digits"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(model.read_bytes())
    (folder / "config.pbtxt").write_text("optimization { }")
    cache = tmp_path / "cache"
    monkeypatch.setenv("SLOOP_MODELS_CACHE", str(cache))
    for given in (str(app.parent), model.as_uri(), str(folder)):
        result = CliRunner().invoke(main, ["deploy", given])
        assert result.exit_code == 0, result.output
    assert "optimization: ONNX Runtime optimises" in result.stderr
    of_folder, of_url, of_triton = [Path(order.file) for order in orders if isinstance(order, Deploy)]
    assert of_folder == app
    assert of_url.read_bytes() == model.read_bytes()
    assert of_url.is_relative_to(cache)
    assert of_triton == folder
    assert load_application(of_triton).name == "digits"


def test_a_system_is_named_alone_or_with_parameters_and_a_file_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[Order] = []

    def sent(server: Path, order: Order, tell: object) -> Done:
        orders.append(order)
        return Done(())

    monkeypatch.setattr(deploy_module, "send", sent)
    monkeypatch.setattr(deploy_module, "find_server", lambda server: server)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    for text in ("hpa", "{name: hpa, target: 0.6, order: edf}", "./mine.py"):
        assert CliRunner().invoke(main, ["deploy", "--application", "demo", "--system", text]).exit_code == 0
    assert orders == [
        ChangeSystem("demo", "hpa"),
        ChangeSystem("demo", "hpa", {"target": 0.6, "order": "edf"}),
        ChangeSystem("demo", str(tmp_path / "mine.py")),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "exactly one of APP, --promote, --remove, --system and --list"),
        (["--remove", "a", "--system", "hpa"], 2, "exactly one of APP"),
        (["--list", "--application", "a"], 2, "--application applies only to --system"),
        (["--system", "hpa", "--version", "2"], 2, "--version applies only to the deployment of an APP"),
        (["--system", "{target: 0.5}"], 1, "name"),
        (["app.yaml", "--list"], 2, "exactly one of APP"),
        (["app.yaml", "--canary", "120%"], 2, "not a share above 0 % and below 100 %"),
        (["app.yaml", "--canary", "some"], 2, "write 10% or 0.1"),
        (["app.yaml", "--tolerance", "0.1"], 2, "--tolerance applies only to a canary: add --canary 10%"),
        (["app.yaml", "--promote-after-s", "5"], 2, "--promote-after-s applies only to a canary"),
        (["--list", "--canary", "10%"], 2, "--canary applies only to the deployment of an APP"),
        (["--remove", "a", "--tolerance", "0.1"], 2, "--tolerance applies only to the deployment of an APP"),
        (["--promote", "a", "--version", "3"], 2, "--version applies only to the deployment of an APP"),
        (["--remove", "a@"], 2, "a@ names no version"),
    ],
)
def test_wrong_use_is_refused(arguments: list[str], code: int, says: str) -> None:
    result = CliRunner().invoke(main, ["deploy", *arguments])
    assert result.exit_code == code
    assert says in " ".join(result.stderr.split())
