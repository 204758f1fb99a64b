"""PALDIA (Bhasi et al., IPDPS 2024): the cheapest hardware on which all expected requests end in time."""

from dataclasses import replace
from typing import Final

from sloop.api import s
from sloop.api.policies import (
    BestFit,
    Ewma,
    Fifo,
    FirstIdle,
    MaxMin,
    Never,
    Open,
    OracleForecast,
    Policies,
    WorkConserving,
)
from sloop.api.systems import SIMULATED, System
from sloop_systems.paldia.policy import Hybrid, Paldia

PUBLICATION: Final = "Bhasi et al., PALDIA, IPDPS 2024"
ONE_KIND_AT_A_TIME: Final = "keeps to one kind of hardware at a time, and switches between kinds as the load moves"

# The publication runs all schemes without admission and without dropping requests.
_QUEUE: Final = Policies(
    Fifo(), WorkConserving(), FirstIdle(), Never(), Open(), BestFit(), Ewma(half_life_ns=s(1), at_least_last=True),
    Paldia(choice="isolated", sharing="queue"), MaxMin(),
)  # fmt: skip
_SPLIT: Final = replace(_QUEUE, scale=Paldia(), batch=Hybrid())


def _system(name: str, section: str, policies: Policies) -> System:
    return System(name, "system", f"{PUBLICATION}, section {section}", policies, ONE_KIND_AT_A_TIME)


def _baseline(name: str, source: str, policies: Policies) -> System:
    return System(name, "baseline", source, policies, ONE_KIND_AT_A_TIME)


PALDIA: Final = _system("paldia", "III", _SPLIT)
"""The cheapest hardware on which all expected requests end in time, some together and the others queued."""
PALDIA_BAND: Final = _system("paldia-band", "IV", replace(_SPLIT, scale=Paldia(choice="tolerance")))
"""The other of the two rules that the publication gives for the choice of hardware."""

_MOLECULE: Final = f"Du et al., Molecule, ASPLOS 2022, as compared with in {PUBLICATION}"
MOLECULE_COST: Final = _baseline("molecule-cost", f"{_MOLECULE}: minding the cost", _QUEUE)
"""The cheapest hardware on which a batch alone is in time, one batch after the other."""
MOLECULE_PERFORMANCE: Final = _baseline(
    "molecule-performance",
    f"{_MOLECULE}: minding performance",
    replace(_QUEUE, scale=Paldia(choice="fastest", sharing="queue")),
)
"""The same on the most performant hardware, whatever it costs."""

_INFLESS: Final = f"INFless (ASPLOS 2022) and Llama (SoCC 2021), as compared with in {PUBLICATION}"
INFLESS_LLAMA_COST: Final = _baseline(
    "infless-llama-cost",
    f"{_INFLESS}: minding the cost",
    replace(_QUEUE, scale=Paldia(choice="isolated", sharing="together")),
)
"""As Molecule, but all batches together on the GPU."""
INFLESS_LLAMA_PERFORMANCE: Final = _baseline(
    "infless-llama-performance",
    f"{_INFLESS}: minding performance",
    replace(_QUEUE, scale=Paldia(choice="fastest", sharing="together")),
)

ORACLE: Final = System(
    "oracle",
    "baseline",
    f"{PUBLICATION}, section V: Oracle",
    replace(_SPLIT, forecast=OracleForecast(horizon_ns=s(2)), scale=Paldia(wait_limit=0)),
    ONE_KIND_AT_A_TIME,
    SIMULATED,
)
"""PALDIA if it knew the next second, for what its lag costs. In a world where nodes come at once it has none."""

# The schemes of figure 1, each on the one kind of hardware that `hardware` names.
_FIGURE_1: Final = f"{PUBLICATION}, figure 1"
OFFLINE_HYBRID: Final = _baseline("offline-hybrid", _FIGURE_1, replace(_SPLIT, scale=Paldia(choice="fastest")))
MPS_ONLY: Final = _baseline("mps-only", _FIGURE_1, INFLESS_LLAMA_PERFORMANCE.policies)
TIME_SHARED: Final = _baseline("time-shared", _FIGURE_1, MOLECULE_PERFORMANCE.policies)
