"""An application: its stages and their models, the deadline, the system that runs it, and the cluster. A deployment:
the applications that share a cluster.

Plain values as the user declared them; `sloop.app.load` reads and checks them. Must not depend on YAML or on the
meaning of a system's parameters.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Annotated, Final

from msgspec import structs

from sloop.app.graph import Each, Graph, GraphStage, InputSource, OutputSource, When, declared_name
from sloop.app.limits import Limits, ServerLimits
from sloop.options import Range, Value
from sloop.profile.profile import FirstProfile, Profile, size_of_model
from sloop.sizes import GRID, SizeClasses
from sloop.tensor import PadValue
from sloop.text import listed
from sloop.units import ms
from sloop.vocabulary import Node, Path, version_key


@dataclass(frozen=True, slots=True)
class Variant:
    """One model that can run a stage: a file, a profile, or both. `accuracy` is on any scale that the user chooses."""

    name: str
    model: str | None = None
    """Absolute path of the model file."""
    accuracy: float | None = None
    profile: Profile | None = None
    """Its speed on every kind of hardware that `profiles` does not name."""
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    """Its speed by kind of hardware."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files of its profiles, by kind of hardware; "" is the file of `profile`. Inline and published profiles have
    none."""
    joins_rows: bool | None = None
    """Whether requests may share a forward pass; None: the model is examined."""
    batch: bool = True
    """False if no first dimension of the model counts rows: each request is one unit."""
    operators: tuple[str, ...] = ()
    """Of an ONNX model: libraries of operators (`sloop.profile.operators`), absolute paths or names of packages."""
    pad: Mapping[str, PadValue] = field(default_factory=dict)
    """By input, the value that fills its open dimensions, so that rows of different lengths can share a forward pass;
    empty: only rows of equal shapes do."""
    is_alone: bool = False
    """Whether an examination has found that its model may mix rows."""

    def on(self, hardware: str) -> Profile | None:
        """Its profile on a kind of hardware; None if it has none there."""
        return self.profiles.get(hardware, self.profile)

    @property
    def known_profiles(self) -> tuple[Profile, ...]:
        """Its profiles on all kinds of hardware."""
        return tuple(filter(None, (self.profile, *self.profiles.values())))

    def with_batch_of_one(self) -> "Variant":
        """The variant whose model may mix rows, with a largest batch of 1, whatever batches its profiles were measured
        with."""
        profile = self.profile and structs.replace(self.profile, max_batch=1)
        profiles = {hardware: structs.replace(each, max_batch=1) for hardware, each in self.profiles.items()}
        return replace(self, profile=profile, profiles=profiles, is_alone=True)

    def weights_bytes(self, hardware: str) -> int:
        """The size of its files on a kind of hardware: what its profile says, or else the size of its model now; 0 if
        neither is known."""
        profile = self.on(hardware)
        known = profile.weights_bytes if profile is not None else 0
        return known or (size_of_model(FilePath(self.model)) if self.model else 0)

    def file_on(self, hardware: str) -> str:
        """The file of its profile on a kind of hardware; empty if it was not read from a file."""
        return self.files.get(hardware if hardware in self.profiles else "", "")


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
    inputs: tuple[InputSource, ...] = ()
    response_timeout_s: float = 0.0
    """After how many seconds a batch that has not finished is given up, with its replica; 0: the default, which follows
    from the believed duration and the deadline (`core.stage.StageState.give_up_ns`)."""
    sizes: tuple[int, ...] = ()
    """The declared bounds of its classes of sizes, ascending."""

    @property
    def size_classes(self) -> SizeClasses:
        """The classes of the sizes of rows: as declared, or chosen by the first profile of the first variant that knows
        sizes, or those of the grid."""
        if self.sizes:
            return SizeClasses(self.sizes)
        return next((each.size_classes for each in self.variants[0].known_profiles if each.knows_sizes), GRID)

    @property
    def size_max(self) -> int:
        """The largest size of a row that every profile of its variants says anything about; 0 for no limit."""
        profiles = [each for variant in self.variants for each in variant.known_profiles]
        return min((each.size_max for each in profiles if each.size_max), default=0)

    @property
    def pads(self) -> bool:
        """Whether rows of different shapes can share a forward pass, because every variant pads them."""
        return all(variant.pad for variant in self.variants)

    @property
    def keeps_rows_apart(self) -> bool:
        """Whether the rows of a request can run in several forward passes."""
        return all(each.batch and each.joins_rows is not False and not each.is_alone for each in self.variants)

    def variant(self, name: str) -> Variant:
        """The variant called `name`. KeyError if there is none."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class _SystemParameters(Value):
    """The parameters of a system, of which `inherited` are declared elsewhere."""

    inherited: Mapping[str, Value] = field(default_factory=dict)

    def under(self, key: object, content: object) -> Value:
        return self.inherited.get(str(key)) or Value.under(self, key, content)


@dataclass(frozen=True, slots=True)
class SystemChoice:
    """The system that runs an application, and the parameters that differ from the system's defaults."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    path: str = field(default="", compare=False)
    """The dotted key of the system in `file`, for error messages; empty if nobody declared it there."""
    file: str = field(default="", compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    inherited: Mapping[str, Value] = field(default_factory=dict, repr=False, compare=False)
    """The parameters that an application has from its deployment."""
    overrules: str = field(default="", compare=False)
    """The other system that the application's own file declares, which the deployment's replaces."""
    digest: str = field(default="", compare=False)
    """In a log, of a system that is a Python file: SHA-256 of the file that decided."""

    @property
    def declared(self) -> Value:
        """The parameters as the user declared them, so that errors name their line."""
        return _SystemParameters(self.parameters, self.path or "system", self.file, self.lines, self.inherited)

    @property
    def own(self) -> dict[str, object]:
        """The parameters that are not inherited."""
        return {key: content for key, content in self.parameters.items() if key not in self.inherited}

    def of(self, choice: "SystemChoice | None") -> "SystemChoice":
        """This system, which a deployment declares, for an application that itself declares the same system as
        `choice`: its own parameters replace those with the same key."""
        own = {} if choice is None else choice.own
        declared = self.declared
        return replace(
            self if choice is None else choice,
            parameters={**self.parameters, **own},
            inherited={key: declared.under(key, content) for key, content in self.parameters.items() if key not in own},
        )

    @property
    def label(self) -> str:
        """Its name, or the name of its file without folder and ending."""
        return self.name.rpartition("/")[2].removesuffix(".py")

    @property
    def text(self) -> str:
        """Its label with the parameters: `sponge (margin 0.9)`."""
        pairs = ", ".join(f"{key} {_in_one_line(value)}" for key, value in self.parameters.items())
        return f"{self.label} ({pairs})" if pairs else self.label


def _in_one_line(value: object) -> str:
    """A parameter as a user writes it."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_in_one_line(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_one_line, value))}]"
    return str(value)


@dataclass(frozen=True, slots=True)
class Estimates:
    """How profiles become beliefs: multiplied by `margin`, and with `correct` adjusted by measured batches."""

    correct: bool = True
    margin: Annotated[float, Range(above=0, most=100)] = 1.0


WAKE_S: Final = 30.0
"""Half of the minute after which proxies and clients usually give up, so that they get the 503 that says when to come
back. Most models start sooner."""


@dataclass(frozen=True)
class Application:
    """One model or graph of models, with its deadline, on a cluster that it may share with other applications."""

    name: str
    slo_ms: float
    stages: tuple[Stage, ...]
    system: SystemChoice
    cluster: tuple[Node, ...] = ()
    estimates: Estimates = Estimates()
    declared_paths: tuple[Path, ...] = ()
    """The paths that the user declared, with their deadlines and shares; empty if there are none."""
    version: str = "1"
    weight: float = 1.0
    """Its weight if the applications of a deployment want more cores than there are."""
    rest_after_s: float = 0.0
    """After how many seconds without a request it gives up its replicas; 0: never."""
    wake_s: float = 0.0
    """How many seconds a request may wait for the first replicas, also after a rest, whatever its deadline; 0: as long
    as its deadline and the drop policy allow. Files have `WAKE_S` by default where there is `rest_after_s`."""
    limits: Limits = Limits()
    verify: float | None = None
    """Of the requests that shared a forward pass, the fraction that is run again, alone, to compare. None: only the
    first ones; 0: none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """By output, the absolute path of the file with the names of its classes, one a line."""
    outputs: tuple[OutputSource, ...] = ()
    """Where its outputs come from; empty: those of the stages at which requests end."""
    file: str = ""
    path: str = ""
    """The dotted key of the application in its file; empty for the whole file."""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """The line of every dotted key of the file."""

    @property
    def key(self) -> str:
        """Unique among all versions of all applications of a deployment."""
        return version_key(self.name, self.version)

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
        steps = [GraphStage(s.name, s.after, s.when, s.each, s.join, s.entry, s.inputs) for s in self.order]
        return Graph(steps, self.declared_paths, self.slo_ns, self.outputs)

    @property
    def one_row_why(self) -> str:
        """Why a request has one row; empty if it may have several."""
        deciding = listed([declared_name(name) for name in self.graph.deciding])
        return f"the outputs of {deciding} decide for it as a whole which stages run next" if deciding else ""

    @property
    def size_max(self) -> int:
        """The largest size of a row of its requests; 0 for no limit."""
        return min((most for name in self.graph.entries if (most := self.by_name[name].size_max)), default=0)

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

    @cached_property
    def accelerators(self) -> Mapping[str, frozenset[str]]:
        """By kind of hardware, in the cluster's order, the kinds of its accelerators; {"": none} without a cluster."""
        return accelerators_in(self.cluster) or {"": frozenset()}

    @property
    def hardware(self) -> tuple[str, ...]:
        """The kinds of hardware in the cluster, in its order."""
        return tuple(self.accelerators)

    def profiles_of(self, variant: Variant) -> dict[str, Profile]:
        """The variant's profile on each kind of hardware in the cluster where it can run: it has a profile there, and
        the kind has the accelerator that the profile is for."""
        return {
            hardware: profile
            for hardware, accelerators in self.accelerators.items()
            if (profile := variant.on(hardware)) is not None and profile.accelerator in ("", *accelerators)
        }

    @property
    def overruled(self) -> tuple[str, ...]:
        """A note if the system of the deployment is in force, and not the other one that the application's own file
        declares."""
        system = self.system
        if not system.overrules:
            return ()
        return (f"{self.name} runs under {system.label}, its deployment's system, not {system.overrules} of its file",)

    def qualified(self, version: str = "1") -> "Application":
        """This application as `version`, with stage names that are unique among all versions of all applications:
        `NAME/stage`, or `NAME@2/stage` for version 2."""
        made = replace(self, version=version)
        names = {stage.name: f"{made.key}/{stage.name}" for stage in self.stages}
        return replace(
            made,
            stages=tuple(_renamed(stage, names) for stage in self.stages),
            declared_paths=tuple(
                structs.replace(path, stages=tuple(names[name] for name in path.stages)) for path in self.declared_paths
            ),
            outputs=tuple(replace(source, stage=names[source.stage]) for source in self.outputs),
        )

    def declared(self, path: str, content: object = None) -> Value:
        """`content` as the value of the application's dotted key `path`, so that errors name its line."""
        if self.path:
            path = f"{self.path}.{path}" if path else self.path
        return Value(content, path, self.file, self.lines)

    def locate(self, path: str) -> str:
        """`file:line: key` of a dotted key such as `stages[0].model`, or the line of the nearest enclosing key."""
        return self.declared(path).where


def accelerators_in(cluster: Iterable[Node]) -> dict[str, frozenset[str]]:
    """By kind of hardware, in the cluster's order, the kinds of its accelerators."""
    found: dict[str, frozenset[str]] = {}
    for node in cluster:
        found[node.hardware] = found.get(node.hardware, frozenset()).union(each.kind for each in node.devices)
    return found


def _renamed(stage: Stage, names: Mapping[str, str]) -> Stage:
    """The stage and its references to others under their new names."""
    return replace(
        stage,
        name=names[stage.name],
        after=tuple(names[name] for name in stage.after),
        when=tuple(replace(when, of=names[when.of]) for when in stage.when),
        each=stage.each and replace(stage.each, of=names[stage.each.of]),
        inputs=tuple(replace(source, stage=names.get(source.stage, "")) for source in stage.inputs),
    )


@dataclass(frozen=True)
class Deployment:
    """The applications that one system plans for, side by side on one cluster.

    A deployment of several has qualified stage names; the stages of a single application keep those of its file.
    """

    name: str
    applications: tuple[Application, ...]
    """Each with the cluster of the deployment, and with the system that is in force for it."""
    system: SystemChoice
    """The system, with the parameters that all applications have: those of the default, if nobody declares a system.
    Its path is empty, and it has no parameters, if only the applications declare it."""
    cluster: tuple[Node, ...] = ()
    limits: ServerLimits = ServerLimits()
    edges: int | None = None
    """Processes that accept connections and parse requests. None: see `sloop.serve.server`."""
    shadows: tuple[SystemChoice, ...] = ()
    """Systems that a server shows beside the one that serves: what each would do now (`sloop.page.shadow_system`)."""
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, application: Application) -> "Deployment":
        """The deployment of a single application."""
        system = application.system
        return cls(
            application.name,
            (replace(application, system=system.of(None)),),
            replace(system, parameters={} if system.path else system.parameters, path=""),
            application.cluster,
            file=application.file,
            lines=application.lines,
        )

    @property
    def application(self) -> Application:
        """The only application. ValueError if there are several."""
        (application,) = self.applications
        return application

    def joined_by(self, application: Application) -> Application:
        """The application as one of this deployment: on its cluster, and with its system.

        If the application declares the same system, its own parameters replace the deployment's with the same key.
        InputError if it declares another system, unless the deployment's file overrules it.
        """
        own, system = application.system, self.system
        if own.path and own.name != system.name and not system.path:
            what = f"application {application.name!r} declares the system {own.label!r}, not {system.label!r}"
            place = f" ({system.declared.where})" if system.file else ""
            own.declared.fail(f"{what} as its deployment{place}", "one system plans for all: name the same, or none")
        is_same = own.path and own.name == system.name
        found = system.of(own if is_same else None)
        if own.path and not is_same:
            found = replace(found, overrules=own.label)
        return replace(application, cluster=self.cluster, system=found)

    def under(self, choice: SystemChoice) -> "Deployment":
        """This deployment under another system; applications of a deployment that declare it themselves keep their own
        parameters. Under its own system, those stay under theirs that were given another one while they served."""
        applications = [
            each
            if choice == self.system and each.system.name != choice.name
            else replace(
                each, system=choice.of(each.system if each.system.name == choice.name and each.system.own else None)
            )
            for each in self.applications
        ]
        return replace(self, applications=tuple(applications), system=choice)

    @property
    def without_profile(self) -> tuple[FilePath, ...]:
        """The model files that have no profile at all, each once."""
        return tuple(
            dict.fromkeys(
                FilePath(variant.model)
                for application in self.applications
                for stage in application.stages
                for variant in stage.variants
                if variant.model is not None and variant.profile is None and not variant.profiles
            )
        )

    def without(self, names: Container[str]) -> "Deployment":
        """This deployment without the applications of these names."""
        return replace(self, applications=tuple(each for each in self.applications if each.name not in names))

    def with_profiles(self, found: Mapping[FilePath, FirstProfile]) -> "Deployment":
        """This deployment, in which variants without a profile have the one of their model."""

        def of_variant(variant: Variant) -> Variant:
            first = found.get(FilePath(variant.model)) if variant.model is not None else None
            if first is None or variant.profile is not None or variant.profiles:
                return variant
            return replace(variant, profile=first.profile, files={"": str(first.file)})

        def of_application(application: Application) -> Application:
            stages = (replace(each, variants=tuple(map(of_variant, each.variants))) for each in application.stages)
            return replace(application, stages=tuple(stages))

        return replace(self, applications=tuple(map(of_application, self.applications)))

    @cached_property
    def by_name(self) -> Mapping[str, Application]:
        """The applications by name, in the file's order."""
        return {application.name: application for application in self.applications}

    def declared(self, path: str, content: object = None) -> Value:
        """`content` as the value of the dotted key `path` of the deployment's file, so that errors name its line."""
        return Value(content, path, self.file, self.lines)


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
