"""`sloop deploy`: adds, replaces and removes applications of a running server."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import RenderableType

from sloop.app.document import parse_yaml
from sloop.app.load import model_urls, read_system
from sloop.cli.command import FOLDER, AppPath, CommandOutput, Number, command, table, tell_notes
from sloop.cli.pull import CACHE_OPTIONS, fetched_models
from sloop.events import Promoted, Removed
from sloop.report.tables import Table
from sloop.serve.control.orders import (
    ChangeSystem,
    Deploy,
    Done,
    ListVersions,
    Order,
    find_server,
    send,
)
from sloop.vocabulary import Canary

EXAMPLE = """
sloop deploy words.yaml                     # a new application, or a new version of one
sloop deploy words.yaml --canary 10% --promote-after-s 600
sloop deploy https://models.example.org/resnet.onnx
sloop deploy --promote words
sloop deploy --remove words@2               # take a canary back
sloop deploy --application words --system '{name: hpa, target: 0.6}'
sloop deploy --list --json
"""
NOTES = """Without --server, the only running server with a state folder in .sloop is meant. The exit code is 1 if the
version was refused, given up or rolled back; whatever serves goes on serving."""


class Share(click.ParamType[float]):
    """A share of the requests: `10%` or `0.1`."""

    name = "share"

    def convert(
        self,
        value: str | float,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            self.fail(f"{value!r} is not a share above 0 % and below 100 %; write 10% or 0.1", param, ctx)
        return share


@command("deploy", example=EXAMPLE, notes=NOTES, removed=CACHE_OPTIONS)
@click.argument("app", required=False, type=AppPath())
@click.option(
    "--server",
    type=FOLDER,
    help="State folder of the server [default: the only one in .sloop].",
)
@click.option("--version", metavar="V", default="", help="Name of the new version [default: the next number].")
@click.option("--canary", type=Share(), metavar="SHARE", help="Give the new version this share at first, such as 10%.")
@click.option(
    "--promote-after-s",
    type=Number(min=0),
    metavar="S",
    help="Give a canary all requests after S seconds [default: only with --promote].",
)
@click.option(
    "--tolerance",
    type=Number(min=0, max=1),
    metavar="T",
    help="Roll a canary back if its attainment is lower by more than T (0.05: 5 percentage points) [default: 0.05].",
)
@click.option("--promote", metavar="NAME", help="Give the canary of application NAME all requests (NAME@V: version V).")
@click.option("--remove", metavar="NAME", help="Remove application NAME, or NAME@V, one version of it.")
@click.option(
    "--application",
    metavar="NAME",
    default="",
    help="The application for which --system decides [default: the only one].",
)
@click.option(
    "--system",
    metavar="S",
    help="Let another system decide from now on, without a new version: its name, or '{name: S, KEY: VALUE}'. Replicas "
    "and open requests stay.",
)
@click.option("--list", "lists", is_flag=True, help="List the versions that start, serve or end.")
def deploy(
    app: Path | str | None,
    server: Path | None,
    version: str,
    canary: float | None,
    promote_after_s: float | None,
    tolerance: float | None,
    promote: str | None,
    remove: str | None,
    application: str,
    system: str | None,
    lists: bool,
) -> CommandOutput:
    """Deploy the application in APP to a running server, promote, remove or list what it serves, or let another system
    decide for it. APP is what `sloop
    serve` takes: an application file, a model or its URL, a folder with one of these, or that of a Triton model.

    If the server has an application with the `name` in APP, this is a new version of it; otherwise a new application.
    The version that serves goes on until the new one is ready; then the new one gets all requests, or as a canary a
    share of them. A canary whose attainment is lower is rolled back. No request is lost.
    """
    if sum((app is not None, promote is not None, remove is not None, system is not None, lists)) != 1:
        raise click.UsageError("Give exactly one of APP, --promote, --remove, --system and --list.")
    if application and system is None:
        raise click.UsageError("--application applies only to --system.")
    about_canary = {"--canary": canary, "--promote-after-s": promote_after_s, "--tolerance": tolerance}
    given = [option for option, value in about_canary.items() if value is not None]
    if (given or version) and app is None:
        raise click.UsageError(f"{[*given, '--version'][0]} applies only to the deployment of an APP.")
    if given and canary is None:
        raise click.UsageError(f"{given[0]} applies only to a canary: add --canary 10%.")
    order: Order = ListVersions()
    if app is not None:
        path = app if isinstance(app, Path) else fetched_models(model_urls((app,)))[app]
        tell_notes((path,))
        order = Deploy(str(path.absolute()), version, _canary(canary, promote_after_s, tolerance))
    elif promote is not None:
        order = Promoted(*_named(promote))
    elif remove is not None:
        order = Removed(*_named(remove))
    elif system is not None:
        choice = read_system(parse_yaml(system, "--system"), Path.cwd())
        order = ChangeSystem(application, choice.name, dict(choice.parameters))
    done = send(find_server(server), order, lambda text: click.echo(text, err=True))
    return CommandOutput(done, _display(done), exit_code=0 if done.is_good else 1)


def _canary(share: float | None, promote_after_s: float | None, tolerance: float | None) -> Canary | None:
    if share is None:
        return None
    default = Canary(share)
    return Canary(share, promote_after_s or 0.0, default.tolerance if tolerance is None else tolerance)


def _named(name: str) -> tuple[str, str]:
    """The application and version of `NAME` or `NAME@VERSION`."""
    name, at, version = name.partition("@")
    if at and not version:
        raise click.UsageError(f"{name}@ names no version; write {name}@2.")
    return name, version


def _display(done: Done) -> Sequence[RenderableType]:
    has_model = any(each.model for each in done.versions)
    columns = ("application", "version", "state", "requests %", *(["model"] if has_model else []), "because")
    rows: tuple[tuple[str | float, ...], ...] = tuple(
        (each.application, each.version, each.state, 100 * each.share, *([each.model] if has_model else []), each.why)
        for each in done.versions
    )
    parts = [table(Table("", columns, rows))]
    compared = tuple(
        (
            each.application,
            each.version,
            found.requests,
            "–" if found.attainment is None else 100 * found.attainment,
            found.missing,
        )
        for each in done.versions
        if (found := each.compared) is not None
    )
    if compared:
        headings = ("application", "version", "requests", "in time %", "missing until judged")
        parts.append(table(Table("Canaries, since the comparison began", headings, compared)))
    if done.ended:
        ended = tuple((each.application, each.version, each.why) for each in done.ended)
        parts.append(table(Table("Ended last", ("application", "version", "because"), ended)))
    return parts
