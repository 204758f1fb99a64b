"""The OpenAPI 3.1 description of the REST interface: for each model its inputs, outputs, types and shapes.

Tests fuzz the server with it, so that the description matches the server.
Source: OpenAPI Specification 3.1.0; Open Inference Protocol v2 for the objects.
"""

import asyncio
from math import prod
from typing import Final

import msgspec
from msgspec import Raw

from sloop.serve.edge import service as offered
from sloop.serve.edge.bodies import PREDICT
from sloop.serve.edge.parameters import CLASSES_MAX, MS_MAX
from sloop.serve.edge.service import NAMES_MAX, InferenceService, Model
from sloop.serve.edge.v1 import SIGNATURE_NAME
from sloop.tensor import Port
from sloop.text import listed

Schema = dict[str, object]

_ENCODE: Final = msgspec.json.Encoder().encode

ERROR: Final[Schema] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string", "description": "What is wrong, its value, and the fix."}},
}
MILLISECONDS: Final[Schema] = {"type": "number", "minimum": 0.001, "maximum": MS_MAX}
NOTHING: Final[Schema] = {"enum": [0, False, "", None]}
"""The value of a parameter of Triton's that cannot be honoured, where the client wants the default."""
PARAMETERS: Final[Schema] = {
    "type": "object",
    "description": "Others than these have no effect.",
    "properties": {
        "x-slo-ms": MILLISECONDS,
        "x-elapsed-ms": {**MILLISECONDS, "minimum": 0},
        "timeout": {"type": "integer", "minimum": 0, "description": "Microseconds; can only shorten the deadline."},
        "binary_data_output": {"type": "boolean"},
        "priority": NOTHING,
        "sequence_id": NOTHING,
        "sequence_start": NOTHING,
        "sequence_end": NOTHING,
    },
}
TENSOR_PARAMETERS: Final[Schema] = {
    "type": "object",
    "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
}
OUTPUT_PARAMETERS: Final[Schema] = {
    "type": "object",
    "properties": {
        "binary_data": {"type": "boolean"},
        "classification": {"type": "integer", "minimum": 0, "maximum": CLASSES_MAX},
    },
}
CONFIGURATION: Final[Schema] = {
    "type": "object",
    "required": ["name", "backend", "max_batch_size", "input", "output"],
    "properties": {"max_batch_size": {"type": "integer", "minimum": 0, "description": "0 without a batch dimension."}},
}
INDEX_REQUEST: Final[Schema] = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
INDEX: Final[Schema] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "version", "state", "reason"],
        "properties": {"state": {"enum": ["READY", "LOADING", "UNAVAILABLE", "UNLOADING"]}},
    },
}
V1_ANSWER: Final[Schema] = {
    "type": "object",
    "properties": {
        "predictions": {"type": "array", "description": "One for each row, if the request has instances."},
        "outputs": {"description": "Whole tensors, if the request has inputs."},
    },
}
FLOAT: Final[Schema] = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
ELEMENTS: Final[dict[str, Schema]] = {
    "BOOL": {"type": "boolean"},
    "BYTES": {"type": "string"},
    **{f"UINT{bits}": {"type": "integer", "minimum": 0, "maximum": 2**bits - 1} for bits in (8, 16, 32, 64)},
    **{
        f"INT{bits}": {"type": "integer", "minimum": -(2 ** (bits - 1)), "maximum": 2 ** (bits - 1) - 1}
        for bits in (8, 16, 32, 64)
    },
}
"""The JSON schema of an element of `data` by datatype; the others are floats."""
EXAMPLE_ELEMENTS_MAX: Final = 64
REASONS: Final = {
    400: "The request is wrong; the error names the field.",
    401: "The API key is missing or wrong.",
    403: "The key may not load or unload models, or no client of this server may.",
    404: "No such path, model or version.",
    405: "The path does not know this method.",
    408: "The request was sent too slowly.",
    413: "The body is larger than this server takes.",
    415: "The body is compressed in a way that this server does not know.",
    500: "The model failed on this request.",
    503: "Rejected by admission or a limit, or not ready; see Retry-After.",
    504: "Dropped: its deadline could not be met.",
}


async def describe(service: InferenceService) -> list[bytes]:
    """The complete description, with the models and versions that serve now, in parts: hundreds of models have some
    megabytes."""
    answers: Schema = {"type": "object"}
    of_one = option("model", "Only this model.", {"type": "string"})
    paths: Schema = {
        "/v2": get("Server metadata", having(name="string", version="string", extensions="array")),
        "/v2/health/live": get("Whether the server runs", having(live="boolean"), needs_key=False),
        "/v2/health/ready": get("Whether what can be served is served", having(ready="boolean"), 503, needs_key=False),
        "/v1/models": get("The names of the models, as KServe's V1 has it", having(models="array")),
        "/v2/models": get("The models with their versions and states", having(models="array")),
        "/v2/models/stats": get("What all models took, as Triton has it", having(model_stats="array")),
        "/metrics": get("Prometheus metrics", {"type": "string"}, media="text/plain"),
        "/openapi.json": get("This description", answers),
        "/v2/sloop/openapi": get("This description", answers),
        "/v2/sloop/state": get(
            "Models, replicas, plans, nodes and edges as they are now", answers, 404, parameters=[of_one]
        ),
        "/v2/repository/index": {
            "post": {
                "summary": "The models that serve, and those that could be loaded",
                "requestBody": {"required": False, "content": {"application/json": {"schema": INDEX_REQUEST}}},
                "responses": ok(INDEX) | errors(400, 401, 408, 413),
            }
        },
        "/v2/sloop/decisions": get(
            "The last decisions with their reasons", answers, 400, 404, parameters=[limit(), of_one]
        ),
    }
    if service.has_repository:
        for verb in ("load", "unload"):
            paths[f"/v2/repository/models/{{name}}/{verb}"] = change(verb)
    names = ", ".join(service.models) if len(service.models) <= NAMES_MAX else f"{len(service.models)} models"
    description: Schema = {
        "openapi": "3.1.0",
        "info": {"title": f"{names}, served by sloop", "version": offered.SERVER_VERSION},
    }
    if service.keys.is_required:
        description["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        description["security"] = [{"key": []}]
    parts = [_ENCODE(description | {"paths": paths}).removesuffix(b"}}")]
    for model in list(service.models.values()):
        parts += (b",", _ENCODE(_paths_of(model))[1:-1])
        await asyncio.sleep(0)  # others get their turn
    return [*parts, b"}}"]


def _paths_of(model: Model) -> dict[str, Raw]:
    """The paths of a model and its versions, and what can be asked there."""
    pages = {path: Raw(_ENCODE(page)) for path, page in model_pages(model).items()}
    v1 = {path: Raw(_ENCODE(page)) for path, page in v1_pages(model).items()}
    found: dict[str, Raw] = {}
    for version in ("", *(f"/versions/{version}" for version in model.versions)):
        found |= {f"/v2/models/{model.name}{version}{path}": page for path, page in pages.items()}
        found |= {f"/v1/models/{model.name}{version}{path}": page for path, page in v1.items()}
    return found


def change(verb: str) -> Schema:
    """The path that loads or unloads a model."""
    name: Schema = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "post": {
            "summary": f"{verb.capitalize()} a model; answers when it serves, or has ended",
            "parameters": [name],
            "requestBody": {"required": False, "content": {"application/json": {"schema": {"type": "object"}}}},
            "responses": ok({"type": "object"}) | errors(400, 401, 403, 404, 408, 413, 500, 503),
        }
    }


def model_pages(model: Model) -> dict[str, Schema]:
    """The paths of one model, by what follows its name or version."""
    metadata = having(name="string", versions="array", platform="string", inputs="array", outputs="array")
    readiness = having(name="string", ready="boolean", state="string")
    return {
        "": get("Model metadata", metadata, 404),
        "/config": get("The model's configuration, as Triton has it", CONFIGURATION, 404),
        "/stats": get("What requests and batches took, as Triton has it", having(model_stats="array"), 404),
        "/ready": get("Whether the model would infer", readiness, 404, 503),
        "/infer": infer(model),
    }


def v1_pages(model: Model) -> dict[str, Schema]:
    """The paths of one model in KServe's V1 protocol, by what follows its name or version."""
    return {
        "": get("Whether the model would infer", having(name="string", ready="boolean"), 404, 503),
        PREDICT: {
            "post": {
                "summary": "Infer, in KServe's V1 protocol",
                "parameters": deadline_headers(),
                "requestBody": {"required": True, "content": {"application/json": {"schema": v1_request(model)}}},
                "responses": answered(V1_ANSWER) | errors(400, 401, 404, 405, 408, 413, 415, 500, 503, 504),
            }
        },
    }


def v1_request(model: Model) -> Schema:
    """The body of a prediction: rows, or whole tensors."""
    names = [port.name for port in model.validator.signature.inputs]
    described = (
        f"an object with {listed(names)}" if len(names) > 1 else f"the value of {names[0]}, or an object with it"
    )
    signature = model.validator.signature
    rows: Schema = {"type": "null", "description": "Inputs of this model belong to the request as a whole."}
    if all(port.has_rows for port in signature.inputs) or not model.validator.counting:
        rows = {"type": ["array", "null"], "minItems": 1, "description": f"One element a row: {described}."}
        if model.validator.counting:
            rows["maxItems"] = signature.rows_max
    return {
        "type": "object",
        "properties": {
            "instances": rows,
            "inputs": {"description": f"Whole tensors as nested lists: {described}."},
            "signature_name": {"enum": [SIGNATURE_NAME, None]},
        },
        "additionalProperties": False,
    }


def get(
    summary: str,
    schema: Schema,
    *statuses: int,
    parameters: list[Schema] | None = None,
    media: str = "application/json",
    needs_key: bool = True,
) -> Schema:
    """A path with the method GET."""
    operation: Schema = {
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": {media: {"schema": schema}}}}
        | errors(*statuses, *([401] if needs_key else []), 405),
    }
    if parameters:
        operation["parameters"] = parameters
    return {"get": operation}


def infer(model: Model) -> Schema:
    """The path for inference, with the method POST."""
    signature = model.validator.signature
    ports, every = signature.inputs, (*signature.inputs, *signature.optional)
    output: Schema = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"enum": [port.name for port in signature.outputs]},
            "parameters": or_null(OUTPUT_PARAMETERS),
        },
    }
    request: Schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": or_null({"type": "string"}),
            "parameters": or_null(PARAMETERS),
            "inputs": {
                "type": "array",
                "description": "Each input once, in any order; optional ones may be left out.",
                "items": {"anyOf": [tensor(port, signature.rows_max) for port in every]},
                "minItems": len(ports),
                "maxItems": len(every),
            },
            "outputs": or_null({"type": "array", "items": output}),
        },
    }
    answer: Schema = {
        "type": "object",
        "required": ["model_name", "outputs"],
        "properties": {
            "model_name": {"const": model.name},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"type": "object", "required": ["name", "datatype", "shape"]}},
        },
    }
    binary: Schema = {"description": "The same JSON with binary tensors behind it; see the headers."}
    body: Schema = {"schema": request}
    if all(prod(one_row(port)) <= EXAMPLE_ELEMENTS_MAX for port in ports):
        body["example"] = {"inputs": [example(port) for port in ports]}
    return {
        "post": {
            "summary": "Infer",
            "parameters": [
                *deadline_headers(),
                header("Inference-Header-Content-Length", "Bytes of JSON before binary tensors.", "integer", 0, None),
            ],
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": answered(answer, {"application/octet-stream": {"schema": binary}})
            | errors(400, 401, 404, 405, 408, 413, 415, 500, 503, 504),
        }
    }


def ok(schema: Schema) -> Schema:
    """The successful response, by its status."""
    return {"200": {"description": "OK", "content": {"application/json": {"schema": schema}}}}


def answered(schema: Schema, others: Schema | None = None) -> Schema:
    """The successful response of an inference, as JSON or in other media types, by its status."""
    content: Schema = {"application/json": {"schema": schema}}
    met: Schema = {"x-slo-met": {"required": True, "schema": {"enum": ["true", "false"]}}}
    return {"200": {"description": "The outputs", "headers": met, "content": content | (others or {})}}


def deadline_headers() -> list[Schema]:
    """The headers of an inference that say when its answer is needed."""
    return [
        header("x-slo-ms", "End-to-end budget in milliseconds.", "number", 0.001, MS_MAX),
        header("x-elapsed-ms", "Milliseconds of it spent on the way here.", "number", 0, MS_MAX),
    ]


def tensor(port: Port, rows_max: int) -> Schema:
    """`$request_input` for one input."""
    dims: list[Schema] = [{"const": dim} if dim != -1 else {"type": "integer", "minimum": 0} for dim in port.shape]
    if port.counts_rows:
        dims[0] |= {"minimum": 1, "maximum": rows_max}
    shape: Schema = {"type": "array", "minItems": len(dims), "maxItems": len(dims)}
    if dims:
        shape["prefixItems"] = dims
    return {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"const": port.name},
            "datatype": {"const": port.datatype},
            "shape": shape,
            "data": {
                "type": "array",
                "description": "As many elements as the shape says, flat or nested.",
                "items": {"anyOf": [ELEMENTS.get(port.datatype, FLOAT), {"type": "array"}]},
            },
            "parameters": or_null(TENSOR_PARAMETERS),
        },
    }


def or_null(schema: Schema) -> Schema:
    """The schema, or null: optional fields may also be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def one_row(port: Port) -> list[int]:
    """A shape of one row, with 1 for every open dimension."""
    return [1 if dim == -1 else dim for dim in port.shape]


def example(port: Port) -> Schema:
    """An example input: one row of zeros or empty strings."""
    shape = one_row(port)
    zero: object = {"BOOL": False, "BYTES": ""}.get(port.datatype, 0)
    return {"name": port.name, "datatype": port.datatype, "shape": shape, "data": [zero] * prod(shape)}


def header(name: str, description: str, kind: str, minimum: float, maximum: float | None) -> Schema:
    """An optional header with a number."""
    schema: Schema = {"type": kind, "minimum": minimum}
    if maximum is not None:
        schema["maximum"] = maximum
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def limit() -> Schema:
    """The query parameter `limit`: the number of decisions to show."""
    return option("limit", "How many decisions.", {"type": "integer", "minimum": 1, "maximum": 10_000})


def option(name: str, description: str, schema: Schema) -> Schema:
    """An optional query parameter."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def errors(*statuses: int) -> Schema:
    """The responses that carry `{"error": …}`."""
    return {
        str(status): {"description": REASONS[status], "content": {"application/json": {"schema": ERROR}}}
        for status in sorted(set(statuses))
    }


def having(**kinds: str) -> Schema:
    """An object with these fields, all required."""
    return {"type": "object", "required": list(kinds), "properties": {key: {"type": k} for key, k in kinds.items()}}
