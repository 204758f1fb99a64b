"""KPA: replicas by concurrency, down to none, as Knative does it."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.spread import Spread
from sloop.policies.route.least_loaded import LeastLoaded
from sloop.policies.scale.kpa import Kpa
from sloop.systems.system import System

KPA: Final = System(
    name="kpa",
    kind="baseline",
    source="Knative Serving's autoscaler with its default configuration; a cold start's backlog counted once",
    policies=Policies(
        order=Fifo(),
        batch=WorkConserving(),
        route=LeastLoaded(),
        drop=Age(),
        admit=Open(),
        place=Spread(),
        forecast=Last(),
        scale=Kpa(),
    ),
)
