"""The shapes in which a run's numbers are handed on: to tables, JSON, plots and comparisons. Values, no folding."""

from msgspec import Struct


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
    """Requests waiting at its end."""
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
