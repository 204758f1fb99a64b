from pathlib import Path

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.systems.setup import set_up

MINIMAL = {"name": "x", "slo_ms": 9, "stages": [{"name": "a", "profile": "ResNet-T"}], "system": "static"}


def test_beliefs_and_policies_are_fresh_each_time() -> None:
    application = load_application(MINIMAL)
    first, second = set_up(application), set_up(application)
    assert first.beliefs["a", "a"] is not second.beliefs["a", "a"]
    assert first.system.policies.scale is not second.system.policies.scale
    assert first.core().state is not second.core().state


def test_another_system_can_be_chosen_with_its_own_parameters() -> None:
    setup = set_up(load_application(MINIMAL), SystemChoice("static", {"cores": 3}))
    assert setup.system.slots["scale"]["cores"] == 3
    assert setup.application.system.parameters == {"cores": 3}


def test_a_wrong_parameter_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: {name: static, coores: 1}\n")
    with pytest.raises(InputError, match=r"app.yaml:4.*coores(.|\n)*did you mean 'cores'"):
        set_up(load_application(file))


def test_a_variant_without_profile_says_how_to_get_one(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    model.write_bytes(b"")
    application = load_application(MINIMAL | {"stages": [{"name": "a", "model": str(model)}]})
    with pytest.raises(InputError, match="sloop profile"):
        set_up(application)
