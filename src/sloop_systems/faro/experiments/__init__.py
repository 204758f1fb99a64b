"""Faro reproduced: ten applications on clusters that are too small and on one that is not, mixed models, a hundred
applications, and ours beside them.

Source: Jeon et al., Faro, EuroSys 2025. Its abstract is at hand, whose two figures are `paper`, and its repository.
Figures of its text are taken from a reader's summary: they are `derived`, and the rows say so.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from sloop.api.reports import Figure, Panel
from sloop_systems.comparison.harness import Progress, Reproduction, Results, Wanted, bars, run_trials, silent
from sloop_systems.comparison.rows import Claim, Row, bounded, compare, minus, over
from sloop_systems.faro.experiments.runs import FOLDER, HUNDRED, TEN, FaroResult, FaroTrial
from sloop_systems.faro.solver import tail_ms

SOURCE: Final = "Jeon et al., Faro, EuroSys 2025"
SUMMARY: Final = "as a reader's summary quotes the paper"
IN_PRINT: Final = {2.3, 23.0}
"""The factors in the abstract."""
SEEDS, SEEDS_FEW = 5, 3
FIRST_MIN, MINUTES, MINUTES_QUICK = 180, 24, 10
"""The part of the six hours that is simulated, fixed before any result was seen."""
OTHER_MIN: Final = 60
"""Where another part begins, fixed before any of its results was seen, and after `SPARE` was made for the first."""

Found = Results[FaroResult]


class Contestant(NamedTuple):
    """A system, and what its runs are called."""

    label: str
    system: str = "faro"
    divide: str = ""
    idle: str = "leave"


VARIANTS: Final = (
    Contestant("Faro-Sum", "faro-sum"),
    Contestant("Faro-Fair", "faro-fair"),
    Contestant("Faro-FairSum"),
    Contestant("Faro-PenaltySum", "faro-penalty-sum"),
    Contestant("Faro-PenaltyFairSum", "faro-penalty"),
)
BASELINES: Final = (
    Contestant("fair share", "static"),
    Contestant("one-shot", "oneshot"),
    Contestant("AIAD", "aiad"),
    Contestant("MArk", "mark"),
)
WORTH: Final = Contestant("worth", divide="worth")
SPARE: Final = Contestant("worth, spare replicas", divide="worth", idle="replicas")
MAX_MIN: Final = Contestant("max-min", divide="max_min")
"""`WORTH` and `MAX_MIN` have the scaling policy, the queue and the forecast of Faro, so that nothing differs but the
division; `SPARE` also uses workers that no plan needs."""
OURS: Final = (WORTH, SPARE)
OTHERS: Final = (MAX_MIN, *VARIANTS, *BASELINES)
ALL: Final = (*OURS, *OTHERS)
FEW: Final = (*OURS, MAX_MIN, VARIANTS[2], BASELINES[2])
"""Those of `--quick`, but on the smallest cluster."""
LATER: Final = (*OURS, MAX_MIN, VARIANTS[1], BASELINES[0])
"""Those that are compared in other minutes."""
ENOUGH: Final = 44


class Scene(NamedTuple):
    """A cluster of ten applications."""

    workers: int
    is_mixed: bool = False
    first_min: int = FIRST_MIN

    def __str__(self) -> str:
        minutes = f", from minute {self.first_min}" if self.first_min != FIRST_MIN else ""
        return f"{self.workers} workers" + (", mixed models" if self.is_mixed else "") + minutes

    @property
    def name(self) -> str:
        """Of its figure."""
        minutes = f"-{self.first_min}" if self.first_min != FIRST_MIN else ""
        return "mixed" if self.is_mixed else f"workers-{self.workers}{minutes}"


SCENES: Final = (Scene(32), Scene(36), Scene(40), Scene(ENOUGH), Scene(32, is_mixed=True))
LATER_SCENES: Final = tuple(Scene(workers, first_min=OTHER_MIN) for workers in (32, 36, 40, ENOUGH))


class Printed(NamedTuple):
    """By which factors Faro's best variant is printed to be better than its baselines: the least and the largest."""

    scene: Scene
    violations: tuple[float, float]
    lost: tuple[float, float]


PRINTED: Final = (
    Printed(SCENES[0], (2.8, 8.4), (2.5, 6.1)),
    Printed(SCENES[1], (2.3, 12.3), (1.7, 9.0)),
    Printed(SCENES[-1], (4.0, 23.0), (2.3, 13.1)),
)


def trial_of(who: Contestant, scene: Scene, *, quick: bool, file: str = TEN) -> FaroTrial:
    """A run of these minutes."""
    return FaroTrial(
        system=who.system,
        divide=who.divide,
        idle=who.idle,
        workers=scene.workers,
        first_min=scene.first_min,
        minutes=MINUTES_QUICK if quick else MINUTES,
        file=file,
        is_mixed=scene.is_mixed,
    )


def trials_of(group: Iterable[Contestant], scene: Scene, *, quick: bool) -> list[FaroTrial]:
    """The runs of those of a group that are simulated."""
    there = LATER if scene.first_min != FIRST_MIN else FEW if quick and scene != SCENES[0] else ALL
    return [trial_of(who, scene, quick=quick) for who in group if who in there]


def scenes(*, quick: bool) -> tuple[Scene, ...]:
    """All clusters and minutes."""
    return SCENES if quick else (*SCENES, *LATER_SCENES)


def hundred(*, quick: bool) -> FaroTrial:
    """The run of a hundred applications on ten times 32 workers."""
    return trial_of(WORTH, Scene(320), quick=quick, file=HUNDRED)


def wanted(*, quick: bool) -> Wanted[FaroTrial]:
    """All trials and their seeds. `quick`: ten minutes, one seed and few systems."""
    found: list[tuple[FaroTrial, int]] = [(hundred(quick=quick), 1)]
    for scene in scenes(quick=quick):
        seeds = 1 if quick else SEEDS if scene.workers < 40 and not scene.is_mixed else SEEDS_FEW
        found += [(trial, seeds) for trial in trials_of(ALL, scene, quick=quick)]
    return found


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates less (`wanted`). Without the published tables nothing is simulated, and an assumption
    says so."""
    missing = [name for name in (TEN, HUNDRED) if data is None or not (data / FOLDER / name).exists()]
    rows, figures, assumed = queue_rows(), list[Figure](), list[str]()
    if missing:
        assumed += [f"nothing was simulated: {FOLDER}/{missing[0]} is not in the folder of public data (`--data`)"]
    else:
        minutes = MINUTES_QUICK if quick else MINUTES
        found: Found = run_trials(wanted(quick=quick), str(data), processes=processes, progress=progress)
        rows += [*published_rows(found, quick=quick), *our_rows(found, quick=quick)]
        figures = [figure_of(found, scene, quick=quick) for scene in scenes(quick=quick)]
        assumed += [
            f"minutes {FIRST_MIN} to {FIRST_MIN + minutes} of 360, of which the first seven do not count",
            "forecasts: a process of first order on the last ten minutes instead of N-HiTS trained on ten days",
            "requests take 154 ms on average and are believed to take 180 ms, as in the repository's simulator",
            "a worker starts in 65 s; the repository's simulator has 35 s",
        ]
    return Reproduction(
        "faro", SOURCE, tuple(rows), tuple(figures), tuple(assumed), models="ResNet34, ResNet18",
        deadlines="four times the duration of a request: 720 and 400 ms",
    )  # fmt: skip


def queue_rows() -> list[Row]:
    """How many workers serve 40 requests/s of 150 ms within 600 ms."""
    rate_rps, service_ms, slo_ms = 40.0, 150.0, 600.0
    tails = tail_ms(np.array([rate_rps]), service_ms, 20, 0.9999)[:, 0]
    needed = 1 + int(np.argmax(tails <= slo_ms))
    bound = int(np.ceil(rate_rps * service_ms / slo_ms))
    claim = Claim(
        "estimates", "workers by M/D/c at the 99.99th percentile", "replicas", "exact", derived=8, note=SUMMARY
    )
    other = Claim("estimates", "workers by the upper bound", "replicas", "exact", derived=10, note=SUMMARY)
    return [compare(claim, [needed]), compare(other, [bound])]


def best_of(found: Found, trials: Iterable[FaroTrial], field: str = "violations") -> FaroTrial:
    """The trial with the smallest mean."""
    return min(trials, key=lambda trial: found.mean(trial, field))


def published_rows(found: Found, *, quick: bool) -> list[Row]:
    """By how much the best variant is better than the best and the worst baseline, in violations (their mean rate
    by minute) and lost utility."""
    rows: list[Row] = []
    for printed in PRINTED:
        variants, baselines = (trials_of(group, printed.scene, quick=quick) for group in (VARIANTS, BASELINES))
        for field, what, figures in (
            ("rate", "violations", printed.violations),
            ("lost", "lost utility", printed.lost),
        ):
            best = best_of(found, variants, field)
            factors = [_ratios(found, other, best, field) for other in baselines]
            for choose, word, figure in ((min, "best", figures[0]), (max, "worst", figures[1])):
                is_printed = field == "rate" and figure in IN_PRINT
                claim = Claim(
                    str(printed.scene),
                    f"{what} of the {word} baseline, over Faro's",
                    "×",
                    "text",
                    paper=figure if is_printed else None,
                    derived=None if is_printed else figure,
                    note="the abstract" if is_printed else SUMMARY,
                )
                rows.append(compare(claim, choose(factors, key=fmean), similar=True))
    faro = trial_of(VARIANTS[2], SCENES[0], quick=quick)
    claim = Claim(
        "32 workers", "violations of Faro by minute", "%", "text", derived=6.9, note=f"{SUMMARY}, of one variant"
    )
    return [*rows, compare(claim, found.each(faro, "rate"), similar=True)]


def our_rows(found: Found, *, quick: bool) -> list[Row]:
    """The bounds that ours is to keep, with and without spare replicas."""
    rows = [row for who in OURS for row in _rows_of(found, who, quick=quick)]
    enough = found.mean(trial_of(WORTH, Scene(ENOUGH), quick=quick), "violations")
    claim = Claim(
        "ours, 36 workers",
        "violations with enough workers (44), over those of max-min with 36",
        "×",
        note="above 0.5, no division that gives at most what these plans want has half of max-min's",
    )
    ratio = enough / found.mean(trial_of(MAX_MIN, SCENES[1], quick=quick), "violations")
    rows.append(bounded(claim, [ratio], at_least=0.5, runs=1 if quick else SEEDS_FEW))
    claim = Claim("ours, a hundred applications", "lost utility of 100 on 320 workers, over ten times that of 10", "×")
    ratio = found.mean(hundred(quick=quick), "lost") / found.mean(trial_of(WORTH, SCENES[0], quick=quick), "lost")
    return [*rows, bounded(claim, [ratio], at_least=0.95, at_most=1.05)]


def _rows_of(found: Found, who: Contestant, *, quick: bool) -> list[Row]:
    """Of one of ours: beside Faro's best variant and max-min where workers are short, and beside all others."""
    rows: list[Row] = []
    for scene in scenes(quick=quick):
        where, own = f"ours, {scene}", trial_of(who, scene, quick=quick)
        if scene.workers < 40 and not scene.is_mixed:
            best = best_of(found, trials_of(VARIANTS, scene, quick=quick))
            claim = Claim(where, f"violations of {who.label}, over those of Faro's best variant", "×", note=best.system)
            rows.append(bounded(claim, _ratios(found, own, best), at_most=1.0, mean=True))
            claim = Claim(where, f"violations of {who.label}, over those of max-min", "×")
            max_min = trial_of(MAX_MIN, scene, quick=quick)
            rows.append(bounded(claim, _ratios(found, own, max_min), at_most=0.5, mean=True))
        if scene.workers == ENOUGH:
            best = best_of(found, trials_of(OTHERS, scene, quick=quick))
            claim = Claim(where, f"violations of {who.label}, less the least of all others", "points")
            rows.append(
                bounded(claim, minus(*(found.violations(each) for each in (own, best))), at_most=0.1, mean=True)
            )
    return rows


def _ratios(found: Found, one: FaroTrial, other: FaroTrial, field: str = "violations") -> list[float]:
    """Run by run; what is 0 counts as a hundredth of a percent."""
    below = [max(0.01 if field != "lost" else 1e-4, each) for each in found.each(other, field)]
    return over(found.each(one, field), below)


def figure_of(found: Found, scene: Scene, *, quick: bool) -> Figure:
    """Late requests, slow minutes and lost utility of all systems on a cluster."""
    there = [who for who in ALL if trials_of([who], scene, quick=quick)]
    trials, ticks = trials_of(there, scene, quick=quick), tuple(who.label for who in there)
    panels = tuple(
        Panel(y_label=label, ticks=ticks, series=(bars(label, [found.each(trial, field) for trial in trials]),))
        for label, field in (("late, %", "violations"), ("slow minutes, %", "minutes"), ("lost utility", "lost"))
    )
    late = [f"{found.mean(trial, 'violations'):.2f} %" for trial in trials]
    return Figure(
        name=scene.name,
        title=f"Ten applications on {scene}",
        x_label="",
        panels=panels,
        alt="Late requests: " + "; ".join(f"{who.label} {each}" for who, each in zip(there, late, strict=True)),
    )
