"""What IPA's publication shows: cores and 100 · PAS read off its figures, to about one unit; printed violations.

Source: Razavi, dissertation (TU Darmstadt 2024), figures P3.8 to P3.16, and notebooks of the public artefact, as the
specification (5.3) lists them.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from sloop.reproduce.ipa.trials import Policy


class Seen(Struct, frozen=True):
    """Cores and 100 · PAS: one value of each where they are steady, two for before and during the burst."""

    cores: tuple[float, ...]
    pas: tuple[float, ...]


def _seen(cores: tuple[float, ...], pas: tuple[float, ...]) -> Seen:
    return Seen(cores, pas)


STEADY_LOW: Final[Mapping[str, Mapping[Policy, Seen]]] = {
    "video": {
        "ipa": _seen((4,), (34.8,)),
        "fa2-low": _seen((4,), (31.9,)),
        "fa2-high": _seen((8,), (43.9,)),
        "rim": _seen((12,), (43.9,)),
    },
    "audio-qa": {
        "ipa": _seen((9,), (48.7,)),
        "fa2-low": _seen((8,), (45.3,)),
        "fa2-high": _seen((17,), (53.8,)),
        "rim": _seen((25,), (48.7,)),
    },
    "audio-sent": {
        "ipa": _seen((16,), (59.1,)),
        "fa2-low": _seen((8,), (46.75,)),
        "fa2-high": _seen((19,), (59.1,)),
        "rim": _seen((45,), (59.1,)),
    },
    "sum-qa": {
        "ipa": _seen((18,), (30.35,)),
        "fa2-low": _seen((5,), (24.9,)),
        "fa2-high": _seen((34,), (30.7,)),
        "rim": _seen((32,), (30.2,)),
    },
    "nlp": {
        "ipa": _seen((98,), (12.68,)),
        "fa2-low": _seen((25,), (10.63,)),
        "fa2-high": _seen((113,), (12.68,)),
        "rim": _seen((105,), (10.63,)),
    },
}
STEADY_HIGH: Final[Mapping[str, Mapping[Policy, Seen]]] = {
    "video": {
        "ipa": _seen((10,), (31.9,)),
        "fa2-low": _seen((10,), (31.9,)),
        "fa2-high": _seen((21,), (43.9,)),
        "rim": _seen((12,), (33.5,)),
    },
    "audio-qa": {
        "ipa": _seen((33,), (48.7,)),
        "fa2-low": _seen((34,), (45.3,)),
        "fa2-high": _seen((95,), (53.8,)),
        "rim": _seen((33,), (48.7,)),
    },
    "audio-sent": {
        "ipa": _seen((31,), (53.5,)),
        "fa2-low": _seen((30,), (46.75,)),
        "fa2-high": _seen((95,), (59.1,)),
        "rim": _seen((32,), (53.5,)),
    },
    "nlp": {
        "ipa": _seen((125,), (10.63,)),
        "fa2-low": _seen((105,), (10.63,)),
        "fa2-high": _seen((505,), (12.68,)),
        "rim": _seen((105,), (10.63,)),
    },
}
BURSTY: Final[Mapping[str, Mapping[Policy, Seen]]] = {
    "video": {
        "ipa": _seen((4, 10), (34.8, 31.9)),
        "fa2-low": _seen((4, 10), (31.9, 31.9)),
        "fa2-high": _seen((8, 21), (43.9, 43.9)),
        "rim": _seen((12, 12), (43.9, 33.5)),
    },
    "audio-qa": {
        "ipa": _seen((17, 33), (53.8, 48.7)),
        "fa2-low": _seen((9, 36), (45.3, 45.3)),
        "fa2-high": _seen((17, 75), (53.8, 53.8)),
        "rim": _seen((60, 33), (53.8, 48.7)),
    },
    "audio-sent": {
        "ipa": _seen((17, 28), (59.1, 53.5)),
        "fa2-low": _seen((8, 34), (46.75, 46.75)),
        "fa2-high": _seen((16, 72), (59.1, 59.1)),
        "rim": _seen((59, 32), (59.1, 53.5)),
    },
    "sum-qa": {
        "ipa": _seen((18, 18), (30.35, 26.75)),
        "fa2-low": _seen((6, 19), (24.9, 24.9)),
        "fa2-high": _seen((34, 119), (30.7, 30.7)),
        "rim": _seen((32, 20), (30.2, 26.75)),
    },
    "nlp": {
        "ipa": _seen((130, 170), (12.68, 10.63)),
        "fa2-low": _seen((25, 105), (10.63, 10.63)),
        "fa2-high": _seen((130, 520), (12.68, 12.68)),
        "rim": _seen((105, 105), (10.63, 10.63)),
    },
}

PREFERENCES: Final[Mapping[str, tuple[tuple[float, float], ...]]] = {
    "video": ((25, 53), (4, 42), (3, 34)),
    "audio-qa": ((48, 55), (18, 52), (13, 48.7)),
    "audio-sent": ((28, 59), (17, 57), (12, 53.5)),
    "sum-qa": ((31, 30.4), (17, 29), (9, 26.7)),
    "nlp": ((185, 12.5), (107, 12), (47, 10.6)),
}
"""Cores and 100 · PAS with accuracy, balance and resources preferred."""

VIOLATIONS: Final[Mapping[str, tuple[float, float, float]]] = {
    "video": (0.48, 2.55, 0.30),
    "audio-qa": (0.91, 4.73, 0.91),
    "audio-sent": (0.35, 0.96, 0.28),
    "sum-qa": (5.6, 11.4, 2.5),
    "nlp": (1.8, 3.2, 0.6),
}
"""Percent of the bursty excerpt's requests with the LSTM, reactive and oracle forecaster."""
