"""Predicts the time of a request at each stage and along each path, if a plan serves a steady rate.

**Batches.** A work-conserving replica runs the smallest batch whose throughput meets its share of the rate. A request
waits until that batch is full, (b - 1)/rate, at most for the batch before it (FA2, RTAS 2022, queueing model; Biscale,
dissertation P4). A batch policy that waits on purpose is asked for how long, with the elapsed and the remaining time of
a request that is as far as predicted; its batches hold what arrives meanwhile.

**Arrivals.** `even`: the requests of a second are evenly spaced, which the published queueing models assume. `burst`:
all requests of a second arrive at one instant, as from clients that send once a second (Sponge, Algorithm 2).

**Rows.** Where requests bring several rows, or rows of several sizes, rates and batches count rows, and a batch takes
the mean of the sizes (`sloop.systems.mix`).

**Visits that arrive together** are those of a burst, the rows of one request, and its parts after a fan-out (the
declared mean).
They fill batches at once, without waiting. Where they exceed one batch on every replica, the last of them waits for
⌈visits / (batch × replicas)⌉ - 1 earlier batches. Stages in a row work on them at the same time, as in a flow shop, so
along a path only the longest of these waits counts.

**Groups.** Each group of equal replicas is predicted with the profile of its kind of hardware, its own largest batch
and its part of the traffic: as the plan says (`Group.rate_rps`); else evenly per replica on one kind of hardware, which
the published models assume, and in proportion to their throughput on several, because idle replicas take what waits.
The slowest group decides how long a stage takes.

**Shared cores.** Replicas whose cores are only reserved slow each other down as their profile says. They are predicted
as if all that fit on a node ran batches all the time, so what they serve is right and how long they take pessimistic.

**Shares of an accelerator** that are a cap slow replicas down as their profile says. Replicas that reserve nothing of
an accelerator (PALDIA's) are predicted like those on shared cores: as if as many as the plan has, and fit there, ran
batches all the time. Batches of replicas that reserve a share are not counted: how much they overlap depends on all
rates, and `sloop simulate` says it.

The module must not know how a plan was found, nor on which nodes it is placed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sloop.app.application import Application, Stage
from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.graph_estimates import LeastTimes, remaining_times
from sloop.core.protocols import deciding
from sloop.core.views import Belief, BeliefKey
from sloop.policies.targets import together_max
from sloop.profile.estimate import CrowdedEstimate, Estimate
from sloop.solvers.queueing import fill_ms
from sloop.systems.mix import ONE_ROW_EACH
from sloop.systems.setup import ApplicationSetup
from sloop.units import FOREVER_NS, ROUNDING, ms, round_up, to_ms
from sloop.vocabulary import Group, Node, Path, Plan, Request, RequestId, Slot, StagePlan, Visit

Arrivals = Literal["even", "burst"]
"""How the requests of one second arrive: evenly spaced, or all at once."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The arrivals at a stage, and how long its batch policy waits for more."""

    rate_rps: float
    together: float = 1.0
    """Visits that arrive at one instant, ≥ 1."""
    patience_ms: float = 0.0
    """How long the batch policy lets a lone visit wait for others while a replica is idle; 0 if work-conserving."""
    burst: bool = False
    """Whether nothing arrives between two groups of `together`, so that waiting longer fills no batch."""


@dataclass(frozen=True, slots=True)
class VisitTiming:
    """One visit's time at a stage. `wait_ms` is infinite where the replicas cannot keep up."""

    batch: int
    service_ms: float
    wait_ms: float
    spread_ms: float = 0.0
    """The part of `wait_ms` between the first and the last start of visits that arrived together."""

    @property
    def total_ms(self) -> float:
        """From entering the stage to leaving it."""
        return self.service_ms + self.wait_ms


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is when it enters a stage, in ns since it was sent."""

    elapsed_ns: int
    deadline_ns: int
    remaining_ns: int
    """A lower bound of the time from leaving the stage to the answer."""


def smallest_batch(belief: Belief, slot: Slot, batch_max: int, rate_rps: float) -> int | None:
    """The smallest batch with which one replica serves `rate_rps`; None where none up to `batch_max` does."""
    return next((b for b in range(1, batch_max + 1) if b * 1e3 >= rate_rps * belief.latency_ms(b, slot)), None)


def throughput_rps(belief: Belief, slot: Slot, batch_max: int) -> float:
    """The most that one replica serves, in requests per second, with batches up to `batch_max`."""
    return max(b * 1e3 / belief.latency_ms(b, slot) for b in range(1, batch_max + 1))


def timing(belief: Belief, slot: Slot, batch_max: int, replicas: float, load: StageLoad) -> VisitTiming:
    """Waiting and service at one of `replicas` > 0 equal replicas that share `load` evenly."""
    share_rps = load.rate_rps / replicas
    least = smallest_batch(belief, slot, batch_max, share_rps)
    if least is None:
        return VisitTiming(batch_max, belief.latency_ms(batch_max, slot), math.inf)
    together = max(1, round_up(load.together))
    if load.patience_ms:
        joining = load.rate_rps * load.patience_ms / 1e3 if load.rate_rps and not load.burst else 0.0
        batch = batch_max if joining >= batch_max - together else max(least, together + int(joining))
        wait_ms = load.patience_ms if batch < batch_max else fill_ms(max(1, batch_max - together + 1), load.rate_rps)
        service_ms = belief.latency_ms(batch, slot)
    else:
        batch = max(least, min(together, batch_max))
        service_ms = belief.latency_ms(batch, slot)
        wait_ms = min(fill_ms(max(1, batch - together + 1), share_rps), service_ms)
    spread_ms = (max(1, round_up(together / (batch * replicas))) - 1) * service_ms
    return VisitTiming(batch, service_ms, wait_ms + spread_ms, spread_ms)


class StagePrediction:
    """One stage of a plan: its replicas, what arrives there, and how long its visits take.

    `rate_rps` are the application's requests per second; what arrives at the stage counts rows. The prediction of each
    path that leads to the stage adds a visit.
    """

    def __init__(
        self, setup: ApplicationSetup, stage: Stage, target: StagePlan | None, rate_rps: float, arrivals: Arrivals
    ) -> None:
        self._setup, self._stage, self._arrivals = setup, stage, arrivals
        application = setup.application
        self.name = stage.name
        self.target = target
        self.beliefs = stage_beliefs(setup, stage.name)
        self.groups = [group for group in target.groups if group.count] if target else []
        self.replicas = sum(group.count for group in self.groups)
        self.visits = application.visits[stage.name]
        """Visits per request."""
        self.mix = setup.mixes.get(stage.name, ONE_ROW_EACH)
        """What requests bring."""
        self.rate_rps = rate_rps * self.visits * self.mix.rows
        """Rows per second."""
        self.burst = arrivals == "burst"
        self.parts = max(_parts(application, stage.name), self.mix.rows)
        """Rows and parts of one request that arrive together; 1 where the stage runs once per request of one row."""
        self.together = max(self.parts, round_up(self.rate_rps)) if self.burst else self.parts
        self.visited: list[VisitPrediction] = []
        """One prediction per path that leads here, or one for all."""

    def changed(self, target: StagePlan | None, rate_rps: float) -> "StagePrediction":
        """The same stage under another plan, or at another rate of the application, with the same visits."""
        changed = StagePrediction(self._setup, self._stage, target, rate_rps, self._arrivals)
        for visit in self.visited:
            changed.visit(visit.progress, visit.arrival_spread_ms)
        return changed

    def belief(self, group: Group) -> Estimate:
        """The belief about the replicas of a group. A capped share of an accelerator slows them down. Replicas that
        share the cores of a node, or an accelerator of which they reserve nothing, are taken to be as many there as
        fit, and all busy."""
        slot = group.spec.slot
        belief = self.beliefs[group.spec.variant, slot.hardware].of(group.spec.shape)
        if not belief.shares(slot):
            return belief
        if slot.accelerator and slot.share:
            return CrowdedEstimate(belief, 1) if slot.is_capped else belief
        if slot.is_capped and not slot.accelerator:
            return belief
        nodes = [node for node in self._setup.application.cluster if node.hardware == slot.hardware]
        most = max((_most_on(node, slot, belief) for node in nodes), default=1)
        return CrowdedEstimate(belief, max(1, min(group.count, most)))

    def batch_max(self, group: Group) -> int:
        """The largest batch that the replicas of a group are sent."""
        most = self.beliefs[group.spec.variant, group.spec.slot.hardware].batch_max
        return min(self.target.batch_max_of(group), most) if self.target else 1

    @cached_property
    def like_replicas(self) -> dict[Group, float]:
        """For each group with replicas, how many of its replicas the whole stage is worth: each gets the rate divided
        by this number. If all replicas are equal, it is how many there are.

        The traffic is divided as the plan says. If it does not say, each replica gets the same on one kind of hardware;
        on several, replicas get traffic in proportion to their throughput.
        """
        kinds = {(group.spec.slot.hardware, group.spec.slot.accelerator) for group in self.groups}
        says = len(self.groups) > 1 and all(group.rate_rps for group in self.groups)
        if not says and len(kinds) < 2:
            return dict.fromkeys(self.groups, float(self.replicas))
        if says:
            each_rps = {group: group.rate_rps / group.count for group in self.groups}
        else:
            each_rps = {group: self._replica_rps(group) for group in self.groups}
        total_rps = math.fsum(group.count * each_rps[group] for group in self.groups)
        return {group: total_rps / each_rps[group] for group in self.groups}

    def _replica_rps(self, group: Group) -> float:
        """The most that a replica of a group serves."""
        return throughput_rps(self.belief(group), group.spec.slot, self.batch_max(group))

    def share_rps(self, group: Group) -> float:
        """The visits per second that each replica of a group gets."""
        return self.rate_rps / self.like_replicas[group]

    def batch(self, group: Group) -> int | None:
        """The smallest batch with which the replicas of a group keep up; None where none does."""
        return smallest_batch(self.belief(group), group.spec.slot, self.batch_max(group), self.share_rps(group))

    @property
    def keeps_up(self) -> bool:
        """Whether the replicas of each group serve what they get."""
        return all(self.batch(group) is not None for group in self.groups)

    def group_rps(self, group: Group) -> float:
        """The visits per second that all replicas of a group get."""
        return self.rate_rps * group.count / self.like_replicas[group] if group.count else 0.0

    def visit(self, progress: Progress, spread_ms: float) -> "VisitPrediction":
        """Add a visit of a request with this `progress`; visits that started out together arrive within `spread_ms`."""
        visit = VisitPrediction(self, progress, spread_ms)
        self.visited.append(visit)
        return visit

    @property
    def slowest(self) -> "VisitPrediction":
        """The visit that takes longest, of all paths that lead here."""
        return max(self.visited, key=lambda visit: visit.total_ms)

    @property
    def alone_ms(self) -> float:
        """Batches of one without any waiting, on the slowest replica."""
        return max((self.belief(group).latency_ms(1, group.spec.slot) for group in self.groups), default=0.0)

    @cached_property
    def rate_max_rps(self) -> float:
        """What the replicas serve if the rate is divided among them as it is now: the first that is full decides."""
        return min((self._replica_rps(group) * self.like_replicas[group] for group in self.groups), default=0.0)

    def load(self, progress: Progress, group: Group) -> StageLoad:
        """What arrives, and the patience of the batch policy for a visit while a replica of `group` is idle."""
        return StageLoad(self.rate_rps, self.together, self._patience_ms(progress, group), self.burst)

    def _patience_ms(self, progress: Progress, group: Group) -> float:
        """How long the batch policy lets the first visit of a batch wait for others, which arrive evenly spaced: the
        policy may wait longer the more there are."""
        now_ns = progress.elapsed_ns
        visit = Visit(Request(RequestId(0), 0, 0, progress.deadline_ns), self.name, now_ns, progress.deadline_ns)
        costs_ns = self.belief(group).costs_ns(group.spec.slot)
        wait_ns = self.target.wait_ns if self.target else 0
        most, decide = self.batch_max(group), deciding(self._setup.system.policies.batch)
        gap_ms = 1e3 / self.rate_rps if self.rate_rps and not self.burst else math.inf
        device = AssumedDevice(most, costs_ns)
        for count in range(1, most + 1):
            arrived_ms = (count - 1) * gap_ms if count > 1 else 0.0
            queue = AssumedQueue([visit] * count, wait_ns, progress.remaining_ns, self.name)
            decision = decide(now_ns, queue, device)
            if decision.count or decision.skip:
                return arrived_ms
            until_ms = to_ms(decision.wait_until_ns - now_ns) if decision.wait_until_ns < FOREVER_NS else math.inf
            if until_ms <= count * gap_ms:
                return max(until_ms, arrived_ms)
        return until_ms


class VisitPrediction:
    """How long one visit to a stage takes, on each group of its replicas.

    `arrival_spread_ms` is the time between the first and the last arrival of visits that started out together.
    """

    def __init__(self, stage: StagePrediction, progress: Progress, arrival_spread_ms: float) -> None:
        self.stage, self.progress, self.arrival_spread_ms = stage, progress, arrival_spread_ms
        self.loads = {group: stage.load(progress, group) for group in stage.groups}
        self.timings = {group: self._timing(group, load) for group, load in self.loads.items()}
        self.slowest = max(self.timings.values(), key=lambda timing: timing.total_ms, default=None)
        """The timing on the slowest replica; None without replicas."""
        without_ms = math.inf if stage.rate_rps else 0.0
        self.total_ms = without_ms if self.slowest is None else self.slowest.total_ms
        """The time on the slowest replica; infinite where there is none for what arrives."""
        self.departure_spread_ms = max([arrival_spread_ms, *(timing.spread_ms for timing in self.timings.values())])
        """The time between the first and the last departure of visits that started out together."""

    def _timing(self, group: Group, load: StageLoad) -> VisitTiming:
        """The time on replicas of one group. Visits that already arrive spread out wait less for each other."""
        stage, slot = self.stage, group.spec.slot
        at_once = timing(stage.belief(group), slot, stage.batch_max(group), stage.like_replicas[group], load)
        return replace(at_once, wait_ms=at_once.wait_ms - min(self.arrival_spread_ms, at_once.spread_ms))


@dataclass(frozen=True, slots=True)
class PathPrediction:
    """How long a request takes along one path."""

    path: Path
    visits: tuple[VisitPrediction, ...]
    predicted_ms: float

    @property
    def slo_ms(self) -> float:
        """The path's deadline."""
        return to_ms(self.path.slo_ns)

    @property
    def slack_ms(self) -> float:
        """Deadline - prediction: negative where the deadline is missed."""
        return self.slo_ms - self.predicted_ms


class PlanPrediction:
    """A plan at a rate: every stage and every path of the application."""

    def __init__(self, setup: ApplicationSetup, plan: Plan, rate_rps: float, arrivals: Arrivals = "even") -> None:
        application = setup.application
        targets = {target.stage: target for target in plan.stages}
        self.plan, self.rate_rps, self.arrivals = plan, rate_rps, arrivals
        self.stages = {
            stage.name: StagePrediction(setup, stage, targets.get(stage.name), rate_rps, arrivals)
            for stage in application.order
        }
        self._application, self._declared = application, application.declared_paths
        self._remaining_ns = _remaining_ns(setup, targets)
        self._everywhere = {} if application.declared_paths else self._visits_everywhere()
        paths = [self._path(path) for path in application.paths]
        self.paths: Sequence[PathPrediction] = sorted(paths, key=lambda path: path.slack_ms)
        """The path with the least slack comes first."""
        for stage in self.stages.values():
            if not stage.visited:  # on none of the declared paths
                self._visit(stage.name, 0.0, application.slo_ns, 0.0)

    @property
    def predicted_ms(self) -> float:
        """The time along the longest path."""
        return max((path.predicted_ms for path in self.paths), default=0.0)

    def tightest(self, stage: str) -> PathPrediction | None:
        """The path through a stage that has the least slack."""
        return next((path for path in self.paths if stage in path.path.stages), None)

    def _visit(self, name: str, elapsed_ms: float, deadline_ns: int, spread_ms: float) -> VisitPrediction:
        # Behind a stage that cannot keep up, predict as if requests arrived all the same, and at once.
        elapsed_ns = ms(elapsed_ms) if math.isfinite(elapsed_ms) else 0
        return self.stages[name].visit(Progress(elapsed_ns, deadline_ns, self._remaining_ns[name]), spread_ms)

    def _path(self, path: Path) -> PathPrediction:
        visits = [self._everywhere[name] for name in path.stages] if self._everywhere else self._visits_along(path)
        return PathPrediction(path, tuple(visits), math.fsum(visit.total_ms for visit in visits))

    def _visits_along(self, path: Path) -> list[VisitPrediction]:
        """The visits of a request that takes this declared path and no other. Its deadline at a stage is, as in a run,
        the loosest of the declared paths that begin as it did and that it may still turn out to be on."""
        possible = [other for other in self._declared if other.stages[0] == path.stages[0]]
        visits: list[VisitPrediction] = []
        passed: set[str] = set()
        elapsed_ms = 0.0
        for name in path.stages:
            passed.add(name)
            deadline_ns = max(other.slo_ns for other in possible if passed <= set(other.stages))
            spread_ms = self._arrival_spread_ms(name, visits[-1:])
            visits.append(self._visit(name, elapsed_ms, deadline_ns, spread_ms))
            elapsed_ms += visits[-1].total_ms
        return visits

    def _visits_everywhere(self) -> dict[str, VisitPrediction]:
        """The visits of a request that passes all stages and enters each when all stages before it are done."""
        visits: dict[str, VisitPrediction] = {}
        left_ms: dict[str, float] = {}
        for stage in self._application.order:
            elapsed_ms = max((left_ms[before] for before in stage.after), default=0.0)
            spread_ms = self._arrival_spread_ms(stage.name, [visits[before] for before in stage.after])
            visits[stage.name] = self._visit(stage.name, elapsed_ms, self._application.slo_ns, spread_ms)
            left_ms[stage.name] = elapsed_ms + visits[stage.name].total_ms
        return visits

    def _arrival_spread_ms(self, name: str, before: Sequence[VisitPrediction]) -> float:
        """How far the stages before have spread out the visits that started out together: those of one burst, or
        those for the parts of one request if both stages run for the same parts."""
        scopes = self._application.graph.scopes
        burst = self.arrivals == "burst"
        together = [visit for visit in before if burst or scopes[name] == scopes[visit.stage.name] != ""]
        return min((visit.departure_spread_ms for visit in together), default=0.0)


def _remaining_ns(setup: ApplicationSetup, targets: Mapping[str, StagePlan]) -> dict[str, int]:
    """Per stage, a lower bound of the time from leaving it to the answer, as batch policies see it in a run."""
    least_ns: dict[str, LeastTimes] = {}
    for stage in setup.application.stages:
        target = targets.get(stage.name)
        specs = [group.spec for group in target.groups if group.count] if target else []
        beliefs = setup.beliefs
        alone_ns = min(
            (beliefs[stage.name, spec.variant, spec.slot.hardware].costs_ns(spec.slot)[1] for spec in specs), default=0
        )
        least_ns[stage.name] = alone_ns, alone_ns  # only drop policies ask for the second, with full batches
    return {name: alone_ns for name, (alone_ns, _) in remaining_times(setup.application.graph, least_ns).items()}


def _most_on(node: Node, slot: Slot, belief: Belief) -> int:
    """How many replicas fit on an accelerator of a node, by memory and clients, or else on its cores."""
    if not slot.accelerator:
        return int(node.cores / slot.cores + ROUNDING)
    devices = [device for device in node.devices if device.kind == slot.accelerator]
    return max(
        (together_max(each.memory_bytes, belief.device_memory_bytes, clients_max=each.clients_max) for each in devices),
        default=1,
    )


def stage_beliefs(setup: ApplicationSetup, stage: str) -> dict[BeliefKey, Estimate]:
    """The beliefs about one stage, by variant and kind of hardware."""
    return {(variant, kind): belief for (name, variant, kind), belief in setup.beliefs.items() if name == stage}


def _parts(application: Application, name: str) -> float:
    """How many visits of one request arrive at a stage together: the declared mean of its fan-out, thinned out by the
    branches since."""
    graph, visits = application.graph, application.visits
    scope = graph.scopes[name]
    fan_out = graph.stages[scope].each if scope else None
    if fan_out is None or not visits[scope]:
        return 1.0
    return max(1.0, fan_out.mean * visits[name] / visits[scope])
