"""The nodes of the simulated cluster: they are acquired and released, fail, and are repaired. Must not import beliefs,
policies or the core."""

from collections import Counter
from collections.abc import Iterable

from sloop.events import NodeLost, NodeReady, NodeReleased
from sloop.sim.happenings import NodeFailed, Outage, Pending
from sloop.sim.truth.cold_start import AcquisitionSampler
from sloop.sim.truth.failure import FaultSampler
from sloop.units import s
from sloop.vocabulary import Node, NodeState


class SimulatedNode:
    """A machine: its state, and the pending event that ends it."""

    __slots__ = ("node", "pending", "state")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.state = NodeState.RELEASED if node.on_demand else NodeState.READY
        self.pending = -1
        """Sequence number of its next event: its failure while it is ready, its repair while it is lost."""


class SimulatedNodes(dict[str, SimulatedNode]):
    """All nodes, by name."""

    def __init__(
        self, nodes: Iterable[Node], acquisition: AcquisitionSampler, faults: FaultSampler, pending: Pending
    ) -> None:
        super().__init__({node.name: SimulatedNode(node) for node in nodes})
        self._acquisition, self._faults, self._rates, self._pending = acquisition, faults, faults.rates, pending
        self._healed = False
        self._out_until_ns: dict[str, int] = {}
        """By node, until when it cannot be acquired."""
        if self._rates.outage_at_s:
            pending.add(s(self._rates.outage_at_s), Outage())
        for node in self.values():
            if node.state is NodeState.READY:
                self._plan_failure(0, node)

    def ready(self, now_ns: int, name: str) -> None:
        """A node that was acquired or repaired is there."""
        node = self[name]
        node.state = NodeState.READY
        self._plan_failure(now_ns, node)

    def acquire(self, now_ns: int, name: str) -> None:
        """A node on demand comes, unless there is none."""
        node = self[name]
        node.state = NodeState.ACQUIRING
        at_ns = now_ns + self._acquisition.draw_ns(now_ns, node.node.hardware)
        is_out = now_ns < self._out_until_ns.get(name, 0)
        if not self._healed and (is_out or self._faults.strikes("failed_acquire", self._rates.failed_acquire)):
            node.state = NodeState.LOST
            self._pending.add(at_ns, NodeLost(name, f"no {node.node.hardware} is available"))
        else:
            self._pending.add(at_ns, NodeReady(node.node))

    def release(self, now_ns: int, name: str) -> None:
        """A node is given back."""
        node = self[name]
        node.state = NodeState.RELEASED
        self._cancel_failure(node)
        self._pending.add(now_ns, NodeReleased(name))

    def lose(self, now_ns: int, name: str, repair_ns: int = -1) -> None:
        """A node goes down. Unless it is on demand, it is repaired after `repair_ns` (-1: as declared)."""
        node = self[name]
        node.state, node.pending = NodeState.LOST, -1
        self._pending.add(now_ns, NodeLost(name, "it went down"))
        if not node.node.on_demand:
            repair_ns = s(self._rates.node_repair_s) if repair_ns < 0 else repair_ns
            node.pending = self._pending.add(now_ns + repair_ns, NodeReady(node.node))

    def begin_outage(self, now_ns: int, replicas: Counter[str]) -> str:
        """The node with the most replicas goes down, of equal ones the first declared, and the next outage is planned.
        Returns its name; empty if none has any."""
        name = max(self, key=replicas.__getitem__, default="")
        length_ns = s(self._rates.outage_s)
        self._pending.add(now_ns + 2 * length_ns, Outage())
        if not replicas[name]:
            return ""
        self._cancel_failure(self[name])
        self._out_until_ns[name] = now_ns + length_ns
        self.lose(now_ns, name, length_ns)
        return name

    def heal(self, now_ns: int) -> None:
        """None fails from now on, and those that are down are repaired."""
        self._healed = True
        for node in self.values():
            if node.state is NodeState.LOST and not node.node.on_demand:
                self._pending.void.add(node.pending)
                self._pending.add(now_ns, NodeReady(node.node))

    def _plan_failure(self, now_ns: int, node: SimulatedNode) -> None:
        """Plan the failure of a node that is ready now."""
        mean_s = self._rates.node_mtbf_s
        if mean_s > 0.0 and not self._healed:
            at_ns = now_ns + self._faults.after_ns("node", mean_s)
            node.pending = self._pending.add(at_ns, NodeFailed(node.node.name))

    def _cancel_failure(self, node: SimulatedNode) -> None:
        if node.pending >= 0 and not self._healed:
            self._pending.void.add(node.pending)
        node.pending = -1
