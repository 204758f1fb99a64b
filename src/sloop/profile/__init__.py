"""Model profiles: latency functions and their fits, measurements with provenance, and the estimates policies use."""

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
