"""The simulator against queueing theory: waiting times, the share that waits, Little's law.

Expected values are the textbook formulas (Kleinrock, Queueing Systems I): Pollaczek–Khinchine for M/G/1, Erlang C for
M/M/c. Each is met by independent seeds; the bound is the 99.9 % confidence interval of their mean, which must be narrow
enough to mean something.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import factorial, sqrt
from statistics import fmean, stdev

import pytest

from sloop.actions import End, StartBatch
from sloop.log import Record
from sloop.sim import simulate
from sloop.sim.truth.noise import Shape
from sloop.units import to_s
from sloop.vocabulary import Request, RequestId
from tests.sim.scene import world

SEEDS = range(8)
STUDENT_999 = 5.41
"""Two-sided 99.9 % quantile of Student's t with 7 degrees of freedom."""
SERVICE_S = 0.01


@dataclass
class Visits:
    """A sink that keeps what theory speaks of: when each request came, began and left."""

    arrived_ns: dict[RequestId, int] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    stays_s: list[float] = field(default_factory=list)
    present: int = 0
    changed_ns: int = 0
    area_ns: int = 0
    """Integral of the requests present over time."""

    def append(self, now_ns: int, record: Record) -> None:
        if isinstance(record, Request):
            self._count(now_ns, 1)
            self.arrived_ns[record.id] = now_ns
        elif isinstance(record, StartBatch):
            self.waits_s += [to_s(now_ns - self.arrived_ns[id]) for id in record.requests]
        elif isinstance(record, End):
            self._count(now_ns, -1)
            self.stays_s.append(to_s(now_ns - self.arrived_ns.pop(record.request)))

    def _count(self, now_ns: int, change: int) -> None:
        self.area_ns += self.present * (now_ns - self.changed_ns)
        self.present += change
        self.changed_ns = now_ns


def visits(seed: int, *, servers: int, load: float, shape: Shape, cv: float = 0.0) -> Visits:
    """A first-come-first-served queue of `servers` with service of mean 10 ms, some 6,000 requests long."""
    rate_rps = load * servers / SERVICE_S
    seen = Visits()
    played = world(
        seed=seed,
        latency_ms={"form": "quadratic", "alpha": 0.0, "beta": 0.0, "gamma": 1000 * SERVICE_S},
        max_batch=1,
        system={"name": "static", "replicas": servers, "order": "fifo", "drop": "never"},
        trace={"kind": "poisson", "rate": rate_rps},
        truth={"service": {"ratio": 1.0, "cv": cv}},
        duration_s=6_000 / rate_rps,
        slo_ms=1e6,
        shape=shape,
    )
    simulate(played, [seen], checkers=False)
    return seen


def assert_meets(theory: float, measure: Callable[[int], float], *, within: float) -> None:
    """The seeds' mean lies in its confidence interval about `theory`, whose half-width is at most `within` of it."""
    found = [measure(seed) for seed in SEEDS]
    half_width = STUDENT_999 * stdev(found) / sqrt(len(found))
    assert half_width < within * theory, f"{found} are too scattered to say anything"
    assert abs(fmean(found) - theory) < half_width, f"{fmean(found)} ± {half_width} is not {theory}"


def erlang_c(servers: int, load: float) -> float:
    """Probability that a request has to wait in M/M/c at `load` per server."""
    offered = servers * load
    busy = offered**servers / factorial(servers) / (1 - load)
    return busy / (sum(offered**k / factorial(k) for k in range(servers)) + busy)


@pytest.mark.parametrize(
    ("shape", "cv", "squared_variation"),
    [("exponential", 0.0, 1.0), ("deterministic", 0.0, 0.0), ("normal", 0.3, 0.09)],
    ids=["M/M/1", "M/D/1", "M/G/1"],
)
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_server_waits_as_pollaczek_and_khinchine_say(
    shape: Shape, cv: float, squared_variation: float, load: float
) -> None:
    theory_s = load / (1 - load) * SERVICE_S * (1 + squared_variation) / 2
    assert_meets(
        theory_s, lambda seed: fmean(visits(seed, servers=1, load=load, shape=shape, cv=cv).waits_s), within=0.3
    )


@pytest.mark.parametrize(("servers", "load"), [(2, 0.7), (8, 0.8)], ids=["M/M/2", "M/M/8"])
def test_many_servers_wait_as_erlang_says(servers: int, load: float) -> None:
    chance = erlang_c(servers, load)
    theory_s = chance * SERVICE_S / (servers * (1 - load))

    def seen(seed: int) -> Visits:
        return visits(seed, servers=servers, load=load, shape="exponential")

    assert_meets(chance, lambda seed: fmean(wait_s > 0 for wait_s in seen(seed).waits_s), within=0.2)
    assert_meets(theory_s, lambda seed: fmean(seen(seed).waits_s), within=0.35)


@pytest.mark.parametrize("servers", [1, 3])
def test_little(servers: int) -> None:
    """Mean number present = arrival rate × mean stay, each taken from the log in its own way; exact for a whole run."""
    seen = visits(1, servers=servers, load=0.8, shape="exponential")
    assert seen.present == 0
    present = seen.area_ns / seen.changed_ns
    rate_rps = len(seen.stays_s) / to_s(seen.changed_ns)
    assert present == pytest.approx(rate_rps * fmean(seen.stays_s), rel=1e-9)


def test_utilisation_is_the_load() -> None:
    def busy(seed: int) -> float:
        seen = visits(seed, servers=4, load=0.6, shape="exponential")
        served_s = sum(seen.stays_s) - sum(seen.waits_s)
        return served_s / to_s(seen.changed_ns) / 4

    assert_meets(0.6, busy, within=0.1)
