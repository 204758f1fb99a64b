"""How fast the machine of a log was, compared with what the profiles say.

Batch by batch: what it took, beside what the simulator would have drawn on average for the same rows, padded to the
same size. What the server's processes took of the cores, and took while the profiles were measured, is left out where
it is known, because a simulation adds it again. A log of some seconds under load is enough: `sloop serve` writes it,
`--speed` takes the result.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from sloop.actions import End, StartBatch
from sloop.app.application import Deployment
from sloop.app.scenario import ProcessesTruth
from sloop.errors import InputError
from sloop.events import Finished
from sloop.profile.profile import Profile
from sloop.runlog import Record, read_log
from sloop.runlog.durations import ANY_GRAPH, BATCHES_MIN, VariantKey
from sloop.runlog.processes import ProcessorUse
from sloop.runlog.replicas import ReplicaRecord
from sloop.runlog.run import RunState
from sloop.sim.replicas import ONE_ROW
from sloop.sim.truth.service import ServiceSampler
from sloop.sim.truth.sharing import alone, lost
from sloop.sim.world import profiles_of
from sloop.systems.replay import require_all, with_beginning
from sloop.vocabulary import ALONE, BatchId, Request, RequestId


def log_speed(log: Path, deployment: Deployment, processes: ProcessesTruth | None = None) -> float | None:
    """How many times as fast as the profiles say the machine of a log was, over all its batches that had a fixed number
    of cores for themselves, and whose size the profiles know; None if these were fewer than `BATCHES_MIN`, or if the
    log is of other applications. `processes` is what a simulation with this speed will have of them."""
    recorded = read_log(log)
    try:
        require_all(recorded, "the speed of its machine")
    except InputError:
        return None
    profiles = {key: each for application in deployment.applications for key, each in profiles_of(application).items()}
    node_cores = deployment.cluster[0].cores
    if processes is not None:
        profiles = {key: alone(profile, node_cores) for key, profile in profiles.items()}
    batches, use = _BatchTimes(profiles, node_cores), ProcessorUse()
    for now_ns, record in with_beginning(recorded):
        batches.append(now_ns, record)
        use.append(now_ns, record)
    if batches.count < BATCHES_MIN:
        return None
    beside_cores = use.rate_rps * (processes.request_us + processes.client_us) / 1e6 if processes is not None else 0.0
    return batches.expected_ns / (batches.actual_ns - batches.disturbed_ns * beside_cores)


class _BatchTimes:
    """A fold: the batches of a log, and what the profiles say that they take."""

    def __init__(self, profiles: Mapping[VariantKey, Profile], node_cores: float) -> None:
        self.count = 0
        self.expected_ns = self.actual_ns = self.disturbed_ns = 0.0
        """Also, what they would have lost if the processes had taken a core all the time."""
        self._profiles, self._service, self._node_cores = profiles, ServiceSampler(0, profiles), node_cores
        self._state = RunState(ANY_GRAPH)
        self._works: dict[RequestId, tuple[int, int]] = {}
        """Rows and size of requests that brought others than one row of the only size."""
        self._left_out: set[BatchId] = set()

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record; instants never decrease."""
        if isinstance(record, Request):
            if record.size or record.rows != 1:
                self._works[record.id] = record.rows, record.size
        elif isinstance(record, Finished):
            replica = self._state.replicas.get(record.replica)
            if replica is not None and replica.running is not None and replica.running.batch == record.batch:
                self._end(now_ns, replica, replica.running)
        elif isinstance(record, End):
            self._works.pop(record.request, None)
        self._state.append(now_ns, record)
        if isinstance(record, StartBatch):
            self._set_shared_apart()

    def _set_shared_apart(self) -> None:
        """Batches that share the cores of a node have no fixed number of them."""
        running = self._state.batches()
        for replica in running:
            is_shared = not replica.spec.slot.is_capped and len(running) > 1
            if (is_shared or replica.resize_ns) and replica.running is not None:
                self._left_out.add(replica.running.batch)

    def _end(self, now_ns: int, replica: ReplicaRecord, order: StartBatch) -> None:
        spec = replica.spec
        slot, key = structs.replace(spec.slot, cores=replica.cores), (spec.stage, spec.variant, spec.slot.hardware)
        profile = self._profiles.get(key)
        if profile is None or order.batch in self._left_out or replica.resize_ns or replica.group.shape != ALONE:
            return
        size = max(self._works.get(id, ONE_ROW)[1] for id in order.requests) if order.size else 0
        if size and not profile.knows_sizes:
            return
        means_ns = self._service.speed(*key[:2], slot).means_ns
        whole, rest = divmod(order.rows, len(means_ns) - 1)
        for rows in [len(means_ns) - 1] * whole + [rest] * (rest > 0):
            self.expected_ns += means_ns[rows] * self._service.size_factor(*key[:2], slot, size, rows)
        self.actual_ns += now_ns - replica.running_ns
        self.disturbed_ns += (now_ns - replica.running_ns) * lost(profile.cores_on(slot), self._node_cores)
        self.count += 1
