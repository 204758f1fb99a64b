"""Tensors of one request on its way through a graph: taken apart into rows, put together again, looked at to decide.

Promises that taking apart copies nothing: a row is a slice of the bytes it lies in. Putting together lays bytes one
after the other. What outputs say that fits no edge raises `ValueError` with the stage's and the output's name. Pure
functions over `Held`; must not know the core or processes.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import prod

import numpy as np
from msgspec import Struct

from sloop.serve.wiring import Decision, Source
from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Tensor


class Held(Struct):
    """What one request has gathered: tensors by the stage they came from, and which rows became parts."""

    whole: dict[str, Sequence[Tensor]]
    parts: dict[str, dict[int, Sequence[Tensor]]] = {}  # msgspec makes a new one for each
    rows: dict[str, Sequence[int]] = {}
    """For each stage with `each`, the rows of the output that its parts are, in order."""


def keep(held: Held, stage: str, part: int | None, tensors: Sequence[Tensor]) -> None:
    """Keep what a stage gave, for a part where it ran for one."""
    if part is None:
        held.whole[stage] = tensors
    else:
        held.parts.setdefault(stage, {})[part] = tensors


def ways_of(held: Held, stage: str, decisions: Sequence[Decision], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """How many parts take each edge away from a stage, by what it gave; remembers in `held` which rows they are."""
    counts = []
    for decision in decisions:
        if decision.each is None:
            if decision.when is None:
                counts.append(1)
            else:
                (chosen,) = _holds(decision, tensors[decision.when], stage, 1)
                counts.append(int(chosen))
            continue
        total = _rows(tensors[decision.each])
        for position, port in decision.sliced:
            if _rows(tensors[position]) != total:
                raise ValueError(
                    f"stage {stage!r} gave {_rows(tensors[position])} rows of {port.name!r} and {total} of those that "
                    f"{decision.target!r} runs for each of"
                )
        rows: Sequence[int] = range(total)
        if decision.when is not None:
            chosen_rows = _holds(decision, tensors[decision.when], stage, total)
            rows = [row for row in rows if chosen_rows[row]]
        held.rows[decision.target] = rows
        counts.append(len(rows))
    return tuple(counts)


def gather(held: Held, stage: str, part: int, wires: Sequence[Sequence[Source]]) -> list[Tensor]:
    """A stage's inputs, each from the first of its sources that there is something from."""
    return [_needed(held, stage, part, sources) for sources in wires]


def answer(held: Held, endings: Sequence[tuple[str, Sequence[Source]]]) -> dict[str, Tensor]:
    """The outputs of a request that is done, by name; those of branches it did not take are left out, and so are rows
    of parts that cannot be joined."""
    found = {}
    for name, sources in endings:
        with suppress(ValueError):
            tensor = _first(held, 0, sources)
            if tensor is not None:
                found[name] = tensor
    return found


def _needed(held: Held, stage: str, part: int, sources: Sequence[Source]) -> Tensor:
    tensor = _first(held, part, sources)
    if tensor is None:
        missing = " or ".join(repr(source.stage) for source in sources)
        raise ValueError(f"stage {stage!r} needs what {missing} gives, which this request did not pass")
    return tensor


def _first(held: Held, part: int, sources: Sequence[Source]) -> Tensor | None:
    for source in sources:
        if source.kind == "joined":
            meeting = [other for other in sources if (other.kind, other.scope) == ("joined", source.scope)]
            tensor = _joined(held, meeting)
        else:
            tensor = _from(held, part, source)
        if tensor is not None:
            return tensor
    return None


def _from(held: Held, part: int, source: Source) -> Tensor | None:
    """What one source gives, None where the request did not pass it."""
    if source.kind == "part":
        tensors = held.parts.get(source.stage, {}).get(part)
        return None if tensors is None else tensors[source.position]
    whole = held.whole.get(source.stage)
    if whole is None:
        return None
    tensor = whole[source.position]
    return tensor if source.kind == "whole" else _row(tensor, held.rows[source.scope][part])


def _joined(held: Held, sources: Sequence[Source]) -> Tensor | None:
    """The outputs of all parts, one after the other in the order of parts: of each part from the first of these sources
    that it passed. Without any, no rows."""
    scope, port = sources[0].scope, sources[0].port
    if scope not in held.rows:
        return None
    ran: dict[int, Tensor] = {}
    for source in reversed(sources):
        ran |= {part: tensors[source.position] for part, tensors in held.parts.get(source.stage, {}).items()}
    tensors = [ran[part] for part in sorted(ran)]
    assert port is not None
    if not tensors:
        return Tensor(port.datatype, (0, *(max(size, 0) for size in port.shape[1:])), b"")
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = sorted({tensor.shape[1:] for tensor in tensors})
        stages = " or ".join(repr(source.stage) for source in sources)
        raise ValueError(
            f"the parts' outputs {port.name!r} of stage {stages} cannot be joined: rows of the shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}"
        )
    rows = sum(_rows(tensor) for tensor in tensors)
    return Tensor(tensors[0].datatype, (rows, *tensors[0].shape[1:]), b"".join(tensor.data for tensor in tensors))


def _row(tensor: Tensor, row: int) -> Tensor:
    size = prod(tensor.shape[1:]) * ITEM_BYTES[tensor.datatype]
    return Tensor(tensor.datatype, (1, *tensor.shape[1:]), memoryview(tensor.data)[row * size : (row + 1) * size])


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _holds(decision: Decision, tensor: Tensor, stage: str, wanted: int) -> list[bool]:
    """For each row of the output that decides, whether it is as the edge wants it."""
    said = np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype])
    if len(said) == 1:  # said of the request as a whole
        said = np.repeat(said, wanted)
    if len(said) != wanted:
        raise ValueError(
            f"stage {stage!r} gave {len(said)} numbers {list(tensor.shape)} that decide about {decision.target!r}; "
            f"{wanted} {'is' if wanted == 1 else 'are'} wanted, one for each row"
        )
    if decision.values:
        return [bool(np.isin(one, decision.values)) for one in said]
    return [bool(one) for one in said]
