"""InferLine: from batches of one, each stage in turn takes of the time left as much as its batches can use.

Crankshaw et al., InferLine (SoCC 2020), with one kind of hardware, in the form FA2 is compared with (RTAS 2022,
evaluation); `full` is a planner nearer to its own paper, which doubles the batch that saves most. Fails where the early
stages take the time that later, dearer ones would have saved more with.
"""

from dataclasses import dataclass

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers.fa2_baselines import inferline, inferline_full
from sloop.solvers.horizontal import Limits, problem_of
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(frozen=True, slots=True)
class Inferline:
    """Replicas of `cores` each; `initial_rps` is what to expect at the ingress before anything was seen."""

    cores: float = 1.0
    batch_max: int = 16
    full: bool = False
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
        """Greedy batches, and as many replicas as they need. `InputError` for a variant some stage does not have."""
        own = Limits(self.cores, self.batch_max, self.margin, self.headroom, self.initial_rps, self.variant)
        problem = problem_of(view, own)
        choose = inferline_full if self.full else inferline
        return problem.chosen(choose(problem.stages, problem.ways))
