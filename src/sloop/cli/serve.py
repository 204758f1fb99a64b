"""`sloop serve`: serves applications with the Open Inference Protocol v2 over HTTP and gRPC."""

import logging
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from sloop.app.application import ROWS_MOST, Deployment, SystemChoice
from sloop.app.document import NAME
from sloop.app.load import EDGES_MAX, model_urls
from sloop.cli.agent import endpoint_of, node_tls_of, spares_option
from sloop.cli.command import (
    FILE,
    FOLDER,
    HOST,
    AppPath,
    CommandOutput,
    Number,
    Shapes,
    check_systems,
    check_temporary,
    chosen_system,
    command,
    examined,
    loaded,
    print_output,
    progress,
    shape_option,
    slo_option,
    tensors_line,
    with_deadlines,
)
from sloop.cli.pull import cache_of, fetched_models, models_options
from sloop.errors import InputError, SloopError
from sloop.profile.examine import Declared
from sloop.profile.measure import BRIEF_EACH_S, BRIEF_S, first_profile, kept_profile
from sloop.profile.model import model_label
from sloop.profile.operators import use as use_operators
from sloop.profile.profile import FirstProfile, Profile, Sample
from sloop.serve.backends.agents import NodeSettings
from sloop.serve.copies import ExaminedModels, ModelCopy, private_copy, unprofiled
from sloop.serve.cpu_quota import confined
from sloop.serve.dataflow import check_wiring
from sloop.serve.deploy import COPIES, ROWS_MAX, UnloadedModel, signatures_of
from sloop.serve.edge.bodies import JSON_BYTES_MAX
from sloop.serve.edge.http import IDLE_S, HttpSettings
from sloop.serve.edge.listener import Tls
from sloop.serve.journal import LogLimits
from sloop.serve.private import group_of
from sloop.serve.server import GRACE_S, Serving, Settings, check_usable, stoppable
from sloop.serve.server import serve as serve_until_stopped
from sloop.serve.spans import SpanSettings
from sloop.serve.stderr import never_waiting
from sloop.text import counted, host_and_port, listed, number

PORT = click.IntRange(0, 65535)
POSITIVE = Number(min=0, min_open=True)
OFF: Final = "off"
KEY_VARIABLE: Final = "SLOOP_API_KEY"
EXAMPLE = """
sloop serve app.yaml
sloop serve squeezenet.onnx
sloop serve https://models.example.org/resnet.onnx
sloop serve digits.yaml words.yaml
sloop serve app.yaml --system static --http-port 9000 --state /var/lib/sloop
sloop serve app.yaml --host 0.0.0.0 --api-key-file /etc/sloop/keys
"""
_log = logging.getLogger("sloop.cli")


class PortOrOff(click.ParamType[int | None]):
    """A port as a number, or None for `off`."""

    name = "port"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Click's method. `fail` raises wrong use."""
        return None if value in (None, OFF) else int(PORT(value, param, ctx))

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """How it is written in the help."""
        return f"[PORT|{OFF}]"


def listening_options(command: Callable[..., None]) -> Callable[..., None]:
    """The address and the ports for clients."""
    options = (
        click.option(
            "--host",
            type=HOST,
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; 0.0.0.0 listens on all addresses of IPv4, :: on all.",
        ),
        click.option(
            "--http-port", type=PORT, default=8000, show_default=True, help="Port for HTTP; 0 chooses a free one."
        ),
        click.option(
            "--grpc-port",
            type=PortOrOff(),
            default="8001",
            show_default=True,
            help="Port for gRPC; 0 chooses a free one, off leaves gRPC and its process out.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def key_options(command: Callable[..., None]) -> Callable[..., None]:
    """The keys of clients."""
    options = (
        click.option(
            "--api-key",
            envvar=KEY_VARIABLE,
            default="",
            help="Accept only requests with this key. Others can read it in the process list; prefer --api-key-file. "
            f"[env: {KEY_VARIABLE}]",
        ),
        click.option(
            "--api-key-file",
            type=FILE,
            metavar="FILE",
            help="Accept only requests with a key of this file: one per line, as KEY, NAME KEY or NAME KEY admin. "
            "It is read again when it changes, and on SIGHUP.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def warn_of_visible_key() -> None:
    """Warn if the key was given where others can read it."""
    if click.get_current_context().get_parameter_source("api_key") is ParameterSource.COMMANDLINE:
        _log.warning("--api-key stands in the process list, where others can read it: use --api-key-file")


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about connections; `connections_of` reads them."""
    options = (
        click.option("--tls-cert", type=FILE, help="Certificate, with its chain (PEM); HTTP and gRPC then need TLS."),
        click.option("--tls-key", type=FILE, help="Unencrypted key of the certificate (PEM)."),
        click.option("--tls-client-ca", type=FILE, help="Accept only clients with a certificate of this authority."),
        click.option("--cors-origin", default="", help="Origin whose web pages may use the server; * for all."),
        click.option(
            "--head-s",
            type=POSITIVE,
            default=10.0,
            show_default=True,
            help="Close an HTTP connection whose client takes longer for request line and headers.",
        ),
        click.option(
            "--body-s",
            type=POSITIVE,
            default=60.0,
            show_default=True,
            help="Close an HTTP connection whose client takes longer for a body, or reads an answer too slowly.",
        ),
        click.option(
            "--idle-s",
            type=POSITIVE,
            default=IDLE_S,
            show_default=True,
            help="Close an HTTP connection whose client sends no request for so many seconds. Choose more than a "
            "proxy in front of the server keeps idle connections.",
        ),
        click.option(
            "--connections",
            type=click.IntRange(min=1),
            help="Most open connections to each edge, and to the port of gRPC; at the limit, those without an "
            "authorised request are closed first for new ones [default: 16384, or what the limit of file descriptors "
            "allows].",
        ),
        click.option(
            "--connections-each",
            type=click.IntRange(min=1),
            help="The same from one address (of IPv6, one /64) [default: half of --connections].",
        ),
        click.option(
            "--answers-bytes",
            type=click.IntRange(min=1),
            default=2**28,
            show_default=True,
            help="Memory of each edge for answers over HTTP that clients have not taken; beyond it, stalled "
            "connections are closed.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def connections_of(given: Mapping[str, Any]) -> HttpSettings:
    """The settings of `connection_options`. InputError if a file of TLS is missing or cannot be used."""
    cert, key, client_ca = given["tls_cert"], given["tls_key"], given["tls_client_ca"]
    if (cert is None) != (key is None) or (client_ca is not None and cert is None):
        missing = "--tls-key" if key is None and cert is not None else "--tls-cert"
        raise InputError(f"{missing} is missing", help="TLS needs --tls-cert and --tls-key")
    tls = None if cert is None else Tls(cert, key, client_ca)
    if tls is not None:
        tls.context()
    return HttpSettings(
        head_s=given["head_s"],
        body_s=given["body_s"],
        idle_s=given["idle_s"],
        connections_max=given["connections"] or 0,
        each_address_max=given["connections_each"] or 0,
        answers_bytes_max=given["answers_bytes"],
        cors_origin=given["cors_origin"],
        tls=tls,
    )


def node_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about other machines; `nodes_of` reads them."""
    options = (
        click.option(
            "--backend",
            type=click.Choice(["local", "ray", "agents"]),
            default="local",
            show_default=True,
            help="Where replicas run: on this machine, on the nodes of a Ray cluster (needs pip install ray), or where "
            "`sloop agent` runs.",
        ),
        click.option(
            "--address",
            default="",
            help="With --backend ray: the cluster's address, or auto for that of this machine [default: start one]. "
            "With --backend agents: the address HOST:PORT at which this server waits for agents.",
        ),
        click.option(
            "--agents-port",
            type=PORT,
            default=0,
            help="With --backend ray: the port for agents [default: a free one].",
        ),
        click.option(
            "--token-file",
            type=FILE,
            metavar="FILE",
            help="The token of the deployment, which agents must know; --backend agents needs one.",
        ),
        click.option(
            "--agents-tls-cert",
            type=FILE,
            metavar="FILE",
            help="Certificate of this machine (PEM); all connections between the machines then need TLS, on both "
            "sides. With --backend ray these three files must be on every node, under the same paths.",
        ),
        click.option("--agents-tls-key", type=FILE, metavar="FILE", help="Unencrypted key of the certificate (PEM)."),
        click.option(
            "--agents-tls-ca", type=FILE, metavar="FILE", help="Authority that has issued the machines' certificates."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def nodes_of(given: Mapping[str, Any]) -> NodeSettings | None:
    """The settings of `node_options`."""
    backend, address, token_file = given["backend"], given["address"], given["token_file"]
    names = ("address", "agents_port", "token_file", "agents_tls_cert", "agents_tls_key", "agents_tls_ca")
    spares = click.get_current_context().get_parameter_source("spare_workers")
    if backend != "local" and spares is ParameterSource.COMMANDLINE:
        raise click.UsageError("--spare-workers is for --backend local; give it to `sloop agent`")
    if backend == "local":
        unused = next((name for name in names if given[name]), "")
        if unused:
            option = f"--{unused.replace('_', '-')}"
            raise click.UsageError(f"{option} has no meaning with --backend local; add --backend ray or agents")
        return None
    tls = node_tls_of(given, "--agents-tls")
    if backend == "ray":
        return NodeSettings(ray_address=address, port=given["agents_port"], token_file=token_file, tls=tls)
    if given["agents_port"]:
        raise click.UsageError("--agents-port is for --backend ray; with agents, --address has the port")
    if not address or token_file is None:
        missing = "--token-file" if address else "--address"
        raise click.UsageError(f"--backend agents needs {missing}")
    return NodeSettings(None, *endpoint_of(address), token_file, tls)


@command("serve", example=EXAMPLE)
@click.argument("apps", nargs=-1, required=True, type=AppPath())
@click.option(
    "--name", help="What clients call the application [default: as its file says, or as the model is called]."
)
@listening_options
@click.option("--system", metavar="NAME", help="Run this system instead of the one that APPS name.")
@slo_option
@click.option("--no-profile", is_flag=True, help="Refuse a model without a profile instead of measuring it first.")
@shape_option
@models_options
@key_options
@click.option(
    "--state",
    type=FOLDER,
    help="Folder for lock, control socket, copies of models and event log [default: .sloop/NAME].",
)
@click.option(
    "--log",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Whether to keep an event log, which explain and replay read.",
)
@click.option(
    "--log-bytes",
    type=click.IntRange(min=2**24),
    default=2**30,
    show_default=True,
    help="Most bytes of the event log, with those of earlier runs; the oldest segments are deleted.",
)
@click.option(
    "--log-age-h", type=Number(min=0), default=0.0, help="Hours after which a segment is deleted [default: never]."
)
@click.option(
    "--log-sample",
    type=Number(min=0, max=1),
    default=1.0,
    help="Fraction of the requests served in time to log; all other requests are logged. A log with a sample cannot be "
    "replayed. [default: all]",
)
@click.option(
    "--edges",
    type=click.IntRange(min=1, max=EDGES_MAX),
    help="Processes that accept connections of HTTP and parse requests; gRPC has one of its own [default: the "
    "deployment's, or 1].",
)
@click.option(
    "--access-log",
    default="",
    metavar="FILE",
    help="Write a line of JSON for each answer to FILE; - writes to stdout. [default: none]",
)
@click.option(
    "--log-group",
    default="",
    metavar="GROUP",
    help="Let this group read event log and access log, such as that of a program that collects them [default: none].",
)
@click.option(
    "--otlp",
    default="",
    metavar="URL",
    help="Send OpenTelemetry spans of requests to this receiver (OTLP over HTTP), such as http://localhost:4318. Needs "
    "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
)
@click.option(
    "--otlp-ratio",
    type=Number(min=0, max=1),
    default=1.0,
    help="Of the requests that come without a traceparent, the fraction that is traced. [default: all]",
)
@click.option(
    "--body-bytes",
    type=click.IntRange(min=1),
    default=2**26,
    show_default=True,
    help="Largest body of a request; larger ones are answered 413.",
)
@click.option(
    "--bodies-bytes",
    type=click.IntRange(min=1),
    help="Memory for the bodies of all open requests; beyond it new ones are answered 503 "
    "[default: the deployment's limit, or 1 GiB].",
)
@click.option(
    "--json-body-bytes",
    type=click.IntRange(min=1),
    default=JSON_BYTES_MAX,
    show_default=True,
    help="Largest JSON in a body. Binary tensors do not count; --body-bytes limits the whole.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=1, max=ROWS_MOST),
    help="Most rows of one request to an application whose file sets no `limits: {rows: N}` "
    f"[default: the deployment's limit, or {ROWS_MAX}].",
)
@connection_options
@node_options
@click.option(
    "--repository",
    type=FOLDER,
    help="Let clients whose key has the role admin load and unload the files NAME.yaml of this folder (Triton's model "
    "repository).",
)
@click.option(
    "--grace-s",
    type=Number(min=0),
    default=GRACE_S,
    show_default=True,
    help="Seconds to go on serving after SIGTERM, as not ready, until load balancers have noticed. Ctrl-C, or a second "
    "signal, skips them.",
)
@click.option(
    "--drain-s",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to finish open requests before they fail, after --grace-s.",
)
@spares_option
@stoppable()
@never_waiting()
def serve(
    apps: tuple[Path | str, ...],
    host: str,
    http_port: int,
    grpc_port: int,
    system: str | None,
    slo_ms: float | None,
    no_profile: bool,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    api_key: str,
    api_key_file: Path | None,
    state: Path | None,
    log: str,
    log_bytes: int,
    log_age_h: float,
    log_sample: float,
    edges: int | None,
    access_log: str,
    otlp: str,
    otlp_ratio: float,
    body_bytes: int,
    bodies_bytes: int | None,
    json_body_bytes: int,
    repository: Path | None,
    **others: Any,  # noqa: ANN401  # see connections_of, nodes_of and cache_of
) -> None:
    """Serve APPS until SIGTERM or Ctrl-C: application files, a deployment file, models or their URLs, folders with one
    of these, or Triton model repositories. A model is an application of one stage, with a deadline by its speed.

    A model without a profile is measured first, for about ten seconds, and the profile is kept beside it.

    As soon as the server listens it prints its addresses and the path of its event log. `sloop deploy` adds, replaces
    and removes applications while it serves.
    """
    os.environ.pop(KEY_VARIABLE, None)  # user code, which loading an application may run, need not see it
    context = click.get_current_context()
    warn_of_visible_key()
    check_temporary()
    models = fetched_models(model_urls(apps), cache_of(others))
    deployment = _with_rows(_named(loaded(apps, slo_ms, models), others["name"]), others["rows"])
    settings = Settings(
        *(host, http_port, grpc_port, api_key, api_key_file),
        body_bytes_max=body_bytes,
        bodies_bytes_max=bodies_bytes or 0,
        json_bytes_max=json_body_bytes,
        http=connections_of(others),
        nodes=nodes_of(others),
        state_folder=state,
        edges=edges,
        access_log=access_log,
        log_group=group_of(others["log_group"]),
        spans=SpanSettings(otlp, otlp_ratio) if otlp else None,
        log=None if log == "off" else LogLimits(log_bytes, 3600 * log_age_h, log_sample),
        repository=repository,
        grace_s=others["grace_s"],
        drain_s=others["drain_s"],
        spare_workers=others["spare_workers"],
    )
    choice, folder = chosen_system(system), check_usable(settings, deployment)
    known = ExaminedModels(folder / COPIES)
    first, left_out = ({}, {}) if no_profile else first_profiles(deployment, choice, folder, dict(shapes), known)
    deployment, notes = with_deadlines(deployment.without(left_out).with_profiles(first), slo_ms)
    _tell(notes)

    def on_start(server: Serving) -> None:
        with context.scope(cleanup=False):
            served = deployment.without(server.insight.refused)
            print_output(addresses(served, server, list(first.values()), is_secure=settings.http.tls is not None))

    serve_until_stopped(deployment, settings, choice=choice, on_start=on_start, left_out=left_out, examined=known)


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        click.echo(note, err=True)


def _named(deployment: Deployment, name: str | None) -> Deployment:
    """The deployment of one application, with another name for it."""
    if name is None:
        return deployment
    if len(deployment.applications) > 1:
        raise click.UsageError("--name is the name of a single application; several have those of their files.")
    if not NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name", where="--name", help="letters, digits, '.', '_' and '-', at most 100")
    return replace(deployment, name=name, applications=(replace(deployment.applications[0], name=name),))


def _with_rows(deployment: Deployment, rows: int | None) -> Deployment:
    """The deployment with this limit of rows for the applications that set none."""
    return deployment if rows is None else replace(deployment, limits=replace(deployment.limits, rows=rows))


def first_profiles(
    deployment: Deployment, choice: SystemChoice | None, folder: Path, shapes: Shapes, known: ExaminedModels
) -> tuple[dict[Path, FirstProfile], dict[str, UnloadedModel]]:
    """Profiles for the models that have none: kept in the state folder, or measured now. And, by name, the applications
    whose models cannot be measured; if there is no other, raises the first error. `known` gets what is found out."""
    missing = deployment.without_profile
    if missing:
        check_systems(deployment.under(choice) if choice else deployment)  # a mistake there is told before measuring
    found = {model: kept for model in missing if (kept := kept_profile(model, folder)) is not None}
    for first in found.values():
        click.echo(f"{model_label(first.model)}: its profile is {first.file}", err=True)
    measured = [model for model in missing if model not in found]
    if shapes and not measured:
        click.echo("--shape has no effect: every model has a profile", err=True)
    declared = {
        model: unprofiled(variant)
        for application in deployment.applications
        for stage in application.stages
        for variant in stage.variants
        if variant.model is not None and (model := Path(variant.model)) in measured
    }
    use_operators(name for each in declared.values() for name in each.operators)
    failed: dict[str, SloopError] = {}
    each_s = max(BRIEF_EACH_S, BRIEF_S / max(1, len(measured)))
    if measured:
        names, (has, it) = [model.name for model in measured], ("have", "each") if len(measured) > 1 else ("has", "it")
        what = f"{listed(names)} {has} no profile: {it} is tried, then measured for about {each_s:.2g} s"
        click.echo(what, err=True)
    for application in deployment.applications if measured else ():
        try:
            check_wiring(application, signatures_of(application, known))  # a mistake there is told before measuring
        except SloopError as error:
            failed[application.name] = _unless_all(error, failed, deployment)
    for place, (model, own) in enumerate(_divided(shapes, declared, known).items(), 1):
        users = [
            each.name
            for each in deployment.without(failed).applications
            if model in replace(deployment, applications=(each,)).without_profile
        ]
        try:
            if users:
                if len(measured) > 1:
                    click.echo(f"measuring {model_label(model)} ({place} of {len(measured)})", err=True)
                found[model] = _measured(model, folder, own, declared[model], known, each_s)
        except SloopError as error:
            for name in users:
                failed[name] = _unless_all(error, failed, deployment)
    files = {each.name: each.file for each in deployment.applications}
    return found, {name: UnloadedModel(error.what, files[name]) for name, error in failed.items()}


def _unless_all(error: SloopError, failed: Mapping[str, SloopError], deployment: Deployment) -> SloopError:
    """The error of one more application; raises the first one if no application is left."""
    if len(failed) + 1 >= len(deployment.applications):
        raise next(iter(failed.values()), error)
    return error


def _divided(shapes: Shapes, models: Mapping[Path, Declared], examined: ExaminedModels) -> dict[Path, Shapes]:
    """The shapes of each model's own inputs; wrong use for an input that none of several models has."""
    if not shapes or len(models) < 2:
        return dict.fromkeys(models, shapes)
    found = {model: examined.of(model, declared).signature for model, declared in models.items()}
    inputs = {model: {port.name for port in signature.inputs} for model, signature in found.items()}
    for name in shapes:
        if not any(name in names for names in inputs.values()):
            raise click.UsageError(f"--shape {name}=…: no model has an input of that name.")
    return {model: {name: row for name, row in shapes.items() if name in names} for model, names in inputs.items()}


def _measured(
    model: Path, folder: Path, shapes: Shapes, declared: Declared, models: ExaminedModels, seconds: float
) -> FirstProfile:
    with private_copy(model, folder / COPIES) as own:
        return _measured_copy(own, folder, shapes, declared, models, seconds)


def _measured_copy(
    own: ModelCopy, folder: Path, shapes: Shapes, declared: Declared, models: ExaminedModels, seconds: float
) -> FirstProfile:
    model = own.original
    known, rows = examined(own, dict(shapes), declared, models)
    with progress(f"measuring {model_label(model)}", total=1.0) as advance:

        def update(share: float, sample: Sample) -> None:
            advance(share, f"batch {sample.batch} on {sample.cores:g} cores: {sample.p99_ms:.3g} ms")

        first = first_profile(
            model, known, rows, folder, own=own.path, limit=confined, seconds=seconds, progress=update
        )
    click.echo(f"{model_label(model)}: {_speed(first.profile)}", err=True)
    full = f"sloop profile {shlex.quote(str(model))}"
    click.echo(f"this short profile is kept in {first.file}; `{full}` makes a full one", err=True)
    return first


def _speed(profile: Profile) -> str:
    """The time of a single request, and the most rows per second; both at the median, so that they can be compared."""
    single = min(profile.samples, key=lambda sample: (sample.batch, sample.cores))
    best = max(profile.samples, key=lambda sample: sample.batch / sample.p50_ms)
    one = f"{number(single.p50_ms)} ms for {counted(single.batch, 'row')} on {counted(single.cores, 'core')}"
    rows_s = number(1e3 * best.batch / best.p50_ms)
    most = f"{rows_s} rows/s in batches of {best.batch} on {counted(best.cores, 'core')}"
    planned_ms = number(profile.latency_ms.latency_ms(single.batch, single.cores))
    return f"{one}, or at most {most} (medians; {planned_ms} ms is the planned time of the first, for slower runs too)"


def addresses(
    deployment: Deployment, server: Serving, first: Sequence[FirstProfile] = (), *, is_secure: bool = False
) -> CommandOutput:
    """The server's addresses, its state folder and the path of its event log; with the profiles that were measured."""
    names = [application.name for application in deployment.applications]
    value = {
        "application": deployment.name,
        "applications": names,
        "http": f"{'https' if is_secure else 'http'}://{host_and_port(server.host, server.http_port)}",
        "grpc": None if server.grpc_port is None else host_and_port(server.host, server.grpc_port),
        "state": str(server.folder),
        "log": str(server.journal.path) if server.journal else None,
        "slo_ms": {each.name: each.slo_ms for each in deployment.applications},
        "profiles": [{"model": str(each.model), "profile": str(each.file)} for each in first],
    }
    log = f"event log {value['log']}" if value["log"] else "no event log"
    rpc = f" and grpc://{value['grpc']}" if value["grpc"] else ""
    where = f"at {value['http']}{rpc}; {log}"
    takes = [
        f"{tensors_line(model.name, model.signature)} at {value['http']}/v2/models/{model.name}/infer"
        for model in server.edges.models.values()
    ]
    return CommandOutput(value, [f"serving {listed(names)} {where}", *takes])
