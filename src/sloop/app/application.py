"""An application: stages and their order, models and their variants, the deadline, the system, the cluster.

Plain values that hold what the user declared, checked; promises that stages form a DAG and names are unique. Knows
nothing of YAML (see `sloop.app.load`) or of what a system's parameters mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sloop.app.graph import Each, Graph, Step, When
from sloop.profile.profile import Profile
from sloop.units import ms
from sloop.vocabulary import Node, Path


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do a stage's work: a model file, a profile, or both. Accuracy in the user's own scale."""

    name: str
    model: str | None = None
    """Path of the model file, made absolute against the application file's folder."""
    accuracy: float | None = None
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of the pipeline, done by one of its variants once all stages in `after` are done (see `app.graph`)."""

    name: str
    variants: tuple[Variant, ...]
    after: tuple[str, ...] = ()
    when: tuple[When, ...] = ()
    each: Each | None = None
    join: bool = False
    entry: bool = False

    def variant(self, name: str) -> Variant:
        """The variant called `name`. KeyError where there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class SystemChoice:
    """Which system runs the application, with the parameters that differ from its published ones."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    path: str = "system"
    """Its key in the file, for `Application.locate`."""

    @property
    def label(self) -> str:
        """What it is called: its name, or that of the file it is in."""
        return self.name.rpartition("/")[2].removesuffix(".py")


@dataclass(frozen=True, slots=True)
class Estimates:
    """How profiles become beliefs: `margin` times slower, and with `correct`, corrected by finished batches."""

    correct: bool = True
    margin: float = 1.0


@dataclass(frozen=True)
class Application:
    """Everything `serve`, `plan` and `simulate` share."""

    name: str
    slo_ms: float
    stages: tuple[Stage, ...]
    system: SystemChoice
    cluster: tuple[Node, ...] = ()
    estimates: Estimates = Estimates()
    declared_paths: tuple[Path, ...] = ()
    """Paths with deadlines or shares of their own, as declared; empty for those that the stages make."""
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Line of every dotted key of the file."""

    @property
    def slo_ns(self) -> int:
        """The end-to-end deadline in ns after a request was sent."""
        return ms(self.slo_ms)

    @cached_property
    def by_name(self) -> Mapping[str, Stage]:
        """Stages by name, in the file's order."""
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def graph(self) -> Graph:
        """What leads where. InputError for stages that fit no graph, see `app.graph.scopes_of`."""
        steps = [Step(s.name, s.after, s.when, s.each, s.join, s.entry) for s in self.order]
        return Graph(steps, self.declared_paths, self.slo_ns)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every way through the graph, as declared or as the stages make them."""
        return self.graph.paths

    @cached_property
    def visits(self) -> Mapping[str, float]:
        """How often a request is believed to visit each stage, before any has come."""
        return self.graph.visits()

    @cached_property
    def order(self) -> tuple[Stage, ...]:
        """The stages in topological order; the file's order where both are possible."""
        after = {stage.name: stage.after for stage in self.stages}
        cycle = find_cycle(after)
        assert not cycle, cycle
        done: dict[str, Stage] = {}
        while len(done) < len(self.stages):
            ready = next(s for s in self.stages if s.name not in done and all(a in done for a in s.after))
            done[ready.name] = ready
        return tuple(done.values())

    def locate(self, path: str) -> str:
        """`file:line` of a dotted key such as `system.margin`, or of the nearest key above it that is there."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        line = self.lines.get(path)
        return f"{self.file}:{line}" if line else self.file


def find_cycle(after: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A cycle among stages, first name repeated at the end; empty where there is none."""
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
