"""Requests and answers of KServe's V1 protocol, which is TensorFlow Serving's REST API, as tensors.

`instances` lists rows, `inputs` gives whole tensors. Either has the values themselves if the model has one input, and
objects `{input: value}` otherwise. A BYTES element is a string or `{"b64": …}`. Numbers that are not finite are written
as in V2. Source: KServe, "V1 protocol"; TensorFlow Serving, "RESTful API".
"""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.serve.edge.inputs import InputValidator, decoded, flatten, listed, pack
from sloop.serve.edge.refusal import Refusal, bad
from sloop.tensor import Port, Tensor, split_strings
from sloop.text import quoted

PREDICT_KEYS: Final = frozenset({"instances", "inputs", "signature_name"})
SIGNATURE_NAME: Final = "serving_default"
B64: Final = "b64"

_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
_ENCODER: Final = msgspec.json.Encoder()


class Prediction(Struct, gc=False):
    """A validated request."""

    tensors: Mapping[str, Tensor]
    rows: int | None
    """The number of `instances`; None for a request with `inputs`, whose answer has whole tensors too."""


def read(body: bytes, validator: InputValidator) -> Prediction:
    """Parse and validate a request body. Raises a 400 that names the field."""
    asked = decoded(body, _DECODER)
    for key in asked.keys() - PREDICT_KEYS:
        raise bad(quoted(key), "unknown", "send `instances`, a list of rows, or `inputs`, whole tensors")
    if asked.get("signature_name") not in (None, SIGNATURE_NAME):
        name = quoted(asked["signature_name"])
        raise bad("signature_name", f"unknown signature {name}", f"leave it out, or send {SIGNATURE_NAME!r}")
    given = [key for key in ("instances", "inputs") if asked.get(key) is not None]
    if len(given) != 1:
        raise bad(
            "body", "it needs either `instances` or `inputs`", "send rows as instances, or whole tensors as inputs"
        )
    (field,) = given
    columns = _by_row(asked[field], validator) if field == "instances" else _by_name(asked[field], field, validator)
    tensors = {name: _tensor(value, validator.ports[name], field, validator) for name, value in columns.items()}
    return Prediction(validator.complete(tensors, field), len(asked[field]) if field == "instances" else None)


def _by_row(rows: object, validator: InputValidator) -> dict[str, Any]:
    """The values of each input, from rows."""
    if not isinstance(rows, list) or not rows:
        raise bad("instances", f"{quoted(rows)} is not a list of rows", "send one element for each row")
    if len(rows) > validator.signature.rows_max:
        most = validator.signature.rows_max
        raise bad("instances", f"{len(rows)} rows exceed the limit of {most} rows per request", "send several requests")
    if _is_value(rows[0], validator):
        return _by_name(rows, "instances", validator)
    named = [_by_name(row, f"instances[{index}]", validator) for index, row in enumerate(rows)]
    return {name: [row[name] for row in named] for name in validator.ports}


def _by_name(given: Any, field: str, validator: InputValidator) -> dict[str, Any]:  # noqa: ANN401  # any JSON
    """The value of each input; without names, of the only one."""
    names = list(validator.ports)
    if _is_value(given, validator):
        if len(names) > 1:
            inputs = ", ".join(f'"{name}": …' for name in names)
            raise bad(field, f"values without names for {len(names)} inputs", f"send {{{inputs}}}")
        return {names[0]: given}
    for name in given.keys() - validator.ports.keys():
        raise bad(field, f"unknown input {quoted(name)}", f"the inputs are {', '.join(map(repr, names))}")
    missing = [name for name in names if name not in given]
    if missing:
        raise bad(field, f"input {', '.join(map(repr, missing))} is missing", "send every input once")
    return {name: given[name] for name in names}


def _is_value(given: object, validator: InputValidator) -> bool:
    """Whether this is a value rather than an object that names inputs."""
    return not isinstance(given, dict) or (given.keys() == {B64} and B64 not in validator.ports)


def _tensor(value: Any, port: Port, field: str, validator: InputValidator) -> Tensor:  # noqa: ANN401  # any JSON
    """One input, whose shape is that of the nested lists."""
    try:
        shape: list[int] = []
        inner = value
        while isinstance(inner, list) and len(shape) <= len(port.shape):
            shape.append(len(inner))
            inner = inner[0] if inner else None
        count = validator.count(port.name, port.datatype, tuple(shape))
        flat = flatten(value, "data", max(1, len(shape))) if shape else [value]
        if port.datatype == "BYTES":
            flat = [_text(element) for element in flat]
        return Tensor(port.datatype, tuple(shape), pack(port.datatype, tuple(shape), count, flat))
    except Refusal as refusal:
        raise refusal.within(field) from None


def _text(element: Any) -> Any:  # noqa: ANN401  # any JSON
    """An element of a BYTES tensor."""
    if not isinstance(element, dict):
        return element
    try:
        if element.keys() != {B64}:
            raise ValueError
        return b64decode(element[B64], validate=True)
    except (Base64Error, TypeError, ValueError):
        raise bad("data", f"{quoted(element)} is not a string", 'BYTES elements are strings or {"b64": "…"}') from None


def write(wanted: Prediction, outputs: Mapping[str, Tensor]) -> bytes:
    """The response body: `predictions`, one for each row, or `outputs`, whole tensors; of a single output its values
    alone. Raises a 500 if there are not as many rows of an output as of the inputs."""
    values = {name: _nested(name, tensor) for name, tensor in outputs.items()}
    if wanted.rows is None:
        return _ENCODER.encode({"outputs": values if len(values) != 1 else next(iter(values.values()))})
    for name, tensor in outputs.items():
        if tensor.shape[:1] != (wanted.rows,):
            what = f"output {name!r} has the shape {list(tensor.shape)} for {wanted.rows} rows"
            raise Refusal(500, what, "ask for whole tensors: send `inputs` in place of `instances`")
    if len(values) == 1:
        return _ENCODER.encode({"predictions": next(iter(values.values()))})
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return _ENCODER.encode({"predictions": rows})


def _nested(name: str, tensor: Tensor) -> Any:  # noqa: ANN401  # any JSON
    """The elements, in lists nested like the shape."""
    elements: list[Any]
    if tensor.datatype == "BYTES":
        elements = [_written(element) for element in split_strings(tensor.data)]
    else:
        elements = listed(name, tensor)
    for axis in range(len(tensor.shape) - 1, 0, -1):
        size = tensor.shape[axis]
        elements = [elements[at * size : (at + 1) * size] for at in range(prod(tensor.shape[:axis]))]
    return elements if tensor.shape else elements[0]


def _written(element: bytes) -> object:
    """An element of a BYTES tensor: a string, or base64 if it is not UTF-8."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {B64: b64encode(element).decode()}
