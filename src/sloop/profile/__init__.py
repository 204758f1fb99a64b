"""How fast models are: forms, fits, measurements with their provenance, and the estimates policies are shown."""

from sloop.profile.estimate import Estimate
from sloop.profile.forms import Amdahl, Latency, Quadratic, Table
from sloop.profile.profile import Fit, Origin, Profile, Region
from sloop.profile.published import PUBLISHED, RESNET18_HUMAN, RESNET_T, YOLOV5S_S
from sloop.profile.sample import Sample

__all__ = [
    "PUBLISHED",
    "RESNET18_HUMAN",
    "RESNET_T",
    "YOLOV5S_S",
    "Amdahl",
    "Estimate",
    "Fit",
    "Latency",
    "Origin",
    "Profile",
    "Quadratic",
    "Region",
    "Sample",
    "Table",
]
