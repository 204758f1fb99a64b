"""How batches that run on one device at the same time slow each other down: laws, and measured kernels."""

from sloop.profile.gpu import GpuLimits, IgniterGpu, IgniterModel, IgniterResident, KernelLaunch, igniter_gpu_ms
from sloop.profile.interference import (
    NO_SLOWDOWN,
    SHARE_EXPONENT,
    BandwidthLaw,
    DeviceDemand,
    IgniterLaw,
    Interference,
    ShareLaw,
)
from sloop.profile.pairs import MIB, BlockCosts, Floats, runs_of

__all__ = [
    "MIB",
    "NO_SLOWDOWN",
    "SHARE_EXPONENT",
    "BandwidthLaw",
    "BlockCosts",
    "DeviceDemand",
    "Floats",
    "GpuLimits",
    "IgniterGpu",
    "IgniterLaw",
    "IgniterModel",
    "IgniterResident",
    "Interference",
    "KernelLaunch",
    "ShareLaw",
    "igniter_gpu_ms",
    "runs_of",
]
