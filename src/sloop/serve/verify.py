"""Runs requests that shared a forward pass again, alone, while their worker has nothing else to do.

Rows are independent because an examination has proven it (`sloop.profile.joining`), or because an author says so. This
module checks it with real requests: it keeps copies of the inputs and outputs of some of them, and compares while the
worker is idle. Suppose that an output differs from that of the request alone by more than the tolerance of its type.
If it differs as much from that of the request beside copies of itself, the difference comes from the neighbours, not
from rounding.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np

from sloop.profile.joining import is_same
from sloop.profile.model import NOTHING
from sloop.tensor import Port, Slices

SAMPLES_MAX: Final = 8
SAMPLES_BYTES_MAX: Final = 2**24
"""The most requests, and bytes, that wait to be compared; further requests are not compared."""

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Sequence[Array]], Sequence[Array]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request that shared a pass: its inputs and outputs, the first of its rows and their number, and all rows of the
    pass."""

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    start: int
    rows: int
    rows_of_pass: int


class Verification:
    """What one worker verifies: the `first` requests that share a pass, and a `share` of the following ones."""

    def __init__(self, ports: Sequence[Port], first: int, share: float) -> None:
        self._ports, self._left, self._share = ports, first, share
        self._due = 0.0
        self._samples: deque[_Sample] = deque()
        self._bytes = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits to be compared."""
        return bool(self._samples)

    def note(
        self,
        rows: Sequence[int],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        kept: Sequence[tuple[Sequence[Slices], Sequence[Slices]]] = (),
    ) -> None:
        """Several requests have shared a pass. `rows` is the number of rows of each; arrays have the rows of all of
        them, one request after the other, or are `NOTHING` for outputs that none of them needs. If they were padded,
        `kept` says what of inputs and outputs belongs to each request."""
        if not (self._left or self._share):
            return
        start, whole = 0, ([()] * len(inputs), [()] * len(outputs))
        for own, (of_inputs, of_outputs) in zip(rows, kept or repeat(whole), strict=bool(kept)):
            self._due += self._share
            if self._left or self._due >= 1:
                parts = [(slice(start, start + own), *each) for each in (*of_inputs, *of_outputs)]
                self._keep(inputs, outputs, parts, sum(rows))
            start += own

    def _keep(
        self, inputs: Sequence[Array], outputs: Sequence[Array], parts: Sequence[Slices], rows_of_pass: int
    ) -> None:
        """Keep these parts of the inputs and outputs of a pass."""
        arrays = zip((*inputs, *outputs), parts, strict=True)
        own = [array if array is NOTHING else array[part] for array, part in arrays]
        start, rows = parts[0][0].start, parts[0][0].stop - parts[0][0].start
        size = sum(array.nbytes for array in own)
        if len(self._samples) >= SAMPLES_MAX or self._bytes + size > SAMPLES_BYTES_MAX:
            return
        copies = [array if array is NOTHING else array.copy() for array in own]
        self._samples.append(_Sample(copies[: len(inputs)], copies[len(inputs) :], start, rows, rows_of_pass))
        self._bytes += size
        self._left = max(0, self._left - 1)
        self._due = max(0.0, self._due - 1)

    def check(self, run: Run) -> str:
        """Run the request that waits longest again, and compare. Returns what differs; empty if nothing does. Raises
        what the model raises."""
        sample = self._samples.popleft()
        self._bytes -= sum(array.nbytes for array in (*sample.inputs, *sample.outputs))
        alone = [np.asarray(output) for output in run(sample.inputs)]
        differing = [
            place
            for place, port in enumerate(self._ports)
            if sample.outputs[place] is not NOTHING and not is_same(alone[place], sample.outputs[place], port)
        ]
        if not differing:
            return ""
        # As many rows take the same kernels, so a difference that remains comes from the values of the neighbours.
        copies = -(-sample.rows_of_pass // sample.rows)
        beside = run([np.concatenate([array] * copies)[: sample.rows_of_pass] for array in sample.inputs])
        for place in differing:
            port, own = self._ports[place], sample.outputs[place]
            made = np.asarray(beside[place])
            if not any(
                is_same(made[start : start + sample.rows], own, port)
                for start in range(0, sample.rows_of_pass - sample.rows + 1, sample.rows)
            ):
                others = sample.rows_of_pass - sample.rows
                return f"output {port.name!r} of a request beside {others} other rows differs from its output alone"
        return ""
