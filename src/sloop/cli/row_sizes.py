"""`sloop profile --sizes`: rows of several sizes of a model that leaves dimensions open."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import RenderableType

from sloop.cli.command import Shapes, table
from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.profile import COST_SPREAD_MAX, EXTRAPOLATED_MAX, Profile
from sloop.profile.row_sizes import (
    Lengths,
    curved_share,
    law_of,
    lengths_in,
    lengths_in_file,
    lengths_of,
    shapes_at,
    size_of,
    typical,
)
from sloop.report.tables import Table
from sloop.runlog import is_log, read_log
from sloop.systems.replay import sizes_in
from sloop.text import number

TERMS: Final = 3
"""The number of terms of the fit: it has no errors if there are only so many sizes."""


def lengths_list(text: str) -> tuple[Lengths, ...]:
    """Sizes separated by commas: `16,64,256`, or `224x224,640x480`."""
    try:
        return tuple(lengths_in(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes to measure: `given`, or taken from `source`, a file or a log. Neither: rows of one size."""

    given: tuple[Lengths, ...] = ()
    source: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.given) or self.source is not None

    def rows(self, known: ExaminedModel, others: Shapes, model: Path) -> dict[int, dict[str, tuple[int, ...]]]:
        """The shapes of the model's inputs by size, ascending. InputError for sizes that it cannot have."""
        chosen = self.given or typical(self._found(known, model))
        shapes = [shapes_at(known, lengths, others, str(model)) for lengths in chosen]
        return dict(sorted((size_of(known.signature, each), each) for each in shapes))

    def _found(self, known: ExaminedModel, model: Path) -> Mapping[Lengths, int]:
        assert self.source is not None
        if not is_log(self.source):
            return lengths_in_file(self.source)
        found = Counter[Lengths]()
        try:
            for (size, shape), count in sizes_in(read_log(self.source), model).items():
                found[lengths_of(known, size, shape)] += count
        except ValueError as error:
            help = "name a log of this version of the model, or give sizes with --sizes"
            raise InputError(f"requests had {error}", where=str(self.source), help=help) from error
        return found


def middle(rows: Mapping[int, dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The input shapes of the middle size; of an even number of sizes, of the smaller one in the middle. Empty without
    any."""
    shapes = [*rows.values()]
    return shapes[(len(shapes) - 1) // 2] if shapes else {}


def value_of_sizes(made: Profile) -> dict[str, Any]:
    """What `--json` says of sizes; nothing for a model of one size."""
    if not made.sizes:
        return {}
    law = law_of(made)
    return {
        "sizes": made.sizes,
        "size_classes": made.size_classes.bounds,
        "size_max": made.size_max,
        "size_law": law and {"params": law.params, "mape": law.mape, "max_error": law.max_error},
    }


def display_sizes(made: Profile) -> Sequence[RenderableType]:
    """Latencies by size and what follows from them; for a profile of one size, how to measure others."""
    if not made.sizes:
        return []
    first, last = made.sizes[0].size, made.sizes[-1].size
    if not made.knows_sizes:
        return [
            f"rows of other sizes than {first} are assumed to take more or less in proportion, until batches in "
            "service show it; --sizes measures them, for example 16,64,256, or 112x112,224x224 for several dimensions"
        ]
    batch, cores = made.max_batch, made.max_cores
    columns = ("size", "ms, batch 1", f"ms, batch {batch}", "μs an element")
    cells = tuple(
        (
            *(each.size, each.latency_ms.latency_ms(1, cores), each.latency_ms.latency_ms(batch, cores)),
            1e3 * each.latency_ms.latency_ms(batch, cores) / (batch * each.size),
        )
        for each in made.sizes
    )
    return [table(Table(f"rows of other sizes, {cores:g} cores", columns, cells)), *_remarks(made, first, last)]


def _remarks(made: Profile, first: int, last: int) -> Sequence[str]:
    batch, law = made.max_batch, law_of(made)
    least, most = (made.latency_at(size, batch, made.max_cores) for size in (first, last))
    lines = [f"a batch of {batch} takes {number(most / least)} times as long at size {last} as at size {first}"]
    if law is not None:
        curved = 100 * curved_share(law, last)
        lines[0] += f"; {curved:.0f} % of the time at size {last} grows with its square" if curved >= 1 else "; linear"
        if len(made.sizes) > TERMS:
            lines[0] += f" (mean error of the fit {100 * law.mape:.1f} %)"
    count = len(made.size_classes.bounds)
    return [
        *lines,
        f"{count} classes of sizes, in each of which the time differs by at most a factor of {COST_SPREAD_MAX:g}",
        f"sizes below {first} and above {last} are extrapolated; nothing measured says what rows above "
        f"{EXTRAPOLATED_MAX * last} take",
    ]
