"""Flashpoint's simulated experiments: which trials they need, and their rows.

Experiments are named as in the specification (section 5.2): E3 autoscalers, E6 plans of pieces, E7 testbed, E8
bandwidth of the store, E9 the most pieces, E11 locality and other systems, E14 single techniques, E15 pieces used, E16
techniques together, E17 headline, E18 by model, E19 resources; checks are those of its section 7.5.
"Pieces" are models that start as parts on several accelerators, and "Flashpoint" is locality, chains and pieces.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil
from statistics import fmean
from typing import Final

from msgspec import structs

from sloop.api import ROUNDING, STORE_MBPS
from sloop_systems.comparison.harness import EQUAL_WITHIN, Results, Wanted
from sloop_systems.comparison.rows import Claim, ResultLimits, Row, bounded, compare, directed
from sloop_systems.flashpoint.experiments import published
from sloop_systems.flashpoint.experiments.offline import T5, expected_cold_s, expected_wait_s, stages_s
from sloop_systems.flashpoint.experiments.runs import SCALING, FlashpointResult, FlashpointTrial, ScalingName, Technique
from sloop_systems.flashpoint.experiments.traces import AZURE, HOURS, MAIN, STEP, STEP_RPS
from sloop_systems.flashpoint.published import FLASHPOINT_MODELS

Found = Results[FlashpointResult]

MODELS: Final = tuple(FLASHPOINT_MODELS)
TRACES: Final = {"twitter": MAIN, "azure": AZURE}
FLASHPOINT: Final[Technique] = "lc+mc+mp"
TUNED: Final[tuple[Technique, ...]] = ("mp", "mc", "lc", "lc+mc", "lc+mc+mp", "gpu-faas")
"""Compared with the baseline at equal resources."""
MATCHING: Final[tuple[Technique, ...]] = ("gpu-faas", "baseline")
LABELS: Final[dict[Technique, str]] = {
    "baseline": "the baseline",
    "mp": "pieces",
    "mc": "chains",
    "lc": "locality",
    "lc+mc": "locality and chains",
    "lc+mc+mp": "all techniques",
    "gpu-faas": "GPU-enabled FaaS",
    "atoll": "Atoll as a system",
    "gillis": "Gillis's pieces",
    "serfer": "SerFer's pieces",
    "cheapest-start": "our planner",
}

OWN_LINKS: Final = {"470042": 2.34, "1652593": 1.63, "470470": 4.16, "10800": 6.41}
"""Derived mean latency in s of T5 under the baseline, if each host has a link to the store of its own (section 6)."""
COLD_S: Final = 56.771
SHARED: Final[dict[Technique, tuple[float, ...]]] = {
    "baseline": (7.52, 2.53, 238.0, 777.0),
    "gpu-faas": (0.253, 1.38, 103.0, 453.0),
    "lc": (0.253, 1.35, 3.4, 7.2),
    "lc+mc": (0.253, 1.35, 0.99, 1.36),
    "mc": (3.8, 2.1, 10.4, 20.8),
    "mp": (3.4, 1.7, 9.3, 15.5),
}
"""The same over one link for the cluster, in the order of `HOURS`; by another simulation (section 7.5, check 15)."""
IN_WINDOWS: Final[tuple[Technique, ...]] = (*SHARED, FLASHPOINT)
STORE_MBPS_STEPS: Final[dict[float, tuple[float, float]]] = {
    2000.0: (2.66, 1.85),
    4000.0: (2.18, 1.17),
    8000.0: (2.14, 0.73),
    16_000.0: (2.14, 0.54),
}
"""Derived mean latency in s of the baseline and of pieces by bandwidth of the store in Mbit/s, window 1652593."""
MOST_PIECES: Final = {1: 509.0, 2: 273.0, 4: 153.0, 8: 98.0, 16: 70.0, 32: 70.0, 64: 70.0}
"""Derived mean cold start in s of T5 by the most pieces of a model, window 1652593, from the store (check 20)."""
PLANNERS: Final[tuple[Technique, ...]] = ("mp", "gillis", "serfer")
SCALES: Final = (0.5, 1.0, 1.5, 2.0, 2.5)
PER_HOST_STEPS: Final = (1, 2, 4, 8)
BASE: Final = FlashpointTrial()
STEPPED: Final = structs.replace(BASE, trace=STEP, store="per_node")
STEP_SEEN_S: Final = 2
"""From the step until Atoll's policy looks, which then has two busy seconds in its window: enough for its P99."""


def hour(name: str, technique: Technique = "baseline") -> FlashpointTrial:
    """T5 under Atoll's policy over an hour of the Twitter trace, one link to the store for all."""
    return structs.replace(BASE, trace=name, technique=technique)


def own_links(name: str) -> FlashpointTrial:
    """The baseline, if each host has its own link to the store."""
    return structs.replace(BASE, trace=name, store="per_node")


def with_store(mbps: float, technique: Technique = "baseline") -> FlashpointTrial:
    """Another bandwidth of the store."""
    return structs.replace(BASE, trace="1652593", store_mbps=mbps, technique=technique)


def with_most_pieces(count: int) -> FlashpointTrial:
    """At most so many pieces of a model, from the store."""
    return structs.replace(BASE, trace="1652593", technique="mp", pieces_max=count)


def planned(model: str, technique: Technique) -> FlashpointTrial:
    """A model that this planner cuts, from the store."""
    return structs.replace(BASE, trace="1652593", model=model, scale=PLANNED[model], technique=technique)


def scaled(factor: float, technique: Technique) -> FlashpointTrial:
    """More or fewer requests."""
    return structs.replace(BASE, scale=factor, technique=technique)


def beside(per_host: int, technique: Technique) -> FlashpointTrial:
    """As many accelerators on fewer or more hosts."""
    return structs.replace(BASE, per_host=per_host, technique=technique)


def ten_hosts(name: str, technique: Technique = "baseline") -> FlashpointTrial:
    """The physical experiment: ten hosts with an accelerator each, each with its own link, 15 % of the requests."""
    return structs.replace(own_links(name), technique=technique, scale=0.15, accelerators=10, per_host=1)


def cell(model: str, policy: ScalingName, trace: str, technique: Technique = "baseline") -> FlashpointTrial:
    """A cell of the grid with the published parameters."""
    return FlashpointTrial(model=model, policy=policy, trace=TRACES[trace], technique=technique)


def apart(model: str, technique: Technique) -> FlashpointTrial:
    """A model under Atoll's policy, under which resources are equal without tuning, with a link to the store for each
    host."""
    return structs.replace(cell(model, "atoll-rate", "twitter", technique), store="per_node")


APART: Final[tuple[Technique, ...]] = ("baseline", "gpu-faas", FLASHPOINT)
OTHERS: Final[tuple[Technique, ...]] = ("baseline", "atoll", "gpu-faas", "lc")


def wanted(*, quick: bool) -> Wanted[FlashpointTrial]:
    """The trials that need no other result. `quick`: one window, Atoll's policy, T5."""
    if quick:
        return [(STEPPED, 1), (own_links(MAIN), 1), *((hour(MAIN, technique), 1) for technique in IN_WINDOWS)]
    repeated = [own_links(name) for name in HOURS]
    repeated += [hour(name, technique) for name in HOURS for technique in IN_WINDOWS]
    repeated.append(STEPPED)
    trials = [with_store(mbps, technique) for mbps in STORE_MBPS_STEPS for technique in WITH_PIECES]
    trials += [with_most_pieces(count) for count in MOST_PIECES]
    trials += [planned(model, technique) for model in PLANNED for technique in ("baseline", *PLANNERS)]
    trials += [scaled(factor, technique) for factor in SCALES for technique in OTHERS]
    trials += [beside(count, technique) for count in PER_HOST_STEPS for technique in ("gpu-faas", "lc")]
    trials += [cell(*each) for each in product(MODELS, SCALING, TRACES)]
    trials += [ten_hosts(name, technique) for name in HOURS for technique in WITH_PIECES]
    trials += [apart(model, technique) for model in MODELS for technique in APART]
    return [(trial, 1) for trial in trials] + [(trial, SEEDS) for trial in repeated]


WITH_PIECES: Final[tuple[Technique, ...]] = ("baseline", "mp")
PLANNED: Final = {"ALBERT-xxlarge": 1.0, "BART-large": 4.0}
"""Models whose scale-ups often have as many accelerators as Gillis's plan has pieces, with the scale of the requests at
which they have."""
SEEDS: Final = 3
"""For the hours of T5, whose derived figures are compared; all other runs are made once."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of the grid, each at the resources of its baseline."""

    baselines: Found
    tuned: Found | None = None
    matched: Found | None = None

    def trial(self, model: str, policy: ScalingName, trace: str, technique: Technique) -> FlashpointTrial:
        """The trial of a cell."""
        base = cell(model, policy, trace)
        if technique == "baseline":
            return base
        return structs.replace(base, technique=technique, resources=self.baselines.mean(base, "cores", 1))

    def of(self, model: str, policy: ScalingName, trace: str, technique: Technique) -> FlashpointResult:
        """The result of a cell."""
        found = self.baselines if technique == "baseline" else self.tuned
        assert found is not None, "the tuned cells have not been simulated"
        return found.of(self.trial(model, policy, trace, technique))[0]

    def wanted(self) -> Wanted[FlashpointTrial]:
        """The tuned cells, whose resources are those of the baselines."""
        return [(self.trial(*each), 1) for each in product(MODELS, SCALING, TRACES, TUNED)]

    def matching(self, policy: ScalingName, technique: Technique) -> FlashpointTrial:
        """The trial of T5 over an hour of the Twitter trace with as many replicas as Flashpoint's latency takes."""
        latency_s = self.of(T5, policy, "twitter", FLASHPOINT).mean_s
        return structs.replace(cell(T5, policy, "twitter", technique), matches_s=latency_s)

    def wanted_matches(self) -> Wanted[FlashpointTrial]:
        """The trials that are tuned to Flashpoint's latency."""
        return [(self.matching(policy, technique), 1) for policy, technique in product(SCALING, MATCHING)]

    def ratios(
        self, trace: str, value: Callable[[FlashpointResult], float], of: Technique, to: Technique
    ) -> dict[str, list[float]]:
        """By model and policy, a figure of one technique divided by that of another, where both have it."""
        found: dict[str, list[float]] = {}
        for model in MODELS:
            pairs = [
                (value(self.of(model, policy, trace, of)), value(self.of(model, policy, trace, to)))
                for policy in SCALING
            ]
            found[model] = [one / other for one, other in pairs if one > 0 and other > 0]
        return {model: each for model, each in found.items() if each}


# Rows


def window_rows(results: Found, names: Sequence[str]) -> list[Row]:
    """Checks 15 and 27: the derived latencies of T5 over hours of the Twitter trace, and the order of techniques."""
    rows = []
    for name in names:
        place = HOURS.index(name)
        trial, derived = own_links(name), OWN_LINKS[name]
        claim = Claim("check 27", f"mean latency, own links, window {name}", "s", derived=derived)
        rows.append(compare(claim, results.each(trial, "mean_s"), within=0.03 * derived, similar=True))
        least, most = results.mean(trial, "cold_least_s"), results.mean(trial, "cold_most_s")
        cold = Claim(
            "check 27", f"shortest and longest cold start, own links, window {name}", "s", "exact", None, COLD_S
        )
        rows.append(compare(cold, [least, most]))
        for technique, figures in SHARED.items():
            found = results.each(hour(name, technique), "mean_s")
            claim = Claim("check 15", f"mean latency, {LABELS[technique]}, window {name}", "s", derived=figures[place])
            rows.append(compare(claim, found, similar=True))
        rows += _orders(results, name)
    return rows


def _orders(results: Found, name: str) -> list[Row]:
    cold = {technique: results.mean(hour(name, technique), "cold_s") for technique in IN_WINDOWS}
    mean = {technique: results.mean(hour(name, technique), "mean_s") for technique in IN_WINDOWS}
    rows = []
    for what, found in (("cold start", cold), ("mean latency", mean)):
        given_up = "; ".join(
            f"{LABELS[each]}: {_given_up(results, hour(name, each))}" for each in ("baseline", "mp", "lc+mc")
        )
        note = given_up if what == "cold start" else ""
        claim = Claim("check 15", f"{what}, baseline / locality and chains, window {name}", "×", note=note)
        rows.append(directed(claim, [found["baseline"] / found["lc+mc"]], "the baseline is slower", above=1))
        claim = Claim("check 15", f"{what}, locality and chains / with pieces too, window {name}", "×")
        expect = "pieces do not make it worse"
        rows.append(directed(claim, [found["lc+mc"] / found[FLASHPOINT]], expect, at_least=0.99))
    claim = Claim("check 15", f"mean latency, GPU-enabled FaaS / locality, window {name}", "×")
    expect = "GPU-enabled FaaS lies between the baseline and locality"
    most = mean["baseline"] / mean["lc"]
    return [*rows, directed(claim, [mean["gpu-faas"] / mean["lc"]], expect, at_least=0.99, at_most=most)]


def _given_up(results: Found, trial: FlashpointTrial) -> str:
    """A note for mean cold starts, which do not include starts that were given up."""
    given_up, started = (results.mean(trial, field) for field in ("given_up", "started"))
    return f"{started:.3g} starts, and {given_up:.3g} given up before they were ready"


def step_rows(results: Found) -> list[Row]:
    """Section 2.2: the longest latency after a step of the rate, from the backlog of one cold start."""
    exec_s = FLASHPOINT_MODELS[T5].exec_ms.value / 1e3
    before, after = (ceil(rps * exec_s) / exec_s for rps in STEP_RPS)
    cold_s = expected_cold_s(1.0, *stages_s(T5, STORE_MBPS))
    waited_s = expected_wait_s(STEP_RPS[1], before, after, cold_s + STEP_SEEN_S)
    note = f"{STEP_SEEN_S} s until the policy looks, and a cold start"
    claim = Claim("section 2.2", "longest latency after a step of the rate", "s", derived=waited_s + exec_s, note=note)
    return [compare(claim, results.each(STEPPED, "longest_s"))]


def autoscaler_rows(results: Found) -> list[Row]:
    """E3: T5 under the baseline, in inferences. The thesis's window and its links to the store are unknown."""
    exec_s = FLASHPOINT_MODELS[T5].exec_ms.value / 1e3
    rows = []
    for policy in SCALING:
        found = [each / exec_s for each in results.each(cell(T5, policy, "twitter"), "mean_s")]
        figure = published.T5_LATENCY[policy]
        note = f"window {MAIN}, one link of 2,203 Mbit/s; both decide, see check 15 and 27"
        claim = Claim("E3 autoscalers", f"mean latency of T5 under {policy}", "× inference", paper=figure, note=note)
        rows.append(compare(claim, found, similar=True))
    return rows


def testbed_rows(results: Found) -> list[Row]:
    """E7: the baseline of the physical experiment, 2.61 s as measured and 2.23 s as simulated in the thesis."""
    found = [results.mean(ten_hosts(name), "mean_s") for name in HOURS]
    note = "over four hours; thinning and hour decide, and the thesis's hour is unknown"
    claim = Claim("E7 testbed", "mean latency, baseline, ten hosts, 15 % of the requests", "s", paper=2.23, note=note)
    bound = Claim("E7 testbed", "the same, of each hour", "s")
    saved = [
        100 * (1 - results.mean(ten_hosts(name, "mp"), "mean_s") / results.mean(ten_hosts(name), "mean_s"))
        for name in HOURS
    ]  # fmt: skip
    note = f"{', '.join(f'{each:.0f}' for each in saved)} in the four hours; {note}"
    pieces = Claim("E7 testbed", "mean latency that pieces save", "%", paper=published.TESTBED_SAVED, note=note)
    return [
        compare(claim, found, similar=True),
        bounded(bound, found, at_least=0.6, at_most=1.9),
        compare(pieces, saved, similar=True),
    ]


def store_rows(results: Found) -> list[Row]:
    """E8, check 20: the bandwidth of the store."""
    rows = []
    for mbps, figures in STORE_MBPS_STEPS.items():
        for technique, figure in zip(WITH_PIECES, figures, strict=True):
            found = results.each(with_store(mbps, technique), "mean_s")
            metric = f"mean latency, {LABELS[technique]}, {mbps:,.0f} Mbit/s from the store"
            claim = Claim("E8 bandwidth", metric, "s", derived=figure)
            rows.append(compare(claim, found, similar=True))
    steps, pieces = (
        [results.mean(with_store(mbps, technique), "mean_s") for mbps in STORE_MBPS_STEPS] for technique in WITH_PIECES
    )
    falls = min(before / after for before, after in pairwise(steps))
    claim = Claim("E8 bandwidth", "mean latency at a bandwidth / at the next larger one, least", "×")
    rows.append(directed(claim, [falls], "more bandwidth never makes it worse", at_least=0.99))
    claim = Claim("E8 bandwidth", "mean latency, the baseline / pieces, least of all bandwidths", "×")
    least = min(whole / each for each, whole in zip(pieces, steps, strict=True))
    rows.append(directed(claim, [least], "pieces are no slower at any bandwidth", at_least=1))
    metric = "mean latency, the baseline / pieces, 2,000 Mbit/s"
    claim = Claim("E8 bandwidth", metric, "×", paper=published.PIECES_AT_2000)
    factor = steps[0] / pieces[0]
    return [*rows, compare(claim, [factor], similar=True)]


def piece_count_rows(results: Found) -> list[Row]:
    """E9, check 20: more pieces start sooner."""
    rows = []
    for count, figure in MOST_PIECES.items():
        found = results.each(with_most_pieces(count), "cold_s")
        note = _given_up(results, with_most_pieces(count))
        metric = f"mean cold start, at most {count}, window 1652593"
        claim = Claim("E9 most pieces", metric, "s", derived=figure, note=note)
        rows.append(compare(claim, found, similar=True))
    steps = [results.mean(with_most_pieces(count), "cold_s") for count in MOST_PIECES]
    falls = min(before / after for before, after in pairwise(steps))
    claim = Claim("E9 most pieces", "mean cold start with pieces / with the next larger number, least", "×")
    return [*rows, directed(claim, [falls], "more pieces never start later", at_least=0.99)]


def planner_rows(results: Found) -> list[Row]:
    """E6 with simulated requests. Planners cut a model among replicas that start together; if fewer accelerators start
    than a planner wants pieces, whole models start."""
    rows = []
    for model in PLANNED:
        own = results.mean(planned(model, "mp"), "mean_s")
        for technique in PLANNERS[1:]:
            other = results.of(planned(model, technique))[0]
            cut = 100 * (1 - other.whole_only)
            note = f"it cuts the model in {cut:.0f} % of the scale-ups, into {other.parts_most} pieces at most"
            metric = f"{model}: mean latency, {LABELS[technique]} / Flashpoint's"
            claim = Claim("E6 plans", metric, "×", note=note)
            ratio = other.mean_s / own
            rows.append(directed(claim, [ratio], "Flashpoint's plans are no slower", at_least=0.99))
    return rows


def locality_rows(results: Found) -> list[Row]:
    """E11, check 21: more requests, and more accelerators in each host."""
    rows = []
    gaps = []
    for factor in SCALES:
        means = {technique: results.mean(scaled(factor, technique), "mean_s") for technique in OTHERS}
        gaps.append(means["gpu-faas"] - means["lc"])
        for technique in OTHERS[:-1]:
            claim = Claim("E11 locality", f"mean latency, {LABELS[technique]} / locality, {factor:g} × requests", "×")
            rows.append(directed(claim, [means[technique] / means["lc"]], "locality is no slower", at_least=0.99))
    claim = Claim("E11 locality", "growth of what locality gains on GPU-enabled FaaS, 0.5 to 2.5 × requests", "s")
    rows.append(directed(claim, [gaps[-1] - gaps[0]], "it gains more with more requests", above=0))
    for technique in ("gpu-faas", "lc"):
        shares = [results.mean(beside(count, technique), "sent_only") for count in PER_HOST_STEPS]
        claim = Claim(
            "E11 locality", f"starts from the same host, 8 - 1 accelerators each, {LABELS[technique]}", "points"
        )
        expect = "more accelerators in a host, more starts from it"
        rows.append(directed(claim, [100 * (shares[-1] - shares[0])], expect, above=0))
    return rows


def apart_rows(results: Found) -> list[Row]:
    """E17 under Atoll's policy where each host has its own link to the store: the thesis does not say which it is."""
    rows = []
    for other in APART[:-1]:
        ratios = {
            model: [results.mean(apart(model, other), "mean_s") / results.mean(apart(model, FLASHPOINT), "mean_s")]
            for model in MODELS
        }
        figure, found = published.LATENCY_SAVED[other, "twitter"], published.mean_saved(ratios)
        note = f"Atoll's policy alone; T5: {published.saved_percent(ratios[T5][0]):.2f} %"
        metric = f"mean latency saved over {LABELS[other]}, twitter, own links"
        claim = Claim("E17 headline", metric, "%", paper=figure, note=note)
        rows.append(compare(claim, [found], similar=True))
    return rows


def technique_rows(grid: Grid) -> list[Row]:
    """E14: how many times shorter with single techniques."""
    rows = []
    for trace, (what, table, field) in product(
        TRACES,
        (("cold start", published.COLD_FACTORS, "cold_s"), ("mean latency", published.LATENCY_FACTORS, "mean_s")),
    ):
        for technique in ("mp", "mc", "lc"):
            ratios = grid.ratios(trace, lambda result, field=field: getattr(result, field), "baseline", technique)  # type: ignore[misc]
            found, figure = fmean(_flat(ratios)), table[trace][technique]
            note = "printed for locality alone and for all techniques" if technique == "lc" else ""
            claim = Claim(
                "E14 techniques", f"{what}, the baseline / {LABELS[technique]}, {trace}", "×", paper=figure, note=note
            )
            rows.append(compare(claim, [found], similar=True))
    return rows


def piece_use_rows(grid: Grid) -> list[Row]:
    """E15: what pieces alone save under Atoll's policy, and how often a model is cut."""
    rows = []
    for model, figure in published.PIECES_SAVED.items():
        pieces, whole = (grid.of(model, "atoll-rate", "twitter", technique) for technique in ("mp", "baseline"))
        found = 100 * (1 - pieces.mean_s / whole.mean_s)
        note = f"whole models in {100 * pieces.whole_only:.0f} % of the scale-ups, {pieces.parts_most} pieces at most"
        claim = Claim("E15 pieces used", f"mean latency that pieces save, {model}", "%", paper=figure, note=note)
        rows.append(compare(claim, [found], similar=True))
    small = grid.of("DialoGPT-large", "atoll-rate", "twitter", "mp")
    claim = Claim("E15 pieces used", "scale-ups with whole models only, DialoGPT-large", "%")
    return [*rows, directed(claim, [100 * small.whole_only], "more than half of them", above=50)]


def together_rows(grid: Grid) -> list[Row]:
    """E16: what chains, and chains and pieces, save beyond locality; the thesis prints the same for both."""
    rows = []
    for trace, (what, table, field) in product(
        TRACES,
        (("cold start", published.COLD_BEYOND, "cold_s"), ("mean latency", published.LATENCY_BEYOND, "mean_s")),
    ):
        for technique in ("lc+mc", FLASHPOINT):
            ratios = grid.ratios(trace, lambda result, field=field: getattr(result, field), "lc", technique)  # type: ignore[misc]
            found = published.mean_saved(ratios)
            note = "printed alike for chains, and for chains and pieces, probably by mistake"
            metric = f"{what} saved beyond locality, {LABELS[technique]}, {trace}"
            claim = Claim("E16 together", metric, "%", paper=table[trace], note=note)
            rows.append(compare(claim, [found], similar=True))
    return rows


def headline_rows(grid: Grid) -> list[Row]:
    """E17: what is saved at equal resources, by the thesis's average and as the mean of percentages."""
    rows = []
    tables = (
        ("cold start", published.COLD_SAVED, "cold_s"),
        ("mean latency", published.LATENCY_SAVED, "mean_s"),
        ("P99 latency", published.P99_SAVED, "p99_s"),
    )
    others: tuple[Technique, ...] = ("baseline", "gpu-faas")
    for (what, table, field), other, trace in product(tables, others, TRACES):
        ratios = grid.ratios(trace, lambda result, field=field: getattr(result, field), other, FLASHPOINT)  # type: ignore[misc]
        found = published.mean_saved(ratios)
        plain = published.mean_of_percents(ratios)
        note = f"mean of percentages {plain:.2f} %"
        claim = Claim(
            "E17 headline", f"{what} saved over {LABELS[other]}, {trace}", "%", paper=table[other, trace], note=note
        )
        rows.append(compare(claim, [found], similar=True))
    return rows


def model_rows(grid: Grid) -> list[Row]:
    """E18, Table 8.1: mean latency saved, by model; larger models save more over the baseline (check 16)."""
    rows = []
    for place, (other, trace) in enumerate(published.COLUMNS):
        ratios = grid.ratios(trace, lambda result: result.mean_s, other, FLASHPOINT)  # type: ignore[arg-type]
        for model, printed in published.SAVED_PERCENT.items():
            found = published.saved_percent(fmean(ratios[model]))
            metric = f"mean latency saved over {LABELS[other]}, {trace}, {model}"  # type: ignore[index]
            claim = Claim("E18 models", metric, "%", paper=printed[place])
            rows.append(compare(claim, [found], similar=True))
        if other == "baseline":
            saved = [fmean(ratios[model]) for model in MODELS]
            inversions = sum(after < before for before, after in pairwise(saved))
            claim = Claim(
                "check 16", f"larger models that save less over the baseline than the next smaller, {trace}", ""
            )
            rows.append(directed(claim, [inversions], "at most one", at_most=1))
    return rows


def resource_rows(grid: Grid) -> list[Row]:
    """E19, check 19: whether resources could be made equal, and in how many runs."""
    apart, runs = [], []
    for model, policy, trace, technique in product(MODELS, SCALING, TRACES, TUNED):
        result = grid.of(model, policy, trace, technique)
        apart.append(abs(result.cores / grid.of(model, policy, trace, "baseline").cores - 1))
        runs.append(result.runs)
    equal = 100 * fmean(each <= EQUAL_WITHIN + ROUNDING for each in apart)
    cells = len(apart)
    share = Claim(
        "E19 resources", f"cells whose replicas are within 5 % of the baseline's, of {cells}", "%", "exact", 100.0
    )
    mean = Claim("E19 resources", "runs for a cell, mean", "", computed=True)
    most = Claim("E19 resources", "runs for a cell, most", "", computed=True)
    return [
        compare(share, [equal], shape=ResultLimits(at_least=90)),
        bounded(mean, [fmean(runs)], at_most=6),
        bounded(most, [max(runs)], at_most=12),
        *_matching_rows(grid),
    ]


def _matching_rows(grid: Grid) -> list[Row]:
    """How many more replicas the other techniques need for the same latency as Flashpoint."""
    assert grid.matched is not None, "the matching trials have not been simulated"
    rows = []
    for technique in MATCHING:
        more, reached = [], 0
        for policy in SCALING:
            trial = grid.matching(policy, technique)
            found = grid.matched.of(trial)[0]
            more.append(100 * (found.cores / grid.of(T5, policy, "twitter", FLASHPOINT).cores - 1))
            reached += found.mean_s <= 1.11 * trial.matches_s
        note = f"mean of the policies; {reached} of {len(SCALING)} reach it within 12 runs"
        figure = published.MORE_FOR_T5[technique]
        metric = f"more replicas for Flashpoint's latency of T5, {LABELS[technique]}"
        claim = Claim("E19 resources", metric, "%", paper=figure, note=note)
        rows.append(compare(claim, [fmean(more)], similar=True))
    return rows


def _flat(ratios: dict[str, list[float]]) -> Iterable[float]:
    return (each for model in ratios.values() for each in model)


def simulated_rows(results: Found, *, quick: bool) -> list[Row]:
    """The rows of `wanted`."""
    if quick:
        return [*step_rows(results), *window_rows(results, (MAIN,))]
    return [
        *step_rows(results),
        *window_rows(results, HOURS),
        *autoscaler_rows(results),
        *testbed_rows(results),
        *store_rows(results),
        *piece_count_rows(results),
        *planner_rows(results),
        *locality_rows(results),
        *apart_rows(results),
    ]


def grid_rows(grid: Grid) -> list[Row]:
    """The rows of the whole grid."""
    return [
        *technique_rows(grid),
        *piece_use_rows(grid),
        *together_rows(grid),
        *headline_rows(grid),
        *model_rows(grid),
        *resource_rows(grid),
    ]
