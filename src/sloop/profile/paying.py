"""Which batch sizes are worth measuring: those that bring more rows a second, found by a quick look at the model.

A batch beyond that only makes everyone in it wait longer. A small network gains up to large batches, for calling it
costs more than running it; a large one on a few cores gains nothing beyond a handful.
"""

from collections.abc import Mapping
from contextlib import closing, suppress
from math import ceil
from pathlib import Path
from typing import Final

from sloop.errors import InputError, MachineError
from sloop.profile.measure import BATCHES, Limit, measure_on
from sloop.profile.sample import Sample
from sloop.profile.stopwatch import Assignment

BATCH_MAX: Final = 64
GAIN_MIN: Final = 1.1
"""A batch of twice the size must bring so many times the rows per second."""
LOOK_S: Final = 0.2
"""Time for the look at each size, at least `LOOK_RUNS` runs of it."""
LOOK_RUNS: Final = 5


def paying_batches(
    model_path: Path, *, cores: float, shapes: Mapping[str, tuple[int, ...]], limit: Limit
) -> tuple[int, ...]:
    """`BATCHES`, and on by doubling for as long as that pays on so many cores, and the model can be run.

    A model that cannot be run at all is left for `measure` to refuse.
    """
    sizes = [BATCHES[-1]]
    while sizes[-1] < BATCH_MAX:
        sizes.append(2 * sizes[-1])
    assignment = Assignment(str(model_path), ceil(cores), cores, tuple(sizes), dict(shapes))
    worth: list[int] = []
    best_rps = 0.0
    looks = measure_on(assignment, LOOK_S, limit, runs_min=LOOK_RUNS)
    with closing(looks), suppress(InputError, MachineError):  # too much for model or machine: what is smaller may do
        for found in looks:
            if not isinstance(found, Sample):
                break
            rate_rps = 1e3 * found.batch / found.p50_ms
            if rate_rps < best_rps * GAIN_MIN:
                break
            worth.append(found.batch)
            best_rps = rate_rps
    return (*BATCHES, *worth[1:])
