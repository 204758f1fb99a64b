"""Hardware: the resources and price of each kind of node, and the local machine.

Every price names its source. Only `local` and `foreign_profiles` read the local machine.

Sources: prices and instance types of Ribbon (Li et al., SC 2021, price list of its artefact) and of Paldia (Table II);
cores, memory and memory of the accelerators as Amazon lists them for those types; clients of an accelerator as NVIDIA's
documentation of MPS (48 since Volta, 16 before).
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from sloop.app.application import Application
from sloop.machine import processor, usable_cpus
from sloop.text import listed
from sloop.vocabulary import Device, Node

GIB = 1 << 30
LOCAL, CUSTOM = "local", "custom"
ACQUIRE_S: Final = 60.0
"""Seconds from the order of a node on demand until it can start replicas. Assumed for every kind: no source measured
all of them. Studies of EC2 found one to two minutes, and Amazon's newer images boot faster."""
ANY_BYTES = 1 << 62
"""The memory of a node with unknown memory: so large that every replica fits."""

_RIBBON = "EC2 on demand, us-east-1, as listed by Ribbon (SC 2021)"
_PALDIA = "EC2 on demand, us-east-1, as listed by Paldia (Table II)"


@dataclass(frozen=True, slots=True)
class HardwareKind:
    """A kind of node: virtual cores, memory, accelerators, its on-demand price and the source of all of them."""

    name: str
    cores: float
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    usd_per_h: float = 0.0
    source: str = ""
    acquire_s: float = ACQUIRE_S
    """Seconds until a node on demand can start replicas."""

    def node(self, name: str) -> Node:
        """One node of this kind."""
        return Node(name, self.name, self.cores, self.memory_bytes, self.devices, self.usd_per_h)


ACCELERATORS: dict[str, Device] = {
    device.kind: device
    for device in (
        Device("M60", "M60", 8 * GIB, clients_max=16),
        Device("K80", "K80", 12 * GIB, clients_max=16),
        Device("T4", "T4", 16 * GIB),
        Device("V100", "V100", 16 * GIB),
    )
}
"""Accelerators by kind: one GPU as EC2 rents it, which of the M60 and the K80 is half a board."""


def _kind(
    name: str, cores: int, memory_gib: float, usd_per_h: float, device: str = "", source: str = _RIBBON
) -> HardwareKind:
    devices = (ACCELERATORS[device],) if device else ()
    return HardwareKind(name, cores, int(memory_gib * GIB), devices, usd_per_h, source)


KINDS: dict[str, HardwareKind] = {
    kind.name: kind
    for kind in (
        _kind("c4.2xlarge", 8, 15, 0.398),
        _kind("c4.4xlarge", 16, 30, 0.796),
        _kind("c5.2xlarge", 8, 16, 0.34),
        _kind("c5.4xlarge", 16, 32, 0.68),
        _kind("c5a.2xlarge", 8, 16, 0.308),
        _kind("c5a.4xlarge", 16, 32, 0.616),
        _kind("c5n.2xlarge", 8, 21, 0.432),
        _kind("c5n.4xlarge", 16, 42, 0.864),
        _kind("c6i.2xlarge", 8, 16, 0.34, source=_PALDIA),
        _kind("c6i.4xlarge", 16, 32, 0.68, source=_PALDIA),
        _kind("m4.xlarge", 4, 16, 0.20),
        _kind("m4.2xlarge", 8, 32, 0.40),
        _kind("m5.xlarge", 4, 16, 0.192),
        _kind("m5.2xlarge", 8, 32, 0.384),
        _kind("m5a.xlarge", 4, 16, 0.172),
        _kind("m5a.2xlarge", 8, 32, 0.344),
        _kind("m5n.xlarge", 4, 16, 0.238),
        _kind("m5n.2xlarge", 8, 32, 0.476),
        _kind("r4.large", 2, 15.25, 0.133),
        _kind("r4.xlarge", 4, 30.5, 0.266),
        _kind("r5.large", 2, 16, 0.126),
        _kind("r5.xlarge", 4, 32, 0.252),
        _kind("r5a.large", 2, 16, 0.113),
        _kind("r5a.xlarge", 4, 32, 0.226),
        _kind("r5n.large", 2, 16, 0.149),
        _kind("r5n.xlarge", 4, 32, 0.298),
        _kind("t2.xlarge", 4, 16, 0.1856),
        _kind("t2.2xlarge", 8, 32, 0.3712),
        _kind("t3.xlarge", 4, 16, 0.1664),
        _kind("t3.2xlarge", 8, 32, 0.3328),
        _kind("t3a.xlarge", 4, 16, 0.1504),
        _kind("t3a.2xlarge", 8, 32, 0.3008),
        _kind("g3s.xlarge", 4, 30.5, 0.75, "M60", source=_PALDIA),
        _kind("g4dn.xlarge", 4, 16, 0.526, "T4"),
        _kind("g4dn.2xlarge", 8, 32, 0.752, "T4"),
        _kind("p2.xlarge", 4, 61, 0.90, "K80"),
        _kind("p3.2xlarge", 8, 61, 3.06, "V100"),
    )
}
"""Cloud kinds by name, without `local` and `custom`."""


@cache
def local() -> HardwareKind:
    """The local machine: the cores that this process may use, all memory, no price."""
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no sysconf on this system
        memory_bytes = ANY_BYTES
    return HardwareKind(LOCAL, float(len(usable_cpus())), memory_bytes, source="this machine")


def known_kinds() -> tuple[str, ...]:
    """Every value that a node's `hardware` may have."""
    return (LOCAL, CUSTOM, *KINDS)


def acquire_s(hardware: str) -> float:
    """Seconds until a node on demand of this kind can start replicas."""
    return KINDS[hardware].acquire_s if hardware in KINDS else ACQUIRE_S


def unpriced(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The hardware of those nodes that have no price, each once."""
    return tuple(dict.fromkeys(node.hardware for node in nodes if not node.usd_per_h))


def shared_profiles(application: Application) -> tuple[str, ...]:
    """An assumption for each variant whose only profile is taken as its speed on several kinds of hardware."""
    found: list[str] = []
    for stage in application.stages:
        for variant in stage.variants:
            kinds = [kind for kind in application.profiles_of(variant) if kind not in variant.profiles]
            if len(kinds) > 1:
                what = f"one profile is taken as its speed on {listed(kinds)}; `profiles` can name one for each"
                found.append(f"{stage.name}/{variant.name}: {what}")
    return tuple(found)


def foreign_profiles(application: Application) -> tuple[str, ...]:
    """A warning for each variant whose profile was measured on another processor than this machine has.

    Latencies of one processor are wrong for another. Only clusters with `local` nodes are checked, because a cloud may
    use different processors for one instance type.
    """
    if not any(node.hardware == LOCAL for node in application.cluster):
        return ()
    here = processor()
    return tuple(
        f"{stage.name}/{variant.name}: its profile is of {there}, this machine has {here}; "
        f"measure it here with `sloop profile {variant.model or 'MODEL'}`"
        for stage in application.stages
        for variant in stage.variants
        if (profile := variant.on(LOCAL)) is not None and (there := _processor_of(profile.hardware)) not in ("", here)
    )


def _processor_of(hardware: str) -> str:
    """The name of the processor in `sloop.machine.hardware_name`, without the number of cores."""
    return re.sub(r", \d+ cores$", "", hardware)
