"""What the page's process asks other processes: questions about a run (`sloop.page.answers`), and what
shadow systems would do (`sloop.page.shadow_system`)."""

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from sloop.vocabulary import Simulation

ANSWER_CPU_S_MAX: Final = 60
"""Seconds of a core for an answer."""
PROCESS_BYTES_MAX: Final = 4 * 2**30
"""Address space of a process that answers, or that runs a shadow system. Python and its libraries take 1 GiB of it."""


class AskRequest(Struct, frozen=True, tag="request", tag_field="kind", forbid_unknown_fields=True):
    """The story of a request."""

    name: Annotated[str, Meta(max_length=128)]
    """Its number, or what its client calls it."""


class AskPlan(Struct, frozen=True, tag="plan", tag_field="kind", forbid_unknown_fields=True):
    """What the applications need at steady rates."""

    rates_rps: dict[str, Annotated[float, Meta(ge=0, le=1e9)]]
    system: str = ""
    """Empty: the one that serves."""
    arrivals: Literal["even", "burst"] = "even"


class AskWhatIf(Struct, frozen=True, tag="what-if", tag_field="kind", forbid_unknown_fields=True):
    """What would have become of the last requests under other systems."""

    last_s: float
    systems: list[str | dict[str, Any]]
    """Names, or `name` with parameters."""


class AskForetold(Struct, frozen=True, tag="foretell", tag_field="kind", forbid_unknown_fields=True):
    """What would become of the last requests of one application under these systems: a server asks for one of its
    systems."""

    application: str
    """Key of the version that asks."""
    asks: Simulation


PageQuestion = AskRequest | AskPlan | AskWhatIf
"""What a viewer may ask."""


class Asked(Struct, frozen=True):
    """A question about the log in a folder, or a file."""

    log: str
    question: PageQuestion | AskForetold
    cpu_s_max: float = ANSWER_CPU_S_MAX


class ShadowSystemSetup(Struct, frozen=True):
    """What a shadow system needs to know."""

    folder: str
    """Of the server's log."""
    run: str
    zero_ns: int
    """The log's instant 0 on this machine's monotonic clock."""
    system: str
    parameters: dict[str, Any]


class ShadowSystemState(Struct, frozen=True, omit_defaults=True):
    """What a shadow system says each second."""

    at_s: float
    """Up to when it has followed the server, in seconds of the log."""
    applications: dict[str, "ShadowSystemRow"] = {}
    error: str = ""
    """Why it has ended."""


class ShadowSystemRow(Struct, frozen=True):
    """What the other system would have of an application."""

    ready: int
    starting: int
    cores: float
    usd_per_h: float
    attainment: float | None
    """Of the last minute's requests; None without any that have ended."""
    p99_ms: float | None
    """Of the last minute; None without answers."""
    plan: str
    why: str
