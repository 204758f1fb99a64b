"""The same number reads the same everywhere."""

import pytest

from sloop.text import chain, counted, in_ms, in_s, listed, number, numbered, quoted, shortened
from sloop.units import ms, s


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (12.0, "12"), (1 / 3, "0.3333"), (39.916, "39.92"), (1234, "1,234"), (1234.5, "1,234"),
        (2_000_000, "2,000,000"), (float("inf"), "∞"), (float("-inf"), "-∞"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_or_are_whole(value: float, written: str) -> None:
    assert number(value) == written


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(n, "core") for n in (0, 0.5, 1, 12)] == ["0 cores", "0.5 cores", "1 core", "12 cores"]
    assert counted(2, "batch", "batches") == "2 batches"


def test_durations_name_their_unit() -> None:
    assert in_ms(ms(12.34)) == "12.3 ms"
    assert in_ms(ms(12.34), 0) == "12 ms"
    assert in_s(s(2.5)) == "2.5 s"


def test_lists() -> None:
    assert [listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert listed(["a", "b"], "or") == "a or b"
    assert chain(["detect", "read"]) == "detect → read"


def test_long_lists_of_ids_are_shortened() -> None:
    assert numbered("request", [3]) == "request 3"
    assert numbered("request", [3, 4, 5]) == "requests 3, 4 and 5"
    assert numbered("request", range(20)) == "requests 0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)"


def test_values_in_errors_stay_short() -> None:
    assert shortened("abcdef", 4) == "abc…"
    assert quoted("abcdef", 4) == "'abc…'"
    assert quoted("abc") == "'abc'"
    assert quoted([1, 2]) == "[1, 2]"
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted(list(range(1000)))) == 60
