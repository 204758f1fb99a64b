"""How long a replica takes to start: with a process of its own, and with a worker that was started ahead.

    python -m benchmarks.starts [MODEL.onnx] [--rounds 20]

The two take turns. The time runs from the order to the replica's readiness, which includes loading and one forward
pass. The model is SqueezeNet for small images unless another one is named.
"""

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Final

import uvloop

from benchmarks.models import small
from benchmarks.notebook import arguments, publish, table, workspace
from sloop.events import Event, ReplicaReady, ReplicaStopped
from sloop.profile.model import read_signature
from sloop.serve.backends import local
from sloop.serve.backends.local import LocalBackend
from sloop.serve.cpu_quota import detect
from sloop.serve.protocols import Servable
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import wirings_of

STEPS: Final = ("spawning", "loading", "warming")


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


async def one(backend: LocalBackend, steps: Steps, number: int) -> dict[str, float]:
    """The steps of one start, and then a stop."""
    replica = ReplicaId(number)
    steps.times_ms, steps.began_s = {}, time.perf_counter()
    backend.start(replica, ReplicaSpec("stage", "model", Slot(1)))
    await steps.until(ReplicaReady)
    found = dict(steps.times_ms)
    backend.stop(replica)
    await steps.until(ReplicaStopped)
    return found


async def measured(model: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """The steps of each start, by where its process came from."""
    local.SPARES_AFTER_S = 0.1  # type: ignore[misc]  # the rounds need not wait for so long
    servables = {("stage", "model"): Servable(str(model), read_signature(model))}
    found: dict[str, list[dict[str, float]]] = {"a process of its own": [], "a worker started ahead": []}
    backends: list[tuple[LocalBackend, Steps]] = []
    for spares_max in (0, 1):
        backend = LocalBackend(servables, wirings_of(servables), detect().actuator, spares_max=spares_max)
        backends.append((backend, Steps()))
        backend.attach(backends[-1][1])
    try:
        for number in range(rounds + 1):
            for (backend, steps), results in zip(backends, found.values(), strict=True):
                result = await one(backend, steps, number)
                if number:  # the first finds no spare worker, and reads libraries from the disk
                    results.append(result)
            await asyncio.sleep(1.0)  # the spare worker has loaded its libraries
    finally:
        for backend, _ in backends:
            await backend.close()
    return found


def main() -> None:
    """Measure, and publish."""
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="an ONNX file (default: SqueezeNet, 64 × 64 pixels)")
    parser.add_argument("--rounds", type=int, default=20, help="starts of each kind (default 20)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        model = given.model or small(folder, "squeezenet", 64)
        found = uvloop.run(measured(model, given.rounds))
        name = model.name
    ready = {kind: median(each["ReplicaReady"] for each in results) for kind, results in found.items()}
    rows = [
        (
            kind,
            *(median(each[step] for each in results) for step in STEPS[1:]),
            ready[kind],
            max(each["ReplicaReady"] for each in results),
        )
        for kind, results in found.items()
    ]
    slow, quick = ready.values()
    columns = ("the replica takes", "loads from, ms", "warms from, ms", "is ready after, ms", "at most, ms")
    text = f"`{name}`, one core, medians of {given.rounds} starts of each kind, which take turns.\n\n"
    text += f"{table(columns, rows)}\n\nReady {slow / quick:.1f} × sooner (wanted: 3)."
    publish("starts", "How long a replica takes to start", text, write=not given.no_write)


if __name__ == "__main__":
    main()
