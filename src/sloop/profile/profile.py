"""Profiles: batch latency and start-up time of a model on some hardware, with the source of each figure.

A profile is immutable. It holds the latency function used for planning, the samples it was fitted to, the passes in
which they were measured, and their provenance: measured, published, fitted or assumed, with hardware, software and
date. It is stored as JSON in the folder of its model.

Sources of the forms: quadratic in the batch size at fixed cores, FA2; batch and cores by Amdahl's law, Sponge (Razavi
et al., EuroMLSys 2024, equation for l(b, c)); tables follow published grids.
"""

import contextlib
import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct, structs

from sloop.errors import InputError, MachineError
from sloop.options import Fraction, NonNegativeInt, Range
from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, IgniterLaw, Slowdown
from sloop.sizes import GRID, SizeClasses
from sloop.units import NS_PER_MS, quantile
from sloop.vocabulary import Slot

# Latency as a function of batch size and cores, for every batch ≥ 1 and cores > 0, measured or not.

Cells = dict[int, dict[float, float]]
"""batch → cores → milliseconds."""


class Quadratic(Struct, frozen=True, tag_field="form", tag="quadratic", forbid_unknown_fields=True):
    """l(b) = αb² + βb + γ milliseconds on the cores it was measured with; `cores` has no effect."""

    alpha: float
    beta: float
    gamma: float

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch`, whatever the cores."""
        return (self.alpha * batch + self.beta) * batch + self.gamma


class Amdahl(Struct, frozen=True, tag_field="form", tag="amdahl", forbid_unknown_fields=True):
    """l(b, c) = γb/c + ε/c + δb + η milliseconds: one part is divided by the cores, the other is not."""

    gamma: float
    epsilon: float
    delta: float
    eta: float

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch` on `cores`."""
        return (self.gamma * batch + self.epsilon) / cores + self.delta * batch + self.eta


class _TableRow(Struct, frozen=True, gc=False):
    """One batch size of a table. `inverse` is 1/cores, ascending: Amdahl's law is a straight line in it."""

    inverse: tuple[float, ...]
    latency_ms: tuple[float, ...]

    def at(self, inverse: float) -> float:
        if inverse <= self.inverse[0]:
            return self.latency_ms[0]
        if inverse >= self.inverse[-1]:
            return self.latency_ms[-1] * inverse / self.inverse[-1]
        high = bisect_left(self.inverse, inverse)
        left, right = self.inverse[high - 1], self.inverse[high]
        share = (inverse - left) / (right - left)
        return self.latency_ms[high - 1] + share * (self.latency_ms[high] - self.latency_ms[high - 1])


class LatencyTable(Struct, frozen=True, dict=True, tag_field="form", tag="table", forbid_unknown_fields=True):
    """A grid of latencies with linear interpolation: over 1/cores within a batch size, then over the batch size.

    Linear interpolation preserves order, so a monotone table gives a monotone latency. Outside the grid the latency is
    pessimistic: cores beyond the largest count bring no speed-up; below the smallest count l·c stays constant; a batch
    below the smallest takes as long as the smallest; above the largest the last slope continues (with a single batch
    size, in proportion to the batch).
    """

    table: Cells

    def __post_init__(self) -> None:
        """ValueError for a table without cells, or a batch, core count or latency that is not positive."""
        if not self.table or not all(self.table.values()):
            raise ValueError("table needs at least one cell in every row")
        for batch, row in self.table.items():
            for cores, latency_ms in row.items():
                if batch < 1 or not 0 < cores < float("inf") or not 0 < latency_ms < float("inf"):
                    raise ValueError(f"table cell [{batch}][{cores}] = {latency_ms}: all three must be positive")

    @cached_property
    def _rows(self) -> tuple[tuple[int, ...], tuple[_TableRow, ...]]:
        batches = tuple(sorted(self.table))
        rows = []
        for batch in batches:
            cells = sorted((1.0 / cores, latency_ms) for cores, latency_ms in self.table[batch].items())
            rows.append(_TableRow(tuple(cell[0] for cell in cells), tuple(cell[1] for cell in cells)))
        return batches, tuple(rows)

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch` on `cores`, interpolated or extrapolated as the class describes."""
        batches, rows = self._rows
        inverse = 1.0 / cores
        if batch <= batches[0]:
            return rows[0].at(inverse)
        if batch >= batches[-1]:
            return self._beyond(batch, inverse)
        high = bisect_left(batches, batch)
        low_ms, high_ms = rows[high - 1].at(inverse), rows[high].at(inverse)
        return low_ms + (high_ms - low_ms) * (batch - batches[high - 1]) / (batches[high] - batches[high - 1])

    def _beyond(self, batch: int, inverse: float) -> float:
        batches, rows = self._rows
        last_ms = rows[-1].at(inverse)
        if len(rows) == 1:
            return last_ms * batch / batches[-1]
        slope_ms = max(0.0, last_ms - rows[-2].at(inverse)) / (batches[-1] - batches[-2])
        return last_ms + slope_ms * (batch - batches[-1])


class ParametricLatency(Struct, frozen=True, tag_field="form", tag="parametric", forbid_unknown_fields=True):
    """l(b, c) = fixed + (b + σ(c - 1)) · compute/c + b · moved/min(c, m) milliseconds, σ = `serial`, m =
    `moved_cores_max`: what each further core costs is shared by the rows of a batch, and memory serves few cores.

    For cores that cannot be measured here: AsyFunc's specification, section 2.2.
    """

    fixed_ms: float
    compute_ms: float
    """Of one row on one core."""
    serial: float
    moved_ms: float
    """Of one row's bytes on one core."""
    moved_cores_max: float

    def latency_ms(self, batch: int, cores: float) -> float:
        """Milliseconds for a batch of `batch` on `cores`."""
        rows = batch + self.serial * max(0.0, cores - 1)
        return self.fixed_ms + rows * self.compute_ms / cores + batch * self.moved_ms / min(cores, self.moved_cores_max)


Latency = Quadratic | Amdahl | LatencyTable | ParametricLatency
"""Any form; in files the key `form` names it."""


def scaled(latency: Latency, factor: float) -> Latency:
    """The latency of what takes `factor` times as long."""
    if isinstance(latency, LatencyTable):
        return LatencyTable(
            {batch: {cores: factor * ms for cores, ms in row.items()} for batch, row in latency.table.items()}
        )
    if isinstance(latency, ParametricLatency):
        parts = {name: factor * getattr(latency, name) for name in ("fixed_ms", "compute_ms", "moved_ms")}
        return structs.replace(latency, **parts)
    return structs.replace(latency, **{name: factor * value for name, value in structs.asdict(latency).items()})


class SizeLatency(Struct, frozen=True, forbid_unknown_fields=True):
    """The latency of batches whose rows all have `size` elements in the open dimensions."""

    size: int
    latency_ms: Latency


EXTRAPOLATED_MAX: Final = 4
"""Rows up to so many times the largest measured size are estimated. A quadratic part is 16 times as large there as
measured, in time and in memory, so that nothing measured says what happens beyond."""
COST_SPREAD_MAX: Final = 1.5
"""A full batch of the largest size of a class takes at most so many times as long as one of the smallest, if the
profile chooses the classes: what padding a row can cost, and what an estimate for a class can be wrong by."""


def latency_between(sizes: Sequence[int], values_ms: Sequence[float], size: int) -> float:
    """The latency at `size`, from those at two or more ascending sizes: linear between them.

    Below the smallest, the first slope continues, but no row is cheaper than in proportion to its size. Beyond the
    largest, the parabola through the last three continues if they curve upwards, as attention makes them; otherwise the
    last slope. Larger rows never take less.
    """
    values_ms = list(accumulate(values_ms, max))
    high = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low = high - 1
    slope = (values_ms[high] - values_ms[low]) / (sizes[high] - sizes[low])
    if size < sizes[0]:
        return max(values_ms[0] - slope * (sizes[0] - size), values_ms[0] * size / sizes[0])
    if size <= sizes[high]:
        return values_ms[low] + slope * (size - sizes[low])
    curve = 0.0
    if len(sizes) > 2:
        before = (values_ms[low] - values_ms[low - 1]) / (sizes[low] - sizes[low - 1])
        curve = max(0.0, (slope - before) / (sizes[high] - sizes[low - 1]))
    return values_ms[high] + (size - sizes[high]) * (slope + curve * (size - sizes[low]))


# Samples: the runs of one batch size on one core count.

LIKELY: Final = 64
"""How many durations represent the runs of a cell: enough for the P99, and a power of two for fast random draws."""


class Sample(Struct, frozen=True, forbid_unknown_fields=True):
    """One cell: `n` runs of a batch of `batch` on `cores`. `n` is 0 if the number is unknown."""

    batch: int
    cores: float
    p50_ms: float
    p99_ms: float
    n: int
    likely_ms: tuple[float, ...] = ()
    """Equally likely durations in ms, ascending: each is the mean of an equal share of the runs, so their mean is the
    mean of the runs. Empty if only percentiles are known."""
    beside_cores: float = 0.0
    """The cores that edge, deciding process and clients, or stand-ins for them, took on average meanwhile; 0 if they
    took none, or if that is unknown."""
    scaled: float = 1.0
    """Factor by which the measured durations were multiplied, if this cell was adjusted to cells seen in service."""

    @property
    def mean_ms(self) -> float:
        """Mean duration; the median if only percentiles are known."""
        return sum(self.likely_ms) / len(self.likely_ms) if self.likely_ms else self.p50_ms


def sample_of(batch: int, cores: float, runs_ns: Sequence[int], beside_cores: float = 0.0) -> Sample:
    """The sample of these runs; `likely_ms` is rounded to microseconds."""
    ordered_ms = [run_ns / NS_PER_MS for run_ns in sorted(runs_ns)]
    return Sample(
        batch=batch,
        cores=cores,
        p50_ms=quantile(ordered_ms, 0.5),
        p99_ms=quantile(ordered_ms, 0.99),
        n=len(ordered_ms),
        likely_ms=tuple(round(value, 3) or 0.001 for value in likely(ordered_ms, LIKELY)),
        beside_cores=round(beside_cores, 4),
    )


def likely(ordered: Sequence[float], count: int) -> list[float]:
    """The means of `count` equal parts of ascending values; a value on a border is divided between both sides."""
    sums = (0.0, *accumulate(ordered))

    def below(place: float) -> float:
        whole = int(place)
        return sums[whole] + (place - whole) * ordered[whole] if whole < len(ordered) else sums[-1]

    borders = [below(part * len(ordered) / count) for part in range(count + 1)]
    return [(after - before) * count / len(ordered) for before, after in pairwise(borders)]


class Pass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pass of measurements: a sweep of `sloop profile` over all cells, or the log of a live server."""

    date: str
    """ISO date and time of its beginning."""
    in_service: bool = False
    """Whether the durations come from a server's log (from the order of a batch to its answer)."""
    beside: str = ""
    """Other load on the machine during the pass."""
    samples: tuple[Sample, ...]


# The profile.

Origin = Literal["measured", "published", "fitted", "assumed"]
"""`measured` by sloop; `published` as printed; `fitted` to published figures; `assumed` by its author."""

BATCH_MAX, CORES_MAX = 65_536, 1e6
"""The largest batch and number of cores that a profile declares."""
FLOOR_MS = 1e-3
"""Lower bound of every latency: a fit with a negative intercept must not return zero or negative time."""


class Region(Struct, frozen=True, forbid_unknown_fields=True):
    """The batch sizes and core counts that were measured; outside of it a profile extrapolates."""

    batch_min: int
    batch_max: int
    cores_min: float
    cores_max: float

    def has(self, batch: int, cores: float) -> bool:
        """Whether the point lies inside, borders included."""
        return self.batch_min <= batch <= self.batch_max and self.cores_min <= cores <= self.cores_max


class Fit(Struct, frozen=True, forbid_unknown_fields=True):
    """A form with its parameters, and its errors at the points it was fitted to.

    `mape` and `max_error` are relative errors as fractions (0.05 is 5 %); `r2` is about absolute latencies.
    """

    params: Latency
    r2: float
    mape: float
    max_error: float


START_S_ASSUMED: Final = 10.0
"""Seconds of a start that was neither measured nor declared: a new instance in the Sponge specification, §3.1."""
START_CORES_MIN: Final = 1.0
"""The fewest cores of a starting replica. Loading uses one thread, so more would not help."""


class Startup(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parts of `Profile.load_s`, in the order in which a new replica goes through them, in seconds."""

    process_s: float
    """From launching the process until it accepts orders: interpreter and libraries."""
    weights_s: float
    """Loading the model file."""
    first_batch_s: float
    """The first forward pass, which is slower than later ones."""
    send_s: float = 0.0
    """Copying the loaded weights to the accelerator, between loading and the first pass."""

    @property
    def sum_s(self) -> float:
        """All parts together."""
        return self.process_s + self.weights_s + self.send_s + self.first_batch_s


class LayerBlock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Consecutive layers of a model that were loaded and run as a piece of their own."""

    end: str
    """Its last layer, after which the model can be cut."""
    operators: str
    """What its layers compute, most frequent first: `Conv ×3, Relu ×3, Add`."""
    layers: int
    param_bytes: int
    """Its weights; those that other blocks read as well count in each."""
    output_bytes: int
    """One row of what it makes for later blocks."""
    crossing_bytes: int
    """One row of everything that crosses its end: also what earlier blocks made, and inputs, for later ones."""
    load_ms: float
    """Median time to load it in a process that has the libraries already, from the page cache."""
    latency_ms: LatencyTable | ParametricLatency
    """Medians."""
    multiply_adds: float = 0.0
    """For one row; 0 if they are not known."""


class LayerProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the layers of a model take, block by block, measured in one process beside the uncut model."""

    blocks: tuple[LayerBlock, ...]
    load_ms: float
    """Of the uncut model, measured in the same way."""
    latency_ms: LatencyTable | ParametricLatency
    """Of the uncut model; the sum of its blocks is above it by what cutting costs."""
    input_bytes: int
    """One row of its inputs."""
    move_ms_per_mb: float
    """To write 10⁶ bytes into fresh shared memory and to read them again; 0 where there is none."""
    difference: float
    """The largest difference between the chain of all blocks and the uncut model, relative to the largest output."""
    origin: Origin = "measured"
    source: str = ""
    hardware: str = ""
    software: str = ""
    date: str = ""
    model_digest: str = ""
    """See `digest_of_model`."""

    @property
    def load_fixed_ms(self) -> float:
        """What loading any blocks takes, whatever their size: what all blocks take together beyond the whole model."""
        beyond_ms = sum(each.load_ms for each in self.blocks) - self.load_ms
        smallest_ms = min(each.load_ms for each in self.blocks)
        return min(smallest_ms, max(0.0, beyond_ms / max(1, len(self.blocks) - 1)))


KernelSource = Literal["ncu", "launches"]
"""Where figures of kernels come from: counters of the GPU, which Nsight Compute reads, or launch configurations, from
which SM use follows and occupancy is estimated."""


class DemandSource(Struct, frozen=True, forbid_unknown_fields=True):
    """How the kernels of a model were measured."""

    source: KernelSource
    software: str
    """The profiler, with its version."""
    hardware: str
    date: str


class DeviceSharing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model shares its device: the demands of its batches, and the law by which others slow them down.

    The device is the accelerator of the profile, or without one the cores of a node.
    """

    law: Slowdown = NO_SLOWDOWN
    """The law by which the demands of others slow its batches down."""
    full_batch: int
    """The batch that counts as full."""
    bandwidth: float = 0.0
    """The part of the device's memory bandwidth that a full batch uses when it is alone, 0 to 1; smaller batches use
    less in proportion. PALDIA's FBR."""
    sm_use: dict[int, float] = {}  # msgspec copies the empty dict for each
    """By batch, the mean part of the SMs that its kernels need, 0 to 1; linear in between, constant beyond."""
    occupancy: dict[int, float] = {}
    """By batch, the mean part of the warps that are active, 0 to 1."""
    peak_occupancy: dict[int, float] = {}
    """By batch, the largest part of the warps that are active at any time, 0 to 1."""
    memory: dict[int, float] = {}
    """By batch, the part of the device's memory that is reserved at most, 0 to 1."""
    is_capped: bool = False
    """Whether the share of a slot limits its kernels; otherwise it is only reserved."""
    cores: float = 0.0
    """On CPUs, the cores that each replica could use when the law was measured. The law then holds for slots whose
    cores are not a cap; a replica in such a slot that runs alone is as fast as on that many cores. A small batch uses
    the cores as much as a full batch, only for a shorter time, and therefore has the same demand. With 0, the law holds
    for every slot."""
    points: tuple[tuple[float, float], ...] = ()
    """The points to which the law was fitted: a number of full batches that ran together, and the slowdown of each."""
    demands: DemandSource | None = None
    """How `sm_use`, `occupancy` and `peak_occupancy` were measured; None if they were not, but published or declared.
    `origin` and what follows it are of the rest."""
    origin: Origin = "assumed"
    source: str = ""
    hardware: str = ""
    software: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        """ValueError with the field's name for a figure out of its range."""
        if self.full_batch < 1:
            raise ValueError(f"full_batch is {self.full_batch}; it must be at least 1")
        if not 0 <= self.bandwidth <= 1:
            raise ValueError(f"bandwidth is {self.bandwidth}; it must be between 0 and 1")
        if not (self.cores >= 0 and isfinite(self.cores)):
            raise ValueError(f"cores is {self.cores}; it must be a number of at least 0")
        for name in ("sm_use", "occupancy", "peak_occupancy", "memory"):
            parts: dict[int, float] = getattr(self, name)
            for batch, part in parts.items():
                if batch < 1:
                    raise ValueError(f"a batch in {name} is {batch}; it must be at least 1")
                if not 0 <= part <= 1:
                    raise ValueError(f"{name} at batch {batch} is {part}; it must be between 0 and 1")

    def with_demands_of(self, other: "DeviceSharing | None") -> "DeviceSharing":
        """This law, with what another measurement of the model says of SMs, occupancy and memory."""
        if other is None:
            return self
        names = ("sm_use", "occupancy", "peak_occupancy", "memory", "demands")
        return structs.replace(self, **{name: getattr(other, name) for name in names})

    def holds_on(self, slot: Slot) -> bool:
        """Whether the law holds for batches on this slot: a law that was measured without caps does not hold for
        replicas with a cap."""
        return not (self.cores and slot.is_capped)

    def demand(self, batch: int, *, share: float = 1.0, is_capped: bool = True, variant: str = "") -> DeviceDemand:
        """What a batch of `batch` demands in a slot with this share of the device, which is a cap or not. On cores, all
        of them."""
        full = batch / self.full_batch if not self.cores else 1.0
        cache, power_w = self.law.used(batch, share) if isinstance(self.law, IgniterLaw) else (0.0, 0.0)
        return DeviceDemand(
            variant,
            batch,
            full,
            self.bandwidth * full,
            _part_at(self.sm_use, batch) or float(self.cores > 0),
            _part_at(self.occupancy, batch),
            cache,
            power_w,
            share=share,
            is_capped=self.is_capped and is_capped,
            peak_occupancy=_part_at(self.peak_occupancy, batch),
            memory=_part_at(self.memory, batch),
        )


def _part_at(parts: dict[int, float], batch: int) -> float:
    """The part at this batch; 0 if none is known."""
    if batch in parts or not parts:
        return parts.get(batch, 0.0)
    known = sorted(parts)
    high = bisect_left(known, batch)
    if high in (0, len(known)):
        return parts[known[min(high, len(known) - 1)]]
    low, above = known[high - 1], known[high]
    return parts[low] + (parts[above] - parts[low]) * (batch - low) / (above - low)


EXAMINER: Final = 1
"""The version of the code that decides whether requests can share a forward pass (`sloop.profile.joining`)."""


class Joining(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether requests for the model can share a forward pass, as an examination of its bytes has found."""

    obstacle: str
    """Why they cannot; empty if they can."""
    examiner: int = EXAMINER


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed of one model on one kind of hardware. `latency_ms` is the form in use; `fits` holds all fitted
    forms."""

    latency_ms: Latency
    max_batch: Annotated[int, Range(least=1, most=BATCH_MAX)]
    max_cores: Annotated[float, Range(above=0, most=CORES_MAX)]
    load_s: Annotated[float, Range(least=0, most=1e6)] = 0.0
    """Seconds from the order to start a replica to its first answer: process, libraries, weights, first pass."""
    startup: Startup | None = None
    """The parts of `load_s`, if they are known."""
    weights_bytes: NonNegativeInt = 0
    """Size of the model's files, which a node must have before a replica can load them; 0 if it is unknown."""
    memory_bytes: NonNegativeInt = 0
    """What a replica takes at most: all resident memory of its process, with sessions for all numbers of threads that
    it keeps (`thread_counts_kept`). Older profiles have the growth of the process with one session."""
    hardware: str = ""
    """The machine as text, with its processor."""
    accelerator: str = ""
    """The kind of accelerator that the model runs on, as the devices of a node name it; "" for none. The latencies are
    those of a replica that has `device_share` of the accelerator."""
    device_memory_bytes: NonNegativeInt = 0
    """Memory that a replica takes on its accelerator."""
    device_share: Fraction = 1.0
    """The part of its accelerator that a replica takes for itself, 0 to 1; the latencies are those with this part."""
    origin: Origin = "assumed"
    source: str = ""
    """A document with its table or section, or the command that measured it."""
    software: str = ""
    date: str = ""
    """ISO date of the measurement or publication."""
    model_digest: str = ""
    """See `digest_of_model`; to detect that the model has changed."""
    shapes: dict[str, tuple[int, ...]] = {}  # msgspec copies the empty dict for each profile
    """One row's shape of the inputs with open dimensions, with which it was measured."""
    measured: Region | None = None
    samples: tuple[Sample, ...] = ()
    """Samples pooled over all passes."""
    passes: tuple[Pass, ...] = ()
    """The single passes; their spread gives the uncertainty of predictions."""
    fits: dict[str, Fit] = {}  # msgspec copies the empty dict for each profile
    layers: LayerProfile | None = None
    """Measured with `sloop profile --layers`."""
    sharing: DeviceSharing | None = None
    """How it shares its device; None if that is unknown."""
    resize_bytes: int = 0
    """Of `memory_bytes`, what only a replica takes whose cores change: its sessions for other numbers of threads."""
    sizes: tuple[SizeLatency, ...] = ()
    """The latencies for rows of other sizes, ascending; empty if rows have one size, or if nothing is known of others.
    `latency_ms` is that of typical rows. One entry says only of which size those were."""

    def __post_init__(self) -> None:
        """ValueError with the field's name for a figure out of its range."""
        if self.max_batch < 1:
            raise ValueError(f"max_batch is {self.max_batch}; it must be at least 1")
        if not (self.max_cores > 0 and isfinite(self.max_cores)):
            raise ValueError(f"max_cores is {self.max_cores}; it must be positive")
        if not (self.load_s >= 0 and isfinite(self.load_s)):
            raise ValueError(f"load_s is {self.load_s}; it must not be negative")
        if self.weights_bytes < 0:
            raise ValueError(f"weights_bytes is {self.weights_bytes}; it must not be negative")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it must not be negative")
        if not 0 <= self.resize_bytes <= self.memory_bytes:
            raise ValueError(f"resize_bytes is {self.resize_bytes}; it must be at least 0, and at most memory_bytes")
        if self.device_memory_bytes < 0:
            raise ValueError(f"device_memory_bytes is {self.device_memory_bytes}; it must not be negative")
        if self.device_memory_bytes and not self.accelerator:
            raise ValueError("device_memory_bytes is given without an accelerator; name it, for example T4")
        if not 0 < self.device_share <= 1:
            raise ValueError(f"device_share is {self.device_share}; it must be above 0, at most 1")
        SizeClasses(tuple(each.size for each in self.sizes))
        self._check_latency(self.latency_ms, "")
        for each in self.sizes:
            self._check_latency(each.latency_ms, f" of size {each.size}")

    def _check_latency(self, latency: Latency, of: str) -> None:
        for batch in (1, self.max_batch):
            latency_ms = latency.latency_ms(batch, self.max_cores)
            if not (latency_ms > 0 and isfinite(latency_ms)):
                raise ValueError(f"latency_ms{of} is {latency_ms:g} ms at batch {batch} on {self.max_cores:g} cores")

    @property
    def knows_sizes(self) -> bool:
        """Whether it says how the size of rows changes the latency."""
        return len(self.sizes) > 1

    @property
    def size_max(self) -> int:
        """The largest size that it can be asked for; 0 if there is no limit because it knows nothing of sizes."""
        return EXTRAPOLATED_MAX * self.sizes[-1].size if self.knows_sizes else 0

    @property
    def size_classes(self) -> SizeClasses:
        """Classes within which the latency of a full batch differs by at most `COST_SPREAD_MAX`, up to the largest
        measured size; those of the grid beyond it, or if it knows nothing of sizes."""
        if not self.knows_sizes:
            return GRID
        bounds = [self.sizes[-1].size]
        while bounds[-1] > 1:
            least_ms = self.latency_at(bounds[-1], self.max_batch, self.max_cores) / COST_SPREAD_MAX
            below = range(1, bounds[-1])
            first = bisect_left(below, least_ms, key=lambda size: self.latency_at(size, self.max_batch, self.max_cores))
            if not first:
                break
            bounds.append(below[first - 1])
        return SizeClasses(tuple(reversed(bounds)))

    def latency_at(self, size: int, batch: int, cores: float) -> float:
        """Milliseconds for a batch of rows of `size`, interpolated or extrapolated (`latency_between`); those of
        typical rows for 0, or if it knows nothing of sizes."""
        if not (size and self.knows_sizes):
            return self.latency_ms.latency_ms(batch, cores)
        values_ms = [each.latency_ms.latency_ms(batch, cores) for each in self.sizes]
        return latency_between([each.size for each in self.sizes], values_ms, size)

    def best_size(self, cores: float, limit_ms: float, batch_max: int) -> float:
        """The cores of each of several equal replicas on so many cores, if these serve notably more rows a second than
        one replica with all; else `cores`. Each further division must gain `PARTS_GAIN_MIN`. Batches have at most
        `batch_max` rows and take at most `limit_ms`.

        Medians count: P99s would count how often one of several threads is interrupted, as if every batch were.
        """
        cells: Cells = {}
        for sample in self.samples:
            cells.setdefault(sample.batch, {})[sample.cores] = sample.p50_ms
        latency_ms = (LatencyTable(cells) if cells else self.latency_ms).latency_ms

        def rows_rps(parts: int) -> float:
            own = cores if parts == 1 else int(cores / parts)
            known_ms = ((batch, latency_ms(batch, own)) for batch in range(1, batch_max + 1))
            return max((parts * batch / each_ms for batch, each_ms in known_ms if each_ms <= limit_ms), default=0.0)

        best, best_rps = 1, rows_rps(1)
        for parts in range(2, int(cores) + 1):
            if (found_rps := rows_rps(parts)) > (1 + PARTS_GAIN_MIN) * best_rps:
                best, best_rps = parts, found_rps
        return cores if best == 1 else float(int(cores / best))

    def never_resized(self) -> "Profile":
        """The profile of replicas whose cores never change."""
        if not self.resize_bytes:
            return self
        return structs.replace(self, memory_bytes=self.memory_bytes - self.resize_bytes, resize_bytes=0)

    @property
    def region(self) -> Region | None:
        """The declared region, else the span of the samples or table cells; None if neither is known."""
        if self.measured is not None:
            return self.measured
        if self.samples:
            return _span([(sample.batch, sample.cores) for sample in self.samples])
        if isinstance(self.latency_ms, LatencyTable):
            return _span([(batch, cores) for batch, row in self.latency_ms.table.items() for cores in row])
        return None

    def is_extrapolated(self, batch: int, cores: float, size: int = 0) -> bool:
        """Whether the point lies outside the measured region, or the size outside the measured sizes; False where
        these are unknown. Size 0 is that of typical rows."""
        if size and self.sizes and not self.sizes[0].size <= size <= self.sizes[-1].size:
            return True
        region = self.region
        if region is None:
            return False
        if isinstance(self.latency_ms, Quadratic):
            return not region.batch_min <= batch <= region.batch_max
        return not region.has(batch, cores)

    def cores_on(self, slot: Slot) -> float:
        """The cores that a replica on this slot computes with while it is alone: those of the slot, unless they are
        only reserved."""
        if slot.is_capped or slot.accelerator:
            return slot.cores
        measured = self.sharing.cores if self.sharing is not None else 0.0
        return measured or self.max_cores

    def sharing_on(self, slot: Slot) -> DeviceSharing | None:
        """How a replica on this slot shares its device; None if that is unknown."""
        return self.sharing if self.sharing is not None and self.sharing.holds_on(slot) else None

    def with_fit(self, name: str) -> "Profile":
        """The same profile with the fit called `name` in use, for the size that it was fitted to too. KeyError if there
        is none."""
        latency = self.fits[name].params
        sizes = tuple(
            structs.replace(each, latency_ms=latency) if each.latency_ms == self.latency_ms else each
            for each in self.sizes
        )
        return structs.replace(self, latency_ms=latency, sizes=sizes)


PARTS_GAIN_MIN: Final = 0.03
"""How much more smaller replicas must serve on the same cores, as each takes memory: two profiles of one model differ
by as much."""


def _span(points: list[tuple[int, float]]) -> Region:
    batches = [point[0] for point in points]
    cores = [point[1] for point in points]
    return Region(min(batches), max(batches), min(cores), max(cores))


# Files: JSON with a version, written atomically.

VERSION: Final = 9
"""2 added passes and start-up times, 3 accelerators, 4 shapes, 5 the size of the weights, and layers, 6 how a model
shares its device, multiply-adds of layers, and a form of latency, 7 how its demands on a device were measured, 8 sizes,
9 what ran beside the samples; older ones are still read."""
SUFFIX: Final = ".profile.json"
NUMBERS: Final = re.compile(rb"\[\n[\d\s.,e+-]+\]")
"""A list of numbers over several lines, which cannot occur inside a string."""


class _File(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: int
    profile: Profile
    joining: Joining | None = None


class _Version(Struct, frozen=True):
    version: int


def path_beside(model_path: Path, hardware: str = "") -> Path:
    """The default path of a model's profile, in the folder of the model: its profile on one kind of hardware, or on
    every kind that has none of its own."""
    kind = f".{hardware}" if hardware else ""
    return model_path.with_name(f"{model_path.name}{kind}{SUFFIX}")


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FirstProfile(NamedTuple):
    """A profile that was found or made for a model without one, and the file in which it is kept."""

    model: Path
    profile: Profile
    file: Path


def digest_of_model(path: Path) -> str:
    """What tells a model from other versions of it: the digest of its file, or, of an ONNX model whose weights lie in
    other files, of all of them together."""
    files = files_of_weights(path)
    return digest_of_all(digest(path), {name: digest(file) if file.is_file() else "" for name, file in files.items()})


def digest_of_all(own: str, others: Mapping[str, str]) -> str:
    """The digest of a model of several files: from that of its own file, and those of the others by name, each empty if
    there is no such file."""
    if not others:
        return own
    parts = [own, *(f"{name} {known}" for name, known in others.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def size_of_model(path: Path) -> int:
    """Bytes of an ONNX model's files; 0 if they cannot be read, or for a Python file, which does not contain its
    weights."""
    if path.suffix != ".onnx":
        return 0
    try:
        return sum(file.stat().st_size for file in (path, *files_of_weights(path).values()))
    except OSError:
        return 0


def files_of_weights(path: Path) -> dict[str, Path]:
    """The other files with weights of an ONNX model, by the names that the model gives them. They are beside the path;
    if the path is a link and no such file is there, beside the file that it leads to. A file may be missing."""
    from sloop.onnx_file import external_files  # noqa: PLC0415  # it needs protobuf

    try:
        names = external_files(path) if path.suffix == ".onnx" else ()
    except InputError:  # whoever opens it will say so
        return {}
    return {name: beside(path, name) for name in names}


def beside(path: Path, name: str) -> Path:
    """The file that a model calls `name`; see `files_of_weights`."""
    named, behind = path.parent / name, path.resolve().parent / name
    return behind if behind.exists() and not named.exists() else named


def is_of(profile: Profile, model_path: Path) -> bool:
    """Whether the profile may belong to this model: False if the one it was measured on had another digest."""
    return not profile.model_digest or profile.model_digest == digest_of_model(model_path)


def save_profile(profile: Profile, path: Path, joining: Joining | None = None) -> None:
    """Write the profile, and what an examination of its model has found. Without `joining`, what the file says about
    the same model is kept. MachineError if the file cannot be written."""
    joining = joining or joining_in(path, profile.model_digest)
    pretty = msgspec.json.format(msgspec.json.encode(_File(VERSION, profile, joining)), indent=1)
    raw = NUMBERS.sub(lambda found: b" ".join(found[0].split()), pretty)  # one line for each list of numbers
    with _part_of(path) as part:
        part.write_bytes(raw + b"\n")
        part.replace(path)


def check_saving(path: Path) -> None:
    """MachineError if a profile cannot be written to this path, which is known before it is measured."""
    with _part_of(path) as part:
        part.write_bytes(b"")
        part.unlink()


@contextlib.contextmanager
def _part_of(path: Path) -> Iterator[Path]:
    """A file beside a profile, to take its place."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
    except OSError as error:
        with contextlib.suppress(OSError):  # as on a file system that is read-only
            part.unlink(missing_ok=True)
        help_text = "give a path in a folder you can write to; `sloop profile` has --out"
        raise MachineError(f"cannot write the profile {str(path)!r}: {error.strerror}", help=help_text) from error


def load_profile(path: Path) -> Profile:
    """Read a profile. InputError naming the wrong field if the file is missing or not a profile."""
    return _read(path).profile


def joining_in(path: Path, model_digest: str) -> Joining | None:
    """What the file of a profile says about joining requests for the model with this digest; None if it says nothing,
    or if another version of the examiner wrote it."""
    try:
        file = _read(path)
    except InputError:
        return None
    is_of_model = bool(model_digest) and file.profile.model_digest == model_digest
    return file.joining if is_of_model and file.joining is not None and file.joining.examiner == EXAMINER else None


def _read(path: Path) -> _File:
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError("cannot read the profile", where=str(path), help="check the path") from error
    again = "measure it again with `sloop profile MODEL`"
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if 1 <= version <= VERSION:
            return msgspec.json.decode(raw, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"not a profile: {error}", where=str(path), help=again) from error
    raise InputError(f"a profile of version {version}; this sloop reads up to {VERSION}", where=str(path), help=again)
