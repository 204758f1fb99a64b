"""Truth from a recorded run: how long its batches took, by variant, size and cores, and which way its requests went.

Promises the run's own durations where it ran often enough, and profiles that follow them in between and are the given
ones elsewhere. What a live server's log says of this machine on that day is the best calibration there is; a policy
still believes its own profile.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import structs

from sloop.actions import StartBatch, StartReplica
from sloop.events import Finished, Resized
from sloop.profile import Profile, Sample
from sloop.profile.sample import sample_of
from sloop.runlog import Record
from sloop.sim.truth.service import Runs, Variant, is_measured
from sloop.sim.truth.ways import Went
from sloop.vocabulary import BatchId, ReplicaId

RUNS_MIN: Final = 20
"""Batches of one size on one core count, below which the profile's own cell stays."""


def runs_of(records: Iterable[tuple[int, Record]]) -> Runs:
    """How long each finished batch of a log took from its order to its answer, cells with few batches left out.

    Those a resize interrupted belong to no core count, and are left out, too.
    """
    found: dict[Variant, dict[tuple[int, float], list[int]]] = defaultdict(lambda: defaultdict(list))
    replicas: dict[ReplicaId, tuple[Variant, float]] = {}
    started: dict[BatchId, tuple[int, StartBatch, float]] = {}
    for now_ns, record in records:
        if isinstance(record, StartReplica):
            replicas[record.replica] = (record.spec.stage, record.spec.variant), record.spec.cores
        elif isinstance(record, Resized) and record.replica in replicas:
            replicas[record.replica] = replicas[record.replica][0], record.cores
        elif isinstance(record, StartBatch):
            started[record.batch] = now_ns, record, replicas[record.replica][1]
        elif isinstance(record, Finished) and record.batch in started:
            begun_ns, batch, cores = started.pop(record.batch)
            variant, cores_now = replicas[batch.replica]
            if cores == cores_now:
                found[variant][len(batch.requests), cores].append(now_ns - begun_ns)
    return {
        variant: {cell: runs_ns for cell, runs_ns in cells.items() if len(runs_ns) >= RUNS_MIN}
        for variant, cells in found.items()
    }


def ways_of(records: Iterable[tuple[int, Record]]) -> Went:
    """Which edges the requests of a log, and their parts, took when they left a stage where requests part."""
    found: dict[str, dict[tuple[int, int], tuple[int, ...]]] = defaultdict(dict)
    started: dict[BatchId, StartBatch] = {}
    for _, record in records:
        if isinstance(record, StartBatch):
            started[record.batch] = record
        elif isinstance(record, Finished) and (order := started.pop(record.batch, None)) is not None:
            found[order.stage] |= dict(zip(order.visits, record.edge_counts, strict=False))
    return {stage: went for stage, went in found.items() if went}


def as_recorded(profiles: Mapping[Variant, Profile], runs: Runs) -> dict[Variant, Profile]:
    """The profiles with every cell replaced that was recorded."""
    return {variant: _replaced(profile, runs.get(variant, {})) for variant, profile in profiles.items()}


def _replaced(profile: Profile, runs: Mapping[tuple[int, float], Sequence[int]]) -> Profile:
    recorded = {cell: sample_of(*cell, runs_ns) for cell, runs_ns in runs.items()}
    kept: dict[tuple[int, float], Sample] = {}
    if is_measured(profile):
        kept = {(sample.batch, sample.cores): sample for sample in profile.samples}
    cells = kept | recorded
    return structs.replace(profile, samples=tuple(cells[cell] for cell in sorted(cells))) if recorded else profile
