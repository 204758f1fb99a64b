"""Padding: rows whose open dimensions differ in length share a forward pass, filled up at the end to the longest.

A user declares the value of each input (`pad: {ids: 0, mask: 0}`); the mask is one of them. That the answers stay the
same is not believed but tried (`padding_of`): rows run as they are and filled up, and each output, cut back where its
length follows the input's, must be the same within the tolerance of its type. The worker compares real requests
likewise (`sloop.serve.verify`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from sloop.errors import InputError
from sloop.profile.joining import Feed, is_same, made_row, row_sizes
from sloop.profile.model import (
    Array,
    OpenDimension,
    Session,
    input_shapes,
    is_python,
    open_dimensions,
    row_shapes,
)
from sloop.tensor import Cut, Padding, PadValue, Port, Signature, Slices, described, fill, pad_element
from sloop.user_code import failure_of, raised_by_users

TRIED: Final = (0, 5, 4)
"""The rows of `made_row` that are tried: integers up to 1, which every model takes, then up to 7 and up to 100."""
EXAMPLES: Final = 3
"""The most rows of a sample, or of the author's example, that are tried."""


def padding_of(
    session: Session,
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    pad: Mapping[str, PadValue],
    samples: Feed | None = None,
) -> tuple[Padding, tuple[OpenDimension, ...]]:
    """How rows of a model are padded with these values by input, and the open dimensions that it takes only if they are
    equally long in all inputs that have them. InputError if a value does not fit, if an open dimension has none, or if
    a trial shows that padding changes the answers.

    `shapes` gives the shape of one row of inputs with open dimensions; without it, usual sizes are tried. `samples` has
    real inputs by name; their first dimension counts rows.
    """
    values = _values(session.signature, pad, path)
    trial = _Trial(session, path, shapes, pad)
    return Padding(values, trial.cuts(samples)), trial.equal


def _values(signature: Signature, pad: Mapping[str, PadValue], path: Path) -> tuple[PadValue | None, ...]:
    ports = {port.name: port for port in signature.inputs}
    inputs = f"its inputs are {described(signature.inputs)}"

    def fail(what: str, help: str = inputs) -> NoReturn:
        raise InputError(f"`pad` {what}", where=str(path), help=help)

    for name, value in pad.items():
        port = ports.get(name)
        if port is None:
            fail(f"names the input {name!r}, which the model does not have")
        if not port.open_places:
            fail(f"names the input {name!r}, which has no open dimension besides its rows")
        if port.datatype == "BYTES":
            fail(f"names the input {name!r}, whose elements are texts of any length", "leave `pad` out")
        if (why := _wrong(port.datatype, value)) != "":
            fail(f"has {str(value).lower() if isinstance(value, bool) else value} for input {name!r}, {why}")
    for port in signature.inputs:
        if port.open_places and port.name not in pad:
            help = "add the value that the model ignores, such as 0 for a mask; or leave `pad` out"
            fail(f"has no value for input {port.name!r} {port.kind}, which has an open dimension", help)
    return tuple(pad.get(port.name) for port in signature.inputs)


def _wrong(datatype: str, value: PadValue) -> str:
    """Why a value cannot be an element of this type; empty if it can."""
    if isinstance(value, bool) is not (datatype == "BOOL"):
        return "which takes true or false" if datatype == "BOOL" else f"which takes {datatype} values"
    if isinstance(value, float) and "INT" in datatype and value != int(value):
        return f"which takes {datatype} values"
    try:
        pad_element(datatype, value)
    except OverflowError:
        return f"which is out of {datatype}'s range"
    return ""


class _Trial:
    """Compares rows as they are with the same rows, filled up."""

    def __init__(
        self, session: Session, path: Path, shapes: Mapping[str, tuple[int, ...]], pad: Mapping[str, PadValue]
    ) -> None:
        self._session, self._path, self._pad = session, path, pad
        self._ports = session.signature.inputs
        self._dimensions = open_dimensions(session)
        usual = next(row_sizes(session, shapes))
        self._full = [usual[name][place] for name, place in (each.ports[0] for each in self._dimensions)]
        self.equal: tuple[OpenDimension, ...] = ()
        """The dimensions of several inputs without which the model fails if one of these alone is filled up."""

    def cuts(self, samples: Feed | None) -> tuple[Cut, ...]:
        """Where outputs follow inputs."""
        found: tuple[Cut, ...] | None = None
        reason = ""
        for feed in chain(self._made(), self._real(samples)):
            try:
                alone = [np.asarray(each) for each in self._session.run(feed)]
            except raised_by_users() as error:  # values that this model refuses
                reason = reason or failure_of(error).detail
                continue
            lengths = self._lengths(feed)
            longer = [max(length + 1, full) for length, full in zip(lengths, self._full, strict=True)]
            filled = self._filled(feed, longer)
            try:
                padded = [np.asarray(each) for each in self._session.run(filled)]
            except raised_by_users() as error:
                self._fail(f"makes it fail: {failure_of(error).detail}")
            if found is None:
                found = self._followed(alone, padded, lengths, longer)
                self.equal = tuple(
                    each
                    for place, each in enumerate(self._dimensions)
                    if self._must_be_equal(each, feed, [*lengths[:place], longer[place], *lengths[place + 1 :]])
                )
            shapes = [feed[port.name].shape for port in self._ports]
            self._compare(alone, padded, Padding((), found).kept(shapes, [each.ndim for each in alone]))
        if found is None:
            what = f"could not be tried, because the model fails on the inputs that sloop made: {reason}"
            self._fail(what, "give typical sizes with a profile (`sloop profile`), or an `example(rows)` in Python")
        return found

    def _fail(self, what: str, help: str = "give the model its mask under `pad`, or leave `pad` out") -> NoReturn:
        values = ", ".join(f"{name}: {value}" for name, value in self._pad.items())
        raise InputError(f"`pad: {{{values}}}` {what}", where=str(self._path), help=help)

    def _made(self) -> Iterator[Feed]:
        """Rows whose integers and booleans nowhere have the value of padding, which may mean that there is nothing. Of
        the usual lengths they have a half, a quarter and so on: many models take powers of two only, and it can be seen
        which dimension an output follows."""
        signature = self._session.signature
        lengths = [max(1, length >> (1 + place)) for place, length in enumerate(self._full)]
        rows = row_shapes(signature, self._dimensions, lengths)
        shapes = input_shapes(signature, 1, rows, self._session.dimension_names, where=str(self._path))
        for place in TRIED:
            feed = made_row(signature, shapes, place)
            for port in self._ports:
                if port.name in self._pad and not port.datatype.startswith(("FP", "BF")):
                    value = pad_element(port.datatype, self._pad[port.name])
                    other = not value if port.datatype == "BOOL" else value + 1
                    feed[port.name] = np.where(feed[port.name] == value, other, feed[port.name]).astype(value.dtype)
            yield feed

    def _real(self, samples: Feed | None) -> Iterator[Feed]:
        """Rows of a sample, and of the author's example, as they are."""
        for given in filter(None, (samples, self._session.example(2))):
            rows = min(len(given[port.name]) for port in self._ports)
            for row in range(min(rows, EXAMPLES)):
                yield {port.name: given[port.name][row : row + 1] for port in self._ports}

    def _must_be_equal(self, dimension: OpenDimension, feed: Feed, longer: Sequence[int]) -> bool:
        """Whether the model fails if the inputs that have a dimension differ there; `longer` are the lengths of a row
        that is longer in it alone. Its name does not say so: exports may call the lengths of a text and of its
        translation alike."""
        filled = self._filled(feed, longer)
        for name, _ in dimension.ports[1:]:
            try:
                self._session.run({**feed, name: filled[name]})
            except raised_by_users():
                return True
        return False

    def _lengths(self, feed: Feed) -> list[int]:
        return [feed[name].shape[1 + place] for name, place in (each.ports[0] for each in self._dimensions)]

    def _filled(self, feed: Feed, lengths: Sequence[int]) -> Feed:
        """The row with its open dimensions filled up to these lengths."""
        made = dict(feed)
        rows = row_shapes(self._session.signature, self._dimensions, lengths)
        for port in self._ports:
            if port.name in self._pad:
                own = feed[port.name]
                made[port.name] = np.empty((1, *rows[port.name]), own.dtype)
                fill(made[port.name], pad_element(port.datatype, self._pad[port.name]), [own])
        return made

    def _followed(
        self, alone: Sequence[Array], padded: Sequence[Array], lengths: Sequence[int], longer: Sequence[int]
    ) -> tuple[Cut, ...]:
        """Which dimensions of outputs have become longer, and those of inputs that they follow."""
        found: list[Cut] = []
        pairs = list(zip(lengths, longer, strict=True))
        for output, (port, one, other) in enumerate(zip(self._session.signature.outputs, alone, padded, strict=True)):
            if one.ndim != other.ndim:
                self._fail(f"changes the answers: output {port.name!r} has another number of dimensions")
            for place, pair in enumerate(zip(one.shape, other.shape, strict=True)):
                if pair[0] == pair[1]:
                    continue
                if pair not in pairs:
                    what = f"output {port.name!r} has {pair[0]} entries without padding, {pair[1]} with it"
                    self._fail(f"changes the answers: {what}, and cannot be cut back", "leave `pad` out")
                found.append(Cut(output, place, *_first_port(self._ports, self._dimensions[pairs.index(pair)])))
        return tuple(found)

    def _compare(self, alone: Sequence[Array], padded: Sequence[Array], kept: Sequence[Slices]) -> None:
        for port, one, other, slices in zip(self._session.signature.outputs, alone, padded, kept, strict=True):
            if not is_python(self._path) and one.dtype.kind in "iub" and port.datatype != "BF16":
                continue  # rounding decides which of two equally large elements is the largest
            if not is_same(one, other[(slice(None), *slices)] if one.ndim else other, port):
                self._fail(f"changes the answers: output {port.name!r} of a row differs from that without padding")


def _first_port(ports: Sequence[Port], dimension: OpenDimension) -> tuple[int, int]:
    """The first input that has an open dimension, and its place there, with the rows."""
    name, place = dimension.ports[0]
    position = [port.name for port in ports].index(name)
    return position, place + ports[position].has_rows
