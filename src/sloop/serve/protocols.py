"""The interfaces of the deciding process: towards the edges (`PageSource`), the worker processes
(`Backend`) and the planner process (`PlannerInterface`).

An edge handles network protocols but no queues, the driver the core but no HTTP, a backend processes but no requests.
Tests replace each side by a fake. All calls happen in the event loop's thread.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from sloop.actions import Order, RequestSimulation
from sloop.cuda import CudaDevice
from sloop.events import Event, Finished, Planned, Simulated
from sloop.profile.profile import LayerProfile
from sloop.serve.blocks import Block
from sloop.serve.dataflow import StageWiring
from sloop.serve.messages import Ask, CutBlock, RequestEnded, Run, Topic
from sloop.tensor import Padding, Signature, Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import (
    BatchId,
    LayerSet,
    ModelWeights,
    Outcome,
    ReplicaId,
    RequestId,
    WorkerId,
)

if TYPE_CHECKING:  # edges, agents and workers import this module, but not the core
    from sloop.core.views import PlanInput


class RequestResult(Struct, frozen=True, gc=False):
    """How a request ended, with its outputs by name if it was served or late.

    Large outputs are views of shared memory, which stays valid as long as one of the views exists. Do not keep them
    longer than the answer needs.
    """

    outcome: Outcome
    outputs: Mapping[str, Tensor] = {}  # msgspec creates a new dict for each instance
    why: str = ""
    retry_after_ns: int = 0
    """For a rejected request: how long the client should wait before it tries again."""
    version: str = "1"
    """The version of the application that served it, or would have."""
    is_refused: bool = False
    """Rejected by a model, because of what the client sent: `why` is for the client, who need not try again."""


class ModelState(StrEnum):
    """What a version of a model does now."""

    READY = "ready"
    RESTING = "resting"
    """It has no replicas because it had no requests; the next request starts one."""
    WAKING = "waking"
    """Replicas start after a rest; requests that come meanwhile wait for them."""
    STARTING = "starting"
    """It has no ready replica at some stage."""
    FAILING = "failing"
    """It has no ready replica at some stage: they do not start or do not last; the server goes on trying."""
    WAITING = "waiting"
    """It needs replicas but gets none, because other models need all cores."""
    STOPPING = "stopping"
    """The server shuts down, or has failed."""


class Readiness(Struct, frozen=True):
    """Whether a model answers requests, and why not."""

    state: ModelState
    why: str = ""
    """Empty if it is ready, rests or wakes."""

    @property
    def is_ready(self) -> bool:
        """Whether the model serves, or would after a start."""
        return not self.why


class ServerReadiness(Struct, frozen=True, omit_defaults=True):
    """Whether the server is ready for requests: it serves what can be served, as far as that is known."""

    why: str = ""
    """Why it is not; empty if it is."""
    models: dict[str, Readiness] = {}
    """By name, the models that do not answer requests."""


PageSource = Callable[[Ask[Topic], Callable[[bytes], None]], None]
"""Calls back once with the answer to a question about the run, possibly before it returns: `Insight.ask`."""


class VariantJoining(Struct, frozen=True):
    """Whether requests for one variant of a stage may share a forward pass."""

    stage: str
    """As the application's file calls it."""
    variant: str
    obstacle: str
    """Why they may not; empty if they may."""
    evidence: str
    """Why they may; empty if they may not."""


class CutModel(Struct, frozen=True):
    """A model in blocks, whose replicas can have shadows."""

    blocks: tuple[CutBlock, ...]
    layers: dict[str, LayerProfile]
    """What the blocks take, by kind of hardware."""
    batch_max: int
    """The most rows that a batch shares with a shadow."""
    for_shadows: bool = True
    """Whether every replica loads the blocks, so that it can have a shadow; otherwise only parts of pipelines do."""


class ExaminedFile(Struct, frozen=True, array_like=True):
    """A file of a model where the user has it, as it was when it was examined."""

    path: str
    state: str
    """Size, times and inode: it changes when the file is written. The digest then says whether its content differs."""
    sha256: str
    """Empty if there was no such file."""


class Servable(Struct, frozen=True):
    """The model of one variant, and its inputs and outputs in the model's own order."""

    model: str
    """Path of the file that is opened, ONNX or Python, or `fake:…` (see `sloop.serve.runtimes`). It is a private copy
    of the variant's file (`sloop.serve.copies`), or one that was changed (`sloop.profile.examine`)."""
    signature: Signature
    obstacle: str = ""
    """Why requests cannot share a forward pass; empty if it is proven or declared that they can."""
    labels: Mapping[str, tuple[str, ...]] = {}  # msgspec creates a new dict for each instance
    """The classes of the columns of an output, where the model says them."""
    notes: tuple[str, ...] = ()
    """What a user should know about this model before it serves."""
    source: str = ""
    """The URL that the variant's file was fetched from, with its checksum; empty if it was not."""
    weights: tuple[ModelWeights, ...] = ()
    """What the core calls its files: one for each size that profiles give them."""
    cut: CutModel | None = None
    """Its blocks, if the system attaches shadows or starts parts of models."""
    changes: tuple[str, ...] = ()
    """If it is a copy that was prepared: how another machine makes it from the variant's file."""
    device_bytes: Mapping[str, int] = {}
    """What a replica may allocate on its GPU, by kind of hardware, as its profiles say."""
    batch_max: Mapping[str, int] = {}
    """The most rows of one forward pass, by kind of hardware, as its profiles say; no bound where there is none."""
    operators: tuple[str, ...] = ()
    """Libraries of operators that it needs (`sloop.profile.operators`)."""
    original: str = ""
    """The file that the user has named."""
    digest: str = ""
    """The digest of all its files (`sloop.serve.copies`), as they were examined; what is opened has the same."""
    files: tuple[ExaminedFile, ...] = ()
    """The user's files that it was made from."""
    batches: tuple[int, ...] = (1,)
    """The sizes of batches that a worker is to run before it is ready, ascending."""
    shapes: Mapping[str, tuple[int, ...]] = {}
    """For inputs with open dimensions, the shape of one row that the profile was measured with; empty if unknown."""
    evidence: str = ""
    """Why requests can share a forward pass."""
    verify_first: int = 0
    verify_share: float = 0.0
    """How many of the first requests that share a forward pass are run again, alone, and which share of the others
    (`sloop.serve.verify`)."""
    memory_bytes: Mapping[str, int] = {}
    """What plans count for a worker, by kind of hardware, as its profiles say."""
    worker_bytes: int = 0
    """What the user says that a worker may take; 0: nothing is said."""
    padding: Padding | None = None
    """How requests of different lengths share a forward pass; None: only those of equal shapes do."""

    @property
    def is_batchable(self) -> bool:
        """Whether requests may share a forward pass."""
        return not self.obstacle and self.signature.has_rows

    @property
    def checked(self) -> str:
        """The digest to compare each time that the user's own file is opened; empty if a copy is opened."""
        return self.digest if self.model == self.original and not self.source else ""

    def batches_on(self, hardware: str) -> tuple[int, ...]:
        """Of `batches`, those that are not too large there; at least the smallest."""
        most = self.batch_max.get(hardware, 0)
        return tuple(rows for rows in self.batches if not most or rows <= most) or self.batches[:1]


class StageSetup(Struct, frozen=True, array_like=True, tag=True):
    """What a worker serves."""

    worker: WorkerId
    wiring: StageWiring
    servable: Servable
    """Its model. `digest` is the one to compare each time that the model is opened, if it is a user's own file, which
    may change. `cut` has the blocks that the worker loads, so that it can have a shadow or begin with a part; None if
    it loads the file as a whole. `source` is empty, because it may contain a password, and a model's code may be
    anybody's."""
    hardware: str
    """The kind of its cores or its accelerator."""
    threads: int = 1
    prepared: int = 0
    """Sessions for 1 to so many threads are opened in the background."""
    holders: dict[int, int] = {}  # msgspec creates a new dict for each instance
    """The processes that hold the arenas it reads: their ids by number (`sloop.shared_memory.Arenas`)."""
    layers: LayerSet | None = None
    """The blocks with which it begins as a part of a pipeline; None for all."""
    device: CudaDevice | None = None
    """The GPU that the worker was started with, if any (`sloop.cuda.environment_on`)."""


class SpareProcesses(Struct, frozen=True, array_like=True, tag=True):
    """The workers of a machine that wait for a model, and their memory."""

    count: int = 0
    memory_bytes: int = 0


class EdgeClient(Protocol):
    """An edge, as the driver sees it."""

    requests: dict[int, RequestId]
    """Its open requests by the numbers that it gave them. The driver adds them, the edge removes them."""

    def on_end(self, ended: RequestEnded) -> None:
        """A request of this edge has ended. The edge frees the blocks of the answer."""
        ...


class BackendListener(Protocol):
    """Receives a backend's reports."""

    def on_event(self, event: Event) -> None:
        """An event that carries no tensors."""
        ...

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        """A batch has finished. `blocks` has the outputs of each visit; `faults` says, by position, why a visit without
        them failed."""
        ...

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        """The model raised on a batch, or returned what it must not."""
        ...


OnDifference = Callable[[ReplicaId, str, str, str], None]
"""Called when a request that shared a forward pass of a replica got something else than alone: the replica, its stage
and variant, and what differs."""


class Backend(Protocol):
    """Acquires nodes, and starts, runs, resizes and stops replicas on them. It takes no decisions and reports each
    order's result exactly once.

    A backend may report from inside a call.
    """

    on_difference: OnDifference

    def attach(self, listener: BackendListener) -> None:
        """Set the receiver of reports. Called once, before any other method."""
        ...

    async def open(self) -> None:
        """Have all nodes that are always there. Raises `MachineError` if one is missing."""
        ...

    def learn(
        self,
        servables: Mapping[tuple[str, str], "Servable"],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None:
        """Know the models, by stage and variant, and the stages of one more application version. Each worker prepares
        to run on 1 to `threads_prepared` threads."""
        ...

    def run_alone(self, stage: str, variant: str, why: str) -> None:
        """From now on, also in later servers, requests for a variant share no forward pass."""
        ...

    def order(self, order: Order) -> None:
        """Carry out what the core orders (`sloop.actions` says what each order means, and how it is answered).

        The end of a worker (`WorkerLost`, `WorkerStopped`) answers every order about it that is not answered yet, and
        that of a replica those about its shadow. One that is stopped while it runs a batch is killed, but a shadow
        finishes its part of the batch."""
        ...

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        """Run a batch, whose blocks it reads until it reports `on_finished`, `on_failed` or `WorkerLost`."""
        ...

    async def close(self) -> None:
        """Stop all replicas without reporting, and release everything."""
        ...

    def spare_processes(self) -> Mapping[str, SpareProcesses]:
        """The workers that wait for a model, by machine."""
        ...

    def forget(self, stages: Iterable[str]) -> None:
        """The version of an application with these stages has ended; nothing of it will be started again."""
        ...


class PlannerInterface(Protocol):
    """Makes plans beside the event loop; `sloop.serve.planner.PlannerProcess`. Whoever creates it tells it which
    application versions there are."""

    def attach(self, report: Callable[[Planned], None]) -> None:
        """Set the receiver of reports. Called once, before any other method."""
        ...

    def request(self, given: "PlanInput") -> None:
        """Make the plans of `given`. Reports one `Planned` with its number, possibly before this call returns."""
        ...

    def traffic_changed(self, key: str) -> None:
        """The past traffic of an application version has changed, because other versions have begun or ended."""
        ...

    def change_system(self, key: str) -> None:
        """Another system decides for an application version from now on. Whoever ordered it has told which."""
        ...

    def discard(self, key: str) -> None:
        """An application version has ended."""
        ...

    async def close(self) -> None:
        """End without a further report."""
        ...


class SimulationPort(Protocol):
    """Simulates for systems that ask; `sloop.serve.simulations.SimulationProcesses`."""

    def request(self, asked: RequestSimulation, report: Callable[[Simulated], None]) -> None:
        """Simulate, and report the answer later, in the event loop; also that there is none."""
        ...
