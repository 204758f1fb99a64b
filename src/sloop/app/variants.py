"""Reads the variants of a stage: their model files, and their speed on each kind of hardware.

Reads the disk only for profiles, and to check that named files exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Final

from sloop.app.application import Variant
from sloop.app.document import check_unique, existing_file, read_name
from sloop.app.hardware import Kinds, accelerators_of, known_kinds
from sloop.errors import InputError
from sloop.options import Value, keys_of, limited, nearest, placed, read_options
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
from sloop.text import listed

VARIANT_KEYS: Final = ("model", "accuracy", "profile", "profiles")
FORMS: Final[Mapping[str, type[Quadratic | Amdahl]]] = {"quadratic": Quadratic, "amdahl": Amdahl}
BATCH_MAX, CORES_MAX, LATENCY_MS_MAX = 65_536, 1e6, 1e12


def read_variants(stage: Value, name: str, folder: FilePath, kinds: Kinds) -> tuple[Variant, ...]:
    """The variants of a stage called `name`: those under `variants`, or the stage's own model and profile.

    `kinds` is the hardware of the cluster. InputError for a profile of an accelerator that it does not have.
    """
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
    model = existing_file(fields["model"], folder, "model file") if "model" in fields else None
    profile: Profile | None = None
    if "profile" in fields:
        profile = read_profile(fields["profile"], folder)
        _check_accelerator(fields["profile"], profile, kinds)
    elif model is not None and path_beside(model).is_file():
        profile = _profile_beside(model, fields["model"])
    profiles = _profiles(fields["profiles"], folder, kinds) if "profiles" in fields else {}
    accuracy = fields["accuracy"].number(least=0, most=100) if "accuracy" in fields else None
    return Variant(name, str(model) if model else None, accuracy, profile, profiles)


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
    accelerator: str = ""
    device_memory_bytes: int = limited(0, least=0)
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
            accelerator=options.accelerator,
            device_memory_bytes=options.device_memory_bytes,
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
