"""Faults of a simulated world: their kinds, rates and durations.

Each kind of fault is either off or on for the whole run, so that a run tests one kind of fault instead of an average of
all (FoundationDB's buggify). Every kind draws from its own random stream `failure/KIND`, so that turning one on does
not change the times of the others. Recovery is not modelled here.
"""

from dataclasses import dataclass
from random import Random
from typing import Final

from sloop.actions import StartBatch
from sloop.streams import stream
from sloop.units import FOREVER_NS, NS_PER_S, ms

OFF: Final = 0.0


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities per occasion, and mean times between failures in seconds; 0 turns a kind off."""

    crash_mtbf_s: float = OFF
    """A ready replica dies."""
    shadow_mtbf_s: float = OFF
    """A shadow that serves dies."""
    failed_shadow: float = OFF
    """A shadow dies while it loads its blocks."""
    node_mtbf_s: float = OFF
    """A ready node goes down with all its replicas."""
    node_repair_s: float = 5.0
    """How long until it is ready again. A node on demand does not come back: the provider has others."""
    outage_at_s: float = OFF
    """At this time, and then every 2 × `outage_s`, the node with the most replicas goes down for `outage_s`; nobody can
    acquire it meanwhile."""
    outage_s: float = 60.0
    failed_acquire: float = OFF
    """A node that was ordered never comes: the provider has none left."""
    failed_start: float = OFF
    """A replica dies while it starts."""
    slow_start: float = OFF
    """A cold start takes `slow_start_factor` times as long."""
    slow_start_factor: float = 5.0
    refused_resize: float = OFF
    """The machine ignores a resize: the replica keeps its cores."""
    straggler: float = OFF
    """A batch takes `straggler_factor` times as long."""
    straggler_factor: float = 5.0
    background: float = OFF
    """The part of the time in which other work runs on the cores of all nodes, in phases of `background_s` on average.
    Meanwhile batches on cores take `background_factor` times as long, those on accelerators, which need cores before
    and after, `background_device_factor` times."""
    background_s: float = 3.0
    background_factor: float = 2.0
    background_device_factor: float = 1.035
    failed_batch: float = OFF
    """The model raises an error, whatever the requests."""
    bad_request: float = OFF
    """A request makes the model raise at a stage, in every batch that holds it."""
    deadly_request: float = OFF
    """A request kills every replica of a stage that runs it."""
    lost_finished: float = OFF
    """The message that a batch is done never arrives."""
    repeated_finished: float = OFF
    """The message that a batch is done arrives twice."""
    late_finished: float = OFF
    """The message that a batch is done arrives up to `late_finished_ns` late, after later messages."""
    late_finished_ns: int = ms(200)
    stray_wake_rps: float = OFF
    """The core is woken without having requested it."""
    cancelled: float = OFF
    """A client leaves within `cancelled_within_ns` of its request's arrival."""
    cancelled_within_ns: int = ms(200)

    @property
    def touches_batches(self) -> bool:
        """Whether any fault of a batch or of its completion message is on."""
        times = (self.straggler, self.background, self.late_finished)
        return any((*times, self.failed_batch, self.lost_finished, self.repeated_finished)) or self.touches_requests

    @property
    def touches_requests(self) -> bool:
        """Whether some requests make batches fail."""
        return bool(self.bad_request or self.deadly_request)


NO_FAULTS: Final = FaultRates()


class FaultSampler:
    """Draws when faults strike: those of the nodes, or those of one application version."""

    def __init__(self, seed: int, rates: FaultRates = NO_FAULTS) -> None:
        self.rates = rates
        self._seed = seed
        self._streams: dict[str, Random] = {}
        self._background = False, 0
        """Whether other work runs now, and until when."""

    def strikes(self, kind: str, probability: float) -> bool:
        """Whether a fault of this kind happens on this occasion."""
        return probability > 0.0 and self._of(kind).random() < probability

    def strikes_any(self, kind: str, probability: float, order: StartBatch) -> bool:
        """Whether a visit of a batch has this fault. It depends on the request, its part and the stage, not on the
        batch, so that every try gives the same."""
        return probability > 0.0 and any(
            stream(self._seed, f"failure/{kind}/{order.stage}/{request}/{part}").random() < probability
            for request, part in order.visits
        )

    def slowed(self, now_ns: int, *, on_device: bool) -> float:
        """How many times as long a batch takes that begins now, beside other work; times never decrease."""
        rates = self.rates
        if not 0.0 < rates.background < 1.0:
            runs = rates.background > 0.0
        else:
            runs, until_ns = self._background
            while until_ns <= now_ns:
                runs = not runs
                part = rates.background if runs else 1.0 - rates.background
                until_ns += 1 + self.after_ns("background", rates.background_s * part / rates.background)
            self._background = runs, until_ns
        return (rates.background_device_factor if on_device else rates.background_factor) if runs else 1.0

    def within_ns(self, kind: str, span_ns: int) -> int:
        """A delay of at most `span_ns`, uniformly distributed."""
        return round(self._of(kind).random() * span_ns)

    def after_ns(self, kind: str, mean_s: float) -> int:
        """The time until the next fault of this kind, exponentially distributed; `FOREVER_NS` if `mean_s` is 0."""
        if mean_s <= 0.0:
            return FOREVER_NS
        return round(self._of(kind).expovariate(1.0 / mean_s) * NS_PER_S)

    def _of(self, kind: str) -> Random:
        found = self._streams.get(kind)
        if found is None:
            found = self._streams[kind] = stream(self._seed, f"failure/{kind}")
        return found
