"""The graph of an application: its stages, and the edges along which requests, or parts of them, go on.

`after`, `when`, `each`, `join` and `entry` have one meaning, which core, server, simulator and checkers share:

- A request enters a stage when all predecessors have finished or are known to be skipped, if at least one of them sends
  it an item. Otherwise the stage is skipped, and sends nothing to its successors.
- An edge with `when` sends an item only if an output of its source meets the condition.
- An edge with `each` fans out: its target runs once for each row of an output of its source. Each row is a part of the
  request. Later stages run once for each part, until a stage with `join`, which runs when all parts are done.

Must not depend on tensors, requests or policies: the number of parts is known only when a request is served.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal

from sloop.errors import InputError
from sloop.vocabulary import Path

PARTS_MAX: Final = 1_000
"""The most parts of one request unless `most` says otherwise: it bounds the cost of one wrong output."""
SHARES_COMPLETE: Final = 0.999
"""Alternatives whose declared shares sum to at least this are complete: people write thirds as 0.333."""
COMBINATIONS_MAX: Final = 4_096
"""The most combinations of stages to enumerate; their number doubles with each independent branch."""
PATHS_MAX: Final = 10_000
"""The most paths through a graph. Planners process each path."""


@dataclass(frozen=True, slots=True)
class When:
    """The condition of an edge: `output` of stage `of` is one of `values`, or not 0 if no values are given.

    `share` is the declared fraction of requests for which it holds, 0 to 1; the core measures it in a run.
    """

    of: str
    output: str = ""
    """Empty if the stage is only planned and simulated, not served."""
    values: tuple[int, ...] = ()
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Each:
    """The fan-out of an edge: one part for each row of `output` of stage `of`. A request with more than `most`
    fails."""

    of: str
    output: str = ""
    mean: float = 1.0
    """The declared mean number of parts; the core measures it in a run."""
    most: int = PARTS_MAX


@dataclass(frozen=True, slots=True)
class InputSource:
    """Where the model's `input` comes from: the output `tensor` of a stage before it or, if `stage` is "", the tensor
    of that name that clients send. Several for one input are alternatives."""

    input: str
    stage: str
    tensor: str


@dataclass(frozen=True, slots=True)
class OutputSource:
    """Where the application's `output` comes from: the output `tensor` of a stage. Several for one output are
    alternatives."""

    output: str
    stage: str
    tensor: str


@dataclass(frozen=True, slots=True)
class GraphStage:
    """One stage as the application declares it: its predecessors, and how requests come from them."""

    name: str
    after: tuple[str, ...] = ()
    when: tuple[When, ...] = ()
    each: Each | None = None
    join: bool = False
    entry: bool = False
    """Whether requests may begin here although the stage has predecessors."""
    inputs: tuple[InputSource, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge from one stage to another. `one`: the request, or its part, goes on; `each`: the request fans out into
    parts; `join`: the parts of a request meet."""

    source: str
    target: str
    kind: Literal["one", "each", "join"]
    when: When | None = None

    @property
    def condition(self) -> object:
        """A key that is equal for edges of one stage with the same condition; None for an edge without a condition."""
        if self.when is None:
            return None
        return (self.when.output, self.when.values) if self.when.output else self.target


def declared_name(stage: str) -> str:
    """The name of a stage in the application's file, without the prefix of `Application.qualified`."""
    return stage.rpartition("/")[2]


class Graph:
    """The stages of an application in topological order, and the edges between them.

    Raises an `InputError` that names the stage for contradictory declarations (see `scopes_of`), and for an entry stage
    with conditions, which would have no effect.
    """

    def __init__(
        self,
        stages: Sequence[GraphStage],
        declared_paths: Sequence[Path] = (),
        slo_ns: int = 0,
        outputs: Sequence[OutputSource] = (),
    ) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.outputs = tuple(outputs)
        """Where the outputs that the user declared come from; empty: those of the stages at which requests end."""
        self.declared_paths = tuple(declared_paths)
        """The paths that the user declared, with their deadlines and shares."""
        self.slo_ns = slo_ns
        self.scopes = scopes_of(stages)
        """Per stage, the fan-out stage for whose parts it runs; "" if it runs once for a request."""
        for stage in stages:
            if stage.entry and stage.when and not self.declared_paths:
                what = f"stage {stage.name!r} has `entry`, so that every request begins there, whatever `when` says"
                raise InputError(what, where=stage.name, help="remove one of them, or declare the `paths` there are")
        self.entries = tuple(stage.name for stage in stages if stage.entry or not stage.after)
        self.edges: Mapping[str, tuple[Edge, ...]] = {
            stage.name: tuple(self._edge(stage.name, other) for other in stages if stage.name in other.after)
            for stage in stages
        }
        """Per stage, its outgoing edges, in the order of their targets."""
        self.predecessors = {stage.name: len(stage.after) + (stage.name in self.entries) for stage in stages}
        """Per stage, the number of predecessors; for an entry stage, the arrival of the request counts as one."""
        self.has_deadlines = any(path.slo_ns != slo_ns for path in self.declared_paths)
        """Whether the deadline depends on the path that a request takes."""
        self.paths_through = {
            name: sum(1 << bit for bit, path in enumerate(self.declared_paths) if name in path.stages)
            for name in self.stages
        }
        """Per stage, the declared paths through it, as a bit set."""
        self.deciding = {
            name: edges
            for name, edges in self.edges.items()
            if any(edge.when is not None or edge.kind == "each" for edge in edges)
        }
        """The outgoing edges of the stages whose outputs decide where a request goes, or how many parts it has."""
        self.is_plain = not any(stage.each or stage.when or (stage.entry and stage.after) for stage in stages)
        """Whether every request visits every stage once."""

    def entries_of(self, names: Collection[str]) -> tuple[str, ...]:
        """The entry stages that a request names (`Request.enters`); all of them if it names none."""
        if not names:
            return self.entries
        return tuple(name for name in self.entries if declared_name(name) in names)

    def _edge(self, source: str, target: GraphStage) -> Edge:
        when = next((when for when in target.when if when.of == source), None)
        if target.each is not None:
            return Edge(source, target.name, "each", when)
        return Edge(source, target.name, "join" if target.join and self.scopes[source] else "one", when)

    @cached_property
    def parts_max(self) -> Mapping[str, tuple[int, ...]]:
        """Per stage, for each outgoing edge, the most items that one visit may send: 1 unless the edge fans out."""
        fan_outs = {name: stage.each for name, stage in self.stages.items()}
        return {
            name: tuple(each.most if (each := fan_outs[edge.target]) is not None else 1 for edge in edges)
            for name, edges in self.edges.items()
        }

    def fault(self, stage: str, edge_counts: Sequence[int]) -> str:
        """The error if a visit to a stage sends more items along an edge than allowed; empty if it does not."""
        for edge, most, count in zip(self.edges[stage], self.parts_max[stage], edge_counts, strict=False):
            if count > most:
                return f"{stage} sends {count} parts to {edge.target}, which takes at most {most} per request"
        return ""

    def is_exhaustive(self, stage: str) -> bool:
        """Whether every request takes one of the edges with a condition: their values cover all cases, or their
        declared shares sum to 1."""
        edges = [edge for edge in self.edges[stage] if edge.when is not None]
        outputs = {edge.when.output for edge in edges if edge.when}
        is_one_choice = len(outputs) == 1 and all(edge.kind != "each" for edge in edges)
        return is_one_choice and frozenset() not in _joint_targets(edges)

    def combinations_before(self, stage: str, among: Collection[str]) -> set[frozenset[str]] | None:
        """Every combination of the stages `among` that a request, or part, may have visited when it enters `stage`, if
        it began at all entry stages. None for more than `COMBINATIONS_MAX` combinations."""
        before = {name for name in self.stages if stage in self.descendants[name]} | {stage}
        found = {frozenset(before.intersection(self.entries))}
        kept = {*among, stage}
        for name in (name for name in self.stages if name in before and name != stage):
            choices = self._target_sets(name, before)
            if len(found) * len(choices) > COMBINATIONS_MAX:
                return None
            found = {
                entered - ({name} - kept) | targets
                for entered in found
                for targets in (choices if name in entered else (frozenset[str](),))
            }
        return {entered.intersection(among) for entered in found if stage in entered}

    def _target_sets(self, stage: str, among: Collection[str]) -> set[frozenset[str]]:
        """Every set of stages, out of `among`, to which one visit to `stage` may send items."""
        edges = [edge for edge in self.edges[stage] if edge.target in among]
        always = frozenset(edge.target for edge in edges if edge.when is None and edge.kind != "each")
        choices = [{frozenset[str](), frozenset((edge.target,))} for edge in edges if edge.kind == "each"]
        by_output: dict[str, list[Edge]] = {}
        for edge in self.edges[stage]:
            if edge.when is not None and edge.kind != "each":
                by_output.setdefault(edge.when.output, []).append(edge)
        choices += [{taken.intersection(among) for taken in _joint_targets(rivals)} for rivals in by_output.values()]
        found = {always}
        for choice in choices:
            found = {taken | added for taken in found for added in choice}
            if len(found) > COMBINATIONS_MAX:
                break  # the caller only needs to see that there are too many
        return found

    @cached_property
    def conditions(self) -> Mapping[str, frozenset[When]]:
        """Per stage, the conditions that hold whenever it is entered, on any path.

        For a stage that runs for parts, they are the conditions of the part. A join removes these, because a condition
        that holds for one part may not hold for the others.
        """
        found: dict[str, frozenset[When]] = {}
        for name, stage in self.stages.items():
            on_paths = [frozenset[When]()] if name in self.entries else []
            for edge in (edge for source in stage.after for edge in self.edges[source] if edge.target == name):
                before = found[edge.source]
                if edge.kind == "join":
                    before = frozenset(when for when in before if not self.scopes[when.of])
                elif edge.kind == "one" and edge.when is not None:
                    before |= {replace(edge.when, share=None)}
                on_paths.append(before)
            found[name] = frozenset.intersection(*on_paths)
        return found

    @cached_property
    def descendants(self) -> Mapping[str, frozenset[str]]:
        """Per stage, all stages that can be reached from it."""
        found: dict[str, frozenset[str]] = {}
        for name in reversed(self.stages):
            targets = [edge.target for edge in self.edges[name]]
            found[name] = frozenset(targets).union(*(found[target] for target in targets))
        return found

    def are_alternatives(self, one: str, other: str) -> bool:
        """Whether no request enters both stages, because one output would need two values at once."""
        return any(
            (mine.of, mine.output) == (theirs.of, theirs.output) and mine.output and are_exclusive(mine, theirs)
            for mine in self.conditions[one]
            for theirs in self.conditions[other]
        )

    def may_end_at(self, stage: str) -> bool:
        """Whether a request may be done after a stage: no stage follows, or only under conditions."""
        return all(edge.when is not None for edge in self.edges[stage])

    def stages_in(self, scope: str) -> tuple[str, ...]:
        """The stages that run for the parts of the fan-out stage `scope`, beginning with that stage."""
        return tuple(name for name, own in self.scopes.items() if own == scope)

    def probability(self, edge: Edge) -> float:
        """The declared fraction of visits to its source that take the edge; 1 without a condition. Alternatives without
        a share divide the remaining fraction evenly."""
        if edge.when is None:
            return 1.0
        shares: dict[object, float | None] = {}
        for rival in self.edges[edge.source]:
            if rival.when is not None and rival.when.output == edge.when.output:
                share = shares.get(rival.condition)
                shares[rival.condition] = rival.when.share if share is None else share
        own = shares[edge.condition]
        if own is not None:
            return own
        declared = [share for share in shares.values() if share is not None]
        # A single condition may hold or not: it counts as one of two alternatives.
        return max(0.0, 1.0 - sum(declared)) / max(len(shares) - len(declared), 2 - len(declared))

    def shares(self) -> dict[tuple[str, str], float]:
        """Per edge, the mean visits to its target per visit to its source, from the declared paths if there are any,
        else from the edges. The source "" stands for the arrival of a request; its edges lead to the entry stages."""
        shares = {("", name): 1.0 for name in self.entries}
        for edges in self.edges.values():
            shares |= {(edge.source, edge.target): self.probability(edge) for edge in edges}
        if self.declared_paths:
            paths = [(("", *path.stages), path.share) for path in self.declared_paths]
            for source, target in shares:
                passed = sum(share for stages, share in paths if source in stages)
                taken = sum(share for stages, share in paths if (source, target) in pairwise(stages))
                shares[source, target] = taken / passed if passed else 0.0
        for stage in self.stages.values():
            if stage.each is not None:
                shares[stage.after[0], stage.name] *= stage.each.mean
        return shares

    def visits(self, shares: Mapping[tuple[str, str], float] | None = None) -> dict[str, float]:
        """Per stage, the mean number of visits that a request makes; `shares` defaults to `shares()`.

        If several edges lead to a stage, or one of many parts suffices to enter it, this is an upper bound: it adds the
        shares as if they came from different requests, because their correlation is not known.
        """
        shares = shares or self.shares()
        visits: dict[str, float] = {}
        for name, stage in self.stages.items():
            scope = self.scopes[name]
            most = visits.get(scope, 1.0) if scope != name else float("inf")
            coming = shares.get(("", name), 0.0)
            for source in stage.after:
                sent = visits[source] * shares[source, name]
                coming += min(1.0, sent) if stage.join and self.scopes[source] else sent
            visits[name] = min(most, coming)
        return visits

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The declared paths; if there are none, every chain from an entry to a last stage, with the declared fraction
        of requests that pass all its stages. InputError for more than `PATHS_MAX` paths."""
        if self.declared_paths:
            return self.declared_paths
        found: list[Path] = []
        for entry in self.entries:
            open: list[tuple[tuple[str, ...], float]] = [((entry,), 1.0)]
            while open:
                chain, share = open.pop()
                edges = self.edges[chain[-1]]
                if not edges:
                    found.append(Path(chain, self.slo_ns, share))
                open += [((*chain, edge.target), share * self.probability(edge)) for edge in reversed(edges)]
                if len(found) + len(open) > PATHS_MAX:
                    raise InputError(f"more than {PATHS_MAX} paths lead through the stages", help="join some of them")
        return tuple(found)


def _joint_targets(rivals: Sequence[Edge]) -> set[frozenset[str]]:
    """For edges with conditions on one output: the set of targets that each value of the output leads to. Includes the
    empty set unless the declared shares sum to 1."""
    whens = [(edge.when, edge.target) for edge in rivals if edge.when is not None]
    if any(when.output for when, _ in whens):
        values = {0, *(value for when, _ in whens for value in when.values)}
        values.add(max(values) + 1)  # stands for all values that no condition names
        found = {
            frozenset(target for when, target in whens if (value in when.values if when.values else value != 0))
            for value in values
        }
    else:
        found = {frozenset[str](), *(frozenset((target,)) for _, target in whens)}
    shares = {edge.condition: edge.when.share for edge in rivals if edge.when and edge.when.share is not None}
    return found - {frozenset()} if sum(shares.values()) >= SHARES_COMPLETE else found


def are_exclusive(one: When, other: When) -> bool:
    """Whether no value meets both conditions, which are on the same output."""
    if one.values and other.values:
        return not set(one.values) & set(other.values)
    return (one.values or other.values) == (0,)


def scopes_of(stages: Sequence[GraphStage]) -> dict[str, str]:
    """Per stage, the fan-out stage for whose parts it runs; "" if it runs once for a request.

    InputError if parts would fan out again, or if different parts would meet at a stage without `join`. Nested parts
    are not supported: their number would multiply with each level.
    """
    scopes: dict[str, str] = {}
    for stage in stages:
        before = {name: scopes[name] for name in stage.after}
        in_parts = [name for name, scope in before.items() if scope]
        if stage.each is not None:
            if stage.join:
                what = f"stage {stage.name!r} has both `join` and `each`"
                raise InputError(what, where=stage.name, help="join the parts at a stage before it")
            if in_parts:
                what = f"stage {stage.name!r} has `each`, and {in_parts[0]!r} before it already runs for parts"
                raise InputError(what, where=stage.name, help="join the parts first: `join: true` at a stage between")
            if len(stage.after) != 1:
                what = f"stage {stage.name!r} has `each` and comes after {len(stage.after)} stages"
                raise InputError(what, where=stage.name, help="keep in `after` only the stage whose output it fans out")
            scopes[stage.name] = stage.name
        elif stage.join:
            if not in_parts:
                what = f"stage {stage.name!r} has `join`, and no stage before it runs for parts"
                raise InputError(what, where=stage.name, help="remove `join`, or add `each` to a stage before it")
            scopes[stage.name] = ""
        else:
            kinds = set(before.values())
            if len(kinds) > 1:
                parts = ", ".join(f"{name} ({scope or 'whole requests'})" for name, scope in before.items())
                what = f"stage {stage.name!r} comes after stages that run for different parts: {parts}"
                raise InputError(what, where=stage.name, help="add `join: true`, so that it waits for all parts")
            scopes[stage.name] = kinds.pop() if kinds else ""
        if stage.entry and scopes[stage.name]:
            what = f"stage {stage.name!r} runs for parts, and no request can begin with one"
            raise InputError(what, where=stage.name, help="remove `entry`")
    return scopes
