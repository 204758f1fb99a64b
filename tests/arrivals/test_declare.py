from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.arrivals.declare import trace_from
from sloop.arrivals.generate import KINDS, Poisson, generated
from sloop.errors import InputError
from sloop.units import s

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
        ({"kind": ["poisson"]}, "trace.kind: unknown kind of trace ['poisson']"),
        ({"kind": "diurnl"}, "help: did you mean 'diurnal'?"),
        ({"kind": "poisson", "rate": 1, "scal": 2}, "trace: unknown key 'scal'\nhelp: did you mean 'scale'?"),
        ({"kind": "poisson", "rate": 1, "repeat": 0}, "trace.repeat: 0.0 is out of range"),
        ({"kind": "poisson", "rate": 1, "duration_s": 1e12}, "trace.duration_s"),
        ({"kind": "poisson", "rate": 1, "duration_s": 0}, "trace.duration_s: 0.0 is out of range"),
        ({"kind": "poisson", "rate": 1}, "trace: no duration"),
        ({"file": "none.txt"}, "no such file"),
        ({"file": 5}, "trace.file: 5 is not text"),
        ({"file": "x", "gap": "fill"}, "unknown key 'gap'\nhelp: did you mean 'gaps'?"),
        ({"file": "x", "gaps": "ignore"}, "trace.gaps: 'ignore' is not one of the choices"),
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
        assert error.help  # noqa: PT017
