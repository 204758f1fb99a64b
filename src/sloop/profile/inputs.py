"""Inputs made up for a model: their shapes for a batch, and numbers to fill them. Knows nothing of frameworks."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError
from sloop.tensor import NUMPY_TYPES, Port, Signature


def input_shapes(
    signature: Signature, batch: int, shapes: Mapping[str, tuple[int, ...]], *, where: str
) -> dict[str, tuple[int, ...]]:
    """The shape of each input for a batch; `shapes` gives one row's shape, without the batch, by input name.

    InputError where the batch is fixed to another size, or an open dimension is not given.
    """
    unknown = [name for name in shapes if name not in {port.name for port in signature.inputs}]
    if unknown:
        names = ", ".join(port.name for port in signature.inputs)
        raise InputError(f"the model has no input {unknown[0]!r}", where=where, help=f"its inputs: {names}")
    return {port.name: _shape(port, batch, shapes.get(port.name), where) for port in signature.inputs}


def _shape(port: Port, batch: int, row: tuple[int, ...] | None, where: str) -> tuple[int, ...]:
    if not port.shape:
        return ()
    if port.shape[0] not in (-1, batch):
        raise InputError(
            f"the batch of input {port.name!r} is fixed to {port.shape[0]}; a batch of {batch} is asked for",
            where=where,
            help=f"open it with --free-batch, export it with an open batch, or measure --batches {port.shape[0]}",
        )
    rest = port.shape[1:]
    if row is None and -1 in rest:
        shown = ", ".join("?" if size < 0 else str(size) for size in rest)
        example = ",".join("224" if size < 0 else str(size) for size in rest)
        help_text = f"say them with --shape {port.name}={example}"
        raise InputError(f"input {port.name!r} has open dimensions ({shown})", where=where, help=help_text)
    if row is None:
        return (batch, *rest)
    if len(row) != len(rest) or any(want not in (-1, size) or size < 1 for want, size in zip(rest, row, strict=True)):
        shown = ", ".join("?" if size < 0 else str(size) for size in rest)
        raise InputError(f"the shape {row} does not fit input {port.name!r} ({shown})", where=where)
    return (batch, *row)


def synthesise(
    signature: Signature, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0
) -> dict[str, NDArray[np.generic]]:
    """Inputs of these shapes: uniform in [0, 1) for floats, 0 or 1 for the rest, which indexes any vocabulary."""
    generator = np.random.default_rng(seed)
    made: dict[str, NDArray[np.generic]] = {}
    for port in signature.inputs:
        shape = shapes[port.name]
        if port.datatype == "BYTES":
            made[port.name] = np.full(shape, "a", dtype=object)
        elif port.datatype.startswith("FP"):
            made[port.name] = generator.random(shape).astype(NUMPY_TYPES[port.datatype])
        else:
            made[port.name] = generator.integers(0, 2, shape).astype(NUMPY_TYPES[port.datatype])
    return made
