"""The devices of the simulated cluster on which batches run beside each other: one that begins or ends changes when the
others end. Must not import beliefs, policies or the core."""

from msgspec import structs

from sloop.events import Finished
from sloop.sim.happenings import DeviceDue, Pending
from sloop.sim.replicas import EndsLater, SimulatedReplica
from sloop.sim.truth.sharing import ProcessesWork, SharedDevice
from sloop.units import FOREVER_NS
from sloop.vocabulary import BatchId


class SimulatedDevices:
    """All devices, by node and accelerator, or "" for the cores of the node."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._devices: dict[tuple[str, str], SharedDevice] = {}
        self._replicas: dict[BatchId, SimulatedReplica] = {}
        """The replicas whose batches run on them."""

    def join(self, now_ns: int, replica: SimulatedReplica, work_ns: int, ends: EndsLater) -> None:
        """A batch begins that takes `work_ns` alone; all others on its device slow down."""
        assert replica.sharing is not None, f"a batch of {replica.spec.stage} is disturbed by nothing"
        device = self._devices.setdefault(replica.device, SharedDevice())
        self._replicas[ends.batch] = replica
        replica.ends = ends
        replica.batch_end = (FOREVER_NS, -1, ends.finished) if ends.finished is not None else None
        device.join(now_ns, ends.batch, replica.sharing.work(replica.size, replica.slot, work_ns))
        self._await(replica.device)

    def disturb(self, now_ns: int, processes: ProcessesWork) -> None:
        """A request has come to the server on a node."""
        key = processes.node, ""
        device = self._devices.get(key)
        if device is not None:
            device.disturb(now_ns, processes.request_ns, processes.node_cores)
            self._await(key)

    def leave(self, now_ns: int, replica: SimulatedReplica) -> None:
        """A replica's batch does not run on its device any more, if it did."""
        if replica.ends is not None:
            self._devices[replica.device].leave(now_ns, replica.ends.batch)
            del self._replicas[replica.ends.batch]
            replica.ends = None
            self._await(replica.device)

    def scale(self, now_ns: int, replica: SimulatedReplica, batch: BatchId, ratio: float) -> None:
        """What is left of a batch takes `ratio` times as long from now on."""
        self._devices[replica.device].scale(now_ns, batch, ratio)
        self._await(replica.device)

    def end_ns(self, replica: SimulatedReplica, batch: BatchId) -> int:
        """When a batch ends if none begins or ends before."""
        return self._devices[replica.device].end_ns(batch)

    def end(self, now_ns: int, sequence: int, due: DeviceDue) -> Finished | None:
        """The next batch of a device ends, unless the entry is out of date. Returns what the core is told now."""
        device = self._devices[due.device]
        if sequence != device.due[1]:
            return None
        first = device.next_end()
        assert first is not None, f"nothing runs on {due.device}"
        replica = self._replicas[first[1]]
        ends = replica.ends
        assert ends is not None, f"batch {first[1]} does not run on {due.device}"
        device.due = -1, -1
        self.leave(now_ns, replica)
        if ends.finished is None:
            return None
        finished = structs.replace(ends.finished, service_ns=now_ns - ends.began_ns)
        reported_ns = now_ns + ends.late_ns
        if ends.again_ns is not None:
            self._pending.add(reported_ns + ends.again_ns, finished)
        replica.batch_end = reported_ns, -1, finished
        if not ends.late_ns:
            return finished
        replica.batch_end = reported_ns, self._pending.add(reported_ns, finished), finished
        return None

    def _await(self, key: tuple[str, str]) -> None:
        """Look at a device when the next batch ends there."""
        device = self._devices[key]
        first = device.next_end()
        if first is None:
            device.due = -1, -1
        elif first[0] != device.due[0]:
            device.due = first[0], self._pending.add(first[0], DeviceDue(key))
