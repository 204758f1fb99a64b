"""Service: how long a batch really takes, from giving it to a replica until its answer is back.

As measured, where the profile keeps durations of the runs it stands on (`Sample.likely_ms`) and nothing else is
declared: each batch takes one of those of its size and cores, all equally likely, joined between cells as the profile's
table is. Otherwise, from the figures a profile promises,

    service(b, c) = latency_ms(b, c) · error / ratio · noise        (sponge specification, §1.4)

where `latency_ms` is a P99, `ratio` says by how much it exceeds the true mean (1.0 to 1.1), and the noise is normal
with a coefficient of variation of some three per cent. Exponential and deterministic noise exist for comparison with
queueing theory. In both, `error` says by how much the profile is wrong about this variant.
Where a run was recorded, its batches' durations come back in their order, cell by cell: a machine is slow for seconds
on end, which independent draws would not show.
Must not know beliefs, nor what they have learnt: it reads profiles of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Final

from msgspec import Struct

from sloop.profile import Profile, Table
from sloop.profile.profile import FLOOR_MS
from sloop.profile.sample import Sample
from sloop.sim.truth.noise import Shape, drawn, factors
from sloop.streams import stream
from sloop.units import NS_PER_MS

Variant = tuple[str, str]
"""Stage and variant."""
Runs = Mapping[Variant, Mapping[tuple[int, float], Sequence[int]]]
"""Variant → (batch, cores) → durations in ns, one batch after the other."""
RATIO: Final = 1.05
CV: Final = 0.03
"""Where nothing was measured or declared (sponge specification, §1.4)."""


class Speed(Struct, frozen=True, gc=False):
    """A variant on some cores: true mean durations in ns by batch size from 0 (always 0.0) to the profile's largest
    batch, and for each size the noise of one batch after the other, of mean 1."""

    means_ns: list[float]
    noises: list[Iterator[float]]


class Service:
    """The world's service times, drawn from stream `service`."""

    def __init__(  # the parameters of the equation above
        self,
        seed: int,
        profiles: Mapping[Variant, Profile],
        *,
        shape: Shape = "normal",
        cv: float | None = None,
        ratio: float | None = None,
        errors: Mapping[Variant, float] | None = None,
        recorded: Runs | None = None,
    ) -> None:
        self._profiles = profiles
        self._ratio = RATIO if ratio is None else ratio
        self._errors = errors or {}
        self._recorded = recorded or {}
        self._random = stream(seed, "service")
        self._noise = factors(shape, CV if cv is None else cv, self._random)
        self._as_measured = shape == "normal" and cv is None and ratio is None
        self._speeds: dict[tuple[str, str, float], Speed] = {}

    def speed(self, stage: str, variant: str, cores: float) -> Speed:
        """How fast a variant really is on `cores`; the same object each time."""
        known = self._speeds.get((stage, variant, cores))
        if known is None:
            profile, error = self._profiles[stage, variant], self._errors.get((stage, variant), 1.0)
            if self._as_measured and is_measured(profile):
                known = self._measured(profile, error, cores)
            else:
                known = self._declared(profile, error / self._ratio, cores)
            for size in range(1, len(known.means_ns)):
                runs_ns = self._recorded.get((stage, variant), {}).get((size, cores))
                if runs_ns:
                    known.means_ns[size] = mean_ns = fmean(runs_ns)
                    known.noises[size] = cycle([run_ns / mean_ns for run_ns in runs_ns])
            self._speeds[stage, variant, cores] = known
        return known

    def _declared(self, profile: Profile, scale: float, cores: float) -> Speed:
        sizes = range(1, profile.max_batch + 1)
        latency_ms = profile.latency_ms.latency_ms
        means_ns = [0.0, *(max(FLOOR_MS, latency_ms(size, cores)) * scale * NS_PER_MS for size in sizes)]
        return Speed(means_ns, [self._noise] * len(means_ns))

    def _measured(self, profile: Profile, error: float, cores: float) -> Speed:
        parts = parts_of(profile.samples)
        means_ns, noises = [0.0], [self._noise]
        for size in range(1, profile.max_batch + 1):
            durations_ms = [part.latency_ms(size, cores) for part in parts]
            mean_ms = fmean(durations_ms)
            means_ns.append(mean_ms * error * NS_PER_MS)
            noises.append(drawn([duration_ms / mean_ms for duration_ms in durations_ms], self._random))
        return Speed(means_ns, noises)


def is_measured(profile: Profile) -> bool:
    """Whether the profile says of every cell how its runs were spread."""
    return bool(profile.samples) and all(sample.likely_ms for sample in profile.samples)


def parts_of(samples: Sequence[Sample]) -> list[Table]:
    """A table over batch and cores for each of the equally likely durations, the shortest first.

    A cell with fewer durations than another counts each of them for several.
    """
    count = max(len(sample.likely_ms) for sample in samples)
    cells: list[dict[int, dict[float, float]]] = [{} for _ in range(count)]
    for sample in samples:
        durations_ms = sample.likely_ms
        for place, part in enumerate(cells):
            part.setdefault(sample.batch, {})[sample.cores] = durations_ms[place * len(durations_ms) // count]
    return [Table(part) for part in cells]
