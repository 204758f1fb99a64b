"""Scaling policies that follow one measurement: `AtollRate` the arrival rate, `TorchServe` the wait in the queue,
`SageMaker` the requests per replica and minute.

They are autoscalers with which Flashpoint (San Juan, thesis, Waterloo 2023) is evaluated, section 2.13 of our
specification; the fourth, OpenWhisk on Kubernetes, is `Hpa` with a target of 0.6. All take cold starts as they come.
Each has one number (`factor`, `target_ns`, `safety`, Hpa's `target`) that says how many replicas a load gets: compare
cold starts only at equal resources, because a policy in proportion to the ready replicas asks for more if they start
sooner.

The specification gives the metrics, formulas and targets; periods, windows, tolerance and limits are not published
and are those of the platforms.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from sloop.core.views import Belief, ClusterView, StageView
from sloop.options import check_range
from sloop.policies import targets
from sloop.solvers.forecasting import seconds_rps
from sloop.text import counted, in_s
from sloop.units import NS_PER_S, interpolated_quantile, round_up, s, to_s
from sloop.vocabulary import Life, Plan, StagePlan

S_PER_MINUTE = 60


@dataclass(frozen=True, slots=True)
class ReactiveScale(ABC):
    """What the policies of this module have in common: equal replicas of each stage, as many as `_proposed` says."""

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    replicas_min: int = 1
    replicas_max: int = 64
    initial: int = 0
    """Replicas before any request has been seen; 0: `replicas_min`."""
    cores: float = 1.0
    """Of each replica."""
    batch_max: int = 1
    """As published, there are no batches. 0: the largest batch within half the SLO."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    stabilisation_ns: int = 0
    """Scale down only to the largest number proposed in this time. The publication argues that fast starts make it
    needless."""
    up_period_ns: int = 0
    """Scale up by at most 4 replicas or a doubling in this time, as Kubernetes does; 0: without a limit."""
    window_ns: int = s(60)
    """The measurement is that of this time."""
    period_ns: int = s(15)
    _past: dict[str, targets.CountHistory] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("cores", "window_ns", "period_ns"):
            check_range(key, getattr(self, key), above=0)
        for key in ("initial", "batch_max", "stabilisation_ns", "up_period_ns"):
            check_range(key, getattr(self, key), least=0)
        check_range("replicas_min", self.replicas_min, least=1)
        check_range("replicas_max", self.replicas_max, least=self.replicas_min)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """InputError for a variant that some stage does not have."""
        view = targets.on_one_kind(view, self.hardware)
        decided = [self._stage(now_ns, stage) for stage in view.stages]
        return Plan(tuple(target for target, _ in decided), "; ".join(why for _, why in decided))

    @abstractmethod
    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        """The number of replicas that the measurement asks for, not rounded, and the measurement as text.

        `capacity_rps` is what one replica serves, `current` the number that was decided last. The stage has buckets.
        """

    def _stage(self, now_ns: int, stage: StageView) -> tuple[StagePlan, str]:
        first = max(self.replicas_min, min(self.initial, self.replicas_max))
        past = self._past.setdefault(stage.name, targets.CountHistory(first))
        belief = targets.belief_of(stage, self.variant)
        wanted, seen = float(past.count), "nothing seen yet"
        if stage.buckets:
            wanted, seen = self._proposed(stage, self._capacity_rps(stage, belief), past.count)
        count, note = past.decide(
            now_ns,
            max(self.replicas_min, min(round_up(wanted), self.replicas_max)),
            stabilisation_ns=self.stabilisation_ns,
            up_period_ns=self.up_period_ns,
            replicas_max=self.replicas_max,
        )
        planned = targets.equal_replicas(
            stage, belief, count=count, cores=self.cores, batch_max=self.batch_max, in_place=False
        )
        return planned, f"{stage.name}: {seen} → {counted(count, 'replica')}{note}"

    def _capacity_rps(self, stage: StageView, belief: Belief) -> float:
        """Requests per second that one replica serves in full batches: 1/d for single requests."""
        batch = targets.largest_batch(stage, belief, self.cores, self.batch_max)
        return batch * 1000.0 / belief.latency_ms(batch, belief.slot(self.cores))


@dataclass(frozen=True, slots=True)
class AtollRate(ReactiveScale):
    """Atoll's autoscaler in its request-rate mode: replicas for a `quantile` of the rates of the last seconds.

    Replicas = ⌈factor × quantile × d⌉ with d the believed time of a request (Singhvi et al., Atoll, SoCC 2021, as
    compared with in Flashpoint). It does not depend on how many replicas there are. The quantile is interpolated
    between seconds: by nearest rank, the P99 of a minute would be its busiest second. Scales in bursts with the rate,
    and pays for a burst for as long as it is in the window.
    """

    factor: float = 1.0
    """Factor of the number of replicas."""
    quantile: float = 0.99
    """The quantile, 0 to 1."""

    def __post_init__(self) -> None:
        ReactiveScale.__post_init__(self)
        check_range("factor", self.factor, above=0)
        check_range("quantile", self.quantile, least=0, most=1)

    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        rates = sorted(seconds_rps([bucket.arrivals for bucket in stage.window(self.window_ns)], stage.bucket_ns))
        peak_rps = interpolated_quantile(rates, self.quantile)
        seen = f"{peak_rps:.4g} requests/s in the busiest {1 - self.quantile:.0%} of {in_s(self.window_ns)}"
        return self.factor * peak_rps / capacity_rps, seen


@dataclass(frozen=True, slots=True)
class TorchServe(ReactiveScale):
    """TorchServe on Kubernetes: its autoscaler on the mean time that requests wait in the queue.

    Replicas = ⌈ready × wait/target⌉, no change within the tolerance, at most 4 more or a doubling in `up_period_ns`, as
    in autoscaling/v2. The mean wait of the window is the waiting requests over the arrivals per second (Little's law).
    With queues of 7 s, the published target, it fails for every deadline below: it keeps too few replicas until the
    queue is long, and then adds many at once.
    """

    target_ns: int = s(7)
    """The mean wait to aim for."""
    tolerance: float = 0.1
    """No change while wait over target differs from 1 by less than this."""
    up_period_ns: int = s(15)
    """Scale up by at most 4 replicas or a doubling in this time."""

    def __post_init__(self) -> None:
        ReactiveScale.__post_init__(self)
        check_range("target_ns", self.target_ns, above=0)
        check_range("tolerance", self.tolerance, least=0)

    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        ready, window = stage.count(Life.READY), stage.window(self.window_ns)
        wait_ns = sum(bucket.waiting_ns for bucket in window) / max(1, sum(bucket.arrivals for bucket in window))
        seen = f"mean wait {wait_ns / NS_PER_S:.3g} s of {in_s(self.target_ns)}"
        ratio = wait_ns / self.target_ns
        if not ready or abs(ratio - 1.0) <= self.tolerance:
            return current, f"{seen}, {'within tolerance' if ready else 'no replica has been ready'}"
        wanted = ready * ratio
        return (max(wanted, current) if ratio > 1.0 else min(wanted, current)), seen


@dataclass(frozen=True, slots=True)
class SageMaker(ReactiveScale):
    """Amazon SageMaker's target tracking: replicas for a target of requests per replica and minute.

    Replicas = ⌈requests of the last minute/target⌉. The target is `safety` × what a replica serves in a minute; AWS
    recommends 0.5, so that there are twice as many replicas as needed. Sees a burst only in the mean of a minute.
    """

    safety: float = 0.5
    """Part of a replica's capacity to use."""
    period_ns: int = s(60)

    def __post_init__(self) -> None:
        ReactiveScale.__post_init__(self)
        check_range("safety", self.safety, above=0)

    def _proposed(self, stage: StageView, capacity_rps: float, current: int) -> tuple[float, str]:
        per_minute = S_PER_MINUTE * stage.rate_rps(self.window_ns)
        target = S_PER_MINUTE * self.safety * capacity_rps
        seen = f"{per_minute:.4g} requests per minute over {to_s(self.window_ns):g} s, target {target:.4g} each"
        return per_minute / target, seen
