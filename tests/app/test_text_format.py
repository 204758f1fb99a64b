"""The text format of Protocol Buffers: every way to write a message, and what is none."""

import math
import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.struct_pb2 import Value as AnyValue
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.document import DEPTH_MAX
from sloop.app.text_format import BYTES_MAX, parse_text_format, read_text_format
from sloop.errors import InputError

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
SCALARS = st.one_of(
    st.text(max_size=20),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(allow_nan=False),
)
MESSAGES = st.recursive(
    st.dictionaries(NAMES, SCALARS, max_size=4),
    lambda inner: st.dictionaries(
        NAMES, SCALARS | inner | st.lists(SCALARS | inner, min_size=2, max_size=4), min_size=1, max_size=4
    ),
    max_leaves=12,
)


def written(message: dict[str, object], draw: st.DataObject) -> str:
    """The message as text, in one of the ways in which it can be written."""

    def choose(*ways: str) -> str:
        return draw.draw(st.sampled_from(ways))

    def space() -> str:
        return choose(" ", "\n", "\t", " # a comment: { [ \" '\n")

    def value(content: object) -> str:
        if isinstance(content, dict):
            left, right = draw.draw(st.sampled_from([("{", "}"), ("<", ">")]))
            return f"{left}{space()}{written(content, draw)}{right}"
        if isinstance(content, str):
            return text(content)
        return str(content).lower() if isinstance(content, bool) else repr(content)

    def text(content: str) -> str:
        quote = choose('"', "'")
        raw = content.encode()
        at = draw.draw(st.integers(0, len(raw)))
        parts = [raw[:at], raw[at:]] if draw.draw(st.booleans()) else [raw]
        kept = [
            [chr(byte) if 32 <= byte < 127 and byte not in b"\\\"'" else rf"\{byte:03o}" for byte in part]
            for part in parts
        ]
        escaped = ["".join(part) for part in kept]
        return space().join(f"{quote}{part}{quote}" for part in escaped)

    lines = []
    for name, content in message.items():
        colon = ":" if not isinstance(content, dict) or draw.draw(st.booleans()) else ""
        if isinstance(content, list) and draw.draw(st.booleans()):
            lines += [f"{name}:{space()}{value(each)}{choose('', ',', ';')}" for each in content]
        elif isinstance(content, list):
            lines.append(f"{name}{choose(':', ': ')}[{space()}{f',{space()}'.join(map(value, content))}]")
        else:
            lines.append(f"{name}{colon}{space()}{value(content)}{choose('', ',', ';')}")
    return "".join(line + choose(" ", "\n") for line in lines)


@given(MESSAGES, st.data())
def test_a_message_is_read_as_it_was_written(message: dict[str, object], data: st.DataObject) -> None:
    assert parse_text_format(written(message, data)).content == message


@given(st.text(max_size=30))
def test_texts_that_protobuf_writes(text: str) -> None:
    line = text_format.MessageToString(AnyValue(string_value=text))
    assert parse_text_format(line).content == {"string_value": text}


@given(st.text(alphabet=st.sampled_from("abx01.-:{}<>[],;#\"'\\\n e_"), max_size=40))
def test_any_text_is_a_message_or_an_error_with_its_line(text: str) -> None:
    said = None
    try:
        parse_text_format(text, "config.pbtxt")
    except InputError as error:
        said = error
    assert said is None or re.match(r"config\.pbtxt:\d+: ", said.what), said
    assert said is None or said.help


def test_numbers_names_and_escapes() -> None:
    text = r"""a: 0x1F b: 017 c: -1.5e1f d: -2 e: inf f: -nan g: TYPE_FP32 h: true
    i: "\x41\102\t\u00e4\U0001F600" j: .5"""
    content = parse_text_format(text).content
    assert isinstance(content, dict)
    assert math.isnan(content.pop("f"))
    assert content == {
        **{"a": 31, "b": 15, "c": -15.0, "d": -2, "e": math.inf, "g": "TYPE_FP32", "h": True, "i": "AB\tä😀", "j": 0.5}
    }


def test_every_field_has_its_line() -> None:
    value = parse_text_format('a: 1\nb [\n  { c: "x" },\n  { c: "y"\n    d: [1,\n 2] }\n]\nb { c: 3 }\n', "f")
    third = value.mapping()["b"].elements()[2].mapping()["c"]
    assert (third.where, third.content) == ("f:8: b[2].c", 3)
    assert value.mapping()["b"].elements()[1].mapping()["d"].where == "f:5: b[1].d"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb", "f:2: the end of the file cannot be read here"),
        ("a 1", "f:1: '1' cannot be read here"),
        ("a: {\nb: 1", "f:2: the end of the file cannot be read here"),
        ("a: [1 2]", "f:1: '2' cannot be read here"),
        ("a: [1,]", "f:1: ']' cannot be read here"),
        ('\na: "x', "f:2: '\"x' cannot be read here"),
        ("a: 12ab", "f:1: '12ab' cannot be read here"),
        ("a: 089", "f:1: '089' cannot be read here"),
        ("}", "f:1: '}' cannot be read here"),
        (r'a: "\377"', "f:1: "),
        ("a" * 5000 + ": 1", "f:1: "),
        ("a {" * (DEPTH_MAX + 1), "f:1: the end of the file is nested more than"),
    ],
)
def test_what_is_no_message(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_text_format(text, "f")
    assert caught.value.what.startswith(says)
    assert caught.value.help


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    with pytest.raises(InputError, match="cannot read it"):
        read_text_format(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_text_format(path)
    path.write_bytes(b"#" * (BYTES_MAX + 1))
    with pytest.raises(InputError, match="larger than"):
        read_text_format(path)
