"""Three real models that want three cores, live on two: `divide: worth` beside max-min and proportional.

    python -m benchmarks.worth [--runs 5] [--seconds 10] [--keep FOLDER]

SqueezeNet gets many small requests, which together want 1.6 cores; DenseNet121 on small images wants 0.8, and ResNet18
0.6: so many times what `sloop profile` says that one core serves in batches of four. Deadlines are
`DEADLINE` times what one request takes alone on a core. Each policy divides the cores of `elastic`, which leaves idle
ones idle, under the same requests; runs take turns. Without `--keep`, models are profiled each time. Nothing else
should run on the machine.

What it must show: the worst of the three at least five points above its worst under max-min, and no fewer requests in
time. Rates, deadlines and seeds were set before the first run.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any, Final

from benchmarks.models import resnet18, small
from benchmarks.notebook import arguments, publish, say, table, workspace
from sloop.app.load import load_scenario
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml
from sloop.load import LoadPlan, run_loads
from sloop.profile.profile import load_profile, path_beside
from sloop.runlog import read_log
from sloop.runlog.summary import FigureRow, RunSummary
from sloop.sim import World
from sloop.systems.replay import rebuild

WANTS: Final[Mapping[str, float]] = {"squeezenet": 1.6, "densenet121": 0.8, "resnet18": 0.6}
"""Cores."""
PROFILED: Final = ("--batches", "1,4", "--cores", "0.5,1", "--seconds", "0.1", "--passes", "1", "--json")
BATCH: Final = 4
DEADLINE: Final = 8.0
POLICIES: Final = ("worth", "max_min", "proportional")
BETTER: Final = 5.0
"""Points by which the worst must be better than with max-min."""


def models_of(folder: Path) -> dict[str, Path]:
    """The models, each with its profile beside it."""
    models = {
        "squeezenet": small(folder, "squeezenet", 96),
        "densenet121": small(folder, "densenet121", 64),
        "resnet18": resnet18(folder),
    }
    for name, model in models.items():
        if not path_beside(model).is_file():
            say(f"profile {name}")
            command = [sys.executable, "-m", "sloop", "profile", str(model), *PROFILED]
            if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
                raise SystemExit(f"sloop profile {model} failed")
    return models


def scene_of(models: Mapping[str, Path], given: Namespace) -> dict[str, Any]:
    """The deployment and its traffic."""
    applications, traces = [], {}
    for name, model in models.items():
        profile = load_profile(path_beside(model))
        alone_ms, each_ms = (profile.latency_at(0, rows, 1.0) / rows for rows in (1, BATCH))
        stages = [{"name": "only", "model": str(model.absolute())}]
        applications.append({"name": name, "slo_ms": round(DEADLINE * alone_ms, 1), "stages": stages})
        traces[name] = {"kind": "poisson", "rate": round(WANTS[name] * 1e3 / each_ms, 1)}
    return {
        "name": "three",
        "applications": applications,
        "cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": 2}]},
        "systems": [{"name": "elastic", "divide": {"name": policy, "idle": "leave"}} for policy in POLICIES],
        "traces": traces,
        "duration_s": given.seconds,
        "seed": given.seed,
    }


def served(folder: Path, scene: Mapping[str, Any], policy: str, seed: int) -> dict[str, FigureRow]:
    """One live run; the figures of each model."""
    declared = {**scene, "seed": seed, "systems": [scene["systems"][POLICIES.index(policy)]]}
    path = folder / "scene.yaml"
    dump_yaml(path, declared)
    scenario = load_scenario(path)
    app = {key: declared[key] for key in ("name", "applications", "cluster")} | {"system": declared["systems"][0]}
    dump_yaml(folder / "app.yaml", app)
    rmtree(folder / "state", ignore_errors=True)
    with serving(folder / "app.yaml", folder / "state") as where:
        loads = []
        for name, clients in World.from_scenario(scenario).clients.items():
            slo_ms = scenario.deployment.by_name[name].slo_ms
            loads.append(LoadPlan(where.http, name, clients.trace, slo_ms, seed=seed))
        run_loads(loads)
    recorded = read_log(Path(where.log))
    setup = rebuild(recorded.header)
    row = RunSummary(setup.parts(), nodes=setup.deployment.cluster).fold(recorded).row(system="", seed=None)
    return {each.name: each for each in row.applications}


def report(scene: Mapping[str, Any], found: Mapping[str, Sequence[Mapping[str, FigureRow]]]) -> str:
    """The text of the page."""
    rows, each = [], []
    worst, goodput = {}, {}
    for policy, runs in found.items():
        means = {name: 100 * fmean(run[name].attainment or 0.0 for run in runs) for name in WANTS}
        lowest = [100 * min(own.attainment or 0.0 for own in run.values()) for run in runs]
        totals = [sum(own.goodput_rps or 0.0 for own in run.values()) for run in runs]
        worst[policy], goodput[policy] = fmean(lowest), fmean(totals)
        rows.append((policy, *means.values(), worst[policy], f"{min(lowest):.1f}–{max(lowest):.1f}", goodput[policy]))
        for number, run in enumerate(runs, 1):
            shares = [100 * (own.attainment or 0.0) for own in run.values()]
            each.append((policy, number, *shares, totals[number - 1]))
    more = worst["worth"] - worst["max_min"]
    traffic = [
        (one["name"], WANTS[one["name"]], scene["traces"][one["name"]]["rate"], one["slo_ms"])
        for one in scene["applications"]
    ]
    good = more >= BETTER and goodput["worth"] >= goodput["max_min"]
    verdict = (
        f"The worst of the three is {more:.1f} points better with `worth` than with max-min, "
        f"and {goodput['worth'] - goodput['max_min']:+.1f} requests/s more are in time: {'good' if good else 'MISSED'}."
    )
    return "\n\n".join(
        [
            verdict,
            table(("divide", *(f"{name} %" for name in WANTS), "worst %", "worst of runs", "in time/s"), rows),
            table(("model", "cores wanted", "requests/s", "deadline ms"), traffic),
            "## Each run",
            table(("divide", "run", *(f"{name} %" for name in WANTS), "in time/s"), each),
        ]
    )


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=10, quick=5)
    parser.add_argument("--runs", type=int, default=5, help="live runs under each policy (default 5)")
    given = parser.parse_args()
    found: dict[str, list[dict[str, FigureRow]]] = {policy: [] for policy in POLICIES}
    with workspace(given.keep) as folder:
        scene = scene_of(models_of(folder), given)
        for number in range(given.runs):
            for policy in POLICIES:
                say(f"run {number + 1}, {policy}")
                run = served(folder, scene, policy, given.seed + number)
                say(", ".join(f"{name} {100 * (own.attainment or 0.0):.1f} %" for name, own in run.items()))
                found[policy].append(run)
    publish("worth", "Where cores are worth most", report(scene, found), write=not given.no_write)


if __name__ == "__main__":
    main()
