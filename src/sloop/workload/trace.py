"""A trace: when requests arrive, and what they bring. The value itself, changes to it, its statistics, and writing it
to files.

Arrivals are sorted whole nanoseconds from the start of the trace. A trace is lazy: it generates its arrivals anew each
time it is iterated, always the same ones, about one second of them in memory at a time; a change makes a new lazy
trace. What the requests bring is iterated beside the arrivals, so that a trace without it costs nothing more. It stays
with its arrivals through all changes. `sloop.workload.generate` and `sloop.workload.read` make traces.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from itertools import compress as selected
from math import ceil, sqrt
from operator import mul, sub
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np
from msgspec import Struct

from sloop.errors import MachineError
from sloop.options import Range
from sloop.streams import stream
from sloop.units import NS_PER_S, quantile, to_s

Blocks = Callable[[], Iterator[Sequence[int]]]
"""Starts an iteration over sorted blocks of arrival times in ns. Each block is later than the one before or empty."""


class Work(NamedTuple):
    """What a request brings, as in `sloop.vocabulary.Request`."""

    rows: int = 1
    size: int = 0
    shape: tuple[int, ...] = ()


Works = Callable[[], Iterator[Work]]
"""Starts an iteration over what the requests bring, in the order of their arrivals; it may be endless."""

BLOCK_ARRIVALS: Final = 65_536
"""Arrivals per block of a trace in memory, and lines per write: large enough that Python's cost per block is hidden."""

POSITIVE: Final = Range(above=0, most=1e12)
NOT_NEGATIVE: Final = Range(least=0, most=1e12)
RATE: Final = Range(least=0, most=1e7)
"""Requests per second. The upper limit catches a wrong unit; no single machine serves 10 million a second."""
RATE_ABOVE_0: Final = Range(above=0, most=1e7)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Arrivals in `[0, duration_ns)`.

    `provenance` says where the numbers come from; its first word is `measured`, `published`, `fitted` or `assumed`.
    """

    name: str
    duration_ns: int
    provenance: str
    blocks: Blocks
    counted: "Callable[[], array[int]] | None" = None
    """Gives the number of arrivals in each second, if that is known without generating the arrivals."""
    works: Works | None = None
    """None if every request brings one row of the only size."""

    def times_ns(self) -> Iterator[int]:
        """All arrival times, in ns from the start, in order."""
        return chain.from_iterable(self.blocks())

    def counts_per_s(self) -> "array[int]":
        """The number of arrivals in each second `[k, k + 1)`; the last second may be incomplete."""
        if self.counted is not None:
            return self.counted()
        counts = array("q", bytes(8 * -(-self.duration_ns // NS_PER_S)))
        for block in self.blocks():
            first = 0
            while first < len(block):
                second = block[first] // NS_PER_S
                after = bisect_left(block, (second + 1) * NS_PER_S, first)
                counts[second] += after - first
                first = after
        return counts

    def __str__(self) -> str:
        return f"{self.name}: {to_s(self.duration_ns):g} s, {self.provenance}"


def trace_of(
    times_ns: Iterable[int],
    *,
    duration_ns: int | None = None,
    name: str,
    provenance: str,
    works: Works | None = None,
) -> Trace:
    """A trace held in memory. Without a duration it ends 1 ns after its last arrival.

    `times_ns` must be sorted, not negative and less than `duration_ns`: callers check what they read.
    """
    times = array("q", times_ns)
    end_ns = (times[-1] + 1 if times else 0) if duration_ns is None else duration_ns
    assert not times or (times[0] >= 0 and times[-1] < end_ns), f"{times[0]} … {times[-1]} outside [0, {end_ns})"

    def blocks() -> Iterator[Sequence[int]]:
        for first in range(0, len(times), BLOCK_ARRIVALS):
            yield times[first : first + BLOCK_ARRIVALS]

    return Trace(name, end_ns, provenance, blocks, works=works)


Change = Callable[[Iterator[Sequence[int]]], Iterator[Sequence[int]]]
"""Turns the blocks of one trace into those of another."""
Carry = Callable[[Iterator[Work]], Iterator[Work]]
"""Turns what the requests of one trace bring into what those of another bring."""


def cut(trace: Trace, *, start_ns: int = 0, duration_ns: int | None = None) -> Trace:
    """The window `[start_ns, start_ns + duration_ns)`, or what the trace has of it; the window's start becomes 0."""
    length_ns = trace.duration_ns - start_ns
    length_ns = max(0, length_ns if duration_ns is None else min(duration_ns, length_ns))
    end_ns = start_ns + length_ns
    if length_ns == trace.duration_ns:
        return trace

    def change(blocks: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        for block in blocks:
            inside = block[bisect_left(block, start_ns) : bisect_left(block, end_ns)]
            yield [at_ns - start_ns for at_ns in inside]
            if len(block) and block[-1] >= end_ns:
                return

    def carry(works: Iterator[Work]) -> Iterator[Work]:
        return selected(works, (start_ns <= at_ns < end_ns for at_ns in trace.times_ns()))

    return _changed(trace, change, carry, length_ns, f"cut to {to_s(length_ns):g} s from {to_s(start_ns):g} s")


def scale(trace: Trace, factor: float, *, seed: int = 0) -> Trace:
    """`factor` times as many arrivals in the same time, distributed over time as before.

    Below 1, arrivals are kept at random. Above 1, each arrival gets `factor - 1` copies on average, at uniform times
    between it and the next arrival, so that bursts stay bursts.
    """
    if factor == 1.0:
        return trace
    if factor < 1.0:
        return thin(trace, factor, seed=seed)

    def change(blocks: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        rng = stream(seed, "arrivals/scale")
        held: Sequence[int] = ()  # a block waits until the first arrival after it is known
        for block in blocks:
            if block and held:
                yield _with_copies(held, block[0], factor, rng)
            held = block or held
        if held:
            yield _with_copies(held, trace.duration_ns, factor, rng)

    def carry(works: Iterator[Work]) -> Iterator[Work]:
        rng = stream(seed, "arrivals/scale")
        return chain.from_iterable([work] * (1 + len(_places(factor, rng))) for work in works)

    return _changed(trace, change, carry, trace.duration_ns, f"scaled by {factor:g}")


def _with_copies(block: Sequence[int], next_block_ns: int, factor: float, rng: Random) -> list[int]:
    copies: list[int] = []
    for place, at_ns in enumerate(block):
        next_ns = block[place + 1] if place + 1 < len(block) else next_block_ns
        room_ns = min(next_ns - at_ns, NS_PER_S)
        copies += [at_ns + int(share * room_ns) for share in _places(factor, rng)]
    return sorted([*block, *copies])


def _places(factor: float, rng: Random) -> list[float]:
    """Where the copies of an arrival are, as shares of the time until the next one."""
    extra = int(factor) - 1 + (rng.random() < factor - int(factor))
    return [rng.random() for _ in range(extra)]


def thin(trace: Trace, keep: float, *, seed: int = 0) -> Trace:
    """Each arrival is kept with probability `keep`, independently of the others."""
    if keep == 1.0:
        return trace

    def change(blocks: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        random = stream(seed, "arrivals/thin").random
        for block in blocks:
            yield [at_ns for at_ns in block if random() < keep]

    def carry(works: Iterator[Work]) -> Iterator[Work]:
        random = stream(seed, "arrivals/thin").random
        return (work for work in works if random() < keep)

    return _changed(trace, change, carry, trace.duration_ns, f"thinned to {keep:g}")


def compress(trace: Trace, factor: float) -> Trace:
    """The same arrivals in `1/factor` of the time: an hour compressed by 60 takes a minute."""
    if factor == 1.0:
        return trace

    def change(blocks: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        for block in blocks:
            yield [min(int(at_ns / factor), duration_ns - 1) for at_ns in block]

    duration_ns = ceil(trace.duration_ns / factor)
    return _changed(trace, change, iter, duration_ns, f"time compressed by {factor:g}")


def repeat(trace: Trace, times: int) -> Trace:
    """The trace, played `times` times in a row."""
    if times == 1:
        return trace

    def blocks() -> Iterator[Sequence[int]]:
        for round_ in range(times):
            shift_ns = round_ * trace.duration_ns
            for block in trace.blocks():
                yield [at_ns + shift_ns for at_ns in block]

    works, provenance = trace.works, f"{trace.provenance}, repeated {times} times"
    again = None if works is None else lambda: chain.from_iterable(works() for _ in range(times))
    return Trace(trace.name, trace.duration_ns * times, provenance, blocks, works=again)


def _changed(trace: Trace, change: Change, carry: Carry, duration_ns: int, note: str) -> Trace:
    works = trace.works
    return Trace(
        trace.name,
        duration_ns,
        f"{trace.provenance}, {note}",
        lambda: change(trace.blocks()),
        works=None if works is None else lambda: carry(works()),
    )


LAGS_S: Final = (1, 10, 60, 600)

GAP_ARRIVALS_MAX: Final = 2_000_000
"""The variation of gaps is that of this many first arrivals: its error is then below 1 %, and it takes a second or two.
The arrivals of the three weeks of the Twitter trace take minutes to generate, while their counts are known."""


class WorkStatistics(Struct, frozen=True):
    """What the (first two million) requests of a trace bring."""

    rows_mean: float
    rows_max: int
    size_p50: int
    size_p99: int
    size_max: int
    """Of the sizes of their rows, each request counted once; 0 if all are equally large."""


class Statistics(Struct, frozen=True):
    """Statistics of a trace; None if one is undefined, such as the variation of gaps where there are none."""

    name: str
    provenance: str
    duration_s: float
    requests: int
    mean_rps: float
    p50_rps: int
    p99_rps: int
    max_rps: int
    peak_to_mean: float | None
    dispersion: float | None
    """Variance divided by mean of the counts per second: 1 for a Poisson process, more for bursts."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between (the first two million) arrivals: 1 for a Poisson process."""
    acf: dict[int, float]
    """Autocorrelation of the counts per second, by lag in seconds."""
    zeros: int
    """Seconds without an arrival."""
    longest_silence_s: int
    work: WorkStatistics | None = None
    """None if every request brings one row of the only size."""

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values for people."""
        part = f" (first {GAP_ARRIVALS_MAX:,} arrivals)" if self.requests > GAP_ARRIVALS_MAX else ""
        return [
            ("trace", self.name),
            ("from", self.provenance),
            ("duration", f"{self.duration_s:,.3f} s"),
            ("requests", f"{self.requests:,}"),
            ("mean rate", f"{self.mean_rps:,.3f} rps"),
            ("p50 / p99 / max", f"{self.p50_rps:,} / {self.p99_rps:,} / {self.max_rps:,} rps"),
            ("peak to mean", _three_decimals(self.peak_to_mean)),
            ("index of dispersion", _three_decimals(self.dispersion)),
            ("CV of gaps", _three_decimals(self.gap_cv) + part),
            *((f"autocorrelation, {lag} s", _three_decimals(value)) for lag, value in self.acf.items()),
            ("seconds without arrival", f"{self.zeros:,} (longest run {self.longest_silence_s:,} s)"),
            *([] if self.work is None else _work_rows(self.work)),
        ]


def _work_rows(work: WorkStatistics) -> list[tuple[str, str]]:
    rows = [("rows mean / max", f"{work.rows_mean:,.3f} / {work.rows_max:,}")]
    if work.size_max:
        rows.append(("size p50 / p99 / max", f"{work.size_p50:,} / {work.size_p99:,} / {work.size_max:,}"))
    return rows


def _three_decimals(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def statistics(trace: Trace) -> Statistics:
    """The statistics of a trace. Sums are exact integers, so that they are equal on every machine."""
    counts = trace.counts_per_s()
    ranked = sorted(counts)
    requests, duration_s = sum(counts), to_s(trace.duration_ns)
    mean, variance = _moments(requests, sum(map(mul, counts, counts)), len(counts))
    silences = [sum(1 for _ in run) for silent, run in groupby(counts, key=lambda count: count == 0) if silent]
    return Statistics(
        name=trace.name,
        provenance=trace.provenance,
        duration_s=duration_s,
        requests=requests,
        mean_rps=round(requests / duration_s, 6) if duration_s else 0.0,
        p50_rps=quantile(ranked, 0.50) if ranked else 0,
        p99_rps=quantile(ranked, 0.99) if ranked else 0,
        max_rps=ranked[-1] if ranked else 0,
        peak_to_mean=round(ranked[-1] / mean, 6) if mean else None,
        dispersion=round(variance / mean, 6) if mean else None,
        gap_cv=_gap_cv(trace),
        acf={lag: value for lag in LAGS_S if (value := autocorrelation(counts, lag)) is not None},
        zeros=sum(silences),
        longest_silence_s=max(silences, default=0),
        work=_work_statistics(trace),
    )


def first_works(trace: Trace, count: int) -> list[Work]:
    """What the first `count` requests of a trace bring; empty if every request brings one row of the only size."""
    if trace.works is None:
        return []
    return [work for _, work in zip(islice(trace.times_ns(), count), trace.works(), strict=False)]


def _work_statistics(trace: Trace) -> WorkStatistics | None:
    works = first_works(trace, GAP_ARRIVALS_MAX)
    if not works:
        return None
    rows, sizes = [work.rows for work in works], sorted([work.size for work in works])
    return WorkStatistics(
        rows_mean=round(sum(rows) / len(rows), 6),
        rows_max=max(rows),
        size_p50=quantile(sizes, 0.50),
        size_p99=quantile(sizes, 0.99),
        size_max=sizes[-1],
    )


def autocorrelation(counts: "array[int]", lag: int) -> float | None:
    """Sample autocorrelation at `lag` ≥ 1 steps, in [-1, 1]; None if counts do not vary or are fewer than two lags."""
    if len(counts) < 2 * lag:
        return None
    centred = np.frombuffer(counts, dtype=np.int64) - sum(counts) / len(counts)
    power = float(np.dot(centred, centred))
    return round(float(np.dot(centred[:-lag], centred[lag:])) / power, 6) if power else None


def _gap_cv(trace: Trace) -> float | None:
    number = total = squares = 0
    last: list[int] = []
    for block in trace.blocks():
        times = [*last, *block]
        gaps = list(map(sub, times[1:], times))
        number += len(gaps)
        total += sum(gaps)
        squares += sum(map(mul, gaps, gaps))
        last = times[-1:]
        if number >= GAP_ARRIVALS_MAX:
            break
    mean, variance = _moments(total, squares, number)
    return round(sqrt(variance) / mean, 6) if mean else None


def _moments(total: int, squares: int, number: int) -> tuple[float, float]:
    """Mean and population variance, from the sum and the sum of squares of `number` integers."""
    if number == 0:
        return 0.0, 0.0
    return total / number, (squares * number - total * total) / (number * number)


def write_counts(trace: Trace, path: Path) -> None:
    """One line per second, the number of its arrivals; `{file: …}` reads it. MachineError if it cannot be written."""
    _write(path, (f"{count}\n" for count in trace.counts_per_s()))


def write_times(trace: Trace, path: Path) -> None:
    """One line per arrival, its time in ns. `{file: …, format: timestamps, unit: ns}` reads back the same trace.

    If it has works, a CSV file with the columns `arrived`, `rows` and `size`, which `column: arrived`,
    `rows: {column: rows}` and `sizes: {column: size}` read. MachineError if it cannot be written.
    """
    if trace.works is None:
        _write(path, (f"{at_ns}\n" for at_ns in trace.times_ns()))
        return
    arrivals = zip(trace.times_ns(), trace.works(), strict=False)
    lines = (f"{at_ns},{work.rows},{work.size}\n" for at_ns, work in arrivals)
    _write(path, chain(("arrived,rows,size\n",), lines))


def _write(path: Path, lines: Iterator[str]) -> None:
    try:
        with path.open("w", encoding="ascii") as file:
            while chunk := "".join(islice(lines, BLOCK_ARRIVALS)):
                file.write(chunk)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}", help="choose another place for the file") from None
