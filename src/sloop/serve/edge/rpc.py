"""The Open Inference Protocol v2 over gRPC, for the same `InferenceService` as REST.

The protobuf messages are built at import from the table `_FIELDS`, so no generated code is needed. A message is read
field by field before protobuf parses it, so that what it contains is bounded as well as its size. Source: Open
Inference Protocol v2, "GRPC".
"""

import json
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct

from sloop.serve.blocks import COPIED_BYTES
from sloop.serve.edge import service as offered
from sloop.serve.edge.hpack import Field, encode
from sloop.serve.edge.http2 import Buffer, Call, Http2Server
from sloop.serve.edge.identity import REQUEST_ID, TRACEPARENT, identity_of, named
from sloop.serve.edge.inputs import InputValidator, check_raw, check_strings_in_steps, converted, pack
from sloop.serve.edge.intake import Intake
from sloop.serve.edge.listener import Tls
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
from sloop.serve.edge.steps import Steps, within
from sloop.serve.edge.triton import DATA_TYPES, changed_not, check_change, classified, configuration
from sloop.serve.messages import AskIndex, AskModels, AskReady, AskStatistics, ChangeModel, Question
from sloop.serve.protocols import RequestResult
from sloop.tensor import ITEM_BYTES, LENGTH_BYTES, Port, Tensor
from sloop.text import quoted
from sloop.vocabulary import Outcome

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
    "ModelMetadataResponse.TensorMetadata": (
        *(("name", "string", 1), ("datatype", "string", 2), ("shape", "int64[]", 3)),
        ("parameters", "InferParameter{}", 4),  # as MLServer extends the protocol
    ),
    "ModelMetadataResponse": (
        ("name", "string", 1),
        ("versions", "string[]", 2),
        ("platform", "string", 3),
        ("inputs", "ModelMetadataResponse.TensorMetadata[]", 4),
        ("outputs", "ModelMetadataResponse.TensorMetadata[]", 5),
        ("parameters", "InferParameter{}", 6),  # as MLServer extends the protocol
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
    # Triton's extensions
    "ModelConfigRequest": (("name", "string", 1), ("version", "string", 2)),
    "ModelConfigResponse": (("config", "ModelConfig", 1),),
    "ModelConfig": (
        ("name", "string", 1),
        ("platform", "string", 2),
        ("max_batch_size", "int32", 4),
        ("input", "ModelInput[]", 5),
        ("output", "ModelOutput[]", 6),
        ("parameters", "ModelParameter{}", 14),
        ("backend", "string", 17),
    ),
    "ModelParameter": (("string_value", "string", 1),),
    "ModelInput": (("name", "string", 1), ("data_type", "int32", 2), ("dims", "int64[]", 4), ("optional", "bool", 8)),
    "ModelOutput": (("name", "string", 1), ("data_type", "int32", 2), ("dims", "int64[]", 3)),
    "ModelStatisticsRequest": (("name", "string", 1), ("version", "string", 2)),
    "ModelStatisticsResponse": (("model_stats", "ModelStatistics[]", 1),),
    "ModelStatistics": (
        ("name", "string", 1),
        ("version", "string", 2),
        ("last_inference", "uint64", 3),
        ("inference_count", "uint64", 4),
        ("execution_count", "uint64", 5),
        ("inference_stats", "InferStatistics", 6),
        ("batch_stats", "InferBatchStatistics[]", 7),
    ),
    "StatisticDuration": (("count", "uint64", 1), ("ns", "uint64", 2)),
    "InferStatistics": (
        ("success", "StatisticDuration", 1),
        ("fail", "StatisticDuration", 2),
        ("queue", "StatisticDuration", 3),
        ("compute_input", "StatisticDuration", 4),
        ("compute_infer", "StatisticDuration", 5),
        ("compute_output", "StatisticDuration", 6),
        ("cache_hit", "StatisticDuration", 7),
        ("cache_miss", "StatisticDuration", 8),
    ),
    "InferBatchStatistics": (
        ("batch_size", "uint64", 1),
        ("compute_input", "StatisticDuration", 2),
        ("compute_infer", "StatisticDuration", 3),
        ("compute_output", "StatisticDuration", 4),
    ),
    "ModelRepositoryParameter": (
        ("bool_param", "bool", 1),
        ("int64_param", "int64", 2),
        ("string_param", "string", 3),
        ("bytes_param", "bytes", 4),
    ),
    "RepositoryIndexRequest": (("repository_name", "string", 1), ("ready", "bool", 2)),
    "RepositoryIndexResponse.ModelIndex": (
        ("name", "string", 1),
        ("version", "string", 2),
        ("state", "string", 3),
        ("reason", "string", 4),
    ),
    "RepositoryIndexResponse": (("models", "RepositoryIndexResponse.ModelIndex[]", 1),),
    "RepositoryModelLoadRequest": (
        ("repository_name", "string", 1),
        ("model_name", "string", 2),
        ("parameters", "ModelRepositoryParameter{}", 3),
    ),
    "RepositoryModelLoadResponse": (),
    "RepositoryModelUnloadRequest": (
        ("repository_name", "string", 1),
        ("model_name", "string", 2),
        ("parameters", "ModelRepositoryParameter{}", 3),
    ),
    "RepositoryModelUnloadResponse": (),
    "CheckRequest": (("service", "string", 1),),
    "CheckResponse": (("status", "int32", 1),),
}
_ONE_OF: Final = {"InferParameter": "parameter_choice", "ModelRepositoryParameter": "parameter_choice"}
METHODS: Final = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
)

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
ELEMENTS: Final = {
    "bool_contents": (1, 0),
    "int_contents": (2, 0),
    "int64_contents": (3, 0),
    "uint_contents": (4, 0),
    "uint64_contents": (5, 0),
    "fp32_contents": (6, 5),
    "fp64_contents": (7, 1),
    "bytes_contents": (8, 2),
}
"""The numbers of these fields, and the wire type of a single element: numbers may be packed (2) as well."""
NAMES: Final = {number: name for name, (number, _) in ELEMENTS.items()}
HEADROOM_BYTES: Final = 64 * 1024
"""Extra bytes of a message for names, shapes and parameters."""
QUERY_BYTES_MAX: Final = 16 * 1024
"""The largest message of a method other than inference."""
UNREAD_BYTES_MAX: Final = 16 * 1024
"""Protobuf parses a smaller message at once: in 16 KiB there cannot be much. A larger one is read in steps."""
CONTENTS_BYTES_MIN: Final = 1024
"""A smaller input of a large message is left to protobuf with its typed contents."""
REST_BYTES_MAX: Final = 128 * 1024
"""The most that a large message may have beside tensors: protobuf parses it at once."""
DIMENSIONS_MAX: Final = 64
VARINTS_AT_ONCE: Final = 4096
FIELDS_AT_ONCE: Final = 128
"""Numbers of so many bytes, or so many fields, are read in some 0.1 ms."""
FIELDS_MAX: Final = 8_192
"""Fields of a message, with those of the messages in it: reading so many takes some 5 ms. A packed list is one."""
TYPED_BYTES_MAX: Final = 8 * 2**20
"""The most that the typed contents of one input may have: JSON's bound."""
INFER: Final = "ModelInfer"
HEALTH: Final = "/grpc.health.v1.Health/Check"
SERVING, NOT_SERVING = 1, 2
KEYLESS: Final = frozenset({"ServerLive", "ServerReady", "Check"})
CHANGES: Final = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
"""Methods that need a key of an administrator."""
EMPTY: Final = frozenset({"ServerLive", "ServerReady", "ServerMetadata"})
"""Methods whose request has no fields, so that it is not parsed."""
MET: Final[Field] = ("x-slo-met", "true")
NOT_MET: Final[Field] = ("x-slo-met", "false")

_log = logging.getLogger(__name__)


class Rpc:
    """A gRPC server. At most `requests_max` calls are open; more are refused (UNAVAILABLE)."""

    def __init__(
        self,
        service: InferenceService,
        *,
        requests_max: int,
        connections_max: int = 0,
        each_address_max: int = 0,
        tls: Tls | None = None,
        intake: Intake | None = None,
    ) -> None:
        self.service = service
        self.server = Http2Server(
            self,
            service.bodies,
            calls_max=requests_max,
            connections_max=connections_max,
            each_address_max=each_address_max,
            tls=tls,
            intake=intake,
        )
        self._infer_bytes_max = service.bodies.each_bytes_max + HEADROOM_BYTES
        self._methods: dict[str, tuple[str, Callable[[Any, Call], Message | None]]] = {
            f"/{SERVICE}/{method}": (method, getattr(self, f"_{method}")) for method in METHODS
        }
        """By path, the name of the method and what answers it: with the message that is returned, or later with `reply`
        if that is None."""
        self._methods[HEALTH] = ("Check", self._Check)

    def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, which this object then owns. Call it in the running event loop."""
        self.server.start(sock)

    async def close(self, within_s: float) -> None:
        """Stop listening, wait at most `within_s` for open calls, then cancel them."""
        await self.server.close(within_s)

    def begin(self, call: Call) -> int:
        """Check the key of a call whose head has come, and return the size that its message may have."""
        service = self.service
        method, _ = self._methods.get(call.path, ("", None))
        call.is_authorised = not service.keys.is_required or method not in KEYLESS
        if service.keys.is_required and call.is_authorised:
            given = call.metadata.get("authorization"), call.metadata.get("x-api-key")
            service.authorise(*given, as_admin=method in CHANGES)
        if not method:
            what = f"unknown method {quoted(call.path)}"
            raise Refusal(501, what, f"call /{SERVICE}/METHOD with one of {', '.join(METHODS)}")
        return self._infer_bytes_max if method == INFER else QUERY_BYTES_MAX

    def glance(self, beginning: bytes) -> Steps[None]:
        """Refuse a large message that begins with more fields than it may have."""
        yield from check_fields(beginning, f"{INFER}Request", is_whole=False)

    def answer(self, call: Call, message: bytes | memoryview) -> None:
        """Answer a call whose message has come."""
        method, respond = self._methods[call.path]
        request: Any = None
        if method == INFER:
            if len(message) > UNREAD_BYTES_MAX:
                call.do(self._infer_in_steps(message, call))
                return
            request = parsed(bytes(message), f"{INFER}Request")
        elif method not in EMPTY:
            request = parsed(bytes(message), f"{method}Request")
        answer = respond(request, call)
        if answer is not None:
            reply(call, answer)

    def patience_ns(self, call: Call) -> int:
        """How long a call may wait, as far as its deadline can be told without its message."""
        models = self.service.models.values()
        own_ns = max((model.slo_ns for model in models), default=0)
        try:
            slo_ns, _ = budget_ns(call.metadata.get(SLO), None, own_ns=own_ns, remaining_ns=call.remaining_ns())
        except Refusal:  # it is refused for that when it is looked at
            slo_ns = None
        return self.server.intake.patience_ns(own_ns if slo_ns is None else min(slo_ns, own_ns))

    def _ServerLive(self, _request: object, _call: Call) -> Message:
        return message_class("ServerLiveResponse")(live=True)  # type: ignore[no-any-return]

    def _ServerReady(self, _request: object, call: Call) -> None:
        ready = message_class("ServerReadyResponse")
        self.service.pages.ask(AskReady(), lambda answer: reply(call, ready(ready=not server_readiness_of(answer).why)))

    def _Check(self, request: Any, call: Call) -> None:  # noqa: ANN401
        """gRPC's own health protocol, as Kubernetes' probes speak it: of the server, which has the empty name and that
        of its service, or of a model, for which a key is needed as for others."""
        checked, name = message_class("CheckResponse"), request.service
        if name in ("", SERVICE):

            def answer(found: bytes) -> None:
                reply(call, checked(status=NOT_SERVING if server_readiness_of(found).why else SERVING))

            self.service.pages.ask(AskReady(), answer)
            return
        self.service.authorise(call.metadata.get("authorization"), call.metadata.get("x-api-key"))
        self.service.model(name)

        def then(found: bytes) -> None:
            readiness = readiness_of(found).get(name)
            is_ready = readiness is not None and readiness.is_ready
            reply(call, checked(status=SERVING if is_ready else NOT_SERVING))

        self.service.pages.ask(AskModels(name), then)

    def _ModelReady(self, request: Any, call: Call) -> None:  # noqa: ANN401
        model = self.service.model(request.name)

        def then(answer: bytes) -> None:
            try:
                readiness = self.service.readiness_in(answer, model, request.version)
            except Refusal as refusal:
                self.server.refuse(call, refusal)
                return
            ready = message_class("ModelReadyResponse")(ready=readiness.is_ready)
            reply(call, ready, (("x-sloop-state", readiness.state.value),))

        self.service.pages.ask(AskModels(request.name, request.version), then)

    def _ServerMetadata(self, _request: object, _call: Call) -> Message:
        return message_class("ServerMetadataResponse")(  # type: ignore[no-any-return]
            name=offered.SERVER, version=offered.SERVER_VERSION, extensions=self.service.extensions
        )

    def _ModelMetadata(self, request: Any, _call: Call) -> Message:  # noqa: ANN401
        model = self.service.model(request.name, request.version)
        signature = model.validator.signature
        return message_class("ModelMetadataResponse")(  # type: ignore[no-any-return]
            name=request.name,
            versions=model.versions,
            platform=offered.PLATFORM,
            inputs=[*map(of_port, signature.inputs), *(of_port(p, optional=True) for p in signature.optional)],
            outputs=list(map(of_port, signature.outputs)),
            parameters={name: {"int64_param": most} for name, most in self.service.bounds(model).items()},
        )

    def _ModelConfig(self, request: Any, _call: Call) -> Message:  # noqa: ANN401
        model = self.service.model(request.name, request.version)
        config = configuration(model, self.service.bounds(model))
        for port in (*config["input"], *config["output"]):
            port["data_type"] = DATA_TYPES[port["data_type"]]
        return message_class("ModelConfigResponse")(config=config)  # type: ignore[no-any-return]

    def _ModelStatistics(self, request: Any, call: Call) -> None:  # noqa: ANN401
        if request.name:
            self.service.model(request.name, request.version)
        response = message_class("ModelStatisticsResponse")
        question = AskStatistics(request.name, request.version)
        self._ask(call, question, lambda found: ParseDict(json.loads(found), response(), ignore_unknown_fields=True))

    def _RepositoryIndex(self, request: Any, call: Call) -> None:  # noqa: ANN401
        def answer(found: bytes) -> Message:
            models = [model for model in json.loads(found) if not request.ready or model["state"] == "READY"]
            return message_class("RepositoryIndexResponse")(models=models)  # type: ignore[no-any-return]

        self._ask(call, AskIndex(), answer)

    def _RepositoryModelLoad(self, request: Any, call: Call) -> None:  # noqa: ANN401
        self._change(request, call, "load", "RepositoryModelLoadResponse")

    def _RepositoryModelUnload(self, request: Any, call: Call) -> None:  # noqa: ANN401
        self._change(request, call, "unload", "RepositoryModelUnloadResponse")

    def _change(self, request: Any, call: Call, verb: str, response: str) -> None:  # noqa: ANN401
        """Load or end a model."""
        check_change(dict(request.parameters), verb)

        def answer(found: bytes) -> Message:
            if found:
                raise changed_not(found)
            return message_class(response)()  # type: ignore[no-any-return]

        self._ask(call, ChangeModel(request.model_name, verb == "load"), answer)

    def _ask(self, call: Call, question: Question, answer: Callable[[bytes], Message]) -> None:
        """Ask the deciding process, and send the message that `answer` makes of what it says."""

        def then(found: bytes) -> None:
            try:
                reply(call, answer(found))
            except Refusal as refusal:
                self.server.refuse(call, refusal)

        self.service.pages.ask(question, then)

    def _ModelInfer(self, request: Any, call: Call) -> None:  # noqa: ANN401
        model = self._model_for(request, call)
        tensors = model.validator.complete(inputs_of(request, request.raw_input_contents, {}, model.validator))
        self._submit(call, model, asked_of(request, call, model), tensors)

    def _infer_in_steps(self, message: bytes | memoryview, call: Call) -> Steps[None]:
        """The same for a large message."""
        large = yield from inference(message)
        request = large.request
        model = self._model_for(request, call)
        validator, asked = model.validator, asked_of(request, call, model)
        until_ns = call.began_ns + (model.slo_ns if asked.slo_ns is None else asked.slo_ns) - asked.elapsed_ns
        typed = {} if large.raw else (yield from within(until_ns, typed_in_steps(large, validator)))
        tensors = validator.complete(inputs_of(request, large.raw, typed, validator))
        yield from within(until_ns, check_strings_in_steps(tensors))
        stored = yield from within(until_ns, self.service.sink.store(tensors, model.name))
        self.service.model(model.name, asked.version)  # it may have gone meanwhile
        self._submit(call, model, asked, stored)

    def _model_for(self, request: Any, call: Call) -> Model:  # noqa: ANN401
        """The model of an inference, whose message counts for its quota from now on."""
        service = self.service
        if service.bodies.quotas:
            size = call.hold.size
            call.hold.drop()
            call.hold.limit(service.bodies.quotas.get(request.model_name))
            call.hold.take(size)
        return service.model(request.model_name, request.model_version)

    def _submit(self, call: Call, model: Model, asked: "InferOptions", tensors: Mapping[str, Tensor]) -> None:
        identity = identity_of(call.metadata.get(REQUEST_ID), call.metadata.get(TRACEPARENT), asked.id)
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
            on_end=partial(self._end, call, model, asked),
        )
        if call.is_open:
            call.on_gone = partial(sink.cancel, number)

    def _end(self, call: Call, model: Model, asked: "InferOptions", ended: RequestResult) -> None:
        """Answer an inference; if that fails, answer an error, because the client would otherwise wait for ever."""
        if not call.is_open:
            return
        try:
            if ended.outcome not in (Outcome.SERVED, Outcome.LATE):
                raise refusal_of(ended)
            if asked.classes:
                call.do(self._classify(call, model, asked, ended))
                return
            answer, raw = answer_of(model.name, asked.id, asked.names, ended.version, ended.outputs)
            reply(call, answer, (MET if ended.outcome is Outcome.SERVED else NOT_MET,), raw)
        except Refusal as refusal:
            self.server.refuse(call, refusal)
        except Exception:
            _log.exception("internal error while answering for %s", model.name)
            what = "failed: internal error of the server"
            self.server.refuse(call, Refusal(500, what, "see the server's log, and report it"))

    def _classify(self, call: Call, model: Model, asked: "InferOptions", ended: RequestResult) -> Steps[None]:
        """Answer an inference with classes."""
        outputs = yield from classified(ended.outputs, asked.classes, model)
        answer, raw = answer_of(model.name, asked.id, asked.names, ended.version, outputs)
        reply(call, answer, (MET if ended.outcome is Outcome.SERVED else NOT_MET,), raw)


@cache
def trailers_of(fields: tuple[Field, ...]) -> bytes:
    """The block that ends an answer with these fields; there are few different ones."""
    return encode(("grpc-status", "0"), *fields)


def reply(call: Call, message: Message, trailers: tuple[Field, ...] = (), raw: Sequence[Buffer] = ()) -> None:
    """Answer a call with a message, followed by fields that are already written."""
    last = trailers_of(trailers)
    if REQUEST_ID in call.metadata and (name := named(call.metadata[REQUEST_ID])):
        last += encode((REQUEST_ID, name))
    call.reply((message.SerializeToString(), *raw), last)


# Reading messages


def parsed(message: bytes, name: str) -> Any:  # noqa: ANN401
    """The message. Raises a 400 if it cannot be parsed."""
    try:
        return message_class(name).FromString(message)
    except DecodeError as error:
        raise bad("message", f"not a {name} ({error})", "send the messages of the Open Inference Protocol") from None


Span = tuple[int, int]
"""Where a part of a message begins and ends."""


class Large(Struct):
    """A large `ModelInferRequest`: protobuf has parsed it without the tensors, of which these are slices."""

    request: Any
    raw: list[Buffer]
    """Its raw contents."""
    contents: dict[int, list[memoryview]]
    """The typed contents of inputs, by their position. A message may give them in several parts."""


def inference(message: bytes | memoryview) -> Steps[Large]:
    """Parse a large `ModelInferRequest`, which contains no more than it may. Raises a `Refusal`."""
    yield from check_fields(message, f"{INFER}Request")
    view = memoryview(message)
    found, inputs = Large(None, [], {}), 0
    rest: list[bytes | memoryview] = []
    for place, (tag, begin, start, end) in enumerate(_fields(message, 0, len(message))):
        if tag == RAW_INPUT:
            found.raw.append(view[start:end])
        elif tag == INPUT:
            parts, contents = yield from _without_contents(message, start, end)
            rest += parts
            if contents:
                found.contents[inputs] = contents
            inputs += 1
        else:
            rest.append(view[begin:end])
        if not place % FIELDS_AT_ONCE:
            yield
    size = sum(map(len, rest))
    if size > REST_BYTES_MAX:
        what = f"message: {size} bytes beside the tensors; the limit is {REST_BYTES_MAX}"
        raise Refusal(413, what, "send shorter names and parameters")
    found.request = parsed(b"".join(rest), f"{INFER}Request")
    for index, given in enumerate(found.request.inputs):
        if len(given.shape) > DIMENSIONS_MAX:
            fix = "the shape of an input is in the model's metadata"
            raise bad(f"inputs[{index}].shape", f"{len(given.shape)} dimensions", fix)
        if not index % FIELDS_AT_ONCE:
            yield
    return found


def _without_contents(
    message: bytes | memoryview, start: int, end: int
) -> Steps[tuple[list[bytes | memoryview], list[memoryview]]]:
    """The parts of an input as a field of its request, without its contents if it has many; and these."""
    view = memoryview(message)
    contents: list[memoryview] = []
    rest: list[bytes | memoryview] = []
    at = start
    if end - start > CONTENTS_BYTES_MIN:
        for place, (tag, begin, inner, after) in enumerate(_fields(message, start, end), 1):
            if tag == CONTENTS_OF_INPUT:
                contents.append(view[inner:after])
                rest.append(view[at:begin])
                at = after
            if not place % FIELDS_AT_ONCE:
                yield
    rest.append(view[at:end])
    if contents:
        rest.append(b"\x2a\x00")
    return [b"\x2a" + varint_of(sum(map(len, rest))), *rest], contents


INPUT: Final = 0x2A
CONTENTS_OF_INPUT: Final = 0x2A
RAW_INPUT: Final = 0x3A
"""The fields `inputs` (5), its `contents` (5) and `raw_input_contents` (7) with a length (wire type 2)."""


def _fields(message: bytes | memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The tag of each field of a message, where it begins, where its value does, and where both end."""
    while at < end:
        begin = at
        tag, at = _varint(message, at, end)
        start, at = at, _skip(message, tag & 7, at, end)
        if tag & 7 == 2:
            _, start = _varint(message, start, end)
        if at > end:
            raise bad("message", "it ends within a field", "send the whole message")
        yield tag, begin, start, at


def _skip(message: bytes | memoryview, kind: int, at: int, end: int) -> int:
    """Where a field of this wire type ends."""
    if kind == 0:
        return _varint(message, at, end)[1]
    if kind == 2:
        size, at = _varint(message, at, end)
        return at + size
    if kind in (1, 5):
        return at + (8 if kind == 1 else 4)
    raise bad("message", f"a field of wire type {kind}", "send the messages of the Open Inference Protocol")


def check_fields(message: bytes | memoryview, name: str, *, is_whole: bool = True) -> Steps[None]:
    """Count the fields of a message, or of its beginning, and of those in it. Raises a `Refusal` if there are too
    many."""
    try:
        yield from _count_fields(message, name)
    except Refusal as refusal:
        if is_whole or refusal.status != 400:
            raise


def _count_fields(message: bytes | memoryview, name: str) -> Steps[None]:
    budget = FIELDS_MAX
    waiting = [(name, 0, len(message))]
    while waiting:
        name, at, end = waiting.pop()
        inner = _inner(name)
        while at < end:
            budget -= 1
            if budget < 0:
                fix = "send raw_input_contents, which is one field for each input, and fewer inputs"
                raise Refusal(413, f"message: more than {FIELDS_MAX} fields", fix)
            if not budget % FIELDS_AT_ONCE:
                yield
            tag, at = _varint(message, at, end)
            begin, at = at, _skip(message, tag & 7, at, end)
            part = inner.get(tag >> 3) if tag & 7 == 2 else None
            if part is not None:
                size, begin = _varint(message, begin, end)
                waiting.append((part, begin, min(at, end)))
                if part == "InferTensorContents" and size > TYPED_BYTES_MAX:
                    what = f"contents: {size} bytes; the limit of typed contents is {TYPED_BYTES_MAX}"
                    raise Refusal(413, what, "send raw_input_contents")


@cache
def _inner(name: str) -> Mapping[int, str]:
    """The fields of a message that are messages themselves, by number: of an entry of a map (`{}`), its value."""
    if name.endswith("{}"):
        value = name.removesuffix("{}")
        return {2: value} if value in _FIELDS else {}
    found = {number: kind.removesuffix("[]") for _, kind, number in _FIELDS[name]}
    return {number: kind for number, kind in found.items() if kind in _FIELDS or kind.endswith("{}")}


def _varint(data: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """A number of up to ten bytes, and where what follows begins."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise bad("message", "it ends within a field", "send the whole message")


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
    contents: Mapping[int, Buffer],
    validator: InputValidator,
) -> dict[str, Tensor]:
    """The input tensors of a call by name. `raws` are its raw contents; `contents` its typed contents, by the position
    of their input, as far as they were converted before. Raises a 400 that names the field."""
    known: dict[str, tuple[tuple[int, ...], int]] = {}
    for index, given in enumerate(request.inputs):
        shape = tuple(given.shape)
        try:
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
            if raws:
                data = raws[index]
            elif index in contents:
                data = contents[index]
            else:
                data = typed(given.datatype, shape, count, given.contents)
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


def answer_of(
    model: str,
    id: str,
    names: Sequence[str],
    version: str,
    outputs: Mapping[str, Tensor],
) -> tuple[Message, list[Buffer]]:
    """`ModelInferResponse` with the outputs of these names, but without their raw contents; and those, as the fields
    that follow it."""
    answer = message_class("ModelInferResponse")(model_name=model, model_version=version, id=id)
    raw: list[Buffer] = []
    for name in names:
        tensor = outputs.get(name)
        if tensor is None:
            continue  # an output of a branch that this request did not take
        answer.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        raw += (RAW_OUTPUT + varint_of(memoryview(tensor.data).nbytes), tensor.data)
    return answer, raw


RAW_OUTPUT: Final = b"\x32"
"""The field `raw_output_contents` (6) with a length (wire type 2)."""


def varint_of(value: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while value >= 128:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def typed(datatype: str, shape: tuple[int, ...], count: int, contents: Any) -> bytes:  # noqa: ANN401
    """Convert the elements of a typed field to raw bytes."""
    name = contents_name(datatype)
    for other, elements in contents.ListFields():
        if other.name != name:
            raise other_contents(other.name, f"{len(elements)}", datatype)
    elements = getattr(contents, name)
    if len(elements) != count:
        raise wrong_count(name, f"{len(elements)}", shape, count)
    return pack(datatype, shape, count, list(elements), f"contents.{name}")


def contents_name(datatype: str) -> str:
    """The typed field that holds the elements of a datatype."""
    name = CONTENTS.get(datatype)
    if name is None:
        raise bad("contents", f"{datatype} has no typed contents", "send raw_input_contents")
    return name


def other_contents(other: str, found: str, datatype: str) -> Refusal:
    """The 400 for elements in the field of another datatype."""
    return bad(f"contents.{other}", f"{found} elements for {datatype}", f"use {CONTENTS[datatype]}")


def wrong_count(name: str, found: str, shape: tuple[int, ...], count: int) -> Refusal:
    """The 400 for typed contents with another number of elements than their tensor."""
    return bad(
        f"contents.{name}",
        f"{found} elements, but shape {list(shape)} has {count}",
        "send every element once, in row-major order, or all inputs as raw_input_contents",
    )


def typed_in_steps(large: Large, validator: InputValidator) -> Steps[dict[int, Buffer]]:
    """Convert long typed contents to raw bytes, by the position of their input."""
    found: dict[int, Buffer] = {}
    for index, parts in large.contents.items():
        given = large.request.inputs[index]
        shape = tuple(given.shape)
        try:
            count = validator.count(given.name, given.datatype, shape)
            found[index] = yield from _typed(given.datatype, shape, count, parts)
        except Refusal as refusal:
            raise refusal.within(f"inputs[{index}]") from None
    return found


def _typed(datatype: str, shape: tuple[int, ...], count: int, parts: Iterable[memoryview]) -> Steps[Buffer]:
    name = contents_name(datatype)
    found = yield from _elements_in(name, parts, datatype)
    wire = ELEMENTS[name][1]
    if wire == 0:
        return (yield from _from_varints(datatype, shape, count, name, found))
    have = len(found) if wire == 2 else sum(map(len, found)) // ITEM_BYTES[datatype]
    if have != count:
        raise wrong_count(name, f"{have}", shape, count)
    if wire == 2:
        found = [part for each in found for part in (memoryview(len(each).to_bytes(LENGTH_BYTES, "little")), each)]
    elif any(len(each) % ITEM_BYTES[datatype] for each in found):
        raise bad("message", f"{name} ends within an element", "send the whole message")
    if len(found) == 1:
        return found[0]
    data = bytearray()
    for each in found:
        for at in range(0, len(each), COPIED_BYTES):
            data += each[at : at + COPIED_BYTES]
        yield
    return data


def _elements_in(name: str, parts: Iterable[memoryview], datatype: str) -> Steps[list[memoryview]]:
    """The elements of a typed field: single ones, and packed lists of numbers."""
    number, wire = ELEMENTS[name]
    found: list[memoryview] = []
    for contents in parts:
        for place, (tag, _, start, end) in enumerate(_fields(contents, 0, len(contents))):
            if tag >> 3 == number and tag & 7 in (2, wire):
                found.append(contents[start:end])
            elif (other := NAMES.get(tag >> 3)) is not None:
                raise other_contents(other, "some", datatype)
            if not place % FIELDS_AT_ONCE:
                yield
    return found


def _from_varints(
    datatype: str, shape: tuple[int, ...], count: int, name: str, found: Iterable[memoryview]
) -> Steps[bytearray]:
    data, have = bytearray(), 0
    tag = bytes((ELEMENTS[name][0] << 3 | 2,))
    for each in found:
        at = 0
        while at < len(each):
            end = min(at + VARINTS_AT_ONCE, len(each))
            while end > at + 1 and each[end - 1] & 0x80:  # within a number
                end -= 1
            part = parsed(tag + varint_of(end - at) + each[at:end], "InferTensorContents")
            elements = list(getattr(part, name))
            data += converted(datatype, elements, f"contents.{name}")
            have, at = have + len(elements), end
            if have > count:
                raise wrong_count(name, f"{have} or more", shape, count)
            yield
    if have != count:
        raise wrong_count(name, f"{have}", shape, count)
    return data


def parameters_of(message: Any, known: frozenset[str], field: str) -> Parameters:  # noqa: ANN401
    """The parameters of a message. Raises a 400 for one that cannot be honoured."""
    if not message.parameters:
        return {}
    check_count(len(message.parameters), field)
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()}
    found = {name: None if choice is None else getattr(value, choice) for name, (value, choice) in chosen.items()}
    check(found, known, field)
    return found


def of_port(port: Port, *, optional: bool = False) -> object:
    """`TensorMetadata`."""
    parameters = {"optional": {"bool_param": True}} if optional else {}
    return message_class("ModelMetadataResponse.TensorMetadata")(
        name=port.name, datatype=port.datatype, shape=port.shape, parameters=parameters
    )
