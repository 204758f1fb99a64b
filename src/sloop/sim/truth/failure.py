"""Failure: what breaks in a world, how often and for how long.

`Faults` are the rates and probabilities of one world, its personality: each kind of fault is either off or on for the
whole run, so that a run explores one kind of trouble instead of averaging all of them (FoundationDB's buggify). Every
kind draws from its own stream `failure/KIND`, so that turning one on does not move the others.
Must not know how anything recovers.
"""

from dataclasses import dataclass
from random import Random

from sloop.streams import stream
from sloop.units import FOREVER_NS, NS_PER_S, ms

NEVER = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per occasion, mean times between failures in seconds; 0 is never."""

    crash_mtbf_s: float = NEVER
    """A ready replica dies."""
    node_mtbf_s: float = NEVER
    """A node goes down with all that runs on it."""
    node_repair_s: float = 5.0
    failed_start: float = NEVER
    """A replica dies while it starts."""
    slow_start: float = NEVER
    """A start takes `slow_start_factor` times as long."""
    slow_start_factor: float = 5.0
    refused_resize: float = NEVER
    """The machine leaves a replica as many cores as it has, whatever was asked."""
    straggler: float = NEVER
    """A batch takes `straggler_factor` times as long."""
    straggler_factor: float = 5.0
    failed_batch: float = NEVER
    """The model raises."""
    lost_finished: float = NEVER
    """The news that a batch is done never arrives."""
    repeated_finished: float = NEVER
    """That news arrives twice."""
    late_finished: float = NEVER
    """That news takes up to `late_finished_ns` to arrive, and others overtake it."""
    late_finished_ns: int = ms(200)
    stray_wake_rps: float = NEVER
    """The core is woken without having asked."""
    cancelled: float = NEVER
    """A client goes away within `cancelled_within_ns` of its request's arrival."""
    cancelled_within_ns: int = ms(200)

    @property
    def touches_batches(self) -> bool:
        """Whether any fault concerns a batch or the news of its end."""
        kinds = (self.straggler, self.failed_batch, self.lost_finished, self.repeated_finished, self.late_finished)
        return any(kinds)


NO_FAULTS = Faults()


class Failure:
    """Draws the occasions of a world's faults."""

    def __init__(self, seed: int, faults: Faults = NO_FAULTS) -> None:
        self.faults = faults
        self._seed = seed
        self._streams: dict[str, Random] = {}

    def strikes(self, kind: str, probability: float) -> bool:
        """Whether a fault of this kind happens on this occasion."""
        return probability > 0.0 and self._of(kind).random() < probability

    def within_ns(self, kind: str, span_ns: int) -> int:
        """An instant within a span, all equally likely."""
        return round(self._of(kind).random() * span_ns)

    def after_ns(self, kind: str, mean_s: float) -> int:
        """How long until the next failure of this kind; for ever where `mean_s` is 0."""
        if mean_s <= 0.0:
            return FOREVER_NS
        return round(self._of(kind).expovariate(1.0 / mean_s) * NS_PER_S)

    def _of(self, kind: str) -> Random:
        found = self._streams.get(kind)
        if found is None:
            found = self._streams[kind] = stream(self._seed, f"failure/{kind}")
        return found
