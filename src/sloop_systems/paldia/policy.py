"""PALDIA's two policies: `Paldia` chooses the hardware and the replicas, `Hybrid` which batches run together on it.

`Paldia`: one kind of hardware at a time, the cheapest on which the expected requests end in time.
Each second it expects N requests, those of one `group_ns` and those that wait, and computes for every kind of hardware
when the last of them would end there: on a CPU batch by batch, on a GPU some together and the others queued. It
switches when it has preferred another kind several times in a row; the old replicas serve until the new ones are
ready. The values of `choice` and `sharing` give PALDIA, its baselines and its ablations:

| | `choice` | `sharing` |
| --- | --- | --- |
| PALDIA, as in its section III | `slo_first` | `hybrid` |
| PALDIA, as in its section IV | `tolerance` | `hybrid` |
| INFless/Llama (cost) | `isolated` | `together` |
| INFless/Llama (performance) | `fastest` | `together` |
| Molecule (cost) | `isolated` | `queue` |
| Molecule (performance) | `fastest` | `queue` |
| offline hybrid, MPS only, time sharing only | any, on one kind in `hardware` | `hybrid`, `together`, `queue` |

A replica runs one batch at a time, so the number of replicas on a device bounds how many batches run together there.
PALDIA decides anew for every group of requests how many of the replicas run, and leaves the others idle. A plan cannot
express that, so the batch policy `Hybrid` decides it in the systems `paldia`, `paldia-band`,
`oracle` and `offline-hybrid`. In the other systems every idle replica takes waiting requests, even one that is kept
only for the next peak. With `queue` there is one replica, exactly as in Molecule.

Source: PALDIA, specification sections 2.1 to 2.5 (with Algorithm 1 as repaired there) and 5.0; `solver.py`.
One device of one node is used, as in the publication, and one variant: this policy does not trade accuracy. The cores
of a node count as a device if the profile says how the model shares that many cores (`DeviceSharing.cores`); on other
CPUs one replica has all cores and runs one batch after the other.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, floor
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from msgspec import structs

from sloop.api import (
    NS_PER_MS,
    ROUNDING,
    Device,
    Fraction,
    Group,
    InputError,
    Life,
    Node,
    NodeState,
    NonNegativeFloat,
    NonNegativeInt,
    OutOfRange,
    Plan,
    PositiveInt,
    Range,
    ReplicaSpec,
    Slot,
    StagePlan,
    counted,
    in_ms,
    listed,
    ms,
    s,
    to_ms,
    to_s,
)
from sloop.api.policies import (
    MILLI,
    BatchDecision,
    BatchDevice,
    Belief,
    ClusterView,
    QueueView,
    RememberingBatch,
    Scale,
    StageView,
    targets,
)
from sloop_systems.paldia import solver
from sloop_systems.paldia.solver import (
    DelayedTermination,
    DeviceModel,
    DeviceSplit,
    HardwareOffer,
    HardwareRule,
    Sharing,
    batches_of,
    best_split,
)

SHARES_NOTHING: Final = 0.0
"""The share of a replica on a GPU: PALDIA neither caps nor reserves; memory and clients limit how many there are."""
CPU_WORKERS_MAX: Final = 6
"""The most replicas that share the cores of a node: as many as `sloop profile --sharing` measures
together by default. Each reserves an equal part of the cores, and may use all of them."""
Lane = Literal["work_conserving", "serial"]
"""When a queued batch starts: as soon as one of those that run together has ended, or alone after all of them."""

TOLERANCE_MS: Final = 50.0
"""With `choice: tolerance`, how much slower than the fastest GPU a kind may be."""

NO_WAIT: Final = "choose the lane work_conserving"


class HardwareCandidate(NamedTuple):
    """The stage's variant on one kind of hardware."""

    belief: Belief
    slot: Slot
    usd_per_h: float
    model: DeviceModel
    node: str | None = None
    """The node that replicas must be on; None if all nodes of the kind are equal."""
    device: str | None = None
    """The device that replicas must be on, likewise."""

    @property
    def is_gpu(self) -> bool:
        """Whether batches run on an accelerator."""
        return bool(self.belief.accelerator)

    @property
    def is_shared(self) -> bool:
        """Whether batches can run together: on an accelerator, or on cores that are not a cap."""
        return self.is_gpu or not self.slot.is_capped

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Lower means more performant."""
        return not self.is_gpu, self.model.per_request_ms, self.belief.hardware

    def split(self, count: int, sharing: Sharing) -> DeviceSplit:
        """How `count` requests run here: on a CPU one batch after the other, unless batches can share its cores."""
        if self.is_shared:
            return best_split(self.model, count, sharing)
        return DeviceSplit(max(0, count - self.model.batch), solver.serial_ms(self.model, count))

    def workers(self, count: int, split: DeviceSplit) -> int:
        """The replicas for `count` requests."""
        return max(1, solver.workers_needed(self.model, count, split)) if self.is_shared else 1

    def offer(self, t_max_ms: float) -> HardwareOffer:
        """This kind as an input of the choice of hardware; the last request ends after `t_max_ms`."""
        return HardwareOffer(self.belief.hardware, self.usd_per_h, t_max_ms, self.model.per_request_ms, self.is_gpu)


@dataclass(frozen=True, slots=True)
class PaldiaMemory:
    """State between decisions."""

    mismatches: int = 0
    """How many decisions in a row have preferred other hardware than that in use."""
    hardware: str = ""
    """The kind in use or, during a switch, the next one."""
    kept: DelayedTermination = field(default_factory=lambda: DelayedTermination(0))


@dataclass(frozen=True, slots=True)
class Paldia(Scale):
    """Plans the hardware that PALDIA or one of its baselines chooses, with as many replicas as batches run together
    there. Fails if the load changes faster than a node comes: it switches only after `wait_limit` decisions."""

    is_quick: ClassVar[bool] = True

    choice: HardwareRule = "slo_first"
    """See `HardwareRule`."""
    sharing: Sharing = "hybrid"
    """How a GPU is shared: by the best split, all `together`, or one batch after the other (`queue`)."""
    headroom_cpu: Fraction = 0.5
    """The fraction of the SLO within which the last of the expected requests must end on a CPU."""
    headroom_gpu: Fraction = 0.75
    """The same on a GPU; with `isolated` it is 1."""
    wait_limit: NonNegativeInt = 3
    """After this many decisions in a row that prefer other hardware, the next such decision switches."""
    group_ns: PositiveInt = s(1)
    """The requests of this time are planned for as if they arrived at once. PALDIA does not give a value; its results
    need about a second. If requests arrive evenly, less is enough, and cheaper."""
    backlog: bool = True
    """Whether waiting requests are added to the expected ones."""
    keep_alive_ns: NonNegativeInt = s(600)
    """How long a replica must not have been needed before it is stopped."""
    release_after_ns: NonNegativeInt = 0
    """How long a node on demand stays empty before it is released. PALDIA gives the old node back as soon as its last
    batch has ended."""
    batch_max: NonNegativeInt = 0
    """The largest batch; 0: the profile's largest one that takes at most the SLO. On a CPU it is a power of two, on a
    GPU any size; the specification (2.4) has powers of two for both."""
    hardware: tuple[str, ...] = ()
    """The kinds of nodes to choose from; empty: all."""
    variant: str = ""
    """Empty: the first variant."""
    initial_rps: NonNegativeFloat = 0.0
    """The rate to expect before any request has come."""
    period_ns: PositiveInt = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: PaldiaMemory | None) -> tuple[Plan | None, PaldiaMemory]:
        """A plan of replicas on the hardware in use or, during a switch, on the next one. InputError for several
        stages, for a variant or kind that does not exist, and for kinds without a price if prices decide."""
        stage = targets.one_stage(view, "paldia")
        candidates = self._candidates(view, stage)
        if not candidates:
            return None, memory or PaldiaMemory()
        expected = self._expected(view, stage)
        memory = self._decide(stage, candidates, expected, memory or PaldiaMemory())
        chosen = candidates[memory.hardware]
        split = chosen.split(expected, self.sharing)
        memory = replace(memory, kept=memory.kept.keep(now_ns, chosen.workers(expected, split)))
        replicas = max(1, min(memory.kept.count, chosen.model.together_max))
        spec = ReplicaSpec(stage.name, chosen.belief.variant, chosen.slot, chosen.node, chosen.device)
        target = StagePlan(stage.name, (Group(spec, replicas),), chosen.model.batch)
        in_time = split.t_max_ms <= to_ms(stage.slo_ns) + ROUNDING
        return Plan((target,), _why(chosen, expected, split), feasible=in_time), memory

    @property
    def arrivals(self) -> Literal["even", "burst"]:
        """The arrivals that `group_ns` assumes; `sloop plan` reports them."""
        return "burst" if self.group_ns >= s(1) else "even"

    # Candidates and load

    def _candidates(self, view: ClusterView, stage: StageView) -> dict[str, HardwareCandidate]:
        """The variant on each kind of hardware of which a node is not lost and can hold a replica, by kind."""
        for kind in self.hardware:
            targets.check_kind(view, kind)
        found: dict[str, HardwareCandidate] = {}
        too_large: list[str] = []
        for belief in self._beliefs(stage):
            nodes = [
                node.node
                for node in view.nodes
                if node.node.hardware == belief.hardware and node.state is not NodeState.LOST
            ]
            if nodes:
                candidate = self._on_best_place(stage, belief, nodes)
                if candidate is not None:
                    found[belief.hardware] = candidate
                else:
                    too_large.append(belief.hardware)
        if too_large and not found:
            raise InputError(
                f"paldia: no node of kind {listed(too_large, 'or')} has enough memory for a replica of {stage.name}",
                help="correct `device_memory_bytes` or `memory_bytes` of the profile, or add nodes with more memory",
            )
        unpriced = [kind for kind, candidate in found.items() if not candidate.usd_per_h]
        if unpriced and len(found) > 1 and self.choice != "fastest":
            raise InputError(
                f"paldia chooses hardware by price, and {listed(unpriced)} has no price",
                help="give its nodes `usd_per_h`, or name one kind under `hardware`",
            )
        return found

    def _beliefs(self, stage: StageView) -> list[Belief]:
        """The variant on each kind of hardware that may be used."""
        named = [kind for _, kind in stage.beliefs if not self.hardware or kind in self.hardware]
        variant = self.variant or next(iter(stage.beliefs))[0]
        found = [stage.beliefs[variant, kind] for kind in dict.fromkeys(named) if (variant, kind) in stage.beliefs]
        return found or [targets.belief_of(stage, variant, kind) for kind in named[:1] or self.hardware[:1]]

    def _on_best_place(self, stage: StageView, belief: Belief, nodes: Sequence[Node]) -> HardwareCandidate | None:
        """The variant on the place of these nodes where most batches can run together, of equal ones one that is always
        there, then the cheapest; None if even an empty node cannot hold it.

        If the places differ, replicas are tied to the best one, because only the batches of one device are planned.
        """
        places: list[tuple[Node, Device | None]] = [
            (node, device)
            for node in nodes
            for device in (node.devices if belief.accelerator else (None,))
            if device is None or device.kind == belief.accelerator
        ]
        kinds = {
            (node.cores, node.memory_bytes, node.usd_per_h, device and structs.replace(device, name=""))
            for node, device in places
        }
        if len(kinds) <= 1:
            return self._candidate(stage, belief, *places[0]) if places else None
        found = [
            (node.on_demand, candidate._replace(node=node.name, device=device.name if device else None))
            for node, device in places
            if (candidate := self._candidate(stage, belief, node, device)) is not None
        ]
        if not found:
            return None
        return min(found, key=lambda each: (-each[1].model.together_max, each[0], each[1].usd_per_h))[1]

    def _candidate(
        self, stage: StageView, belief: Belief, node: Node, device: Device | None
    ) -> HardwareCandidate | None:
        """The variant on this node and device; None if they cannot hold it even if they are empty."""
        most, slot = 1, belief.slot(min(belief.cores_max, node.cores))
        if device is not None:
            most = targets.together_max(device.memory_bytes, belief.device_memory_bytes, clients_max=device.clients_max)
            most = min(most, 1) if self.sharing == "queue" else most
            most = targets.together_max(node.memory_bytes, belief.memory_bytes, clients_max=most)
            if not most:
                return None
            cores = min(belief.cores_max, _part_of(node.cores, most))
            slot = structs.replace(belief.slot(cores), share=SHARES_NOTHING)
        elif self.sharing != "queue" and belief.shared_cores == node.cores:
            most = targets.together_max(node.memory_bytes, belief.memory_bytes, clients_max=CPU_WORKERS_MAX)
            if not most:
                return None
            slot = structs.replace(belief.slot(_part_of(node.cores, most)), is_capped=most == 1)
        costs_ns = belief.costs_ns(slot)
        batch = max(1, bisect_right(costs_ns, stage.slo_ns, 1) - 1)
        if not belief.accelerator:
            batch = 1 << (batch.bit_length() - 1)
        batch = min(batch, self.batch_max or batch)
        model = DeviceModel(_in_ms(costs_ns, batch), belief.interference, belief.demand(batch, slot), most)
        return HardwareCandidate(belief, slot, node.usd_per_h, model)

    def _expected(self, view: ClusterView, stage: StageView) -> int:
        """N: the requests to expect at once; at least 1, so that a quiet moment does not count as no load at all."""
        rate_rps = view.demand_rps[stage.name] if view.ingress.buckets else self.initial_rps
        waiting = len(stage.queue) if self.backlog else 0
        return max(1, ceil(rate_rps * to_s(self.group_ns) - ROUNDING) + waiting)

    # Which hardware

    def _decide(
        self, stage: StageView, candidates: dict[str, HardwareCandidate], expected: int, memory: PaldiaMemory
    ) -> PaldiaMemory:
        """Choose the hardware, and switch to it if another kind was preferred often enough."""
        ready = {replica.spec.slot.hardware for replica in stage.replicas if replica.life is Life.READY}
        chosen = self._choose(stage, candidates.values(), expected)
        if memory.hardware in candidates:
            mismatches, switches = solver.count_mismatch(
                memory.mismatches,
                is_present=chosen == memory.hardware,
                is_pending=memory.hardware not in ready,
                limit=self.wait_limit,
            )
            if not switches:
                return replace(memory, mismatches=mismatches)
        else:
            mismatches = 0
            if memory.hardware:  # it is lost
                still = [kind for kind in candidates if kind in ready]
                chosen = still[0] if still else self._successor(stage, list(candidates.values()), memory.hardware)
        return PaldiaMemory(mismatches, chosen, DelayedTermination(self.keep_alive_ns))

    def _choose(self, stage: StageView, candidates: Collection[HardwareCandidate], expected: int) -> str:
        """The kind that the rule prefers at this load."""
        slo_ms, headroom_gpu = to_ms(stage.slo_ns), self.headroom_gpu
        if self.choice == "isolated":
            largest = max((each.model.batch for each in candidates if each.is_gpu), default=expected)
            one_batch = min(expected, largest)
            headroom_gpu = 1.0
            offers = [each.offer(each.split(one_batch, "queue").t_max_ms) for each in candidates]
        else:
            offers = [each.offer(each.split(expected, self.sharing).t_max_ms) for each in candidates]
        return solver.choose_hardware(
            offers,
            self.choice,
            cpu_limit_ms=self.headroom_cpu * slo_ms,
            gpu_limit_ms=headroom_gpu * slo_ms,
            tolerance_ms=TOLERANCE_MS,
        ).name

    def _successor(self, stage: StageView, candidates: list[HardwareCandidate], hardware: str) -> str:
        """The kind that replaces lost `hardware`: the cheapest one that is more performant, or else the most performant
        of all (specification, 5.9)."""
        lost = next((belief for belief in self._beliefs(stage) if belief.hardware == hardware), None)
        if lost is not None:
            each_ms = to_ms(lost.costs_ns(lost.slot(lost.cores_max))[-1]) / lost.batch_max
            better = [each for each in candidates if each.rank < (not lost.accelerator, each_ms, lost.hardware)]
            if better:
                return min(better, key=lambda each: (each.usd_per_h, each.rank)).belief.hardware
        return min(candidates, key=lambda each: each.rank).belief.hardware


def _part_of(cores: float, workers: int) -> float:
    """An equal part of the cores for each worker, in whole thousandths, so that all of them fit."""
    return max(1, floor(cores / workers * MILLI + ROUNDING)) / MILLI


@lru_cache(maxsize=64)
def _in_ms(costs_ns: tuple[int, ...], batch: int) -> tuple[float, ...]:
    """Durations of batches up to the largest, in milliseconds. Cached, because every decision asks for the same."""
    return tuple([cost_ns / NS_PER_MS for cost_ns in costs_ns[: batch + 1]])


def _why(chosen: HardwareCandidate, expected: int, split: DeviceSplit) -> str:
    """The reason of a plan, in one line."""
    ends = f"paldia: {counted(expected, 'request')} end within {in_ms(ms(split.t_max_ms))} on {chosen.belief.hardware}"
    if not split.queued:
        return ends
    return f"{ends}, {expected - split.queued} of them together and {split.queued} queued"


# Which batches run together


@dataclass(frozen=True, slots=True)
class GroupSplit:
    """How the requests that waited at one instant are to run, as the sizes of batches that have not started yet."""

    running: tuple[int, ...]
    """At most `together` of these run at a time."""
    queued: tuple[int, ...]
    """These run one by one, when all of `running` have ended."""
    together: int
    ended_ns: int = -1
    """When the last of its batches started: what waits behind them then is split at a later instant."""

    @property
    def is_over(self) -> bool:
        """Whether all batches have started."""
        return not self.running and not self.queued

    def shrunk(self, waiting: int) -> "GroupSplit":
        """With smaller last batches if fewer requests wait than were split, because some were dropped or cancelled or
        run on another device."""
        running, queued = list(self.running), list(self.queued)
        excess = sum(running) + sum(queued) - waiting
        for batches in (queued, running):
            while excess > 0 and batches:
                size = batches.pop()
                if size > excess:
                    batches.append(size - excess)
                excess -= size
        return replace(self, running=tuple(running), queued=tuple(queued))

    def next(self, now_ns: int) -> tuple[int, "GroupSplit"]:
        """The batch that starts now, and what is left."""
        if self.running:
            count, *rest = self.running
            left = replace(self, running=tuple(rest))
        else:
            count, *rest = self.queued
            left = replace(self, queued=tuple(rest))
        return count, replace(left, ended_ns=now_ns) if left.is_over else left


Splits = tuple[tuple[tuple[str, str, str], GroupSplit], ...]
"""The present split by node, accelerator and stage."""


@dataclass(frozen=True, slots=True)
class Hybrid(RememberingBatch):
    """PALDIA's distributor: some of the waiting requests run together and the others queue, so that the last one ends
    as early as possible, by the law of interference of their model.

    When all batches of a split have started, the requests that wait then are split anew. The oldest run, the newest
    queue. At most as many batches run together as the stage has ready replicas on the device. If several stages use one
    device, each splits as if it were alone there.

    Source: PALDIA, specification sections 2.1 and 2.1.1 (executed plans; (b) for `resident`).
    """

    lane: Lane = "work_conserving"
    """`serial`: queued batches run one by one when all that run together have ended; requests that arrive while the
    device is busy all queue. `work_conserving`: a queued batch starts whenever another one ends."""
    sharing: Sharing = "hybrid"
    """`hybrid`: the best split. `together`: as many batches as there are replicas. `queue`: one batch after the other.
    `resident`, which is not PALDIA's: a constant number of batches at a time, each starting when another ends, such
    that the last one ends earliest; it needs the work-conserving lane."""
    even: bool = False
    """Whether batches have equal sizes, instead of full batches and one with the rest."""
    gain_min: Annotated[float, Range(least=0, most=1)] = 0.0
    """The smallest gain for which a split is made: the fraction by which it must be predicted to end earlier than both
    `together` and `queue`; otherwise the better of these two is used. A good value is the error of the law, which
    `sloop profile --sharing` prints: a smaller gain may not be real."""

    def __post_init__(self) -> None:
        if self.sharing == "resident" and self.lane == "serial":
            what = "cannot be resident in the serial lane, in which a queued batch waits until no other runs"
            raise OutOfRange("sharing", what, NO_WAIT)

    def decide(
        self, now_ns: int, queue: QueueView, device: BatchDevice, memory: Splits | None
    ) -> tuple[BatchDecision, Splits]:
        """See `RememberingBatch`. The next batch of the split, if it may run beside those that run on the device."""
        key, splits = (*device.key, queue.stage), dict(memory or ())
        busy = sum(batch.stage == queue.stage for batch in device.running)
        waiting = queue.waiting
        split = splits.get(key)
        if split is not None:
            split = splits[key] = split.shrunk(waiting)
        if split is None or split.is_over:
            if split is not None and split.ended_ns == now_ns and busy:
                return BatchDecision(0), tuple(splits.items())
            split = self._split(device, waiting, device.idle, busy)
        room = split.together - busy if split.running else int(not busy)
        if room <= 0:
            if self.lane == "serial":  # otherwise it is found again, with those that come meanwhile
                splits[key] = split
            return BatchDecision(0), tuple(splits.items())
        count, splits[key] = split.next(now_ns)
        # Fewer if some were dropped, or if rows of several sizes wait, of which only those of one share a pass.
        return BatchDecision(min(count, len(queue.visits), device.batch_max)), tuple(splits.items())

    def _split(self, device: BatchDevice, waiting: int, idle: int, busy: int) -> GroupSplit:
        """A split of the requests that wait now."""
        queued, running, batch_max = waiting, list[int](), device.batch_max
        if self.lane == "work_conserving" or not busy:
            costs_ms = tuple([cost_ns / NS_PER_MS for cost_ns in device.alone_costs_ns[: batch_max + 1]])
            model = DeviceModel(costs_ms, device.law, device.largest, idle + busy)
            queued = best_split(model, waiting, self.sharing, gain_min=self.gain_min).queued
            running = batches_of(waiting - queued, batch_max, even=self.even)
        later = batches_of(queued, batch_max, even=self.even) if queued else []
        if self.lane == "work_conserving":
            return GroupSplit((*running, *later), (), len(running))
        return GroupSplit(tuple(running), tuple(later), len(running))
