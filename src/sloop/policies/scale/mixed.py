"""The scaling policy `Mixed`: the cheapest replicas on all kinds of hardware that carry the forecast in time.

Our own; the problem is that of Ribbon (SC 2021) and Kairos (HPDC 2023), which choose a fixed mix of EC2 instances by
search. Per stage, variant and kind of hardware there are replicas of some sizes, each with the batch that serves most
within the stage's part of the deadline; an integer program chooses how many of each (`sloop.solvers.mixed`). What
counts is the price of whole nodes on demand, and on other nodes that of a replica's share; cores where no kind has a
price. Nodes that are always there cost the same whatever the plan, so what is idle of them counts nowhere. Accuracy is
not traded: only variants that are at least as accurate as the wanted one take part.

A request that arrives just after a batch has started waits for that batch before its own runs, so a batch may take half
of the stage's part (Nexus, SOSP 2019). Where nothing is fast enough for that, batches of one may take all of it.

Where the profile says how batches disturb each other on an accelerator, as many replicas share it as serve most
together; all are planned for as slow as they are side by side. PALDIA's Eq. 1 queues what does not run at once behind
all that does; so many residents take the queue in turn, and are done earlier (its specification, 2.1.1).

With `group_ns` the requests of that time come at once, and all that the replicas get done within the deadline counts.

A replica that is not there yet costs more by `start`, and a lower rate counts only after `calm_ns`. So replicas start
because of the load, not because two mixes cost nearly the same. Nodes on demand are paid for as a whole. The policy
fails where several applications share them: each plans as if it paid for whole nodes alone.
"""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sloop.core.ledger import MICRO, Ledger, equal_nodes, replicas_max
from sloop.core.nodes import UNUSED_NS
from sloop.core.protocols import Scale
from sloop.core.views import Belief, ClusterView, NodeView, StageView
from sloop.errors import InputError
from sloop.options import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from sloop.policies import targets
from sloop.profile.interference import NO_SLOWDOWN
from sloop.solvers import mixed
from sloop.solvers.budget import IndexedPath
from sloop.solvers.mixed import Mix, MixNodes, MixOption, MixStage, TimedCosts
from sloop.text import arrows, counted, listed
from sloop.units import NS_PER_MS, ROUNDING, s, to_ms
from sloop.vocabulary import Group, Plan, ReplicaSpec, Slot, StagePlan

COUNT_MAX: Final = 10_000
"""The most replicas of one kind and size."""
USD_PER_CORE: Final = 1e-6
"""The price of a core-hour on nodes without a price, beside nodes with one: nearly nothing, but fewer are better."""
BETTER: Final = 1.001
"""A smaller replica is an option if it serves this many times as much for its price as all larger ones."""
PACKINGS_MAX: Final = 3
"""How often a mix is chosen again because its replicas, of several sizes, do not fit on the nodes one by one."""
SIZES_ASKED: Final = 16
"""For how many batch sizes a law of interference is asked."""
RESIDENTS_MAX: Final = 8
"""The most replicas of a stage that are planned for one accelerator."""
WAIT_FOR_A_BATCH: Final = 2
NO_WAIT: Final = 1


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """One kind of replica of a stage: a variant on a slot."""

    belief: Belief
    slot: Slot
    cost: float
    """Of one replica: USD per hour, or cores."""
    most: int
    """How many fit on the empty nodes."""
    present: int
    """How many such replicas the plan in force has."""
    pool: int
    """The index of its kind of node in `MixedCluster.pools`."""
    nodes: float
    """The part of a node that one replica takes: 1 divided by how many fit on one."""
    residents: int = 1
    """How many such replicas share an accelerator, and slow each other down."""

    def taken_ms(self, batch_max: int) -> NDArray[np.float64]:
        """The duration of a batch of 1, 2, … `batch_max` beside those of the other residents."""
        alone_ms = np.array(self.belief.costs_ns(self.slot)[1 : batch_max + 1], dtype=np.float64) / NS_PER_MS
        if self.residents == 1:
            return alone_ms
        return np.multiply(alone_ms, _slowdowns(self.belief, self.slot, self.residents)[: len(alone_ms)])

    @property
    def alone_ms(self) -> float:
        """The duration of a batch of one."""
        return to_ms(self.belief.costs_ns(self.slot)[1])

    def best_batch(self, limit_ms: float, batch_max: int, group_ms: float) -> tuple[int, float]:
        """The batch that serves most requests per second among those that take at most `limit_ms`, and how many it
        serves; none if all take longer. With `group_ms` all requests of this time come at once, and those that are done
        within the limit count."""
        taken_ms = self.taken_ms(batch_max)
        sizes = np.arange(1, len(taken_ms) + 1)
        served_rps = 1000.0 * sizes / taken_ms
        if group_ms:
            full = np.floor(limit_ms / taken_ms + ROUNDING)
            rest = np.searchsorted(taken_ms, limit_ms - full * taken_ms + ROUNDING, side="right")
            served_rps = np.minimum(served_rps, 1000.0 * (full * sizes + np.minimum(rest, sizes)) / group_ms)
        served_rps = np.where(taken_ms <= limit_ms + ROUNDING, served_rps, 0.0)
        best = int(served_rps.argmax())
        return best + 1, float(served_rps[best])


def _slowdowns(belief: Belief, slot: Slot, residents: int) -> NDArray[np.float64]:
    """How many times as long a batch of 1, 2, … takes among so many equal ones on its device: by the law at some sizes,
    and linear in between, which for a convex law is a little too long."""
    law, together = belief.interference, np.array([float(residents)])
    sizes = sorted({round(size) for size in np.linspace(1, belief.batch_max, SIZES_ASKED)})
    factors = [float(law.among_equals(belief.demand(size, slot), together)[0]) for size in sizes]
    return np.interp(np.arange(1, belief.batch_max + 1), sizes, factors)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one stage can choose from: for each option of `stage` the size, and its batch."""

    stage: MixStage
    sizes: tuple[tuple[ReplicaSize, int], ...]


@dataclass(frozen=True, slots=True)
class MixedMemory:
    """State between decisions."""

    rates: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(instant, rate of each stage) of the last `calm_ns`, oldest first."""
    parts_ms: tuple[float, ...] = ()
    """The parts of the deadline for which the mix in force was chosen."""
    decided: tuple[object, ...] = ()
    """What the last decision was made from: it stays for as long as that does not change."""


@dataclass(frozen=True, slots=True)
class Mixed(Scale):
    """The cheapest replicas that carry `headroom` more than the largest forecast of the last `calm_ns`."""

    headroom: NonNegativeFloat = 0.2
    """Plan for the demand times 1 + `headroom`, because arrivals are not evenly spaced."""
    margin: Fraction = 0.9
    """Fraction of every deadline to plan with."""
    calm_ns: NonNegativeInt = s(60)
    """How long the demand must have been lower before fewer replicas are planned."""
    start: NonNegativeFloat = 0.2
    """What a start costs, as a fraction of the hourly price of the replica: other replicas replace those in force only
    if they save more than that within the hour."""
    cores: tuple[PositiveFloat, ...] = ()
    """Core counts to choose from; empty: as many as the profile can use, up to those of a node, and 1, 2, 4, … where a
    core then serves more."""
    batch_max: NonNegativeInt = 0
    """The largest batch; 0: as large as profile and deadline allow."""
    group_ns: NonNegativeInt = 0
    """The requests of so long a time come at once; 0: they come evenly, as a Poisson process."""
    release_after_ns: NonNegativeInt = UNUSED_NS
    """How long a node on demand stays empty before it is released. Where nodes come within seconds, less is cheaper."""
    hardware: tuple[str, ...] = ()
    """The kinds of nodes to use; empty: all."""
    variant: str = ""
    """The variant that every stage runs, or others that are at least as accurate; empty: the first."""
    initial_rps: NonNegativeFloat = 0.0
    """The rate to expect before any request has come."""
    period_ns: PositiveInt = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: MixedMemory | None) -> tuple[Plan | None, MixedMemory]:
        """The cheapest mix; None while nothing has changed. InputError for a variant that a stage does not have, a kind
        that the cluster does not have, or core counts that no node has."""
        cluster, memory = MixedCluster.of(view, self), memory or MixedMemory()
        if cluster.without_room:
            if self.cores and view.plan is None:
                targets.core_choices(view, self.cores, 1, "mixed")
            return _kept(view, f"no node has room for a replica of {listed(cluster.without_room)}"), memory
        rates, recent = self._rates(now_ns, view, memory.rates)
        memory = replace(memory, rates=recent)
        decided = (rates, view.plan and view.plan.stages, *cluster.signature)
        if memory.decided == decided and view.plan is not None:
            return None, memory
        made, parts_ms = self._decide(cluster, rates, memory.parts_ms)
        if view.plan is not None and _replicas(made) == _replicas(view.plan):  # only the planned rates differ
            made = structs.replace(made, stages=view.plan.stages)
        return made, MixedMemory(recent, parts_ms, (rates, made.stages, *cluster.signature))

    @property
    def arrivals(self) -> Literal["even", "burst"]:
        """The arrivals that `group_ns` assumes; `sloop plan` reports them."""
        return "burst" if self.group_ns >= s(1) else "even"

    def _rates(
        self, now_ns: int, view: ClusterView, recent: tuple[tuple[int, tuple[float, ...]], ...]
    ) -> tuple[tuple[float, ...], tuple[tuple[int, tuple[float, ...]], ...]]:
        """By stage, the visits per second to plan for; and the rates of the last `calm_ns`."""
        has_seen = bool(view.ingress.buckets)
        rates = tuple(
            view.demand_rps[stage.name] if has_seen else self.initial_rps * stage.visits for stage in view.stages
        )
        recent = (*(each for each in recent if each[0] > now_ns - self.calm_ns), (now_ns, rates))
        most = tuple((1 + self.headroom) * max(own) for own in zip(*(rates for _, rates in recent), strict=True))
        return most, recent

    def _decide(
        self, cluster: "MixedCluster", rates: Sequence[float], before_ms: tuple[float, ...]
    ) -> tuple[Plan, tuple[float, ...]]:
        """The plan, and the parts of the deadline for which it was chosen; `before_ms` are those of the mix in
        force."""
        waits = NO_WAIT if self.group_ns else WAIT_FOR_A_BATCH
        parts_ms = cluster.parts_ms(rates, waits)
        if parts_ms is None:
            waits = NO_WAIT
            parts_ms = cluster.parts_ms(rates, waits)
        if parts_ms is None:
            return cluster.too_slow(rates), before_ms
        divisions = [parts_ms, before_ms] if len(before_ms) == len(rates) > 1 else [parts_ms]
        best: tuple[float, list[Offer], Mix, tuple[float, ...]] | None = None
        for own_ms in divisions:
            offers = cluster.offers(rates, own_ms, waits)
            mix = cluster.cheapest(offers)
            if mix is not None:
                cost = mix.cost + self.start * mix.started
                if best is None or cost < best[0] * (1 - ROUNDING):
                    best = (cost, offers, mix, own_ms)
        if best is None:
            return cluster.saturated(cluster.offers(rates, parts_ms, waits), rates, self.headroom), before_ms
        _, offers, mix, parts_ms = best
        return cluster.plan(offers, mix, rates), parts_ms


def _kept(view: ClusterView, why: str) -> Plan:
    """The plan in force, or one without replicas, because none can be made."""
    stages = view.plan.stages if view.plan else tuple(StagePlan(stage.name, (), batch_max=1) for stage in view.stages)
    return Plan(stages, why, feasible=False, saturated=tuple(stage.name for stage in view.stages))


def _replicas(plan: Plan) -> list[tuple[str, list[tuple[ReplicaSpec, int, int]]]]:
    """The replicas of a plan with their batches, by stage."""
    return [
        (target.stage, [(group.spec, group.count, target.batch_max_of(group)) for group in target.groups])
        for target in plan.stages
    ]


@dataclass(frozen=True, slots=True)
class MixedCluster:
    """The stages of an application with the sizes of their replicas, and the nodes of the cluster."""

    policy: Mixed
    stages: tuple[StageView, ...]
    sizes: tuple[tuple[ReplicaSize, ...], ...]
    paths: tuple[IndexedPath, ...]
    nodes: tuple[NodeView, ...]
    pools: tuple[MixNodes, ...]
    """The nodes of each kind."""
    unit: str
    """Of costs, as text."""

    @classmethod
    def of(cls, view: ClusterView, policy: Mixed) -> "MixedCluster":
        for kind in policy.hardware:
            targets.check_kind(view, kind)
        nodes = targets.usable(
            [node for node in view.nodes if node.node.hardware in policy.hardware or not policy.hardware]
        )
        by_kind: dict[str, list[NodeView]] = {} if nodes else {"": []}
        for node in nodes:
            by_kind.setdefault(node.node.hardware, []).append(node)
        has_prices = any(node.node.usd_per_h for node in nodes)
        used = {kind for stage in view.stages for _, kind in stage.beliefs}
        unpriced = [kind for kind, own in by_kind.items() if kind in used and any(map(_is_free, own))]
        if has_prices and unpriced:
            raise InputError(
                f"mixed rents the cheapest nodes, and {listed(unpriced)} has no price",
                help="give its nodes `usd_per_h`, or name the kinds to use under `hardware`",
            )
        kinds = list(by_kind)
        distinct = {kind: [(len(each), each[0]) for each in equal_nodes(own).values()] for kind, own in by_kind.items()}
        present = {
            (group.spec.stage, group.spec.variant, group.spec.slot): group.count
            for target in (view.plan.stages if view.plan else ())
            for group in target.groups
        }
        sizes = tuple(
            tuple(
                ReplicaSize(
                    belief,
                    slot,
                    cost,
                    most,
                    present.get((stage.name, belief.variant, slot), 0),
                    kinds.index(belief.hardware),
                    nodes_each,
                    residents,
                )
                for belief in _beliefs(stage, by_kind, policy)
                for slot, cost, most, nodes_each, residents in _slots(
                    belief, distinct[belief.hardware], policy, has_prices=has_prices
                )
            )
            for stage in view.stages
        )
        paths = targets.indexed_paths(view, policy.margin)
        on_no_path = sorted(set(range(len(view.stages))) - {stage for path in paths for stage in path.stages})
        paths += tuple(IndexedPath((at,), policy.margin * to_ms(view.stages[at].slo_ns)) for at in on_no_path)
        unit = "USD/h" if has_prices else "cores"
        pools = tuple(_pool(own, has_prices=has_prices) for own in by_kind.values())
        return cls(policy, view.stages, sizes, paths, nodes, pools, unit)

    @property
    def without_room(self) -> list[str]:
        """The stages of which no replica fits on any node: nodes are lost, or other applications need them."""
        return [stage.name for stage, own in zip(self.stages, self.sizes, strict=True) if not own]

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for clusters on which the same rates give the same mix: speeds, nodes and deadlines."""
        speeds = tuple(
            (size.belief.variant, size.slot, size.most, size.belief.costs_ns(size.slot)[-1], size.alone_ms)
            for own in self.sizes
            for size in own
        )
        return speeds, self.pools, self.paths

    def parts_ms(self, rates: Sequence[float], waits: int) -> tuple[float, ...] | None:
        """By stage its part of the deadline, if a request needs `waits` times the duration of a batch."""
        choices = []
        for own, rate_rps in zip(self.sizes, rates, strict=True):
            time_ms, cost = [], []
            for size in own:
                taken_ms = size.taken_ms(self._batch_max(size, waits))
                batches = np.arange(1, len(taken_ms) + 1)
                replicas = np.maximum(1.0, np.ceil(rate_rps * taken_ms / (1000.0 * batches) - ROUNDING))
                time_ms.append(waits * taken_ms)
                cost.append(size.cost * replicas)
            choices.append(TimedCosts(np.concatenate(time_ms), np.concatenate(cost)))
        return mixed.deadline_parts(choices, self.paths)

    def offers(self, rates: Sequence[float], parts_ms: Sequence[float], waits: int) -> list[Offer]:
        """What each stage can choose from within its part of the deadline."""
        return [
            self._offer(own, rate_rps, part_ms, waits)
            for own, rate_rps, part_ms in zip(self.sizes, rates, parts_ms, strict=True)
        ]

    def _offer(self, sizes: Sequence[ReplicaSize], rate_rps: float, part_ms: float, waits: int) -> Offer:
        found: list[tuple[ReplicaSize, int]] = []
        options: list[MixOption] = []
        best: dict[tuple[str, str], float] = {}
        for size in sizes:  # the largest of each variant and kind comes first
            batch, served_rps = size.best_batch(
                part_ms / waits, self._batch_max(size, waits), to_ms(self.policy.group_ns)
            )
            key = (size.belief.variant, size.belief.hardware)
            if served_rps / size.cost > BETTER * best.get(key, 0.0):
                if key in best and found[-1][0].residents != size.residents:  # they would not be as many as planned
                    del found[-1], options[-1]
                best[key] = served_rps / size.cost
                found.append((size, batch))
                options.append(MixOption(served_rps, size.cost, size.most, size.present, size.pool, size.nodes))
        return Offer(MixStage(rate_rps, tuple(options)), tuple(found))

    def _batch_max(self, size: ReplicaSize, waits: int) -> int:
        if waits == NO_WAIT and not self.policy.group_ns:
            return 1
        return min(self.policy.batch_max or size.belief.batch_max, size.belief.batch_max)

    def cheapest(self, offers: Sequence[Offer]) -> Mix | None:
        """The cheapest mix whose replicas fit on the nodes; None if there is none."""
        stages, pools = [offer.stage for offer in offers], list(self.pools)
        for _ in range(PACKINGS_MAX):
            mix = mixed.cheapest(stages, pools, start=self.policy.start)
            left_over = self._left_over(offers, mix) if mix is not None else ()
            if mix is None or not left_over:
                return mix
            for size in left_over:
                pools[size.pool] = pools[size.pool].without(size.nodes)
        return None

    def _left_over(self, offers: Sequence[Offer], mix: Mix) -> Sequence[ReplicaSize]:
        """The replicas of the mix for which there is no room when all are placed, the largest first."""
        chosen = [
            (size, count)
            for offer, counts in zip(offers, mix.counts, strict=True)
            for (size, _), count in zip(offer.sizes, counts, strict=True)
            if count
        ]
        kinds = [size.slot.hardware for size, _ in chosen]
        # Equal replicas fit, because `most` counts how many do.
        shared = [(size, count) for size, count in chosen if kinds.count(size.slot.hardware) > 1]
        nodes = [node.node for node in self.nodes if kinds.count(node.node.hardware) > 1]
        if not nodes:
            return ()
        ordered = sorted(shared, key=lambda pair: -pair[0].slot.cores)
        replicas = [size for size, count in ordered for _ in range(count)]
        wanted = [(ReplicaSpec("", size.belief.variant, size.slot), size.belief) for size in replicas]
        return [replicas[index] for index in Ledger.all_ready(nodes).without_room(wanted)]

    def plan(self, offers: Sequence[Offer], mix: Mix, rates: Sequence[float]) -> Plan:
        """The mix as a plan."""
        stages = tuple(map(self._stage_plan, self.stages, offers, mix.counts))
        why = f"{self._seen(rates)} → {_described(stages)}: {mix.cost:.4g} {self.unit}"
        return Plan(stages, why)

    def _seen(self, rates: Sequence[float]) -> str:
        """The rates as text."""
        if not any(rates):
            return "no requests"
        if len(rates) == 1:
            return f"{rates[0]:.4g} requests/s with headroom"
        each = ", ".join(f"{stage.name} {rate:.4g}" for stage, rate in zip(self.stages, rates, strict=True))
        return f"visits/s with headroom: {each}"

    def _stage_plan(self, stage: StageView, offer: Offer, counts: Sequence[int]) -> StagePlan:
        served_rps = sum(n * option.rate_rps for n, option in zip(counts, offer.stage.options, strict=True))
        groups = tuple(
            Group(
                ReplicaSpec(stage.name, size.belief.variant, size.slot),
                count,
                batch_max=batch,
                rate_rps=offer.stage.rate_rps * count * option.rate_rps / served_rps,
            )
            for (size, batch), option, count in zip(offer.sizes, offer.stage.options, counts, strict=True)
            if count
        )
        return StagePlan(stage.name, groups, max(group.batch_max for group in groups))

    def saturated(self, offers: Sequence[Offer], rates: Sequence[float], headroom: float = 0.0) -> Plan:
        """The plan if the cluster is too small for the rates, which have this much `headroom`: the largest share of
        them that fits. Stages are saturated if it does not carry the demand either."""
        found = mixed.largest_share([offer.stage for offer in offers], self.pools)
        names = tuple(stage.name for stage in self.stages)
        if found is None:
            ones = tuple(tuple(int(index == 0) for index in range(len(offer.sizes))) for offer in offers)
            why = f"the nodes do not hold one replica of each of {counted(len(names), 'stage')}"
            plan = self.plan(offers, Mix(ones, math.inf, math.inf), rates)
            return structs.replace(plan, why=why, feasible=False, saturated=names)
        mix, share = found
        plan = self.plan(offers, mix, rates)
        carried = f"all nodes together carry {share:.0%} of it"
        if share * (1 + headroom) >= 1 - ROUNDING:
            return structs.replace(plan, why=f"{plan.why}; {carried}, which is enough without headroom", feasible=False)
        return structs.replace(plan, why=f"{plan.why}; saturated: {carried}", feasible=False, saturated=names)

    def too_slow(self, rates: Sequence[float]) -> Plan:
        """The plan if no hardware is fast enough: the fastest replicas, without batches."""
        fastest = [min(own, key=lambda size: (size.alone_ms, size.cost)) for own in self.sizes]
        fastest_ms = [size.alone_ms for size in fastest]
        offers = [self._offer((size,), rate, math.inf, NO_WAIT) for size, rate in zip(fastest, rates, strict=True)]
        mix = self.cheapest(offers)
        plan = self.saturated(offers, rates) if mix is None else self.plan(offers, mix, rates)
        worst = max(self.paths, key=lambda path: sum(fastest_ms[at] for at in path.stages) - path.slo_ms)
        slowest = max(worst.stages, key=fastest_ms.__getitem__)
        needed_ms = sum(fastest_ms[at] for at in worst.stages)
        path = arrows([self.stages[at].name for at in worst.stages])
        what = (
            f"{path} takes {needed_ms:.4g} ms on the fastest hardware, "
            f"{needed_ms - worst.slo_ms:.4g} ms more than its {worst.slo_ms:.4g} ms; most of it "
            f"{self.stages[slowest].name}, {fastest_ms[slowest]:.4g} ms on {_kind(fastest[slowest].slot)}"
        )
        return structs.replace(plan, why=f"{what}; {plan.why}", feasible=False)


def _is_free(node: NodeView) -> bool:
    """Whether it could be rented and costs nothing, because nobody has said what it costs."""
    return node.node.on_demand and not node.node.usd_per_h


def _beliefs(stage: StageView, kinds: Container[str], policy: Mixed) -> Iterator[Belief]:
    """The variants that may run, on each kind: the wanted one, and all that are at least as accurate."""
    names = list(dict.fromkeys(variant for variant, _ in stage.beliefs))
    wanted = policy.variant or names[0]
    if wanted not in names:
        raise InputError(f"stage {stage.name} has no variant {wanted!r}", help=f"use one of {', '.join(names)}")
    kinds_of = [kind for _, kind in stage.beliefs]
    if policy.hardware and not set(kinds_of) & set(policy.hardware):
        what = f"stage {stage.name} has no profile for {listed(policy.hardware, 'or')}"
        raise InputError(what, help=f"it has one for {listed(list(dict.fromkeys(kinds_of)))}")
    least = next(belief.accuracy for (variant, _), belief in stage.beliefs.items() if variant == wanted)
    for (variant, kind), belief in stage.beliefs.items():
        is_accurate = least is not None and belief.accuracy is not None and belief.accuracy >= least
        if kind in kinds and (variant == wanted or is_accurate):
            yield belief


def _slots(
    belief: Belief, nodes: Sequence[tuple[int, NodeView]], policy: Mixed, *, has_prices: bool
) -> Iterator[tuple[Slot, float, int, float, int]]:
    """The slots of replicas that fit on a node, the largest first: each with its cost, how many fit on all nodes, the
    part of a node that it takes, and how many share a device. `nodes` has one node of each group of equal ones, and how
    many they are.

    A profile that gives the same latency on fewer cores only does not say how cores matter, and offers no smaller size.
    """
    most_cores = min(belief.cores_max, max((node.node.cores for _, node in nodes), default=math.inf))
    offered = policy.cores or (most_cores, *(2.0**power for power in range(10)))
    largest_ns = belief.costs_ns(belief.slot(most_cores))
    slots = [
        (belief.slot(cores), 1)
        for cores in sorted({cores for cores in offered if cores <= most_cores + ROUNDING}, reverse=True)
    ]
    residents = _residents(belief, slots[0][0], nodes) if slots else 1
    cores = math.floor(1000 * min([most_cores, *(node.node.cores / residents for _, node in nodes)])) / 1000
    if residents > 1 and cores > 0:  # other applications may have all
        share = math.floor(MICRO / residents) / MICRO
        slots.append((structs.replace(belief.slot(cores), share=share), residents))
    for slot, residents in slots:
        counts = [replicas_max(node.node, slot, belief) for _, node in nodes]
        most = (
            min(COUNT_MAX, sum(n * count for (n, _), count in zip(nodes, counts, strict=True))) if nodes else COUNT_MAX
        )
        is_smaller = slot.cores < most_cores and residents == 1
        if not most or (not policy.cores and is_smaller and belief.costs_ns(slot) == largest_ns):
            continue
        prices = [
            _price(node, slot, has_prices=has_prices) for (_, node), count in zip(nodes, counts, strict=True) if count
        ]
        each = 1.0 / max(counts) if nodes else 0.0
        yield slot, min(prices, default=slot.cores), most, each, residents


def _residents(belief: Belief, slot: Slot, nodes: Sequence[tuple[int, NodeView]]) -> int:
    """How many equal replicas on one accelerator serve most with their largest batches; of equal numbers the least. One
    where the profile does not say how they disturb each other, or where a share is a limit."""
    devices = [each.device for _, node in nodes for each in node.devices if each.device.kind == belief.accelerator]
    full = belief.demand(belief.batch_max, slot)
    if not belief.accelerator or belief.interference is NO_SLOWDOWN or full.is_capped or slot.share < 1 or not devices:
        return 1
    each_bytes = belief.device_memory_bytes
    most = min(targets.together_max(each.memory_bytes, each_bytes, clients_max=each.clients_max) for each in devices)
    counts = np.arange(1.0, min(RESIDENTS_MAX, max(1, most)) + 1)
    return int((counts / belief.interference.among_equals(full, counts) * (1 - ROUNDING * counts)).argmax()) + 1


def _price(node: NodeView, slot: Slot, *, has_prices: bool) -> float:
    """What a replica on this node costs: the larger of its shares of the node's cores and devices, times the price."""
    if not has_prices:
        return slot.cores
    share = slot.cores / node.node.cores
    if slot.accelerator and node.node.devices:
        share = max(share, slot.share / len(node.node.devices))
    return max(node.node.usd_per_h * min(1.0, share), USD_PER_CORE * slot.cores)


def _pool(nodes: Sequence[NodeView], *, has_prices: bool) -> MixNodes:
    """The nodes of a kind. Smaller ones count in part, because other applications have the rest of their cores."""
    if not nodes:
        return MixNodes(math.inf)
    largest = max(nodes, key=lambda node: node.node.cores).node
    rented = sum(node.node.on_demand for node in nodes)
    owned = sum(node.node.cores / largest.cores for node in nodes if not node.node.on_demand)
    price = max(largest.usd_per_h, USD_PER_CORE * largest.cores) if has_prices else largest.cores
    return MixNodes(owned, rented, price)


def _described(stages: Sequence[StagePlan]) -> str:
    """`detect 2 × c5.2xlarge (8 cores, batch 4) + 1 × g4dn.xlarge (4 cores and T4, batch 16); …`"""
    return "; ".join(
        f"{plan.stage} "
        + " + ".join(f"{group.count} × {_kind(group.spec.slot)}, batch {group.batch_max}" for group in plan.groups)
        for plan in stages
    )


def _kind(slot: Slot) -> str:
    device = f" and {slot.accelerator}" if slot.accelerator else ""
    return f"{counted(slot.cores, 'core')}{device}{f' of {slot.hardware}' if slot.hardware else ''}"
