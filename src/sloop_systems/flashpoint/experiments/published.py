"""What Flashpoint's thesis prints of its evaluation, and its rule for averages.

Source: San Juan, Flashpoint (thesis, Waterloo 2023), chapter 8; Flashpoint specification, sections 5.2 and 5.9.
"""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Final

SAVED_PERCENT: Final[Mapping[str, tuple[float, float, float, float]]] = {
    "CodeBERT": (4.44, 7.24, 17.25, 16.52),
    "ALBERT-xxlarge": (6.33, 8.17, 20.79, 27.02),
    "BART-large": (14.52, 18.59, 37.44, 37.66),
    "DialoGPT-large": (23.72, 26.18, 49.11, 60.05),
    "GPT-2-XL": (15.99, 19.44, 66.57, 74.12),
    "T5-3B": (19.08, 36.23, 78.64, 92.79),
}
"""Table 8.1: mean latency that Flashpoint saves in %, mean over four autoscalers: in the order of `COLUMNS`."""
COLUMNS: Final = (("gpu-faas", "azure"), ("gpu-faas", "twitter"), ("baseline", "azure"), ("baseline", "twitter"))
"""The other system and the trace."""
LATENCY_SAVED: Final = {
    ("baseline", "twitter"): 75.42,
    ("baseline", "azure"): 56.23,
    ("gpu-faas", "twitter"): 20.63,
    ("gpu-faas", "azure"): 14.54,
}
P99_SAVED: Final = {
    ("baseline", "twitter"): 66.90,
    ("baseline", "azure"): 56.67,
    ("gpu-faas", "twitter"): 19.69,
    ("gpu-faas", "azure"): 11.20,
}
COLD_SAVED: Final = {
    ("baseline", "twitter"): 93.51,
    ("baseline", "azure"): 87.39,
    ("gpu-faas", "twitter"): 78.46,
    ("gpu-faas", "azure"): 68.50,
}
"""Headline, sections 1 and 8.4: mean latency, P99 and cold start that Flashpoint saves in %."""
LATENCY_FACTORS: Final = {
    "twitter": {"mp": 1.23, "mc": 2.17, "lc": 4.07},
    "azure": {"mp": 1.22, "mc": 1.30, "lc": 2.28},
}
COLD_FACTORS: Final = {
    "twitter": {"mp": 2.12, "mc": 3.09, "lc": 15.41},
    "azure": {"mp": 1.95, "mc": 1.73, "lc": 7.93},
}
"""Fig. 8.9: how many times shorter with a single technique, means over models and autoscalers."""
MORE_FOR_T5: Final = {"gpu-faas": 18.67, "baseline": 53.28}
"""Section 8.4.5: more replicas in % that others need for Flashpoint's mean latency of T5, within 10 %, Twitter."""
PIECES_SAVED: Final = {"T5-3B": 38.04, "DialoGPT-large": 1.95}
"""Fig. 8.10: mean latency in % that pieces alone save over the baseline, Atoll's policy, Twitter."""
PIECES_AT_2000: Final = 1.59
"""Fig. 8.3: how many times shorter the mean latency of T5 is with pieces if the store sends 2,000 Mbit/s."""
COLD_BEYOND: Final = {"twitter": 75.21, "azure": 34.86}
LATENCY_BEYOND: Final = {"twitter": 8.22, "azure": 10.13}
"""Section 8.4.2: what the techniques together save in % beyond locality alone."""
TESTBED_SAVED: Final = 41.7
"""Fig. 8.2: the same in the thesis's simulation of its testbed; 46.74 % as measured there."""
T5_LATENCY: Final = {"atoll-rate": 147.48, "torchserve": 50.22, "openwhisk": 51.80, "sagemaker": 69.91}
"""Fig. 3.4: mean latency of T5 under the baseline, in inferences (printed as seconds by mistake)."""


def saved_percent(ratio: float) -> float:
    """What a mean ratio other/Flashpoint saves: 1 - 1/ratio, in %."""
    return 100.0 * (1.0 - 1.0 / ratio)


def mean_saved(ratios_by_model: Mapping[str, Iterable[float]]) -> float:
    """The thesis's average: the mean over models of the mean over autoscalers of other/Flashpoint, as what is saved in
    %. Large ratios dominate it; `mean_of_percents` gives every model the same weight."""
    return saved_percent(fmean(fmean(ratios) for ratios in ratios_by_model.values()))


def mean_of_percents(ratios_by_model: Mapping[str, Iterable[float]]) -> float:
    """The plain mean over models of what is saved in %."""
    return fmean(saved_percent(fmean(ratios)) for ratios in ratios_by_model.values())
