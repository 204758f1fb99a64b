"""Profiles in an application: inline, by file, by published name; every way to write a form."""

from pathlib import Path

import pytest

from sloop.app.document import parse
from sloop.app.read_profile import read_latency, read_profile
from sloop.errors import InputError
from sloop.profile import RESNET18_HUMAN, RESNET_T, Amdahl, Latency, Quadratic, Region, Table
from sloop.profile.store import save_profile

TABLE = Table({1: {0.5: 90.0, 1: 46.0}, 4: {1: 145.0}})


@pytest.mark.parametrize(
    ("text", "latency"),
    [
        ("{form: quadratic, alpha: 1, beta: 2, gamma: 3}", Quadratic(1, 2, 3)),
        ("{quadratic: {alpha: 1, beta: 2, gamma: 3}}", Quadratic(1, 2, 3)),
        ("{form: amdahl, gamma: 1, epsilon: 2, delta: 3, eta: -4e-1}", Amdahl(1, 2, 3, -0.4)),
        ("{amdahl: {gamma: 1, epsilon: 2, delta: 3, eta: 4}}", Amdahl(1, 2, 3, 4)),
        ("{form: table, table: {1: {0.5: 90, 1: 46}, 4: {1: 145}}}", TABLE),
        ("{form: table, 1: {0.5: 90, 1: 46}, 4: {1: 145}}", TABLE),
        ("{table: {1: {0.5: 90, 1: 46}, 4: {1: 145}}}", TABLE),
    ],
)
def test_ways_to_write_a_form(text: str, latency: Latency) -> None:
    assert read_latency(parse(text)) == latency


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("7", "must be a form of latency"),
        ("{}", "must be a form of latency"),
        ("{form: spline}", "must be one of quadratic, amdahl, table"),
        ("{alpha: 1}", "the key 'form' is missing"),
        ("{amdahl: 7}", "must be a mapping"),
        ("{form: quadratic, alpha: 1, beta: 2, gamma: .inf}", "gamma: must be a number"),
        ("{form: quadratic, alpha: 1, beta: 2, gama: 3}", "unknown key 'gama'"),
        ("{form: table}", "must be a table {batch: {cores: ms}}"),
        ("{form: table, table: {}}", "must be a table {batch: {cores: ms}}"),
        ("{form: table, table: {1.5: {1: 1}}}", "the batch 1.5 must be a whole number"),
        ("{form: table, table: {1: {-1: 1}}}", "the cores -1 must be a positive number"),
        ("{form: table, table: {1: {1: 0}}}", "must be a number above 0"),
    ],
)
def test_forms_that_are_wrong(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read_latency(parse(text))
    assert what in caught.value.what


def test_by_name_and_by_file(tmp_path: Path) -> None:
    assert read_profile(parse("ResNet18-human"), tmp_path) is RESNET18_HUMAN
    save_profile(RESNET_T, tmp_path / "p.json")
    assert read_profile(parse("p.json"), tmp_path) == RESNET_T
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"<text>:1: .*not a profile"):
        read_profile(parse("bad.json"), tmp_path)
    with pytest.raises(InputError, match="no profile file"):
        read_profile(parse("x" * 5000), tmp_path)


def test_inline_with_its_provenance() -> None:
    text = """
    latency_ms: {table: {1: {1: 46.0, 2: 28.9}}}
    max_batch: 2
    hardware: a box
    origin: published
    source: a paper
    software: PyTorch
    date: 2024-04-22
    """
    profile = read_profile(parse(text), Path())
    assert (profile.max_cores, profile.region) == (2.0, Region(1, 1, 1, 2))
    assert (profile.hardware, profile.origin, profile.source) == ("a box", "published", "a paper")
    assert (profile.software, profile.date) == ("PyTorch", "2024-04-22")


def test_inline_without_provenance_is_assumed_where_it_stands() -> None:
    text = "\nlatency_ms: {form: amdahl, gamma: 1, epsilon: 2, delta: 3, eta: 4}\nmax_batch: 2"
    profile = read_profile(parse(text, "a.yaml"), Path())
    assert (profile.origin, profile.source, profile.max_cores) == ("assumed", "a.yaml:2", 16.0)
