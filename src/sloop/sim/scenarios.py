"""Scenarios: a file's world played under each of its systems, and each run as one row.

Writes event logs on request; otherwise keeps nothing but the figures.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import Struct

from sloop.app.application import SystemChoice
from sloop.app.scenario import Scenario
from sloop.runlog import FileLog, Sink
from sloop.runlog.summary import RunRow, RunSummary
from sloop.sim.band import with_range
from sloop.sim.run import simulate
from sloop.sim.truth.recorded import NOT_RECORDED, RecordedRun
from sloop.sim.world import World, recorded_in
from sloop.systems.replay import header_of
from sloop.systems.setup import set_up

_log: Final = logging.getLogger("sloop.simulate")

CHECK_FIRST: Final = 10_000
"""How many records of a run are checked unless all are asked for: some 2,500 requests, which most scenarios do not
exceed. Checking every record would make long runs half as fast again; `make fuzz` checks all of many short ones."""


class ScenarioRun(Struct, frozen=True):
    """One run of a scenario: its row, and the summary that it was read from."""

    row: RunRow
    summary: RunSummary
    open: int = 0
    """Requests that had not ended when the run was given up, because no node has room for what they wait for."""


def chosen_systems(scenario: Scenario, names: Sequence[str]) -> tuple[SystemChoice, ...]:
    """The scenario's own entries for these systems, or their published parameters; all its systems for no names."""
    found: list[SystemChoice] = []
    for name in names:
        found += [choice for choice in scenario.systems if name in (choice.name, choice.label)] or [SystemChoice(name)]
    return tuple(found) or scenario.systems


def run_scenario(
    scenario: Scenario,
    choice: SystemChoice,
    *,
    log: Path | None = None,
    lead_ns: int = 0,
    recorded: RecordedRun = NOT_RECORDED,
    check_first: int | None = CHECK_FIRST,
    with_band: bool = False,
) -> ScenarioRun:
    """Play the scenario under one system. Warns of requests that never ended.

    The event log goes to the file `log`. `lead_ns` is how long the control loop has been running when the trace begins,
    as at a live server. `recorded` replaces truths by those of a recorded run. `check_first` is how many records the
    checkers see, all for None. `with_band` adds the range in which a real run is expected, which takes two more runs.
    """
    world = replace(World.from_scenario(scenario, choice), lead_ns=lead_ns, recorded=recorded)
    setup = set_up(scenario.application, choice)
    summary = RunSummary(setup.application, estimates=setup.beliefs, start_ns=0)
    started_ns = time.perf_counter_ns()
    with ExitStack() as files:
        sinks: list[Sink] = [summary]
        if log is not None:
            header = header_of(setup, origin="sim", seed=scenario.seed, assumed_starts=world.assumed_starts)
            sinks.append(files.enter_context(FileLog(log, header)))
        totals = simulate(world, sinks, check_first=check_first)
    wall_s = (time.perf_counter_ns() - started_ns) / 1e9
    assumed = summary.assumed_starts(world.assumed_starts)
    row = summary.row(system=choice.label, seed=scenario.seed, wall_s=wall_s, assumed=assumed)
    if totals.open:
        _log.warning("%s: %s of %s requests were never answered", choice.label, totals.open, totals.requests)
    return ScenarioRun(with_range(world, row) if with_band else row, summary, totals.open)


def run_systems(
    scenario: Scenario,
    choices: Sequence[SystemChoice],
    *,
    seed: int | None = None,
    log: Path | None = None,
    recorded: Path | None = None,
    check_first: int | None = CHECK_FIRST,
) -> Iterator[ScenarioRun]:
    """One run after another, with the range around each; of several runs, each log's name has its number and system.

    `recorded` is the log of a run whose durations, branches and delays are taken for true. Raises InputError if it is
    no event log, and before the first run if any of the systems cannot be set up.
    """
    run = recorded_in(recorded) if recorded else NOT_RECORDED
    for choice in choices:
        set_up(scenario.application, choice)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    for index, choice in enumerate(choices):
        path = log
        if log and len(choices) > 1:
            path = log.with_name(f"{log.stem}-{index}-{choice.label}{log.suffix}")
        yield run_scenario(scenario, choice, log=path, recorded=run, check_first=check_first, with_band=True)
