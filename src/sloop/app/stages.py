"""Reads the stages of an application: the variants of each with their model files and profiles, edges, and paths.

Reads the disk only for profiles, and to check that named files exist.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Final, get_args

import msgspec
from msgspec import structs

from sloop.app.application import Stage, Variant, find_cycle
from sloop.app.document import check_unique, existing_file, is_url, read_name
from sloop.app.graph import PARTS_MAX, Each, InputSource, OutputSource, When, are_exclusive
from sloop.app.hardware import Kinds, accelerators_of, known_kinds
from sloop.errors import InputError
from sloop.options import Value, nearest, placed, read_options
from sloop.profile.interference import Slowdown
from sloop.profile.operators import EXTENSIONS
from sloop.profile.profile import (
    BATCH_MAX,
    CORES_MAX,
    Amdahl,
    Cells,
    DeviceSharing,
    Latency,
    LatencyTable,
    Profile,
    Quadratic,
    SizeLatency,
    Startup,
    is_of,
    load_profile,
    path_beside,
)
from sloop.profile.published import PUBLISHED
from sloop.sizes import SizeClasses
from sloop.tensor import PadValue
from sloop.text import listed
from sloop.units import ROUNDING, WIDE_ROUNDING, ms
from sloop.vocabulary import Path

EDGE_KEYS: Final = ("after", "when", "each", "join", "entry", "inputs")
TIMEOUT_KEY, SIZES_KEY = "response_timeout_s", "sizes"
VARIANT_KEYS: Final = ("model", "accuracy", "profile", "profiles", "joins_rows", "batch", "operators", "pad")
FORMS: Final[Mapping[str, type[Quadratic | Amdahl]]] = {"quadratic": Quadratic, "amdahl": Amdahl}
STAGES_MAX, FAN_OUT_MAX = 100, 100_000
CLASSES_MAX: Final = 64
"""Declared classes of sizes: as many as the grid has up to 4 × 10⁹."""
SLO_MS_MAX, LATENCY_MS_MAX = 1e9, 1e12


def read_stages(value: Value, folder: FilePath, kinds: Kinds) -> tuple[Stage, ...]:
    """The stages under `stages`, in the file's order. `kinds` is the hardware of the cluster."""
    if isinstance(value.content, Mapping):
        value.wrong("a list", "begin each stage with `- `")
    values = value.elements()
    if not 1 <= len(values) <= STAGES_MAX:
        value.fail(f"{len(values)} stages; an application has 1 to {STAGES_MAX}", "add or remove stages")
    stages = tuple(_stage(each, folder, kinds) for each in values)
    fields = [each.mapping() for each in values]
    names = tuple(stage.name for stage in stages)
    check_unique((each["name"] for each in fields), "stage")
    for each, stage in zip(fields, stages, strict=True):
        for after in each["after"].one_or_more() if stage.after else ():
            if after.content not in names:
                after.fail(f"no stage is called {after.content!r}", nearest(str(after.content), names))
        if "inputs" in each:
            _check_sources(each["inputs"], stage, names)
    cycle = find_cycle({stage.name: stage.after for stage in stages})
    if cycle:
        first = fields[names.index(cycle[0])]["after"]
        first.fail(f"the stages form a cycle: {' → '.join(cycle)}", "remove one of these from `after`")
    _check_conditions(fields, stages)
    return stages


def _stage(value: Value, folder: FilePath, kinds: Kinds) -> Stage:
    fields = value.mapping(("name", *VARIANT_KEYS, "variants", *EDGE_KEYS, TIMEOUT_KEY, SIZES_KEY), required=("name",))
    name = read_name(fields["name"])
    after = _after(fields)
    return Stage(
        name,
        _variants(value, name, folder, kinds),
        after=after,
        when=_conditions(fields["when"], after) if "when" in fields else (),
        each=_each(fields["each"], after) if "each" in fields else None,
        join=fields["join"].boolean() if "join" in fields else False,
        entry=fields["entry"].boolean() if "entry" in fields else False,
        inputs=_input_sources(fields["inputs"], after) if "inputs" in fields else (),
        response_timeout_s=fields[TIMEOUT_KEY].number(least=1, most=1e6) if TIMEOUT_KEY in fields else 0.0,
        sizes=_sizes(fields[SIZES_KEY]) if SIZES_KEY in fields else (),
    )


def _sizes(value: Value) -> tuple[int, ...]:
    """The bounds of classes of sizes, one or a list, ascending."""
    if isinstance(value.content, str):
        value.wrong("a size, or a list of sizes", "write a list of numbers, such as [16, 64]")
    values = value.one_or_more()
    if not 1 <= len(values) <= CLASSES_MAX:
        value.fail(f"{len(values)} sizes; a stage has 1 to {CLASSES_MAX}", "or leave 'sizes' out")
    bounds = tuple(each.integer(least=1) for each in values)
    with placed(value):
        return SizeClasses(bounds).bounds


def _variants(stage: Value, name: str, folder: FilePath, kinds: Kinds) -> tuple[Variant, ...]:
    """The variants of a stage called `name`: those under `variants`, or the stage's own model and profile."""
    fields = stage.mapping()
    if "variants" not in fields:
        return (_variant(stage, name, folder, kinds),)
    for key in VARIANT_KEYS:
        if key in fields:
            fields[key].fail(f"a stage has either {key!r} or 'variants', not both", "move it to a variant")
    values = fields["variants"].elements()
    if not values:
        fields["variants"].wrong("at least one variant")
    names = [each.mapping(("name", *VARIANT_KEYS), required=("name",))["name"] for each in values]
    check_unique(names, "variant")
    return tuple(_variant(each, read_name(own), folder, kinds) for each, own in zip(values, names, strict=True))


def _variant(value: Value, name: str, folder: FilePath, kinds: Kinds) -> Variant:
    fields = value.mapping()
    if not fields.keys() & {"model", "profile", "profiles"}:
        value.fail(
            f"{name!r} has neither a 'model' (an ONNX or Python file) nor a 'profile'", "add 'model: ./FILE.onnx'"
        )
    model = _model(fields["model"], folder) if "model" in fields else None
    files: dict[str, str] = {}
    profile: Profile | None = None
    if "profile" in fields:
        profile = read_profile(fields["profile"], folder)
        files[""] = _profile_file(fields["profile"], folder)
        _check_accelerator(fields["profile"], profile, kinds)
    elif model is not None and path_beside(model).is_file():
        profile = _profile_beside(model, fields["model"])
        files[""] = str(path_beside(model))
    profiles = _profiles(fields["profiles"], folder, kinds) if "profiles" in fields else {}
    if model is not None and "profile" not in fields:
        beside = _profiles_beside(model, fields["model"], kinds)
        files |= {hardware: str(path_beside(model, hardware)) for hardware in beside}
        profiles = beside | profiles
    if "profiles" in fields:
        files |= {hardware: _profile_file(each, folder) for hardware, each in fields["profiles"].mapping().items()}
    accuracy = fields["accuracy"].number(least=0, most=100) if "accuracy" in fields else None
    files = {hardware: file for hardware, file in files.items() if file}
    joins_rows = fields["joins_rows"].boolean() if "joins_rows" in fields else None
    batch = fields["batch"].boolean() if "batch" in fields else True
    if joins_rows and not batch:
        fields["joins_rows"].fail("a model without a batch has no rows to join", "leave out 'joins_rows' or 'batch'")
    operators = _operators(fields["operators"], folder) if "operators" in fields else ()
    pad = _pad(fields["pad"]) if "pad" in fields else {}
    if pad and (joins_rows is False or not batch):
        fields["pad"].fail("rows that do not share a forward pass need no padding", "leave out 'pad'")
    path = str(model) if model else None
    return Variant(name, path, accuracy, profile, profiles, files, joins_rows, batch, operators, pad)


def _pad(value: Value) -> dict[str, PadValue]:
    """By input, the value of padding: a number, true or false."""
    found: dict[str, PadValue] = {}
    for name, each in value.mapping().items():
        if not isinstance(each.content, bool):
            each.number()
        found[name] = each.content  # type: ignore[assignment]  # a number, which stays whole if it is
    if not found:
        value.wrong("at least one input and its value", "for example {ids: 0, mask: 0}")
    return found


def _operators(value: Value, folder: FilePath) -> tuple[str, ...]:
    """Libraries of operators: one, or a list."""
    given = value.elements() if isinstance(value.content, list) else [value]
    return tuple(
        EXTENSIONS if each.text() == EXTENSIONS else str(existing_file(each, folder, "library of operators"))
        for each in given
    )


def _model(value: Value, folder: FilePath) -> FilePath:
    if is_url(value.text()):
        help = "fetch it with `sloop pull`; for `sloop deploy`, write the path that it prints instead of the URL"
        value.fail("this model is not on this machine", help)
    return existing_file(value, folder, "model file")


# Profiles


def _profiles(value: Value, folder: FilePath, kinds: Kinds) -> dict[str, Profile]:
    """The profiles by kind of hardware, which may be kinds that the cluster does not have."""
    fields = value.mapping()
    if not fields:
        value.wrong("at least one profile", "for example {c5.2xlarge: ./cpu.profile.json}")
    known = tuple(dict.fromkeys((*kinds, *known_kinds())))
    profiles: dict[str, Profile] = {}
    for hardware, each in fields.items():
        if hardware not in known:
            each.fail(f"unknown hardware {hardware!r}", nearest(hardware, known))
        profiles[hardware] = profile = read_profile(each, folder)
        accelerators = kinds.get(hardware, accelerators_of(hardware))
        if accelerators is not None:
            _check_accelerator(each, profile, {hardware: accelerators})
    return profiles


def _check_accelerator(value: Value, profile: Profile, kinds: Kinds) -> None:
    """InputError if none of these kinds of hardware has the accelerator that the profile is for."""
    if not profile.accelerator or any(profile.accelerator in accelerators for accelerators in kinds.values()):
        return
    place = value.under("accelerator", None) if isinstance(value.content, Mapping) else value
    there = sorted(frozenset[str]().union(*kinds.values()))
    has = f"has {listed(there)}" if there else "has none"
    what = f"the profile is for accelerator {profile.accelerator!r}, and no node of {listed(tuple(kinds))} has one"
    place.fail(what, f"the hardware {has}; correct the profile, or the `devices` of the nodes")


def read_profile(value: Value, folder: FilePath) -> Profile:
    """The profile that `value` declares: a mapping, the name of a published profile, or the path of a file."""
    if isinstance(value.content, Mapping):
        return _inline_profile(value)
    text = value.text()
    path = _profile_path(text, folder)
    if path is None and text in PUBLISHED:
        with placed(value):
            return PUBLISHED[text]
    if path is None:
        what = f"no profile file {str(folder / text)!r} and no published profile {text!r}"
        value.fail(what, nearest(text, tuple(PUBLISHED)))
    try:
        return load_profile(path)
    except InputError as error:
        value.fail(error.what, error.help)


def _profile_path(text: str, folder: FilePath) -> FilePath | None:
    """The file of a declared profile; None if it names none. Sloop's own profiles come before files, those that
    installed distributions add after them."""
    try:
        return folder / text if text not in PUBLISHED.own and (folder / text).is_file() else None
    except (OSError, ValueError):  # not a valid file name
        return None


def _profile_file(value: Value, folder: FilePath) -> str:
    """The absolute path of the file that `read_profile` reads; empty for an inline or a published profile."""
    path = _profile_path(value.content, folder) if isinstance(value.content, str) else None
    return str(path.absolute()) if path else ""


def _profiles_beside(model: FilePath, value: Value, kinds: Kinds) -> dict[str, Profile]:
    """The profiles that `sloop profile --hardware` wrote next to a model, for the kinds of hardware of the cluster."""
    found: dict[str, Profile] = {}
    for hardware, accelerators in kinds.items():
        if hardware and path_beside(model, hardware).is_file():
            found[hardware] = profile = _profile_beside(model, value, hardware)
            _check_accelerator(value, profile, {hardware: accelerators})
    return found


def _profile_beside(model: FilePath, value: Value, hardware: str = "") -> Profile:
    """The profile that `sloop profile` wrote next to a model."""
    path = path_beside(model, hardware)
    try:
        profile = load_profile(path)
    except InputError as error:
        value.fail(f"its profile {path.name!r} is unusable: {error.what}", error.help)
    if not is_of(profile, model):
        again = f"measure it again with `sloop profile {value.content}`, or remove {path.name!r}"
        value.fail(f"its profile {path.name!r} was measured on another version of this model", again)
    return profile


INLINE_KEYS: Final = (
    *("latency_ms", SIZES_KEY, "max_batch", "max_cores", "load_s", "startup", "weights_bytes", "memory_bytes"),
    *("accelerator", "device_memory_bytes", "device_share", "sharing"),
    *("origin", "hardware", "source", "software", "date"),
)
"""What an inline profile may say: all but what only a measurement finds."""


def _inline_profile(value: Value) -> Profile:
    fields = value.mapping(INLINE_KEYS, required=("latency_ms",))
    latency = read_latency(fields["latency_ms"])
    most = max(max(row) for row in latency.table.values()) if isinstance(latency, LatencyTable) else 16.0
    usual = {"max_cores": 1.0 if isinstance(latency, Quadratic) else most, "source": value.where}
    given = {key: each.content for key, each in fields.items() if each.content is not None}
    readers = {"latency_ms": read_latency, SIZES_KEY: read_size_latencies, "sharing": _sharing, "startup": _startup}
    made = read_options(Profile, replace(value, content=usual | given), readers=readers)
    if made.startup is None:
        return made
    sum_s = made.startup.sum_s
    if "load_s" in given and abs(made.load_s - sum_s) > ROUNDING:
        what = f"is {made.load_s:g}, but the parts under `startup` sum to {sum_s:g}"
        fields["load_s"].fail(what, "leave load_s out, or correct one of them")
    return structs.replace(made, load_s=sum_s)


def _startup(value: Value) -> Startup:
    """The parts of a start-up time; those that are not given take no time."""
    given = value.mapping(Startup.__struct_fields__)
    times_s = {key: given[key].number(least=0, most=1e6) if key in given else 0.0 for key in Startup.__struct_fields__}
    return Startup(**times_s)


def read_size_latencies(value: Value) -> tuple[SizeLatency, ...]:
    """The latencies of rows of several sizes, ascending."""
    found = []
    for each in value.elements():
        if not isinstance(each.content, Mapping):
            each.wrong("a size with its latency", "for example {size: 16, latency_ms: {form: amdahl, gamma: 4, ...}}")
        fields = each.mapping(("size", "latency_ms"), required=("size", "latency_ms"))
        found.append(SizeLatency(fields["size"].integer(least=1), read_latency(fields["latency_ms"])))
    return tuple(found)


LAWS: Final = {str(law.__struct_config__.tag): law for law in get_args(Slowdown)}
"""The laws of interference by the names that files give them."""


def _sharing(value: Value) -> DeviceSharing:
    """How a model shares its device, as a profile's file has it."""
    fields = value.mapping(DeviceSharing.__struct_fields__, required=("full_batch",))
    law = fields["law"].mapping() if "law" in fields else {}
    if "form" in law:
        law["form"].entry(LAWS, "law of interference")
    try:
        return msgspec.convert(value.content, DeviceSharing)
    except msgspec.ValidationError as error:
        value.fail(str(error), "for example {full_batch: 64, bandwidth: 0.6, law: {form: bandwidth, alpha: 0.5}}")


def read_slowdown(value: Value) -> Slowdown:
    """A law of interference: how much slower batches are for what runs beside them."""
    try:
        law: Slowdown = msgspec.convert(value.content, Slowdown)
    except msgspec.ValidationError as error:
        value.fail(str(error), "for example {form: bandwidth, alpha: 0.5}")
    return law


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


def _input_sources(value: Value, after: tuple[str, ...]) -> tuple[InputSource, ...]:
    """The sources under `inputs`: `STAGE.OUTPUT`, where the stage is in `after`, or the name of a client's tensor."""
    found = _tensor_sources(value, after, "STAGE.OUTPUT, or the name of a tensor that clients send")
    return tuple(InputSource(*source) for source in found)


def read_output_sources(value: Value, stages: Sequence[Stage]) -> tuple[OutputSource, ...]:
    """The sources of an application's `outputs`: `STAGE.OUTPUT`."""
    names = tuple(stage.name for stage in stages)
    found = tuple(OutputSource(*source) for source in _tensor_sources(value, names, "STAGE.OUTPUT"))
    for source in found:
        if not source.stage:
            stage = source.tensor.partition(".")[0]
            value.mapping()[source.output].fail(f"no stage is called {stage!r}", nearest(stage, names))
    return found


def _tensor_sources(value: Value, stages: Sequence[str], wanted: str) -> list[tuple[str, str, str]]:
    """For each source of each tensor in a mapping: the name of the tensor, that of the stage or "", and that of its
    output."""
    found: list[tuple[str, str, str]] = []
    for name, sources in value.mapping().items():
        for each in sources.one_or_more():
            text = each.text()
            stage = max((one for one in stages if text.startswith(f"{one}.")), key=len, default="")
            source = (name, stage, text.removeprefix(f"{stage}.") if stage else text)
            if not source[2]:
                each.wrong(wanted)
            if source in found:
                each.fail(f"{text!r} is named twice", "name it once")
            found.append(source)
    return found


def _check_sources(value: Value, stage: Stage, names: Sequence[str]) -> None:
    """InputError at a source of a stage that does not come right before this one."""
    for name, sources in value.mapping().items():
        for each in sources.one_or_more():
            text = each.text()
            is_sent = any(own.input == name and own.tensor == text and not own.stage for own in stage.inputs)
            other = next((one for one in names if text.startswith(f"{one}.")), None)
            if is_sent and other is not None:
                each.fail(
                    f"stage {other!r} does not come right before {stage.name!r}",
                    f"add {other!r} to `after`, or name a tensor that clients send",
                )


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
            if sum(shares.values()) > 1.0 + WIDE_ROUNDING:
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


def read_paths(value: Value, stages: Sequence[Stage], slo_ms: float) -> tuple[Path, ...]:
    """The declared paths. Their shares sum to at most 1; without any, they are equal."""
    values = value.elements()
    if not values:
        value.wrong("at least one path", "for example [{stages: [detect, read], slo_ms: 300}]")
    paths = [_path(each, stages, slo_ms, 1.0 / len(values)) for each in values]
    has_share = ["share" in each.mapping() for each in values]
    if any(has_share) and not all(has_share):
        values[has_share.index(False)].fail("some paths have a share, this one has none", "give each path its share")
    if sum(path.share for path in paths) > 1.0 + WIDE_ROUNDING:
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
