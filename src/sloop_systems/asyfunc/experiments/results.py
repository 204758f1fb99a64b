"""AsyFunc's simulated experiments: which trials they need, and their rows.

Experiments are named by the figures of the publication: Fig. 1 scaling policies, Fig. 6 one surge, Figs. 10 and 11
memory, Fig. 12 utility of cores, Fig. 13 violations; checks are those of section 7.4 of the specification, constants
and variants the ablations of its section 5.4.

The publication does not give the unit of ρ. So K, the number of cores that a copy of the model is worth, is unknown. It
decides the size of bodies and thereby all memory. There are rows for two values: K = 128, with which bodies are as
small as those of BATCH, and the model's multiply-adds in 10⁹, as printed. Shadows take the first blocks of a model, as
in the simulations of our specification; the publication's order by multiply-adds per byte is one of the variants.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs

from sloop_systems.asyfunc.experiments.offline import OPT_INSTANCES
from sloop_systems.asyfunc.experiments.runs import (
    MODELS,
    SMALL_BODIES,
    VIT,
    AsyFuncResult,
    AsyFuncTrial,
    SystemName,
    with_options,
)
from sloop_systems.comparison.harness import Results, Wanted
from sloop_systems.comparison.rows import Claim, ResultLimits, Row, bounded, compare, directed, minus, over

Found = Results[AsyFuncResult]

SEEDS: Final = 5
VARIANT_SEEDS: Final = 3
QUICK_MODELS: Final = ("InceptionV3", "VGG19")
WEIGHTS: Final = (SMALL_BODIES, 0.0)
"""K; 0 is the multiply-adds in 10⁹."""
OWN: Final[tuple[SystemName, ...]] = ("asyfunc", "asyfunc-nolls", "asyfunc-noadapt")
PREWARMS: Final[Mapping[SystemName, tuple[float, ...]]] = {
    "batch": (1.0, 1.3, 1.5, 2.0),
    "batch-plus": (1.0, 1.15, 1.3, 1.5, 2.0),
}
"""k_b: the multiples of the needed replicas between which BATCH's memory at AsyFunc's violations is interpolated."""
NAMES: Final[Mapping[SystemName, str]] = {"batch": "BATCH", "batch-plus": "BATCH⁺"}
PRINTED_PREWARMS: Final = (1.0, 1.3, 1.5)
SAVED: Final = 23.4
REACTIONS: Final[tuple[SystemName, ...]] = ("on-demand", "last-value", "k-last-value", "opt")
DAY_LOAD: Final = 3.36
"""Mean demand in instances of 16 cores for which the optimum has 3.85, by the count of Fig. 1."""
SURGED: Final[tuple[SystemName, ...]] = ("asyfunc", "asyfunc-nolls", "on-demand", "k-last-value")
DERIVED: Final = {"InceptionV3": (5.5, 6.5, 19.0), "ResNet101": (5.2, 6.0, 15.3), "VGG19": (5.2, 7.2, 14.8)}
"""Violations in % of asyfunc, nolls and noadapt at K = 128, from one run of another simulator with another trace
(5.5)."""
BODY_LOADS: Final = (0.0, 15.0, 100.0)


class ChangedConstant(NamedTuple):
    """A change of one constant of AsyFunc whose effect on violations is expected."""

    name: str
    options: Mapping[str, bool | float | str]
    changes: Mapping[str, float]
    """Fields of the trial."""
    expected: ResultLimits
    """The change of violations, in points."""


MORE: Final = ResultLimits(above=0, of="interval")
FEWER: Final = ResultLimits(below=0, of="interval")
VARIANTS: Final = (
    ChangedConstant("burst threshold 1.2", {"gamma": 1.2}, {}, MORE),
    ChangedConstant("shadows by the formula as printed", {"objective": "printed"}, {}, MORE),
    ChangedConstant("overflow split", {"batch__overflow": "split"}, {}, FEWER),
    ChangedConstant("mean rate on bodies alone", {"counts_shadows": False}, {}, FEWER),
    ChangedConstant("no spare worker (check 11)", {}, {"spare_workers": 0}, MORE),
    ChangedConstant(
        "two shadows on a node (check 11)", {"shadows_per_node": 2}, {"spare_workers": 2}, ResultLimits(at_most=0)
    ),
)


def weights_of(model: str) -> tuple[float, ...]:
    """The values of K. YOLOv8x has 128.9 · 10⁹ multiply-adds, so that both are the same."""
    return WEIGHTS[:1] if model == "YOLOv8x" else WEIGHTS


def own(model: str, system: SystemName = "asyfunc", weight: float = SMALL_BODIES) -> AsyFuncTrial:
    """AsyFunc or a variant, with shadows of first blocks."""
    return with_options(AsyFuncTrial(model=model, system=system, weight=weight), selection="prefix")


def ours(model: str) -> AsyFuncTrial:
    """AsyFunc with enough bodies for the mean rate without shadows."""
    return with_options(own(model), counts_shadows=False)


def prewarmed(model: str, system: SystemName, prewarm: float) -> AsyFuncTrial:
    """BATCH or BATCH⁺."""
    return AsyFuncTrial(model=model, system=system, prewarm=prewarm)


def varied(model: str, variant: ChangedConstant) -> AsyFuncTrial:
    """AsyFunc with one constant changed."""
    return structs.replace(with_options(own(model), **variant.options), **variant.changes)


def loading(model: str, system: SystemName, body_load: float) -> AsyFuncTrial:
    """Bodies whose loading takes more or fewer inferences; with 0 they are ready at once."""
    trial = own(model, system)
    return structs.replace(trial, start_s=0.0) if not body_load else structs.replace(trial, body_load=body_load)


def reacting(system: SystemName) -> AsyFuncTrial:
    """Fig. 1: equal replicas on 16 cores that take 5 s to start; those of the optimum start at once."""
    return AsyFuncTrial(system=system, load=DAY_LOAD, start_s=0.0 if system == "opt" else 5.0)


def surge(system: SystemName) -> AsyFuncTrial:
    """Fig. 6: twice the requests for 5 s; bodies with 16 cores, which take 5 s to start."""
    trial = AsyFuncTrial(system=system, shape="surge", seconds=60, start_s=5.0, weight=0.0)
    return with_options(trial, selection="prefix") if system.startswith("asyfunc") else trial


def wanted(*, quick: bool) -> Wanted[AsyFuncTrial]:
    """All trials with the number of their seeds."""
    models, seeds = (QUICK_MODELS, 1) if quick else ((*MODELS, VIT), SEEDS)
    trials = [own(model, system, weight) for model in models for system in OWN for weight in weights_of(model)]
    trials += [ours(model) for model in models]
    for system, prewarms in PREWARMS.items():
        trials += [prewarmed(model, system, prewarm) for model in models for prewarm in prewarms]
    trials += [reacting(system) for system in REACTIONS] + [surge(system) for system in SURGED]
    found = [(trial, seeds) for trial in trials]
    if quick:
        return found
    more = [varied(model, variant) for model in QUICK_MODELS for variant in VARIANTS]
    more += [
        loading(model, system, body_load)
        for model in QUICK_MODELS
        for system in OWN[:2]
        for body_load in BODY_LOADS
    ]  # fmt: skip
    return found + [(trial, VARIANT_SEEDS) for trial in more]


def simulated_rows(results: Found, *, quick: bool) -> list[Row]:
    """All rows of the simulated experiments."""
    models = QUICK_MODELS if quick else (*MODELS, VIT)
    rows = reaction_rows(results) + surge_rows(results)
    for model in models:
        for weight in weights_of(model):
            rows += own_rows(results, model, weight)
        rows += [*batch_rows(results, model), *our_rows(results, model)]
    rows += headline_rows(results, [model for model in models if model != VIT])
    return rows if quick else [*rows, *variant_rows(results), *loading_rows(results)]


def less(
    experiment: str, metric: str, one: Sequence[float], other: Sequence[float], unit: str = "points", note: str = ""
) -> Row:
    """A row that expects the first to be less, seed by seed: by the whole interval, or the mean of a single run."""
    return directed(Claim(experiment, metric, unit, note=note), minus(one, other), below=0, of="interval")


def named(weight: float) -> str:
    """K as text."""
    return f"K = {weight:g}" if weight else "K = GMACs"


# Rows


def reaction_rows(results: Found) -> list[Row]:
    """Fig. 1 with queues and batches, InceptionV3."""
    experiment = "Fig. 1, simulated"
    printed: Mapping[SystemName, float] = {"on-demand": 10.52, "last-value": 5.46, "opt": 0.0}
    found = {system: results.violations(reacting(system)) for system in REACTIONS}
    rows = []
    for system, paper in printed.items():
        note = "requests wait and batches take the whole SLO, so that not even the optimum has no violations"
        claim = Claim(experiment, f"violations of {system}", "%", "simulated", paper, note=note)
        rows.append(compare(claim, found[system], similar=True))
    counts = [each / OPT_INSTANCES for each in results.each(reacting("k-last-value"), "replicas")]
    claim = Claim(experiment, "replicas of k-last-value / 3.85", "×", "text", 1.3, 1.42)
    pairs: tuple[tuple[SystemName, SystemName], ...] = (
        ("last-value", "on-demand"),
        ("k-last-value", "last-value"),
        ("opt", "last-value"),
    )
    return [
        *rows,
        compare(claim, counts, within=0.15),
        *(less(experiment, f"violations, {one} - {other}", found[one], found[other]) for one, other in pairs),
    ]


def surge_rows(results: Found) -> list[Row]:
    """Fig. 6: shadows should miss as few as over-provisioning, with the cores of on-demand scaling."""
    experiment = "Fig. 6 surge"
    missed = {system: results.violations(surge(system)) for system in SURGED}
    cores = {system: results.cores(surge(system)) for system in SURGED}
    return [
        less(experiment, "violations, asyfunc - without shadows", missed["asyfunc"], missed["asyfunc-nolls"]),
        less(experiment, "violations, asyfunc - on-demand", missed["asyfunc"], missed["on-demand"]),
        less(experiment, "cores, asyfunc - over-provisioning", cores["asyfunc"], cores["k-last-value"], "cores"),
    ]


def own_rows(results: Found, model: str, weight: float) -> list[Row]:
    """Checks 6, 7 and 9, and Fig. 13 between AsyFunc and its variants."""
    whole, bodies, fixed = (own(model, system, weight) for system in OWN)
    of = f"{model}, {named(weight)}"
    ratios = over(_memory(results, whole), _memory(results, bodies))
    rows = [
        less("check 6", f"{of}: violations, asyfunc - without shadows",
             results.violations(whole), results.violations(bodies),
             note=f"{results.mean(whole, 'violations'):.2f} and {results.mean(bodies, 'violations'):.2f} %"),
        bounded(Claim("check 6", f"{of}: memory, asyfunc / without shadows", "×"), ratios, at_most=1.05),
        less("check 7", f"{of}: violations, asyfunc - fixed batches",
             results.violations(whole), results.violations(fixed),
             note=f"{results.mean(fixed, 'violations'):.2f} % with fixed batches"),
        bounded(Claim("Fig. 12 utility", f"{of}: best period of asyfunc", "%"), results.each(whole, "utility_most"),
                at_least=90.0),
    ]  # fmt: skip
    if not weight:
        small, large = (results.each(trial, "batch") for trial in (fixed, whole))
        rows.append(less("check 7", f"{of}: batch size, fixed batches - asyfunc", small, large, "requests"))
    if weight == SMALL_BODIES and model in DERIVED:
        for system, figure in zip(OWN, DERIVED[model], strict=True):
            found = results.violations(own(model, system))
            claim = Claim("Fig. 13 violations", f"{of}: {system}", "%", "simulated", derived=figure)
            rows.append(compare(claim, found, similar=True))
    return rows


def _memory(results: Found, trial: AsyFuncTrial) -> list[float]:
    return results.each(trial, "memory_mib")


def our_rows(results: Found, model: str) -> list[Row]:
    """The same with enough bodies for the mean rate alone, so that shadows end with their burst."""
    whole, bodies = ours(model), own(model, "asyfunc-nolls")
    ratios = over(_memory(results, whole), _memory(results, bodies))
    of = f"{model}, K = 128, mean rate on bodies"
    note = f"{results.mean(whole, 'violations'):.2f} and {results.mean(bodies, 'violations'):.2f} %"
    return [
        less("check 6, ours", f"{of}: violations, asyfunc - without shadows",
             results.violations(whole), results.violations(bodies), note=note),
        bounded(Claim("check 6, ours", f"{of}: memory, asyfunc / without shadows", "×"), ratios, at_most=1.05),
    ]  # fmt: skip


# BATCH at equal violations


class EqualViolations(NamedTuple):
    """AsyFunc compared with BATCH at the same violations, run by run."""

    saved: tuple[float, ...]
    """Saved memory, in percent of BATCH's."""
    utility: tuple[float, ...]
    """The difference in the utility of cores, in points."""
    outside: int
    """The number of runs that are left out, because BATCH had as many violations with no k_b."""


def at_equal_violations(results: Found, trial: AsyFuncTrial, system: SystemName) -> EqualViolations:
    """Interpolated between runs of the same seed with other k_b, in the logarithm of violations."""
    runs = results.of(trial)
    others = [results.of(prewarmed(trial.model, system, prewarm), len(runs)) for prewarm in PREWARMS[system]]
    saved, utility, missing = [], [], 0
    for place, mine in enumerate(runs):
        theirs = sorted((each[place] for each in others), key=lambda run: run.violations)
        missed = [math.log(max(0.01, run.violations)) for run in theirs]
        at = math.log(max(0.01, mine.violations))
        if not missed[0] <= at <= missed[-1]:
            missing += 1
            continue
        memory = float(np.interp(at, missed, [run.memory_mib for run in theirs]))
        saved.append(100 * (1 - mine.memory_mib / memory))
        utility.append(mine.utility - float(np.interp(at, missed, [run.utility for run in theirs])))
    return EqualViolations(tuple(saved), tuple(utility), missing)


def batch_rows(results: Found, model: str) -> list[Row]:
    """Checks 7 and 8: memory against BATCH and BATCH⁺ at equal violations, bodies of equal size."""
    whole = own(model)
    plain, adaptive = (prewarmed(model, system, 1.0) for system in PREWARMS)
    rows = [
        less("check 7", f"{model}: violations, BATCH⁺ - BATCH",
             results.violations(adaptive), results.violations(plain),
             note=f"{results.mean(plain, 'violations'):.1f} % of BATCH"),
    ]  # fmt: skip
    for system, name in NAMES.items():
        found = at_equal_violations(results, whole, system)
        metric = f"{model}: memory saved against {name} at equal violations"
        if not found.saved:
            missed = results.mean(whole, "violations")
            claim = Claim("Figs. 10, 11 memory", f"{metric}: runs for which no k_b has as many", "runs")
            expect = f"none; AsyFunc has {missed:.1f} % violations"
            rows.append(directed(claim, [float(found.outside)], expect, at_most=0))
            continue
        note = f"{found.outside} runs left out, whose violations no k_b has" if found.outside else ""
        claim = Claim("Figs. 10, 11 memory", metric, "%", "text", 8.0 if model == VIT else None, note=note)
        rows.append(
            compare(claim, found.saved, shape=SAVES)
            if model == VIT
            else directed(claim, found.saved, above=0, of="interval")
        )
    return rows


SAVES: Final = ResultLimits(above=0, of="every run")


def headline_rows(results: Found, models: Sequence[str]) -> list[Row]:
    """The publication's largest figures, and how they depend on what it leaves open."""
    rows = [_saving_row(results, models, system, prewarm) for prewarm in PRINTED_PREWARMS for system in NAMES]
    for system, name in NAMES.items():
        equal = {model: at_equal_violations(results, own(model), system) for model in models}
        equal = {model: each for model, each in equal.items() if each.saved}
        model = max(equal, key=lambda model: fmean(equal[model].saved))
        claim = Claim(
            "Figs. 10, 11 memory", f"largest saving against {name} at equal violations", "%", "text", SAVED, note=model
        )
        rows.append(compare(claim, equal[model].saved, shape=SAVES))
        model = max(equal, key=lambda model: fmean(equal[model].utility))
        claim = Claim("Fig. 12 utility", f"most above {name} at equal violations", "points", "text", 12.0, note=model)
        rows.append(compare(claim, equal[model].utility, shape=SAVES))
    best = [max(runs) for runs in zip(*(results.each(own(model), "utility_most") for model in models), strict=True)]
    rows.append(compare(Claim("Fig. 12 utility", "best period of all models", "%", "text", 96.0), best, similar=True))
    plain, adaptive = (results.each(prewarmed("InceptionV3", system, 1.0), "utility") for system in PREWARMS)
    gain = [100 * (ratio - 1) for ratio in over(adaptive, plain)]
    note = "BATCH's cores are busy with requests that are late already; BATCH⁺ drops these"
    claim = Claim("Fig. 12 utility", "InceptionV3: BATCH⁺ above BATCH", "%", "text", 11.0, note=note)
    rows.append(compare(claim, gain, shape=SAVES))
    return [*rows, *_median_rows(results)]


def _median_rows(results: Found) -> list[Row]:
    """Fig. 13: VGG16's median violation is printed as "35 % higher" without. The publication does not say whether this
    is in percent or points, nor without what."""
    rows = []
    for system, without in zip(OWN[1:], ("shadows", "adaptive batches"), strict=True):
        for weight in WEIGHTS:
            more = minus(
                results.each(own("VGG19", system, weight), "violations_median"),
                results.each(own("VGG19", "asyfunc", weight), "violations_median"),
            )
            metric = f"VGG19, {named(weight)}: median violation of a period, without {without} - asyfunc"
            claim = Claim("Fig. 13 violations", metric, "points", "text", 35.0, note="percent or points: open")
            rows.append(compare(claim, more, shape=ResultLimits(above=0)))
    return rows


def _saving_row(results: Found, models: Sequence[str], system: SystemName, prewarm: float) -> Row:
    """The largest saving of memory at one k_b, among the models where AsyFunc has no more violations."""
    metric = f"largest saving against {NAMES[system]}, k_b = {prewarm:g}, where asyfunc has no more violations"
    note = "K = 128; BATCH's own prewarming is not published"
    saved = {
        model: [
            100 * (1 - ratio)
            for ratio in over(_memory(results, own(model)), _memory(results, prewarmed(model, system, prewarm)))
        ]
        for model in models
        if results.mean(own(model), "violations") <= results.mean(prewarmed(model, system, prewarm), "violations")
    }
    if not saved:
        claim = Claim("Figs. 10, 11 memory", f"models: {metric}", "", note=note)
        return directed(claim, [0.0], "a model with no more violations", at_least=1)
    model = max(saved, key=lambda model: fmean(saved[model]))
    claim = Claim("Figs. 10, 11 memory", metric, "%", "text", SAVED, note=f"{model}; {note}")
    return compare(claim, saved[model], shape=SAVES)


# Constants and variants


def variant_rows(results: Found) -> list[Row]:
    """The effect of one changed constant; includes check 11."""
    rows = []
    for model in QUICK_MODELS:
        base = own(model)
        missed = results.violations(base, VARIANT_SEEDS)
        for variant in VARIANTS:
            trial = varied(model, variant)
            change = minus(results.violations(trial, VARIANT_SEEDS), missed)
            memory = results.mean(trial, "memory_mib", VARIANT_SEEDS) / results.mean(base, "memory_mib", VARIANT_SEEDS)
            note = f"memory × {memory:.2f}"
            claim = Claim("constants and variants", f"{model}: violations, {variant.name} - as in K = 128", "points",
                          note=note)  # fmt: skip
            rows.append(directed(claim, change, **structs.asdict(variant.expected)))
    return rows


def loading_rows(results: Found) -> list[Row]:
    """Check 12: the longer bodies take to load, the more violations shadows save."""
    rows = []
    for model in QUICK_MODELS:
        gains = [
            minus(*(results.violations(loading(model, system, body_load)) for system in ("asyfunc-nolls", "asyfunc")))
            for body_load in BODY_LOADS
        ]
        metric = f"{model}: violations that shadows save"
        none = Claim("check 12", f"{metric}, λ = {BODY_LOADS[0]:g}", "points")
        rows.append(directed(none, gains[0], "none", at_most=0.5))
        for (before, less_saved), (after, saved) in pairwise(zip(BODY_LOADS, gains, strict=True)):
            claim = Claim("check 12", f"{metric}, λ = {after:g} - λ = {before:g}", "points")
            rows.append(directed(claim, minus(saved, less_saved), above=0, of="interval"))
    return rows
