"""FA2 (Razavi et al., RTAS 2022): the fewest equal replicas over a whole graph, and those it is compared with."""

from dataclasses import replace
from typing import Final

from sloop.api import s
from sloop.api.policies import Age, BestFit, Edf, Fifo, Full, Last, MaxMin, Open, Policies, RoundRobin, WorkConserving
from sloop.api.systems import ONE_KIND, System
from sloop_systems.fa2.policy import Ds2, Fa2, Fa2Single, Grandslam, Inferline

AS_IN_FA2: Final = "as compared with in Razavi et al., FA2, RTAS 2022"

# It plans for the arrival rate, not the completion rate, which is lower under overload.
_POLICIES: Final = Policies(
    Fifo(), Full(), RoundRobin(), Age(limit=3.0), Open(), BestFit(), Last(window_ns=s(10)), Fa2(), MaxMin()
)

FA2: Final = System(
    "fa2",
    "system",
    "Razavi et al., FA2, RTAS 2022; dissertation, TU Darmstadt 2024, chapter P1",
    _POLICIES,
    ONE_KIND,
)
"""The fewest replicas over a whole graph, every ten seconds."""
DS2: Final = System(
    "ds2",
    "baseline",
    f"Kalavri et al., DS2, OSDI 2018, {AS_IN_FA2}",
    replace(_POLICIES, batch=WorkConserving(), scale=Ds2()),
    ONE_KIND,
)
"""Replicas by rate alone, no batches: the baseline that spends most."""
INFERLINE: Final = System(
    "inferline",
    "baseline",
    f"Crankshaw et al., InferLine, SoCC 2020, {AS_IN_FA2}",
    replace(_POLICIES, scale=Inferline()),
    ONE_KIND,
)
"""Batches grown stage by stage: the closest baseline."""
GRANDSLAM: Final = System(
    "grandslam",
    "baseline",
    f"Kannan et al., GrandSLAm, EuroSys 2019, {AS_IN_FA2}",
    replace(_POLICIES, order=Edf(), scale=Grandslam()),
    ONE_KIND,
)
"""Fixed shares of the deadline and the batches that fit them, on FA2's replicas."""
FA2_SINGLE: Final = System(
    "fa2-single",
    "baseline",
    "FA2 (RTAS 2022) as compared with in Razavi et al., Sponge, EuroMLSys 2024, for one model",
    Policies(Fifo(), WorkConserving(), RoundRobin(), Age(), Open(), BestFit(), Last(), Fa2Single(margin=0.9), MaxMin()),
    ONE_KIND,
)
"""FA2's rule for a single model: replicas of one core."""
