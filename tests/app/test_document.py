"""Documents: values that know their place, and that no text does harm."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sloop.app.document import Value, from_plain, nearest, parse, read, shown
from sloop.errors import InputError


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read it"):
        read(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read(tmp_path / "bytes.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(InputError, match=r"empty\.yaml:1: the file is empty"):
        read(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}' if i else '*a'] * 9)}]\n" for i in range(9)),
        'a: "\\UFFFFFFFF"',
        "a: 2020-13-45",
        "a: 0b",
        f"a: {'9' * 5000}",
        "? [1]\n: 2",
        "<<: {a: 1}",
        "!!python/object:os.system {}",
        "a: !!int x",
        "a: !!float []",
        "\x00",
        "a: b: c",
        "---\na: 1\n---\nb: 2",
        "%YAML 9.9\n---\n{}",
        "null: 1",
    ],
)
def test_hostile_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        _use(parse(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: !foo bar", "f.yaml:1: a: the tag '!foo' means nothing here"),
        ("a:\n  - !!python/object/apply:os.system [ls]", "f.yaml:2: a[0]: the tag 'tag:yaml.org,2002:python/object/ap"),
        ("b: &b {c: 1}\na: {<<: *b}", "f.yaml:2: a: mappings cannot be merged with '<<'"),
        ("a:\n\tb: 1", "f.yaml:2: not YAML"),
    ],
)
def test_what_yaml_has_and_we_have_not_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "f.yaml")
    assert str(caught.value).startswith(says)
    assert caught.value.help


def _use(document: Value) -> None:
    """Look at everything, as a reader of applications does."""
    document.plain()
    document.lines()
    document.mapping(("a",), required=("a",))["a"].number()


def test_values_know_their_place() -> None:
    document = parse("a: 1\nb:\n  - c: x\n    d: [1,\n      2]\n", "f.yaml")
    assert document.lines() == {
        "": 1,
        "a": 1,
        "b": 2,
        "b[0]": 3,
        "b[0].c": 3,
        "b[0].d": 4,
        "b[0].d[0]": 4,
        "b[0].d[1]": 5,
    }
    assert document.plain() == {"a": 1, "b": [{"c": "x", "d": [1, 2]}]}
    first = document.mapping()["b"].elements()[0].mapping()
    assert first["d"].where == "f.yaml:4: b[0].d"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("1", 1),
        ("1_000", 1000),
        ("1e3", 1000.0),
        ("-1E-3", -0.001),
        (".5", 0.5),
        ("yes", True),
        ("~", None),
        ("'1e3'", "1e3"),
        ('"1"', "1"),
        ("e", "e"),
        ("1e", "1e"),
        ("-", [None]),
        ("2020-01-01", "2020-01-01"),
        ("1.2.3", "1.2.3"),
        ("0x1F", 31),
        ("[a, 1]", ["a", 1]),
    ],
)
def test_scalars(text: str, content: object) -> None:
    got = parse(text).plain()
    assert got == content
    assert type(got) is type(content)


def value(content: object) -> Value:
    return from_plain({"k": content}).mapping()["k"]


def test_types_that_are_right() -> None:
    assert value(3).number() == 3.0
    assert value(3.0).integer() == 3
    assert value(10**15).integer() == 10**15
    assert value("x").text() == "x"
    assert value(True).boolean() is True
    assert value("b").choice(("a", "b")) == "b"
    assert [each.content for each in value([1, 2]).some()] == [1, 2]
    assert [each.content for each in value(1).some()] == [1]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: value(True).number(), "must be a number, not true"),
        (lambda: value(float("inf")).number(), "must be a number, not inf"),
        (lambda: value(10**400).number(), "must be a number, not a huge number"),
        (lambda: value(5).number(above=5), "must be a number above 5, not 5"),
        (lambda: value(5).number(least=6, most=9), "must be a number of at least 6 and at most 9, not 5"),
        (lambda: value(3e9).number(above=0, most=2e9), "must be a number above 0 and at most 2e+09, not 3000000000.0"),
        (lambda: value(0).number(above=0, most=2e9), "must be a number above 0, not 0"),
        (lambda: value(2.5).integer(), "must be a whole number, not 2.5"),
        (lambda: value(1).text(), "must be text, not 1"),
        (lambda: value(" ").text(), "must be text that is not empty, not ' '"),
        (lambda: value("yes").boolean(), "must be true or false, not 'yes'"),
        (lambda: value(1).mapping(("a",)), "must be a mapping (key: value) with the keys a, not 1"),
        (lambda: value({"a": 1}).elements(), "must be a list, not a mapping"),
        (lambda: value([]).choice(("a", "b")), "must be one of a, b, not a list"),
        (lambda: value(None).elements(), "must be a list, not empty"),
        (lambda: value(object()), "cannot use a object here"),
    ],
)
def test_types_that_are_wrong(call: Callable[[], object], what: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.what == f"<dict>:1: k: {what}"


def test_nearest_known_word_or_all() -> None:
    assert nearest("slo", ("slo_ms", "name")) == "did you mean 'slo_ms'?"
    assert nearest("xyz", ("slo_ms", "name")) == "known here: slo_ms, name"


def test_long_keys_are_refused() -> None:
    with pytest.raises(InputError, match="a key of more than 200 characters"):
        parse("a:\n  " + "k" * 201 + ": 1")
    assert nearest("k" * 10_000, ("k",)) == "known here: k"


def test_shows_long_values_shortened() -> None:
    assert len(shown("x" * 1000)) < 70
