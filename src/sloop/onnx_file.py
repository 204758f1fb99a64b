"""ONNX files as messages, and the changes that sloop makes to a graph so that it can be served well.

`open_batch` opens a batch dimension that was fixed when the model was exported; `open_outputs` opens that of the
outputs alone. `replace_zip_maps` replaces the ZipMap nodes of skl2onnx, whose outputs are lists of mappings, by the
tensors that they take. They only edit the message: whether the results stay the same is tested by running both files
(`sloop.profile.examine`).

The messages are described here with the fields that are needed, so that serving does not need the `onnx` package. Every
other field of a file is kept as it is. Source: onnx.proto, version 1.16.
"""

import mmap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

from sloop.errors import InputError, MachineError
from sloop.protobuf import described, fields_in

PACKAGE: Final = "onnx"
_FIELDS: Final[dict[str, tuple[tuple[str, str, int], ...]]] = {
    "Model": (
        *(("ir_version", "int64", 1), ("producer_name", "string", 2), ("producer_version", "string", 3)),
        *(("domain", "string", 4), ("model_version", "int64", 5), ("graph", "Graph", 7)),
        *(("opset_import", "Opset[]", 8), ("metadata_props", "Entry[]", 14), ("functions", "Function[]", 25)),
    ),
    "Opset": (("domain", "string", 1), ("version", "int64", 2)),
    "Entry": (("key", "string", 1), ("value", "string", 2)),
    "Function": (("name", "string", 1), ("domain", "string", 10)),
    "Graph": (
        *(("node", "Node[]", 1), ("name", "string", 2), ("initializer", "Tensor[]", 5), ("input", "Value[]", 11)),
        *(("output", "Value[]", 12), ("value_info", "Value[]", 13), ("sparse_initializer", "Sparse[]", 15)),
    ),
    "Node": (
        *(("input", "string[]", 1), ("output", "string[]", 2), ("name", "string", 3), ("op_type", "string", 4)),
        *(("attribute", "Attribute[]", 5), ("domain", "string", 7)),
    ),
    "Attribute": (
        *(("name", "string", 1), ("f", "float", 2), ("i", "int64", 3), ("s", "bytes", 4), ("t", "Tensor", 5)),
        *(("g", "Graph", 6), ("floats", "float[]", 7), ("ints", "int64[]", 8)),
        *(("strings", "bytes[]", 9), ("tensors", "Tensor[]", 10), ("graphs", "Graph[]", 11)),
    ),
    "Tensor": (
        *(("dims", "int64[]", 1), ("data_type", "int32", 2), ("float_data", "float[]", 4)),
        *(("string_data", "bytes[]", 6), ("int64_data", "int64[]", 7), ("name", "string", 8), ("raw_data", "bytes", 9)),
        *(("double_data", "double[]", 10), ("external_data", "Entry[]", 13), ("data_location", "int32", 14)),
    ),
    "Sparse": (("values", "Tensor", 1), ("indices", "Tensor", 2)),
    "Value": (("name", "string", 1), ("type", "Type", 2)),
    "Type": (("tensor_type", "TensorType", 1), ("sequence_type", "Other", 4)),
    "TensorType": (("elem_type", "int32", 1), ("shape", "Shape", 2)),
    "Shape": (("dim", "Dimension[]", 1),),
    "Dimension": (("dim_value", "int64", 1), ("dim_param", "string", 2)),
    "Other": (),
}
FLOAT: Final = 1
INT64: Final = 7
DOUBLE: Final = 11
"""Element types of tensors."""
EXTERNAL: Final = 1
"""The `data_location` of a tensor that lies in another file."""
GRAPH: Final = 7 << 3 | 2
"""The tag of the field `graph` in an encoded model."""
LOCATION: Final = "location"
"""The key under which such a tensor names its file."""
SHAPE_SIZES_MAX: Final = 16
"""A constant with more elements is no shape."""
ML_DOMAIN: Final = "ai.onnx.ml"

_POOL: Final = DescriptorPool()
_POOL.Add(described("sloop/onnx.proto", PACKAGE, _FIELDS, syntax="proto2"))
_Model: Final[Any] = GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.Model"))


LFS: Final = b"version https://git-lfs"
"""How the file begins that Git LFS puts in place of a large one."""


def read_onnx(path: Path) -> Any:  # noqa: ANN401  # a message, whose fields have no static types
    """The message in an ONNX file; weights in other files are not read. InputError if there is none in it."""
    try:
        return parse_onnx(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), help="check the path") from error


def parse_onnx(content: bytes, where: str) -> Any:  # noqa: ANN401
    """The message in the bytes of an ONNX file. InputError at `where` if there is none in them."""
    try:
        return _Model.FromString(content)
    except DecodeError as error:
        raise no_model(content, where) from error


def no_model(content: bytes, where: str) -> InputError:
    """What to say of a file that is no ONNX model and begins with `content`."""
    if content.startswith(LFS):
        return InputError("only a pointer of Git LFS, not the model", where=where, help="fetch it with `git lfs pull`")
    what = "not an ONNX model, or truncated" if content else "it is empty"
    return InputError(what, where=where, help="export it again")


def unranked_inputs(path: Path) -> tuple[str, ...]:
    """The inputs in an ONNX file that have no shape, not even a number of dimensions, which ONNX Runtime does not tell
    from scalars. InputError if there is no model in it."""
    graph = read_onnx(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    return tuple(
        port.name
        for port in graph.input
        if port.name not in weights
        and port.type.HasField("tensor_type")
        and not port.type.tensor_type.HasField("shape")
    )


def array_in(tensor: Any) -> NDArray[Any]:  # noqa: ANN401
    """The values of a tensor of floats or 64-bit integers. InputError for other types and for values in other files."""
    where = f"tensor {tensor.name!r}"
    kinds = {FLOAT: ("<f4", "float_data"), DOUBLE: ("<f8", "double_data"), INT64: ("<i8", "int64_data")}
    if tensor.data_location == EXTERNAL or tensor.data_type not in kinds:
        is_elsewhere = tensor.data_location == EXTERNAL
        what = "its values lie in another file" if is_elsewhere else "its values are neither floats nor 64-bit integers"
        raise InputError(what, where=where, help="export the model as one file with float weights")
    dtype, field = kinds[tensor.data_type]
    try:
        values = np.frombuffer(tensor.raw_data, dtype) if tensor.raw_data else np.array(getattr(tensor, field), dtype)
        return values.reshape(tuple(tensor.dims))
    except ValueError as error:
        raise InputError("its values do not fill its shape", where=where, help="export the model again") from error


def write_onnx(model: Message, path: Path) -> None:
    """Write the message. MachineError if the file cannot be written."""
    try:
        path.write_bytes(model.SerializeToString())
    except OSError as error:
        raise MachineError(f"cannot write {str(path)!r}: {error.strerror}", help="give another path") from error


def has_external_weights(model: Any) -> bool:  # noqa: ANN401
    """Whether weights lie in other files, whose paths are relative to the folder of the model."""
    return any(tensor.data_location == EXTERNAL for tensor in tensors_in(model.graph))


def external_files(path: Path) -> tuple[str, ...]:
    """The names of the other files with weights of a model, relative to its folder. InputError if it is no model."""
    with path.open("rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise no_model(b"", str(path)) from None
        with content:
            if not _has_graph(content):
                raise no_model(content[: len(LFS)], str(path))
            if content.find(LOCATION.encode()) < 0:  # to parse a model with all its weights in it takes as much memory
                return ()
    return external_names(path.read_bytes(), str(path))


def external_names(content: bytes, where: str) -> tuple[str, ...]:
    """`external_files` of the model in these bytes, which come from `where`."""
    if LOCATION.encode() not in content:
        return ()
    model = parse_onnx(content, where)
    tensors = [tensor for tensor in tensors_in(model.graph) if tensor.data_location == EXTERNAL]
    return tuple(sorted({each.value for tensor in tensors for each in tensor.external_data if each.key == LOCATION}))


def _has_graph(content: mmap.mmap) -> bool:
    """Whether these bytes are fields of a message, the last of which ends with them, with a graph among them: a page of
    a web server is told from a model of many gigabytes at once."""
    found = False
    try:
        for tag, *_ in fields_in(content, 0, len(content)):
            found = found or tag == GRAPH
    except ValueError:
        return False
    return found


# Graphs within graphs: the branches of If, the bodies of loops


def inner_graphs(node: Any) -> Iterator[Any]:  # noqa: ANN401
    """The graphs in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes_in(graph: Any) -> Iterator[Any]:  # noqa: ANN401
    """The nodes of a graph, and of all graphs within them."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from nodes_in(inner)


def tensors_in(graph: Any) -> Iterator[Any]:  # noqa: ANN401
    """The weights of a graph and of all graphs within it, and the tensors in their constants."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in inner_graphs(node):
            yield from tensors_in(inner)


def read_by(node: Any) -> frozenset[str]:  # noqa: ANN401
    """The tensors that a node reads, also those that its inner graphs take from outside."""
    found = set(filter(None, node.input))
    for graph in inner_graphs(node):
        inside = {tensor.name for tensor in graph.initializer} | {port.name for port in graph.input}
        inside |= {tensor.values.name for tensor in graph.sparse_initializer}
        for each in graph.node:
            found |= read_by(each) - inside
            inside.update(each.output)
        found |= {port.name for port in graph.output} - inside
    return frozenset(found)


def keep_outputs(model: Any, names: Collection[str]) -> bool:  # noqa: ANN401
    """Keep only the outputs with these names, and the nodes and weights that they need. Returns whether any node was
    removed."""
    graph = model.graph
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    kept: set[int] = set()
    read: set[str] = set()
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        read.add(name)
        place = makers.get(name)
        if place is not None and place not in kept:
            kept.add(place)
            wanted += read_by(graph.node[place])
    if len(kept) == len(graph.node):
        return False
    for each, left in (
        (graph.node, [node for place, node in enumerate(graph.node) if place in kept]),
        (graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read]),
        (graph.sparse_initializer, [tensor for tensor in graph.sparse_initializer if tensor.values.name in read]),
        (graph.output, [output for output in graph.output if output.name in names]),
    ):
        del each[:]
        each.extend(left)
    return True


# The batch dimension


def open_batch(model: Any, batch: int) -> None:  # noqa: ANN401
    """Open, in place, the first dimension of everything that depends on an input whose batch is fixed to `batch`."""
    graph = model.graph
    constants = _constants(graph)
    dependent: set[str] = set()
    for port in graph.input:
        dims = port.type.tensor_type.shape.dim
        if port.name not in constants and dims and dims[0].dim_value == batch:
            _open(dims[0])
            dependent.add(port.name)
    for node in graph.node:
        if dependent.intersection(node.input):
            dependent.update(node.output)
            if node.op_type == "Reshape" and node.input[0] in dependent and constants.get(node.input[1]):
                _open_reshape(graph, node, list(constants[node.input[1]]), batch)
    for port in graph.output:
        dims = port.type.tensor_type.shape.dim
        if port.name in dependent and dims and dims[0].dim_value == batch:
            _open(dims[0])
    del graph.value_info[:]  # recorded shapes of intermediate tensors, which are wrong now


def open_outputs(model: Any) -> None:  # noqa: ANN401
    """Open, in place, the first dimension of all outputs, which some exporters record as the batch of their example."""
    for port in model.graph.output:
        dims = port.type.tensor_type.shape.dim
        if dims and dims[0].HasField("dim_value"):
            _open(dims[0])


def _open(dimension: Any) -> None:  # noqa: ANN401
    dimension.ClearField("dim_value")
    dimension.dim_param = "batch"


def _constants(graph: Any) -> dict[str, tuple[int, ...]]:  # noqa: ANN401
    """Values of initialisers and `Constant` nodes by name; empty for those that cannot be shapes."""
    found = {tensor.name: _sizes_in(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute:
            given = node.attribute[0]
            found[node.output[0]] = _sizes_in(given.t) if given.name == "value" else tuple(given.ints)
    return found


def _sizes_in(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401
    """The elements of a small one-dimensional INT64 tensor; empty for any other."""
    if tensor.data_type != INT64 or len(tensor.dims) != 1 or not 0 < tensor.dims[0] <= SHAPE_SIZES_MAX:
        return ()
    return tuple(np.frombuffer(tensor.raw_data, "<i8").tolist() if tensor.raw_data else tensor.int64_data)


def _open_reshape(graph: Any, node: Any, target: list[int], batch: int) -> None:  # noqa: ANN401
    """Replace the leading size of a reshape's target if it is the batch or a multiple of it.

    -1 (infer the size) is right if the other sizes are the sizes of one row. If the target contains a -1 already,
    0 copies the size from the input, which is right if the input's first dimension is the batch.
    """
    if target[0] < 1 or target[0] % batch:
        return
    if -1 not in target[1:]:
        target[0] = -1
    elif target[0] == batch:
        target[0] = 0
    else:
        return
    name = f"{node.output[0]}/open_shape"
    graph.initializer.add(name=name, data_type=INT64, dims=[len(target)], int64_data=target)
    node.input[1] = name


# ZipMap


def replace_zip_maps(model: Any) -> dict[str, tuple[str, ...]]:  # noqa: ANN401
    """Replace, in place, every ZipMap by the tensor that it takes; returns the classes of its columns by output."""
    graph = model.graph
    classes: dict[str, tuple[str, ...]] = {}
    for node in graph.node:
        if node.op_type == "ZipMap" and node.domain == ML_DOMAIN:
            classes[node.output[0]] = tuple(
                label.decode(errors="replace") if isinstance(label, bytes) else str(label)
                for attribute in node.attribute
                for label in (*attribute.strings, *attribute.ints)
            )
            node.op_type = "Identity"
            node.ClearField("domain")
            del node.attribute[:]
    for port in graph.output:
        if port.name in classes:
            kind = port.type
            kind.ClearField("sequence_type")
            kind.tensor_type.elem_type = FLOAT
            kind.tensor_type.shape.dim.add(dim_param="batch")
            kind.tensor_type.shape.dim.add(dim_value=len(classes[port.name]))
    return classes
