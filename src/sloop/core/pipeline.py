"""Pipelines: replicas that start as parts of one model, serve together, and become replicas of their own.

Each member is a `Replica` from its order on, with a reservation for the whole model. What is guaranteed here:

- Members become ready together, when each has its part. Each of them then takes one batch at a time like any replica;
  the driver passes it through the whole pipeline.
- From then on each member gets the other layers. It does not before, because they would come over the links on which
  other members still wait for their parts.
- When all have all layers, the pipeline dissolves: they are ordinary replicas. Until the batches that run in it have
  left it, estimates learn from batches for the shape of its parts, and not for the whole model.
- If a member is lost, the others serve no more until they have all layers; those that have are ready at once. Only for
  the requests of the lost member's batch this counts as an attempt. The driver reports what becomes of the batches of
  the others.
- Members stop together, when none of them runs a batch.

Source: San Juan, "Flashpoint" (thesis, Waterloo 2023), sections 2.7 and 2.14 of our specification. It says that a
member completes itself "right after" its own part has started; that slows down the others of its own pipeline.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sloop.actions import Action, Decided
from sloop.core.difference import Difference
from sloop.core.dispatch import stops_of
from sloop.core.life import WorkerState
from sloop.core.replica import LayerPipeline, Replica
from sloop.core.state import State
from sloop.core.views import CompletionInput
from sloop.text import listed
from sloop.vocabulary import ALONE, LayerSet, Life, ModelWeights, NodeState, ReplicaId, Slot


def layers_of(whole: ModelWeights, layer_bytes: Sequence[int], layers: LayerSet) -> ModelWeights:
    """The weights of these layers of a model, whose files have the sizes `layer_bytes`. With those of the other layers
    they are as large as the whole model."""
    between = sum(layer_bytes[layers.first : layers.end]) / max(1, sum(layer_bytes))
    size_bytes = round(whole.size_bytes * between)
    if layers.is_complement:
        size_bytes = whole.size_bytes - size_bytes
    return ModelWeights(whole.name, size_bytes, layers, whole.digest)


def on_part_ready(now_ns: int, state: State, replica: Replica, out: list[Action]) -> bool:
    """A part has started. Returns whether its pipeline serves now."""
    pipeline = replica.pipeline
    if replica.state is not WorkerState.STARTING:
        return False
    if pipeline is None:
        state.enter(now_ns, replica.workers[0], WorkerState.COMPLETING)
        _begin_completion(now_ns, state, [replica], out)
        return False
    state.enter(now_ns, replica.workers[0], WorkerState.WAITING)
    if not pipeline.is_ready:
        return False
    for member in pipeline.members:
        state.enter(now_ns, member.workers[0], WorkerState.SERVING if member.part is None else WorkerState.PIPELINED)
    _begin_completion(now_ns, state, pipeline.members, out)
    _note_complete(now_ns, state, pipeline, out)
    return True


def on_completed(now_ns: int, state: State, replica: Replica, out: list[Action]) -> bool:
    """A part has got the other layers. Returns whether that was expected."""
    pipeline = replica.pipeline
    if replica.part is None or (pipeline is not None and replica.state is WorkerState.STARTING):
        return False
    replica.part = None
    state.weights.ready(now_ns, replica.id)
    if replica.state not in (WorkerState.WAITING, WorkerState.DRAINING):
        state.enter(now_ns, replica.workers[0], WorkerState.SERVING)
    if pipeline is not None:
        _note_complete(now_ns, state, pipeline, out)
    return True


def order_other_layers(now_ns: int, state: State, replicas: Sequence[Replica], out: list[Action]) -> None:
    """Bring the other layers to parts of one pipeline, on nodes without the files of their model."""
    one = replicas[0]
    policy, costs = one.stage.application.policies.provision, one.stage.start_costs(one.spec)
    nodes = {replica.node: state.ledger.nodes[replica.node].rack for replica in replicas}
    views = tuple(view for view in state.weights.views(now_ns, costs.weights) if view.node not in nodes)
    given = CompletionInput(tuple(replica.node for replica in replicas), nodes, views, state.weights.sends())
    left = list(replicas)
    routes = policy.complete(now_ns, given)
    named = Counter(node for _, receivers in routes for node in receivers)
    for source, receivers in routes:
        there = [
            replica
            for node in receivers
            for replica in [replica for replica in left if replica.node == node][: 1 if named[node] > 1 else None]
        ]
        left = [replica for replica in left if replica not in there]
        parts = [replica.part for replica in there if replica.part is not None]
        assert len(parts) == len(there) > 0, "a part that is to get other layers lacks some"
        layers = parts[0].span.others if len(there) == 1 else LayerSet(0, len(costs.layer_bytes))
        rest = layers_of(costs.weights, costs.layer_bytes, layers)
        ids = tuple(replica.id for replica in there)
        order = state.weights.order_layers(now_ns, rest, costs.weights, source, receivers, policy.keeps, ids)
        for replica in there:
            replica.transfer = order.transfer
            state.weights.wait(replica.id, order.transfer)
        out.append(order)
    assert not left, f"nothing brings replicas {[replica.id for replica in left]} the other layers"


def dissolve(now_ns: int, state: State) -> list[Replica]:
    """Dissolve the complete pipelines that no batch is in any more; returns one replica of each."""
    dissolved: list[Replica] = []
    for pipeline in list(state.dissolving.values()):
        members = pipeline.members
        if not members or any(member.state is WorkerState.DRAINING for member in members):
            del state.dissolving[pipeline.id]  # they stop together, or are gone
        elif not pipeline.runs_batches:
            del state.dissolving[pipeline.id]
            dissolved.append(members[0])
            for member in members:
                member.pipeline = None
                state.change(now_ns, member, member.slot, ALONE)
    return dissolved


def break_up(now_ns: int, state: State, pipeline: LayerPipeline, lost: Replica | None, out: list[Action]) -> None:
    """A member is `lost`, or one of those that are left will be reported lost: they go on without a pipeline."""
    state.dissolving.pop(pipeline.id, None)
    incomplete = [member for member in pipeline.members if member.part is not None]
    if incomplete and (lost or incomplete[0]).life is not Life.DRAINING:
        names = "the others" if lost is None else listed([str(member.id) for member in incomplete])
        why = f"a part of its pipeline is lost: {names} serve when they have all layers"
        id, stage = None if lost is None else lost.id, incomplete[0].stage
        out.append(Decided("pipeline", why, stage.name, id, application=stage.application.key))
    for member in pipeline.members:
        member.pipeline = None
        state.change(now_ns, member, member.slot, ALONE)
        if member.state is WorkerState.DRAINING:
            out += stops_of(member, "drained") if member.batch is None else ()
        elif member.state is WorkerState.WAITING and member.part is None:
            state.enter(now_ns, member.workers[0], WorkerState.SERVING)
        elif member.state in (WorkerState.WAITING, WorkerState.PIPELINED):
            state.enter(now_ns, member.workers[0], WorkerState.COMPLETING)
            _begin_completion(now_ns, state, [member], out)


def stops_whole_pipelines(
    difference: Difference, replicas: Mapping[ReplicaId, Replica], order: Sequence[ReplicaId]
) -> Difference:
    """The same number of stops, but of whole pipelines, and of these first as many as fit (section 2.14). `order` has
    the replicas that may stop instead of others, the first ones first. What cannot stop without the rest of its
    pipeline is kept."""
    changes = (*difference.grow, *difference.shrink, *difference.hold_shrink, *difference.attach)
    changed = {id for id, _ in changes} | {*difference.detach, *difference.hold_detach}

    def kind_of(id: ReplicaId) -> tuple[str, Slot]:
        return replicas[id].spec.variant, replicas[id].spec.slot

    def largest_first(pipeline: LayerPipeline) -> tuple[int, bool, ReplicaId]:
        return -len(pipeline.members), pipeline.runs_batches, pipeline.id

    stop: list[ReplicaId] = []
    hold: list[ReplicaId] = []
    for kind in dict.fromkeys(map(kind_of, (*difference.stop, *difference.hold))):
        stopped = [id for id in difference.stop if kind_of(id) == kind]
        held = [id for id in difference.hold if kind_of(id) == kind]
        equal = [id for id in order if kind_of(id) == kind and id not in changed]
        pipelines = {
            pipeline.id: pipeline
            for id in equal
            if (pipeline := replicas[id].pipeline) is not None
            and changed.isdisjoint(member.id for member in pipeline.members)
        }
        chosen: list[ReplicaId] = []
        for pipeline in sorted(pipelines.values(), key=largest_first):
            if len(chosen) + len(pipeline.members) <= len(stopped):
                chosen += [member.id for member in pipeline.members]
        single = [id for id in dict.fromkeys((*stopped, *equal)) if replicas[id].pipeline is None]
        chosen += single[: len(stopped) - len(chosen)]
        left = [id for id in dict.fromkeys((*stopped, *held, *equal)) if id not in chosen]
        stop += chosen
        hold += left[: len(stopped) + len(held) - len(chosen)]
    return replace(difference, stop=tuple(stop), hold=tuple(hold))


def _begin_completion(now_ns: int, state: State, replicas: Iterable[Replica], out: list[Action]) -> None:
    """Parts of one pipeline begin to get the other layers, unless they have begun, or their node is lost and they will
    be reported lost too. Where a node has the files, that is the driver's work alone."""
    begin = [
        replica
        for replica in replicas
        if replica.part is not None and not replica.completes and state.ledger.states[replica.node] is NodeState.READY
    ]
    for replica in begin:
        replica.completes = True
    without = [replica for replica in begin if not state.weights.has_files(replica.id)]
    if without:
        order_other_layers(now_ns, state, without, out)


def _note_complete(now_ns: int, state: State, pipeline: LayerPipeline, out: list[Action]) -> None:
    """If all members have their parts and all layers, the pipeline is over."""
    if pipeline.is_ready and pipeline.is_complete and pipeline.completed_ns < 0:
        pipeline.completed_ns = now_ns
        state.dissolving[pipeline.id] = pipeline
        dissolve(now_ns, state)
