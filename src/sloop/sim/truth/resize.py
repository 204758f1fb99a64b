"""Resize: when a change of a running replica's cores takes effect.

The quota is in force within some tens of milliseconds (sponge specification, §3.1: below 100 ms, simulated as 50 ms).
What becomes of the batch in flight is a choice (§2.6): with `next_batch` it keeps its speed, because the model's thread
count changes between batches only; with `rescale` its remaining work runs at the new speed.
"""

from typing import Literal

from sloop.sim.truth.noise import factors
from sloop.streams import stream

InFlight = Literal["next_batch", "rescale"]


class Resize:
    """The world's resize delays, drawn from stream `resize`."""

    def __init__(self, seed: int, *, delay_ns: int = 0, cv: float = 0.0, in_flight: InFlight = "next_batch") -> None:
        self._delay_ns = delay_ns
        self._factors = factors("normal", cv, stream(seed, "resize"))
        self.rescales = in_flight == "rescale"

    def draw_ns(self) -> int:
        """How long the next resize takes to be in force."""
        return round(self._delay_ns * next(self._factors))
