"""Turns a mapping a user wrote into a frozen dataclass whose fields are the options.

Promises that an unknown key, a missing one, a wrong type or a value out of range raises `InputError` naming the key,
the value and the nearest known key. Knows nothing of arrivals: the dataclasses' annotations and `Limits` say it all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from sloop.errors import InputError

FLOATS_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What a number may be: `low ≤ value ≤ high`, with `above` for an open lower end."""

    low: float = 0.0
    high: float = 1e12
    above: bool = False

    def check(self, value: float, where: str) -> float:
        fits = self.low < value <= self.high if self.above else self.low <= value <= self.high
        if not (isfinite(value) and fits):
            opening = "(" if self.above else "["
            raise InputError(f"{value!r} is out of range", where=where, help=f"{opening}{self.low:g}, {self.high:g}]")
        return value


POSITIVE = Limits(above=True)
ANY = Limits()
RATE = Limits(high=1e7)
RATE_ABOVE_0 = Limits(high=1e7, above=True)


class Options(Protocol):
    """A dataclass whose fields are options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=Options)


def limited(default: object = MISSING, *, limits: Limits = ANY) -> Any:  # noqa: ANN401  # as dataclasses.field
    """A field of number type with its limits."""
    if default is MISSING:
        return field(metadata={"limits": limits})
    return field(default=default, metadata={"limits": limits})


def build(kind: type[T], values: Mapping[str, object], *, where: str) -> T:
    """Make a `kind` from what a user wrote; `where` is the path of the mapping, such as `site.yaml:7 trace`."""
    known = {spec.name: spec for spec in fields(kind)}
    refuse_unknown(values, known, where=where)
    hints = get_type_hints(kind)
    made: dict[str, object] = {}
    for name, spec in known.items():
        if name in values:
            limits = spec.metadata.get("limits", ANY)
            made[name] = _converted(values[name], hints[name], limits, f"{where}.{name}")
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise InputError(f"the key {name!r} is missing", where=where, help=f"keys here: {', '.join(known)}")
    return kind(**made)


def refuse_unknown(values: Mapping[str, object], known: Iterable[str], *, where: str) -> None:
    """Raise for the first key that is not known, naming the nearest one that is."""
    names = list(known)
    for key in values:
        if key not in names:
            raise InputError(f"unknown key {key!r}", where=where, help=nearest(str(key), names))


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the known word most like this one, or all of them."""
    names = list(known)
    close = get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def number(value: object, where: str) -> float:
    """A float from an int or float of a user's file; bool is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{value!r} is not a number", where=where, help="write a number such as 12 or 0.5")
    try:
        return float(value)
    except OverflowError:
        raise InputError("the number is too large", where=where, help="stay below 1e300") from None


def _converted(value: object, hint: object, limits: Limits, where: str) -> object:
    if hint is float:
        return limits.check(number(value, where), where)
    if hint == float | None:
        return None if value is None else limits.check(number(value, where), where)
    if hint is int:
        return int(limits.check(_whole(value, where), where))
    if hint == tuple[float, ...]:
        return _floats(value, limits, where)
    if hint == tuple[tuple[float, ...], ...]:
        rows = _listed(value, where)
        return tuple(_floats(row, limits, f"{where}[{place}]") for place, row in enumerate(rows))
    return _worded(value, hint, where)


def _worded(value: object, hint: object, where: str) -> object:
    if not isinstance(value, (str, Path)):
        raise InputError(
            f"{value!r} is not text", where=where, help="write a word, in quotes where it looks like a number"
        )
    if hint is Path:
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        words = [word.value for word in hint]
        if value not in words:
            raise InputError(f"{value!r} is not one of the choices", where=where, help=nearest(str(value), words))
        return hint(value)
    return str(value)


def _whole(value: object, where: str) -> float:
    exact = number(value, where)
    if exact != exact // 1:
        raise InputError(f"{value!r} is not a whole number", where=where, help="write an integer")
    return exact


def _listed(value: object, where: str) -> list[object]:
    if not isinstance(value, (list, tuple)) or not value:
        raise InputError(f"{value!r} is not a list of numbers", where=where, help="write a list such as [10, 20]")
    if len(value) > FLOATS_MAX:
        raise InputError(f"{len(value)} numbers are too many", where=where, help=f"at most {FLOATS_MAX}")
    return list(value)


def _floats(value: object, limits: Limits, where: str) -> tuple[float, ...]:
    cells = _listed(value, where)
    return tuple(limits.check(number(cell, f"{where}[{k}]"), f"{where}[{k}]") for k, cell in enumerate(cells))
