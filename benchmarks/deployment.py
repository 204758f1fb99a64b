"""One deployment of three models against three servers with a third of its cores each, live and simulated.

    python -m benchmarks.deployment [--seconds 120] [--passes 3] [--load 0.75]

The example `three`: each model has ten times its usual traffic for 20 of 60 seconds, and its burst begins when that of
another model ends. One server has all three, with the example's system, `vertical-only`, whose cores follow the
traffic. It is compared with three servers that have a third of the cores each: with `early-drop`, which always uses all
of them, and with `vertical-only` too.

`sloop profile` first measures the models on this machine. In its burst a model gets `--load` times the requests that it
serves on one core; its usual traffic is a tenth of that. Each run is live, and then simulated from the profiles, with
the same phase of bursts and planning: the live attainment should be within the simulator's range. The cores that the
models do not use are for servers and clients. Nothing else should run on the machine.
"""

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.notebook import ROOT, arguments, publish, say, table, workspace
from sloop.app.load import load_scenario
from sloop.demo.live import schedule_start_ns, serving
from sloop.demo.run import WORLD_KEYS, dump_yaml
from sloop.load import LoadPlan, LoadResult, run_loads
from sloop.profile.profile import load_profile, path_beside
from sloop.runlog import read_log
from sloop.runlog.summary import FigureRow, RunSummary
from sloop.sim.scenarios import run_scenario
from sloop.sim.world import World
from sloop.systems.replay import rebuild

EXAMPLES: Final = ("digits", "three")
SCENARIO: Final = Path("three/bursts.yaml")
MODELS: Final = ("read-large", "restore-medium", "restore-large")
"""The networks of the example, in `digits/models`."""
NETWORKS: Final = {
    "read": ("read-large",),
    "restore": ("restore-large",),
    "digits": ("restore-medium", "read-large"),
}
"""By model of the deployment: the networks that a request visits."""
BATCHES: Final = (1, 2, 4)
CORES: Final = (0.14, 0.25, 0.58, 1.0, 1.75)
"""The core counts of the profiles; the replicas get these or others between them."""
THIRD: Final = 0.58
DIGITS: Final = {"restore": {"cores": 0.14}, "read": {"cores": 0.44}}
"""How `early-drop` divides a third between the two stages of `digits`: the best way in the simulator."""
BETTER_POINTS: Final = 5.0
"""By how much the deployment should be better in its worst model, in percentage points."""
TOGETHER: Final = "one deployment"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one server serves, as a scenario, and the file of the scenario."""

    scenario: Mapping[str, Any]
    path: Path

    def write(self) -> Path:
        """Write the scenario, and what of it a server reads; returns the path of the latter."""
        dump_yaml(self.path, self.scenario)
        served = self.path.with_stem(f"serve-{self.path.stem}")
        (system,) = self.scenario["systems"]
        outside = {key: value for key, value in self.scenario.items() if key not in WORLD_KEYS}
        dump_yaml(served, outside | {"system": system})
        return served


@dataclass(frozen=True, slots=True)
class Served:
    """One model under one arrangement: live from the server's log and from its clients, and simulated."""

    live: FigureRow
    clients: LoadResult
    simulated: FigureRow

    @property
    def attained(self) -> float:
        """The share of requests answered in time, from the server's log, in percent."""
        return 100 * self.live.attainment

    @property
    def band(self) -> str:
        low, high = self.simulated.attainment_low, self.simulated.attainment_high
        return "–" if low is None or high is None else f"{100 * low:.1f}–{100 * high:.1f}"

    @property
    def inside(self) -> bool:
        """Whether the live attainment, to a tenth of a point, is within the simulator's range."""
        low, high = self.simulated.attainment_low, self.simulated.attainment_high
        return low is not None and high is not None and low - 5e-4 <= self.live.attainment <= high + 5e-4


def prepared(folder: Path, given: Namespace) -> dict[str, Any]:
    """Copy the examples to `folder` and profile their models; returns the scenario of the example."""
    for name in EXAMPLES:
        if not (folder / name).exists():  # a folder that is kept has the profiles of this machine
            shutil.copytree(ROOT / "examples" / name, folder / name)
    for name in MODELS:
        model = folder / "digits" / "models" / f"{name}.onnx"
        marker = folder / f"{name}.profiled"
        if not marker.exists():
            path_beside(model).unlink(missing_ok=True)
            say(f"profile {name}")
            options = ["--passes", str(given.passes), "--batches", ",".join(map(str, BATCHES))]
            options += ["--cores", ",".join(f"{cores:g}" for cores in CORES), "--json"]
            command = [sys.executable, "-m", "sloop", "profile", str(model), *options]
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                raise SystemExit(f"sloop profile {model} failed")
            marker.touch()
    declared: dict[str, Any] = yaml.safe_load((folder / SCENARIO).read_text())
    for name, trace in declared["traces"].items():
        busy_rps = given.load * capacity_rps(folder, NETWORKS[name])
        most = max(trace["rates"])
        trace["rates"] = [round(busy_rps * rate / most, 1) for rate in trace["rates"]]
    return declared | {"duration_s": given.seconds, "seed": given.seed}


def capacity_rps(folder: Path, networks: Sequence[str]) -> float:
    """How many requests per second visit these networks on one core together, each with its best batch size."""
    work_s = 0.0
    for name in networks:
        profile = load_profile(path_beside(folder / "digits" / "models" / f"{name}.onnx"))
        work_s += min(cell.mean_ms / cell.batch for cell in profile.samples if cell.cores == 1.0) / 1e3
    return 1 / work_s


def arrangements(folder: Path, declared: dict[str, Any]) -> Iterator[tuple[str, list[ServerPlan]]]:
    """The deployment, and the separate servers, by name."""
    own, _ = declared["systems"]
    yield TOGETHER, [ServerPlan(declared | {"systems": [own]}, folder / "three" / "together.yaml")]
    early = {"name": "early-drop", "cores": THIRD}
    vertical = own | {"unit": THIRD / 4, "cores_max": 4}
    for label, system in (("three servers, early-drop", early), ("three servers, vertical-only", vertical)):
        plans = []
        for file in declared["applications"]:
            path = file["file"] if isinstance(file, dict) else file
            name = Path(path).stem
            stages = {"stages": DIGITS} if system is early and name == "digits" else {}
            scenario = declared | {
                "name": name,
                "applications": [file],
                "cluster": {"nodes": [{"hardware": "local", "cores": THIRD}]},
                "systems": [system | stages],
                "traces": {name: declared["traces"][name]},
            }
            plans.append(ServerPlan(scenario, folder / "three" / f"{system['name']}-{name}.yaml"))
        yield label, plans


def played(folder: Path, plans: Sequence[ServerPlan], seed: int) -> dict[str, Served]:
    """All servers live at the same time under their loads, then simulated; by model."""
    files = [plan.write() for plan in plans]
    logs: list[Path] = []
    loads: dict[str, LoadPlan] = {}
    with ExitStack() as servers:
        for plan, file in zip(plans, files, strict=True):
            where = servers.enter_context(serving(file, folder / f"state-{plan.path.stem}"))
            scenario = load_scenario(plan.path)
            for name, clients in World.from_scenario(scenario).clients.items():
                slo_ms = scenario.deployment.by_name[name].slo_ms
                loads[name] = LoadPlan(where.http, name, clients.trace, slo_ms, seed=seed)
            logs.append(Path(where.log))
        seen = dict(zip(loads, run_loads(list(loads.values())), strict=True))
    live = {name: row for log in logs for name, row in figures_of(log).items()}
    simulated = {name: row for plan, log in zip(plans, logs, strict=True) for name, row in simulate(plan, log).items()}
    return {name: Served(live[name], seen[name], simulated[name]) for name in loads}


def simulate(plan: ServerPlan, log: Path) -> dict[str, FigureRow]:
    """The simulated figures of each of a server's models, with the range expected of a live run. The traces start at
    the same phase of the planning period as in the live run."""
    scenario = load_scenario(plan.path)
    clients = World.from_scenario(scenario).clients.values()
    lead_ns = schedule_start_ns(log, first_ns=min(next(each.trace.times_ns()) for each in clients))
    row = run_scenario(scenario, scenario.systems[0], lead_ns=lead_ns, with_range=True).row
    return {each.name: each for each in row.applications} or {scenario.application.name: row}


def figures_of(log: Path) -> dict[str, FigureRow]:
    """The figures of each model in a server's log."""
    recorded = read_log(log)
    setup = rebuild(recorded.header)
    row = RunSummary(setup.parts(), nodes=setup.deployment.cluster).fold(recorded).row(system="", seed=None)
    return {each.name: each for each in row.applications} or {setup.application.name: row}


COLUMNS: Final = (
    *("model", "arrangement", "requests", "attainment live, %", "of clients, %", "simulated, %", "range, %", "inside"),
    *("p99 live, ms", "core-seconds"),
)


def report(runs: Mapping[str, Mapping[str, Served]], declared: Mapping[str, Any], given: Namespace) -> str:
    """The text of the page."""
    rows = [
        (
            *(name, label, found.live.requests, found.attained, 100 * (found.clients.attainment or 0.0)),
            *(100 * found.simulated.attainment, found.band, found.inside, found.live.p99_ms, found.live.core_seconds),
        )
        for name in runs[TOGETHER]
        for label, run in runs.items()
        for found in (run[name],)
    ]
    (node,) = declared["cluster"]["nodes"]
    rates = ", ".join(f"{name} {min(t['rates']):g} and {max(t['rates']):g}" for name, t in declared["traces"].items())
    head = (
        f"{node['cores']:g} cores for replicas, {THIRD:g} for each separate server; {given.seconds:g} s. Requests/s at "
    )
    head += f"usual times and in bursts: {rates}. Profiles of {given.passes} passes, measured just before."
    return "\n\n".join([head, table(COLUMNS, rows), table(("", ""), verdicts(runs))])


def verdicts(runs: Mapping[str, Mapping[str, Served]]) -> list[tuple[str, object]]:
    """What the deployment should reach, and whether it does."""
    together, *apart = runs.values()
    own = {name: found.attained for name, found in together.items()}
    best = {name: max(run[name].attained for run in apart) for name in own}
    points = min(own.values()) - min(best.values())
    return [
        (
            "each model at least as good as with the better separate server",
            all(own[name] >= best[name] for name in own),
        ),
        (f"the worst model at least {BETTER_POINTS:g} points better", points >= BETTER_POINTS),
        ("points by which the worst model is better", points),
        (
            "each live attainment of the deployment within the simulator's range",
            all(f.inside for f in together.values()),
        ),
    ]


def main() -> None:
    parser = arguments(__doc__, seconds=120, quick=60)
    parser.add_argument("--passes", type=int, default=3, help="measuring passes of each profile (default 3)")
    parser.add_argument("--load", type=float, default=0.75, help="bursts, as a part of what one core serves")
    parser.add_argument("--brief", action="store_true", help="leave out the separate servers with vertical-only")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        declared = prepared(folder, given)
        runs = {}
        for label, plans in list(arrangements(folder, declared))[: 2 if given.brief else None]:
            say(f"{label}: live for {given.seconds:g} s, then simulated")
            runs[label] = played(folder, plans, given.seed)
        text = report(runs, declared, given)
    publish("deployment", "One deployment against separate servers", text, write=not given.no_write)


if __name__ == "__main__":
    main()
