"""Tensors and signatures: the values that gateway, driver and workers exchange, as raw bytes with a type and a shape.

Types have the names of the Open Inference Protocol v2 ("Tensor Data Types"); elements lie in C order, little-endian,
without padding. A BYTES element is its length as 4 little-endian bytes, then that many bytes (the protocol's binary
tensor data extension). Never JSON, which is several times as long, and never a pickle, which can run code.
This module must not depend on HTTP, processes or model files.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import numpy as np
from msgspec import Struct
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
"""The protocol's fixed-size types that NumPy has. BF16 and BYTES, whose elements vary in length, have no NumPy type."""

ITEM_BYTES: Final[Mapping[str, int]] = {name: dtype.itemsize for name, dtype in NUMPY_TYPES.items()} | {"BF16": 2}
"""Bytes per element of every fixed-size type."""


class Tensor(Struct, frozen=True, gc=False):
    """`data` holds the elements in C order; `shape[0]` is the number of rows, the batch dimension."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


class Port(Struct, frozen=True):
    """One input or output: its name, type and shape. -1 stands for a dimension that may vary; the first is the
    batch."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Signature(Struct, frozen=True):
    """Inputs and outputs of a model, in the model's order; of an application, the inputs of its first stages and the
    outputs of its last stages."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    rows_max: int = 1
    """The most rows that one request to an application may have."""

    @property
    def fixed_batch(self) -> int | None:
        """The fixed number of rows of the inputs; None if it may vary."""
        fixed = [port.shape[0] for port in self.inputs if port.shape and port.shape[0] >= 0]
        return fixed[0] if fixed else None


def bytes_of(array: NDArray[np.generic]) -> memoryview:
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
