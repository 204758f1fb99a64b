"""Profiles: how long batches of a model take on a kind of hardware; fits, beliefs, kinds of hardware."""

from sloop.app.hardware import KINDS, power_of
from sloop.profile.estimate import Estimate
from sloop.profile.fit import Point, fit_amdahl
from sloop.profile.profile import (
    Amdahl,
    DeviceSharing,
    LatencyTable,
    LayerBlock,
    LayerProfile,
    Origin,
    ParametricLatency,
    Profile,
    Quadratic,
    Region,
    Sample,
    SizeLatency,
    Startup,
    digest_of_model,
    load_profile,
    path_beside,
    sample_of,
    save_profile,
)
from sloop.profile.published import PUBLISHED, RESNET18_HUMAN, RESNET_T, RESNET_T_CELLS, YOLOV5S_S

__all__ = [
    "KINDS",
    "PUBLISHED",
    "RESNET18_HUMAN",
    "RESNET_T",
    "RESNET_T_CELLS",
    "YOLOV5S_S",
    "Amdahl",
    "DeviceSharing",
    "Estimate",
    "LatencyTable",
    "LayerBlock",
    "LayerProfile",
    "Origin",
    "ParametricLatency",
    "Point",
    "Profile",
    "Quadratic",
    "Region",
    "Sample",
    "SizeLatency",
    "Startup",
    "digest_of_model",
    "fit_amdahl",
    "load_profile",
    "path_beside",
    "power_of",
    "sample_of",
    "save_profile",
]
