"""Policies by verb and name: sloop's own, and those that installed distributions add (`sloop.plugins`)."""

from collections.abc import Mapping
from typing import Any, Final

from sloop.options import Declared, Value, read_options
from sloop.plugins import Registry
from sloop.policies.admit import Bounded, Open, PredictiveAdmit
from sloop.policies.batch import Adaptive, Deadline, Full, Slack, Timeout, WorkConserving
from sloop.policies.divide import MaxMin, Priority, Proportional, Worth
from sloop.policies.drop import Age, Never, PredictiveDrop
from sloop.policies.forecast import Ewma, Last, MovingMax, OracleForecast, Times
from sloop.policies.order import Edf, Fifo
from sloop.policies.place import BestFit, SpreadPlacement
from sloop.policies.provision import AsPlaced, CheapestStart
from sloop.policies.route import (
    Fastest,
    FirstIdle,
    LeastLoaded,
    RoundRobin,
    Smallest,
    SmoothWeighted,
)
from sloop.policies.scale.bodies import Bodies
from sloop.policies.scale.harbor import Harbor
from sloop.policies.scale.kubernetes import Hpa, Kpa, Vpa
from sloop.policies.scale.mixed import Mixed
from sloop.policies.scale.static import Static
from sloop.policies.scale.vertical import Vertical

_OWN: Final[Mapping[str, Mapping[str, type[Any]]]] = {
    "order": {"edf": Edf, "fifo": Fifo},
    "batch": {
        "work_conserving": WorkConserving,
        "timeout": Timeout,
        "full": Full,
        "slack": Slack,
        "deadline": Deadline,
        "adaptive": Adaptive,
    },
    "route": {
        "first_idle": FirstIdle,
        "round_robin": RoundRobin,
        "smooth_weighted": SmoothWeighted,
        "least_loaded": LeastLoaded,
        "fastest": Fastest,
        "smallest": Smallest,
    },
    "drop": {"never": Never, "age": Age, "predictive": PredictiveDrop},
    "admit": {"open": Open, "bounded": Bounded, "predictive": PredictiveAdmit},
    "place": {"best_fit": BestFit, "spread": SpreadPlacement},
    "forecast": {
        "last": Last,
        "times": Times,
        "moving_max": MovingMax,
        "ewma": Ewma,
        "oracle": OracleForecast,
    },
    "scale": {
        "static": Static,
        "hpa": Hpa,
        "kpa": Kpa,
        "vpa": Vpa,
        "vertical": Vertical,
        "mixed": Mixed,
        "harbor": Harbor,
        "bodies": Bodies,
    },
    "divide": {"max_min": MaxMin, "proportional": Proportional, "priority": Priority, "worth": Worth},
    "provision": {"as_placed": AsPlaced, "cheapest_start": CheapestStart},
}

POLICIES: Final[Mapping[str, Registry[type[Any]]]] = {
    verb: Registry("sloop.policies", own, type, prefix=verb) for verb, own in _OWN.items()
}


def build(verb: str, name: str, parameters: Declared | None = None) -> object:
    """The policy `name` for `verb`, e.g. `build("batch", "timeout", {"wait_ms": 5})`.

    Raises `InputError` for an unknown verb, policy or key, a wrong type, or a value out of range.
    """
    kind = Value(name).entry(Value(verb).entry(POLICIES, "verb"), f"{verb} policy")
    return read_options(kind, {} if parameters is None else parameters)
