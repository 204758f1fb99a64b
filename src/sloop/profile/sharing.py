"""Measures how workers of a model share the cores of this machine, or a GPU: the slowdown S(k), which is the duration
of a batch while k workers run batches, divided by its duration alone.

On cores, each worker is a process of its own, as in a server, that may use all cores
(`sloop.vocabulary.Slot.is_capped` is false): it has as many threads as there are cores, and no CPU quota. For every k,
the first k workers run batches back to back for some seconds; when a batch ends, its worker gets the next one at once,
so that k batches run all the time. Every pass measures all k, every second pass in the opposite order. Because the
speed of a machine varies over time, the durations of a pass are divided by those of one worker alone in the same pass.

On cores, `sloop profile` measures workers of a server's backend (`sloop.serve.shared_workers`). The workers of this
module (`TimedWorkers`) have only a socket around the model. They are used on GPUs, where each worker has one core and
no share limits it, for pairs, and for Python models that make their own inputs.

With `beside`, one worker of the model also runs beside one worker of another model, which gives the slowdown of this
pair, for the model and for the other one.

Source: PALDIA, specification sections 2.1.1 (S) and 7.1 (on CPUs).
"""

import contextlib
import platform
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from msgspec import Struct, structs

from sloop.cuda import GpuPlace
from sloop.errors import InputError, MachineError
from sloop.machine import capacity, hardware_name
from sloop.profile.fit import SHARING_FORMS, SharingForm, SlowdownFit, fit_sharing, held_out_error
from sloop.profile.measure import PASSES, TimedBatch, order_of, timed_process
from sloop.profile.measured_process import SILENCE_S, MeasuredProcess
from sloop.profile.timed_process import LAST, BatchReady, LoadReport
from sloop.shared_memory import SharedMemory
from sloop.units import NS_PER_S

TOGETHER: Final = 6
"""The most workers that are measured together."""
SECONDS: Final = 1.0
"""The measured time for each number of workers in each pass."""
RUNS_MIN: Final = 3
"""The fewest batches of each worker in one pass, for each number of workers; one more warms up."""


class SharingTimes(NamedTuple):
    """What was measured of a model, and of the pair with another one."""

    full_batch: int
    alone_ms: float
    """The mean duration of a batch that runs alone; the median over the passes."""
    points: tuple[tuple[float, float], ...]
    """The slowdown by the number of workers, from 1; the median over the passes."""
    passes: tuple[tuple[tuple[int, float], ...], ...]
    """The same, pass by pass."""
    software: str
    pair: "PairTimes | None" = None


class PairTimes(Struct, frozen=True):
    """One worker of a model beside one worker of another model: the slowdown of each."""

    beside: str
    """The other model's file."""
    beside_batch: int
    slowdown: float
    """Of the model."""
    beside_slowdown: float
    """Of the other one."""


class Contender(NamedTuple):
    """A model that runs: its file, its largest batch, and one row's shape for inputs with open dimensions."""

    file: Path
    batch: int
    shapes: Mapping[str, tuple[int, ...]]


class BatchStream(Protocol):
    """Workers of a model that run batches back to back."""

    def mean_ns(self, workers: int, seconds: float) -> float:
        """The mean duration of a batch while the first `workers` run batches, for about `seconds`."""
        ...

    def software(self) -> str:
        """Name and version of the library that runs the model; empty if it is not known. Asked last: no batch can run
        afterwards."""
        ...


class SharingFits(NamedTuple):
    """The laws that were fitted to the points, by name, and the name of the one that predicts best."""

    fits: Mapping[SharingForm, SlowdownFit]
    best: SharingForm
    held_out: Mapping[SharingForm, float] = MappingProxyType({})
    """By law, its mean relative error at passes that it was not fitted to (`held_out_error`); empty after a single
    pass."""

    @property
    def error(self) -> float:
        """The mean relative error of the best law, where possible at passes that it was not fitted to."""
        return self.held_out.get(self.best, self.fits[self.best].mape)


def measure_sharing(
    model: Contender,
    *,
    beside: Contender | None = None,
    together: int = TOGETHER,
    seconds: float = SECONDS,
    passes: int = PASSES,
    progress: Callable[[int, int, str], None] = lambda done, of, now: None,
    on: GpuPlace | None = None,
    stream: BatchStream | None = None,
) -> SharingTimes:
    """Measure S(1) … S(`together`); takes about (`together` + 3) × `seconds` × `passes`, and the loading of all
    workers. `progress` is called with the number of finished and of all cells. `on` is the GPU on which they run, if
    any. `stream` replaces the workers of this module in the measurement of S(k), but not in that of the pair; it has
    `together` workers.

    InputError for a model that cannot be run with this batch, or fewer than two workers; MachineError if a process
    dies or is silent.
    """
    if together < 2:
        what = f"{together} workers are to run together"
        raise InputError(f"{what}; a slowdown needs at least 2", help="for example --together 6")
    threads = ceil(capacity().cores) if on is None else 1
    found: list[dict[int, float]] = []
    alone_ns: list[float] = []
    pairs: list[tuple[float, float]] = []
    cells = passes * (together + (3 if beside else 0))
    with ExitStack() as stack:
        used = stream or TimedWorkers([stack.enter_context(running(model, threads, on)) for _ in range(together)])
        both = [stack.enter_context(running(each, threads, on)) for each in (model, beside)] if beside else []
        for number in range(passes):
            means_ns: dict[int, float] = {}
            counts = range(1, together + 1) if number % 2 == 0 else range(together, 0, -1)
            for count in counts:
                means_ns[count] = used.mean_ns(count, seconds)
                done = number * (cells // passes) + len(means_ns)
                progress(done, cells, f"{count} together: {means_ns[count] / 1e6:.3g} ms")
            alone_ns.append(means_ns[1])
            found.append({count: means_ns[count] / means_ns[1] for count in sorted(means_ns)})
            if both:
                pairs.append(_pair_slowdowns(both[0], both[1], seconds))
                progress((number + 1) * (cells // passes), cells, f"pair: {pairs[-1][0]:.3g} times as long")
        software = used.software()
    pair = None
    if beside is not None:
        own, others = (median(each) for each in zip(*pairs, strict=True))
        pair = PairTimes(str(beside.file), beside.batch, own, others)
    points = tuple((float(count), median(each[count] for each in found)) for count in range(1, together + 1))
    each_pass = tuple(tuple(each.items()) for each in found)
    return SharingTimes(model.batch, median(alone_ns) / 1e6, points, each_pass, software, pair)


def _pair_slowdowns(one: "RunningWorker", other: "RunningWorker", seconds: float) -> tuple[float, float]:
    """The slowdowns of the batches of two workers that run beside each other."""
    alone_ns = [_means_ns([[worker]], seconds)[0] for worker in (one, other)]
    both_ns = _means_ns([[one], [other]], seconds)
    return both_ns[0] / alone_ns[0], both_ns[1] / alone_ns[1]


def fit_all_laws(found: SharingTimes, source: str, on: GpuPlace | None = None) -> SharingFits:
    """Fit every law to a measurement, and choose the best: the law with the least error at passes that it was not
    fitted to, of equal ones the first. After a single pass, no pass can be left out. Then the law with the least mean
    error is the best, except the table, which repeats its points. The law is for replicas without caps on as many cores
    as this process may use, or on a GPU."""
    software = ", ".join(filter(None, (found.software, f"Python {platform.python_version()}", platform.system())))
    date, cores = datetime.now(UTC).date().isoformat(), capacity().cores if on is None else 0.0
    hardware = hardware_name() if on is None else on.hardware
    fits: dict[SharingForm, SlowdownFit] = {}
    for form in SHARING_FORMS:
        fit = fit_sharing(
            found.points,
            full_batch=found.full_batch,
            form=form,
            source=source,
            hardware=hardware,
            software=software,
            date=date,
        )
        fits[form] = fit._replace(sharing=structs.replace(fit.sharing, cores=cores))
    if len(found.passes) > 1:
        held_out = {form: held_out_error(found.passes, form) for form in SHARING_FORMS}
        return SharingFits(fits, min(SHARING_FORMS, key=lambda form: held_out[form]), held_out)
    parametric = [form for form in SHARING_FORMS if form != "count"]
    return SharingFits(fits, min(parametric, key=lambda form: fits[form].mape))


# Workers


class RunningWorker:
    """A process that runs batches of one size when it is told to."""

    def __init__(self, process: MeasuredProcess, sock: socket.socket, shared: SharedMemory | None) -> None:
        self.process, self.sock = process, sock
        self._answers = process.answers(BatchReady | LoadReport)
        self.batch = TimedBatch(sock, shared, next(self._answers))

    def begin(self) -> None:
        """Send the inputs of a batch. MachineError if the process has died."""
        try:
            self.batch.begin()
        except OSError as error:
            raise self._died() from error

    def receive(self) -> int | None:
        """Read the outputs that have arrived. Returns the duration of the batch in ns when all of them have.
        MachineError if the process has died."""
        try:
            return self.batch.receive()
        except OSError as error:
            raise self._died() from error

    def end(self) -> LoadReport:
        """End the process; returns its report."""
        self.sock.sendall(LAST)
        report: LoadReport = next(self._answers)
        return report

    def _died(self) -> MachineError:
        return self.process.died("while others ran beside it")


class TimedWorkers:
    """A `BatchStream` of workers that have only a socket around the model, and nothing of a server."""

    def __init__(self, workers: Sequence[RunningWorker]) -> None:
        self._workers = workers

    def mean_ns(self, workers: int, seconds: float) -> float:
        """See `BatchStream`."""
        return _means_ns([self._workers[:workers]], seconds)[0]

    def software(self) -> str:
        """See `BatchStream`."""
        return self._workers[0].end().software


@contextlib.contextmanager
def running(model: Contender, threads: int, on: GpuPlace | None = None) -> Iterator[RunningWorker]:
    """A worker that has loaded its model with this many threads and run it once. It ends with the context."""
    with timed_process(str(model.file), threads, on=on) as (process, sock, shared):
        process.order(order_of(model.file, threads, (model.batch,), model.shapes, on))
        yield RunningWorker(process, sock, shared)


def _means_ns(groups: Sequence[Sequence[RunningWorker]], seconds: float) -> list[float]:
    """The mean duration of a batch of each group, while all workers of all groups run batches back to back.

    The first batch of each worker warms up, and no batch counts that ends when another worker has stopped.
    """
    workers = [worker for group in groups for worker in group]
    runs_ns: dict[socket.socket, list[int]] = {worker.sock: [] for worker in workers}
    end_ns = perf_counter_ns() + round(seconds * NS_PER_S)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.sock, selectors.EVENT_READ, worker)
            worker.begin()
        while len(min(runs_ns.values(), key=len)) <= RUNS_MIN or perf_counter_ns() < end_ns:
            for worker, took_ns in _ended(selector):
                runs_ns[worker.sock].append(took_ns)
                worker.begin()
        waiting = set(runs_ns)
        while waiting:
            waiting -= {worker.sock for worker, _ in _ended(selector)}
    return [fmean(took_ns for worker in group for took_ns in runs_ns[worker.sock][1:]) for group in groups]


def _ended(selector: selectors.BaseSelector) -> list[tuple[RunningWorker, int]]:
    """Wait for outputs; the workers whose batch has ended, with its duration in ns. MachineError for a worker that has
    died, or if none answers."""
    ready = selector.select(SILENCE_S)
    if not ready:
        what = f"no batch has ended for {SILENCE_S:g} s"
        raise MachineError(what, help="measure smaller batches, or fewer workers together")
    found: list[tuple[RunningWorker, int]] = []
    for key, _ in ready:
        worker: RunningWorker = key.data
        took_ns = worker.receive()
        if took_ns is not None:
            found.append((worker, took_ns))
    return found
