"""Loads applications and scenarios from files or mappings.

Any input gives values that keep all rules, or an InputError that names file, line, key and the fix. Reads the disk only
for profiles, and to check that named files exist. `sloop.systems` reads the parameters of a system.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Final

from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant, find_cycle
from sloop.app.document import existing_file, read_yaml
from sloop.app.graph import PARTS_MAX, Each, When, are_exclusive
from sloop.app.hardware import ANY_BYTES, CUSTOM, KINDS, LOCAL, HardwareKind, known_kinds, local
from sloop.app.scenario import NetworkTruth, Scenario, Truth
from sloop.errors import InputError
from sloop.options import Value, as_value, keys_of, limited, nearest, placed, read_options
from sloop.profile.profile import (
    Amdahl,
    Cells,
    Latency,
    LatencyTable,
    Origin,
    Profile,
    Quadratic,
    is_of,
    load_profile,
    path_beside,
)
from sloop.profile.published import PUBLISHED
from sloop.units import ms
from sloop.vocabulary import Node, Path
from sloop.workload.link import link_options
from sloop.workload.read import trace_options

APPLICATION_KEYS: Final = ("name", "slo_ms", "stages", "paths", "system", "cluster", "estimates")
SCENARIO_KEYS: Final = ("trace", "duration_s", "seed", "truth", "systems")
EDGE_KEYS: Final = ("after", "when", "each", "join", "entry")
VARIANT_KEYS: Final = ("model", "accuracy", "profile")
FORMS: Final[Mapping[str, type[Quadratic | Amdahl]]] = {"quadratic": Quadratic, "amdahl": Amdahl}
STAGES_MAX, NODES_MAX, FAN_OUT_MAX, BATCH_MAX = 100, 100_000, 100_000, 65_536
SLO_MS_MAX, CORES_MAX, LATENCY_MS_MAX = 1e9, 1e6, 1e12
SHARE_SLACK: Final = 1e-6
"""The sum of shares may exceed 1 by this much, because people write them with few digits."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DEFAULT_SYSTEM, DEFAULT_SYSTEM_OF_GRAPHS = "sponge", "biscale"

Source = str | FilePath | Mapping[str, object]
"""The path of a file, or its content as a mapping."""


def load_application(source: Source, *, folder: FilePath | None = None) -> Application:
    """The application in a file or a mapping, which may also be a scenario; all keys of the scenario are checked.

    Relative paths start at `folder`, by default the folder of the file.
    """
    document, base = _document(source, folder)
    is_scenario = "trace" in document.mapping()
    return read_scenario(document, base).application if is_scenario else read_application(document, base)


def load_scenario(source: Source, *, folder: FilePath | None = None) -> Scenario:
    """The scenario in a file or a mapping. InputError also if it has no `trace`."""
    return read_scenario(*_document(source, folder))


def _document(source: Source, folder: FilePath | None) -> tuple[Value, FilePath]:
    if isinstance(source, Mapping):
        return as_value(source), folder or FilePath()
    path = FilePath(source)
    return read_yaml(path), folder or path.parent


# Applications


def read_application(document: Value, folder: FilePath) -> Application:
    """The application in `document`, whose relative paths start at `folder`."""
    fields = document.mapping((*APPLICATION_KEYS, *SCENARIO_KEYS), required=("name", "slo_ms", "stages"))
    slo_ms = fields["slo_ms"].number(above=0, most=SLO_MS_MAX)
    stages = _stages(fields["stages"], folder)
    application = Application(
        name=_name(fields["name"]),
        slo_ms=slo_ms,
        stages=stages,
        system=_systems(fields, folder, len(stages))[0],
        declared_paths=_paths(fields["paths"], stages, slo_ms) if "paths" in fields else (),
        cluster=_cluster(fields["cluster"]) if "cluster" in fields else (local().node("local-0"),),
        estimates=read_options(Estimates, fields["estimates"]) if "estimates" in fields else Estimates(),
        file=document.file,
        lines=document.lines,
    )
    try:
        application.paths  # noqa: B018  # cached; raises InputError for contradictory stages
    except InputError as error:
        places = {stage.name: place for stage, place in zip(stages, fields["stages"].elements(), strict=True)}
        place = places.get(error.where, fields["stages"])
        place.fail(error.what.removeprefix(f"{error.where}: "), error.help)
    return application


def _name(value: Value) -> str:
    """A name that is safe in a URL."""
    name = value.text()
    if not NAME.fullmatch(name):
        value.wrong("a name of letters, digits, '.', '_' and '-' (100 at most)", "it becomes part of the URL")
    return name


def _systems(fields: Mapping[str, Value], folder: FilePath, stages: int) -> tuple[SystemChoice, ...]:
    """The systems under `systems` or `system`; without both keys, the default system for this number of stages."""
    if "systems" in fields and "system" in fields:
        fields["systems"].fail("a scenario has either 'system' or 'systems', not both", "keep 'systems'")
    declared = fields.get("systems", fields.get("system"))
    if declared is None:
        return (SystemChoice(DEFAULT_SYSTEM if stages == 1 else DEFAULT_SYSTEM_OF_GRAPHS, path="system"),)
    choices = tuple(_system(each, folder) for each in declared.one_or_more())
    if not choices:
        declared.wrong("at least one system")
    return choices


def _system(value: Value, folder: FilePath) -> SystemChoice:
    """A system as `sponge` or `{name: sponge, margin: 0.9}`; the path of a Python file may replace the name."""
    if not isinstance(value.content, Mapping):
        return SystemChoice(_system_name(value, folder), path=value.path)
    fields = value.mapping(required=("name",))
    parameters = {key: field.content for key, field in fields.items() if key != "name"}
    return SystemChoice(_system_name(fields["name"], folder), parameters, value.path)


def _system_name(value: Value, folder: FilePath) -> str:
    """The name of a system, or the absolute path of a Python file with a user's system."""
    name = value.text()
    return str(existing_file(value, folder, "system file")) if name.endswith(".py") else name


def _stages(value: Value, folder: FilePath) -> tuple[Stage, ...]:
    values = value.elements()
    if not 1 <= len(values) <= STAGES_MAX:
        value.fail(f"{len(values)} stages; an application has 1 to {STAGES_MAX}", "add or remove stages")
    stages = tuple(_stage(each, folder) for each in values)
    fields = [each.mapping() for each in values]
    names = tuple(stage.name for stage in stages)
    _check_unique((each["name"] for each in fields), "stage")
    for each, stage in zip(fields, stages, strict=True):
        for after in each["after"].one_or_more() if stage.after else ():
            if after.content not in names:
                after.fail(f"no stage is called {after.content!r}", nearest(str(after.content), names))
    cycle = find_cycle({stage.name: stage.after for stage in stages})
    if cycle:
        first = fields[names.index(cycle[0])]["after"]
        first.fail(f"the stages form a cycle: {' → '.join(cycle)}", "remove one of these from `after`")
    _check_conditions(fields, stages)
    return stages


def _stage(value: Value, folder: FilePath) -> Stage:
    fields = value.mapping(("name", *VARIANT_KEYS, "variants", *EDGE_KEYS), required=("name",))
    name = _name(fields["name"])
    after = _after(fields)
    return Stage(
        name,
        _variants(fields, folder) if "variants" in fields else (_variant(value, name, folder),),
        after=after,
        when=_conditions(fields["when"], after) if "when" in fields else (),
        each=_each(fields["each"], after) if "each" in fields else None,
        join=fields["join"].boolean() if "join" in fields else False,
        entry=fields["entry"].boolean() if "entry" in fields else False,
    )


def _variants(stage: Mapping[str, Value], folder: FilePath) -> tuple[Variant, ...]:
    for key in VARIANT_KEYS:
        if key in stage:
            stage[key].fail(f"a stage has either {key!r} or 'variants', not both", "move it to a variant")
    values = stage["variants"].elements()
    if not values:
        stage["variants"].wrong("at least one variant")
    names = [each.mapping(("name", *VARIANT_KEYS), required=("name",))["name"] for each in values]
    _check_unique(names, "variant")
    return tuple(_variant(each, _name(name), folder) for each, name in zip(values, names, strict=True))


def _variant(value: Value, name: str, folder: FilePath) -> Variant:
    fields = value.mapping()
    if "model" not in fields and "profile" not in fields:
        value.fail(
            f"{name!r} has neither a 'model' (an ONNX or Python file) nor a 'profile'", "add 'model: ./FILE.onnx'"
        )
    model = existing_file(fields["model"], folder, "model file") if "model" in fields else None
    profile: Profile | None = None
    if "profile" in fields:
        profile = read_profile(fields["profile"], folder)
    elif model is not None and path_beside(model).is_file():
        profile = _profile_beside(model, fields["model"])
    accuracy = fields["accuracy"].number(least=0, most=100) if "accuracy" in fields else None
    return Variant(name, str(model) if model else None, accuracy, profile)


def _check_unique(names: Iterable[Value], noun: str) -> None:
    seen: dict[object, Value] = {}
    for name in names:
        first = seen.setdefault(name.content, name)
        if first is not name:
            place = f"the first is in line {first.line}; " if first.line else ""
            name.fail(f"two {noun}s are called {name.content!r}", f"{place}rename one")


# Profiles


def read_profile(value: Value, folder: FilePath) -> Profile:
    """The profile that `value` declares: a mapping, the name of a published profile, or the path of a file."""
    if isinstance(value.content, Mapping):
        return _inline_profile(value)
    text = value.text()
    if text in PUBLISHED:
        return PUBLISHED[text]
    path = folder / text
    try:
        found = path.is_file()
    except (OSError, ValueError):  # not a valid file name
        found = False
    if not found:
        value.fail(f"no profile file {str(path)!r} and no published profile {text!r}", nearest(text, tuple(PUBLISHED)))
    try:
        return load_profile(path)
    except InputError as error:
        value.fail(error.what, error.help)


def _profile_beside(model: FilePath, value: Value) -> Profile:
    """The profile that `sloop profile` wrote next to a model."""
    path = path_beside(model)
    try:
        profile = load_profile(path)
    except InputError as error:
        value.fail(f"its profile {path.name!r} is unusable: {error.what}", error.help)
    if not is_of(profile, model):
        again = f"measure it again with `sloop profile {value.content}`, or remove {path.name!r}"
        value.fail(f"its profile {path.name!r} was measured on another version of this model", again)
    return profile


@dataclass(frozen=True, slots=True)
class _InlineProfile:
    """The options of an inline profile, except its latency; see `Profile`."""

    max_batch: int = limited(least=1, most=BATCH_MAX)
    max_cores: float | None = limited(None, above=0, most=CORES_MAX)
    load_s: float = limited(0.0, least=0, most=1e6)
    memory_bytes: int = limited(0, least=0)
    origin: Origin = "assumed"
    hardware: str = ""
    source: str | None = None
    software: str = ""
    date: str = ""


def _inline_profile(value: Value) -> Profile:
    fields = value.mapping(("latency_ms", *keys_of(_InlineProfile)), required=("latency_ms",))
    latency = read_latency(fields["latency_ms"])
    options = read_options(_InlineProfile, value, also=("latency_ms",))
    cores_max = max(max(row) for row in latency.table.values()) if isinstance(latency, LatencyTable) else 16.0
    with placed(value):
        return Profile(
            latency_ms=latency,
            max_batch=options.max_batch,
            max_cores=options.max_cores or (1.0 if isinstance(latency, Quadratic) else cores_max),
            load_s=options.load_s,
            memory_bytes=options.memory_bytes,
            origin=options.origin,
            hardware=options.hardware,
            source=value.where if options.source is None else options.source,
            software=options.software,
            date=options.date,
        )


def read_latency(value: Value) -> Latency:
    """A latency model: `{form: amdahl, gamma: …}`, or with the form as the only key: `{amdahl: {gamma: …}}`."""
    forms = (*FORMS, "table")
    fields = value.content
    if not isinstance(fields, Mapping) or not fields:
        value.wrong(f"a form of latency ({', '.join(forms)})", "for example {form: amdahl, gamma: 36, ...}")
    if "form" in fields:
        form = value.under("form", fields["form"]).choice(forms)
        rest = replace(value, content={key: field for key, field in fields.items() if key != "form"})
    elif len(fields) == 1 and next(iter(fields)) in forms:
        (form,) = fields
        rest = value.under(form, fields[form])
    else:
        value.fail("the key 'form' is missing", f"add 'form:' with one of {', '.join(forms)}")
    if form == "table":
        return LatencyTable(_cells(rest))
    latency = read_options(FORMS[form], rest)
    for key in latency.__struct_fields__:
        rest.under(key, getattr(latency, key)).number(least=-LATENCY_MS_MAX, most=LATENCY_MS_MAX)
    return latency


def _cells(value: Value) -> Cells:
    if isinstance(value.content, Mapping) and set(value.content) == {"table"}:
        value = value.under("table", value.content["table"])
    if not isinstance(value.content, Mapping) or not value.content:
        value.wrong("a table {batch: {cores: ms}}", "for example {1: {1: 46.0, 2: 28.9}, 4: {1: 145.4, 2: 82.4}}")
    table: Cells = {}
    for batch, content in value.content.items():
        row = value.under(batch, content)
        if not isinstance(batch, int) or not 1 <= batch <= BATCH_MAX:
            row.fail(f"the batch {batch!r} must be a whole number from 1", "rows are batches, columns cores")
        if not isinstance(content, Mapping) or not content:
            row.wrong("a mapping of cores to milliseconds")
        cells = {cores: row.under(cores, latency_ms) for cores, latency_ms in content.items()}
        table[batch] = {_cores(cores, cell): cell.number(above=0, most=LATENCY_MS_MAX) for cores, cell in cells.items()}
    return table


def _cores(cores: object, cell: Value) -> float:
    if not isinstance(cores, int | float) or not 0 < cores <= CORES_MAX:
        cell.fail(f"the cores {cores!r} must be a positive number", "rows are batches, columns cores")
    return float(cores)


# The graph: edges and paths


def _after(fields: Mapping[str, Value]) -> tuple[str, ...]:
    """The names under `after`, each once."""
    after: list[str] = []
    if "after" in fields and fields["after"].content is not None:
        for each in fields["after"].one_or_more():
            if each.text() in after:
                each.fail(f"{each.content!r} is named twice", "name it once")
            after.append(each.text())
    return tuple(after)


def _conditions(value: Value, after: tuple[str, ...]) -> tuple[When, ...]:
    """At most one condition for each stage in `after`."""
    found: dict[str, When] = {}
    for each in value.one_or_more():
        when = _when(each, after)
        if when.of in found:
            each.fail(
                f"two conditions on the outputs of {when.of!r}", "put a stage with the first condition between them"
            )
        found[when.of] = when
    return tuple(found.values())


def _when(value: Value, after: tuple[str, ...]) -> When:
    if not isinstance(value.content, Mapping):
        return When(_source(value, None, after), value.text())
    fields = value.mapping(("of", "output", "is", "share"))
    values = tuple(sorted({each.integer() for each in fields["is"].one_or_more()})) if "is" in fields else ()
    if "is" in fields and not values:
        fields["is"].wrong("at least one number")
    if values and "output" not in fields:
        fields["is"].fail("there is no 'output' to compare with these values", "add 'output: NAME'")
    if not fields.keys() & {"output", "share"}:
        value.fail("neither an 'output' nor a 'share'", "name the output that decides, for example `when: is_text`")
    return When(
        _source(value, fields.get("of"), after),
        fields["output"].text() if "output" in fields else "",
        values,
        fields["share"].number(least=0, most=1) if "share" in fields else None,
    )


def _each(value: Value, after: tuple[str, ...]) -> Each:
    if not isinstance(value.content, Mapping):
        return Each(_source(value, None, after), value.text())
    fields = value.mapping(("of", "output", "mean", "most"))
    most = fields["most"].integer(least=1, most=FAN_OUT_MAX) if "most" in fields else PARTS_MAX
    return Each(
        _source(value, fields.get("of"), after),
        fields["output"].text() if "output" in fields else "",
        fields["mean"].number(above=0, most=most) if "mean" in fields else 1.0,
        most,
    )


def _source(value: Value, of: Value | None, after: tuple[str, ...]) -> str:
    """The stage whose output is used: the one under `of`, or the only one in `after`."""
    if of is not None:
        if of.content not in after:
            help = nearest(str(of.content), after) if after else f"add 'after: {of.content}'"
            of.fail(f"{of.content!r} is not in `after`", help)
        return of.text()
    if not after:
        value.fail("there is no output to use: this stage has no `after`", "add 'after: STAGE'")
    if len(after) > 1:
        value.fail(f"this stage comes after {len(after)} stages: say which one has the output", "add 'of: STAGE'")
    return after[0]


def _check_conditions(fields: Sequence[Mapping[str, Value]], stages: Sequence[Stage]) -> None:
    """InputError if conditions on one output overlap, have two shares, or have shares that sum to more than 1."""
    declared: dict[tuple[str, str], dict[object, float]] = {}
    seen: dict[tuple[str, str], list[When]] = {}
    for each, stage in zip(fields, stages, strict=True):
        for when in stage.when:
            _check_overlap(each["when"], stage, when, seen.setdefault((when.of, when.output), []))
            if when.share is None:
                continue
            shares = declared.setdefault((when.of, when.output), {})
            first = shares.setdefault(when.values if when.output else stage.name, when.share)
            if first != when.share:
                each["when"].fail(
                    f"two shares, {first:g} and {when.share:g}, for one condition on the output of {when.of!r}",
                    "give one of them, or the same share twice",
                )
            if sum(shares.values()) > 1.0 + SHARE_SLACK:
                each["when"].fail(
                    f"the shares of the branches after {when.of!r} sum to more than 1",
                    "branches on one output exclude each other; name another `output` for branches that do not",
                )


def _check_overlap(value: Value, stage: Stage, when: When, others: list[When]) -> None:
    """Conditions on one output must be equal or exclude each other; otherwise their shares would be ambiguous."""
    if not when.output:
        return
    for other in others:
        if other.values != when.values and not are_exclusive(other, when):
            value.fail(
                f"one value of output {when.output!r} of {when.of!r} would lead to stage {stage.name!r} and to another",
                "give both the same values, or values without overlap; without `is`, every value but 0 leads there",
            )
    others.append(when)


def _paths(value: Value, stages: Sequence[Stage], slo_ms: float) -> tuple[Path, ...]:
    """The declared paths. Their shares sum to at most 1; without any, they are equal."""
    values = value.elements()
    if not values:
        value.wrong("at least one path", "for example [{stages: [detect, read], slo_ms: 300}]")
    paths = [_path(each, stages, slo_ms, 1.0 / len(values)) for each in values]
    has_share = ["share" in each.mapping() for each in values]
    if any(has_share) and not all(has_share):
        values[has_share.index(False)].fail("some paths have a share, this one has none", "give each path its share")
    if sum(path.share for path in paths) > 1.0 + SHARE_SLACK:
        value.fail("the shares sum to more than 1", "they are the fractions of requests that take each path")
    left_out = next((stage.name for stage in stages if not any(stage.name in path.stages for path in paths)), None)
    if left_out is not None:
        value.fail(f"no path leads through stage {left_out!r}", "add a path through it, or remove the stage")
    return tuple(paths)


def _path(value: Value, stages: Sequence[Stage], slo_ms: float, share: float) -> Path:
    fields = value.mapping(("stages", "slo_ms", "share"), required=("stages",))
    names = fields["stages"].elements()
    if not names:
        fields["stages"].wrong("at least one stage")
    by_name = {stage.name: stage for stage in stages}
    before = ""
    for each in names:
        stage = by_name.get(each.text())
        if stage is None:
            each.fail(f"no stage is called {each.content!r}", nearest(str(each.content), tuple(by_name)))
        if not before and stage.after and not stage.entry:
            each.fail(f"no request begins at {stage.name!r}", "add `entry: true` to it, or begin with a first stage")
        if before and before not in stage.after:
            each.fail(f"{stage.name!r} does not come after {before!r}", f"add {before!r} to its `after`")
        before = stage.name
    return Path(
        tuple(each.text() for each in names),
        ms(fields["slo_ms"].number(above=0, most=SLO_MS_MAX) if "slo_ms" in fields else slo_ms),
        fields["share"].number(above=0, most=1) if "share" in fields else share,
    )


# The cluster


@dataclass(frozen=True, slots=True)
class _NodeGroup:
    """The options of a group of equal nodes; the hardware kind gives the omitted ones."""

    hardware: str
    count: int = limited(1, least=1, most=NODES_MAX)
    name: str | None = None
    cores: float | None = limited(None, above=0, most=CORES_MAX)
    memory_bytes: int | None = limited(None, least=0)
    devices: tuple[str, ...] | None = None
    usd_per_h: float | None = limited(None, least=0, most=1e6)


def _cluster(value: Value) -> tuple[Node, ...]:
    groups = value.mapping(("nodes",), required=("nodes",))["nodes"]
    nodes: list[Node] = []
    for group in groups.elements():
        nodes += _nodes(group, taken=len(nodes))
    if not nodes:
        groups.wrong("at least one group of nodes", "for example [{hardware: local, count: 1}]")
    if len({node.name for node in nodes}) < len(nodes):
        groups.fail("two nodes have the same name", "give each group its own 'name'")
    return tuple(nodes)


def _nodes(value: Value, *, taken: int) -> list[Node]:
    group = read_options(_NodeGroup, value, readers={"name": _name})
    kind = _hardware(value.mapping()["hardware"], group)
    if taken + group.count > NODES_MAX:
        value.fail(f"more than {NODES_MAX} nodes", "lower 'count'")
    devices = kind.devices if group.devices is None else group.devices
    if len(set(devices)) < len(devices):
        devices = tuple(f"{device}-{index}" for index, device in enumerate(devices))
    start = 0 if group.name else taken
    return [
        Node(
            f"{group.name or kind.name}-{start + index}",
            kind.name,
            kind.cores if group.cores is None else group.cores,
            kind.memory_bytes if group.memory_bytes is None else group.memory_bytes,
            devices,
            kind.usd_per_h if group.usd_per_h is None else group.usd_per_h,
        )
        for index in range(group.count)
    ]


def _hardware(value: Value, group: _NodeGroup) -> HardwareKind:
    if group.hardware == LOCAL:
        return local()
    if group.hardware == CUSTOM:
        if group.cores is None:
            value.fail("custom hardware needs 'cores'", "add 'cores: 8' and, where known, memory_bytes and usd_per_h")
        return HardwareKind(CUSTOM, 1.0, ANY_BYTES)
    return value.entry({kind: KINDS.get(kind, local()) for kind in known_kinds()}, "hardware")


# Scenarios


def read_scenario(document: Value, folder: FilePath) -> Scenario:
    """The scenario in `document`, whose relative paths start at `folder`."""
    application = read_application(document, folder)
    fields = document.mapping(required=("trace",))
    return Scenario(
        application=application,
        trace=_trace(fields["trace"], folder),
        duration_s=fields["duration_s"].number(above=0, most=1e8) if "duration_s" in fields else 60.0,
        seed=fields["seed"].integer(least=0) if "seed" in fields else 0,
        truth=_truth(fields["truth"], folder, application.stages) if "truth" in fields else Truth(),
        systems=_systems(fields, folder, len(application.stages)),
    )


def _trace(value: Value, folder: FilePath) -> dict[str, object]:
    """Check the options of a trace and return them; `file` becomes an absolute path."""
    trace_options(value)
    trace = {key: field.content for key, field in value.mapping().items()}
    if "file" in trace:
        trace["file"] = str(existing_file(value.mapping()["file"], folder))
    return trace


def _truth(value: Value, folder: FilePath, stages: Sequence[Stage]) -> Truth:
    """The options under `truth:`; omitted options keep their defaults."""
    readers = {
        "network": lambda network: read_options(
            NetworkTruth, network, readers={"link": lambda link: _link(link, folder)}
        ),
        "fan_out": lambda fan_out: _fan_out(fan_out, stages),
        "shares": lambda shares: _shares(shares, stages),
    }
    return read_options(Truth, value, readers=readers)


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
            if sum(shares.values()) > 1.0 + SHARE_SLACK:
                what = f"the shares of the branches after {when.of!r} sum to more than 1"
                values[name].fail(what, "branches on one output exclude each other")
    return found


def _per_stage(value: Value, names: Collection[str], key: str) -> dict[str, Value]:
    """The values declared by stage. InputError for a stage that is not in `names`, the stages with `key`."""
    if not names and value.mapping():
        value.fail(f"no stage has `{key}`", "remove it")
    return value.mapping(names)
