"""An application: its stages and their models, the deadline, the system that runs it, and the cluster.

Plain values as the user declared them; `sloop.app.load` reads and checks them. Must not depend on YAML or on the
meaning of a system's parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sloop.app.graph import Each, Graph, GraphStage, When
from sloop.options import Value, limited
from sloop.profile.profile import Profile
from sloop.units import ms
from sloop.vocabulary import Node, Path


@dataclass(frozen=True, slots=True)
class Variant:
    """One model that can run a stage: a file, a profile, or both. `accuracy` is on any scale that the user chooses."""

    name: str
    model: str | None = None
    """Absolute path of the model file."""
    accuracy: float | None = None
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the graph with its variants; `sloop.app.graph` explains `after` to `entry`."""

    name: str
    variants: tuple[Variant, ...]
    after: tuple[str, ...] = ()
    when: tuple[When, ...] = ()
    each: Each | None = None
    join: bool = False
    entry: bool = False

    def variant(self, name: str) -> Variant:
        """The variant called `name`. KeyError if there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class SystemChoice:
    """The system that runs an application, and the parameters that differ from the system's defaults."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    path: str = ""
    """The dotted key of the system in the application's file, for error messages; empty if it is not from the file."""

    @property
    def label(self) -> str:
        """Its name, or the name of its file without folder and ending."""
        return self.name.rpartition("/")[2].removesuffix(".py")


@dataclass(frozen=True, slots=True)
class Estimates:
    """How profiles become beliefs: multiplied by `margin`, and with `correct` adjusted by measured batches."""

    correct: bool = True
    margin: float = limited(1.0, above=0, most=100)


@dataclass(frozen=True)
class Application:
    """What `serve`, `plan` and `simulate` run."""

    name: str
    slo_ms: float
    stages: tuple[Stage, ...]
    system: SystemChoice
    cluster: tuple[Node, ...] = ()
    estimates: Estimates = Estimates()
    declared_paths: tuple[Path, ...] = ()
    """The paths that the user declared, with their deadlines and shares; empty if there are none."""
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """The line of every dotted key of the file."""

    @property
    def slo_ns(self) -> int:
        """The end-to-end deadline, in ns from when a request was sent."""
        return ms(self.slo_ms)

    @cached_property
    def by_name(self) -> Mapping[str, Stage]:
        """Stages by name, in the file's order."""
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def graph(self) -> Graph:
        """The graph of the stages. InputError for contradictory edges, see `app.graph.scopes_of`."""
        steps = [GraphStage(s.name, s.after, s.when, s.each, s.join, s.entry) for s in self.order]
        return Graph(steps, self.declared_paths, self.slo_ns)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every path through the graph: the declared ones, or all that the edges allow."""
        return self.graph.paths

    @cached_property
    def visits(self) -> Mapping[str, float]:
        """Mean visits of a request to each stage, from the declarations alone."""
        return self.graph.visits()

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages in topological order; the file's order decides where the edges do not."""
        after = {stage.name: stage.after for stage in self.stages}
        cycle = find_cycle(after)
        assert not cycle, cycle
        done: dict[str, Stage] = {}
        while len(done) < len(self.stages):
            ready = next(s for s in self.stages if s.name not in done and all(a in done for a in s.after))
            done[ready.name] = ready
        return tuple(done.values())

    def declared(self, path: str, content: object = None) -> Value:
        """`content` as the value of the dotted key `path` of the application's file, so that errors name its line."""
        return Value(content, path, self.file, self.lines)

    def locate(self, path: str) -> str:
        """`file:line: key` of a dotted key such as `system.margin`, or the line of the nearest enclosing key."""
        return self.declared(path).where


def find_cycle(after: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A cycle among stages, with its first name repeated at the end; empty if there is none."""
    state: dict[str, int] = {}  # 1 on the current path, 2 done
    for start in after:
        path = [(start, iter(after[start]))] if start not in state else []
        state.setdefault(start, 1)
        while path:
            name, rest = path[-1]
            following = next(rest, None)
            if following is None:
                state[name] = 2
                path.pop()
            elif state.get(following) == 1:
                names = [step[0] for step in path]
                return (*names[names.index(following) :], following)
            elif following not in state:
                state[following] = 1
                path.append((following, iter(after[following])))
    return ()
