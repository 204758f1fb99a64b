"""`sloop innet`: what each command prints, for people and for programs, and how it fails."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sloop.cli import main
from sloop.onnx_file import write_onnx
from sloop.profile.profile import load_profile, path_beside
from sloop_systems.netnn.quantiser import read_network
from sloop_systems.netnn.shipped import shipped_file
from sloop_systems.netnn.training import Architecture
from tests.sloop_systems.netnn.models import onnx_message

INPUTS = 24


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small network, and rows for it."""
    path = tmp_path / "small.onnx"
    write_onnx(onnx_message(Architecture(INPUTS, (4,), (6,), kernel=3, pool=2).made(1)), path)
    np.save(tmp_path / "rows.npy", np.random.RandomState(0).randint(0, 2, (9, INPUTS)))
    return path


def run(*arguments: object, code: int = 0) -> Result:
    found = CliRunner().invoke(main, ["innet", *map(str, arguments)])
    assert found.exit_code == code, found.output
    return found


def value_of(*arguments: object, code: int = 0) -> Any:
    """The one object on stdout."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def test_map_shows_the_model_that_ships_and_draws_it(tmp_path: Path) -> None:
    text = run("map").stdout
    assert "conv2" in text
    assert "6,348 packets" in text
    found = value_of("map", "--plot", tmp_path / "fabric.svg")
    assert [layer["packets"] for layer in found["layers"]] == [3240, 2592, 496, 16, 4]
    assert found["shares"] == 4
    assert "<svg" in (tmp_path / "fabric.svg").read_text()
    run("map", "--plot", tmp_path / "fabric.pdf", code=1)


def test_a_network_that_does_not_fit_is_an_error_with_numbers(tmp_path: Path) -> None:
    found = run("map", "--fabric", "{leaves: 3}", code=1)
    assert "the network needs 6 leaves, the fabric has 3" in found.stderr
    assert "layer 'dense1'" in value_of("map", "--fabric", "{leaves: 3}", code=1)["error"]
    run("map", "--fabric", "{leafs: 3}", code=1)
    (tmp_path / "fabric.yaml").write_text("leaves: 7\nrouting: three-tier\n")
    assert value_of("map", "--fabric", tmp_path / "fabric.yaml")["latency_ns"] > value_of("map")["latency_ns"]


def test_compile_writes_a_model_and_its_profile(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.innet"
    found = value_of("compile", model, "--rows", tmp_path / "rows.npy", "--out", out, "--doubt", 5)
    profile = load_profile(tmp_path / "small.innet.profile.json")
    assert profile.latency_ms.latency_ms(1, 1.0) == pytest.approx(found["modelled_ms"])
    assert len(found["emulated_ms"]) == 1
    assert value_of("map", out)["packets"] == found["packets"]
    runners = value_of("run", out, "--rows", tmp_path / "rows.npy", "--runner", "reference", "--runner", "emulator")
    assert runners["equal"]
    assert runners["rows"] == 9


def test_a_measurement_does_not_replace_the_profile_of_switches(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.innet"
    run("compile", model, "--rows", tmp_path / "rows.npy", "--out", out, "--emulate", 0)
    modelled = path_beside(out).read_bytes()
    quick = ["--alone", "--passes", "1", "--seconds", "0.01", "--batches", "1", "--cores", "1"]
    refused = CliRunner().invoke(main, ["profile", str(out), *quick])
    assert refused.exit_code == 1
    assert "is of innet, modelled" in refused.stderr
    assert "--hardware local" in refused.stderr
    measured = CliRunner().invoke(main, ["profile", str(out), *quick, "--hardware", "local"])
    assert measured.exit_code == 0, measured.output
    assert path_beside(out).read_bytes() == modelled
    assert load_profile(path_beside(out, "local")).accelerator == ""


def test_a_slow_fabric_is_emulated_to_its_end(model: Path, tmp_path: Path) -> None:
    """Its inferences take longer than the time-out of a fast one."""
    rows, fabric = tmp_path / "rows.npy", "{pass_ms: 1, link_ms: 2}"
    found = value_of("compile", model, "--rows", rows, "--fabric", fabric, "--out", tmp_path / "slow.innet")
    assert found["emulated_ms"][0] == pytest.approx(found["modelled_ms"], rel=0.5)
    assert found["modelled_ms"] > 1


def test_inputs_of_several_bits_are_scaled_in_every_runner(model: Path, tmp_path: Path) -> None:
    for inputs, low in (("bytes", 0), ("signed", -127)):
        np.save(tmp_path / "rows.npy", np.random.RandomState(2).randint(low, 128, (60, INPUTS)))
        run("run", model, "--rows", tmp_path / "rows.npy", code=1)
        given = (model, "--rows", tmp_path / "rows.npy", "--inputs", inputs)
        runners = value_of("run", *given, "--runner", "reference", "--runner", "emulator")["runners"]
        assert runners["emulator"]["differ"] == 0
        assert runners["onnx runtime"]["differ"] <= 6  # of 60 classes; without scale the bias would hardly count


def test_a_model_with_a_wrong_card_is_refused(model: Path, tmp_path: Path) -> None:
    card = json.loads(shipped_file().with_suffix(".json").read_text())
    compiling = ("compile", model, "--out", tmp_path / "small.innet")
    for wrong, message in (
        ("{}", "it is no card of a model"),
        ("x", "it is no card of a model"),
        (json.dumps(card | {"representation": "tarot"}), "it is no card of a model"),
        (json.dumps(card | {"shifts": [1, 1]}), "it has 24 inputs and 1 logit; its card says 814 inputs"),
    ):
        (tmp_path / "small.json").write_text(wrong)
        assert message in run(*compiling, code=1).stderr
    assert "cannot be read: No such file" in run("map", tmp_path / "missing.onnx", code=1).stderr


def test_compile_refuses_what_it_cannot_do_right(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.innet"
    assert "give typical rows with --rows" in run("compile", model, "--out", out, code=1).stderr
    assert "ends in .innet" in run("compile", model, "--out", tmp_path / "small.bin", code=2).stderr
    np.save(tmp_path / "floats.npy", np.zeros((2, INPUTS)))
    (tmp_path / "text.npy").write_text("1,2")
    for name in ("floats.npy", "text.npy", "missing.npy"):
        run("compile", model, "--rows", tmp_path / name, "--out", out, code=1)
    assert not out.exists()


def test_run_compares_all_runners_and_the_cpu(model: Path, tmp_path: Path) -> None:
    found = value_of("run", model, "--rows", tmp_path / "rows.npy")
    assert found["equal"]
    for name, each in found["runners"].items():
        assert each["verdicts"] == 9, name
        assert each["ns_per_inference"] > 0
        assert name == "onnx runtime" or each["differ"] == 0
    assert {"reference", "emulator", "onnx runtime"} <= found["runners"].keys()
    assert ("kernel" in found["runners"]) != bool(found["notes"])
    assert "modelled" in run("run", model, "--rows", tmp_path / "rows.npy", "--runner", "reference").stdout


@pytest.mark.parametrize("name", ["map", "compile", "run"])
def test_help_has_an_example(name: str) -> None:
    text = run(name, "--help").stdout
    assert f"sloop innet {name}" in text.partition("Example:")[2]
    assert "--json" in text


def test_the_shipped_network_is_an_onnx_model_of_the_published_form() -> None:
    network = read_network(shipped_file())
    assert [layer.neurons for layer in network.layers] == [32, 64, 50, 100, 1]


def test_the_commands_of_the_page_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in one folder; the page's own model is the small one."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "innet.md").read_text()
    blocks = re.findall(r"```sh needs=\S+\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 7
    monkeypatch.chdir(tmp_path)
    model.rename(tmp_path / "ids.onnx")
    for line in lines:
        program, name, *arguments = shlex.split(line)
        assert (program, name) == ("sloop", "innet"), line
        run(*arguments)
    assert {"fabric.svg", "intrusion.innet", "ids.innet"} <= {path.name for path in tmp_path.iterdir()}
