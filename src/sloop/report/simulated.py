"""A scenario played and counted: from a file's world to one row per system. Logs on request, nothing kept otherwise."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import Struct, structs

from sloop.app.application import SystemChoice
from sloop.app.scenario import Scenario
from sloop.report.assumptions import Assumptions
from sloop.report.metrics import Metrics
from sloop.report.rows import RunRow
from sloop.runlog import FileLog, Sink
from sloop.sim.run import simulate
from sloop.sim.world import NOT_RECORDED, Recorded, World, recorded_in
from sloop.systems.recording import header_of
from sloop.systems.setup import set_up

_log: Final = logging.getLogger("sloop.simulate")


class Counted(Struct, frozen=True):
    """One run: its row, and the fold it was read from for whoever wants seconds or quantiles."""

    row: RunRow
    metrics: Metrics
    open: int = 0
    """Requests that had not ended when the run was given up: they wait for what no node has room for."""


def choices(scenario: Scenario, names: Sequence[str]) -> tuple[SystemChoice, ...]:
    """The scenario's own choices of these systems, published parameters for those it does not name; all for none."""
    found: list[SystemChoice] = []
    for name in names:
        found += [choice for choice in scenario.systems if name in (choice.name, choice.label)] or [SystemChoice(name)]
    return tuple(found) or scenario.systems


def play(
    scenario: Scenario,
    choice: SystemChoice,
    *,
    log: Path | None = None,
    lead_ns: int = 0,
    recorded: Recorded = NOT_RECORDED,
) -> Counted:
    """Play the scenario under one system, under the checkers. With `log`, the event log goes to that file. Requests
    that never ended are warned of.

    With `lead_ns`, the trace begins that much later than the control loop, as it does at a server that was up before.
    With `recorded`, batches take what they took in that run, and requests go where they went.
    """
    world = replace(World.from_scenario(scenario, choice), lead_ns=lead_ns, recorded=recorded)
    setup = set_up(scenario.application, choice)
    metrics = Metrics(nodes=setup.application.cluster, beliefs=setup.beliefs, start_ns=0, graph=setup.application.graph)
    assumptions = Assumptions(setup.application)
    started_ns = time.perf_counter_ns()
    with ExitStack() as files:
        sinks: list[Sink] = [metrics, assumptions]
        if log is not None:
            sinks.append(files.enter_context(FileLog(log, header_of(setup, origin="sim", seed=scenario.seed))))
        played = simulate(world, sinks).played
    wall_s = (time.perf_counter_ns() - started_ns) / 1e9
    row = metrics.row(system=choice.label, seed=scenario.seed, wall_s=wall_s, assumed=assumptions.lines())
    if played.open:
        _log.warning("%s: %s of %s requests were never answered", choice.label, played.open, played.requests)
    return Counted(row, metrics, played.open)


def play_all(
    scenario: Scenario,
    chosen: Sequence[SystemChoice],
    seed: int | None,
    log: Path | None,
    recorded: Path | None = None,
) -> Iterator[Counted]:
    """One run after another; with several, each log's name carries its system and place.

    `recorded` is the log of a run whose batches' durations and requests' ways are taken. InputError where it is no log.
    """
    runs = recorded_in(recorded) if recorded else NOT_RECORDED
    for choice in chosen:
        set_up(scenario.application, choice)  # what is wrong with the last is said before the first is played
    if seed is not None:
        scenario = structs.replace(scenario, seed=seed)
    for index, choice in enumerate(chosen):
        several = len(chosen) > 1
        path = log.with_name(f"{log.stem}-{index}-{choice.label}{log.suffix}") if log and several else log
        yield play(scenario, choice, log=path, recorded=runs)
