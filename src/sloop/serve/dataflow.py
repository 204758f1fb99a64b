"""How tensors flow through an application: from the client to the first stages, between stages, and into the answer.

`wire` matches tensors when the server starts and raises `InputError` for anything that does not fit, so that no request
can fail because of it. Tensors are matched as the stage's `inputs` say, otherwise by name. If names do not match and
only one candidate is left, it is used: in a chain, the single output becomes the single input. Variants of a stage may
name their tensors differently but must agree in number, type and shape. Alternative stages may have outputs of the same
name, and so may a stage and a later stage.

The tensors of a request are in blocks (`sloop.serve.blocks`), one for each visit to a stage. `Need` says which of them
an assembly takes: the deciding process passes these on, and workers and edges read them into `RequestTensors`, which
splits and joins tensors as the sources say. A stage that sends parts along an edge adds to its block, after its
outputs, which rows became parts.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from msgspec import Struct, structs

from sloop.app.application import Application
from sloop.app.graph import Edge, Graph, GraphStage, declared_name
from sloop.errors import InputError
from sloop.serve.blocks import Block
from sloop.shared_memory import Address
from sloop.tensor import MISSING, NUMPY_TYPES, Port, Signature, Tensor, row_starts

APPLICATION = ""
"""The name of the source that stands for the client's tensors."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from: the output at `position` of `stage`, or an input of the application.

    `kind`: the `whole` tensor, the one `row` that belongs to a part, the output that the same `part` produced in an
    earlier stage, or the outputs of all parts `joined`.
    """

    stage: str
    position: int
    kind: Literal["whole", "row", "part", "joined"] = "whole"
    scope: str = ""
    """For `row` and `joined`: the stage with `each` that created the parts."""
    port: Port | None = None
    """For `joined`: the declared type and shape of the output."""


Sources = tuple[Source, ...]
"""Alternative sources of one tensor; the first one that the request has passed is used."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which outputs of a stage, by position, decide whether and how often one outgoing edge is taken."""

    target: str
    when: int | None = None
    values: tuple[int, ...] = ()
    each: int | None = None
    sliced: tuple[tuple[int, Port], ...] = ()
    """The outputs of which every part receives one row."""


@dataclass(frozen=True, slots=True)
class Passed:
    """From which outputs of a visit the rows and sizes of the next visit along an outgoing edge follow."""

    counting: int | None = None
    """The output whose first dimension counts the rows; None if no output does."""
    opened: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The outputs whose rows have open dimensions, each with these dimensions."""
    from_client: bool = False
    """Whether the next stage also reads tensors of the client with open dimensions."""
    is_whole: bool = False
    """Whether the model of the next stage may mix rows. Then the core sees all rows of the visit as one row of a larger
    size."""
    is_joined: bool = False
    """Whether the next stage gets the outputs of all parts together."""


@dataclass(frozen=True, slots=True)
class Need:
    """The blocks of a stage that an assembly takes: of its only visit, of its visit for the same part, or of its visits
    for all parts."""

    stage: str
    kind: Literal["whole", "part", "parts"]
    scopes: tuple[str, ...] = ()
    """The stages that run for each row of one of its outputs. The block ends with a tensor for each of them: the rows
    that became parts."""


GivenBlocks = Block | None | dict[int, Block]
"""The blocks of one need. For `parts`, a block by part; for a split request, a block by the first row of each piece;
otherwise one block. None if the request has not passed the stage."""


def addresses_in(blocks: Iterable[GivenBlocks]) -> Iterator[Address]:
    """The blocks in shared memory."""
    for each in blocks:
        if isinstance(each, Address):
            yield each
        elif isinstance(each, dict):
            yield from addresses_in(each.values())


@dataclass(frozen=True, slots=True)
class Assembly:
    """The tensors of a stage's inputs, or of the answer: the sources of each, and the blocks in which they are."""

    sources: tuple[Sources, ...]
    needs: tuple[Need, ...]

    @property
    def direct(self) -> list[tuple[int, int]] | None:
        """For each tensor, the need whose block has it and its position there. None if tensors are chosen, split or
        joined."""
        stages = [need.stage for need in self.needs]
        found = [(stages.index(first.stage), first.position) for first, *_ in self.sources]
        is_direct = all(len(sources) == 1 and sources[0].kind == "whole" for sources in self.sources)
        return found if is_direct else None


@dataclass(frozen=True, slots=True)
class StageWiring:
    """What a worker must know of its stage."""

    stage: str
    inputs: Assembly
    decisions: tuple[Decision, ...] = ()
    outputs: tuple[int, ...] = ()
    """The places of the outputs that later stages or answers may need; () if they may need all."""
    optional: tuple[str, ...] = ()
    """The optional inputs of the model that follow the others in `inputs`; `MISSING` if a request does not give
    them."""
    passed: tuple[Passed, ...] = ()
    """For each outgoing edge, in the graph's order."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """An application's inputs and outputs, and the sources of every stage's inputs and of the answer."""

    signature: Signature
    inputs: Mapping[str, tuple[Sources, ...]]
    """For each stage the sources of its inputs, in its models' order, and then of its optional ones."""
    outputs: tuple[Sources, ...]
    """The sources of the application's outputs, in the signature's order."""
    decisions: Mapping[str, tuple[Decision, ...]]
    """For stages with a branch or a fan-out: the decision for each outgoing edge, in the graph's order."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """By stage, how many outputs it has."""
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By stage, the optional inputs that follow the others in `inputs`."""
    passed: Mapping[str, tuple[Passed, ...]] = field(default_factory=dict)
    """For stages with others behind them: what each outgoing edge passes on, in the graph's order."""

    def of(self, stage: str) -> StageWiring:
        """How the inputs of a stage are assembled, and what its outputs decide."""
        assembly, decisions = self._assembly(self.inputs[stage]), self.decisions.get(stage, ())
        needed = self.needed(stage, range(len(self.outputs)))
        optional, passed = self.optional.get(stage, ()), self.passed.get(stage, ())
        return StageWiring(stage, assembly, decisions, needed, optional, passed)

    def needed(self, stage: str, answers: Iterable[int]) -> tuple[int, ...]:
        """The places of a stage's outputs that later stages need, or that become outputs of the application at the
        places `answers`; () for all. If none is needed, the first one is computed, because the stage runs
        nevertheless."""
        if stage not in self.widths:
            return ()
        asked = [self.outputs[place] for place in answers if place < len(self.outputs)]
        read = [sources for wires in self.inputs.values() for sources in wires]
        found = {source.position for sources in (*read, *asked) for source in sources if source.stage == stage}
        for decision in self.decisions.get(stage, ()):
            found.update(place for place in (decision.when, decision.each) if place is not None)
            found.update(place for place, _ in decision.sliced)
        return () if len(found) == self.widths[stage] else tuple(sorted(found)) or (0,)

    @property
    def answer(self) -> Assembly:
        """How the answer is assembled."""
        return self._assembly(self.outputs)

    def _assembly(self, sources: tuple[Sources, ...]) -> Assembly:
        scopes = {
            stage: tuple(decision.target for decision in decisions if decision.each is not None)
            for stage, decisions in self.decisions.items()
        }
        origins = {scope: stage for stage, own in scopes.items() for scope in own}
        found: dict[tuple[str, Literal["whole", "part", "parts"]], None] = {}
        for source in (source for alternatives in sources for source in alternatives):
            found[source.stage, _NEEDED[source.kind]] = None
            if source.scope:
                found[origins[source.scope], "whole"] = None
        return Assembly(sources, tuple(Need(stage, kind, scopes.get(stage, ())) for stage, kind in found))


_NEEDED: Final[Mapping[str, Literal["whole", "part", "parts"]]] = {
    "whole": "whole",
    "row": "whole",
    "part": "part",
    "joined": "parts",
}


def wire(
    graph: Graph,
    models: Mapping[tuple[str, str], Signature],
    *,
    rows_max: int = 1,
    whole: Collection[str] = (),
    where: str = "",
) -> Wiring:
    """Wire the stages of a graph.

    `models` maps (stage, variant) to its signature; the tensors of a stage are named as in its first variant.
    `rows_max` is the most rows of one request; it is 1 if the graph has branches or fan-outs. `whole` are the stages
    whose models may mix rows. Raises `InputError` that begins with `where`.
    """
    stages = {name: _stage_signature(name, models, where) for name in graph.stages}
    decisions = {
        name: tuple(_decision(edge, graph, stages[name], where) for edge in edges)
        for name, edges in graph.deciding.items()
    }
    for name, step in graph.stages.items():
        _check_declared(step, stages[name], where)
    given = _given(graph, stages, where)
    inputs = {
        name: _InputMatcher(graph, name, stages, given, where).wires()
        if step.after
        else _first(step, stages[name], given)
        for name, step in graph.stages.items()
    }
    answers = _answers(graph, stages, where)
    optional = _optional(stages, given)
    for name, ports in optional.items():
        places = [list(optional_of(optional)).index(port) for port in ports]
        inputs[name] += tuple((Source(APPLICATION, len(given) + place),) for place in places)
    signature = Signature(
        *(tuple(given), tuple(port for port, _ in answers), 1 if decisions else rows_max),
        optional=tuple(optional_of(optional)),
        equal=tuple(
            tuple((_sent_name(step, input), place) for input, place in equal)
            for name, step in graph.stages.items()
            if not step.after
            for equal in stages[name].equal
        ),
    )
    return Wiring(
        *(signature, inputs, tuple(sources for _, sources in answers), decisions),
        widths={name: len(made.outputs) for name, made in stages.items()},
        optional={name: tuple(port.name for port in ports) for name, ports in optional.items()},
        passed={
            name: tuple(
                _passed(name, stages[edge.target], inputs[edge.target], is_whole=edge.target in whole) for edge in edges
            )
            for name, edges in graph.edges.items()
            if edges
        },
    )


def _passed(name: str, target: Signature, sources: Sequence[Sources], *, is_whole: bool) -> Passed:
    """What a stage passes on to another one, which has these inputs and their sources."""
    pairs = list(zip(target.inputs, sources, strict=False))  # behind them come optional ones, which clients give
    own = [(port, source) for port, each in pairs for source in each if source.stage == name]
    return Passed(
        next((source.position for port, source in own if port.counts_rows and source.kind != "row"), None),
        tuple(dict.fromkeys((source.position, port.open_places) for port, source in own if port.open_places)),
        any(port.open_places and source.stage == APPLICATION for port, each in pairs for source in each),
        is_whole,
        any(source.kind == "joined" for _, source in own),
    )


def _optional(stages: Mapping[str, Signature], given: Sequence[Port]) -> dict[str, list[Port]]:
    """The optional inputs of stages, which clients may give by name. Those with the name of another tensor of the
    client are left out."""
    taken = {port.name: None for port in given}
    found: dict[str, list[Port]] = {}
    known: dict[str, Port | None] = {**taken}
    for name, signature in stages.items():
        own = [port for port in signature.optional if known.setdefault(port.name, port) == port]
        if own:
            found[name] = own
    return found


def optional_of(optional: Mapping[str, Sequence[Port]]) -> dict[Port, None]:
    """Each optional input once."""
    return dict.fromkeys(port for ports in optional.values() for port in ports)


def _stage_signature(stage: str, models: Mapping[tuple[str, str], Signature], where: str) -> Signature:
    """The signature of a stage, whose variants must be interchangeable."""
    variants = {variant: signature for (owner, variant), signature in models.items() if owner == stage}
    (name, first), *others = variants.items()
    shared = tuple(port for port in first.optional if all(port in signature.optional for _, signature in others))
    for other, signature in others:
        for kind in ("inputs", "outputs"):
            ours, theirs = ([(p.datatype, p.shape) for p in getattr(s, kind)] for s in (first, signature))
            if ours != theirs:
                raise InputError(
                    f"variants {name!r} and {other!r} of stage {stage!r} differ in their {kind}: {ours} and {theirs}",
                    where=where,
                    help="variants of a stage replace each other: give them equal types and shapes",
                )
    return structs.replace(first, optional=shared)


def _decision(edge: Edge, graph: Graph, source: Signature, where: str) -> Decision:
    """The decision for one edge, from the outputs of the stage that it leaves."""

    def position(output: str, key: str) -> int:
        names = [port.name for port in source.outputs]
        if output not in names:
            declared = f"stage {edge.target!r} has `{key}: {output}`" if output else f"`{key}` of stage {edge.target!r}"
            problem = ", which is not an output of" if output else " names no output of"
            raise InputError(
                f"{declared}{problem} {edge.source!r}",
                where=where,
                help=f"the outputs of {edge.source!r} are {', '.join(names)}",
            )
        return names.index(output)

    when = each = None
    sliced: tuple[tuple[int, Port], ...] = ()
    if edge.when is not None:
        when = position(edge.when.output, "when")
        port = source.outputs[when]
        if port.datatype not in NUMPY_TYPES or any(size > 1 for size in port.shape[1:]):
            raise InputError(
                f"output {port.name!r} of stage {edge.source!r} is {port.kind}; `when` of {edge.target!r} needs "
                "one number per row",
                where=where,
                help="add an output with one number per row to the model",
            )
    declared = graph.stages[edge.target].each
    if edge.kind == "each" and declared is not None:
        each = position(declared.output, "each")
        port = source.outputs[each]
        if port.shape[:1] != (-1,):
            raise InputError(
                f"output {port.name!r} of stage {edge.source!r} is {port.kind} with a fixed number of rows; "
                f"`each` of {edge.target!r} needs a variable number",
                where=where,
                help="export the model with a variable first dimension of this output",
            )
        sliced = tuple(
            (place, other) for place, other in enumerate(source.outputs) if other.shape[:1] == (-1,) and place != when
        )
    return Decision(edge.target, when, edge.when.values if edge.when is not None else (), each, sliced)


def _check_declared(step: GraphStage, signature: Signature, where: str) -> None:
    """InputError for a source under `inputs` of an input that the models of the stage do not have or that is optional,
    and for several tensors of clients as the sources of one input."""
    names, optional = [port.name for port in signature.inputs], [port.name for port in signature.optional]
    sent: dict[str, str] = {}
    for source in step.inputs:
        name = declared_name(step.name)
        if source.input in optional:
            raise InputError(
                f"stage {name!r} has a source for input {source.input!r}, which is optional for its model",
                where=where,
                help=f"take it out of `inputs`: clients may send it as {source.input!r}",
            )
        if source.input not in names:
            raise InputError(
                f"stage {name!r} has a source for input {source.input!r}, which its model does not have",
                where=where,
                help=f"its inputs are {', '.join(names)}",
            )
        if not source.stage and sent.setdefault(source.input, source.tensor) != source.tensor:
            raise InputError(
                f"input {source.input!r} of stage {name!r} has several tensors of the client as its sources: "
                f"{sent[source.input]!r} and {source.tensor!r}",
                where=where,
                help="name the one that it takes",
            )


def _sent_name(step: GraphStage, input: str) -> str:
    """The name of the client's tensor for an input of a first stage."""
    return next((source.tensor for source in step.inputs if source.input == input), input)


def _given(graph: Graph, stages: Mapping[str, Signature], where: str) -> list[Port]:
    """The tensors that clients send: the inputs of the first stages, and what later stages declare to take from
    clients."""
    given: list[Port] = []
    for name in graph.entries:
        step = graph.stages[name]
        if not step.after:
            for port in stages[name].inputs:
                _add(given, structs.replace(port, name=_sent_name(step, port.name)), name, where)
    for name, step in graph.stages.items():
        declared = {source.input: source.tensor for source in step.inputs if step.after and not source.stage}
        for port in stages[name].inputs:
            if port.name in declared and declared[port.name] not in [known.name for known in given]:
                _add(given, structs.replace(port, name=declared[port.name]), name, where)
    return given


def _add(given: list[Port], port: Port, stage: str, where: str) -> None:
    """Add a first stage's input to the application's inputs; stages that name the same tensor share it."""
    for place, known in enumerate(given):
        if known.name == port.name:
            if (known.datatype, known.shape) != (port.datatype, port.shape):
                raise InputError(
                    f"input {port.name!r} is {port.kind} for stage {stage!r} and {known.kind} for another first stage",
                    where=where,
                    help=f"give tensors of different type or shape different names: `inputs: {{{port.name}: NAME}}`",
                )
            given[place] = structs.replace(known, has_rows=known.has_rows or port.has_rows)
            return
    given.append(port)


def _first(step: GraphStage, signature: Signature, given: Sequence[Port]) -> tuple[Sources, ...]:
    names = [port.name for port in given]
    return tuple((Source(APPLICATION, names.index(_sent_name(step, port.name))),) for port in signature.inputs)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tensor that a later stage may use as an input, with the type and shape in which it would arrive."""

    source: Source
    port: Port


class _InputMatcher:
    """Matches the inputs of a later stage: those with declared sources, then by name with outputs of the stages before
    it, then by name with the client's tensors, and finally the single remaining input with the single remaining output.
    """

    def __init__(
        self, graph: Graph, stage: str, stages: Mapping[str, Signature], given: Sequence[Port], where: str
    ) -> None:
        self._graph, self._stage, self._stages, self._where = graph, stage, stages, where
        self._wanted = stages[stage].inputs
        self._candidates = [candidate for name in graph.stages[stage].after for candidate in self._candidates_of(name)]
        self._sent = {port.name: _Candidate(Source(APPLICATION, place), port) for place, port in enumerate(given)}

    def wires(self) -> tuple[Sources, ...]:
        found = self._declared()
        for port in [port for port in self._wanted if port.name not in found]:
            named = [candidate for candidate in self._candidates if candidate.port.name == port.name]
            self._check_alternatives(port, named)
            if named:
                found[port.name] = named
        sent = self._sent
        if len(self._wanted) > 1:
            # The single input of a stage in a chain is the previous output, even if a client's tensor has its name.
            found = {port.name: [sent[port.name]] for port in self._wanted if port.name in sent} | found
        missing = [port.name for port in self._wanted if port.name not in found]
        taken = [candidate for candidates in found.values() for candidate in candidates]
        unused = [candidate for candidate in self._candidates if candidate not in taken]
        if len(missing) == 1 and unused and self._are_alternatives(unused):
            found[missing[0]] = unused
        elif missing:
            found |= {name: [sent[name]] for name in missing if name in sent}
        for port in self._wanted:
            if port.name not in found:
                raise InputError(
                    f"input {port.name!r} of stage {self._stage!r} has no source: the stages before it have the "
                    f"outputs {[candidate.port.name for candidate in self._candidates]}, and the client sends "
                    f"{list(sent)}",
                    where=self._where,
                    help=f"say where it comes from, `inputs: {{{port.name}: STAGE.OUTPUT}}`, or give both one name",
                )
            for candidate in found[port.name]:
                self._check_fit(port, candidate)
            self._check_passed(port, found[port.name])
        return tuple(tuple(candidate.source for candidate in found[port.name]) for port in self._wanted)

    def _declared(self) -> dict[str, list[_Candidate]]:
        """By input, the sources that the stage declares under `inputs`."""
        found: dict[str, list[_Candidate]] = {}
        for source in self._graph.stages[self._stage].inputs:
            own = [each for each in self._candidates if each.source.stage == source.stage]
            own = own if source.stage else list(self._sent.values())
            named = [each for each in own if each.port.name == source.tensor]
            if not named:
                of = f"stage {declared_name(source.stage)!r}" if source.stage else "the client"
                raise InputError(
                    f"input {source.input!r} of stage {declared_name(self._stage)!r} is declared to come from {of}, "
                    f"which has no {source.tensor!r}",
                    where=self._where,
                    help=f"it has {', '.join(each.port.name for each in own)}",
                )
            found.setdefault(source.input, []).extend(named)
        for port in self._wanted:
            self._check_alternatives(port, found.get(port.name, []))
        return found

    def _candidates_of(self, before: str) -> list[_Candidate]:
        """The outputs of an earlier stage as this stage would receive them."""
        graph, outputs = self._graph, self._stages[before].outputs
        scope = graph.scopes[before]
        (edge,) = (edge for edge in graph.edges[before] if edge.target == self._stage)
        candidates = []
        for place, port in enumerate(outputs):
            source, rows = Source(before, place, "part" if scope else "whole"), port.shape[:1]
            if edge.kind == "each" and rows == (-1,):
                source, rows = Source(before, place, "row", self._stage), (1,)
            elif edge.kind == "join":
                source, rows = Source(before, place, "joined", scope, port), (-1,)
            candidates.append(_Candidate(source, Port(port.name, port.datatype, (*rows, *port.shape[1:]))))
        return candidates

    def _are_alternatives(self, candidates: Sequence[_Candidate]) -> bool:
        """Whether a request passes at most one of the stages that the candidates come from."""
        stages = [candidate.source.stage for candidate in candidates]
        return all(
            self._graph.are_alternatives(one, other)
            for index, one in enumerate(stages)
            for other in stages[index + 1 :]
        )

    def _check_alternatives(self, port: Port, named: Sequence[_Candidate]) -> None:
        if not self._are_alternatives(named):
            raise InputError(
                f"input {port.name!r} of stage {self._stage!r} is an output of several stages that run for one "
                f"request: {[candidate.source.stage for candidate in named]}",
                where=self._where,
                help=f"say which of them: `inputs: {{{port.name}: STAGE.OUTPUT}}`",
            )

    def _check_passed(self, wanted: Port, candidates: Sequence[_Candidate]) -> None:
        """Check that on every path to this stage, a request has passed a stage that produces the input."""
        sources = [candidate.source for candidate in candidates]
        if any(source.stage == APPLICATION for source in sources):
            return
        # A fan-out may have no parts; the join of no parts is an empty tensor, so the stage before it counts as the
        # source.
        steps = self._graph.stages
        givers = {steps[source.scope].after[0] if source.kind == "joined" else source.stage for source in sources}
        passed = self._graph.combinations_before(self._stage, givers)
        if passed is not None and frozenset() in passed:
            names = " or ".join(repr(source.stage) for source in sources)
            raise InputError(
                f"input {wanted.name!r} of stage {self._stage!r} comes from {names}, but a request can reach "
                f"{self._stage!r} without passing {names}",
                where=self._where,
                help=f"let {self._stage!r} come after {names} only, give its other edges the same `when`, or add an "
                f"output {wanted.name!r} to the other stages before it",
            )

    def _check_fit(self, wanted: Port, candidate: _Candidate) -> None:
        actual = candidate.port
        if not _fits(wanted, actual):
            of = f" of stage {candidate.source.stage!r}" if candidate.source.stage else ", which the client sends,"
            raise InputError(
                f"input {wanted.name!r} of stage {self._stage!r} is {wanted.kind}, but {actual.name!r}{of} is "
                f"{actual.kind}",
                where=self._where,
                help="insert a stage that converts the tensor, or correct `after`",
            )


def _answers(graph: Graph, stages: Mapping[str, Signature], where: str) -> list[tuple[Port, Sources]]:
    """The application's outputs, each with its sources, the latest stage first: those that the user declared, or the
    outputs of every stage at which a request may end. Raises `InputError` if two would have the same name."""
    if graph.outputs:
        return _declared_answers(graph, stages, where)
    by_name: dict[str, list[tuple[str, int, Port]]] = {}
    for name in graph.stages:
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
            answers.append((structs.replace(port, name=f"{name}.{port.name}"), (source,)))
    owners: dict[str, str] = {}
    for port, (source, *_) in answers:
        if port.name in owners:
            raise InputError(
                f"two outputs of the application would be named {port.name!r}: one of stage {owners[port.name]!r} and "
                f"one of stage {source.stage!r} (outputs with equal names get the name of their stage as a prefix)",
                where=where,
                help="rename one of them",
            )
        owners[port.name] = source.stage
    return answers


def _declared_answers(graph: Graph, stages: Mapping[str, Signature], where: str) -> list[tuple[Port, Sources]]:
    by_name: dict[str, list[tuple[str, int, Port]]] = {}
    order = list(graph.stages)
    for source in sorted(graph.outputs, key=lambda source: order.index(source.stage)):
        names = [port.name for port in stages[source.stage].outputs]
        if source.tensor not in names:
            raise InputError(
                f"output {source.output!r} of the application is declared to come from stage "
                f"{declared_name(source.stage)!r}, which has no {source.tensor!r}",
                where=where,
                help=f"it has {', '.join(names)}",
            )
        place = names.index(source.tensor)
        by_name.setdefault(source.output, []).append((source.stage, place, stages[source.stage].outputs[place]))
    for name, ends in by_name.items():
        if not all(_may_share(graph, one, other) for at, one in enumerate(ends) for other in ends[at + 1 :]):
            raise InputError(
                f"output {name!r} of the application comes from several stages that run for one request, or differ in "
                f"its type: {[declared_name(stage) for stage, _, _ in ends]}",
                where=where,
                help="name one of them, or give each an output of its own under `outputs`",
            )
    declared = {source.output: by_name[source.output] for source in graph.outputs}
    return [
        (structs.replace(ends[-1][2], name=name), tuple(_ending(graph, *end) for end in reversed(ends)))
        for name, ends in declared.items()
    ]


def _ending(graph: Graph, name: str, place: int, port: Port) -> Source:
    scope = graph.scopes[name]
    return Source(name, place, "joined", scope, port) if scope else Source(name, place)


def _may_share(graph: Graph, one: tuple[str, int, Port], other: tuple[str, int, Port]) -> bool:
    """Whether two outputs of the same name are one output of the application: they belong to alternative stages, or to
    a stage and a later one."""
    (early, _, first), (late, _, second) = one, other
    related = graph.are_alternatives(early, late) or late in graph.descendants[early]
    return related and (first.datatype, first.shape) == (second.datatype, second.shape)


def _fits(wanted: Port, actual: Port) -> bool:
    return (
        wanted.datatype == actual.datatype
        and len(wanted.shape) == len(actual.shape)
        and all(-1 in pair or pair[0] == pair[1] for pair in zip(wanted.shape, actual.shape, strict=True))
    )


class RequestTensors(Struct):
    """The tensors of one open request: what the client sent and what each stage has computed so far.

    Rows are slices of the bytes that they came in, so splitting a tensor copies nothing.
    """

    whole: dict[str, Sequence[Tensor]]
    """By stage; the client's tensors are under `APPLICATION`."""
    parts: dict[str, dict[int, Sequence[Tensor]]] = {}  # msgspec creates a new dict for each instance
    """By stage and part, for stages that run once per part."""
    rows: dict[str, Sequence[int]] = {}
    """For each stage with `each`: which rows of the output became its parts, in order."""

    @classmethod
    def read(
        cls, needs: Sequence[Need], part: int, blocks: Sequence[GivenBlocks], read: Callable[[Block], list[Tensor]]
    ) -> "RequestTensors":
        """The tensors in the blocks of `needs`, for the visit of `part`."""
        made = cls({})
        for need, given in zip(needs, blocks, strict=True):
            if given is None:
                continue
            if need.kind == "parts" and isinstance(given, dict):
                made.parts[need.stage] = {part: read(block) for part, block in given.items()}
            elif need.kind == "part":
                made.parts[need.stage] = {part: read_whole(given, read)}
            else:
                tensors = made.whole[need.stage] = read_whole(given, read)
                for scope, rows in zip(reversed(need.scopes), reversed(tensors), strict=False):
                    made.rows[scope] = np.frombuffer(rows.data, NUMPY_TYPES[rows.datatype]).tolist()
        return made

    def edge_counts(self, stage: str, decisions: Sequence[Decision], tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """How many parts go along each outgoing edge of `stage`, read from its outputs `tensors`.

        Raises `ValueError` with the names of the stage and the output if the outputs do not fit the edges.
        """
        counts = []
        for decision in decisions:
            if decision.each is None:
                if decision.when is None:
                    counts.append(1)
                else:
                    (chosen,) = _matches(decision, tensors[decision.when], stage, 1)
                    counts.append(int(chosen))
                continue
            total = _row_count(tensors[decision.each])
            for position, port in decision.sliced:
                if _row_count(tensors[position]) != total:
                    raise ValueError(
                        f"outputs of stage {stage!r} differ in rows: {port.name!r} has "
                        f"{_row_count(tensors[position])}, but the output that {decision.target!r} runs for each "
                        f"row of has {total}"
                    )
            rows: Sequence[int] = range(total)
            if decision.when is not None:
                chosen_rows = _matches(decision, tensors[decision.when], stage, total)
                rows = [row for row in rows if chosen_rows[row]]
            self.rows[decision.target] = rows
            counts.append(len(rows))
        return tuple(counts)

    def inputs(self, stage: str, part: int, wires: Sequence[Sources]) -> list[Tensor]:
        """The inputs of a stage. Raises `ValueError` if the request has passed none of an input's sources."""
        return [self._input(stage, part, sources) for sources in wires]

    def outputs(self, answers: Sequence[tuple[str, Sources]]) -> dict[str, Tensor]:
        """The application's outputs by name. Left out are outputs of branches that the request did not take, and of
        parts whose rows cannot be joined."""
        found = {}
        for name, sources in answers:
            with suppress(ValueError):
                tensor = self._from_first(0, sources)
                if tensor is not None:
                    found[name] = tensor
        return found

    def _input(self, stage: str, part: int, sources: Sources) -> Tensor:
        tensor = self._from_first(part, sources)
        if tensor is None:
            missing = " or ".join(repr(source.stage) for source in sources)
            raise ValueError(f"stage {stage!r} needs an output of {missing}, which did not run for this request")
        return tensor

    def _from_first(self, part: int, sources: Sources) -> Tensor | None:
        """The tensor from the first source that the request has passed."""
        for source in sources:
            if source.kind == "joined":
                same_scope = [other for other in sources if (other.kind, other.scope) == ("joined", source.scope)]
                tensor = self._joined(same_scope)
            else:
                tensor = self._from(part, source)
            if tensor is not None:
                return tensor
        return None

    def _from(self, part: int, source: Source) -> Tensor | None:
        """The tensor of one source, or None if the request has not passed it."""
        if source.kind == "part":
            tensors = self.parts.get(source.stage, {}).get(part)
            return None if tensors is None else tensors[source.position]
        whole = self.whole.get(source.stage)
        if whole is None:
            return None
        tensor = whole[source.position]
        return tensor if source.kind == "whole" else _row(tensor, self.rows[source.scope][part])

    def _joined(self, sources: Sequence[Source]) -> Tensor | None:
        """The outputs of all parts, concatenated in the order of parts; no rows if there are no parts.

        Each part contributes the output of the first of `sources` that it has passed.
        """
        scope, port = sources[0].scope, sources[0].port
        if scope not in self.rows:
            return None
        by_part: dict[int, Tensor] = {}
        for source in reversed(sources):
            by_part |= {part: tensors[source.position] for part, tensors in self.parts.get(source.stage, {}).items()}
        tensors = [by_part[part] for part in sorted(by_part)]
        assert port is not None
        if not tensors:
            return Tensor(port.datatype, (0, *(max(size, 0) for size in port.shape[1:])), b"")
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            shapes = sorted({tensor.shape[1:] for tensor in tensors})
            stages = " or ".join(repr(source.stage) for source in sources)
            raise ValueError(
                f"the parts' outputs {port.name!r} of stage {stages} cannot be joined: their rows have the shapes "
                f"{', '.join(str(list(shape)) for shape in shapes)}"
            )
        return _concatenated(tensors)


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all these tensors, which are of one type and shape, in order."""
    first, rows = tensors[0], sum(map(_row_count, tensors))
    return Tensor(first.datatype, (rows, *first.shape[1:]), b"".join([tensor.data for tensor in tensors]))


def read_whole(given: Block | dict[int, Block], read: Callable[[Block], list[Tensor]]) -> list[Tensor]:
    """The tensors of a visit; those of its pieces are joined. Raises `ValueError` if their rows differ."""
    if not isinstance(given, dict):
        return read(given)
    found: list[Tensor] = []
    for place, column in enumerate(zip(*(read(given[first]) for first in sorted(given)), strict=True)):
        kinds = {(tensor.datatype, tensor.shape[1:]) for tensor in column}
        if len(kinds) > 1:
            rows = sorted(f"{datatype} {list(shape)}" for datatype, shape in kinds)
            raise ValueError(f"output {place} of a request that ran in pieces has rows of {' and '.join(rows)}")
        found.append(column[0] if column[0].datatype == MISSING.datatype else _concatenated(column))
    return found


class Assembler:
    """Assembles the inputs of a stage, or the answer, from blocks."""

    def __init__(self, assembly: Assembly) -> None:
        self._needs, self._sources, self._direct = assembly.needs, assembly.sources, assembly.direct

    def inputs(
        self, stage: str, part: int, blocks: Sequence[GivenBlocks], read: Callable[[Block], list[Tensor]]
    ) -> list[Tensor]:
        """The inputs of a visit to `stage`, from the blocks of its needs. Raises `ValueError` if the request has passed
        none of an input's sources."""
        if self._direct is not None and None not in blocks:
            tensors = [read_whole(block, read) for block in blocks]  # type: ignore[arg-type]  # none is missing
            return [tensors[need][position] for need, position in self._direct]
        return RequestTensors.read(self._needs, part, blocks, read).inputs(stage, part, self._sources)

    def outputs(
        self, names: Sequence[str], blocks: Sequence[GivenBlocks], read: Callable[[Block], list[Tensor]]
    ) -> dict[str, Tensor]:
        """The outputs of an application by name. Left out are outputs of branches that the request did not take, and
        of parts whose rows cannot be joined."""
        if self._direct is not None and None not in blocks:
            tensors = [read_whole(block, read) for block in blocks]  # type: ignore[arg-type]  # none is missing
            return {names[place]: tensors[need][position] for place, (need, position) in enumerate(self._direct)}
        answers = list(zip(names, self._sources, strict=True))
        return RequestTensors.read(self._needs, 0, blocks, read).outputs(answers)


def _row(tensor: Tensor, row: int) -> Tensor:
    starts = row_starts(tensor)
    return Tensor(tensor.datatype, (1, *tensor.shape[1:]), memoryview(tensor.data)[starts[row] : starts[row + 1]])


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _matches(decision: Decision, tensor: Tensor, stage: str, rows: int) -> list[bool]:
    """For each row of the deciding output, whether it has one of the edge's values."""
    values = np.frombuffer(tensor.data, NUMPY_TYPES[tensor.datatype])
    if len(values) == 1:  # one number decides for the whole request
        values = np.repeat(values, rows)
    if len(values) != rows:
        raise ValueError(
            f"stage {stage!r} returned {len(values)} numbers (shape {list(tensor.shape)}) to decide about "
            f"{decision.target!r}; expected {rows}, one per row"
        )
    chosen = np.isin(values, decision.values) if decision.values else values != 0
    return chosen.tolist()  # type: ignore[no-any-return]  # a list, as it has one dimension


def check_wiring(application: Application, signatures: Mapping[tuple[str, str], Signature]) -> Signature | None:
    """The inputs and outputs of an application; None if not all of its models are known. InputError if their tensors do
    not fit together."""
    if len(signatures) < sum(len(stage.variants) for stage in application.stages):
        return None
    return wire(application.graph, signatures, where=application.file).signature
