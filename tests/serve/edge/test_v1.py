"""KServe's V1 protocol: rows and whole tensors, with and without names."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays

from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.v1 import read, write
from sloop.tensor import Port, Signature, Tensor, join_strings
from tests.serve.edge.fakes import Gateway
from tests.serve.edge.test_rest import Ask, ask  # noqa: F401  # a fixture


def validator_of(*inputs: Port) -> InputValidator:
    return InputValidator(Signature(inputs, (Port("y", "FP32", (-1, -1)),), rows_max=8))


ONE = validator_of(Port("x", "FP32", (-1, 2)))
TWO = validator_of(Port("x", "FP32", (-1, 2)), Port("k", "INT64", (-1,)))
TEXT = validator_of(Port("text", "BYTES", (-1,)))


def tensors_of(body: object, validator: InputValidator) -> dict[str, tuple[tuple[int, ...], bytes]]:
    found = read(json.dumps(body).encode(), validator).tensors
    return {name: (tensor.shape, bytes(tensor.data)) for name, tensor in found.items()}


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [[1, 2], [3, 4]]},
        {"instances": [{"x": [1, 2]}, {"x": [3, 4]}]},
        {"inputs": [[1, 2], [3, 4]]},
        {"inputs": {"x": [[1, 2], [3, 4]]}, "signature_name": "serving_default"},
    ],
)
def test_rows_and_columns_are_the_same_tensor(body: object) -> None:
    assert tensors_of(body, ONE) == {"x": ((2, 2), f32(1, 2, 3, 4))}


def test_instances_of_a_model_without_rows_are_its_tensor() -> None:
    validator = validator_of(Port("x", "FP32", (2, 2), has_rows=False))
    assert tensors_of({"instances": [[1, 2], [3, 4]]}, validator) == {"x": ((2, 2), f32(1, 2, 3, 4))}


def test_optional_inputs_are_given_with_whole_tensors_only() -> None:
    scale = Port("scale", "FP32", (1,), has_rows=False)
    validator = InputValidator(Signature((Port("x", "FP32", (-1, 2)),), (), rows_max=8, optional=(scale,)))
    x = ((1, 2), f32(1, 2))
    absent = ((), b"")
    assert tensors_of({"instances": [[1, 2]]}, validator) == {"x": x, "scale": absent}
    assert tensors_of({"inputs": [[1, 2]]}, validator) == {"x": x, "scale": absent}
    assert tensors_of({"inputs": {"x": [[1, 2]], "scale": [3]}}, validator) == {"x": x, "scale": ((1,), f32(3))}
    with pytest.raises(Refusal, match="input 'scale' belongs to the request as a whole"):
        tensors_of({"instances": [{"x": [1, 2], "scale": [3]}]}, validator)


def test_rows_are_not_asked_of_a_model_with_an_input_for_the_whole_request() -> None:
    with_side = validator_of(Port("x", "FP32", (-1, 2)), Port("threshold", "FP32", (1,), has_rows=False))
    whole = {"x": [[1, 2], [3, 4]], "threshold": [0.5]}
    assert tensors_of({"inputs": whole}, with_side) == {"x": ((2, 2), f32(1, 2, 3, 4)), "threshold": ((1,), f32(0.5))}
    with pytest.raises(Refusal, match="input 'threshold' belongs to the request as a whole"):
        tensors_of({"instances": [{"x": [1, 2], "threshold": [0.5]}]}, with_side)


@pytest.mark.parametrize(
    "body",
    [
        {"instances": [{"x": [1, 2], "k": 5}, {"x": [3, 4], "k": 6}]},
        {"inputs": {"x": [[1, 2], [3, 4]], "k": [5, 6]}},
    ],
)
def test_several_inputs_have_names(body: object) -> None:
    assert tensors_of(body, TWO) == {
        "x": ((2, 2), f32(1, 2, 3, 4)),
        "k": ((2,), np.array([5, 6], "<i8").tobytes()),
    }


@pytest.mark.parametrize("body", [{"instances": ["a", {"b64": "/w=="}]}, {"inputs": {"text": ["a", {"b64": "/w=="}]}}])
def test_text_is_a_string_or_base64(body: object) -> None:
    assert tensors_of(body, TEXT) == {"text": ((2,), join_strings([b"a", b"\xff"]))}


def test_base64_may_come_first() -> None:
    assert tensors_of({"instances": [{"b64": "/w=="}, "a"]}, TEXT) == {"text": ((2,), join_strings([b"\xff", b"a"]))}


@pytest.mark.parametrize(
    ("body", "validator", "error"),
    [
        ({}, ONE, "body: it needs either"),
        ({"instances": [[1, 2]], "inputs": [[1, 2]]}, ONE, "body: it needs either"),
        ({"instances": [[1, 2]], "parameters": {}}, ONE, "'parameters': unknown"),
        ({"instances": [[1, 2]], "signature_name": "other"}, ONE, "signature_name: unknown signature 'other'"),
        ({"instances": []}, ONE, r"instances: \[\] is not a list of rows"),
        ({"instances": {"x": [1, 2]}}, ONE, "instances: .* is not a list of rows"),
        ({"instances": [[1, 2], [3]]}, ONE, "instances.data: the nested lists differ in length"),
        ({"instances": [[1, 2, 3]]}, ONE, r"instances.shape: \[1, 3\] for input 'x'"),
        ({"instances": [1]}, ONE, r"instances.shape: \[1\] for input 'x'"),
        ({"instances": [[[[[[1]]]]]]}, ONE, r"instances.shape: "),
        ({"instances": [[1, "a"]]}, ONE, "instances.data: not every element is a FP32 value"),
        ({"instances": [[1, 2]] * 9}, ONE, "instances: 9 rows"),
        ({"instances": [{"x": [1, 2]}, [1, 2]]}, TWO, r"instances\[0\]: input 'k' is missing"),
        ({"instances": [[1, 2]]}, TWO, "instances: values without names for 2 inputs"),
        ({"instances": [{"x": [1, 2], "k": 1}, 3]}, TWO, r"instances\[1\]: values without names for 2 inputs"),
        ({"instances": [{"x": [1, 2], "k": 1, "z": 1}]}, TWO, r"instances\[0\]: unknown input 'z'"),
        ({"inputs": [[1, 2]]}, TWO, "inputs: values without names"),
        ({"inputs": {"x": [[1, 2]], "k": [1, 2]}}, TWO, r"inputs: the inputs have \[1, 2\] rows"),
        ({"inputs": 3}, ONE, r"inputs.shape: \[\] for input 'x'"),
        ({"instances": [{"b64": "?"}]}, TEXT, "instances.data: .* is not a string"),
        ({"instances": ["a", {"b64": 3}]}, TEXT, "instances.data: .* is not a string"),
        ({"instances": ["a", {"c": "a"}]}, TEXT, "instances.data: .* is not a string"),
        ({"instances": ["a", 1]}, TEXT, "instances.data: 1 is not a string"),
    ],
)
def test_a_wrong_body_is_refused_by_name(body: object, validator: InputValidator, error: str) -> None:
    with pytest.raises(Refusal, match=f"^{error}") as caught:
        tensors_of(body, validator)
    assert caught.value.status == 400


def answered(outputs: Mapping[str, Tensor], rows: int | None) -> Any:
    body = {"inputs": [[1, 2]] * 2} if rows is None else {"instances": [[1, 2]] * rows}
    return json.loads(write(read(json.dumps(body).encode(), ONE).form.rows, outputs))


Y = Tensor("FP32", (2, 1), f32(1, 2))
T = Tensor("BYTES", (2,), join_strings([b"a", b"\xff"]))


def test_answers_have_the_form_of_the_request() -> None:
    assert answered({"y": Y}, 2) == {"predictions": [[1], [2]]}
    assert answered({"y": Y}, None) == {"outputs": [[1], [2]]}
    assert answered({"y": Y, "t": T}, 2) == {"predictions": [{"y": [1], "t": "a"}, {"y": [2], "t": {"b64": "/w=="}}]}
    assert answered({"y": Y, "t": T}, None) == {"outputs": {"y": [[1], [2]], "t": ["a", {"b64": "/w=="}]}}
    assert answered({"y": Tensor("FP32", (), f32(np.nan))}, None) == {"outputs": "NaN"}


def test_outputs_with_other_rows_cannot_be_listed_by_row() -> None:
    with pytest.raises(Refusal, match=r"output 'y' has the shape \[2, 1\] for 1 rows") as caught:
        answered({"y": Y}, 1)
    assert (caught.value.status, "`inputs`" in caught.value.fix) == (500, True)


@given(arrays("<i4", array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=3)))
def test_answers_are_nested_like_their_shape(values: "np.ndarray[Any, Any]") -> None:
    tensor = Tensor("INT32", values.shape, values.tobytes())
    assert answered({"y": tensor}, None) == {"outputs": values.tolist()}


@pytest.mark.live
def test_predicts_over_http(ask: Ask, gateway: Gateway) -> None:  # noqa: F811
    body = {"instances": [{"x": [1, 2, 3, 4], "k": [2]}, {"x": [0, 0, 0, 1], "k": [3]}]}
    for path in ("/v1/models/demo:predict", "/v1/models/demo/versions/1:predict"):
        found = ask("POST", path, body, {"x-slo-ms": "50"})
        assert found.json == {"predictions": [{"y": [2, 4, 6, 8], "n": [2]}, {"y": [0, 0, 0, 3], "n": [2]}]}
        assert found.headers["x-slo-met"] == "true"
    assert gateway.driver.asked == [("demo", ""), ("demo", "1")]
    assert gateway.driver.seen[0][1] == 50_000_000
    assert ask("POST", "/v1/models/demo:predict", {"instances": [1]}).error.startswith("instances: values without")
    assert ask("POST", "/v1/models/other:predict", body).status == 404
    assert ask("POST", "/v1/models/demo/versions/7:predict", body).status == 404
    assert ask("GET", "/v1/models/demo:predict").status == 405


@pytest.mark.live
def test_lists_models_of_v1(ask: Ask, gateway: Gateway) -> None:  # noqa: F811
    assert ask("GET", "/v1/models").json == {"models": ["demo"]}
    assert ask("GET", "/v1/models/demo").json == {"name": "demo", "ready": True}
    gateway.why_unready = "starting"
    starting = ask("GET", "/v1/models/demo")
    assert (starting.status, starting.json["name"], starting.json["ready"]) == (503, "demo", False)
    assert ask("GET", "/v1/models/other").status == 404


@pytest.mark.live
@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("POST", "/v2/models/demo/generate", "not streamed"),
        ("POST", "/v2/models/demo/versions/1/generate_stream", "not streamed"),
        ("POST", "/v1/models/demo:explain", "no explainers"),
        ("GET", "/v2/systemsharedmemory/status", "no shared memory"),
        ("POST", "/v2/cudasharedmemory/region/a/register", "no shared memory"),
        ("GET", "/v2/trace/setting", "sloop explain"),
        ("GET", "/v2/models/demo/trace/setting", "sloop explain"),
        ("GET", "/v2/logging", "one level"),
    ],
)
def test_what_triton_has_and_sloop_has_not_says_so(ask: Ask, method: str, path: str, instead: str) -> None:  # noqa: F811
    found = ask(method, path)
    assert (found.status, instead in found.error) == (501, True)
