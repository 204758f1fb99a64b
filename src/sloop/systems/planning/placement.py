"""Where the replicas of plans are on an empty cluster, which nodes that takes, and why some have no room.

Replicas are placed one after another, where the place policy of their application chooses, as in the core. What fits on
a node is decided by `core.ledger` alone. If no node has room, the first node on demand that could hold the replica is
rented, as `core.nodes` does.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from msgspec import Struct, structs

from sloop.app.hardware import ANY_BYTES
from sloop.core.ledger import Ledger, Reservation, Scarce, sites, what_is_scarce, why_impossible
from sloop.core.planner import cores_by_hardware
from sloop.core.protocols import Place
from sloop.core.views import Belief, NodeView, Site
from sloop.systems.setup import ApplicationSetup
from sloop.text import counted, number
from sloop.units import GIB
from sloop.vocabulary import Group, Node, NodeState, Plan, ReplicaId, ReplicaSpec

SHOWN_MAX: Final = 32
"""A cluster of at most this many nodes is shown to place policies in full, so that a policy may choose by names. Of a
larger one they see a node of each class, which is all that matters to policies that choose by resources."""


class PlanShortfall(Struct, frozen=True):
    """One reason why a goal cannot be reached: at which stage or on which path, and by how much."""

    kind: Literal["throughput", "deadline", "cores", "memory", "device", "hardware"]
    why: str
    stage: str = ""
    path: tuple[str, ...] = ()
    needs: float = 0.0
    has: float = 0.0
    unit: str = ""
    application: str = ""
    """Empty if it concerns all applications together."""
    hardware: str = ""
    """The kind of hardware that it is about; empty if it is about all kinds."""

    @property
    def missing(self) -> float:
        """The difference between `needs` and `has`, in `unit`."""
        return abs(self.needs - self.has)


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    """The replicas of a group that are on one node, and on one accelerator of it ("" for none)."""

    group: Group
    node: str
    device: str
    count: int


@dataclass(slots=True)
class Room:
    """The room that the plan of one application finds."""

    plan: Plan
    reservations: dict[ReplicaId, tuple[Group, Reservation]] = field(default_factory=dict)
    """Of every replica that has room."""
    shortfalls: list[PlanShortfall] = field(default_factory=list)

    @property
    def placed(self) -> list[PlacedGroup]:
        """Where its groups are, in the order of the plan."""
        counts: dict[tuple[Group, str, str], int] = {}
        for group, found in self.reservations.values():
            key = group, found.node, found.device
            counts[key] = counts.get(key, 0) + 1
        return [PlacedGroup(*key, count) for key, count in counts.items()]


class Placement:
    """The plans of all applications on one cluster, placed in order."""

    def __init__(self, setups: Iterable[ApplicationSetup], plans: Mapping[str, Plan], nodes: Sequence[Node]) -> None:
        self._classes = NodeClasses(nodes)
        self._setups = {setup.application.key: setup for setup in setups}
        self._placed = 0
        self.rooms: dict[str, Room] = {}
        """By application."""
        for key in self._setups:
            self.rooms[key] = self._place(key, plans[key])

    @property
    def nodes(self) -> list[Node]:
        """The nodes that hold a replica, in the order of declaration."""
        names = {found.node for room in self.rooms.values() for _, found in room.reservations.values()}
        return [node for node in self._classes.nodes if node.name in names]

    def room_for(self, application: str, plan: Plan) -> Room:
        """The room that another plan of one application would find while the other applications stay where they are."""
        now = self.rooms[application]
        if plan.same_target(now.plan):
            return now
        self._release(now)
        found = self._place(application, plan)
        self._release(found)
        for id, (_, reservation) in now.reservations.items():
            self._classes.reserve(id, reservation)
        self.rooms[application] = now
        return found

    def full(self, spec: ReplicaSpec, belief: Belief) -> tuple[Scarce, str] | None:
        """What is scarce, and why, if no node has room for one more replica; None if one has."""
        if self._classes.sites(spec, belief) or self._classes.rentable(spec, belief):
            return None
        scarce, why = _scarce(spec, belief, self._classes)
        return scarce, f"no node has room for one more replica of {counted(spec.cores, 'core')}: {why}"

    def _release(self, room: Room) -> None:
        for id in room.reservations:
            self._classes.release(id)

    def _place(self, application: str, plan: Plan) -> Room:
        """Place every replica of a plan; the first of a group without room ends the group."""
        setup, room = self._setups[application], Room(plan)
        policy = setup.system.policies.place
        self.rooms[application] = room
        for group in (group for target in plan.stages for group in target.groups):
            spec = group.spec
            belief = setup.beliefs[spec.stage, spec.variant, spec.slot.hardware]
            for done in range(group.count):
                site = self._site(policy, spec, belief)
                if site is None:
                    room.shortfalls.append(self._no_room(group, group.count - done, belief, application))
                    break
                device = site.device.device.name if site.device else None
                reservation = Reservation.of(spec, belief, site.node.node.name, device)
                self._classes.reserve(ReplicaId(self._placed), reservation)
                room.reservations[ReplicaId(self._placed)] = group, reservation
                self._placed += 1
        return room

    def _site(self, policy: Place, spec: ReplicaSpec, belief: Belief) -> Site | None:
        """Where the place policy puts a replica; on a node on demand only if no other has room."""
        found = self._classes.sites(spec, belief) or self._classes.rentable(spec, belief)
        return found[policy.choose(0, spec, found)] if found else None

    def _no_room(self, group: Group, missing: int, belief: Belief, application: str) -> PlanShortfall:
        """Why `missing` replicas of a group have no room: the first reason that applies, the most fundamental first."""
        spec, found = group.spec, next(self._reasons(group.spec, belief))
        what = (
            f"no node has room for {missing} of {counted(group.count, 'replica')} of {spec.stage}/{spec.variant} with "
            f"{counted(spec.cores, 'core')}"
        )
        return structs.replace(
            found,
            why=f"{what}: {found.why}",
            stage=spec.stage,
            application=application,
            hardware=spec.slot.hardware,
        )

    def _reasons(self, spec: ReplicaSpec, belief: Belief) -> Iterator[PlanShortfall]:
        """The reasons that apply."""
        hardware, of_kind = spec.slot.hardware, self._classes.of_kind(spec.slot.hardware)
        nodes = [node for node in self._classes.nodes if hardware in ("", node.hardware)]
        needs = sum(cores_by_hardware(room.plan).get(hardware, 0.0) for room in self.rooms.values())
        if not self._classes.nodes:
            yield PlanShortfall("cores", "the cluster has no nodes", needs=needs, unit="cores")
        elif impossible := why_impossible(spec, self._classes.nodes):
            yield PlanShortfall("device" if nodes else "hardware", impossible)
        elif spec.node is not None and not any(node.name == spec.node for node in nodes):
            yield PlanShortfall("hardware", f"no node{of_kind} is called {spec.node!r}")
        else:
            yield from _too_large(spec, belief, nodes, of_kind)
        has = sum(node.cores for node in nodes)
        if needs > has:
            plans = "plan needs" if len(self._setups) == 1 else "plans of all applications need"
            why = f"the {plans} {number(needs)} cores{of_kind}, and the cluster has {number(has)}: "
            yield PlanShortfall("cores", f"{why}{number(needs - has)} too few", needs=needs, has=has, unit="cores")
        yield PlanShortfall(*_scarce(spec, belief, self._classes))


def _too_large(spec: ReplicaSpec, belief: Belief, nodes: Sequence[Node], of_kind: str) -> Iterator[PlanShortfall]:
    """Why a replica is too large for each of these nodes, whatever is free."""
    most = max(node.cores for node in nodes)
    if spec.cores > most:
        why = f"the largest node{of_kind} has {counted(most, 'core')}, {number(spec.cores - most)} too few"
        yield PlanShortfall("cores", why, needs=spec.cores, has=most, unit="cores")
    wanted, memory = belief.memory_bytes, max(node.memory_bytes for node in nodes)
    if memory < wanted and memory < ANY_BYTES:
        why = f"each needs {_gib(wanted)} of memory, and the largest node{of_kind} has {memory / GIB:.3g}"
        yield PlanShortfall("memory", why, needs=float(wanted), has=float(memory), unit="bytes")
    if kind := spec.slot.accelerator:
        wanted = belief.device_memory_bytes
        memory = max(each.memory_bytes for node in nodes for each in node.devices if each.kind == kind)
        if memory < wanted:
            why = f"each needs {_gib(wanted)} of the memory of a {kind}, which has {memory / GIB:.3g}"
            yield PlanShortfall("device", why, needs=float(wanted), has=float(memory), unit="bytes")


def _scarce(spec: ReplicaSpec, belief: Belief, classes: "NodeClasses") -> tuple[Scarce, str]:
    """The scarce resource because of which no node has room for one more replica of `spec`, and a text."""
    return what_is_scarce(spec, belief, list(classes.candidates(spec)), classes.of_kind(spec.slot.hardware))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3g} GiB"


class NodeClasses:
    """Nodes grouped into equivalence classes: equal in everything but their names, free resources included.

    A policy that chooses by resources chooses the same from one node per class, the one declared first, as from all
    nodes. So a cluster of thousands of equal nodes costs as much as one of a few.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._ledgers = [Ledger([node]) for node in nodes]
        self._index = {node.name: index for index, node in enumerate(nodes)}
        self._where: dict[ReplicaId, int] = {}
        """The index of each replica's node."""
        self._has_kinds = len({node.hardware for node in nodes}) > 1
        self._classes: dict[Hashable, list[int]] = {}
        """The indexes of the nodes in each class, ascending."""
        for index in range(len(nodes)):
            self._classes.setdefault(self._class(index), []).append(index)

    def of_kind(self, hardware: str) -> str:
        """` of c5.2xlarge` for messages, if the cluster has several kinds of hardware; else empty."""
        return f" of {hardware}" if self._has_kinds else ""

    def representatives(self) -> list[NodeView]:
        """The first node of each class, in the order of declaration."""
        return [self._view(index) for index in sorted(members[0] for members in self._classes.values())]

    def every(self) -> list[NodeView]:
        """Every node, in the order of declaration."""
        return [self._view(index) for index in range(len(self._ledgers))]

    def candidates(self, spec: ReplicaSpec) -> list[NodeView]:
        """The nodes among which a place policy chooses for a replica."""
        if spec.node is not None:
            return [self._view(self._index[spec.node])] if spec.node in self._index else []
        return self.every() if len(self._ledgers) <= SHOWN_MAX else self.representatives()

    def sites(self, spec: ReplicaSpec, belief: Belief) -> list[Site]:
        """Where one more replica fits, on the nodes that are there."""
        return sites(spec, belief, self.candidates(spec))

    def rentable(self, spec: ReplicaSpec, belief: Belief) -> list[Site]:
        """Where a replica fits on the first node on demand that could hold it; empty if there is none."""
        views = self.candidates(spec) if spec.node is not None else self.representatives()
        for view in views:
            if view.state is NodeState.RELEASED:
                found = sites(spec, belief, [replace(view, state=NodeState.READY)])
                if found:
                    return found
        return []

    def reserve(self, replica: ReplicaId, reservation: Reservation) -> bool:
        """Take room for a new replica; this rents a node on demand. False, and nothing taken, where the node is unknown
        or has too little."""
        index = self._index.get(reservation.node)
        if index is None:
            return False
        before, ledger = self._class(index), self._ledgers[index]
        if not ledger.reserve(replica, reservation):
            return False
        self._where[replica] = index
        if ledger.states[reservation.node] is NodeState.RELEASED:
            ledger.set_state(reservation.node, NodeState.READY)
        self._move(index, before)
        return True

    def release(self, replica: ReplicaId) -> None:
        """Free the room of a replica; gives an empty node on demand back."""
        index = self._where.pop(replica)
        before, ledger, node = self._class(index), self._ledgers[index], self.nodes[index]
        ledger.release(replica)
        if node.on_demand and ledger.is_empty(node.name):
            ledger.set_state(node.name, NodeState.RELEASED)
        self._move(index, before)

    def _move(self, index: int, before: Hashable) -> None:
        """Move a node from its class `before` to its present one."""
        left = self._classes[before]
        del left[bisect_left(left, index)]
        if not left:
            del self._classes[before]
        insort(self._classes.setdefault(self._class(index), []), index)

    def _view(self, index: int) -> NodeView:
        (view,) = self._ledgers[index].views()
        return view

    def _class(self, index: int) -> Hashable:
        view, node = self._view(index), self.nodes[index]
        kind = (node.hardware, node.cores, node.memory_bytes, node.devices, node.usd_per_h, node.on_demand)
        devices = tuple((each.free_share, each.free_memory_bytes, each.free_clients) for each in view.devices)
        return *kind, view.state, view.free_cores, view.free_memory_bytes, devices
