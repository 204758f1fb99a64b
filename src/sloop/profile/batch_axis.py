"""Follows the batch axis through an ONNX graph, to prove that each row of a batch gets the outputs that it gets alone.

Every tensor gets a *fact*: it is the same for every batch (`FIXED`), one of its axes counts the rows and what belongs
to different rows never meets (`Rows`), or it has sizes that were computed from the number of rows (`Sizes`). A rule for
each operator says which fact its outputs have, or raises `RowsMeet`: operators that reduce, rank, select or scale over
the rows, or whose output rows are data, end the proof, and so do operators without a rule. So what is proven holds for
all values of the inputs; trials with some values (`sloop.profile.joining`) could only refute it.

Where a rule depends on sizes, as for Reshape, it looks at those of real passes with two numbers of rows
(`GraphPass`), and each fact is compared with them. ONNX Runtime first simplifies the graph: it folds constants, and
thereby branches on constants, and replaces functions by their nodes. The rules are in `sloop.profile.batch_rules`.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sloop.onnx_file import inner_graphs, nodes_in, read_by, read_onnx
from sloop.profile import operators
from sloop.profile.model import ONNX_BFLOAT16, Array, decoded, onnx_runtime
from sloop.profile.onnx_cut import RANDOM
from sloop.tensor import Signature
from sloop.text import listed

NO_TENSORS: Final = re.compile("^(?!Reverse).*Sequence|Optional")
"""Operators with inputs or outputs that are not tensors."""
STANDARD: Final = "ai.onnx"
"""Another name of the domain of the standard operators, which usually has none."""
PASS_ROWS_MAX: Final = 4096
"""What is computed from the number of rows must be exact up to so many rows; profiles have far smaller passes."""
VALUES_MAX: Final = 64
"""Tensors of up to so many elements may be shapes, axes or bounds: their values are kept."""
SHAPE: Final = "sloop/shape/"
"""Prefix of the names of the outputs that return the shape of a tensor."""
READ: Final = {1, 6, 7, 9, 11}
"""The element types whose values may matter: floats, 32-bit and 64-bit integers, booleans."""
WEIGHT_BYTES_MIN: Final = "1024"
"""Larger weights are written beside the simplified graph, so that it stays small."""


class RowsMeet(Exception):
    """What ends the proof."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor that is the same for every batch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor whose `axis` counts the rows in their order. Each row has equally many entries, one after another.

    `counts_up`: its entries are the numbers of the rows, from 0. `locates`: its last axis has indices into a tensor of
    rows, and the first index is the row's own number. `groups`: the axis consists of groups, each with entries of all
    rows, as after a merge of steps and rows; the numbers are those of groups in each pass.
    """

    axis: int
    counts_up: bool = False
    locates: bool = False
    groups: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether an entry depends on the row alone, not on its place in the batch, and lies with the row's others."""
        return not (self.counts_up or self.locates or self.groups)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers that are computed from the shapes of tensors. Those in `mask` are the number of rows times a factor that
    does not depend on it; the others do not depend on it at all."""

    mask: NDArray[np.bool_]


Fact = Fixed | Rows | Sizes
FIXED: Final = Fixed()


@dataclass(slots=True)
class GraphPass:
    """A forward pass of the whole graph with this number of `rows`: the shape of every tensor, and the values of small
    ones. `row_shapes` are the shapes of the inputs without their first dimension."""

    rows: int
    row_shapes: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """A node of the graph."""

    proto: Any
    opset: int

    @property
    def op(self) -> str:
        """Its operator, with the domain unless it is a standard one."""
        domain = self.proto.domain
        return self.proto.op_type if domain in ("", "ai.onnx", "ai.onnx.ml") else f"{domain}.{self.proto.op_type}"

    @property
    def called(self) -> str:
        """Its operator and its name, for messages."""
        name = self.proto.name or next(filter(None, self.proto.output), "")
        return f"{self.op} {name!r}" if name else self.op

    @property
    def inputs(self) -> list[str]:
        """The tensors that it reads; an optional one that is absent is empty."""
        return list(self.proto.input)

    def input(self, place: int) -> str:
        """One of its inputs; empty if absent."""
        return self.proto.input[place] if place < len(self.proto.input) else ""

    def number(self, name: str, default: int) -> int:
        """An attribute that is a number."""
        return next((given.i for given in self.proto.attribute if given.name == name), default)

    def numbers(self, name: str) -> list[int] | None:
        """An attribute that is a list of numbers; None if absent."""
        return next((list(given.ints) for given in self.proto.attribute if given.name == name), None)

    def floats(self, name: str) -> list[float] | None:
        """An attribute that is a list of floating-point numbers; None if absent."""
        return next((list(given.floats) for given in self.proto.attribute if given.name == name), None)

    def text(self, name: str, default: str) -> str:
        """An attribute that is a text."""
        return next((given.s.decode() for given in self.proto.attribute if given.name == name), default)

    @property
    def reads(self) -> frozenset[str]:
        """The tensors that it reads, also those that its subgraphs take from the graph around them."""
        return read_by(self.proto)


# Passes of the whole graph


class OpenGraph:
    """The simplified graph of an ONNX file, in a session that says the shape of every tensor."""

    def __init__(self, path: Path, signature: Signature) -> None:
        """Raises what ONNX Runtime raises for a file that it cannot load, and `RowsMeet` for a graph that cannot be
        followed."""
        self.ports = {port.name: port for port in signature.inputs}
        self.outputs = [port.name for port in signature.outputs]
        with tempfile.TemporaryDirectory(prefix="sloop-graph-") as folder:
            model = self._simplified(path, Path(folder))
            graph = model.graph
            del graph.output[:]
            for place, name in enumerate(self._made):  # returning the tensors themselves would keep them in memory
                graph.node.add(op_type="Shape", input=[name], output=[f"{SHAPE}{place}"])
                graph.output.add(name=f"{SHAPE}{place}")
            for name in self._constant:
                graph.output.add(name=name)
            ort = onnx_runtime()
            options = _options(ort, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED  # a shape is read at once, and its tensor freed
            options.enable_cpu_mem_arena = False
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
            content = model.SerializeToString()
            self._session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def _simplified(self, path: Path, folder: Path) -> Any:  # noqa: ANN401
        """The graph as ONNX Runtime simplifies it, with the large weights in `folder`."""
        ort = onnx_runtime()
        file = folder / "graph.onnx"
        options = _options(ort, ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
        options.optimized_model_filepath = str(file)
        for key, value in (("file_name", "weights"), ("min_size_in_bytes", WEIGHT_BYTES_MIN)):
            options.add_session_config_entry(f"session.optimized_model_external_initializers_{key}", value)
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = read_onnx(file)
        graph = model.graph
        # Initialisers that old files list as inputs too stay there when they are folded away.
        for place in reversed(range(len(graph.input))):
            if graph.input[place].name not in self.ports:
                del graph.input[place]
        opsets = {each.domain.removeprefix(STANDARD): each.version for each in model.opset_import}
        nodes = [OperatorNode(proto, opsets.get(proto.domain.removeprefix(STANDARD), 1)) for proto in graph.node]
        self.nodes = _needed(nodes, self.outputs)
        if unlike := sorted({node.op for node in self.nodes if NO_TENSORS.search(node.op)}):
            raise RowsMeet(f"has values that are not tensors ({listed(unlike)})")
        self.weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._made = [name for node in self.nodes for name in node.proto.output if name]
        small = [name for name, shape in self.weights.items() if prod(shape) <= VALUES_MAX]
        self._constant = [*small, *_constant(self.nodes, set(self.ports))]
        self.measured = _measured(self.nodes)
        return model

    def run(self, rows: int, feed: Mapping[str, Array]) -> GraphPass:
        """Raises what ONNX Runtime raises for inputs that the model refuses."""
        names = [port.name for port in self._session.get_outputs()]
        if any(port.datatype == "BYTES" for port in self.ports.values()):  # texts are passed as NumPy arrays only
            texts = {name: decoded(name, value) for name, value in feed.items() if value.dtype == object}
            made = self._session.run(names, {**feed, **texts})
        else:
            make = onnx_runtime().OrtValue
            given = {
                name: make.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(value), ONNX_BFLOAT16)
                if self.ports[name].datatype == "BF16"
                else make.ortvalue_from_numpy(np.ascontiguousarray(value))
                for name, value in feed.items()
            }
            found = self._session.run_with_ort_values(names, given)
            made = [value.numpy() if _is_read(value) else None for value in found]
        count = len(self._made)
        shapes = {name: tuple(shape.tolist()) for name, shape in zip(self._made, made[:count], strict=True)}
        values = {
            name: value
            for name, value in zip(self._constant, made[count:], strict=True)
            if value is not None and value.dtype != object and value.size <= VALUES_MAX
        }
        sent = {name: np.shape(value) for name, value in feed.items()}
        return GraphPass(
            rows, {name: shape[1:] for name, shape in sent.items()}, {**self.weights, **sent, **shapes}, values
        )


def _is_read(value: Any) -> bool:  # noqa: ANN401  # a class without types
    return value.element_type() in READ and prod(value.shape()) <= VALUES_MAX


def _options(ort: Any, level: Any) -> Any:  # noqa: ANN401
    options = ort.SessionOptions()
    operators.add_to(options)
    options.log_severity_level = 4
    options.graph_optimization_level = level
    return options


def _needed(nodes: Sequence[OperatorNode], outputs: Sequence[str]) -> list[OperatorNode]:
    """The nodes that the outputs depend on, in their order."""
    wanted, found = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.proto.output):
            found.append(node)
            wanted |= node.reads
    return found[::-1]


def _constant(nodes: Sequence[OperatorNode], inputs: set[str]) -> Iterator[str]:
    """The tensors that are computed from weights and shapes, not from the values of inputs."""
    data = set(inputs)
    for node in nodes:
        made = [name for name in node.proto.output if name]
        if node.op not in ("Shape", "Size") and data.intersection(node.reads):
            data.update(made)
        else:
            yield from made


def _measured(nodes: Sequence[OperatorNode]) -> set[str]:
    """The tensors that are computed from shapes."""
    found: set[str] = set()
    for node in nodes:
        if node.op in ("Shape", "Size") or found.intersection(node.reads):
            found.update(node.proto.output)
    return found - {""}


# The walk


class RowWalk:
    """The facts of a graph's tensors, from its inputs on."""

    def __init__(self, graph: OpenGraph, passes: Sequence[GraphPass], rules: "OperatorRules") -> None:
        self._graph, self.passes, self._rules = graph, passes, rules
        self.measured = graph.measured
        self._facts: dict[str, Fact] = {name: Rows(0) for name in graph.ports}

    def obstacle(self) -> str:
        """Why rows may meet; empty if it is proven that they do not."""
        for node in self._graph.nodes:
            try:
                self._add(node)
            except RowsMeet as found:
                return f"{node.called} {found}"
        for name in self._graph.outputs:
            fact = self.fact(name)
            if not isinstance(fact, Rows) or fact.axis or not fact.is_plain:
                return f"output {name!r} does not have a row for each row of the inputs"
            if any(each.shapes[name][0] != each.rows for each in self.passes):
                return f"output {name!r} has several rows for each row of the inputs"
        return ""

    def fact(self, name: str) -> Fact:
        """What is known of a tensor."""
        return self._facts.get(name, FIXED)

    def rank(self, name: str) -> int:
        """How many axes a tensor has."""
        return len(self.shapes(name)[0])

    def shapes(self, name: str) -> list[tuple[int, ...]]:
        """Its shape in each pass."""
        if any(name not in each.shapes for each in self.passes):
            raise RowsMeet("has an optional tensor or a sequence")
        return [each.shapes[name] for each in self.passes]

    def value(self, name: str) -> list[Any]:
        """The elements of a tensor that is the same for inputs of all sizes; `RowsMeet` if they are not known."""
        found = self.values(name)
        if name in self.measured or any(other != found[0] for other in found):
            raise RowsMeet(f"depends on {name!r}, which is computed from the sizes of the inputs")
        return found[0]

    def values(self, name: str) -> list[list[Any]]:
        """The elements of a tensor that is the same for every batch, in each pass; `RowsMeet` if they are not known."""
        if not isinstance(self.fact(name), Fixed) or any(name not in each.values for each in self.passes):
            raise RowsMeet(f"depends on the values of {name!r}, which are not constant")
        return [each.values[name].ravel().tolist() for each in self.passes]

    def _add(self, node: OperatorNode) -> None:
        facts = [self.fact(name) for name in node.reads]
        inner = {each.op_type for graph in inner_graphs(node.proto) for each in nodes_in(graph)}
        if RANDOM.intersection((node.op, *inner)):
            raise RowsMeet("draws random numbers")
        if node.op == "Dropout" and node.input(2) and any(self.value(node.input(2))):
            raise RowsMeet("draws random numbers (training mode)")
        if all(isinstance(fact, Fixed) for fact in facts):
            return
        if any(inner_graphs(node.proto)):
            raise RowsMeet("has subgraphs that read rows")
        has_rows = any(isinstance(fact, Rows) for fact in facts)
        rule = (self._rules.of_rows if has_rows else self._rules.of_sizes).get(node.op)
        if rule is None:
            if not has_rows:
                raise RowsMeet("computes with the number of rows")
            raise RowsMeet(self._rules.ends.get(node.op, "is not known to keep rows apart"))
        made = rule(self, node)
        outputs = [name for name in node.proto.output if name]
        for name, fact in zip(outputs, made if isinstance(made, list) else [made] * len(outputs), strict=False):
            self._check(name, fact)
            self._facts[name] = FIXED if isinstance(fact, Sizes) and not fact.mask.any() else fact

    def _check(self, name: str, fact: Fact) -> None:
        """`RowsMeet` if the shapes, or the values of sizes, in the passes contradict the fact."""
        shapes = self.shapes(name)
        if len({len(shape) for shape in shapes}) > 1:
            raise RowsMeet("makes a tensor whose rank depends on the number of rows")
        if isinstance(fact, Rows):
            self.entries(name, fact.axis)
        if isinstance(fact, Sizes) and fact.mask.any():
            self._check_sizes(name, fact.mask)
        axes = [fact.axis] if isinstance(fact, Rows) else []
        if any(self.growing_axes(name, *pair) != axes for pair in self.pairs()):
            raise RowsMeet("makes a tensor whose size depends on more than the number of rows")

    def pairs(self) -> list[tuple[GraphPass, GraphPass]]:
        """Passes that differ in nothing but the number of rows."""
        return [
            (one, other)
            for place, one in enumerate(self.passes)
            for other in self.passes[place + 1 :]
            if one.row_shapes == other.row_shapes
        ]

    def growing_axes(self, name: str, one: GraphPass, other: GraphPass) -> list[int]:
        """The axes of a tensor whose size differs between two passes."""
        sizes = zip(one.shapes[name], other.shapes[name], strict=True)
        return [axis for axis, (first, second) in enumerate(sizes) if first != second]

    def entries(self, name: str, axis: int) -> list[int]:
        """How many entries along the axis belong to each row, in each pass. `RowsMeet` if not equally many."""
        found = []
        for each in self.passes:
            entries, rest = divmod(each.shapes[name][axis], each.rows)
            if rest or not entries:
                raise RowsMeet("makes a tensor whose size is no multiple of the number of rows")
            found.append(entries)
        for one, other in self.pairs():
            if one.shapes[name][axis] * other.rows != other.shapes[name][axis] * one.rows:
                raise RowsMeet("makes a tensor whose size is no multiple of the number of rows")
        return found

    def _check_sizes(self, name: str, mask: NDArray[np.bool_]) -> None:
        """`RowsMeet` if these numbers are no whole multiples of the number of rows, the same for each number."""
        for one, other in [*((each, each) for each in self.passes), *self.pairs()]:
            if name not in one.values or name not in other.values:
                raise RowsMeet("computes with the number of rows")
            times = one.values[name][mask] / one.rows
            if np.any((times < 1) | (times % 1 != 0) | (times != other.values[name][mask] / other.rows)):
                raise RowsMeet("computes with the number of rows")
            kind = one.values[name].dtype
            exact = 2.0 ** (np.finfo(kind).nmant + 1) if kind.kind == "f" else np.iinfo(kind).max
            if np.any(times * PASS_ROWS_MAX > exact):  # it would wrap around at some number of rows
                raise RowsMeet("computes numbers that are too large for their type with many rows")

    # What rules ask

    def no_rows(self, names: Sequence[str]) -> None:
        """`RowsMeet` if one of these inputs, which give a shape or a place, depends on the values of rows."""
        for name in names:
            if name and isinstance(self.fact(name), Rows):
                raise RowsMeet(f"has a shape or place {name!r} that depends on the values of rows")

    def rows_of(self, name: str, what: str = "", *, grouped: bool = False) -> Rows:
        """The fact of a tensor that must have rows, perhaps in groups. `RowsMeet` otherwise."""
        fact = self.fact(name)
        if isinstance(fact, Rows) and (fact.is_plain or (fact.groups and grouped)):
            return fact
        if isinstance(fact, Rows) and fact.groups:
            raise RowsMeet("reads rows that were merged with an axis in front of them")
        if isinstance(fact, Rows):
            raise RowsMeet("computes with the place of a row in the batch")
        if isinstance(fact, Sizes):
            raise RowsMeet("computes with the number of rows")
        raise RowsMeet(what or "mixes rows with a tensor that has none")

    def only_fixed(self, node: OperatorNode, *but: int) -> None:
        """`RowsMeet` if another input than those at these places depends on rows."""
        for place, name in enumerate(node.inputs):
            if place not in but and name and not isinstance(self.fact(name), Fixed):
                raise RowsMeet(f"has an input {name!r} that depends on the rows, where a constant is needed")

    def same_axis(self, names: Sequence[str]) -> int:
        """The axis that counts rows in all of these tensors that have any, counted from the last axis of the largest.
        `RowsMeet` if they differ."""
        rank = max(self.rank(name) for name in names)
        axes = set()
        for name in names:
            fact = self.fact(name)
            if not isinstance(fact, Fixed):
                axes.add(rank - self.rank(name) + self.rows_of(name).axis)
        if len(axes) != 1:
            raise RowsMeet("combines each row with all others")
        return axes.pop()


Rule = Callable[[RowWalk, OperatorNode], Fact | list[Fact]]
"""What an operator makes: one fact for all outputs, or one for each. Raises `RowsMeet`."""


class OperatorRules(NamedTuple):
    """The rules of all operators."""

    of_rows: Mapping[str, Rule]
    """For nodes that read rows."""
    of_sizes: Mapping[str, Rule]
    """For nodes that read sizes, and no rows."""
    ends: Mapping[str, str]
    """Operators that never keep rows apart, and why."""


def draws_random_numbers(path: Path) -> bool:
    """Whether an ONNX model has operators whose results are new each time."""
    return any(node.op_type in RANDOM for node in nodes_in(read_onnx(path).graph))
