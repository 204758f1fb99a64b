"""GrandSLAm: every stage has a fixed share of the deadline, and the largest batch that fits into it.

Kannan et al., GrandSLAm (EuroSys 2019), in the form FA2 is compared with (RTAS 2022, evaluation): it sizes no pools, so
it gets FA2's numbers of replicas. Fails at low rates, where the batches that fit its shares take long to fill; and a
share that one stage does not need is lost to the others.
"""

from dataclasses import dataclass

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers.fa2_baselines import grandslam
from sloop.solvers.horizontal import Limits, fewest, problem_of
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(frozen=True, slots=True)
class Grandslam:
    """Replicas of `cores` each; `initial_rps` is what to expect at the ingress before anything was seen."""

    cores: float = 1.0
    batch_max: int = 16
    margin: float = 1.0
    headroom: float = 0.0
    initial_rps: float = 0.0
    variant: str = ""
    period_ns: int = s(10)

    def __post_init__(self) -> None:
        above("cores", self.cores, 0)
        at_least("batch_max", self.batch_max, 1)
        within("margin", self.margin, 0, 1)
        at_least("headroom", self.headroom, 0)
        at_least("initial_rps", self.initial_rps, 0)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """FA2's replicas, its own batches. `InputError` for a variant some stage does not have."""
        own = Limits(self.cores, self.batch_max, self.margin, self.headroom, self.initial_rps, self.variant)
        problem = problem_of(view, own)
        pools = fewest(problem)
        counts = {target.stage: sum(group.count for group in target.groups) for target in pools.stages}
        return problem.chosen(grandslam(problem.stages, problem.ways, [counts[one.name] for one in problem.stages]))
