"""Body and shadow on two cores: measured durations of batches beside the predicted ones, and how long a shadow loads.

    python -m benchmarks.pairs [--seconds 3] [--quick] [--models vgg11,resnet18,squeezenet]

VGG11 and ResNet18 with random weights, SqueezeNet as the case that gains little; images of 224 × 224. Each model is
measured block by block on one core, like `sloop profile --layers`, and then served by a worker on one core, alone and
with shadows on the other core that hold growing numbers of its first blocks. Needs two quiet cores: on a busy machine,
a pair waits for a core. The load average on the page says how busy the machine was.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, TypeVar

import numpy as np
import uvloop

from benchmarks.models import resnet18, small, vgg11
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.actions import StartWorker, StopWorker
from sloop.events import (
    Event,
    Finished,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.profile.blocks import shared_blocks, shared_rows
from sloop.profile.examine import examine
from sloop.profile.layers import measure_layers
from sloop.profile.measure import by_affinity
from sloop.profile.model import Array, open_model
from sloop.profile.onnx_cut import difference
from sloop.profile.profile import LayerProfile, Profile
from sloop.serve.blocks import Block, BlockReader, write_block
from sloop.serve.control.cutting import cut_of
from sloop.serve.cpu_quota import detect
from sloop.serve.messages import Run
from sloop.serve.node import node, spares
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.serve.runtimes import FileRuntime
from sloop.serve.shadows import BlockSequence
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import Tensor, array_of
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot, Worker, WorkerId
from tests.serve.rig import wirings_of

BATCHES: Final = (1, 2, 4, 8)
RUNS_MIN: Final = 5
LOADS: Final = 5
WITHIN: Final = 0.15
"""The wanted accuracy of a prediction."""
ENOUGH: Final[Mapping[str, float]] = {"vgg11": 10.0, "resnet18": 3.0}
"""How many times faster than the whole model the largest shadow is to be loaded."""
BODY: Final = ReplicaId(1)


Kind = TypeVar("Kind", bound=Event)


class Timed(NamedTuple):
    """A batch of one size, in milliseconds."""

    batch: int
    shadow_rows: int
    alone_ms: float
    predicted_alone_ms: float
    pair_ms: float
    predicted_ms: float

    @property
    def miss(self) -> float:
        """By which fraction the pair is slower than predicted."""
        return self.pair_ms / self.predicted_ms - 1


class ShadowTimes(NamedTuple):
    """A shadow, and the pair's batches."""

    blocks: tuple[int, ...]
    ends: str
    param_bytes: int
    load_ms: float
    ready_ms: float
    batches: list[Timed]

    @property
    def name(self) -> str:
        """How many blocks, and the last layer."""
        return f"{len(self.blocks)} to `{self.ends}`"


class ModelTimes(NamedTuple):
    """A model, alone and with each shadow."""

    name: str
    param_bytes: int
    load_ms: float
    ready_ms: float
    chain_cost: float
    """What running the blocks takes of the largest batch, over running the uncut model."""
    difference: float
    shadows: list[ShadowTimes]


class Bench:
    """One worker, what it reports, and the memory of its inputs (`BackendListener`)."""

    def __init__(self, model: Path, servable: Servable, shape: tuple[int, ...]) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._arenas = Arenas()
        held = self._arenas.make(1 << 28, self._free)
        self._held, self._arena = held, Arena(held.number, held.fd)
        self._reader = BlockReader({0: os.getpid()})
        self._rows = np.random.default_rng(3).random((max(BATCHES), *shape), np.float32)
        whole = open_model(model, 1)
        name = servable.signature.inputs[0].name
        self._expected = {batch: list(whole.run({name: self._rows[:batch]})) for batch in BATCHES}
        del whole
        servables = {("stage", "cut"): servable, ("stage", "whole"): Servable(str(model), servable.signature)}
        self.backend = LiveNode(servables, wirings_of(servables), detect().actuator, arenas=self._arenas, spares_max=1)
        self.backend.attach(self)
        self._outputs: list[Array] = []
        self.worst = 0.0

    def _free(self, block: Address) -> None:
        self._arena.free(block)

    def on_event(self, event: Event) -> None:
        self._events.put_nowait(event)

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        tensors = [self._reader.tensors(block)[0] for block in blocks if block is not None]
        self._outputs = [array_of(each.datatype, each.shape, each.data) for each in tensors]
        self.on_event(event)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        raise RuntimeError(failure.summary)

    async def until(self, kind: type[Kind]) -> Kind:
        """The next event of a kind. RuntimeError if worker or shadow is lost before."""
        while True:
            event = await asyncio.wait_for(self._events.get(), 300)
            if isinstance(event, kind):
                return event
            if isinstance(event, WorkerLost):
                raise RuntimeError(event.error)

    async def ready_ms(self, variant: str, *, is_first: bool = False) -> float:
        """How long the worker takes from the order to its readiness; a spare one waits, but for the first."""
        if not is_first:
            await self.spare()
        start_s = time.perf_counter()
        self.backend.order(StartWorker(BODY, ReplicaSpec("stage", variant, Slot(1.0), "here")))
        await self.until(WorkerReady)
        return (time.perf_counter() - start_s) * 1e3

    async def spare(self) -> None:
        """Wait until a spare worker has loaded its libraries."""
        while not self.backend.spares.pids():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    async def batch_ms(self, batch: int, seconds: float) -> float:
        """The median duration of batches of one size."""
        took_ms, until_s = list[float](), time.monotonic() + seconds
        while len(took_ms) <= RUNS_MIN or time.monotonic() < until_s:
            blocks = [
                write_block([Tensor("FP32", (1, *row.shape), row.reshape(-1).view(np.uint8).data)], self._arena)
                for row in self._rows[:batch]
            ]
            for block in blocks:
                self._arenas.hold(block)  # type: ignore[arg-type]  # rows are large
            self.backend.run(BatchId(len(took_ms)), BODY, Run(batch, list(blocks)))
            took_ms.append((await self.until(Finished)).service_ns / 1e6)
            for block in blocks:
                self._arenas.free(block)  # type: ignore[arg-type]
            self.worst = max(self.worst, difference([np.concatenate(self._outputs)], self._expected[batch]))
        return median(took_ms[1:])

    async def close(self) -> None:
        """Stop the worker, and free its memory."""
        await self.backend.close()
        self._arenas.close()


def loads_ms(model: Path, blocks: Mapping[str, BlockSequence]) -> dict[str, float]:
    """Median times to load the whole model (`""`) and chains of blocks, in turn, from the page cache."""
    took: dict[str, list[float]] = {name: [] for name in ("", *blocks)}
    for _ in range(LOADS):
        start_s = time.perf_counter()
        FileRuntime(str(model)).load(1)
        took[""].append(time.perf_counter() - start_s)
        for name, chain in blocks.items():
            start_s = time.perf_counter()
            BlockSequence(chain.blocks).load(1)
            took[name].append(time.perf_counter() - start_s)
    return {name: median(each) * 1e3 for name, each in took.items()}


def shadows_of(layers: LayerProfile) -> list[tuple[int, ...]]:
    """First blocks: up to where the image gets small, and all but those that hold most of the weights."""
    sizes = [block.param_bytes for block in layers.blocks]
    light = [sum(sizes[: place + 1]) / sum(sizes) for place in range(len(sizes) - 1)]
    chosen = {max((place + 1 for place, share in enumerate(light) if share <= bound), default=1) for bound in LIGHT}
    return [tuple(range(count)) for count in sorted(chosen)]


LIGHT: Final = (0.01, 0.06, 0.25)
"""Shares of the weights up to which shadows go: those of the specification's table (section 7.1)."""


async def served(name: str, model: Path, layers: LayerProfile, folder: Path, seconds: float) -> ModelTimes:
    """The live part: alone, then with each shadow, sizes of batches in turn."""
    spares.SPARES_AFTER_S = 0.1  # type: ignore[misc]
    node.PATIENCE = 20.0  # type: ignore[misc]  # to measure a slow pair, not to give it up
    profile = Profile(latency_ms=layers.latency_ms, max_batch=max(BATCHES), max_cores=1, layers=layers)
    known = examine(model)
    cut = cut_of(known, {"": profile}, {}, folder)
    servable = Servable(known.file, known.signature, cut=cut)
    choices = shadows_of(layers)
    chains = {str(len(blocks)): BlockSequence({place: cut.blocks[place] for place in blocks}) for blocks in choices}
    loads = loads_ms(model, chains)
    bench = Bench(model, servable, tuple(known.signature.inputs[0].shape[1:]))
    try:
        await bench.ready_ms("whole", is_first=True)
        bench.backend.order(StopWorker(BODY, ""))
        await bench.until(WorkerStopped)
        whole_ready_ms = await bench.ready_ms("whole")
        bench.backend.order(StopWorker(BODY, ""))
        await bench.until(WorkerStopped)
        await bench.ready_ms("cut")
        found = []
        for number, blocks in enumerate(choices):
            alone = {batch: await bench.batch_ms(batch, seconds) for batch in BATCHES}
            await bench.spare()
            wanted, start_s = Worker(1.0, blocks), time.perf_counter()
            shadow = WorkerId(BODY + 1 + number)
            bench.backend.order(
                StartWorker(shadow, ReplicaSpec("stage", "cut", Slot(1.0), "here", shape=(wanted,)), BODY)
            )
            await bench.until(WorkerReady)
            ready_ms = (time.perf_counter() - start_s) * 1e3
            rows, _ = shared_rows(layers, 1.0, wanted, max(BATCHES))
            shared = shared_blocks(layers, 1.0, wanted, max(BATCHES))
            timed = []
            for batch in BATCHES:
                pair_ms, own_ms = await bench.batch_ms(batch, seconds), float(shared.costs.alone_ms[batch])
                predicted_ms = shared.waiting_ms[batch] if rows[batch] else own_ms
                timed.append(Timed(batch, rows[batch], alone[batch], own_ms, pair_ms, predicted_ms))
            bench.backend.order(StopWorker(shadow, ""))
            await bench.until(WorkerStopped)
            size = sum(layers.blocks[place].param_bytes for place in blocks)
            load_ms = loads[str(len(blocks))]
            found.append(ShadowTimes(blocks, layers.blocks[blocks[-1]].end, size, load_ms, ready_ms, timed))
            say(f"{name} with {len(blocks)} blocks: {', '.join(f'{each.pair_ms:.4g}' for each in timed)} ms")
    finally:
        await bench.close()
    whole_ms = layers.latency_ms.latency_ms(max(BATCHES), 1.0)
    chain_ms = sum(each.latency_ms.latency_ms(max(BATCHES), 1.0) for each in layers.blocks)
    size = sum(each.param_bytes for each in layers.blocks)
    return ModelTimes(name, size, loads[""], whole_ready_ms, chain_ms / whole_ms - 1, bench.worst, found)


def pair_table(found: Sequence[ModelTimes]) -> str:
    """Batches alone and shared, measured and predicted."""
    rows: list[tuple[object, ...]] = []
    for model in found:
        for shadow in model.shadows:
            for each in shadow.batches:
                split = f"{each.batch - each.shadow_rows} + {each.shadow_rows}" if each.shadow_rows else "not used"
                times = each.alone_ms, each.predicted_alone_ms, each.pair_ms, each.predicted_ms
                gains = each.alone_ms / each.pair_ms, each.predicted_alone_ms / each.predicted_ms
                rows.append((model.name, shadow.name, each.batch, split, *times, f"{each.miss:+.0%}", *gains))
    times_of = ("alone, ms", "predicted", "with shadow, ms", "predicted", "off by", "gain", "predicted")
    return table(("model", "the shadow's blocks", "batch", "rows", *times_of), rows)


def load_table(found: Sequence[ModelTimes]) -> str:
    """How long shadows and whole models load."""
    rows: list[tuple[object, ...]] = []
    for model in found:
        for each in model.shadows:
            size_mib, part = each.param_bytes / 2**20, each.param_bytes / model.param_bytes
            load = model.load_ms, each.load_ms, model.load_ms / each.load_ms
            ready = model.ready_ms, each.ready_ms, model.ready_ms / each.ready_ms
            rows.append((model.name, each.name, size_mib, f"{part:.1%}", *load, *ready))
    load_of = ("model loads, ms", "shadow loads, ms", "times faster")
    ready_of = ("model is ready, ms", "shadow is ready, ms", "times faster")
    return table(("model", "the shadow's blocks", "MiB", "of the weights", *load_of, *ready_of), rows)


def verdicts(model: ModelTimes) -> list[str]:
    """What was wanted, and what came out."""
    used = [each for shadow in model.shadows for each in shadow.batches if each.shadow_rows]
    close = sum(abs(each.miss) <= WITHIN for each in used)
    found = [f"- {model.name}: {close} of {len(used)} shared batches within {WITHIN:.0%} of the prediction."]
    if model.name in ENOUGH:
        largest = max(model.shadows, key=lambda each: each.param_bytes)
        times = model.load_ms / largest.load_ms
        found.append(
            f"- {model.name}: the shadow with {len(largest.blocks)} blocks loads {times:.1f} × faster than the model"
            f" (wanted: {ENOUGH[model.name]:g})."
        )
    found.append(
        f"- {model.name}: outputs differ from the uncut model's by at most {model.difference:.1e} of the largest"
        f" (allowed: 1e-06); cut into blocks, a batch of {max(BATCHES)} takes {model.chain_cost:+.1%} time."
    )
    return found


def text_of(found: Sequence[ModelTimes]) -> str:
    """The page."""
    about = (
        "Body and shadow have one core each; durations are medians. Rows: body + shadow; `not used`: the body alone is"
        " predicted to be as fast."
    )
    loading = (
        f"Loading is from the page cache, the median of {LOADS} loads. `ready` is the time from the order, in a spare"
        " worker, until one forward pass has ended."
    )
    lines = [line for model in found for line in verdicts(model)]
    return "\n\n".join([about, pair_table(found), loading, load_table(found), "\n".join(lines)])


def squeezenet(folder: Path) -> Path:
    """SqueezeNet, whose weights are spread evenly."""
    return small(folder, "squeezenet", 224)


MODELS: Final[Mapping[str, Callable[[Path], Path]]] = {"vgg11": vgg11, "resnet18": resnet18, "squeezenet": squeezenet}


def main() -> None:
    """Measure, and publish."""
    parser = arguments(__doc__, seconds=3.0, quick=0.5)
    parser.add_argument("--models", default="vgg11,resnet18,squeezenet", help="which, with commas between them")
    parser.add_argument("--passes", type=int, default=2, help="of the profile (default 2)")
    given = parser.parse_args()
    found = []
    with workspace(given.keep) as folder:
        for name in given.models.split(","):
            model = MODELS[name](folder)
            say(f"{name}: measuring its blocks")
            layers = measure_layers(
                model, batches=BATCHES, cores=(1.0,), seconds=given.seconds, passes=given.passes, limit=by_affinity
            )
            found.append(uvloop.run(served(name, model, layers, folder, given.seconds)))
            say(f"{name}: done")
        publish("pairs", "Body and shadow", text_of(found), write=not given.no_write)


if __name__ == "__main__":
    main()
