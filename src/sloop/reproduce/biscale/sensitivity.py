"""What happens in time, and what it depends on: the course of E1, E0 simulated, E6's drop rules, cold starts, guesses.

Source: dissertation chapter P4, evaluation; acceptance bounds: the specification, 7.5 C to G.
"""

from statistics import median
from typing import Final

from msgspec import structs

from sloop.reproduce.biscale.evaluation import GROUP, KINDS, NAMES, biscale, mean, rival, three
from sloop.reproduce.biscale.trials import Dropping, Outcome, Results, Trial, Wanted
from sloop.reproduce.rows import Claim, Row, bounded, equals, shaped

JUMP_S: Final = 57
PLATEAU: Final = slice(100, 380)
FINAL: Final = slice(520, 660)
SEEDS_C: Final = 10
FIRST_S: Final = 100
"""E6 looks at the first 100 seconds."""
COLDS_S: Final = (2.0, 5.5, 12.0)
RULES: Final[tuple[Dropping, ...]] = ("age", "age3", "never")


def dropping(kind: str, rule: Dropping) -> Trial:
    """The first 100 seconds of video under a drop rule."""
    trial = biscale("video", "now", rule) if kind == "biscale" else rival("video", kind, rule)
    return structs.replace(trial, seconds=FIRST_S)


def cold(kind: str, cold_s: float) -> Trial:
    """Video with another time to start a replica."""
    trial = biscale("video", "now", "age") if kind == "biscale" else rival("video", kind, "age")
    return structs.replace(trial, cold_s=cold_s)


def guessing(pipeline: str, predictor: str) -> Trial:
    """With another predictor, the reference now."""
    return structs.replace(biscale(pipeline, "now"), predictor="lstm" if predictor == "lstm" else "last10")


def burst(kind: str, workload: str = "burst") -> Trial:
    """The motivating workloads."""
    return Trial(pipeline=workload, kind="fa2" if kind == "fa2" else "biscale", seconds=60)


def trials(*, quick: bool) -> Wanted:
    """All that `rows` reads beyond what `evaluation` does."""
    seeds = 1 if quick else GROUP
    wanted = [(dropping(kind, rule), seeds) for kind in KINDS for rule in RULES]
    wanted += [(burst(kind), seeds) for kind in ("biscale", "fa2")] + [(burst("biscale", "plateau"), seeds)]
    if not quick:
        wanted += [(trial, SEEDS_C) for trial in (biscale("video"), rival("video", "fa2"))]
        wanted += [(cold(kind, cold_s), GROUP) for kind in ("biscale", "fa2") for cold_s in COLDS_S]
        wanted += [(guessing(name, predictor), GROUP) for name in NAMES for predictor in ("last10", "lstm")]
    return wanted


def rows(results: Results, *, quick: bool) -> list[Row]:
    """The course, drop rules, motivation; unless quick, cold starts and predictors."""
    made = [*_told(results), *_course(results), *_dropping(results), *_motivation(results)]
    return made if quick else [*made, *_cold(results), *_guessing(results)]


def _rise(outcome: Outcome, within_s: int) -> float:
    """Cores soon after the jump, over those before it."""
    before = outcome.cores_by_second[JUMP_S - 1]
    return max(outcome.cores_by_second[JUMP_S : JUMP_S + within_s + 1]) / before


def _single_again_s(outcome: Outcome) -> float:
    """When every replica has one core again, after the jump had made some larger."""
    seconds = range(JUMP_S, len(outcome.single_by_second))
    grown = next((t for t in seconds if outcome.single_by_second[t] < 1.0), len(outcome.single_by_second))
    return float(next((t for t in seconds if t > grown and outcome.single_by_second[t] == 1.0), seconds[-1]))


def _grown_s(outcome: Outcome) -> float:
    """Seconds from the jump until there are 1.5 times the cores. (What was ordered before it may come soon after.)"""
    cores = outcome.cores_by_second
    seconds = range(JUMP_S, len(cores))
    return float(next((t for t in seconds if cores[t] >= 1.5 * cores[JUMP_S - 1]), len(cores)) - JUMP_S)


def _recovery_s(outcome: Outcome) -> float:
    """Seconds from the jump until three in a row have less than 5 % violations."""
    bad = outcome.by_second
    seconds = range(JUMP_S + 1, len(bad) - 3)
    return float(next((t for t in seconds if max(bad[t : t + 3]) < 5), len(bad)) - JUMP_S)


def _told(results: Results) -> list[Row]:
    """What the publication tells of E1's first minutes."""
    own, horizontal = results.of(biscale("video")), results.of(rival("video", "fa2"))

    def claim(metric: str, unit: str, paper: float, note: str = "") -> Claim:
        return Claim(experiment="E1 course", metric=metric, unit=unit, paper=paper, note=note)

    first = [mean(outcome.by_second[1:6]) for outcome in horizontal]
    recovery, quick = [_recovery_s(outcome) for outcome in horizontal], [_recovery_s(outcome) for outcome in own]
    few = "the publication: a few seconds"
    return [
        bounded(
            claim("FA2's violations until its replicas are there", "%", 50, "seconds 1 to 5"),
            [mean(first)],
            at_least=50,
            shape=mean(first) > mean([mean(outcome.by_second[1:6]) for outcome in own]),
        ),
        equals(claim("FA2 recovers from the jump", "s", 15), recovery, within=5, shape=mean(recovery) > mean(quick)),
        bounded(claim("Biscale recovers from the jump", "s", 5, few), quick, at_most=5, shape=mean(quick) <= 5),
    ]


def _course(results: Results) -> list[Row]:
    """Bound C: up at once, halved when small replicas are there."""
    found, horizontal = results.of(biscale("video")), results.of(rival("video", "fa2"))

    def claim(metric: str, unit: str, note: str = "", paper: float | None = None) -> Claim:
        return Claim(experiment="bound C", metric=f"video: {metric}", unit=unit, note=note, paper=paper)

    quickly = [100 * mean([float(_rise(outcome, 3) >= 1.5) for outcome in found])]
    again = [_single_again_s(outcome) for outcome in found]
    share = [mean(o.cores_by_second[PLATEAU]) / max(o.cores_by_second) for o in found]
    single = [100 * mean(outcome.single_by_second[FINAL]) for outcome in found]
    final = [mean(outcome.cores_by_second[FINAL]) for outcome in found]
    theirs = mean([mean(outcome.cores_by_second[FINAL]) for outcome in horizontal])
    growth = [_grown_s(outcome) for outcome in horizontal]
    halved = "the publication: cores halve after the surge"
    return [
        bounded(
            claim("seeds whose cores rise 1.5 times within 3 s of the jump", "%"),
            quickly,
            at_least=80,
            shape=quickly[0] > 0,
        ),
        bounded(
            claim("FA2's cores have risen 1.5 times, after the jump", "s", "a cold start is 5.5 s"),
            growth,
            at_least=5,
            shape=min(growth) > 2,
        ),
        bounded(
            claim("all replicas have one core again, median", "s"),
            [median(again)],
            at_least=80,
            at_most=90,
            shape=median(again) <= 105,
        ),
        bounded(
            claim("all replicas have one core again, each seed", "s"),
            again,
            at_least=70,
            at_most=105,
            shape=median(again) <= 105,
        ),
        bounded(
            claim("cores on the plateau over the peak", "%", halved),
            [100 * mean(share)],
            at_most=65,
            shape=max(share) < 1,
        ),
        bounded(claim("time with single cores in the last phase", "%"), single, at_least=60, shape=mean(single) >= 60),
        bounded(claim("cores in the last phase", "cores"), [mean(final)], at_most=7),
        bounded(
            claim("cores in the last phase over FA2's", "×", "the publication: equal cost when stable"),
            [mean(final) / theirs],
            at_most=1.6,
        ),
    ]


def _dropping(results: Results) -> list[Row]:
    """E6 and bound D."""
    made = []
    bounds = {"biscale": (1.0, None), "fa2": (None, 20.0), "vertical": (None, 40.0)}
    for kind in KINDS:
        found = [results.violations(dropping(kind, rule)) for rule in RULES]
        means = [mean(values) for values in found]
        for rule, values in zip(RULES, found, strict=True):
            most, least = bounds[kind]
            if rule == "age" and kind != "biscale":
                least = None
            about = Claim(
                experiment="E6 dropping",
                metric=f"violations in the first 100 s, {kind}, {rule}",
                unit="%",
                paper=most if least is None else least,
                note="printed as a bound" if most or least else "",
            )
            if most is None and least is None:
                made.append(shaped(about, values, shape=means[0] <= min(means) + 1e-9, expect="the least of the three"))
            else:
                made.append(bounded(about, [mean(values)], at_most=most, at_least=least, shape=means[0] <= means[2]))
        if kind != "biscale":
            about = Claim(experiment="bound D", metric=f"{kind}: least step from 1 × to 3 × to never", unit="points")
            steps = [means[1] - means[0], means[2] - means[1]]
            made.append(bounded(about, [min(steps)], at_least=0, shape=means[2] >= means[0]))
    return made


def _motivation(results: Results) -> list[Row]:
    """Fig. P4.1 and P4.2, simulated with a model as fast as theirs."""

    def missed(kind: str) -> list[float]:
        return [outcome.violations for outcome in results.of(burst(kind))]

    times = mean(missed("fa2")) / max(mean(missed("biscale")), 0.01)
    about = Claim(experiment="E0 motivation", metric="fewer violations in a burst, in place", unit="×", paper=5.0)
    made = [bounded(structs.replace(about, note="simulated"), [times], at_least=5, shape=times > 1)]
    saved = []
    for outcome in results.of(burst("biscale", "plateau")):
        peak, settled = max(outcome.cores_by_second[10:30]), mean(outcome.cores_by_second[40:49])
        saved.append(100 * (1 - settled / peak))
    about = structs.replace(
        about, metric="cores saved once small replicas are there", unit="%", paper=40.0, note="simulated"
    )
    return [*made, equals(about, saved, within=10, shape=min(saved) > 0)]


def _cold(results: Results) -> list[Row]:
    """Bound E: who depends on how fast replicas start."""
    made, grown = [], {}
    derived = {"biscale": (0.3, 1.4), "fa2": (2.9, 10.0)}
    for kind in ("biscale", "fa2"):
        means = [mean(results.violations(cold(kind, cold_s))) for cold_s in COLDS_S]
        grown[kind] = means[-1] - means[0]
        for place, known in ((0, derived[kind][0]), (-1, derived[kind][1])):
            found = results.violations(cold(kind, COLDS_S[place]))
            metric = f"video, drop by age: violations, {kind}, {COLDS_S[place]:g} s to start"
            about = Claim(experiment="cold start", metric=metric, unit="%", derived=known)
            made.append(equals(about, found, within=max(0.5, known), shape=grown[kind] > 0))
    about = Claim(experiment="bound E", metric="growth with the time to start, FA2's over Biscale's", unit="×")
    ratio = grown["fa2"] / max(grown["biscale"], 0.01)
    return [*made, bounded(about, [ratio], at_least=3, shape=ratio > 1)]


def _guessing(results: Results) -> list[Row]:
    """Bound G: the predictor decides on cost, not on violations."""
    made = []
    for name in NAMES:
        known = three(name, "now", "predictive")[0]
        base, base_cores = mean(results.violations(known, GROUP)), mean(results.cores(known, GROUP))
        for predictor in ("last10", "lstm"):
            guess = guessing(name, predictor)
            apart = mean(results.violations(guess)) - base
            about = Claim(
                experiment="bound G", metric=f"{name}: violations, {predictor} instead of the oracle", unit="points"
            )
            made.append(bounded(about, [abs(apart)], at_most=0.5, shape=abs(apart) <= 1))
            about = Claim(experiment="bound G", metric=f"{name}: cores, {predictor} over the oracle", unit="×")
            more = [cores / base_cores for cores in results.cores(guess)]
            if name == "video" and predictor == "last10":
                made.append(equals(structs.replace(about, derived=1.5), more, within=0.25, shape=mean(more) > 1))
            else:
                made.append(shaped(about, more, shape=mean(more) > 1, expect="more than 1: what a guess costs"))
    return made
