"""Starts of one decision, ordered together: where they are, and the transfers that bring their weights.

The provision policy answers for equal replicas of one stage; this module guarantees what no policy may break: a start
has its reservation, and its node the memory for its weights, from the order on; it waits for a transfer that is under
way to its node, or its weights are there; a source has what it sends. If what the policy wants has no room, the starts
from there on are not made, and count as missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from msgspec import structs

from sloop.actions import Action, Decided, StartReplica, Transfer
from sloop.core.ledger import Reservation
from sloop.core.pipeline import layers_of
from sloop.core.protocols import Provision
from sloop.core.replica import LayerPipeline, Replica
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.core.views import Belief, BeliefKey, ProvisionInput, ReplicaStart, Site, StartCosts, Traffic, WeightChain
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Form, ModelWeights, Part, PipelineId, ReplicaId, ReplicaSpec, TransferId

RATE_NS = s(10)
"""Over how long the arrivals are measured that a provision policy sees."""


def start_together(
    now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, count: int, out: list[Action]
) -> int:
    """Start up to `count` equal replicas as the application's provision policy says; returns how many were started."""
    if spec.shadow is not None:  # it is attached when the replica is ready
        spec = structs.replace(spec, shadow=None)
    policies = stage.application.parts.policies
    keeps = policies.provision.keeps
    given = _input(now_ns, state, stage, spec, count)
    if not given.sites:
        return 0
    answer = policies.provision.provide(now_ns, given)
    found = [_ordered(now_ns, state, given, each, keeps) for each in answer.chains]
    transfers = [order for order in found if order is not None]
    making = _Starts(now_ns, state, stage, spec, given, found, keeps)
    for index, equal in groupby(answer.starts[:count], lambda start: start.pipeline):
        starts = list(equal)
        begun = making.begin(starts) if index is None else making.begin_pipeline(starts, answer.pipelines[index])
        if len(begun) < len(starts):
            break
    orders = making.orders
    unneeded = {order.transfer: state.weights.give_up(order.transfer) for order in transfers}
    transfers = [order for order in transfers if len(unneeded[order.transfer]) < len(order.receivers)]
    touched = dict.fromkeys(name for order in transfers for name in order.receivers)
    touched |= dict.fromkeys(order.spec.node or "" for order in orders)
    if orders or transfers:
        out.append(Decided("provision", answer.why, stage.name, application=stage.application.key))
    out += state.weights.make_room(touched)
    out += transfers
    out += orders
    out += making.given_up
    for order in transfers:
        out += unneeded[order.transfer]
    return len(orders)


def expected_starts_ns(now_ns: int, state: State, stage: StageState) -> dict[BeliefKey, int]:
    """How long one more replica of each variant would take on each kind of hardware, as large as the one that was
    started last; empty if the provision policy does not predict it, and without those that have no room."""
    policy = stage.application.parts.policies.provision
    predict = getattr(policy, "expected_s", None)
    found: dict[BeliefKey, int] = {}
    if predict is None:
        return found
    cores = {(each.spec.variant, each.spec.slot.hardware): each.spec.cores for each in stage.pool.replicas.values()}
    for key, belief in stage.beliefs.items():
        spec = ReplicaSpec(stage.name, key[0], belief.slot(cores.get(key, 1.0)))
        given = _input(now_ns, state, stage, spec, 1)
        if given.sites:
            found[key] = s(predict(now_ns, given))
    return found


def _input(now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, count: int) -> ProvisionInput:
    """What the policy sees."""
    belief, costs = stage.beliefs[spec.variant, spec.slot.hardware], stage.start_costs(spec)
    weights = costs.weights
    sites = [
        site
        for site in state.ledger.sites(spec, belief)
        if belief.memory_bytes + state.weights.extra_bytes(site.node.node.name, weights) <= site.node.free_memory_bytes
    ]
    monitor = stage.monitor
    return ProvisionInput(
        stage=stage.name,
        spec=spec,
        count=count,
        sites=stage.preferred(now_ns, sites) if stage.avoided_ns else sites,
        memory_bytes=belief.memory_bytes,
        device_memory_bytes=belief.device_memory_bytes,
        costs=costs,
        belief=belief,
        weights=state.weights.views(now_ns, weights),
        sends=state.weights.sends(),
        waiting=len(stage.queue.visits),
        arrivals_rps=Traffic(buckets=tuple(monitor.buckets), bucket_ns=monitor.bucket_ns).rate_rps(RATE_NS),
        served_rps=sum(
            rate.ready * rate.batch_max * NS_PER_S / rate.costs_ns[rate.batch_max]
            for rate in stage.pool.rates
            if rate.batch_max
        ),
    )


def _ordered(now_ns: int, state: State, given: ProvisionInput, chain: WeightChain, keeps: bool) -> Transfer | None:
    """A transfer that the policy wants; None if none of its receivers has memory for it."""
    weights, costs = state.weights, given.costs
    if chain.layers is None:
        return weights.order(now_ns, costs.weights, chain.source, chain.receivers, keeps)
    part = layers_of(costs.weights, costs.layer_bytes, chain.layers)
    return weights.order_layers(now_ns, part, costs.weights, chain.source, chain.receivers, keeps)


@dataclass(slots=True)
class _Starts:
    """The starts of one decision, as they are made."""

    now_ns: int
    state: State
    stage: StageState
    spec: ReplicaSpec
    given: ProvisionInput
    found: list[Transfer | None]
    """What was ordered for each chain of the answer."""
    keeps: bool
    orders: list[StartReplica] = field(default_factory=list)
    given_up: list[Action] = field(default_factory=list)
    """Orders that end what a pipeline without room would have used."""

    def begin(self, starts: Sequence[ReplicaStart]) -> list[Replica]:
        """Start replicas of the whole model until one has no room; returns those that start."""
        begun = self._reserve(starts, assembles=False)
        self._order(begun)
        return begun

    def begin_pipeline(self, starts: Sequence[ReplicaStart], bounds: tuple[int, ...]) -> list[Replica]:
        """Start the parts of a pipeline, if there is room for all; returns them."""
        if len(starts) != len(bounds) - 1:
            return []
        begun, state = self._reserve(starts, assembles=True), self.state
        if len(begun) < len(starts):
            for replica in begun:
                state.forget(self.now_ns, replica, self.given_up)
            return []
        pipeline = LayerPipeline(PipelineId(state.next_pipeline), bounds)
        state.next_pipeline += 1
        for place, replica in enumerate(begun):
            pipeline.members[replica.id] = replica
            replica.pipeline, replica.part = pipeline, Part(pipeline.id, place, bounds)
            state.set_form(self.now_ns, replica, Form(bounds=bounds))
        self._order(begun)
        return begun

    def _reserve(self, starts: Sequence[ReplicaStart], *, assembles: bool) -> list[Replica]:
        """Replicas with their reservations and their weights. Those that assemble a model wait for their first
        layers."""
        state, given, weights, model = self.state, self.given, self.state.weights, self.given.costs.weights
        begun: list[Replica] = []
        for start in starts:
            site = given.sites[start.site]
            node = site.node.node.name
            arrives, transfer = _transfer(start, node, self.found)
            is_part = assembles and transfer is not None
            needed_bytes = given.belief.memory_bytes + weights.extra_bytes(node, model, assembles=is_part)
            if not arrives or needed_bytes > state.ledger.free_memory_bytes(node):
                break
            replica = begin_replica(self.now_ns, state, self.stage, self.spec, given.belief, site)
            if replica is None:
                break
            replica.is_provided, replica.transfer = True, transfer
            weights.use(self.now_ns, replica.id, node, model, self.keeps, transfer, assembles=is_part)
            begun.append(replica)
        return begun

    def _order(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            placed = structs.replace(self.spec, node=replica.node, device=replica.device)
            self.orders.append(StartReplica(replica.id, placed, replica.transfer, replica.part))


def _transfer(start: ReplicaStart, node: str, found: list[Transfer | None]) -> tuple[bool, TransferId | None]:
    """Whether the weights of a start come to its node, or are there, and the transfer that it waits for."""
    if start.chain is None:
        return True, start.joins
    order = found[start.chain]
    return (True, order.transfer) if order is not None and node in order.receivers else (False, None)


def first_weights_bytes(policy: Provision, costs: StartCosts) -> int:
    """The memory that the weights of the first replica on a node take, beside the replica's own; 0 if the policy orders
    no transfers."""
    return 0 if policy.leaves_all else costs.weights.size_bytes


def note_files(now_ns: int, state: State, node: str, files: Iterable[ModelWeights]) -> None:
    """A node that joins has the files of these models. Those that some provision policy keeps are recorded, as far as
    the node has memory for them; no policy asks for the others."""
    kept: set[ModelWeights] = set()
    for application in state.applications.values():
        if application.parts.policies.provision.keeps:
            kept |= {costs.weights for costs in application.parts.starts.values()}
    for weights in files:
        free_bytes = state.ledger.free_memory_bytes(node) - state.weights.spare_bytes(node)
        if weights in kept and weights.size_bytes <= free_bytes:
            state.weights.note_files(now_ns, weights, node, keeps=True)


def begin_replica(
    now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, belief: Belief, site: Site
) -> Replica | None:
    """A new replica at this place, with its reservation; None if there is no room."""
    node, device = site.node.node.name, site.device.device.name if site.device else None
    id = ReplicaId(state.next_replica)
    if not state.ledger.reserve(id, Reservation.of(spec, belief, node, device)):
        return None
    state.next_replica += 1
    state.replicas[id] = replica = Replica(id, spec, stage, now_ns, node, device)
    stage.pool.add(replica)
    return replica
