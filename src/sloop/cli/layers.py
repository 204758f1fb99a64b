"""`sloop profile --layers`: the layers of a model, block by block, and what they suggest."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from msgspec import structs
from rich.console import RenderableType

from sloop.cli.command import CommandOutput, progress, table
from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.layers import measure_layers
from sloop.profile.measure import measure_briefly
from sloop.profile.profile import (
    Latency,
    LatencyTable,
    LayerProfile,
    Profile,
    is_of,
    load_profile,
    save_profile,
)
from sloop.report.plots import layers_figure
from sloop.report.svg import write_figure
from sloop.report.tables import Cell, Table
from sloop.serve.copies import ModelCopy
from sloop.serve.cpu_quota import confined
from sloop.systems.layers import BlockTable, LayerProposals, ShadowProposal, layer_proposals
from sloop.text import counted, number

MIB: Final = 2**20
NAMES_MAX: Final = 4
"""More layers after which to cut are not listed in a table."""


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """What is measured of each block."""

    batches: Sequence[int]
    cores: Sequence[float]
    passes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """The options that only `--layers` has."""

    cuts: tuple[str, ...] = ()
    pieces: Path | None = None
    piece_mib: float | None = None
    fetch_mbps: float | None = None
    plot: Path | None = None


def profile_layers(
    own: ModelCopy,
    known: ExaminedModel,
    rows: Mapping[str, tuple[int, ...]],
    timing: LayerTiming,
    options: LayerOptions,
    path: Path,
) -> CommandOutput:
    """Measure the layers of a model, add them to its profile at `path`, and propose cuts and shadows. A model without a
    profile is measured briefly as well."""
    model = own.original
    total = timing.passes * len(timing.batches) * len(timing.cores)
    with progress(f"measuring the layers of {model.name}", total=total) as advance:
        made = measure_layers(
            own.path,
            file=Path(known.file),
            cuts=options.cuts or None,
            folder=options.pieces,
            batches=timing.batches,
            cores=timing.cores,
            seconds=timing.seconds,
            passes=timing.passes,
            shapes=rows,
            limit=confined,
            progress=lambda done, cells, now: advance(done, now),
        )
    base, is_new = base_profile(own, known, rows, path)
    save_profile(structs.replace(base, layers=made), path)
    bound_bytes = inf if options.piece_mib is None else options.piece_mib * MIB
    found = layer_proposals(made, memory_bytes_max=bound_bytes, fetch_mbps=options.fetch_mbps)
    if options.plot is not None:
        columns = BlockTable(made)
        write_figure(layers_figure(model.name, columns.compute_ms, columns.param_bytes, columns.ranked), options.plot)
    value = {"model": str(model), "profile": str(path), "layers": made, "proposals": found, "notes": known.notes}
    remarks = [
        *(["it had no profile: one was measured briefly, as `sloop serve` does"] if is_new else []),
        *([f"the pieces are in {options.pieces}"] if options.pieces else []),
        *([f"the picture is in {options.plot}"] if options.plot else []),
        f"the layers are in {path}",
        *known.notes,
    ]
    return CommandOutput(value, [*_display(made, found), *remarks])


def kept_layers(made: Profile, path: Path) -> LayerProfile | None:
    """The layers in the profile at `path`, if they are of the same version of the model; None otherwise."""
    with suppress(InputError):
        layers = load_profile(path).layers
        if layers is not None and layers.model_digest == made.model_digest:
            return layers
    return None


def base_profile(
    own: ModelCopy, known: ExaminedModel, rows: Mapping[str, tuple[int, ...]], path: Path
) -> tuple[Profile, bool]:
    """The profile to which a measurement is added, and whether it had to be measured."""
    with suppress(InputError):
        found = load_profile(path)
        if is_of(found, own.path):
            return found, False
    with progress(f"measuring {own.original.name} briefly", total=1.0) as advance:
        made = measure_briefly(
            own.path,
            file=Path(known.file),
            batches=known.batches_alone or None,
            shapes=dict(rows),
            limit=confined,
            progress=lambda share, sample: advance(share),
        )
    return made, True


# Display


def _display(made: LayerProfile, found: LayerProposals) -> Sequence[RenderableType]:
    return [
        table(_blocks(made, found)),
        *_remarks(made, found),
        *([table(_cuts(made, found))] if found.cuts else []),
        *([table(_queues(found))] if found.queues else []),
        *([table(_shadows(found)), _shadow_line(found.shadows[0])] if found.shadows else ["no shadow makes it faster"]),
    ]


def _blocks(made: LayerProfile, found: LayerProposals) -> Table:
    assert isinstance(made.latency_ms, LatencyTable), "it was measured"
    batches = sorted(made.latency_ms.table)
    columns = ("block", "to layer", "operators", "MiB", "KiB/row on", "load ms")

    def times(latency: Latency) -> list[float]:
        return [latency.latency_ms(batch, found.cores) for batch in batches]

    cells: list[tuple[Cell, ...]] = [
        (
            *(place, each.end, each.operators, each.param_bytes / MIB, each.crossing_bytes / 1024, each.load_ms),
            *times(each.latency_ms),
        )
        for place, each in enumerate(made.blocks, start=1)
    ]
    weights_mib = sum(each.param_bytes for each in made.blocks) / MIB
    whole = (None, "the uncut model", "", weights_mib, None, made.load_ms, *times(made.latency_ms))
    return Table(
        f"{made.hardware}, {counted(found.cores, 'core')}",
        (*columns, *(f"ms, batch {each}" for each in batches)),
        (*cells, whole),
    )


def _remarks(made: LayerProfile, found: LayerProposals) -> Sequence[str]:
    lines = [
        f"half of the compute is in {100 * found.half_compute_share:.3g} % of the weights; "
        f"rank correlation of compute and weight {'–' if found.correlation is None else f'{found.correlation:.2f}'}",
        f"the chain of blocks differs from the uncut model by {made.difference:.1e} of the largest output",
    ]
    if made.move_ms_per_mb:
        lines.append(f"moving 1 MB between processes takes {made.move_ms_per_mb:.2g} ms")
    return lines


def _cuts(made: LayerProfile, found: LayerProposals) -> Table:
    rows = tuple(
        (
            each.pieces,
            _after(each.after),
            each.load_ms,
            each.load_saved_ms,
            each.param_bytes_max / MIB,
            each.slowest_ms,
            each.request_ms,
        )
        for each in found.cuts
    )
    whole_ms = made.latency_ms.latency_ms(found.batch, found.cores)
    title = (
        f"Cuts for equal load and compute, batch {found.batch} "
        f"(whole model: {number(made.load_ms)} ms to load, {number(whole_ms)} ms to run)"
    )
    columns = ("pieces", "cut after", "load ms", "saves ms", "largest MiB", "slowest ms", "ms through all")
    return Table(title, columns, rows)


def _queues(found: LayerProposals) -> Table:
    rows = tuple(
        (
            each.processes,
            each.waiting,
            each.pieces,
            _after(each.after),
            each.mean_ms,
            each.whole_ms,
            100 * (1 - each.mean_ms / each.whole_ms),
        )
        for each in found.queues
    )
    columns = ("processes added", "waiting", "pieces", "cut after", "mean ms", "whole models, ms", "saves %")
    return Table("Best pieces when requests wait (Flashpoint)", columns, rows)


def _after(names: Sequence[str]) -> str:
    if not names:
        return "–"
    return ", ".join(names) if len(names) <= NAMES_MAX else f"{', '.join(names[:NAMES_MAX])}, …"


def _shadows(found: LayerProposals) -> Table:
    rows = tuple(
        (
            each.selection,
            len(each.blocks),
            each.runs,
            each.param_bytes / MIB,
            100 * each.param_share,
            each.load_ms,
            each.load_saved_ms,
            each.alone_ms,
            each.pair_ms,
            each.gain,
        )
        for each in found.shadows
    )
    title = f"Shadows, batch {found.shadow_batch} (AsyFunc)"
    columns = ("selection", "blocks", "transfers", "MiB", "% of weights", "load ms", "saves ms")
    return Table(title, (*columns, "body alone ms", "pair ms", "times the rows/s"), rows)


def _shadow_line(best: ShadowProposal) -> str:
    return (
        f"proposed shadow: {counted(len(best.blocks), 'block')} up to {best.blocks[-1]}, "
        f"{number(best.param_bytes / MIB)} MiB; of {counted(best.batch, 'row')} the body computes {best.body_rows}"
    )
