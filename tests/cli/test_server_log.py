"""`explain`, `replay` and `simulate` on a server's log: folders of segments, from whose middle they go on."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sloop.cli import main
from sloop.runlog import read_log
from sloop.runlog.segments import segments_in
from sloop.serve.archive import archive
from sloop.serve.journal import LogLimits
from sloop.units import to_s
from sloop.vocabulary import Request
from tests.serve.test_journal import SMALL, Server

TRACE = "0af7651916cd43dd8448eb211c80319c"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a server that has run for so long that the first segments are deleted."""
    server = Server(tmp_path / "log", SMALL)
    server.run_to_segment(4)
    server.serve(2, name="again", late=True)
    server.serve(3, trace=f"{TRACE}-b7ad6b7169203331-01")
    server.journal.close()
    archive(tmp_path / "log", segments_in(tmp_path / "log")[-1].path, 2**30, 0, time.time())
    segments_in(tmp_path / "log")[0].path.unlink()
    return tmp_path


def test_replay_goes_on_from_the_first_snapshot_and_says_from_when(state: Path) -> None:
    log = read_log(state)
    assert not log.is_whole
    result = run("replay", state)
    assert result.exit_code == 0, result.output
    assert "every action equals the recorded one" in result.output
    assert f"the log begins {to_s(log.header.from_ns):,.3f} s after the start of the run" in result.output


def test_one_segment_and_a_cut_one_replay_too(state: Path) -> None:
    last = segments_in(state / "log")[-1].path
    assert "every action equals the recorded one" in run("replay", last).output
    last.write_bytes(last.read_bytes()[:-10])
    result = run("replay", last)
    assert "the last record is cut off and was ignored" in result.output
    assert "every action equals the recorded one" in result.output
    assert answer("explain", state)["missing"]


def test_a_changed_action_after_a_snapshot_is_found(state: Path) -> None:
    last = segments_in(state / "log")[-1].path
    text = last.read_bytes()
    assert text.count(b'"late"') == 2
    last.write_bytes(text.replace(b'"late"', b'"served"', 1))
    result = run("replay", last)
    assert result.exit_code == 1
    assert "first difference" in result.output


def test_requests_are_found_by_their_clients_names(state: Path) -> None:
    numbers = [
        record.id for _, record in read_log(state) if isinstance(record, Request) and record.client_id == "again"
    ]
    result = run("explain", state, "--request", "again")
    assert f"request {numbers[-1]} (again): late" in result.output
    assert f"the client gave the same name to request {numbers[0]}" in result.output
    assert answer("explain", state, "--request", TRACE)["outcome"] == "served"
    assert answer("explain", state, "--request", numbers[0])["outcome"] == "late"
    result = run("explain", state, "--request", "never")
    assert result.exit_code == 1
    assert "no client has called a request 'never'" in result.stderr


def test_a_request_before_the_log_is_refused_with_the_range(state: Path) -> None:
    result = run("explain", state, "--request", "1")
    assert result.exit_code == 1
    assert "request 1 is not in this log" in result.stderr
    assert "s after the start of the run" in result.stderr


def test_decisions_misses_and_pages_speak_for_the_rest_of_a_run(state: Path) -> None:
    log = read_log(state)
    found = answer("explain", state, "--at", to_s(log.header.from_ns) + 0.1)
    assert "1 replica ready" in found["steps"][-1]["what"]
    assert answer("explain", state)["reasons"][0]["count"] == 2
    assert run("explain", state, "--page", state / "page.html").exit_code == 0
    page = (state / "page.html").read_text()
    assert "What this log has" in page
    assert f"{sum(isinstance(record, Request) for _, record in log):,}" in page


def test_a_sampled_log_explains_but_does_not_replay(tmp_path: Path) -> None:
    server = Server(tmp_path, LogLimits(sample=0.01))
    server.serve(50)
    server.serve(1, late=True)
    server.journal.close()
    result = run("replay", tmp_path)
    assert result.exit_code == 1
    assert "a replay needs all requests, and this log has 1.000% of those served in time" in result.stderr
    assert run("explain", tmp_path, "--page", tmp_path / "page.html").exit_code == 1
    found = answer("explain", tmp_path)
    assert found["reasons"][0]["count"] == 1
    assert "only 1.000% are in the log" in found["missing"][0]
