"""DS2: as many replicas of every stage as its rate needs, without batches and without a look at deadlines.

Kalavri et al., Three steps is all you need (OSDI 2018), in the form FA2 is compared with (RTAS 2022, evaluation): the
true processing rate of a replica is 1/d(1), all stages are set at once. Fails in cost: what batches would save is paid
for in replicas, and each of them has to start first.
"""

from dataclasses import dataclass

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least
from sloop.solvers.fa2_baselines import ds2
from sloop.solvers.horizontal import Limits, problem_of
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(frozen=True, slots=True)
class Ds2:
    """Replicas of `cores` each; `initial_rps` is what to expect at the ingress before anything was seen."""

    cores: float = 1.0
    headroom: float = 0.0
    initial_rps: float = 0.0
    variant: str = ""
    period_ns: int = s(10)

    def __post_init__(self) -> None:
        above("cores", self.cores, 0)
        at_least("headroom", self.headroom, 0)
        at_least("initial_rps", self.initial_rps, 0)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """n = ⌈λ d(1)⌉ everywhere. `InputError` for a variant some stage does not have."""
        own = Limits(self.cores, 1, headroom=self.headroom, initial_rps=self.initial_rps, variant=self.variant)
        problem = problem_of(view, own)
        return problem.chosen(ds2(problem.stages))
