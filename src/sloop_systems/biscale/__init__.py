"""Biscale (Razavi, dissertation, TU Darmstadt 2024, chapter P4; as Themis: arXiv 2407.14843): larger replicas in place
through a surge, then more of them."""

from typing import Final

from sloop.api import s
from sloop.api.policies import (
    Fifo,
    Full,
    MaxMin,
    MovingMax,
    Open,
    Policies,
    PredictiveDrop,
    RoundRobin,
    SpreadPlacement,
)
from sloop.api.systems import ONE_KIND, System
from sloop_systems.biscale.policy import Biscale

BISCALE: Final = System(
    "biscale",
    "system",
    "Razavi, dissertation, TU Darmstadt 2024, chapter P4; as Themis: arXiv 2407.14843",
    Policies(
        Fifo(),
        Full(patience=1.0),
        RoundRobin(),
        PredictiveDrop(batch="full"),
        Open(),
        # The node with the most free cores, so that a replica has room to grow in place.
        SpreadPlacement(),
        # The published network is `forecast: {name: lstm, weights: biscale}`: no better, and slightly more cores.
        MovingMax(horizon_ns=s(10), window_ns=s(1)),
        Biscale(),
        MaxMin(),
    ),
    ONE_KIND,
)
