"""The ocr example under a bursty trace, live: a system that sizes its stages beside an even split of the same cores.

    python -m benchmarks.ocr_live [--seconds 60]

The application of examples/ocr with one label of four lines, so that every request makes four parts; 1.75 of this
machine's cores in quarters, the rest for server and load generator. First each system alone with a request every other
second: the deadline is three times the largest latency seen then, once of the system that sizes and once, stricter, of
the even split. Then a square wave: bursts of four times the rate between them. Every run is simulated too, from the
profiles that lie with the example, and from the durations of its own batches.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct

from benchmarks.notebook import ROOT, arguments, publish, say, table, workspace
from sloop.app.load import load_scenario
from sloop.authored import module_in
from sloop.demo.live import serving
from sloop.demo.outcome import Outcome, read_outcome
from sloop.demo.run import WORLD_KEYS, Observed, dump, foretold
from sloop.load import LoadPlan, run_load
from sloop.load.plan import Delivery
from sloop.load.run import schedule_of
from sloop.report.tables import Cell
from sloop.sim.world import World, recorded_in

EXAMPLE: Final = ROOT / "examples" / "ocr"
STAGES: Final = ("detect", "orient", "recognise")
UNIT, UNITS = 0.25, 7
LINES: Final = 4
FACTOR: Final = 3.0
"""The deadline over the unloaded p99."""
RATE_RPS: Final = 5.0
"""Between bursts half of it, in them twice as much."""
UNLOADED_S: Final = 30.0


class Run(Struct, frozen=True):
    """A system at a deadline: live, foretold, and simulated with the durations of its own batches."""

    slo_ms: float
    live: Observed
    foretold: Outcome
    again: Outcome


def systems() -> dict[str, dict[str, Any]]:
    """An even split, and what sizes stages by their work."""
    even = UNIT * UNITS / len(STAGES)
    sizes = {"unit": UNIT, "cores_max": UNITS, "batch_max": 4, "period_ms": 500}
    return {
        "even split": {"name": "static", "cores": even},
        "biscale": {"name": "biscale", **sizes, "sigma": 2.0, "drop": {"name": "predictive", "batch": "full"}},
    }


def drawn(folder: Path) -> Path:
    """The label that is sent, as a tensor."""
    pixels = module_in(EXAMPLE / "pictures.py").draw(3, lines=LINES).pixels
    np.save(folder / "label.npy", pixels[None])
    return folder / "label.npy"


def play(folder: Path, system: Mapping[str, Any], trace: Mapping[str, Any], slo_ms: float, given: Any) -> Run:  # noqa: ANN401
    """One live run and its two simulations; its files go to a folder of its own."""
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
    dump(folder / "scenario.yaml", declared)
    app = {key: value for key, value in declared.items() if key not in WORLD_KEYS}
    dump(folder / "app.yaml", app | {"system": dict(system)})
    scenario = load_scenario(folder / "scenario.yaml")
    (choice,) = scenario.systems
    world = World.from_scenario(scenario, choice)
    due_ns, elapsed_ns = schedule_of(world.trace, None, 0, Delivery.DELAY)[0].tolist()
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
    live = Observed(read_outcome(log, first_ns=first_ns, duration_s=seconds), clients, log, first_ns)
    before = foretold(scenario, choice, live, folder / "foretold.jsonl")
    again = foretold(scenario, choice, live, folder / "again.jsonl", recorded=recorded_in(log))
    return Run(slo_ms, live, before, again)


def rows_of(runs: Mapping[tuple[str, str], Run]) -> list[tuple[Cell, ...]]:
    """A row for each system at each deadline: what clients saw, the server's cores, and the simulations."""
    rows: list[tuple[Cell, ...]] = []
    for (deadline, label), run in runs.items():
        seen, outcome = run.live.clients, run.live.outcome
        missed = (seen.late, seen.dropped + seen.rejected, seen.errors)
        cores = outcome.row.core_seconds / max(1, len(outcome.metrics.seconds()))
        simulated = (100 * run.foretold.row.attainment, 100 * run.again.row.attainment)
        attained = 100 * (seen.attainment or 0.0)
        rows.append(
            (f"{deadline}: {run.slo_ms:.0f}", label, seen.sent, attained, *missed, seen.p99_ms, cores, *simulated)
        )
    return rows


def verdicts(runs: Mapping[tuple[str, str], Run], deadline: str) -> Sequence[tuple[str, Cell]]:
    """What is asked, at one deadline."""
    attained = {label: run.live.clients.attainment or 0.0 for (at, label), run in runs.items() if at == deadline}
    return (
        (f"deadline of {deadline}: biscale answers 99 % in time", attained["biscale"] >= 0.99),
        (f"deadline of {deadline}: the even split less than 90 %", attained["even split"] < 0.9),
    )


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=60.0, quick=40.0)
    parser.add_argument("--rate", type=float, default=RATE_RPS, help=f"requests per second (default {RATE_RPS:g})")
    given = parser.parse_args()
    wave = {"kind": "square", "rate": given.rate / 2, "burst_rate": given.rate * 2, "period_s": 20, "burst_s": 5}
    with workspace(given.keep) as folder:
        drawn(folder)
        unloaded_ms: dict[str, float] = {}
        for label in ("even split", "biscale"):
            say(f"{label}: a request every other second")
            few = type(given)(**vars(given) | {"seconds": UNLOADED_S})
            run = play(folder / f"{label} alone", systems()[label], {"kind": "equal", "rate": 0.5}, 10_000, few)
            unloaded_ms[label] = run.live.clients.p99_ms or 0.0
        runs: dict[tuple[str, str], Run] = {}
        for deadline, label in product(unloaded_ms, systems()):
            slo_ms = round(FACTOR * unloaded_ms[deadline])
            say(f"{label}, {slo_ms} ms: live for {given.seconds:g} s, then simulated")
            place = folder / f"{label} at {slo_ms}"
            runs[deadline, label] = play(place, systems()[label], wave, slo_ms, given)
        alone = ", ".join(f"{label} {took:.0f} ms" for label, took in unloaded_ms.items())
        columns = ("deadline, ms, of", "system", "requests", "in time %", "late", "dropped", "errors", "p99 ms")
        text = "\n\n".join(
            [
                f"Unloaded p99: {alone}; each deadline three times one of them. {given.rate / 2:g} requests/s, and "
                f"{given.rate * 2:g} for 5 s of every 20; {LINES} parts each; {UNITS} units of {UNIT:g} core. The last "
                "two columns are simulated: from the profiles, and with the durations of the run's own batches.",
                table((*columns, "mean cores", "foretold %", "own batches %"), rows_of(runs)),
                table(("", ""), [row for deadline in unloaded_ms for row in verdicts(runs, deadline)]),
            ]
        )
        publish("ocr_live", "The ocr example under bursts, live", text, write=not given.no_write)


if __name__ == "__main__":
    main()
