"""How fast the machine of a log was, compared with what the profiles say.

Batch by batch: what it took, beside what the simulator would have drawn on average for the same rows, padded to the
same size. What the server's processes took of the cores, and took while the profiles were measured, is left out where
it is known, because a simulation adds it again. A log of some seconds under load is enough: `sloop serve` writes it,
`--speed` takes the result.

Only batches that begin when the one before ends count, if there are enough: a processor that has slept is slower for
some milliseconds (a quarter on the machines where this was seen), but where there are pauses, requests are in time
anyway.

The speed has an error, since durations vary, and since a machine is slow for seconds at a time. Durations that follow
each other are therefore not independent, but those of long parts of the log nearly are (the method of batch means; Law
and Kelton, Simulation Modeling and Analysis). The error follows from how much ten to twenty parts differ.
"""

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from sloop.actions import End, StartBatch
from sloop.app.application import Deployment
from sloop.app.scenario import ProcessesTruth
from sloop.errors import InputError
from sloop.events import Finished
from sloop.profile.passes import MachineSpeed
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
from sloop.units import FOREVER_NS, NS_PER_MS
from sloop.vocabulary import ALONE, BatchId, ReplicaId, Request, RequestId

PARTS_MAX: Final = 20
"""When there are so many parts, each two become one."""
PAUSE_NS: Final = NS_PER_MS
"""A replica that is idle for longer before a batch has paused."""


def log_speed(log: Path, deployment: Deployment, processes: ProcessesTruth | None = None) -> MachineSpeed | None:
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
    parts = next((parts for parts in (batches.busy, batches.all) if parts.count >= BATCHES_MIN), None)
    if parts is None:
        return None
    beside_cores = use.rate_rps * (processes.request_us + processes.client_us) / 1e6 if processes is not None else 0.0
    return parts.speed(beside_cores)


class _PartTimes(Struct):
    """Sums over consecutive batches."""

    count: int = 0
    expected_ns: float = 0.0
    actual_ns: float = 0.0
    disturbed_ns: float = 0.0
    """What they would have lost if the server's processes had taken a core all the time."""

    def add(self, other: "_PartTimes") -> None:
        """Add further batches."""
        self.count += other.count
        self.expected_ns += other.expected_ns
        self.actual_ns += other.actual_ns
        self.disturbed_ns += other.disturbed_ns


class _Parts:
    """Consecutive batches in parts of equally many, the last of fewer."""

    def __init__(self) -> None:
        self._parts = [_PartTimes()]
        self._per_part = 1

    @property
    def count(self) -> int:
        """How many batches there were."""
        return sum(part.count for part in self._parts)

    def speed(self, beside_cores: float) -> MachineSpeed:
        """The speed, if the server's processes took so many cores; a ratio estimate."""
        expected_ns = [part.expected_ns for part in self._parts]
        actual_ns = [part.actual_ns - beside_cores * part.disturbed_ns for part in self._parts]
        factor, count = sum(expected_ns) / sum(actual_ns), len(self._parts)
        off_ns = [expected - factor * actual for expected, actual in zip(expected_ns, actual_ns, strict=True)]
        error = sqrt(sum(off * off for off in off_ns) * count / (count - 1)) / sum(actual_ns)
        return MachineSpeed(factor, error)

    def add(self, batch: _PartTimes) -> None:
        """Add one batch."""
        if self._parts[-1].count == self._per_part:
            if len(self._parts) == PARTS_MAX:
                for first, second in zip(self._parts[::2], self._parts[1::2], strict=True):
                    first.add(second)
                del self._parts[1::2]
                self._per_part *= 2
            self._parts.append(_PartTimes())
        self._parts[-1].add(batch)


class _BatchTimes:
    """A fold: the batches of a log, and what the profiles say that they take."""

    def __init__(self, profiles: Mapping[VariantKey, Profile], node_cores: float) -> None:
        self.all, self.busy = _Parts(), _Parts()
        """`busy` are those that began when the one before on their replica ended."""
        self._profiles, self._service, self._node_cores = profiles, ServiceSampler(0, profiles), node_cores
        self._state = RunState(ANY_GRAPH)
        self._works: dict[RequestId, tuple[int, int]] = {}
        """Rows and size of requests that brought others than one row of the only size."""
        self._left_out: set[BatchId] = set()
        self._ended_ns: dict[ReplicaId, int] = {}

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record; instants never decrease."""
        if isinstance(record, Request):
            if record.size or record.rows != 1:
                self._works[record.id] = record.rows, record.size
        elif isinstance(record, Finished):
            replica = self._state.replicas.get(record.replica)
            if replica is not None and replica.running is not None and replica.running.batch == record.batch:
                self._end(now_ns, replica, replica.running)
                self._ended_ns[record.replica] = now_ns
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
        expected_ns = sum(
            means_ns[rows] * self._service.size_factor(*key[:2], slot, size, rows)
            for rows in [len(means_ns) - 1] * whole + [rest] * (rest > 0)
        )
        taken_ns = now_ns - replica.running_ns
        lost_ns = taken_ns * lost(profile.cores_on(slot), self._node_cores)
        times = _PartTimes(1, expected_ns, taken_ns, lost_ns)
        self.all.add(times)
        if replica.running_ns - self._ended_ns.get(replica.id, -FOREVER_NS) <= PAUSE_NS:
            self.busy.add(times)
