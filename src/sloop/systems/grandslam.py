"""GrandSLAm: fixed shares of the deadline and the batches that fit them, on FA2's replicas; tightest request first."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.full import Full
from sloop.policies.drop.age import Age
from sloop.policies.forecast.last import Last
from sloop.policies.order.edf import Edf
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.grandslam import Grandslam
from sloop.systems.system import System
from sloop.units import s

GRANDSLAM: Final = System(
    name="grandslam",
    kind="baseline",
    source="Kannan et al., GrandSLAm, EuroSys 2019, as compared with in Razavi et al., FA2, RTAS 2022",
    policies=Policies(
        order=Edf(),
        batch=Full(),
        route=RoundRobin(),
        drop=Age(limit=3.0),
        admit=Open(),
        place=BestFit(),
        # What arrived, not what was finished: under overload no more is finished than the replicas can do.
        forecast=Last(window_ns=s(10)),
        scale=Grandslam(),
    ),
)
