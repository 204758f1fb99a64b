"""`sloop agent`: runs the replicas of one machine for a server on another."""

import asyncio
import signal
from pathlib import Path

import click
import uvloop

from sloop.cli.command import FILE, command
from sloop.serve.agent import Agent, serve_until_signal
from sloop.serve.network import read_token
from sloop.serve.processes import return_large_memory
from sloop.serve.stderr import never_waiting

EXAMPLE = "sloop agent --join 10.0.0.1:9000 --name local-1 --token-file /etc/sloop/token"


def endpoint_of(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Wrong use for anything else."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 <= int(port) < 65536):
        raise click.UsageError(f"{text!r} is no address; write HOST:PORT, such as 10.0.0.1:9000")
    return host.strip("[]"), int(port)


@command("agent", example=EXAMPLE)
@click.option("--join", required=True, metavar="HOST:PORT", help="Where the server waits for agents.")
@click.option("--name", required=True, help="Name of this node in the server's cluster, such as local-1.")
@click.option(
    "--token-file", required=True, type=FILE, metavar="FILE", help="The token of the deployment, which both must know."
)
@click.option(
    "--host", default="", help="Address of this machine for other agents [default: the one it connects from]."
)
@never_waiting()
def agent(join: str, name: str, token_file: Path, host: str) -> None:
    """Run replicas on this machine for the server at --join, until it ends or SIGTERM.

    The server orders what runs here; models must be readable under the same paths as on the server. If the connection
    is lost, the agent stops its replicas and connects again for a minute.
    """
    made = Agent(endpoint_of(join), name, read_token(token_file), host=host)

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_until_signal(made, stop)

    return_large_memory()
    uvloop.run(main())
