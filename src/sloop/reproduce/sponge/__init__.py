"""Sponge reproduced: its link, its tables, its solver, its evaluation, and what the result depends on.

Source: Razavi et al., Sponge: Inference Serving with Dynamic SLOs Using In-Place Vertical Scaling, EuroMLSys 2024
(chapter P2 of Razavi's dissertation, TU Darmstadt 2024), and its public artefact.
"""

from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.profile.published import YOLOV5S_S
from sloop.reproduce.outcome import Reproduction
from sloop.reproduce.parallel import Progress, each, silent
from sloop.reproduce.rows import Row
from sloop.reproduce.sponge import ablations, evaluation, offline, pictures, sensitivity
from sloop.reproduce.sponge.trials import Results, Trial, link_of, play, seeded

SOURCE: Final = "Razavi et al., Sponge, EuroMLSys 2024"
ARTEFACT: Final = "saeid93__sponge"
"""The public artefact's folder among public data, named owner__repository."""

SEEDS: Final = tuple(range(5))
SEEDS_QUICK: Final = (0,)


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` plays one seed instead of five and leaves the ablations out.

    `data` holds the artefact's folder, without which a synthetic link stands in for the recorded one, and every row
    says so that depends on it.
    """
    artefact = data / ARTEFACT if data is not None and (data / ARTEFACT / offline.LINK).exists() else None
    path = str(artefact / offline.LINK) if artefact else ""
    link = link_of(path)
    seeds = SEEDS_QUICK if quick else SEEDS
    wanted = [*evaluation.trials(), *sensitivity.trials(), *([] if quick else ablations.trials())]
    results = run(wanted, seeds, path, processes=processes, progress=progress)
    played = [*evaluation.rows(results), *sensitivity.rows(results), *([] if quick else ablations.rows(results))]
    rows = [*offline.rows(link, artefact), *(played if artefact else map(_on_a_synthetic_link, played))]
    figures = [pictures.of_link(link), pictures.of_fit(), *pictures.of_evaluation(results)]
    if not quick:
        figures += pictures.of_ablations(results)
    assumed = [f"YOLOv5s: {YOLOV5S_S.origin} profile ({YOLOV5S_S.source})"]
    assumed += [] if artefact else [f"link: {link.provenance}"]
    return Reproduction("sponge", SOURCE, tuple(rows), tuple(figures), tuple(assumed))


def _on_a_synthetic_link(row: Row) -> Row:
    return structs.replace(row, note=f"{row.note}; {offline.SYNTHETIC}")


def run(
    wanted: list[Trial], seeds: tuple[int, ...], link: str, *, processes: int = 0, progress: Progress = silent
) -> Results:
    """Play each of the trials once per seed, over this link; the same trial twice is played once."""
    ready = list(dict.fromkeys(seeded(trial, seed, link) for trial in wanted for seed in seeds))
    outcomes = each(play, ready, processes=processes, progress=progress, what=lambda trial: trial.system)
    return Results(dict(zip(ready, outcomes, strict=True)), seeds, link)
