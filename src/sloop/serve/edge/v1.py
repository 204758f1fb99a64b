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

from sloop.serve.edge.inputs import (
    NO_CLASSES,
    AnswerForm,
    Buffer,
    InputValidator,
    ParsedRequest,
    decoded,
    flatten,
    listed,
    pack,
)
from sloop.serve.edge.refusal import Refusal, bad
from sloop.tensor import Port, Tensor, split_strings
from sloop.text import quoted

PREDICT_KEYS: Final = frozenset({"instances", "inputs", "signature_name"})
HELP: Final = 'send {"instances": […]}, a list of rows, or {"inputs": …}, whole tensors'
SIGNATURE_NAME: Final = "serving_default"
B64: Final = "b64"
LISTS_MAX: Final = 2**20
"""The most empty lists that stand for an output without elements: it has cost the model nothing, and the answer would
have no bound."""

_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
_ENCODER: Final = msgspec.json.Encoder()


def read(body: Buffer, validator: InputValidator) -> ParsedRequest:
    """Parse and validate a request body. Raises a 400 that names the field."""
    asked = decoded(body, _DECODER, HELP)
    field = _field_of(asked)
    columns = _by_row(asked[field], validator) if field == "instances" else _by_name(asked[field], field, validator)
    tensors = {name: _tensor(value, validator.ports[name], field, validator) for name, value in columns.items()}
    rows = len(asked[field]) if field == "instances" else None
    form = AnswerForm(validator.plain, NO_CLASSES, is_v1=True, rows=rows)
    return ParsedRequest(validator.complete(tensors, field), {}, form)


def _field_of(asked: Mapping[str, Any]) -> str:
    """Whether a request has `instances` or `inputs`."""
    for key in asked.keys() - PREDICT_KEYS:
        raise bad(quoted(key), "unknown", HELP)
    if asked.get("signature_name") not in (None, SIGNATURE_NAME):
        name = quoted(asked["signature_name"])
        raise bad("signature_name", f"unknown signature {name}", f"leave it out, or send {SIGNATURE_NAME!r}")
    given = [key for key in ("instances", "inputs") if asked.get(key) is not None]
    if len(given) != 1:
        raise bad("body", "it needs either `instances` or `inputs`", HELP)
    return given[0]


def _by_row(rows: object, validator: InputValidator) -> dict[str, Any]:
    """The values of each input, from rows."""
    _check_rows_exist(validator)
    if not isinstance(rows, list) or not rows:
        raise bad("instances", f"{quoted(rows)} is not a list of rows", "send one element for each row")
    if len(rows) > validator.signature.rows_max:  # before they are looked at
        raise validator.too_many(f"{len(rows)} rows exceed", "instances")
    if _is_value(rows[0], validator):
        return _by_name(rows, "instances", validator)
    named = [_by_name(row, f"instances[{index}]", validator) for index, row in enumerate(rows)]
    return {name: [row[name] for row in named] for name in validator.required}


def _by_name(given: Any, field: str, validator: InputValidator) -> dict[str, Any]:  # noqa: ANN401  # any JSON
    """The value of each input that is given; without names, of the only one. Those of rows have no optional ones."""
    names = list(validator.required)
    known = validator.ports if field == "inputs" else validator.required
    if _is_value(given, validator):
        if len(names) > 1:
            inputs = ", ".join(f'"{name}": …' for name in names)
            raise bad(field, f"values without names for {len(names)} inputs", f"send {{{inputs}}}")
        return {names[0]: given}
    for name in given.keys() - known.keys():
        if name in validator.ports:
            raise _of_the_whole([name])
        raise bad(field, f"unknown input {quoted(name)}", f"the inputs are {', '.join(map(repr, validator.ports))}")
    missing = [name for name in names if name not in given]
    if missing:
        raise bad(field, f"input {', '.join(map(repr, missing))} is missing", "send every input once")
    return {name: given[name] for name in known if name in given}


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


def _check_rows_exist(validator: InputValidator) -> None:
    """Raise a 400 for rows of a model of which only some inputs have rows. If none has, `instances` is the tensor."""
    without = [port.name for port in validator.signature.inputs if not port.has_rows]
    if without and validator.counting:
        raise _of_the_whole(without)


def _of_the_whole(names: list[str]) -> Refusal:
    what = f"input {', '.join(map(repr, names))} belongs to the request as a whole, and not to a row"
    return bad("instances", what, "send whole tensors as `inputs`")


# Answers


def write(rows: int | None, outputs: Mapping[str, Tensor]) -> bytes:
    """The response body: `predictions`, one for each row, or without rows `outputs`, whole tensors; of a single output
    its values alone. Raises a 500 if an output has another number of rows than the request."""
    values = {name: _nested(name, tensor) for name, tensor in outputs.items()}
    if rows is None:
        return _ENCODER.encode({"outputs": values if len(values) != 1 else next(iter(values.values()))})
    _check_rows(rows, outputs)
    if len(values) == 1:
        return _ENCODER.encode({"predictions": next(iter(values.values()))})
    predictions = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return _ENCODER.encode({"predictions": predictions})


def _check_rows(rows: int, outputs: Mapping[str, Tensor]) -> None:
    for name, tensor in outputs.items():
        if tensor.shape[:1] != (rows,):
            what = f"output {name!r} has the shape {list(tensor.shape)} for {rows} rows"
            raise Refusal(500, what, "ask for whole tensors: send `inputs` in place of `instances`")


def _nested(name: str, tensor: Tensor) -> Any:  # noqa: ANN401  # any JSON
    """The elements, in lists nested like the shape."""
    lists = empty_lists_in(tensor.shape)
    if lists > LISTS_MAX:
        what = f"output {name!r} has the shape {list(tensor.shape)}: no elements in {lists} lists"
        raise Refusal(500, what, "ask for it with V2, which answers with a flat list")
    elements: list[Any]
    if tensor.datatype == "BYTES":
        elements = [_written(element) for element in split_strings(tensor.data)]
    else:
        elements = listed(name, tensor)
    for axis in range(len(tensor.shape) - 1, 0, -1):
        size = tensor.shape[axis]
        elements = [elements[at * size : (at + 1) * size] for at in range(prod(tensor.shape[:axis]))]
    return elements if tensor.shape else elements[0]


def empty_lists_in(shape: tuple[int, ...]) -> int:
    """How many empty lists stand for a tensor without elements."""
    return prod(shape[: shape.index(0)]) if 0 in shape else 0


def _written(element: bytes) -> object:
    """An element of a BYTES tensor: a string, or base64 if it is not UTF-8."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {B64: b64encode(element).decode()}
