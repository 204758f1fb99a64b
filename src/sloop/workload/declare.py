"""What a user declares under `trace:` becomes a `Trace`.

`{kind: poisson, rate: 100}` generates one, `{file: trace.txt, start_s: 60}` reads one; for both `thin`, `compress` and
`repeat` follow, in this order. Anything wrong raises `InputError` with the key, the value and the nearest known key.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from sloop.options import Declared, Limits, Value, as_value, keys_of, limited, read_options
from sloop.units import s, to_s
from sloop.workload.cells import LENGTH_S_MAX
from sloop.workload.generate import KINDS, Kind, generated, kind_of
from sloop.workload.read import TraceFile, read_trace
from sloop.workload.shape import compress, cut, repeat, scale, thin
from sloop.workload.trace import POSITIVE, Trace


@dataclass(frozen=True, slots=True)
class Shape:
    """Changes that apply to any trace."""

    thin: float = limited(1.0, above=0, most=1.0)
    compress: float = limited(1.0, above=0, most=1e9)
    repeat: int = limited(1, least=1, most=1e6)


@dataclass(frozen=True, slots=True)
class GeneratedLength:
    """The options of a generated trace beside those of its kind."""

    duration_s: float | None = limited(None, above=0, most=LENGTH_S_MAX)
    """Of one round, before it is compressed or repeated."""
    scale: float = limited(1.0, above=0, most=1e6)


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is declared under `trace:`, read and checked."""

    source: TraceFile | Kind
    shape: Shape
    length: GeneratedLength
    """Of a generated trace."""


def trace_options(value: Value) -> TraceOptions:
    """The options in `value`. InputError for what is wrong with them; no file is looked at."""
    fields = value.mapping()
    if ("kind" in fields) == ("file" in fields):
        value.fail("a trace has either `kind` or `file`", f"kinds: {', '.join(KINDS)}; or `file:` and a path to read")
    if "file" in fields:
        recorded = read_options(TraceFile, value, also=keys_of(Shape))
        return TraceOptions(recorded, read_options(Shape, value, also=keys_of(TraceFile)), GeneratedLength())
    beside = (*keys_of(Shape), *keys_of(GeneratedLength))
    kind = kind_of(value, also=beside)
    own = ("kind", *keys_of(type(kind)), *beside)
    return TraceOptions(kind, read_options(Shape, value, also=own), read_options(GeneratedLength, value, also=own))


def trace_from(spec: Declared, *, seed: int, duration_s: float | None, folder: Path) -> Trace:
    """The trace that `spec` declares, at most `duration_s` long.

    Relative file names start at `folder`. A recorded trace that is shorter than `duration_s` stays so (unless it is
    repeated); a generated one needs a duration from here or from itself.
    """
    if duration_s is not None:
        POSITIVE.check(duration_s, "duration_s")
    value = as_value(spec, "trace")
    options = trace_options(value)
    shape = options.shape
    if isinstance(options.source, TraceFile):
        trace = read_trace(replace(options.source, file=folder / options.source.file), seed=seed)
    else:
        trace = _generated(options, options.source, value, seed=seed, duration_s=duration_s)
    shaped = repeat(compress(thin(trace, shape.thin, seed=seed), shape.compress), shape.repeat)
    Limits(least=0, most=LENGTH_S_MAX).check(to_s(shaped.duration_ns), value.under("duration_s", None).where)
    return shaped if duration_s is None else cut(shaped, duration_ns=s(duration_s))


def _generated(options: TraceOptions, kind: Kind, value: Value, *, seed: int, duration_s: float | None) -> Trace:
    length_s = options.length.duration_s
    if length_s is None:
        if duration_s is None:
            value.fail("no duration", "add `duration_s:` to the trace or to the whole run")
        length_s = duration_s * options.shape.compress / options.shape.repeat
    Limits(above=0, most=LENGTH_S_MAX).check(length_s, value.under("duration_s", None).where)
    return scale(generated(kind, seed=seed, duration_ns=max(1, s(length_s))), options.length.scale, seed=seed)
