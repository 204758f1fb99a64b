"""What batch policies are shown of devices and queues: those of a core, and assumed ones for predictions and tests."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from sloop.core.rates import DeviceKey, DeviceLoad
from sloop.core.replica import Replica
from sloop.core.views import SharedBatch
from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, Interference
from sloop.vocabulary import Visit


class OfferedDevice(Struct, frozen=True, gc=False):
    """The idle replica, and its device, about which a batch policy is asked: a `BatchDevice`."""

    replica: Replica
    batch_max: int
    costs_ns: Sequence[int]
    devices: Mapping[DeviceKey, DeviceLoad]
    """What runs on the devices of all applications."""

    @property
    def key(self) -> DeviceKey:
        return self.replica.device_key

    @property
    def idle(self) -> int:
        key = self.replica.device_key
        return sum(replica.device_key == key for replica in self.replica.stage.pool.idle)

    @property
    def alone_costs_ns(self) -> Sequence[int]:
        return self.replica.service_rate.costs_ns

    @property
    def law(self) -> Interference:
        rate = self.replica.service_rate
        return rate.belief.interference if rate.is_shared else NO_SLOWDOWN

    @property
    def largest(self) -> DeviceDemand:
        rate = self.replica.service_rate
        return rate.belief.demand(self.batch_max, rate.slot)

    @property
    def running(self) -> Sequence[SharedBatch]:
        stage, key = self.replica.stage, self.replica.device_key
        replicas, load = stage.pool.replicas, self.devices.get(key)
        running = [
            SharedBatch(stage.name, len(batch.visits))
            for id, batch in stage.pool.running.items()
            if replicas[id].device_key == key
        ]
        if load is not None:
            others = [batch for batch in load.batches.values() if batch.stage != stage.name]
            running += [SharedBatch(batch.stage, batch.size) for batch in others]
        return running


class AssumedQueue(Struct, frozen=True, gc=False):
    """A `QueueView` of visits that do not wait: for predictions and tests."""

    visits: Sequence[Visit]
    wait_ns: int = 0
    remaining_ns: int = 0
    stage: str = "stage"


class AssumedDevice(Struct, frozen=True, gc=False):
    """A `BatchDevice` on which nothing runs, unless said otherwise: for predictions and tests."""

    batch_max: int
    costs_ns: Sequence[int]
    law: Interference = NO_SLOWDOWN
    largest: DeviceDemand = DeviceDemand()
    idle: int = 1
    running: Sequence[SharedBatch] = ()
    key: tuple[str, str] = ("", "")

    @property
    def alone_costs_ns(self) -> Sequence[int]:
        """Costs are given without what runs beside."""
        return self.costs_ns
