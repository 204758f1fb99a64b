"""The application of FA2's evaluation: ten models and six paths, each with a deadline, on cores and on GPU slices.

Paths and deadlines are published (dissertation chapter P1, table of paths); latencies of single models are not. They
are `fitted`: each path's deadline is five times the sum of its latencies, a model has the same latency on every path,
and the remaining freedom is used as in the specification (3.3 and 3.4). d(b) = αb² + βb + γ with α = κ d(1), γ = ρ
d(1).
"""

from dataclasses import dataclass
from typing import Final

from sloop.api.profiles import Profile, Quadratic
from sloop.api.solvers import IndexedPath
from sloop_systems.fa2.solver import Fa2Stage

BATCH_MAX: Final = 16
KAPPA: Final = 0.004
COLD_START_S: Final = 6.0
SOURCE: Final = "Razavi et al., FA2, RTAS 2022; single models as the specification calibrates them from path sums"

ORDER: Final = ("OBJD", "ALPR", "NSFW", "FACR", "OBJR", "IMGS", "AUTT", "SUMR", "QUAN", "TCLS")
"""Stages in topological order; ties by first appearance in the list of paths."""

PATHS: Final = (
    ("OBJD", "ALPR", "QUAN"),
    ("OBJD", "NSFW", "FACR"),
    ("OBJD", "OBJR", "IMGS"),
    ("SUMR", "QUAN"),
    ("AUTT", "QUAN"),
    ("AUTT", "SUMR", "TCLS"),
)
VISION: Final = 3
"""The first three paths, all for images; in them every stage has at most one predecessor."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One column of the tables: deadlines by path, d(1) by model, and the share ρ of d(1) that is constant in the
    batch."""

    name: str
    slos_ms: tuple[float, ...]
    alone_ms: tuple[float, ...]
    fixed: float


CPU: Final = Hardware(
    "CPU core", (3020, 3505, 3095, 13580, 12245, 25710), (220, 361, 101, 380, 170, 229, 2426, 2693, 23, 23), 0.35
)
GPU: Final = Hardware(
    "GPU slice", (1205, 1670, 960, 2200, 3005, 4815), (70, 93, 40, 224, 60, 62, 523, 362, 78, 78), 0.5
)


@dataclass(frozen=True, slots=True)
class Problem:
    """The application at one rate, as input of the solvers."""

    names: tuple[str, ...]
    stages: tuple[Fa2Stage, ...]
    paths: tuple[IndexedPath, ...]


def form_of(alone_ms: float, fixed: float) -> Quadratic:
    """d(b) of a model whose batch of 1 takes `alone_ms`."""
    return Quadratic(alpha=KAPPA * alone_ms, beta=(1 - fixed - KAPPA) * alone_ms, gamma=fixed * alone_ms)


def models(hardware: Hardware) -> dict[str, Quadratic]:
    """By name."""
    return {name: form_of(own, hardware.fixed) for name, own in zip(ORDER, hardware.alone_ms, strict=True)}


def problem(hardware: Hardware, paths: int, rate_rps: float) -> Problem:
    """The problem of the first `paths` paths, with equal shares of the requests."""
    chains, forms = PATHS[:paths], models(hardware)
    names = tuple(name for name in ORDER if any(name in chain for chain in chains))
    stages = tuple(
        Fa2Stage(
            name,
            sum(rate_rps / paths for chain in chains if name in chain),
            tuple(forms[name].latency_ms(batch, 1.0) for batch in range(1, BATCH_MAX + 1)),
        )
        for name in names
    )
    indexed = tuple(
        IndexedPath(tuple(names.index(name) for name in chain), slo_ms)
        for chain, slo_ms in zip(chains, hardware.slos_ms, strict=False)
    )
    return Problem(names, stages, indexed)


def profile_of(hardware: Hardware, name: str) -> Profile:
    """A model's profile for the simulator."""
    return Profile(
        latency_ms=models(hardware)[name],
        max_batch=BATCH_MAX,
        max_cores=1,
        load_s=COLD_START_S,
        hardware="Intel Core i9-9980X" if hardware is CPU else "10 % of an NVIDIA RTX 2080",
        origin="fitted",
        source=SOURCE,
        software="TensorFlow",
        date="2022-05-04",
    )
