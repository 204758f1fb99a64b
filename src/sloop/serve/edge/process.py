"""An edge: HTTP and gRPC in front, records of the deciding process behind.

`EdgeServer` is the edge itself. `sloop.serve.edges` starts its process as
`python -m sloop.serve.edge.process LINK WEB GRPC ARENA PARENT`, where all but the last are file descriptors; its
settings come on stdin. It never outlives the server, holds nothing that must not be lost, and ends when its socket
closes.
"""

import asyncio
import gc
import os
import socket
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from msgspec import Struct

from sloop.memory import return_large_memory
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.http import HttpServer, HttpSettings
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.rest import Rest
from sloop.serve.edge.rpc import Rpc
from sloop.serve.edge.service import InferenceService, Keys, Model
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.heartbeat import HEARTBEAT_S
from sloop.serve.messages import (
    CloseEdge,
    DrainEdge,
    EdgeCounts,
    EdgeHeartbeat,
    EdgeReady,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    ReloadFiles,
    RequestEnded,
    ToEdge,
    WithdrawModel,
)
from sloop.serve.network import NodeTls
from sloop.serve.private import NOBODY
from sloop.serve.processes import begin
from sloop.serve.stderr import log_directly
from sloop.serve.transport import RecordLink
from sloop.shared_memory import Arena

LAST_READ_S: Final = 0.1
"""After the drain, ports stay open for so long: what clients have sent by then, but nobody has read, is answered."""
LEAVE_S: Final = 0.5
"""How long clients have to receive their last answers after the drain."""
COUNT_S: Final = 1.0
"""How often an edge reports its counts."""
GARBAGE_MIN: Final = 50_000
"""Allocations before Python searches for cyclic garbage. Requests create none; with Python's default of 700, the search
took a third of a request's time."""


class EdgeSettings(Struct, frozen=True):
    """What an edge is told at its start. Its bounds are its share of the server's."""

    http: HttpSettings
    body_bytes_max: int
    bodies_bytes_max: int
    json_bytes_max: int
    requests_max: int
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

    def __init__(
        self, settings: EdgeSettings, send: Callable[[FromEdge], None], arena: Arena | None, holder: int
    ) -> None:
        self._arena = arena
        self.sink = EdgeSink(send, arena, holder, settings.token, settings.node_tls)
        bodies = BodyMemory(settings.body_bytes_max, settings.bodies_bytes_max, settings.json_bytes_max)
        self.keys = Keys(settings.api_key, settings.api_key_file)
        has_repository = settings.has_repository
        self.service = InferenceService(self.sink, self.sink, bodies, self.keys, has_repository=has_repository)
        rest = Rest(self.service)
        self.web = HttpServer(
            rest.answer,
            bodies=bodies,
            requests_max=settings.requests_max,
            settings=settings.http,
            authorise=rest.authorise,
            deadline_ns=rest.deadline_ns,
        )
        self.rpc = Rpc(
            self.service,
            requests_max=settings.requests_max,
            connections_max=settings.http.connections_max,
            each_address_max=settings.http.each_address_max,
            tls=settings.http.tls,
            intake=self.web.intake,
        )
        self._access = AccessLog(settings.access_log, settings.log_group) if settings.access_log else None
        self.web.access = self.rpc.server.access = self._access
        self._allocated_bytes = 0
        self.acts: Mapping[type, Callable[[Any], None]] = {
            RequestEnded: self.sink.on_end,
            Free: self.sink.on_free,
            Page: self.sink.on_page,
            OfferModel: self._offer,
            WithdrawModel: self._withdraw,
            DrainEdge: lambda _: self.web.drain(),
            ReloadFiles: lambda _: self._reload(),
            Holders: self.sink.set_holders,
        }
        """What to do for each kind of record."""

    def start(self, web: socket.socket, grpc: socket.socket) -> None:
        """Accept connections on two listening sockets, which this object then owns. Call it in the event loop."""
        self.web.start(web)
        self.rpc.start(grpc)

    def on_record(self, record: ToEdge) -> None:
        """Do what the deciding process says."""
        self.acts[type(record)](record)

    async def close(self) -> None:
        """Give clients a moment to send what is under way and to take their answers, then close all connections."""
        await asyncio.sleep(LAST_READ_S)
        # Both at the same time, so that clients who do not read delay the end once.
        await asyncio.gather(self.web.close(LEAVE_S), self.rpc.close(LEAVE_S))
        if self._access is not None:
            self._access.close()

    def counts(self) -> EdgeCounts:
        """What was counted so far, and what is held now. Call it about once in `COUNT_S`: memory that was not used
        since the call before is given back."""
        self._trim()
        web, grpc, bodies = self.web, self.rpc.server, self.service.bodies
        return EdgeCounts(
            held_bytes=bodies.held_bytes,
            unsent_bytes=web.unsent_bytes,
            connections=len(web.listener.connections) + len(grpc.listener.connections),
            refused=dict(bodies.refused),
            refused_connections=dict(web.listener.refused + grpc.listener.refused),
            expired=dict(web.expired),
            keys=dict(self.keys.accepted),
            keys_refused=dict(self.keys.refused),
            models={name: (quota.held_bytes, dict(quota.refused)) for name, quota in bodies.quotas.items()},
            lines_dropped=self._access.dropped if self._access is not None else 0,
        )

    def _trim(self) -> None:
        arena = self._arena
        if arena is not None:
            if arena.allocated_bytes == self._allocated_bytes:
                arena.trim()
            self._allocated_bytes = arena.allocated_bytes

    def _reload(self) -> None:
        self.keys.reload()
        self.web.listener.reload()
        self.rpc.server.listener.reload()
        if self._access is not None:
            self._access.reopen()

    def _offer(self, record: OfferModel) -> None:
        self.sink.offer(record)
        validator = InputValidator(record.signature)
        described = (record.limits, record.labels, record.versions, record.joining)
        self.service.add(Model(record.name, record.slo_ns, validator, *described))

    def _withdraw(self, record: WithdrawModel) -> None:
        self.service.remove(record.name)
        self.sink.withdraw(record.name)


class EdgeProcess:
    """An edge in a process of its own."""

    def __init__(
        self, loop: AbstractEventLoop, sock: socket.socket, settings: EdgeSettings, arena: Arena | None, holder: int
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._ended = asyncio.Event()
        self._link = RecordLink(loop, sock, ToEdge, self._on_record, self._on_end)
        self._server = EdgeServer(settings, self._link.send, arena, holder)
        self._acts: Mapping[type, Callable[[Any], None]] = {
            **self._server.acts,
            CloseEdge: lambda _: self._ended.set(),
        }

    async def serve(self, web: socket.socket, grpc: socket.socket) -> None:
        """Serve until the deciding process says that it is over, or closes the socket."""
        self._server.start(web, grpc)
        self._link.send(EdgeReady())
        self._count()
        self._send_heartbeat()
        await self._ended.wait()
        await self._server.close()
        self._link.send(self._server.counts())
        self._link.flush()
        self._link.close()

    def _on_record(self, record: ToEdge) -> None:
        self._acts[type(record)](record)

    def _on_end(self, why: str) -> None:
        """The deciding process has gone: nothing can be answered any more."""
        os._exit(1)

    def _send_heartbeat(self) -> None:
        self._link.send(EdgeHeartbeat())
        self._loop.call_later(HEARTBEAT_S, self._send_heartbeat)

    def _count(self) -> None:
        self._link.send(self._server.counts())
        self._loop.call_later(COUNT_S, self._count)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process; the module docstring lists its arguments."""
    link, web, grpc, memory, parent = map(int, arguments)
    begin(parent, (link, web, grpc, memory))
    log_directly()
    settings = EdgeSettings.decode(sys.stdin.buffer.read())
    arena = Arena(settings.arena, memory) if memory >= 0 else None

    async def serve() -> None:
        edge = EdgeProcess(asyncio.get_running_loop(), socket.socket(fileno=link), settings, arena, parent)
        await edge.serve(socket.socket(fileno=web), socket.socket(fileno=grpc))

    return_large_memory()
    gc.freeze()
    gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])
    uvloop.run(serve())


if __name__ == "__main__":
    main(sys.argv[1:])
