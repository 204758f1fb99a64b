"""Cuts ONNX models at layer boundaries into pieces, each a valid model of its own, which run one after the other.

The inputs of a piece are the tensors that its nodes read and that were computed before it; its outputs are the tensors
that are read after it. The tensors of a boundary are all that cross it, including those of skip connections, and inputs
of the whole model that a later piece reads. The caller keeps the tensors by name and gives each piece its inputs
(`sloop.profile.layers.PieceChain`). Tensors that do not depend on an input (weights, constants, and what is computed
from these alone) cross no boundary: each piece has its own copy.

A file need not state the types of its tensors. ONNX Runtime infers them from the graph without its large weights, so
the `onnx` package is not needed. A tensor of unknown rank is declared without a shape, which ONNX Runtime accepts.
Weights in other files are copied into one file for each piece.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from google.protobuf.message import EncodeError
from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.onnx_file import EXTERNAL, LOCATION, inner_graphs, nodes_in, read_by, read_onnx, tensors_in, write_onnx
from sloop.profile.model import DATATYPES, Array, inferred_types
from sloop.tensor import ITEM_BYTES, LENGTH_BYTES, Port
from sloop.text import listed

STATED_BYTES_MAX: Final = 1024
"""Larger weights are left out when types are inferred; smaller ones may be shapes, on which types depend."""
REACH: Final = 12
"""A boundary between blocks is crossed by no more tensors than the places within this many layers with weights before
it, or after it. The longest unit with branches in the usual networks (InceptionV3's) has nine such layers."""
ALIGNMENT: Final = 64
COPY_BYTES: Final = 1 << 24
ELEMENT_BITS: Final[Mapping[int, int]] = {
    **{1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16},
    **{17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2},
}
"""`TensorProto.DataType` → bits of one element; text (8) has no fixed size."""
NOT_WEIGHTS: Final = {7, 8, 9}
"""Types of tables and masks (INT64, text, BOOL): a layer that reads only these has no weights."""
RANDOM: Final = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
"""Operators whose result is new each time: two copies would disagree."""


class ModelPiece(Struct, frozen=True):
    """A file with consecutive layers of a model."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    """Its tensors that later pieces read, and its outputs of the whole model."""
    crossing: tuple[str, ...]
    """All tensors that cross its end, its own and older ones; of the last piece, the outputs of the whole model."""
    layers: tuple[str, ...]
    """The names of its nodes that compute from inputs."""
    operators: tuple[str, ...]
    param_bytes: int
    """Its weights; those that other pieces read as well count in each."""
    checksums: dict[str, str] = {}  # msgspec creates a new dict for each instance
    """The SHA-256 of its file and of the one beside it with its weights, by name, if they were computed."""


@dataclass(frozen=True, slots=True)
class _GraphNode:
    """A node of the graph: the tensors that it reads, also in its inner graphs, and those that it computes."""

    place: int
    proto: Any
    name: str
    """No other node has it (`_names_of`)."""
    reads: frozenset[str]
    makes: tuple[str, ...]


class TensorType(NamedTuple):
    """What ONNX Runtime infers about a tensor: the name of its type, and its shape (None if the rank is unknown)."""

    kind: str
    shape: tuple[int | str | None, ...] | None


@dataclass
class LayerGraph:
    """The graph of an ONNX model, to be cut. Nodes that lead to no output, and constants, count as no layers."""

    path: Path
    model: Any = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> "LayerGraph":
        """InputError if the file is no ONNX model, or has nothing that could be cut."""
        found = cls(path, read_onnx(path))
        if not found.layers:
            raise found.error("it has no layers that compute from its inputs", "there is nothing to cut")
        return found

    def error(self, what: str, help: str) -> InputError:
        """An error about this file."""
        return InputError(what, where=str(self.path), help=help)

    @cached_property
    def weights(self) -> dict[str, Any]:
        """Initializers by name."""
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def sparse(self) -> dict[str, Any]:
        """Sparse initializers by name."""
        return {tensor.values.name: tensor for tensor in self.model.graph.sparse_initializer}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the whole model; not the initializers that old files list as inputs too."""
        names = [port.name for port in self.model.graph.input]
        return tuple(name for name in names if name not in self.weights and name not in self.sparse)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Outputs of the whole model, in its order."""
        return tuple(port.name for port in self.model.graph.output)

    @cached_property
    def nodes(self) -> tuple[_GraphNode, ...]:
        """All nodes in topological order: that of the file, as far as it is one. InputError for a tensor that nothing
        makes, or a cycle."""
        protos = self.model.graph.node
        waiting = [
            _GraphNode(place, proto, name, read_by(proto), tuple(filter(None, proto.output)))
            for place, (proto, name) in enumerate(zip(protos, _names_of(protos), strict=True))
        ]
        known = {*self.inputs, *self.weights, *self.sparse}
        found: list[_GraphNode] = []
        while waiting:
            ready, late = [], []
            for node in waiting:
                if node.reads <= known:
                    ready.append(node)
                    known.update(node.makes)
                else:
                    late.append(node)
            if not ready:
                unmade = sorted(late[0].reads - known)[0]
                made = any(unmade in node.makes for node in late)
                what = f"node {late[0].name!r} reads {unmade!r}, " + ("a cycle" if made else "which nothing makes")
                raise self.error(what, "export it again; check it with `python -m onnx.checker FILE`")
            found += ready
            waiting = late
        missing = next((name for name in self.outputs if name not in known), None)
        if missing is not None:
            raise self.error(f"nothing makes its output {missing!r}", "export it again")
        return tuple(found)

    @cached_property
    def _constants(self) -> dict[str, _GraphNode]:
        """Tensors that are computed from weights alone, with their nodes."""
        found: dict[str, _GraphNode] = {}
        for node in self.nodes:
            fixed = all(name in found or name in self.weights or name in self.sparse for name in node.reads)
            if fixed and not self._may_be_random(node.proto):
                found.update(dict.fromkeys(node.makes, node))
        return found

    @cached_property
    def _functions(self) -> set[tuple[str, str]]:
        """Domain and name of the model's own functions."""
        return {(function.domain, function.name) for function in self.model.functions}

    def _may_be_random(self, proto: Any) -> bool:  # noqa: ANN401
        """Whether a node, or one in its inner graphs, may give another result each time; a function may inside."""
        is_training = proto.op_type == "Dropout" and any(proto.input[2:])
        return (
            is_training
            or proto.op_type in RANDOM
            or (proto.domain, proto.op_type) in self._functions
            or any(self._may_be_random(node) for graph in inner_graphs(proto) for node in graph.node)
        )

    def is_constant(self, name: str) -> bool:
        """Whether the tensor is the same for all inputs."""
        return name in self.weights or name in self.sparse or name in self._constants

    @cached_property
    def layers(self) -> tuple[_GraphNode, ...]:
        """The nodes that compute outputs from inputs, in order."""
        wanted = set(self.outputs)
        found = []
        for node in reversed(self.nodes):
            if wanted.intersection(node.makes):
                wanted |= node.reads
                if node.makes[0] not in self._constants:
                    found.append(node)
        return tuple(reversed(found))

    @cached_property
    def _made_at(self) -> dict[str, int]:
        """Tensor → the layer, by its number, that makes it; -1 for inputs of the whole model."""
        found = dict.fromkeys(self.inputs, -1)
        for number, layer in enumerate(self.layers):
            found.update(dict.fromkeys(layer.makes, number))
        return found

    @cached_property
    def _read_at(self) -> dict[str, set[int]]:
        """Tensor that is computed from inputs → the layers that read it."""
        found: dict[str, set[int]] = {}
        for number, layer in enumerate(self.layers):
            for name in layer.reads:
                if not self.is_constant(name):
                    found.setdefault(name, set()).add(number)
        return found

    def crossing(self, end: int) -> tuple[str, ...]:
        """The tensors that cross the end of so many first layers, in the order in which they are made: made before it
        and read after it, or outputs of the whole model."""
        return tuple(
            name
            for name, made in self._made_at.items()
            if made < end and (max(self._read_at.get(name, ()), default=-1) >= end or name in self.outputs)
        )

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The types of all tensors that could cross a boundary, and of computed weights. InputError if ONNX Runtime
        cannot load the graph."""
        names = [
            *(name for layer in self.layers for name in layer.makes),
            *(name for name in self._constants if any(name in layer.reads for layer in self.layers)),
        ]
        found = {name: TensorType(kind, shape) for name, (kind, shape) in self._infer(names).items()}
        for port in self.model.graph.input:
            if port.name in self.inputs:
                found[port.name] = _declared_type(port)
        # ONNX Runtime gives an empty shape for a single value, and where it knows none: it knows the rank of the first.
        unclear = [
            name
            for name, each in found.items()
            if not each.shape and each.kind in DATATYPES and name not in self.inputs
        ]
        ranks = self._infer(unclear, ranks=True) if unclear else {}
        for name in unclear:
            if ranks[name][1] != (0,):
                found[name] = TensorType(found[name].kind, None)
        return found

    def _infer(
        self, names: Sequence[str], *, ranks: bool = False
    ) -> dict[str, tuple[str, tuple[int | str | None, ...]]]:
        """What ONNX Runtime infers of these tensors; with `ranks` of their shapes, which are tensors themselves."""
        probe = _without_graph(self.model)
        graph = probe.graph
        graph.CopyFrom(self._part_of(self.nodes, small=True))
        _leave_out_external(graph, graph, self._unused("weights"))
        for name in self.inputs:
            graph.input.add().CopyFrom(self._declared[name])
        stated = set() if ranks else set(names)
        unused = self._unused("rank")
        outputs = {next(unused) if ranks else name: name for name in dict.fromkeys(names)}
        graph.value_info.extend(value for value in self.model.graph.value_info if value.name not in stated)
        for output, name in outputs.items():
            if ranks:
                graph.node.add(op_type="Shape", input=[name], output=[output])
            graph.output.add(name=output)
        found = inferred_types(probe.SerializeToString(), self.path)
        return {outputs[output]: given for output, given in found.items()}

    @cached_property
    def _made_inside(self) -> set[str]:
        """The names of nodes in inner graphs, and of what they compute."""
        inner = (each for node in self.nodes for graph in inner_graphs(node.proto) for each in nodes_in(graph))
        return {name for node in inner for name in (node.name, *node.output)}

    def _unused(self, stem: str) -> Iterator[str]:
        """Names that no tensor has, nor one in an inner graph."""
        known = self._made_inside.union(*(node.makes for node in self.nodes), self.inputs, self.weights, self.sparse)
        return (name for name in map(f"{stem}/{{}}".format, count()) if name not in known)

    @cached_property
    def _declared(self) -> dict[str, Any]:
        return {port.name: port for port in (*self.model.graph.input, *self.model.graph.output)}

    @cached_property
    def _stated(self) -> dict[str, Any]:
        """What the file says of the types of tensors inside."""
        return {value.name: value for value in self.model.graph.value_info}

    def port(self, name: str) -> Port:
        """A tensor that crosses a boundary. InputError if it is no tensor, but a sequence or a mapping."""
        kind, shape = self.types[name]
        if kind not in DATATYPES:
            what = f"{name!r} is of type {kind}; only tensors can pass from one piece to the next"
            raise self.error(what, "cut before it is made, or after it is last read")
        return Port(name, DATATYPES[kind], tuple(size if isinstance(size, int) else -1 for size in shape or ()))

    # Where to cut

    def end_after(self, name: str) -> int:
        """How many layers there are up to the one of this name, or that makes the tensor of this name. InputError if
        there is no such layer, or nothing would follow."""
        number = next((place for place, layer in enumerate(self.layers) if name == layer.name), self._made_at.get(name))
        if number is None or number < 0:
            raise self.error(f"it cannot be cut after {name!r}: {self._why_not(name)}", self._names_help())
        if number == len(self.layers) - 1:
            raise self.error(f"it cannot be cut after {name!r}: no layer follows", self._names_help())
        return number + 1

    def _why_not(self, name: str) -> str:
        if name in self.inputs:
            return "it is an input"
        if self.is_constant(name) or any(name == node.proto.name for node in self._constants.values()):
            return "it is constant, and computed in each piece that needs it"
        if name in self._made_inside:
            return "it lies inside the graph of another node (If, Loop, Scan), which is one layer"
        known = any(name in (node.proto.name, *node.makes) for node in self.nodes)
        return "no output depends on it" if known else "the graph has no such layer or tensor"

    def _names_help(self) -> str:
        names = [self.layers[place - 1].name for place in self.boundaries()][:6]
        if not names:
            return "every cut of this model would cross more tensors than its neighbours; see `python -m onnx.printer`"
        return f"for example after {listed([repr(name) for name in names], 'or')}"

    def _has_weights(self, layer: _GraphNode) -> bool:
        """Whether it reads weights with at least two sizes above one; scales, biases and slopes have only one."""
        for name in layer.reads:
            tensor = self.weights.get(name)
            shape: Sequence[int | str | None] | None
            if tensor is not None:
                shape = tensor.dims
                fits = tensor.data_type not in NOT_WEIGHTS
            elif name in self._constants:
                kind, shape = self.types[name]
                fits = ELEMENT_TYPES.get(kind, 7) not in NOT_WEIGHTS
            else:
                continue
            if fits and sum(isinstance(size, int) and size > 1 for size in shape or ()) >= 2:
                return True
        return any(name in self.sparse for name in layer.reads)

    def boundaries(self) -> tuple[int, ...]:
        """Where the blocks end: numbers of layers before each boundary, ascending.

        A block is a layer with weights and the layers after it that have none, or a whole unit with branches. A place
        is a boundary if it is crossed by no more tensors than the places within `REACH` layers with weights before it,
        or those after it. So residual units stay whole, and a tensor that all decoder layers read (a mask, the
        encoder's result) prevents no cut. Only tensors cross a boundary, no sequences.
        """
        crossed = self._crossed()
        weighty = [number for number, layer in enumerate(self.layers) if self._has_weights(layer)]
        starts, ends = [0, *(number + 1 for number in weighty)], [*weighty, len(self.layers)]
        gaps = [range(start, end + 1) for start, end in zip(starts, ends, strict=True)]
        least = [min(crossed[place] for place in gap) for gap in gaps]
        found = []
        for index in range(1, len(gaps) - 1):
            earlier, later = min(least[max(0, index - REACH) : index]), min(least[index + 1 : index + 1 + REACH])
            if least[index] <= max(earlier, later):
                places = [place for place in gaps[index] if crossed[place] == least[index]]
                found += self._narrowest(places)
        return tuple(found)

    def _narrowest(self, places: Sequence[int]) -> list[int]:
        """The place where only tensors of known rank cross, if there is one, and the fewest bytes for each element; the
        last of equal ones. None if something else than tensors crosses all of them.

        In a quantised model, this place lies before DequantizeLinear: ONNX Runtime fuses that with what follows, and a
        cut between them would change the results.
        """
        found: list[tuple[int, int, int]] = []
        for place in places:
            crossing = [self.types[name] for name in self.crossing(place)]
            if all(each.kind in DATATYPES for each in crossing):
                unclear = sum(each.shape is None for each in crossing)
                width = sum(ITEM_BYTES.get(DATATYPES[each.kind], LENGTH_BYTES) for each in crossing)
                found.append((unclear, width, -place))
        return [-min(found)[2]] if found else []

    def _crossed(self) -> list[int]:
        """How many tensors cross the boundary after each number of layers; at both ends, one."""
        counts = [0] * (len(self.layers) + 1)
        for name, readers in self._read_at.items():
            for place in range(self._made_at[name] + 1, max(readers) + 1):
                counts[place] += 1
        counts[0] = counts[-1] = 1
        return counts

    # Weights

    def _weights_behind(self, name: str) -> Iterator[tuple[str, int]]:
        """The weights from which a constant tensor comes, with their bytes."""
        if name in self.weights:
            yield name, tensor_bytes(self.weights[name])
        elif name in self.sparse:
            yield name, tensor_bytes(self.sparse[name].values) + tensor_bytes(self.sparse[name].indices)
        elif name in self._constants:
            node = self._constants[name]
            if node.proto.op_type == "ConstantOfShape":  # weights without values, as in test data
                port = self.port(name) if name in self.types else None  # one behind another constant has no known size
                is_known = port is not None and min(port.shape, default=0) >= 0
                yield name, ITEM_BYTES.get(port.datatype, 0) * math.prod(port.shape) if port and is_known else 0
                return
            yield name, sum(tensor_bytes(each.t) for each in node.proto.attribute if each.HasField("t"))
            for other in node.reads:
                yield from self._weights_behind(other)

    def param_bytes(self, layers: Sequence[_GraphNode]) -> int:
        """Bytes of all weights that these layers read, each once."""
        return sum(
            dict(found for layer in layers for name in layer.reads for found in self._weights_behind(name)).values()
        )

    # Pieces

    def _part_of(self, nodes: Sequence[_GraphNode], *, small: bool = False, extra: Sequence[str] = ()) -> Any:  # noqa: ANN401
        """A graph of these nodes and the weights they read; `small`: large weights are inputs instead."""
        made = _without_graph(self.model).graph
        made.name = self.model.graph.name or "piece"
        wanted = set(extra)
        for node in nodes:
            made.node.add().CopyFrom(node.proto)
            wanted |= node.reads
        for name, tensor in self.weights.items():
            if name not in wanted:
                continue
            if small and (tensor.data_location == EXTERNAL or tensor_bytes(tensor) > STATED_BYTES_MAX):
                _declare(made.input.add(name=name), tensor.data_type, tensor.dims)
                continue
            made.initializer.add().CopyFrom(tensor)
            if self.model.ir_version < 4:
                _declare(made.input.add(name=name), tensor.data_type, tensor.dims)
        for name, tensor in self.sparse.items():
            if name in wanted:
                made.sparse_initializer.add().CopyFrom(tensor)
        return made

    def _with_constants(self, layers: Sequence[_GraphNode], outputs: Sequence[str]) -> list[_GraphNode]:
        """The layers, and the nodes that compute the constants they read, in order."""
        wanted = {*outputs, *(name for layer in layers for name in layer.reads)}
        chosen = {layer.place for layer in layers}
        for node in reversed(self.nodes):
            if node.makes[0] in self._constants and wanted.intersection(node.makes):
                chosen.add(node.place)
                wanted |= node.reads
        return [node for node in self.nodes if node.place in chosen]

    def pieces(self, cuts: Sequence[int], folder: Path) -> tuple[ModelPiece, ...]:
        """Write the pieces between these boundaries (`boundaries`) into `folder` (it must exist), named after the
        model.

        InputError if the boundaries do not follow each other, something else than a tensor crosses one, or a weights
        file is away or too short; MachineError if a file cannot be written. No file is left behind then.
        """
        ends = [*cuts, len(self.layers)]
        written: list[Path] = []
        pieces: list[ModelPiece] = []
        try:
            for number, (start, end) in enumerate(pairwise([0, *ends])):
                if start >= end:
                    inner, outer = (self.layers[place - 1].name for place in (start, end))
                    what = f"the cuts after {inner!r} and {outer!r} do not follow each other"
                    raise self.error(what, "give them in the order of the graph, and each once")
                file = folder / f"{self.path.stem}.{number + 1}-of-{len(ends)}.onnx"
                written += [file, data_file(file)]
                pieces.append(self._piece(start, end, file))
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        return tuple(pieces)

    def _piece(self, start: int, end: int, file: Path) -> ModelPiece:
        layers = self.layers[start:end]
        own = {name for layer in layers for name in layer.makes}
        read = {name for layer in layers for name in layer.reads if not self.is_constant(name)} - own
        is_last = end == len(self.layers)
        constant = [name for name in self.outputs if self.is_constant(name)] if is_last else []
        inputs = tuple(self.port(name) for name in self._made_at if name in read)
        crossing = self.outputs if is_last else self.crossing(end)
        outputs = tuple(self.port(name) for name in crossing if name in own)
        piece = _without_graph(self.model)
        graph = piece.graph
        graph.CopyFrom(self._part_of(self._with_constants(layers, constant), extra=constant))
        for port, target in (*((port, graph.input) for port in inputs), *((port, graph.output) for port in outputs)):
            self._state(port, target.add(name=port.name))
        for name in constant:
            graph.output.add().CopyFrom(self._declared[name])
        kept = {name for node in graph.node for name in node.output} - {port.name for port in outputs}
        graph.value_info.extend(value for value in self.model.graph.value_info if value.name in kept)
        for name in self.crossing(end):
            self.port(name)  # refuse sequences that only pass by
        with _ExternalWeights(self, file) as external:
            for tensor in tensors_in(graph):
                external.move(tensor)
        try:
            write_onnx(piece, file)
        except EncodeError as error:
            help_text = "save the model with its weights in another file (save_as_external_data)"
            raise self.error(f"piece {file.name} exceeds the 2 GiB of an ONNX file", help_text) from error
        return ModelPiece(
            str(file),
            inputs,
            outputs,
            crossing,
            tuple(layer.name for layer in layers),
            tuple(layer.proto.op_type for layer in layers),
            self.param_bytes(layers),
        )

    def _state(self, port: Port, value: Any) -> None:  # noqa: ANN401
        """Write a tensor's type: what ONNX Runtime infers, with the file's own names for open sizes. Sizes that only
        the file states may be those of another batch size: the runtime ignores them in the uncut model, but would
        refuse other ones at the input of a piece."""
        known = self._declared.get(port.name) or self._stated.get(port.name)
        if known is not None and port.name in self.inputs:
            value.CopyFrom(known)
            return
        kind, shape = self.types[port.name]
        names = _declared_type(known).shape if known is not None else None
        if shape is not None and names is not None and len(names) == len(shape):
            shape = tuple(
                name if isinstance(name, str) and not isinstance(size, int) else size
                for name, size in zip(names, shape, strict=True)
            )
        _declare(value, ELEMENT_TYPES[kind], shape)


ELEMENT_TYPES: Final[Mapping[str, int]] = {
    **{"tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(uint16)": 4, "tensor(int16)": 5},
    **{"tensor(int32)": 6, "tensor(int64)": 7, "tensor(string)": 8, "tensor(bool)": 9, "tensor(float16)": 10},
    **{"tensor(double)": 11, "tensor(uint32)": 12, "tensor(uint64)": 13, "tensor(bfloat16)": 16},
}
"""ONNX Runtime's type names → `TensorProto.DataType`."""


def cut_model(path: Path, cuts: Sequence[str] | None, folder: Path) -> tuple[ModelPiece, ...]:
    """Cut the model at `path` into pieces, written to `folder`.

    A cut lies after the layer of this name, or after the layer that computes the tensor of this name; all tensors that
    cross it are found. With None, the model is cut at each boundary between blocks (`LayerGraph.boundaries`).
    InputError for a model that cannot be cut, or not at these places; MachineError if a piece cannot be written. After
    an error no file is left behind.
    """
    graph = LayerGraph.read(path)
    return graph.pieces(graph.boundaries() if cuts is None else [graph.end_after(cut) for cut in cuts], folder)


def difference(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """The largest difference of two results, relative to the largest value of each output; inf where shapes, integers
    or text differ."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return math.inf
        if other.dtype.kind != "f":
            worst = max(worst, 0.0 if np.array_equal(one, other) else math.inf)
        elif other.size:
            odd = ~(np.isfinite(one) & np.isfinite(other))
            if not np.array_equal(one[odd], other[odd], equal_nan=True):
                return math.inf
            exact = other[~odd].astype(np.float64)
            apart = np.abs(one[~odd] - exact).max(initial=0.0)
            worst = max(worst, float(apart) / (float(np.abs(exact).max(initial=0.0)) or 1.0))
    return worst


# Weights in other files


def data_file(piece: Path) -> Path:
    """Where the weights of a piece lie if those of its model lie in other files."""
    return piece.with_name(f"{piece.name}.data")


class _ExternalWeights:
    """Copies weights from the files of a model into the one file of a piece, which is created at the first copy."""

    def __init__(self, graph: LayerGraph, piece: Path) -> None:
        self._graph, self._target = graph, data_file(piece)
        self._out: BinaryIO | None = None
        self._end = 0

    def __enter__(self) -> "_ExternalWeights":
        return self

    def __exit__(self, *error: object) -> None:
        if self._out is not None:
            self._out.close()

    def move(self, tensor: Any) -> None:  # noqa: ANN401
        """Copy one tensor, and let it name its new place. Nothing if it lies in the model's own file."""
        if tensor.data_location != EXTERNAL:
            return
        stated = {entry.key: entry.value for entry in tensor.external_data}
        source, start, size = self._place_of(tensor, stated)
        try:
            if self._out is None:
                self._out = self._target.open("wb")
            self._out.write(bytes(-self._end % ALIGNMENT))
            self._end += -self._end % ALIGNMENT
            with source.open("rb") as file:
                file.seek(start)
                left = size
                while left:
                    block = file.read(min(left, COPY_BYTES))
                    if not block:
                        raise self._graph.error(f"{source.name} became shorter while it was read", "try again")
                    self._out.write(block)
                    left -= len(block)
        except OSError as error:
            what = f"cannot copy weights to {str(self._target)!r}: {error.strerror}"
            raise MachineError(what, help="free some disk space, or give another folder") from error
        del tensor.external_data[:]
        for key, value in ((LOCATION, self._target.name), ("offset", self._end), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        self._end += size

    def _place_of(self, tensor: Any, stated: Mapping[str, str]) -> tuple[Path, int, int]:  # noqa: ANN401
        """The file, the first byte and the number of bytes of a tensor. InputError if they are not there."""
        name = stated.get(LOCATION, "")
        folder = self._graph.path.parent
        source = folder / name
        if not name or Path(name).is_absolute() or ".." in Path(name).parts:
            what = f"the weights {tensor.name!r} lie in {name!r}, outside the model's folder"
            raise self._graph.error(what, "put the weights beside the model and save it again")
        if not source.is_file():
            raise self._graph.error(f"its weights file {name!r} is not there", "put it beside the model")
        try:
            start = int(stated.get("offset") or 0)
            size = int(stated.get("length") or 0) or tensor_bytes(tensor)
        except ValueError:
            raise self._graph.error(f"the place of the weights {tensor.name!r} is no number", "save it again") from None
        there = source.stat().st_size
        if start < 0 or size < 0 or start + size > there:
            what = f"the weights {tensor.name!r} are bytes {start} to {start + size} of {name!r}, which has {there}"
            raise self._graph.error(what, "the file is truncated: copy it again")
        return source, start, size


def tensor_bytes(tensor: Any) -> int:  # noqa: ANN401
    """Bytes of a tensor's elements."""
    if tensor.data_type in ELEMENT_BITS:
        count: int = math.prod(tensor.dims)
        return -(-count * ELEMENT_BITS[tensor.data_type] // 8)
    return sum(map(len, tensor.string_data))


# Messages


def _names_of(protos: Sequence[Any]) -> list[str]:
    """A name for each node that no other one has: its own, unless it has none or another node computes a tensor of this
    name; then the tensor that it computes first. ONNX Runtime refuses nodes of equal names."""
    makers = {name: place for place, proto in enumerate(protos) for name in proto.output if name}
    found = []
    for place, proto in enumerate(protos):
        is_own = proto.name and makers.get(proto.name, place) == place
        found.append(proto.name if is_own else next(filter(None, proto.output), proto.op_type))
    return found


def _leave_out_external(whole: Any, graph: Any, names: Iterator[str]) -> None:  # noqa: ANN401
    """Make inputs of the `whole` graph of the weights in other files that are constants, or lie in this graph within
    it, so that types can be inferred without these files; `names` are for the latter."""
    kept = [tensor for tensor in graph.initializer if tensor.data_location != EXTERNAL]
    moved = [(tensor.name, tensor) for tensor in graph.initializer if tensor.data_location == EXTERNAL]
    nodes: list[Any] = []
    for node in graph.node:
        values = [each.t for each in node.attribute if each.HasField("t") and each.t.data_location == EXTERNAL]
        if node.op_type == "Constant" and values:
            moved.append((node.output[0], values[0]))
            continue
        for inner in inner_graphs(node):
            _leave_out_external(whole, inner, names)
        nodes.append(node)
    if not moved:
        return
    changed = type(graph)()
    for name, tensor in moved:
        given = name if graph is whole else next(names)
        _declare(whole.input.add(name=given), tensor.data_type, tensor.dims)
        if graph is not whole:
            changed.node.add(op_type="Identity", input=[given], output=[name])
    changed.node.extend(nodes)
    changed.initializer.extend(kept)
    del graph.node[:], graph.initializer[:]
    graph.MergeFrom(changed)


def _without_graph(model: Any) -> Any:  # noqa: ANN401
    """A copy of a model's message without its graph, whose weights may be large."""
    made = type(model)()
    for described, value in model.ListFields():
        if described.name == "graph":
            continue
        if isinstance(value, int | str):
            setattr(made, described.name, value)
        else:
            getattr(made, described.name).MergeFrom(value)
    return made


def _declare(value: Any, element: int, shape: Sequence[int | str | None] | None) -> None:  # noqa: ANN401
    kind = value.type.tensor_type
    kind.elem_type = element
    if shape is None:
        return
    kind.shape.SetInParent()
    for size in shape:
        dimension = kind.shape.dim.add()
        if isinstance(size, int):
            dimension.dim_value = size
        elif size is not None:
            dimension.dim_param = size


def _declared_type(port: Any) -> TensorType:  # noqa: ANN401
    kind = port.type.tensor_type
    name = next((name for name, element in ELEMENT_TYPES.items() if element == kind.elem_type), "no tensor")
    if not kind.HasField("shape"):
        return TensorType(name, None)
    return TensorType(
        name, tuple(each.dim_value if each.HasField("dim_value") else each.dim_param or None for each in kind.shape.dim)
    )
