"""In-place resizing under load: how fast, how exact, and whether requests are lost (Sponge specification, check 11).

    python -m benchmarks.resize [MODEL.onnx] [--resizes 1000] [--seed 1]

One worker is busy in a closed loop. First its service times at half a core and at one core are compared, by the fastest
tenth of each. Use a quiet machine: other programs slow down the worker with one core more. Then the worker is resized
at random. `benchmarks.resizes` does the same with a whole server under HTTP load.
"""

import asyncio
import statistics
import time
from math import prod
from pathlib import Path
from random import Random

import onnx
import uvloop

from benchmarks.notebook import arguments, publish, table
from sloop.actions import ResizeWorker, StartWorker
from sloop.events import Event, Finished, WorkerReady, WorkerResized
from sloop.profile.model import read_signature
from sloop.serve.cpu_quota import detect
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.tensor import ITEM_BYTES, Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import run_of, wirings_of

REPLICA = ReplicaId(0)
REQUESTS = 24
"""Requests per batch while service times are compared: many scheduling periods, of which the first may be a half."""
CORES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx"


class BatchLoop:
    """A closed loop of one batch after another, and the durations of its batches."""

    def __init__(self, backend: LiveNode, tensors: list[Tensor]) -> None:
        self._backend, self._tensors = backend, tensors
        self.requests = REQUESTS
        self.sent = 0
        self.finished: list[tuple[BatchId, int]] = []
        self.resized_ns: list[int] = []
        self.other: list[Event] = []
        self._ready = asyncio.Event()
        self._resized = asyncio.Event()

    def on_event(self, event: Event) -> None:
        match event:
            case WorkerReady():
                self._ready.set()
                self._send()
            case WorkerResized():
                self.resized_ns.append(time.perf_counter_ns())
                self._resized.set()
            case _:
                self.other.append(event)

    def finished_(self, event: Finished) -> None:
        self.finished.append((event.batch, event.service_ns))
        self._send()

    def _send(self) -> None:
        self.sent += 1
        self._backend.run(BatchId(self.sent), REPLICA, run_of([self._tensors] * self.requests))

    async def ready(self) -> None:
        await self._ready.wait()

    async def resize(self, cores: float) -> float:
        """Resize; the milliseconds from the order until it is in effect."""
        self._resized.clear()
        began_ns = time.perf_counter_ns()
        self._backend.order(ResizeWorker(REPLICA, cores))
        await self._resized.wait()
        return (self.resized_ns[-1] - began_ns) / 1e6

    async def service_ms(self, batches: int) -> list[float]:
        """Service times in ms of the next batches, without the one that is running."""
        first = len(self.finished) + 1
        while len(self.finished) < first + batches:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return [service_ns / 1e6 for _, service_ns in self.finished[first : first + batches]]


class BackendListener:
    """Receives the reports of the backend."""

    def __init__(self) -> None:
        self.load: BatchLoop | None = None

    def on_event(self, event: Event) -> None:
        assert self.load is not None
        self.load.on_event(event)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        raise RuntimeError(failure.summary)

    def on_finished(self, event: Finished, blocks: object, faults: object) -> None:
        assert self.load is not None
        self.load.finished_(event)


async def measure(model: Path, resizes: int, seed: int) -> list[tuple[str, object]]:
    signature = read_signature(model)
    found = detect()
    servables = {("s", "v"): Servable(str(model), signature)}
    backend = LiveNode(servables, wirings_of(servables), found.actuator, threads_prepared=2)
    listener = BackendListener()
    backend.attach(listener)
    shapes = [tuple(max(dim, 1) for dim in port.shape) for port in signature.inputs]
    tensors = [
        Tensor(port.datatype, shape, bytes(prod(shape) * ITEM_BYTES[port.datatype]))
        for port, shape in zip(signature.inputs, shapes, strict=True)
    ]
    load = listener.load = BatchLoop(backend, tensors)
    backend.order(StartWorker(REPLICA, ReplicaSpec("s", "v", Slot(1.0))))
    await load.ready()
    pid = backend.pid(REPLICA)
    samples: dict[float, list[float]] = {0.5: [], 1.0: []}
    for _ in range(10):
        for cores, taken in samples.items():
            await load.resize(cores)
            taken.extend(await load.service_ms(2))
    undisturbed = {cores: statistics.quantiles(taken, n=10)[0] for cores, taken in samples.items()}
    load.requests = 1
    chance, effect_ms = Random(seed), []
    for _ in range(resizes):
        effect_ms.append(await load.resize(chance.choice(CORES)))
        await asyncio.sleep(0.01 * chance.random())
    same = backend.pid(REPLICA) == pid
    await load.service_ms(1)
    answered = [batch for batch, _ in load.finished]
    await backend.close()
    effect_ms.sort()
    quick, slow = undisturbed[1.0], undisturbed[0.5]
    lost = len(answered) - len(set(answered)) + (answered != list(range(1, len(answered) + 1)))
    effect = (effect_ms[len(effect_ms) // 2], effect_ms[int(len(effect_ms) * 0.99)], effect_ms[-1])
    return [
        ("cores are given by", found.why.partition(":")[0]),
        (f"batch of {REQUESTS} on 1 / 0.5 cores, fastest tenth, ms", f"{quick:.4g} / {slow:.4g}"),
        ("half a core over one (2.0 ± 0.2)", slow / quick),
        ("resizes at random", resizes),
        ("from the order to its effect, ms, p50 / p99 / max", " / ".join(f"{value:.3g}" for value in effect)),
        ("the same process throughout", same),
        ("batches", len(answered)),
        ("lost or repeated", lost),
        ("other events", ", ".join(repr(event) for event in load.other if "Progressed" not in repr(event)) or "none"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=LIGHT)
    parser.add_argument("--resizes", type=int, default=1000)
    given = parser.parse_args()
    rows = uvloop.run(measure(given.model, given.resizes, given.seed))
    text = (
        f"One worker without a server, busy in a closed loop with {given.model.stem}.\n\n{table(('', 'found'), rows)}"
    )
    publish("resize", "A worker resized in place", text, write=not given.no_write)


if __name__ == "__main__":
    main()
