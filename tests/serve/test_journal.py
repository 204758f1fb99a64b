"""The log of a server on disk: segments that end, are compressed and deleted, a disk that is full, samples."""

import contextlib
import gzip
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs

from sloop.actions import End, StartBatch, StartWorker
from sloop.app.load import load_application
from sloop.errors import InputError, MachineError
from sloop.events import WOKE, Event, Finished, WorkerReady
from sloop.runlog import Header, ProcessorTime, Record, Unlogged, read_log
from sloop.runlog.fold import DeploymentState
from sloop.runlog.run import Kept
from sloop.runlog.segments import next_run, segment_path, segments_in
from sloop.runlog.summary import RunSummary
from sloop.serve import journal as module
from sloop.serve.archive import archive, expired
from sloop.serve.journal import Journal, LogLimits, Observed
from sloop.serve.server import locked
from sloop.systems.replay import beginning_of, header_of, replay_log, with_beginning
from sloop.systems.setup import build, set_up
from sloop.systems.snapshot import save
from sloop.units import ms, s
from sloop.vocabulary import Outcome, Request, RequestId
from tests.serve.test_local_backend import is_alive

HEADER = Header(origin="live", name="demo", system="static", definitions={})
DECLARED = {
    "name": "one",
    "slo_ms": 900,
    "stages": [{"name": "a", "profile": "ResNet-T"}],
    "system": {"name": "hpa"},
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
}
SMALL = LogLimits(bytes_max=2**20)
"""Segments of 64 KiB."""


class Server:
    """A core with a journal, as a driver runs them."""

    def __init__(self, folder: Path, limits: LogLimits = SMALL, *, has_snapshots: bool = True) -> None:
        made = set_up(load_application(DECLARED))
        self.core = made.core()
        self.fold = DeploymentState(made.parts(), nodes=made.deployment.cluster, build=build, kept=Kept(seconds=1))
        observed = Observed(self.core, self.fold) if has_snapshots else None
        self.journal = Journal(folder, header_of(made, origin="live"), limits, observed)
        self.records: list[tuple[int, Record]] = []
        self.number, self.now_ns, self.running = 0, 0, StartBatch
        for action in self.handle(WOKE):
            if isinstance(action, StartWorker):
                self.handle(WorkerReady(action.worker))

    def handle(self, event: Event) -> list[Any]:
        """One event, a millisecond after the one before; returns the actions."""
        self.now_ns += ms(1)
        actions = self.core.handle(self.now_ns, event)
        records: list[Record] = [event, *actions]
        for record in records:
            self.fold.append(self.now_ns, record)
        self.journal.extend([(self.now_ns, record) for record in records])
        self.records += [(self.now_ns, record) for record in records]
        return actions

    def serve(self, count: int, *, late: bool = False, name: str = "", trace: str = "") -> None:
        """Serve requests, one after the other."""
        for _ in range(count):
            self.number += 1
            times_ns = self.now_ns, self.now_ns, self.now_ns + ms(900)
            request = Request(RequestId(self.number), *times_ns, client_id=name, trace=trace)
            (start,) = (each for each in self.handle(request) if isinstance(each, StartBatch))
            self.now_ns += ms(940) if late else 0
            self.handle(Finished(start.batch, start.replica, ms(1)))

    def settle(self, until: Callable[[], bool]) -> None:
        """Flush as a server does, until something has happened."""
        for _ in range(400):
            self.journal.flush()
            if until():
                return
            time.sleep(0.01)
        raise AssertionError("it did not happen")

    def run_to_segment(self, number: int) -> None:
        """Serve until a segment has begun."""
        for present in range(self.journal.segment, number):
            self.serve(600)
            self.settle(lambda present=present: self.journal.segment > present)  # type: ignore[misc]


def numbers(folder: Path) -> list[int]:
    return [segment.number for segment in segments_in(folder)]


# Segments


def test_a_run_in_segments_is_read_back_whole(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run_to_segment(3)
    server.serve(10)
    server.journal.close()
    server.journal.close()
    log = read_log(tmp_path)
    assert numbers(tmp_path) == [1, 2, 3]
    assert log.is_whole
    assert log.missing == ()
    assert list(log) == server.records


def test_what_the_servers_processes_took_is_noted_where_something_has_happened(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HEADER)
    for now_ns in (1, 2):
        journal.extend([(now_ns, WOKE)])
        journal.flush(4 + now_ns)
        journal.flush(9 + now_ns)
    journal.close()
    assert list(read_log(tmp_path)) == [(1, WOKE), (1, ProcessorTime(5)), (2, WOKE), (2, ProcessorTime(6))]


def test_a_segment_ends_when_it_is_to_be_taken_away(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.serve(2)
    server.journal.flush()
    assert server.journal.segment == 1
    server.journal.reopen()
    server.settle(lambda: server.journal.segment == 2)
    server.serve(2)
    server.settle(lambda: True)
    server.journal.close()
    assert numbers(tmp_path) == [1, 2], "one more for one order"
    assert list(read_log(tmp_path)) == server.records


def test_compressed_segments_are_read_like_others_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run_to_segment(4)
    server.journal.close()
    active = segments_in(tmp_path)[-1].path
    archive(tmp_path, active, 2**30, 0, time.time())
    size = active.stat().st_size + sum(len(gzip.decompress(path.read_bytes())) for path in tmp_path.glob("*.gz"))
    assert [segment.path.suffix == ".gz" for segment in segments_in(tmp_path)] == [True, True, True, False]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 0.5 * size
    assert list(read_log(tmp_path)) == server.records
    two = sum(segment.path.stat().st_size for segment in segments_in(tmp_path)[2:])
    archive(tmp_path, active, two, 0, time.time())
    log = read_log(tmp_path)
    assert numbers(tmp_path) == [3, 4]
    assert list(log) == [row for row in server.records if row[0] >= log.header.from_ns]
    (missing,) = log.missing
    assert missing.startswith(f"the log begins {log.header.from_ns / 1e9:.3f} s after the start of the run")


def test_old_segments_are_deleted_whatever_their_size(tmp_path: Path) -> None:
    paths = [segment_path(tmp_path, "20260101T000000000Z", number) for number in (1, 2, 3)]
    for age_s, path in zip((300, 200, 100), paths, strict=True):
        path.write_bytes(b"x")
        os.utime(path, (1000 - age_s, 1000 - age_s))
    assert expired(segments_in(tmp_path), 2**30, 150, 1000) == paths[:2]
    assert expired(segments_in(tmp_path), 2**30, 0, 1000) == []
    assert expired(segments_in(tmp_path), 1, 0, 1000) == paths[:2]


def test_a_compressed_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run_to_segment(2)
    server.journal.close()
    archive(tmp_path, segments_in(tmp_path)[-1].path, 2**30, 0, time.time())
    path = segments_in(tmp_path)[0].path
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(InputError, match="compressed file is damaged"):
        list(read_log(path))


def test_the_log_of_an_earlier_run_stays_and_is_named(tmp_path: Path) -> None:
    for _ in range(2):
        server = Server(tmp_path)
        server.serve(1)
        server.journal.close()
    log = read_log(tmp_path)
    assert list(log) == server.records
    assert "1 earlier run can be read by name" in log.missing[0]
    assert list(read_log(segments_in(tmp_path)[0].path)) == server.records
    segments_in(tmp_path)[0].path.write_text('{"sloop_log":2}\n')
    assert not read_log(tmp_path).missing, "this sloop cannot read it"


class SetBack(datetime):
    """A clock that was set back by a year since the run before."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "SetBack":
        return cls(2025, 11, 29, 1, 2, 3, 456_789, tzinfo=tz)


def test_runs_are_in_their_order_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run is the one that is read, and the first the one that is deleted."""
    for each in range(4):
        if each:
            monkeypatch.setattr(module, "datetime", SetBack)
        Journal(tmp_path, structs.replace(HEADER, name=f"run {each}"), SMALL).close()
    runs = [segment.run for segment in segments_in(tmp_path)]
    assert runs == sorted(set(runs))
    assert read_log(tmp_path).header.name == "run 3"
    found = [read_log(segment.path).header.name for segment in segments_in(tmp_path)]
    assert found == ["run 0", "run 1", "run 2", "run 3"]
    paths = [segment.path for segment in segments_in(tmp_path)]
    archive(tmp_path, paths[-1], 2 * paths[-1].stat().st_size, 0, time.time())
    assert [read_log(segment.path).header.name for segment in segments_in(tmp_path)][-1] == "run 3"


@pytest.mark.parametrize(
    ("last", "following"),
    [
        ("20261129T010203456Z", "20261129T010203457Z"),
        ("20261231T235959999Z", "20270101T000000000Z"),
        ("99991231T235959999Z", "99991231T235959999Z0"),
        ("99991231T235959999Z0", "99991231T235959999Z00"),
        ("20251129T010203455Z", "20251129T010203456Z"),
        ("", "20251129T010203456Z"),
    ],
)
def test_the_name_of_a_run_sorts_after_those_before(tmp_path: Path, last: str, following: str) -> None:
    if last:
        segment_path(tmp_path, last, 1).touch()
    assert next_run(tmp_path, SetBack.now(UTC)) == following
    segment_path(tmp_path, following, 1).touch()
    assert [segment.run for segment in segments_in(tmp_path)] == [*([last] if last else []), following]


def test_a_segment_is_no_younger_than_those_after_it(tmp_path: Path) -> None:
    """The clock was wrong, far ahead, when the first one was written."""
    paths = [segment_path(tmp_path, "20261129T010203456Z", number) for number in (1, 2, 3)]
    for path, written_s in zip(paths, (10_000, 700, 900), strict=True):
        path.write_bytes(b"x")
        os.utime(path, (written_s, written_s))
    assert expired(segments_in(tmp_path), 2**30, 150, 1000) == paths[:2]


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no log in this folder"):
        read_log(tmp_path)


# What goes on from a snapshot


def test_every_segment_replays_from_its_snapshot(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run_to_segment(3)
    server.serve(20)
    server.journal.close()
    for segment in segments_in(tmp_path)[1:]:
        log = read_log(segment.path)
        assert log.header.has_snapshot
        core, fold = beginning_of(log)
        played = replay_log(log, core)
        assert played.difference is None
        assert played.actions > 20
        for now_ns, record in log:
            fold.append(now_ns, record)
        assert fold.only.open == {}
    summary = RunSummary(set_up(load_application(DECLARED)).parts()).fold(with_beginning(log))
    assert summary.requests == sum(isinstance(record, Request) for _, record in log)
    assert sum(summary.batch_sizes().values()) == summary.requests


def test_a_segment_without_a_snapshot_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path, has_snapshots=False)
    server.run_to_segment(2)
    server.journal.close()
    log = read_log(segments_in(tmp_path)[1].path)
    assert list(log) == [row for row in server.records if row[0] >= log.header.from_ns]
    with pytest.raises(InputError, match="segment 2 has no snapshot"):
        beginning_of(log)
    assert read_log(tmp_path).is_whole


def test_state_that_cannot_be_saved_costs_the_snapshot_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    object.__setattr__(server.core, "secret", lambda: None)
    server.run_to_segment(2)
    server.serve(1)
    server.journal.close()
    assert "segment 2 of the log has no snapshot: .secret is the function" in caplog.text
    assert list(read_log(tmp_path)) == server.records


# The disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this machine")
def forks() -> list[int]:
    """The process ids of the children that have not become another program."""
    own = Path("/proc/self/cmdline").read_bytes()
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes() == own]


def test_a_next_server_has_folder_and_ports_while_a_snapshot_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What writes it is a fork of the server, which may be killed meanwhile."""
    may_write = tmp_path / "go"

    def slow(*arguments: Any, **others: Any) -> Any:  # those of `save`
        while not may_write.exists():
            time.sleep(0.01)
        return save(*arguments, **others)

    monkeypatch.setattr(module, "save", slow)
    with locked(tmp_path / "state"), socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = Server(tmp_path / "state" / "log")
        server.serve(600)
        server.settle(lambda: len(forks()) == 1)
        fds = Path(f"/proc/{forks()[0]}/fd")

        def left() -> int:
            """How many files the fork has open; it closes them meanwhile."""
            found = set()
            for each in fds.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.add(os.readlink(each))
            return len(found)

        server.settle(lambda: left() == 2)
    with locked(tmp_path / "state"), socket.create_server(("127.0.0.1", port)):
        assert server.journal.segment == 1
    may_write.touch()
    server.settle(lambda: server.journal.segment == 2)
    server.journal.close()
    assert read_log(tmp_path / "state" / "log").is_whole
    beginning_of(read_log(segments_in(tmp_path / "state" / "log")[-1].path))


FORKING: Final = """
import sys, time
from pathlib import Path
from sloop.serve import journal
from tests.serve.test_journal import Server, forks

journal.save = lambda *_, **__: time.sleep(600)
server = Server(Path(sys.argv[1]))
server.serve(600)
server.settle(lambda: len(forks()) == 1)
print(*forks(), flush=True)
time.sleep(600)
"""


def test_what_writes_a_snapshot_ends_with_the_server(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        server.kill()
    for _ in range(1000):
        if not is_alive(str(child)):
            return
        time.sleep(0.01)
    raise AssertionError("it writes on")


def test_a_full_disk_leaves_a_gap_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    server = Server(tmp_path)
    server.serve(5)
    server.settle(lambda: server.journal._writer is not None and not server.journal._writer._backlog_bytes)
    before = len(server.records)
    writer = server.journal._writer
    assert writer is not None
    kept, writer._fd = writer._fd, os.open("/dev/full", os.O_WRONLY)
    os.close(kept)
    server.serve(7)
    server.settle(lambda: server.journal.segment == 2)
    lost = len(server.records) - before
    assert server.journal.lost is None
    assert server.journal.lost_records == lost, "of the whole run"
    server.serve(3)
    server.journal.close()
    assert "the event log has a gap from now on, the server continues" in caplog.text
    log = read_log(tmp_path)
    assert log.header.segment == 2
    assert log.header.lost is not None
    assert log.header.lost.records == lost
    assert f"{lost} records between" in log.missing[0]
    assert "No space left on device" in log.missing[0]
    assert "1 earlier segment of the run can be read by name" in log.missing[1]
    assert list(log) == server.records[before + lost :]
    core, _ = beginning_of(log)
    assert replay_log(log, core).difference is None
    assert list(read_log(segments_in(tmp_path)[0].path)) == server.records[:before]


def test_a_disk_that_is_too_slow_costs_records_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG_BYTES_MAX", 0)
    server = Server(tmp_path)
    server.serve(5)
    server.journal.flush()
    assert server.journal.lost is not None
    assert server.journal.lost.records == len(server.records)
    assert server.journal.lost.why == "the disk is too slow"
    server.journal.close()


def test_a_folder_that_cannot_be_written_is_an_error_with_help(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(MachineError, match="cannot be written") as caught:
        Journal(tmp_path / "log", HEADER)
    assert "{log_bytes: 0}" in caught.value.help


# Samples


def test_a_sample_keeps_all_that_missed_all_decisions_and_exact_counts(tmp_path: Path) -> None:
    server = Server(tmp_path, LogLimits(sample=0.1))
    server.serve(300)
    server.serve(5, late=True)
    server.journal.flush()
    server.handle(WOKE)
    server.journal.close()
    log = read_log(tmp_path)
    rows = list(log)
    ends = [record for _, record in rows if isinstance(record, End)]
    assert sum(end.outcome is Outcome.LATE for end in ends) == 5
    served = sum(end.outcome is Outcome.SERVED for end in ends)
    assert 10 <= served <= 60
    assert sum(record.served for _, record in rows if isinstance(record, Unlogged)) == 300 - served
    about = (Request, StartBatch, Finished, End, Unlogged)
    assert [row for row in rows if not isinstance(row[1], about)] == [
        row for row in server.records if not isinstance(row[1], about)
    ]
    kept = {record.id for _, record in rows if isinstance(record, Request)}
    assert [row for row in rows if not isinstance(row[1], Unlogged)] == [
        row for row in server.records if not is_about_others(row[1], kept, server.records)
    ]
    summary = RunSummary(set_up(load_application(DECLARED)).parts()).fold(log)
    assert summary.requests == 305
    assert sum(second.served for second in summary.seconds()) == 300
    assert "only 10.000% are in the log" in log.missing[0]


def is_about_others(record: Record, kept: set[RequestId], records: list[tuple[int, Record]]) -> bool:
    """Whether a record is about requests that are not kept."""
    batches = {each.batch: each.requests for _, each in records if isinstance(each, StartBatch)}
    if isinstance(record, Finished):
        return not kept.intersection(batches[record.batch])
    if isinstance(record, StartBatch):
        return not kept.intersection(record.requests)
    if isinstance(record, Request | End):
        return (record.id if isinstance(record, Request) else record.request) not in kept
    return False


def test_a_request_that_stays_long_is_written_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_S_MAX", 0.5)
    server = Server(tmp_path, LogLimits(sample=0.0))
    server.number += 1
    request = Request(RequestId(1), server.now_ns, server.now_ns, server.now_ns + s(900))
    (start,) = (each for each in server.handle(request) if isinstance(each, StartBatch))
    for _ in range(700):
        server.handle(WOKE)
    server.handle(Finished(start.batch, start.replica, ms(1)))
    server.journal.close()
    assert list(read_log(tmp_path)) == server.records
