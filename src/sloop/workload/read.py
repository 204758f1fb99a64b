"""Recorded traces, and everything that a user declares under `trace:`.

`read_trace` reads counts per second as text or CSV (the Twitter stream trace in its .tbz2), timestamps as numbers or
dates (the Azure LLM traces' TIMESTAMP column), times between arrivals as text or JSON (Orion's
inter_arrival_times.json), DISB workloads (JSON), and folders or archives of BATCH's MAPk_D0 and MAPk_D1 matrices.
`trace_from` reads a declaration: `{kind: poisson, rate: 100}` generates a trace, `{file: trace.txt, start_s: 60}` reads
one; for both `thin`, `compress` and `repeat` follow, in this order. Mistakes raise `InputError` with file and line, or
with the key.
"""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import merge
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Final

import msgspec

from sloop.errors import InputError
from sloop.options import Declared, Limits, Value, as_value, keys_of, limited, nearest, read_options
from sloop.streams import stream
from sloop.units import NS_PER_S, ms, s, to_s
from sloop.workload.generate import KINDS, STATES_MAX, Equal, Kind, Map, Matrix, Poisson, generated, kind_of
from sloop.workload.parse import (
    LENGTH_S_MAX,
    Entry,
    MissingCounts,
    SourceText,
    Unit,
    after_gaps_ns,
    careful_counts,
    column_entries,
    instants_ns,
    quick_counts,
    read_folder,
    read_text,
    split_entries,
)
from sloop.workload.spread import Spread, scaled_counts, spread_counts
from sloop.workload.trace import (
    NOT_NEGATIVE,
    POSITIVE,
    RATE_ABOVE_0,
    Trace,
    compress,
    cut,
    repeat,
    scale,
    thin,
    trace_of,
)

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
    gaps: MissingCounts = MissingCounts.REFUSE
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
    if recorded.format == Format.MAP or (recorded.format == Format.AUTO and is_maps(recorded.file)):
        return _cut_and_scaled(
            read_maps(recorded.file, member=recorded.member, dwell_s=recorded.dwell_s, seed=seed),
            recorded,
            seed,
        )
    text = read_text(recorded.file, member=recorded.member)
    known = replace(recorded, format=_format_of(recorded, text))
    if known.format == Format.COUNTS:
        return _counted(text, known, seed)
    if known.format == Format.DISB:
        return _cut_and_scaled(parse_disb(text, client=known.client, seed=seed), known, seed)
    name = known.file.name
    trace = trace_of(_times_ns(text, known), name=name, provenance=f"measured: {name}, {known.format} in {known.unit}")
    return _cut_and_scaled(trace, known, seed)


def _format_of(recorded: TraceFile, text: SourceText) -> Format:
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


def _is_csv(text: SourceText) -> bool:
    """Whether the first line is a header: it begins with a letter and the file is named or laid out as CSV."""
    first = text.text.lstrip().partition("\n")[0]
    return first[:1].isalpha() and ("," in first or ".csv" in text.where.lower()) and first.strip().lower() != "nan"


def _entries(text: SourceText, recorded: TraceFile, candidates: Sequence[str]) -> Iterator[Entry]:
    if recorded.column or _is_csv(text):
        return column_entries(text, recorded.column, candidates)
    return split_entries(text)


def read_counts(recorded: TraceFile) -> "array[int]":
    """The requests per second of a file of counts: all of them, unscaled."""
    text = read_text(recorded.file, member=recorded.member)
    return _counts(text, replace(recorded, spread=Spread.UNIFORM))


def _counts(text: SourceText, recorded: TraceFile) -> "array[Any]":
    """Whole counts; mean rates where the arrivals of a second are drawn from a Poisson distribution and a rate has a
    fraction."""
    csv_like = bool(recorded.column) or _is_csv(text)
    counts = None if csv_like else quick_counts(text)
    if counts:
        return counts
    fractions = recorded.spread == Spread.POISSON
    found = careful_counts(_entries(text, recorded, COUNT_COLUMNS), text.where, recorded.gaps, fractions=fractions)
    if fractions and all(rate.is_integer() for rate in map(float, found)):
        return array("q", map(int, found))
    return found


def _counted(text: SourceText, recorded: TraceFile, seed: int) -> Trace:
    counts = _counts(text, recorded)
    first, last = _window(recorded, len(counts), text.where)
    name = recorded.file.name
    what = "counts per second" if counts.typecode == "q" else "mean rates per second"
    note = f", scaled by {recorded.scale:g}" if recorded.scale != 1.0 else ""
    provenance = f"measured: {name}, {what}, seconds {first} to {last} of {len(counts)}{note}"
    return trace_of_counts(counts[first:last], recorded, name=name, provenance=provenance, seed=seed)


def trace_of_counts(counts: "array[Any]", recorded: TraceFile, *, name: str, provenance: str, seed: int) -> Trace:
    """The trace of a series of counts per second: scaled, and spread within each second as `recorded` says."""
    duration_ns = len(counts) * NS_PER_S
    if recorded.duration_s is not None:
        duration_ns = min(duration_ns, s(recorded.duration_s))

    def scaled() -> "array[Any]":
        if recorded.scale == 1.0:
            return counts
        if counts.typecode == "d":  # mean rates, which need not stay whole
            return array("d", (rate * recorded.scale for rate in counts))
        return array("q", scaled_counts(counts, recorded.scale))

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


def _times_ns(text: SourceText, recorded: TraceFile) -> Iterator[int]:
    if recorded.format == Format.GAPS:
        entries = _json_numbers(text) if text.text.lstrip()[:1] == "[" else _entries(text, recorded, ("gap", "gaps"))
        return after_gaps_ns(entries, text.where, recorded.unit)
    return instants_ns(_entries(text, recorded, TIME_COLUMNS), text.where, recorded.unit)


def _json_numbers(text: SourceText) -> Iterator[Entry]:
    """A JSON array of numbers, their spelling kept so that none is rounded on the way."""
    try:
        values = msgspec.json.decode(text.text, type=list[float])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"not a JSON list of numbers: {error}", where=text.where, help="write [0.031, 0.012, …]"
        ) from None
    return (Entry(repr(value), 1) for value in values)


def _cut_and_scaled(trace: Trace, recorded: TraceFile, seed: int) -> Trace:
    start_ns = s(recorded.start_s)
    if start_ns >= trace.duration_ns:
        raise _beyond(recorded.start_s, trace.duration_ns / NS_PER_S, str(recorded.file))
    duration_ns = None if recorded.duration_s is None else s(recorded.duration_s)
    return scale(cut(trace, start_ns=start_ns, duration_ns=duration_ns), recorded.scale, seed=seed)


ARRIVALS_MAX = 50_000_000
CONTINUOUS = "continuous"


class _Load(msgspec.Struct):
    """The load of one client of a DISB workload: periodic, poisson, trace (in ms) or continuous (SJTU-IPADS/disb)."""

    type: str
    frequency: float = 0.0
    trace: list[float] = []  # msgspec copies the empty list for each instance


class _Client(msgspec.Struct):
    id: str
    load: _Load


class _Workload(msgspec.Struct):
    time: float
    clients: list[_Client] = msgspec.field(name="tasks")


def parse_disb(text: SourceText, *, client: str, seed: int) -> Trace:
    """The open-loop clients of a DISB workload, merged; the trace lasts the file's `time`. Continuous clients are
    closed loops, whose arrivals depend on the server: they are left out, and named in the provenance."""
    try:
        workload = msgspec.json.decode(text.text, type=_Workload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"not a DISB workload: {error}", where=text.where, help="see the DISB workload format"
        ) from None
    Limits(above=0, most=1e7).check(workload.time, f"{text.where} time")
    chosen = _chosen(workload, client, text.where)
    closed = [one.id for one in chosen if one.load.type == CONTINUOUS]
    opened = [one for one in chosen if one.load.type != CONTINUOUS]
    if not opened:
        raise InputError(
            "only closed-loop (continuous) clients, which have no arrivals of their own",
            where=text.where,
            help="use a workload with a periodic, poisson or trace client",
        )
    duration_ns = s(workload.time)
    walks = [_times_ns_disb(one, duration_ns, seed, f"{text.where} tasks[{one.id}]") for one in opened]
    left_out = f", closed-loop clients left out: {', '.join(closed)}" if closed else ""
    source = f"published: DISB workload {text.where.rpartition('/')[2]}, clients {', '.join(one.id for one in opened)}"
    return trace_of(merge(*walks), duration_ns=duration_ns, name=client or "disb", provenance=source + left_out)


def _chosen(workload: _Workload, client: str, where: str) -> list[_Client]:
    if not client:
        return workload.clients
    chosen = [one for one in workload.clients if one.id == client]
    if not chosen:
        raise InputError(
            f"no client {client!r}", where=where, help=nearest(client, [one.id for one in workload.clients])
        )
    return chosen


def _times_ns_disb(one: _Client, duration_ns: int, seed: int, where: str) -> Iterator[int]:
    kind = one.load.type
    if kind == "trace":
        return _traced_ns(one.load.trace, duration_ns, where)
    if kind not in ("periodic", "poisson"):
        raise InputError(
            f"unknown type of load {kind!r}",
            where=where,
            help=nearest(kind, ("periodic", "poisson", "trace", CONTINUOUS)),
        )
    rate = RATE_ABOVE_0.check(one.load.frequency, f"{where}.frequency")
    if rate * duration_ns / 1e9 > ARRIVALS_MAX:
        raise InputError(f"over {ARRIVALS_MAX:,} arrivals", where=where, help="lower `time` or `frequency`")
    process = Equal(rate) if kind == "periodic" else Poisson(rate)
    return chain.from_iterable(process.blocks(stream(seed, f"arrivals/{one.id}"), duration_ns))


def _traced_ns(times_ms: list[float], duration_ns: int, where: str) -> Iterator[int]:
    if not times_ms:
        raise InputError("the trace is empty", where=where, help="list times of arrival in ms")
    limits = Limits(least=0, most=1e10)
    times_ns = [ms(limits.check(at_ms, f"{where}.trace[{place}]")) for place, at_ms in enumerate(times_ms)]
    if times_ns != sorted(times_ns):
        raise InputError("the trace is not sorted", where=where, help="sort it by time")
    return takewhile(lambda at_ns: at_ns < duration_ns, times_ns)


_NAME = re.compile(r"MAP(\d{1,6})_D([01])(\.\w+)?", re.ASCII)


def is_maps(path: Path) -> bool:
    """Whether this is a folder, or the common beginning of a pair's two file names."""
    return path.is_dir() or (not path.exists() and path.with_name(f"{path.name}_D0").exists())


def read_maps(path: Path, *, member: str, dwell_s: float, seed: int) -> Trace:
    """The trace of a folder or archive of MAP matrices, or of one pair of them (`path` without its _D0).

    Pair after pair is in force for `dwell_s` seconds each. A file holds a square matrix of rates per second, one row
    per line, entries separated by commas, as published with BATCH (Ali et al., SC'20)."""
    if not path.exists() and (chosen := _NAME.fullmatch(f"{path.name}_D0")):
        processes = _parsed(read_folder(path.parent), str(path.parent), only=int(chosen[1]))
    else:
        processes = _parsed(read_folder(path, member=member), str(path))
    dwell_ns = s(dwell_s)

    def blocks() -> Iterator[Sequence[int]]:
        rng = stream(seed, "arrivals")
        for place, process in enumerate(processes):
            for block in process.blocks(rng, dwell_ns):
                yield [place * dwell_ns + at_ns for at_ns in block]

    source = f"fitted: MAP matrices of {path.name}, {len(processes)} of {dwell_s:g} s each, seed {seed}"
    return Trace(path.name, dwell_ns * len(processes), source, blocks)


def _parsed(files: Mapping[str, SourceText], where: str, only: int | None = None) -> list[Map]:
    found: dict[int, dict[str, SourceText]] = {}
    for name, text in files.items():
        match = _NAME.fullmatch(name)
        if match and only in (None, int(match[1])):
            found.setdefault(int(match[1]), {})[match[2]] = text
    if not found:
        raise InputError("no files MAP1_D0, MAP1_D1, … here", where=where, help="name the folder that holds them")
    return [_process(number_, pair, where) for number_, pair in sorted(found.items())]


def _process(hour: int, pair: dict[str, SourceText], where: str) -> Map:
    for half in "01":
        if half not in pair:
            raise InputError(f"MAP{hour}_D{half} is missing", where=where, help="each MAPk needs its D0 and its D1")
    try:
        return Map(_matrix(pair["0"]), _matrix(pair["1"]))
    except InputError as error:
        if error.where:
            raise
        raise InputError(error.what, where=pair["0"].where, help=error.help) from None


def _matrix(text: SourceText) -> Matrix:
    rows: list[tuple[float, ...]] = []
    for line, content in islice(enumerate(text.text.splitlines(), start=1), STATES_MAX + 1):
        if content.strip():
            here = f"{text.where}:{line}"
            rows.append(tuple(_rate(cell, here) for cell in content.replace(",", " ").split()))
    if not rows:
        raise InputError("the matrix is empty", where=text.where, help="a row a line, entries separated by commas")
    return tuple(rows)


def _rate(cell: str, where: str) -> float:
    try:
        return Limits(least=-1e7, most=1e7).check(float(cell), where)
    except ValueError:
        raise InputError(f"{cell[:40]!r} is not a number", where=where, help="entries are rates per second") from None


@dataclass(frozen=True, slots=True)
class Shape:
    """Changes that apply to any trace."""

    thin: float = limited(1.0, above=0, most=1.0)
    compress: float = limited(1.0, above=0, most=1e9)
    repeat: int = limited(1, least=1, most=1e6)


@dataclass(frozen=True, slots=True)
class GeneratedLength:
    """The options of a generated trace beside those of its kind."""

    duration_s: float | None = limited(None, above=0, most=LENGTH_S_MAX)
    """Of one round, before it is compressed or repeated."""
    scale: float = limited(1.0, above=0, most=1e6)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is declared under `trace:`, read and checked."""

    source: TraceFile | Kind
    shape: Shape
    length: GeneratedLength
    """Of a generated trace."""


def trace_options(value: Value) -> TraceOptions:
    """The options in `value`. InputError for what is wrong with them; no file is looked at."""
    fields = value.mapping()
    if ("kind" in fields) == ("file" in fields):
        value.fail("a trace has either `kind` or `file`", f"kinds: {', '.join(KINDS)}; or `file:` and a path to read")
    if "file" in fields:
        recorded = read_options(TraceFile, value, also=keys_of(Shape))
        return TraceOptions(recorded, read_options(Shape, value, also=keys_of(TraceFile)), GeneratedLength())
    beside = (*keys_of(Shape), *keys_of(GeneratedLength))
    kind = kind_of(value, also=beside)
    own = ("kind", *keys_of(type(kind)), *beside)
    return TraceOptions(kind, read_options(Shape, value, also=own), read_options(GeneratedLength, value, also=own))


def trace_from(spec: Declared, *, seed: int, duration_s: float | None, folder: Path) -> Trace:
    """The trace that `spec` declares, at most `duration_s` long.

    Relative file names start at `folder`. A recorded trace that is shorter than `duration_s` stays so (unless it is
    repeated); a generated one needs a duration from here or from itself.
    """
    if duration_s is not None:
        POSITIVE.check(duration_s, "duration_s")
    value = as_value(spec, "trace")
    options = trace_options(value)
    shape = options.shape
    if isinstance(options.source, TraceFile):
        trace = read_trace(replace(options.source, file=folder / options.source.file), seed=seed)
    else:
        trace = _generated(options, options.source, value, seed=seed, duration_s=duration_s)
    shaped = repeat(compress(thin(trace, shape.thin, seed=seed), shape.compress), shape.repeat)
    Limits(least=0, most=LENGTH_S_MAX).check(to_s(shaped.duration_ns), value.under("duration_s", None).where)
    return shaped if duration_s is None else cut(shaped, duration_ns=s(duration_s))


def _generated(options: TraceOptions, kind: Kind, value: Value, *, seed: int, duration_s: float | None) -> Trace:
    length_s = options.length.duration_s
    if length_s is None:
        if duration_s is None:
            value.fail("no duration", "add `duration_s:` to the trace or to the whole run")
        length_s = duration_s * options.shape.compress / options.shape.repeat
    Limits(above=0, most=LENGTH_S_MAX).check(length_s, value.under("duration_s", None).where)
    return scale(generated(kind, seed=seed, duration_ns=max(1, s(length_s))), options.length.scale, seed=seed)
