"""Cost accounting: allocated cores and money of replicas, and whole nodes while they are held, integrated over time.

A replica's cores are allocated from the order to start it until it has stopped or is lost. A resize to more cores
counts from its order, because the cores are reserved from then on; a resize to fewer counts when it takes effect. A
replica is charged the larger of its shares of its node's cores and devices, because neither can be sold twice.

A node is held, and costs its whole price, from the order to acquire it until it is released or lost. A node that is
always there is held from the start, except while it is lost.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from sloop.units import NS_PER_S
from sloop.vocabulary import Node, NodeState, ReplicaId, ReplicaSpec

MICROCORES: Final = 1_000_000
"""Cores are summed as integer millionths, so that a thousand resizes leave no rounding error behind."""
PARTS: Final = 1 << 1074
"""Every float is a whole number of parts of 1 / 2**1074, so that prices are added and subtracted without rounding."""
HELD_STATES: Final = frozenset({NodeState.ACQUIRING, NodeState.READY, NodeState.RELEASING})
"""The states in which a node costs money."""


class Allocation:
    """The resources that one replica takes from its node."""

    __slots__ = ("microcores", "spec", "usd_per_h")

    def __init__(self, spec: ReplicaSpec, microcores: int, usd_per_h: float) -> None:
        self.spec = spec
        self.microcores = microcores
        self.usd_per_h = usd_per_h


class CostAccount:
    """All allocations of a run and their integrals up to `charged_ns`. `nodes`, by name, have the prices; nodes may be
    added to it later."""

    def __init__(self, nodes: Mapping[str, Node] | None = None) -> None:
        self.charged_ns = 0
        self.microcores: dict[str, int] = {}
        """Per stage, the microcores allocated now."""
        self.microcore_ns: dict[str, int] = {}
        """Per stage, the integral of the allocated microcores over time, in microcore·ns."""
        self.hardware_microcores: dict[str, int] = {}
        """Per kind of hardware, the microcores allocated now."""
        self.hardware_microcore_ns: dict[str, int] = {}
        """Per kind of hardware, the integral of the allocated microcores over time."""
        self._nodes = nodes if nodes is not None else {}
        self._allocations: dict[ReplicaId, Allocation] = {}
        self._usd_parts = 0
        """The price of all replicas, in `PARTS`."""
        self._usd_per_h = 0.0
        """The same, rounded once."""
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

    @property
    def usd_per_h(self) -> float:
        """The price of all replicas now."""
        return self._usd_per_h

    def charge(self, until_ns: int) -> None:
        """Integrate up to `until_ns`."""
        passed_ns = until_ns - self.charged_ns
        if passed_ns:
            for stage, microcores in self.microcores.items():
                self.microcore_ns[stage] += microcores * passed_ns
            for hardware, microcores in self.hardware_microcores.items():
                self.hardware_microcore_ns[hardware] += microcores * passed_ns
            self._usd_per_h_ns += self._usd_per_h * passed_ns
            self.charged_ns = until_ns

    def allocate(self, now_ns: int, replica: ReplicaId, spec: ReplicaSpec, cores: float) -> None:
        """`replica` has `cores` from `now_ns` on."""
        self.release(now_ns, replica)
        made = Allocation(spec, round(cores * MICROCORES), self._price_usd_per_h(spec, cores))
        self._allocations[replica] = made
        self._add(spec, made.microcores)
        self._add_price(_parts(made.usd_per_h))

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
            self._add(found.spec, -found.microcores)
            self._add_price(-_parts(found.usd_per_h))

    def _add(self, spec: ReplicaSpec, microcores: int) -> None:
        stage, hardware = spec.stage, spec.slot.hardware
        self.microcores[stage] = self.microcores.get(stage, 0) + microcores
        self.microcore_ns.setdefault(stage, 0)
        self.hardware_microcores[hardware] = self.hardware_microcores.get(hardware, 0) + microcores
        self.hardware_microcore_ns.setdefault(hardware, 0)

    def _price_usd_per_h(self, spec: ReplicaSpec, cores: float) -> float:
        node = self._nodes.get(spec.node or "")
        if node is None or not node.usd_per_h:
            return 0.0
        of_cores = cores / node.cores if node.cores else 0.0
        of_devices = spec.slot.share / len(node.devices) if spec.device and node.devices else 0.0
        return node.usd_per_h * min(1.0, max(of_cores, of_devices))

    def _add_price(self, parts: int) -> None:
        if parts:
            self._usd_parts += parts
            self._usd_per_h = self._usd_parts / PARTS


def _parts(usd_per_h: float) -> int:
    """A price in `PARTS`, exactly."""
    if not usd_per_h:
        return 0
    numerator, denominator = usd_per_h.as_integer_ratio()
    return numerator * (PARTS // denominator)


class NodeRecord(Struct):
    """A node of the cluster, its state, and how long it was held."""

    node: Node
    state: NodeState
    since_ns: int
    """When it entered its state."""
    held_ns: int = 0
    """How long it was held, up to `NodeAccount.charged_ns`."""

    @property
    def is_held(self) -> bool:
        """Whether it costs money now."""
        return self.state in HELD_STATES


class NodeRow(Struct, frozen=True):
    """All nodes of one kind of hardware: how long they were held together, their cost, and the most held at once."""

    hardware: str
    held_s: float
    usd: float
    most: int
    busy: float | None = None
    """The part of the time held in which they worked, 0 to 1: of accelerators, the part in which a batch ran; of nodes
    without, of cores. None if it is unknown."""
    energy_wh: float | None = None
    """What they drew in the time held, estimated from `busy`; None if the power of the kind is unknown."""


class NodeAccount:
    """The nodes of a cluster: which are held, and what they have cost up to `charged_ns`.

    `steps_kept` limits how many changes `steps` keeps.
    """

    def __init__(self, nodes: Iterable[Node] = (), *, steps_kept: int | None = None) -> None:
        self.charged_ns = 0
        self.records: dict[str, NodeRecord] = {}
        self.nodes: dict[str, Node] = {}
        """By name; `CostAccount` reads the prices here."""
        self.steps: deque[tuple[int, str, int]] = deque(maxlen=steps_kept)
        """Instants, each with a kind of hardware and how many nodes of it are held from then on."""
        self._held: dict[str, int] = {}
        self._most: dict[str, int] = {}
        for node in nodes:
            state = NodeState.RELEASED if node.on_demand else NodeState.READY
            self._add(node, NodeRecord(node, state, 0))

    def begin(self, start_ns: int) -> None:
        """The run begins: charge the nodes that are always there from now on."""
        self.charged_ns = start_ns
        for record in self.records.values():
            record.since_ns = start_ns
        for hardware in self._held:
            self._count(start_ns, hardware, 0)

    def change(self, now_ns: int, name: str, state: NodeState) -> None:
        """A node enters a state. Nodes that nobody has declared are ignored."""
        record = self.records.get(name)
        if record is None:
            return
        self.charge(now_ns)
        held = record.is_held
        record.state, record.since_ns = state, now_ns
        if record.is_held is not held:
            self._count(now_ns, record.node.hardware, 1 if record.is_held else -1)

    def ready(self, now_ns: int, node: Node) -> None:
        """A node is ready; it may have joined the cluster just now, or have other capacities than before."""
        if node.name not in self.records:
            self.charge(now_ns)
            self._add(node, NodeRecord(node, NodeState.RELEASED, now_ns))
        record = self.records[node.name]
        if (record.node.cores, record.node.memory_bytes) != (node.cores, node.memory_bytes):
            record.node = node
        self.change(now_ns, node.name, NodeState.READY)

    def charge(self, until_ns: int) -> None:
        """Charge all nodes that are held, up to `until_ns`."""
        passed_ns = until_ns - self.charged_ns
        self.charged_ns = until_ns
        for record in self.records.values():
            if record.is_held:
                record.held_ns += passed_ns

    @property
    def usd(self) -> float:
        """Cost of all nodes up to `charged_ns`, in US dollars."""
        return math.fsum(row.usd for row in self.rows())

    def rows(self) -> list[NodeRow]:
        """One row for each kind of hardware of which a node was held, in the order in which the nodes were declared."""
        found = []
        for hardware, most in self._most.items():
            records = [each for each in self.records.values() if each.node.hardware == hardware]
            held_ns = sum(each.held_ns for each in records)
            usd = math.fsum(each.held_ns * each.node.usd_per_h for each in records) / NS_PER_S / 3600
            if most:
                found.append(NodeRow(hardware, held_ns / NS_PER_S, usd, most))
        return found

    def _add(self, node: Node, record: NodeRecord) -> None:
        self.records[node.name] = record
        self.nodes[node.name] = node
        held = self._held.get(node.hardware, 0) + record.is_held
        self._held[node.hardware] = held
        self._most[node.hardware] = max(self._most.get(node.hardware, 0), held)

    def _count(self, now_ns: int, hardware: str, change: int) -> None:
        """Count `change` more (or fewer) held nodes of a kind."""
        self._held[hardware] += change
        self._most[hardware] = max(self._most[hardware], self._held[hardware])
        self.steps.append((now_ns, hardware, self._held[hardware]))
