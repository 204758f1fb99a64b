"""A profile: how fast a model is on some hardware, how large and slow to load it is, and where each figure comes from.

A plain value. Promises that provenance travels with the figures (law 7); knows nothing of how they were measured,
where they are stored, or of any policy that reads them.
"""

from math import isfinite
from typing import Literal

from msgspec import Struct, structs

from sloop.profile.forms import Latency, Quadratic, Table
from sloop.profile.sample import Sample

Origin = Literal["measured", "published", "fitted", "assumed"]
"""`measured` by sloop; `published` as printed; `fitted` to published figures; `assumed` by whoever wrote it down."""

FLOOR_MS = 1e-3
"""No batch takes less: keeps a fit with a negative intercept from promising nothing at all, or less."""


class Region(Struct, frozen=True, forbid_unknown_fields=True):
    """The batches and cores that were measured; beyond them a profile extrapolates."""

    batch_min: int
    batch_max: int
    cores_min: float
    cores_max: float

    def has(self, batch: int, cores: float) -> bool:
        """Whether the point lies inside, borders included."""
        return self.batch_min <= batch <= self.batch_max and self.cores_min <= cores <= self.cores_max


class Fit(Struct, frozen=True, forbid_unknown_fields=True):
    """A form with its parameters, and how well it meets the points it was fitted to.

    `mape` and `max_error` are relative errors as fractions (0.05 is 5 %); `r2` is about absolute latencies.
    """

    params: Latency
    r2: float
    mape: float
    max_error: float


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one model's speed. `latency_ms` is the form in use; `fits` are others that were tried."""

    latency_ms: Latency
    max_batch: int
    max_cores: float
    load_s: float = 0.0
    """From the order to start a replica to its first answer: process, libraries, weights, a first pass."""
    memory_bytes: int = 0
    hardware: str = ""
    origin: Origin = "assumed"
    source: str = ""
    """Where from: a document with its table or section, or the command that measured it."""
    software: str = ""
    date: str = ""
    """ISO date of the measurement or publication."""
    model_digest: str = ""
    """SHA-256 of the model file that was measured, so that a changed model is noticed."""
    measured: Region | None = None
    samples: tuple[Sample, ...] = ()
    fits: dict[str, Fit] = {}  # msgspec copies the empty dict for each profile

    def __post_init__(self) -> None:
        """ValueError with the field's name where a figure is out of its range."""
        if self.max_batch < 1:
            raise ValueError(f"max_batch is {self.max_batch}; it must be at least 1")
        if not (self.max_cores > 0 and isfinite(self.max_cores)):
            raise ValueError(f"max_cores is {self.max_cores}; it must be positive")
        if not (self.load_s >= 0 and isfinite(self.load_s)):
            raise ValueError(f"load_s is {self.load_s}; it must not be negative")
        if self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is {self.memory_bytes}; it must not be negative")
        for batch in (1, self.max_batch):
            latency_ms = self.latency_ms.latency_ms(batch, self.max_cores)
            if not (latency_ms > 0 and isfinite(latency_ms)):
                raise ValueError(f"latency_ms is {latency_ms:g} ms at batch {batch} on {self.max_cores:g} cores")

    @property
    def region(self) -> Region | None:
        """What was measured: as declared, else the span of the samples or table cells; None where nothing says."""
        if self.measured is not None:
            return self.measured
        if self.samples:
            return _span([(sample.batch, sample.cores) for sample in self.samples])
        if isinstance(self.latency_ms, Table):
            return _span([(batch, cores) for batch, row in self.latency_ms.table.items() for cores in row])
        return None

    def is_extrapolated(self, batch: int, cores: float) -> bool:
        """Whether the latency there goes beyond what was measured; False where nothing says what was."""
        region = self.region
        if region is None:
            return False
        if isinstance(self.latency_ms, Quadratic):
            return not region.batch_min <= batch <= region.batch_max
        return not region.has(batch, cores)

    def with_fit(self, name: str) -> "Profile":
        """The same profile, speaking through the fit called `name`. KeyError where there is none."""
        return structs.replace(self, latency_ms=self.fits[name].params)


def _span(points: list[tuple[int, float]]) -> Region:
    batches = [point[0] for point in points]
    cores = [point[1] for point in points]
    return Region(min(batches), max(batches), min(cores), max(cores))
