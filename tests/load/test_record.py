from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.load.record import BUFFER_BYTES, DTYPE, LAYOUT, Ending, RecordWriter, read_records

NS = st.integers(-(2**62), 2**62)
ROWS = st.lists(st.tuples(NS, NS, NS, st.integers(0, 999), st.sampled_from(list(Ending)), st.sampled_from([-1, 0, 1])))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROWS)
def test_what_is_written_is_read(tmp_path: Path, rows: list[tuple[int, int, int, int, Ending, int]]) -> None:
    with (tmp_path / "records").open("wb", buffering=0) as file:
        writer = RecordWriter(file)
        for row in rows:
            writer.write(*row)
        writer.flush()
    assert writer.written == len(rows)
    assert [tuple(row) for row in read_records(tmp_path / "records").tolist()] == rows


def test_buffers_are_flushed_when_full(tmp_path: Path) -> None:
    with (tmp_path / "records").open("wb", buffering=0) as file:
        writer = RecordWriter(file)
        for number in range(BUFFER_BYTES // LAYOUT.size + 1):
            writer.write(number, 1, 2, 200, Ending.ANSWERED, -1)
        assert (tmp_path / "records").stat().st_size == BUFFER_BYTES
        writer.flush()
    assert read_records(tmp_path / "records")["number"].tolist() == list(range(BUFFER_BYTES // LAYOUT.size + 1))


def test_the_two_layouts_are_one() -> None:
    assert DTYPE.itemsize == LAYOUT.size == 32
