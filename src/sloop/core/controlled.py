"""What the control path keeps of one application version: its plan, how far that is fulfilled, and what has no room."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from sloop.actions import Action, Decided
from sloop.core.application import ApplicationState
from sloop.core.views import Belief
from sloop.text import counted
from sloop.units import ms
from sloop.vocabulary import Plan, ReplicaId, ReplicaSpec, Slot, Worker

WAKE_NS_MIN = ms(100)
"""The shortest time between two plans that are made because a request waits at a stage without replicas."""


class PlanProgress(IntEnum):
    """How far the cluster is from the current plan, and when to compare them again. The largest value of all stages
    counts."""

    MET = 0
    """Everything in the plan exists or is ordered: compare when a replica is lost or the plan changes."""
    WAITING = 1
    """Replicas are kept until others are ready: compare also at each event of a replica."""
    TOO_SOON = 2
    """A lost replica may not be replaced yet: compare also at each tick."""
    NO_ROOM = 3
    """No node has room for a part of the plan: compare also at each tick, and at each event of any replica."""


BLOCKED: Final = (PlanProgress.TOO_SOON, PlanProgress.NO_ROOM)
"""An order was impossible."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A part of the plan that no node has room for: a new replica, or more cores or a shadow for an existing one."""

    variant: str
    slot: Slot
    replica: ReplicaId | None = None
    present_cores: float = 0.0
    node: str | None = None
    """The node of the replica that exists, or the one on which the plan wants the new one."""
    shadow: Worker | None = None
    weights_bytes: int = 0
    """The most memory that the weights of a new replica take beside its own."""
    scarce: str = field(default="", compare=False)
    """Of what the nodes have too little for a new replica, as text; empty if its weights are what has no room."""

    @property
    def kind(self) -> str:
        """The kind of decision (`Decided`) that tells of it."""
        return "shortage" if self.shadow is None else "shadow"

    @property
    def why(self) -> str:
        """The shortage as text, for the log."""
        slot = self.slot
        if self.replica is None:
            share = f"{slot.share:g} of a" if slot.share else "a shared"
            device = f" and {share} {slot.accelerator}" if slot.accelerator else ""
            weights = f" and {self.weights_bytes / 1e9:.3g} GB for its weights" if self.weights_bytes else ""
            wanted = f"a replica of {self.variant} with {counted(slot.cores, 'core')}{device}{weights}"
            where = f"{self.node}, where the plan wants it, has no" if self.node else "no node has"
            return f"{where} room for {wanted}{f': {self.scarce}' if self.scarce else ''}"
        if self.shadow is not None:
            cores = counted(self.shadow.cores, "core")
            return f"{self.node} has no room for a shadow of replica {self.replica} with {cores}"
        has = f"replica {self.replica} has {counted(self.present_cores, 'core')}, not {slot.cores:g}"
        return f"{has}: {self.node} has no more free"


@dataclass(slots=True, eq=False)
class ControlledApplication:
    """The control state of one application version."""

    state: ApplicationState
    next_plan_ns: int = 0
    plan: Plan | None = None
    progress: PlanProgress = PlanProgress.WAITING
    reported: dict[tuple[str, ReplicaId | None, bool], Shortage] = field(default_factory=dict)
    """The shortages that are in the log already: of new replicas of a stage, and of cores or a shadow for each of its
    replicas. Several may last at once, and be reported by turns."""
    woken_ns: int = -WAKE_NS_MIN
    share: float = 1.0
    """Fraction of the application's requests to plan for."""
    active_ns: int = 0
    """When it last had requests."""
    is_resting: bool = False
    """Whether it gave up its replicas because it had no requests."""
    plan_error: str = ""
    """Why the last attempt to plan for it gave no plan; empty if it did."""
    rested_from: Plan | None = None
    """The plan in force when it last gave them up, if requests may wait for a start."""
    is_inherited: bool = False
    """Whether the plan in force is of a system that decides no more: the one that does begins without a plan."""
    is_frozen: bool = False
    """Whether its plan stays as it is, because it gets no more requests."""
    compared_ns: int = -1
    """When its replicas were last compared with the plan."""
    planned_share: float = 1.0
    """The share that the plan in force was made for."""
    unplaced: list[tuple[ReplicaSpec, Belief]] = field(default_factory=list)
    """The replicas of the plan that could not be started, for lack of room or too soon after a loss."""
    noted_ns: int = 0
    """Its buckets that began before this have been looked at for requests."""
    keeps_until_ns: int = 0
    """Until when no replica that is ready is stopped or shrunk, because some were adopted, or another system has yet to
    see the traffic; 0: no such time."""

    def hand_over(self, now_ns: int, *, keeps_until_ns: int) -> None:
        """Another system decides from now on. Its first plan is made at once; until then the present one stays."""
        self.is_inherited, self.rested_from, self.plan_error = True, None, ""
        self.next_plan_ns = self.active_ns = now_ns
        self.keeps_until_ns = max(self.keeps_until_ns, keeps_until_ns)

    def waits_for_plan(self, now_ns: int) -> bool:
        """Whether it was woken, or handed over to another system, while plans were made, and is still to be planned."""
        return self.next_plan_ns <= (now_ns if self.is_inherited else self.woken_ns)

    def is_new(self, stage: str, shortage: Shortage) -> bool:
        """Whether this shortage is not in the log yet. From now on it counts as logged."""
        about = stage, shortage.replica, shortage.shadow is not None
        before, self.reported[about] = self.reported.get(about), shortage
        return before != shortage

    def shortage_of(self, stage: str) -> str:
        """Why there is no room for a new replica of a stage, as it is in the log; empty if there is."""
        shortage = self.reported.get((stage, None, False))
        return shortage.why if shortage is not None else ""

    def forget_shortages(self, stage: str, *, of_shadows: bool) -> None:
        """A stage has room for its replicas and their cores, and, with `of_shadows`, for shadows: a later shortage is
        new."""
        over = [about for about in self.reported if about[0] == stage and (of_shadows or not about[2])]
        for about in over:
            del self.reported[about]

    @property
    def is_stranded(self) -> bool:
        """Whether requests wait at a stage that gets no replicas: the plan has none, or there is no room for any."""
        if self.plan is None:
            return not self.state.is_idle
        for target in self.plan.stages:
            stage = self.state.stages[target.stage]
            if stage.queue.visits and not target.has_replicas:
                return True
            if stage.queue.visits and self.progress is PlanProgress.NO_ROOM and not stage.pool.replicas:
                return True
        return False

    @property
    def starts_from_rest(self) -> bool:
        """Whether requests may wait for its first replicas (`ApplicationParts.wake_ns`), and one of them starts or will
        be tried again. They are not given up for lack of requests: the next client would find nothing again."""
        if not self.state.is_waking:
            return False
        stages = self.state.all_stages
        return any(stage.start_backoff.charged or any(rate.starting for rate in stage.pool.rates) for stage in stages)

    @property
    def wakes_without_plan(self) -> bool:
        """Whether it has woken from a rest, and its policy has not planned since: one that answers to keep the plan
        means the last one of its own, not that of the rest."""
        is_empty = self.plan is not None and not self.plan.has_replicas
        return is_empty and self.rested_from is not None and not self.is_resting

    def look_whether_awake(self, now_ns: int, out: list[Action]) -> None:
        """If each stage that is to have replicas has a ready one, no further request waits longer than its deadline
        allows. Without a plan, each stage needs one."""
        state = self.state
        if not state.is_waking:
            return
        planned = {target.stage for target in self.plan.stages if target.has_replicas} if self.plan else state.stages
        if planned and all(any(rate.ready for rate in state.stages[name].pool.rates) for name in planned):
            state.set_waking(False)
            state.has_been_awake = True
            self.active_ns = max(self.active_ns, now_ns)
            out.append(Decided("awake", "its replicas are ready: no request waits for a start", application=state.key))

    @property
    def keeps_all(self) -> bool:
        """Whether its traffic is still being measured anew, so that it keeps what was adopted."""
        return self.keeps_until_ns > 0 and not self.is_resting and not self.is_frozen

    @property
    def weight(self) -> float:
        """Its weight when cores are divided. A canary counts with its share, so that it does not take half of the cores
        from the version that serves the other requests."""
        return self.state.parts.weight * self.share

    @property
    def is_settled(self) -> bool:
        """Whether the plan in force was made for the present share, and all its replicas exist."""
        return self.planned_share == self.share and self.progress is PlanProgress.MET

    @property
    def is_ready(self) -> bool:
        """Whether each stage for which the plan has replicas has a ready one, and no replica is still starting."""
        if self.plan is None or not (self.plan.feasible or self.plan.has_replicas):
            return False
        for target in self.plan.stages:
            rates = self.state.stages[target.stage].pool.rates
            if any(rate.starting for rate in rates):
                return False
            if target.has_replicas and not any(rate.ready for rate in rates):
                return False
        return True

    def note_activity(self, now_ns: int) -> None:
        """Remember when it last had requests."""
        state, monitor = self.state, self.state.ingress
        arrivals = len(monitor.now.slack_ns)
        for bucket in reversed(monitor.buckets):  # several may have ended since the last tick
            if bucket.start_ns < self.noted_ns:
                break
            arrivals += bucket.arrivals
        self.noted_ns = monitor.now.start_ns
        if arrivals or not state.is_idle or self.plan is None:
            self.active_ns = now_ns
            self.is_resting = False
        self.active_ns = max(self.active_ns, state.expected_ns)  # a client was told to come back then
