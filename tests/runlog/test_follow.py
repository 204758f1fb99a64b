"""The log of a running server, read while it is written."""

import gzip
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from sloop.errors import InputError
from sloop.events import WorkerReady
from sloop.runlog import Header, Record, header_line, snapshot_line
from sloop.runlog.follow import LogFollower
from sloop.runlog.segments import compressed_path, segment_path
from sloop.vocabulary import WorkerId

RUN = "20261130T000000000Z"


def lines(*workers: int) -> bytes:
    return msgspec.json.Encoder().encode_lines([(at, WorkerReady(WorkerId(at))) for at in workers])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogFollower]:
    with closing(LogFollower(tmp_path, RUN)) as follower:
        yield follower


def segment(folder: Path, number: int, *workers: int, rest: bytes = b"") -> Path:
    """A segment as a server writes it: later ones begin with a snapshot."""
    path = segment_path(folder, RUN, number)
    header = Header(origin="live", name="a", system="static", segment=number, has_snapshot=number > 1)
    path.write_bytes(header_line(header) + (snapshot_line(b"{}") if number > 1 else b"") + lines(*workers) + rest)
    return path


def numbers(records: list[tuple[int, Record]]) -> list[int]:
    return [at for at, _ in records]


def test_records_are_read_as_they_are_written_and_half_a_line_is_waited_for(log: LogFollower, tmp_path: Path) -> None:
    assert log.read() == []
    path = segment(tmp_path, 1, 1, 2)
    assert numbers(log.read()) == [1, 2]
    assert log.read() == []
    whole = lines(3)
    with path.open("ab") as file:
        file.write(whole[:7])
    assert log.read() == []
    with path.open("ab") as file:
        file.write(whole[7:] + lines(4))
    assert numbers(log.read()) == [3, 4]


def test_the_next_segment_is_read_after_the_last_records_of_the_one_before(log: LogFollower, tmp_path: Path) -> None:
    first = segment(tmp_path, 1, 1)
    assert numbers(log.read()) == [1]
    segment(tmp_path, 2, 3)
    with first.open("ab") as file:
        file.write(lines(2))
    assert numbers(log.read()) == [2]
    assert numbers(log.read()) == [3]
    assert log.header is not None
    assert log.header.segment == 2


def test_a_segment_whose_beginning_is_half_written_is_read_later(log: LogFollower, tmp_path: Path) -> None:
    path = segment_path(tmp_path, RUN, 1)
    path.write_bytes(b'{"sloop_log":5,')
    assert log.read() == []
    segment(tmp_path, 1, 1)
    assert numbers(log.read()) == [1]


def test_deleted_segments_are_passed_over_and_compressed_ones_are_read(log: LogFollower, tmp_path: Path) -> None:
    packed = segment(tmp_path, 4, 7)
    compressed_path(packed).write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    segment(tmp_path, 5, 8)
    assert numbers(log.read()) == [7]
    assert numbers(log.read()) == [8]


def test_a_call_reads_a_bounded_number_of_records(log: LogFollower, tmp_path: Path) -> None:
    segment(tmp_path, 1, *range(10))
    assert [numbers(log.read(4)) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


def test_a_damaged_line_names_its_file(log: LogFollower, tmp_path: Path) -> None:
    path = segment(tmp_path, 1, 1, rest=b"[2, {]\n")
    with pytest.raises(InputError) as error:
        log.read()
    assert error.value.where == str(path)


def test_a_segment_that_was_begun_again_is_read_anew(log: LogFollower, tmp_path: Path) -> None:
    file = segment(tmp_path, 1, 1)
    assert numbers(log.read()) == [1]
    file.unlink()
    assert log.read() == []
    segment(tmp_path, 1, 2)
    assert numbers(log.read()) == [2]
    assert log.read() == []
