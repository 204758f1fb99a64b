"""The shapes in which a run's numbers are handed on: to tables, JSON, plots and comparisons. Values, no folding."""

from msgspec import Struct


class StageRow(Struct, frozen=True, kw_only=True):
    """What one stage of a run saw. None where nothing came."""

    stage: str
    visits: int
    """Waits that ended in a batch: one for each request, or part of one, that came so far."""
    mean_wait_ms: float | None
    max_wait_ms: float | None
    batches: int
    mean_batch: float | None
    max_batch: int
    dropped: int
    rejected: int
    failed: int


class RouteRow(Struct, frozen=True, kw_only=True):
    """Answers to requests that visited the same stages; of rare routes together, `stages` is empty."""

    stages: tuple[str, ...]
    slo_ms: float
    """The path's own deadline where the application has one, else the application's."""
    answered: int
    served: int
    mean_ms: float
    p99_ms: float


class RunRow(Struct, frozen=True, kw_only=True):
    """One run in one row: the keys of `sloop simulate --json`. Latencies are None where nothing was answered."""

    system: str
    seed: int | None
    requests: int
    served: int
    late: int
    dropped: int
    rejected: int
    failed: int
    attainment: float
    goodput_rps: float
    mean_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    core_seconds: float
    usd: float
    accuracy: float | None
    cold_starts: int
    wall_s: float
    assumed: tuple[str, ...] = ()
    """What this run leaned on that nobody measured, each with its reason (law 7)."""
    stages: tuple[StageRow, ...] = ()
    """Where the application is known, each of its stages."""
    routes: tuple[RouteRow, ...] = ()
    """Where it has several, the ways that requests took."""

    @property
    def violations(self) -> float:
        """Share of requests that did not get their answer in time, 0 to 1."""
        return 1.0 - self.attainment


class Second(Struct, frozen=True):
    """One second of a run. Ends are those of the requests that arrived in it."""

    start_s: int
    arrivals: int
    served: int
    late: int
    dropped: int
    rejected: int
    failed: int
    cores: float
    """Allocated, mean over the second."""
    queue: int
    """Requests waiting at its end; in an application of several stages, visits to them."""
    worst_ms: float
    """The longest latency of its answered requests; 0 where there is none."""

    @property
    def violations(self) -> float:
        """Share of its arrivals that were not served in time, 0 to 1; 0 for a second without arrivals."""
        return (self.late + self.dropped + self.rejected + self.failed) / self.arrivals if self.arrivals else 0.0


class ServiceError(Struct, frozen=True):
    """Estimate and outcome side by side, over the finished batches of one variant."""

    stage: str
    variant: str
    batches: int
    believed_ms: float
    """Mean believed duration of a batch when it was started."""
    actual_ms: float
    """Mean measured duration."""
    mape: float
    """Mean of |actual - believed| / believed."""

    @property
    def bias(self) -> float:
        """How much longer batches took than was believed: 0.1 is ten per cent longer."""
        return self.actual_ms / self.believed_ms - 1.0 if self.believed_ms else 0.0
