"""gRPC over a real socket, with messages of our own making."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec import structs

from sloop.app.application import Limits
from sloop.errors import MachineError
from sloop.serve.gateway.rpc import SERVICE, Rpc, message_class
from sloop.serve.gateway.service import ModelState, Readiness
from sloop.serve.protocols import RequestResult
from sloop.tensor import Tensor
from sloop.units import ms, s
from sloop.vocabulary import Outcome
from tests.serve.gateway.fakes import FakeDriver, Gateway, LoopThread, make_service, scaled

pytestmark = pytest.mark.live

Infer = message_class("ModelInferRequest")


class Stub:
    """A blocking client."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    def call(self, method: str, request: Any, **options: Any) -> tuple[Any, grpc.Call]:
        invoke = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=message_class(f"{method}Request").SerializeToString,
            response_deserializer=message_class(f"{method}Response").FromString,
        )
        options.setdefault("timeout", 10)
        return invoke.with_call(request, **options)

    def refused(self, method: str, request: Any, **options: Any) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, request, **options)
        return caught.value


@pytest.fixture
def stub(gateway: Gateway) -> Iterator[Stub]:
    stub = Stub(gateway.grpc_port)
    yield stub
    stub.channel.close()


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
    assert (server.name, list(server.extensions)) == ("sloop", ["binary_tensor_data"])
    model, _ = stub.call("ModelMetadata", message_class("ModelMetadataRequest")(name="demo", version="1"))
    assert [(port.name, port.datatype, list(port.shape)) for port in model.inputs] == [
        ("x", "FP32", [-1, 4]),
        ("k", "INT64", [-1, 1]),
    ]


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
    service.add(replace(service.models["demo"], name="other"))
    gateway.served["other"] = ["1", "2"]
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
    answer, call = stub.call("ModelInfer", infer(id="typed"))
    assert (answer.model_name, answer.id) == ("demo", "typed")
    assert [(out.name, out.datatype, list(out.shape)) for out in answer.outputs] == [
        ("y", "FP32", [1, 4]),
        ("n", "INT64", [1, 1]),
    ]
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [2, 4, 6, 8]
    assert trailing(call)["x-slo-met"] == "true"
    assert gateway.driver.seen[0][0]["x"] == Tensor("FP32", (1, 4), np.array([1, 2, 3, 4], "<f4").tobytes())


def test_infers_from_raw_contents_and_returns_what_was_asked_for(stub: Stub) -> None:
    request = infer_raw()
    request.outputs.add(name="y")
    answer, _ = stub.call("ModelInfer", request)
    assert [out.name for out in answer.outputs] == ["y"]
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [0, 1, 2, 3, 8, 10, 12, 14]


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


def test_asks_for_the_key_where_one_is_set(loop_thread: LoopThread) -> None:
    rpc = Rpc(make_service(Gateway(FakeDriver()), api_key="secret"), requests_max=8)
    stub = Stub(loop_thread.call(rpc.start("127.0.0.1", 0)))
    assert stub.refused("ModelInfer", infer()).code() is grpc.StatusCode.UNAUTHENTICATED
    wrong = stub.refused("ModelInfer", infer(), metadata=(("x-api-key", "no"),))
    assert (wrong.details() or "").startswith("the API key is wrong")
    assert stub.call("ModelInfer", infer(), metadata=(("authorization", "Bearer secret"),))[0].outputs
    assert stub.call("ServerLive", message_class("ServerLiveRequest")())[0].live
    stub.channel.close()
    loop_thread.call(rpc.close(0.5))


def test_a_port_in_use_is_named(loop_thread: LoopThread, gateway: Gateway) -> None:
    rpc = Rpc(make_service(Gateway(FakeDriver())), requests_max=8)
    with pytest.raises(MachineError, match=f"port {gateway.grpc_port} on 127.0.0.1 is in use"):
        loop_thread.call(rpc.start("127.0.0.1", gateway.grpc_port))
