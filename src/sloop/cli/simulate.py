"""`sloop simulate`: simulates a scenario under one system or several."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import click
from msgspec import structs
from rich.console import RenderableType

from sloop.app.document import parse_yaml
from sloop.app.hardware import LOCAL, unpriced
from sloop.app.load import load_scenario
from sloop.app.scenario import ProcessesTruth, Scenario
from sloop.cli.command import (
    FILE,
    CommandOutput,
    Number,
    cached_models,
    check_folder,
    command,
    progress,
    speed_option,
    table,
)
from sloop.page.report import runs_page, write_page
from sloop.profile.passes import MachineSpeed, range_advice
from sloop.report import run_tables
from sloop.report.sections import ReportedRun, log_run
from sloop.report.tables import Table
from sloop.runlog import is_log, read_log
from sloop.runlog.summary import RunRow
from sloop.sim.machine_speed import log_speed
from sloop.sim.ranges import at_speed
from sloop.sim.scenarios import (
    CHECK_FIRST,
    chosen_systems,
    labels_of,
    log_paths,
    run_systems,
)
from sloop.sim.traffic import HappenedRow, RecordedTraffic, recorded_traffic
from sloop.sim.world import profiles_of
from sloop.text import listed

APPLICATIONS_MAX: Final = 30
"""The most applications in a table on a terminal; `--json` has all."""

EXAMPLE = """
sloop simulate burst.yaml --seed 7
sloop simulate burst.yaml --system elastic --log run.jsonl && sloop explain run.jsonl
sloop simulate burst.yaml --system static,elastic --json
sloop simulate burst.yaml --page burst.html
sloop simulate burst.yaml --live .sloop/digits --page burst.html
sloop simulate burst.yaml --recorded .sloop/digits
sloop simulate .sloop/digits --last-s 600 --system 'hpa, {name: sponge, margin: 0.9}'
"""


@command("simulate", example=EXAMPLE)
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option(
    "--system",
    "names",
    metavar="A,B",
    help="Systems to run instead of those that SCENARIO names, or beside the one of a log; '{name: A, KEY: VALUE}' is "
    "one with parameters.",
)
@click.option(
    "--last-s",
    type=Number(min=0, min_open=True),
    help="Of a log, only the requests of so many seconds before its end.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of all random draws [default: the scenario's].")
@speed_option
@click.option(
    "--client-us",
    type=Number(min=0, max=1e6),
    help="Processor time that a load generator on the server's own machine takes for a request, as `sloop load` prints "
    "it [default: the scenario's, or none].",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    help="Write the event log to this file, for `sloop explain` and `sloop replay`. With several systems each gets a "
    "file of its own: run.jsonl becomes run-0-static.jsonl, run-1-elastic.jsonl.",
)
@click.option(
    "--recorded",
    type=click.Path(path_type=Path),
    help="Take durations of batches, branches, numbers of parts and delays of arrivals from this event log of a live "
    "run, instead of the profile and the scenario.",
)
@click.option(
    "--live",
    type=click.Path(path_type=Path),
    help="Show the live run in this event log (a file, or a server's state folder) beside the simulated ones, over the "
    "time of its load [default for --page: the run of --recorded].",
)
@click.option("--page", type=FILE, help="Also write a report with all runs side by side to this HTML file.")
@click.option(
    "--check",
    is_flag=True,
    help=f"Check the invariants in the whole event log instead of its first {CHECK_FIRST:,} records.",
)
def simulate(
    scenario: Path,
    names: str | None,
    last_s: float | None,
    seed: int | None,
    speed: MachineSpeed | None,
    client_us: float | None,
    log: Path | None,
    recorded: Path | None,
    live: Path | None,
    page: Path | None,
    check: bool,
) -> CommandOutput:
    """Simulate the scenario in SCENARIO. Every system gets the same requests and the same random draws.

    SCENARIO may also be the event log of a server (a file, a segment, or its state folder): then the requests that it
    got come again, to its applications, with its own system first, so that the error of the simulation is seen.
    """
    if speed is not None and recorded is not None:
        raise click.UsageError("give either --speed or --recorded: the durations of a recorded run have its speed.")
    traffic, world = _read(scenario, last_s, client_us)
    world = world if speed is None else at_speed(world, speed)
    chosen = chosen_systems(world, systems_named(names))
    if traffic is not None and names:
        chosen = (*world.systems, *chosen)
    if page is not None:
        check_folder(page.parent, "--page")
    labels, runs = labels_of(chosen), list[ReportedRun]()
    if path := live or (recorded if page else None):
        run = log_run(read_log(path), only_load=True)
        runs.append(structs.replace(run, label=f"{run.label} ({'live' if run.is_live else 'recorded'})"))
    rows: list[RunRow] = []
    with progress("simulating", total=len(chosen)) as advance:
        check_first = None if check else CHECK_FIRST
        for made in run_systems(world, chosen, seed=seed, log=log, recorded=recorded, check_first=check_first):
            if page is not None:  # the summaries of long runs are large
                label = labels[len(rows)]
                runs.append(ReportedRun(label=label, row=made.row, summary=made.summary, header=made.header))
            rows.append(made.row)
            advance(len(rows), made.row.system)
    paths = log_paths(log, chosen) if log else []
    lines = [f"event log of {label}: {path}" for label, path in zip(labels, paths, strict=False)]
    cluster = world.deployment.cluster
    if without := unpriced(cluster):
        lines.append(f"cost: no price is declared for {listed(without)}")
    if recorded is None and world.truth.service.spread is None:
        lines += range_advice(
            profile for each in world.deployment.applications for profile in profiles_of(each).values()
        )
    if page is not None:
        write_page(runs_page(runs, made=datetime.now(UTC)), page)
        lines.append(f"report: {page}")
    labelled = [structs.replace(row, system=label) for row, label in zip(rows, labels, strict=True)]
    if traffic is not None:
        tables = [table(happened(traffic.happened)), *display(labelled, with_nodes=run_tables.nodes_vary(cluster))]
        measured = log_speed(scenario, world.deployment, world.truth.processes)
        lines += [f"machine of the log: --speed {measured}"] if measured else []
        value = {"runs": rows, "happened": traffic.happened, "from_s": traffic.from_s}
        value |= {"speed": measured and measured.factor, "speed_error": measured and measured.error}
        return CommandOutput(value, [*tables, *lines])
    if live is None:
        return CommandOutput({"runs": rows}, [*display(labelled, with_nodes=run_tables.nodes_vary(cluster)), *lines])
    labelled = [structs.replace(runs[0].row, system=runs[0].label), *labelled]
    value = {"runs": rows, "live": runs[0].row}
    return CommandOutput(value, [*display(labelled, with_nodes=run_tables.nodes_vary(cluster)), *lines])


def _read(source: Path, last_s: float | None, client_us: float | None) -> tuple[RecordedTraffic | None, Scenario]:
    """The scenario in a file, or that of a log with what happened there. On this machine the server's processes take
    cores too, by default so much as was measured."""
    traffic = recorded_traffic(source, last_s) if is_log(source) else None
    if traffic is None and last_s is not None:
        raise click.UsageError("--last-s needs an event log; a scenario says itself how long it is.")
    world = traffic.scenario if traffic else load_scenario(source, models=cached_models([source]))
    truth, cluster = world.truth, world.deployment.cluster
    processes = truth.processes or (ProcessesTruth() if cluster and cluster[0].hardware == LOCAL else None)
    if client_us is not None:
        processes = replace(processes or ProcessesTruth(), client_us=client_us)
    return traffic, replace(world, truth=replace(truth, processes=processes))


def systems_named(text: str | None) -> list[str | Mapping[str, object]]:
    """The systems in `A, {name: B, KEY: VALUE}`, in this order."""
    declared = parse_yaml(f"[{text or ''}]", "--system")
    systems = list[str | Mapping[str, object]]()
    for system in cast(Sequence[object], declared.content):
        if not isinstance(system, str | Mapping):
            declared.fail(f"{system!r} is no system", "write A, B or {name: A, KEY: VALUE}")
        systems.append(system)
    return systems


def happened(rows: Sequence[HappenedRow]) -> Table:
    """What became of the requests of a log."""
    columns = ("application", "requests", "attainment %", "late", "dropped", "rejected", "failed", "p50 ms", "p99 ms")
    return Table(
        "What happened",
        columns,
        tuple(
            (r.application, r.requests, 100 * r.attainment, r.late, r.dropped, r.rejected, r.failed, r.p50_ms, r.p99_ms)
            for r in rows
        ),
    )


def display(rows: list[RunRow], *, with_nodes: bool) -> list[RenderableType]:
    """The runs as tables, and their assumptions."""
    assumed = sorted({line for row in rows for line in row.assumed})
    runs = [(row.system, row) for row in rows]
    graphs = [(label, row) for label, row in runs if row.has_graphs]
    made = [run_tables.ends(rows), run_tables.costs(rows)]
    if any(row.attainment_low is not None for row in rows):
        made.insert(1, run_tables.ranges(rows))
    if any(row.sizes for row in rows):
        made.insert(1, run_tables.sizes(rows))
    if any(row.applications for row in rows):
        made.append(applications(rows))
    if any(row.versions for row in rows):
        made.append(run_tables.applications([(label, row.versions) for label, row in runs], "Version by version"))
    made += run_tables.forms(runs)
    if with_nodes:
        made.append(run_tables.nodes(runs))
    if graphs:
        made += [run_tables.stages(graphs), run_tables.routes(graphs)]
    return [*map(table, made), *(f"based on {line}" for line in assumed)]


def applications(rows: list[RunRow]) -> Table:
    """The applications of each run; if there are many, only those that were served worst."""
    most = max(len(row.applications) for row in rows)
    if most <= APPLICATIONS_MAX:
        return run_tables.applications([(row.system, row.applications) for row in rows])
    worst = [
        (row.system, sorted(row.applications, key=lambda each: each.attainment)[:APPLICATIONS_MAX]) for row in rows
    ]
    return run_tables.applications(worst, f"The {APPLICATIONS_MAX} applications with the lowest attainment, of {most}")
