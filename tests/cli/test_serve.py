import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from sloop.cli import main

SERVED = """\
name: tiny
slo_ms: 1000
stages:
  - name: only
    model: tiny.onnx
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}, max_batch: 4}
system: static
"""


@pytest.fixture
def server(model: Path) -> Iterator["subprocess.Popen[str]"]:
    (model.parent / "tiny.yaml").write_text(SERVED)
    command = [sys.executable, "-m", "sloop", "serve", "tiny.yaml", "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=model.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.live
def test_it_says_where_it_listens_and_leaves_when_told(server: "subprocess.Popen[str]", model: Path) -> None:
    assert server.stdout is not None
    where = json.loads(server.stdout.readline())
    assert where["application"] == "tiny"
    with urlopen(f"{where['http']}/v2/health/live") as answer:
        assert answer.status == 200
    server.send_signal(signal.SIGTERM)
    rest, said = server.communicate(timeout=30)
    assert (server.returncode, rest) == (0, ""), said
    assert (model.parent / where["log"]).exists()


def test_an_application_without_models_is_refused(app: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(app)])
    assert result.exit_code == 1
    assert "has no model" in result.stderr
