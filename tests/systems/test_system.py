"""Systems from what a user wrote: overrides, errors, memory, and how they are shown."""

import pytest

from sloop.errors import InputError
from sloop.policies import POLICIES
from sloop.policies.batch.timeout import Timeout
from sloop.policies.drop.age import Age
from sloop.policies.drop.predictive import Predictive
from sloop.policies.scale.static import Static
from sloop.systems import SYSTEMS, build_system
from sloop.systems.system import VERBS
from sloop.units import ms, s


def test_verbs_are_the_registry_s() -> None:
    assert set(VERBS) == set(POLICIES)


def test_parameters_are_the_scale_policy_s_and_verbs_replace_slots() -> None:
    written = {"replicas": 2, "period_s": 5, "batch": {"name": "timeout", "wait_ms": 5}, "drop": "predictive"}
    policies = build_system("static", written).policies
    assert policies.scale == Static(replicas=2, period_ns=s(5))
    assert policies.batch == Timeout(wait_ns=ms(5))
    assert policies.drop == Predictive()


def test_a_slot_without_a_name_adjusts_the_policy_in_it() -> None:
    assert build_system("static", {"drop": {"limit": 3}}).policies.drop == Age(limit=3)


@pytest.mark.parametrize(
    ("name", "written", "message", "help_"),
    [
        ("sttic", {}, "unknown system 'sttic'", "did you mean 'static'?"),
        ("static", {"replica": 2}, "system static has no parameter 'replica'", "did you mean 'replicas'?"),
        ("static", {"bach": "slack"}, "system static has no parameter 'bach'", "did you mean 'batch'?"),
        ("static", {"batch": "slak"}, "batch: unknown batch policy 'slak'", "did you mean 'slack'?"),
        ("static", {"batch": 8}, "batch = 8 is neither", "batch: NAME"),
        ("static", {"drop": {"limt": 3}}, "drop: unknown key 'limt'", "did you mean 'limit'?"),
        ("static", {"drop": {"name": 3}}, "unknown drop policy 3", "known: never, age, predictive"),
        ("static", {"cores": 0}, "cores = 0 is out of range", "cores must be above 0"),
    ],
)
def test_mistakes_are_named_with_place_and_fix(name: str, written: dict[str, object], message: str, help_: str) -> None:
    with pytest.raises(InputError) as caught:
        build_system(name, written, where=lambda key: f"app.yaml:{key}")
    assert str(caught.value).startswith("app.yaml:")
    assert message in caught.value.what
    assert help_ in caught.value.help


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_reads_what_it_shows_and_has_its_own_memory(name: str) -> None:
    first, second = build_system(name), build_system(name)
    assert first.name == name
    assert first.source
    assert first.policies == second.policies
    for verb in VERBS:
        assert getattr(first.policies, verb) is not getattr(second.policies, verb)
    shown = first.slots
    assert set(shown) == set(VERBS)
    assert build_system(name, shown).policies == first.policies


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ({"replica": 2}, "replica"),
        ({"cores": "many"}, "cores"),
        ({"cores": 0}, "cores"),
        ({"batch": "slak"}, "batch.name, batch"),
        ({"batch": {"name": "timeout", "wait_ms": -1}}, "batch.wait_ms, batch"),
        ({"drop": {"limt": 3}}, "drop.limt, drop"),
        ({"drop": 3}, "drop, drop"),
    ],
)
def test_the_place_is_that_of_the_key(written: dict[str, object], place: str) -> None:
    with pytest.raises(InputError) as caught:
        build_system("static", written, where=lambda key: key)
    assert caught.value.where == place
