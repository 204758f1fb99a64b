"""An ONNX model file: what it takes and gives, and sessions that run it.

Promises that a file that cannot be served raises InputError with the reason in the user's terms. Datatypes carry the
names of the Open Inference Protocol v2; an open dimension is -1. Knows nothing of cores, profiles or servers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort  # type: ignore[import-untyped]

from sloop.errors import InputError
from sloop.profile.session import Array
from sloop.tensor import Port, Signature

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


class OnnxSession:
    """An ONNX model on the CPU, as `sloop.profile.session` asks."""

    joins_rows: bool | None = None
    software: str = f"ONNX Runtime {ort.__version__}"

    def __init__(self, path: Path, threads: int, *, optimise: bool = True) -> None:
        self._session = open_session(path, threads, optimise=optimise)
        self.signature = signature_of(self._session, path)

    def example(self, rows: int) -> None:
        """A file of weights brings no example."""

    def run(self, feed: Mapping[str, Array]) -> list[Array]:
        """One forward pass."""
        outputs: list[Array] = self._session.run(None, feed)
        return outputs


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
