"""Queues that theory knows, played by the simulator, and what theory says of them.

Sources: Kleinrock, Queueing Systems I. Pollaczek–Khinchine for M/G/1, Erlang C for M/M/c.
"""

from dataclasses import dataclass, field
from math import factorial

from sloop.actions import End, StartBatch
from sloop.app.scenario import NoiseShape
from sloop.runlog import Record
from sloop.sim import simulate
from sloop.units import to_s
from sloop.vocabulary import Request, RequestId
from tests.sim.scene import world

SERVICE_S = 0.01


@dataclass
class Visits:
    """A sink that keeps what theory speaks of: when each request came, began and left.

    The first `settling` requests to arrive fill the queue that was empty; waits and stays leave them out.
    """

    settling: int = 0
    arrived_ns: dict[RequestId, int] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    stays_s: list[float] = field(default_factory=list)
    present: int = 0
    arrivals: int = 0
    since_ns: int = 0
    """When the last of the settling requests arrived; the area counts from there."""
    changed_ns: int = 0
    area_ns: int = 0
    """Integral of the requests present over time."""

    def append(self, now_ns: int, record: Record) -> None:
        if isinstance(record, Request):
            self._count(now_ns, 1)
            self.arrivals += 1
            if self.arrivals > self.settling:
                self.arrived_ns[record.id] = now_ns
            elif self.arrivals == self.settling:
                self.since_ns, self.area_ns = now_ns, 0
        elif isinstance(record, StartBatch):
            self.waits_s += [to_s(now_ns - self.arrived_ns[id]) for id in record.requests if id in self.arrived_ns]
        elif isinstance(record, End):
            self._count(now_ns, -1)
            if record.request in self.arrived_ns:
                self.stays_s.append(to_s(now_ns - self.arrived_ns.pop(record.request)))

    @property
    def mean_present(self) -> float:
        """Requests in the system, averaged over time."""
        return self.area_ns / (self.changed_ns - self.since_ns)

    def _count(self, now_ns: int, change: int) -> None:
        self.area_ns += self.present * (now_ns - self.changed_ns)
        self.present += change
        self.changed_ns = now_ns


def visits(
    seed: int,
    *,
    servers: int,
    load: float,
    shape: NoiseShape,
    cv: float = 0.0,
    requests: int = 6_000,
    settling: int = 0,
) -> Visits:
    """A first-come-first-served queue of `servers` with service of mean 10 ms, about `requests` long."""
    rate_rps = load * servers / SERVICE_S
    seen = Visits(settling)
    played = world(
        seed=seed,
        latency_ms={"form": "quadratic", "alpha": 0.0, "beta": 0.0, "gamma": 1000 * SERVICE_S},
        max_batch=1,
        system={"name": "static", "replicas": servers, "order": "fifo", "drop": "never"},
        trace={"kind": "poisson", "rate": rate_rps},
        truth={"service": {"ratio": 1.0, "cv": cv, "shape": shape}},
        duration_s=requests / rate_rps,
        slo_ms=1e6,
        cores=float(servers),
    )
    simulate(played, [seen], check_first=0)
    return seen


def wait_one_s(load: float, squared_variation: float) -> float:
    """Mean wait of M/G/1 (Pollaczek–Khinchine); `squared_variation` is 1 for M/M/1 and 0 for M/D/1."""
    return load / (1 - load) * SERVICE_S * (1 + squared_variation) / 2


def erlang_c(servers: int, load: float) -> float:
    """Probability that a request has to wait in M/M/c at `load` per server."""
    offered = servers * load
    busy = offered**servers / factorial(servers) / (1 - load)
    return busy / (sum(offered**k / factorial(k) for k in range(servers)) + busy)


def wait_many_s(servers: int, load: float) -> float:
    """Mean wait of M/M/c."""
    return erlang_c(servers, load) * SERVICE_S / (servers * (1 - load))
