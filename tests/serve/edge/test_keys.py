"""Keys of clients: from an option and a file, changed while the server runs, and never shown."""

import logging
import os
from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.serve.edge import service
from sloop.serve.edge.service import Keys


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key file that is looked at before every request."""
    monkeypatch.setattr(service, "KEY_CHECK_S", 0.0)
    path = tmp_path / "keys"
    path.write_text("# ours\nrobot-1 first\n\nsecond\n")
    path.chmod(0o600)
    return path


def test_without_keys_none_is_required() -> None:
    assert not Keys().is_required
    assert Keys("one").is_required


def test_the_keys_of_option_and_file_are_accepted_and_counted_by_name(file: Path) -> None:
    keys = Keys("given", file)
    assert [keys.accepts(key) for key in ("given", "first", "second", "first")] == [True] * 4
    assert [keys.accepts(key) for key in ("", "firs", "first2", "robot-1", "#", "\udcff")] == [False] * 6
    assert keys.accepted == {"": 2, "robot-1": 2}
    assert keys.refused == {"missing": 1, "wrong": 5}


def test_a_file_may_come_from_windows(file: Path) -> None:
    file.write_bytes("\N{BYTE ORDER MARK}robot-1 first\r\n\r\nboss\tsecond\tadmin\r\n".encode())
    keys = Keys(file=file)
    assert [keys.accepts(key) for key in ("first", "second")] == [True] * 2
    assert keys.administers("second")


def test_a_changed_file_holds_at_once_and_a_wrong_one_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(file=file)
    file.write_text("robot-1 renewed\n")
    assert keys.accepts("renewed")
    assert not keys.accepts("first")
    for wrong in ("", "one two three\n", "one admin\n", "ä\n"):
        file.write_text(wrong)
        assert keys.accepts("renewed"), wrong
        assert keys.accepts("renewed")  # reported once
    file.unlink()
    assert keys.accepts("renewed")
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 5
    assert all(error.startswith("the keys stay as they were: ") for error in errors)
    file.write_text("last\n")
    assert keys.accepts("last")


def test_only_a_key_with_the_role_may_change_models_and_it_can_lose_it(file: Path) -> None:
    assert not Keys("given", file).has_admin, "a file of earlier versions holds, and its keys only infer"
    file.write_text("robot-1 first\nboss second admin\nthird\n")
    keys = Keys("given", file)
    assert keys.has_admin
    assert [key for key in ("given", "first", "second", "third") if keys.accepts(key) and keys.administers(key)] == [
        "second"
    ]
    assert keys.accepted == {"": 2, "robot-1": 1, "boss": 1}
    assert keys.refused == {"role": 3}
    file.write_text("boss second\n")
    assert keys.accepts("second")
    assert not keys.administers("second")


def test_a_reload_reads_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n")
    keys = Keys(file=file)
    assert keys.accepts("first")  # the next look is a second away
    file.write_text("other\n")
    keys.reload()
    assert keys.accepts("other")
    assert not keys.accepts("first")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ": no key in it"),
        (b"# nothing\n", ": no key in it"),
        (b"a secret b\n", ":1: the third word is not the role 'admin'"),
        (b"a secret Admin\n", ":1: the third word is not the role 'admin'"),
        (b"a secret admin admin\n", ":1: 4 words"),
        (b"secret admin\n", ":1: 'admin' is a role, and cannot be a key"),
        (b"\nsecret\nn secret\n", ":3: this key stands in the file twice"),
        (b"na/me secret\n", ":1: the name of a key has"),
        (b"s\xe4cret\n", ":1: the key cannot be sent"),
        (b"x" * 1025, ":1: the key cannot be sent"),
        (b"secret\n" * 200_000, ": more than 1048576 bytes"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_line_and_shows_no_key(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        Keys(file=file)
    assert str(caught.value).startswith(f"{file}{says}")
    assert "secret" not in str(caught.value)


def test_a_missing_file_and_a_key_that_no_header_can_hold_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the key file cannot be read: No such file"):
        Keys(file=tmp_path / "none")
    with pytest.raises(InputError, match="the API key cannot be sent in a header"):
        Keys("two words")


def test_a_file_that_others_can_read_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    Keys(file=file)
    assert not caplog.records
    file.chmod(0o640)
    Keys(file=file)
    assert caplog.records[0].getMessage() == f"{file}: others than its owner can read or change the keys; chmod 600 it"


def test_a_rotation_by_renaming_is_seen_although_size_and_time_are_the_same(file: Path) -> None:
    keys = Keys(file=file)
    found = file.stat()
    other = file.with_name("other")
    other.write_text(file.read_text().replace("first", "f1rst"))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(file)
    assert keys.accepts("f1rst")
