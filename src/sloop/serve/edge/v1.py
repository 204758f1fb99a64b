"""Requests and answers of KServe's V1 protocol, which is TensorFlow Serving's REST API, as tensors.

`instances` lists rows, `inputs` gives whole tensors. Either has the values themselves if the model has one input, and
objects `{input: value}` otherwise. A BYTES element is a string or `{"b64": …}`. Numbers that are not finite are written
as in V2. Source: KServe, "V1 protocol"; TensorFlow Serving, "RESTful API".
"""

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.serve.edge.inputs import (
    ElementReader,
    InputValidator,
    converted,
    decoded,
    flatten,
    listed,
    pack,
)
from sloop.serve.edge.lists import (
    LongList,
    Outline,
    Packed,
    Take,
    check_list,
    outline_of_rows,
    pack_list,
    write_list,
    write_string,
)
from sloop.serve.edge.refusal import Refusal, bad
from sloop.serve.edge.steps import Steps
from sloop.tensor import Port, Tensor, split_strings
from sloop.text import quoted

PREDICT_KEYS: Final = frozenset({"instances", "inputs", "signature_name"})
HELP: Final = 'send {"instances": […]}, a list of rows, or {"inputs": …}, whole tensors'
SIGNATURE_NAME: Final = "serving_default"
B64: Final = "b64"
ROWS_AT_ONCE: Final = 16
ELEMENTS_AT_ONCE: Final = 64
CODED_BYTES: Final = 24 * 1024
"""How much becomes base64 at a time, or comes from it; a multiple of 3 and 4."""

_DECODER: Final = msgspec.json.Decoder(dict[str, Any])
_ENCODER: Final = msgspec.json.Encoder()


Shape = tuple[int, ...]


class Prediction(Struct, gc=False):
    """A validated request."""

    tensors: Mapping[str, Tensor]
    rows: int | None
    """The number of `instances`; None for a request with `inputs`, whose answer has whole tensors too."""


def read(body: bytes | bytearray, validator: InputValidator) -> Prediction:
    """Parse and validate a request body. Raises a 400 that names the field."""
    asked = decoded(body, _DECODER, HELP)
    field = _field_of(asked)
    columns = _by_row(asked[field], validator) if field == "instances" else _by_name(asked[field], field, validator)
    tensors = {name: _tensor(value, validator.ports[name], field, validator) for name, value in columns.items()}
    return Prediction(validator.complete(tensors, field), len(asked[field]) if field == "instances" else None)


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
        raise _no_rows(rows)
    _check_count(len(rows), validator)
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


def _no_rows(given: object) -> Refusal:
    return bad("instances", f"{quoted(given)} is not a list of rows", "send one element for each row")


def _check_count(rows: int, validator: InputValidator, more: str = "") -> None:
    """Raise a 400 for too many rows before they are looked at."""
    if rows > validator.signature.rows_max:
        raise validator.too_many(f"{rows} rows{more} exceed", "instances")


# Large requests


def read_in_steps(body: bytes | bytearray, validator: InputValidator) -> Steps[Prediction]:
    """Parse and validate a large body. Raises a 400 that names the field, and a 413 if it has too much beside lists."""
    given = yield from outline_of_rows(body, len(body), b"instances")
    asked = decoded(given.rest, _DECODER, HELP, has_words=given.has_words)
    field = _field_of(asked)
    rows = given.list_at(asked[field])
    if field == "instances":
        _check_rows_exist(validator)
    if field == "inputs" or (rows is not None and not rows.has_objects):
        tensors = yield from _read_columns(_by_name(asked[field], field, validator), field, given, validator)
    else:
        tensors = yield from _read_rows(_rows_of(asked[field], rows, given), given, validator)
    for each in given.lists:  # of keys that occur twice
        yield from check_list(each, given)
    count = next(iter(tensors.values())).shape[0] if field == "instances" else None
    return Prediction(validator.complete(tensors, field), count)


def _rows_of(rows: object, found: LongList | None, given: Outline) -> Iterator[list[Any]]:
    """Some rows at a time."""
    if found is not None:
        while found.pieces:
            yield found.decode_next(given.has_words)[0]
    elif not isinstance(rows, list) or not rows:
        raise _no_rows(rows)
    else:
        for at in range(0, len(rows), ROWS_AT_ONCE):
            yield rows[at : at + ROWS_AT_ONCE]


def _read_columns(
    columns: Mapping[str, Any], field: str, given: Outline, validator: InputValidator
) -> Steps[dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for name, value in columns.items():
        port = validator.ports[name]
        try:
            packed = yield from _pack(value, port, given, max(1, len(port.shape)))
            tensors[name] = _whole(packed, port, validator)
        except Refusal as refusal:
            raise refusal.within(field) from None
    return tensors


def _read_rows(parts: Iterable[list[Any]], given: Outline, validator: InputValidator) -> Steps[dict[str, Tensor]]:
    """The inputs of rows, which come some at a time."""
    columns = {name: Packed(bytearray(), 0, []) for name in validator.required}
    count, have_names = 0, False
    for rows in parts:
        if count == 0 and rows:
            have_names = not _is_value(rows[0], validator)
        _check_count(count + len(rows), validator, " or more")
        if not have_names and any(not _is_value(row, validator) for row in rows):
            raise bad("instances", "some rows name the inputs, the first does not", "send all rows alike")
        named = [_by_name(row, f"instances[{count + index}]", validator) for index, row in enumerate(rows)]
        for name, column in columns.items():
            try:
                yield from _append(column, [row[name] for row in named], validator.ports[name], given)
            except Refusal as refusal:
                raise refusal.within("instances") from None
        count += len(rows)
        yield
    if not count:
        raise _no_rows([])
    return {name: _whole(column, validator.ports[name], validator) for name, column in columns.items()}


def _append(column: Packed, values: list[Any], port: Port, given: Outline) -> Steps[None]:
    """Add some rows to those of an input."""
    depth_max = max(1, len(port.shape))
    if any(given.list_at(value) is not None for value in values):
        parts = []
        for value in values:
            row = yield from _pack(value, port, given, max(1, depth_max - 1))
            parts.append(Packed(row.data, row.count, [1, *row.lengths]))
    else:
        parts = [(yield from _pack(values, port, given, depth_max))]
    for part in parts:
        rows, *lengths = column.lengths or (0, *part.lengths[1:])
        if part.lengths[1:] != lengths:
            raise bad("data", "the nested lists differ in length", "send rows of the same shape")
        column.lengths = [rows + part.lengths[0], *lengths]
        column.data += part.data
        column.count += part.count


def _whole(packed: Packed, port: Port, validator: InputValidator) -> Tensor:
    """One input, whose shape is that of the nested lists."""
    shape = tuple(packed.lengths)
    validator.count(port.name, port.datatype, shape)
    return Tensor(port.datatype, shape, packed.data)


def _pack(value: Any, port: Port, given: Outline, depth_max: int) -> Steps[Packed]:  # noqa: ANN401  # any JSON
    """The value of an input, or of one row of it."""
    convert = partial(converted, port.datatype, field="data")
    found = given.list_at(value)
    if found is not None and not found.has_objects:
        return (yield from pack_list(found, given, convert, depth_max=depth_max, count_max=None, field="data"))
    if found is not None:  # an input that is called `instances`
        value = []
        while found.pieces:
            value += found.decode_next(given.has_words)[0]
            yield
    lengths, inner = [], value
    while isinstance(inner, list):
        lengths.append(len(inner))
        inner = inner[0] if inner else None
    flat = flatten(value, "data", depth_max) if lengths else [value]
    if port.datatype == "BYTES":
        for place, each in enumerate(flat):
            flat[place] = yield from _text_in_steps(each, given)
            if not place % ELEMENTS_AT_ONCE:
                yield
    return Packed(bytearray(convert(flat)), len(flat), lengths)


def _text_in_steps(element: Any, given: Outline) -> Steps[Any]:  # noqa: ANN401  # any JSON
    """An element of a BYTES tensor, which may be long."""
    coded = given.string_at(element[B64]) if isinstance(element, dict) and element.keys() == {B64} else None
    if coded is None:
        text = given.string_at(element)
        return _text(element) if text is None else text
    parts = []
    for at in range(0, len(coded), CODED_BYTES):
        part = coded[at : at + CODED_BYTES]
        if b"=" in part and at + CODED_BYTES < len(coded):
            part = b"="  # which ends it too early
        parts.append(_text({B64: part}))
        yield
    return b"".join(parts)


# Answers


def write(wanted: Prediction, outputs: Mapping[str, Tensor]) -> bytes:
    """The response body: `predictions`, one for each row, or `outputs`, whole tensors; of a single output its values
    alone. Raises a 500 if an output has another number of rows than the request."""
    values = {name: _nested(name, tensor) for name, tensor in outputs.items()}
    if wanted.rows is None:
        return _ENCODER.encode({"outputs": values if len(values) != 1 else next(iter(values.values()))})
    _check_rows(wanted.rows, outputs)
    if len(values) == 1:
        return _ENCODER.encode({"predictions": next(iter(values.values()))})
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return _ENCODER.encode({"predictions": rows})


def write_in_steps(wanted: Prediction, outputs: Mapping[str, Tensor]) -> Steps[list[bytes]]:
    """The same for large outputs, in several parts."""
    if wanted.rows is not None:
        _check_rows(wanted.rows, outputs)
    found = [b'{"outputs":' if wanted.rows is None else b'{"predictions":']
    if len(outputs) == 1:
        ((name, tensor),) = outputs.items()
        found += yield from write_list(tensor.shape, _elements(name, tensor))
    elif wanted.rows is None:
        yield from _write_object(
            {name: (tensor.shape, _elements(name, tensor)) for name, tensor in outputs.items()}, found
        )
    else:
        rows = {name: (tensor.shape[1:], _elements(name, tensor)) for name, tensor in outputs.items()}
        found.append(b"[")
        for index in range(wanted.rows):
            if index:
                found.append(b",")
            yield from _write_object(rows, found)
        found.append(b"]")
    return [*found, b"}"]


def _write_object(values: Mapping[str, tuple[Shape, Take]], found: list[bytes]) -> Steps[None]:
    """Append an object with the next elements of these outputs, in lists of these shapes."""
    for place, (name, (shape, take)) in enumerate(values.items()):
        found.append(b"%b%b:" % (b"," if place else b"{", _ENCODER.encode(name)))
        found += yield from write_list(shape, take)
        yield
    found.append(b"}")


def _elements(name: str, tensor: Tensor) -> Take:
    return ElementReader(name, tensor, lambda data: _written(bytes(data)), _written_in_steps).take


def _check_rows(rows: int, outputs: Mapping[str, Tensor]) -> None:
    for name, tensor in outputs.items():
        if tensor.shape[:1] != (rows,):
            what = f"output {name!r} has the shape {list(tensor.shape)} for {rows} rows"
            raise Refusal(500, what, "ask for whole tensors: send `inputs` in place of `instances`")


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


def _written_in_steps(element: memoryview) -> Steps[object]:
    """The same for a long one."""
    try:
        return (yield from write_string(element))
    except UnicodeDecodeError:
        parts = [b'"']
        for at in range(0, len(element), CODED_BYTES):
            parts.append(b64encode(element[at : at + CODED_BYTES]))
            yield
        return {B64: msgspec.Raw(b"".join((*parts, b'"')))}
