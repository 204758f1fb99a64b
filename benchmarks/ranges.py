"""Is the attainment of a live run inside the range that the simulator predicted? Profiles new models, then serves them.

    python -m benchmarks.ranges [--runs 10] [--repeats 1] [--seconds 60] [--passes 3] [--load 0.75] [--refine]

Each run takes the next of five small models (profiled at first use, as `sloop profile` does it), the next system, the
next trace and a new seed. It is simulated from the profile alone (`sloop simulate`), and then served under load. The
table says for each live run whether its attainment is inside the predicted range, and how wide the range is.

`--repeats R` serves every run R times, which shows how much live runs of the same arrivals differ. `--refine` adds the
log of each live run to the model's profile (`sloop profile --from-log`), for the predictions of later runs. Ten runs of
a minute take about 17 minutes: `--runs 10 --seconds 60`. Nothing else should run on the machine.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

import yaml

from benchmarks.models import convolutions, perceptron, small
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.app.load import load_scenario
from sloop.demo.live import serving
from sloop.errors import SloopError
from sloop.load import LoadPlan, LoadResult, run_load
from sloop.profile.passes import SpeedRange, speed_range
from sloop.profile.profile import Profile, load_profile, path_beside
from sloop.runlog import read_log
from sloop.runlog.durations import batch_durations
from sloop.runlog.summary import RunRow, RunSummary
from sloop.sim import World
from sloop.sim.scenarios import run_scenario
from sloop.systems.replay import rebuild

SYSTEMS: Final = ("static", "early-drop", "sponge")
TRACES: Final = ("poisson", "mmpp")
DEADLINE: Final = 5.0
"""Deadlines are this many times what a batch of one takes, at least `DEADLINE_MS_MIN`."""
DEADLINE_MS_MIN: Final = 20.0
RATE_RPS_MAX: Final = 500.0
"""Above, the load generator takes a large part of two cores itself."""


@dataclass(frozen=True)
class BandRun:
    """One live run and its prediction."""

    model: str
    system: str
    trace: str
    rate_rps: float
    speed: SpeedRange | None
    simulated: RunRow
    live: RunRow
    clients: LoadResult
    slower: float
    """By how much batches took longer than the profile says, in the cells that occurred."""

    @property
    def width(self) -> float:
        """The width of the predicted range of attainment, in percentage points."""
        return 100 * ((self.simulated.attainment_high or 0.0) - (self.simulated.attainment_low or 0.0))

    @property
    def inside(self) -> bool:
        """Whether the live attainment, to a tenth of a point, is in the range."""
        low, high = self.simulated.attainment_low, self.simulated.attainment_high
        return low is not None and high is not None and low - 5e-4 <= self.live.attainment <= high + 5e-4


def models(folder: Path) -> list[Path]:
    """Five models of different kinds; a forward pass of each takes a few milliseconds on one core."""
    return [
        small(folder, "squeezenet", 128),
        convolutions(folder, channels=32, layers=8, pixels=56),
        perceptron(folder, width=1024, layers=8),
        small(folder, "densenet121", 64),
        convolutions(folder, channels=64, layers=6, pixels=40),
    ]


def profiled(model: Path, given: Namespace) -> Profile:
    """The profile of a model as `sloop profile` measures it, on one and on two cores."""
    if not path_beside(model).is_file():
        say(f"profile {model.name}")
        options = ["--passes", str(given.passes), "--batches", "1,2,4,8", "--json"]
        run = subprocess.run(
            [sys.executable, "-m", "sloop", "profile", str(model), *options], stdout=subprocess.DEVNULL, check=False
        )
        if run.returncode:
            raise SystemExit(f"sloop profile {model} failed")
    return load_profile(path_beside(model))


def declared(model: Path, profile: Profile, system: str, trace: str, given: Namespace, number: int) -> dict[str, Any]:
    """The scenario of one run: its rate is `--load` times the throughput of batches of 4 on the system's cores."""
    cores = profile.max_cores if system == "sponge" else 1.0
    single_ms = profile.latency_ms.latency_ms(1, 1.0)
    mean_ms = {(s.batch, s.cores): s.mean_ms for s in profile.samples}
    capacity_rps = max(1e3 * batch / ms for (batch, on), ms in mean_ms.items() if on == cores and batch <= 4)
    rate_rps = round(min(RATE_RPS_MAX, given.load * capacity_rps), 1)
    arrivals: dict[str, Any] = {"kind": "poisson", "rate": rate_rps}
    if trace == "mmpp":
        arrivals = {"kind": "mmpp", "rates": [0.6 * rate_rps, 1.3 * rate_rps], "mean_s": [4, 4]}
    return {
        "name": "ranges",
        "slo_ms": round(max(DEADLINE_MS_MIN, DEADLINE * single_ms), 1),
        "stages": [{"name": "only", "model": str(model.absolute())}],
        "cluster": {"nodes": [{"hardware": "local", "count": 1}]},
        "systems": [{"name": system} if system == "sponge" else {"name": system, "cores": cores}],
        "trace": arrivals,
        "duration_s": given.seconds,
        "seed": given.seed + number,
    }


def played(folder: Path, model: Path, system: str, trace: str, given: Namespace, number: int) -> list[BandRun]:
    """Simulate a run, then serve it `--repeats` times."""
    profile = profiled(model, given)
    scene = declared(model, profile, system, trace, given, number)
    (folder / "scene.yaml").write_text(yaml.safe_dump(scene))
    app = {key: scene[key] for key in ("name", "slo_ms", "stages", "cluster")} | {"system": scene["systems"][0]}
    (folder / "app.yaml").write_text(yaml.safe_dump(app))
    scenario = load_scenario(folder / "scene.yaml")
    simulated = run_scenario(scenario, scenario.systems[0], with_range=True).row
    arrivals = World.from_scenario(scenario).trace
    found = []
    for repeat in range(given.repeats):
        say(f"run {number + 1}.{repeat + 1}: {model.stem}, {system}, {trace} at {scene['trace']}")
        state = folder / "state"
        rmtree(state, ignore_errors=True)
        with serving(folder / "app.yaml", state) as where:
            plan = LoadPlan(where.http, where.application, arrivals, scenario.application.slo_ms, seed=number)
            clients = run_load(plan)
        log = Path(where.log)
        rate_rps = scene["trace"].get("rate", 0.0) or sum(scene["trace"]["rates"]) / 2
        live, slower = row_of(log), slower_than(log, profile)
        found.append(
            BandRun(model.stem, system, trace, rate_rps, speed_range(profile), simulated, live, clients, slower)
        )
        if given.refine:
            refine = [sys.executable, "-m", "sloop", "profile", "--from-log", str(log), "--json"]
            subprocess.run(refine, stdout=subprocess.DEVNULL, check=False)
        say(line_of(found[-1]))
    return found


def row_of(log: Path) -> RunRow:
    """The result of a run, from the server's log."""
    recorded = read_log(log)
    setup = rebuild(recorded.header)
    summary = RunSummary(setup.parts(), nodes=setup.deployment.cluster)
    for now_ns, record in recorded:
        summary.append(now_ns, record)
    return summary.row(system=recorded.header.system, seed=None)


def slower_than(log: Path, profile: Profile) -> float:
    """Measured durations of all batches divided by their durations in the profile."""
    cells = {(s.batch, s.cores): s.mean_ms for s in profile.samples}
    taken_ms = expected_ms = 0.0
    recorded = read_log(log)
    for found in batch_durations(recorded, recorded.header.cluster).values():
        for cell, runs_ns in found.items():
            if cell in cells:
                taken_ms += sum(runs_ns) / 1e6
                expected_ms += len(runs_ns) * cells[cell]
    return taken_ms / expected_ms if expected_ms else 1.0


def line_of(run: BandRun) -> str:
    low, high = run.simulated.attainment_low or 0.0, run.simulated.attainment_high or 0.0
    return (
        f"live {100 * run.live.attainment:.1f} %, predicted {100 * low:.1f}–{100 * high:.1f} "
        f"({100 * run.simulated.attainment:.1f}): {'inside' if run.inside else 'OUTSIDE'}; "
        f"batches took {run.slower:.2f} × the profile"
    )


def report(runs: Sequence[BandRun], given: Namespace) -> str:
    """The text of the page."""
    rows = [
        (
            *(run.model, run.system, run.trace, run.rate_rps),
            *(100 * run.live.attainment, None if run.clients.attainment is None else 100 * run.clients.attainment),
            f"{100 * (run.simulated.attainment_low or 0):.1f}–{100 * (run.simulated.attainment_high or 0):.1f}",
            *(100 * run.simulated.attainment, run.inside, run.width),
            *(run.live.p99_ms, f"{run.simulated.p99_ms_low or 0:.1f}–{run.simulated.p99_ms_high or 0:.1f}"),
            *(run.slower, None if run.speed is None else 100 * (run.speed.slow - 1)),
        )
        for run in runs
    ]
    columns = (
        *("model", "system", "trace", "rate/s", "attainment live %", "of clients %", "predicted %", "middle %"),
        *("inside", "width, points", "p99 live ms", "predicted ms", "batches took, × profile", "± speed %"),
    )
    if not runs:
        return "Every run failed."
    inside = sum(run.inside for run in runs)
    parts = [
        f"{len(runs)} live runs of {given.seconds:g} s at {given.load:g} of capacity; profiles of {given.passes} passes"
        f"{', refined from each run' if given.refine else ''}. Attainment inside the range in {inside} of {len(runs)}.",
        table(columns, rows),
    ]
    if given.repeats > 1:
        groups = [runs[start : start + given.repeats] for start in range(0, len(runs), given.repeats)]
        parts += [
            "How far live runs of the same arrivals are from each other, beside the width of the range:",
            table(
                ("model", "system", "trace", "live runs apart, points", "width, points"),
                [
                    (group[0].model, group[0].system, group[0].trace, apart(group), max(run.width for run in group))
                    for group in groups
                ],
            ),
        ]
    return "\n\n".join(parts)


def apart(runs: Sequence[BandRun]) -> float:
    """The difference between the largest and the smallest attainment, in percentage points."""
    attained = [100 * run.live.attainment for run in runs]
    return max(attained) - min(attained)


def main() -> None:
    parser = arguments(__doc__, seconds=60, quick=15)
    parser.add_argument("--runs", type=int, default=10, help="number of different runs (default 10)")
    parser.add_argument("--repeats", type=int, default=1, help="live runs of each (default 1)")
    parser.add_argument("--passes", type=int, default=3, help="measuring passes of each profile (default 3)")
    parser.add_argument("--load", type=float, default=0.75, help="load as a share of capacity (default 0.75)")
    parser.add_argument("--refine", action="store_true", help="add each live run's log to its model's profile")
    given = parser.parse_args()
    runs: list[BandRun] = []
    with workspace(given.keep) as folder:
        chosen = models(folder)
        for number in range(given.runs):
            model = chosen[number % len(chosen)]
            system = SYSTEMS[number % len(SYSTEMS)]
            trace = TRACES[number // len(chosen) % len(TRACES)]
            try:
                runs += played(folder, model, system, trace, given, number)
            except SloopError as error:  # one server that does not start must not cost all other runs
                say(f"run {number + 1} failed: {error}")
    publish("ranges", "Live runs and their ranges", report(runs, given), write=not given.no_write)


if __name__ == "__main__":
    main()
