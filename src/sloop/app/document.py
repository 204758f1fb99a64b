"""A YAML document whose every value knows its file, line and key, so that errors can name them.

Promises that whatever the text is, reading it gives values or an `InputError`, in time bounded by the text's length:
aliases may not nest into each other without end, and depth and size are limited. Knows YAML, not what the keys mean.

Differences from plain YAML 1.1: a duplicate key is an error, dates and binaries stay text, `1e3` is a number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import Final, NoReturn

import yaml

from sloop.errors import InputError

VALUES_MAX: Final = 200_000
"""Values in one document, aliases counted where they are used."""
DEPTH_MAX: Final = 40
KEY_MAX: Final = 200
"""Characters in a key."""
KINDS: Final = ("binary", "bool", "float", "int", "map", "null", "seq", "str", "timestamp")
TAGS: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in KINDS)
MERGE: Final = "tag:yaml.org,2002:merge"

Key = str | int | float
Plain = bool | int | float | str | list["Plain"] | dict[Key, "Plain"] | None


@dataclass(frozen=True, slots=True)
class Value:
    """A value and where it stands: `path` is the dotted key from the document's root, `line` counts from 1.

    `content` is a scalar, a list of `Value`, or a dict of `Value` by key.
    """

    content: object
    file: str
    path: str
    line: int

    @property
    def where(self) -> str:
        """`file:line: key`, as errors begin."""
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.path}" if self.path else place

    def fail(self, what: str, help: str = "") -> NoReturn:
        """Raise the InputError that says what is wrong with this value."""
        raise InputError(what, where=self.where, help=help)

    def wrong(self, wanted: str, help: str = "") -> NoReturn:
        """Raise the InputError of a value of the wrong type or range."""
        self.fail(f"must be {wanted}, not {shown(self.content)}", help)

    def mapping(self, known: Sequence[str] = (), required: Iterable[str] = ()) -> dict[str, "Value"]:
        """Its keys and values. InputError for a key that is not `known` (where given) or misses though `required`."""
        if not isinstance(self.content, dict):
            self.wrong("a mapping (key: value)" + (f" with the keys {', '.join(known)}" if known else ""))
        for key, value in self.content.items():
            if not isinstance(key, str):
                value.fail(f"the key {key!r} must be text", "put it in quotes")
            if known and key not in known:
                value.fail(f"unknown key {shown(key)}", nearest(key, known))
        for key in required:
            if key not in self.content:
                self.fail(f"the key {key!r} is missing", f"add '{key}:' here")
        return self.content

    def elements(self) -> list["Value"]:
        """The elements of a list."""
        if not isinstance(self.content, list):
            self.wrong("a list")
        return self.content

    def some(self) -> list["Value"]:
        """The elements of a list, or the value itself as the only one."""
        return self.elements() if isinstance(self.content, list) else [self]

    def text(self) -> str:
        """Text that is not empty."""
        if not isinstance(self.content, str):
            self.wrong("text", "put it in quotes" if isinstance(self.content, bool | int | float) else "")
        if not self.content.strip():
            self.wrong("text that is not empty")
        return self.content

    def existing(self, folder: Path, noun: str = "file") -> Path:
        """The path, made absolute, of a file that exists; a relative one starts at `folder`, the document's own."""
        text = self.text()
        try:
            path = (folder / text).resolve()
            found = path.is_file()
        except (OSError, ValueError, RuntimeError):  # a name no file can have
            path, found = folder, False
        if not found:
            self.fail(f"no {noun} {text!r} in {str(folder)!r}", "relative paths start at the folder of this file")
        return path

    def choice(self, known: Sequence[str]) -> str:
        """One of the words in `known`."""
        if not isinstance(self.content, str) or self.content not in known:
            hint = nearest(self.content, known) if isinstance(self.content, str) else f"one of: {', '.join(known)}"
            self.wrong(f"one of {', '.join(known)}", hint)
        return self.content

    def boolean(self) -> bool:
        """true or false."""
        if not isinstance(self.content, bool):
            self.wrong("true or false")
        return self.content

    def number(self, *, above: float = -inf, least: float = -inf, most: float = inf) -> float:
        """A finite number with `above` < number, `least` ≤ number ≤ `most`."""
        return self._number("a number", above, least, most)

    def integer(self, *, least: float = -inf, most: float = 2**62) -> int:
        """A whole number in `[least, most]`; 1e9 is one."""
        number = self._number("a whole number", -inf, least, most)
        if number != int(number):
            self.wrong("a whole number" + _range(-inf, least, most))
        return self.content if isinstance(self.content, int) else int(number)

    def _number(self, noun: str, above: float, least: float, most: float) -> float:
        wanted = noun + _range(above, least, most)
        content = self.content
        if isinstance(content, bool) or not isinstance(content, int | float):
            self.wrong(wanted)
        try:
            number = float(content)
        except OverflowError:
            self.wrong(wanted)
        if most < number < inf:
            self.wrong(noun + _range(above, least, most, told=True))
        if not isfinite(number) or number <= above or number < least:
            self.wrong(wanted)
        return number

    def plain(self) -> Plain:
        """The value without its places."""
        if isinstance(self.content, dict):
            return {key: value.plain() for key, value in self.content.items()}
        if isinstance(self.content, list):
            return [value.plain() for value in self.content]
        assert self.content is None or isinstance(self.content, bool | int | float | str), self.content
        return self.content

    def lines(self) -> dict[str, int]:
        """The line of every key in it, by dotted path."""
        found = {self.path: self.line}
        if isinstance(self.content, dict | list):
            for value in self.content.values() if isinstance(self.content, dict) else self.content:
                found.update(value.lines())
        return found


def nearest(word: str, known: Sequence[str]) -> str:
    """The help for a word that is not known: the nearest one, or all."""
    close = get_close_matches(word, known, n=1, cutoff=0.6) if len(word) <= KEY_MAX else []
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"


def shown(content: object) -> str:
    """A value as an error shows it."""
    match content:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case None:
            return "empty"
        case bool():
            return "true" if content else "false"
        case str():
            return repr(content if len(content) <= 60 else content[:57] + "...")
        case _:
            return str(content) if not isinstance(content, int) or abs(content) < 10**40 else "a huge number"


def read(path: Path) -> Value:
    """The document in a file. InputError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError("not a text file in UTF-8", where=str(path), help="give a YAML file") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read it: {reason}", where=str(path), help="check the path") from error
    return parse(text, str(path))


def parse(text: str, file: str = "<text>") -> Value:
    """The document in a text. InputError where it is not YAML, is empty, or is too large or deep."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        hint = "indent with spaces, not with tabs" if "\\t" in what else ""
        raise InputError(f"not YAML: {what}", where=f"{file}:{mark.line + 1 if mark else 1}", help=hint) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise InputError(f"not YAML: {reason}", where=f"{file}:1") from error
    if root is None:
        raise InputError("the file is empty", where=f"{file}:1", help="an application needs name, slo_ms and stages")
    return _Builder(file).build(root, "", 0)


def from_plain(content: object, file: str = "<dict>") -> Value:
    """The same for Python values, as tests and callers without a file have them; every line is 1."""
    return _wrap(content, file, "")


def _wrap(content: object, file: str, path: str) -> Value:
    if isinstance(content, dict):
        content = {key: _wrap(value, file, _under(path, key)) for key, value in content.items()}
    elif isinstance(content, list | tuple):
        content = [_wrap(value, file, f"{path}[{index}]") for index, value in enumerate(content)]
    elif content is not None and not isinstance(content, bool | int | float | str):
        raise InputError(f"cannot use a {type(content).__name__} here", where=f"{file}:1: {path}")
    return Value(content, file, path, 1)


def _under(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _range(above: float, least: float, most: float, *, told: bool = False) -> str:
    """In words; an upper bound nobody comes near only if it is to be `told`."""
    lower = f" above {above:g}" if above > -inf else f" of at least {least:g}" if least > -inf else ""
    upper = f" at most {most:g}" if told or most < 1e9 else ""
    return lower + (" and" if lower and upper else "") + upper


class _Builder:
    """Turns PyYAML's nodes into values, within the limits."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self.scalars = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, path: str, depth: int) -> Value:
        line = node.start_mark.line + 1
        self.count += 1
        if self.count > VALUES_MAX or depth > DEPTH_MAX:
            limit = f"{VALUES_MAX} values" if self.count > VALUES_MAX else f"{DEPTH_MAX} levels"
            raise InputError(f"the document is larger than {limit}", where=f"{self.file}:{line}: {path}"[:200])
        if node.tag not in TAGS:
            what = f"the tag {shown(node.tag)} means nothing here"
            raise InputError(what, where=f"{self.file}:{line}: {path}", help="remove it")
        if isinstance(node, yaml.MappingNode):
            return Value(self._mapping(node, path, depth), self.file, path, line)
        if isinstance(node, yaml.SequenceNode):
            content = [self.build(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(node.value)]
            return Value(content, self.file, path, line)
        assert isinstance(node, yaml.ScalarNode), node
        return Value(self._scalar(node, path), self.file, path, line)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[Key, Value]:
        content: dict[Key, Value] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:
                where = f"{self.file}:{key_node.start_mark.line + 1}: {path}".rstrip(": ")
                raise InputError("mappings cannot be merged with '<<'", where=where, help="write the keys out")
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            line = key_node.start_mark.line + 1
            if key is None or isinstance(key, bool):
                raise InputError("a key must be text or a number", where=f"{self.file}:{line}: {path}".rstrip(": "))
            if len(str(key_node.value)) > KEY_MAX:
                raise InputError(f"a key of more than {KEY_MAX} characters", where=f"{self.file}:{line}: {path}"[:200])
            under = _under(path, key)
            if key in content:
                first = f"it is first given in line {content[key].line}"
                raise InputError(f"duplicate key {shown(key)}", where=f"{self.file}:{line}: {under}", help=first)
            built = self.build(value_node, under, depth + 1)
            # The line of a key, not of a block that begins below it, is where a reader looks for it.
            content[key] = Value(built.content, self.file, under, line)
        return content

    def _scalar(self, node: yaml.ScalarNode, path: str) -> bool | int | float | str | None:
        text = str(node.value)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return bool(self.scalars.construct_yaml_bool(node))
            if kind == "int":
                return int(self.scalars.construct_yaml_int(node))
            if kind == "float":
                return float(self.scalars.construct_yaml_float(node))
        except (ValueError, KeyError, OverflowError, IndexError, yaml.YAMLError) as error:
            where = f"{self.file}:{node.start_mark.line + 1}: {path}"
            raise InputError(f"not {kind!r}: {shown(text)}", where=where, help="put it in quotes") from error
        return _exponent(text) if node.style is None else text


def _exponent(text: str) -> float | str:
    """`1e3` is text to YAML 1.1 and a number to everybody else."""
    if text[:1] in "+-.0123456789" and text[:1] and text.count("e") + text.count("E") == 1:
        try:
            return float(text)
        except ValueError:
            return text
    return text
