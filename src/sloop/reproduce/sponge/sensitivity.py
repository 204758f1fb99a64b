"""What Sponge's result depends on: burstiness (check 7), mixed payloads (check 8), dispatch (check 9).

`derived` figures are those of an independent simulation. Where nobody printed a number, what is tested is the direction
in which it must move, and the number is reported. Source: Razavi et al., Sponge (EuroMLSys 2024).
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import structs

from sloop.reproduce.rows import Claim, Row, bounded, equals
from sloop.reproduce.sponge.evaluation import MIDDLE, SPONGE, STATIC_8, STATIC_16
from sloop.reproduce.sponge.trials import Results, Trial

SMOOTH_MAX: Final = 0.1
"""What §7.3-7 allows under smooth arrivals, in %."""

MIXED: Final = (100.0, 200.0, 500.0)
WIDE: Final = (50.0, 200.0, 800.0)


def sponge(policy: str, margin: float = 0.9, **parameters: Any) -> Trial:  # noqa: ANN401  # a policy's own
    """Sponge with other parameters than those of the artefact."""
    return Trial(policy=policy, system="sponge", parameters=(("margin", margin), *sorted(parameters.items())))


def arriving(trial: Trial, arrival: Literal["burst", "uniform", "poisson", "equal"], ratio: float = MIDDLE) -> Trial:
    """The same under other arrivals."""
    return structs.replace(trial, arrival=arrival, ratio=ratio)


def mixed(trial: Trial, payload_kb: tuple[float, ...] = MIXED) -> Trial:
    """Clients of different payloads; arrivals at once, with what is left of their budgets."""
    return structs.replace(trial, payload_kb=payload_kb, semantics="attach")


STEADY: Final = sponge("steady", 1.0, criterion="steady")

CHECK_7: Final[tuple[tuple[str, Trial, float | None, float | None, float | None], ...]] = (
    ("static-8, uniform, l/1.05", arriving(STATIC_8, "uniform"), None, 0.02, None),
    ("static-16, uniform, l/1.05", arriving(STATIC_16, "uniform"), None, 0.02, None),
    ("burst planning, margin 1, uniform, l/1.05", arriving(SPONGE[1.0], "uniform"), None, SMOOTH_MAX, 8.3),
    ("burst planning, margin 0.9, uniform, l/1.05", arriving(SPONGE[0.9], "uniform"), None, SMOOTH_MAX, 11.1),
    ("steady planning, uniform, l/1.05", arriving(STEADY, "uniform"), None, SMOOTH_MAX, 6.0),
    ("static-8, uniform, l", arriving(STATIC_8, "uniform", 1.0), 89.0, None, None),
    ("steady planning, uniform, l", arriving(STEADY, "uniform", 1.0), 24.0, None, None),
    ("steady planning, Poisson, l/1.05", arriving(STEADY, "poisson"), 21.0, None, None),
    ("steady planning, Poisson, l/1.1", arriving(STEADY, "poisson", 1.1), 4.0, None, None),
    ("static-8, Poisson, l/1.05", arriving(STATIC_8, "poisson"), 24.0, None, None),
    ("static-8, Poisson, l/1.1", arriving(STATIC_8, "poisson", 1.1), 4.0, None, None),
    ("static-16, Poisson, l/1.05", arriving(STATIC_16, "poisson"), None, SMOOTH_MAX, None),
)
"""What, the trial, derived violations, at most so many violations, derived cores."""

FIFO: Final = (("order", "fifo"),)


def fifo(trial: Trial) -> Trial:
    """The same without deadlines in the queue."""
    return structs.replace(trial, parameters=(*trial.parameters, *FIFO), policy=f"{trial.policy} fifo")


CLMAX: Final = {margin: mixed(sponge(f"clmax {margin:g}", margin, infeasible="crude")) for margin in (1.0, 0.9)}
PER_BATCH: Final = {
    margin: mixed(sponge(f"per_batch {margin:g}", margin, budget="per_batch", infeasible="crude"))
    for margin in (1.0, 0.9)
}
PER_BATCH_FIFO: Final = {margin: fifo(trial) for margin, trial in PER_BATCH.items()}
CLMAX_WIDE, PER_BATCH_WIDE = mixed(CLMAX[0.9], WIDE), mixed(PER_BATCH[0.9], WIDE)

CHECK_8: Final[tuple[tuple[str, tuple[Trial, ...], tuple[float, float], tuple[float, float] | None], ...]] = (
    ("static-8, EDF", (mixed(STATIC_8),), (0.21, 0.21), None),
    ("static-8, FIFO", (fifo(mixed(STATIC_8)),), (2.06, 2.06), None),
    ("static-16, EDF", (mixed(STATIC_16),), (0.11, 0.11), None),
    ("static-16, FIFO", (fifo(mixed(STATIC_16)),), (0.63, 0.63), None),
    ("clmax", tuple(CLMAX.values()), (0.63, 0.73), (9.9, 13.3)),
    ("per_batch", tuple(PER_BATCH.values()), (0.17, 0.37), (7.1, 9.1)),
    ("per_batch, FIFO", tuple(PER_BATCH_FIFO.values()), (1.0, 2.0), None),
    ("clmax, {50, 200, 800} KB", (CLMAX_WIDE,), (2.5, 2.5), (15.4, 15.4)),
    ("per_batch, {50, 200, 800} KB", (PER_BATCH_WIDE,), (0.9, 1.3), (8.8, 8.8)),
)
"""What, the trials (margins), the derived range of violations and of cores."""

FALLBACKS: Final = ("keep", "crude", "dry_run")
FULL: Final = {name: sponge(f"full {name}", 1.0, batch="timeout", infeasible=name) for name in FALLBACKS}
CONSERVING: Final = {name: sponge(f"conserving {name}", 1.0, infeasible=name) for name in FALLBACKS}
CHECK_9: Final = {
    ("delay", "keep"): (5.3, 1.6),
    ("delay", "crude"): (3.6, 1.4),
    ("delay", "dry_run"): (8.8, 1.4),
    ("attach", "keep"): (29.0, 1.4),
    ("attach", "crude"): (29.0, 1.4),
    ("attach", "dry_run"): (29.0, 1.4),
}
"""Derived violations of `full` and of work-conserving dispatch, at a mean of l; for `attach` ranges were given."""


REMAINDER: Final = (
    "the derived runs start at batch 1, and what that leaves waits for the next burst, second after second; "
    "told the rate, ours leave nothing"
)


def _check_9(trial: Trial, semantics: str) -> Trial:
    return structs.replace(trial, semantics=semantics, ratio=1.0)


def _blind() -> Trial:
    """Full dispatch that starts at batch 1, not knowing the rate."""
    return structs.replace(_check_9(FULL["keep"], "attach"), told=False, policy="full, rate monitored")


def trials() -> list[Trial]:
    """All that `rows` reads."""
    nine = [_check_9(kind[fallback], semantics) for semantics, fallback in CHECK_9 for kind in (FULL, CONSERVING)]
    nine.append(_blind())
    return [*(trial for _, trial, *_ in CHECK_7), *(trial for _, group, *_ in CHECK_8 for trial in group), *nine]


def rows(results: Results) -> list[Row]:
    """Checks 7, 8 and 9."""
    return [*_burstiness(results), *_payloads(results), *_dispatch(results)]


def _burstiness(results: Results) -> list[Row]:
    made = []
    for what, trial, derived, at_most, cores in CHECK_7:
        claim = Claim(experiment="check 7", metric=f"violations, {what}", unit="%", derived=derived)
        found = results.violations(trial)
        if at_most is not None:
            made.append(bounded(claim, found, at_most=at_most, shape=sum(found) / len(found) < 2 * at_most))
        elif derived is not None:
            made.append(equals(claim, found, within=max(1.0, 0.15 * derived), shape=min(found) > SMOOTH_MAX))
        if cores is not None:
            claim = Claim(experiment="check 7", metric=f"cores, {what}", unit="cores", derived=cores)
            made.append(equals(claim, results.cores(trial), within=0.2, shape=True))
    return made


def _within(claim: Claim, samples: Sequence[float], limits: tuple[float, float], slack: float, shape: bool) -> Row:
    """A derived range, widened by `slack` at both ends."""
    low, high = limits
    claim = structs.replace(claim, derived=(low + high) / 2)
    return equals(claim, samples, within=(high - low) / 2 + slack, shape=shape)


def _payloads(results: Results) -> list[Row]:
    made = []
    for what, group, violations, cores in CHECK_8:
        claim = Claim(experiment="check 8", metric=f"violations, {what}", unit="%")
        found = [share for trial in group for share in results.violations(trial)]
        made.append(_within(claim, found, violations, max(0.08, 0.1 * violations[1]), shape=True))
        if cores is not None:
            claim = Claim(experiment="check 8", metric=f"cores, {what}", unit="cores")
            made.append(_within(claim, [c for t in group for c in results.cores(t)], cores, 0.2, shape=True))
    for margin in CLMAX:
        fewer = [
            mine - theirs
            for mine, theirs in zip(
                results.violations(PER_BATCH[margin]), results.violations(CLMAX[margin]), strict=True
            )
        ]
        cheaper = [
            mine - theirs
            for mine, theirs in zip(results.cores(PER_BATCH[margin]), results.cores(CLMAX[margin]), strict=True)
        ]
        for name, unit, values in (("violations", "points", fewer), ("cores", "cores", cheaper)):
            claim = Claim(
                experiment="check 8", metric=f"{name}, per_batch - clmax, margin {margin:g}", unit=unit,
                note="per_batch with EDF must dominate",
            )  # fmt: skip
            made.append(bounded(claim, values, at_most=0, shape=sum(values) < 0))
    return made


def _dispatch(results: Results) -> list[Row]:
    made = []
    for (semantics, fallback), (full, conserving) in CHECK_9.items():
        waiting = results.violations(_check_9(FULL[fallback], semantics))
        prompt = results.violations(_check_9(CONSERVING[fallback], semantics))
        worse = min(waiting) > max(prompt)
        for what, found, derived in (("full", waiting, full), ("work-conserving", prompt, conserving)):
            claim = Claim(
                experiment="check 9", metric=f"violations, {what} dispatch, {semantics}, {fallback}", unit="%",
                derived=derived, note=REMAINDER if (what, semantics) == ("full", "attach") else "margin 1, mean = l",
            )  # fmt: skip
            made.append(equals(claim, found, within=max(0.2, 0.1 * derived), shape=worse))
    blind, derived = results.violations(_blind()), CHECK_9["attach", "keep"][0]
    claim = Claim(
        experiment="check 9",
        metric="violations, full dispatch, attach, keep, rate monitored",
        unit="%",
        derived=derived,
        note="from batch 1, as the derived runs",
    )
    prompt = results.violations(_check_9(CONSERVING["keep"], "attach"))
    return [*made, equals(claim, blind, within=0.1 * derived, shape=min(blind) > max(prompt))]
