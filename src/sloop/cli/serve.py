"""`sloop serve`: serves applications with the Open Inference Protocol v2 over HTTP and gRPC."""

import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from sloop.app.application import Deployment, SystemChoice
from sloop.app.document import NAME, parse_yaml, read_yaml
from sloop.app.limits import read_limits
from sloop.app.load import EDGES_MAX, model_urls
from sloop.cli.command import (
    FILE,
    FOLDER,
    HOST,
    AppPath,
    CommandOutput,
    GroupedOption,
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
from sloop.cli.pull import CACHE_OPTIONS, fetched_models
from sloop.errors import InputError, SloopError
from sloop.page.start import PageProcess, PageSetup, open_socket
from sloop.profile.examine import Declared
from sloop.profile.measure import BRIEF_EACH_S, BRIEF_S, first_profile, kept_profile
from sloop.profile.model import model_label
from sloop.profile.operators import use as use_operators
from sloop.profile.profile import FirstProfile, Profile, Sample
from sloop.serve.cluster.agents import NodeSettings
from sloop.serve.control.loading import UnloadedModel
from sloop.serve.control.servables import COPIES, signatures_of
from sloop.serve.copies import ExaminedModels, ModelCopy, private_copy, unprofiled
from sloop.serve.cpu_quota import confined
from sloop.serve.dataflow import check_wiring
from sloop.serve.edge.listener import Tls
from sloop.serve.network import NodeTls
from sloop.serve.private import group_of
from sloop.serve.server import GRACE_S, Serving, Settings, check_usable, is_loopback, stoppable
from sloop.serve.server import serve as serve_until_stopped
from sloop.serve.spans import SpanSettings
from sloop.serve.stderr import never_waiting
from sloop.text import counted, host_and_port, listed, number

PORT = click.IntRange(0, 65535)
OFF: Final = "off"
KEY_VARIABLE: Final = "SLOOP_API_KEY"
INTO_LIMITS: Final = "write `{key}` into `limits:` of the deployment, or into a file for --limits"
LIMITS: Final = (
    "answers_bytes",
    "body_bytes",
    "body_s",
    "connections",
    "connections_each",
    "drain_s",
    "head_s",
    "idle_s",
    "json_body_bytes",
    "log_age_h",
    "log_bytes",
    "log_sample",
    "otlp_ratio",
    "rows",
    "spare_workers",
)
"""Keys of limits that once were options of the same names."""
REMOVED: Final = {
    **{f"--{key.replace('_', '-')}": INTO_LIMITS.format(key=key) for key in LIMITS},
    "--bodies-bytes": INTO_LIMITS.format(key="bytes"),
    "--log": INTO_LIMITS.format(key="log_bytes") + "; 0 keeps no event log",
    "--api-key": f"write the key into a file for --api-key-file, or into the environment as {KEY_VARIABLE}",
    **{
        f"--agents-tls-{kind}": "name a folder with tls.crt, tls.key and ca.crt by --agents-tls"
        for kind in ("cert", "key", "ca")
    },
    "--token-file": "the state folder (--state) keeps a token, which Ray passes on to the nodes",
    **CACHE_OPTIONS,
}
"""What to write instead of options that `sloop serve` had before `--limits`."""
listening = partial(click.option, cls=GroupedOption, group="Clients")
keeping = partial(click.option, cls=GroupedOption, group="State, logs and spans")
nodes = partial(click.option, cls=GroupedOption, group="Other machines")
TLS_FILES: Final = ("tls.crt", "tls.key", "ca.crt")
"""As in secrets of Kubernetes."""
REMOVED_BACKENDS: Final = {
    "agents": "--backend agents is gone, because Ray starts agents: run `ray start` on each machine in place of "
    "`sloop agent`, and serve with --backend ray --address auto",
}
"""Per backend of earlier versions, what to use instead."""
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


def tls_of(given: Mapping[str, Any]) -> Tls | None:
    """The files of TLS for clients. InputError if one is missing or cannot be used."""
    cert, key, client_ca = given["tls_cert"], given["tls_key"], given["tls_client_ca"]
    if (cert is None) != (key is None) or (client_ca is not None and cert is None):
        missing = "--tls-key" if key is None and cert is not None else "--tls-cert"
        raise InputError(f"{missing} is missing", help="TLS needs --tls-cert and --tls-key")
    if cert is None:
        return None
    tls = Tls(cert, key, client_ca)
    tls.context()
    return tls


def node_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about other machines; `nodes_of` reads them."""
    options = (
        nodes(
            "--backend",
            type=click.Choice(["local", "ray", *REMOVED_BACKENDS]),
            metavar="[local|ray]",
            default="local",
            show_default=True,
            help="Where replicas run: on this machine, or on the nodes of a Ray cluster (needs pip install ray).",
        ),
        nodes(
            "--address",
            default="",
            help="With --backend ray: the cluster's address, or auto for that of this machine [default: start one].",
        ),
        nodes(
            "--agents-port",
            type=PORT,
            default=0,
            help="With --backend ray: the port for its nodes. With a fixed one, a server that takes the place of one "
            "that has died adopts its replicas [default: a free one].",
        ),
        nodes(
            "--agents-tls",
            type=FOLDER,
            metavar="FOLDER",
            help="Folder with tls.crt, tls.key and ca.crt (PEM), on every node under the same path: the certificate of "
            "the machine, its unencrypted key, and the authority of all machines. All connections between the machines "
            "then need TLS, on both sides.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def nodes_of(given: Mapping[str, Any]) -> NodeSettings | None:
    """The settings of `node_options`."""
    backend = given["backend"]
    if backend in REMOVED_BACKENDS:
        raise click.UsageError(REMOVED_BACKENDS[backend])
    if backend == "local":
        names = ("address", "agents_port", "agents_tls")
        unused = next((name for name in names if given[name]), "")
        if unused:
            option = f"--{unused.replace('_', '-')}"
            raise click.UsageError(f"{option} has no meaning with --backend local; add --backend ray")
        return None
    return NodeSettings(given["address"], given["agents_port"], node_tls_of(given["agents_tls"]))


def node_tls_of(folder: Path | None) -> NodeTls | None:
    """The files of TLS in a folder. InputError if they cannot be used."""
    if folder is None:
        return None
    tls = NodeTls(*(folder.absolute() / name for name in TLS_FILES))
    tls.client_context()
    return tls


@command("serve", example=EXAMPLE, removed=REMOVED)
@click.argument("apps", nargs=-1, required=True, type=AppPath())
@click.option(
    "--name", help="What clients call the application [default: as its file says, or as the model is called]."
)
@click.option("--system", metavar="NAME", help="Run this system instead of the one that APPS name.")
@slo_option
@click.option("--no-profile", is_flag=True, help="Refuse a model without a profile instead of measuring it first.")
@shape_option
@click.option(
    "--limits",
    metavar="FILE",
    help="YAML with limits of the server (sizes, times, connections, log), as below `limits:` of a deployment file, "
    "whose keys it replaces; or a mapping such as '{log_bytes: 1e8}'.",
)
@click.option(
    "--edges",
    type=click.IntRange(min=1, max=EDGES_MAX),
    help="Processes that accept connections of HTTP and parse requests; gRPC has one of its own [default: the "
    "deployment's, or 1].",
)
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
@listening(
    "--host",
    type=HOST,
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 listens on all addresses of IPv4, :: on all.",
)
@listening("--http-port", type=PORT, default=8000, show_default=True, help="Port for HTTP; 0 chooses a free one.")
@listening(
    "--grpc-port",
    type=PortOrOff(),
    default="8001",
    show_default=True,
    help="Port for gRPC; 0 chooses a free one, off leaves gRPC and its process out.",
)
@listening(
    "--api-key-file",
    type=FILE,
    metavar="FILE",
    help="Accept only requests with a key of this file: one per line, as KEY, NAME KEY or NAME KEY admin. It is read "
    f"again when it changes, and on SIGHUP. {KEY_VARIABLE} in the environment is one more key.",
)
@listening("--tls-cert", type=FILE, help="Certificate, with its chain (PEM); HTTP and gRPC then need TLS.")
@listening("--tls-key", type=FILE, help="Unencrypted key of the certificate (PEM).")
@listening("--tls-client-ca", type=FILE, help="Accept only clients with a certificate of this authority.")
@listening("--cors-origin", default="", help="Origin whose web pages may use the server; * for all.")
@listening(
    "--page",
    metavar="HOST:PORT",
    default="",
    help="Where people look at the server with a browser, or off. [default: 127.0.0.1:8002, or the next free port]",
)
@keeping(
    "--state",
    type=FOLDER,
    help="Folder for lock, control socket, copies of models and event log [default: .sloop/NAME].",
)
@keeping(
    "--access-log",
    default="",
    metavar="FILE",
    help="Write a line of JSON for each answer to FILE; - writes to stdout. [default: none]",
)
@keeping(
    "--log-group",
    default="",
    metavar="GROUP",
    help="Let this group read event log and access log, such as that of a program that collects them [default: none].",
)
@keeping(
    "--otlp",
    default="",
    metavar="URL",
    help="Send OpenTelemetry spans of requests to this receiver (OTLP over HTTP), such as http://localhost:4318. Needs "
    "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
)
@node_options
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
    limits: str | None,
    api_key_file: Path | None,
    state: Path | None,
    edges: int | None,
    access_log: str,
    otlp: str,
    repository: Path | None,
    **others: Any,  # noqa: ANN401  # see tls_of and nodes_of
) -> None:
    """Serve APPS until SIGTERM or Ctrl-C: application files, a deployment file, models or their URLs, folders with one
    of these, or Triton model repositories. A model is an application of one stage, with a deadline by its speed.

    A model without a profile is measured first, for about ten seconds, and the profile is kept beside it.

    As soon as the server listens it prints its addresses and the path of its event log. `sloop deploy` adds, replaces
    and removes applications while it serves.
    """
    api_key = os.environ.pop(KEY_VARIABLE, "")  # user code, which loading an application may run, need not see it
    context = click.get_current_context()
    check_temporary()
    models = fetched_models(model_urls(apps))
    deployment = _limited(_named(loaded(apps, slo_ms, models), others["name"]), limits)
    settings = Settings(
        *(host, http_port, grpc_port, api_key, api_key_file),
        tls=tls_of(others),
        cors_origin=others["cors_origin"],
        nodes=nodes_of(others),
        state_folder=state,
        edges=edges,
        access_log=access_log,
        log_group=group_of(others["log_group"]),
        spans=SpanSettings(otlp, deployment.limits.otlp_ratio) if otlp else None,
        repository=repository,
        grace_s=others["grace_s"],
        answers="sloop.page.answers",
    )
    choice, folder = chosen_system(system), check_usable(settings, deployment)
    known = ExaminedModels(folder / COPIES)
    first, left_out = ({}, {}) if no_profile else first_profiles(deployment, choice, folder, dict(shapes), known)
    deployment, notes = with_deadlines(deployment.without(left_out).with_profiles(first), slo_ms)
    _tell(notes)

    def on_start(server: Serving) -> None:
        with context.scope(cleanup=False):
            page, served = page_of(server, settings, others["page"]), server.deployment.without(server.insight.refused)
            print_output(addresses(served, server, page, list(first.values()), is_secure=settings.tls is not None))

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


def _limited(deployment: Deployment, given: str | None) -> Deployment:
    """The deployment with the limits in a file, or a mapping, instead of those of the same keys."""
    if given is None:
        return deployment
    declared = parse_yaml(given, "--limits") if given.lstrip().startswith("{") else read_yaml(Path(given))
    return replace(deployment, limits=read_limits(declared, deployment.limits))


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


def page_of(server: Serving, settings: Settings, where: str) -> str:
    """Start the page of a server at `where` (see --page); its URL, empty for none. It reads the event log."""
    if where == "off" or server.journal is None:
        return ""
    listening_socket = open_socket(where)
    if listening_socket is None:
        return ""
    host, port = listening_socket.getsockname()[:2]
    if not (settings.api_key or settings.api_key_file or is_loopback(host)):
        _log.warning("the page at %s has no API key: everybody who can connect may look and ask", host)
    scheme = "https" if settings.tls is not None else "http"
    now_ns = server.driver.now_ns
    setup = PageSetup(
        *(str(server.journal.path.absolute()), server.journal.run),
        *(time.monotonic_ns() - now_ns, time.time_ns() - now_ns),
        server=f"{scheme}://{host_and_port(server.host, server.http_port)}",
        api_key=settings.api_key,
        api_key_file=str(settings.api_key_file or ""),
        limits=server.deployment.limits,
        hosts=(socket.gethostname(),),
        shadows=tuple((choice.name, dict(choice.parameters)) for choice in server.deployment.shadows),
    )
    PageProcess(listening_socket, setup)
    return f"http://{host_and_port(host, port)}"


def addresses(
    deployment: Deployment,
    server: Serving,
    page: str = "",
    first: Sequence[FirstProfile] = (),
    *,
    is_secure: bool = False,
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
        "page": page or None,
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
    looks = [f"page at {page}"] if page else []
    return CommandOutput(value, [f"serving {listed(names)} {where}", *looks, *takes])
