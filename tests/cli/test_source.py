from pathlib import Path

import pytest

from sloop.cli.source import trace_at
from sloop.errors import InputError
from sloop.units import s


def test_a_mapping_makes_a_trace() -> None:
    trace = trace_at("{kind: equal, rate: 10}", seed=1, duration_s=2)
    assert list(trace.times_ns()) == [s(0.1) * place for place in range(20)]


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("count\n3\n0\n5\n")
    assert list(trace_at(str(tmp_path / "counts.csv"), seed=1, duration_s=None).counts_per_s()) == [3, 0, 5]


def test_a_scenarios_trace_and_duration_are_taken(app: Path) -> None:
    app.write_text(app.read_text() + "trace: {kind: equal, rate: 5}\nduration_s: 3\n")
    assert sum(trace_at(str(app), seed=1, duration_s=None).counts_per_s()) == 15
    assert sum(trace_at(str(app), seed=1, duration_s=1).counts_per_s()) == 5


@pytest.mark.parametrize("source", ["{kind: poissn, rate: 1}", "{kind: [", "nowhere.txt", "nowhere.yaml", "{}"])
def test_what_is_no_trace_is_refused(source: str) -> None:
    with pytest.raises(InputError):
        trace_at(source, seed=1, duration_s=1)
