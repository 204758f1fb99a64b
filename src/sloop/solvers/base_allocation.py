"""How many cores a replica of each variant gets once and for all, and what deadline each stage is measured by.

The two depend on each other: a stage's deadline is a multiple of its variants' latencies on the cores they got, and
they get the fewest cores that keep it. Starting from the fewest that carry the threshold, a few rounds find both. No
variant gets cores that it has no use for.

Source: IPA (Razavi, dissertation, chapter P3), base allocation and deadlines (factor 5 after Swayam); the rounds, and
that a more accurate variant has no fewer cores than one before it, are ours, after the published tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

FACTOR: Final = 5.0
ROUNDS_MAX: Final = 3

Latency = Callable[[int, float], float]
"""Milliseconds for a batch on so many cores."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How fast a variant is, and the core counts it may have, ascending; at least one."""

    latency_ms: Latency
    choices: Sequence[float]


@dataclass(frozen=True, slots=True)
class Base:
    """Cores per replica of each variant of a stage, None where no count will do, and the stage's deadline."""

    cores: tuple[float | None, ...]
    slo_ms: float


def base_cores(
    latency_ms: Latency, choices: Sequence[float], *, threshold_rps: float, batch_max: int, slo_ms: float
) -> float | None:
    """The fewest of `choices` on which a replica does `threshold_rps` one by one, and its largest batch within
    `slo_ms`; None where there are none."""
    for cores in sorted(choices):
        if 1000.0 / latency_ms(1, cores) >= threshold_rps and latency_ms(batch_max, cores) <= slo_ms:
            return cores
    return None


def quickest_cores(sizes: Sizes) -> float:
    """Where no count keeps the deadline: the fewest beyond which a request takes no less."""
    return min(sizes.choices, key=lambda cores: (sizes.latency_ms(1, cores), cores))


def derived_slo_ms(latencies_ms: Sequence[float], factor: float = FACTOR) -> float:
    """`factor` times the mean latency of a stage's variants, one request at a time on their own cores."""
    return factor * sum(latencies_ms) / len(latencies_ms)


def base(
    variants: Sequence[Sizes],
    *,
    threshold_rps: float,
    batch_max: int,
    slo_ms: float | None = None,
    factor: float = FACTOR,
) -> Base:
    """The cores of a stage's `variants`, least accurate first, and its deadline: `slo_ms`, or derived where None.

    Variants that no count suits are left out of the mean. Where that is all of them, the deadline is what the largest
    count gives.
    """

    def within(limit_ms: float) -> list[float | None]:
        found = [
            base_cores(own.latency_ms, own.choices, threshold_rps=threshold_rps, batch_max=batch_max, slo_ms=limit_ms)
            for own in variants
        ]
        return _rising(found, variants)

    if slo_ms is not None:
        return Base(tuple(within(slo_ms)), slo_ms)
    cores = within(inf)
    limit_ms = _slo_ms(variants, cores, factor)
    for _ in range(ROUNDS_MAX):
        again = within(limit_ms)
        if again == cores:
            break
        cores = again
        limit_ms = _slo_ms(variants, cores, factor)
    return Base(tuple(cores), limit_ms)


def _slo_ms(variants: Sequence[Sizes], cores: Sequence[float | None], factor: float) -> float:
    known = [own.latency_ms(1, count) for own, count in zip(variants, cores, strict=True) if count is not None]
    return derived_slo_ms(known or [own.latency_ms(1, max(own.choices)) for own in variants], factor)


def _rising(cores: Sequence[float | None], variants: Sequence[Sizes]) -> list[float | None]:
    """No variant has fewer cores than one before it, unless it has no use for more."""
    least, found = 0.0, list[float | None]()
    for count, own in zip(cores, variants, strict=True):
        least = max(least, count or 0.0)
        found.append(None if count is None else min(least, max(own.choices)))
    return found
