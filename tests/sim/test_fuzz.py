import pytest

from sloop.sim import fuzz
from sloop.sim.checkers import Violation


def test_one_world_by_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--seed", "1", "--system", "static"]) == 0
    assert capsys.readouterr().err.startswith("1 worlds with ")


def test_it_goes_on_until_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--seconds", "0.01", "--first", "3", "--system", "static"]) == 0
    assert "every invariant held" in capsys.readouterr().err


def test_a_failure_says_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(world: object) -> None:
        raise Violation("a replica runs two batches")

    monkeypatch.setattr(fuzz, "simulate", broken)
    assert fuzz.main(["--seed", "7", "--system", "static"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Violation: a replica runs two batches\n")
    assert said.endswith("reproduce with: python -m sloop.sim.fuzz --seed 7 --system static\n")
