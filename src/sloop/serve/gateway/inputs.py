"""Inference requests and responses of the REST protocol: JSON, optionally followed by binary tensors, to tensors and
back.

Everything is validated against the application's signature; an error names the path of the first wrong field. Source:
Open Inference Protocol v2, "Inference", and Triton's "binary tensor data extension" (`Inference-Header-Content-Length`,
`binary_data_size`, `binary_data`, `binary_data_output`).
"""

import math
from array import array
from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from sloop.serve.gateway.refusal import Refusal, bad
from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Signature, Tensor
from sloop.text import quoted
from sloop.units import NS_PER_MS

SLO: Final = "x-slo-ms"
ELAPSED: Final = "x-elapsed-ms"
MS_MAX: Final = 3_600_000
"""One hour. A longer deadline for one inference is almost certainly a mistake of units."""


def budget_ns(slo: object, elapsed: object) -> tuple[int | None, int]:
    """(slo_ns, elapsed_ns) of a request from the raw values, which are None if they were not sent.

    `slo_ns` is None if the application's own deadline holds. Raises a 400 that names the field.
    """
    return (
        None if slo is None else duration_ns(SLO, slo, least_ms=0.001),
        0 if elapsed is None else duration_ns(ELAPSED, elapsed, least_ms=0),
    )


def duration_ns(field: str, value: object, *, least_ms: float) -> int:
    """Convert milliseconds, a number or text, to nanoseconds."""
    fix = f"send milliseconds from {least_ms:g} to {MS_MAX}, such as {field}: 200"
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    try:
        if isinstance(text, bool) or not isinstance(text, str | int | float) or "_" in str(text):
            raise ValueError
        millis = float(text)
    except (ValueError, OverflowError):
        raise bad(field, f"{quoted(text)} is not a number", fix) from None
    if not (math.isfinite(millis) and least_ms <= millis <= MS_MAX):
        raise bad(field, f"{quoted(text)} is out of range", fix)
    return round(millis * NS_PER_MS)


ARRAY_CODES: Final = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
"""`array` converts small lists three times as fast as NumPy and raises for values that do not fit."""
LENGTH_BYTES: Final = 4
SHAPES_MAX: Final = 1024
"""How many valid input shapes are cached."""


class InputValidator:
    """Validates the tensors of requests against one application's signature.

    Errors about one input name the field within that input: `shape`, where the request has `inputs[0].shape`.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.ports = {port.name: port for port in signature.inputs}
        self.outputs = frozenset(port.name for port in signature.outputs)
        self.plain = {port.name: False for port in signature.outputs}
        """The outputs of a request that does not select any: all outputs, none of them binary."""
        self._counting = [port.name for port in signature.inputs if port.shape[:1] == (-1,)]
        self._found_right: dict[tuple[str, str, tuple[int, ...]], int] = {}

    def count(self, name: str, datatype: str, shape: tuple[int, ...]) -> int:
        """Validate an input's type and shape and return its number of elements. Valid shapes are cached."""
        count = self._found_right.get((name, datatype, shape))
        if count is None:
            self._check(name, datatype, shape)
            count = prod(shape)
            if len(self._found_right) < SHAPES_MAX:
                self._found_right[name, datatype, shape] = count
        return count

    def _check(self, name: str, datatype: str, shape: tuple[int, ...]) -> None:
        port = self.ports.get(name)
        if port is None:
            raise bad("name", f"unknown input {quoted(name)}", f"the inputs are {', '.join(map(repr, self.ports))}")
        if datatype != port.datatype:
            raise bad("datatype", f"{quoted(datatype)} for input {name!r}", f"this input takes {port.datatype}")
        wanted = port.shape
        fits = len(shape) == len(wanted) and all(
            have >= 1 if want == -1 else have == want for have, want in zip(shape, wanted, strict=True)
        )
        if not fits:
            raise bad(
                "shape",
                f"{quoted(list(shape))} for input {name!r}",
                f"this input's shape is {list(wanted)}, where -1 means any number from 1 up",
            )

    def complete(self, tensors: Mapping[str, Tensor], field: str = "inputs") -> Mapping[str, Tensor]:
        """Return `tensors` if no input is missing and all have the same number of rows, at most `rows_max`."""
        if len(tensors) != len(self.ports):
            missing = [name for name in self.ports if name not in tensors]
            raise bad(field, f"input {', '.join(map(repr, missing))} is missing", "send every input once")
        count = 0
        for name in self._counting:
            rows = tensors[name].shape[0]
            if count and rows != count:
                both = sorted((rows, count))
                raise bad(
                    field, f"the inputs have {both} rows (first dimension)", "send the same number of rows in each"
                )
            count = rows
        if count > self.signature.rows_max:
            raise bad(
                field,
                f"{count} rows (first dimension) exceed the limit of {self.signature.rows_max} rows per request",
                "split them into several requests; sloop batches them together again",
            )
        return tensors

    def output(self, name: str, field: str) -> str:
        """Return `name` if it is an output."""
        if name not in self.outputs:
            known = ", ".join(repr(port.name) for port in self.signature.outputs)
            raise bad(field, f"unknown output {quoted(name)}", f"the outputs are {known}")
        return name


def check_raw(datatype: str, shape: tuple[int, ...], data: memoryview | bytes, field: str) -> None:
    """Check that raw bytes have the length that type and shape require."""
    count = prod(shape)
    if datatype == "BYTES":
        check_strings(memoryview(data), count, field)
    elif len(data) != count * ITEM_BYTES[datatype]:
        raise bad(
            field,
            f"{len(data)} bytes, but {datatype} {list(shape)} has {count * ITEM_BYTES[datatype]}",
            "send every element in row-major order, little-endian, without padding",
        )


def check_strings(data: memoryview, count: int, field: str) -> None:
    """Check that `data` holds `count` strings, each preceded by its length."""
    at, found = 0, 0
    while at + LENGTH_BYTES <= len(data) and found <= count:
        at += LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        found += 1
    if at != len(data) or found != count:
        raise bad(
            field,
            f"{len(data)} bytes are not {count} BYTES elements",
            "send each element as its length (4 bytes, little-endian) and its bytes",
        )


def pack(datatype: str, shape: tuple[int, ...], count: int, data: list[Any], field: str = "data") -> bytes:
    """Convert a JSON or protobuf list, flat or nested like `shape`, with `count` elements, to raw bytes."""
    if data and type(data[0]) is list:
        data = flatten(data, field)
    raw = pack_strings(data, field) if datatype == "BYTES" else pack_numbers(datatype, data, field)
    if len(data) != count:
        raise bad(
            field,
            f"{len(data)} elements, but shape {list(shape)} has {count}",
            "send every element once, in row-major order",
        )
    return raw


def flatten(data: list[Any], field: str) -> list[Any]:
    """Flatten nested lists; lists of the same level must have the same length."""
    while data and isinstance(data[0], list):
        if any(not isinstance(inner, list) or len(inner) != len(data[0]) for inner in data):
            raise bad(field, "the nested lists differ in length", "send a flat list, or lists nested like the shape")
        data = list(chain.from_iterable(data))
    return data


def pack_numbers(datatype: str, data: list[Any], field: str) -> bytes:
    """Convert a flat list to raw bytes of a fixed-size type."""
    code = ARRAY_CODES.get(datatype)
    try:
        if code is not None:
            return array(code, data).tobytes()
        if datatype == "BOOL":
            if any(type(element) is not bool for element in data):
                raise TypeError
            return bytes(data)
        if datatype == "FP16":
            with np.errstate(over="ignore"):  # values out of range become infinity, as for FP32
                return np.array(array("d", data)).astype("<f2").tobytes()
    except TypeError:
        fix = "send a flat list, or lists nested like the shape"
        raise bad(field, f"not every element is a {datatype} value", fix) from None
    except OverflowError as error:
        raise bad(field, f"an element is out of {datatype}'s range ({error})", "send values in its range") from None
    raise bad(field, f"{datatype} cannot be written as a list", "send it as a binary tensor")


def pack_strings(data: list[Any], field: str) -> bytes:
    """Convert strings and byte strings to raw bytes, each preceded by its length."""
    parts: list[bytes] = []
    for element in data:
        if not isinstance(element, str | bytes):
            raise bad(field, f"{quoted(element)} is not a string", "BYTES elements are strings")
        raw = element.encode() if isinstance(element, str) else element
        parts += (len(raw).to_bytes(LENGTH_BYTES, "little"), raw)
    return b"".join(parts)


def unpack(tensor: Tensor) -> list[Any]:
    """Convert a tensor to a flat list for JSON. Raises `UnicodeDecodeError` if a string is not UTF-8."""
    code = ARRAY_CODES.get(tensor.datatype)
    if code is not None:
        return list(memoryview(tensor.data).cast("B").cast(code))  # type: ignore[call-overload]  # a valid format code
    if tensor.datatype == "BYTES":
        strings, data, at = [], memoryview(tensor.data), 0
        while at < len(data):
            end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "little")
            strings.append(str(data[at + LENGTH_BYTES : end], "utf-8"))
            at = end
        return strings
    if tensor.datatype == "BF16":  # the upper half of a float32
        halves = np.frombuffer(tensor.data, np.dtype("<u2")).astype(np.uint32) << np.uint32(16)
        return halves.view(np.float32).tolist()  # type: ignore[no-any-return]  # a list, as it has one dimension
    return np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype]).tolist()  # type: ignore[no-any-return]  # likewise


Parameters = dict[str, Any]
HEADER_LENGTH: Final = "inference-header-content-length"


class InputObject(Struct, gc=False):
    """`$request_input`."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: list[Any] | None = None
    parameters: Parameters | None = None


class OutputObject(Struct, gc=False):
    """`$request_output`."""

    name: str
    parameters: Parameters | None = None


class InferObject(Struct, gc=False):
    """`$inference_request`. Null means absent: some clients send null for every optional field."""

    inputs: list[InputObject]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[OutputObject] | None = None


class ResponseOutput(Struct, omit_defaults=True, gc=False):
    """`$response_output`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET


class ResponseObject(Struct, gc=False):
    """`$inference_response`."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str | UnsetType = UNSET


class ParsedRequest(Struct, gc=False):
    """A validated inference request, and the form of its response."""

    tensors: Mapping[str, Tensor]
    id: str | UnsetType
    parameters: Parameters
    outputs: Mapping[str, bool]
    """The outputs to return, in order, and whether each is sent as binary."""


_DECODER: Final = msgspec.json.Decoder(InferObject)
_ENCODER: Final = msgspec.json.Encoder()


def read(body: bytes, header_length: str | None, validator: InputValidator) -> ParsedRequest:
    """Parse and validate a request body. Raises a 400 that names the field."""
    json, tail = (body, None) if header_length is None else split(body, header_length)
    try:
        asked = _DECODER.decode(json)
    except msgspec.ValidationError as error:
        raise bad("body", str(error), "see POST …/infer in /openapi.json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = "send one JSON object; before binary tensors, its length in Inference-Header-Content-Length"
        raise bad("body", f"malformed JSON ({error})", fix) from None
    except RecursionError:
        raise bad("body", "JSON nested too deeply", "send flat lists of elements") from None
    parameters = asked.parameters or {}
    return ParsedRequest(
        validator.complete(read_inputs(asked.inputs, tail, validator)),
        UNSET if asked.id is None else asked.id,
        parameters,
        read_outputs(asked.outputs, parameters, validator),
    )


def split(body: bytes, header_length: str) -> tuple[memoryview, memoryview]:
    """Split a body into its JSON and the binary tensors after it."""
    field = "Inference-Header-Content-Length"
    if not (header_length.isascii() and header_length.isdigit()):
        raise bad(field, f"{quoted(header_length)} is not a length", "send the length of the JSON in bytes")
    length = int(header_length)
    if length > len(body):
        raise bad(field, f"{length} exceeds the body's {len(body)} bytes", "send the complete body")
    view = memoryview(body)
    return view[:length], view[length:]


def read_inputs(inputs: list[InputObject], tail: memoryview | None, validator: InputValidator) -> dict[str, Tensor]:
    """The input tensors by name; binary ones are slices of `tail`, in order."""
    tensors: dict[str, Tensor] = {}
    at = 0
    for index, given in enumerate(inputs):
        try:
            count = validator.count(given.name, given.datatype, given.shape)
            if given.name in tensors:
                raise bad("name", f"input {given.name!r} occurs twice", "send every input once")
            data: bytes | memoryview
            if given.parameters and given.parameters.get("binary_data_size") is not None:
                data = binary(given, tail, at)
                at += len(data)
            elif given.data is None:
                raise bad("data", "missing", "send data, or parameters.binary_data_size and the bytes")
            else:
                data = pack(given.datatype, given.shape, count, given.data)
        except Refusal as refusal:
            raise refusal.within(f"inputs[{index}]") from None
        tensors[given.name] = Tensor(given.datatype, given.shape, data)
    if tail is not None and at != len(tail):
        raise bad("body", f"{len(tail) - at} bytes follow the last tensor", "correct binary_data_size of the inputs")
    return tensors


def binary(given: InputObject, tail: memoryview | None, at: int) -> memoryview:
    """The next `parameters.binary_data_size` bytes after the JSON."""
    field = "parameters.binary_data_size"
    size = given.parameters and given.parameters["binary_data_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise bad(field, f"{quoted(size)} is not a length in bytes")
    if given.data is not None:
        raise bad(field, "the input has `data` as well", "send one of the two")
    if tail is None:
        raise bad(field, "the header Inference-Header-Content-Length is missing", "send it with the JSON's length")
    if at + size > len(tail):
        raise bad(field, f"{size} bytes announced, but {len(tail) - at} follow", "send the complete tensor")
    data = tail[at : at + size]
    check_raw(given.datatype, given.shape, data, field)
    return data


def read_outputs(
    outputs: list[OutputObject] | None, parameters: Parameters, validator: InputValidator
) -> Mapping[str, bool]:
    """The outputs to return, and whether each is sent as binary."""
    if not outputs and not parameters:
        return validator.plain
    default = flag(parameters, "binary_data_output", "parameters")
    if not outputs:
        return dict.fromkeys(validator.plain, default)
    wanted: dict[str, bool] = {}
    for index, output in enumerate(outputs):
        field = f"outputs[{index}]"
        chosen = output.parameters or {}
        if "classification" in chosen:
            raise bad(f"{field}.parameters.classification", "not supported", "sort the output in the client")
        name = validator.output(output.name, f"{field}.name")
        wanted[name] = flag(chosen, "binary_data", f"{field}.parameters") if "binary_data" in chosen else default
    return wanted


def flag(parameters: Parameters, key: str, field: str) -> bool:
    """A boolean parameter; false if it is absent."""
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise bad(f"{field}.{key}", f"{quoted(value)} is neither true nor false")
    return value


def write(model: str, version: str, wanted: ParsedRequest, outputs: Mapping[str, Tensor]) -> tuple[bytes, int | None]:
    """The response body, and the length of its JSON if binary tensors follow."""
    written: list[ResponseOutput] = []
    tail: list[bytes | bytearray | memoryview] = []
    for name, is_binary in wanted.outputs.items():
        tensor = outputs.get(name)
        if tensor is None:
            continue  # an output of a branch that this request did not take
        if is_binary:
            size = {"binary_data_size": len(tensor.data)}
            written.append(ResponseOutput(name, tensor.datatype, tensor.shape, UNSET, size))
            tail.append(tensor.data)
        else:
            written.append(ResponseOutput(name, tensor.datatype, tensor.shape, listed(name, tensor)))
    json = _ENCODER.encode(ResponseObject(model, version, written, wanted.id))
    return (b"".join((json, *tail)), len(json)) if tail else (json, None)


def listed(name: str, tensor: Tensor) -> list[object]:
    """A tensor's elements for JSON. Raises a 500 if a string is not UTF-8."""
    try:
        return unpack(tensor)
    except UnicodeDecodeError as error:
        fix = "ask for it as binary: outputs[].parameters.binary_data = true"
        raise Refusal(500, f"output {name!r} is not text ({error.reason})", fix) from None
