"""Shared devices: how much slower batches truly are for what runs beside them.

A device is an accelerator, or the cores of a node. A batch brings an amount of work, the time that it would take alone,
and proceeds at the rate 1/S, where S is the slowdown of its model's law among the batches that run (processor sharing;
PALDIA, specification section 3.4). When one begins or ends, all others are re-timed.

Laws and demands are those of the profiles, unless the scenario declares others (`truth.interference`). Where neither
says anything, replicas on cores that are only reserved (`Slot.is_capped`) divide the cores of their node in proportion
to what each computes with while it is alone; all others neither disturb nor are disturbed.

On the node of the server, edge, deciding process and, where it is local, the load generator (`truth.processes`) take a
core for each request, and the operating system lets them have it at once, because they mostly sleep. If batches leave
no core free, one of their threads waits meanwhile, and with it the batch: its threads meet after each operator. So of
two threads on two cores a batch loses all of this time (measured: 0.8 to 1.7 times, for bursts of 0.2 to 1 ms), on one
of two cores none. Replicas of such a node are therefore followed here also if their cores are capped.

Must not read the policies' beliefs: it has separate profiles.
"""

from collections.abc import Mapping
from math import fsum
from typing import Final

from msgspec import Struct, structs

from sloop.app.scenario import InterferenceTruth
from sloop.profile.interference import DeviceDemand, Interference, ProcessorSharing
from sloop.profile.profile import DeviceSharing, Profile, Sample
from sloop.runlog.durations import VariantKey
from sloop.vocabulary import BatchId, ReplicaSpec, Slot

BY_CORES: Final = ProcessorSharing("sm_use")
"""The law of replicas on cores that are only reserved: each batch demands a fraction of its node's cores."""


def lost(cores: float, node_cores: float) -> float:
    """The time that batches on so many cores together lose for each second that the server's processes take."""
    return min(1.0, max(0.0, cores + 1.0 - node_cores))


def alone(profile: Profile, node_cores: float) -> Profile:
    """The profile without what ran beside its measurements, on a node with so many cores: a simulation in which the
    server's processes run must not count them twice."""
    if profile.accelerator:
        return profile
    samples = [
        structs.replace(each, likely_ms=tuple(ms * _kept(each, node_cores) for ms in each.likely_ms))
        for each in profile.samples
    ]
    return structs.replace(profile, samples=tuple(samples))


def _kept(sample: Sample, node_cores: float) -> float:
    """The share of its durations that a sample would have alone."""
    return 1.0 - lost(sample.cores, node_cores) * sample.beside_cores


class BatchWork(Struct):
    """A batch on a device."""

    law: Interference
    demand: DeviceDemand
    left_ns: float
    """What it would still take alone."""
    error: float = 1.0
    """As in `InterferenceTruth`."""
    factor: float = 1.0
    """How many times as long as alone it takes now."""


class SharedDevice:
    """The batches that run on one device, and what is left of each."""

    __slots__ = ("_is_due", "_now_ns", "_running", "due")

    def __init__(self) -> None:
        self._now_ns = 0
        self._running: dict[BatchId, BatchWork] = {}
        self._is_due = False
        """Whether the factors are out of date."""
        self.due = -1, -1
        """The next end, and the sequence number of the cluster's pending entry for it."""

    def join(self, now_ns: int, id: BatchId, batch: BatchWork) -> None:
        """A batch begins."""
        self._advance(now_ns)
        self._running[id] = batch
        self._is_due = True

    def disturb(self, now_ns: int, taken_ns: float, node_cores: float) -> None:
        """The server's processes take so much of these cores, from the batches in proportion to their own."""
        self._advance(now_ns)
        self._renew()
        used = fsum(batch.demand.sm_use for batch in self._running.values())
        for batch in self._running.values():
            share = batch.demand.sm_use / used if used else 0.0
            batch.left_ns += taken_ns * lost(used * node_cores, node_cores) * share / batch.factor

    def leave(self, now_ns: int, id: BatchId) -> None:
        """A batch has ended or was stopped; one that runs no more is ignored."""
        self._advance(now_ns)
        if self._running.pop(id, None) is not None:
            self._is_due = True

    def scale(self, now_ns: int, id: BatchId, ratio: float) -> None:
        """What is left of a batch takes `ratio` times as long alone from now on."""
        self._advance(now_ns)
        self._running[id].left_ns *= ratio

    def end_ns(self, id: BatchId) -> int:
        """When a batch ends if nothing begins or ends before."""
        self._renew()
        batch = self._running[id]
        return self._now_ns + round(batch.left_ns * batch.factor)

    def next_end(self) -> tuple[int, BatchId] | None:
        """The next end, and whose it is; of equal ones that of the batch that began first."""
        return min(((self.end_ns(id), id) for id in self._running), default=None, key=lambda pair: pair[0])

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self._now_ns
        if passed_ns and self._running:
            self._renew()
            for batch in self._running.values():
                batch.left_ns = max(0.0, batch.left_ns - passed_ns / batch.factor)
        self._now_ns = now_ns

    def _renew(self) -> None:
        if not self._is_due:
            return
        self._is_due = False
        demands = [batch.demand for batch in self._running.values()]
        for place, batch in enumerate(self._running.values()):
            factor = batch.law.slowdown(batch.demand, demands[:place] + demands[place + 1 :])
            batch.factor = 1.0 + batch.error * (factor - 1.0)


class TrueSharing(Struct, frozen=True):
    """How one variant on one kind of hardware shares its device."""

    variant: str
    sharing: DeviceSharing
    error: float

    def work(self, size: int, slot: Slot, work_ns: int) -> BatchWork:
        """A batch of this size that takes `work_ns` alone."""
        demand = self.sharing.demand(size, share=slot.share, is_capped=slot.is_capped, variant=self.variant)
        return BatchWork(self.sharing.law, demand, float(work_ns), self.error)


class SharingTruth:
    """How the variants of an application version share their devices."""

    def __init__(
        self,
        profiles: Mapping[VariantKey, Profile],
        declared: InterferenceTruth,
        node_cores: Mapping[str, float],
        server: str | None = None,
    ) -> None:
        """`node_cores` are the cores of each node, by its name. `server` is the one whose cores the server's processes
        take, if they take any."""
        found = {key: _true(profile, declared) for key, profile in profiles.items()}
        self._sharing = {
            key: TrueSharing(key[1], sharing, declared.error) for key, sharing in found.items() if sharing is not None
        }
        self._unknown = {} if declared.error == 0.0 else {k: each for k, each in profiles.items() if found[k] is None}
        self._node_cores = node_cores
        self._error, self._server = declared.error, server

    def of(self, spec: ReplicaSpec) -> TrueSharing | None:
        """That of a replica; None if it neither disturbs nor is disturbed."""
        slot, key = spec.slot, (spec.stage, spec.variant, spec.slot.hardware)
        found = self._sharing.get(key)
        if found is not None:
            return found if found.sharing.holds_on(slot) else None
        profile, node_cores = self._unknown.get(key), self._node_cores.get(spec.node or "")
        if profile is None or node_cores is None or slot.accelerator:
            return None
        if slot.is_capped and spec.node != self._server:
            return None
        part = min(1.0, profile.cores_on(slot) / node_cores)
        shared = DeviceSharing(law=BY_CORES, full_batch=profile.max_batch, sm_use={1: part})
        return TrueSharing(spec.variant, shared, self._error)


class ProcessesWork(Struct, frozen=True):
    """What the server's processes take of the cores of a node for each request."""

    node: str
    node_cores: float
    request_ns: float


def _true(profile: Profile, declared: InterferenceTruth) -> DeviceSharing | None:
    """What is true of the batches of a profile."""
    if declared.error == 0.0:
        return None
    believed = profile.sharing
    if declared.law is None:
        if believed is None or declared.bandwidth is None:
            return believed
        return structs.replace(believed, bandwidth=declared.bandwidth)
    found = believed or DeviceSharing(full_batch=profile.max_batch)
    bandwidth = found.bandwidth if declared.bandwidth is None else declared.bandwidth
    return structs.replace(found, law=declared.law, bandwidth=bandwidth)
