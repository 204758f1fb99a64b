"""`sloop agent`: runs the replicas of one machine for a server on another."""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import uvloop

from sloop.cli.command import FILE, HOST, command
from sloop.cli.pull import cache_of, models_options
from sloop.memory import return_large_memory
from sloop.serve.agent import Agent, serve_until_signal
from sloop.serve.backends.local import usual_spares_max
from sloop.serve.network import NodeTls, read_token
from sloop.serve.stderr import never_waiting, reopen_outputs
from sloop.text import listed

EXAMPLE = "sloop agent --join 10.0.0.1:9000 --name local-1 --token-file /etc/sloop/token"


spares_option = click.option(
    "--spare-workers",
    type=click.IntRange(min=0),
    default=usual_spares_max,
    show_default="one for each core",
    help="Most spare workers: processes that have loaded Python and wait for a model, so that a replica starts sooner. "
    "There are as many as replicas were started together in the last ten minutes.",
)


def endpoint_of(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Wrong use for anything else."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 <= int(port) < 65536):
        raise click.UsageError(f"{text!r} is no address; write HOST:PORT, such as 10.0.0.1:9000")
    return host.strip("[]"), int(port)


def node_tls_of(given: Mapping[str, Any], prefix: str) -> NodeTls | None:
    """The files of the options PREFIX-cert, PREFIX-key and PREFIX-ca. Wrong use if some are missing, InputError if they
    cannot be used."""
    options = [f"{prefix}-{kind}" for kind in ("cert", "key", "ca")]
    files = [given[option.removeprefix("--").replace("-", "_")] for option in options]
    if not any(files):
        return None
    missing = [option for option, file in zip(options, files, strict=True) if file is None]
    if missing:
        raise click.UsageError(f"{missing[0]} is missing: TLS between machines needs {listed(options)}")
    tls = NodeTls(*(file.absolute() for file in files))
    tls.client_context()
    return tls


@command("agent", example=EXAMPLE)
@click.option("--join", required=True, metavar="HOST:PORT", help="Where the server waits for agents.")
@click.option("--name", required=True, help="Name of this node in the server's cluster, such as local-1.")
@click.option(
    "--token-file", required=True, type=FILE, metavar="FILE", help="The token of the deployment, which both must know."
)
@click.option(
    "--host",
    type=HOST,
    default="",
    help="Address of this machine for other agents [default: the one from which it connects].",
)
@click.option("--tls-cert", type=FILE, metavar="FILE", help="Certificate of this machine (PEM), if the server has one.")
@click.option("--tls-key", type=FILE, metavar="FILE", help="Unencrypted key of the certificate (PEM).")
@click.option("--tls-ca", type=FILE, metavar="FILE", help="Authority that has issued the machines' certificates.")
@spares_option
@models_options
@never_waiting()
def agent(join: str, name: str, token_file: Path, host: str, spare_workers: int, **others: Any) -> None:  # noqa: ANN401  # see node_tls_of and cache_of
    """Run replicas on this machine for the server at --join, until the server ends or SIGTERM arrives.

    The server orders what runs here. Models that applications name by URL are fetched into a cache; others must be
    readable under the same paths as on the server. If the connection is lost, the agent keeps its replicas for a
    minute and tries to connect again. If the server has died, the next server at this address adopts the replicas.
    """
    tls = node_tls_of(others, "--tls")
    made = Agent(
        *(endpoint_of(join), name, read_token(token_file)),
        host=host,
        tls=tls,
        make_cache=cache_of(others),
        spares_max=spare_workers,
    )

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reopen_outputs)
        await serve_until_signal(made, stop)

    return_large_memory()
    uvloop.run(main())
