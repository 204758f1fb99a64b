"""The body of an inference over REST: JSON, or JSON with binary tensors behind it, to tensors and back.

Knows the protocol's objects, not HTTP's verbs. Decoding is typed: what JSON of the wrong shape is refused with is the
path of the first wrong field. Source: Open Inference Protocol v2, "Inference"; Triton's "binary tensor data
extension" (`Inference-Header-Content-Length`, `binary_data_size`, `binary_data`, `binary_data_output`).
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from sloop.serve.gateway.intake import Intake, check_raw, pack, unpack
from sloop.serve.gateway.refusal import Refusal, bad, shown
from sloop.tensor import Tensor

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
    """`$inference_request`. A null stands for what is left out: some clients send one for every optional field."""

    inputs: list[InputObject]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[OutputObject] | None = None


class AnswerOutput(Struct, omit_defaults=True, gc=False):
    """`$response_output`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | UnsetType = UNSET
    parameters: Parameters | UnsetType = UNSET


class AnswerObject(Struct, gc=False):
    """`$inference_response`."""

    model_name: str
    model_version: str
    outputs: list[AnswerOutput]
    id: str | UnsetType = UNSET


class Wanted(Struct, gc=False):
    """One inference as asked: its inputs, and how its answer is to look."""

    tensors: Mapping[str, Tensor]
    id: str | UnsetType
    parameters: Parameters
    outputs: Mapping[str, bool]
    """Outputs to return, in order, and whether each goes as binary."""


_DECODER: Final = msgspec.json.Decoder(InferObject)
_ENCODER: Final = msgspec.json.Encoder()


def read(body: bytes, header_length: str | None, intake: Intake) -> Wanted:
    """Take a request's body apart and check it. Raises a 400 that names the field."""
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
    return Wanted(
        intake.whole(read_inputs(asked.inputs, tail, intake)),
        UNSET if asked.id is None else asked.id,
        parameters,
        read_outputs(asked.outputs, parameters, intake),
    )


def split(body: bytes, header_length: str) -> tuple[memoryview, memoryview]:
    """The JSON and the binary tensors behind it."""
    field = "Inference-Header-Content-Length"
    if not (header_length.isascii() and header_length.isdigit()):
        raise bad(field, f"{shown(header_length)} is not a length", "send the JSON's bytes")
    length = int(header_length)
    if length > len(body):
        raise bad(field, f"{length} is more than the body's {len(body)} bytes", "send the whole body")
    view = memoryview(body)
    return view[:length], view[length:]


def read_inputs(inputs: list[InputObject], tail: memoryview | None, intake: Intake) -> dict[str, Tensor]:
    """The input tensors by name; binary ones are slices of `tail`, in order."""
    tensors: dict[str, Tensor] = {}
    at = 0
    for index, given in enumerate(inputs):
        try:
            count = intake.count(given.name, given.datatype, given.shape)
            if given.name in tensors:
                raise bad("name", f"input {given.name!r} is there twice", "send every input once")
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
        raise bad("body", f"{len(tail) - at} bytes follow the last tensor", "make the binary_data_size add up")
    return tensors


def binary(given: InputObject, tail: memoryview | None, at: int) -> memoryview:
    """The next `parameters.binary_data_size` bytes behind the JSON."""
    field = "parameters.binary_data_size"
    size = given.parameters and given.parameters["binary_data_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise bad(field, f"{shown(size)} is not a length in bytes")
    if given.data is not None:
        raise bad(field, "there is data as well", "send one of the two")
    if tail is None:
        raise bad(field, "the header Inference-Header-Content-Length is missing", "send it with the JSON's length")
    if at + size > len(tail):
        raise bad(field, f"{size} bytes are announced, {len(tail) - at} follow the JSON", "send the whole tensor")
    data = tail[at : at + size]
    check_raw(given.datatype, given.shape, data, field)
    return data


def read_outputs(outputs: list[OutputObject] | None, parameters: Parameters, intake: Intake) -> Mapping[str, bool]:
    """Which outputs are wanted, and which of them as binary."""
    if not outputs and not parameters:
        return intake.plain
    default = flag(parameters, "binary_data_output", "parameters")
    if not outputs:
        return dict.fromkeys(intake.plain, default)
    wanted: dict[str, bool] = {}
    for index, output in enumerate(outputs):
        field = f"outputs[{index}]"
        chosen = output.parameters or {}
        if "classification" in chosen:
            raise bad(f"{field}.parameters.classification", "not supported", "sort the output on the client's side")
        name = intake.output(output.name, f"{field}.name")
        wanted[name] = flag(chosen, "binary_data", f"{field}.parameters") if "binary_data" in chosen else default
    return wanted


def flag(parameters: Parameters, key: str, field: str) -> bool:
    """A parameter that is true or false; false where it is absent."""
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise bad(f"{field}.{key}", f"{shown(value)} is neither true nor false")
    return value


def write(model: str, version: str, wanted: Wanted, outputs: Mapping[str, Tensor]) -> tuple[bytes, int | None]:
    """The answer's body, and the length of its JSON where binary tensors follow it."""
    written: list[AnswerOutput] = []
    tail: list[bytes | bytearray | memoryview] = []
    for name, is_binary in wanted.outputs.items():
        tensor = outputs.get(name)
        if tensor is None:
            continue  # of a branch that this request did not take
        if is_binary:
            size = {"binary_data_size": len(tensor.data)}
            written.append(AnswerOutput(name, tensor.datatype, tensor.shape, UNSET, size))
            tail.append(tensor.data)
        else:
            written.append(AnswerOutput(name, tensor.datatype, tensor.shape, listed(name, tensor)))
    json = _ENCODER.encode(AnswerObject(model, version, written, wanted.id))
    return (b"".join((json, *tail)), len(json)) if tail else (json, None)


def listed(name: str, tensor: Tensor) -> list[object]:
    """A tensor's elements for JSON."""
    try:
        return unpack(tensor)
    except UnicodeDecodeError as error:
        fix = "ask for it as binary: outputs[].parameters.binary_data = true"
        raise Refusal(500, f"output {name!r} is not text ({error.reason})", fix) from None
