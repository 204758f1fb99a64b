"""The example `three`: one deployment of three models, planned, simulated, and served under their names."""

import http.client
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from sloop.app.load import load_application, load_deployment, load_scenario
from sloop.cli import main
from sloop.demo.live import serving
from sloop.runlog.summary import ApplicationRow
from sloop.sim.scenarios import run_scenario

FOLDER = Path(__file__).parents[2] / "examples" / "three"
NETWORKS = FOLDER.parent / "digits" / "models"
NAMES = ("read", "restore", "digits")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, ApplicationRow]]:
    """By system and application, what came of the two minutes."""
    scenario = load_scenario(FOLDER / "bursts.yaml")
    found = {choice.label: run_scenario(scenario, choice).row for choice in scenario.systems}
    return {system: {each.name: each for each in row.applications} for system, row in found.items()}


def test_the_deployment_and_the_scenario_are_of_the_same_applications() -> None:
    deployment, scenario = load_deployment(FOLDER / "deployment.yaml"), load_scenario(FOLDER / "bursts.yaml")
    assert tuple(deployment.by_name) == NAMES
    assert [each.limits.requests for each in deployment.applications] == [0, 100, 0]
    assert [(each.name, each.stages) for each in scenario.deployment.applications] == [
        (each.name, each.stages) for each in deployment.applications
    ]
    assert scenario.deployment.cluster == deployment.cluster
    assert scenario.systems[0] == deployment.system
    assert {name: load_application(FOLDER / f"{name}.yaml").slo_ms for name in NAMES} == {
        each.name: each.slo_ms for each in deployment.applications
    }


def test_bursts_do_not_coincide() -> None:
    traces: Mapping[str, Any] = load_scenario(FOLDER / "bursts.yaml").traces
    declared = [traces[name]["rates"] for name in NAMES]
    for step in zip(*declared, strict=True):
        in_burst = [rate == max(rates) for rate, rates in zip(step, declared, strict=True)]
        assert in_burst.count(True) == 1


def test_shared_cores_serve_every_model_better_than_thirds(rows: dict[str, dict[str, ApplicationRow]]) -> None:
    shared, thirds = rows["vertical-only"], rows["early-drop"]
    for name in NAMES:
        assert shared[name].attainment >= 0.96
        assert shared[name].attainment >= thirds[name].attainment + 0.05


def test_the_page_says_what_is_simulated(rows: dict[str, dict[str, ApplicationRow]]) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        found = re.search(rf"^\| {name} \| ([\d.]+) % \| ([\d.]+) % \|$", text, re.MULTILINE)
        assert found is not None
        for said, system in zip(found.groups(), ("vertical-only", "early-drop"), strict=True):
            assert float(said) == pytest.approx(100 * rows[system][name].attainment, abs=0.06)


def shown_commands() -> list[list[str]]:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    shell = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line)[1:] for part in shell for line in part.splitlines() if line.startswith("sloop ")]


@pytest.mark.parametrize("words", shown_commands(), ids=" ".join)
def test_commands_shown_parse(words: list[str]) -> None:
    command = main.get_command(click.Context(main), words[0])
    assert command is not None
    command.make_context(words[0], words[1:])


def onnx(network: str, picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = ort.InferenceSession(NETWORKS / f"{network}.onnx")
    (answer,) = session.run(None, {session.get_inputs()[0].name: picture})
    return np.asarray(answer)


@pytest.mark.live
def test_a_user_serves_it_and_asks_each_model_by_its_name(tmp_path: Path) -> None:
    picture = np.random.default_rng(1).integers(0, 255, (1, 28, 168)).astype(np.uint8)
    expected = {
        "read": onnx("read-large", picture.astype(np.float32)),
        "restore": onnx("restore-large", picture),
        "digits": onnx("read-large", onnx("restore-medium", picture)),
    }
    with serving(FOLDER / "deployment.yaml", tmp_path / "state") as where:
        connection = http.client.HTTPConnection(urlsplit(where.http).netloc, timeout=20)

        def ask(method: str, path: str, body: object = None) -> Any:
            connection.request(method, path, json.dumps(body).encode())
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return json.loads(answer.read())

        assert [model["name"] for model in ask("GET", "/v2/models")["models"]] == list(NAMES)
        for name, answer in expected.items():
            (port,) = ask("GET", f"/v2/models/{name}")["inputs"]
            tensor = {**port, "shape": [1, 28, 168], "data": picture.ravel().tolist()}
            parameters = {"x-slo-ms": 20_000}
            found = ask("POST", f"/v2/models/{name}/infer", {"inputs": [tensor], "parameters": parameters})
            assert found["model_name"] == name
            np.testing.assert_allclose(found["outputs"][0]["data"], answer.ravel(), rtol=1e-5)
        rows = ask("GET", "/v2/sloop/state")["applications"]
        assert {row["name"]: row["state"] for row in rows} == dict.fromkeys(NAMES, "ready")
        connection.close()
