"""What replicas hold and what that costs: allocated cores and money, integrated over time.

Cores are allocated from the order to start a replica until it has stopped or is lost; growth counts from its order,
shrinkage once it is in effect. A replica pays the larger of its shares of its node's cores and devices. Knows nothing
of requests.
"""

import math
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from sloop.units import NS_PER_S
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

MICROCORES: Final = 1_000_000
"""Cores are summed as integers, so that a thousand resizes leave no rounding behind."""


class Held(Struct, frozen=True):
    """What one replica takes from its node."""

    spec: ReplicaSpec
    microcores: int
    usd_per_h: float

    @property
    def cores(self) -> float:
        return self.microcores / MICROCORES


class Holdings:
    """All replicas of a run. With `whole_nodes`, every node that holds a replica is paid in full."""

    def __init__(self, nodes: Iterable[Node], *, whole_nodes: bool = False) -> None:
        self.charged_ns = 0
        """Up to when everything is accounted for."""
        self._nodes = {node.name: node for node in nodes}
        self._whole_nodes = whole_nodes
        self._held: dict[ReplicaId, Held] = {}
        self._microcores = 0
        self.microcore_ns = 0
        """Integral of the allocated microcores up to `charged_ns`."""
        self._usd_per_h = 0.0
        self._usd_h_ns = 0.0

    def get(self, replica: ReplicaId) -> Held | None:
        """What this replica holds; None where it is not known or gone."""
        return self._held.get(replica)

    @property
    def cores(self) -> float:
        """Allocated now."""
        return self._microcores / MICROCORES

    @property
    def core_s(self) -> float:
        """Core-seconds up to `charged_ns`."""
        return self.microcore_ns / MICROCORES / NS_PER_S

    @property
    def usd(self) -> float:
        """Cost up to `charged_ns`."""
        return self._usd_h_ns / NS_PER_S / 3600

    def charge(self, until_ns: int) -> None:
        """Account for what was held since the last change."""
        passed_ns = until_ns - self.charged_ns
        self.microcore_ns += self._microcores * passed_ns
        self._usd_h_ns += self._usd_per_h * passed_ns
        self.charged_ns = until_ns

    def hold(self, now_ns: int, replica: ReplicaId, spec: ReplicaSpec, cores: float) -> None:
        """From now on this replica holds `cores`."""
        self.release(now_ns, replica)
        held = Held(spec, round(cores * MICROCORES), self._price(spec, cores))
        self._held[replica] = held
        self._microcores += held.microcores
        self._usd_per_h = self._rate_usd_per_h()

    def release(self, now_ns: int, replica: ReplicaId) -> None:
        """From now on this replica holds nothing."""
        self.charge(now_ns)
        held = self._held.pop(replica, None)
        if held is not None:
            self._microcores -= held.microcores
            self._usd_per_h = self._rate_usd_per_h()

    def _price(self, spec: ReplicaSpec, cores: float) -> float:
        node = self._nodes.get(spec.node or "")
        if node is None or not node.usd_per_h:
            return 0.0
        of_cores = cores / node.cores if node.cores else 0.0
        of_devices = spec.share / len(node.devices) if spec.device and node.devices else 0.0
        return node.usd_per_h * min(1.0, max(of_cores, of_devices))

    def _rate_usd_per_h(self) -> float:
        if not self._nodes:
            return 0.0
        if self._whole_nodes:
            used = {held.spec.node for held in self._held.values()}
            return math.fsum(node.usd_per_h for node in self._nodes.values() if node.name in used)
        return math.fsum(held.usd_per_h for held in self._held.values())
