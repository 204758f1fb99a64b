"""Profiles as an application declares them: inline, as a file, or as a published one by name.

Promises a `Profile`, or an InputError at the line of what is wrong with it.
"""

from pathlib import Path
from typing import get_args

from sloop.app.document import Value, nearest
from sloop.errors import InputError
from sloop.profile.forms import Amdahl, Cells, Latency, Quadratic, Table
from sloop.profile.profile import Origin, Profile
from sloop.profile.published import PUBLISHED
from sloop.profile.store import load_profile

FORMS = ("quadratic", "amdahl", "table")
KEYS = (
    "latency_ms",
    "max_batch",
    "max_cores",
    "load_s",
    "memory_bytes",
    "hardware",
    "origin",
    "source",
    "software",
    "date",
)


def read_profile(value: Value, folder: Path) -> Profile:
    """The profile `value` gives: a mapping, the name of a published one, or the path of a file."""
    if isinstance(value.content, dict):
        return _inline(value)
    text = value.text()
    if text in PUBLISHED:
        return PUBLISHED[text]
    path = folder / text
    if not _exists(path):
        hint = nearest(text, tuple(PUBLISHED))
        value.fail(f"no profile file {str(path)!r}, nor a published profile of that name", hint)
    try:
        return load_profile(path)
    except InputError as error:
        value.fail(error.what, error.help)


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name no file can have
        return False


def _inline(value: Value) -> Profile:
    fields = value.mapping(KEYS, required=("latency_ms", "max_batch"))
    latency = read_latency(fields["latency_ms"])
    default_cores = max(max(row) for row in latency.table.values()) if isinstance(latency, Table) else 0.0
    if "max_cores" not in fields and not default_cores:
        default_cores = 1.0 if isinstance(latency, Quadratic) else 16.0
    words = {key: fields[key].text() for key in ("hardware", "source", "software", "date") if key in fields}
    origin: Origin = "assumed"
    if "origin" in fields:
        choice = fields["origin"].choice(get_args(Origin))
        origin = next(known for known in get_args(Origin) if known == choice)
    try:
        return Profile(
            latency_ms=latency,
            max_batch=fields["max_batch"].integer(least=1, most=65_536),
            max_cores=fields["max_cores"].number(above=0, most=1e6) if "max_cores" in fields else default_cores,
            load_s=fields["load_s"].number(least=0, most=1e6) if "load_s" in fields else 0.0,
            memory_bytes=fields["memory_bytes"].integer(least=0) if "memory_bytes" in fields else 0,
            origin=origin,
            hardware=words.get("hardware", ""),
            source=words.get("source", value.where),
            software=words.get("software", ""),
            date=words.get("date", ""),
        )
    except ValueError as error:
        value.fail(str(error), "check the parameters of latency_ms")


def read_latency(value: Value) -> Latency:
    """A form: `{form: amdahl, gamma: …}`, or with the form as the only key: `{amdahl: {gamma: …}}`."""
    fields = value.content
    if not isinstance(fields, dict) or not fields:
        value.wrong(f"a form of latency ({', '.join(FORMS)})", "for example {form: amdahl, gamma: 36, ...}")
    if "form" in fields:
        form = fields["form"].choice(FORMS)
        rest = Value({key: field for key, field in fields.items() if key != "form"}, value.file, value.path, value.line)
    elif len(fields) == 1 and next(iter(fields)) in FORMS:
        form, rest = next(iter(fields.items()))
    else:
        value.fail("the key 'form' is missing", f"add form: one of {', '.join(FORMS)}")
    if form == "quadratic":
        return Quadratic(**_parameters(rest, ("alpha", "beta", "gamma")))
    if form == "amdahl":
        return Amdahl(**_parameters(rest, ("gamma", "epsilon", "delta", "eta")))
    return Table(_cells(rest))


def _parameters(value: Value, names: tuple[str, ...]) -> dict[str, float]:
    fields = value.mapping(names, required=names)
    return {name: fields[name].number(least=-1e12, most=1e12) for name in names}


def _cells(value: Value) -> Cells:
    rows = value.content
    if isinstance(rows, dict) and set(rows) == {"table"}:
        value = rows["table"]
        rows = value.content
    if not isinstance(rows, dict) or not rows:
        value.wrong("a table {batch: {cores: ms}}", "for example {1: {1: 46.0, 2: 28.9}, 4: {1: 145.4, 2: 82.4}}")
    table: Cells = {}
    for batch, row in rows.items():
        if not isinstance(batch, int) or not 1 <= batch <= 65_536:
            row.fail(f"the batch {batch!r} must be a whole number from 1", "rows are batches, columns cores")
        if not isinstance(row.content, dict) or not row.content:
            row.wrong("a mapping of cores to milliseconds")
        table[batch] = {_cores(cores, cell): cell.number(above=0, most=1e12) for cores, cell in row.content.items()}
    return table


def _cores(cores: object, cell: Value) -> float:
    if not isinstance(cores, int | float) or not 0 < cores <= 1e6:
        cell.fail(f"the cores {cores!r} must be a positive number", "rows are batches, columns cores")
    return float(cores)
