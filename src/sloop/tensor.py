"""Tensors and signatures: the values that edges, driver and workers exchange, as raw bytes with a type and a shape.

Types have the names of the Open Inference Protocol v2 ("Tensor Data Types"); elements lie in C order, little-endian,
without padding. A BYTES element is its length as 4 little-endian bytes, then that many bytes (the protocol's binary
tensor data extension). Never JSON, which is several times as long, and never a pickle, which can run code.
This module must not depend on HTTP, processes or model files.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from struct import Struct as Layout
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

NUMPY_TYPES: Final[Mapping[str, np.dtype[np.generic]]] = {
    "BOOL": np.dtype("bool"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""The protocol's types that NumPy has: all but BF16 and BYTES, whose elements vary in length."""

ITEM_BYTES: Final[Mapping[str, int]] = {name: dtype.itemsize for name, dtype in NUMPY_TYPES.items()} | {"BF16": 2}
"""Bytes per element of every fixed-size type."""

ARRAY_TYPES: Final[Mapping[str, np.dtype[Any]]] = {**NUMPY_TYPES, "BF16": np.dtype("<u2"), "BYTES": np.dtype(object)}
"""The type of the arrays that models receive and return, for every type of the protocol: BF16 as its 16 bits, BYTES as
objects of type `bytes`."""

LENGTH: Final = Layout("<I")
LENGTH_BYTES: Final = LENGTH.size
"""The length before each BYTES element."""


PadValue = bool | int | float
"""What fills open dimensions of an input, as users write it."""


class Tensor(Struct, frozen=True, gc=False):
    """`data` holds the elements in C order; `shape[0]` is the number of rows, the batch dimension."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


MISSING: Final = Tensor("NONE", (), b"")
"""Stands in a block for an output that is not needed, or an optional input that is not given. No tensor of a client or
a model has this datatype."""


class Port(Struct, frozen=True):
    """One input or output: its name, type and shape. -1 stands for a dimension that may vary."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    has_rows: bool = True
    """Whether the first dimension counts the rows of a request. False for what belongs to a request as a whole: a
    threshold, the state of a recurrent network, the edges of a graph."""

    @property
    def counts_rows(self) -> bool:
        """Whether the first dimension counts rows, and is open."""
        return self.has_rows and self.shape[:1] == (-1,)

    @property
    def open_places(self) -> tuple[int, ...]:
        """The open dimensions of one row, or of what belongs to a request as a whole."""
        return tuple(place for place, size in enumerate(self.shape) if size < 0 and not (place == 0 and self.has_rows))

    @property
    def kind(self) -> str:
        """Type and shape, such as `FP32[-1, 3, 224, 224]`."""
        return f"{self.datatype}{list(self.shape)}"


EqualLengths = tuple[tuple[str, int], ...]
"""Dimensions of one length: of each, the input and the place in its whole shape."""


class Signature(Struct, frozen=True):
    """Inputs and outputs of a model, in the model's order; of an application, the inputs of its first stages and the
    outputs of its last stages."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    rows_max: int = 1
    """The most rows that one request to an application may have, where inputs count rows."""
    optional: tuple[Port, ...] = ()
    """Inputs with a default value, which a request need not give. They belong to the request as a whole."""
    size_max: int = 0
    """The largest size of the rows of one request, in the open dimensions of an input; 0 for no limit."""
    equal: tuple[EqualLengths, ...] = ()
    """Open dimensions that a request has equally long, such as those of a text and of its mask."""

    @classmethod
    def of(cls, inputs: Sequence[Port], outputs: Sequence[Port], optional: Sequence[Port] = ()) -> "Signature":
        """The signature of a model, in which `has_rows` of each port is worked out from the first dimensions.

        If those of some inputs are open, they count rows, and the other inputs have none. If all are fixed to one size,
        that size is the batch. If all are fixed and differ, the model has no batch.
        """
        sizes = {port.shape[0] for port in inputs if port.shape}
        batch = -1 if -1 in sizes else sizes.pop() if len(sizes) == 1 else None

        def marked(ports: Sequence[Port]) -> tuple[Port, ...]:
            return tuple(structs.replace(port, has_rows=port.shape[:1] == (batch,)) for port in ports)

        without = tuple(structs.replace(port, has_rows=False) for port in optional)
        return cls(marked(inputs), marked(outputs), optional=without)

    def without_rows(self) -> "Signature":
        """The same ports for a model whose requests are one unit each: no first dimension counts rows."""
        inputs, outputs = (
            tuple(structs.replace(port, has_rows=False) for port in ports) for ports in (self.inputs, self.outputs)
        )
        return structs.replace(self, inputs=inputs, outputs=outputs)

    @property
    def fixed_batch(self) -> int | None:
        """The fixed number of rows of the inputs; None if it may vary, or if no input has rows."""
        fixed = [port.shape[0] for port in self.inputs if port.has_rows and port.shape and port.shape[0] >= 0]
        return fixed[0] if fixed else None

    @property
    def has_rows(self) -> bool:
        """Whether the first dimension of every input and output is variable: its size is then the number of rows."""
        return all(port.counts_rows for port in (*self.inputs, *self.outputs))


def open_places_of(ports: Iterable[Port]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The positions of the ports that have open dimensions, each with these (`Port.open_places`)."""
    return tuple((position, places) for position, port in enumerate(ports) if (places := port.open_places))


def size_and_shape(lengths: Sequence[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """The `size` and `shape` of a request (`sloop.vocabulary.Request`) whose inputs have open dimensions of these
    lengths, one tuple for each input: the elements of the largest, and all lengths unless they are one dimension each
    of one length. An empty row counts as one element, because 0 stands for models without open dimensions."""
    first = lengths[0]
    if len(first) == 1 and first[0] and lengths.count(first) == len(lengths):
        return first[0], ()
    return max(1, *map(prod, lengths)), tuple(chain.from_iterable(lengths))


def bytes_of(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, copied first if it is not in C order. Empty for text, which NumPy stores as objects."""
    if array.dtype == object:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def arrays_at(
    memory: memoryview, kinds: Sequence[tuple[np.dtype[np.generic], tuple[int, ...]]], starts: Sequence[int]
) -> list[NDArray[np.generic]]:
    """Views of `memory` as arrays, without a copy: the types and shapes are `kinds`, the byte offsets `starts`."""
    return [
        np.frombuffer(memory, dtype, prod(shape), start).reshape(shape)
        for (dtype, shape), start in zip(kinds, starts, strict=True)
    ]


# Tensors whose elements NumPy does not have: text, which varies in length, and BF16, which travels as UINT16


def join_strings(elements: Iterable[str | bytes]) -> bytes:
    """BYTES elements as raw bytes, each preceded by its length. Raises `UnicodeEncodeError` for half a surrogate
    pair."""
    parts: list[bytes] = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else element
        parts += (len(raw).to_bytes(LENGTH_BYTES, "little"), raw)
    return b"".join(parts)


def split_strings(data: bytes | bytearray | memoryview) -> list[bytes]:
    """The BYTES elements in raw bytes. Raises `ValueError` if the lengths do not add up."""
    raw, found, at, size = bytes(data), [], 0, len(data)
    while at < size:
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        found.append(raw[start:at])
    if at != size:
        raise ValueError(f"{size} bytes end within a BYTES element")
    return found


def row_starts(tensor: Tensor) -> Sequence[int]:
    """Where each row of a tensor begins in its data, and where the last one ends: one number more than there are rows.

    A tensor without dimensions has one row.
    """
    rows = tensor.shape[0] if tensor.shape else 1
    if tensor.datatype != "BYTES":
        size = prod(tensor.shape[1:]) * ITEM_BYTES[tensor.datatype]
        return range(0, rows * size + size, size) if size else [0] * (rows + 1)
    ends = [0, *accumulate(LENGTH_BYTES + len(element) for element in split_strings(tensor.data))]
    columns = prod(tensor.shape[1:])
    return [ends[row * columns] for row in range(rows + 1)]


def array_of(datatype: str, shape: tuple[int, ...], data: bytes | bytearray | memoryview) -> NDArray[Any]:
    """The array that a model receives, as `ARRAY_TYPES` says; a view of `data`, except for BYTES.

    Raises `ValueError` if the data do not have as many elements as the shape.
    """
    if datatype != "BYTES":
        return np.frombuffer(data, ARRAY_TYPES[datatype]).reshape(shape)
    elements = split_strings(data)
    found = np.empty(len(elements), dtype=object)
    found[:] = elements
    return found.reshape(shape)


def elements_of(array: NDArray[Any]) -> bytes | memoryview:
    """The raw bytes of an array that a model returned; of text, `str` or `bytes`, its elements with their lengths."""
    return join_strings(array.ravel().tolist()) if array.dtype.hasobject else bytes_of(array)


def floats_of(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """BF16 numbers, the upper halves of 32-bit floats, as 32-bit floats."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloats_of(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    """32-bit floats rounded to BF16, ties to even; numbers out of range become infinite."""
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # of a NaN, which rounding could turn into an infinity
    return np.where(np.isnan(floats), quiet, rounded).astype(np.uint16)


def described(ports: Sequence[Port]) -> str:
    """Ports for messages: `x FP32[-1, 3], y INT64[-1]`."""
    return ", ".join(f"{port.name} {port.datatype}{list(port.shape)}" for port in ports)


# Padding: rows whose open dimensions differ in length share a forward pass, filled up at the end to the longest


Slices = tuple[slice, ...]


class Cut(Struct, frozen=True, array_like=True):
    """A dimension of an output that is as long as a dimension of an input: padding is cut off there. All are counted
    from 0, dimensions with the rows."""

    output: int
    place: int
    input: int
    input_place: int


class Padding(Struct, frozen=True, array_like=True):
    """How rows of a model are padded."""

    values: tuple[PadValue | None, ...]
    """By input, what fills its open dimensions; None for an input without any."""
    cuts: tuple[Cut, ...]

    def elements(self, ports: Sequence[Port]) -> list[Any]:
        """The values as elements of the inputs."""
        pairs = zip(ports, self.values, strict=True)
        return [None if value is None else pad_element(port.datatype, value) for port, value in pairs]

    def kept(self, shapes: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> list[Slices]:
        """For each output, with these numbers of dimensions: what is left of its rows if the padding of a request is
        cut off whose inputs had these shapes."""
        found = [[slice(None)] * max(0, rank - 1) for rank in ranks]
        for cut in self.cuts:
            if cut.place <= len(found[cut.output]):
                found[cut.output][cut.place - 1] = slice(shapes[cut.input][cut.input_place])
        return [tuple(each) for each in found]


def pad_element(datatype: str, value: PadValue) -> Any:  # noqa: ANN401  # an element of an array of any type
    """A value of padding as an element of an input. OverflowError if it is out of the type's range."""
    if datatype == "BF16":
        return bfloats_of(np.array([value], np.float32))[0]
    with np.errstate(over="ignore"):
        made = np.array([value]).astype(ARRAY_TYPES[datatype])[0]
    if not np.isfinite(made) or ("INT" in datatype and made != value):
        raise OverflowError(f"{value} is out of {datatype}'s range")
    return made


def fill(array: NDArray[Any], element: Any, rows: Sequence[NDArray[Any]]) -> None:  # noqa: ANN401  # likewise
    """Copy the rows of requests, one request after the other, into an array that is as long as the longest in each
    dimension, and the element wherever there is none."""
    array[...] = element
    at = 0
    for own in rows:
        array[(slice(at, at + len(own)), *map(slice, own.shape[1:]))] = own
        at += len(own)
