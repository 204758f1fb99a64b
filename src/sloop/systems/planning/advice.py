"""What to rent: the kinds of hardware on offer, fleets of them, what systems plan for these, and the report of `sloop
advise`.

A *fleet* is a number of nodes of some kinds, and a *choice* a system on a fleet. Plans say how many nodes a system
needs at a rate, and the most that a fleet can serve; the simulator (`sloop.sim.advice`) says what becomes of deadlines.
Several applications whose requests all take the same path are planned *together*, as one application that has their
stages: policies that place models on shared devices see the stages of one application only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from msgspec import Struct, structs

from sloop.app.application import Application, Deployment, Stage, SystemChoice, Variant
from sloop.app.graph import declared_name
from sloop.app.hardware import KINDS, HardwareKind
from sloop.errors import InputError
from sloop.options import nearest
from sloop.systems import build_system
from sloop.systems.mix import ONE_ROW_EACH, WorkMix
from sloop.systems.planning.prediction import ClusterPrediction
from sloop.systems.planning.report import PlacementReport, PlanReport
from sloop.systems.planning.timing import PlanPrediction
from sloop.systems.setup import mixes_of, set_up
from sloop.text import listed, number
from sloop.vocabulary import Node, Path

SIZES: Final = (4, 16, 64)
"""How many nodes of each kind a plan may rent: more only if fewer do not suffice."""
SYSTEM: Final = "mixed"
"""The system to choose from, beside that of the applications."""
SYSTEM_SHARING: Final = "harbor"
"""Another one if profiles say what models take of a device, so that several replicas may share one."""
OPTIMISM: Final = 1.5
"""A fleet may serve so many times what its plan says: profiles have the P99 of batches, and queues take their means."""

# The report


class FleetKind(Struct, frozen=True):
    """The nodes of one kind in a fleet."""

    hardware: str
    nodes: int
    usd_per_h: float
    """Of all of them; what was paid on average if nodes are rented as they are needed."""


class ModelService(Struct, frozen=True):
    """What became of the requests of one application."""

    application: str
    slo_ms: float
    requests: int
    served: int
    """In time."""
    attainment: float
    p99_ms: float | None
    """Of answered requests."""


class AdvisedChoice(Struct, frozen=True, kw_only=True):
    """A system on a fleet, simulated."""

    name: str
    system: str
    nodes: tuple[FleetKind, ...]
    as_needed: bool
    """Nodes are rented when they are needed; `nodes` has the most of each kind."""
    usd_per_h: float
    usd_per_million: float | None
    """The price of a million requests that are served in time; None if there is none."""
    attainment: float
    """Of all requests."""
    attainment_least: float
    """Of the application that is served worst; what the advice goes by."""
    applications: tuple[ModelService, ...]
    watts: float | None
    """What all nodes draw on average; None if the power of a kind is unknown."""
    on_frontier: bool
    """Whether no other choice is as cheap and serves as well."""
    why: str
    """The reason that the system gives for its plan."""


class FleetNeed(Struct, frozen=True):
    """What a system plans for the mean rates, on one kind of hardware or on all."""

    system: str
    nodes: tuple[FleetKind, ...]
    usd_per_h: float
    feasible: bool
    """Whether the plan keeps up, meets the deadlines for evenly spaced requests, and has room on at most 64 nodes of
    each kind."""


class StepDown(Struct, frozen=True):
    """From one choice of the frontier to the next cheaper one."""

    choice: str
    instead_of: str
    saves_usd_per_h: float
    late_per_million: float
    """How many more of a million requests are not served in time."""
    attainment_least: float
    worst: str
    """The application that is then served worst."""


class LeftOut(Struct, frozen=True):
    """A kind of hardware, or a system, that the advice does not consider."""

    name: str
    why: str


class AdviceReport(Struct, frozen=True, kw_only=True):
    """The answer of `sloop advise`. Its fields are the keys of the JSON."""

    wanted: float
    """The part of the requests of every application that should be served in time."""
    recommended: AdvisedChoice | None
    """The cheapest choice that serves as much; None if none does."""
    closest: AdvisedChoice
    """The cheapest of those that serve most: what comes closest where nothing is recommended."""
    frontier: tuple[AdvisedChoice, ...]
    """The cheapest first."""
    steps: tuple[StepDown, ...]
    """From the recommended choice, or the closest, down the frontier."""
    choices: tuple[AdvisedChoice, ...]
    """All that were simulated, in the order of price."""
    needs: tuple[FleetNeed, ...]
    """What systems plan for the mean rates, the cheapest feasible first: where the search began."""
    placements: tuple[PlacementReport, ...]
    """Who runs where, and beside whom, in the plan of the recommended or closest choice."""
    plan: PlanReport
    """That plan, as `sloop plan` reports it."""
    kinds: tuple[FleetKind, ...]
    """The kinds on offer with the price of one node."""
    left_out: tuple[LeftOut, ...]
    requests: int
    rate_rps: float
    rate_max_rps: float
    """The highest mean rate of ten seconds."""
    duration_s: float
    seed: int
    simulated: int
    pruned: int
    """Choices that were not simulated because their plans show that they cannot be better than cheaper ones."""
    unfinished: int
    """Choices that were not simulated because the time was used up."""
    notes: tuple[str, ...]
    assumed: tuple[str, ...]


# Kinds on offer


def offered_kinds(
    deployment: Deployment, named: Sequence[str], user_kinds: Mapping[str, HardwareKind], prices: Mapping[str, float]
) -> tuple[tuple[Node, ...], tuple[LeftOut, ...]]:
    """One node of each kind of hardware that is on offer, and the kinds that are not.

    On offer are the `named` kinds, or else those of the cluster, those that profiles name, those with an accelerator
    that a profile is for, and the `user_kinds`. `prices` replace those of kinds, in US dollars per hour. InputError for
    an unknown kind, a price of a kind that is not on offer, a stage that can run on none, a named kind without a price,
    or if no kind has one.
    """
    declared = {node.hardware: node for node in reversed(deployment.cluster)}
    table = {**KINDS, **user_kinds}
    for option, kinds in (("--hardware", named), ("--price", prices)):
        for kind in kinds:
            if kind not in declared and kind not in table:
                help = nearest(kind, (*declared, *table)) or "declare it in a file of kinds"
                raise InputError(f"no kind of hardware is called {kind!r}", where=option, help=help)
    offered: list[Node] = []
    left_out: list[LeftOut] = []
    considered = list(dict.fromkeys(named)) or _kinds_of(deployment, user_kinds)
    for kind in prices:
        if kind not in considered:
            what = f"{kind!r} has a price and is not among the kinds to choose from"
            help = f"offer it with --hardware {','.join([*considered, kind])}, or leave out its price"
            raise InputError(what, where="--price", help=help)
    for kind in considered:
        node = declared[kind] if kind in declared else table[kind].node(kind)
        node = structs.replace(node, usd_per_h=prices.get(kind, node.usd_per_h), on_demand=False)
        if not any(_profiles(stage, node) for stage in _stages(deployment)):
            left_out.append(LeftOut(kind, "no model has a profile for it"))
        elif not node.usd_per_h and named:
            _no_price([kind])
        elif not node.usd_per_h:
            left_out.append(LeftOut(kind, f"it has no price; --price {kind}=USD_PER_H sets one"))
        else:
            offered.append(node)
    without = [kind.name for kind in left_out if kind.why.startswith("it has no price")]
    if not offered and without:
        _no_price(without)
    _check_profiles(deployment, offered, considered)
    return tuple(offered), tuple(left_out)


def _no_price(kinds: Sequence[str]) -> None:
    what = f"{listed(kinds)} {'has' if len(kinds) == 1 else 'have'} no price, so it cannot be compared with others"
    help = f"give it one with --price {kinds[0]}=USD_PER_H or `usd_per_h`, or offer others with --hardware"
    raise InputError(what, help=help)


def _kinds_of(deployment: Deployment, user_kinds: Mapping[str, HardwareKind]) -> list[str]:
    """The kinds of the cluster, those that profiles name, and those that have an accelerator that a profile is for."""
    kinds = dict.fromkeys(node.hardware for node in deployment.cluster)
    for stage in _stages(deployment):
        for variant in stage.variants:
            kinds |= dict.fromkeys(kind for kind in variant.profiles if kind in KINDS or kind in user_kinds)
            wanted = variant.profile.accelerator if variant.profile is not None else ""
            if wanted:
                having = (kind for kind in KINDS.values() if wanted in (device.kind for device in kind.devices))
                kinds |= dict.fromkeys(kind.name for kind in having)
    return list(kinds | dict.fromkeys(user_kinds))


def _stages(deployment: Deployment) -> Iterable[Stage]:
    return (stage for application in deployment.applications for stage in application.stages)


def _profiles(stage: Stage, node: Node) -> list[float]:
    """By variant that can run on this node, the time of a single request there, in ms."""
    times_ms = (single_ms(variant, node) for variant in stage.variants)
    return [time_ms for time_ms in times_ms if time_ms is not None]


def single_ms(variant: Variant, node: Node) -> float | None:
    """How long one request takes on a node of this kind, with all cores that help; None if it cannot run there."""
    profile = variant.on(node.hardware)
    if profile is None or profile.accelerator not in ("", *(device.kind for device in node.devices)):
        return None
    return profile.latency_ms.latency_ms(1, min(profile.max_cores, node.cores))


def _check_profiles(deployment: Deployment, kinds: Sequence[Node], considered: Sequence[str]) -> None:
    """InputError for a stage that can run on none of the kinds."""
    for application in deployment.applications:
        for stage in application.stages:
            if any(_profiles(stage, node) for node in kinds):
                continue
            name, has = declared_name(stage.name), [kind for variant in stage.variants for kind in variant.profiles]
            what = f"{application.name}: {name} has no profile for any kind on offer ({listed(considered)})"
            help = f"it has profiles for {listed(has)}: offer these with --hardware" if has else ""
            model = next((variant.model for variant in stage.variants if variant.model), None) or "MODEL"
            raise InputError(what, help=help or f"measure it on such a node with `sloop profile {model}`")


def check_deadlines(deployment: Deployment, kinds: Sequence[Node]) -> None:
    """InputError for a deadline within which no kind answers even a single request; it names the kind that comes
    closest, and by how much. Stages of a path may be on different kinds."""
    for application in deployment.applications:
        by_name = application.by_name
        for path in application.paths:
            times_ms = {
                node.hardware: math.fsum(min(_profiles(by_name[name], node), default=math.inf) for name in path.stages)
                for node in kinds
            }
            each_ms = [
                min(min(_profiles(by_name[name], node), default=math.inf) for node in kinds) for name in path.stages
            ]
            slo_ms, least_ms = path.slo_ns / 1e6, math.fsum(each_ms)
            if least_ms <= slo_ms:
                continue
            best = min(times_ms, key=lambda kind: times_ms[kind])
            closest = (
                f"{best} comes closest"
                if times_ms[best] <= least_ms
                else "the fastest kind for each stage comes closest"
            )
            of = f" on the path {' → '.join(map(declared_name, path.stages))}" if len(application.paths) > 1 else ""
            raise InputError(
                f"{application.name}: no kind on offer answers even a single request within {number(slo_ms)} ms{of}: "
                f"{closest} with {number(least_ms)} ms, {number(least_ms - slo_ms)} ms too long",
                help="relax the deadline, use a faster variant, or offer a faster kind with --hardware",
            )


# Applications that are planned together


def together(deployment: Deployment) -> Deployment | None:
    """The applications as one, with a path for each; None for a single one, and where requests of one can take
    different paths. A stage keeps its application's name: `bert`, or `bert.tokens` if there are several;
    a name that another application has gets a dot."""
    applications = deployment.applications
    if len(applications) < 2 or not all(map(_is_chain, applications)):
        return None
    stages: list[Stage] = []
    paths: list[Path] = []
    taken = {application.name for application in applications if len(application.stages) == 1}
    for application in applications:
        names = {stage.name: application.name for stage in application.stages}
        for stage in application.stages if len(application.stages) > 1 else ():
            name = f"{application.name}.{declared_name(stage.name)}"
            while name in taken:
                name += "."
            taken.add(name)
            names[stage.name] = name
        stages += [
            replace(stage, name=names[stage.name], after=tuple(names[name] for name in stage.after))
            for stage in application.stages
        ]
        (path,) = application.paths
        paths.append(Path(tuple(names[name] for name in path.stages), path.slo_ns, 1.0 / len(applications)))
    first = applications[0]
    whole = replace(
        first,
        name=deployment.name,
        slo_ms=max(path.slo_ns for path in paths) / 1e6,
        stages=tuple(stages),
        declared_paths=tuple(paths),
        version="1",
        labels={},
        rest_after_s=0.0,
        wake_s=0.0,
        weight=1.0,
    )
    return replace(deployment, applications=(whole,))


def _is_chain(application: Application) -> bool:
    stages = application.stages
    plain = not any(stage.when or stage.each or stage.entry or len(stage.after) > 1 for stage in stages)
    return plain and len(application.paths) == 1 and not application.declared_paths


# Fleets, and what systems plan for them


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many nodes of each kind on offer, in their order, and whether they are rented as they are needed."""

    counts: tuple[int, ...]
    as_needed: bool = False

    def with_one(self, kind: int, change: int) -> "Fleet":
        """One node more or fewer of a kind."""
        return Fleet(tuple(count + change * (at == kind) for at, count in enumerate(self.counts)), self.as_needed)


@dataclass(frozen=True, slots=True)
class FleetChoice:
    """A system, by its position among those of the question, on a fleet."""

    system: int
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What a system plans for a fleet at some rates."""

    prediction: ClusterPrediction
    counts: tuple[int, ...]
    """The nodes of each kind on which it has replicas."""
    feasible: bool
    served_max: float
    """The part of the requests of the application that is served worst that its replicas can serve at most, up to 1."""
    why: str
    """The reason that the system gives."""
    shortfall: str = ""
    """The first reason why it is not feasible."""


@dataclass(frozen=True)
class FleetQuestion:
    """Which fleet, under which system, carries these requests."""

    deployment: Deployment
    """With any cluster and any system."""
    kinds: tuple[Node, ...]
    """One node of each kind on offer."""
    systems: tuple[SystemChoice, ...]
    rates_rps: Mapping[str, float]
    """By application, the mean rate."""
    initial_rps: Mapping[str, float]
    """By application, the rate at the beginning."""
    mixes: Mapping[str, WorkMix] = field(default_factory=dict)
    """By application, what requests bring, if that is not one row of the only size."""

    @cached_property
    def joined(self) -> Deployment | None:
        """The applications as one, if they can be; its paths have the shares of their rates."""
        whole = together(self.deployment)
        if whole is None:
            return None
        rates = [self.rates_rps[application.name] for application in self.deployment.applications]
        application = whole.application
        paths = tuple(
            structs.replace(path, share=rate / math.fsum(rates))
            for path, rate in zip(application.declared_paths, rates, strict=True)
        )
        return replace(whole, applications=(replace(application, declared_paths=paths),))

    @property
    def planned(self) -> Deployment:
        """What is planned for: the joined application, or all side by side."""
        return self.joined or self.deployment

    def rates(self, times: float = 1.0) -> dict[str, float]:
        """The rate of each planned application, times a factor."""
        if self.joined is not None:
            return {self.joined.application.key: times * math.fsum(self.rates_rps.values())}
        applications = self.deployment.applications
        return {application.key: times * self.rates_rps[application.name] for application in applications}

    def price_usd_per_h(self, fleet: Fleet) -> float:
        """The price of all nodes of a fleet."""
        return math.fsum(count * node.usd_per_h for count, node in zip(fleet.counts, self.kinds, strict=True))

    def fleet_kinds(self, fleet: Fleet) -> tuple[FleetKind, ...]:
        """The kinds of a fleet with their prices."""
        return tuple(
            FleetKind(node.hardware, count, count * node.usd_per_h)
            for count, node in zip(fleet.counts, self.kinds, strict=True)
            if count
        )

    def name(self, candidate: FleetChoice) -> str:
        """`harbor on 2 p3.2xlarge`."""
        fleet = candidate.fleet
        nodes = " + ".join(
            f"{count} {node.hardware}" for count, node in zip(fleet.counts, self.kinds, strict=True) if count
        )
        up_to, rented = ("up to ", ", rented as needed") if fleet.as_needed else ("", "")
        return f"{self.systems[candidate.system].label} on {up_to}{nodes}{rented}"

    def deployed(self, candidate: FleetChoice) -> Deployment:
        """What is planned for, under the system on the nodes of the fleet."""
        choice, nodes = self.systems[candidate.system], self._nodes(candidate.fleet)
        made = self.planned.under(choice)
        applications = [
            replace(application, cluster=nodes, system=self._started(application)) for application in made.applications
        ]
        return replace(made, applications=tuple(applications), cluster=nodes)

    def _nodes(self, fleet: Fleet) -> tuple[Node, ...]:
        return tuple(
            structs.replace(node, name=f"{node.hardware}-{index}", on_demand=fleet.as_needed)
            for count, node in zip(fleet.counts, self.kinds, strict=True)
            for index in range(count)
        )

    def _started(self, application: Application) -> SystemChoice:
        """The system of an application, which expects its rate from the beginning if it can."""
        choice = application.system
        scale = build_system(choice.name, choice.declared).policies.scale
        if not hasattr(scale, "initial_rps") or "initial_rps" in choice.parameters:
            return choice
        initial = self.initial_rps
        rate_rps = math.fsum(initial.values()) if self.joined is not None else initial[application.name]
        return replace(choice, parameters={**choice.parameters, "initial_rps": rate_rps})

    def plan(self, candidate: FleetChoice, times: float = 1.0) -> FleetPlan:
        """What the system plans on the fleet for `times` the mean rates. InputError if it cannot plan for them."""
        made = set_up(self.deployed(candidate), must_fit=False).applications
        setups = [each.bringing(self._mixes(each.application)) for each in made]
        prediction = ClusterPrediction(setups, self.rates(times))
        used = [node.hardware for node in prediction.placement.nodes]
        applications = prediction.applications.values()
        reasons = [shortfall.why for application in applications for shortfall in application.plan_shortfalls]
        return FleetPlan(
            prediction,
            tuple(used.count(node.hardware) for node in self.kinds),
            not reasons,
            min(1.0, *(part for application in applications for part in _parts(application.timing))),
            "; ".join(application.plan.why for application in applications),
            reasons[0] if reasons else "",
        )

    def _mixes(self, planned: Application) -> dict[str, WorkMix]:
        """What requests bring to each stage of a planned application: of a joined one, to each those of its own."""
        applications = self.deployment.applications
        if self.joined is None:
            applications = tuple(each for each in applications if each.name == planned.name)
        own = [mixes_of(each, self.mixes.get(each.name, ONE_ROW_EACH)) for each in applications]
        mixes = [mix.get(stage.name) for each, mix in zip(applications, own, strict=True) for stage in each.stages]
        return {stage.name: mix for stage, mix in zip(planned.stages, mixes, strict=True) if mix is not None}

    def needed(self, system: int, kinds: Sequence[int], times: float) -> FleetPlan:
        """The nodes of these kinds that the system rents for `times` the mean rates: with at most 4 of each kind, or
        more if they do not suffice."""
        for size in SIZES:
            counts = tuple(size if at in kinds else 0 for at in range(len(self.kinds)))
            planned = self.plan(FleetChoice(system, Fleet(counts, as_needed=True)), times)
            if planned.feasible or all(has < size for has in planned.counts):
                break
        return planned


def _parts(prediction: PlanPrediction) -> list[float]:
    """By stage, the part of its requests that the plan's replicas can serve."""
    return [
        OPTIMISM * stage.rate_max_rps / stage.rate_rps for stage in prediction.stages.values() if stage.rate_rps > 0
    ]


def usual_systems(deployment: Deployment, kinds: Sequence[Node]) -> tuple[SystemChoice, ...]:
    """The systems to choose from if the user names none: that which the applications declare, and those that rent what
    is needed; also the one that shares devices, if a profile says what that costs."""
    stages = list(_stages(deployment))
    profiles = [variant.on(node.hardware) for stage in stages for variant in stage.variants for node in kinds]
    names = [SYSTEM]
    if any(profile is not None and profile.sharing is not None for profile in profiles):
        names.append(SYSTEM_SHARING)
    declared = [application.system for application in deployment.applications if application.system.path][:1]
    declared = [deployment.system] if deployment.system.path else declared
    return (*declared, *(SystemChoice(name) for name in names if name not in [choice.name for choice in declared]))
