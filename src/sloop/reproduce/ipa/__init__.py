"""IPA reproduced: its optima, its evaluation on the Twitter trace beside FA2-low, FA2-high and RIM, and its knobs.

Source: Razavi, Resource Efficient Inference Serving with SLO Guarantee (dissertation, TU Darmstadt 2024), chapter P3,
and IPA's public artefact.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.reproduce.ipa import evaluation, knobs, offline, pictures
from sloop.reproduce.ipa.pipelines import ARTEFACT
from sloop.reproduce.ipa.trials import WORKLOADS, Results, Trial, Workload, excerpt_of, play, seeded
from sloop.reproduce.outcome import Reproduction
from sloop.reproduce.parallel import Progress, each, silent
from sloop.reproduce.rows import Row

SOURCE: Final = "Razavi, dissertation, TU Darmstadt 2024, chapter P3 (IPA)"
SEEDS: Final = tuple(range(3))
SEEDS_QUICK: Final = (0,)
QUICK: Final = ("video", "audio-sent")
QUICK_WORKLOADS: Final[tuple[Workload, ...]] = ("steady_low", "bursty", "steady_high")
"""What a quick reproduction plays."""


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` plays two of the five pipelines under three of the four workloads, once instead of thrice.

    `data` holds the Twitter trace, without which excerpts of the same shape stand in, and every row that depends on
    them says so.
    """
    pipelines, workloads = (QUICK, QUICK_WORKLOADS) if quick else (tuple(ARTEFACT), WORKLOADS)
    seeds = SEEDS_QUICK if quick else SEEDS
    folder = str(data) if data is not None else ""
    wanted = [*evaluation.trials(pipelines, workloads), *knobs.trials(pipelines, quick=quick)]
    # Before anything else keeps the machine busy: decisions are timed.
    sizes, slowest = offline.timings()
    results = run(wanted, seeds, folder, processes=processes, progress=progress)
    excerpt = excerpt_of(WORKLOADS[0], folder)
    played = [*evaluation.rows(results, pipelines), *knobs.rows(results, pipelines, quick=quick)]
    if not excerpt.is_measured:
        played = [_on_a_stand_in(row) for row in played]
    rows = [*offline.rows(), *offline.timing_rows(sizes, slowest), *played]
    figures = [
        *pictures.of_runs(results, pipelines, folder),
        pictures.of_deciding(sizes),
        pictures.of_preferences(results, pipelines),
        pictures.of_latencies(results, pipelines),
        pictures.of_forecasters(results, pipelines, quick=quick),
    ]
    return Reproduction("ipa", SOURCE, tuple(rows), tuple(figures), tuple(_assumed(pipelines, excerpt.provenance)))


def run(
    wanted: Sequence[Trial], seeds: tuple[int, ...], data: str, *, processes: int = 0, progress: Progress = silent
) -> Results:
    """Play each of the trials once per seed; the same trial twice is played once."""
    ready = list(dict.fromkeys(seeded(trial, seed, data) for trial in wanted for seed in seeds))
    outcomes = each(
        play, ready, processes=processes, progress=progress, what=lambda trial: f"{trial.pipeline}, {trial.policy}"
    )
    return Results(dict(zip(ready, outcomes, strict=True)), seeds, data)


def _on_a_stand_in(row: Row) -> Row:
    return structs.replace(row, note=f"{row.note}; a made-up excerpt: the Twitter trace is not at hand")


def _assumed(pipelines: Sequence[str], provenance: str) -> list[str]:
    """What nobody measured here."""
    found = [] if provenance.startswith("measured") else [f"requests: {provenance}"]
    for name in pipelines:
        for step in ARTEFACT[name].steps:
            found += [
                f"{name}, {step.name}: {model.name}: {model.origin} speed ({model.profile.source})"
                for model in step.models
            ]
    return list(dict.fromkeys(found))
