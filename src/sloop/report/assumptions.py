"""What a run leaned on that nobody measured: a fold over the log, so that no figure hides where it comes from (law 7).

Promises to name every variant that ran on an assumed profile, and every batch size and core count beyond what was
measured. Knows profiles, not truth.
"""

from collections.abc import Iterable

from sloop.actions import ResizeReplica, StartBatch, StartReplica
from sloop.app.application import Application
from sloop.events import Resized
from sloop.profile.profile import Profile, Region
from sloop.runlog import Record
from sloop.vocabulary import ReplicaId, ReplicaSpec

Variant = tuple[str, str]


class Assumptions:
    """A `Sink` that keeps, per variant, whether it ran and how far beyond its measurements."""

    def __init__(self, application: Application) -> None:
        self._profiles: dict[Variant, Profile] = {
            (stage.name, variant.name): variant.profile
            for stage in application.stages
            for variant in stage.variants
            if variant.profile is not None
        }
        self._replicas: dict[ReplicaId, tuple[Variant, float]] = {}
        self._seen: set[tuple[ReplicaId, int]] = set()
        self._ran: set[Variant] = set()
        self._beyond: dict[Variant, set[tuple[int, float]]] = {}

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        kind = type(record)
        if kind is StartBatch:
            assert isinstance(record, StartBatch)
            key = (record.replica, len(record.requests))
            if key not in self._seen:
                self._seen.add(key)
                self._lean(*key)
        elif isinstance(record, StartReplica):
            self._place(record.replica, record.spec)
        elif isinstance(record, Resized | ResizeReplica) and record.replica in self._replicas:
            variant, _ = self._replicas[record.replica]
            self._replicas[record.replica] = (variant, record.cores)
            self._seen = {seen for seen in self._seen if seen[0] != record.replica}

    def _place(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        self._replicas[replica] = ((spec.stage, spec.variant), spec.cores)

    def _lean(self, replica: ReplicaId, batch: int) -> None:
        variant, cores = self._replicas.get(replica, (("", ""), 0.0))
        profile = self._profiles.get(variant)
        if profile is None:
            return
        self._ran.add(variant)
        if profile.is_extrapolated(batch, cores):
            self._beyond.setdefault(variant, set()).add((batch, cores))

    def lines(self) -> tuple[str, ...]:
        """One line for each thing leaned on, in the order of the application's variants."""
        return tuple(line for variant in self._profiles for line in self._lines(variant))

    def _lines(self, variant: Variant) -> Iterable[str]:
        profile, name = self._profiles[variant], "/".join(variant)
        if variant in self._ran and profile.origin == "assumed":
            yield f"{name}: assumed profile ({profile.source or 'no source given'})"
        beyond, region = self._beyond.get(variant), profile.region
        if beyond and region is not None:
            yield f"{name}: extrapolated to {_span(beyond)}, measured {_region(region)}"


def _span(points: set[tuple[int, float]]) -> str:
    batches, cores = [point[0] for point in points], [point[1] for point in points]
    return _region(Region(min(batches), max(batches), min(cores), max(cores)))


def _region(region: Region) -> str:
    batches = _range(region.batch_min, region.batch_max)
    return f"batch {batches} on {_range(region.cores_min, region.cores_max)} cores"


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"
