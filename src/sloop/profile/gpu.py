"""What models need of a GPU: the SMs of their kernels, computed from launches; and iGniter's model of a shared GPU.

Shares, utilisations and occupancies are in percent, 0 to 100.

Sources: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505,
2024), sections 5 and 6, with its formula of the SM utilisation times 100, which is printed without; iGniter (Xu et al.,
TPDS 2023), its equations as its public code has them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Final

from msgspec import Struct

from sloop.errors import InputError

# Kernels


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What one SM of a kind of GPU holds at a time, and how many SMs there are."""

    sms: int
    threads: int
    blocks: int
    registers: int
    shared_bytes: int


GPU_LIMITS: Final = {
    "V100": GpuLimits(80, 2048, 32, 65536, 96 << 10),
    "T4": GpuLimits(40, 1024, 16, 65536, 64 << 10),
    "A100": GpuLimits(108, 2048, 32, 65536, 164 << 10),
    "H100": GpuLimits(132, 2048, 32, 65536, 228 << 10),
}
"""By kind of accelerator, as NVIDIA's CUDA programming guide lists them by compute capability (7.0, 7.5, 8.0, 9.0)."""


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

    def blocks_per_sm(self, gpu: GpuLimits) -> int:
        """How many blocks one SM holds at a time. InputError if not even one fits: the trace is wrong."""
        most = [gpu.blocks, gpu.threads // self.threads]
        if self.shared_bytes:
            most.append(gpu.shared_bytes // self.shared_bytes)
        if self.registers:
            most.append(gpu.registers // (self.threads * self.registers))
        if min(most) < 1:
            what = f"a block of {self.threads} threads, {self.registers} registers each, {self.shared_bytes} B shared"
            raise InputError(f"{what} fits on no SM", help="the trace is of another kind of GPU, or broken")
        return min(most)

    def sm_percent(self, gpu: GpuLimits) -> float:
        """The SMs that all blocks need at once, in percent of the SMs of the GPU; at most 100."""
        sms = -(-self.blocks // self.blocks_per_sm(gpu))
        return min(100.0, 100.0 * sms / gpu.sms)


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """One execution of a kernel, with a value such as its occupancy or its `sm_percent`."""

    start: float
    end: float
    value: float


def peak(spans: Iterable[KernelSpan]) -> float:
    """The largest sum of the values of kernels that run at the same time (AO, if the values are occupancies)."""
    return max((value for _, value in _steps(spans)), default=0.0)


def time_weighted(spans: Iterable[KernelSpan]) -> float:
    """The mean over time, from the first start to the last end, of the sum of all running kernels' values (WAO, WSM).
    Gaps in which none runs count as 0."""
    spans = list(spans)
    if not spans:
        return 0.0
    total = max(span.end for span in spans) - min(span.start for span in spans)
    return sum(length * value for length, value in _steps(spans)) / total if total > 0 else 0.0


def _steps(spans: Iterable[KernelSpan]) -> list[tuple[float, float]]:
    """The time between two starts or ends, with the sum of the values of the kernels that run in it."""
    spans = [span for span in spans if span.end > span.start]
    instants = sorted({instant for span in spans for instant in (span.start, span.end)})
    return [
        (end - start, sum(span.value for span in spans if span.start <= start and end <= span.end))
        for start, end in pairwise(instants)
    ]


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


@dataclass(frozen=True, slots=True)
class IgniterPrediction:
    """What iGniter predicts for one resident."""

    latency_ms: float
    """t_inf: load, GPU and feedback."""
    gpu_ms: float
    served_rps: float
    """Loading overlaps with execution."""


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


def igniter_clock_mhz(gpu: IgniterGpu, residents: Sequence[IgniterResident]) -> float:
    """Equation 7: the clock of a GPU with these residents."""
    return gpu.mhz(gpu.idle_w + sum(each.model.power_w(each.batch, each.share) for each in residents))


def igniter_predictions(gpu: IgniterGpu, residents: Sequence[IgniterResident]) -> list[IgniterPrediction]:
    """Equations 1 to 8: the prediction for each resident beside the others."""
    l2_percents = [each.model.l2_percent(each.batch, each.share) for each in residents]
    powers_w = [each.model.power_w(each.batch, each.share) for each in residents]
    found: list[IgniterPrediction] = []
    for each, l2_percent, power_w in zip(residents, l2_percents, powers_w, strict=True):
        others = sum(l2_percents) - l2_percent, sum(powers_w) - power_w
        gpu_ms = igniter_gpu_ms(gpu, each, len(residents) - 1, *others)
        load_ms = each.model.load_bytes * each.batch / gpu.pcie_bytes_per_ms
        feedback_ms = each.model.feedback_bytes * each.batch / gpu.pcie_bytes_per_ms
        served_rps = 1000.0 * each.batch / (gpu_ms + feedback_ms)
        found.append(IgniterPrediction(load_ms + gpu_ms + feedback_ms, gpu_ms, served_rps))
    return found
