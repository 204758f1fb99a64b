import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from sloop.serve.edge.inputs import InputValidator, read
from sloop.serve.edge.large import LargeJson
from sloop.serve.edge.openapi import describe
from sloop.serve.edge.rest import Rest
from sloop.serve.edge.service import InferenceService
from sloop.tensor import Port, Signature
from tests.serve.edge.fakes import FakeDriver, Gateway, make_service


def service_of(*inputs: Port, api_key: str = "") -> InferenceService:
    service = make_service(Gateway(FakeDriver()), api_key=api_key)
    validator = InputValidator(Signature(inputs, (Port("y", "FP32", (-1,)),), 8))
    service.add(replace(service.models["demo"], validator=validator))
    return service


def described_by(service: InferenceService) -> Any:
    return json.loads(b"".join(asyncio.run(describe(service))))


def body_of(service: InferenceService) -> Any:
    return described_by(service)["paths"]["/v2/models/demo/infer"]["post"]["requestBody"]["content"]["application/json"]


def test_describes_every_path_and_method_there_is() -> None:
    gateway = Gateway(FakeDriver())
    service = make_service(gateway)
    service.add(replace(service.models["demo"], name="other"))
    service.add(replace(service.models["demo"], versions=["1", "2"]))
    described = described_by(service)
    rest = Rest(service, LargeJson())
    routes: dict[str, list[str]] = {path: [*verbs] for path, verbs in rest.pages.items() if not path.endswith("/v2/")}
    for name, model in service.models.items():
        for base in (name, *(f"{name}/versions/{version}" for version in model.versions)):
            for page, verbs in rest.model_pages.items():
                routes[f"/v2/models/{base}/{page}".rstrip("/")] = [*verbs]
            routes |= {f"/v1/models/{base}{page}": [*verbs] for page, verbs in rest.v1_pages.items()}
    assert {path: sorted(verbs) for path, verbs in described["paths"].items()} == {
        path: [verb.lower() for verb in verbs if verb != "HEAD"] for path, verbs in routes.items()
    }
    for operations in described["paths"].values():
        for operation in operations.values():
            assert all(answer["description"] for answer in operation["responses"].values())


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT8", "UINT64", "BOOL", "BYTES"])
def test_the_example_is_a_request_that_is_read(datatype: str) -> None:
    service = service_of(Port("x", datatype, (-1, 3, -1)), Port("z", datatype, (-1,)))
    example = body_of(service)["example"]
    assert set(read(json.dumps(example).encode(), None, service.models["demo"].validator).tensors) == {"x", "z"}


def test_inputs_are_described_with_type_and_shape() -> None:
    schema = body_of(service_of(Port("x", "INT8", (-1, 3))))["schema"]["properties"]["inputs"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    (tensor,) = schema["items"]["anyOf"]
    assert tensor["properties"]["shape"]["prefixItems"] == [
        {"type": "integer", "minimum": 1, "maximum": 8},
        {"const": 3},
    ]
    assert tensor["properties"]["data"]["items"]["anyOf"][0] == {"type": "integer", "minimum": -128, "maximum": 127}


def test_optional_inputs_are_described_and_not_demanded() -> None:
    service = service_of(Port("x", "INT8", (-1, 3)))
    signature = service.models["demo"].validator.signature
    optional = structs.replace(signature, optional=(Port("scale", "FP32", (1,), has_rows=False),))
    service.add(replace(service.models["demo"], validator=InputValidator(optional)))
    schema = body_of(service)["schema"]["properties"]["inputs"]
    assert (schema["minItems"], schema["maxItems"], len(schema["items"]["anyOf"])) == (1, 2, 2)


def test_a_large_input_has_no_example_and_the_api_key_is_described() -> None:
    service = service_of(Port("x", "FP32", (-1, 3, 224, 224)), api_key="secret")
    assert "example" not in body_of(service)
    described = described_by(service)
    assert described["security"] == [{"key": []}]
    assert "secret" not in json.dumps(described)


def test_others_get_their_turn_after_each_of_many_models() -> None:
    service = service_of(Port("x", "FP32", (-1, 3)))
    for number in range(100):
        service.add(replace(service.models["demo"], name=f"model-{number}"))

    async def turns() -> int:
        described, found = asyncio.create_task(describe(service)), 0
        while not described.done():
            await asyncio.sleep(0)
            found += 1
        return found

    assert asyncio.run(turns()) > 101
    assert "/v1/models/model-99/versions/1:predict" in described_by(service)["paths"]
