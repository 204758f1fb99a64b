"""The example files of `sloop demo --files`, which README and the tutorial start from."""

from pathlib import Path

import pytest

from sloop.app.load import load_application, load_scenario
from sloop.demo import write_example
from sloop.errors import InputError
from sloop.profile.examine import examine


def test_the_files_are_an_application_and_a_scenario_with_a_model_that_runs(tmp_path: Path) -> None:
    model, application, scenario = write_example(tmp_path / "new")
    known = examine(model)
    signature, obstacle = known.signature, known.obstacle
    assert [port.name for port in signature.inputs] == ["restored"]
    assert not obstacle
    stage = load_application(application).stages[0]
    assert stage.variants[0].model == str(model)
    assert [choice.name for choice in load_scenario(scenario).systems] == ["sponge", "early-drop"]


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    assert write_example(tmp_path) == write_example(tmp_path)
    (tmp_path / "app.yaml").write_text("name: mine\n")
    with pytest.raises(InputError, match=r"app\.yaml: the file exists with other content"):
        write_example(tmp_path)
