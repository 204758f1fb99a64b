"""The scaling policy `Static`: a fixed number of replicas with fixed cores for each stage, on one or several kinds.

The baseline of every publication here (Sponge: Static-8, Static-16), and the usual deployment. Fails when demand
changes: too little at the peak, too much at night.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import Struct

from sloop.core.views import ClusterView, StageView
from sloop.errors import InputError
from sloop.options import check_range
from sloop.policies import targets
from sloop.units import s
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan


class StaticGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Equal replicas of one stage; None means the stage's value, or the policy's value for all stages."""

    hardware: str | None = None
    replicas: int = 1
    cores: float | None = None
    batch_max: int | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        _check_ranges(self.replicas, self.cores, self.batch_max)


class StaticStage(Struct, frozen=True, forbid_unknown_fields=True):
    """Values for one stage; None means the policy's value for all stages."""

    replicas: int | None = None
    cores: float | None = None
    batch_max: int | None = None
    variant: str | None = None
    hardware: str | None = None
    groups: tuple[StaticGroup, ...] = ()
    """Replicas that differ, for example on several kinds of hardware; instead of `replicas`."""

    def __post_init__(self) -> None:
        _check_ranges(self.replicas, self.cores, self.batch_max)
        if self.groups and self.replicas is not None:
            raise InputError("both 'replicas' and 'groups'", help="write `replicas` in each group")


@dataclass(frozen=True, slots=True)
class Static:
    """`replicas` with `cores` each for every stage; `stages` overrides the values of single stages."""

    is_quick: ClassVar[bool] = True

    replicas: int = 1
    cores: float = 1.0
    batch_max: int = 0
    """0: the largest batch within half the SLO."""
    variant: str = ""
    """Empty: the first variant of each stage."""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage that names none has a profile."""
    stages: Mapping[str, StaticStage] = field(default_factory=dict)
    period_ns: int = s(1)
    _declared: dict[str, tuple[StaticGroup, ...]] = field(init=False, default_factory=dict, repr=False, compare=False)
    """By stage, its groups."""

    def __post_init__(self) -> None:
        check_range("period_ns", self.period_ns, above=0)
        _check_ranges(self.replicas, self.cores, self.batch_max)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The configured plan. InputError for a stage, variant or kind of hardware that the application does not
        have."""
        targets.check_stages(view, self.stages, "system static")
        groups = {stage.name: self._declared.get(stage.name) or self._groups(stage) for stage in view.stages}
        unnamed = [stage for stage in view.stages if None in [group.hardware for group in groups[stage.name]]]
        default = targets.kind_of(view, self.hardware, unnamed) if unnamed else ""
        stages = [self._stage(view, stage, groups[stage.name], default) for stage in view.stages]
        return Plan(tuple(stages), "static: the configured replicas")

    def _groups(self, stage: StageView) -> tuple[StaticGroup, ...]:
        """The declared groups of a stage, or its replicas as the only group; the same at every tick."""
        own = targets.declared_for(stage, self.stages) or StaticStage()
        replicas = self.replicas if own.replicas is None else own.replicas
        self._declared[stage.name] = found = tuple(
            StaticGroup(
                hardware=own.hardware if group.hardware is None else group.hardware,
                replicas=group.replicas,
                cores=group.cores or own.cores or self.cores,
                batch_max=group.batch_max or own.batch_max or self.batch_max,
                variant=group.variant or own.variant or self.variant,
            )
            for group in own.groups or (StaticGroup(replicas=replicas),)
        )
        return found

    def _stage(self, view: ClusterView, stage: StageView, groups: tuple[StaticGroup, ...], default: str) -> StagePlan:
        made: dict[ReplicaSpec, Group] = {}
        for group in groups:
            hardware = default if group.hardware is None else targets.kind_of(view, group.hardware, (stage,))
            belief = targets.belief_of(stage, group.variant or "", hardware)
            cores = group.cores or self.cores
            spec = ReplicaSpec(stage.name, belief.variant, belief.slot(cores))
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


def _check_ranges(replicas: int | None, cores: float | None, batch_max: int | None) -> None:
    for key, value in (("replicas", replicas), ("batch_max", batch_max)):
        if value is not None:
            check_range(key, value, least=0, most=100_000)
    if cores is not None:
        check_range("cores", cores, above=0, most=1e6)
