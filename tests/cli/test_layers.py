"""`sloop profile --layers`: what it prints, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks.models import perceptron
from sloop.cli import layers as module
from sloop.cli import main
from sloop.profile.profile import Profile, Quadratic, digest_of_model, load_profile, path_beside, save_profile

BRIEF = ("--cores", "1", "--batches", "1,2", "--seconds", "0.01", "--passes", "1")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return perceptron(tmp_path, width=16, layers=3)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments), *BRIEF])


def saved(model: Path, **more: Any) -> Path:
    """A profile beside the model, so that it is not measured."""
    path = path_beside(model)
    base = Profile(latency_ms=Quadratic(0, 1, 1), max_batch=2, max_cores=1, model_digest=digest_of_model(model))
    save_profile(base if not more else Profile(**more), path)
    return path


def test_adds_the_layers_to_the_profile_and_proposes(network: Path, tmp_path: Path) -> None:
    path = saved(network)
    result = run(network, "--layers", "--json", "--pieces", tmp_path / "kept", "--plot", tmp_path / "l.svg")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [each["end"] for each in answer["layers"]["blocks"]] == ["r0", "r1", "r2", "y"]
    assert answer["proposals"].keys() >= {"correlation", "half_compute_share", "cuts", "queues", "shadows"}
    assert [each["pieces"] for each in answer["proposals"]["cuts"]] == [2, 3, 4]
    kept = load_profile(path)
    assert kept.latency_ms == Quadratic(0, 1, 1), "the rest of the profile stays"
    assert kept.layers is not None
    assert len(kept.layers.blocks) == 4
    assert len(list((tmp_path / "kept").glob("*.onnx"))) == 4
    assert "</svg>" in (tmp_path / "l.svg").read_text()


def test_shows_blocks_cuts_and_shadows(network: Path) -> None:
    saved(network)
    result = run(network, "--layers", "--cut", "r0", "--piece-mib", 1, "--fetch-mbps", 100)
    assert result.exit_code == 0, result.stderr
    for said in ("the uncut model", "half of the compute is in", "Cuts for equal load", "when requests wait"):
        assert said in result.stdout
    kept = load_profile(path_beside(network))
    assert kept.layers is not None
    assert [each.end for each in kept.layers.blocks] == ["r0", "y"]


def test_a_model_without_a_profile_gets_a_brief_one(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def briefly(model: Path, **_: object) -> Profile:
        return Profile(latency_ms=Quadratic(0, 1, 1), max_batch=2, max_cores=1, model_digest=digest_of_model(model))

    monkeypatch.setattr(module, "measure_briefly", briefly)
    result = run(network, "--layers")
    assert "it had no profile: one was measured briefly" in result.stdout
    assert load_profile(path_beside(network)).layers is not None


def test_layers_stay_when_the_model_is_measured_again(network: Path) -> None:
    path = saved(network)
    assert run(network, "--layers").exit_code == 0
    before = load_profile(path).layers
    assert run(network, "--alone").exit_code == 0
    after = load_profile(path)
    assert after.origin == "measured"
    assert after.layers == before
    network.write_bytes(network.read_bytes() + b"\x72\x00")  # an empty entry of its metadata: another version
    assert run(network, "--alone").exit_code == 0
    assert load_profile(path).layers is None, "those of another version of the model are dropped"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "--cut", "nowhere"], "it cannot be cut after 'nowhere'"),
        (["--layers", "--cut", "r1", "--cut", "r0"], "do not follow each other"),
        (["--cut", "r1"], "belong to --layers"),
        (["--plot", "x.svg"], "--plot belongs to --layers and to --sharing"),
        (["--layers", "--from-log", "x"], "--from-log measures nothing"),
    ],
)
def test_says_what_is_wrong(network: Path, arguments: list[str], said: str) -> None:
    result = run(network, *arguments)
    assert result.exit_code in (1, 2)
    assert said in result.stderr
