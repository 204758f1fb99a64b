"""Advice: simulates systems on fleets, from those that their plans ask for to their cheaper and dearer neighbours, and
compares price with deadlines.

Every choice serves the same requests with the same random draws. The search begins with the fleets that each system
plans, on each kind of hardware alone and on all, for the mean and for the highest rate. Then it tries one node more
where deadlines are missed, and one node fewer where most are met, for as long as a choice can still be on the frontier.
The order is fixed, so that the same seed gives the same advice; only a limit of time can end the search early.

On fleets whose nodes are rented as they are needed, the price is what was paid over the run, from the order of a node
to its release.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush, merge
from itertools import accumulate, pairwise, repeat, zip_longest
from operator import itemgetter
from typing import Final

from msgspec import structs

from sloop.actions import End
from sloop.app.scenario import Truth
from sloop.errors import InputError
from sloop.runlog import Record
from sloop.runlog.summary import RunRow
from sloop.sim.run import simulate
from sloop.sim.scenarios import CHECK_FIRST, summary_of
from sloop.sim.truth.failure import NO_FAULTS, FaultRates
from sloop.sim.world import AS_DECLARED, Clients, World, with_known_future
from sloop.solvers.frontier import PricedWorth, cannot_be_better, cheapest, frontier
from sloop.systems.planning import explained
from sloop.systems.planning.advice import (
    AdviceReport,
    AdvisedChoice,
    Fleet,
    FleetChoice,
    FleetKind,
    FleetNeed,
    FleetPlan,
    FleetQuestion,
    LeftOut,
    ModelService,
    StepDown,
)
from sloop.systems.planning.prediction import ClusterPrediction
from sloop.text import listed
from sloop.units import NS_PER_S, quantile, to_ms
from sloop.vocabulary import Outcome, Request, RequestId
from sloop.workload import Link, Trace, Work
from sloop.workload.trace import trace_of

PEAK_S: Final = 10
"""The highest rate of a trace is the mean over so many seconds: shorter peaks are for queues, not for nodes."""
BURSTY: Final = 1.25
"""A highest rate above this many times the mean is worth fleets of its own, and nodes that come and go."""
CHANCE: Final = 3.0
"""Standard deviations of a Poisson number: what random arrivals alone may add to the highest rate."""
ENOUGH: Final = 0.9999
"""A fleet that serves this part of the requests of every application needs no further node, unless more is wanted."""
LEAST: Final = 0.5
"""Nothing is taken away from a fleet that serves less than this of an application."""
CHOICES_MAX: Final = 80
"""The most choices that are simulated."""
SPARE: Final = 1
"""Nodes of each kind that may be rented beyond those of the plan for the highest rate."""


@dataclass(frozen=True)
class Question:
    """What is to be advised on: the requests of every application, their deadlines, and the hardware on offer."""

    fleets: FleetQuestion
    traces: Mapping[str, Trace]
    """By application."""
    wanted: float
    """The part of the requests of every application that should be served in time."""
    seed: int = 0
    truth: Truth = AS_DECLARED
    faults: FaultRates = NO_FAULTS
    link: Link | None = None
    """Of the clients."""
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def duration_ns(self) -> int:
        """The longest trace."""
        return max(trace.duration_ns for trace in self.traces.values())

    @cached_property
    def clients(self) -> dict[str, Clients]:
        """The clients of each planned application. Those of a joined one send the requests of all, in order of time."""
        joined = self.fleets.joined
        if joined is None:
            return {name: Clients(trace, self.link) for name, trace in self.traces.items()}
        names = [application.name for application in self.fleets.deployment.applications]
        traces = [self.traces[name] for name in names]
        streams = [
            zip(trace.times_ns(), repeat(path), repeat(Work()) if trace.works is None else trace.works(), strict=False)
            for path, trace in enumerate(traces)
        ]
        requests = list(merge(*streams, key=itemgetter(0, 1)))
        times_ns, paths = [at_ns for at_ns, _, _ in requests], tuple(path for _, path, _ in requests)
        works = [work for _, _, work in requests] if any(trace.works is not None for trace in traces) else []
        whole = trace_of(
            times_ns,
            duration_ns=self.duration_ns,
            name=joined.name,
            provenance=traces[0].provenance,
            works=works.__iter__ if works else None,
        )
        return {joined.application.name: Clients(whole, self.link, paths=paths)}

    def world(self, candidate: FleetChoice) -> World:
        """The world of one choice; all have the same requests and seed."""
        return World(
            seed=self.seed,
            deployment=with_known_future(self.fleets.deployed(candidate), self.clients),
            clients=self.clients,
            duration_ns=self.duration_ns,
            truth=self.truth,
            faults=self.faults,
            origin="sloop advise",
        )

    @property
    def enough(self) -> float:
        """A choice that serves this part of the requests of every application needs no further node."""
        return max(ENOUGH, self.wanted)

    @cached_property
    def peak(self) -> float:
        """The highest rate of all applications together, as a multiple of their mean rate."""
        return max(1.0, peak_rps(self.traces.values()) / math.fsum(self.fleets.rates_rps.values()))

    @cached_property
    def is_bursty(self) -> bool:
        """Whether the highest rate is much higher than the mean, by more than chance."""
        expected = PEAK_S * math.fsum(self.fleets.rates_rps.values())
        return self.peak > BURSTY + CHANCE / math.sqrt(expected)


def mean_rps(trace: Trace) -> float:
    """Requests per second over the whole trace."""
    return sum(trace.counts_per_s()) * NS_PER_S / trace.duration_ns if trace.duration_ns else 0.0


def first_rps(trace: Trace) -> float:
    """Requests per second over the first `PEAK_S` seconds."""
    counts = trace.counts_per_s()[:PEAK_S]
    return sum(counts) / len(counts) if counts else 0.0


def peak_rps(traces: Iterable[Trace]) -> float:
    """The highest mean rate of `PEAK_S` seconds, of all traces together."""
    seconds = [sum(counts) for counts in zip_longest(*(trace.counts_per_s() for trace in traces), fillvalue=0)]
    length = max(1, min(PEAK_S, len(seconds)))
    sums = list(accumulate(seconds, initial=0))
    return max((end - begin for begin, end in zip(sums, sums[length:], strict=False)), default=0) / length


class ServiceCounts:
    """Counts by application how requests end, and how long answers take. A sink."""

    def __init__(self, names: Sequence[str], paths: Sequence[int]) -> None:
        self._names = names
        self._paths = paths
        self._open: dict[RequestId, tuple[str, int]] = {}
        self.requests = dict.fromkeys(names, 0)
        self.served = dict.fromkeys(names, 0)
        self.latencies_ns: dict[str, list[int]] = {name: [] for name in names}

    def append(self, now_ns: int, record: Record) -> None:
        """Count a request that arrives or ends."""
        if isinstance(record, Request):
            name = self._names[self._paths[record.id]] if self._paths else record.application or self._names[0]
            self._open[record.id] = name, record.sent_ns
            self.requests[name] += 1
        elif isinstance(record, End):
            name, sent_ns = self._open.pop(record.request)
            self.served[name] += record.outcome is Outcome.SERVED
            if record.outcome in (Outcome.SERVED, Outcome.LATE):
                self.latencies_ns[name].append(now_ns - sent_ns)


@dataclass(slots=True)
class SearchTotals:
    """How far a search has come."""

    pruned: int = 0
    unfinished: int = 0
    assumed: dict[FleetChoice, tuple[str, ...]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    needs: dict[FleetNeed, None] = field(default_factory=dict)


class AdviceSearch:
    """Simulates the choices that can be on the frontier. `is_over` says when time is up; `progress` is told how many
    choices are done, how many are known, and which one is next."""

    def __init__(
        self, question: Question, is_over: Callable[[], bool], progress: Callable[[int, int, str], None]
    ) -> None:
        self._question = question
        self._fleets = question.fleets
        self._is_over = is_over
        self._progress = progress
        self._known: set[FleetChoice] = set()
        self._waiting: list[tuple[float, int, tuple[int, ...], FleetChoice]] = []
        self.choices: dict[FleetChoice, AdvisedChoice] = {}
        self.plans: dict[FleetChoice, FleetPlan] = {}
        """Of the choices that were simulated."""
        self.totals = SearchTotals()

    def run(self) -> None:
        """Search. InputError if no system can plan for the applications on any kind of hardware."""
        for system in range(len(self._fleets.systems)):
            self._begin(system)
        while self._waiting:
            candidate = heappop(self._waiting)[-1]
            is_first = not self.choices
            if not is_first and (len(self.choices) >= CHOICES_MAX or self._is_over()):
                self.totals.unfinished += 1 + len(self._waiting)
                return
            self._progress(len(self.choices), len(self.choices) + len(self._waiting) + 1, self._fleets.name(candidate))
            self._try(candidate)
        if not self.choices:
            why = "; ".join(f"{system.name}: {system.why}" for system in self.totals.left_out)
            raise InputError(f"no system can serve these applications: {why}", help="name others with --system")

    # Where the search begins

    def _begin(self, system: int) -> None:
        """The fleets that the system plans on each kind alone and on all: for the mean rate and, if the highest is much
        higher, for that. Then also nodes that come and go: of the kind that is cheapest for the highest rate, and of
        all kinds."""
        fleets, label = self._fleets, self._fleets.systems[system].label
        count = len(fleets.kinds)
        sets = [(at,) for at in range(count)] + ([tuple(range(count))] if count > 1 else [])
        errors: list[str] = []
        peaks: dict[tuple[int, ...], tuple[int, ...]] = {}
        for done, kinds in enumerate(sets):
            if self._waiting and self._is_over():
                self.totals.unfinished += len(sets) - done
                break
            self._progress(system * len(sets) + done, len(sets) * len(fleets.systems), f"plans of {label}")
            try:
                needed = fleets.needed(system, kinds, 1.0)
                if not any(needed.counts):
                    errors.append("; ".join(filter(None, (needed.why, needed.shortfall))))
                    continue
                self._wait_for(FleetChoice(system, Fleet(needed.counts)))
                self._need(label, Fleet(needed.counts), feasible=needed.feasible)
                if self._question.is_bursty:
                    peaks[kinds] = fleets.needed(system, kinds, self._question.peak).counts
                    self._wait_for(FleetChoice(system, Fleet(peaks[kinds])))
            except InputError as error:
                errors.append(str(error.what))
        if len(errors) == len(sets):
            self.totals.left_out.append(LeftOut(label, errors[0]))
        for counts in _rentable(peaks, fleets):
            self._wait_for(FleetChoice(system, Fleet(counts, as_needed=True)))

    def _need(self, system: str, fleet: Fleet, *, feasible: bool) -> None:
        """Keep what the system plans for the mean rates."""
        price = self._fleets.price_usd_per_h(fleet)
        self.totals.needs[FleetNeed(system, self._fleets.fleet_kinds(fleet), price, feasible)] = None

    def _wait_for(self, candidate: FleetChoice) -> None:
        if candidate in self._known or not any(candidate.fleet.counts):
            return
        self._known.add(candidate)
        fleet = candidate.fleet
        price = 0.0 if fleet.as_needed else self._fleets.price_usd_per_h(fleet)
        heappush(self._waiting, (price, candidate.system, fleet.counts, candidate))

    # One choice

    def _try(self, candidate: FleetChoice) -> None:
        """Simulate a choice, unless it cannot be on the frontier, and let its neighbours wait: one node fewer unless it
        serves too little already, and one more if it serves better than all that is as cheap under its system."""
        before, fleet = self._points(candidate.system), candidate.fleet
        try:
            choice = self._unbeaten(candidate)
        except InputError as error:
            self.totals.left_out.append(LeftOut(self._fleets.name(candidate), str(error.what)))
            return
        if choice is None:
            self.totals.pruned += 1
        else:
            self.choices[candidate] = choice
        if fleet.as_needed:
            return
        used = [kind for kind, count in enumerate(fleet.counts) if count]
        least = LEAST if choice is None else choice.attainment_least
        if (
            choice is not None
            and least < self._question.enough
            and not cannot_be_better(before, choice.usd_per_h, least)
        ):
            for kind in used:
                self._wait_for(replace(candidate, fleet=fleet.with_one(kind, 1)))
        if least >= LEAST:
            for kind in used:
                self._wait_for(replace(candidate, fleet=fleet.with_one(kind, -1)))

    def _unbeaten(self, candidate: FleetChoice) -> AdvisedChoice | None:
        """The choice, simulated; None if its price, or the most that its plan can serve, shows that it is beaten."""
        fleet, points, enough = candidate.fleet, self._points(), self._question.enough
        price = 0.0 if fleet.as_needed else self._fleets.price_usd_per_h(fleet)
        if cannot_be_better(points, price, enough):
            return None
        planned = self._fleets.plan(candidate)
        if cannot_be_better(points, price, min(enough, planned.served_max)):
            return None
        self.plans[candidate] = planned
        return self.simulated(candidate, planned.why)

    def _points(self, system: int | None = None) -> list[PricedWorth]:
        """Price and worth of all choices so far, or of those under one system."""
        return [
            (choice.usd_per_h, choice.attainment_least)
            for candidate, choice in self.choices.items()
            if system in (None, candidate.system)
        ]

    def simulated(self, candidate: FleetChoice, why: str = "") -> AdvisedChoice:
        """What becomes of the requests under a choice, for which the system says `why`."""
        question, fleets = self._question, self._fleets
        world = question.world(candidate)
        summary = summary_of(world, world.setup())
        paths = question.clients[fleets.joined.application.name].paths if fleets.joined is not None else ()
        counts = ServiceCounts(list(question.traces), paths)
        simulate(world, [summary, counts], check_first=CHECK_FIRST)
        row = summary.row(system=fleets.systems[candidate.system].label, seed=question.seed)
        self.totals.assumed[candidate] = (*summary.assumed_starts(world.assumed_starts), *row.assumed)
        return _choice(question, candidate, row, counts, summary.duration_s / 3600, why)


def _rentable(peaks: Mapping[tuple[int, ...], tuple[int, ...]], fleets: FleetQuestion) -> Iterator[tuple[int, ...]]:
    """How many nodes of each kind may be rented as they are needed, given what plans use at the highest rate: of the
    cheapest kind alone, and of all kinds, of each as many as alone."""
    alone = {kinds[0]: counts for kinds, counts in peaks.items() if len(kinds) == 1 and any(counts)}
    if alone:
        kind = min(alone, key=lambda at: (fleets.price_usd_per_h(Fleet(alone[at])), at))
        yield tuple(count + SPARE if at == kind else 0 for at, count in enumerate(alone[kind]))
    for kinds, counts in peaks.items():
        if len(kinds) > 1:
            yield tuple(max(has, alone[at][at] if at in alone else 0) + SPARE for at, has in enumerate(counts))


def _choice(
    question: Question, candidate: FleetChoice, row: RunRow, counts: ServiceCounts, hours: float, why: str
) -> AdvisedChoice:
    """One simulated choice. A run lasts until its last request has ended."""
    fleets, fleet = question.fleets, candidate.fleet
    paid = {kind.hardware: kind.usd / hours for kind in row.nodes}
    kinds = fleets.fleet_kinds(fleet)
    if fleet.as_needed:
        kinds = tuple(structs.replace(kind, usd_per_h=paid.get(kind.hardware, 0.0)) for kind in kinds)
    rows = tuple(_service(question, name, counts) for name in question.traces)
    requests, served = sum(service.requests for service in rows), sum(service.served for service in rows)
    usd_per_h = math.fsum(kind.usd_per_h for kind in kinds)
    served_per_h = served / (question.duration_ns / NS_PER_S / 3600)
    energies = [kind.energy_wh for kind in row.nodes]
    return AdvisedChoice(
        name=fleets.name(candidate),
        system=fleets.systems[candidate.system].label,
        nodes=kinds,
        as_needed=fleet.as_needed,
        usd_per_h=usd_per_h,
        usd_per_million=1e6 * usd_per_h / served_per_h if served else None,
        attainment=served / requests if requests else 1.0,
        attainment_least=min((service.attainment for service in rows), default=1.0),
        applications=rows,
        watts=None if None in energies or not energies else math.fsum(filter(None, energies)) / hours,
        on_frontier=False,
        why=why,
    )


def _service(question: Question, name: str, counts: ServiceCounts) -> ModelService:
    application = question.fleets.deployment.by_name[name]
    requests, served, latencies_ns = counts.requests[name], counts.served[name], sorted(counts.latencies_ns[name])
    p99_ms = to_ms(quantile(latencies_ns, 0.99)) if latencies_ns else None
    return ModelService(name, application.slo_ms, requests, served, served / requests if requests else 1.0, p99_ms)


def advise(
    question: Question,
    *,
    is_over: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int, str], None] = lambda done, known, now: None,
) -> AdviceReport:
    """Which kinds of hardware to rent for the question's requests, how many, and under which system.

    Ends early when `is_over` says so, but simulates at least one choice. InputError if no system can plan for the
    applications on the hardware on offer.
    """
    search = AdviceSearch(question, is_over, progress)
    search.run()
    candidates = sorted(search.choices, key=lambda candidate: _order(search.choices[candidate]))
    simulated = [search.choices[candidate] for candidate in candidates]
    points = [(choice.usd_per_h, choice.attainment_least) for choice in simulated]
    on = frontier(points)
    choices = [structs.replace(choice, on_frontier=place in on) for place, choice in enumerate(simulated)]
    at, most = cheapest(points, question.wanted), on[-1]
    best = most if at is None else at
    plan = explained(_predicted(question, candidates[best], search.plans))
    fleets, totals = question.fleets, search.totals
    rate_rps = math.fsum(fleets.rates_rps.values())
    return AdviceReport(
        wanted=question.wanted,
        recommended=None if at is None else choices[at],
        closest=choices[best],
        frontier=tuple(choices[place] for place in on),
        steps=tuple(_steps([choices[place] for place in reversed(on) if place <= best])),
        choices=tuple(choices),
        needs=tuple(sorted(totals.needs, key=lambda need: (not need.feasible, need.usd_per_h))),
        placements=plan.placements,
        plan=plan,
        kinds=tuple(FleetKind(node.hardware, 1, node.usd_per_h) for node in fleets.kinds),
        left_out=(*question.left_out, *totals.left_out),
        requests=sum(service.requests for service in choices[best].applications),
        rate_rps=rate_rps,
        rate_max_rps=question.peak * rate_rps,
        duration_s=question.duration_ns / NS_PER_S,
        seed=question.seed,
        simulated=len(choices),
        pruned=totals.pruned,
        unfinished=totals.unfinished,
        notes=(*question.notes, *_notes(question)),
        assumed=totals.assumed[candidates[best]],
    )


def _order(choice: AdvisedChoice) -> tuple[float, float, bool, str]:
    """By price; of equal prices those first that serve most, and on nodes that are always there."""
    return choice.usd_per_h, -choice.attainment_least, choice.as_needed, choice.name


def _predicted(question: Question, candidate: FleetChoice, plans: Mapping[FleetChoice, FleetPlan]) -> ClusterPrediction:
    """What the plan of a choice gives: at the mean rate, on nodes that come and go at the highest."""
    planned = question.fleets.plan(candidate, question.peak) if candidate.fleet.as_needed else plans[candidate]
    return planned.prediction


def _steps(down: Sequence[AdvisedChoice]) -> list[StepDown]:
    """The steps from each choice to the next, which is cheaper."""
    steps = []
    for dearer, choice in pairwise(down):
        worst = min(choice.applications, key=lambda service: service.attainment)
        steps.append(
            StepDown(
                choice.name,
                dearer.name,
                dearer.usd_per_h - choice.usd_per_h,
                1e6 * (dearer.attainment - choice.attainment),
                choice.attainment_least,
                worst.application,
            )
        )
    return steps


def _notes(question: Question) -> list[str]:
    fleets = question.fleets
    if fleets.joined is not None:
        names = listed([application.name for application in fleets.deployment.applications])
        return [f"{names} are planned together, as one application of one path each, so that they may share devices"]
    if len(fleets.deployment.applications) > 1:
        what = "requests of an application may take different paths, so the applications are planned side by side"
        return [f"{what}: they share nodes, but no accelerators, and each plans as if it paid for its nodes alone"]
    return []
