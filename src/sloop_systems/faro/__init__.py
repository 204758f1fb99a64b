"""Faro (Jeon et al., EuroSys 2025): a cluster too small for all, divided by the utilities of all; and its baselines."""

from dataclasses import replace
from typing import Final

from sloop.api import s
from sloop.api.policies import BestFit, Bounded, Fifo, Last, Never, Policies, RoundRobin, WorkConserving
from sloop.api.systems import ONE_KIND, System
from sloop_systems.faro.policy import Aiad, Faro, FirstCome, JointUtility, MarkWorkers, Oneshot
from sloop_systems.faro.published import PUBLICATION, QUEUE_MAX

# One queue for each application, whose router refuses requests behind too many; nothing is dropped later.
_POLICIES: Final = Policies(
    Fifo(), WorkConserving(), RoundRobin(), Never(), Bounded(queue_max=QUEUE_MAX), BestFit(), Last(window_ns=s(60)),
    Faro(), JointUtility(),
)  # fmt: skip


def _faro(name: str, divide: JointUtility) -> System:
    return System(name, "system", PUBLICATION, replace(_POLICIES, divide=divide), ONE_KIND)


def _baseline(name: str, source: str, scale: Aiad | MarkWorkers) -> System:
    policies = replace(_POLICIES, scale=scale, divide=FirstCome())
    return System(name, "baseline", f"{source}, as compared with in {PUBLICATION}", policies, ONE_KIND)


FARO: Final = _faro("faro", JointUtility())
"""The largest sum of the utilities, and the smallest difference between them."""
FARO_SUM: Final = _faro("faro-sum", JointUtility("sum"))
FARO_FAIR: Final = _faro("faro-fair", JointUtility("fair"))
FARO_PENALTY_SUM: Final = _faro("faro-penalty-sum", JointUtility("sum", penalised=True))
"""Requests may be refused, for a penalty."""
FARO_PENALTY: Final = _faro("faro-penalty", JointUtility(penalised=True))
AIAD: Final = _baseline("aiad", "additive increase and decrease", Aiad())
ONESHOT: Final = _baseline("oneshot", "as many times the replicas as the latency is of its target", Oneshot())
MARK: Final = _baseline("mark", "Zhang et al., MArk, ATC 2019", MarkWorkers())
