"""Scenarios: simulates the world of a scenario file under each of its systems, with one result row per run.

Writes event logs on request; otherwise keeps only the figures.

A run can have a prediction range, because runs on real hardware differ from each other (`sloop.sim.ranges`): the same
world, with the same requests, is simulated again on a faster and on a slower machine, and with other draws of the
durations. `RunRow.attainment_low`, `attainment_high` and so on are made from them.

There is no range for a recorded run, whose durations are known. Nor is there one for declared and published profiles
and those with a single pass, unless the scenario's `truth.service.spread` states how far their speed may be off.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from sloop.app.application import SystemChoice
from sloop.app.hardware import shared_profiles
from sloop.app.scenario import Scenario
from sloop.runlog import FileLog, Header, Sink
from sloop.runlog.rows import RowCounts
from sloop.runlog.summary import ApplicationRow, FigureRow, RunRow, RunSummary
from sloop.sim.foretell import OwnSimulations
from sloop.sim.ranges import attainment_range, worlds_around
from sloop.sim.run import simulate
from sloop.sim.truth.recorded import NOT_RECORDED, RecordedRun
from sloop.sim.world import World, recorded_in
from sloop.systems.replay import header_of
from sloop.systems.setup import Setup, build
from sloop.text import counted

_log: Final = logging.getLogger("sloop.simulate")

CHECK_FIRST: Final = 10_000
"""How many records of a run are checked by default: about 2,500 requests, more than most scenarios have. Checking all
records takes as long as the simulation; `make fuzz` checks many short runs completely."""


class ScenarioRun(Struct, frozen=True):
    """One run of a scenario: its row, and the summary that the row was made from."""

    row: RunRow
    summary: RunSummary
    header: Header
    """Of its event log, also if none was written."""
    open: int = 0
    """Requests that had not ended when the run stopped, because no node has capacity for the replicas they need."""


def chosen_systems(scenario: Scenario, wanted: Sequence[str | Mapping[str, object]]) -> tuple[SystemChoice, ...]:
    """The scenario's entries for these systems, else their published parameters; all systems of the scenario if
    `wanted` is empty. A mapping has the `name` of a system and its parameters. The default of a scenario that names no
    system is none of its entries."""
    choices: list[SystemChoice] = []
    for system in wanted:
        if isinstance(system, str):
            declared = [each for each in scenario.systems if each.path and system in (each.name, each.label)]
            choices += declared or [SystemChoice(system)]
        else:
            parameters = {key: value for key, value in system.items() if key != "name"}
            choices.append(SystemChoice(str(system.get("name", "")), parameters, path="--system"))
    return tuple(choices) or scenario.systems


def labels_of(choices: Sequence[SystemChoice]) -> list[str]:
    """A label for each of these systems: its own, and where another has the same also the parameters, or its place."""
    counts = Counter(choice.label for choice in choices)
    found: list[str] = []
    for place, choice in enumerate(choices):
        label = choice.label
        if counts[label] > 1:
            pairs = ", ".join(f"{key} {value}" for key, value in choice.parameters.items())
            label = f"{label} ({pairs or 'as published'})"
        found.append(f"{label}, no. {place + 1}" if label in found else label)
    return found


def run_scenario(
    scenario: Scenario,
    choice: SystemChoice,
    *,
    log: Path | None = None,
    lead_ns: int = 0,
    recorded: RecordedRun = NOT_RECORDED,
    check_first: int | None = CHECK_FIRST,
    with_range: bool = False,
) -> ScenarioRun:
    """Simulate the scenario under one system. Warns about requests that never ended, and about policies that failed.

    The event log goes to the file `log`. `lead_ns` is how long the control loop runs before the trace begins, as in a
    live server. `recorded` replaces truths by those of a recorded run. `check_first` is the number of records to check
    (None: all). `with_range` adds the range expected for a real run, which takes two more simulations.
    """
    world = replace(World.from_scenario(scenario, choice), lead_ns=lead_ns, recorded=recorded)
    setup = world.setup()
    summary, rows = summary_of(world, setup), RowCounts()
    header = header_of(setup, origin="sim", seed=scenario.seed, assumed_starts=world.assumed_starts)
    started_ns = time.perf_counter_ns()
    with ExitStack() as files:
        sinks: list[Sink] = [summary, rows] if world.is_mixed else [summary]
        if log is not None:
            sinks.append(files.enter_context(FileLog(log, header)))
        own = OwnSimulations(header) if world.asks else None
        totals = simulate(world, sinks, check_first=check_first, own=own)
    wall_s = (time.perf_counter_ns() - started_ns) / 1e9
    shared = [line for application in world.applications for line in shared_profiles(application)]
    assumed = (*summary.assumed_starts(world.assumed_starts), *shared, *world.assumed_sizes(rows.sizes))
    row = summary.row(system=choice.label, seed=scenario.seed, wall_s=wall_s, assumed=assumed)
    row = structs.replace(row, **rows.figures(summary.duration_s))
    if totals.open:
        _log.warning("%s: %s of %s requests were never answered", choice.label, totals.open, totals.requests)
    _warn_of_planners(choice, summary)
    return ScenarioRun(_ranged(world, row) if with_range else row, summary, header, totals.open)


def run_systems(
    scenario: Scenario,
    choices: Sequence[SystemChoice],
    *,
    seed: int | None = None,
    log: Path | None = None,
    recorded: Path | None = None,
    check_first: int | None = CHECK_FIRST,
) -> Iterator[ScenarioRun]:
    """Simulate one system after another, with prediction ranges; `log_paths` names the logs.

    `recorded` is the log of a run whose durations, branches and delays are used as truth. Raises InputError if it is
    not an event log of applications with these stages and variants, or, before the first run, if any of the systems
    cannot be set up.
    """
    run = recorded_in(recorded, scenario.deployment) if recorded else NOT_RECORDED
    for choice in choices:
        World.from_scenario(scenario, choice).check()
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    paths = log_paths(log, choices) if log else [None] * len(choices)
    for choice, path in zip(choices, paths, strict=True):
        yield run_scenario(scenario, choice, log=path, recorded=run, check_first=check_first, with_range=True)


def summary_of(world: World, setup: Setup) -> RunSummary:
    """A fresh summary of a run of this world, whose beliefs are those of the setup."""
    return RunSummary(setup.parts(), nodes=world.deployment.cluster, start_ns=0, build=build if world.changes else None)


def _warn_of_planners(choice: SystemChoice, summary: RunSummary) -> None:
    """Warn once for each application version whose policy could not plan."""
    deployment = summary.deployment
    for record in deployment.records:
        count = deployment.decisions[record.key, "planner"]
        if count:
            _log.warning("%s: %s: %s (%s)", choice.label, record.key, record.planner_error, counted(count, "time"))


def log_paths(log: Path, choices: Sequence[SystemChoice]) -> list[Path]:
    """The event log of each run: `log` itself for a single one, else `run-0-static.jsonl`, `run-1-elastic.jsonl`, …"""
    if len(choices) == 1:
        return [log]
    return [log.with_name(f"{log.stem}-{n}-{choice.label}{log.suffix}") for n, choice in enumerate(choices)]


def _ranged(world: World, row: RunRow) -> RunRow:
    """`row` with its prediction range, if it has one, and each of its applications with theirs; simulates the worlds
    around it."""
    rows = [row, *map(_played, worlds_around(world))]
    if len(rows) == 1:
        return row
    return structs.replace(
        row,
        **_range(rows),
        applications=tuple(map(_with_range, zip(*(each.applications for each in rows), strict=True))),
    )


def _with_range(rows: Sequence[ApplicationRow]) -> ApplicationRow:
    return structs.replace(rows[0], **_range(rows))


def _range(rows: Sequence[FigureRow]) -> dict[str, float | None]:
    """The prediction range of the first of these rows; the others are those of the worlds around it."""
    p99s_ms = [one.p99_ms for one in rows if one.p99_ms is not None]
    low, high = attainment_range([one.attainment for one in rows])
    arrived_rps = rows[0].goodput_rps / rows[0].attainment if rows[0].attainment else 0.0
    return {
        "attainment_low": low,
        "attainment_high": high,
        "goodput_rps_low": low * arrived_rps,
        "goodput_rps_high": high * arrived_rps,
        "p99_ms_low": min(p99s_ms, default=None),
        "p99_ms_high": max(p99s_ms, default=None),
    }


def _played(world: World) -> RunRow:
    summary = summary_of(world, world.setup())
    simulate(world, [summary], check_first=0)
    return summary.row(system=world.deployment.system.label, seed=world.seed)
