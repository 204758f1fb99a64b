"""Pipelines in the simulated cluster: which workers hold the parts of one model, and where their batches are.

A batch of any worker passes all parts in order; the parts and the transfers between them are the stations of one line
without room between them (`sloop.profile.pipelines.passed_line`). So the instant at which a batch leaves is known when
it comes. Must not import beliefs, policies or the core.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sloop.profile.pipelines import passed_line
from sloop.vocabulary import ReplicaId

Span = tuple[float, float]
"""From an instant up to another one, in ns."""
ASIDE_SHARE: Final = 0.1
"""The share of a replica's cores that a thread gets which loads layers while batches run. Its niceness is 10, and Linux
divides its weight by 1.25 for each step."""


class RunsBatches(Protocol):
    """Gives the duration of a batch, which depends on what ran before it."""

    def run(self, now_ns: int, busy_ns: int) -> int:
        """How long a batch takes that begins now, and takes `busy_ns` on a busy worker."""
        ...


class RestLoad:
    """The loading of the other layers by a part, from the instant `from_ns` on. It takes `work_ns` if the part computes
    nothing; while the part computes, it goes on at `ASIDE_SHARE` of the speed."""

    __slots__ = ("_busy", "_from_ns", "_work_ns")

    def __init__(self, from_ns: float, work_ns: float) -> None:
        self._from_ns, self._work_ns = from_ns, work_ns
        self._busy: list[Span] = []

    def computes(self, span: Span) -> None:
        """The part computes during this span, which is later than the spans before."""
        self._busy.append(span)

    def stops_computing(self, now_ns: int) -> None:
        """From now on, the part computes nothing."""
        self._busy = [(begin_ns, min(end_ns, now_ns)) for begin_ns, end_ns in self._busy if begin_ns < now_ns]

    def rescale(self, now_ns: int, ratio: float) -> None:
        """From now on, what is left takes `ratio` times as long."""
        at_ns, left_ns = self._from_ns, self._work_ns
        for begin_ns, end_ns in self._busy:
            idle_ns = max(0.0, min(begin_ns, now_ns) - at_ns)
            busy_ns = max(0.0, min(end_ns, now_ns) - max(begin_ns, at_ns))
            left_ns -= idle_ns + busy_ns * ASIDE_SHARE
            at_ns += idle_ns + busy_ns
        self._work_ns = max(0.0, left_ns - max(0.0, now_ns - at_ns)) * ratio
        self._from_ns = max(self._from_ns, now_ns)

    @property
    def end_ns(self) -> int:
        """When it has loaded them, if the part computes nothing more than is known."""
        at_ns, left_ns = self._from_ns, self._work_ns
        for begin_ns, end_ns in self._busy:
            idle_ns = max(0.0, begin_ns - at_ns)
            if left_ns <= idle_ns:
                break
            busy_ns = max(0.0, end_ns - max(begin_ns, at_ns))
            if left_ns <= idle_ns + busy_ns * ASIDE_SHARE:
                return round(at_ns + idle_ns + (left_ns - idle_ns) / ASIDE_SHARE)
            left_ns -= idle_ns + busy_ns * ASIDE_SHARE
            at_ns += idle_ns + busy_ns
        return round(at_ns + left_ns)


class SimulatedPipeline:
    """The workers of one pipeline, and the last batch in it. `has_rests`: whether parts compute with the cores that
    load their other layers."""

    __slots__ = ("_busy", "_rests", "complete", "is_broken", "left_ns", "members", "places")

    def __init__(self, places: int, *, has_rests: bool = False) -> None:
        self.members: dict[ReplicaId, None] = {}
        self.complete: dict[ReplicaId, None] = {}
        """Those that have all layers."""
        self.is_broken = False
        """Whether a member is gone."""
        self.places = places
        """How many parts it has."""
        self.left_ns: list[float] = []
        """When the last batch leaves each station."""
        self._busy: list[list[Span]] = [[] for _ in range(places if has_rests else 0)]
        """By place, when the part computes, as far as it is not over."""
        self._rests: dict[int, RestLoad] = {}
        """By place, how a part loads the other layers."""

    @property
    def is_complete(self) -> bool:
        """Whether all parts have all layers."""
        return self.places == len(self.complete)

    def load_rest(self, place: int, rest: RestLoad) -> None:
        """A part loads the other layers."""
        if self._busy:
            self._rests[place] = rest
            for span in self._busy[place]:
                rest.computes(span)

    def pass_batch(self, now_ns: int, stations_ns: Sequence[float]) -> float:
        """When a batch that comes now leaves the last part, if it takes `stations_ns` in the parts and between them."""
        enters_ns = max(now_ns, self.left_ns[0]) if self.left_ns else float(now_ns)
        self.left_ns = passed_line(now_ns, stations_ns, self.left_ns)
        if self._busy:
            for place, begin_ns in enumerate((enters_ns, *self.left_ns[1::2])):
                span = begin_ns, begin_ns + stations_ns[2 * place]
                self._busy[place] = [*(each for each in self._busy[place] if each[1] > now_ns), span]
                if place in self._rests:
                    self._rests[place].computes(span)
        return self.left_ns[-1]


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
