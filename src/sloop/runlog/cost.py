"""Cost accounting: allocated cores and money, integrated over time.

A replica's cores are allocated from the order to start it until it has stopped or is lost. A resize to more cores
counts from its order, because the cores are reserved from then on; a resize to fewer counts when it takes effect. A
replica is charged the larger of its shares of its node's cores and devices, because neither can be sold twice.
"""

import math
from collections.abc import Iterable
from typing import Final

from sloop.units import NS_PER_S
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

MICROCORES: Final = 1_000_000
"""Cores are summed as integer millionths, so that a thousand resizes leave no rounding error behind."""


class Allocation:
    """The resources that one replica takes from its node."""

    __slots__ = ("microcores", "spec", "usd_per_h")

    def __init__(self, spec: ReplicaSpec, microcores: int, usd_per_h: float) -> None:
        self.spec = spec
        self.microcores = microcores
        self.usd_per_h = usd_per_h


class CostAccount:
    """All allocations of a run and their integrals up to `charged_ns`."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.charged_ns = 0
        self.microcores: dict[str, int] = {}
        """Per stage, the microcores allocated now."""
        self.microcore_ns: dict[str, int] = {}
        """Per stage, the integral of the allocated microcores over time, in microcore·ns."""
        self._nodes = {node.name: node for node in nodes}
        self._allocations: dict[ReplicaId, Allocation] = {}
        self._usd_per_h = 0.0
        self._usd_per_h_ns = 0.0

    @property
    def cores(self) -> float:
        """Cores allocated now, over all stages."""
        return sum(self.microcores.values()) / MICROCORES

    @property
    def total_microcore_ns(self) -> int:
        """Allocated microcores × ns, over all stages."""
        return sum(self.microcore_ns.values())

    @property
    def usd(self) -> float:
        """Cost up to `charged_ns`, in US dollars."""
        return self._usd_per_h_ns / NS_PER_S / 3600

    def charge(self, until_ns: int) -> None:
        """Integrate up to `until_ns`."""
        passed_ns = until_ns - self.charged_ns
        if passed_ns:
            for stage, microcores in self.microcores.items():
                self.microcore_ns[stage] += microcores * passed_ns
            self._usd_per_h_ns += self._usd_per_h * passed_ns
            self.charged_ns = until_ns

    def allocate(self, now_ns: int, replica: ReplicaId, spec: ReplicaSpec, cores: float) -> None:
        """`replica` has `cores` from `now_ns` on."""
        self.release(now_ns, replica)
        made = Allocation(spec, round(cores * MICROCORES), self._price_usd_per_h(spec, cores))
        self._allocations[replica] = made
        self.microcores[spec.stage] = self.microcores.get(spec.stage, 0) + made.microcores
        self.microcore_ns.setdefault(spec.stage, 0)
        self._usd_per_h = self._total_usd_per_h()

    def grow(self, now_ns: int, replica: ReplicaId, cores: float) -> None:
        """`replica` was ordered to get `cores`: if that is more than it has, charge them from `now_ns` on."""
        found = self._allocations.get(replica)
        if found is not None and round(cores * MICROCORES) > found.microcores:
            self.allocate(now_ns, replica, found.spec, cores)

    def release(self, now_ns: int, replica: ReplicaId) -> None:
        """Stop charging `replica` from `now_ns` on."""
        self.charge(now_ns)
        found = self._allocations.pop(replica, None)
        if found is not None:
            self.microcores[found.spec.stage] -= found.microcores
            self._usd_per_h = self._total_usd_per_h()

    def _price_usd_per_h(self, spec: ReplicaSpec, cores: float) -> float:
        node = self._nodes.get(spec.node or "")
        if node is None or not node.usd_per_h:
            return 0.0
        of_cores = cores / node.cores if node.cores else 0.0
        of_devices = spec.share / len(node.devices) if spec.device and node.devices else 0.0
        return node.usd_per_h * min(1.0, max(of_cores, of_devices))

    def _total_usd_per_h(self) -> float:
        """The price of all replicas; recomputed at each change, because adding and subtracting floats would drift."""
        return math.fsum(found.usd_per_h for found in self._allocations.values())
