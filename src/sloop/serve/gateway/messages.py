"""The protobuf messages of the Open Inference Protocol v2, built from a table instead of generated code.

Field names, numbers and types are the protocol's. The messages live in a descriptor pool of their own: a client
library in the same process (Triton's, KServe's) registers messages of the same names in the default one.
Source: Open Inference Protocol v2, "gRPC".
"""

from functools import cache
from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

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
    """The class of one message, such as `ModelInferRequest`."""
    found: type[Message] = GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return found
