"""What a user writes under `trace:` becomes a `Trace`.

Promises that anything wrong raises `InputError` with the key, the value and the nearest known key. Knows the two ways
to say a trace: `{kind: poisson, rate: 100}` generates one, `{file: trace.txt, start_s: 60}` reads one; `shape` follows
for both: `thin`, `compress`, `repeat` (and `scale`), in this order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from sloop.errors import InputError
from sloop.units import s, to_s
from sloop.workload.cells import LENGTH_S_MAX
from sloop.workload.fields import POSITIVE, Limits, build, limited, nearest, refuse_unknown
from sloop.workload.generate import KINDS, generated, kind_of
from sloop.workload.read import TraceFile, read_trace
from sloop.workload.shape import compress, cut, repeat, scale, thin
from sloop.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Shape:
    """Changes any trace can be asked for."""

    thin: float = limited(1.0, limits=Limits(high=1.0, above=True))
    compress: float = limited(1.0, limits=Limits(high=1e9, above=True))
    repeat: int = limited(1, limits=Limits(low=1, high=1e6))


@dataclass(frozen=True, slots=True)
class _Generated:
    """Beside the kind's own keys."""

    duration_s: float | None = limited(None, limits=Limits(high=LENGTH_S_MAX, above=True))
    """Of one round, before it is compressed or repeated."""
    scale: float = limited(1.0, limits=Limits(high=1e6, above=True))


def trace_from(
    spec: Mapping[str, object], *, seed: int, duration_s: float | None, folder: Path, where: str = "trace"
) -> Trace:
    """The trace that `spec` declares, at most `duration_s` long.

    `folder` is where relative file names start; `where` says where `spec` stands, for messages. A recorded trace that
    is shorter than `duration_s` stays so (say `repeat:`); a generated one needs a duration from here or from itself.
    """
    if duration_s is not None:
        POSITIVE.check(duration_s, "duration_s")
    if ("kind" in spec) == ("file" in spec):
        kinds = ", ".join(KINDS)
        raise InputError(
            "a trace has either `kind` or `file`", where=where, help=f"kinds: {kinds}; or `file:` and a path to read"
        )
    shape_keys = {field.name for field in fields(Shape)}
    shape = build(Shape, {key: value for key, value in spec.items() if key in shape_keys}, where=where)
    rest = {key: value for key, value in spec.items() if key not in shape_keys}
    if "file" in rest:
        trace = _read(rest, seed=seed, folder=folder, where=where)
    else:
        trace = _made(rest, shape, seed=seed, duration_s=duration_s, where=where)
    shaped = repeat(compress(thin(trace, shape.thin, seed=seed), shape.compress), shape.repeat)
    Limits(high=LENGTH_S_MAX).check(to_s(shaped.duration_ns), f"{where} duration_s")
    return shaped if duration_s is None else cut(shaped, duration_ns=s(duration_s))


def _read(spec: Mapping[str, object], *, seed: int, folder: Path, where: str) -> Trace:
    refuse_unknown(spec, [field.name for field in (*fields(TraceFile), *fields(Shape))], where=where)
    recorded = build(TraceFile, spec, where=where)
    return read_trace(replace(recorded, file=folder / recorded.file), seed=seed)


def _made(spec: Mapping[str, object], shape: Shape, *, seed: int, duration_s: float | None, where: str) -> Trace:
    name = spec["kind"]
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(f"unknown kind of trace {name!r}", where=f"{where}.kind", help=nearest(str(name), KINDS))
    own_keys = [field.name for field in fields(kind)]
    length_keys = [field.name for field in fields(_Generated)]
    shape_keys = [field.name for field in fields(Shape)]
    refuse_unknown(spec, ["kind", *own_keys, *length_keys, *shape_keys], where=where)
    process = kind_of(name, {key: spec[key] for key in own_keys if key in spec}, where=where)
    length = build(_Generated, {key: spec[key] for key in length_keys if key in spec}, where=where)
    length_s = length.duration_s
    if length_s is None:
        if duration_s is None:
            raise InputError("no duration", where=where, help="say `duration_s:`, in the trace or for the whole run")
        length_s = duration_s * shape.compress / shape.repeat
    Limits(high=LENGTH_S_MAX, above=True).check(length_s, f"{where}.duration_s")
    return scale(generated(process, seed=seed, duration_ns=max(1, s(length_s))), length.scale, seed=seed)
