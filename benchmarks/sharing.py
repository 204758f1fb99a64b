"""Bursts on workers that share all cores: batches one after the other, all together, in PALDIA's split and in ours,
measured and as predicted by the law of interference.

    python -m benchmarks.sharing [--seconds 0.2] [--quick] [--models squeezenet,perceptron] [--budget 20]

Each model's law of interference is measured and chosen as by `sloop profile --sharing`, with six workers of a server's
backend whose cores are not a cap. Then the same workers serve bursts: several full batches that arrive at once. The
share policy `hybrid` decides which run together, in its four modes (`resident` is ours). Streams keep 1 to 6 batches
running. Each round has all modes, bursts and streams in a random order; results are medians over the rounds. The law is
not fitted to any of these.

The models in `CHECKED` are held out: they were not used while the law and the measurement were developed.

Source of the checks: PALDIA, specification 7.1 and 7.4 (21, 23, 24).
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from benchmarks.models import convolutions, perceptron, small
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.protocols import deciding
from sloop.core.views import SharedBatch
from sloop.machine import usable_cpus
from sloop.profile.examine import examine
from sloop.profile.sharing import Contender, SharingFits, SharingTimes, fit_all_laws, measure_sharing
from sloop.report.plots import Figure, Panel, Series
from sloop.serve.shared_workers import SharedStream, SharedWorkers, shared_stream
from sloop.testing.views import make_visit
from sloop.units import NS_PER_MS
from sloop.vocabulary import ReplicaId
from sloop_systems.paldia.policy import Hybrid
from sloop_systems.paldia.solver import DeviceModel, Sharing, batches_of, best_split, executed_ms

WORKERS: Final = 6
PASSES: Final = 6
"""Passes of the measurement to which laws are fitted; each is left out once to choose the law."""
MODES: Final[tuple[Sharing, ...]] = ("queue", "together", "hybrid", "resident")
NAMES: Final[Mapping[Sharing, str]] = {
    "queue": "serial",
    "together": "parallel",
    "hybrid": "hybrid",
    "resident": "resident",
}
BURSTS: Final = (2.0, 3.0, 4.0, 4.5, 6.0, 7.0)
"""Sizes of bursts, in full batches."""
ROUNDS_MIN: Final = 7
TIE: Final = 1.02
"""Times per batch whose ratio is smaller count as equal."""
NO_LATER: Final = 1.05
EARLIER: Final = 0.97
"""Limits of the ratio of `hybrid` to the better of serial and parallel: `NO_LATER` in all bursts, `EARLIER` in one."""
WITHIN: Final = 0.15
"""The wanted accuracy of a predicted end, in four of five cases."""
DRAWS: Final = 2000
"""Bootstrap samples of the rounds, for the range of a ratio."""


class BurstPlan(NamedTuple):
    """The batches that start at once, and the others, each of which starts as soon as another has ended."""

    running: tuple[int, ...]
    queued: tuple[int, ...]


class BurstTimes(NamedTuple):
    """A burst in each mode, in milliseconds."""

    requests: int
    rounds_ms: Mapping[Sharing, Sequence[float]]
    predicted_ms: Mapping[Sharing, float]
    plans: Mapping[Sharing, BurstPlan]

    @property
    def measured_ms(self) -> dict[Sharing, float]:
        """The medians of the rounds."""
        return {mode: median(series) for mode, series in self.rounds_ms.items()}

    def ratio(self, mode: Sharing) -> float:
        """A mode over the better of serial and parallel."""
        found = self.measured_ms
        return found[mode] / min(found["queue"], found["together"])

    def ratio_range(self, mode: Sharing) -> tuple[float, float]:
        """The 95 % bootstrap interval of the ratio, over rounds (Efron and Tibshirani, 1993)."""
        series = np.array([self.rounds_ms[each] for each in (mode, "queue", "together")])
        drawn = np.random.default_rng(5).integers(0, series.shape[1], (DRAWS, series.shape[1]))
        own, queue, together = (np.median(each[drawn], axis=1) for each in series)
        low, high = np.quantile(own / np.minimum(queue, together), (0.025, 0.975))
        return float(low), float(high)


class StreamTimes(NamedTuple):
    """Milliseconds per batch of a stream with 1, 2, … workers."""

    rounds_ms: Sequence[Sequence[float]]
    """By workers, round by round."""
    predicted_ms: Sequence[float]

    @property
    def measured_ms(self) -> list[float]:
        """The medians of the rounds."""
        return [median(series) for series in self.rounds_ms]

    @property
    def spread(self) -> float:
        """Half of the middle half of the rounds, relative to their median: the mean over the numbers of workers."""
        halves = [np.subtract(*np.quantile(series, (0.75, 0.25))) / 2 / median(series) for series in self.rounds_ms]
        return float(np.mean(halves))

    @property
    def best(self) -> tuple[int, int]:
        """The best number of workers, measured and predicted: the smallest with about the least time per batch."""
        measured, predicted = (
            1 + int(np.argmax(np.array(each_ms) <= TIE * min(each_ms)))
            for each_ms in (self.measured_ms, self.predicted_ms)
        )
        return measured, predicted

    @property
    def loss(self) -> float:
        """By which fraction a batch takes longer with the predicted number of workers than with the best one."""
        return self.measured_ms[self.best[1] - 1] / min(self.measured_ms) - 1


class ModelBursts(NamedTuple):
    """What was measured of a model."""

    name: str
    model: DeviceModel
    times: SharingTimes
    fits: SharingFits
    bursts: list[BurstTimes]
    stream: StreamTimes


class BurstBench(NamedTuple):
    """Workers of one model, on which bursts are timed."""

    workers: SharedWorkers

    async def burst_ms(self, policy: Hybrid, model: DeviceModel, count: int) -> float:
        """Milliseconds until the last of `count` requests that arrive at once has ended. The first idle worker is used,
        as in a server."""
        costs_ns = [round(each * NS_PER_MS) for each in model.latencies_ms]
        waiting, running, now_ns = count, dict[ReplicaId, int](), 0
        visits, decide = [make_visit(number) for number in range(count)], deciding(policy)
        idle = [ReplicaId(number) for number in range(self.workers.count)]
        began_s = time.perf_counter()
        while waiting or running:
            now_ns += 1
            while waiting and idle:
                there = [SharedBatch("stage", size) for size in running.values()]
                device = AssumedDevice(model.batch, costs_ns, model.law, model.largest, len(idle), there)
                size = decide(now_ns, AssumedQueue(visits[:waiting]), device).count
                if not size:
                    break
                worker = heappop(idle)
                running[worker] = size
                self.workers.run(worker, size)
                waiting -= size
            ended = await self.workers.ended()
            del running[ended]
            heappush(idle, ended)
        return (time.perf_counter() - began_s) * 1e3


def device_model(stream: SharedStream, fits: SharingFits, batch: int, seconds: float) -> DeviceModel:
    """The beliefs of the policy about the model on the cores of this machine: durations of batches that run alone, as
    served, and the law."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < batch] + [batch]
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(3):
        for size, series in found.items():
            series.append(stream.runner.run(stream.workers.stream_ns(1, seconds, size)) / NS_PER_MS)
    rising = np.maximum.accumulate([median(series) for series in found.values()])
    latencies_ms = tuple(map(float, np.interp(range(batch + 1), [0, *sizes], [0.0, *rising])))
    sharing = fits.fits[fits.best].sharing
    return DeviceModel(latencies_ms, sharing.law, sharing.demand(batch), WORKERS)


def policies(fits: SharingFits) -> dict[Sharing, Hybrid]:
    """The policies of all modes. Requests are split only if the predicted gain is larger than the error of the law."""
    return {mode: Hybrid(sharing=mode, gain_min=min(1.0, fits.error)) for mode in MODES}


def planned(model: DeviceModel, count: int, policy: Hybrid) -> BurstPlan:
    """The batches into which the policy divides a burst."""
    queued = best_split(model, count, policy.sharing, gain_min=policy.gain_min).queued
    return BurstPlan(tuple(batches_of(count - queued, model.batch)), tuple(batches_of(queued, model.batch)))


def served(
    stream: SharedStream, model: DeviceModel, fits: SharingFits, seconds: float, budget_s: float
) -> tuple[list[BurstTimes], StreamTimes]:
    """All bursts in all modes, and streams, round after round, until the time is over. A burst of which two modes make
    the same batches is measured once for both."""
    counts, chosen = [round(each * model.batch) for each in BURSTS], policies(fits)
    plans = {(count, mode): planned(model, count, chosen[mode]) for count in counts for mode in MODES}
    modes = {plan: cell[1] for cell, plan in reversed(plans.items())}  # the first of those that make the same
    took: dict[BurstPlan, list[float]] = {plan: [] for plan in modes}
    streams: dict[int, list[float]] = {workers: [] for workers in range(1, WORKERS + 1)}
    bench, chance = BurstBench(stream.workers), Random(7)

    async def one_round() -> None:
        cells: list[BurstPlan | int] = [*took, *streams]
        chance.shuffle(cells)
        for cell in cells:
            if isinstance(cell, int):
                streams[cell].append(await stream.workers.stream_ns(cell, seconds) / NS_PER_MS / cell)
            else:
                took[cell].append(await bench.burst_ms(chosen[modes[cell]], model, sum(cell.running + cell.queued)))

    end_s = time.monotonic() + budget_s
    while len(streams[1]) <= ROUNDS_MIN or time.monotonic() < end_s:
        stream.runner.run(one_round())
    bursts = []
    for count in counts:
        made = {mode: plans[count, mode] for mode in MODES}
        predicted = {mode: executed_ms(model, *plan, len(plan.running)) for mode, plan in made.items()}
        bursts.append(BurstTimes(count, {mode: took[plan][1:] for mode, plan in made.items()}, predicted, made))
    workers = np.arange(1.0, WORKERS + 1)
    said = model.solo_ms * model.law.among_equals(model.largest, workers) / workers
    return bursts, StreamTimes([series[1:] for series in streams.values()], list(map(float, said)))


def bench_model(name: str, path: Path, batch: int, seconds: float, budget_s: float) -> ModelBursts:
    """Law of interference, and bursts of one model."""
    with shared_stream(examine(path), {}, batch, WORKERS) as stream:
        times = measure_sharing(
            Contender(path, batch, {}), together=WORKERS, seconds=seconds, passes=PASSES, stream=stream
        )
        fits = fit_all_laws(times, "benchmarks.sharing")
        model = device_model(stream, fits, batch, seconds)
        say(
            f"{name}: {model.solo_ms:.4g} ms alone; S = {', '.join(f'{at:.3g}' for _, at in times.points)}; {fits.best}"
        )
        bursts, streamed = served(stream, model, fits, seconds, budget_s)
    say(f"{name}: {len(streamed.rounds_ms[0])} rounds")
    return ModelBursts(name, model, times, fits, bursts, streamed)


def law_table(found: Sequence[ModelBursts]) -> str:
    """S(k), measured and as each law says."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        rows.append(
            (each.name, each.times.full_batch, "measured", "", "", *(factor for _, factor in each.times.points))
        )
        counts = np.arange(1.0, WORKERS + 1)
        for form, fit in each.fits.fits.items():
            said = fit.sharing.law.among_equals(fit.sharing.demand(each.times.full_batch), counts)
            name = f"{form}{' (chosen)' if form == each.fits.best else ''}"
            errors = f"{fit.mape:.1%}", f"{each.fits.held_out[form]:.1%}"
            rows.append((each.name, each.times.full_batch, name, *errors, *map(float, said)))
    columns = ("model", "batch", "law", "mean error", "at passes left out")
    return table((*columns, *(f"S({k})" for k in range(1, WORKERS + 1))), rows)


def burst_table(found: Sequence[ModelBursts]) -> str:
    """Bursts in each mode, measured and predicted."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        for burst in each.bursts:
            ends: list[object] = []
            for mode in MODES:
                ends += [burst.measured_ms[mode], burst.predicted_ms[mode]]
            for mode in ("hybrid", "resident"):
                low, high = burst.ratio_range(mode)
                ends += [len(burst.plans[mode].running), f"{burst.ratio(mode):.3f} ({low:.2f} to {high:.2f})"]
            rows.append((each.name, burst.requests, *ends))
    columns = [name for mode in MODES for name in (f"{NAMES[mode]}, ms", "predicted")]
    ratios = [name for mode in ("hybrid", "resident") for name in (f"{mode}: at a time", "over the better of the two")]
    return table(("model", "requests", *columns, *ratios), rows)


def stream_table(found: Sequence[ModelBursts]) -> str:
    """What a batch of a stream costs with each number of workers."""
    rows: list[tuple[object, ...]] = []
    for each in found:
        measured, predicted = each.stream.best
        spread = f"± {each.stream.spread:.1%}"
        rows.append((each.name, "measured, ms per batch", *each.stream.measured_ms, measured, spread))
        rows.append((each.name, "predicted", *each.stream.predicted_ms, predicted, ""))
    return table(("model", "workers", *map(str, range(1, WORKERS + 1)), "best", "half of the rounds within"), rows)


def concurrency_verdict(each: ModelBursts) -> str:
    """The best number of workers, measured and by the law."""
    measured, predicted = each.stream.best
    holds = "within one" if abs(measured - predicted) <= 1 else "**more than one away**"
    return (
        f"- {each.name}: best concurrency {measured} measured, {predicted} by the law: {holds}; with the predicted one "
        f"a batch takes {each.stream.loss:.1%} longer than with the best."
    )


def burst_verdicts(found: Sequence[ModelBursts], mode: Sharing) -> list[str]:
    """Whether a mode is late anywhere, and early somewhere."""
    bursts = {f"{each.name} with {burst.requests} requests": burst for each in found for burst in each.bursts}
    late = [f"{name} ({burst.ratio(mode):.3f})" for name, burst in bursts.items() if burst.ratio(mode) > NO_LATER]
    sure = [name for name, burst in bursts.items() if burst.ratio_range(mode)[0] > NO_LATER]
    name = min(bursts, key=lambda each: bursts[each].ratio(mode))
    least, (low, high) = bursts[name].ratio(mode), bursts[name].ratio_range(mode)
    same = sum(burst.plans[mode] in (burst.plans["queue"], burst.plans["together"]) for burst in bursts.values())
    first = f"- {mode} takes at most {NO_LATER:.2f} × the time of the better of serial and parallel: "
    if late:
        first += f"**not** in {len(late)} of {len(bursts)} bursts: {', '.join(late)}; "
        first += f"beyond the noise of the rounds in {len(sure)}."
    else:
        first += f"yes, in all {len(bursts)} bursts."
    first += f" In {same} bursts it makes the same batches as one of the two, so both have the same measurement."
    early = "yes" if least <= EARLIER else "**no**"
    return [
        first,
        f"- {mode} is at least 3 % faster in one burst: {early}; its least ratio is {least:.3f} ({name}; {low:.2f} to "
        f"{high:.2f} over the rounds).",
    ]


def verdicts(found: Sequence[ModelBursts]) -> str:
    """What was wanted, and what came out."""
    lines = [concurrency_verdict(each) for each in found]
    lines += [*burst_verdicts(found, "hybrid"), *burst_verdicts(found, "resident")]
    pairs = [
        (burst.measured_ms[mode], burst.predicted_ms[mode]) for each in found for burst in each.bursts for mode in MODES
    ]
    close = sum(abs(predicted / measured - 1) <= WITHIN for measured, predicted in pairs)
    share = f"{close / len(pairs):.0%}"
    lines.append(
        f"- {close} of {len(pairs)} predicted ends are within {WITHIN:.0%} of the measured ones: {share}, wanted 80 %."
    )
    return "\n".join(lines)


def figure_of(found: Sequence[ModelBursts]) -> Figure:
    """S(k) of each model, measured and by the chosen law."""
    counts = tuple(float(count) for count in range(1, WORKERS + 1))
    fitted = [each.model.law.among_equals(each.model.largest, np.array(counts)) for each in found]
    panels = tuple(
        slowdown_panel(each.name, counts, [y for _, y in each.times.points], said)
        for each, said in zip(found, fitted, strict=True)
    )
    return Figure(
        name="slowdown",
        title="How many times as long as alone a batch takes",
        x_label="workers that run batches",
        panels=panels,
        alt="Slowdown of a batch by the number of workers that run together, measured and fitted.",
    )


def slowdown_panel(name: str, counts: tuple[float, ...], measured: Sequence[float], fitted: Iterable[float]) -> Panel:
    """S(k) of one model."""
    series = (
        Series("measured", counts, tuple(measured), "points"),
        Series("fitted", counts, tuple(map(float, fitted))),
        Series("one after the other", counts, counts),
    )
    return Panel(y_label=name.replace(" ", "\n"), series=series)


def text_of(found: Sequence[ModelBursts]) -> str:
    """The page."""
    rounds = ", ".join(f"{each.name} {len(each.stream.rounds_ms[0])}" for each in found)
    about = (
        f"{WORKERS} workers of a server's backend, whose cores are only reserved, on {len(usable_cpus())} cores; each "
        f"worker has a thread for every core. First, S(k) was measured in {PASSES} passes, each of which was left out "
        "once to choose the law, and the durations of batches that run alone. All other figures, with which "
        "predictions are compared, were measured afterwards; they are medians of rounds "
        f"({rounds}), each of which has all cells in a random order. Predicted: processor sharing by the law, with "
        "the batches that the policy made. `hybrid` is PALDIA's split, `resident` ours; both fall back to serial or "
        "parallel if the predicted gain is smaller than the error of the law. Ranges: 95 % of "
        f"{DRAWS:,} bootstrap samples of the rounds."
    )
    parts = [about]
    for title, names in (("Models used in development", MODELS), ("Held-out models", CHECKED)):
        some = [each for each in found if each.name in names]
        if some:
            parts += [f"## {title}", verdicts(some), law_table(some), burst_table(some), stream_table(some)]
    return "\n\n".join(parts)


class BurstModel(NamedTuple):
    """A model, and its largest batch."""

    write: Callable[[Path], Path]
    batch: int


MODELS: Final[Mapping[str, BurstModel]] = {
    "squeezenet": BurstModel(lambda folder: small(folder, "squeezenet", 112), 8),
    "densenet": BurstModel(lambda folder: small(folder, "densenet121", 64), 4),
    "perceptron": BurstModel(lambda folder: perceptron(folder, width=1024, layers=8), 8),
    "convolutions": BurstModel(lambda folder: convolutions(folder, channels=16, layers=6, pixels=32), 16),
    "narrow perceptron": BurstModel(lambda folder: perceptron(folder, width=512, layers=12), 16),
}
CHECKED: Final[Mapping[str, BurstModel]] = {
    "wide perceptron": BurstModel(lambda folder: perceptron(folder, width=2048, layers=3), 32),
    "deep convolutions": BurstModel(lambda folder: convolutions(folder, channels=24, layers=12, pixels=48), 6),
}
"""Other shapes, sizes and batches, measured only for the page."""


def main() -> None:
    """Measure, and publish."""
    parser = arguments(__doc__, seconds=0.2, quick=0.05)
    every = {**MODELS, **CHECKED}
    parser.add_argument("--models", default=",".join(every), help="which, with commas between them (default all)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of rounds for each model (default 20)")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = []
    with workspace(given.keep) as folder:
        for name in given.models.split(","):
            chosen = every[name]
            found.append(bench_model(name, chosen.write(folder), chosen.batch, given.seconds, given.budget))
    publish("sharing", "Workers that share all cores", text_of(found), [figure_of(found)], write=not given.no_write)


if __name__ == "__main__":
    main()
