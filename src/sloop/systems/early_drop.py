"""Early drop: a fixed number of replicas that take only what they can answer in time, so overload costs no goodput.

Fails where the profile is wrong about the machine: believed too slow, it refuses what could have been served.
"""

from typing import Final

from sloop.core.protocols import Policies
from sloop.policies.admit.predictive import Predictive as Admit
from sloop.policies.batch.deadline import Deadline
from sloop.policies.drop.predictive import Predictive as Drop
from sloop.policies.forecast.last import Last
from sloop.policies.order.edf import Edf
from sloop.policies.place.best_fit import BestFit
from sloop.policies.route.first_idle import FirstIdle
from sloop.policies.scale.static import Static
from sloop.systems.system import System

TRUST: Final = 0.7
"""Costs are believed at their P99, and a queue takes the sum of its batches' means: of models we measured, 0.7 to 0.85
of it. What is let in and then late after all is dropped before it costs anything."""

EARLY_DROP: Final = System(
    name="early-drop",
    kind="system",
    source="after the early drop of Nexus (Shen et al., SOSP 2019), with admission by the believed drain time",
    policies=Policies(
        order=Edf(),
        batch=Deadline(),
        route=FirstIdle(),
        drop=Drop(),
        admit=Admit(trust=TRUST),
        place=BestFit(),
        forecast=Last(),
        scale=Static(),
    ),
)
