"""`sloop profile --sharing`: how a model shares the cores of this machine, or a GPU, with others."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
from msgspec import structs
from rich.console import RenderableType

from sloop.cli.command import CommandOutput, examined, progress, table
from sloop.cli.gpus import shared_place
from sloop.cli.layers import base_profile
from sloop.cuda import GpuPlace
from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.fit import SharingForm, SlowdownFit
from sloop.profile.interference import ScalabilityLaw
from sloop.profile.model import is_python
from sloop.profile.profile import DeviceSharing, Profile, load_profile, save_profile
from sloop.profile.sharing import Contender, SharingFits, SharingTimes, fit_all_laws, measure_sharing
from sloop.report.plots import sharing_figure
from sloop.report.svg import write_figure
from sloop.report.tables import Cell, Table
from sloop.serve.copies import ModelCopy, private_copy
from sloop.serve.shared_workers import shared_stream
from sloop.text import number


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """What is measured."""

    batches: tuple[int, ...] | None
    """The largest is measured; None for the largest of the profile."""
    together: int
    beside: Path | None
    passes: int
    seconds: float
    plot: Path | None
    on: GpuPlace | None = None
    """The GPU that is shared, without MPS; None for the cores."""


def profile_sharing(
    own: ModelCopy,
    known: ExaminedModel,
    rows: Mapping[str, tuple[int, ...]],
    options: SharingOptions,
    path: Path,
) -> CommandOutput:
    """Measure how workers of a model slow each other down, and add the law that predicts best to its profile at `path`.
    A model without a profile is measured briefly as well."""
    if options.on is not None and not path.is_file():
        what = "how it shares a GPU is added to its profile of that GPU, and it has none"
        raise InputError(what, where=str(own.original), help="measure it first: `sloop profile MODEL --device cuda`")
    base, is_new = base_profile(own, known, rows, path)
    batch = max(options.batches) if options.batches else base.max_batch
    cells = options.passes * (options.together + (3 if options.beside else 0))
    # Without sizes of its inputs, only a Python model itself can make them; a server's workers are given them.
    is_served = options.on is None and not (is_python(own.path) and not rows)
    served = shared_stream(known, rows, batch, options.together) if is_served else nullcontext()
    with (
        _contender(options.beside, batch) as other,
        shared_place(options.on) as (on, how),
        served as stream,
        progress(f"measuring {own.path.name}", total=cells) as advance,
    ):
        found = measure_sharing(
            Contender(Path(known.file), batch, rows),
            beside=other,
            together=options.together,
            seconds=options.seconds,
            passes=options.passes,
            progress=lambda done, cells, now: advance(done, now),
            on=on,
            stream=stream,
        )
    source = f"sloop profile {own.path.name} --sharing, batch {batch}{how and f', {how}'}"
    laws = fit_all_laws(found, source, on)
    sharing = laws.fits[laws.best].sharing.with_demands_of(base.sharing if on else None)
    save_profile(structs.replace(base, sharing=sharing), path)
    if options.plot is not None:
        write_figure(sharing_figure(own.path.name, found.points, _curves(laws, found)), options.plot)
    value = {
        "model": str(own.original),
        "profile": str(path),
        "batch": batch,
        "alone_ms": found.alone_ms,
        "points": found.points,
        "passes": found.passes,
        "law": laws.best,
        "fits": {
            form: {
                "law": fit.sharing.law,
                "bandwidth": fit.sharing.bandwidth,
                "mape": fit.mape,
                "max": fit.max_error,
                "held_out": laws.held_out.get(form),
            }
            for form, fit in laws.fits.items()
        },
        "sharing": sharing,
        "pair": found.pair,
        "notes": known.notes,
    }
    remarks = [
        *(["it had no profile: one was measured briefly, as `sloop serve` does"] if is_new else []),
        *([f"the picture is in {options.plot}"] if options.plot else []),
        f"the law {laws.best!r} is in {path}; it is for replicas whose {'share is' if on else 'cores are'} not a cap",
        *([f"workers shared the GPU {how}"] if how else []),
        *known.notes,
    ]
    return CommandOutput(value, [*_display(found, laws, sharing), *remarks])


def kept_sharing(made: Profile, path: Path) -> DeviceSharing | None:
    """The sharing in the profile at `path`, if it was measured of the same version of the model; None otherwise."""
    with suppress(InputError):
        known = load_profile(path)
        if known.model_digest == made.model_digest:
            return known.sharing
    return None


@contextmanager
def _contender(model: Path | None, batch: int) -> Iterator[Contender | None]:
    """Another model, if there is one, with batches as large as it takes, up to `batch`."""
    if model is None:
        yield None
        return
    with private_copy(model) as own:
        known, rows = examined(own, {})
        yield Contender(Path(known.file), min([batch, *known.batches_alone]), rows)


def _curves(laws: SharingFits, found: SharingTimes) -> dict[str, Sequence[float]]:
    """What each law says of 1, 2, … workers. The table of factors is what was measured, and no curve."""
    counts = np.arange(1.0, len(found.points) + 1)
    return {form: _said(fit, found, counts) for form, fit in laws.fits.items() if form != "count"}


def _said(fit: SlowdownFit, found: SharingTimes, counts: np.typing.NDArray[np.float64]) -> list[float]:
    sharing = fit.sharing
    said: list[float] = sharing.law.among_equals(sharing.demand(found.full_batch), counts).tolist()
    return said


def _display(found: SharingTimes, laws: SharingFits, sharing: DeviceSharing) -> Sequence[RenderableType]:
    curves = _curves(laws, found)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            *(ceil(count), factor, *(said[place] for said in curves.values())),
            *(found.alone_ms * factor, found.alone_ms * factor / count, _range(found, ceil(count))),
        )
        for place, (count, factor) in enumerate(found.points)
    )
    columns = ("workers", "times as long", *(form.replace("_", " ") for form in curves), "ms", "ms per batch", "passes")
    title = f"Batches of {found.full_batch} on {sharing.hardware}, {number(found.alone_ms)} ms alone"
    parts: list[RenderableType] = [table(Table(title, columns, rows)), table(_fits(laws))]
    least = min(found.points, key=lambda point: point[1] / point[0])[0]
    parts.append(f"a batch costs least with {least:g} workers that run together")
    if found.pair is not None:
        pair = found.pair
        parts.append(
            f"beside one worker of {Path(pair.beside).name} (batch {pair.beside_batch}) a batch takes "
            f"{number(pair.slowdown)} times as long as alone; a batch of that worker takes "
            f"{number(pair.beside_slowdown)} times as long"
        )
    return parts


def _fits(laws: SharingFits) -> Table:
    rows = tuple(
        (
            *(form.replace("_", " ") + (" (chosen)" if form == laws.best else ""), _parameters(form, fit)),
            *(100 * fit.mape, 100 * fit.max_error),
            100 * laws.held_out[form] if form in laws.held_out else None,
        )
        for form, fit in laws.fits.items()
    )
    return Table("", ("law", "parameters", "mean error %", "largest %", "of other passes %"), rows)


def _parameters(form: SharingForm, fit: SlowdownFit) -> str:
    if form in ("bandwidth", "literal"):
        alpha = getattr(fit.sharing.law, "alpha", 0.0)
        return f"bandwidth {fit.sharing.bandwidth:.3g}, α {alpha:.3g}"
    if isinstance(law := fit.sharing.law, ScalabilityLaw):
        return f"σ {law.contention:.3g}, κ {law.coherency:.3g}"
    return "none" if form == "processor_sharing" else "the factors"


def _range(found: SharingTimes, count: int) -> str:
    """The smallest and the largest factor of the passes."""
    factors = [dict(each)[count] for each in found.passes]
    return f"{min(factors):.3g} to {max(factors):.3g}"
