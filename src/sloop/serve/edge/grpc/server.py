"""The Open Inference Protocol v2 over gRPC, for the same `InferenceService` as REST, on grpcio's server.

The key of a call is checked when its head (the headers) has come (`KeyCheck`), before the message is asked for: until
then grpcio holds at most a window of it (64 KiB). Messages are taken as they were sent, and decompressed here, where
that is bounded. Source: Open Inference Protocol v2, "GRPC", and "GRPC Health Checking Protocol".
"""

import asyncio
import json
import logging
import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from msgspec import Struct

from sloop.app.limits import ServerLimits, setting
from sloop.memory import give_back
from sloop.protobuf import fields_in
from sloop.serve.edge import service as offered
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.bodies import BodyReservation
from sloop.serve.edge.grpc.relay import Relay, RelayedConnection
from sloop.serve.edge.grpc.schema import METHODS, POOL, SERVICE, message_class
from sloop.serve.edge.identity import REQUEST_ID, TRACEPARENT, identity_of, named
from sloop.serve.edge.inputs import Buffer, InputValidator, check_raw, pack
from sloop.serve.edge.listener import Listener, Tls
from sloop.serve.edge.parameters import (
    ELAPSED,
    OF_INPUT,
    OF_OUTPUT,
    OF_REQUEST,
    SLO,
    TIMEOUT,
    Parameters,
    budget_ns,
    check,
    check_count,
)
from sloop.serve.edge.refusal import Refusal, bad, refusal_of
from sloop.serve.edge.service import InferenceService, Model, readiness_of, server_readiness_of
from sloop.serve.edge.triton import DATA_TYPES, changed_not, check_change, classified, configuration
from sloop.serve.messages import Ask, Topic
from sloop.serve.protocols import RequestResult
from sloop.tensor import Port, Tensor
from sloop.text import quoted, shortened
from sloop.units import NS_PER_MS, NS_PER_S
from sloop.vocabulary import Outcome

CONTENTS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field that holds the elements of a datatype; FP16 and BF16 are sent as raw bytes only."""
HEADROOM_BYTES: Final = 64 * 1024
"""Extra bytes of a message for names, shapes and parameters."""
QUERY_BYTES_MAX: Final = 16 * 1024
"""The largest message of a method other than inference."""
SMALL_BYTES: Final = 16 * 1024
"""Protobuf parses a smaller message as it is: in 16 KiB there cannot be much."""
FIELDS_MAX: Final = 8_192
"""Fields of a message, with those of its inputs and outputs: a field of two bytes would become a hundred in memory."""
PARSED_BYTES_MAX: Final = 8 * 2**20 + 128 * 1024
"""The most that a message may have beside its raw contents."""
DIMENSIONS_MAX: Final = 64
INFLATED_BYTES_MAX: Final = 8 * 2**20
"""The most that a compressed message may become: some 20 ms of work, like JSON's bound."""
INFLATED_AT_ONCE: Final = 4 * 1024
"""Such a message becomes at most a megabyte, which takes a millisecond."""
INFLATING_SHARE: Final = 0.25
"""The share of a core for inflating larger ones."""
RATIO_MAX: Final = 100
RATIO_BYTES_MIN: Final = 2**20
"""A message that becomes more than a hundred times as long is refused as soon as it has become so long."""
GZIP, DEFLATE = b"\x1f\x8b", b"\x78"
"""How a compressed message begins. Neither begins a message of the protocol: protobuf has no type 7, in which the first
byte of gzip would end, and no message has a field 15."""
STREAMS_MAX: Final = 100
"""Open calls of a connection. What a client asks for beyond that waits at the client."""
HEAD_BYTES_MAX: Final = 16 * 1024
SEND_S_MAX: Final = 60
"""How long a message may take to arrive."""
IDLE_S_MAX: Final = 620
"""How long a connection may be without calls: clients of gRPC keep one open for their next call. See `http.IDLE_S`."""
UNREQUESTED_S_MAX: Final = 1
"""How long a call may wait until Python looks at it."""
PREFACE_S_MAX: Final = 10
"""How long a client may take for the first frames of its connection."""
YOUNG_NS: Final = 10 * NS_PER_MS
"""Nobody who wants an answer gives it up so soon."""
SOCKET: Final = "grpc-{}.sock"
GIVE_BACK_S: Final = 10.0
"""How often memory that was freed goes back to the system."""
SERVERS: Final = 16
"""Of grpcio in this process. Each takes one new call at a time, through two threads: calls of a single one would wait
for each other longer than for anything else."""
OPTIONS: Final = (
    ("grpc.max_concurrent_streams", STREAMS_MAX),
    ("grpc.max_metadata_size", HEAD_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", HEAD_BYTES_MAX),
    ("grpc.max_connection_idle_ms", 1000 * IDLE_S_MAX),
    ("grpc.server_handshake_timeout_ms", 1000 * PREFACE_S_MAX),
    ("grpc.server_max_unrequested_time_in_server", UNREQUESTED_S_MAX),
    ("grpc.per_message_decompression", 0),
)
"""Of grpcio's server. It would inflate a message up to the largest size of all."""

HEALTH: Final = "grpc.health.v1.Health"
REFLECTIONS: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The service of reflection under its two names: it has not changed between them."""
INFER: Final = "ModelInfer"
KEYLESS: Final = frozenset({f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady", f"/{HEALTH}/Check"})
CHANGES: Final = frozenset({f"/{SERVICE}/RepositoryModelLoad", f"/{SERVICE}/RepositoryModelUnload"})
"""Methods that need a key of an administrator."""
EMPTY: Final = frozenset({"ServerLive", "ServerReady", "ServerMetadata"})
"""Methods whose request has no fields, so that it is not received."""
CODES: Final = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status to gRPC status."""

_log: Final = logging.getLogger("sloop.grpc")
logging.getLogger("grpc").setLevel(logging.CRITICAL)  # it writes a traceback for each client that has gone
POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)  # for reflection

Metadata = Mapping[str, str]


class Call:
    """One call, whose key was accepted or which needs none."""

    def __init__(self, context: Any, path: str, hold: BodyReservation) -> None:  # noqa: ANN401  # grpcio's, untyped
        self.context, self.path, self.hold = context, path, hold
        """The room that the message has taken, and later the answer."""
        self.began_ns = time.monotonic_ns()
        self.metadata = metadata_of(context.invocation_metadata())
        self.size = 0
        """Of the message, as it was sent."""
        self.has_arrived = False
        """Whether the message is here."""

    def remaining_ns(self) -> int | None:
        """What is left of the client's deadline; None if it has none."""
        left_s = self.context.time_remaining()
        return None if left_s is None else max(1, round(left_s * NS_PER_S))

    def trailers(self, *fields: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        """These fields, and the client's own name for the call."""
        name = named(self.metadata.get(REQUEST_ID))
        return (*fields, (REQUEST_ID, name)) if name else fields


def metadata_of(given: Sequence[tuple[str, str | bytes]] | None) -> Metadata:
    """The metadata of a call that is text. Of a repeated name, the last value holds."""
    return {name: value for name, value in given or () if isinstance(value, str)}


class KeyCheck(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it takes no arguments at run time
    """Refuses a call by its head, before its message is asked for. `check` raises a `Refusal`; `refuse` answers it."""

    def __init__(self, check: Callable[[str, Metadata], None], refuse: Callable[..., Awaitable[None]]) -> None:
        self._check, self._refuse = check, refuse

    async def intercept_service(self, continuation: Any, details: Any) -> Any:  # noqa: ANN401  # grpcio's signature
        """Grpcio's method: what handles the call."""
        try:
            self._check(details.method, metadata_of(details.invocation_metadata))
        except Refusal as refusal:
            error = refusal  # the name ends with the block

            async def refused(_messages: object, context: Any) -> None:  # noqa: ANN401
                await self._refuse(context, details.method, error)

            return grpc.stream_unary_rpc_method_handler(refused)  # which receives messages only if it asks for them
        return await continuation(details)


class Rpc:
    """A gRPC server. At most `limits.requests` calls are open; more are refused (UNAVAILABLE). `folder` is for the Unix
    socket of the process."""

    def __init__(
        self,
        service: InferenceService,
        folder: Path,
        *,
        limits: ServerLimits = ServerLimits(),
        tls: Tls | None = None,
    ) -> None:
        self.service, self.requests_max = service, limits.requests_max
        self.open_calls = 0
        self.access: AccessLog | None = None
        """Where answers are noted, if somebody wants that."""
        self.unsent_bytes: Final = 0
        """Answers count as bodies until they are sent."""
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        here = Path(f"/proc/self/fd/{self._folder}")  # the folder's own name may be too long for a Unix socket
        self._paths = [here / SOCKET.format(number) for number in range(SERVERS)]
        self.relay = Relay(self._paths, limits, tls=tls)
        self._servers: list[Any] = []
        """Grpcio's, untyped: one for each path."""
        self._inflating = asyncio.Lock()
        self._giving_back: asyncio.Task[None] | None = None
        self._methods = {f"/{SERVICE}/{method}" for method in METHODS} | {f"/{HEALTH}/Check"}
        self._methods |= {f"/{name}/ServerReflectionInfo" for name in REFLECTIONS}

    @property
    def listener(self) -> Listener:
        """What accepts the connections."""
        return self.relay.listener

    @property
    def expired(self) -> Counter[str]:
        """Connections closed because their client took too long, by what was awaited."""
        return self.relay.expired

    async def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, which this object then owns. Call it in the running event loop."""
        for path in self._paths:
            path.unlink(missing_ok=True)
            server = self._served()
            self._servers.append(server)
            server.add_insecure_port(f"unix:{path}")
            path.chmod(0o600)
            await server.start()
        self.relay.start(sock)
        self._giving_back = asyncio.create_task(self._give_back_for_ever())

    async def _give_back_for_ever(self) -> None:
        """Grpcio inflates a message in small pieces, which glibc keeps when they are freed: 250 MiB after a while of
        messages that become 64 MiB."""
        while True:
            await asyncio.sleep(GIVE_BACK_S)
            await asyncio.to_thread(give_back)

    def _served(self) -> Any:  # noqa: ANN401
        """Grpcio's server, which belongs to the running event loop."""
        limit = ("grpc.max_receive_message_length", self.service.bodies.each_bytes_max + HEADROOM_BYTES)
        server = grpc.aio.server(options=(*OPTIONS, limit), interceptors=(KeyCheck(self._check, self._refuse),))
        methods = {method: self._method(method, getattr(self, f"_{method}")) for method in METHODS}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, methods),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": self._method("Check", self._Check, HEALTH)}),
                *map(reflected, REFLECTIONS),
            )
        )
        return server

    def drain(self) -> None:
        """Nothing, until `close`: connections stay open for the calls that are still allowed."""

    async def close(self, within_s: float) -> None:
        """Stop listening, wait at most `within_s` for open calls, then cancel them."""
        if self._giving_back is not None:
            self._giving_back.cancel()
        if self._folder >= 0:
            self.listener.stop()
            await asyncio.gather(*(server.stop(within_s) for server in self._servers))
            await self.relay.close(within_s)
            for path in self._paths:
                path.unlink(missing_ok=True)
            os.close(self._folder)
            self._folder = -1

    # What every call goes through

    def _check(self, path: str, metadata: Metadata) -> None:
        """Raise a `Refusal` for a call that may not be made."""
        if self.service.keys.is_required and path not in KEYLESS:
            self.service.authorise(metadata.get("authorization"), metadata.get("x-api-key"), as_admin=path in CHANGES)
        if path not in self._methods:
            what = f"unknown method {quoted(path)}"
            raise Refusal(HTTPStatus.NOT_IMPLEMENTED, what, f"call /{SERVICE}/METHOD with one of {', '.join(METHODS)}")
        if self.open_calls >= self.requests_max:
            what = f"rejected: the server has {self.open_calls} open calls, as many as it accepts"
            fix = f"try again in 1 s; {setting('requests')}"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, what, fix, retry_after_s=1)

    def _method(self, method: str, respond: Callable[..., Awaitable[Any]], service: str = SERVICE) -> Any:  # noqa: ANN401
        """What grpcio calls for a method. It is one of a client's stream for grpcio, so that it begins before the
        message has come."""
        return grpc.stream_unary_rpc_method_handler(partial(self._handle, method, respond, f"/{service}/{method}"))

    async def _handle(
        self,
        method: str,
        respond: Callable[[Any, Call], Awaitable[Message]],
        path: str,
        _messages: object,
        context: Any,  # noqa: ANN401
    ) -> bytes | None:
        """Answer a call whose head was accepted."""
        connection = self.relay.of(context.peer())
        if connection is None:
            await context.abort(StatusCode.UNAVAILABLE, "the connection has gone")
        assert connection is not None
        call = Call(context, path, BodyReservation(self.service.bodies))
        self._begin(call, connection)
        try:
            request = None if method in EMPTY else await self._received(call, method)
            self._arrive(call, connection)
            data = (await respond(request, call)).SerializeToString()
            call.hold.drop()
            call.hold = BodyReservation(self.service.bodies)  # without the model's quota, which is one of requests
            call.hold.take(len(data))
        except Refusal as refusal:
            await self._refuse(context, path, refusal, call, connection)
            return None
        except asyncio.CancelledError:
            self._note_reset(call, connection)
            raise
        except Exception:
            _log.exception("internal error while answering %s", path)
            failure = Refusal(500, "failed: internal error of the server", "see the server's log, and report it")
            await self._refuse(context, path, failure, call, connection)
            return None
        self._note(call.path, StatusCode.OK, connection, call, len(data))
        connection.note_sending(len(data))
        context.add_done_callback(partial(self._sent, connection))
        return data

    def _begin(self, call: Call, connection: RelayedConnection) -> None:
        self.open_calls += 1
        connection.calls += 1
        connection.arriving += 1
        if connection.is_stranger and not (self.service.keys.is_required and call.path in KEYLESS):
            connection.note_authorised()
        elif connection.is_stranger:
            connection.charge("call without a key")
        connection.note_calls()
        call.context.add_done_callback(partial(self._end, call, connection))

    def _arrive(self, call: Call, connection: RelayedConnection) -> None:
        if not call.has_arrived:
            call.has_arrived = True
            connection.incoming_bytes = 0
            connection.arriving -= 1
            connection.note_calls()

    def _end(self, call: Call, connection: RelayedConnection, _context: object) -> None:
        """A call has ended: its answer is sent, or it was given up."""
        self._arrive(call, connection)
        self.open_calls -= 1
        connection.calls -= 1
        connection.note_calls()
        call.hold.drop()

    @staticmethod
    def _sent(connection: RelayedConnection, _context: object) -> None:
        connection.unsent -= 1

    async def _received(self, call: Call, method: str) -> Any:  # noqa: ANN401
        """The message of a call. It takes room from now on."""
        try:
            async with asyncio.timeout(SEND_S_MAX):
                sent = await call.context.read()
        except TimeoutError:
            what = f"the message took more than {SEND_S_MAX} s to arrive"
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, what, "send it faster") from None
        if not isinstance(sent, bytes):
            raise bad("message", "0 bytes are not a whole one", "send its length and all of it")
        call.size = len(sent)
        if method != INFER and call.size > QUERY_BYTES_MAX:
            raise self._too_large(call.size, QUERY_BYTES_MAX)
        call.hold.take(call.size)
        if sent.startswith(GZIP) or (sent.startswith(DEFLATE) and not int.from_bytes(sent[:2], "big") % 31):
            bytes_max = INFLATED_BYTES_MAX if method == INFER else QUERY_BYTES_MAX
            if call.size > bytes_max:
                raise self._too_large(call.size, bytes_max, UNPACKED)
            sent = await self._inflated(sent, bytes_max)
            call.hold.take(max(0, len(sent) - call.size))
        return sent if method == INFER else parsed(sent, _request_class(method))

    async def _inflated(self, message: bytes, bytes_max: int) -> bytes:
        """A message that was compressed. Larger ones wait for each other, and have a part of the time."""
        if len(message) <= INFLATED_AT_ONCE:
            return inflated(message, bytes_max)
        async with self._inflating:
            begun_s = time.monotonic()
            try:
                return await asyncio.to_thread(inflated, message, bytes_max)
            finally:
                await asyncio.sleep((1 / INFLATING_SHARE - 1) * (time.monotonic() - begun_s))

    def _too_large(self, size: int, bytes_max: int, fix: str = "") -> Refusal:
        self.service.bodies.refused["each"] += 1
        fix = fix or f"send fewer rows; {setting('body_bytes')}"
        return Refusal(413, f"the message has {size} bytes; the limit is {bytes_max}", fix)

    async def _refuse(
        self,
        context: Any,  # noqa: ANN401
        path: str,
        refusal: Refusal,
        call: Call | None = None,
        connection: RelayedConnection | None = None,
    ) -> None:
        """Answer a call with an error, for which its connection pays if it is the client's fault."""
        connection = connection or self.relay.of(context.peer())
        code = CODES.get(refusal.status, StatusCode.INTERNAL)
        if connection is not None:
            self._note(path, code, connection, call, 0)
            if refusal.status == HTTPStatus.UNAUTHORIZED:
                connection.charge("key")
            elif refusal.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
                connection.pay_message(0 if call is None else call.size)
        fields: tuple[tuple[str, str], ...] = ()
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            fields = (("retry-after", str(max(1, refusal.retry_after_s))),)
        trailers = fields if call is None else call.trailers(*fields)
        await context.abort(code, shortened(str(refusal), 2000), trailers)

    def _note_reset(self, call: Call, connection: RelayedConnection) -> None:
        """The client has given a call up, which costs it something unless it was not answered in time."""
        is_young = time.monotonic_ns() - call.began_ns < YOUNG_NS
        if is_young or not call.has_arrived:
            connection.charge("rapid reset" if is_young else "reset")

    def _note(self, path: str, code: StatusCode, connection: RelayedConnection, call: Call | None, size: int) -> None:
        """Note an answer in the access log, if there is one."""
        if self.access is not None:
            self.access.add(
                "grpc",
                connection.address,
                "POST",
                path,
                code.value[0],
                began_ns=time.monotonic_ns() if call is None else call.began_ns,
                bytes_in=0 if call is None else call.size,
                bytes_out=size,
                request_id="" if call is None else named(call.metadata.get(REQUEST_ID)),
            )

    async def _asked(self, question: Ask[Topic]) -> bytes:
        """What the deciding process answers."""
        found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.service.sink.ask(question, lambda answer: None if found.done() else found.set_result(answer))
        return await found

    # The methods, by their names

    async def _ServerLive(self, _request: None, _call: Call) -> Any:  # noqa: ANN401
        return message_class("ServerLiveResponse")(live=True)

    async def _ServerReady(self, _request: None, _call: Call) -> Any:  # noqa: ANN401
        why = server_readiness_of(await self._asked(Ask(Topic.READY))).why
        return message_class("ServerReadyResponse")(ready=not why)

    async def _Check(self, request: Any, call: Call) -> Any:  # noqa: ANN401
        """gRPC's own health protocol, as Kubernetes' probes speak it: of the server, which has the empty name and that
        of its service, or of a model, for which a key is needed as for others."""
        name, state = request.service, health_pb2.HealthCheckResponse
        if name in ("", SERVICE):
            is_serving = not server_readiness_of(await self._asked(Ask(Topic.READY))).why
        else:
            self.service.authorise(call.metadata.get("authorization"), call.metadata.get("x-api-key"))
            self.service.model(name)
            readiness = readiness_of(await self._asked(Ask(Topic.MODELS, name))).get(name)
            is_serving = readiness is not None and readiness.is_ready
        return state(status=state.SERVING if is_serving else state.NOT_SERVING)

    async def _ModelReady(self, request: Any, call: Call) -> Any:  # noqa: ANN401
        model = self.service.model(request.name)
        answer = await self._asked(Ask(Topic.MODELS, request.name, request.version))
        readiness = self.service.readiness_in(answer, model, request.version)
        call.context.set_trailing_metadata(call.trailers(("x-sloop-state", readiness.state.value)))
        return message_class("ModelReadyResponse")(ready=readiness.is_ready)

    async def _ServerMetadata(self, _request: None, _call: Call) -> Any:  # noqa: ANN401
        return message_class("ServerMetadataResponse")(
            name=offered.SERVER, version=offered.SERVER_VERSION, extensions=self.service.extensions
        )

    async def _ModelMetadata(self, request: Any, _call: Call) -> Any:  # noqa: ANN401
        model = self.service.model(request.name, request.version)
        signature = model.validator.signature
        return message_class("ModelMetadataResponse")(
            name=request.name,
            versions=model.versions,
            platform=offered.PLATFORM,
            inputs=[
                *map(port_message, signature.inputs),
                *(port_message(p, optional=True) for p in signature.optional),
            ],
            outputs=list(map(port_message, signature.outputs)),
            parameters={name: {"int64_param": most} for name, most in self.service.bounds(model).items()},
        )

    async def _ModelConfig(self, request: Any, _call: Call) -> Any:  # noqa: ANN401
        model = self.service.model(request.name, request.version)
        config = configuration(model, self.service.bounds(model))
        for port in (*config["input"], *config["output"]):
            port["data_type"] = DATA_TYPES[port["data_type"]]
        return message_class("ModelConfigResponse")(config=config)

    async def _ModelStatistics(self, request: Any, _call: Call) -> Any:  # noqa: ANN401
        if request.name:
            self.service.model(request.name, request.version)
        found = await self._asked(Ask(Topic.STATISTICS, request.name, request.version))
        return ParseDict(json.loads(found), message_class("ModelStatisticsResponse")(), ignore_unknown_fields=True)

    async def _RepositoryIndex(self, request: Any, _call: Call) -> Any:  # noqa: ANN401
        found = json.loads(await self._asked(Ask(Topic.INDEX)))
        models = [model for model in found if not request.ready or model["state"] == "READY"]
        return message_class("RepositoryIndexResponse")(models=models)

    async def _RepositoryModelLoad(self, request: Any, _call: Call) -> Any:  # noqa: ANN401
        await self._change(request, "load")
        return message_class("RepositoryModelLoadResponse")()

    async def _RepositoryModelUnload(self, request: Any, _call: Call) -> Any:  # noqa: ANN401
        await self._change(request, "unload")
        return message_class("RepositoryModelUnloadResponse")()

    async def _change(self, request: Any, verb: str) -> None:  # noqa: ANN401
        """Load or end a model."""
        check_change(dict(request.parameters), verb)
        found = await self._asked(Ask(Topic(verb), request.model_name))
        if found:
            raise changed_not(found)

    async def _ModelInfer(self, message: bytes, call: Call) -> Message:
        request, raws = inference(message)
        del message
        model = self._model_for(request, call)
        asked = asked_of(request, call, model)
        tensors = model.validator.complete(inputs_of(request, raws, model.validator))
        ended = await self._ended(call, model, asked, tensors)
        if ended.outcome not in (Outcome.SERVED, Outcome.LATE):
            raise refusal_of(ended)
        outputs = ended.outputs
        if asked.classes:
            outputs = classified(outputs, asked.classes, model.validator.signature.outputs, model.labels)
        is_met = "true" if ended.outcome is Outcome.SERVED else "false"
        call.context.set_trailing_metadata(call.trailers(("x-slo-met", is_met)))
        return answer_of(model.name, asked, ended.version, outputs)

    async def _ended(
        self, call: Call, model: Model, asked: "InferOptions", tensors: Mapping[str, Tensor]
    ) -> RequestResult:
        """Submit a request and wait for its end. If the client gives up, it is cancelled."""
        identity = identity_of(call.metadata.get(REQUEST_ID), call.metadata.get(TRACEPARENT), asked.id)
        end: asyncio.Future[RequestResult] = asyncio.get_running_loop().create_future()
        sink = self.service.sink
        number = sink.submit(
            tensors,
            application=model.name,
            version=asked.version,
            slo_ns=asked.slo_ns,
            elapsed_ns=asked.elapsed_ns,
            began_ns=call.began_ns,
            request_id=identity.request_id,
            trace=identity.trace,
            outputs=asked.names,
            on_end=lambda ended: None if end.done() else end.set_result(ended),
        )
        try:
            return await end
        except asyncio.CancelledError:
            sink.cancel(number)
            raise

    def _model_for(self, request: Any, call: Call) -> Model:  # noqa: ANN401
        """The model of an inference, whose message counts for its quota from now on."""
        service = self.service
        if service.bodies.quotas:
            size = call.hold.size
            call.hold.drop()
            call.hold.limit(service.bodies.quotas.get(request.model_name))
            call.hold.take(size)
        return service.model(request.model_name, request.model_version)


def reflected(name: str) -> Any:  # noqa: ANN401
    """What answers for the service of reflection of this name."""
    aio: Any = reflection.aio  # type: ignore[attr-defined]  # its stub is of the version without
    servicer = aio.ReflectionServicer((SERVICE, HEALTH, *REFLECTIONS), pool=POOL)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})


# Reading messages


def _request_class(method: str) -> Any:  # noqa: ANN401
    return health_pb2.HealthCheckRequest if method == "Check" else message_class(f"{method}Request")


def parsed(message: bytes, kind: Any) -> Any:  # noqa: ANN401
    """The message. Raises a 400 if it cannot be parsed."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise bad("message", f"not a {name} ({error})", "send the messages of the Open Inference Protocol") from None


UNPACKED: Final = "send it uncompressed"


def inflated(message: bytes, bytes_max: int) -> bytes:
    """A message that was compressed. Raises a `Refusal` if it becomes longer than it may, or if it cannot be."""
    stream = zlib.decompressobj(31 if message.startswith(GZIP) else 15)
    bytes_max = min(bytes_max, max(RATIO_BYTES_MIN, RATIO_MAX * len(message)))
    try:
        found = stream.decompress(message, bytes_max + 1)
        if len(found) > bytes_max:
            raise Refusal(413, f"the compressed message becomes more than {bytes_max} bytes", UNPACKED)
        if not stream.eof or stream.unused_data:
            raise zlib.error
    except zlib.error:
        raise bad("message", "it is neither gzip nor deflate", "compress it as grpc-encoding says") from None
    return found


RAW_INPUT: Final = 0x3A
INPUT, OUTPUT = 0x2A, 0x32
"""The fields `raw_input_contents` (7), `inputs` (5) and `outputs` (6), with a length (wire type 2)."""


def inference(message: bytes) -> tuple[Any, Sequence[Buffer]]:
    """A `ModelInferRequest`, and its raw contents, of which a large message is not copied. Raises a `Refusal` for one
    that has more than it may."""
    kind = message_class(f"{INFER}Request")
    if len(message) <= SMALL_BYTES:
        request = parsed(message, kind)
        return request, request.raw_input_contents
    view, left = memoryview(message), FIELDS_MAX
    raws, rest = list[Buffer](), list[Buffer]()
    try:
        for tag, begin, start, end in fields_in(message, 0, len(message)):
            left -= 1
            if tag == RAW_INPUT:
                raws.append(view[start:end])
            else:
                rest.append(view[begin:end])
            if tag in (INPUT, OUTPUT):
                left -= sum(1 for _ in islice(fields_in(message, start, end), left + 1))
            if left < 0:
                fix = "send raw_input_contents, which is one field for each input, and fewer inputs"
                raise Refusal(413, f"message: more than {FIELDS_MAX} fields", fix)
    except ValueError as error:
        raise bad("message", str(error), "send a whole message of the Open Inference Protocol") from None
    size = sum(map(len, rest))
    if size > PARSED_BYTES_MAX:
        what = f"message: {size} bytes beside raw_input_contents; the limit is {PARSED_BYTES_MAX}"
        raise Refusal(413, what, "send raw_input_contents")
    request = parsed(b"".join(rest), kind)
    return request, raws


class InferOptions(Struct):
    """What a `ModelInferRequest` asks for, beside its tensors."""

    id: str
    version: str
    slo_ns: int | None
    """None if the model's own deadline holds."""
    elapsed_ns: int
    names: Sequence[str]
    """Of the outputs to return."""
    classes: Mapping[str, int]
    """Of these, those to return as classes, with how many."""


def asked_of(request: Any, call: Call, model: Model) -> InferOptions:  # noqa: ANN401
    """What the message of a call asks for. Raises a 400 that names the field."""
    slo_ns, elapsed_ns = asked_budget_ns(request, call.metadata, call.remaining_ns(), model.slo_ns)
    names, classes = outputs_of(request, model.validator)
    return InferOptions(request.id, request.model_version, slo_ns, elapsed_ns, names, classes)


def asked_budget_ns(
    request: Any,  # noqa: ANN401
    metadata: Mapping[str, str],
    remaining_ns: int | None,
    own_ns: int,
) -> tuple[int | None, int]:
    """(slo_ns, elapsed_ns) of a call, from its metadata, its parameters and what is left of its gRPC deadline; `own_ns`
    is the model's SLO."""
    parameters = parameters_of(request, OF_REQUEST, "parameters")
    return budget_ns(
        metadata.get(SLO, parameters.get(SLO)),
        metadata.get(ELAPSED, parameters.get(ELAPSED)),
        timeout=parameters.get(TIMEOUT),
        own_ns=own_ns,
        remaining_ns=remaining_ns,
    )


def inputs_of(
    request: Any,  # noqa: ANN401
    raws: Sequence[Buffer],
    validator: InputValidator,
) -> dict[str, Tensor]:
    """The input tensors of a call by name. `raws` are its raw contents. Raises a 400 that names the field."""
    known: dict[str, tuple[tuple[int, ...], int]] = {}
    for index, given in enumerate(request.inputs):
        try:
            if len(given.shape) > DIMENSIONS_MAX:
                fix = "the shape of an input is in the model's metadata"
                raise bad("shape", f"{len(given.shape)} dimensions", fix)
            shape = tuple(given.shape)
            count = validator.count(given.name, given.datatype, shape)
            if given.name in known:
                raise bad("name", f"input {given.name!r} occurs twice", "send every input once")
            parameters_of(given, OF_INPUT, "parameters")
        except Refusal as refusal:
            raise refusal.within(f"inputs[{index}]") from None
        known[given.name] = shape, count
    if raws and len(raws) != len(request.inputs):
        fix = "send one for each input, in the same order"
        raise bad("raw_input_contents", f"{len(raws)} for {len(request.inputs)} inputs", fix)
    tensors: dict[str, Tensor] = {}
    for index, (given, (shape, count)) in enumerate(zip(request.inputs, known.values(), strict=True)):
        try:
            if raws and given.HasField("contents"):
                raise bad("contents", "the request has raw_input_contents as well", "send one of the two")
            data = raws[index] if raws else typed(given.datatype, shape, count, given.contents)
        except Refusal as refusal:
            raise refusal.within(f"inputs[{index}]") from None
        if raws:
            check_raw(given.datatype, shape, memoryview(data), f"raw_input_contents[{index}]")
        tensors[given.name] = Tensor(given.datatype, shape, data)
    return tensors


def outputs_of(request: Any, validator: InputValidator) -> tuple[list[str], dict[str, int]]:  # noqa: ANN401
    """The names of the outputs to return, and those to return as classes with how many."""
    names: list[str] = []
    classes: dict[str, int] = {}
    for index, output in enumerate(request.outputs):
        field = f"outputs[{index}]"
        name = validator.output(output.name, f"{field}.name")
        if name in names:
            raise bad(f"{field}.name", f"output {name!r} occurs twice", "ask for every output once")
        names.append(name)
        field = f"{field}.parameters"
        if count := validator.classes(name, parameters_of(output, OF_OUTPUT, field), field):
            classes[name] = count
    return names or list(validator.datatypes), classes


def answer_of(model: str, asked: InferOptions, version: str, outputs: Mapping[str, Tensor]) -> Message:
    """`ModelInferResponse` with the outputs that were asked for."""
    answer = message_class("ModelInferResponse")(model_name=model, model_version=version, id=asked.id)
    for name in asked.names:
        tensor = outputs.get(name)
        if tensor is None:
            continue  # an output of a branch that this request did not take
        answer.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(bytes(tensor.data))
    return answer  # type: ignore[no-any-return]


def typed(datatype: str, shape: tuple[int, ...], count: int, contents: Any) -> bytes:  # noqa: ANN401
    """Convert the elements of a typed field to raw bytes."""
    name = CONTENTS.get(datatype)
    if name is None:
        raise bad("contents", f"{datatype} has no typed contents", "send raw_input_contents")
    for other, elements in contents.ListFields():
        if other.name != name:
            raise bad(f"contents.{other.name}", f"{len(elements)} elements for {datatype}", f"use {name}")
    elements = getattr(contents, name)
    if len(elements) != count:
        what = f"{len(elements)} elements, but shape {list(shape)} has {count}"
        fix = "send every element once, in row-major order, or all inputs as raw_input_contents"
        raise bad(f"contents.{name}", what, fix)
    return pack(datatype, shape, count, list(elements), f"contents.{name}")


def parameters_of(message: Any, known: frozenset[str], field: str) -> Parameters:  # noqa: ANN401
    """The parameters of a message. Raises a 400 for one that cannot be honoured."""
    if not message.parameters:
        return {}
    check_count(len(message.parameters), field)
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()}
    found = {name: None if choice is None else getattr(value, choice) for name, (value, choice) in chosen.items()}
    check(found, known, field)
    return found


def port_message(port: Port, *, optional: bool = False) -> object:
    """`TensorMetadata`."""
    parameters = {"optional": {"bool_param": True}} if optional else {}
    return message_class("ModelMetadataResponse.TensorMetadata")(
        name=port.name, datatype=port.datatype, shape=port.shape, parameters=parameters
    )
