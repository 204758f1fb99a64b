"""Many independent runs in processes of their own, in order, with progress. Knows nothing of what is run."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from sloop.machine import usable_cpus

Given = TypeVar("Given")
Made = TypeVar("Made")

Progress = Callable[[float, str], None]
"""Told which share is done, 0 to 1, and what is being done."""

WORKERS_MAX = 16


def silent(share: float, what: str) -> None:
    """Progress for those who do not look."""


def workers() -> int:
    """As many processes as there are cores to run on."""
    return max(1, min(WORKERS_MAX, len(usable_cpus())))


def each(
    run: Callable[[Given], Made],
    given: Sequence[Given],
    *,
    processes: int = 0,
    progress: Progress = silent,
    what: Callable[[Given], str] = str,
) -> list[Made]:
    """`[run(value) for value in given]`, by `processes` at once (0: one for each core; 1: in this one)."""
    processes = min(processes or workers(), len(given))
    made: list[Made] = []
    if processes <= 1:
        for place, value in enumerate(given):
            made.append(run(value))
            progress((place + 1) / len(given), what(value))
        return made
    # Fresh interpreters: forking a process that may have threads is not safe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for place, answer in enumerate(pool.map(run, given, chunksize=1)):
            made.append(answer)
            progress((place + 1) / len(given), what(given[place]))
    return made
