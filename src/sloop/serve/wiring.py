"""Which tensor goes where: application inputs to first stages, outputs of stages to those after them, last ones out.

Promises that what does not fit is refused before anything starts (`InputError`), never at the first request. Tensors
are matched by name; where names say nothing and only one choice is left, that one is taken: in a chain the one output
becomes the one input. Variants of a stage may name their tensors differently but must agree in number, type and shape.
Must not know requests or replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sloop.errors import InputError
from sloop.tensor import NUMPY_TYPES, Port, Signature

APPLICATION = ""
"""The source that stands for what the client sent."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stage's input comes from: the output at `position` of `stage`, or an input of the application."""

    stage: str
    position: int


@dataclass(frozen=True, slots=True)
class Wiring:
    """An application's tensors: what it takes and gives, and where every input and every answer comes from."""

    signature: Signature
    inputs: Mapping[str, tuple[Source, ...]]
    """For each stage its inputs, in its models' order."""
    outputs: tuple[Source, ...]
    """The application's outputs, in the signature's order."""


def wire(
    after: Mapping[str, Sequence[str]],
    models: Mapping[tuple[str, str], Signature],
    *,
    rows_max: int = 1,
    where: str = "",
) -> Wiring:
    """Wire stages, each with the names of the stages before it, in an order that respects them.

    `models` are the signatures by (stage, variant); the first variant of a stage gives its tensors their names.
    `rows_max` is the most rows a request may carry. Raises `InputError`, prefixed by `where`.
    """
    for (name, _), signature in models.items():
        _check_travels(name, signature, where)
    stages = {name: _agreed(name, models, where) for name in after}
    given: list[Port] = []
    for name, before in after.items():
        if not before:
            for port in stages[name].inputs:
                _add(given, port, name, where)
    wires = {
        name: _first(stages[name], given) if not before else _following(name, before, stages, given, where)
        for name, before in after.items()
    }
    last = [name for name in after if not any(name in before for before in after.values())]
    ends = [(name, place, port) for name in last for place, port in enumerate(stages[name].outputs)]
    names = [port.name for _, _, port in ends]
    answers = tuple(
        Port(f"{name}.{port.name}" if names.count(port.name) > 1 else port.name, port.datatype, port.shape)
        for name, _, port in ends
    )
    signature = Signature(tuple(given), answers, rows_max)
    return Wiring(signature, wires, tuple(Source(name, place) for name, place, _ in ends))


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


def _first(signature: Signature, given: Sequence[Port]) -> tuple[Source, ...]:
    return tuple(Source(APPLICATION, given.index(port)) for port in signature.inputs)


def _following(
    stage: str, before: Sequence[str], stages: Mapping[str, Signature], given: Sequence[Port], where: str
) -> tuple[Source, ...]:
    """Match a later stage's inputs: with outputs of the stages before, by name, with what the client sent, by name,
    and what is left over on both sides with each other.
    """
    offers = [(Source(name, place), port) for name in before for place, port in enumerate(stages[name].outputs)]
    wanted = stages[stage].inputs
    found: dict[str, tuple[Source, Port]] = {}
    for port in wanted:
        named = [offer for offer in offers if offer[1].name == port.name]
        if len(named) > 1:
            raise InputError(
                f"input {port.name!r} of stage {stage!r} is an output of {[source.stage for source, _ in named]}",
                where=where,
                help="give the outputs of parallel stages different names",
            )
        if named:
            found[port.name] = named[0]
    sent = {port.name: (Source(APPLICATION, place), port) for place, port in enumerate(given)}
    if len(wanted) > 1:  # the one input of a stage in a chain is not what the client sent, even if named alike
        found = {port.name: sent[port.name] for port in wanted if port.name in sent} | found
    missing = [port.name for port in wanted if port.name not in found]
    unused = [offer for offer in offers if offer not in found.values()]
    if len(missing) == len(unused) == 1:
        found[missing[0]] = unused[0]
    elif missing:
        found |= {name: sent[name] for name in missing if name in sent}
    for port in wanted:
        if port.name not in found:
            raise InputError(
                f"input {port.name!r} of stage {stage!r} comes from nowhere: the stages before it give "
                f"{[offer.name for _, offer in offers]}, the client sends {list(sent)}",
                where=where,
                help="name the tensor as it is named where it comes from",
            )
        _check_fit(stage, port, found[port.name][1], where)
    return tuple(found[port.name][0] for port in wanted)


def _check_fit(stage: str, wanted: Port, offered: Port, where: str) -> None:
    fits = (
        wanted.datatype == offered.datatype
        and len(wanted.shape) == len(offered.shape)
        and all(-1 in pair or pair[0] == pair[1] for pair in zip(wanted.shape, offered.shape, strict=True))
    )
    if not fits:
        raise InputError(
            f"input {wanted.name!r} of stage {stage!r} is {_shown(wanted)}, but {offered.name!r} is {_shown(offered)}",
            where=where,
            help="put a model between them that converts, or correct `after`",
        )


def _shown(port: Port) -> str:
    return f"{port.datatype}{list(port.shape)}"
