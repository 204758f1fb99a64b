"""The scaling policy `Bodies`: every ten seconds it adapts the number of bodies to the mean rate, and during bursts it
attaches shadows to them, or adds bodies.

A body is a replica of the whole model. A shadow holds only the blocks with much compute and few weights. It raises the
capacity of its body within the SLO, and loads in a small fraction of the time that another body takes.

Source: AsyFunc (submission to SoCC'23), Algorithms 1 and 2, with the corrections of our specification, sections 2.4 to
2.8; `bursts: cheapest` is ours. The arithmetic is in `sloop.solvers.bodies`. Where the publication leaves something
open, we chose:

- The policy is asked at every tick. Its plan lists all present replicas with the changes to them, and names the node of
  each body, so that a shadow is attached to the body that the policy chose.
- If no node has room for the chosen body, the largest body that fits and keeps the SLO is started. If none does, the
  plan is not feasible, and if there is no body at all, the largest that fits is started: late answers instead of none.
- A body that is lost, and has no replacement yet, stays in the plan between two adaptations, on any node with room: its
  own may be gone.
- A body that is still starting counts for the mean rate but not for a burst; a shadow that is still loading counts with
  the capacity that it was chosen for.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from sloop.core.protocols import Scale
from sloop.core.views import Belief, ClusterView, ReplicaView, StageView
from sloop.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range, check_range
from sloop.policies import targets
from sloop.profile.pairs import Floats
from sloop.solvers.bodies import (
    Objective,
    ShadowCandidate,
    capacity_rps,
    choose_body,
    choose_shadow,
    largest_batch,
    shadow_candidates,
)
from sloop.text import counted, listed
from sloop.units import NS_PER_MS, NS_PER_S, at_least, ms, round_down, s, to_ms, to_s
from sloop.vocabulary import ALONE, Group, Life, Plan, ReplicaId, ReplicaSpec, StagePlan, Worker, shadow_in

OVER_AT: Final = 0.9
"""Shadows are removed when the rate is below this fraction of that at which they are added: with `bursts: shadows` all
of them, if bodies alone carry the rate so at two ticks in a row; with `cheapest` each one without which it is so."""
OVER_TICKS: Final = 2
NEARLY: Final = 0.9
"""An offer keeps about as many requests from waiting as the best one if it keeps at least this fraction of them."""
SHADOW_CORES: Final = (1, 2, 4, 8, 16)
"""The core counts of shadows to choose from, with `bursts: cheapest`; in addition, all cores that a node has left."""
MEMORY_CORES_UNKNOWN: Final = 64.0
"""K of a model whose multiply-adds are not known: the least value that gives the published savings."""


@dataclass(slots=True)
class CountedBody:
    """A body with its shadow, as the policy counts it. `replica` is None for one that the plan adds."""

    cores: float
    node: str | None
    capacity_rps: float
    """With its shadow, if it has one."""
    alone_rps: float
    batch_max: int
    shadow: Worker | None = None
    replica: ReplicaView | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it can serve a burst."""
        return self.replica is not None and self.replica.life is Life.READY


@dataclass(frozen=True, slots=True)
class BodiesMemory:
    """State between decisions."""

    adapted_ns: int | None = None
    """When bodies were last adapted to a rate; None until the first rate is known, after the first second."""
    quiet: int = 0
    """For how many ticks in a row the rate has been below that of a burst."""
    burst_ns: int | None = None
    """When the rate began to exceed the capacity of the bodies alone; None while it does not."""
    booked_rps: tuple[tuple[ReplicaId, float], ...] = ()
    """The planned capacity of each pair whose shadow still loads."""
    planned_cores: tuple[float, ...] = ()
    """The cores of the bodies of the last plan."""


@dataclass(frozen=True, slots=True)
class Bodies(Scale):
    """Adapts the number of bodies to the mean rate every `adapt_ns`, and the number of shadows to the rate of the last
    second at every tick (`period_ns`).

    Serves one model. With `shadows=False` it adapts only bodies. Fails if a burst is over before a shadow has loaded,
    and if the bodies' nodes have no cores left for shadows.
    """

    resizes: ClassVar[bool] = False
    alpha: PositiveFloat = 0.8
    """Bodies are added above this utilisation."""
    beta: PositiveFloat = 0.6
    """Bodies are removed below this utilisation."""
    gamma: PositiveFloat = 0.7
    """Shadows are added when the rate of the last second exceeds this fraction of the capacity. 0.7 is the
    middle of the defaults of `beta` and `alpha`; AsyFunc has 1."""
    cores_max: Annotated[int, Range(least=1, most=1024)] = 16
    """The most cores of a body, and of a shadow."""
    batch_max: Annotated[int, Range(least=1, most=1024)] = 8
    memory_cores: NonNegativeFloat = 0.0
    """K (ρ·m in the publication): how many cores the memory of one copy of the weights is worth; 0: as many as the
    model has 10⁹ multiply-adds."""
    shadows: bool = True
    """Whether bodies get shadows at all."""
    bursts: Literal["shadows", "cheapest"] = "cheapest"
    """What is added during a burst. `cheapest`: shadows of several sizes or bodies, one after the other, each time the
    cheapest of those that are predicted to keep about as many requests from waiting as the best. Bodies are added only
    if the rate exceeds the whole capacity, whatever `gamma` is, and has done so for as long as a body takes to start.
    `shadows`: shadows with all cores that their nodes have left, as AsyFunc does."""
    objective: Objective = "demand"
    """Which of the shadows with equally many cores is best.
    `demand`: the one with the least memory that serves the demand.
    `literal`: the most efficient one, where a shadow counts with its own memory.
    `printed`: the same, but with the memory of the whole model, as printed in the publication's Algorithm 2."""
    selection: Literal["ranked", "prefix"] = "ranked"
    """Which blocks come first: those that compute most per byte, or those that come first in the model."""
    shadows_per_node: NonNegativeInt = 1
    """How many shadows may be on a node at a time."""
    counts_shadows: bool = False
    """Whether the capacity of shadows counts when bodies are planned for the mean rate, as in AsyFunc. Then there may
    be too few bodies to carry the rate alone, so that a burst never counts as over. False: only bodies count."""
    initial_rps: NonNegativeFloat = 0.0
    """The rate to plan for before any request has been seen."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which the model has a profile."""
    adapt_ns: PositiveInt = s(10)
    """How often the number of bodies is adapted."""
    period_ns: PositiveInt = ms(500)

    @property
    def attaches_shadows(self) -> bool:
        """Whether its plans may have shadows."""
        return self.shadows

    @property
    def asks_for_starts(self) -> bool:
        """Whether it compares shadows with bodies that start now."""
        return self.shadows and self.bursts == "cheapest"

    def __post_init__(self) -> None:
        check_range("beta", self.beta, most=self.alpha)

    def plan(self, now_ns: int, view: ClusterView, memory: BodiesMemory | None) -> tuple[Plan, BodiesMemory]:
        """InputError for a graph, or a variant that the stage does not have."""
        view = targets.on_one_kind(view, self.hardware)
        stage = targets.one_stage(view, "bodies")
        belief = targets.belief_of(stage, self.variant)
        model = ServedModel(self, stage, belief)
        past, present = memory or BodiesMemory(), {replica.id for replica in stage.replicas}
        booked_rps = {id: rps for id, rps in past.booked_rps if id in present}
        bodies = [model.body(replica, booked_rps) for replica in stage.replicas]
        whys: list[str] = []
        draft = Draft(model, bodies, {node.node.name: node.free_cores for node in view.nodes}, booked_rps, whys)
        rate_rps = view.demand_rps[stage.name] if stage.buckets else self.initial_rps
        adapted_ns, quiet, burst_ns = past.adapted_ns, past.quiet, past.burst_ns
        if adapted_ns is None or now_ns - adapted_ns >= self.adapt_ns:
            if rate_rps or adapted_ns is not None:
                adapted_ns = now_ns
            is_feasible, without_room = self._adapt(draft, rate_rps), list[float]()
        else:
            without_room = self._replace_lost(draft, past.planned_cores)
            is_feasible = not without_room
        if self.shadows and self.bursts == "cheapest":
            burst_ns = self._meet_cheaply(draft, now_ns, burst_ns, stage.rate_rps(NS_PER_S))
        elif self.shadows:
            quiet = self._meet_burst(draft, quiet, stage.rate_rps(NS_PER_S))
        planned_cores = (*(body.cores for body in bodies), *without_room)
        if not bodies:
            is_feasible = False
            whys.append("no node has a core left for a body")
        if not whys and view.plan is not None:
            whys.append("as it is")
        plan = Plan((model.stage_plan(bodies),), f"{stage.name}: {'; '.join(whys)}", feasible=is_feasible)
        return plan, BodiesMemory(adapted_ns, quiet, burst_ns, tuple(booked_rps.items()), planned_cores)

    def _adapt(self, draft: "Draft", rate_rps: float) -> bool:
        """Add or remove bodies (section 2.7). Returns whether there was room for all of them."""
        model, bodies, free, whys = draft.model, draft.bodies, draft.free, draft.whys
        total_rps = sum(self._lasting_rps(body) for body in bodies)
        before = len(bodies)
        why = f"{rate_rps:.4g} rps at a capacity of {total_rps:.4g} rps"
        choice = choose_body(model.latency_ms(), rate_rps, model.slo_ms, model.memory_cores)
        cores = choice.cores if choice is not None else self.cores_max
        is_feasible = choice is not None
        while not bodies or not at_least(self.alpha * total_rps, rate_rps):
            body = model.new_body(cores, free)
            if body is None and not bodies:
                body = model.new_body(round_down(max(free.values(), default=0.0)), free)
            if body is None or (bodies and body.capacity_rps <= 0):
                is_feasible = False
                break
            bodies.append(body)
            total_rps += body.capacity_rps
        if choice is None:
            whys.append(f"no body of up to {counted(self.cores_max, 'core')} keeps the SLO of {model.slo_ms:.4g} ms")
        if len(bodies) > before:
            whys.append(f"{why}: {counted(len(bodies) - before, 'more body', 'more bodies')}")
            return is_feasible
        removed = 0
        for body in sorted(bodies, key=model.worth):
            if rate_rps >= self.beta * total_rps:
                break
            left_rps = total_rps - self._lasting_rps(body)
            if len(bodies) > 1 and at_least(self.alpha * left_rps, rate_rps):
                bodies.remove(body)
                total_rps, removed = left_rps, removed + 1
        if removed:
            whys.append(f"{why}: {counted(removed, 'fewer body', 'fewer bodies')}")
        return is_feasible

    def _replace_lost(self, draft: "Draft", planned_cores: Sequence[float]) -> list[float]:
        """Plan bodies that were planned before, and are not there; returns the cores of those for which no node has
        room."""
        missing = (Counter(planned_cores) - Counter(body.cores for body in draft.bodies)).elements()
        lost = sorted(missing, reverse=True)[: max(0, len(planned_cores) - len(draft.bodies))]
        without_room: list[float] = []
        for cores in lost:
            body = draft.model.new_body(floor(cores), draft.free)
            if body is None:
                without_room.append(cores)
            else:
                draft.bodies.append(body)
        if lost:
            draft.whys.append(f"{counted(len(lost), 'body is', 'bodies are')} missing")
        return without_room

    def _lasting_rps(self, body: CountedBody) -> float:
        """The capacity of a body that counts when bodies are planned."""
        return body.capacity_rps if self.counts_shadows else body.alone_rps

    def _meet_burst(self, draft: "Draft", quiet: int, burst_rps: float) -> int:
        """Attach shadows to bodies while the rate exceeds their capacity (section 2.8). Returns for how many ticks in a
        row the rate has been below that of a burst; until the last one it was `quiet`."""
        model, bodies, whys = draft.model, draft.bodies, draft.whys
        ready = [body for body in bodies if body.is_ready]
        total_rps = sum(body.capacity_rps for body in ready)
        alone_rps = sum(body.alone_rps for body in ready)
        is_over = burst_rps < OVER_AT * self.gamma * alone_rps
        quiet = quiet + 1 if is_over else 0
        if quiet >= OVER_TICKS and any(body.shadow is not None for body in bodies):
            for body in bodies:
                body.shadow, body.capacity_rps = None, body.alone_rps
            whys.append(f"the burst is over, at {burst_rps:.4g} rps")
            return quiet
        started = 0
        for body in sorted(ready, key=lambda each: (-each.cores, each.replica.id if each.replica else 0)):
            if at_least(self.gamma * total_rps, burst_rps):
                break
            cores = min(float(self.cores_max), float(round_down(self._shadow_room(draft, body))))
            chosen = model.shadow_for(body.cores, cores, burst_rps / self.gamma - total_rps) if cores >= 1 else None
            if chosen is None:
                continue
            total_rps += chosen.booked_rps - body.capacity_rps
            draft.attach(body, chosen)
            started += 1
        if started:
            whys.append(f"a burst of {burst_rps:.4g} rps: {counted(started, 'more shadow')}")
        return quiet

    def _shadow_room(self, draft: "Draft", body: CountedBody) -> float:
        """The cores that a shadow of this body could have."""
        there = sum(each.shadow is not None for each in draft.bodies if each.node == body.node)
        if body.shadow is not None or there >= self.shadows_per_node:
            return 0.0
        return draft.free.get(body.node or "", 0.0)

    def _meet_cheaply(self, draft: "Draft", now_ns: int, burst_ns: int | None, burst_rps: float) -> int | None:
        """Add shadows and bodies one after the other, each time the cheapest of those that keep about as many requests
        from waiting as the best. Shadows are added until the capacity times `gamma` is the rate. Bodies are added until
        all together can carry the rate when they have started; until then, shadows help.

        A body is added only when the burst has lasted as long as the body takes to start, because a shorter burst may
        be over before the body is ready. This is the usual rule of the ski-rental problem. Returns since when the
        rate exceeds the capacity of the bodies alone; until now it was `burst_ns`.
        """
        model, bodies, wanted_rps = draft.model, draft.bodies, burst_rps / self.gamma
        if at_least(sum(body.alone_rps for body in bodies if body.is_ready), burst_rps):
            burst_ns = None
        elif burst_ns is None:
            burst_ns = now_ns
        adds_bodies = burst_ns is not None and to_s(now_ns - burst_ns) >= model.startup_s
        shadows = added = ended = 0
        total_rps = sum(body.capacity_rps for body in bodies if body.is_ready)
        for body in sorted(bodies, key=lambda each: each.capacity_rps - each.alone_rps):
            gain_rps = body.capacity_rps - body.alone_rps
            if body.shadow is not None and at_least(OVER_AT * (total_rps - gain_rps), wanted_rps):
                body.shadow, body.capacity_rps = None, body.alone_rps
                total_rps, ended = total_rps - gain_rps, ended + 1
        while not at_least(now_rps := sum(body.capacity_rps for body in bodies if body.is_ready), wanted_rps):
            later_rps = sum(body.capacity_rps for body in bodies)
            need = BurstNeed(wanted_rps - now_rps, max(0.0, wanted_rps - later_rps), max(0.0, burst_rps - later_rps))
            offers = [*self._shadows_for(draft, need)]
            if adds_bodies and not at_least(later_rps, burst_rps):
                offers += self._body_for(draft, burst_rps, need)
            enough = NEARLY * max((offer.kept for offer in offers), default=0.0)
            best = min((offer for offer in offers if offer.kept >= enough), key=lambda each: each.cost, default=None)
            if best is None:
                break
            if best.shadow is not None:
                draft.attach(best.body, best.shadow)
                shadows += 1
            else:
                bodies.append(best.body)
                draft.free.update(best.free)
                added += 1
        started = [counted(ended, "shadow less", "shadows less")] * bool(ended)
        started += [counted(shadows, "more shadow")] * bool(shadows)
        started += [counted(added, "more body", "more bodies")] * bool(added)
        if started:
            draft.whys.append(f"a burst of {burst_rps:.4g} rps: {listed(started)}")
        return burst_ns

    def _shadows_for(self, draft: "Draft", need: "BurstNeed") -> Iterator["BurstOffer"]:
        """The shadows that would keep requests from waiting, one of each size for each ready body."""
        model = draft.model
        for body in draft.bodies:
            most = min(round_down(self._shadow_room(draft, body)), self.cores_max) if body.is_ready else 0
            for cores in sorted({*SHADOW_CORES, most}):
                chosen = model.shadow_for(body.cores, float(cores), need.now_rps) if 1 <= cores <= most else None
                kept = 0.0 if chosen is None else model.kept_by_shadow(chosen, body, need)
                if chosen is not None and kept > 0:
                    yield BurstOffer(kept, model.cost_of_shadow(chosen), body, chosen)

    def _body_for(self, draft: "Draft", burst_rps: float, need: "BurstNeed") -> Iterator["BurstOffer"]:
        """One more body, if it would keep requests from waiting."""
        model, room = draft.model, dict(draft.free)
        body = model.new_body(model.chosen_cores(burst_rps), room)
        kept = 0.0 if body is None else model.kept_by_body(body, need)
        if body is not None and kept > 0:
            yield BurstOffer(kept, body.cores + model.memory_cores, body, free=room)


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    model: "ServedModel"
    bodies: list[CountedBody]
    free: dict[str, float]
    """The free cores of each node."""
    booked_rps: dict[ReplicaId, float]
    whys: list[str]

    def attach(self, body: CountedBody, chosen: ShadowCandidate) -> None:
        """Attach a shadow to a body."""
        cores = chosen.shared.costs.shadow_cores
        body.shadow = Worker(cores, tuple(sorted(chosen.shared.blocks)))
        body.capacity_rps, self.free[body.node or ""] = chosen.booked_rps, self.free[body.node or ""] - cores
        assert body.replica is not None
        self.booked_rps[body.replica.id] = chosen.booked_rps


class BurstNeed(NamedTuple):
    """The capacity that is missing in a burst, in requests/s."""

    now_rps: float
    """Beyond that of the ready bodies with their shadows, so that the rate is `gamma` × the capacity."""
    later_rps: float
    """The same, when all starting bodies are ready."""
    overload_rps: float
    """The excess of the rate over the whole capacity, when all starting bodies are ready."""


class BurstOffer(NamedTuple):
    """What can be added during a burst: a shadow beside a present body, or one more body."""

    kept: float
    """The requests that it keeps from waiting until the bodies of the next adaptation are ready."""
    cost: float
    """Its cost in cores; memory is counted as cores."""
    body: CountedBody
    shadow: ShadowCandidate | None = None
    free: Mapping[str, float] = {}
    """For one more body, the cores of each node that are free when it has been placed."""


class ServedModel:
    """One model under the SLO, as the policy's formulas need it."""

    def __init__(self, policy: Bodies, stage: StageView, belief: Belief) -> None:
        self._policy, self._stage, self._belief = policy, stage, belief
        self.slo_ms = to_ms(stage.slo_ns)
        self.batch_max = min(policy.batch_max, belief.batch_max)
        self.memory_cores = policy.memory_cores or belief.multiply_adds / 1e9 or MEMORY_CORES_UNKNOWN
        self._candidates: dict[tuple[float, float], Sequence[ShadowCandidate]] = {}
        self.adapt_s = to_s(policy.adapt_ns)
        self.startup_s = to_s(stage.startup_ns(belief))
        """The start-up time of a body that starts now."""

    def kept_by_shadow(self, shadow: ShadowCandidate, body: CountedBody, need: BurstNeed) -> float:
        """How many requests a shadow keeps from waiting until the bodies of the next adaptation are ready; where
        starting bodies will suffice, until these are."""
        load_s = shadow.load_ms / 1e3
        gain_rps = min(need.now_rps, shadow.booked_rps - body.capacity_rps)
        lasting_rps = min(need.later_rps, gain_rps)
        brief = (gain_rps - lasting_rps) * max(0.0, self.startup_s - load_s)
        return brief + lasting_rps * max(0.0, self.startup_s + self.adapt_s - load_s)

    def cost_of_shadow(self, shadow: ShadowCandidate) -> float:
        """The cost of a shadow in cores; memory is counted as cores."""
        costs = shadow.shared.costs
        return costs.shadow_cores + self.memory_cores * shadow.shared.size_bytes / costs.size_whole_bytes

    def kept_by_body(self, body: CountedBody, need: BurstNeed) -> float:
        """How many requests one more body keeps from waiting until the bodies of the next adaptation are ready: it is
        ready sooner than these by the time until then."""
        return min(need.overload_rps, body.capacity_rps) * self.adapt_s

    def chosen_cores(self, rate_rps: float) -> int:
        """The cores of a new body (Algorithm 1)."""
        choice = choose_body(self.latency_ms(), rate_rps, self.slo_ms, self.memory_cores)
        return choice.cores if choice is not None else self._policy.cores_max

    def latency_ms(self) -> Floats:
        """Durations by whole cores and by batch, both from 0."""
        return targets.table_ms(self._belief, self._policy.cores_max, self.batch_max)

    def alone_ms(self, cores: float) -> Sequence[float]:
        """Durations of a body alone on these cores, by batch from 0."""
        return self._costs_ms(self._belief, cores)

    def _costs_ms(self, belief: Belief, cores: float) -> Sequence[float]:
        return [cost_ns / NS_PER_MS for cost_ns in belief.costs_ns(self._belief.slot(cores))[: self.batch_max + 1]]

    def body(self, replica: ReplicaView, booked_rps: Mapping[ReplicaId, float]) -> CountedBody:
        """A present replica, as the policy counts it."""
        cores, shadow = replica.spec.cores, replica.spec.shadow
        alone_ms = self.alone_ms(cores)
        alone_rps = capacity_rps(alone_ms, self.slo_ms)
        found = CountedBody(
            cores, replica.node or None, alone_rps, alone_rps, largest_batch(alone_ms, self.slo_ms), shadow, replica
        )
        if shadow is not None:
            pair_ms = self._costs_ms(self._belief.of(replica.spec.shape), cores)
            found.capacity_rps = max(alone_rps, capacity_rps(pair_ms, self.slo_ms))
            found.batch_max = max(found.batch_max, largest_batch(pair_ms, self.slo_ms))
            if shadow_in(replica.shape) is None:  # it loads
                found.capacity_rps = booked_rps.get(replica.id, found.capacity_rps)
        return found

    def new_body(self, cores: int, free: dict[str, float]) -> CountedBody | None:
        """One more body, on the node with the most free cores; with fewer cores if `cores` do not fit. None if no node
        has room."""
        node = max(free, key=lambda name: free[name], default=None)
        if node is None:
            return None
        room = min(cores, round_down(free[node]))
        for fitting in range(room, 0, -1):
            alone_ms = self.alone_ms(fitting)
            alone_rps = capacity_rps(alone_ms, self.slo_ms)
            if alone_rps > 0 or (fitting == room == cores):
                free[node] -= fitting
                batch_max = largest_batch(alone_ms, self.slo_ms)
                return CountedBody(float(fitting), None, alone_rps, alone_rps, batch_max)
        return None

    def worth(self, body: CountedBody) -> tuple[float, bool, int]:
        """The order in which bodies are removed: the least efficient first, then those without a shadow, then the
        youngest."""
        alone_ms = self.alone_ms(body.cores)
        most = capacity_rps(alone_ms, float("inf")) * (1 / body.cores + 1 / self.memory_cores)
        return round(most, 9), body.shadow is not None, -(body.replica.id if body.replica is not None else 1 << 60)

    def shadow_for(self, body_cores: float, shadow_cores: float, need_rps: float) -> ShadowCandidate | None:
        """The shadow to attach to a body; None if none is worth it."""
        key = body_cores, shadow_cores
        if key not in self._candidates:
            costs = self._belief.blocks(body_cores, shadow_cores)
            if costs is None:
                return None
            batches = slice(0, self.batch_max + 1)
            costs = replace(
                costs,
                body_ms=costs.body_ms[:, batches],
                shadow_ms=costs.shadow_ms[:, batches],
                slo_ms=self.slo_ms,
            )
            order = costs.ranked() if self._policy.selection == "ranked" else costs.prefix()
            self._candidates[key] = shadow_candidates(costs, order)
        return choose_shadow(self._candidates[key], self.memory_cores, self._policy.objective, need_rps)

    def stage_plan(self, bodies: Sequence[CountedBody]) -> StagePlan:
        """The plan with these bodies. Present bodies are named by their nodes."""
        counts: dict[ReplicaSpec, list[CountedBody]] = {}
        for body in sorted(bodies, key=lambda each: each.node is None):
            slot = self._belief.slot(body.cores)
            shape = ALONE if body.shadow is None else (body.shadow,)
            spec = ReplicaSpec(self._stage.name, self._belief.variant, slot, body.node, shape=shape)
            counts.setdefault(spec, []).append(body)
        groups = [
            Group(
                spec,
                len(equal),
                max(1, *(body.batch_max for body in equal)),
                sum(body.capacity_rps for body in equal),
            )
            for spec, equal in counts.items()
        ]
        return StagePlan(self._stage.name, tuple(groups), self.batch_max, in_place=False, wait_ns=self._stage.slo_ns)
