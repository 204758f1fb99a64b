"""`sloop profile`: measure a model here."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import RenderableType

from sloop.cli.command import Answer, command
from sloop.cli.lists import counts, numbers, shape
from sloop.cli.number import Number
from sloop.cli.screen import progress, table
from sloop.errors import InputError
from sloop.profile import batchable
from sloop.profile.examine import check_rows
from sloop.profile.measure import SECONDS, default_cores, measure
from sloop.profile.paying import paying_batches
from sloop.profile.profile import Profile
from sloop.profile.sample import Sample
from sloop.profile.session import is_python
from sloop.profile.store import path_beside, save_profile
from sloop.report.tables import Table
from sloop.serve.actuator.confined import confined

FORMS = ["table", "amdahl", "quadratic"]
EXAMPLE = """
sloop profile squeezenet.onnx
sloop profile stage.py --cores 0.5,1
sloop profile bert.onnx --batches 1,2,4 --cores 0.5,1,2 --shape input_ids=128 --json
"""


@command("profile", example=EXAMPLE)
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--batches", type=counts, metavar="COUNTS", help="[default: 1,2,4,8,… while larger ones bring more].")
@click.option("--cores", type=numbers, metavar="NUMBERS", help="Fractions where the machine can [default: 1,2,… all].")
@click.option("--seconds", type=Number(min=0, min_open=True), default=SECONDS, help="Time for each cell.")
@click.option("--shape", "shapes", type=shape, multiple=True, metavar="NAME=SIZES", help="Of one row of an open input.")
@click.option("--percentile", type=click.Choice(["p99", "p50"]), default="p99", help="What the profile promises.")
@click.option("--form", type=click.Choice(FORMS), default="table", help="How it speaks between cells.")
@click.option("--free-batch", is_flag=True, help="First open a batch dimension that was fixed, beside MODEL.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the profile [default: beside MODEL].")
def profile(
    model: Path,
    batches: tuple[int, ...] | None,
    cores: tuple[float, ...] | None,
    seconds: float,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    percentile: str,
    form: str,
    free_batch: bool,
    out: Path | None,
) -> Answer:
    """Measure MODEL on this machine, for each batch on each core count, and fit its latency.

    MODEL is an ONNX file, or Python with a class Model (see docs/applications.md).
    """
    rows = dict(shapes)
    if free_batch and is_python(model):
        what = "the batch of a model written in Python is its author's"
        raise InputError(what, where=str(model), help="write -1 as the first size of its inputs and outputs")
    if free_batch:
        fixed, model = model, model.with_suffix(".free.onnx")
        batchable.free_batch(fixed, model, shapes=rows)
    if batches is None or max(batches) > 1:
        check_rows(model, rows)
    chosen = cores or default_cores()
    if batches is None:
        batches = paying_batches(model, cores=max(chosen), shapes=rows, limit=confined)
    with progress(f"measuring {model.name}", total=len(batches) * len(chosen)) as advance:

        def show(done: int, cells: int, sample: Sample) -> None:
            advance(done, f"batch {sample.batch} on {sample.cores:g} cores: {sample.p99_ms:.3g} ms")

        made = measure(
            model,
            batches=batches,
            cores=chosen,
            seconds=seconds,
            shapes=rows,
            limit=confined,
            progress=show,
            percentile=percentile,
        )
    if form not in made.fits:
        raise InputError(f"too few cells to fit {form!r}", help="measure more batches and core counts")
    made = made.with_fit(form)
    path = out or path_beside(model)
    save_profile(made, path)
    return Answer(value_of(model, made), shown(made, path))


def value_of(model: Path, made: Profile) -> dict[str, object]:
    """The promised keys, and where the figures come from."""
    return {
        "model": str(model),
        "hardware": made.hardware,
        "software": made.software,
        "date": made.date,
        "samples": made.samples,
        "load_ms": made.load_s * 1e3,
        "memory_bytes": made.memory_bytes,
        "fits": {
            name: {"params": fit.params, "r2": fit.r2, "mape": fit.mape, "max_error": fit.max_error}
            for name, fit in made.fits.items()
        },
    }


def shown(made: Profile, path: Path) -> Sequence[RenderableType]:
    """Samples and fits as tables."""
    cells = tuple((s.batch, s.cores, s.p50_ms, s.p99_ms, s.n, 1e3 * s.batch / s.p50_ms) for s in made.samples)
    fits = tuple((name, fit.r2, fit.mape, fit.max_error) for name, fit in made.fits.items())
    loading = f"loads in {made.load_s * 1e3:.0f} ms, takes {made.memory_bytes / 2**20:.0f} MiB"
    return [
        table(Table(made.hardware, ("batch", "cores", "p50 ms", "p99 ms", "runs", "rows/s"), cells)),
        table(Table("", ("fit", "r2", "mean error", "largest error"), fits)),
        f"{loading}; speaks through {type(made.latency_ms).__name__.lower()}; written to {path}",
    ]
