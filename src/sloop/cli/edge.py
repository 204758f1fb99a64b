"""`sloop edge`: faces clients on this machine for a server on another."""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import uvloop

from sloop.cli.agent import endpoint_of, node_tls_of
from sloop.cli.command import FILE, HOST, CommandOutput, Number, command, print_output
from sloop.cli.serve import (
    connection_options,
    connections_of,
    grace_option,
    key_options,
    listening_options,
    log_group_option,
    warn_of_visible_key,
)
from sloop.memory import return_large_memory
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.bodies import ALL_BYTES_MAX, JSON_BYTES_MAX
from sloop.serve.edge.joining import JoiningEdge, JoinSettings
from sloop.serve.edge.listener import listen, raise_descriptor_limit
from sloop.serve.edge.process import GARBAGE_MIN, EdgeSettings
from sloop.serve.edge.service import Keys
from sloop.serve.network import read_token
from sloop.serve.private import group_of
from sloop.serve.server import StopOrders, is_loopback
from sloop.serve.stderr import never_waiting, reopen_outputs
from sloop.text import host_and_port

EXAMPLE = """
sloop edge --join 10.0.0.1:9000 --token-file /etc/sloop/token --host 0.0.0.0 --api-key-file /etc/sloop/keys
"""
_log = logging.getLogger("sloop.cli")


def join_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about the deciding process; `joining_of` reads them."""
    options = (
        click.option("--join", required=True, metavar="HOST:PORT", help="Where the server waits for agents and edges."),
        click.option(
            "--token-file",
            required=True,
            type=FILE,
            metavar="FILE",
            help="The token of the deployment, which both must know.",
        ),
        click.option(
            "--agents-host",
            type=HOST,
            default="",
            metavar="HOST",
            help="Address of this machine at which agents fetch tensors [default: the one from which it connects].",
        ),
        click.option(
            "--agents-tls-cert",
            type=FILE,
            metavar="FILE",
            help="Certificate (PEM) that this machine shows to server and agents, if the server has one.",
        ),
        click.option("--agents-tls-key", type=FILE, metavar="FILE", help="Unencrypted key of the certificate (PEM)."),
        click.option(
            "--agents-tls-ca", type=FILE, metavar="FILE", help="Authority that has issued the machines' certificates."
        ),
        click.option(
            "--drain-s",
            type=Number(min=0),
            default=30.0,
            show_default=True,
            help="Open requests have so many seconds to finish before they fail, after --grace-s.",
        ),
        grace_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def joining_of(given: dict[str, Any]) -> JoinSettings:
    """The settings of `join_options`."""
    tls = node_tls_of(given, "--agents-tls")
    token = read_token(given["token_file"])
    return JoinSettings(endpoint_of(given["join"]), token, tls, given["agents_host"], given["drain_s"])


@command("edge", example=EXAMPLE)
@join_options
@listening_options
@key_options(" The server must demand keys too.")
@click.option(
    "--access-log",
    default="",
    metavar="FILE",
    help="Write a line of JSON for each answer to FILE; - writes to stdout. [default: none]",
)
@log_group_option
@connection_options
@never_waiting()
def edge(
    host: str,
    http_port: int,
    grpc_port: int,
    api_key: str,
    api_key_file: Path | None,
    access_log: str,
    **others: Any,  # noqa: ANN401  # see connections_of and joining_of
) -> None:
    """Accept requests of clients on this machine for the server at --join, until the server ends or SIGTERM arrives.

    The server must run with --backend agents, or with --backend ray and --agents-port. It decides where each request
    runs, and how many requests may be open at a time. If it cannot be reached, requests wait until their deadlines,
    and the edge tries for a minute to connect again.
    """
    warn_of_visible_key()
    given, keys = joining_of(others), Keys(api_key, api_key_file)
    log_group = group_of(others["log_group"])
    if access_log:
        AccessLog.check(access_log, log_group)
    settings = EdgeSettings(
        *(connections_of(others), ALL_BYTES_MAX, ALL_BYTES_MAX, JSON_BYTES_MAX, 1, api_key, api_key_file),
        access_log=access_log,
        log_group=log_group,
    )
    if not (keys.is_required or is_loopback(host)):
        _log.warning("listening on %s without an API key: everybody who can connect is served", host)
    context, scheme = click.get_current_context(), "http" if settings.http.tls is None else "https"

    async def main() -> None:
        orders = StopOrders(others["grace_s"])
        with closing(listen(host, http_port)) as web, closing(listen(host, grpc_port)) as grpc:
            places = [host_and_port(host, sock.getsockname()[1]) for sock in (web, grpc)]

            def on_start() -> None:
                found = {"http": f"{scheme}://{places[0]}", "grpc": places[1]}
                with context.scope(cleanup=False):
                    print_output(CommandOutput(found, [f"serving at {found['http']} and grpc://{found['grpc']}"]))

            made = JoiningEdge(given, settings, (web, grpc), on_start)

            def reload() -> None:
                made.reload()
                reopen_outputs()

            orders.begin(made.withdraw)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
            await orders.obey(made.serve(orders.drain_requested))

    raise_descriptor_limit()
    return_large_memory()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])
    uvloop.run(main())
