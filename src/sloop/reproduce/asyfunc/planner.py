"""Our system beside single techniques (bodies alone, and shadows as published) at equal resources.

Our system, `headstart`, adds shadows or bodies during a burst, whichever are cheaper. Each single technique is
simulated with several numbers of bodies (α and β divided by a factor). Between these runs, its violations are
interpolated, seed by seed, at the memory and at the cores that our system takes. A row gives the difference in
violations between our system and the best single technique, with the same seeds for both, which were not used to choose
parameters. It is `off` if the whole 95 % interval lies above 0, which means that our system misses more deadlines.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final, Literal

import numpy as np
from msgspec import structs

from sloop.reproduce.asyfunc.experiments import QUICK_MODELS, Found, loading, own, surge
from sloop.reproduce.asyfunc.runs import MODELS, VIT, AsyFuncTrial, SystemName, with_options
from sloop.reproduce.harness import UNSEEN, Wanted
from sloop.reproduce.rows import Claim, Row, difference, directed

Resource = Literal["memory_mib", "cores"]
RESOURCES: Final[Mapping[Resource, str]] = {"memory_mib": "memory", "cores": "cores"}
SINGLE: Final[Mapping[SystemName, str]] = {"asyfunc-nolls": "bodies alone", "asyfunc": "shadows as published"}
KNOBS: Final = (1.0, 1.15)
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


def tried(cell: AsyFuncTrial, system: SystemName, knob: float = 1.0) -> AsyFuncTrial:
    """The same experiment with another system, and with α and β divided by a factor."""
    trial = structs.replace(cell, system=system)
    return trial if knob == 1.0 else with_options(trial, alpha=0.8 / knob, beta=0.6 / knob)


def wanted_planner(*, quick: bool) -> Wanted[AsyFuncTrial]:
    """All trials with the number of their seeds."""
    seeds = 1 if quick else RUNS
    found = [
        (tried(cell, system, knob), seeds)
        for cell in cells(quick=quick).values()
        for system in SINGLE
        for knob in KNOBS
    ]
    return found + [(tried(cell, OURS), seeds) for cell in cells(quick=quick).values()]


def at_equal(results: Found, cell: AsyFuncTrial, system: SystemName, resource: Resource, seeds: int) -> list[float]:
    """The violations of a single technique in percent, by seed, if it takes as much of a resource as our system.
    Outside the simulated range, those of the nearest run."""
    wanted = results.each(tried(cell, OURS), resource, seeds)
    runs = [results.of(tried(cell, system, knob), seeds) for knob in KNOBS]
    found = []
    for place, at in enumerate(wanted):
        own_runs = sorted((getattr(each[place], resource), each[place].violations) for each in runs)
        found.append(float(np.interp(at, [taken for taken, _ in own_runs], [missed for _, missed in own_runs])))
    return found


def planner_rows(results: Found, *, quick: bool) -> list[Row]:
    """Each experiment at equal memory and at equal cores."""
    seeds = 1 if quick else RUNS
    found = [
        _row(results, name, cell, resource, seeds)
        for name, cell in cells(quick=quick).items()
        for resource in RESOURCES
    ]
    worse = [row.metric.partition(": ")[0] for row in found if row.verdict == "off"]
    claim = Claim("our planner", f"comparisons in which ours misses more, of {len(found)}", "", note="; ".join(worse))
    expect = "none, as far as the 95 % intervals can tell"
    return [*found, directed(claim, [float(len(worse))], holds=not worse, expect=expect)]


def _row(results: Found, name: str, cell: AsyFuncTrial, resource: Resource, seeds: int) -> Row:
    ours = results.violations(tried(cell, OURS), seeds)
    others = {system: at_equal(results, cell, system, resource, seeds) for system in SINGLE}
    best = min(SINGLE, key=lambda system: fmean(others[system]))
    more = difference(ours, others[best])
    taken = results.mean(tried(cell, OURS), resource, seeds)
    note = f"{fmean(ours):.2f} and {fmean(others[best]):.2f} %; {taken:.4g} {'MiB' if resource != 'cores' else 'cores'}"
    edge = max(results.mean(tried(cell, best, knob), resource, seeds) for knob in KNOBS)
    if taken > edge:
        note += f"; {SINGLE[best]} was simulated with at most {edge:.4g}"
    claim = Claim(
        "our planner", f"{name}: violations at equal {RESOURCES[resource]}, ours - {SINGLE[best]}", "points",
        note=f"{more}; {note}",
    )  # fmt: skip
    values: Sequence[float] = [one - other for one, other in zip(ours, others[best], strict=True)]
    expect = "no more than the best single technique, as far as the 95 % interval can tell"
    return directed(claim, values, holds=not more.is_above, expect=expect)
