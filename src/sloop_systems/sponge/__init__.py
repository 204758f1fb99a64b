"""Sponge (Razavi et al., EuroMLSys 2024): one replica, resized in place to the time that requests have left."""

from typing import Final

from sloop.api.policies import Age, BestFit, Edf, FirstIdle, Last, MaxMin, Open, Policies, WorkConserving
from sloop.api.systems import ONE_KIND, System
from sloop_systems.sponge.policy import Sponge

SPONGE: Final = System(
    "sponge",
    "system",
    "Razavi et al., Sponge: Inference Serving with Dynamic SLOs Using In-Place Vertical Scaling, EuroMLSys 2024",
    Policies(
        Edf(), WorkConserving(), FirstIdle(), Age(limit=1.0), Open(), BestFit(), Last(), Sponge(margin=0.9), MaxMin()
    ),
    ONE_KIND,
)
