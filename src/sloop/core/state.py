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

from sloop.actions import Action
from sloop.core.application import ApplicationState
from sloop.core.ledger import Ledger
from sloop.core.life import FOLLOWING, LIVES, WorkerState, wrong_step
from sloop.core.rates import DeviceKey, DeviceLoad
from sloop.core.replica import LayerPipeline, Replica, ReplicaWorker
from sloop.core.weights import WeightRegistry
from sloop.vocabulary import Life, ReplicaId, Shape, WorkerId


class State:
    """All applications, and what they share: replicas and nodes."""

    def __init__(self, ledger: Ledger) -> None:
        self.applications: dict[str, ApplicationState] = {}
        """By key."""
        self.replicas: dict[ReplicaId, Replica] = {}
        self.workers: dict[WorkerId, ReplicaWorker] = {}
        self.ledger = ledger
        self.weights = WeightRegistry(ledger)
        self.devices: dict[DeviceKey, DeviceLoad] = {}
        """What runs on each device, if the beliefs say how replicas share it; none for devices where nothing runs."""
        self.next_worker = 0
        self.has_pipelines = False
        """Whether there has been any."""
        self.dissolving: dict[ReplicaId, LayerPipeline] = {}
        """Pipelines that are complete and still run batches."""

    def enter(self, now_ns: int, replica: Replica, state: WorkerState) -> None:
        """Move a replica, by its first worker, to another state."""
        worker = replica.workers[0]
        assert state in FOLLOWING[worker.state], wrong_step(worker.state, state)  # not a call for each start
        worker.state, stage, before, life = state, replica.stage, replica.life, LIVES[state]
        if life is before:
            return
        stage.pool.set_life(replica, life)
        replica.since_ns = now_ns
        if Life.READY in (before, life):
            stage.monitor.ready(now_ns, replica.millicores if life is Life.READY else -replica.millicores)
        if life is Life.READY and (stage.avoided_ns or stage.start_backoff.charged):
            stage.can_start_on(replica.node)
        stage.application.refresh(stage)

    def set_cores(self, now_ns: int, replica: Replica, cores: float) -> None:
        """Record that a resize took effect."""
        before = replica.millicores
        replica.stage.pool.set_cores(replica, cores)
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, replica.millicores - before)
        replica.stage.application.refresh(replica.stage)

    def set_shape(self, now_ns: int, replica: Replica, shape: Shape) -> None:
        """Record that a replica serves in another shape from now on."""
        before = replica.millicores
        replica.stage.pool.set_shape(replica, shape)
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, replica.millicores - before)
        replica.stage.application.refresh(replica.stage)

    def forget(self, now_ns: int, replica: Replica, out: list[Action]) -> None:
        """Remove a replica that has stopped or is lost, free what its workers reserve, and cancel its transfer if
        nobody else waits for it."""
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, -replica.millicores)
        for worker in replica.workers:
            self.ledger.release(worker.id)
            del self.workers[worker.id]
        if replica.pipeline is not None:
            del replica.pipeline.members[replica.id]
        if replica.is_provided:
            out += self.weights.leave(now_ns, replica.id, replica.transfer)
        del self.replicas[replica.id]
        replica.stage.pool.remove(replica)
        replica.stage.application.refresh(replica.stage)

    def remove_shadow(self, worker: ReplicaWorker) -> None:
        """Remove the shadow of a replica that goes on, and free its reservation."""
        worker.replica.workers.remove(worker)
        self.ledger.release(worker.id)
        del self.workers[worker.id]
