"""Vertical only: one replica for each stage, resized in place; Sponge extended to pipelines, Biscale's baseline."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.full import Full
from sloop.policies.drop.predictive import Predictive
from sloop.policies.forecast.last import Last
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.spread import Spread
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.vertical import Vertical
from sloop.systems.system import System
from sloop.units import s

VERTICAL_ONLY: Final = System(
    name="vertical-only",
    kind="baseline",
    source="the vertical baseline of Biscale: Razavi, dissertation, TU Darmstadt 2024, chapter P4",
    policies=Policies(
        order=Fifo(),
        batch=Full(patience=1.0),
        route=RoundRobin(),
        drop=Predictive(batch="full"),
        admit=Open(),
        place=Spread(),
        forecast=Last(window_ns=s(2)),
        scale=Vertical(),
    ),
)
