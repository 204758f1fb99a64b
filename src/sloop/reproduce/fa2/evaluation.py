"""FA2's evaluation, simulated: steady load, loads that move, and everybody on the same replicas.

Experiments are named as in the specification: E1 steady, E2 fluctuating and random, E3 two long traces, E4 and E7 fixed
resources on cores and slices; 7.3 its statistical checks. Source: Razavi et al., FA2 (RTAS 2022), evaluation; `derived`
numbers are the specification's own simulation (its §7.3).
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Final

from msgspec import structs

from sloop.reproduce.fa2.trials import SYSTEMS, Outcome, Results, Trial
from sloop.reproduce.rows import Claim, Row, bounded, equals, shaped

PLANS: Final = ("optimal", "fa2", "inferline", "ds2", "grandslam")
STEADY: Final = tuple((paths, rate) for paths in (3, 6) for rate in (8, 27))
MET: Final = ((3, 12), (3, 18), (3, 24), (3, 50))
"""Paths and rates at which FA2 is to keep 1.5 % with head-room in the profile (§7.3-8), beside those of `STEADY`."""
RATIOS: Final = (1.0, 1.1, 1.15, 1.25)
MOVING: Final = ("fluctuating", "random")
LONG: Final = ("diurnal", "square")
LOOKBACK_S: Final = 30
ALONE: Final = "our own trace with the published shape: the functions chosen from Azure's are not named"


def steady(plan: str, paths: int, rate: int) -> Trial:
    """Everybody on replicas of its own choice."""
    return Trial(plan=plan, paths=paths, load=f"steady {rate}")


def fixed(plan: str, rate: int = 50) -> Trial:
    """Everybody on the optimum's replicas, with batches of its own."""
    return Trial(plan=plan, pools="optimal", load=f"steady {rate}")


def at(ratio: float) -> Trial:
    """FA2 where the profile has so much head-room."""
    return Trial(plan="fa2", load="steady 24", ratio=ratio)


def slices(plan: str, rate: int = 10) -> Trial:
    """Six paths on slices, on the optimum's replicas."""
    return Trial(hardware="gpu", paths=6, plan=plan, pools="optimal", load=f"steady {rate}")


def moving(system: str, load: str) -> Trial:
    """The loop of ten seconds under a load that moves."""
    return Trial(system=system, load=load)


def cautious(load: str) -> Trial:
    """FA2 for the busiest ten seconds of thirty; ours."""
    return Trial(system="fa2", load=load, lookback_s=LOOKBACK_S)


class Lengths:
    """How long the runs are, in seconds; `quick` ones leave the long traces out."""

    def __init__(self, *, quick: bool) -> None:
        self.steady = 100 if quick else 300
        self.fixed = 100 if quick else 400
        self.moving = 240 if quick else 600
        self.long = 0 if quick else 2400


class Evaluation:
    """All trials at their lengths, and the rows that follow from their outcomes."""

    def __init__(self, *, quick: bool) -> None:
        self.lengths = Lengths(quick=quick)
        self.moving = MOVING[:1] if quick else MOVING

    def trials(self) -> list[Trial]:
        """All that `rows` reads, once for each seed; the long traces only once."""
        return list(dict.fromkeys([*self._steady(), *self._fixed(), *self._moving()]))

    def long(self) -> list[Trial]:
        """E3's, none where it is to be quick."""
        wanted = [moving(system, load) for load in LONG for system in SYSTEMS] if self.lengths.long else []
        return [structs.replace(trial, seconds=self.lengths.long) for trial in wanted]

    def of_steady(self, trial: Trial) -> Trial:
        """At the length that is played."""
        return structs.replace(trial, seconds=self.lengths.steady)

    def of_fixed(self, trial: Trial) -> Trial:
        """At the length that is played."""
        return structs.replace(trial, seconds=self.lengths.fixed)

    def of_moving(self, trial: Trial) -> Trial:
        """At the length that is played."""
        return structs.replace(trial, seconds=self.lengths.moving)

    def _steady(self) -> list[Trial]:
        wanted = [steady(plan, paths, rate) for paths, rate in STEADY for plan in PLANS]
        wanted += [steady("fa2", paths, rate) for paths, rate in MET]
        wanted += [at(ratio) for ratio in RATIOS]
        wanted += [slices("optimal", rate) for rate in (8, 10, 27)]
        return [self.of_steady(trial) for trial in wanted]

    def _fixed(self) -> list[Trial]:
        wanted = [fixed(plan) for plan in PLANS] + [fixed("grandslam", rate) for rate in (27, 8)] + [slices("fa2")]
        return [self.of_fixed(trial) for trial in wanted]

    def _moving(self) -> list[Trial]:
        wanted = [moving(system, load) for load in self.moving for system in SYSTEMS]
        return [self.of_moving(trial) for trial in [*wanted, *map(cautious, self.moving)]]

    def rows(self, results: Results, long: Results | None) -> list[Row]:
        """Every experiment's."""
        made = [*self._e1(results), *self._checks(results), *self._e2(results)]
        return [*made, *(self._e3(long) if long else []), *self._e4(results), *self._e7(results)]

    def _e1(self, results: Results) -> list[Row]:
        made = []
        for paths, rate in STEADY:
            where = f"{paths} paths at {rate}/s"
            used = {}
            for plan in PLANS:
                trial = self.of_steady(steady(plan, paths, rate))
                used[plan] = mean(results.each(trial, "utilisation"))
                count = mean(results.each(trial, "replicas"))
                note = f"{count:.0f} replicas, {used[plan]:.0f} % busy; published: all below 1 %"
                if plan == "grandslam" and rate == 8:
                    note += "; batches that fit a share of the deadline take too long to fill"
                claim = Claim(experiment="E1", metric=f"violations, {plan}, {where}", unit="%", paper=1.0, note=note)
                made.append(bounded(claim, results.each(trial, "violations"), at_most=1.5))
            claim = Claim(experiment="E1", metric=f"utilisation, optimum over FA2, {where}", unit="points", derived=3.0)
            made.append(bounded(claim, [used["optimal"] - used["fa2"]], at_most=3.0))
            for rival in ("inferline", "ds2"):
                more = used["fa2"] - used[rival]
                claim = Claim(experiment="E1", metric=f"utilisation, FA2 over {rival}, {where}", unit="points")
                made.append(shaped(claim, [more], shape=more > 0, expect="FA2's replicas are the busiest"))
        return made

    def _checks(self, results: Results) -> list[Row]:
        """§7.3-8: FA2 with its own replicas, and what head-room does."""
        made = []
        for paths, rate in MET:
            claim = Claim(experiment="7.3", metric=f"violations, {paths} paths at {rate}/s", unit="%", paper=1.4)
            found = results.each(self.of_steady(steady("fa2", paths, rate)), "violations")
            made.append(bounded(claim, found, at_most=1.5))
        for rate, derived in ((8, 4.0), (10, 2.0), (27, 2.5)):
            claim = Claim(experiment="7.3", metric=f"violations, slices at {rate}/s", unit="%", derived=derived)
            found = results.each(self.of_steady(slices("optimal", rate)), "violations")
            made.append(equals(claim, found, within=2.0, shape=max(found) < derived))
        shares = [mean(results.each(self.of_steady(at(ratio)), "violations")) for ratio in RATIOS]
        falls = all(before >= after - 0.5 for before, after in pairwise(shares))
        for ratio in RATIOS:
            found = results.each(self.of_steady(at(ratio)), "violations")
            claim = Claim(experiment="7.3", metric=f"violations, 24/s, mean = d/{ratio:g}", unit="%")
            if ratio == 1.0:
                made.append(bounded(claim, found, at_least=7.0, at_most=90.0))
            else:
                made.append(shaped(claim, found, shape=falls, expect="more head-room, fewer"))
        return made

    def _e2(self, results: Results) -> list[Row]:
        made = []
        for load in self.moving:
            outcomes = {name: results.of(self.of_moving(moving(name, load))) for name in SYSTEMS}
            counts = {name: mean(one.replicas for one in own) for name, own in outcomes.items()}
            late = {name: mean(one.violations for one in own) for name, own in outcomes.items()}
            least = counts["fa2"] <= min(counts["inferline"], counts["ds2"])
            for name, own in outcomes.items():
                claim = Claim(experiment="E2", metric=f"replicas, {name}, {load}", unit="")
                made.append(shaped(claim, [one.replicas for one in own], shape=least, expect="FA2 needs the fewest"))
            for name in SYSTEMS[1:]:
                note = "FA2's replicas have least to spare for what has queued up; starting slows nobody here"
                metric = f"violations more than FA2's, {name}, {load}"
                claim = Claim(experiment="E2", metric=metric, unit="points", paper=4.0, note=note)
                more = [a.violations - b.violations for a, b in zip(outcomes[name], outcomes["fa2"], strict=True)]
                made.append(bounded(claim, more, at_least=0.0, at_most=4.5, shape=late[name] > late["fa2"]))
            better = results.of(self.of_moving(cautious(load)))
            note = f"ours: the busiest 10 s of {LOOKBACK_S}; {mean(one.replicas for one in better):.1f} replicas"
            claim = Claim(experiment="E2", metric=f"violations, cautious FA2, {load}", unit="%", note=note)
            found = [one.violations for one in better]
            made.append(shaped(claim, found, shape=mean(found) < late["fa2"], expect=f"below {late['fa2']:.1f} %"))
        found = [_recovery_s(one) for one in results.of(self.of_moving(moving("fa2", "fluctuating")))]
        note = "from the step to the last second with violations before it is over; derived: tick + start + drain"
        claim = Claim(experiment="E2", metric="FA2 recovers from 8 → 27/s", unit="s", derived=20.0, note=note)
        made.append(equals(claim, found, within=10.0, shape=max(found) < 60))
        if "random" in self.moving:
            both = [results.each(self.of_moving(moving("fa2", load)), "violations") for load in MOVING]
            claim = Claim(experiment="E2", metric="FA2, random worse than fluctuating by", unit="points")
            worse = mean(both[1]) - mean(both[0])
            made.append(shaped(claim, [worse], shape=worse > 0, expect="random is worse"))
        return made

    def _e3(self, results: Results) -> list[Row]:
        made = []
        for load in LONG:
            trials = {name: structs.replace(moving(name, load), seconds=self.lengths.long) for name in SYSTEMS}
            counts = {name: mean(results.each(trial, "replicas")) for name, trial in trials.items()}
            late = {name: mean(results.each(trial, "violations")) for name, trial in trials.items()}
            note = f"40 minutes instead of five hours; {ALONE}"
            for name in ("ds2", "inferline"):
                saved = 100 * (1 - counts["fa2"] / counts[name])
                metric = f"FA2 saves of {name}'s replicas, {load}"
                claim = Claim(experiment="E3", metric=metric, unit="%", paper=14.6, note=note)
                made.append(bounded(claim, [saved], at_least=8.0, at_most=25.0, shape=saved > 0))
            for name in ("ds2", "grandslam"):
                metric = f"violations more than FA2's, {name}, {load}"
                claim = Claim(experiment="E3", metric=metric, unit="points", paper=4.8, note=f"FA2 {late['fa2']:.2f} %")
                more = late[name] - late["fa2"]
                made.append(bounded(claim, [more], at_least=2.0, at_most=8.0, shape=more > 0))
        return made

    def _e4(self, results: Results) -> list[Row]:
        outcomes = {plan: results.of(self.of_fixed(fixed(plan))) for plan in PLANS}

        def each(plan: str, figure: str) -> list[float]:
            return [float(getattr(one, figure)) for one in outcomes[plan]]

        def claim(metric: str, paper: float | None = None, derived: float | None = None, note: str = "") -> Claim:
            return Claim(experiment="E4", metric=metric, unit="%", paper=paper, derived=derived, note=note)

        lost = {plan: mean(each(plan, "violations")) for plan in PLANS}
        drops = {plan: mean(each(plan, "dropped")) for plan in PLANS}
        least = drops["inferline"] <= drops["ds2"]
        waits = [mean(results.each(self.of_fixed(fixed("grandslam", rate)), "violations")) for rate in (50, 27, 8)]
        note = "at 50, 27 and 8/s: " + ", ".join(f"{value:.1f} %" for value in waits)
        return [
            bounded(claim("FA2, violations", 1.4, 0.7), each("fa2", "violations"), at_most=1.5),
            bounded(claim("FA2, dropped", 0.0, 0.0), each("fa2", "dropped"), at_most=0.0),
            bounded(claim("optimum, violations", 1.4), each("optimal", "violations"), at_most=1.5),
            bounded(claim("DS2, dropped", 32.0, 65.0, "published: above"), each("ds2", "dropped"), at_least=32.0),
            bounded(claim("DS2, late", 17.0, None, "published: below"), each("ds2", "late"), at_most=17.0),
            shaped(
                claim("InferLine, late", None, 78.0),
                each("inferline", "late"),
                shape=lost["inferline"] > 10 * max(1.0, lost["fa2"]),
                expect="many",
            ),
            shaped(
                claim("InferLine, dropped", None, 22.0),
                each("inferline", "dropped"),
                shape=least,
                expect="fewer than DS2",
            ),
            shaped(
                claim("GrandSLAm, violations", None, 5.5, note),
                each("grandslam", "violations"),
                shape=waits == sorted(waits) and waits[-1] > 50,
                expect="1 to 75 %, the more the lower the rate",
            ),
        ]

    def _e7(self, results: Results) -> list[Row]:
        claim = Claim(experiment="E7", metric="FA2, violations, six paths on slices at 10/s", unit="%", paper=1.0)
        return [equals(claim, results.each(self.of_fixed(slices("fa2")), "violations"), within=1.0)]


def _recovery_s(outcome: Outcome) -> float:
    """Seconds of the middle third until the last one whose arrivals were late before five calm ones."""
    third = len(outcome.by_second) // 3
    surge: Sequence[float] = outcome.by_second[third : 2 * third]
    calm = 0
    for second, share in enumerate(surge):
        calm = calm + 1 if share <= 1.5 else 0
        if calm == 5 and second > 5 and max(surge[: second + 1]) > 1.5:
            return float(second - 4)
    return float(len(surge)) if max(surge) > 1.5 else 0.0
