"""Reproductions of publications, by name: `reproduce("sponge", quick=True)` gives rows with verdicts, and figures.

Each publication is a folder: `__init__` assembles rows and figures, `offline` computes results that need no simulation,
and `runs` defines the simulated experiments. `harness` simulates them, `rows` compares figures.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Protocol

from sloop.errors import InputError
from sloop.reproduce import asyfunc, biscale, colocation, fa2, flashpoint, ipa, netnn, paldia, sponge
from sloop.reproduce.harness import Progress, Reproduction, silent
from sloop.reproduce.rows import Row

__all__ = ["REPRODUCTIONS", "Reproduction", "Row", "data_folder", "reproduce"]


class Reproduce(Protocol):
    """The function that reproduces one publication."""

    def __call__(
        self, *, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent
    ) -> Reproduction: ...


REPRODUCTIONS: Final[Mapping[str, Reproduce]] = {
    "sponge": sponge.reproduce,
    "fa2": fa2.reproduce,
    "biscale": biscale.reproduce,
    "ipa": ipa.reproduce,
    "netnn": netnn.reproduce,
    "flashpoint": flashpoint.reproduce,
    "colocation": colocation.reproduce,
    "paldia": paldia.reproduce,
    "asyfunc": asyfunc.reproduce,
}


def reproduce(
    name: str, *, quick: bool = False, data: Path | None = None, processes: int = 0, progress: Progress = silent
) -> Reproduction:
    """Reproduce the publication `name`; `quick` takes less than a minute and simulates less.

    `data` is the folder of public data (default: `data_folder()`). InputError for an unknown name.
    """
    found = REPRODUCTIONS.get(name)
    if found is None:
        near = get_close_matches(name, REPRODUCTIONS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(REPRODUCTIONS)}"
        raise InputError(f"there is no reproduction of {name!r}", help=hint)
    return found(quick=quick, data=data or data_folder(), processes=processes, progress=progress)


def data_folder() -> Path | None:
    """The folder of public traces and profiles: `data/` inside the folder that SLOOP_SHARED names, or inside `shared`
    next to a checkout. None if there is neither."""
    named = os.environ.get("SLOOP_SHARED")
    beside_checkout = Path(__file__).resolve().parents[4] / "shared"
    folder = (Path(named) if named else beside_checkout) / "data"
    return folder if folder.is_dir() else None
