"""Published experiments beside our results: `reproduce("sponge", quick=True)` gives rows with verdicts, and figures.

Each publication has a folder `experiments`: `__init__` assembles rows and figures, `offline` computes results that need
no simulation, and `runs`, which NetNN has not, defines the simulated experiments. `harness` simulates them, `rows`
compares figures.
"""

import os
from pathlib import Path
from types import FunctionType
from typing import Final, Protocol

from sloop.api import Value
from sloop.api.commands import Registry
from sloop_systems.comparison.harness import Progress, Reproduction, silent
from sloop_systems.comparison.rows import Row

__all__ = ["REPRODUCTIONS", "Reproduction", "Row", "data_folder", "reproduce"]


class Reproduce(Protocol):
    """The function that reproduces one publication."""

    def __call__(
        self, *, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent
    ) -> Reproduction: ...


REPRODUCTIONS: Final[Registry[Reproduce]] = Registry("sloop.reproductions", {}, FunctionType)
"""By name: entry points, so that a folder that is not there is missed by nobody."""


def reproduce(
    name: str, *, quick: bool = False, data: Path | None = None, processes: int = 0, progress: Progress = silent
) -> Reproduction:
    """Reproduce the publication `name`; `quick` takes less than a minute and simulates less.

    `data` is the folder of public data (default: `data_folder()`). InputError for an unknown name.
    """
    found = Value(name).entry(REPRODUCTIONS, "reproduction")
    return found(quick=quick, data=data or data_folder(), processes=processes, progress=progress)


def data_folder() -> Path | None:
    """The folder of public traces and profiles: `data/` inside the folder that SLOOP_SHARED names, or inside `shared`
    next to a checkout. None if there is neither."""
    named = os.environ.get("SLOOP_SHARED")
    beside_checkout = Path(__file__).resolve().parents[4] / "shared"
    folder = (Path(named) if named else beside_checkout) / "data"
    return folder if folder.is_dir() else None
