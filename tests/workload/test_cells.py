from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.workload.archive import Text
from sloop.workload.cells import (
    Cell,
    Gaps,
    Unit,
    after_gaps_ns,
    careful_counts,
    column,
    instants_ns,
    quick_counts,
    words,
)

MESSY = st.text(alphabet='0123456789 .,-+e_:\n\r\tTZnax#\x00\x0b\u0661"', max_size=40)


def counts_of(text: str, gaps: Gaps = Gaps.REFUSE) -> list[int]:
    return list(careful_counts(words(Text(text, "t")), "t", gaps))


def instants_of(text: str, unit: Unit = Unit.S) -> list[int]:
    return list(instants_ns(words(Text(text, "t")), "t", unit))


@settings(max_examples=300, deadline=None)
@given(MESSY)
def test_only_input_errors_escape_and_they_name_the_line(text: str) -> None:
    for read in (
        lambda: counts_of(text),
        lambda: counts_of(text, Gaps.FILL),
        lambda: instants_of(text),
        lambda: list(after_gaps_ns(words(Text(text, "t")), "t", Unit.MS)),
        lambda: list(column(Text(text, "t"), "", ("n",))),
        lambda: list(column(Text(text, "t"), "x", ())),
    ):
        try:
            read()
        except InputError as error:
            assert error.where.startswith("t")  # noqa: PT017
            assert error.help  # noqa: PT017


@settings(max_examples=100, deadline=None)
@given(MESSY)
def test_the_quick_way_agrees_with_the_careful_one(text: str) -> None:
    quick = quick_counts(Text(text, "t"))
    if quick is not None:
        assert list(quick) == counts_of(text)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1_000), min_size=1), st.sampled_from([" ", "\n", ", ", "\r\n", "  \t"]))
def test_clean_counts_are_read_the_quick_way(counts: list[int], between: str) -> None:
    text = Text(between.join(map(str, counts)), "t")
    assert counts_of(text.text) == counts
    if "," not in between:
        assert list(quick_counts(text) or ()) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t: the trace is empty"),
        ("  \n\n", "t: the trace is empty"),
        ("1\n2\nthree\n", "t:3: 'three' is not a number"),
        ("1\n-2\n", "t:2: -2 requests are fewer than none"),
        ("1\n2.5\n", "t:2: 2.5 is not a whole number of requests\nhelp: for times of arrival say `format: timestamps`"),
        ("1\n\n3\n", "t:2: a gap: second 1 has no count\nhelp: put a number there, or say `gaps: fill`"),
        ("1 nan 3", "t:1: a gap: second 1 has no count"),
        ("1 1700000000", "t:1: 1700000000 requests in one second"),
        ("0x10", "t:1: '0x10' is not a number"),
        ("1_000", "t:1: '1_000' is not a number"),
    ],
)
def test_bad_counts(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        counts_of(text)
    assert message in str(caught.value)


def test_gaps_are_filled_with_the_count_before_when_asked() -> None:
    assert counts_of("# comment\n5\n\nnan\n7\n\n", Gaps.FILL) == [5, 5, 5, 7]
    with pytest.raises(InputError, match="t:1: a gap at the start"):
        counts_of("nan 3", Gaps.FILL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t: the trace is empty"),
        ("1.5\nx\n", "t:2: 'x' is not a number"),
        ("1\n3\n2\n", "t:3: 2 is before the arrival above it\nhelp: sort the file by time"),
        ("-1\n", "t:1: -1 is before the start"),
        ("1e30", "t:1: 1E+30 s is too late"),
        ("0001-01-01 00:00:00\n9999-01-01 00:00:00", "t:1: '0001-01-01' is not a number"),
        ("25:61:99", "t:1: '25:61:99' is not a date and time"),
    ],
)
def test_bad_instants(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        instants_of(text)
    assert message in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 10**17 - 1), min_size=1).map(sorted), st.sampled_from(list(Unit)))
def test_instants_are_exact(times_ns: list[int], unit: Unit) -> None:
    text = "\n".join(format(Decimal(at_ns).scaleb(-unit.exponent), "f") for at_ns in times_ns)
    assert instants_of(text, unit) == times_ns


def test_dates_and_epochs_start_at_the_first_arrival() -> None:
    cells = [Cell("2023-11-16 18:15:46.6805900", 2), Cell("2023-11-16T18:15:50.9951690Z", 3)]
    assert list(instants_ns(cells, "t", Unit.S)) == [0, 4_314_579_000]
    offset = [Cell("2023-11-16 18:00:00Z", 2), Cell("2023-11-16 20:00:01+02:00", 3)]
    assert list(instants_ns(offset, "t", Unit.S)) == [0, 1_000_000_000]
    assert instants_of("1700000000123 1700000000125", Unit.MS) == [0, 2_000_000]


def test_columns_are_found_by_name_candidate_or_being_alone() -> None:
    table = Text("Time, Count\n1,2\n3\n", "t")
    assert list(column(table, "COUNT", ())) == [Cell("2", 2), Cell("", 3)]
    assert list(column(table, "", ("when", "time"))) == [Cell("1", 2), Cell("3", 3)]
    assert list(column(Text("x\n1\n", "t"), "", ())) == [Cell("1", 2)]
    with pytest.raises(InputError, match="no column 'cont'\nhelp: did you mean 'count'"):
        list(column(table, "cont", ()))
    with pytest.raises(InputError, match="which column to read is not clear\nhelp: name one as `column`: time, count"):
        list(column(table, "", ()))


def test_gaps_between_arrivals_add_up() -> None:
    assert list(after_gaps_ns([Cell("5", 1), Cell("0", 1), Cell("1e-6", 1)], "t", Unit.MS)) == [
        5_000_000,
        5_000_000,
        5_000_001,
    ]
    with pytest.raises(InputError, match="t:1: the gap -1 is negative"):
        list(after_gaps_ns([Cell("-1", 1)], "t", Unit.MS))


def test_a_trace_is_at_most_three_years_long() -> None:
    with pytest.raises(InputError, match="t:2: at 6e7 the trace is over 3 years long"):
        list(after_gaps_ns([Cell("6e7", 1), Cell("6e7", 2)], "t", Unit.S))
    with pytest.raises(InputError, match="t:3: at 2123-01-01 00:00:00 the trace is over 3 years long"):
        list(instants_ns([Cell("2023-01-01 00:00:00", 2), Cell("2123-01-01 00:00:00", 3)], "t", Unit.S))
