"""What each ONNX operator does with the batch axis (`sloop.profile.batch_axis`): the rules of the proof that rows are
independent.

A rule looks at the facts of its node's inputs and returns those of its outputs, or raises `RowsMeet` with what the
operator does to the rows. An operator that is missing here ends the proof.

Sources: the operators' definitions in the ONNX standard (Operators.md up to opset 23, ai.onnx.ml up to 5) and in
ONNX Runtime's ContribOperators.md.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.profile.batch_axis import (
    FIXED,
    Fact,
    Fixed,
    OpenGraph,
    OperatorNode,
    OperatorRules,
    Rows,
    RowsMeet,
    RowWalk,
    Rule,
    Sizes,
)
from sloop.profile.model import Array
from sloop.tensor import Signature

FEEDS_MIN: Final = 2
"""Passes with different numbers of rows that a proof needs."""
EXACT: Final = (1, 6, 7, 11)
"""The element types that hold the number of a row without rounding it: floats, 32-bit and 64-bit integers."""
END_MIN: Final = 10**6
"""Slices to this place or a later one take everything: no forward pass has so many rows. Exporters write 2³¹ − 1,
2⁶³ − 1 or 10⁹."""


def _axis(node: OperatorNode, name: str, default: int, rank: int) -> int:
    axis = node.number(name, default)
    return axis + rank if axis < 0 else axis


def elementwise(walk: RowWalk, node: OperatorNode) -> Fact:
    """Inputs that are broadcast to one shape."""
    names = [name for name in node.inputs if name]
    facts = [walk.fact(name) for name in names]
    if (
        len(names) == 1
        and node.op in ("Identity", "Cast")
        and isinstance(facts[0], Rows)
        and node.number("to", EXACT[0]) in EXACT
    ):
        return facts[0]
    (name, *others) = (name for name, fact in zip(names, facts, strict=True) if not isinstance(fact, Fixed))
    if not others:
        rows = walk.rows_of(name, grouped=True)
        return Rows(max(map(walk.rank, names)) - walk.rank(name) + rows.axis, groups=rows.groups)
    return Rows(walk.same_axis(names))


def first_input(walk: RowWalk, node: OperatorNode) -> Fact:
    """Operators with the batch as first axis of their first input, and constants as other inputs."""
    walk.only_fixed(node, 0)
    if walk.rows_of(node.input(0)).axis:
        raise RowsMeet(f"uses the rows of {node.input(0)!r} as another dimension than the batch")
    return Rows(0)


def all_first(*constant: int) -> Rule:
    """Operators with the batch as first axis of every input that depends on rows, except weights and tables."""

    def rule(walk: RowWalk, node: OperatorNode) -> Fact:
        walk.only_fixed(node, *(place for place in range(len(node.inputs)) if place not in constant))
        for name in filter(None, node.inputs):
            fact = walk.fact(name)
            if not isinstance(fact, Fixed) and (walk.rows_of(name).axis or set(walk.entries(name, 0)) != {1}):
                raise RowsMeet(f"uses the rows of {name!r} as another dimension than the batch")
        return Rows(0)

    return rule


def rotate(walk: RowWalk, node: OperatorNode) -> Fact | list[Fact]:
    """RotaryEmbedding; the positions of a row point into a constant table."""
    return all_first(*((1, 2) if node.input(3) else ()))(walk, node)


def table(walk: RowWalk, node: OperatorNode) -> Fact:
    """Operators of ai.onnx.ml whose input has two dimensions, rows and features."""
    name = node.input(0)
    if walk.rank(name) != 2:
        raise RowsMeet("has an input without exactly two dimensions")
    return first_input(walk, node)


def _without(axes: set[int], keeps: bool, rows: Rows, what: str) -> Rows:
    if rows.axis in axes:
        raise RowsMeet(what)
    return rows if keeps else Rows(rows.axis - sum(axis < rows.axis for axis in axes))


def reduce(walk: RowWalk, node: OperatorNode) -> Fact:
    """Reductions over axes, given as attribute or as second input."""
    rows, rank = walk.rows_of(node.input(0)), walk.rank(node.input(0))
    axes = node.numbers("axes")
    if axes is None and node.input(1):
        axes = walk.value(node.input(1))
    if not axes and node.number("noop_with_empty_axes", 0):
        return rows
    found = {axis % rank for axis in axes} if axes else set(range(rank))
    return _without(found, bool(node.number("keepdims", 1)), rows, "reduces over the rows")


def best(walk: RowWalk, node: OperatorNode) -> Fact:
    """ArgMax and ArgMin."""
    name = node.input(0)
    axis = _axis(node, "axis", 0, walk.rank(name))
    return _without({axis}, bool(node.number("keepdims", 1)), walk.rows_of(name), "ranks the rows")


def along(what: str, default: int = -1, *, coerced_before: int = 0) -> Rule:
    """Operators that work along one axis; before opset `coerced_before`, along that axis and all later ones."""

    def rule(walk: RowWalk, node: OperatorNode) -> Fact:
        walk.only_fixed(node, 0)
        name = node.input(0)
        rank = walk.rank(name)
        is_coerced = node.number("opset", coerced_before if "." in node.op else node.opset) < coerced_before
        axis = _axis(node, "axis", 1 if is_coerced else default, rank)
        axes = set(range(axis, rank)) if is_coerced else {axis}
        return _without(axes, True, walk.rows_of(name), what)

    return rule


def from_axis(walk: RowWalk, node: OperatorNode) -> Fact:
    """Normalisations over all axes from one on; further inputs are constant or added to the first."""
    name = node.input(0)
    rank = walk.rank(name)
    axis = _axis(node, "axis", -1, rank)
    walk.only_fixed(node, 0, *([1] if "Skip" in node.op else []))
    at = walk.same_axis([name, node.input(1)] if "Skip" in node.op else [name])
    return _without(set(range(axis, rank)), True, Rows(at), "normalises over the rows")


def mean_variance(walk: RowWalk, node: OperatorNode) -> Fact:
    """MeanVarianceNormalization."""
    rank = walk.rank(node.input(0))
    if node.opset < 9:
        raise RowsMeet("is not known to keep rows apart")
    axes = {axis % rank for axis in node.numbers("axes") or [0, 2, 3]}
    return _without(axes, True, walk.rows_of(node.input(0)), "normalises over the rows")


def cumulate(walk: RowWalk, node: OperatorNode) -> Fact:
    """CumSum, whose axis is an input."""
    name = node.input(0)
    axis = walk.value(node.input(1))[0] % walk.rank(name)
    return _without({axis}, True, walk.rows_of(name), "adds up over the rows")


def fourier(walk: RowWalk, node: OperatorNode) -> Fact:
    """DFT, whose axis is an input or, before opset 20, an attribute."""
    name = node.input(0)
    walk.only_fixed(node, 0)
    axis = walk.value(node.input(2))[0] if node.input(2) else node.number("axis", 1 if node.opset < 20 else -2)
    return _without({axis % walk.rank(name)}, True, walk.rows_of(name), "transforms over the rows")


def batch_normalise(walk: RowWalk, node: OperatorNode) -> Fact:
    """BatchNormalization with constant statistics."""
    if node.number("training_mode", 0) or len([name for name in node.proto.output if name]) > 1:
        raise RowsMeet("normalises over the rows (training mode)")
    return first_input(walk, node)


def keep_axis(walk: RowWalk, node: OperatorNode) -> Fact:
    """Dropout, which does nothing unless it trains, and operators that encode each element in a new last axis."""
    return walk.rows_of(node.input(0))


def reshape(walk: RowWalk, node: OperatorNode) -> Fact:
    """Operators that change the shape and keep the elements in their order.

    In the input, `lead` elements lie in front of the axis of the rows. An axis of the output counts the rows, in
    groups, if the axes in front of it have lead / groups elements, and its size is a multiple of groups × rows.
    """
    name, rows = node.input(0), walk.fact(node.input(0))
    walk.no_rows(node.inputs[1:])
    if node.op == "Squeeze" and node.numbers("axes") is None and not node.input(1):
        raise RowsMeet("drops the axis of the rows if there is one row")
    if not isinstance(rows, Rows) or rows.locates:
        rows = walk.rows_of(name)
    found: dict[int, list[int]] = {axis: [] for axis in range(walk.rank(node.proto.output[0]))}
    for place, each in enumerate(walk.passes):
        before, after = each.shapes[name], each.shapes[node.proto.output[0]]
        lead = prod(before[: rows.axis]) * (rows.groups[place] if rows.groups else 1)
        for axis, size in enumerate(after):
            times, rest = divmod(lead, prod(after[:axis]) or lead + 1)
            if times and not rest and size and size % (times * each.rows) == 0:
                found[axis].append(times)
    fits = [(groups, axis) for axis, groups in found.items() if len(groups) == len(walk.passes)]
    if not fits or (rows.counts_up and max(min(fits)[0]) > 1):
        raise RowsMeet("mixes rows when it changes the shape")
    groups, axis = min(fits)
    return Rows(axis, rows.counts_up, groups=tuple(groups) if max(groups) > 1 else ())


def transpose(walk: RowWalk, node: OperatorNode) -> Fact:
    """Transpose; without an order it reverses the axes."""
    name, rows = node.input(0), walk.rows_of(node.input(0))
    order = node.numbers("perm") or list(reversed(range(walk.rank(name))))
    return Rows(order.index(rows.axis))


def expand(walk: RowWalk, node: OperatorNode) -> Fact:
    """Expand and Tile: rows stay what they are, and what is fixed is repeated for each row."""
    name, output = node.input(0), node.proto.output[0]
    walk.no_rows(node.inputs[1:])
    rows = walk.fact(name)
    if isinstance(rows, Rows) and not rows.locates and not rows.groups:
        axis = walk.rank(output) - walk.rank(name) + rows.axis
        if walk.entries(name, rows.axis) != walk.entries(output, axis):
            raise RowsMeet("repeats the rows")
        return Rows(axis, rows.counts_up)
    return _repeated(walk, name, output)


def _repeated(walk: RowWalk, name: str, output: str) -> Fact:
    """The fact of an output that repeats a fixed tensor, or one value, for each row."""
    axes = {axis for pair in walk.pairs() for axis in walk.growing_axes(output, *pair)}
    if not axes:
        return FIXED
    if len(axes) > 1:
        raise RowsMeet("makes a tensor of which several axes depend on the number of rows")
    (axis,) = axes
    if name:
        own = axis - (walk.rank(output) - walk.rank(name))
        if own >= 0 and any(shape[own] != 1 for shape in walk.shapes(name)):
            raise RowsMeet("spreads a tensor over the rows")
    return Rows(axis)


def concatenate(walk: RowWalk, node: OperatorNode) -> Fact:
    """Concat; of row numbers and indices it makes places in a tensor of rows."""
    names = node.inputs
    axis = _axis(node, "axis", 1, walk.rank(names[0]))
    facts = [walk.fact(name) for name in names]
    if any(not isinstance(fact, Rows) for fact in facts):
        raise RowsMeet("concatenates rows with a tensor that has none")
    rows = [fact for fact in facts if isinstance(fact, Rows)]
    axes = {each.axis for each in rows}
    if len(axes) > 1 or axis in axes:
        raise RowsMeet("concatenates along the rows, or rows of different axes")
    first, *others = rows
    if first.counts_up and axis == walk.rank(names[0]) - 1 and all(each.is_plain for each in others):
        if any(shape[axis] != 1 for shape in walk.shapes(names[0])):
            raise RowsMeet("computes with the place of a row in the batch")
        return Rows(first.axis, locates=True)
    for name in names:
        walk.rows_of(name)
    return Rows(first.axis)


def split(walk: RowWalk, node: OperatorNode) -> Fact:
    """Split along an axis."""
    name = node.input(0)
    walk.only_fixed(node, 0)
    return _without({_axis(node, "axis", 0, walk.rank(name))}, True, walk.rows_of(name), "splits the rows")


def slice_(walk: RowWalk, node: OperatorNode) -> Fact:
    """Slice; along the rows it may only take all of them."""
    name, rows = node.input(0), walk.rows_of(node.input(0))
    walk.no_rows(node.inputs[1:])
    given = node.numbers("starts")
    starts = walk.values(node.input(1)) if given is None else [given]
    count = len(starts[0])
    axes = node.numbers("axes") or (walk.value(node.input(3)) if node.input(3) else list(range(count)))
    steps = walk.value(node.input(4)) if node.input(4) else [1] * count
    at = [axis % walk.rank(name) for axis in axes]
    by_rows = _mask(walk, node.input(2))
    for place, axis in enumerate(at):
        if axis == rows.axis and not (
            starts[0][place] == 0
            and node.input(1) not in walk.measured
            and steps[place] == 1
            and _is_behind(walk, node, place, name, axis)
        ):
            raise RowsMeet("takes some of the rows, or takes them in another order")
        if axis != rows.axis and by_rows.size and by_rows[place]:
            raise RowsMeet("takes as many entries as there are rows")
    return rows


def _is_behind(walk: RowWalk, node: OperatorNode, place: int, name: str, axis: int) -> bool:
    """Whether a slice along an axis that counts rows ends behind the last one, whatever their number."""
    given, ends = node.numbers("ends"), node.input(2)
    if given is None and isinstance(walk.fact(ends), Sizes):
        at = zip(walk.passes, walk.entries(name, axis), strict=True)
        return bool(_mask(walk, ends)[place]) and all(
            each.values[ends].ravel()[place] >= entries * each.rows for each, entries in at
        )
    return bool((walk.value(ends) if given is None else given)[place] >= END_MIN)


def pad(walk: RowWalk, node: OperatorNode) -> Fact:
    """Pad; not along the rows."""
    name, rows = node.input(0), walk.rows_of(node.input(0))
    rank = walk.rank(name)
    pads = node.numbers("pads")
    if pads is None:
        pads = walk.value(node.input(1))
    axes = [axis % rank for axis in walk.value(node.input(3))] if node.input(3) else list(range(rank))
    walk.only_fixed(node, 0)
    if rows.axis in axes:
        place = axes.index(rows.axis)
        if pads[place] or pads[place + len(axes)]:
            raise RowsMeet("adds rows")
    return rows


def resize(walk: RowWalk, node: OperatorNode) -> Fact:
    """Resize and Upsample; not along the rows."""
    name, rows = node.input(0), walk.rows_of(node.input(0))
    walk.no_rows(node.inputs[1:])
    if node.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise RowsMeet("crops along all axes")
    if node.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise RowsMeet("resizes the rows")
    if node.text("mode", "nearest") != "nearest" and (walk.rank(name) < 4 or rows.axis > 1):
        raise RowsMeet("interpolates over the rows")  # with a weight of 0, but infinity times 0 is no number
    if walk.entries(name, rows.axis) != walk.entries(node.proto.output[0], rows.axis):
        raise RowsMeet("resizes the rows")
    scales = node.input(2) if node.op == "Resize" and node.opset > 10 else node.input(1)
    axes = node.numbers("axes") or list(range(walk.rank(name)))
    if scales in walk.measured and rows.axis in axes:
        raise RowsMeet("resizes the rows")
    for each in walk.passes:
        known = node.floats("scales") or each.values.get(scales, np.empty(0)).ravel().tolist()
        if known and rows.axis in axes and known[axes.index(rows.axis)] != 1:
            raise RowsMeet("resizes the rows")
    return rows


def product(left: int, right: int) -> Rule:
    """Matrix products of the inputs at two places: rows are in the leading axes of both, or in one dimension of the
    result from one of them. FusedMatMul may transpose the last two axes of its inputs."""

    def rule(walk: RowWalk, node: OperatorNode) -> Fact:
        walk.only_fixed(node, left, right)
        if node.number("transBatchA", 0) or node.number("transBatchB", 0):
            raise RowsMeet("is not known to keep rows apart")
        axes = set()
        for name, free, flips in ((node.input(left), -2, "transA"), (node.input(right), -1, "transB")):
            if isinstance(walk.fact(name), Fixed):
                continue
            axis = walk.rows_of(name).axis - walk.rank(name)  # from the last one, which is -1
            if axis >= -2:
                axis = -3 - axis if node.number(flips, 0) else axis
                if axis != free:
                    raise RowsMeet("multiplies over the rows")
            axes.add((axis, free if axis == free else None))
        if len(axes) != 1:
            raise RowsMeet("multiplies each row with all others")
        ((axis, _),) = axes
        if walk.rank(node.input(right)) == 1:  # a vector: the result has an axis less
            axis += 1
        return Rows(walk.rank(node.proto.output[0]) + axis)

    return rule


def gemm(walk: RowWalk, node: OperatorNode) -> Fact:
    """Gemm: a matrix product of two matrices, plus a third one that is broadcast."""
    left, right, added = node.input(0), node.input(1), node.input(2)
    rows = walk.rows_of(left, grouped=True)
    if not isinstance(walk.fact(right), Fixed) or rows.axis != node.number("transA", 0):
        raise RowsMeet("multiplies over the rows")
    if isinstance(walk.fact(added), Fixed):
        return Rows(0, groups=rows.groups)
    if walk.rank(added) - walk.rows_of(added).axis != 2 or rows.groups:
        raise RowsMeet("adds rows along another axis")
    return Rows(0)


def quantised_gemm(walk: RowWalk, node: OperatorNode) -> Fact:
    """QGemm: matrices, each with a constant scale and zero point."""
    walk.only_fixed(node, 0)
    rows = walk.rows_of(node.input(0), grouped=True)
    if rows.axis != node.number("transA", 0):
        raise RowsMeet("multiplies over the rows")
    return Rows(0, groups=rows.groups)


def einsum(walk: RowWalk, node: OperatorNode) -> Fact:
    """Einsum: the letter of the rows is in every term with rows, in no other, and in the result."""
    equation = node.text("equation", "").replace(" ", "")
    given, arrow, made = equation.partition("->")
    terms = given.split(",")
    if not arrow or "." in equation:
        raise RowsMeet("has an equation that cannot be followed")
    letters = {
        terms[place][walk.rows_of(name).axis]
        for place, name in enumerate(node.inputs)
        if not isinstance(walk.fact(name), Fixed)
    }
    (letter, *others) = letters
    without = [terms[place] for place, name in enumerate(node.inputs) if isinstance(walk.fact(name), Fixed)]
    if others or made.count(letter) != 1 or any(letter in term for term in without):
        raise RowsMeet("multiplies over the rows")
    if any(term.count(letter) > 1 for term in terms):
        raise RowsMeet("multiplies over the rows")
    return Rows(made.index(letter))


def gather(walk: RowWalk, node: OperatorNode) -> Fact:
    """Gather: the same entries of each row, or, with indices that have rows, entries of a constant table."""
    data, indices = node.input(0), node.input(1)
    axis = _axis(node, "axis", 0, walk.rank(data))
    if isinstance(walk.fact(data), Fixed):
        return Rows(axis + walk.rows_of(indices).axis)
    rows = walk.rows_of(data)
    if not isinstance(walk.fact(indices), Fixed):
        raise RowsMeet("selects from all rows for each row")
    if axis == rows.axis:
        raise RowsMeet("selects rows")
    return Rows(rows.axis if rows.axis < axis else rows.axis - 1 + walk.rank(indices))


def gather_elements(walk: RowWalk, node: OperatorNode) -> Fact:
    """GatherElements and ScatterElements: tensors of equal rank, all with rows along the same axis."""
    axes = {walk.rows_of(name).axis for name in node.inputs}
    axis = _axis(node, "axis", 0, walk.rank(node.input(0)))
    (rows_axis, *others) = axes
    if others or axis == rows_axis or not _is_aligned(walk, node.inputs, rows_axis):
        raise RowsMeet("selects rows")
    return Rows(rows_axis)


def _is_aligned(walk: RowWalk, names: Sequence[str], axis: int) -> bool:
    """Whether each row has equally many entries in all these tensors."""
    return all(walk.entries(name, axis) == walk.entries(names[0], axis) for name in names)


def gather_nd(walk: RowWalk, node: OperatorNode) -> Fact:
    """GatherND: with batch dimensions, from a constant table, or with indices that begin with the row's own number."""
    data, indices, places = node.input(0), node.input(1), walk.fact(node.input(1))
    if isinstance(places, Rows) and places.locates and not node.number("batch_dims", 0):
        if walk.rows_of(data).axis or set(walk.entries(data, 0)) != {1} or places.axis == walk.rank(indices) - 1:
            raise RowsMeet("selects rows")
        return Rows(places.axis)
    rows = walk.rows_of(indices)
    if isinstance(walk.fact(data), Fixed) and not node.number("batch_dims", 0) and rows.axis < walk.rank(indices) - 1:
        return Rows(rows.axis)
    is_apart = node.number("batch_dims", 0) > 0 and not rows.axis and not walk.rows_of(data).axis
    if not is_apart or not _is_aligned(walk, [data, indices], 0):
        raise RowsMeet("selects rows")
    return Rows(0)


def scatter_nd(walk: RowWalk, node: OperatorNode) -> Fact:
    """ScatterND to the same constant places of each row; the indices are along axes in front of that of the rows."""
    data, indices, updates = (node.input(place) for place in range(3))
    walk.only_fixed(node, 0, 2)
    axis, depth = walk.rows_of(data).axis, walk.shapes(indices)[0][-1]
    if axis < depth or walk.rows_of(updates).axis != walk.rank(indices) - 1 + axis - depth:
        raise RowsMeet("writes to some of the rows")
    return Rows(axis)


def one_hot(walk: RowWalk, node: OperatorNode) -> Fact:
    """OneHot, which adds an axis."""
    walk.only_fixed(node, 0)
    rows = walk.rows_of(node.input(0))
    axis = _axis(node, "axis", -1, walk.rank(node.input(0)) + 1)
    return Rows(rows.axis if rows.axis < axis else rows.axis + 1)


def triangle(walk: RowWalk, node: OperatorNode) -> Fact:
    """Trilu, over the last two axes."""
    walk.only_fixed(node, 0)
    rank = walk.rank(node.input(0))
    return _without({rank - 1, rank - 2}, True, walk.rows_of(node.input(0)), "depends on a row's place in the batch")


def compress(walk: RowWalk, node: OperatorNode) -> Fact:
    """Compress with a constant condition along another axis."""
    name = node.input(0)
    walk.only_fixed(node, 0)
    if all(given.name != "axis" for given in node.proto.attribute):
        raise RowsMeet("selects rows")
    return _without({_axis(node, "axis", 0, walk.rank(name))}, True, walk.rows_of(name), "selects rows")


def reverse_sequence(walk: RowWalk, node: OperatorNode) -> Fact:
    """ReverseSequence over time, with lengths for each row."""
    rows, lengths = walk.rows_of(node.input(0)), walk.fact(node.input(1))
    if rows.axis != node.number("batch_axis", 1) or rows.axis == node.number("time_axis", 0):
        raise RowsMeet("reverses the rows")
    if not isinstance(lengths, Fixed) and walk.rows_of(node.input(1)).axis:
        raise RowsMeet("reverses the rows")
    return rows


def recurrent(walk: RowWalk, node: OperatorNode) -> Fact | list[Fact]:
    """LSTM, GRU and RNN: inputs [time, batch, …] or, with another layout, [batch, time, …]."""
    is_first = bool(node.number("layout", 0))
    batch = 0 if is_first else 1
    walk.only_fixed(node, 0, 4, 5, 6)
    for place, axis in ((0, batch), (4, 0), (5, batch), (6, batch)):
        name = node.input(place)
        if name and not isinstance(walk.fact(name), Fixed) and walk.rows_of(name).axis != axis:
            raise RowsMeet("uses the rows as steps of a sequence")
    walk.rows_of(node.input(0))
    made: list[Fact] = [Rows(0 if is_first else 2), Rows(batch), Rows(batch)]
    return [fact for fact, name in zip(made, node.proto.output, strict=False) if name]


def quantise(walk: RowWalk, node: OperatorNode) -> Fact:
    """QuantizeLinear and DequantizeLinear with constant scales, but not for blocks of rows."""
    walk.only_fixed(node, 0)
    rows = walk.rows_of(node.input(0), grouped=True)
    if node.number("block_size", 0) and _axis(node, "axis", 1, walk.rank(node.input(0))) == rows.axis:
        raise RowsMeet("has scales for a fixed number of rows")
    return rows


def max_pool(walk: RowWalk, node: OperatorNode) -> Fact:
    """MaxPool; its indices count through all rows."""
    if len([name for name in node.proto.output if name]) > 1:
        raise RowsMeet("returns indices that count through the whole batch")
    return first_input(walk, node)


def extract(walk: RowWalk, node: OperatorNode) -> Fact:
    """ArrayFeatureExtractor, along the last axis: the same entries of each row, or an entry of a constant
    table for each row."""
    name, places = node.input(0), node.input(1)
    if isinstance(walk.fact(name), Fixed):
        if any(prod(shape[: walk.rows_of(places).axis]) != 1 for shape in walk.shapes(places)):
            raise RowsMeet("mixes rows when it changes the shape")
        return Rows(walk.rank(node.proto.output[0]) - 1)
    walk.only_fixed(node, 0)
    return _without({walk.rank(name) - 1}, True, walk.rows_of(name), "selects rows")


def quantised(*places: int) -> Rule:
    """Quantised elementwise operators: the tensors at these places are broadcast, scales and zero points constant."""

    def rule(walk: RowWalk, node: OperatorNode) -> Fact:
        walk.only_fixed(node, *places)
        return Rows(walk.same_axis([node.input(place) for place in places]))

    return rule


def quantised_concatenate(walk: RowWalk, node: OperatorNode) -> Fact:
    """QLinearConcat: scale, zero point, then triples of a tensor and its scale and zero point."""
    places = range(2, len(node.inputs), 3)
    walk.only_fixed(node, *places)
    names = [node.input(place) for place in places]
    axis = _axis(node, "axis", 1, walk.rank(names[0]))
    return _without({axis}, True, Rows(walk.same_axis(names)), "concatenates along the rows, or rows of different axes")


def shape_of(walk: RowWalk, node: OperatorNode) -> Fact:
    """Shape: one of the sizes is that of the rows."""
    name, fact = node.input(0), walk.fact(node.input(0))
    assert isinstance(fact, Rows)
    mask = np.zeros(walk.rank(name), bool)
    mask[fact.axis] = True
    return Sizes(mask[node.number("start", 0) : node.number("end", len(mask))])


def size_of(walk: RowWalk, node: OperatorNode) -> Fact:
    """Size: the number of all elements."""
    return Sizes(np.ones((), bool))


def constant_of_shape(walk: RowWalk, node: OperatorNode) -> Fact:
    """ConstantOfShape: one value everywhere."""
    return _repeated(walk, "", node.proto.output[0])


# OperatorRules for sizes


def _mask(walk: RowWalk, name: str) -> NDArray[np.bool_]:
    fact = walk.fact(name)
    return fact.mask if isinstance(fact, Sizes) else np.zeros(walk.shapes(name)[0] if name else 0, bool)


def size_elementwise(walk: RowWalk, node: OperatorNode) -> Fact:
    """Arithmetic of sizes."""
    masks = [_mask(walk, name) for name in node.inputs]
    return Sizes(np.logical_or.reduce(np.broadcast_arrays(*masks)))


def size_divide(walk: RowWalk, node: OperatorNode) -> Fact:
    """Division without a remainder, whatever the number of rows."""
    walk.only_fixed(node, 0)
    names = [*node.inputs, node.proto.output[0]]
    for each in walk.passes:
        if any(name not in each.values for name in names):
            raise RowsMeet("computes with the number of rows")
        of, by, made = (each.values[name].astype(np.float64) for name in names)
        if (made * by != of)[np.broadcast_to(_mask(walk, names[0]), made.shape)].any():
            raise RowsMeet("divides the number of rows")
    return size_elementwise(walk, node)


def size_where(walk: RowWalk, node: OperatorNode) -> Fact:
    """One of two sizes, by a condition that does not depend on the number of rows."""
    walk.only_fixed(node, 1, 2)
    return size_elementwise(walk, node)


def size_equal(walk: RowWalk, node: OperatorNode) -> Fact:
    """Comparison with a negative number: exporters ask whether a size is -1 before they expand, and it never is. Other
    comparisons could make a decision depend on the number of rows."""
    fixed = [name for name in node.inputs if isinstance(walk.fact(name), Fixed)]
    if len(fixed) != 1 or any(size >= 0 for size in walk.value(fixed[0])):
        raise RowsMeet("compares the number of rows")
    return FIXED


def size_reshape(walk: RowWalk, node: OperatorNode) -> Fact:
    """The same sizes in another shape."""
    walk.only_fixed(node, 0)
    return Sizes(_mask(walk, node.input(0)).reshape(walk.shapes(node.proto.output[0])[0]))


def size_gather(walk: RowWalk, node: OperatorNode) -> Fact:
    """Some of the sizes."""
    mask = _mask(walk, node.input(0))
    indices = np.array(walk.value(node.input(1)), np.int64).reshape(walk.shapes(node.input(1))[0])
    return Sizes(np.asarray(mask.take(indices, axis=node.number("axis", 0))))


def size_slice(walk: RowWalk, node: OperatorNode) -> Fact:
    """A range of the sizes."""
    _only_vector(walk, node)
    bounds = [node.numbers("starts"), node.numbers("ends")]
    starts, ends = (
        given if given is not None else walk.value(node.input(place)) for place, given in enumerate(bounds, 1)
    )
    step = walk.value(node.input(4))[0] if node.input(4) else 1
    return Sizes(_mask(walk, node.input(0))[starts[0] : ends[0] : step])


def _only_vector(walk: RowWalk, node: OperatorNode) -> None:
    walk.only_fixed(node, 0)
    if walk.rank(node.input(0)) != 1:
        raise RowsMeet("computes with the number of rows")


def size_concatenate(walk: RowWalk, node: OperatorNode) -> Fact:
    """Sizes one after the other."""
    return Sizes(np.concatenate([_mask(walk, name) for name in node.inputs], axis=node.number("axis", 0)))


def size_split(walk: RowWalk, node: OperatorNode) -> Fact | list[Fact]:
    """Sizes in several parts."""
    _only_vector(walk, node)
    names = [name for name in node.proto.output if name]
    ends = np.cumsum([walk.shapes(name)[0][0] for name in names])[:-1]
    return [Sizes(mask) for mask in np.split(_mask(walk, node.input(0)), ends)]


def size_product(walk: RowWalk, node: OperatorNode) -> Fact:
    """The product or sum of sizes."""
    walk.only_fixed(node, 0)
    return Sizes(np.full(walk.shapes(node.proto.output[0])[0], _mask(walk, node.input(0)).any()))


def count_up(walk: RowWalk, node: OperatorNode) -> Fact:
    """Range from 0 up to the number of rows: the number of each row."""
    walk.only_fixed(node, 1)
    has_all = all(each.shapes[node.proto.output[0]] == (each.rows,) for each in walk.passes)
    if not has_all or walk.value(node.input(0)) != [0] or walk.value(node.input(2)) != [1]:
        raise RowsMeet("computes with the number of rows")
    return Rows(0, counts_up=True)


def repeat_fixed(walk: RowWalk, node: OperatorNode) -> Fact:
    """Expand and Tile of a fixed tensor to a size that depends on the number of rows."""
    if not isinstance(walk.fact(node.input(0)), Fixed):
        raise RowsMeet("computes with the number of rows")
    return _repeated(walk, node.input(0), node.proto.output[0])


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ELEMENTWISE: Final = _words("""
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil
    Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity IsInf
    IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu
    Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor
    RegexFullMatch StringConcat Binarizer LabelEncoder CategoryMapper
    com.microsoft.Gelu com.microsoft.FastGelu com.microsoft.BiasGelu com.microsoft.QuickGelu
""")
REDUCTIONS: Final = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
FIRST_AXIS: Final = _words("""
    Conv ConvInteger ConvTranspose AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool InstanceNormalization
    GroupNormalization LRN LpPool DepthToSpace SpaceToDepth QLinearConv STFT Col2Im com.microsoft.QLinearAveragePool
    com.microsoft.QLinearGlobalAveragePool com.microsoft.FusedConv com.microsoft.GroupNorm
""")
ALL_FIRST: Final[Mapping[str, tuple[int, ...]]] = {
    "GridSample": (),
    "Attention": (),
    "DeformConv": (1, 3),
    "com.microsoft.Attention": (1, 2),
    "com.microsoft.MultiHeadAttention": (3, 8, 9),
    "com.microsoft.QAttention": (1, 2, 3, 4, 6, 7),
    "com.microsoft.EmbedLayerNormalization": (2, 3, 4, 5, 6),
}
"""With the places of the inputs that must be constant."""
TABLES: Final = _words("""
    TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor LinearClassifier LinearRegressor SVMClassifier
    SVMRegressor Scaler Normalizer Imputer TfIdfVectorizer
""")
ONE_SCALE: Final = "has one scale for all rows"
DATA_ROWS: Final = "returns a number of rows that depends on the data"
ENDS: Final[Mapping[str, str]] = {
    "DynamicQuantizeLinear": ONE_SCALE,
    "com.microsoft.DynamicQuantizeMatMul": ONE_SCALE,
    "com.microsoft.DynamicQuantizeLSTM": ONE_SCALE,
    **dict.fromkeys(("NonMaxSuppression", "NonZero", "Unique"), DATA_ROWS),
    "StringSplit": "pads all rows to the length of the longest",
    "EyeLike": "depends on a row's place in the batch",
}
"""Operators that never keep rows apart, and why."""
ROW_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys([f"Reduce{kind}" for kind in REDUCTIONS], reduce),
    **dict.fromkeys(FIRST_AXIS, first_input),
    **{name: all_first(*constant) for name, constant in ALL_FIRST.items()},
    "RotaryEmbedding": rotate,
    **dict.fromkeys(TABLES, table),
    **dict.fromkeys(("ArgMax", "ArgMin"), best),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), along("normalises over the rows", coerced_before=13)),
    **dict.fromkeys(("TopK", "LpNormalization"), along("ranks or scales the rows")),
    **dict.fromkeys(("CumSum", "CumProd"), cumulate),
    **dict.fromkeys(
        (
            *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
            *("com.microsoft.SkipLayerNormalization", "com.microsoft.SkipSimplifiedLayerNormalization"),
        ),
        from_axis,
    ),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), reshape),
    **dict.fromkeys(("Expand", "Tile"), expand),
    **dict.fromkeys(("Resize", "Upsample"), resize),
    **dict.fromkeys(("MatMul", "MatMulInteger", "com.microsoft.MatMulIntegerToFloat"), product(0, 1)),
    **dict.fromkeys(("com.microsoft.FusedMatMul", "com.microsoft.TransposeMatMul"), product(0, 1)),
    **dict.fromkeys(("Gemm", "com.microsoft.FusedGemm"), gemm),
    **dict.fromkeys(("GatherElements", "ScatterElements", "Scatter"), gather_elements),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), recurrent),
    **dict.fromkeys(
        ("QuantizeLinear", "DequantizeLinear", "com.microsoft.QuantizeLinear", "com.microsoft.DequantizeLinear"),
        quantise,
    ),
    **dict.fromkeys(("com.microsoft.QLinearAdd", "com.microsoft.QLinearMul"), quantised(0, 3)),
    **dict.fromkeys(("com.microsoft.QLinearSigmoid", "com.microsoft.QLinearLeakyRelu"), quantised(0)),
    "com.microsoft.QGemm": quantised_gemm,
    "com.microsoft.QLinearConcat": quantised_concatenate,
    "com.microsoft.QLinearSoftmax": along("normalises over the rows", coerced_before=13),
    "com.microsoft.MatMulNBits": from_axis,
    "QLinearMatMul": product(0, 3),
    "MeanVarianceNormalization": mean_variance,
    "BatchNormalization": batch_normalise,
    "Dropout": keep_axis,
    "DFT": fourier,
    "Transpose": transpose,
    "Concat": concatenate,
    "Split": split,
    "Slice": slice_,
    "Pad": pad,
    "Einsum": einsum,
    "Gather": gather,
    "GatherND": gather_nd,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
    "Trilu": triangle,
    "Compress": compress,
    "ReverseSequence": reverse_sequence,
    "MaxPool": max_pool,
    "OneHotEncoder": keep_axis,
    "ArrayFeatureExtractor": extract,
    "Shape": shape_of,
    "Size": size_of,
}
SIZE_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Cast", "Identity"), size_elementwise),
    "Div": size_divide,
    "Where": size_where,
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Reshape"), size_reshape),
    **dict.fromkeys(("ReduceProd", "ReduceSum"), size_product),
    **dict.fromkeys(("Expand", "Tile"), repeat_fixed),
    "Equal": size_equal,
    "Gather": size_gather,
    "Slice": size_slice,
    "Concat": size_concatenate,
    "Split": size_split,
    "Range": count_up,
    "ConstantOfShape": constant_of_shape,
}


def obstacle_in_graph(path: Path, signature: Signature, feeds: Sequence[tuple[int, Mapping[str, Array]]]) -> str:
    """Why rows of this model may meet; empty if its graph proves that they do not.

    `feeds` has inputs of different numbers of rows. The first two, which differ in nothing else, must run; of the
    others, those that the model refuses are left out. Raises what ONNX Runtime raises.
    """
    try:
        graph = OpenGraph(path, signature)
    except RowsMeet as found:
        return f"its graph {found}"
    passes = []
    for rows, feed in feeds:
        try:
            passes.append(graph.run(rows, feed))
        except Exception:  # exceptions of ONNX Runtime share no base class
            if len(passes) < FEEDS_MIN:
                raise
    return RowWalk(graph, passes, OperatorRules(ROW_RULES, SIZE_RULES, ENDS)).obstacle()
