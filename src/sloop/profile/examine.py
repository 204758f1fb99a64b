"""Checks whether requests can share a forward pass of a model, and opens a batch dimension that was fixed.

Joining requests along the first dimension is correct only if each row of a batch gets the outputs it gets alone. An
open first dimension does not imply that: it may be a sequence length, or a softmax may run across the rows. So the
model is run on two rows together and on each alone, unless its author states the answer (`Session.joins_rows`).

Python models are examined in a separate process, `python -m sloop.profile.examine MODEL SHAPES`, which prints one line
of JSON: the caller never imports the author's code and its libraries. Anything that code prints goes to stderr.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.profile.model import (
    Session,
    feed_for,
    input_shapes,
    is_python,
    open_model,
    open_session,
    signature_of,
    synthesise,
)
from sloop.tensor import Signature

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

EXAMINE_S_MAX: Final = 300.0
"""Limit for importing a Python file, creating its model and running two rows."""
ROWS_TRIED: Final = 2
BATCHES_TRIED: Final = 3
"""Batches of the original model that are joined to test the model whose batch dimension was opened."""
TOLERANCES: Final = {"f2": 1e-2, "f4": 1e-3, "f8": 1e-3}
"""Allowed difference by NumPy type, relative to the largest value of an output: kernels for a larger batch add in
another order. Integers must be equal."""


class ExaminedModel(Struct, frozen=True, tag="examined"):
    """A model that can be run. `obstacle` says why rows cannot be joined; it is empty if they can."""

    signature: Signature
    obstacle: str


class RefusedModel(Struct, frozen=True, tag="refused"):
    """A model that cannot be run: the fields of an InputError, sent between processes."""

    what: str
    where: str
    help: str


def examine(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> tuple[Signature, str]:
    """The model's signature, and why rows cannot be joined; the reason is empty if they can or it could not be tried.

    `shapes` gives one row's shape for inputs with further open dimensions. InputError for an unusable file,
    MachineError if the examining process dies.
    """
    if not is_python(path):
        return examine_here(path, shapes or {})
    command = [sys.executable, "-P", "-m", __name__, str(path), msgspec.json.encode(shapes or {}).decode()]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=EXAMINE_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        what = f"importing and running it took more than {EXAMINE_S_MAX:g} s"
        raise InputError(
            what, where=str(path), help="do less when the file is imported and 'Model' is created"
        ) from error
    try:
        found = msgspec.json.decode(done.stdout, type=ExaminedModel | RefusedModel)
    except msgspec.DecodeError as error:
        what = f"the process that examined {str(path)!r} ended with exit status {done.returncode}"
        raise MachineError(what, help="see its messages above; it may have run out of memory") from error
    if isinstance(found, RefusedModel):
        raise InputError(found.what, where=found.where, help=found.help)
    return found.signature, found.obstacle


def examine_here(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Signature, str]:
    """`examine`, without a separate process. InputError if a model fails on its own example."""
    session = open_model(path, 1, optimise=False)
    example = session.example(1)
    if example is not None:
        try:
            session.run(example)
        except Exception as error:  # the author's code
            what = f"it fails on its own example: {type(error).__name__}: {error}"
            raise InputError(what, where=str(path), help="correct 'run', 'outputs' or 'example'") from error
    return session.signature, obstacle_to_joining(session, shapes, where=str(path))


def check_rows(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise InputError if rows of the model cannot be joined: batches above 1 are then not worth measuring."""
    reason = examine(path, shapes)[1]
    if reason:
        opened = "" if is_python(path) else "; --free-batch may open a batch that was fixed"
        raise InputError(
            f"{reason}, so that requests cannot share a forward pass",
            where=str(path),
            help=f"measure single requests with --batches 1{opened}",
        )


def obstacle_to_joining(session: Session, shapes: Mapping[str, tuple[int, ...]], *, where: str) -> str:
    """Why rows cannot be joined; empty if they can, or if no inputs are known to test it with.

    Inputs are unknown if a further dimension is open, `shapes` does not give its size and the model has no example.
    """
    signature = session.signature
    for port in (*signature.inputs, *signature.outputs):
        if port.shape[:1] != (-1,):
            return f"the first dimension of {port.name!r} {list(port.shape)} is not open"
    if session.joins_rows is not None:
        return "" if session.joins_rows else "its author says that its rows cannot be joined"
    try:
        inputs = feed_for(session, ROWS_TRIED, shapes, where=where)
        alone = [
            session.run({name: value[row : row + 1] for name, value in inputs.items()}) for row in range(ROWS_TRIED)
        ]
    except Exception:  # open dimensions, or a model that refuses random inputs: no answer
        return ""
    try:
        together = session.run(inputs)
    except Exception as error:  # exceptions of frameworks share no base class
        return f"two rows at once fail: {str(error).splitlines()[0][:200]}"
    for place, port in enumerate(signature.outputs):
        if not _same(together[place], [one[place] for one in alone]):
            return f"output {port.name!r} of two rows at once differs from that of each row alone"
    return ""


def _same(together: Any, alone: Sequence[Any]) -> bool:  # noqa: ANN401  # arrays of any type
    """Whether the joined output equals the separate outputs concatenated, within rounding."""
    many, parts = np.asarray(together), [np.asarray(one) for one in alone]
    if not many.ndim or any(part.shape != (len(many) // len(parts), *many.shape[1:]) for part in parts):
        return False
    joined = np.concatenate(parts)
    if many.shape != joined.shape:
        return False
    tolerance = TOLERANCES.get(joined.dtype.str[1:])
    if tolerance is None:
        return bool(np.array_equal(many, joined))
    scale = float(np.abs(np.nan_to_num(joined, posinf=0.0, neginf=0.0)).max(initial=0.0)) or 1.0
    return bool(np.allclose(many, joined, rtol=0.0, atol=tolerance * scale, equal_nan=True))


# Opening a batch dimension that was fixed when the model was exported.


def free_batch(path: Path, target: Path, *, shapes: dict[str, tuple[int, ...]] | None = None) -> Signature:
    """Write the ONNX model at `path` to `target` with an open batch dimension, and return its new signature.

    Opens the first dimension of inputs and outputs, and every constant `Reshape` target between them that contains the
    batch size. Anything else that fixes it (an `Expand` to a constant shape, an LSTM's initial state) makes the test
    fail: the new model is written only if several joined batches give the same outputs as the original gives them
    separately. A model whose batch is already open is copied. `shapes` gives the row shape of inputs with further open
    dimensions. InputError if the batch cannot be opened, MachineError without the `onnx` package (the `demo` extra).
    """
    onnx = _onnx()
    batch = signature_of(open_session(path, 1), path).fixed_batch
    model = onnx.load(str(path))
    if batch is not None:
        open_batch_dimension(model, batch)
    with TemporaryDirectory() as folder:
        trial = Path(folder) / "trial.onnx"
        onnx.save(model, str(trial))
        signature = _check_freed(path, trial, batch or 1, shapes or {})
        try:
            target.write_bytes(trial.read_bytes())
        except OSError as error:
            raise MachineError(f"cannot write {str(target)!r}: {error.strerror}", help="give another path") from error
    return signature


def _onnx() -> Any:  # noqa: ANN401  # a module
    try:
        import onnx  # noqa: PLC0415  # optional, and slow to import
    except ImportError as error:
        raise MachineError("opening a batch needs the onnx package", help="pip install 'sloop-serve[demo]'") from error
    return onnx


def open_batch_dimension(model: "ModelProto", batch: int) -> None:
    """Open, in place, the first dimension of everything that depends on an input whose batch is fixed to `batch`."""
    graph = model.graph
    constants = _constants(graph)
    dependent: set[str] = set()
    for port in graph.input:
        dims = port.type.tensor_type.shape.dim
        if port.name not in constants and dims and dims[0].dim_value == batch:
            dims[0].dim_param = "batch"
            dependent.add(port.name)
    for node in graph.node:
        if dependent.intersection(node.input):
            dependent.update(node.output)
            if node.op_type == "Reshape" and node.input[0] in dependent and node.input[1] in constants:
                _open_reshape(graph, node, [int(size) for size in constants[node.input[1]]], batch)
    for port in graph.output:
        dims = port.type.tensor_type.shape.dim
        if port.name in dependent and dims and dims[0].dim_value == batch:
            dims[0].dim_param = "batch"
    del graph.value_info[:]  # recorded shapes of intermediate tensors, which are wrong now


def _constants(graph: "GraphProto") -> dict[str, Any]:
    """Values of initialisers and `Constant` nodes by name; empty for large ones, which cannot be shapes."""
    from onnx import numpy_helper  # noqa: PLC0415

    found: dict[str, Any] = {}
    for tensor in graph.initializer:
        found[tensor.name] = numpy_helper.to_array(tensor) if len(tensor.dims) == 1 and tensor.dims[0] < 16 else ()
    for node in graph.node:
        if node.op_type == "Constant":
            given = node.attribute[0]
            found[node.output[0]] = numpy_helper.to_array(given.t) if given.name == "value" else list(given.ints)
    return found


def _open_reshape(graph: "GraphProto", node: "NodeProto", target: list[int], batch: int) -> None:
    """Replace the leading size of a reshape's target if it is the batch or a multiple of it.

    -1 (infer the size) is right if the other sizes are the sizes of one row. If the target contains a -1 already,
    0 copies the size from the input, which is right if the input's first dimension is the batch.
    """
    from onnx import numpy_helper  # noqa: PLC0415

    if not target or target[0] < 1 or target[0] % batch:
        return
    if -1 not in target[1:]:
        target[0] = -1
    elif target[0] == batch:
        target[0] = 0
    else:
        return
    name = f"{node.output[0]}/free_shape"
    graph.initializer.append(numpy_helper.from_array(np.array(target, dtype=np.int64), name))
    node.input[1] = name


def _check_freed(path: Path, freed: Path, batch: int, shapes: dict[str, tuple[int, ...]]) -> Signature:
    """The signature of the opened model. InputError, naming the output, if its results differ from the original's."""
    remedy = "export it with an open first dimension"
    before, after = open_session(path, 1), open_session(freed, 1)
    signature = signature_of(after, path)
    inputs = synthesise(signature, input_shapes(signature, BATCHES_TRIED * batch, shapes, where=str(path)))
    try:
        together = after.run(None, inputs)
    except Exception as error:  # whatever ONNX Runtime raises, the graph still contains the old batch
        reason = str(error).splitlines()[0][:300]
        raise InputError(f"its batch cannot be opened: {reason}", where=str(path), help=remedy) from error
    slices = [slice(start, start + batch) for start in range(0, BATCHES_TRIED * batch, batch)]
    alone = [
        before.run(None, {name: value[part] if value.ndim else value for name, value in inputs.items()})
        for part in slices
    ]
    for place, port in enumerate(signature.outputs):
        if not _same(together[place], [outputs[place] for outputs in alone]):
            what = f"its batch cannot be opened: output {port.name!r} of joined rows differs from that of each alone"
            raise InputError(what, where=str(path), help=remedy)
    return signature


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process that examines a Python model; see the module docstring."""
    path, shapes = arguments
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        try:
            rows = msgspec.json.decode(shapes, type=dict[str, tuple[int, ...]])
            found: ExaminedModel | RefusedModel = ExaminedModel(*examine_here(Path(path), rows))
        except InputError as error:
            found = RefusedModel(error.what.removeprefix(f"{error.where}: "), error.where, error.help)
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1:])
