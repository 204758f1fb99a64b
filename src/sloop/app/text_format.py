"""Reads the text format of Protocol Buffers, in which Triton writes `config.pbtxt`, into values that know their line.

A message becomes a mapping. A field that is given once becomes its value; one that is given several times, or as
`[…]`, becomes a list. Strings and names of enumerations become text. The schema is not known here: whoever reads the
values checks their types. Fields of extensions (`[package.name]: …`) are not read.

Source: protobuf.dev/reference/protobuf/textformat-spec.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from sloop.app.document import DEPTH_MAX
from sloop.errors import InputError
from sloop.options import KEY_MAX, Value
from sloop.text import quoted

BYTES_MAX: Final = 2**20
DIGITS_MAX: Final = 400
TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<number>-?\s*(?:0[xX][0-9a-fA-F]+|(?!0[0-9]*[89])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?|(?:inf(?:inity)?|nan)\b)(?![\w.]))
    |(?P<name>[A-Za-z_]\w*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<sign>[:{}<>\[\],;])""",
    re.VERBOSE | re.ASCII,
)
ESCAPE: Final = re.compile(r"\\([0-7]{1,3}|[xX][0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
ESCAPED: Final = dict(zip("abfnrtv\\'\"?", "\a\b\f\n\r\t\v\\'\"?", strict=True))
WORDS: Final[dict[str, object]] = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}
CLOSING: Final = {"{": "}", "<": ">"}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


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
    message = _Parser(text, file).message("", 0)
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


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._tokens = self._read(text)
        self._next = next(self._tokens)

    def message(self, end: str, depth: int) -> _Message:
        """The fields up to the sign `end`; "" is the end of the text."""
        if depth > DEPTH_MAX:
            self._fail(f"nested more than {DEPTH_MAX} levels deep", "flatten it")
        fields: list[_Field] = []
        while not (end and self._takes(end)):
            if not end and self._next.kind == "end":
                break
            name = self._next
            if name.kind != "name":
                wanted = f"the name of a field, or {end!r}" if end else "the name of a field"
                self._fail(f"{self._found()} instead of {wanted}", "write NAME: VALUE or NAME { … }")
            if len(name.text) > KEY_MAX:
                self._fail(f"a name of more than {KEY_MAX} characters", "shorten it")
            self._step()
            has_colon = self._takes(":")
            value = self._list(depth) if self._takes("[") else self._value(depth, needs_colon=not has_colon)
            fields.append(_Field(name.text, value, name.line))
            _ = self._takes(",") or self._takes(";")
        return tuple(fields)

    def _list(self, depth: int) -> list[object]:
        found: list[object] = []
        while not self._takes("]"):
            if found and not self._takes(","):
                self._fail(f"{self._found()} instead of ',' or ']'", "separate the values of a list by commas")
            found.append(self._value(depth))
        return found

    def _value(self, depth: int, *, needs_colon: bool = False) -> object:
        token = self._next
        if token.text in CLOSING and token.kind == "sign":
            self._step()
            return self.message(CLOSING[token.text], depth + 1)
        if needs_colon:
            self._fail(f"{self._found()} instead of ':'", "write NAME: VALUE or NAME { … }")
        if token.kind not in ("number", "name", "text"):
            self._fail(f"{self._found()} instead of a value", 'write a number, "text" in quotes, a name, or { … }')
        if token.kind == "number" and len(token.text) > DIGITS_MAX:
            self._fail(f"a number of more than {DIGITS_MAX} characters", "shorten it")
        self._step()
        if token.kind == "text":
            texts = [token.text]
            while self._next.kind == "text":
                texts.append(self._next.text)
                self._step()
            return self._unescaped(texts, token.line)
        return WORDS.get(token.text, token.text) if token.kind == "name" else _number(token.text)

    def _unescaped(self, texts: list[str], line: int) -> str:
        """The text in adjacent quotes. Escapes are bytes, so the text is taken as bytes, one sign for each."""
        raw = "".join(text[1:-1] for text in texts).encode().decode("latin-1")
        try:
            return ESCAPE.sub(_escaped, raw).encode("latin-1").decode()
        except ValueError:
            self._fail("the escapes in this text are not valid, or no UTF-8", "write \\\\ for a backslash", line)

    def _takes(self, sign: str) -> bool:
        """Whether the sign comes next; if so, it is passed."""
        if self._next.kind != "sign" or self._next.text != sign:
            return False
        self._step()
        return True

    def _step(self) -> None:
        self._next = next(self._tokens)

    def _read(self, text: str) -> Iterator[_Token]:
        place, line = 0, 1
        while place < len(text):
            match = TOKEN.match(text, place)
            if match is None:
                is_open = text[place] in "\"'"
                what = "a text without its closing quote" if is_open else f"{quoted(text[place : place + 20])}"
                self._fail(f"{what} cannot be read here", "check quotes and numbers", line)
            if match.lastgroup != "space":
                yield _Token(str(match.lastgroup), match[0], line)
            line += match[0].count("\n")
            place = match.end()
        yield _Token("end", "", line)

    def _found(self) -> str:
        return "the end of the file" if self._next.kind == "end" else quoted(self._next.text)

    def _fail(self, what: str, help: str, line: int = 0) -> NoReturn:
        raise InputError(what, where=f"{self._file}:{line or self._next.line}", help=help)


def _escaped(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "01234567":
        return chr(int(code, 8))  # above 255 it is no byte, and the text is refused
    if len(code) == 1:
        if code not in ESCAPED:
            raise ValueError(code)
        return ESCAPED[code]
    number = int(code[1:], 16)
    return chr(number) if code[0] in "xX" else chr(number).encode().decode("latin-1")


def _number(text: str) -> float:
    """A number: decimal, hexadecimal, octal (with a leading 0), or a float, which may end in `f`."""
    sign, digits = (-1, text[1:].strip()) if text[0] == "-" else (1, text)
    if digits[:2] in ("0x", "0X"):
        return sign * int(digits, 16)
    if digits.isdigit():
        return sign * int(digits, 8 if digits[0] == "0" else 10)
    return sign * float(digits if digits.startswith(("inf", "nan")) else digits.rstrip("fF"))
