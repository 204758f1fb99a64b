"""FA2-high: IPA's program with the heaviest variant of every stage, the accurate end of its comparison.

The publication takes variants that are heavy but not always the heaviest, because its cluster is small: name them under
`stages`.
"""

from dataclasses import replace
from typing import Final

from sloop.policies.scale.ipa import Ipa
from sloop.systems.ipa import IPA
from sloop.systems.system import System

FA2_HIGH: Final = System(
    name="fa2-high",
    kind="baseline",
    source="FA2 (RTAS 2022) as compared with in Razavi, dissertation, chapter P3: heavy variants",
    policies=replace(IPA.policies, scale=Ipa(only="heaviest")),
)
