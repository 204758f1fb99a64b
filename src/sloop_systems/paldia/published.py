"""Profiles of PALDIA's models on its six EC2 kinds, calibrated so that its published results are reached.

PALDIA names its models, machines, prices, batches and rates; it prints no latency, no bandwidth and no law that
explains its results. The figures here were fitted to those results by our specification, section 3.4. They are not
measurements, and say nothing about these models elsewhere. On a GPU, a batch of b takes Solo · (0.03 + 0.97 b/BS); the
K80 and the V100 take a fixed part of the M60's time, and the bandwidth that a model demands of them follows from the
same bytes in that time. A CPU takes equally long for each request of a batch.
"""

from typing import Final, NamedTuple

from sloop.api.devices import BandwidthLaw
from sloop.api.profiles import DeviceSharing, Profile, Quadratic

SLO_MS: Final = 200.0
"""PALDIA's deadline for all models."""
WORKER_BYTES: Final = 5 << 28
"""1.25 GiB, so that 6, 9 and 12 workers fit on an M60, K80 and V100 (specification, 3.5)."""
FIXED_PART: Final = 0.03
"""The part of a full batch's time that does not depend on the batch; the publication says that it is below 4 %."""
GPU_LOAD_S, CPU_LOAD_S = 3.0, 1.5
"""From the order of a worker to its first batch (specification, 2.5)."""


class _Gpu(NamedTuple):
    """A kind of node with a GPU, and the GPU's speed beside the M60's."""

    accelerator: str
    time_ratio: float
    gb_per_s: float


_GPUS: Final = {
    "g3s.xlarge": _Gpu("M60", 1.0, 160.0),
    "p2.xlarge": _Gpu("K80", 0.85, 240.0),
    "p3.2xlarge": _Gpu("V100", 0.25, 900.0),
}
_CPUS: Final = {"c6i.4xlarge": (1.0, 16), "c6i.2xlarge": (2.0, 8), "m4.xlarge": (5.0, 4)}
"""How many times as long as c6i.4xlarge each takes, and its cores."""


class PaldiaModel(NamedTuple):
    """One model of PALDIA's evaluation."""

    solo_ms: float
    """A full batch alone on the M60."""
    batch: int
    """BS, the full batch."""
    bandwidth: float
    """FBR: the part of the M60's memory bandwidth that a full batch uses."""
    alpha: float
    """Of the law of interference."""
    cpu_requests: float
    """How many requests c6i.4xlarge answers in 200 ms."""
    peak_rps: float
    """The highest rate of its trace; published."""

    def profile(self, kind: str) -> Profile | None:
        """Its profile on a kind of hardware; None if a batch of one takes longer than the deadline there."""
        return self._on_gpu(kind) if kind in _GPUS else self._on_cpu(kind)

    def _on_gpu(self, kind: str) -> Profile:
        gpu, solo_ms = _GPUS[kind], self.solo_ms * _GPUS[kind].time_ratio
        source = f"{_SOURCE}; {gpu.time_ratio:g} × the M60's time"
        bandwidth = min(1.0, self.bandwidth * _GPUS["g3s.xlarge"].gb_per_s / gpu.gb_per_s / gpu.time_ratio)
        sharing = DeviceSharing(
            law=BandwidthLaw(self.alpha),
            full_batch=self.batch,
            bandwidth=bandwidth,
            origin="assumed",
            source=source,
            hardware=gpu.accelerator,
            date=_DATE,
        )
        return Profile(
            latency_ms=Quadratic(0.0, (1.0 - FIXED_PART) * solo_ms / self.batch, FIXED_PART * solo_ms),
            max_batch=self.batch,
            max_cores=1.0,
            load_s=GPU_LOAD_S,
            accelerator=gpu.accelerator,
            device_memory_bytes=WORKER_BYTES,
            hardware=f"{kind} with an NVIDIA {gpu.accelerator}",
            origin="assumed",
            source=source,
            date=_DATE,
            sharing=sharing,
        )

    def _on_cpu(self, kind: str) -> Profile | None:
        ratio, cores = _CPUS[kind]
        each_ms = SLO_MS * ratio / self.cpu_requests
        batch = int(SLO_MS / each_ms)
        if not batch:
            return None
        return Profile(
            latency_ms=Quadratic(0.0, each_ms, 0.0),
            max_batch=min(self.batch, 1 << (batch.bit_length() - 1)),
            max_cores=cores,
            load_s=CPU_LOAD_S,
            hardware=kind,
            origin="assumed",
            source=f"{_SOURCE}; {ratio:g} × the time on c6i.4xlarge",
            date=_DATE,
        )


_SOURCE: Final = "not printed; calibrated to the results of PALDIA"
_DATE: Final = "2024"

PALDIA_MODELS: Final = {
    "ResNet50": PaldiaModel(75, 64, 0.60, 0.50, 40, 225),
    "GoogleNet": PaldiaModel(150, 128, 0.62, 0.60, 25, 225),
    "DenseNet121": PaldiaModel(90, 64, 0.64, 0.50, 25, 225),
    "DPN92": PaldiaModel(100, 64, 0.66, 0.50, 25, 225),
    "SimplifiedDLA": PaldiaModel(80, 64, 0.60, 0.50, 35, 225),
    "VGG19": PaldiaModel(48, 64, 0.56, 0.35, 60, 450),
    "ResNet18": PaldiaModel(70, 128, 0.58, 0.60, 80, 450),
    "MobileNet": PaldiaModel(66, 128, 0.56, 0.60, 90, 450),
    "MobileNetV2": PaldiaModel(70, 128, 0.56, 0.60, 80, 450),
    "SENet18": PaldiaModel(80, 128, 0.62, 0.60, 70, 450),
    "ShuffleNetV2": PaldiaModel(66, 128, 0.55, 0.60, 90, 450),
    "EfficientNetB0": PaldiaModel(68, 128, 0.55, 0.60, 80, 450),
    "ALBERT": PaldiaModel(150, 8, 0.85, 0.60, 1, 8),
    "BERT": PaldiaModel(165, 8, 0.88, 0.60, 1, 8),
    "DistilBERT": PaldiaModel(120, 8, 0.80, 0.60, 1, 8),
    "FunnelTransformer": PaldiaModel(175, 8, 0.90, 0.60, 1, 8),
}
"""By name, as in the specification's table; batches and peak rates are published, the rest is calibrated."""


def paldia_profiles(model: str) -> dict[str, Profile]:
    """The profiles of one of `PALDIA_MODELS` by kind of hardware, without the kinds that are too slow for it."""
    own = PALDIA_MODELS[model]
    made = {kind: own.profile(kind) for kind in ("m4.xlarge", "c6i.2xlarge", "c6i.4xlarge", *_GPUS)}
    return {kind: profile for kind, profile in made.items() if profile is not None}


PALDIA_PROFILES: Final = {
    f"{model}@{kind}": profile for model in PALDIA_MODELS for kind, profile in paldia_profiles(model).items()
}
"""By the names that application files use: `ResNet50@g3s.xlarge`."""
