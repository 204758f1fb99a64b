"""`sloop serve`: serves applications with the Open Inference Protocol v2 over HTTP and gRPC."""

import logging
import sys
from pathlib import Path

import click

from sloop.app.application import Deployment, SystemChoice
from sloop.app.load import load_deployment
from sloop.cli.command import CommandOutput, Number, command, print_output
from sloop.serve.server import Serving, Settings
from sloop.serve.server import serve as serve_until_stopped
from sloop.text import listed

PORT = click.IntRange(0, 65535)
EXAMPLE = """
sloop serve app.yaml
sloop serve digits.yaml words.yaml
sloop serve app.yaml --system static --http-port 9000 --state /var/lib/sloop
"""


@command("serve", example=EXAMPLE)
@click.argument("apps", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 listens on all.")
@click.option("--http-port", type=PORT, default=8000, show_default=True, help="Port for HTTP; 0 chooses a free one.")
@click.option("--grpc-port", type=PORT, default=8001, show_default=True, help="Port for gRPC; 0 chooses a free one.")
@click.option("--system", metavar="NAME", help="Run this system instead of the one that APPS name.")
@click.option(
    "--api-key", envvar="SLOOP_API_KEY", default="", help="Accept only requests with this key [env: SLOOP_API_KEY]."
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for lock, control socket and event log [default: .sloop/NAME].",
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
    "--drain-s",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to finish open requests after SIGTERM before they fail.",
)
def serve(
    apps: tuple[Path, ...],
    host: str,
    http_port: int,
    grpc_port: int,
    system: str | None,
    api_key: str,
    state: Path | None,
    body_bytes: int,
    bodies_bytes: int | None,
    drain_s: float,
) -> None:
    """Serve the applications in APPS until SIGTERM or Ctrl-C: one file or several, or one deployment file.

    As soon as the server listens it prints its addresses and the path of its event log. `sloop deploy` adds, replaces
    and removes applications while it serves.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    deployment = load_deployment(apps)
    settings = Settings(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        api_key=api_key,
        body_bytes_max=body_bytes,
        bodies_bytes_max=bodies_bytes or 0,
        state_folder=state,
        drain_s=drain_s,
    )
    choice = SystemChoice(system, path="--system") if system else None
    context = click.get_current_context()

    def on_start(server: Serving) -> None:
        with context.scope(cleanup=False):
            print_output(addresses(deployment, server))

    serve_until_stopped(deployment, settings, choice=choice, on_start=on_start)


def addresses(deployment: Deployment, server: Serving) -> CommandOutput:
    """The server's addresses, its state folder and the path of its event log."""
    names = [application.name for application in deployment.applications]
    value = {
        "application": deployment.name,
        "applications": names,
        "http": f"http://{server.host}:{server.http_port}",
        "grpc": f"{server.host}:{server.grpc_port}",
        "state": str(server.folder),
        "log": str(server.journal.path) if server.journal else None,
    }
    where = f"at {value['http']} and grpc://{value['grpc']}; event log {value['log']}"
    return CommandOutput(value, [f"serving {listed(names)} {where}"])
