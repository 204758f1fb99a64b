"""Profiles printed in publications, by name, to repeat their experiments.

`source` says where each was printed and how it was derived; none was measured by sloop.

Sources: Razavi et al., Sponge (EuroMLSys 2024), and the figures of its public artefact.
"""

from typing import Final

from sloop.plugins import Registry
from sloop.profile.profile import (
    Amdahl,
    Fit,
    LatencyTable,
    Profile,
    Region,
    Sample,
)

_GRID_CORES = (1, 2, 4, 8, 16, 32)
_GRID_MS = {
    1: (46.0, 28.9, 18.0, 12.4, 13.0, 12.6),
    2: (78.7, 44.7, 27.2, 18.4, 15.0, 14.9),
    4: (145.4, 82.4, 50.1, 31.4, 26.7, 26.1),
    8: (287.6, 166.1, 87.9, 57.0, 46.5, 42.4),
    16: (383.5, 222.2, 169.0, 114.5, 88.1, 86.1),
}

RESNET_T_CELLS = ((1, 1, 55.0), (2, 1, 97.0), (4, 2, 94.0), (8, 4, 92.0), (4, 8, 37.0), (8, 8, 62.0))
"""Sponge, LatencyTable 1: (batch, cores, P99 in ms) of a ResNet human detector."""

RESNET_T = Profile(
    latency_ms=Amdahl(gamma=35.917, epsilon=5.540, delta=0.903, eta=15.120),
    max_batch=16,
    max_cores=16,
    hardware="Intel Xeon Gold 6240R",
    origin="fitted",
    source="Sponge (EuroMLSys 2024), LatencyTable 1; least-squares fit to its six P99 latencies",
    software="PyTorch on Kubernetes",
    date="2024-04-22",
    measured=Region(batch_min=1, batch_max=8, cores_min=1, cores_max=8),
    samples=tuple(Sample(batch, cores, ms, ms, 0) for batch, cores, ms in RESNET_T_CELLS),
)

RESNET18_HUMAN = Profile(
    latency_ms=LatencyTable({batch: dict(zip(_GRID_CORES, row, strict=True)) for batch, row in _GRID_MS.items()}),
    max_batch=16,
    max_cores=32,
    hardware="Intel Xeon Gold 6240R",
    origin="published",
    source="Sponge (EuroMLSys 2024), public artefact: P99 of a ResNet18 human classifier, 5 batches × 6 core counts",
    software="PyTorch on Kubernetes",
    date="2024-04-22",
    fits={
        "amdahl": Fit(Amdahl(18.287, 45.743, 4.468, 1.514), r2=0.969, mape=0.126, max_error=0.52),
        "amdahl_whole_ms": Fit(Amdahl(18.290, 45.469, 4.488, 1.046), r2=0.969, mape=0.126, max_error=0.52),
        "amdahl_relative": Fit(Amdahl(23.200, 14.963, 3.758, 5.416), r2=0.955, mape=0.0775, max_error=0.183),
    },
)

YOLOV5S_S = Profile(
    latency_ms=Amdahl(gamma=132.0, epsilon=0.0, delta=26.0, eta=8.0),
    max_batch=16,
    max_cores=16,
    hardware="Intel Xeon Gold 6240R",
    origin="assumed",
    source="not printed; calibrated to what Sponge (EuroMLSys 2024) says of YOLOv5s: about 166 ms on one core, "
    "8 cores too slow for 20 requests/s, 16 enough",
    software="PyTorch on Kubernetes",
    date="2024-04-22",
)


_OWN: Final = {
    "ResNet-T": RESNET_T,
    "ResNet18-human": RESNET18_HUMAN,
    "YOLOv5s-S": YOLOV5S_S,
}
PUBLISHED: Final[Registry[Profile]] = Registry("sloop.profiles", _OWN, Profile)
"""The published profiles by the names that application files use."""
