"""How one model uses the cores of this machine best: instances × threads × batch, and the options of ONNX Runtime.

    python -m benchmarks.instances [--parts cells,options,live] [--seconds 0.15] [--weights model.safetensors]

In the first two parts processes run batches back to back, alone or side by side; each round has all cells in a random
order, and results are medians over the rounds. Inputs are in the process: there is no server. A process with one thread
is pinned to a CPU of its own, one with two may use both. In the third, two servers serve the model under the default
system; one of them may have only one replica. They get the same requests, in turn.
"""

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import yaml

from benchmarks import encoder
from benchmarks.notebook import arguments, publish, say, table, workspace
from benchmarks.peers.models import image_model
from benchmarks.peers.open_loop import BURST, PERIOD_S, SQUARE, STEADY, Wave
from sloop.demo.live import serving
from sloop.load import LoadPlan, LoadResult, run_load
from sloop.profile.model import OnnxSession, feed_for, onnx_runtime, open_session
from sloop.profile.profile import Profile, load_profile, path_beside
from sloop.workload import Trace, trace_from

ROUNDS: Final = 3
BATCHES: Final = (1, 2, 4, 8)
OPTIONS_BATCHES: Final = (1, 4)
LENGTH: Final = 64
"""Of the texts, in tokens."""
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {"ids": (LENGTH,), "mask": (LENGTH,)}
CELLS: Final[Mapping[str, tuple[int, int]]] = {"1 × 1": (1, 1), "1 × 2": (1, 2), "2 × 1": (2, 1), "2 × 2": (2, 2)}
"""Instances and the threads of each."""
LIVE: Final = ((SQUARE, 1.3), (SQUARE, 0.9), (STEADY, 1.3))
"""Arrivals, and their rate as a part of what one replica serves in batches of 8, by its profile."""
SLOS_MS: Final = {"SqueezeNet": 150.0, "ResNet-50": 250.0, "encoder": 250.0}
LIVE_S: Final = 6.0
RPS_MIN: Final = 0.1
"""Replaces a goodput of none where one is divided by it."""
PACED: Final = "1 × 2, half idle"
"""Each batch is followed by a pause of its length: what idle threads do costs CPU time then."""
SPINS: Final = "session.intra_op.allow_spinning"
TODAY: Final = "as served"
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    TODAY: {},
    "no arena": {"enable_cpu_mem_arena": False},
    "no memory pattern": {"enable_mem_pattern": False},
    "threads spin": {SPINS: "1"},
    "threads spin until a pass ends": {SPINS: "1", "session.force_spinning_stop": "1"},
    "work in smaller blocks": {"session.dynamic_block_base": "4"},
    "extended graph optimisation": {"graph_optimization_level": "ORT_ENABLE_EXTENDED"},
    "basic graph optimisation": {"graph_optimization_level": "ORT_ENABLE_BASIC"},
    "parallel execution": {"execution_mode": "ORT_PARALLEL", "inter_op_num_threads": 2},
}
"""What differs from the options with which a server opens a model: an attribute of `SessionOptions`, or an entry."""


class Ran(NamedTuple):
    """Batches that a process ran back to back: the mean and the least duration, and the CPU time of each."""

    mean_ms: float
    least_ms: float
    cpu_ms: float


class Worker:
    """A process with sessions, each with a name."""

    def __init__(self, cpus: Iterable[int]) -> None:
        here, there = get_context("spawn").Pipe()
        self.pipe: Connection = here
        self._process = get_context("spawn").Process(target=_serve, args=(there, set(cpus)), daemon=True)
        self._process.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, cpus: set[int]) -> None:
    """Open sessions and run batches as ordered; a name without a path is run."""
    os.sched_setaffinity(0, cpus)
    sessions: dict[str, OnnxSession] = {}
    while (order := pipe.recv()) is not None:
        name, path, *rest = order
        if path:
            sessions[name] = _opened(path, *rest)
            pipe.send(None)
        else:
            pipe.send(_run(sessions[name], *rest))


def _opened(path: Path, threads: int, changes: Mapping[str, Any]) -> OnnxSession:
    """A session with changed options. Without changes, as a replica opens it."""
    ort = onnx_runtime()
    if not changes:
        return OnnxSession(path, threads, opened=open_session(path, threads))
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 4
    enums = {"graph_optimization_level": ort.GraphOptimizationLevel, "execution_mode": ort.ExecutionMode}
    for key, value in {SPINS: "0", **changes}.items():
        if "." in key:
            options.add_session_config_entry(key, value)
        else:
            setattr(options, key, getattr(enums[key], value) if key in enums else value)
    opened = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return OnnxSession(path, threads, opened=opened)


def _run(session: OnnxSession, batch: int, seconds: float, is_paced: bool) -> Ran:
    shapes = SHAPES if "ids" in {port.name for port in session.signature.inputs} else {}
    feed = feed_for(session, batch, shapes, where="")
    session.run(feed)
    begun_s, cpu_s, taken = time.perf_counter(), time.process_time(), list[float]()
    while len(taken) < 3 or time.perf_counter() - begun_s < seconds:
        at_s = time.perf_counter()
        session.run(feed)
        taken.append(time.perf_counter() - at_s)
        if is_paced:
            time.sleep(taken[-1])
    return Ran(1e3 * fmean(taken), 1e3 * min(taken), 1e3 * (time.process_time() - cpu_s) / len(taken))


def together(workers: Sequence[Worker], *order: Any) -> list[Any]:  # noqa: ANN401
    """What the workers answer to one order, which they carry out side by side."""
    for worker in workers:
        worker.pipe.send(order)
    return [worker.pipe.recv() for worker in workers]


class Machine(NamedTuple):
    """Processes by their number of threads, and the models."""

    workers: Mapping[int, Sequence[Worker]]
    models: Mapping[str, Path]
    seconds: float
    seed: int

    def ran(self, name: str, cell: str, batch: int) -> Ran:
        """A cell, measured; the mean of its instances."""
        is_paced = cell == PACED
        count, threads = CELLS["1 × 2" if is_paced else cell]
        found = together(self.workers[threads][:count], name, None, batch, self.seconds, is_paced)
        return Ran(*map(fmean, zip(*found, strict=True)))

    def rounds(
        self, names: Sequence[str], cells: Sequence[str], batches: Sequence[int]
    ) -> dict[tuple[str, str, int], list[Ran]]:
        """Every cell of every name, once in each round."""
        found: dict[tuple[str, str, int], list[Ran]] = {}
        for number in range(ROUNDS):
            todo = [(name, cell, batch) for name in names for cell in cells for batch in batches]
            Random(self.seed + number).shuffle(todo)
            for each in todo:
                found.setdefault(each, []).append(self.ran(*each))
        return found


def cells_part(machine: Machine) -> str:
    """Durations and throughput by instances, threads and batch, and what splitting a batch gains."""
    for name, path in machine.models.items():
        for threads, workers in machine.workers.items():
            together(workers, name, path, threads, {})
    found = machine.rounds(list(machine.models), list(CELLS), BATCHES)
    ms = {each: median(ran.mean_ms for ran in rounds) for each, rounds in found.items()}
    rows, splits = [], []
    for name in machine.models:
        for batch in BATCHES:
            rps = {cell: CELLS[cell][0] * batch * 1e3 / ms[name, cell, batch] for cell in CELLS}
            rows.append(
                (name, batch, *(ms[name, cell, batch] for cell in CELLS), *rps.values(), max(rps, key=rps.__getitem__))
            )
            if 2 * batch in BATCHES:
                whole = ms[name, "1 × 2", 2 * batch]
                splits.append(
                    (name, 2 * batch, whole, whole / ms[name, "2 × 1", batch], whole / ms[name, "2 × 2", batch])
                )
    columns = ("model", "batch", *(f"{cell}, ms" for cell in CELLS), *(f"{cell}, rows/s" for cell in CELLS), "most")
    split_columns = ("model", "batch", "1 × 2, ms", "split over 2 × 1: times as fast", "over 2 × 2")
    about = "Duration of a batch of each instance, and rows per second of all, by instances × threads."
    split = "A batch on one instance with two threads, beside its halves side by side:"
    return "\n\n".join([about, table(columns, rows), split, table(split_columns, splits)])


def options_part(machine: Machine) -> str:
    """Each option beside today's, model by model."""
    cells, parts = ("1 × 2", "2 × 2", PACED), list[str]()
    measures = [("1 × 2", "least_ms", 0), *((cell, "cpu_ms", ROUNDS // 2) for cell in cells)]
    for name, path in machine.models.items():
        say(name)
        memory = {option: _memory_mib(path, changes) for option, changes in OPTIONS.items()}
        for option, changes in OPTIONS.items():
            together(machine.workers[2], option, path, 2, changes)
        found = machine.rounds(list(OPTIONS), cells, OPTIONS_BATCHES)
        rows = []
        for option in OPTIONS:
            ratios = [
                sorted(getattr(ran, what) for ran in found[option, cell, batch])[place]
                / sorted(getattr(ran, what) for ran in found[TODAY, cell, batch])[place]
                for cell, what, place in measures
                for batch in OPTIONS_BATCHES
            ]
            rows.append((option, *ratios, memory[option]))
        heads = ("alone, least ms", "alone, CPU time", "side by side, CPU time", "half idle, CPU time")
        columns = ("option", *(f"{head}, batch {batch}" for head in heads for batch in OPTIONS_BATCHES), "MiB")
        parts.append(f"## {name}\n\n{table(columns, rows)}")
        say(parts[-1])
    about = (
        "Ratios to the options with which a server opens models, of an instance with two threads: the least duration "
        "of a batch alone, which other work on this machine hardly changes; and the CPU time of a batch alone, with "
        "another instance beside it, and alone with a pause after each batch, with what idle threads take. MiB: "
        "resident memory of a process after a batch of 8."
    )
    return "\n\n".join([about, *parts])


def _memory_mib(path: Path, changes: Mapping[str, Any]) -> float:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_report_memory, args=(there, path, changes))
    process.start()
    found: float = here.recv()
    process.join()
    return found


def _report_memory(pipe: Connection, path: Path, changes: Mapping[str, Any]) -> None:
    session = _opened(path, 2, changes)
    _run(session, 8, 0.0, False)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    pipe.send(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


def live_part(machine: Machine) -> str:
    """Goodput with one replica and with as many as the default system chooses, under bursts and Poisson arrivals."""
    rows = list[Sequence[object]]()
    for name, path in machine.models.items():
        say(name)
        profile = _profiled(path)
        slo_ms, capacity_rps = SLOS_MS[name], 8e3 / profile.latency_ms.latency_ms(8, profile.max_cores)
        with ExitStack() as stack:
            servers = []
            for label, parameters in (("one", {"replicas_max": 1}), ("chosen", {})):
                folder = path.parent / f"{path.stem}-{label}"
                folder.mkdir(exist_ok=True)
                stage = {"name": "only", "model": str(path.absolute())}
                system = {"name": "elastic", **parameters}
                app = {"name": "model", "slo_ms": slo_ms, "system": system, "stages": [stage]}
                (folder / "app.yaml").write_text(yaml.safe_dump(app))
                servers.append(stack.enter_context(serving(folder / "app.yaml", folder / "state")))
            found: dict[tuple[Wave, float], list[tuple[LoadResult, LoadResult]]] = {}
            for number, (wave, load) in enumerate((LIVE[0], *LIVE * ROUNDS)):
                arrivals = _arrivals(wave, load * capacity_rps, machine.seed + number)
                shapes = {key: (1, *row) for key, row in SHAPES.items()} if path.stem == "encoder" else {}
                plans = [LoadPlan(each.http, each.application, arrivals, slo_ms, shapes=shapes) for each in servers]
                one, chosen = map(run_load, plans)
                if number:  # the first load starts replicas
                    found.setdefault((wave, load), []).append((one, chosen))
                    say(f"{wave.name} {load:g}: {one.goodput_rps:.4g} and {chosen.goodput_rps:.4g}")
        for (wave, load), pairs in found.items():
            offered, before = (fmean(getattr(a, key) for a, _ in pairs) for key in ("offered_rps", "goodput_rps"))
            after = fmean(b.goodput_rps for _, b in pairs)
            ratios = sorted(b.goodput_rps / max(a.goodput_rps, RPS_MIN) for a, b in pairs)
            ratio = after / max(before, RPS_MIN)
            rows.append((name, wave.name, load, offered, before, after, ratio, ratios[0], ratios[-1]))
        size = f"{profile.best_size(profile.max_cores, slo_ms / 2, profile.max_batch):g} of {profile.max_cores:g} cores"
        rows.append((f"{name}: replicas of {size}, deadline {slo_ms:g} ms", *[None] * 8))
    heads = ("goodput: one replica", "as chosen", "ratio", "least", "most")
    columns = ("model", "arrivals", "load, of one replica", "requests/s", *heads)
    return table(columns, rows)


def _profiled(path: Path) -> Profile:
    """A short profile."""
    shapes = [word for name, row in SHAPES.items() for word in ("--shape", f"{name}={row[0]}")]
    command = [sys.executable, "-m", "sloop", "profile", str(path), *(shapes if path.stem == "encoder" else ())]
    subprocess.run([*command, "--alone"], stdout=subprocess.DEVNULL, check=True)
    return load_profile(path_beside(path))


def _arrivals(wave: Wave, rate_rps: float, seed: int) -> Trace:
    spec: dict[str, Any] = {"kind": "poisson", "rate": rate_rps}
    if wave.square:
        low, high = (2 - BURST) * rate_rps, BURST * rate_rps
        spec = {"kind": "square", "rate": low, "burst_rate": high, "period_s": PERIOD_S, "burst_s": PERIOD_S / 2}
    return trace_from(spec, seed=seed, duration_s=LIVE_S, folder=Path())


def models(folder: Path, weights: Path | None) -> dict[str, Path]:
    """SqueezeNet, ResNet-50 and an encoder of texts, with random weights unless a file has them."""
    texts = encoder.write(folder / "encoder.onnx", encoder.read_safetensors(weights) if weights else None)
    squeezenet, resnet50 = image_model(folder, "squeezenet", 128), image_model(folder, "resnet50", 96)
    return {"SqueezeNet": squeezenet.path, "ResNet-50": resnet50.path, "encoder": texts}


PARTS: Final = {
    "cells": ("instances-cells", "Instances, threads and batches", cells_part),
    "options": ("instances-options", "ONNX Runtime's options", options_part),
    "live": ("instances-live", "Replicas with parts of the cores, live", live_part),
}


def main() -> None:
    parser = arguments(__doc__, seconds=0.15, quick=0.05)
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: all)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="the encoder's, as safetensors; else random ones")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        for part in given.parts.split(","):
            measured(part, folder, given)


def measured(part: str, folder: Path, given: Namespace) -> None:
    """Measure a part with processes of its own, and write its page."""
    name, title, of = PARTS[part]
    with ExitStack() as stack:
        cpus = sorted(os.sched_getaffinity(0))[:2]
        workers = {
            1: [stack.enter_context(Worker([cpu])) for cpu in cpus],
            2: [stack.enter_context(Worker(cpus)) for _ in cpus],
        }
        text = of(Machine(workers, models(folder, given.weights), given.seconds, given.seed))
    publish(name, title, text, write=not given.no_write)


if __name__ == "__main__":
    main()
