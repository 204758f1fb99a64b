import logging
import os
from pathlib import Path

import pytest

from sloop.errors import MachineError
from sloop.events import WOKE
from sloop.runlog import Header, read_log
from sloop.serve.folder import EARLIER, EVENTS, Journal, locked

HEADER = Header(origin="live", application={}, system="static")


def test_a_second_server_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "deep" / "state") as folder,
        pytest.raises(MachineError, match=rf"process {os.getpid()}\) uses this state folder") as caught,
        locked(folder),
    ):
        pass
    assert "--state" in caught.value.help
    with locked(folder):  # free again
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(MachineError, match="file/state: the state folder cannot be used"),
        locked(tmp_path / "file/state"),
    ):
        pass


def test_the_journal_is_a_log_and_keeps_the_previous_one(tmp_path: Path) -> None:
    for instant in (1, 2):
        journal = Journal(tmp_path, HEADER, bytes_max=10_000)
        journal.extend(instant, [WOKE])
        journal.close()
        journal.close()
    assert list(read_log(tmp_path / EVENTS)) == [(2, WOKE)]
    assert list(read_log(tmp_path / EARLIER)) == [(1, WOKE)]


def test_the_journal_stops_at_its_bound_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, HEADER, bytes_max=1000)
    with caplog.at_level(logging.WARNING):
        for instant in range(200):
            journal.extend(instant, [WOKE])
            journal.flush()
    journal.close()
    size = (tmp_path / EVENTS).stat().st_size
    assert 1000 < size < 1100
    assert [record.getMessage() for record in caplog.records] == [
        f"serving goes on, its event log does not: {tmp_path / EVENTS} has reached its bound of 1000 bytes"
    ]


def test_a_disk_that_refuses_does_not_stop_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, HEADER, bytes_max=1000)
    (tmp_path / EVENTS).unlink()
    journal.flush()
    journal.extend(1, [WOKE])
    assert "serving goes on" in caplog.text
