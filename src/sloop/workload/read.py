"""Recorded traces, and what a user writes under `trace:`.

`read_trace` reads counts per second as text or CSV (the Twitter stream trace), times of arrival as numbers or dates
(the Azure LLM traces), times between arrivals as text or JSON (Orion's inter_arrival_times.json), DISB workloads
(JSON), and folders or archives of BATCH's MAPk_D0 and MAPk_D1 matrices. `trace_from` reads a declaration:
`{kind: poisson, rate: 100}` generates a trace and `{file: trace.txt, start_s: 60}` reads one; `thin`, `compress` and
`repeat` then apply to both, in this order, and then `rows` and `sizes` say what the requests bring. InputError names
file and line, or the key, of a mistake.
"""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from heapq import merge
from itertools import chain, islice, takewhile
from itertools import repeat as endless
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeGuard

import msgspec

from sloop.errors import InputError
from sloop.options import Declared, Fraction, Range, Value, as_value, keys_of, nearest, read_options
from sloop.streams import stream
from sloop.text import in_s
from sloop.units import NS_PER_S, ms, s, to_s
from sloop.workload.generate import (
    KINDS,
    STATES_MAX,
    STREAM,
    ArrivalProcess,
    Equal,
    Map,
    Matrix,
    Poisson,
    Spread,
    generated,
    kind_of,
    scaled_counts,
    spread_counts,
)
from sloop.workload.parse import (
    LENGTH_S_MAX,
    Entry,
    MissingCounts,
    SourceText,
    Unit,
    after_gaps_ns,
    careful_counts,
    column_entries,
    csv_header,
    instants_ns,
    quick_counts,
    read_folder,
    read_number,
    read_text,
    refuse,
    split_entries,
)
from sloop.workload.sizes import ROWS, SIZES, NumberColumn, NumbersOption, drawn, numbers_in, numbers_of, read_numbers
from sloop.workload.trace import (
    NOT_NEGATIVE,
    POSITIVE,
    RATE_ABOVE_0,
    Trace,
    Work,
    Works,
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
    """By its contents: JSON is DISB or gaps, a folder is matrices, CSV by its header, other text is counts."""
    COUNTS = "counts"
    TIMESTAMPS = "timestamps"
    GAPS = "gaps"
    DISB = "disb"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A recorded trace and how to read it; the fields are the keys next to `file:` in a scenario's `trace:`.

    The trace is first cut (`start_s` and `duration_s`, in the file's own time), then the number of arrivals is scaled.
    """

    file: Path
    format: Format = Format.AUTO
    member: str = ""
    """The file of an archive to read."""
    column: str = ""
    """The column of a CSV file to read."""
    unit: Unit = Unit.S
    """The unit of timestamps and gaps."""
    client: str = ""
    """The client of a DISB workload to read; without it, all open-loop clients together."""
    gaps: MissingCounts = MissingCounts.REFUSE
    spread: Spread = Spread.UNIFORM
    mean_ms: Annotated[float, Range(above=0, most=60_000.0)] = 50.0
    """The mean of the exponential times after the start of a second, with `spread: burst`. Default as Sponge's."""
    dwell_s: Annotated[float, Range(above=0, most=1e5)] = 3600.0
    """How long each pair of matrices applies. BATCH published one pair per hour."""
    start_s: Annotated[float, NOT_NEGATIVE] = 0.0
    duration_s: Annotated[float, POSITIVE] | None = None
    scale: Annotated[float, Range(above=0, most=1e6)] = 1.0


def read_trace(
    source: TraceFile | Path | str, *, seed: int = 0, rows_column: str = "", sizes_column: str = ""
) -> Trace:
    """Read a recorded trace; `seed` determines the arrival times of files that only have counts or rates. The named
    columns have the rows of each request, and the sizes of these.

    InputError if the file cannot be read or holds something else.
    """
    recorded = source if isinstance(source, TraceFile) else TraceFile(Path(source))
    column = rows_column or sizes_column
    if recorded.format == Format.MAP or (recorded.format == Format.AUTO and is_maps(recorded.file)):
        _check_columns(column, Format.MAP, str(recorded.file))
        trace = read_maps(recorded.file, member=recorded.member, dwell_s=recorded.dwell_s, seed=seed)
        return _cut_and_scaled(trace, recorded, seed)
    text = read_text(recorded.file, member=recorded.member)
    found = _format_of(recorded, text)
    _check_columns(column, found, text.where)
    if found == Format.COUNTS:
        return _counted_trace(text, recorded, seed)
    if found == Format.DISB:
        return _cut_and_scaled(parse_disb(text, client=recorded.client, seed=seed), recorded, seed)
    name = recorded.file.name
    times_ns = _gap_times_ns(text, recorded) if found == Format.GAPS else _stamped_times_ns(text, recorded)
    works = _works(text, rows_column, sizes_column) if column else None
    trace = trace_of(times_ns, name=name, provenance=f"measured: {name}, {found} in {recorded.unit}", works=works)
    return _cut_and_scaled(trace, recorded, seed)


def _check_columns(column: str, format: Format, where: str) -> None:
    if column and format not in (Format.TIMESTAMPS, Format.GAPS):
        help_text = "say `format: timestamps` or `gaps` if each row is one request, or name the `file` of the column"
        refuse(where, f"the column {column!r} has no number for each request of a file of {format}", help_text)


def _works(text: SourceText, rows_column: str, sizes_column: str) -> Works:
    """What the requests of a CSV file with a row for each of them bring."""
    rows: Iterator[int] = numbers_in(text, rows_column, ROWS) if rows_column else endless(1)
    sizes: Iterator[int] = numbers_in(text, sizes_column, SIZES) if sizes_column else endless(0)
    known: dict[Work, Work] = {}  # equal ones are one object, so that millions of them need little memory
    works = [known.setdefault(work, work) for work in map(Work, rows, sizes)]
    return works.__iter__


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
    columns = [recorded.column.lower()] if recorded.column else csv_header(text)
    if any(name in COUNT_COLUMNS for name in columns):
        return Format.COUNTS
    if any(name in TIME_COLUMNS for name in columns):
        return Format.TIMESTAMPS
    what = f"it is not clear whether {', '.join(columns)} holds counts or times"
    refuse(text.where, what, "say `format: counts`, `timestamps` or `gaps`, and the `column`", 1)


def _is_csv(text: SourceText) -> bool:
    """Whether the first line is a header: it starts with a letter, and has commas or is in a file called .csv."""
    first = text.text.lstrip().partition("\n")[0]
    return first[:1].isalpha() and ("," in first or ".csv" in text.where.lower()) and first.strip().lower() != "nan"


def _entries(text: SourceText, recorded: TraceFile, candidates: Sequence[str]) -> Iterator[Entry]:
    if recorded.column or _is_csv(text):
        return column_entries(text, recorded.column, candidates)
    return split_entries(text)


def _cut_and_scaled(trace: Trace, recorded: TraceFile, seed: int) -> Trace:
    start_ns = s(recorded.start_s)
    if start_ns >= trace.duration_ns:
        _refuse_start(recorded.start_s, trace.duration_ns / NS_PER_S, str(recorded.file))
    duration_ns = None if recorded.duration_s is None else s(recorded.duration_s)
    return scale(cut(trace, start_ns=start_ns, duration_ns=duration_ns), recorded.scale, seed=seed)


def _refuse_start(start_s: float, length_s: float, where: str) -> NoReturn:
    refuse(where, f"start_s {start_s:.12g} is after the end", f"the trace lasts {length_s:.12g} s")


def read_counts(recorded: TraceFile) -> "array[int]":
    """The requests per second of a file of counts: all of them, unscaled."""
    text = read_text(recorded.file, member=recorded.member)
    return _counts(text, replace(recorded, spread=Spread.UNIFORM))


def _counts(text: SourceText, recorded: TraceFile) -> "array[Any]":
    """Whole counts per second. With `spread: poisson` they are rates, and floats if one of them has a fraction."""
    is_csv = bool(recorded.column) or _is_csv(text)
    if is_csv:
        _check_one_row_per_second(text, recorded)
    elif (counts := quick_counts(text)) is not None:
        return counts
    fractions = recorded.spread == Spread.POISSON
    rates = careful_counts(_entries(text, recorded, COUNT_COLUMNS), text.where, recorded.gaps, fractions=fractions)
    if fractions and all(rate.is_integer() for rate in map(float, rates)):
        return array("q", map(int, rates))
    return rates


def _check_one_row_per_second(text: SourceText, recorded: TraceFile) -> None:
    """InputError if a column of times next to the counts says that its first rows are not one second apart."""
    others = [name for name in csv_header(text) if name != recorded.column.lower()]
    times = next((name for name in others if name in TIME_COLUMNS or name.startswith("timestamp")), "")
    rows = list(islice(column_entries(text, times, ()), 2)) if times else []
    try:
        at_ns = list(instants_ns(rows, text.where, recorded.unit))
    except InputError:
        return  # the column does not hold times
    if len(at_ns) == 2 and at_ns[1] - at_ns[0] != NS_PER_S:
        refuse(
            text.where,
            f"the first two rows are {in_s(at_ns[1] - at_ns[0])} apart, but a trace has one count per second",
            "convert the file to one row per second; if each row is one arrival, say `format: timestamps` and "
            f"`column: {times}`; if the times are not in seconds, name their `unit`",
            rows[1].line,
        )


def _counted_trace(text: SourceText, recorded: TraceFile, seed: int) -> Trace:
    counts = _counts(text, recorded)
    first, last = _window(recorded, len(counts), text.where)
    name = recorded.file.name
    what = "counts per second" if counts.typecode == "q" else "mean rates per second"
    note = f", scaled by {recorded.scale:g}" if recorded.scale != 1.0 else ""
    provenance = f"measured: {name}, {what}, seconds {first} to {last} of {len(counts)}{note}"
    return trace_of_counts(counts[first:last], recorded, name=name, provenance=provenance, seed=seed)


def trace_of_counts(counts: "array[Any]", recorded: TraceFile, *, name: str, provenance: str, seed: int) -> Trace:
    """The trace of a series of counts per second, scaled and spread within each second as `recorded` says."""
    duration_ns = len(counts) * NS_PER_S
    if recorded.duration_s is not None:
        duration_ns = min(duration_ns, s(recorded.duration_s))

    def scaled() -> "array[Any]":
        if recorded.scale == 1.0:
            return counts
        if counts.typecode == "d":  # rates, which stay fractions
            return array("d", (rate * recorded.scale for rate in counts))
        return array("q", scaled_counts(counts, recorded.scale))

    def blocks() -> Iterator[Sequence[int]]:
        rng = stream(seed, STREAM)
        placed = spread_counts(scaled(), recorded.spread, rng, duration_ns=duration_ns, mean_ms=recorded.mean_ms)
        return islice(placed, -(-duration_ns // NS_PER_S))

    exact = recorded.spread in (Spread.UNIFORM, Spread.EQUAL) and duration_ns == len(counts) * NS_PER_S
    return Trace(name, duration_ns, provenance, blocks, scaled if exact else None)


def _window(recorded: TraceFile, seconds: int, where: str) -> tuple[int, int]:
    """The first and last second (exclusive) of a series of counts that `start_s` and `duration_s` select."""
    if recorded.start_s != int(recorded.start_s):
        refuse(where, f"start_s {recorded.start_s!r} is not a whole second", "counts start on the second")
    first = int(recorded.start_s)
    if first >= seconds:
        _refuse_start(recorded.start_s, seconds, where)
    last = seconds if recorded.duration_s is None else first - int(-recorded.duration_s // 1)
    return first, min(last, seconds)


def _stamped_times_ns(text: SourceText, recorded: TraceFile) -> Iterator[int]:
    return instants_ns(_entries(text, recorded, TIME_COLUMNS), text.where, recorded.unit)


def _gap_times_ns(text: SourceText, recorded: TraceFile) -> Iterator[int]:
    if text.text.lstrip()[:1] != "[":
        return after_gaps_ns(_entries(text, recorded, ("gap", "gaps")), text.where, recorded.unit)
    try:
        gaps = msgspec.json.decode(text.text, type=list[float])
    except (msgspec.MsgspecError, RecursionError) as error:
        what = f"not a JSON list of numbers: {error}"
        raise InputError(what, where=text.where, help="write [0.031, 0.012, …]") from None
    return after_gaps_ns((Entry(repr(gap), 1) for gap in gaps), text.where, recorded.unit)


ARRIVALS_MAX: Final = 50_000_000
"""Of one DISB client: its arrivals are merged with those of the others in memory, 8 bytes each."""
CONTINUOUS: Final = "continuous"


class _DisbLoad(msgspec.Struct):
    """The load of one client: periodic, poisson, trace (times in ms) or continuous (SJTU-IPADS/disb)."""

    type: str
    frequency: float = 0.0
    trace: list[float] = []  # msgspec copies the empty list for each instance


class _DisbClient(msgspec.Struct):
    id: str
    load: _DisbLoad


class _DisbWorkload(msgspec.Struct):
    time: float
    clients: list[_DisbClient] = msgspec.field(name="tasks")


def parse_disb(text: SourceText, *, client: str, seed: int) -> Trace:
    """The open-loop clients of a DISB workload, merged; the trace lasts for the file's `time`.

    Continuous clients are closed loops, whose arrivals depend on the server: they are left out, and the provenance
    names them.
    """
    try:
        workload = msgspec.json.decode(text.text, type=_DisbWorkload)
    except (msgspec.MsgspecError, RecursionError) as error:
        help_text = "a JSON trace is a list of gaps between arrivals, or a DISB workload with `time` and `tasks`"
        raise InputError(f"not a DISB workload: {error}", where=text.where, help=help_text) from None
    Range(above=0, most=1e7).check(workload.time, f"{text.where} time")
    chosen = [one for one in workload.clients if client in ("", one.id)]
    if not chosen and client:
        refuse(text.where, f"no client {client!r}", nearest(client, [one.id for one in workload.clients]))
    closed = [one.id for one in chosen if one.load.type == CONTINUOUS]
    opened = [one for one in chosen if one.load.type != CONTINUOUS]
    if not opened:
        what = "all clients are closed loops (continuous), whose arrivals depend on the server"
        refuse(text.where, what, "use a workload with a periodic, poisson or trace client")
    duration_ns = s(workload.time)
    times = [_client_times_ns(one, duration_ns, seed, f"{text.where} tasks[{one.id}]") for one in opened]
    left_out = f", closed-loop clients left out: {', '.join(closed)}" if closed else ""
    source = f"published: DISB workload {text.where.rpartition('/')[2]}, clients {', '.join(one.id for one in opened)}"
    return trace_of(merge(*times), duration_ns=duration_ns, name=client or "disb", provenance=source + left_out)


def _client_times_ns(client: _DisbClient, duration_ns: int, seed: int, where: str) -> Iterator[int]:
    load = client.load
    if load.type == "trace":
        return _listed_times_ns(load.trace, duration_ns, where)
    if load.type not in ("periodic", "poisson"):
        kinds = ("periodic", "poisson", "trace", CONTINUOUS)
        refuse(where, f"unknown type of load {load.type!r}", nearest(load.type, kinds))
    rate = RATE_ABOVE_0.check(load.frequency, f"{where}.frequency")
    if rate * duration_ns / NS_PER_S > ARRIVALS_MAX:
        refuse(where, f"over {ARRIVALS_MAX:,} arrivals", "lower `time` or `frequency`")
    process = Equal(rate) if load.type == "periodic" else Poisson(rate)
    return chain.from_iterable(process.blocks(stream(seed, f"{STREAM}/{client.id}"), duration_ns))


def _listed_times_ns(times_ms: list[float], duration_ns: int, where: str) -> Iterator[int]:
    if not times_ms:
        refuse(where, "the trace is empty", "list times of arrival in ms")
    limits = Range(least=0, most=1e10)
    times_ns = [ms(limits.check(at_ms, f"{where}.trace[{place}]")) for place, at_ms in enumerate(times_ms)]
    if times_ns != sorted(times_ns):
        refuse(where, "the trace is not sorted", "sort it by time")
    return takewhile(lambda at_ns: at_ns < duration_ns, times_ns)


_MAP_NAME = re.compile(r"MAP(\d{1,6})_D([01])(\.\w+)?", re.ASCII)


def is_maps(path: Path) -> bool:
    """Whether the path names MAP matrices: a folder, one of the two files of a pair, or what their names start with."""
    if not path.exists():
        return path.with_name(f"{path.name}_D0").exists()
    return path.is_dir() or _MAP_NAME.fullmatch(path.name) is not None


def read_maps(path: Path, *, member: str, dwell_s: float, seed: int) -> Trace:
    """The trace of a folder or archive of MAP matrices, or of one pair of them (`MAPs/MAP3` or one of its files).

    The pairs apply one after another, for `dwell_s` seconds each. A file has a square matrix of rates per second, one
    row per line, entries separated by commas, as published with BATCH (Ali et al., SC'20).
    """
    pair = _MAP_NAME.fullmatch(path.name) or (not path.exists() and _MAP_NAME.fullmatch(f"{path.name}_D0"))
    if pair:
        processes = _processes(read_folder(path.parent), str(path.parent), only=int(pair[1]))
    else:
        processes = _processes(read_folder(path, member=member), str(path))
    dwell_ns = s(dwell_s)

    def blocks() -> Iterator[Sequence[int]]:
        rng = stream(seed, STREAM)
        for place, process in enumerate(processes):
            for block in process.blocks(rng, dwell_ns):
                yield [place * dwell_ns + at_ns for at_ns in block]

    source = f"fitted: MAP matrices of {path.name}, {len(processes)} of {dwell_s:g} s each, seed {seed}"
    return Trace(path.name, dwell_ns * len(processes), source, blocks)


def _processes(files: Mapping[str, SourceText], where: str, only: int | None = None) -> list[Map]:
    found: dict[int, dict[str, SourceText]] = {}
    for name, text in files.items():
        match = _MAP_NAME.fullmatch(name)
        if match and only in (None, int(match[1])):
            found.setdefault(int(match[1]), {})[match[2]] = text
    if not found:
        refuse(where, "no files MAP1_D0, MAP1_D1, … here", "name a trace file, or a folder of MAP matrices")
    return [_process(number, pair, where) for number, pair in sorted(found.items())]


def _process(number: int, pair: dict[str, SourceText], where: str) -> Map:
    for half in "01":
        if half not in pair:
            refuse(where, f"MAP{number}_D{half} is missing", "each MAPk needs its D0 and its D1")
    try:
        return Map(_matrix(pair["0"]), _matrix(pair["1"]))
    except InputError as error:
        if error.where:
            raise
        raise InputError(error.what, where=pair["0"].where, help=error.help) from None


def _matrix(text: SourceText) -> Matrix:
    limits = Range(least=-1e7, most=1e7)
    rows: list[tuple[float, ...]] = []
    for line, content in islice(enumerate(text.text.splitlines(), start=1), STATES_MAX + 1):
        if cells := content.replace(",", " ").split():
            rows.append(tuple(read_number(cell, limits, f"{text.where}:{line}") for cell in cells))
    if not rows:
        refuse(text.where, "the matrix is empty", "write one row per line, entries separated by commas")
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class TraceChanges:
    """Changes that apply to every trace, after it was generated or read, and what its requests bring."""

    thin: Fraction = 1.0
    compress: Annotated[float, Range(above=0, most=1e9)] = 1.0
    repeat: Annotated[int, Range(least=1, most=1e6)] = 1
    rows: NumbersOption | None = None
    """How many rows each request brings; None: one."""
    sizes: NumbersOption | None = None
    """How large these are; None: all equally large."""

    @property
    def columns(self) -> tuple[str, str]:
        """The columns of the trace's own file that have rows and sizes; empty for none."""
        rows, sizes = (each.column if _is_own(each) else "" for each in (self.rows, self.sizes))
        return rows, sizes


def _is_own(numbers: NumbersOption | None) -> TypeGuard[NumberColumn]:
    """Whether these are a column of the trace's own file."""
    return isinstance(numbers, NumberColumn) and numbers.file is None


READERS: Final = {"rows": partial(read_numbers, limits=ROWS), "sizes": partial(read_numbers, limits=SIZES)}


@dataclass(frozen=True, slots=True)
class GeneratedChanges(TraceChanges):
    """The options of a generated trace in addition to those of its kind."""

    duration_s: Annotated[float, Range(above=0, most=LENGTH_S_MAX)] | None = None
    """Before the trace is compressed and repeated."""
    scale: Annotated[float, Range(above=0, most=1e6)] = 1.0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is declared under `trace:`, read and checked."""

    source: TraceFile | ArrivalProcess
    changes: TraceChanges
    """`GeneratedChanges` for an arrival process."""


def trace_options(value: Value) -> TraceOptions:
    """The options in `value`. InputError for a mistake in them; no file is opened."""
    fields = value.mapping()
    if ("kind" in fields) == ("file" in fields):
        value.fail("a trace has either `kind` or `file`", f"kinds: {', '.join(KINDS)}; or `file:` and a path to read")
    if "file" in fields:
        recorded = read_options(TraceFile, value, also=keys_of(TraceChanges))
        return TraceOptions(recorded, read_options(TraceChanges, value, also=keys_of(TraceFile), readers=READERS))
    process = kind_of(value, also=keys_of(GeneratedChanges))
    others = "kind", *keys_of(type(process))
    changes = read_options(GeneratedChanges, value, also=others, readers=READERS)
    for key, column in zip(READERS, changes.columns, strict=True):
        if column:
            fields[key].fail(f"a generated trace has no column {column!r}", "name the `file` that has it")
    return TraceOptions(process, changes)


def trace_from(spec: Declared, *, seed: int, duration_s: float | None, folder: Path) -> Trace:
    """The trace that `spec` declares, at most `duration_s` long. InputError for a mistake in it or in its file.

    Relative file names start at `folder`. A recorded trace shorter than `duration_s` stays so, unless it is repeated; a
    generated one needs a duration, from here or of its own.
    """
    if duration_s is not None:
        POSITIVE.check(duration_s, "duration_s")
    value = as_value(spec, "trace")
    options = trace_options(value)
    changes = options.changes
    if isinstance(options.source, TraceFile):
        rows, sizes = changes.columns
        recorded = replace(options.source, file=folder / options.source.file)
        trace = read_trace(recorded, seed=seed, rows_column=rows, sizes_column=sizes)
    else:
        assert isinstance(changes, GeneratedChanges), f"{options.source} is generated"
        trace = _generated(options.source, changes, value, seed=seed, duration_s=duration_s)
    changed = repeat(compress(thin(trace, changes.thin, seed=seed), changes.compress), changes.repeat)
    Range(least=0, most=LENGTH_S_MAX).check(to_s(changed.duration_ns), value.under("duration_s", None).where)
    whole = changed if duration_s is None else cut(changed, duration_ns=s(duration_s))
    numbers = {
        key: None if declared is None or _is_own(declared) else numbers_of(declared, limits, folder)
        for key, declared, limits in (("rows", changes.rows, ROWS), ("sizes", changes.sizes, SIZES))
    }
    return drawn(whole, seed=seed, **numbers)


def _generated(
    process: ArrivalProcess, changes: GeneratedChanges, value: Value, *, seed: int, duration_s: float | None
) -> Trace:
    length_s = changes.duration_s
    if length_s is None:
        if duration_s is None:
            value.fail("the trace has no duration", "add `duration_s:` to the trace or to the whole run")
        length_s = duration_s * changes.compress / changes.repeat
    Range(above=0, most=LENGTH_S_MAX).check(length_s, value.under("duration_s", None).where)
    return scale(generated(process, seed=seed, duration_ns=max(1, s(length_s))), changes.scale, seed=seed)
