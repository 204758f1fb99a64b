"""What the fold keeps of replicas: those that run, their batches, their devices, their pipelines."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from sloop.actions import StartBatch, StartWorker
from sloop.runlog.samples import Samples, new_samples
from sloop.vocabulary import ALONE, Life, ReplicaId, ReplicaSpec, Shape, Slot, Worker, WorkerId

COLD_START: Final = "total"
"""The step name of a whole cold start, from the order to ready."""


@dataclass(slots=True)
class BatchGroup:
    """Batches of one variant on equal slots in the same shape."""

    key: tuple[str, str]
    """Stage and variant."""
    slot: Slot
    shape: Shape = ALONE
    sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """How many batches of so many rows were started."""
    durations_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(new_samples))
    """By rows, the durations of finished batches from order to answer, in ns."""
    resized_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(new_samples))
    """The same for batches that were set apart: the replica was resized, or changed its shape, meanwhile, so they ran
    on more than one core count, or with a shadow in part."""
    service_ns: "Samples[int]" = field(default_factory=new_samples)
    """Forward-pass times measured by the replicas, in ns; recorded, like what follows, only with `Kept.service`."""
    passes: int = 0
    """Forward passes of finished batches."""
    elements: int = 0
    padded: int = 0
    """Where rows are padded: the elements of the rows of finished batches, and those that padding has added."""
    visits: int = 0
    visits_ns: int = 0
    """Visits in finished batches, and the sum over these of what their batch took."""

    @property
    def cores(self) -> float:
        return self.slot.cores

    @property
    def hardware(self) -> str:
        return self.slot.hardware

    @property
    def variant_key(self) -> tuple[str, str, str]:
        """Stage, variant and kind of hardware: what a belief or a profile is of."""
        return (*self.key, self.slot.hardware)


DeviceName = tuple[str, str, str]
"""A kind of hardware, a node of it, and an accelerator of the node, "" for its cores."""


@dataclass(slots=True)
class DeviceUse:
    """For how long at least one batch has run on an accelerator, or on cores that replicas share without a cap."""

    running: int = 0
    since_ns: int = 0
    """Since when, if any runs."""
    ended_ns: int = 0
    """Before that."""

    def begin(self, now_ns: int) -> None:
        """A batch begins."""
        if not self.running:
            self.since_ns = now_ns
        self.running += 1

    def end(self, now_ns: int) -> None:
        """A batch is over."""
        self.running -= 1
        if not self.running:
            self.ended_ns += now_ns - self.since_ns

    def busy_ns(self, now_ns: int) -> int:
        """Until now."""
        return self.ended_ns + (now_ns - self.since_ns if self.running else 0)


@dataclass(slots=True)
class ReplicaRecord:
    """A replica between the order to start it and its end."""

    id: ReplicaId
    spec: ReplicaSpec
    group: BatchGroup
    """The batch group of its variant on its current slot, in its current shape."""
    cores: float
    """In effect."""
    wanted_cores: float
    """Cores as last ordered."""
    order_ns: int
    """When it was ordered; -1 if an earlier server did that."""
    since_ns: int
    """When it entered its `life`."""
    life: Life = Life.STARTING
    step: str = ""
    """The current step of its cold start; empty before the first step and after the replica is ready."""
    step_ns: int = 0
    """When it entered the step."""
    resize_ns: int = 0
    """When the pending resize was ordered; 0 if none is pending."""
    running: StartBatch | None = None
    running_ns: int = 0
    """When its batch was started."""
    rows: int = 0
    """How many rows the batch has."""
    batches: int = 0
    """Started."""
    shadow: StartWorker | None = None
    """The order of the shadow that it has. The replica serves alone until that is ready, and when it was told to
    stop."""
    part: Worker | None = None
    """The layers that it has, if it has not all."""
    pipeline: WorkerId | None = None
    """The pipeline that serves or starts with it, also when it has all layers."""
    has_started: bool = False
    """Whether it has these, and waits for the other parts of its pipeline."""
    has_served: bool = False
    """Whether it was ready once: its cold start was over then, also if it waits for other layers now."""
    use: DeviceUse | None = None
    """Of the device that it may share with others; None for one with cores of its own."""

    def all_cores(self, cores: float) -> float:
        """These cores with those of its shadow."""
        return cores + (sum(worker.cores for worker in self.shadow.spec.shape) if self.shadow is not None else 0.0)


class PipelineAccount:
    """Pipelines: replicas that start as parts of one model, serve together, and get the other layers meanwhile."""

    def __init__(self) -> None:
        self.open: dict[WorkerId, dict[ReplicaId, ReplicaRecord]] = {}
        """The parts of each pipeline that serves, or starts."""
        self.parts = 0
        """Replicas that have started as parts."""
        self.lost = 0
        """Pipelines that were lost with a part before all had all layers."""
        self.completion_ns: defaultdict[tuple[str, str], Samples[int]] = defaultdict(new_samples)
        """By stage and variant, the time in ns from the order of a part until it had all layers."""
        self.count = 0
        """Pipelines that have started."""
        self.unanswered: dict[WorkerId, int] = {}
        """When the parts were ordered of those that have not answered yet."""
        self.answer_ns: Samples[int] = new_samples()
        """Times in ns from that order until a batch had passed all parts."""


@dataclass(slots=True)
class ShadowAccount:
    """What became of shadows."""

    count: int = 0
    """How many were ordered."""
    lost: int = 0
    """How many of them died."""
    bodies: dict[WorkerId, ReplicaRecord] = field(default_factory=dict)
    """By the number of each that is there, its replica."""
