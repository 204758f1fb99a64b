"""Request bodies in the Open Inference Protocol v2, from a model's metadata or a file the user gives.

Promises bodies a conforming server accepts: JSON, or the binary tensor data extension (tensors appended to the JSON as
raw little-endian bytes, `Inference-Header-Content-Length` giving the length of the JSON). Values are made up from the
seed, so equal seeds send equal bytes. Sources: the KServe "Open Inference Protocol" and Triton's "Binary tensor data
extension" documents.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError
from sloop.load.plan import Encoding
from sloop.streams import stream
from sloop.tensor import NUMPY_TYPES, Port

BODY_BYTES_MAX: Final = 256 * 2**20
VARIANTS: Final = 4
"""Different bodies sent in turn, so that a cache in front of the model does not answer for it."""


class ModelMetadata(msgspec.Struct, frozen=True):
    """The answer to GET /v2/models/NAME, as far as it matters here."""

    inputs: tuple[Port, ...] = ()


class Body(msgspec.Struct, frozen=True):
    """One request's body and what its head must say about it."""

    content: bytes
    json_bytes: int
    """Length of the JSON part; all of it where no binary tensors follow."""

    @property
    def is_binary(self) -> bool:
        return self.json_bytes != len(self.content)


class Tensor(msgspec.Struct, frozen=True):
    """An input with values: numbers as an array, texts as bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes]


def made_up(
    metadata: ModelMetadata, shapes: Mapping[str, Sequence[int]], *, seed: int, where: str
) -> list[list[Tensor]]:
    """`VARIANTS` sets of inputs with values from the seed: floats in [0, 1], integers 0 to 9, short texts."""
    if not metadata.inputs:
        raise InputError("the model says nothing of its inputs", where=where, help="give a request body as a JSON file")
    known = {one.name for one in metadata.inputs}
    for name in shapes:
        if name not in known:
            raise InputError(f"no input {name!r}", where=where, help=f"inputs: {', '.join(sorted(known))}")
    rng = stream(seed, "inputs")
    return [[_tensor(one, shapes.get(one.name), rng, where) for one in metadata.inputs] for _ in range(VARIANTS)]


def _tensor(one: Port, given: Sequence[int] | None, rng: Random, where: str) -> Tensor:
    shape = tuple(given) if given is not None else tuple(1 if size < 0 else size for size in one.shape)
    count = prod(shape)
    if min(shape, default=1) < 1 or count > BODY_BYTES_MAX:
        raise InputError(f"input {one.name!r} cannot have the shape {list(shape)}", where=where, help="give its shape")
    if one.datatype == "BYTES":
        return Tensor(one.name, one.datatype, shape, [b"sloop %d" % rng.randrange(10) for _ in range(count)])
    if one.datatype not in NUMPY_TYPES:
        raise InputError(
            f"input {one.name!r} has the datatype {one.datatype!r}",
            where=where,
            help=f"known: {', '.join(NUMPY_TYPES)}, BYTES",
        )
    drawn = np.frombuffer(rng.randbytes(count), dtype=np.uint8)
    values = drawn / 255.0 if one.datatype.startswith("FP") else drawn % (2 if one.datatype == "BOOL" else 10)
    return Tensor(one.name, one.datatype, shape, values.astype(NUMPY_TYPES[one.datatype]))


def from_array(path: Path, metadata: ModelMetadata, *, where: str) -> list[Tensor]:
    """The tensor of a `.npy` file as the model's only input."""
    if len(metadata.inputs) != 1:
        raise InputError(
            f"the model has {len(metadata.inputs)} inputs", where=where, help="give a request body as JSON"
        )
    only = metadata.inputs[0]
    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray) or only.datatype not in NUMPY_TYPES:
            raise ValueError(f"an array for the datatype {only.datatype} is expected")
        values = np.ascontiguousarray(array).astype(NUMPY_TYPES[only.datatype])
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, UnicodeError) as error:
        raise InputError(f"not a usable array: {error}", where=str(path), help="write it with numpy.save") from None
    return [Tensor(only.name, only.datatype, tuple(array.shape), values.ravel())]


def from_json(path: Path) -> Body:
    """A whole request body that the user wrote, checked to be a JSON object with inputs."""
    try:
        content = path.read_bytes()
        keys = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except OSError as error:
        raise InputError(f"cannot be read: {error}", where=str(path), help="check the path") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"not a request: {error}", where=str(path), help='write {"inputs": [...]}') from None
    if "inputs" not in keys:
        raise InputError("no `inputs` in it", where=str(path), help='write {"inputs": [...]}')
    return Body(content, len(content))


def encoded(tensors: Sequence[Tensor], encoding: Encoding, *, where: str) -> Body:
    """The body that carries these inputs; `encoding` is JSON or BINARY."""
    described: list[dict[str, object]] = []
    tails: list[bytes] = []
    for tensor in tensors:
        entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if encoding == Encoding.BINARY:
            tails.append(_raw(tensor.values))
            entry["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            entry["data"] = _listed(tensor, where)
        described.append(entry)
    message: dict[str, object] = {"inputs": described}
    if encoding == Encoding.BINARY:
        message["parameters"] = {"binary_data_output": True}
    head = msgspec.json.encode(message)
    content = b"".join([head, *tails])
    if len(content) > BODY_BYTES_MAX:
        raise InputError(
            f"a body of {len(content):,} bytes", where=where, help=f"at most {BODY_BYTES_MAX:,}: shrink it"
        )
    return Body(content, len(head))


def _raw(values: NDArray[Any] | list[bytes]) -> bytes:
    if isinstance(values, list):
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return values.tobytes()


def _listed(tensor: Tensor, where: str) -> list[object]:
    if tensor.datatype == "FP16":
        raise InputError(
            f"input {tensor.name!r} is FP16, which the protocol's JSON cannot carry",
            where=where,
            help="use binary encoding",
        )
    if isinstance(tensor.values, list):
        return [value.decode() for value in tensor.values]
    listed: list[object] = tensor.values.tolist()
    return listed
