"""FA2's rule for a single model: horizontal scaling of one-core replicas, the baseline of Sponge."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.fa2_single import Fa2Single
from sloop.systems.system import System

FA2_SINGLE: Final = System(
    name="fa2-single",
    kind="baseline",
    source="FA2 (RTAS 2022) as compared with in Razavi et al., Sponge, EuroMLSys 2024, for one model",
    policies=Policies(
        order=Fifo(),
        batch=WorkConserving(),
        route=RoundRobin(),
        drop=Age(limit=1.0),
        admit=Open(),
        place=BestFit(),
        forecast=Last(),
        scale=Fa2Single(margin=0.9),
    ),
)
