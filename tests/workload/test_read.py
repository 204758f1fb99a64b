import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.units import NS_PER_S, s
from sloop.workload.archive import read_text
from sloop.workload.cells import Gaps, Unit, quick_counts
from sloop.workload.read import Format, TraceFile, read_counts, read_trace
from sloop.workload.spread import Spread
from sloop.workload.stats import statistics


def written(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_counts_in_text(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "3 0\n5\n"), seed=1)
    assert list(trace.counts_per_s()) == [3, 0, 5]
    assert trace.duration_ns == 3 * NS_PER_S
    assert trace.provenance.startswith("measured: trace.txt")
    assert list(trace.times_ns()) == list(read_trace(tmp_path / "trace.txt", seed=1).times_ns())
    assert list(trace.times_ns()) != list(read_trace(tmp_path / "trace.txt", seed=2).times_ns())


def test_counts_are_cut_then_scaled(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(map(str, range(100))))
    trace = read_trace(TraceFile(path, start_s=10, duration_s=4.0, scale=2.0))
    assert list(trace.counts_per_s()) == [20, 22, 24, 26]
    half = read_trace(TraceFile(path, start_s=10, duration_s=1.5, spread=Spread.EQUAL))
    assert half.duration_ns == s(1.5)
    assert list(half.counts_per_s()) == [10, 6]
    assert list(read_trace(TraceFile(path, start_s=98, duration_s=50.0)).counts_per_s()) == [98, 99]


@pytest.mark.parametrize("spread", [Spread.UNIFORM, Spread.EQUAL])
def test_counts_are_known_without_a_walk(tmp_path: Path, spread: Spread) -> None:
    trace = read_trace(TraceFile(written(tmp_path, "3 0 5 9"), spread=spread, scale=1.5))
    assert trace.counted is not None
    assert list(trace.counts_per_s()) == list(replace(trace, counted=None).counts_per_s()) == [4, 0, 8, 13]
    assert read_trace(TraceFile(tmp_path / "trace.txt", spread=Spread.BURST)).counted is None


def test_the_counts_of_a_file(tmp_path: Path) -> None:
    assert list(read_counts(TraceFile(written(tmp_path, "3 0\n5\n"), start_s=1))) == [3, 0, 5]
    with pytest.raises(InputError, match=r"trace\.txt:2"):
        read_counts(TraceFile(written(tmp_path, "3\n-1\n")))


def test_counts_in_csv_with_gaps(tmp_path: Path) -> None:
    path = written(tmp_path, "second,requests\n0,4\n1,\n2,6\n", "trace.csv")
    with pytest.raises(InputError, match=r"trace\.csv:3: a gap: second 1 has no count"):
        read_trace(path)
    assert list(read_trace(TraceFile(path, gaps=Gaps.FILL)).counts_per_s()) == [4, 4, 6]


def test_timestamps_and_gaps(tmp_path: Path) -> None:
    path = written(tmp_path, "0.5\n1.25\n")
    expected = [s(0.5), s(1.25)]
    assert list(read_trace(TraceFile(path, format=Format.TIMESTAMPS)).times_ns()) == expected
    assert list(read_trace(written(tmp_path, "[0.5, 0.75]", "gaps.json")).times_ns()) == expected
    csv = written(tmp_path, "id,arrival\n1,500\n2,1250\n", "trace.csv")
    assert list(read_trace(TraceFile(csv, unit=Unit.MS)).times_ns()) == expected
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(csv.read_bytes()))
    assert list(read_trace(TraceFile(packed, unit=Unit.MS)).times_ns()) == expected
    assert list(read_trace(TraceFile(packed, unit=Unit.MS, start_s=1.0)).times_ns()) == [s(0.25)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "the trace is empty"),
        ("1 2 x", {}, ":1: 'x' is not a number"),
        ("1\n2\n-3", {}, ":3: -3 requests are fewer than none"),
        ("1 2", {"start_s": 2.0}, "start_s 2 is beyond the end\nhelp: the trace lasts 2 s"),
        ("1 2", {"start_s": 0.5}, "0.5 is not a whole second"),
        ("[1, true]", {}, "not a JSON list of numbers"),
        ("[" * 100_000, {}, "not a JSON list of numbers"),
        ("[]", {}, "the trace is empty"),
        ("{}", {}, "not a DISB workload"),
        ("a,b\n1,2\n", {}, ":1: whether a, b holds counts or times is not clear"),
        ("1.5", {"format": Format.TIMESTAMPS, "start_s": 3.0}, "start_s 3 is beyond the end"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, options: dict[str, object], message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_trace(TraceFile(path, **options))  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(alphabet='0123456789 .,-+e\n[]{}":timeasknTZ', max_size=60),
    st.sampled_from(list(Format)),
    st.sampled_from(["", "time"]),
)
def test_only_input_errors_escape(tmp_path: Path, text: str, format_: Format, column: str) -> None:
    path = written(tmp_path, text)
    try:
        trace = read_trace(TraceFile(path, format=format_, column=column))
        if trace.duration_ns < s(1_000):
            assert list(trace.times_ns()) == sorted(trace.times_ns())
    except InputError as error:
        assert str(path) in error.where  # noqa: PT017


TWITTER = "reconfigurable-ml-pipeline__web-service-datasets/dataset/twitter_trace/workload.tbz2"


def test_the_twitter_trace(shared_data: Path) -> None:
    """Figures of the data index: 1,899,061 s, mean 63.6, p99 245, max 388, 37,899 zeros."""
    counts = quick_counts(read_text(shared_data / TWITTER))
    assert counts is not None
    ranked = sorted(counts)
    assert len(counts) == 1_899_061
    assert sum(counts) / len(counts) == pytest.approx(63.6, abs=0.05)
    assert (ranked[int(0.99 * len(counts))], ranked[-1], ranked.count(0)) == (245, 388, 37_899)


def test_the_slice_that_ipa_replays(shared_data: Path) -> None:
    found = statistics(read_trace(TraceFile(shared_data / TWITTER, start_s=1_301_160, duration_s=1_200.0)))
    assert (found.requests, found.max_rps, found.zeros) == (119_762, 274, 0)


@pytest.mark.parametrize(
    ("file", "requests"),
    [
        ("Azure__AzurePublicDataset/data/AzureLLMInferenceTrace_conv.csv", 19_366),
        ("Azure__AzurePublicDataset/data/AzureLLMInferenceTrace_code.csv", 8_819),
        ("eth-easl__orion/artifact_evaluation/fig10/inter_arrival_times.json", 6_240),
        ("SJTU-IPADS__disb/benchmarks/workloads/A.json", 6_000),
    ],
)
def test_public_formats(shared_data: Path, file: str, requests: int) -> None:
    assert statistics(read_trace(shared_data / file)).requests == requests
