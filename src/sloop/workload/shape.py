"""Changes to a trace: cut, scale, thin, compress, repeat. Each gives a new lazy trace and leaves the old one alone.

Promises that a changed trace is still sorted and still the same on every walk.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from random import Random

from sloop.streams import stream
from sloop.units import NS_PER_S, to_s
from sloop.workload.trace import Trace

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
