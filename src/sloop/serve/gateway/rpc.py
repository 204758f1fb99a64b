"""The Open Inference Protocol v2 over gRPC, for the same `InferenceService` as REST.

The protobuf messages are built at import from the table `_FIELDS`, so no generated code is needed. Source: Open
Inference Protocol v2, "GRPC".
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import grpc
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from sloop.errors import MachineError
from sloop.serve.gateway import service as offered
from sloop.serve.gateway.http import BodyReservation, refused_port
from sloop.serve.gateway.inputs import ELAPSED, SLO, InputValidator, budget_ns, check_raw, pack
from sloop.serve.gateway.refusal import Refusal, bad, refusal_of
from sloop.serve.gateway.service import InferenceService
from sloop.serve.protocols import RequestResult
from sloop.tensor import Port, Tensor
from sloop.units import NS_PER_S
from sloop.vocabulary import Outcome, RequestId

PACKAGE: Final = "inference"
SERVICE: Final = "inference.GRPCInferenceService"

# message → ((field, type, number), …); a type in capitals is another message, "[]" repeats, "{}" maps from strings
_FIELDS: Final[dict[str, tuple[tuple[str, str, int], ...]]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": (("live", "bool", 1),),
    "ServerReadyRequest": (),
    "ServerReadyResponse": (("ready", "bool", 1),),
    "ModelReadyRequest": (("name", "string", 1), ("version", "string", 2)),
    "ModelReadyResponse": (("ready", "bool", 1),),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": (("name", "string", 1), ("version", "string", 2), ("extensions", "string[]", 3)),
    "ModelMetadataRequest": (("name", "string", 1), ("version", "string", 2)),
    "ModelMetadataResponse.TensorMetadata": (("name", "string", 1), ("datatype", "string", 2), ("shape", "int64[]", 3)),
    "ModelMetadataResponse": (
        ("name", "string", 1),
        ("versions", "string[]", 2),
        ("platform", "string", 3),
        ("inputs", "ModelMetadataResponse.TensorMetadata[]", 4),
        ("outputs", "ModelMetadataResponse.TensorMetadata[]", 5),
    ),
    "InferParameter": (
        ("bool_param", "bool", 1),
        ("int64_param", "int64", 2),
        ("string_param", "string", 3),
        ("double_param", "double", 4),
        ("uint64_param", "uint64", 5),
    ),
    "InferTensorContents": (
        ("bool_contents", "bool[]", 1),
        ("int_contents", "int32[]", 2),
        ("int64_contents", "int64[]", 3),
        ("uint_contents", "uint32[]", 4),
        ("uint64_contents", "uint64[]", 5),
        ("fp32_contents", "float[]", 6),
        ("fp64_contents", "double[]", 7),
        ("bytes_contents", "bytes[]", 8),
    ),
    "ModelInferRequest.InferInputTensor": (
        ("name", "string", 1),
        ("datatype", "string", 2),
        ("shape", "int64[]", 3),
        ("parameters", "InferParameter{}", 4),
        ("contents", "InferTensorContents", 5),
    ),
    "ModelInferRequest.InferRequestedOutputTensor": (("name", "string", 1), ("parameters", "InferParameter{}", 2)),
    "ModelInferRequest": (
        ("model_name", "string", 1),
        ("model_version", "string", 2),
        ("id", "string", 3),
        ("parameters", "InferParameter{}", 4),
        ("inputs", "ModelInferRequest.InferInputTensor[]", 5),
        ("outputs", "ModelInferRequest.InferRequestedOutputTensor[]", 6),
        ("raw_input_contents", "bytes[]", 7),
    ),
    "ModelInferResponse.InferOutputTensor": (
        ("name", "string", 1),
        ("datatype", "string", 2),
        ("shape", "int64[]", 3),
        ("parameters", "InferParameter{}", 4),
        ("contents", "InferTensorContents", 5),
    ),
    "ModelInferResponse": (
        ("model_name", "string", 1),
        ("model_version", "string", 2),
        ("id", "string", 3),
        ("parameters", "InferParameter{}", 4),
        ("outputs", "ModelInferResponse.InferOutputTensor[]", 5),
        ("raw_output_contents", "bytes[]", 6),
    ),
}
_ONE_OF: Final = {"InferParameter": "parameter_choice"}
METHODS: Final = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

_SCALARS: Final = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
}


def _describe() -> FileDescriptorProto:
    file = FileDescriptorProto(name="sloop/inference.proto", package=PACKAGE, syntax="proto3")
    known: dict[str, DescriptorProto] = {}
    for path in sorted(_FIELDS):  # an outer message sorts before those inside it
        outer, _, name = path.rpartition(".")
        message = (known[outer].nested_type if outer else file.message_type).add(name=name)
        known[path] = message
    for path, fields in _FIELDS.items():
        message = known[path]
        if path in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[path])
        for name, kind, number in fields:
            _add_field(message, path, name, kind, number)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for method in METHODS:
        service.method.add(
            name=method, input_type=f".{PACKAGE}.{method}Request", output_type=f".{PACKAGE}.{method}Response"
        )
    return file


def _add_field(message: DescriptorProto, path: str, name: str, kind: str, number: int) -> None:
    base = kind.removesuffix("[]").removesuffix("{}")
    repeated = kind != base
    field = message.field.add(name=name, number=number)
    field.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
    if path in _ONE_OF:
        field.oneof_index = 0
    if kind.endswith("{}"):
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "", "key", "string", 1)
        _add_field(entry, "", "value", base, 2)
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{path}.{entry_name}"
    elif base in _SCALARS:
        field.type = _SCALARS[base]
    else:
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{base}"


_POOL: Final = DescriptorPool()
_POOL.AddSerializedFile(_describe().SerializeToString())


@cache
def message_class(name: str) -> Any:  # noqa: ANN401  # protobuf's generated attributes have no static types
    """The class of a message, such as `ModelInferRequest`."""
    found: type[Message] = GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return found


CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status to gRPC status. gRPC itself rejects a message over the server's size limit (RESOURCE_EXHAUSTED)."""
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
INFER: Final = "ModelInfer"
KEYLESS: Final = frozenset({"ServerLive", "ServerReady"})

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Rpc:
    """A gRPC server. At most `requests_max` calls are open; gRPC rejects more (RESOURCE_EXHAUSTED)."""

    def __init__(self, service: InferenceService, *, requests_max: int) -> None:
        self.service = service
        self._requests_max = requests_max
        self._limit_bytes = service.bodies.each_bytes_max + HEADROOM_BYTES
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Start listening and return the port; port 0 selects a free one. Raises `MachineError`."""
        limits = [
            ("grpc.max_receive_message_length", self._limit_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # otherwise two servers could silently share one port
        ]
        server = grpc.aio.server(options=limits, maximum_concurrent_rpcs=self._requests_max)
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(
                partial(self._guard, method, getattr(self, f"_{method}")),
                request_deserializer=partial(received, message_class(f"{method}Request").FromString),
                response_serializer=message_class(f"{method}Response").SerializeToString,
            )
            for method in METHODS
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise refused(host, port) from error
        if bound == 0:
            raise refused(host, port)
        await server.start()
        self._server = server
        return bound

    async def close(self, within_s: float) -> None:
        """Stop listening, wait at most `within_s` for open calls, then cancel them."""
        if self._server is not None:
            await self._server.stop(within_s)

    async def _guard(
        self,
        method: str,
        answer: Callable[[Any, Context], Awaitable[object]],
        sized: tuple[object, int],
        context: Context,
    ) -> object:
        """Run one method; convert refusals and unexpected exceptions to gRPC errors."""
        refusal: Refusal
        bodies = self.service.bodies
        request: Any
        request, size = sized
        try:
            if self.service.api_key and method not in KEYLESS:
                metadata = metadata_of(context)
                self.service.authorise(metadata.get("authorization"), metadata.get("x-api-key"))
            with BodyReservation(bodies) as hold:
                if bodies.quotas and method == INFER:
                    hold.limit(bodies.quotas.get(request.model_name))
                hold.take(size)
                return await answer(request, context)
        except Refusal as found:
            refusal = found
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("a call of %s broke the gateway", method)
            refusal = Refusal(500, "failed: internal error of the gateway", "see the server's log, and report it")
        trailing = (("retry-after", str(max(1, refusal.retry_after_s))),) if refusal.status == 503 else ()
        await context.abort(CODES.get(refusal.status, grpc.StatusCode.INTERNAL), str(refusal), trailing)

    async def _ServerLive(self, _request: object, _context: Context) -> object:
        return message_class("ServerLiveResponse")(live=True)

    async def _ServerReady(self, _request: object, _context: Context) -> object:
        return message_class("ServerReadyResponse")(ready=not self.service.pages.unready())

    async def _ModelReady(self, request: Any, context: Context) -> object:  # noqa: ANN401
        readiness = self.service.readiness(request.name, request.version)
        context.set_trailing_metadata((("x-sloop-state", readiness.state.value),))
        return message_class("ModelReadyResponse")(ready=readiness.is_ready)

    async def _ServerMetadata(self, _request: object, _context: Context) -> object:
        return message_class("ServerMetadataResponse")(
            name=offered.SERVER, version=offered.SERVER_VERSION, extensions=offered.EXTENSIONS
        )

    async def _ModelMetadata(self, request: Any, _context: Context) -> object:  # noqa: ANN401
        signature = self.service.model(request.name, request.version).validator.signature
        return message_class("ModelMetadataResponse")(
            name=request.name,
            versions=self.service.pages.versions(request.name),
            platform=offered.PLATFORM,
            inputs=list(map(of_port, signature.inputs)),
            outputs=list(map(of_port, signature.outputs)),
        )

    async def _ModelInfer(self, request: Any, context: Context) -> object:  # noqa: ANN401
        began_ns = time.monotonic_ns()
        model = self.service.model(request.model_name, request.model_version)
        validator = model.validator
        tensors = validator.complete(inputs_of(request, validator))
        names = [validator.output(out.name, f"outputs[{i}].name") for i, out in enumerate(request.outputs)]
        slo_ns, elapsed_ns = asked_budget_ns(request, context, model.slo_ns)
        ended = await self._submitted(
            tensors,
            application=model.name,
            version=request.model_version,
            slo_ns=slo_ns,
            elapsed_ns=elapsed_ns,
            began_ns=began_ns,
        )
        if ended.outcome not in (Outcome.SERVED, Outcome.LATE):
            raise refusal_of(ended)
        met = "true" if ended.outcome is Outcome.SERVED else "false"
        context.set_trailing_metadata((("x-slo-met", met),))
        return answer_of(request, names or [port.name for port in validator.signature.outputs], ended)

    async def _submitted(self, tensors: Mapping[str, Tensor], **options: Any) -> RequestResult:  # noqa: ANN401
        """Submit a request and wait for its end; cancel it if the client disconnects. `options` are those of
        `RequestSink.submit`."""
        future: asyncio.Future[RequestResult] = asyncio.get_running_loop().create_future()

        def on_end(ended: RequestResult) -> None:
            if not future.done():
                future.set_result(ended)

        sink = self.service.sink
        request: RequestId = sink.submit(tensors, on_end=on_end, **options)
        try:
            return await future
        except asyncio.CancelledError:
            sink.cancel(request)
            raise


def asked_budget_ns(request: Any, context: Context, own_ns: int) -> tuple[int | None, int]:  # noqa: ANN401
    """(slo_ns, elapsed_ns) of a call, from its metadata, parameters and gRPC deadline; `own_ns` is the model's SLO."""
    metadata = metadata_of(context)
    parameters = {key: parameter(request.parameters[key]) for key in (SLO, ELAPSED) if key in request.parameters}
    slo_ns, elapsed_ns = budget_ns(
        metadata.get(SLO, parameters.get(SLO)), metadata.get(ELAPSED, parameters.get(ELAPSED))
    )
    remaining_s = context.time_remaining()
    if remaining_s is not None:
        # An answer after the client's own gRPC deadline is useless, so the tighter of the two holds.
        until_ns = elapsed_ns + max(1, round(min(remaining_s, 1e6) * NS_PER_S))
        asked_ns = own_ns if slo_ns is None else slo_ns
        slo_ns = until_ns if until_ns < asked_ns else slo_ns
    return slo_ns, elapsed_ns


def inputs_of(request: Any, validator: InputValidator) -> dict[str, Tensor]:  # noqa: ANN401
    """The input tensors of a call by name. Raises a 400 that names the field."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        fix = "send one for each input, in the same order"
        raise bad("raw_input_contents", f"{len(raws)} for {len(request.inputs)} inputs", fix)
    tensors: dict[str, Tensor] = {}
    for index, given in enumerate(request.inputs):
        shape = tuple(given.shape)
        try:
            count = validator.count(given.name, given.datatype, shape)
            if given.name in tensors:
                raise bad("name", f"input {given.name!r} occurs twice", "send every input once")
            if raws and given.HasField("contents"):
                raise bad("contents", "the request has raw_input_contents as well", "send one of the two")
            data = raws[index] if raws else typed(given.datatype, shape, count, given.contents)
        except Refusal as refusal:
            raise refusal.within(f"inputs[{index}]") from None
        if raws:
            check_raw(given.datatype, shape, data, f"raw_input_contents[{index}]")
        tensors[given.name] = Tensor(given.datatype, shape, data)
    return tensors


def answer_of(request: Any, names: Sequence[str], ended: RequestResult) -> object:  # noqa: ANN401
    """`ModelInferResponse` with the outputs of these names."""
    answer = message_class("ModelInferResponse")(
        model_name=request.model_name, model_version=ended.version, id=request.id
    )
    for name in names:
        tensor = ended.outputs.get(name)
        if tensor is None:
            continue  # an output of a branch that this request did not take
        answer.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.append(bytes(tensor.data))
    return answer


def received(parse: Callable[[bytes], object], message: bytes) -> tuple[object, int]:
    """A message and its size in bytes."""
    return parse(message), len(message)


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
        raise bad(
            f"contents.{name}",
            f"{len(elements)} elements, but shape {list(shape)} has {count}",
            "send every element once, in row-major order, or all inputs as raw_input_contents",
        )
    return pack(datatype, shape, count, list(elements), f"contents.{name}")


def parameter(value: Any) -> object:  # noqa: ANN401
    """The value of a parameter."""
    chosen = value.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(value, chosen)


def metadata_of(context: Context) -> dict[str, str]:
    """The call's metadata as text; of a repeated key, the last value."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def of_port(port: Port) -> object:
    """`TensorMetadata`."""
    return message_class("ModelMetadataResponse.TensorMetadata")(
        name=port.name, datatype=port.datatype, shape=port.shape
    )


def refused(host: str, port: int) -> MachineError:
    """The reason why a port is not available; gRPC does not report it, so try to bind it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            return refused_port(host, port, error)
    return MachineError(f"gRPC cannot listen on {host}:{port}", help="choose another port with grpc_port")
