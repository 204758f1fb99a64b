"""Published profiles of models on a V100, with what they take of it, to share it.

Sources: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505,
2024), Table A.1; iGniter (Xu et al., TPDS 2023), the public measurements of its artefact.
"""

from typing import Final, NamedTuple

from sloop.api.devices import IgniterGpu, IgniterLaw, IgniterModel, IgniterResident, ShareLaw
from sloop.api.profiles import DeviceSharing, LatencyTable, Profile, Region
from sloop_systems.colocation.igniter import igniter_predictions

# Thirteen models on a V100, with what they take of it


class V100Row(NamedTuple):
    """One row of the thesis's table; everything in percent is of the whole GPU."""

    batch: int
    latency_ms: float
    """Of one batch alone: copy to the GPU, computing, copy back."""
    rate_rps: float
    memory_percent: float
    """The most memory that was reserved."""
    peak_occupancy: float
    """Achieved occupancy in percent: the most at any time (AO)."""
    occupancy: float
    """Achieved occupancy in percent, weighted with time (WAO)."""
    sm_use: float
    """SMs that the launched blocks need in percent, weighted with time (WSM)."""


V100_ROWS: Final[dict[str, tuple[V100Row, ...]]] = {
    "alexnet": (
        V100Row(4, 1.4, 2801.75, 1.66, 69.17, 18.68, 47.07),
        V100Row(8, 2.3, 3540.12, 2.08, 85.97, 29.47, 83.79),
        V100Row(16, 3.1, 5196.69, 2.08, 85.93, 23.98, 63.49),
        V100Row(32, 5.3, 5990.46, 2.8, 89.94, 36.71, 96.24),
        V100Row(64, 9.7, 6627.59, 3.44, 91.95, 40.85, 91.56),
        V100Row(128, 18.2, 7023.69, 6.4, 93.02, 45.96, 99.0),
    ),
    "bert": (
        V100Row(4, 34.1, 117.34, 3.47, 85.89, 31.83, 96.82),
        V100Row(8, 65.8, 121.53, 4.06, 88.46, 32.63, 98.92),
        V100Row(16, 128.1, 124.88, 5.25, 91.29, 33.72, 99.51),
        V100Row(32, 243.9, 131.19, 7.63, 92.9, 27.22, 99.77),
        V100Row(64, 485.3, 131.88, 12.4, 93.83, 27.47, 99.82),
        V100Row(128, 964.7, 132.68, 21.92, 94.21, 27.61, 99.89),
    ),
    "bloom_560": (
        V100Row(4, 140.0, 28.58, 19.95, 93.2, 40.35, 94.72),
        V100Row(8, 272.8, 29.33, 26.29, 93.8, 41.26, 97.66),
        V100Row(16, 545.2, 29.35, 43.73, 94.11, 42.5, 98.82),
    ),
    "densenet121": (
        V100Row(4, 15.4, 260.13, 0.57, 84.97, 8.2, 13.9),
        V100Row(8, 16.9, 472.72, 0.93, 87.28, 12.37, 21.26),
        V100Row(16, 19.2, 832.59, 1.55, 90.79, 31.83, 54.1),
        V100Row(32, 33.5, 954.82, 2.84, 93.61, 49.97, 86.92),
        V100Row(64, 62.9, 1017.07, 5.27, 94.63, 55.59, 92.3),
        V100Row(128, 120.3, 1063.81, 10.12, 94.77, 59.1, 97.81),
    ),
    "efficientnet_b7": (
        V100Row(4, 29.9, 133.93, 2.45, 94.14, 13.92, 22.47),
        V100Row(8, 30.8, 260.14, 3.54, 92.96, 28.25, 43.55),
        V100Row(16, 46.5, 344.1, 5.69, 96.78, 52.48, 81.32),
        V100Row(32, 88.3, 362.31, 9.94, 98.06, 60.03, 92.35),
        V100Row(64, 160.9, 397.7, 18.43, 98.41, 62.05, 95.81),
        V100Row(128, 315.3, 405.93, 35.43, 99.33, 64.23, 98.86),
    ),
    "gpt2": (
        V100Row(4, 36.9, 108.28, 5.8, 91.28, 42.51, 97.73),
        V100Row(8, 73.2, 109.23, 10.48, 93.05, 54.08, 98.84),
        V100Row(16, 143.5, 111.49, 19.85, 93.84, 55.29, 99.55),
        V100Row(32, 273.0, 117.21, 38.58, 94.27, 43.27, 99.77),
    ),
    "inception_v3": (
        V100Row(4, 12.6, 317.47, 1.16, 85.76, 6.91, 13.82),
        V100Row(8, 13.7, 583.79, 1.67, 87.01, 12.83, 29.11),
        V100Row(16, 15.9, 1004.73, 3.07, 90.82, 19.85, 47.39),
        V100Row(32, 27.1, 1178.99, 4.93, 92.8, 31.46, 76.37),
        V100Row(64, 44.8, 1427.86, 8.61, 92.77, 37.4, 88.81),
        V100Row(128, 81.3, 1574.14, 15.94, 93.25, 40.4, 93.04),
    ),
    "mobilenet_v2": (
        V100Row(4, 5.7, 698.08, 0.56, 95.79, 8.1, 12.13),
        V100Row(8, 6.1, 1322.24, 1.03, 89.73, 14.62, 22.44),
        V100Row(16, 6.6, 2409.23, 2.11, 91.19, 29.92, 44.89),
        V100Row(32, 11.2, 2855.66, 4.25, 92.62, 61.22, 88.65),
        V100Row(64, 21.1, 3032.44, 8.5, 93.41, 66.87, 95.12),
        V100Row(128, 41.1, 3117.9, 17.0, 93.8, 69.11, 97.73),
    ),
    "resnet50": (
        V100Row(4, 6.8, 589.78, 1.16, 87.39, 17.55, 36.26),
        V100Row(8, 9.6, 829.08, 1.77, 90.83, 34.36, 70.49),
        V100Row(16, 16.0, 998.99, 2.7, 92.63, 45.14, 87.33),
        V100Row(32, 30.0, 1067.13, 4.52, 93.58, 46.57, 93.9),
        V100Row(64, 57.3, 1117.12, 8.16, 93.95, 48.55, 98.04),
        V100Row(128, 111.3, 1149.98, 15.45, 100.0, 49.85, 99.16),
    ),
    "resnext50_32x4d": (
        V100Row(4, 9.8, 408.34, 1.04, 87.43, 17.86, 36.12),
        V100Row(8, 14.8, 540.23, 1.6, 90.8, 34.0, 68.28),
        V100Row(16, 23.4, 684.65, 2.54, 92.81, 43.66, 82.91),
        V100Row(32, 42.0, 762.39, 4.36, 93.54, 44.8, 91.7),
        V100Row(64, 78.0, 820.18, 8.0, 98.8, 48.18, 96.52),
        V100Row(128, 150.5, 850.23, 15.29, 100.0, 49.45, 98.43),
    ),
    "t5": (
        V100Row(4, 31.1, 128.74, 3.17, 97.18, 43.39, 77.25),
        V100Row(8, 58.0, 137.83, 4.88, 97.49, 50.87, 94.8),
        V100Row(16, 109.6, 146.02, 8.15, 97.74, 53.5, 97.78),
        V100Row(32, 213.1, 150.19, 16.08, 97.79, 56.72, 98.84),
        V100Row(64, 421.1, 151.97, 29.17, 97.89, 58.93, 99.41),
    ),
    "vgg19": (
        V100Row(4, 9.8, 408.51, 4.19, 92.15, 33.91, 95.18),
        V100Row(8, 18.2, 438.65, 5.4, 93.07, 34.86, 98.88),
        V100Row(16, 26.2, 610.11, 10.58, 93.56, 48.88, 99.27),
        V100Row(32, 51.6, 620.69, 18.5, 93.77, 53.35, 99.57),
        V100Row(64, 102.1, 627.01, 34.32, 93.88, 55.28, 99.69),
        V100Row(128, 199.4, 641.97, 65.91, 100.0, 47.67, 99.76),
    ),
    "xlnet": (
        V100Row(4, 108.8, 36.77, 5.22, 95.76, 44.47, 70.97),
        V100Row(8, 271.3, 29.48, 7.37, 97.62, 52.08, 69.93),
        V100Row(16, 613.8, 26.07, 12.57, 97.6, 53.5, 68.54),
        V100Row(32, 1266.8, 25.26, 22.09, 94.45, 49.51, 67.87),
        V100Row(64, 2586.8, 24.74, 41.12, 94.54, 48.02, 68.02),
    ),
}
"""By model. Batches that are missing ran out of memory. Latencies and rates were printed apart and agree within 3 %;
the rates have more digits. Not legible, and interpolated, are memory and peak occupancy of inception_v3 at batch 128,
and memory and occupancy of resnext50_32x4d at batch 8."""

V100_MEMORY_BYTES: Final = 16 << 30
VISION_BYTES: Final = 4 * 3 * 224 * 224
"""An image as floats, 602,112 bytes (the thesis once prints 602,122)."""
LANGUAGE_BYTES: Final = 2 * 4 * 512
"""Tokens and mask as 32-bit integers."""
LANGUAGE_MODELS: Final = frozenset({"bert", "bloom_560", "gpt2", "t5", "xlnet"})


def _on_v100(name: str) -> Profile:
    rows = V100_ROWS[name]
    source = "Elvinger (ETH Zurich, MSc thesis 505, 2024), Table A.1"
    return Profile(
        # b / rate has more digits than the printed latency.
        latency_ms=LatencyTable({row.batch: {1: 1000.0 * row.batch / row.rate_rps} for row in rows}),
        max_batch=rows[-1].batch,
        max_cores=1,
        hardware="Tesla V100-SXM2-16GB, GCP n1-standard-16 (Intel Skylake)",
        accelerator="V100",
        device_memory_bytes=round(max(row.memory_percent for row in rows) / 100 * V100_MEMORY_BYTES),
        origin="published",
        source=f"{source}; durations are batch / throughput",
        software="PyTorch 2.4, CUDA 12.4, cuDNN 9.1",
        date="2024-10-01",
        sharing=DeviceSharing(
            law=ShareLaw(),
            full_batch=rows[-1].batch,
            sm_use={row.batch: row.sm_use / 100 for row in rows},
            occupancy={row.batch: row.occupancy / 100 for row in rows},
            peak_occupancy={row.batch: row.peak_occupancy / 100 for row in rows},
            memory={row.batch: row.memory_percent / 100 for row in rows},
            origin="published",
            source=f"{source}; the law is fitted to two printed latencies",
            hardware="Tesla V100-SXM2-16GB",
            software="Nsight Compute 2024.1, Nsight Systems 2023.4",
            date="2024-10-01",
        ),
    )


# iGniter's models on a V100 with TensorRT

IGNITER_V100: Final = IgniterGpu(
    max_mhz=1530.0,
    power_w=300.0,
    idle_w=53.5,
    mhz_per_w=-1.0254,
    schedule_slope_ms=0.00475065,
    schedule_offset_ms=-0.00902243,
    pcie_bytes_per_ms=1e7,
    share_unit=2.5,
)
"""Hardware figures, and α_f, α_sch and β_sch as fitted to the public measurements of iGniter's artefact."""

IGNITER_V100_MODELS: Final = {
    "alexnet": IgniterModel(
        kernels=20,
        schedule_ms=0.0317683,
        cache=0.00237638,
        active=(4.1535e-3, 8.71158, 23.7361, 0.05552, 0.34601),
        power=(0.023893, 37.1081),
        l2=(0.0030921, 2.0296),
        load_bytes=602112,
        feedback_bytes=4000,
    ),
    "resnet50": IgniterModel(
        kernels=80,
        schedule_ms=0.0738162,
        cache=0.00216306,
        active=(-1.7515e-2, 58.2645, -0.01186, 0.34486, 1.90950),
        power=(0.162335, 4.6269),
        l2=(0.0219595, -0.1899),
        load_bytes=602112,
        feedback_bytes=4000,
    ),
    "vgg19": IgniterModel(
        kernels=29,
        schedule_ms=0.0392494,
        cache=0.00201773,
        active=(-4.8346e-3, 158.193, 44.4521, 0.18841, 0.92619),
        power=(0.536729, 2.0819),
        l2=(0.0452175, 2.7228),
        load_bytes=602112,
        feedback_bytes=4000,
    ),
    "ssd": IgniterModel(
        kernels=93,
        schedule_ms=0.1478772,
        cache=0.00228086,
        active=(2.5160e-2, 235.847, -16.7816, 0.26427, 3.41698),
        power=(0.644894, 2.3393),
        l2=(0.0886305, -0.1286),
        load_bytes=1080000,
        feedback_bytes=2968880,
    ),
}
"""Fitted to latencies at batches of 1, 16 and 32 with 10, 50 and 100 % of the SMs, to power and L2 use at some."""
IGNITER_BATCHES: Final = (1, 2, 4, 8, 16, 32)


def _by_igniter(name: str) -> Profile:
    gpu, model = IGNITER_V100, IGNITER_V100_MODELS[name]
    alone_ms = {
        batch: igniter_predictions(gpu, [IgniterResident(model, batch, 100.0)])[0].latency_ms
        for batch in IGNITER_BATCHES
    }
    source = "iGniter (TPDS 2023), public artefact: its equations with coefficients fitted to its measurements"
    return Profile(
        latency_ms=LatencyTable({batch: {1: latency_ms} for batch, latency_ms in alone_ms.items()}),
        max_batch=IGNITER_BATCHES[-1],
        max_cores=1,
        hardware="Tesla V100-SXM2-16GB",
        accelerator="V100",
        origin="fitted",
        source=source,
        software="TensorRT",
        date="2023-01-01",
        measured=Region(1, 32, 1, 1),
        sharing=DeviceSharing(
            law=IgniterLaw(gpu, model),
            full_batch=IGNITER_BATCHES[-1],
            is_capped=True,
            origin="fitted",
            source=source,
            hardware="Tesla V100-SXM2-16GB",
            software="TensorRT",
            date="2023-01-01",
        ),
    )


V100_PROFILES: Final = {
    **{f"{name}-V100": _on_v100(name) for name in V100_ROWS},
    **{f"{name}-V100-TensorRT": _by_igniter(name) for name in IGNITER_V100_MODELS},
}
"""By the names that application files use."""
