import json
import signal
import subprocess
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from sloop.cli import main


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
