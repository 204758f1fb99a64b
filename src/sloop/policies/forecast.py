"""Forecast: how many requests per second to expect at the application's ingress.

Each class is one policy; none uses another. All but `OracleForecast` compute the forecast from the monitoring buckets
at each call, so they keep no state that could become stale.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import ClassVar, Final

from sloop.core.views import Traffic
from sloop.errors import InputError
from sloop.options import OutOfRange, check_range
from sloop.solvers.forecasting import LstmNetwork, decoded, peaks_of, seconds_rps
from sloop.text import quoted
from sloop.units import NS_PER_S, quantile, s, to_s


@dataclass(frozen=True, slots=True)
class Last:
    """The mean arrival rate over the last `window_ns`.

    Used by Sponge and FA2; purely reactive. Fails on a ramp, where it is always one window behind.
    """

    window_ns: int = s(1)
    """The mean is that of this time."""

    def __post_init__(self) -> None:
        check_range("window_ns", self.window_ns, above=0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return ingress.rate_rps(self.window_ns)


@dataclass(frozen=True, slots=True)
class Times:
    """`factor` times the mean arrival rate over the last `window_ns`.

    The simplest safety margin, k·LV in the AsyFunc specification, section 2.6. Fails on cost, which it multiplies at
    every load, and on steps larger than its factor.
    """

    factor: float = 1.2
    """Factor of the mean rate."""
    window_ns: int = s(1)
    """The mean is that of this time."""

    def __post_init__(self) -> None:
        check_range("factor", self.factor, above=0, most=FACTOR_MAX)
        check_range("window_ns", self.window_ns, above=0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return self.factor * ingress.rate_rps(self.window_ns)


@dataclass(frozen=True, slots=True)
class MovingMax:
    """The largest mean rate over any `window_ns` within the last `horizon_ns`.

    Conservative: it scales out at once, and in only when the peak has left the horizon (Biscale's `max10`). Fails on
    cost after a single peak, which it pays for during the whole horizon.
    """

    horizon_ns: int = s(10)
    """How far back it looks."""
    window_ns: int = s(1)
    """Each mean is that of this time."""

    def __post_init__(self) -> None:
        check_range("window_ns", self.window_ns, above=0)
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
class Ewma:
    """The exponentially weighted mean of all intervals seen; weights halve every `half_life_ns`.

    Fails on a step, which it follows only at the speed of its half-life, up and down. With `at_least_last` it follows
    a step up at once, as PALDIA's predictor does (specification, 2.2: a half-life of a second).
    """

    half_life_ns: int = s(10)
    """After this time an interval counts half."""
    at_least_last: bool = False
    """Whether the forecast is never below the rate of the last bucket."""

    def __post_init__(self) -> None:
        check_range("half_life_ns", self.half_life_ns, above=0)

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
class Holt:
    """Double exponential smoothing (C. C. Holt, 1957): level + trend × `horizon_ns`, at least zero.

    Each second corrects the level by `level` times the forecast error, and the trend by `trend` times that correction.
    The Paldia specification, section 2.2, looks 4 s ahead. Follows a ramp without lag; fails after a step, which it
    takes for a ramp and overshoots.
    """

    level: float = 0.5
    trend: float = 0.1
    horizon_ns: int = s(4)

    def __post_init__(self) -> None:
        check_range("level", self.level, above=0, most=1)
        check_range("trend", self.trend, above=0, most=1)
        check_range("horizon_ns", self.horizon_ns, least=0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        rates = seconds_rps([bucket.arrivals for bucket in ingress.buckets], ingress.bucket_ns)
        if not rates:
            return 0.0
        level, trend = rates[0], 0.0
        for rate in rates[1:]:
            before = level
            level += trend + self.level * (rate - level - trend)
            trend += self.trend * (level - before - trend)
        return max(0.0, level + trend * to_s(self.horizon_ns))


@dataclass(frozen=True, slots=True)
class P99Rate:
    """The `share` quantile of the rates of the seconds within the last `window_ns`.

    Atoll's request-rate mode takes the P99 of the arrival rate over a window (FlashPoint specification, section 2.13).
    Fails on a step, which it sees only after a hundredth of the window, and on cost for a window after it.
    """

    share: float = 0.99
    window_ns: int = s(60)

    def __post_init__(self) -> None:
        check_range("share", self.share, above=0, most=1)
        check_range("window_ns", self.window_ns, above=0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        window = ingress.window(self.window_ns)
        rates = sorted(seconds_rps([bucket.arrivals for bucket in window], ingress.bucket_ns))
        return quantile(rates, self.share) if rates else 0.0


SHIPPED: Final = ("ipa", "biscale")
"""Weights in the package. `ipa` predicts the busiest second of the next 20 s from 2 minutes of history; `biscale` that
of the next 10 s from 1 minute."""
RATE_MAX_RPS: Final = 1e9
"""The largest rate that `OracleForecast` accepts: a hundred times the highest rate of a trace."""
FACTOR_MAX: Final = 1e6
"""The largest factor on rates: a larger one is a typing error, and products with it could be infinite."""


@cache
def _network(weights: str) -> LstmNetwork:
    """The network with these weights. OutOfRange for a text that is neither a name of `SHIPPED` nor weights.

    Reading the shipped weights is no I/O in the sense of law 1: they are a constant of the package, like its source.
    """
    if weights in SHIPPED:
        return decoded((files(__package__) / "weights" / f"{weights}.lstm").read_text(encoding="ascii"))
    try:
        return decoded(weights)
    except InputError as error:
        wrong = (
            f"must be {' or '.join(SHIPPED)}, or the text of trained weights, not {quoted(weights, 20)}: {error.what}"
        )
        raise OutOfRange("weights", wrong, error.help) from None


@dataclass(frozen=True, slots=True)
class Lstm:
    """A small recurrent network's prediction of the busiest second of the near future, times 1 + `margin`.

    The forecaster of IPA and Biscale (section 2.8 of both specifications). `weights` is the name of weights that ship
    with sloop, trained on the first fortnight of the Twitter trace (docs/forecasters.md), or the text of other weights.
    Until enough seconds are measured, it predicts the busiest second so far. Fails on a sudden jump, like every
    forecast from the past, and on traffic unlike its training data.
    """

    weights: str = "ipa"
    """The name of weights that ship with sloop, `ipa` or `biscale`, or the text of other weights."""
    margin: float = 0.0
    """Predict 1 + `margin` times as much."""
    _network: LstmNetwork = field(init=False, repr=False, compare=False)
    NOT_IN_SNAPSHOT: ClassVar = ("_network",)

    def __post_init__(self) -> None:
        check_range("margin", self.margin, above=-1, most=FACTOR_MAX)
        object.__setattr__(self, "_network", _network(self.weights))

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        network = self._network
        window = ingress.window(s(network.bins * network.bin_s))
        rates = seconds_rps([bucket.arrivals for bucket in window], ingress.bucket_ns)
        peaks = peaks_of(rates, network.bin_s)
        if len(peaks) < network.bins:
            return (1 + self.margin) * max(rates, default=0.0)
        return (1 + self.margin) * network.forecast(peaks)


@dataclass(frozen=True, slots=True)
class OracleForecast:
    """The largest of `counts`, the requests in each second since the start, within the next `horizon_ns`: not causal.

    It gets the trace beforehand, so only simulations can use it: as the bound with which IPA and Biscale compare their
    forecasters (section 2.8 of both specifications). After the end of the list it predicts the rate of the last second.
    """

    counts: tuple[float, ...] = ()
    """Requests in each second since the start."""
    horizon_ns: int = s(20)
    """How far ahead it looks."""

    def __post_init__(self) -> None:
        for count in self.counts:
            check_range("counts", count, least=0, most=RATE_MAX_RPS)
        check_range("horizon_ns", self.horizon_ns, above=0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        counts = self.counts[now_ns // NS_PER_S : -(-(now_ns + self.horizon_ns) // NS_PER_S)]
        return float(max(counts)) if counts else ingress.rate_rps()
