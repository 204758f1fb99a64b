"""The simulator against queueing theory: waiting times, the share that waits, Little's law.

Expected values are the textbook formulas (Kleinrock, Queueing Systems I): Pollaczek–Khinchine for M/G/1, Erlang C for
M/M/c. Each is met by independent seeds; the bound is the 99.9 % confidence interval of their mean, which must be narrow
enough to mean something.
"""

from collections.abc import Callable
from functools import cache
from math import sqrt
from statistics import fmean, stdev

import pytest

from sloop.app.scenario import NoiseShape
from sloop.units import to_s
from tests.sim.theory.queues import Visits, erlang_c, visits, wait_many_s, wait_one_s

SEEDS = range(8)
STUDENT_999 = 5.41
"""Two-sided 99.9 % quantile of Student's t with 7 degrees of freedom."""


def assert_meets(theory: float, measure: Callable[[int], float], *, within: float) -> None:
    """The seeds' mean lies in its confidence interval about `theory`, whose half-width is at most `within` of it."""
    found = [measure(seed) for seed in SEEDS]
    half_width = STUDENT_999 * stdev(found) / sqrt(len(found))
    assert half_width < within * theory, f"{found} are too scattered to say anything"
    assert abs(fmean(found) - theory) < half_width, f"{fmean(found)} ± {half_width} is not {theory}"


@pytest.mark.parametrize(
    ("shape", "cv", "squared_variation"),
    [("exponential", 0.0, 1.0), ("deterministic", 0.0, 0.0), ("normal", 0.3, 0.09)],
    ids=["M/M/1", "M/D/1", "M/G/1"],
)
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_server_waits_as_pollaczek_and_khinchine_say(
    shape: NoiseShape, cv: float, squared_variation: float, load: float
) -> None:
    theory_s = wait_one_s(load, squared_variation)
    assert_meets(
        theory_s, lambda seed: fmean(visits(seed, servers=1, load=load, shape=shape, cv=cv).waits_s), within=0.3
    )


@pytest.mark.parametrize(("servers", "load"), [(2, 0.7), (8, 0.8)], ids=["M/M/2", "M/M/8"])
def test_many_servers_wait_as_erlang_says(servers: int, load: float) -> None:

    @cache
    def seen(seed: int) -> Visits:
        return visits(seed, servers=servers, load=load, shape="exponential")

    assert_meets(erlang_c(servers, load), lambda seed: fmean(wait_s > 0 for wait_s in seen(seed).waits_s), within=0.2)
    assert_meets(wait_many_s(servers, load), lambda seed: fmean(seen(seed).waits_s), within=0.35)


@pytest.mark.parametrize("servers", [1, 3])
def test_little(servers: int) -> None:
    """Mean number present = arrival rate × mean stay, each taken from the log in its own way; exact for a whole run."""
    seen = visits(1, servers=servers, load=0.8, shape="exponential")
    assert seen.present == 0
    rate_rps = len(seen.stays_s) / to_s(seen.changed_ns)
    assert seen.mean_present == pytest.approx(rate_rps * fmean(seen.stays_s), rel=1e-9)


def test_utilisation_is_the_load() -> None:
    def busy(seed: int) -> float:
        seen = visits(seed, servers=4, load=0.6, shape="exponential")
        served_s = sum(seen.stays_s) - sum(seen.waits_s)
        return served_s / to_s(seen.changed_ns) / 4

    assert_meets(0.6, busy, within=0.1)
