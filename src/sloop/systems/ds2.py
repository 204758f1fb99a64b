"""DS2: replicas by rate alone, no batches; the baseline of FA2 that spends most."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.ds2 import Ds2
from sloop.systems.system import System
from sloop.units import s

DS2: Final = System(
    name="ds2",
    kind="baseline",
    source="Kalavri et al., DS2, OSDI 2018, as compared with in Razavi et al., FA2, RTAS 2022",
    policies=Policies(
        order=Fifo(),
        batch=WorkConserving(),
        route=RoundRobin(),
        drop=Age(limit=3.0),
        admit=Open(),
        place=BestFit(),
        # What arrived, not what was finished: under overload no more is finished than the replicas can do.
        forecast=Last(window_ns=s(10)),
        scale=Ds2(),
    ),
)
