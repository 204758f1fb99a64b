"""The ledger of the nodes' resources: capacities, reservations, and free room. Only this module decides what fits.

Cores are counted in thousandths and shares of a device in millionths, as integers. Floats would drift: after a day of
resizing, a node could lack 0.1 + 0.2 - 0.3 cores and refuse a replica that exactly fills it.

A node is released, acquired, ready or lost (`NodeState`). Replicas are placed on ready nodes only; the reservations of
a lost node stay until its replicas are reported lost.
"""

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from operator import itemgetter
from typing import Literal

from msgspec import Struct, structs

from sloop.core.views import Belief, DeviceView, NodeView, Site
from sloop.text import counted, number
from sloop.transient import Transient
from sloop.units import GIB, ROUNDING
from sloop.vocabulary import Device, Node, NodeState, Plan, ReplicaId, ReplicaSpec, Shape, Slot, WorkerId

MILLI = 1_000
"""Units per core: Kubernetes, too, counts CPU in thousandths."""
MICRO = 1_000_000
"""Units per device."""


def millicores(cores: float) -> int:
    """Cores as integer thousandths."""
    return round(cores * MILLI)


def spec_millicores(slot: Slot, shape: Shape) -> int:
    """The cores of a replica on this slot, with those of its shadow, as integer thousandths."""
    return millicores(slot.cores) + sum([millicores(worker.cores) for worker in shape])


def cores_by_hardware(plan: Plan | None) -> dict[str, float]:
    """The cores of the replicas of a plan, of each kind of hardware."""
    millis: dict[str, int] = {}
    for target in plan.stages if plan else ():
        for group in target.groups:
            slot = group.spec.slot
            each = spec_millicores(slot, group.spec.shape)
            millis[slot.hardware] = millis.get(slot.hardware, 0) + group.count * each
    return {hardware: milli / MILLI for hardware, milli in millis.items()}


class Reservation(Struct):
    """The resources that one worker reserves on its node, and on one device of it ("" for none)."""

    node: str
    millicores: int
    memory_bytes: int
    device: str = ""
    micro_share: int = 0
    device_memory_bytes: int = 0

    @classmethod
    def of(cls, spec: ReplicaSpec, belief: Belief, node: str, device: str | None) -> "Reservation":
        """The reservation of a replica of this spec on `node`, and on `device` if it uses one."""
        whole = cls(node, round(spec.slot.cores * MILLI), belief.memory_bytes)
        if device is not None:
            whole.device = device
            whole.micro_share = round(spec.slot.share * MICRO)
            whole.device_memory_bytes = belief.device_memory_bytes
        return whole


def sites(spec: ReplicaSpec, belief: Belief, nodes: Iterable[NodeView]) -> list[Site]:
    """Where one more replica of `spec` fits: ready nodes of its kind with enough cores and memory, each with every
    accelerator that has enough share, memory and clients left. `spec.node` and `spec.device` restrict the choice.

    It compares the same integers as `Ledger.reserve`, so the ledger never refuses a place from this list because of
    rounding.
    """
    slot = spec.slot
    wanted = round(slot.cores * MILLI)
    places: list[Site] = []
    for view in nodes:
        node = view.node
        if (
            wanted > round(view.free_cores * MILLI)
            or belief.memory_bytes > view.free_memory_bytes
            or view.state is not NodeState.READY
            or (slot.hardware and slot.hardware != node.hardware)
            or (spec.node is not None and spec.node != node.name)
        ):
            continue
        if slot.accelerator:
            places += [Site(view, device) for device in _devices(spec, belief, view)]
        else:
            places.append(Site(view))
    return places


def _devices(spec: ReplicaSpec, belief: Belief, view: NodeView) -> Iterator[DeviceView]:
    """The accelerators of a node that have room for one more replica of `spec`."""
    slot, wanted = spec.slot, round(spec.slot.share * MICRO)
    for each in view.devices:
        if (
            each.device.kind == slot.accelerator
            and spec.device in (None, each.device.name)
            and wanted <= round(each.free_share * MICRO)
            and belief.device_memory_bytes <= each.free_memory_bytes
            and each.free_clients > 0
        ):
            yield each


class _FreeDevice(Struct):
    """The free resources of a device."""

    micro_share: int
    memory_bytes: int
    clients: int


def _view_of(device: Device, free: _FreeDevice) -> DeviceView:
    return DeviceView(device, free.micro_share / MICRO, free.memory_bytes, free.clients)


class _Free(Struct):
    """The free resources of a node."""

    millicores: int
    memory_bytes: int
    devices: dict[str, _FreeDevice]
    workers: int = 0
    """How many workers have a reservation."""


class _FreeOfViews(dict[str, _Free]):
    """What is free of nodes, by name: read from the view of a node when it is first asked for."""

    def __init__(self, views: Sequence[NodeView], positions: Mapping[str, int]) -> None:
        self._views, self._positions = views, positions

    def __missing__(self, name: str) -> _Free:
        view = self._views[self._positions[name]]
        devices = {
            each.device.name: _FreeDevice(round(each.free_share * MICRO), each.free_memory_bytes, each.free_clients)
            for each in view.devices
        }
        self[name] = free = _Free(millicores(view.free_cores), view.free_memory_bytes, devices)
        return free


Likeness = tuple[Node, NodeState, float, int, tuple[DeviceView, ...]]
"""What is equal for nodes that differ in nothing but their names: the node without its name, its state, and its free
cores, memory and devices."""


class SeenNodes(Transient):
    """The views of nodes that were made last; none at first."""

    __slots__ = ("all_views", "changed", "likenesses", "positions", "positions_of", "ungrouped", "views")

    def __init__(self) -> None:
        self.changed: dict[str, None] = {}
        """The nodes that have changed since their view was made. A dict keeps them in order."""
        self.views: list[NodeView] = []
        """In the order in which the nodes were declared; out of date for those that have changed."""
        self.all_views: tuple[NodeView, ...] | None = None
        """`views` as a tuple; None if it is to be made."""
        self.positions: dict[str, int] = {}
        """Where the view of each node is."""
        self.ungrouped: dict[int, None] = {}
        """The positions of nodes that have changed since they were put into a group."""
        self.likenesses: dict[int, Likeness] = {}
        """By position, the group that the node is in."""
        self.positions_of: dict[Likeness, list[int]] = {}
        """The positions of equal nodes, ascending."""


class Ledger:
    """Reservations by worker. A reservation that does not fit is refused, never granted in part.

    Views of nodes are kept until the node changes, so that a start costs the same on ten nodes as on a thousand.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: dict[str, Node] = {}
        self.states: dict[str, NodeState] = {}
        self.reservations: dict[WorkerId, Reservation] = {}
        self._held: dict[str, int] = {}
        """By node, the bytes of memory that it holds for other reasons than a worker (`core.weights`)."""
        self._free: dict[str, _Free] = {}
        self._seen = SeenNodes()
        for node in nodes:
            self.add(node, NodeState.RELEASED if node.on_demand else NodeState.READY)

    @classmethod
    def all_ready(cls, nodes: Iterable[Node]) -> "Ledger":
        """A ledger to try in what fits: all nodes are ready and empty, also those on demand."""
        made = cls([])
        for node in nodes:
            made.add(node, NodeState.READY)
        return made

    @classmethod
    def of(cls, views: Iterable[NodeView]) -> "Ledger":
        """A ledger to try in what fits on these nodes beside all that they have reserved, as policies see them."""
        made = cls([])
        made._seen.views = list(views)
        made._seen.positions = {view.node.name: position for position, view in enumerate(made._seen.views)}
        made._seen.ungrouped = dict.fromkeys(range(len(made._seen.views)))
        made.nodes = {view.node.name: view.node for view in made._seen.views}
        made.states = {view.node.name: view.state for view in made._seen.views}
        made._free = _FreeOfViews(made._seen.views, made._seen.positions)
        return made

    def without(self, workers: Container[WorkerId]) -> "Ledger":
        """A copy to try in what would fit if these workers were gone."""
        made = Ledger([])
        for name, node in self.nodes.items():
            made.add(node, self.states[name])
        for id, reservation in self.reservations.items():
            if id not in workers:
                made.reserve(id, structs.replace(reservation))
        for name, held_bytes in self._held.items():
            made.hold(name, held_bytes)
        return made

    def add(self, node: Node, state: NodeState) -> None:
        """Add a node, or replace what is known of it: its capacities may have changed. Its workers keep what they have
        reserved, so less than nothing may be free."""
        devices = {device.name: _FreeDevice(MICRO, device.memory_bytes, device.clients_max) for device in node.devices}
        self.nodes[node.name] = node
        self.states[node.name] = state
        left_bytes = node.memory_bytes - self._held.get(node.name, 0)
        self._free[node.name] = _Free(round(node.cores * MILLI), left_bytes, devices)
        self._seen.changed[node.name] = None
        for reservation in self.reservations.values():
            if reservation.node == node.name:
                self._take(reservation, 1)

    def set_state(self, node: str, state: NodeState) -> None:
        """Move a node to another state."""
        self.states[node] = state
        self._seen.changed[node] = None

    def is_empty(self, node: str) -> bool:
        """Whether no worker has a reservation on the node, and it holds no memory for anything else."""
        return not self._free[node].workers and node not in self._held

    def free_millicores(self, node: str) -> int:
        """The cores of a node that no worker has reserved, in thousandths."""
        return self._free[node].millicores

    def free_memory_bytes(self, node: str) -> int:
        """The memory of a node that is neither reserved nor held."""
        return self._free[node].memory_bytes

    def hold(self, node: str, held_bytes: int | None) -> None:
        """Hold so much of a node's memory for other reasons than a worker, from now on; None if there are none. Less
        than nothing may then be free."""
        before = self._held.pop(node, None)
        if held_bytes is not None:
            self._held[node] = held_bytes
        if before != held_bytes and node in self._free:
            self._free[node].memory_bytes += (before or 0) - (held_bytes or 0)
            self._seen.changed[node] = None

    def reserve(self, worker: WorkerId, wanted: Reservation) -> bool:
        """Reserve room for a new worker. Returns False, and reserves nothing, if the node has too little."""
        assert worker not in self.reservations, f"worker {worker} reserved twice"
        free = self._free[wanted.node]
        if wanted.millicores > free.millicores or wanted.memory_bytes > free.memory_bytes:
            return False
        if wanted.device:
            device = free.devices.get(wanted.device)
            if (
                device is None
                or wanted.micro_share > device.micro_share
                or wanted.device_memory_bytes > device.memory_bytes
                or not device.clients
            ):
                return False
        self.reservations[worker] = wanted
        self._take(wanted, 1)
        return True

    def force(self, worker: WorkerId, taken: Reservation) -> None:
        """Reserve what a worker has already, whether there is room or not: less than nothing may then be free."""
        self.reservations[worker] = taken
        self._take(taken, 1)

    def place(self, replica: ReplicaId, spec: ReplicaSpec, belief: Belief) -> Reservation | None:
        """Reserve room for a new replica at the first place that has it; None if none has."""
        places = self.sites(spec, belief, one_of_equal=True)
        if not places:
            return None
        site = places[0]
        made = Reservation.of(spec, belief, site.node.node.name, site.device.device.name if site.device else None)
        return made if self.reserve(replica, made) else None

    def without_room(self, wanted: Iterable[tuple[ReplicaSpec, Belief]]) -> list[int]:
        """Place new replicas one after another; returns the positions of those for which there is no room."""
        numbers = count(max(self.reservations, default=-1) + 1)
        return [
            index
            for index, (spec, belief) in enumerate(wanted)
            if self.place(ReplicaId(next(numbers)), spec, belief) is None
        ]

    def release(self, worker: WorkerId) -> None:
        """Free a worker's reservation, if it has one."""
        reservation = self.reservations.pop(worker, None)
        if reservation is not None:
            self._take(reservation, -1)

    def resize(self, worker: WorkerId, cores: float) -> bool:
        """Change a worker's cores. Returns False, and changes nothing, if they are more and the node has too few
        free. Fewer cores are always granted, also where a node has become too small for its workers."""
        reservation = self.reservations[worker]
        extra = millicores(cores) - reservation.millicores
        free = self._free[reservation.node]
        if extra > max(0, free.millicores):
            return False
        self._seen.changed[reservation.node] = None
        reservation.millicores += extra
        free.millicores -= extra
        return True

    def grow(self, worker: WorkerId, cores: float) -> bool:
        """Reserve at least `cores` for a worker. Returns False, and changes nothing, if the node has too few."""
        return millicores(cores) <= self.reservations[worker].millicores or self.resize(worker, cores)

    def views(self) -> tuple[NodeView, ...]:
        """Every node with its free resources, in the order in which the nodes were declared. The view of a node that
        has not changed is the same object as before, and so is the tuple if none has."""
        seen = self._seen
        if seen.changed or not seen.views:
            self._update_views()
        if seen.all_views is None:
            seen.all_views = tuple(seen.views)
        return seen.all_views

    def sites(self, spec: ReplicaSpec, belief: Belief, *, one_of_equal: bool = False) -> list[Site]:
        """Where one more replica of `spec` fits, in the order in which the nodes were declared (see `sites`). With
        `one_of_equal`, of nodes that differ in nothing but their names only the first one."""
        if spec.node is None:
            return sites(spec, belief, self.firsts() if one_of_equal else self.views())
        seen = self._seen
        if seen.changed or not seen.views:
            self._update_views()
        position = seen.positions.get(spec.node)
        return [] if position is None else sites(spec, belief, [seen.views[position]])

    def rentable(self, spec: ReplicaSpec, belief: Belief) -> list[Site]:
        """Where a replica would be on the first released node that could hold it; empty if there is none."""
        views = self.firsts()
        if spec.node is not None:
            views = [self.view(spec.node)] if spec.node in self.nodes else []
        for view in views:
            if view.state is NodeState.RELEASED and (
                there := sites(spec, belief, [replace(view, state=NodeState.READY)])
            ):
                return there
        return []

    def firsts(self) -> list[NodeView]:
        """Of nodes that differ in nothing but their names only the first one, in the order in which the nodes were
        declared."""
        seen = self._seen
        if seen.changed or not seen.views:
            self._update_views()
        views, likenesses, positions_of = seen.views, seen.likenesses, seen.positions_of
        for position in seen.ungrouped:
            view, before = views[position], likenesses.get(position)
            nameless = structs.replace(view.node, name="")
            likeness = (nameless, view.state, view.free_cores, view.free_memory_bytes, view.devices)
            if before is not None:
                positions = positions_of[before]
                del positions[bisect_left(positions, position)]
                if not positions:
                    del positions_of[before]
            likenesses[position] = likeness
            insort(positions_of.setdefault(likeness, []), position)
        seen.ungrouped.clear()
        return list(map(views.__getitem__, sorted(map(itemgetter(0), positions_of.values()))))

    def _update_views(self) -> None:
        """Make the views of the nodes that have changed; at first, of all."""
        seen = self._seen
        views, ungrouped = seen.views, seen.ungrouped
        for name in seen.changed if views else self.nodes:
            view = self.view(name)
            position = seen.positions.get(name)
            if position is None:
                position = seen.positions[name] = len(views)
                views.append(view)
            else:
                views[position] = view
            ungrouped[position] = None
        seen.changed.clear()
        seen.all_views = None

    def view(self, name: str) -> NodeView:
        """A node as it is now."""
        free, node = self._free[name], self.nodes[name]
        devices = free.devices and tuple([_view_of(device, free.devices[device.name]) for device in node.devices])
        return NodeView(node, free.millicores / MILLI, free.memory_bytes, devices or (), self.states[name])

    def _take(self, reservation: Reservation, sign: int) -> None:
        free = self._free[reservation.node]
        self._seen.changed[reservation.node] = None
        free.workers += sign
        free.millicores -= sign * reservation.millicores
        free.memory_bytes -= sign * reservation.memory_bytes
        device = free.devices.get(reservation.device)  # none if the node no longer has it
        if device is not None:
            device.micro_share -= sign * reservation.micro_share
            device.memory_bytes -= sign * reservation.device_memory_bytes
            device.clients -= sign


def replicas_max(node: Node, slot: Slot, belief: Belief) -> int:
    """How many replicas of `belief` on `slot` fit on the empty node."""
    if slot.hardware not in ("", node.hardware):
        return 0
    most = [millicores(node.cores) // max(1, millicores(slot.cores))]
    if belief.memory_bytes:
        most.append(node.memory_bytes // belief.memory_bytes)
    if slot.accelerator:
        share, memory_bytes = round(slot.share * MICRO), belief.device_memory_bytes
        devices = [each for each in node.devices if each.kind == slot.accelerator]
        most.append(
            sum(
                min(
                    each.clients_max,
                    MICRO // share if share else each.clients_max,
                    each.memory_bytes // memory_bytes if memory_bytes else each.clients_max,
                )
                for each in devices
            )
        )
    return min(most)


def equal_nodes(nodes: Iterable[NodeView]) -> dict[tuple[object, ...], list[NodeView]]:
    """The nodes in groups of the same kind, capacities, devices and price."""
    groups: dict[tuple[object, ...], list[NodeView]] = {}
    for view in nodes:
        node = view.node
        key = (node.hardware, node.cores, node.memory_bytes, node.usd_per_h, node.devices)
        groups.setdefault(key, []).append(view)
    return groups


def could_hold(node: Node, spec: ReplicaSpec, belief: Belief) -> bool:
    """Whether a replica of `spec` fits on the empty node, if that is where it may run."""
    devices = tuple(device for device in node.devices if spec.device in (None, device.name))
    return (
        spec.node in (None, node.name) and replicas_max(structs.replace(node, devices=devices), spec.slot, belief) > 0
    )


def why_unfit(spec: ReplicaSpec, node: Node) -> str:
    """Why a replica cannot be on the node, whatever is free: it is of another kind, or has no such accelerator. Empty
    if it can."""
    if spec.node != node.name or spec.slot.hardware not in ("", node.hardware):
        return f"{node.name} is of hardware {node.hardware!r}, not {spec.slot.hardware!r}"
    kinds = {device.name: device.kind for device in node.devices}
    if spec.slot.accelerator != (kinds.get(spec.device, "?") if spec.device is not None else ""):
        return f"{node.name} has no device {spec.device!r} of kind {spec.slot.accelerator!r}"
    return ""


def why_full(wanted: Reservation, view: NodeView) -> str:
    """What a node, or the device of the reservation, has too little of: each with what is needed and what is free."""
    wants = [
        ("cores", wanted.millicores / MILLI, view.free_cores),
        ("GiB of memory", wanted.memory_bytes / GIB, view.free_memory_bytes / GIB),
    ]
    for each in view.devices:
        if each.device.name == wanted.device:
            wants += [
                ("of the device", wanted.micro_share / MICRO, each.free_share),
                ("GiB of its memory", wanted.device_memory_bytes / GIB, each.free_memory_bytes / GIB),
                ("of its clients", 1.0, float(each.free_clients)),
            ]
    return " and ".join(
        f"it needs {number(needed)} {what}, and {number(max(0.0, free))} {'is' if free == 1 else 'are'} left"
        for what, needed, free in wants
        if needed > free
    )


Scarce = Literal["cores", "memory", "device"]
"""What nodes have too little of for one more replica. `device`: accelerators, or shares, memory or clients of them."""


def what_is_scarce(
    spec: ReplicaSpec, belief: Belief, nodes: Iterable[NodeView], of_kind: str = ""
) -> tuple[Scarce, str]:
    """The scarce resource because of which none of these nodes has room for one more replica of `spec`, and a text that
    calls their kind `of_kind`."""
    slot = spec.slot
    views = [view for view in nodes if slot.hardware in ("", view.node.hardware)]
    free = max((view.free_cores for view in views), default=0.0)
    if free <= 0:
        return "cores", f"all cores{of_kind} are taken"
    if spec.cores > free + ROUNDING:
        return "cores", f"at most {counted(free, 'core')} of a node{of_kind} are free"
    views = [view for view in views if spec.cores <= view.free_cores + ROUNDING]
    views = [view for view in views if view.free_memory_bytes >= belief.memory_bytes]
    if not views:
        wanted = f"{belief.memory_bytes / GIB:.3g} GiB"
        return "memory", f"nodes{of_kind} with enough free cores have less than {wanted} of memory free"
    kind = slot.accelerator
    devices = [each for view in views for each in view.devices if each.device.kind == kind and each.free_clients > 0]
    if not devices:
        return "device", f"no {kind} on a node{of_kind} with enough free cores takes another client"
    if (share := max(each.free_share for each in devices)) < slot.share - ROUNDING:
        return "device", f"at most {number(share)} of a {kind} is free, and each needs {number(slot.share)}"
    wanted = f"{belief.device_memory_bytes / GIB:.3g} GiB"
    return "device", f"no {kind} has {wanted} of memory free and the share that each needs"


def why_impossible(spec: ReplicaSpec, nodes: Sequence[Node]) -> str:
    """Why no node could ever hold the replica, whatever is free: its kind, or an accelerator, does not exist. Empty if
    some node could."""
    slot = spec.slot
    of_kind = [node for node in nodes if slot.hardware in ("", node.hardware)]
    if not of_kind:
        return f"no node has hardware {slot.hardware!r}"
    if slot.accelerator and not any(each.kind == slot.accelerator for node in of_kind for each in node.devices):
        return f"no node of hardware {slot.hardware!r} has a device {slot.accelerator!r}"
    return ""
