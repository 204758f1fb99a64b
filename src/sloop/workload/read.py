"""Recorded traces: counts per second, times of arrival, gaps, and the public formats people replay.

Promises a `Trace`, or an `InputError` that names file and line. Formats: text and CSV counts (the Twitter stream trace
in its .tbz2), timestamps as numbers or dates (the Azure LLM traces' TIMESTAMP column), gaps as text or JSON (Orion's
inter_arrival_times.json), DISB workloads (JSON), and folders or archives of BATCH's MAPk_D0/MAPk_D1 matrices.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from sloop.errors import InputError
from sloop.options import Limits, limited
from sloop.streams import stream
from sloop.units import NS_PER_S, s
from sloop.workload import disb, matrices
from sloop.workload.archive import Text, read_text
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
from sloop.workload.shape import cut, scale
from sloop.workload.spread import Spread, scaled_counts, spread_counts
from sloop.workload.trace import NOT_NEGATIVE, POSITIVE, Trace, trace_of

COUNT_COLUMNS: Final = ("count", "counts", "requests", "rps", "rate", "arrivals", "value")
TIME_COLUMNS: Final = ("timestamp", "time", "arrival", "arrival_time", "arrived", "start", "timestamp_ms", "ts")


class Format(StrEnum):
    """What a file holds."""

    AUTO = "auto"
    """By name: JSON is DISB or gaps, a folder is matrices, CSV by its header, other text is counts."""
    COUNTS = "counts"
    TIMESTAMPS = "timestamps"
    GAPS = "gaps"
    DISB = "disb"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A recorded trace and how to read it; the fields are the keys beside `file:` in a scenario's `trace:`.

    Cut first (`start_s`, `duration_s`, in the file's own time), then `scale` the number of arrivals.
    """

    file: Path
    format: Format = Format.AUTO
    member: str = ""
    """Which file of an archive."""
    column: str = ""
    """Which column of a CSV file."""
    unit: Unit = Unit.S
    """Of timestamps and gaps."""
    client: str = ""
    """Which client of a DISB workload; all of its open-loop clients together where none is named."""
    gaps: Gaps = Gaps.REFUSE
    spread: Spread = Spread.UNIFORM
    mean_ms: float = limited(50.0, limits=Limits(above=0, most=60_000.0))
    """Of a burst's exponential offsets."""
    dwell_s: float = limited(3600.0, limits=Limits(above=0, most=1e5))
    """How long each pair of a folder of matrices is in force."""
    start_s: float = limited(0.0, limits=NOT_NEGATIVE)
    duration_s: float | None = limited(None, limits=POSITIVE)
    scale: float = limited(1.0, limits=Limits(above=0, most=1e6))


def read_trace(source: TraceFile | Path | str, *, seed: int = 0) -> Trace:
    """Read a recorded trace; `seed` places arrivals that the file only counts."""
    recorded = source if isinstance(source, TraceFile) else TraceFile(Path(source))
    if recorded.format == Format.MAP or (recorded.format == Format.AUTO and matrices.is_maps(recorded.file)):
        return _cut_and_scaled(
            matrices.read_maps(recorded.file, member=recorded.member, dwell_s=recorded.dwell_s, seed=seed),
            recorded,
            seed,
        )
    text = read_text(recorded.file, member=recorded.member)
    known = replace(recorded, format=_format_of(recorded, text))
    if known.format == Format.COUNTS:
        return _counted(text, known, seed)
    if known.format == Format.DISB:
        return _cut_and_scaled(disb.parse(text, client=known.client, seed=seed), known, seed)
    name = known.file.name
    trace = trace_of(_times_ns(text, known), name=name, provenance=f"measured: {name}, {known.format} in {known.unit}")
    return _cut_and_scaled(trace, known, seed)


def _format_of(recorded: TraceFile, text: Text) -> Format:
    if recorded.format != Format.AUTO:
        return recorded.format
    start = text.text.lstrip()[:1]
    if start == "{":
        return Format.DISB
    if start == "[":
        return Format.GAPS
    if not _is_csv(text):
        return Format.COUNTS
    header = [cell.strip().lower() for cell in text.text.partition("\n")[0].split(",")]
    wanted = [recorded.column.lower()] if recorded.column else header
    if any(name in TIME_COLUMNS for name in wanted):
        return Format.TIMESTAMPS
    if any(name in COUNT_COLUMNS for name in wanted):
        return Format.COUNTS
    raise InputError(
        f"whether {', '.join(wanted)} holds counts or times is not clear",
        where=f"{text.where}:1",
        help="say `format: counts`, `timestamps` or `gaps`, and the `column`",
    )


def _is_csv(text: Text) -> bool:
    """Whether the first line is a header: it begins with a letter and the file is named or laid out as CSV."""
    first = text.text.lstrip().partition("\n")[0]
    return first[:1].isalpha() and ("," in first or ".csv" in text.where.lower()) and first.strip().lower() != "nan"


def _cells(text: Text, recorded: TraceFile, candidates: Sequence[str]) -> Iterator[Cell]:
    if recorded.column or _is_csv(text):
        return column(text, recorded.column, candidates)
    return words(text)


def read_counts(recorded: TraceFile) -> "array[int]":
    """The requests per second of a file of counts, all of them and as they stand in it."""
    return _counts(read_text(recorded.file, member=recorded.member), recorded)


def _counts(text: Text, recorded: TraceFile) -> "array[int]":
    csv_like = bool(recorded.column) or _is_csv(text)
    counts = None if csv_like else quick_counts(text)
    return counts or careful_counts(_cells(text, recorded, COUNT_COLUMNS), text.where, recorded.gaps)


def _counted(text: Text, recorded: TraceFile, seed: int) -> Trace:
    counts = _counts(text, recorded)
    first, last = _window(recorded, len(counts), text.where)
    chosen = counts[first:last]
    name = recorded.file.name
    span = f"seconds {first} to {last} of {len(counts)}"
    note = f", scaled by {recorded.scale:g}" if recorded.scale != 1.0 else ""
    return counted(
        chosen, recorded, name=name, provenance=f"measured: {name}, counts per second, {span}{note}", seed=seed
    )


def counted(counts: "array[int]", recorded: TraceFile, *, name: str, provenance: str, seed: int) -> Trace:
    """The trace of a series of counts per second: scaled, and spread within each second as `recorded` says."""
    duration_ns = len(counts) * NS_PER_S
    if recorded.duration_s is not None:
        duration_ns = min(duration_ns, s(recorded.duration_s))

    def scaled() -> "array[int]":
        return counts if recorded.scale == 1.0 else array("q", scaled_counts(counts, recorded.scale))

    def blocks() -> Iterator[Sequence[int]]:
        rng = stream(seed, "arrivals")
        walk = spread_counts(scaled(), recorded.spread, rng, mean_ms=recorded.mean_ms, duration_ns=duration_ns)
        return islice(walk, -(-duration_ns // NS_PER_S))

    kept = recorded.spread in (Spread.UNIFORM, Spread.EQUAL) and duration_ns == len(counts) * NS_PER_S
    return Trace(name, duration_ns, provenance, blocks, scaled if kept else None)


def _window(recorded: TraceFile, seconds: int, where: str) -> tuple[int, int]:
    """First and last second (exclusive) of a series of counts that `start_s` and `duration_s` choose."""
    if recorded.start_s != int(recorded.start_s):
        raise InputError(
            f"{recorded.start_s!r} is not a whole second", where=f"{where} start_s", help="counts start on the second"
        )
    first = int(recorded.start_s)
    if first >= seconds:
        raise _beyond(recorded.start_s, float(seconds), where)
    last = seconds if recorded.duration_s is None else first - int(-recorded.duration_s // 1)
    return first, min(last, seconds)


def _beyond(start_s: float, length_s: float, where: str) -> InputError:
    return InputError(
        f"start_s {start_s:.12g} is beyond the end", where=where, help=f"the trace lasts {length_s:.12g} s"
    )


def _times_ns(text: Text, recorded: TraceFile) -> Iterator[int]:
    if recorded.format == Format.GAPS:
        cells = _json_numbers(text) if text.text.lstrip()[:1] == "[" else _cells(text, recorded, ("gap", "gaps"))
        return after_gaps_ns(cells, text.where, recorded.unit)
    return instants_ns(_cells(text, recorded, TIME_COLUMNS), text.where, recorded.unit)


def _json_numbers(text: Text) -> Iterator[Cell]:
    """A JSON array of numbers, their spelling kept so that none is rounded on the way."""
    try:
        values = msgspec.json.decode(text.text, type=list[float])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"not a JSON list of numbers: {error}", where=text.where, help="write [0.031, 0.012, …]"
        ) from None
    return (Cell(repr(value), 1) for value in values)


def _cut_and_scaled(trace: Trace, recorded: TraceFile, seed: int) -> Trace:
    start_ns = s(recorded.start_s)
    if start_ns >= trace.duration_ns:
        raise _beyond(recorded.start_s, trace.duration_ns / NS_PER_S, str(recorded.file))
    duration_ns = None if recorded.duration_s is None else s(recorded.duration_s)
    return scale(cut(trace, start_ns=start_ns, duration_ns=duration_ns), recorded.scale, seed=seed)
