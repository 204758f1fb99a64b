"""Service: how long a batch really takes.

    service(b, c) = latency_ms(b, c) · error / ratio · noise        (sponge specification, §1.4)

`latency_ms` is a profile's P99; `ratio` says by how much it exceeds the true mean (1.0 to 1.1), `error` by how much the
profile is wrong about this variant, and the noise is normal with a coefficient of variation of some three per cent.
Exponential and deterministic noise exist for comparison with queueing theory.
Must not know beliefs, nor what they have learnt: it reads profiles of its own.
"""

from collections.abc import Mapping

from sloop.profile import Profile
from sloop.profile.profile import FLOOR_MS
from sloop.sim.truth.noise import Shape, factors
from sloop.streams import stream
from sloop.units import NS_PER_MS

Variant = tuple[str, str]
"""Stage and variant."""


class Service:
    """The world's service times, drawn from stream `service`."""

    def __init__(  # the parameters of the equation above
        self,
        seed: int,
        profiles: Mapping[Variant, Profile],
        *,
        shape: Shape = "normal",
        cv: float = 0.03,
        ratio: float = 1.0,
        errors: Mapping[Variant, float] | None = None,
    ) -> None:
        self._profiles = profiles
        self._ratio = ratio
        self._errors = errors or {}
        self._means_ns: dict[tuple[str, str, float], list[float]] = {}
        self.factors = factors(shape, cv, stream(seed, "service"))
        """The noise of one batch after the other, of mean 1."""

    def means_ns(self, stage: str, variant: str, cores: float) -> list[float]:
        """True mean durations in ns, indexed by batch size from 0 (always 0.0) to the profile's largest batch."""
        known = self._means_ns.get((stage, variant, cores))
        if known is None:
            profile = self._profiles[stage, variant]
            scale = NS_PER_MS * self._errors.get((stage, variant), 1.0) / self._ratio
            sizes = range(1, profile.max_batch + 1)
            known = [0.0, *(max(FLOOR_MS, profile.latency_ms.latency_ms(size, cores)) * scale for size in sizes)]
            self._means_ns[stage, variant, cores] = known
        return known
