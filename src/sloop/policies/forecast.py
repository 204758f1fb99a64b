"""Forecast: how many requests per second to expect at the application's ingress.

Each class is one policy; none uses another. All but `OracleForecast` compute the forecast from the monitoring buckets
at each call, so they keep no state that could become stale.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from sloop.core.protocols import Forecast
from sloop.core.views import Traffic
from sloop.options import PositiveInt, Range, check_range
from sloop.units import NS_PER_S, s

RATE_MAX_RPS: Final = 1e9
"""The largest rate that `OracleForecast` accepts: a hundred times the highest rate of a trace."""
FACTOR_MAX: Final = 1e6
"""The largest factor on rates: a larger one is a typing error, and products with it could be infinite."""


@dataclass(frozen=True, slots=True)
class Last(Forecast):
    """The mean arrival rate over the last `window_ns`.

    Used by Sponge and FA2; purely reactive. Fails on a ramp, where it is always one window behind.
    """

    window_ns: PositiveInt = s(1)
    """The mean is that of this time."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return ingress.rate_rps(self.window_ns)


@dataclass(frozen=True, slots=True)
class Times(Forecast):
    """`factor` times the mean arrival rate over the last `window_ns`.

    The simplest safety margin, k·LV in the AsyFunc specification, section 2.6. Fails on cost, which it multiplies at
    every load, and on steps larger than its factor.
    """

    factor: Annotated[float, Range(above=0, most=FACTOR_MAX)] = 1.2
    """Factor of the mean rate."""
    window_ns: PositiveInt = s(1)
    """The mean is that of this time."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return self.factor * ingress.rate_rps(self.window_ns)


@dataclass(frozen=True, slots=True)
class MovingMax(Forecast):
    """The largest mean rate over any `window_ns` within the last `horizon_ns`.

    Conservative: it scales out at once, and in only when the peak has left the horizon (Biscale's `max10`). Fails on
    cost after a single peak, which it pays for during the whole horizon.
    """

    horizon_ns: int = s(10)
    """How far back it looks."""
    window_ns: PositiveInt = s(1)
    """Each mean is that of this time."""

    def __post_init__(self) -> None:
        check_range("horizon_ns", self.horizon_ns, least=self.window_ns)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        counts = [bucket.arrivals for bucket in ingress.window(self.horizon_ns)]
        if not counts:
            return 0.0
        width = min(len(counts), max(1, self.window_ns // ingress.bucket_ns))
        sums = (sum(counts[start : start + width]) for start in range(len(counts) - width + 1))
        return max(sums) * NS_PER_S / (width * ingress.bucket_ns)


FORGOTTEN: Final = 60
"""After so many half-lives an interval weighs less than the last bit of the others."""


@dataclass(frozen=True, slots=True)
class Ewma(Forecast):
    """The exponentially weighted mean of all intervals seen; weights halve every `half_life_ns`.

    Fails on a step, which it follows only at the speed of its half-life, up and down. With `at_least_last` it follows
    a step up at once, as PALDIA's predictor does (specification, 2.2: a half-life of a second).
    """

    half_life_ns: PositiveInt = s(10)
    """After this time an interval counts half."""
    at_least_last: bool = False
    """Whether the forecast is never below the rate of the last bucket."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        decay = 0.5 ** (ingress.bucket_ns / self.half_life_ns)
        weighted, weights = 0.0, 0.0
        for bucket in ingress.window(FORGOTTEN * self.half_life_ns):  # oldest first
            weighted = weighted * decay + bucket.arrivals
            weights = weights * decay + 1.0
        if not weights:
            return 0.0
        mean = weighted / weights
        return (max(mean, bucket.arrivals) if self.at_least_last else mean) * NS_PER_S / ingress.bucket_ns


@dataclass(frozen=True, slots=True)
class OracleForecast(Forecast):
    """The largest of `counts`, the requests in each second since the start, within the next `horizon_ns`: not causal.

    It gets the trace beforehand, so only simulations can use it: as the bound with which IPA and Biscale compare their
    forecasters (section 2.8 of both specifications). After the end of the list it predicts the rate of the last second.
    """

    knows_future: ClassVar[bool] = True
    counts: tuple[Annotated[float, Range(least=0, most=RATE_MAX_RPS)], ...] = ()
    """Requests in each second since the start."""
    horizon_ns: PositiveInt = s(20)
    """How far ahead it looks."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        counts = self.counts[now_ns // NS_PER_S : -(-(now_ns + self.horizon_ns) // NS_PER_S)]
        return float(max(counts)) if counts else ingress.rate_rps()
