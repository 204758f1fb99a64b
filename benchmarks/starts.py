"""How long a replica takes to start: in a new process, and in a spare worker.

    python -m benchmarks.starts [MODEL.onnx …] [--rounds 20]

Both kinds of starts alternate. The time runs from the order until the replica is ready, which includes loading and one
forward pass. The models are SqueezeNet for small images and a perceptron of 100 MB unless others are named. `held` is
the time for which the order blocks the deciding process.
"""

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from benchmarks.models import perceptron, small
from benchmarks.notebook import arguments, publish, table, workspace
from sloop.actions import StartWorker, StopWorker
from sloop.events import Event, WorkerReady, WorkerStopped
from sloop.profile.model import read_signature
from sloop.serve.cpu_quota import detect
from sloop.serve.node import spares
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import wirings_of

HELD: Final = "held"
STEPS: Final = (HELD, "loading", "warming", "WorkerReady")
KINDS: Final = {0: "a new process", 1: "a spare worker"}
"""By the number of spare workers, where a replica starts."""


class Steps:
    """When each step of a start began, in ms since the order (`BackendListener`)."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.times_ms: dict[str, float] = {}
        self.changed = asyncio.Event()

    def on_event(self, event: Event) -> None:
        step = getattr(event, "step", type(event).__name__)
        self.times_ms[step] = (time.perf_counter() - self.began_s) * 1e3
        self.changed.set()

    def on_finished(self, event: object, blocks: object, faults: object) -> None:
        raise AssertionError(event)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        raise RuntimeError(failure.summary)

    async def until(self, kind: type) -> None:
        """Wait for an event of this kind."""
        while kind.__name__ not in self.times_ms:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)


async def one(backend: LiveNode, steps: Steps, number: int) -> dict[str, float]:
    """The steps of one start, and then a stop."""
    replica = ReplicaId(number)
    steps.times_ms, steps.began_s = {}, time.perf_counter()
    backend.order(StartWorker(replica, ReplicaSpec("stage", "model", Slot(1))))
    steps.times_ms[HELD] = (time.perf_counter() - steps.began_s) * 1e3
    await steps.until(WorkerReady)
    found = dict(steps.times_ms)
    backend.order(StopWorker(replica, ""))
    await steps.until(WorkerStopped)
    return found


async def measured(model: Path, rounds: int) -> tuple[dict[str, list[dict[str, float]]], float]:
    """The steps of each start, by the kind of start, and the memory in MB of a spare worker."""
    spares.SPARES_AFTER_S = 0.1  # type: ignore[misc]  # the rounds need not wait for so long
    servables = {("stage", "model"): Servable(str(model), read_signature(model))}
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS.values()}
    backends: list[tuple[LiveNode, Steps]] = []
    for spares_max in KINDS:
        backend = LiveNode(servables, wirings_of(servables), detect().actuator, spares_max=spares_max)
        backends.append((backend, Steps()))
        backend.attach(backends[-1][1])
    with_spares, _ = backends[-1]
    memory_mb = 0.0
    try:
        for number in range(rounds + 1):
            async with asyncio.timeout(120):
                while not with_spares.spares.pids():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            memory_mb = sum(each.memory_bytes for each in with_spares.spare_processes().values()) / 1e6
            for (backend, steps), results in zip(backends, found.values(), strict=True):
                result = await one(backend, steps, number)
                if number:  # the first reads libraries and the model from the disk
                    results.append(result)
    finally:
        for backend, _ in backends:
            await backend.close()
    return found, memory_mb


def main() -> None:
    """Measure, and publish."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="ONNX files (default: one of 16 kB and one of 100 MB)")
    parser.add_argument("--rounds", type=int, default=20, help="starts of each kind (default 20)")
    given = parser.parse_args()
    rows: list[tuple[str | float, ...]] = []
    ratios: list[str] = []
    with workspace(given.keep) as folder:
        for model in given.models or (small(folder, "squeezenet", 64), perceptron(folder, width=2048, layers=6)):
            found, memory_mb = uvloop.run(measured(model, given.rounds))
            medians = {
                kind: [median(each[step] for each in results) for step in STEPS] for kind, results in found.items()
            }
            for kind, values in medians.items():
                rows.append((model.name, kind, *values, max(each["WorkerReady"] for each in found[kind])))
            slow, quick = (values[-1] for values in medians.values())
            ratios.append(f"{slow / quick:.1f} × sooner with `{model.name}` ({slow - quick:.0f} ms)")
    columns = ("model", "starts in", "held for, ms", "loads from, ms", "warms from, ms", "is ready after, ms")
    text = f"One core, medians of {given.rounds} starts of each kind, which alternate.\n\n"
    text += f"{table((*columns, 'at most, ms'), rows)}\n\n"
    text += f"Ready {', '.join(ratios)}; wanted: 3 × for an ordinary model. A spare worker takes {memory_mb:.0f} MB."
    publish("starts", "How long a replica takes to start", text, write=not given.no_write)


if __name__ == "__main__":
    main()
