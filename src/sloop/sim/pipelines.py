"""Pipelines in the simulated cluster: which workers hold the parts of one model, and where their batches are.

A batch of any worker passes all parts in order; the parts and the transfers between them are the stations of one line
without room between them (`sloop.profile.pipelines.passed_line`). So the instant at which a batch leaves is known when
it comes. Must not import beliefs, policies or the core.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from sloop.profile.pipelines import passed_line
from sloop.vocabulary import ReplicaId


class RunsBatches(Protocol):
    """What changes how long a batch takes for what ran before it."""

    def run(self, now_ns: int, busy_ns: int) -> int:
        """How long a batch takes that begins now, and takes `busy_ns` on a busy worker."""
        ...


class SimulatedPipeline:
    """The workers of one pipeline, and the last batch in it."""

    __slots__ = ("_computed_ns", "complete", "is_broken", "left_ns", "members", "places")

    def __init__(self) -> None:
        self.members: dict[ReplicaId, None] = {}
        self.complete: dict[ReplicaId, None] = {}
        """Those that have all layers."""
        self.is_broken = False
        """Whether a member is gone."""
        self.places = 0
        """How many parts it has."""
        self.left_ns: list[float] = []
        """When the last batch leaves each station."""
        self._computed_ns: list[float] = []
        """By place, how long it computes for the batches that came since somebody asked."""

    @property
    def is_complete(self) -> bool:
        """Whether all parts have all layers."""
        return self.places == len(self.complete)

    def pass_batch(self, now_ns: int, stations_ns: Sequence[float]) -> float:
        """When a batch that comes now leaves the last part, if it takes `stations_ns` in the parts and between them."""
        self.left_ns = passed_line(now_ns, stations_ns, self.left_ns)
        known = self._computed_ns or [0.0] * self.places
        self._computed_ns = [before + own for before, own in zip(known, stations_ns[::2], strict=True)]
        return self.left_ns[-1]

    def take_computed_ns(self, place: int) -> float:
        """How long this part computes, in nanoseconds, for the batches that came since the last call for it."""
        if not self._computed_ns:
            return 0.0
        computed_ns, self._computed_ns[place] = self._computed_ns[place], 0.0
        return computed_ns


class PipelinePart:
    """A worker of a pipeline. `stations` gives the durations of all stations for the batch that it begins."""

    __slots__ = ("_pipeline", "_stations")

    def __init__(self, pipeline: SimulatedPipeline, stations: Callable[[int], list[float]]) -> None:
        self._pipeline, self._stations = pipeline, stations

    def run(self, now_ns: int, busy_ns: int) -> int:
        """Pass a batch through the pipeline; it would take `busy_ns` on the whole model."""
        return max(1, round(self._pipeline.pass_batch(now_ns, self._stations(busy_ns))) - now_ns)


class FormerPart:
    """A worker whose pipeline is complete: its batches begin when those in the pipeline have left it."""

    __slots__ = ("_after_ns", "_own")

    def __init__(self, after_ns: int, own: RunsBatches | None) -> None:
        self._after_ns, self._own = after_ns, own

    def run(self, now_ns: int, busy_ns: int) -> int:
        """Run a batch alone."""
        waits_ns = max(0, self._after_ns - now_ns)
        return waits_ns + (busy_ns if self._own is None else self._own.run(now_ns + waits_ns, busy_ns))
