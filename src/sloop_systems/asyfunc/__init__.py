"""AsyFunc (submission to SoCC 2023): replicas of the whole model for the mean rate, shadows of layers for bursts."""

from dataclasses import replace
from typing import Final

from sloop.api import s
from sloop.api.policies import (
    Adaptive,
    Age,
    Bodies,
    Fifo,
    FirstIdle,
    Full,
    Last,
    MaxMin,
    Never,
    Open,
    OracleForecast,
    Policies,
    Smallest,
    SpreadPlacement,
    Times,
)
from sloop.api.systems import ONE_KIND, SIMULATED, System
from sloop_systems.asyfunc.policy import ByCapacity, OfflineBatch

SUBMISSION: Final = "AsyFunc (submission to SoCC'23; its specification, section 5.1)"

_BODIES: Final = Bodies(gamma=1.0, bursts="shadows", counts_shadows=True)
"""As published but for `objective`: shadows with all cores that are left when the rate exceeds the capacity of all
pairs. `demand` is our specification's; the publication maximises an efficiency (`literal`, misprinted as `printed`)."""
_ADAPTIVE: Final = Policies(
    Fifo(), Adaptive(), Smallest(), Age(), Open(),
    # The node with the most free cores, so that a body has room for a shadow.
    SpreadPlacement(), Last(window_ns=s(10)), _BODIES, MaxMin(),
)  # fmt: skip
_STATIC: Final = replace(_ADAPTIVE, batch=Full(patience=1.0), route=FirstIdle(), drop=Never())
"""A fixed batch that waits for a fixed time; requests are never dropped."""

ASYFUNC: Final = System("asyfunc", "system", SUBMISSION, _ADAPTIVE, ONE_KIND)
"""Replicas of the whole model for the mean rate, shadows of some of its layers for bursts."""
ASYFUNC_NOADAPT: Final = System(
    "asyfunc-noadapt", "baseline", f"{SUBMISSION}: AsyFunc⁻, without adaptive scheduling", _STATIC, ONE_KIND
)
ASYFUNC_NOLLS: Final = System(
    "asyfunc-nolls",
    "baseline",
    f"{SUBMISSION}: AsyFunc⁻, without layer-level scaling",
    replace(_ADAPTIVE, scale=replace(_BODIES, shadows=False)),
    ONE_KIND,
)
"""The publication calls both AsyFunc⁻."""
ASYFUNC_NONE: Final = System(
    "asyfunc-none",
    "baseline",
    f"{SUBMISSION}: without both",
    replace(_STATIC, scale=replace(_BODIES, shadows=False)),
    ONE_KIND,
)
BATCH: Final = System(
    "batch",
    "baseline",
    f"BATCH (Ali et al., SC 2020) as compared with in {SUBMISSION}",
    replace(_STATIC, scale=OfflineBatch()),
    ONE_KIND,
)
"""Equal replicas and fixed batches, chosen beforehand."""
BATCH_PLUS: Final = System(
    "batch-plus",
    "baseline",
    f"BATCH⁺, with adaptive scheduling, as compared with in {SUBMISSION}",
    replace(_ADAPTIVE, scale=OfflineBatch()),
    ONE_KIND,
)
ON_DEMAND: Final = System(
    "on-demand",
    "baseline",
    f"{SUBMISSION}: OD",
    replace(_ADAPTIVE, forecast=Last(), scale=ByCapacity(period_ns=s(1))),
    ONE_KIND,
)
"""As many replicas as the rate needs: the rate of now,"""
LAST_VALUE: Final = System(
    "last-value", "baseline", f"{SUBMISSION}: LV", replace(_ADAPTIVE, scale=ByCapacity()), ONE_KIND
)
"""of the last period,"""
K_LAST_VALUE: Final = System(
    "k-last-value",
    "baseline",
    f"{SUBMISSION}: k-LV, k = 1.5",
    replace(_ADAPTIVE, forecast=Times(factor=1.5, window_ns=s(10)), scale=ByCapacity()),
    ONE_KIND,
)
"""and half as much again."""
OPT: Final = System(
    "opt",
    "baseline",
    f"{SUBMISSION}: OPT",
    replace(_ADAPTIVE, forecast=OracleForecast(horizon_ns=s(10)), scale=ByCapacity(period_ns=s(1))),
    ONE_KIND,
    SIMULATED,
)
"""The optimum: the future is known, and every replica is there when it is needed."""
