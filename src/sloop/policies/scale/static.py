"""The scaling policy `Static`: a fixed number of replicas with fixed cores for each stage, on one or several kinds.

The baseline of every publication here (Sponge: Static-8, Static-16), and the usual deployment. Fails when demand
changes: too little at the peak, too much at night.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final

from msgspec import Struct, structs

from sloop.core.ledger import Ledger, Reservation, why_full
from sloop.core.protocols import Scale
from sloop.core.views import Belief, ClusterView, StageView
from sloop.errors import InputError
from sloop.options import NonNegativeFloat, Range
from sloop.policies import targets
from sloop.units import s
from sloop.vocabulary import Group, Node, Plan, ReplicaId, ReplicaSpec, Slot, StagePlan

Number = Annotated[int, Range(least=0, most=100_000)]
Cores = Annotated[float, Range(above=0, most=1e6)]


class StaticGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Equal replicas of one stage; None means the stage's value, or the policy's value for all stages."""

    hardware: str | None = None
    replicas: Number = 1
    cores: Cores | None = None
    batch_max: Number | None = None
    variant: str | None = None
    is_capped: bool = True
    """Whether a replica can use no more than its cores, or its share of an accelerator; otherwise they are only
    reserved for it."""


class StaticPlacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Equal replicas of one stage on one node, and on one accelerator of it; the fields of `sloop plan --json`."""

    stage: str
    variant: str
    node: str
    hardware: str = ""
    device: str = ""
    share: Annotated[float, Range(least=0, most=1)] = 0.0
    """Fraction of the accelerator; with 0, only its memory limits how many replicas share it."""
    replicas: Number = 1
    cores: Cores = 1.0
    batch: Number = 0
    rate_rps: NonNegativeFloat = 0.0
    """Requests per second that they are to serve together, for routes that go by it; 0: not said."""
    application: str = ""
    is_capped: bool = True
    """See `StaticGroup`."""


class StaticStage(Struct, frozen=True, forbid_unknown_fields=True):
    """Values for one stage; None means the policy's value for all stages."""

    replicas: Number | None = None
    cores: Cores | None = None
    batch_max: Number | None = None
    variant: str | None = None
    hardware: str | None = None
    groups: tuple[StaticGroup, ...] = ()
    """Replicas that differ, for example on several kinds of hardware; instead of `replicas`."""

    def __post_init__(self) -> None:
        if self.groups and self.replicas is not None:
            raise InputError("both 'replicas' and 'groups'", help="write `replicas` in each group")


UNDECLARED: Final = StaticStage()


@dataclass(frozen=True, slots=True)
class Static(Scale):
    """`replicas` with `cores` each for every stage; `stages` overrides the values of single stages."""

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    period_ns: ClassVar[int] = s(1)

    replicas: Number = 1
    cores: Cores = 1.0
    batch_max: Number = 0
    """0: the largest batch within half the SLO that serves about as many rows per second as any of them."""
    variant: str = ""
    """Empty: the first variant of each stage."""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage that names none has a profile."""
    stages: Mapping[str, StaticStage] = field(default_factory=dict)
    """Overrides for single stages: `replicas`, `cores`, `batch_max`, `variant`, `hardware`, or `groups` of these."""
    placements: tuple[StaticPlacement, ...] = ()
    """Where each replica is, instead of all the above; in application files also the name of a file with them, such as
    `sloop plan --json` writes."""

    @property
    def is_fixed(self) -> bool:
        return bool(self.placements)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        """The configured plan. InputError for a stage, variant or kind of hardware that the application does not
        have, or for placements that do not fit on the nodes."""
        if self.placements:
            return self._as_placed(view), None
        targets.check_stages(view, self.stages, "system static")
        groups = {stage.name: self._groups(stage) for stage in view.stages}
        unnamed = [stage for stage in view.stages if None in [group.hardware for group in groups[stage.name]]]
        default = targets.kind_of(view, self.hardware, unnamed) if unnamed else ""
        stages = [self._stage(view, stage, groups[stage.name], default) for stage in view.stages]
        return Plan(tuple(stages), "static: the configured replicas"), None

    def _as_placed(self, view: ClusterView) -> Plan:
        """The plan that the placements are."""
        is_deployment = "/" in view.stages[0].name  # of several applications
        by_stage: dict[str, list[StaticPlacement]] = {}
        for each in self.placements:
            application, _, stage_name = each.stage.rpartition("/")
            application = application or each.application
            of = f"{application}/" if is_deployment and application else ""
            by_stage.setdefault(f"{of}{stage_name}", []).append(each)
        targets.check_stages(view, by_stage, "placements")
        nodes = {each.node.name: each.node for each in view.nodes}
        groups = {stage.name: _placed_groups(stage, by_stage, nodes) for stage in view.stages}
        if view.plan is None:
            check_overbooked(
                [each.node for each in view.nodes],
                [
                    (group, stage.beliefs[group.spec.variant, group.spec.slot.hardware])
                    for stage in view.stages
                    for group in groups[stage.name]
                ],
            )
        stages = tuple(
            StagePlan(name, tuple(own), max((group.batch_max for group in own), default=1))
            for name, own in groups.items()
        )
        return Plan(stages, "static: the placements as declared")

    def _groups(self, stage: StageView) -> tuple[StaticGroup, ...]:
        """The declared groups of a stage, or its replicas as the only group."""
        own = targets.declared_for(stage, self.stages) or UNDECLARED
        replicas = self.replicas if own.replicas is None else own.replicas
        return tuple(
            StaticGroup(
                hardware=own.hardware if group.hardware is None else group.hardware,
                replicas=group.replicas,
                cores=group.cores or own.cores or self.cores,
                batch_max=group.batch_max or own.batch_max or self.batch_max,
                variant=group.variant or own.variant or self.variant,
                is_capped=group.is_capped,
            )
            for group in own.groups or (StaticGroup(replicas=replicas),)
        )

    def _stage(self, view: ClusterView, stage: StageView, groups: tuple[StaticGroup, ...], default: str) -> StagePlan:
        made: dict[ReplicaSpec, Group] = {}
        for group in groups:
            hardware = default if group.hardware is None else targets.kind_of(view, group.hardware, (stage,))
            belief = targets.belief_of(stage, group.variant or "", hardware)
            cores = group.cores or self.cores
            slot = structs.replace(belief.slot(cores), is_capped=group.is_capped)
            spec = ReplicaSpec(stage.name, belief.variant, slot)
            if spec in made:
                raise InputError(
                    f"system static: two groups of stage {stage.name} are the same replicas of {belief.variant}",
                    help="write them as one group",
                )
            batch_max = targets.largest_batch(stage, belief, cores, group.batch_max or 0)
            made[spec] = Group(spec, group.replicas, batch_max)
        largest = max([group.batch_max for group in made.values()])
        if len(made) == 1:
            ((spec, only),) = made.items()
            return StagePlan(stage.name, (Group(spec, only.count),), largest)
        return StagePlan(stage.name, tuple(made.values()), largest)


def _placed_groups(
    stage: StageView, by_stage: Mapping[str, Sequence[StaticPlacement]], nodes: Mapping[str, Node]
) -> list[Group]:
    """The replicas of a stage. InputError if there is no placement for it, or if two differ only in what replicas on
    one place have in common."""
    declared = targets.declared_for(stage, by_stage)
    if not declared:
        what = f"placements: none is for stage {stage.name}, which would serve nothing"
        raise InputError(what, help="place at least one replica of every stage")
    found: dict[ReplicaSpec, Group] = {}
    for each in declared:
        group = _placed_group(stage, each, nodes)
        other = found.get(group.spec)
        if other is not None:
            what = f"placements: two are for the same replicas of {stage.name} on {_place_of(group.spec)}"
            raise InputError(what, help="write them as one, with `replicas`, `batch` and `rate_rps` of all")
        found[group.spec] = group
    return list(found.values())


def _placed_group(stage: StageView, placement: StaticPlacement, nodes: Mapping[str, Node]) -> Group:
    node = nodes.get(placement.node)
    if node is None:
        what = f"placements: the cluster has no node {placement.node!r}"
        raise InputError(what, help=f"its nodes are {', '.join(list(nodes)[:8])}")
    if placement.hardware not in ("", node.hardware):
        what = f"placements: node {node.name} is of hardware {node.hardware}, not {placement.hardware}"
        raise InputError(what, help="correct `node` or `hardware`, or leave `hardware` out")
    device = next((each for each in node.devices if each.name == placement.device), None)
    if placement.device and device is None:
        what = f"placements: node {node.name} has no device {placement.device!r}"
        raise InputError(what, help=f"it has {', '.join(each.name for each in node.devices) or 'none'}")
    belief = targets.belief_of(stage, placement.variant, node.hardware)
    accelerator = device.kind if device else ""
    if belief.accelerator != accelerator:
        what = f"placements: the profile of {belief.variant} is for {belief.accelerator or 'the cores'} of {node.name}"
        raise InputError(what, help=f"it is placed on {placement.device or 'its cores'}")
    share = placement.share if device else 1.0
    slot = Slot(placement.cores, node.hardware, accelerator, share, placement.is_capped)
    spec = ReplicaSpec(stage.name, belief.variant, slot, node.name, device.name if device else None)
    batch = min(placement.batch or belief.batch_max, belief.batch_max)
    return Group(spec, placement.replicas, batch, placement.rate_rps)


def _place_of(spec: ReplicaSpec) -> str:
    return f"{spec.device} of {spec.node}" if spec.device else str(spec.node)


def check_overbooked(nodes: Sequence[Node], placed: Iterable[tuple[Group, Belief]]) -> None:
    """InputError if replicas of placements do not fit together on the empty nodes."""
    ledger = Ledger.all_ready(nodes)
    number = 0
    for group, belief in placed:
        spec = group.spec
        for _ in range(group.count):
            number += 1
            wanted = Reservation.of(spec, belief, spec.node or "", spec.device)
            if not ledger.reserve(ReplicaId(number), wanted):
                why = why_full(wanted, ledger.view(wanted.node))
                what = f"placements: no room for a replica of {spec.stage} on {_place_of(spec)}: {why}"
                raise InputError(what, help="move it, or make replicas smaller")
