"""Excerpts of the Twitter trace for IPA and Biscale, and a synthetic trace of the same shape if it is missing.

The trace counts the tweets of each second of 22 days of August 2021: two weeks to train forecasters, one week to test
them and for the excerpts. Seconds count from its start. The synthetic trace draws each second from a negative binomial
distribution around published means, with a variance of 1.2 times the mean; it covers only the excerpts. The provenance
of an excerpt says which of the two it is; the same seed gives the same counts.

Source: IPA specification, sections 2.8 and 4; Biscale specification, sections 2.8 and 4.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Final

from sloop.api import InputError
from sloop.api.experiments import Spread, Trace, TraceFile, read_counts, stream, trace_of_counts

FILE: Final = Path("reconfigurable-ml-pipeline__web-service-datasets/dataset/twitter_trace/workload.tbz2")
"""Path in the folder of public data."""

DAY_S: Final = 86_400
TRAIN_S: Final = (0, 14 * DAY_S)
TEST_S: Final = (14 * DAY_S, 21 * DAY_S)

IPA: Final[Mapping[str, tuple[tuple[int, int], ...]]] = {
    "bursty": ((1_301_160, 1_302_360),),
    "steady_low": ((1_299_600, 1_300_800),),
    "steady_high": ((1_768_800, 1_769_400), (1_768_800, 1_769_400)),
    "fluctuating": ((1_301_400, 1_302_000), (1_308_600, 1_309_200)),
}
"""The ranges of seconds (end excluded) that are concatenated to each of IPA's excerpts."""

IPA_DAMPING: Final = 8

BISCALE_S: Final = (1_301_490, 1_302_150)
BISCALE_DIVISORS: Final[Mapping[str, float]] = {"video": 4.384, "audio": 8.5625, "nlp": 21.0}


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Whole requests per second with their provenance: `measured: …`, or `assumed: …` for the synthetic trace."""

    name: str
    counts: "array[int]"
    provenance: str

    @property
    def is_measured(self) -> bool:
        """Whether this is the recorded rather than the synthetic trace."""
        return self.provenance.startswith("measured")

    def trace(self, *, seed: int = 0, spread: Spread = Spread.POISSON) -> Trace:
        """The arrivals: a Poisson process with each second's rate, or exactly its count with another spread."""
        recorded = TraceFile(FILE, spread=spread)
        return trace_of_counts(self.counts, recorded, name=self.name, provenance=self.provenance, seed=seed)


def ipa(name: str, data: Path | None, *, seed: int = 0) -> Excerpt:
    """One of IPA's four excerpts of 1,200 s: an eighth of the tweets of each second, rounded down.

    `data` is the folder of public data; `seed` is for the synthetic trace. InputError for an unknown name.
    """
    if name not in IPA:
        raise InputError(f"IPA has no excerpt {name!r}", help=f"choose one of: {', '.join(IPA)}")
    raw, origin = _tweets(data, IPA[name], seed)
    rates = array("q", (count // IPA_DAMPING for count in raw))
    return Excerpt(name, rates, f"{origin}, divided by {IPA_DAMPING}")


def biscale(pipeline: str, data: Path | None, *, seed: int = 0) -> Excerpt:
    """Biscale's excerpt of 660 s: tweets divided by the pipeline's divisor and rounded, at least 1 per second.

    `data` is the folder of public data; `seed` is for the synthetic trace. InputError for an unknown pipeline.
    """
    if pipeline not in BISCALE_DIVISORS:
        raise InputError(f"Biscale has no pipeline {pipeline!r}", help=f"choose one of: {', '.join(BISCALE_DIVISORS)}")
    divisor = BISCALE_DIVISORS[pipeline]
    raw, origin = _tweets(data, (BISCALE_S,), seed)
    rates = array("q", (round(max(1.0, count / divisor)) for count in raw))
    return Excerpt(f"biscale {pipeline}", rates, f"{origin}, divided by {divisor:g}")


def training(data: Path | None, *, seed: int = 0) -> Excerpt:
    """The tweets of days 0 to 14, which forecasters are trained on."""
    return _days("training days", data, TRAIN_S, seed)


def held_out(data: Path | None, *, seed: int = 0) -> Excerpt:
    """The tweets of days 14 to 21, which forecasters are tested on."""
    return _days("test days", data, TEST_S, seed)


def _days(name: str, data: Path | None, span: tuple[int, int], seed: int) -> Excerpt:
    if _is_there(data):
        return Excerpt(name, *_tweets(data, (span,), seed))
    rng = stream(seed, f"twitter/{name}")
    tweets = array("q", (_drawn(mean, rng) for mean in _wandering(span, rng)))
    return Excerpt(name, tweets, f"assumed: days made up in the likeness of the Twitter trace, seed {seed}")


def _tweets(data: Path | None, spans: tuple[tuple[int, int], ...], seed: int) -> "tuple[array[int], str]":
    """The tweets of each second in `spans`, and their provenance."""
    seconds = ", ".join(f"{first}–{last}" for first, last in spans)
    tweets = array("q")
    if data is not None and _is_there(data):
        whole = _read(data / FILE)
        for first, last in spans:
            tweets.extend(whole[first:last])
        return tweets, f"measured: Twitter stream 2021-08, seconds {seconds}"
    for first, last in spans:
        start_s, made = next((at, made) for at, made in _stand_in(seed).items() if at <= first < at + len(made))
        tweets.extend(made[first - start_s : last - start_s])
    return tweets, f"assumed: drawn around the means of the Twitter trace's seconds {seconds}, seed {seed}"


def tweets_of(data: Path | None, first: int, end: int) -> "array[int] | None":
    """The tweets of the seconds from `first` up to before `end`; None if the file is not in the public data."""
    return _read(data / FILE)[first:end] if data is not None and _is_there(data) else None


def _is_there(data: Path | None) -> bool:
    return data is not None and (data / FILE).is_file()


@cache
def _read(path: Path) -> "array[int]":
    return read_counts(TraceFile(path))


_BIN_S: Final = 20
_MEANS: Final[Mapping[int, tuple[float, ...]]] = {
    1_299_600: (43.9,) * 60,
    1_301_160: (
        *(44, 42, 42, 44, 43, 45, 45, 43, 44, 47, 44, 42, 41, 46, 45, 50, 48, 49, 46, 108),
        *(195, 215, 225, 220, 226, 228, 226, 230, 225, 198, 196, 201, 206, 211, 218, 203, 170, 143, 115, 108),
        *(111, 80, 58, 49, 51, 50, 48, 46, 50, 47, 52, 49, 47, 47, 52, 49, 49, 44, 45, 48),
    ),
    1_308_600: (
        *(54, 57, 56, 64, 59, 62, 64, 133, 205, 212, 223, 233, 229, 229, 212),
        *(196, 181, 168, 177, 127, 87, 71, 61, 60, 63, 58, 54, 59, 55, 54),
    ),
    1_768_800: (234.2,) * 30,
}
"""Mean tweets per second in steps of 20 s, by the first second of a range (IPA specification, section 4)."""

_JUMP_S: Final = 1_301_544
_JUMP: Final = (39, 49, 50, 132, 124, 103, 103, 120, 121, 145, 170, 132, 168, 164, 182, 192, 196, 169, 189)
"""The tweets of each second around the abrupt jump, which means of 20 s would smooth (Biscale specification, 4)."""


@cache
def _stand_in(seed: int) -> "dict[int, array[int]]":
    """Synthetic tweets per second of each range that an excerpt uses, by its first second."""
    made = {}
    for start_s, means in _MEANS.items():
        rng = stream(seed, f"twitter/{start_s}")
        per_second = [mean for mean in means for _ in range(_BIN_S)]
        jump = _JUMP_S - start_s
        if 0 <= jump < len(per_second):
            calm = jump - jump % _BIN_S
            per_second[calm:jump] = per_second[calm - 1 : calm] * (jump - calm)
        tweets = array("q", (_drawn(mean, rng) for mean in per_second))
        if 0 <= jump < len(per_second):
            tweets[jump : jump + len(_JUMP)] = array("q", _JUMP)
        made[start_s] = tweets
    return made


def _wandering(span: tuple[int, int], rng: Random) -> Iterator[float]:
    """Mean tweets per second of synthetic days: a daily base of 45 to 100 with an hourly sawtooth, and about every two
    hours a burst of 3 to 5 times the base that begins abruptly, lasts 3 to 8 minutes and decays in 1 to 2 minutes."""
    burst_at = span[0] + rng.expovariate(1 / (2 * 3600))
    factor, until, decay_s = 1.0, 0.0, 1.0
    for second in range(*span):
        if second >= burst_at:
            factor, until, decay_s = rng.uniform(3, 5), second + rng.uniform(180, 480), rng.uniform(60, 120)
            burst_at = until + decay_s + rng.expovariate(1 / (2 * 3600))
        day, hour = second / DAY_S % 1.0, second / 3600 % 1.0
        base = 45 + 45 * (1 - abs(2 * day - 1)) + 10 * (1 - hour)
        left = 1.0 if second < until else max(0.0, 1 - (second - until) / decay_s)
        yield round(base * (1 + (factor - 1) * left))


def _drawn(mean: float, rng: Random) -> int:
    """A draw from a negative binomial distribution with a variance of 1.2 × its mean."""
    return bisect_left(_distribution(mean), rng.random())


@cache
def _distribution(mean: float) -> list[float]:
    """Cumulative probabilities of 0, 1, 2, … up to a value that no draw exceeds."""
    size, share = mean / 0.2, 0.2 / 1.2
    density = (1 - share) ** size
    densities = [density]
    while len(densities) < mean or density > 1e-17:
        density *= share * (len(densities) - 1 + size) / len(densities)
        densities.append(density)
    return list(accumulate(densities))
