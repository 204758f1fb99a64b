"""Reads YAML documents into values that carry their file, line and key, so that errors can name them.

Any text gives values or an `InputError`, in bounded time: the size of the text is limited before it is parsed, depth
and number of values afterwards, also for aliases that refer to each other. Must not depend on the meaning of the keys.

Differences from plain YAML 1.1: a duplicate key is an error, dates and binaries stay text, `1e3` is a number.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import yaml

from sloop.errors import InputError
from sloop.options import KEY_MAX, Value, describe
from sloop.text import counted

BYTES_MAX: Final = 2**21
"""The most bytes of a file: ten for each of the `VALUES_MAX` values. The parser, which is written in Python so that
every value knows its line, needs some seconds for that many."""
VALUES_MAX: Final = 200_000
"""The most values in one document; an alias counts wherever it is used."""
DEPTH_MAX: Final = 40
KINDS: Final = ("binary", "bool", "float", "int", "map", "null", "seq", "str", "timestamp")
TAGS: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in KINDS)
MERGE: Final = "tag:yaml.org,2002:merge"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def read_yaml(path: Path) -> Value:
    """The document in a file. InputError if it cannot be read, or is larger than `BYTES_MAX`."""
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)  # never more, also of a device that has no end
        _check_size(len(raw), str(path))
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        help = "give an application file (YAML), or a model file (.onnx, .py)"
        raise InputError("not a text file in UTF-8", where=str(path), help=help) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read it: {reason}", where=str(path), help="check the path") from error
    return parse_yaml(text, str(path))


def _check_size(size_bytes: int, file: str) -> None:
    if size_bytes > BYTES_MAX:
        what = f"larger than {BYTES_MAX:,} bytes, the most that a YAML file may have"
        raise InputError(what, where=file, help="give an application, deployment or scenario file, or divide it")


def parse_yaml(text: str, file: str = "<text>") -> Value:
    """The document in a text. InputError if it is not YAML, is empty, or is too large or too deep."""
    _check_size(len(text), file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        what, line, help = _explained(error, text.splitlines())
        raise InputError(f"not YAML: {what}", where=f"{file}:{line}", help=help) from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise InputError(f"not YAML: {reason}", where=f"{file}:1") from error
    if root is None:
        needs = "write what it is to say; an application, for example, needs name, slo_ms and stages"
        raise InputError("the file is empty", where=f"{file}:1", help=needs)
    builder = _Builder(file)
    content = builder.build(root, "", 0)
    return Value(content, "", file, builder.lines)


def _explained(error: yaml.MarkedYAMLError, lines: Sequence[str]) -> tuple[str, int, str]:
    """What is wrong, in which line, and what to do, without the parser's names for its states."""
    context, problem, mark = error.context or "", error.problem or "", error.problem_mark or error.context_mark
    what, help = f"{context} {problem}".strip(), "check quotes, colons and indentation"
    if mark is None:
        return what, 1, help
    begun, line, own = error.context_mark or mark, mark.line + 1, "".join(lines[mark.line : mark.line + 1])
    if problem.startswith("expected <block end>") and mark.column == begun.column:
        what = (
            f"a key among the items of a list, or an item among keys, of the block that begins in line {begun.line + 1}"
        )
        help = "indent the items of a list below its key, each with its own `-`"
    elif problem.startswith("expected <block end>"):
        block = f"{begun.column} before the block that begins in line {begun.line + 1}"
        what = f"{counted(mark.column, 'space')} before this line, {block}, and no block between has as many"
        help = "give all lines of a block the same indentation"
    elif problem == "mapping values are not allowed here" and ": " in own[: mark.column]:
        what, help = "a second `: ` in this line", "put the value in quotes"
    elif problem == "mapping values are not allowed here":
        what = "this line goes on with the value of the one before"
        help = "indent it as that line, or end that line with `:`, with a space between the colon and a value"
    elif problem == "could not find expected ':'":
        what, line, help = "a key without `:`", begun.line + 1, "write `key: value`, with a space after the colon"
    elif "cannot start any token" in problem and own[mark.column : mark.column + 1] == "\t":
        what, help = "a tab that indents", "indent with spaces, not with tabs"
    elif "cannot start any token" in problem:
        what, help = f"a value that begins with {own[mark.column :][:1]!r}", "put the value in quotes"
    elif "flow" in context or "end of stream" in problem:
        what, line, help = f"what begins here does not end: {problem}", begun.line + 1, "close the bracket or the quote"
    return what, line, help


def existing_file(value: Value, folder: Path, noun: str = "file") -> Path:
    """The absolute path of the existing file that `value` names; a relative path starts at `folder`. A link is not
    resolved: weights and profiles are beside the link, and it may be switched."""
    text = value.text()
    try:
        path = (folder / text).absolute()
        plain = Path(os.path.normpath(path))  # `..` after a link to a folder leads elsewhere: then it stays
        path = plain if plain.resolve() == path.resolve() else path
        found = path.is_file()
    except (OSError, ValueError, RuntimeError):  # not a valid file name
        path, found = folder, False
    if not found:
        value.fail(f"no {noun} {text!r} in {str(folder)!r}", "relative paths start at the folder of this file")
    return path


def is_url(text: str) -> bool:
    """Whether a text is a URL rather than a path."""
    return SCHEME.match(text) is not None


def read_name(value: Value) -> str:
    """A name that is safe in a URL."""
    name = value.text()
    if not NAME.fullmatch(name):
        value.wrong(
            "a name of letters, digits, '.', '_' and '-' (100 at most)",
            "use these only: names become parts of URLs, metrics and logs",
        )
    return name


def check_unique(names: Iterable[Value], noun: str) -> None:
    """InputError, with the place of the first, if two of these names are equal. Values that are not text are ignored:
    whoever reads them refuses them."""
    seen: dict[object, Value] = {}
    for name in (name for name in names if isinstance(name.content, str)):
        first = seen.setdefault(name.content, name)
        if first is not name:
            place = f"line {first.line}" if first.file == name.file else f"{first.file}:{first.line}"
            help = f"the first is in {place}; rename one" if first.line else "rename one"
            name.fail(f"two {noun}s are called {name.content!r}", help)


class _Builder:
    """Turns PyYAML's nodes into plain values, within the limits, and records the line of every key."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[str, int] = {}
        self._count = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node, path: str, depth: int) -> object:
        """The value of `node`, whose dotted key is `path`."""
        line = node.start_mark.line + 1
        # A key's own line is set before: readers look there, not where the block below it begins.
        self.lines.setdefault(path, line)
        self._count += 1
        if self._count > VALUES_MAX or depth > DEPTH_MAX:
            limit = f"{VALUES_MAX} values" if self._count > VALUES_MAX else f"{DEPTH_MAX} levels"
            raise self._error(f"the document is larger than {limit}", line, path)
        if node.tag not in TAGS:
            raise self._error(f"the tag {describe(node.tag)} means nothing here", line, path, "remove it")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, f"{path}[{index}]", depth + 1) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode), node
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[object, object]:
        content: dict[object, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == MERGE:
                raise self._error("mappings cannot be merged with '<<'", line, path, "write the keys out")
            key = self._scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or isinstance(key, bool):
                raise self._error("a key must be text or a number", line, path, "put it in quotes")
            if len(str(key_node.value)) > KEY_MAX:
                raise self._error(f"a key of more than {KEY_MAX} characters", line, path)
            under = f"{path}.{key}" if path else str(key)
            if key in content:
                raise self._error(
                    f"duplicate key {describe(key)}", line, under, f"line {self.lines[under]} has it first"
                )
            self.lines[under] = line
            content[key] = self.build(value_node, under, depth + 1)
        return content

    def _scalar(self, node: yaml.ScalarNode, path: str) -> bool | int | float | str | None:
        text = str(node.value)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return bool(self._scalars.construct_yaml_bool(node))
            if kind == "int":
                return int(self._scalars.construct_yaml_int(node))
            if kind == "float":
                return float(self._scalars.construct_yaml_float(node))
        except (ValueError, KeyError, OverflowError, IndexError, yaml.YAMLError):
            raise self._error(
                f"not {kind!r}: {describe(text)}", node.start_mark.line + 1, path, "put it in quotes"
            ) from None
        return _exponent(text) if node.style is None else text

    def _error(self, what: str, line: int, path: str, help: str = "") -> InputError:
        return InputError(what, where=f"{self.file}:{line}: {path}".removesuffix(": ")[:200], help=help)


def _exponent(text: str) -> float | str:
    """The number in a text like `1e3`, which YAML 1.1 takes for text; any other text unchanged."""
    if text[:1] and text[:1] in "+-.0123456789" and text.count("e") + text.count("E") == 1:
        try:
            return float(text)
        except ValueError:
            return text
    return text
