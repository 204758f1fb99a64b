"""Documents: values that know their place, and that no text does harm."""

from pathlib import Path

import pytest

from sloop.app.document import BYTES_MAX, DEPTH_MAX, VALUES_MAX, parse_yaml, read_yaml
from sloop.errors import InputError
from sloop.options import Value


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read it"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_yaml(tmp_path / "bytes.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(InputError, match=r"empty\.yaml:1: the file is empty") as found:
        read_yaml(tmp_path / "empty.yaml")
    assert "for example" in found.value.help, "it may be meant to hold something else than an application"


def test_a_file_is_not_parsed_if_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parses(*_: object, **__: object) -> None:
        raise AssertionError("the text must not reach the parser")

    monkeypatch.setattr("yaml.compose", parses)
    path = tmp_path / "large.yaml"
    path.write_bytes(b"a: 1\n" * (BYTES_MAX // 5 + 1))
    limit = rf"large\.yaml: larger than {BYTES_MAX:,} bytes, the most that a YAML file may have"
    with pytest.raises(InputError, match=limit):
        read_yaml(path)
    with pytest.raises(InputError, match="larger than"):
        read_yaml(Path("/dev/zero"))
    with pytest.raises(InputError, match="TRACE: larger than"):
        parse_yaml("{" + " " * BYTES_MAX + "}", "TRACE")


def test_bombs_name_file_and_limit() -> None:
    """A value that ten aliases refer to, ten levels deep, is ten thousand million values."""
    laughs = "a0: &a0 [ha, ha]\n" + "".join(
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 11)
    )
    with pytest.raises(InputError, match=rf"^bomb\.yaml:\d+: .*larger than {VALUES_MAX} values"):
        parse_yaml(laughs, "bomb.yaml")
    with pytest.raises(InputError, match=rf"^deep\.yaml:1: .*larger than {DEPTH_MAX} levels"):
        parse_yaml("a: " + "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1), "deep.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "bom.yaml").content == {"a": 1}


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
        _use(parse_yaml(text))


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
        parse_yaml(text, "f.yaml")
    assert str(caught.value).startswith(says)
    assert caught.value.help


DEEPER = "f.yaml:2: not YAML: this line goes on with the value of the one before"
LIST = "stages:\n  - name: a\n"


@pytest.mark.parametrize(
    ("text", "says", "help"),
    [
        ("name: demo\n slo_ms: 200\n", DEEPER, "indent it as that line"),
        ("name demo\nslo_ms: 200\n", DEEPER, "end that line with `:`"),
        (f"{LIST}   model: x\n", "f.yaml:3: not YAML: 3 spaces before this line, 2 before the block", "indentation"),
        ("a:\n    b: 1\n  c: 2\n", "f.yaml:3: not YAML: 2 spaces before this line, 0 before the block", "indentation"),
        (
            "a: 1\n- b\n",
            "f.yaml:2: not YAML: a key among the items of a list, or an item among keys",
            "with its own `-`",
        ),
        (f"{LIST}    model\n    after: []\n", "f.yaml:3: not YAML: a key without `:`", "`key: value`"),
        ("a: b: c\n", "f.yaml:1: not YAML: a second `: ` in this line", "in quotes"),
        ("a: @b\n", "f.yaml:1: not YAML: a value that begins with '@'", "in quotes"),
        ("a:\n\tb: 1\n", "f.yaml:2: not YAML: a tab that indents", "with spaces"),
        ('a: "b\nc: 1\n', "f.yaml:1: not YAML: what begins here does not end", "close"),
        ("a: [1, 2\nb: 1\n", "f.yaml:1: not YAML: what begins here does not end", "close"),
        ("a: *b\n", "f.yaml:1: not YAML: found undefined alias 'b'", "check quotes"),
    ],
)
def test_what_is_no_yaml_is_said_in_words_of_the_text(text: str, says: str, help: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "f.yaml")
    assert str(caught.value).startswith(says)
    assert help in (caught.value.help or "")


def _use(document: Value) -> None:
    """Look at everything, as a reader of applications does."""
    document.mapping(("a",), required=("a",))["a"].number()


def test_values_know_their_place() -> None:
    document = parse_yaml("a: 1\nb:\n  - c: x\n    d: [1,\n      2]\n", "f.yaml")
    assert document.lines == {
        "": 1,
        "a": 1,
        "b": 2,
        "b[0]": 3,
        "b[0].c": 3,
        "b[0].d": 4,
        "b[0].d[0]": 4,
        "b[0].d[1]": 5,
    }
    assert document.content == {"a": 1, "b": [{"c": "x", "d": [1, 2]}]}
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
    got = parse_yaml(text).content
    assert got == content
    assert type(got) is type(content)


def test_long_keys_are_refused() -> None:
    with pytest.raises(InputError, match="a key of more than 200 characters"):
        parse_yaml("a:\n  " + "k" * 201 + ": 1")
