"""Files to numbers: decompression and archives, columns and lines, counts, times of arrival and times between arrivals.

Files may be plain or compressed, or members of zip and tar archives; their size is bounded. InputError names file,
archive member and line of what cannot be read. Must not know which formats of traces and links there are.
"""

import bz2
import csv
import gzip
import lzma
import re
import tarfile
import zipfile
import zlib
from array import array
from calendar import timegm
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, DecimalException
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn

from sloop.errors import InputError
from sloop.options import Range, nearest
from sloop.text import quoted
from sloop.units import NS_PER_S

BYTES_MAX: Final = 512 * 2**20
"""Decompressed. A file of a few hundred kB can decompress to more than the memory holds."""
MEMBERS_MAX: Final = 10_000

_TAR = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_OPENERS: Final[Mapping[str, Callable[[Path, str], Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNREADABLE: Final = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)


@dataclass(frozen=True, slots=True)
class SourceText:
    """The text of a file, and the file's name for error messages."""

    text: str
    where: str


def refuse(where: str, what: str, help: str, line: int = 0) -> NoReturn:
    """Raise the InputError for a file, and for its `line` from 1."""
    raise InputError(what, where=f"{where}:{line}" if line else where, help=help)


def read_text(path: Path, *, member: str = "") -> SourceText:
    """The text of a file, decompressed; of an archive, the only file whose name starts with `member`."""
    if not _is_archive(path):
        return _decoded(_plain_bytes(path), str(path))
    members = _members(path, prefix=member)
    if len(members) == 1:
        name, content = next(iter(members.items()))
        return _decoded(content, f"{path}!{name}")
    names = ", ".join([*list(members)[:3], "…"] if len(members) > 3 else members)
    what = f"the archive has {len(members)} files: {names}" if members else f"no file called {member!r} in the archive"
    refuse(str(path), what, "name one of its files as `member`; a set of MAP matrices needs `format: map`")


def read_folder(path: Path, *, member: str = "") -> dict[str, SourceText]:
    """The files of a folder, or those of an archive whose names start with `member`, by file name."""
    if _is_archive(path):
        members = _members(path, prefix=member).items()
        return {name.rpartition("/")[2]: _decoded(content, f"{path}!{name}") for name, content in members}
    if not path.is_dir():
        refuse(str(path), "neither a folder nor an archive", "name the folder that holds the files")
    files = [child for child in sorted(path.iterdir()) if child.is_file()]
    if len(files) > MEMBERS_MAX:
        _refuse_number(path)
    return {child.name: _decoded(_plain_bytes(child), str(child)) for child in files}


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith((".zip", *_TAR))


def _plain_bytes(path: Path) -> bytes:
    with _file_errors(path), _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
        return _bounded(file, str(path))


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of decompression into `InputError`."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), help="check the path and the folder it starts from") from None
    except _UNREADABLE as error:
        raise InputError(f"cannot be read: {error}", where=str(path), help="check the file and its rights") from None


def _bounded(file: IO[bytes], where: str, read_bytes: int = 0) -> bytes:
    """The content of a file. `read_bytes` is what was read of its archive before; the limit holds for both together."""
    content = file.read(BYTES_MAX - read_bytes + 1)
    if read_bytes + len(content) > BYTES_MAX:
        before = "with the files before it " if read_bytes else ""
        refuse(where, f"{before}more than {BYTES_MAX:,} bytes", "cut it into smaller files")
    return content


def _refuse_number(path: Path) -> NoReturn:
    refuse(str(path), f"more than {MEMBERS_MAX:,} files", "name one of them, or leave out those that are not needed")


def _members(path: Path, *, prefix: str) -> dict[str, bytes]:
    """The files of an archive whose names start with `prefix`, without hidden ones."""
    members: dict[str, bytes] = {}
    read_bytes = 0
    with _file_errors(path):
        for name, opened in _archived(path):
            is_hidden = name.startswith("__MACOSX") or name.rpartition("/")[2].startswith(".")
            if name.startswith(prefix) and not is_hidden:
                if len(members) == MEMBERS_MAX:
                    _refuse_number(path)
                with opened() as file:
                    members[name] = _bounded(file, f"{path}!{name}", read_bytes)
                read_bytes += len(members[name])
    return members


def _archived(path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each file in an archive, and how to open it."""
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as zipped:
            yield from ((each.filename, partial(zipped.open, each)) for each in zipped.infolist() if not each.is_dir())
    else:
        with tarfile.open(path) as tarred:
            yield from ((each.name, partial(tarred.extractfile, each)) for each in tarred if each.isfile())


def _decoded(content: bytes, where: str) -> SourceText:
    try:
        return SourceText(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError("not text", where=f"{where}:{line}", help="a trace is a UTF-8 text file") from None


class Entry(NamedTuple):
    """One entry of a file and its line, from 1."""

    text: str
    line: int


def split_entries(text: SourceText) -> Iterator[Entry]:
    """The entries of a text file, separated by blanks, commas or line ends. Lines that start with # are comments.

    An empty line between two others is an empty entry.
    """
    empty: list[Entry] = []
    begun = False
    for line, content in enumerate(text.text.splitlines(), start=1):
        if content.startswith("#"):
            continue
        parts = content.replace(",", " ").split()
        if not parts:
            empty.append(Entry("", line))
            continue
        if begun:
            yield from empty
        empty.clear()
        begun = True
        for part in parts:
            yield Entry(part, line)


def csv_rows(text: SourceText) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file, the header first, each with its line. The row of an empty line is empty."""
    rows = csv.reader(text.text.splitlines(keepends=True))
    try:
        for row in rows:
            yield rows.line_num, [cell.strip() for cell in row]
    except csv.Error as error:
        raise InputError(f"not CSV: {error}", where=f"{text.where}:{rows.line_num}", help="check that line") from None


def csv_header(text: SourceText) -> list[str]:
    """The names of the columns of a CSV file, in lower case."""
    return [name.lower() for name in next(csv_rows(text), (1, []))[1]]


def column_entries(text: SourceText, name: str, candidates: Iterable[str]) -> Iterator[Entry]:
    """The entries of one column of a CSV file, see `column_place`. Upper and lower case of its name do not matter.

    If the file has one column, an empty line between two others is an empty entry, as in `split_entries`.
    """
    header = csv_header(text)
    place = column_place(header, name, candidates, text.where)
    empty: list[Entry] = []
    for line, row in islice(csv_rows(text), 1, None):
        if row:
            yield from empty
            empty.clear()
            yield Entry(row[place] if place < len(row) else "", line)
        elif len(header) == 1:
            empty.append(Entry("", line))


def column_place(header: list[str], name: str, candidates: Iterable[str], where: str) -> int:
    """The index in `header` of the column called `name`, else of the first candidate, else of the only column."""
    if name:
        if name.lower() not in header:
            refuse(where, f"no column {name!r}", nearest(name.lower(), header), 1)
        return header.index(name.lower())
    for candidate in candidates:
        if candidate in header:
            return header.index(candidate)
    if len(header) == 1:
        return 0
    help_text = f"name one as `column`: {', '.join(header)}" if header else "the file is empty"
    refuse(where, "it is not clear which column to read", help_text, 1)


def read_number(text: str, limits: Range, where: str) -> float:
    """A number in `limits`. InputError, at `where`, for anything else."""
    try:
        return limits.check(float(text), where)
    except ValueError:
        raise InputError(f"{quoted(text)} is not a number", where=where, help="correct that entry") from None


COUNT_MAX: Final = 10_000_000
"""Requests per second; a larger count is most likely a time."""
MISSING_WORDS: Final = frozenset({"", "nan", "na", "n/a", "null", "none", "-"})


class MissingCounts(StrEnum):
    """What to do about a missing count: an empty line between two others, or an entry in `MISSING_WORDS`."""

    REFUSE = "refuse"
    FILL = "fill"
    """Repeat the count before it."""


def quick_counts(text: SourceText) -> "array[int] | None":
    """The counts of a file without mistakes, read at once; None for a file that has to be read entry by entry.

    The 1.9 million counts of the Twitter trace take 0.5 s in this way instead of 4 s.
    """
    content = text.text
    if "_" in content or not content.isascii():
        return None
    lines = content.strip().splitlines()
    if len(lines) > 1 and not all(map(str.strip, lines)):
        return None
    try:
        counts = array("q", map(int, content.split()))
    except (ValueError, OverflowError):
        return None
    return counts if counts and min(counts) >= 0 and max(counts) <= COUNT_MAX else None


def careful_counts(
    entries: Iterable[Entry], where: str, gaps: MissingCounts, *, fractions: bool = False
) -> "array[Any]":
    """Counts per second, each one checked; with `fractions`, mean rates per second."""
    counts: array[Any] = array("d") if fractions else array("q")
    for entry in entries:
        if entry.text.lower() in MISSING_WORDS:
            counts.append(_filled(counts, gaps, where, entry.line))
        else:
            counts.append(_count(entry, where, fractions=fractions))
    if not counts:
        refuse(where, "the trace is empty", "a trace needs at least one count per second")
    return counts


def _filled(counts: "array[Any]", gaps: MissingCounts, where: str, line: int) -> int | float:
    if gaps == MissingCounts.REFUSE:
        help_text = "put a number there, or say `gaps: fill` to repeat the count before it"
        refuse(where, f"second {len(counts)} has no count", help_text, line)
    if not counts:
        refuse(where, "the first count is missing, and `gaps: fill` has none to repeat", "remove that entry", line)
    last: int | float = counts[-1]
    return last


def _count(entry: Entry, where: str, *, fractions: bool) -> int | float:
    exact = _decimal(entry, where)
    if exact < 0:
        refuse(where, f"the count {entry.text} is negative", "counts per second start at 0", entry.line)
    if exact > COUNT_MAX:
        help_text = f"at most {COUNT_MAX:,}; if these are times of arrival, say `format: timestamps`"
        refuse(where, f"{entry.text} requests in one second are too many", help_text, entry.line)
    if exact != exact.to_integral_value() and not fractions:
        help_text = (
            "if these are mean rates, say `spread: poisson`, as in {file: rates.txt, spread: poisson}; "
            "if they are times of arrival, say `format: timestamps`; if times between arrivals, `format: gaps`"
        )
        refuse(where, f"{entry.text} is not a whole number of requests", help_text, entry.line)
    return float(exact) if fractions else int(exact)


INSTANT_S_MAX: Final = 5 * 10**9
"""The latest time of arrival: the year 2128, which in ns still fits into 64 bits."""
LENGTH_S_MAX: Final = 10**8
"""The longest trace: three years, whose counts per second still fit into memory."""
EPOCH_S: Final = 10**8
"""Later times are dates after 1973: such a trace starts at its first arrival instead of in 1970."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


class Unit(StrEnum):
    """The unit of times of arrival and of times between arrivals."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"

    @property
    def exponent(self) -> int:
        """The power of ten that turns the unit into ns."""
        return {"s": 9, "ms": 6, "us": 3, "ns": 0}[self.value]


def instants_ns(entries: Iterable[Entry], where: str, unit: Unit) -> Iterator[int]:
    """Times of arrival in ns from the start, which must be sorted. Dates and Unix times start at the first arrival."""
    origin_ns: int | None = None
    last_ns = 0
    for entry in entries:
        at_ns = _instant_ns(entry, where, unit)
        if origin_ns is None:
            origin_ns = at_ns if at_ns >= EPOCH_S * NS_PER_S else 0
            last_ns = origin_ns
        if at_ns < 0:
            refuse(where, f"the time {entry.text} is negative", "times of arrival start at 0", entry.line)
        if at_ns < last_ns:
            refuse(where, f"{entry.text} is before the arrival above it", "sort the file by time", entry.line)
        last_ns = at_ns
        yield _within_length(at_ns - origin_ns, entry, where)
    if origin_ns is None:
        refuse(where, "the trace is empty", "a trace needs at least one arrival")


def after_gaps_ns(gaps: Iterable[Entry], where: str, unit: Unit) -> Iterator[int]:
    """Times of arrival in ns, from the times between them; the first gap ends at the first arrival."""
    at_ns, number = 0, 0
    for number, entry in enumerate(gaps, start=1):  # noqa: B007  # the last number says whether there was any
        gap_ns = _ns(_decimal(entry, where), entry, where, unit)
        if gap_ns < 0:
            refuse(where, f"the gap {entry.text} is negative", "gaps between arrivals start at 0", entry.line)
        at_ns += gap_ns
        yield _within_length(at_ns, entry, where)
    if number == 0:
        refuse(where, "the trace is empty", "a trace needs at least one arrival")


def _instant_ns(entry: Entry, where: str, unit: Unit) -> int:
    if ":" not in entry.text:
        return _ns(_decimal(entry, where), entry, where, unit)
    try:
        if (match := _DATE.fullmatch(entry.text)) is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1] + (match[3] or "+00:00").replace("Z", "+00:00"))
        return timegm(whole.utctimetuple()) * NS_PER_S + int((match[2] or "").ljust(9, "0"))
    except (ValueError, OverflowError):
        pass
    refuse(where, f"{entry.text!r} is not a date and time", "write 2023-11-16 18:17:03.97, UTC or +01:00", entry.line)


def _decimal(entry: Entry, where: str) -> Decimal:
    """The number with all its digits: a float would round Unix times to a fraction of a microsecond."""
    try:
        if _NUMBER.fullmatch(entry.text):
            return Decimal(entry.text)
    except DecimalException:
        pass
    refuse(where, f"{quoted(entry.text)} is not a number", "a trace file holds only numbers or dates", entry.line)


def _within_length(at_ns: int, entry: Entry, where: str) -> int:
    if at_ns > LENGTH_S_MAX * NS_PER_S:
        refuse(where, f"at {entry.text} the trace is over 3 years long", "check file and `unit`", entry.line)
    return at_ns


def _ns(value: Decimal, entry: Entry, where: str, unit: Unit) -> int:
    if abs(value) > INSTANT_S_MAX * 10 ** (9 - unit.exponent):
        refuse(where, f"{value} {unit} is too late", "check the `unit`: s, ms, us or ns", entry.line)
    return int(value.scaleb(unit.exponent))
