"""`sloop plan`: the replicas, nodes and costs that a system needs for request rates, and why."""

import time
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType

from sloop.app.application import Deployment
from sloop.cli.command import (
    AppPath,
    CommandOutput,
    Rate,
    chosen_system,
    code_notes,
    command,
    has_traces,
    loaded,
    mix_of,
    progress,
    rates_by_name,
    slo_option,
    speed_option,
    table,
    trace_at,
    with_deadlines,
    with_works,
    works_options,
)
from sloop.profile.passes import MachineSpeed
from sloop.report.tables import Cell, Table
from sloop.systems.mix import WORKS_MAX, WorkMix
from sloop.systems.planning import Arrivals, PlanReport, StageReport, explain_plan
from sloop.systems.setup import set_up
from sloop.text import counted, listed, number
from sloop.units import s
from sloop.workload.generate import Equal, generated

PATHS_MAX: Final = 12
"""The most paths in the printed table; `--json` has all."""
EXAMPLE = """
sloop plan app.yaml --rate 50
sloop plan digits.yaml ocr.yaml --rate digits=50 --rate ocr=5
sloop plan app.yaml --rate 50 --system mixed --arrivals burst --json
sloop plan app.yaml --rate 50 --sizes '{kind: lognormal, median: 60, sigma: 0.8, most: 512}'
sloop plan digits.onnx --rate 50 --slo-ms 100
"""
CODE_NOTE: Final = (
    "A system that is a Python file (`system: ./mine.py`, --system ./mine.py) is executed in this process, with your "
    "rights: do not plan or check the files of somebody whose code you would not run."
)
NOTES = f"""APP is an application, deployment, scenario or model file; several of them share one cluster. No model
is started or measured, and nothing is written: the system's policies compute the plans that they would keep at these
rates, and the profiles predict their latencies. The exit code is 0 even if a plan is not feasible; `sloop check` then
returns 1. {CODE_NOTE}"""
RATE_MAX: Final = 1e7
RATE_HELP: Final = "Requests per second: R for each application, or NAME=R for one (may be repeated)."
arrivals_option = click.option(
    "--arrivals",
    type=click.Choice(["even", "burst"]),
    default="even",
    show_default=True,
    help="Whether the requests of a second arrive evenly spaced or all at once.",
)
apps_argument = click.argument("apps", metavar="APP...", nargs=-1, required=True, type=AppPath())


@command("plan", example=EXAMPLE, notes=NOTES)
@apps_argument
@click.option("--rate", "rates", type=Rate(max=RATE_MAX), required=True, multiple=True, help=RATE_HELP)
@click.option("--system", "name", metavar="NAME", help="Plan with this system instead of the one that APP names.")
@arrivals_option
@slo_option
@speed_option
@works_options
def plan(
    apps: tuple[Path | str, ...],
    rates: tuple[tuple[str, float], ...],
    name: str | None,
    arrivals: Arrivals,
    slo_ms: float | None,
    speed: MachineSpeed | None,
    rows: str | None,
    sizes: str | None,
) -> CommandOutput:
    """Show what the applications in APP... need at steady request rates, what that costs and how it performs."""
    deployment, notes = with_deadlines(loaded(apps, slo_ms), slo_ms)
    named = {application.system.name for application in deployment.applications}
    choice = chosen_system(name)
    setup = set_up(deployment, choice if choice and {choice.name} != named else None, must_fit=False)
    mixes = _mixes(apps, setup.deployment, rows, sizes)
    with progress("planning", total=1.0) as advance:
        report = explain_plan(
            setup,
            rates_by_name(rates),
            arrivals,
            mixes=mixes,
            speed=speed,
            clock=time.perf_counter_ns,
            progress=advance,
        )
    return CommandOutput(report, [*plan_display(report), *notes, *code_notes(setup.deployment)])


def _mixes(
    apps: Sequence[Path | str], deployment: Deployment, rows: str | None, sizes: str | None
) -> dict[str, WorkMix]:
    """The rows and sizes of the requests of each application: as --rows and --sizes say, otherwise as the trace of the
    scenario in APP says, otherwise one row of the only size."""
    ordinary = generated(Equal(1.0), seed=0, duration_ns=s(WORKS_MAX))
    is_scenario = len(apps) == 1 and isinstance(apps[0], Path) and has_traces(apps[0])
    found: dict[str, WorkMix] = {}
    for each in deployment.applications:
        trace = trace_at(str(apps[0]), seed=0, duration_s=None, application=each.name) if is_scenario else ordinary
        found[each.name] = mix_of(with_works(trace, rows, sizes, seed=0), each)
    return found


def plan_display(report: PlanReport) -> Sequence[RenderableType]:
    """The applications, stages, binding constraints, nodes, paths, reasons and shortfalls of a plan."""
    spaced = "evenly spaced" if report.arrivals == "even" else "all of a second at once"
    verdict = "feasible" if report.feasible else "not feasible"
    several = len(report.applications) > 1
    of = f" of {len(report.applications)} applications" if several else ""
    title = f"{report.system}: {verdict} at {number(report.rate_rps)} requests/s{of}, {spaced}"
    parts: list[RenderableType] = []
    if several:
        parts.append(table(_applications(title, report)))
        title = "Stages"
    if report.stages:
        parts += [table(_stages(title, report)), table(_constraints(report))]
    elif not several:
        parts.append(title)
    if len(report.nodes) > 1 or any(kind.rented for kind in report.nodes):
        parts.append(table(_nodes(report)))
    if len(report.stages) > 1:
        parts.append(table(_paths(report)))
    return [*parts, "\n".join(_lines(report))]


def _lines(report: PlanReport) -> Iterable[str]:
    """The sentences below the tables."""
    several = len(report.applications) > 1
    price = f" on nodes that cost {number(report.usd_per_h)} USD/h" if report.usd_per_h else ""
    predicted = f"; {_predicted(report)}" if report.stages and not several else ""
    yield f"in all: {counted(report.cores, 'core')}{price}{predicted}"
    if report.one_more:
        needs = " needs" if report.one_more.feasible else ""
        yield f"one more request per second{needs}: {report.one_more.summary}"
    if report.unpriced:
        yield f"cost: no price is declared for {listed(report.unpriced)}"
    if report.plan_why:
        for each in report.applications:
            of = f" for {each.application}" if several else ""
            yield f"why {report.system} chooses it{of}: {each.plan_why}"
    yield from (f"note: {line}" for line in report.notes)
    yield from (f"not feasible: {_of(each.application, several)}{each.why}" for each in report.shortfalls)


def _of(application: str, several: bool) -> str:
    return f"{application}: " if several and application else ""


def _predicted(report: PlanReport) -> str:
    """The predicted latency of the longest path, and its range if the profiles have several passes."""
    low_ms, high_ms = report.predicted_ms_low, report.predicted_ms_high
    if not isfinite(report.predicted_ms):
        return "the plan cannot keep up, so latencies grow without bound"
    text = f"predicted P99 of {'the longest path' if len(report.paths) > 1 else 'a request'}: "
    text += f"{number(report.predicted_ms)} ms"
    if low_ms is None or high_ms is None:
        return text
    if not isfinite(high_ms):
        return f"{text}, but it cannot keep up on a machine as slow as some passes of the profiles suggest"
    return f"{text}; on a real machine likely between {number(low_ms)} and {number(high_ms)} ms"


def _applications(title: str, report: PlanReport) -> Table:
    """One row per application."""
    columns = ("application", "requests/s", "feasible", "cores", "predicted ms", "deadline ms", "limited by")
    rows = tuple(
        (
            *(each.application, each.rate_rps, each.feasible, each.cores, each.predicted_ms, each.slo_ms),
            ", ".join(dict.fromkeys(name for limit in each.limits for name, _ in limit.others)),
            each.one_more.summary if each.one_more else "",
        )
        for each in report.applications
    )
    return Table(title, (*columns, "one more request/s needs"), rows)


def _stages(title: str, report: PlanReport) -> Table:
    """One row per group of equal replicas."""
    kinds = len({kind.hardware for kind in report.nodes}) > 1 or any(row.accelerator for row in report.stages)
    columns = ("stage", "variant", *(("hardware",) if kinds else ()))
    rate = "requests/s" if all(row.rows == 1.0 for row in report.stages) else "rows/s"
    columns += ("replicas", "cores", "largest batch", "expected batch", rate)
    rows = tuple(
        (
            *(s.stage, s.variant, *((_hardware(s),) if kinds else ()), s.replicas, _cores(s), s.batch),
            *(s.batch_expected, s.group_rps if s.replicas else s.rate_rps, s.service_ms, s.wait_ms, s.predicted_ms),
        )
        for s in report.stages
    )
    return Table(title, (*columns, "service ms", "wait ms", "predicted ms"), rows)


def _cores(row: StageReport) -> Cell:
    """`2`, or `0.5 reserved` if a replica can use more than its cores."""
    return row.cores if row.is_capped or row.accelerator else f"{row.cores:g} reserved"


def _hardware(row: StageReport) -> str:
    """`c5.2xlarge`, or `g4dn.xlarge: T4`, or `g4dn.xlarge: 0.5 of a T4`."""
    if not row.accelerator:
        return row.hardware
    device = row.accelerator if row.share in (0, 1) else f"{row.share:g} of a {row.accelerator}"
    return f"{row.hardware}: {device}"


def _constraints(report: PlanReport) -> Table:
    """One row per constraint that binds a stage."""
    rows: list[tuple[Cell, ...]] = []
    for stage in {row.stage: row for row in report.stages}.values():
        binds: list[tuple[str, str]] = [(bound.kind, bound.why) for bound in stage.binds] or [
            ("–", "it has no replicas")
        ]
        rows.append((stage.stage, *binds[0], stage.one_more))
        rows += [("", *bound, "") for bound in binds[1:]]
    return Table("Binding constraints", ("stage", "binds", "because", "one more request/s needs"), tuple(rows))


def _nodes(report: PlanReport) -> Table:
    """One row per kind of hardware in use."""
    rows = tuple((k.hardware, k.nodes, k.held, k.rented, k.usd_per_h or None) for k in report.nodes)
    return Table("Nodes", ("hardware", "nodes", "always there", "rented", "USD/h"), rows)


def _paths(report: PlanReport) -> Table:
    several = len(report.applications) > 1
    rows = tuple(
        (" → ".join(p.stages), 100 * p.share, p.predicted_ms, p.slo_ms, p.slack_ms) for p in report.paths[:PATHS_MAX]
    )
    title = "Paths, the least slack first" if not several else "Paths, of each application the least slack first"
    if len(report.paths) > PATHS_MAX:
        title += f" ({len(report.paths) - PATHS_MAX} more with --json)"
    return Table(title, ("path", "% of requests", "predicted ms", "deadline ms", "slack ms"), rows)
