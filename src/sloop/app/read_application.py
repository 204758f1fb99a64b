"""Reads an application out of a document.

Promises an `Application` whose every rule holds, or an InputError that names file, line, key and the fix. Looks at the
disk only to see whether the model and profile files that are named exist. What the parameters of a system mean is the
systems' own business.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant, find_cycle
from sloop.app.document import Value, nearest
from sloop.app.hardware import ANY_BYTES, CUSTOM, KINDS, LOCAL, Hardware, known, local
from sloop.app.read_graph import EDGE_KEYS, check_conditions, read_paths, with_edges
from sloop.app.read_profile import read_profile
from sloop.errors import InputError
from sloop.profile.profile import Profile
from sloop.profile.store import is_of, load_profile, path_beside
from sloop.vocabulary import Node

APPLICATION_KEYS = ("name", "slo_ms", "stages", "paths", "system", "cluster", "estimates")
STAGE_KEYS = ("name", "model", "accuracy", "profile", "variants", *EDGE_KEYS)
STAGES_MAX, NODES_MAX = 100, 100_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DEFAULT_SYSTEM, DEFAULT_FOR_SEVERAL = "sponge", "biscale"


def read_application(document: Value, folder: Path, *, extra: tuple[str, ...] = ()) -> Application:
    """The application in `document`, whose relative paths start at `folder`. `extra` keys are left to the caller."""
    fields = document.mapping((*APPLICATION_KEYS, *extra), required=("name", "slo_ms", "stages"))
    slo_ms = fields["slo_ms"].number(above=0, most=1e9)
    stages = _stages(fields["stages"], folder)
    application = Application(
        name=read_name(fields["name"]),
        slo_ms=slo_ms,
        stages=stages,
        system=_chosen(fields, folder, len(stages)),
        declared_paths=read_paths(fields["paths"], stages, slo_ms) if "paths" in fields else (),
        cluster=_cluster(fields["cluster"]) if "cluster" in fields else (local().node("local-0"),),
        estimates=_estimates(fields["estimates"]) if "estimates" in fields else Estimates(),
        file=document.file,
        lines=document.lines(),
    )
    try:
        application.paths  # noqa: B018  # cached, and says what does not fit
    except InputError as error:
        names = [stage.name for stage in stages]
        where = fields["stages"].elements()[names.index(error.where)] if error.where in names else fields["stages"]
        where.fail(error.what.removeprefix(f"{error.where}: "), error.help)
    return application


def read_name(value: Value) -> str:
    """A name that can stand in a URL."""
    name = value.text()
    if not NAME.fullmatch(name):
        value.wrong("a name of letters, digits, '.', '_' and '-' (100 at most)", "it becomes part of the URL")
    return name


def read_systems(value: Value, folder: Path) -> tuple[SystemChoice, ...]:
    """The systems named: `sponge`, `{name: sponge, margin: 0.9}`, a Python file, or a list of these."""
    choices = tuple(_system(each, folder) for each in value.some())
    if not choices:
        value.wrong("at least one system")
    return choices


def _chosen(fields: dict[str, Value], folder: Path, stages: int) -> SystemChoice:
    """The system named, of a scenario's several the first; without any, one that such an application can be run by."""
    for key in ("system", "systems"):
        if key in fields:
            return read_systems(fields[key], folder)[0]
    return SystemChoice(DEFAULT_SYSTEM if stages == 1 else DEFAULT_FOR_SEVERAL)


def _system(value: Value, folder: Path) -> SystemChoice:
    if not isinstance(value.content, dict):
        return SystemChoice(_system_name(value, folder), path=value.path)
    fields = value.mapping(required=("name",))
    parameters = {key: field.plain() for key, field in fields.items() if key != "name"}
    return SystemChoice(_system_name(fields["name"], folder), parameters, value.path)


def _system_name(value: Value, folder: Path) -> str:
    """A name, or the absolute path of a Python file with a system of the user's own."""
    name = value.text()
    return str(value.existing(folder, "system file")) if name.endswith(".py") else name


def _stages(value: Value, folder: Path) -> tuple[Stage, ...]:
    values = value.elements()
    if not 1 <= len(values) <= STAGES_MAX:
        value.fail(f"{len(values)} stages; an application has 1 to {STAGES_MAX}")
    stages = tuple(_stage(each, folder) for each in values)
    names = tuple(stage.name for stage in stages)
    _unique((each.mapping()["name"] for each in values), "stage")
    for each, stage in zip(values, stages, strict=True):
        for after in each.mapping()["after"].some() if stage.after else ():
            if after.content not in names:
                after.fail(f"no stage is called {after.content!r}", nearest(str(after.content), names))
    cycle = find_cycle({stage.name: stage.after for stage in stages})
    if cycle:
        first = values[names.index(cycle[0])].mapping()["after"]
        first.fail(f"stages wait for each other in a circle: {' → '.join(cycle)}", "remove one of these from `after`")
    check_conditions(values, stages)
    return stages


def _stage(value: Value, folder: Path) -> Stage:
    fields = value.mapping(STAGE_KEYS, required=("name",))
    name = read_name(fields["name"])
    single = [key for key in ("model", "profile", "accuracy") if key in fields]
    if "variants" in fields:
        if single:
            fields[single[0]].fail(f"a stage has either {single[0]!r} or 'variants', not both", "move it to a variant")
        variants = _variants(fields["variants"], folder)
    else:
        variants = (_variant(value, name, folder),)
    return with_edges(Stage(name, variants), fields)


def _variants(value: Value, folder: Path) -> tuple[Variant, ...]:
    values = value.elements()
    if not values:
        value.wrong("at least one variant")
    for each in values:
        each.mapping(("name", "model", "accuracy", "profile"), required=("name",))
    _unique((each.mapping()["name"] for each in values), "variant")
    return tuple(_variant(each, read_name(each.mapping()["name"]), folder) for each in values)


def _variant(value: Value, name: str, folder: Path) -> Variant:
    fields = value.mapping()
    if "model" not in fields and "profile" not in fields:
        keys = "'model' (an ONNX or Python file)" + ("" if "after" in fields else ", 'variants'")
        value.fail(f"{name!r} has neither {keys} nor 'profile'", "add 'model: ./FILE.onnx' to serve it")
    model = fields["model"].existing(folder, "model file") if "model" in fields else None
    profile: Profile | None = None
    if "profile" in fields:
        profile = read_profile(fields["profile"], folder)
    elif model is not None and path_beside(model).is_file():
        profile = _profile_beside(model, fields["model"])
    accuracy = fields["accuracy"].number(least=0, most=100) if "accuracy" in fields else None
    return Variant(name, str(model) if model else None, accuracy, profile)


def _profile_beside(model: Path, value: Value) -> Profile:
    try:
        profile = load_profile(path_beside(model))
    except InputError as error:
        value.fail(f"the profile beside it is unusable: {error.what}", error.help)
    if not is_of(profile, model):
        again = f"measure it again with `sloop profile {value.content}`, or remove {path_beside(model).name!r}"
        value.fail("the profile beside it was measured on another version of this model", again)
    return profile


def _unique(names: Iterable[Value], noun: str) -> None:
    seen: dict[object, Value] = {}
    for name in names:
        if name.content in seen:
            first = seen[name.content]
            name.fail(f"two {noun}s are called {name.content!r}", f"the first is in line {first.line}; rename one")
        seen[name.content] = name


def _estimates(value: Value) -> Estimates:
    fields = value.mapping(("correct", "margin"))
    return Estimates(
        correct=fields["correct"].boolean() if "correct" in fields else True,
        margin=fields["margin"].number(above=0, most=100) if "margin" in fields else 1.0,
    )


def _cluster(value: Value) -> tuple[Node, ...]:
    groups = value.mapping(("nodes",), required=("nodes",))["nodes"]
    nodes: list[Node] = []
    for group in groups.elements():
        nodes += _nodes(group, taken=len(nodes))
    if not nodes:
        groups.wrong("at least one group of nodes", "for example [{hardware: local, count: 1}]")
    names = {node.name for node in nodes}
    if len(names) < len(nodes):
        groups.fail("two nodes have the same name", "give each group its own 'name'")
    return tuple(nodes)


def _nodes(value: Value, *, taken: int) -> list[Node]:
    keys = ("hardware", "count", "name", "cores", "memory_bytes", "devices", "usd_per_h")
    fields = value.mapping(keys, required=("hardware",))
    kind = _hardware(fields["hardware"], fields)
    count = fields["count"].integer(least=1, most=NODES_MAX) if "count" in fields else 1
    if taken + count > NODES_MAX:
        value.fail(f"more than {NODES_MAX} nodes")
    prefix = read_name(fields["name"]) if "name" in fields else kind.name
    devices = tuple(each.text() for each in fields["devices"].some()) if "devices" in fields else kind.devices
    if len(set(devices)) < len(devices):
        devices = tuple(f"{device}-{index}" for index, device in enumerate(devices))
    cores = fields["cores"].number(above=0, most=1e6) if "cores" in fields else kind.cores
    memory = fields["memory_bytes"].integer(least=0) if "memory_bytes" in fields else kind.memory_bytes
    usd_per_h = fields["usd_per_h"].number(least=0, most=1e6) if "usd_per_h" in fields else kind.usd_per_h
    start = 0 if "name" in fields else taken
    return [Node(f"{prefix}-{start + i}", kind.name, cores, memory, devices, usd_per_h) for i in range(count)]


def _hardware(value: Value, fields: dict[str, Value]) -> Hardware:
    name = value.text()
    if name == LOCAL:
        return local()
    if name in KINDS:
        return KINDS[name]
    if name == CUSTOM:
        if "cores" not in fields:
            value.fail("custom hardware needs 'cores'", "add 'cores: 8' and, where known, memory_bytes and usd_per_h")
        return Hardware(CUSTOM, 1.0, ANY_BYTES)
    hint = f"{nearest(name, known())} Or 'custom' with its own cores."
    value.fail(f"unknown hardware {name!r}", hint)
