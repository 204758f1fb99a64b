"""The graph of an application: which stage hands what to which, once or in parts, always or only sometimes.

Promises the one reading of `after`, `when`, `each`, `join` and `entry` that core, server, simulator and checkers share:

- A stage is entered once every stage before it has finished or is known to be left out, if at least one of them sends
  it something; otherwise it is left out too, and those after it are told.
- `when` sends something only where an output of the stage before says so.
- `each` enters a stage once for every row of an output of the stage before: its parts. Stages after it run for each
  part as well, until one joins them. A join is entered when all parts are done.

Knows no tensors, requests or policies: how many parts a request has is found out while it is served.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal

from sloop.errors import InputError
from sloop.vocabulary import Path

PARTS_MAX: Final = 1_000
"""Parts one request may have unless `most` says otherwise: what a wrong output could cost is bounded."""
SURE: Final = 0.999
"""Shares of alternatives that sum up to so much leave none out."""
COMBINATIONS_MAX: Final = 4_096
"""Combinations of stages passed that are told apart."""
PATHS_MAX: Final = 10_000
"""Paths through a graph; more could not be planned for one by one."""


@dataclass(frozen=True, slots=True)
class When:
    """An edge that is taken only by some requests: those for which `output` of stage `of` is one of `values`, or not 0
    where none are given. `share` is how many are believed to be so, 0 to 1, until it is measured."""

    of: str
    output: str = ""
    """Empty for a stage that is only planned and simulated."""
    values: tuple[int, ...] = ()
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Each:
    """An edge that is taken once for every row of `output` of stage `of`; a request with more than `most` fails."""

    of: str
    output: str = ""
    mean: float = 1.0
    """Parts a request is believed to have, until that is measured."""
    most: int = PARTS_MAX


@dataclass(frozen=True, slots=True)
class Step:
    """A stage's place in the graph."""

    name: str
    after: tuple[str, ...] = ()
    when: tuple[When, ...] = ()
    each: Each | None = None
    join: bool = False
    entry: bool = False
    """Whether requests may begin here although other stages come before."""


@dataclass(frozen=True, slots=True)
class Edge:
    """From one stage to one after it. `one`: a request, or part, goes on; `each`: it is taken apart; `join`: parts
    meet."""

    source: str
    target: str
    kind: Literal["one", "each", "join"]
    when: When | None = None

    @property
    def condition(self) -> object:
        """Edges from one stage with the same condition are taken together; None where there is none."""
        if self.when is None:
            return None
        return (self.when.output, self.when.values) if self.when.output else self.target


class Graph:
    """The steps of an application in topological order, and what follows from them.

    InputError, naming the stage, for steps that fit no graph: see `scopes_of`; and for a stage where every request
    would begin although it has conditions.
    """

    def __init__(self, steps: Sequence[Step], declared_paths: Sequence[Path] = (), slo_ns: int = 0) -> None:
        self.steps = {step.name: step for step in steps}
        self.declared_paths = tuple(declared_paths)
        """Paths with deadlines or shares of their own."""
        self.slo_ns = slo_ns
        self.scopes = scopes_of(steps)
        """For each stage the `each` stage whose parts it runs for; "" where it runs once."""
        for step in steps:
            if step.entry and step.when and not self.declared_paths:
                what = f"stage {step.name!r} has `entry`, so that every request begins there, whatever `when` says"
                raise InputError(what, where=step.name, help="remove one of them, or declare the `paths` there are")
        self.entries = tuple(step.name for step in steps if step.entry or not step.after)
        self.edges: Mapping[str, tuple[Edge, ...]] = {
            step.name: tuple(self._edge(step.name, other) for other in steps if step.name in other.after)
            for step in steps
        }
        """Per stage, those that lead away from it, in the order of their targets; empty for a last one."""
        self.predecessors = {step.name: len(step.after) + (step.name in self.entries) for step in steps}
        """By how many a stage must be told before it is known whether it is entered."""
        self.has_deadlines = any(path.slo_ns != slo_ns for path in self.declared_paths)
        """Whether the deadline depends on which path a request turns out to be on."""
        self.paths_through = {
            name: sum(1 << bit for bit, path in enumerate(self.declared_paths) if name in path.stages)
            for name in self.steps
        }
        """Per stage which of the declared paths lead through it, as bits."""
        self.is_plain = not any(step.each or step.when or (step.entry and step.after) for step in steps)
        """Whether every request visits every stage once."""

    def _edge(self, source: str, target: Step) -> Edge:
        when = next((when for when in target.when if when.of == source), None)
        if target.each is not None:
            return Edge(source, target.name, "each", when)
        return Edge(source, target.name, "join" if target.join and self.scopes[source] else "one", when)

    @cached_property
    def parts_max(self) -> Mapping[str, tuple[int, ...]]:
        """Per stage, for each edge away from it, how many parts of one request may take that: 1 unless it takes
        apart."""
        each = {name: step.each for name, step in self.steps.items()}
        return {
            name: tuple(told.most if (told := each[edge.target]) is not None else 1 for edge in edges)
            for name, edges in self.edges.items()
        }

    def fault(self, stage: str, edge_counts: Sequence[int]) -> str:
        """Why a visit to a stage may not send these numbers of items along its edges; empty if it may."""
        for edge, most, count in zip(self.edges[stage], self.parts_max[stage], edge_counts, strict=False):
            if count > most:
                return f"{stage} sends {count} parts to {edge.target}, which takes at most {most} of a request"
        return ""

    def is_exhaustive(self, stage: str) -> bool:
        """Whether of the edges away from a stage that have a condition one is taken by every request: because of the
        values that they name, or of the shares that were told of them."""
        edges = [edge for edge in self.edges[stage] if edge.when is not None]
        one = len({edge.when.output for edge in edges if edge.when}) == 1 and all(edge.kind != "each" for edge in edges)
        return one and frozenset() not in _together(edges)

    def combinations_before(self, stage: str, among: Collection[str]) -> set[frozenset[str]] | None:
        """Which of the stages `among` a request, or part, may have passed when it enters a stage: each combination that
        outputs can lead to if it began at every entry. None for more than `COMBINATIONS_MAX`."""
        before = {name for name in self.steps if stage in self.descendants[name]} | {stage}
        found = {frozenset(before.intersection(self.entries))}
        for name in (name for name in self.steps if name in before and name != stage):
            ways = self._targets_together(name, before)
            kept = {*among, stage}
            if len(found) * len(ways) > COMBINATIONS_MAX:
                return None
            found = {
                entered - ({name} - kept) | way
                for entered in found
                for way in (ways if name in entered else (frozenset[str](),))
            }
        return {entered.intersection(among) for entered in found if stage in entered}

    def _targets_together(self, stage: str, among: Collection[str]) -> set[frozenset[str]]:
        """Which of the stages `among` may be sent something by one stage, together."""
        edges = [edge for edge in self.edges[stage] if edge.target in among]
        always = frozenset(edge.target for edge in edges if edge.when is None and edge.kind != "each")
        choices = [{frozenset[str](), frozenset((edge.target,))} for edge in edges if edge.kind == "each"]
        by_output: dict[str, list[Edge]] = {}
        for edge in self.edges[stage]:
            if edge.when is not None and edge.kind != "each":
                by_output.setdefault(edge.when.output, []).append(edge)
        choices += [{taken.intersection(among) for taken in _together(rivals)} for rivals in by_output.values()]
        found = {always}
        for choice in choices:
            found = {taken | more for taken in found for more in choice}
            if len(found) > COMBINATIONS_MAX:
                break  # enough for it to be known that they are too many
        return found

    @cached_property
    def conditions(self) -> Mapping[str, frozenset[When]]:
        """Per stage, what must hold for it to be entered, whichever way leads there; empty where nothing must. For a
        stage that runs for parts: what must hold for the part. What holds for some rows or parts says nothing of the
        others, and so nothing of what comes when they have met."""
        found: dict[str, frozenset[When]] = {}
        for name, step in self.steps.items():
            ways = [frozenset[When]()] if name in self.entries else []
            for edge in (edge for source in step.after for edge in self.edges[source] if edge.target == name):
                before = found[edge.source]
                if edge.kind == "join":
                    before = frozenset(when for when in before if not self.scopes[when.of])
                elif edge.kind == "one" and edge.when is not None:
                    before |= {replace(edge.when, share=None)}
                ways.append(before)
            found[name] = frozenset.intersection(*ways)
        return found

    @cached_property
    def descendants(self) -> Mapping[str, frozenset[str]]:
        """Per stage, all that some way leads to from it."""
        found: dict[str, frozenset[str]] = {}
        for name in reversed(self.steps):
            targets = [edge.target for edge in self.edges[name]]
            found[name] = frozenset(targets).union(*(found[target] for target in targets))
        return found

    def are_alternatives(self, one: str, other: str) -> bool:
        """Whether no request enters both stages, because an output would have to be two things at once."""
        return any(
            (mine.of, mine.output) == (theirs.of, theirs.output) and mine.output and are_exclusive(mine, theirs)
            for mine in self.conditions[one]
            for theirs in self.conditions[other]
        )

    def may_end_at(self, stage: str) -> bool:
        """Whether a request may have nothing left to do after a stage: none follows, or none for sure."""
        return all(edge.when is not None for edge in self.edges[stage])

    def stages_in(self, scope: str) -> tuple[str, ...]:
        """The stages that run for the parts made at stage `scope`, itself first."""
        return tuple(name for name, own in self.scopes.items() if own == scope)

    def probability(self, edge: Edge) -> float:
        """How many of those that finish the source are believed to take the edge; alternatives share evenly unless
        told."""
        if edge.when is None:
            return 1.0
        shares: dict[object, float | None] = {}
        for rival in self.edges[edge.source]:
            if rival.when is not None and rival.when.output == edge.when.output:
                told_before = shares.get(rival.condition)
                shares[rival.condition] = rival.when.share if told_before is None else told_before
        own = shares[edge.condition]
        if own is not None:
            return own
        told = [share for share in shares.values() if share is not None]
        return max(0.0, 1.0 - sum(told)) / max(len(shares) - len(told), 2 - len(told))

    def shares(self) -> dict[tuple[str, str], float]:
        """How many visits to an edge's target follow from one to its source, as believed: from the declared paths where
        there are any, else from the edges. "" is the source of an entry: how many requests begin there."""
        shares = {("", name): 1.0 for name in self.entries}
        shares |= {
            (edge.source, edge.target): self.probability(edge) for edges in self.edges.values() for edge in edges
        }
        if self.declared_paths:
            among = [(("", *path.stages), path.share) for path in self.declared_paths]
            for source, target in shares:
                past = sum(share for stages, share in among if source in stages)
                taken = sum(share for stages, share in among if (source, target) in pairwise(stages))
                shares[source, target] = taken / past if past else 0.0
        for step in self.steps.values():
            if step.each is not None:
                shares[step.after[0], step.name] *= step.each.mean
        return shares

    def visits(self, shares: Mapping[tuple[str, str], float] | None = None) -> dict[str, float]:
        """How often a request visits each stage, by what is believed, or measured, of the `shares` of all edges. The
        most it can be where several edges lead to one, or one part of many suffices: as if none were taken together."""
        shares = shares or self.shares()
        visits: dict[str, float] = {}
        for name, step in self.steps.items():
            scope = self.scopes[name]
            most = visits.get(scope, 1.0) if scope != name else float("inf")
            coming = shares.get(("", name), 0.0)
            for source in step.after:
                sent = visits[source] * shares[source, name]
                coming += min(1.0, sent) if step.join and self.scopes[source] else sent
            visits[name] = min(most, coming)
        return visits

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The declared paths; without any, every chain from an entry to a last stage, with the share of requests
        believed to go along all of it. InputError for more than can be planned for."""
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


def _together(rivals: Sequence[Edge]) -> set[frozenset[str]]:
    """Of edges with conditions on one output, the targets of those that are taken together, for whatever it may say:
    those of none as well, unless told shares leave nothing for that."""
    whens = [(edge.when, edge.target) for edge in rivals if edge.when is not None]
    if any(when.output for when, _ in whens):
        values = {0, *(value for when, _ in whens for value in when.values)}
        said = (*values, max(values) + 1)  # that stands for all that nobody names
        found = {
            frozenset(target for when, target in whens if (value in when.values if when.values else value != 0))
            for value in said
        }
    else:
        found = {frozenset[str](), *(frozenset((target,)) for _, target in whens)}
    told = {edge.condition: edge.when.share for edge in rivals if edge.when is not None and edge.when.share is not None}
    return found - {frozenset()} if sum(told.values()) >= SURE else found


def are_exclusive(one: When, other: When) -> bool:
    """Whether an output cannot be as both conditions on it want it."""
    if one.values and other.values:
        return not set(one.values) & set(other.values)
    return (one.values or other.values) == (0,)


def scopes_of(steps: Sequence[Step]) -> dict[str, str]:
    """For each stage the `each` stage for whose parts it runs, "" where it runs once for a request.

    InputError where parts would be taken apart again, or meet what has none without a join.
    """
    scopes: dict[str, str] = {}
    for step in steps:
        before = {name: scopes[name] for name in step.after}
        parted = [name for name, scope in before.items() if scope]
        if step.each is not None:
            if step.join:
                what = f"stage {step.name!r} both joins parts and takes apart"
                raise InputError(what, where=step.name, help="join them at a stage between")
            if parted:
                what = f"stage {step.name!r} takes apart what comes from {parted[0]!r}, which is a part already"
                raise InputError(what, where=step.name, help="join the parts first: `join: true` at a stage between")
            if len(step.after) != 1:
                what = f"stage {step.name!r} has `each` and comes after {len(step.after)} stages"
                raise InputError(what, where=step.name, help="let it come after the one whose output it takes apart")
            scopes[step.name] = step.name
        elif step.join:
            if not parted:
                what = f"stage {step.name!r} joins, and nothing before it runs in parts"
                raise InputError(what, where=step.name, help="remove `join`, or add `each` to a stage before it")
            scopes[step.name] = ""
        else:
            kinds = set(before.values())
            if len(kinds) > 1:
                shown = ", ".join(f"{name} ({scope or 'whole'})" for name, scope in before.items())
                what = f"stage {step.name!r} comes after stages that run for different parts: {shown}"
                raise InputError(what, where=step.name, help="add `join: true`, so that it waits for all parts")
            scopes[step.name] = kinds.pop() if kinds else ""
        if step.entry and scopes[step.name]:
            what = f"stage {step.name!r} runs for parts, and no request can begin with one"
            raise InputError(what, where=step.name, help="remove `entry`")
    return scopes
