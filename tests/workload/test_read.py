"""Recorded traces of every format, and what a user declares under `trace:`."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.units import NS_PER_S, s
from sloop.workload.generate import KINDS, Poisson, Spread, generated
from sloop.workload.link import link_from
from sloop.workload.parse import MissingCounts, SourceText, Unit, quick_counts, read_text
from sloop.workload.read import Format, TraceFile, is_maps, parse_disb, read_counts, read_maps, read_trace, trace_from
from sloop.workload.trace import statistics


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
    with pytest.raises(InputError, match=r"trace\.csv:3: second 1 has no count"):
        read_trace(path)
    assert list(read_trace(TraceFile(path, gaps=MissingCounts.FILL)).counts_per_s()) == [4, 4, 6]


@pytest.mark.parametrize("format_", [Format.AUTO, Format.COUNTS])
def test_counts_next_to_times_need_one_row_per_second(tmp_path: Path, format_: Format) -> None:
    """The Alibaba GenAI trace samples its rate every 57 s: it must not be read as one row per second."""
    path = written(tmp_path, "timestamp_anon,value\n1662859176,0.09\n1662859233,1\n", "qps.csv")
    with pytest.raises(InputError, match=r"qps\.csv:3: the first two rows are 57 s apart, but a trace has one count"):
        read_trace(TraceFile(path, format=format_, spread=Spread.POISSON))
    seconds = written(tmp_path, "time,requests\n2026-01-01 00:00:00,4\n2026-01-01 00:00:01,6\n", "s.csv")
    assert list(read_trace(TraceFile(seconds, format=format_)).counts_per_s()) == [4, 6]
    ms = written(tmp_path, "ts,requests\n0,4\n1000,6\n", "ms.csv")
    assert list(read_trace(TraceFile(ms, unit=Unit.MS, format=format_)).counts_per_s()) == [4, 6]
    stages = written(tmp_path, "start,requests\nmorning,4\nnoon,6\n", "stages.csv")
    assert list(read_trace(TraceFile(stages, format=format_)).counts_per_s()) == [4, 6]


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
        ("1\n2\n-3", {}, ":3: the count -3 is negative"),
        ("1 2", {"start_s": 2.0}, "start_s 2 is after the end\nhelp: the trace lasts 2 s"),
        ("1 2", {"start_s": 0.5}, "0.5 is not a whole second"),
        ("[1, true]", {}, "not a JSON list of numbers"),
        ("[" * 100_000, {}, "not a JSON list of numbers"),
        ("[]", {}, "the trace is empty"),
        ("{}", {}, "not a DISB workload"),
        ("a,b\n1,2\n", {}, ":1: it is not clear whether a, b holds counts or times"),
        ("1.5", {"format": Format.TIMESTAMPS, "start_s": 3.0}, "start_s 3 is after the end"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, options: dict[str, object], message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_trace(TraceFile(path, **options))  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_mean_rates_may_have_fractions_where_arrivals_are_drawn(tmp_path: Path) -> None:
    """INFless publishes request patterns as mean rates: under `spread: poisson` a count is a rate."""
    path = written(tmp_path, "\n".join(["0.25", "12.5", "3e-1", "4"] * 500) + "\n")
    trace = read_trace(TraceFile(path, spread=Spread.POISSON), seed=1)
    counts = trace.counts_per_s()
    assert (len(counts), "mean rates per second" in trace.provenance) == (2000, True)
    for place, rate in enumerate((0.25, 12.5, 0.3, 4)):
        assert sum(counts[place::4]) == pytest.approx(500 * rate, abs=4 * (500 * rate) ** 0.5)
    doubled = read_trace(TraceFile(path, spread=Spread.POISSON, scale=2.0), seed=1)
    assert sum(doubled.counts_per_s()) == pytest.approx(2 * 500 * 17.05, rel=0.05)


def test_whole_counts_are_drawn_as_before_where_they_could_be_rates(tmp_path: Path) -> None:
    whole, decimal = written(tmp_path, "3\n5\n"), tmp_path / "decimal.txt"
    decimal.write_text("3.0\n5.0\n")
    first, second = (read_trace(TraceFile(path, spread=Spread.POISSON), seed=1) for path in (whole, decimal))
    assert list(first.times_ns()) == list(second.times_ns())


@pytest.mark.parametrize("spread", [Spread.UNIFORM, Spread.EQUAL, Spread.BURST, Spread.EARLY])
def test_fractions_are_refused_where_counts_are_exact(tmp_path: Path, spread: Spread) -> None:
    with pytest.raises(
        InputError, match=r"2: 2.5 is not a whole number of requests\nhelp: if these are mean rates, say `spread: poi"
    ):
        read_trace(TraceFile(written(tmp_path, "1\n2.5\n"), spread=spread))


def workload(*clients: tuple[str, dict[str, object]], time: float = 2.0) -> SourceText:
    entries = [{"id": name, "load": load, "client": {"name": name}} for name, load in clients]
    return SourceText(json.dumps({"time": time, "tasks": entries}), "w.json")


Client = tuple[str, dict[str, object]]
PERIODIC: Client = ("steady", {"type": "periodic", "frequency": 2, "priority": 0})
TRACED: Client = ("traced", {"type": "trace", "trace": [0, 250, 9_000]})
CLOSED: Client = ("greedy", {"type": "continuous"})
POISSON: Client = ("random", {"type": "poisson", "frequency": 1_000})


def test_clients_are_merged_in_order_and_closed_loops_left_out() -> None:
    trace = parse_disb(workload(PERIODIC, TRACED, CLOSED), client="", seed=0)
    assert [at_ns // 1_000_000 for at_ns in trace.times_ns()] == [0, 0, 250, 500, 1_000, 1_500]
    assert trace.provenance.endswith("clients steady, traced, closed-loop clients left out: greedy")
    assert trace.duration_ns == 2_000_000_000


def test_a_clients_arrivals_do_not_depend_on_the_other_clients() -> None:
    alone = list(parse_disb(workload(PERIODIC, POISSON), client="random", seed=3).times_ns())
    together = list(parse_disb(workload(POISSON, TRACED), client="", seed=3).times_ns())
    assert set(alone) <= set(together)
    assert len(alone) == pytest.approx(2_000, rel=0.1)


@pytest.mark.parametrize(
    ("text", "client", "message"),
    [
        (workload(CLOSED), "", "all clients are closed loops (continuous)"),
        (workload(PERIODIC), "stead", "no client 'stead'\nhelp: did you mean 'steady'?"),
        (
            workload(("x", {"type": "priodic"})),
            "",
            "tasks[x]: unknown type of load 'priodic'\nhelp: did you mean 'periodic'?",
        ),
        (
            workload(("x", {"type": "periodic"})),
            "",
            "tasks[x].frequency: must be a number above 0 and at most 10,000,000, not 0",
        ),
        (workload(("x", {"type": "trace"})), "", "tasks[x]: the trace is empty"),
        (workload(("x", {"type": "trace", "trace": [-1]})), "", "trace[0]: must be a number of at least 0, not -1"),
        (workload(("x", {"type": "trace", "trace": [2, 1]})), "", "the trace is not sorted"),
        (workload(PERIODIC, time=-1), "", "time: must be a number above 0 and at most 10,000,000, not -1"),
        (workload(("x", {"type": "poisson", "frequency": 1e7}), time=1e7), "", "over 50,000,000 arrivals"),
        (SourceText('{"time": 1}', "w.json"), "", "not a DISB workload"),
        (SourceText('{"time": "1", "tasks": []}', "w.json"), "", "Expected `float`, got `str` - at `$.time`"),
    ],
)
def test_bad_workloads(text: SourceText, client: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_disb(text, client=client, seed=0)
    assert message in str(caught.value)
    assert caught.value.where.startswith("w.json")


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
    assert is_maps(maps / "MAP10_D1")
    assert not is_maps(maps / "MAP2")
    assert not is_maps(maps / "notes")
    assert read_trace(maps / "MAP10_D1").provenance.startswith("fitted: MAP matrices of MAP10_D1, 1 of 3600 s")
    trace = read_trace(TraceFile(maps / "MAP10", dwell_s=10.0, scale=0.5))
    assert len(list(trace.times_ns())) == pytest.approx(1_000, rel=0.1)


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
            "MAP1_D1:1: must be a number of at least -10,000,000 and at most 10,000,000, not nan",
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


HERE = Path(__file__).parent


def test_a_kind_and_a_file(tmp_path: Path) -> None:
    declared = trace_from({"kind": "poisson", "rate": 100}, seed=7, duration_s=5, folder=tmp_path)
    assert list(declared.times_ns()) == list(generated(Poisson(100.0), seed=7, duration_ns=s(5)).times_ns())
    (tmp_path / "trace.txt").write_text("1 2 3 4")
    spec = {"file": "trace.txt", "scale": 2, "start_s": 1, "duration_s": 2}
    assert list(trace_from(spec, seed=7, duration_s=None, folder=tmp_path).counts_per_s()) == [4, 6]
    assert trace_from({"file": "trace.txt"}, seed=7, duration_s=2.5, folder=tmp_path).duration_ns == s(2.5)
    assert trace_from({"file": "trace.txt"}, seed=7, duration_s=60, folder=tmp_path).duration_ns == s(4)


def test_shapes(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("1 2 3 4")
    spec = {"file": "trace.txt", "repeat": 3, "compress": 2}
    trace = trace_from(spec, seed=0, duration_s=None, folder=tmp_path)
    assert trace.duration_ns == s(6)
    assert list(trace.counts_per_s()) == [3, 7] * 3
    made = trace_from(
        {"kind": "equal", "rate": 10, "scale": 2, "repeat": 2, "compress": 4}, seed=0, duration_s=6, folder=tmp_path
    )
    assert made.duration_ns == s(6)
    assert len(list(made.times_ns())) == 10 * 12 * 2 * 2
    assert len(
        list(trace_from({"kind": "equal", "rate": 1000, "thin": 0.1}, seed=0, duration_s=5, folder=tmp_path).times_ns())
    ) == (pytest.approx(500, rel=0.2))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "trace: a trace has either `kind` or `file`"),
        ({"kind": "poisson", "file": "x"}, "trace: a trace has either `kind` or `file`"),
        ({"kind": ["poisson"]}, "trace.kind: must be the name of a kind of trace, not a list"),
        ({"kind": "diurnl"}, "help: did you mean 'diurnal'?"),
        ({"kind": "poisson", "rate": 1, "scal": 2}, "trace.scal: unknown key 'scal'\nhelp: did you mean 'scale'?"),
        (
            {"kind": "poisson", "rate": 1, "repeat": 0},
            "trace.repeat: must be a whole number of at least 1 and at most 1,000,000, not 0",
        ),
        ({"kind": "poisson", "rate": 1, "duration_s": 1e12}, "trace.duration_s"),
        (
            {"kind": "poisson", "rate": 1, "duration_s": 0},
            "trace.duration_s: must be a number above 0 and at most 100,000,000, not 0",
        ),
        ({"kind": "poisson", "rate": 1}, "trace: the trace has no duration"),
        (
            {"kind": "poisson", "rate": 1, "duration_s": 1e6, "repeat": 200},
            "trace.duration_s: must be a number of at least 0 and at most 100,000,000, not 200000000",
        ),
        ({"kind": "poisson", "rate": 1, "duration_s": 1e6, "compress": 1e-6}, "trace.duration_s: must be"),
        ({"file": "none.txt"}, "no such file"),
        ({"file": 5}, "trace.file: must be text, not 5"),
        ({"file": "x", "gap": "fill"}, "unknown key 'gap'\nhelp: did you mean 'gaps'?"),
        ({"file": "x", "gaps": "ignore"}, "trace.gaps: must be one of refuse, fill, not 'ignore'"),
    ],
)
def test_what_is_wrong_is_said(spec: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        trace_from(spec, seed=0, duration_s=None, folder=HERE)
    assert message in str(caught.value)


VALUES = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=4) | st.lists(st.floats(-2, 9))
KEYS = st.sampled_from(
    ["rate", "rates", "each_s", "scale", "thin", "repeat", "compress", "cv", "mean_s", "d0", "d1", "on_s"]
)


@settings(max_examples=300)
@given(st.sampled_from([*KINDS, "x"]), st.dictionaries(KEYS, VALUES, max_size=4), st.floats())
def test_only_input_errors_escape_a_declaration(kind: str, rest: dict[str, object], duration_s: float) -> None:
    try:
        trace_from({"kind": kind, **rest}, seed=0, duration_s=duration_s, folder=HERE)
    except InputError as error:
        assert error.where  # noqa: PT017
        assert error.help or "must be" in error.what  # noqa: PT017


def documented(heading: str) -> list[dict[str, object]]:
    """The examples below a heading of the manual."""
    text = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    block = text.partition(f"## {heading}\n")[2].partition("```yaml\n")[2].partition("```")[0]
    examples: list[dict[str, object]] = yaml.safe_load(block)
    assert examples, heading
    return examples


@pytest.mark.parametrize("spec", documented("Generated traces"), ids=lambda spec: spec["kind"])
def test_the_manual_s_kinds_generate(spec: dict[str, object]) -> None:
    assert sum(trace_from(spec, seed=0, duration_s=60, folder=HERE).counts_per_s()) > 0


def test_the_manual_shows_every_kind() -> None:
    assert sorted(str(spec["kind"]) for spec in documented("Generated traces")) == sorted(KINDS)


@pytest.mark.parametrize("spec", documented("Recorded traces"), ids=lambda spec: spec["file"])
def test_the_manual_s_keys_for_files_are_known(spec: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"no such file|neither a folder nor an archive"):
        trace_from(spec, seed=0, duration_s=None, folder=HERE / "none")


@pytest.mark.parametrize("spec", documented("Links"), ids=str)
def test_the_manual_s_links(spec: dict[str, object]) -> None:
    if "file" in spec:
        with pytest.raises(InputError, match="no such file"):
            link_from(spec, seed=0, folder=HERE / "none")
    else:
        assert link_from(spec, seed=0, folder=HERE).transfer_ns(0, 100_000) > 0
