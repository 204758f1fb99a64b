import json
from pathlib import Path

from click.testing import CliRunner

from sloop.cli import main

MADE = "{kind: equal, rate: 10}"


def test_json_describes_the_trace() -> None:
    answer = json.loads(CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5", "--json"]).stdout)
    assert (answer["requests"], answer["duration_s"], answer["max_rps"]) == (50, 5.0, 10)


def test_people_see_the_same() -> None:
    assert "mean rate" in CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5"]).stdout


def test_a_trace_is_written_and_read_back(tmp_path: Path) -> None:
    times, counts = tmp_path / "times.txt", tmp_path / "counts.txt"
    arguments = ["trace", MADE, "--duration-s", "5", "--times", str(times), "--counts", str(counts)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert counts.read_text() == "10\n" * 5
    again = f"{{file: {times}, format: timestamps, unit: ns}}"
    assert json.loads(CliRunner().invoke(main, ["trace", again, "--json"]).stdout)["requests"] == 50


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    plot = tmp_path / "trace.png"
    assert CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5", "--plot", str(plot)]).exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
