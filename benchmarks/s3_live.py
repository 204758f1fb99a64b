"""Sponge's main experiment (S3), scaled down to this machine and run live (Sponge specification, acceptance check 12).

    python -m benchmarks.s3_live [--seconds 600] [--link recorded]

A real image model on a real server. The requests of each second arrive as one burst, over a mobile link that uses up a
part of the deadline. The systems are: half the cores, all cores, Sponge with margins 1.0 and 0.9, and FA2's rule with
small replicas that really start. The rate is such that half the cores are too few and all are just enough. Each run is
also simulated from the model's profile. With `--link recorded`, the link is that of the published experiment, if its
artefact is available (`SLOOP_SHARED`).
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs

from benchmarks.models import small
from benchmarks.notebook import arguments, publish, say, table, workspace
from benchmarks.watch import start_s_of, wait_ready
from sloop.app.hardware import local
from sloop.app.load import load_scenario
from sloop.demo.live import serving
from sloop.demo.run import (
    BATCHES,
    SLOS_MS,
    WORLD_KEYS,
    ComparedRun,
    DemoSettings,
    choose_cores,
    dump_yaml,
    run_both,
    scenario_of,
)
from sloop.errors import InputError
from sloop.profile.measure import measure
from sloop.profile.profile import path_beside, save_profile
from sloop.report.plots import Figure, Panel, Series, timeline
from sloop.report.run_tables import agreement
from sloop.report.tables import Cell
from sloop.serve.cpu_quota import Cgroups, confined, detect
from sloop.sim import BYTES_PER_KB
from sloop.workload import Link, link_from, read_link
from sloop_systems.comparison import data_folder
from sloop_systems.sponge.experiments.offline import LINK

PAYLOAD_KB: Final = 284.0
MODEL, PIXELS = "densenet121", 112
"""A sixth of a second and less for a batch on any count of cores, and bodies so small (150 kB) that carrying them takes
little of the cores that are measured."""
OVER: Final = 1.0
"""The rate, of what half the cores bear one by one: as in the publication, where 8 cores bear 19.8 of 20 requests/s.
Much more, and a burst within the P99s fills even all cores, which leaves Sponge nothing to choose."""
CELL_S: Final = 2.0
"""Of measuring, for each batch on each count of cores: Sponge plans with the P99."""
DROP: Final = {"limit": 3}
"""Nothing is given up before three deadlines have passed, for any system, as in the publication's baselines."""
ARTEFACT: Final = "saeid93__sponge"
HALF, ALL, PAPER, MARGIN, FA2 = "static, half", "static, all", "sponge, margin 1.0", "sponge, margin 0.9", "fa2-single"


class Experiment(Struct, frozen=True):
    """The parameters that all runs share."""

    folder: Path
    setting: DemoSettings
    model: Path
    link: str | dict[str, Any]

    def clients_link(self) -> Link:
        if isinstance(self.link, str):
            return read_link(self.link)
        return link_from(self.link, seed=self.setting.seed, folder=self.folder)


def systems_of(setting: DemoSettings) -> dict[str, dict[str, Any]]:
    """The systems to compare, as in application files."""
    cores, step = list(setting.cores), setting.cores[0]
    replicas_max = int(setting.cores_max / step)
    systems: dict[str, dict[str, Any]] = {
        HALF: {"name": "static", "cores": setting.static_cores, "batch_max": 1},
        ALL: {"name": "static", "cores": setting.cores_max, "batch_max": 1},
        PAPER: {"name": "sponge", "margin": 1.0, "cores": cores, "rate_rps": setting.counts[0]},
        MARGIN: {"name": "sponge", "margin": 0.9, "cores": cores, "rate_rps": setting.counts[0]},
        FA2: {"name": "fa2-single", "cores": step, "replicas_max": replicas_max, "initial": 1, "margin": 1.0},
    }
    return {label: system | {"drop": DROP} for label, system in systems.items()}


def link_of(name: str) -> str | dict[str, Any]:
    """The declaration of a link: `lte`, or the recorded one of the published artefact."""
    if name == "lte":
        return {"kind": "lte"}
    data = data_folder()
    path = data / ARTEFACT / LINK if data else None
    if path is None or not path.is_file():
        raise InputError("the recorded link is not at hand", help="set SLOOP_SHARED to the folder that holds data/")
    return str(path)


def play(experiment: Experiment, label: str, system: Mapping[str, Any], start_s: float) -> ComparedRun:
    """One system live, then simulated with replicas that take `start_s` to start; its files are in its own folder."""
    folder = experiment.folder / label.replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    setting = experiment.setting
    (folder / "counts.txt").write_text("".join(f"{count}\n" for count in setting.counts))
    declared = scenario_of(setting, str(experiment.model.absolute()), "./counts.txt")
    declared["systems"] = [dict(system)]
    declared["truth"]["network"]["link"] = experiment.link
    declared["truth"]["cold_start"] = {"start_s": start_s, "warm": True}
    dump_yaml(folder / "scenario.yaml", declared)
    app = {key: value for key, value in declared.items() if key not in WORLD_KEYS}
    dump_yaml(folder / f"{system['name']}.yaml", app | {"system": dict(system)})
    scenario = load_scenario(folder / "scenario.yaml")
    say(f"{label}: live for {setting.duration_s} s, then simulated")
    return run_both(folder, scenario, scenario.systems[0], lambda done: None)


def start_together_s(experiment: Experiment) -> float:
    """The median time FA2's replicas take from the order until they are ready, if all start at once."""
    cores, setting = experiment.setting.cores, experiment.setting
    count = int(setting.cores_max / cores[0])
    folder = experiment.folder / "starts"
    folder.mkdir(exist_ok=True)
    declared = scenario_of(setting, str(experiment.model.absolute()), "")
    app = {key: value for key, value in declared.items() if key not in WORLD_KEYS}
    dump_yaml(folder / "app.yaml", app | {"system": {"name": "static", "replicas": count, "cores": cores[0]}})
    with serving(folder / "app.yaml", folder / "state") as where:
        wait_ready(where.http, count)
    return start_s_of(Path(where.log))


def result(runs: Mapping[str, ComparedRun], seconds: int) -> list[tuple[Cell, ...]]:
    """One row per system: the clients' results, the server's log, and the simulation."""
    rows: list[tuple[Cell, ...]] = []
    for label, run in runs.items():
        seen, live, simulated = run.clients, run.live.row, run.simulated.row
        rows.append(
            (
                *(label, seen.sent, violations(run), seen.p99_ms),
                *(worst(run), live.core_seconds, live.core_seconds / seconds, live.cold_starts),
                *(100 * simulated.violations, simulated.p99_ms, simulated.core_seconds),
            )
        )
    return rows


def violations(run: ComparedRun) -> float:
    """The share of requests that were not answered in time, in per cent, from the clients' records."""
    return 100 * (1 - (run.clients.attainment or 0.0))


def worst(run: ComparedRun) -> float:
    """The largest share of one second's requests that was not answered in time, in per cent."""
    return max((100 * (1 - row.ok / row.sent) for row in run.clients.seconds if row.sent), default=0.0)


def agreements(runs: Mapping[str, ComparedRun]) -> list[tuple[Cell, ...]]:
    """Server's log and simulation compared: attainment, p99, and whether they differ by less than the limits."""
    rows: list[tuple[Cell, ...]] = []
    for label, run in runs.items():
        points, percent, *_, cores = agreement(run.live.row, run.simulated.row)
        rows.append((label, points.difference, points.agrees, percent.difference, percent.agrees, cores.difference))
    return rows


def verdicts(runs: Mapping[str, ComparedRun], setting: DemoSettings) -> list[tuple[str, Cell]]:
    """Check 12, clause by clause."""
    missed = {label: violations(run) for label, run in runs.items()}
    given = setting.duration_s * setting.cores_max
    found: list[tuple[str, Cell]] = [
        ("half the cores miss far more than FA2 from a cold start (10 × or more)", missed[HALF] >= 10 * missed[FA2])
    ]
    for label in (PAPER, MARGIN):
        used = runs[label].live.row.core_seconds / given
        found += [
            (f"FA2 from a cold start misses more than {label}", missed[FA2] > missed[label]),
            (f"{label}, misses no less than all cores", missed[label] >= missed[ALL]),
            (f"{label}, over all cores, points (published: < 0.3)", missed[label] - missed[ALL]),
            (f"{label}: mean allocation, of {setting.cores_max:g} cores (published: < 0.8)", used),
            ("… is at most 0.8", used <= 0.8),
        ]
    return found


def over_time(runs: Mapping[str, ComparedRun], link: Link, seconds: int) -> Figure:
    """The link, cores and violations in each second of the live runs."""
    figure = timeline({label: run.live.summary for label, run in runs.items()}, name="live", title="S3, reduced, live")
    elapsed_ms = link.elapsed_ms(round(PAYLOAD_KB * BYTES_PER_KB))
    way = tuple(elapsed_ms[second % len(elapsed_ms)] for second in range(seconds))
    times = tuple(float(second) for second in range(seconds))
    panel = Panel(y_label="on the way, ms", series=(Series("link", times, way, "area"),))
    _, cores, missed, *_ = figure.panels
    return structs.replace(figure, panels=(panel, cores, missed))


def report(runs: Mapping[str, ComparedRun], experiment: Experiment, how: str, start_s: float, link: Link) -> str:
    """The text of the page."""
    setting = experiment.setting
    seconds = setting.duration_s
    columns = (
        *("system", "requests", "violations %", "p99 ms", "worst second %"),
        *("core-seconds", "mean cores", "cold starts"),
        *("simulated: violations %", "p99 ms", "core-seconds"),
    )
    apart = ("system", "attainment, points", "≤ 1", "p99, %", "≤ 10", "core-seconds, %")
    return "\n\n".join(
        [
            f"{MODEL} on images of {PIXELS} × {PIXELS}; {setting.counts[0]} requests in each second, the gaps of each "
            "from the second's start exponential with mean 50 ms (Sponge's generator), deadline "
            f"{setting.slo_ms:g} ms from the client's first byte, {PAYLOAD_KB:g} kB over the link `{link.name}` "
            f"({link.provenance}); {seconds} s each. Static serves one by one; Sponge knows the rate and chooses from "
            f"{', '.join(f'{cores:g}' for cores in setting.cores)} cores, FA2 has replicas of {setting.cores[0]:g} and "
            "begins with one and plans without a margin, with which six hold no burst; nothing is dropped before 3 "
            f"deadlines. Cores by {how.partition(':')[0]}. FA2's "
            f"replicas took {start_s:.2f} s to start, all at once. The first columns are what clients saw "
            "(cores: the server's log), the last three the simulator's prediction from the profile.",
            table(columns, result(runs, seconds)),
            "Acceptance check 12:",
            table(("", ""), verdicts(runs, setting)),
            "Simulation against the live server's log:",
            table(apart, agreements(runs)),
        ]
    )


def prepared(folder: Path, given: Namespace) -> tuple[Experiment, str]:
    """The experiment for the model and its profile, and how workers get their cores."""
    model = small(folder, MODEL, PIXELS)
    detected = detect()
    detected.actuator.close()
    cores = choose_cores(local().cores, fractions=isinstance(detected.actuator, Cgroups))
    half = cores[-1] / 2
    say("profile")
    measured = tuple(sorted({*cores, half}))
    profile = measure(model, batches=BATCHES, cores=measured, seconds=CELL_S, passes=1, limit=confined)
    save_profile(profile, path_beside(model))
    alone_rps = {sample.cores: 1e3 / sample.p50_ms for sample in profile.samples if sample.batch == 1}
    count = max(1, round(given.over * alone_rps[half]))
    say(f"{count} requests/s; one by one half the cores bear {alone_rps[half]:.1f}, all {alone_rps[cores[-1]]:.1f}")
    setting = DemoSettings(
        cores=cores,
        static_cores=half,
        counts=(count,) * round(given.seconds),
        slo_ms=SLOS_MS[0],
        payload_kb=PAYLOAD_KB,
        seed=given.seed,
    )
    return Experiment(folder, setting, model, link_of(given.link)), detected.why


def parser() -> ArgumentParser:
    made = arguments(__doc__, seconds=600, quick=60)
    made.add_argument(
        "--link", choices=("lte", "recorded"), default="lte", help="a synthetic link, or the published one"
    )
    made.add_argument(
        "--over",
        type=float,
        default=OVER,
        help="rate as a multiple of the capacity of half the cores with batches of 1",
    )
    return made


def main() -> None:
    given = parser().parse_args()
    with workspace(given.keep) as folder:
        experiment, how = prepared(folder, given)
        systems = systems_of(experiment.setting)
        start_s = start_together_s(experiment)
        runs = {label: play(experiment, label, system, start_s) for label, system in systems.items()}
        link = experiment.clients_link()
        text = report(runs, experiment, how, start_s, link)
    figures: Sequence[Figure] = [over_time(runs, link, experiment.setting.duration_s)]
    publish("s3-live", "Sponge's experiment, reduced and real", text, figures, write=not given.no_write)


if __name__ == "__main__":
    main()
