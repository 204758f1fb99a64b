"""Static: a fixed number of replicas with fixed cores, work-conserving batches, deadlines first."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.edf import Edf
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.first_idle import FirstIdle
from sloop.policies.scale.static import Static
from sloop.systems.system import System

STATIC: Final = System(
    name="static",
    kind="baseline",
    source="the fixed allocations that Sponge (EuroMLSys 2024), FA2 and Biscale are compared with",
    policies=Policies(
        order=Edf(),
        batch=WorkConserving(),
        route=FirstIdle(),
        drop=Age(),
        admit=Open(),
        place=BestFit(),
        forecast=Last(),
        scale=Static(),
    ),
)
