"""Options: one text for each kind of mistake, at its place, whatever is read and wherever it was declared."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from sloop.errors import InputError
from sloop.options import (
    OutOfRange,
    PositiveFloat,
    PositiveInt,
    Range,
    Value,
    adjust,
    as_value,
    check_range,
    check_ranges,
    describe,
    keys_of,
    nearest,
    ranges_of,
    read_options,
    written,
)
from sloop.units import ms, s


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(Struct, frozen=True):
    replicas: int | None = None
    cores: PositiveFloat | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    rate: Annotated[float, Range(least=0, most=1e7)]
    file: Path = Path("here")
    colour: Colour = Colour.RED
    mode: Literal["fast", "slow"] = "fast"
    times: Annotated[int, Range(least=1, most=9)] = 1
    length_s: PositiveFloat | None = None
    rates: tuple[PositiveFloat, ...] = (1.0,)
    matrix: tuple[tuple[float, ...], ...] = ((1.0,),)
    name: str = ""
    wait_ns: Annotated[int, Range(least=ms(1))] = s(1)
    rest_ns: int = s(9)
    on: bool = False
    parts: Mapping[str, Part] = field(default_factory=dict)
    _memory: list[int] = field(init=False, default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range("rest_ns", self.rest_ns, least=self.wait_ns)


def value(content: object) -> Value:
    return as_value({"k": content}).mapping()["k"]


def test_options_are_read_as_their_types_say() -> None:
    declared = {
        "rate": 3, "file": "a/b", "colour": "blue", "mode": "slow", "times": 2.0, "length_s": 5, "rates": [1, 2.5],
        "matrix": [[1], [2]], "name": "", "wait_s": 2, "on": True, "parts": {"x": {"replicas": 2}},
    }  # fmt: skip
    matrix, parts = ((1.0,), (2.0,)), {"x": Part(replicas=2)}
    expected = Sample(
        3.0, Path("a/b"), Colour.BLUE, "slow", 2, 5.0, (1.0, 2.5), matrix, wait_ns=s(2), on=True, parts=parts
    )
    assert read_options(Sample, declared) == expected
    assert read_options(Sample, {"rate": 1, "rates": 4}).rates == (4.0,), "one element needs no list"


def test_what_is_written_is_read_again() -> None:
    sample = Sample(2.0, wait_ns=ms(2.5), parts={"x": Part(cores=0.5)})
    assert tuple(written(sample)) == keys_of(Sample)
    assert written(sample)["wait_ms"] == 2.5
    assert read_options(Sample, written(sample)) == sample


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"rate": 1, "colr": "red"}, "colr: unknown key 'colr'\nhelp: did you mean 'colour'?"),
        ({"rate": 1, "wait_ns": 1}, "wait_ns: unknown key 'wait_ns'\nhelp: did you mean 'wait_ms'?"),
        ({"rate": 1, "wait_ms": 1, "wait_s": 1}, "wait_s: given twice, in _ms and in _s\nhelp: keep one"),
        ({}, "the key 'rate' is missing\nhelp: add 'rate:' here"),
        ({"rate": "5"}, "rate: must be a number of at least 0 and at most 10,000,000, not '5'"),
        ({"rate": 1e8}, "rate: must be a number of at least 0 and at most 10,000,000, not 100000000"),
        ({"rate": 10**400}, "rate: must be a number of at least 0 and at most 10,000,000, not a huge number"),
        ({"rate": 1, "colour": "bleu"}, "colour: must be one of red, blue, not 'bleu'\nhelp: did you mean 'blue'?"),
        ({"rate": 1, "mode": 3}, "mode: must be one of fast, slow, not 3"),
        ({"rate": 1, "times": 1.5}, "times: must be a whole number of at least 1 and at most 9, not 1.5"),
        ({"rate": 1, "times": True}, "times: must be a whole number of at least 1 and at most 9, not true"),
        ({"rate": 1, "length_s": 0}, "length_s: must be a number above 0, not 0"),
        ({"rate": 1, "rates": [1, None]}, "rates[1]: must be a number above 0; it has no value"),
        ({"rate": 1, "matrix": [[1], ["x"]]}, "matrix[1][0]: must be a number, not 'x'"),
        ({"rate": 1, "file": ""}, "file: must be text that is not empty, not ''"),
        ({"rate": 1, "on": 1}, "on: must be true or false, not 1"),
        ({"rate": 1, "parts": {"x": {"replica": 2}}}, "parts.x.replica: unknown key 'replica'\nhelp: did you mean"),
        ({"rate": 1, "parts": [1]}, "parts: must be a mapping (key: value), not a list"),
        ({"rate": 1, "wait_s": -1}, "wait_s: must be a number of at least 0"),
        ({"rate": 1, "wait_s": 1e200}, "wait_s: must be a number of at least 0 and at most 3,153,600,000, not 1e+200"),
        ({"rate": 1, "wait_ms": 0}, "wait_ms: must be a time of at least 1 ms, not 0 ms"),
        ({1: 2}, "1: the key 1 must be text\nhelp: put it in quotes"),
    ],
)
def test_each_kind_of_mistake_has_one_text(declared: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_options(Sample, declared)
    assert str(caught.value).startswith(message)


def test_an_error_names_file_line_and_key_where_they_are_known() -> None:
    lines = {"": 1, "a": 2, "a.rate": 3}
    with pytest.raises(
        InputError, match=r"^f\.yaml:3: a\.rate: must be a number of at least 0 and at most 10,000,000, not -1$"
    ):
        read_options(Sample, Value({"rate": -1}, "a", "f.yaml", lines))
    with pytest.raises(InputError, match=r"^f\.yaml:2: a: the key 'rate' is missing"):
        read_options(Sample, Value({}, "a", "f.yaml", lines))
    with pytest.raises(InputError, match=r"^f\.yaml:2: a\.wait_s: must be a time"):
        read_options(Sample, Value({"rate": 1, "wait_s": 0}, "a", "f.yaml", lines))


def test_keys_of_other_readers_are_left_alone_and_still_suggested() -> None:
    assert read_options(Part, {"name": "x", "cores": 2}, also=("name",)) == Part(cores=2)
    with pytest.raises(InputError, match="unknown key 'nam'\nhelp: did you mean 'name'"):
        read_options(Part, {"nam": "x"}, also=("name",))
    assert read_options(Part, {"cores": "many"}, readers={"cores": lambda each: len(each.text())}) == Part(cores=4)


def test_adjusting_keeps_the_rest_and_starts_with_an_empty_memory() -> None:
    used = Sample(2.0, times=3)
    used._memory.append(1)
    changed = adjust(used, {"rate": 5})
    assert (changed, changed._memory) == (Sample(5.0, times=3), [])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys((*keys_of(Sample), "wait_s"), ANYTHING)))
def test_only_input_errors_escape(declared: dict[str, object]) -> None:
    try:
        read_options(Sample, Value(declared, "x"))
    except InputError as error:
        assert error.where.startswith("x")  # noqa: PT017
        assert error.help or "must be" in error.what  # noqa: PT017


def test_what_is_in_range_passes() -> None:
    check_range("queue_max", 1, least=1)
    check_range("cores", 0.1, above=0)
    check_range("margin", 1, above=0, most=1)
    assert Range(least=0, most=1).check(1, "here") == 1


@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf])
def test_what_is_out_of_range_is_named(number: float) -> None:
    with pytest.raises(OutOfRange, match=rf"^cores must be a number above 0, not {number}$") as caught:
        check_range("cores", number, above=0)
    assert caught.value.key == "cores"
    with pytest.raises(InputError, match=r"^f\.csv:3: must be a number above 0 and at most 1, not"):
        Range(above=0, most=1).check(number, "f.csv:3")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": -1}, "rate must be a number of at least 0 and at most 10,000,000, not -1"),
        ({"times": 10}, "times must be a number of at least 1 and at most 9, not 10"),
        ({"length_s": 0}, "length_s must be a number above 0, not 0"),
        ({"rates": (1.0, math.nan)}, "rates[1] must be a number above 0, not nan"),
        ({"wait_ns": 0}, "wait_ms must be a time of at least 1 ms, not 0 ms"),
        ({"parts": {"a": Part(cores=2), "b": Part(cores=-2)}}, "parts.b.cores must be a number above 0, not -2"),
    ],
)
def test_ranges_of_options_made_in_python_are_those_of_the_annotations(wrong: dict[str, Any], message: str) -> None:
    check_ranges(Sample(rate=0))
    with pytest.raises(OutOfRange) as caught:
        check_ranges(Sample(**{"rate": 1, **wrong}))
    assert str(caught.value) == message


@dataclass(frozen=True)
class Annotations:
    """Forms of annotations that a user's policy may have."""

    doubtful: Annotated[float, "as a fraction"] = 1
    described: Annotated[float, Range(above=0), "in cores"] = 1
    narrowed: Annotated[PositiveFloat, Range(most=10)] = 1
    optional: Annotated[float | None, Range(above=0)] = None
    listed: Annotated[tuple[float, ...], Range(above=0)] = (1,)
    either: int | float | None = 1
    named: Mapping[str, PositiveFloat] | None = None
    calm_ns: PositiveInt | None = None
    count: PositiveInt = 1


def test_a_range_may_stand_anywhere_in_an_annotation() -> None:
    check_ranges(Annotations())
    assert ranges_of(Annotations) == {
        "described": "above 0",
        "narrowed": "above 0 and at most 10",
        "optional": "above 0",
        "listed": "above 0",
        "named": "above 0",
        "calm_ms": "above 0 ms",
        "count": "at least 1",
    }
    assert written(Annotations())["calm_ms"] is None
    assert read_options(Annotations, {"doubtful": -1, "listed": [2, 3]}) == Annotations(doubtful=-1, listed=(2, 3))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("described", 0, "described must be a number above 0, not 0"),
        ("narrowed", 11, "narrowed must be a number above 0 and at most 10, not 11"),
        ("optional", -1, "optional must be a number above 0, not -1"),
        ("listed", (1, 0), "listed[1] must be a number above 0, not 0"),
        ("named", {"a": 0}, "named.a must be a number above 0, not 0"),
        ("calm_ns", 0, "calm_ms must be a time above 0 ms, not 0 ms"),
        ("count", 1.5, "count must be a whole number, not 1.5"),
        ("count", "1", "count must be a number of at least 1, not '1'"),
        ("count", None, "count must be a number of at least 1, not empty"),
    ],
)
def test_a_range_is_checked_wherever_it_stands(key: str, value: Any, message: str) -> None:
    with pytest.raises(OutOfRange) as caught:
        check_ranges(Annotations(**{key: value}))
    assert str(caught.value) == message
    written_key, declared = ("calm_ms", value) if key == "calm_ns" else (key, value)
    with pytest.raises(InputError, match=r"must be"):
        read_options(Annotations, {written_key: [*declared] if isinstance(declared, tuple) else declared})


def test_options_are_dataclasses() -> None:
    with pytest.raises(InputError, match=r"^object is no dataclass\nhelp: decorate it with @dataclass"):
        check_ranges(object())


def test_durations_are_named_as_users_write_them() -> None:
    with pytest.raises(OutOfRange, match=r"^wait_ms must be a time of at least 0 ms, not -2\.5 ms$"):
        check_range("wait_ns", ms(-2.5), least=0)


def test_both_ends_of_a_range_may_be_in_it() -> None:
    for end in (0, 1):
        check_range("share", end, least=0, most=1)
    for number in (-0.1, 1.01, math.nan, math.inf):
        with pytest.raises(InputError, match="share must be a number of at least 0 and at most 1"):
            check_range("share", number, least=0, most=1)


def test_types_that_are_right() -> None:
    assert value(3).number() == 3.0
    assert value(3.0).integer() == 3
    assert value(10**15).integer() == 10**15
    assert value("x").text() == "x"
    assert value(True).boolean() is True
    assert value("b").choice(("a", "b")) == "b"
    assert [each.content for each in value([1, 2]).one_or_more()] == [1, 2]
    assert [each.content for each in value(1).one_or_more()] == [1]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: value(True).number(), "must be a number, not true"),
        (lambda: value(float("inf")).number(), "must be a number, not inf"),
        (lambda: value(10**400).number(), "must be a number, not a huge number"),
        (lambda: value(5).number(above=5), "must be a number above 5, not 5"),
        (lambda: value(5).number(least=6, most=9), "must be a number of at least 6 and at most 9, not 5"),
        (
            lambda: value(3e9).number(above=0, most=2e9),
            "must be a number above 0 and at most 2,000,000,000, not 3000000000",
        ),
        (lambda: value(0).number(above=0, most=2e9), "must be a number above 0, not 0"),
        (lambda: value(2.5).integer(), "must be a whole number, not 2.5"),
        (lambda: value(1).text(), "must be text, not 1"),
        (lambda: value(" ").text(), "must be text that is not empty, not ' '"),
        (lambda: value("yes").boolean(), "must be true or false, not 'yes'"),
        (lambda: value(1).mapping(("a",)), "must be a mapping with the keys a, not 1"),
        (lambda: value({"a": 1}).elements(), "must be a list, not a mapping"),
        (lambda: value([]).choice(("a", "b")), "must be one of a, b, not a list"),
        (lambda: value(None).elements(), "must be a list; it has no value"),
        (lambda: value(object()).number(), "must be a number, not a object"),
    ],
)
def test_types_that_are_wrong(call: Callable[[], object], what: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.what == f"k: {what}"


def test_nearest_known_word_or_all() -> None:
    assert nearest("slo", ("slo_ms", "name")) == "did you mean 'slo_ms'?"
    assert nearest("xyz", ("slo_ms", "name")) == "known here: slo_ms, name"


def test_a_long_word_is_not_compared() -> None:
    assert nearest("k" * 10_000, ("k",)) == "known here: k"


def test_shows_long_values_shortened() -> None:
    assert len(describe("x" * 1000)) < 70
