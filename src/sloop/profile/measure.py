"""Measures a model on this machine: batch sizes × core counts in several passes, start-up time, memory.

A run is timed as a server sees it: from sending the inputs to a process until the outputs are back. Each core count is
measured in a new process, so that loading and memory are clean and threads start inside their cores. The speed of a
machine varies over time, so every cell may be measured in several passes spread over the whole measurement, and the
profile keeps each pass. Meanwhile a stand-in for edge and clients shares the machine (`service_load`),
and runs pause now and then as they do below saturation, because a process that has just slept starts slower.

How long it takes is known beforehand: the cells of a pass share `CELLS_S` seconds, and larger batches or fewer cores of
a slow model are left out if they would take longer.

The caller chooses how a process is confined to cores (`Limit`); the default is CPU affinity, for whole cores.
"""

import contextlib
import os
import platform
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import Final, NamedTuple

from msgspec import Struct, structs

from sloop.cuda import GpuPlace, MpsDaemon
from sloop.errors import InputError, MachineError
from sloop.machine import capacity, hardware_name, usable_cpus
from sloop.profile import operators
from sloop.profile.examine import ExaminedModel
from sloop.profile.fit import Percentile, Point, fit_all, fit_table, points_p50
from sloop.profile.measured_process import SILENCE_S, MeasuredProcess, measured_process
from sloop.profile.passes import in_service_samples
from sloop.profile.profile import (
    SUFFIX,
    FirstProfile,
    Latency,
    Pass,
    Profile,
    Sample,
    SizeLatency,
    Startup,
    digest_of_model,
    is_of,
    load_profile,
    path_beside,
    sample_of,
    save_profile,
    size_of_model,
)
from sloop.profile.row_sizes import size_of
from sloop.profile.service_load import ServiceLoad, service_load
from sloop.profile.timed_process import (
    LAST,
    RUN,
    STOP,
    BatchReady,
    LoadReport,
    TimingOrder,
    receive_into,
)
from sloop.shared_memory import SHARED_BYTES_MIN, SharedMemory, write_tensors
from sloop.units import NS_PER_MS, NS_PER_S

PROFILES: Final = "profiles"
"""The folder, in a state folder, of profiles of models whose own folder cannot be written."""
BATCHES: Final = (1, 2, 4, 8)
BATCH_MAX: Final = 64
"""The largest batch that is tried on its own account."""
GAIN_MIN: Final = 1.1
"""Batches beyond `BATCHES` are doubled while each gives at least this factor more rows per second."""
PASSES: Final = 3
"""Passes where ranges or laws follow from the differences between them."""
CELLS_S: Final = 9.0
"""Seconds for all cells of a pass. With starts and a pass in a server (`sloop.demo.service_pass`), a profile takes less
than 30."""
CELL_S_MIN, CELL_S_MAX = 0.1, 0.75
"""Measured seconds per cell and pass. More would say little new about the moment in which the pass happens."""
CELL_COST: Final = 1.3
"""Time of a cell with warm-up and pauses, per measured time; `CELL_RUNS` runs more at least."""
CELL_RUNS: Final = 2
START_S: Final = 1.0
"""Until a process measures: its start, the libraries, the model."""
WARM_MIN, WARM_MAX = 3, 50
WARM_SHARE: Final = 0.2
"""Share of a cell's time that warm-up runs may use."""
RUNS_MIN, RUNS_MAX = 20, 2000
"""Of a cell in all passes together, and in one pass."""
RUNS_FEW: Final = 3
"""Of a cell in a pass at least, where the time for all cells is limited: more batch sizes tell more than more runs."""
PAUSES: Final = (0.0, 0.0, 0.5, 1.0)
"""Pauses between runs, used in turn, as multiples of a run's duration; the replica is busy 73 % of the time. A process
with a fraction of a core gets none: a pause refills its CPU quota, and on a quarter of a core a small model would seem
to serve 1.8 times as many requests as it can."""
SIZES_S: Final = 9.0
"""Seconds of a pass for all cells of the sizes of rows beside the typical one."""
SIZE_BATCHES: Final = 3
"""How many batch sizes are measured of each: a batch of one, the largest, and one between. What they take grows with
the rows as that of typical rows does."""
SOCKET_BYTES: Final = 4 << 20
"""Requested size of the send buffer, the same as for a replica's socket."""
BRIEF_S: Final = 10.0
"""For the cells of `measure_briefly`; starting processes and loading the model come on top."""
BRIEF_EACH_S: Final = 3.0
"""The least for each of several models that share `BRIEF_S`."""
BRIEF_CELL_S: Final = 0.15
BRIEF_SILENCE_S: Final = 60.0
"""A model whose single pass takes longer cannot be measured briefly."""

Limit = Callable[[int, float], AbstractContextManager[object]]
"""`limit(pid, cores)` confines a process to `cores` while the context is open."""
Progress = Callable[[float, Sample], None]
"""Called with about how many seconds the cells that are left will take, in all passes, and the newest sample."""
Enough = Callable[["CellRuns"], bool]
"""Whether a process that has measured this cell need not measure larger batches."""
ServicePass = Callable[[Sequence[Sample]], Pass | None]
"""Serves the model for some seconds, at rates derived from these samples, and returns the batch durations."""


class CellRuns(NamedTuple):
    """Durations of consecutive runs of one batch size on one core count."""

    batch: int
    cores: float
    runs_ns: list[int]
    beside_cores: float = 0.0
    """What the stand-in for edge and clients took on average meanwhile."""


def default_cores() -> tuple[float, ...]:
    """1, 2, 4, … up to all cores of this machine, which may be a fraction."""
    cores = capacity().cores
    return (*(float(1 << power) for power in range(ceil(cores).bit_length()) if 1 << power < cores), cores)


@contextlib.contextmanager
def by_affinity(pid: int, cores: float) -> Iterator[None]:
    """Confine a process to whole cores, or to all cores of a machine that its control group limits to a fraction.
    InputError for other fractions; MachineError if the system cannot."""
    if cores != int(cores) and cores != capacity().cores:
        raise InputError(
            f"{cores:g} cores need a CPU quota", help="measure whole cores, or run as a user who may set one"
        )
    try:
        os.sched_setaffinity(pid, usable_cpus()[: ceil(cores)])
    except OSError as error:
        what = f"cannot confine process {pid} to {cores:g} cores: {error.strerror}"
        raise MachineError(what, help="measure as the user who runs the process") from error
    yield


def measure(  # noqa: PLR0913  # one for each thing that may be chosen
    model_path: Path,
    *,
    file: Path | None = None,
    batches: Sequence[int] | None = BATCHES,
    cores: Sequence[float] | None = None,
    seconds: float | None = None,
    passes: int = 1,
    shapes: dict[str, tuple[int, ...]] | None = None,
    limit: Limit = by_affinity,
    progress: Progress = lambda left_s, sample: None,
    percentile: Percentile = "p99",
    alone: bool = False,
    in_service: ServicePass | None = None,
    on: GpuPlace | None = None,
    size: int = 0,
) -> Profile:
    """Measure the profile of a model on this machine; takes about `measuring_s`.

    `file` is what is opened instead of the model's own file (`sloop.profile.examine`). `batches` are the sizes; None:
    `BATCHES`, and larger ones while each gives a tenth more rows per second. `seconds` is for each cell in each pass;
    None: its part of `CELLS_S`. If both are None, cells are left out that would take longer together. `shapes` gives
    one row's shape for inputs with open dimensions, unless the model has an example. `percentile` is the latency that
    `latency_ms` is fitted to. `alone` leaves out the stand-in for edge and clients. `in_service`, if given, is called
    after each pass with its samples; the pass it may return replaces measured cells (`sloop.profile.passes`). `on` is
    the GPU on which the model runs, if any; then the cores are those of its process. `size` is that of the rows, if the
    model has rows of other sizes. InputError for a model or choice
    that cannot be measured, MachineError if a process dies.
    """
    if passes < 1:
        raise InputError(f"passes are {passes}; at least 1 is needed", help="for example --passes 3")
    effort = _Effort(
        None if batches is None else checked_batches(batches),
        checked_cores(default_cores() if cores is None else cores),
        seconds,
        passes,
        is_bounded=batches is None and seconds is None,
        least=len(BATCHES) if batches is None else 0,
    )
    measured = _Measurement(file or model_path, shapes or {}, effort, limit, progress, on)
    made: list[Pass] = []
    for _ in range(passes):
        made.append(measured.one_pass(alone=alone))
        if in_service is not None and (extra := in_service(made[-1].samples)) is not None:
            made.append(extra)
    source = f"sloop profile {model_path.name}{' --device cuda' if on else ''}, {percentile}"
    profile = _profile(model_path, measured.pooled(), made, measured.reports, percentile, source, shapes or {}, size)
    return profile if on is None else _on_gpu(profile, on, measured.reports)


def measure_sizes(  # noqa: PLR0913  # one for each thing that may be chosen
    profile: Profile,
    file: Path,
    rows: Mapping[int, Mapping[str, tuple[int, ...]]],
    *,
    seconds: float | None = None,
    passes: int = 1,
    limit: Limit = by_affinity,
    progress: Progress = lambda left_s, sample: None,
    alone: bool = False,
    on: GpuPlace | None = None,
) -> Profile:
    """The profile with what rows of further sizes take, each with these shapes of its inputs; takes about
    `measuring_sizes_s`. It says of which size its own rows are.

    They are measured without a server, on its core counts and with `SIZE_BATCHES` batch sizes. In each pass, its
    typical rows are measured beside them, because a machine is slow for seconds at a time. The profile gets the latency
    of its typical rows times the ratio of both medians: the P99 of a few runs says little about that in service. A
    batch that is too slow, or too much for the machine, is left out. The memory becomes what the largest rows take.
    Other arguments and errors as for `measure`.
    """
    cores = tuple(sorted({sample.cores for sample in profile.samples}))
    effort = _Effort(
        _few_batches(profile.max_batch),
        cores,
        seconds,
        passes,
        cells_s=SIZES_S / len(rows),
        is_bounded=seconds is None,
        least=1,
    )
    left_s = measuring_sizes_s(len(rows), cores, seconds, passes)
    each_s = left_s / (passes * (1 + len(rows)))

    def further(now_s: float, sample: Sample) -> None:
        progress(left_s, sample)

    typical = _Measurement(file, profile.shapes, effort, limit, further, on)
    others = {size: _Measurement(file, shapes, effort, limit, further, on) for size, shapes in rows.items()}
    for measured in [typical, *others.values()] * passes:
        left_s -= each_s
        measured.one_pass(alone=alone)
    found = [SizeLatency(size, _as_typical(profile, typical.pooled(), own.pooled())) for size, own in others.items()]
    reports = [report for measured in others.values() for report in measured.reports]
    most_bytes = max(report.memory_bytes for report in reports) + profile.resize_bytes
    return structs.replace(
        profile,
        sizes=tuple(sorted((*profile.sizes, *found), key=lambda each: each.size)),
        memory_bytes=max(profile.memory_bytes, most_bytes),
        device_memory_bytes=max(profile.device_memory_bytes, *(report.device_memory_bytes for report in reports)),
    )


def _as_typical(profile: Profile, typical: Sequence[Sample], others: Sequence[Sample]) -> Latency:
    """The latency of the profile times the ratio of the medians of these other rows and of typical rows beside them.
    Core counts on which a batch size of the others was not measured have the ratio of the nearest one that has it."""
    served_ms, alone_ms = profile.latency_ms.latency_ms, fit_table(points_p50(typical)).params.latency_ms
    ratios: dict[int, dict[float, float]] = {}
    for batch, cores, median_ms in points_p50(others):
        ratios.setdefault(batch, {})[cores] = median_ms / alone_ms(batch, cores)
    points = [
        Point(batch, cores, served_ms(batch, cores) * known[min(known, key=lambda one: abs(one - cores))])
        for batch, known in ratios.items()
        for cores in {sample.cores for sample in typical}
    ]
    return fit_table(points).params


def check_sizes(
    file: Path,
    rows: Mapping[int, Mapping[str, tuple[int, ...]]],
    *,
    limit: Limit = by_affinity,
    on: GpuPlace | None = None,
) -> None:
    """InputError for a size on which the model fails, before anything is measured; a process for each size runs one
    row."""
    for size, shapes in rows.items():
        order = order_of(file, default_cores()[-1], (1,), shapes, on)
        try:
            for _ in measure_on(order, 0.0, limit, runs_min=1, on=on):
                pass
        except InputError as error:
            what = error.what.removeprefix(f"{file}: ")
            raise InputError(f"rows of size {size}: {what}", where=str(file), help=error.help) from error


def _few_batches(most: int) -> tuple[int, ...]:
    """Batch sizes between 1 and the largest, at equal ratios."""
    return tuple(sorted({round(most ** (place / (SIZE_BATCHES - 1))) for place in range(SIZE_BATCHES)}))


def measuring_sizes_s(count: int, cores: Sequence[float], seconds: float | None, passes: int) -> float:
    """About how many seconds `measure_sizes` takes for so many sizes."""
    cells_s = SIZES_S / count if seconds is None else CELL_COST * seconds * SIZE_BATCHES * len(cores)
    return passes * (1 + count) * (START_S * (1 + len(cores)) + cells_s)


def measuring_s(batches: Sequence[int] | None, cores: Sequence[float], seconds: float | None, passes: int) -> float:
    """About how many seconds `measure` takes. A slow model takes longer if `batches` or `seconds` are given."""
    cell_s = CELL_COST * (CELL_S_MAX if seconds is None else seconds)
    cells_s = len(cores) * len(_sizes(batches)) * cell_s
    return passes * (START_S * (1 + len(cores)) + (cells_s if seconds is not None else min(CELLS_S, cells_s)))


def _sizes(batches: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(batches) if batches else tuple(1 << power for power in range(BATCH_MAX.bit_length()))


class _Effort(Struct, frozen=True):
    """How much is measured, see `measure`."""

    batches: tuple[int, ...] | None
    cores: tuple[float, ...]
    seconds: float | None
    passes: int = 1
    cells_s: float = CELLS_S
    """For all cells of a pass."""
    is_bounded: bool = True
    """Whether cells that would take longer than `cells_s` together are left out, but for the first."""
    silence_s: float = SILENCE_S
    least: int = 0
    """How many of the smallest batches must be measured; larger ones are left out if they are too much for the model or
    the machine. 0: all must be."""

    @property
    def runs_min(self) -> int:
        """Of each cell in a pass."""
        return RUNS_FEW if self.is_bounded else ceil(RUNS_MIN / self.passes)


class _Measurement:
    """The cells of a model, measured in passes. The first pass decides which these are: it begins with the largest core
    count, where batches are doubled while that is worth it; the others get the same sizes while the time suffices."""

    def __init__(
        self,
        file: Path,
        shapes: Mapping[str, tuple[int, ...]],
        effort: _Effort,
        limit: Limit,
        progress: Progress,
        on: GpuPlace | None = None,
    ) -> None:
        self.reports: list[LoadReport] = []
        self._file, self._shapes, self._effort = file, shapes, effort
        self._limit, self._progress, self._on = limit, progress, on
        self._cores = sorted(effort.cores, reverse=True)
        self._sizes: dict[float, tuple[int, ...]] = {}
        """The sizes on each core count, once they are decided."""
        self._runs: dict[tuple[float, int], list[CellRuns]] = {}
        self._samples: list[Sample] = []
        """Of this pass."""
        self._passes_left, self._cell_s, self._cells_left_s = effort.passes, 0.0, 0.0

    def pooled(self) -> list[Sample]:
        """A sample of all runs of each cell, in ascending order of cores and batch sizes."""
        found: list[Sample] = []
        for cores, batch in sorted(self._runs):
            cells = self._runs[cores, batch]
            runs_ns = [run_ns for cell in cells for run_ns in cell.runs_ns]
            found.append(sample_of(batch, cores, runs_ns, fmean(cell.beside_cores for cell in cells)))
        return found

    def one_pass(self, *, alone: bool = False) -> Pass:
        """Measure each cell once more."""
        self._samples, left_s = [], self._effort.cells_s
        self._passes_left -= 1
        date = datetime.now(UTC).isoformat(timespec="seconds")
        with contextlib.nullcontext() if alone else service_load() as load:
            for place, cores in enumerate(self._cores):
                begun = len(self._samples)
                self._cells_left_s = left_s / (len(self._cores) - place)
                self._measure_on(cores, load)
                left_s -= sum(self._expected_s(cell.batch, cores, cell) for cell in self._samples[begun:])
        samples = sorted(self._samples, key=lambda sample: (sample.cores, sample.batch))
        return Pass(date=date, beside=_beside(load), samples=tuple(samples))

    def _measure_on(self, cores: float, load: ServiceLoad | None) -> None:
        """Measure the cells of one core count."""
        sizes = self._sizes_on(cores)
        if cores not in self._sizes and self._samples and self._is_too_long(sizes[0], cores):
            sizes = ()
        if sizes:
            try:
                self._run(cores, sizes, load)
            except (InputError, MachineError):
                done = tuple(sample.batch for sample in self._samples if sample.cores == cores)
                if not 0 < self._effort.least <= len(done) or cores in self._sizes:
                    raise
                # A larger batch is too much for the model or the machine.
                self._samples = [sample for sample in self._samples if sample.cores != cores]
                self._runs = {cell: runs for cell, runs in self._runs.items() if cell[0] != cores}
                self._run(cores, done, load)
        self._sizes[cores] = tuple(sample.batch for sample in self._samples if sample.cores == cores)

    def _sizes_on(self, cores: float) -> tuple[int, ...]:
        """The sizes on a core count; as long as they are not decided, those to try."""
        if cores in self._sizes:
            return self._sizes[cores]
        return next(filter(None, reversed(self._sizes.values())), _sizes(self._effort.batches))

    def _run(self, cores: float, sizes: tuple[int, ...], load: ServiceLoad | None) -> None:
        """Measure these sizes, or fewer, in one process."""
        effort, part_s = self._effort, self._cells_left_s / (CELL_COST * len(sizes))
        self._cell_s = min(CELL_S_MAX, max(CELL_S_MIN, part_s)) if effort.seconds is None else effort.seconds
        # Once: sessions for other numbers of threads take as much memory in each process.
        prepared = ceil(cores) if not self.reports and self._on is None else 0
        order = order_of(self._file, cores, sizes, self._shapes, self._on, prepared=prepared)
        if not self._sizes and effort.batches is None:
            usual = len(BATCHES)
            order = structs.replace(order, batches=sizes[:usual], tried=sizes[usual:])
        found = measure_on(
            order,
            self._cell_s,
            self._limit,
            runs_min=effort.runs_min,
            load=load,
            enough=self._add,
            silence_s=effort.silence_s,
            on=self._on,
        )
        self.reports += [report for report in found if isinstance(report, LoadReport)]

    def _add(self, found: CellRuns) -> bool:
        """Keep the runs of a cell. Returns whether larger batches are left out on this core count."""
        rates = [sample.batch / sample.p50_ms for sample in self._samples if sample.cores == found.cores]
        self._samples.append(sample_of(*found))
        self._runs.setdefault((found.cores, found.batch), []).append(found)
        self._cells_left_s -= self._expected_s(found.batch, found.cores)
        sizes = self._sizes_on(found.cores)
        larger = next((size for size in sizes if size > found.batch), None)
        is_enough = False
        if larger is not None and found.cores not in self._sizes:
            is_open = not self._sizes and self._effort.batches is None and found.batch > BATCHES[-1]
            is_worth = found.batch / self._samples[-1].p50_ms > GAIN_MIN * max(rates, default=0.0)
            is_enough = (is_open and not is_worth) or self._is_too_long(larger, found.cores)
            if is_enough:
                self._sizes[found.cores] = sizes[: sizes.index(larger)]
        self._progress(self._left_s(), self._samples[-1])
        return is_enough

    def _is_too_long(self, batch: int, cores: float) -> bool:
        return self._effort.is_bounded and self._expected_s(batch, cores) > self._cells_left_s

    def _expected_s(self, batch: int, cores: float, known: Sample | None = None) -> float:
        """About how long a cell takes, by the newest sample: as long as its rows on so few cores, or as is wanted."""
        known = known or self._samples[-1]
        once_s = known.p50_ms / 1e3 * batch / known.batch * known.cores / cores
        return CELL_COST * max(self._cell_s, (self._effort.runs_min + CELL_RUNS) * once_s)

    def _left_s(self) -> float:
        """About how long all cells that are left will take, in this pass and the later ones."""
        here = self._samples[-1]
        cells = [(-cores, batch) for cores in self._cores for batch in self._sizes_on(cores)]
        each_s = {cell: self._expected_s(cell[1], -cell[0]) for cell in cells}
        left_s = sum(each_s[cell] for cell in cells if cell > (-here.cores, here.batch))
        all_s = sum(each_s.values())
        if self._effort.is_bounded:
            left_s, all_s = min(left_s, self._effort.cells_s), min(all_s, self._effort.cells_s)
        return left_s + self._passes_left * all_s


def order_of(  # each of them is part of it
    file: Path,
    cores: float,
    batches: Sequence[int],
    shapes: Mapping[str, tuple[int, ...]],
    on: GpuPlace | None = None,
    *,
    prepared: int = 0,
) -> TimingOrder:
    """What a process is to measure on so many cores, and on a GPU if there is one."""
    device = on.device if on is not None else None
    uses = operators.in_use()
    return TimingOrder(str(file), ceil(cores), cores, tuple(batches), dict(shapes), device, uses, prepared)


def _on_gpu(profile: Profile, on: GpuPlace, reports: Sequence[LoadReport]) -> Profile:
    """A profile that was measured on a GPU."""
    return structs.replace(
        profile,
        accelerator=on.kind,
        device_memory_bytes=max(report.device_memory_bytes for report in reports),
        hardware=on.hardware,
    )


def measure_briefly(
    model_path: Path,
    *,
    file: Path | None = None,
    batches: Sequence[int] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    limit: Limit = by_affinity,
    seconds: float = BRIEF_S,
    progress: Callable[[float, Sample], None] = lambda share, sample: None,
    size: int = 0,
) -> Profile:
    """A short profile, so that a model without one can be served: one pass over few cells, in about `seconds`.

    All cores first, then one core. A slow model gets fewer cells. `progress` gets the share of the time that has
    passed. Other arguments and errors as for `measure`.
    """
    begin_ns = perf_counter_ns()
    all_cores = default_cores()[-1]

    def update(left_s: float, sample: Sample) -> None:
        spent_s = (perf_counter_ns() - begin_ns) / NS_PER_S
        progress(spent_s / (spent_s + left_s), sample)

    effort = _Effort(
        None if batches is None else checked_batches(batches),
        tuple({all_cores, min(1.0, all_cores)}),
        BRIEF_CELL_S,
        cells_s=seconds,
        silence_s=BRIEF_SILENCE_S,
        least=len(BATCHES) if batches is None else 0,
    )
    measured = _Measurement(file or model_path, shapes or {}, effort, limit, update)
    one = measured.one_pass()
    took_s = (perf_counter_ns() - begin_ns) / NS_PER_S
    source = f"a short measurement: {len(one.samples)} cells in {took_s:.0f} s, p99"
    return _profile(model_path, measured.pooled(), [one], measured.reports, "p99", source, shapes or {}, size)


def kept_profile(model: Path, folder: Path) -> FirstProfile | None:
    """The profile that an earlier start kept in a state folder; None if there is none of this model as it is now."""
    file = _file_in(folder, model)
    try:
        profile = load_profile(file)
    except InputError:  # none, or of another version of sloop
        return None
    return FirstProfile(model, profile, file) if is_of(profile, model) else None


def first_profile(  # those of `measure_briefly`
    model: Path,
    known: ExaminedModel,
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    *,
    own: Path | None = None,
    limit: Limit = by_affinity,
    seconds: float = BRIEF_S,
    progress: Callable[[float, Sample], None] = lambda share, sample: None,
) -> FirstProfile:
    """Measure a model briefly (`measure_briefly`), and keep the profile: beside the model, as `sloop profile` does, or
    in the state folder where that place cannot be written. InputError and MachineError as for `measure`, and if it can
    be kept nowhere. `own` is the copy of the model that is measured; `known` is about it."""
    profile = measure_briefly(
        own or model,
        file=Path(known.file),
        batches=known.batches_alone or None,
        shapes=dict(shapes),
        limit=limit,
        seconds=seconds,
        progress=progress,
        size=size_of(known.signature, shapes),
    )
    try:
        file = path_beside(model)
        save_profile(profile, file, known.joining)
    except MachineError:
        file = _file_in(folder, own or model)
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        save_profile(profile, file, known.joining)
    return FirstProfile(model, profile, file)


def _file_in(folder: Path, model: Path) -> Path:
    return folder / PROFILES / f"{model.name}.{digest_of_model(model)[:12]}{SUFFIX}"


def _beside(load: ServiceLoad | None) -> str:
    return f"a stand-in for edge and clients, {load.answered} requests" if load else "nothing"


def checked_batches(batches: Sequence[int]) -> tuple[int, ...]:
    if not batches or min(batches) < 1:
        raise InputError(f"batches are {list(batches)}; each must be at least 1", help="for example --batches 1,2,4,8")
    return tuple(sorted(set(batches)))


def checked_cores(cores: Sequence[float]) -> tuple[float, ...]:
    machine = capacity()
    available = machine.cores
    if not cores or min(cores) <= 0:
        raise InputError(f"cores are {list(cores)}; each must be positive", help="for example --cores 1,2")
    if max(cores) > available:
        limits = f" ({machine.cores_limit})" if machine.cores_limit else ""
        what = f"{max(cores):g} cores are requested; this process may use {available:g}{limits}"
        raise InputError(what, help=f"measure up to {available:g}, or on a larger machine")
    return tuple(sorted({float(count) for count in cores}))


class ShareSample(Struct, frozen=True):
    """How long a batch takes with a share of a GPU, 0 to 1."""

    share: float
    sample: Sample


def measure_shares(
    file: Path,
    whole: GpuPlace,
    shares: Sequence[float],
    mps: MpsDaemon,
    *,
    batches: Sequence[int],
    shapes: Mapping[str, tuple[int, ...]],
    seconds: float = CELL_S_MAX,
    limit: Limit = by_affinity,
) -> list[ShareSample]:
    """The durations of batches with each of these shares of a GPU, which MPS enforces. Errors as for `measure`."""
    found: list[ShareSample] = []
    for share in shares:
        on = GpuPlace.on(whole.gpu, whole.kind, share, mps)
        runs = measure_on(order_of(file, 1.0, batches, shapes, on), seconds, limit, on=on)
        found += [ShareSample(share, sample_of(*cell)) for cell in runs if not isinstance(cell, LoadReport)]
    return found


# One process on one core count.


def measure_on(
    order: TimingOrder,
    seconds: float,
    limit: Limit,
    *,
    runs_min: int = RUNS_MIN,
    load: ServiceLoad | None = None,
    enough: Enough = lambda found: False,
    silence_s: float = SILENCE_S,
    on: GpuPlace | None = None,
) -> Generator[CellRuns | LoadReport, None, None]:
    """Measure one core count in a new process, which gets a GPU if there is one: yields the runs of each batch size
    until there are `enough`, then the load report.

    The process ends when the iterator is closed. MachineError if it dies, or sends nothing for `silence_s`.
    """
    begin_ns = perf_counter_ns()
    with timed_process(order.model, order.cores, silence_s, on) as (process, sock, shared):
        process_ms = (perf_counter_ns() - begin_ns) / NS_PER_MS
        pauses = PAUSES if order.cores.is_integer() else (0.0,)
        budget_ns = round(seconds * NS_PER_S)
        timing = Timing(sock, load, budget_ns=budget_ns, runs_min=runs_min, pauses=pauses)
        with limit(process.pid, order.cores):
            process.order(order)
            for message in process.answers(BatchReady | LoadReport):
                if isinstance(message, LoadReport):
                    yield structs.replace(message, process_ms=process_ms)
                    return
                runs_ns = timing.runs(TimedBatch(sock, shared, message))
                found = CellRuns(message.batch, order.cores, runs_ns, timing.beside_cores)
                timing.end(LAST if enough(found) else STOP)
                yield found


class TimedProcess(NamedTuple):
    """A process whose passes are timed, before its order, and our end of what carries tensors."""

    process: MeasuredProcess
    sock: socket.socket
    shared: SharedMemory | None


@contextlib.contextmanager
def timed_process(
    model: str, cores: float, silence_s: float = SILENCE_S, on: GpuPlace | None = None
) -> Iterator[TimedProcess]:
    """A process of `sloop.profile.timed_process`, with a GPU if there is one; see `measured_process`. Its socket waits
    for `silence_s`."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    ours.settimeout(silence_s)
    shared = SharedMemory.make()
    fds = (theirs.fileno(), *([shared.fd] if shared else []))
    arguments = [str(fds[0]), str(shared.fd if shared else -1)]
    with (
        contextlib.closing(shared) if shared else contextlib.nullcontext(),
        ours,
        theirs,
        measured_process(
            "sloop.profile.timed_process", model, cores, arguments=arguments, fds=fds, silence_s=silence_s, on=on
        ) as process,
    ):
        theirs.close()
        yield TimedProcess(process, ours, shared)


class TimedBatch:
    """Our side of a batch size that a process is ready to run (`sloop.profile.timed_process`), with its inputs.

    What a socket raises if the other end closes it is raised.
    """

    def __init__(self, sock: socket.socket, shared: SharedMemory | None, ready: BatchReady) -> None:
        self.size, self._sock = ready.batch, sock
        self.inputs = [memoryview(bytearray(size)) for size in ready.input_bytes]
        for view in self.inputs:
            receive_into(sock, view)
        self._message = b"".join((RUN, *self.inputs))
        self._shared = shared if sum(ready.input_bytes) >= SHARED_BYTES_MIN else None  # as in service
        self.outputs = memoryview(bytearray(ready.output_bytes))
        self._missing, self._began_ns = self.outputs[:0], 0

    def begin(self) -> None:
        """Send the inputs."""
        self._began_ns, self._missing = perf_counter_ns(), self.outputs
        if self._shared is not None:
            write_tensors(self._shared, [[array] for array in self.inputs])
            self._sock.sendall(RUN)
        else:
            self._sock.sendall(self._message)

    def receive(self) -> int | None:
        """Read outputs. The duration of the run in ns when all have arrived."""
        count = self._sock.recv_into(self._missing)
        if not count:
            raise ConnectionError("the other end closed")
        self._missing = self._missing[count:]
        return None if self._missing else perf_counter_ns() - self._began_ns


class Timing:
    """Times runs over the socket of one process, and serves `load`, if any, in the same loop."""

    def __init__(
        self,
        sock: socket.socket,
        load: ServiceLoad | None,
        *,
        budget_ns: int,
        runs_min: int,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self._sock, self._load = sock, load
        self._budget_ns, self._runs_min, self._pauses = budget_ns, runs_min, pauses
        self.beside_cores = 0.0
        """What the load took on average during the last `runs`."""

    @property
    def silence_s(self) -> float:
        """How long to wait for an answer."""
        return self._sock.gettimeout() or SILENCE_S

    def runs(self, batch: TimedBatch) -> list[int]:
        """Durations in ns of the runs after warm-up: as many as fit the time budget, at least `runs_min`."""

        def run_ns() -> int:
            batch.begin()
            if self._load is not None:
                self._load.wait_for(self._sock, self.silence_s)
            while (took_ns := batch.receive()) is None:
                pass
            return took_ns

        warm_ns = self._warm_up(run_ns)
        if self._load is not None:
            later_ns = warm_ns[len(warm_ns) // 2 :]
            cycle_s = (1 + fmean(self._pauses)) * fmean(later_ns) / NS_PER_S
            self._load.set_rate(batch.size / cycle_s, sum(map(len, batch.inputs)) // batch.size)
        runs_ns: list[int] = []
        start_ns, used_ns = perf_counter_ns(), self._load.cpu_ns() if self._load is not None else 0
        while len(runs_ns) < self._runs_min or (
            len(runs_ns) < RUNS_MAX and perf_counter_ns() - start_ns < self._budget_ns
        ):
            runs_ns.append(run_ns())
            if self._load is not None:
                pause = self._pauses[len(runs_ns) % len(self._pauses)]
                self._load.serve_until(perf_counter_ns() + round(pause * runs_ns[-1]))
        if self._load is not None:
            self.beside_cores = (self._load.cpu_ns() - used_ns) / (perf_counter_ns() - start_ns)
            self._load.set_rate(0, 0)
        return runs_ns

    def end(self, order: bytes) -> None:
        """End a batch size: `STOP`, or `LAST` if no larger one is wanted."""
        self._sock.sendall(order)

    def _warm_up(self, run_ns: Callable[[], int]) -> list[int]:
        warm_ns: list[int] = []
        start_ns = perf_counter_ns()
        while len(warm_ns) < WARM_MIN or (
            len(warm_ns) < WARM_MAX and perf_counter_ns() - start_ns < WARM_SHARE * self._budget_ns
        ):
            warm_ns.append(run_ns())
            if perf_counter_ns() - start_ns > self._budget_ns:
                break
        return warm_ns


def _profile(
    path: Path,
    samples: Sequence[Sample],
    passes: Sequence[Pass],
    reports: Sequence[LoadReport],
    percentile: Percentile,
    source: str,
    shapes: dict[str, tuple[int, ...]],
    size: int,
) -> Profile:
    if any(one.in_service for one in passes):
        samples = in_service_samples(passes, fit_all(samples, percentile)["table"].params)
    fits = fit_all(samples, percentile)
    startup, largest = _startup(reports), max(reports, key=lambda report: report.memory_bytes)
    return Profile(
        latency_ms=fits["table"].params,
        max_batch=max(sample.batch for sample in samples),
        max_cores=max(sample.cores for sample in samples),
        load_s=startup.sum_s,
        startup=startup,
        weights_bytes=size_of_model(path),
        memory_bytes=largest.memory_bytes,
        resize_bytes=largest.resize_bytes,
        hardware=hardware_name(),
        origin="measured",
        source=source,
        software=", ".join(
            filter(None, (reports[0].software, f"Python {platform.python_version()}", platform.system()))
        ),
        date=datetime.now(UTC).date().isoformat(),
        model_digest=digest_of_model(path),
        shapes=shapes,
        samples=tuple(samples),
        passes=tuple(passes),
        fits=fits,
        sizes=(SizeLatency(size, fits["table"].params),) if size else (),
    )


def _startup(reports: Sequence[LoadReport]) -> Startup:
    """Medians over the measured processes with at least one core, which a replica has while it starts."""
    usual = [report for report in reports if report.cores >= 1] or reports
    return Startup(
        process_s=median(report.process_ms for report in usual) / 1e3,
        weights_s=median(report.weights_ms for report in usual) / 1e3,
        first_batch_s=median(report.first_batch_ms for report in usual) / 1e3,
    )
