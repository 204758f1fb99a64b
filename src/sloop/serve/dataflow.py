"""Which tensor goes where: application inputs to first stages, outputs of stages to those after them, last ones out.

Promises that what does not fit is refused before anything starts (`InputError`), never at the first request. Tensors
are matched by name; where names say nothing and only one choice is left, that one is taken: in a chain the one output
becomes the one input. Variants of a stage may name their tensors differently but must agree in number, type and shape.
Stages that no request passes both of may give outputs of one name, and so may a stage and one after it that supersedes
it. Must not know requests or replicas.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from msgspec import Struct

from sloop.app.graph import Edge, Graph
from sloop.errors import InputError
from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Port, Signature, Tensor

APPLICATION = ""
"""The source that stands for what the client sent."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from: the output at `position` of `stage`, or an input of the application.

    All of it; or the `row` that the part is; or what the `part` gave before; or what all parts gave, `joined`.
    """

    stage: str
    position: int
    kind: Literal["whole", "row", "part", "joined"] = "whole"
    scope: str = ""
    """For a row, and for what is joined: the stage with `each` that made the parts."""
    port: Port | None = None
    """The output as it is declared, for what is joined."""


Sources = tuple[Source, ...]
"""Where a tensor may come from: the first that the request has passed counts."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is read off a stage's outputs, by position, for one edge that leads away from it."""

    target: str
    when: int | None = None
    values: tuple[int, ...] = ()
    each: int | None = None
    sliced: tuple[tuple[int, Port], ...] = ()
    """Outputs of which every part gets its row."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """An application's tensors: what it takes and gives, and where every input and every answer comes from."""

    signature: Signature
    inputs: Mapping[str, tuple[Sources, ...]]
    """For each stage its inputs, in its models' order."""
    outputs: tuple[Sources, ...]
    """The application's outputs, in the signature's order."""
    decisions: Mapping[str, tuple[Decision, ...]]
    """For stages after which requests part: what decides about each edge, in the graph's order."""
    is_plain: bool
    """Whether every request passes every stage once, so that nothing is taken apart, chosen or put together."""


def wire(graph: Graph, models: Mapping[tuple[str, str], Signature], *, rows_max: int = 1, where: str = "") -> Wiring:
    """Wire the stages of a graph.

    `models` are the signatures by (stage, variant); the first variant of a stage gives its tensors their names.
    `rows_max` is the most rows a request may carry: one, where requests part. Raises `InputError`, prefixed by `where`.
    """
    for (name, _), signature in models.items():
        _check_travels(name, signature, where)
    stages = {name: _agreed(name, models, where) for name in graph.steps}
    decisions = {
        name: tuple(_decision(edge, graph, stages[name], where) for edge in edges)
        for name, edges in graph.edges.items()
        if any(edge.when is not None or edge.kind == "each" for edge in edges)
    }
    given: list[Port] = []
    for name in graph.entries:
        if not graph.steps[name].after:
            for port in stages[name].inputs:
                _add(given, port, name, where)
    inputs = {
        name: _Following(graph, name, stages, given, where).wires() if step.after else _first(stages[name], given)
        for name, step in graph.steps.items()
    }
    answers = _answers(graph, stages, where)
    signature = Signature(tuple(given), tuple(port for port, _ in answers), 1 if decisions else rows_max)
    return Wiring(signature, inputs, tuple(sources for _, sources in answers), decisions, not decisions)


def _check_travels(stage: str, signature: Signature, where: str) -> None:
    """A worker gets and gives raw elements of a fixed size; texts, for one, have none."""
    for port in (*signature.inputs, *signature.outputs):
        if port.datatype not in NUMPY_TYPES:
            raise InputError(
                f"tensor {port.name!r} of stage {stage!r} is of type {port.datatype}, which cannot be served",
                where=where,
                help=f"use one of {', '.join(NUMPY_TYPES)}",
            )


def _agreed(stage: str, models: Mapping[tuple[str, str], Signature], where: str) -> Signature:
    """The signature of a stage's variants, which must be interchangeable."""
    variants = {variant: signature for (owner, variant), signature in models.items() if owner == stage}
    (name, first), *others = variants.items()
    for other, signature in others:
        for kind in ("inputs", "outputs"):
            ours, theirs = ([(p.datatype, p.shape) for p in getattr(s, kind)] for s in (first, signature))
            if ours != theirs:
                raise InputError(
                    f"variants {name!r} and {other!r} of stage {stage!r} differ in their {kind}: {ours} and {theirs}",
                    where=where,
                    help="variants of a stage stand in for each other: give them equal types and shapes",
                )
    return first


def _decision(edge: Edge, graph: Graph, source: Signature, where: str) -> Decision:
    """What decides about an edge, found among the outputs of the stage it leads away from."""

    def position(output: str, key: str) -> int:
        names = [port.name for port in source.outputs]
        if output not in names:
            said = f"stage {edge.target!r} has `{key}: {output}`" if output else f"`{key}` of stage {edge.target!r}"
            wants = ", which is no output of" if output else " names no output of"
            raise InputError(f"{said}{wants} {edge.source!r}", where=where, help=f"its outputs are {', '.join(names)}")
        return names.index(output)

    when = each = None
    sliced: tuple[tuple[int, Port], ...] = ()
    if edge.when is not None:
        when = position(edge.when.output, "when")
        port = source.outputs[when]
        if any(size > 1 for size in port.shape[1:]):
            raise InputError(
                f"output {port.name!r} of stage {edge.source!r} is {_shown(port)}; `when` of {edge.target!r} wants one "
                "number for each row",
                where=where,
                help="let the model give a number of its own to decide by",
            )
    declared = graph.steps[edge.target].each
    if edge.kind == "each" and declared is not None:
        each = position(declared.output, "each")
        port = source.outputs[each]
        if port.shape[:1] != (-1,):
            raise InputError(
                f"output {port.name!r} of stage {edge.source!r} is {_shown(port)}, always as many rows; `each` of "
                f"{edge.target!r} wants any number of them",
                where=where,
                help="export the model with an open first dimension of this output",
            )
        sliced = tuple(
            (place, other) for place, other in enumerate(source.outputs) if other.shape[:1] == (-1,) and place != when
        )
    return Decision(edge.target, when, edge.when.values if edge.when is not None else (), each, sliced)


def _add(given: list[Port], port: Port, stage: str, where: str) -> None:
    """Make a first stage's input one of the application's; two stages that name the same tensor share it."""
    for known in given:
        if known.name == port.name:
            if known != port:
                raise InputError(
                    f"input {port.name!r} of stage {stage!r} is {_shown(port)}, of another first stage {_shown(known)}",
                    where=where,
                    help="give tensors of different type or shape different names",
                )
            return
    given.append(port)


def _first(signature: Signature, given: Sequence[Port]) -> tuple[Sources, ...]:
    return tuple((Source(APPLICATION, given.index(port)),) for port in signature.inputs)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tensor that a later stage may take, as it will see it."""

    source: Source
    port: Port


class _Following:
    """Matches a later stage's inputs: with outputs of the stages before, by name, with what the client sent, by name,
    and what is left over on both sides with each other.
    """

    def __init__(
        self, graph: Graph, stage: str, stages: Mapping[str, Signature], given: Sequence[Port], where: str
    ) -> None:
        self._graph, self._stage, self._stages, self._where = graph, stage, stages, where
        self._wanted = stages[stage].inputs
        self._offers = [offer for name in graph.steps[stage].after for offer in self._offers_of(name)]
        self._sent = {port.name: _Candidate(Source(APPLICATION, place), port) for place, port in enumerate(given)}

    def wires(self) -> tuple[Sources, ...]:
        found: dict[str, list[_Candidate]] = {}
        for port in self._wanted:
            named = [offer for offer in self._offers if offer.port.name == port.name]
            self._check_alternatives(port, named)
            if named:
                found[port.name] = named
        sent = self._sent
        if (
            len(self._wanted) > 1
        ):  # the one input of a stage in a chain is not what the client sent, even if named alike
            found = {port.name: [sent[port.name]] for port in self._wanted if port.name in sent} | found
        missing = [port.name for port in self._wanted if port.name not in found]
        taken = [offer for offers in found.values() for offer in offers]
        unused = [offer for offer in self._offers if offer not in taken]
        if len(missing) == 1 and unused and self._can_stand_in(unused):
            found[missing[0]] = unused
        elif missing:
            found |= {name: [sent[name]] for name in missing if name in sent}
        for port in self._wanted:
            if port.name not in found:
                raise InputError(
                    f"input {port.name!r} of stage {self._stage!r} comes from nowhere: the stages before it give "
                    f"{[offer.port.name for offer in self._offers]}, the client sends {list(sent)}",
                    where=self._where,
                    help="name the tensor as it is named where it comes from",
                )
            for offer in found[port.name]:
                self._check_fit(port, offer)
            self._check_passed(port, found[port.name])
        return tuple(tuple(offer.source for offer in found[port.name]) for port in self._wanted)

    def _offers_of(self, before: str) -> list[_Candidate]:
        """What a stage before gives, as this stage gets it."""
        graph, outputs = self._graph, self._stages[before].outputs
        scope = graph.scopes[before]
        (edge,) = (edge for edge in graph.edges[before] if edge.target == self._stage)
        offers = []
        for place, port in enumerate(outputs):
            source, rows = Source(before, place, "part" if scope else "whole"), port.shape[:1]
            if edge.kind == "each" and rows == (-1,):
                source, rows = Source(before, place, "row", self._stage), (1,)
            elif edge.kind == "join":
                source, rows = Source(before, place, "joined", scope, port), (-1,)
            offers.append(_Candidate(source, Port(port.name, port.datatype, (*rows, *port.shape[1:]))))
        return offers

    def _can_stand_in(self, offers: Sequence[_Candidate]) -> bool:
        """Whether the offers are from stages of which a request passes one at most."""
        stages = [offer.source.stage for offer in offers]
        return all(
            self._graph.are_alternatives(one, other)
            for index, one in enumerate(stages)
            for other in stages[index + 1 :]
        )

    def _check_alternatives(self, port: Port, named: Sequence[_Candidate]) -> None:
        if not self._can_stand_in(named):
            raise InputError(
                f"input {port.name!r} of stage {self._stage!r} is an output of "
                f"{[offer.source.stage for offer in named]}",
                where=self._where,
                help="give the outputs of parallel stages different names",
            )

    def _check_passed(self, wanted: Port, offers: Sequence[_Candidate]) -> None:
        """Whether, whichever way a request has come here, it has passed a stage that gives it this input."""
        sources = [offer.source for offer in offers]
        if any(source.stage == APPLICATION for source in sources):
            return
        steps = self._graph.steps  # of parts there may be none, but rows of none can be joined
        givers = {steps[source.scope].after[0] if source.kind == "joined" else source.stage for source in sources}
        passed = self._graph.passed(self._stage, givers)
        if passed is not None and frozenset() in passed:
            names = " or ".join(repr(source.stage) for source in sources)
            raise InputError(
                f"input {wanted.name!r} of stage {self._stage!r} comes from {names}, which a request may have left out "
                f"that comes to {self._stage!r}",
                where=self._where,
                help=f"let {self._stage!r} come after {names} only, give its other edges the same `when`, or let the "
                f"other stages before it give {wanted.name!r} where {names} does not run",
            )

    def _check_fit(self, wanted: Port, offer: _Candidate) -> None:
        offered = offer.port
        if not _are_alike(wanted, offered):
            of = f" of stage {offer.source.stage!r}" if offer.source.stage else ", which the client sends,"
            raise InputError(
                f"input {wanted.name!r} of stage {self._stage!r} is {_shown(wanted)}, but {offered.name!r}{of} is "
                f"{_shown(offered)}",
                where=self._where,
                help="put a model between them that converts, or correct `after`",
            )


def _answers(graph: Graph, stages: Mapping[str, Signature], where: str) -> list[tuple[Port, Sources]]:
    """The application's outputs: those of every stage a request may end at, each with where it may come from, the
    latest stage first. InputError where two would have one name."""
    by_name: dict[str, list[tuple[str, int, Port]]] = {}
    for name in graph.steps:
        if graph.may_end_at(name):
            for place, port in enumerate(stages[name].outputs):
                by_name.setdefault(port.name, []).append((name, place, port))
    answers: list[tuple[Port, Sources]] = []
    for ends in by_name.values():
        sources = [_ending(graph, *end) for end in ends]
        if all(_may_share(graph, one, other) for index, one in enumerate(ends) for other in ends[index + 1 :]):
            answers.append((ends[-1][2], tuple(reversed(sources))))
            continue
        for (name, _, port), source in zip(ends, sources, strict=True):
            answers.append((Port(f"{name}.{port.name}", port.datatype, port.shape), (source,)))
    owners: dict[str, str] = {}
    for port, (source, *_) in answers:
        if port.name in owners:
            raise InputError(
                f"two outputs of the application would be called {port.name!r}: one of stage {owners[port.name]!r} and "
                f"one of stage {source.stage!r}, with its stage's name before its own",
                where=where,
                help="rename one of them",
            )
        owners[port.name] = source.stage
    return answers


def _ending(graph: Graph, name: str, place: int, port: Port) -> Source:
    scope = graph.scopes[name]
    return Source(name, place, "joined", scope, port) if scope else Source(name, place)


def _may_share(graph: Graph, one: tuple[str, int, Port], other: tuple[str, int, Port]) -> bool:
    """Whether two outputs of one name are one output of the application: of alternatives, or of a stage and one after
    it."""
    (early, _, first), (late, _, second) = one, other
    related = graph.are_alternatives(early, late) or late in graph.below[early]
    return related and (first.datatype, first.shape) == (second.datatype, second.shape)


def _are_alike(wanted: Port, offered: Port) -> bool:
    return (
        wanted.datatype == offered.datatype
        and len(wanted.shape) == len(offered.shape)
        and all(-1 in pair or pair[0] == pair[1] for pair in zip(wanted.shape, offered.shape, strict=True))
    )


def _shown(port: Port) -> str:
    return f"{port.datatype}{list(port.shape)}"


# == parts: Tensors of one request on its way through a graph: taken apart into rows, put together again, looked at to decide.
#
# Promises that taking apart copies nothing: a row is a slice of the bytes it lies in. Putting together lays bytes one
# after the other. What outputs say that fits no edge raises `ValueError` with the stage's and the output's name. Pure
# functions over `RequestTensors`; must not know the core or processes.


class RequestTensors(Struct):
    """What one request has gathered: tensors by the stage they came from, and which rows became parts."""

    whole: dict[str, Sequence[Tensor]]
    parts: dict[str, dict[int, Sequence[Tensor]]] = {}  # msgspec makes a new one for each
    rows: dict[str, Sequence[int]] = {}
    """For each stage with `each`, the rows of the output that its parts are, in order."""


def keep(held: RequestTensors, stage: str, part: int | None, tensors: Sequence[Tensor]) -> None:
    """Keep what a stage gave, for a part where it ran for one."""
    if part is None:
        held.whole[stage] = tensors
    else:
        held.parts.setdefault(stage, {})[part] = tensors


def edge_counts_of(
    held: RequestTensors, stage: str, decisions: Sequence[Decision], tensors: Sequence[Tensor]
) -> tuple[int, ...]:
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


def gather(held: RequestTensors, stage: str, part: int, wires: Sequence[Sequence[Source]]) -> list[Tensor]:
    """A stage's inputs, each from the first of its sources that there is something from."""
    return [_needed(held, stage, part, sources) for sources in wires]


def answer(held: RequestTensors, endings: Sequence[tuple[str, Sequence[Source]]]) -> dict[str, Tensor]:
    """The outputs of a request that is done, by name; those of branches it did not take are left out, and so are rows
    of parts that cannot be joined."""
    found = {}
    for name, sources in endings:
        with suppress(ValueError):
            tensor = _first_parts(held, 0, sources)
            if tensor is not None:
                found[name] = tensor
    return found


def _needed(held: RequestTensors, stage: str, part: int, sources: Sequence[Source]) -> Tensor:
    tensor = _first_parts(held, part, sources)
    if tensor is None:
        missing = " or ".join(repr(source.stage) for source in sources)
        raise ValueError(f"stage {stage!r} needs what {missing} gives, which this request did not pass")
    return tensor


def _first_parts(held: RequestTensors, part: int, sources: Sequence[Source]) -> Tensor | None:
    for source in sources:
        if source.kind == "joined":
            meeting = [other for other in sources if (other.kind, other.scope) == ("joined", source.scope)]
            tensor = _joined(held, meeting)
        else:
            tensor = _from(held, part, source)
        if tensor is not None:
            return tensor
    return None


def _from(held: RequestTensors, part: int, source: Source) -> Tensor | None:
    """What one source gives, None where the request did not pass it."""
    if source.kind == "part":
        tensors = held.parts.get(source.stage, {}).get(part)
        return None if tensors is None else tensors[source.position]
    whole = held.whole.get(source.stage)
    if whole is None:
        return None
    tensor = whole[source.position]
    return tensor if source.kind == "whole" else _row(tensor, held.rows[source.scope][part])


def _joined(held: RequestTensors, sources: Sequence[Source]) -> Tensor | None:
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
