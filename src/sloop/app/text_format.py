"""Reads the text format of Protocol Buffers, in which Triton writes `config.pbtxt`, into values that know their line.

A message becomes a mapping. A field that is given once becomes its value; one that is given several times, or as
`[…]`, becomes a list. Strings and names of enumerations become text. The schema is not known here: whoever reads the
values checks their types. Fields of extensions (`[package.name]: …`) are not read. Tokens are those of protobuf's own
reader.
"""

from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from google.protobuf.text_format import ParseError, Tokenizer

from sloop.app.document import DEPTH_MAX
from sloop.errors import InputError
from sloop.options import KEY_MAX, Value
from sloop.text import quoted

BYTES_MAX: Final = 2**20
WORDS: Final[dict[str, object]] = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}
CLOSING: Final = {"{": "}", "<": ">"}
FIX: Final = 'write NAME: VALUE, or NAME { … }; a value is a number, "text" in quotes, a name, { … }, or [ … ]'


class _Field(NamedTuple):
    name: str
    value: object
    """A scalar, a `_Message`, or a list of both."""
    line: int


_Message = tuple[_Field, ...]


def read_text_format(path: Path) -> Value:
    """The message in a file. InputError if it cannot be read, or is no message in text format."""
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("not a text file in UTF-8", where=str(path), help="write it as text") from error
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", where=str(path), help="check the path") from error
    if len(raw) > BYTES_MAX:
        raise InputError(f"larger than {BYTES_MAX:,} bytes", where=str(path), help="give a model's configuration")
    return parse_text_format(text, str(path))


def parse_text_format(text: str, file: str = "<text>") -> Value:
    """The message in a text. InputError, with the line, if it is none."""
    lines: dict[str, int] = {}
    reader = _TextReader(text, file)
    try:
        message = reader.message("", 0)
    except ParseError:
        reader.fail("cannot be read here", FIX)
    return Value(_mapping(message, "", lines), "", file, lines)


def _mapping(message: _Message, path: str, lines: dict[str, int]) -> dict[str, object]:
    """The content of a message, whose fields are at `path`; notes their lines."""
    given: dict[str, list[_Field]] = {}
    for field in message:
        given.setdefault(field.name, []).append(field)
    content: dict[str, object] = {}
    for name, fields in given.items():
        under = f"{path}.{name}" if path else name
        lines[under] = fields[0].line
        if len(fields) == 1 and not isinstance(fields[0].value, list):
            content[name] = _content(fields[0].value, under, lines)
            continue
        elements: list[object] = []
        for field in fields:
            for value in field.value if isinstance(field.value, list) else [field.value]:
                place = f"{under}[{len(elements)}]"
                lines[place] = field.line
                elements.append(_content(value, place, lines))
        content[name] = elements
    return content


def _content(value: object, path: str, lines: dict[str, int]) -> object:
    return _mapping(value, path, lines) if isinstance(value, tuple) else value


class _TextReader:
    """Reads messages. What raises ParseError is no message."""

    def __init__(self, text: str, file: str) -> None:
        self._tokens, self._file = Tokenizer(text.split("\n")), file

    def message(self, end: str, depth: int) -> _Message:
        """The fields up to the sign `end`; "" is the end of the text."""
        tokens, fields = self._tokens, list[_Field]()
        if depth > DEPTH_MAX:
            self.fail(f"is nested more than {DEPTH_MAX} levels deep", "flatten it")
        while not (tokens.TryConsume(end) if end else tokens.AtEnd()):
            if len(tokens.token) > KEY_MAX:
                self.fail(f"is a name of more than {KEY_MAX} characters", "shorten it")
            line, name = self._line(), tokens.ConsumeIdentifier()
            has_colon = tokens.TryConsume(":")
            is_list = tokens.TryConsume("[")
            value = self._list(depth) if is_list else self._value(depth, needs_colon=not has_colon)
            fields.append(_Field(name, value, line))
            _ = tokens.TryConsume(",") or tokens.TryConsume(";")
        return tuple(fields)

    def _list(self, depth: int) -> list[object]:
        found: list[object] = []
        while not self._tokens.TryConsume("]"):
            if found:
                self._tokens.Consume(",")
            found.append(self._value(depth))
        return found

    def _value(self, depth: int, *, needs_colon: bool = False) -> object:
        tokens = self._tokens
        opening = tokens.token
        if opening in CLOSING and tokens.TryConsume(opening):
            return self.message(CLOSING[opening], depth + 1)
        if needs_colon:
            tokens.Consume(":")
        if opening[:1] in ('"', "'"):
            return tokens.ConsumeString()
        for number in (tokens.ConsumeInteger, tokens.ConsumeFloat):
            try:
                return number()
            except ParseError:
                continue
        name = tokens.ConsumeIdentifier()
        return WORDS.get(name, name)

    def _line(self) -> int:
        """That of the next token."""
        return self._tokens.ParseError("").GetLine() or 1  # type: ignore[arg-type]  # the stub has another type

    def fail(self, why: str, help: str) -> NoReturn:
        """Raise an InputError about the next token."""
        what = "the end of the file" if self._tokens.AtEnd() else quoted(self._tokens.token)
        raise InputError(f"{what} {why}", where=f"{self._file}:{self._line()}", help=help)
