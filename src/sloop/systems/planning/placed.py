"""Which nodes a plan's replicas would be on, and which replicas find no room, each with what is missing where.

Places them one after another as the core would, largest cluster first empty; knows no replica that runs already.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sloop.app.hardware import ANY_BYTES, GIB
from sloop.core.ledger import Reservation, fits
from sloop.core.protocols import Place
from sloop.solvers.targets import amount
from sloop.systems.planning.alike import Alike
from sloop.systems.planning.answer import Lack
from sloop.systems.setup import Setup
from sloop.vocabulary import Group, Node, Plan, ReplicaId, ReplicaSpec


@dataclass(slots=True)
class Placed:
    """A plan on an empty cluster."""

    used: set[str] = field(default_factory=set)
    """Nodes with a replica."""
    lacks: list[Lack] = field(default_factory=list)
    crowded: dict[ReplicaSpec, str] = field(default_factory=dict)
    """Kinds of replicas of which no node could take one more once all are placed, and why."""


def placed(plan: Plan, setup: Setup) -> Placed:
    """Every replica of the plan in turn, where the place policy wants it."""
    place, nodes = setup.system.policies.place, setup.application.cluster
    room, found, next_id = Alike(nodes), Placed(), 0
    for target in plan.stages:
        for group in target.groups:
            spec, memory_bytes = group.spec, setup.beliefs[target.stage, group.spec.variant].memory_bytes
            for count in range(group.count):
                name = spec.node or _chosen(place, spec, memory_bytes, room)
                reservation = Reservation.of(spec, memory_bytes, name or "")
                if not room.reserve(ReplicaId(next_id), reservation):
                    found.lacks.append(_lack(plan, group, group.count - count, memory_bytes, nodes))
                    break
                found.used.add(reservation.node)
                next_id += 1
    views = room.all()
    free = max((view.free_cores for view in views), default=0.0)
    for target in plan.stages:
        for group in target.groups:
            spec, memory_bytes = group.spec, setup.beliefs[target.stage, group.spec.variant].memory_bytes
            if not any(fits(spec, memory_bytes, view) for view in views if spec.node in (None, view.node.name)):
                found.crowded[spec] = (
                    f"no node has room for one more of {amount(spec.cores, 'core')}: the most that is free is {free:g}"
                )
    return found


def _chosen(place: Place, spec: ReplicaSpec, memory_bytes: int, room: Alike) -> str | None:
    """What the place policy chooses of one node in each state; of all of them where it wants none of those."""
    return place.choose(0, spec, memory_bytes, room.first()) or place.choose(0, spec, memory_bytes, room.all())


def cores_of(plan: Plan) -> float:
    """All replicas together."""
    return sum(group.count * group.spec.cores for target in plan.stages for group in target.groups)


def _lack(plan: Plan, group: Group, missing: int, memory_bytes: int, nodes: Sequence[Node]) -> Lack:
    """Of the reasons why replicas have no room the first that applies, from what can never be to mere crowding."""
    spec = group.spec
    what = (
        f"no node has room for {missing} of {group.count} replicas of {spec.stage}/{spec.variant} with "
        f"{amount(spec.cores, 'core')}"
    )
    stage, needs = spec.stage, cores_of(plan)
    if not nodes:
        return Lack("cores", f"{what}: the cluster has no nodes", stage, needs=needs, has=0.0, unit="cores")
    most = max(node.cores for node in nodes)
    if spec.cores > most:
        why = f"{what}: the largest node has {most:g}, {spec.cores - most:g} too few"
        return Lack("cores", why, stage, needs=spec.cores, has=most, unit="cores")
    memory = max(node.memory_bytes for node in nodes)
    if memory < memory_bytes and memory < ANY_BYTES:
        why = f"{what}: it takes {memory_bytes / GIB:.3g} GiB, and the largest node has {memory / GIB:.3g}"
        return Lack("memory", why, stage, needs=float(memory_bytes), has=float(memory), unit="bytes")
    if spec.device and not any(spec.device in node.devices for node in nodes):
        return Lack("cores", f"{what}: no node has a device {spec.device!r}", stage)
    has = sum(node.cores for node in nodes)
    if needs > has:
        why = f"{what}: the plan needs {needs:g} cores, the cluster has {has:g}: {needs - has:g} too few"
        return Lack("cores", why, stage, needs=needs, has=has, unit="cores")
    return Lack("cores", f"{what}: what is free is in pieces, or its memory or devices are taken", stage)
