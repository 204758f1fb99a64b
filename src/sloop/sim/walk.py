"""How a request walks through the graph of its application, for the checkers.

The rules are those of `app.graph`, implemented a second time from the declarations of the stages alone, so that
checkers do not share mistakes with `app.progress`, which core and fold use. `app.progress` counts the items that are
still to come; this module remembers the items that were sent.
"""

from collections.abc import Iterable, Sequence

from sloop.app.graph import Graph, declared_name
from sloop.vocabulary import Request

Place = tuple[str, int]
"""A stage, and the part of the request that visits it."""


class DeclaredStages:
    """The stages of an application version, as declared, and which stage follows which."""

    def __init__(self, graph: Graph) -> None:
        self.stages = graph.stages
        self.paths, self.slo_ns = graph.declared_paths, graph.slo_ns
        self.targets = {
            name: tuple(other.name for other in self.stages.values() if name in other.after) for name in self.stages
        }
        self.scopes: dict[str, str] = {}
        """Per stage, the stage that splits a request into the parts for which it runs; "" if it runs once per
        request."""
        for name, stage in self.stages.items():
            split = name if stage.each is not None else ""
            self.scopes[name] = split or ("" if stage.join or not stage.after else self.scopes[stage.after[0]])
        self.joins = {
            scope: {
                target
                for name, own in self.scopes.items()
                for target in self.targets[name]
                if own == scope and self.stages[target].join
            }
            for scope in self.scopes.values()
            if scope
        }
        """Per stage that splits requests, the stages that join the parts again."""


class Walk:
    """The walk of one request. `begin`, and `finish` for each visit, return the visits that may begin then."""

    __slots__ = ("_decided", "_declared", "_enters", "_sent", "fault", "open_visits", "request", "visited")

    def __init__(self, declared: DeclaredStages, request: Request) -> None:
        self._declared, self.request = declared, request
        entries = [name for name, stage in declared.stages.items() if stage.entry or not stage.after]
        named = [name for name in entries if declared_name(name) in request.enters]
        self._enters = frozenset(named if request.enters else entries)
        self._sent: dict[tuple[str, str], dict[int, int]] = {}
        """Per edge, how many items each part has sent along it; 0 if its visit was skipped."""
        self._decided: set[Place] = set()
        """The visits that have been entered or skipped."""
        self.visited: set[str] = set()
        self.open_visits = 0
        self.fault = False
        """Whether a visit has sent more items along an edge than the edge allows."""

    def begin(self) -> list[Place]:
        """The request arrives."""
        stages = self._declared.stages.values()
        return self._decide([(stage.name, 0) for stage in stages if stage.entry or not stage.after])

    def finish(self, stage: str, part: int, counts: Sequence[int] = ()) -> list[Place]:
        """A visit ends. `counts` are the items that it has sent to each stage that follows, one each if empty. If they
        are too many, the request goes no further."""
        targets = self._declared.targets[stage]
        counts = counts or (1,) * len(targets)
        for target, count in zip(targets, counts, strict=True):
            each = self._declared.stages[target].each
            self.fault = self.fault or count > (1 if each is None else each.most)
        if self.fault:
            return []
        self.open_visits -= 1
        return self._decide(self._tell(stage, part, counts))

    def deadline_ns(self, *, ended: bool = False) -> int:
        """The latest deadline of the declared paths that the request may still take, or has taken if it has `ended`."""
        declared, request = self._declared, self.request
        if all(path.slo_ns == declared.slo_ns for path in declared.paths):
            return request.deadline_ns
        open = [
            path for path in declared.paths if path.stages[0] in self._enters and self.visited.issubset(path.stages)
        ]
        taken = [path for path in open if ended and self.visited.issuperset(path.stages)]
        slo_ns = max((path.slo_ns for path in taken or open), default=declared.slo_ns)
        return request.sent_ns + request.slo_ns * slo_ns // declared.slo_ns

    def _decide(self, places: list[Place]) -> list[Place]:
        """The visits that begin: those of `places` that get items, and those that begin because others of them are
        skipped. A visit that gets no items is skipped, and sends none."""
        entered: list[Place] = []
        while places:
            place = places.pop()
            came = None if place in self._decided else self._came(*place)
            if came is None:
                continue
            self._decided.add(place)
            if came:
                entered.append(place)
            else:
                places += self._tell(*place, (0,) * len(self._declared.targets[place[0]]))
        self.open_visits += len(entered)
        self.visited.update(stage for stage, _ in entered)
        return entered

    def _tell(self, stage: str, part: int, counts: Sequence[int]) -> list[Place]:
        """A visit has sent these numbers of items along its edges. Returns the visits that this may decide."""
        places: list[Place] = []
        for target, count in zip(self._declared.targets[stage], counts, strict=True):
            self._sent.setdefault((stage, target), {})[part] = count
            places += self._places(target, part, count)
        return places

    def _places(self, target: str, part: int, count: int) -> Iterable[Place]:
        """The visits at or after `target` that `count` items sent to it may decide."""
        declared = self._declared
        if declared.stages[target].each is not None:
            return [(target, each) for each in range(count)] or [(join, 0) for join in declared.joins[target]]
        return [(target, 0 if declared.stages[target].join else part)]

    def _came(self, name: str, part: int) -> int | None:
        """How many items came for a visit; None while more may come."""
        declared, stage = self._declared, self._declared.stages[name]
        came = int(name in self._enters)
        for source in stage.after:
            sent, scope = self._sent.get((source, name), {}), declared.scopes[source]
            if stage.each is not None:
                came += part < sent[0]
            elif stage.join and scope:
                parts = self._sent.get((declared.stages[scope].after[0], scope), {}).get(0)
                if parts is None or len(sent) < parts:
                    return None
                came += sum(sent.values())
            elif part in sent:
                came += sent[part]
            else:
                return None
        return came
