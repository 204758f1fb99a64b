"""What policies need that place the models of an application on shared devices; no policy itself.

Each stage is a model with a rate and a deadline; a device is an accelerator, or a whole node where models run on CPU
cores. A plan says for every replica its device, its share, its batch and its rate. Devices of one kind are
interchangeable: a new plan assigns the planned contents to them so that most replicas stay where they are.

Only the stages of one application are placed together. Several applications each plan as if all devices were theirs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Final, Literal

from msgspec import structs

from sloop.core.ledger import MICRO, Ledger, Reservation, equal_nodes
from sloop.core.views import Belief, ClusterView, NodeView, StageView
from sloop.errors import InputError
from sloop.policies import targets
from sloop.solvers.contents import WHOLE_DEVICE, BatchOption, hundredths, relabelled
from sloop.text import listed
from sloop.units import NS_PER_MS, ROUNDING, to_ms
from sloop.vocabulary import Device, Group, Node, NodeState, Plan, ReplicaId, ReplicaSpec, Slot, StagePlan

Metric = Literal["peak_occupancy", "occupancy", "sm_use"]
"""The measure of how much of a device's compute a model needs: its peak occupancy, or its occupancy or the SMs that its
kernels use, both as means weighted by time."""
BATCHES: Final = tuple(2**power for power in range(13))
IDLE_RPS: Final = 0.1
"""The rate to plan with for a stage without requests, so that it has a replica for the next one."""
SERVED: Final = 0.99
"""A plan that expects to serve less than this fraction of a rate is not feasible."""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where a device is: the names of its node and of the device; None for the cores of the node."""

    node: str
    device: str | None


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Equal devices. The `owned` ones, which are always there, come first; the others are on demand."""

    hardware: str
    accelerator: str
    places: tuple[DevicePlace, ...]
    owned: int
    per_node: int
    """How many devices a node has, which are rented together."""
    usd_per_h: float
    """The price of a node."""
    cores: float
    """The cores of a node, divided by its devices."""
    memory_bytes: int
    """The memory of a device."""
    node_memory_bytes: int
    """The memory of a node, divided by its devices."""
    clients: int = 0
    """The most replicas on a device; 0: any number."""


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """A replica on a device: the index of its stage, its batch, its share, and the rate that it is to serve."""

    stage: int
    batch: int
    share: float
    rate_rps: float


DeviceContents = tuple[int, tuple[PlannedReplica, ...]]
"""The index of a pool, and the replicas on one of its devices."""
Placed = tuple[list[DeviceContents], Sequence[float], str]
"""The contents of devices, the rates that they are expected to serve, by stage, and why."""


@dataclass(frozen=True, slots=True)
class PlacementMemory:
    """What a policy decided last with: a placement stays in force while nothing of it has changed."""

    rates: tuple[float, ...] = ()
    """The rates."""
    signature: tuple[object, ...] = ()
    """All other inputs."""

    def holds(self, rates: Sequence[float], signature: tuple[object, ...], change: float) -> bool:
        """Whether no rate has changed by more than the fraction `change`, and nothing else at all."""
        return (
            self.signature == signature
            and len(self.rates) == len(rates)
            and all(abs(new - old) <= change * old for new, old in zip(rates, self.rates, strict=True))
        )


@dataclass(frozen=True)
class SharedDevices:
    """The stages of an application, and the devices on which their models can run."""

    view: ClusterView
    hardware: tuple[str, ...]
    """The kinds of nodes to use."""
    _: KW_ONLY
    batches: tuple[int, ...] = ()
    """The batch sizes to choose from; empty: the powers of two."""
    variant: str = ""
    """The variant of every stage; empty: the first."""
    cores: float = 0.0
    """Cores of a replica; 0: as many as its profile can use. At most an equal part of the node for each stage."""
    margin: float = 1.0
    """Fraction of every deadline to plan with."""
    one_pool: bool = False
    """Whether all nodes of a kind are in one pool, although a group of nodes may declare other cores, memory, devices
    and prices than its kind has."""

    @property
    def stages(self) -> tuple[StageView, ...]:
        """The models."""
        return self.view.stages

    @cached_property
    def pools(self) -> tuple[DevicePool, ...]:
        """The devices in pools, in the order of the cluster, without those of lost nodes. A pool counts with the cores
        and memory of the smallest of its nodes and devices, where these differ."""
        nodes = [view for view in targets.usable(self.view.nodes) if view.node.hardware in self.hardware]
        equal: Iterable[list[NodeView]] = equal_nodes(nodes).values()
        if self.one_pool:
            equal = [own for kind in self.hardware if (own := [view for view in nodes if view.node.hardware == kind])]
        pools = [self._pool(own[0].node.hardware, own) for own in equal]
        return tuple(pool for pool in pools if pool.places)

    def _batch_sizes(self, belief: Belief) -> Sequence[int]:
        return [batch for batch in self.batches or BATCHES if batch <= belief.batch_max] or [belief.batch_max]

    @property
    def signature(self) -> tuple[object, ...]:
        """What a placement depends on besides the rates."""
        beliefs = tuple(
            belief and (belief.variant, belief.costs_ns(self.slot(belief, pool, 0.0))[-1])
            for at in range(len(self.stages))
            for number, pool in enumerate(self.pools)
            for belief in (self.belief(at, number),)
        )
        return self.pools, beliefs, self.deadlines_ms()

    def _pool(self, hardware: str, nodes: Sequence[NodeView]) -> DevicePool:
        wanted = [belief.accelerator for stage in self.stages for belief in self._beliefs(stage, hardware)]
        kinds = sorted({accelerator for accelerator in wanted if accelerator})
        if len(kinds) > 1:
            what = f"the profiles for {hardware} are for different accelerators: {listed(kinds)}"
            raise InputError(what, help="give all models that share devices profiles for the same accelerator")
        accelerator = kinds[0] if kinds else ""
        if accelerator and "" in wanted:
            what = f"some profiles for {hardware} are for its cores, others for its {accelerator}"
            raise InputError(what, help=f"give all models profiles for the {accelerator}, or all for the cores")
        ordered = sorted(nodes, key=lambda each: each.node.on_demand)
        # All devices of a pool are interchangeable, so nodes and devices that are too small for a model which fits on
        # larger ones are left out, and so are devices of a node that has no memory for a worker on each.
        beliefs = [belief for stage in self.stages for belief in self._beliefs(stage, hardware)]
        every = [each.memory_bytes for node in nodes for each in node.node.devices if each.kind == accelerator]
        least_bytes = _largest([belief.device_memory_bytes for belief in beliefs], every)
        node_bytes = _largest([belief.memory_bytes for belief in beliefs], [node.node.memory_bytes for node in nodes])
        having = [
            (each.node, own[: each.node.memory_bytes // node_bytes if node_bytes else len(own)])
            for each in ordered
            if each.node.memory_bytes >= node_bytes and (own := _places(each, accelerator, least_bytes))
        ]
        devices = [
            each
            for node, _ in having
            for each in node.devices
            if each.kind == accelerator and each.memory_bytes >= least_bytes
        ]
        memory = [each.memory_bytes for each in devices]
        return DevicePool(
            hardware,
            accelerator,
            tuple(place for _, own in having for place in own),
            sum(len(own) for node, own in having if not node.on_demand),
            min((len(own) for _, own in having), default=1),
            max((node.usd_per_h for node, _ in having), default=0.0),
            min((node.cores / len(own) for node, own in having), default=0.0),
            min(memory or [node.memory_bytes for node, _ in having], default=0),
            min((node.memory_bytes // len(own) for node, own in having), default=0),
            min((each.clients_max for each in devices), default=0),
        )

    def _beliefs(self, stage: StageView, hardware: str) -> list[Belief]:
        own = stage.on(hardware)
        if not own:
            return []
        return [targets.belief_of(stage, self.variant, hardware)]

    def belief(self, stage: int, pool: int) -> Belief | None:
        """The variant of a stage on a kind of device; None if it cannot run there."""
        own = self._beliefs(self.stages[stage], self.pools[pool].hardware)
        return own[0] if own else None

    def slot(self, belief: Belief, pool: DevicePool, share: float) -> Slot:
        """The slot of a replica. It reserves at most an equal part of the device's cores for each stage, so that one
        replica of each stage fits. Where the device is the cores, and the part is less than the replica can use, it may
        also use what the others leave idle."""
        wanted = min(self.cores or belief.cores_max, belief.cores_max)
        cores = min(wanted, pool.cores / len(self.stages))
        slot = belief.slot(max(0.001, math.floor(1000 * cores + ROUNDING) / 1000))
        return (
            structs.replace(slot, share=share) if pool.accelerator else structs.replace(slot, is_capped=cores == wanted)
        )

    def options(
        self, stage: int, pool: int, metric: Metric, *, must_know: bool = False, reserved: bool = True
    ) -> tuple[BatchOption, ...]:
        """The batch sizes of a stage on a kind of device, with what each needs of it. If the needed compute is unknown,
        a batch needs the whole device; with `must_know` that is an InputError. With `reserved`, each batch needs the
        memory that a replica reserves, which is that of its largest batch; without, its own memory where known."""
        belief, where = self.belief(stage, pool), self.pools[pool]
        if belief is None:
            return ()
        slot = self.slot(belief, where, 0.0)
        costs_ns = belief.costs_ns(slot)
        found: list[BatchOption] = []
        for batch in self._batch_sizes(belief):
            latency_ms = costs_ns[batch] / NS_PER_MS
            compute, memory = self._needs(belief, where, batch, slot, metric, reserved=reserved)
            if compute is None:
                if must_know:
                    what = f"the profile of {belief.variant} on {where.accelerator or where.hardware} has no {metric}"
                    help_text = (
                        "`sloop profile MODEL --device cuda` measures it; or declare `sharing`, or use system `mixed`"
                    )
                    raise InputError(what, help=help_text)
                compute = WHOLE_DEVICE
            found.append(BatchOption(batch, latency_ms, 1000.0 * batch / latency_ms, compute, memory))
        return tuple(found)

    def _needs(
        self, belief: Belief, pool: DevicePool, batch: int, slot: Slot, metric: Metric, *, reserved: bool
    ) -> tuple[int | None, int]:
        if not pool.accelerator:
            # Rounded down: one replica of each stage must fit, however many there are.
            cores = math.floor(WHOLE_DEVICE * slot.cores / pool.cores + ROUNDING)
            return cores, part_of(belief.memory_bytes, pool.node_memory_bytes)
        demand = belief.demand(batch, slot)
        memory = part_of(belief.device_memory_bytes, pool.memory_bytes)
        own = hundredths(100 * demand.memory)
        memory = own if own and not reserved else max(memory, own)
        memory = max(memory, self.beside_device(belief, pool))
        need: float = getattr(demand, metric)
        if not need and demand.bandwidth:  # a law by bandwidth predicts what sharing costs
            return 0, memory
        return hundredths(100 * need) if need else None, memory

    def beside_device(self, belief: Belief, pool: DevicePool) -> int:
        """The part of a device that a replica counts as because of the clients of the device and the memory of its
        node, in hundredths of a percent; 0 if one replica of each stage is within both."""
        part = 0
        if pool.clients and pool.clients < len(self.stages):
            part = WHOLE_DEVICE // pool.clients
        every = [own.memory_bytes for stage in self.stages for own in self._beliefs(stage, pool.hardware)]
        if sum(every) > pool.node_memory_bytes:
            part = max(part, part_of(belief.memory_bytes, pool.node_memory_bytes))
        return part

    def overbooks(self, contents: Sequence[DeviceContents]) -> bool:
        """Whether the replicas on a device reserve more memory than it has."""
        free = (view.devices or (view,) for view in self._ledger(contents).views())
        return any(each.free_memory_bytes < 0 for views in free for each in views)

    def check_fit(self, options: Sequence[Sequence[Sequence[BatchOption]]]) -> None:
        """InputError for a stage that fits on no device, given its options by kind. None while a node is lost, because
        the stage may fit there, and the others need a plan meanwhile."""
        if any(node.state is NodeState.LOST for node in self.view.nodes):
            return
        for at, (stage, own) in enumerate(zip(self.stages, options, strict=True)):
            every = [option for kind in own for option in kind]
            if every and not any(max(option.compute, option.memory) <= WHOLE_DEVICE for option in every):
                least = min(every, key=lambda option: max(option.compute, option.memory))
                what, need = ("memory", least.memory) if least.memory > least.compute else ("compute", least.compute)
                names = dict.fromkeys(pool.accelerator or pool.hardware for pool in self.pools)
                devices = listed(list(names), "or")
                beliefs = [(self.belief(at, number), pool) for number, pool in enumerate(self.pools)]
                if all(belief and belief.memory_bytes > pool.node_memory_bytes for belief, pool in beliefs):
                    devices = f"node with a {devices}"
                raise InputError(
                    f"{stage.name} fits on no device: it needs {need / 100:g} % of the {what} of a {devices}",
                    help="choose a larger accelerator, or a smaller variant",
                )

    def rescued(self, contents: Sequence[DeviceContents], metric: Metric) -> list[DeviceContents]:
        """The contents, with one replica of each stage that has none, where there is room for one."""
        used = Counter(pool for pool, _ in contents)
        made = list(contents)
        for number, pool in enumerate(self.pools):
            made += [(number, ())] * (len(pool.places) - used[number])
        ledger = self._ledger(made, metric)
        served = {replica.stage for _, replicas in made for replica in replicas}
        for at in range(len(self.stages)):
            if at not in served:
                self._add(made, ledger, at, metric)
        return [(pool, replicas) for pool, replicas in made if replicas]

    def _add(self, contents: list[DeviceContents], ledger: Ledger, at: int, metric: Metric) -> None:
        for number in range(len(self.pools)):
            options = self.options(at, number, metric)
            smallest = min(options, key=lambda o: (max(o.compute, o.memory), o.batch), default=None)
            if smallest is None:
                continue
            added = PlannedReplica(at, smallest.batch, 0.0, 0.0)
            wanted = self._reservation(number, added, metric)
            for place, (pool, replicas) in enumerate(contents):
                on_device = structs.replace(wanted, node=str(place))
                if pool == number and ledger.reserve(ReplicaId(len(ledger.reservations)), on_device):
                    contents[place] = (pool, (*replicas, added))
                    return

    def _ledger(self, contents: Sequence[DeviceContents], metric: Metric | None = None) -> Ledger:
        """A ledger to try in what fits beside the contents. Each device is a node there, named by its place in them,
        with its part of the cores and memory."""
        ledger = Ledger([])
        for place, (number, replicas) in enumerate(contents):
            pool = self.pools[number]
            kind, clients = pool.accelerator, pool.clients
            devices = (Device(kind, kind, pool.memory_bytes, clients),) if kind else ()
            node = Node(str(place), pool.hardware, pool.cores, pool.node_memory_bytes, devices)
            ledger.add(node, NodeState.READY)
            for replica in replicas:
                taken = structs.replace(self._reservation(number, replica, metric), node=str(place))
                ledger.force(ReplicaId(len(ledger.reservations)), taken)
        return ledger

    def _reservation(self, number: int, replica: PlannedReplica, metric: Metric | None) -> Reservation:
        """What a replica takes of a device, without its node: its share or, where that is no limit, as much as it needs
        by the `metric`."""
        belief, pool, share = self.belief(replica.stage, number), self.pools[number], replica.share
        assert belief is not None, (replica, pool)
        if not share and metric is not None:
            options = self.options(replica.stage, number, metric)
            needs = (option.compute for option in options if option.batch >= replica.batch)
            share = next(needs, WHOLE_DEVICE) / WHOLE_DEVICE
        spec = ReplicaSpec(self.stages[replica.stage].name, belief.variant, self.slot(belief, pool, share))
        return Reservation.of(spec, belief, "", pool.accelerator or None)

    def deadlines_ms(self) -> tuple[float, ...]:
        """Each stage's part of the tightest deadline of its paths. A deadline is divided in proportion to the durations
        of batches of one."""
        alone_ms = []
        for at in range(len(self.stages)):
            own = [self.belief(at, pool) for pool in range(len(self.pools))]
            times = [
                belief.latency_ms(1, self.slot(belief, pool, 0.0))
                for belief, pool in zip(own, self.pools, strict=True)
                if belief is not None
            ]
            alone_ms.append(min(times, default=1.0))
        parts = [to_ms(stage.slo_ns) * self.margin for stage in self.stages]
        for path in targets.indexed_paths(self.view, self.margin):
            total_ms = sum(alone_ms[at] for at in path.stages)
            for at in path.stages:
                parts[at] = min(parts[at], path.slo_ms * alone_ms[at] / total_ms)
        return tuple(parts)

    def present(self) -> dict[DevicePlace, list[ReplicaSpec]]:
        """The replicas on each device under the plan in force."""
        found: dict[DevicePlace, list[ReplicaSpec]] = {}
        for target in self.view.plan.stages if self.view.plan else ():
            for group in target.groups:
                if group.spec.node is not None:
                    place = DevicePlace(group.spec.node, group.spec.device)
                    found.setdefault(place, []).append(group.spec)
        return found

    def labelled(self, contents: Sequence[DeviceContents]) -> list[tuple[DevicePlace, DeviceContents]]:
        """The contents, each with a device for it, chosen so that most replicas stay where they are."""
        present = self.present()
        found: list[tuple[DevicePlace, DeviceContents]] = []
        for number, pool in enumerate(self.pools):
            own = [each for each in contents if each[0] == number]
            places = [*pool.places[: pool.owned], *self._rented(pool, len(own) - pool.owned, present)]
            now = [[_label(spec) for spec in present.get(place, ())] for place in places]
            new = [[_label(self.spec(number, replica, place=None)) for replica in replicas] for _, replicas in own]
            found += [(places[at], each) for at, each in zip(relabelled(new, now), own, strict=True)]
        return found

    @staticmethod
    def _rented(pool: DevicePool, devices: int, present: Mapping[DevicePlace, object]) -> list[DevicePlace]:
        """At least `devices` devices on as few rented nodes as possible; nodes with most devices in use come first."""
        by_node: dict[str, list[DevicePlace]] = {}
        for place in pool.places[pool.owned :]:
            by_node.setdefault(place.node, []).append(place)
        found: list[DevicePlace] = []
        for own in sorted(by_node.values(), key=lambda own: -sum(place in present for place in own)):
            if len(found) >= devices:
                break
            found += own
        return found

    def spec(self, pool: int, replica: PlannedReplica, place: DevicePlace | None) -> ReplicaSpec:
        """A replica on a device."""
        belief = self.belief(replica.stage, pool)
        assert belief is not None, (replica, pool)
        slot = self.slot(belief, self.pools[pool], replica.share)
        stage = self.stages[replica.stage].name
        if place is None:
            return ReplicaSpec(stage, belief.variant, slot)
        return ReplicaSpec(stage, belief.variant, slot, place.node, place.device)

    def plan(
        self,
        contents: Sequence[DeviceContents],
        served: Sequence[float],
        rates: Sequence[float],
        why: str,
        wait_ns: int,
    ) -> Plan:
        """The contents as a plan; `wait_ns` is how long a batch waits to be full."""
        groups: list[list[Group]] = [[] for _ in self.stages]
        for place, (pool, replicas) in self.labelled(contents):
            for each in replicas:
                groups[each.stage].append(Group(self.spec(pool, each, place), 1, each.batch, each.rate_rps))
        stages = tuple(
            StagePlan(
                stage.name,
                tuple(own),
                max((group.batch_max for group in own), default=1),
                wait_ns=wait_ns,
            )
            for stage, own in zip(self.stages, groups, strict=True)
        )
        short = tuple(
            stage.name
            for stage, own, rate in zip(self.stages, served, rates, strict=True)
            if own < SERVED * rate - ROUNDING
        )
        shortfall = f"; too few devices for {listed(short)}" if short else ""
        return Plan(stages, f"{why}{shortfall}", feasible=not short, saturated=short)


def wanted_rps(view: ClusterView, initial_rps: float, headroom: float = 0.0) -> tuple[float, ...]:
    """The rates to plan for, by stage: the forecast ones times 1 + `headroom`; before the first request, `initial_rps`
    for each visit."""
    has_seen = bool(view.ingress.buckets)
    wanted = [view.demand_rps[stage.name] if has_seen else initial_rps * stage.visits for stage in view.stages]
    return tuple(max(IDLE_RPS, (1 + headroom) * rate) for rate in wanted)


def placement_plan(
    devices: SharedDevices,
    rates: tuple[float, ...],
    place: Callable[[SharedDevices, Sequence[float]], Placed],
    memory: PlacementMemory | None,
    *,
    change: float,
    wait_ns: int,
    rescue: Metric | None,
    factors: tuple[object, ...] = (),
) -> tuple[Plan | None, PlacementMemory]:
    """The placement of `place` as a plan; None while the one in force holds: no rate has changed by more than the
    fraction `change`, nor anything else. A batch waits `wait_ns` to be full.

    With `rescue`, a stage that the placement leaves out gets one replica where there is room by this measure. `factors`
    are what `place` depends on besides the devices.
    """
    signature = (*devices.signature, factors)
    if devices.view.plan is not None and memory is not None and memory.holds(rates, signature, change):
        return None, memory
    contents, served, why = place(devices, rates) if devices.pools else ([], [0.0] * len(rates), "no device is left")
    if rescue is not None:
        contents = devices.rescued(contents, rescue)
    made = devices.plan(contents, served, rates, why, wait_ns)
    return made, PlacementMemory(rates, signature)


def _largest(needed: Sequence[int], there: Sequence[int]) -> int:
    """The largest of the needs that can be met at all; 0 if none can."""
    return max([own for own in needed if own <= max(there, default=0)], default=0)


def _places(view: NodeView, accelerator: str, least_bytes: int) -> list[DevicePlace]:
    """The devices of a node: its accelerators of this kind with at least so much memory, or its cores."""
    if not accelerator:
        return [DevicePlace(view.node.name, None)]
    return [
        DevicePlace(view.node.name, each.name)
        for each in view.node.devices
        if each.kind == accelerator and each.memory_bytes >= least_bytes
    ]


def share_of(percent: float) -> float:
    """A share of a device as the ledger counts it, rounded down, so that shares which add up to a device fit on it."""
    return math.floor(MICRO * percent / 100 + ROUNDING) / MICRO


def part_of(used_bytes: int, total_bytes: int) -> int:
    """The part of a device in hundredths of a percent, rounded up."""
    return math.ceil(WHOLE_DEVICE * used_bytes / max(1, total_bytes) - ROUNDING)


def _label(spec: ReplicaSpec) -> str:
    """A key that is equal for replicas that can replace each other."""
    slot = spec.slot
    return f"{spec.stage}/{spec.variant}/{slot.hardware}/{slot.accelerator}/{slot.share:g}/{slot.cores:g}"
