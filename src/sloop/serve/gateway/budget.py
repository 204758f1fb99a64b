"""How long a request may take: `x-slo-ms` and `x-elapsed-ms`, from a header, a parameter or gRPC metadata."""

import math
from typing import Final

from sloop.serve.gateway.refusal import bad, shown
from sloop.units import NS_PER_MS

SLO: Final = "x-slo-ms"
ELAPSED: Final = "x-elapsed-ms"
MS_MAX: Final = 3_600_000
"""An hour. A longer budget for one inference is a slip of units."""


def budget_ns(slo: object, elapsed: object) -> tuple[int | None, int]:
    """(slo_ns, elapsed_ns) from the two values as they came; None where one was not sent.

    slo_ns is None where the application's own holds. Raises a 400 that names the field.
    """
    return (
        None if slo is None else duration_ns(SLO, slo, least_ms=0.001),
        0 if elapsed is None else duration_ns(ELAPSED, elapsed, least_ms=0),
    )


def duration_ns(field: str, value: object, *, least_ms: float) -> int:
    """`value` in milliseconds, a number or its text, as nanoseconds."""
    fix = f"send milliseconds from {least_ms:g} to {MS_MAX}, such as {field}: 200"
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    try:
        if isinstance(text, bool) or not isinstance(text, str | int | float) or "_" in str(text):
            raise ValueError
        millis = float(text)
    except (ValueError, OverflowError):
        raise bad(field, f"{shown(text)} is not a number", fix) from None
    if not (math.isfinite(millis) and least_ms <= millis <= MS_MAX):
        raise bad(field, f"{shown(text)} is out of range", fix)
    return round(millis * NS_PER_MS)
