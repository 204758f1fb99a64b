"""Scaling policies that place the models of an application on shared devices: iGniter, Usher, two MILPs, and harbor.

Each stage is a model with a rate and a deadline; a device is an accelerator, or a whole node where models run on CPU
cores. A plan says for every replica its device, its share, its batch and its rate. Devices of one kind are
interchangeable: a new plan assigns the planned contents to them so that most replicas stay where they are. A plan stays
in force until a rate has changed by more than `change`, or models or devices have changed.

Only the stages of one application are placed together. Several applications each plan as if all devices were theirs.

Sources: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505,
2024), for Usher and the MILPs, which know their rates beforehand and plan once; iGniter (Xu et al., TPDS 2023).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

from msgspec import structs

from sloop.core.ledger import MICRO
from sloop.core.views import Belief, ClusterView, NodeView, StageView
from sloop.errors import InputError
from sloop.options import check_range
from sloop.policies import targets
from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, IgniterLaw, Interference
from sloop.solvers import colocation, harbor, igniter, usher
from sloop.solvers.colocation import BatchOption, Colocation, Content, SharedModel, hundredths
from sloop.solvers.harbor import DeviceKind, HarborProblem, PlacedModel, ServingAssumptions
from sloop.text import counted, listed
from sloop.units import NS_PER_MS, ROUNDING, ms, s, to_ms
from sloop.vocabulary import Group, Node, NodeState, Plan, ReplicaSpec, Slot, StagePlan

Metric = Literal["peak_occupancy", "occupancy", "sm_use"]
"""The measure of how much of a device's compute a model needs: its peak occupancy (AO), or its occupancy (WAO) or the
SMs that its kernels use (WSM), both as means weighted by time."""
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


@dataclass(slots=True)
class ColocationMemory:
    """State between decisions."""

    rates: tuple[float, ...] = ()
    """The rates of the last decision."""
    signature: tuple[object, ...] = ()
    """All its other inputs."""


@dataclass(frozen=True)
class SharedDevices:
    """The stages of an application, and the devices on which their models can run."""

    view: ClusterView
    policy: "Colocated"
    hardware: tuple[str, ...]

    @property
    def stages(self) -> tuple[StageView, ...]:
        """The models."""
        return self.view.stages

    @cached_property
    def pools(self) -> tuple[DevicePool, ...]:
        """The devices in pools, in the order of the cluster, without those of lost nodes. A pool counts with the cores
        and memory of the smallest of its nodes and devices, where these differ."""
        by_likeness: dict[tuple[object, ...], list[NodeView]] = {}
        for node in targets.usable(self.view.nodes):
            if node.node.hardware in self.hardware:
                by_likeness.setdefault(self.policy.likeness(node.node), []).append(node)
        found = [self._pool(nodes[0].node.hardware, nodes) for nodes in by_likeness.values()]
        return tuple(pool for pool in found if pool.places)

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
        return [targets.belief_of(stage, self.policy.variant, hardware)]

    def belief(self, stage: int, pool: int) -> Belief | None:
        """The variant of a stage on a kind of device; None if it cannot run there."""
        own = self._beliefs(self.stages[stage], self.pools[pool].hardware)
        return own[0] if own else None

    def slot(self, belief: Belief, pool: DevicePool, share: float) -> Slot:
        """The slot of a replica. It reserves at most an equal part of the device's cores for each stage, so that one
        replica of each stage fits. Where the device is the cores, and the part is less than the replica can use, it may
        also use what the others leave idle."""
        wanted = min(self.policy.cores or belief.cores_max, belief.cores_max)
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
        for batch in self.policy.batch_sizes(belief):
            latency_ms = costs_ns[batch] / NS_PER_MS
            compute, memory = self._needs(belief, where, batch, slot, metric, reserved=reserved)
            if compute is None:
                if must_know:
                    what = f"the profile of {belief.variant} on {where.accelerator or where.hardware} has no {metric}"
                    help_text = (
                        "`sloop profile MODEL --device cuda` measures it; or declare `sharing`, or use system `mixed`"
                    )
                    raise InputError(what, help=help_text)
                compute = colocation.WHOLE
            found.append(BatchOption(batch, latency_ms, 1000.0 * batch / latency_ms, compute, memory))
        return tuple(found)

    def _needs(
        self, belief: Belief, pool: DevicePool, batch: int, slot: Slot, metric: Metric, *, reserved: bool
    ) -> tuple[int | None, int]:
        if not pool.accelerator:
            # Rounded down: one replica of each stage must fit, however many there are.
            cores = math.floor(colocation.WHOLE * slot.cores / pool.cores + ROUNDING)
            return cores, _part(belief.memory_bytes, pool.node_memory_bytes)
        demand = belief.demand(batch, slot)
        memory = _part(belief.device_memory_bytes, pool.memory_bytes)
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
            part = colocation.WHOLE // pool.clients
        every = [own.memory_bytes for stage in self.stages for own in self._beliefs(stage, pool.hardware)]
        if sum(every) > pool.node_memory_bytes:
            part = max(part, _part(belief.memory_bytes, pool.node_memory_bytes))
        return part

    def overbooks(self, contents: Sequence[DeviceContents]) -> bool:
        """Whether the replicas on a device reserve more memory than it has."""
        for number, replicas in contents:
            pool, used_bytes = self.pools[number], 0
            for each in replicas:
                belief = self.belief(each.stage, number)
                if belief is not None:
                    used_bytes += belief.device_memory_bytes if pool.accelerator else belief.memory_bytes
            if used_bytes > (pool.memory_bytes if pool.accelerator else pool.node_memory_bytes):
                return True
        return False

    def check_fit(self, options: Sequence[Sequence[Sequence[BatchOption]]]) -> None:
        """InputError for a stage that fits on no device, given its options by kind. None while a node is lost, because
        the stage may fit there, and the others need a plan meanwhile."""
        if any(node.state is NodeState.LOST for node in self.view.nodes):
            return
        for at, (stage, own) in enumerate(zip(self.stages, options, strict=True)):
            every = [option for kind in own for option in kind]
            if every and not any(max(option.compute, option.memory) <= colocation.WHOLE for option in every):
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
        made = list(contents)
        served = {replica.stage for _, replicas in made for replica in replicas}
        for at in range(len(self.stages)):
            if at not in served:
                self._add(made, at, metric)
        return made

    def _add(self, contents: list[DeviceContents], at: int, metric: Metric) -> None:
        for number, pool in enumerate(self.pools):
            options = self.options(at, number, metric)
            if not options:
                continue
            smallest = min(options, key=lambda option: (max(option.compute, option.memory), option.batch))
            added = PlannedReplica(at, smallest.batch, 0.0, 0.0)
            for place, (own, replicas) in enumerate(contents):
                if own == number and self._fits(replicas, smallest, number, metric):
                    contents[place] = (own, (*replicas, added))
                    return
            if sum(own == number for own, _ in contents) < len(pool.places) and self._fits(
                (), smallest, number, metric
            ):
                contents.append((number, (added,)))
                return

    def _fits(self, replicas: Sequence[PlannedReplica], added: BatchOption, pool: int, metric: Metric) -> bool:
        compute, memory = added.compute, added.memory
        for each in replicas:
            own = [option for option in self.options(each.stage, pool, metric) if option.batch >= each.batch]
            need = own[0].compute if own else colocation.WHOLE
            compute += round(colocation.WHOLE * each.share) if each.share else need
            memory += own[0].memory if own else colocation.WHOLE
        return max(compute, memory) <= colocation.WHOLE

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
        parts = [to_ms(stage.slo_ns) * self.policy.margin for stage in self.stages]
        for path in targets.indexed_paths(self.view, self.policy.margin):
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
            found += [(places[at], each) for at, each in zip(colocation.relabelled(new, now), own, strict=True)]
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
        self, contents: Sequence[DeviceContents], served: Sequence[float], rates: Sequence[float], why: str
    ) -> Plan:
        """The contents as a plan."""
        groups: list[list[Group]] = [[] for _ in self.stages]
        for place, (pool, replicas) in self.labelled(contents):
            for each in replicas:
                groups[each.stage].append(Group(self.spec(pool, each, place), 1, each.batch, each.rate_rps))
        stages = tuple(
            StagePlan(
                stage.name,
                tuple(own),
                max((group.batch_max for group in own), default=1),
                wait_ns=self.policy.wait_ns,
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


def _part(used_bytes: int, total_bytes: int) -> int:
    return math.ceil(colocation.WHOLE * used_bytes / max(1, total_bytes) - ROUNDING)


def _label(spec: ReplicaSpec) -> str:
    """A key that is equal for replicas that can replace each other."""
    slot = spec.slot
    return f"{spec.stage}/{spec.variant}/{slot.hardware}/{slot.accelerator}/{slot.share:g}/{slot.cores:g}"


@dataclass(frozen=True, slots=True)
class Colocated:
    """What the policies of this module share: they make a placement for the forecast rates."""

    headroom: float = 0.0
    """Plan for the demand times 1 + `headroom`."""
    margin: float = 1.0
    """Fraction of every deadline to plan with."""
    wait_ns: int = ms(100)
    """How long a batch waits to be full, if the batch policy reads it from the plan."""
    batches: tuple[int, ...] = ()
    """The batch sizes to choose from; empty: the powers of two."""
    cores: float = 0.0
    """Cores of a replica; 0: as many as its profile can use. At most an equal part of the node for each stage."""
    variant: str = ""
    """The variant of every stage; empty: the first."""
    initial_rps: float = 1.0
    """The rate to plan for at each stage before the first request."""
    change: float = 0.1
    """A plan stays until a rate has changed by more than this fraction."""
    rescue: bool = True
    """Whether a stage that the placement leaves out gets one replica where there is room for it."""
    period_ns: int = s(10)
    _memory: ColocationMemory = field(init=False, default_factory=ColocationMemory, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("headroom", "wait_ns", "cores", "initial_rps", "change"):
            check_range(key, getattr(self, key), least=0)
        check_range("margin", self.margin, above=0, most=1)
        check_range("period_ns", self.period_ns, above=0)
        for batch in self.batches:
            check_range("batches", batch, least=1)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The placement; None while nothing has changed. InputError for a model that fits on no device, and for a
        profile that does not say what the model needs of a device."""
        devices = SharedDevices(view, self, self._kinds(view))
        rates = self._rates(view)
        memory, signature = self._memory, self._signature(devices)
        if view.plan is not None and memory.signature == signature and self._are_near(rates):
            return None
        if devices.pools:
            contents, served, why = self._placed(devices, rates)
        else:
            contents, served, why = [], [0.0] * len(rates), "no device is left"
        if self.rescue:
            contents = devices.rescued(contents, self.metric_of_rescue)
        made = devices.plan(contents, served, rates, why)
        memory.rates, memory.signature = rates, signature
        return made

    @property
    def metric_of_rescue(self) -> Metric:
        """The measure of needed compute by which `rescue` finds room for a replica."""
        return "sm_use"

    def batch_sizes(self, belief: Belief) -> Sequence[int]:
        """The batch sizes of a variant."""
        return [batch for batch in self.batches or BATCHES if batch <= belief.batch_max] or [belief.batch_max]

    def _rates(self, view: ClusterView) -> tuple[float, ...]:
        has_seen = bool(view.ingress.buckets)
        wanted = [view.demand_rps[stage.name] if has_seen else self.initial_rps * stage.visits for stage in view.stages]
        return tuple(max(IDLE_RPS, (1 + self.headroom) * rate) for rate in wanted)

    def _are_near(self, rates: Sequence[float]) -> bool:
        before = self._memory.rates
        return len(before) == len(rates) and all(
            abs(new - old) <= self.change * old for new, old in zip(rates, before, strict=True)
        )

    def _signature(self, devices: SharedDevices) -> tuple[object, ...]:
        beliefs = tuple(
            belief and (belief.variant, belief.costs_ns(devices.slot(belief, pool, 0.0))[-1])
            for at in range(len(devices.stages))
            for number, pool in enumerate(devices.pools)
            for belief in (devices.belief(at, number),)
        )
        return devices.pools, beliefs, devices.deadlines_ms()

    def _kinds(self, view: ClusterView) -> tuple[str, ...]:
        """The kinds of nodes to use."""
        raise NotImplementedError

    def likeness(self, node: Node) -> tuple[object, ...]:
        """A key that is equal for nodes whose devices are interchangeable."""
        return (node.hardware,)

    def _placed(
        self, devices: SharedDevices, rates: Sequence[float]
    ) -> tuple[list[DeviceContents], Sequence[float], str]:
        """The contents of devices, the rates that they are expected to serve, and why."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OneKind(Colocated):
    """Policies for devices of one kind."""

    hardware: str = ""
    """The kind of node to use; empty: the first on which every stage has a profile."""

    def _kinds(self, view: ClusterView) -> tuple[str, ...]:
        return (targets.kind_of(view, self.hardware, view.stages),)

    def _models(
        self, devices: SharedDevices, rates: Sequence[float], metric: Metric, *, reserved: bool
    ) -> list[SharedModel]:
        options = [
            devices.options(at, 0, metric, must_know=True, reserved=reserved) for at in range(len(devices.stages))
        ]
        devices.check_fit([[own] for own in options])
        return [
            SharedModel(stage.name, rate, deadline_ms, own)
            for stage, rate, deadline_ms, own in zip(
                devices.stages, rates, devices.deadlines_ms(), options, strict=True
            )
        ]

    def _solved(
        self, devices: SharedDevices, rates: Sequence[float]
    ) -> tuple[list[DeviceContents], Colocation, list[SharedModel]]:
        """A placement by the memory that each batch needs. If the replicas then reserve more than a device has, a
        placement by the memory that they reserve."""
        contents: list[DeviceContents] = []
        for reserved in (False, True):
            models = self._models(devices, rates, self.metric_of_rescue, reserved=reserved)
            found = self._solution(devices, models)
            contents = _replicas(models, found.contents, is_limited=self.is_limited)
            if not devices.overbooks(contents):
                break
        return contents, found, models

    @property
    def is_limited(self) -> bool:
        """Whether the share of a replica limits it."""
        return False

    def _solution(self, devices: SharedDevices, models: Sequence[SharedModel]) -> Colocation:
        """The placement that the solver finds."""
        raise NotImplementedError


def _replicas(models: Sequence[SharedModel], contents: Sequence[Content], *, is_limited: bool) -> list[DeviceContents]:
    """The contents that a solver has found, as replicas. Their shares are 0 unless they are limits (`is_limited`)."""
    rates = colocation.planned_rates(models, contents)
    return [
        (
            0,
            tuple(
                PlannedReplica(at, option.batch, option.compute / colocation.WHOLE if is_limited else 0.0, rate_rps)
                for (at, option), rate_rps in zip(content, own, strict=True)
            ),
        )
        for content, own in zip(contents, rates, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Colocate(OneKind):
    """AO-MILP and WSM-MILP: the placement with the most goodput, by an integer program that ignores waiting time.

    Each model has the same batch size everywhere, the smallest one that serves as much. Shares do not limit replicas.
    """

    metric: Metric = "sm_use"
    """The measure of the compute that a model needs: its `peak_occupancy`, or the mean, weighted by time, of its
    `occupancy` or of the SMs that its kernels use (`sm_use`)."""

    @property
    def metric_of_rescue(self) -> Metric:
        """See `Colocated`."""
        return self.metric

    def _placed(
        self, devices: SharedDevices, rates: Sequence[float]
    ) -> tuple[list[DeviceContents], Sequence[float], str]:
        contents, found, _ = self._solved(devices, rates)
        why = f"{counted(len(contents), 'device')} for {found.total_rps:.4g} requests/s, by {self.metric}"
        return contents, found.served_rps, why

    def _solution(self, devices: SharedDevices, models: Sequence[SharedModel]) -> Colocation:
        return colocation.most_goodput(models, len(devices.pools[0].places))


@dataclass(frozen=True, slots=True)
class Usher(OneKind):
    """Usher: groups of models that complement each other, placed one group after the other.

    The share of each replica is the compute that it needs.
    """

    metric: Metric = "peak_occupancy"
    """The measure of the compute that a model needs: its `peak_occupancy`, or the mean, weighted by time, of its
    `occupancy` or of the SMs that its kernels use (`sm_use`)."""
    group_size: int = usher.GROUP_SIZE
    """The most models of a group."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of stages in the order of placement, instead of those that Usher forms."""

    def __post_init__(self) -> None:
        Colocated.__post_init__(self)
        check_range("group_size", self.group_size, least=1, most=64)

    @property
    def metric_of_rescue(self) -> Metric:
        """See `Colocated`."""
        return self.metric

    def _placed(
        self, devices: SharedDevices, rates: Sequence[float]
    ) -> tuple[list[DeviceContents], Sequence[float], str]:
        contents, found, models = self._solved(devices, rates)
        groups = self._groups(devices.view, models)
        named = "; ".join(" + ".join(models[at].name for at in group) for group in groups)
        why = f"{counted(len(contents), 'device')} for {found.total_rps:.4g} requests/s; groups {named}"
        return contents, found.served_rps, why

    @property
    def is_limited(self) -> bool:
        """See `OneKind`."""
        return True

    def _solution(self, devices: SharedDevices, models: Sequence[SharedModel]) -> Colocation:
        return usher.plan(models, len(devices.pools[0].places), groups=self._groups(devices.view, models))

    def _groups(self, view: ClusterView, models: Sequence[SharedModel]) -> Sequence[tuple[int, ...]]:
        if not self.groups:
            return usher.grouped(models, self.group_size)
        targets.check_stages(view, {name: None for group in self.groups for name in group}, "groups")
        found = [
            tuple(at for at, stage in enumerate(view.stages) if targets.declared_for(stage, dict.fromkeys(own, True)))
            for own in self.groups
        ]
        return [group for group in found if group]


@dataclass(frozen=True, slots=True)
class Igniter(OneKind):
    """iGniter: each model gets the batch and the smallest share with which a batch takes at most half of its deadline,
    on the GPU where the shares of all models together grow least. If the plan needs more GPUs than there are, the
    surplus ones are left out, the last first. A model without coefficients gets devices of its own."""

    check_new: bool = True
    """Whether the deadline of a model is also checked on a GPU on which it is the first model; the publication checks
    only models that join others."""

    def _placed(
        self, devices: SharedDevices, rates: Sequence[float]
    ) -> tuple[list[DeviceContents], Sequence[float], str]:
        laws = {at: law for at in range(len(devices.stages)) if (law := _igniter_law(devices, at)) is not None}
        deadlines_ms, pool = devices.deadlines_ms(), devices.pools[0]
        workloads = []
        for at, law in laws.items():
            belief = devices.belief(at, 0)
            assert belief is not None, at
            memory = max(_part(belief.device_memory_bytes, pool.memory_bytes), devices.beside_device(belief, pool))
            named = str(at), law.model, rates[at], deadlines_ms[at]
            workloads.append(igniter.IgniterWorkload(*named, belief.batch_max, memory / colocation.WHOLE))
        contents: list[DeviceContents] = []
        for own in igniter.plan(next(iter(laws.values())).gpu, workloads, check_new=self.check_new) if laws else ():
            replicas = [
                PlannedReplica(int(each.workload.name), each.batch, _fraction(each.share), each.rate_rps)
                for each in own
            ]
            contents.append((0, tuple(replicas)))
        for at in range(len(devices.stages)):
            if at not in laws:
                contents += self._alone(devices, at, rates[at], deadlines_ms[at] / 2)
        kept = contents[: len(devices.pools[0].places)]
        served = [0.0] * len(devices.stages)
        for replica in (each for _, replicas in kept for each in replicas):
            served[replica.stage] += replica.rate_rps
        why = f"{counted(len(contents), 'device')} needed, {len(kept)} available"
        unknown = [stage.name for at, stage in enumerate(devices.stages) if at not in laws]
        if unknown:
            why += f"; devices of their own for {listed(unknown)}, whose profiles have no coefficients of iGniter"
        return kept, served, why

    def _alone(self, devices: SharedDevices, at: int, rate_rps: float, limit_ms: float) -> list[DeviceContents]:
        """Devices for a stage alone, because its interference is unknown: as many as carry its rate with the batch that
        serves most among those that take at most half of its deadline."""
        options = devices.options(at, 0, "sm_use")
        option = max([each for each in options if each.latency_ms <= limit_ms] or options[:1], key=lambda o: o.rate_rps)
        count = max(1, math.ceil(rate_rps / option.rate_rps - ROUNDING))
        share = 1.0 if devices.pools[0].accelerator else 0.0
        each = min(option.rate_rps, rate_rps / count)
        return [(0, (PlannedReplica(at, option.batch, share, each),))] * min(count, len(devices.pools[0].places))


def _fraction(percent: float) -> float:
    """A share as the ledger counts it, rounded down, so that shares which add up to a device fit on it."""
    return math.floor(MICRO * percent / 100 + ROUNDING) / MICRO


def _igniter_law(devices: SharedDevices, at: int) -> IgniterLaw | None:
    """iGniter's coefficients of a stage, and of its device; None if the profile has none."""
    belief = devices.belief(at, 0)
    law: object = belief.interference if belief is not None else None
    return law if isinstance(law, IgniterLaw) else None


@dataclass(frozen=True, slots=True)
class Harbor(Colocated):
    """Our placement, on devices of several kinds. It counts waiting, transfers and the slowdown by other models on the
    device (`sloop.solvers.harbor`).

    Replicas stay where they are unless a new placement is better by `gain`. Until a model has finished batches, its
    inferences are expected to take `slower` times as long as profiled; if batches of other models have finished on such
    a device, the mean of their factors replaces `slower`. Fails if arrivals are burstier than Poisson arrivals: the
    estimated waiting time is then too short.
    """

    fairness: float = 0.0
    """0: the most requests in time; towards 1, every model is served before any is served well."""
    gain: float = 0.02
    """How much better, as a fraction, another placement must be to replace the one in force."""
    tolerance: float = 0.005
    """How much less, as a fraction, a cheaper placement may serve."""
    usd_per_h_max: float = 0.0
    """The most that nodes on demand may cost; 0: any price."""
    hardware: tuple[str, ...] = ()
    """The kinds of nodes to use; empty: all."""
    slower: float = 1.18
    """How many times as long as profiled an inference takes beside other busy workers, while nothing is measured."""
    transport_ns: int = ms(1)
    """The time that a request and its answer spend outside queues and workers."""
    horizon_ns: int = s(10)
    """The time over which the growth of queues under overload is computed."""

    def __post_init__(self) -> None:
        Colocated.__post_init__(self)
        for key in ("gain", "transport_ns", "usd_per_h_max"):
            check_range(key, getattr(self, key), least=0)
        check_range("tolerance", self.tolerance, least=0, most=0.5)
        check_range("fairness", self.fairness, least=0, most=0.99)
        check_range("slower", self.slower, above=0)
        check_range("horizon_ns", self.horizon_ns, above=0)

    def _kinds(self, view: ClusterView) -> tuple[str, ...]:
        for kind in self.hardware:
            targets.check_kind(view, kind)
        kinds = [kind for kind in targets.kinds_of(view) if kind in self.hardware or not self.hardware]
        missing = [stage.name for stage in view.stages if not any(stage.on(kind) for kind in kinds)]
        if missing and self.hardware:
            raise InputError(
                f"{listed(missing)}: no profile for {listed(kinds, 'or')}",
                help="add a profile for one of these kinds, or name another kind under `hardware`",
            )
        return tuple(kinds)

    def likeness(self, node: Node) -> tuple[object, ...]:
        """Two nodes are alike if all of these are equal. The kind alone does not decide, because a group of nodes may
        declare other cores, memory, devices and prices than its kind has."""
        return node.hardware, node.cores, node.memory_bytes, node.usd_per_h, node.devices

    def _placed(
        self, devices: SharedDevices, rates: Sequence[float]
    ) -> tuple[list[DeviceContents], Sequence[float], str]:
        problem = self._problem(devices, rates)
        present = self._present(devices, problem)
        found = harbor.place(problem) if present is None else harbor.replaced(problem, present, gain=self.gain)
        counts: dict[int, int] = {}
        for _, content in found.contents:
            for at, _ in content:
                counts[at] = counts.get(at, 0) + 1
        contents = [
            (
                kind,
                tuple(PlannedReplica(at, option.batch, 0.0, rates[at] / counts[at]) for at, option in content),
            )
            for kind, content in found.contents
        ]
        has_prices = any(pool.usd_per_h for pool in devices.pools)
        price = f" and {found.usd_per_h:.4g} USD/h" if found.usd_per_h and has_prices else ""
        proof = "" if found.proven else ", within the bound of the search"
        why = f"{counted(len(contents), 'device')} for {found.total_rps:.4g} of {sum(rates):.4g} requests/s in time"
        return contents, found.served_rps, f"{why}{price}{proof}"

    def _signature(self, devices: SharedDevices) -> tuple[object, ...]:
        # A measurement may leave the beliefs unchanged and still replace an expected factor.
        factors = tuple(tuple(round(factor, 2) for factor in own) for own in self._unmeasured(devices))
        return (*Colocated._signature(self, devices), factors)

    def _unmeasured(self, devices: SharedDevices) -> list[list[float]]:
        """By stage and kind of device, the factor by which inferences are expected to take longer than believed.

        A correction is the weighted mean of measured factors and of a prior of 1, which stands for the profile. Here
        the prior is `slower` instead of 1 or, if other models have been measured, the mean of their factors, because
        all models on a host are slowed down by the same other work.
        """
        found = [[1.0] * len(devices.pools) for _ in devices.stages]
        for pool in range(len(devices.pools)):
            beliefs = [(at, belief) for at in range(len(found)) if (belief := devices.belief(at, pool)) is not None]
            if not beliefs:
                continue
            least = min(belief.prior_weight for _, belief in beliefs)
            taught = math.fsum(belief.correction - belief.prior_weight for _, belief in beliefs)
            lessons = math.fsum(1.0 - belief.prior_weight for _, belief in beliefs)
            expected = (least * self.slower + taught) / (least + lessons)
            for at, belief in beliefs:
                found[at][pool] = 1.0 + belief.prior_weight * (expected - 1.0) / belief.correction
        return found

    def _problem(self, devices: SharedDevices, rates: Sequence[float]) -> HarborProblem:
        pools = devices.pools
        options = [
            [
                tuple(
                    replace(each, latency_ms=factor * each.latency_ms) for each in devices.options(at, pool, "sm_use")
                )
                for pool, factor in enumerate(own)
            ]
            for at, own in enumerate(self._unmeasured(devices))
        ]
        devices.check_fit(options)
        models = tuple(
            PlacedModel(stage.name, rate, deadline_ms, tuple(own))
            for stage, rate, deadline_ms, own in zip(
                devices.stages, rates, devices.deadlines_ms(), options, strict=True
            )
        )
        rentable = [pool for pool in pools if len(pool.places) > pool.owned]
        priced = [pool.usd_per_h > 0 for pool in rentable]
        if any(priced) and not all(priced):
            without = listed([pool.hardware for pool in rentable if not pool.usd_per_h])
            raise InputError(f"nodes on demand without a price: {without}", help="declare `usd_per_h` for them")
        kinds = tuple(
            DeviceKind(
                pool.hardware,
                pool.owned,
                len(pool.places) - pool.owned,
                pool.usd_per_h or (0.0 if any(priced) or pool not in rentable else 1e-6),
                pool.per_node,
            )
            for pool in pools
        )
        return HarborProblem(
            models,
            kinds,
            ServingAssumptions(
                wait_ms=to_ms(self.wait_ns),
                slower=1.0,
                rpc_ms=to_ms(self.transport_ns) / 2,
                network_ms=0.0,
                network_ms_per_mb=0.0,
                horizon_s=to_ms(self.horizon_ns) / 1000,
            ),
            fairness=self.fairness,
            tolerance=self.tolerance,
            usd_per_h_max=self.usd_per_h_max or math.inf,
            slowdown=_slowdowns(devices),
        )

    def _present(self, devices: SharedDevices, problem: HarborProblem) -> Sequence[tuple[int, Content]] | None:
        """The contents of the devices under the plan in force. None if there is no plan, or if it does not fit the
        present devices and models."""
        plan = devices.view.plan
        batches = _batches(plan.stages if plan else ())
        pool_of = {place: number for number, pool in enumerate(devices.pools) for place in pool.places}
        index = {stage.name: at for at, stage in enumerate(devices.stages)}
        found: list[tuple[int, Content]] = []
        for place, specs in devices.present().items():
            pool = pool_of.get(place)
            if pool is None:
                return None
            residents = []
            for spec in specs:
                at = index.get(spec.stage, -1)
                belief = devices.belief(at, pool) if at >= 0 else None
                options = problem.models[at].options[pool] if at >= 0 else ()
                option = next((each for each in options if each.batch == batches[spec]), None)
                if belief is None or option is None or spec.slot != devices.slot(belief, devices.pools[pool], 0.0):
                    return None
                residents.append((at, option))
            content = tuple(sorted(residents, key=lambda each: each[0]))
            if max(colocation.needs(content)) > colocation.WHOLE:
                return None
            found.append((pool, content))
        return found or None


def _batches(stages: Sequence[StagePlan]) -> Mapping[ReplicaSpec, int]:
    return {group.spec: target.batch_max_of(group) for target in stages for group in target.groups}


def _slowdowns(devices: SharedDevices) -> harbor.SlowdownOf | None:
    """The function that computes the slowdown of each model on a device by the beliefs' laws of interference; None if
    no model has a law."""
    every = [(at, pool) for at in range(len(devices.stages)) for pool in range(len(devices.pools))]
    laws: dict[tuple[int, int], Interference] = {}
    for key in every:
        belief = devices.belief(*key)
        if belief is not None:
            laws[key] = belief.interference
    if all(law == NO_SLOWDOWN for law in laws.values()):
        return None
    demands: dict[tuple[int, int, int], DeviceDemand] = {}

    def demand(at: int, pool: int, batch: int) -> DeviceDemand:
        found = demands.get((at, pool, batch))
        if found is None:
            own = devices.belief(at, pool)
            assert own is not None, (at, pool)
            slot = devices.slot(own, devices.pools[pool], 0.0)
            found = demands[at, pool, batch] = own.demand(batch, slot)
        return found

    def slowdowns(pool: int, content: Content) -> list[float]:
        if len(content) == 1:
            return [1.0]
        running = [demand(at, pool, option.batch) for at, option in content]
        return [
            max(1.0, laws[at, pool].slowdown(running[place], running[:place] + running[place + 1 :]))
            if (at, pool) in laws
            else 1.0
            for place, (at, _) in enumerate(content)
        ]

    return slowdowns
