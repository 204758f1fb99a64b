"""Faro's policies, and those that it is compared with: replicas of one core by latency and by forecasts, and the
division of workers by the utilities of all applications.

Jeon et al., Faro, EuroSys 2025. Every five minutes each application wants the fewest workers with the most utility over
the next seven minutes; if all together want more than there are, they are divided by the best objective. Every ten
seconds in between, an application whose mean latency was above its deadline for 30 s wants one more. Fails where the
next minutes are not like the last ones, and where starts take longer than the load stays.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from sloop.api import NS_PER_MS, NS_PER_S, Life, Plan, counted, number, to_ms
from sloop.api.policies import (
    Belief,
    Bucket,
    Claimant,
    ClusterView,
    CoreShare,
    Divide,
    Scale,
    StageView,
    Traffic,
    cores_by_hardware,
    replicas_max,
    targets,
)
from sloop_systems.faro.published import (
    CONTEXT_STEPS,
    FIRST_NS,
    IN_TICKS,
    LOOK_BACK_NS,
    MEDIAN,
    OUT_TICKS,
    PREDICT_NS,
    QUANTILE,
    REPLICAS_MAX,
    STEP_NS,
    TICK_NS,
)
from sloop_systems.faro.solver import (
    Objective,
    WorkerNeed,
    divided,
    forecast_rps,
    utility_by_workers,
    utility_of,
    workers_wanted,
)

CORES = 1.0
"""Cores of one worker."""


@dataclass(frozen=True, slots=True)
class WatchedWorkers:
    """What these policies remember."""

    workers: int
    """Those of the last plan."""
    wanted: int
    """Those that the last forecast asked for."""
    streak: int
    """For how many ticks in a row the latency was above its target; if negative, for how many it was not."""


class Seen(NamedTuple):
    """What a decision looks at."""

    stage: StageView
    belief: Belief
    room: int
    """The most workers."""
    ingress: Traffic
    forecast_rps: float

    @property
    def service_ms(self) -> float:
        """Of one request on one worker."""
        return self.belief.latency_ms(1, self.belief.slot(CORES))

    @property
    def slo_ms(self) -> float:
        """The target of the latency."""
        return to_ms(self.stage.slo_ns)

    @property
    def latency_ms(self) -> float:
        """The mean latency over `LOOK_BACK_NS`, by Little's law: what waited and ran, over what was admitted. Infinite
        where something waits and nothing comes any more."""
        window = self.stage.window(LOOK_BACK_NS)
        inside_ns, admitted = sum(each.waiting_ns + each.running_ns for each in window), sum(map(_arrivals, window))
        return inside_ns / NS_PER_MS / admitted if admitted else math.inf if inside_ns else 0.0

    def rates_rps(self, quantile: float) -> list[float]:
        """The forecast rates of the next minutes."""
        steps, each = CONTEXT_STEPS, STEP_NS // self.ingress.bucket_ns
        arrivals = list(map(_arrivals, self.ingress.window(steps * STEP_NS)))
        counts = [sum(arrivals[at : at + each]) for at in range(len(arrivals) % each, len(arrivals), each)]
        return [*forecast_rps(counts, STEP_NS / NS_PER_S, quantile, self.forecast_rps).tolist()]

    def need(self, most: int, weight: float = 1.0) -> WorkerNeed:
        """What the application may gain from up to `most` workers."""
        present = len(self.stage.replicas)
        return WorkerNeed(tuple(self.rates_rps(QUANTILE)), self.service_ms, self.slo_ms, present, most, weight=weight)


def _arrivals(bucket: Bucket) -> int:
    return bucket.arrivals


def seen_in(view: ClusterView, hardware: str = "") -> Seen:
    """The only stage, its first variant, and how many workers of it fit. InputError for a graph of models."""
    view = targets.on_one_kind(view, hardware)
    stage = targets.one_stage(view, "faro")
    belief = targets.belief_of(stage)
    room = sum(replicas_max(each.node, belief.slot(CORES), belief) for each in view.nodes)
    return Seen(stage, belief, max(1, min(room, REPLICAS_MAX)), view.ingress, view.forecast_rps)


def predicts(now_ns: int) -> bool:
    """Whether the tick at this time is one of the predictive loop."""
    tick = now_ns // TICK_NS
    return tick % (PREDICT_NS // TICK_NS) == 0 or tick == FIRST_NS // TICK_NS


class Workers(Scale):
    """What all of these have in common: equal replicas of one core, one request at a time."""

    __slots__ = ()
    is_quick: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    period_ns: ClassVar[int] = TICK_NS
    hardware: str

    def plan(self, now_ns: int, view: ClusterView, memory: WatchedWorkers | None) -> tuple[Plan, WatchedWorkers]:
        seen = seen_in(view, self.hardware)
        found, why = self._decide(now_ns, seen, memory)
        count = max(1, min(found.workers, seen.room))
        target = targets.equal_replicas(seen.stage, seen.belief, count=count, cores=CORES, batch_max=1, in_place=False)
        why = f"{why}; {counted(count, 'worker')}" + (f" instead of {found.workers}" if count < found.workers else "")
        shed = view.plan.shed if view.plan is not None and not predicts(now_ns) else 0.0
        return Plan((target,), why, feasible=count >= found.workers, shed=shed), replace(found, workers=count)

    @abstractmethod
    def _decide(self, now_ns: int, seen: Seen, memory: WatchedWorkers | None) -> tuple[WatchedWorkers, str]:
        """The workers to have if there is room, and why."""

    def _watched(self, seen: Seen, before: WatchedWorkers) -> tuple[WatchedWorkers, str]:
        """Of a tick of the reactive loop: the streak goes on, but not while workers start."""
        if seen.stage.count(Life.READY) < len(seen.stage.replicas):
            return before, "workers start"
        late = seen.latency_ms > seen.slo_ms
        streak = max(1, before.streak + 1) if late else min(-1, before.streak - 1)
        return replace(before, streak=streak), f"mean latency {number(seen.latency_ms)} ms"


@dataclass(frozen=True, slots=True)
class Aiad(Workers):
    """One worker more after 30 s with a mean latency above the deadline, one fewer after ten minutes without."""

    hardware: str = ""
    """The kind of node to use; empty: the first kind on which the model has a profile."""

    def _decide(self, now_ns: int, seen: Seen, memory: WatchedWorkers | None) -> tuple[WatchedWorkers, str]:
        if memory is None:
            return WatchedWorkers(1, 1, 0), "the first"
        found, why = self._watched(seen, memory)
        if -IN_TICKS < found.streak < OUT_TICKS:
            return found, why
        return replace(found, workers=self._next(found, seen), streak=0), why

    def _next(self, found: WatchedWorkers, seen: Seen) -> int:
        return found.workers + (1 if found.streak > 0 else -1)


@dataclass(frozen=True, slots=True)
class Oneshot(Aiad):
    """As `Aiad`, but at once as many times the workers as the mean latency is of the deadline."""

    def _next(self, found: WatchedWorkers, seen: Seen) -> int:
        return math.ceil(min(REPLICAS_MAX, found.workers * seen.latency_ms / seen.slo_ms))


@dataclass(frozen=True, slots=True)
class Faro(Workers):
    """Every five minutes the fewest workers with the most utility over the next seven, and one more after 30 s with a
    mean latency above the deadline."""

    hardware: str = ""
    """The kind of node to use; empty: the first kind on which the model has a profile."""

    def _decide(self, now_ns: int, seen: Seen, memory: WatchedWorkers | None) -> tuple[WatchedWorkers, str]:
        if memory is None or predicts(now_ns):
            wanted, why = self._predicted(seen)
            return WatchedWorkers(wanted, wanted, 0), why
        found, why = self._watched(seen, memory)
        if found.streak < OUT_TICKS:
            # What the forecast asked for and had no room then is asked for again.
            return replace(found, workers=max(found.workers, found.wanted)), why
        return replace(found, workers=found.workers + 1, streak=0), why

    def _predicted(self, seen: Seen) -> tuple[int, str]:
        need = seen.need(seen.room)
        wanted = workers_wanted(utility_by_workers(need, penalised=False))
        return wanted, f"at most {number(max(need.rates_rps))} requests/s expected"


@dataclass(frozen=True, slots=True)
class MarkWorkers(Faro):
    """As `Faro`, but as many workers as serve the largest forecast of a second within the deadline if all of it comes
    at once, whatever others gain."""

    def _predicted(self, seen: Seen) -> tuple[int, str]:
        rate_rps = max(seen.rates_rps(MEDIAN))
        wanted = math.ceil(min(REPLICAS_MAX, rate_rps * seen.service_ms / seen.slo_ms))
        return wanted, f"at most {number(rate_rps)} requests/s expected"


@dataclass(frozen=True, slots=True)
class FirstCome(Divide):
    """Everybody keeps what he has and still wants; what is left goes to the first who wants more, then to the next.

    Fails for the last ones, also if they would gain most."""

    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
        return first_come(total, claimants)


@dataclass(frozen=True, slots=True)
class JointUtility(Divide):
    """Workers to the applications so that an objective of all their utilities is largest, at each forecast; in between,
    first come, first served.

    Fails as the forecast does, and for an application whose utility others outweigh (`objective: sum`)."""

    is_quick: ClassVar[bool] = False
    objective: Objective = "fair_sum"
    """`sum`: of the utilities. `fair`: the least minus the largest. `fair_sum`: the sum, and that times the number of
    applications."""
    penalised: bool = False
    """Whether requests are refused, for a penalty, if the others then have more utility."""

    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
        if not predicts(now_ns):
            return first_come(total, claimants)
        needs = [seen_in(each.view, each.hardware).need(max(1, int(each.cores)), each.weight) for each in claimants]
        counts = divided(needs, int(total), self.objective, penalised=self.penalised)
        found: list[CoreShare] = []
        for each, need, count in zip(claimants, needs, counts, strict=True):
            utility, refused = utility_of(need, count, penalised=self.penalised)
            found.append(CoreShare(min(each.cores, float(count)), f"utility {number(utility)}", refused))
        return found


def first_come(total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
    """What each has of what it wants, in proportion less if there are fewer than before; then more in their order."""
    present = [cores_by_hardware(each.view.plan).get(each.hardware, 0.0) for each in claimants]
    found = [min(each.cores, own) for each, own in zip(claimants, present, strict=True)]
    used = math.fsum(found)
    if used > total:
        found = [each * total / used for each in found]
    left = total - used
    for place, each in enumerate(claimants):
        more = min(each.cores - found[place], max(0.0, left))
        found[place] += more
        left -= more
    return [CoreShare(cores) for cores in found]
