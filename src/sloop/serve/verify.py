"""Runs requests that shared a forward pass again, alone, while their worker has nothing else to do.

Examinations prove that rows are independent (`sloop.profile.joining`), or an author says so. This looks at real
requests: it keeps copies of the inputs and outputs of some of them, and compares when the worker idles. A difference
that is larger than the type's tolerance, and that the request does not show beside copies of itself either, comes from
its neighbours.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sloop.profile.joining import is_same
from sloop.profile.model import NOTHING
from sloop.tensor import Port

SAMPLES_MAX: Final = 8
SAMPLES_BYTES_MAX: Final = 2**24
"""Bounds of what waits to be compared; further requests are left out."""

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Sequence[Array]], Sequence[Array]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request that shared a pass: its inputs and outputs, and where its rows lay among how many."""

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

    def note(self, rows: Sequence[int], inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """A pass was shared by requests of so many rows each. All arrays have the rows of all of them, except `NOTHING`
        in place of outputs that none of them needs."""
        start = 0
        for own in rows:
            self._due += self._share
            if self._left or self._due >= 1:
                self._keep(inputs, outputs, start, own, sum(rows))
            start += own

    def _keep(
        self, inputs: Sequence[Array], outputs: Sequence[Array], start: int, rows: int, rows_of_pass: int
    ) -> None:
        own = [array if array is NOTHING else array[start : start + rows] for array in (*inputs, *outputs)]
        size = sum(array.nbytes for array in own)
        if len(self._samples) >= SAMPLES_MAX or self._bytes + size > SAMPLES_BYTES_MAX:
            return
        copies = [array if array is NOTHING else array.copy() for array in own]
        self._samples.append(_Sample(copies[: len(inputs)], copies[len(inputs) :], start, rows, rows_of_pass))
        self._bytes += size
        self._left = max(0, self._left - 1)
        self._due = max(0.0, self._due - 1)

    def check(self, run: Run) -> str:
        """Compare the request that waits longest. Returns what differs; empty if nothing does. Raises what the model
        raises."""
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
        # The same kernels run on as many rows, so that what is left comes from the values of its neighbours.
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
                return f"output {port.name!r} of a request beside {others} other rows differs from that of it alone"
        return ""
