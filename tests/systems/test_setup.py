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
    setup = set_up(load_application(MINIMAL), SystemChoice("static", {"cores": 0.5}))
    assert setup.system.slots["scale"]["cores"] == 0.5
    assert setup.application.system.parameters == {"cores": 0.5}


def test_a_wrong_parameter_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: {name: static, coores: 1}\n")
    with pytest.raises(InputError, match=r"app.yaml:4.*coores(.|\n)*did you mean 'cores'"):
        set_up(load_application(file))


def test_an_own_plan_of_fewer_replicas_than_none_is_refused(tmp_path: Path) -> None:
    """`sloop check` called a plan of -3 replicas feasible, with -6 cores in all."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from sloop.policies import targets\n"
        "from sloop.systems import build_system\n"
        "from sloop.vocabulary import Plan\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Own:\n"
        "    period_ns: int = 10**9\n"
        "    def plan(self, now_ns, view):\n"
        "        (stage,) = view.stages\n"
        "        return Plan((targets.equal_replicas(stage, 'a', count=-3, cores=1.0, batch_max=1),), '')\n"
        "static = build_system('static')\n"
        "SYSTEM = replace(static, name='own', policies=replace(static.policies, scale=Own()))\n"
    )
    application = load_application(MINIMAL | {"system": str(tmp_path / "own.py")})
    with pytest.raises(InputError, match="system own wants -3 replicas of a/a"):
        set_up(application, must_fit=False)


FOUR_CORES = {"nodes": [{"hardware": "custom", "cores": 4}]}


@pytest.mark.parametrize("system", ["static", "hpa", "kpa", "fa2-single"])
def test_replicas_that_no_node_could_hold_are_refused_with_the_node(system: str) -> None:
    """They would never start, and every request would be dropped."""
    application = load_application(MINIMAL | {"cluster": FOUR_CORES, "system": {"name": system, "cores": 8}})
    with pytest.raises(InputError, match=r"a/a with 8 cores, which no node could hold\nhelp: .*custom-0, has 4 cores"):
        set_up(application)
    assert set_up(application, SystemChoice(system, {"cores": 4}))


def test_memory_that_no_node_has_is_refused_and_memory_nobody_told_is_not() -> None:
    large = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "memory_bytes": 3 << 30}
    stages = {"stages": [{"name": "a", "profile": large | {"max_batch": 4, "max_cores": 1}}]}
    small = {"nodes": [{"hardware": "custom", "cores": 4, "memory_bytes": 2 << 30}]}
    with pytest.raises(InputError, match=r"1 core, 3 GiB, which no node could hold\nhelp: .*4 cores, 2 GiB"):
        set_up(load_application(MINIMAL | stages | {"cluster": small}))
    assert set_up(load_application(MINIMAL | stages | {"cluster": FOUR_CORES}))


def test_what_a_system_cannot_plan_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(
        "name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: {name: static, stages: {b: {cores: 1}}}\n"
    )
    with pytest.raises(InputError, match=r"app.yaml:4: system: system static: no stage 'b'"):
        set_up(load_application(file))


def test_a_variant_without_profile_says_how_to_get_one(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    model.write_bytes(b"")
    application = load_application(MINIMAL | {"stages": [{"name": "a", "model": str(model)}]})
    with pytest.raises(InputError, match="sloop profile"):
        set_up(application)


def test_an_error_in_the_file_names_its_line_and_one_of_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: statik\n")
    with pytest.raises(InputError, match=r"app\.yaml:4: system: unknown system 'statik'\nhelp: did you mean 'static'"):
        set_up(load_application(file))
    with pytest.raises(InputError, match=r"^system: unknown system 'spong'\nhelp: did you mean 'sponge'"):
        set_up(load_application(MINIMAL), SystemChoice("spong"))
