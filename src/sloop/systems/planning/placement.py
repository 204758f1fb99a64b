"""Where the replicas of plans are on an empty cluster, which nodes that takes, and why some have no room.

Replicas are placed one after another, where the place policy of their application chooses, as in the core. What fits on
a node is decided by `core.ledger` alone. If no node has room, the first node on demand that could hold the replica is
rented, as `core.nodes` does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from msgspec import Struct, structs

from sloop.app.hardware import ANY_BYTES
from sloop.core.ledger import Ledger, Reservation, Scarce, cores_by_hardware, what_is_scarce, why_impossible
from sloop.core.views import Belief, Site
from sloop.systems.setup import ApplicationSetup
from sloop.text import counted, number
from sloop.units import GIB
from sloop.vocabulary import Group, Node, NodeState, Plan, ReplicaId, ReplicaSpec


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
        for group, reservation in self.reservations.values():
            key = group, reservation.node, reservation.device
            counts[key] = counts.get(key, 0) + 1
        return [PlacedGroup(*key, count) for key, count in counts.items()]


class Placement:
    """The plans of all applications on one cluster, placed in order."""

    def __init__(self, setups: Iterable[ApplicationSetup], plans: Mapping[str, Plan], nodes: Sequence[Node]) -> None:
        self._ledger = Ledger(nodes)
        self._setups = {setup.application.key: setup for setup in setups}
        self._placed = count()
        self.rooms: dict[str, Room] = {}
        """By application."""
        for key in self._setups:
            self._place(key, plans[key])

    @property
    def nodes(self) -> list[Node]:
        """The nodes that hold a replica, in the order of declaration."""
        reserved = (reservation for room in self.rooms.values() for _, reservation in room.reservations.values())
        names = {reservation.node for reservation in reserved}
        return [node for name, node in self._ledger.nodes.items() if name in names]

    def room_for(self, application: str, plan: Plan) -> Room:
        """The room that another plan of one application would find while the other applications stay where they are."""
        now = self.rooms[application]
        if plan.same_target(now.plan):
            return now
        ledger, self._ledger = self._ledger, self._ledger.without(now.reservations)
        for name, node in self._ledger.nodes.items():
            if node.on_demand and self._ledger.is_empty(name):
                self._ledger.set_state(name, NodeState.RELEASED)
        room = self._place(application, plan)
        self._ledger, self.rooms[application] = ledger, now
        return room

    def full(self, spec: ReplicaSpec, belief: Belief) -> tuple[Scarce, str] | None:
        """What is scarce, and why, if no node has room for one more replica; None if one has."""
        if self._sites(spec, belief, one_of_equal=True):
            return None
        scarce, why = self._scarce(spec, belief)
        return scarce, f"no node has room for one more replica of {counted(spec.cores, 'core')}: {why}"

    def _place(self, application: str, plan: Plan) -> Room:
        """Place every replica of a plan; the first of a group without room ends the group."""
        setup, room = self._setups[application], Room(plan)
        policy = setup.system.policies.place
        self.rooms[application] = room
        for group in (group for target in plan.stages for group in target.groups):
            spec = group.spec
            belief = setup.beliefs[spec.stage, spec.variant, spec.slot.hardware]
            for done in range(group.count):
                sites = self._sites(spec, belief, one_of_equal=policy.ignores_names)
                if not sites:
                    room.shortfalls.append(self._no_room(group, group.count - done, belief, application))
                    break
                site = sites[policy.choose(0, spec, sites)]
                id, device = ReplicaId(next(self._placed)), site.device.device.name if site.device else None
                reservation = Reservation.of(spec, belief, site.node.node.name, device)
                self._ledger.reserve(id, reservation)
                if self._ledger.states[reservation.node] is NodeState.RELEASED:
                    self._ledger.set_state(reservation.node, NodeState.READY)
                room.reservations[id] = group, reservation
        return room

    def _sites(self, spec: ReplicaSpec, belief: Belief, *, one_of_equal: bool) -> list[Site]:
        """Among which sites the place policy chooses for a replica: those on a node on demand that would have to be
        rented only if no other has room."""
        return self._ledger.sites(spec, belief, one_of_equal=one_of_equal) or self._ledger.rentable(spec, belief)

    def _scarce(self, spec: ReplicaSpec, belief: Belief) -> tuple[Scarce, str]:
        """The scarce resource because of which no node has room for one more replica of `spec`, and a text."""
        ledger = self._ledger
        views = ledger.firsts()
        if spec.node is not None:
            views = [ledger.view(spec.node)] if spec.node in ledger.nodes else []
        return what_is_scarce(spec, belief, views, self._of_kind(spec.slot.hardware))

    def _of_kind(self, hardware: str) -> str:
        """` of c5.2xlarge` for messages, if the cluster has several kinds of hardware; else empty."""
        return f" of {hardware}" if len({node.hardware for node in self._ledger.nodes.values()}) > 1 else ""

    def _no_room(self, group: Group, missing: int, belief: Belief, application: str) -> PlanShortfall:
        """Why `missing` replicas of a group have no room: the first reason that applies, the most fundamental first."""
        spec, reason = group.spec, next(self._reasons(group.spec, belief))
        what = (
            f"no node has room for {missing} of {counted(group.count, 'replica')} of {spec.stage}/{spec.variant} with "
            f"{counted(spec.cores, 'core')}"
        )
        return structs.replace(
            reason,
            why=f"{what}: {reason.why}",
            stage=spec.stage,
            application=application,
            hardware=spec.slot.hardware,
        )

    def _reasons(self, spec: ReplicaSpec, belief: Belief) -> Iterator[PlanShortfall]:
        """The reasons that apply."""
        hardware, of_kind, every = spec.slot.hardware, self._of_kind(spec.slot.hardware), [*self._ledger.nodes.values()]
        nodes = [node for node in every if hardware in ("", node.hardware)]
        needs = sum(cores_by_hardware(room.plan).get(hardware, 0.0) for room in self.rooms.values())
        if not every:
            yield PlanShortfall("cores", "the cluster has no nodes", needs=needs, unit="cores")
        elif impossible := why_impossible(spec, every):
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
        yield PlanShortfall(*self._scarce(spec, belief))


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
        memory = max(device.memory_bytes for node in nodes for device in node.devices if device.kind == kind)
        if memory < wanted:
            why = f"each needs {_gib(wanted)} of the memory of a {kind}, which has {memory / GIB:.3g}"
            yield PlanShortfall("device", why, needs=float(wanted), has=float(memory), unit="bytes")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3g} GiB"
