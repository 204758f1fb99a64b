"""The same cluster always: a fixed number of replicas with fixed cores per stage.

The baseline of every paper (Sponge: Static-8, Static-16), and what most users run today. Fails when demand moves:
too little at the peak, too much at night.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from sloop.core.views import ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.bounds import above, at_least
from sloop.solvers import targets
from sloop.units import s
from sloop.vocabulary import Plan, StagePlan


class StaticStage(Struct, frozen=True, forbid_unknown_fields=True):
    """What one stage gets where it differs from the others; None takes the policy's own value."""

    replicas: int | None = None
    cores: float | None = None
    batch_max: int | None = None
    variant: str | None = None


@dataclass(frozen=True, slots=True)
class Static:
    """`replicas` × `cores` for each stage; `batch_max` 0: what half the SLO allows; `variant` "" the first declared."""

    replicas: int = 1
    cores: float = 1.0
    batch_max: int = 0
    variant: str = ""
    stages: Mapping[str, StaticStage] = field(default_factory=dict)
    period_ns: int = s(1)

    def __post_init__(self) -> None:
        above("period_ns", self.period_ns, 0)
        _check(self.replicas, self.cores, self.batch_max)
        for own in self.stages.values():
            _check(own.replicas or 0, 1.0 if own.cores is None else own.cores, own.batch_max or 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The configured plan. `InputError` where a stage or variant is named that the application does not have."""
        unknown = self.stages.keys() - {stage.name for stage in view.stages}
        if unknown:
            known = ", ".join(stage.name for stage in view.stages)
            raise InputError(f"system static: no stage {min(unknown)!r}", help=f"the application's stages are {known}")
        stages = tuple(self._stage(stage) for stage in view.stages)
        return Plan(stages=stages, why="static: the configured replicas")

    def _stage(self, stage: StageView) -> StagePlan:
        own = self.stages.get(stage.name, StaticStage())
        return targets.equal_replicas(
            stage,
            targets.variant_of(stage, own.variant or self.variant),
            count=self.replicas if own.replicas is None else own.replicas,
            cores=self.cores if own.cores is None else own.cores,
            batch_max=own.batch_max or self.batch_max,
        )


def _check(replicas: int, cores: float, batch_max: int) -> None:
    at_least("replicas", replicas, 0)
    above("cores", cores, 0)
    at_least("batch_max", batch_max, 0)
