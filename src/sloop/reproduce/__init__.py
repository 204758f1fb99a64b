"""Reproductions of publications, by name: `reproduce("sponge", quick=True)` gives rows with verdicts and figures.

One file or folder for each publication; adding one is adding a line to `REPRODUCTIONS`.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Protocol

from sloop.errors import InputError
from sloop.reproduce import biscale, fa2, ipa, sponge
from sloop.reproduce.outcome import Reproduction
from sloop.reproduce.parallel import Progress, silent
from sloop.reproduce.rows import Row

__all__ = ["REPRODUCTIONS", "Reproduction", "Row", "data_folder", "reproduce"]


class Reproduce(Protocol):
    """How a publication is reproduced."""

    def __call__(
        self, *, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent
    ) -> Reproduction: ...


REPRODUCTIONS: Final[Mapping[str, Reproduce]] = {
    "sponge": sponge.reproduce,
    "fa2": fa2.reproduce,
    "biscale": biscale.reproduce,
    "ipa": ipa.reproduce,
}


def reproduce(
    name: str,
    *,
    quick: bool = False,
    data: Path | None = None,
    processes: int = 0,
    progress: Progress = silent,
) -> Reproduction:
    """Reproduce the publication `name`; `quick` takes less than a minute and answers less.

    `data` is the folder of public data (default: `data_folder()`). InputError for an unknown name.
    """
    found = REPRODUCTIONS.get(name)
    if found is None:
        near = get_close_matches(name, REPRODUCTIONS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(REPRODUCTIONS)}"
        raise InputError(f"nothing to reproduce is called {name!r}", help=hint)
    return found(quick=quick, data=data or data_folder(), processes=processes, progress=progress)


def data_folder() -> Path | None:
    """Where public traces and profiles lie: `data/` in the folder that SLOOP_SHARED names, or in `shared` beside a
    checkout. None where there is neither."""
    named = os.environ.get("SLOOP_SHARED")
    beside = Path(__file__).resolve().parents[4] / "shared"
    folder = (Path(named) if named else beside) / "data"
    return folder if folder.is_dir() else None
