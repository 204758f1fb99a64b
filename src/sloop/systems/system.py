"""What a system is: one policy for each verb, with its published parameters and its source (law 4).

Knows the kit of policies and how to print and copy them, no single system.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from sloop.core.protocols import Policies
from sloop.errors import InputError
from sloop.policies import POLICIES
from sloop.policies.build import Where, adjust, build, keys_of, nowhere, suggestion, written

VERBS: Final = tuple(field.name for field in fields(Policies))


@dataclass(frozen=True, slots=True)
class System:
    """A composition of policies. Those in the registry are prototypes; `fresh` gives one whose memory is its own."""

    name: str
    kind: Literal["system", "baseline"]
    source: str
    policies: Policies
    runs: tuple[str, ...] = ("live", "sim")

    @property
    def slots(self) -> dict[str, dict[str, Any]]:
        """Per verb the policy's name and its parameters, under the keys a user writes them with."""
        return {verb: _slot(verb, getattr(self.policies, verb)) for verb in VERBS}

    @property
    def parameters(self) -> tuple[str, ...]:
        """The keys a user may write beside the verbs: those of the scale policy."""
        return keys_of(type(self.policies.scale))

    def fresh(self, overrides: Mapping[str, Any] | None = None, *, where: Where = nowhere) -> "System":
        """A copy with empty memory in which `overrides` hold.

        A key that is a verb replaces that slot (`batch: slack`, `drop: {name: age, limit: 3}`) or, without a name,
        adjusts the policy in it (`drop: {limit: 3}`); every other key is a parameter of the scale policy. Raises
        `InputError` with its place for an unknown key, policy or value.
        """
        overrides = overrides or {}
        slots: dict[str, Any] = {
            verb: _chosen(verb, getattr(self.policies, verb), overrides.get(verb), where) for verb in VERBS
        }
        own = {key: value for key, value in overrides.items() if key not in VERBS}
        parameters = keys_of(type(slots["scale"]))
        for key in own:
            if key not in parameters and not _is_duration(key, parameters):
                message = f"system {self.name} has no parameter {key!r}"
                raise InputError(message, where=where(key), help=suggestion(key, (*parameters, *VERBS)))
        slots["scale"] = adjust(slots["scale"], own, where=where)
        return replace(self, policies=Policies(**slots))


def _is_duration(key: str, parameters: tuple[str, ...]) -> bool:
    return key.endswith("_s") and key.removesuffix("_s") + "_ms" in parameters


def _slot(verb: str, policy: object) -> dict[str, Any]:
    name = next((name for name, kind in POLICIES[verb].items() if kind is type(policy)), type(policy).__name__)
    return {"name": name, **written(policy)}


def _chosen(verb: str, default: object, choice: object, where: Where) -> object:
    """The policy a user chose for one verb, or a fresh copy of the system's own."""

    def within(key: str) -> str:
        place = where(f"{verb}.{key}" if key else verb)
        return f"{place}, {verb}" if place else verb

    if choice is None:
        return adjust(default, {}, where=within)
    if isinstance(choice, str):
        return build(verb, choice, {}, where=within)
    if not isinstance(choice, Mapping):
        message = f"{verb} = {choice!r} is neither a policy's name nor a mapping"
        raise InputError(message, where=within(""), help=f"write `{verb}: NAME` or `{verb}: {{name: NAME, …}}`")
    parameters = {key: value for key, value in choice.items() if key != "name"}
    if "name" not in choice:
        return adjust(default, parameters, where=within)
    return build(verb, choice["name"], parameters, where=within)
