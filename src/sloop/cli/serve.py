"""`sloop serve`: serves an application with the Open Inference Protocol v2 over HTTP and gRPC."""

import logging
import sys
from pathlib import Path

import click

from sloop.app.application import SystemChoice
from sloop.app.load import load_application
from sloop.cli.command import CommandOutput, Number, command, print_output
from sloop.serve.server import Serving, Settings
from sloop.serve.server import serve as serve_until_stopped

PORT = click.IntRange(0, 65535)
EXAMPLE = """
sloop serve app.yaml
sloop serve app.yaml --system static --http-port 9000 --state /var/lib/sloop
"""


@command("serve", example=EXAMPLE)
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 listens on all.")
@click.option("--http-port", type=PORT, default=8000, show_default=True, help="Port for HTTP; 0 chooses a free one.")
@click.option("--grpc-port", type=PORT, default=8001, show_default=True, help="Port for gRPC; 0 chooses a free one.")
@click.option("--system", metavar="NAME", help="Run this system instead of the one that APP names.")
@click.option(
    "--api-key", envvar="SLOOP_API_KEY", default="", help="Accept only requests with this key [env: SLOOP_API_KEY]."
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the lock file and the event log [default: .sloop/NAME].",
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
    default=2**30,
    show_default=True,
    help="Memory for the bodies of all open requests; beyond it new ones are answered 503.",
)
@click.option(
    "--drain-s",
    type=Number(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to finish open requests after SIGTERM before they fail.",
)
def serve(
    app: Path,
    host: str,
    http_port: int,
    grpc_port: int,
    system: str | None,
    api_key: str,
    state: Path | None,
    body_bytes: int,
    bodies_bytes: int,
    drain_s: float,
) -> None:
    """Serve the application in APP until SIGTERM or Ctrl-C.

    As soon as the server listens it prints its addresses and the path of its event log.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    application = load_application(app)
    settings = Settings(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        api_key=api_key,
        body_bytes_max=body_bytes,
        bodies_bytes_max=bodies_bytes,
        state_folder=state,
        drain_s=drain_s,
    )
    context = click.get_current_context()

    def on_start(server: Serving) -> None:
        with context.scope(cleanup=False):
            print_output(addresses(application.name, server))

    serve_until_stopped(application, settings, choice=SystemChoice(system) if system else None, on_start=on_start)


def addresses(name: str, server: Serving) -> CommandOutput:
    """The server's addresses and the path of its event log."""
    value = {
        "application": name,
        "http": f"http://{server.host}:{server.http_port}",
        "grpc": f"{server.host}:{server.grpc_port}",
        "log": str(server.journal.path) if server.journal else None,
    }
    return CommandOutput(
        value, [f"serving {name} at {value['http']} and grpc://{value['grpc']}; event log {value['log']}"]
    )
