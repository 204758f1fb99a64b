"""Latency forms: how long a batch takes as a function of its size and of the cores it gets.

Promises that every form is a pure value with one verb, `latency_ms(batch, cores)`, defined for every batch ≥ 1 and
every cores > 0, inside and outside what was measured. Knows nothing of files, clocks or machines.

Sources: quadratic in the batch at fixed cores, FA2; batch and cores after Amdahl, Sponge (Razavi et al., EuroMLSys
2024, equation for l(b, c)); tables as the published grids are.
"""

from bisect import bisect_left
from functools import cached_property

from msgspec import Struct

Cells = dict[int, dict[float, float]]
"""batch → cores → milliseconds."""


class Quadratic(Struct, frozen=True, tag_field="form", tag="quadratic", forbid_unknown_fields=True):
    """l(b) = αb² + βb + γ milliseconds, on the cores it was measured with: `cores` does not enter."""

    alpha: float
    beta: float
    gamma: float

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch`, whatever the cores."""
        return (self.alpha * batch + self.beta) * batch + self.gamma


class Amdahl(Struct, frozen=True, tag_field="form", tag="amdahl", forbid_unknown_fields=True):
    """l(b, c) = γb/c + ε/c + δb + η milliseconds: a part that parallelises over cores and one that does not."""

    gamma: float
    epsilon: float
    delta: float
    eta: float

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch` on `cores`."""
        return (self.gamma * batch + self.epsilon) / cores + self.delta * batch + self.eta


class _Row(Struct, frozen=True, gc=False):
    """One batch size of a table. `inverse` is 1/cores, ascending, so that Amdahl's law is a straight line in it."""

    inverse: tuple[float, ...]
    latency_ms: tuple[float, ...]

    def at(self, inverse: float) -> float:
        if inverse <= self.inverse[0]:
            return self.latency_ms[0]
        if inverse >= self.inverse[-1]:
            return self.latency_ms[-1] * inverse / self.inverse[-1]
        high = bisect_left(self.inverse, inverse)
        left, right = self.inverse[high - 1], self.inverse[high]
        share = (inverse - left) / (right - left)
        return self.latency_ms[high - 1] + share * (self.latency_ms[high] - self.latency_ms[high - 1])


class Table(Struct, frozen=True, dict=True, tag_field="form", tag="table", forbid_unknown_fields=True):
    """Measured cells, joined by straight lines: in 1/cores along a row, in the batch between rows.

    Straight lines keep the order of the cells, so a monotone table gives a monotone latency. Outside the cells the
    latency is the cautious one: more cores than measured bring nothing, fewer cost in proportion (l·c constant); a
    batch below the smallest costs as much as the smallest, and above the largest the last slope goes on (with one row,
    in proportion to the batch).
    """

    table: Cells

    def __post_init__(self) -> None:
        """ValueError where the table has no cell, or a batch, core count or latency that is not positive."""
        if not self.table or not all(self.table.values()):
            raise ValueError("table needs at least one cell in every row")
        for batch, row in self.table.items():
            for cores, latency_ms in row.items():
                if batch < 1 or not 0 < cores < float("inf") or not 0 < latency_ms < float("inf"):
                    raise ValueError(f"table cell [{batch}][{cores}] = {latency_ms}: all three must be positive")

    @cached_property
    def _rows(self) -> tuple[tuple[int, ...], tuple[_Row, ...]]:
        batches = tuple(sorted(self.table))
        rows = []
        for batch in batches:
            cells = sorted((1.0 / cores, latency_ms) for cores, latency_ms in self.table[batch].items())
            rows.append(_Row(tuple(cell[0] for cell in cells), tuple(cell[1] for cell in cells)))
        return batches, tuple(rows)

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch` on `cores`, measured, interpolated or extrapolated as said above."""
        batches, rows = self._rows
        inverse = 1.0 / cores
        if batch <= batches[0]:
            return rows[0].at(inverse)
        if batch >= batches[-1]:
            return self._beyond(batch, inverse)
        high = bisect_left(batches, batch)
        low_ms, high_ms = rows[high - 1].at(inverse), rows[high].at(inverse)
        return low_ms + (high_ms - low_ms) * (batch - batches[high - 1]) / (batches[high] - batches[high - 1])

    def _beyond(self, batch: int, inverse: float) -> float:
        batches, rows = self._rows
        last_ms = rows[-1].at(inverse)
        if len(rows) == 1:
            return last_ms * batch / batches[-1]
        slope_ms = max(0.0, last_ms - rows[-2].at(inverse)) / (batches[-1] - batches[-2])
        return last_ms + slope_ms * (batch - batches[-1])


Latency = Quadratic | Amdahl | Table
"""Any form; told apart by the key `form` where it is written."""
