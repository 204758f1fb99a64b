"""What the deciding process, its workers and its edges tell each other, inside frames (`sloop.serve.transport`).

Messages are msgpack arrays: measured on a frame of 32 requests, a record takes 0.2 to 0.3 µs to encode and as long to
decode, twice that of `struct` for numbers alone, but names, blocks and unions need no code here.
"""

from enum import StrEnum
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct, structs

from sloop.actions import Piece
from sloop.app.limits import Limits
from sloop.events import Draining, Finished, WorkerLost, WorkerReady
from sloop.serve.blocks import Block
from sloop.serve.dataflow import Assembly, GivenBlocks
from sloop.shared_memory import Address
from sloop.tensor import Port, Signature
from sloop.vocabulary import BatchId, Outcome, ReplicaId, WorkerId

T = TypeVar("T")

encode: Final = msgspec.msgpack.Encoder().encode


class Report(Struct, Generic[T], frozen=True, array_like=True, tag=True, gc=False):
    """An event of the core, as it is."""

    event: T


# Questions: from edges to the deciding process, and from that to the planner


class Topic(StrEnum):
    """What an edge's question is about. Most answers are JSON."""

    READY = "ready"
    """Whether the server is ready: a `ServerReadiness`."""
    MODELS = "models"
    """The `Readiness` of each model by name, empty for a model, or a version of it, that neither serves nor starts.
    Without a version, the state is that of the version with most of the model's requests."""
    METRICS = "metrics"
    """The metrics in Prometheus' text format."""
    STATE = "state"
    """The state page."""
    DECISIONS = "decisions"
    """The latest decisions."""
    STATISTICS = "statistics"
    """Triton's statistics."""
    INDEX = "index"
    """Triton's index of the model repository: the models that serve, and the files that could be loaded."""
    LOAD = "load"
    UNLOAD = "unload"
    """Load a model from the repository, or end one. The answer comes when it serves or has ended: empty, or the fields
    of a `sloop.serve.edge.refusal.Refusal`."""


class Ask(Struct, Generic[T], frozen=True, array_like=True, tag=True, gc=False):
    """A question, see `sloop.serve.protocols.PageSource`: about all models, or one, or one version of it."""

    about: T
    """What whoever is asked can answer about: see `FromEdge` and `sloop.serve.planner.ToPlanner`."""
    model: str = ""
    version: str = ""
    limit: int = 0
    """At most so many decisions."""
    number: int = 0
    """Chosen by who asks, for the answer."""


class Page(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The answer to a question."""

    number: int
    body: bytes


# Between a node and its workers; some also between the deciding process and an agent, whose node passes them on


class CutBlock(Struct, frozen=True, array_like=True):
    """One block of a model that was cut (`sloop.profile.onnx_cut.ModelPiece`)."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    crossing: tuple[str, ...]
    """All tensors that cross its end; for the last block, the outputs of the model."""
    source: str = ""
    """Its file on the machine that has cut the model, with its checksum, as a `ModelSource`. Other machines fetch it
    from there, or from each other. Empty if no other machine needs it."""
    weights_sha256: str = ""
    """Of the file beside it with its weights (`sloop.profile.onnx_cut.data_file`); empty if it has none."""


class ShadowSetup(Struct, frozen=True, array_like=True, tag=True):
    """Which blocks a shadow holds, and of which body."""

    stage: str
    blocks: dict[int, CutBlock]
    """By their position in the model."""
    body: int
    """The process id of its body."""
    threads: int = 1


class PairSetup(Struct, frozen=True, array_like=True, tag=True):
    """A shadow that a body is to use, and for which batches."""

    shadow: WorkerId
    address: bytes = b""
    """Of its socket; empty if the body is to use it no longer."""
    process: int = 0
    """Its process id."""
    blocks: tuple[int, ...] = ()
    """Those that it holds, ascending."""
    rows: tuple[int, ...] = ()
    """How many rows it computes, by rows of the batch from 0; 0 if the body alone is faster, and for larger batches."""
    patience_ms: tuple[float, ...] = ()
    """How long it may take for its rows of a batch before it counts as hanging."""


class Run(Struct, frozen=True, array_like=True, gc=False):
    """A batch: what a worker needs to assemble the inputs of each visit."""

    visits: int
    blocks: list[GivenBlocks]
    """For each visit one entry per need of the stage, one visit after the other."""
    parts: tuple[int, ...] = ()
    """The part of each visit, at a stage that runs once for each part."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """For each visit the places of the outputs that it needs, () for all that the stage's wiring needs; empty if every
    visit needs these."""
    pieces: tuple[Piece | None, ...] = ()
    """For each visit the piece to run; None for a visit that is not split. Empty if none is split."""


class RunBatch(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Run a batch."""

    batch: BatchId
    replica: ReplicaId
    order: Run
    is_part: bool = False
    """Whether the replica runs only the layers of its part, the first one. The last part answers."""
    sent_ns: int = 0
    """When it was sent to the worker (`time.monotonic_ns`)."""


class Threads(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Use so many threads and this duty cycle from the next batch on."""

    threads: int
    duty: float


class CompleteWorker(Struct, frozen=True, array_like=True, tag=True):
    """Load the other layers of a part of a model, which are there, while it serves."""

    replica: ReplicaId
    files: dict[int, str] = {}  # msgspec creates a new dict for each instance
    """To the worker: the files of those layers that came after it started, by their positions."""


class ConnectParts(Struct, frozen=True, array_like=True, tag=True):
    """Batches pass from a part of a model to the next one. To both parts: the socket that follows leads there. Between
    their agents: over this connection."""

    before: ReplicaId
    after: ReplicaId
    endpoint: tuple[str, int] | None = None
    """The agent of the part before, if that is another one than that of the part after. Both are told."""


class Reached(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A worker has come to this point."""

    step: Literal["loading", "warming", "waiting", "ready", "resized", "complete", "drained"]
    """Of its cold start; or it waits for what it is to serve, can take its first batch, has followed `Threads`, has all
    layers; or the way from the part before has ended, and no more batches come."""
    address: bytes = b""
    """Of the socket of a shadow that is ready."""
    worker: WorkerId | None = None
    """Which worker, if an agent says it."""


class BatchFinished(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A batch has finished; see `sloop.serve.protocols.BackendListener`. Of the event, each receiver sets `replica` and
    `faults` itself."""

    event: Finished
    blocks: list[Block | None]
    faults: dict[int, str] = {}  # msgspec creates a new dict for each instance


class BatchRaised(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The model has failed on a batch."""

    batch: BatchId
    replica: ReplicaId
    failure: bytes
    """A `ModelFailure`, encoded."""


class WorkerDiffers(Struct, frozen=True, array_like=True, tag=True):
    """A request that shared a forward pass of a worker, or of another one of its model, got other outputs than alone.
    The worker lets requests share no pass any more; so does one that is told."""

    replica: ReplicaId
    why: str


class BatchPassed(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A part of a model passes on a batch."""

    batch: BatchId


ITSELF: Final = WorkerId(-1)
"""In a worker's report, the worker that sends it, which need not know its number yet."""
FromWorker = Reached | BatchFinished | BatchRaised | BatchPassed | WorkerDiffers | Report[WorkerReady | WorkerLost]
"""A report is of a worker that cannot start, or cannot go on, and exits; or it is a body's, of its shadow: it shares
batches with it as a `PairSetup` says, or has given it up."""


class PassedBatch(Struct, frozen=True, array_like=True, gc=False):
    """A batch between two parts of a model. Its tensors follow it (`sloop.serve.pipelines.PartPipes`)."""

    visits: int
    """Of the whole batch."""
    places: list[int]
    """The positions in the batch of the visits that run."""
    rows: list[int]
    """The number of rows of each of these visits."""
    passes: list[list[int]]
    """Those of each forward pass, by their index in `places`."""
    faults: dict[int, str]
    """See `BatchFinished`."""
    outputs: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece | None, ...]
    """See `Run`."""
    sizes: list[int] = []  # msgspec creates a new list for each instance
    """For each pass, how many bytes its tensors have: those that cross the cut, in the order of `CutBlock.crossing`."""
    took_ns: int = 0
    """How long the parts before have taken."""
    failure: bytes = b""
    """A `ModelFailure`, encoded, if the model has failed in one of these parts; then there are no tensors."""


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:  # noqa: ANN401  # also unions, which are no types
    """Decodes messages of one kind."""
    return msgspec.msgpack.Decoder(kind)


# To and from edges and agents, and to workers


class Free(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """A block that the other side has written is no longer needed."""

    block: Address


class Close(Struct, frozen=True, array_like=True, tag=True):
    """End: an agent stops all workers first, an edge gives clients a moment to take their answers."""

    why: str = ""
    """Why it cannot serve; empty if the server stops."""


# From an edge to the deciding process


class Submit(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """One request. See `sloop.serve.edge.sink.EdgeSink`."""

    number: int
    """Chosen by the edge, which never uses it again."""
    application: str
    block: Block
    began_ns: int
    version: str = ""
    slo_ns: int | None = None
    elapsed_ns: int = 0
    request_id: str = ""
    trace: str = ""
    rows: int = 1
    outputs: tuple[int, ...] = ()
    """The places of the application's outputs that its client wants; () for all."""
    size: int = 0
    shape: tuple[int, ...] = ()
    """Of one row; see `sloop.vocabulary.Request`."""
    is_whole: bool = False
    """Whether it gives optional inputs. sloop has not examined whether its rows are independent then, so it is one row
    to the core and is not split."""


class Cancel(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """The client of a request has disconnected."""

    number: int


class EdgeCounts(Struct, array_like=True, tag=True):
    """What an edge has counted since it began, and how much it holds now. Sent about every second."""

    held_bytes: int = 0
    """Of bodies."""
    unsent_bytes: int = 0
    """Of answers that clients have not taken."""
    connections: int = 0
    refused: dict[str, int] = {}  # msgspec creates new dicts for each instance
    """Requests, by the bound of bodies that they exceeded."""
    refused_connections: dict[str, int] = {}
    """By the bound that they exceeded."""
    expired: dict[str, int] = {}
    """Connections closed because their client took too long, by what was awaited."""
    keys: dict[str, int] = {}
    """Requests accepted, by the name of their key."""
    keys_refused: dict[str, int] = {}
    """Requests without a key (`missing`) or with another one (`wrong`)."""
    models: dict[str, tuple[int, dict[str, int]]] = {}
    """For each model with limits, the bytes of its open requests, and its refused requests by bound."""
    lines_dropped: int = 0
    """Lines of the access log that could not be written."""

    def plus(self, other: "EdgeCounts") -> "EdgeCounts":
        """Both together."""
        models = dict(self.models)
        for name, (held_bytes, refused) in other.models.items():
            own = models.get(name, (0, {}))
            models[name] = own[0] + held_bytes, _sum(own[1], refused)
        return EdgeCounts(
            self.held_bytes + other.held_bytes,
            self.unsent_bytes + other.unsent_bytes,
            self.connections + other.connections,
            _sum(self.refused, other.refused),
            _sum(self.refused_connections, other.refused_connections),
            _sum(self.expired, other.expired),
            _sum(self.keys, other.keys),
            _sum(self.keys_refused, other.keys_refused),
            models,
            self.lines_dropped + other.lines_dropped,
        )

    def ended(self) -> "EdgeCounts":
        """What remains of them when the edge has ended: what it counted, not what it held."""
        models = {name: (0, refused) for name, (_, refused) in self.models.items()}
        return structs.replace(self, held_bytes=0, unsent_bytes=0, connections=0, models=models)


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


FromEdge = Submit | Cancel | Free | Ask[Topic] | EdgeCounts
"""An edge sends its first record when it accepts connections, and a frame every `HEARTBEAT_S`
(`sloop.serve.heartbeat`), even if it has nothing to report."""


# From the deciding process to an edge


class RequestEnded(Struct, frozen=True, array_like=True, tag=True, gc=False):
    """How a request ended, and the blocks of its answer if it was served or late: one entry for each need of the
    answer."""

    number: int
    outcome: Outcome
    version: str
    """The version of the application that served it, or would have."""
    blocks: list[GivenBlocks] = []  # msgspec creates a new list for each instance
    why: str = ""
    retry_after_ns: int = 0
    is_refused: bool = False
    """Rejected by a model, because of what the client sent."""


class OfferModel(Struct, frozen=True, array_like=True, tag=True):
    """A model that edges offer. It replaces the one of this name, if there is one. One without `answers` has ended: it
    is offered no longer, and its open requests are finished."""

    name: str
    slo_ns: int
    signature: Signature
    limits: Limits
    labels: dict[str, tuple[str, ...]]
    """By output, the names of its classes."""
    versions: tuple[str, ...]
    """The versions that serve requests, the one with most of them first."""
    answers: dict[str, Assembly]
    """By version, how its answers are assembled; of every version that has requests."""
    joining: dict[str, str] = {}  # msgspec creates a new dict for each instance
    """Of the version that serves most requests: by stage and variant, whether requests may share a forward pass, and
    why."""


class ReloadFiles(Struct, frozen=True, array_like=True, tag=True):
    """Read keys and certificates again, and open the access log anew."""


class Holders(Struct, frozen=True, array_like=True, tag=True):
    """Which processes hold arenas, by their numbers (`sloop.shared_memory.Arenas`): agents, and for agents also the
    deciding process."""

    here: dict[int, int]
    """The process ids of those on this machine whose arenas may be read."""
    endpoints: dict[int, tuple[str, int]]
    """Host and port at which each sends its blocks. An empty host stands for that of the deciding process."""


ToEdge = RequestEnded | Free | Page | OfferModel | Report[Draining] | Close | ReloadFiles | Holders
"""When the server drains, edges close idle connections."""
