"""Starts of one decision, ordered together: where they are, and the transfers that bring their weights.

The provision policy answers for equal replicas of one stage; this module guarantees what no policy may break: a start
has its reservation, and its node the memory for its weights, from the order on; it waits for a transfer that is under
way to its node, or its weights are there; a source has what it sends. If what the policy wants has no room, the starts
from there on are not made, and count as missing.
"""

from collections.abc import Iterable

from msgspec import structs

from sloop.actions import Action, Decided, StartReplica, Transfer
from sloop.core.ledger import Reservation
from sloop.core.state import Replica, StageState, State
from sloop.core.views import Belief, ProvisionInput, ReplicaStart, Site, Traffic
from sloop.units import NS_PER_S, s
from sloop.vocabulary import ModelWeights, ReplicaId, ReplicaSpec, TransferId, WeightLevel

RATE_NS = s(10)
"""Over how long the arrivals are measured that a provision policy sees."""


def start_together(
    now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, count: int, out: list[Action]
) -> int:
    """Start up to `count` equal replicas as the application's provision policy says; returns how many were started."""
    if spec.shadow is not None:  # it is attached when the replica is ready
        spec = structs.replace(spec, shadow=None)
    belief, policies = stage.beliefs[spec.variant, spec.slot.hardware], stage.application.parts.policies
    keeps = policies.provision.keeps
    given = _input(now_ns, state, stage, spec, count, keeps)
    if not given.sites:
        return 0
    answer = policies.provision.provide(now_ns, given)
    weights = given.costs.weights
    found = [state.weights.order(now_ns, weights, each.source, each.receivers, keeps) for each in answer.chains]
    transfers = [order for order in found if order is not None]
    touched = dict.fromkeys(name for order in transfers for name in order.receivers)
    orders: list[StartReplica] = []
    for start in answer.starts[:count]:
        site = given.sites[start.site]
        node = site.node.node.name
        arrives, transfer = _transfer(start, node, found)
        needed_bytes = belief.memory_bytes + state.weights.extra_bytes(node, weights, keeps)
        if not arrives or needed_bytes > state.ledger.free_memory_bytes(node):
            break
        replica = begin_replica(now_ns, state, stage, spec, belief, site)
        if replica is None:
            break
        replica.is_provided, replica.transfer = True, transfer
        state.weights.use(now_ns, replica.id, node, weights, keeps, transfer)
        touched[node] = None
        placed = structs.replace(spec, node=node, device=replica.device)
        orders.append(StartReplica(replica.id, placed, transfer, keeps is WeightLevel.LOADED))
    if orders or transfers:
        stage.is_new = False
        out.append(Decided("provision", answer.why, stage.name, application=stage.application.key))
    out += state.weights.make_room(touched)
    out += transfers
    out += orders
    for order in transfers:
        out += state.weights.give_up(order.transfer)
    return len(orders)


def _input(
    now_ns: int, state: State, stage: StageState, spec: ReplicaSpec, count: int, keeps: WeightLevel
) -> ProvisionInput:
    """What the policy sees."""
    belief, costs = stage.beliefs[spec.variant, spec.slot.hardware], stage.start_costs(spec)
    weights = costs.weights
    sites = [
        site
        for site in state.ledger.sites(spec, belief)
        if belief.memory_bytes + state.weights.extra_bytes(site.node.node.name, weights, keeps)
        <= site.node.free_memory_bytes
    ]
    monitor = stage.monitor
    return ProvisionInput(
        stage=stage.name,
        spec=spec,
        count=count,
        sites=sites,
        memory_bytes=belief.memory_bytes,
        device_memory_bytes=belief.device_memory_bytes,
        costs=costs,
        weights=state.weights.views(now_ns, weights),
        sends=state.weights.sends(),
        waiting=len(stage.queue.visits),
        arrivals_rps=Traffic(buckets=tuple(monitor.buckets), bucket_ns=monitor.bucket_ns).rate_rps(RATE_NS),
        served_rps=sum(
            rate.ready * rate.batch_max * NS_PER_S / rate.costs_ns[rate.batch_max]
            for rate in stage.pool.rates
            if rate.batch_max
        ),
        is_first=stage.is_new,
    )


def _transfer(start: ReplicaStart, node: str, found: list[Transfer | None]) -> tuple[bool, TransferId | None]:
    """Whether the weights of a start come to its node, or are there, and the transfer that it waits for."""
    if start.chain is None:
        return True, start.joins
    order = found[start.chain]
    return (True, order.transfer) if order is not None and node in order.receivers else (False, None)


def note_files(now_ns: int, state: State, node: str, files: Iterable[ModelWeights]) -> None:
    """A node that joins has the files of these models. Those that some provision policy keeps are counted on, as far
    as the node has memory for them; the others nobody asks for."""
    kept: dict[ModelWeights, WeightLevel] = {}
    for application in state.applications.values():
        keeps = application.parts.policies.provision.keeps
        if keeps is not WeightLevel.NOTHING:
            kept |= {costs.weights: keeps for costs in application.parts.starts.values()}
    for weights in files:
        free_bytes = state.ledger.free_memory_bytes(node) - state.weights.spare_bytes(node)
        if weights in kept and weights.size_bytes <= free_bytes:
            state.weights.note_files(now_ns, weights, node, kept[weights])


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
