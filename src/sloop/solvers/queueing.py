"""The queueing model of FA2, IPA and Biscale: how long a batch takes to fill, and how many replicas keep up. And a
queue with random arrivals: which fraction of them is in time.

Source: Razavi et al., FA2 (RTAS 2022), section on the queueing model; IPA and Biscale use the same. It gives the worst
case for *evenly spaced* arrivals; under Poisson arrivals, fill times and queues sometimes exceed it.
"""

import math
from typing import Final

from sloop.units import ROUNDING, ms

WAIT_FACTOR: Final = 2.0
"""A batch may wait this many times its expected fill time, because real arrivals are not even."""
WAIT_SHARE: Final = 4
"""A batch may wait at most the SLO divided by this."""


def fill_ms(batch: int, rate_rps: float) -> float:
    """q(b) = 1000 (b - 1)/λ: milliseconds that the first request of a batch waits for the others.

    0 at a rate of 0; callers must then choose a batch of 1.
    """
    return 1000.0 * (batch - 1) / rate_rps if rate_rps > 0 else 0.0


def patience_ns(fill_ms: float, slo_ns: int) -> int:
    """The longest wait, in ns, for a batch with the expected fill time `fill_ms`."""
    return min(ms(WAIT_FACTOR * fill_ms), slo_ns // WAIT_SHARE)


def replicas_needed(rate_rps: float, batch: int, latency_ms: float) -> int:
    """n = max(1, ⌈λ d(b)/(1000 b)⌉): the fewest replicas that keep up with λ in batches of `latency_ms`."""
    return max(1, math.ceil(rate_rps * latency_ms / (1000.0 * batch) - ROUNDING))


def in_time(rate_rps: float, servers: float, capacity_rps: float, service_ms: float, deadline_ms: float) -> float:
    """The fraction of Poisson arrivals, 0 to 1, that `servers` replicas of `capacity_rps` together answer within the
    deadline, if what would be late is dropped. For rates beyond the capacity it tends to capacity/rate.

    A request is dropped if as many wait as are served in the time that it has, deadline - service. So this is the loss
    of a queue with bounded room, M/M/c/K (Kleinrock, Queueing Systems, volume 1, section 3.6): Erlang's formula for c
    servers, and then places to wait. These count twice, because constant durations make a queue half as long as
    exponential ones do (the factor 2/(c_a² + c_s²) of the heavy-traffic limit, with c_a = 1 and c_s = 0).
    """
    if capacity_rps <= 0.0 or service_ms > deadline_ms:
        return 0.0
    load = rate_rps / capacity_rps
    if load <= 0.0:
        return 1.0
    offered = load * servers
    blocked, busy = 1.0, servers % 1.0  # of a fraction of a server, nearly all
    while (busy := busy + 1) <= servers:
        blocked = offered * blocked / (busy + offered * blocked)
    room = 2 * capacity_rps * (deadline_ms - service_ms) / 1000.0
    if abs(load - 1.0) < 1e-9:
        return 1.0 - blocked / (1.0 + blocked * room)
    if load > 1.0:
        kept = math.pow(load, -room)
        return 1.0 - blocked / (kept + blocked * (1.0 - kept) / (1.0 - 1.0 / load))
    kept = math.pow(load, room)
    return 1.0 - blocked * kept / (1.0 + blocked * load * (1.0 - kept) / (1.0 - load))
