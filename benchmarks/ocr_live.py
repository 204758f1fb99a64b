"""The ocr example under a bursty trace, live: a system that sizes its stages, compared with an even split of the cores.

    python -m benchmarks.ocr_live [--seconds 60]

The application of examples/ocr gets images with four lines, so that each request has four parts. It has 1.75 cores of
this machine in quarters; the others are for server and load generator. First, each system serves a request every two
seconds; the deadline is three times the largest latency of the fastest system. Then comes a square wave, with four
times the rate in bursts. Each run is also simulated, from the example's profiles and with its own batch durations.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs

from benchmarks.notebook import ROOT, arguments, publish, say, table, workspace
from sloop.app.load import load_scenario
from sloop.demo.live import CountedRun, count_run, serving
from sloop.demo.run import WORLD_KEYS, LiveRun, dump_yaml, run_simulated
from sloop.load import LoadPlan, run_load
from sloop.load.plan import Delivery
from sloop.load.run import schedule_of
from sloop.report.tables import Cell
from sloop.sim import World, recorded_in
from sloop.user_code import module_in

EXAMPLE: Final = ROOT / "examples" / "ocr"
STAGES: Final = ("detect", "orient", "recognise")
SIZED: Final = "sized, early-drop"
UNIT, UNITS = 0.25, 7
LINES: Final = 4
FACTOR: Final = 3.0
"""The deadline over the unloaded p99."""
RATE_RPS: Final = 3.5
"""Between bursts half of it, in them twice as much."""
UNLOADED_S: Final = 30.0
COLUMNS: Final = (
    *("system", "unloaded p99 ms", "requests", "in time %", "late", "dropped", "errors", "p99 ms", "mean cores"),
    *("predicted %", "own batches %"),
)


class Run(Struct, frozen=True):
    """One system: live, predicted from the profiles, and simulated with the durations of its own batches."""

    live: LiveRun
    predicted: CountedRun
    again: CountedRun
    unloaded_ms: float = 0.0
    """The largest latency with a request every other second."""


def systems() -> dict[str, dict[str, Any]]:
    """An even split of the cores, a split in proportion to the work, and a system that sizes its stages itself."""
    sized = {"detect": {"cores": 0.5}, "orient": {"cores": 0.25}, "recognise": {"replicas": 2, "cores": 0.5}}
    sizes = {"unit": UNIT, "cores_max": UNITS, "batch_max": 4, "period_ms": 500}
    return {
        "even split": {"name": "static", "cores": UNIT * UNITS / len(STAGES)},
        SIZED: {"name": "early-drop", "stages": sized},
        "biscale": {"name": "biscale", **sizes, "sigma": 2.0, "drop": {"name": "predictive", "batch": "full"}},
    }


def label_tensor(folder: Path) -> Path:
    """The image of the label that requests send, as a tensor."""
    pixels = module_in(EXAMPLE / "pictures.py").draw(3, lines=LINES).pixels
    np.save(folder / "label.npy", pixels[None])
    return folder / "label.npy"


def play(folder: Path, system: Mapping[str, Any], trace: Mapping[str, Any], slo_ms: float, given: Any) -> Run:  # noqa: ANN401
    """One live run and its two simulations; its files are in its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    each = {"output": "strips", "mean": LINES, "most": 64}
    edges: list[dict[str, Any]] = [{}, {"after": ["detect"], "each": each}, {"after": ["orient"]}]
    declared = {
        "name": "ocr",
        "slo_ms": slo_ms,
        "stages": [
            {"name": name, "model": str(EXAMPLE / f"{name}.py"), **edge}
            for name, edge in zip(STAGES, edges, strict=True)
        ],
        "cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": UNIT * UNITS}]},
        "systems": [dict(system)],
        "trace": dict(trace),
        "duration_s": given.seconds,
        "seed": given.seed,
        "truth": {"resize_ms": 10, "cold_start": {"start_s": 1, "warm": True}, "fan_out": {"orient": [LINES]}},
    }
    dump_yaml(folder / "scenario.yaml", declared)
    app = {key: value for key, value in declared.items() if key not in WORLD_KEYS}
    dump_yaml(folder / "app.yaml", app | {"system": dict(system)})
    scenario = load_scenario(folder / "scenario.yaml")
    (choice,) = scenario.systems
    world = World.from_scenario(scenario, choice)
    due_ns, elapsed_ns = schedule_of(world.trace, None, 0, Delivery.DELAY)[0, :2].tolist()
    with serving(folder / "app.yaml", folder / "state") as where:
        plan = LoadPlan(
            url=where.http,
            model=where.application,
            arrivals=world.trace,
            slo_ms=slo_ms,
            seed=given.seed,
            input_file=folder.parent / "label.npy",
        )
        clients = run_load(plan)
        log = Path(where.log)
    first_ns, seconds = due_ns - elapsed_ns, ceil(given.seconds)
    live = LiveRun(count_run(log, first_ns=first_ns, duration_s=seconds), clients, log, first_ns)
    before = run_simulated(scenario, choice, live, folder / "predicted.jsonl")
    again = run_simulated(
        scenario, choice, live, folder / "again.jsonl", recorded=recorded_in(log, scenario.deployment)
    )
    return Run(live, before, again)


def rows_of(runs: Mapping[str, Run]) -> list[tuple[Cell, ...]]:
    """One row per system: without load, the clients' results under bursts, the server's cores, and the simulations."""
    rows: list[tuple[Cell, ...]] = []
    for label, run in runs.items():
        seen, outcome = run.live.clients, run.live.counted
        counted = (seen.late, seen.dropped + seen.rejected, seen.errors, seen.p99_ms)
        cores = outcome.row.core_seconds / max(1, len(outcome.summary.seconds()))
        simulated = (100 * run.predicted.row.attainment, 100 * run.again.row.attainment)
        rows.append((label, run.unloaded_ms, seen.sent, 100 * attained(run), *counted, cores, *simulated))
    return rows


def attained(run: Run) -> float:
    """The share of requests answered in time, from the clients' records."""
    return run.live.clients.attainment or 0.0


def verdicts(runs: Mapping[str, Run]) -> Sequence[tuple[str, Cell]]:
    """The expectations, and whether each was met."""
    return (
        ("cores where the work is answer 99 % in time", attained(runs[SIZED]) >= 0.99),
        ("biscale does too", attained(runs["biscale"]) >= 0.99),
        ("an even split of the same cores less than 90 %", attained(runs["even split"]) < 0.9),
    )


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=60.0, quick=40.0)
    parser.add_argument("--rate", type=float, default=RATE_RPS, help=f"requests per second (default {RATE_RPS:g})")
    given = parser.parse_args()
    wave = {"kind": "square", "rate": given.rate / 2, "burst_rate": given.rate * 2, "period_s": 20, "burst_s": 5}
    with workspace(given.keep) as folder:
        label_tensor(folder)
        unloaded_ms: dict[str, float] = {}
        for label, system in systems().items():
            say(f"{label}: a request every other second")
            few = type(given)(**vars(given) | {"seconds": UNLOADED_S})
            alone = play(folder / f"{label} alone", system, {"kind": "equal", "rate": 0.5}, 10_000, few)
            unloaded_ms[label] = alone.live.clients.p99_ms or 0.0
        slo_ms = round(FACTOR * min(unloaded_ms.values()))
        runs: dict[str, Run] = {}
        for label, system in systems().items():
            say(f"{label}, {slo_ms} ms: live for {given.seconds:g} s, then simulated")
            run = play(folder / label, system, wave, slo_ms, given)
            runs[label] = structs.replace(run, unloaded_ms=unloaded_ms[label])
        text = "\n\n".join(
            [
                f"Deadline {slo_ms} ms. {given.rate / 2:g} requests/s, and {given.rate * 2:g} for 5 s of every 20; "
                f"{LINES} parts each; {UNITS} units of {UNIT:g} core. The last two columns are simulated: from the "
                "profiles, and with the durations of the run's own batches.",
                table(COLUMNS, rows_of(runs)),
                table(("", ""), verdicts(runs)),
            ]
        )
        publish("ocr-live", "The ocr example under bursts, live", text, write=not given.no_write)


if __name__ == "__main__":
    main()
