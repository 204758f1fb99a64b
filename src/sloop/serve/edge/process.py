"""An edge: HTTP or gRPC in front, records of the deciding process behind.

`EdgeServer` is the edge itself. `sloop.serve.edges` starts its process as
`python -m sloop.serve.edge.process LINK PORT ARENA PARENT`, where all but the last are file descriptors; its settings
come on stdin. It never outlives the server, holds nothing that must not be lost, and ends when its socket closes.
"""

import asyncio
import gc
import os
import resource
import socket
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop
from msgspec import Struct

from sloop.app.limits import ServerLimits
from sloop.memory import return_large_memory
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.http import HttpServer
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.large import LargeJson
from sloop.serve.edge.listener import Tls
from sloop.serve.edge.rest import Rest
from sloop.serve.edge.service import InferenceService, Keys, Model
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.heartbeat import HEARTBEAT_S
from sloop.serve.messages import (
    Close,
    EdgeCounts,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    ReloadFiles,
    Report,
    RequestEnded,
    ToEdge,
)
from sloop.serve.network import NodeTls
from sloop.serve.private import NOBODY
from sloop.serve.processes import begin
from sloop.serve.stderr import log_directly
from sloop.serve.transport import RecordLink
from sloop.shared_memory import Arena

if TYPE_CHECKING:
    from sloop.serve.edge.grpc.server import Rpc

LAST_READ_S: Final = 0.1
"""After the drain, ports stay open for so long: what clients have sent by then, but nobody has read, is answered."""
LEAVE_S: Final = 0.5
"""How long clients have to receive their last answers after the drain."""
COUNT_S: Final = 1.0
"""How often an edge reports its counts."""
GRPC_BYTES: Final = 2**30
"""What an edge for gRPC may have in memory beside twice the bytes of its requests. Grpcio's server counts neither what
it receives nor what it sends; if a flood of messages of clients with keys exceeds this, the edge ends, and another one
takes its place."""
GARBAGE_MIN: Final = 50_000
"""Allocations before Python searches for cyclic garbage. Requests create none; with Python's default of 700, the search
took a third of a request's time."""


class EdgeSettings(Struct, frozen=True):
    """What an edge is told at its start. Its bounds are its share of the server's."""

    limits: ServerLimits
    cors_origin: str = ""
    """The origin whose pages in a browser may use the server, `*` for all, empty for none."""
    tls: Tls | None = None
    api_key: str = ""
    api_key_file: Path | None = None
    has_repository: bool = False
    access_log: str = ""
    """A path, `-` for stdout, or empty for none."""
    arena: int = 0
    """The number of its arena."""
    token: bytes = b""
    """Of the deployment, if answers may come from other machines."""
    node_tls: NodeTls | None = None
    """How machines check each other."""
    log_group: int = NOBODY
    """The number of a group that may read the access log."""
    socket_folder: Path | None = None
    """Of an edge for gRPC: the folder for its Unix socket. None for an edge for HTTP."""

    def encode(self) -> bytes:
        """As bytes, for `decode`."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, data: bytes) -> "EdgeSettings":
        """What was encoded."""
        return msgspec.json.decode(data, type=cls, dec_hook=_path)


def _path(kind: type, text: object) -> Any:  # noqa: ANN401  # msgspec's signature
    return kind(text)


class EdgeServer:
    """One edge. `send` passes records to the deciding process, whose process id is `holder`."""

    def __init__(self, settings: EdgeSettings, send: Callable[[FromEdge], None], arena: Arena, holder: int) -> None:
        self._arena = arena
        self.sink = EdgeSink(send, arena, holder, settings.token, settings.node_tls)
        limits = settings.limits
        bodies = BodyMemory(limits.body_bytes, limits.bodies_bytes_max, limits.json_body_bytes)
        self.keys = Keys(settings.api_key, settings.api_key_file)
        has_repository = settings.has_repository
        self.service = InferenceService(self.sink, bodies, self.keys, has_repository=has_repository)
        self._large: LargeJson | None = None
        self.port = self._web(settings) if settings.socket_folder is None else self._rpc(settings)
        """What speaks with the clients."""
        self._access = AccessLog(settings.access_log, settings.log_group) if settings.access_log else None
        self.port.access = self._access
        self._allocated_bytes = 0
        self.acts: Mapping[type, Callable[[Any], None]] = {
            RequestEnded: self.sink.on_end,
            Free: self.sink.on_free,
            Page: self.sink.on_page,
            OfferModel: self._offer,
            Report: lambda _: self.port.drain(),
            ReloadFiles: lambda _: self._reload(),
            Holders: self.sink.set_holders,
        }
        """What to do for each kind of record."""

    def _web(self, settings: EdgeSettings) -> "HttpServer | Rpc":
        self._large = LargeJson()
        rest = Rest(self.service, self._large)
        return HttpServer(
            rest.answer,
            bodies=self.service.bodies,
            limits=settings.limits,
            cors_origin=settings.cors_origin,
            tls=settings.tls,
            authorise=rest.authorise,
            deadline_ns=rest.deadline_ns,
        )

    def _rpc(self, settings: EdgeSettings) -> "HttpServer | Rpc":
        from sloop.serve.edge.grpc.server import Rpc  # noqa: PLC0415  # edges for HTTP need no grpcio, which takes 30 MB

        assert settings.socket_folder is not None
        return Rpc(self.service, settings.socket_folder, limits=settings.limits, tls=settings.tls)

    async def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, which this object then owns."""
        started = self.port.start(sock)
        if started is not None:
            await started

    async def close(self) -> None:
        """Give clients a moment to send what is under way and to take their answers, then close all connections."""
        await asyncio.sleep(LAST_READ_S)
        await self.port.close(LEAVE_S)
        if self._large is not None:
            self._large.close()
        if self._access is not None:
            self._access.close()

    def counts(self) -> EdgeCounts:
        """What was counted so far, and what is held now. Call it about once in `COUNT_S`: memory that was not used
        since the call before is given back."""
        self._trim()
        port, bodies = self.port, self.service.bodies
        return EdgeCounts(
            held_bytes=bodies.held_bytes,
            unsent_bytes=port.unsent_bytes,
            connections=len(port.listener.connections),
            refused=dict(bodies.refused),
            refused_connections=dict(port.listener.refused),
            expired=dict(port.expired),
            keys=dict(self.keys.accepted),
            keys_refused=dict(self.keys.refused),
            models={name: (quota.held_bytes, dict(quota.refused)) for name, quota in bodies.quotas.items()},
            lines_dropped=self._access.dropped if self._access is not None else 0,
        )

    def _trim(self) -> None:
        if self._arena.allocated_bytes == self._allocated_bytes:
            self._arena.trim()
        self._allocated_bytes = self._arena.allocated_bytes

    def _reload(self) -> None:
        self.keys.reload()
        self.port.listener.reload()
        if self._access is not None:
            self._access.reopen()

    def _offer(self, record: OfferModel) -> None:
        if not record.answers:
            self.service.remove(record.name)
            self.sink.withdraw(record.name)
            return
        self.sink.offer(record)
        validator = InputValidator(record.signature)
        described = (record.limits, record.labels, record.versions, record.joining)
        self.service.add(Model(record.name, record.slo_ns, validator, *described))


class EdgeProcess:
    """An edge in a process of its own."""

    def __init__(
        self, loop: AbstractEventLoop, sock: socket.socket, settings: EdgeSettings, arena: Arena, holder: int
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._ended = asyncio.Event()
        self._link = RecordLink(loop, sock, ToEdge, {}, self._on_end)
        self._server = EdgeServer(settings, self._link.send, arena, holder)
        self._link.acts = {**self._server.acts, Close: lambda _: self._ended.set()}

    async def serve(self, port: socket.socket) -> None:
        """Serve until the deciding process says that it is over, or closes the socket."""
        await self._server.start(port)
        self._count()
        self._send_heartbeat()
        await self._ended.wait()
        await self._server.close()
        self._link.send(self._server.counts())
        self._link.flush()
        self._link.close()

    def _on_end(self, why: str) -> None:
        """The deciding process has gone: nothing can be answered any more."""
        os._exit(1)

    def _send_heartbeat(self) -> None:
        self._link.send_now()
        self._loop.call_later(HEARTBEAT_S, self._send_heartbeat)

    def _count(self) -> None:
        self._link.send(self._server.counts())
        self._loop.call_later(COUNT_S, self._count)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process; the module docstring lists its arguments."""
    link, port, memory, parent = map(int, arguments)
    begin(parent, (link, port, memory))
    log_directly()
    settings = EdgeSettings.decode(sys.stdin.buffer.read())
    arena = Arena(settings.arena, memory)
    if settings.socket_folder is not None:
        os.environ["GRPC_VERBOSITY"] = "NONE"  # it writes a line for each broken head
        most = 2 * settings.limits.bodies_bytes_max + GRPC_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    async def serve() -> None:
        edge = EdgeProcess(asyncio.get_running_loop(), socket.socket(fileno=link), settings, arena, parent)
        await edge.serve(socket.socket(fileno=port))

    return_large_memory()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])
    uvloop.run(serve())


if __name__ == "__main__":
    main(sys.argv[1:])
