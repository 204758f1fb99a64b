"""An ONNX model file: what it takes and gives, and sessions that run it.

Promises that a file that cannot be served raises InputError with the reason in the user's terms. Datatypes carry the
names of the Open Inference Protocol v2; an open dimension is -1. Knows nothing of cores, profiles or servers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from sloop.errors import InputError
from sloop.tensor import NUMPY_TYPES, Port, Signature

DATATYPES: Final[Mapping[str, str]] = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
"""ONNX Runtime's names of types → the protocol's."""


def open_session(path: Path, threads: int, *, optimise: bool = True) -> Any:  # noqa: ANN401  # ONNX Runtime has no types
    """A CPU session as a replica runs it: `threads` threads that sleep when idle. InputError for an unusable file."""
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), help="give the path of an ONNX model")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own exceptions share no base; each of them means an unusable model
        raise _unusable(path, str(error)) from error


def _unusable(path: Path, message: str) -> InputError:
    reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", message.strip()).splitlines()[0][:300]
    if "INVALID_PROTOBUF" in message:
        what, help_text = "not an ONNX model, or cut short", "export it again"
    elif "NOT_IMPLEMENTED" in message or "No Op registered" in message or "is not a registered function" in message:
        what = f"an operator that ONNX Runtime {ort.__version__} does not have: {reason}"
        help_text = "export it with another opset, or replace the operator"
    else:
        what, help_text = f"ONNX Runtime cannot load it: {reason}", "check it with `python -m onnx.checker FILE`"
    return InputError(what, where=str(path), help=help_text)


def read_signature(path: Path) -> Signature:
    """The inputs and outputs of a model file. InputError where it is missing, broken or of a type not supported."""
    return signature_of(open_session(path, 1, optimise=False), path)


def signature_of(session: Any, path: Path) -> Signature:  # noqa: ANN401
    """The inputs and outputs of a session made from `path`."""
    return Signature(
        tuple(_port(given, path) for given in session.get_inputs()),
        tuple(_port(given, path) for given in session.get_outputs()),
    )


def _port(given: Any, path: Path) -> Port:  # noqa: ANN401
    if given.type not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise InputError(f"{given.name!r} is of type {given.type}", where=str(path), help=f"use one of {known}")
    return Port(given.name, DATATYPES[given.type], tuple(d if isinstance(d, int) else -1 for d in given.shape))


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
