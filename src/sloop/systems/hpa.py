"""HPA: replicas by utilisation, as Kubernetes does it, over the plainest data path."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.spread import Spread
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.hpa import Hpa
from sloop.systems.system import System

HPA: Final = System(
    name="hpa",
    kind="baseline",
    source="Kubernetes, Horizontal Pod Autoscaling, autoscaling/v2 with its default behaviour",
    policies=Policies(
        order=Fifo(),
        batch=WorkConserving(),
        route=RoundRobin(),
        drop=Age(),
        admit=Open(),
        place=Spread(),
        forecast=Last(),
        scale=Hpa(),
    ),
)
