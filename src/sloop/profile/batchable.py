"""Frees a model whose batch was fixed when it was exported, so that requests can be batched.

Promises that a freed model gives for every row of a batch what it gave for the row alone, tried before it is kept;
a model where that cannot be had is refused. Needs the `onnx` package (the `demo` extra), imported when first used.

What is freed: the first dimension of inputs and outputs, and constant targets of `Reshape` on the way between them that
spell the batch out. Other operators that fix the batch (an `Expand` to a constant shape, the initial state of an LSTM)
make the trial fail, and the message says so.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from sloop.errors import InputError, MachineError
from sloop.profile.inputs import input_shapes, synthesise
from sloop.profile.model import open_session, signature_of
from sloop.tensor import Signature

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

ROWS = 3
TOLERANCE = 1e-3
"""Relative to the largest value of an output: a batch takes other kernels, which add up in another order."""


def free_batch(path: Path, target: Path, *, shapes: dict[str, tuple[int, ...]] | None = None) -> Signature:
    """Write to `target` the model in `path` with an open batch dimension, and return its signature.

    `shapes` gives the row shape of inputs with further open dimensions. InputError where the model cannot be freed;
    MachineError where `onnx` is not installed. An already free model is written as it is.
    """
    onnx = _onnx()
    before = open_session(path, 1)
    batch = signature_of(before, path).fixed_batch
    model = onnx.load(str(path))
    if batch is not None:
        open_model(model, batch)
    with TemporaryDirectory() as folder:
        trial = Path(folder) / "trial.onnx"
        onnx.save(model, str(trial))
        signature = check_rows(path, trial, batch or 1, shapes or {})
        try:
            target.write_bytes(trial.read_bytes())
        except OSError as error:
            raise MachineError(f"cannot write {str(target)!r}: {error.strerror}", help="give another path") from error
    return signature


def _onnx() -> Any:  # noqa: ANN401  # a module
    try:
        import onnx  # noqa: PLC0415  # optional, and slow to import
    except ImportError as error:
        raise MachineError("freeing a batch needs the onnx package", help="pip install 'sloop-serve[demo]'") from error
    return onnx


def open_model(model: "ModelProto", batch: int) -> None:
    """Open, in place, the first dimension of everything that depends on an input whose batch is fixed to `batch`."""
    graph = model.graph
    constants = _constants(graph)
    follows: set[str] = set()
    for port in graph.input:
        dims = port.type.tensor_type.shape.dim
        if port.name not in constants and dims and dims[0].dim_value == batch:
            dims[0].dim_param = "batch"
            follows.add(port.name)
    for node in graph.node:
        if follows.intersection(node.input):
            follows.update(node.output)
            if node.op_type == "Reshape" and node.input[0] in follows and node.input[1] in constants:
                _open_reshape(graph, node, [int(size) for size in constants[node.input[1]]], batch)
    for port in graph.output:
        dims = port.type.tensor_type.shape.dim
        if port.name in follows and dims and dims[0].dim_value == batch:
            dims[0].dim_param = "batch"
    del graph.value_info[:]  # shapes of what lies between, which now are other


def _constants(graph: "GraphProto") -> dict[str, Any]:
    """Values known before the model runs: initialisers and `Constant` nodes, by name; big ones only by name."""
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
    """Replace the leading size of a reshape's target, where it spells out the batch or a multiple of it.

    -1, "whatever is left", is right wherever the other sizes are a row's. Where -1 is taken already, 0 copies the size
    from the input, which is right where the input leads with the batch.
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


def check_rows(path: Path, freed: Path, batch: int, shapes: dict[str, tuple[int, ...]]) -> Signature:
    """Try the freed model: `ROWS` batches at once must give what the fixed model gives one by one.

    Returns the freed model's signature. InputError, naming the output, where they differ.
    """
    cannot = "export it with an open first dimension"
    before, after = open_session(path, 1), open_session(freed, 1)
    signature = signature_of(after, path)
    wide = input_shapes(signature, ROWS * batch, shapes, where=str(path))
    inputs = synthesise(signature, wide)
    try:
        together = after.run(None, inputs)
    except Exception as error:  # whatever ONNX Runtime raises here, the graph still holds the old batch
        reason = str(error).splitlines()[0][:300]
        raise InputError(f"its batch cannot be freed: {reason}", where=str(path), help=cannot) from error
    for row in range(ROWS):
        part = slice(row * batch, (row + 1) * batch)
        alone = before.run(None, {name: value[part] if value.ndim else value for name, value in inputs.items()})
        for port, one, many in zip(signature.outputs, alone, together, strict=True):
            if not _agree(np.asarray(one), np.asarray(many), part):
                what = f"its batch cannot be freed: output {port.name!r} of a batch is not that of its rows"
                raise InputError(what, where=str(path), help=cannot)
    return signature


def _agree(one: Any, many: Any, part: slice) -> bool:  # noqa: ANN401  # arrays of any type
    if not many.ndim or many.shape[0] != ROWS * one.shape[0] or many[part].shape != one.shape:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, many[part]))
    scale = float(np.abs(one).max(initial=0.0)) or 1.0
    return bool(np.allclose(one, many[part], rtol=0.0, atol=TOLERANCE * scale, equal_nan=True))
