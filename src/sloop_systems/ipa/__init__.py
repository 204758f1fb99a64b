"""IPA (Razavi, dissertation, TU Darmstadt 2024, chapter P3): the most accurate variants that are worth their cores."""

from dataclasses import replace
from typing import Final

from sloop.api.policies import Age, Fifo, Full, MaxMin, Open, Policies, RoundRobin, SpreadPlacement
from sloop.api.systems import ONE_KIND, System
from sloop_systems.ipa.lstm import Lstm
from sloop_systems.ipa.policy import Ipa

CHAPTER: Final = "Razavi, dissertation, TU Darmstadt 2024, chapter P3"

_POLICIES: Final = Policies(
    Fifo(), Full(patience=1.0), RoundRobin(), Age(limit=2.0), Open(), SpreadPlacement(), Lstm("ipa"), Ipa(), MaxMin()
)

IPA: Final = System("ipa", "system", f"{CHAPTER}; Ghafouri et al., IPA: arXiv 2308.12871", _POLICIES, ONE_KIND)
"""The most accurate variants that are worth their cores, with batches and replicas, every ten seconds."""
FA2_LOW: Final = System(
    "fa2-low",
    "baseline",
    "FA2 (RTAS 2022) as compared with in Razavi, dissertation, chapter P3: the lightest variants",
    replace(_POLICIES, scale=Ipa(only="lightest")),
    ONE_KIND,
)
FA2_HIGH: Final = System(
    "fa2-high",
    "baseline",
    "FA2 (RTAS 2022) as compared with in Razavi, dissertation, chapter P3: heavy variants",
    replace(_POLICIES, scale=Ipa(only="heaviest")),
    ONE_KIND,
)
"""The publication uses heavy variants, not always the heaviest, because its cluster is small: set them in `stages`."""
RIM: Final = System(
    "rim",
    "baseline",
    f"RIM with batching, as compared with in {CHAPTER}",
    replace(_POLICIES, scale=Ipa(replicas=4)),
    ONE_KIND,
)
"""A fixed number of replicas, and the most accurate variants with which they keep up."""
