"""REST over a real socket: what the outside is promised, wrong input by wrong input."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from sloop.app.limits import Limits, ServerLimits
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import EXTENSIONS, InferenceService, Model
from sloop.serve.protocols import ModelState, Readiness, RequestResult
from sloop.tensor import MISSING, Port, Signature, Tensor
from sloop.units import ms, s
from sloop.vocabulary import Outcome, RequestId
from tests.serve.edge.fakes import FakeDriver, Gateway, LoopThread, make_service, scaled, web_server

pytestmark = pytest.mark.live

INFER = "/v2/models/demo/infer"
X: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2.5, 3, 4]}
K: dict[str, object] = {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [2]}


class Answered:
    """A response, read."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.headers["content-type"] == "application/json"
        return str(self.json["error"])


Ask = Callable[..., Answered]


@pytest.fixture
def ask(gateway: Gateway) -> Iterator[Ask]:
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)

    def ask(method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answered:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        return Answered(connection.getresponse())

    yield ask
    connection.close()


def test_infers_from_json(ask: Ask, gateway: Gateway) -> None:
    answered = ask("POST", INFER, {"id": "seven", "inputs": [X, K]})
    assert answered.status == 200
    assert answered.headers["x-slo-met"] == "true"
    assert answered.json == {
        "model_name": "demo",
        "model_version": "1",
        "id": "seven",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [2, 5, 6, 8]},
            {"name": "n", "datatype": "INT64", "shape": [1, 1], "data": [1]},
        ],
    }
    tensors, slo_ns, elapsed_ns = gateway.driver.seen[0]
    assert tensors["x"] == Tensor("FP32", (1, 4), np.array([1, 2.5, 3, 4], "<f4").tobytes())
    assert (slo_ns, elapsed_ns) == (None, 0)


def test_large_binary_outputs_are_sent_in_parts(ask: Ask, gateway: Gateway) -> None:
    large = np.arange(80_000, dtype="<f4").tobytes()
    outputs = {"y": Tensor("FP32", (20_000, 4), memoryview(large)), "n": Tensor("INT64", (1, 1), bytes(8))}
    gateway.driver.respond = lambda _: RequestResult(Outcome.SERVED, outputs)
    answered = ask("POST", INFER, {"inputs": [X, K], "parameters": {"binary_data_output": True}})
    length = int(answered.headers["inference-header-content-length"])
    assert answered.body[length:] == large + bytes(8)


def test_null_is_as_good_as_left_out(ask: Ask, gateway: Gateway) -> None:
    inputs = [{**X, "parameters": None}, {**K, "parameters": None}]
    whole = {"id": None, "parameters": None, "inputs": inputs}
    answered = ask("POST", INFER, {**whole, "outputs": None})
    assert answered.status == 200
    assert "id" not in answered.json
    assert ask("POST", INFER, {**whole, "outputs": [{"name": "n", "parameters": None}]}).json["outputs"][0]["data"] == [
        1
    ]
    assert ask("POST", INFER, {"inputs": [{**X, "data": None}, K]}).error.startswith("inputs[0].data: missing")
    assert [set(names) for names in gateway.driver.wanted[-2:]] == [{"y", "n"}, {"n"}], "what else need not be computed"


@pytest.mark.parametrize(("more", "stored"), [(0, []), (-1, ["demo"])])
def test_a_binary_body_is_read_and_copied_at_once_unless_that_takes_long(
    ask: Ask, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, more: int, stored: list[str]
) -> None:
    x, k = np.ones((1, 4), "<f4").tobytes(), np.full(1, 3, "<i8").tobytes()
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": len(x)}},
        {"name": "k", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": len(k)}},
    ]
    head = json.dumps({"inputs": inputs, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    body = head + x + k
    monkeypatch.setattr("sloop.serve.edge.rest.LARGE_BYTES", len(body) - 1)
    monkeypatch.setattr("sloop.serve.edge.rest.COPIED_BYTES", len(body) + more)
    answered = ask("POST", INFER, body, {"Inference-Header-Content-Length": str(len(head))})
    assert (answered.status, gateway.driver.stored) == (200, stored)
    assert answered.body.endswith(np.full((1, 4), 3, "<f4").tobytes())


def test_infers_from_binary_tensors_and_answers_in_the_form_asked_for(ask: Ask) -> None:
    x, k = np.arange(8, dtype="<f4").tobytes(), np.array([3, 4], "<i8").tobytes()
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": len(x)}},
                {"name": "k", "datatype": "INT64", "shape": [2, 1], "parameters": {"binary_data_size": len(k)}},
            ],
            "parameters": {"binary_data_output": True},
            "outputs": [{"name": "n", "parameters": {"binary_data": False}}, {"name": "y"}],
        }
    ).encode()
    answered = ask("POST", INFER, head + x + k, {"Inference-Header-Content-Length": str(len(head))})
    assert answered.headers["content-type"] == "application/octet-stream"
    length = int(answered.headers["inference-header-content-length"])
    outputs = json.loads(answered.body[:length])["outputs"]
    assert outputs == [
        {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [2, 2]},
        {"name": "y", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}},
    ]
    assert np.frombuffer(answered.body[length:], "<f4").tolist() == [0, 3, 6, 9, 16, 20, 24, 28]


@pytest.mark.parametrize(
    "path", ["/v2/models/demo/infer", "/v2/models/demo/versions/1/infer", "/v2/models/%64emo/infer"]
)
def test_knows_its_model_by_name_and_version(ask: Ask, path: str) -> None:
    assert ask("POST", path, {"inputs": [X, K]}).status == 200


def test_hands_the_budget_on_from_headers_before_parameters(ask: Ask, gateway: Gateway) -> None:
    parameters = {"x-slo-ms": 50, "x-elapsed-ms": 4}
    ask("POST", INFER, {"inputs": [X, K], "parameters": parameters})
    ask("POST", INFER, {"inputs": [X, K], "parameters": parameters}, {"x-slo-ms": "70.5", "x-elapsed-ms": "0"})
    assert [seen[1:] for seen in gateway.driver.seen] == [(ms(50), ms(4)), (ms(70.5), 0)]


@pytest.mark.parametrize(
    ("ended", "status", "says"),
    [
        (
            RequestResult(Outcome.DROPPED, why="slack 3 ms"),
            504,
            "dropped: slack 3 ms; help: allow more time with x-slo-ms",
        ),
        (
            RequestResult(Outcome.REJECTED, why="9 wait", retry_after_ns=s(2.1)),
            503,
            "rejected: 9 wait; help: try again in 3 s",
        ),
        (RequestResult(Outcome.REJECTED, why="no cat", is_refused=True), 400, "no cat"),
        (RequestResult(Outcome.FAILED, why="bad weights"), 500, "failed: bad weights"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_says_how_a_request_ended(
    ask: Ask, gateway: Gateway, ended: RequestResult, status: int, says: str, at_once: bool
) -> None:
    gateway.driver.respond, gateway.driver.at_once = lambda _: ended, at_once
    answered = ask("POST", INFER, {"inputs": [X, K]})
    assert (answered.status, answered.headers.get("retry-after")) == (status, "3" if status == 503 else None)
    assert answered.error.startswith(says)
    assert "x-slo-met" not in answered.headers


def test_a_late_answer_is_an_answer_and_says_so(ask: Ask, gateway: Gateway) -> None:
    gateway.driver.respond = lambda tensors: RequestResult(Outcome.LATE, scaled(tensors).outputs, "1 ms late")
    answered = ask("POST", INFER, {"inputs": [X, K]})
    assert (answered.status, answered.headers["x-slo-met"]) == (200, "false")


def without(tensor: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in tensor.items() if name != key}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty; help: send"),
        (b"{", "body: malformed JSON"),
        (b"\xff\xfe", "body: malformed JSON"),
        (b"[" * 30_000, "body: "),
        ([], "body: Expected `object`, got `array`"),
        ({}, "body: Object missing required field `inputs`"),
        ({"inputs": []}, "inputs: input 'x', 'k' is missing"),
        ({"inputs": [X]}, "inputs: input 'k' is missing"),
        ({"inputs": [X, X, K]}, "inputs[1].name: input 'x' occurs twice"),
        (
            {"inputs": [X, {**K, "name": "q"}]},
            "inputs[1].name: unknown input 'q'; help: the inputs are 'x' (FP32[-1, 4]), 'k' (",
        ),
        ({"inputs": [X, {**K, "name": 3}]}, "body: Expected `str`, got `int` - at `$.inputs[1].name`"),
        ({"inputs": [{**X, "datatype": "FP64"}, K]}, "inputs[0].datatype: 'FP64' for input 'x'"),
        ({"inputs": [{**X, "datatype": "float"}, K]}, "inputs[0].datatype: 'float' for input 'x'"),
        ({"inputs": [{**X, "shape": [4]}, K]}, "inputs[0].shape: [4] for input 'x'"),
        ({"inputs": [{**X, "shape": [1, 10**30]}, K]}, "inputs[0].shape: [1, 1000"),
        ({"inputs": [{**X, "shape": "1,4"}, K]}, "body: Expected `array`, got `str` - at `$.inputs[0].shape`"),
        ({"inputs": [{**X, "data": [1, 2, 3]}, K]}, "inputs[0].data: 3 elements, but shape [1, 4] has 4"),
        ({"inputs": [{**X, "data": ["a", 2, 3, 4]}, K]}, "inputs[0].data: not every element is a FP32 value"),
        ({"inputs": [{**X, "data": "AAAA"}, K]}, "body: Expected `array | null`, got `str` - at `$.inputs[0].data`"),
        ({"inputs": [without(X, "data"), K]}, "inputs[0].data: missing"),
        ({"inputs": [X, K], "outputs": [{"name": "z"}]}, "outputs[0].name: unknown output 'z'"),
        ({"inputs": [X, K], "id": 7}, "body: Expected `str | null`, got `int` - at `$.id`"),
        ({"inputs": [X, K], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: 1 is neither"),
        ({"inputs": [X, K], "parameters": {"x-slo-ms": -3}}, "x-slo-ms: -3 is out of range"),
        (
            {"inputs": [X, K], "outputs": [{"name": "y", "parameters": {"classification": "3"}}]},
            "outputs[0].parameters.classification: '3' is not a number of classes",
        ),
        (
            {"inputs": [{**without(X, "data"), "parameters": {"binary_data_size": 16}}, K]},
            "inputs[0].parameters.binary_data_size: the header Inference-Header-Content-Length is missing",
        ),
    ],
)
def test_bad_input_is_refused_by_name_and_the_server_serves_on(ask: Ask, body: object, says: str) -> None:
    answered = ask("POST", INFER, body)
    assert answered.status == 400
    assert answered.error.startswith(says), answered.error
    assert ask("POST", INFER, {"inputs": [X, K]}).status == 200


SHOWN = '{"name": "x", "shape": [-1, 4], "datatype": "FP32", "data": […]}'


@pytest.mark.parametrize(
    ("body", "fix"),
    [
        (b"", f'send {{"inputs": [{SHOWN}, '),
        (b"\x89PNG" + bytes(40_000), f'send {{"inputs": [{SHOWN}, '),
        ({"instances": [[1, 2, 3, 4]]}, f'send {{"inputs": [{SHOWN}, '),
        ({"inputs": [K]}, "send every input once; 'x' is FP32[-1, 4]"),
        ({"inputs": [{**X, "datatype": "float32"}, K]}, "this input takes FP32[-1, 4]"),
        ({"inputs": [{**X, "shape": [4]}, K]}, "this input's shape is [-1, 4], where -1 means any number from 1 up"),
    ],
)
def test_the_correction_of_a_body_is_what_the_model_takes(ask: Ask, body: object, fix: str) -> None:
    answered = ask("POST", INFER, body)
    assert answered.status == 400
    assert answered.error.partition("; help: ")[2].startswith(fix), answered.error


@pytest.mark.parametrize(
    ("size", "sent", "length", "says"),
    [
        (16, 15, 0, "inputs[0].parameters.binary_data_size: 16 bytes announced, but 15 follow"),
        (15, 15, 0, "inputs[0].parameters.binary_data_size: 15 bytes, but FP32 [1, 4] has 16"),
        (16, 17, 0, "body: 1 bytes follow the last tensor"),
        (-16, 16, 0, "inputs[0].parameters.binary_data_size: -16 is not a length"),
        (True, 16, 0, "inputs[0].parameters.binary_data_size: True is not a length"),
        (16, 16, 10_000, "Inference-Header-Content-Length: "),
        (16, 16, -40, "body: malformed JSON"),
    ],
)
def test_broken_binary_tensors_are_refused(ask: Ask, size: object, sent: int, length: int, says: str) -> None:
    inputs = [{**without(X, "data"), "parameters": {"binary_data_size": size}}, K]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head) + length)}
    answered = ask("POST", INFER, head + bytes(sent), headers)
    assert answered.status == 400
    assert answered.error.startswith(says), answered.error
    negative = ask("POST", INFER, head, {"Inference-Header-Content-Length": "-1"})
    assert negative.error.startswith("Inference-Header-Content-Length: '-1' is not a length")


@pytest.mark.parametrize("value", ["-5", "0", "nan", "1e99", "soon"])
def test_absurd_budgets_are_refused(ask: Ask, value: str) -> None:
    answered = ask("POST", INFER, {"inputs": [X, K]}, {"x-slo-ms": value})
    assert (answered.status, answered.error.partition(":")[0]) == (400, "x-slo-ms")


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v2/models/dem/infer", 404, "unknown model 'dem'; help: this server has the model 'demo'"),
        ("GET", "/v2/models/", 404, "unknown model ''"),
        ("GET", "/v2/models/other", 404, "unknown model 'other'"),
        (
            "POST",
            "/v2/models/demo/versions/7/infer",
            404,
            "model 'demo' has no version '7' that serves; help: omit the version, or use version '1'",
        ),
        ("GET", "/v2/models/demo/versions/7", 404, "model 'demo' has no version '7'"),
        ("GET", "/v2/models/demo/versions/7/ready", 404, "model 'demo' has no version '7'"),
        ("GET", "/v2/models/demo/versions/7/nothing", 404, "unknown path '/v2/models/demo/versions/7/nothing'"),
        ("GET", "/v2/models/demo/versions/1/nothing", 404, "unknown path '/v2/models/demo/versions/1/nothing'"),
        ("GET", "/v2/models/demo/versions", 404, "unknown path '/v2/models/demo/versions'"),
        ("GET", "/v2/models/demo/nothing", 404, "unknown path '/v2/models/demo/nothing'"),
        ("GET", "/v2/sloop/state?model=dem", 404, "unknown model 'dem'; help: this server has the model 'demo'"),
        ("GET", "/v2/sloop/decisions?model=", 404, "unknown model ''"),
        ("GET", "/", 404, "unknown path '/'"),
        ("GET", INFER, 405, f"{INFER} does not support GET; help: use POST"),
        ("POST", "/v2", 405, "/v2 does not support POST; help: use GET, HEAD"),
        ("GET", "/v2/sloop/decisions?limit=0", 400, "limit: '0' is not a number of decisions"),
        ("GET", "/v2/sloop/decisions?limit=-1", 400, "limit: '-1'"),
        ("GET", "/v2/sloop/decisions?limit=", 400, "limit: ''"),
        ("GET", "/v2/sloop/decisions?limit=%C2%B2", 400, "limit: "),
    ],
)
def test_wrong_paths_methods_and_queries_say_what_would_be_right(
    ask: Ask, method: str, path: str, status: int, says: str
) -> None:
    answered = ask(method, path, b"{}" if method == "POST" else None)
    assert answered.status == status
    assert answered.error.startswith(says), answered.error


def test_describes_server_and_model(ask: Ask) -> None:
    assert ask("GET", "/v2").json["extensions"] == [*EXTENSIONS]
    model = ask("GET", "/v2/models/demo").json
    assert model["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
    assert model["versions"] == ["1"]
    bounds = {"rows_max": 8, "request_bytes_max": 100_000, "json_bytes_max": 100_000}
    assert model["parameters"] == bounds
    config = ask("GET", "/v2/models/demo/config").json
    assert config["parameters"] == {name: {"string_value": str(most)} for name, most in bounds.items()}
    assert ask("GET", "/v2/models").json == {
        "models": [{"name": "demo", "versions": ["1"], "ready": True, "state": "ready"}]
    }
    assert ask("GET", "/openapi.json").body == ask("GET", "/v2/sloop/openapi").body
    assert ask("GET", "/v2/sloop/decisions?limit=3").json == {"decisions": [], "limit": 3, "model": ""}
    assert ask("GET", "/v2/sloop/state").json == {"applications": [], "model": ""}
    assert ask("GET", "/metrics").headers["content-type"].startswith("text/plain")
    head = ask("HEAD", "/v2")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 0


def test_is_live_while_it_is_not_ready(ask: Ask, gateway: Gateway) -> None:
    assert ask("GET", "/v2/health/ready").json == {"ready": True}
    gateway.why_unready = "no replica of 'classify' is ready"
    assert ask("GET", "/v2/health/live").json == {"live": True}
    for path in ("/v2/health/ready", "/v2/models/demo/ready"):
        answered = ask("GET", path)
        assert (answered.status, answered.json["ready"]) == (503, False)
        assert "no replica of 'classify' is ready" in answered.error


def test_the_server_is_ready_without_a_sick_model_and_names_it(ask: Ask, gateway: Gateway) -> None:
    gateway.states["demo"] = Readiness(ModelState.FAILING, "no replica can start")
    told = {"ready": True, "not_ready": {"demo": {"state": "failing", "why": "no replica can start"}}}
    assert ask("GET", "/v2/health/ready").json == told


def test_a_model_that_could_not_be_loaded_is_not_unknown(ask: Ask, gateway: Gateway) -> None:
    gateway.states["bad"] = Readiness(ModelState.FAILING, "it cannot be loaded: no file")
    for method, path in (("GET", "/v2/models/bad/ready"), ("POST", "/v2/models/bad/infer"), ("GET", "/v1/models/bad")):
        answered = ask(method, path)
        assert (answered.status, answered.headers["retry-after"]) == (503, "10")
        assert "model 'bad' is not served: it cannot be loaded: no file" in answered.error
    assert ask("GET", "/v2/models/none/ready").status == 404


def test_a_resting_model_is_ready_and_says_so(ask: Ask, gateway: Gateway) -> None:
    gateway.states["demo"] = Readiness(ModelState.RESTING)
    assert ask("GET", "/v2/models/demo/ready").json == {"name": "demo", "ready": True, "state": "resting"}
    gateway.states["demo"] = Readiness(ModelState.STARTING, "no replica of stage 'only' is ready (1 starting)")
    answered = ask("GET", "/v2/models/demo/versions/1/ready")
    assert answered.status == 503
    assert (answered.json["state"], answered.json["version"], answered.json["ready"]) == ("starting", "1", False)
    assert answered.error.startswith("not ready: no replica of stage 'only' is ready (1 starting)")
    assert ask("GET", "/v2/models").json["models"][0]["state"] == "starting"


# Several models


@pytest.fixture
def several(shared_gateway: Gateway, gateway: Gateway) -> Iterator[InferenceService]:
    """The service while it has a second model, with other inputs, and a second version of the first."""
    service = shared_gateway.service
    assert service is not None
    signature = Signature((Port("a", "INT32", (-1, 2)),), (Port("b", "INT32", (-1, 2)),), rows_max=4)
    service.add(Model("pair", ms(50), InputValidator(signature), Limits()))
    demo = service.models["demo"]
    service.add(replace(demo, versions=["1", "2"]))
    yield service
    service.remove("pair")
    service.add(demo)


PAIR: dict[str, object] = {"inputs": [{"name": "a", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}


@pytest.mark.usefixtures("several")
def test_names_decide_where_a_request_goes(ask: Ask, gateway: Gateway) -> None:
    tensors = {"b": Tensor("INT32", (1, 2), bytes(8))}
    gateway.driver.respond = lambda given: (
        RequestResult(Outcome.SERVED, tensors, version="7") if "a" in given else scaled(given)
    )
    answered = ask("POST", "/v2/models/pair/infer", PAIR).json
    assert (answered["model_name"], answered["model_version"]) == ("pair", "7"), "the version that served it"
    assert [output["name"] for output in answered["outputs"]] == ["b"]
    assert ask("POST", "/v2/models/demo/versions/2/infer", {"inputs": [X, K]}).status == 200
    assert ask("POST", INFER, {"inputs": [X, K]}).status == 200
    assert gateway.driver.asked == [("pair", ""), ("demo", "2"), ("demo", "")]
    assert ask("POST", "/v2/models/pair/infer", {"inputs": [X, K]}).error.startswith(
        "inputs[0].name: unknown input 'x'; help: the inputs are 'a'"
    )


def test_optional_inputs_are_in_the_metadata_and_accepted(shared_gateway: Gateway, gateway: Gateway, ask: Ask) -> None:
    service = shared_gateway.service
    assert service is not None
    scale = Port("scale", "FP32", (1,), has_rows=False)
    demo = service.models["demo"]
    signature = structs.replace(demo.validator.signature, optional=(scale,))
    service.add(replace(demo, name="optional", validator=InputValidator(signature)))
    *_, told = ask("GET", "/v2/models/optional").json["inputs"]
    assert told == {"name": "scale", "datatype": "FP32", "shape": [1], "parameters": {"optional": True}}
    given = {"name": "scale", "datatype": "FP32", "shape": [1], "data": [3]}
    for inputs in ([X, K], [X, K, given]):
        assert ask("POST", "/v2/models/optional/infer", {"inputs": inputs}).status == 200
    assert [each[0]["scale"].datatype for each in gateway.driver.seen[-2:]] == [MISSING.datatype, "FP32"]
    service.remove("optional")


@pytest.mark.usefixtures("several")
def test_metadata_are_those_of_the_model(ask: Ask) -> None:
    demo, pair = ask("GET", "/v2/models/demo").json, ask("GET", "/v2/models/pair/versions/1").json
    assert (demo["versions"], pair["versions"]) == (["1", "2"], ["1"])
    assert [port["name"] for port in pair["inputs"]] == ["a"]
    assert [model["name"] for model in ask("GET", "/v2/models").json["models"]] == ["demo", "pair"]
    assert ask("GET", "/v2/sloop/state?model=pair").json["model"] == "pair"
    assert ask("GET", "/v2/sloop/decisions?model=pair&limit=2").json == {"decisions": [], "limit": 2, "model": "pair"}
    described = ask("GET", "/openapi.json").json["paths"]
    assert {"/v2/models/pair/infer", "/v2/models/demo/versions/2/infer"} < described.keys()
    assert ask("POST", "/v2/models/demo/versions/3/infer", {"inputs": [X, K]}).error.endswith(
        "help: omit the version, or use versions '1' or '2'"
    )


def test_a_removed_model_is_unknown_at_once_and_open_requests_are_answered(
    ask: Ask, gateway: Gateway, several: InferenceService, loop_thread: LoopThread
) -> None:
    ends: list[Callable[[RequestResult], None]] = []
    submit = gateway.driver.submit

    def keep(*_: object, on_end: Callable[[RequestResult], None], **__: object) -> RequestId:
        ends.append(on_end)
        return RequestId(1)

    gateway.driver.submit = keep  # type: ignore[method-assign]
    with closing(http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)) as waiting:
        waiting.request("POST", "/v2/models/pair/infer", json.dumps(PAIR).encode())
        wait_until(lambda: bool(ends))
        gateway.driver.submit = submit  # type: ignore[method-assign]
        several.remove("pair")
        assert ask("POST", "/v2/models/pair/infer", PAIR).error.startswith("unknown model 'pair'")
        assert ask("GET", "/v2/models/pair/ready").status == 404
        assert "/v2/models/pair/infer" not in ask("GET", "/openapi.json").json["paths"]
        outputs = {"b": Tensor("INT32", (1, 2), bytes(8))}
        loop_thread.loop.call_soon_threadsafe(ends[0], RequestResult(Outcome.SERVED, outputs))
        assert Answered(waiting.getresponse()).json["model_name"] == "pair"


def wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def test_errors_stay_short_with_hundreds_of_models() -> None:
    gateway = Gateway(FakeDriver())
    service = make_service(gateway)
    for number in range(200):
        service.add(replace(service.models["demo"], name=f"model-{number:03}"))
    for wrong, near in (("model-1O7", "model-1"), ("nothing like it", "GET /v2/models"), ("x" * 100_000, "GET")):
        with pytest.raises(Refusal) as caught:
            service.model(wrong)
        said = str(caught.value)
        assert len(said) < 300, said
        assert near in said
        assert "GET /v2/models lists the 201 models of this server" in said
    with pytest.raises(Refusal, match="did you mean 'demo'"):
        service.model("demos")
    service.models.clear()
    with pytest.raises(Refusal, match="this server has no models"):
        service.model("demo")


# Limits of a model


@pytest.fixture
def limited(several: InferenceService) -> Iterator[InferenceService]:
    """The second model may have one open request, with 200 bytes."""
    several.add(replace(several.models["pair"], limits=Limits(requests=1, bytes=200)))
    yield several
    several.bodies.set_quota("pair", 0, 0)


def test_a_model_at_its_limit_refuses_and_the_others_serve(
    ask: Ask, gateway: Gateway, limited: InferenceService, loop_thread: LoopThread
) -> None:
    quota = limited.bodies.quotas["pair"]
    gateway.driver.respond = lambda tensors: scaled(tensors) if "x" in tensors else None
    with closing(http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)) as waiting:
        waiting.request("POST", "/v2/models/pair/infer", json.dumps(PAIR).encode())
        wait_until(lambda: bool(gateway.driver.seen))
        assert (quota.requests, quota.held_bytes) == (1, len(json.dumps(PAIR)))
        for path in ("/v2/models/pair/infer", "/v2/models/pair/versions/1/infer"):
            answered = ask("POST", path, PAIR)
            assert (answered.status, answered.headers["retry-after"]) == (503, "1")
            assert answered.error == (
                "rejected: model 'pair' has 1 open request; its limit is 1; help: try again in 1 s; "
                "`limits: {requests: 1}` of the application sets the limit"
            )
        assert ask("GET", "/v2/models/pair/ready").status == 200, "only inference is limited"
        assert ask("POST", INFER, {"inputs": [X, K]}).status == 200
        limited.add(replace(limited.models["pair"], limits=Limits(requests=2, bytes=300)))
        assert limited.bodies.quotas["pair"] is quota, "open requests count for the version that replaces this one"
        assert (quota.requests, quota.requests_max, quota.bytes_max) == (1, 2, 300)
    loop_thread.call(asyncio.wait_for(gateway.driver.gone.wait(), 5))
    wait_until(lambda: not quota.requests)
    assert (quota.held_bytes, limited.bodies.held_bytes) == (0, 0)
    assert dict(quota.refused) == {"requests": 2}
    gateway.driver.respond = lambda _: RequestResult(Outcome.FAILED, why="told to")
    assert ask("POST", "/v2/models/pair/infer", PAIR).status == 500, "it is let in again"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.usefixtures("limited")
def test_a_body_over_the_limit_of_its_model_is_too_large(gateway: Gateway, ask: Ask, is_chunked: bool) -> None:
    padded = json.dumps({**PAIR, "id": "i" * 300}).encode()
    with closing(http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)) as connection:
        parts = iter([padded[:150], padded[150:]])
        connection.request("POST", "/v2/models/pair/infer", parts if is_chunked else padded, encode_chunked=is_chunked)
        answered = Answered(connection.getresponse())
    assert answered.status == 413
    assert f"has at least {len(padded)} bytes; the limit of model 'pair' is 200" in answered.error
    assert "`limits: {bytes: 200}`" in answered.error
    large = {"inputs": [X, K], "id": "i" * 300}
    assert ask("POST", INFER, large).status == 200, "other models have no such limit"


def test_an_unknown_compression_is_refused(ask: Ask) -> None:
    assert ask("POST", INFER, b"\x1f\x8b", {"content-encoding": "br"}).status == 415


def test_a_body_over_the_limit_is_refused_before_and_while_it_arrives(ask: Ask, gateway: Gateway) -> None:
    answered = ask("POST", INFER, bytes(100_001))
    assert answered.status == 413
    assert answered.error.startswith("the body has 100001 bytes; the limit is 100000")
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)
    connection.request("POST", INFER, iter([bytes(60_000)] * 2), encode_chunked=True)
    chunked = Answered(connection.getresponse())
    assert chunked.status == 413
    connection.close()
    assert ask("POST", INFER, {"inputs": [X, K]}).status == 200


def test_an_error_inside_is_a_500_and_the_server_serves_on(ask: Ask, gateway: Gateway) -> None:
    def respond(_: object) -> RequestResult:
        raise RuntimeError("boom")

    gateway.driver.respond = respond
    assert ask("POST", INFER, {"inputs": [X, K]}).error.startswith("failed: internal error of the server")
    gateway.driver.respond = None
    assert ask("POST", INFER, {"inputs": [X, K]}).status == 200


def test_outputs_of_branches_not_taken_are_left_out(ask: Ask, gateway: Gateway) -> None:
    gateway.driver.respond = lambda _: RequestResult(Outcome.SERVED, {})
    assert ask("POST", INFER, {"inputs": [X, K]}).json["outputs"] == []


def test_a_client_that_goes_away_is_cancelled(gateway: Gateway, loop_thread: LoopThread) -> None:
    gateway.driver.respond = lambda _: None
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)
    connection.request("POST", INFER, json.dumps({"inputs": [X, K]}).encode())

    loop_thread.call(asyncio.wait_for(gateway.driver.heard.wait(), 5))
    connection.close()
    loop_thread.call(asyncio.wait_for(gateway.driver.gone.wait(), 5))
    assert gateway.driver.cancelled == [1]


def test_a_key_without_the_role_of_an_administrator_changes_no_models(loop_thread: LoopThread, tmp_path: Path) -> None:
    gateway, keys = Gateway(FakeDriver()), tmp_path / "keys"
    keys.write_text("phone other\nboss secret admin\n")
    listener = web_server(make_service(gateway, api_key_file=keys), limits=ServerLimits(requests=8))
    connection = http.client.HTTPConnection("127.0.0.1", loop_thread.serve(listener), timeout=10)

    def ask(path: str, key: str, method: str = "POST") -> Answered:
        connection.request(method, path, headers={"x-api-key": key} if key else {})
        return Answered(connection.getresponse())

    changes = [f"/v2/repository/models/other/{verb}" for verb in ("load", "unload")]
    for path in (*changes, *changes, changes[0].replace("rep", "%72ep"), f"{changes[0]}?x=1"):
        refused = ask(path, "other")
        assert (refused.status, "help: use one with the role admin" in refused.error) == (403, True)
        assert ask(path, "").status == 401
        assert not gateway.changes
    assert [ask(path, "secret").status for path in changes] == [200, 200]
    assert gateway.changes == [("other", True), ("other", False)]
    for path in ("/metrics", "/v2/sloop/state", "/v2/sloop/decisions", "/v2/models/demo"):
        assert ask(path, "other", "GET").status == 200
    assert ask("/v2/repository/index", "other").status == 200
    connection.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic c2VjcmV0"}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "bearer secret"}, 200),
    ],
)
def test_asks_for_the_key_where_one_is_set(loop_thread: LoopThread, headers: dict[str, str], status: int) -> None:
    gateway = Gateway(FakeDriver())
    service = make_service(gateway, api_key="secret")
    listener = web_server(service, limits=ServerLimits(requests=8))
    port = loop_thread.serve(listener)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for path in ("/v2/models/demo", "/metrics", "/v2/sloop/state", "/nothing"):
        connection.request("GET", path, headers=headers)
        answered = Answered(connection.getresponse())
        assert answered.status == (404 if (path, status) == ("/nothing", 200) else status)
        if status == 401:
            assert answered.headers["www-authenticate"] == "Bearer"
            assert "x-api-key: KEY" in answered.error
    connection.request("GET", "/v2/health/live")
    assert Answered(connection.getresponse()).status == 200
    gateway.states["demo"] = Readiness(ModelState.FAILING, "ValueError: what the model has raised")
    connection.request("GET", "/v2/health/ready", headers=headers)
    told = Answered(connection.getresponse())
    assert (told.status, told.json["not_ready"]["demo"]["state"]) == (200, "failing")
    assert ("ValueError" in str(told.json)) is (status == 200), "strangers are not told what models raise"
    for method, body in (("GET", b"x" * 100), ("POST", b"x" * 100), ("POST", b"")):
        connection.request(method, "/v2/health/live", body, headers=headers)
        known = 200 if method == "GET" else 405
        assert Answered(connection.getresponse()).status == (known if status == 200 else status), (
            "no room without a key"
        )
    connection.close()
    loop_thread.call(listener.close(1.0))


def test_a_deadline_does_not_wait_for_a_body_that_is_slow_to_come(gateway: Gateway) -> None:
    body = json.dumps({"inputs": [X, K]}).encode()
    head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as sock:
        sock.sendall(head + body[:5])
        time.sleep(0.1)
        sock.sendall(body[5:])
        assert sock.recv(12) == b"HTTP/1.1 200"
    assert gateway.driver.seen[0][2] == 0, "nothing was said of the way here"
    assert gateway.driver.ages_ns[0] > ms(30)
