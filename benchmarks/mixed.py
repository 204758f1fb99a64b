"""What a mix of EC2 instances saves: published models, kinds, prices and deadlines, under the Twitter trace, simulated.

    python -m benchmarks.mixed [--seconds 3600] [--seeds 3] [--only TEXT]

Each model runs on every kind of instance that Ribbon (SC 2021) measured it on (`benchmarks.ec2`): a request is a query
of ten items, and a replica has a whole instance. All instances are rented on demand. They are ready a minute after
their order and cost money from the order to the release. The arrivals are excerpts of the Twitter trace, most of them
those that IPA replays, as Poisson arrivals with the rate of each second times a scale.

The system `mixed` plans with all kinds, and for comparison with single kinds; other systems get the kind that is the
cheapest alone. Fixed mixes are rented for the peak. A run keeps the deadline if at least 99 % of its requests do, as in
Ribbon. The price of a plan at each rate, without simulation, shows where mixes pay and where they do not.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import ec2
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.app.application import Application
from sloop.app.hardware import KINDS
from sloop.app.load import load_scenario
from sloop.profile.profile import Profile, load_profile, save_profile
from sloop.report.plots import Figure, Panel, Series
from sloop.runlog.summary import RunRow
from sloop.sim.scenarios import run_scenario
from sloop.systems.planning.steady import steady_plans
from sloop.systems.setup import set_up
from sloop.units import to_s
from sloop_systems.comparison import data_folder, twitter
from sloop_systems.comparison.harness import in_parallel

KEPT: Final = 0.99
"""The share of requests that must be in time: Ribbon's QoS satisfaction rate."""
MOST: Final = 40
"""Instances of one kind that can be rented at once."""
ACQUIRE_S: Final = 60.0
HEADROOM: Final = 0.05
FORECAST: Final = {"name": "last", "window_s": 10}
"""Every planner expects the mean rate of the last ten seconds (FA2's forecast) and 5 % more. Deadlines are much longer
than a batch takes, so that a busy second can wait."""
CALM_S: Final = 300
"""Fewer instances are planned when the rate has been lower for five minutes, as in Kubernetes: to rent one costs at
least two minutes without use."""
FIRST_S: Final = 10
"""The first plan is for the mean rate of these first seconds."""
PEAK_S: Final = 10
"""Fixed mixes are for the busiest ten seconds."""
SINGLES: Final = 4
"""How many single kinds are simulated: those that are the cheapest at the mean rate."""
MIX: Final = "all kinds"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, an excerpt of the trace, and the mean rate to which its rates are scaled."""

    model: str
    excerpt: str
    mean_rps: float

    def __str__(self) -> str:
        return f"{self.model}, {self.excerpt}, {self.mean_rps:g} requests/s"


HOUR_S: Final = 3_600
EXCERPTS: Final = {**twitter.IPA, "growing hour": ((344 * HOUR_S, 345 * HOUR_S),)}
"""IPA's, and an hour without a burst (the ninth of the fifteenth day), in which the rate grows by a third."""
CASES: Final = (
    Case("resnet", "steady_high", 900),
    Case("resnet", "growing hour", 860),
    Case("vgg", "steady_high", 810),
    Case("mtwnd", "steady_high", 4000),
    Case("resnet", "steady_high", 600),
    Case("resnet", "bursty", 500),
)
"""Loads that a little more than one T4 serves, one of a model without a best kind, one that one T4 serves, and one
whose bursts come faster than instances."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A case with its model's profiles and its arrivals."""

    case: Case
    slo_ms: float
    files: Mapping[str, Path]
    """Each kind's profile."""
    rates: tuple[float, ...]
    """Requests per second, second by second."""
    counts_file: Path

    @property
    def initial_rps(self) -> float:
        """The rate that the first plan is for."""
        return fmean(self.rates[:FIRST_S])

    @property
    def peak_rps(self) -> float:
        """The largest mean of `PEAK_S`."""
        return max(fmean(self.rates[at : at + PEAK_S]) for at in range(max(1, len(self.rates) - PEAK_S + 1)))

    def scenario(self, kinds: Sequence[str], system: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
        """The scenario with nodes on demand of these kinds."""
        model = self.case.model
        variant = {"name": model, "profiles": {kind: str(self.files[kind]) for kind in kinds}}
        return {
            "name": model,
            "slo_ms": self.slo_ms,
            "stages": [{"name": "infer", "variants": [variant]}],
            "cluster": {"nodes": [{"hardware": kind, "count": 0, "most": MOST} for kind in kinds]},
            "systems": [dict(system)],
            "trace": {"file": str(self.counts_file), "format": "counts", "spread": "poisson"},
            "duration_s": len(self.rates),
            "seed": seed,
            "truth": {"nodes": {"acquire_s": ACQUIRE_S}},
        }

    def application(self, kinds: Sequence[str], system: Mapping[str, Any]) -> Application:
        """Its application on nodes of these kinds."""
        return load_scenario(self.scenario(kinds, system)).application


@dataclass(frozen=True, slots=True)
class Contender:
    """A system on some kinds."""

    label: str
    on: str
    """The kinds in words."""
    kinds: tuple[str, ...]
    system: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Played:
    """One run: its row, and the number of nodes held of each kind at each change: (second, kind, number)."""

    row: RunRow
    steps: tuple[tuple[float, str, int], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one contender, one for each seed."""

    contender: Contender
    runs: tuple[Played, ...]

    @property
    def attainment(self) -> float:
        """The lowest of all seeds."""
        return min(run.row.attainment for run in self.runs)

    @property
    def node_usd(self) -> float:
        """The mean of all seeds."""
        return fmean(run.row.node_usd for run in self.runs)

    @property
    def keeps(self) -> bool:
        return self.attainment >= KEPT

    @property
    def nodes(self) -> str:
        """The most nodes of each kind that were held at once, over all seeds."""
        most: Counter[str] = Counter()
        for run in self.runs:
            for nodes in run.row.nodes:
                most[nodes.hardware] = max(most[nodes.hardware], nodes.most)
        return ", ".join(f"{count} {kind}" for kind, count in most.items() if count)


def setting_of(folder: Path, case: Case, seconds: int) -> Setting:
    """Reads the case's data, and writes profiles and rates to `folder`."""
    data = data_folder()
    if data is None or not ec2.is_there(data):
        raise SystemExit("this needs the artefact of Ribbon in the folder of public data")
    files = {}
    for kind, profile in ec2.profiles(data, case.model).items():
        files[kind] = folder / f"{case.model}-{kind}.profile.json"
        save_profile(profile, files[kind])
    rates = rates_of(data, case, seconds)
    counts_file = folder / f"{case.excerpt}-{case.mean_rps:g}.txt"
    counts_file.write_text("".join(f"{rate:g}\n" for rate in rates))
    return Setting(case, ec2.deadline_ms(data, case.model), files, rates, counts_file)


def rates_of(data: Path, case: Case, seconds: int) -> tuple[float, ...]:
    """The rate of each second: the tweets of the excerpt, scaled to the case's mean."""
    first_s = twitter.TEST_S[0]
    week = twitter.held_out(data).counts
    tweets = [week[at - first_s] for start_s, end_s in EXCERPTS[case.excerpt] for at in range(start_s, end_s)]
    scale = case.mean_rps / fmean(tweets)
    return tuple(scale * count for count in tweets[:seconds])


def mixed(setting: Setting, **parameters: object) -> dict[str, Any]:
    """The system `mixed` for this setting."""
    planned = {"headroom": HEADROOM, "forecast": FORECAST, "initial_rps": setting.initial_rps, "calm_s": CALM_S}
    return {"name": "mixed", **planned, **parameters}


# Plans at steady rates


def planned(setting: Setting, kinds: Sequence[str], rate_rps: float, headroom: float = HEADROOM) -> Counter[str] | None:
    """How many instances of each kind `mixed` plans at this rate; None if no plan carries it."""
    setup = set_up(setting.application(kinds, mixed(setting, headroom=headroom)), must_fit=False)
    (plan,) = steady_plans(setup.applications, {setting.case.model: rate_rps}).plans.values()
    if not plan.feasible:
        return None
    counts: Counter[str] = Counter()
    for group in (group for target in plan.stages for group in target.groups):
        counts[group.spec.slot.hardware] += group.count
    return counts


def price(counts: Mapping[str, int] | None) -> float | None:
    """USD per hour of these instances."""
    return None if counts is None else sum(count * KINDS[kind].usd_per_h for kind, count in counts.items())


def cheapest_kinds(setting: Setting) -> list[str]:
    """The kinds, those first whose instances cost least at the mean rate."""
    prices = {kind: price(planned(setting, [kind], fmean(setting.rates))) for kind in setting.files}
    return [kind for _, kind in sorted((usd, kind) for kind, usd in prices.items() if usd is not None)]


# Runs


def contenders(setting: Setting) -> Iterator[Contender]:
    """Every system that serves the case."""
    kinds, singles = tuple(setting.files), cheapest_kinds(setting)[:SINGLES]
    yield Contender("mixed", MIX, kinds, mixed(setting))
    for kind in singles:
        yield Contender("mixed", kind, (kind,), mixed(setting))
    best = singles[0]
    cores = KINDS[best].cores
    foreseen = {"cores": cores, "headroom": HEADROOM, "initial_rps": setting.initial_rps}
    for name in ("fa2", "inferline"):
        yield Contender(name, best, (best,), {"name": name, **foreseen})
    for name in ("hpa", "kpa"):
        yield Contender(name, best, (best,), {"name": name, "cores": cores})
    for on, own in ((MIX, kinds), *((kind, (kind,)) for kind in singles)):
        counts = planned(setting, own, setting.peak_rps, headroom=0.0)
        if counts and (on != MIX or len(counts) > 1):  # the best mix for the peak may be one kind, which then follows
            yield Contender("static, for the peak", on, tuple(counts), fixed(counts))


def fixed(counts: Mapping[str, int]) -> dict[str, Any]:
    """The system that always has these instances."""
    groups = [{"hardware": kind, "replicas": count, "cores": KINDS[kind].cores} for kind, count in counts.items()]
    return {"name": "static", "stages": {"infer": {"groups": groups}}}


def play(scenario: Mapping[str, Any]) -> Played:
    """Simulate one scenario."""
    loaded = load_scenario(dict(scenario))
    found = run_scenario(loaded, loaded.systems[0])
    steps = tuple((to_s(now_ns), kind, count) for now_ns, kind, count in found.summary.deployment.nodes.steps)
    return Played(found.row, steps)


def results_of(setting: Setting, seeds: int) -> list[Result]:
    """Every contender with every seed."""
    chosen = list(contenders(setting))
    scenarios = [setting.scenario(each.kinds, each.system, seed) for each in chosen for seed in range(seeds)]
    runs = in_parallel(play, scenarios, what=lambda scenario, _: str(scenario["systems"][0]["name"]))
    return [Result(each, tuple(runs[at * seeds : (at + 1) * seeds])) for at, each in enumerate(chosen)]


# The page


def saved(usd: float, other_usd: float) -> float:
    """How much less `usd` is than `other_usd`, in percent."""
    return 100 * (1 - usd / other_usd)


def best_single(results: Sequence[Result]) -> Result | None:
    """The cheapest run on one kind that keeps the deadline, of any system that rents on demand."""
    single = [found for found in results if len(found.contender.kinds) == 1 and found.keeps]
    return min(single, key=lambda found: found.node_usd, default=None)


def rows_of(results: Sequence[Result]) -> list[tuple[object, ...]]:
    """One row for each contender; prices are compared with the cheapest kind that keeps the deadline."""
    single = best_single(results)
    return [
        (
            found.contender.label,
            found.contender.on,
            100 * found.attainment,
            found.keeps,
            fmean(run.row.p99_ms or 0.0 for run in found.runs),
            found.node_usd,
            None if single is None else saved(found.node_usd, single.node_usd),
            found.nodes,
        )
        for found in results
    ]


COLUMNS: Final = (
    *("system", "on", "attainment %, lowest seed", "≥ 99 %", "p99 ms", "USD", "saved, %", "most instances at once"),
)


def nodes_figure(name: str, setting: Setting, results: Sequence[Result]) -> Figure:
    """Instances held of each kind over time, of the mix and of the best single kind, with the rates; first seed."""
    single = best_single(results)
    shown = [results[0], *([single] if single and single is not results[0] else [])]
    panels = [Panel(y_label="requests/s", series=(Series("rate", _seconds(setting), setting.rates, "area"),))]
    for found in shown:
        label = f"{found.contender.label}\n{found.contender.on}"
        panels.append(Panel(y_label=label, series=tuple(_held(found.runs[0], len(setting.rates)))))
    alt = (
        f"Instances held over time: {'; '.join(f'{f.contender.label} on {f.contender.on}, {f.nodes}' for f in shown)}."
    )
    return Figure(name=name, title=f"Instances held, {setting.case}", x_label="time, s", panels=tuple(panels), alt=alt)


def _seconds(setting: Setting) -> tuple[float, ...]:
    return tuple(map(float, range(len(setting.rates))))


def _held(run: Played, duration_s: int) -> Iterator[Series]:
    """By kind, the number of instances held in each second."""
    for kind in dict.fromkeys(kind for _, kind, _ in run.steps):
        steps = [(at_s, count) for at_s, own, count in run.steps if own == kind]
        held: list[float] = []
        for (_, count), (until_s, _) in pairwise([*steps, (float(duration_s), 0)]):
            held += [float(count)] * max(0, round(until_s) - len(held))
        if any(held):
            yield Series(kind, tuple(map(float, range(len(held)))), tuple(held), "steps")


def main() -> None:
    parser = arguments(__doc__, seconds=HOUR_S, quick=300)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each system, each with its own seed (default 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose names contain TEXT")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        parts, figures = measured(folder, given)
    publish("mixed", "Mixed clusters", "\n\n".join(parts), figures, write=not (given.no_write or given.only))


def measured(folder: Path, given: Namespace) -> tuple[list[str], list[Figure]]:
    """The text of the page, and its figures."""
    prices, figure = price_part(folder)
    parts, figures, summary = [], [figure], []
    for number, case in enumerate(CASES):
        if given.only not in str(case):
            continue
        say(str(case))
        setting = setting_of(folder, case, round(given.seconds))
        results = results_of(setting, given.seeds)
        rates = f"{min(setting.rates):.0f} to {max(setting.rates):.0f} requests/s"
        parts.append(f"## {case}\n\nDeadline {setting.slo_ms:g} ms; {rates} for {len(setting.rates)} s.")
        parts.append(table(COLUMNS, rows_of(results)))
        figures.append(nodes_figure(f"nodes-{number + 1}", setting, results))
        summary.append(verdict(case, results))
    head = [table(VERDICT_COLUMNS, summary), *prices]
    return [*head, *parts], figures


VERDICT_COLUMNS: Final = ("case", "mix, USD", "keeps 99 %", "best single kind that keeps 99 %", "USD", "mix saves, %")


def verdict(case: Case, results: Sequence[Result]) -> tuple[object, ...]:
    """The mix against the best single kind, with any system that rents on demand or for the peak."""
    mix, single = results[0], best_single(results)
    if single is None:
        return (str(case), mix.node_usd, mix.keeps, "none", None, None)
    on = f"{single.contender.label} on {single.contender.on}"
    return (str(case), mix.node_usd, mix.keeps, on, single.node_usd, saved(mix.node_usd, single.node_usd))


UNITS: Final = tuple(round(0.05 * step, 2) for step in range(1, 61))
"""Rates of the price figure, as multiples of what one instance with a T4 serves."""


def price_part(folder: Path) -> tuple[list[str], Figure]:
    """Where mixes pay at steady rates: a table with one row for each model, and a figure."""
    panels, rows = [], []
    for model in dict.fromkeys(("resnet", "vgg", "candle", "mtwnd", "dien")):
        say(f"prices of {model}")
        setting = setting_of(folder, Case(model, "steady_high", 1.0), 60)
        found = [steady_saving(setting, unit * capacity_rps(setting)) for unit in UNITS]
        panels.append(Panel(y_label=f"{model},\nsaved, %", series=(Series("saved", UNITS, tuple(found), "steps"),)))
        rows.append((model, capacity_rps(setting), 100 * sum(map(bool, found)) / len(found), fmean(found), max(found)))
    columns = ("model", "one T4 serves, requests/s", "mixes pay at, % of rates", "saved, mean %", "saved, most %")
    text = f"Steady rates from {UNITS[0]} to {UNITS[-1]:g} times what one instance with a T4 serves, not simulated: "
    text += (
        "how much less the plan of `mixed` with all kinds costs per hour than with the one kind that is the cheapest "
    )
    text += "at this rate."
    alt = "Money saved by mixes, in percent of the price of the cheapest single kind, over the rate, for five models."
    title = "Money saved by mixes at steady rates"
    figure = Figure(name="prices", title=title, x_label="rate / what one T4 serves", panels=tuple(panels), alt=alt)
    return [text, table(columns, rows)], figure


def capacity_rps(setting: Setting) -> float:
    """What one instance with an accelerator serves, with batches that take half of the deadline."""
    profile: Profile = next(own for own in map(load_profile, setting.files.values()) if own.accelerator)
    form, cores = profile.latency_ms, profile.max_cores
    taken_ms = {batch: form.latency_ms(batch, cores) for batch in range(1, profile.max_batch + 1)}
    return max(1e3 * batch / own_ms for batch, own_ms in taken_ms.items() if 2 * own_ms <= setting.slo_ms)


def steady_saving(setting: Setting, rate_rps: float) -> float:
    """How much less the mix costs than the cheapest single kind, in percent."""
    mix = price(planned(setting, tuple(setting.files), rate_rps))
    single = [usd for kind in setting.files if (usd := price(planned(setting, (kind,), rate_rps))) is not None]
    return 0.0 if mix is None else max(0.0, saved(mix, min(single)))


if __name__ == "__main__":
    main()
