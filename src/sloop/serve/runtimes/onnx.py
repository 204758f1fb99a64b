"""ONNX Runtime on the CPU: one session per thread count, because a session's thread pool is fixed when it is made.

Threads must equal ⌈cores⌉: more threads than cores under a quota spend it on waiting for each other (Sponge
specification, section 7.1), so spinning is switched off too. Sessions cost memory: beyond `THREAD_COUNTS_MAX` of them
the least recently used goes.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]

from sloop.errors import InputError
from sloop.serve.runtimes import THREAD_COUNTS_MAX, Array
from sloop.serve.tensor import NUMPY_TYPES, Port, Signature

TYPES: Final = {
    f"tensor({name})": datatype
    for name, datatype in {
        "bool": "BOOL",
        "uint8": "UINT8",
        "uint16": "UINT16",
        "uint32": "UINT32",
        "uint64": "UINT64",
        "int8": "INT8",
        "int16": "INT16",
        "int32": "INT32",
        "int64": "INT64",
        "float16": "FP16",
        "float": "FP32",
        "double": "FP64",
    }.items()
}
"""ONNX Runtime's type names → the protocol's."""


class OnnxRuntime:
    """An ONNX model on the CPU."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sessions: OrderedDict[int, ort.InferenceSession] = OrderedDict()
        self._lock = threading.Lock()
        self._inputs: list[str] = []
        self._outputs: list[str] = []

    def load(self, threads: int) -> bool:
        """Make a session with `threads` intra-op threads; False where there is one."""
        if threads in self._sessions:
            return False
        session = open_session(self._path, threads)
        if not self._inputs:
            self._inputs = [port.name for port in session.get_inputs()]
            self._outputs = [port.name for port in session.get_outputs()]
        with self._lock:
            self._sessions[threads] = session
            while len(self._sessions) > THREAD_COUNTS_MAX:
                self._sessions.popitem(last=False)
        return True

    def warm(self, threads: int) -> None:
        """One pass over zeros, one row each: allocates what the first batch would otherwise wait for.

        Only where every dimension but the first is known; zeros of guessed shapes could be refused by a sound model.
        """
        session = self._sessions[threads]
        feed = {}
        for port in session.get_inputs():
            dims = [1 if place == 0 and not isinstance(dim, int) else dim for place, dim in enumerate(port.shape)]
            if port.type not in TYPES or not all(isinstance(dim, int) for dim in dims):
                return
            feed[port.name] = np.zeros(dims, NUMPY_TYPES[TYPES[port.type]])
        session.run(None, feed)

    def run(self, inputs: Sequence[Array], threads: int) -> tuple[Sequence[Array], int]:
        """Run on the session with the thread count nearest to `threads`, the smaller of two."""
        with self._lock:
            loaded = threads if threads in self._sessions else min(self._sessions, key=lambda n: (abs(n - threads), n))
            session = self._sessions[loaded]
            self._sessions.move_to_end(loaded)
        outputs = session.run(self._outputs, dict(zip(self._inputs, inputs, strict=True)))
        return outputs, loaded


def open_session(path: str, threads: int) -> ort.InferenceSession:
    """A CPU session with its own pool of `threads` threads that sleep when there is nothing to do."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # errors only: a worker's stderr is the server's
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def read_signature(path: str | Path) -> Signature:
    """What the model in `path` takes and gives, in its own order; open dimensions are -1.

    Raises `InputError` where the file is missing, is no ONNX model, or has types that cannot travel as raw bytes.
    """
    if not Path(path).is_file():
        raise InputError("there is no such file", where=str(path), help="give the path of an ONNX model")
    try:
        session = open_session(str(path), 1)
    except Exception as error:  # ONNX Runtime raises many types, all of which mean an unusable model
        raise InputError(str(error), where=str(path), help="give a model that ONNX Runtime can load") from error

    def port(given: ort.NodeArg) -> Port:
        if given.type not in TYPES:
            raise InputError(
                f"{given.name!r} is of type {given.type}", where=str(path), help=f"use one of {', '.join(TYPES)}"
            )
        return Port(given.name, TYPES[given.type], tuple(d if isinstance(d, int) else -1 for d in given.shape))

    return Signature(tuple(map(port, session.get_inputs())), tuple(map(port, session.get_outputs())))
