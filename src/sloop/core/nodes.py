"""Acquires nodes on demand when planned replicas have no room, and releases those that have been empty for a while.

This is what the cluster autoscaler of Kubernetes does: plans name replicas on kinds of hardware, and nodes follow. So
every scaling policy can rent nodes without knowing about them.
"""

from collections.abc import Callable, Mapping, Sequence

from sloop.actions import AcquireNode, Action, Decided, ReleaseNode
from sloop.core.ledger import Ledger, could_hold
from sloop.core.views import Belief
from sloop.text import counted, in_s
from sloop.units import s
from sloop.vocabulary import Node, NodeState, ReplicaId, ReplicaSpec

UNUSED_NS = s(60)
"""How long a node stays empty before it is released, unless the scaling policies say otherwise (`release_after_ns`).
Acquiring one takes a minute or so, and a shorter time would give nodes back between two bursts. Kubernetes waits ten
minutes by default."""
RETRY_NS = s(30)
"""How long after a loss a node on demand may be acquired again."""


class NodePool:
    """The life of the nodes in a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._empty_since_ns: dict[str, int] = {}
        """For each ready node on demand, since when it has been empty."""
        self._lost_ns: dict[str, int] = {}

    @property
    def is_acquiring(self) -> bool:
        """Whether a node has been ordered and is not ready."""
        return NodeState.ACQUIRING in self._ledger.states.values()

    def can_acquire(self, hardware: str, only: str | None = None) -> bool:
        """Whether a node of this kind could be acquired, or is being acquired; `only` this one if it is given."""
        nodes, states = self._ledger.nodes, self._ledger.states
        open_states = (NodeState.RELEASED, NodeState.ACQUIRING, NodeState.RELEASING)
        return any(
            states[name] in open_states
            for name, node in nodes.items()
            if node.on_demand and hardware in ("", node.hardware) and only in (None, name)
        )

    def acquire_for(self, now_ns: int, without_room: Sequence[tuple[ReplicaSpec, Belief]], out: list[Action]) -> None:
        """Acquire the nodes that these replicas need and that are not already on their way."""
        ledger = self._ledger
        coming = Ledger.all_ready(
            [ledger.nodes[name] for name, state in ledger.states.items() if state is NodeState.ACQUIRING]
        )
        ordered: dict[str, int] = {}
        hopeless: set[ReplicaSpec] = set()
        for number, (spec, belief) in enumerate(without_room):
            if spec not in hopeless and coming.place(ReplicaId(number), spec, belief) is None:
                found = ledger.rentable(spec, belief)
                if not found:
                    hopeless.add(spec)
                    continue
                node = found[0].node.node
                coming.add(node, NodeState.READY)
                coming.place(ReplicaId(number), spec, belief)
                ledger.set_state(node.name, NodeState.ACQUIRING)
                ordered[node.hardware] = ordered.get(node.hardware, 0) + 1
                out.append(AcquireNode(node.name))
        for hardware, count in ordered.items():
            replicas = counted(len(without_room), "replica")
            why = f"acquires {counted(count, 'node')} of {hardware}, for {replicas} without room"
            out.append(Decided("node", why))

    def retry_lost(self, now_ns: int) -> None:
        """Let nodes on demand that were lost be acquired again after a while."""
        for name, lost_ns in list(self._lost_ns.items()):
            if now_ns >= lost_ns + RETRY_NS:
                del self._lost_ns[name]
                self._ledger.set_state(name, NodeState.RELEASED)

    def release_unused(
        self,
        now_ns: int,
        unplaced: Mapping[ReplicaSpec, Belief],
        out: list[Action],
        after_ns: Callable[[str], int],
    ) -> None:
        """Release nodes on demand that have been empty for `after_ns`, which depends on their kind, but not those that
        could hold one of the `unplaced` replicas of the plans."""
        ledger = self._ledger
        for name, since_ns in list(self._empty_since_ns.items()):
            if not ledger.is_empty(name):
                self._empty_since_ns[name] = now_ns
            elif now_ns - since_ns >= after_ns(ledger.nodes[name].hardware) and not any(
                could_hold(ledger.nodes[name], spec, belief) for spec, belief in unplaced.items()
            ):
                del self._empty_since_ns[name]
                ledger.set_state(name, NodeState.RELEASING)
                out.append(ReleaseNode(name))
                out.append(Decided("node", f"{name} has been empty for {in_s(now_ns - since_ns)}"))

    def ready(self, node: Node, now_ns: int) -> Node | None:
        """A node was acquired or repaired, has joined the cluster, or has other capacities than before. Returns what it
        was if it was ready and has other cores or memory now."""
        before, state = self._ledger.nodes.get(node.name), self._ledger.states.get(node.name)
        if before == node:
            self._ledger.set_state(node.name, NodeState.READY)
        else:
            self._ledger.add(node, NodeState.READY)
        self._lost_ns.pop(node.name, None)
        if self._ledger.nodes[node.name].on_demand:
            self._empty_since_ns[node.name] = now_ns
        if before is None or state is not NodeState.READY:
            return None
        return before if (before.cores, before.memory_bytes) != (node.cores, node.memory_bytes) else None

    def lose(self, now_ns: int, name: str) -> None:
        """A node has failed, or could not be acquired."""
        if name not in self._ledger.nodes:
            return
        self._ledger.set_state(name, NodeState.LOST)
        self._empty_since_ns.pop(name, None)
        if self._ledger.nodes[name].on_demand:
            self._lost_ns[name] = now_ns

    def released(self, name: str) -> None:
        """A node has been given back."""
        if name in self._ledger.nodes:
            self._ledger.set_state(name, NodeState.RELEASED)
