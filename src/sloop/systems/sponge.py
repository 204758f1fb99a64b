"""Sponge: in-place vertical scaling of one replica, earliest deadline first, work-conserving batches."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.edf import Edf
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.first_idle import FirstIdle
from sloop.policies.scale.sponge import Sponge
from sloop.systems.system import System

SPONGE: Final = System(
    name="sponge",
    kind="system",
    source="Razavi et al., Sponge: Inference Serving with Dynamic SLOs Using In-Place Vertical Scaling, EuroMLSys 2024",
    policies=Policies(
        order=Edf(),
        batch=WorkConserving(),
        route=FirstIdle(),
        drop=Age(limit=1.0),
        admit=Open(),
        place=BestFit(),
        forecast=Last(),
        scale=Sponge(margin=0.9),
    ),
)
