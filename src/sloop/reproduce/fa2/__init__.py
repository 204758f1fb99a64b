"""FA2 reproduced: its sweeps and examples by arithmetic, its evaluation in the simulator.

Source: Razavi et al., FA2: Fast, Accurate Autoscaling for Serving Deep Learning Inference with SLA Guarantees, RTAS
2022 (chapter P1 of Razavi's dissertation, TU Darmstadt 2024).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.reproduce.fa2 import offline, pictures
from sloop.reproduce.fa2.application import CPU, GPU, SOURCE, VISION
from sloop.reproduce.fa2.evaluation import ALONE, Evaluation
from sloop.reproduce.fa2.trials import Results, Trial, play
from sloop.reproduce.outcome import Reproduction
from sloop.reproduce.parallel import Progress, each, silent

PAPER: Final = "Razavi et al., FA2, RTAS 2022"
SEEDS: Final = (0, 1, 2)
SEEDS_QUICK: Final = (0,)


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` plays one seed, shorter, and leaves the long traces out. `data` is not needed."""
    evaluation = Evaluation(quick=quick)
    seeds = SEEDS_QUICK if quick else SEEDS
    wanted, long = evaluation.trials(), evaluation.long()
    ready = [structs.replace(trial, seed=seed) for trial in wanted for seed in seeds]
    # The long ones first: whoever plays the last of them must not be waited for.
    outcomes = each(play, [*long, *ready], processes=processes, progress=progress, what=_said)
    played = dict(zip([*long, *ready], outcomes, strict=True))
    results = Results(played, seeds)
    sweeps = (offline.swept(CPU, VISION), offline.swept(GPU, 6))
    rows = [
        *offline.rows(sweeps, quick=quick),
        *evaluation.rows(results, Results(played, (0,)) if long else None),
    ]
    figures = (
        pictures.of_sizes(),
        pictures.of_sweep(sweeps[0], "sweep-cores"),
        pictures.of_sweep(sweeps[1], "sweep-slices"),
        pictures.of_moving(evaluation, results),
        pictures.of_fixed(evaluation, results),
        pictures.of_headroom(evaluation, results),
    )
    return Reproduction("fa2", PAPER, tuple(rows), figures, _assumed(long))


def _said(trial: Trial) -> str:
    return f"{trial.plan or trial.system}, {trial.load}/s, {trial.paths} paths"


def _assumed(long: Sequence[Trial]) -> tuple[str, ...]:
    lines = (
        f"latencies of the ten models: fitted ({SOURCE})",
        "service times: normal, mean d/1.15, variation 4 %: assumed, as the specification recommends",
        "starting replicas do not slow down others: published as interference, not simulated",
    )
    return (*lines, f"long traces: {ALONE}") if long else lines
