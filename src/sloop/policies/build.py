"""From what a user wrote to a policy: the dataclass's fields are the schema, and every refusal names the fix.

Durations are `_ns` fields inside and are written `_ms` or `_s`. Knows dataclasses and the registry, no single policy.
"""

import difflib
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import msgspec

from sloop.errors import InputError
from sloop.policies import POLICIES
from sloop.policies.bounds import OutOfRange
from sloop.units import LONGEST_NS, NS_PER_MS, NS_PER_S, to_ms

DURATIONS = {"_ms": NS_PER_MS, "_s": NS_PER_S}
"""Nanoseconds of the unit that a key ends in."""
INT_MAX = 2**63 - 1
"""What a whole number may be: larger ones leave the range of floats, and every comparison with one is an error."""

V = TypeVar("V")

Where = Callable[[str], str]
"""The place, such as `file:line`, of a key of what is being read; "" is the whole of it."""


def nowhere(key: str) -> str:
    """What is being read has no place a user could look at."""
    return ""


def build(verb: str, name: str, parameters: Mapping[str, Any], *, where: Where = nowhere) -> object:
    """The policy `name` for `verb`, e.g. `build("batch", "timeout", {"wait_ms": 5})`.

    Raises `InputError` with its place for an unknown verb, policy or key, a wrong type, or a value out of range.
    """
    kinds = known(POLICIES, verb, what="policy slot", where=where(""))
    kind = known(kinds, name, what=f"{verb} policy", where=where("name"))
    return _construct(kind, _fields_from(kind, parameters, where), where)


def adjust(policy: V, parameters: Mapping[str, Any], *, where: Where = nowhere) -> V:
    """A fresh copy of `policy`, with empty memory, in which `parameters` replace its own values."""
    changes = _fields_from(type(policy), parameters, where)
    try:
        return replace(policy, **changes)  # type: ignore[type-var]  # every policy is a dataclass
    except OutOfRange as error:
        raise InputError(error.what, where=where(error.key), help=error.help) from None


def keys_of(kind: type[object]) -> tuple[str, ...]:
    """The keys a user may write for this policy, in the order of its fields."""
    return tuple(name[:-3] + "_ms" if name.endswith("_ns") else name for name in _types(kind))


def written(policy: object) -> dict[str, Any]:
    """A policy's parameters under the keys, and in the units, a user writes them with."""
    values = {name: getattr(policy, name) for name in _types(type(policy))}
    return {
        key: to_ms(value) if name.endswith("_ns") else msgspec.to_builtins(value)
        for key, (name, value) in zip(keys_of(type(policy)), values.items(), strict=True)
    }


def known(table: Mapping[str, V], name: object, *, what: str, where: str = "") -> V:
    """`table[name]`, or an `InputError` that names the nearest entry."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise InputError(f"unknown {what} {name!r}", where=where, help=suggestion(str(name), table))


def suggestion(name: str, choices: Iterable[str]) -> str:
    """The help line for a word that is not among `choices`."""
    options = list(choices)
    nearest = difflib.get_close_matches(name, options, n=1)
    listed = f"known: {', '.join(options) or 'none'}"
    return f"did you mean {nearest[0]!r}? {listed}" if nearest else listed


def _construct(kind: type[V], values: Mapping[str, Any], where: Where) -> V:
    try:
        return kind(**values)
    except OutOfRange as error:
        raise InputError(error.what, where=where(error.key), help=error.help) from None


def _fields_from(kind: type[object], parameters: Mapping[str, Any], where: Where) -> dict[str, object]:
    return dict(_field(kind, key, value, where) for key, value in parameters.items())


def _field(kind: type[object], key: str, value: object, where: Where) -> tuple[str, object]:
    """Field name and value in the field's type for what a user wrote under `key`."""
    types = _types(kind)
    for suffix, unit_ns in DURATIONS.items():
        name = key.removesuffix(suffix) + "_ns"
        if key.endswith(suffix) and name in types:
            return name, _duration_ns(_converted(value, float, key, where), unit_ns, key, where)
    if key not in types or key.endswith("_ns"):
        raise InputError(f"unknown key {key!r}", where=where(key), help=suggestion(key, keys_of(kind)))
    return key, _converted(value, types[key], key, where)


def _duration_ns(value: float, unit_ns: int, key: str, where: Where) -> int:
    """Checked before it is multiplied: the product of a large float is infinite, and no whole number."""
    most = LONGEST_NS / unit_ns
    if abs(value) > most:
        help = f"{key} must be at least 0 and at most {most:g}, a hundred years"
        raise InputError(f"{key} = {value:g} is out of range", where=where(key), help=help)
    return round(value * unit_ns)


def _converted(value: object, kind: type[V], key: str, where: Where) -> V:
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{key} = {value!r}: {error}", where=where(key), help=f"correct the value of {key}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise InputError(f"{key} = {value!r} is not a number", where=where(key), help=f"give {key} a finite value")
    if isinstance(converted, int) and abs(converted) > INT_MAX:
        digits = int(math.log10(abs(converted))) + 1
        help = f"{key} must be at most {INT_MAX}"
        raise InputError(f"{key} is a number of {digits} digits", where=where(key), help=help)
    return converted


def _types(kind: type[object]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}  # type: ignore[arg-type]  # every policy is a dataclass
