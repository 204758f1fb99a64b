"""Knative's autoscaler: as many equal replicas as keep the requests in each near a target; none where none come.

Knative Serving's Pod Autoscaler (its documentation, "Autoscaling concepts", and the decision function of its
autoscaler), with its defaults: the mean concurrency of a stable window of 60 s decides; where that of a panic window of
6 s asks for twice what is ready, the larger of the two does, and nothing scales in until the panic is a stable window
past. Concurrency is all requests in the stage, waiting or running.

**A cold start's backlog is counted once.** What piles up while replicas start says how long the start took, not how
much capacity is needed, yet it stays in both windows long after (users of Knative report 15 replicas for a load of
one, knative/serving#4344). So from the moment a replica starts until all are ready and no more than a batch for each
waits, at the latest a stable window after they were ready, a second's concurrency counts as no more than its arrivals
would keep busy by Little's law, arrivals per second × believed latency. Starting replicas thereby answer the demand
they were started for. Fails for deadlines: concurrency says nothing of budgets, from zero the first request pays the
cold start, and where batching makes many at once as cheap as few it swings between too many replicas and too few.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from sloop.core.views import Bucket, ClusterView, StageView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers import targets
from sloop.units import FOREVER_NS, NS_PER_S, s, to_s
from sloop.vocabulary import Life, Plan, StagePlan


@dataclass(slots=True)
class Past:
    """What is remembered of one stage."""

    panic_ns: int | None = None
    """When the panic was last confirmed; None outside a panic."""
    panic_count: int = 0
    """The most replicas this panic has asked for."""
    idle_ns: int | None = None
    """Since when there has been nothing to do."""
    starts: deque[tuple[int, int]] = field(default_factory=deque)
    """Intervals in which a backlog is the cold start's, oldest first; the last may be open (`FOREVER_NS`)."""
    ready_ns: int | None = None
    """When all replicas of the open interval were ready."""


@dataclass(frozen=True, slots=True)
class Kpa:
    """Replicas of `cores` each, with `concurrency` requests per replica (0: the batch limit) × `utilisation` as target.

    From `replicas_min` (0: to zero, `zero_delay_ns` after the stable window is empty) to `replicas_max`; `initial`
    before anything was seen. A panic begins at `panic_threshold` × ready replicas; `up_rate` and `down_rate` bound one
    step.
    """

    concurrency: float = 0.0
    utilisation: float = 0.7
    replicas_min: int = 0
    replicas_max: int = 64
    initial: int = 1
    cores: float = 1.0
    batch_max: int = 0
    variant: str = ""
    stable_ns: int = s(60)
    panic_ns: int = s(6)
    panic_threshold: float = 2.0
    up_rate: float = 1000.0
    down_rate: float = 2.0
    zero_delay_ns: int = s(30)
    period_ns: int = s(2)
    _past: dict[str, Past] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least("concurrency", self.concurrency, 0)
        within("utilisation", self.utilisation, 0, 1)
        at_least("replicas_min", self.replicas_min, 0)
        at_least("replicas_max", self.replicas_max, max(1, self.replicas_min))
        at_least("initial", self.initial, self.replicas_min)
        above("cores", self.cores, 0)
        at_least("batch_max", self.batch_max, 0)
        above("panic_ns", self.panic_ns, 0)
        at_least("stable_ns", self.stable_ns, self.panic_ns)
        above("panic_threshold", self.panic_threshold, 1)
        above("up_rate", self.up_rate, 1)
        above("down_rate", self.down_rate, 1)
        at_least("zero_delay_ns", self.zero_delay_ns, 0)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """Each stage by itself."""
        decided = [self._stage(now_ns, stage) for stage in view.stages]
        return Plan(tuple(target for target, _ in decided), "; ".join(why for _, why in decided))

    def _stage(self, now_ns: int, stage: StageView) -> tuple[StagePlan, str]:
        past = self._past.setdefault(stage.name, Past())
        variant = targets.variant_of(stage, self.variant)

        def planned(count: int) -> StagePlan:
            return targets.equal_replicas(
                stage, variant, count=count, cores=self.cores, batch_max=self.batch_max, in_place=False
            )

        batch = planned(1).batch_max
        self._track_starts(now_ns, stage, past, batch)
        if not stage.buckets:
            count = max(self.initial, 1 if stage.queue else 0)
            return planned(count), f"{stage.name}: nothing seen yet → {targets.amount(count, 'replica')}"
        per_replica = (self.concurrency or batch) * self.utilisation
        latency_s = stage.variants[variant].latency_ms(batch, self.cores) / 1e3
        stable = _concurrency(stage, self.stable_ns, past, latency_s)
        panic = _concurrency(stage, self.panic_ns, past, latency_s)
        count, mode = self._desired(now_ns, stage, past, stable / per_replica, panic / per_replica)
        seen = (
            f"{stable:.3g} requests at once over {to_s(self.stable_ns):g} s, {panic:.3g} over {to_s(self.panic_ns):g} s"
        )
        return planned(
            count
        ), f"{stage.name}: {seen}, target {per_replica:.3g} each → {targets.amount(count, 'replica')}{mode}"

    def _desired(self, now_ns: int, stage: StageView, past: Past, stable: float, panic: float) -> tuple[int, str]:
        """Replicas from what the windows ask for (fractional), and the mode they were decided in."""
        ready = max(1, stage.count(Life.READY))
        most, least = math.ceil(self.up_rate * ready), math.floor(ready / self.down_rate)
        stable_count = min(max(_whole(stable), least), most)
        panic_count = min(max(_whole(panic), least), most)
        if _whole(panic) / ready >= self.panic_threshold:
            past.panic_ns = now_ns
        elif past.panic_ns is not None and now_ns - past.panic_ns > self.stable_ns:
            past.panic_ns, past.panic_count = None, 0
        count, mode = stable_count, ""
        if past.panic_ns is not None:
            past.panic_count = max(past.panic_count, panic_count, stable_count)
            count, mode = past.panic_count, ", in panic"
        return self._kept_from_zero(now_ns, stage, past, count, mode)

    def _kept_from_zero(self, now_ns: int, stage: StageView, past: Past, count: int, mode: str) -> tuple[int, str]:
        """The last replica stays for a while, and whoever waits gets one."""
        if count > 0 or stage.queue or stage.running:
            past.idle_ns = None
            count, mode = (count, mode) if count else (1, ", for who waits")
        elif self.replicas_min == 0 and any(replica.life is not Life.DRAINING for replica in stage.replicas):
            past.idle_ns = now_ns if past.idle_ns is None else past.idle_ns
            if now_ns - past.idle_ns < self.zero_delay_ns:
                count, mode = 1, f", none in {to_s(past.idle_ns + self.zero_delay_ns - now_ns):g} s"
        return max(self.replicas_min, min(count, self.replicas_max)), mode

    def _track_starts(self, now_ns: int, stage: StageView, past: Past, batch: int) -> None:
        """Keep the intervals in which a backlog belongs to a cold start."""
        starts = past.starts
        is_open = bool(starts) and starts[-1][1] == FOREVER_NS
        begun = [replica.since_ns for replica in stage.replicas if replica.life is Life.STARTING]
        if begun or (stage.queue and not stage.count(Life.READY)):
            if not is_open:
                waiting = [visit.arrived_ns for visit in stage.queue] if not stage.count(Life.READY) else []
                starts.append((min([*begun, *waiting]), FOREVER_NS))
            past.ready_ns = None
        elif is_open:
            past.ready_ns = now_ns if past.ready_ns is None else past.ready_ns
            has_backlog = len(stage.queue) > batch * stage.count(Life.READY)
            if not has_backlog or now_ns - past.ready_ns > self.stable_ns:
                starts[-1] = (starts[-1][0], now_ns)
                past.ready_ns = None
        while starts and starts[0][1] < now_ns - self.stable_ns - NS_PER_S:
            starts.popleft()


def _whole(count: float) -> int:
    """⌈count⌉, forgiving the last digits of a float."""
    return math.ceil(count - 1e-9)


def _concurrency(stage: StageView, length_ns: int, past: Past, latency_s: float) -> float:
    """Mean requests in the stage over the window, a cold start's backlog counted as its arrivals only."""
    window = stage.window(length_ns)
    return sum(_at_once(bucket, stage.bucket_ns, past, latency_s) for bucket in window) / len(window)


def _at_once(bucket: Bucket, bucket_ns: int, past: Past, latency_s: float) -> float:
    seen = (bucket.waiting_ns + bucket.running_ns) / bucket_ns
    end_ns = bucket.start_ns + bucket_ns
    if any(start_ns < end_ns and bucket.start_ns < stop_ns for start_ns, stop_ns in past.starts):
        return min(seen, bucket.arrivals * latency_s * NS_PER_S / bucket_ns)
    return seen
