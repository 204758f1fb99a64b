"""Expect what will come: **not causal**. It is given the trace beforehand and is of use to simulations only.

What IPA and Biscale set their forecasters beside (IPA specification, section 2.8; Biscale specification, section 2.8):
the busiest second of the near future, as a share of violations and cost that no forecaster can win. A live server has
no such list; beyond the list it expects what came last.
"""

from dataclasses import dataclass

from sloop.core.views import Traffic
from sloop.policies.bounds import RATE_MAX_RPS, above, between
from sloop.units import NS_PER_S, s


@dataclass(frozen=True, slots=True)
class Oracle:
    """The largest of `counts`, requests in each second since the start of the run, within the next `horizon_ns`."""

    counts: tuple[float, ...] = ()
    horizon_ns: int = s(20)

    def __post_init__(self) -> None:
        for count in self.counts:
            between("counts", count, 0, RATE_MAX_RPS)
        above("horizon_ns", self.horizon_ns, 0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        ahead = self.counts[now_ns // NS_PER_S : -(-(now_ns + self.horizon_ns) // NS_PER_S)]
        return float(max(ahead)) if ahead else ingress.rate_rps()
