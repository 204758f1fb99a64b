"""Biscale reproduced: its programs, its evaluation on three pipelines, its course in time, and what it depends on.

Source: Razavi, dissertation (TU Darmstadt 2024), chapter P4; as Themis: arXiv 2407.14843; and the public artefact,
whose fits, limits and constants are used.
"""

from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.reproduce import twitter
from sloop.reproduce.biscale import evaluation, offline, pictures, sensitivity, threads
from sloop.reproduce.biscale.trials import CORES, Results, Trial, Wanted, excerpt_of, play, seeded
from sloop.reproduce.outcome import Reproduction
from sloop.reproduce.parallel import Progress, each, silent
from sloop.reproduce.rows import Row

SOURCE: Final = "Razavi, dissertation, TU Darmstadt 2024, chapter P4 (Biscale; arXiv 2407.14843: Themis)"


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` plays one seed of the evaluation, the drop rules and the motivation, and nothing else.

    `data` is the folder of public data, without which a stand-in of the same shape is played, and every row that
    depends on it says so.
    """
    folder = str(data) if data is not None else ""
    wanted = [*evaluation.trials(quick=quick), *sensitivity.trials(quick=quick)]
    results = run(wanted, folder, processes=processes, progress=progress)
    played = [*evaluation.rows(results, quick=quick), *sensitivity.rows(results, quick=quick)]
    excerpt = excerpt_of("video", folder)
    later = None if quick else twitter.held_out(data)
    rows = [*offline.rows(later), *threads.rows(), *(played if excerpt.is_measured else map(_on_a_stand_in, played))]
    assumed = [
        "seven models: fits to published P99 latencies (Biscale's artefact); true durations vary by 5 % around them",
        f"one node of {CORES:g} cores: no limit of room",
        "a resize takes 0.1 s; a replica 5.5 s (video), 7 s (audio), 12 s (nlp) to start; the network nothing",
    ]
    assumed += [] if excerpt.is_measured else [f"requests: {excerpt.provenance}"]
    return Reproduction("biscale", SOURCE, tuple(rows), tuple(pictures.figures(results, folder)), tuple(assumed))


def _on_a_stand_in(row: Row) -> Row:
    return structs.replace(row, note=f"{row.note}; a stand-in for the Twitter trace, which is not at hand")


def run(wanted: Wanted, data: str, *, processes: int = 0, progress: Progress = silent) -> Results:
    """Play each of the trials once per seed; the same trial twice is played once."""
    ready = seeded(wanted, data)
    outcomes = each(play, ready, processes=processes, progress=progress, what=_named)
    return Results(dict(zip(ready, outcomes, strict=True)))


def _named(trial: Trial) -> str:
    return f"{trial.kind} on {trial.pipeline}"
