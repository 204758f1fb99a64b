"""What requests bring: distributions, files and columns of numbers, and that they stay with their arrivals."""

from collections import Counter
from itertools import islice
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.options import Value
from sloop.streams import stream
from sloop.units import NS_PER_S
from sloop.workload import Trace, Work, trace_from, trace_of
from sloop.workload.sizes import KINDS, ROWS, SIZES, LognormalNumbers, UniformNumbers, WeightedNumbers, read_numbers
from sloop.workload.trace import compress, cut, first_works, repeat, scale, statistics, thin, write_times

POISSON: dict[str, object] = {"kind": "poisson", "rate": 50}
MANY = 20_000


def declared(spec: dict[str, object], folder: Path = Path()) -> Trace:
    return trace_from(spec, seed=3, duration_s=20.0, folder=folder)


def sizes_of(trace: Trace) -> list[int]:
    return [work.size for work in first_works(trace, MANY)]


def draws(numbers: Any, seed: int = 1) -> list[int]:
    return list(islice(numbers.draws(stream(seed, "sizes")), MANY))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 1_000), st.integers(0, 1_000), st.integers(0, 5))
def test_uniform_draws_every_number_between_its_bounds(least: int, width: int, seed: int) -> None:
    found = draws(UniformNumbers(least, least + width), seed)
    assert min(found) >= least
    assert max(found) <= least + width
    deviation = ((width + 1) ** 2 / 12) ** 0.5 / MANY**0.5
    assert abs(fmean(found) - (least + width / 2)) <= 5 * deviation
    assert width > 20 or set(found) == set(range(least, least + width + 1))


def test_a_choice_follows_its_weights() -> None:
    counts = Counter(draws(WeightedNumbers((16, 512, 64), (9.0, 1.0, 0.0))))
    assert counts.keys() == {16, 512}
    assert counts[512] / MANY == pytest.approx(0.1, abs=0.01)
    assert Counter(draws(WeightedNumbers((1, 2))))[1] / MANY == pytest.approx(0.5, abs=0.02)


def test_lengths_are_lognormal_between_their_bounds() -> None:
    found = draws(LognormalNumbers(median=60.0, sigma=0.5, most=10**6))
    assert median(found) == pytest.approx(60, rel=0.02)
    assert fmean(found) == pytest.approx(60 * exp(0.125), rel=0.02)
    assert fmean((log(each) - log(60)) ** 2 for each in found) == pytest.approx(0.25, rel=0.05)
    cut_off = draws(LognormalNumbers(median=60.0, sigma=1.0, most=100, least=30))
    assert (min(cut_off), max(cut_off)) == (30, 100)


@pytest.mark.parametrize("spec", [8, [8, 512], {"kind": "uniform", "least": 8, "most": 512}])
def test_the_same_seed_draws_the_same_and_moves_no_arrival(spec: object) -> None:
    plain, sized = declared(POISSON), declared(POISSON | {"rows": spec, "sizes": spec})
    assert list(sized.times_ns()) == list(plain.times_ns())
    assert plain.works is None
    works = first_works(sized, MANY)
    assert works == first_works(sized, MANY) == first_works(declared(POISSON | {"rows": spec, "sizes": spec}), MANY)
    assert [work.rows for work in works] != [work.size for work in works] or spec == 8
    assert [work.size for work in works] == sizes_of(declared(POISSON | {"sizes": spec, "thin": 1.0}))


def test_a_trace_of_one_size_brings_nothing() -> None:
    assert first_works(declared(POISSON), 5) == []
    assert statistics(declared(POISSON)).work is None


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ([], "must be a number, a list of numbers or a distribution"),
        (0, "at least 1"),
        ([1, 1.5], "must be a whole number"),
        ({"kind": "normal"}, "unknown kind of distribution 'normal'"),
        ({"kind": "uniform", "least": 0, "most": 3}, "0 is out of range"),
        ({"kind": "uniform", "least": 4, "most": 3}, "least 4 is above most 3"),
        ({"kind": "choice", "values": [1, 2], "weights": [1]}, "1 weights for 2 values"),
        ({"kind": "choice", "values": [1, 2], "weights": [0, 0]}, "2 weights for 2 values"),
        ({"kind": "lognormal", "median": 3, "sigma": 1}, "the key 'most' is missing"),
        ({"member": "a"}, "neither a `kind`, a `file` nor a `column`"),
        ({"column": "tokens"}, "a generated trace has no column 'tokens'"),
    ],
)
def test_a_mistake_in_a_distribution_is_named(spec: object, what: str) -> None:
    with pytest.raises(InputError, match=r"rows") as caught:
        declared(POISSON | {"rows": spec})
    assert what in str(caught.value)


def test_every_kind_reads() -> None:
    specs: dict[str, dict[str, object]] = {
        "choice": {"values": [1, 2], "weights": [3, 1]},
        "uniform": {"least": 1, "most": 2},
        "lognormal": {"median": 2, "sigma": 1, "most": 9},
    }
    assert specs.keys() == KINDS.keys()
    for kind, options in specs.items():
        assert isinstance(read_numbers(Value({"kind": kind, **options}), ROWS), KINDS[kind])


CSV = "arrived,tokens,n\n0.5,8,1\n1.5,16,2\n2.5,24,3\n3.5,32,4\n"


def csv(folder: Path, text: str = CSV) -> dict[str, object]:
    (folder / "requests.csv").write_text(text)
    return {"file": "requests.csv", "format": "timestamps", "sizes": {"column": "tokens"}}


def test_columns_stay_with_their_arrivals(tmp_path: Path) -> None:
    made = declared(csv(tmp_path) | {"rows": {"column": "n"}, "start_s": 1.0, "repeat": 2}, tmp_path)
    once = [Work(2, 16), Work(3, 24), Work(4, 32)]
    assert first_works(made, 9) == once * 2
    assert [at_ns / NS_PER_S for at_ns in made.times_ns()][:3] == [0.5, 1.5, 2.5]
    assert sizes_of(declared(csv(tmp_path) | {"rows": 5}, tmp_path)) == [8, 16, 24, 32]
    assert first_works(declared(csv(tmp_path) | {"rows": 5}, tmp_path), 1) == [Work(5, 8)]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sizes": {"column": "toks"}}, "no column 'toks'"),
        ({"format": "counts", "column": "n"}, "has no number for each request of a file of counts"),
    ],
)
def test_a_column_that_is_not_there_is_named(tmp_path: Path, changes: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        declared(csv(tmp_path) | changes, tmp_path)


def test_a_wrong_number_of_a_column_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"requests\.csv:3"):
        declared(csv(tmp_path, "arrived,tokens\n0.5,8\n1.5,many\n"), tmp_path)
    with pytest.raises(InputError, match=r"requests\.csv:3: 1\.5 is not a whole number"):
        declared(csv(tmp_path, "arrived,tokens\n0.5,8\n1.5,1.5\n"), tmp_path)


def test_a_file_of_lengths_is_drawn_from(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("12 18\n400\n")
    made = declared(POISSON | {"sizes": {"file": "lengths.txt"}}, tmp_path)
    assert set(sizes_of(made)) == {12, 18, 400}
    csv(tmp_path)
    column = declared(POISSON | {"sizes": {"file": "requests.csv", "column": "tokens"}}, tmp_path)
    assert set(sizes_of(column)) == {8, 16, 24, 32}
    (tmp_path / "lengths.txt").write_text("\n")
    with pytest.raises(InputError, match="there are no numbers in it"):
        declared(POISSON | {"sizes": {"file": "lengths.txt"}}, tmp_path)


def numbered(count: int) -> Trace:
    """Arrivals ten a second, each of which brings rows that say which second it is of."""
    times_ns = [place * NS_PER_S // 10 for place in range(count)]
    works = [Work(1 + at_ns // NS_PER_S, at_ns % 7) for at_ns in times_ns]
    return trace_of(
        times_ns,
        duration_ns=count * NS_PER_S // 10,
        name="numbered",
        provenance="assumed: a test",
        works=works.__iter__,
    )


@pytest.mark.parametrize(
    ("change", "second"),
    [
        (lambda trace: thin(trace, 0.3, seed=2), lambda at_s: at_s),
        (lambda trace: scale(trace, 0.6, seed=2), lambda at_s: at_s),
        (lambda trace: scale(trace, 3.4, seed=2), lambda at_s: at_s),
        (lambda trace: compress(trace, 4.0), lambda at_s: 4 * at_s),
        (lambda trace: cut(trace, start_ns=2 * NS_PER_S, duration_ns=5 * NS_PER_S), lambda at_s: at_s + 2),
        (lambda trace: cut(repeat(trace, 3), start_ns=60 * NS_PER_S), lambda at_s: at_s % 60),
    ],
    ids=["thin", "fewer", "more", "compress", "cut", "repeat"],
)
def test_what_requests_bring_stays_with_them_through_every_change(change: Any, second: Any) -> None:
    made = change(numbered(600))
    times_ns, works = list(made.times_ns()), first_works(made, MANY)
    assert len(works) == len(times_ns) > 40
    tolerance_s = 0.11  # copies lie before the next arrival
    for at_ns, work in zip(times_ns, works, strict=True):
        at_s = second(at_ns / NS_PER_S)
        assert int(at_s - tolerance_s) <= work.rows - 1 <= int(at_s + 1e-6)


def test_statistics_and_files_have_rows_and_sizes(tmp_path: Path) -> None:
    made = declared(csv(tmp_path) | {"rows": {"column": "n"}}, tmp_path)
    work = statistics(made).work
    assert work is not None
    assert (work.rows_mean, work.rows_max, work.size_p50, work.size_max) == (2.5, 4, 16, 32)
    assert dict(statistics(made).rows())["size p50 / p99 / max"] == "16 / 32 / 32"
    write_times(made, tmp_path / "again.csv")
    columns = {"rows": {"column": "rows"}, "sizes": {"column": "size"}}
    again = declared({"file": "again.csv", "column": "arrived", "unit": "ns", **columns}, tmp_path)
    assert list(again.times_ns()) == list(made.times_ns())
    assert first_works(again, 9) == first_works(made, 9)


def test_a_scenario_finds_the_file_of_lengths_beside_it(tmp_path: Path) -> None:
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0}, "max_batch": 8}
    text = {
        "name": "texts",
        "slo_ms": 100,
        "stages": [{"name": "only", "profile": profile}],
        "trace": {**POISSON, "sizes": {"file": "lengths.txt"}},
        "duration_s": 1,
    }
    (tmp_path / "texts.yaml").write_text(yaml.safe_dump(text))
    with pytest.raises(InputError, match=r"no file 'lengths\.txt'"):
        load_scenario(tmp_path / "texts.yaml")
    (tmp_path / "lengths.txt").write_text("7\n")
    scenario = load_scenario(tmp_path / "texts.yaml")
    found = trace_from(scenario.declared_trace("texts"), seed=1, duration_s=1.0, folder=Path())
    assert set(sizes_of(found)) == {7}


def test_size_0_is_that_of_rows_that_are_all_equal() -> None:
    assert read_numbers(Value(0), SIZES) == WeightedNumbers((0,))
