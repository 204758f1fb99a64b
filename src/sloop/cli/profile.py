"""`sloop profile`: the latency of a model on this machine, measured or refined from a server's log; and its layers."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from time import monotonic
from typing import Final, get_args

import click
from msgspec import structs
from rich.console import RenderableType

from sloop.app.document import NAME
from sloop.cli.command import (
    FILE,
    FOLDER,
    CommandOutput,
    Number,
    ProgressUpdate,
    Shapes,
    check_temporary,
    command,
    counts,
    examined,
    numbers,
    progress,
    shape_option,
    table,
)
from sloop.cli.gpus import add_kernels, check_replaced, place_on, share_samples, share_table
from sloop.cli.layers import LayerOptions, LayerTiming, kept_layers, profile_layers
from sloop.cli.row_sizes import RowSizes, display_sizes, lengths_list, middle, value_of_sizes
from sloop.cli.sharing import SharingOptions, kept_sharing, profile_sharing
from sloop.cuda import GpuPlace
from sloop.demo.service_pass import RATES, START_S, STEP_S, service_pass
from sloop.errors import InputError, MachineError
from sloop.profile.examine import Declared, ExaminedModel, joining_text
from sloop.profile.fit import Percentile
from sloop.profile.kernels import Wanted
from sloop.profile.measure import (
    BATCHES,
    CELL_S_MAX,
    CELL_S_MIN,
    CELLS_S,
    PASSES,
    check_sizes,
    default_cores,
    measure,
    measure_sizes,
    measuring_s,
    measuring_sizes_s,
)
from sloop.profile.model import input_shapes, is_python
from sloop.profile.operators import EXTENSIONS
from sloop.profile.operators import use as use_operators
from sloop.profile.passes import speed_range
from sloop.profile.profile import (
    FLOOR_MS,
    Joining,
    Pass,
    Profile,
    Sample,
    check_saving,
    load_profile,
    path_beside,
    save_profile,
)
from sloop.profile.row_sizes import Lengths, size_of
from sloop.profile.sharing import TOGETHER
from sloop.report.tables import Table
from sloop.runlog import read_log
from sloop.serve.copies import ModelCopy, private_copy
from sloop.serve.cpu_quota import confined
from sloop.systems.replay import refined_profiles
from sloop.text import counted, listed
from sloop.vocabulary import CLIENTS_MAX

_log: Final = logging.getLogger("sloop.profile")

FORMS = ["table", "amdahl", "quadratic"]
SLOWER: Final = 1.3
"""A measurement that takes more than this times as long as was said is announced again."""
EXAMPLE = """
sloop profile squeezenet.onnx
sloop profile stage.py --cores 0.5,1
sloop profile bert.onnx --batches 1,2,4 --cores 0.5,1,2 --shape input_ids=128 --json
sloop profile bert.onnx --sizes 16,64,256
sloop profile squeezenet.onnx --hardware c5.2xlarge
sloop profile resnet50.onnx --device cuda --shares 0.25,0.5
sloop profile --from-log .sloop/digits
sloop profile squeezenet.onnx --layers --plot layers.svg
sloop profile squeezenet.onnx --sharing --batches 8 --plot sharing.svg
"""


@command("profile", example=EXAMPLE)
@click.argument("model", required=False, type=FILE)
@click.option(
    "--from-log",
    type=click.Path(path_type=Path),
    help="Measure nothing, but add the durations of batches in this event log of a server (a file or a state folder) "
    "to the profiles of its models.",
)
@click.option(
    "--batches",
    type=counts,
    metavar="COUNTS",
    help="Batch sizes to measure [default: 1,2,4,8,… while throughput rises].",
)
@click.option(
    "--cores",
    type=numbers,
    metavar="NUMBERS",
    help="Core counts to measure, fractions where the machine supports them [default: 1,2,… all].",
)
@click.option(
    "--passes",
    type=click.IntRange(min=1),
    help="How often to measure everything [default: 1]. The differences between several passes give predictions a "
    f"range. --layers and --sharing compare passes [default: {PASSES}].",
)
@click.option(
    "--seconds",
    type=Number(min=0, min_open=True),
    help="Seconds to measure each pair of batch size and cores in each pass [default: what divides "
    f"{CELLS_S:g} s among them, {CELL_S_MIN:g} to {CELL_S_MAX:g}].",
)
@click.option(
    "--alone",
    is_flag=True,
    help="Measure only the model itself: put no other load on the machine, and do not measure it in a server.",
)
@shape_option
@click.option(
    "--sizes",
    type=lengths_list,
    metavar="SIZES",
    help="If rows of MODEL differ in size: sizes to measure, such as 16,64,256 for the length of texts, or "
    "224x224,640x480 for several open dimensions [default: one size].",
)
@click.option(
    "--sizes-from",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure typical sizes among those in this file: text with one size a line, or the log of a server (a file or "
    "a state folder).",
)
@click.option(
    "--percentile",
    type=click.Choice(["p99", "p50"]),
    default="p99",
    show_default=True,
    help="Percentile that the profile predicts.",
)
@click.option(
    "--form",
    type=click.Choice(FORMS),
    default="table",
    show_default=True,
    help="How to interpolate between the measurements.",
)
@click.option(
    "--hardware",
    metavar="KIND",
    help="The kind of node that this machine is, such as c5.2xlarge: the profile is for nodes of this kind only.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Measure on a GPU of this machine instead of its cores: cuda, or cuda:1 for the second one. "
    "Needs the package onnxruntime-gpu in place of onnxruntime; docs/serving.md says how.",
)
@click.option(
    "--shares",
    type=numbers,
    metavar="NUMBERS",
    help="With --device: measure also with these parts of the GPU, such as 0.25,0.5, which MPS enforces.",
)
@click.option(
    "--kernels",
    type=click.Choice(get_args(Wanted)),
    help="With --device: where to take SM use and occupancy from: counters that Nsight Compute reads (ncu), launch "
    "configurations, or no source [default: auto, the first that answers].",
)
@click.option(
    "--layers",
    is_flag=True,
    help="Measure MODEL block by block instead, add the result to its profile, and propose where to cut it, and which "
    "blocks a shadow (a process that helps a replica with some rows) should hold.",
)
@click.option(
    "--cut",
    "cuts",
    multiple=True,
    metavar="NAME",
    help="With --layers: cut only after this layer, or after the layer that computes this tensor [default: between all "
    "blocks]. Repeat it for further cuts, in the order of the graph.",
)
@click.option(
    "--pieces", type=FOLDER, help="With --layers: keep the pieces in this folder, each an ONNX model of its own."
)
@click.option(
    "--piece-mib",
    type=Number(min=0, min_open=True),
    help="With --layers: no proposed piece has more weights than this, in MiB.",
)
@click.option(
    "--fetch-mbps",
    type=Number(min=0, min_open=True),
    help="With --layers: weights are fetched at this rate, in Mbit/s, before they are loaded [default: they are on the "
    "node].",
)
@click.option(
    "--sharing",
    is_flag=True,
    help="Measure instead how much slower batches are while several workers of MODEL run on all cores of this machine, "
    "fit laws of interference, and add the best one to its profile.",
)
@click.option(
    "--together",
    type=click.IntRange(min=2, max=CLIENTS_MAX),
    help=f"With --sharing: the most workers that run together [default: {TOGETHER}].",
)
@click.option(
    "--beside",
    type=FILE,
    metavar="OTHER",
    help="With --sharing: measure also how one worker of MODEL and one of this other model slow each other down.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="With --layers: draw compute and weights of the blocks to this file (.svg). With --sharing: draw the "
    "measured slowdowns and the laws.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the profile [default: beside MODEL].")
@click.option(
    "--sample",
    type=FILE,
    help="Real inputs for the trials whether requests can share a forward pass: a NumPy file, .npz with an array for "
    "each input, or .npy for a model with one input.",
)
@click.option(
    "--joins-rows/--runs-alone",
    "joins_rows",
    default=None,
    help="Requests for MODEL can share a forward pass, or cannot [default: sloop examines MODEL]. Write the same into "
    "the application file: `joins_rows: true` or `false`.",
)
@click.option(
    "--no-batch",
    is_flag=True,
    help="No first dimension of MODEL counts rows: each request is one unit. In the application file: `batch: false`.",
)
@click.option(
    "--operators",
    multiple=True,
    metavar="LIBRARY",
    help=f"A library with operators that ONNX Runtime lacks: {EXTENSIONS} (needs pip install {EXTENSIONS}), or the "
    "path of a shared library. In the application file: `operators:` of the stage.",
)
def profile(  # one parameter for each option
    model: Path | None,
    from_log: Path | None,
    batches: tuple[int, ...] | None,
    cores: tuple[float, ...] | None,
    passes: int | None,
    seconds: float | None,
    alone: bool,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    sizes: tuple[Lengths, ...] | None,
    sizes_from: Path | None,
    percentile: Percentile,
    form: str,
    hardware: str | None,
    device: str | None,
    shares: tuple[float, ...] | None,
    kernels: Wanted | None,
    layers: bool,
    cuts: tuple[str, ...],
    pieces: Path | None,
    piece_mib: float | None,
    fetch_mbps: float | None,
    sharing: bool,
    together: int | None,
    beside: Path | None,
    plot: Path | None,
    out: Path | None,
    sample: Path | None,
    joins_rows: bool | None,
    no_batch: bool,
    operators: tuple[str, ...],
) -> CommandOutput:
    """Measure and fit the latency of MODEL on this machine, by batch size and cores, in about 25 s on two cores.

    MODEL is an ONNX file, or a Python file with a class Model (see docs/applications.md). If its batch size is fixed, a
    copy with any batch size is measured, provided that it gives the same results. With --from-log, MODEL may be left
    out: the profiles of all models in the log are refined. With --layers, MODEL is cut into blocks of layers that are
    measured one by one. With --sharing, up to six workers of MODEL run together.
    """
    wanted_sizes = _wanted_sizes(sizes, sizes_from, measures_latency=not (from_log or layers or sharing))
    if from_log is not None:
        _check_log(hardware, measures=layers or sharing)
        return _refine(from_log, model, percentile, form, out)
    chosen = LayerOptions(cuts, pieces, piece_mib, fetch_mbps, plot)
    _check_options(chosen, layers=layers, sharing=sharing, has_sharing_options=bool(together or beside))
    if model is None:
        raise click.UsageError("Missing argument 'MODEL', or --from-log LOG.")
    _check_place(device, kernels, layers=layers, sharing=sharing, has_cores=bool(cores))
    path, on = _path(out, model, hardware), place_on(device, shares or ())
    _check_places(model, path, on)
    with private_copy(model) as own:
        declared = _declared(joins_rows, no_batch, sample, operators)
        known, rows, further = _examined_rows(own, dict(shapes), declared, wanted_sizes, batches)
        repeated = (passes or PASSES, seconds or CELL_S_MAX)
        if sharing:
            wanted = SharingOptions(batches, together or TOGETHER, beside, *repeated, plot, on)
            return profile_sharing(own, known, rows, wanted, path)
        if layers:
            timing = LayerTiming(batches or known.batches_alone or BATCHES, cores or default_cores(), *repeated)
            return profile_layers(own, known, rows, timing, chosen, path)
        batches = batches or known.batches_alone or None
        sweep = _Sweep(batches, _cores(cores, on), passes or 1, seconds, percentile, alone, on, not no_batch, further)
        made, service = _measured(own, known, rows, sweep)
        made, found = add_kernels(made, Path(known.file), on, rows, kernels or "auto", kept_sharing(made, path))
        made = _saved(_named(made, hardware), form, path, known.joining)
        value, parts = _output(model, made, known, service, [*display(made, path, form), *sweep.left_out_of(made)])
        if on is not None:
            value |= found.value
            parts += [*found.display(on), *_add_shares(value, made, known, rows, on, shares or (), repeated[1])]
        return CommandOutput(value, parts)


def _named(made: Profile, hardware: str | None) -> Profile:
    """The profile, for a kind of hardware if one is named."""
    return made if hardware is None else structs.replace(made, hardware=f"{hardware}: {made.hardware}")


def _examined_rows(
    own: ModelCopy,
    given: dict[str, tuple[int, ...]],
    declared: Declared,
    sizes: RowSizes,
    batches: tuple[int, ...] | None,
) -> tuple[ExaminedModel, dict[str, tuple[int, ...]], dict[int, dict[str, tuple[int, ...]]]]:
    """The model, the input shapes of its typical rows, and by size the input shapes of the other rows to measure.
    InputError for sizes or batches that it cannot have."""
    by_size: dict[int, dict[str, tuple[int, ...]]] = {}

    def typical(known: ExaminedModel) -> dict[str, tuple[int, ...]]:
        by_size.update(sizes.rows(known, given, own.original) if sizes else {})
        return middle(by_size)

    known, rows = examined(own, given, declared, typical=typical)
    by_size.pop(size_of(known.signature, rows), None)
    _check_batches(own.original, known, batches)
    return known, rows, by_size


def _output(
    model: Path, made: Profile, known: ExaminedModel, service: "_ServicePasses", parts: Sequence[RenderableType]
) -> tuple[dict[str, object], list[RenderableType]]:
    """The object for `--json`, and what is printed: `parts`, failed passes, and what was examined."""
    joining = f"{model.name}: {joining_text(known.obstacle, known.evidence)}"
    joins = {"joined": not known.obstacle, "why": known.obstacle or known.evidence}
    value = {**value_of(model, made), "notes": known.notes, "joins_rows": joins, "failed_passes": service.failures}
    return value, [*parts, *service.remarks(), *known.notes, joining]


def _check_places(model: Path, path: Path, on: GpuPlace | None) -> None:
    """Errors for what could not be written after a measurement, or should not be."""
    check_replaced(model, path, on)
    check_temporary()
    check_saving(path)


def _cores(given: tuple[float, ...] | None, on: GpuPlace | None) -> tuple[float, ...]:
    return given or (default_cores() if on is None else (1.0,))


def _declared(joins_rows: bool | None, no_batch: bool, sample: Path | None, operators: tuple[str, ...]) -> Declared:
    use_operators(operators)  # in what is measured too
    return Declared(joins_rows, not no_batch, str(sample or ""), operators=operators)


def _add_shares(
    value: dict[str, object],
    made: Profile,
    known: ExaminedModel,
    rows: Shapes,
    on: GpuPlace,
    shares: Sequence[float],
    seconds: float,
) -> list[RenderableType]:
    """Measure with parts of the GPU as well; adds them to the object for `--json`, and returns what is printed."""
    sizes = [sample.batch for sample in made.samples]
    found, why = share_samples(Path(known.file), on, shares, batches=sizes, shapes=rows, seconds=seconds)
    value |= {"accelerator": on.kind, "device_memory_bytes": made.device_memory_bytes, "shares": found}
    return [table(share_table(found, on))] if found else [why] if why else []


def _path(out: Path | None, model: Path, hardware: str | None) -> Path:
    """Where the profile is written. InputError for what cannot be a kind of hardware."""
    if hardware is not None and not NAME.fullmatch(hardware):
        raise InputError(f"{hardware!r} is not a kind of hardware", where="--hardware", help="for example c5.2xlarge")
    return out or path_beside(model, hardware or "")


def _wanted_sizes(given: tuple[Lengths, ...] | None, source: Path | None, *, measures_latency: bool) -> RowSizes:
    """The sizes to measure. UsageError if both options are given, or if latencies are not measured; InputError for a
    file that does not exist."""
    wanted = RowSizes(given or (), source)
    if given and source is not None:
        raise click.UsageError("--sizes says which sizes are measured, and so does --sizes-from: give one of them.")
    if wanted and not measures_latency:
        raise click.UsageError("--sizes and --sizes-from do not go with --from-log, --layers or --sharing.")
    if source is not None and not source.exists():
        raise InputError("there is no such file", where=str(source), help="check the path after --sizes-from")
    return wanted


def _check_log(hardware: str | None, *, measures: bool) -> None:
    """UsageError for options that do not go with a log."""
    if hardware is not None:
        raise click.UsageError("--hardware describes the machine that measures; a log has its own.")
    if measures:
        raise click.UsageError("--layers and --sharing measure a MODEL; --from-log measures nothing.")


def _check_place(device: str | None, kernels: Wanted | None, *, layers: bool, sharing: bool, has_cores: bool) -> None:
    """UsageError for options about cores and GPUs that contradict each other."""
    if sharing and has_cores:
        raise click.UsageError("With --sharing, every worker may use all cores: leave --cores out.")
    if device is not None and (layers or has_cores):
        raise click.UsageError("--layers and --cores are about CPU cores; --device is a GPU.")
    if kernels is not None and (device is None or sharing):
        raise click.UsageError("--kernels says how kernels on a GPU are measured: add --device, without --sharing.")


def _check_options(chosen: LayerOptions, *, layers: bool, sharing: bool, has_sharing_options: bool) -> None:
    """UsageError for options that belong to a kind of measurement that was not asked for."""
    if layers and sharing:
        raise click.UsageError("--layers and --sharing are two measurements: make one after the other.")
    if chosen != LayerOptions(plot=chosen.plot) and not layers:
        raise click.UsageError("--cut, --pieces, --piece-mib and --fetch-mbps belong to --layers.")
    if chosen.plot is not None and not (layers or sharing):
        raise click.UsageError("--plot belongs to --layers and to --sharing.")
    if has_sharing_options and not sharing:
        raise click.UsageError("--together and --beside belong to --sharing.")


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What is measured of a whole model."""

    batches: tuple[int, ...] | None
    cores: tuple[float, ...]
    passes: int
    seconds: float | None
    percentile: Percentile
    alone: bool
    on: GpuPlace | None = None
    """The GPU on which it is measured."""
    batch: bool = True
    """False if no first dimension counts rows."""
    further: Mapping[int, Shapes] = field(default_factory=dict)
    """The sizes to measure beside the typical one, with their input shapes."""

    @property
    def served(self) -> tuple[float, ...]:
        """The core counts on which a server runs the model: in a single pass, the smallest and the largest."""
        return self.cores if self.passes > 1 else tuple(sorted({min(self.cores), max(self.cores)}))

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates of the steps on each of them, as shares (`RATES`): in a single pass, half of the steps on each."""
        return RATES if self.passes > 1 else RATES[:: len(self.served)]

    def left_out_of(self, made: Profile) -> Sequence[str]:
        """Says which cells were not measured, because the model is slow."""
        few: list[str] = []
        for cores in self.cores:
            sizes = [cell.batch for cell in made.passes[0].samples if cell.cores == cores]
            if len(sizes) < len(self.batches or BATCHES):
                more = f" with batches larger than {sizes[-1]}" if sizes else ""
                few.append(f"{counted(cores, 'core')}{more}")
        if not few:
            return ()
        return [f"the model is slow: {listed(few)} was left out; --batches and --cores measure what they name"]


def _measured(
    own: ModelCopy, known: ExaminedModel, rows: dict[str, tuple[int, ...]], sweep: _Sweep
) -> tuple[Profile, "_ServicePasses"]:
    """Measure a model behind a progress bar; with the passes in service, some of which may have failed."""
    model = own.original
    shapes = input_shapes(known.signature, 1, rows, where=str(model)) if rows else {}
    sent = {name: shapes[name] for name in rows}
    # A Python model may need its own example: random inputs might take another time than real ones. The server of a
    # pass runs replicas on cores.
    served = () if sweep.alone or sweep.on or (is_python(model) and not rows) else sweep.served
    keys = {"joins_rows": not known.obstacle, "batch": sweep.batch}
    service = _ServicePasses(model, sent, sweep.passes, sweep.rates, keys)
    check_sizes(Path(known.file), sweep.further, limit=confined, on=sweep.on)
    with progress(f"measuring {model.name}", total=1.0) as advance:
        clock = _Clock(model, sweep, len(served), advance)

        def in_service(samples: Sequence[Sample]) -> Pass | None:
            clock.show("in a server")
            found = service.next([sample for sample in samples if sample.cores in served])
            clock.was_served()
            return found

        made = measure(
            own.path,
            file=Path(known.file),
            batches=sweep.batches,
            cores=sweep.cores,
            seconds=sweep.seconds,
            passes=sweep.passes,
            shapes=rows,
            limit=confined,
            progress=clock.measured,
            percentile=sweep.percentile,
            alone=sweep.alone,
            in_service=in_service if served else None,
            on=sweep.on,
            size=size_of(known.signature, rows),
        )
        if sweep.further:
            made = measure_sizes(
                made,
                Path(known.file),
                sweep.further,
                seconds=sweep.seconds,
                passes=sweep.passes,
                limit=confined,
                progress=clock.measured_size,
                alone=sweep.alone,
                on=sweep.on,
            )
    return made, service


class _Clock:
    """How long a measurement takes: said before it starts, shown while it runs, and said again if a model is slow."""

    def __init__(self, model: Path, sweep: _Sweep, served: int, advance: ProgressUpdate) -> None:
        self._model, self._advance = model.name, advance
        self._begin_s = monotonic()
        self._cells_s = measuring_s(sweep.batches, sweep.cores, sweep.seconds, sweep.passes)
        self._service_s, self._services_left = (len(sweep.rates) * STEP_S + START_S) * served, sweep.passes
        self._sizes_s = (
            measuring_sizes_s(len(sweep.further), sweep.cores, sweep.seconds, sweep.passes) if sweep.further else 0.0
        )
        self._said_s = self._left_s
        what = f"measuring {self._model} takes about {self._said_s:.0f} s"
        click.echo(what if sweep.passes > 1 else f"{what}; --passes {PASSES} gives predictions a range", err=True)

    @property
    def _left_s(self) -> float:
        return self._cells_s + self._service_s * self._services_left + self._sizes_s

    def measured(self, left_s: float, cell: Sample) -> None:
        """A cell was measured, and the others will take so long."""
        self._cells_s = left_s
        self.show(f"batch {cell.batch} on {cell.cores:g} cores: {cell.p99_ms:.3g} ms")

    def measured_size(self, left_s: float, cell: Sample) -> None:
        """The same for rows of another size."""
        self._cells_s, self._sizes_s = 0.0, left_s
        self.show(f"another size, batch {cell.batch} on {cell.cores:g} cores: {cell.p99_ms:.3g} ms")

    def was_served(self) -> None:
        """A pass in a server has ended."""
        self._services_left -= 1

    def show(self, now: str) -> None:
        """Show the time that has passed, of what it all will probably take."""
        spent_s = monotonic() - self._begin_s
        in_all_s = spent_s + self._left_s
        self._advance(spent_s / in_all_s, now)
        if in_all_s > SLOWER * self._said_s:
            self._said_s = in_all_s
            click.echo(f"{self._model} is slow on this machine: about {in_all_s:.0f} s in all", err=True)


def _check_batches(model: Path, known: ExaminedModel, batches: tuple[int, ...] | None) -> None:
    """InputError for batches of a model whose requests cannot share a forward pass."""
    if batches is not None and known.batches_alone and set(batches) != set(known.batches_alone):
        what = f"{known.obstacle}, so that requests cannot share a forward pass"
        help_text = f"measure single requests with --batches {known.batches_alone[0]}"
        raise InputError(what, where=str(model), help=help_text)


class _ServicePasses:
    """The passes in service of one measurement, and why some of them failed."""

    def __init__(
        self,
        model: Path,
        rows: dict[str, tuple[int, ...]],
        planned: int,
        rates: Sequence[float],
        keys: Mapping[str, bool],
    ) -> None:
        self.failures: list[str] = []
        self._model = model
        self._rows = rows
        self._planned, self._rates, self._keys = planned, rates, keys
        self._tried = 0

    def next(self, samples: Sequence[Sample]) -> Pass | None:
        """Serve the model for a pass; None, and a warning, if it cannot be served or sent requests to."""
        self._tried += 1
        try:
            found = service_pass(
                self._model, samples, self._rows, rates=self._rates, seed=len(samples), keys=self._keys
            )
        except (InputError, MachineError) as error:
            found, why = None, error.what
        else:
            why = "no batch size ran often enough"
        if found is None:
            self._fail(why)
        return found

    def _fail(self, why: str) -> None:
        self.failures.append(f"service pass {self._tried} of {self._planned} failed: {why}")
        _log.warning("%s", self.failures[-1])

    def remarks(self) -> Sequence[str]:
        """The failures, and how many passes are left."""
        used = self._tried - len(self.failures)
        return [f"{failure}; the profile uses {used}" for failure in self.failures]


def _saved(made: Profile, form: str, path: Path, joining: Joining | None = None) -> Profile:
    if form not in made.fits:
        raise InputError(f"too few measurements to fit {form!r}", help="measure more batches and core counts")
    made = made.with_fit(form)
    if made.layers is None:
        made = structs.replace(made, layers=kept_layers(made, path))
    if made.sharing is None:
        made = structs.replace(made, sharing=kept_sharing(made, path))
    save_profile(made, path, joining)
    return made


def _refine(log: Path, model: Path | None, percentile: Percentile, form: str, out: Path | None) -> CommandOutput:
    recorded = read_log(log)
    found = refined_profiles(recorded, model, percentile)
    if out is not None and len(found) > 1 and not out.is_dir():
        help_text = "give a folder, or the MODEL whose profile is wanted"
        raise InputError(f"the log has batches for {len(found)} profiles, and --out is one file", help=help_text)
    values: list[dict[str, object]] = []
    parts: list[RenderableType] = []
    for each in found:
        source, file = each.model, each.file
        known = file.is_file() and any(
            one.in_service and one.date == recorded.header.date for one in load_profile(file).passes
        )
        path = file if out is None else out / file.name if out.is_dir() else out
        made = _saved(each.profile, form, path)
        is_read = each.is_read and path == file
        values.append({**value_of(source, made), "file": str(path), "is_read": is_read, "log_known": known})
        parts += display(made, path, form)
        if known:
            parts.append(f"the profile of {source.name} contains this log already: it was ignored")
        if not is_read:
            parts.append(
                f"the application that wrote the log does not read {path}: name it as the `profile` of {source.name}"
            )
    return CommandOutput({"profiles": values}, parts)


def value_of(model: Path, made: Profile) -> dict[str, object]:
    """The object for `--json`."""
    return {
        "model": str(model),
        "hardware": made.hardware,
        "software": made.software,
        "shapes": made.shapes,
        "date": made.date,
        "samples": made.samples,
        "passes": [
            {"date": one.date, "in_service": one.in_service, "beside": one.beside, "cells": len(one.samples)}
            for one in made.passes
        ],
        "speed_range": speed_range(made),
        "load_ms": made.load_s * 1e3,
        "startup": made.startup,
        **value_of_sizes(made),
        "memory_bytes": made.memory_bytes,
        "fits": {
            name: {"params": fit.params, "r2": fit.r2, "mape": fit.mape, "max_error": fit.max_error}
            for name, fit in made.fits.items()
        },
    }


def display(made: Profile, path: Path, form: str) -> Sequence[RenderableType]:
    """Measurements and fits as tables."""
    planned_ms = [max(FLOOR_MS, made.latency_ms.latency_ms(s.batch, s.cores)) for s in made.samples]
    differs = any(not isclose(s.p99_ms, ms, rel_tol=1e-3) for s, ms in zip(made.samples, planned_ms, strict=True))
    cells = tuple(
        (
            *(s.batch, s.cores, s.p50_ms, s.p99_ms, *((ms,) if differs else ())),
            *(s.n or "interpolated", 1e3 * s.batch / s.p50_ms),
        )
        for s, ms in zip(made.samples, planned_ms, strict=True)
    )
    columns = ("batch", "cores", "p50 ms", "p99 ms", *(("plan uses ms",) if differs else ()), "runs", "rows/s")
    fits = tuple((name, fit.r2, fit.mape, fit.max_error) for name, fit in made.fits.items())
    passes = tuple((one.date, "service" if one.in_service else "profile", one.beside) for one in made.passes)
    return [
        table(Table(made.hardware, columns, cells)),
        table(Table("", ("pass", "from", "load around it"), passes)),
        table(Table("", ("fit", "r2", "mean error", "largest error"), fits)),
        *_remarks(made),
        *display_sizes(made),
        f"the profile predicts with the fit {form!r} and is in {path}",
    ]


def _remarks(made: Profile) -> Sequence[str]:
    """Lines below the tables: start-up, the range of speeds, scaled cells."""
    lines = [f"a replica starts in {made.load_s * 1e3:.0f} ms and takes {made.memory_bytes / 2**20:.0f} MiB"]
    if made.shapes:
        lines.append(f"measured with rows of {shapes_text(made.shapes)}")
    found = speed_range(made)
    if found is None:
        lines.append(f"one pass only: predictions from this profile have no range; --passes {PASSES} gives one")
    else:
        faster, slower = 100 * (1 - found.fast), 100 * (found.slow - 1)
        lines.append(f"by {found.passes} passes, a run may be {faster:.1f} % faster to {slower:.1f} % slower than this")
    scaled = [sample for sample in made.samples if sample.scaled != 1.0]
    if scaled:
        low, high = f"{min(s.scaled for s in scaled):.3g}", f"{max(s.scaled for s in scaled):.3g}"
        lines.append(
            f"{counted(len(scaled), 'cell')} did not occur in service: times were multiplied by "
            f"{low if low == high else f'{low} to {high}'}, the mean ratio (duration in service / duration in profile "
            "passes) of the cells that did"
        )
    return lines


def shapes_text(shapes: Shapes) -> str:
    """`ids 128 and image 3 × 224 × 224`."""
    return listed([f"{name} {' × '.join(map(str, row))}" for name, row in shapes.items()])
