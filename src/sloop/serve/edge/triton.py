"""Triton's extensions of the Open Inference Protocol that need more than a parameter: classification, the model's
configuration, statistics, and the model repository.

Objects here are plain values, which REST and gRPC write in their own ways. Source: Triton's "classification", "model
configuration", "statistics" and "model repository" extensions, and `model_config.proto`.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.serve.edge.refusal import Refusal, bad
from sloop.serve.edge.service import Model
from sloop.tensor import NUMPY_TYPES, Port, Tensor, floats_of, join_strings

BACKEND: Final = "sloop"
CLASSIFIED_MAX: Final = 2**18
"""The most elements of an output that are sorted, which takes some 20 ms; a thousand classes of 128 rows are half as
many."""
DATA_TYPES: Final[Mapping[str, int]] = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": 13,
    "TYPE_BF16": 14,
}
"""The numbers of datatypes in `model_config.proto`."""


# Classification


def classified(
    outputs: Mapping[str, Tensor],
    counts: Mapping[str, int],
    ports: Sequence[Port],
    labels: Mapping[str, tuple[str, ...]],
) -> Mapping[str, Tensor]:
    """The outputs, with those in `counts` as so many of their largest elements: BYTES `value:index[:label]`.

    The largest comes first. If the first dimension is the number of rows, each row has classes of its own: the shape is
    (rows, count), otherwise (count,). `ports` are the model's outputs, `labels` the names of their classes. Raises a
    400 for more elements than are sorted.
    """
    found = dict(outputs)
    for port in ports:
        if port.name in counts and port.name in found:
            found[port.name] = _classes(found[port.name], port, counts[port.name], labels.get(port.name, ()))
    return found


def _classes(tensor: Tensor, port: Port, count: int, labels: tuple[str, ...]) -> Tensor:
    if prod(tensor.shape) > CLASSIFIED_MAX:
        what = f"output {port.name!r} has {prod(tensor.shape)} elements; at most {CLASSIFIED_MAX} are classified"
        raise Refusal(400, what, "ask for the output itself, or for fewer rows at a time")
    has_rows = port.counts_rows
    rows = tensor.shape[0] if has_rows else 1
    values = _numbers(tensor).reshape(rows, prod(tensor.shape[1:] if has_rows else tensor.shape))
    count = min(count, values.shape[1])
    chosen = _largest(values, count)
    numbers = np.take_along_axis(values, chosen, axis=1).ravel().tolist()
    texts = [_class(*each, labels) for each in zip(numbers, chosen.ravel().tolist(), strict=True)]
    return Tensor("BYTES", (rows, count) if has_rows else (count,), join_strings(texts))


def _numbers(tensor: Tensor) -> NDArray[Any]:
    if tensor.datatype == "BF16":
        return floats_of(np.frombuffer(tensor.data, "<u2"))
    return np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype])


def _largest(values: NDArray[Any], count: int) -> NDArray[np.intp]:
    """The indices of the `count` largest elements of each row, of equal ones the first; no number (NaN) is least."""
    ordered = np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values
    # A stable sort of the reversed row, read backwards: descending, and equal elements in their order.
    backwards = np.argsort(ordered[:, ::-1], axis=1, kind="stable")[:, ::-1]
    found: NDArray[np.intp] = values.shape[1] - 1 - backwards[:, :count]
    return found


def _class(value: float, index: int, labels: tuple[str, ...]) -> str:
    number = f"{value:f}" if isinstance(value, float) else str(value)  # six decimals, as Triton writes them
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"


# Model repository


def check_change(parameters: Mapping[str, object], verb: str) -> None:
    """Raise a 400 for a parameter of an order to load or unload a model."""
    for name in parameters:
        if verb == "unload" and name == "unload_dependents":
            continue  # a model is a whole graph of stages
        fix = "a model is loaded as the repository's file NAME.yaml has it; change that file"
        raise bad(f"parameters.{name}", f"{verb} does not take it", fix)


def changed_not(answer: bytes) -> Refusal:
    """Why a model was not loaded or ended, as the answer about `Topic.LOAD` says."""
    return Refusal.of(msgspec.json.decode(answer, type=tuple[int, str, str, int]))


# Configuration


def configuration(model: Model, bounds: Mapping[str, int]) -> dict[str, Any]:
    """The model's configuration as far as clients use it. The number of rows is not among the `dims` if the model has
    a `max_batch_size`. `bounds` are what a request may have at most. The parameter `joins_rows`, or one for each stage
    and variant, says whether requests share forward passes, and why."""
    signature = model.validator.signature
    has_rows = signature.has_rows
    parameters = {name: str(most) for name, most in bounds.items()}
    for name, joins in model.joining.items():
        parameters["joins_rows" if len(model.joining) == 1 else f"joins_rows:{name}"] = joins

    def described(port: Port) -> dict[str, Any]:
        return {
            "name": port.name,
            "data_type": "TYPE_STRING" if port.datatype == "BYTES" else f"TYPE_{port.datatype}",
            "dims": port.shape[1:] if has_rows else port.shape,
        }

    return {
        "name": model.name,
        "platform": "",
        "backend": BACKEND,
        "max_batch_size": signature.rows_max if has_rows else 0,
        "input": [*map(described, signature.inputs), *({**described(p), "optional": True} for p in signature.optional)],
        "output": list(map(described, signature.outputs)),
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
