"""Model files: their inputs and outputs, sessions that run them, and inputs for trial runs.

A model is an ONNX graph, a Python file with a class `Model`, or a file of a runtime that an installed distribution adds
(`RUNTIMES`). The
profiler, the batching check and the server's workers all open models here, so that the measured model is the served
model. ONNX Runtime is imported when the first ONNX file is opened; a file that cannot be served raises InputError with
the reason and a remedy.

A Python model looks like this:

    class Model:
        inputs = {"image": ("UINT8", (1, -1, -1, 3))}    # datatypes of the Open Inference Protocol v2; -1 is open,
                                                         # and so is a name: equal names, equal lengths
        outputs = {"scores": ("FP32", (1, 10))}
        joins_rows = False                               # optional: see `Session.joins_rows`
        software = "ONNX Runtime 1.20"                   # optional: the library that runs it, recorded in its profile

        def __init__(self, threads: int) -> None: ...    # optional, and so is `threads`
        def run(self, image): ...                        # arrays in the order of `inputs`; returns those of `outputs`;
                                                         # may be `async`, and may raise `sloop.Refused`
        def example(self, rows: int): ...                # optional: realistic inputs, where random ones are refused

Arrays have the NumPy type of their datatype. BYTES is an array of objects: `run` gets `bytes`, and may return
`bytes` or `str`. BF16, which NumPy has not, is an array of uint16, the upper halves of 32-bit floats.

The file is imported once per process, with its folder first on the import path, and never in the server's process.
"""

import ctypes
import functools
import inspect
import os
import re
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from sloop.cuda import CudaDevice, failure_on
from sloop.errors import InputError, MachineError
from sloop.onnx_file import LFS, has_external_weights, keep_outputs, no_model, read_onnx
from sloop.plugins import Registry
from sloop.profile import operators
from sloop.tensor import ARRAY_TYPES, NUMPY_TYPES, EqualLengths, Port, Signature, bfloats_of
from sloop.text import counted
from sloop.user_code import (
    NodeFailure,
    WrongOutputsError,
    is_of_onnx_runtime,
    module_in,
    raise_user_error,
    raised_by_users,
    runtime_reason,
    user_path,
)

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

PYTHON: Final = ".py"
PLAIN: Final = frozenset({"", ".onnx", PYTHON, ".yaml", ".yml", ".json", ".pbtxt"})
"""Suffixes for which no distribution's runtime is looked for: those of sloop's own models and documents."""
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
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}
"""ONNX Runtime's type names → those of the Open Inference Protocol v2."""
THREAD_COUNTS: Final = (2, 4)
"""For how many numbers of threads a worker keeps sessions of a large and of a small model: each holds the weights."""
SMALL_BYTES: Final = 64 * 2**20
"""The most memory of one session of a small model."""
PRUNED_BYTES_MAX: Final = 32 * 2**20
"""The largest ONNX file of which sessions for some outputs alone are opened: each holds its weights once more."""
ONNX_BFLOAT16: Final = 16
"""`TensorProto.BFLOAT16`."""
CUDA_PROVIDER: Final = "CUDAExecutionProvider"
CUDA_ALONE: Final = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'onnxruntime-gpu[cuda,cudnn]'"
"""Both packages have the same files, so whichever was installed last is the one that is imported."""
REASON_CHARS_MAX: Final = 160
"""The most characters of a message of ONNX Runtime that a client gets."""
CLASS_EXAMPLE: Final = 'inputs = {"image": ("UINT8", (1, -1, -1, 3))}, outputs likewise, run'

Array = np.ndarray[Any, np.dtype[Any]]
Places = tuple[int, ...]
RunFeed = Callable[[Mapping[str, Array]], object]
NOTHING: Final[Array] = np.empty(0, np.bool_)
"""What `Session.run` may return for an output that is not needed, and what a runtime gets for an optional input that is
not given."""
OPTIONAL_MAX: Final = 16
"""The most optional inputs of a model. If there are more, they are its weights, which some exporters list among the
inputs, and are not offered."""


class Session(Protocol):
    """A loaded model with a fixed number of threads. `run` may be called from another thread than the one that loaded
    it, and raises whatever the framework raises."""

    signature: Signature
    joins_rows: bool | None
    """Declared by the author: True if each row of a batch gets the same outputs as alone. None: must be tested."""
    software: str
    """Name and version of what runs the model; empty for plain Python."""
    dimension_names: Mapping[tuple[str, int], str]
    """The names of open dimensions, by input and place; equal names have equal sizes."""

    def example(self, rows: int) -> Mapping[str, Array] | None:
        """Realistic inputs with `rows` rows if the model provides them. InputError if they do not fit its inputs."""
        ...

    def run(self, feed: Mapping[str, Array], outputs: Places = ()) -> Sequence[Array]:
        """One forward pass: inputs by name in, outputs in the signature's order out. Of the outputs, those at the
        places `outputs` are needed, and `NOTHING` may be in place of the others. () stands for all."""
        ...


def is_python(path: Path) -> bool:
    """Whether the model is Python code, which runs when the file is opened."""
    return path.suffix == PYTHON


RUNTIMES: Final[Registry[Callable[[Path, int], Session]]] = Registry("sloop.runtimes", {}, type)
"""What installed distributions open models with: by the suffix of the files without its dot, a class that makes a
`Session` of a path and a number of threads. Its name is also the kind of a device whose time is modelled: what runs
there is computed on a processor."""


def has_runtime(path: Path) -> bool:
    """Whether an installed distribution adds what opens the model."""
    return path.suffix not in PLAIN and path.suffix[1:] in RUNTIMES


def is_modelled(accelerator: str) -> bool:
    """Whether a kind of device is one that a runtime computes on a processor; "" is no device."""
    return accelerator != "" and accelerator in RUNTIMES


def model_label(path: Path) -> str:
    """The name of a model in messages: of its file, and in a Triton model repository, where all files have the same, of
    the model's folder with the version."""
    version = path.parent
    in_repository = version.name.isdecimal() and version.parent.name
    return f"{version.parent.name}/{version.name}/{path.name}" if in_repository else path.name


def is_model(path: Path) -> bool:
    """Whether the name is that of a model file: ONNX, Python, or one of an installed runtime."""
    return path.suffix in (".onnx", PYTHON) or has_runtime(path)


def open_model(path: Path, threads: int, *, optimise: bool = True, device: CudaDevice | None = None) -> Session:
    """Load the model at `path` with `threads` threads, on the GPU that this process was started with, if any;
    `optimise=False` loads faster. InputError if unusable, MachineError if the GPU is, or is too small.

    A Python model sees that GPU as the only one, and decides itself what it computes there.
    """
    if has_runtime(path):
        return RUNTIMES[path.suffix[1:]](path, threads)
    if is_python(path):
        return PythonSession(path, threads)
    return OnnxSession(path, threads, optimise=optimise, device=device)


def thread_counts_kept(session_bytes: int) -> int:
    """For how many numbers of threads a worker keeps sessions of a model, if the first one takes so much memory.

    ONNX Runtime (1.32) lets sessions share neither packed weights nor threads, and a session's number of threads is
    fixed. With two sessions, one serves while the other is opened.
    """
    return THREAD_COUNTS[session_bytes <= SMALL_BYTES]


# Inputs for trial runs.


def feed_for(session: Session, batch: int, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> dict[str, Array]:
    """Inputs for a batch: random with the given row shapes if there are any, else the model's example, else random.

    InputError if the model fixes another batch size, or the size of an open dimension is unknown.
    """
    rows = session.signature.fixed_batch or 1 if batch == 1 else batch
    example = None if shapes else session.example(rows)
    if example is not None:
        return dict(example)
    sizes = input_shapes(session.signature, batch, shapes, session.dimension_names, where=where)
    return dict(synthesise(session.signature, sizes))


def zeros(signature: Signature) -> dict[str, Array] | None:
    """One row of zeros, or None if a dimension other than the rows is open: the model could refuse a guessed size."""
    feed = {}
    for port in signature.inputs:
        shape = [1, *port.shape[1:]] if port.counts_rows else port.shape
        if port.datatype not in NUMPY_TYPES or -1 in shape:
            return None
        feed[port.name] = np.zeros(shape, NUMPY_TYPES[port.datatype])
    return feed


def input_shapes(
    signature: Signature,
    batch: int,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[tuple[str, int], str] = {},
    *,
    where: str,
) -> dict[str, tuple[int, ...]]:
    """The shape of each input for a batch. `shapes` maps input names to one row's shape, without the batch dimension,
    and to the whole shape of an input without rows. `names` are those of open dimensions (`Session.dimension_names`):
    one that is called like the batch has its size. A batch of 1 is one request: all rows of a fixed first dimension.

    InputError if the model fixes another batch size, or an open dimension is missing from `shapes`.
    """
    unknown = [name for name in shapes if name not in {port.name for port in signature.inputs}]
    if unknown:
        known = ", ".join(port.name for port in signature.inputs)
        raise InputError(f"the model has no input {unknown[0]!r}", where=where, help=f"its inputs: {known}")
    batches = batch_names(signature, names)
    return {
        port.name: _input_shape(port, _tied(port, batch, batches, names), batch, shapes.get(port.name), where)
        for port in signature.inputs
    }


def batch_names(signature: Signature, names: Mapping[tuple[str, int], str]) -> frozenset[str]:
    """The names of the dimensions that count rows."""
    return frozenset(name for port in signature.inputs if port.counts_rows and (name := names.get((port.name, 0))))


def _tied(port: Port, batch: int, batches: frozenset[str], names: Mapping[tuple[str, int], str]) -> tuple[int, ...]:
    """The dimensions of an input; those with the name of the batch dimension have the size of the batch."""
    return tuple(
        batch if size < 0 and names.get((port.name, place)) in batches else size
        for place, size in enumerate(port.shape)
    )


def _input_shape(
    port: Port, sizes: tuple[int, ...], batch: int, row: tuple[int, ...] | None, where: str
) -> tuple[int, ...]:
    first: tuple[int, ...] = (batch,) if port.has_rows and port.shape else ()
    if first and batch == 1 and port.shape[0] > 0:
        first = port.shape[:1]  # one request
    elif first and port.shape[0] not in (-1, batch):
        raise InputError(
            f"the batch of input {port.name!r} is fixed to {port.shape[0]}; a batch of {batch} was requested",
            where=where,
            help=f"measure --batches {port.shape[0]}, or export it with an open batch",
        )
    rest = sizes[len(first) :]
    declared = ", ".join("?" if size < 0 else str(size) for size in rest)
    if row is None and -1 in rest:
        example = ",".join("224" if size < 0 else str(size) for size in rest)
        help_text = f"give their sizes with --shape {port.name}={example}"
        raise InputError(f"input {port.name!r} has open dimensions ({declared})", where=where, help=help_text)
    if row is None:
        return (*first, *rest)
    if first and len(row) == len(port.shape) and (batch == 1 or row[0] == batch) and port.shape[0] in (-1, row[0]):
        first, row = (row[0],), row[1:]  # the whole shape, of an input that may count no rows
    elif first and len(row) == len(port.shape) and row[0] == 1:
        row = row[1:]
    elif not first and port.shape[0] > 0 and len(row) == len(rest) - 1:
        row = (port.shape[0], *row)
    if len(row) != len(rest) or any(want not in (-1, size) or size < 1 for want, size in zip(rest, row, strict=True)):
        raise InputError(f"the shape {row} does not fit input {port.name!r} ({declared})", where=where)
    return (*first, *row)


class OpenDimension(Struct, frozen=True):
    """An open dimension, besides the rows, of one or several inputs."""

    name: str
    ports: tuple[tuple[str, int], ...]
    """The inputs that have it, each with its place among the dimensions of one row, or of an input without rows, from
    0."""
    proposal: int
    """A usual size."""


PROPOSALS: Final = (
    (re.compile(r"batch"), 1),
    (re.compile(r"seq|tok|text|len|word"), 128),
    (re.compile(r"height|width|image|pixel|^[hw]$"), 224),
    (re.compile(r"chan|^c$"), 3),
    (re.compile(r"audio|sample|wave"), 16_000),
    (re.compile(r"time|frame|step|^t$"), 100),
)
"""Usual sizes by the name of a dimension: the lengths that BERT models, ImageNet models and speech models are exported,
trained or measured with; of a batch that is not the first dimension, one row."""
SAMPLE_RATE: Final = re.compile(r"^(sr|fs|(sample|sampling|frame)_?rate)$")
SAMPLE_RATE_HZ: Final = 16_000
"""Speech models take the sample rate as an input, and fail for an unusual one."""
PROPOSAL_OF_IMAGES: Final = 224
PROPOSAL_OF_IDS: Final = 128
PROPOSAL_OF_OTHERS: Final = 16
PROPOSAL_WITHOUT_ROWS: Final = 1
"""The sizes of dimensions whose names say nothing: of inputs with four dimensions, of integers, of others, and of
inputs without rows, such as a state. There the dimension may be that of the batch, which has one row when it is
measured."""


def open_dimensions(session: Session, signature: Signature | None = None) -> tuple[OpenDimension, ...]:
    """The open dimensions of a model besides its rows, each once: dimensions of equal names have one size. `signature`
    says which inputs have rows, by default that of the session."""
    found: dict[str, OpenDimension] = {}
    signature = signature or session.signature
    batches = batch_names(signature, session.dimension_names)
    for port in signature.inputs:
        for place, size in enumerate(port.shape):
            name = session.dimension_names.get((port.name, place)) or f"{port.name}[{place}]"
            if size >= 0 or place < port.has_rows or name in batches:
                continue
            known = found.get(name, OpenDimension(name, (), _usual_size(name, port, place)))
            found[name] = structs.replace(known, ports=(*known.ports, (port.name, place - port.has_rows)))
    return tuple(found.values())


def equal_lengths(dimensions: Iterable[OpenDimension], signature: Signature) -> tuple[EqualLengths, ...]:
    """Those of the dimensions that several inputs share."""
    rows = {port.name: port.has_rows for port in signature.inputs}
    shared = (each.ports for each in dimensions if len(each.ports) > 1)
    return tuple(tuple((name, place + rows[name]) for name, place in ports) for ports in shared)


def _usual_size(name: str, port: Port, place: int) -> int:
    named = name.removeprefix(port.name)
    for pattern, size in PROPOSALS:
        if pattern.search(named.lower()):
            return size
    if not port.has_rows:
        return PROPOSAL_WITHOUT_ROWS
    if len(port.shape) == 4 and place >= 2:
        return PROPOSAL_OF_IMAGES
    return PROPOSAL_OF_IDS if port.datatype.startswith("INT") else PROPOSAL_OF_OTHERS


def row_shapes(
    signature: Signature, dimensions: Sequence[OpenDimension], sizes: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """One row's shape for every input with open dimensions, whose sizes are given in the order of `dimensions`; the
    whole shape of an input without rows."""
    found = {port.name: list(port.shape[port.has_rows :]) for port in signature.inputs}
    for dimension, size in zip(dimensions, sizes, strict=True):
        for name, place in dimension.ports:
            found[name][place] = size
    opened = {name for dimension in dimensions for name, _ in dimension.ports}
    return {name: tuple(shape) for name, shape in found.items() if name in opened}


def synthesise(
    signature: Signature, shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0
) -> dict[str, NDArray[np.generic]]:
    """Random inputs of these shapes: floats uniform in [0, 1), other types 0 or 1, which are valid indices of a
    table; 0 alone for inputs without rows, which may be indices of rows, and a usual rate for a sample rate."""
    generator = np.random.default_rng(seed)
    made: dict[str, NDArray[np.generic]] = {}
    for port in signature.inputs:
        shape = shapes[port.name]
        if port.datatype == "BYTES":
            made[port.name] = np.full(shape, b"a", dtype=object)
        elif port.datatype == "BF16":
            made[port.name] = bfloats_of(generator.random(shape, np.float32))
        elif port.datatype.startswith("FP"):
            made[port.name] = generator.random(shape).astype(NUMPY_TYPES[port.datatype])
        elif port.has_rows:
            made[port.name] = generator.integers(0, 2, shape).astype(NUMPY_TYPES[port.datatype])
        else:
            value = SAMPLE_RATE_HZ if SAMPLE_RATE.search(port.name.lower()) else 0
            made[port.name] = np.full(shape, value, NUMPY_TYPES[port.datatype])
    return made


# ONNX models.


class OnnxSession:
    """An ONNX model on the CPU or on a GPU; a `Session`."""

    joins_rows: bool | None = None

    def __init__(
        self,
        path: Path,
        threads: int,
        *,
        optimise: bool = True,
        opened: Any = None,  # noqa: ANN401
        device: CudaDevice | None = None,
    ) -> None:
        """`opened` is ONNX Runtime's session of the file, if it is open already."""
        self._session = opened or open_session(path, threads, optimise=optimise, device=device)
        self.signature = signature_of(self._session, path)
        self.dimension_names: Mapping[tuple[str, int], str] = {
            (given.name, place): name
            for given in self._session.get_inputs()
            for place, name in enumerate(given.shape)
            if isinstance(name, str)
        }
        with_cuda = ", CUDA" if device is not None else ""
        self.software = f"ONNX Runtime {onnx_runtime().__version__}{with_cuda}{operators.software()}"
        self._file, self._threads = (path if opened is None else None), threads
        """The file, if it is known to be what the session was opened from."""
        self._names = [port.name for port in self.signature.outputs]
        self._pruned: dict[Places, Any] = {}
        inputs = [*self.signature.inputs, *self.signature.optional]
        self._texts = [port.name for port in inputs if port.datatype == "BYTES"]
        self._bfloats = [port.name for port in inputs if port.datatype == "BF16"]
        self._returns_bfloats = any(port.datatype == "BF16" for port in self.signature.outputs)
        if self._texts and self._returns_bfloats:
            what = "it has text as an input and BF16 as an output, which ONNX Runtime cannot exchange together"
            raise InputError(what, where=str(path), help="let it return FP32: add a Cast to the end of the graph")

    def example(self, rows: int) -> None:
        """None: an ONNX file contains no example."""

    def prune(self, outputs: Places, warm: Callable[[RunFeed], None] = lambda run: None) -> bool:
        """From now on, compute only these outputs in passes that need no others. Returns whether that saves anything.
        `warm` is called first, with the function that runs the new session.

        ONNX Runtime computes all of a graph, whatever is fetched (1.32: `only_execute_path_to_fetches` has no effect on
        the CPU). So a session of the part of the graph that is needed is opened beside the first one, and holds its
        own copy of the weights. That is not done for files of more than `PRUNED_BYTES_MAX`.
        """
        if self._file is None or self._file.stat().st_size > PRUNED_BYTES_MAX:
            return False
        model = read_onnx(self._file)
        if has_external_weights(model) or not keep_outputs(model, [self._names[place] for place in outputs]):
            return False
        ort = onnx_runtime()
        providers = ["CPUExecutionProvider"]
        opened = ort.InferenceSession(model.SerializeToString(), _options(self._threads), providers=providers)
        ports = [self.signature.outputs[place] for place in outputs]
        warm(lambda feed: self._run(opened, self._given(feed), ports))
        self._pruned[outputs] = opened
        return True

    def shrink(self, feed: Mapping[str, Array]) -> None:
        """Run a small batch, and give back the memory that larger ones took."""
        options = onnx_runtime().RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        if self._bfloats or self._returns_bfloats:
            return
        given = self._given(feed)
        for session in (self._session, *self._pruned.values()):
            read = [port.name for port in session.get_inputs()]
            session.run(None, {name: given[name] for name in read}, options)

    def run(self, feed: Mapping[str, Array], outputs: Places = ()) -> list[Array]:
        """One forward pass. TextError for text that is not UTF-8."""
        feed = self._given(feed)
        if not outputs:
            return self._run(self._session, feed, self.signature.outputs)
        session, ports = self._pruned.get(outputs, self._session), [self.signature.outputs[n] for n in outputs]
        found = [NOTHING] * len(self._names)
        for place, made in zip(outputs, self._run(session, feed, ports), strict=True):
            found[place] = made
        return found

    def _given(self, feed: Mapping[str, Array]) -> Mapping[str, Any]:
        """The feed with text and BF16 as ONNX Runtime takes them."""
        if self._texts:
            feed = {**feed, **{name: decoded(name, feed[name]) for name in self._texts if name in feed}}
        if self._bfloats:  # which ONNX Runtime does not take as NumPy arrays
            make = onnx_runtime().OrtValue.ortvalue_from_numpy_with_onnx_type
            given = [name for name in self._bfloats if name in feed]
            return {**feed, **{name: make(np.ascontiguousarray(feed[name]), ONNX_BFLOAT16) for name in given}}
        return feed

    def _run(self, session: Any, feed: Mapping[str, Any], ports: Sequence[Port]) -> list[Array]:  # noqa: ANN401
        names = [port.name for port in ports]
        if not self._returns_bfloats:
            return session.run(names, feed)  # type: ignore[no-any-return]  # a class without types
        # ONNX Runtime does not return BF16 as NumPy arrays.
        make = onnx_runtime().OrtValue.ortvalue_from_numpy
        given = {name: make(value) if isinstance(value, np.ndarray) else value for name, value in feed.items()}
        found: list[Array] = []
        for port, value in zip(ports, session.run_with_ort_values(names, given), strict=True):
            if port.datatype == "BF16":
                raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
                found.append(np.frombuffer(raw, np.uint16).reshape(value.shape()))
            else:
                found.append(value.numpy())
        return found


class TextError(ValueError):
    """An input text is not UTF-8."""


def decoded(name: str, array: Array) -> Array:
    """BYTES as text, which is what ONNX Runtime takes."""
    found = np.empty(array.size, dtype=object)
    try:
        found[:] = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise TextError(f"input {name!r} is not UTF-8 text ({error.reason})") from None
    return found.reshape(array.shape)


def onnx_runtime() -> Any:  # noqa: ANN401  # a module without types
    """ONNX Runtime, imported on first use: the import takes 0.3 s, which Python models do not need.

    It sends nothing to its maker unless the environment says so (`ORT_DISABLE_TELEMETRY=0`).
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415

    return onnxruntime


class ModelBytes(NamedTuple):
    """An ONNX model that was read into memory: its file, and the other files with its weights, by name."""

    own: bytes
    others: Mapping[str, bytes]


def open_session(
    path: Path,
    threads: int,
    *,
    optimise: bool = True,
    device: CudaDevice | None = None,
    content: ModelBytes | None = None,
) -> Any:  # noqa: ANN401  # a class without types
    """An ONNX Runtime session as a replica uses it, on the CPU or on the GPU of this process; of `content` if it is
    given, which was read from `path`. InputError for an unusable file, MachineError for a GPU that cannot be used.

    Its idle threads sleep: spinning, the default, would take CPU time from the edges and from other replicas.
    """
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), help="give the path of an ONNX model")
    ort, options = onnx_runtime(), _options(threads)
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    given: str | bytes = str(path)
    if content is not None:
        given = content.own
        _add_weights(options, path, content.others)
    if device is not None:
        return _cuda_session(ort, path, given, options, device)
    try:
        return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class; each of them means an unusable model
        raise _unusable(path, str(error)) from error


def _options(threads: int) -> Any:  # noqa: ANN401
    options = onnx_runtime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    operators.add_to(options)
    return options


def _add_weights(options: Any, path: Path, others: Mapping[str, bytes]) -> None:  # noqa: ANN401
    """Give ONNX Runtime the contents of the other files of a model, which it copies when the session is made."""
    if not others:
        return
    add = getattr(options, "add_external_initializers_from_files_in_memory", None)
    if add is None:
        what = f"ONNX Runtime {onnx_runtime().__version__} cannot take weights that lie in other files from memory"
        raise InputError(what, where=str(path), help="free space for a copy of it, or install a newer ONNX Runtime")
    add(list(others), list(others.values()), list(map(len, others.values())))


def _cuda_session(ort: Any, path: Path, given: str | bytes, options: Any, device: CudaDevice) -> Any:  # noqa: ANN401
    """A session on the only GPU that this process sees; operators that CUDA lacks run on the CPU.

    If it cannot have the GPU, ONNX Runtime would print a line and compute on the CPU, at another speed than planned; so
    its fall-backs are switched off. A process has one session, and thereby one stream.
    """
    check_cuda()
    if hasattr(ort, "preload_dlls"):  # CUDA's libraries from the packages of the extra, if they are there
        ort.preload_dlls()
    settings = {
        "device_id": 0,
        # The default doubles the memory at each extension, and so takes up to twice what the profile says.
        "arena_extend_strategy": "kSameAsRequested",
        # The default tries all algorithms at each new batch size, inside the deadline of the first request.
        "cudnn_conv_algo_search": "HEURISTIC",
    }
    if device.memory_bytes:
        settings["gpu_mem_limit"] = device.memory_bytes
    try:
        session = ort.InferenceSession(
            given, options, providers=[(CUDA_PROVIDER, settings), "CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # as in `open_session`
        raise failure_on(device, str(error)) or _unusable(path, str(error)) from error
    session.disable_fallback()
    if CUDA_PROVIDER not in session.get_providers():
        what = (
            f"ONNX Runtime {ort.__version__} could not load its {CUDA_PROVIDER}: libraries of CUDA or cuDNN are missing"
        )
        raise MachineError(what, help="get them by pip install 'onnxruntime-gpu[cuda,cudnn]'")
    return session


def check_cuda() -> None:
    """MachineError if the installed ONNX Runtime cannot compute on GPUs."""
    ort = onnx_runtime()
    if CUDA_PROVIDER in ort.get_available_providers():
        return
    what = f"ONNX Runtime {ort.__version__} has no {CUDA_PROVIDER}"
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # 25 ms

    try:
        version("onnxruntime-gpu")
    except PackageNotFoundError:
        raise MachineError(what, help=CUDA_ALONE) from None
    what += "; onnxruntime-gpu is installed, but the files of onnxruntime, installed beside it, have replaced its own"
    raise MachineError(what, help=CUDA_ALONE)


def inferred_types(content: bytes, path: Path) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
    """The outputs of an ONNX model that is given as bytes, with the types and shapes that ONNX Runtime infers: its name
    of the type, and for each dimension a size, a name, or None. `path` is where the model comes from. InputError if
    ONNX Runtime cannot load it."""
    ort = onnx_runtime()
    options = ort.SessionOptions()
    operators.add_to(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as in `open_session`
        raise _unusable(path, str(error)) from error
    return {made.name: (made.type, tuple(made.shape)) for made in session.get_outputs()}


BY_INPUTS: Final = re.compile(
    r"out of (?:data )?bounds|out of range|within the inclusive range|reshape|broadcast|dimension|mismatch|by zero|"
    r"(?:must|should) be|invalid|"
    r"\b(?:shape|dims?|rank|axis|axes|size|sizes|length)\b",
    re.IGNORECASE,
)
NO_NUMBER: Final = re.compile(r"sto(?:[dfil]|ll|ul|ull)\.?")
"""What a cast of text says: the function of C++ that could not read a number."""
BY_MACHINE: Final = re.compile(r"alloc|memory|cuda|cudnn|cublas|NOT_IMPLEMENTED|not implemented", re.IGNORECASE)


def fault_of_inputs(error: BaseException) -> str:
    """Why an ONNX model cannot run on its inputs, in one line for the client; empty if the inputs are not, or not
    certainly, the cause.

    They are if a node reports a value out of range, such as an index, or sizes that do not fit each other. They are not
    if it reports a lack of memory, a GPU that fails, or anything else.
    """
    if isinstance(error, TextError):
        return str(error)
    if not is_of_onnx_runtime(error):
        return ""
    failure = NodeFailure.of(" ".join(str(error).partition("Please fix")[0].split()))
    said = failure.said
    if NO_NUMBER.fullmatch(said):
        said = "invalid number in a text"
    is_refused = type(error).__name__ == "InvalidArgument" or (failure.op and BY_INPUTS.search(said))
    if not is_refused or BY_MACHINE.search(str(error)):
        return ""
    said = said[:REASON_CHARS_MAX].strip().rstrip(".")
    return f"the model cannot run on these inputs: {f'{failure.op}: ' if failure.op else ''}{said}"


NEWER: Final = re.compile(
    r"Opset (?P<opset>\d+) is under development.*is till opset (?P<opset_most>\d+)|"
    r"Unsupported model IR version: (?P<ir>\d+), max supported IR version: (?P<ir_most>\d+)",
    re.DOTALL,
)
ABSENT: Final = re.compile(r'External data path does not exist: "(?P<file>[^"]*)"')
LOCALE: Final = re.compile(r"Failed to construct locale with name:\s*([\w.@-]+)")


def _unusable(path: Path, message: str) -> InputError:
    reason = runtime_reason(message, 300)
    if "INVALID_PROTOBUF" in message or "No graph was found" in message:
        with suppress(OSError), path.open("rb") as file:
            return no_model(file.read(len(LFS)), str(path))
        return no_model(b"?", str(path))
    if absent := ABSENT.search(message):
        what, help_text = f"its weights are in {absent['file']}, which is missing", "copy that file with the model"
    elif newer := NEWER.search(message):
        kind = "opset" if newer["opset"] else "IR version"
        its, most = newer["opset"] or newer["ir"], newer["opset_most"] or newer["ir_most"]
        what = f"its {kind} is {its}, and ONNX Runtime {onnx_runtime().__version__} reads up to {most}"
        help_text = f"export it with {kind} {most} or lower, or install a newer onnxruntime"
    elif "NOT_IMPLEMENTED" in message or "No Op registered" in message or "is not a registered function" in message:
        what = f"an operator that ONNX Runtime {onnx_runtime().__version__} does not have: {reason}"
        help_text = (
            "export it with another opset, replace the operator, or name the library that has it: `operators:` of the "
            f"stage, --operators of `sloop profile`; for example {operators.EXTENSIONS}"
        )
    elif named := LOCALE.search(message):
        what = f"its text operators need the locale {named[1]}, which this machine does not have"
        language, _, encoding = named[1].partition(".")
        made = f"localedef -i {language} -f {encoding or 'UTF-8'} {named[1]}"
        help_text = f"make it, as root: `{made}`, on Debian and Ubuntu after `apt-get install locales`"
    else:
        what, help_text = f"ONNX Runtime cannot load it: {reason}", "check it with `python -m onnx.checker FILE`"
    return InputError(what, where=str(path), help=help_text)


def read_signature(path: Path) -> Signature:
    """The inputs and outputs of an ONNX file. InputError if it is missing, broken or of an unsupported datatype."""
    return signature_of(open_session(path, 1, optimise=False), path)


def signature_of(session: Any, path: Path) -> Signature:  # noqa: ANN401
    """The inputs and outputs of an ONNX Runtime session loaded from `path`."""
    optional = [given for given in session.get_overridable_initializers() if given.type in DATATYPES]
    return Signature.of(
        [_onnx_port(given, path) for given in session.get_inputs()],
        [_onnx_port(given, path) for given in session.get_outputs()],
        [_onnx_port(given, path) for given in optional] if len(optional) <= OPTIONAL_MAX else (),
    )


def _onnx_port(given: Any, path: Path) -> Port:  # noqa: ANN401
    if given.type not in DATATYPES:
        help_text = f"let the graph Cast it from or to one of {', '.join(DATATYPES)}"
        if given.type.startswith("seq(map"):
            help_text = "export it as a tensor; with skl2onnx: to_onnx(…, options={'zipmap': False})"
        elif given.type.startswith("seq("):
            help_text = (
                "requests and answers hold tensors: make each element an input or output of its own (SequenceAt), or "
                "join them in the graph (ConcatFromSequence)"
            )
        elif given.type.startswith("optional("):
            help_text = "requests and answers hold tensors: export it without Optional"
        raise InputError(f"{given.name!r} is of type {given.type}", where=str(path), help=help_text)
    return Port(given.name, DATATYPES[given.type], tuple(d if isinstance(d, int) else -1 for d in given.shape))


# Models in Python.


class PythonSession:
    """An object of the file's class `Model`; a `Session`.

    InputError if the class does not follow the protocol in the module docstring.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self._loop: AbstractEventLoop | None = None
        declared = model_class(path)
        self._path = path = user_path(path)
        self.signature = Signature.of(_python_ports(declared, "inputs", path), _python_ports(declared, "outputs", path))
        self.joins_rows = _joins_rows(declared, self.signature, path)
        self.dimension_names: Mapping[tuple[str, int], str] = {
            (name, place): size
            for name, (_, sizes) in declared.inputs.items()
            for place, size in enumerate(sizes)
            if isinstance(size, str)
        }
        if not callable(getattr(declared, "run", None)):
            raise InputError("class 'Model' has no method 'run'", where=str(path), help=f"give it {CLASS_EXAMPLE}")
        try:
            self._model = declared(threads) if _takes_threads(declared) else declared()
            self.software = str(getattr(self._model, "software", ""))
        except raised_by_users() as error:  # the author's code
            raise_user_error(error, path, "its class 'Model' cannot be made")
        _check_order(self._model.run, [port.name for port in self.signature.inputs], path)

    def example(self, rows: int) -> dict[str, Array] | None:
        """The result of the class's `example` method, checked against `inputs`; None if it has no such method."""
        if not hasattr(self._model, "example"):
            return None
        try:
            made = _declared_arrays(self._awaited(self._model.example(rows)), self.signature.inputs, "example")
        except raised_by_users() as error:
            raise_user_error(error, self._path, "its 'example' fails")
        feed = {port.name: array for port, array in zip(self.signature.inputs, made, strict=True)}
        for port, array in zip(self.signature.inputs, made, strict=True):
            if port.shape and port.has_rows and len(array) != rows:
                raise InputError(
                    f"its 'example' of {rows} rows returns {len(array)} rows of input {port.name!r}",
                    where=str(self._path),
                    help="measure --batches 1" if port.shape[0] == 1 else "return as many rows as are asked for",
                )
        return feed

    def run(self, feed: Mapping[str, Array], outputs: Places = ()) -> list[Array]:
        """One forward pass, with all outputs. WrongOutputsError if the outputs are not the declared ones."""
        inputs = [feed[port.name] for port in self.signature.inputs]
        made = self._awaited(self._model.run(*inputs))
        try:
            found = _declared_arrays(made, self.signature.outputs, "run")
            if self.joins_rows and inputs:
                _check_rows(found, self.signature.outputs, len(inputs[0]))
        except WrongOutputsError as error:
            raise WrongOutputsError(f"{error}{self._place}", is_certain=error.is_certain) from None
        return found

    @property
    def _place(self) -> str:
        """Where `run` is: ` (stage.py:12)`."""
        method = self._model.run
        while isinstance(method, functools.partial):
            method = method.func
        code: Any = getattr(inspect.unwrap(method), "__code__", None)
        is_here = code is not None and Path(code.co_filename).name == self._path.name
        return f" ({self._path.name}:{code.co_firstlineno})" if is_here else f" ({self._path.name})"

    def _awaited(self, made: Any) -> Any:  # noqa: ANN401  # the author's
        """The result of a method, which may be a coroutine. All coroutines run on one event loop, which runs only
        here."""
        if isinstance(made, np.ndarray) or not inspect.isawaitable(made):
            return made
        if self._loop is None:
            from asyncio import new_event_loop  # noqa: PLC0415  # few models need it

            self._loop = new_event_loop()
            weakref.finalize(self, self._loop.close)
        return self._loop.run_until_complete(_finished(made))


async def _finished(made: Awaitable[Any]) -> Any:  # noqa: ANN401
    return await made


def model_class(path: Path) -> Any:  # noqa: ANN401  # the author's
    """The class `Model` of a file, which is imported on first use. InputError if that fails or there is none."""
    module = module_in(path)
    declared = getattr(module, "Model", None)
    if not isinstance(declared, type):
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
        classes = [each for each in own if isinstance(each, type)]
        other = next((each.__name__ for each in classes if hasattr(each, "run") or hasattr(each, "inputs")), "")
        what, help_text = "it has no class 'Model'", f"write one with {CLASS_EXAMPLE}"
        if other:
            what, help_text = f"its class is called {other!r}, not 'Model'", "write `class Model:`"
        raise InputError(what, where=str(path), help=help_text)
    return declared


def _check_order(run: Any, inputs: Sequence[str], path: Path) -> None:  # noqa: ANN401  # the author's
    """InputError if the parameters of `run` are called like the inputs, but are in another order: inputs are given by
    position, so it would compute with the wrong ones, and often without an error."""
    try:
        names = list(inspect.signature(run).parameters)[: len(inputs)]
    except (TypeError, ValueError):  # written in C
        return
    if names != list(inputs) and set(names) == set(inputs):
        what = f"run(self, {', '.join(names)}) gets its inputs in the order of `inputs`: {', '.join(inputs)}"
        raise InputError(what, where=str(path), help=f"write `def run(self, {', '.join(inputs)})`")


def _takes_threads(declared: Any) -> bool:  # noqa: ANN401
    """Whether the class is made with the number of threads, or without arguments."""
    try:
        inspect.signature(declared).bind(1)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _python_ports(declared: Any, kind: str, path: Path) -> tuple[Port, ...]:  # noqa: ANN401
    given = getattr(declared, kind, None)
    if not isinstance(given, Mapping) or not given:
        what = f"class 'Model' declares no {kind!r}" if not given else f"{kind!r} of class 'Model' is not a mapping"
        raise InputError(what, where=str(path), help=f"give it {CLASS_EXAMPLE}")
    return tuple(_python_port(name, port, kind, path) for name, port in given.items())


def _python_port(name: object, given: object, kind: str, path: Path) -> Port:
    match name, given:
        case str(), (str(datatype), [*sizes]) if all(
            isinstance(size, str) or (type(size) is int and (size == -1 or size > 0)) for size in sizes
        ):
            if datatype not in ARRAY_TYPES:
                raise InputError(
                    f"{name!r} is of type {datatype}, which cannot be served",
                    where=str(path),
                    help=f"use one of {', '.join(ARRAY_TYPES)}",
                )
            return Port(name, datatype, tuple(size if isinstance(size, int) else -1 for size in sizes))
    raise InputError(
        f"{name!r} of {kind!r} is {given!r}, not a datatype and a shape",
        where=str(path),
        help='write for example ("FP32", (-1, 3, 224, 224)), with -1 or a name for an open dimension',
    )


def _joins_rows(declared: Any, signature: Signature, path: Path) -> bool | None:  # noqa: ANN401
    joins = getattr(declared, "joins_rows", None)
    if joins not in (None, True, False):
        raise InputError(f"'joins_rows' is {joins!r}", where=str(path), help="write True or False, or leave it out")
    for port in (*signature.inputs, *signature.outputs):
        if joins and port.shape[:1] != (-1,):
            what = f"'joins_rows' is True, but the first dimension of {port.name!r} is not open"
            raise InputError(what, where=str(path), help="make it -1, or leave 'joins_rows' out")
    return None if joins is None else bool(joins)


def _declared_arrays(given: Any, ports: Sequence[Port], method: str) -> list[Array]:  # noqa: ANN401
    """Convert the result of `run` or `example` (a mapping, a sequence or one array) to arrays in the order of `ports`.

    WrongOutputsError if they are not the declared arrays.
    """
    names = [port.name for port in ports]
    if isinstance(given, Mapping):
        if given.keys() != set(names):
            what = f"'{method}' returns {sorted(map(str, given))}; {names} are declared"
            raise WrongOutputsError(f"{what}: return these, with these names")
        arrays = [given[name] for name in names]
    elif isinstance(given, tuple | list):
        arrays = list(given)
    else:
        arrays = [given]
    if len(arrays) != len(ports):
        if isinstance(given, list) and not any(isinstance(each, np.ndarray) for each in given):
            what = f"'{method}' returns a list of {len(arrays)}, not NumPy arrays; {names} are declared"
            raise WrongOutputsError(f"{what}: return {_converted(ports[0], '…')}")
        what = f"'{method}' returns {len(arrays)} arrays; {len(ports)} are declared: {names}"
        raise WrongOutputsError(f"{what}; return one for each, in this order")
    return [_declared_array(array, port, method) for array, port in zip(arrays, ports, strict=True)]


def _declared_array(array: Any, port: Port, method: str) -> Array:  # noqa: ANN401
    """One of the arrays. WrongOutputsError if it is not as declared."""
    if not isinstance(array, np.ndarray):
        what = f"'{method}' returns {port.name!r} as {type(array).__name__}, not as a NumPy array"
        raise WrongOutputsError(f"{what}: {_remedy(array, port)}")
    found: Array = array
    strange = []
    is_right = found.dtype == ARRAY_TYPES[port.datatype]
    if port.datatype == "BYTES" and found.dtype.kind in "OSU":
        found = found.astype(object)
        strange = [each for each in found.flat if not isinstance(each, bytes | str)]
        is_right = not strange
    has_rank = len(found.shape) == len(port.shape)
    if is_right and has_rank and all(size in (-1, there) for size, there in zip(port.shape, found.shape, strict=True)):
        return found
    of = f" of {type(strange[0]).__name__}" if strange else ""
    what = f"'{method}' returns {port.name!r} as {found.dtype}{of}{list(found.shape)}"
    what += f", declared as {port.kind}"
    remedy = "return that shape, or declare the other one"
    if not is_right:
        is_plain = port.datatype in NUMPY_TYPES
        remedy = f"{port.name}.astype({_numpy_name(port)})" if is_plain else _converted(port, port.name)
        remedy = f"return {remedy}"
    raise WrongOutputsError(f"{what}: {remedy}", is_certain=not is_right or not has_rank)


def _check_rows(outputs: Sequence[Array], ports: Sequence[Port], rows: int) -> None:
    """WrongOutputsError if an output does not have as many rows as the inputs."""
    for port, array in zip(ports, outputs, strict=True):
        if len(array) != rows:
            found = f"{counted(len(array), 'row')} of {port.name!r} for {counted(rows, 'row')} of input"
            raise WrongOutputsError(f"'run' returns {found}: return as many, or leave 'joins_rows' out")


def _numpy_name(port: Port) -> str:
    return "object" if port.datatype == "BYTES" else f"np.{ARRAY_TYPES[port.datatype].name}"


def _converted(port: Port, name: str) -> str:
    """The expression with which an author makes the array of an output."""
    return f"np.asarray({name}, {_numpy_name(port)})"


def _remedy(made: Any, port: Port) -> str:  # noqa: ANN401
    """What to do about a result that is not an array."""
    if made is None:
        return "it needs a `return`"
    if inspect.isgenerator(made) or inspect.isasyncgen(made):
        return "write `return` instead of `yield`"
    if inspect.isawaitable(made):
        return "await it"
    if hasattr(made, "detach") and hasattr(made, "numpy"):
        return f"return {port.name}.detach().cpu().numpy()"
    return f"return {_converted(port, port.name)}"
