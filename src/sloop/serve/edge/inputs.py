"""Inference requests and responses of the REST protocol: JSON, optionally followed by binary tensors, to tensors and
back.

Everything is validated against the application's signature; an error names the path of the first wrong field.

JSON has no numbers that are not finite (RFC 8259). An answer has them as the strings "NaN", "Infinity" and "-Infinity",
as Protocol Buffers write them in JSON: every JSON parser reads that, and NumPy, and with it the clients of Triton and
KServe, turn the strings into numbers again. A request may have these strings, or the same words without quotation marks
as Python's `json` and Triton write them.

Source: Open Inference Protocol v2, "Inference", and Triton's "binary tensor data extension"
(`Inference-Header-Content-Length`, `binary_data_size`, `binary_data`, `binary_data_output`).
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf, isfinite, isnan, nan, prod
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from sloop.serve.edge.decimals import FEW_BYTES, KINDS, shortest
from sloop.serve.edge.parameters import (
    BINARY,
    BINARY_OUTPUT,
    BINARY_SIZE,
    OF_INPUT,
    OF_OUTPUT,
    OF_REQUEST,
    Parameters,
    check,
    classes,
    flag,
)
from sloop.serve.edge.refusal import Refusal, bad
from sloop.tensor import (
    ITEM_BYTES,
    LENGTH,
    LENGTH_BYTES,
    MISSING,
    NUMPY_TYPES,
    Signature,
    Tensor,
    bfloats_of,
    join_strings,
    split_strings,
)
from sloop.text import quoted

Buffer = bytes | bytearray | memoryview
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
FLOATS: Final = frozenset({"FP16", "FP32", "FP64", "BF16"})
NAMED_FLOATS: Final = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
"""How numbers that are not finite are written in JSON."""
JOINED_BYTES_MAX: Final = 64 * 1024
"""Larger binary outputs are sent from where they are; smaller ones are copied, so that they leave with the head."""
COPIED_BYTES_MAX: Final = 4 * 1024
"""Parts of bodies up to this size are copied, which takes less time than to make views of them."""
WORDS_BYTES_MAX: Final = 2**20
"""The largest JSON in which NaN and Infinity may be words without quotation marks: Python's parser, which takes them,
needs ten times as long as msgspec."""
SHAPES_MAX: Final = 1024
"""How many valid input shapes are cached."""
ELEMENTS_MAX: Final = 2**31 - 1
"""The most elements of an input, if its empty dimensions are left out: an empty tensor costs its sender nothing, and
NumPy refuses one of astronomic size."""
SHOWN_INPUTS_MAX: Final = 4
"""Inputs that an error shows."""


NOT_ROWS: Final = "if the first dimension does not count rows, write `batch: false` at its stage"
SIZE_FIX: Final = "send smaller ones, or let `sloop profile MODEL --sizes` measure larger ones"
ROWS_FIX: Final = f"send fewer at a time, or raise `limits: {{rows: N}}` of the application; {NOT_ROWS}"
ONE_ROW_FIX: Final = "send one request for each row: a graph with branches decides about each request as a whole"


class InputValidator:
    """Validates the tensors of requests against one application's signature.

    Errors about one input name the field within that input: `shape`, where the request has `inputs[0].shape`.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.required = {port.name: port for port in signature.inputs}
        self.ports = self.required | {port.name: port for port in signature.optional}
        self.datatypes = {port.name: port.datatype for port in signature.outputs}
        """Of the outputs."""
        self.plain = {port.name: False for port in signature.outputs}
        self.binary = dict.fromkeys(self.plain, True)
        """The outputs of a request that does not select any: all outputs, none or all of them binary."""
        self.counting = [port.name for port in signature.inputs if port.counts_rows]
        """The inputs whose first dimension is the number of rows."""
        self.has_text = any(port.datatype == "BYTES" for port in self.ports.values())
        """Whether it takes text, of which each element has to be looked at."""
        self.help = f"send {_body_of(signature)}; /openapi.json describes every request"
        """The correction for a body that is no request."""
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
            known = ", ".join(f"{each.name!r} ({each.kind})" for each in self.ports.values())
            raise bad("name", f"unknown input {quoted(name)}", f"the inputs are {known}")
        if datatype != port.datatype:
            raise bad("datatype", f"{quoted(datatype)} for input {name!r}", f"this input takes {port.kind}")
        wanted = port.shape
        # A request without rows has nothing to compute; any other open dimension may be empty, as a text's tokens may.
        rows_at = 0 if port.has_rows else None
        fits = len(shape) == len(wanted) and all(
            have >= (place == rows_at) if want == -1 else have == want
            for place, (have, want) in enumerate(zip(shape, wanted, strict=True))
        )
        if not fits:
            least = ", where -1 means any number from 1 up" if -1 in wanted else ""
            if -1 in wanted[port.has_rows :]:
                least = ", where -1 means any number from 0 up"
                least += ", from 1 up if it is the first" if port.has_rows else ""
            what = f"{quoted(list(shape))} for input {name!r}"
            raise bad("shape", what, f"this input's shape is {list(wanted)}{least}")
        size, most = prod([shape[place] for place in port.open_places]), self.signature.size_max
        if most and size > most:
            what = f"rows of {size:,} elements for input {name!r}, where the profile says something of up to {most:,}"
            raise bad("shape", what, SIZE_FIX)
        if prod(size or 1 for size in shape) > ELEMENTS_MAX:
            raise bad("shape", f"{quoted(list(shape))} for input {name!r}", f"send at most {ELEMENTS_MAX} elements")

    def complete(self, tensors: Mapping[str, Tensor], field: str = "inputs") -> Mapping[str, Tensor]:
        """Return `tensors`, with `MISSING` for optional inputs that are not given. Raise a 400 if another input is
        missing, or if inputs differ in their number of rows or in lengths that must be equal, or have more rows than
        `rows_max`."""
        if len(tensors) != len(self.ports):
            missing = [name for name in self.ports if name not in tensors]
            needed = [name for name in missing if name in self.required]
            if needed:
                kinds = ", ".join(f"{name!r} is {self.ports[name].kind}" for name in needed)
                raise bad(field, f"input {', '.join(map(repr, needed))} is missing", f"send every input once; {kinds}")
            tensors = {**tensors, **dict.fromkeys(missing, MISSING)}
        count = 0
        for name in self.counting:
            rows = tensors[name].shape[0]
            if count and rows != count:
                both = sorted((rows, count))
                raise bad(field, f"the inputs have {both} rows (first dimension)", f"send as many in each; {NOT_ROWS}")
            count = rows
        for equal in self.signature.equal:
            lengths = {f"{name}.shape[{place}]": tensors[name].shape[place] for name, place in equal}
            if len(set(lengths.values())) > 1:
                given = " and ".join(f"{place} is {length}" for place, length in lengths.items())
                raise bad(field, f"{given}, and the model takes only equal ones", "send one length in all of these")
        if count > self.signature.rows_max:
            raise self.too_many(f"{count} rows (first dimension) exceed", field)
        return tensors

    def too_many(self, rows: str, field: str) -> Refusal:
        """The 400 for a request with more rows than one may have."""
        what = f"{rows} the limit of {self.signature.rows_max} rows per request"
        return bad(field, what, ROWS_FIX if self.signature.rows_max > 1 else ONE_ROW_FIX)

    def output(self, name: str, field: str) -> str:
        """Return `name` if it is an output."""
        if name not in self.datatypes:
            known = ", ".join(repr(port.name) for port in self.signature.outputs)
            raise bad(field, f"unknown output {quoted(name)}", f"the outputs are {known}")
        return name

    def classes(self, name: str, chosen: Parameters, field: str) -> int:
        """How many classes of an output its parameters ask for; 0 for the output itself."""
        count = classes(chosen, field)
        if count and self.datatypes[name] in ("BOOL", "BYTES"):
            what = f"output {name!r} is {self.datatypes[name]}"
            raise bad(f"{field}.classification", what, "classes are the indices of the largest numbers of an output")
        return count


def _body_of(signature: Signature) -> str:
    """A request to the model, without its numbers, for error messages."""
    inputs = [
        f'{{"name": {json.dumps(port.name)}, "shape": {list(port.shape)}, "datatype": "{port.datatype}", "data": […]}}'
        for port in signature.inputs[:SHOWN_INPUTS_MAX]
    ]
    inputs += ["…"] if len(signature.inputs) > SHOWN_INPUTS_MAX else []
    is_open = any(-1 in port.shape for port in signature.inputs)
    return f'{{"inputs": [{", ".join(inputs)}]}}' + (" with sizes in place of -1" if is_open else "")


def check_raw(datatype: str, shape: tuple[int, ...], data: Buffer, field: str) -> None:
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
    at, found, last = 0, 0, len(data) - LENGTH_BYTES
    while at <= last and found <= count:
        at += LENGTH_BYTES + LENGTH.unpack_from(data, at)[0]
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
        data = flatten(data, field, len(shape))
    raw = pack_strings(data, field) if datatype == "BYTES" else pack_numbers(datatype, data, field)
    if len(data) != count:
        what = f"{len(data)} elements, but shape {list(shape)} has {count}"
        raise bad(field, what, "send every element once, in row-major order")
    return raw


def flatten(data: list[Any], field: str, depth_max: int) -> list[Any]:
    """Flatten lists that are nested at most `depth_max` deep; lists of the same level must have the same length."""
    depth = 1
    while data and isinstance(data[0], list):
        depth += 1
        if depth > depth_max:
            fix = "send a flat list, or lists nested like the shape"
            raise bad(field, f"lists nested more than {depth_max} deep, the number of dimensions", fix)
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
        with np.errstate(over="ignore"):  # values out of range become infinite, as for FP32
            if datatype == "BF16":
                return bfloats_of(np.array(array("d", data)).astype("<f4")).tobytes()
            return np.array(array("d", data)).astype(NUMPY_TYPES[datatype]).tobytes()
    except TypeError:
        numbers = [NAMED_FLOATS.get(each, each) if isinstance(each, str) else each for each in data]
        if datatype in FLOATS and numbers != data:
            return pack_numbers(datatype, numbers, field)
        fix = "send a flat list, or lists nested like the shape"
        if datatype in FLOATS and None in data:
            fix = 'write a number that is not finite as "NaN", "Infinity" or "-Infinity"'
        raise bad(field, f"not every element is a {datatype} value", fix) from None
    except OverflowError as error:
        raise bad(field, f"an element is out of {datatype}'s range ({error})", "send values in its range") from None


def pack_strings(data: list[Any], field: str) -> bytes:
    """Convert strings and byte strings to raw bytes, each preceded by its length."""
    try:
        return join_strings(data)
    except UnicodeEncodeError as error:
        raise bad(field, f"half a surrogate pair in a string ({error.reason})", "send valid Unicode") from None
    except TypeError:
        wrong = next(element for element in data if not isinstance(element, str | bytes))
        raise bad(field, f"{quoted(wrong)} is not a string", "BYTES elements are strings") from None


def unpack(tensor: Tensor) -> list[Any]:
    """Convert a tensor to a flat list for JSON. Raises `UnicodeDecodeError` if a string is not UTF-8."""
    if tensor.datatype in KINDS:
        if len(tensor.data) > FEW_BYTES or not KINDS[tensor.datatype].is_numpy:
            return shortest(tensor.datatype, tensor.data)
        return list(map(float, map(str, np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype]))))
    code = ARRAY_CODES.get(tensor.datatype)
    if code is not None:
        return memoryview(tensor.data).cast("B").cast(code).tolist()  # type: ignore[call-overload, no-any-return]  # a valid format code
    if tensor.datatype == "BYTES":
        return [str(element, "utf-8") for element in split_strings(tensor.data)]
    return np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype]).tolist()  # type: ignore[no-any-return]  # it has one dimension


HEADER_LENGTH: Final = "inference-header-content-length"
HELP: Final = "send one JSON object; /openapi.json describes every request"


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


class AnswerForm(Struct, frozen=True, gc=False):
    """What a request says of its answer."""

    outputs: Mapping[str, bool]
    """The outputs to return, in order, and whether each is sent as binary."""
    classes: Mapping[str, int]
    """For outputs that are returned as classes, the largest first: how many (`sloop.serve.edge.triton`)."""
    id: str | UnsetType = UNSET
    is_v1: bool = False
    """Whether it is an answer of KServe's V1 protocol (`sloop.serve.edge.v1`), which has all outputs."""
    rows: int | None = None
    """Of a V1 request, the number of `instances`, each of which gets a prediction; None if it has `inputs`, which get
    whole tensors."""


class ParsedRequest(Struct, gc=False):
    """A validated inference request."""

    tensors: Mapping[str, Tensor]
    parameters: Parameters
    form: AnswerForm


NO_CLASSES: Final[Mapping[str, int]] = {}
_DECODER: Final = msgspec.json.Decoder(InferObject)
_ENCODER: Final = msgspec.json.Encoder()
T = TypeVar("T")


def decoded(content: Buffer, decoder: "msgspec.json.Decoder[T]", fix: str = HELP) -> T:
    """A JSON body as the decoder's type. Raises a 400 that names the field, with `fix`. NaN and Infinity may be words
    without quotation marks."""
    try:
        str(content, "utf-8")  # the decoder does not look into strings of fields that nobody needs
        try:
            return decoder.decode(content)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            raw = bytes(content)
            if len(raw) > WORDS_BYTES_MAX or not (b"NaN" in raw or b"Infinity" in raw):
                raise
            converted: T = msgspec.convert(with_words(raw), decoder.type)
            return converted
    except msgspec.ValidationError as error:
        raise bad("body", str(error), fix) from None
    except (msgspec.DecodeError, ValueError) as error:
        what = bad("body", f"malformed JSON ({error})", fix)
        raise (what if content else Refusal(400, "the body is empty", fix)) from None
    except RecursionError:
        raise bad("body", "JSON nested too deeply", "send flat lists of elements") from None


def with_words(text: bytes) -> Any:  # noqa: ANN401  # any JSON
    """The value of JSON in which NaN and Infinity may be words. Raises `ValueError` and `RecursionError`."""
    found = json.loads(text)
    # Half a character, such as \ud800, passes Python's parser, but cannot be written.
    json.dumps(found, ensure_ascii=False).encode()
    return found


def read(body: Buffer, header_length: str | None, validator: InputValidator) -> ParsedRequest:
    """Parse and validate a request body. Raises a 400 that names the field."""
    head, tail = (body, None) if header_length is None else split(body, header_length)
    asked = decoded(head, _DECODER, validator.help)
    parameters = asked.parameters or {}
    if parameters:
        check(parameters, OF_REQUEST, "parameters")
    tensors = validator.complete(read_inputs(asked.inputs, tail, validator))
    outputs = read_outputs(asked.outputs, parameters, validator)
    return ParsedRequest(tensors, parameters, AnswerForm(*outputs, UNSET if asked.id is None else asked.id))


def split(body: Buffer, header_length: str) -> tuple[Buffer, Buffer]:
    """Split a body into its JSON and the binary tensors after it."""
    field = "Inference-Header-Content-Length"
    if not (header_length.isascii() and header_length.lstrip("0").isdigit()):  # 0 would leave no JSON
        raise bad(field, f"{quoted(header_length)} is not a length", "send the length of the JSON in bytes")
    length = int(header_length)
    if length > len(body):
        raise bad(field, f"{length} exceeds the body's {len(body)} bytes", "send the complete body")
    view = body if len(body) <= COPIED_BYTES_MAX else memoryview(body)
    return view[:length], view[length:]


def read_inputs(inputs: list[InputObject], tail: Buffer | None, validator: InputValidator) -> dict[str, Tensor]:
    """The input tensors by name; binary ones are slices of `tail`, in order."""
    tensors: dict[str, Tensor] = {}
    at = 0
    for index, given in enumerate(inputs):
        try:
            count = validator.count(given.name, given.datatype, given.shape)
            if given.name in tensors:
                raise bad("name", f"input {given.name!r} occurs twice", "send every input once")
            data: bytes | bytearray | memoryview
            if given.parameters:
                check(given.parameters, OF_INPUT, "parameters")
            if given.parameters and given.parameters.get(BINARY_SIZE) is not None:
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


def binary(given: InputObject, tail: Buffer | None, at: int) -> Buffer:
    """The next `parameters.binary_data_size` bytes after the JSON."""
    field = f"parameters.{BINARY_SIZE}"
    size = given.parameters and given.parameters[BINARY_SIZE]
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
) -> tuple[Mapping[str, bool], Mapping[str, int]]:
    """The outputs to return with whether each is sent as binary, and those to return as classes with how many."""
    if not outputs and not parameters:
        return validator.plain, NO_CLASSES
    default = flag(parameters, BINARY_OUTPUT, "parameters")
    if not outputs:
        return validator.binary if default else validator.plain, NO_CLASSES
    wanted: dict[str, bool] = {}
    counts: dict[str, int] = {}
    for index, output in enumerate(outputs):
        field = f"outputs[{index}]"
        chosen = output.parameters or {}
        name = validator.output(output.name, f"{field}.name")
        if name in wanted:
            raise bad(f"{field}.name", f"output {name!r} occurs twice", "ask for every output once")
        check(chosen, OF_OUTPUT, f"{field}.parameters")
        wanted[name] = flag(chosen, BINARY, f"{field}.parameters") if BINARY in chosen else default
        if count := validator.classes(name, chosen, f"{field}.parameters"):
            counts[name] = count
    return wanted, counts or NO_CLASSES


def write(
    model: str, version: str, form: AnswerForm, outputs: Mapping[str, Tensor]
) -> tuple[bytes | Sequence[Buffer], int | None]:
    """The response body, large ones in several parts, and the length of its JSON if binary tensors follow."""
    written: list[ResponseOutput] = []
    tail: list[Buffer] = []
    for name, is_binary in form.outputs.items():
        tensor = outputs.get(name)
        if tensor is None:
            continue  # an output of a branch that this request did not take
        if is_binary:
            size = {"binary_data_size": len(tensor.data)}
            written.append(ResponseOutput(name, tensor.datatype, tensor.shape, UNSET, size))
            tail.append(tensor.data)
        else:
            written.append(ResponseOutput(name, tensor.datatype, tensor.shape, listed(name, tensor)))
    head = _ENCODER.encode(ResponseObject(model, version, written, form.id))
    if not tail:
        return head, None
    is_large = sum(map(len, tail)) > JOINED_BYTES_MAX
    return (head, *tail) if is_large else b"".join((head, *tail)), len(head)


def listed(name: str, tensor: Tensor) -> list[Any]:
    """A tensor's elements for JSON. Raises a 500 if a string is not UTF-8."""
    try:
        elements = unpack(tensor)
    except UnicodeDecodeError as error:
        fix = "ask for it as binary: outputs[].parameters.binary_data = true"
        raise Refusal(500, f"output {name!r} is not text ({error.reason})", fix) from None
    # The sum of finite numbers may be infinite; then the elements are looked at for nothing.
    if tensor.datatype in FLOATS and not isfinite(sum(elements)):
        return [element if isfinite(element) else _named(element) for element in elements]
    return elements


def _named(element: float) -> str:
    """A number that is not finite, as JSON has it."""
    return "NaN" if isnan(element) else "Infinity" if element > 0 else "-Infinity"
