"""FA2's runs as trials: who serves the application under which load, and how well.

A trial is a value and its outcome depends on nothing else. Service times are normal around d/`ratio` with 4 % variation
(the specification's §3.4: `ratio` decides almost everything, it is FA2's whole safety). Replicas start in 6 s. Batches
wait until they are full, however long, and requests older than three times the application's deadline are given up, as
published.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

from msgspec import Struct, structs

from sloop.actions import StartBatch
from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant
from sloop.app.scenario import ColdStart, ServiceTruth, Truth
from sloop.events import Finished
from sloop.report.metrics import Metrics
from sloop.reproduce.fa2.application import (
    COLD_START_S,
    CPU,
    GPU,
    ORDER,
    PATHS,
    Hardware,
    problem,
    profile_of,
)
from sloop.runlog import Record
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.solvers import fa2, fa2_baselines
from sloop.solvers.fa2 import Answer, Choice
from sloop.streams import stream
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import Node, Path
from sloop.workload import Trace, trace_of
from sloop.workload.spread import poisson_ns

LEAD_S: Final = 12
"""A loop runs so long before anybody looks: its first decision knows no rate."""
TAIL_S: Final = 10
"""The load goes on so long after what counts, so that nobody who counts waits for a batch that never fills."""
PATIENCE_S: Final = 120
SYSTEMS: Final = ("fa2", "inferline", "ds2", "grandslam")
HARDWARE: Final[dict[str, Hardware]] = {"cpu": CPU, "gpu": GPU}


class Trial(Struct, frozen=True, kw_only=True):
    """One run. `plan` names who chose batches once and for all, and `pools` whose numbers of replicas; without `plan`
    `system` decides every ten seconds."""

    hardware: str = "cpu"
    paths: int = 3
    plan: str = ""
    pools: str = ""
    system: str = ""
    load: str = "steady 27"
    seconds: int = 600
    ratio: float = 1.15
    seed: int = 0
    headroom: float = 0.0
    lookback_s: int = 0
    """Plan for the busiest ten seconds of so many; 0: for the last ten, as published."""


class Outcome(Struct, frozen=True):
    """What came of it. Shares of requests in percent; replicas averaged over the run."""

    late: float
    dropped: float
    replicas: float
    utilisation: float
    by_second: tuple[float, ...]
    replicas_by_second: tuple[float, ...]
    arrivals_by_second: tuple[int, ...]

    @property
    def violations(self) -> float:
        """Late or dropped."""
        return self.late + self.dropped


class Busy:
    """How long replicas ran batches between two instants: a sink."""

    def __init__(self, from_ns: int, until_ns: int) -> None:
        self._from_ns, self._until_ns = from_ns, until_ns
        self._started: dict[int, int] = {}
        self.busy_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        if type(record) is StartBatch:
            self._started[record.batch] = now_ns
        elif type(record) is Finished:
            started_ns = max(self._from_ns, self._started.pop(record.batch, now_ns))
            self.busy_ns += max(0, min(self._until_ns, now_ns) - started_ns)


def chosen(plan: str, hardware: Hardware, paths: int, rate_rps: float) -> tuple[Choice, ...]:
    """What a planner called `fa2`, `optimal`, `inferline`, `ds2` or `grandslam` wants at a known rate."""
    given = problem(hardware, paths, rate_rps)
    stages, ways = given.stages, given.ways
    if plan in {"fa2", "optimal", "grandslam"}:
        answer = fa2.solve(stages, ways, mode="milp" if plan == "optimal" else "tree")
        assert isinstance(answer, Answer), rate_rps
        if plan == "grandslam":
            return fa2_baselines.grandslam(stages, ways, [choice.replicas for choice in answer.choices])
        return answer.choices
    if plan == "inferline":
        return fa2_baselines.inferline(stages, ways)
    assert plan == "ds2", plan
    return fa2_baselines.ds2(stages)


def play(trial: Trial) -> Outcome:
    """Run a trial under the checkers."""
    first, half = lead_s(trial), trial.seconds // 2
    # The second half alone: before, the later stages have nothing to do yet.
    metrics, busy = Metrics(start_ns=0), Busy(s(first + half), s(first + trial.seconds))
    simulate(world_of(trial), [metrics, busy], patience_ns=s(PATIENCE_S))
    seconds = metrics.seconds()[first : first + trial.seconds]
    arrivals = sum(second.arrivals for second in seconds)
    assert arrivals, trial
    replica_s = sum(second.cores for second in seconds)
    return Outcome(
        late=100 * sum(second.late for second in seconds) / arrivals,
        dropped=100 * sum(second.dropped for second in seconds) / arrivals,
        replicas=replica_s / len(seconds),
        utilisation=100 * busy.busy_ns / NS_PER_S / sum(second.cores for second in seconds[half:]),
        by_second=tuple(100 * second.violations for second in seconds),
        replicas_by_second=tuple(second.cores for second in seconds),
        arrivals_by_second=tuple(second.arrivals for second in seconds),
    )


def lead_s(trial: Trial) -> int:
    """Seconds before those that count."""
    return 0 if trial.plan else LEAD_S


def world_of(trial: Trial) -> World:
    """The trial as a world of the simulator."""
    hardware = HARDWARE[trial.hardware]
    chains = PATHS[: trial.paths]
    slos_ms = hardware.slos_ms[: trial.paths]
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
        cold_start=ColdStart(start_s=COLD_START_S, warm=True),
    )
    # The lead is under load too: what the loop sees then is the load's first rate.
    rates = [rates[0]] * lead_s(trial) + rates + [rates[-1]] * TAIL_S
    return World(
        seed=trial.seed,
        application=application,
        trace=trace_at(rates, trial.seed, trial.load),
        duration_ns=s(len(rates)),
        truth=truth,
    )


def _stages(hardware: Hardware, chains: Sequence[tuple[str, ...]]) -> tuple[Stage, ...]:
    steps = {pair for chain in chains for pair in pairwise(chain)}
    firsts = {chain[0] for chain in chains}
    names = [name for name in ORDER if any(name in chain for chain in chains)]
    stages = []
    for name in names:
        after = tuple(other for other in names if (other, name) in steps)
        variant = Variant(name.lower(), profile=profile_of(hardware, name))
        stages.append(Stage(name, (variant,), after, entry=bool(after) and name in firsts))
    return tuple(stages)


def _choice(trial: Trial, hardware: Hardware, rate_rps: float) -> SystemChoice:
    """A system that decides, or one that keeps what was planned for the load's first rate."""
    published: dict[str, Any] = {
        "batch": {"name": "full", "forever": True},
        "drop": {"name": "age", "limit": 3.0},
    }
    if not trial.plan:
        own: dict[str, Any] = {"headroom": trial.headroom, "initial_rps": rate_rps}
        if trial.lookback_s:
            own["forecast"] = {"name": "moving_max", "horizon_s": trial.lookback_s, "window_s": 10}
        return SystemChoice(trial.system, {**published, **own})
    planned_rps = rate_rps * (1 + trial.headroom)
    choices = chosen(trial.plan, hardware, trial.paths, planned_rps)
    pools = chosen(trial.pools or trial.plan, hardware, trial.paths, planned_rps)
    names = problem(hardware, trial.paths, planned_rps).names
    stages = {
        name: {"replicas": pool.replicas, "batch_max": choice.batch}
        for name, choice, pool in zip(names, choices, pools, strict=True)
    }
    order = "edf" if trial.plan == "grandslam" else "fifo"
    return SystemChoice("static", {**published, "stages": stages, "order": order, "route": "round_robin"})


def rates_of(load: str, seconds: int, seed: int) -> list[float]:
    """Requests per second, for every second: `steady R`, `fluctuating`, `random`, `diurnal`, `square`."""
    kind, _, rate = load.partition(" ")
    if kind == "steady":
        return [float(rate)] * seconds
    return LOADS[kind](seconds, seed)


def fluctuating(seconds: int, seed: int) -> list[float]:
    """8, in the middle third 27, then 8 again."""
    third = seconds // 3
    return [27.0 if third <= at < 2 * third else 8.0 for at in range(seconds)]


def random(seconds: int, seed: int) -> list[float]:
    """N(15, 5), drawn again every ten seconds, at least 1."""
    draw = stream(seed, "fa2/random")
    drawn = [max(1.0, draw.gauss(15, 5)) for _ in range(-(-seconds // 10))]
    return [drawn[at // 10] for at in range(seconds)]


def diurnal(seconds: int, seed: int) -> list[float]:
    """Minutes of a sine from 8 to 20, noise that remembers, spikes up to 27: in place of Azure's first trace."""
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
    """8 and 20 by turns of 5 to 30 minutes: in place of Azure's second trace."""
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
    """Poisson arrivals at one rate for each second."""
    draw = stream(seed, f"fa2/{name}")
    times = (
        at * NS_PER_S + offset for at, rate_rps in enumerate(rates) for offset in poisson_ns(draw, rate_rps, NS_PER_S)
    )
    return trace_of(times, duration_ns=s(len(rates)), name=name, provenance="assumed, as the specification describes")


class Results:
    """Outcomes by trial, for every seed alike: what experiments read."""

    def __init__(self, outcomes: dict[Trial, Outcome], seeds: Sequence[int]) -> None:
        self._outcomes = outcomes
        self.seeds = tuple(seeds)

    def of(self, trial: Trial) -> list[Outcome]:
        """One outcome for each seed."""
        return [self._outcomes[structs.replace(trial, seed=seed)] for seed in self.seeds]

    def each(self, trial: Trial, figure: str) -> list[float]:
        """One figure of the outcome, by its name, for each seed."""
        return [float(getattr(outcome, figure)) for outcome in self.of(trial)]
