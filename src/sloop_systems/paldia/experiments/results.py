"""PALDIA's experiments in the simulator: which runs, and the rows that compare them with what is published or derived.

"Check N" is an acceptance check of the specification, section 7.4; its bounds come from two independent simulations
with profiles that were fitted to the publication. Source: Bhasi et al., PALDIA (IPDPS 2024); specification, section 5.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from msgspec import structs

from sloop_systems.comparison.harness import Results, Wanted
from sloop_systems.comparison.rows import Claim, Known, ResultLimits, Row, bounded, compare, directed, minus, over
from sloop_systems.paldia.experiments.runs import LANGUAGE, OVERRIDES, VISION, Options, PaldiaResult, PaldiaTrial
from sloop_systems.paldia.published import PALDIA_MODELS, SLO_MS

LABELS: Final[Mapping[str, str]] = {
    "paldia": "PALDIA",
    "infless-llama-cost": "INFless ($)",
    "molecule-cost": "Molecule ($)",
    "infless-llama-performance": "INFless (P)",
    "molecule-performance": "Molecule (P)",
    "oracle": "Oracle",
}
SYSTEMS: Final = tuple(LABELS)
CHEAP: Final = ("infless-llama-cost", "molecule-cost")
BEST: Final = ("infless-llama-performance", "molecule-performance")
PUBLISHED_SYSTEMS: Final = ("paldia", *CHEAP, *BEST)
QUICK: Final = ("ResNet50", "VGG19", "SENet18")
SEEDS: Final = 3
DERIVED: Final[Mapping[str, tuple[float, float, float]]] = {
    "paldia": (99.39, 175.0, 0.472),
    "infless-llama-cost": (93.0, 281.0, 0.458),
    "molecule-cost": (94.3, 282.0, 0.458),
    "infless-llama-performance": (100.0, 39.0, 3.06),
    "molecule-performance": (100.0, 68.0, 3.06),
    "oracle": (100.0, 121.0, 0.482),
}
"""Compliance in %, P99 in ms and USD per hour: means of the twelve vision models (specification, 3.5, settings B)."""

SECOND: Final[Options] = (("wait_limit", 1),)
VARIANTS: Final[Mapping[str, PaldiaTrial]] = {
    name: PaldiaTrial(model="", system=system, options=options, load=load, acquire_s=acquire_s)
    for name, system, options, load, acquire_s in (
        ("switch at the second mismatch", "paldia", SECOND, "", 1.0),
        ("ramps of 5 s", "paldia", (), "azure, steep", 1.0),
        ("acquisition 5 s", "paldia", (), "", 5.0),
        ("acquisition 20 s", "paldia", (), "", 20.0),
        ("headroom 0.9", "paldia", (("headroom_cpu", 0.9), ("headroom_gpu", 0.9)), "", 1.0),
        ("band", "paldia-band", (), "", 1.0),
        ("serial lane, no backlog", "paldia", (("backlog", False), ("batch.lane", "serial")), "", 1.0),
    )
}
"""PALDIA with one change: other settings, another world, or the other rule of choice."""
FIGURE_1: Final = tuple(name for name in OVERRIDES if "figure 1" in name)
ON_M60: Final[Options] = (("hardware", ("g3s.xlarge",)),)
ON_V100: Final[Options] = (("hardware", ("p3.2xlarge",)),)
MOTIVATION: Final[Mapping[str, tuple[str, Options]]] = {
    "Offline Hybrid": ("offline-hybrid", ON_M60),
    "MPS Only ($)": ("mps-only", ON_M60),
    "Time Shared Only ($)": ("time-shared", ON_M60),
    "MPS Only (P)": ("mps-only", ON_V100),
    "Time Shared Only (P)": ("time-shared", ON_V100),
}
EXHAUSTION: Final = "GoogleNet, exhaustion"
EXHAUSTED: Final[Mapping[str, Options]] = {
    "paldia": ON_V100,
    "molecule-performance": (),
    "infless-llama-performance": (),
}
FAILING: Final = "DenseNet121"
OTHER: Final = ("ResNet50 on Wikipedia", "DPN92 on Twitter")

Found = Results[PaldiaResult]


PROFILES: Final = "durations, bandwidths, interference and loads, by PALDIA's results"


def _claim(
    experiment: str,
    metric: str,
    unit: str,
    known: Known = "simulated",
    paper: float | None = None,
    derived: float | None = None,
    note: str = "",
    *,
    computed: bool = False,
) -> Claim:
    """A claim; printed figures are among those that the profiles are calibrated to (specification, section 3)."""
    fitted = PROFILES if paper is not None else ""
    return Claim(experiment, metric, unit, known, paper, derived, note, computed, fitted)


def wanted(*, quick: bool) -> Wanted[PaldiaTrial]:
    """All trials; `quick` plays three models with one seed."""
    if quick:
        return [(trial_of(model, system), 1) for model in QUICK for system in SYSTEMS]
    trials = [trial_of(model, system) for model in PALDIA_MODELS for system in SYSTEMS]
    trials += [structs.replace(each, model=model) for each in VARIANTS.values() for model in VISION]
    trials += [trial_of(model, "paldia-band") for model in LANGUAGE]
    trials += [trial_of(model, *each) for model in FIGURE_1 for each in MOTIVATION.values()]
    trials += [trial_of(EXHAUSTION, *each) for each in EXHAUSTED.items()]
    trials += [
        structs.replace(trial_of(FAILING, system), faults="outages", acquire_s=0.6) for system in PUBLISHED_SYSTEMS
    ]
    trials += [
        structs.replace(trial_of(model, each), faults="background") for model in QUICK for each in PUBLISHED_SYSTEMS
    ]
    trials += [trial_of(model, system) for model in OTHER for system in PUBLISHED_SYSTEMS]
    return [(trial, SEEDS) for trial in trials]


def trial_of(model: str, system: str, options: Options = ()) -> PaldiaTrial:
    """A model under a system, on the model's own load."""
    return PaldiaTrial(model=model, system=system, options=options, acquire_s=0.0 if system == "oracle" else 1.0)


def simulated_rows(found: Found, *, quick: bool) -> list[Row]:
    """All rows of this module."""
    vision = QUICK if quick else VISION
    rows = [
        *mean_rows(found, vision),
        *gap_rows(found, vision, quick=quick),
        *cost_rows(found, vision),
        *tail_rows(found),
        *single_rows(found, quick=quick),
    ]
    if not quick:
        rows += [
            *language_rows(found),
            *sensitivity_rows(found),
            *motivation_rows(found),
            *exhaustion_rows(found),
            *failure_rows(found),
            *background_rows(found),
            *other_rows(found),
        ]
    return rows


def of_models(found: Found, names: Sequence[str], of: PaldiaTrial | str, field: str) -> list[float]:
    """The mean of a field over models, by seed."""
    template = trial_of("", of) if isinstance(of, str) else of
    by_model = [found.each(structs.replace(template, model=name), field) for name in names]
    return [fmean(values) for values in zip(*by_model, strict=True)]


def of_both(found: Found, names: Sequence[str], systems: Sequence[str], field: str) -> list[float]:
    """The mean of a field over models and these systems, by seed."""
    return [fmean(pair) for pair in zip(*(of_models(found, names, each, field) for each in systems), strict=True)]


def more_than(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """By how many percent, seed by seed."""
    return [100.0 * (ratio - 1.0) for ratio in over(one, other)]


def less_than(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """By how many percent, seed by seed."""
    return [100.0 * (1.0 - ratio) for ratio in over(one, other)]


def _note(names: Sequence[str]) -> str:
    return "12 vision models" if len(names) == len(VISION) else f"{len(names)} of 12 vision models"


# The Azure-like trace: figures 3 to 8 and 11


def mean_rows(found: Found, names: Sequence[str]) -> list[Row]:
    """Check 9: compliance, P99 and cost of all systems, means of models."""
    rows, note = [], _note(names)
    for system, figures in DERIVED.items():
        for what, field, unit, figure in zip(
            ("compliance", "P99", "cost"),
            ("compliance", "p99_ms", "usd_per_h"),
            ("%", "ms", "$/h"),
            figures,
            strict=True,
        ):
            samples = of_models(found, names, system, field)
            claim = _claim("Azure", f"{LABELS[system]}, {what}, mean of models", unit, derived=figure, note=note)
            rows.append(compare(claim, samples, similar=True))
    for systems, least, most in ((("paldia",), 98.8, None), (BEST, 99.9, None), (CHEAP, 88.0, 96.0)):
        for system in systems:
            bound = f"at least {least} %" if most is None else f"{least:g} to {most:g} %"
            claim = _claim("Azure", f"{LABELS[system]}, compliance, {bound}", "%", note=f"check 9; {note}")
            rows.append(bounded(claim, of_models(found, names, system, "compliance"), at_least=least, at_most=most))
    above = {
        name: minus(
            found.each(trial_of(name, "paldia"), "compliance"),
            list(map(min, *(found.each(trial_of(name, each), "compliance") for each in CHEAP))),
        )
        for name in names
    }
    far = [name for name, points in above.items() if 9 <= fmean(points) <= 16]
    claim = _claim("Azure", "models of which PALDIA is 9 to 16 points above the worse ($)", f"of {len(names)}",
                   note=f"check 9; {', '.join(far) or 'none'}; {note}", computed=True)  # fmt: skip
    rows.append(bounded(claim, [float(len(far))], at_least=3.0))
    below = [
        name
        for name in names
        for each in CHEAP
        if found.mean(trial_of(name, "paldia"), "compliance") < found.mean(trial_of(name, each), "compliance") - 0.1
    ]
    claim = _claim("Azure", "models of which PALDIA is below a ($)", "", computed=True,
                  note=f"check 9; {', '.join(below) or 'none'}; {note}")  # fmt: skip
    return [*rows, bounded(claim, [float(len(below))], at_most=0.0)]


def gap_rows(found: Found, names: Sequence[str], *, quick: bool) -> list[Row]:
    """Check 10: how much better PALDIA would be if it knew the future, or had the best hardware."""
    rows = []
    variants = [("PALDIA", PaldiaTrial(model="", system="paldia"), 1.3)]
    if not quick:
        variants.append(("PALDIA, second mismatch", VARIANTS["switch at the second mismatch"], 0.7))
    for name, trial, most in variants:
        own = of_models(found, names, trial, "compliance")
        for rival, samples in (
            ("(P)", of_both(found, names, BEST, "compliance")),
            ("Oracle", of_models(found, names, "oracle", "compliance")),
        ):
            claim = _claim("Azure", f"compliance, {rival} - {name}", "points", note=f"check 10; {_note(names)}")
            rows.append(bounded(claim, minus(samples, own), at_most=most))
    samples = minus(of_both(found, names, BEST, "compliance"), of_models(found, names, "paldia", "compliance"))
    rows.append(compare(_claim("Azure", "compliance, (P) - PALDIA, published", "points", paper=0.38), samples))
    samples = minus(of_models(found, names, "oracle", "compliance"), of_models(found, names, "paldia", "compliance"))
    claim = _claim("Azure", "compliance, Oracle - PALDIA, published", "points", paper=0.8)
    return [*rows, bounded(claim, samples, at_least=0.1, at_most=0.8)]


def cost_rows(found: Found, names: Sequence[str]) -> list[Row]:
    """Check 11, figures 5 and 7b and 8: prices, dear hardware, power, utilisation."""
    note = _note(names)
    own, best = of_models(found, names, "paldia", "usd_per_h"), of_both(found, names, BEST, "usd_per_h")
    cheap = of_both(found, names, CHEAP, "usd_per_h")
    saved = less_than(own, best)
    claim = _claim("Azure", "cost saved by PALDIA beside (P)", "%", "text", 85.0, note=note)
    rows = [compare(claim, saved, similar=True)]
    claim = _claim("Azure", "cost saved by PALDIA beside (P), bound", "%", note=f"check 11; {note}")
    rows.append(bounded(claim, saved, at_least=82.0, at_most=87.0))
    more = more_than(own, cheap)
    claim = _claim("Azure", "cost of PALDIA above ($)", "%", "text", 2.0, note=f"1 to 3 %; {note}")
    rows.append(compare(claim, more, similar=True))
    claim = _claim("Azure", "cost of PALDIA above ($), bound", "%", note=f"check 11; {note}")
    rows.append(bounded(claim, more, at_least=0.0, at_most=5.0))
    dearer = of_models(found, names, "paldia", "dearer")
    claim = _claim("Azure", "PALDIA, time on nodes dearer than the M60", "%", note=f"check 11; {note}")
    rows.append(bounded(claim, dearer, at_least=0.5, at_most=3.0))
    for system in CHEAP:
        claim = _claim("Azure", f"{LABELS[system]}, time on nodes dearer than the M60", "%", note=note)
        rows.append(bounded(claim, of_models(found, names, system, "dearer"), at_most=0.5))
    trial = PaldiaTrial(model="", system="")
    own_busy = found.each(structs.replace(trial, model="VGG19", system="paldia"), "gpu_busy")
    best_busy = [
        fmean(pair) for pair in zip(*(found.each(trial_of("VGG19", each), "gpu_busy") for each in BEST), strict=True)
    ]
    ratios = [a / b for a, b in zip(own_busy, best_busy, strict=True)]
    seen = ", ".join(
        f"{LABELS[each]} {found.mean(trial_of('VGG19', each), 'gpu_busy'):.1f} %" for each in PUBLISHED_SYSTEMS
    )
    note = (
        f"check 19; {seen}; published 99, 94 and 90 % (INFless, PALDIA, Molecule) do not follow from requests that "
        "come once a second"
    )
    claim = _claim("Azure", "VGG19, GPU busy while held, PALDIA / (P)", "×", note=note)
    return [*rows, bounded(claim, ratios, at_least=5.0)]


def tail_rows(found: Found) -> list[Row]:
    """Checks 12 and 13: the P99, and its parts."""
    rows = []
    for name in ("ResNet50", "VGG19"):
        for system in CHEAP:
            claim = _claim("Azure", f"{LABELS[system]}, {name}, P99", "ms", note="check 12")
            p99_ms = found.each(trial_of(name, system), "p99_ms")
            rows.append(bounded(claim, p99_ms, at_least=240.0, mean=True))
    own, cheap = (found.each(trial_of("VGG19", each), "p99_ms") for each in ("paldia", "molecule-cost"))
    claim = _claim("Azure", "VGG19, P99, PALDIA / Molecule ($)", "×", note="check 12; published: about 0.5")
    rows.append(bounded(claim, over(own, cheap), at_most=0.65, mean=True))
    for system, name, part, published, low, high in (
        ("infless-llama-cost", "ResNet50", "interference", 76.0, 65.0, 90.0),
        ("molecule-cost", "VGG19", "queueing", 84.0, 80.0, 90.0),
    ):
        samples, whole = (found.each(trial_of(name, system), field) for field in (part, "overhead"))
        claim = _claim("Azure", f"{LABELS[system]}, {name}, {part} in the P99", "%", "text", published)
        rows.append(compare(claim, samples, similar=True))
        note = f"check 13; {part} {fmean(samples):.1f} %"
        claim = _claim("Azure", f"{LABELS[system]}, {name}, all overhead in the P99", "%", note=note)
        rows.append(bounded(claim, whole, at_least=low, at_most=high))
    return rows


def single_rows(found: Found, *, quick: bool) -> list[Row]:
    """Figures about single models: 3, 6, 7."""
    rows = []
    for system, name, published in (
        ("paldia", "ResNet50", 99.55),
        ("infless-llama-cost", "ResNet50", 89.43),
        ("paldia", "VGG19", 99.85),
        ("molecule-cost", "VGG19", 95.11),
    ):
        samples = found.each(trial_of(name, system), "compliance")
        claim = _claim("Azure", f"{LABELS[system]}, {name}, compliance", "%", paper=published)
        rows.append(compare(claim, samples, similar=True))
    for system in ("paldia", *CHEAP):
        crossed = [
            float(sum(value <= SLO_MS for value in result.latencies_ms))
            for result in found.of(trial_of("SENet18", system))
        ]
        claim = _claim("Azure", f"{LABELS[system]}, SENet18, percentile at the deadline", "%", "plot",
                      99.0 if system == "paldia" else 80.0, note="figure 6")  # fmt: skip
        rows.append(compare(claim, crossed, similar=True))
    if quick:
        return rows
    for system, published in (("infless-llama-cost", 27.0), ("molecule-cost", 34.0)):
        samples = found.each(trial_of("DenseNet121", system), "near_peak")
        claim = _claim("Azure", f"{LABELS[system]}, DenseNet121, served near the peak", "%", paper=published,
                      note="figure 7a; derived with our profiles: INFless 10, Molecule 62")  # fmt: skip
        rows.append(compare(claim, samples, similar=True))
    claim = _claim("Azure", "PALDIA, DenseNet121, served near the peak", "%", paper=95.0, note="figure 7a")
    rows.append(bounded(claim, found.each(trial_of("DenseNet121", "paldia"), "near_peak"), at_least=95.0))
    own, cheap, best = (of_both(found, ("SimplifiedDLA",), systems, "watts") for systems in (("paldia",), CHEAP, BEST))
    less = less_than(own, best)
    rows.append(
        compare(_claim("Azure", "SimplifiedDLA, power of PALDIA below (P)", "%", "text", 45.0), less, similar=True)
    )
    claim = _claim("Azure", "SimplifiedDLA, power of PALDIA above ($)", "%", paper=4.0, note="figure 7b: up to 4 %")
    rows.append(bounded(claim, more_than(own, cheap), at_most=4.0))
    return [*rows, *gpu_phase_rows(found)]


def gpu_phase_rows(found: Found) -> list[Row]:
    """Check 12: the P99 of PALDIA, of all requests and of those on GPUs."""
    p99_ms = of_models(found, VISION, "paldia", "p99_ms")
    claim = _claim("Azure", "PALDIA, P99, mean of models, bound", "ms", note="check 12")
    rows = [bounded(claim, p99_ms, at_most=190.0)]
    on_gpu = {name: found.mean(trial_of(name, "paldia"), "gpu_p99_ms") for name in VISION}
    worst = max(on_gpu, key=on_gpu.__getitem__)
    claim = _claim("Azure", "PALDIA, P99 on GPUs, largest of the models", "ms", note=f"check 12; {worst}")
    return [*rows, bounded(claim, [on_gpu[worst]], at_most=200.0, runs=SEEDS)]


def language_rows(found: Found) -> list[Row]:
    """Figures 9 and 10, and check 11: the language models."""
    own, best = (of_both(found, LANGUAGE, systems, "compliance") for systems in (("paldia",), BEST))
    cheap = of_both(found, LANGUAGE, CHEAP, "compliance")
    rows = [
        compare(
            _claim("language", f"{name}, compliance, mean of models", "%", paper=published),
            samples,
            similar=True,
        )
        for name, samples, published in (("PALDIA", own, 99.54), ("($)", cheap, 97.73))
    ]
    claim = _claim("language", "compliance, (P) - PALDIA", "points", paper=0.45)
    rows.append(bounded(claim, minus(best, own), at_most=0.45))
    costs = {
        name: of_both(found, LANGUAGE, systems, "usd_per_h")
        for name, systems in (("own", ("paldia",)), ("band", ("paldia-band",)), ("cheap", CHEAP), ("best", BEST))
    }
    saved = less_than(costs["own"], costs["best"])
    claim = _claim("language", "cost saved by PALDIA beside (P)", "%", "text", 72.0)
    rows.append(compare(claim, saved, similar=True))
    claim = _claim("language", "cost saved by PALDIA beside (P), bound", "%", note="check 11")
    rows.append(bounded(claim, saved, at_least=70.0, at_most=78.0))
    for name, published, derived in (("own", 2.0, 0.3), ("band", None, 11.0)):
        label = "PALDIA" if name == "own" else "PALDIA, band"
        more = more_than(costs[name], costs["cheap"])
        claim = _claim("language", f"cost of {label} above ($)", "%", "text", published, derived)
        rows.append(compare(claim, more, similar=True))
    vision = of_models(found, VISION, "paldia", "usd_per_h")
    more = more_than(costs["own"], vision)
    claim = _claim("language", "cost of PALDIA above that of vision models", "%", paper=86.0, note="derived: 59")
    return [*rows, compare(claim, more, similar=True)]


# Sensitivity


def _sign(low: float) -> ResultLimits:
    """The direction of a bound that lies on one side of 0."""
    return ResultLimits(above=0) if low > 0 else ResultLimits(below=0)


def sensitivity_rows(found: Found) -> list[Row]:
    """Check 18: what changes with the settings that the publication leaves open."""
    base, base_usd = (of_models(found, VISION, "paldia", field) for field in ("compliance", "usd_per_h"))
    rows = []
    for name, low, high in (
        ("switch at the second mismatch", 0.3, 0.6),
        ("ramps of 5 s", -2.0, -0.8),
        ("acquisition 5 s", -3.0, -1.5),
        ("headroom 0.9", -6.0, -2.0),
    ):
        points = minus(of_models(found, VISION, VARIANTS[name], "compliance"), base)
        claim = _claim("sensitivity", f"compliance, {name}", "points", note="check 18")
        rows.append(bounded(claim, points, at_least=low, at_most=high, shape=_sign(low)))
    claim = _claim("sensitivity", "compliance, acquisition 20 s", "%", note="check 18; the whole, not a change")
    rows.append(bounded(claim, of_models(found, VISION, VARIANTS["acquisition 20 s"], "compliance"), at_most=85.0))
    for name, low, high in (("headroom 0.9", -25.0, -15.0), ("band", 15.0, 30.0)):
        more = more_than(of_models(found, VISION, VARIANTS[name], "usd_per_h"), base_usd)
        claim = _claim("sensitivity", f"cost, {name}", "%", note="check 18")
        rows.append(bounded(claim, more, at_least=low, at_most=high, shape=_sign(low)))
    for name, field, unit, figure in (
        ("band", "compliance", "%", 99.06),
        ("band", "usd_per_h", "$/h", 0.561),
        ("band", "dearer", "%", 10.4),
        ("serial lane, no backlog", "compliance", "%", 98.89),
        ("serial lane, no backlog", "p99_ms", "ms", 208.0),
    ):
        samples = of_models(found, VISION, VARIANTS[name], field)
        what = {"usd_per_h": "cost", "p99_ms": "P99", "dearer": "time on nodes dearer than the M60"}.get(field, field)
        note = "settings A, but for what sloop has not: queues that stay behind, no limit of residents"
        claim = _claim("sensitivity", f"{what}, {name}", unit, derived=figure, note="" if name == "band" else note)
        rows.append(compare(claim, samples, similar=True))
    return rows


# Other scenes: figures 1, 12 and 13, table III


def motivation_rows(found: Found) -> list[Row]:
    """Check 14: figure 1."""
    rows = []
    for model, figures in zip(
        FIGURE_1,
        ((99.9, 81.7, 78.5, 100, 100), (99.96, 97.3, 93.1, 100, 100), (98.8, 90.2, 80.5, 100, 100)),
        strict=True,
    ):
        for (name, each), figure in zip(MOTIVATION.items(), figures, strict=True):
            samples = found.each(trial_of(model, *each), "compliance")
            claim = _claim("figure 1", f"{name}, {model}, compliance", "%", derived=float(figure))
            rows.append(compare(claim, samples, similar=True))
    hybrid, mps, shared, *best = (
        found.each(trial_of(FIGURE_1[0], *each), "compliance") for each in MOTIVATION.values()
    )
    claim = _claim("figure 1", "Offline Hybrid, SENet18, compliance, bound", "%", paper=99.0, note="check 14")
    rows.append(bounded(claim, hybrid, at_least=99.0))
    for name, samples, published in (("MPS Only ($)", mps, 16.0), ("Time Shared Only ($)", shared, 11.0)):
        less = minus(hybrid, samples)
        claim = _claim("figure 1", f"SENet18, compliance, Offline Hybrid - {name}", "points", "text", published)
        rows.append(compare(claim, less, similar=True))
        claim = _claim("figure 1", f"SENet18, compliance, Offline Hybrid - {name}, bound", "points", note="check 14")
        rows.append(bounded(claim, less, at_least=8.0, at_most=25.0))
    claim = _claim("figure 1", "SENet18, compliance, (P) - Offline Hybrid", "points", paper=0.78)
    rows.append(
        bounded(claim, minus([min(pair) for pair in zip(*best, strict=True)], hybrid), at_least=0.0, at_most=0.78)
    )
    return rows


def exhaustion_rows(found: Found) -> list[Row]:
    """Check 15: figure 13a, 700 requests/s of GoogleNet on one V100."""
    samples = {
        system: found.each(trial_of(EXHAUSTION, system, options), "compliance") for system, options in EXHAUSTED.items()
    }
    rows = []
    for system, published, low, high in (
        ("paldia", 97.55, 96.0, None),
        ("molecule-performance", 62.0, 55.0, 75.0),
        ("infless-llama-performance", 33.0, 15.0, 50.0),
    ):
        claim = _claim("exhaustion", f"{LABELS[system]}, compliance", "%", paper=published)
        rows.append(compare(claim, samples[system], similar=True))
        claim = _claim("exhaustion", f"{LABELS[system]}, compliance, bound", "%", note="check 15")
        rows.append(bounded(claim, samples[system], at_least=low, at_most=high))
    return rows


def failure_rows(found: Found) -> list[Row]:
    """Check 16: figure 13b, in which the node in use fails every second minute."""
    samples, usual = (
        {
            system: found.each(structs.replace(trial_of(FAILING, system), **world), "compliance")
            for system in PUBLISHED_SYSTEMS
        }
        for world in ({"faults": "outages", "acquire_s": 0.6}, {})
    )
    claim = _claim("node failures", "PALDIA, compliance", "%", paper=99.82)
    rows = [compare(claim, samples["paldia"], similar=True)]
    rows.append(bounded(_claim("node failures", "PALDIA, compliance, bound", "%", note="check 16"),
                        samples["paldia"], at_least=98.5))  # fmt: skip
    claim = _claim("node failures", "Molecule (P), compliance, bound", "%", note="check 16")
    rows.append(bounded(claim, samples["molecule-performance"], at_most=97.0))
    claim = _claim(
        "node failures", "INFless (P), compliance", "%", derived=99.2, note="98.4 to 100, by the surge's minute"
    )
    rows.append(compare(claim, samples["infless-llama-performance"], similar=True))
    less = minus(samples["molecule-performance"], usual["molecule-performance"])
    rows.append(directed(_claim("node failures", "Molecule (P), compliance, change by failures", "points"), less,
                         "worse than without (check 16)", below=0, of="every run"))  # fmt: skip
    for system in CHEAP:
        more = minus(samples[system], usual[system])
        claim = _claim("node failures", f"{LABELS[system]}, compliance, change by failures", "points")
        rows.append(directed(claim, more, "better than without (check 16)", above=0))
    own, best = (of_both_failing(found, systems) for systems in (("paldia",), BEST))
    saved = less_than(own, best)
    claim = _claim("node failures", "cost saved by PALDIA beside (P)", "%", "text", 70.0)
    rows.append(compare(claim, saved, similar=True))
    claim = _claim("node failures", "cost saved by PALDIA beside (P), bound", "%", note="check 16")
    return [*rows, bounded(claim, saved, at_least=60.0, at_most=78.0)]


def of_both_failing(found: Found, systems: Sequence[str]) -> list[float]:
    """The mean cost of these systems where nodes fail, by seed."""
    each = [
        found.each(structs.replace(trial_of(FAILING, system), faults="outages", acquire_s=0.6), "usd_per_h")
        for system in systems
    ]
    return [fmean(pair) for pair in zip(*each, strict=True)]


def background_rows(found: Found) -> list[Row]:
    """Check 20: table III, other work on the cores of all nodes for 30 % of the time."""
    rows, lost = [], {}
    published = dict(zip(PUBLISHED_SYSTEMS, (94.78, 75.83, 76.44, 99.99, 99.99), strict=True))
    for system in PUBLISHED_SYSTEMS:
        trial = PaldiaTrial(model="", system=system, faults="background")
        samples = of_models(found, QUICK, trial, "compliance")
        lost[system] = minus(of_models(found, QUICK, system, "compliance"), samples)
        claim = _claim("mixed workloads", f"{LABELS[system]}, compliance", "%", paper=published[system],
                      note="three models; how much the other work disturbs is not published")  # fmt: skip
        rows.append(compare(claim, samples, similar=True))
        if system in BEST:
            claim = _claim("mixed workloads", f"{LABELS[system]}, compliance, bound", "%", note="check 20")
            rows.append(bounded(claim, samples, at_least=99.9))
    claim = _claim("mixed workloads", "PALDIA, points lost", "points", note="check 20")
    rows.append(bounded(claim, lost["paldia"], at_least=3.0, at_most=8.0))
    for system in CHEAP:
        claim = _claim("mixed workloads", f"points lost, {LABELS[system]} - PALDIA", "points")
        more = minus(lost[system], lost["paldia"])
        rows.append(directed(claim, more, "($) lose more (check 20)", above=0))
    return rows


def other_rows(found: Found) -> list[Row]:
    """Check 17: figure 12, with values that are fitted to it."""
    rows = []
    figures: tuple[tuple[str, str, float, float], ...] = (
        (OTHER[0], "paldia", 99.25, 99.9),
        (OTHER[0], "molecule-cost", 84.39, 90.2),
        (OTHER[0], "infless-llama-cost", 79.93, 84.3),
        (OTHER[1], "paldia", 98.48, 98.3),
        (OTHER[1], "molecule-cost", 71.86, 75.6),
        (OTHER[1], "infless-llama-cost", 70.28, 70.6),
    )
    for name, system, published, derived in figures:
        samples = found.each(trial_of(name, system), "compliance")
        what = f"{LABELS[system]}, {name}, compliance"
        claim = _claim(
            "other traces", what, "%", paper=published, note=f"derived with the same fitted values: {derived}"
        )
        rows.append(compare(claim, samples, similar=True))
        low, high = (97.0, None) if system == "paldia" else (65.0, 92.0)
        claim = _claim("other traces", f"{what}, bound", "%", note="check 17")
        rows.append(bounded(claim, samples, at_least=low, at_most=high))
    for name, published, above in ((OTHER[0], 72.0, 4.0), (OTHER[1], 69.0, 7.0)):
        own, cheap, best = (of_both(found, (name,), systems, "usd_per_h") for systems in (("paldia",), CHEAP, BEST))
        saved = less_than(own, best)
        claim = _claim("other traces", f"cost saved by PALDIA beside (P), {name}", "%", "text", published)
        rows.append(compare(claim, saved, similar=True))
        claim = _claim("other traces", f"cost saved by PALDIA beside (P), {name}, bound", "%", note="check 17")
        rows.append(bounded(claim, saved, at_least=60.0, at_most=75.0))
        more = more_than(own, cheap)
        claim = _claim(
            "other traces", f"cost of PALDIA above ($), {name}", "%", "text", above, note="derived: 13 and 49 %"
        )
        rows.append(compare(claim, more, similar=True))
    return rows
