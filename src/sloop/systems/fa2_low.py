"""FA2-low: IPA's program with the lightest variant of every stage, the cheap end of its comparison."""

from dataclasses import replace
from typing import Final

from sloop.policies.scale.ipa import Ipa
from sloop.systems.ipa import IPA
from sloop.systems.system import System

FA2_LOW: Final = System(
    name="fa2-low",
    kind="baseline",
    source="FA2 (RTAS 2022) as compared with in Razavi, dissertation, chapter P3: the lightest variants",
    policies=replace(IPA.policies, scale=Ipa(only="lightest")),
)
