"""The messages of the Open Inference Protocol v2 over gRPC, with Triton's extensions.

They are built at import from the table `_FIELDS`, so no generated code is needed, in a pool of their own, because
clients in the same process may have messages of the same names. Source: Open Inference Protocol v2, "GRPC".
"""

from functools import cache
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from sloop.protobuf import described

PACKAGE: Final = "inference"
SERVICE: Final = "inference.GRPCInferenceService"

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


def _describe() -> FileDescriptorProto:
    file = described("sloop/inference.proto", PACKAGE, _FIELDS, syntax="proto3", one_of=_ONE_OF)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for method in METHODS:
        service.method.add(
            name=method, input_type=f".{PACKAGE}.{method}Request", output_type=f".{PACKAGE}.{method}Response"
        )
    return file


POOL: Final = DescriptorPool()
POOL.AddSerializedFile(_describe().SerializeToString())


@cache
def message_class(name: str) -> Any:  # noqa: ANN401  # protobuf's generated attributes have no static types
    """The class of a message, such as `ModelInferRequest`."""
    found: type[Message] = GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    return found
