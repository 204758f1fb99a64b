"""The command that plays schedules for a while: totals, what it prints of a failure, and the replay of one."""

import io
import re

import pytest

from sloop.sim.checkers import Violation
from tests.dst import soak
from tests.dst.schedules import Schedule, schedule_of
from tests.dst.soak import PlayedChunk, Soak, main, play_chunk, replay, report


def test_a_chunk_counts_what_it_plays() -> None:
    chunk = play_chunk(range(3))
    assert (chunk.schedules, chunk.failures) == (3, {})
    assert chunk.requests >= 600
    assert chunk.faults >= 15


def test_a_chunk_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(schedule: Schedule) -> None:
        raise Violation(f"at {schedule.scene.seed} ms: wrong")

    monkeypatch.setattr(soak, "play", broken)
    assert play_chunk([4, 5]).failures == dict.fromkeys((4, 5), "Violation: at # ms: wrong")


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_renews() -> None:
    out = Terminal()
    made = Soak(1.0, out)
    made.add(PlayedChunk(16, 3_400, 120, {}))
    made.add(PlayedChunk(16, 3_400, 120, {7: "Violation: wrong"}))
    assert out.getvalue().count("\r") == 2
    assert "\n" not in out.getvalue()
    assert "32 schedules with 6,800 requests and 240 faults" in made.summary()
    assert made.summary().endswith("1 failure")


def test_a_failure_is_shrunk_and_printed_with_the_command_that_plays_it_again() -> None:
    def broken(schedule: Schedule) -> None:
        if {7, 90} <= set(schedule.numbers):
            raise Violation("both are there")

    out = io.StringIO()
    report(schedule_of(3), out, broken)
    said = out.getvalue()
    assert said.startswith("seed 3 fails; leaving out ")
    assert len(re.findall(r"^ +\d+ +[\d.]+ ms ", said, re.MULTILINE)) == 2
    assert "Violation: both are there\n" in said
    assert said.endswith("reproduce with: python -m tests.dst.soak --schedule 3 --only 7,90\n")
    assert replay(schedule_of(3).only([7]), out, broken) == 0
    assert out.getvalue().endswith("every invariant held\n")


def test_one_schedule_by_its_seed_and_some_of_its_operations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "3", "--only", "0,1,2"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("seed 3: nodes node-0")
    assert said.endswith("every invariant held\n")


def test_it_plays_until_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0", "--seed", "40", "--processes", "1"]) == 0
    assert re.match(r"32 schedules with [\d,]+ requests and \d+ faults, .* 0 failures\n", capsys.readouterr().err)
