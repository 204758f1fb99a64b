"""The autoscalers of Kubernetes and Knative as scaling policies: `Hpa`, `Vpa` and `Kpa`, for each stage separately.

They are the baselines that most deployments use. None of them uses deadlines: `Hpa` and `Vpa` follow utilisation, `Kpa`
the number of requests in a stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from sloop.core.protocols import Scale
from sloop.core.views import Bucket, ClusterView, StageView
from sloop.options import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, check_range
from sloop.policies import targets
from sloop.text import counted, in_s
from sloop.units import FOREVER_NS, NS_PER_S, at_least, round_up, s, to_s
from sloop.vocabulary import Life, Plan, StagePlan

TOLERANCE: Final = 0.1
"""`Hpa` and `Vpa` change nothing while utilisation over target differs from 1 by less than this."""
HPA_WINDOW_NS: Final = s(15)
"""Utilisation is the mean over this time."""
HPA_UP_PERIOD_NS: Final = s(15)
"""Scale up by at most 4 replicas or a doubling in this time."""
PANIC_NS: Final = s(6)
"""Length of Knative's panic window."""
PANIC_THRESHOLD: Final = 2.0
"""A panic begins when the panic window requires this many times the ready replicas."""
UP_RATE: Final = 1000.0
"""One step multiplies the ready replicas at most by this."""
DOWN_RATE: Final = 2.0
"""One step divides the ready replicas at most by this."""
ZERO_DELAY_NS: Final = s(30)
"""How long the stable window must have been empty before the last replica stops."""
CORES_MAX: Final = 16
"""The largest default core count of `Vpa`, which chooses from 1 to 16."""


@dataclass(frozen=True, slots=True)
class Hpa(Scale):
    """Kubernetes' Horizontal Pod Autoscaler: the number of equal replicas whose utilisation is `target`.

    The algorithm of autoscaling/v2 for a resource metric with its defaults (Kubernetes documentation, "Horizontal Pod
    Autoscaling": algorithm details, configurable scaling behaviour). Desired = ⌈ready × utilisation/target⌉; no change
    within the tolerance; replicas that are not ready count as idle when scaling up; scale-down only to the largest
    recommendation of the stabilisation window; scale-up limited per period. Utilisation is the busy share of ready
    cores. Fails for deadlines: it ignores queues, and utilisation cannot exceed 1, so a flash crowd of any size gets
    the same small step.
    """

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    target: PositiveFloat = 0.8
    """The utilisation to aim for."""
    replicas_min: PositiveInt = 1
    replicas_max: int = 64
    initial: NonNegativeInt = 0
    """Replicas before any has been ready; 0: `replicas_min`."""
    cores: PositiveFloat = 1.0
    """Of each replica."""
    batch_max: NonNegativeInt = 0
    """0: the largest batch within half the SLO that serves about as many rows per second as any of them."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    stabilisation_ns: NonNegativeInt = s(300)
    """Scale down only to the largest number proposed in this time."""
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

    def _stage(
        self, now_ns: int, stage: StageView, past: targets.CountHistory | None
    ) -> tuple[StagePlan, str, targets.CountHistory]:
        past = past or targets.CountHistory(max(self.replicas_min, min(self.initial, self.replicas_max)))
        proposed, seen = self._proposed(stage, past.count)
        past, note = past.decide(
            now_ns,
            proposed,
            stabilisation_ns=self.stabilisation_ns,
            up_period_ns=HPA_UP_PERIOD_NS,
            replicas_max=self.replicas_max,
        )
        why = f"{stage.name}: {seen} → {counted(past.count, 'replica')}{note}"
        belief = targets.belief_of(stage, self.variant)
        planned = targets.equal_replicas(
            stage, belief, count=past.count, cores=self.cores, batch_max=self.batch_max, in_place=False
        )
        return planned, why, past

    def _proposed(self, stage: StageView, current: int) -> tuple[int, str]:
        """The replicas that the metric requires, within the bounds, and the measurement as text."""
        ready, starting = stage.count(Life.READY), stage.count(Life.STARTING)
        window = stage.window(HPA_WINDOW_NS)
        if not ready or not sum(bucket.ready_core_ns for bucket in window):
            return current, "no replica has been ready"
        utilisation = stage.utilisation(HPA_WINDOW_NS)
        ratio = utilisation / self.target
        seen = f"utilisation {utilisation:.2f} of {self.target:g}"
        if abs(ratio - 1.0) <= TOLERANCE:
            return current, f"{seen}, within tolerance"
        replicas = ready
        if starting and ratio > 1.0:
            replicas = ready + starting
            ratio *= ready / replicas
            seen += f", {starting} starting"
            if ratio <= 1.0 + TOLERANCE:
                return current, seen
        desired = round_up(ratio * replicas)
        if (ratio > 1.0 and desired < current) or (ratio < 1.0 and desired > current):
            desired = current
        return max(self.replicas_min, min(desired, self.replicas_max)), seen


@dataclass(frozen=True, slots=True)
class VpaSize:
    """Cores per replica of one stage, and when they were chosen."""

    cores: float
    since_ns: int


@dataclass(frozen=True, slots=True)
class Vpa(Scale):
    """Kubernetes' Vertical Pod Autoscaler: larger or smaller replicas, by restart.

    A threshold recommender on utilisation, the vertical baseline suggested for Sponge: cores = used cores ÷ target,
    rounded up to one of the core counts. A replica of the new size starts, and the old one stops when the new one is
    ready. A change comes at least `settle_ns` after the previous one, and only if utilisation differs from the target
    by more than a tenth of it. Fails for bursts: a replica cannot use more cores than it has, so each change grows by
    at most 1/target and costs a cold start.
    """

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    target: Fraction = 0.7
    """The utilisation to aim for."""
    replicas: PositiveInt = 1
    cores: tuple[PositiveFloat, ...] = ()
    """Core counts to choose from; empty: 1 to 16."""
    batch_max: NonNegativeInt = 0
    """0: the largest batch within half the SLO that serves about as many rows per second as any of them."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    settle_ns: PositiveInt = s(60)
    """The least time between two changes."""
    period_ns: PositiveInt = s(10)

    def plan(
        self, now_ns: int, view: ClusterView, memory: targets.ByStage[VpaSize] | None
    ) -> tuple[Plan, targets.ByStage[VpaSize]]:
        """InputError for a variant that some stage does not have, and if no node has any of the core counts."""
        view, past = targets.on_one_kind(view, self.hardware), dict(memory or ())
        choices = targets.core_choices(view, self.cores, CORES_MAX, "vpa")
        decided = [(stage.name, *self._stage(now_ns, stage, past.get(stage.name), choices)) for stage in view.stages]
        return targets.remembered(decided)

    def _stage(
        self, now_ns: int, stage: StageView, size: VpaSize | None, choices: Sequence[float]
    ) -> tuple[StagePlan, str, VpaSize]:
        size = size or VpaSize(choices[0], now_ns)
        cores, seen = self._proposed(now_ns, stage, size, choices)
        if cores != size.cores:
            seen += f" (were {size.cores:g})"
            size = VpaSize(cores, now_ns)
        belief = targets.belief_of(stage, self.variant)
        planned = targets.equal_replicas(
            stage, belief, count=self.replicas, cores=cores, batch_max=self.batch_max, in_place=False
        )
        return planned, f"{stage.name}: {seen}", size

    def _proposed(self, now_ns: int, stage: StageView, size: VpaSize, choices: Sequence[float]) -> tuple[float, str]:
        """Cores per replica, and why."""
        kept = f"kept at {counted(size.cores, 'core')}"
        if stage.count(Life.STARTING) or not stage.count(Life.READY):
            return size.cores, f"a replica is starting, {kept}"
        if now_ns - size.since_ns < self.settle_ns or not stage.buckets:
            return size.cores, f"changed less than {in_s(self.settle_ns)} ago, {kept}"
        window = stage.window(self.settle_ns)
        used = sum(bucket.busy_core_ns for bucket in window) / (len(window) * stage.bucket_ns * self.replicas)
        seen = f"{used:.2f} of {counted(size.cores, 'core')} used, target {self.target:g}"
        if abs(used / size.cores / self.target - 1.0) <= TOLERANCE:
            return size.cores, f"{seen}, {kept}"
        wanted = used / self.target
        cores = next((c for c in choices if at_least(c, wanted)), choices[-1])
        return cores, f"{seen} → {counted(cores, 'core')}" if cores != size.cores else f"{seen}, {kept}"


@dataclass(frozen=True, slots=True)
class KpaHistory:
    """State of one stage between decisions."""

    panic_ns: int | None = None
    """When panic mode was last confirmed; None outside panic mode."""
    panic_count: int = 0
    """The most replicas desired during this panic."""
    idle_ns: int | None = None
    """Since when the stage has no requests; None while it has."""
    starts: tuple[tuple[int, int], ...] = ()
    """Intervals with a backlog from a cold start, as (start, end), oldest first; the last may be open
    (`FOREVER_NS`)."""
    ready_ns: int | None = None
    """When all replicas of the open interval became ready."""


@dataclass(frozen=True, slots=True)
class Kpa(Scale):
    """Knative's Pod Autoscaler: equal replicas with a target number of requests each; scales to zero when idle.

    The decision function of Knative Serving's autoscaler (documentation, "Autoscaling concepts") with its defaults: the
    mean concurrency of a stable window of 60 s decides. If a panic window of 6 s requires twice the ready replicas, the
    larger of the two decides, and nothing scales down until a stable window after the panic. Concurrency counts all
    requests in the stage, waiting or running.

    **Unlike Knative, the backlog of a cold start does not count as load.** It shows how long the start took, not how
    much capacity is needed, yet it stays in both windows for long (users of Knative report 15 replicas for a load of
    one, knative/serving#4344). So while replicas start, and until at most a batch waits for each, but no longer than a
    stable window after all are ready, the concurrency of a second is limited by Little's law: arrivals per second ×
    believed latency.

    Fails for deadlines: concurrency ignores budgets; after scaling to zero, the first request waits for the cold start;
    and if a large batch costs as much as one request, the number of replicas oscillates.
    """

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    concurrency: NonNegativeFloat = 0.0
    """Requests per replica; 0: the largest batch."""
    utilisation: Fraction = 0.7
    """Fraction of `concurrency` to aim for."""
    replicas_min: NonNegativeInt = 0
    """0 allows scaling to zero, half a minute after the stable window is empty."""
    replicas_max: int = 64
    initial: int = 1
    """Replicas before any request has come."""
    cores: PositiveFloat = 1.0
    """Of each replica."""
    batch_max: NonNegativeInt = 0
    """0: the largest batch within half the SLO that serves about as many rows per second as any of them."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    stable_ns: Annotated[int, Range(least=PANIC_NS)] = s(60)
    """Length of the stable window."""
    period_ns: PositiveInt = s(2)

    def __post_init__(self) -> None:
        check_range("replicas_max", self.replicas_max, least=max(1, self.replicas_min))
        check_range("initial", self.initial, least=self.replicas_min)

    def plan(
        self, now_ns: int, view: ClusterView, memory: targets.ByStage[KpaHistory] | None
    ) -> tuple[Plan, targets.ByStage[KpaHistory]]:
        """InputError for a variant that some stage does not have."""
        view, past = targets.on_one_kind(view, self.hardware), dict(memory or ())
        decided = [(stage.name, *self._stage(now_ns, stage, past.get(stage.name))) for stage in view.stages]
        return targets.remembered(decided)

    def _stage(self, now_ns: int, stage: StageView, past: KpaHistory | None) -> tuple[StagePlan, str, KpaHistory]:
        belief = targets.belief_of(stage, self.variant)

        def planned(count: int) -> StagePlan:
            return targets.equal_replicas(
                stage, belief, count=count, cores=self.cores, batch_max=self.batch_max, in_place=False
            )

        batch = planned(1).batch_max
        past = self._track_starts(now_ns, stage, past or KpaHistory(), batch)
        if not stage.buckets:
            count = max(self.initial, 1 if stage.queue else 0)
            return planned(count), f"{stage.name}: nothing seen yet → {counted(count, 'replica')}", past
        per_replica = (self.concurrency or batch) * self.utilisation
        latency_s = belief.latency_ms(batch, belief.slot(self.cores)) / 1e3
        stable = _concurrency(stage, self.stable_ns, past, latency_s)
        panic = _concurrency(stage, PANIC_NS, past, latency_s)
        count, mode, past = self._desired(now_ns, stage, past, stable / per_replica, panic / per_replica)
        seen = f"{stable:.3g} requests at once over {in_s(self.stable_ns)}, {panic:.3g} over {in_s(PANIC_NS)}"
        why = f"{stage.name}: {seen}, target {per_replica:.3g} each → {counted(count, 'replica')}{mode}"
        return planned(count), why, past

    def _desired(
        self, now_ns: int, stage: StageView, past: KpaHistory, stable: float, panic: float
    ) -> tuple[int, str, KpaHistory]:
        """The number of replicas from the fractional numbers that the two windows require, the mode as text, and the
        history then."""
        ready = max(1, stage.count(Life.READY))
        most, least = math.ceil(UP_RATE * ready), math.floor(ready / DOWN_RATE)
        stable_count = min(max(round_up(stable), least), most)
        panic_count = min(max(round_up(panic), least), most)
        if round_up(panic) / ready >= PANIC_THRESHOLD:
            past = replace(past, panic_ns=now_ns)
        elif past.panic_ns is not None and now_ns - past.panic_ns > self.stable_ns:
            past = replace(past, panic_ns=None, panic_count=0)
        count, mode = stable_count, ""
        if past.panic_ns is not None:
            past = replace(past, panic_count=max(past.panic_count, panic_count, stable_count))
            count, mode = past.panic_count, ", in panic"
        return self._kept_from_zero(now_ns, stage, past, count, mode)

    def _kept_from_zero(
        self, now_ns: int, stage: StageView, past: KpaHistory, count: int, mode: str
    ) -> tuple[int, str, KpaHistory]:
        """Keep at least one replica while requests are in the stage, and for half a minute after the last one."""
        if count > 0 or stage.queue or stage.running:
            past = replace(past, idle_ns=None)
            count, mode = (count, mode) if count else (1, ", for waiting requests")
        elif self.replicas_min == 0 and any(replica.life is not Life.DRAINING for replica in stage.replicas):
            idle_ns = now_ns if past.idle_ns is None else past.idle_ns
            past = replace(past, idle_ns=idle_ns)
            if now_ns - idle_ns < ZERO_DELAY_NS:
                count, mode = 1, f", none in {to_s(idle_ns + ZERO_DELAY_NS - now_ns):g} s"
        return max(self.replicas_min, min(count, self.replicas_max)), mode, past

    def _track_starts(self, now_ns: int, stage: StageView, past: KpaHistory, batch: int) -> KpaHistory:
        """The history with the intervals with a backlog from a cold start up to now."""
        starts, ready_ns = list(past.starts), past.ready_ns
        is_open = bool(starts) and starts[-1][1] == FOREVER_NS
        begun = [replica.since_ns for replica in stage.replicas if replica.life is Life.STARTING]
        if begun or (stage.queue and not stage.count(Life.READY)):
            if not is_open:
                waiting = [visit.arrived_ns for visit in stage.queue] if not stage.count(Life.READY) else []
                starts.append((min([*begun, *waiting]), FOREVER_NS))
            ready_ns = None
        elif is_open:
            ready_ns = now_ns if ready_ns is None else ready_ns
            has_backlog = len(stage.queue) > batch * stage.count(Life.READY)
            if not has_backlog or now_ns - ready_ns > self.stable_ns:
                starts[-1] = (starts[-1][0], now_ns)
                ready_ns = None
        while starts and starts[0][1] < now_ns - self.stable_ns - NS_PER_S:
            del starts[0]
        return replace(past, starts=tuple(starts), ready_ns=ready_ns)


def _concurrency(stage: StageView, length_ns: int, past: KpaHistory, latency_s: float) -> float:
    """Mean number of requests in the stage over the window, without the backlogs of cold starts."""
    window = stage.window(length_ns)
    return sum(_bucket_concurrency(bucket, stage.bucket_ns, past, latency_s) for bucket in window) / len(window)


def _bucket_concurrency(bucket: Bucket, bucket_ns: int, past: KpaHistory, latency_s: float) -> float:
    seen = (bucket.waiting_ns + bucket.running_ns) / bucket_ns
    end_ns = bucket.start_ns + bucket_ns
    if any(start_ns < end_ns and bucket.start_ns < stop_ns for start_ns, stop_ns in past.starts):
        return min(seen, bucket.arrivals * latency_s * NS_PER_S / bucket_ns)
    return seen
