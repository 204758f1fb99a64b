"""IPA's evaluation, E1 to E4 (Fig. P3.8 to P3.12): cores and accuracy over time, beside FA2-low, FA2-high and RIM.

Figures give no numbers, so ours are set beside what was read off them, and every claim made of their shape is tested
(7.6 A to D). A steady run is told by its median interval, the bursty one by the medians of its calm and of its burst.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

from sloop.reproduce.ipa import published
from sloop.reproduce.ipa.published import Seen
from sloop.reproduce.ipa.trials import POLICIES, WORKLOADS, Outcome, Policy, Results, Trial, Workload
from sloop.reproduce.rows import Claim, Row, bounded, contradicted, equals, shaped

CALM: Final = slice(5, 38)
BURST: Final = slice(44, 67)
AFTER: Final = slice(92, 120)
"""Intervals of the bursty excerpt before, during and after the burst."""

CORES_SHARE: Final = 0.15
CORES_LEAST: Final = 2.0
PAS_WITHIN: Final = 0.3
EQUAL: Final = 0.01
"""Percent of requests, or points of PAS, that do not count as a difference."""

RIM_SUM_QA: Final = "by its own tables 12 and 8 replicas with 32 cores have 27.7, and with 30.2 they have 104 cores"
"""Why RIM on sum-qa cannot be what its figure shows."""

HEADLINE: Final = 21.0
"""Percent: by how much IPA is said to be more accurate end to end, at most."""


def trials(pipelines: Sequence[str], workloads: Sequence[Workload] = WORKLOADS) -> list[Trial]:
    """All that `rows` reads; it does without the fluctuating workload."""
    return [
        Trial(pipeline=pipeline, workload=workload, policy=policy)
        for pipeline in pipelines
        for workload in workloads
        for policy in POLICIES
    ]


def rows(results: Results, pipelines: Sequence[str]) -> list[Row]:
    """What was read off the figures, then the claims, for those of the five that were played."""
    made = [row for name in pipelines for row in _beside(results, name)]
    claims: Mapping[str, Callable[[Results], list[Row]]] = {
        "video": _video,
        "audio-sent": _sentiment,
        "sum-qa": lambda given: _span(given, "sum-qa", None),
        "nlp": lambda given: _span(given, "nlp", 500.0),
    }
    made += [row for name in pipelines if name in claims for row in claims[name](results)]
    return made + [row for name in pipelines for row in _ordering(results, name)]


def _trial(pipeline: str, workload: Workload, policy: Policy) -> Trial:
    return Trial(pipeline=pipeline, workload=workload, policy=policy)


def _beside(results: Results, name: str) -> list[Row]:
    made: list[Row] = []
    steady: tuple[tuple[Workload, Mapping[str, Mapping[Policy, Seen]]], ...] = (
        ("steady_low", published.STEADY_LOW),
        ("steady_high", published.STEADY_HIGH),
    )
    for workload, figures in steady:
        for policy, seen in figures.get(name, {}).items():
            outcomes = results.of(_trial(name, workload, policy))
            made += _pair(name, f"{policy}, {workload}", outcomes, slice(0, None), (seen.cores[0], seen.pas[0]))
    for policy, seen in published.BURSTY[name].items():
        outcomes = results.of(_trial(name, "bursty", policy))
        for place, (phase, span) in enumerate((("calm", CALM), ("burst", BURST))):
            read = (seen.cores[place], seen.pas[place])
            made += _pair(name, f"{policy}, bursty, {phase}", outcomes, span, read)
    return made


def _pair(name: str, what: str, outcomes: Sequence[Outcome], span: slice, read: tuple[float, float]) -> list[Row]:
    """Cores and accuracy of one policy beside what was read off a figure."""
    cores = [median(outcome.cores_by_interval[span]) for outcome in outcomes]
    pas = [median(outcome.pas_by_interval[span]) for outcome in outcomes]
    note = RIM_SUM_QA if name == "sum-qa" and what.startswith("rim") else ""
    claim = Claim(experiment=name, metric=f"cores, {what}", unit="cores", paper=read[0], note=note)
    if name == "video":  # its figure shows two cores per replica where its table has one
        half = read[0] / 2
        row = contradicted(claim, cores, rival=half, within=max(1.0, CORES_SHARE * half))
    else:
        row = equals(claim, cores, within=max(CORES_LEAST, CORES_SHARE * read[0]))
    accuracy = Claim(experiment=name, metric=f"100 · PAS, {what}", unit="", paper=read[1], note=note)
    return [row, equals(accuracy, pas, within=PAS_WITHIN)]


def _each(results: Results, pipeline: str, workload: Workload, policy: Policy, name: str) -> list[float]:
    return [getattr(outcome, name) for outcome in results.of(_trial(pipeline, workload, policy))]


def _medians(results: Results, pipeline: str, policy: Policy, span: slice, name: str) -> list[float]:
    outcomes = results.of(_trial(pipeline, "bursty", policy))
    return [median(getattr(outcome, name)[span]) for outcome in outcomes]


def _over(samples: Sequence[float], others: Sequence[float]) -> list[float]:
    return [own / other for own, other in zip(samples, others, strict=True)]


def _above(samples: Sequence[float], others: Sequence[float]) -> list[float]:
    return [own - other for own, other in zip(samples, others, strict=True)]


def _video(results: Results) -> list[Row]:
    """A: the cost of FA2-low, more accuracy while calm, the same under load."""
    made = []
    for workload in results.workloads:
        cores = [_each(results, "video", workload, policy, "cores") for policy in ("ipa", "fa2-low")]
        claim = Claim(experiment="A: video", metric=f"IPA's cores above FA2-low's, {workload}", unit="cores")
        made.append(bounded(claim, _above(*cores), at_least=-1, at_most=1))
    for workload in results.workloads:
        gained = _above(*(_each(results, "video", workload, policy, "pas") for policy in ("ipa", "fa2-low")))
        claim = Claim(experiment="A: video", metric=f"IPA's 100 · PAS above FA2-low's, {workload}", unit="")
        if workload == "steady_high":
            made.append(bounded(claim, gained, at_least=-EQUAL, at_most=EQUAL))
        else:
            made.append(bounded(claim, gained, at_least=EQUAL))
    calm = _above(*(_medians(results, "video", policy, CALM, "pas_by_interval") for policy in ("ipa", "fa2-low")))
    claim = Claim(experiment="A: video", metric="IPA's 100 · PAS above FA2-low's, bursty, calm", unit="")
    made.append(bounded(claim, calm, at_least=1))
    dear = _over(*(_each(results, "video", "steady_high", policy, "cores") for policy in ("fa2-high", "ipa")))
    claim = Claim(experiment="A: video", metric="FA2-high's cores over IPA's, steady_high", unit="×")
    return [*made, bounded(claim, dear, at_least=1.9)]


def _sentiment(results: Results) -> list[Row]:
    """B: accuracy gives way to the burst and comes back; the headline."""
    made = []
    for phase, span, paper in (("calm", CALM, 59.1), ("burst", BURST, 53.5), ("after", AFTER, 59.1)):
        pas = _medians(results, "audio-sent", "ipa", span, "pas_by_interval")
        claim = Claim(experiment="B: audio-sent", metric=f"100 · PAS of IPA, bursty, {phase}", unit="", paper=paper)
        made.append(equals(claim, pas, within=PAS_WITHIN))
    gains = {}
    for workload in results.workloads:
        ratios = _over(*(_each(results, "audio-sent", workload, policy, "pas") for policy in ("ipa", "fa2-low")))
        gains[workload] = [100 * (ratio - 1) for ratio in ratios]
    for workload, derived in (("steady_high", 14.4), ("steady_low", 26.4)):
        claim = Claim(
            experiment="B: audio-sent", metric=f"accuracy gained over FA2-low, {workload}", unit="%", derived=derived
        )
        made.append(equals(claim, gains[workload], within=1.0))
    best = max(gains.values(), key=sum)
    claim = Claim(
        experiment="B: audio-sent", metric="largest gain over FA2-low", unit="%", paper=HEADLINE, note="the headline"
    )
    return [*made, bounded(claim, best, at_least=HEADLINE)]


def _span(results: Results, name: str, peak: float | None) -> list[Row]:
    """C: what the heavy variants would cost."""
    dear = _over(*(_each(results, name, "steady_high", policy, "cores") for policy in ("fa2-high", "ipa")))
    claim = Claim(experiment=f"C: {name}", metric="FA2-high's cores over IPA's, steady_high", unit="×")
    made = [bounded(claim, dear, at_least=3)]
    if peak is not None:
        outcomes = results.of(_trial(name, "bursty", "fa2-high")) + results.of(_trial(name, "steady_high", "fa2-high"))
        most = [max(outcome.cores_by_interval) for outcome in outcomes]
        claim = Claim(experiment=f"C: {name}", metric="FA2-high's largest cores", unit="cores", paper=peak)
        made.append(bounded(claim, [max(most)], at_least=peak))
    return made


def _ordering(results: Results, name: str) -> list[Row]:
    """D: who misses deadlines, and that restrictions of IPA's program are not better at it."""
    missed = {
        policy: _each(results, name, "steady_high", policy, "violations") for policy in ("fa2-low", "ipa", "fa2-high")
    }
    means = [sum(found) / len(found) for found in missed.values()]
    ordered = means[0] <= means[1] + EQUAL and means[1] <= means[2] + EQUAL
    made = []
    for policy, found in missed.items():
        note = "" if any(means) else "nobody misses any"
        claim = Claim(experiment=f"D: {name}", metric=f"violations, {policy}, steady_high", unit="%", note=note)
        made.append(shaped(claim, found, shape=ordered, expect="FA2-low ≤ IPA ≤ FA2-high"))
    between = [
        low - EQUAL <= own <= high + EQUAL
        for workload in results.workloads
        for low, own, high in zip(
            *(_each(results, name, workload, policy, "pas") for policy in ("fa2-low", "ipa", "fa2-high")), strict=True
        )
    ]
    claim = Claim(experiment=f"D: {name}", metric="runs in which IPA's accuracy lies between", unit="%")
    share = 100 * sum(between) / len(between)
    return [*made, shaped(claim, [share], shape=all(between), expect="FA2-low ≤ IPA ≤ FA2-high, all workloads")]
