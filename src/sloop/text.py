"""How numbers, counts, durations and lists are written in messages, reasons, tables and reports.

One module, so that the same number looks the same everywhere.
"""

from collections.abc import Sequence
from math import isfinite, isnan
from typing import Final

from sloop.units import to_ms, to_s

QUOTED_CHARS_MAX: Final = 60
"""A longer quoted value is cut: an error must stay readable when somebody sends a megabyte."""
NUMBERED_MAX: Final = 8
"""A longer list of ids is cut to this many: about as many as fit on a line."""


def number(value: float) -> str:
    """Four significant digits, whole numbers in full with thousands separated: `0.3333`, `12`, `1,234`; `–` for nan."""
    if isnan(value):
        return "–"
    if not isfinite(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def host_and_port(host: str, port: int) -> str:
    """An address as URLs have it: `10.0.0.1:8000`, and `[::1]:8000` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def counted(count: float, noun: str, plural: str = "") -> str:
    """A count with its noun: `1 core`, `0.5 cores`, `0 replicas`, `2 batches` (with `plural="batches"`)."""
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {plural or noun + 's'}"


def in_ms(value_ns: int, decimals: int = 1) -> str:
    """A duration as `12.3 ms`."""
    return f"{to_ms(value_ns):.{decimals}f} ms"


def in_s(value_ns: int) -> str:
    """A duration as `2.5 s`."""
    return f"{to_s(value_ns):g} s"


def listed(names: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f" {last} ".join([*([", ".join(names[:-1])] if names[:-1] else []), *names[-1:]])


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """`request 3`, `requests 3, 4 and 5`, `requests 1, 2, … (20 in all)`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) > NUMBERED_MAX:
        return f"{noun}s {', '.join(map(str, numbers[:NUMBERED_MAX]))}, … ({len(numbers)} in all)"
    return f"{noun}s {listed([str(number) for number in numbers])}"


def arrows(stages: Sequence[str]) -> str:
    """Stages in the order in which requests pass them: `detect → read`."""
    return " → ".join(stages)


def shortened(text: str, chars_max: int = QUOTED_CHARS_MAX) -> str:
    """The text, cut with an ellipsis if it is longer than `chars_max` characters."""
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def quoted(value: object, chars_max: int = QUOTED_CHARS_MAX) -> str:
    """A value in an error message: its `repr` on one line, shortened; strings keep both quotation marks."""
    try:
        return repr(shortened(value, chars_max)) if isinstance(value, str) else shortened(repr(value), chars_max)
    except RecursionError:
        return "… (nested too deeply)"
