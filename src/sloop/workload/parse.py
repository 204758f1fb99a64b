"""Text and numbers out of trace files, each number with its line.

Files may be plain, .gz, .bz2, .xz, or members of .zip and tar archives, and are bounded in size. What is not a number,
or cannot be read, raises `InputError` with file, archive member and line. The module must not know what the numbers
mean beyond counts, times of arrival and times between arrivals.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, DecimalException
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from sloop.errors import InputError
from sloop.options import nearest
from sloop.units import NS_PER_S

BYTES_MAX: Final = 512 * 2**20
"""Decompressed. A larger file is refused before it fills the memory: compression ratios of 1,000 are easily made."""

MEMBERS_MAX: Final = 10_000

_TAR = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_BROKEN: Final = (
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
    """The text of a file and its place, for error messages."""

    text: str
    where: str


def read_text(path: Path, *, member: str = "") -> SourceText:
    """The text of a file, decompressed; in an archive that of `member`, or of the only file in it."""
    if not _is_archive(path):
        return _decoded(_plain_bytes(path), str(path))
    members = _members(path, prefix=member)
    if len(members) != 1:
        names = ", ".join(list(members)[:10])
        what = f"{len(members)} files to choose from: {names}" if members else f"no file called {member!r} in it"
        raise InputError(what, where=str(path), help="name one of its files as `member`")
    name, content = next(iter(members.items()))
    return _decoded(content, f"{path}!{name}")


def read_folder(path: Path, *, member: str = "") -> dict[str, SourceText]:
    """The files of a folder, or those of an archive whose names begin with `member`, by file name."""
    if _is_archive(path):
        members = _members(path, prefix=member).items()
        return {name.rpartition("/")[2]: _decoded(content, f"{path}!{name}") for name, content in members}
    if not path.is_dir():
        raise InputError(
            "neither a folder nor an archive", where=str(path), help="name the folder that holds the files"
        )
    files = [child for child in sorted(path.iterdir())[:MEMBERS_MAX] if child.is_file()]
    return {child.name: _decoded(_plain_bytes(child), str(child)) for child in files}


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith((".zip", *_TAR))


def _plain_bytes(path: Path) -> bytes:
    with _explained(path), _opened(path) as file:
        return _bounded(file, BYTES_MAX, str(path))


def _opened(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if suffix == ".bz2":
        return bz2.open(path)
    if suffix == ".xz":
        return lzma.open(path)
    return path.open("rb")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of the file system and of decompression into `InputError`."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), help="check the path and the folder it starts from") from None
    except _BROKEN as error:
        raise InputError(f"cannot be read: {error}", where=str(path), help="check the file and its rights") from None


def _bounded(file: IO[bytes], bytes_max: int, where: str) -> bytes:
    content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise InputError(f"more than {BYTES_MAX:,} bytes", where=where, help="cut it into smaller files")
    return content


def _members(path: Path, *, prefix: str) -> dict[str, bytes]:
    """The files of an archive whose names begin with `prefix`, hidden ones left out."""
    members: dict[str, bytes] = {}
    left = BYTES_MAX
    with _explained(path):
        walk = _zip_members(path) if path.name.lower().endswith(".zip") else _tar_members(path)
        for name, opened in islice(walk, MEMBERS_MAX):
            if name.startswith(prefix) and not _is_hidden(name):
                with opened() as file:
                    members[name] = _bounded(file, left, f"{path}!{name}")
                left -= len(members[name])
    return members


def _zip_members(path: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                yield entry.filename, partial(archive.open, entry)


def _tar_members(path: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.isfile():
                yield entry.name, partial(_extracted, archive, entry)


def _extracted(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(entry)
    assert file is not None, f"{entry.name} is a regular file"
    return file


def _is_hidden(name: str) -> bool:
    return name.startswith("__MACOSX") or name.rpartition("/")[2].startswith(".")


def _decoded(content: bytes, where: str) -> SourceText:
    try:
        return SourceText(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError("not text", where=f"{where}:{line}", help="a trace is a UTF-8 text file") from None


COUNT_MAX: Final = 10_000_000
INSTANT_S_MAX: Final = 5 * 10**9
"""The largest time of arrival: the year 2128, which in ns still fits into 64 bits."""
LENGTH_S_MAX: Final = 10**8
"""The longest trace: three years, whose counts per second still fit into memory."""
MISSING_WORDS: Final = frozenset({"", "nan", "na", "n/a", "null", "none", "-"})
EPOCH_S: Final = 10**8
"""Times from 1973 on are dates: such a trace starts at its first arrival instead of in 1970."""

_PLAIN = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


class MissingCounts(StrEnum):
    """What to do about a missing count: an empty line between others, an empty entry, or one of `MISSING_WORDS`."""

    REFUSE = "refuse"
    FILL = "fill"
    """Repeat the count before it."""


class Unit(StrEnum):
    """The unit of times of arrival and of times between arrivals."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"

    @property
    def exponent(self) -> int:
        return {"s": 9, "ms": 6, "us": 3, "ns": 0}[self.value]


class Entry(NamedTuple):
    """One entry of a file and its line, counted from 1."""

    text: str
    line: int


def split_entries(text: SourceText) -> Iterator[Entry]:
    """The entries of a text file, separated by blanks, commas or line ends. An empty line between others is an empty
    entry; lines that begin with # are comments.
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


def column_entries(text: SourceText, name: str, candidates: Iterable[str]) -> Iterator[Entry]:
    """One column of a CSV file with a header: the one called `name`, else the first of `candidates`, else the only one.

    Names are compared without regard to case.
    """
    rows = csv.reader(text.text.splitlines(keepends=True))
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        place = _place(header, name, candidates, text.where)
        for row in rows:
            if row:
                yield Entry(row[place].strip() if place < len(row) else "", rows.line_num)
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


def quick_counts(text: SourceText) -> "array[int] | None":
    """The counts of a clean file in one pass of C code; None for a file that must be checked line by line."""
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


def careful_counts(
    entries: Iterable[Entry], where: str, gaps: MissingCounts, *, fractions: bool = False
) -> "array[Any]":
    """Counts per second, checked one by one; with `fractions` mean rates per second, which need not be whole."""
    counts: array[Any] = array("d") if fractions else array("q")
    for entry in entries:
        if entry.text.lower() in MISSING_WORDS:
            _check_filling(counts, gaps, f"{where}:{entry.line}")
            counts.append(counts[-1])
        else:
            counts.append(_count(entry, where, fractions=fractions))
    if not counts:
        raise InputError("the trace is empty", where=where, help="a trace needs at least one count per second")
    return counts


def _check_filling(counts: "array[Any]", gaps: MissingCounts, where: str) -> None:
    if gaps == MissingCounts.REFUSE:
        raise InputError(
            f"a gap: second {len(counts)} has no count",
            where=where,
            help="put a number there, or say `gaps: fill` to repeat the count before it",
        )
    if not counts:
        raise InputError("a gap at the start has no count before it", where=where, help="cut it off")


def _count(entry: Entry, where: str, *, fractions: bool) -> int | float:
    here = f"{where}:{entry.line}"
    exact = _decimal(entry.text, here)
    if exact < 0:
        raise InputError(f"{entry.text} requests are fewer than none", where=here, help="counts per second start at 0")
    if exact != exact.to_integral_value() and not fractions:
        raise InputError(
            f"{entry.text} is not a whole number of requests",
            where=here,
            help="for mean rates say `spread: poisson`, for times of arrival `format: timestamps`, for times between "
            "arrivals `format: gaps`",
        )
    if exact > COUNT_MAX:
        raise InputError(
            f"{entry.text} requests in one second",
            where=here,
            help=f"at most {COUNT_MAX:,}; for times of arrival say `format: timestamps`",
        )
    return float(exact) if fractions else int(exact)


def instants_ns(entries: Iterable[Entry], where: str, unit: Unit) -> Iterator[int]:
    """Times of arrival as ns from the start: sorted, none negative. Dates and epochs start at the first arrival."""
    origin_ns: int | None = None
    last_ns = 0
    for entry in entries:
        here = f"{where}:{entry.line}"
        at_ns = _instant_ns(entry.text, here, unit)
        if origin_ns is None:
            origin_ns = at_ns if at_ns >= EPOCH_S * NS_PER_S else 0
            last_ns = origin_ns
        if at_ns < 0:
            raise InputError(f"{entry.text} is before the start", where=here, help="times of arrival start at 0")
        if at_ns < last_ns:
            raise InputError(f"{entry.text} is before the arrival above it", where=here, help="sort the file by time")
        last_ns = at_ns
        yield _within_length(at_ns - origin_ns, entry, here)
    if origin_ns is None:
        raise InputError("the trace is empty", where=where, help="a trace needs at least one arrival")


def after_gaps_ns(gaps: Iterable[Entry], where: str, unit: Unit) -> Iterator[int]:
    """Arrivals from the times between them; the first gap leads to the first arrival."""
    at_ns, number = 0, 0
    for number, entry in enumerate(gaps, start=1):  # noqa: B007  # the last number says whether there was any
        here = f"{where}:{entry.line}"
        gap_ns = _ns(_decimal(entry.text, here), here, unit)
        if gap_ns < 0:
            raise InputError(f"the gap {entry.text} is negative", where=here, help="arrivals follow one another")
        at_ns += gap_ns
        yield _within_length(at_ns, entry, here)
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


def _within_length(at_ns: int, entry: Entry, where: str) -> int:
    if at_ns > LENGTH_S_MAX * NS_PER_S:
        raise InputError(f"at {entry.text} the trace is over 3 years long", where=where, help="check file and `unit`")
    return at_ns


def _ns(value: Decimal, where: str, unit: Unit) -> int:
    if abs(value) > INSTANT_S_MAX * 10 ** (9 - unit.exponent):
        raise InputError(f"{value} {unit} is too late", where=where, help="check the `unit`: s, ms, us or ns")
    return int(value.scaleb(unit.exponent))
