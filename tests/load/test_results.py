"""Records of a load run and the result computed from them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.errors import MachineError
from sloop.load.results import (
    BUFFER_BYTES,
    DTYPE,
    LAYOUT,
    Ending,
    LoadResult,
    RecordWriter,
    join,
    read_records,
    summarise,
    write_jsonl,
)
from sloop.load.sent import SentWorks
from sloop.units import ms, s
from sloop.workload import Work

NS = st.integers(-(2**62), 2**62)
ROWS = st.lists(st.tuples(NS, NS, NS, st.integers(0, 999), st.sampled_from(list(Ending)), st.sampled_from([-1, 0, 1])))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


Row = tuple[int, int, int, int, int, int]
SLO_MS = 100
ENDED: dict[str, tuple[int, Ending]] = {
    "answered": (200, Ending.ANSWERED),
    "dropped": (504, Ending.ANSWERED),
    "rejected": (503, Ending.ANSWERED),
    "too many": (429, Ending.ANSWERED),
    "http 500": (500, Ending.ANSWERED),
    "http 400": (400, Ending.ANSWERED),
    "timeout": (0, Ending.TIMEOUT),
    "broken": (200, Ending.BROKEN),
    "overflow": (0, Ending.OVERFLOW),
}


def result(schedule: list[tuple[int, int]], records: list[Row], *, duration_s: float = 10.0) -> LoadResult:
    measured = join(np.array(records, dtype=DTYPE), np.array(schedule, dtype=np.int64).reshape(-1, 2))
    return summarise(measured, slo_ns=ms(SLO_MS), duration_s=duration_s, connections=1, wall_s=1.0)


def record(number: int, sent_ms: float, done_ms: float, kind: str = "answered", slo_met: int = -1) -> Row:
    return (number, ms(sent_ms), ms(done_ms), *ENDED[kind], slo_met)


def test_latency_runs_from_the_instant_due_and_includes_the_way_here() -> None:
    """Due at 10 ms with 60 ms elapsed, sent 5 ms late, answered at 40 ms: 30 + 60 = 90 ms; 11 ms more would be late."""
    found = result([(ms(10), ms(60)), (ms(10), ms(60))], [record(0, 15, 40), record(1, 15, 51, slo_met=0)])
    assert (found.ok, found.late, found.late_by_server) == (1, 1, 1)
    assert (found.p50_ms, found.max_ms) == (90, 101)
    assert (found.response_p50_ms, found.response_p99_ms) == (25, 36)
    assert (found.lag_p50_ms, found.lag_max_ms) == (5, 5)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 300), st.sampled_from(list(ENDED))), min_size=1))
def test_every_request_is_in_one_class(rows: list[tuple[int, int, str]]) -> None:
    rows.sort()
    schedule = [(ms(due_ms), 0) for due_ms, _, _ in rows]
    records = [record(number, due_ms, due_ms + took_ms, kind) for number, (due_ms, took_ms, kind) in enumerate(rows)]
    found = result(schedule, records[::-1])
    kinds = [kind for _, _, kind in rows]
    in_time = sum(kind == "answered" and took_ms <= SLO_MS for _, took_ms, kind in rows)
    assert found.sent == len(rows)
    assert found.ok == in_time
    assert found.late == kinds.count("answered") - in_time
    assert found.dropped == kinds.count("dropped")
    assert found.rejected == kinds.count("rejected") + kinds.count("too many")
    others = {"http 500", "http 400", "timeout", "broken", "overflow"}
    assert found.error_kinds == {kind: kinds.count(kind) for kind in others if kind in kinds}
    assert found.errors == sum(found.error_kinds.values())
    assert found.attainment == in_time / len(rows)
    assert found.goodput_rps == in_time / 10
    for name in ("sent", "ok", "late", "dropped", "rejected", "errors"):
        assert sum(getattr(row, name) for row in found.seconds) == getattr(found, name)
    assert [row.second for row in found.seconds] == sorted({due_ms // 1_000 for due_ms, _, _ in rows})


def test_nothing_answered_has_no_latency() -> None:
    found = result([(0, 0)], [record(0, 0, 5, "timeout")])
    assert (found.p50_ms, found.mean_ms, found.seconds[0].p99_ms) == (None, None, None)
    assert ("latency (from due time) p50 / p99 / max", "– / – / – ms") in found.rows()
    assert ("response (from sending) p50 / p99", "– / – ms") in found.rows()
    assert [label for label, _ in found.rows()][:3] == ["sent", "served in time", "late"]
    assert ("errors", "1 (timeout 1)") in found.rows()


def test_a_generator_to_blame_says_so() -> None:
    assert result([(0, 0)], [record(0, 9, 50)]).note == ""
    assert "lagged by 11.0 ms at p99" in result([(0, 0)], [record(0, 11, 50)]).note
    overflowed = result([(0, 0)], [record(0, 0, 0, "overflow")])
    assert "1 requests were not sent because all connections were busy" in overflowed.note
    assert overflowed.rows()[-1] == ("note", overflowed.note)


def test_nothing_sent() -> None:
    nothing = join(np.array([], dtype=DTYPE), np.zeros((0, 2), dtype=np.int64))
    empty = summarise(nothing, slo_ns=1, duration_s=1.0, connections=0, wall_s=1.0)
    assert (empty.sent, empty.attainment, empty.seconds) == (0, None, [])


def test_missing_records_are_noticed() -> None:
    with pytest.raises(MachineError, match="recorded 1 of 2 requests"):
        join(np.array([record(0, 0, 1)], dtype=DTYPE), np.zeros((2, 2), dtype=np.int64))
    with pytest.raises(MachineError, match="recorded 2 of 2 requests"):
        join(np.array([record(0, 0, 1)] * 2, dtype=DTYPE), np.zeros((2, 2), dtype=np.int64))


def test_a_line_for_each_request(tmp_path: Path) -> None:
    rows = [record(0, 1, 31), record(1, s(1) / 1e6, 1_200), record(2, 1_000, 1_010, "dropped")]
    measured = join(np.array(rows, dtype=DTYPE), np.array([(0, 0), (s(1), 0), (s(1), ms(5))], dtype=np.int64))
    write_jsonl(measured, tmp_path / "records.jsonl", slo_ns=ms(SLO_MS))
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["served", "late", "dropped"]
    assert lines[0] == {
        "id": 0, "due_ms": 0.0, "sent_ms": 1.0, "done_ms": 31.0, "elapsed_ms": 0.0, "latency_ms": 31.0,
        "outcome": "served", "ending": "answered", "status": 200,
    }  # fmt: skip
    with pytest.raises(MachineError, match="cannot be written"):
        write_jsonl(measured, tmp_path / "none" / "x", slo_ns=1)


def test_by_size_every_request_counts_once() -> None:
    works = [Work(2, 8), Work(1, 512), Work(2, 8), Work(1, 16)]
    schedule = np.zeros((4, 2), dtype=np.int64)
    records = [record(0, 0, 10), record(1, 0, 120), record(2, 0, 20, "dropped"), record(3, 0, 30)]
    measured = join(np.array(records, dtype=DTYPE), schedule)
    options = {"slo_ns": ms(SLO_MS), "duration_s": 1.0, "connections": 1, "wall_s": 1.0}
    found = summarise(measured, sent=SentWorks.of(works), **options)  # type: ignore[arg-type]
    assert (found.rows_sent, found.goodput_rows_per_s) == (6, 3.0)
    assert [(row.size, row.sent, row.ok, row.attainment) for row in found.sizes] == [
        (8, 2, 1, 0.5),
        (16, 1, 1, 1.0),
        (512, 1, 0, 0.0),
    ]
    assert [row.p99_ms for row in found.sizes] == [10, 30, 120]
    assert dict(found.rows())["goodput"] == "2.0 rps, 3.0 rows/s of 6 rows sent"
    same = summarise(measured, sent=SentWorks.of([Work(4)] * 4), **options)  # type: ignore[arg-type]
    assert (same.rows_sent, same.sizes) == (16, [])


def test_many_sizes_are_shown_in_classes() -> None:
    sent = SentWorks.of([Work(1, size) for size in (5, 6, 7, 8, 9, 10, 11, 12, 13)])
    assert sent.classes.tolist() == [6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert SentWorks.of([Work(1, 5), Work(1, 6)]).classes.tolist() == [5, 6]


def test_bodies_are_sent_in_turn_among_those_of_a_work() -> None:
    sent = SentWorks.of([Work(1, 8), Work(1, 9), Work(1, 8), Work(1, 8)])
    assert sent.bodies(2).tolist() == [0, 3, 0, 1]
    assert sent.ordered(np.array([1, 0])).sizes.tolist() == [9, 8]
