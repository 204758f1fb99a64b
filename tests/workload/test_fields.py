from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.workload.fields import POSITIVE, RATE, Limits, build, limited, number
from sloop.workload.spread import Spread

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@dataclass(frozen=True, slots=True)
class Sample:
    rate: float = limited(limits=RATE)
    file: Path = Path("here")
    spread: Spread = Spread.UNIFORM
    times: int = limited(1, limits=Limits(low=1, high=9))
    length_s: float | None = limited(None, limits=POSITIVE)
    rates: tuple[float, ...] = (1.0,)
    matrix: tuple[tuple[float, ...], ...] = ((1.0,),)
    name: str = ""


def test_builds_what_is_written() -> None:
    written = {"rate": 3, "spread": "burst", "times": 2.0, "length_s": 5, "rates": [1, 2.5], "matrix": [[1], [2]]}
    expected = Sample(3.0, Path("here"), Spread.BURST, 2, 5.0, (1.0, 2.5), ((1.0,), (2.0,)))
    assert build(Sample, written, where="x") == expected
    assert build(Sample, {"rate": 1, "file": "a/b"}, where="x").file == Path("a/b")


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Sample.__dataclass_fields__, ANYTHING)))
def test_only_input_errors_escape(written: dict[str, object]) -> None:
    try:
        build(Sample, written, where="x")
    except InputError as error:
        assert error.where.startswith("x")  # noqa: PT017
        assert error.help  # noqa: PT017


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"rate": 1, "spred": "burst"}, "x: unknown key 'spred'\nhelp: did you mean 'spread'?"),
        ({"rate": 1, "spread": "brust"}, "x.spread: 'brust' is not one of the choices\nhelp: did you mean 'burst'?"),
        ({"rate": 1, "spread": 3}, "x.spread: 3 is not text"),
        ({"rate": 1, "times": 1.5}, "x.times: 1.5 is not a whole number"),
        ({"rate": 1, "times": 0}, "x.times: 0.0 is out of range\nhelp: [1, 9]"),
        ({"rate": 1, "length_s": 0}, "x.length_s: 0.0 is out of range\nhelp: (0, 1e+12]"),
        ({"rate": 1, "matrix": [1]}, "x.matrix[0]: 1 is not a list of numbers"),
        ({"rate": 10**400}, "x.rate: the number is too large"),
    ],
)
def test_messages(written: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        build(Sample, written, where="x")
    assert message in str(caught.value)


def test_true_is_not_a_number() -> None:
    with pytest.raises(InputError, match="True is not a number"):
        number(True, "x")
