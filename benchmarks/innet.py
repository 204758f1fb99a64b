"""What one inference inside the network costs on Linux, beside the CPU runtime on the same machine.

    python -m benchmarks.innet [--rows 400]

The model that ships runs as XDP and tc programs on veth devices, in ONNX Runtime (the floats it was trained as), and as
the integer reference in NumPy. Rows are inference points of generated flows. Every integer runner has to give the same
logits. Needs root.
"""

import os
import resource
import time
from argparse import Namespace as Arguments
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from msgspec import Struct

from benchmarks.notebook import arguments, publish, quantile, say, table
from sloop.machine import usable_cpus
from sloop_systems.netnn.accuracy import dataset
from sloop_systems.netnn.bpf import measuring
from sloop_systems.netnn.emulator import Emulator
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.program import Program, compile_network
from sloop_systems.netnn.shipped import DetectionModel, shipped_file, shipped_model
from sloop_systems.netnn.traffic import calls
from sloop_systems.netnn.xdp import XdpFabric, why_no_xdp

TIMEOUT_S: Final = 10.0
WARM: Final = 20
BATCH: Final = 256


class Cost(Struct, frozen=True):
    """One runner: delays of single inferences, and how long all took."""

    name: str
    delays_us: list[float]
    """From a row to its verdict; of batches, of the batch."""
    rate: float
    """Inferences per second."""
    cpu_us: float | None
    """CPU time per inference; None where it is not this machine's."""


def busy_us(cpu: int) -> float:
    """How long a CPU has been busy since it started, in µs: interrupts of the network count there, in no process."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *jiffies = line.split()
        if name == f"cpu{cpu}":
            user, nice, system, _, _, interrupts, softirq, *_ = map(int, jiffies)
            return (user + nice + system + interrupts + softirq) / os.sysconf("SC_CLK_TCK") * 1e6
    raise RuntimeError(f"/proc/stat has no CPU {cpu}")


def in_kernel(program: Program, rows: Ints, expected: Ints) -> tuple[list[Cost], list[list[object]]]:
    """Costs with one and with all slots in use, and what each program of the kernel costs per inference."""
    costs, cpu = [], usable_cpus()[-1]
    with XdpFabric(program, cpu=cpu) as fabric:
        fabric.run(rows[:WARM], timeout_s=TIMEOUT_S)
        for at_once in (1, program.slots):
            say(f"kernel, {at_once} at once")
            before_us, begin_s = busy_us(cpu), time.perf_counter()
            verdicts = fabric.run(rows, timeout_s=TIMEOUT_S, at_once=at_once)
            taken_s, cpu_us = time.perf_counter() - begin_s, busy_us(cpu) - before_us
            for verdict, logits in zip(verdicts, expected, strict=True):
                if verdict.logits != tuple(logits):
                    raise RuntimeError(f"row {verdict.row}: {verdict.logits} instead of {logits}")
            delays_us = [(verdict.end_ns - verdict.start_ns) / 1e3 for verdict in verdicts]
            slots = "one at a time" if at_once == 1 else f"{at_once} slots in use"
            costs.append(Cost(f"kernel (XDP, tc), {slots}", delays_us, len(rows) / taken_s, cpu_us / len(rows)))
        say("kernel, program by program")
        with measuring():
            fabric.run(rows[:100], timeout_s=TIMEOUT_S, at_once=1)
        return costs, programs(fabric, program, 100)


def programs(fabric: XdpFabric, program: Program, inferences: int) -> list[list[object]]:
    """For each layer: units, packets and µs per inference, ns per packet, instructions, and how many were verified."""
    found: list[list[object]] = []
    groups = [("features", ["features"]), ("copies for the first layer", ["copies"])]
    groups += [
        (layer.name, [f"{layer.label}.{unit.unit}" for unit in layer.units]) for layer in program.layers
    ]  # as the fabric names them
    by_name = {name.partition(".")[2]: each for name, each in fabric.programs().items()}
    for name, members in groups:
        times = [by_name[member].measured() for member in members]
        runs, run_ns = sum(each.runs for each in times), sum(each.run_ns for each in times)
        length = len(by_name[members[0]].code) // 8
        per_inference_us = run_ns / inferences / 1e3
        found.append(
            [name, len(members), runs // inferences, run_ns / runs, per_inference_us, length, times[0].verified]
        )
    return found


def timed(name: str, run: Callable[[int], object], count: int, size: int = 1) -> Cost:
    """`run(i)` for i in 0..count-1, one after another; each is `size` inferences."""
    say(name)
    for warm in range(min(WARM, count)):
        run(warm)
    before = resource.getrusage(resource.RUSAGE_SELF)
    delays_us, begin_s = [], time.perf_counter()
    for place in range(count):
        sent_s = time.perf_counter()
        run(place)
        delays_us.append((time.perf_counter() - sent_s) * 1e6)
    taken_s, after = time.perf_counter() - begin_s, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(name, delays_us, count * size / taken_s, cpu_s / count / size * 1e6)


def onnx_runtime(rows: Ints, threads: int) -> Cost:
    """The floats in ONNX Runtime, one row at a time."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    session = onnxruntime.InferenceSession(shipped_file(), options, providers=["CPUExecutionProvider"])
    port = session.get_inputs()[0]
    shape = [size if isinstance(size, int) else 1 for size in port.shape]
    inputs = [row.astype(np.float32).reshape(shape) for row in rows]
    name = f"ONNX Runtime, {threads} thread{'s' if threads > 1 else ''}, float32"
    return timed(name, lambda place: session.run(None, {port.name: inputs[place]}), len(rows))


def agreement(rows: Ints, expected: Ints) -> float:
    """The share of rows that floats and integers classify alike."""
    session = onnxruntime.InferenceSession(shipped_file(), providers=["CPUExecutionProvider"])
    port = session.get_inputs()[0]
    shape = [size if isinstance(size, int) else 1 for size in port.shape]
    floats = [session.run(None, {port.name: row.astype(np.float32).reshape(shape)})[0].ravel() for row in rows]
    return float(np.mean([(one[0] >= 0) == (logits[0] >= 0) for one, logits in zip(floats, expected, strict=True)]))


def emulated(program: Program, rows: Ints, expected: Ints) -> Cost:
    """A few inferences in the emulator, instruction by instruction."""

    def run(place: int) -> None:
        (verdict,), _ = Emulator(program).run(rows[place : place + 1])
        if verdict.logits != tuple(expected[place]):
            raise RuntimeError(f"row {place}: the emulator gives {verdict.logits} instead of {expected[place]}")

    return timed("emulator, one at a time", run, 3)


def inference_points(model: DetectionModel, count: int, seed: int) -> Ints:
    """Rows of the generator's traffic."""
    rows = model.card.encoding.rows(dataset(calls(seed, max(60, count // 5)), histograms=False).points)
    return np.asarray(rows[np.random.default_rng(seed).permutation(len(rows))[:count]], np.int64)


def run(given: Arguments) -> str:
    """The page's text."""
    model = shipped_model()
    rows = inference_points(model, given.rows, given.seed)
    expected = model.network.run(rows)
    program = compile_network(model.network)
    costs, by_program = in_kernel(program, rows, expected)
    costs += [onnx_runtime(rows, threads) for threads in range(1, len(usable_cpus()) + 1)]
    costs.append(timed("NumPy reference, one row", lambda place: model.network.run(rows[place : place + 1]), len(rows)))
    batch = np.resize(rows, (BATCH, rows.shape[1]))
    costs.append(timed(f"NumPy reference, {BATCH} rows", lambda _: model.network.run(batch), 20, BATCH))
    costs.append(emulated(program, rows, expected))
    figures = [
        [each.name, min(each.delays_us), *(quantile(each.delays_us, q) for q in (0.5, 0.99)), each.rate, each.cpu_us]
        for each in costs
    ]
    facts = f"""
The network that ships for intrusion detection: {model.network.parameters:,} parameters, {model.network.products:,}
products and {sum(program.copies):,} packets received per inference. {len(rows)} inference points of generated flows.
Kernel, NumPy reference and emulator gave the same logits, bit for bit. ONNX Runtime runs the floats that were
quantised, and classifies {agreement(rows, expected):.1%} of these rows alike.
"""
    columns = ["runner", "least delay, µs", "p50, µs", "p99, µs", "inferences/s", "CPU per inference, µs"]
    program_columns = [
        *("program", "units", "runs per inference", "ns per run", "µs per inference", "instructions", "verified")
    ]
    return "\n\n".join(
        [
            facts.strip(),
            verdict_on(costs, program),
            table(columns, figures),
            "CPU of the kernel's runs: how long the one CPU was busy that the packets ran on, other programs' time on "
            "it included.",
            "The kernel's programs, while it measured them, which adds some 50 ns to each run:",
            table(program_columns, by_program),
            "None of them has a multiplication, division or modulo, before or after the kernel's own rewriting "
            "(`tests/innet/test_xdp.py`). The rest of the delay is what veth devices and the network stack do with "
            'packets. "Verified": instructions that the kernel\'s verifier followed.',
        ]
    )


def verdict_on(costs: Sequence[Cost], program: Program) -> str:
    """Which is quicker, in plain words."""
    kernel_us = min(costs[0].delays_us)
    runtime_us = min(min(each.delays_us) for each in costs if "ONNX" in each.name)
    modelled = program.time
    ratio = kernel_us / runtime_us
    compared = "longer" if modelled.latency_ns > runtime_us * 1e3 else "shorter"
    found = (
        f"**On Linux the CPU runtime is {ratio:.0f} times as quick, as expected**"
        if ratio > 1
        else "**On Linux the kernel is quicker than the CPU runtime, which was not expected**"
    )
    return (
        f"{found}: {runtime_us:,.0f} µs against {kernel_us:,.0f} µs for one inference, least delays, which "
        "other programs on the machine disturb least. The kernel moves "
        f"{sum(program.copies):,} packets for it and multiplies by looking up; the CPU runtime multiplies many numbers "
        "at once, in one place. What these runs show is that the program is right, on real packets.\n\n"
        f"A switch would take {modelled.latency_ns / 1e3:,.0f} µs for one inference ({compared} than the CPU runtime), "
        f"give up to {modelled.rate_rps:,.0f} per second (one CPU at that delay: {1e6 / runtime_us:,.0f}), and take no "
        "server's CPU: that is the modelled switch, not measured, with passes of "
        f"{program.fabric.pass_ns:g} ns and {program.fabric.products_per_pass} products in each."
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=400, help="inferences of each runner (default 400)")
    given = parser.parse_args()
    if reason := why_no_xdp():
        parser.error(f"no programs in the kernel: {reason}")
    publish("innet", "Inference inside the network, on Linux", run(given), write=not given.no_write)


if __name__ == "__main__":
    main()
