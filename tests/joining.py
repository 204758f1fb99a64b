"""Agents without Ray: a server to which agents connect that somebody else has started, and such an agent.

python tests/joining.py serve APP --backend ray --address HOST --agents-port PORT …
python tests/joining.py agent HOST PORT NAME [SPARES]
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import uvloop

from sloop.cli import main
from sloop.serve import server
from sloop.serve.cluster import agents, ray
from sloop.serve.cluster.agent import Agent
from sloop.serve.network import Endpoint, NodeTls
from sloop.vocabulary import Node

_log: Final = logging.getLogger("sloop.tests")
TOKEN: Final = b"0123456789abcdef0123456789abcdef"


class Memory(agents.NodeMemory):
    """Of servers whose agents know `TOKEN`."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.token = TOKEN


class JoiningNodes:
    """A `NodeProvider` that starts no agents."""

    def __init__(self, host: str = "127.0.0.1", _tls: NodeTls | None = None) -> None:
        self._host = host

    async def host(self) -> str:
        return self._host

    def want(self, nodes: Iterable[Node], join: Endpoint, token: bytes) -> None:
        _log.warning("waiting for the agents of %s", ", ".join(node.name for node in nodes))

    async def close(self) -> None: ...


async def serve_until_told(agent: Agent) -> None:
    """Serve until SIGINT or SIGTERM, or until the server says that it is over."""
    serving = asyncio.ensure_future(agent.serve())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        host, port, name, *spares = sys.argv[2:]
        own = Agent((host, int(port)), name, TOKEN, spares_max=int(spares[0]) if spares else 0)
        uvloop.run(serve_until_told(own))
    else:
        ray.RayNodes = JoiningNodes  # type: ignore[assignment,misc]
        server.NodeMemory = Memory  # type: ignore[attr-defined]
        main()
