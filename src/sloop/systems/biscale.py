"""Biscale: in place through a surge, then horizontally; first come first served, full batches, early dropping."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.full import Full
from sloop.policies.drop.predictive import Predictive
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.spread import Spread
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.biscale import Biscale
from sloop.systems.system import System
from sloop.units import s

BISCALE: Final = System(
    name="biscale",
    kind="system",
    source="Razavi, dissertation, TU Darmstadt 2024, chapter P4; as Themis: arXiv 2407.14843",
    policies=Policies(
        order=Fifo(),
        batch=Full(patience=1.0),
        route=RoundRobin(),
        drop=Predictive(batch="full"),
        admit=Open(),
        # The most free cores: where a replica is, it must have room to grow.
        place=Spread(),
        # The published network is `forecast: {name: lstm, weights: biscale}`, no better and a little dearer.
        forecast=MovingMax(horizon_ns=s(10), window_ns=s(1)),
        scale=Biscale(),
    ),
)
