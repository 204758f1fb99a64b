"""RIM: the same replicas always, and the most accurate variants with which they keep up."""

from dataclasses import replace
from typing import Final

from sloop.policies.scale.ipa import Ipa
from sloop.systems.ipa import IPA
from sloop.systems.system import System

RIM: Final = System(
    name="rim",
    kind="baseline",
    source="RIM with batching, as compared with in Razavi, dissertation, TU Darmstadt 2024, chapter P3",
    policies=replace(IPA.policies, scale=Ipa(replicas=4)),
)
