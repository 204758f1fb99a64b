"""Bursts on workers that share all cores: one after the other, all together, or PALDIA's split, against the prediction.

    python -m benchmarks.sharing [--seconds 1] [--quick] [--models squeezenet,perceptron] [--rounds 7]

Each model is profiled on all cores of this machine, and its law of interference is measured as `sloop profile
--sharing` does. Then six workers, whose cores are not a cap, serve bursts: some full batches that are there at once.
The share policy `hybrid` decides which run together, in its three modes; rounds of all modes and bursts follow each
other, and medians count. A last series keeps 1 to 6 batches running.

Source of the checks: PALDIA, specification 7.1 and 7.4 (21, 23, 24).
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import uvloop
from msgspec import structs

from benchmarks.models import convolutions, perceptron, small
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.core.views import SharedBatch, SharedDeviceView
from sloop.events import Event, Finished, ReplicaLost, ReplicaReady
from sloop.machine import usable_cpus
from sloop.policies.share import Hybrid
from sloop.profile.estimate import Estimate
from sloop.profile.examine import examine
from sloop.profile.measure import measure
from sloop.profile.profile import Profile
from sloop.profile.sharing import Contender, SharingFits, SharingTimes, fit_all_laws, measure_sharing
from sloop.report.plots import Figure, Panel, Series
from sloop.serve.backends.local import LocalBackend
from sloop.serve.blocks import Block, write_block
from sloop.serve.cpu_quota import detect
from sloop.serve.messages import Run
from sloop.serve.protocols import Servable
from sloop.shared_memory import Address, Arena, Arenas
from sloop.solvers.paldia import DeviceModel, Sharing, batches_of, best_split, executed_ms
from sloop.tensor import Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import wirings_of

WORKERS: Final = 6
MODES: Final[tuple[Sharing, ...]] = ("queue", "together", "hybrid")
NAMES: Final[Mapping[Sharing, str]] = {"queue": "serial", "together": "parallel", "hybrid": "hybrid"}
BURSTS: Final = (2.0, 3.0, 4.0, 4.5, 6.0)
"""Requests in full batches."""
TIE: Final = 1.02
"""Ends that differ by less are equal."""
NO_LATER: Final = 1.05
EARLIER: Final = 0.97
"""Hybrid against the better of the two others: at most so late everywhere, at least so early somewhere."""
WITHIN: Final = 0.15
"""The wanted accuracy of a predicted end, in four of five cases."""


class BurstTimes(NamedTuple):
    """A burst in each mode, in milliseconds."""

    requests: int
    measured_ms: Mapping[Sharing, float]
    predicted_ms: Mapping[Sharing, float]
    together: int
    """Batches that the split runs together."""

    @property
    def ratio(self) -> float:
        """Hybrid over the better of the two others."""
        return self.measured_ms["hybrid"] / min(self.measured_ms["queue"], self.measured_ms["together"])


class ModelBursts(NamedTuple):
    """What was measured of a model."""

    name: str
    model: DeviceModel
    times: SharingTimes
    fits: SharingFits
    bursts: list[BurstTimes]
    residents_ms: list[tuple[float, float]]
    """A burst of six full batches of which 1, 2, … run together: measured, predicted."""

    @property
    def best(self) -> tuple[int, int]:
        """How many batches that run together end a burst first, measured and predicted; of those that end at about the
        same time the fewest, which need fewer workers."""
        measured, predicted = (
            1 + int(np.argmax(np.array(ends_ms) <= TIE * min(ends_ms)))
            for ends_ms in zip(*self.residents_ms, strict=True)
        )
        return measured, predicted


class BurstBench:
    """Workers of one model, and what they report (`BackendListener`)."""

    def __init__(self, model: Path, batch: int) -> None:
        known = examine(model)
        servables = {("stage", "model"): Servable(known.file, known.signature)}
        cores = float(len(usable_cpus()))
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._arenas = Arenas()
        held = self._arenas.make(1 << 28, self._free)
        assert held is not None, "shared memory needs Linux"
        self._arena = Arena(held.number, held.fd)
        rows = np.random.default_rng(3).random((batch, *known.signature.inputs[0].shape[1:]), np.float32)
        tensors = [Tensor("FP32", (1, *row.shape), row.reshape(-1).view(np.uint8).data) for row in rows]
        self._blocks = [write_block([each], self._arena) for each in tensors]
        for block in self._blocks:
            if isinstance(block, Address):
                self._arenas.hold(block)
        self.backend = LocalBackend(
            servables,
            wirings_of(servables),
            detect().actuator,
            arenas=self._arenas,
            nodes=[Node("here", "local", cores, 1 << 40)],
        )
        self.backend.attach(self)
        self._spec = ReplicaSpec("stage", "model", Slot(cores / WORKERS, "local", is_capped=False), "here")
        self._number = 0

    def _free(self, block: Address) -> None:
        self._arena.free(block)

    def on_event(self, event: Event) -> None:
        self._events.put_nowait(event)

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        self.on_event(event)
        for block in blocks:
            if isinstance(block, Address):
                self._arenas.free(block)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        raise RuntimeError(failure.summary)

    async def start(self) -> None:
        """Start all workers, one after the other."""
        for number in range(WORKERS):
            self.backend.start(ReplicaId(number), self._spec)
            while not isinstance(event := await self._next(), ReplicaReady):
                assert not isinstance(event, ReplicaLost), event

    async def _next(self) -> Event:
        return await asyncio.wait_for(self._events.get(), 300)

    async def burst_ms(self, policy: Hybrid, model: DeviceModel, count: int, workers: int = WORKERS) -> float:
        """Milliseconds until the last of `count` requests that are there at once has ended."""
        costs_ns = [round(each * 1e6) for each in model.latencies_ms]
        waiting, idle, running = count, deque(map(ReplicaId, range(workers))), dict[ReplicaId, int]()
        began_s = time.perf_counter()
        while waiting or running:
            if waiting and idle:
                there = tuple(SharedBatch("stage", size) for size in running.values())
                view = SharedDeviceView(
                    "here", "", "stage", waiting, len(idle), model.batch, costs_ns, model.law, model.largest, there
                )
                for size in policy.start(0, view).sizes:
                    replica = idle.popleft()
                    running[replica] = size
                    self._number += 1
                    self.backend.run(BatchId(self._number), replica, Run(size, list(self._blocks[:size])))
                    waiting -= size
            event = await self._next()
            assert isinstance(event, Finished), event
            del running[event.replica]
            idle.append(event.replica)
        return (time.perf_counter() - began_s) * 1e3

    async def close(self) -> None:
        """Stop the workers, and free their memory."""
        await self.backend.close()
        self._arenas.close()


def device_model(profile: Profile, batch: int, fits: SharingFits) -> DeviceModel:
    """The model on the cores of this machine, as the policy believes it."""
    cores = float(len(usable_cpus()))
    sharing = fits.fits[fits.best].sharing
    slot = Slot(cores / WORKERS, is_capped=False)
    belief = Estimate(structs.replace(profile, sharing=sharing))
    latencies_ms = tuple(cost_ns / 1e6 for cost_ns in belief.costs_ns(slot)[: batch + 1])
    return DeviceModel(latencies_ms, belief.interference, belief.demand(batch, slot), WORKERS)


def predicted_ms(model: DeviceModel, count: int, sharing: Sharing) -> float:
    """When a burst ends, as the law says: queued batches start as soon as one of the others has ended."""
    queued = best_split(model, count, sharing).queued
    running, later = batches_of(count - queued, model.batch), batches_of(queued, model.batch) if queued else []
    return executed_ms(model, running, later, len(running))


async def served(bench: BurstBench, model: DeviceModel, rounds: int) -> tuple[list[BurstTimes], list[float]]:
    """All bursts in all modes, and those with a fixed number of batches, round after round."""
    counts = [round(each * model.batch) for each in BURSTS]
    took: dict[tuple[int, Sharing], list[float]] = {(count, mode): [] for count in counts for mode in MODES}
    fixed: dict[int, list[float]] = {workers: [] for workers in range(1, WORKERS + 1)}
    await bench.start()
    for number in range(rounds + 1):  # the first one warms up
        for (count, mode), found in took.items():
            ms = await bench.burst_ms(Hybrid(sharing=mode), model, count)
            if number:
                found.append(ms)
        for workers, series in fixed.items():
            ms = await bench.burst_ms(Hybrid(sharing="together"), model, WORKERS * model.batch, workers)
            if number:
                series.append(ms)
    bursts = []
    for count in counts:
        measured = {mode: median(took[count, mode]) for mode in MODES}
        predicted = {mode: predicted_ms(model, count, mode) for mode in MODES}
        together = len(batches_of(count - best_split(model, count).queued, model.batch))
        bursts.append(BurstTimes(count, measured, predicted, together))
    return bursts, [median(series) for series in fixed.values()]


def bench_model(name: str, path: Path, batch: int, seconds: float, rounds: int) -> ModelBursts:
    """Profile, law of interference, and bursts of one model."""
    cores = float(len(usable_cpus()))
    sizes = tuple(size for size in (1, 2, 4, 8, 16, 32) if size < batch)
    profile = measure(
        path, batches=(*sizes, batch), cores=(cores,), seconds=seconds, passes=2, percentile="p50", alone=True
    )
    say(f"{name}: a batch of {batch} takes {profile.latency_ms.latency_ms(batch, cores):.4g} ms alone")
    times = measure_sharing(Contender(path, batch, {}), together=WORKERS, seconds=seconds)
    fits = fit_all_laws(times, "benchmarks.sharing")
    say(f"{name}: S = {', '.join(f'{factor:.3g}' for _, factor in times.points)}; {fits.best}")
    model = device_model(profile, batch, fits)

    async def live() -> tuple[list[BurstTimes], list[float]]:
        bench = BurstBench(path, batch)
        try:
            return await served(bench, model, rounds)
        finally:
            await bench.close()

    bursts, fixed_ms = uvloop.run(live())
    each = [model.batch] * WORKERS
    expected_ms = [executed_ms(model, each[:count], each[count:], count) for count in range(1, WORKERS + 1)]
    return ModelBursts(name, model, times, fits, bursts, list(zip(fixed_ms, expected_ms, strict=True)))


def law_table(found: Sequence[ModelBursts]) -> str:
    """S(k), measured and as each law says."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        rows.append((each.name, each.times.full_batch, "measured", "", *(factor for _, factor in each.times.points)))
        counts = np.arange(1.0, WORKERS + 1)
        for form, fit in each.fits.fits.items():
            said = fit.sharing.law.among_equals(fit.sharing.demand(each.times.full_batch), counts)
            name = f"{form}{' (chosen)' if form == each.fits.best else ''}"
            rows.append((each.name, each.times.full_batch, name, f"{fit.mape:.1%}", *map(float, said)))
    return table(("model", "batch", "law", "mean error", *(f"S({k})" for k in range(1, WORKERS + 1))), rows)


def burst_table(found: Sequence[ModelBursts]) -> str:
    """Bursts in each mode, measured and predicted."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        for burst in each.bursts:
            ends = [time_ms[mode] for mode in MODES for time_ms in (burst.measured_ms, burst.predicted_ms)]
            rows.append((each.name, burst.requests, *ends, burst.together, f"{burst.ratio:.3f}"))
    columns = [name for mode in MODES for name in (f"{NAMES[mode]}, ms", "predicted")]
    return table(("model", "requests", *columns, "together in hybrid", "hybrid / better of the others"), rows)


def resident_table(found: Sequence[ModelBursts]) -> str:
    """Bursts of six batches, of which a fixed number run together."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        for place, name in enumerate(("measured, ms", "predicted, ms")):
            rows.append((each.name, name, *(times[place] for times in each.residents_ms), each.best[place]))
    return table(("model", "six batches, so many together", *map(str, range(1, WORKERS + 1)), "best"), rows)


def verdicts(found: Sequence[ModelBursts]) -> str:
    """What was wanted, and what came out."""
    lines = []
    for each in found:
        measured, predicted = each.best
        holds = "within one" if abs(measured - predicted) <= 1 else "**more than one away**"
        lines.append(f"- {each.name}: best concurrency {measured} measured, {predicted} by the fitted law: {holds}.")
    ratios = {(each.name, burst.requests): burst.ratio for each in found for burst in each.bursts}
    slow = {case: ratio for case, ratio in ratios.items() if ratio > NO_LATER}
    late = [f"{name} with {count} requests ({ratio:.3f})" for (name, count), ratio in slow.items()]
    lines.append(
        f"- Hybrid no later than {NO_LATER:g} × the better of serial and parallel: "
        + ("in all cases." if not late else f"**not** for {', '.join(late)}.")
    )
    (name, count), least = min(ratios.items(), key=lambda pair: pair[1])
    early = f"hybrid's earliest is {least:.3f} ({name}, {count} requests)"
    lines.append(f"- At least 3 % earlier in one case: {'yes' if least <= EARLIER else '**no**'}; {early}.")
    pairs = [
        (burst.measured_ms[mode], burst.predicted_ms[mode]) for each in found for burst in each.bursts for mode in MODES
    ]
    close = sum(abs(predicted / measured - 1) <= WITHIN for measured, predicted in pairs)
    share = close / len(pairs)
    lines.append(
        f"- {close} of {len(pairs)} predicted ends within {WITHIN:.0%} of the measured ones: {share:.0%}, wanted 80 %."
    )
    return "\n".join(lines)


def figure_of(found: Sequence[ModelBursts]) -> Figure:
    """S(k) of all models, measured and as the chosen law says."""
    counts = tuple(float(count) for count in range(1, WORKERS + 1))
    series: list[Series] = []
    for each in found:
        fit = each.fits.fits[each.fits.best]
        said = fit.sharing.law.among_equals(fit.sharing.demand(each.times.full_batch), np.array(counts))
        series.append(Series(f"{each.name}, measured", counts, tuple(y for _, y in each.times.points), "points"))
        series.append(Series(f"{each.name}, fitted", counts, tuple(map(float, said))))
    series.append(Series("one after the other", counts, counts))
    return Figure(
        name="slowdown",
        title="How many times as long as alone a batch takes",
        x_label="workers that run batches",
        panels=(Panel(y_label="times as long as alone", series=tuple(series)),),
        alt="Slowdown of a batch by the number of workers that run together, measured and fitted.",
    )


def text_of(found: Sequence[ModelBursts], rounds: int) -> str:
    """The page."""
    about = (
        f"{WORKERS} workers, whose cores are only reserved, on {len(usable_cpus())} cores; each has as many threads. "
        f"Bursts: medians of {rounds} rounds. Predicted: the law of the model, processor sharing, with the split that "
        "the policy made; it knows nothing of what driver and sockets take."
    )
    return "\n\n".join([about, verdicts(found), law_table(found), burst_table(found), resident_table(found)])


class BurstModel(NamedTuple):
    """A model, and its largest batch."""

    write: Callable[[Path], Path]
    batch: int


MODELS: Final[Mapping[str, BurstModel]] = {
    "squeezenet": BurstModel(lambda folder: small(folder, "squeezenet", 112), 8),
    "densenet": BurstModel(lambda folder: small(folder, "densenet121", 64), 4),
    "perceptron": BurstModel(lambda folder: perceptron(folder, width=1024, layers=8), 8),
    "convolutions": BurstModel(lambda folder: convolutions(folder, channels=16, layers=6, pixels=32), 16),
}


def main() -> None:
    """Measure, and publish."""
    parser = arguments(__doc__, seconds=1.0, quick=0.2)
    parser.add_argument("--models", default=",".join(MODELS), help="which, with commas between them (default all)")
    parser.add_argument("--rounds", type=int, default=7, help="of all bursts (default 7)")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    with workspace(given.keep) as folder:
        for name in given.models.split(","):
            chosen = MODELS[name]
            found.append(bench_model(name, chosen.write(folder), chosen.batch, given.seconds, given.rounds))
    publish(
        "sharing",
        "Workers that share all cores",
        text_of(found, given.rounds),
        [figure_of(found)],
        write=not given.no_write,
    )


if __name__ == "__main__":
    main()
