"""Models that share GPUs: Elvinger's thesis (ETH Zurich 2024), with iGniter (TPDS 2023) and Usher (OSDI 2024)."""

from dataclasses import replace
from typing import Final

from sloop.api import s
from sloop.api.policies import Age, BestFit, Fifo, Full, Last, MaxMin, Open, Policies, RoundRobin, SmoothWeighted
from sloop.api.systems import ONE_KIND, System
from sloop_systems.colocation.policy import Colocate, Igniter, Usher

THESIS: Final = "Elvinger, thesis, ETH Zurich 2024"

_POLICIES: Final = Policies(
    Fifo(),
    Full(patience=1.0),
    RoundRobin(),
    Age(limit=3.0),
    Open(),
    BestFit(),
    Last(window_ns=s(10)),
    Usher(),
    MaxMin(),
)

IGNITER: Final = System(
    "igniter",
    "system",
    "Xu et al., iGniter, TPDS 2023, as its public code has it",
    replace(_POLICIES, route=SmoothWeighted(), scale=Igniter()),
    ONE_KIND,
)
"""Models that share GPUs, by iGniter's model of interference."""
USHER: Final = System(
    "usher",
    "system",
    f"Shubha et al., Usher, OSDI 2024, as compared with in {THESIS}",
    _POLICIES,
    ONE_KIND,
)
"""Groups of models that complement each other; shares by the most occupancy."""
USHER_WAO: Final = System(
    "usher-wao",
    "baseline",
    f"Usher (OSDI 2024) with occupancy weighted with time: {THESIS}",
    replace(_POLICIES, scale=Usher(metric="occupancy")),
    ONE_KIND,
)
AO_MILP: Final = System(
    "ao-milp",
    "baseline",
    f"integer program by the most occupancy: {THESIS}",
    replace(_POLICIES, scale=Colocate(metric="peak_occupancy")),
    ONE_KIND,
)
"""The most goodput by an integer program, without a view of waiting; no limits of shares."""
WSM_MILP: Final = System(
    "wsm-milp",
    "baseline",
    f"integer program by the SMs that kernels need, weighted with time: {THESIS}",
    replace(_POLICIES, scale=Colocate(metric="sm_use")),
    ONE_KIND,
)
