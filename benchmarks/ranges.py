"""Is the attainment of live runs inside the range that the simulator predicted? With mixed rows and lengths.

    python -m benchmarks.ranges [--repeats 5] [--seconds 20] [--weights model.safetensors]

Two models: a text encoder (benchmarks/encoder.py) under texts of different lengths, 1 to 4 a request, by a system whose
replica uses what the other processes leave of the cores; and ResNet18 under 1 to 8 images a request, by one whose
replica wants both cores. Each is profiled as `sloop profile` does it, in `PASSES` passes, and served `--repeats` times
with the same requests. Each run begins with `CALIBRATION_S` seconds of other requests at the same rate: a machine with
less to do is slower, because its processors go to sleep between batches. They say how fast the machine is at this
moment, and how well they know it (`--speed`), and what the server's own processes and the load generator take for a
request (`truth.processes`). With these the rest of the run is simulated: the prediction knows nothing of the seconds
that it is for.

Nothing else should run on the machine. `--only NAME` measures one model, which takes seven minutes, and writes no page;
what `--keep` has already is not measured again. It also has the logs of all runs.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from time import sleep
from typing import Any, Final

import msgspec
import yaml
from msgspec import Struct

from benchmarks import encoder
from benchmarks.models import resnet18
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.actions import End
from sloop.app.load import load_scenario
from sloop.app.scenario import ProcessesTruth
from sloop.demo.live import serving
from sloop.load import LoadPlan, run_load
from sloop.profile.passes import MachineSpeed
from sloop.profile.profile import Profile, load_profile, path_beside
from sloop.runlog import read_log
from sloop.runlog.processes import ProcessorUse
from sloop.sim import World
from sloop.sim.machine_speed import log_speed
from sloop.sim.ranges import at_speed
from sloop.sim.scenarios import run_scenario
from sloop.vocabulary import Outcome, Request
from sloop.workload import trace_from
from sloop.workload.trace import first_works

PASSES: Final = 2
CALIBRATION_S: Final = 20.0
SETTLED_S: Final = 2.5
"""After this the log of the calibration is on the disk."""
DRAWN, DRAWN_S = 5_000, 60.0
"""Requests that make the average."""
LOAD: Final = 0.8
"""Of what batches of 4 average rows could be served."""
DEADLINE: Final = 6.0
"""Deadlines are this many times what an average request takes alone on all cores."""
AGREE: Final = 3.0
WIDTH_MAX: Final = 5.0
"""Points: where live runs are so near each other, ranges must be at most so wide."""
CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "texts": {
        "system": {"name": "early-drop"},
        "stage": {"pad": {"ids": 0, "mask": 0}},
        "rows": {"kind": "choice", "values": [1, 2, 4], "weights": [6, 3, 1]},
        "sizes": {"kind": "lognormal", "median": 40, "sigma": 0.8, "most": 512},
        "profile": ["--sizes", "16,64,256,512"],
    },
    "images": {
        "system": {"name": "static", "cores": 2},
        "stage": {},
        "rows": {"kind": "choice", "values": [1, 2, 8], "weights": [6, 3, 1]},
        "profile": [],
    },
}
COLUMNS: Final = (
    *("requests", "run", "speed at its start", "± %", "µs a request: server", "generator", "live %", "of clients %"),
    *("predicted %", "middle %", "inside", "width, points"),
)


class LiveRun(Struct, frozen=True):
    """One live run, and what its first seconds said."""

    speed: MachineSpeed
    request_us: float
    client_us: float
    attainment: float
    of_clients: float


class LiveRuns(Struct, frozen=True):
    """The runs of one model, and their scenario."""

    scene: dict[str, Any]
    runs: list[LiveRun]


def profiled(folder: Path, name: str, given: Namespace) -> tuple[Path, Profile]:
    """The model of a case and its profile."""
    if name == "texts":
        weights = encoder.read_safetensors(given.weights) if given.weights else None
        model = encoder.write(folder / "encoder.onnx", weights)
    else:
        model = resnet18(folder)
    if path_beside(model).is_file():
        return model, load_profile(path_beside(model))
    say(f"profile {model.name}")
    command = [sys.executable, "-m", "sloop", "profile", str(model), "--passes", str(PASSES), "--json"]
    if subprocess.run([*command, *CASES[name]["profile"]], stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"sloop profile {model} failed")
    return model, load_profile(path_beside(model))


def declared(model: Path, profile: Profile, name: str, given: Namespace) -> dict[str, Any]:
    """The scenario of a case; its rate and deadline follow from the profile."""
    case = CASES[name]
    works = {key: case[key] for key in ("rows", "sizes") if key in case}
    trace = {"kind": "poisson", "rate": 100, **works}
    brought = first_works(trace_from(trace, seed=given.seed, duration_s=DRAWN_S, folder=Path()), DRAWN)
    rows = sum(work.rows for work in brought)
    alone_ms = sum(profile.latency_at(work.size, work.rows, profile.max_cores) for work in brought) / len(brought)
    row_ms = sum(work.rows * profile.latency_at(work.size, 4, profile.max_cores) / 4 for work in brought) / rows
    return {
        "name": name,
        "slo_ms": round(DEADLINE * alone_ms, 1),
        "stages": [{"name": "only", "model": str(model.absolute()), **case["stage"]}],
        "cluster": {"nodes": [{"hardware": "local", "count": 1}]},
        "systems": [case["system"]],
        "trace": trace | {"rate": round(LOAD * 1e3 / row_ms * len(brought) / rows, 1)},
        "duration_s": given.seconds,
        "seed": given.seed,
    }


def served(folder: Path, scene: dict[str, Any], given: Namespace) -> Iterator[LiveRun]:
    """Serve a scenario `--repeats` times."""
    (folder / "scene.yaml").write_text(yaml.safe_dump(scene))
    app = {key: scene[key] for key in ("name", "slo_ms", "stages", "cluster")} | {"system": scene["systems"][0]}
    (folder / "app.yaml").write_text(yaml.safe_dump(app))
    scenario = load_scenario(folder / "scene.yaml")
    first = trace_from(scene["trace"], seed=given.seed + 1, duration_s=CALIBRATION_S, folder=folder)
    arrivals = World.from_scenario(scenario).trace
    for number in range(given.repeats):
        say(f"{scene['name']}, live run {number + 1} at {scene['trace']['rate']} requests/s")
        own = folder / f"{scene['name']} {number + 1}"
        state, begun = own / "state", own / "begun"
        rmtree(own, ignore_errors=True)
        own.mkdir()
        with serving(folder / "app.yaml", state) as where:
            plans = [LoadPlan(where.http, where.application, each, scene["slo_ms"]) for each in (first, arrivals)]
            calibration = run_load(plans[0])
            sleep(SETTLED_S)
            copytree(Path(where.log), begun)
            clients = run_load(plans[1])
        use = ProcessorUse()
        for now_ns, record in read_log(begun):
            use.append(now_ns, record)
        processes = ProcessesTruth(use.request_us or 0.0, calibration.cpu_us)
        speed = log_speed(begun, scenario.deployment, processes)
        assert speed is not None, "the calibration has too few batches"
        live = attainment_in(Path(where.log), calibration.sent)
        rmtree(state / "models", ignore_errors=True)
        yield LiveRun(speed, processes.request_us, processes.client_us, live, clients.attainment or 0.0)


def attainment_in(log: Path, skipped: int) -> float:
    """The share of the requests of a log, without the first ones, that were served in time."""
    requests, served = list[int](), set[int]()
    for _, record in read_log(log):
        if isinstance(record, Request):
            requests.append(record.id)
        elif isinstance(record, End) and record.outcome is Outcome.SERVED:
            served.add(record.request)
    counted = requests[skipped:]
    return len(served.intersection(counted)) / len(counted)


def predicted(folder: Path, found: LiveRuns) -> list[tuple[float, float, float]]:
    """For each run the least, the middle and the highest attainment that the simulator predicts."""
    (folder / "scene.yaml").write_text(yaml.safe_dump(found.scene))
    scenario, ranges = load_scenario(folder / "scene.yaml"), []
    for run in found.runs:
        truth = replace(scenario.truth, processes=ProcessesTruth(run.request_us, run.client_us))
        known = at_speed(replace(scenario, truth=truth), run.speed)
        row = run_scenario(known, known.systems[0], with_range=True).row
        ranges.append((row.attainment_low or 0.0, row.attainment, row.attainment_high or 0.0))
    return ranges


def report(folder: Path, all_runs: Mapping[str, LiveRuns]) -> str:
    """The text of the page."""
    rows, groups, inside = list[Sequence[object]](), list[Sequence[object]](), list[bool]()
    for name, found in all_runs.items():
        widths = []
        for number, (run, (low, middle, high)) in enumerate(zip(found.runs, predicted(folder, found), strict=True), 1):
            inside.append(low - 5e-4 <= run.attainment <= high + 5e-4)
            widths.append(100 * (high - low))
            rows.append(
                (
                    *(name, number, run.speed.factor, 100 * run.speed.error / run.speed.factor),
                    *(run.request_us, run.client_us),
                    *(100 * run.attainment, 100 * run.of_clients, f"{100 * low:.1f}–{100 * high:.1f}", 100 * middle),
                    *(inside[-1], widths[-1]),
                )
            )
        live = [100 * run.attainment for run in found.runs]
        apart, widest = max(live) - min(live), max(widths)
        scene = found.scene
        groups.append(
            (
                *(name, scene["duration_s"], scene["trace"]["rate"], scene["slo_ms"]),
                *(str(scene["systems"][0]["name"]), apart, widest),
                apart > AGREE or widest <= WIDTH_MAX,
            )
        )
    return "\n\n".join(
        [
            f"{len(inside)} live runs, each after {CALIBRATION_S:g} s that gave the machine's speed. Attainment inside "
            f"the range in {sum(inside)} of {len(inside)}.",
            table(COLUMNS, rows),
            table(
                (
                    *(
                        "requests",
                        "seconds",
                        "requests/s",
                        "deadline ms",
                        "system",
                        "live runs apart, points",
                        "widest, points",
                    ),
                    f"at most {WIDTH_MAX:g} wide, or more than {AGREE:g} apart",
                ),
                groups,
            ),
        ]
    )


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=20, quick=10)
    parser.add_argument("--repeats", type=int, default=5, help="live runs of each model (default 5)")
    parser.add_argument("--only", choices=[*CASES], help="only measure this one, and write no page")
    parser.add_argument("--weights", type=Path, help="the encoder's model.safetensors (default: random weights)")
    given = parser.parse_args()
    all_runs: dict[str, LiveRuns] = {}
    with workspace(given.keep) as folder:
        for name in CASES:
            kept = folder / f"{name}.json"
            if not kept.is_file() and given.only in (None, name):
                scene = declared(*profiled(folder, name, given), name, given)
                runs = LiveRuns(scene, list(served(folder, scene, given)))
                kept.write_bytes(msgspec.json.format(msgspec.json.encode(runs)))
            if kept.is_file():
                all_runs[name] = msgspec.json.decode(kept.read_bytes(), type=LiveRuns)
        if given.only is None:
            publish("ranges", "Live runs and their ranges", report(folder, all_runs), write=not given.no_write)


if __name__ == "__main__":
    main()
