"""Numbers out of text: counts, instants and gaps, each with the line it stands on.

Promises that whatever is not a plain number raises `InputError` naming file and line. A *gap* is a hole in a series of
counts: an empty line between others, an empty cell, or one of `MISSING_WORDS`; it is refused, or filled with the count
before it, as the user chooses.
"""

import csv
import re
from array import array
from calendar import timegm
from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal, DecimalException
from enum import StrEnum
from typing import Final, NamedTuple

from sloop.errors import InputError
from sloop.options import nearest
from sloop.units import NS_PER_S
from sloop.workload.archive import Text

COUNT_MAX: Final = 10_000_000
INSTANT_S_MAX: Final = 5 * 10**9
"""Of a written instant: the year 2128, and in ns still within 64 bits."""
LENGTH_S_MAX: Final = 10**8
"""Of a trace: three years, whose counts per second still fit in memory."""
MISSING_WORDS: Final = frozenset({"", "nan", "na", "n/a", "null", "none", "-"})
EPOCH_S: Final = 10**8
"""Instants from 1973 on are dates: such a trace starts at its first arrival rather than at 1970."""

_PLAIN = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


class Gaps(StrEnum):
    """What to do about a hole in a series of counts."""

    REFUSE = "refuse"
    FILL = "fill"
    """With the count before it."""


class Unit(StrEnum):
    """Of a file's instants and gaps."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"

    @property
    def exponent(self) -> int:
        return {"s": 9, "ms": 6, "us": 3, "ns": 0}[self.value]


class Cell(NamedTuple):
    """One entry of a file and its line, from 1."""

    text: str
    line: int


def words(text: Text) -> Iterator[Cell]:
    """The entries of a text file, separated by blanks, commas or ends of line; an inner empty line is an empty entry.

    Lines that begin with # are comments.
    """
    empty: list[Cell] = []
    begun = False
    for line, content in enumerate(text.text.splitlines(), start=1):
        if content.startswith("#"):
            continue
        parts = content.replace(",", " ").split()
        if not parts:
            empty.append(Cell("", line))
            continue
        if begun:
            yield from empty
        empty.clear()
        begun = True
        for part in parts:
            yield Cell(part, line)


def column(text: Text, name: str, candidates: Iterable[str]) -> Iterator[Cell]:
    """One column of a CSV file with a header: the one called `name`, else the first of `candidates`, else the only one.

    Names are compared without regard to case.
    """
    rows = csv.reader(text.text.splitlines(keepends=True))
    try:
        header = [cell.strip().lower() for cell in next(rows, [])]
        place = _place(header, name, candidates, text.where)
        for row in rows:
            if row:
                yield Cell(row[place].strip() if place < len(row) else "", rows.line_num)
    except csv.Error as error:
        raise InputError(f"not CSV: {error}", where=f"{text.where}:{rows.line_num}", help="check that line") from None


def _place(header: list[str], name: str, candidates: Iterable[str], where: str) -> int:
    if name:
        if name.lower() not in header:
            raise InputError(f"no column {name!r}", where=f"{where}:1", help=nearest(name.lower(), header))
        return header.index(name.lower())
    for candidate in candidates:
        if candidate in header:
            return header.index(candidate)
    if len(header) == 1:
        return 0
    help_text = f"name one as `column`: {', '.join(header)}" if header else "the file is empty"
    raise InputError("which column to read is not clear", where=f"{where}:1", help=help_text)


def quick_counts(text: Text) -> "array[int] | None":
    """The counts of a clean file in one pass of C code, or None where it needs looking at line by line."""
    content = text.text
    if "_" in content or not content.isascii():
        return None
    lines = content.strip().splitlines()
    if len(lines) > 1 and not all(lines):
        return None
    try:
        counts = array("q", map(int, content.split()))
    except (ValueError, OverflowError):
        return None
    return counts if counts and min(counts) >= 0 and max(counts) <= COUNT_MAX else None


def careful_counts(cells: Iterable[Cell], where: str, gaps: Gaps) -> "array[int]":
    """Counts per second, checked one by one."""
    counts = array("q")
    for cell in cells:
        if cell.text.lower() in MISSING_WORDS:
            counts.append(_filled(counts, gaps, f"{where}:{cell.line}"))
        else:
            counts.append(_count(cell, where))
    if not counts:
        raise InputError("the trace is empty", where=where, help="a trace needs at least one count per second")
    return counts


def _filled(counts: "array[int]", gaps: Gaps, where: str) -> int:
    if gaps == Gaps.REFUSE:
        raise InputError(
            f"a gap: second {len(counts)} has no count",
            where=where,
            help="put a number there, or say `gaps: fill` to repeat the count before it",
        )
    if not counts:
        raise InputError("a gap at the start has no count before it", where=where, help="cut it off")
    return counts[-1]


def _count(cell: Cell, where: str) -> int:
    here = f"{where}:{cell.line}"
    exact = _decimal(cell.text, here)
    if exact < 0:
        raise InputError(f"{cell.text} requests are fewer than none", where=here, help="counts per second start at 0")
    if exact != exact.to_integral_value():
        raise InputError(
            f"{cell.text} is not a whole number of requests",
            where=here,
            help="for times of arrival say `format: timestamps`, for times between arrivals `format: gaps`",
        )
    if exact > COUNT_MAX:
        raise InputError(
            f"{cell.text} requests in one second",
            where=here,
            help=f"at most {COUNT_MAX:,}; for times of arrival say `format: timestamps`",
        )
    return int(exact)


def instants_ns(cells: Iterable[Cell], where: str, unit: Unit) -> Iterator[int]:
    """Times of arrival as ns from the start: sorted, none negative. Dates and epochs start at the first arrival."""
    origin_ns: int | None = None
    last_ns = 0
    for cell in cells:
        here = f"{where}:{cell.line}"
        at_ns = _instant_ns(cell.text, here, unit)
        if origin_ns is None:
            origin_ns = at_ns if at_ns >= EPOCH_S * NS_PER_S else 0
            last_ns = origin_ns
        if at_ns < 0:
            raise InputError(f"{cell.text} is before the start", where=here, help="times of arrival start at 0")
        if at_ns < last_ns:
            raise InputError(f"{cell.text} is before the arrival above it", where=here, help="sort the file by time")
        last_ns = at_ns
        yield _bounded(at_ns - origin_ns, cell, here)
    if origin_ns is None:
        raise InputError("the trace is empty", where=where, help="a trace needs at least one arrival")


def after_gaps_ns(gaps: Iterable[Cell], where: str, unit: Unit) -> Iterator[int]:
    """Arrivals from the times between them; the first gap leads to the first arrival."""
    at_ns, number = 0, 0
    for number, cell in enumerate(gaps, start=1):  # noqa: B007  # the last number says whether there was any
        here = f"{where}:{cell.line}"
        gap_ns = _ns(_decimal(cell.text, here), here, unit)
        if gap_ns < 0:
            raise InputError(f"the gap {cell.text} is negative", where=here, help="arrivals follow one another")
        at_ns += gap_ns
        yield _bounded(at_ns, cell, here)
    if number == 0:
        raise InputError("the trace is empty", where=where, help="a trace needs at least one arrival")


def _instant_ns(text: str, where: str, unit: Unit) -> int:
    if ":" not in text:
        return _ns(_decimal(text, where), where, unit)
    match = _DATE.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1] + (match[3] or "+00:00").replace("Z", "+00:00"))
        return timegm(whole.utctimetuple()) * NS_PER_S + int((match[2] or "").ljust(9, "0"))
    except (ValueError, OverflowError):
        raise InputError(
            f"{text!r} is not a date and time",
            where=where,
            help="write 2023-11-16 18:17:03.9799600, UTC unless it says",
        ) from None


def _decimal(text: str, where: str) -> Decimal:
    if not _PLAIN.fullmatch(text):
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise InputError(f"{shown!r} is not a number", where=where, help="the trace is to hold numbers only")
    try:
        return Decimal(text)
    except DecimalException:
        raise InputError(f"{text!r} is not a number", where=where, help="the trace is to hold numbers only") from None


def _bounded(at_ns: int, cell: Cell, where: str) -> int:
    if at_ns > LENGTH_S_MAX * NS_PER_S:
        raise InputError(f"at {cell.text} the trace is over 3 years long", where=where, help="check file and `unit`")
    return at_ns


def _ns(value: Decimal, where: str, unit: Unit) -> int:
    if abs(value) > INSTANT_S_MAX * 10 ** (9 - unit.exponent):
        raise InputError(f"{value} {unit} is too late", where=where, help="check the `unit`: s, ms, us or ns")
    return int(value.scaleb(unit.exponent))
