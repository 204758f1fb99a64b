"""What a stage's replicas are believed to give: how long a request takes at each, and along each path.

Work-conserving batches grow to the smallest size whose throughput meets the rate, and a request waits for its batch to
fill, (b - 1)/rate per replica (FA2; Biscale, chapter P4), at most for the batch before. A batch policy that waits for
company is asked how long, for a request that has come as predicted so far and has its least time still to go; its
batches are those that come together in that time, at most full ones.

**Parts.** Where a stage runs for parts of a request, all of them, on average as many as `each` believes times the share
that reaches the stage, are taken to come at one instant and to share the stage's replicas. They are their own company,
so a batch fills the sooner; and where they are more than fit into one batch on every replica at once, they take turns:
the last of them, which is when the request is done with the stage, waits for ⌈parts / (batch × replicas)⌉ - 1 batches
before its own. Stages that run for the same parts one after another do so at once for different ones, as in a flow
shop: of their turns only the longest count, each stage those that the stage before has not made up for already.
Knows no plan but the one it is given, and no cluster.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sloop.app.application import Application
from sloop.core.ahead import Times, ahead
from sloop.core.views import Belief
from sloop.solvers.queueing import fill_ms
from sloop.systems.setup import Setup
from sloop.units import FOREVER_NS, ms, to_ms
from sloop.vocabulary import Path, Plan, ReplicaSpec, Request, RequestId, StagePlan, Visit


@dataclass(frozen=True, slots=True)
class Load:
    """What comes to a stage: a rate, in clumps of `parts`, and how long its batches wait for company."""

    rate_rps: float
    parts: float = 1.0
    patience_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """One request's time at a stage. `wait_ms` is infinite where the replicas cannot keep up."""

    batch: int
    service_ms: float
    wait_ms: float
    turns_ms: float = 0.0
    """Of the wait, how long the last part's turn is after the first's."""

    def overlapped(self, ms: float) -> "Predicted":
        """The same where parts come as far apart as `ms`, the last after the first."""
        return replace(self, wait_ms=self.wait_ms - min(ms, self.turns_ms))

    @property
    def ms(self) -> float:
        """Both."""
        return self.service_ms + self.wait_ms


@dataclass(frozen=True, slots=True)
class Leg:
    """How a request stands when it comes to a stage, in ns since it was sent."""

    came_ns: int
    deadline_ns: int
    remaining_ns: int
    """The least time from leaving the stage to the answer."""


def keeping_up(belief: Belief, cores: float, largest: int, rate_rps: float) -> int | None:
    """The smallest batch with which a replica keeps up; None where none up to `largest` does."""
    return next((b for b in range(1, largest + 1) if b * 1e3 >= rate_rps * belief.latency_ms(b, cores)), None)


def rate_max_rps(belief: Belief, cores: float, largest: int) -> float:
    """What one replica does at best, in requests per second."""
    return max(b * 1e3 / belief.latency_ms(b, cores) for b in range(1, largest + 1))


def predicted(belief: Belief, cores: float, largest: int, replicas: int, load: Load) -> Predicted:
    """Waiting and service at one of `replicas` ≥ 1 equal replicas with batches up to `largest`."""
    share_rps = load.rate_rps / replicas
    least = keeping_up(belief, cores, largest, share_rps)
    if least is None:
        return Predicted(largest, belief.latency_ms(largest, cores), math.inf)
    together = max(1, math.ceil(load.parts - 1e-9))
    if load.patience_ms:
        coming = load.rate_rps * load.patience_ms / 1e3 if load.rate_rps else 0.0
        batch = largest if coming >= largest - together else max(least, together + int(coming))
        wait_ms = load.patience_ms if batch < largest else fill_ms(max(1, largest - together + 1), load.rate_rps)
        service_ms = belief.latency_ms(batch, cores)
    else:
        batch = max(least, min(together, largest))
        service_ms = belief.latency_ms(batch, cores)
        wait_ms = min(fill_ms(max(1, batch - together + 1), share_rps), service_ms)
    turns_ms = (math.ceil(together / (batch * replicas)) - 1) * service_ms
    return Predicted(batch, service_ms, wait_ms + turns_ms, turns_ms)


class StageOutlook:
    """One stage of a plan: its load, and what each group of its replicas is believed to give."""

    def __init__(
        self, setup: Setup, name: str, target: StagePlan | None, rate_rps: float, leg: Leg, apart_ms: float = 0.0
    ) -> None:
        self.name = name
        self.leg = leg
        self.apart_ms = apart_ms
        """How far apart the stages before let a request's parts come."""
        self.target = target
        self.beliefs = {v.name: setup.beliefs[name, v.name] for v in setup.application.by_name[name].variants}
        self.groups = [group for group in target.groups if group.count] if target else []
        self.replicas = sum(group.count for group in self.groups)
        self.parts = _parts(setup.application, name)
        self.visits = setup.application.visits[name]
        self.rate_rps = rate_rps * self.visits
        self.loads = {group.spec: self._load(setup, group.spec) for group in self.groups}
        self.predictions = {
            group.spec: self.would(
                self.beliefs[group.spec.variant],
                group.spec.cores,
                self.largest(group.spec.variant),
                self.replicas,
                self.loads[group.spec],
            )
            for group in self.groups
        }

    def would(self, belief: Belief, cores: float, largest: int, replicas: int, load: Load) -> Predicted:
        """What it would give, had it these replicas: see `predicted`."""
        return predicted(belief, cores, largest, replicas, load).overlapped(self.apart_ms)

    @property
    def leaves_apart_ms(self) -> float:
        """How far apart a request's parts leave it."""
        return max([self.apart_ms, *(found.turns_ms for found in self.predictions.values())])

    def largest(self, variant: str) -> int:
        """The largest batch that replicas of this variant are sent."""
        return min(self.target.batch_max if self.target else 1, self.beliefs[variant].batch_max)

    @property
    def predicted_ms(self) -> float:
        """What its slowest replica takes; infinite where none is there for what comes."""
        if not self.groups:
            return math.inf if self.rate_rps else 0.0
        return max(found.ms for found in self.predictions.values())

    @property
    def slowest(self) -> Predicted | None:
        """Of its replicas."""
        return max(self.predictions.values(), key=lambda found: found.ms, default=None)

    @property
    def alone_ms(self) -> float:
        """What it takes where nobody waits and batches are of one, on its slowest replica."""
        return max((self.beliefs[spec.variant].latency_ms(1, spec.cores) for spec in self.predictions), default=0.0)

    @property
    def rate_max_rps(self) -> float:
        """What its replicas can do when they share the rate evenly: bound by the slowest of them."""
        each = [
            rate_max_rps(self.beliefs[group.spec.variant], group.spec.cores, self.largest(group.spec.variant))
            for group in self.groups
        ]
        return min(each, default=0.0) * self.replicas

    def _load(self, setup: Setup, spec: ReplicaSpec) -> Load:
        """The batch policy is asked what it would do with a lone visit and an idle replica."""
        assert self.target is not None
        leg, largest = self.leg, self.largest(spec.variant)
        visit = Visit(Request(RequestId(0), 0, 0, leg.deadline_ns), self.name, leg.came_ns, leg.deadline_ns)
        costs_ns, wait_ns = self.beliefs[spec.variant].costs_ns(spec.cores), self.target.wait_ns
        take = setup.system.policies.batch.decide(leg.came_ns, [visit], largest, costs_ns, wait_ns, leg.remaining_ns)
        if take.count or take.skip:
            return Load(self.rate_rps, self.parts)
        waits_ms = to_ms(take.wait_until_ns - leg.came_ns) if take.wait_until_ns < FOREVER_NS else math.inf
        return Load(self.rate_rps, self.parts, waits_ms)


def _rests_ns(setup: Setup, targets: Mapping[str, StagePlan]) -> dict[str, int]:
    """Per stage the least time from leaving it to the answer, which batch policies are told: alone at every stage."""
    least_ns: dict[str, Times] = {}
    for stage in setup.application.stages:
        target = targets.get(stage.name)
        specs = [group.spec for group in target.groups if group.count] if target else []
        alone_ns = min((setup.beliefs[stage.name, spec.variant].costs_ns(spec.cores)[1] for spec in specs), default=0)
        least_ns[stage.name] = alone_ns, alone_ns  # what full batches take only drop rules ask
    return {name: alone_ns for name, (alone_ns, _) in ahead(setup.application.graph, least_ns).items()}


def _leg(application: Application, name: str, came_ms: float, remaining_ns: int) -> Leg:
    """A request that comes to a stage as predicted, under the loosest deadline of the paths it may be on, as live."""
    slo_ns = max((path.slo_ns for path in application.paths if name in path.stages), default=application.slo_ns)
    # Where a stage before cannot keep up, this one is still predicted as if requests came, and those at once.
    return Leg(ms(came_ms) if math.isfinite(came_ms) else 0, slo_ns, remaining_ns)


def _parts(application: Application, name: str) -> float:
    """How many visits of one request come to a stage together: 1 where it runs once."""
    graph, visits = application.graph, application.visits
    scope = graph.scopes[name]
    each = graph.steps[scope].each if scope else None
    if each is None or not visits[scope]:
        return 1.0
    return max(1.0, each.mean * visits[name] / visits[scope])


@dataclass(frozen=True, slots=True)
class PathOutlook:
    """A path, and how long a request is believed to take along it."""

    path: Path
    predicted_ms: float

    @property
    def slack_ms(self) -> float:
        """What is left of its deadline; below 0 where it is missed."""
        return to_ms(self.path.slo_ns) - self.predicted_ms


class Outlook:
    """A plan at a rate: every stage and every path of it."""

    def __init__(self, setup: Setup, plan: Plan, rate_rps: float) -> None:
        targets = {target.stage: target for target in plan.stages}
        self.plan = plan
        self.rate_rps = rate_rps
        self.stages: dict[str, StageOutlook] = {}
        application = setup.application
        names, scopes = [stage.name for stage in application.order], application.graph.scopes
        remaining_ns_by_stage = _rests_ns(setup, targets)
        left_ms: dict[str, float] = {}
        """When a request sent at 0 leaves each stage, by the slowest way there."""
        for name in names:
            befores = application.by_name[name].after
            came_ms = max((left_ms[before] for before in befores), default=0.0)
            leg = _leg(application, name, came_ms, remaining_ns_by_stage[name])
            inside = [self.stages[before] for before in befores if scopes[name] == scopes[before] != ""]
            apart_ms = min((before.leaves_apart_ms for before in inside), default=0.0)
            self.stages[name] = StageOutlook(setup, name, targets.get(name), rate_rps, leg, apart_ms)
            left_ms[name] = came_ms + self.stages[name].predicted_ms
        took_ms = {name: stage.predicted_ms for name, stage in self.stages.items()}
        ways = [PathOutlook(path, math.fsum(took_ms[name] for name in path.stages)) for path in application.paths]
        self.ways: Sequence[PathOutlook] = sorted(ways, key=lambda way: way.slack_ms)
        """The tightest first."""

    @property
    def predicted_ms(self) -> float:
        """Of the longest path."""
        return max((way.predicted_ms for way in self.ways), default=0.0)

    def tightest(self, stage: str) -> PathOutlook | None:
        """The path through a stage that has the least slack."""
        return next((way for way in self.ways if stage in way.path.stages), None)
