"""Delays between ordering a change of a replica and its effect: cold starts and resizes.

A cold start takes `load_s` of the variant's profile, which is measured from the order to start a replica to its first
answer (process, libraries, weights, a first pass). A scenario that declares `truth.cold_start.start_s` overrides the
profiles. Where neither says anything, 10 s are assumed (Sponge specification, §3.1), and the run says so. The delay is
spread evenly by ± `jitter` (a fraction). In a warm world, replicas that are ordered at time 0 are ready at once, as in
a cluster that has been running for long. The transfer of weights will be one of the parts of a cold start here.

A resize in place is in force within some tens of milliseconds (Sponge specification, §3.1: below 100 ms, simulated as
50 ms). The batch in flight is a choice of the scenario (§2.6): with `next_batch` it keeps its speed, because the
model's thread count changes only between batches; with `rescale` its remaining work runs at the new speed.

Must not know why a replica is started or resized.
"""

from collections.abc import Mapping
from typing import Final

from sloop.app.scenario import ResizeRule
from sloop.profile import Profile
from sloop.runlog.durations import VariantKey
from sloop.sim.truth.service import noise
from sloop.streams import stream
from sloop.units import s

LOADING: Final = "loading"
"""The step that every start reports; the simulator does not tell the steps of a cold start apart."""

START_S_ASSUMED: Final = 10.0
"""Neither measured nor declared: a new instance in the Sponge specification, §3.1."""


class ColdStartSampler:
    """The cold starts of one world, drawn from stream `cold_start`. `start_s` overrides `load_s` of all profiles."""

    def __init__(
        self,
        seed: int,
        profiles: Mapping[VariantKey, Profile],
        *,
        start_s: float | None = None,
        jitter: float = 0.0,
        warm: bool = True,
    ) -> None:
        self._load_s = {key: profile.load_s for key, profile in profiles.items()}
        self._start_s = start_s
        self._jitter = jitter
        self._warm = warm
        self._random = stream(seed, "cold_start")

    def draw_ns(self, now_ns: int, stage: str, variant: str) -> int:
        """How long it takes until a replica ordered now is ready."""
        if self._warm and now_ns == 0:
            return 0
        start_s = self._start_s
        if start_s is None:
            start_s = self._load_s.get((stage, variant)) or START_S_ASSUMED
        return round(s(start_s) * (1.0 + self._jitter * (2.0 * self._random.random() - 1.0)))


class ResizeSampler:
    """The resize delays of one world, drawn from stream `resize`."""

    def __init__(self, seed: int, *, delay_ns: int = 0, cv: float = 0.0, in_flight: ResizeRule = "next_batch") -> None:
        self._delay_ns = delay_ns
        self._factors = noise("normal", cv, stream(seed, "resize"))
        self.rescales = in_flight == "rescale"

    def draw_ns(self) -> int:
        """How long it takes until a resize ordered now is in force."""
        return round(self._delay_ns * next(self._factors))
