"""Expect what a small recurrent network foresees: the busiest second of the near future.

IPA's and Biscale's forecaster (IPA specification, section 2.8; Biscale specification, section 2.8), with weights that
ship here, trained on the first fortnight of the Twitter trace (docs/forecasters.md). Until it has seen enough bins it
expects the busiest second so far again. Fails on a jump out of nothing, as everything that only knows the past does,
and on traffic that is unlike what it was trained on; `sloop forecast` says how it fares on a trace, and trains another.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from sloop.core.views import Traffic
from sloop.errors import InputError
from sloop.policies.bounds import TIMES_MAX, OutOfRange, within
from sloop.solvers.lstm import Network, decoded
from sloop.solvers.seconds import peaks_of, seconds_rps
from sloop.units import s

SHIPPED = ("ipa", "biscale")
"""The last 2 minutes to the busiest second of the next 20 s; the last minute to that of the next 10."""


@cache
def _network(weights: str) -> Network:
    """Weights that ship are a constant of the package, as its source is; others stand in the parameter itself."""
    if weights in SHIPPED:
        return decoded((files(__package__) / "weights" / f"{weights}.lstm").read_text(encoding="ascii"))
    try:
        return decoded(weights)
    except InputError as error:
        shown = weights if len(weights) < 20 else f"{weights[:20]}…"
        raise OutOfRange(
            f"weights = {shown!r}: {error.what}",
            key="weights",
            help=f"write {' or '.join(SHIPPED)}, or the text that `sloop forecast --train` wrote",
        ) from None


@dataclass(frozen=True, slots=True)
class Lstm:
    """What the network with these `weights` (one that ships, by name, or its text) foresees, times 1 + `margin`."""

    weights: str = "ipa"
    margin: float = 0.0
    _network: Network = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        within("margin", self.margin, -1, TIMES_MAX)
        object.__setattr__(self, "_network", _network(self.weights))

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        network = self._network
        window = ingress.window(s(network.bins * network.bin_s))
        rates = seconds_rps([bucket.arrivals for bucket in window], ingress.bucket_ns)
        peaks = peaks_of(rates, network.bin_s)
        if len(peaks) < network.bins:
            return (1 + self.margin) * max(rates, default=0.0)
        return (1 + self.margin) * network.forecast(peaks)
