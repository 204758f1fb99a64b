"""Pipelines: parts start together, serve together, complete themselves, and stop or fall apart together."""

import pytest
from msgspec import structs

from sloop.actions import CancelTransfer, Decided, StartBatch, StartWorker, StopWorker, Transfer
from sloop.core.pipeline import layers_of
from sloop.core.views import Provisioning, ReplicaStart, StartCosts, WeightChain
from sloop.events import (
    BatchLost,
    BatchSilent,
    Finished,
    TransferFailed,
    Transferred,
    Woke,
    WorkerCompleted,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.units import ms, s
from sloop.vocabulary import (
    ALONE,
    STORE,
    BatchId,
    LayerSet,
    Life,
    ModelWeights,
    Node,
    ReplicaId,
    TransferId,
    bounds_of,
    parts_at,
)
from tests.core.scene import Scene, plan_of, request
from tests.core.test_provision import NODES, WEIGHTS, Scripted

BOUNDS = (0, 1, 3)
LAYER_BYTES = (100, 100, 100)
PAIR = Provisioning(
    (ReplicaStart(0, chain=0, pipeline=0), ReplicaStart(1, chain=1, pipeline=0)),
    (WeightChain(STORE, ("n0",), LayerSet(0, 1)), WeightChain(STORE, ("n1",), LayerSet(1, 3))),
    pipelines=(BOUNDS,),
)
R0, R1, R2 = (ReplicaId(number) for number in range(3))


def scene_of(
    *answers: Provisioning,
    replicas: int = 2,
    keeps: bool = True,
    chains: bool = False,
    nodes: tuple[Node, ...] = NODES,
) -> Scene:
    policy = Scripted(keeps, chains=chains)
    policy.answers.extend((*answers, *[Provisioning(())] * 99))
    made = Scene(plan_of(replicas), nodes=nodes, provision=policy)
    made.application.parts.starts["only", "a", ""] = StartCosts(WEIGHTS, layer_bytes=LAYER_BYTES)  # type: ignore[index]
    return made


def serving(**options: object) -> Scene:
    """A pipeline of two parts that serves; each has ordered the other layers."""
    scene = scene_of(PAIR, **options)  # type: ignore[arg-type]
    scene.act(0, Woke())
    scene.act(1, Transferred(TransferId(0), "n0"), WorkerReady(R0), Transferred(TransferId(1), "n1"))
    scene.act(2, WorkerReady(R1))
    return scene


def serving_beside_a_whole() -> Scene:
    """The same, and a third replica with the whole model."""
    third = Provisioning((ReplicaStart(2, chain=0),), (WeightChain(STORE, ("n2",)),))
    scene = serving()
    scene.application.parts.policies.provision.answers.insert(0, third)  # type: ignore[attr-defined]
    scene.script.target = plan_of(3)
    scene.act(1_000, Woke())
    scene.act(1_001, Transferred(TransferId(4), "n2"), WorkerReady(R2))
    return scene


def of(kind: type, actions: object) -> list[object]:
    return [each for each in actions if isinstance(each, kind)]  # type: ignore[attr-defined]


def lives(scene: Scene) -> list[Life]:
    return [each.life for each in scene.core.state.replicas.values()]


def test_parts_are_ordered_with_their_layers() -> None:
    scene = scene_of(PAIR)
    actions = scene.act(0, Woke())
    assert of(Transfer, actions) == [
        Transfer(TransferId(0), ModelWeights("a", 100, LayerSet(0, 1)), STORE, ("n0",)),
        Transfer(TransferId(1), ModelWeights("a", 200, LayerSet(1, 3)), STORE, ("n1",)),
    ]
    starts = [each for each in actions if isinstance(each, StartWorker)]
    assert [(each.spec.shape, each.pipeline, each.place) for each in starts] == [
        (parts_at(BOUNDS), R0, place) for place in range(2)
    ]
    assert scene.core.state.ledger.free_memory_bytes("n0") == 1000 - 100 - 300, "room for the whole model at once"


def test_parts_serve_when_all_are_ready_and_then_get_the_other_layers() -> None:
    scene = scene_of(PAIR)
    scene.act(0, Woke())
    assert not scene.act(1, Transferred(TransferId(0), "n0"), WorkerReady(R0), WorkerReady(R0))
    assert not of(StartBatch, scene.act(1.5, request(0, at_ms=1.5))), "one part is not enough"
    actions = scene.act(2, Transferred(TransferId(1), "n1"), WorkerReady(R1))
    assert of(Transfer, actions) == [
        Transfer(TransferId(2), ModelWeights("a", 200, LayerSet(0, 1).others), STORE, ("n0",), completes=(R0,)),
        Transfer(TransferId(3), ModelWeights("a", 100, LayerSet(1, 3).others), STORE, ("n1",), completes=(R1,)),
    ]
    assert [each.replica for each in of(StartBatch, actions)] == [R0]  # type: ignore[attr-defined]
    assert [each.replica for each in of(StartBatch, scene.act(3, request(1, at_ms=3)))] == [R1]  # type: ignore[attr-defined]
    assert {each.shape for each in scene.core.state.replicas.values()} == {parts_at(BOUNDS)}


def in_the_pipe(**options: object) -> Scene:
    """One batch has passed, and each part has a batch: that of the first one is ahead."""
    scene = serving(**options)
    for number in range(2):
        scene.act(3, request(number, at_ms=3, slo_ms=1e6))
    for number, replica in enumerate((R0, R1)):
        scene.act(100, Finished(BatchId(number), replica, ms(20)))
    for number in (2, 3):
        scene.act(1_000, request(number, at_ms=1_000, slo_ms=1e6))
    assert [scene.core.state.replicas[each].batch.id for each in (R0, R1)] == [2, 3]  # type: ignore[union-attr]
    return scene


def test_the_part_that_hangs_is_given_up_whichever_replica_the_batch_was_started_for() -> None:
    scene = in_the_pipe()
    assert not of(StopWorker, scene.act(4_500, BatchSilent(BatchId(3), R0, s(3.4)))), "it waits for the other"
    assert not of(StopWorker, scene.act(4_501, BatchSilent(BatchId(2), R1, s(2))))
    actions = scene.act(5_000, BatchSilent(BatchId(2), R1, s(4)))
    [stop] = of(StopWorker, actions)
    assert isinstance(stop, StopWorker)
    assert (stop.worker, stop.why.partition(":")[0]) == (R1, "it hangs")
    assert lives(scene)[0] is not Life.DRAINING, "the other part goes on"
    assert scene.core.state.replicas[R0].batch is not None, "its batch is in the part that is killed"
    scene.act(5_010, BatchLost(BatchId(2), R0, "a part of its pipeline is lost"))
    waiting = {visit.request.id: visit.attempts for visit in scene.application.stages["only"].queue.visits}
    assert waiting == {2: 0, 3: 1}, "an attempt for those of the part's own batch"


def test_of_a_pipeline_with_old_batches_one_part_is_given_up_the_one_that_has_the_oldest() -> None:
    scene = in_the_pipe()
    scene.application.stages["only"].response_timeout_ns = s(10)
    assert not of(StopWorker, scene.act(6_000, BatchSilent(BatchId(2), R1, s(5)))), "a declared timeout counts alone"
    stops = [stop for at_ms in (11_000, 12_000) for stop in of(StopWorker, scene.act(at_ms, Woke()))]
    assert [stop.worker for stop in stops if isinstance(stop, StopWorker)][:1] == [R1]


def test_one_chain_brings_all_layers_to_all_parts() -> None:
    scene = scene_of(PAIR, chains=True)
    scene.act(0, Woke())
    actions = scene.act(1, *(Transferred(TransferId(place), f"n{place}") for place in range(2)))
    actions = scene.act(2, WorkerReady(R0), WorkerReady(R1))
    chain = Transfer(TransferId(2), ModelWeights("a", 300, LayerSet(0, 3)), STORE, ("n0", "n1"), completes=(R0, R1))
    assert of(Transfer, actions) == [chain]
    (again,) = of(Transfer, scene.act(3, TransferFailed(TransferId(2), "n1", "n0 is gone")))
    assert again == Transfer(
        TransferId(3), ModelWeights("a", 100, LayerSet(1, 3).others), STORE, ("n1",), completes=(R1,)
    )
    scene.act(4, Transferred(TransferId(2), "n0"), WorkerCompleted(R0), Transferred(TransferId(3), "n1"))
    scene.act(5, WorkerCompleted(R1))
    assert {each.shape for each in scene.core.state.replicas.values()} == {ALONE}
    assert not scene.core.state.weights.transfers


def test_a_complete_pipeline_dissolves_when_its_batches_have_left_it() -> None:
    scene = serving()
    scene.act(3, request(0, at_ms=3))
    scene.act(4, Transferred(TransferId(2), "n0"), WorkerCompleted(R0), Transferred(TransferId(3), "n1"))
    replica, other = scene.core.state.replicas[R0], scene.core.state.replicas[R1]
    assert bounds_of(replica.shape), "the other part has not all layers"
    scene.act(5, WorkerCompleted(R1))
    assert bounds_of(replica.shape), "its batch is in the pipeline"
    belief = replica.service_rate.belief
    scene.act(20, Finished(BatchId(0), R0, 1))
    assert belief.observed[0][0] == 1  # type: ignore[attr-defined]
    whole = scene.application.stages["only"].beliefs["a", ""]
    assert not whole.observed, "what the pipeline took teaches nothing of the whole model"  # type: ignore[attr-defined]
    scene.act(1_000, Woke())
    assert replica.shape == other.shape == ALONE
    assert replica.pipeline is None
    assert replica.part is None
    assert not scene.core.state.dissolving
    assert lives(scene) == [Life.READY, Life.READY]
    assert {view.node for view in scene.core.state.weights.views(s(1), WEIGHTS)} == {"n0", "n1"}, "whole files"


def test_a_lost_part_takes_the_pipeline_along_and_the_others_complete_themselves() -> None:
    scene = serving()
    scene.act(3, request(0, at_ms=3), request(1, at_ms=3))
    actions = scene.act(4, WorkerLost(R0, "it crashed"))
    (why,) = [each.why for each in of(Decided, actions) if each.kind == "pipeline"]  # type: ignore[attr-defined]
    assert why == "a part of its pipeline is lost: 1 serve when they have all layers"
    assert [each.node for each in of(CancelTransfer, actions)] == ["n0"]  # type: ignore[attr-defined]
    assert not of(Transfer, actions), "those of the other one are under way"
    assert lives(scene) == [Life.STARTING]
    scene.act(4, BatchLost(BatchId(1), R1, "it crashed"))
    visits = scene.application.stages["only"].queue.visits
    assert sorted((visit.request.id, visit.attempts) for visit in visits) == [(0, 1), (1, 0)], (
        "its own batch is to blame"
    )
    assert scene.core.state.replicas[R1].shape == ALONE
    actions = scene.act(5, Transferred(TransferId(3), "n1"), WorkerCompleted(R1))
    assert [each.requests for each in of(StartBatch, actions)] == [(0,)]  # type: ignore[attr-defined]


def test_a_lost_batch_says_that_the_pipeline_is_lost_also_if_it_comes_first() -> None:
    scene = serving()
    scene.act(3, request(0, at_ms=3), request(1, at_ms=3))
    actions = scene.act(4, BatchLost(BatchId(1), R1, "it crashed"))
    assert not of(StartBatch, actions)
    (why,) = [each.why for each in of(Decided, actions) if each.kind == "pipeline"]  # type: ignore[attr-defined]
    assert why == "a part of its pipeline is lost: the others serve when they have all layers"
    assert lives(scene) == [Life.STARTING, Life.STARTING]
    actions = scene.act(5, WorkerLost(R0, "it crashed"))
    assert not [each for each in of(Decided, actions) if each.kind == "pipeline"]  # type: ignore[attr-defined]
    assert lives(scene) == [Life.STARTING]


def test_parts_that_start_go_on_without_a_pipeline() -> None:
    scene = scene_of(PAIR)
    scene.act(0, Woke())
    scene.act(1, WorkerLost(R0, "it crashed"))
    actions = scene.act(2, Transferred(TransferId(1), "n1"), WorkerReady(R1))
    assert [each.completes for each in of(Transfer, actions)] == [(R1,)]  # type: ignore[attr-defined]
    assert not of(Transfer, scene.act(2.5, WorkerReady(R1))), "said twice"
    assert lives(scene) == [Life.STARTING]
    scene.act(3, Transferred(TransferId(2), "n1"), WorkerCompleted(R1))
    assert lives(scene) == [Life.READY]


def test_layers_that_do_not_come_are_ordered_from_elsewhere() -> None:
    scene = serving()
    (again,) = of(Transfer, scene.act(3, TransferFailed(TransferId(2), "n0", "the store is away")))
    assert again == Transfer(
        TransferId(4), ModelWeights("a", 200, LayerSet(0, 1).others), STORE, ("n0",), completes=(R0,)
    )
    assert lives(scene) == [Life.READY, Life.READY], "it serves meanwhile"
    assert not of(Transfer, scene.act(4, TransferFailed(TransferId(2), "n0", "said twice")))


def test_parts_stop_together_when_none_runs_a_batch() -> None:
    scene = serving()
    scene.act(3, request(0, at_ms=3))
    scene.script.target = plan_of(0)
    actions = scene.act(1_000, Woke())
    assert not of(StopWorker, actions)
    assert lives(scene) == [Life.DRAINING, Life.DRAINING]
    actions = scene.act(1_001, Finished(BatchId(0), R0, 1))
    assert [each.worker for each in of(StopWorker, actions)] == [R0, R1]  # type: ignore[attr-defined]
    assert not of(StopWorker, scene.act(1_002, WorkerStopped(R0), WorkerStopped(R1)))
    assert not scene.core.state.replicas


def test_whole_pipelines_stop_first_and_never_a_part_alone() -> None:
    scene = serving_beside_a_whole()
    scene.script.target = plan_of(1)
    actions = scene.act(2_000, Woke())
    assert [each.worker for each in of(StopWorker, actions)] == [R0, R1]  # type: ignore[attr-defined]


def test_a_plan_for_fewer_than_a_pipeline_has_stops_others() -> None:
    scene = serving_beside_a_whole()
    scene.script.target = plan_of(2)
    assert [each.worker for each in of(StopWorker, scene.act(2_000, Woke()))] == [R2]  # type: ignore[attr-defined]
    scene.script.target = plan_of(1)
    assert not of(StopWorker, scene.act(3_000, Woke())), "half a pipeline is no replica"
    scene.act(3_001, Transferred(TransferId(2), "n0"), WorkerCompleted(R0), Transferred(TransferId(3), "n1"))
    actions = scene.act(3_001, WorkerCompleted(R1))
    assert len(of(StopWorker, actions)) == 1, "now they are replicas of their own"


def test_a_pipeline_without_room_for_all_parts_is_not_started() -> None:
    starts = (ReplicaStart(0, chain=0, pipeline=0), ReplicaStart(0, chain=1, pipeline=0), ReplicaStart(0, pipeline=0))
    chains = tuple(WeightChain(STORE, ("n0",), LayerSet(place, place + 1)) for place in range(2))
    scene = scene_of(Provisioning(starts, chains, pipelines=((0, 1, 2, 3),)), replicas=3)
    actions = scene.act(0, Woke())
    assert not of(StartWorker, actions), "two fit on two cores"
    assert len(of(CancelTransfer, actions)) == 2, "nobody waits for the parts"
    assert scene.core.state.ledger.free_memory_bytes("n0") == 1000
    assert not scene.core.state.replicas


@pytest.mark.parametrize(("memory_bytes", "started"), [(799, 0), (800, 2)])
def test_each_part_on_a_node_needs_memory_for_a_copy_of_its_own(memory_bytes: int, started: int) -> None:
    """A replica takes 100 bytes, and a copy of the model, of which it has one part at first, 300."""
    starts = tuple(ReplicaStart(0, chain=place, pipeline=0) for place in range(2))
    chains = (WeightChain(STORE, ("n0",), LayerSet(0, 1)), WeightChain(STORE, ("n0",), LayerSet(1, 3)))
    node = Node("n0", "local", 2.0, memory_bytes)
    scene = scene_of(Provisioning(starts, chains, pipelines=(BOUNDS,)), nodes=(node,))
    assert len(of(StartWorker, scene.act(0, Woke()))) == started
    assert scene.core.state.ledger.free_memory_bytes("n0") == (0 if started else memory_bytes)


def test_a_part_on_a_node_with_the_files_gets_the_rest_by_itself() -> None:
    first = Provisioning((ReplicaStart(0, chain=0),), (WeightChain(STORE, ("n0",)),))
    later = Provisioning(
        (ReplicaStart(0, pipeline=0), ReplicaStart(1, chain=0, pipeline=0)),
        (WeightChain("n0", ("n1",), LayerSet(1, 3)),),
        pipelines=(BOUNDS,),
    )
    scene = scene_of(first, later, replicas=1)
    scene.act(0, Woke())
    scene.act(1, Transferred(TransferId(0), "n0"), WorkerReady(R0))
    scene.script.target = plan_of(3)
    scene.act(1_000, Woke())
    scene.act(1_001, WorkerReady(R1), WorkerCompleted(R1))
    actions = scene.act(1_002, Transferred(TransferId(1), "n1"), WorkerReady(R2))
    assert [each.completes for each in of(Transfer, actions)] == [(R2,)]  # type: ignore[attr-defined]


def test_sizes_of_parts_sum_to_the_model() -> None:
    whole = ModelWeights("m", 1000)
    sizes = [layers_of(whole, (3, 3, 1), LayerSet(place, place + 1)).size_bytes for place in range(3)]
    assert sizes == [429, 429, 143]
    assert layers_of(whole, (3, 3, 1), LayerSet(0, 1).others).size_bytes == 1000 - 429
    assert structs.replace(whole, layers=LayerSet(1, 3).others) == structs.replace(
        layers_of(whole, (1, 1, 0), LayerSet(1, 3).others), size_bytes=1000
    )
