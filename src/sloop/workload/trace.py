"""A trace: when requests arrive, as a value that can be walked any number of times.

Promises sorted integer nanoseconds from the start of the trace, the same ones on every walk, in memory bounded by the
busiest block (about one second) rather than by the number of arrivals. Knows neither files nor chance: `read` and
`generate` make traces, `shape` changes them, `stats` describes them.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from sloop.options import Limits
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
