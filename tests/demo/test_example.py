"""The example files of `sloop demo --files`, which README and the tutorial start from."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from sloop.app.load import load_application, load_scenario
from sloop.demo import write_example
from sloop.errors import InputError
from sloop.profile.examine import examine
from sloop.profile.model import open_model
from sloop.serve.edge.inputs import InputValidator, read


def test_the_files_are_an_application_and_a_scenario_with_a_model_that_reads_the_request(tmp_path: Path) -> None:
    model, request, application, scenario = write_example(tmp_path / "new")
    known = examine(model)
    asked = read(request.read_bytes(), None, InputValidator(structs.replace(known.signature, rows_max=1)))
    picture = np.frombuffer(asked.tensors["restored"].data, np.float32).reshape(1, 28, 168)
    assert open_model(model, 1).run({"restored": picture})[0].tolist() == [[3, 1, 4, 1, 5, 9]]
    signature, obstacle = known.signature, known.obstacle
    assert [port.name for port in signature.inputs] == ["restored"]
    assert not obstacle
    stage = load_application(application).stages[0]
    assert stage.variants[0].model == str(model)
    assert [choice.name for choice in load_scenario(scenario).systems] == ["elastic", "early-drop"]


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    assert write_example(tmp_path) == write_example(tmp_path)
    (tmp_path / "app.yaml").write_text("name: mine\n")
    with pytest.raises(InputError, match=r"app\.yaml: the file exists with other content"):
        write_example(tmp_path)
