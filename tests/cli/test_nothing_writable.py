"""Where nothing can be written, as in a container with a read-only root, that is said before anything is measured."""

import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import check, main, profile, serve
from sloop.cli import demo as demo_command
from sloop.errors import MachineError
from sloop.profile.profile import check_saving, path_beside
from sloop.serve.weights.folder import MODELS_VARIABLE, ModelFolder


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: object, **named: object) -> None:
        raise AssertionError("it has begun")

    for module, name in (
        (serve, "first_profiles"),
        (serve, "serve_until_stopped"),
        (profile, "private_copy"),
        (check, "examined_models"),
        (demo_command, "demonstrate"),
    ):
        monkeypatch.setattr(module, name, never)


def refused(*arguments: object) -> str:
    """The error of a command that cannot go on."""
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 1, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.stderr


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder in which nobody, not even root, can write anything."""
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.mark.parametrize("command", ["profile", "check", "serve", "demo"])
def test_no_temporary_files(command: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    said = refused(command, *([] if command == "demo" else [model]))
    assert "error: temporary files cannot be written: No usable temporary directory found in ['/tmp', '/']" in said
    assert "help: mount a folder that can be written at /tmp, or name one by the environment variable TMPDIR" in said


def test_no_state_folder(model: Path, nowhere: Path, tmp_path: Path) -> None:
    said = refused("serve", model, "--state", nowhere / "state")
    assert f"error: {nowhere}/state: the state folder cannot be used: " in said
    assert "help: name a folder that you may write, with --state" in said
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "models").touch(0o444)
    assert f"{tmp_path}/state/models: the state folder cannot be used" in refused(
        "serve", model, "--state", tmp_path / "state"
    )


def test_no_access_log(model: Path, nowhere: Path, tmp_path: Path) -> None:
    assert f"{nowhere}/log" in refused("serve", model, "--state", tmp_path / "s", "--access-log", nowhere / "log")


def test_no_folder_for_the_demonstration(nowhere: Path) -> None:
    assert "help: name a folder that you may write, with --out" in refused("demo", "--out", nowhere / "x")
    assert f"error: {nowhere}/x: nothing can be written there: " in refused("demo", "--files", nowhere / "x")


def test_no_place_for_a_profile(model: Path, nowhere: Path) -> None:
    said = refused("profile", model, "--out", nowhere / "profile.json")
    assert f"error: cannot write the profile '{nowhere}/profile.json': " in said
    assert "with --out" in said or "has --out" in said


def test_a_place_for_a_profile_is_left_as_it_was(model: Path) -> None:
    before = sorted(model.parent.iterdir())
    check_saving(path_beside(model))
    assert sorted(model.parent.iterdir()) == before


def test_no_cache_of_models(nowhere: Path) -> None:
    with pytest.raises(MachineError) as caught:
        ModelFolder(nowhere / "models", 1).prepare()
    assert MODELS_VARIABLE in caught.value.help
