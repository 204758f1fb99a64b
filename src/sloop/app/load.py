"""Loads applications, deployments and scenarios from files or mappings. A model file is an application of one stage.

Any input gives values that keep all rules, or an InputError that names file, line, key and the fix. Reads the disk only
for profiles, and to check that named files exist. `sloop.systems` reads the parameters of a system.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor, log10
from pathlib import Path as FilePath
from typing import Final

from sloop.app.application import (
    WAKE_S,
    Application,
    Deployment,
    Estimates,
    Stage,
    SystemChoice,
    accelerators_in,
)
from sloop.app.document import BYTES_MAX, check_unique, existing_file, is_url, read_name, read_yaml
from sloop.app.hardware import local, read_cluster
from sloop.app.limits import Limits, ServerLimits, read_limits, read_own_limits
from sloop.app.scenario import Change, InterferenceTruth, NetworkTruth, Scenario, Truth
from sloop.app.stages import (
    SLO_MS_MAX,
    read_output_sources,
    read_paths,
    read_size_latencies,
    read_slowdown,
    read_stages,
)
from sloop.app.triton import CONFIG, read_repository
from sloop.errors import InputError
from sloop.options import Value, as_value, check_range, nearest, placed, read_options
from sloop.profile.model import is_model
from sloop.profile.profile import Profile, SizeLatency
from sloop.profile.published import PUBLISHED
from sloop.sizes import SizeClasses
from sloop.text import counted, listed, number
from sloop.units import WIDE_ROUNDING
from sloop.vocabulary import Canary, Node
from sloop.workload.link import link_options
from sloop.workload.read import trace_options

SHARED_KEYS: Final = ("weight", "rest_after_s", "wake_s", "limits")
"""Keys of an application that a deployment may give instead of the application's file."""
APPLICATION_KEYS: Final = (
    "name",
    "slo_ms",
    "stages",
    "paths",
    "system",
    "cluster",
    "estimates",
    "labels",
    "outputs",
    "verify",
    "shadow",
    *SHARED_KEYS,
)
SHADOWS_MAX: Final = 4
"""The most systems that a server shows beside its own."""
EDGES_MAX: Final = 64
"""The most edges of a server."""
DEPLOYMENT_KEYS: Final = ("name", "applications", "system", "cluster", "limits", "edges", "shadow")
SCENARIO_KEYS: Final = ("trace", "traces", "duration_s", "seed", "truth", "systems", "changes")
SYSTEM_KEYS: Final = {"system", "systems"}
APPLICATIONS_MAX, CHANGES_MAX = 1_000, 10_000
WAKE_S_MAX: Final = 3_600.0
NAME_CHARS_MAX: Final = 100
DEFAULT_SYSTEM: Final = SystemChoice("elastic")
"""Cores follow the load in place, a second replica starts where one is not enough, and bursts use idle cores."""
SLO_FACTOR: Final = 5.0
"""The usual deadline as a multiple of the time of a single request, as publications choose deadlines for many models at
once. Five leaves time for the batch before a request's own, and for its own."""
SLO_MS_LEAST: Final = 50.0
"""The least usual deadline: below it, the network decides and not the model."""
SLO_STEPS: Final = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0)
"""Usual deadlines are rounded up to these, times a power of ten."""

Source = str | FilePath | Mapping[str, object]
"""The path of a file, its content as a mapping, the URL of a model, or the folder of a Triton model repository."""
Models = Mapping[str, FilePath]
"""By URL, the models that have been fetched. A model of another URL is an error."""
NO_MODELS: Final[Models] = {}


def load_application(
    source: Source,
    *,
    folder: FilePath | None = None,
    cluster: Sequence[Node] | None = None,
    models: Models = NO_MODELS,
) -> Application:
    """The application in a file or a mapping, which may also be a scenario; all keys of the scenario are checked.

    Relative paths start at `folder`, by default the folder of the file. `cluster` is the cluster of the deployment that
    the application joins; the keys of a scenario have no effect then.
    """
    document, base = _document(source, folder, models)
    fields = document.mapping()
    if "applications" in fields:
        what = "a deployment of several applications; one application is needed here"
        fields["applications"].fail(what, "name the file of one application")
    if cluster is not None:
        return read_application(document, base, DeclaredCluster(tuple(cluster)))
    if "trace" in fields or "traces" in fields:
        return read_scenario(document, base).application
    return read_application(document, base)


def load_deployment(
    sources: Source | Sequence[Source], *, folder: FilePath | None = None, models: Models = NO_MODELS
) -> Deployment:
    """The deployment in a file or a mapping, or the deployment of several applications side by side. A single
    application is a deployment as well."""
    if isinstance(sources, str | FilePath | Mapping):
        sources = (sources,)
    documents = [each for source in sources for each in _documents(source, folder, models)]
    if len(documents) == 1:
        return read_deployment(*documents[0], models)
    members = [_Member(document, base) for document, base in documents]
    for member in members:
        fields = member.document.mapping()
        if "applications" in fields:
            what = "a deployment of several applications beside other files"
            fields["applications"].fail(what, "give it alone, or list all applications in one deployment file")
    return _deployment(members, Deployment(_joined_name(members), (), SystemChoice("")), None)


def load_scenario(source: Source, *, folder: FilePath | None = None, models: Models = NO_MODELS) -> Scenario:
    """The scenario in a file or a mapping. InputError also if it has no traces."""
    return read_scenario(*_document(source, folder, models), models)


def _documents(source: Source, folder: FilePath | None, models: Models) -> list[tuple[Value, FilePath]]:
    """The document of a source; of a model repository, those of all its models."""
    if isinstance(source, str | FilePath) and FilePath(source).is_dir():
        found = read_repository(FilePath(source), SLO_MS_LEAST)
        if not found.applications:
            help = "; ".join(found.notes) or "it needs folders of models, with folders of versions in them"
            raise InputError("no model in it can be served", where=str(source), help=help)
        return [(document, FilePath()) for document in found.applications]
    return [_document(source, folder, models)]


def _document(source: Source, folder: FilePath | None, models: Models = NO_MODELS) -> tuple[Value, FilePath]:
    if isinstance(source, Mapping):
        return _with_models(as_value(source), models), folder or FilePath()
    path = FilePath(source)
    if isinstance(source, str) and is_url(source):
        if source not in models:
            help = "fetch it with `sloop pull`; in files for `sloop deploy`, write the path that it prints instead"
            raise InputError("this model is not on this machine", where=source, help=help)
        path = models[source]
    if path.name == CONFIG or path.is_dir():
        found = _documents(path.parent if path.name == CONFIG else path, None, models)
        if len(found) > 1:
            names = listed([document.mapping()["name"].text() for document, _ in found])
            what = f"a repository of several applications: {names}"
            raise InputError(what, where=str(path), help="give the folder of one of them")
        return found[0]
    if is_model(path):
        return _model_document(path), FilePath()
    return _with_models(read_yaml(path), models), folder or path.parent


# Models at URLs


def model_urls(sources: Sequence[Source], *, folder: FilePath | None = None) -> dict[str, Value]:
    """The URLs that applications, or those of a deployment, name as models, each with the first place that does.
    InputError if a file cannot be read; what else is wrong with it shows when it is loaded."""
    found: dict[str, Value] = {}
    for source in sources:
        if isinstance(source, str) and is_url(source):
            found[source] = Value(source)
            continue
        if _has_no_url(source):
            continue
        document, base = _document(source, folder)
        fields = document.content if isinstance(document.content, Mapping) else {}
        members = [document]
        if "applications" in fields:
            members = [_member(each, base).document for each in document.mapping()["applications"].elements()]
        for value in (value for member in members for value in _models_in(member)):
            if is_url(value.text()):
                found.setdefault(value.text(), value)
    return found


def _has_no_url(source: Source) -> bool:
    """Whether a file needs no second look, which takes as long as loading it: it has no URL, and names no files."""
    if isinstance(source, Mapping):
        return False
    try:
        with open(source, "rb") as file:
            raw = file.read(BYTES_MAX)
    except IsADirectoryError:
        return True
    except (OSError, ValueError):
        return False
    return (
        is_model(FilePath(source))
        or FilePath(source).name == CONFIG
        or (b"://" not in raw and b"applications" not in raw)
    )


def _models_in(document: Value) -> Iterator[Value]:
    """The names of models in the stages of an application; nothing where it is not as it should be."""
    for stage in _values_in(document, "stages"):
        for value in (stage, *_values_in(stage, "variants")):
            if isinstance(value.content, Mapping) and isinstance(value.content.get("model"), str):
                yield value.under("model", value.content["model"])


def _values_in(value: Value, key: str) -> list[Value]:
    content = value.content.get(key) if isinstance(value.content, Mapping) else None
    return value.under(key, content).elements() if isinstance(content, list | tuple) else []


def _with_models(document: Value, models: Models) -> Value:
    """The document of an application with the paths of the models that have been fetched instead of their URLs."""
    found = {value.path: str(models[url]) for value in _models_in(document) if (url := value.text()) in models}
    return replace(document, content=_with_texts(document, found)) if found else document


def _with_texts(value: Value, texts: Mapping[str, str]) -> object:
    """The content of a value with other texts at some keys."""
    if isinstance(value.content, Mapping):
        return {key: _with_texts(value.under(key, content), texts) for key, content in value.content.items()}
    if isinstance(value.content, list | tuple):
        return [_with_texts(value.under(place, content), texts) for place, content in enumerate(value.content)]
    return texts.get(value.path, value.content)


# Model files


def _model_document(path: FilePath) -> Value:
    """A model file as an application of one stage, which is called like the file. Its deadline follows from the profile
    beside it, see `with_deadline`; without one, it is the least until the model has been measured."""
    if not path.is_file():
        raise InputError("there is no such file", where=str(path), help="give a model or an application file")
    name = name_from(path.stem)
    stage = {"name": name, "model": str(path.absolute())}
    return Value({"name": name, "slo_ms": SLO_MS_LEAST, "stages": [stage]}, "", str(path))


def is_model_application(application: Application) -> bool:
    """Whether the user gave a model, or a Triton model repository, instead of an application file."""
    file = FilePath(application.file)
    return is_model(file) or file.name == CONFIG


def with_deadline(application: Application, slo_ms: float | None = None) -> tuple[Application, str]:
    """The application; that of a model file with the deadline `slo_ms`, or else with one that follows from the profiles
    of its stages, if all have one, and a sentence that says so."""
    if not is_model_application(application):
        return application, ""
    if slo_ms is not None:
        return replace(application, slo_ms=slo_ms), ""
    profiles = [next(iter(application.profiles_of(stage.variants[0]).values()), None) for stage in application.stages]
    singles = [_single(profile) for profile in profiles if profile is not None]
    if len(singles) < len(profiles):
        return application, ""
    single_ms = sum(each_ms for each_ms, _ in singles)
    usual_ms = usual_slo_ms(single_ms)
    on = f"on {counted(singles[0][1], 'core')}" if len(singles) == 1 else f"in {len(singles)} stages"
    why = f"{SLO_FACTOR:g} × {number(single_ms)} ms, the planned time of one request {on}"
    least = f", but at least {SLO_MS_LEAST:g} ms" if usual_ms == SLO_MS_LEAST else ", rounded up"
    note = f"{application.name}: its deadline is {number(usual_ms)} ms ({why}{least})"
    return replace(application, slo_ms=usual_ms), note


def _single(profile: Profile) -> tuple[float, float]:
    """The planned milliseconds of a single request, and on how many cores: one if the profile has it."""
    region = profile.region
    cores = 1.0 if region is None or region.has(region.batch_min, 1.0) else profile.max_cores
    return profile.latency_ms.latency_ms(1, cores), cores


def usual_slo_ms(single_ms: float) -> float:
    """The usual deadline of a model whose single requests take `single_ms`: `SLO_FACTOR` times as long, rounded up."""
    wanted_ms = max(SLO_MS_LEAST, SLO_FACTOR * single_ms)
    power = 10.0 ** floor(log10(wanted_ms))
    return next((power * step for step in SLO_STEPS if power * step >= wanted_ms), 10 * power)


# Published profiles


def published_profiles(name: str) -> dict[str, str]:
    """The published profiles of a model, by kind of hardware; "" is one for every kind that has its accelerator. Empty
    if there is none with this name."""
    if name in PUBLISHED:
        return {"": name}
    return {each.removeprefix(f"{name}@"): each for each in PUBLISHED if each.startswith(f"{name}@")}


def published_document(name: str, slo_ms: float, kinds: Collection[str] = ()) -> dict[str, object]:
    """An application of one stage with the published profiles of a model, those for `kinds` if any is for them."""
    found = published_profiles(name)
    own = {kind: profile for kind, profile in found.items() if kind in kinds} or found
    profiles = {"profile": own[""]} if "" in own else {"profiles": own}
    called = name_from(name)
    return {"name": called, "slo_ms": slo_ms, "stages": [{"name": called, **profiles}]}


def name_from(text: str) -> str:
    """A valid name that is like the text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:NAME_CHARS_MAX] or "model"


# Deployments


@dataclass(frozen=True, slots=True)
class DeclaredCluster:
    """The cluster of a deployment, which its applications need not declare; `value` is where it is declared."""

    nodes: tuple[Node, ...]
    value: Value | None = None


@dataclass(frozen=True, slots=True)
class _Member:
    """An application of a deployment: its document, and what the deployment says of it instead."""

    document: Value
    folder: FilePath
    instead: Mapping[str, Value] = field(default_factory=dict)

    @property
    def name(self) -> Value:
        """Its name; its document, if it has none."""
        return self.instead.get("name") or self.document.mapping().get("name", self.document)


def read_deployment(document: Value, folder: FilePath, models: Models = NO_MODELS) -> Deployment:
    """The deployment in `document`, which may declare a single application. Its relative paths start at `folder`."""
    fields = document.mapping()
    if "applications" not in fields:
        made = Deployment.of(read_application(document, folder))
        return replace(made, shadows=_shadows(fields, folder))
    fields = document.mapping((*DEPLOYMENT_KEYS, *SCENARIO_KEYS), required=("name", "applications"))
    values = fields["applications"].elements()
    if not 1 <= len(values) <= APPLICATIONS_MAX:
        what = f"{len(values)} applications; a deployment has 1 to {APPLICATIONS_MAX:,}"
        fields["applications"].fail(what, "add or remove applications")
    given = Deployment(
        name=read_name(fields["name"]),
        applications=(),
        system=_systems(fields, folder)[0] if fields.keys() & SYSTEM_KEYS else SystemChoice(""),
        limits=read_limits(fields["limits"]) if "limits" in fields else ServerLimits(),
        edges=fields["edges"].integer(least=1, most=EDGES_MAX) if "edges" in fields else None,
        shadows=_shadows(fields, folder),
        file=document.file,
        lines=document.lines,
    )
    cluster = DeclaredCluster(read_cluster(fields["cluster"]), fields["cluster"]) if "cluster" in fields else None
    return _deployment([_member(each, folder, models) for each in values], given, cluster)


def _member(value: Value, folder: FilePath, models: Models = NO_MODELS) -> _Member:
    """An application as a deployment names it: a file, a mapping with `file`, or the application itself."""
    if isinstance(value.content, Mapping) and "stages" in value.content:
        value.mapping(APPLICATION_KEYS)
        return _Member(_with_models(value, models), folder)
    fields = value.mapping(("file", "name", *SHARED_KEYS)) if isinstance(value.content, Mapping) else {"file": value}
    if "file" not in fields:
        value.fail("an application needs 'file' or 'stages'", "name its file: `- file: ./app.yaml`")
    path = existing_file(fields["file"], folder, "application file")
    document = _model_document(path) if is_model(path) else read_yaml(path)
    if "applications" in document.mapping():
        itself = value.file and path.samefile(value.file)
        what = "a deployment cannot list itself" if itself else f"{path.name} is a deployment, not an application"
        fields["file"].fail(what, "list files of single applications")
    return _Member(_with_models(document, models), path.parent, fields)


def _deployment(members: Sequence[_Member], given: Deployment, cluster: DeclaredCluster | None) -> Deployment:
    """The members in one deployment, for which `given` has everything but applications and cluster."""
    check_unique((member.name for member in members), "application")
    if cluster is None:
        declared = (member.document.mapping().get("cluster") for member in members)
        value = next((value for value in declared if value is not None), None)
        cluster = _own_machine() if value is None else DeclaredCluster(read_cluster(value), value)
    applications = [read_application(each.document, each.folder, cluster, each.instead) for each in members]
    system = given.system
    if not system.name:
        named = next((each.system for each in applications if each.system.path), None)
        system = DEFAULT_SYSTEM if named is None else replace(named, parameters={}, path="")
    shadows = [shadow for each in members for shadow in _shadows(each.document.mapping(), each.folder)]
    made = replace(given, cluster=cluster.nodes, system=system, shadows=(*given.shadows, *shadows)[:SHADOWS_MAX])
    joined = [made.joined_by(application) for application in applications]
    if len(joined) > 1:
        joined = [application.qualified() for application in joined]
    return replace(made, applications=tuple(joined))


def _own_machine() -> DeclaredCluster:
    return DeclaredCluster((local().node("local-0"),))


def _joined_name(members: Sequence[_Member]) -> str:
    """A name for applications that are deployed side by side without a deployment file."""
    names = [read_name(member.name) for member in members]
    joined = "+".join(names)
    return joined if len(joined) <= NAME_CHARS_MAX else f"{names[0]}+{len(names) - 1}"


# Applications


def read_application(
    document: Value,
    folder: FilePath,
    cluster: DeclaredCluster | None = None,
    instead: Mapping[str, Value] | None = None,
) -> Application:
    """The application in `document`, whose relative paths start at `folder`.

    In a deployment it has the deployment's `cluster`, and the values of `instead` instead of its own.
    """
    own = document.mapping((*APPLICATION_KEYS, *SCENARIO_KEYS), required=("name", "slo_ms", "stages"))
    fields = {**own, **(instead or {})}
    slo_ms = fields["slo_ms"].number(above=0, most=SLO_MS_MAX)
    nodes = _joined_cluster(own, cluster)
    rest_after_s = fields["rest_after_s"].number(least=0, most=1e9) if "rest_after_s" in fields else 0.0
    wake_s = WAKE_S if rest_after_s else 0.0
    stages = read_stages(fields["stages"], folder, accelerators_in(nodes))
    application = Application(
        name=read_name(fields["name"]),
        slo_ms=slo_ms,
        stages=stages,
        system=_systems(fields, folder)[0],
        declared_paths=read_paths(fields["paths"], stages, slo_ms) if "paths" in fields else (),
        cluster=nodes,
        estimates=read_options(Estimates, fields["estimates"]) if "estimates" in fields else Estimates(),
        weight=fields["weight"].number(above=0, most=1e6) if "weight" in fields else 1.0,
        rest_after_s=rest_after_s,
        wake_s=fields["wake_s"].number(least=0, most=WAKE_S_MAX) if "wake_s" in fields else wake_s,
        limits=read_own_limits(fields["limits"]) if "limits" in fields else Limits(),
        verify=fields["verify"].number(least=0, most=1) if "verify" in fields else None,
        labels=_labels(fields["labels"], folder) if "labels" in fields else {},
        outputs=read_output_sources(fields["outputs"], stages) if "outputs" in fields else (),
        file=document.file,
        path=document.path,
        lines=document.lines,
    )
    try:
        application.paths  # noqa: B018  # cached; raises InputError for contradictory stages
    except InputError as error:
        places = {stage.name: place for stage, place in zip(stages, fields["stages"].elements(), strict=True)}
        place = places.get(error.where, fields["stages"])
        place.fail(error.what.removeprefix(f"{error.where}: "), error.help)
    return with_deadline(application)[0]


def _labels(value: Value, folder: FilePath) -> dict[str, str]:
    """By output, the file with the names of its classes."""
    return {name: str(existing_file(each, folder, "file of labels")) for name, each in value.mapping().items()}


def _joined_cluster(fields: Mapping[str, Value], cluster: DeclaredCluster | None) -> tuple[Node, ...]:
    """The cluster of an application: its own, or that of the deployment, which its own must equal."""
    if cluster is None:
        return read_cluster(fields["cluster"]) if "cluster" in fields else _own_machine().nodes
    if "cluster" in fields and read_cluster(fields["cluster"]) != cluster.nodes:
        place = f" ({cluster.value.where})" if cluster.value is not None else ""
        fields["cluster"].fail(
            f"the application declares another cluster than its deployment{place}",
            "applications of one deployment share its cluster: remove it here",
        )
    return cluster.nodes


def _systems(fields: Mapping[str, Value], folder: FilePath) -> tuple[SystemChoice, ...]:
    """The systems under `systems` or `system`; without both keys, the default system, with an empty path."""
    if "systems" in fields and "system" in fields:
        fields["systems"].fail("a scenario has either 'system' or 'systems', not both", "keep 'systems'")
    declared = fields.get("systems", fields.get("system"))
    if declared is None:
        return (DEFAULT_SYSTEM,)
    choices = tuple(read_system(each, folder) for each in declared.one_or_more())
    if not choices:
        declared.wrong("at least one system")
    return choices


def _shadows(fields: Mapping[str, Value], folder: FilePath) -> tuple[SystemChoice, ...]:
    """The systems under `shadow`, which a server shows beside the one that serves."""
    if "shadow" not in fields:
        return ()
    choices = tuple(read_system(value, folder) for value in fields["shadow"].one_or_more())
    if len(choices) > SHADOWS_MAX:
        fields["shadow"].wrong(f"at most {SHADOWS_MAX} systems")
    return choices


def read_system(value: Value, folder: FilePath) -> SystemChoice:
    """A system as `static` or `{name: static, cores: 2}`; the path of a Python file may replace the name."""
    if not isinstance(value.content, Mapping):
        return SystemChoice(_system_name(value, folder), {}, value.path, value.file, value.lines)
    fields = value.mapping(required=("name",))
    parameters = {key: field.content for key, field in fields.items() if key != "name"}
    placements = fields.get("placements")
    if placements is not None and isinstance(placements.content, str):
        parameters["placements"] = _placements(placements, folder)
    return SystemChoice(_system_name(fields["name"], folder), parameters, value.path, value.file, value.lines)


def _placements(value: Value, folder: FilePath) -> object:
    """The placements in a file: a list of them, or what `sloop plan --json` prints."""
    found = read_yaml(existing_file(value, folder, "placement file")).content
    if isinstance(found, Mapping):
        found = found.get("placements")
    if not isinstance(found, list):
        value.fail("the placement file has no placements", "write one with `sloop plan APP --rate R --json`")
    return found


def _system_name(value: Value, folder: FilePath) -> str:
    """The name of a system, or the absolute path of a Python file with a user's system."""
    name = value.text()
    return str(existing_file(value, folder, "system file")) if name.endswith(".py") else name


# Scenarios


def read_scenario(document: Value, folder: FilePath, models: Models = NO_MODELS) -> Scenario:
    """The scenario in `document`, whose relative paths start at `folder`."""
    deployment = read_deployment(document, folder, models)
    fields = document.mapping()
    duration_s = fields["duration_s"].number(above=0, most=1e8) if "duration_s" in fields else 60.0
    changes = _changes(fields["changes"], folder, deployment, duration_s) if "changes" in fields else ()
    later = [change.deploy for change in changes if change.deploy is not None]
    names = tuple(dict.fromkeys((*deployment.by_name, *(each.name for each in later))))
    stages = [stage for each in deployment.applications for stage in each.stages]
    stages += [stage for each in later if each.name not in deployment.by_name for stage in each.qualified().stages]
    truth = _truth(fields["truth"], folder, stages) if "truth" in fields else Truth()
    if truth.network is not None and truth.network.topology is not None:
        _check_weights(fields["truth"].mapping()["network"].mapping()["topology"], (*deployment.applications, *later))
    return Scenario(
        deployment=deployment,
        traces=_traces(document, fields, folder, deployment, names),
        duration_s=duration_s,
        seed=fields["seed"].integer(least=0) if "seed" in fields else 0,
        truth=truth,
        systems=_systems(fields, folder) if fields.keys() & SYSTEM_KEYS else (deployment.system,),
        changes=changes,
    )


def _traces(
    document: Value, fields: Mapping[str, Value], folder: FilePath, deployment: Deployment, names: Collection[str]
) -> dict[str, dict[str, object]]:
    """The traces by application. Every application has one, also one that is deployed later; an empty one is no
    request."""
    if "trace" in fields:
        if "traces" in fields:
            fields["traces"].fail("a scenario has either 'trace' or 'traces', not both", "keep 'traces'")
        if len(names) > 1:
            names_text = ", ".join(f"{name}: …" for name in names)
            fields["trace"].fail("one trace for several applications", f"give each its own: `traces: {{{names_text}}}`")
        return {deployment.applications[0].name: _trace(fields["trace"], folder)}
    if "traces" not in fields:
        key = "trace" if len(deployment.applications) == 1 else "traces"
        document.fail(f"the key {key!r} is missing", f"add '{key}:' here")
    declared = fields["traces"].mapping(names)
    missing = next((name for name in names if name not in declared), None)
    if missing is not None:
        fields["traces"].fail(f"no trace for application {missing!r}", f"add '{missing}:', empty if nobody calls it")
    return {name: _trace(each, folder) for name, each in declared.items() if each.content is not None}


def _trace(value: Value, folder: FilePath) -> dict[str, object]:
    """Check the options of a trace and return them; files become absolute paths."""
    trace_options(value)
    trace = _with_file(value, folder)
    works = [key for key in ("rows", "sizes") if isinstance(trace.get(key), Mapping)]
    return trace | {key: _with_file(value.under(key, trace[key]), folder) for key in works}


def _with_file(value: Value, folder: FilePath) -> dict[str, object]:
    """The options, in which a `file` is an absolute path."""
    fields = value.mapping()
    options = {key: field.content for key, field in fields.items()}
    return options | ({"file": str(existing_file(fields["file"], folder))} if "file" in fields else {})


def _truth(value: Value, folder: FilePath, stages: Sequence[Stage]) -> Truth:
    """The options under `truth:`; omitted options keep their defaults."""
    readers = {
        "network": lambda network: read_options(
            NetworkTruth, network, readers={"link": lambda link: _link(link, folder)}
        ),
        "fan_out": lambda fan_out: _fan_out(fan_out, stages),
        "shares": lambda shares: _shares(shares, stages),
        "interference": _interference,
        "sizes": lambda sizes: _true_sizes(sizes, stages),
    }
    return read_options(Truth, value, readers=readers)


def _interference(value: Value) -> InterferenceTruth:
    """`none`, or the options of the true interference."""
    if value.content == "none":
        return InterferenceTruth(error=0.0)
    return read_options(InterferenceTruth, value, readers={"law": read_slowdown})


def _true_sizes(value: Value, stages: Sequence[Stage]) -> dict[str, tuple[SizeLatency, ...]]:
    """Per stage, the true latencies of rows of several sizes."""
    declared = value.mapping([stage.name for stage in stages])
    found = {name: read_size_latencies(each) for name, each in declared.items()}
    for name, sizes in found.items():
        if len(sizes) < 2:
            declared[name].wrong("a list of at least two sizes with their latencies")
        with placed(declared[name]):
            SizeClasses(tuple(each.size for each in sizes))
    return found


def _check_weights(topology: Value, applications: Iterable[Application]) -> None:
    """InputError if a variant could not be fetched, because nothing says how large its weights are."""
    for application in applications:
        for stage in application.stages:
            for variant in stage.variants:
                unknown = [kind for kind in application.profiles_of(variant) if not variant.weights_bytes(kind)]
                if unknown:
                    what = f"the size of the weights of {stage.name}/{variant.name} is unknown on {listed(unknown)}"
                    topology.fail(what, "add `weights_bytes` to its profile, or measure it again with `sloop profile`")


def _link(value: Value, folder: FilePath) -> str | dict[str, object]:
    """The absolute path of a file of bandwidths, or the checked options of a link."""
    if not isinstance(value.content, Mapping):
        return str(existing_file(value, folder))
    link_options(value)
    return {key: field.content for key, field in value.mapping().items()}


def _fan_out(value: Value, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Per stage with `each`, the number of parts, or several equally likely numbers."""
    found = {}
    for name, numbers in _per_stage(value, [stage.name for stage in stages if stage.each], "each").items():
        found[name] = tuple(each.integer(least=0, most=1_000_000) for each in numbers.one_or_more())
        if not found[name]:
            numbers.wrong("at least one number of parts")
    return found


def _shares(value: Value, stages: Sequence[Stage]) -> dict[str, float]:
    """Per stage with `when`, the share of requests that take it; the shares of alternatives sum to at most 1."""
    named = {stage.name: stage for stage in stages if stage.when}
    values = _per_stage(value, named, "when")
    found = {name: share.number(least=0, most=1) for name, share in values.items()}
    declared: dict[tuple[str, str], dict[object, float]] = {}
    for name, share in found.items():
        for when in named[name].when:
            shares = declared.setdefault((when.of, when.output), {})
            shares[when.values if when.output else name] = share
            if sum(shares.values()) > 1.0 + WIDE_ROUNDING:
                what = f"the shares of the branches after {when.of!r} sum to more than 1"
                values[name].fail(what, "branches on one output exclude each other")
    return found


def _per_stage(value: Value, names: Collection[str], key: str) -> dict[str, Value]:
    """The values declared by stage. InputError for a stage that is not in `names`, the stages with `key`."""
    if not names and value.mapping():
        value.fail(f"no stage has `{key}`", "remove it")
    return value.mapping(names)


# Changes of the deployment during a scenario


def _changes(value: Value, folder: FilePath, deployment: Deployment, duration_s: float) -> tuple[Change, ...]:
    """The changes in order of time. InputError for one that concerns an application or version that is not deployed
    then."""
    values = value.elements()
    if len(values) > CHANGES_MAX:
        value.fail(f"{len(values)} changes; at most {CHANGES_MAX:,}", "leave some out")
    read = [(each, _change(each, folder, deployment, duration_s)) for each in values]
    read.sort(key=lambda pair: pair[1].at_s)
    versions = dict.fromkeys(deployment.by_name, 1)
    """By name, the number of versions so far."""
    serving = set(versions)
    canaries: set[tuple[str, int]] = set()
    """By name and version. Some of them may have been promoted or rolled back during the run."""
    for each, change in read:
        fields = each.mapping()
        if change.deploy is not None:
            name = change.deploy.name
            if change.canary is not None and name not in serving:
                what = f"no version of {name!r} could serve the other requests at {change.at_s:g} s"
                fields["canary"].fail(what, "leave 'canary' out")
            versions[name] = versions.get(name, 0) + 1
            serving.add(name)
            if change.canary is not None:
                canaries.add((name, versions[name]))
            continue
        name = change.promote or change.remove or change.application
        place = fields.get("promote") or fields.get("remove") or fields.get("application") or each
        if name not in serving:
            place.fail(f"no application {name!r} is deployed at {change.at_s:g} s", nearest(name, sorted(serving)))
        if change.system is not None:
            continue
        if change.version and int(change.version) > versions[name]:
            place.fail(f"{name!r} has no version {change.version} at {change.at_s:g} s", "versions count from 1")
        meant = (name, int(change.version or versions[name]))
        if change.promote and meant not in canaries:
            others = [f"{name}@{version}" for other, version in sorted(canaries) if other == name]
            help = f"write {listed(others, 'or')}" if others else "deploy one with 'canary' first, and promote it once"
            place.fail(f"version {meant[1]} of {name!r} is not a canary at {change.at_s:g} s", help)
        canaries.discard(meant)
        if change.remove and not change.version:
            serving.remove(name)
            canaries = {each for each in canaries if each[0] != name}
    return tuple(change for _, change in read)


def _change(value: Value, folder: FilePath, deployment: Deployment, duration_s: float) -> Change:
    keys = ("at_s", "deploy", "canary", "truth", "promote", "remove", "system", "application")
    fields = value.mapping(keys, required=("at_s",))
    at_s = fields["at_s"].number(least=0, most=duration_s)
    orders = fields.keys() & {"deploy", "promote", "remove", "system"}
    if len(orders) != 1:
        what = "a change has one of 'deploy', 'promote', 'remove' and 'system'"
        value.fail(what, "write each change as an entry of its own")
    for key, order in (("canary", "deploy"), ("truth", "deploy"), ("application", "system")):
        if key in fields and order not in fields:
            fields[key].fail(f"{key!r} is only for {order!r}", "remove it")
    if "system" in fields:
        names = tuple(deployment.by_name)
        if "application" not in fields and len(names) > 1:
            value.fail("a change of 'system' needs 'application'", f"its applications are {listed(names)}")
        name = fields["application"].text() if "application" in fields else names[0]
        return Change(at_s, system=read_system(fields["system"], folder), application=name)
    if "deploy" not in fields:
        (order,) = orders
        name, _, version = fields[order].text().partition("@")
        if version and not (version.isdigit() and version.isascii() and 0 < int(version[:9]) == int(version)):
            fields[order].fail(f"the version {version!r} is not a number", "write NAME, or NAME@2 for version 2")
        is_promote = order == "promote"
        return Change(at_s, version=version, promote=name if is_promote else "", remove="" if is_promote else name)
    member = _member(fields["deploy"], folder)
    cluster = DeclaredCluster(deployment.cluster)
    application = read_application(member.document, member.folder, cluster, member.instead)
    truth = fields["truth"].mapping(("profile_error",)) if "truth" in fields else {}
    return Change(
        at_s,
        deploy=deployment.joined_by(application),
        canary=read_canary(fields["canary"]) if "canary" in fields else None,
        profile_error=truth["profile_error"].number(above=0, most=100) if truth else 1.0,
    )


def read_canary(value: Value) -> Canary:
    """How a new version gets its traffic; omitted options keep their defaults."""
    canary = read_options(Canary, value)
    with placed(value):
        check_range("share", canary.share, above=0)
        check_range("promote_after_s", canary.promote_after_s, least=0, most=1e9)
        check_range("tolerance", canary.tolerance, least=0, most=1)
        check_range("requests_min", canary.requests_min, least=1, most=1e9)
    if canary.share >= 1:
        value.under("share", canary.share).fail("a canary gets less than all requests", "leave 'canary' out")
    return canary
