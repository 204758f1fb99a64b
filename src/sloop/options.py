"""Options: reads the keys and values that users declare into frozen dataclasses with a field for each key.

All user input passes through here: applications and scenarios, systems, policies, traces and links. So each kind of
mistake (an unknown or missing key, a wrong type, a value out of range) has one wording, and every error names file,
line, key and the fix. YAML is parsed elsewhere (`sloop.app.document`); this module must not depend on the meaning of an
option.

The range of a number is in its annotation (`busy: Annotated[float, Range(above=0, most=1)]`, or `busy: Fraction`). It
is checked when the option is read, and by `check_ranges` in options that are constructed in Python.
"""

import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from math import inf
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, Union

import msgspec

from sloop.errors import InputError
from sloop.text import number as in_digits
from sloop.text import quoted
from sloop.units import LONGEST_NS, NS_PER_MS, NS_PER_S, to_ms

KEY_MAX: Final = 200
"""The largest number of characters in a key."""
INT_MAX: Final = 2**62
"""The largest whole number that is accepted: a larger one would overflow nanoseconds in 64 bits."""
ELEMENTS_MAX: Final = 1_000_000
"""The largest number of elements in a list: enough for one count per second over eleven days."""
DURATIONS: Final[Mapping[str, int]] = {"_ms": NS_PER_MS, "_s": NS_PER_S}
"""Suffixes with which a user writes a duration, and their nanoseconds. The field itself ends in `_ns`."""

T = TypeVar("T")


class OutOfRange(InputError):
    """The value of the option `key` is out of range; `key` is written as a user writes it."""

    def __init__(self, key: str, wrong: str, help: str = "") -> None:
        super().__init__(f"{key} {wrong}", help=help)
        self.key = key
        self.wrong = wrong


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number: above < value, least ≤ value ≤ most."""

    above: float = -inf
    least: float = -inf
    most: float = inf

    def hold(self, value: float) -> bool:
        """Whether `value` is a finite number in the range."""
        return _is_finite(value) and value > self.above and self.least <= value <= self.most

    def check(self, value: float, where: str) -> float:
        """`value`. InputError at `where` if it is out of range."""
        if not self.hold(value):
            raise InputError(self.wrong("", value), where=where)
        return value

    def text(self, value: float, unit: str = "") -> str:
        """The range in words, for an error; a very large upper limit is left out unless `value` exceeds it."""
        lower = ""
        if self.above > -inf:
            lower = f" above {in_digits(self.above)}{unit}"
        elif self.least > -inf:
            lower = f" of at least {in_digits(self.least)}{unit}"
        upper = f" at most {in_digits(self.most)}{unit}" if self.most < 1e9 or self.most < value < inf else ""
        return lower + (" and" if lower and upper else "") + upper

    @property
    def in_ms(self) -> "Range":
        """The range of a duration in milliseconds; this one is in nanoseconds."""
        above, least = (0.0, -inf) if self.least == 1 else (self.above, self.least)  # people think of no single one
        return Range(above / NS_PER_MS, least / NS_PER_MS, self.most / NS_PER_MS)

    def wrong(self, key: str, value: float) -> str:
        """What is wrong with a value outside the range; one whose key ends in `_ns` is given in milliseconds."""
        if not _is_finite(value):
            return f"must be a number{self.text(inf)}, not {describe(value)}"
        if key.endswith("_ns"):
            return f"must be a time{self.in_ms.text(to_ms(int(value)), ' ms')}, not {to_ms(int(value)):g} ms"
        return f"must be a number{self.text(value)}, not {describe(value)}"


def _is_finite(value: Any) -> bool:  # noqa: ANN401  # policies made in Python may hold anything
    """Also of a whole number that is too large for a float."""
    return isinstance(value, Real) and -inf < value < inf  # type: ignore[operator]  # its own protocol has no order


ANY_NUMBER: Final = Range()
PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(above=0, most=1)]


def check_range(key: str, value: float, *, above: float = -inf, least: float = -inf, most: float = inf) -> None:
    """Raise `OutOfRange` unless above < value, least ≤ value ≤ most and `value` is finite.

    For a range that depends on other options, in `__post_init__`; all others are in annotations. A `key` that ends in
    `_ns` is reported in milliseconds.
    """
    limits = Range(above, least, most)
    if not limits.hold(value):
        raise OutOfRange(_written_key(key), limits.wrong(key, value))


def check_ranges(options: object) -> None:
    """Raise `OutOfRange` for the first number of a dataclass or Struct that is outside the range of its annotation.

    For options that are constructed in Python: those that a user declares are checked where they are read.
    """
    _check_fields(options, "")


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a user declared, and where: `path` is the dotted key from the root of `file`.

    `lines` maps every dotted key of the file to its line; all values of a file share it.
    """

    content: object
    path: str = ""
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def line(self) -> int:
        """The line of the key, counted from 1, or of the nearest enclosing key; 0 without a file."""
        path = self.path
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.lines.get(path, 0)

    @property
    def where(self) -> str:
        """`file:line: key`, the start of an error message."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (place, self.path) if part)

    def fail(self, what: str, help: str = "") -> NoReturn:
        """Raise an InputError at this value: `what` says what is wrong with it."""
        raise InputError(what, where=self.where, help=help)

    def wrong(self, wanted: str, help: str = "") -> NoReturn:
        """Raise an InputError that says which type or range was `wanted` and what the value is."""
        is_what = "; it has no value" if self.content is None else f", not {describe(self.content)}"
        self.fail(f"must be {wanted}{is_what}", help)

    def under(self, key: object, content: object) -> "Value":
        """`content` as the value of `key` in this mapping, or of element `[index]` in this list."""
        step = f"[{key}]" if isinstance(self.content, list | tuple) else f".{key}" if self.path else str(key)
        return Value(content, self.path + step, self.file, self.lines)

    def entry(self, table: Mapping[str, T], noun: str) -> T:
        """The entry of `table` that this value names. An unknown name is an InputError that suggests the nearest."""
        if isinstance(self.content, str) and self.content in table:
            with placed(self):
                return table[self.content]
        if not isinstance(self.content, str):
            self.wrong(f"the name of a {noun}", f"known here: {', '.join(table)}")
        self.fail(f"unknown {noun} {describe(self.content)}", nearest(self.content, tuple(table)))

    def mapping(self, known: Collection[str] | None = None, required: Collection[str] = ()) -> dict[str, "Value"]:
        """The keys and values of a mapping. InputError for a key outside `known` (if given) or a missing `required`
        key."""
        if not isinstance(self.content, Mapping):
            self.wrong("a mapping" + (f" with the keys {', '.join(known)}" if known else " (key: value)"))
        found = {}
        for key, content in self.content.items():
            value = found[key] = self.under(key, content)
            if not isinstance(key, str):
                value.fail(f"the key {key!r} must be text", "put it in quotes")
            if known is not None and key not in known:
                value.fail(f"unknown key {describe(key)}", nearest(key, known))
        for key in required:
            if key not in found:
                self.fail(f"the key {key!r} is missing", f"add '{key}:' here")
        return found

    def elements(self) -> list["Value"]:
        """The elements of a list."""
        if not isinstance(self.content, list | tuple):
            self.wrong("a list")
        if len(self.content) > ELEMENTS_MAX:
            self.wrong(f"a list of at most {ELEMENTS_MAX:,} elements")
        return [self.under(index, content) for index, content in enumerate(self.content)]

    def one_or_more(self) -> list["Value"]:
        """The elements of a list, or the value itself as the only one."""
        return self.elements() if isinstance(self.content, list | tuple) else [self]

    def text(self, *, may_be_empty: bool = False) -> str:
        """Text, by default not empty."""
        if not isinstance(self.content, str):
            self.wrong("text", "put it in quotes" if isinstance(self.content, bool | int | float) else "")
        if not (self.content.strip() or may_be_empty):
            self.wrong("text that is not empty")
        return self.content

    def choice(self, known: Sequence[str]) -> str:
        """One of the words in `known`."""
        if not isinstance(self.content, str) or self.content not in known:
            self.wrong(f"one of {', '.join(known)}", _did_you_mean(self.content, known))
        return self.content

    def boolean(self) -> bool:
        """true or false."""
        if not isinstance(self.content, bool):
            self.wrong("true or false")
        return self.content

    def number(self, *, above: float = -inf, least: float = -inf, most: float = inf) -> float:
        """A finite number with above < number and least ≤ number ≤ most."""
        return self._number("a number", Range(above, least, most))

    def integer(self, *, above: float = -inf, least: float = -inf, most: float = INT_MAX) -> int:
        """A whole number with above < number and least ≤ number ≤ most; 1e9 is one."""
        limits = Range(above, least, min(most, INT_MAX))
        number = self._number("a whole number", limits)
        if number != int(number):
            self.wrong("a whole number" + limits.text(number))
        return self.content if isinstance(self.content, int) else int(number)

    def _number(self, noun: str, limits: Range) -> float:
        content = self.content
        if isinstance(content, bool) or not isinstance(content, int | float):
            has_digits = isinstance(content, str) and any(map(str.isdigit, content))
            self.wrong(noun + limits.text(0.0), "write digits only, without unit or quotes" if has_digits else "")
        try:
            number = float(content)
        except OverflowError:
            number = inf
        if not limits.hold(number):
            self.wrong(noun + limits.text(number))
        return number


Declared = Mapping[str, object] | Value
"""What a user declared: a plain mapping, or a value with its file and line."""
Reader = Callable[[Value], object]


def as_value(declared: Declared, path: str = "") -> Value:
    """`declared` as a `Value`; a plain mapping becomes a value without a file, at `path`."""
    return declared if isinstance(declared, Value) else Value(declared, path)


def nearest(word: str, known: Collection[str]) -> str:
    """The help for an unknown word: the nearest known word, or all of them."""
    return _did_you_mean(word, known) or f"known here: {', '.join(known) or 'none'}"


def _did_you_mean(content: object, known: Collection[str]) -> str:
    if not isinstance(content, str) or len(content) > KEY_MAX:
        return ""
    close = get_close_matches(content, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def describe(content: object) -> str:
    """A short text for a value, for error messages."""
    if isinstance(content, bool):
        return "true" if content else "false"
    if isinstance(content, int):
        return str(content) if abs(content) < 10**40 else "a huge number"
    if isinstance(content, float):
        return f"{content:.12g}"
    if isinstance(content, str):
        return quoted(content)
    names = {type(None): "empty", dict: "a mapping", list: "a list", tuple: "a list"}
    return names.get(type(content), f"a {type(content).__name__}")


@dataclass(frozen=True, slots=True)
class _Option:
    """One field of a class of options."""

    name: str
    hint: Any
    required: bool

    @property
    def limits(self) -> Range:
        """The range in its annotation."""
        return _limits_in(self.hint) or ANY_NUMBER


def _options_of(kind: type[object]) -> Mapping[str, _Option]:
    """The fields that `__init__` of a dataclass or msgspec Struct takes, by name."""
    if not _is_options(kind):
        raise InputError(f"{kind.__name__} is no dataclass", help="decorate it with @dataclass(frozen=True)")
    hints = typing.get_type_hints(kind, include_extras=True)
    if not is_dataclass(kind):
        return {f.name: _Option(f.name, hints[f.name], f.required) for f in msgspec.structs.fields(kind)}  # type: ignore[arg-type]  # a Struct
    return {
        f.name: _Option(f.name, hints[f.name], required=f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
        if f.init
    }


def _written_key(name: str) -> str:
    return name[:-3] + "_ms" if name.endswith("_ns") else name


def keys_of(kind: type[object]) -> tuple[str, ...]:
    """The keys that a user may write for the options `kind`, in the order of its fields; durations in `_ms`."""
    return tuple(map(_written_key, _options_of(kind)))


def ranges_of(kind: type[object]) -> dict[str, str]:
    """By key, as a user writes it, the range of its numbers in words, such as "above 0 and at most 1"; of
    those that have one."""
    found = {name: limits for name, option in _options_of(kind).items() if (limits := _limits_in(option.hint))}
    return {
        _written_key(name): (limits.in_ms.text(0.0, " ms") if name.endswith("_ns") else limits.text(0.0))
        .removeprefix(" of")
        .strip()
        for name, limits in found.items()
    }


def _limits_in(hint: object) -> Range | None:
    kind, limits = _unwrapped(hint)
    return limits or next((inner for argument in typing.get_args(kind) if (inner := _limits_in(argument))), None)


def _unwrapped(hint: Any) -> tuple[Any, Range | None]:  # noqa: ANN401  # any annotation
    """The type inside `Annotated`, and the range among the rest, which may have other things; of several ranges, what
    is in all."""
    if typing.get_origin(hint) is not Annotated:
        return hint, None
    kind, *others = typing.get_args(hint)
    ranges = [other for other in others if isinstance(other, Range)]
    if not ranges:
        return kind, None
    above, least = max(limits.above for limits in ranges), max(limits.least for limits in ranges)
    return kind, Range(above, least, min(limits.most for limits in ranges))


def written(options: object) -> dict[str, Any]:
    """The options as a user would write them: by user-facing key, durations in milliseconds."""
    found = {}
    for name in _options_of(type(options)):
        value = getattr(options, name)
        is_duration = name.endswith("_ns") and value is not None
        found[_written_key(name)] = to_ms(value) if is_duration else msgspec.to_builtins(value, enc_hook=str)
    return found


def read_options(
    kind: type[T], declared: Declared, *, also: Collection[str] = (), readers: Mapping[str, Reader] | None = None
) -> T:
    """Build `kind`, a dataclass or Struct, from the declared options; omitted options keep their defaults.

    `also` are further keys of the mapping, which the caller reads. `readers` replace the reading by type for the named
    options. InputError with file and line for an unknown or missing key, a wrong type, or a value out of range, also if
    the class's own check refuses it.
    """
    value = as_value(declared)
    found = _read_fields(kind, value, also, readers or {})
    for option in _options_of(kind).values():
        if option.required and option.name not in found:
            value.fail(f"the key {_written_key(option.name)!r} is missing", f"add '{_written_key(option.name)}:' here")
    with placed(value):
        return kind(**found)


def adjust(options: T, declared: Declared, *, also: Collection[str] = ()) -> T:
    """A copy of `options` with the declared values instead of its own, and with fresh `init=False` fields.

    Arguments and errors as for `read_options`.
    """
    value = as_value(declared)
    found = _read_fields(type(options), value, also, {})
    with placed(value):
        return replace(options, **found)  # type: ignore[type-var]  # all options are dataclasses


@contextmanager
def placed(value: Value) -> Iterator[None]:
    """Add file, line and key to errors without them: those of the option concerned, else those of `value`.

    A ValueError becomes an InputError.
    """
    try:
        yield
    except OutOfRange as error:
        content = value.content if isinstance(value.content, Mapping) else {}
        stem = error.key.removesuffix("_ms")
        key = next((key for key in (error.key, f"{stem}_s") if key in content), None)
        if key is None:
            raise InputError(error.what, where=value.where, help=error.help) from None
        value.under(key, content[key]).fail(error.wrong, error.help)
    except InputError as error:
        if error.where:
            raise
        raise InputError(error.what, where=value.where, help=error.help) from None
    except ValueError as error:
        value.fail(str(error))


def _option(kind: type[object], key: str) -> _Option | None:
    """The option that a user writes as `key`."""
    options = _options_of(kind)
    if key in options:
        return None if key.endswith("_ns") else options[key]
    suffix = next((suffix for suffix in DURATIONS if key.endswith(suffix)), "")
    return options.get(key.removesuffix(suffix) + "_ns") if suffix else None


def _read_fields(
    kind: type[object], value: Value, also: Collection[str], readers: Mapping[str, Reader]
) -> dict[str, Any]:
    """The declared options, by field name."""
    if not isinstance(value.content, Mapping):
        value.wrong(f"a mapping with the keys {', '.join((*keys_of(kind), *also))}")
    found: dict[str, Any] = {}
    for key, each in value.mapping().items():
        option = _option(kind, key)
        if option is None:
            if key not in also:
                each.fail(f"unknown key {describe(key)}", nearest(key, (*keys_of(kind), *also)))
        elif option.name in found:
            each.fail("given twice, in _ms and in _s", "keep one of them")
        elif key in readers:
            found[key] = readers[key](each)
        elif option.name.endswith("_ns"):
            unit_ns = DURATIONS[key[key.rindex("_") :]]
            # Check the limit before multiplying: the product of a large float may be infinite, which round refuses.
            found[option.name] = round(each.number(least=0, most=LONGEST_NS / unit_ns) * unit_ns)
            if not option.limits.hold(found[option.name]):
                each.fail(option.limits.wrong(option.name, found[option.name]))
        else:
            found[option.name] = _read(each, option.hint)
            if option.required and found[option.name] == ():
                each.fail("must be a list that is not empty")
    return found


def _read(value: Value, hint: Any, limits: Range = ANY_NUMBER) -> Any:  # noqa: ANN401  # of the type that `hint` says
    """The value as the type `hint`, which may be nested: number, text, choice, list, mapping or class of options."""
    hint, narrower = _unwrapped(hint)
    limits = narrower or limits
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType) and NoneType in arguments:
        (other,) = (argument for argument in arguments if argument is not NoneType)
        return None if value.content is None else _read(value, other, limits)
    if origin is Literal:
        return value.choice(arguments)
    if origin is tuple:
        return tuple(_read(each, arguments[0], limits) for each in value.one_or_more())
    if origin is not None and issubclass(origin, Mapping):
        return {key: _read(each, arguments[1], limits) for key, each in value.mapping().items()}
    assert isinstance(hint, type), hint
    return read_options(hint, value) if _is_options(hint) else _read_scalar(value, hint, limits)


def _read_scalar(value: Value, kind: type[object], limits: Range) -> object:
    if kind is bool:
        return value.boolean()
    if kind is float:
        return value.number(above=limits.above, least=limits.least, most=limits.most)
    if kind is int:
        return value.integer(above=limits.above, least=limits.least, most=limits.most)
    if kind is str:
        return value.text(may_be_empty=True)
    if isinstance(value.content, kind):
        return value.content
    text = value.choice([str(word) for word in kind]) if issubclass(kind, StrEnum) else value.text()
    return kind(text)  # type: ignore[call-arg]  # a class that is made from text, such as a path


def _check_fields(options: object, path: str) -> None:
    for name, option in _options_of(type(options)).items():
        _check(f"{path}{name}", getattr(options, name), option.hint)


def _check(key: str, value: Any, hint: Any, limits: Range | None = None) -> None:  # noqa: ANN401  # see `hint`
    """OutOfRange if a number in `value`, which may be nested as in `_read`, is outside its range."""
    hint, narrower = _unwrapped(hint)
    limits = narrower or limits
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        kinds = [kind for kind in arguments if kind is not NoneType]
        if value is not None and len(kinds) == 1:
            _check(key, value, kinds[0], limits)
    elif origin is tuple:
        for index, each in enumerate(value or ()):
            _check(f"{key}[{index}]", each, arguments[0], limits)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        for name, each in (value or {}).items():
            _check(f"{key}.{name}", each, arguments[1], limits)
    elif _is_options(hint) and value is not None:
        _check_fields(value, f"{key}.")
    elif limits is not None and not limits.hold(value):
        raise OutOfRange(_written_key(key), limits.wrong(key, value))
    elif limits is not None and hint is int and value != int(value):
        raise OutOfRange(_written_key(key), f"must be a whole number, not {describe(value)}")


def _is_options(hint: object) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, msgspec.Struct))
