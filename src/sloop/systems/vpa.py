"""VPA: replica size by utilisation, changed by restart; Sponge's vertical counterpart without in-place resizing."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.first_idle import FirstIdle
from sloop.policies.scale.vpa import Vpa
from sloop.systems.system import System

VPA: Final = System(
    name="vpa",
    kind="baseline",
    source="a threshold scaler after Kubernetes' Vertical Pod Autoscaler: target 0.7, a restart at most every 60 s",
    policies=Policies(
        order=Fifo(),
        batch=WorkConserving(),
        route=FirstIdle(),
        drop=Age(),
        admit=Open(),
        place=BestFit(),
        forecast=Last(),
        scale=Vpa(),
    ),
)
