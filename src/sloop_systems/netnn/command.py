"""`sloop innet`: map, compile and run small networks on programmable switches."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from sloop.api import InputError, counted, number, read_options
from sloop.api.commands import FILE, CommandOutput, command, facts, parse_yaml, progress, read_yaml, table
from sloop.api.profiles import path_beside, save_profile
from sloop.api.reports import Table
from sloop_systems.netnn.compiled import SUFFIX, CompiledNetwork, load, save
from sloop_systems.netnn.emulator import run_in_lanes
from sloop_systems.netnn.mapper import Fabric
from sloop_systems.netnn.network import BITS, BYTES, SIGNED, Ints, Network, classify
from sloop_systems.netnn.plots import draw_fabric
from sloop_systems.netnn.quantiser import quantise, read_network
from sloop_systems.netnn.runtime import fabric_profile
from sloop_systems.netnn.shipped import load as load_detection
from sloop_systems.netnn.shipped import shipped_file, shipped_model
from sloop_systems.netnn.xdp import XdpFabric, why_no_xdp

RUNNERS: Final = ("reference", "emulator", "kernel")
INPUTS: Final = {"bits": BITS, "bytes": BYTES, "signed": SIGNED}
FABRIC_HELP: Final = (
    "Fabric: a YAML file, or a mapping such as '{leaves: 8, slots: 8}' [default: 8 leaves with 4 pipelines each]."
)

fabric_option = click.option("--fabric", metavar="FABRIC", help=FABRIC_HELP)
rows_option = click.option(
    "--rows",
    type=FILE,
    help="Inputs of the network: integers, rows × inputs (.npy). They also calibrate the scales of an ONNX model.",
)
inputs_option = click.option(
    "--inputs",
    type=click.Choice(list(INPUTS)),
    default="bits",
    show_default=True,
    help="What the integers of an ONNX model's --rows are: bits; bytes, 0 to 127 for 0 to 127/128 in the model; or "
    "signed, -127 to 127 for -127/128 to 127/128.",
)


@click.group("innet")
def innet() -> None:
    """Run small neural networks on programmable switches: each layer on a switch, activations as packets.

    \b
    Example:
      sloop innet map --json
      sloop innet run --count 32
    """


def innet_command(name: str, *, example: str) -> Callable[[Callable[..., CommandOutput | None]], click.Command]:
    """As `command`, below `sloop innet`."""

    def decorate(function: Callable[..., CommandOutput | None]) -> click.Command:
        made = command(name, example=example)(function)
        innet.add_command(made)
        return made

    return decorate


def _fabric(text: str | None) -> Fabric:
    if text is None:
        return Fabric()
    value = parse_yaml(text, "--fabric") if text.lstrip().startswith("{") else read_yaml(Path(text))
    return read_options(Fabric, value)


def _rows_in(path: Path) -> Ints:
    """The rows in a file of NumPy's. InputError if there are none."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError("it is no array of NumPy's", where=str(path), help="write one with numpy.save") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iub" or found.ndim != 2 or not len(found):
        raise InputError("it is no table of integers", where=str(path), help="save integers, rows × inputs")
    return found.astype(np.int64)


def _network(model: Path | None, rows: Path | None, inputs: str = "bits", *, only_shape: bool = False) -> Network:
    """The network in a model file: the one that ships, one with a card beside it, or one calibrated with rows."""
    if model is None:
        return shipped_model().network
    if model.suffix == SUFFIX:
        return load(model).network
    if rows is None and model.with_suffix(".json").is_file():
        return load_detection(model).network
    if rows is None and not only_shape:
        what = "its activations have no scale yet"
        raise InputError(what, where=str(model), help="give typical rows with --rows FILE.npy")
    floats = read_network(model)
    given = np.ones((1, int(np.prod(floats.shape))), np.int64) if rows is None else _rows_in(rows)
    return quantise(floats, given, inputs=INPUTS[inputs])


@innet_command(
    "map",
    example="sloop innet map\nsloop innet map model.onnx --fabric '{leaves: 8, routing: three-tier}' --plot fabric.svg",
)
@click.argument("model", required=False, type=FILE)
@fabric_option
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the fabric with its layers (.svg).")
def map_command(model: Path | None, fabric: str | None, plot: Path | None) -> CommandOutput:
    """Show which switch computes which layer of MODEL (ONNX), with its memory, packets and modelled time.

    Without MODEL: the detection model that ships with sloop. A network that does not fit is an error that names the
    layer and the numbers.
    """
    compiled = CompiledNetwork(_network(model, None, only_shape=True), _fabric(fabric))
    if plot is not None:
        title = f"{model.name if model else 'detection model'}: neurons of each pipeline"
        draw_fabric(compiled.fabric, compiled.program.placements, title, plot)
    return CommandOutput(_map_value(compiled), _map_display(compiled))


def _map_value(compiled: CompiledNetwork) -> dict[str, Any]:
    program, modelled = compiled.program, compiled.program.time
    return {
        "parameters": compiled.network.parameters,
        "products": compiled.network.products,
        "layers": [
            {
                "name": placed.name,
                "leaves": placed.leaves,
                "units": len(placed.units),
                "neurons_per_unit": placed.neurons_per_unit,
                "memory_bytes": placed.memory_bytes,
                "packets": copies,
                "work_ns": layer.work_ns,
                "chain_ns": layer.chain_ns,
            }
            for placed, copies, layer in zip(program.placements, program.copies, modelled.layers, strict=True)
        ],
        "packets": sum(program.copies),
        "latency_ns": modelled.latency_ns,
        "rate_rps": modelled.rate_rps,
        "bottleneck": modelled.bottleneck.name,
        "shares": modelled.shares,
    }


def _map_display(compiled: CompiledNetwork) -> list[RenderableType]:
    value = _map_value(compiled)
    rows = tuple(
        (
            *(layer["name"], ", ".join(map(str, layer["leaves"])), layer["units"], layer["neurons_per_unit"]),
            *(layer["memory_bytes"], layer["packets"], layer["work_ns"] / 1e3, layer["chain_ns"] / 1e3),
        )
        for layer in value["layers"]
    )
    columns = ("layer", "leaf", "units", "neurons/unit", "bytes", "packets", "work µs", "chain µs")
    return [
        table(Table("", columns, rows)),
        facts(
            [
                ("weights", number(value["parameters"])),
                ("one inference", f"{value['latency_ns'] / 1e3:.1f} µs, {number(value['packets'])} packets (modelled)"),
                (
                    "at most",
                    f"{number(round(value['rate_rps']))} inferences/s; {value['bottleneck']} has the most work",
                ),
                ("shares", f"{counted(value['shares'], 'slot')} at the same time without slowing each other down"),
            ]
        ),
    ]


@innet_command(
    "compile",
    example="sloop innet compile --out intrusion.innet\nsloop innet compile ids.onnx --rows rows.npy --out ids.innet",
)
@click.argument("model", required=False, type=FILE)
@rows_option
@inputs_option
@fabric_option
@click.option("--out", required=True, type=FILE, help="The compiled network, a file that ends in .innet.")
@click.option(
    "--doubt",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Verdicts with a logit nearer to 0 are doubtful.",
)
@click.option(
    "--emulate",
    type=click.IntRange(min=0, max=10_000),
    default=1,
    show_default=True,
    help="Number of inferences to emulate, instruction by instruction, for the profile. With 0, the profile has only "
    "modelled times.",
)
@click.option("--kernel", is_flag=True, help="Servers run it as programs in the kernel (root), not as the reference.")
def compile_command(  # one parameter for each option
    model: Path | None,
    rows: Path | None,
    inputs: str,
    fabric: str | None,
    out: Path,
    doubt: int,
    emulate: int,
    kernel: bool,
) -> CommandOutput:
    """Compile MODEL (ONNX) for a fabric of switches; write the compiled network, and its profile beside it.

    Serve the file like any model: as a stage of an application, on a node with a device of kind innet. Without MODEL:
    the detection model that ships with sloop.
    """
    if out.suffix != SUFFIX:
        raise click.UsageError(f"--out {out}: the name of a compiled network ends in {SUFFIX}")
    compiled = CompiledNetwork(_network(model, rows, inputs), _fabric(fabric), doubt=doubt, in_kernel=kernel)
    shares = compiled.program.time.shares
    save(compiled, out)
    with progress(f"emulating {counted(emulate, 'inference')}", total=1):
        profile = fabric_profile(compiled, out, emulated_rows=emulate)
    save_profile(profile, path_beside(out))
    value = {
        **_map_value(compiled),
        "file": str(out),
        "profile": str(path_beside(out)),
        "modelled_ms": profile.latency_ms.latency_ms(1, 1.0),
        "emulated_ms": [sample.p50_ms for sample in profile.samples],
    }
    emulated = f", emulated {profile.samples[0].p50_ms:.3f} ms" if profile.samples else ""
    line = f"{out}: modelled {value['modelled_ms']:.3f} ms{emulated}; room for {counted(shares, 'replica')} on a fabric"
    return CommandOutput(value, [*_map_display(compiled), line, f"its profile: {path_beside(out)}"])


@innet_command(
    "run", example="sloop innet run --count 32\nsloop innet run model.innet --rows rows.npy --runner reference --json"
)
@click.argument("model", required=False, type=FILE)
@rows_option
@inputs_option
@click.option(
    "--count",
    type=click.IntRange(1, 100_000),
    default=16,
    show_default=True,
    help="Number of random rows, without --rows.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random rows.")
@click.option(
    "--runner",
    "runners",
    multiple=True,
    type=click.Choice(RUNNERS),
    help="Runner to use; can be repeated [default: all that can run].",
)
@fabric_option
def run_command(  # one parameter for each option
    model: Path | None,
    rows: Path | None,
    inputs: str,
    count: int,
    seed: int,
    runners: tuple[str, ...],
    fabric: str | None,
) -> CommandOutput:
    """Run rows through MODEL (ONNX or .innet) on several runners, which must give the same logits, bit for bit.

    If MODEL is ONNX, its floats in ONNX Runtime on the CPU are timed beside them, and are the fastest on Linux. The
    gain of a fabric is the time that switches would take, which is modelled.
    """
    is_compiled = model is not None and model.suffix == SUFFIX
    if is_compiled and fabric is not None:
        raise click.UsageError("--fabric: a compiled network has its fabric already.")
    compiled = load(model) if model and is_compiled else CompiledNetwork(_network(model, rows, inputs), _fabric(fabric))
    network = compiled.network
    drawn = np.random.RandomState(seed).randint(
        network.inputs.low, network.inputs.high + 1, (count, network.input_count)
    )
    given = _rows_in(rows) if rows else drawn
    expected = compiled.network.run(given)
    notes: list[str] = []
    chosen = list(runners or RUNNERS)
    if not runners and (why := why_no_xdp()):
        chosen.remove("kernel")
        notes.append(f"the kernel is left out: {why}")
    results: dict[str, dict[str, Any]] = {}
    with progress("running", total=len(chosen)) as advance:
        for place, runner in enumerate(chosen):
            advance(place, runner)
            results[runner] = _run_with(runner, compiled, given, expected)
    if not is_compiled:
        results["onnx runtime"] = _run_on_cpu(model or shipped_file(), given, expected, network.inputs.exponent)
    wrong = [name for name in chosen if results[name]["differ"]]
    columns = ("runner", "verdicts", "without verdict", "differ", "µs/inference")
    cells = tuple(
        (name, each["verdicts"], each["lost"], each["differ"], each["ns_per_inference"] / 1e3)
        for name, each in results.items()
    )
    modelled_ns = compiled.program.time.latency_ns
    value = {"rows": len(given), "runners": results, "equal": not wrong, "modelled_ns": modelled_ns, "notes": notes}
    lines = [f"a switch would take {modelled_ns / 1e3:.1f} µs, modelled", *notes]
    return CommandOutput(value, [table(Table("", columns, cells)), *lines], exit_code=1 if wrong else 0)


def _run_with(runner: str, compiled: CompiledNetwork, rows: Ints, expected: Ints) -> dict[str, Any]:
    """Verdicts, losses, differences and time of one runner."""
    lost = 0
    if runner == "kernel":
        with XdpFabric(compiled.program) as fabric:
            began = time.perf_counter_ns()
            found = [verdict.logits for verdict in fabric.run(rows)]
            elapsed_ns = time.perf_counter_ns() - began
        lost = sum(each is None for each in found)
        pairs = [(each, right) for each, right in zip(found, expected, strict=True) if each is not None]
        differ = sum(not np.array_equal(each, right) for each, right in pairs)
    else:
        run = compiled.network.run if runner == "reference" else lambda given: run_in_lanes(compiled.program, given)[0]
        began = time.perf_counter_ns()
        logits = run(rows)
        elapsed_ns = time.perf_counter_ns() - began
        differ = int((logits != expected).any(axis=1).sum())
    return {"verdicts": len(rows) - lost, "lost": lost, "differ": differ, "ns_per_inference": elapsed_ns / len(rows)}


def _run_on_cpu(model: Path, rows: Ints, expected: Ints, exponent: int) -> dict[str, Any]:
    """The model's floats on the CPU; `differ` counts other classes."""
    from sloop.api.models import open_model  # noqa: PLC0415  # brings ONNX Runtime

    session = open_model(model, 1)
    port = session.signature.inputs[0]
    shape = (-1, *port.shape[1:])
    feed: NDArray[Any] = rows.astype(np.float32) / np.float32(2.0**exponent)
    session.run({port.name: feed[:1].reshape(shape)})
    began = time.perf_counter_ns()
    logits = np.concatenate([np.asarray(session.run({port.name: row.reshape(shape)})[0]) for row in feed[:, None]])
    elapsed_ns = time.perf_counter_ns() - began
    differ = int((classify(logits.reshape(len(rows), -1)) != classify(expected)).sum())
    return {"verdicts": len(rows), "lost": 0, "differ": differ, "ns_per_inference": elapsed_ns / len(rows)}
