"""FA2: how many replicas of every stage, and which batches, decided together so that every path keeps its deadline.

Razavi et al., FA2 (RTAS 2022; dissertation, TU Darmstadt 2024, chapter P1): equal replicas of the smallest size, the
fewest in sum; a plan every ten seconds from the rate of the last ten. Readings as in the specification's §2 and §6.
Where the nodes do not hold what is needed, the largest share of the rate that fits; where a path is too slow even for
one request at a time, no batches.

Fails where the rate moves within the time a replica takes to start, and where slow stages run on one or two replicas:
the model knows evenly spaced arrivals only, and its safety is the P99 in the profile. `headroom` buys some.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers.choice import NODES_MAX
from sloop.solvers.fa2 import Mode
from sloop.solvers.graph import Ties
from sloop.solvers.horizontal import Limits, fewest, problem_of
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(frozen=True, slots=True)
class Fa2:
    """Replicas of `cores` each. Of several variants of a stage the one in `variants`, else `variant`, else the first.

    `margin`: part of the deadlines to plan with; `headroom`: how far above the demand; `initial_rps`: what to
    expect at the ingress before anything was seen.
    """

    cores: float = 1.0
    batch_max: int = 16
    mode: Mode = "tree"
    ties: Ties = "best"
    polish: bool = True
    margin: float = 1.0
    headroom: float = 0.0
    initial_rps: float = 0.0
    nodes_max: int = NODES_MAX
    variant: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)
    period_ns: int = s(10)

    def __post_init__(self) -> None:
        above("cores", self.cores, 0)
        at_least("batch_max", self.batch_max, 1)
        within("margin", self.margin, 0, 1)
        at_least("headroom", self.headroom, 0)
        at_least("initial_rps", self.initial_rps, 0)
        at_least("nodes_max", self.nodes_max, 1)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The fewest replicas that hold, and the binding path. `InputError` for an unknown stage or variant."""
        own = Limits(
            self.cores, self.batch_max, self.margin, self.headroom, self.initial_rps, self.variant, self.variants
        )
        problem = problem_of(view, own)
        return fewest(problem, mode=self.mode, ties=self.ties, polish=self.polish, nodes_max=self.nodes_max)
