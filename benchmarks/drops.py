"""Drops along graphs of three stages under bursts of 1.5 times their capacity: goodput and wasted work, simulated.

    python -m benchmarks.drops [--only diamond] [--seeds 5] [--development]

Under `proactive` a drop policy reckons with later stages as they are now: batches as large as run there, after what
waits there and on the way there. Without, it takes a lower bound of the time there (batches of one), or the plan's full
batches. PARD (arXiv 2602.08747) has the idea: what is believed of later stages decides at the first.

Every stage has replicas of one core, and batches of at most eight. Capacity is that of the slowest stage in full
batches. A deadline is a multiple of what full batches take one after the other along the longest path. Bursts last 6 of
20 s; between them, and in the calm traffic, 0.7 of the capacity arrives. The excerpt of the Twitter trace has its
busiest ten seconds at 1.5 times the capacity. True batches take 1/1.1 of the believed time on average.

**The rule**, written before the first run with the drawn seeds: `proactive` stays the default of `early-drop` if

1. in every cell (graph, traffic, deadline) its goodput, the mean of all seeds, is at least 0.99 of what the lower bound
   has;
2. in each traffic with bursts, the 95 % interval of the paired differences of goodput (cells and seeds) is above 0;
3. in no traffic is more work wasted, as a share of all work.

`--development` takes other seeds, with which the policy was made, and writes nothing.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from msgspec import Struct

from benchmarks.notebook import arguments, publish, say, table
from sloop.actions import End, StartBatch
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.events import Finished
from sloop.report.plots import Figure, Panel, Series
from sloop.runlog import Record
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.units import to_ms
from sloop.vocabulary import BatchId, Outcome, RequestId
from sloop_systems.comparison import data_folder, twitter
from sloop_systems.comparison.harness import in_parallel

BATCH_MAX: Final = 8


class Stage(NamedTuple):
    """A batch of n takes `fixed_ms` + n · `each_ms` on each of the replicas."""

    fixed_ms: float
    each_ms: float
    replicas: int
    after: tuple[str, ...] = ()

    @property
    def full_ms(self) -> float:
        return self.fixed_ms + BATCH_MAX * self.each_ms


GRAPHS: Final[Mapping[str, Mapping[str, Stage]]] = {
    "equal stages": {"a": Stage(10, 10, 2), "b": Stage(10, 10, 2, ("a",)), "c": Stage(10, 10, 2, ("b",))},
    "slowest last": {"a": Stage(10, 10, 3), "b": Stage(10, 10, 3, ("a",)), "c": Stage(10, 10, 2, ("b",))},
    "slowest in the middle": {"a": Stage(20, 2, 1), "b": Stage(5, 30, 4, ("a",)), "c": Stage(15, 8, 2, ("b",))},
    "diamond": {
        "a": Stage(10, 10, 2),
        "b": Stage(10, 10, 2, ("a",)),
        "c": Stage(15, 15, 3, ("a",)),
        "d": Stage(10, 10, 2, ("b", "c")),
    },
}
DEADLINES: Final = (0.7, 1.5, 4.0)
BASE: Final = 0.7
BURST: Final = 1.5
PEAK_S: Final = 10
EXCERPT_S: Final = (10, 16)
"""Of IPA's excerpt `bursty`, so many seconds before the busiest ten and after their begin."""
SECONDS: Final = {"bursts": 20, "Twitter": sum(EXCERPT_S), "calm": 10}
BURSTY: Final = ("bursts", "Twitter")
SEEDS: Final = (169763, 145910, 521268, 683192, 838243)
"""Drawn from the system's source of randomness on 30 November 2026, before the first run."""
DEVELOPMENT: Final = (1,)
CONTENDERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "early-drop, proactive": ("early-drop", {"drop": {"proactive": True}}),
    "early-drop, lower bound": ("early-drop", {"drop": {"proactive": False}}),
    "early-drop, full batches": ("early-drop", {"drop": {"batch": "full", "proactive": False}}),
    "elastic": ("elastic", {}),
}
NEW: Final = "early-drop, proactive"
OLD: Final = "early-drop, lower bound"
LEAST: Final = 0.99


class Job(NamedTuple):
    """One run."""

    graph: str
    traffic: str
    deadline: float
    contender: str
    seed: int

    @property
    def cell(self) -> tuple[str, str, float]:
        return self[:3]


class Result(Struct, frozen=True):
    """What became of the requests of one run."""

    goodput: float
    """Requests in time per second, as a share of the capacity."""
    work_ms: float
    """Of all batches, in core-milliseconds."""
    wasted_ms: float
    """The part of requests that were not answered in time; a batch's work is divided equally among its requests."""


class Work:
    """A sink that adds up the work of each request."""

    def __init__(self) -> None:
        self.served = 0
        self._begun: dict[BatchId, tuple[int, StartBatch]] = {}
        self._of: defaultdict[RequestId, float] = defaultdict(float)
        self._in_time: set[RequestId] = set()

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record. Every replica has one core."""
        if isinstance(record, StartBatch):
            self._begun[record.batch] = now_ns, record
        elif isinstance(record, Finished):
            begun_ns, batch = self._begun.pop(record.batch)
            for request in batch.requests:
                self._of[request] += to_ms(now_ns - begun_ns) / len(batch.requests)
        elif isinstance(record, End) and record.outcome is Outcome.SERVED:
            self._in_time.add(record.request)

    def result(self, seconds: float, capacity_rps: float) -> Result:
        """The result of a run that is over."""
        wasted_ms = sum(work_ms for request, work_ms in self._of.items() if request not in self._in_time)
        return Result(len(self._in_time) / seconds / capacity_rps, sum(self._of.values()), wasted_ms)


def capacity_rps(graph: Mapping[str, Stage]) -> float:
    """What the slowest stage serves in full batches."""
    return min(1e3 * stage.replicas * BATCH_MAX / stage.full_ms for stage in graph.values())


def longest_ms(graph: Mapping[str, Stage]) -> float:
    """What full batches take one after the other along the longest path."""
    ends_ms: dict[str, float] = {}
    for name, stage in graph.items():
        ends_ms[name] = stage.full_ms + max((ends_ms[other] for other in stage.after), default=0.0)
    return max(ends_ms.values())


def trace_of(traffic: str, capacity: float) -> dict[str, Any]:
    """The arrivals as a scenario declares them."""
    if traffic == "bursts":
        return {"kind": "square", "rate": BASE * capacity, "burst_rate": BURST * capacity, "period_s": 20, "burst_s": 6}
    if traffic == "calm":
        return {"kind": "poisson", "rate": BASE * capacity}
    counts = twitter.ipa("bursty", data_folder()).counts
    sums = [sum(counts[at : at + PEAK_S]) for at in range(len(counts) - PEAK_S)]
    peak = sums.index(max(sums[EXCERPT_S[0] : -EXCERPT_S[1]]), EXCERPT_S[0])
    scale = BURST * capacity * PEAK_S / sums[peak]
    rates = [scale * count for count in counts[peak - EXCERPT_S[0] : peak + EXCERPT_S[1]]]
    return {"kind": "step", "rates": rates, "each_s": 1}


def declared(job: Job) -> dict[str, Any]:
    """The scenario of a run."""
    graph = GRAPHS[job.graph]
    stages = []
    for name, stage in graph.items():
        latency = {"form": "quadratic", "alpha": 0, "beta": stage.each_ms, "gamma": stage.fixed_ms}
        profile = {"latency_ms": latency, "max_batch": BATCH_MAX, "max_cores": 1, "load_s": 1}
        stages.append({"name": name, "profile": profile, "after": list(stage.after)})
    cores = sum(stage.replicas for stage in graph.values())
    return {
        "name": "graph",
        "slo_ms": job.deadline * longest_ms(graph),
        "stages": stages,
        "cluster": {"nodes": [{"hardware": "custom", "cores": cores, "count": 1}]},
        "trace": trace_of(job.traffic, capacity_rps(graph)),
        "duration_s": SECONDS[job.traffic],
        "truth": {"service": {"ratio": 1.1, "cv": 0.05}},
    }


def play(job: Job) -> Result:
    """Simulate one run."""
    graph, work = GRAPHS[job.graph], Work()
    name, parameters = CONTENDERS[job.contender]
    if name == "early-drop":
        replicas = {stage: {"replicas": each.replicas} for stage, each in graph.items()}
        parameters = {**parameters, "stages": replicas, "batch_max": BATCH_MAX}
    scenario = replace(load_scenario(declared(job)), seed=job.seed)
    simulate(World.from_scenario(scenario, SystemChoice(name, parameters)), [work], check_first=0)
    return work.result(SECONDS[job.traffic], capacity_rps(graph))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the drawn seeds")
    parser.add_argument("--only", default="", help="only graphs whose name contains this")
    parser.add_argument("--development", action="store_true", help="other seeds, and nothing is written")
    given = parser.parse_args()
    seeds = DEVELOPMENT if given.development else SEEDS[: given.seeds]
    graphs = [name for name in GRAPHS if given.only in name]
    jobs = [Job(*each) for each in product(graphs, SECONDS, DEADLINES, CONTENDERS, seeds)]
    results = in_parallel(play, jobs, progress=lambda share, what: say(f"{100 * share:.0f} % {what}"))
    found = dict(zip(jobs, results, strict=True))
    write = not (given.no_write or given.development)
    publish("drops", "Drops along graphs", page(found, seeds), figures(found, seeds), write=write)


Found = Mapping[Job, Result]


def mean_of(found: Found, cell: tuple[str, str, float], contender: str, seeds: Sequence[int]) -> tuple[float, float]:
    """Goodput and wasted work in %, of all seeds."""
    results = [found[Job(*cell, contender, seed)] for seed in seeds]
    return fmean(each.goodput for each in results), _wasted(results)


def cells_of(found: Found) -> list[tuple[str, str, float]]:
    """All cells, in order."""
    return list(dict.fromkeys(job.cell for job in found))


def verdicts(found: Found, seeds: Sequence[int]) -> list[tuple[object, ...]]:
    """The three parts of the rule."""
    cells = cells_of(found)
    ratios = {
        cell: mean_of(found, cell, NEW, seeds)[0] / max(mean_of(found, cell, OLD, seeds)[0], 1e-9) for cell in cells
    }
    worst = min(ratios, key=lambda cell: ratios[cell])
    told = f"{ratios[worst]:.3f} ({worst[0]}, {worst[1]}, {worst[2]:g})"
    rows: list[tuple[object, ...]] = [("least goodput / that of the lower bound", told, ratios[worst] >= LEAST)]
    for kind in SECONDS:
        own = [cell for cell in cells if cell[1] == kind]
        pairs = [(found[Job(*cell, NEW, seed)], found[Job(*cell, OLD, seed)]) for cell in own for seed in seeds]
        gains = [one.goodput - other.goodput for one, other in pairs]
        half = 1.96 * stdev(gains) / sqrt(len(gains))
        if kind in BURSTY:
            told = f"{fmean(gains):+.3f} ± {half:.3f} of the capacity"
            rows.append((f"goodput, {kind}", told, fmean(gains) > half))
        mine, other = (_wasted([pair[at] for pair in pairs]) for at in (0, 1))
        rows.append((f"wasted work, {kind}", f"{mine:.2f} % instead of {other:.2f} %", mine <= other))
    return rows


def _wasted(results: Sequence[Result]) -> float:
    """The share of all work in %."""
    return 100 * sum(each.wasted_ms for each in results) / (sum(each.work_ms for each in results) or 1.0)


def page(found: Found, seeds: Sequence[int]) -> str:
    """The verdicts, and each cell."""
    rows = []
    for cell in cells_of(found):
        means = [mean_of(found, cell, contender, seeds) for contender in CONTENDERS]
        rows.append((*cell, *(f"{goodput:.3f} ({wasted:.1f})" for goodput, wasted in means)))
    return "\n\n".join(
        [
            f"Seeds {', '.join(map(str, seeds))}. Goodput as a share of the capacity, so that at most about 1.1 is"
            " possible while more arrives; in brackets the wasted work in % of all work.",
            "## By the rule",
            table(("what", "found", "holds"), verdicts(found, seeds)),
            "## Goodput (wasted work, %)",
            table(("graph", "traffic", "deadline", *CONTENDERS), rows),
        ]
    )


def figures(found: Found, seeds: Sequence[int]) -> list[Figure]:
    """Goodput and wasted work under bursts, by graph and deadline."""
    cells = [cell for cell in cells_of(found) if cell[1] == "bursts"]
    ticks = tuple(f"{graph}, {deadline:g}" for graph, _, deadline in cells)
    places = tuple(map(float, range(len(cells))))
    panels = []
    for at, label in enumerate(("in time / capacity", "wasted work, %")):
        series = [
            Series(name, places, tuple(mean_of(found, cell, name, seeds)[at] for cell in cells), "bars")
            for name in CONTENDERS
        ]
        panels.append(Panel(y_label=label, series=tuple(series), ticks=ticks))
    alt = "Goodput and wasted work of four systems under bursts, by graph and deadline."
    title = "Bursts of 1.5 times the capacity"
    return [Figure(name="bursts", title=title, x_label="graph, deadline", panels=tuple(panels), alt=alt)]


if __name__ == "__main__":
    main()
