"""The registry of policies, and what users' mistakes in the parameters of one are called."""

from collections.abc import Mapping
from typing import Any

import pytest

from sloop.errors import InputError
from sloop.options import adjust, keys_of
from sloop.policies.batch import Full, Slack, Timeout
from sloop.policies.drop import Age
from sloop.policies.scale.static import Static
from sloop.systems.registry import POLICIES, build
from sloop.units import ms, s


def test_durations_are_written_in_ms_or_s() -> None:
    assert build("batch", "timeout", {"wait_ms": 2.5}) == Timeout(wait_ns=ms(2.5))
    assert build("batch", "timeout", {"wait_s": 2}) == Timeout(wait_ns=s(2))
    assert build("batch", "slack") == Slack()


def test_nested_values_are_checked_too() -> None:
    built = build("scale", "static", {"stages": {"detect": {"replicas": 2, "cores": 0.5}}})
    assert isinstance(built, Static)
    assert (built.stages["detect"].replicas, built.stages["detect"].cores) == (2, 0.5)
    with pytest.raises(
        InputError, match=r"stages\.detect\.replica: unknown key 'replica'\nhelp: did you mean 'replicas'"
    ):
        build("scale", "static", {"stages": {"detect": {"replica": 2}}})


@pytest.mark.parametrize(
    ("verb", "name", "parameters", "message"),
    [
        ("bach", "slack", {}, "unknown verb 'bach'\nhelp: did you mean 'batch'?"),
        ("batch", "slak", {}, "unknown batch policy 'slak'\nhelp: did you mean 'slack'?"),
        ("batch", "timeout", {"wat_ms": 1}, "wat_ms: unknown key 'wat_ms'\nhelp: did you mean 'wait_ms'?"),
        ("batch", "timeout", {"wait_ns": 1}, "wait_ns: unknown key 'wait_ns'\nhelp: did you mean 'wait_ms'?"),
        ("batch", "timeout", {"wait_ms": "5ms"}, "wait_ms: must be a number of at least 0, not '5ms'"),
        ("batch", "timeout", {"wait_ms": float("inf")}, "wait_ms: must be a number of at least 0, not inf"),
        ("scale", "hpa", {"replicas_max": 10**400}, "replicas_max: must be a whole number, not a huge number"),
        ("admit", "bounded", {"queue_max": 2.5}, "queue_max: must be a whole number of at least 1, not 2.5"),
        ("admit", "bounded", {"queue_max": True}, "queue_max: must be a whole number of at least 1, not true"),
        ("admit", "bounded", {"queue_max": 0}, "queue_max: must be a whole number of at least 1, not 0"),
        ("drop", "age", {"limit": -1}, "limit: must be a number above 0, not -1"),
        ("drop", "never", {"x": 1}, "x: unknown key 'x'\nhelp: known here: none"),
    ],
)
def test_mistakes_are_named_with_the_fix(verb: str, name: str, parameters: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(verb, name, parameters)
    assert str(caught.value).startswith(message)


def test_a_copy_has_other_parameters() -> None:
    assert adjust(Full(patience=4), {}) == Full(patience=4)
    assert adjust(Timeout(wait_ns=5), {"wait_ms": 1}) == Timeout(wait_ns=ms(1))
    with pytest.raises(InputError, match=r"limit: must be a number above 0, not 0"):
        adjust(Age(), {"limit": 0})


def test_policies_that_are_called_within_the_event_loop() -> None:
    """All others are called beside it, because their decisions may take longer than a request can wait."""
    quick = {name for name, kind in POLICIES["scale"].own.items() if kind.is_quick is True}  # a property in others
    assert quick == {"static", "hpa", "kpa", "vpa"}


PARAMETERS_MAX = 150
"""Settable, in all: each is a question to users. What no system, document or experiment sets is a constant."""


def test_the_platforms_own_policies_have_few_parameters() -> None:
    found = {(verb, name): keys_of(kind) for verb, kinds in POLICIES.items() for name, kind in kinds.own.items()}
    table = "\n".join(f"{len(keys):3} {verb} {name}: {', '.join(keys)}" for (verb, name), keys in found.items())
    assert sum(map(len, found.values())) <= PARAMETERS_MAX, table
