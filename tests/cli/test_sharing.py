"""`sloop profile --sharing`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.models import perceptron
from sloop.cli import layers, main
from sloop.machine import usable_cpus
from sloop.profile.interference import NO_SLOWDOWN
from sloop.profile.profile import Profile, Quadratic, digest_of_model, load_profile, path_beside, save_profile

pytestmark = pytest.mark.live
BRIEF = ("--seconds", "0.005", "--passes", "1", "--together", "2")


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return perceptron(tmp_path, width=16, layers=3)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def brief(model: Path) -> Profile:
    return Profile(latency_ms=Quadratic(0, 1, 1), max_batch=2, max_cores=1, model_digest=digest_of_model(model))


def test_adds_the_best_law_to_the_profile(network: Path, tmp_path: Path) -> None:
    path = path_beside(network)
    save_profile(brief(network), path)
    picture = tmp_path / "s.svg"
    result = run(network, "--sharing", "--json", "--plot", picture, *BRIEF)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert [count for count, _ in answer["points"]] == [1.0, 2.0]
    assert set(answer["fits"]) == {"bandwidth", "literal", "scalability", "processor_sharing", "count"}
    assert (answer["batch"], answer["pair"]) == (2, None)
    kept = load_profile(path)
    assert kept.latency_ms == Quadratic(0, 1, 1), "the rest of the profile stays"
    assert kept.sharing is not None
    assert {fit["held_out"] for fit in answer["fits"].values()} == {None}, "of one pass, none can be left out"
    assert kept.sharing.software.startswith("ONNX Runtime")
    assert kept.sharing.cores == len(usable_cpus())
    assert kept.sharing.source == f"sloop profile {network.name} --sharing, batch 2"
    assert kept.sharing.law != NO_SLOWDOWN
    assert "</svg>" in picture.read_text()


def test_shows_slowdowns_laws_and_the_pair(network: Path, tmp_path: Path) -> None:
    save_profile(brief(network), path_beside(network))
    (tmp_path / "other").mkdir()
    other = perceptron(tmp_path / "other", width=8, layers=1)
    result = run(network, "--sharing", "--batches", "1", "--beside", other, *BRIEF)
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    for words in (
        "Batches of 1 on",
        "σ",
        "mean error %",
        "(chosen)",
        "a batch costs least with",
        f"one worker of {other.name} (batch 1)",
    ):
        assert words in said
    assert "replicas whose cores are not a cap" in said
    assert "of other passes %" not in said, "of one pass, none can be left out"


def test_sharing_stays_when_the_model_is_measured_again(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "measure_briefly", lambda model, **_: brief(model))
    result = run(network, "--sharing", *BRIEF)
    assert "it had no profile: one was measured briefly" in " ".join(result.stdout.split())
    before = load_profile(path_beside(network)).sharing
    assert before is not None
    again = ("--alone", "--cores", "1", "--batches", "1", "--seconds", "0.01", "--passes", "1")
    assert run(network, *again).exit_code == 0
    assert load_profile(path_beside(network)).sharing == before
    network.write_bytes(network.read_bytes() + b"\x72\x00")  # an empty entry of its metadata: another version
    assert run(network, *again).exit_code == 0
    assert load_profile(path_beside(network)).sharing is None


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--together", "3"], "--together and --beside belong to --sharing"),
        (["--plot", "x.svg"], "--plot belongs to --layers and to --sharing"),
        (["--sharing", "--layers"], "make one after the other"),
        (["--sharing", "--cut", "y"], "--cut, --pieces, --piece-mib and --fetch-mbps belong to --layers"),
        (["--sharing", "--together", "1"], "is not in the range"),
        (["--sharing", "--cores", "1"], "every worker may use all cores"),
        (["--sharing", "--batches", "0"], "'0' is not a list of whole numbers from 1"),
    ],
)
def test_options_that_do_not_fit_together(network: Path, options: list[str], wrong: str) -> None:
    result = run(network, *options)
    assert result.exit_code == 2
    assert wrong in result.stderr
