"""Shared by all commands: output, tables, progress bars, and parsers of option values.

With `--json` a command prints one object on stdout and nothing else; progress and errors go to stderr. An error names
the place, the problem and the fix. Exit codes: 0 success, 1 failure, 2 wrong usage (from click).
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from threading import Timer
from typing import Any, Final, Protocol

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.document import is_url, parse_yaml, read_yaml
from sloop.app.load import (
    SLO_MS_LEAST,
    Models,
    is_model_application,
    load_deployment,
    load_scenario,
    model_urls,
    with_deadline,
)
from sloop.app.stages import SLO_MS_MAX
from sloop.app.triton import is_repository, read_repository
from sloop.errors import InputError, MachineError, SloopError
from sloop.options import Range
from sloop.profile.examine import UNDECLARED, Declared, ExaminedModel
from sloop.profile.model import is_model, row_shapes
from sloop.profile.passes import MachineSpeed
from sloop.profile.profile import load_profile, path_beside
from sloop.report.tables import Table, as_rich
from sloop.runlog import is_log
from sloop.serve.copies import ExaminedModels, ModelCopy
from sloop.serve.weights.folder import ModelFolder, usual_folder
from sloop.serve.weights.sources import ModelSource
from sloop.systems import build_system
from sloop.systems.mix import WORKS_MAX, WorkMix, refusal_of
from sloop.systems.system import is_system_file
from sloop.tensor import Port, Signature
from sloop.text import counted, listed
from sloop.units import s
from sloop.workload.link import Link, link_from, read_link
from sloop.workload.read import trace_from
from sloop.workload.sizes import ROWS, SIZES, Numbers, drawn, numbers_from
from sloop.workload.trace import Trace, cut, first_works

FILE: Final = click.Path(dir_okay=False, path_type=Path)
FOLDER: Final = click.Path(file_okay=False, path_type=Path)
PORTS_MAX: Final = 4
"""Inputs or outputs of an application that a line shows."""


class AppPath(click.Path):
    """An application file, a model or its URL, or a folder that has one: its `app.yaml`, or else its only application
    file, or else its only model. The folder of a Triton model repository, or of one of its models, stands for itself.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        if isinstance(value, str) and is_url(value):
            return value
        folder = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not folder.is_dir():
            return folder
        there = sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
        applications = [each for each in there if each.suffix in (".yaml", ".yml")]
        for found in (
            [each for each in applications if each.name == "app.yaml"],
            applications,
            [each for each in there if is_model(each)],
        ):
            if len(found) == 1:
                return found[0]
            if found:
                names = listed([each.name for each in found])
                self.fail(f"{folder} has {names}: name one of them, or call one app.yaml.", param, ctx)
        if is_repository(folder):
            return folder
        return self.fail(f"{folder} has no application file and no model.", param, ctx)


JSON: Final = "sloop.cli.json"
"""Key of click's `meta`: whether `--json` was given."""
PROGRESS_AFTER_S: Final = 2.0
"""Seconds before a progress bar is drawn: a bar that appears and vanishes says nothing."""
TRACE_HELP: Final = (
    "TRACE is a file of arrivals, a scenario (.yaml), the event log of a server, or a mapping such as '{kind: poisson, "
    "rate: 100}'."
)


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """The result of a command, in the forms that `print_output` chooses from."""

    value: Any
    """For programs: any value that msgspec encodes as one JSON object."""
    display: Sequence[RenderableType]
    """For people: lines and tables."""
    exit_code: int = 0
    errors: Sequence[str] = ()
    """What is wrong, each with its help: shown last, on stderr, in both forms."""


def print_output(output: CommandOutput) -> None:
    """Print as JSON, or as text in the width of the terminal; lines are not wrapped if stdout is a file or a pipe."""
    if click.get_current_context().meta[JSON]:
        click.echo(msgspec.json.encode(output.value))
        return
    console = Console() if sys.stdout.isatty() else Console(width=200, soft_wrap=False)
    for part in output.display:
        console.print(part, highlight=False, markup=False)  # a file may be called `[b].onnx`


def tensors_line(name: str, signature: Signature) -> str:
    """What an application takes and answers, such as `digits takes image FP32[-1, 28, 28] and answers digit
    INT64[-1]`."""
    return f"{name} takes {_ports(signature.inputs)} and answers {_ports(signature.outputs)}"


def _ports(ports: Sequence[Port]) -> str:
    named = [f"{port.name} {port.kind}" for port in ports[:PORTS_MAX]]
    return listed(named + ([f"{len(ports) - PORTS_MAX} more"] if len(ports) > PORTS_MAX else []))


class GroupedOption(click.Option):
    """An option that the help shows below the title of its group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:  # noqa: ANN401  # click's own signature
        super().__init__(*args, **kwargs)
        self.group = group


class Command(click.Command):
    """A click command whose function returns a `CommandOutput`, or None if it has already printed one.

    `removed` says what to write instead of options that the command no longer has.
    """

    def __init__(self, *args: Any, removed: Mapping[str, str], **kwargs: Any) -> None:  # noqa: ANN401  # click's own signature
        super().__init__(*args, **kwargs)
        self._removed = removed
        help_text = "Print one JSON object on stdout; everything else goes to stderr."
        self.params.append(click.Option(["--json", "as_json"], is_flag=True, help=help_text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's method. Wrong use for a removed option says what replaces it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            instead = self._removed.get(error.option_name)
            if instead is None:
                raise
            raise click.UsageError(f"{error.option_name} is no option any more: {instead}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's method: the options of each group below its title, those without a group first."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                groups.setdefault(getattr(param, "group", "Options"), []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> None:
        ctx.meta[JSON] = ctx.params.pop("as_json")
        try:
            _check_paths(ctx.params.values())
            output = super().invoke(ctx)
        except SloopError as error:
            output = CommandOutput({"error": error.what, "help": error.help}, (), exit_code=1, errors=[str(error)])
        if output is not None:
            assert isinstance(output, CommandOutput), f"{self.name} returned {output!r}"
            print_output(output)
            for each in output.errors:
                click.echo(f"error: {each}", err=True)
            if output.exit_code:
                ctx.exit(output.exit_code)


def check_temporary() -> None:
    """MachineError if no folder for temporary files can be written, before a command needs one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise MachineError(
            f"temporary files cannot be written: {error.strerror}",
            help="mount a folder that can be written at /tmp, or name one by the environment variable TMPDIR",
        ) from error


def check_folder(folder: Path, option: str) -> None:
    """Make a folder. MachineError, naming the option that names it, if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"{folder}: nothing can be written there: {error.strerror}"
        raise MachineError(what, help=f"name a folder that you may write, with {option}") from error


def _check_paths(values: Iterable[object]) -> None:
    """InputError for a path whose name is not text: it could not be written into a log, or passed to a runtime."""
    for value in values:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Path) and any("\ud800" <= sign <= "\udfff" for sign in str(each)):
                name = str(each).encode(errors="backslashreplace").decode()
                raise InputError("its name is not valid UTF-8", where=name, help="rename the file")


def command(
    name: str, *, example: str, notes: str = "", removed: Mapping[str, str] = {}
) -> Callable[[Callable[..., CommandOutput | None]], Command]:
    """Make a function the command `name`. Its docstring is the help text; `notes` and `example` end it. For `removed`
    see `Command`."""

    def decorate(function: Callable[..., CommandOutput | None]) -> Command:
        lines = "\n".join(f"  {line}" for line in example.strip().splitlines())
        epilog = f"{notes}\n\n\b\nExample:\n{lines}".lstrip("\n")
        return click.command(name, cls=Command, epilog=epilog, removed=removed)(function)

    return decorate


def table(contents: Table) -> Group:
    """A table for the terminal, with the title on a separate line so that a narrow table does not wrap it."""
    body = as_rich(Table("", contents.columns, contents.rows))
    return Group(Text(contents.title, style="bold"), body) if contents.title else Group(body)


def facts(rows: Iterable[tuple[str, str]]) -> Grid:
    """Labels with their values, without lines or headings."""
    grid = Grid.grid(padding=(0, 3))
    for label, value in rows:
        grid.add_row(Text(label, style="bold"), Text(value))
    return grid


class ProgressUpdate(Protocol):
    """Report that `done` of the bar's total is done; `now` names the current step."""

    def __call__(self, done: float, now: str = "") -> None: ...


@contextmanager
def progress(what: str, total: float) -> Iterator[ProgressUpdate]:
    """A progress bar on stderr while the block runs, if it takes longer than `PROGRESS_AFTER_S`."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    row = bar.add_task(what, total=total)

    def update(done: float, now: str = "") -> None:
        bar.update(row, completed=done, description=f"{what}: {now}" if now else what)

    timer = Timer(PROGRESS_AFTER_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield update
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()


def trace_at(
    source: str, *, seed: int, duration_s: float | None, application: str = "", option: str = "--application"
) -> Trace:
    """Load the trace that `source` names (see `TRACE_HELP`). InputError if it names none.

    If it is a scenario with several traces, `application` chooses one; `option` is how the user gives it.
    """
    if source.lstrip().startswith("{"):
        return trace_from(parse_yaml(source, "TRACE"), seed=seed, duration_s=duration_s, folder=Path())
    is_recorded = is_log(Path(source))
    if not is_recorded and not source.endswith((".yaml", ".yml")):
        return trace_from({"file": source}, seed=seed, duration_s=duration_s, folder=Path())
    if is_recorded:
        from sloop.sim.traffic import recorded_traffic  # noqa: PLC0415  # the simulator, for logs alone

        scenario = recorded_traffic(Path(source)).scenario
    else:
        scenario = load_scenario(source, models=cached_models([Path(source)]))
    names = tuple(scenario.traces)
    if len(names) == 1:
        application = names[0]
    elif application not in names:
        what = f"it has no trace for {application!r}" if application else f"it has {counted(len(names), 'trace')}"
        raise InputError(what, where=source, help=f"choose one with {option}: {listed(names, 'or')}")
    length_s = scenario.duration_s if duration_s is None else duration_s
    trace = scenario.traces[application]
    if isinstance(trace, Trace):
        return cut(trace, duration_ns=s(length_s))
    return trace_from(scenario.declared_trace(application), seed=seed, duration_s=length_s, folder=Path())


def works_options(function: Callable[..., CommandOutput | None]) -> Callable[..., CommandOutput | None]:
    """Adds the options `--rows` and `--sizes`, which `with_works` applies to a trace."""
    rows = click.option(
        "--rows",
        metavar="NUMBERS",
        help="How many rows each request has [default: as its trace says, or 1]: a number, a list, or a distribution "
        "such as '{kind: uniform, least: 1, most: 16}'.",
    )
    sizes = click.option(
        "--sizes",
        metavar="NUMBERS",
        help="How large these rows are (length of a text, height × width of an image) [default: as the trace says, or "
        "all equally large], such as '{kind: lognormal, median: 60, sigma: 0.8, most: 512}' or '{file: lengths.txt}'.",
    )
    return rows(sizes(function))


def with_works(trace: Trace, rows: str | None, sizes: str | None, *, seed: int) -> Trace:
    """The trace with the rows and sizes that `--rows` and `--sizes` say. InputError for a mistake in these."""
    return drawn(trace, seed=seed, rows=_numbers(rows, "--rows", ROWS), sizes=_numbers(sizes, "--sizes", SIZES))


def mix_of(trace: Trace, application: Application) -> WorkMix:
    """What the first `WORKS_MAX` requests of a trace bring on average. InputError if a server would refuse some of
    them."""
    works = first_works(trace, WORKS_MAX)
    if (refused := refusal_of(works, application)) is not None:
        raise InputError(refused.what, where=f"--{refused.key}", help=refused.help)
    return WorkMix.of(works)


def _numbers(text: str | None, option: str, limits: Range) -> Numbers | None:
    return None if text is None else numbers_from(parse_yaml(text, option), limits, Path())


def has_traces(file: Path) -> bool:
    """Whether a file is a scenario."""
    if file.suffix not in (".yaml", ".yml"):
        return False
    content = read_yaml(file).content
    return isinstance(content, Mapping) and ("trace" in content or "traces" in content)


def link_at(source: str, *, seed: int) -> Link:
    """Load the client link that `source` names: a file of bandwidths, or a mapping such as `{kind: lte}`."""
    if source.lstrip().startswith("{"):
        return link_from(parse_yaml(source, "LINK"), seed=seed, folder=Path())
    return read_link(source)


def mapping(text: str, where: str) -> dict[str, object]:
    """Parse a YAML mapping on one line. InputError, naming `where`, for anything else."""
    return {key: value.content for key, value in parse_yaml(text, where).mapping().items()}


class Host(click.types.StringParamType):
    """An address or a name, without the brackets that IPv6 addresses have in URLs."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  # text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        text = str(super().convert(value, param, ctx))
        return text[1:-1] if text.startswith("[") and text.endswith("]") else text


HOST: Final = Host()


class Number(click.FloatRange):
    """A finite float in a range. Click's type accepts `nan` and `inf`, which are not valid durations or rates."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  # text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        try:
            float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number

    def _describe_range(self) -> str:
        """The range as text; empty without bounds, for which click would write `x<=None`."""
        return "" if self.min is None and self.max is None else super()._describe_range()


slo_option = click.option(
    "--slo-ms",
    type=Number(min=0, min_open=True, max=SLO_MS_MAX),
    help="Deadline of the applications of model files in APP... [default: derived from their profiles].",
)


class MeasuredSpeed(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A `MachineSpeed` as it is printed, such as 0.93+-0.01; without its error, 0.93."""

    name = "speed"

    def convert(
        self,
        value: Any,  # noqa: ANN401  # text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> MachineSpeed:
        if isinstance(value, MachineSpeed):
            return value
        factor, _, error = value.partition("+-")
        return MachineSpeed(
            Number(min=0.01, max=100).convert(factor, param, ctx),
            Number(min=0, max=1).convert(error or "0", param, ctx),
        )


speed_option = click.option(
    "--speed",
    type=MeasuredSpeed(),
    metavar="SPEED[+-ERROR]",
    help="How many times as fast as the profiles say the machine is known to be, and the standard error of that: the "
    "range then leaves out how one machine, or hour, differs from another. `sloop simulate LOG` prints it.",
)


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A rate, or another number of at least 0, as `R` or `NAME=R`: a pair of the name ("" if there is none) and the
    number. With `named_like`, such as g4dn.xlarge, there must be a name."""

    name = "[name=]r"

    def __init__(self, max: float, *, named_like: str = "") -> None:
        self._number, self._named_like = Number(min=0, max=max), named_like

    def convert(
        self,
        value: Any,  # noqa: ANN401  # text, or a default
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, equals, rate = value.rpartition("=")
        if equals and not name:
            self.fail(f"{value!r} has no name before '='; write digits=50", param, ctx)
        if self._named_like and not (name and rate):
            self.fail(f"{value!r} is not NAME=NUMBER; write {self._named_like}=0.5", param, ctx)
        return name, self._number.convert(rate, param, ctx)


def rates_by_name(rates: Iterable[tuple[str, float]], option: str = "--rate", noun: str = "rates") -> dict[str, float]:
    """The values, called `noun`, of a repeated option of type `Rate`, by name."""
    found: dict[str, float] = {}
    for name, rate_rps in rates:
        if name in found:
            raise click.BadParameter(f"two {noun} for {name or 'all applications'}; keep one", param_hint=option)
        found[name] = rate_rps
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Finite numbers separated by commas: `0.5,1,2`."""
    try:
        found = tuple(float(part) for part in text.split(","))
        if not all(map(isfinite, found)):
            raise ValueError
        return found
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers; write 0.5,1,2") from None


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 separated by commas: `1,2,4`."""
    try:
        found = tuple(int(part) for part in text.split(","))
        if min(found) < 1:
            raise ValueError
        return found
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers from 1; write 1,2,4") from None


Apps = Sequence[Path | str]
"""Files and folders, and URLs as text."""


def cached_models(apps: Apps) -> dict[str, Path]:
    """By URL, the models in the cache that the files in APP... name; no store is asked, and nothing is written."""
    found: dict[str, Path] = {}
    for url, value in model_urls(apps).items():
        try:
            copy = ModelFolder(usual_folder(), 0).copy_of(ModelSource.of(url))
        except InputError as error:
            value.fail(error.what, error.help)
        if copy is not None:
            found[url] = copy.path
    return found


def tell_notes(apps: Apps) -> None:
    """Say what is not taken of model repositories."""
    for folder in (app for app in apps if isinstance(app, Path) and app.is_dir()):
        for note in read_repository(folder, SLO_MS_LEAST).notes:
            click.echo(note, err=True)


def loaded(apps: Apps, slo_ms: float | None, models: Models | None = None) -> Deployment:
    """The deployment of the files in APP..., which may be application files or models; or one deployment file. `models`
    are those that were fetched [default: what is in the cache]. Says what is not taken of model repositories."""
    tell_notes(apps)
    deployment = load_deployment(apps, models=cached_models(apps) if models is None else models)
    if slo_ms is not None and not any(map(is_model_application, deployment.applications)):
        raise click.UsageError("--slo-ms is the deadline of model files; an application file declares its own.")
    return deployment


def with_deadlines(deployment: Deployment, slo_ms: float | None) -> tuple[Deployment, list[str]]:
    """The deployment with the deadlines of model files, and what to say of those that were derived."""
    applications: list[Application] = []
    notes: list[str] = []
    for each in deployment.applications:
        application, note = with_deadline(each, slo_ms)
        applications.append(application)
        notes += [f"{note}; --slo-ms sets another"] if note else []
    return replace(deployment, applications=tuple(applications)), notes


def chosen_system(name: str | None) -> SystemChoice | None:
    """The system that --system names; the path of a Python file becomes absolute, as in an application file."""
    if not name:
        return None
    return SystemChoice(str(Path(name).absolute()) if is_system_file(name) else name, path="--system")


def check_systems(deployment: Deployment) -> None:
    """InputError for a mistake in the systems of the applications."""
    for application in deployment.applications:
        build_system(application.system.name, application.system.declared)


def code_notes(deployment: Deployment) -> list[str]:
    """A sentence for each Python file of a user that was executed to build a system."""
    files = dict.fromkeys(each.system.name for each in deployment.applications if is_system_file(each.system.name))
    return [f"{file} was executed in this process: it defines the system" for file in files]


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


Shapes = Mapping[str, tuple[int, ...]]
"""One row's shape by input."""


def examined(
    copy: ModelCopy,
    shapes: dict[str, tuple[int, ...]],
    declared: Declared = UNDECLARED,
    models: ExaminedModels | None = None,
    typical: Callable[[ExaminedModel], dict[str, tuple[int, ...]]] = lambda known: {},
) -> tuple[ExaminedModel, dict[str, tuple[int, ...]]]:
    """The model, and the shapes to run it with: as given, as `typical` says if it says anything, as in the profile
    beside it, or asked for on a terminal. `models` remembers what is found. InputError for a model that cannot be
    run."""
    models = models or ExaminedModels(copy.folder)
    given, shapes = shapes, shapes or _kept_shapes(copy.original)
    known = models.examined(copy, shapes, declared)
    complete = with_open_sizes(copy.original, known, {**typical(known), **given} or shapes)
    if complete != shapes:
        known = models.examined(copy, complete, declared)
    if known.fault is not None:
        raise known.fault.error
    return known, complete


def _kept_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """The shapes that the profile beside the model was measured with."""
    with suppress(InputError):
        return dict(load_profile(path_beside(model)).shapes)
    return {}


def with_open_sizes(model: Path, known: ExaminedModel, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """`shapes`, and the shapes of all other inputs with open dimensions, whose sizes are asked for on a terminal.

    InputError without a terminal; its help is the option to give.
    """
    missing = [each for each in known.dimensions if not all(name in shapes for name, _ in each.ports)]
    if not missing:
        return dict(shapes)
    proposed = row_shapes(known.signature, missing, [each.proposal for each in missing])
    without = {port.name for port in known.signature.inputs if not port.has_rows}
    if without.issuperset(proposed) and len(without) < len(known.signature.inputs):
        given = " ".join(f"--shape {name}={','.join(map(str, row))}" for name, row in proposed.items())
        click.echo(f"{model.name}: sizes of inputs without rows are unknown; it is measured with {given}", err=True)
        return {**proposed, **shapes}
    if not is_terminal():
        named = listed([each.name for each in missing])
        options = " ".join(f"--shape {name}={','.join(map(str, row))}" for name, row in proposed.items())
        what = f"besides its first dimension, the size of {named} is open"
        help = f"give the shape of one row, for example: {options}"
        if known.refusal:
            what += f"; {known.refusal.partition('; ')[0]}"
            help = f"give the shape of one row that it takes, in place of: {options}"
        raise InputError(what, where=str(model), help=help)
    click.echo(f"{model.name} has open dimensions besides the first; with which sizes should it be measured?", err=True)
    size = click.IntRange(min=1)
    sizes = []
    for each in missing:
        inputs = listed([name for name, _ in each.ports])
        sizes.append(click.prompt(f"{each.name} (of {inputs})", type=size, default=each.proposal, err=True))
    return {**row_shapes(known.signature, missing, sizes), **shapes}


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The name of an input and its dimensions: `data=3,224,224`."""
    name, _, sizes = text.partition("=")
    try:
        return name, tuple(int(size) for size in sizes.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not NAME=SIZES; write data=3,224,224") from None


shape_option = click.option(
    "--shape",
    "shapes",
    type=shape,
    multiple=True,
    metavar="NAME=SIZES",
    help="Shape of one row of an input with open dimensions, or the whole shape of an input without rows "
    "[default: as in the profile beside the model, or asked for].",
)
