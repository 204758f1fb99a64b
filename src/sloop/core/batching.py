"""What batch policies are shown of devices and queues: those of a core, and assumed ones for predictions and tests."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from sloop.core.rates import DeviceKey, DeviceLoad, ServiceRate, cost_of
from sloop.core.replica import Replica
from sloop.core.views import SharedBatch
from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, Interference
from sloop.units import FOREVER_NS
from sloop.vocabulary import Visit


class OfferedDevice(Struct, frozen=True, gc=False):
    """The idle replica, and its device, about which a batch policy is asked: a `BatchDevice`."""

    replica: Replica
    rate: ServiceRate
    """Its speed with rows of the size that waits."""
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
        return self.rate.costs_ns

    @property
    def law(self) -> Interference:
        return self.rate.belief.interference if self.rate.is_shared else NO_SLOWDOWN

    @property
    def largest(self) -> DeviceDemand:
        return self.rate.belief.demand(self.rate.batch_max, self.rate.slot)

    @property
    def running(self) -> Sequence[SharedBatch]:
        stage, key = self.replica.stage, self.replica.device_key
        replicas, load = stage.pool.replicas, self.devices.get(key)
        running = [
            SharedBatch(stage.name, batch.rows)
            for id, batch in stage.pool.running.items()
            if replicas[id].device_key == key
        ]
        if load is not None:
            others = [batch for batch in load.batches.values() if batch.stage != stage.name]
            running += [SharedBatch(batch.stage, batch.size) for batch in others]
        return running


def fitting(visits: Sequence[Visit], batch_max: int, costs_ns: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Translate `batch_max` and `costs_ns` from rows to visits: how many of the first visits make the largest batch,
    and what the first k visits cost together.

    Visits run whole, so the rows of the largest batch are as close to `batch_max` as whole visits allow, above or below
    it: on average they are what the plan assumes. They are never more than one pass takes, with one exception: the
    first visit always runs, in several passes if it must. If too few visits wait to fill the batch, further ones are
    assumed to have the mean number of rows of those that wait.
    """
    most, rows, costs = len(costs_ns) - 1, 0, [0]
    for visit in visits:
        more = rows + visit.rows
        if rows and (more > most or more - batch_max > batch_max - rows):
            return len(costs) - 1, costs
        rows = more
        costs.append(cost_of(costs_ns, rows))
    count = len(costs) - 1
    if rows == count:
        return batch_max, costs_ns
    mean = rows / count
    limit = max(count, min(round(batch_max / mean), int(most / mean)))
    costs += [cost_of(costs_ns, min(most, round(mean * size))) for size in range(count + 1, limit + 1)]
    return limit, costs


class AssumedQueue(Struct, frozen=True, gc=False):
    """A `QueueView` of visits that do not wait: for predictions and tests."""

    visits: Sequence[Visit]
    wait_ns: int = 0
    remaining_ns: int = 0
    stage: str = "stage"
    others_due_ns: int = FOREVER_NS

    @property
    def waiting(self) -> int:
        """As in `QueueView`: no others wait."""
        return len(self.visits)


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
