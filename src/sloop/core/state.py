"""The core's mutable state. Only the data path and the control path change it.

Nothing in it depends on whether the driver is a live server or the simulator. In order of reading:

    queue        the waiting visits of a stage, and when to search them next for passed deadlines
    rates        the batch sizes and rates that the current plan has for a stage; the believed speed of equal replicas;
                 the batches that run beside each other on one device
    replica      one replica, from the order to start it until it is gone, with its running batch; a stage's replicas:
                 which are idle, how much they can serve together
    stage        one stage: all of the above, how soon a lost replica is replaced, why no replica serves
    application  one version of an application: its stages and open requests
    state        all applications, replicas and nodes
"""

from typing import Final

from sloop.actions import Action
from sloop.core.application import ApplicationState
from sloop.core.ledger import Ledger
from sloop.core.life import FOLLOWING, LIVES, WorkerState, wrong_step
from sloop.core.rates import DeviceKey, DeviceLoad
from sloop.core.replica import LayerPipeline, Replica, ReplicaWorker, shape_of
from sloop.core.weights import WeightRegistry
from sloop.vocabulary import Life, ReplicaId, Shape, Slot, WorkerId

READY: Final = Life.READY
"""Looked up here once, not for each start."""


class State:
    """All applications, and what they share: replicas and nodes."""

    def __init__(self, ledger: Ledger, first_worker: int = 0) -> None:
        self.applications: dict[str, ApplicationState] = {}
        """By key."""
        self.replicas: dict[ReplicaId, Replica] = {}
        self.workers: dict[WorkerId, ReplicaWorker] = {}
        self.ledger = ledger
        self.weights = WeightRegistry(ledger)
        self.devices: dict[DeviceKey, DeviceLoad] = {}
        """What runs on each device, if the beliefs say how replicas share it; none for devices where nothing runs."""
        self.first_worker = self.next_worker = first_worker
        self.dissolving: dict[ReplicaId, LayerPipeline] = {}
        """Pipelines that are complete and still run batches."""

    def enter(self, now_ns: int, worker: ReplicaWorker, state: WorkerState) -> None:
        """Move a worker to another state. The first one of a replica makes it live on, the others give it another
        shape."""
        assert state in FOLLOWING[worker.state], wrong_step(worker.state, state)  # not a call for each start
        replica = worker.replica
        worker.state, stage, before, life = state, replica.stage, replica.life, LIVES[state]
        if worker.shadow is not None:
            self._reshape(now_ns, replica)
            return
        if life is before:
            return
        pool = stage.pool
        pool.set_life(replica, life)
        replica.since_ns = now_ns
        if life is READY:
            stage.monitor.ready(now_ns, replica.millicores)
            if replica.id not in pool.running:
                pool.add_idle(replica)
            if stage.avoided_ns or stage.start_backoff.charged:
                stage.can_start_on(replica.node)
        elif before is READY:
            stage.monitor.ready(now_ns, -replica.millicores)
            if replica.id not in pool.running:
                pool.remove_idle(replica)
        stage.application.refresh(stage)

    def change(self, now_ns: int, replica: Replica, slot: Slot, shape: Shape) -> None:
        """A resize took effect, or a replica serves in another shape from now on."""
        before = replica.millicores
        replica.stage.pool.change(replica, slot, shape)
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, replica.millicores - before)
        replica.stage.application.refresh(replica.stage)

    def _reshape(self, now_ns: int, replica: Replica) -> None:
        """A worker beside the first one serves, or does not any more, or was told to stop."""
        replica.stage.pool.note_change(replica)
        shape = shape_of(worker for worker in replica.shadows if worker.state is WorkerState.SERVING)
        if shape != replica.shape:
            self.change(now_ns, replica, replica.slot, shape)

    def forget(self, now_ns: int, worker: ReplicaWorker, out: list[Action]) -> None:
        """Remove a worker that has stopped or is lost, and free what it reserves. With its first one a replica is gone,
        with all others; its transfer is cancelled if nobody else waits for it."""
        replica = worker.replica
        gone = [worker] if worker.shadow is not None else replica.workers.copy()
        for left in gone:
            self.ledger.release(left.id)
            del self.workers[left.id]
            replica.workers.remove(left)
        if replica.workers:
            self._reshape(now_ns, replica)
            return
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, -replica.millicores)
        replica.pipeline = None
        if replica.is_provided:
            out += self.weights.leave(now_ns, replica.id, replica.transfer)
        del self.replicas[replica.id]
        replica.stage.pool.remove(replica)
        replica.stage.application.refresh(replica.stage)
