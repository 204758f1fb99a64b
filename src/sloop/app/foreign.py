"""Profiles that speak of another processor than the one their model would run on.

Latencies carry over between processors badly, so whoever plans or serves with such a profile is told. Only `local`
nodes can be told to differ: what processor a cloud's kind has is the cloud's choice.
"""

import re

from sloop.app.application import Application
from sloop.app.hardware import LOCAL
from sloop.machine import processor


def foreign_profiles(application: Application) -> tuple[str, ...]:
    """One line for each variant whose profile names another processor, where `local` nodes are part of the cluster."""
    if not any(node.hardware == LOCAL for node in application.cluster):
        return ()
    here = processor()
    return tuple(
        f"{stage.name}/{variant.name}: its profile is of {there}, this machine has {here}; "
        f"measure it here with `sloop profile {variant.model or 'MODEL'}`"
        for stage in application.stages
        for variant in stage.variants
        if variant.profile is not None and (there := _processor_of(variant.profile.hardware)) not in ("", here)
    )


def _processor_of(hardware: str) -> str:
    """What `sloop.machine.hardware_name` says without its count of cores: fewer of them are no other processor."""
    return re.sub(r", \d+ cores$", "", hardware)
