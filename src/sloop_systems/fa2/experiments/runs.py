"""FA2's evaluation, simulated: steady load, varying loads, and every planner on the same replicas.

Experiments: E1 steady load, E2 fluctuating and random load, E3 two long traces, E4 and E7 fixed resources on cores and
on GPU slices; 7.3 the statistical checks of the specification, whose own simulation gives the `derived` figures.

Service times are normal around d/`ratio` with 4 % variation. Results depend mostly on `ratio`, because it is FA2's only
safety margin (specification 3.4). Replicas start in 6 s. Plans take effect at once. As published, batches wait without
limit until they are full, and requests older than three times the application's deadline are dropped. At every load
simulated here, FA2's plan for cores is the optimum, so that the optimum is not simulated separately.

Source: Razavi et al., FA2 (RTAS 2022), evaluation.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

from msgspec import Struct

from sloop.api import NS_PER_S, Node, Path, ms, s
from sloop.api.experiments import (
    Application,
    ColdStartTruth,
    Estimates,
    Finished,
    Record,
    RunSummary,
    ServiceTruth,
    Stage,
    StartBatch,
    SystemChoice,
    Trace,
    Truth,
    Variant,
    World,
    poisson_ns,
    simulate,
    stream,
    trace_of,
)
from sloop_systems.comparison.harness import Results, RunResult, Trial, Wanted
from sloop_systems.comparison.rows import Claim, ResultLimits, Row, bounded, compare, directed, minus
from sloop_systems.fa2 import solver
from sloop_systems.fa2.experiments.application import (
    COLD_START_S,
    CPU,
    GPU,
    ORDER,
    PATHS,
    Hardware,
    problem,
    profile_of,
)
from sloop_systems.fa2.solver import Fa2Choice, Fa2Solution

LEAD_S: Final = 12
"""Seconds that a system runs before its results count: its first decision has no rate yet."""
TAIL_S: Final = 10
"""Seconds of further load after the part that counts, so that no counted request waits for a batch that never fills."""
PATIENCE_S: Final = 120
SYSTEMS: Final = ("fa2", "inferline", "ds2", "grandslam")
HARDWARE: Final[dict[str, Hardware]] = {"cpu": CPU, "gpu": GPU}


class Fa2Trial(Trial, frozen=True, kw_only=True):
    """One run. `plan` names the planner of the fixed batch sizes, and `pools` the planner of the fixed numbers of
    replicas; without `plan`, `system` decides every ten seconds."""

    hardware: str = "cpu"
    paths: int = 3
    plan: str = ""
    pools: str = ""
    system: str = ""
    load: str = "steady 27"
    seconds: int = 600
    ratio: float = 1.15
    lookback_s: int = 0
    """Plan for the busiest ten seconds within the last `lookback_s`; 0: for the last ten seconds, as published."""

    @property
    def lead_s(self) -> int:
        """Seconds before the part that counts."""
        return 0 if self.plan else LEAD_S

    def label(self) -> str:
        return f"{self.plan or self.system}, {self.load}/s, {self.paths} paths"

    def play(self) -> "Fa2Result":
        """Simulate it under the checkers."""
        first, half = self.lead_s, self.seconds // 2
        # Only the second half: in the first, the later stages are still idle.
        world = world_of(self)
        summary = RunSummary(world.application.graph, start_ns=0)
        busy = BusyTime(s(first + half), s(first + self.seconds))
        simulate(world, [summary, busy], patience_ns=s(PATIENCE_S))
        seconds = summary.seconds()[first : first + self.seconds]
        arrivals = sum(second.arrivals for second in seconds)
        late, dropped = (
            100 * sum(getattr(second, how) for second in seconds) / arrivals for how in ("late", "dropped")
        )
        return Fa2Result(
            violations=late + dropped,
            late=late,
            dropped=dropped,
            cores=sum(second.cores for second in seconds) / len(seconds),
            utilisation=100 * busy.busy_ns / NS_PER_S / sum(second.cores for second in seconds[half:]),
            violations_by_second=tuple(100 * second.violations for second in seconds),
            cores_by_second=tuple(second.cores for second in seconds),
            arrivals_by_second=tuple(second.arrivals for second in seconds),
        )


class Fa2Result(RunResult, frozen=True, kw_only=True):
    """Late and dropped requests and utilisation, in percent. A replica has one core, so `cores` is the replica
    count."""

    late: float
    dropped: float
    utilisation: float
    arrivals_by_second: tuple[int, ...]


class BusyTime:
    """A sink: the total time that replicas ran batches between two instants."""

    def __init__(self, from_ns: int, until_ns: int) -> None:
        self._from_ns, self._until_ns = from_ns, until_ns
        self._started: dict[int, int] = {}
        self.busy_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if type(record) is StartBatch:
            self._started[record.batch] = now_ns
        elif type(record) is Finished:
            started_ns = max(self._from_ns, self._started.pop(record.batch, now_ns))
            self.busy_ns += max(0, min(self._until_ns, now_ns) - started_ns)


def chosen(plan: str, hardware: Hardware, paths: int, rate_rps: float) -> tuple[Fa2Choice, ...]:
    """The choice of the planner `fa2`, `optimal`, `inferline`, `ds2` or `grandslam` at a known rate."""
    given = problem(hardware, paths, rate_rps)
    stages, indexed = given.stages, given.paths
    if plan in {"fa2", "optimal", "grandslam"}:
        answer = solver.solve(stages, indexed, mode="milp" if plan == "optimal" else "tree")
        assert isinstance(answer, Fa2Solution), rate_rps
        if plan == "grandslam":
            return solver.grandslam(stages, indexed, [choice.replicas for choice in answer.choices])
        return answer.choices
    if plan == "inferline":
        return solver.inferline(stages, indexed)
    assert plan == "ds2", plan
    return solver.ds2(stages)


def world_of(trial: Fa2Trial) -> World:
    """The trial as a world of the simulator."""
    hardware = HARDWARE[trial.hardware]
    chains, slos_ms = PATHS[: trial.paths], hardware.slos_ms[: trial.paths]
    rates = rates_of(trial.load, trial.seconds, trial.seed)
    application = Application(
        name="fa2",
        slo_ms=max(slos_ms),
        stages=_stages(hardware, chains),
        system=_choice(trial, hardware, rates[0]),
        cluster=tuple(Node(f"n{index}", "machine", 16, 64 * 2**30) for index in range(16)),
        estimates=Estimates(correct=False),
        declared_paths=tuple(Path(chain, ms(slo), 1 / trial.paths) for chain, slo in zip(chains, slos_ms, strict=True)),
    )
    truth = Truth(
        service=ServiceTruth(ratio=trial.ratio, cv=0.04),
        cold_start=ColdStartTruth(start_s=COLD_START_S, warm=True),
        plan_ms=0.0,
    )
    # The lead has load too, at the first rate.
    rates = [rates[0]] * trial.lead_s + rates + [rates[-1]] * TAIL_S
    return World.of(
        application,
        trace_at(rates, trial.seed, trial.load),
        seed=trial.seed,
        duration_ns=s(len(rates)),
        truth=truth,
    )


def _stages(hardware: Hardware, chains: Sequence[tuple[str, ...]]) -> tuple[Stage, ...]:
    edges = {pair for chain in chains for pair in pairwise(chain)}
    firsts = {chain[0] for chain in chains}
    names = [name for name in ORDER if any(name in chain for chain in chains)]
    stages = []
    for name in names:
        after = tuple(other for other in names if (other, name) in edges)
        variant = Variant(name.lower(), profile=profile_of(hardware, name))
        stages.append(Stage(name, (variant,), after, entry=bool(after) and name in firsts))
    return tuple(stages)


NEVER_S: Final = 1_000_000
"""A batch waits until it is full, as published, for longer than any run."""


def _choice(trial: Fa2Trial, hardware: Hardware, rate_rps: float) -> SystemChoice:
    """The trial's system, or one that keeps the plan for the load's first rate."""
    published: dict[str, Any] = {"batch": {"name": "timeout", "wait_s": NEVER_S}, "drop": {"name": "age", "limit": 3.0}}
    if not trial.plan:
        own: dict[str, Any] = {"headroom": 0.0, "initial_rps": rate_rps}
        if trial.lookback_s:
            own["forecast"] = {"name": "moving_max", "horizon_s": trial.lookback_s, "window_s": 10}
        return SystemChoice(trial.system, {**published, **own})
    choices = chosen(trial.plan, hardware, trial.paths, rate_rps)
    pools = chosen(trial.pools or trial.plan, hardware, trial.paths, rate_rps)
    names = problem(hardware, trial.paths, rate_rps).names
    stages = {
        name: {"replicas": pool.replicas, "batch_max": choice.batch}
        for name, choice, pool in zip(names, choices, pools, strict=True)
    }
    order = "edf" if trial.plan == "grandslam" else "fifo"
    return SystemChoice("static", {**published, "stages": stages, "order": order, "route": "round_robin"})


# Loads, in requests per second.


def rates_of(load: str, seconds: int, seed: int) -> list[float]:
    """The rate of each second of a load: `steady R`, `fluctuating`, `random`, `diurnal` or `square`."""
    kind, _, rate = load.partition(" ")
    return [float(rate)] * seconds if kind == "steady" else LOADS[kind](seconds, seed)


def fluctuating(seconds: int, seed: int) -> list[float]:
    """8 requests/s, 27 in the middle third, then 8 again."""
    third = seconds // 3
    return [27.0 if third <= at < 2 * third else 8.0 for at in range(seconds)]


def random(seconds: int, seed: int) -> list[float]:
    """A new rate from N(15, 5), at least 1, every ten seconds."""
    draw = stream(seed, "fa2/random")
    drawn = [max(1.0, draw.gauss(15, 5)) for _ in range(-(-seconds // 10))]
    return [drawn[at // 10] for at in range(seconds)]


def diurnal(seconds: int, seed: int) -> list[float]:
    """A sine from 8 to 20 with autocorrelated noise and spikes up to 27, per minute; replaces Azure's first trace."""
    draw = stream(seed, "fa2/diurnal")
    minutes, noise, spike_left = [], 0.0, 0
    for minute in range(-(-seconds // 60)):
        noise = 0.8 * noise + draw.gauss(0, 0.8)
        if spike_left:
            spike_left -= 1
        elif draw.random() < 4.5 / 60:
            spike_left = draw.randint(1, 3)
        base = 14 + 6 * math.sin(2 * math.pi * minute / 300) + noise
        minutes.append(min(27.0, max(1.0, 27.0 if spike_left else base)))
    return [minutes[at // 60] for at in range(seconds)]


def square(seconds: int, seed: int) -> list[float]:
    """Alternates between 8 and 20, for 5 to 30 minutes each; replaces Azure's second trace."""
    draw = stream(seed, "fa2/square")
    rates: list[float] = []
    level = 8.0
    while len(rates) < seconds:
        rates += [level] * draw.randint(300, 1800)
        level = 28.0 - level
    return rates[:seconds]


LOADS: Final[dict[str, Callable[[int, int], list[float]]]] = {
    "fluctuating": fluctuating,
    "random": random,
    "diurnal": diurnal,
    "square": square,
}


def trace_at(rates: Sequence[float], seed: int, name: str) -> Trace:
    """Poisson arrivals with the rate of each second."""
    draw = stream(seed, f"fa2/{name}")
    times = (
        at * NS_PER_S + offset for at, rate_rps in enumerate(rates) for offset in poisson_ns(draw, rate_rps, NS_PER_S)
    )
    return trace_of(times, duration_ns=s(len(rates)), name=name, provenance="assumed, as the specification describes")


# The evaluation.

STEADY: Final = tuple((paths, rate) for paths in (3, 6) for rate in (8, 27))
MET: Final = ((3, 12), (3, 18), (3, 24), (3, 50))
"""Paths and rates, in addition to `STEADY`, at which FA2 with headroom must have at most 1.4 % violations."""
MARGIN: Final = "the mean service time, d/1.15; with d/1.1 the specification finds up to 5.3 %"
"""FA2's only safety margin, which is not printed (specification 7.3, 8)."""
RATIOS: Final = (1.0, 1.1, 1.15, 1.25)
MOVING: Final = ("fluctuating", "random")
LONG: Final = ("diurnal", "square")
LOOKBACK_S: Final = 30
LONG_NOTE: Final = "a synthetic trace of the published shape, because the functions chosen from Azure's are not named"


class Fa2Evaluation(Struct, frozen=True):
    """The trials, with the lengths of their runs in seconds."""

    steady_s: int = 300
    fixed_s: int = 400
    moving_s: int = 600
    long_s: int = 2400
    moving_loads: tuple[str, ...] = MOVING
    seeds: int = 3

    def steady(self, plan: str, paths: int, rate: int) -> Fa2Trial:
        """Each planner with its own numbers of replicas."""
        return Fa2Trial(plan=plan, paths=paths, load=f"steady {rate}", seconds=self.steady_s)

    def headroom(self, ratio: float) -> Fa2Trial:
        """FA2 with this headroom in the profile."""
        return Fa2Trial(plan="fa2", load="steady 24", ratio=ratio, seconds=self.steady_s)

    def fixed(self, plan: str, rate: int = 50) -> Fa2Trial:
        """Each planner's batch sizes on the optimum's replicas."""
        return Fa2Trial(plan=plan, pools="optimal", load=f"steady {rate}", seconds=self.fixed_s)

    def slices(self, plan: str, rate: int = 10) -> Fa2Trial:
        """Six paths on GPU slices, on the optimum's replicas."""
        seconds = self.fixed_s if plan == "fa2" else self.steady_s
        load = f"steady {rate}"
        return Fa2Trial(hardware="gpu", paths=6, plan=plan, pools="optimal", load=load, seconds=seconds)

    def moving(self, system: str, load: str, lookback_s: int = 0) -> Fa2Trial:
        """A system that decides every ten seconds, under a varying load."""
        seconds = self.long_s if load in LONG else self.moving_s
        return Fa2Trial(system=system, load=load, seconds=seconds, lookback_s=lookback_s)

    def wanted(self) -> Wanted[Fa2Trial]:
        """All trials that `rows` reads. Long traces come first, so that no process is left alone with one at the
        end."""
        loads = LONG if self.long_s else ()
        long = [self.moving(system, load) for load in loads for system in SYSTEMS]
        trials = [self.steady(plan, paths, rate) for paths, rate in STEADY for plan in SYSTEMS]
        trials += [self.steady("fa2", paths, rate) for paths, rate in MET]
        trials += [self.headroom(ratio) for ratio in RATIOS if self.headroom(ratio) not in trials]
        trials += [self.slices("optimal", rate) for rate in (8, 10, 27)] + [self.slices("fa2")]
        trials += [self.fixed(plan) for plan in SYSTEMS] + [self.fixed("grandslam", rate) for rate in (27, 8)]
        trials += [self.moving(system, load) for load in self.moving_loads for system in SYSTEMS]
        trials += [self.moving("fa2", load, LOOKBACK_S) for load in self.moving_loads]
        return [*((trial, 1) for trial in long), *((trial, self.seeds) for trial in trials)]

    def rows(self, results: Results[Fa2Result]) -> list[Row]:
        """Every experiment's."""
        rows = [*self._e1(results), *self._checks(results), *self._e2(results), *self._recovery(results)]
        return [*rows, *(self._e3(results) if self.long_s else []), *self._e4_and_e7(results)]

    def _e1(self, results: Results[Fa2Result]) -> list[Row]:
        rows = []
        for paths, rate in STEADY:
            where = f"{paths} paths at {rate}/s"
            trials = {plan: self.steady(plan, paths, rate) for plan in SYSTEMS}
            busy = {plan: results.mean(trial, "utilisation") for plan, trial in trials.items()}
            for plan, trial in trials.items():
                note = f"{results.mean(trial, 'cores'):.0f} replicas, {busy[plan]:.0f} % busy"
                if plan == "grandslam" and rate == 8:
                    note += "; batches sized by a share of the deadline take too long to fill"
                found = results.violations(trial)
                metric = f"violations of {plan}, {where}"
                fitted = MARGIN if plan == "fa2" else ""
                claim = Claim("E1 steady", metric, "%", paper=1.0, note=note, fitted=fitted)
                rows.append(bounded(claim, found, at_most=1.0))
            for rival in ("inferline", "ds2"):
                more = minus(*(results.each(trials[plan], "utilisation") for plan in ("fa2", rival)))
                claim = Claim("E1 steady", f"utilisation of FA2 - {rival}, {where}", "points")
                rows.append(directed(claim, more, "FA2's replicas are the busiest", above=0))
        return rows

    def _checks(self, results: Results[Fa2Result]) -> list[Row]:
        """Specification 7.3, 8: FA2 with its own replicas, and the effect of headroom."""
        rows = []
        for paths, rate in MET:
            metric = f"violations of FA2, {paths} paths at {rate}/s"
            claim = Claim("check 7.3", metric, "%", paper=1.4, fitted=MARGIN)
            rows.append(bounded(claim, results.violations(self.steady("fa2", paths, rate)), at_most=1.4))
        for rate, derived in ((8, 4.0), (10, 2.0), (27, 2.5)):
            metric = f"violations of the optimum, six paths on slices at {rate}/s"
            claim = Claim("check 7.3", metric, "%", derived=derived)
            found = results.violations(self.slices("optimal", rate))
            rows.append(compare(claim, found, similar=True))
        samples = {ratio: results.violations(self.headroom(ratio)) for ratio in RATIOS}
        for (less, before), (more, after) in pairwise(samples.items()):
            metric = f"violations of FA2, 24/s, mean service time d/{more:g} - d/{less:g}"
            claim = Claim("check 7.3", metric, "points")
            rows.append(directed(claim, minus(after, before), "more headroom, no more violations", at_most=0))
        return rows

    def _e2(self, results: Results[Fa2Result]) -> list[Row]:
        rows = []
        for load in self.moving_loads:
            runs = {name: self.moving(name, load) for name in SYSTEMS}
            late = results.mean(runs["fa2"], "violations")
            for name in ("inferline", "ds2"):
                claim = Claim("E2 moving", f"replicas of {name} - FA2, {load}", "replicas")
                more = minus(results.cores(runs[name]), results.cores(runs["fa2"]))
                rows.append(directed(claim, more, "FA2 needs the fewest", at_least=0))
            own = results.violations(runs["fa2"])
            for name in SYSTEMS[1:]:
                note = (
                    "FA2's replicas have the least spare capacity for the backlog; starts do not slow down others here"
                )
                metric = f"violations of {name} - FA2, {load}"
                claim = Claim("E2 moving", metric, "points", paper=4.0, note=note)
                more = minus(results.violations(runs[name]), own)
                rows.append(bounded(claim, more, at_least=0.0, at_most=4.0, shape=ResultLimits(above=0)))
            cautious = self.moving("fa2", load, LOOKBACK_S)
            note = f"ours: plans for the busiest 10 s of {LOOKBACK_S} s; {results.mean(cautious, 'cores'):.1f} replicas"
            claim = Claim("E2 moving", f"violations of cautious FA2, {load}", "%", note=note)
            rows.append(directed(claim, results.violations(cautious), "fewer than FA2's", below=late))
        return rows

    def _recovery(self, results: Results[Fa2Result]) -> list[Row]:
        found = [recovery_s(run) for run in results.of(self.moving("fa2", "fluctuating"))]
        note = "from the step to the last second with violations; derived: tick + start + drain"
        metric = "time in which FA2 recovers from 8 → 27/s"
        claim = Claim("E2 moving", metric, "s", known="text", derived=20.0, note=note)
        rows = [compare(claim, found, similar=True)]
        if "random" in self.moving_loads:
            steps, drawn = (results.violations(self.moving("fa2", load)) for load in MOVING)
            claim = Claim("E2 moving", "violations of FA2, random - fluctuating", "points")
            rows.append(directed(claim, minus(drawn, steps), "random is worse", above=0))
        return rows

    def _e3(self, results: Results[Fa2Result]) -> list[Row]:
        rows = []
        for load in LONG:
            trials = {name: self.moving(name, load) for name in SYSTEMS}
            count = {name: results.mean(trial, "cores") for name, trial in trials.items()}
            late = {name: results.mean(trial, "violations") for name, trial in trials.items()}
            note = f"40 minutes instead of five hours; {LONG_NOTE}"
            for name in ("ds2", "inferline"):
                saved = 100 * (1 - count["fa2"] / count[name])
                metric = f"replicas that FA2 saves compared with {name}, {load}"
                claim = Claim("E3 long", metric, "%", paper=14.6, note=note)
                rows.append(compare(claim, [saved], similar=True))
            for name in ("ds2", "grandslam"):
                metric, note = f"violations of {name} - FA2, {load}", f"FA2 {late['fa2']:.2f} %"
                claim = Claim("E3 long", metric, "points", paper=4.8, note=note)
                more = late[name] - late["fa2"]
                rows.append(compare(claim, [more], similar=True))
        return rows

    def _e4_and_e7(self, results: Results[Fa2Result]) -> list[Row]:
        def each(plan: str, field: str) -> list[float]:
            return results.each(self.fixed(plan), field)

        def claim(metric: str, paper: float | None = None, derived: float | None = None, fitted: str = "") -> Claim:
            return Claim("E4 fixed", metric, "%", paper=paper, derived=derived, fitted=fitted)

        waits = {rate: results.violations(self.fixed("grandslam", rate)) for rate in (50, 27, 8)}
        metric = "violations of FA2, six paths on slices at 10/s"
        slices = Claim("E7 slices", metric, "%", paper=1.0, fitted=MARGIN)
        return [
            bounded(claim("violations of FA2", 1.4, 0.7, MARGIN), each("fa2", "violations"), at_most=1.4),
            bounded(claim("dropped by DS2", 32.0, 65.0), each("ds2", "dropped"), at_least=32.0),
            bounded(claim("late with DS2", 17.0), each("ds2", "late"), at_most=17.0),
            compare(claim("late with InferLine", None, 78.0), each("inferline", "late"), similar=True),
            compare(
                claim("dropped by InferLine", None, 22.0),
                each("inferline", "dropped"),
                shape=ResultLimits(at_most=fmean(each("ds2", "dropped"))),
            ),
            compare(claim("violations of GrandSLAm", None, 5.5), waits[50], similar=True),
            *(
                directed(
                    Claim("E4 fixed", f"violations of GrandSLAm, {fewer}/s - {more}/s", "points"),
                    minus(waits[fewer], waits[more]),
                    "full batches wait longer",
                    above=0,
                )
                for more, fewer in pairwise(waits)
            ),
            bounded(slices, results.violations(self.slices("fa2")), at_most=1.0),
        ]


FULL: Final = Fa2Evaluation()
QUICK: Final = Fa2Evaluation(steady_s=100, fixed_s=100, moving_s=240, long_s=0, moving_loads=MOVING[:1], seeds=1)
"""One seed, shorter runs, no long traces."""


def recovery_s(result: RunResult) -> float:
    """Seconds from the start of the middle third to the last violation before five seconds without violations."""
    third = len(result.violations_by_second) // 3
    surge = result.violations_by_second[third : 2 * third]
    calm = 0
    for second, share in enumerate(surge):
        calm = calm + 1 if share <= 1.5 else 0
        if calm == 5 and second > 5 and max(surge[: second + 1]) > 1.5:
            return float(second - 4)
    return float(len(surge)) if max(surge) > 1.5 else 0.0
