"""A simulated replica: its speed, its start, the end of its batch."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from sloop.events import BatchFailed, Finished
from sloop.sim.pipelines import RestLoad, RunsBatches, SimulatedPipeline
from sloop.sim.truth.branches import BranchSampler
from sloop.sim.truth.cold_start import ColdStartSampler, ResizeSampler
from sloop.sim.truth.failure import FaultSampler
from sloop.sim.truth.service import ServiceSampler, Speed
from sloop.sim.truth.sharing import SharingTruth
from sloop.vocabulary import BatchId, ReplicaSpec, Worker, WorkerId


class Truths(Struct, frozen=True):
    """The truth of one application version; every random stream is at its start."""

    service: ServiceSampler
    cold_start: ColdStartSampler
    resize: ResizeSampler
    faults: FaultSampler
    branches: BranchSampler | None = None
    sharing: SharingTruth | None = None
    """None in a world where batches do not disturb each other."""
    pads: Mapping[str, bool] = {}  # msgspec copies the empty dict for each instance
    """By stage whose rows differ in size, whether it pads them."""
    passed: Mapping[str, tuple[bool, ...]] = {}
    """By stage, for each outgoing edge whether rows go along it that are as large as those of the request; without the
    stages that pass on no such rows."""


class LocalStart(Struct, frozen=True):
    """What is left of a replica's start once its weights are on its node."""

    length_ns: int
    crash_ns: int | None = None
    """When its process dies before it is ready, from here on; None if it does not."""
    saved_ns: int = 0
    """The start of the process, which a spare worker saves."""


class RowsOfBatch(Struct, frozen=True, gc=False):
    """The rows of a batch."""

    rows: int
    size: int = 0
    """To which they are padded, that of the largest; 0 if all rows of the model are equally large, or if the size is
    not known."""
    elements: int = 0
    """The sum of their sizes, where rows are padded; elsewhere 0."""
    bound: int = 0
    """The class of their size, named by its upper bound; 0 as for `size`."""


ONE_ROW: Final = 1, 0
"""The rows of an ordinary request, and their size."""


class SimulatedShadow:
    """A shadow from its order until it has stopped or is lost."""

    __slots__ = ("alone", "body", "id", "is_ready", "is_stopping", "pending", "shadow")

    def __init__(self, id: WorkerId, body: "SimulatedReplica", shadow: Worker) -> None:
        self.id, self.body, self.shadow = id, body, shadow
        self.is_ready = False
        """Whether batches use it; not any more when it was told to stop."""
        self.is_stopping = False
        self.pending = -1
        """The sequence number of the event that it is ready or, when it was told to stop, has stopped; -1 for none."""
        self.alone: BatchId | None = None
        """The batch that ran when it became ready, which does not use it."""

    def is_used(self, now_ns: int) -> bool:
        """Whether it computes for the running batch."""
        end = self.body.batch_end
        return self.is_ready and end is not None and end[0] > now_ns and end[2].batch != self.alone


class EndsLater(Struct):
    """A batch that runs on a shared device, and what is told when it is over."""

    began_ns: int
    batch: BatchId
    finished: Finished | None
    """None if nobody is told."""
    late_ns: int = 0
    """How much later."""
    again_ns: int | None = None
    """How much later still it is told again; None if it is not."""


class SimulatedReplica:
    """A worker process: its spec, its speed, and the end of its batch."""

    __slots__ = (
        "batch_end",
        "branches",
        "device",
        "ends",
        "has_files",
        "part",
        "pipeline",
        "quota",
        "resized_ns",
        "rest",
        "rest_load",
        "shadow",
        "sharing",
        "size",
        "slot",
        "spec",
        "speed",
        "start",
        "truths",
        "work",
    )

    def __init__(self, spec: ReplicaSpec, truths: Truths) -> None:
        self.spec = spec
        self.slot = spec.slot
        """In effect."""
        self.truths = truths
        self.branches = truths.branches or None
        self.speed: Speed = truths.service.speed(spec.stage, spec.variant, spec.slot)
        """Speed on the slot in effect."""
        self.quota: RunsBatches | None = truths.service.quota(spec.stage, spec.variant, spec.slot)
        """CPU quota on the slot in effect, or the pipeline that it is a part of; None if neither has an effect on
        durations."""
        self.batch_end: tuple[int, int, Finished | BatchFailed] | None = None
        """The pending end of the running batch, which has `size` requests; None if that message will be lost."""
        self.size = 0
        self.work: RowsOfBatch | None = None
        """The rows of the running batch, if it may have others than one of the only size for each request."""
        self.resized_ns = 0
        """When the last ordered resize takes effect; later ones must not overtake it."""
        self.start: LocalStart | None = None
        """What follows when its weights have been fetched; None if it waits for none."""
        self.shadow: SimulatedShadow | None = None
        known = truths.sharing
        self.sharing = known.of(spec) if known is not None else None
        """How its batches disturb others and are disturbed; None if they are not."""
        self.device = spec.node or "", spec.device or ""
        """Where they run."""
        self.ends: EndsLater | None = None
        """If `sharing`, the running batch."""
        self.part: Worker | None = None
        """The layers that it has; None if it has all."""
        self.pipeline: SimulatedPipeline | None = None
        """In which it serves, or will."""
        self.rest: LocalStart | None = None
        """How it loads the other layers, if it has some only."""
        self.rest_load: RestLoad | None = None
        """How far it is with that."""
        self.has_files = False
        """Whether the files of all layers are on its node from the start."""

    def passes_of(self, rows: int) -> list[int]:
        """The rows of the forward passes in which a batch of so many runs, one after the other."""
        most = len(self.speed.means_ns) - 1
        whole, rest = divmod(rows, most)
        return [most] * whole + [rest] * (rest > 0)

    def service_ns(self, work: RowsOfBatch) -> int:
        """How long a batch of these rows takes while the replica is busy."""
        speed, service, passes = self.speed, self.truths.service, self.passes_of(work.rows)
        key, total_ns = (self.spec.stage, self.spec.variant, self.slot), 0.0
        self.size = passes[0]
        for rows in passes:
            own_ns = service.recorded_ns(*key, work.bound, rows)
            if own_ns is None:
                own_ns = speed.means_ns[rows] * next(speed.noises[rows]) * service.size_factor(*key, work.size, rows)
            total_ns += own_ns
        return round(total_ns)

    def update_speed(self) -> None:
        """Its slot has changed, or it serves with its shadow, or not any more."""
        service, spec = self.truths.service, self.spec
        if self.shadow is not None and self.shadow.is_ready:
            self.speed = service.pair_speed(spec.stage, spec.variant, self.slot, self.shadow.shadow)
        else:
            self.speed = service.speed(spec.stage, spec.variant, self.slot)
