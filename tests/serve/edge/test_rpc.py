"""gRPC over a real socket, with messages of our own making."""

import asyncio
import contextlib
import gzip
import socket
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from benchmarks.attacks import REGISTERED_FLOODS, begun
from benchmarks.frames import PREFACE, SETTINGS, frame
from sloop.app.limits import Limits, ServerLimits
from sloop.serve.edge import parameters as parameters_module
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.grpc import server as rpc_module
from sloop.serve.edge.grpc.schema import SERVICE, message_class
from sloop.serve.edge.grpc.server import (
    HEALTH,
    INFLATED_BYTES_MAX,
    REFLECTIONS,
    SMALL_BYTES,
    SOCKET,
    Rpc,
    inference,
    inflated,
    inputs_of,
    parameters_of,
)
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.listener import Tls
from sloop.serve.edge.parameters import COMPARED_MAX, PARAMETERS_MAX
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import EXTENSIONS, InferenceService
from sloop.serve.protocols import ModelState, Readiness, RequestResult
from sloop.tensor import Port, Tensor
from sloop.units import ms, s
from sloop.vocabulary import Outcome
from tests.serve.edge.fakes import FOLDERS, SIGNATURE, FakeDriver, Gateway, LoopThread, make_service, rpc_server, scaled
from tests.serve.edge.test_attacks import make_certificate

pytestmark = pytest.mark.live

Infer = message_class("ModelInferRequest")


class Stub:
    """A blocking client."""

    def __init__(self, port: int, credentials: grpc.ChannelCredentials | None = None) -> None:
        self.port = port
        options = [("grpc.max_receive_message_length", -1)]
        if credentials is None:
            self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
        else:
            self.channel = grpc.secure_channel(f"localhost:{port}", credentials, options=options)

    def call(self, method: str, request: Any, **options: Any) -> tuple[Any, grpc.Call]:
        invoke = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=message_class(f"{method}Request").SerializeToString,
            response_deserializer=message_class(f"{method}Response").FromString,
        )
        options.setdefault("timeout", 10)
        return invoke.with_call(request, **options)

    def refused_raw(self, method: str, message: bytes) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            self.channel.unary_unary(f"/{SERVICE}/{method}", bytes, bytes)(message, timeout=20)
        return caught.value

    def refused(self, method: str, request: Any, **options: Any) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, request, **options)
        return caught.value


@pytest.fixture
def stub(gateway: Gateway) -> Iterator[Stub]:
    stub = Stub(gateway.grpc_port)
    yield stub
    stub.channel.close()


Started = Callable[..., tuple[Rpc, Stub]]


@pytest.fixture
def started(loop_thread: LoopThread) -> Iterator[Started]:
    """Starts a server of its own, and a client of it; both end with the test."""
    made: list[tuple[Rpc, Stub]] = []

    def start(
        service: InferenceService | None = None, limits: ServerLimits = ServerLimits(requests=8), **options: Any
    ) -> tuple[Rpc, Stub]:
        rpc = rpc_server(service or make_service(Gateway(FakeDriver()), **options), limits=limits)
        made.append((rpc, Stub(loop_thread.serve(rpc))))
        return made[-1]

    yield start
    for rpc, stub in made:
        stub.channel.close()
        loop_thread.call(rpc.close(0.5))


def trailing(call: Any) -> dict[str, str]:
    return dict(call.trailing_metadata() or ())


def infer(x: list[float] | None = None, rows: int = 1, **fields: Any) -> Any:
    request = Infer(model_name="demo", **fields)
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 4]).contents.fp32_contents.extend(x or [1, 2, 3, 4])
    request.inputs.add(name="k", datatype="INT64", shape=[rows, 1]).contents.int64_contents.extend([2] * rows)
    return request


def infer_raw() -> Any:
    request = Infer(model_name="demo", id="raw")
    request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
    request.inputs.add(name="k", datatype="INT64", shape=[2, 1])
    request.raw_input_contents.extend([np.arange(8, dtype="<f4").tobytes(), np.array([1, 2], "<i8").tobytes()])
    return request


def test_describes_server_and_model(stub: Stub, gateway: Gateway) -> None:
    assert stub.call("ServerLive", message_class("ServerLiveRequest")())[0].live
    assert stub.call("ServerReady", message_class("ServerReadyRequest")())[0].ready
    gateway.why_unready = "starting"
    assert not stub.call("ModelReady", message_class("ModelReadyRequest")(name="demo"))[0].ready
    server, _ = stub.call("ServerMetadata", message_class("ServerMetadataRequest")())
    assert (server.name, list(server.extensions)) == ("sloop", [*EXTENSIONS])
    model, _ = stub.call("ModelMetadata", message_class("ModelMetadataRequest")(name="demo", version="1"))
    assert [(port.name, port.datatype, list(port.shape)) for port in model.inputs] == [
        ("x", "FP32", [-1, 4]),
        ("k", "INT64", [-1, 1]),
    ]
    assert {name: each.int64_param for name, each in model.parameters.items()} == {
        "rows_max": 8,
        "request_bytes_max": 100_000,
        "json_bytes_max": 100_000,
    }


def test_optional_inputs_are_in_the_metadata(stub: Stub, gateway: Gateway) -> None:
    service = gateway.service
    assert service is not None
    scale = Port("scale", "FP32", (1,), has_rows=False)
    validator = InputValidator(structs.replace(SIGNATURE, optional=(scale,)))
    service.add(replace(service.models["demo"], name="optional", validator=validator))
    model, _ = stub.call("ModelMetadata", message_class("ModelMetadataRequest")(name="optional"))
    assert [port.parameters["optional"].bool_param for port in model.inputs] == [False, False, True]
    config, _ = stub.call("ModelConfig", message_class("ModelConfigRequest")(name="optional"))
    assert [port.optional for port in config.config.input] == [False, False, True]
    assert config.config.parameters["rows_max"].string_value == "8"
    service.remove("optional")


def test_a_resting_model_is_ready_and_says_so(stub: Stub, gateway: Gateway) -> None:
    ready = message_class("ModelReadyRequest")(name="demo", version="1")
    gateway.states["demo"] = Readiness(ModelState.RESTING)
    answer, call = stub.call("ModelReady", ready)
    assert (answer.ready, trailing(call)["x-sloop-state"]) == (True, "resting")
    gateway.states["demo"] = Readiness(ModelState.WAITING, "no replicas are planned")
    answer, call = stub.call("ModelReady", ready)
    assert (answer.ready, trailing(call)["x-sloop-state"]) == (False, "waiting")


def test_names_and_versions_decide_where_a_call_goes(stub: Stub, gateway: Gateway) -> None:
    service = gateway.service
    assert service is not None
    service.add(replace(service.models["demo"], name="other", versions=["1", "2"]))
    request = infer(model_version="2")
    request.model_name = "other"
    gateway.driver.respond = lambda tensors: structs.replace(scaled(tensors), version="2")
    answer, _ = stub.call("ModelInfer", request)
    assert (answer.model_name, answer.model_version) == ("other", "2")
    assert gateway.driver.asked == [("other", "2")]
    model, _ = stub.call("ModelMetadata", message_class("ModelMetadataRequest")(name="other"))
    assert (model.name, list(model.versions)) == ("other", ["1", "2"])
    service.remove("other")
    error = stub.refused("ModelInfer", request)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == "unknown model 'other'; help: this server has the model 'demo'"


def test_a_model_at_its_limit_refuses_calls(stub: Stub, gateway: Gateway) -> None:
    service = gateway.service
    assert service is not None
    service.add(replace(service.models["demo"], limits=Limits(requests=1, bytes=300)))
    quota = service.bodies.quotas["demo"]
    quota.requests = 1
    error = stub.refused("ModelInfer", infer())
    assert (error.code(), trailing(error)["retry-after"]) == (grpc.StatusCode.UNAVAILABLE, "1")
    assert (error.details() or "").startswith("rejected: model 'demo' has 1 open request; its limit is 1")
    assert stub.call("ModelReady", message_class("ModelReadyRequest")(name="demo"))[0].ready
    quota.requests = 0
    assert stub.refused("ModelInfer", infer(id="i" * 300)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.call("ModelInfer", infer())[0].outputs
    assert (quota.requests, quota.held_bytes) == (0, 0)
    service.add(replace(service.models["demo"], limits=Limits()))
    assert not service.bodies.quotas


def test_infers_from_typed_contents(stub: Stub, gateway: Gateway) -> None:
    metadata = (("x-request-id", "a-1"), ("traceparent", f"00-{32 * '1'}-{16 * '2'}-01"))
    answer, call = stub.call("ModelInfer", infer(id="typed"), metadata=metadata)
    assert (answer.model_name, answer.id) == ("demo", "typed")
    assert [(out.name, out.datatype, list(out.shape)) for out in answer.outputs] == [
        ("y", "FP32", [1, 4]),
        ("n", "INT64", [1, 1]),
    ]
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [2, 4, 6, 8]
    assert trailing(call)["x-slo-met"] == "true"
    assert gateway.driver.seen[0][0]["x"] == Tensor("FP32", (1, 4), np.array([1, 2, 3, 4], "<f4").tobytes())
    assert trailing(call)["x-request-id"] == "a-1"
    assert gateway.driver.names[-1:] == [("a-1", f"{32 * '1'}-{16 * '2'}-01")]


def test_infers_from_raw_contents_and_returns_what_was_asked_for(stub: Stub, gateway: Gateway) -> None:
    request = infer_raw()
    request.outputs.add(name="y")
    answer, _ = stub.call("ModelInfer", request)
    assert [out.name for out in answer.outputs] == ["y"]
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [0, 1, 2, 3, 8, 10, 12, 14]
    assert gateway.driver.wanted[-1] == ["y"]


def test_the_budget_comes_from_metadata_parameters_or_the_clients_deadline(stub: Stub, gateway: Gateway) -> None:
    request = infer()
    request.parameters["x-slo-ms"].int64_param = 60
    request.parameters["x-elapsed-ms"].double_param = 1.5
    stub.call("ModelInfer", request)
    stub.call("ModelInfer", request, metadata=(("x-slo-ms", "70"),))
    stub.call("ModelInfer", infer(), timeout=100)
    assert [seen[1:] for seen in gateway.driver.seen] == [(ms(60), ms(1.5)), (ms(70), ms(1.5)), (None, 0)]
    stub.call("ModelInfer", infer(), timeout=0.15)
    slo_ns = gateway.driver.seen[3][1]
    assert slo_ns is not None
    assert 0 < slo_ns < ms(200)


@pytest.mark.parametrize(
    ("ended", "code", "retry"),
    [
        (RequestResult(Outcome.DROPPED, why="slack 3 ms"), grpc.StatusCode.DEADLINE_EXCEEDED, None),
        (RequestResult(Outcome.REJECTED, why="9 wait", retry_after_ns=s(2.1)), grpc.StatusCode.UNAVAILABLE, "3"),
        (RequestResult(Outcome.REJECTED, why="no cat", is_refused=True), grpc.StatusCode.INVALID_ARGUMENT, None),
        (RequestResult(Outcome.FAILED, why="bad weights"), grpc.StatusCode.INTERNAL, None),
    ],
)
def test_says_how_a_request_ended(
    stub: Stub, gateway: Gateway, ended: RequestResult, code: grpc.StatusCode, retry: str | None
) -> None:
    gateway.driver.respond = lambda _: ended
    error = stub.refused("ModelInfer", infer())
    assert error.code() is code
    assert ended.why in (error.details() or "")
    assert trailing(error).get("retry-after") == retry


def test_a_late_answer_is_an_answer_and_says_so(stub: Stub, gateway: Gateway) -> None:
    gateway.driver.respond = lambda tensors: RequestResult(Outcome.LATE, scaled(tensors).outputs)
    _, call = stub.call("ModelInfer", infer())
    assert trailing(call)["x-slo-met"] == "false"


def test_bad_input_is_refused_by_name(stub: Stub) -> None:
    truncated, extra, mixed, wrong, unknown, twice, absurd = (infer_raw() for _ in range(7))
    truncated.raw_input_contents[0] = truncated.raw_input_contents[0][:-1]
    extra.raw_input_contents.append(b"")
    mixed.inputs[0].contents.fp32_contents.append(1)
    wrong.inputs[0].datatype = "FP64"
    unknown.outputs.add(name="z")
    twice.inputs[1].CopyFrom(twice.inputs[0])
    absurd.parameters["x-slo-ms"].string_param = "nan"
    few, other = infer([1, 2]), infer()
    other.inputs[0].contents.int_contents.append(1)
    for request, says in (
        (truncated, "raw_input_contents[0]: 31 bytes, but FP32 [2, 4] has 32"),
        (extra, "raw_input_contents: 3 for 2 inputs"),
        (mixed, "inputs[0].contents: the request has raw_input_contents as well"),
        (wrong, "inputs[0].datatype: 'FP64' for input 'x'"),
        (unknown, "outputs[0].name: unknown output 'z'"),
        (twice, "inputs[1].name: input 'x' occurs twice"),
        (absurd, "x-slo-ms: 'nan' is out of range"),
        (few, "inputs[0].contents.fp32_contents: 2 elements, but shape [1, 4] has 4"),
        (other, "inputs[0].contents.int_contents: 1 elements for FP32"),
        (Infer(model_name="demo"), "inputs: input 'x', 'k' is missing"),
        (infer([1.0] * 36, rows=9), "inputs: 9 rows (first dimension) exceed the limit of 8"),
    ):
        error = stub.refused("ModelInfer", request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").startswith(says), error.details()
    for method, wrong in (
        ("ModelInfer", Infer(model_name="demo", model_version="7")),
        ("ModelReady", message_class("ModelReadyRequest")(name="demo", version="7")),
        ("ModelMetadata", message_class("ModelMetadataRequest")(name="demo", version="7")),
    ):
        error = stub.refused(method, wrong)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert (error.details() or "").startswith("model 'demo' has no version '7' that serves")
    error = stub.refused("ModelInfer", Infer(model_name="other"))
    assert (error.code(), (error.details() or "")[:21]) == (grpc.StatusCode.NOT_FOUND, "unknown model 'other'")
    assert stub.call("ModelInfer", infer())[0].outputs


def test_an_oversized_message_and_an_inner_error_leave_the_server_serving(stub: Stub, gateway: Gateway) -> None:
    huge = Infer(model_name="demo", raw_input_contents=[bytes(1_000_000)])
    assert stub.refused("ModelInfer", huge).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def respond(_: object) -> RequestResult:
        raise RuntimeError("boom")

    gateway.driver.respond = respond
    assert stub.refused("ModelInfer", infer()).code() is grpc.StatusCode.INTERNAL
    gateway.driver.respond = None
    assert stub.call("ModelInfer", infer())[0].outputs


def test_a_client_that_gives_up_is_cancelled(stub: Stub, gateway: Gateway, loop_thread: LoopThread) -> None:
    gateway.driver.respond = lambda _: None
    assert stub.refused("ModelInfer", infer(), timeout=0.2).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    loop_thread.call(asyncio.wait_for(gateway.driver.gone.wait(), 5))
    assert gateway.driver.cancelled == [1]


def health(port: int, service: str, key: str = "") -> int | grpc.StatusCode:
    """The status in the answer of gRPC's health protocol, or that of the call."""
    asked = b"" if not service else bytes([10, len(service)]) + service.encode()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
        try:
            answer = check(asked, timeout=10, metadata=(("x-api-key", key),) if key else ())
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    assert answer[0] == 8, "field 1, a number"
    return int(answer[1])


def test_grpcs_health_protocol_agrees_with_readiness(gateway: Gateway, loop_thread: LoopThread) -> None:
    port = gateway.grpc_port
    assert [health(port, name) for name in ("", SERVICE, "demo")] == [1, 1, 1]
    assert health(port, "nope") is grpc.StatusCode.NOT_FOUND
    gateway.states["demo"] = Readiness(ModelState.FAILING, "no replica can start")
    assert [health(port, name) for name in ("", SERVICE, "demo")] == [1, 1, 2]
    gateway.why_unready = "starting"
    assert [health(port, name) for name in ("", SERVICE, "demo")] == [2, 2, 2]
    other = Gateway(FakeDriver())
    other.service = make_service(other, api_key="secret")
    rpc = rpc_server(other.service, limits=ServerLimits(requests=8))
    locked = loop_thread.serve(rpc)
    assert [health(locked, ""), health(locked, "demo", "secret")] == [1, 1]
    assert health(locked, "demo") is grpc.StatusCode.UNAUTHENTICATED
    loop_thread.call(rpc.close(0.5))


@pytest.mark.parametrize("name", REFLECTIONS)
def test_reflection_describes_the_services_to_who_has_the_key(started: Started, name: str) -> None:
    _, stub = started(api_key="secret")
    ask = stub.channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    asked += [reflection_pb2.ServerReflectionRequest(file_containing_symbol=each) for each in (SERVICE, HEALTH)]
    listed, *files = ask(iter(asked), timeout=10, metadata=(("x-api-key", "secret"),))
    assert {each.name for each in listed.list_services_response.service} == {SERVICE, HEALTH, *REFLECTIONS}
    for file, service in zip(files, (SERVICE, HEALTH), strict=True):
        found = FileDescriptorProto.FromString(file.file_descriptor_response.file_descriptor_proto[0])
        assert f"{found.package}.{found.service[0].name}" == service
    with pytest.raises(grpc.RpcError) as caught:
        list(ask(iter(asked), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_who_comes_by_the_unix_socket_without_the_relay_is_refused(started: Started) -> None:
    started()
    with grpc.insecure_channel(f"unix:{FOLDERS[-1].name}/{SOCKET.format(0)}") as channel:
        live = channel.unary_unary(f"/{SERVICE}/ServerLive", bytes, bytes).future(b"", timeout=10)
        assert (live.code(), live.details()) == (grpc.StatusCode.UNAVAILABLE, "the connection has gone")


def test_asks_for_the_key_where_one_is_set(started: Started) -> None:
    _, stub = started(api_key="secret")
    assert stub.refused("ModelInfer", infer()).code() is grpc.StatusCode.UNAUTHENTICATED
    wrong = stub.refused("ModelInfer", infer(), metadata=(("x-api-key", "no"),))
    assert (wrong.details() or "").startswith("the API key is wrong")
    assert stub.call("ModelInfer", infer(), metadata=(("authorization", "Bearer secret"),))[0].outputs
    assert stub.call("ServerLive", message_class("ServerLiveRequest")())[0].live


def test_a_key_without_the_role_of_an_administrator_changes_no_models(started: Started, tmp_path: Path) -> None:
    gateway, keys = Gateway(FakeDriver()), tmp_path / "keys"
    keys.write_text("phone other\nboss secret admin\n")
    _, stub = started(make_service(gateway, api_key_file=keys))
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        order = message_class(f"{method}Request")(model_name="other")
        refused = stub.refused(method, order, metadata=(("x-api-key", "other"),))
        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (refused.details() or "").startswith("this API key may not load or unload models; help: ")
        assert stub.refused(method, order).code() is grpc.StatusCode.UNAUTHENTICATED
        assert not gateway.changes
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        order = message_class(f"{method}Request")(model_name="other")
        stub.call(method, order, metadata=(("authorization", "Bearer secret"),))
    assert gateway.changes == [("other", True), ("other", False)]
    index = message_class("RepositoryIndexRequest")()
    assert stub.call("RepositoryIndex", index, metadata=(("x-api-key", "other"),))[0].models


def test_without_a_key_a_message_is_neither_received_nor_parsed(started: Started) -> None:
    service = make_service(Gateway(FakeDriver()), api_key="secret", bodies=BodyMemory(40_000_000))
    _, stub = started(service)
    huge = Infer(model_name="demo", raw_input_contents=[bytes(30_000_000)])
    assert stub.refused("ModelInfer", huge).code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.keys.refused == {"missing": 1}
    assert service.bodies.held_bytes == 0


@pytest.mark.parametrize(
    ("method", "code"),
    [
        *((each, grpc.StatusCode.RESOURCE_EXHAUSTED) for each in ("ModelReady", "ModelMetadata", "RepositoryIndex")),
        *((each, grpc.StatusCode.OK) for each in ("ServerLive", "ServerReady", "ServerMetadata")),
    ],
)
def test_methods_without_tensors_take_no_large_message(stub: Stub, method: str, code: grpc.StatusCode) -> None:
    """Protobuf would keep thousands of unknown fields. A message without fields is not received at all."""
    call = stub.channel.unary_unary(f"/{SERVICE}/{method}", bytes, bytes).future(b"\x2a\x00" * 20_000, timeout=20)
    assert call.code() is code
    if code is not grpc.StatusCode.OK:
        assert (call.details() or "").startswith("the message has 40000 bytes; the limit is 16384")


def test_a_message_of_many_small_parts_is_refused_before_it_is_parsed(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(rpc_module, "parsed", lambda message, _: parsed.append(message))
    whole = Infer(model_name="demo", id="i" * 20_000).SerializeToString()
    for part in (b"\x2a\x00", b"\x3a\x00", b"\x32\x00", b"\x22\x00", b"\x08\x01", b"\x2a\x04\x2a\x02\x42\x00"):
        error = stub.refused_raw("ModelInfer", whole + part * 17_000)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (error.details() or "").startswith("message: more than 8192 fields")
    for wrong in (whole + b"\x0b", whole + b"\x0a", whole + b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"):
        assert stub.refused_raw("ModelInfer", wrong).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not parsed


def test_what_is_no_message_is_refused(stub: Stub) -> None:
    for wrong in (b"\x0a\x05ab", b"\x0a\x01\xff", b"\xff" * 30_000):
        error = stub.refused_raw("ModelInfer", wrong)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").startswith("message: ")
    assert stub.refused_raw("Nothing", b"").code() is grpc.StatusCode.UNIMPLEMENTED


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    names=st.lists(st.text(max_size=5), max_size=4),
    strings=st.lists(st.binary(max_size=3), max_size=6),
)
def test_a_large_message_is_read_as_protobuf_reads_it(
    counts: list[int], names: list[str], strings: list[bytes]
) -> None:
    request = Infer(model_name="m" * len(names), raw_input_contents=strings)
    for count in counts:
        tensor = request.inputs.add(name="n", shape=range(count))
        tensor.contents.bytes_contents.extend(strings)
        tensor.contents.fp32_contents.extend(range(count))
        for name in names:
            tensor.parameters[name].int64_param = count
            request.outputs.add(name=name).parameters[name].string_param = name
    request.id = "i" * SMALL_BYTES
    found, raws = inference(request.SerializeToString())
    assert [bytes(raw) for raw in raws] == strings
    found.raw_input_contents.extend(strings)
    assert found == request


def test_what_is_too_long_beside_the_tensors_is_refused_before_it_is_copied() -> None:
    message = Infer(inputs=[{"name": "n" * (2**23 + 2**18)}]).SerializeToString()
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="bytes beside raw_input_contents") as caught:
            inference(message)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413


def test_parameters_are_looked_at_only_of_inputs_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(parameters_module, "_near", lambda name, known: compared.append(name))
    unknown, repeated = Infer(), Infer()
    for request, name in ((unknown, "nope"), (repeated, "x")):
        for _ in range(20):
            given = request.inputs.add(name=name, datatype="FP32", shape=[1, 4])
            given.contents.fp32_contents.extend([1, 2, 3, 4])
            for number in range(20):
                given.parameters[f"own_{number}"].int64_param = 1
    with pytest.raises(Refusal, match=r"inputs\[0\].name: unknown input 'nope'"):
        inputs_of(unknown, [], InputValidator(SIGNATURE))
    assert not compared
    with pytest.raises(Refusal, match=r"inputs\[1\].name: input 'x' occurs twice"):
        inputs_of(repeated, [], InputValidator(SIGNATURE))
    assert len(compared) == COMPARED_MAX
    given = repeated.inputs[0]
    monkeypatch.undo()
    for number in range(20):
        del given.parameters[f"own_{number}"]
    given.parameters["binary_data_sise"].int64_param = 1
    with pytest.raises(Refusal, match=r"inputs\[0\]\.parameters\.binary_data_sise: unknown"):
        inputs_of(repeated, [], InputValidator(SIGNATURE))


def test_too_many_parameters_are_refused_before_they_are_read() -> None:
    class Many(dict[str, object]):
        def items(self) -> NoReturn:
            pytest.fail("they are read")

    message = SimpleNamespace(parameters=Many((str(number), None) for number in range(PARAMETERS_MAX + 1)))
    with pytest.raises(Refusal, match=f"parameters: {PARAMETERS_MAX + 1} parameters"):
        parameters_of(message, frozenset(), "parameters")


@pytest.mark.parametrize("wrong", [gzip.compress(bytes(2**24)), zlib.compress(bytes(2**24))], ids=["gzip", "deflate"])
def test_what_becomes_too_large_is_refused_as_soon_as_it_is(wrong: bytes) -> None:
    assert inflated(gzip.compress(bytes(2**20)), INFLATED_BYTES_MAX) == bytes(2**20)
    with pytest.raises(Refusal, match="the compressed message becomes more than"):
        inflated(wrong, INFLATED_BYTES_MAX)
    packed = gzip.compress(b"whole")
    for other in (packed[:-9], packed + b"x", b"x\x9cnothing"):
        with pytest.raises(Refusal, match="message: it is neither gzip nor deflate"):
            inflated(other, INFLATED_BYTES_MAX)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_calls_are_understood(stub: Stub, compression: grpc.Compression) -> None:
    answer, _ = stub.call("ModelInfer", infer(id="i" * 10_000), compression=compression)
    assert answer.id == "i" * 10_000


def test_large_tensors_come_and_go_whole(loop_thread: LoopThread, started: Started) -> None:
    gateway = Gateway(FakeDriver())
    gateway.driver.respond = lambda tensors: RequestResult(Outcome.SERVED, {"y": tensors["x"], "n": tensors["k"]})
    service = make_service(gateway, bodies=BodyMemory(40_000_000))
    many = InputValidator(structs.replace(SIGNATURE, rows_max=10_000_000))
    service.add(replace(service.models["demo"], validator=many))
    rpc, stub = started(service)
    x = np.random.default_rng(1).normal(size=(1_000_000, 4)).astype("<f4").tobytes()
    request = Infer(model_name="demo")
    request.inputs.add(name="x", datatype="FP32", shape=[1_000_000, 4])
    request.inputs.add(name="k", datatype="INT64", shape=[1_000_000, 1])
    request.raw_input_contents.extend([x, bytes(8_000_000)])
    answer, _ = stub.call("ModelInfer", request)
    assert list(answer.raw_output_contents) == [x, bytes(8_000_000)]
    loop_thread.until(lambda: (service.bodies.held_bytes, rpc.open_calls) == (0, 0))


@pytest.mark.parametrize("output", ["nope", "y"])
def test_a_wrong_output_of_a_large_message_is_refused_before_it_is_submitted(
    stub: Stub, gateway: Gateway, output: str
) -> None:
    request = infer(id="i" * 20_000)
    request.outputs.add(name=output).parameters["classification"].int64_param = -1
    assert stub.refused("ModelInfer", request).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not gateway.driver.stored
    assert not gateway.driver.seen


def test_a_port_of_grpc_is_closed_to_other_protocols(gateway: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.grpc_port), timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while client.recv(1000):
            pass


@pytest.mark.parametrize("flood", ["rapid resets", "wrong keys", "pings", "settings", "endless heads"])
def test_a_flood_from_the_network_ends_and_others_are_served(
    loop_thread: LoopThread, started: Started, flood: str
) -> None:
    service = make_service(Gateway(FakeDriver()), api_key="secret")
    rpc, stub = started(service)
    with socket.create_connection(("127.0.0.1", stub.port), timeout=20) as attacker:
        attacker.sendall(PREFACE + frame(SETTINGS, 0, 0))
        attacker.settimeout(1)
        with contextlib.suppress(ConnectionError, TimeoutError):  # a stranger that sends too much is not read
            for number in range(1, 20_001, 2):
                attacker.sendall(REGISTERED_FLOODS[flood][1](number))
        assert stub.call("ModelInfer", infer(), metadata=(("x-api-key", "secret"),))[0].outputs
    loop_thread.until(lambda: (rpc.open_calls, service.bodies.held_bytes) == (0, 0))


def test_idle_connections_make_room_for_others(loop_thread: LoopThread) -> None:
    rpc = rpc_server(
        make_service(Gateway(FakeDriver())), limits=ServerLimits(requests=64, connections=10, connections_each=10)
    )
    port = loop_thread.serve(rpc)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        stub = Stub(port)
        assert stub.call("ModelInfer", infer())[0].outputs
        stub.channel.close()
    assert rpc.listener.made_room >= 21
    assert not rpc.listener.refused
    loop_thread.call(rpc.close(0.5))


@pytest.mark.parametrize(("key", "method"), [("", "ModelReady"), ("", "ModelInfer"), ("secret", "ServerLive")])
def test_unfinished_calls_make_room_before_customers(loop_thread: LoopThread, key: str, method: str) -> None:
    """Of strangers, and, on a server without keys, of whoever has made a call before."""
    rpc = rpc_server(
        make_service(Gateway(FakeDriver()), api_key=key),
        limits=ServerLimits(requests=64, connections=10, connections_each=10),
    )
    listener, port = rpc.listener, loop_thread.serve(rpc)
    sent = PREFACE + frame(SETTINGS, 0, 0) + begun(1, "ServerLive") + begun(3, method)
    metadata = (("x-api-key", key),) if key else ()
    with contextlib.ExitStack() as stack:
        customer = Stub(port)
        assert customer.call("ModelInfer", infer(), metadata=metadata)[0].outputs
        (first,) = listener.connections
        for number in range(1, 31):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)).sendall(sent)
            loop_thread.until(lambda number=number: listener.made_room == max(0, number - 9))  # type: ignore[misc]
            waiting = 0 if key else min(9, number)
            loop_thread.until(lambda waiting=waiting: rpc.open_calls == waiting)  # type: ignore[misc]
        fresh = Stub(port)
        assert fresh.call("ModelInfer", infer(), metadata=metadata)[0].outputs
        assert customer.call("ModelInfer", infer(), metadata=metadata)[0].outputs
        assert first in listener.connections, "it is the same connection"
        for stub in (customer, fresh):
            stub.channel.close()
    loop_thread.call(rpc.close(0.5))


def test_tls_and_mutual_tls(loop_thread: LoopThread, tmp_path: Path) -> None:
    for name, issuer in (("authority", ""), ("server", "authority"), ("client", "authority")):
        make_certificate(tmp_path, name, issuer=issuer)
    root, pem, key = ((tmp_path / name).read_bytes() for name in ("authority.pem", "client.pem", "client.key"))
    for client_ca in (None, tmp_path / "authority.pem"):
        tls = Tls(tmp_path / "server.pem", tmp_path / "server.key", client_ca)
        rpc = rpc_server(make_service(Gateway(FakeDriver())), limits=ServerLimits(requests=8), tls=tls)
        port = loop_thread.serve(rpc)
        secured = Stub(port, grpc.ssl_channel_credentials(root, key, pem))
        assert secured.call("ModelInfer", infer(id="i" * 90_000))[0].id == "i" * 90_000
        others = [Stub(port), Stub(port, grpc.ssl_channel_credentials(root))]
        assert others[0].refused("ModelInfer", infer()).code() is grpc.StatusCode.UNAVAILABLE
        if client_ca is not None:
            assert others[1].refused("ModelInfer", infer()).code() is grpc.StatusCode.UNAVAILABLE
        for each in (secured, *others):
            each.channel.close()
        loop_thread.call(rpc.close(0.5))
