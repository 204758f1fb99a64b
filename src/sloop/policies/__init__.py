"""Policies: every decision the core leaves open, one per file, in a folder named for its verb.

This is the registry and nothing else; `sloop.policies.build` makes policies from what a user wrote.
"""

from collections.abc import Mapping
from typing import Any, Final

from sloop.policies.admit.bounded import Bounded
from sloop.policies.admit.open import Open
from sloop.policies.admit.predictive import Predictive as AdmitPredictive
from sloop.policies.batch.deadline import Deadline
from sloop.policies.batch.full import Full
from sloop.policies.batch.slack import Slack
from sloop.policies.batch.timeout import Timeout
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.policies.drop.age import Age
from sloop.policies.drop.never import Never
from sloop.policies.drop.predictive import Predictive as DropPredictive
from sloop.policies.forecast.ewma import Ewma
from sloop.policies.forecast.holt import Holt
from sloop.policies.forecast.last import Last
from sloop.policies.forecast.lstm import Lstm
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.forecast.oracle import Oracle
from sloop.policies.forecast.p99_rate import P99Rate
from sloop.policies.forecast.times import Times
from sloop.policies.order.edf import Edf
from sloop.policies.order.fifo import Fifo
from sloop.policies.place.best_fit import BestFit
from sloop.policies.place.spread import Spread
from sloop.policies.route.first_idle import FirstIdle
from sloop.policies.route.least_loaded import LeastLoaded
from sloop.policies.route.round_robin import RoundRobin
from sloop.policies.route.smooth_weighted import SmoothWeighted
from sloop.policies.scale.biscale import Biscale
from sloop.policies.scale.ds2 import Ds2
from sloop.policies.scale.fa2 import Fa2
from sloop.policies.scale.fa2_single import Fa2Single
from sloop.policies.scale.grandslam import Grandslam
from sloop.policies.scale.hpa import Hpa
from sloop.policies.scale.inferline import Inferline
from sloop.policies.scale.ipa import Ipa
from sloop.policies.scale.kpa import Kpa
from sloop.policies.scale.sponge import Sponge
from sloop.policies.scale.static import Static
from sloop.policies.scale.vertical import Vertical
from sloop.policies.scale.vpa import Vpa

POLICIES: Final[Mapping[str, Mapping[str, type[Any]]]] = {
    "order": {"edf": Edf, "fifo": Fifo},
    "batch": {
        "work_conserving": WorkConserving,
        "timeout": Timeout,
        "full": Full,
        "slack": Slack,
        "deadline": Deadline,
    },
    "route": {
        "first_idle": FirstIdle,
        "round_robin": RoundRobin,
        "smooth_weighted": SmoothWeighted,
        "least_loaded": LeastLoaded,
    },
    "drop": {"never": Never, "age": Age, "predictive": DropPredictive},
    "admit": {"open": Open, "bounded": Bounded, "predictive": AdmitPredictive},
    "place": {"best_fit": BestFit, "spread": Spread},
    "forecast": {
        "last": Last,
        "times": Times,
        "moving_max": MovingMax,
        "ewma": Ewma,
        "holt": Holt,
        "p99_rate": P99Rate,
        "lstm": Lstm,
        "oracle": Oracle,
    },
    "scale": {
        "static": Static,
        "sponge": Sponge,
        "fa2": Fa2,
        "ds2": Ds2,
        "inferline": Inferline,
        "grandslam": Grandslam,
        "fa2_single": Fa2Single,
        "hpa": Hpa,
        "kpa": Kpa,
        "vpa": Vpa,
        "ipa": Ipa,
        "biscale": Biscale,
        "vertical": Vertical,
    },
}
