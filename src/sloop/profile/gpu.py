"""What models need of a GPU: SMs and occupancy of their kernels, from launches; and iGniter's model of a shared GPU.

Shares, utilisations and occupancies are in percent, 0 to 100.

Sources: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505,
2024), sections 5 and 6, with its formula of the SM utilisation times 100, which is printed without; NVIDIA's occupancy
calculator, which is `cuda_occupancy.h` of the CUDA toolkit (13.5), for how many blocks an SM holds; iGniter (Xu et al.,
TPDS 2023), its equations as its public code has them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Final

from msgspec import Struct

from sloop.errors import InputError

# Kernels

WARP: Final = 32
"""Threads of a warp; a block has whole warps."""
BLOCK_THREADS_MAX: Final = 1024
THREAD_REGISTERS_MAX: Final = 255
REGISTER_UNIT: Final = 256
"""Each warp gets whole units of registers."""
PARTITIONS: Final = 4
"""Of an SM. Each has its part of the registers, and a warp lies in one of them."""


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one SM holds at a time."""

    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 65536
    shared_unit: int = 128
    """Each block gets whole units of shared memory, in bytes."""
    reserved_bytes: int = 1024
    """Shared memory of each block that CUDA keeps for itself."""


SM_LIMITS: Final = {
    (7, 0): SmLimits(2048, 32, 96 << 10, shared_unit=256, reserved_bytes=0),
    (7, 5): SmLimits(1024, 16, 64 << 10, shared_unit=256, reserved_bytes=0),
    (8, 0): SmLimits(2048, 32, 164 << 10),
    (8, 6): SmLimits(1536, 16, 100 << 10),
    (8, 7): SmLimits(1536, 16, 164 << 10),
    (8, 9): SmLimits(1536, 24, 100 << 10),
    (9, 0): SmLimits(2048, 32, 228 << 10),
    (10, 0): SmLimits(2048, 32, 228 << 10),
    (10, 3): SmLimits(2048, 32, 228 << 10),
    (11, 0): SmLimits(1536, 24, 228 << 10),
    (12, 0): SmLimits(1536, 24, 100 << 10),
    (12, 1): SmLimits(1536, 24, 100 << 10),
}
"""By compute capability. Threads, shared memory and registers as the CUDA C++ programming guide lists them, "Technical
Specifications per Compute Capability" (the newest: `arch_traits.h` of NVIDIA's CCCL); blocks and the units of
allocation as `cuda_occupancy.h` has them."""


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """How many SMs a kind of GPU has, and what one of them holds."""

    sms: int
    sm: SmLimits

    @classmethod
    def of(cls, capability: tuple[int, int], sms: int) -> "GpuLimits":
        """Those of a GPU of this compute capability. InputError for one that is not in the table."""
        limits = SM_LIMITS.get(capability)
        if limits is None:
            known = ", ".join(f"{major}.{minor}" for major, minor in SM_LIMITS)
            what = f"the limits of GPUs of compute capability {capability[0]}.{capability[1]} are not known"
            raise InputError(what, help=f"known are {known}; others belong into `SM_LIMITS` (sloop.profile.gpu)")
        return cls(sms, limits)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """The launch configuration of a kernel, as a profiler's trace has it."""

    blocks: int
    """Of the grid: x · y · z."""
    threads: int
    """Of a block: x · y · z."""
    registers: int
    """Of a thread."""
    shared_bytes: int = 0
    """Of a block: static and dynamic."""

    @property
    def warps(self) -> int:
        """Of a block."""
        return -(-self.threads // WARP)

    def blocks_per_sm(self, gpu: GpuLimits) -> int:
        """How many blocks one SM holds at a time, as NVIDIA's calculator computes it: limited by warps, blocks,
        registers and shared memory, each with its unit of allocation. InputError if not even one fits: the trace is
        wrong."""
        sm = gpu.sm
        most = 0
        if self.blocks > 0 and 0 < self.threads <= BLOCK_THREADS_MAX and 0 <= self.registers <= THREAD_REGISTERS_MAX:
            most = min(sm.blocks, sm.threads // WARP // self.warps)
            if self.registers:
                of_warp = _rounded_up(WARP * self.registers, REGISTER_UNIT)
                most = min(most, sm.registers // PARTITIONS // of_warp * PARTITIONS // self.warps)
            if of_block := _rounded_up(self.shared_bytes + sm.reserved_bytes, sm.shared_unit):
                most = min(most, sm.shared_bytes // of_block)
        if most < 1:
            what = f"a block of {self.threads} threads, {self.registers} registers each, {self.shared_bytes} B shared"
            raise InputError(f"{what} fits on no SM", help="the trace is of another kind of GPU, or broken")
        return most

    def sm_percent(self, gpu: GpuLimits) -> float:
        """The SMs that all blocks need at once, in percent of the SMs of the GPU; at most 100."""
        sms = -(-self.blocks // self.blocks_per_sm(gpu))
        return min(100.0, 100.0 * sms / gpu.sms)

    def expected_occupancy(self, gpu: GpuLimits) -> float:
        """The warps of an SM that has blocks of this launch, in percent of those that it holds at most. A small grid
        leaves SMs without a block, and those do not count, as in the counter that Nsight Compute reads
        (`sm__warps_active` of active cycles). It is what that counter reaches if all blocks take equally long; it is
        less where some end earlier."""
        blocks = min(self.blocks_per_sm(gpu), max(1.0, self.blocks / gpu.sms))
        return 100.0 * blocks * self.warps / (gpu.sm.threads // WARP)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """One execution of a kernel, with a value such as its occupancy or its `sm_percent`."""

    start: float
    end: float
    value: float


def peak(spans: Iterable[KernelSpan]) -> float:
    """The largest sum of the values of kernels that run at the same time (AO, if the values are occupancies)."""
    return max((value for _, value in _steps(spans)), default=0.0)


def time_weighted(spans: Iterable[KernelSpan], least: float = 0.0) -> float:
    """The mean over time, from the first start to the last end, of the sum of all running kernels' values (WAO, WSM);
    over `least` if that is longer. Gaps in which none runs count as 0."""
    spans = list(spans)
    if not spans:
        return 0.0
    total = max(least, max(span.end for span in spans) - min(span.start for span in spans))
    return sum(length * value for length, value in _steps(spans)) / total if total > 0 else 0.0


def _steps(spans: Iterable[KernelSpan]) -> Iterator[tuple[float, float]]:
    """The time between two starts or ends, with the sum of the values of the kernels that run in it."""
    waiting = sorted((span for span in spans if span.end > span.start), key=lambda span: span.start, reverse=True)
    instants = sorted({instant for span in waiting for instant in (span.start, span.end)})
    running: list[KernelSpan] = []
    for start, end in pairwise(instants):
        running = [span for span in running if span.end > start]
        while waiting and waiting[-1].start <= start:
            running.append(waiting.pop())
        # Not a running total, to which each start adds: differences of floats would pile up.
        yield end - start, sum(span.value for span in running)


# iGniter

CLOCK_PART_MIN: Final = 0.09
"""The lowest clock as a fraction of the highest: 135 of 1530 MHz for a V100, as `nvidia-smi` lists them."""
SHARE_UNIT_MIN: Final = 0.1
"""The smallest step of shares in percent, by which planning raises a share."""


def _check_finite(coefficients: Struct) -> None:
    """ValueError for a coefficient that is no number."""
    for name in coefficients.__struct_fields__:
        values = getattr(coefficients, name)
        if not all(map(isfinite, values if isinstance(values, tuple) else (values,))):
            raise ValueError(f"{name} is {values}; it must be finite")


class IgniterGpu(Struct, frozen=True, forbid_unknown_fields=True):
    """The coefficients of a kind of GPU. `max_mhz`, `power_w` and `pcie_bytes_per_ms` are of the hardware; the rest is
    fitted to runs of one to five copies of a model."""

    max_mhz: float
    power_w: float
    """The power cap."""
    idle_w: float
    mhz_per_w: float
    """α_f, negative: the clock above the power cap."""
    schedule_slope_ms: float
    """α_sch: by how much each co-located model delays the launch of a kernel."""
    schedule_offset_ms: float
    """β_sch."""
    pcie_bytes_per_ms: float
    share_unit: float
    """The step of shares in percent: 100 / (SMs / 2)."""

    def __post_init__(self) -> None:
        """ValueError for a figure out of its range."""
        _check_finite(self)
        for name in ("max_mhz", "power_w", "pcie_bytes_per_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.mhz_per_w > 0 or self.schedule_slope_ms < 0:
            raise ValueError("mhz_per_w must not be positive, and schedule_slope_ms not negative")
        if not SHARE_UNIT_MIN <= self.share_unit <= 100:
            raise ValueError(f"share_unit is {self.share_unit}; it must be between {SHARE_UNIT_MIN} and 100 percent")

    def delay_ms(self, models: int) -> float:
        """D_sch: the delay of each kernel with so many models on the GPU; 0 for one."""
        return max(0.0, self.schedule_slope_ms * models + self.schedule_offset_ms) if models > 1 else 0.0

    def mhz(self, demand_w: float) -> float:
        """The clock at a demand for power: it falls above the cap, but not below the lowest clock of a card. The line
        was fitted to at most five models; for twenty it would be negative."""
        mhz = self.max_mhz + self.mhz_per_w * max(0.0, demand_w - self.power_w)
        return max(CLOCK_PART_MIN * self.max_mhz, mhz)


class IgniterModel(Struct, frozen=True, forbid_unknown_fields=True):
    """The coefficients of a model on a kind of GPU."""

    kernels: int
    """n_k: of one inference."""
    schedule_ms: float
    """Idle gaps of an inference alone on the GPU."""
    cache: float
    """α_cache: how much longer it is active for each percent of L2 that others use."""
    active: tuple[float, float, float, float, float]
    """k₁ to k₅ of the active time (k₁b² + k₂b + k₃) / (r + k₄) + k₅ in ms."""
    power: tuple[float, float]
    """Slope and offset in W, above idle, by `ability_rps`."""
    l2: tuple[float, float]
    """Slope and offset of the L2 utilisation in percent, by `ability_rps`."""
    load_bytes: int
    """Of one request, to the GPU."""
    feedback_bytes: int
    """Of one request, back."""

    def __post_init__(self) -> None:
        """ValueError for a figure out of its range."""
        _check_finite(self)
        if min(self.kernels, self.schedule_ms, self.cache, self.load_bytes, self.feedback_bytes) < 0:
            raise ValueError("kernels, schedule_ms, cache, load_bytes and feedback_bytes must not be negative")
        if 100.0 + self.active[3] < SHARE_UNIT_MIN or not self.active_ms(1, 100.0) > 0:
            raise ValueError(f"active is {self.active}; a batch of one on the whole GPU must take some time")

    def work_ms(self, batch: int) -> float:
        """k₁b² + k₂b + k₃: the part of the active time that is divided by the share."""
        k1, k2, k3, _, _ = self.active
        return (k1 * batch + k2) * batch + k3

    def active_ms(self, batch: int, share: float) -> float:
        """Equation 5: the time that a batch is active on `share` percent of the SMs, alone. Fits have k₄ down to −9; a
        smaller share than −k₄ takes as long as a tiny one."""
        _, _, _, k4, k5 = self.active
        return self.work_ms(batch) / max(SHARE_UNIT_MIN, share + k4) + k5

    def ability_rps(self, batch: int, share: float) -> float:
        """Equation 6: requests per second if it were always active."""
        return 1000.0 * batch / self.active_ms(batch, share)

    def power_w(self, batch: int, share: float) -> float:
        """Equation 6: W above idle."""
        slope, offset = self.power
        return slope * self.ability_rps(batch, share) + offset

    def l2_percent(self, batch: int, share: float) -> float:
        """Equation 6: its use of the L2 cache."""
        slope, offset = self.l2
        return slope * self.ability_rps(batch, share) + offset


@dataclass(frozen=True, slots=True)
class IgniterResident:
    """A model on a GPU, with its batch and its share of the SMs in percent."""

    model: IgniterModel
    batch: int
    share: float


def igniter_gpu_ms(
    gpu: IgniterGpu, own: IgniterResident, neighbours: int, others_l2_percent: float, others_w: float
) -> float:
    """Equations 2 to 4 and 7: the time of a batch on the GPU with other models, given the L2 and the power that these
    use together. There are three kinds of interference: each model delays launches, L2 is shared, and the clock falls
    above the power cap."""
    model = own.model
    mhz = gpu.mhz(gpu.idle_w + model.power_w(own.batch, own.share) + others_w)
    schedule_ms = model.schedule_ms + model.kernels * gpu.delay_ms(1 + neighbours)
    active_ms = model.active_ms(own.batch, own.share) * (1 + model.cache * others_l2_percent)
    return (schedule_ms + active_ms) * gpu.max_mhz / mhz
