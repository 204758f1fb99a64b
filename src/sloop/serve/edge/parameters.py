"""What a request asks for beside its tensors: its deadline, and the parameters that Triton has, honoured or refused.

Other parameters have no effect: Triton passes them on to the model, but a model of sloop gets its tensors alone. A name
that is nearly one of those below is an error, because the client would otherwise wait for an effect. Source: Triton's
"parameters", "schedule policy", "sequence", "classification", "binary tensor data" and "shared memory" extensions.
"""

import math
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from sloop.serve.edge.refusal import bad
from sloop.text import quoted
from sloop.units import NS_PER_MS

Parameters = dict[str, Any]

SLO: Final = "x-slo-ms"
ELAPSED: Final = "x-elapsed-ms"
TIMEOUT: Final = "timeout"
BINARY_OUTPUT: Final = "binary_data_output"
BINARY_SIZE: Final = "binary_data_size"
BINARY: Final = "binary_data"
CLASSIFICATION: Final = "classification"
MS_MAX: Final = 3_600_000
"""One hour. A longer deadline for one inference is almost certainly a mistake of units."""
CLASSES_MAX: Final = 2**31 - 1

OF_REQUEST: Final = frozenset({SLO, ELAPSED, TIMEOUT, BINARY_OUTPUT})
OF_BUDGET: Final = frozenset({SLO, ELAPSED, TIMEOUT})
OF_INPUT: Final = frozenset({BINARY_SIZE})
OF_OUTPUT: Final = frozenset({BINARY, CLASSIFICATION})
_NO_MEMORY: Final = "this server reads no shared memory of clients; send the data in the request, as a binary tensor"
_NO_SEQUENCE: Final = "no model of this server keeps state between requests; leave it out"
REFUSED: Final[Mapping[str, str]] = {
    "priority": f"requests wait in the order of their deadlines or arrivals; a shorter {SLO} makes one more urgent",
    "sequence_id": _NO_SEQUENCE,
    "sequence_start": _NO_SEQUENCE,
    "sequence_end": _NO_SEQUENCE,
    "shared_memory_region": _NO_MEMORY,
    "shared_memory_offset": _NO_MEMORY,
    "shared_memory_byte_size": _NO_MEMORY,
    "triton_enable_empty_final_response": "every request has one answer; leave it out",
}
"""Parameters that change what Triton does, and which sloop cannot honour, with the correction. A value of 0, false or
the empty string says that the default is wanted."""
NS_PER_MICROSECOND: Final = 1_000
PARAMETERS_MAX: Final = 32
"""Of a request, of an input or of an output."""
COMPARED_MAX: Final = 4
"""Of these, so many unknown names are compared with the known ones, in up to 0.1 ms each."""
_PLAIN: Final = re.compile(r"[ -^`-~]*")
NEAR: Final = 0.8
"""How similar (`difflib`) a name must be to count as a mistyped one: `timeout_ms` is, `time_zone` is not."""
PREFIX_CHARS_MIN: Final = 8
"""The beginning of a name, so long or longer, counts as mistyped too: `binary_data` of a whole request."""
NAME_CHARS_MAX: Final = 40
"""Longer names are not compared."""


def check(given: Mapping[str, object], known: frozenset[str], field: str) -> None:
    """Raise a 400 for a parameter that cannot be honoured, or that is nearly one of those that can."""
    if known.issuperset(given):
        return
    check_count(len(given), field)
    compared = 0
    for name, value in given.items():
        if name in known:
            continue
        fix = REFUSED.get(name)
        if fix is not None:
            if value not in (0, "", None):  # False is 0
                raise bad(f"{field}.{name}", f"{quoted(value)} cannot be honoured", fix)
        elif len(name) <= NAME_CHARS_MAX and compared < COMPARED_MAX:
            compared += 1
            if near := _near(name, (*known, *REFUSED)):
                fix = f"did you mean {near!r}? Call a parameter of your own otherwise"
                raise bad(f"{field}.{name}", "unknown", fix)


def check_count(count: int, field: str) -> None:
    """Raise a 400 for too many parameters."""
    if count > PARAMETERS_MAX:
        raise bad(field, f"{count} parameters", f"send at most {PARAMETERS_MAX}")


def _near(name: str, known: Iterable[str]) -> str:
    """The known name that a name is nearly, if there is one."""
    given, plain = name.lower().replace("_", "-"), {each.replace("_", "-"): each for each in known}
    begun = [each for each in plain if each.startswith(given) and len(given) >= PREFIX_CHARS_MIN]
    found = begun or get_close_matches(given, plain, n=1, cutoff=NEAR)
    return plain[found[0]] if found else ""


def flag(given: Mapping[str, object], name: str, field: str) -> bool:
    """A boolean parameter; false if it is absent."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad(f"{field}.{name}", f"{quoted(value)} is neither true nor false")
    return value


def classes(given: Mapping[str, object], field: str) -> int:
    """How many classes the parameter `classification` of an output asks for; 0 for none."""
    value = given.get(CLASSIFICATION, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= CLASSES_MAX:
        raise bad(f"{field}.{CLASSIFICATION}", f"{quoted(value)} is not a number of classes", "send 1 or more")
    return value


# Deadlines


def budget_ns(
    slo: object, elapsed: object, *, timeout: object = None, own_ns: int = 0, remaining_ns: int | None = None
) -> tuple[int | None, int]:
    """(slo_ns, elapsed_ns) of a request from the raw values, which are None if they were not sent.

    `slo` and `elapsed` are milliseconds, counted from when the client sent the request. `timeout` is Triton's, in
    microseconds from when the server received it, and `remaining_ns` what is left of a gRPC deadline: these two can
    only shorten the deadline, which is `own_ns`, the application's, if `slo` was not sent. `slo_ns` is None if the
    application's own deadline holds. Raises a 400 that names the field.
    """
    slo_ns = None if slo is None else duration_ns(SLO, slo, least_ms=0.001)
    elapsed_ns = 0 if elapsed is None else duration_ns(ELAPSED, elapsed, least_ms=0)
    limits = [limit for limit in (remaining_ns, None if timeout is None else timeout_ns(timeout)) if limit]
    if limits:
        until_ns = elapsed_ns + min(limits)
        if until_ns < (own_ns if slo_ns is None else slo_ns):
            slo_ns = until_ns
    return slo_ns, elapsed_ns


def timeout_ns(value: object) -> int:
    """Triton's `timeout` in nanoseconds; 0 for none."""
    field = f"parameters.{TIMEOUT}"
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise bad(field, f"{quoted(value)} is not a time", "send whole microseconds, such as 200000 for 200 ms")
    return value * NS_PER_MICROSECOND


def duration_ns(field: str, value: object, *, least_ms: float) -> int:
    """Convert milliseconds, a number or text, to nanoseconds."""
    fix = f"send milliseconds from {least_ms:g} to {MS_MAX}, such as {field}: 200"
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    try:
        # `float` also takes underscores, and spaces and digits of other scripts
        if isinstance(text, bool) or not isinstance(text, str | int | float) or not _PLAIN.fullmatch(str(text)):
            raise ValueError
        millis = float(text)
    except (ValueError, OverflowError):
        raise bad(field, f"{quoted(text)} is not a number", fix) from None
    if not (math.isfinite(millis) and least_ms <= millis <= MS_MAX):
        raise bad(field, f"{quoted(text)} is out of range", fix)
    return round(millis * NS_PER_MS)
