"""Flashpoint's provision policy, and the autoscalers with which the thesis evaluates it.

`Flashpoint`: replicas start on nodes that have the model, which goes to other nodes along chains, and models start in
parts. `AtollRate` follows the arrival rate, `TorchServe` the wait in the queue, `SageMaker` the requests a minute; the
fourth, OpenWhisk on Kubernetes, is the platform's `Hpa` with a target of 0.6. Sections are those of our specification;
`README.md` says which equation is where.

Each autoscaler has one number (`factor`, `target_ns`, `safety`, Hpa's `target`) that says how many replicas a load
gets: compare cold starts only at equal resources, because a policy in proportion to the ready replicas asks for more if
they start sooner. The specification gives metrics, formulas and targets; periods, windows, tolerance and limits are not
published and are those of the platforms.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Literal

from sloop.api import (
    LINK_MBPS,
    NS_PER_S,
    ROUNDING,
    STORE_MBPS,
    Life,
    NonNegativeInt,
    Plan,
    PositiveFloat,
    PositiveInt,
    StagePlan,
    check_range,
    counted,
    in_s,
    interpolated_quantile,
    round_up,
    s,
    to_s,
)
from sloop.api.policies import (
    Belief,
    ClusterView,
    CompletionInput,
    NodeView,
    Provision,
    Provisioning,
    ProvisionInput,
    ReplicaStart,
    Scale,
    StageView,
    sourcing,
    targets,
)
from sloop.api.solvers import PieceCosts, PieceDownloads, best_plan, expected_requests, seconds_rps
from sloop_systems.flashpoint.solver import filled_cuts


@dataclass(frozen=True, slots=True)
class Flashpoint(Provision):
    """Replicas start on nodes that have the weights; other nodes get them from the nearest source, along chains.

    Source: San Juan, "Flashpoint" (thesis, Waterloo 2023), sections 2.7 to 2.12 and 5.1 of our specification, with its
    corrections. Each technique can be switched off, which gives the systems that the thesis compares with: the
    baseline (`locality` and `multicast` off), and GPU-enabled FaaS and Atoll (`multicast` and `join` off, `source`
    `store`), all without `partition`, which is off unless a system switches it on. Nodes keep the files of models; the
    process that has loaded them, which the thesis keeps too, is that of one replica here. Fails where replicas on the
    accelerators of one node slow each other down: it fills the nodes with the weights first.
    """

    brings_weights: ClassVar[bool] = True
    locality: bool = True
    """Replicas start first on nodes that have the weights, then one on each other node, and weights come from nodes
    that have them; without it, each start is a download from the store, on the node with the fewest replicas."""
    multicast: bool = True
    """The receivers of one source form a chain, in the order of their racks; without it, each has its own transfer."""
    source: Literal["nearest", "store"] = "nearest"
    """Whether weights come from other nodes that have them, or always from the store."""
    join: bool = True
    """Whether a start waits for a transfer to its node that is under way already, instead of ordering its own."""
    partition: bool = False
    """Whether replicas that start together may start as parts of one model. They do if its layers were measured and the
    waiting requests are expected to be answered sooner than by whole models."""
    cuts: Literal["best", "fewest", "filled"] = "best"
    """How models are cut. `best`: so that the waiting requests are answered soonest. `fewest`: as Gillis does, into the
    fewest parts of at most 250 MB. `filled`: as SerFer does, into parts of up to 200 MB. `fewest` and `filled` cut a
    model whenever enough replicas start for all its parts, and ignore cold starts."""
    pieces_max: NonNegativeInt = 0
    """The most parts of one model; 0: as many as it has measured layer blocks, at most 64."""
    link_mbps: PositiveFloat = LINK_MBPS
    """The expected rate of a transfer between two nodes, measured between two cloud instances (section 3.3). Used to
    decide whether and where to cut a model."""
    store_mbps: PositiveFloat = STORE_MBPS
    """The expected rate at which the store sends to all nodes together, measured there as well. Used in the same
    way."""

    @property
    def keeps(self) -> bool:
        return self.locality

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        if self.partition and self.cuts == "best" and sourcing.finds_plans(given):
            most = sourcing.most_pieces(self.pieces_max, len(given.sites))
            sourcing.plans_of(sourcing.piece_costs(given, self.link_mbps)).fronts(most)
        found = {each.node: each for each in given.weights} if self.locality else {}
        ready = {name for name, each in found.items() if each.has_files}
        coming = {name: each.arriving for name, each in found.items() if self.join and each.arriving is not None}
        chosen = primed_first(given, ready, coming.keys()) if self.locality else least_used_first(given)
        names = {index: sourcing.node_of(given.sites[index]) for index in chosen}
        sources = {} if self.source == "store" or not self.locality else sourcing.sources_of(given)
        there = [index for index in chosen if names[index] in ready]
        elsewhere = [index for index in chosen if names[index] not in ready | coming.keys()]
        groups = [*self._groups(given, there, None), *self._groups(given, elsewhere, len(sources))]
        parts = Counter(index for group in groups for index in group.sites)
        rest: list[int] = []
        for index in chosen:
            if parts[index]:
                parts[index] -= 1
            else:
                rest.append(index)
        making = sourcing.Transfers(given, sources)
        starts = sourcing.starts_of_parts(making, groups, names, ready, chains=self._chains)
        without = [name for index in rest if (name := names[index]) not in ready and name not in coming]
        receivers = list(dict.fromkeys(without)) if self._shares else without
        chains = making.add(sourcing.routes_of(making, receivers, chains=self._chains))
        for index in rest:
            name = names[index]
            if name in ready:
                starts.append(ReplicaStart(index))
            elif name in coming:
                starts.append(ReplicaStart(index, joins=coming[name]))
            else:
                starts.append(ReplicaStart(index, chain=chains.of(name, again=self._shares)))
        pipelines = tuple(group.bounds for group in groups)
        return Provisioning(
            tuple(starts), tuple(making.chains), sourcing.why_of(given, starts, making.chains, pipelines), pipelines
        )

    def complete(self, now_ns: int, given: CompletionInput) -> list[tuple[str, tuple[str, ...]]]:
        weights = given.weights if self.locality and self.source != "store" else ()
        return sourcing.completing(given, weights, chains=self._chains)

    @property
    def _shares(self) -> bool:
        """Whether one transfer serves all starts of a node."""
        return self.join if self.locality else self.multicast

    @property
    def _chains(self) -> bool:
        """Whether the receivers of one source form a chain."""
        return self.multicast and (self.join or not self.locality)

    def _groups(
        self, given: ProvisionInput, sites: Sequence[int], sources: int | None
    ) -> "list[sourcing.PipelineSites]":
        """Pipelines of these sites, in this order, as long as a pipeline is expected to answer the waiting requests
        sooner than whole models.

        Either all sites have the files (None), or all get them from so many `sources` (0: from the store), because a
        pipeline starts only when its slowest part has. Both answer their share of the waiting requests.
        """
        groups: list[sourcing.PipelineSites] = []
        if not self.partition or not sourcing.is_awaited(given) or len(sites) < 2 or given.belief.layer_count < 2:
            return groups
        costs = sourcing.piece_costs(given, self.link_mbps)
        left, added = list(sites), len(sites)
        while len(left) > 1:
            starts = self._downloads(given, left, sources)
            cold_s = starts.cold_s(1.0, 1, len(left))
            waiting = expected_requests(given.waiting, given.arrivals_rps, given.served_rps, cold_s)
            own = max(1, round(waiting * added / given.count))
            if self.cuts == "best":
                cuts = _best_cuts(costs, own, len(left), self.pieces_max, starts)
            else:
                cuts = filled_cuts(costs, given.costs.layer_bytes, self.cuts)
            count = len(cuts) + 1
            if count == 1 or count > len(left):
                break
            whole = len(left) // count * count
            bounds = (0, *cuts, costs.layers)
            groups += [sourcing.PipelineSites(tuple(left[at : at + count]), bounds) for at in range(0, whole, count)]
            left = left[whole:]
        return groups

    def _downloads(self, given: ProvisionInput, sites: Sequence[int], sources: int | None) -> PieceDownloads:
        """How long starts at these sites are expected to take; see `_groups`."""
        costs, bits = given.costs, given.costs.weights.size_bytes * 8 if sources is not None else 0
        return PieceDownloads(
            process_s=costs.process_s,
            local_s=costs.load_s + costs.send_s,
            download_s=bits / (self.link_mbps * 1e6),
            send_s=bits / ((self.link_mbps if sources else self.store_mbps) * 1e6),
            senders=max(1, sources or 0),
            nodes=len({sourcing.node_of(given.sites[index]) for index in sites}),
            is_chain=self._chains,
            is_shared=self._shares,
        )


# Places


def primed_first(given: ProvisionInput, ready: AbstractSet[str], coming: AbstractSet[str]) -> list[int]:
    """Sites by the two stages of Flashpoint (section 2.8).

    First, replicas fill the nodes that have the weights, then those where they arrive, of both the nodes with the most
    room first. Then each other node gets one replica, so that many nodes will have the weights: the least used first,
    racks in turn. Then each gets a second one, and so on.
    """
    tried = sourcing.TriedStarts(given)
    primed = [name for name in tried.nodes if name in ready | coming]
    tried.fill(sorted(primed, key=lambda name: (name not in ready, -tried.places[name])))
    tried.spread(sourcing.fresh_in_turn(node for name, node in tried.nodes.items() if name not in ready | coming))
    return tried.chosen


def least_used_first(given: ProvisionInput) -> list[int]:
    """Each replica on the node that is least used, counting the replicas that were chosen before it."""
    tried = sourcing.TriedStarts(given)
    used = {name: sourcing.used_part(node) for name, node in tried.nodes.items()}
    while used and len(tried.chosen) < given.count:
        name = min(used, key=used.__getitem__)  # of equally used ones the first
        if tried.put(name):
            used[name] += _step(tried.nodes[name], given)
        else:
            del used[name]
    return tried.chosen


def _step(view: NodeView, given: ProvisionInput) -> float:
    """By how much one more replica raises that fraction."""
    devices, slot = view.devices, given.spec.slot
    return slot.share / len(devices) if devices else slot.cores / max(ROUNDING, view.node.cores)


# Cuts


@lru_cache(maxsize=4096)
def _best_cuts(
    costs: PieceCosts, requests: int, devices: int, pieces_max: int, starts: PieceDownloads
) -> tuple[int, ...]:
    """Where to cut the model if `requests` wait and `devices` are added; empty if whole models are as good."""
    fronts = sourcing.plans_of(costs).fronts(sourcing.most_pieces(pieces_max, devices))
    found = best_plan(fronts, requests, devices, pieces_max=pieces_max or None, starts=starts)
    return found.cuts if found is not None else ()


# Autoscalers

S_PER_MINUTE: Final = 60
TOLERANCE: Final = 0.1
"""`TorchServe` changes nothing while wait over target differs from 1 by no more, as autoscaling/v2."""


@dataclass(frozen=True, slots=True)
class ReactiveScale(Scale):
    """What the autoscalers have in common: equal replicas of each stage, as many as `_proposed` says."""

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    replicas_min: PositiveInt = 1
    replicas_max: int = 64
    initial: NonNegativeInt = 0
    """Replicas before any request has been seen; 0: `replicas_min`."""
    cores: PositiveFloat = 1.0
    """Of each replica."""
    batch_max: NonNegativeInt = 1
    """As published, there are no batches. 0: the largest batch within half the SLO."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    _up_period_ns: ClassVar[int] = 0
    """Scale up by at most 4 replicas or a doubling in this time, as Kubernetes does; 0: without a limit."""
    window_ns: PositiveInt = s(60)
    """The measurement is that of this time."""
    period_ns: PositiveInt = s(15)

    def __post_init__(self) -> None:
        check_range("replicas_max", self.replicas_max, least=self.replicas_min)

    def plan(
        self, now_ns: int, view: ClusterView, memory: targets.ByStage[targets.CountHistory] | None
    ) -> tuple[Plan, targets.ByStage[targets.CountHistory]]:
        """InputError for a variant that some stage does not have."""
        view, past = targets.on_one_kind(view, self.hardware), dict(memory or ())
        decided = [(stage.name, *self._stage(now_ns, stage, past.get(stage.name))) for stage in view.stages]
        return targets.remembered(decided)

    @abstractmethod
    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        """The number of replicas that the measurement asks for, not rounded, and the measurement as text.

        `capacity_rps` is what one replica serves, `current` the number that was decided last. The stage has buckets.
        """

    def _stage(
        self, now_ns: int, stage: StageView, past: targets.CountHistory | None
    ) -> tuple[StagePlan, str, targets.CountHistory]:
        past = past or targets.CountHistory(max(self.replicas_min, min(self.initial, self.replicas_max)))
        belief = targets.belief_of(stage, self.variant)
        wanted, seen = float(past.count), "nothing seen yet"
        if stage.buckets:
            wanted, seen = self._proposed(stage, self._capacity_rps(stage, belief), past.count)
        past, note = past.decide(
            now_ns,
            max(self.replicas_min, min(round_up(wanted), self.replicas_max)),
            stabilisation_ns=0,  # the publication argues that fast starts make it needless
            up_period_ns=self._up_period_ns,
            replicas_max=self.replicas_max,
        )
        planned = targets.equal_replicas(
            stage, belief, count=past.count, cores=self.cores, batch_max=self.batch_max, in_place=False
        )
        return planned, f"{stage.name}: {seen} → {counted(past.count, 'replica')}{note}", past

    def _capacity_rps(self, stage: StageView, belief: Belief) -> float:
        """Requests per second that one replica serves in full batches: 1/d for single requests."""
        batch = targets.largest_batch(stage, belief, self.cores, self.batch_max)
        return batch * 1000.0 / belief.latency_ms(batch, belief.slot(self.cores))


@dataclass(frozen=True, slots=True)
class AtollRate(ReactiveScale):
    """Atoll's autoscaler in its request-rate mode: replicas for the P99 of the rates of the last seconds.

    Replicas = ⌈factor × P99 × d⌉ with d the believed time of a request (Singhvi et al., Atoll, SoCC 2021, as
    compared with in Flashpoint). It does not depend on how many replicas there are. The P99 is interpolated
    between seconds: by nearest rank, the P99 of a minute would be its busiest second. Scales in bursts with the rate,
    and pays for a burst for as long as it is in the window.
    """

    factor: PositiveFloat = 1.0
    """Factor of the number of replicas."""

    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        rates = sorted(seconds_rps([bucket.arrivals for bucket in stage.window(self.window_ns)], stage.bucket_ns))
        peak_rps = interpolated_quantile(rates, 0.99)
        seen = f"{peak_rps:.4g} requests/s in the busiest 1% of {in_s(self.window_ns)}"
        return self.factor * peak_rps / capacity_rps, seen


@dataclass(frozen=True, slots=True)
class TorchServe(ReactiveScale):
    """TorchServe on Kubernetes: its autoscaler on the mean time that requests wait in the queue.

    Replicas = ⌈ready × wait/target⌉, no change within the tolerance, at most 4 more or a doubling in 15 s, as in
    autoscaling/v2. The mean wait of the window is the waiting requests over the arrivals per second (Little's law).
    With queues of 7 s, the published target, it fails for every deadline below: it keeps too few replicas until the
    queue is long, and then adds many at once.
    """

    target_ns: PositiveInt = s(7)
    """The mean wait to aim for."""
    _up_period_ns: ClassVar[int] = s(15)

    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        ready, window = stage.count(Life.READY), stage.window(self.window_ns)
        wait_ns = sum(bucket.waiting_ns for bucket in window) / max(1, sum(bucket.arrivals for bucket in window))
        seen = f"mean wait {wait_ns / NS_PER_S:.3g} s of {in_s(self.target_ns)}"
        ratio = wait_ns / self.target_ns
        if not ready or abs(ratio - 1.0) <= TOLERANCE:
            return current, f"{seen}, {'within tolerance' if ready else 'no replica has been ready'}"
        wanted = ready * ratio
        return (max(wanted, current) if ratio > 1.0 else min(wanted, current)), seen


@dataclass(frozen=True, slots=True)
class SageMaker(ReactiveScale):
    """Amazon SageMaker's target tracking: replicas for a target of requests per replica and minute.

    Replicas = ⌈requests of the last minute/target⌉. The target is `safety` × what a replica serves in a minute; AWS
    recommends 0.5, so that there are twice as many replicas as needed. Sees a burst only in the mean of a minute.
    """

    safety: PositiveFloat = 0.5
    """Part of a replica's capacity to use."""
    period_ns: PositiveInt = s(60)

    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        per_minute = S_PER_MINUTE * stage.rate_rps(self.window_ns)
        target = S_PER_MINUTE * self.safety * capacity_rps
        seen = f"{per_minute:.4g} requests per minute over {to_s(self.window_ns):g} s, target {target:.4g} each"
        return per_minute / target, seen
