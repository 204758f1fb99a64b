"""Our system beside single techniques (bodies alone, and shadows as published) at equal resources.

Our system, `headstart`, adds shadows or bodies during a burst, whichever are cheaper. Each single technique is
simulated with several numbers of bodies (α and β divided by a factor). Between these runs, its violations are
interpolated, seed by seed: at the memory that our system takes, with any cores; at its cores, with any memory;
and with no more memory and no more cores, which gives the larger of the two. A row gives the difference in violations
between our system and the best single technique, with the same seeds for both, which were not used to choose anything.
It is `off` if the whole 95 % interval lies above 0, which means that our system misses more deadlines.

Our system also has a rule of its own for queues that are too long. If more requests wait than a replica serves in time,
the published systems drop so many of the oldest that one batch has all others (`drop`), and ours drops as few as it
must (`early_drop`). This rule has nothing to do with cold starts. So each single technique is simulated with both.

Resources are equal where the single technique has no more of either. The other rows show what it gains if it may take
more of the other resource. K tells the system which resource matters: with 128 it saves memory and uses cores.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Final, Literal

import numpy as np
from msgspec import structs

from sloop_systems.asyfunc.experiments.results import QUICK_MODELS, Found, loading, own, surge
from sloop_systems.asyfunc.experiments.runs import MODELS, VIT, AsyFuncTrial, SystemName, with_options
from sloop_systems.comparison.harness import UNSEEN, Wanted
from sloop_systems.comparison.rows import Claim, Row, directed, minus

Resource = Literal["memory_mib", "cores"]
EQUAL: Final[Mapping[str, tuple[Resource, ...]]] = {
    "with no more of either": ("memory_mib", "cores"),
    "at equal memory": ("memory_mib",),
    "at equal cores": ("cores",),
}
"""What a single technique may take no more of than ours."""
SINGLE: Final[Mapping[SystemName, str]] = {"asyfunc-nolls": "bodies alone", "asyfunc": "shadows as published"}
Overflow = Literal["drop", "early_drop"]
RULES: Final[Mapping[Overflow, str]] = {"drop": "", "early_drop": ", with our overflow rule"}
"""What a single technique does if more requests wait than a replica serves in time."""
KNOBS: Final = (0.85, 1.0, 1.15, 1.3, 1.5)
RUNS: Final = 5
OURS: Final[SystemName] = "headstart"
BODY_LOADS: Final = (15.0, 100.0)


def cells(*, quick: bool) -> dict[str, AsyFuncTrial]:
    """The experiments, each as the trial of bodies alone with the first seed."""
    if quick:
        return {QUICK_MODELS[0]: own(QUICK_MODELS[0], "asyfunc-nolls")}
    return {name: structs.replace(trial, seed=UNSEEN) for name, trial in _cells().items()}


def _cells() -> dict[str, AsyFuncTrial]:
    found = {model: own(model, "asyfunc-nolls") for model in (*MODELS, VIT)}
    found |= {f"{model}, K = GMACs": own(model, "asyfunc-nolls", 0.0) for model in QUICK_MODELS}
    found |= {
        f"{model}, λ = {body_load:g}": loading(model, "asyfunc-nolls", body_load)
        for model in QUICK_MODELS
        for body_load in BODY_LOADS
    }
    return found | {"one surge": surge("asyfunc-nolls")}


def tried(cell: AsyFuncTrial, system: SystemName, knob: float = 1.0, rule: Overflow = "drop") -> AsyFuncTrial:
    """The same experiment with another system and rule, and with α and β divided by a factor."""
    trial = structs.replace(cell, system=system)
    if rule == "early_drop":
        trial = with_options(trial, batch__overflow=rule)
    return trial if knob == 1.0 else with_options(trial, alpha=0.8 / knob, beta=0.6 / knob)


def wanted_planner(*, quick: bool) -> Wanted[AsyFuncTrial]:
    """All trials with the number of their seeds."""
    seeds = 1 if quick else RUNS
    found = [
        (tried(cell, system, knob, rule), seeds)
        for cell in cells(quick=quick).values()
        for system in SINGLE
        for rule in RULES
        for knob in KNOBS
    ]
    return found + [(tried(cell, OURS), seeds) for cell in cells(quick=quick).values()]


def at_equal(
    results: Found, cell: AsyFuncTrial, system: SystemName, rule: Overflow, resources: Sequence[Resource], seeds: int
) -> list[float]:
    """The violations of a single technique with no more of these resources than ours takes, in percent, by seed. Beyond
    what was simulated, those of the nearest run."""
    wanted = results.of(tried(cell, OURS), seeds)
    runs = [results.of(tried(cell, system, knob, rule), seeds) for knob in KNOBS]
    found = []
    for place, mine in enumerate(wanted):
        missed = []
        for resource in resources:
            own_runs = sorted((getattr(each[place], resource), each[place].violations) for each in runs)
            taken, own_missed = zip(*own_runs, strict=True)
            missed.append(float(np.interp(getattr(mine, resource), taken, own_missed)))
        found.append(max(missed))
    return found


def planner_rows(results: Found, *, quick: bool) -> list[Row]:
    """Each experiment with no more of either resource, at equal memory and at equal cores, with each rule."""
    seeds = 1 if quick else RUNS
    rows: list[Row] = []
    counts = []
    for rule, equal in product(RULES, EQUAL):
        found = {name: _row(results, name, cell, rule, equal, seeds) for name, cell in cells(quick=quick).items()}
        worse = [name for name, row in found.items() if row.verdict == "off"]
        metric = f"comparisons {equal} in which ours misses more{RULES[rule]}"
        claim = Claim("our planner", metric, f"of {len(found)}", note="; ".join(worse))
        expect = "none, as far as the 95 % intervals can tell"
        counts.append(directed(claim, [float(len(worse))], expect, at_most=0))
        rows += found.values()
    return rows + counts


def _row(results: Found, name: str, cell: AsyFuncTrial, rule: Overflow, equal: str, seeds: int) -> Row:
    ours = results.violations(tried(cell, OURS), seeds)
    others = {system: at_equal(results, cell, system, rule, EQUAL[equal], seeds) for system in SINGLE}
    best = min(SINGLE, key=lambda system: fmean(others[system]))
    notes = [f"{fmean(ours):.2f} and {fmean(others[best]):.2f} %"]
    for resource in EQUAL[equal]:
        unit = "MiB" if resource == "memory_mib" else "cores"
        taken = results.mean(tried(cell, OURS), resource, seeds)
        notes.append(f"{taken:.4g} {unit}")
        edge = max(results.mean(tried(cell, best, knob, rule), resource, seeds) for knob in KNOBS)
        if taken > edge:
            notes.append(f"{SINGLE[best]} was simulated with at most {edge:.4g}")
    metric = f"{name}: violations {equal}, ours - {SINGLE[best]}{RULES[rule]}"
    claim = Claim("our planner", metric, "points", note="; ".join(notes))
    return directed(claim, minus(ours, others[best]), "no more than the best single technique", at_most=0, of="doubt")
