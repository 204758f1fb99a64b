"""Who may read state folder, event log and access log, whatever the umask is and whoever wrote them before."""

import grp
import gzip
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.runlog import Header
from sloop.serve.archive import archive
from sloop.serve.edge.access import AccessLog
from sloop.serve.journal import Journal
from sloop.serve.private import NOBODY, group_of
from sloop.serve.server import locked
from tests.serve.test_journal import SMALL, Server

pytestmark = pytest.mark.live
HEADER = Header(origin="live", name="demo", system="static", definitions={})
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to a group that it is not in")
GROUP = 54_321


@pytest.fixture(autouse=True, params=[0o022, 0o000], ids=["usual umask", "no umask"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def rights(path: Path) -> tuple[int, int]:
    """Mode and group."""
    return mode(path), path.stat().st_gid


def kept(folder: Path, group: int) -> list[Path]:
    """Serve with a log of three segments in a state folder, of which the closed ones are compressed; its logs."""
    with locked(folder, group):
        server = Server(folder / "log", SMALL)
        server.run_to_segment(3)
        server.journal.close()
        active = max(each for each in (folder / "log").iterdir() if each.suffix == ".jsonl")
        archive(folder / "log", active, 2**30, 0, time.time())
    logs = sorted((folder / "log").iterdir())
    assert [each.suffix for each in logs] == [".gz", ".gz", ".jsonl"]
    return logs


def test_only_the_servers_user_may_enter_its_state_folder_and_read_its_log(tmp_path: Path) -> None:
    state = tmp_path / "state"
    logs = kept(state, NOBODY)
    assert {mode(each) for each in logs} == {0o600}
    assert (mode(state), mode(state / "log")) == (0o700, 0o700)


@needs_root
def test_a_group_may_read_the_log_and_nothing_else(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "models").mkdir(parents=True)
    (state / "profile.json").touch()
    logs = kept(state, GROUP)
    assert {rights(each) for each in logs} == {(0o640, GROUP)}
    assert {rights(each) for each in (state, state / "log")} == {(0o750, GROUP)}
    assert [mode(state / name) for name in ("models", "profile.json")] == [0o700, 0o600]
    with locked(state):
        assert {mode(each) for each in logs} == {0o600}, "no group is named any more"
        assert (mode(state), mode(state / "log")) == (0o700, 0o700)


def test_what_others_could_read_is_closed_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tmp_path / "state"
    (state / "log").mkdir(parents=True, mode=0o755)
    (state / "log" / "events-20260101T000000000Z-000001.jsonl.gz").write_bytes(gzip.compress(b""))
    (state / "log" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").touch(0o644)
    before = mode(tmp_path / "elsewhere")
    with locked(state):
        assert {mode(each) for each in (state / "log").iterdir() if not each.is_symlink()} == {0o600}
    assert mode(tmp_path / "elsewhere") == before
    assert "others than its owner could read 3 files or folders there; now they cannot" in caplog.text
    caplog.clear()
    with locked(state):
        Journal(state / "log", HEADER).close()
    assert not caplog.records


def test_a_state_folder_may_be_a_link(tmp_path: Path) -> None:
    disk, state = tmp_path / "disk", tmp_path / "state"
    disk.mkdir(0o755)
    state.symlink_to(disk)
    with locked(state):
        assert mode(disk) == 0o700


def test_a_place_that_is_for_others_too_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sticky, work = tmp_path / "tmp", tmp_path / "work"
    for place, rights_of in ((sticky, 0o1777), (work, 0o755)):
        place.mkdir()
        place.chmod(rights_of)
    (work / "below").mkdir()
    monkeypatch.chdir(work / "below")
    for place, before in ((sticky, 0o1777), (work, 0o755)):
        logs = kept(place, NOBODY)
        assert mode(place) == before
        assert {mode(each) for each in (*logs, place / "log")} == {0o600, 0o700}
        assert f"{place} is not only a state folder, so others may still enter it" in caplog.text


def test_an_access_log_is_closed_once_and_those_that_rotation_makes_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "access.log"
    file.touch(0o644)
    file.chmod(0o644)
    AccessLog.check(str(file))
    assert mode(file) == 0o600
    assert "access.log: others than its owner could read it; now they cannot" in caplog.text
    log = AccessLog(str(file))
    file.rename(tmp_path / "access.log.1")
    log.reopen()
    assert mode(file) == 0o600, "a new one"
    file.chmod(0o640)  # as logrotate's `create 0640` does
    log.reopen()
    assert mode(file) == 0o640
    log.close()
    AccessLog.check("/dev/null")
    assert mode(Path("/dev/null")) == 0o666


@needs_root
def test_a_group_may_read_the_access_log(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    AccessLog.check(str(file), GROUP)
    log = AccessLog(str(file), GROUP)
    assert rights(file) == (0o640, GROUP)
    file.rename(tmp_path / "access.log.1")
    log.reopen()
    assert rights(file) == (0o640, GROUP)
    log.close()


def test_groups_have_names_or_numbers_and_must_be_there() -> None:
    own = os.getegid()
    assert group_of("") == NOBODY
    assert group_of(str(own)) == group_of(grp.getgrgid(own).gr_name) == own
    for wrong in ("no-such-group", str(2**32 - 1), "99999999999"):
        with pytest.raises(InputError, match="there is no such group"):
            group_of(wrong)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give files to every group")
def test_a_group_of_others_is_refused_before_anything_starts() -> None:
    with pytest.raises(InputError, match="the server's user is not in this group"):
        group_of(str(GROUP))
