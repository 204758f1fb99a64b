"""Decides whether requests may share a forward pass: only if each row of a batch provably gets the outputs that it gets
alone.

For an ONNX model the graph decides (`sloop.profile.batch_axis`), for a Python model its author (`joins_rows = True`).
Then trials try to refute it: rows of very different scale, extreme values, zeros, equal rows, texts and open dimensions
of different lengths, and real samples if there are any, each alone and beside others. If nothing is proven, each
request runs alone. A user can overrule either answer in the application file.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np

from sloop.errors import InputError
from sloop.profile.batch_rules import obstacle_in_graph
from sloop.profile.model import (
    Array,
    Session,
    has_runtime,
    input_shapes,
    is_python,
    open_dimensions,
    open_model,
    row_shapes,
    synthesise,
)
from sloop.tensor import ARRAY_TYPES, Port, Signature, bfloats_of, floats_of
from sloop.user_code import WrongOutputsError, failure_of, raised_by_users, runtime_reason

PASSES_ROWS: Final = (2, 3)
"""The numbers of rows with which the whole graph is run."""
SMALL_ROWS: Final = 5 * 7
"""A further number of rows, for the smallest sizes. A graph that reshapes the entries of all rows into blocks of 5 or 7
then runs, although a single row fills no block: this shows that rows share blocks."""
TRIAL_S_MAX: Final = 3.0
"""Seconds after which no further batch is tried."""
REPEATS: Final = 4
"""How often each row is in the largest batch: some code behaves differently beyond some number of rows."""
REPEATED_BYTES_MAX: Final = 2**25
"""The most bytes of inputs in that batch; a model could take memory for larger ones that serving needs."""
TOLERANCES: Final = {"f2": 1e-2, "f4": 1e-3, "f8": 1e-3}
"""Allowed difference by NumPy type, relative to the largest value of the row's own output: kernels for a larger batch
add in another order. Integers must be equal, except those of a proven graph."""
NOISE: Final = {"f2": 2e-3, "f4": 1e-6, "f8": 1e-12}
"""Relative change of the inputs by NumPy type, about as large as rounding: it shows how much a row's output changes
from rounding alone."""
NOISE_TIMES: Final = 4.0
"""A row's output beside others may differ by this many times that change."""
SCALES: Final = (1.0, 1.0, 1e4, 0.0, 1e-4, -30.0, 1.0)
"""What the random inputs of each row are multiplied by."""
TEXTS: Final = (b"a", b"seven words are longer than one word", b"", b"42", "Zürich, 東京".encode(), b"a b", b"a")
INTEGERS: Final = (1, 1, 0, 1, 100, 7, 1)
"""The largest integer of each row. A model may refuse integers that are not valid indices for it."""

FLOATS: Final = {"FP16", "FP32", "FP64", "BF16"}
NOISE_PART_MAX: Final = 0.02
"""The largest difference, relative to the largest value of the output, that is excused as rounding for a Python model.
A larger one may come from other rows, because nothing is proven."""
SMALL: Final = 3
"""The open dimensions of the last trial have at most this size; those before are halves, quarters and so on."""
LOAD_S_MAX: Final = 2.0
"""If a Python model loads in less time, it is loaded a second time, to see whether it keeps state."""

Feed = Mapping[str, Array]


def obstacle_to_joining(
    session: Session,
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    samples: Feed | None = None,
    *,
    load_s: float = 0.0,
) -> str:
    """Why requests for this model cannot share a forward pass; empty if it is proven that they can.

    `shapes` gives the shape of one row of inputs with further open dimensions; without it, usual sizes are tried.
    `samples` has real inputs by name; their first dimension counts rows. `load_s` is how long the model took to load.
    """
    if without := obstacle_in_ports(session.signature):
        return without
    if has_runtime(path) and session.joins_rows:
        return ""  # its author knows how it computes rows; trials look into ONNX files
    if is_python(path) or has_runtime(path):
        if session.joins_rows is None:
            return "its class does not say that rows may be joined (`joins_rows = True`)"
        if not session.joins_rows:
            return "its author says that its rows cannot be joined"
    trials = _Trials(session, path, shapes, samples)
    return trials.obstacle(sees_state=load_s <= LOAD_S_MAX)


class _Differs(Exception):
    """A trial has refuted that rows can be joined; the text says why."""


def obstacle_in_ports(signature: Signature) -> str:
    """Why the inputs and outputs of a model rule out that requests share a forward pass; empty if they do not."""
    for port in signature.inputs:
        if not port.has_rows:
            return f"input {port.name!r} {list(port.shape)} belongs to a request as a whole"
    for port in (*signature.inputs, *signature.outputs):
        if port.shape[:1] != (-1,):
            return f"the first dimension of {port.name!r} {list(port.shape)} is not open"
    return ""


def read_sample(path: Path, signature: Signature) -> Feed:
    """Real inputs from a file: `.npz` with an array for each input, or `.npy` for a model with one input. The first
    dimension counts the rows. InputError for a file that does not fit the inputs."""
    names = [port.name for port in signature.inputs]
    try:
        with open(path, "rb") as file:
            opened = np.load(file, allow_pickle=False)
            given = {names[0]: opened} if isinstance(opened, np.ndarray) else {name: opened[name] for name in opened}
    except (OSError, ValueError) as error:
        what = f"the sample cannot be read: {error}"
        raise InputError(what, where=str(path), help="write it with numpy.savez(FILE, INPUT=array, …)") from error
    if given.keys() != set(names):
        what = f"the sample has {sorted(given)}; the inputs are {names}"
        raise InputError(what, where=str(path), help="write it with numpy.savez(FILE, INPUT=array, …)")
    made: dict[str, Array] = {}
    for port in signature.inputs:
        array = np.asarray(given[port.name])
        if array.ndim != len(port.shape):
            what = f"the sample's {port.name!r} has the shape {list(array.shape)}; the input's is {list(port.shape)}"
            raise InputError(what, where=str(path), help="its first dimension counts the rows")
        if array.dtype.kind == "U":
            array = np.char.encode(array)
        made[port.name] = array.astype(ARRAY_TYPES[port.datatype])
    return made


@dataclass(frozen=True, slots=True, eq=False)
class _TrialRow:
    """A row that ran alone: its inputs and outputs."""

    feed: Feed
    outputs: Sequence[Array]


class _Trials:
    """Tries to refute that rows can be joined."""

    def __init__(
        self, session: Session, path: Path, shapes: Mapping[str, tuple[int, ...]], samples: Feed | None
    ) -> None:
        self._session, self._path, self._samples = session, path, samples
        self._is_proven = not is_python(path)
        self._sizes = list(row_sizes(session, shapes))
        self._noise: dict[tuple[_TrialRow, int], list[Sequence[Array]]] = {}

    def obstacle(self, *, sees_state: bool) -> str:
        if self._is_proven and (why := self._obstacle_in_graph()):
            return why
        until_s = time.monotonic() + TRIAL_S_MAX
        first: list[_TrialRow] = []
        for sizes in self._sizes:
            began_s = time.monotonic()
            try:
                rows = self._alone(sizes, until_s)
                row_s = (time.monotonic() - began_s) / max(1, len(rows))
                first = first or rows
                for batch in _batches(rows):
                    if time.monotonic() + row_s * len(batch) < until_s:
                        self._compare(batch)
            except _Differs as found:
                return str(found)
        return "" if self._is_proven or not sees_state else self._state(first)

    def _obstacle_in_graph(self) -> str:
        """Why the graph does not keep rows apart; empty if it does. Row shapes that the model refuses are dropped."""
        reason = ""
        for place in range(len(self._sizes)):
            try:
                why = obstacle_in_graph(self._path, self._session.signature, list(self._graph_feeds(place)))
            except Exception as error:  # exceptions of ONNX Runtime share no base class
                reason = reason or (error.what if isinstance(error, InputError) else runtime_reason(error))
                continue
            del self._sizes[:place]
            return why
        try:
            signature, sizes = self._session.signature, self._sizes[-1]
            self._session.run(synthesise(signature, input_shapes(signature, 1, sizes, where=str(self._path))))
        except Exception:
            return f"it fails on the inputs that sloop made, so nothing could be tried: {reason}"
        return f"several rows at once fail: {reason}"

    def _graph_feeds(self, place: int) -> Iterator[tuple[int, Feed]]:
        signature = self._session.signature
        for number, sizes in enumerate(self._sizes[place:], place):
            is_small = 0 < number >= len(self._sizes) - 2
            for rows in (*PASSES_ROWS, SMALL_ROWS) if is_small else PASSES_ROWS:
                yield rows, synthesise(signature, input_shapes(signature, rows, sizes, where=str(self._path)))

    def _alone(self, sizes: Mapping[str, tuple[int, ...]], until_s: float) -> list[_TrialRow]:
        """The rows that the model does not refuse. It stops after a third of the time that is left."""
        found: list[_TrialRow] = []
        enough_s = time.monotonic() + (until_s - time.monotonic()) / 3
        for feed in self._feeds(sizes):
            if time.monotonic() > enough_s and len(found) > 1:
                break
            try:
                found.append(_TrialRow(feed, self._session.run(feed)))
            except WrongOutputsError as error:
                raise _Differs(f"one row alone fails: {error}") from error
            except raised_by_users():  # the author's code, or inputs that are invalid for this model
                continue
        return found

    def _feeds(self, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[Feed]:
        """One row each."""
        signature = self._session.signature
        shapes = input_shapes(signature, 1, sizes, where=str(self._path))
        for place in range(len(SCALES)):
            yield made_row(signature, shapes, place)
        if sizes is not self._sizes[0]:
            return
        example = self._session.example(2)
        for given in filter(None, (self._samples, example)):
            rows = min(len(given[port.name]) for port in signature.inputs)
            for row in range(min(rows, len(SCALES))):
                yield {port.name: given[port.name][row : row + 1] for port in signature.inputs}

    def _compare(self, batch: Sequence[_TrialRow]) -> None:
        """Raises `_Differs` if a row gets other outputs beside the others than alone."""
        names = [port.name for port in self._session.signature.inputs]
        try:
            together = self._session.run({name: np.concatenate([row.feed[name] for row in batch]) for name in names})
        except raised_by_users() as error:
            raise _Differs(f"{len(batch)} rows at once fail: {failure_of(error).detail}") from error
        for place, port in enumerate(self._session.signature.outputs):
            output = np.asarray(together[place])
            if output.shape[:1] != (len(batch),):
                raise _Differs(f"output {port.name!r} has the shape {list(output.shape)} for {len(batch)} rows")
            for number, row in enumerate(batch):
                beside_others = output[number : number + 1]
                if not self._is_same(port, row, place, beside_others, len(batch)):
                    beside = f"output {port.name!r} of a row beside {len(batch) - 1} others"
                    raise _Differs(f"{beside} differs from that of the row alone")

    def _state(self, rows: Sequence[_TrialRow]) -> str:
        """Why outputs of a Python model may depend on earlier calls: a second model gives other outputs for the same
        rows in another order. Empty if it does not."""
        until_s = time.monotonic() + TRIAL_S_MAX
        fresh = open_model(self._path, 1)
        try:
            for row in (*reversed(rows), *rows):
                outputs = fresh.run(row.feed)
                for place, port in enumerate(self._session.signature.outputs):
                    if not self._is_same(port, row, place, np.asarray(outputs[place]), 1):
                        return f"output {port.name!r} of a row depends on the calls before it (state or random numbers)"
                if time.monotonic() > until_s:
                    break
        except raised_by_users() as error:
            return f"a row fails after others: {failure_of(error).detail}"
        return ""

    def _is_same(self, port: Port, row: _TrialRow, place: int, beside: Array, rows: int) -> bool:
        """Whether this output of a row, `beside` others, is as alone, within rounding and the row's own noise."""
        alone = np.asarray(row.outputs[place])
        if alone.shape != beside.shape:
            return False
        if self._is_proven and alone.dtype.kind in "iub" and port.datatype != "BF16":
            # Rounding decides which of two equally large elements is the largest, and the last bit of a byte.
            return True
        alone, beside = _numbers(alone, port), _numbers(beside, port)
        if _equals(alone, beside, port):
            return True
        changed = [_numbers(np.asarray(outputs[place]), port) for outputs in self._noisy(row, rows)]
        if alone.dtype.kind != "f":
            return bool(np.all(np.logical_or.reduce([alone == beside, *(each != alone for each in changed)])))
        with np.errstate(invalid="ignore"):
            noise = max([float(np.nanmax(np.abs(each - alone), initial=0.0)) for each in changed], default=0.0)
        return _equals(alone, beside, port, NOISE_TIMES * noise, inf if self._is_proven else NOISE_PART_MAX)

    def _noisy(self, row: _TrialRow, rows: int) -> list[Sequence[Array]]:
        """The outputs of a row whose inputs have changed by about as much as rounding changes them. Where the graph has
        proven that rows are independent, also those beside copies of itself: kernels add in another order there."""
        found = self._noise.get((row, rows))
        if found is None:
            found = [self._session.run(feed) for feed in _nudged(row.feed, self._session.signature)]
            if self._is_proven and rows > 1:
                copies = {name: np.concatenate([value] * rows) for name, value in row.feed.items()}
                made = self._session.run(copies)
                found += [[output[number : number + 1] for output in made] for number in range(rows)]
            self._noise[row, rows] = found
        return found


def row_sizes(session: Session, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The row shapes to try: given or usual sizes, then halves, quarters and so on of the open dimensions. A model that
    reshapes the entries of all rows into blocks mixes rows only if a row does not fill its blocks."""
    signature, dimensions = session.signature, open_dimensions(session)
    ranks = {port.name: len(port.shape) for port in signature.inputs}
    rows = {name: shape[1:] if len(shape) == ranks.get(name) else shape for name, shape in shapes.items()}
    usual = row_shapes(signature, dimensions, [each.proposal for each in dimensions]) | rows
    seen = []
    full = [usual[name][place] for name, place in (each.ports[0] for each in dimensions)]
    halved = [full]
    while any(size > 1 for size in halved[-1]):
        halved.append([-(-size // 2) for size in halved[-1]])
    for sizes in (*halved, [min(size, SMALL) for size in full]):
        made = usual | row_shapes(signature, dimensions, sizes)
        if made not in seen:
            seen.append(made)
            yield made


def made_row(signature: Signature, shapes: Mapping[str, tuple[int, ...]], place: int) -> dict[str, Array]:
    """The inputs of one row. Rows at different places differ in scale, length of texts and range of integers; the first
    two are equal, and the last one begins like them."""
    generator = np.random.default_rng(0 if place < 2 else place)
    made: dict[str, Array] = {}
    for port in signature.inputs:
        shape, dtype = shapes[port.name], ARRAY_TYPES[port.datatype]
        if port.datatype == "BYTES":
            made[port.name] = np.full(shape, TEXTS[place], dtype=object)
        elif port.datatype in FLOATS:
            scale = np.clip(SCALES[place], -30, 100) if port.datatype == "FP16" else SCALES[place]
            values = (generator.random(shape) * scale).astype(np.float32)
            made[port.name] = bfloats_of(values) if port.datatype == "BF16" else values.astype(dtype)
        else:
            made[port.name] = generator.integers(0, INTEGERS[place], shape, endpoint=True).astype(dtype)
    if place == len(SCALES) - 1:
        first = made_row(signature, shapes, 0)
        for name, value in made.items():
            half = value.reshape(1, -1)
            half[:, : -(-half.shape[1] // 2)] = first[name].reshape(1, -1)[:, : -(-half.shape[1] // 2)]
    return made


def _batches(rows: Sequence[_TrialRow]) -> Iterator[Sequence[_TrialRow]]:
    """Rows together, in both orders, in pairs, and many at once; rows in one batch have equal shapes."""
    by_shape: dict[tuple[Any, ...], list[_TrialRow]] = {}
    for row in rows:
        by_shape.setdefault(tuple([value.shape for value in row.feed.values()]), []).append(row)
    for same in by_shape.values():
        yield same
        yield same[::-1]
        if REPEATS * sum(value.nbytes for row in same for value in row.feed.values()) <= REPEATED_BYTES_MAX:
            yield same * REPEATS
        for place in range(1, len(same)):
            yield [same[0], same[place]]
            yield [same[place], same[0]]


def _nudged(feed: Feed, signature: Signature) -> Iterator[Feed]:
    """The inputs of a row, changed by about as much as rounding changes them."""
    for sign in (1, -1):
        made = dict(feed)
        for port in signature.inputs:
            if port.datatype.startswith("FP"):
                value = feed[port.name]
                made[port.name] = (value * (1 + sign * NOISE[value.dtype.str[1:]])).astype(value.dtype)
        yield made


def is_same(alone: Array, beside: Array, port: Port) -> bool:
    """Whether an output of some rows beside others is that of these rows alone, within the tolerance of its type."""
    return alone.shape == beside.shape and _equals(_numbers(alone, port), _numbers(beside, port), port)


def _numbers(array: Array, port: Port) -> Array:
    return floats_of(array) if port.datatype == "BF16" else array


def _equals(alone: Array, beside: Array, port: Port, noise: float = 0.0, part_max: float = 0.0) -> bool:
    tolerance = TOLERANCES["f2"] if port.datatype == "BF16" else TOLERANCES.get(alone.dtype.str[1:])
    if tolerance is None:
        return bool(np.array_equal(alone, beside))
    scale = float(np.abs(np.nan_to_num(alone, posinf=0.0, neginf=0.0)).max(initial=0.0)) or 1.0
    return bool(
        np.allclose(beside, alone, rtol=0.0, atol=tolerance * scale + min(noise, part_max * scale), equal_nan=True)
    )
