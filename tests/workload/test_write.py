from pathlib import Path

import pytest

from sloop.errors import MachineError
from sloop.units import s
from sloop.workload.cells import Unit
from sloop.workload.generate import Poisson, generated
from sloop.workload.read import Format, TraceFile, read_trace
from sloop.workload.write import write_counts, write_times


def test_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    trace = generated(Poisson(300.0), seed=1, duration_ns=s(20))
    write_times(trace, tmp_path / "times.txt")
    write_counts(trace, tmp_path / "counts.txt")
    times = TraceFile(tmp_path / "times.txt", format=Format.TIMESTAMPS, unit=Unit.NS)
    assert read_trace(times).to_array() == trace.to_array()
    assert read_trace(tmp_path / "counts.txt").counts_per_s() == trace.counts_per_s()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        write_counts(generated(Poisson(1.0), seed=1, duration_ns=s(1)), tmp_path / "none" / "x")
