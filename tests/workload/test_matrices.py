from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.units import s
from sloop.workload.matrices import is_maps, read_maps
from sloop.workload.read import Format, TraceFile, read_trace
from sloop.workload.stats import statistics


def folder(path: Path, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


QUIET = {"MAP1_D0": "-2,1\n1,-2\n", "MAP1_D1": "1,0\n0,1\n"}
BUSY = {"MAP10_D0": "-200,0\n0,-200\n", "MAP10_D1": "100,100\n100,100\n"}


def test_pairs_follow_one_another_by_number(tmp_path: Path) -> None:
    maps = folder(tmp_path / "MAPs", **BUSY, **QUIET, notes="not a matrix")
    assert is_maps(maps)
    trace = read_maps(maps, member="", dwell_s=50.0, seed=0)
    counts = trace.counts_per_s()
    assert trace.duration_ns == s(100)
    assert sum(counts[:50]) / 50 == pytest.approx(1, abs=0.5)
    assert sum(counts[50:]) / 50 == pytest.approx(200, rel=0.05)


def test_one_pair_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    maps = folder(tmp_path / "MAPs", **BUSY, **QUIET)
    assert is_maps(maps / "MAP10")
    assert not is_maps(maps / "MAP2")
    trace = read_trace(TraceFile(maps / "MAP10", dwell_s=10.0, scale=0.5))
    assert len(trace.to_array()) == pytest.approx(1_000, rel=0.1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no files MAP1_D0, MAP1_D1"),
        ({"MAP1_D0": "-1"}, "MAP1_D1 is missing"),
        ({"MAP1_D0": "", "MAP1_D1": "1"}, "the matrix is empty"),
        ({"MAP1_D0": "-1,x", "MAP1_D1": "1"}, "MAP1_D0:1: 'x' is not a number"),
        ({"MAP1_D0": "-1\n-2", "MAP1_D1": "1"}, "MAP1_D0: d0 is not a 2 by 2 matrix"),
        (
            {"MAP1_D0": "-1", "MAP1_D1": "nan"},
            "MAP1_D1:1: must be a number of at least -1e+07 and at most 1e+07, not nan",
        ),
        (
            {"MAP1_D0": "-5", "MAP1_D1": "1"},
            "row 1 of d0 + d1 sums to -4, not 0\nhelp: d0's diagonal there should be -1",
        ),
    ],
)
def test_bad_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    maps = folder(tmp_path / "MAPs", **files)
    with pytest.raises(InputError) as caught:
        read_trace(TraceFile(maps, format=Format.MAP))
    assert message in str(caught.value)


def test_published_hours(shared_data: Path) -> None:
    day = shared_data / "rickypinci__BATCH" / "solver"
    twitter = statistics(read_trace(TraceFile(day / "Twitter" / "MAPs", dwell_s=20.0)))
    assert twitter.duration_s == 480
    assert 20 < twitter.mean_rps < 80
    assert read_trace(day / "NYS" / "MAPs" / "MAP3").duration_ns == s(3_600)
    packed = TraceFile(
        shared_data / "rickypinci__BATCH" / "traces" / "NY_traces.zip",
        format=Format.MAP,
        member="20181009",
        dwell_s=5.0,
    )
    assert read_trace(packed).duration_ns == s(15)
