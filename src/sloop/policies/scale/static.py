"""The scaling policy `Static`: a fixed number of replicas with fixed cores for each stage.

The baseline of every publication here (Sponge: Static-8, Static-16), and the usual deployment. Fails when demand
changes: too little at the peak, too much at night.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from sloop.core.views import ClusterView, StageView
from sloop.errors import InputError
from sloop.options import check_range
from sloop.policies import targets
from sloop.units import s
from sloop.vocabulary import Plan, StagePlan


class StaticStage(Struct, frozen=True, forbid_unknown_fields=True):
    """Values for one stage; None means the policy's value for all stages."""

    replicas: int | None = None
    cores: float | None = None
    batch_max: int | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        _check_ranges(self.replicas, self.cores, self.batch_max)


@dataclass(frozen=True, slots=True)
class Static:
    """`replicas` with `cores` each for every stage; `stages` overrides the values of single stages."""

    replicas: int = 1
    cores: float = 1.0
    batch_max: int = 0
    """0: the largest batch within half the SLO."""
    variant: str = ""
    """Empty: the first variant of each stage."""
    stages: Mapping[str, StaticStage] = field(default_factory=dict)
    period_ns: int = s(1)

    def __post_init__(self) -> None:
        check_range("period_ns", self.period_ns, above=0)
        _check_ranges(self.replicas, self.cores, self.batch_max)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The configured plan. InputError for a stage or variant that the application does not have."""
        unknown = self.stages.keys() - {stage.name for stage in view.stages}
        if unknown:
            known = ", ".join(stage.name for stage in view.stages)
            raise InputError(f"system static: no stage {min(unknown)!r}", help=f"the application's stages are {known}")
        return Plan(tuple(self._stage(stage) for stage in view.stages), "static: the configured replicas")

    def _stage(self, stage: StageView) -> StagePlan:
        own = self.stages.get(stage.name, StaticStage())
        return targets.equal_replicas(
            stage,
            targets.variant_of(stage, own.variant or self.variant),
            count=self.replicas if own.replicas is None else own.replicas,
            cores=self.cores if own.cores is None else own.cores,
            batch_max=own.batch_max or self.batch_max,
        )


def _check_ranges(replicas: int | None, cores: float | None, batch_max: int | None) -> None:
    for key, value in (("replicas", replicas), ("batch_max", batch_max)):
        if value is not None:
            check_range(key, value, least=0, most=100_000)
    if cores is not None:
        check_range("cores", cores, above=0, most=1e6)
