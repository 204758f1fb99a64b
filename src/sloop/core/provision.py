"""The start of replicas: where they are, and the transfers that bring their weights. Nothing else starts a replica.

The provision policy answers for equal replicas of one stage; this module guarantees what no policy may break: a start
has its reservation, and its node the memory for its weights, from the order on; it waits for a transfer that is under
way to its node, or its weights are there; a source has what it sends. If what the policy wants has no room, the starts
from there on are not made, and count as missing.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from msgspec import Struct, structs

from sloop.actions import Action, Decided, StartWorker, Transfer
from sloop.core.ledger import Reservation
from sloop.core.pipeline import layers_of
from sloop.core.protocols import Provision
from sloop.core.replica import LayerPipeline, Replica
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.core.views import (
    BeliefKey,
    Provisioning,
    ProvisionInput,
    ReplicaStart,
    Site,
    StartCosts,
    Traffic,
    WeightChain,
)
from sloop.units import NS_PER_S, s
from sloop.vocabulary import ALONE, ModelWeights, ReplicaId, ReplicaSpec, TransferId, parts_at

RATE_NS = s(10)
"""Over how long the arrivals are measured that a provision policy sees."""


def start(now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, count: int, out: list[Action]) -> int:
    """Start up to `count` equal replicas as the application's provision policy says; returns how many were started."""
    if spec.shape:  # a shadow is attached when the replica is ready
        spec = structs.replace(spec, shape=ALONE)
    provide = stage.application.policies.provision.provide
    given, started = _input(now_ns, state, stage, spec, count), 0
    while given.sites:
        answer = provide(now_ns, given)
        begun = _carry_out(now_ns, state, stage, given, answer, out)
        started += begun
        if not answer.asks_again or not begun or started >= count:
            break
        given = structs.replace(given, count=count - started, sites=candidates(now_ns, state, stage, spec))
    return started


def candidates(now_ns: int, state: State, stage: StageState, spec: ReplicaSpec) -> Sequence[Site]:
    """Where one more replica could start now, with the weights that come with it, in the order in which nodes were
    declared. Nodes on which a replica of the stage was lost before it could serve are left out, unless there is no
    other. A place policy that `ignores_names` sees the first of equal nodes."""
    policies, avoided_ns = stage.application.policies, stage.avoided_ns
    belief, brings_weights = stage.beliefs[spec.variant, spec.slot.hardware], policies.provision.brings_weights
    one_of_equal = not brings_weights and not avoided_ns and policies.place.ignores_names
    sites = state.ledger.sites(spec, belief, one_of_equal=one_of_equal)
    if brings_weights:
        extra_bytes, weights = state.weights.extra_bytes, stage.start_costs(spec).weights
        sites = [
            site
            for site in sites
            if belief.memory_bytes + extra_bytes(site.node.node.name, weights) <= site.node.free_memory_bytes
        ]
    if avoided_ns:
        sites = [site for site in sites if avoided_ns.get(site.node.node.name, 0) <= now_ns] or sites
    return sites


def _input(now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, count: int) -> ProvisionInput:
    """What the policy sees."""
    costs, policies = stage.start_costs(spec), stage.application.policies
    given = ProvisionInput(
        stage=stage.name,
        spec=spec,
        count=count,
        sites=candidates(now_ns, state, stage, spec),
        place=policies.place,
        costs=costs,
        belief=stage.beliefs[spec.variant, spec.slot.hardware],
    )
    if not policies.provision.brings_weights:
        return given
    monitor = stage.monitor
    return structs.replace(
        given,
        weights=state.weights.views(now_ns, costs.weights),
        sends=state.weights.sends(),
        waiting=stage.monitor.waiting,
        arrivals_rps=Traffic(buckets=tuple(monitor.buckets), bucket_ns=monitor.bucket_ns).rate_rps(RATE_NS),
        served_rps=sum(
            rate.ready * rate.batch_max * NS_PER_S / rate.costs_ns[rate.batch_max]
            for rate in stage.pool.rates
            if rate.batch_max
        ),
    )


def _carry_out(
    now_ns: int, state: State, stage: StageState, given: ProvisionInput, answer: Provisioning, out: list[Action]
) -> int:
    """Order what the policy has answered, as far as there is room; returns how many replicas start. Drivers know a
    transfer before those who wait for it."""
    making = _Starts(now_ns, state, stage, given, stage.application.policies.provision)
    for chain in answer.chains:
        making.order_transfer(chain)
    if answer.pipelines:
        making.begin_in_turn(answer)
    else:
        making.begin(answer.starts[: given.count])
    sent = making.sent() if answer.chains else ()
    begun = making.begun
    if answer.why and (begun or sent):
        out.append(Decided("provision", answer.why, stage.name, application=stage.application.key))
    if state.weights.by_node:
        nodes = [*(name for order in sent for name in order.receivers), *(replica.node for replica in begun)]
        out += state.weights.make_room(dict.fromkeys(nodes))
    out += sent
    spec = given.spec
    for replica in begun:
        placed = structs.replace(spec, node=replica.node, device=replica.device, shape=replica.shape)
        order = StartWorker(replica.id, placed, transfer=replica.transfer)
        if replica.pipeline is not None and replica.part is not None:
            place = replica.shape.index(replica.part)
            order = structs.replace(order, pipeline=replica.pipeline.id, place=place)
        out.append(order)
    out += making.given_up
    return len(begun)


class _Starts(Struct):
    """The transfers and starts of one answer, as they are made."""

    now_ns: int
    state: State
    stage: StageState
    given: ProvisionInput
    policy: Provision
    transfers: list[Transfer | None] = []
    """What was ordered for each chain of the answer; None if none of its receivers has memory for it."""
    begun: list[Replica] = []
    given_up: list[Action] = []
    """Orders that end what a pipeline without room would have used, and transfers for which no start waits."""

    def order_transfer(self, chain: WeightChain) -> None:
        """Order a transfer that the policy wants, to those of its receivers that have memory for it."""
        weights, costs, keeps = self.state.weights, self.given.costs, self.policy.keeps
        order: Transfer | None
        if chain.layers is None:
            order = weights.order(self.now_ns, costs.weights, chain.source, chain.receivers, keeps)
        else:
            part = layers_of(costs.weights, costs.layer_bytes, chain.layers)
            order = weights.order_layers(self.now_ns, part, costs.weights, chain.source, chain.receivers, keeps)
        self.transfers.append(order)

    def sent(self) -> list[Transfer]:
        """The transfers for which a start waits, or with which a node gets files to keep."""
        sent: list[Transfer] = []
        for order in self.transfers:
            unneeded = self.state.weights.give_up(order.transfer) if order is not None else []
            if order is not None and len(unneeded) < len(order.receivers):
                sent.append(order)
                self.given_up += unneeded
        return sent

    def begin_in_turn(self, answer: Provisioning) -> None:
        """Begin single replicas and pipelines, until one has no room."""
        for number, equal in groupby(answer.starts[: self.given.count], attrgetter("pipeline")):
            starts = list(equal)
            begun = self.begin(starts) if number is None else self.begin_pipeline(starts, answer.pipelines[number])
            if begun < len(starts):
                break

    def begin(self, starts: Sequence[ReplicaStart], *, assembles: bool = False) -> int:
        """Begin replicas, with their reservations and their weights, until one has no room; returns how many. Those
        that assemble a model wait for their first layers."""
        state, given, before = self.state, self.given, len(self.begun)
        spec, belief = given.spec, given.belief
        for start in starts:
            site = given.sites[start.site]
            node, device = site.node.node.name, site.device.device.name if site.device else None
            transfer = start.joins
            if start.chain is not None:
                order = self.transfers[start.chain]
                if order is None or node not in order.receivers:
                    break
                transfer = order.transfer
            id = ReplicaId(state.next_worker)
            if self.policy.brings_weights and not self._has_memory(node, transfer, assembles):
                break
            if not state.ledger.reserve(id, Reservation.of(spec, belief, node, device)):
                break
            state.next_worker += 1
            state.replicas[id] = replica = Replica(id, spec, self.stage, self.now_ns, node, device)
            state.workers[id] = replica.workers[0]
            self.stage.pool.add(replica)
            if self.policy.brings_weights:
                replica.is_provided, replica.transfer = True, transfer
                is_part = assembles and transfer is not None
                weights, keeps = given.costs.weights, self.policy.keeps
                state.weights.use(self.now_ns, id, node, weights, keeps, transfer, assembles=is_part)
            self.begun.append(replica)
        return len(self.begun) - before

    def _has_memory(self, node: str, transfer: TransferId | None, assembles: bool) -> bool:
        """Whether a node has the memory for a replica and for the weights that come with it."""
        is_part = assembles and transfer is not None
        extra_bytes = self.state.weights.extra_bytes(node, self.given.costs.weights, assembles=is_part)
        return self.given.belief.memory_bytes + extra_bytes <= self.state.ledger.free_memory_bytes(node)

    def begin_pipeline(self, starts: Sequence[ReplicaStart], bounds: tuple[int, ...]) -> int:
        """Begin the parts of a pipeline, if there is room for all; returns how many."""
        if len(starts) != len(bounds) - 1:
            return 0
        state = self.state
        begun = self.begin(starts, assembles=True)
        members = self.begun[len(self.begun) - begun :]
        if begun < len(starts):
            del self.begun[len(self.begun) - begun :]
            for replica in members:
                state.forget(self.now_ns, replica.workers[0], self.given_up)
            return 0
        shape = parts_at(bounds)
        pipeline = LayerPipeline(tuple(members))
        for part, replica in zip(shape, members, strict=True):
            replica.pipeline, replica.part = pipeline, part
            state.change(self.now_ns, replica, replica.slot, shape)
        return begun


def expected_starts_ns(now_ns: int, state: State, stage: StageState) -> dict[BeliefKey, int]:
    """How long one more replica of each variant would take on each kind of hardware, as large as the one that was
    started last; empty if the provision policy does not predict it, and without those that have no room."""
    policy = stage.application.policies.provision
    starts_ns: dict[BeliefKey, int] = {}
    cores = {(each.spec.variant, each.spec.slot.hardware): each.spec.cores for each in stage.pool.replicas.values()}
    for key, belief in stage.beliefs.items():
        spec = ReplicaSpec(stage.name, key[0], belief.slot(cores.get(key, 1.0)))
        given = _input(now_ns, state, stage, spec, 1)
        start_s = policy.expected_s(now_ns, given) if given.sites else None
        if start_s is not None:
            starts_ns[key] = s(start_s)
    return starts_ns


def first_weights_bytes(policy: Provision, costs: StartCosts) -> int:
    """The memory that the weights of the first replica on a node take, beside the replica's own; 0 if the policy orders
    no transfers."""
    return costs.weights.size_bytes if policy.brings_weights else 0


def note_files(now_ns: int, state: State, node: str, files: Iterable[ModelWeights]) -> None:
    """A node that joins has the files of these models. Those that some provision policy keeps are recorded, as far as
    the node has memory for them; no policy asks for the others."""
    kept: set[ModelWeights] = set()
    for application in state.applications.values():
        if application.policies.provision.keeps:
            kept |= {costs.weights for costs in application.parts.starts.values()}
    for weights in files:
        free_bytes = state.ledger.free_memory_bytes(node) - state.weights.spare_bytes(node)
        if weights in kept and weights.size_bytes <= free_bytes:
            state.weights.note_files(now_ns, weights, node, keeps=True)
