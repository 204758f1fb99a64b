"""The requests of Flashpoint's evaluation: windows of the Twitter trace, and a generated one in place of Azure's.

The thesis replays April 2018 of the Twitter stream. A file of another month is public, and some of its windows have
exactly the printed statistics. The thesis's Azure trace, which has counts per minute, was not found; a trace with the
printed median and peak is generated instead. If the Twitter file is missing, the same is done for it. Requests to a
language model of Azure, recorded in 2023, are used for the experiment with published scalers.

Source: Flashpoint specification, section 4.
"""

import math
from array import array
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

from sloop.api.experiments import read_trace, stream
from sloop_systems.comparison.harness import UNSEEN
from sloop_systems.comparison.twitter import Excerpt, tweets_of

HOUR_S: Final = 3600
LOOKED_AT: Final[Mapping[str, tuple[int, int]]] = {
    "470042": (470_042, 473_642),
    "1652593": (1_652_593, 1_656_193),
    "470470": (470_470, 474_070),
    "10800": (10_800, 14_400),
    "10h": (1_158_000, 1_194_000),
}
"""First and end second of the file. The first three hours and the ten hours have the printed statistics; 470042 begins
within its burst. 10800 has a median of 58 and a peak of 273."""
FILE_HOURS: Final = 527
"""The whole hours of the file."""


def _drawn_hours(count: int) -> list[int]:
    """The first seconds of whole hours at random, none of which overlaps a window that was looked at."""
    free = [
        first
        for first in range(0, FILE_HOURS * HOUR_S, HOUR_S)
        if all(end <= first or first + HOUR_S <= begin for begin, end in LOOKED_AT.values())
    ]
    return sorted(Random(f"hours {UNSEEN}").sample(free, count))


DRAWN: Final = tuple(map(str, _drawn_hours(10)))
"""Hours that nothing was chosen with, which judge our planner: its runs take two minutes on two cores."""
WINDOWS: Final = {**LOOKED_AT, **{name: (int(name), int(name) + HOUR_S) for name in DRAWN}}
HOURS: Final = ("470042", "1652593", "470470", "10800")
MAIN: Final = "470470"
AZURE: Final = "azure"
LLM: Final = "azure-llm"
LLM_FILE: Final = Path("Azure__AzurePublicDataset/data/AzureLLMInferenceTrace_code.csv")
"""Path in the folder of public data: 8,819 requests within an hour, in bursts."""
LLM_S: Final = (600, 900)
"""The seconds that are used. In the second of the five minutes almost nothing arrives."""
LLM_STATISTICS: Final = (3, 67 / 3)
"""The peak of its counts per second is 67. Their median is 0, for which nothing can be made up."""
STEP: Final = "step"
STEP_RPS, STEP_AT_S, STEP_END_S = (50, 100), 298, 600
"""A rate that doubles two seconds before the policies look: for the formulas of section 2.2."""
TWITTER_STATISTICS: Final = (57, 4.68)
LONG_STATISTICS: Final = (47, 6.19)
AZURE_STATISTICS: Final = (18, 2.54)
"""Printed median and peak/median of the counts per second: of an hour of Twitter, ten hours of it, an hour of Azure."""


def requests_of(name: str, data: Path | None, *, seed: int = 0) -> Excerpt:
    """The requests per second of a window, of `azure`, of `azure-llm`, or of `step`. Without the file, generated
    requests stand for those of a window."""
    if name == STEP:
        counts = array("q", (STEP_RPS[second >= STEP_AT_S] for second in range(STEP_END_S)))
        return Excerpt(name, counts, "assumed: a step, for the formulas")
    if name == AZURE:
        made = generated_counts(AZURE, HOUR_S, *AZURE_STATISTICS, seed=seed)
        return Excerpt(name, made, f"assumed: made up with the median and the peak of the Azure trace, seed {seed}")
    if name == LLM:
        return _of_language_model(data, seed)
    first, end = WINDOWS[name]
    found = tweets_of(data, first, end)
    if found is not None:
        return Excerpt(name, found, f"measured: Twitter stream 2021-08, seconds {first}–{end}")
    statistics = TWITTER_STATISTICS if end - first == HOUR_S else LONG_STATISTICS
    made = generated_counts(name, end - first, *statistics, seed=seed)
    return Excerpt(name, made, f"assumed: made up with the median and the peak of the Twitter trace, seed {seed}")


def _of_language_model(data: Path | None, seed: int) -> Excerpt:
    first, end = LLM_S
    if data is not None and (data / LLM_FILE).is_file():
        counts = read_trace(data / LLM_FILE).counts_per_s()
        return Excerpt(LLM, array("q", counts[first:end]), f"measured: Azure LLM 2023, code, seconds {first}–{end}")
    made = generated_counts(LLM, end - first, *LLM_STATISTICS, seed=seed)
    return Excerpt(LLM, made, f"assumed: made up with the peak of the Azure LLM trace, seed {seed}")


@cache
def generated_counts(name: str, seconds: int, middle: int, peak_to_median: float, *, seed: int = 0) -> "array[int]":
    """Requests per second with this median, and this peak up to rounding: an autoregressive base with an hourly wave,
    and a burst of one to three minutes about every quarter of an hour."""
    rng = stream(seed, f"flashpoint/{name}")
    raw = _wandering(seconds, rng)
    centre = median(raw)
    power = math.log(peak_to_median) / math.log(max(raw) / centre)
    return array("q", (round(middle * (value / centre) ** power) for value in raw))


def _wandering(seconds: int, rng: Random) -> list[float]:
    values: list[float] = []
    level, burst, end_s, next_s = 0.0, 1.0, 0.0, rng.expovariate(1 / 900)
    for second in range(seconds):
        if second >= next_s:
            burst, end_s = rng.uniform(1.5, 3.0), second + rng.uniform(60, 180)
            next_s = end_s + rng.expovariate(1 / 900)
        level = 0.9 * level + rng.gauss(0.0, 0.06)
        wave = 0.1 * math.sin(2 * math.pi * second / HOUR_S)
        values.append(math.exp(level + wave) * (burst if second < end_s else 1.0))
    return values
