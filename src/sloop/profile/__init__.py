"""How fast models are: latency forms and fits, measurements with their provenance, and what policies believe."""

from sloop.profile.estimate import Estimate
from sloop.profile.profile import Amdahl, Fit, Latency, LatencyTable, Origin, Profile, Quadratic, Region, Sample
from sloop.profile.published import PUBLISHED, RESNET18_HUMAN, RESNET_T, YOLOV5S_S

__all__ = [
    "PUBLISHED",
    "RESNET18_HUMAN",
    "RESNET_T",
    "YOLOV5S_S",
    "Amdahl",
    "Estimate",
    "Fit",
    "Latency",
    "LatencyTable",
    "Origin",
    "Profile",
    "Quadratic",
    "Region",
    "Sample",
]
