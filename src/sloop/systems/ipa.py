"""IPA: the most accurate variants that their cores are worth, with batches and replicas, every ten seconds."""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.open import Open
from sloop.policies.batch.full import Full
from sloop.policies.drop.age import Age
from sloop.policies.forecast.lstm import Lstm
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.spread import Spread
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.scale.ipa import Ipa
from sloop.systems.system import System

IPA: Final = System(
    name="ipa",
    kind="system",
    source="Razavi, dissertation, TU Darmstadt 2024, chapter P3; Ghafouri et al., IPA: arXiv 2308.12871",
    policies=Policies(
        order=Fifo(),
        batch=Full(patience=1.0),
        route=RoundRobin(),
        drop=Age(limit=2.0),
        admit=Open(),
        place=Spread(),
        forecast=Lstm("ipa"),
        scale=Ipa(),
    ),
)
