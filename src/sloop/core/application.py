"""One version of an application while it runs, and what a core is given of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from sloop.app.graph import Graph
from sloop.app.progress import RequestProgress
from sloop.core.graph_estimates import EdgeHistory, VisitRates, expected_times, remaining_times
from sloop.core.monitor import Monitor
from sloop.core.oversight import Overseer, oversight_of
from sloop.core.protocols import Policies, ServiceGap
from sloop.core.replica import Replica
from sloop.core.stage import StageState
from sloop.core.views import Belief, BeliefKey, StageView, StartCosts
from sloop.sizes import GRID, SizeClasses
from sloop.units import NS_PER_S, ROUNDING
from sloop.vocabulary import ReplicaId, Request, RequestId, Visit, version_key

Beliefs = Mapping[tuple[str, str, str], Belief]
"""The latency estimate of each stage, variant and kind of hardware."""

BUCKET_NS_MAX = NS_PER_S
"""The longest monitoring bucket: one second; a shorter planning period makes it shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationParts:
    """What a core needs of one version of an application. Its policies and beliefs are fresh.

    It is not the `Application`, which also holds model files, traces and prices and needs imports that the core must
    not have.
    """

    graph: Graph
    beliefs: Beliefs
    policies: Policies
    name: str = ""
    version: str = "1"
    system: str = ""
    """What people call these policies."""
    weight: float = 1.0
    """Its weight when the cluster has too few cores (`Divide`)."""
    rest_after_ns: int = 0
    """After how long without a request it gives up its replicas; 0: never."""
    wake_ns: int = 0
    """How long a request waits, whatever its deadline, while the first replicas start, also after a rest; 0: no longer
    than its deadline and the drop policy allow."""
    response_timeouts_ns: Mapping[str, int] = field(default_factory=dict)
    """The response timeouts that stages declare; the others have the default (`StageState.response_timeout_ns`)."""
    size_classes: Mapping[str, SizeClasses] = field(default_factory=dict)
    """By stage, its classes of sizes; a stage that is missing has those of the grid (`sloop.sizes.GRID`)."""
    padded: frozenset[str] = frozenset()
    """The stages that pad rows: rows of different sizes of one class share a forward pass."""
    divided: frozenset[str] = frozenset()
    """The stages whose models compute each row independently of the others, so that the rows of a request can run in
    several passes."""
    starts: Mapping[tuple[str, str, str], StartCosts] = field(default_factory=dict)
    """What a start of each stage, variant and kind of hardware consists of, for provision policies."""
    overseer: Overseer | None = None
    """Who chooses among `choices`; None if `policies` decide all the time."""
    choices: Mapping[str, Policies] = field(default_factory=dict)
    """By name, the systems of which one decides; the first one, whose policies are `policies`, at first."""

    @property
    def slowest(self) -> Policies:
        """Of all policies that may decide for this application, those whose plans take longest (`Scale.is_quick`,
        `Divide.is_quick`)."""
        all_policies = (self.policies, *self.choices.values())
        return min(all_policies, key=lambda each: (each.scale.is_quick, each.divide.is_quick))

    @property
    def key(self) -> str:
        """Unique among all versions of all applications."""
        return version_key(self.name, self.version)


class ApplicationState:
    """One version of an application while it runs. Fields that an application of one stage does not need are None, so
    that its requests do not pay for them."""

    def __init__(self, parts: ApplicationParts, replicas: dict[ReplicaId, Replica], now_ns: int = 0) -> None:
        graph, policies = parts.graph, parts.policies
        bucket_ns = bucket_ns_of(policies)
        by_stage: dict[str, dict[BeliefKey, Belief]] = {name: {} for name in graph.stages}
        for (name, variant, hardware), belief in parts.beliefs.items():
            by_stage[name][variant, hardware] = belief
        stages = [
            StageState(name, stage.after, by_stage[name], policies.order, Monitor(bucket_ns, now_ns))
            for name, stage in graph.stages.items()
        ]
        for stage in stages:
            stage.application = self
            stage.runs_for_parts = bool(graph.scopes[stage.name])
            stage.response_timeout_ns = parts.response_timeouts_ns.get(stage.name, 0)
            stage.size_classes = parts.size_classes.get(stage.name, GRID)
            stage.is_padded = stage.name in parts.padded
            # Outputs of the whole request decide, and no piece has them.
            is_whole = stage.name in graph.deciding or stage.runs_for_parts
            stage.is_divided = stage.name in parts.divided and not is_whole
        is_graph = len(stages) > 1
        self.parts = parts
        self.policies = policies
        """Those in force."""
        self.oversight = oversight_of(now_ns, parts.overseer, parts.choices)
        self.key = parts.key
        self.graph = graph
        self.stages = {stage.name: stage for stage in stages}
        self.all_stages = tuple(stages)
        self.entries = tuple(self.stages[name] for name in graph.entries)
        self.replicas = replicas
        """Of all applications."""
        self.open_requests: dict[RequestId, RequestProgress] | None = {} if is_graph else None
        """Requests on their way through several stages. None for one stage, where a request makes only one visit."""
        self.ingress = Monitor(bucket_ns, now_ns) if is_graph else stages[0].monitor
        """Arrivals at the application. With several stages, all open requests count as waiting."""
        self.visit_rates = VisitRates(graph) if is_graph and not (graph.is_plain and not graph.declared_paths) else None
        """None if every request visits every stage once."""
        self.edge_history = EdgeHistory(graph) if is_graph and not (graph.is_plain or graph.declared_paths) else None
        """None if every request visits every stage once, or only along declared paths."""
        self.refuses = ""
        """Why new requests are rejected; empty if they are admitted. Set by `refuse`."""
        self.is_waking = parts.wake_ns > 0
        """Whether requests that arrive may wait for `wake_ns`: its first replicas, or those after a rest, are not ready
        yet. Set by `set_waking`."""
        self.shed = 0.0
        """The fraction of requests that the plan in force refuses (`Plan.shed`). Set by `shed_requests`."""
        self.to_shed = 0.0
        """How many of the requests so far should have been refused, and were not; below 1."""
        self.is_special = self.is_waking
        """Whether arrivals are refused, all or some, or may wait for a start. The data path reads only this
        at each arrival, so that an ordinary one costs no more."""
        self.has_been_awake = not self.is_waking
        """Whether its first replicas have been ready, perhaps before a rest."""
        self.woken: dict[RequestId, int] = {}
        """Open requests that arrived while it was waking, and until when (ns) each may wait for a start."""
        self.expected_ns = 0
        """The latest instant (ns) at which a client of such a request was told to come back."""
        for stage in stages:
            stage.choose_finish()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        if self.open_requests:
            return False
        return all(not stage.queue.visits and not stage.monitor.running for stage in self.all_stages)

    def refuse(self, why: str) -> None:
        """Reject new requests from now on; admit them if `why` is empty."""
        self.refuses = why
        self._note_special()

    def set_waking(self, is_waking: bool) -> None:
        """From now on, requests that arrive may wait for a start, or not."""
        self.is_waking = is_waking
        self._note_special()

    def shed_requests(self, fraction: float) -> None:
        """Refuse this fraction of the requests, 0 to 1, from now on."""
        self.shed = fraction
        self._note_special()

    def sheds_next(self) -> bool:
        """Whether the request that arrives now is one of those that are refused, which are spread evenly."""
        self.to_shed += self.shed
        if self.to_shed < 1 - ROUNDING:
            return False
        self.to_shed -= 1
        return True

    def _note_special(self) -> None:
        self.is_special = bool(self.refuses or self.shed) or self.is_waking

    def follow(self, now_ns: int, parts: ApplicationParts) -> bool:
        """Another system decides from now on; `parts` differ in nothing else. See `decide_by`."""
        for key, belief in self.parts.beliefs.items():
            belief.measured_as(parts.beliefs[key])
        self.parts = replace(parts, graph=self.graph, beliefs=self.parts.beliefs, starts=self.parts.starts)
        self.oversight = oversight_of(now_ns, parts.overseer, parts.choices)
        return self.decide_by(now_ns, parts.policies)

    def decide_by(self, now_ns: int, policies: Policies) -> bool:
        """These policies decide from now on. Returns whether the history of arrivals stays. It is lost if their
        planning period needs buckets of another length."""
        self.policies = policies
        for stage in self.all_stages:
            stage.queue.reorder(now_ns, policies.order)
            stage.drain_times.forget()
        bucket_ns = bucket_ns_of(policies)
        if bucket_ns == self.ingress.bucket_ns:
            return True
        for monitor in (self.ingress, *(stage.monitor for stage in self.all_stages)):  # one may be there twice
            monitor.restart(now_ns, bucket_ns)
        return False

    def wait_for_start(self, request: Request) -> Request:
        """A request arrives: while `is_waking`, returns it with the deadline until which it may wait, else as it is. It
        is served late if its own deadline has passed."""
        if not self.is_waking:
            return request
        until_ns = max(request.deadline_ns, request.arrived_ns + self.parts.wake_ns)
        self.woken[request.id] = until_ns
        for stage in self.all_stages:
            stage.finishes_each = True
        return structs.replace(request, deadline_ns=until_ns)

    def forget_woken(self, request: RequestId) -> None:
        """A request has ended; the last one of those that waited for a start makes the others cheap again."""
        if self.woken.pop(request, None) is not None and not self.woken:
            for stage in self.all_stages:
                stage.choose_finish()

    def longest_gap(self, now_ns: int) -> ServiceGap:
        """Why not all of its stages serve, of the stage that is expected to take longest."""
        gaps = [gap for stage in self.all_stages if (gap := stage.service_gap(now_ns)) is not None]
        return max(gaps, key=lambda gap: gap.wait_ns, default=ServiceGap("it starts", is_known=False, wait_ns=NS_PER_S))

    def visits(self) -> Mapping[str, float]:
        """Estimated mean number of visits of a request to each stage."""
        return self.visit_rates.visits() if self.visit_rates is not None else dict.fromkeys(self.stages, 1.0)

    def stage_views(self) -> tuple[StageView, ...]:
        """The stages as scaling policies see them."""
        visits, slo_ns = self.visits(), self.graph.slo_ns
        return tuple([stage.view(slo_ns, visits[stage.name]) for stage in self.all_stages])

    def roll(self, now_ns: int) -> None:
        """Close the monitoring buckets that have ended, and recompute the estimates."""
        for stage in self.all_stages:
            stage.monitor.roll(now_ns)
            stage.refresh()
        if self.open_requests is not None:
            self.ingress.roll(now_ns)
            self.update_remaining_times()
        if self.visit_rates is not None:
            self.visit_rates.age(now_ns)

    def update_remaining_times(self) -> None:
        """Recompute each stage's lower bound of the time to the answer."""
        least_ns = {name: stage.pool.least_ns() for name, stage in self.stages.items()}
        for name, remaining_ns in remaining_times(self.graph, least_ns, self.edge_history).items():
            queue = self.stages[name].queue
            queue.remaining_ns, queue.remaining_full_ns = remaining_ns

    def expect_remaining(self, now_ns: int, stage: StageState) -> None:
        """Replace a stage's lower bound of the time to the answer by the expected time of its first visit
        (`Drop.proactive`)."""
        if not stage.queue.visits:
            return
        first = stage.queue.visits[0]
        visit = Visit(first.request, stage.name, now_ns, first.deadline_ns)
        loads = {name: each.backlog(visit) for name, each in self.stages.items()}
        found = expected_times(self.graph, stage.name, loads, self.edge_history)
        stage.queue.remaining_ns, stage.queue.remaining_full_ns = found

    def refresh(self, stage: StageState) -> None:
        """Recompute the estimates after a change of the stage's replicas."""
        stage.refresh()
        if self.open_requests is not None:
            self.update_remaining_times()


def bucket_ns_of(policies: Policies) -> int:
    """The length of the buckets in which arrivals are counted for a system."""
    return min(policies.scale.period_ns, BUCKET_NS_MAX)


def why_not_in_place(before: Policies, after: Policies) -> str:
    """Why replicas that were started under one system are of no use to another; empty if they are of use."""
    of_weights = [
        (each.provision.brings_weights, each.provision.keeps, each.provision.partition) for each in (before, after)
    ]
    if of_weights[0] != of_weights[1]:
        return "its `provision` policy brings weights to nodes in another way than that of the system that decides now"
    if after.scale.attaches_shadows and not before.scale.attaches_shadows:
        return "it attaches shadows, and the models that serve are not cut into blocks"
    return ""
