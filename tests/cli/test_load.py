import json
import subprocess

import pytest
from click.testing import CliRunner

from sloop.cli import main

KEYS = {"sent", "ok", "late", "dropped", "rejected", "errors", "attainment", "goodput_rps", "p50_ms", "p99_ms"}


@pytest.mark.live
def test_a_trace_is_sent_and_counted(server: "subprocess.Popen[str]") -> None:
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["http"]
    arguments = ["load", url, "--trace", "{kind: equal, rate: 20}", "--duration-s", "1", "--slo-ms", "20000", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--link", "{kind: constant, mbps: 100}"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer.keys() >= KEYS
    assert (answer["sent"], answer["ok"]) == (20, 20)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["http://127.0.0.1:1", "--slo-ms", "1", "--trace", "{kind: equal, rate: 1}", "--duration-s", "1"],
            1,
            "no server",
        ),
        (
            ["nonsense", "--model", "m", "--slo-ms", "1", "--trace", "{kind: equal, rate: 1, duration_s: 1}"],
            1,
            "http://",
        ),
        (["http://127.0.0.1:1", "--slo-ms", "1"], 2, "--trace"),
    ],
)
def test_what_cannot_be_sent_is_said(arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["load", *arguments, "--slo-ms", "1"])
    assert result.exit_code == code
    assert said in result.stderr
