"""Answers a question about a run in a process of its own: the story of a request, a plan, what another system had done.

    python -m sloop.page.answers PARENT < QUESTION

Each may take seconds of a core and may run the code of a user's system. So the process has the lowest priority and
bounds on time and memory, and whatever happens to it, the page goes on. A question and its answer are JSON.
"""

import resource
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Final

import msgspec

from sloop.app.application import Deployment, SystemChoice
from sloop.errors import InputError, SloopError
from sloop.page.questions import ANSWER_CPU_S_MAX, PROCESS_BYTES_MAX, Asked, AskForetold, AskPlan, AskRequest, AskWhatIf
from sloop.report.explain import state_of
from sloop.report.explain.request import explain_request, request_named
from sloop.runlog import Record, RecordedLog, read_log
from sloop.runlog.segments import LogSegment, opened, segments_in
from sloop.serve.processes import begin, own_stdout, set_priority
from sloop.sim.foretell import foretell
from sloop.sim.scenarios import chosen_systems, run_systems
from sloop.sim.traffic import recorded_traffic
from sloop.systems.mix import WORKS_MAX, WorkMix
from sloop.systems.planning import explain_plan
from sloop.systems.replay import ServedApplications, system_of
from sloop.systems.setup import set_up
from sloop.systems.system import is_system_file
from sloop.vocabulary import Request, Simulation
from sloop.workload import Work

SYSTEMS_MAX: Final = 8
LAST_S_MAX: Final = 3_600.0
PEEKED_LINES: Final = 2_000
"""Lines of a segment that are read to find its first request."""


def answer(asked: Asked) -> dict[str, Any]:
    """The answer, as plain values. InputError or another `SloopError` if there is none."""
    log = Path(asked.log)
    match asked.question:
        case AskRequest(name):
            return story(log, name)
        case AskPlan(rates_rps, system, arrivals):
            newest = _newest(log)
            deployment = served_now(newest)
            choice = served_or_known(SystemChoice(system), deployment) if system else None
            setup = set_up(deployment, choice, must_fit=False)
            report: dict[str, Any] = _plain(
                explain_plan(setup, rates_rps, arrivals, mixes=brought_lately(newest, deployment))
            )
            return report
        case AskWhatIf(last_s, systems):
            return what_if(log, min(last_s, LAST_S_MAX), systems)
        case AskForetold(application, asks):
            return foretold(log, application.partition("@")[0], asks)


def served_now(log: RecordedLog) -> Deployment:
    """What serves at the end of a log."""
    header, served = log.header, ServedApplications(log.header)
    for _, record in log:
        served.append(record)
    present = [application for name, application in served.by_name.items() if name not in served.ended]
    applications = tuple(replace(application, cluster=header.cluster) for application in present)
    return Deployment(header.name, applications, system_of(header, applications), header.cluster)


def brought_lately(log: RecordedLog, deployment: Deployment) -> dict[str, WorkMix]:
    """By application, what its last requests in a log brought."""
    first, works = deployment.applications[0].name, dict[str, deque[Work]]()
    for _, record in log:
        if isinstance(record, Request):
            own = works.setdefault(record.application or first, deque(maxlen=WORKS_MAX))
            own.append(Work(record.rows, record.size))
    return {name: WorkMix.of(tuple(own)) for name, own in works.items()}


def what_if(log: Path, last_s: float, systems: list[str | dict[str, Any]]) -> dict[str, Any]:
    """The last requests under the system that served them, then under each of the others. One that cannot run has an
    `error` instead of its figures."""
    if len(systems) > SYSTEMS_MAX:
        raise InputError(f"{len(systems)} systems are more than {SYSTEMS_MAX}", help="ask for fewer at once")
    traffic = recorded_traffic(log, last_s)
    asked = chosen_systems(traffic.scenario, systems) if systems else ()
    choices = [*traffic.scenario.systems, *(served_or_known(each, traffic.scenario.deployment) for each in asked)]
    runs: list[dict[str, Any]] = []
    for choice in choices:
        try:
            (run,) = run_systems(traffic.scenario, [choice], check_first=0)
            runs.append({"label": choice.label, "parameters": choice.parameters, **_plain(run.row), "open": run.open})
        except SloopError as error:
            runs.append({"label": choice.label, "parameters": choice.parameters, "error": error.what})
        except Exception as error:  # a user's system may raise anything
            why = f"{type(error).__name__}: {error}"
            runs.append({"label": choice.label, "parameters": choice.parameters, "error": f"it raised {why}"})
    return {"from_s": traffic.from_s, "happened": _plain(traffic.happened), "runs": runs}


def foretold(log: Path, name: str, asks: Simulation) -> dict[str, Any]:
    """The answer to a system of the server itself (`sloop.serve.simulations.Foretold`)."""
    scenario = recorded_traffic(log, asks.last_s).scenario
    if name not in scenario.deployment.by_name:
        raise InputError(f"{name!r} had no requests in this time")
    rows, requests = foretell(scenario, name, asks.systems)
    return {"systems": _plain(rows), "requests": requests, "cpu_s": time.process_time()}


def served_or_known(choice: SystemChoice, deployment: Deployment) -> SystemChoice:
    """The choice, if it is a system that is installed, or a file that the deployment itself names. InputError for
    another file: whoever may look at the page may not run code of his own as the server's user."""
    served = {deployment.system.name, *(application.system.name for application in deployment.applications)}
    if is_system_file(choice.name) and choice.name not in served:
        help = "ask on the server's machine: sloop plan --system FILE, or sloop simulate LOG --system FILE"
        raise InputError(f"{choice.name} is a file, and the page runs none but those that the server runs", help=help)
    return choice


def story(log: Path, name: str) -> dict[str, Any]:
    """The story of a request, with the instants of its bars. A server's log is read from the segment on in which the
    request came."""
    recorded = _from_segment_of(log, name) if log.is_dir() else read_log(log)
    request, others = request_named(recorded, name)
    found = explain_request(recorded, request, state_of(recorded))
    return {**_plain(found), "others": others, "missing": recorded.missing}


def _from_segment_of(folder: Path, name: str) -> RecordedLog:
    """The log from the segment in which a request with this number came; the newest segment for another name."""
    segments = segments_in(folder)
    run = [segment for segment in segments if segment.run == segments[-1].run]
    if not name.isdecimal():
        return read_log(run[-1].path)
    chosen = run[0]
    for segment in run:
        first = _first_request(segment)
        if first is not None and first > int(name):
            break
        chosen = segment if first is not None else chosen
    begun = read_log(chosen.path)
    later = [segment.path for segment in run if segment.number >= chosen.number]
    return RecordedLog(folder, begun.header, later, begun.missing)


def _first_request(segment: LogSegment) -> int | None:
    """The number of the first request that came in a segment."""
    decode = msgspec.json.Decoder(tuple[int, Record]).decode
    with opened(segment.path) as file:
        for _ in range(PEEKED_LINES):
            line = file.readline()
            if b'"arrived"' in line and isinstance(record := decode(line)[1], Request):
                return record.id
    return None


def _newest(log: Path) -> RecordedLog:
    """A log's newest segment, whose header has the applications that there are now."""
    return read_log(segments_in(log)[-1].path if log.is_dir() else log)


def _plain(value: object) -> Any:  # noqa: ANN401  # what JSON can hold
    return msgspec.to_builtins(value)


def main(arguments: Sequence[str]) -> None:
    """Read a question and write its answer."""
    (parent,) = arguments
    begin(int(parent), ())
    stdout = own_stdout()
    set_priority(0, humble=True)
    resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES_MAX, PROCESS_BYTES_MAX))
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
        cpu_s_max = ceil(min(asked.cpu_s_max, ANSWER_CPU_S_MAX))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s_max, cpu_s_max))
        found = answer(asked)
    except SloopError as error:
        found = {"error": error.what, "help": error.help}
    except MemoryError:
        found = {"error": "this needs too much memory here", "help": "ask for a shorter time"}
    with stdout:
        stdout.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
