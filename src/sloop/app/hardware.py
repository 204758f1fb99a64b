"""Kinds of hardware: what a node of a kind has and costs, and the machine we are on.

Promises that every price says where it was published. `local` is looked up when first asked for; nothing else here
touches the machine. Knows nothing of applications.

Sources: prices and instance types of Ribbon (Li et al., SC 2021, price list of its artefact) and of Paldia (Table II);
cores and memory as Amazon lists them for those types.
"""

import os
from dataclasses import dataclass
from functools import cache

from sloop.machine import usable_cpus
from sloop.vocabulary import Node

GIB = 1 << 30
LOCAL, CUSTOM = "local", "custom"
ANY_BYTES = 1 << 62
"""Memory of a node of which nobody has said how much it has: enough for anything, for it must not stop replicas."""

_RIBBON = "EC2 on demand, us-east-1, as listed by Ribbon (SC 2021)"
_PALDIA = "EC2 on demand, us-east-1, as listed by Paldia (Table II)"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of node. `cores` are virtual ones; `devices` names its accelerators; prices are on demand."""

    name: str
    cores: float
    memory_bytes: int
    devices: tuple[str, ...] = ()
    usd_per_h: float = 0.0
    source: str = ""

    def node(self, name: str) -> Node:
        """One node of this kind."""
        return Node(name, self.name, self.cores, self.memory_bytes, self.devices, self.usd_per_h)


def _kind(
    name: str, cores: int, memory_gib: float, usd_per_h: float, device: str = "", source: str = _RIBBON
) -> Hardware:
    return Hardware(name, cores, int(memory_gib * GIB), (device,) if device else (), usd_per_h, source)


KINDS: dict[str, Hardware] = {
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
"""Cloud kinds by name; `local` and `custom` are not among them."""


@cache
def local() -> Hardware:
    """The machine we are on: the cores this process may use, all memory, no price."""
    try:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no sysconf on this system
        memory_bytes = ANY_BYTES
    return Hardware(LOCAL, float(len(usable_cpus())), memory_bytes, source="this machine")


def known() -> tuple[str, ...]:
    """Every name a node's `hardware` may have."""
    return (LOCAL, CUSTOM, *KINDS)
