"""FA2: the fewest replicas over a whole graph, every ten seconds; first come first served, full batches in turn."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.full import Full
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.fa2 import Fa2
from sloop.systems.system import System
from sloop.units import s

FA2: Final = System(
    name="fa2",
    kind="system",
    source="Razavi et al., FA2, RTAS 2022; dissertation, TU Darmstadt 2024, chapter P1",
    policies=Policies(
        order=Fifo(),
        batch=Full(),
        route=RoundRobin(),
        drop=Age(limit=3.0),
        admit=Open(),
        place=BestFit(),
        # What arrived, not what was finished: under overload no more is finished than the replicas can do.
        forecast=Last(window_ns=s(10)),
        scale=Fa2(),
    ),
)
