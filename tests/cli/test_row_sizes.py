"""`sloop profile --sizes`: what it measures, prints and refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from sloop.app.load import load_application
from sloop.cli import main
from sloop.profile.profile import load_profile, path_beside
from sloop.runlog import FileLog
from sloop.systems.replay import header_of
from sloop.systems.setup import set_up
from sloop.units import ms
from sloop.vocabulary import Request, RequestId
from tests.onnx_graphs import save_model

BRIEF = ("--cores", "1", "--batches", "1,2", "--seconds", "0.01", "--alone")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The mean of the embeddings of tokens, of which a text has up to 64."""
    weights = {"words": np.ones((2, 8), np.float32), "places": np.ones((64, 8), np.float32), "zero": np.zeros(1, int)}
    text = """(int64[n, sequence] ids) => (float[n, 8] y) {
        found = Gather(words, ids) length = Shape<start = 1, end = 2>(ids) own = Slice(places, zero, length, zero)
        sum = Add(found, own) y = ReduceMean<axes = [1], keepdims = 0>(sum)
    }"""
    return save_model(tmp_path / "texts.onnx", text, weights)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments), *BRIEF])


@pytest.mark.live
def test_measures_sizes_and_says_what_it_extrapolates(texts: Path) -> None:
    result = run(texts, "--sizes", "4,16,64", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    kept = load_profile(path_beside(texts))
    assert [each["size"] for each in answer["sizes"]] == [each.size for each in kept.sizes] == [4, 16, 64]
    assert kept.shapes == {"ids": (16,)}, "the middle one is measured as models of one size are"
    assert kept.sizes[1].latency_ms == kept.latency_ms
    assert answer["size_max"] == kept.size_max == 256
    assert answer["size_classes"][-1] == 64
    assert answer["size_law"]["params"]["form"] == "quadratic"
    again = run(texts)
    assert again.exit_code == 0, again.stderr
    assert "rows of other sizes than 16 are assumed to take more or less in proportion" in again.stdout
    assert [each.size for each in load_profile(path_beside(texts)).sizes] == [16]


@pytest.mark.live
def test_shows_sizes(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "sizes.txt").write_text("8\n" * 60 + "32\n" * 40)
    result = run(texts, "--sizes-from", tmp_path / "sizes.txt")
    assert result.exit_code == 0, result.stderr
    for said in (
        "measured with rows of ids 8",
        "rows of other sizes, 1 cores",
        "times as long at size 32 as at size 8",
        "sizes below 8 and above 32 are extrapolated; nothing measured says what rows above 128 take",
    ):
        assert said in result.stdout


@pytest.mark.live
def test_a_shape_that_is_given_is_the_typical_one(texts: Path) -> None:
    result = run(texts, "--sizes", "4,16", "--shape", "ids=8", "--json")
    assert result.exit_code == 0, result.stderr
    kept = load_profile(path_beside(texts))
    assert (kept.shapes, [each.size for each in kept.sizes]) == ({"ids": (8,)}, [4, 8, 16])


def log_of(model: Path, path: Path, *sizes: int) -> Path:
    """A server's log, with a request of two rows of each of these sizes."""
    profile = {"latency_ms": {"quadratic": {"alpha": 0, "beta": 1, "gamma": 1}}, "max_batch": 2}
    declared = {"name": "t", "slo_ms": 99, "stages": [{"name": "s", "model": str(model), "profile": profile}]}
    with FileLog(path, header_of(set_up(load_application(declared)), origin="live")) as file:
        for number, size in enumerate(sizes):
            at_ns = ms(number)
            file.append(at_ns, Request(RequestId(number), at_ns, at_ns, at_ns + ms(99), rows=2, size=size))
    return path


@pytest.mark.live
def test_sizes_of_a_servers_log(texts: Path, tmp_path: Path) -> None:
    result = run(texts, "--sizes-from", log_of(texts, tmp_path / "run.jsonl", *[5] * 30, *[20] * 60, 50), "--json")
    assert result.exit_code == 0, result.stderr
    kept = load_profile(path_beside(texts))
    assert [each.size for each in kept.sizes] == [5, 20, 50]
    assert kept.shapes == {"ids": (20,)}


def test_logs_without_sizes_of_the_model_are_refused(texts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(texts.read_bytes())
    result = run(texts, "--sizes-from", log_of(other, tmp_path / "other.jsonl", 5))
    assert result.exit_code == 1
    assert "no application of this log begins with 'texts.onnx'" in result.stderr
    result = run(texts, "--sizes-from", log_of(texts, tmp_path / "none.jsonl", 0))
    assert result.exit_code == 1
    assert "the requests for 'texts.onnx' have no sizes" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sizes", "4,x"), "'x' is not a size; write 128"),
        (("--sizes", "4x4"), "its rows have 1 open dimension: sequence"),
        (("--sizes", "4", "--sizes-from", "."), "give one of them"),
        (("--sizes", "4", "--layers"), "do not go with --from-log, --layers or --sharing"),
        (("--sizes", "4", "--from-log", "."), "do not go with --from-log, --layers or --sharing"),
        (("--sizes-from", "none.txt"), "none.txt: there is no such file"),
    ],
)
def test_wrong_sizes_are_refused(texts: Path, options: tuple[str, ...], says: str) -> None:
    result = run(texts, *options)
    assert result.exit_code in {1, 2}
    assert says in result.stderr


@pytest.mark.live
def test_a_size_on_which_the_model_fails_is_refused_before_anything_is_measured(texts: Path) -> None:
    result = run(texts, "--sizes", "16,65,16")
    assert result.exit_code == 1
    assert "rows of size 65: a batch of 1 fails" in result.stderr
    assert not path_beside(texts).exists()
