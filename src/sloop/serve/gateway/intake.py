"""What both protocols check before a request goes in: names, types, shapes, sizes, rows.

Every refusal names the field, shows the value and says what would be right. Tensor bytes are looked at, never copied
and never interpreted beyond their length (and, for BYTES, their length prefixes).
Source: Open Inference Protocol v2, "Tensor Data", and Triton's binary tensor data extension for BYTES.
"""

from array import array
from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np

from sloop.serve.gateway.refusal import bad, shown
from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Signature, Tensor

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
"""`array` turns a flat list into bytes three times as fast as NumPy for small ones, and refuses what does not fit."""
LENGTH_BYTES: Final = 4
SHAPES_MAX: Final = 1024
"""How many shapes of inputs are remembered to be right."""


class Intake:
    """The inputs one application takes, ready to be checked against.

    What it says of one input names fields within it: `shape`, where the request says `inputs[0].shape`.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.ports = {port.name: port for port in signature.inputs}
        self.outputs = frozenset(port.name for port in signature.outputs)
        self.plain = {port.name: False for port in signature.outputs}
        """The outputs of a request that asks for none in particular, and none as binary."""
        self._counting = [port.name for port in signature.inputs if port.shape[:1] == (-1,)]
        self._found_right: dict[tuple[str, str, tuple[int, ...]], int] = {}

    def count(self, name: str, datatype: str, shape: tuple[int, ...]) -> int:
        """How many elements an input of this type and shape has. What was right once is not looked at again."""
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
            raise bad("name", f"there is no input {shown(name)}", f"the inputs are {', '.join(map(repr, self.ports))}")
        if datatype != port.datatype:
            raise bad("datatype", f"{shown(datatype)} for input {name!r}", f"this input takes {port.datatype}")
        wanted = port.shape
        fits = len(shape) == len(wanted) and all(
            have >= 1 if want == -1 else have == want for have, want in zip(shape, wanted, strict=True)
        )
        if not fits:
            raise bad(
                "shape",
                f"{shown(list(shape))} for input {name!r}",
                f"this input's shape is {list(wanted)}, where -1 stands for any number from 1 up",
            )

    def whole(self, tensors: Mapping[str, Tensor], field: str = "inputs") -> Mapping[str, Tensor]:
        """`tensors` if no input is missing and all carry the same number of rows, no more than one request may."""
        if len(tensors) != len(self.ports):
            missing = [name for name in self.ports if name not in tensors]
            raise bad(field, f"input {', '.join(map(repr, missing))} is missing", "send every input once")
        count = 0
        for name in self._counting:
            rows = tensors[name].shape[0]
            if count and rows != count:
                both = sorted((rows, count))
                raise bad(field, f"the inputs have {both} rows (first dimension)", "send as many rows in each")
            count = rows
        if count > self.signature.rows_max:
            raise bad(
                field,
                f"{count} rows (first dimension) are more than the {self.signature.rows_max} one request may carry",
                "split them over several requests; sloop batches them together again",
            )
        return tensors

    def output(self, name: str, field: str) -> str:
        """`name` if it is an output."""
        if name not in self.outputs:
            known = ", ".join(repr(port.name) for port in self.signature.outputs)
            raise bad(field, f"there is no output {shown(name)}", f"the outputs are {known}")
        return name


def check_raw(datatype: str, shape: tuple[int, ...], data: memoryview | bytes, field: str) -> None:
    """Whether raw bytes are as long as type and shape say."""
    count = prod(shape)
    if datatype == "BYTES":
        check_strings(memoryview(data), count, field)
    elif len(data) != count * ITEM_BYTES[datatype]:
        raise bad(
            field,
            f"{len(data)} bytes are not the {count * ITEM_BYTES[datatype]} of {datatype} {list(shape)}",
            "send every element in row-major order, little-endian, without padding",
        )


def check_strings(data: memoryview, count: int, field: str) -> None:
    """Whether `data` is `count` strings, each with its length before it."""
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
    """The elements of a JSON or protobuf list, flat or nested as `shape`, which holds `count` of them, as raw bytes."""
    if data and type(data[0]) is list:
        data = flatten(data, field)
    raw = pack_strings(data, field) if datatype == "BYTES" else pack_numbers(datatype, data, field)
    if len(data) != count:
        raise bad(
            field,
            f"{len(data)} elements are not the {count} of shape {list(shape)}",
            "send every element once, in row-major order",
        )
    return raw


def flatten(data: list[Any], field: str) -> list[Any]:
    """Nested lists as one; lists side by side must be equally long."""
    while data and isinstance(data[0], list):
        if any(not isinstance(inner, list) or len(inner) != len(data[0]) for inner in data):
            raise bad(field, "the lists inside differ in length", "send a flat list, or lists nested as the shape")
        data = list(chain.from_iterable(data))
    return data


def pack_numbers(datatype: str, data: list[Any], field: str) -> bytes:
    """A flat list as raw bytes of a fixed-size type."""
    code = ARRAY_CODES.get(datatype)
    try:
        if code is not None:
            return array(code, data).tobytes()
        if datatype == "BOOL":
            if any(type(element) is not bool for element in data):
                raise TypeError
            return bytes(data)
        if datatype == "FP16":
            with np.errstate(over="ignore"):  # what is too large is infinity, as for FP32
                return np.array(array("d", data)).astype("<f2").tobytes()
    except TypeError:
        fix = "send a flat list, or lists nested as the shape"
        raise bad(field, f"not every element is a {datatype} value", fix) from None
    except OverflowError as error:
        raise bad(field, f"an element is out of {datatype}'s range ({error})", "send what the type holds") from None
    raise bad(field, f"{datatype} cannot be written as a list", "send it as a binary tensor")


def pack_strings(data: list[Any], field: str) -> bytes:
    """Strings and byte strings with their lengths before them."""
    parts: list[bytes] = []
    for element in data:
        if not isinstance(element, str | bytes):
            raise bad(field, f"{shown(element)} is not a string", "BYTES elements are strings")
        raw = element.encode() if isinstance(element, str) else element
        parts += (len(raw).to_bytes(LENGTH_BYTES, "little"), raw)
    return b"".join(parts)


def unpack(tensor: Tensor) -> list[Any]:
    """A tensor's elements as a flat list for JSON; strings must be UTF-8, or `UnicodeDecodeError` is raised."""
    code = ARRAY_CODES.get(tensor.datatype)
    if code is not None:
        return list(memoryview(tensor.data).cast("B").cast(code))  # type: ignore[call-overload]  # it is one of those
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
