"""Sponge's knobs one at a time, around the artefact's setting (margin 0.9, mean = l/1.05, bursts over the 4G link).

Nobody printed these numbers, so what is tested is the direction in which each knob must move the violations; cores are
told beside them. The design comes from the specification's list of ablations (§5.4).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

from msgspec import structs

from sloop.reproduce.rows import Claim, Row, shaped
from sloop.reproduce.sponge.evaluation import FA2_COLD, MIDDLE, SPONGE, at
from sloop.reproduce.sponge.sensitivity import FALLBACKS, fifo, sponge
from sloop.reproduce.sponge.trials import Results, Trial

NOISE: Final = 0.1
"""Points of violations that seeds differ by anyway."""

Direction = Literal["rising", "falling", "level"]
BASE: Final = SPONGE[0.9]
ERRORS: Final = (0.0, 0.1, 0.2, 0.3)


def _each(template: str, values: Sequence[float], field: str) -> tuple[tuple[str, Trial], ...]:
    """The base setting with one field of the trial at each of these values."""
    return tuple(
        (template.format(value), structs.replace(BASE, policy=f"{field} {value:g}", **{field: value}))
        for value in values
    )


def _wrong(*, correct: bool) -> tuple[tuple[str, Trial], ...]:
    """Truth slower than the profile."""
    return tuple(
        (f"{error:.0%}", structs.replace(BASE, policy=f"error {error:g}", profile_error=1 + error, correct=correct))
        for error in ERRORS
    )


KNOBS: Final[tuple[tuple[str, Direction, str, tuple[tuple[str, Trial], ...]], ...]] = (
    (
        "planning period",
        "rising",
        "slower planning does not violate less",
        tuple((f"{p:g} s", sponge(f"period {p:g}", period_ms=1000 * p)) for p in (0.5, 1.0, 2.0, 5.0)),
    ),
    (
        "resize latency",
        "rising",
        "slower resizing does not violate less",
        _each("{:g} ms", (10.0, 50.0, 100.0, 500.0, 6000.0), "resize_ms"),
    ),
    (
        "payload",
        "rising",
        "larger payloads do not violate less",
        tuple(
            (f"{kb:g} KB", structs.replace(BASE, policy=f"payload {kb:g}", payload_kb=(kb,)))
            for kb in (100.0, 200.0, 284.0, 400.0)
        ),
    ),
    (
        "largest core count",
        "falling",
        "more cores do not violate more",
        tuple(
            (f"{most}", sponge(f"most {most}", cores=tuple(map(float, range(1, most + 1))))) for most in (8, 10, 12, 16)
        ),
    ),
    (
        "largest batch",
        "falling",
        "larger batches do not violate more",
        tuple((f"{most}", sponge(f"batch {most}", batch_max=most)) for most in (1, 4, 16)),
    ),
    (
        "order of equal clients",
        "level",
        "all budgets shrink alike, so order does not matter",
        (("EDF", BASE), ("FIFO", fifo(BASE))),
    ),
    (
        "budget of equal clients",
        "level",
        "clmax and per_batch are the same for equal clients",
        (("clmax", BASE), ("per_batch", sponge("equal per_batch", budget="per_batch"))),
    ),
    (
        "memory of the network",
        "falling",
        "planning for the worst of 3 s does not violate more",
        (("1 s", BASE), ("3 s", sponge("lookback 3", lookback=3))),
    ),
    (
        "scale-down",
        "falling",
        "hesitating does not violate more",
        (("at once", BASE), ("after 2 equal", sponge("hysteresis 2", hysteresis=2))),
    ),
    (
        "what is planned for",
        "rising",
        "planning for the queue alone violates more",
        (("a second's arrivals", BASE), ("the queue", sponge("queue planning", planning_set="queue"))),
    ),
    (
        "no feasible plan",
        "rising",
        "keeping the old setting is no better than all cores",
        tuple((name, sponge(f"infeasible {name}", infeasible=name)) for name in reversed(FALLBACKS)),
    ),
    ("drop limit", "level", "Sponge lags too little for it to matter", _each("{:g} × SLO", (1.0, 3.0), "drop")),
    ("profile too optimistic by", "rising", "a worse profile does not violate less", _wrong(correct=False)),
    ("the same, corrected online by", "rising", "a worse profile does not violate less", _wrong(correct=True)),
    (
        "correcting a profile 30 % too optimistic",
        "falling",
        "correction does not violate more",
        (("never", _wrong(correct=False)[-1][1]), ("online", _wrong(correct=True)[-1][1])),
    ),
    (
        "FA2 scales in",
        "falling",
        "hesitating does not violate more",
        (
            ("at once", FA2_COLD),
            (
                "after 3 equal",
                structs.replace(FA2_COLD, policy="fa2 calm", parameters=(("hysteresis", 3), ("initial", 1))),
            ),
        ),
    ),
)
"""Knob, the direction violations must take along its settings, that direction in words, the settings."""


def trials() -> list[Trial]:
    """All that `rows` reads."""
    return [at(trial, MIDDLE) for _, _, _, settings in KNOBS for _, trial in settings]


def rows(results: Results) -> list[Row]:
    """Violations for each setting; the verdict is that of its knob."""
    made = []
    for knob, direction, expect, settings in KNOBS:
        found = [results.violations(at(trial, MIDDLE)) for _, trial in settings]
        holds = follows(direction, [sum(values) / len(values) for values in found])
        for (setting, trial), values in zip(settings, found, strict=True):
            cores = results.cores(at(trial, MIDDLE))
            note = f"{sum(cores) / len(cores):.2f} cores"
            claim = Claim(experiment="ablation", metric=f"violations, {knob}: {setting}", unit="%", note=note)
            made.append(shaped(claim, values, shape=holds, expect=expect))
    return made


def follows(direction: Direction, means: Sequence[float]) -> bool:
    """Whether the means go that way, each step and from first to last, within `NOISE`."""
    steps = [after - before for before, after in pairwise(means)] + [means[-1] - means[0]]
    if direction == "rising":
        return min(steps) >= -NOISE
    if direction == "falling":
        return max(steps) <= NOISE
    return max(map(abs, steps)) <= NOISE
