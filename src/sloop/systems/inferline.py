"""InferLine: batches grown stage by stage; FA2's closest baseline."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.full import Full
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.inferline import Inferline
from sloop.systems.system import System
from sloop.units import s

INFERLINE: Final = System(
    name="inferline",
    kind="baseline",
    source="Crankshaw et al., InferLine, SoCC 2020, as compared with in Razavi et al., FA2, RTAS 2022",
    policies=Policies(
        order=Fifo(),
        batch=Full(),
        route=RoundRobin(),
        drop=Age(limit=3.0),
        admit=Open(),
        place=BestFit(),
        # What arrived, not what was finished: under overload no more is finished than the replicas can do.
        forecast=Last(window_ns=s(10)),
        scale=Inferline(),
    ),
)
