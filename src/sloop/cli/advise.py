"""`sloop advise`: which kinds of machine to rent for models, how many, and which models share a device."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
from rich.console import RenderableType

from sloop.app.application import Application, Deployment
from sloop.app.hardware import KINDS, HardwareKind, kinds_in
from sloop.app.load import (
    SLO_MS_LEAST,
    is_model_application,
    load_deployment,
    load_scenario,
    published_document,
    published_profiles,
    with_deadline,
)
from sloop.app.scenario import Scenario
from sloop.app.stages import SLO_MS_MAX
from sloop.cli.command import (
    FILE,
    CommandOutput,
    Number,
    Rate,
    cached_models,
    chosen_system,
    code_notes,
    command,
    has_traces,
    mix_of,
    progress,
    rates_by_name,
    table,
    trace_at,
    with_works,
    works_options,
)
from sloop.cli.plan import CODE_NOTE, RATE_MAX
from sloop.errors import InputError
from sloop.options import nearest
from sloop.profile.model import is_model
from sloop.profile.published import PUBLISHED
from sloop.report.plots import Figure, frontier_figure
from sloop.report.svg import check_figure_file, write_figure
from sloop.report.tables import Table
from sloop.sim import advice
from sloop.sim.advice import Question, first_rps, mean_rps
from sloop.sim.world import World
from sloop.streams import seed_of
from sloop.systems import build_system
from sloop.systems.planning.advice import (
    AdviceReport,
    AdvisedChoice,
    FleetQuestion,
    check_deadlines,
    offered_kinds,
    usual_systems,
)
from sloop.text import counted, listed, number
from sloop.workload import Trace, trace_from

EXAMPLE = """
sloop advise resnet50-V100 bert-V100 --slo-ms 300 --rate resnet50-V100=300 --rate bert-V100=60
sloop advise ResNet50 --slo-ms 200 --trace '{file: day.txt}' --attainment 0.995 --plot frontier.svg
sloop advise app.yaml --rate 50 --hardware c5.2xlarge,g4dn.xlarge --price g4dn.xlarge=0.4 --json
sloop advise burst.yaml --system mixed,hpa --budget-s 60
"""
NOTES: Final = f"""APP is an application, deployment, scenario or model file, or the name of a published profile
(`bert-V100`; `ResNet50` for all kinds of hardware for which one is published). Several applications whose requests take
one path are placed together, so that they may share devices. The kinds on offer are those of the cluster, those that
profiles name and those of --kinds. Every choice is simulated with the same requests; nothing is started. The exit code
is 0 even if no choice reaches --attainment. {CODE_NOTE}"""
SHOWN_MAX: Final = 20
"""The most choices, placements and kinds left out in a printed table; `--json` has all."""
REQUESTS: Final = 10_000
"""About how many requests of constant rates are simulated for each choice."""
DURATION_S_LEAST, DURATION_S_MOST = 60.0, 600.0
REQUESTS_MAX: Final = 10_000_000
"""Of all traces together: a search simulates them once for each choice."""


@command("advise", example=EXAMPLE, notes=NOTES)
@click.argument("apps", metavar="APP...", nargs=-1, required=True)
@click.option(
    "--rate",
    "rates",
    type=Rate(max=RATE_MAX),
    multiple=True,
    help="Mean rate of random arrivals in requests per second: R for each application, or NAME=R for one (may be "
    "repeated).",
)
@click.option(
    "--trace",
    "traces",
    metavar="[NAME=]TRACE",
    multiple=True,
    help="Requests as in TRACE, a file or a mapping such as '{kind: poisson, rate: 100}', instead of a rate.",
)
@click.option(
    "--duration-s",
    type=Number(min=0, min_open=True, max=1e6),
    help=f"How long to simulate [default: the whole trace; with --rate, as long as {REQUESTS:,} requests take].",
)
@click.option(
    "--slo-ms",
    "slos",
    type=Rate(max=SLO_MS_MAX),
    multiple=True,
    metavar="[NAME=]MS",
    help="Deadline of published profiles and model files, or of the application NAME (may be repeated).",
)
@click.option(
    "--attainment",
    type=Number(min=0, min_open=True, max=1),
    default=0.99,
    show_default=True,
    help="The fraction of the requests of every application that should be served in time.",
)
@click.option("--system", "names", metavar="A,B", help="The systems to choose from.")
@click.option("--hardware", metavar="K,L", help="The kinds of hardware to choose from.")
@click.option("--kinds", "kinds_file", type=FILE, help="A file of your own kinds of hardware (docs/applications.md).")
@click.option(
    "--price",
    "prices",
    type=Rate(max=1e6, named_like="g4dn.xlarge"),
    multiple=True,
    metavar="KIND=USD",
    help="Price of a kind in USD per hour, instead of the known one.",
)
@works_options
@click.option("--budget-s", type=Number(min=0, min_open=True), help="End the search after so many seconds.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of all random draws [default: 0, or the scenario's].")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the frontier to this file (.svg).")
def advise(
    apps: tuple[str, ...],
    plot: Path | None,
    budget_s: float | None,
    **options: Any,  # noqa: ANN401  # what describes the question, see `_question`
) -> CommandOutput:
    """Advise which machines to rent for the applications in APP..., how many, and which models share a device.

    Several systems are simulated on fleets of the kinds on offer. The answer is the cheapest choice that serves enough
    requests in time, the frontier of price against requests in time, and how many more requests each cheaper choice
    would miss.
    """
    if plot is not None:
        check_figure_file(plot)
    question = _question(apps, options)
    started_s = time.monotonic()

    def is_over() -> bool:
        return budget_s is not None and time.monotonic() - started_s > budget_s

    with progress("searching", total=1.0) as advance:
        report = advice.advise(question, is_over=is_over, progress=lambda done, known, now: advance(done / known, now))
    if plot is not None:
        write_figure(_figure(report), plot)
    notes = code_notes(replace(question.fleets.deployment, applications=_under_all(question)))
    return CommandOutput(report, [*advice_display(report), *notes])


def _under_all(question: Question) -> tuple[Application, ...]:
    """The first application under every system that the advice considers, whose files were executed."""
    first = question.fleets.deployment.applications[0]
    return tuple(replace(first, system=choice) for choice in question.fleets.systems)


# Reading the question


def _question(apps: Sequence[str], options: Mapping[str, Any]) -> Question:
    kinds_file: Path | None = options["kinds_file"]
    own = kinds_in(kinds_file) if kinds_file else {}
    hardware, prices = _names(options["hardware"]), rates_by_name(options["prices"], "--price", "prices")
    declared, scenario, undeclared = _loaded(apps, hardware, kinds_file)
    deployment, notes = _with_slos(declared, undeclared, rates_by_name(options["slos"], "--slo-ms", "deadlines"))
    seed: int = options["seed"] if options["seed"] is not None else scenario.seed if scenario else 0
    traces = _traces(deployment, scenario, options, seed)
    kinds, left_out = offered_kinds(deployment, hardware, own, prices)
    check_deadlines(deployment, kinds)
    choices = tuple(choice for name in dict.fromkeys(_names(options["names"])) if (choice := chosen_system(name)))
    for choice in choices:
        build_system(choice.name, choice.declared)  # so that an unknown name is refused before anything is planned
    fleets = FleetQuestion(
        deployment,
        kinds,
        choices or usual_systems(deployment, kinds),
        {name: mean_rps(trace) for name, trace in traces.items()},
        {name: first_rps(trace) for name, trace in traces.items()},
        {name: mix_of(trace, deployment.by_name[name]) for name, trace in traces.items()},
    )
    asked = Question(fleets, traces, options["attainment"], seed, left_out=left_out, notes=notes)
    if scenario is None:
        return asked
    world = World.from_scenario(scenario)
    link = world.clients[deployment.applications[0].name].link
    if scenario.changes:
        notes = (
            *notes,
            "changes of the deployment are not simulated: the advice is for what is there first",
        )
    return replace(asked, truth=world.truth, faults=world.faults, link=link, notes=notes)


def _names(text: str | None) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _loaded(
    apps: Sequence[str], hardware: Sequence[str], kinds_file: Path | None
) -> tuple[Deployment, Scenario | None, frozenset[str]]:
    """The applications of files and published profiles, the scenario if APP is one, and the names of applications whose
    file declares no deadline."""
    profiles = [app for app in apps if not _is_file(app)]
    files = [Path(app) for app in apps if _is_file(app)]
    models = cached_models(files)
    if not profiles and len(files) == 1 and has_traces(files[0]):
        scenario = load_scenario(files[0], models=models)
        return scenario.deployment, scenario, frozenset()
    kinds = {node.hardware for node in load_deployment(files, models=models).cluster} if files else set()
    documents = [published_document(app, SLO_MS_LEAST, kinds) for app in profiles]
    if documents and not files:
        documents[0]["cluster"] = _cluster_for(profiles, hardware, kinds_file)
    deployment = load_deployment([*files, *documents], models=models)
    open = {each.name for each in deployment.applications if is_model_application(each)}
    return deployment, None, frozenset(open | {str(each["name"]) for each in documents})


def _is_file(app: str) -> bool:
    """Whether APP is a file; InputError if it is no published profile either."""
    path = Path(app)
    if path.exists() or path.suffix in (".yaml", ".yml") or is_model(path):
        return True
    if not published_profiles(app):
        names = dict.fromkeys(name.partition("@")[0] for name in PUBLISHED)
        raise InputError(
            f"there is no file and no published profile {app!r}", where="APP", help=nearest(app, tuple(names))
        )
    return False


def _cluster_for(profiles: Sequence[str], hardware: Sequence[str], kinds_file: Path | None) -> dict[str, object]:
    """A cluster for published profiles: a node of each kind that is named, or that has a profile."""
    own = kinds_in(kinds_file) if kinds_file else {}
    known: dict[str, HardwareKind] = {**KINDS, **own}
    for kind in hardware:
        if kind not in known:
            what = f"no kind of hardware is called {kind!r}"
            raise InputError(what, where="--hardware", help=nearest(kind, tuple(known)) or "declare it with --kinds")
    kinds = dict.fromkeys(hardware) or dict.fromkeys(own)
    for profile in (published for name in profiles for published in published_profiles(name).items() if not hardware):
        kind, accelerator = profile[0], PUBLISHED[profile[1]].accelerator
        having = (each.name for each in known.values() if accelerator in [device.kind for device in each.devices])
        kinds |= dict.fromkeys([kind] if kind else having)
    if not kinds:
        what = f"{listed(profiles)}: the published profile is for no kind of hardware in particular"
        raise InputError(what, help="name the kinds to choose from, for example --hardware c5.2xlarge,c5.4xlarge")
    cluster: dict[str, object] = {"nodes": [{"hardware": kind} for kind in kinds]}
    return cluster | ({"kinds": str(kinds_file.absolute())} if kinds_file else {})


def _with_slos(
    deployment: Deployment, undeclared: frozenset[str], slos: Mapping[str, float]
) -> tuple[Deployment, tuple[str, ...]]:
    """The deployment with the deadlines of --slo-ms, and notes on those that follow from a profile. A deadline without
    a name is that of all applications whose file declares none."""
    names = [each.name for each in deployment.applications]
    for name in slos:
        if name and name not in names:
            raise InputError(f"no application is called {name!r}", where="--slo-ms", help=nearest(name, names))
    if "" in slos and not undeclared:
        raise click.UsageError("--slo-ms MS is for published profiles and model files; write --slo-ms NAME=MS.")
    applications: list[Application] = []
    notes: list[str] = []
    for each in deployment.applications:
        slo_ms = slos.get(each.name, slos.get("") if each.name in undeclared else None)
        if slo_ms is not None:
            if slo_ms <= 0:
                raise click.BadParameter("a deadline is above 0", param_hint="--slo-ms")
            applications.append(replace(each, slo_ms=slo_ms))
        elif each.name in undeclared and not is_model_application(each):
            what = f"{each.name}: a published profile has no deadline"
            raise InputError(what, help=f"give it one: --slo-ms {each.name}=MS, or --slo-ms MS for all")
        else:
            found, note = with_deadline(each)
            applications.append(found)
            notes += [f"{note}; --slo-ms sets another"] if note else []
    return replace(deployment, applications=tuple(applications)), tuple(notes)


def _traces(
    deployment: Deployment, scenario: Scenario | None, options: Mapping[str, Any], seed: int
) -> dict[str, Trace]:
    """The requests of every application: of --rate, of --trace, or of the scenario."""
    names = [each.name for each in deployment.applications]
    rates, duration_s = rates_by_name(options["rates"]), options["duration_s"]
    sources = dict(_named_trace(text, names) for text in options["traces"])
    if not rates and not sources and scenario is None:
        raise click.UsageError("give the requests: --rate R, --trace TRACE, or a scenario file with a trace.")
    if both := sorted({"" if name not in names else name for name in sources} & rates.keys()):
        raise click.UsageError(f"{both[0] or 'all applications'}: give either --rate or --trace.")
    for name in rates:
        if name and name not in names:
            raise InputError(f"no application is called {name!r}", where="--rate", help=nearest(name, names))
    total_rps = math.fsum(rates.get(name, rates.get("", 0.0)) for name in names)
    usual_s = min(DURATION_S_MOST, max(DURATION_S_LEAST, REQUESTS / total_rps)) if total_rps else DURATION_S_LEAST
    found: dict[str, Trace] = {}
    requests = 0
    for at, name in enumerate(names):
        own_seed = seed if not at else seed_of(seed, f"application/{name}")
        if name in sources or ("" in sources and name not in rates):
            source = sources.get(name, sources.get("", ""))
            trace = trace_at(source, seed=own_seed, duration_s=duration_s, application=name, option="--trace NAME=")
        elif name in rates or "" in rates:
            declared = {"kind": "poisson", "rate": rates.get(name, rates.get("", 0.0))}
            trace = trace_from(declared, seed=own_seed, duration_s=duration_s or usual_s, folder=Path())
        elif scenario is not None and name in scenario.traces:
            length_s, folder = duration_s or scenario.duration_s, Path(deployment.file).parent
            trace = trace_from(scenario.declared_trace(name), seed=own_seed, duration_s=length_s, folder=folder)
        else:
            help = f"add --rate {name}=R or --trace {name}=TRACE"
            raise InputError(f"{name} has no requests", help=help)
        trace = with_works(trace, options["rows"], options["sizes"], seed=own_seed)
        requests += sum(1 for _ in islice(trace.times_ns(), REQUESTS_MAX + 1 - requests))
        if requests > REQUESTS_MAX:
            what = f"over {REQUESTS_MAX:,} requests for each choice are too many to simulate"
            raise InputError(what, help="simulate fewer seconds with --duration-s, or give lower rates")
        if not sum(trace.counts_per_s()):
            raise InputError(
                f"{name}: its trace has no requests", help="leave the application out, or give another trace"
            )
        found[name] = trace
    return found


def _named_trace(text: str, names: Sequence[str]) -> tuple[str, str]:
    """The application that a value of --trace names ("" for all), and the trace."""
    name, equals, source = text.partition("=")
    return (name, source) if equals and name in names else ("", text)


# The answer for people


def advice_display(report: AdviceReport) -> list[RenderableType]:
    """The advice, the frontier, the steps down, who runs where, and why."""
    parts: list[RenderableType] = ["\n".join(_advice(report)), table(_frontier(report))]
    if report.steps:
        parts.append(table(_steps(report)))
    if len(report.closest.applications) > 1:
        parts.append(table(_applications(report)))
    if report.placements:
        parts.append(table(_placements(report)))
    if len(report.needs) > 1:
        parts.append(table(_needs(report)))
    return [*parts, "\n".join(_lines(report))]


def _advice(report: AdviceReport) -> Iterator[str]:
    """What to rent, in two sentences."""
    best, wanted = report.closest, number(100 * report.wanted)
    of = " of every application's requests" if len(best.applications) > 1 else " of requests"
    if len(best.applications) > 1 and best.attainment_least < 1:
        of += f" (the worst: {_worst(best)})"
    serves = f"serves {_percent(best.attainment_least)} %{of} in time"
    million = f", {number(best.usd_per_million)} USD for a million served in time" if best.usd_per_million else ""
    price = f"{number(best.usd_per_h)} USD/h{million}"
    if report.recommended is None:
        yield f"no choice serves {wanted} % in time; {best.name} comes closest: it {serves} for {price}"
    else:
        yield f"rent {_nodes(best)} under {best.system}: {price}; it {serves} (wanted: {wanted} %)"
    rate = f"{number(report.rate_rps)} requests/s on average"
    if report.rate_max_rps > 1.01 * report.rate_rps:
        rate += f", {number(report.rate_max_rps)} in the busiest ten seconds"
    yield f"for {rate}; {counted(report.simulated, 'choice')} simulated with {report.requests:,} requests each"


def _percent(part: float) -> str:
    """As much of a part as tells it from 1: `99.987`."""
    return f"{100 * part:.4g}" if part < 0.99 or part == 1 else f"{100 * part:.5g}"


def _worst(choice: AdvisedChoice) -> str:
    return min(choice.applications, key=lambda each: each.attainment).application


def _nodes(choice: AdvisedChoice) -> str:
    nodes = listed([f"{each.nodes} {each.hardware}" for each in choice.nodes])
    return f"up to {nodes} as they are needed" if choice.as_needed else nodes


def _frontier(report: AdviceReport) -> Table:
    """One row per choice that no other beats."""
    several = len(report.closest.applications) > 1
    columns = ("", "rent", "system", "USD/h", "USD per million in time", "in time %")
    rows = tuple(
        (
            "→" if each == report.closest else "",
            *(_nodes(each), each.system, each.usd_per_h, each.usd_per_million, 100 * each.attainment),
            *((100 * each.attainment_least, _worst(each) if each.attainment_least < 1 else None) if several else ()),
            each.watts,
        )
        for each in report.frontier[-SHOWN_MAX:]
    )
    worst = ("worst application %", "which") if several else ()
    return Table("Price against deadlines: what no other choice beats", (*columns, *worst, "W"), rows)


def _steps(report: AdviceReport) -> Table:
    """One row per step down the frontier."""
    rows = tuple(
        (each.choice, each.saves_usd_per_h, each.late_per_million, 100 * each.attainment_least, each.worst)
        for each in report.steps[:SHOWN_MAX]
    )
    columns = ("cheaper", "saves USD/h", "more of a million not in time", "then in time %", "of")
    return Table("What each step down costs, one after the other", columns, rows)


def _applications(report: AdviceReport) -> Table:
    rows = tuple(
        (each.application, each.slo_ms, each.requests, 100 * each.attainment, each.p99_ms)
        for each in report.closest.applications
    )
    columns = ("application", "deadline ms", "requests", "in time %", "p99 ms")
    return Table(f"Application by application: {report.closest.name}", columns, rows)


def _placements(report: AdviceReport) -> Table:
    """Who runs where: rows of one node and device are together there."""
    rows = tuple(
        (p.node, p.device or None, p.stage, p.replicas, p.cores, p.share or None, p.batch, p.rate_rps)
        for p in sorted(report.placements, key=lambda each: (each.node, each.device, each.stage))[:SHOWN_MAX]
    )
    columns = ("node", "device", "stage", "replicas", "cores", "share", "largest batch", "requests/s")
    return Table("Who runs where, as planned", columns, rows)


def _needs(report: AdviceReport) -> Table:
    """One row per system and kind of hardware, or all kinds."""
    rows = tuple(
        (each.system, listed([f"{kind.nodes} {kind.hardware}" for kind in each.nodes]), each.usd_per_h, each.feasible)
        for each in report.needs[:SHOWN_MAX]
    )
    return Table("What systems plan for the mean rate", ("system", "nodes", "USD/h", "feasible"), rows)


def _lines(report: AdviceReport) -> Iterable[str]:
    """The sentences below the tables."""
    if report.closest.why:
        yield f"why {report.closest.system} chooses it: {report.closest.why}"
    if not report.plan.feasible:
        yield f"its plan is not feasible for evenly spaced requests: {report.plan.why}"
    yield f"on offer: {listed([f'{each.hardware} at {number(each.usd_per_h)} USD/h' for each in report.kinds])}"
    if report.pruned:
        yield f"not simulated: {counted(report.pruned, 'choice')} that cannot be better than cheaper ones"
    if report.unfinished:
        yield f"not finished: {counted(report.unfinished, 'choice')} when the search ended (--budget-s)"
    yield from (f"left out: {each.name}: {each.why}" for each in report.left_out[:SHOWN_MAX])
    yield from (f"note: {line}" for line in dict.fromkeys((*report.notes, *report.plan.notes)))
    yield from (f"based on {line}" for line in report.assumed)


def _figure(report: AdviceReport) -> Figure:
    points = [(each.system, each.usd_per_h, each.attainment_least) for each in report.choices]
    return frontier_figure(points, [(each.usd_per_h, each.attainment_least) for each in report.frontier], report.wanted)
