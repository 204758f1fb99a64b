"""Systems: the parameters that users declare, mistakes in them, and systems in files of a user's own."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sloop.app.load import load_application
from sloop.core.protocols import Scale
from sloop.core.views import ClusterView
from sloop.errors import InputError
from sloop.options import Value
from sloop.policies.batch import Timeout
from sloop.policies.drop import Age, PredictiveDrop
from sloop.policies.scale.static import Static
from sloop.systems import SYSTEMS, build_system
from sloop.systems.registry import POLICIES
from sloop.systems.setup import set_up
from sloop.systems.system import VERBS, System, is_system_file, parameters_of, system_in_file
from sloop.units import ms, s


def test_verbs_are_those_of_the_registry() -> None:
    assert set(VERBS) == set(POLICIES)


def test_parameters_are_the_scale_policy_s_and_verbs_replace_policies() -> None:
    declared = {"replicas": 2, "cores": 5, "batch": {"name": "timeout", "wait_ms": 5}, "drop": "predictive"}
    policies = build_system("static", declared).policies
    assert policies.scale == Static(replicas=2, cores=5)
    assert policies.batch == Timeout(wait_ns=ms(5))
    assert policies.drop == PredictiveDrop()


def test_a_verb_without_a_name_changes_the_parameters_of_its_policy() -> None:
    assert build_system("static", {"drop": {"limit": 3}}).policies.drop == Age(limit=3)


def test_a_parameter_out_of_range_is_refused_where_the_system_is_made() -> None:
    policies = SYSTEMS["static"].policies
    with pytest.raises(InputError) as caught:
        System("mine", "system", "nowhere", replace(policies, drop=Age(limit=0)))
    assert str(caught.value) == "drop policy of system mine: limit must be a number above 0, not 0"


@dataclass(frozen=True, slots=True)
class Idle(Scale):
    """Plans nothing."""

    period_ns: ClassVar[int] = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[None, None]:
        return None, None


class Misspelt(Idle):
    is_quik = True


class Chatty(Idle):
    def say(self) -> str:
        return "a name without _"


class Alone:
    """Has what a scaling policy must have, and no defaults."""

    period_ns = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True, slots=True)
class Undecided(Scale):
    period_ns: int

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[None, None]:
        return None, None


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (Misspelt(), "Misspelt.is_quik is no parameter, and nobody reads it\nhelp: did you mean 'is_quick'?"),
        (Chatty(), "Chatty.say is no parameter, and nobody reads it\nhelp: known here: "),
        (
            Alone(),
            "Alone has no value for 'arrivals'\nhelp: set it; or inherit the default, if it has one: ",
        ),
        (Undecided(s(1)), "Undecided has no value for 'period_ns'\nhelp: set it"),
    ],
)
def test_attributes_of_a_policy_are_those_of_its_protocol(scale: Any, message: str) -> None:
    policies = SYSTEMS["static"].policies
    System("mine", "system", "nowhere", replace(policies, scale=Idle()))
    with pytest.raises(InputError) as caught:
        System("mine", "system", "nowhere", replace(policies, scale=scale))
    assert str(caught.value).startswith(f"scale policy of system mine: {message}")


def test_a_policy_without_its_method_cannot_be_made() -> None:
    class Half(Scale):
        period_ns = s(1)

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


LINES = {"": 1, "system": 3, "system.drop": 5}


@pytest.mark.parametrize(
    ("name", "declared", "message"),
    [
        ("sttic", {}, "3: system: unknown system 'sttic'\nhelp: did you mean 'static'?"),
        ("static", {"replica": 2}, "3: system.replica: unknown key 'replica'\nhelp: did you mean 'replicas'?"),
        ("static", {"bach": "slack"}, "3: system.bach: unknown key 'bach'\nhelp: did you mean 'batch'?"),
        ("static", {"cores": 0}, "3: system.cores: must be a number above 0 and at most 1,000,000, not 0"),
        ("static", {"cores": "many"}, "3: system.cores: must be a number above 0 and at most 1,000,000, not 'many'"),
        ("static", {"batch": "slak"}, "3: system.batch: unknown batch policy 'slak'\nhelp: did you mean 'slack'?"),
        ("static", {"share": "hybrid"}, "3: system.share: unknown key: how many batches run together on a device is"),
        ("static", {"batch": 8}, "3: system.batch: must be a policy's name or a mapping, not 8\nhelp: write `batch:"),
        ("static", {"batch": {"name": "timeout", "wait_ms": -1}}, "3: system.batch.wait_ms: must be a number of at"),
        ("static", {"drop": {"limt": 3}}, "5: system.drop.limt: unknown key 'limt'\nhelp: did you mean 'limit'?"),
        ("static", {"drop": {"name": 3}}, "5: system.drop.name: must be the name of a drop policy, not 3\nhelp: known"),
        ("static", {"drop": {"name": "age", "limit": 0}}, "5: system.drop.limit: must be a number above 0, not 0"),
    ],
)
def test_mistakes_are_named_with_place_and_fix(name: str, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_system(name, Value(declared, "system", "a.yaml", LINES))
    assert str(caught.value).startswith(f"a.yaml:{message}")


OWN = """
from dataclasses import dataclass, field, replace
from sloop.systems import SYSTEMS
SYSTEM = replace(SYSTEMS["static"], name="mine")
"""


@pytest.mark.parametrize(("name", "own"), [("static", False), ("./mine.py", True), ("/a/b.py", True)])
def test_a_path_is_no_name(name: str, own: bool) -> None:
    assert is_system_file(name) is own


def test_a_system_in_a_file_takes_parameters_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "own_system.py"
    path.write_text(OWN)
    assert system_in_file(str(path)) == replace(SYSTEMS["static"], name="mine")
    built = build_system(str(path), {"replicas": 3, "batch": "slack"})
    assert built.slots["scale"]["replicas"] == 3
    assert built.slots["batch"]["name"] == "slack"
    with pytest.raises(InputError, match="unknown key 'replica'"):
        build_system(str(path), {"replica": 3})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("SYSTM = 1", r"own\.py: it has no SYSTEM\nhelp: end it with SYSTEM = System\("),
        ("SYSTEM = 1", r"own\.py: its SYSTEM is a int, not a System"),
        (
            OWN.replace('"mine"', '"mine", kind="bseline"'),
            r"ValueError: the kind of 'mine' is 'bseline', not 'system' or 'baseline'",
        ),
        (OWN.replace('"mine"', '"mine", runs="sim"'), r"the runs of 'mine' are 'sim', not a tuple of 'live' and 'sim'"),
        ("SYSTEM = 1/0", r"own\.py:1: it cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_is_no_system_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "own.py").write_text(content)
    stage = {"name": "a", "profile": "ResNet-T"}
    application = load_application({"name": "x", "slo_ms": 10, "stages": [stage], "system": str(tmp_path / "own.py")})
    with pytest.raises(InputError, match=says):
        set_up(application)


def test_a_file_that_is_not_there_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("name: x\nslo_ms: 10\nsystem: ./mine.py\nstages: [{name: a, profile: ResNet-T}]")
    with pytest.raises(InputError, match=r"app\.yaml:3: system: no system file '\./mine\.py'"):
        load_application(tmp_path / "app.yaml")


def test_parameters_say_what_they_mean_as_users_write_them() -> None:
    found = {each.key: each for each in parameters_of(SYSTEMS["mixed"])}
    calm = found["calm_ms"]
    assert (calm.verb, calm.policy, calm.default, calm.range) == ("scale", "mixed", 60_000, "at least 0 ms")
    assert (found["cores"].range, found["margin"].range) == ("above 0", "above 0 and at most 1")
    assert calm.meaning == "How long the demand must have been lower before fewer replicas are planned."
    assert found["forecast.window_ms"].policy == "moving_max"


@dataclass(frozen=True)
class Old(Scale):
    """A scaling policy as they were before they had a memory."""

    period_ns: int = 1

    def plan(self, now_ns: int, view: ClusterView) -> None:  # type: ignore[override]
        return None


@dataclass(frozen=True)
class Keeping(Static):
    seen: dict[str, int] = field(init=False, default_factory=dict)


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (
            Old(),
            "Old.plan must have the arguments now_ns, view and memory\nhelp: write `def plan",
        ),
        (Keeping(), "Keeping keeps seen besides its parameters\nhelp: answer with it as the memory"),
    ],
)
def test_a_policy_with_a_state_of_its_own_is_told_what_to_write(scale: Any, says: str) -> None:
    policies = replace(build_system("static").policies, scale=scale)
    with pytest.raises(InputError) as caught:
        System("mine", "system", "a test", policies)
    assert says in str(caught.value)
