"""A trace: when requests arrive, as a value that can be walked any number of times, cut, scaled and written to files.

Arrivals are sorted integer nanoseconds from the start of the trace, equal on every walk, and in memory only about one
second at a time. Every change gives a new lazy trace and leaves the old one alone. `read` and `generate` make traces.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil
from pathlib import Path
from random import Random

from sloop.errors import MachineError
from sloop.options import Limits
from sloop.streams import stream
from sloop.units import NS_PER_S, to_s

Blocks = Callable[[], Iterator[Sequence[int]]]
"""Starts a walk: sorted runs of arrival offsets in ns, each run after the one before; runs may be empty."""

BLOCK_ARRIVALS = 65_536

POSITIVE = Limits(above=0, most=1e12)
NOT_NEGATIVE = Limits(least=0, most=1e12)
RATE = Limits(least=0, most=1e7)
"""Of requests per second."""
RATE_ABOVE_0 = Limits(above=0, most=1e7)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Arrivals in `[0, duration_ns)`.

    `provenance` says where the numbers come from, its first word one of `measured`, `published`, `fitted`, `assumed`.
    """

    name: str
    duration_ns: int
    provenance: str
    blocks: Blocks
    counted: "Callable[[], array[int]] | None" = None
    """The arrivals in each second, where they are known without a walk."""

    def times_ns(self) -> Iterator[int]:
        """Every arrival's offset from the start, in ns, in order."""
        return chain.from_iterable(self.blocks())

    def counts_per_s(self) -> "array[int]":
        """Arrivals in each second `[k, k + 1)`; the last second may be a partial one."""
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

    def to_array(self) -> "array[int]":
        """All offsets at once; 8 bytes for each arrival."""
        times = array("q")
        for block in self.blocks():
            times.extend(block)
        return times

    def __str__(self) -> str:
        return f"{self.name}: {to_s(self.duration_ns):g} s, {self.provenance}"


def trace_of(times_ns: Iterable[int], *, duration_ns: int | None = None, name: str, provenance: str) -> Trace:
    """A trace held in memory. Without a duration it ends just after its last arrival.

    `times_ns` must be sorted, none negative and all before `duration_ns`: readers see to that.
    """
    times = array("q", times_ns)
    end_ns = (times[-1] + 1 if times else 0) if duration_ns is None else duration_ns
    assert not times or (times[0] >= 0 and times[-1] < end_ns), f"{times[0]} … {times[-1]} outside [0, {end_ns})"

    def blocks() -> Iterator[Sequence[int]]:
        for first in range(0, len(times), BLOCK_ARRIVALS):
            yield times[first : first + BLOCK_ARRIVALS]

    return Trace(name, end_ns, provenance, blocks)


Change = Callable[[Iterator[Sequence[int]]], Iterator[Sequence[int]]]


def cut(trace: Trace, *, start_ns: int = 0, duration_ns: int | None = None) -> Trace:
    """The window `[start_ns, start_ns + duration_ns)`, its start becoming 0; it ends with the trace at the latest."""
    length_ns = trace.duration_ns - start_ns
    length_ns = max(0, length_ns if duration_ns is None else min(duration_ns, length_ns))
    end_ns = start_ns + length_ns
    if length_ns == trace.duration_ns:
        return trace

    def change(walk: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        for block in walk:
            inside = block[bisect_left(block, start_ns) : bisect_left(block, end_ns)]
            yield [at_ns - start_ns for at_ns in inside]
            if len(block) and block[-1] >= end_ns:
                return

    return _changed(
        trace, change, duration_ns=length_ns, note=f"cut to {to_s(length_ns):g} s from {to_s(start_ns):g} s"
    )


def scale(trace: Trace, factor: float, *, seed: int = 0) -> Trace:
    """`factor` times as many arrivals in the same time, each second keeping its share.

    Below 1 arrivals are kept at random. Above 1 each brings on average `factor - 1` more, placed uniformly between it
    and the next, so that bursts stay bursts.
    """
    if factor == 1.0:
        return trace
    if factor < 1.0:
        return thin(trace, factor, seed=seed)

    def change(walk: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        return _multiplied(walk, factor, trace.duration_ns, stream(seed, "arrivals/scale"))

    return _changed(trace, change, duration_ns=trace.duration_ns, note=f"scaled by {factor:g}")


def thin(trace: Trace, keep: float, *, seed: int = 0) -> Trace:
    """Each arrival is kept with probability `keep`, independently."""
    if keep == 1.0:
        return trace

    def change(walk: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        random = stream(seed, "arrivals/thin").random
        for block in walk:
            yield [at_ns for at_ns in block if random() < keep]

    return _changed(trace, change, duration_ns=trace.duration_ns, note=f"thinned to {keep:g}")


def compress(trace: Trace, factor: float) -> Trace:
    """The same arrivals in `1/factor` of the time: an hour compressed by 60 takes a minute."""
    if factor == 1.0:
        return trace

    def change(walk: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        for block in walk:
            yield [min(int(at_ns / factor), duration_ns - 1) for at_ns in block]

    duration_ns = ceil(trace.duration_ns / factor)
    return _changed(trace, change, duration_ns=duration_ns, note=f"time compressed by {factor:g}")


def repeat(trace: Trace, times: int) -> Trace:
    """The trace `times` times in a row."""
    if times == 1:
        return trace

    def blocks() -> Iterator[Sequence[int]]:
        for lap in range(times):
            shift_ns = lap * trace.duration_ns
            for block in trace.blocks():
                yield [at_ns + shift_ns for at_ns in block]

    return Trace(trace.name, trace.duration_ns * times, f"{trace.provenance}, repeated {times} times", blocks)


def _changed(trace: Trace, change: Change, *, duration_ns: int, note: str) -> Trace:
    return Trace(trace.name, duration_ns, f"{trace.provenance}, {note}", lambda: change(trace.blocks()))


def _multiplied(walk: Iterator[Sequence[int]], factor: float, duration_ns: int, rng: Random) -> Iterator[Sequence[int]]:
    """Every arrival and its copies; a block is held back until the arrival after it is known."""
    held: list[int] = []
    for block in walk:
        if not block:
            continue
        if held:
            yield _copied(held, block[0], factor, rng)
        held = list(block)
    if held:
        yield _copied(held, duration_ns, factor, rng)


def _copied(block: list[int], after_ns: int, factor: float, rng: Random) -> list[int]:
    random = rng.random
    whole = int(factor) - 1
    fraction = factor - int(factor)
    copies: list[int] = []
    for place, at_ns in enumerate(block):
        next_ns = block[place + 1] if place + 1 < len(block) else after_ns
        room_ns = min(next_ns - at_ns, NS_PER_S)
        extra = whole + (random() < fraction)
        copies += [at_ns + int(random() * room_ns) for _ in range(extra)]
    return sorted(block + copies)


def write_counts(trace: Trace, path: Path) -> None:
    """One line a second: how many requests arrive in it. Read back with `format: counts`."""
    _write(path, (f"{count}\n" for count in trace.counts_per_s()))


def write_times(trace: Trace, path: Path) -> None:
    """One line an arrival: its offset in ns. Read back, exactly, with `format: timestamps, unit: ns`."""
    _write(path, (f"{at_ns}\n" for at_ns in trace.times_ns()))


def _write(path: Path, lines: Iterator[str]) -> None:
    try:
        with path.open("w", encoding="ascii") as file:
            while chunk := "".join(islice(lines, BLOCK_ARRIVALS)):
                file.write(chunk)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}", help="choose another place for the file") from None
