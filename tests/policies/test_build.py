"""From a user's words to policies, and the registry they are found in."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from sloop.errors import InputError
from sloop.policies import POLICIES
from sloop.policies.batch.slack import Slack
from sloop.policies.batch.timeout import Timeout
from sloop.policies.build import adjust, build, keys_of, written
from sloop.policies.drop.age import Age
from sloop.policies.route.smooth_weighted import SmoothWeighted
from sloop.policies.scale.static import Static, StaticStage
from sloop.units import ms, s
from sloop.vocabulary import ReplicaId

EVERY = [(verb, name) for verb, kinds in POLICIES.items() for name in kinds]


def test_durations_are_written_in_ms_or_s() -> None:
    assert build("batch", "timeout", {"size": 4, "wait_ms": 2.5}) == Timeout(size=4, wait_ns=ms(2.5))
    assert build("batch", "timeout", {"wait_s": 2}) == Timeout(wait_ns=s(2))
    assert build("batch", "slack", {"guard_ms": 5}) == Slack(guard_ns=ms(5))


def test_nested_values_are_checked_too() -> None:
    built = build("scale", "static", {"stages": {"detect": {"replicas": 2, "cores": 0.5}}})
    assert built == Static(stages={"detect": StaticStage(replicas=2, cores=0.5)})
    with pytest.raises(InputError, match="unknown field `replica`"):
        build("scale", "static", {"stages": {"detect": {"replica": 2}}})


@pytest.mark.parametrize(
    ("verb", "name", "parameters", "message", "help_"),
    [
        ("bach", "slack", {}, "unknown policy slot 'bach'", "did you mean 'batch'?"),
        ("batch", "slak", {}, "unknown batch policy 'slak'", "did you mean 'slack'?"),
        ("batch", "slack", {"gard_ms": 1}, "unknown key 'gard_ms'", "did you mean 'guard_ms'?"),
        ("batch", "slack", {"guard_ns": 1}, "unknown key 'guard_ns'", "did you mean 'guard_ms'?"),
        ("batch", "slack", {"guard_ms": "5ms"}, "Expected `float`, got `str`", "correct the value of guard_ms"),
        ("batch", "slack", {"guard_ms": float("inf")}, "is not a number", "finite"),
        ("batch", "slack", {"guard_ms": 1e300}, "guard_ms = 1e+300 is out of range", "at most 3.1536e+12, a hundred"),
        ("scale", "hpa", {"window_s": 1e300}, "window_s = 1e+300 is out of range", "at most 3.1536e+09, a hundred"),
        ("scale", "hpa", {"window_s": 1e200}, "window_s = 1e+200 is out of range", "at most 3.1536e+09, a hundred"),
        ("forecast", "holt", {"horizon_s": -1e300}, "horizon_s = -1e+300 is out of range", "at least 0 and"),
        ("scale", "hpa", {"replicas_max": 10**400}, "replicas_max is a number of 401 digits", "at most 92233720"),
        ("batch", "timeout", {"size": 2.5}, "Expected `int`, got `float`", "correct"),
        ("batch", "timeout", {"size": True}, "Expected `int`, got `bool`", "correct"),
        ("drop", "age", {"limit": -1}, "limit = -1 is out of range", "limit must be above 0"),
        ("drop", "never", {"x": 1}, "unknown key 'x'", "known: none"),
    ],
)
def test_mistakes_are_named_with_place_and_fix(
    verb: str, name: str, parameters: Mapping[str, object], message: str, help_: str
) -> None:
    with pytest.raises(InputError) as caught:
        build(verb, name, parameters, where=lambda key: f"app.yaml:{key}")
    assert str(caught.value).startswith("app.yaml:")
    assert message in caught.value.what
    assert help_ in caught.value.help


def test_adjusting_keeps_the_rest_and_starts_with_an_empty_memory() -> None:
    assert adjust(Timeout(size=4), {"wait_ms": 1}) == Timeout(size=4, wait_ns=ms(1))
    with pytest.raises(InputError, match=r"here:limit: limit = 0 is out of range"):
        adjust(Age(), {"limit": 0}, where=lambda key: f"here:{key}")
    used = SmoothWeighted()
    used._credit[ReplicaId(1)] = 3.0
    assert not adjust(used, {})._credit


@pytest.mark.parametrize("value", [1e17, 1e300, -1e300])
@pytest.mark.parametrize(("verb", "name"), EVERY)
def test_no_duration_is_longer_than_a_hundred_years(verb: str, name: str, value: float) -> None:
    for key in keys_of(POLICIES[verb][name]):
        if key.endswith("_ms"):
            for written_as in (key, key.removesuffix("_ms") + "_s"):
                with pytest.raises(
                    InputError, match=rf"{written_as} must be at least 0 and at most .*, a hundred years"
                ):
                    build(verb, name, {written_as: value})


@pytest.mark.parametrize(("verb", "name"), EVERY)
def test_every_policy_is_a_frozen_slotted_dataclass_that_reads_what_it_writes(verb: str, name: str) -> None:
    policy = build(verb, name, {})
    assert is_dataclass(policy)
    assert not hasattr(policy, "__dict__"), "slots=True"
    for field in fields(policy):
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field.name, 0)
    assert tuple(written(policy)) == keys_of(type(policy))
    assert build(verb, name, written(policy)) == policy


@pytest.mark.parametrize("name", POLICIES["scale"])
def test_no_scale_parameter_is_called_like_a_slot(name: str) -> None:
    """Both stand side by side in an application file: `{name: sponge, margin: 0.9, batch: slack}`."""
    assert not set(keys_of(POLICIES["scale"][name])) & POLICIES.keys()
