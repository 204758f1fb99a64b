from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.units import s
from sloop.workload.declare import trace_from
from sloop.workload.generate import KINDS, Poisson, generated
from sloop.workload.link import link_from

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
    assert len(made.to_array()) == 10 * 12 * 2 * 2
    assert len(
        trace_from({"kind": "equal", "rate": 1000, "thin": 0.1}, seed=0, duration_s=5, folder=tmp_path).to_array()
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
            "trace.repeat: must be a whole number of at least 1 and at most 1e+06, not 0",
        ),
        ({"kind": "poisson", "rate": 1, "duration_s": 1e12}, "trace.duration_s"),
        (
            {"kind": "poisson", "rate": 1, "duration_s": 0},
            "trace.duration_s: must be a number above 0 and at most 1e+08, not 0",
        ),
        ({"kind": "poisson", "rate": 1}, "trace: no duration"),
        (
            {"kind": "poisson", "rate": 1, "duration_s": 1e6, "repeat": 200},
            "trace.duration_s: must be a number of at least 0 and at most 1e+08, not 200000000",
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


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*KINDS, "x"]), st.dictionaries(KEYS, VALUES, max_size=4), st.floats())
def test_only_input_errors_escape(kind: str, rest: dict[str, object], duration_s: float) -> None:
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
