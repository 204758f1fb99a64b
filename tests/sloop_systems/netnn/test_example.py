"""Flows that are classified in the network, and the doubtful ones by a model on a server."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sloop.app.load import load_scenario
from sloop.cli import main
from sloop.profile.model import open_model
from sloop.sim.scenarios import run_scenario

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "innet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example as its README makes it, and fewer seconds of it."""
    for name in ("flows.yaml", "inspect_flow.py"):
        shutil.copy(EXAMPLE / name, tmp_path / name)
    arguments = ["innet", "compile", "--doubt", "200", "--emulate", "0", "--out", str(tmp_path / "intrusion.innet")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    text = (tmp_path / "flows.yaml").read_text()
    (tmp_path / "flows.yaml").write_text(text.replace("duration_s: 20", "duration_s: 2"))
    return tmp_path


def test_it_loads_and_its_deadline_holds(folder: Path) -> None:
    scenario = load_scenario(folder / "flows.yaml")
    run = run_scenario(scenario, scenario.systems[0])
    assert run.row.attainment > 0.99


def test_the_model_on_the_server_agrees_where_the_switches_are_sure(folder: Path) -> None:
    switches, server = (open_model(folder / name, 1) for name in ("intrusion.innet", "inspect_flow.py"))
    rows = np.random.RandomState(3).randint(0, 2, (40, 814)).astype(np.uint8)
    _, classes, doubtful = switches.run({"features": rows})
    _, asked = server.run({"features": rows})
    assert 0 < doubtful.sum() < 20
    sure = doubtful[:, 0] == 0
    assert (classes[sure] == asked[sure]).mean() > 0.85
